"""Makes the source of a run's rewards: the environments, or a reward agent with its journal in the run folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gleanrl.config.settings import RewardSettings
from gleanrl.protocols import Metrics, Reward
from gleanrl.rewards import EnvironmentReward, Scorer
from gleanrl.rewards.adapter import check_reward, load_reward
from gleanrl.runtime.run_folder import RunFolder

JOURNAL = "rewards.sqlite"


@dataclass(frozen=True, slots=True)
class RewardSource:
    """A run's reward for training and for evaluation. ``metrics`` returns its metrics since the last call."""

    train: Reward
    evaluation: Reward
    metrics: Callable[[], Metrics]


def make_scorer(settings: RewardSettings) -> Scorer | None:
    """Make the scorer that the settings name; None if the environments score.

    A run makes the scorer first, so that a mistake is reported before anything costly starts.

    Raises:
        UserError: there is no such reward, its options do not fit, or it cannot be made.
    """
    check_reward(settings.name, options=settings.options)
    if settings.name == "environment":
        return None
    return load_reward(settings.name, options=settings.options, settings=settings)


@asynccontextmanager
async def reward_source(
    settings: RewardSettings, folder: RunFolder | None, scorer: Scorer | None = None
) -> AsyncIterator[RewardSource]:
    """Yield the reward that the settings name, open while the block runs.

    The journal in ``folder`` keeps finished rewards, so that a resumed run does not request them again. Without a
    ``folder`` there is no journal. ``scorer`` is the result of `make_scorer` if that was called before.

    Raises:
        UserError: there is no such reward, or its options do not fit.
    """
    if settings.name == "environment":  # no agent is needed, because no requests are sent
        reward = EnvironmentReward()
        yield RewardSource(reward, reward, dict)
        return
    from gleanrl.rewards.agent import RewardAgent  # imported here, because it loads further packages

    journal = folder.path / JOURNAL if folder is not None and settings.journal else None
    async with RewardAgent(scorer, settings, journal=journal) as agent:
        yield RewardSource(agent, agent.lane("eval"), agent.metrics)
