"""Runs the learner in a Ray actor.

`LearnerService` runs inside the actor. `RayLearner` is the `Learner` that the training loop uses in the driver.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gleanrl.algorithms.batch import Batch, ModelEstimates, Sample
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.engine import TokenScores
from gleanrl.learners.mapped import replace_parameters
from gleanrl.protocols import Metrics
from gleanrl.runtime.ray.actors import ActorClient, ActorServer, LearnerLost
from gleanrl.runtime.ray.parts import Plans
from gleanrl.runtime.ray.weights import WeightHandle, WeightSource
from gleanrl.runtime.sharded import RankKilled, learner_ranks
from gleanrl.utils.errors import UserError

# The end of the error messages of `Ranks`. It is removed here, because a run on Ray resumes automatically.
_ADVICE = "; continue from the last checkpoint with --resume"
_CHANGING = ("update", "replay_update", "load")


class LearnerService(WeightSource):
    """The service of the learner's actor. It runs the learner and starts the processes among which it is sharded."""

    def __init__(self, driver: ActorServer, plans: Plans, seed: int, training: bool) -> None:
        super().__init__()
        self._driver, self._plans, self._seed, self._training = driver, plans, seed, training
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
        builder, lock = await self._plans.make_builder(self._driver)
        with self._lost_if_a_rank_dies():
            self._ranks = self._stack.enter_context(learner_ranks(builder.config))
            builder = replace(builder, ranks=self._ranks)
            if self._ranks is None:
                replace_parameters(builder.prepared.model, lambda _, parameter: parameter.detach().clone())
            torch.manual_seed(self._seed)  # as in the local runtime, so that both runtimes compute the same
            timeline: Any = self._driver
            # Where the device is not shared, the learner never releases it.
            shared = lock if self._plans.colocated else None
            self._learner = builder.learner(shared, timeline, trains=self._training)

    async def handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        with self._lost_if_a_rank_dies():
            return await super().handle(method, arguments)

    @contextmanager
    def _lost_if_a_rank_dies(self) -> Iterator[None]:
        """Raise `LearnerLost` for an error of the block that is due to the death of one of the learner's ranks.

        The driver then starts all actors again, as if the whole actor had died.
        """
        try:
            yield
        except UserError as error:
            if isinstance(error, RankKilled) or (self._ranks is not None and self._ranks.broken is not None):
                raise LearnerLost(f"learner: {error}".removesuffix(_ADVICE)) from None
            raise

    async def learner(self, method: str, *arguments: Any) -> tuple[Any, int, int]:
        """Call a method of the learner.

        Returns:
            The method's result, the learner's step, and the number of its weights (see `WeightSource`).
        """
        if method in _CHANGING:
            await self.changing()
        call = getattr(self._learner, method)
        if inspect.iscoroutinefunction(call):
            result = await call(*arguments)
        else:
            result = await asyncio.to_thread(call, *arguments)
        return result, self._learner.step, self.number

    async def needs_estimates(self) -> bool:
        return self._learner.needs_estimates

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._learner.weights()

    async def close(self) -> None:
        self._stack.close()


class RayLearner:
    """The driver's `gleanrl.protocols.Learner`, which calls the learner's actor.

    It has all methods of `TorchLearner` that the local runtime calls. Every method raises `LearnerLost` if the actor
    has died.

    Attributes:
        step: number of steps whose groups the learner has consumed.
    """

    def __init__(self, actor: ActorClient) -> None:
        self._actor = actor
        self.needs_estimates: bool = self._actor.ask_blocking("needs_estimates")
        self.step = 0
        self._weights = WeightHandle(self._actor, 0)

    async def update(self, batch: Batch) -> Metrics:
        return self._take(*await self._actor.ask("learner", "update", batch))

    async def replay_update(self, batch: Batch, step: int) -> Metrics:
        return self._take(*await self._actor.ask("learner", "replay_update", batch, step))

    async def estimate(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        return self._take(*await self._actor.ask("learner", "estimate", samples))

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        return self._take(*await self._actor.ask("learner", "logprobs", samples))

    def undo_step(self) -> bool:
        return self._take(*self._actor.ask_blocking("learner", "undo_step"))

    def weights(self) -> Any:
        """Return a `WeightHandle` for the current weights. The tensors stay in the actor until samplers fetch them."""
        return self._weights

    def save(self, folder: Path) -> None:
        self._take(*self._actor.ask_blocking("learner", "save", folder.absolute()))

    def load(self, folder: Path) -> None:
        self._take(*self._actor.ask_blocking("learner", "load", folder.absolute()))

    def export(self, folder: Path) -> None:
        self._take(*self._actor.ask_blocking("learner", "export", folder.absolute()))

    def _take(self, result: Any, step: int, number: int) -> Any:
        """Return ``result``, and store the step and the number of the weights that the call returned with it.

        Calls overlap, so a call may return after a later one. The numbers that it returns are then outdated and are
        ignored.
        """
        if number >= self._weights.number:
            self.step = step
        if number > self._weights.number:
            self._weights = WeightHandle(self._actor, number)
        return result
