"""A channel between processes, on a local Ray of one core: as bounded, ordered and closed as one inside a process."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gleanrl.embodied.channel import Channel, Closed, LocalChannel
from gleanrl.runtime.ray_channel import RayChannel
from gleanrl.utils.errors import UserError
from tests.embodied.test_channel import settle

WAIT = 60.0  # seconds until something counts as hung
SHORT = 0.3  # seconds in which nothing may happen

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), WAIT))


def produce(channel: Channel[Any], done: Channel[int], count: int) -> None:
    """In a process of its own: puts numbers, and says so of each."""

    async def main() -> None:
        for number in range(count):
            await channel.put({"number": number, "wide": bytes(200_000)}, key="work")
            await done.put(number)

    asyncio.run(main())


async def nothing(waiting: Awaitable[Any]) -> bool:
    """It does not come, and is given up."""
    try:
        await asyncio.wait_for(waiting, SHORT)
    except TimeoutError:
        return True
    return False


def test_another_process_waits_for_room_and_its_items_come_in_order(ray: Any) -> None:
    async def test() -> None:
        channel, done = RayChannel[Any](2), RayChannel[int](9)
        producing = ray.remote(num_cpus=0)(produce).remote(channel, done, 5)
        assert [await done.get() for _ in range(2)] == [0, 1]
        assert await nothing(done.get())
        assert await channel.size(key="work") == 2
        assert (await channel.get(key="work"))["number"] == 0
        assert await done.get() == 2  # the getter that was given up took nothing along
        assert [(await channel.get(key="work"))["number"] for _ in range(4)] == [1, 2, 3, 4]
        await producing
        assert [await done.get() for _ in range(2)] == [3, 4]

    run(test)


def test_keys_are_queues_of_their_own(ray: Any) -> None:
    async def test() -> None:
        channel = RayChannel[str](1)
        await channel.put("a", key="left")
        await channel.put("b", key="right")  # has room although the other is full
        assert await nothing(channel.put("c", key="left"))
        assert await channel.get(key="right") == "b"
        assert await channel.get(key="left") == "a"
        assert await nothing(channel.get(key="left"))

    run(test)


class Unsaid(Exception):
    """One that pickle cannot make again."""

    def __init__(self, *, why: str) -> None:
        super().__init__(why)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (None, Closed, "^$"),
        (UserError("of the sampler"), UserError, "of the sampler"),
        (Unsaid(why="of the sampler"), RuntimeError, "Unsaid: of the sampler"),
    ],
    ids=["without", "with", "unpicklable"],
)
def test_closing_wakes_who_waits_and_what_is_in_it_can_still_be_taken(
    ray: Any, error: Exception | None, kind: type[Exception], said: str
) -> None:
    async def test() -> None:
        channel = RayChannel[int](1)
        elsewhere: RayChannel[int] = pickle.loads(pickle.dumps(channel))
        await elsewhere.put(1)
        waiting = [asyncio.create_task(channel.put(2)), asyncio.create_task(elsewhere.get(key="other"))]
        await settle()
        channel.close(error)
        channel.close(ZeroDivisionError())  # changes nothing
        with pytest.raises(kind, match=said):  # at once, for who closed it
            await channel.put(3)
        for task in waiting:
            with pytest.raises(kind, match=said):
                await task
        assert await elsewhere.get() == 1
        for late in (elsewhere.get, channel.get):
            with pytest.raises(kind, match=said):
                await late()

    run(test)


def test_what_a_getter_got_that_was_given_up_is_the_next_one_s(ray: Any) -> None:
    """However late it is cancelled: before the item is there, while it is on its way, and when it has arrived."""

    async def test() -> None:
        channel = RayChannel[int](1)
        for number in range(60):
            given_up = asyncio.create_task(channel.get())
            putting = asyncio.create_task(channel.put(number))
            await asyncio.sleep(number / 10_000)
            given_up.cancel()
            [found] = await asyncio.gather(given_up, return_exceptions=True)
            await putting
            if isinstance(found, asyncio.CancelledError):
                found = await channel.get()
            assert found == number

    run(test)


def test_an_item_goes_back_to_the_front_also_of_a_closed_channel() -> None:
    async def test() -> None:
        channel = LocalChannel[int](1)
        await channel.put(1)
        await channel.give_back(0)
        channel.close()
        assert [await channel.get() for _ in range(2)] == [0, 1]
        with pytest.raises(Closed):
            await channel.get()

    run(test)


def test_a_dead_actor_is_one_line(ray: Any) -> None:
    async def test() -> None:
        channel = RayChannel[int](1, options={"name": "dies"})
        assert await channel.size() == 0
        waiting = asyncio.create_task(channel.get())
        await settle()
        ray.kill(ray.get_actor("dies"))
        for call in (waiting, channel.put(1), channel.get(), channel.size()):
            with pytest.raises(UserError, match="the channel's actor is dead") as error:
                await call
            assert "\n" not in str(error.value)
        channel.close()  # nobody is left to be told

    run(test)


def test_no_room_is_refused_and_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="capacity 0"):
        RayChannel(0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'gleanrl\[ray\]'"):
        RayChannel(1)


def test_a_run_over_ray_is_the_same_run(ray: Any, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    from gleanrl.embodied.loop import Training
    from tests.embodied.test_loop import config, learned, parts

    found = []
    for channel in (LocalChannel, RayChannel):
        with parts(config(lag=1)) as (worker, actor):
            training = Training(worker, actor, 5, 1, lambda _: None, lambda *_: None, lambda step: None, channel)
            run(training.run)
            assert isinstance(training.trajectories, channel)
            found.append(learned(actor))
    assert found[0] == found[1]
