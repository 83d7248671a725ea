"""The processes that hold a model together: rank 0 says what is done, all do it, and an error of one is told to all.

Work is over when every process said so. A process that fails says why before the others can miss it; one that dies
breaks its connections, which ends the others' work. Either way rank 0 raises one clear line.
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
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from gleanrl.utils.errors import UserError

T = TypeVar("T")
log = logging.getLogger(__name__)
IDLE = timedelta(days=365)  # rank 0 may sample, and wait for rewards, as long as it likes
WORK = timedelta(minutes=30)  # without a word of another process in the middle of work: it hangs
SAYING = timedelta(seconds=2)  # for who saw another die to say so
GRACE_S = 5.0  # for the others to fail too, before a process that failed ends itself and so their waiting
_FAILURE = "failure"


class Ranks:
    """This process among ``count`` of them, ``rank`` by number; made in all of them at once.

    Args:
        store: where they meet; it must outlive them all.
        local: number of this process on its machine: which of several GPUs is its own.
        cuda: whether the model is on GPUs.
    """

    def __init__(self, store: Store, rank: int, count: int, *, local: int = 0, cuda: bool = False) -> None:
        self.rank, self.count = rank, count
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        self._store = PrefixStore("gleanrl", store)
        self.broken: str | None = None
        self._asking: threading.Thread | None = None
        if cuda:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=WORK)
        self._idle: Any = dist.new_group(backend="gloo", timeout=IDLE)
        self._work: Any = dist.new_group(backend="gloo", timeout=WORK)

    def tell(self, command: Any) -> None:
        """From rank 0, to all others. Raises `UserError` if one is gone."""
        try:
            with self._uninterrupted():
                dist.broadcast_object_list([command], src=0, group=self._idle)
        except RuntimeError as error:
            raise self._break(error) from error

    def hear(self) -> Any:
        """What rank 0 says next, however long it takes. Raises `UserError` if it is gone."""
        box = [None]
        try:
            dist.broadcast_object_list(box, src=0, group=self._idle)
        except RuntimeError as error:
            raise self._break(error) from error
        return box[0]

    def attempt(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """What ``work`` gives, which all processes do now.

        Raises its error if all have the same kind. Raises `UserError`, now and on every later call, if only some failed
        or one is gone: what they hold together is then lost.
        """
        if self.broken is not None:
            raise UserError(self.broken)
        with self._uninterrupted():
            try:
                result = work(*args, **options)
            except Exception as error:
                self._settle(error)
                raise
            self._settle(None)
            return result

    def gather(self, value: T) -> list[T]:
        """Each process's value, by rank."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._work)
        return values

    def share(self, value: T) -> T:
        """Rank 0's value."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self._work)
        return box[0]

    def together(self) -> None:
        """Wait for all, rank 0 as long as it likes."""
        dist.barrier(group=self._idle)

    def fail(self, why: str) -> None:
        """Say why the processes cannot go on; who was first is believed. From any thread."""
        self._store.compare_set(_FAILURE, "", why)

    def close(self) -> None:
        """Leave the others; not to be called where one is gone."""
        if self.broken is None and dist.is_initialized():
            dist.destroy_process_group()

    def missed(self) -> None:
        """All others have ended: wait for a thread that waited for them, which must not outlive the interpreter."""
        if self._asking is not None:
            self._asking.join(GRACE_S)

    # --- how it ends ---------------------------------------------------------------------------
    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """An interrupt leaves the others in the middle of something, where they hear nothing more."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.broken = self.broken or f"the learner was interrupted ({type(error).__name__})"
            raise

    def _settle(self, error: Exception | None) -> None:
        """Hear how it went with the others. Raises `UserError` where not all can go on."""
        if error is None:
            try:
                kinds = self.gather("")
            except RuntimeError as broken:
                raise self._break(broken) from broken
        else:
            log.debug("rank %d", self.rank, exc_info=error)
            if not _is_of_connection(error):
                self.fail(f"rank {self.rank} of {self.count}: {_line(error)}")
            kinds = self._others_too(error)
        if len(set(kinds)) > 1:
            raise self._break(error)
        if error is not None and self.rank == 0:
            self._store.delete_key(_FAILURE)  # all stand where they stood before

    def _others_too(self, error: Exception) -> list[str]:
        """The kind of each process's error, if all get to say it; "" for those who wait for this one instead."""
        kinds: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):
                kinds.extend(self.gather(type(error).__name__))

        self._asking = asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(GRACE_S)
        if asking.is_alive() and self.rank:  # its end is what ends their waiting
            print(f"gleanrl: {self._reason()}", file=sys.stderr, flush=True)
            os._exit(1)
        return kinds or [type(error).__name__, ""]

    def _break(self, error: Exception | None) -> UserError:
        self.broken = self._reason() or (
            f"a process of the learner is gone ({_line(error) if error else 'no reason given'}); "
            "continue from the last checkpoint with --resume"
        )
        return UserError(self.broken)

    def _reason(self) -> str | None:
        try:
            self._store.wait([_FAILURE], SAYING)
            return self._store.get(_FAILURE).decode()
        except RuntimeError:  # nobody says anything, or where they meet is gone too
            return None


def environment(variables: Mapping[str, str]) -> tuple[Store, int, int, int] | None:
    """Store, rank, count and local rank as torchrun gives them; None without it or in a world of one.

    Raises `UserError` where some of what torchrun sets is there, as in jobs of other launchers, and the rest is not.
    """
    count = _number(variables, "WORLD_SIZE", "1")
    if count < 2:
        return None
    rank, port = _number(variables, "RANK"), _number(variables, "MASTER_PORT")
    host = _given(variables, "MASTER_ADDR")
    theirs = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds the store itself
    store = TCPStore(host, port, count, is_master=rank == 0 and not theirs, wait_for_workers=False)
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    return meeting(store, attempt), rank, count, _number(variables, "LOCAL_RANK", str(rank))


def _number(variables: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = _given(variables, name, default)
    try:
        return int(value)
    except ValueError:
        raise UserError(
            f"{name} = {value!r} in the environment is no number; start with torchrun, or unset it"
        ) from None


def _given(variables: Mapping[str, str], name: str, default: str | None = None) -> str:
    value = variables.get(name, default)
    if value is None:
        size = variables.get("WORLD_SIZE")
        raise UserError(
            f"WORLD_SIZE = {size} in the environment, but no {name}: start with torchrun, or unset WORLD_SIZE"
        )
    return value


def meeting(store: Store, attempt: str = "0") -> Store:
    """Where the processes of an attempt meet: what those of an earlier one said is not heard."""
    return PrefixStore(f"attempt {attempt}", store)


def _line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"[:300]


def _is_of_connection(error: Exception) -> bool:
    """Whether it only says that another process is gone."""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Timed out waiting", "NCCL")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
