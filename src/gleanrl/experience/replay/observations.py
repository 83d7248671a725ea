"""Trajectories for the update of ``replay.observation_batch``, which trains on the environment's answers in them.

The target of an observation token, p(observation | history, action), is the environment's own distribution, which does
not depend on the policy that chose the actions. So trajectories of any age and outcome can be trained on, without a
probability ratio and a clip.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gleanrl.algorithms.batch import Batch, GroupSamples, build_samples
from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool import admission
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.types import Group, GroupSpec, Task, Trajectory

DEMONSTRATIONS = "demonstrations"
"""Source whose trajectories are left out: the actions of an expert, who may know what the policy cannot. They are left
out too if they were stored under another source."""


def has_observations(trajectory: Trajectory) -> bool:
    """Return whether the trajectory has the span of an observation (`Turn.body`)."""
    return any(turn.body is not None for turn in (*trajectory.turns(), *trajectory.ending))


def choose_from_pool(
    pool: ExperiencePool, settings: ReplaySettings, random: np.random.Generator
) -> tuple[list[Trajectory], int, int]:
    """Draw up to ``observation_batch`` stored trajectories, one each of tasks that are drawn uniformly.

    Of a task, one is drawn from its successes and failures that have observations. Demonstrations, and trajectories
    from a source that ``source_limits`` limits, are left out.

    Returns the trajectories, how many of those tasks' trajectories have no observations because they were stored
    without, and how many were left out for their source.
    """
    names = pool.draw_names(settings.observation_batch, random)
    successes, failures = pool.stored(names), pool.failures(names)
    chosen: list[Trajectory] = []
    without = excluded = 0
    for name in names:
        own = [
            stored.trajectory
            for stored in (*successes[name], *failures[name])
            if stored.source != DEMONSTRATIONS
            and stored.trajectory.info.get("origin") != admission.DEMONSTRATION
            and settings.source_limits.get(stored.source, 1.0) >= 1.0
        ]
        usable = [trajectory for trajectory in own if has_observations(trajectory)]
        without += len(own) - len(usable)
        excluded += len(successes[name]) + len(failures[name]) - len(own)
        if usable:
            chosen.append(usable[int(random.integers(len(usable)))])
    return chosen, without, excluded


def choose_from_step(groups: Sequence[Group], count: int, random: np.random.Generator) -> list[Trajectory]:
    """Draw up to ``count`` of the valid fresh members of ``groups`` that have observations."""
    members = [member for group in groups for member in group.valid_fresh if has_observations(member)]
    return [members[index] for index in random.permutation(len(members))[:count]]


def observation_batch(trajectories: Sequence[Trajectory], max_context: int, coefficient: float) -> Batch:
    """Return a batch of which only the observation loss is trained, with the factor ``coefficient``."""
    parts: list[GroupSamples] = []
    for trajectory in trajectories:
        # As a fresh member, because only samples of fresh members mark their observations.
        group = Group(GroupSpec(Task(trajectory.task_id), 1), (trajectory,), -1)
        samples = build_samples([group], max_context, observations=True).samples
        observed = tuple(sample.only_observed() for sample in samples if sample.observed is not None)
        if observed:
            parts.append(GroupSamples(observed, tokens=0, sequences=0, invalid=0, zero_variance=False))
    return Batch(tuple(parts), observation_coefficient=coefficient)
