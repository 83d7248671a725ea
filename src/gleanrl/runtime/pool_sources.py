"""Fills an experience pool from a run's folder: from the run's own pool, or from the successes in its rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from gleanrl.config import loading as configuration
from gleanrl.environments import load_taskset
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool import transfer
from gleanrl.experience.pool.transfer import Moved
from gleanrl.runtime.prepare import tokenizer_fingerprint
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Trajectory
from gleanrl.utils.errors import UserError


def seed_pool(pool: ExperiencePool, source: Path | str, *, trust: bool = False) -> int:
    """Store the successes of ``source``, a pool's file or a run's folder; return how many were stored.

    A run that has a pool is read from its pool, any other run from its rollouts. The age of the trajectories counts
    from step 0 of this run. With ``trust``, a side that does not name its tokenizer is taken to have the same one.

    Raises:
        UserError: there is nothing at ``source``, or its tokens are or may be those of another tokenizer.
    """
    path = Path(source)
    if path.is_dir():
        folder = RunFolder.existing(path)
        path = folder.pool_path()
        if not path.is_file():
            return seed_from_rollouts(pool, folder, trust=trust).stored
    return transfer.seed_from_pool(pool, path, trust=trust).stored


def seed_from_rollouts(pool: ExperiencePool, folder: RunFolder, *, step: int = 0, trust: bool = False) -> Moved:
    """Store every fresh success in the rollout files of a run, with the success rate of its task's latest group there.

    Rollouts hold only the ids of their tasks; the tasks are made again from the run's configuration. The age of the
    trajectories counts from ``step`` of this run.

    Raises:
        UserError: see `seed_pool`.
    """
    if not folder.rollout_steps():
        raise UserError(f"{folder.path} has no rollouts to seed from; it ran with monitor.rollouts_per_step = 0?")
    transfer.check_tokenizers(pool.path, saved_tokenizer(folder), folder.path, trust=trust)
    config = configuration.load(str(folder.config_path))
    taskset: Any = load_taskset(config.environment, config.run.seed)
    tasks = {task.id: task for task in taskset.tasks("train", config.environment.train_tasks)}
    whole = config.monitor.rollouts_per_step == -1  # otherwise the file does not show a group's success rate
    sampled = {"temperature": config.sampler.temperature, "whole": whole}
    return transfer.seed_from_groups(pool, lambda: _groups(folder), tasks, step=step, **sampled)


def saved_tokenizer(folder: RunFolder) -> str | None:
    """Return the fingerprint of the tokenizer that a run saved; None if it saved none.

    Raises:
        UserError: the tokenizer does not load.
    """
    from transformers import AutoTokenizer

    if not folder.tokenizer_path.is_dir():
        return None
    try:
        return tokenizer_fingerprint(AutoTokenizer.from_pretrained(folder.tokenizer_path, local_files_only=True))
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder.tokenizer_path} does not load ({str(error).splitlines()[0]})") from error


def _groups(folder: RunFolder) -> Iterator[list[Trajectory]]:
    """Yield the fresh members of every group, oldest step first."""
    for step in folder.rollout_steps():
        for _, records in groupby(folder.read_rollouts(step), key=lambda record: record.ticket):
            yield [record.trajectory for record in records if not record.replayed]
