"""Real processes around an engine: rank 0 is the test's own child, the others serve it."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import FileStore

from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.distributed.sharded import ShardedEngine, dismiss, make_fsdp, serve

TIMEOUT = 240.0  # seconds; a machine may be busy


def led(count: int, work: Callable[..., Any], *args: Any, cuda: bool = False) -> Any:
    """What ``work(ranks, *args)`` returns as rank 0 of ``count`` processes; all must end well."""
    statuses, result = ended(count, work, *args, cuda=cuda)
    assert statuses == [0] * count
    return result


def ended(count: int, work: Callable[..., Any], *args: Any, cuda: bool = False) -> tuple[list[int | None], Any]:
    """Exit statuses of the processes, and what ``work`` returned."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        given = [(rank, count, folder, work, args, cuda) for rank in range(count)]
        processes = [context.Process(target=_run, args=own) for own in given]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT)
        statuses = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        path = Path(folder) / "result"
        return statuses, torch.load(path, weights_only=False) if path.exists() else None


def _run(rank: int, count: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...], cuda: bool) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", count)
    ranks = Ranks(store, rank, count, local=rank, cuda=cuda)
    if rank:
        sys.exit(serve(ranks))
    try:
        torch.save(work(ranks, *args), f"{folder}/result")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    dismiss(ranks)


def engine_of(ranks: Ranks | None) -> dict[str, Any]:
    """The argument of a learner whose engine is spread over ``ranks``; it answers `asked` too."""
    return {} if ranks is None else {"engine": partial(ShardedEngine, ranks, make=_probed)}


def asked(engine: Any, what: Callable[[Any], Any]) -> Any:
    """``what`` of an engine, or of each process's part of it; the answer is rank 0's."""
    return engine._everywhere("asked", what) if isinstance(engine, ShardedEngine) else what(engine)


def _probed(*args: Any, **options: Any) -> Any:
    engine: Any = make_fsdp(*args, **options)
    engine.asked = lambda what: what(engine)
    return engine
