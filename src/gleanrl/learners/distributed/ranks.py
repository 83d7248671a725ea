"""The processes that hold a model together. Rank 0 sends commands, all processes execute them, and all see an error.

A command is complete when every process has reported success. A process that fails stores the reason before the others
notice its absence. A process that dies closes its connections, which interrupts the others' collectives. In both cases
rank 0 raises one `UserError` with the reason.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from gleanrl.utils.errors import UserError
from gleanrl.utils.text import first_line

T = TypeVar("T")
log = logging.getLogger(__name__)
IDLE = timedelta(days=365)  # limit between two commands, because rank 0 may sample and wait for rewards for any time
WORK = timedelta(minutes=30)  # limit of a collective; a process that takes longer is taken to hang
REASON = timedelta(seconds=2)  # to wait for the stored reason after another process died
GRACE_S = 5.0  # seconds in which the others may fail too, before a failed process exits to end their waiting
_FAILURE = "failure"
_CONNECTION = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Timed out waiting", "NCCL")


class Ranks:
    """This process among ``count`` processes, as number ``rank``. All of them make theirs at the same time.

    Args:
        store: where the processes meet; it must exist until all of them have ended.
        local: number of this process on its machine, which selects its GPU.
        cuda: whether the model is on GPUs.
    """

    def __init__(self, store: Store, rank: int, count: int, *, local: int = 0, cuda: bool = False) -> None:
        self.rank, self.count = rank, count
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        self._store = PrefixStore("gleanrl", store)
        self.broken: str | None = None
        """Why the processes cannot continue together, if they cannot."""
        self._reporting: threading.Thread | None = None
        if cuda:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=WORK)
        self._idle: Any = dist.new_group(backend="gloo", timeout=IDLE)
        self._work: Any = dist.new_group(backend="gloo", timeout=WORK)

    def send(self, command: Any) -> None:
        """Send a command from rank 0 to all other processes. Raises `UserError` if one of them is gone."""
        try:
            with self._breaking_on_interrupt():
                dist.broadcast_object_list([command], src=0, group=self._idle)
        except RuntimeError as error:
            raise self._break(error) from error

    def receive(self) -> Any:
        """Wait for the next command of rank 0, without a limit, and return it. Raises `UserError` if rank 0 is gone."""
        box = [None]
        try:
            dist.broadcast_object_list(box, src=0, group=self._idle)
        except RuntimeError as error:
            raise self._break(error) from error
        return box[0]

    def execute(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Execute ``work``, as all processes do now, and return its result.

        Raises its error if all processes have an error of the same kind. If only some failed or one is gone, the shared
        state is lost, and this call and every later one raise `UserError`.
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
        """Return the values of all processes, by rank."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._work)
        return values

    def share(self, value: T) -> T:
        """Return rank 0's value in all processes."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self._work)
        return box[0]

    def barrier(self) -> None:
        """Wait until all processes have called this. The wait for rank 0 has no time limit."""
        dist.barrier(group=self._idle)

    def fail(self, reason: str) -> None:
        """Store why the processes cannot continue; only the first reason is kept. May be called on any thread."""
        self._store.compare_set(_FAILURE, "", reason)

    def close(self) -> None:
        """Leave the process group. Does nothing if a process is gone."""
        if self.broken is None and dist.is_initialized():
            dist.destroy_process_group()

    def join_thread(self) -> None:
        """Wait for the thread that reports a failure, which must end before the interpreter does.

        Called once all other processes have ended.
        """
        if self._reporting is not None:
            self._reporting.join(GRACE_S)

    # --- errors --------------------------------------------------------------------------------
    @contextmanager
    def _breaking_on_interrupt(self) -> Iterator[None]:
        """Set ``broken`` on an interrupt, which leaves the others in a collective where no command reaches them."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.broken = self.broken or f"the learner was interrupted ({type(error).__name__})"
            raise

    def _settle(self, error: Exception | None) -> None:
        """Exchange with the other processes whether the work failed. Raises `UserError` if not all can continue."""
        if error is None:
            try:
                kinds = self.gather("")
            except RuntimeError as broken:
                raise self._break(broken) from broken
        else:
            log.debug("rank %d", self.rank, exc_info=error)
            # A connection error only means that another process is gone.
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
            if reporting.is_alive() and self.rank:  # exit, so that the others stop waiting
                print(f"gleanrl: {self._reason()}", file=sys.stderr, flush=True)
                os._exit(1)
            kinds = gathered or [type(error).__name__, ""]  # others may still wait inside the work
        if len(set(kinds)) > 1:
            raise self._break(error)
        if error is not None and self.rank == 0:
            self._store.delete_key(_FAILURE)  # all processes failed in the same way and can continue

    def _break(self, error: Exception | None) -> UserError:
        self.broken = self._reason() or (
            f"a process of the learner is gone ({_line(error) if error else 'no reason given'}); "
            "continue from the last checkpoint with --resume"
        )
        return UserError(self.broken)

    def _reason(self) -> str | None:
        try:
            self._store.wait([_FAILURE], REASON)
            return self._store.get(_FAILURE).decode()
        except RuntimeError:  # no reason is stored, or the store is gone too
            return None


def environment(variables: Mapping[str, str]) -> tuple[Store, int, int, int] | None:
    """Return store, rank, count and local rank as torchrun sets them; None without torchrun or for a single process.

    Raises `UserError` if only some of torchrun's variables are set, as in jobs of other launchers.
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
    agent_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds the store itself
    store = TCPStore(host, port, count, is_master=rank == 0 and not agent_store, wait_for_workers=False)
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    return attempt_store(store, attempt), rank, count, number("LOCAL_RANK", str(rank))


def attempt_store(store: Store, attempt: str = "0") -> Store:
    """Return the store of one attempt to start, which does not contain what an earlier attempt stored."""
    return PrefixStore(f"attempt {attempt}", store)


def _line(error: Exception) -> str:
    line = first_line(error, 1000)
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"[:300]
