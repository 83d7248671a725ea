"""The learner as an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar

import torch

from gleanrl.algorithms.batch import Batch, ModelEstimates, Sample
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.engine import TokenScores
from gleanrl.protocols import Metrics
from gleanrl.runtime.ray.broadcast import Entry
from gleanrl.runtime.ray.crew import Crew
from gleanrl.runtime.ray.exchange import Source
from gleanrl.runtime.ray.link import ActorDied, Host
from gleanrl.runtime.ray.parts import Plans, Spans
from gleanrl.runtime.ray.weights import LearnerLost, RemoteWeights
from gleanrl.runtime.sharded import learner_ranks
from gleanrl.utils.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")

_MEND = "; continue from the last checkpoint with --resume"  # what `Ranks` advise, and a run on Ray does by itself


def _lost_with_a_rank(method: Callable[P, CoroutineType[Any, Any, T]]) -> Callable[P, CoroutineType[Any, Any, T]]:
    """A learner of which a rank is gone is as lost as one whose actor is gone."""

    @wraps(method)
    async def call(*args: P.args, **options: P.kwargs) -> T:
        try:
            return await method(*args, **options)
        except UserError as error:
            service: Any = args[0]
            if service.ranks is not None and service.ranks.broken is not None:
                raise LearnerLost(f"learner: {error}".removesuffix(_MEND)) from None
            raise

    return call


class LearnerService(Source):
    """Inside an actor: the learner that the settings name."""

    def __init__(self, host: Host, plans: Plans, seed: int, training: bool) -> None:
        super().__init__()
        self._host, self._plans, self._seed, self._training = host, plans, seed, training
        self._spans = Spans()
        self._stack = ExitStack()
        self.ranks: Ranks | None = None  # the processes that the learner is spread over, on this node
        self._learner: Any = None

    async def start(self) -> None:
        folder = self._plans.folder
        if self._training and not folder.config_path.exists():
            raise UserError(
                f"the learner's node does not see the run folder {folder.path}, where its checkpoints go; set "
                "run.folder to storage that all nodes share"
            )
        builder = await self._plans.builder()
        self.ranks = self._stack.enter_context(learner_ranks(builder.config))
        builder = replace(builder, ranks=self.ranks)
        torch.manual_seed(self._seed)  # as the local runtime does before it makes one
        self._learner = builder.learner(
            self._plans.device_lock(self._host),  # type: ignore[arg-type]
            self._spans,  # type: ignore[arg-type]
            trains=self._training,
        )

    async def facts(self) -> dict[str, Any]:
        """What is asked without waiting."""
        return {"step": self._learner.step, "needs_estimates": self._learner.needs_estimates, "number": self.number}

    @_lost_with_a_rank
    async def update(self, batch: Batch) -> tuple[Metrics, int]:
        await self.changing()
        metrics = await self._learner.update(batch)
        return metrics, self._learner.step

    @_lost_with_a_rank
    async def replay_update(self, batch: Batch, step: int) -> Metrics:
        await self.changing()
        return await self._learner.replay_update(batch, step)

    @_lost_with_a_rank
    async def estimate(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        return await self._learner.estimate(samples)

    @_lost_with_a_rank
    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        return await self._learner.logprobs(samples)

    @_lost_with_a_rank
    async def undo_step(self) -> bool:
        return self._learner.undo_step()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._learner.weights()

    @_lost_with_a_rank
    async def put(self, number: int) -> list[Any]:
        return await super().put(number)

    @_lost_with_a_rank
    async def write(self, number: int, path: Path) -> None:
        await super().write(number, path)

    @_lost_with_a_rank
    async def offer(self, number: int) -> list[Entry]:
        return await super().offer(number)

    @_lost_with_a_rank
    async def save(self, folder: Path) -> None:
        await asyncio.to_thread(self._learner.save, folder)

    @_lost_with_a_rank
    async def load(self, folder: Path) -> int:
        await self.changing()
        await asyncio.to_thread(self._learner.load, folder)
        return self._learner.step

    @_lost_with_a_rank
    async def export(self, folder: Path) -> None:
        await asyncio.to_thread(self._learner.export, folder)

    def news(self) -> list[Any]:
        return self._spans.drain()

    async def close(self) -> None:
        self._stack.close()


class RayLearner:
    """A learner actor; satisfies `gleanrl.protocols.Learner`, and what the local runtime asks of its learner beyond.

    Every call raises `LearnerLost` once the actor is gone.
    """

    def __init__(self, crew: Crew) -> None:
        (self._link,) = crew.members.values()
        facts = self._blocking("facts")
        self.step: int = facts["step"]
        """Steps whose groups are consumed."""
        self.needs_estimates: bool = facts["needs_estimates"]
        self._number: int = facts["number"]  # of the weights of now; see `Source`
        self._weights: RemoteWeights | None = None  # of now, if they were asked for

    async def update(self, batch: Batch) -> Metrics:
        self._changing()
        metrics, self.step = await self._call("update", batch)
        return metrics

    async def replay_update(self, batch: Batch, step: int) -> Metrics:
        self._changing()
        return await self._call("replay_update", batch, step)

    async def estimate(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        return await self._call("estimate", samples)

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        return await self._call("logprobs", samples)

    def undo_step(self) -> bool:
        return self._blocking("undo_step")

    def weights(self) -> Mapping[str, Any]:
        """See `Learner.weights`. They stay with the learner until somebody takes them."""
        if self._weights is None:
            self._weights = RemoteWeights(self._link, self._number)
        return self._weights

    def save(self, folder: Path) -> None:
        self._blocking("save", folder.absolute())

    def load(self, folder: Path) -> None:
        self._changing()
        self.step = self._blocking("load", folder.absolute())

    def export(self, folder: Path) -> None:
        self._blocking("export", folder.absolute())

    def _changing(self) -> None:
        """As the actor's own `changing`."""
        self._number += 1
        self._weights = None

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._link.call(method, *arguments)
        except ActorDied as error:
            raise LearnerLost(str(error)) from None

    def _blocking(self, method: str, *arguments: Any) -> Any:
        try:
            return self._link.call_blocking(method, *arguments)
        except ActorDied as error:
            raise LearnerLost(str(error)) from None
