"""Real processes for tests of sharded engines: rank 0 runs the test's functions, and the other ranks serve it."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import FileStore

from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.distributed.sharded import ShardedEngine, dismiss, make_local, serve

TIMEOUT = 240.0  # seconds; long, because the machine may be busy


class Processes:
    """Rank 0 and the processes that serve it; rank 0 runs one function after another until `end`."""

    def __init__(self, count: int, *, cuda: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn" if cuda else "forkserver")  # a process with CUDA loaded cannot fork
        context.set_forkserver_preload(["tests.learners.test_sharded_state", __name__])  # has no effect on "spawn"
        self._pipe, theirs = context.Pipe()
        self._processes = [
            context.Process(
                target=_run, args=(rank, count, self._folder.name, None if rank else theirs, cuda), daemon=True
            )
            for rank in range(count)
        ]
        for process in self._processes:
            process.start()
        theirs.close()

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return ``work(ranks, *args)``, computed in rank 0. Raises EOFError if it raises, hangs, or rank 0 is dead."""
        self._pipe.send((work, args))
        if not self._pipe.poll(TIMEOUT):
            raise EOFError("rank 0 hangs")
        self._pipe.recv()
        return torch.load(Path(self._folder.name) / "result", weights_only=False)

    def end(self) -> list[int | None]:
        """End all processes and return their exit statuses; kill those that still run after the time limit."""
        with suppress(OSError):
            self._pipe.send(None)
        for process in self._processes:
            process.join(TIMEOUT)
        statuses = [process.exitcode for process in self._processes]
        for process in self._processes:
            process.kill()
        self._pipe.close()
        self._folder.cleanup()
        return statuses


shared: dict[int, Processes] = {}
"""Processes that `led` reuses, by their number; `tests.conftest` ends them."""


def led(count: int, work: Callable[..., Any], *args: Any, cuda: bool = False) -> Any:
    """Return ``work(ranks, *args)``, computed in rank 0 of ``count`` processes.

    Starting a process costs more than most tests, so calls share processes. A call that fails ends them.
    """
    processes = shared.pop(count, None) if not cuda else None
    processes = processes or Processes(count, cuda=cuda)
    try:
        result = processes.call(work, *args)
    except BaseException:
        processes.end()
        raise
    if cuda:
        assert processes.end() == [0] * count
    else:
        shared[count] = processes
    return result


def ended(count: int, work: Callable[..., Any], *args: Any) -> tuple[list[int | None], Any]:
    """Run ``work`` in new processes; return their exit statuses and its result, which is None if it failed."""
    processes, result = Processes(count), None
    with suppress(EOFError, ConnectionResetError):
        result = processes.call(work, *args)
    return processes.end(), result


def _run(rank: int, count: int, folder: str, pipe: Any, cuda: bool) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", count)
    ranks = Ranks(store, rank, count, local=rank, cuda=cuda)
    if rank:
        sys.exit(serve(ranks))
    try:
        while (given := pipe.recv()) is not None:
            work, args = given
            torch.save(work(ranks, *args), f"{folder}/result")
            pipe.send("done")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    dismiss(ranks)


def engine_of(ranks: Ranks | None) -> dict[str, Any]:
    """Return the learner argument for an engine sharded over ``ranks``, on which `asked` works too."""
    return {} if ranks is None else {"engine": partial(ShardedEngine, ranks, make=_probed)}


def asked(engine: Any, what: Callable[[Any], Any]) -> Any:
    """Call ``what`` on an engine, or on each rank's part of a sharded one; return rank 0's result."""
    return engine._everywhere("asked", what) if isinstance(engine, ShardedEngine) else what(engine)


def _probed(*args: Any, **options: Any) -> Any:
    engine: Any = make_local(*args, **options)
    engine.asked = lambda what: what(engine)
    return engine
