"""Experience replay in a run: its pool's file, the current policy's opinion, extra updates on stored successes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from gleanrl.algorithms.batch import Batch, draft, imitation
from gleanrl.config.loading import Config
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool import import_ as pool_seed
from gleanrl.experience.replay.recall import Appraise, Recall, Reverify
from gleanrl.learners.torch import TorchLearner
from gleanrl.protocols import Metrics
from gleanrl.runtime.prepare import tokenizer_fingerprint
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Group, GroupSpec, Task, Trajectory
from gleanrl.utils import atomic
from gleanrl.utils.seeding import derive

START_FILE = "experience.start"  # in the run folder
MakeBatch = Callable[[Sequence[Group]], Awaitable[Batch]]


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
    """The run's pool, for writing; None where replay is off. ``tasks``: the run's own, which the pool learns of.

    A run that is resumed without any checkpoint starts anew, and its pool is what the run first found.
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
                pool_seed.seed_pool(pool, settings.seed_from, trust=settings.trust_tokenizer)
            if pool.stats()["tasks"]:
                pool.update(tasks)
        yield pool


@dataclass(frozen=True)
class _Start:
    """What a run notes in its folder of how it found its pool."""

    note: Path
    run: str  # whose marks in the pool are its own
    pool: str | None  # `replay.path`
    mark: int | None  # set before the run wrote anything; the pool may have older ones, of another run
    here: bool  # the pool is still that one, not a copy that the run was given to resume with

    @classmethod
    def of(cls, note: Path, config: Config, *, known: bool) -> _Start:
        """As noted, or of a run that begins; ``known``: the note, if there is one, is this run's."""
        path = config.replay.path
        found: Any = json.loads(note.read_text()) if known and note.exists() else {}
        if isinstance(found, int):  # noted before runs had names here
            found = {"mark": found}
        run, pool = found.get("run"), found.get("pool", path)
        start = cls(note, run or f"{config.run.name} {uuid.uuid4().hex[:12]}", pool, found.get("mark"), pool == path)
        if run is None:
            start.write()
        return start

    @property
    def owner(self) -> str | None:
        """Whose marks the pool may be rewound over, where it matters."""
        return self.run if self.here else None

    def write(self) -> None:
        atomic.write_text(self.note, json.dumps({"run": self.run, "pool": self.pool, "mark": self.mark}))

    def put_back(self, pool: ExperiencePool) -> None:
        """Undo what a start that was killed did to the pool, seeding included."""
        if self.mark is not None and self.mark in pool.stats()["marks"]:
            pool.rewind(self.mark)
        else:
            replace(self, mark=pool.mark()).write()


def has_checkpoint(folder: RunFolder) -> bool:
    """Whether a resumed run has anything to go on from."""
    return any(folder.checkpoints_path.glob("step-*"))


def policy_opinion(learner: TorchLearner, max_context: int) -> Appraise:
    """Mean entropy and mean log-ratio of trajectories under the learner's weights as they are, in one pass."""

    async def appraise(trajectories: Sequence[Trajectory]) -> list[tuple[float, float]]:
        by_task: dict[str, list[int]] = {}  # in one group, their common prompt is computed once
        for index, trajectory in enumerate(trajectories):
            by_task.setdefault(trajectory.task_id, []).append(index)
        order = [index for own in by_task.values() for index in own]
        groups = [together(Task(task), [trajectories[index] for index in own]) for task, own in by_task.items()]
        drafted = draft(groups, max_context)
        scores = await learner.logprobs(drafted.samples)
        totals = np.zeros((len(trajectories), 3))
        for sample, score in zip(drafted.samples, scores, strict=True):
            mask = sample.mask
            drift = score.logprobs[mask] - sample.behaviour[mask]
            totals[order[sample.trajectory]] += (score.entropy[mask].sum(), drift.sum(), mask.sum())
        means = totals[:, :2] / np.maximum(totals[:, 2:], 1)
        return [(float(entropy), float(drift)) for entropy, drift in means]

    return appraise


def together(task: Task, trajectories: Sequence[Trajectory]) -> Group:
    """A group of replayed trajectories and nothing else."""
    return Group(GroupSpec(task, 0, tuple(trajectories)), tuple(trajectories), -1)


class _Success(NamedTuple):
    """What an extra update imitates."""

    group: Group
    weight: float  # 1 - solve rate of its task
    age: int | None  # in versions; None = of this step


