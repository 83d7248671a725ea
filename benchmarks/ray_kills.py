"""Checks that a run on Ray survives SIGKILLs of its processes at random moments, and loses and repeats nothing.

    python benchmarks/ray_kills.py [--kills 40] [--kills-per-run 5] [--latest 25] [--steps 20] [--cases NAME ...]

Runs of a tiny model follow each other, with the settings of `CASES` in turn. In each run, `--kills-per-run` processes
are killed: the learner, one of its further ranks, a sampler, an environment actor or the reward actor, drawn by kind.
Every second kill hits a process that is starting: the first one that appears after the kill before, 0 to 5 s after it
has appeared. The others come 0 to `--latest` seconds after the kill before, whatever the run does then: starting,
sampling, training, publishing, evaluating, saving, or ending.

Each run must end with status 0, without a traceback and without a process that is left. Each of its steps must be
logged once, and each ticket must have been trained on once, by a group of the full size. The benchmark prints the
kills, and ends with status 1 if a run fails this.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.runtime.ray_world import KINDS, Command, commands, find_losses, gone

CASES = {
    "two samplers": ("--ray.samplers", "2"),
    "two ranks": ("--learner.ranks", "2"),
    "broadcast": ("--ray.samplers", "2", "--ray.transfer", "broadcast"),
    "asynchronous": ("--schedule.preset", "bounded_async"),
}
STARTING_S = 5.0  # at most this long after its appearance, a process is killed as one that is starting
TICK_S = 0.2
HUNG_S = 1800.0  # a run that does not end this long after its last kill has failed


def find(command: Command) -> dict[int, str]:
    """Return the processes that may be killed, with their kinds."""
    return {pid: kind for kind in KINDS for pid in command.actors(kind)}


def kill_one(
    command: Command, chance: random.Random, known: set[int], latest_s: float, *, starting: bool
) -> tuple[str, str] | None:
    """Wait for a random moment and kill a process of the run. Returns its kind, and the last line of the console.

    Returns None if the run ends before.

    Args:
        known: the processes that had appeared when the last one was killed.
        latest_s: the latest moment of the kill, in seconds from now, if ``starting`` is False.
        starting: whether to kill the first process that is not among ``known``.
    """
    at = time.monotonic() + chance.uniform(0, latest_s)
    victim: int | None = None
    while command.process.poll() is None:
        there = find(command)
        if victim not in there:  # none is chosen yet, or it has ended meanwhile
            victim = None
        if starting and victim is None and (new := there.keys() - known):
            victim = chance.choice(sorted(new))
            at = time.monotonic() + chance.uniform(0, STARTING_S)
        elif not starting and there and time.monotonic() >= at:
            kind = chance.choice(sorted(set(there.values())))
            victim = chance.choice([pid for pid, found in there.items() if found == kind])
        if victim is not None and time.monotonic() >= at:
            last = command.said.strip().rpartition("\n")[2]
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                known |= there.keys()
                return there[victim], last
        time.sleep(TICK_S)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--kills-per-run", type=int, default=5)
    parser.add_argument("--latest", type=float, default=25.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, kills, failures = random.Random(args.seed), Counter[tuple[str, bool]](), 0
    common = (
        "--run.steps", str(args.steps), "--evaluation.every", "3", "--checkpoint.every", "2",
        "--reward.name", "reward.py:even", "--ray.max_restarts", "1000",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, commands(*common) as start:
        for number in count():
            if kills.total() >= args.kills:
                break
            case = args.cases[number % len(args.cases)]
            began = time.monotonic()
            command = start(Path(folder) / str(number), *CASES[case])
            processes, known = set[int](), set[int]()
            for index in range(args.kills_per_run):
                starting = index % 2 == 0
                found = kill_one(command, chance, known, args.latest, starting=starting)
                if found is None:
                    break
                processes |= set(command.tree())
                kills[found[0], starting] += 1
                print(f"  {found[0]:12} {'starting' if starting else 'any':9} after: {found[1][:90]}", flush=True)
            ended = command.wait(HUNG_S)
            losses = find_losses(command.run, args.steps, in_order=case != "asynchronous")
            if ended.status or "Traceback" in ended.stdout + ended.stderr:
                losses.append(f"ended with status {ended.status}:\n{ended.stdout}{ended.stderr}")
            if left := gone(processes):
                losses.append(f"processes are left: {left}")
            failures += bool(losses)
            seconds = time.monotonic() - began
            print(f"run {number}, {case}: {'; '.join(losses) or 'complete'} ({seconds:.0f} s)", flush=True)
    print(f"{kills.total()} kills in {number} runs, {failures} of which failed")
    for kind in KINDS:
        print(f"{kind:12} {kills[kind, True]:4} while starting {kills[kind, False]:4} at any time")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
