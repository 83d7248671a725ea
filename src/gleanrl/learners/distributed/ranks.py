"""Coordinates the processes over which a learner's model is sharded, and handles the failure of one of them.

Rank 0 sends commands, and all processes execute them. A command is complete when every process has reported whether it
succeeded. A process that fails writes the reason to the store that the processes share, before it reports or exits. A
process that dies closes its connections, which makes the collectives of the other processes raise. In both cases rank 0
raises one `UserError`, with the reason if it is known.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import init_device_mesh

from gleanrl.utils.errors import UserError
from gleanrl.utils.text import first_line

T = TypeVar("T")
log = logging.getLogger(__name__)
# Longest time between two commands, or between two micro-batches. It is practically unlimited, because rank 0 may
# sample and wait for rewards meanwhile.
IDLE = timedelta(days=365)
WORK = timedelta(minutes=30)  # timeout of a collective inside a command; a process that takes longer is taken to hang
REASON_S = 5.0  # seconds to wait for the reason of a failure to appear in the store
# Seconds that a failed process waits for the other processes to report failures too. Then it exits, which ends their
# collectives.
GRACE_S = 5.0
_FAILURE = "failure"  # key of the reason in the store
# Parts of the messages with which a collective raises if another process has died.
_CONNECTION = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Timed out waiting", "NCCL")


class Ranks:
    """This process's membership in the group of processes that share a learner.

    Every process of the group makes one such object. The constructor blocks until all of them have done so.

    Args:
        store: the key-value store of `torch.distributed` through which the processes find each other. It must exist
            until all of them have ended.
        rank: number of this process in the group; rank 0 sends commands.
        count: number of processes in the group.
        local: number of this process among those on its machine, which selects its GPU.
        cuda: whether the model is on GPUs.
    """

    def __init__(self, store: Store, rank: int, count: int, *, local: int = 0, cuda: bool = False) -> None:
        if dist.is_initialized():
            raise UserError(
                "processes of a learner have failed in this Python process before; continue in a new one with --resume"
            )
        self.rank, self.count = rank, count
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        self._store = PrefixStore("gleanrl", store)
        self.broken: str | None = None
        """Why the processes can no longer work together, for example because one has ended; None while they can."""
        self._reporting: threading.Thread | None = None
        if cuda:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=WORK)
        self._idle: Any = dist.new_group(backend="gloo", timeout=IDLE)
        self.group: Any = dist.new_group(backend="gloo", timeout=WORK)
        """Process group for tensors on the CPU that are exchanged inside a command."""
        self._meshes: dict[tuple[tuple[str, int], ...], Any] = {}
        self._groups: dict[tuple[int, ...], Any] = {}

    def mesh(self, **sizes: int) -> Any:
        """Return the device mesh with dimensions of these names and sizes, in this order.

        It is made once, as torch keeps the groups of a mesh, with several threads each, until the process ends. All
        processes must call the method at the same time.
        """
        key = tuple(sizes.items())
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return self._meshes[key]

    def among(self, members: Sequence[int]) -> Any:
        """Return the process group of these ranks for tensors on the CPU. It is made once, as `mesh` says."""
        key = tuple(members)
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(members), timeout=WORK, backend="gloo")
        return self._groups[key]

    def send(self, command: Any) -> None:
        """Send a command from rank 0 to all other processes. Raises `UserError` if one of them has ended."""
        try:
            with self._breaking_on_interrupt():
                dist.broadcast_object_list([command], src=0, group=self._idle)
        except RuntimeError as error:
            raise self._break(error) from error

    def receive(self) -> Any:
        """Wait for the next command of rank 0, however long, and return it. Raises `UserError` if rank 0 has ended."""
        box = [None]
        try:
            dist.broadcast_object_list(box, src=0, group=self._idle)
        except RuntimeError as error:
            raise self._break(error) from error
        return box[0]

    def execute(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call ``work(*args, **options)``, which all processes must do at the same time, and return its result.

        If ``work`` raises an error of the same class in all processes, this error is raised, and the processes can
        continue. If only some processes fail, or one has ended, their states no longer match. Then this call and every
        later one raise `UserError`.
        """
        if self.broken is not None:
            raise UserError(self.broken)
        with self._breaking_on_interrupt():
            try:
                result = work(*args, **options)
            except Exception as error:
                self._settle(error)
                raise
            self._settle(None)
            return result

    def gather(self, value: T) -> list[T]:
        """Return the values that all processes passed, in the order of their ranks."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def share(self, value: T) -> T:
        """Return, in all processes, the value that rank 0 passed."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return the one of ``values`` that is for this process. Only rank 0 passes them, in the order of ranks."""
        box: list[Any] = [None]
        dist.scatter_object_list(box, None if values is None else list(values), src=0, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Wait until all processes have called this method, without a time limit.

        Rank 0 calls it between two micro-batches if it may release the device to other work there, for any time. Other
        collectives would fail after `WORK`.
        """
        dist.barrier(group=self._idle)

    def fail(self, reason: str) -> None:
        """Write to the store why the processes cannot continue. Only the first reason is kept.

        May be called on any thread.
        """
        self._store.compare_set(_FAILURE, "", reason)

    def close(self) -> None:
        """Destroy the process group. Does nothing after a failure, because destroying it needs all processes."""
        if self.broken is None and dist.is_initialized():
            dist.destroy_process_group()

    def join_thread(self) -> None:
        """Wait until the thread that reported a failure has ended, because it must not run when the interpreter exits.

        Call it once all other processes have ended, which also ends the thread's collective.
        """
        if self._reporting is not None:
            self._reporting.join(GRACE_S)

    # --- errors --------------------------------------------------------------------------------
    @contextmanager
    def _breaking_on_interrupt(self) -> Iterator[None]:
        """Set ``broken`` if the block is interrupted, for example by Ctrl-C.

        The other processes may then wait in a collective, where they cannot receive another command.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.broken = self.broken or f"the learner was interrupted ({type(error).__name__})"
            raise

    def _settle(self, error: Exception | None) -> None:
        """Compare the outcome of a command in all processes: success, or the class of the error that was raised.

        ``error`` is the error that the command raised in this process; None if it succeeded. Raises `UserError` if the
        outcomes differ or a process has ended, because the processes cannot continue together then.
        """
        if error is None:
            try:
                kinds = self.gather("")
            except RuntimeError as broken:
                raise self._break(broken) from broken
        else:
            log.debug("rank %d", self.rank, exc_info=error)
            # A connection error means that another process has ended. It is not stored as the reason of the failure.
            of_connection = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CONNECTION)
            if not of_connection:
                self.fail(f"rank {self.rank} of {self.count}: {_line(error)}")
            gathered: list[str] = []

            def report() -> None:
                with suppress(RuntimeError):
                    gathered.extend(self.gather(type(error).__name__))

            self._reporting = reporting = threading.Thread(target=report, daemon=True)
            reporting.start()
            reporting.join(GRACE_S)
            # If the report is still pending, other processes wait in a collective for this one. To exit closes its
            # connections, which makes their collective raise.
            if reporting.is_alive() and self.rank:
                print(f"gleanrl: {self._reason()}", file=sys.stderr, flush=True)
                os._exit(1)
            # Without an answer, another process is taken to have a different outcome, so that the group is broken.
            kinds = gathered or [type(error).__name__, ""]
        if len(set(kinds)) > 1:
            raise self._break(error)
        if error is not None and self.rank == 0:
            # All processes failed in the same way and can continue. The reason is deleted, so that it is not reported
            # for a later failure.
            self._store.delete_key(_FAILURE)

    def _break(self, error: Exception | None) -> UserError:
        self.broken = self._reason() or (
            f"a process of the learner is gone ({_line(error) if error else 'no reason given'}); "
            "continue from the last checkpoint with --resume"
        )
        return UserError(self.broken)

    def _reason(self) -> str | None:
        end = time.monotonic() + REASON_S
        try:
            # `Store.wait` would hold the store's lock, and the thread that stores the reason could not do so meanwhile.
            while not self._store.check([_FAILURE]):
                if time.monotonic() > end:
                    return None
                time.sleep(0.02)
            return self._store.get(_FAILURE).decode()
        except RuntimeError:  # the process that holds the store has ended too
            return None


