"""The experience pool, which stores successful trajectories in one SQLite file."""
