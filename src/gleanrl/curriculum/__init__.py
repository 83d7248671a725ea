"""Curricula: they decide which tasks a run plays next."""
