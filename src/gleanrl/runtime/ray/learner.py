"""Runs the learner in Ray actors, one for each of its ranks, which may be on several nodes.

`LearnerService` runs inside the actor of rank 0, and `RankService` inside those of the other ranks. `RayLearner` is the
`Learner` that the training loop uses in the driver.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gleanrl.algorithms.batch import Batch, ModelEstimates, Sample
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.distributed.sharded import dismiss, serve
from gleanrl.learners.engine import TokenScores
from gleanrl.learners.mapped import replace_parameters
from gleanrl.protocols import Metrics
from gleanrl.runtime.local import set_up_libraries
from gleanrl.runtime.ray.actors import ActorClient, ActorServer, LearnerLost, Service
from gleanrl.runtime.ray.cluster import import_ray
from gleanrl.runtime.ray.parts import Plans
from gleanrl.runtime.ray.weights import WeightHandle, WeightSource
from gleanrl.runtime.sharded import use_cuda
from gleanrl.utils.errors import ADVICE, UserError
from gleanrl.utils.text import first_line

# Methods of the learner that change its weights.
_CHANGING = ("update", "replay_update", "load", "return_to")


class RankService(Service):
    """The service of the actor of one of the learner's ranks other than rank 0, whose commands it executes."""

    def __init__(self, driver: ActorServer, plans: Plans, training: bool) -> None:
        self._plans, self._training = plans, training

    async def start(self) -> None:
        _check_folder(self._plans, self._training)
        set_up_libraries(self._plans.config)

    async def serve(self, rank: int, host: str, port: int, cuda: bool) -> None:
        """Execute the commands of rank 0 until it ends the run. Raises `LearnerLost` if that is not possible.

        The other arguments are what `LearnerService.open_store` returned.
        """
        count = self._plans.config.learner.ranks

        def work() -> None:
            store = TCPStore(host, port, count, is_master=False, wait_for_workers=False)
            serve(Ranks(store, rank, count, cuda=cuda))

        try:
            await asyncio.to_thread(work)
        except Exception as error:
            raise LearnerLost(f"rank {rank}: {first_line(error)}") from None


class LearnerService(WeightSource):
    """The service of the actor of rank 0, which runs the learner."""

    def __init__(self, driver: ActorServer, plans: Plans, seed: int, training: bool) -> None:
        super().__init__()
        self._driver, self._plans, self._seed, self._training = driver, plans, seed, training
        self._stack = ExitStack()
        self._store: TCPStore | None = None
        self._ranks: Ranks | None = None
        self._learner: Any = None

    async def start(self) -> None:
        _check_folder(self._plans, self._training)
        self._builder, self._lock = await self._plans.make_builder(self._driver)

    async def open_store(self) -> tuple[str, int, bool]:
        """Open the store through which the ranks find each other.

        Returns the store's address and port, and whether each rank uses its actor's GPU.
        """
        host, config = import_ray().util.get_node_ip_address(), self._builder.config
        self._store = TCPStore(host, 0, config.learner.ranks, is_master=True, wait_for_workers=False)
        return host, self._store.port, use_cuda(config)

    async def build(self) -> None:
        """Make the learner. If `open_store` was called, wait for all ranks to connect first."""
        await asyncio.to_thread(self._build)

    def _build(self) -> None:
        config = self._builder.config
        if self._store is None:
            replace_parameters(self._builder.prepared.model, lambda _, parameter: parameter.detach().clone())
        else:
            try:
                self._ranks = Ranks(self._store, 0, config.learner.ranks, cuda=use_cuda(config))
            except RuntimeError as error:
                raise LearnerLost(f"learner: not all ranks connected ({first_line(error)})") from None
            self._stack.callback(dismiss, self._ranks)
        torch.manual_seed(self._seed)  # as in the local runtime, so that both runtimes compute the same
        timeline: Any = self._driver
        # Where the device is not shared, the learner never releases it.
        lock = self._lock if self._plans.colocated else None
        self._learner = replace(self._builder, ranks=self._ranks).learner(lock, timeline, trains=self._training)

    async def rank_lost(self, reason: str) -> None:
        """Make the running or the next call of the learner raise `LearnerLost` because a rank has died."""
        if self._ranks is not None:
            self._ranks.fail(reason)

    async def handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run a call. Raises `LearnerLost` if a rank has died: the driver then starts all actors again."""
        try:
            return await super().handle(method, arguments)
        except UserError as error:
            if self._ranks is not None and self._ranks.broken is not None:
                raise LearnerLost(f"learner: {error}".removesuffix(ADVICE)) from None
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


def _check_folder(plans: Plans, training: bool) -> None:
    if training and not plans.folder.config_path.exists():
        raise UserError(
            f"a node of the learner does not see the run folder {plans.folder.path}, where its checkpoints go; set "
            "run.folder to storage that all nodes share"
        )


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

    def return_to(self, folder: Path) -> None:
        self._take(*self._actor.ask_blocking("learner", "return_to", folder.absolute()))

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
