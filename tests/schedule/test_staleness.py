"""Tests of the staleness bound through the whole training loop in virtual time: no consumed group or token is older
than the bound, and the staleness histogram of every step is exact."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl import Schedule
from gleanrl.config.settings import ScheduleSettings
from gleanrl.curriculum.orders import TaskStream
from gleanrl.protocols import Completion, Metrics
from gleanrl.rewards import EnvironmentReward
from gleanrl.schedule.controller import StalenessController
from gleanrl.schedule.step_metrics import GROUPS, TOKENS, StalenessLog
from gleanrl.simulate import virtual_time
from gleanrl.train import train
from gleanrl.types import Group, Score, Task, Trajectory
from tests.loop_world import alter_answers, make_run, tasks
from tests.schedule_world import group_of
from tests.strategies import examples

PRESETS = ("sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async")
BROKEN = 3  # number of tasks, of 12, whose environment fails, so that their groups are dropped


class SlowReward(EnvironmentReward):
    """The score of the environment, after a random delay that is much longer for a few trajectories."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        await asyncio.sleep(random.Random(f"{self.seed}/{trajectory.id}").choice([0.0, *[0.5] * 7, 2.0, 60.0]))
        return await super().score(task, trajectory)


def histogram(metrics: dict[str, float], prefix: str) -> dict[int, float]:
    return {int(name[len(prefix) :]): n for name, n in metrics.items() if name.startswith(prefix)}


def play(
    folder: Path,
    preset: Any,
    *,
    bound: int,
    ordered: bool | None = None,
    batch: int = 4,
    chunks: int = 2,
    adaptive: bool = False,
    resample: bool = False,
    lag: float = 0.0,
    learner_s: float = 0.0,
    seed: int = 0,
) -> Any:
    """Train in virtual time and return the run. Answers and rewards take random times, some tasks break, and a share
    ``lag`` of the answers comes from weights older than any step may learn from. ``ordered`` builds a schedule with
    that value instead of the schedule of ``preset``."""
    broken = [Task(f"bad-{i}", payload={"broken": "step", "delay": 0.5}) for i in range(BROKEN)]
    options = ScheduleSettings(
        preset=preset, batch=batch, group=2, chunks=chunks, staleness=bound, adaptive=adaptive,
        dynamic_sampling=resample, min_valid=1, max_failed_fraction=1.0,
    )  # fmt: skip
    run = make_run(
        folder,
        options,
        steps=5,
        problems=[*tasks(6), *tasks(3, delay=7.0), *broken],
        learner_delay=learner_s,
        sample_delay=lambda session, turn: random.Random(f"{seed}/{session}/{turn}").choice([0.0, *[0.1] * 8, 20.0]),
    )
    run.rewards = SlowReward(seed)
    if ordered is not None:
        schedule = Schedule(batch, batch // chunks, bound, ordered=ordered)
        run.controller = StalenessController(schedule, run.total_steps)

    def lag_behind(completion: Completion, session: int, turn: int) -> Completion:
        late = random.Random(f"{seed}/lag/{session}/{turn}").random() < lag
        return replace(completion, version=max(0, completion.version - (run.controller.schedule.staleness + 1) * late))

    alter_answers(run.player.sampler, lag_behind)
    virtual_time.run(train(run))
    return run


def check(run: Any, *, lags: bool = False) -> None:
    """Check the histograms and counts of every step against the groups that it consumed."""
    bound, batch = run.controller.schedule.staleness, run.controller.schedule.batch
    assert len(run.observer.steps) == run.total_steps
    for done, groups, metrics in run.observer.steps:
        ages = Counter(done - 1 - group.version for group in groups)
        turns = [turn for group in groups for t in group.valid_fresh for turn in t.sampled_turns()]
        tokens = Counter[int]()
        for turn in turns:
            tokens[done - 1 - turn.version] += turn.tokens.size
        assert 0 <= min(ages) <= max(ages) <= bound
        assert 0 <= min(tokens) <= max(tokens) <= bound
        assert histogram(metrics, GROUPS) == ages
        assert histogram(metrics, TOKENS) == tokens
        assert sum(ages.values()) == batch == metrics["groups/consumed"]
        assert metrics["schedule/staleness_mean"] == pytest.approx(sum(k * n for k, n in ages.items()) / batch)
        assert metrics["schedule/staleness_max"] == max(ages)
        assert not any(group.spec.task.id.startswith("bad") for group in groups)
    # tickets are withheld until their groups can be consumed in time, so only a lagging sampler makes groups too old
    if not lags:
        assert not any("groups/dropped_stale" in metrics for _, _, metrics in run.observer.steps)
    tickets = Counter(group.ticket for _, groups, _ in run.observer.steps for group in groups)
    assert tickets == Counter(range(run.total_steps * batch))


@settings(max_examples=examples(40))
@given(
    preset=st.sampled_from(PRESETS),
    bound=st.integers(0, 8),
    ordered=st.sampled_from([None, None, False, True]),
    cut=st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4), (6, 3)]),
    adaptive=st.booleans(),
    resample=st.booleans(),
    lag=st.sampled_from([0.0, 0.0, 0.2]),
    learner_s=st.sampled_from([0.0, 0.5, 30.0]),
    seed=st.integers(0, 10**6),
)
def test_no_group_or_token_exceeds_the_staleness_bound_and_the_histogram_is_exact(
    preset: str, bound: int, ordered: bool | None, cut: tuple[int, int], adaptive: bool, resample: bool, lag: float,
    learner_s: float, seed: int,
) -> None:  # fmt: skip
    batch, chunks = cut
    with tempfile.TemporaryDirectory() as folder:
        run = play(
            Path(folder), preset, bound=bound, ordered=ordered, batch=batch, chunks=chunks, adaptive=adaptive,
            resample=resample, lag=lag, learner_s=learner_s, seed=seed,
        )  # fmt: skip
    check(run, lags=lag > 0)


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_with_a_slow_learner_groups_are_as_old_as_the_bound_allows(tmp_path: Path, bound: int) -> None:
    """The bound is reached, so the property test above does not pass only because all groups are fresh."""
    run = play(tmp_path, "bounded_async", bound=bound, learner_s=1000.0)
    check(run)
    consumed = [histogram(metrics, GROUPS) for _, _, metrics in run.observer.steps]
    assert consumed == [{min(step, bound): 4} for step in range(5)]
    assert [metrics["schedule/chunks"] for _, _, metrics in run.observer.steps] == [2.0] * 5


