"""Measures the cost of a call of the sandboxed Python tool, with an interpreter per call and with one per episode.

    python benchmarks/python_sandbox.py [--calls 200]

Prints calls per second and milliseconds per call, with and without isolation, for one caller and for many concurrent
ones. For comparison, the same code also runs in a plain `python -c` without limits or isolation.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from typing import cast

from gleanrl.environments.tools.executor import Isolation, Limits, PythonSandbox
from gleanrl.utils.errors import UserError

CODE = "print(sum(n * n for n in range(1000)))"
CALLERS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    calls = parser.parse_args().calls
    print(f"{'isolation':<12} {'start ms':>9} {'how':<22} {'calls/s':>8} {'median ms':>10} {'p99 ms':>8}")
    for isolation in ("bubblewrap", "none"):
        asyncio.run(measure(cast(Isolation, isolation), calls))
    seconds = [timed_process() for _ in range(max(5, calls // 20))]
    show("(no sandbox)", 0.0, "python -c", seconds, sum(seconds))


async def measure(isolation: Isolation, calls: int) -> None:
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
            seconds = []
            for _ in range(calls):
                ran = await one(CODE)
                assert ran.output == "332833500\n", ran
                seconds.append(ran.seconds)
            started = time.perf_counter()
            for _ in range(calls):
                await one(CODE)
            show(isolation, start_s, how, seconds, time.perf_counter() - started)

        async def caller() -> list[float]:
            return [(await sandbox.run(CODE)).seconds for _ in range(max(1, calls // CALLERS))]

        started = time.perf_counter()
        seconds = [s for own in await asyncio.gather(*[caller() for _ in range(CALLERS)]) for s in own]
        show(isolation, start_s, f"{CALLERS} concurrent calls", seconds, time.perf_counter() - started)
    finally:
        await session.close()


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
