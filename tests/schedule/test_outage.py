"""Tests of a run that the reward agent stops in the middle of a step: the steps before it are saved, and a resumed run
repeats only the interrupted step."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from gleanrl.config.settings import LearnerSettings, LossSettings, ScheduleSettings
from gleanrl.learners.torch import TorchLearner
from gleanrl.runtime.checkpoints import restore
from gleanrl.simulate import virtual_time
from gleanrl.train import Run, StepState, train
from gleanrl.types import Score, Task, Trajectory
from gleanrl.utils.errors import UserError
from tests.builders import tiny_model
from tests.loop_world import make_run

BATCH, STEPS = 4, 5
PRESETS = ["pipelined", "pipelined_one_step_off", "bounded_async"]


class Outage:
    """A reward that takes 1 to 9 s. From time ``end`` on it raises UserError, as after an exhausted error budget."""

    def __init__(self, end: float) -> None:
        self.end = end

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        await asyncio.sleep(random.Random(trajectory.id).uniform(1.0, 9.0))
        if asyncio.get_running_loop().time() > self.end:
            raise UserError("the reward service is down")
        return trajectory.score

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        return scores


def make(
    folder: Path, preset: Any, *, end: float = math.inf, updates_per_step: int = 1, resume: bool = False
) -> tuple[Run, TorchLearner]:
    settings = ScheduleSettings(preset=preset, batch=BATCH, group=4, chunks=BATCH, staleness=2)
    run = make_run(folder, settings, steps=STEPS, sample_delay=0.1)
    learner = TorchLearner(
        tiny_model(0, torch.float64),
        LearnerSettings(lr=0.01, updates_per_step=updates_per_step),
        LossSettings(),
        total_steps=STEPS,
        groups_per_step=BATCH,
        pad_token=0,
        temperature=1.0,
    )
    run.learner = cast(Any, learner)
    run.rewards = Outage(end)
    if resume:
        run.controller = restore(
            run.checkpoints.latest(), run.learner, run.plan, run.controller.schedule, run.total_steps
        )
        cast(Any, run.player.sampler)._version = run.controller.version
    return run, learner


def cut_in_a_step(folder: Path, preset: str, **options: Any) -> Run:
    """Return a run that an outage ended between two chunks of its third step or of a later one."""
    for tenths in range(60, 400, 7):
        run, _ = make(folder / f"{tenths}", preset, end=tenths / 10, **options)
        with pytest.raises(UserError, match="is down"):
            virtual_time.run(train(run))
        if run.step >= 2 and run.step_state is StepState.WAITING:
            return run
    raise AssertionError("no outage fell between two chunks")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resumed_run_repeats_only_the_step_that_the_outage_interrupted(tmp_path: Path, preset: str) -> None:
    first = cut_in_a_step(tmp_path, preset)
    second, learner = make(first.checkpoints.folder.parent, preset, resume=True)
    assert second.step == first.step
    virtual_time.run(train(second))
    tickets = [g.ticket for run in (first, second) for _, groups, _ in run.observer.steps for g in groups]
    assert Counter(tickets) == Counter(range(STEPS * BATCH))
    if preset == "pipelined":  # with staleness 0, the groups of a step do not depend on the timing of rewards
        whole, expected = make(tmp_path / "whole", preset)
        virtual_time.run(train(whole))
        for name, tensor in expected.weights().items():
            torch.testing.assert_close(learner.weights()[name], tensor, rtol=1e-9, atol=1e-12)


def test_no_checkpoint_is_saved_if_the_interrupted_step_has_changed_the_weights(tmp_path: Path) -> None:
    run = cut_in_a_step(tmp_path, "pipelined", updates_per_step=BATCH)
    assert run.checkpoints.latest() is None
