"""The learner as an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gleanrl.algorithms.batch import Batch, ModelEstimates, Sample
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.engine import TokenScores
from gleanrl.protocols import Metrics
from gleanrl.runtime.ray.actors import ActorDied, ActorPool, Endpoint
from gleanrl.runtime.ray.parts import Plans, Spans
from gleanrl.runtime.ray.weights import LearnerLost, WeightHandle, WeightSource
from gleanrl.runtime.sharded import learner_ranks
from gleanrl.utils.errors import UserError

# `Ranks` adds this to its errors; a run on Ray continues by itself
_ADVICE = "; continue from the last checkpoint with --resume"


class LearnerService(WeightSource):
    """Inside an actor: the learner that the settings name, and the processes that it is spread over."""

    def __init__(self, driver: Endpoint, plans: Plans, seed: int, training: bool) -> None:
        super().__init__()
        self._driver, self._plans, self._seed, self._training = driver, plans, seed, training
        self._spans = Spans()
        self._stack = ExitStack()
        self._ranks: Ranks | None = None
        self._learner: Any = None

    async def start(self) -> None:
        folder = self._plans.folder
        if self._training and not folder.config_path.exists():
            raise UserError(
                f"the learner's node does not see the run folder {folder.path}, where its checkpoints go; set "
                "run.folder to storage that all nodes share"
            )
        builder = await self._plans.builder()
        self._ranks = self._stack.enter_context(learner_ranks(builder.config))
        builder = replace(builder, ranks=self._ranks)
        torch.manual_seed(self._seed)  # as the local runtime does before it makes a learner
        self._learner = builder.learner(
            self._plans.device_lock(self._driver),  # type: ignore[arg-type]
            self._spans,  # type: ignore[arg-type]
            trains=self._training,
        )

    async def handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run one call. Raises `LearnerLost` if a rank is gone, as if the actor itself were."""
        try:
            return await super().handle(method, arguments)
        except UserError as error:
            if self._ranks is not None and self._ranks.broken is not None:
                raise LearnerLost(f"learner: {error}".removesuffix(_ADVICE)) from None
            raise

    async def facts(self) -> dict[str, Any]:
        """Return the values that `RayLearner` keeps a copy of."""
        return {"step": self._learner.step, "needs_estimates": self._learner.needs_estimates, "number": self.number}

    async def update(self, batch: Batch) -> tuple[Metrics, int]:
        await self.changing()
        return await self._learner.update(batch), self._learner.step

    async def replay_update(self, batch: Batch, step: int) -> Metrics:
        await self.changing()
        return await self._learner.replay_update(batch, step)

    async def estimate(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        return await self._learner.estimate(samples)

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        return await self._learner.logprobs(samples)

    async def undo_step(self) -> bool:
        return self._learner.undo_step()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._learner.weights()

    async def save(self, folder: Path) -> None:
        await asyncio.to_thread(self._learner.save, folder)

    async def load(self, folder: Path) -> int:
        await self.changing()
        await asyncio.to_thread(self._learner.load, folder)
        return self._learner.step

    async def export(self, folder: Path) -> None:
        await asyncio.to_thread(self._learner.export, folder)

    def news(self) -> Any:
        return self._spans.drain()

    async def close(self) -> None:
        self._stack.close()


class RayLearner:
    """A learner actor as a `gleanrl.protocols.Learner`, with the further methods that the local runtime calls.

    Every call raises `LearnerLost` once the actor is gone.
    """

    def __init__(self, actors: ActorPool) -> None:
        (self._actor,) = actors.members.values()
        facts = self._ask_blocking("facts")
        self.step: int = facts["step"]
        """Steps whose groups are consumed."""
        self.needs_estimates: bool = facts["needs_estimates"]
        self._weights = WeightHandle(self._actor, facts["number"])

    async def update(self, batch: Batch) -> Metrics:
        self._changing()
        metrics, self.step = await self._ask("update", batch)
        return metrics

    async def replay_update(self, batch: Batch, step: int) -> Metrics:
        self._changing()
        return await self._ask("replay_update", batch, step)

    async def estimate(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        return await self._ask("estimate", samples)

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        return await self._ask("logprobs", samples)

    def undo_step(self) -> bool:
        return self._ask_blocking("undo_step")

    def weights(self) -> Any:
        """Return a `WeightHandle`: the tensors stay with the learner until a sampler takes them."""
        return self._weights

    def save(self, folder: Path) -> None:
        self._ask_blocking("save", folder.absolute())

    def load(self, folder: Path) -> None:
        self._changing()
        self.step = self._ask_blocking("load", folder.absolute())

    def export(self, folder: Path) -> None:
        self._ask_blocking("export", folder.absolute())

    def _changing(self) -> None:
        """Count a change of the weights, as the actor does (`WeightSource.changing`)."""
        self._weights = WeightHandle(self._actor, self._weights.number + 1)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._actor.ask(method, *arguments)
        except ActorDied as error:
            raise LearnerLost(str(error)) from None

    def _ask_blocking(self, method: str, *arguments: Any) -> Any:
        try:
            return self._actor.ask_blocking(method, *arguments)
        except ActorDied as error:
            raise LearnerLost(str(error)) from None
