"""Tests of adaptive chunks through the whole loop with a real learner: the learner is called less often than with fixed
chunks, with the same groups and the same update in every step."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from gleanrl.algorithms.batch import Batch
from gleanrl.config.settings import LearnerSettings, LossSettings, ScheduleSettings
from gleanrl.learners.torch import TorchLearner
from gleanrl.simulate import virtual_time
from gleanrl.train import train
from tests.builders import tiny_model
from tests.loop_world import make_run

BATCH, STEPS = 8, 4


@dataclass
class SlowLearner:
    """A torch learner in float64 whose every update takes one second of virtual time."""

    learner: TorchLearner
    sizes: list[int] = field(default_factory=list)  # groups of each call
    updates: list[dict[str, float]] = field(default_factory=list)

    async def update(self, batch: Batch) -> dict[str, float]:
        await asyncio.sleep(1.0)
        self.sizes.append(batch.groups)
        metrics = dict(await self.learner.update(batch))
        self.updates.append(metrics)
        return metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learner, name)


def played(folder: Path, preset: Any, *, adaptive: bool, updates_per_step: int = 1) -> Any:
    settings = ScheduleSettings(preset=preset, batch=BATCH, group=4, chunks=8, adaptive=adaptive)
    run = make_run(
        folder, settings, steps=STEPS, sample_delay=lambda seed, turn: random.Random(f"{seed}/{turn}").expovariate(1.0)
    )
    learner = TorchLearner(
        tiny_model(0, torch.float64),
        LearnerSettings(lr=0.01, updates_per_step=updates_per_step),
        LossSettings(),
        total_steps=STEPS,
        groups_per_step=BATCH,
        pad_token=0,
        temperature=1.0,
    )
    run.learner = cast(Any, SlowLearner(learner))
    virtual_time.run(train(run))
    return run


def consumed(run: Any) -> list[list[tuple[int, str, list[float]]]]:
    """For each step, the sorted tickets, task ids and rewards of the groups that it consumed."""
    return [
        sorted((g.ticket, g.spec.task.id, [t.score.value for t in g.trajectories]) for g in groups)
        for _, groups, _ in run.observer.steps
    ]


def test_adaptive_and_fixed_chunks_give_the_same_groups_and_updates(tmp_path: Path) -> None:
    fixed, adaptive = (played(tmp_path / str(on), "pipelined", adaptive=on) for on in (False, True))
    assert consumed(fixed) == consumed(adaptive)
    assert fixed.learner.sizes == [1] * BATCH * STEPS
    sizes = adaptive.learner.sizes
    assert sum(sizes) == BATCH * STEPS
    assert len(sizes) < BATCH * STEPS
    for one, other in zip(steps_of(fixed), steps_of(adaptive), strict=True):
        for name in ("tokens/trained", "updates/done", "learner/grad_norm", "reward/mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-9), name
    assert min(step["learner/grad_norm"] for step in steps_of(fixed)) > 0.01
    for name, weights in fixed.learner.weights().items():
        torch.testing.assert_close(adaptive.learner.weights()[name], weights, rtol=1e-6, atol=1e-9)


def steps_of(run: Any) -> list[dict[str, float]]:
    return [metrics for _, _, metrics in run.observer.steps]


def test_a_chunk_that_spans_mini_batches_makes_one_update_for_each(tmp_path: Path) -> None:
    run = played(tmp_path, "pipelined", adaptive=True, updates_per_step=4)
    assert max(run.learner.sizes) > BATCH // 4
    assert [step["updates/done"] for step in steps_of(run)] == [4.0] * STEPS


def test_adaptive_chunks_keep_the_batch_size_and_the_staleness_bound(tmp_path: Path) -> None:
    run = played(tmp_path, "pipelined_one_step_off", adaptive=True)
    assert max(run.learner.sizes) > 1
    assert [len(groups) for _, groups, _ in run.observer.steps] == [BATCH] * STEPS
    assert sorted(t for step in consumed(run) for t, _, _ in step) == list(range(BATCH * STEPS))
    assert max(step["schedule/staleness_max"] for step in steps_of(run)) <= 1


def test_adaptive_is_off_by_default_and_does_not_change_the_sync_preset(tmp_path: Path) -> None:
    assert not ScheduleSettings().adaptive
    run = played(tmp_path, "sync", adaptive=True)
    assert run.learner.sizes == [BATCH] * STEPS
