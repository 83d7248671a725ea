"""Runs jobs on Ray, and provides the reward agent as an actor for any training loop. Imported only where Ray is used.

`gleanrl.runtime.ray.run` trains and evaluates; `reward_actor` works on its own.
"""

from gleanrl.runtime.ray.rewards import CALLS, RewardActor, RewardHandle, reward_actor

__all__ = ["CALLS", "RewardActor", "RewardHandle", "reward_actor"]
