"""Where a run's rewards come from: the environments, or a reward agent with its journal in the run folder."""

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
    """A reward with a lane for training and one for evaluation, and its metrics since they were last asked for."""

    train: Reward
    evaluation: Reward
    metrics: Callable[[], Metrics]


def make_scorer(settings: RewardSettings) -> Scorer | None:
    """What scores, by the settings; None where the environments do. For a run to make before it spends time on more.

    Raises:
        UserError: there is no such reward, its options do not fit, or it cannot be had.
    """
    check_reward(settings.name, options=settings.options)
    if settings.name == "environment":
        return None
    return load_reward(settings.name, options=settings.options, settings=settings)


@asynccontextmanager
async def reward_source(
    settings: RewardSettings, folder: RunFolder | None, scorer: Scorer | None = None
) -> AsyncIterator[RewardSource]:
    """The reward that the settings name, open while the block runs.

    ``folder``: of the run whose journal keeps finished rewards, so that a resumed run does not ask for them again; None
    keeps none. ``scorer``: of `make_scorer`, where that was called before.

    Raises:
        UserError: there is no such reward, or its options do not fit.
    """
    if settings.name == "environment":  # nothing to wait for or to limit: an agent would only copy it
        reward = EnvironmentReward()
        yield RewardSource(reward, reward, dict)
        return
    from gleanrl.rewards.agent import RewardAgent  # and what it needs of other packages

    journal = folder.path / JOURNAL if folder is not None and settings.journal else None
    async with RewardAgent(scorer, settings, journal=journal) as agent:
        yield RewardSource(agent, agent.lane("eval"), agent.metrics)
