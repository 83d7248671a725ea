"""Fills a pool with the successes of another pool, or of the rollouts of another run.

Called by `gleanrl pool seed` and for ``replay.seed_from``; `gleanrl.runtime.pool_sources` reads the run's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from gleanrl.experience.pool import browse
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.pool.transfer import Intake, Moved, check_tokenizers
from gleanrl.types import Task, Trajectory


def seed_from_pool(pool: ExperiencePool, source: Path, *, step: int = 0, trust: bool = False) -> Moved:
    """Store every trajectory of the pool at ``source``, with its task's latest rate.

    Args:
        step: of this run; the age of the trajectories counts from it.
        trust: where one side does not say its tokenizer, it is the same.

    Raises:
        UserError: there is no pool at ``source``, or its tokens are (or may be) of another tokenizer.
    """
    with browse.reading(source) as db, Intake(pool) as intake:
        check(pool, browse.tokenizer(db), source, trust=trust)
        for found in browse.entries(db):
            if isinstance(found, browse.Entry):
                line = found.line
                rate = {"attempts": line.attempts, "successes": line.successes}
                sampled = {"temperature": line.temperature, "version": step, "step": step}
                intake.take(found.task, found.stored.trajectory, **rate, **sampled)
            else:
                intake.moved.left_out["damaged"] += 1
    return intake.moved


def seed_from_groups(
    pool: ExperiencePool,
    read: Callable[[], Iterable[Sequence[Trajectory]]],
    tasks: Mapping[str, Task],
    *,
    temperature: float,
    whole: bool,
    step: int = 0,
) -> Moved:
    """Store every success of groups of fresh trajectories, with the rate of its task's latest group.

    Args:
        read: gives the groups, oldest first; called twice, because the rates come first.
        tasks: by id; a success on any other task is left out.
        temperature: that they were sampled at.
        whole: the groups are complete. If not, no rate is known.
        step: of this run; the age of the trajectories counts from it.
    """
    threshold = pool.settings.success_threshold
    rates: dict[str, tuple[int, int]] = {}
    for group in read() if whole else ():
        valid = [t for t in group if t.score.valid]
        if valid:
            rates[valid[0].task_id] = (sum(t.score.value >= threshold for t in valid), len(valid))
    with Intake(pool) as intake:
        for group in read():
            for trajectory in group:
                if not trajectory.score.valid or trajectory.score.value < threshold:
                    continue
                task = tasks.get(trajectory.task_id)
                if task is None:
                    intake.moved.left_out["its task is not one of its run's"] += 1
                    continue
                successes, attempts = rates.get(task.id, (0, 0))
                rate = {"attempts": attempts, "successes": successes}
                intake.take(task, trajectory, version=step, step=step, temperature=temperature, **rate)
    return intake.moved


def check(pool: ExperiencePool, theirs: str | None, of: object, *, trust: bool) -> None:
    """`check_tokenizers` for an open pool."""
    with browse.reading(pool.path) as db:
        own = browse.tokenizer(db)
    check_tokenizers(own, theirs, of, empty=not pool.stats()["trajectories"], trust=trust)
