"""Opens the experience pool of a run, and fills it with the successes of another run or pool.

The runtime calls `open_pool`, which also fills a new pool from ``replay.seed_from``. `gleanrl pool seed` calls
`seed_from_rollouts`.
"""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.config import loading as configuration
from gleanrl.config.settings import Config
from gleanrl.environments import load_taskset
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool import admission, transfer
from gleanrl.experience.pool.transfer import Moved
from gleanrl.experience.replay.recall import EstimatePolicy
from gleanrl.runtime import prepare
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import START_TURNS, Trajectory
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.progress import Progress, Silent

log = logging.getLogger(__name__)

# Number of stored trajectories that `check_policy` examines at most, and of their tokens, which a single longer
# trajectory may exceed. A model of 7 B parameters needs about 1e15 operations for that many tokens.
_EXAMINED, _EXAMINED_TOKENS = 32, 65_536
_IMPROBABLE = 0.5  # geometric-mean ratio of current to recorded probability below which `check_policy` warns


@contextmanager
def open_pool(
    config: Config,
    folder: RunFolder,
    tokenizer: Any,
    *,
    resume: bool,
    newest: int = -1,
    uses_pool: bool = False,
    max_context: int | None = None,
) -> Iterator[ExperiencePool | None]:
    """Yield the run's experience pool, open for writing, or None if replay is disabled.

    A run begins to use the pool at step 0, or each time it is resumed with replay turned on. Steps and versions in the
    pool are then shifted, so that ages count on (`ExperiencePool.start_run`), unless the run itself used the pool last.
    If the run is resumed again and has no undamaged checkpoint since then, the pool is first rewound to its state
    before that.

    Args:
        tokenizer: the run's tokenizer. Its fingerprint is stored in a new pool and compared with that of an old one.
        resume: whether the run is resumed, with or without a checkpoint.
        newest: step of the checkpoint from which the run is resumed; -1 = the run starts from step 0.
        uses_pool: whether this checkpoint was saved with replay. Then it names a mark of the pool, and the caller
            rewinds the pool to it.
        max_context: the largest number of tokens that the run can train on; None = no limit.

    Raises:
        UserError: the pool's tokenizer differs or is not known, or the pool cannot be rewound to its state before the
            run, because another run has used it since.
    """
    settings = config.replay
    if not settings.enabled:
        yield None
        return
    # A JSON object with the state of the pool before the run. ``pool`` is `replay.path`, and ``file`` the same as an
    # absolute path, because a command may be given in another directory later. A mark is a recorded state of the pool,
    # to which it can be rewound. ``run`` is the name under which the run sets marks, and ``mark`` is the number of the
    # mark that it set when it began to use the pool, the last time if replay was turned off in between. ``continues``
    # says whether the run itself had used the pool last then, so that steps and sources in it are those of this run.
    # ``step`` is the checkpoint from which the run was resumed at that time, which does not refer to the pool; -1 =
    # none.
    note_path = folder.pool_start_path
    note = {"run": f"{config.run.name} {uuid.uuid4().hex[:12]}", "pool": settings.path, "mark": None, "step": newest}
    note["continues"] = False
    note["file"] = str(Path(settings.path).resolve()) if settings.path else None
    # An existing file belongs to this run if the run is resumed. It also applies to a new run in the same folder if the
    # pool lies in this folder too, because the pool then still contains what the failed earlier run wrote.
    if (resume or settings.path is None) and note_path.exists():
        note = json.loads(note_path.read_text())
    else:
        atomic.write_text(note_path, json.dumps(note))
    # A rewind fails if another run has set the mark, or a later one, because it would undo changes of that run. If the
    # file is not the one that the run has used so far, it may be a copy, in which no changes are lost.
    path = folder.locate_pool(settings.path)
    file = str(path.resolve()) if settings.path else None
    moved = file != note["file"]
    mark = prepare.tokenizer_fingerprint(tokenizer, config.context.template_options)
    takes = {"tokenizer": mark, "vocabulary": len(tokenizer), "max_context": max_context}
    with ExperiencePool(path, settings, run=note["run"], **takes) as pool:
        # ``newest`` is below the noted step if that step's checkpoint is damaged by now.
        again = newest <= note["step"] and note["mark"] is not None and pool.has_mark(note["mark"])
        own = moved and (uses_pool or again) and pool.adopt_marks()
        if own or not uses_pool:
            note |= {"pool": settings.path, "file": file}
        if own:
            atomic.write_text(note_path, json.dumps(note))
        if not uses_pool:
            if again:
                # undo everything that an earlier start of this run wrote before it was killed, seeding included
                pool.rewind(note["mark"])
            else:
                note["continues"] = note["mark"] is not None and pool.last_run() == note["run"]
                note["mark"] = pool.mark()
            atomic.write_text(note_path, json.dumps({**note, "step": newest}))
            if not note["continues"]:
                pool.start_run(max(newest, 0))
            if settings.seed_from and not pool.stats()["trajectories"]:
                seed_pool(pool, settings.seed_from, step=max(newest, 0), trust=settings.trust_tokenizer)
        if settings.source_limits:
            missing = settings.source_limits.keys() - {admission.OWN, admission.EARLIER, *pool.sources()}
            for name in sorted(missing):
                log.warning("%s: replay.source_limits names %s, but no trajectory has this source", pool.path, name)
        yield pool


