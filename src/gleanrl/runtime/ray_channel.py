"""A channel between processes and machines: a bounded queue with keys inside a Ray actor."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from gleanrl.embodied.channel import Closed, LocalChannel
from gleanrl.utils.errors import UserError

T = TypeVar("T")
CALLS = 10_000  # that wait at once, for room and for items
Answer = tuple[bool, bytes | None]  # whether it was done; the item, or else what the channel was closed with


class ChannelActor:
    """What runs inside the actor, on its event loop. Items and errors are bytes here: it needs nobody's modules.

    A call has a ticket, by which its caller gives it up. Ray's own way would lose what was taken in the moment that it
    is cancelled.
    """

    def __init__(self, capacity: int) -> None:
        self._channel = LocalChannel[bytes](capacity)
        self._error: bytes | None = None
        self._waiting: dict[str, asyncio.Future[Any]] = {}  # by ticket
        self._given_up: set[str] = set()  # tickets of calls that have not come yet, or were answered

    async def put(self, ticket: str, item: bytes, key: str) -> Answer:
        return await self._unless_given_up(ticket, self._channel.put(item, key=key))

    async def get(self, ticket: str, key: str) -> Answer:
        return await self._unless_given_up(ticket, self._channel.get(key=key))

    async def _unless_given_up(self, ticket: str, work: Coroutine[Any, Any, Any]) -> Answer:
        if ticket in self._given_up:
            work.close()
            return False, None
        task = self._waiting[ticket] = asyncio.ensure_future(work)
        try:
            return True, await task
        except Closed:
            return False, self._error
        except asyncio.CancelledError:
            return False, None
        finally:
            del self._waiting[ticket]

    async def give_up(self, ticket: str) -> None:
        if ticket in self._waiting:
            self._waiting[ticket].cancel()
        else:
            self._given_up.add(ticket)

    async def settle(self, ticket: str, item: bytes | None, key: str, given_up: None) -> None:
        """After a call that was given up has been answered, perhaps with an item."""
        self._given_up.discard(ticket)
        if item is not None:
            await self._channel.give_back(item, key=key)

    async def size(self, key: str) -> int:
        return self._channel.size(key=key)

    async def close(self, error: bytes | None) -> None:
        if not self._channel.closed:
            self._error = error
            self._channel.close()


class RayChannel(Generic[T]):
    """A `gleanrl.embodied.channel.Channel` that can be pickled and given to other processes of the cluster.

    Items travel by pickle, through the actor, so they survive who put them. The actor lives as long as a handle does,
    or by its ``options``. A put that is cancelled may have been done; a get that is cancelled takes nothing along, but
    what it had got goes back to the front, where another one may be before it.

    Args:
        capacity: items of each key that wait at most.
        options: Ray's own of the actor: ``name``, ``get_if_exists``, ``lifetime``, ...

    Every call raises `UserError` where the actor is dead, or Ray is not installed.
    """

    def __init__(self, capacity: int, *, options: Mapping[str, Any] | None = None) -> None:
        LocalChannel[T](capacity)  # says what is no capacity here, not in another process
        remote = _ray().remote(ChannelActor)
        made = remote.options(**{"max_concurrency": CALLS, "num_cpus": 0, **(options or {})})
        self._actor, self._closing = made.remote(capacity), None

    def __getstate__(self) -> Any:
        return self._actor

    def __setstate__(self, actor: Any) -> None:
        self._actor, self._closing = actor, None

    async def put(self, item: T, *, key: str = "") -> None:
        """Wait for room, then leave the item. Raises `Closed`, or what the channel was closed with."""
        await self._closed_here()
        done, error = await self._ask("put", _ray().cloudpickle.dumps(item), key=key)
        if not done:
            raise _loaded(error)

    async def get(self, *, key: str = "") -> T:
        """Wait for an item and take it. Raises `Closed`, or what the channel was closed with, once nothing is left."""
        await self._closed_here()
        there, found = await self._ask("get", key=key)
        if not there:
            raise _loaded(found)
        return _ray().cloudpickle.loads(found)

    async def size(self, *, key: str = "") -> int:
        """Items that wait."""
        await self._closed_here()
        with _clearly():
            return await self._actor.size.remote(key)

    def close(self, error: BaseException | None = None) -> None:
        """Nothing more is put; who waits is told, with ``error`` where there is one. Closing again changes nothing."""
        self._closing = self._actor.close.remote(None if error is None else _dumped(error))

    async def _closed_here(self) -> None:
        """Calls of an actor may overtake one another; what comes after `close` finds the channel closed."""
        if self._closing is not None:
            with _clearly():
                await self._closing

    async def _ask(self, method: str, *arguments: Any, key: str) -> Any:
        ticket = uuid.uuid4().hex
        asked = getattr(self._actor, method).remote(ticket, *arguments, key)
        try:
            with _clearly():
                return await asked
        except asyncio.CancelledError:
            given_up = self._actor.give_up.remote(ticket)

            def settle(late: Any) -> None:
                there, item = late.result() if late.exception() is None else (False, None)
                self._actor.settle.remote(ticket, item if there else None, key, given_up)

            asked.future().add_done_callback(settle)
            raise


def _dumped(error: BaseException) -> bytes:
    """An error to be raised elsewhere; where it cannot travel, what it says does."""
    pickler = _ray().cloudpickle
    try:
        told = pickler.dumps(error)
        pickler.loads(told)
        return told
    except Exception:
        return pickler.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _loaded(error: bytes | None) -> BaseException:
    return Closed() if error is None else _ray().cloudpickle.loads(error)


@contextmanager
def _clearly() -> Iterator[None]:
    try:
        yield
    except _ray().exceptions.RayActorError as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"the channel's actor is dead ({why.rstrip('.')}), and what was in it is lost") from None


def _ray() -> Any:
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise UserError("a channel between processes needs Ray: pip install 'gleanrl[ray]'") from None
    return ray
