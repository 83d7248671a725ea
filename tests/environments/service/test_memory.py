"""What holds too much is ended while it grows, in whatever process the environment put it."""

from __future__ import annotations

import asyncio
import time

import pytest

from gleanrl.environments.pool import EnvironmentDied
from gleanrl.environments.service.client import service
from gleanrl.environments.service.memory import OVER, Held, Memory
from gleanrl.environments.service.meter import MIB, Process, family
from gleanrl.types import Task
from tests.environments.service.world import served
from tests.environments.troublesome import say

HOARDING = "tests.environments.service.hoarding:Hoarding"


@pytest.mark.parametrize(
    ("option", "orders"),
    [
        ("--max-worker-memory", ("hold", "start")),
        pytest.param("--max-memory", ("start",), marks=pytest.mark.slow),
    ],
)
def test_a_step_that_grows_is_ended_with_its_worker(option: str, orders: tuple[str, ...]) -> None:
    with served(HOARDING, option, "500") as (process, url):
        taskset = service(url=url, patience_s=60.0)

        async def play(order: str) -> None:
            environment, other = taskset.environment(Task("t")), taskset.environment(Task("t"))
            await environment.reset()
            await other.reset()
            before = (await taskset.client.ask("/profile"))["workers"][0]["pid"]
            began = time.monotonic()
            with pytest.raises(EnvironmentDied, match="SIGKILL"):
                await environment.step(say(f"{order} 600"))
            assert time.monotonic() - began < 20.0
            with pytest.raises(EnvironmentDied):  # it lived there
                await other.step(say("?"))
            again = taskset.environment(Task("t"))  # there is room again
            await again.reset()
            assert (await again.step(say("here"))).messages[0]["content"] == "here"
            profile = await taskset.client.ask("/profile")
            assert profile["workers"][0]["pid"] != before
            assert profile["memory_mib"] < 500
            await again.close()

        for order in orders:
            asyncio.run(play(order))
        assert process.poll() is None


def test_the_worker_that_holds_most_is_ended_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(Memory, "_end", lambda self, pid, size, option: ended.append(pid))

    def judged(total: float, *workers: float) -> tuple[list[int], bool]:
        async def judge() -> bool:
            memory = Memory(lambda: (1, 2), 100.0, 90.0)
            sizes = {pid: int(size * MIB) for pid, size in enumerate(workers, 1)}
            memory._judge(Held(int(total * MIB), sizes))
            return "--max-memory" in memory._why

        ended.clear()
        return ended, asyncio.run(judge())

    assert judged(99, 40, 50) == ([], False)
    assert judged(100 * OVER - 1, 40, 50) == ([], True)
    assert judged(100 * OVER + 1, 40, 50) == ([2], True)
    assert judged(100 * OVER + 1, 5, 5) == ([], True)  # the server itself holds it: to end them would not help
    assert judged(95, 1, 91) == ([2], False)


def test_a_family_is_descendants_and_the_group() -> None:
    #         pid parent group
    table = {p[0]: Process(*p, 1) for p in [(1, 0, 1), (5, 1, 5), (6, 5, 6), (7, 6, 7), (8, 1, 5), (9, 1, 9)]}
    assert {root: sorted(p.pid for p in members) for root, members in family((5, 9, 99), table).items()} == {
        5: [5, 6, 7, 8],  # 8's parent is gone, and it is in the group still
        9: [9],
        99: [],
    }
