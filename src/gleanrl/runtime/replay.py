"""Experience replay in a run: its pool's file, the current policy's opinion, extra updates on stored successes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl import atomic
from gleanrl.batch import Batch, draft, imitation
from gleanrl.config import Config
from gleanrl.evaluation import solved
from gleanrl.experience import ExperiencePool
from gleanrl.experience.recall import Appraise, Recall, Reverify
from gleanrl.learners.torch import TorchLearner
from gleanrl.protocols import Metrics
from gleanrl.runfolder import RunFolder
from gleanrl.runtime.prepare import fingerprint
from gleanrl.seeding import derive
from gleanrl.types import Group, GroupSpec, Task, Trajectory

START_FILE = "experience.start"  # in the run folder
MakeBatch = Callable[[Sequence[Group]], Awaitable[Batch]]


@contextmanager
def opened_pool(config: Config, folder: RunFolder, tokenizer: Any, *, resume: bool) -> Iterator[ExperiencePool | None]:
    """The run's pool, for writing; None where replay is off.

    A run that is resumed without any checkpoint starts anew, and its pool is what the run first found.
    """
    settings = config.replay
    if not settings.enabled:
        yield None
        return
    path = Path(settings.path) if settings.path else folder.experience_path
    with ExperiencePool(path, settings, tokenizer=tokenizer_fingerprint(tokenizer), vocabulary=len(tokenizer)) as pool:
        if not (resume and has_checkpoint(folder)):
            _put_back(pool, folder.path / START_FILE, known=resume or settings.path is None)
            if settings.seed_from and not pool.stats()["trajectories"]:
                from gleanrl.runtime.seed import seed_pool  # which asks this module for fingerprints

                seed_pool(pool, settings.seed_from)
        yield pool


def _put_back(pool: ExperiencePool, note: Path, *, known: bool) -> None:
    """Undo what a start that was killed did to the pool, seeding included; ``note`` holds the mark from before it.

    The pool may have older marks, of another run. ``known``: the mark noted, if there is one, is this run's.
    """
    mark = json.loads(note.read_text()) if known and note.exists() else None
    if mark is not None and mark in pool.stats()["marks"]:
        pool.rewind(mark)
    else:
        atomic.write_text(note, json.dumps(pool.mark()))


def has_checkpoint(folder: RunFolder) -> bool:
    """Whether a resumed run has anything to go on from."""
    return any(folder.checkpoints_path.glob("step-*"))


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Equal for tokenizers that turn every conversation into the same ids."""
    return fingerprint("tokenizer", tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template)


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


class PractisingLearner:
    """A learner that adds updates on successes after each step's own; all else is the learner's.

    After the groups of a step, ``replay.pool_updates`` times: ``replay.pool_batch`` successes, drawn as replay draws
    them or from the step's own, each with the advantage 1 - solve rate of its task.
    """

    def __init__(
        self,
        learner: TorchLearner,
        pool: ExperiencePool,
        config: Config,
        *,
        seed: int,
        max_context: int,
        reverify: Reverify | None = None,
    ) -> None:
        self.learner, self._pool, self._config = learner, pool, config
        self._seed, self._max_context = seed, max_context
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
        step = self.learner.step - 1
        for number in range(self._config.replay.pool_updates):
            random = np.random.default_rng(derive(self._seed, "practice", step, number))
            choose = self._from_pool if self._config.replay.pool_from == "pool" else self._from_batch
            chosen = await choose(random)
            if chosen:
                groups, weights = zip(*chosen, strict=True)
                practice = imitation(groups, weights, self._config.loss, self._max_context)
                told = await self.learner.practise(practice, step)
                metrics |= {f"practice/{number}/{name}": told[name] for name in _TOLD if name in told}
        self._groups = []
        if self._config.replay.reverify:
            counts = self._recall.counts
            metrics |= {f"practice/{name}": float(counts[name]) for name in ("reverified", "reverify_failed")}
            counts.clear()
        return metrics

    async def _from_pool(self, random: np.random.Generator) -> list[tuple[Group, float]]:
        found = await self._recall.recall(self._config.replay.pool_batch, random, set())
        self._recall.settle()
        rates = self._pool.rates([recalled.task.id for recalled in found])
        return [
            (together(recalled.task, [recalled.stored[0].trajectory]), 1 - rates[recalled.task.id])
            for recalled in found
        ]

    async def _from_batch(self, random: np.random.Generator) -> list[tuple[Group, float]]:
        own: list[tuple[Group, float]] = []
        for group in self._groups:
            valid = group.valid_fresh
            successes = [t for t in valid if solved(t.score)]
            if successes and len(successes) < len(valid):
                pick = successes[int(random.integers(len(successes)))]
                own.append((together(group.spec.task, [pick]), 1 - len(successes) / len(valid)))
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


_TOLD = ("loss/policy", "learner/grad_norm", "loss/replayed/ratio/mean", "loss/replayed/clip_high", "tokens/trained")
