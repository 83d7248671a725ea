"""The pool under everything that environments do wrong, in worker processes and in this one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gleanrl.environments.pool import (
    EnvironmentDied,
    EnvironmentPool,
    EnvironmentRaised,
    EnvironmentTimeout,
)
from gleanrl.protocols import Environment, Taskset
from gleanrl.types import Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from tests.environments.troublesome import Deadly, Troublesome, Unbuildable, Unpicklable, say
from tests.strategies import examples


def with_pool(
    body: Callable[[EnvironmentPool], Awaitable[Any]], *, workers: int = 1, timeout_s: float = 30.0, **options: Any
) -> Any:
    """Run ``body`` in an open pool of troublesome environments."""

    async def run() -> Any:
        async with EnvironmentPool(Troublesome(**options), workers=workers, timeout_s=timeout_s) as pool:
            return await body(pool)

    return asyncio.run(run())


async def begun(pool: EnvironmentPool, name: str, **payload: str) -> Environment:
    environment = pool.environment(Task(name, payload=payload))
    await environment.reset()
    return environment


async def heard(environment: Environment, text: str) -> str:
    return (await environment.step(say(text))).messages[0]["content"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie is dead; only its parent has not asked yet.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pids: list[int], within_s: float = 15.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_raises_costs_its_own_trajectory(workers: int) -> None:
    async def body(pool: EnvironmentPool) -> None:
        good, bad = await begun(pool, "good"), await begun(pool, "bad")
        with pytest.raises(EnvironmentRaised, match=r"task 'bad': ValueError: no such door") as caught:
            await bad.step(say("raise no such door"))
        assert (caught.value.kind, caught.value.detail) == ("ValueError", "no such door")
        assert "in obey" in caught.value.traceback_text
        with pytest.raises(EnvironmentRaised, match="SystemExit: 3"):
            await bad.step(say("leave"))
        with pytest.raises(EnvironmentRaised, match="on reset"):
            await pool.environment(Task("worse", payload={"reset": "raise on reset"})).reset()
        with pytest.raises(UserError, match="put the file there"):
            await bad.step(say("mistake put the file there"))
        assert await heard(good, "hello") == "good: hello"
        assert (pool.stats.raised, pool.stats.workers_replaced) == (3, 0)

    with_pool(body, workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_awaits_too_long_is_given_up_alone(workers: int) -> None:
    async def body(pool: EnvironmentPool) -> None:
        good, slow = await begun(pool, "good"), await begun(pool, "slow")
        late = asyncio.ensure_future(slow.step(say("await 600")))
        await asyncio.sleep(0)
        assert await heard(good, "meanwhile") == "good: meanwhile"
        with pytest.raises(EnvironmentTimeout, match=r"task 'slow': step took over 1 s"):
            await late
        assert isinstance(late.exception(), TimeoutError)  # what a caller that knows no pools catches
        assert await heard(good, "after") == "good: meanwhile after"
        assert (pool.stats.timeouts, pool.stats.died, pool.stats.workers_replaced) == (1, 0, 0)

    with_pool(body, workers=workers, timeout_s=1.0)


def test_a_blocked_worker_is_replaced_and_those_that_waited_to_begin_begin_elsewhere() -> None:
    async def body(pool: EnvironmentPool) -> None:
        live = await begun(pool, "live")
        hung = await begun(pool, "hung")
        before = pool.worker_pids
        blocked = asyncio.ensure_future(hung.step(say("block 600")))
        await asyncio.sleep(0)
        waited = asyncio.ensure_future(live.step(say("behind it")))
        queued = [pool.environment(Task(f"queued-{i}")) for i in range(3)]
        started = await asyncio.gather(*(environment.reset() for environment in queued))
        with pytest.raises(EnvironmentTimeout, match="'hung'"):
            await blocked
        with pytest.raises(EnvironmentDied, match="'live': its worker process hung on task 'hung'"):
            await waited
        with pytest.raises(EnvironmentDied, match="'live'"):
            await live.step(say("still dead"))
        assert [o.messages[0]["content"] for o in started] == [f"queued-{i}: " for i in range(3)]
        assert pool.worker_pids != before
        assert pool.stats.workers_replaced == 1
        for environment in (live, hung, *queued):
            await environment.close()  # never raises, also where the worker is gone

    with_pool(body, timeout_s=1.0)


def test_the_clock_of_a_request_starts_when_its_worker_is_on_it() -> None:
    async def body(pool: EnvironmentPool) -> None:
        environments = [await begun(pool, f"t{i}") for i in range(5)]
        # Each takes under a second, all together far more than one.
        await asyncio.gather(*(environment.step(say("block 0.4")) for environment in environments))
        assert pool.stats.timeouts == 0

    with_pool(body, timeout_s=1.0)


@pytest.mark.parametrize(("order", "told"), [("kill", "was killed by SIGKILL"), ("exit 7", "ended with status 7")])
def test_a_worker_that_dies_costs_its_episodes_and_not_the_pool(order: str, told: str) -> None:
    async def body(pool: EnvironmentPool) -> None:
        doomed, elsewhere = await begun(pool, "a"), await begun(pool, "b")  # two workers, one task each
        with pytest.raises(EnvironmentDied, match=f"task 'a': its worker process {told} on task 'a'"):
            await doomed.step(say(order))
        assert await heard(elsewhere, "fine") == "b: fine"
        again = await begun(pool, "a")
        assert await heard(again, "new life") == "a: new life"
        assert len(set(pool.worker_pids)) == 2
        assert (pool.stats.died, pool.stats.workers_replaced) == (1, 1)

    with_pool(body, workers=2)


def test_a_task_keeps_its_worker_and_tasks_share_the_workers_evenly() -> None:
    async def body(pool: EnvironmentPool) -> None:
        places: dict[str, set[int]] = {}
        for _ in range(3):
            for name in ("a", "b", "c", "d"):
                environment = pool.environment(Task(name))
                places.setdefault(name, set()).add((await environment.reset()).info["pid"])
        assert all(len(pids) == 1 for pids in places.values())
        assert sorted(min(pids) for pids in places.values()) == sorted([*pool.worker_pids] * 2)
        crowd = [(await pool.environment(Task("a")).reset()).info["pid"] for _ in range(40)]
        assert len(set(crowd)) == 2  # one task alone does not leave the other worker idle

    with_pool(body, workers=2)


def test_closing_ends_live_episodes_workers_and_what_they_started(tmp_path: Path) -> None:
    async def body(pool: EnvironmentPool) -> list[int]:
        environments = [await begun(pool, f"t{i}") for i in range(4)]
        await environments[0].step(say(f"start {tmp_path / 'child'}"))
        pids = [*pool.worker_pids, int((tmp_path / "child").read_text())]
        waiting = asyncio.ensure_future(environments[1].step(say("await 600")))
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(EnvironmentDied, match="closed"):
            await waiting
        with pytest.raises(EnvironmentDied, match="the pool is closed"):
            await pool.environment(Task("late")).reset()
        return pids

    pids = with_pool(body, workers=2, marks=str(tmp_path))
    assert gone(pids)
    assert {f"t{i}" for i in range(4)} <= {path.name for path in tmp_path.iterdir()}  # each environment was closed


def test_closing_does_not_wait_for_a_blocked_worker() -> None:
    async def body(pool: EnvironmentPool) -> list[int]:
        pids = [*pool.worker_pids]
        hung = await begun(pool, "hung")
        blocked = asyncio.ensure_future(hung.step(say("block 600")))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await pool.close()
        assert time.monotonic() - started < 10
        with pytest.raises(EnvironmentDied):
            await blocked
        return pids

    assert gone(with_pool(body))


PARENT = """
import asyncio, sys
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.types import Task
from tests.environments.troublesome import Troublesome, say

