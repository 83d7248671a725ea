"""Trains a soft actor-critic (SAC) in vectorised Gymnasium environments with continuous actions, from a replay buffer.

`RolloutWorker` steps environments in action chunks and records trajectories. `ActorWorker` adds them to a
`TrajectoryReplayBuffer` and trains SAC on samples of it. `Training` alternates the two or runs them at the same time.
`gleanrl.runtime.embodied` builds all of them from a configuration (``gleanrl train pendulum``).

An action chunk is a fixed number C of consecutive actions that the policy returns at once. Executing it is a chunk
step.
"""
