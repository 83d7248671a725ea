"""The environment ``textworld``: generated TextWorld games. See `gleanrl.environments.textworld.taskset`."""
