"""The experience pool of a run: opens it, undoes what a killed start left in it, and fills it from another run.

Called by `gleanrl.runtime.local`, `gleanrl pool seed` and for ``replay.seed_from``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from gleanrl.config import loading as configuration
from gleanrl.config.settings import Config
from gleanrl.environments import load_taskset
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool import transfer
from gleanrl.experience.pool.transfer import Moved
from gleanrl.runtime.prepare import tokenizer_fingerprint
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Task, Trajectory
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

START_FILE = "experience.start"
"""File in the run folder that records how the run found its pool. ``run``: the name that the run gives to its marks in
the pool. ``pool``: ``replay.path``. ``mark``: the mark set before the run wrote anything. The pool may also have older
marks, of another run."""


@contextmanager
def open_pool(
    config: Config,
    folder: RunFolder,
    tokenizer: Any,
    *,
    resume: bool,
    max_context: int | None = None,
    tasks: Iterable[Task] = (),
) -> Iterator[ExperiencePool | None]:
    """Yield the run's pool, open for writing, or None if replay is off.

    A run that starts evicts the trajectories of tasks that differ from the one of ``tasks`` with the same id.
    A run that is resumed without a checkpoint starts again from step 0, with the pool as it was before the run.
    """
    settings = config.replay
    if not settings.enabled:
        yield None
        return
    note_path = folder.path / START_FILE
    note = {"run": f"{config.run.name} {uuid.uuid4().hex[:12]}", "pool": settings.path, "mark": None}
    # an existing note belongs to this run if the run is resumed, or if the pool lies in the run's own folder
    if (resume or settings.path is None) and note_path.exists():
        note = json.loads(note_path.read_text())
    else:
        atomic.write_text(note_path, json.dumps(note))
    # a run may not undo what another run did in the pool; this is not checked if it resumes with a copy of its pool
    owner = note["run"] if note["pool"] == settings.path else None
    path = Path(settings.path) if settings.path else folder.experience_path
    takes = {"tokenizer": tokenizer_fingerprint(tokenizer), "vocabulary": len(tokenizer), "max_context": max_context}
    with ExperiencePool(path, settings, run=owner, **takes) as pool:
        if not (resume and has_checkpoint(folder)):
            if note["mark"] is not None and note["mark"] in pool.stats()["marks"]:
                pool.rewind(note["mark"])  # undoes all that a killed start did, seeding included
            else:
                atomic.write_text(note_path, json.dumps({**note, "mark": pool.mark()}))
            if settings.seed_from and not pool.stats()["trajectories"]:
                seed_pool(pool, settings.seed_from, trust=settings.trust_tokenizer)
            if pool.stats()["tasks"]:
                pool.update(tasks)
        yield pool


def has_checkpoint(folder: RunFolder) -> bool:
    """Return whether a resumed run has a checkpoint to continue from."""
    return any(folder.checkpoints_path.glob("step-*"))


def seed_pool(pool: ExperiencePool, source: Path | str, *, trust: bool = False) -> int:
    """Store the successes of ``source``, a pool's file or a run's folder; return how many were stored.

    A run that has a pool is read from its pool, any other run from its rollouts. The age of the trajectories counts
    from step 0 of this run. With ``trust``, ``pool`` or ``source`` is assumed to have the other's tokenizer if it does
    not name its own.

    Raises:
        UserError: there is nothing at ``source``, or its tokens are, or may be, from another tokenizer.
    """
    path = Path(source)
    if path.is_dir():
        folder = RunFolder.existing(path)
        path = folder.pool_path()
        if not path.is_file():
            return seed_from_rollouts(pool, folder, trust=trust).stored
    return transfer.seed_from_pool(pool, path, trust=trust).stored


def seed_from_rollouts(pool: ExperiencePool, folder: RunFolder, *, step: int = 0, trust: bool = False) -> Moved:
    """Store every fresh success in a run's rollout files, with the success rate of its task's latest group in them.

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

    def read_groups() -> Iterator[list[Trajectory]]:
        """Yield the fresh members of every group, oldest step first."""
        for step in folder.rollout_steps():
            for _, records in groupby(folder.read_rollouts(step), key=lambda record: record.ticket):
                yield [record.trajectory for record in records if not record.replayed]

    whole = config.monitor.rollouts_per_step == -1  # a group's success rate is known only if all its members are kept
    sampled = {"temperature": config.sampler.temperature, "whole": whole}
    return transfer.seed_from_groups(pool, read_groups, tasks, step=step, **sampled)


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
