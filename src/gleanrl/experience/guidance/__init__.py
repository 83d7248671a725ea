"""Guidance: retrieves texts about past successes and inserts them into the prompt of some rollouts."""
