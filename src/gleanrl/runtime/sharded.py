"""Starts the processes among which a run's learner is sharded, or connects to those that torchrun has started.

Rank 0 is the process that runs the job; the other ranks only execute the learner's commands. Without torchrun, rank 0
starts them as ``python -m gleanrl.runtime.sharded``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gleanrl.config.settings import Config
from gleanrl.config.validate import check_one_process
from gleanrl.learners.distributed.ranks import Ranks, attempt_store, environment
from gleanrl.learners.distributed.sharded import dismiss, serve
from gleanrl.learners.models import resolve_device
from gleanrl.utils.errors import UserError

STARTING_S = 600.0  # limit in seconds for all ranks to start; imports take long on a busy machine
NOTICE_S = 2.0  # seconds to wait for the report that a process has ended, after the connection to it has failed
ENDING_S = 30.0  # seconds that each process may take to exit after the run, before it is killed
_CUDA = "GLEANRL_CUDA"


@contextmanager
def learner_ranks(config: Config) -> Iterator[Ranks | None]:
    """Yield the `Ranks` of a sharded learner, of which this process is rank 0, or None if there is only one process.

    The number of ranks is ``learner.ranks``, or the number of processes if torchrun started this one. In a torchrun
    process of another rank, the block does not run: this function executes the commands of rank 0 until the run ends,
    and then raises SystemExit. When the block ends, the other processes are ended too.

    Raises:
        UserError: the number of ranks contradicts torchrun or exceeds the number of GPUs, ``model.device`` names a
            single GPU, or a process ended before it had started.
    """
    settings, met = config.learner, environment(os.environ)
    if met is None and settings.ranks == 1:
        check_one_process(settings)
        yield None
        return
    cuda = use_cuda(config)
    local_ranks = settings.ranks if met is None else met[3] + 1
    if cuda and local_ranks > torch.cuda.device_count():
        raise UserError(
            f"{local_ranks} ranks of the learner on this machine, but {torch.cuda.device_count()} CUDA devices (each "
            "takes one); lower learner.ranks (torchrun: --nproc-per-node), or set model.device = 'cpu'"
        )
    if met is None:
        yield from _start_ranks(settings.ranks, config.run.threads, cuda=cuda)
        return
    store, rank, count, local = met
    if settings.ranks not in (1, count):
        raise UserError(f"learner.ranks = {settings.ranks}, but torchrun started {count}; leave it out under torchrun")
    ranks = Ranks(store, rank, count, local=local, cuda=cuda)
    if rank:
        raise SystemExit(_serve(ranks))
    try:
        yield ranks
    finally:
        dismiss(ranks)


def use_cuda(config: Config) -> bool:
    """Return whether each rank uses a GPU. Raises `UserError` if ``model.device`` names a single one."""
    device = resolve_device(config.model.device)
    if device.index:
        raise UserError(
            f"model.device = {config.model.device!r}: each rank takes a device of its own; set it to 'cuda'"
        )
    return device.type == "cuda"


def _serve(ranks: Ranks) -> int:
    # A terminal or torchrun sends these signals to all processes. Only rank 0 handles them, and decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return serve(ranks)


def _start_ranks(count: int, threads: int, *, cuda: bool) -> Iterator[Ranks]:
    server = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    # Nothing is written to this pipe. Its end tells the ranks that this process has died.
    reader, writer = os.pipe()
    processes = [_start(rank, count, server.port, threads, cuda=cuda, stdin=reader) for rank in range(1, count)]
    os.close(reader)
    ranks: Ranks | None = None
    news: SimpleQueue[Ranks | Exception | str] = SimpleQueue()
    started = threading.Event()

    def join() -> None:
        """Put the `Ranks` into `news` once all processes have connected, or the exception if that fails.

        Runs on a thread of its own, because the constructor of `Ranks` blocks and a process may end meanwhile.
        """
        try:
            news.put(Ranks(attempt_store(server), 0, count, cuda=cuda))
        except Exception as error:
            news.put(error)

    def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until ``process`` ends and report how it ended. Runs on a thread of its own.

        While the ranks start, the report is read from `news`. Afterwards, an exit status other than 0 is reported by
        `Ranks.fail`, which makes the other ranks raise an error.
        """
        status = process.wait()
        ended = f"rank {rank} ended with " + (f"signal {-status}" if status < 0 else f"status {status}")
        news.put(ended)
        started.wait()
        if status and ranks is not None:
            with suppress(RuntimeError):  # raised if the run has ended and the connection is closed
                ranks.fail(f"{ended}; continue from the last checkpoint with --resume")

    watchers = [
        threading.Thread(target=watch, args=(rank, process), daemon=True)
        for rank, process in enumerate(processes, start=1)
    ]
    for watcher in watchers:
        watcher.start()
    threading.Thread(target=join, daemon=True).start()
    try:
        try:
            first = news.get(timeout=STARTING_S)
            if isinstance(first, Exception):
                # If a process ended, its exit status is a better explanation than this error of the connection.
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
        # Python aborts at its exit if a thread is in torch's store then.
        for watcher in watchers:
            watcher.join(ENDING_S)
        os.close(writer)
        if ranks is not None:
            ranks.join_thread()


def _start(rank: int, count: int, port: int, threads: int, *, cuda: bool, stdin: int) -> subprocess.Popen[bytes]:
    """Start the process of ``rank``, which ends when the pipe ``stdin`` does.

    It is in a session of its own, so that only rank 0 receives SIGINT on Ctrl-C.
    """
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port, _CUDA: int(cuda)}
    own["OMP_NUM_THREADS"] = threads or max(1, (os.cpu_count() or 1) // count)
    # On a lost connection, torch would print a C++ stack trace. Rank 0 reports the error in one line instead.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    given = {**os.environ, **quiet, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}}
    command = [sys.executable, "-m", "gleanrl.runtime.sharded"]
    return subprocess.Popen(command, env=given, stdin=stdin, start_new_session=True)


def main(variables: Mapping[str, str] = os.environ) -> int:
    """Connect to rank 0 and execute its commands; the entry point of a process started by `_start`.

    ``variables`` are the environment variables that `_start` sets. Returns the exit status.
    """

    def end_with_rank_0() -> None:
        os.read(0, 1)
        os._exit(1)

    # The connection to rank 0 shows its death only once it exists. Before that, this process would try to connect for
    # minutes.
    threading.Thread(target=end_with_rank_0, daemon=True).start()
    met = environment(variables)
    assert met is not None
    store, rank, count, local = met
    return _serve(Ranks(store, rank, count, local=local, cuda=variables[_CUDA] == "1"))


if __name__ == "__main__":
    sys.exit(main())
