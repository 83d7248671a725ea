"""One engine in several processes: rank 0 calls it like any other engine, and the others execute the same calls."""

from __future__ import annotations

import asyncio
import copy
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gleanrl.config.settings import LearnerSettings
from gleanrl.learners.distributed.fsdp import Fsdp
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.engine import LocalEngine, Pass, TokenScores
from gleanrl.learners.models import export
from gleanrl.types import FloatArray
from gleanrl.utils.errors import UserError


def make_fsdp(ranks: Ranks, model: nn.Module, settings: LearnerSettings, *args: Any, **options: Any) -> LocalEngine:
    """Make this process's part of a `LocalEngine` whose model is sharded by FSDP2. Called in all processes at once.

    On every rank but 0, ``model`` is a `skeleton`.
    """
    dtype = options.pop("compute_dtype", None) or (torch.bfloat16 if ranks.device.type == "cuda" else torch.float32)
    if settings.lora_rank and settings.tensor_parallel > 1:
        raise UserError("learner.tensor_parallel splits no adapters; leave out learner.lora_rank, or set it to 1")
    placement = Fsdp(ranks, dtype, settings.tensor_parallel)
    engine = LocalEngine(model, settings, *args, **options, compute_dtype=dtype, placement=placement)
    engine.between = ranks.barrier
    return engine


class ShardedEngine:
    """An `Engine` for rank 0 whose calls every process executes on its part. Arguments are those of `LocalEngine`.

    ``make`` makes each process's part; it and the arguments are pickled. Every method raises `UserError` if a
    process failed or is gone.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        settings: LearnerSettings,
        *args: Any,
        make: Any = make_fsdp,
        **options: Any,
    ) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()  # weights may be read while an update runs
        reference = options.pop("reference", None)
        bare = {"reference": None if reference is None else skeleton(reference)}
        ranks.send((make, (skeleton(model), settings, *args), {**options, **bare}))
        self.local: Any = ranks.execute(make, ranks, model, settings, *args, **options, reference=reference)
        self.backward: Callable[..., Pass] = partial(self._everywhere, "backward")
        self.step: Callable[..., float] = partial(self._everywhere, "step")
        self.discard: Callable[[], None] = partial(self._everywhere, "discard")
        self.score: Callable[..., list[TokenScores]] = partial(self._everywhere, "score")
        self.values: Callable[..., list[FloatArray]] = partial(self._everywhere, "values")
        self.weights: Callable[[], Mapping[str, Tensor]] = partial(self._everywhere, "weights")  # on rank 0 only
        self.usage = self.local.usage
        self.between: Callable[[], None] = lambda: None

        def between() -> None:
            self.between()
            ranks.barrier()

        self.local.between = between

    def save(self, folder: Path) -> None:
        self._everywhere("save", folder.absolute())

    def load(self, folder: Path) -> None:
        self._everywhere("load", folder.absolute())

    def export(self, folder: Path, tokenizer: Any = None) -> None:
        export(folder, self.local.model, self.weights(), tokenizer)

    def _everywhere(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of each process's part, one call at a time, and return rank 0's result.

        Raises RuntimeError instead of waiting if that would block an event loop, which the running call may need.
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
            self._ranks.send((name, args, options))
            return self._ranks.execute(getattr(self.local, name), *args, **options)
        finally:
            self._lock.release()


def serve(ranks: Ranks) -> int:
    """Execute the commands of rank 0 until it ends, in every other process, and return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal signals all processes, but rank 0 decides when to end
    engine: Any = None
    try:
        while (command := ranks.receive()) is not None:
            what, args, options = command
            try:
                if isinstance(what, str):
                    ranks.execute(getattr(engine, what), *args, **options)
                else:
                    engine = ranks.execute(what, ranks, *args, **options)
            except Exception:
                if ranks.broken is not None:
                    raise
    except UserError:  # rank 0 reports the reason, so it ends first
        with suppress(UserError):
            ranks.receive()
        return 1
    return 0


def dismiss(ranks: Ranks) -> None:
    """End the other processes from rank 0. If they cannot continue, they end when the connection closes."""
    if ranks.broken is None:
        with suppress(UserError):
            ranks.send(None)
    ranks.close()


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy without the parameters' values, small enough to be sent."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    memo |= {id(buffer): buffer.detach().cpu() for buffer in model.buffers()}
    return copy.deepcopy(model, memo)
