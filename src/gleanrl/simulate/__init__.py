"""Simulates the training loop on a virtual clock, to predict the cost of a schedule; see `simulation.simulate`."""
