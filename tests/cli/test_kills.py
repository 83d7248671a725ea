"""Tests that a run that is killed repeatedly at random moments gives the same results as an undisturbed one.

Two in three kills come a random time after a random one of the short pieces of work that must not be torn apart: the
pool's transactions and the writing of a checkpoint. The others come at any time, start-up included.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from gleanrl.experience import ExperiencePool
from gleanrl.experience.guidance.guidance import GUIDANCE_FILE
from gleanrl.experience.pool import codec
from gleanrl.runtime.checkpoints import Checkpoints
from tests.cli.conftest import CommandLine, Job, outcome, timed
from tests.experience.pool_world import contents
from tests.strategies import NIGHTLY

KILLS, LEAST = (18, 15) if NIGHTLY else (6, 4)  # most and fewest kills of one run
STEPS = 30 if NIGHTLY else 14
PATIENCE = 2  # steps after which a run is killed at the latest
TRANSACTION = "gleanrl.experience.pool.schema:transaction"  # about twenty a step
CHECKPOINT = "gleanrl.runtime.checkpoints:Checkpoints.save"
EARLIER = "earlier.sqlite"  # the pool of another run
BASE = (
    *("--replay.enabled", "true", "--run.steps", str(STEPS), "--schedule.group", "4"),
    *("--evaluation.every", "0", "--evaluation.samples", "1"),
)
RUNS = {
    "replay and extra updates": (
        *("--replay.pool_updates", "1", "--replay.entropy_from", "current", "--checkpoint.every", "1"),
    ),
    "guidance, the pool of an earlier run": (
        *("--guidance.enabled", "true", "--replay.path", EARLIER, "--checkpoint.every", "2"),
        *("--replay.pool_updates", "0", "--replay.entropy_from", "recorded"),
    ),
    "a seeded pool that is small and ages": (
        *("--replay.seed_from", EARLIER, "--replay.capacity_per_task", "2", "--replay.max_age", "6"),
        *("--replay.placement", "replace", "--replay.pool_updates", "2", "--replay.pool_from", "batch"),
        *("--guidance.enabled", "true", "--replay.entropy_from", "current", "--checkpoint.every", "3"),
    ),
}


@pytest.fixture(scope="module")
def earlier(make_gleanrl: Callable[[], CommandLine]) -> Path:
    """The pool of a completed run, with that run's marks."""
    gleanrl = make_gleanrl()
    ended = gleanrl.train("run", *BASE, "--sampler.temperature", "0.8", "--run.steps", "4", "--checkpoint.every", "1")
    assert ended.status == 0, ended.stderr
    pool = gleanrl.run("run").experience_path
    with ExperiencePool(pool, read_only=True) as opened:
        assert len(opened.stats()["marks"]) > 1
        assert opened.stats()["trajectories"] > 4
    return pool


def pool_of(gleanrl: CommandLine, settings: tuple[str, ...]) -> Path:
    return gleanrl.folder / EARLIER if "--replay.path" in settings else gleanrl.run("run").experience_path


def mark_of(checkpoint: Path) -> int:
    state = json.loads((checkpoint / "state.json").read_text())["plan"]["curriculum"]
    return state["replay"]["mark"]


def held(pool: Path, mark: int, copy: Path) -> dict[str, Any]:
    """Return a pool's content at a mark, without measured times. The pool is read from a copy of its files."""
    for ending in ("", "-wal"):
        if (source := pool.with_name(pool.name + ending)).exists():
            shutil.copyfile(source, copy.with_name(copy.name + ending))
    with ExperiencePool(copy) as opened:
        opened.rewind(mark)
        assert opened.verify() == []
    found = contents(copy)
    for ending in ("", "-wal", "-shm", ".lock"):
        copy.with_name(copy.name + ending).unlink(missing_ok=True)
    found["blobs"] = [(key, untimed(data)) for key, data in found["blobs"]]
    found["trajectories"] = [(*row[:-2], row[-1]) for row in found["trajectories"]]  # without the record's bytes
    found["counters"] = [row for row in found["counters"] if row[1] != "bytes"]
    return found


def untimed(data: bytes) -> bytes:
    trajectory = codec.decode_trajectory(data)
    info = {name: value for name, value in trajectory.info.items() if not timed(name)}
    return codec.encode_trajectory(replace(trajectory, info=info))


