"""Measures the cost of a call of the sandboxed Python tool, with an interpreter per call and with one per episode.

    python benchmarks/python_sandbox.py [--calls 200] [--pause 1]

Prints calls per second and milliseconds per call, as the caller waits for them, with and without isolation: for one
caller, for one that makes a twentieth of the calls with a pause of ``--pause`` seconds before each, and for many
concurrent ones. The process of the next call starts ahead, so a call after a pause need not wait for it. For
comparison, the same code also runs in a plain `python -c` without limits or isolation.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import cast

from gleanrl.environments.tools.executor import Isolation, Limits, PythonSandbox, Ran
from gleanrl.utils.errors import UserError

CODE = "print(sum(n * n for n in range(1000)))"
CALLERS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--pause", type=float, default=1.0)
    options = parser.parse_args()
    calls = options.calls
    print(f"{'isolation':<12} {'start ms':>9} {'how':<22} {'calls/s':>8} {'median ms':>10} {'p99 ms':>8}")
    for isolation in ("bubblewrap", "none"):
        asyncio.run(measure(cast(Isolation, isolation), calls, options.pause))
    seconds = [timed_process() for _ in range(max(5, calls // 20))]
    show("(no sandbox)", 0.0, "python -c", seconds, sum(seconds))


async def measure(isolation: Isolation, calls: int, pause: float) -> None:
    started = time.perf_counter()
    try:
        sandbox = PythonSandbox(Limits(), isolation=isolation)
    except UserError as error:
        print(f"{isolation:<12} {error}")
        return
    start_s = time.perf_counter() - started
    session = sandbox.session()
    try:
        for how, one in (("process per call", sandbox.run), ("process per episode", session.run)):
            seconds = [await timed_call(one) for _ in range(calls)]
            show(isolation, start_s, how, seconds, sum(seconds))

        seconds = []
        for _ in range(max(5, calls // 20)):
            await asyncio.sleep(pause)
            seconds.append(await timed_call(sandbox.run))
        show(isolation, start_s, "per call, with pauses", seconds, sum(seconds))

        async def caller() -> list[float]:
            return [await timed_call(sandbox.run) for _ in range(max(1, calls // CALLERS))]

        started = time.perf_counter()
        seconds = [s for own in await asyncio.gather(*[caller() for _ in range(CALLERS)]) for s in own]
        show(isolation, start_s, f"{CALLERS} concurrent calls", seconds, time.perf_counter() - started)
    finally:
        await session.close()


async def timed_call(run: Callable[[str], Awaitable[Ran]]) -> float:
    started = time.perf_counter()
    ran = await run(CODE)
    seconds = time.perf_counter() - started
    assert ran.output == "332833500\n", ran
    return seconds


def timed_process() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", CODE], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def show(isolation: str, start_s: float, how: str, seconds: list[float], total_s: float) -> None:
    median, last = statistics.median(seconds), statistics.quantiles(seconds, n=100)[-1]
    print(
        f"{isolation:<12} {1e3 * start_s:>9.0f} {how:<22} {len(seconds) / total_s:>8.0f} {1e3 * median:>10.2f} "
        f"{1e3 * last:>8.2f}"
    )


if __name__ == "__main__":
    main()
