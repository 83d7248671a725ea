"""Tests a killed and resumed run on a failing reward service: no reward is lost, mixed up or requested twice."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from pathlib import Path

from gleanrl.types import Trajectory
from tests.cli.conftest import CommandLine
from tests.rewards.service import Plan, expected, serving

STEPS, BATCH, GROUP = 12, 4, 4
OUTAGE = 130  # requests before the outage: more than the run sends before the kill, fewer than in all
SETTINGS = (
    *("--reward.name", "gleanrl.rewards.http:HttpReward", "--schedule.preset", "one_step_off"),
    *("--run.steps", str(STEPS), "--schedule.batch", str(BATCH), "--schedule.group", str(GROUP)),
    *("--reward.timeout_s", "3", "--reward.backoff_s", "0.1", "--evaluation.every", "0"),
)
FAULTS = {"500": 0.2, "hang": 0.03, "no_score": 0.04}


def worth(trajectory: Trajectory) -> float:
    return expected("\n".join(turn.message["content"] for turn in trajectory.turns()))


def durable(journal: Path) -> set[str]:
    """Return the keys in the reward journal, which a resumed run finds."""
    database = sqlite3.connect(journal)
    rows = database.execute("SELECT key FROM rewards").fetchall()
    database.close()
    return {key.hex() for (key,) in rows}


def test_rewards_are_right_and_scored_once_despite_service_failures_and_a_kill(gleanrl: CommandLine) -> None:
    plan = Plan(faults=FAULTS, latency=lambda random: random.uniform(0.05, 0.3), outage=(OUTAGE, 1.5), seed=3)
    with serving(plan) as service:
        settings = (*SETTINGS, "--reward.options.url", f"{service.url}/score")
        at = ("gleanrl.learners.engine:LocalEngine.step", 4, "SIGKILL")
        assert gleanrl.train("run", *settings, at=at).status == -9
        folder = gleanrl.run("run")
        kept, asked = durable(folder.path / "rewards.sqlite"), len(service.headers)
        assert len(kept) > BATCH
        assert asked < OUTAGE
        ended = gleanrl.train("run", *settings, "--resume")
        assert ended.status == 0, ended.stderr
    assert service.outages == 1
    assert {"500", "hang", "no_score"} <= set(service.met)

    # No journalled reward is requested again; only those whose answer the kill cut off are scored twice.
    keys = [headers["idempotency-key"] for headers in service.headers]
    earlier, later = set(keys[:asked]), set(keys[asked:])
    assert not kept & later
    twice = {key for key, count in Counter(service.scored).items() if count > 1}
    assert twice <= (earlier - kept) & later
    assert max(Counter(service.scored).values()) <= 2

    # Every reward is on its own trajectory, and a failed one is NaN.
    records = [record for step in folder.rollout_steps() for record in folder.read_rollouts(step)]
    assert len(records) == STEPS * BATCH * GROUP
    for record in records:
        trajectory = record.trajectory
        if trajectory.score.valid:
            assert trajectory.score.value == worth(trajectory)
        else:
            assert "no number at score" in (trajectory.score.explanation or "")
            assert math.isnan(trajectory.score.value)
            assert record.advantage is None
    rows = [row.metrics for row in folder.read_metrics()]
    assert sum(row.get("service/unreachable", 0.0) for row in rows) > 0
    failed = {name for row in rows for name in row if name.startswith("service/failed/")}
    assert failed <= {"service/failed/answer"}
