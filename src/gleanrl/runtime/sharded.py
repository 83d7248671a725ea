"""Starts or joins the processes that a run's learner is spread over: torchrun's, or ones started here.

Rank 0 runs the job. `python -m gleanrl.runtime.sharded` is the program of a process that was started here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue

import torch
from torch.distributed import Store, TCPStore

from gleanrl.config.settings import Config
from gleanrl.learners.distributed.ranks import Ranks, attempt_store, environment
from gleanrl.learners.distributed.sharded import ShardedEngine, dismiss, serve
from gleanrl.learners.engine import Engine, LocalEngine
from gleanrl.learners.models import resolve_device
from gleanrl.utils.errors import UserError

STARTING_S = 600.0  # imports take long on a busy machine
SAYING_S = 2.0  # until the end of a process is noticed
ENDING_S = 30.0
_CUDA = "GLEANRL_CUDA"


@contextmanager
def learner_ranks(config: Config) -> Iterator[Ranks | None]:
    """Yield the processes that the learner is spread over, led by this one until the block ends; None for one process.

    In a torchrun process other than rank 0 the block never runs: the process serves, and ends with SystemExit.

    Raises:
        UserError: the number of processes, or the model's device, does not fit.
    """
    settings, met = config.learner, environment(os.environ)
    if met is None and settings.ranks == 1:
        if settings.tensor_parallel > 1:
            raise UserError(f"learner.tensor_parallel = {settings.tensor_parallel} does not divide the 1 ranks")
        yield None
        return
    device = resolve_device(config.model.device)
    if device.index:
        raise UserError(
            f"model.device = {config.model.device!r}: each rank takes a device of its own; set it to 'cuda'"
        )
    if device.type == "cuda":
        _check_gpus(settings.ranks if met is None else met[3] + 1)
    if met is not None:
        yield from _torchrun(met, settings.ranks, cuda=device.type == "cuda")
    else:
        yield from _started(settings.ranks, config.run.threads, cuda=device.type == "cuda")


def engine_on(ranks: Ranks | None) -> Callable[..., Engine]:
    """Return the function that makes the learner's engine."""
    return LocalEngine if ranks is None else partial(ShardedEngine, ranks)


def _check_gpus(ranks: int) -> None:
    there = torch.cuda.device_count()
    if ranks > there:
        raise UserError(
            f"{ranks} ranks of the learner on this machine, but {there} CUDA devices (each takes one); lower "
            "learner.ranks (torchrun: --nproc-per-node), on Ray raise ray.learner_gpus, or set model.device = 'cpu'"
        )


def _torchrun(met: tuple[Store, int, int, int], wanted: int, *, cuda: bool) -> Iterator[Ranks]:
    store, rank, count, local = met
    if wanted not in (1, count):
        raise UserError(f"learner.ranks = {wanted}, but torchrun started {count}; leave it out under torchrun")
    ranks = Ranks(store, rank, count, local=local, cuda=cuda)
    if rank:
        raise SystemExit(serve(ranks))
    try:
        yield ranks
    finally:
        dismiss(ranks)


def _started(count: int, threads: int, *, cuda: bool) -> Iterator[Ranks]:
    server = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    processes = [_start(rank, count, server.port, threads, cuda=cuda) for rank in range(1, count)]
    ranks: Ranks | None = None
    try:
        ranks = _met(partial(Ranks, attempt_store(server), 0, count, cuda=cuda), processes)
        try:
            yield ranks
        finally:
            dismiss(ranks)
            for process in processes if ranks.broken is None else ():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING_S)
    finally:
        for process in processes:
            process.kill()
        if ranks is not None:
            ranks.join_thread()


def _met(join: Callable[[], Ranks], processes: Sequence[subprocess.Popen[bytes]]) -> Ranks:
    """Call ``join``, which waits for all processes, in a thread, so that the early end of a process is noticed."""
    news: SimpleQueue[Ranks | Exception | _Watch] = SimpleQueue()

    def joining() -> None:
        try:
            news.put(join())
        except Exception as error:
            news.put(error)

    watches = [_Watch(rank, process, news.put) for rank, process in enumerate(processes, start=1)]
    threading.Thread(target=joining, daemon=True).start()
    try:
        first = news.get(timeout=STARTING_S)
        if isinstance(first, Exception):  # the ended process's error says more than that of its peers
            with suppress(Empty):
                first = news.get(timeout=SAYING_S)
    except Empty:
        raise UserError(f"not all {len(processes) + 1} ranks of the learner began within {STARTING_S:g} s") from None
    if isinstance(first, _Watch):
        raise UserError(f"{first.ended} before it began; what it said is above")
    if isinstance(first, Exception):
        raise first
    for watch in watches:
        watch.report(first)
    return first


def _start(rank: int, count: int, port: int, threads: int, *, cuda: bool) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that only rank 0 receives a Ctrl-C."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port, _CUDA: int(cuda)}
    own["OMP_NUM_THREADS"] = threads or max(1, (os.cpu_count() or 1) // count)
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a lost connection is reported in one line, not as a C++ stack
    given = {**os.environ, **quiet, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}}
    command = [sys.executable, "-m", "gleanrl.runtime.sharded"]
    return subprocess.Popen(command, env=given, stdin=subprocess.DEVNULL, start_new_session=True)


class _Watch:
    """Watches a process: calls ``heard`` when it ends, and reports a failure to the ranks."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], heard: Callable[[_Watch], None]) -> None:
        self._rank, self._process, self._heard = rank, process, heard
        self._ranks: Ranks | None = None
        self._ready = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def ended(self) -> str:
        status = self._process.returncode
        return f"rank {self._rank} ended with " + (f"signal {-status}" if status < 0 else f"status {status}")

    def report(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._ready.set()

    def _wait(self) -> None:
        status = self._process.wait()
        self._heard(self)
        self._ready.wait()
        if status and self._ranks is not None:
            with suppress(RuntimeError):  # the run has ended already
                self._ranks.fail(f"{self.ended}; continue from the last checkpoint with --resume")


def main(variables: Mapping[str, str] = os.environ) -> int:
    """Run a process that `_start` started."""
    met = environment(variables)
    assert met is not None
    store, rank, count, local = met
    return serve(Ranks(store, rank, count, local=local, cuda=variables[_CUDA] == "1"))


if __name__ == "__main__":
    sys.exit(main())
