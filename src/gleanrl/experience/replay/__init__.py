"""Replay: stored trajectories join later groups."""