async def main():
    async with EnvironmentPool(Troublesome(), workers=2) as pool:
        environments = [pool.environment(Task(f"t{i}")) for i in range(2)]
        for environment in environments:
            await environment.reset()
        stuck = asyncio.ensure_future(environments[0].step(say("block 600")))
        await asyncio.sleep(0.2)
        print(*pool.worker_pids, flush=True)
        await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    # To the whole group, as Ctrl-C in a terminal is: the workers must leave it to their parent.
    os.killpg(parent.pid, how)
    _, errors = parent.communicate(timeout=30)
    assert gone(pids)
    if how is signal.SIGINT:
        assert errors.count("KeyboardInterrupt") <= 2  # the parent's own, and no worker's
        assert "Process SpawnProcess" not in errors


@pytest.mark.parametrize(
    ("taskset", "told"),
    [
        (Unpicklable(), "Unpicklable cannot be held by worker processes \\(cannot pickle a live connection"),
        (Unbuildable(), "Unbuildable cannot be held by worker processes \\(LookupError: no such data here"),
        (Deadly(), "its worker process ended with status 5 while it started"),
    ],
)
def test_a_taskset_that_no_worker_can_hold_is_told_at_once(taskset: Taskset, told: str) -> None:
    async def run() -> None:
        async with EnvironmentPool(taskset, workers=2):
            pass

    with pytest.raises(UserError, match=told):
        asyncio.run(run())


