"""A run on Ray, and the reward agent as an actor for anybody's loop; imported only where Ray is wanted.

`gleanrl.runtime.ray.run` trains and evaluates; `reward_actor` works alone.
"""

from gleanrl.runtime.ray.rewards import CALLS, RewardActor, RewardHandle, reward_actor

__all__ = ["CALLS", "RewardActor", "RewardHandle", "reward_actor"]
