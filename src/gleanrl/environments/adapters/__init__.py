"""Tasksets for environments of other libraries: gymnasium, OpenEnv, reasoning-gym, TextArena and verifiers.

`gleanrl.environments.load_taskset` imports the module of the environment that a run uses, and no other module.
"""
