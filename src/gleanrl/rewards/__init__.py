"""Rewards: functions, models and services that score trajectories, and the agent that calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gleanrl.rewards.request import EnvironmentReward, NotApplicable, Request, Scorer
from gleanrl.utils.retry import Fatal, Retryable

if TYPE_CHECKING:
    from gleanrl.rewards.agent import RewardAgent
    from gleanrl.rewards.blocking import BlockingRewardAgent

__all__ = [
    "BlockingRewardAgent",
    "EnvironmentReward",
    "Fatal",
    "NotApplicable",
    "Request",
    "Retryable",
    "RewardAgent",
    "Scorer",
]


def __getattr__(name: str) -> Any:
    # The agents are imported on first use. Their modules import many others, which code that only defines a reward
    # does not need.
    if name == "RewardAgent":
        from gleanrl.rewards.agent import RewardAgent

        return RewardAgent
    if name == "BlockingRewardAgent":
        from gleanrl.rewards.blocking import BlockingRewardAgent

        return BlockingRewardAgent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
