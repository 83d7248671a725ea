"""Vectorised environments with continuous actions, and an off-policy actor-critic that learns from the buffer.

`RolloutWorker` steps environments in action chunks and makes trajectories. `ActorWorker` adds them to a
`TrajectoryReplayBuffer` and trains SAC on its samples. `Training` alternates or overlaps the two, and
`gleanrl.runtime.embodied` builds them from a configuration (``gleanrl train pendulum``).
"""
