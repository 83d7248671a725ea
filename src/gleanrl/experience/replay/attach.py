"""Adds stored successes to groups that another trainer's loop (TRL, verl) has already sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.replay.selection import ranked
from gleanrl.types import Group, GroupSpec


def attach_replayed(groups: Sequence[Group], pool: ExperiencePool, *, seed: int = 0) -> list[Group]:
    """Return the groups with up to ``per_group`` stored successes after the fresh members of each.

    This is for a loop that chooses and samples its prompts itself; with `ReplayCurriculum` the pool chooses them too.
    The pool's setting `select` ranks the successes, with their recorded entropy, and each one attached is counted as
    used. A group is returned unchanged if its task has no success or is retired, or if no fresh member has a valid
    score with which a stored one could be compared.

    Call this function before `ExperiencePool.observe`. Otherwise a group would get its own successes again.

    Args:
        groups: fresh groups; two groups of one task get the same successes.
        seed: used only with ``select = "random"``; for example the number of the step.

    Raises:
        ValueError: a group already holds replayed members.
    """
    names = [group.spec.task.id for group in groups]
    for group in groups:
        if group.spec.replayed:
            raise ValueError(f"the group of task {group.spec.task.id!r} already holds replayed members")
    random = np.random.default_rng(seed)
    retired, found = pool.retired(names), pool.stored(names)
    keys: list[int] = []
    mixed: list[Group] = []
    for group, name in zip(groups, names, strict=True):
        stored = found[name] if name not in retired and group.valid_fresh else []
        order = ranked([each.entropy for each in stored], pool.settings.select, random)
        chosen = [stored[index] for index in order[: pool.settings.per_group]]
        keys += [each.key for each in chosen]
        replayed = tuple(each.trajectory for each in chosen)
        spec = GroupSpec(group.spec.task, len(group.trajectories), replayed, group.spec.greedy)
        mixed.append(replace(group, spec=spec, trajectories=(*group.trajectories, *replayed)))
    if keys:
        pool.used(keys)
    return mixed
