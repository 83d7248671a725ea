"""Advantages, policy losses, corrections, batches: pure functions."""