class PractisingLearner:
    """A learner that adds updates on successes after each step's own; all else is the learner's.

    After the groups of a step, ``replay.pool_updates`` times: ``replay.pool_batch`` successes, drawn as replay draws
    them or from the step's own, each with the advantage 1 - solve rate of its task. Not before replay has ``begun``.
    """

    def __init__(
        self,
        learner: TorchLearner,
        pool: ExperiencePool,
        config: Config,
        *,
        seed: int,
        max_context: int,
        begun: Callable[[], bool],
        reverify: Reverify | None = None,
    ) -> None:
        self.learner, self._pool, self._config = learner, pool, config
        self._seed, self._max_context, self._begun = seed, max_context, begun
        settings = config.replay.model_copy(update={"per_group": 1})
        opinion = policy_opinion(learner, max_context)
        self._recall = Recall(pool, settings, group=config.schedule.group, appraise=opinion, reverify=reverify)
        self._groups: list[Group] = []  # of the step so far
        self._consumed = 0

    def seeing(self, batch: MakeBatch) -> MakeBatch:
        """``batch``, noting the groups that it is given: the next `update` learns from them."""

        async def noting(groups: Sequence[Group]) -> Batch:
            self._groups += groups
            return await batch(groups)

        return noting

    async def update(self, batch: Batch) -> Metrics:
        metrics = dict(await self.learner.update(batch))
        self._consumed += batch.groups
        size = self._config.schedule.batch
        if self._consumed % size:
            return metrics
        if self._begun():
            metrics |= await self._practise(self.learner.step - 1)
        self._groups = []
        return metrics

    async def _practise(self, step: int) -> dict[str, float]:
        """The extra updates of a step, and what is told of them."""
        metrics: dict[str, float] = {}
        started, selecting, updating = perf_counter(), self._recall.seconds, 0.0
        for number in range(self._config.replay.pool_updates):
            random = np.random.default_rng(derive(self._seed, "practice", step, number))
            choose = self._from_pool if self._config.replay.pool_from == "pool" else self._from_batch
            chosen = await choose(random, step)
            told: dict[str, float] = {}
            if chosen:
                groups, weights, _ = zip(*chosen, strict=True)
                practice = imitation(groups, weights, self._config.loss, self._max_context)
                at = perf_counter()
                told = await self.learner.practise(practice, step)
                updating += perf_counter() - at
            own = {**{name: told[name] for name in _TOLD if name in told}, **_described(chosen)}
            metrics |= {f"practice/{number}/{name}": value for name, value in own.items()}
        selecting = self._recall.seconds - selecting
        counts = self._recall.counts
        metrics |= {f"practice/{name}": float(counts[name]) for name in _COUNTED}
        counts.clear()
        seconds = perf_counter() - started
        return metrics | {
            "time/practice_plan_s": seconds - selecting - updating,
            "time/practice_select_s": selecting,
            "time/practice_update_s": updating,
        }

    async def _from_pool(self, random: np.random.Generator, step: int) -> list[_Success]:
        found = await self._recall.recall(self._config.replay.pool_batch, random, set(), step=step)
        self._recall.settle()
        self._pool.used([recalled.stored[0].key for recalled in found])
        rates = self._pool.rates([recalled.task.id for recalled in found])  # without tasks that were never tried
        return [
            _Success(
                together(recalled.task, [recalled.stored[0].trajectory]),
                1 - rates.get(recalled.task.id, 0.0),
                max(step - recalled.stored[0].version, 0),
            )
            for recalled in found
        ]

    async def _from_batch(self, random: np.random.Generator, step: int) -> list[_Success]:
        own: list[_Success] = []
        threshold = self._config.replay.success_threshold
        for group in self._groups:
            valid = group.valid_fresh
            successes = [t for t in valid if t.score.value >= threshold]
            if successes and len(successes) < len(valid):
                pick = successes[int(random.integers(len(successes)))]
                own.append(_Success(together(group.spec.task, [pick]), 1 - len(successes) / len(valid), None))
        order = random.permutation(len(own))[: self._config.replay.pool_batch]
        return [own[index] for index in sorted(order.tolist())]

    def undo_step(self) -> bool:
        return self.learner.undo_step()

    def weights(self) -> Mapping[str, Any]:
        return self.learner.weights()

    def save(self, folder: Path) -> None:
        self.learner.save(folder)

    def load(self, folder: Path) -> None:
        self.learner.load(folder)

    def export(self, folder: Path) -> None:
        self.learner.export(folder)


def _described(chosen: Sequence[_Success]) -> dict[str, float]:
    ages = [success.age for success in chosen if success.age is not None]
    known = {"age_mean": float(np.mean(ages)), "age_max": float(max(ages))} if ages else {}
    return {"trajectories": float(len(chosen)), **known}


_TOLD = ("loss/policy", "learner/grad_norm", "loss/replayed/ratio/mean", "loss/replayed/clip_high", "tokens/trained")
_COUNTED = ("missing", "too_old", "rejected", "reverified", "reverify_failed", "appraise_failed")  # by `Recall`
