"""Tests of a sharded learner that releases the device to a sampler and gets further calls meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from typing import Any

import pytest
import torch

from gleanrl.config.settings import LearnerSettings, LossSettings
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.torch import TorchLearner
from gleanrl.schedule.device_lock import DeviceLock
from tests.builders import tiny_model
from tests.learners.many import engine_of, led
from tests.learners.test_sharded import GROUPS, STEPS, batch_of

pytestmark = pytest.mark.xdist_group("ranks")  # tests.learners.many.led

LOSS = LossSettings(entropy_coefficient=0.01)
PATIENCE = 20.0  # seconds until work that takes one second counts as hung


class Crowd:
    """A learner on a device that a sampler requests after the learner's first micro-batch."""

    def __init__(self, ranks: Ranks) -> None:
        self.device_lock = DeviceLock()
        self.learner = TorchLearner(
            tiny_model(0, torch.float32),
            LearnerSettings(tokens_per_microbatch=8),
            LOSS,
            total_steps=STEPS,
            groups_per_step=GROUPS,
            pad_token=0,
            temperature=0.9,
            device_lock=self.device_lock,
            **engine_of(ranks),
        )
        self.batch = batch_of(0, LOSS)
        self.bursts = 0
        self.away = asyncio.Event()

    async def beside(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """``work``, once it has given way to the sampler, which then has the device until `back`; scores are
        requested before."""
        there, begun, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
        local: Any = self.learner.engine.local  # type: ignore[attr-defined]
        whole = local._micro_batches

        def waiting(samples: Any) -> Any:
            loop.call_soon_threadsafe(begun.set)
            there.wait()
            return whole(samples)

        local._micro_batches = waiting
        task = asyncio.ensure_future(work)
        await begun.wait()
        self.sampler = asyncio.create_task(self._sample())
        self.asked = asyncio.create_task(self.learner.logprobs(list(self.batch.samples)))
        await asyncio.sleep(0)
        there.set()
        await self.away.wait()
        return task

    async def _sample(self) -> None:
        async with self.device_lock("sample"):
            self.away.set()
            self.back = asyncio.Event()
            await self.back.wait()


def in_time(work: Awaitable[Any]) -> Any:
    """What ``work`` gives; a process that hangs is ended, as no exception would do."""
    late = threading.Timer(PATIENCE, os._exit, (9,))
    late.daemon = True
    late.start()
    result = asyncio.run(work)  # type: ignore[arg-type]
    late.cancel()
    return result


def estimate_during_an_update(ranks: Ranks) -> tuple[int, float]:
    async def both() -> tuple[int, float]:
        crowd = Crowd(ranks)
        updating = await crowd.beside(crowd.learner.update(crowd.batch))
        crowd.back.set()
        metrics, scores = await asyncio.gather(updating, crowd.asked)
        return len(scores), metrics["learner/grad_norm"]

    return in_time(both())


def weights_during_an_estimate(ranks: Ranks) -> tuple[int, str]:
    async def both() -> tuple[int, str]:
        crowd = Crowd(ranks)
        scoring = await crowd.beside(crowd.learner.logprobs(list(crowd.batch.samples)))
        with pytest.raises(RuntimeError) as caught:
            dict(crowd.learner.weights())
        asked = asyncio.create_task(asyncio.to_thread(lambda: dict(crowd.learner.weights())))
        await asyncio.sleep(0)
        crowd.back.set()
        weights, *_ = await asyncio.gather(asked, scoring, crowd.asked)
        return len(weights), str(caught.value)

    return in_time(both())


def all_of_it(ranks: Ranks) -> tuple[Any, ...]:
    return estimate_during_an_update(ranks), weights_during_an_estimate(ranks)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_calls_during_interrupted_work_are_answered() -> None:
    (scores, norm), (weights, said) = led(2, all_of_it)
    assert scores == len(batch_of(0, LOSS).samples)
    assert norm > 0
    assert weights == len(dict(tiny_model().named_parameters()))
    assert "ask it in a thread" in said
