"""Tests of `ReplayUpdateLearner`, which makes updates on replayed successes after the update of a step, and of
`make_policy_estimator`, whose estimates replay selects by."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gleanrl.algorithms.batch import Batch, Sample, build
from gleanrl.config.settings import Config, CreditSettings, LossSettings, ScheduleSettings
from gleanrl.experience import ExperiencePool
from gleanrl.experience.replay.restarts import beginning
from gleanrl.experience.replay.updates import ReplayUpdateLearner, make_policy_estimator
from gleanrl.learners.engine import TokenScores
from gleanrl.types import FloatArray, Group, Score, StopReason, Task, Trajectory, Turn
from tests.experience.pool_world import episode, group, solved, task


def configured(**replay: Any) -> Config:
    return Config.model_validate({"replay": {"enabled": True, **replay}})


def as_floats(values: npt.ArrayLike) -> FloatArray:
    return np.asarray(values, np.float32)


# --- estimates of trajectories ---------------------------------------------------------------------------
class Knowing:
    """A learner that gives token ``t`` the entropy ``t`` and a log-prob ``t / 100`` above the recorded one."""

    def __init__(self) -> None:
        self.groups: list[set[int]] = []

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        self.groups.append({sample.group for sample in samples})
        return [TokenScores(s.behaviour + as_floats(s.tokens / 100), as_floats(s.tokens)) for s in samples]


def test_each_trajectory_gets_its_own_estimate_and_a_task_is_one_group() -> None:
    two = episode("a", tokens=(30, 40))
    more = (Turn({"role": "user", "content": "?"}, np.array([9])), *episode("a", tokens=(50,)).segments[0][1:])
    of_two = Trajectory("a/2", "a", (two.segments[0], more), two.score, StopReason.DONE, {})
    asked = [episode("a", tokens=(10, 20)), episode("b", tokens=(70,)), of_two, episode("b", tokens=(80, 90))]
    learner = Knowing()
    views = asyncio.run(make_policy_estimator(learner, 64)(asked))  # pyright: ignore[reportArgumentType]
    assert [entropy for entropy, _ in views] == pytest.approx([15, 70, 40, 85])
    assert [drift for _, drift in views] == pytest.approx([0.15, 0.7, 0.4, 0.85])
    assert learner.groups == [{0, 1}]


# --- extra updates ----------------------------------------------------------------------------------
class Recorder:
    """A learner that has consumed ``step`` steps and records the updates on replayed successes."""

    def __init__(self, step: int = 1) -> None:
        self.step = step
        self.updates: list[tuple[Batch, int]] = []

    def undo_step(self) -> bool:
        return True

    async def update(self, batch: Batch) -> dict[str, float]:
        return {"tokens/trained": 1.0}

    async def replay_update(self, batch: Batch, step: int) -> dict[str, float]:
        self.updates.append((batch, step))
        return {"loss/policy": 0.5, "tokens/trained": 2.0, "time/train_s": 9.0}

    @property
    def weights(self) -> list[list[float]]:
        """For each extra update, the largest advantage in each of its groups, in order."""
        return [[float(part.samples[0].advantages.max()) for part in batch.parts] for batch, _ in self.updates]


def updated(
    pool: ExperiencePool,
    learner: Recorder,
    groups: Sequence[Group] = (),
    *,
    begun: bool = True,
    reverify: Any = None,
    **replay: Any,
) -> dict[str, float]:
    """Train a step of one group, with the updates on successes that follow, and return the metrics."""
    config = configured(**replay).model_copy(update={"schedule": ScheduleSettings(batch=1, group=4)})
    replaying = ReplayUpdateLearner(
        *(learner, pool, config),  # pyright: ignore[reportArgumentType]
        seed=1,
        max_context=64,
        begun=lambda: begun,
        reverify=reverify,
    )

    consumed = groups or [solved("now", 1, 4)]
    replaying.remember(consumed)
    batch = build(consumed, CreditSettings(), LossSettings(), 64)
    return dict(asyncio.run(replaying.update(batch)))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ExperiencePool]:
    with ExperiencePool(tmp_path / "pool.sqlite") as made:
        yield made


def test_a_success_of_a_task_without_attempts_has_advantage_one(pool: ExperiencePool) -> None:
    assert pool.add(task("seeded"), episode("seeded"))
    learner = Recorder()
    assert updated(pool, learner)["replay_update/0/trajectories"] == 1
    assert learner.weights == [[1.0]]
    pool.observe([solved("known", 1, 4)], 0)
    updated(pool, learner)
    assert sorted(learner.weights[1]) == [0.75, 1.0]


def test_extra_updates_count_as_uses_and_report_ages_by_the_version_in_the_pool(pool: ExperiencePool) -> None:
    """The age of a trajectory of another run counts from the version at which it entered this pool."""
    pool.add(task("old"), episode("old", version=70), version=1)
    pool.add(task("new"), episode("new", version=4))
    metrics = updated(pool, Recorder(step=6), pool_updates=2)
    assert [s.uses for own in pool.stored(["old", "new"]).values() for s in own] == [2, 2]
    for number in (0, 1):
        ages = (metrics[f"replay_update/{number}/age_mean"], metrics[f"replay_update/{number}/age_max"])
        assert ages == (2.5, 4)  # in step 5
        assert metrics[f"replay_update/{number}/loss/policy"] == 0.5
        assert metrics[f"replay_update/{number}/tokens/trained"] == 2.0
    assert metrics["tokens/trained"] == 1.0


def test_no_extra_update_before_replay_begins(pool: ExperiencePool) -> None:
    pool.observe([solved("known", 1, 4)], 0)
    for source in ("pool", "batch"):
        learner = Recorder()
        assert updated(pool, learner, begun=False, pool_from=source) == {"tokens/trained": 1.0}
        assert not learner.updates
        updated(pool, learner, pool_from=source)
        assert len(learner.updates) == 1


def test_an_undone_step_counts_no_groups_and_gives_no_successes(pool: ExperiencePool) -> None:
    learner = Recorder()
    config = configured(pool_from="batch").model_copy(update={"schedule": ScheduleSettings(batch=2, group=4)})
    replaying = ReplayUpdateLearner(
        *(learner, pool, config),  # pyright: ignore[reportArgumentType]
        seed=1,
        max_context=64,
        begun=lambda: True,
    )

    def consume(name: str) -> None:
        groups = [solved(name, 1, 4)]
        replaying.remember(groups)
        asyncio.run(replaying.update(build(groups, CreditSettings(), LossSettings(), 64)))

    consume("undone")
    assert replaying.undo_step()
    consume("first")
    assert not learner.updates
    consume("second")
    [(batch, _)] = learner.updates
    assert len(batch.parts) == 2


def test_extra_updates_report_missing_trajectories_and_their_times(
    pool: ExperiencePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.observe([solved(f"t{index}", 1, 4) for index in range(3)], 0)
    with sqlite3.connect(pool.path) as db:
        db.execute("UPDATE blobs SET data = x'00' WHERE id = (SELECT min(id) FROM blobs)")
    now = [0.0]
    for module in ("gleanrl.experience.replay.updates", "gleanrl.experience.replay.recall"):
        monkeypatch.setattr(f"{module}.perf_counter", lambda: now[0])
    draw, fails = pool.draw, iter([True])

    def slow(*args: Any, **kwargs: Any) -> Any:
        now[0] += 2.0
        return draw(*args, **kwargs)

    async def reverify(task: Task, trajectory: Trajectory) -> Score:
        now[0] += 3.0
        return Score.failed("no answer") if next(fails, False) else trajectory.score

    async def update_slowly(batch: Batch, step: int) -> dict[str, float]:
        now[0] += 5.0
        return {}

    monkeypatch.setattr(pool, "draw", slow)
    learner = Recorder()
    learner.replay_update = update_slowly
    metrics = updated(pool, learner, reverify=reverify)
    counts = {name: metrics[f"replay_update/{name}"] for name in ("missing", "rejected", "too_old", "estimate_failed")}
    assert counts == {"missing": 2, "rejected": 0, "too_old": 0, "estimate_failed": 0}  # one damaged, one without score
    assert (metrics["replay_update/reverified"], metrics["replay_update/reverify_failed"]) == (2, 1)
    assert metrics["replay_update/0/trajectories"] == 1
    assert (metrics["time/replay_update_select_s"], metrics["time/replay_update_update_s"]) == (6, 5)
    assert metrics["time/replay_update_plan_s"] >= 2
    assert metrics["time/replay_update_plan_s"] % 2 == 0


def test_extra_updates_replay_nothing_older_than_max_age(pool: ExperiencePool) -> None:
    pool.observe([solved(f"t{version}", 1, 4, version=version) for version in range(3)], 2)
    metrics = updated(pool, Recorder(step=4), max_age=2)  # in step 3
    assert (
        metrics["replay_update/0/age_max"],
        metrics["replay_update/0/trajectories"],
        metrics["replay_update/too_old"],
    ) == (2, 2, 1)


def test_with_pool_from_batch_successes_are_scores_of_at_least_success_threshold(pool: ExperiencePool) -> None:
    fresh = [episode("t", score, (index, 5)) for index, score in enumerate((0.7, 0.95, 0.6, 0.1))]
    for threshold, weight in ((0.9, 0.75), (0.65, 0.5), (0.5, 0.25)):
        learner = Recorder()
        metrics = updated(pool, learner, [group("t", fresh)], pool_from="batch", success_threshold=threshold)
        assert learner.weights == [[weight]]
        assert "replay_update/0/age_max" not in metrics
    [part] = learner.updates[0][0].parts
    assert {int(sample.tokens[3]) for sample in part.samples} <= {0, 1, 2}


def test_restarted_groups_give_no_successes_to_updates_from_the_batch(pool: ExperiencePool) -> None:
    """Their rate is that from a late turn on, and not that of the task."""
    plain = solved("t", 1, 4)
    start = beginning(plain.trajectories[0].segments[0], 1)
    restarted = replace(plain, spec=replace(plain.spec, start=start))
    for groups, updates in (([restarted], 0), ([plain], 1)):
        learner = Recorder()
        updated(pool, learner, groups, pool_from="batch")
        assert len(learner.updates) == updates