def test_a_taskset_from_a_file_reaches_the_workers(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(__file__).with_name("troublesome.py").read_text())
    taskset = load_object(f"{file}:Troublesome")()

    async def run() -> str:
        async with EnvironmentPool(taskset, workers=1) as pool:
            return await heard(await begun(pool, "t"), "hello")

    assert asyncio.run(run()) == "t: hello"


def test_misuse_is_an_error_of_the_caller() -> None:
    async def body(pool: EnvironmentPool) -> None:
        environment = pool.environment(Task("t"))
        with pytest.raises(RuntimeError, match="reset before step"):
            await environment.step(say("too early"))
        await environment.close()  # nothing to close
        await environment.reset()
        with pytest.raises(RuntimeError, match="reset once"):
            await environment.reset()

    with_pool(body, workers=0)
    with_pool(body, workers=1)


def test_a_cancelled_caller_leaves_the_worker_in_order(tmp_path: Path) -> None:
    has_begun = tmp_path / "begun"

    async def body(pool: EnvironmentPool) -> None:
        environment, other = await begun(pool, "t"), await begun(pool, "u")
        waiting = asyncio.ensure_future(environment.step(say("await 600")))
        await asyncio.sleep(0)  # the call is sent
        assert await heard(other, "w") == "u: w"  # the worker takes calls in order, so that one has begun
        waiting.cancel()
        blocking = asyncio.ensure_future(environment.step(say(f"block 0.2 {has_begun}")))
        while not has_begun.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.005)
        blocking.cancel()
        for step in (waiting, blocking):
            with pytest.raises(asyncio.CancelledError):
                await step
        assert await heard(other, "x") == "u: w x"
        assert await heard(environment, "y") == f"t: await 600 block 0.2 {has_begun} y"

    with_pool(body)


orders = st.sampled_from(["hello", "raise x", "await 0", "await 0.001", "leave", "long " * 30_000])


@pytest.fixture(scope="module")
def shared() -> Any:
    """One loop and one pool for all examples."""
    with asyncio.Runner() as runner:
        pool = EnvironmentPool(Troublesome(), workers=2)
        runner.run(pool.__aenter__())
        yield runner, pool
        runner.run(pool.close())


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(orders, max_size=6), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_interleaved_episodes_answer_as_they_do_alone(shared: Any, scripts: list[list[str]], random: Any) -> None:
    runner, pool = shared
    local = EnvironmentPool(Troublesome(), workers=0)

    async def play(source: EnvironmentPool, name: str, script: list[str], pauses: list[float]) -> list[str]:
        environment = source.environment(Task(name))
        answers = [(await environment.reset()).messages[0]["content"]]
        for order, pause in zip(script, pauses, strict=True):
            await asyncio.sleep(pause)
            try:
                answers.append(await heard(environment, order))
            except EnvironmentRaised as error:
                answers.append(str(error))
        await environment.close()
        return answers

    async def both() -> None:
        names = [f"task-{random.randint(0, 3)}" for _ in scripts]
        pauses = [[random.choice([0.0, 0.0, 0.001]) for _ in script] for script in scripts]
        played = await asyncio.gather(*map(play, [pool] * len(scripts), names, scripts, pauses))
        alone = [await play(local, *arguments) for arguments in zip(names, scripts, pauses, strict=True)]
        assert played == alone
        assert not any(pool.live)

    runner.run(both())


@pytest.mark.parametrize("workers", [0, 1])
def test_an_object_that_does_not_derive_from_environment_costs_its_episode(workers: int) -> None:
    async def body(pool: EnvironmentPool) -> None:
        with pytest.raises(EnvironmentRaised, match=r"TypeError.*gleanrl\.protocols\.Environment"):
            await begun(pool, "a", duck="yes")
        assert await heard(await begun(pool, "b"), "x") == "b: x"

    with_pool(body, workers=workers)
