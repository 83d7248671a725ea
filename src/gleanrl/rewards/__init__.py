"""Rewards: what a trajectory is worth, from wherever that is known."""

from gleanrl.rewards.environment import EnvironmentReward

__all__ = ["EnvironmentReward"]