async def check_policy(pool: ExperiencePool, estimate: EstimatePolicy) -> None:
    """Log a warning if trajectories of the pool are improbable under the run's policy, as those of another model are.

    Looks at the newest trajectory of up to `_EXAMINED` tasks, in one forward pass over at most `_EXAMINED_TOKENS`
    tokens or a single trajectory.
    """
    random, names = np.random.default_rng(0), list[str]()
    for bucket in pool.buckets():
        names += [drawn.task.id for drawn in pool.draw(bucket, _EXAMINED - len(names), random)]
    trajectories: list[Trajectory] = []
    tokens = 0
    for name in names:
        own = pool.stored([name])[name]
        tokens += own[-1].trajectory.total_tokens if own else 0
        if trajectories and tokens > _EXAMINED_TOKENS:
            break
        trajectories += [stored.trajectory for stored in own[-1:]]
    if not trajectories:
        return
    ratio = math.exp(np.mean([log_ratio for _, log_ratio in await estimate(trajectories)]))
    if ratio < _IMPROBABLE:
        log.warning(
            "%s: the tokens of %d stored trajectories are %.2g times as probable under this run's model as recorded "
            "(geometric mean). Another model, or a policy far from this one, has probably sampled them, so their "
            "importance weights say little; replay.max_ratio leaves such trajectories out",
            *(pool.path, len(trajectories), ratio),
        )


def seed_pool(pool: ExperiencePool, source: Path | str, *, step: int = 0, trust: bool = False) -> int:
    """Copy the successful trajectories of ``source`` into ``pool``, and return how many were stored.

    ``source`` is the file of a pool or the folder of a run. The trajectories of a run are read from its pool or, if it
    has none, from its rollout files. They are stored as if they had been sampled at ``step`` of the present run.

    By default an error is raised unless ``pool`` and ``source`` are known to have the same tokenizer. With ``trust``, a
    side without a tokenizer fingerprint is assumed to have the tokenizer of the other side.

    Raises:
        UserError: ``source`` does not exist, or its tokenizer differs or is not known.
    """
    path = Path(source)
    if path.is_dir():
        folder = RunFolder.existing(path)
        path = folder.pool_path()
        if not path.is_file():
            return seed_from_rollouts(pool, folder, step=step, trust=trust).stored
    return transfer.seed_from_pool(pool, path, step=step, trust=trust).stored


def seed_from_rollouts(
    pool: ExperiencePool,
    folder: RunFolder,
    *,
    step: int = 0,
    trust: bool = False,
    label: str | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Store the successful fresh trajectories from the rollout files of the run ``folder`` in ``pool``.

    The success rate of a task is taken from its newest group in these files. Rollout files contain only the ids of
    tasks; the tasks themselves are made again from the run's configuration.

    Args:
        step: step that is stored with the trajectories, from which the pool counts their age. `gleanrl pool seed`
            passes the newest step that the pool contains.
        trust: see `seed_pool`.
        label: source that is recorded for the trajectories; None = ``seed``.
        progress: where the number of rollout files that were read is shown; None = nowhere.

    Raises:
        UserError: the run has no rollout files, or its tokenizer differs or is not known.
    """
    if not folder.rollout_steps():
        raise UserError(f"{folder.path} has no rollouts to seed from; it ran with monitor.rollouts_per_step = 0?")
    transfer.check_tokenizers(pool.path, saved_tokenizer(folder), folder.path, trust=trust)
    config = configuration.load(str(folder.config_path))
    taskset: Any = load_taskset(config.environment, config.run.seed)
    tasks = {task.id: task for task in taskset.tasks("train", config.environment.train_tasks)}

    def read_groups() -> Iterator[list[Trajectory]]:
        """Yield the fresh (not replayed) members of every group, in the order of the steps.

        Episodes that began with turns of a stored success are left out: they lack the log-probs of these turns, and say
        nothing of how often the task is solved from its beginning. So are those with
        a guidance text that training removed.
        """
        for step in folder.rollout_steps():
            for _, records in groupby(folder.read_rollouts(step), key=lambda record: record.ticket):
                fresh = [record.trajectory for record in records if not record.replayed]
                yield [
                    each for each in fresh if not (each.info.get(START_TURNS) or admission.has_removed_guidance(each))
                ]
            stage.advance()

    # With a limit on rollouts per step, the files may lack members of a group. `seed_from_groups` then computes no
    # success rates, because they would be wrong.
    whole = config.monitor.rollouts_per_step == -1
    sampled = {"temperature": config.sampler.temperature, "whole": whole, "label": label}
    files = len(folder.rollout_steps()) * (2 if whole else 1)  # with success rates, each file is read twice
    with (progress or Silent()).stage("reading rollouts", files) as stage:
        return transfer.seed_from_groups(pool, read_groups, tasks, step=step, **sampled)


def saved_tokenizer(folder: RunFolder) -> str | None:
    """Return the fingerprint of the run's tokenizer and template options, or None if the folder has no tokenizer.

    Raises:
        UserError: the tokenizer cannot be loaded.
    """
    return prepare.saved_tokenizer(folder, folder.read_config().get("context", {}).get("template_options", {}))
