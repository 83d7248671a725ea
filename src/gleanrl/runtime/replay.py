"""Opens the experience pool of a run, and undoes what a killed start left in it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gleanrl.config.settings import Config
from gleanrl.experience import ExperiencePool
from gleanrl.runtime import pool_sources
from gleanrl.runtime.prepare import tokenizer_fingerprint
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Task
from gleanrl.utils import atomic

START_FILE = "experience.start"  # in the run folder


@contextmanager
def opened_pool(
    config: Config,
    folder: RunFolder,
    tokenizer: Any,
    *,
    resume: bool,
    max_context: int | None = None,
    tasks: Iterable[Task] = (),
) -> Iterator[ExperiencePool | None]:
    """Yield the run's pool, open for writing; None if replay is off. ``tasks`` are the run's own, added to the pool.

    A run that is resumed without a checkpoint starts again from step 0, with the pool as the run first found it.
    """
    settings = config.replay
    if not settings.enabled:
        yield None
        return
    path = Path(settings.path) if settings.path else folder.experience_path
    start = _Start.of(folder.path / START_FILE, config, known=resume or settings.path is None)
    takes = {"tokenizer": tokenizer_fingerprint(tokenizer), "vocabulary": len(tokenizer), "max_context": max_context}
    with ExperiencePool(path, settings, run=start.owner, **takes) as pool:
        if not (resume and has_checkpoint(folder)):
            start.put_back(pool)
            if settings.seed_from and not pool.stats()["trajectories"]:
                pool_sources.seed_pool(pool, settings.seed_from, trust=settings.trust_tokenizer)
            if pool.stats()["tasks"]:
                pool.update(tasks)
        yield pool


@dataclass(frozen=True)
class _Start:
    """How a run found its pool; written to the run folder."""

    note: Path
    run: str  # name of the run, which marks in the pool carry
    pool: str | None  # `replay.path`
    mark: int | None  # set before the run wrote anything; the pool may have older marks of another run
    here: bool  # the pool is still that file, not a copy that the run is resumed with

    @classmethod
    def of(cls, note: Path, config: Config, *, known: bool) -> _Start:
        """Read the note, or make the one of a new run. ``known``: an existing note is this run's."""
        path = config.replay.path
        found: Any = json.loads(note.read_text()) if known and note.exists() else {}
        if isinstance(found, int):  # written before notes held the run's name
            found = {"mark": found}
        run, pool = found.get("run"), found.get("pool", path)
        start = cls(note, run or f"{config.run.name} {uuid.uuid4().hex[:12]}", pool, found.get("mark"), pool == path)
        if run is None:
            start.write()
        return start

    @property
    def owner(self) -> str | None:
        """Return the run whose marks the pool may be rewound over; None if that does not matter."""
        return self.run if self.here else None

    def write(self) -> None:
        atomic.write_text(self.note, json.dumps({"run": self.run, "pool": self.pool, "mark": self.mark}))

    def put_back(self, pool: ExperiencePool) -> None:
        """Undo what a killed start did to the pool, seeding included."""
        if self.mark is not None and self.mark in pool.stats()["marks"]:
            pool.rewind(self.mark)
        else:
            replace(self, mark=pool.mark()).write()


def has_checkpoint(folder: RunFolder) -> bool:
    """Return whether a resumed run has a checkpoint to continue from."""
    return any(folder.checkpoints_path.glob("step-*"))
