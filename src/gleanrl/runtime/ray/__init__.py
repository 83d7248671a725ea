"""Runs jobs whose parts are Ray actors, and provides the reward agent as an actor for other training loops.

`gleanrl.runtime.ray.run` is the runtime of `gleanrl train --runtime ray`. `reward_actor` can be used without it, in the
training loop of another library. Nothing imports this package unless Ray is used.
"""

from gleanrl.runtime.ray.rewards import RewardHandle, reward_actor

__all__ = ["RewardHandle", "reward_actor"]
