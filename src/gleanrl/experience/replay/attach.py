"""Adds stored successes to groups that another trainer's loop (TRL, verl) has already sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.replay.selection import ranked, source_places, within_limits
from gleanrl.types import Group, GroupSpec
from gleanrl.utils.errors import UserError


def attach_replayed(
    groups: Sequence[Group], pool: ExperiencePool, *, seed: int = 0, step: int | None = None
) -> list[Group]:
    """Add stored successes of the same task to each group, after its fresh members, and return the new groups.

    Use this in a training loop that chooses its prompts and samples the groups itself. In a run of this package,
    `ReplayCurriculum` adds stored successes and also chooses tasks from the pool.

    Each group gets up to ``per_group`` successes. If its task has more, those that the pool's setting ``select`` ranks
    first are added. ``source_limits`` limits the share of a source, of ``per_group`` successes for each group. Settings
    about planning, such as ``task_ratio`` and ``placement``, have no effect here. The pool counts each added success as
    used. A group is returned unchanged if its task is retired, if the pool's task with this id has another prompt or
    payload, if the pool contains no success on it that the limits allow, or if no fresh member has a valid score,
    because the advantage of a replayed member is computed relative to the fresh ones.

    Call this function before `ExperiencePool.observe`, which stores the successes of the groups. In the opposite order
    a group would get its own successes again.

    Args:
        groups: groups of fresh members only. Two groups of the same task may get the same successes.
        pool: the pool, open for writing.
        seed: seed of the random choice with ``select = "random"``, for example the number of the step.
        step: number of the step that will learn from the groups, from which the ages of stored trajectories are
            counted, for ``max_age`` and for a ``select`` of your own that looks at ages; by default ``seed``.

    Raises:
        UserError: the pool's settings ask for what needs the current policy or a reward, which this function does not
            have: ``entropy_from = "current"``, ``max_ratio`` or ``reverify``.
        ValueError: a group contains replayed members already.
    """
    settings = pool.settings
    for name, needed in {
        "entropy_from": settings.entropy_from == "current",
        "max_ratio": settings.max_ratio is not None,
        "reverify": settings.reverify,
    }.items():
        if needed:
            raise UserError(
                f"attach_replayed cannot apply replay.{name} = {getattr(settings, name)!r}, because it knows neither "
                "the current policy nor the reward; leave it out, and check the added trajectories in your own loop"
            )
    names = [group.spec.task.id for group in groups]
    for group in groups:
        if group.spec.replayed:
            raise ValueError(f"the group of task {group.spec.task.id!r} already holds replayed members")
    random, step = np.random.default_rng(seed), seed if step is None else step
    retired, found = pool.retired(names), pool.stored(names)
    left = source_places(settings.source_limits, len(groups) * settings.per_group, random)
    keys: list[int] = []
    mixed: list[Group] = []
    for group, name in zip(groups, names, strict=True):
        usable = name not in retired and group.valid_fresh and pool.has_task(group.spec.task)
        stored = found[name] if usable else []
        if settings.max_age is not None:
            stored = [each for each in stored if step - each.version <= settings.max_age]
        stored = within_limits(stored, left, settings.per_group)
        order = ranked(stored, settings.select, random, step=step)
        chosen = [stored[index] for index in order[: settings.per_group]]
        keys += [each.key for each in chosen]
        replayed = tuple(each.trajectory for each in chosen)
        spec = GroupSpec(group.spec.task, len(group.trajectories), replayed, group.spec.greedy)
        mixed.append(replace(group, spec=spec, trajectories=(*group.trajectories, *replayed)))
    if keys:
        pool.used(keys)
    return mixed
