"""Starts the processes that a run's learner is spread over, or joins those that torchrun has started.

Rank 0 runs the job. Without torchrun, each other rank is a process that runs `python -m gleanrl.runtime.sharded`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gleanrl.config.settings import Config
from gleanrl.learners.distributed.ranks import Ranks, attempt_store, environment
from gleanrl.learners.distributed.sharded import dismiss, serve
from gleanrl.learners.models import resolve_device
from gleanrl.utils.errors import UserError

STARTING_S = 600.0  # seconds for all ranks to start: imports take long on a busy machine
NOTICE_S = 2.0  # seconds after which the end of a process is surely noticed
ENDING_S = 30.0  # seconds for each process to end after the run
_CUDA = "GLEANRL_CUDA"


@contextmanager
def learner_ranks(config: Config) -> Iterator[Ranks | None]:
    """Yield the processes that the learner is spread over, with this one as rank 0; None if there is only one.

    In a torchrun process other than rank 0 the block never runs: the process serves rank 0 until the run ends, and then
    raises SystemExit.

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
    cuda = device.type == "cuda"
    if device.index:
        raise UserError(
            f"model.device = {config.model.device!r}: each rank takes a device of its own; set it to 'cuda'"
        )
    local_ranks = settings.ranks if met is None else met[3] + 1
    if cuda and local_ranks > torch.cuda.device_count():
        raise UserError(
            f"{local_ranks} ranks of the learner on this machine, but {torch.cuda.device_count()} CUDA devices (each "
            "takes one); lower learner.ranks (torchrun: --nproc-per-node), on Ray raise ray.learner_gpus, or set "
            "model.device = 'cpu'"
        )
    if met is None:
        yield from _start_ranks(settings.ranks, config.run.threads, cuda=cuda)
        return
    store, rank, count, local = met
    if settings.ranks not in (1, count):
        raise UserError(f"learner.ranks = {settings.ranks}, but torchrun started {count}; leave it out under torchrun")
    ranks = Ranks(store, rank, count, local=local, cuda=cuda)
    if rank:
        raise SystemExit(serve(ranks))
    try:
        yield ranks
    finally:
        dismiss(ranks)


def _start_ranks(count: int, threads: int, *, cuda: bool) -> Iterator[Ranks]:
    server = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    processes = [_start(rank, count, server.port, threads, cuda=cuda) for rank in range(1, count)]
    ranks: Ranks | None = None
    news: SimpleQueue[Ranks | Exception | str] = SimpleQueue()
    started = threading.Event()

    def join() -> None:
        """Wait until all processes have joined. Runs on a thread, so that a process that ends early is noticed."""
        try:
            news.put(Ranks(attempt_store(server), 0, count, cuda=cuda))
        except Exception as error:
            news.put(error)

    def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
        """Report the end of a process to `news`, which is read while ranks start, and a later failure to the ranks."""
        status = process.wait()
        ended = f"rank {rank} ended with " + (f"signal {-status}" if status < 0 else f"status {status}")
        news.put(ended)
        started.wait()
        if status and ranks is not None:
            with suppress(RuntimeError):  # the run has ended already
                ranks.fail(f"{ended}; continue from the last checkpoint with --resume")

    for rank, process in enumerate(processes, start=1):
        threading.Thread(target=watch, args=(rank, process), daemon=True).start()
    threading.Thread(target=join, daemon=True).start()
    try:
        try:
            first = news.get(timeout=STARTING_S)
            if isinstance(first, Exception):  # that a process ended explains more than the error of its peers
                with suppress(Empty):
                    first = news.get(timeout=NOTICE_S)
        except Empty:
            raise UserError(f"not all {count} ranks of the learner began within {STARTING_S:g} s") from None
        if isinstance(first, str):
            raise UserError(f"{first} before it began; what it said is above")
        if isinstance(first, Exception):
            raise first
        ranks = first
        started.set()
        try:
            yield ranks
        finally:
            dismiss(ranks)
            for process in processes if ranks.broken is None else ():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING_S)
    finally:
        started.set()
        for process in processes:
            process.kill()
        if ranks is not None:
            ranks.join_thread()


def _start(rank: int, count: int, port: int, threads: int, *, cuda: bool) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that only rank 0 receives a Ctrl-C."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port, _CUDA: int(cuda)}
    own["OMP_NUM_THREADS"] = threads or max(1, (os.cpu_count() or 1) // count)
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a lost connection is reported in one line, not as a C++ stack
    given = {**os.environ, **quiet, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}}
    command = [sys.executable, "-m", "gleanrl.runtime.sharded"]
    return subprocess.Popen(command, env=given, stdin=subprocess.DEVNULL, start_new_session=True)


def main(variables: Mapping[str, str] = os.environ) -> int:
    """Run a process that `_start` started."""
    met = environment(variables)
    assert met is not None
    store, rank, count, local = met
    return serve(Ranks(store, rank, count, local=local, cuda=variables[_CUDA] == "1"))


if __name__ == "__main__":
    sys.exit(main())
