"""`EnvironmentPool` with environments that raise, block, wait, exit or are killed, with and without worker processes.

The environments are those of `tests.environments.troublesome`.
"""

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
from gleanrl.types import Score, StopReason, Task
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


async def begin_episode(pool: EnvironmentPool, name: str, **payload: str) -> Environment:
    environment = pool.environment(Task(name, payload=payload))
    await environment.reset()
    return environment


async def step_and_read(environment: Environment, text: str) -> str:
    return (await environment.step(say(text))).messages[0]["content"]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended; if between opening and reading, the error is ESRCH
        return False
    return state != "Z"  # a zombie has ended, but its parent has not waited for it yet


def gone(pids: list[int], within_s: float = 15.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_raises_fails_only_its_own_episode(workers: int) -> None:
    async def body(pool: EnvironmentPool) -> None:
        good, bad = await begin_episode(pool, "good"), await begin_episode(pool, "bad")
        said = r"task 'bad': ValueError: no such door \(.*troublesome.py:\d+\)"
        with pytest.raises(EnvironmentRaised, match=said) as caught:
            await bad.step(say("raise no such door"))
        assert caught.value.kind == "ValueError"
        assert "in obey" in caught.value.traceback_text
        with pytest.raises(EnvironmentRaised, match="SystemExit: 3"):
            await bad.step(say("leave"))
        with pytest.raises(EnvironmentRaised, match="CancelledError: of its own"):
            await bad.step(say("cancel of its own"))
        with pytest.raises(EnvironmentRaised, match="on reset"):
            await pool.environment(Task("worse", payload={"reset": "raise on reset"})).reset()
        with pytest.raises(UserError, match="put the file there"):
            await bad.step(say("mistake put the file there"))
        assert await step_and_read(good, "hello") == "good: hello"
        assert (pool.stats.raised, pool.stats.workers_replaced) == (4, 0)

    with_pool(body, workers=workers)


MISTAKEN = r"""
from gleanrl.protocols import Environment, Observation, Taskset
from gleanrl.types import Task

HELLO = {"role": "user", "content": "hello"}
FIELDS = {
    "content": {"messages": ({"role": "user", "content": 5},)},
    "parts": {"messages": ({"role": "user", "content": [{"type": "text", "text": "hello"}]},)},
    "surrogate": {"messages": (HELLO, {"role": "user", "content": "h\ud800llo"})},
    "role": {"messages": ({"role": 1, "content": "hello"},)},
    "done": {"messages": (HELLO,), "done": "no"},
    "info": {"messages": (HELLO,), "info": ["moves"]},
    "tools": {"messages": (HELLO,), "tools": "search"},
}

class Mistaken(Environment):
    def __init__(self, mistake): self.mistake = mistake
    async def reset(self):  # nothing
        if self.mistake == "nothing": return None
        if self.mistake == "text":
            return Observation("hello")  # text
        if self.mistake in FIELDS: return Observation(**FIELDS[self.mistake])  # field
        if self.mistake == "key":
            return Observation(({"role": "user", "text": "hello"},))  # key
        return Observation(({"role": "user", "content": "hello"},), score=0)
    async def step(self, message):  # mapping
        if self.mistake == "mapping": return {"messages": [], "done": True}
        if self.mistake == "score":
            return Observation((), done=True, score="good")  # score
        return self.finish({})
    def finish(self, found):
        return found["end"]  # deep
    async def conclude(self, stop):  # conclude
        return "well" if self.mistake == "conclude" else True

class Plain(Mistaken):
    def step(self, message):  # plain
        return Observation((), done=True)

class Mistakes(Taskset):
    def tasks(self, split, count): return []
    def environment(self, task): return (Plain if task.id == "plain" else Mistaken)(task.id)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_in_an_environment_names_the_line_of_the_user_s_file(tmp_path: Path, workers: int) -> None:
    file = tmp_path / "mistaken.py"
    file.write_text(MISTAKEN)

    async def run() -> None:
        async with EnvironmentPool(load_object(f"{file}:Mistakes")(), workers=workers) as pool:
            fields = ("content", "parts", "surrogate", "role", "done", "info", "tools")
            for mistake in ("nothing", "text", "key", "mapping", "score", "deep", "plain", "conclude", *fields):
                marked = "field" if mistake in fields else mistake
                line = next(n for n, line in enumerate(MISTAKEN.splitlines(), 1) if line.endswith(f"# {marked}"))
                with pytest.raises(EnvironmentRaised, match=rf"\({file}:{line}\)$"):
                    await play(pool.environment(Task(mistake)))

    async def play(environment: Environment) -> None:
        assert (await environment.reset()).score == Score(0.0)
        assert await environment.conclude(StopReason.MAX_TURNS) == Score(1.0)
        await environment.step(say("go"))

    asyncio.run(run())


def test_steps_that_block_this_process_let_the_loop_run_in_between_and_are_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(pool: EnvironmentPool) -> None:
        episodes = [await begin_episode(pool, str(number)) for number in range(8)]
        steps = [asyncio.ensure_future(episode.step(say("block 0.3"))) for episode in episodes]
        await asyncio.sleep(0.01)
        assert sum(step.done() for step in steps) <= 4
        await asyncio.gather(*steps)
        assert [record.getMessage().count("environment.workers") for record in caplog.records] == [1]

    with_pool(body, workers=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_awaits_too_long_times_out_without_affecting_others(workers: int) -> None:
    async def body(pool: EnvironmentPool) -> None:
        good, slow = await begin_episode(pool, "good"), await begin_episode(pool, "slow")
        late = asyncio.ensure_future(slow.step(say("await 600")))
        await asyncio.sleep(0)
        assert await step_and_read(good, "meanwhile") == "good: meanwhile"
        with pytest.raises(EnvironmentTimeout, match=r"task 'slow': step took over 1 s"):
            await late
        # Callers that do not know the pool's errors catch TimeoutError.
        assert isinstance(late.exception(), TimeoutError)
        assert await step_and_read(good, "after") == "good: meanwhile after"
        assert (pool.stats.timeouts, pool.stats.died, pool.stats.workers_replaced) == (1, 0, 0)

    with_pool(body, workers=workers, timeout_s=1.0)


def test_a_blocked_worker_is_replaced_and_episodes_waiting_to_start_start_elsewhere() -> None:
    async def body(pool: EnvironmentPool) -> None:
        live = await begin_episode(pool, "live")
        hung = await begin_episode(pool, "hung")
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
            # `close` never raises, even if the worker has ended.
            await environment.close()

    with_pool(body, timeout_s=1.0)


def test_the_timeout_of_a_request_starts_when_its_worker_begins_it() -> None:
    async def body(pool: EnvironmentPool) -> None:
        environments = [await begin_episode(pool, f"t{i}") for i in range(5)]
        # Each call takes less than the limit of 1 s, and all calls together take longer.
        await asyncio.gather(*(environment.step(say("block 0.4")) for environment in environments))
        assert pool.stats.timeouts == 0

    with_pool(body, timeout_s=1.0)


@pytest.mark.parametrize(("order", "told"), [("kill", "was killed by SIGKILL"), ("exit 7", "ended with status 7")])
def test_a_worker_that_dies_fails_its_episodes_and_is_replaced(order: str, told: str) -> None:
    async def body(pool: EnvironmentPool) -> None:
        # Each of the two workers gets one of the tasks.
        doomed, elsewhere = await begin_episode(pool, "a"), await begin_episode(pool, "b")
        with pytest.raises(EnvironmentDied, match=f"task 'a': its worker process {told} on task 'a'"):
            await doomed.step(say(order))
        assert await step_and_read(elsewhere, "fine") == "b: fine"
        again = await begin_episode(pool, "a")
        assert await step_and_read(again, "new life") == "a: new life"
        assert len(set(pool.worker_pids)) == 2
        assert (pool.stats.died, pool.stats.workers_replaced) == (1, 1)

    with_pool(body, workers=2)


def test_episodes_of_a_task_use_the_same_worker_and_tasks_are_spread_evenly() -> None:
    async def body(pool: EnvironmentPool) -> None:
        places: dict[str, set[int]] = {}
        for _ in range(3):
            for name in ("a", "b", "c", "d"):
                environment = pool.environment(Task(name))
                places.setdefault(name, set()).add((await environment.reset()).info["pid"])
        assert all(len(pids) == 1 for pids in places.values())
        assert sorted(min(pids) for pids in places.values()) == sorted([*pool.worker_pids] * 2)
        crowd = [(await pool.environment(Task("a")).reset()).info["pid"] for _ in range(40)]
        # Many episodes of one task also use the other worker, which would be idle otherwise.
        assert len(set(crowd)) == 2

    with_pool(body, workers=2)


def test_closing_the_pool_ends_episodes_workers_and_their_child_processes(tmp_path: Path) -> None:
    async def body(pool: EnvironmentPool) -> list[int]:
        environments = [await begin_episode(pool, f"t{i}") for i in range(4)]
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
    # Each environment has written its file when it was closed.
    assert {f"t{i}" for i in range(4)} <= {path.name for path in tmp_path.iterdir()}


def test_closing_the_pool_kills_a_blocked_worker_without_waiting() -> None:
    async def body(pool: EnvironmentPool) -> list[int]:
        pids = [*pool.worker_pids]
        hung = await begin_episode(pool, "hung")
        blocked = asyncio.ensure_future(hung.step(say("block 600")))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await pool.close()
        assert time.monotonic() - started < 10
        with pytest.raises(EnvironmentDied):
            await blocked
        return pids

    assert gone(with_pool(body))


def test_workers_end_if_closing_the_pool_is_cancelled_and_the_event_loop_ends() -> None:
    pids: list[int] = []

    async def play() -> None:
        async with EnvironmentPool(Troublesome(), workers=1) as pool:
            pids.extend(pool.worker_pids)
            await (await begin_episode(pool, "hung")).step(say("block 600"))

    async def run() -> None:
        playing = asyncio.ensure_future(play())
        while not pids:  # noqa: ASYNC110 - another task fills it
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        for _ in range(2):  # the first cancels the step, the second the closing of the pool
            playing.cancel()
            await asyncio.sleep(0.1)
        assert playing.cancelled()

    asyncio.run(run())
    assert gone(pids)


def test_a_second_close_waits_until_the_workers_of_a_cancelled_close_have_ended() -> None:
    async def body(pool: EnvironmentPool) -> None:
        pids = pool.worker_pids
        blocked = asyncio.ensure_future((await begin_episode(pool, "hung")).step(say("block 600")))
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.close(), 0.1)
        await pool.close()
        assert not any(alive(pid) for pid in pids)
        with pytest.raises(EnvironmentDied):
            await blocked

    with_pool(body)


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
def test_workers_end_when_their_parent_is_killed_or_interrupted(tmp_path: Path, how: signal.Signals) -> None:
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
    # The signal goes to the whole process group, like Ctrl-C in a terminal. The workers must ignore SIGINT.
    os.killpg(parent.pid, how)
    _, errors = parent.communicate(timeout=30)
    assert gone(pids)
    if how is signal.SIGINT:
        # Only the parent's traceback is allowed, which names KeyboardInterrupt twice at most.
        assert errors.count("KeyboardInterrupt") <= 2
        assert "Process SpawnProcess" not in errors


@pytest.mark.parametrize(
    ("taskset", "told"),
    [
        (Unpicklable(), "Unpicklable cannot be held by worker processes \\(cannot pickle a live connection"),
        (Unbuildable(), "Unbuildable cannot be held by worker processes \\(LookupError: no such data here"),
        (Deadly(), "its worker process ended with status 5 while it started"),
    ],
)
def test_a_taskset_that_cannot_be_sent_to_a_worker_raises_when_the_pool_opens(taskset: Taskset, told: str) -> None:
    async def run() -> None:
        async with EnvironmentPool(taskset, workers=2):
            pass

    with pytest.raises(UserError, match=told):
        asyncio.run(run())


def test_a_taskset_from_a_file_can_be_used_in_workers(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(__file__).with_name("troublesome.py").read_text())
    taskset = load_object(f"{file}:Troublesome")()

    async def run() -> str:
        async with EnvironmentPool(taskset, workers=1) as pool:
            return await step_and_read(await begin_episode(pool, "t"), "hello")

    assert asyncio.run(run()) == "t: hello"


def test_step_before_reset_and_a_second_reset_raise_runtime_error() -> None:
    async def body(pool: EnvironmentPool) -> None:
        environment = pool.environment(Task("t"))
        with pytest.raises(RuntimeError, match="reset before step"):
            await environment.step(say("too early"))
        # Closing an environment that was never reset has no effect.
        await environment.close()
        await environment.reset()
        with pytest.raises(RuntimeError, match="reset once"):
            await environment.reset()

    with_pool(body, workers=0)
    with_pool(body, workers=1)


def test_cancelling_a_call_leaves_its_worker_and_environment_usable(tmp_path: Path) -> None:
    has_begun = tmp_path / "begun"

    async def body(pool: EnvironmentPool) -> None:
        environment, other = await begin_episode(pool, "t"), await begin_episode(pool, "u")
        waiting = asyncio.ensure_future(environment.step(say("await 600")))
        # The call is sent. The worker begins calls in order, so when the next call has returned, this one has begun.
        await asyncio.sleep(0)
        assert await step_and_read(other, "w") == "u: w"
        waiting.cancel()
        blocking = asyncio.ensure_future(environment.step(say(f"block 0.2 {has_begun}")))
        # The file is made by the worker process.
        while not has_begun.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        blocking.cancel()
        for step in (waiting, blocking):
            with pytest.raises(asyncio.CancelledError):
                await step
        assert await step_and_read(other, "x") == "u: w x"
        assert await step_and_read(environment, "y") == f"t: await 600 block 0.2 {has_begun} y"

    with_pool(body)


orders = st.sampled_from(["hello", "raise x", "await 0", "await 0.001", "leave", "long " * 30_000])


@pytest.fixture(scope="module")
def shared() -> Any:
    """Yield an event loop and a pool that all examples of the property test share."""
    with asyncio.Runner() as runner:
        pool = EnvironmentPool(Troublesome(), workers=2)
        runner.run(pool.__aenter__())
        yield runner, pool
        runner.run(pool.close())


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(orders, max_size=6), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_interleaved_episodes_equal_the_same_episodes_played_alone(
    shared: Any, scripts: list[list[str]], random: Any
) -> None:
    runner, pool = shared
    local = EnvironmentPool(Troublesome(), workers=0)

    async def play(source: EnvironmentPool, name: str, script: list[str], pauses: list[float]) -> list[str]:
        environment = source.environment(Task(name))
        answers = [(await environment.reset()).messages[0]["content"]]
        for order, pause in zip(script, pauses, strict=True):
            await asyncio.sleep(pause)
            try:
                answers.append(await step_and_read(environment, order))
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
def test_an_object_that_does_not_derive_from_environment_fails_its_episode(workers: int) -> None:
    async def body(pool: EnvironmentPool) -> None:
        with pytest.raises(EnvironmentRaised, match=r"TypeError.*gleanrl\.protocols\.Environment"):
            await begin_episode(pool, "a", duck="yes")
        assert await step_and_read(await begin_episode(pool, "b"), "x") == "b: x"

    with_pool(body, workers=workers)
