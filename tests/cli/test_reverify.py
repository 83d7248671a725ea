"""Tests of reverification in `gleanrl train`: trajectories with falsified rewards are evicted, and all others stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool import browse
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Score, Task
from tests.cli.conftest import CommandLine, assert_same
from tests.cli.test_replay import REPLAY, rows
from tests.strategies import NIGHTLY

ROOM = ("--replay.capacity_per_task", "100")  # so large that only reverification evicts
REVERIFY = (
    *(*REPLAY, *ROOM, "--replay.reverify", "true", "--replay.pool_updates", "0"),
    *("--replay.per_group", "4"),
)
STRANGER = Task("stranger")  # the environment cannot play it


@pytest.fixture(scope="session")
def tainted(make_gleanrl: Callable[[], CommandLine]) -> Path:
    """The pool of a run, to which failures of the same run were added with a score of 1, as ``lie-...``."""
    gleanrl = make_gleanrl()
    ended = gleanrl.train("source", *REPLAY, *ROOM, "--replay.start_progress", "1", "--schedule.batch", "4")
    assert ended.status == 0, ended.stderr
    folder = gleanrl.run("source")
    path = folder.path / "experience.sqlite"
    with ExperiencePool(path, ReplaySettings(capacity_per_task=100)) as pool:
        for step in folder.rollout_steps():
            for record in folder.read_rollouts(step):
                failed = record.trajectory
                if failed.score.value == 0:
                    lie = replace(failed, id=f"lie-{failed.id}", score=Score(1.0))
                    start = int(failed.task_id.removeprefix("train-")) % 7
                    pool.add(Task(failed.task_id, payload={"start": start}), lie, attempts=4, successes=2)
        known = next(iter(pool.stored(["train-0", "train-1", "train-2"]).values()))[0].trajectory
        pool.add(STRANGER, replace(known, id="stranger", task_id=STRANGER.id), attempts=4, successes=2)
    return path


def held(path: Path) -> tuple[set[str], set[str]]:
    """Return the ids of the falsified trajectories in a pool, and those of the others."""
    with browse.reading(path) as db:
        found = [entry for entry in browse.entries(db) if isinstance(entry, browse.Entry)]
    names = {entry.stored.trajectory.id for entry in found}
    lies = {name for name in names if name.startswith("lie-")}
    return lies, names - lies


def evicted(path: Path) -> dict[str, int]:
    with ExperiencePool(path, read_only=True) as pool:
        return pool.stats()["evicted"]


def replayed(folder: RunFolder) -> list[str]:
    records = [record for step in folder.rollout_steps() for record in folder.read_rollouts(step)]
    return [record.trajectory.id for record in records if record.replayed]


def test_a_falsified_reward_is_evicted_with_its_cause_and_an_honest_one_stays(
    gleanrl: CommandLine, tainted: Path
) -> None:
    path = gleanrl.folder / "pool.sqlite"
    shutil.copy(tainted, path)
    lies, honest = held(path)
    assert len(lies) > 5
    assert len(honest) > 5
    settings = ("--replay.path", "pool.sqlite", "--run.steps", "8", "--schedule.batch", "4")
    ended = gleanrl.train("run", *REVERIFY, *settings, "--environment.workers", "1")
    assert ended.status == 0, ended.stderr
    lies_left, honest_left = held(path)
    assert honest <= honest_left
    assert evicted(path) == {"reverify": len(lies) - len(lies_left)}
    assert len(lies_left) < len(lies) / 2
    again = replayed(gleanrl.run("run"))
    assert again
    assert not lies & set(again)
    steps = rows(gleanrl, "run")
    assert sum(metrics.get("pool/evicted/reverify", 0) for metrics in steps) == len(lies) - len(lies_left)
    assert "scores 0 now, not 1 as recorded; evicted" in ended.stderr
    # A task that is no training task of the run is not replayed, and its trajectory stays.
    assert "stranger" in honest_left - set(again)
    assert all(metrics["pool/outside"] == 1 for metrics in steps)
    tried = sum(metrics["replay/reverified"] for metrics in steps)
    assert tried == len(again) + len(lies) - len(lies_left)


def test_without_reverification_falsified_trajectories_are_replayed(gleanrl: CommandLine, tainted: Path) -> None:
    """The control of the test above: without reverification, falsified trajectories are replayed."""
    settings = ("--replay.seed_from", str(tainted), "--replay.reverify", "false")
    ended = gleanrl.train("run", *REVERIFY, *settings)
    assert any(name.startswith("lie-") for name in replayed(gleanrl.run("run"))), ended.stderr


@pytest.fixture(scope="module")
def undisturbed(make_gleanrl: Callable[[], CommandLine], tainted: Path) -> tuple[tuple[str, ...], CommandLine]:
    """Settings, and a complete run with them."""
    whole, settings = make_gleanrl(), (*REVERIFY, "--replay.seed_from", str(tainted), "--checkpoint.every", "2")
    assert whole.train("run", *settings).status == 0
    return settings, whole


@pytest.mark.parametrize("moment", [1, 3, 5] if NIGHTLY else [3])
def test_a_run_killed_and_resumed_evicts_the_same_trajectories(
    gleanrl: CommandLine, undisturbed: tuple[tuple[str, ...], CommandLine], moment: int
) -> None:
    settings, whole = undisturbed
    at = ("gleanrl.learners.engine:LocalEngine.step", moment, "SIGKILL")
    assert gleanrl.train("run", *settings, at=at).status == -9
    ended = gleanrl.train("run", *settings, "--resume")
    assert ended.status == 0, ended.stderr
    assert_same(whole.run("run"), gleanrl.run("run"))
    pools = [each.run("run").path / "experience.sqlite" for each in (whole, gleanrl)]
    assert held(pools[0]) == held(pools[1])
    assert evicted(pools[0]) == evicted(pools[1])
    assert evicted(pools[0])["reverify"] > 0


def test_extra_updates_replay_no_falsified_trajectory(gleanrl: CommandLine, tainted: Path) -> None:
    more = ("--replay.seed_from", str(tainted), "--replay.task_ratio", "0", "--replay.pool_updates", "2")
    ended = gleanrl.train("run", *REVERIFY, *more)
    assert ended.status == 0, ended.stderr
    path = gleanrl.run("run").path / "experience.sqlite"
    assert evicted(path)["reverify"] == len(held(tainted)[0]) - len(held(path)[0]) > 0
    steps = rows(gleanrl, "run")
    assert sum(metrics["replay_update/reverified"] for metrics in steps) > evicted(path)["reverify"]
    assert not any(metrics["replay/reverified"] for metrics in steps)
