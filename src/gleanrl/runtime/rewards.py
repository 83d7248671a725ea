"""Makes the reward of a run: the environments' own scores, or a reward agent that sends requests to a scorer."""

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
    """The rewards of a run: ``train`` scores training episodes, ``evaluation`` scores evaluation episodes.

    ``metrics`` returns the metrics of both since its last call.
    """

    train: Reward
    evaluation: Reward
    metrics: Callable[[], Metrics]


def make_scorer(settings: RewardSettings) -> Scorer | None:
    """Make the scorer that ``reward.name`` selects, or return None if it is "environment".

    A run calls this first, so that a wrong setting is reported before tasks and models are made.

    Raises:
        UserError: there is no reward of this name, it does not accept the options, or it cannot be made.
    """
    check_reward(settings.name, options=settings.options)
    if settings.name == "environment":
        return None
    return load_reward(settings.name, options=settings.options, settings=settings)


@asynccontextmanager
async def reward_source(
    settings: RewardSettings, folder: RunFolder | None, scorer: Scorer | None = None
) -> AsyncIterator[RewardSource]:
    """Yield the rewards that ``settings`` select. A reward agent is open while the block runs and closed after it.

    Args:
        folder: run folder for the journal, a database of finished scores that lets a resumed run avoid repeating its
            requests. None = no journal.
        scorer: the result of `make_scorer`, if it was called before; None = make the scorer here.

    Raises:
        UserError: there is no reward of this name, or it does not accept the options.
    """
    if settings.name == "environment":  # the score is already in the trajectory, so no reward agent is needed
        reward = EnvironmentReward()
        yield RewardSource(reward, reward, dict)
        return
    # Imported only here, because this module loads packages that a run without a reward agent does not need.
    from gleanrl.rewards.agent import RewardAgent

    journal = folder.path / JOURNAL if folder is not None and settings.journal else None
    async with RewardAgent(scorer, settings, journal=journal) as agent:
        yield RewardSource(agent, agent.lane("eval"), agent.metrics)
