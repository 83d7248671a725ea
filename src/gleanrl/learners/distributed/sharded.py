"""An engine whose model is sharded over several processes.

In rank 0, `TorchLearner` uses a `ShardedEngine` like any other engine, and `dismiss` ends the other processes. Each
other process runs `serve`, which executes the same calls on its own part of the engine.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gleanrl.algorithms.batch import Sample
from gleanrl.config.settings import LearnerSettings
from gleanrl.config.validate import MEGATRON_MISSING
from gleanrl.learners.backend import Backend, Pass
from gleanrl.learners.distributed import fsdp, megatron_names
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.engine import LocalEngine, TokenScores, go_on
from gleanrl.learners.models import skeleton
from gleanrl.learners.transformers import TransformersBackend
from gleanrl.types import FloatArray
from gleanrl.utils.errors import UserError
from gleanrl.utils.weights import GatheredWeights


def check_layout(
    model: nn.Module, settings: LearnerSettings, count: int, *, has_critic: bool, half_on_cpu: bool
) -> None:
    """Raise `UserError` if ``count`` processes cannot train ``model`` with these settings.

    The model's weights are not read, so it may be on the meta device. ``half_on_cpu``: whether passes would compute in
    bfloat16 on a CPU.
    """
    if settings.backend == "megatron":
        megatron_names.check_model(model, settings, count, has_critic=has_critic, half_on_cpu=half_on_cpu)
    else:
        fsdp.check_model(model, settings, count)


def make_local(ranks: Ranks, model: nn.Module, settings: LearnerSettings, *args: Any, **options: Any) -> LocalEngine:
    """Make this process's engine, whose model is sharded over ``ranks``.

    All processes call this function at the same time, with the same arguments. Only rank 0 passes a model with weights;
    the others pass its `skeleton` and receive their shards from rank 0.

    Raises:
        UserError: if the processes cannot train this model with these settings (see `check_layout`), or Megatron-core
            is not installed.
    """
    dtype = options.pop("compute_dtype", None) or (torch.bfloat16 if ranks.device.type == "cuda" else torch.float32)
    half_on_cpu = dtype == torch.bfloat16 and ranks.device.type == "cpu"
    critic = options.get("critic") is not None
    check_layout(model, settings, ranks.count, has_critic=critic, half_on_cpu=half_on_cpu)
    backend: Callable[..., Backend]
    if settings.backend == "megatron":
        # Megatron-core warns of optional packages that are missing, of its own defaults, and calls functions of torch
        # that have new names.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
        try:
            from gleanrl.learners.distributed.megatron import MegatronBackend
        except ModuleNotFoundError as error:
            raise UserError(f"{MEGATRON_MISSING} (no module {error.name!r})") from None
        backend = partial(MegatronBackend, ranks)
    else:
        placement = fsdp.Fsdp(ranks, dtype, settings.tensor_parallel, offload=settings.offload_state)
        backend = partial(TransformersBackend, placement=placement)
    return LocalEngine(model, settings, *args, **options, compute_dtype=dtype, backend=backend)


class ShardedEngine:
    """The `Engine` that rank 0 uses. Each call is sent to the other processes, and all execute it on their parts.

    The arguments are those of `LocalEngine`, and in addition ``make``, which makes the engine of each process with a
    backend. ``make`` and the arguments are pickled. Every method raises `UserError` if a process fails or has ended.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        settings: LearnerSettings,
        *args: Any,
        make: Callable[..., LocalEngine] = make_local,
        **options: Any,
    ) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()  # another thread may read `weights` while an update runs
        reference = options.pop("reference", None)
        bare = {"reference": None if reference is None else skeleton(reference)}
        ranks.send((make, (skeleton(model), settings, *args), {**options, **bare}, False))
        self.local = ranks.execute(make, ranks, model, settings, *args, **options, reference=reference)
        self.backward: Callable[..., Pass] = partial(self._on_samples, "backward")
        self.step: Callable[..., float] = partial(self._everywhere, "step")
        self.discard: Callable[[], None] = partial(self._everywhere, "discard")
        self.score: Callable[..., list[TokenScores]] = partial(self._on_samples, "score")
        self.values: Callable[..., list[FloatArray]] = partial(self._on_samples, "values")
        self.adapters: Callable[[], Mapping[str, Tensor]] = partial(self._everywhere, "adapters")
        self.usage, self.model, self.between = self.local.usage, self.local.model, go_on

    def weights(self, dtype: torch.dtype | None = None) -> GatheredWeights:
        """See `Engine.weights`. Each bucket is a call of all processes, so a reader may stop after any of them."""
        return self.local.published(dtype, partial(self._everywhere, "gather"), self.adapters)

    def save(self, folder: Path) -> None:
        self._everywhere("save", folder.absolute())

    def load(self, folder: Path) -> None:
        self._everywhere("load", folder.absolute())

    def _on_samples(self, name: str, samples: Sequence[Sample], **options: Any) -> Any:
        """Call the method ``name`` of each process's part. Only rank 0 gets the samples, and deals them."""
        return self._everywhere(name, samples, sent=((),), **options)

    def _everywhere(self, name: str, *args: Any, sent: tuple[Any, ...] | None = None, **options: Any) -> Any:
        """Call the method ``name`` of each process's part, and return rank 0's result.

        ``sent`` are the arguments in the other processes; None means ``args``. Only one call runs at a time. A call
        from a worker thread waits for the running one. A call on an event loop raises RuntimeError instead, because to
        wait would block the loop, which the running call may need.
        """
        try:
            asyncio.get_running_loop()
            blocking = False
        except RuntimeError:
            blocking = True
        if not self._lock.acquire(blocking):
            raise RuntimeError("the learner's engine is at work; ask it in a thread (asyncio.to_thread)")
        try:
            if self._ranks.broken is not None:
                raise UserError(self._ranks.broken)
            pauses = self.between is not go_on
            self._ranks.send((name, args if sent is None else sent, options, pauses))
            self.local.between = partial(self._pause, self.between) if pauses else go_on
            return self._ranks.execute(getattr(self.local, name), *args, **options)
        finally:
            self._lock.release()

    def _pause(self, pause: Callable[[], None]) -> None:
        pause()
        self._ranks.barrier()


def serve(ranks: Ranks) -> int:
    """Execute the commands of rank 0 until it ends the run, and return the exit status of this process.

    Every process but rank 0 calls this function. The status is 1 if the processes could not continue together.
    """
    engine: Any = None
    try:
        while (command := ranks.receive()) is not None:
            what, args, options, pauses = command
            try:
                if isinstance(what, str):
                    engine.between = ranks.barrier if pauses else go_on
                    ranks.execute(getattr(engine, what), *args, **options)
                else:
                    engine = ranks.execute(what, ranks, *args, **options)
            except Exception:
                if ranks.broken is not None:
                    raise
    except UserError:
        # Rank 0 reports the reason. This process waits until rank 0 has ended, so that its own end cannot come first.
        with suppress(UserError):
            ranks.receive()
        return 1
    return 0


def dismiss(ranks: Ranks) -> None:
    """Send the other processes the command to end, and destroy the process group. Called in rank 0.

    After a failure nothing is sent: the other processes end when rank 0 closes its connections.
    """
    if ranks.broken is None:
        with suppress(UserError):
            ranks.send(None)
    ranks.close()
