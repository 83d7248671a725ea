"""Measures environment steps per second and their latency: in this process, in worker processes, and over HTTP.

    python benchmarks/environment_service.py [--seconds 2] [--repeats 3] [--workers 2] [--only alfworld|trivial]
        [--episodes 1 16 256]

It needs `pip install 'gleanrl[serve,alfworld]'`. The HTTP service is `gleanrl serve-env` in another process on this
machine, with as many workers as the pool of the second case. All rows play the same episodes for the same time, with as
many concurrent episodes as the table shows. Each episode is played once before the measurement. Of the repeats, the
fastest counts, because other load of the machine can only slow them down.

The environments are ALFWorld, played with the actions of its expert, and a trivial one that returns at once, which
measures only the transport. "client" and "server" are the CPU time per step of this process and of the server process
without its workers.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.environments.service.client import get_client
from gleanrl.protocols import Taskset
from gleanrl.types import Task
from gleanrl.utils import background_loop

TURNS = 20
TASKS = 32
NOTHING = os.path.relpath(Path(__file__).with_name("environments.py"))  # defines the trivial environment
NAMES = {"alfworld": "alfworld", "trivial": f"{NOTHING}:Nothing"}


@dataclass(frozen=True)
class Script:
    """A task, and the messages that the agent sends in each of its episodes."""

    task: Task
    said: Sequence[str]


def scripts(taskset: Any) -> list[Script]:
    tasks = taskset.tasks("train", TASKS)
    if not taskset.has_expert:
        return [Script(task, ["look around"] * TURNS) for task in tasks]
    shown = [taskset.demonstrate(task, seed=0)[0] for task in tasks]
    return [
        Script(task, [message["content"] for message in conversation if message["role"] == "assistant"])
        for task, conversation in zip(tasks, shown, strict=True)
    ]


@dataclass(slots=True)
class Figures:
    steps_s: float
    p50_ms: float
    p99_ms: float
    client_us: float
    all_steps: int  # number of all steps, those before the measurement and in slower repeats included


async def measured(
    pool: EnvironmentPool, plays: Sequence[Script], at_once: int, seconds: float, repeats: int
) -> Figures:
    """Play episodes for ``seconds``, ``at_once`` of them concurrently, and return the figures of the fastest repeat."""
    turn, steps = count(), count()

    async def play(latencies: list[float], until: float) -> None:
        script = plays[next(turn) % len(plays)]
        environment = pool.environment(script.task)
        await environment.reset()
        for text in script.said:
            asked = time.perf_counter()
            await environment.step({"role": "assistant", "content": text})
            next(steps)
            if (now := time.perf_counter()) >= until:
                break
            latencies.append(now - asked)
        await environment.close()

    async def player(latencies: list[float], until: float) -> None:
        while time.perf_counter() < until:
            await play(latencies, until)

    await asyncio.gather(*(play([], math.inf) for _ in plays))  # so that imports and connections are not measured
    fastest: list[float] = []
    client_s = 0.0
    for _ in range(repeats):
        latencies: list[float] = []
        cpu, began = time.process_time(), time.perf_counter()
        await asyncio.gather(*(player(latencies, began + seconds) for _ in range(at_once)))
        if len(latencies) > len(fastest):
            fastest, client_s = latencies, time.process_time() - cpu
    fastest.sort()
    p50, p99 = (1e3 * fastest[int(share * (len(fastest) - 1))] for share in (0.5, 0.99))
    return Figures(len(fastest) / seconds, p50, p99, 1e6 * client_s / len(fastest), next(steps))


@contextmanager
def served(name: str, workers: int) -> Iterator[str]:
    """Start a server process, yield its address, and stop it when the block ends."""
    command = [sys.executable, "-m", "gleanrl", "serve-env", name, "--port", "0", "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, "the server did not start"
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def server_cpu_s(taskset: Any) -> float:
    return background_loop.run(get_client(taskset.client.url, None, 60.0, 60.0, background=True).ask("/profile"))[
        "cpu_s"
    ]


@asynccontextmanager
async def opened(taskset: Taskset, workers: int) -> AsyncIterator[EnvironmentPool]:
    async with EnvironmentPool(taskset, workers=workers, timeout_s=300) as pool:
        yield pool


def row(name: str, at_once: int, figures: Figures, server_us: float | None = None) -> None:
    server = "" if server_us is None else f"{server_us:.0f}"
    print(
        f"  {name:<24}{at_once:>10}{figures.steps_s:>10.0f}{figures.p50_ms:>10.2f}{figures.p99_ms:>10.2f}"
        f"{figures.client_us:>11.0f}{server:>11}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="per repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--episodes", type=int, nargs="+", default=[1, 16, 256])
    arguments = parser.parse_args()

    async def local(taskset: Taskset, plays: Sequence[Script], workers: int, at_once: int) -> Figures:
        async with opened(taskset, workers) as pool:
            return await measured(pool, plays, at_once, arguments.seconds, arguments.repeats)

    for label, name in NAMES.items():
        if arguments.only not in (None, label):
            continue
        taskset = load_taskset(EnvironmentSettings(name=name), seed=0)
        plays = scripts(taskset)
        print(
            f"{label:<26}{'episodes':>10}{'steps/s':>10}{'p50 ms':>10}{'p99 ms':>10}{'client us':>11}{'server us':>11}"
        )
        row("this process", 16, asyncio.run(local(taskset, plays, 0, 16)))
        for at_once in arguments.episodes:
            row(
                f"pool, {arguments.workers} workers",
                at_once,
                asyncio.run(local(taskset, plays, arguments.workers, at_once)),
            )
        with served(name, arguments.workers) as url:
            remote: Any = load_taskset(EnvironmentSettings(name="service", options={"url": url}), seed=0)
            for at_once in arguments.episodes:
                before = server_cpu_s(remote)
                figures = asyncio.run(local(remote, plays, 0, at_once))
                spent = server_cpu_s(remote) - before
                row(f"service, {arguments.workers} workers", at_once, figures, 1e6 * spent / figures.all_steps)
        print()


if __name__ == "__main__":
    main()
