"""Processes groups concurrently and delivers each as soon as it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


async def in_completion_order(
    groups: Iterable[Sequence[S]] | AsyncIterable[Sequence[S]],
    work: Callable[[Sequence[S]], Awaitable[T]],
    room: int,
) -> AsyncIterator[tuple[int, T]]:
    """Yield ``(index, result)`` of each group as soon as its work is done.

    The next group is taken while fewer than ``room`` members are in work or undelivered. The first error of
    ``groups`` or of any work cancels everything else.
    """
    loop = asyncio.get_running_loop()
    results: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()  # None: there are no more groups
    sizes: dict[int, int] = {}  # of groups taken but not delivered
    members = 0  # sum of these sizes
    delivered = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def work_on(index: int, group: Sequence[S]) -> None:
        try:
            results.put_nowait((index, await work(group)))
        except Exception as error:
            results.put_nowait(error)

    async def take_all() -> None:
        nonlocal members
        index = 0
        try:
            async for group in _iterate(groups):
                sizes[index] = len(group)
                members += len(group)
                task = loop.create_task(work_on(index, group))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                index += 1
                while members >= room:
                    delivered.clear()
                    await delivered.wait()
            results.put_nowait(None)
        except Exception as error:
            results.put_nowait(error)

    taking = loop.create_task(take_all())
    try:
        while sizes or not taking.done():
            result = await results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                await taking
                continue
            members -= sizes.pop(result[0])
            delivered.set()
            yield result
    finally:
        left = [taking, *tasks]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _iterate(groups: Iterable[Sequence[S]] | AsyncIterable[Sequence[S]]) -> AsyncIterator[Sequence[S]]:
    if isinstance(groups, AsyncIterable):
        async for group in groups:
            yield group
    else:
        for group in groups:
            yield group
