"""Checks that no reward is lost or mixed up when the reward service fails in many ways and the trainer is killed.

    python benchmarks/reward_faults.py [--batch 256] [--group 16] [--steps 6] [--latency 1 4] [--down 30] [--kills 2]
        [--errors 20] [--hangs 5] [--nans 1] [--in-flight 1000] [--idempotent] [--reward.attempts 5 ...]

It needs `pip install 'gleanrl[rewards]'`. `gleanrl train` runs one step off policy, with rewards from an HTTP service
in another process. Of every hundred requests, the service answers exactly ``--errors`` with status 500, ``--hangs``
never, and ``--nans`` with NaN. The trainer is killed with SIGKILL ``--kills`` times, each time when at least
``--in-flight`` requests are being processed, and resumed. After that the service is down for ``--down`` seconds, in
which it refuses all connections.

The right reward of a trajectory is a function of its content, so each reward that was trained on can be checked. The
service records all requests and all computed answers, and the journal of the trainer is read after every kill. From
these records, exact counts of what happened to the requests are printed, and counts of faults, which must be 0.

An answer counts as paid once the service has computed it, even if the trainer is dead by then. With ``--idempotent``
the service supports ``Idempotency-Key``: it does not compute an answer twice. A small run:

    python benchmarks/reward_faults.py --batch 16 --group 8 --latency 0.2 0.8 --timeout 2 --down 3 --in-flight 30

The exit status is 1 if a reward is lost, paid twice without need, or assigned to a wrong trajectory, or if the trainer
hangs for more than ``--patience`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reward_faults_world as world
from gleanrl.cli.main import parse_overrides
from gleanrl.rewards.http import HttpReward
from gleanrl.rewards.request import Request
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Score, Task, Trajectory
from gleanrl.utils import serialize

WORLD = Path(world.__file__).resolve()
CONFIG = f"""
[run]
name = "run"
threads = 1
[environment]
name = "{WORLD}:Riddles"
eval_tasks = 1
[sampler]
name = "{WORLD}:dice"
[model]
hidden_size = 16
layers = 1
max_context = 64
vocabulary = 160
[warm_start]
enabled = false
demonstrations = 50
[context]
max_turns = 1
max_tokens_per_turn = {world.TOKENS}
[evaluation]
every = 0
samples = 1
greedy = false
at_start = false
[checkpoint]
every = 2
[schedule]
preset = "one_step_off"
"""


OUTCOMES = {
    "number": "answered with a number", "nan": "answered with NaN", "error": "answered with status 500",
    "hang": "never answered", "lost": "being processed when the service went down",
    "unheard": "computed, but the connection was closed", "number again": "answered with the same number as before",
    "nan again": "answered with NaN as before",
}  # fmt: skip

Counts = dict[str, int]


class Broken(Exception):
    """Raised if the run cannot be evaluated: the trainer hung or failed, or the service ended."""


@dataclass
class Evidence:
    """The records of a run, from which the counts are computed."""

    args: argparse.Namespace
    folder: RunFolder
    url: str
    kills: list[Mapping[str, Any]] = field(default_factory=list)  # the service's message that caused each kill
    journals: list[dict[str, float]] = field(default_factory=list)  # request key -> score, after each kill and the end
    account: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


# --- the run --------------------------------------------------------------------------------------
async def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], folder: Path) -> Evidence:
    started = time.perf_counter()
    service = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", json.dumps({**vars(args), "account": str(folder / "account.json")}),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert service.stdin is not None
    try:
        listening = await heard(service)
        evidence = Evidence(args, RunFolder(folder / "runs" / "run"), f"http://127.0.0.1:{listening['port']}/score")
        for life in range(args.kills + 1):
            await live(evidence, service, life, overrides, folder)
        service.stdin.close()
        await service.wait()
    finally:
        if service.returncode is None:
            service.kill()
            await service.wait()
    evidence.account = json.loads((folder / "account.json").read_text())
    evidence.seconds = time.perf_counter() - started
    return evidence


async def live(
    evidence: Evidence, service: asyncio.subprocess.Process, life: int, overrides: Sequence[tuple[str, str]], at: Path
) -> None:
    """Run the trainer, resumed if ``life`` > 0, until it ends or a message of the service requests to kill it.

    A *life* is the time from one start of the trainer to its end or kill; lives are numbered from 0.
    """
    args = evidence.args
    settings = {
        "run.steps": args.steps, "schedule.batch": args.batch, "schedule.group": args.group,
        "environment.train_tasks": args.batch, "reward.timeout_s": args.timeout,
        "reward.name": "gleanrl.rewards.http:HttpReward", "reward.max_concurrency": 2 * args.batch * args.group,
        "reward.options.url": evidence.url, "reward.options.connections": 2 * args.batch * args.group,
        f"reward.options.headers.{world.LIFE}": "env:LIFE", **dict(overrides),
    }  # fmt: skip
    command = [sys.executable, "-m", "gleanrl", "train", str(at / "run.toml")]
    command += [f"--{name}={value}" for name, value in settings.items()] + ["--resume"] * (life > 0)
    log = at / f"life-{life}.log"
    with log.open("w") as file:
        trainer = await asyncio.create_subprocess_exec(
            *command, cwd=at, env={**os.environ, "LIFE": f"life-{life}"}, stdout=file, stderr=file
        )
    ended = asyncio.create_task(trainer.wait())
    told = asyncio.create_task(heard(service)) if life < args.kills else None
    try:
        await asyncio.wait(filter(None, [ended, told]), timeout=args.patience, return_when=asyncio.FIRST_COMPLETED)
        if told is not None and told.done() and not ended.done():
            trainer.kill()
            await ended
            evidence.kills.append(told.result())
        elif not ended.done():
            raise Broken(f"it hung for {args.patience:g} s:\n{tail(log)}")
        elif told is not None or ended.result():
            raise Broken(f"it ended with status {ended.result()} in life {life}:\n{tail(log)}")
    finally:
        if trainer.returncode is None:
            trainer.kill()
            await ended
        if told is not None:
            told.cancel()
    evidence.journals.append(journal(evidence.folder.path / "rewards.sqlite"))


async def heard(service: asyncio.subprocess.Process) -> dict[str, Any]:
    """Return the next message that the service prints."""
    assert service.stdout is not None
    line = await service.stdout.readline()
    if not line:
        raise Broken("the service is gone")
    return json.loads(line)


def tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-15:])


def journal(path: Path) -> dict[str, float]:
    """Return the scores in the trainer's journal by key.

    A copy of the database is read, because opening it would change the files that a resumed run finds after the kill.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        for ending in ("", "-wal"):
            if (source := path.with_name(path.name + ending)).exists():
                shutil.copyfile(source, copy.with_name(copy.name + ending))
        database = sqlite3.connect(copy)
        rows = database.execute("SELECT key, score FROM rewards").fetchall()
        database.close()
    return {key.hex(): serialize.decode(score, Score).value for key, score in rows}


