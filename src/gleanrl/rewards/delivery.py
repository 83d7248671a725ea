"""Groups in, groups out, each as soon as it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from gleanrl.rewards.request import Request
from gleanrl.types import Message, Task, Trajectory

What = str | Sequence[Message] | Trajectory
"""A response, the messages of a conversation, or a trajectory."""
Item = tuple[Task, What]

T = TypeVar("T")
Groups = Iterable[Sequence[Item]] | AsyncIterable[Sequence[Item]]


def request_of(item: Item) -> Request:
    """A response follows the task's prompt."""
    task, what = item
    if isinstance(what, Trajectory):
        return Request.of(task, what)
    if isinstance(what, str):
        return Request(task, (*task.prompt, Message(role="assistant", content=what)))
    return Request(task, tuple(what))


async def in_completion_order(
    groups: Groups, work: Callable[[Sequence[Item]], Awaitable[T]], room: int
) -> AsyncIterator[tuple[int, T]]:
    """``(index, result)`` of each group as soon as its work is done.

    The next group is taken while fewer than ``room`` members are at work or undelivered. The first error of ``groups``
    or of any work ends it all.
    """
    loop = asyncio.get_running_loop()
    results: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()  # None: look again
    sizes: dict[int, int] = {}  # of the groups that were taken and not delivered
    members = 0  # of all these
    freed = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def one(index: int, group: Sequence[Item]) -> None:
        try:
            results.put_nowait((index, await work(group)))
        except Exception as error:
            results.put_nowait(error)

    async def feed() -> None:
        nonlocal members
        index = 0
        try:
            async for group in _each(groups):
                sizes[index] = len(group)
                members += len(group)
                task = loop.create_task(one(index, group))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                index += 1
                while members >= room:
                    freed.clear()
                    await freed.wait()
            results.put_nowait(None)
        except Exception as error:
            results.put_nowait(error)

    feeder = loop.create_task(feed())
    try:
        while sizes or not feeder.done():
            got = await results.get()
            if isinstance(got, BaseException):
                raise got
            if got is None:
                await feeder
                continue
            members -= sizes.pop(got[0])
            freed.set()
            yield got
    finally:
        left = [feeder, *tasks]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _each(groups: Groups) -> AsyncIterator[Sequence[Item]]:
    if isinstance(groups, AsyncIterable):
        async for group in groups:
            yield group
    else:
        for group in groups:
            yield group