@dataclass
class Assault:
    """Starts, kills and resumes a run; its log of kills is part of every assertion message."""

    gleanrl: CommandLine
    settings: tuple[str, ...]
    random: random.Random
    lifetime: float  # seconds from a start to a few steps later
    saving: float  # seconds that a checkpoint takes
    log: list[str] = field(default_factory=list)
    kills: int = 0

    def life(self) -> int | None:
        """Start or resume the run and kill it at a random moment; return its exit status."""
        resume = ("--resume",) if self.gleanrl.run("run").config_path.exists() else ()
        kind, after, triggers = self.moment()
        self.log.append(f"{kind} {after:.4f} s")
        job = self.gleanrl.start("train", "tiny.toml", "--run.name", "run", *self.settings, *resume, triggers=triggers)
        if not triggers:
            self.wait(job, after)
            job.kill()
        ended = job.wait()
        assert ended.status in (0, -9), f"{ended.stderr}\n{self}"
        self.kills += ended.status == -9
        self.log[-1] += f": {ended.status}, {self.steps()} lines of metrics"
        return ended.status

    def spared(self) -> int | None:
        """Resume the run a last time without a kill; return its exit status."""
        ended = self.gleanrl.train("run", *self.settings, "--resume")
        assert ended.status == 0, f"{ended.stderr}\n{self}"
        self.log.append("not killed")
        return ended.status

    def moment(self) -> tuple[str, float, list[dict[str, Any]]]:
        kind = self.random.choice(["any", "transaction", "checkpoint"])
        if kind == "any":
            return kind, self.random.uniform(0.0, self.lifetime), []
        at, calls, longest = (TRANSACTION, 50, 0.006) if kind == "transaction" else (CHECKPOINT, 1, 2 * self.saving)
        call, after = self.random.randint(1, calls), self.random.uniform(1e-6, longest)
        return f"{kind} {call} +", after, [{"at": at, "call": call, "event": "SIGKILL", "after": after}]

    def wait(self, job: Job, seconds: float) -> None:
        """Wait ``seconds``, or until the run has advanced by `PATIENCE` steps."""
        start, before = time.monotonic(), self.steps()
        while time.monotonic() < start + seconds and self.steps() < before + PATIENCE:
            time.sleep(0.005)

    def steps(self) -> int:
        path = self.gleanrl.run("run").metrics_path
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def __str__(self) -> str:
        return "kills so far:\n" + "\n".join(self.log)


@pytest.mark.timeout(1200)  # half a minute of computing, on a machine that may be busy
@pytest.mark.parametrize("name", RUNS)
def test_kills_at_random_moments_change_neither_results_nor_pool(
    make_gleanrl: Callable[[], CommandLine], earlier: Path, name: str, tmp_path: Path
) -> None:
    settings, copy = (*BASE, *RUNS[name]), tmp_path / "copy.sqlite"
    whole, killed = make_gleanrl(), make_gleanrl()
    for each in (whole, killed):
        shutil.copyfile(earlier, each.folder / EARLIER)
    started = time.monotonic()
    ended = whole.train("run", *settings, "--checkpoint.keep", "99")
    assert ended.status == 0, ended.stderr
    lifetime = (time.monotonic() - started) / 3
    pool = pool_of(whole, settings)
    expected = {c.step: held(pool, mark_of(c.path), copy) for c in whole.run("run").checkpoints()}
    spans = whole.run("run").read_timeline()
    saving = median(span["end"] - span["start"] for span in spans if span["kind"] == "checkpoint")

    assault = Assault(killed, settings, random.Random(name), lifetime, saving)
    run, pool = killed.run("run"), pool_of(killed, settings)
    status = None
    while status != 0:
        status = assault.life() if len(assault.log) < KILLS else assault.spared()
        if pool.exists() and run.config_path.exists():
            found = killed.here("pool", "run", "verify")
            unmade = "not an experience pool" in found.stderr and not assault.steps()  # killed while it was made
            assert found.status == 0 or unmade, f"{found}\n{assault}"
        if (newest := Checkpoints(run.checkpoints_path, 2).latest()) is not None:
            assert held(pool, mark_of(newest[0]), copy) == expected[newest[1]["step"]], str(assault)
    assert assault.kills >= LEAST, str(assault)
    print(assault)
    there, here = outcome(whole.run("run")), outcome(run)
    for (step, expected_row), (found_step, row) in zip(there["metrics"], here["metrics"], strict=True):
        other = {name: (row.get(name), expected_row.get(name)) for name in row.keys() | expected_row.keys()}
        assert not (other := {name: two for name, two in other.items() if two[0] != two[1]}), (
            f"{step}: {other}\n{assault}"
        )
        assert found_step == step
    assert here["rollouts"] == there["rollouts"], str(assault)
    assert {"model/model.safetensors", f"checkpoints/step-{STEPS}/random/cpu"} <= here["weights"].keys()
    assert [path for path, data in here["weights"].items() if data != there["weights"][path]] == [], str(assault)
    texts = [each.run("run").path / GUIDANCE_FILE for each in (whole, killed)]
    if texts[0].exists():
        assert texts[0].read_bytes() == texts[1].read_bytes(), str(assault)