# --- counts ---------------------------------------------------------------------------------------
def steps_of(evidence: Evidence) -> dict[int, list[tuple[Trajectory, float | None]]]:
    """Return the trajectories that each step consumed, with their advantages."""
    folder = evidence.folder
    return {
        step: [(record.trajectory, record.advantage) for record in folder.read_rollouts(step)]
        for step in folder.rollout_steps()
    }


def trained(evidence: Evidence) -> tuple[Counts, Counts]:
    """Return counts of the rewards that were trained on, and counts of faults in them."""
    args = evidence.args
    steps = steps_of(evidence)
    given: dict[str, float] = evidence.account["worths"] | evidence.account["spared"]
    version = HttpReward(evidence.url).version
    tasks = {task.id: task for task in world.Riddles().tasks("train", args.batch)}
    counts, wrong = Counter[str](), Counter[str]()
    means = {row.step: row.metrics.get("reward/mean", math.nan) for row in evidence.folder.read_metrics()}
    for step, members in steps.items():
        values = []
        sums: defaultdict[str, float] = defaultdict(float)
        for trajectory, advantage in members:
            score = trajectory.score
            if not score.valid:
                counts[f"rewards that failed: {reason(score)}"] += 1
                wrong["failed rewards that have a value or an advantage"] += (
                    not math.isnan(score.value) or advantage is not None
                )
                continue
            values.append(score.value)
            sums[trajectory.task_id] += advantage or 0.0
            request = asked(tasks[trajectory.task_id], trajectory)
            expected = world.worth(request.task.id, request.messages)
            wrong["rewards assigned to a wrong trajectory"] += score.value != expected
            wrong["rewards that the service did not send"] += given.get(request.key(version)) != score.value
        counts["rewards delivered and trained on"] += len(values)
        wrong["trajectories missing from a step"] += args.batch * args.group - len(members)
        off = abs(means.get(step, math.nan) - math.fsum(values) / max(len(values), 1))
        wrong["steps whose mean is not that of the valid rewards"] += not off < 1e-9
        wrong["groups with advantages not centred on the valid rewards"] += sum(abs(s) > 1e-3 for s in sums.values())
    wrong["steps missing"] += args.steps - len(steps)
    wrong["values in the journal that the service did not send"] += sum(
        given.get(key) != value for key, value in evidence.journals[-1].items()
    )
    return dict(counts), dict(wrong)


