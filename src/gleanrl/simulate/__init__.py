"""Simulates the training loop on a virtual clock."""
