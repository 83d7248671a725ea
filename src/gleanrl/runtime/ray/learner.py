"""The learner as an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from gleanrl.batch import Appraisal, Batch, Sample
from gleanrl.errors import UserError
from gleanrl.learners.engine import TokenScores
from gleanrl.protocols import Metrics
from gleanrl.runtime.ray.broadcast import Entry, Place
from gleanrl.runtime.ray.cluster import library
from gleanrl.runtime.ray.crew import Crew
from gleanrl.runtime.ray.link import ActorDied, Host
from gleanrl.runtime.ray.parts import Plans, Spans
from gleanrl.runtime.ray.transfer import Sender
from gleanrl.runtime.ray.weights import RemoteWeights, put
from gleanrl.runtime.sharded import learner_ranks


class LearnerLost(Exception):
    """The learner's actor is gone, and with it what it learned since the last checkpoint."""


class LearnerService:
    """Inside an actor: the learner that the settings name."""

    def __init__(self, host: Host, plans: Plans, seed: int, training: bool) -> None:
        self._host, self._plans, self._seed, self._training = host, plans, seed, training
        self._spans = Spans()
        self._sender = Sender()
        self._ranks = ExitStack()  # the processes that the learner is spread over, on this node
        self._learner: Any = None

    async def start(self) -> None:
        folder = self._plans.folder
        if self._training and not folder.config_path.exists():
            raise UserError(
                f"the learner's node does not see the run folder {folder.path}, where its checkpoints go; set "
                "run.folder to storage that all nodes share"
            )
        builder = await self._plans.builder()
        builder = replace(builder, ranks=self._ranks.enter_context(learner_ranks(builder.config)))
        torch.manual_seed(self._seed)  # as the local runtime does before it makes one
        self._learner = builder.learner(
            self._plans.lease(self._host),  # type: ignore[arg-type]
            self._spans,  # type: ignore[arg-type]
            trains=self._training,
        )

    async def facts(self) -> dict[str, Any]:
        """What is asked without waiting."""
        return {"step": self._learner.step, "appraises": self._learner.appraises}

    async def update(self, batch: Batch) -> tuple[Metrics, int]:
        metrics = await self._learner.update(batch)
        return metrics, self._learner.step

    async def practise(self, batch: Batch, step: int) -> Metrics:
        return await self._learner.practise(batch, step)

    async def appraise(self, samples: Sequence[Sample]) -> list[Appraisal]:
        return await self._learner.appraise(samples)

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        return await self._learner.logprobs(samples)

    async def undo_step(self) -> bool:
        return self._learner.undo_step()

    async def put(self) -> list[Any]:
        """A reference to the weights of now, in a list so that it travels as it is."""
        return [await asyncio.to_thread(lambda: put(self._learner.weights()))]

    async def meet(self, port: int, world: int, backend: Literal["nccl", "gloo"], number: int) -> Place:
        host = library().util.get_node_ip_address()
        return await asyncio.to_thread(self._sender.meet, host, port, world, backend, number)

    async def entries(self) -> list[Entry]:
        return await asyncio.to_thread(lambda: self._sender.entries(self._learner.weights()))

    async def broadcast(self) -> None:
        await asyncio.to_thread(lambda: self._sender.broadcast(self._learner.weights()))

    async def write(self, path: Path) -> None:
        await asyncio.to_thread(lambda: self._sender.write(self._learner.weights(), path))

    async def save(self, folder: Path) -> None:
        await asyncio.to_thread(self._learner.save, folder)

    async def load(self, folder: Path) -> int:
        await asyncio.to_thread(self._learner.load, folder)
        return self._learner.step

    async def export(self, folder: Path) -> None:
        await asyncio.to_thread(self._learner.export, folder)

    def news(self) -> list[Any]:
        return self._spans.drain()

    async def close(self) -> None:
        self._ranks.close()


class RayLearner:
    """A learner actor; satisfies `gleanrl.protocols.Learner`, and what the local runtime asks of its learner beyond.

    Every call raises `LearnerLost` once the actor is gone.
    """

    def __init__(self, crew: Crew) -> None:
        (self._link,) = crew.members.values()
        facts = self._blocking("facts")
        self.step: int = facts["step"]
        """Steps whose groups are consumed."""
        self.appraises: bool = facts["appraises"]
        self._weights: RemoteWeights | None = None  # of now

    async def update(self, batch: Batch) -> Metrics:
        self._weights = None
        metrics, self.step = await self._call("update", batch)
        return metrics

    async def practise(self, batch: Batch, step: int) -> Metrics:
        self._weights = None
        return await self._call("practise", batch, step)

    async def appraise(self, samples: Sequence[Sample]) -> list[Appraisal]:
        return await self._call("appraise", samples)

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        return await self._call("logprobs", samples)

    def undo_step(self) -> bool:
        return self._blocking("undo_step")

    def weights(self) -> Mapping[str, Any]:
        """See `Learner.weights`. They stay with the learner until somebody takes them."""
        self._weights = self._weights or RemoteWeights(self._link)
        return self._weights

    def save(self, folder: Path) -> None:
        self._blocking("save", folder.absolute())

    def load(self, folder: Path) -> None:
        self._weights = None
        self.step = self._blocking("load", folder.absolute())

    def export(self, folder: Path) -> None:
        self._blocking("export", folder.absolute())

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