def environment(variables: Mapping[str, str]) -> tuple[Store, int, int, int] | None:
    """Read torchrun's environment variables; return (store, rank, number of processes, local rank).

    Returns None if there is only one process, as without torchrun. Raises `UserError` if ``WORLD_SIZE`` is above 1 but
    another variable is missing, as in jobs of other launchers, or if a variable is no number.
    """

    def read(name: str, default: str | None = None) -> str:
        value = variables.get(name, default)
        if value is None:
            size = variables.get("WORLD_SIZE")
            raise UserError(
                f"WORLD_SIZE = {size} in the environment, but no {name}: start with torchrun, or unset WORLD_SIZE"
            )
        return value

    def number(name: str, default: str | None = None) -> int:
        value = read(name, default)
        try:
            return int(value)
        except ValueError:
            raise UserError(
                f"{name} = {value!r} in the environment is no number; start with torchrun, or unset it"
            ) from None

    count = number("WORLD_SIZE", "1")
    if count < 2:
        return None
    rank, port, host = number("RANK"), number("MASTER_PORT"), read("MASTER_ADDR")
    # If this is set, torchrun's agent has the store, and rank 0 connects to it like any other rank.
    agent_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(host, port, count, is_master=rank == 0 and not agent_store, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"MASTER_ADDR = {host}, MASTER_PORT = {port}: no connection: {first_line(error)}") from None
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    return attempt_store(store, attempt), rank, count, number("LOCAL_RANK", str(rank))


def attempt_store(store: Store, attempt: str = "0") -> Store:
    """Return a view of ``store`` for one attempt to start the processes.

    After a restart, torchrun keeps the store. The view separates the keys of this attempt from those of earlier ones.
    """
    return PrefixStore(f"attempt {attempt}", store)


def _line(error: Exception) -> str:
    line = first_line(error, 1000)
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"[:300]
