"""Tests of RunObserver, which divides a step's time into work, waiting for rewards, environments and idle time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.algorithms.batch import build
from gleanrl.config.settings import CreditSettings, LearnerSettings, LossSettings
from gleanrl.learners.torch import TorchLearner
from gleanrl.runtime import observer
from gleanrl.runtime.evaluation import Evaluation, EvaluationWork
from gleanrl.runtime.observer import RunObserver
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.device_lock import DeviceLock
from gleanrl.schedule.timeline import DEVICE_WORK, Timeline
from gleanrl.tracking.monitors import Monitors
from gleanrl.types import LAST_OBSERVATION, Group, GroupSpec, Message, Score, StopReason, Task, Trajectory
from tests.builders import random_groups, tiny_model
from tests.experience.pool_world import episode


class Kept:
    """A monitor and progress bar that keeps the logged metrics of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, step: int, metrics: Any) -> None:
        self.steps.append(dict(metrics))

    def close(self) -> None:
        pass

    def advance(self, count: int = 1, **fields: float | str) -> None:
        pass


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def observing(folder: Path, timeline: Timeline, counters: Callable[[], dict[str, float]] = dict) -> tuple[Any, Kept]:
    kept = Kept()
    made = RunObserver(
        RunFolder(folder), Monitors([kept]), timeline, rollouts_per_step=0, counters=counters, training=kept
    )
    return made, kept


def test_all_device_work_of_the_learner_counts_as_work(tmp_path: Path) -> None:
    """With recomputed old log-probs, the learner also works on the device outside of training."""
    timeline, loss = Timeline(), LossSettings()
    batch = build(random_groups(np.random.default_rng(0)), CreditSettings(), loss, 128)

    async def one_step() -> dict[str, float]:
        learner = TorchLearner(
            tiny_model(),
            LearnerSettings(old_logprobs="recompute"),
            loss,
            total_steps=1,
            groups_per_step=batch.groups,
            pad_token=0,
            temperature=1.0,
            device_lock=DeviceLock(timeline=timeline),
            timeline=timeline,
        )
        watching, kept = observing(tmp_path, timeline)
        watching.on_step(1, [], await learner.update(batch))
        return kept.steps[0]

    metrics = asyncio.run(one_step())
    [(start, end)] = timeline.spans("logprobs")
    assert metrics["time/logprobs_s"] == pytest.approx(end - start)
    idle = metrics["time/idle_s"] + metrics["time/environment_s"]
    assert metrics["device/idle_share"] == pytest.approx(
        idle / (idle + sum(metrics[f"time/{k}_s"] for k in DEVICE_WORK))
    )


def test_idle_time_is_divided_by_what_was_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, at_work = Clock(), {"environment_s": 0.0}
    monkeypatch.setattr(observer, "perf_counter", clock)
    timeline = Timeline(clock=clock)
    watching, kept = observing(tmp_path, timeline, lambda: at_work)
    timeline.record("decode", 0.0, 4.0)
    clock.now = 3.0
    with timeline.span("score"):
        clock.now = 7.0  # from second 4 on the device is idle and the reward is pending
    timeline.record("logprobs", 8.0, 10.0)
    clock.now = 9.0
    late = timeline.span("score")
    late.__enter__()
    clock.now = 12.0  # the second reward is still pending when the step ends
    at_work["environment_s"] = 6.5
    watching.on_step(1, [], {})
    clock.now = 14.0
    late.__exit__(None, None, None)
    timeline.record("train", 15.0, 16.0)
    clock.now = 16.0
    watching.on_step(2, [], {})
    first, second = kept.steps
    assert first["device/idle_share"] == 0.5
    assert (first["time/reward_wait_s"], first["time/environment_s"], first["time/idle_s"]) == (5.0, 1.0, 0.0)
    assert (second["time/reward_wait_s"], second["time/environment_s"], second["time/idle_s"]) == (2.0, 0.0, 1.0)


def test_a_burst_of_an_evaluation_counts_in_the_steps_in_which_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler records the span of a burst only when the burst ends."""
    clock = Clock()
    monkeypatch.setattr(observer, "perf_counter", clock)
    timeline = Timeline(clock=clock)
    work = EvaluationWork(DeviceLock(timeline=timeline, clock=clock), timeline)
    watching, kept = observing(tmp_path, timeline)

    async def two_steps() -> None:
        timeline.record("train", 0.0, 2.0)
        clock.now = 2.0
        async with work.device_lock("sample"):
            clock.now = 9.0
            watching.on_step(1, [], {})
            clock.now = 10.0
            work.record("decode", 2.0, 10.0)
        timeline.record("train", 10.0, 14.0)
        clock.now = 18.0
        watching.on_step(2, [], {})

    asyncio.run(two_steps())
    first, second = kept.steps
    assert (first["time/evaluate_s"], first["device/idle_share"]) == (7.0, 0.0)
    assert (second["time/evaluate_s"], second["time/idle_s"]) == (1.0, 4.0)


def test_a_lone_surrogate_in_an_explanation_is_written_escaped_into_the_samples(tmp_path: Path) -> None:
    """An environment that cannot open a file whose name is not UTF-8 raises an error with such a text."""
    watching, _ = observing(tmp_path, Timeline())
    failed = Trajectory("x", "t", (), Score.failed("OSError: cannot open /data/\udcff.txt"), StopReason.ERROR)
    watching.evaluated(3, Evaluation([Task("t")], [[failed]]))
    [written] = (tmp_path / "samples").iterdir()
    assert r"cannot open /data/\udcff.txt" in written.read_text(encoding="utf-8")


def test_samples_show_why_an_attempt_got_its_score(tmp_path: Path) -> None:
    watching, kept = observing(tmp_path, Timeline())
    score = Score(0.2, parts={"format": 1.0, "correct": 0.0}, explanation="41 is not 42")
    info = {LAST_OBSERVATION: [Message(role="user", content="The answer is wrong.")]}
    played = Trajectory("x", "t", (), score, StopReason.DONE, info)
    watching.evaluated(3, Evaluation([Task("t", payload={"answer": "42"})], [[played]]))
    [written] = (tmp_path / "samples").iterdir()
    text = written.read_text()
    assert all(part in text for part in ("format 1", "correct 0", "41 is not 42", "answer: 42", "The answer is wrong."))
    assert kept.steps[0]["eval/sampled/score"] == 0.2


def test_a_run_without_rewards_to_wait_for_has_no_reward_wait_metric(tmp_path: Path) -> None:
    watching, kept = observing(tmp_path, Timeline())
    watching.on_step(1, [], {})
    assert "time/reward_wait_s" not in kept.steps[0]
    assert kept.steps[0]["time/idle_s"] > 0


def test_a_record_has_the_advantage_of_its_own_member(tmp_path: Path) -> None:
    """A stored trajectory of an earlier run may have the same id as a fresh one: ids count from 0 in every run."""
    made = RunObserver(
        RunFolder(tmp_path), Monitors([]), Timeline(), rollouts_per_step=-1, counters=dict, training=Kept()
    )
    fresh = [episode("t", float(i == 0), (10 + i, 5)) for i in range(2)]
    stored = replace(episode("t", 1.0, (20, 5)), id=fresh[1].id)
    mixed = Group(GroupSpec(Task("t"), 2, (stored,)), (*fresh, stored), 3)
    made.on_batch([mixed], build([mixed], CreditSettings(), LossSettings(), 64))
    made.on_step(1, [mixed], {"time/step_s": 1.0})
    written = [record.advantage for record in RunFolder(tmp_path).read_rollouts(1)]
    assert np.sign(written).tolist() == [1, -1, 1]
