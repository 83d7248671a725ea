"""Tests that the learner releases the device between micro-batches to prior work, and still learns the same."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gleanrl.algorithms.batch import Batch
from gleanrl.config.settings import LossSettings
from gleanrl.learners.torch import TorchLearner
from gleanrl.schedule.device_lock import SAMPLE_FIRST, TRAIN_FIRST, DeviceLock, Work
from gleanrl.schedule.timeline import Timeline
from tests.learners.test_torch import close, make_batch, make_learner, update, values

LOSS = LossSettings(entropy_coefficient=0.01)  # the entropy term prevents skipping samples
SMALL = {"loss": LOSS, "tokens_per_microbatch": 64}  # six micro-batches
PAUSE = 0.05  # seconds for which other work has the device


class Recorder:
    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    def record(self, kind: str, start: float, end: float, **_: Any) -> None:
        self.spans.append((kind, start, end))


async def beside(
    learner: TorchLearner, device_lock: DeviceLock, batch: Batch, others: Sequence[Work]
) -> dict[str, float]:
    """Run an update during which, after its first micro-batch, other work waits for the device."""
    there, loop = threading.Event(), asyncio.get_running_loop()
    tokens = learner.engine._tokens  # type: ignore[attr-defined]

    def waiting(*args: Any) -> Any:
        assert there.wait(10)
        return tokens(*args)

    learner.engine._tokens = waiting  # type: ignore[attr-defined]

    async def other(work: Work) -> None:
        async with device_lock(work):
            await asyncio.sleep(PAUSE)

    updating = asyncio.create_task(learner.update(batch))
    await asyncio.sleep(0)
    waiters = [asyncio.create_task(other(work)) for work in others]
    loop.call_later(0.01, there.set)
    metrics = await updating
    await asyncio.gather(*waiters)
    return metrics


@pytest.mark.parametrize(("order", "stretches"), [(SAMPLE_FIRST, 2), (TRAIN_FIRST, 1)])
def test_work_of_higher_priority_gets_the_device_between_two_micro_batches(
    order: Sequence[Work], stretches: int
) -> None:
    batch, recorder = make_batch(0, LOSS), Recorder()
    waits = Timeline()
    device_lock = DeviceLock(order=lambda: order, timeline=waits)
    learner, alone = make_learner(device_lock=device_lock, timeline=recorder, **SMALL), make_learner(**SMALL)
    metrics = asyncio.run(beside(learner, device_lock, batch, ["sample", "evaluate"]))
    assert len(recorder.spans) == stretches
    assert all(kind == "train" and end >= start for kind, start, end in recorder.spans)
    gaps = [start - end for (_, _, end), (_, start, _) in itertools.pairwise(recorder.spans)]
    assert all(PAUSE <= gap < 2 * PAUSE + 1 for gap in gaps)  # time for the sampler only, not for the evaluation
    assert waits.spans("wait")
    undisturbed = update(alone, batch)
    close(values(learner), values(alone), 0.0)
    assert metrics["learner/grad_norm"] == undisturbed["learner/grad_norm"]


def test_time_of_other_work_does_not_count_as_gradient_time() -> None:
    waits, recorder = Timeline(), Recorder()
    device_lock = DeviceLock(timeline=waits)
    learner = make_learner(device_lock=device_lock, timeline=recorder, **SMALL)
    metrics = asyncio.run(beside(learner, device_lock, make_batch(0, LOSS), ["sample"] * 10))
    assert sum(end - start for start, end in waits.spans("wait")) >= 10 * PAUSE
    held = sum(end - start for _, start, end in recorder.spans)
    assert metrics["time/learner_gradient_s"] < held + 0.01


def test_an_update_works_without_a_device_lock() -> None:
    learner = make_learner(**SMALL)
    metrics = update(learner, make_batch(0, LOSS))
    assert metrics["time/learner_gradient_s"] > 0
    assert torch.isfinite(torch.tensor([v.sum() for v in values(learner).values()])).all()


def test_a_log_prob_pass_waits_for_the_end_of_an_interrupted_update() -> None:
    """The spans and times of the update and of the log-prob pass are kept apart."""
    recorder, device_lock = Recorder(), DeviceLock()
    learner, samples = (
        make_learner(device_lock=device_lock, timeline=recorder, **SMALL),
        list(make_batch(1, LOSS).samples),
    )

    async def both() -> dict[str, float]:
        updating = asyncio.create_task(beside(learner, device_lock, make_batch(0, LOSS), ["sample"] * 4))
        await asyncio.sleep(0)
        appraising = asyncio.create_task(learner.logprobs(samples))
        metrics, _ = await asyncio.gather(updating, appraising)
        return metrics

    metrics = asyncio.run(both())
    kinds = [kind for kind, _, _ in recorder.spans]
    assert kinds[-1] == "logprobs"
    assert set(kinds[:-1]) == {"train"}
    assert len(kinds) >= 3
    trained = sum(end - start for kind, start, end in recorder.spans if kind == "train")
    assert metrics["time/learner_gradient_s"] < trained + 0.01