def test_groups_sampled_by_too_old_weights_are_dropped_and_in_no_histogram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = Counter[int]()
    observe = TaskStream.observe

    def count_stale(stream: TaskStream, groups: Sequence[Group], training: Metrics) -> Metrics:
        stale.update(g.version for g in groups if g.dropped and g.version >= 0 and len(g.valid_fresh) >= 1)
        return observe(stream, groups, training)

    monkeypatch.setattr(TaskStream, "observe", count_stale)
    run = play(tmp_path, "bounded_async", bound=1, lag=0.3)
    check(run, lags=True)
    dropped = sum(metrics.get("groups/dropped_stale", 0.0) for _, _, metrics in run.observer.steps)
    assert dropped > 0
    assert sum(stale.values()) == dropped  # the curriculum observes each of them
    assert any(metrics.get("groups/dropped_invalid") for _, _, metrics in run.observer.steps)


def test_a_group_of_replayed_members_only_does_not_enter_the_histogram() -> None:
    log = StalenessLog()
    log.add([group_of(0, 3), group_of(1, 5), group_of(2, -1)], step=5)
    log.add([group_of(3, 5)], step=5)
    metrics = log.metrics()
    assert histogram(metrics, GROUPS) == {0: 2, 2: 1}
    assert histogram(metrics, TOKENS) == {0: 4, 2: 2}
    assert metrics["schedule/staleness_mean"] == metrics["schedule/staleness_tokens"] == pytest.approx(2 / 3)


def test_an_empty_step_has_no_histogram() -> None:
    metrics = StalenessLog().metrics()
    assert (metrics["schedule/staleness_mean"], metrics["schedule/staleness_max"]) == (0, 0)
    assert not histogram(metrics, GROUPS)
    assert not histogram(metrics, TOKENS)
