"""A pool that starts with the successes of another pool, or of another run's rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from gleanrl.config import loading as configuration
from gleanrl.config.settings import Config
from gleanrl.environments import load_taskset
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool import browse
from gleanrl.experience.pool.transfer import Intake, Moved, check_tokenizers
from gleanrl.runtime.prepare import tokenizer_fingerprint
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Task, Trajectory
from gleanrl.utils.errors import UserError


def seed_pool(pool: ExperiencePool, source: Path | str, *, trust: bool = False) -> int:
    """Put the successes of ``source``, a pool's file or a run's folder, into ``pool``; how many were stored.

    Of a run that has a pool its pool is taken, of another its rollouts. Their age counts from step 0 of this run.
    ``trust``: where one side does not say its tokenizer, it is the same.

    Raises:
        UserError: there is nothing at ``source``, or its tokens are (or may be) of another tokenizer.
    """
    path = Path(source)
    if path.is_dir():
        folder = RunFolder.existing(path)
        path = browse.pool_of(folder)
        if not path.is_file():
            return seed_from_rollouts(pool, folder, trust=trust).stored
    return seed_from_pool(pool, path, trust=trust).stored


def seed_from_pool(pool: ExperiencePool, source: Path, *, step: int = 0, trust: bool = False) -> Moved:
    """Every trajectory of the pool at ``source``, with its task's latest rate.

    ``step``: of this run, from which their age counts. Raises as `seed_pool`.
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


def seed_from_rollouts(pool: ExperiencePool, folder: RunFolder, *, step: int = 0, trust: bool = False) -> Moved:
    """Every fresh success in the rollout files of a run, with the rate of its task's latest group there.

    Rollouts name their tasks only; the tasks themselves are made again from the run's configuration. ``step``: of this
    run, from which their age counts. Raises as `seed_pool`.
    """
    steps = folder.rollout_steps()
    if not steps:
        raise UserError(f"{folder.path} has no rollouts to seed from; it ran with monitor.rollouts_per_step = 0?")
    check(pool, saved_tokenizer(folder), folder.path, trust=trust)
    config = configuration.load(str(folder.config_path))
    tasks = _tasks(config)
    whole = config.monitor.rollouts_per_step == -1  # else a group's rate cannot be told from its file
    threshold = pool.settings.success_threshold
    rates = {group.task: group.rate for group in _groups(folder, threshold)} if whole else {}
    with Intake(pool) as intake:
        for group in _groups(folder, threshold):
            task = tasks.get(group.task)
            if task is None:
                intake.moved.left_out["its task is not one of its run's"] += len(group.successes)
                continue
            successes, attempts = rates.get(group.task, (0, 0))
            known = {"attempts": attempts, "successes": successes, "temperature": config.sampler.temperature}
            for trajectory in group.successes:
                intake.take(task, trajectory, version=step, step=step, **known)
    return intake.moved


def check(pool: ExperiencePool, theirs: str | None, of: object, *, trust: bool) -> None:
    """`check_tokenizers` for an open pool."""
    with browse.reading(pool.path) as db:
        own = browse.tokenizer(db)
    check_tokenizers(own, theirs, of, empty=not pool.stats()["trajectories"], trust=trust)


def saved_tokenizer(folder: RunFolder) -> str | None:
    """The fingerprint of the tokenizer that a run kept; None where it kept none.

    Raises:
        UserError: what is there does not load.
    """
    from transformers import AutoTokenizer

    if not folder.tokenizer_path.is_dir():
        return None
    try:
        return tokenizer_fingerprint(AutoTokenizer.from_pretrained(folder.tokenizer_path, local_files_only=True))
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder.tokenizer_path} does not load ({str(error).splitlines()[0]})") from error


# --- parts --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Group:
    """The fresh members of a group as its rollout file has them."""

    task: str
    successes: tuple[Trajectory, ...]
    rate: tuple[int, int]  # successes, valid attempts


def _groups(folder: RunFolder, threshold: float) -> Iterator[_Group]:
    for step in folder.rollout_steps():
        for _, records in groupby(folder.read_rollouts(step), key=lambda record: record.ticket):
            members = [record.trajectory for record in records if not record.replayed]
            valid = [member for member in members if member.score.valid]
            successes = tuple(member for member in valid if member.score.value >= threshold)
            if valid:
                yield _Group(valid[0].task_id, successes, (len(successes), len(valid)))


def _tasks(config: Config) -> Mapping[str, Task]:
    settings = config.environment
    taskset: Any = load_taskset(settings, config.run.seed)
    return {task.id: task for task in taskset.tasks("train", settings.train_tasks)}