def asked(task: Task, trajectory: Trajectory) -> Request:
    """Return the request that the trainer sent for a trajectory, which then had the environment's score of 0."""
    return Request.of(task, trajectory.scored(Score(0.0)))


def reason(score: Score) -> str:
    """Return a short name for the reason that the explanation of an invalid score gives."""
    said = score.explanation or ""
    known = {"status 500": "status 500 in all attempts", "no score within": "no answer in time", "no number": "NaN"}
    return next((name for words, name in known.items() if words in said), said)


def served(evidence: Evidence) -> tuple[Counts, Counts]:
    """Return counts of the requests that the service received, by outcome, and counts of faults in them."""
    requests: list[list[str]] = evidence.account["account"]
    outcomes = Counter(outcome for _, _, outcome in requests)
    counts = {"requests that reached the service": len(requests)}
    for outcome, name in OUTCOMES.items():
        counts[f"  {name}"] = outcomes.pop(outcome, 0)
    arrived = Counter(life for life, _, _ in requests)
    counts["repeated attempts within a life of the trainer"] = len(requests) - len(
        {(life, key) for life, key, _ in requests}
    )
    nobody, tries = last_life(evidence, "unreachable"), last_life(evidence, "scored", "retries", "failed")
    counts["attempts without a connection (since the last kill)"] = nobody
    counts["attempts ended before they were read (since the last kill)"] = (
        tries - nobody - arrived[f"life-{evidence.args.kills}"]
    )
    wrong = {
        "requests with an unknown outcome": sum(outcomes.values()),
        "idempotency keys of two different requests": evidence.account["conflicts"],
        "planned kills or outages that did not take place": len(evidence.account["moments"]),
    }
    return counts, wrong


def paid(evidence: Evidence) -> tuple[Counts, Counts]:
    """Return counts of the answers that the service computed once or several times, and counts of faults in them."""
    requests: list[list[str]] = evidence.account["account"]
    times = Counter(key for _, key in evidence.account["paid"])
    sent = Counter((life, key) for life, key, outcome in requests if outcome.startswith(("number", "nan")))
    counts: Counts = {}
    again = 0  # number of answers that were in the journal after a kill, but were requested again afterwards
    for number, kill in enumerate(evidence.kills):
        durable, later = evidence.journals[number].keys(), f"life-{number + 1}"
        asked_later = {key for life, key, _ in requests if life == later}
        done = {key for life, key in evidence.account["paid"] if life == f"life-{number}"}
        counts[f"kill {number + 1}: requests that the service was processing"] = kill["under_way"]
        counts[f"kill {number + 1}: rewards in the journal"] = len(durable)
        counts[f"kill {number + 1}: computed, not in the journal, requested again"] = len(
            (done - durable) & asked_later
        )
        again += len(durable & asked_later)
    double = sum(count - 1 for count in times.values())
    in_a_life = Counter(map(tuple, evidence.account["paid"]))
    heard_twice = sum(count - 1 for count in sent.values() if count > 1)
    counts["answers that the service computed"] = sum(times.values())
    counts["  computed more than once"] = double
    unheard = sum(in_a_life.values()) - len(in_a_life) - heard_twice
    counts["  again in the same life, after a timeout of the trainer"] = max(0, unheard)
    # The answer was sent when the trainer had just given up waiting. Neither side can know this, so only a service that
    # supports idempotency keys avoids computing the answer again.
    counts["  again in the same life, answered at the moment of a timeout"] = heard_twice
    wrong = {"requested again although in the journal": again}
    if evidence.args.idempotent:
        wrong["computed twice in spite of idempotency keys"] = double
    return counts, wrong


