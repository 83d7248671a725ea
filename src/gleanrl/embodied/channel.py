"""How workers hand things to one another: a bounded queue that can be closed."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The channel was closed and, for who takes, is empty."""


class Channel(Protocol[T]):
    """Items in order, by key; whoever is too fast waits."""

    async def put(self, item: T, *, key: str = "") -> None:
        """Wait for room, then leave the item. Raises `Closed`, or what the channel was closed with."""
        ...

    async def get(self, *, key: str = "") -> T:
        """Wait for an item and take it. Raises `Closed`, or what the channel was closed with, once nothing is left."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Nothing more is put; who waits is told, with ``error`` where there is one. Closing again changes nothing."""
        ...


class LocalChannel(Generic[T]):
    """A `Channel` inside one event loop.

    Args:
        capacity: items of each key that wait at most.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: a channel needs room for one item")
        self.capacity = capacity
        self._items: dict[str, deque[T]] = {}
        self._changed = asyncio.Condition()
        self._closed: BaseException | None = None

    def size(self, *, key: str = "") -> int:
        """Items that wait."""
        return len(self._items.get(key, ()))

    @property
    def closed(self) -> bool:
        """Nothing more is put."""
        return self._closed is not None

    async def put(self, item: T, *, key: str = "") -> None:
        items = self._items.setdefault(key, deque())
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed is not None or len(items) < self.capacity)
            if self._closed is not None:
                raise self._closed
            items.append(item)
            self._changed.notify_all()

    async def get(self, *, key: str = "") -> T:
        items = self._items.setdefault(key, deque())
        async with self._changed:
            await self._changed.wait_for(lambda: bool(items) or self._closed is not None)
            if not items:
                assert self._closed is not None
                raise self._closed
            self._changed.notify_all()
            return items.popleft()

    async def give_back(self, item: T, *, key: str = "") -> None:
        """What was taken is the next to be taken again, whatever the room, also where nothing more is put."""
        async with self._changed:
            self._items.setdefault(key, deque()).appendleft(item)
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        if self._closed is None:
            self._closed = error if error is not None else Closed()
            self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
