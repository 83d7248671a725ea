"""Vectorised environments with continuous actions, and an off-policy actor-critic that learns from the buffer.

`RolloutWorker` steps environments in action chunks and puts trajectories on a `Channel`; `ActorWorker` takes them, adds
them to a `TrajectoryReplayBuffer` and trains SAC from its samples. ``gleanrl train pendulum`` runs them.
"""