def last_life(evidence: Evidence, *names: str) -> int:
    """Return the sum of the metrics ``service/NAME`` and ``service/NAME/...`` over the steps after the last kill."""
    log = (evidence.folder.path.parents[1] / f"life-{evidence.args.kills}.log").read_text()
    found = re.search(r"^resuming .* at step (\d+) of", log, re.MULTILINE)
    rows = [row.metrics for row in evidence.folder.read_metrics() if row.step > (int(found[1]) if found else 0)]
    wanted = [["service", name] for name in names]
    return round(sum(value for row in rows for name, value in row.items() if name.split("/")[:2] in wanted))


def show(*tables: Counts) -> None:
    for table in tables:
        for name, count in table.items():
            print(f"{name:<64}{count:>10}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="groups a step")
    parser.add_argument("--group", type=int, default=16, help="trajectories a group")
    parser.add_argument("--steps", type=int, default=6, help="3 more than kills at least")
    parser.add_argument("--latency", type=float, nargs=2, default=(1.0, 4.0), metavar=("LOW", "HIGH"), help="seconds")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds that a try may take")
    parser.add_argument("--down", type=float, default=30.0, help="seconds without a service")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=1000, help="under way at the service at a kill, at least")
    parser.add_argument("--errors", type=int, default=20, help="of a hundred requests")
    parser.add_argument("--hangs", type=int, default=5, help="of a hundred requests")
    parser.add_argument("--nans", type=int, default=1, help="of a hundred requests")
    parser.add_argument("--idempotent", action="store_true", help="the service honours Idempotency-Key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=1200.0, help="seconds of one life after which it hangs")
    parser.add_argument("--folder", type=Path, help="keep what the run leaves here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.serve:
        asyncio.run(world.serve(argparse.Namespace(**json.loads(args.serve))))
        return 0
    step = args.batch * args.group
    if args.steps < 3 + args.kills:
        parser.error(f"--steps: {3 + args.kills} at least, for {args.kills} kills and an outage")
    # The trainer samples one step ahead. If it has sent more than two steps' requests, it has finished the first step.
    moments = [[f"life-{life}", (5 + 2 * life) * step // 2, args.in_flight, "kill"] for life in range(args.kills)]
    args.moments = json.dumps([*moments, [f"life-{args.kills}", (5 + 2 * args.kills) * step // 2, 1, "down"]])
    folder = args.folder or Path(tempfile.mkdtemp(prefix="reward-faults-"))
    args.folder = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(CONFIG)
    try:
        evidence = asyncio.run(run(args, parse_overrides(rest), folder.resolve()))
        counts, wrong = zip(served(evidence), paid(evidence), trained(evidence), strict=True)
    except Broken as error:
        print(f"reward_faults: {error}", file=sys.stderr)
        return 1
    print(f"{args.steps} steps of {args.batch} x {args.group}, latency {args.latency[0]:g} to {args.latency[1]:g} s, "
          f"{args.kills} kills, {args.down:g} s without the service: {evidence.seconds:.0f} s\n")  # fmt: skip
    show(*counts)
    print("\nthese counts must be 0:")
    show(*wrong)
    return int(any(count for table in wrong for count in table.values()))


if __name__ == "__main__":
    sys.exit(main())
