"""Sampling and learning overlap: always with the same policies, whichever is slower, and without a deadlock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.buffer import TrajectoryReplayBuffer
from gleanrl.embodied import demonstrations
from gleanrl.embodied.actor import ActorWorker
from gleanrl.embodied.environments import Environments
from gleanrl.embodied.loop import Training
from gleanrl.embodied.networks import Actor
from gleanrl.embodied.rollout import Rollout, RolloutWorker
from gleanrl.embodied.sac import SAC
from gleanrl.embodied.settings import EmbodiedConfig
from gleanrl.utils.errors import UserError
from tests.embodied.world import ID, still

STEPS = 8


def config(**schedule: Any) -> EmbodiedConfig:
    return EmbodiedConfig.model_validate(
        {
            "environment": {"id": ID, "count": 2, "chunk": 2},
            "schedule": {"chunk_steps": 10, "warmup": 2, **schedule},
            "learner": {"batch": 16, "hidden_size": 16, "update_ratio": 0.25},
        }
    )


@contextmanager
def parts(
    settings: EmbodiedConfig, *, shown: bool = False, window: int = 0, newest: int = 0
) -> Iterator[tuple[RolloutWorker, ActorWorker]]:
    environments = Environments(ID, {}, count=2, chunk=2, seed=0)
    sizes = (environments.obs_size, environments.action_size)
    own = TrajectoryReplayBuffer(seed=1, sample_window_size=window)
    other = TrajectoryReplayBuffer(seed=2, sample_window_size=newest)
    actor = ActorWorker(SAC(*sizes, settings.learner, 0), own, other if shown else None, settings)
    network = Actor(*sizes, 16, 2, torch.Generator().manual_seed(0))
    schedule = settings.schedule
    worker = RolloutWorker(environments, network, chunk_steps=schedule.chunk_steps, warmup=schedule.warmup, seed=0)
    try:
        yield worker, actor
    finally:
        own.close()
        other.close()
        worker.close()


def train(worker: RolloutWorker, actor: ActorWorker, lag: int, steps: int = STEPS) -> list[Rollout]:
    seen: list[Rollout] = []
    training = Training(worker, actor, steps, lag, seen.append, lambda *_: None, lambda step: None)
    asyncio.run(asyncio.wait_for(training.run(), 60))
    return seen


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("slow", ["sampling", "learning"])
def test_a_run_does_not_depend_on_who_is_slower(lag: int, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for delayed in (False, True):
        with parts(config(lag=lag)) as (worker, actor):
            if delayed:
                owner, name = (worker, "collect") if slow == "sampling" else (actor, "learn")
                real = getattr(owner, name)
                monkeypatch.setattr(owner, name, lambda item, real=real: (time.sleep(0.02), real(item))[1])
            rollouts = train(worker, actor, lag)
            weights.append([parameter.detach().clone() for parameter in actor.sac.actor.parameters()])
            assert [rollout.number for rollout in rollouts] == list(range(STEPS))
            assert [rollout.version for rollout in rollouts] == [max(0, number - lag) for number in range(STEPS)]
            assert actor.buffer.total_samples == STEPS * 20
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*weights, strict=True))


def test_with_lag_sampling_goes_on_while_the_learner_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With lag 2, trajectories 1 and 2 may be sampled before the first one was learned from, but not 3."""
    with parts(config(lag=2)) as (worker, actor):
        learn, collect, collected = actor.learn, worker.collect, list[int]()

        def collecting(number: int) -> Rollout:
            collected.append(number)
            return collect(number)

        def learning(rollout: Rollout) -> dict[str, float]:
            end = time.monotonic() + 20
            while len(collected) <= min(rollout.number + 2, STEPS - 1) and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.02)  # for one too many to show itself
            assert len(collected) == min(rollout.number + 3, STEPS)
            return learn(rollout)

        monkeypatch.setattr(worker, "collect", collecting)
        monkeypatch.setattr(actor, "learn", learning)
        train(worker, actor, 2)


@pytest.mark.parametrize("side", ["sampling", "learning"])
def test_an_error_of_either_side_ends_the_run(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with parts(config(lag=1)) as (worker, actor):
        owner, name = (worker, "collect") if side == "sampling" else (actor, "learn")
        real, calls = getattr(owner, name), list[int]()

        def failing(item: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise UserError(f"{side} failed")
            return real(item)

        monkeypatch.setattr(owner, name, failing)
        with pytest.raises(UserError, match=f"{side} failed"):
            train(worker, actor, 1)


def test_an_interrupted_run_stops_at_a_boundary() -> None:
    with parts(config(lag=1)) as (worker, actor):
        training: list[Training] = []

        def boundary(step: int) -> None:
            if step == 3:
                training[0].interrupt()

        training.append(Training(worker, actor, STEPS, 1, lambda _: None, lambda *_: None, boundary))
        asyncio.run(asyncio.wait_for(training[0].run(), 60))
        assert actor.step == 3


def test_a_cancelled_run_ends_after_the_work_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the threads use is closed when it has ended."""
    with parts(config(lag=1)) as (worker, actor):
        learn, ended = actor.learn, list[int]()

        async def test() -> None:
            began, loop = asyncio.Event(), asyncio.get_running_loop()

            def slow(rollout: Rollout) -> dict[str, float]:
                loop.call_soon_threadsafe(began.set)
                time.sleep(0.3)
                ended.append(rollout.number)
                return learn(rollout)

            monkeypatch.setattr(actor, "learn", slow)
            training = Training(worker, actor, STEPS, 1, lambda _: None, lambda *_: None, lambda step: None)
            running = asyncio.create_task(training.run())
            await began.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert ended == [0]

        asyncio.run(asyncio.wait_for(test(), 60))


def test_another_buffer_demonstrates_whoever_wrote_it(tmp_path: Path) -> None:
    for layout in ("native", "pt"):
        with parts(config()) as (worker, _), TrajectoryReplayBuffer(seed=0, trajectory_format=layout) as earlier:
            demonstrations.record(earlier, worker, still, 20)
            earlier.save_checkpoint(tmp_path / layout)
        with parts(config(), shown=True) as (worker, actor):
            assert actor.demonstrations is not None
            demonstrations.load(actor.demonstrations, tmp_path / layout)
            assert actor.demonstrations.total_samples == 40
            assert [actor.learn(rollout)["updates/done"] for rollout in collected(worker, 3)] == [0, 0, 5]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_checkpoint_goes_on_bit_for_bit(lag: int, tmp_path: Path) -> None:
    settings = config(lag=lag)
    with parts(settings, shown=True) as (worker, actor):
        assert actor.demonstrations is not None
        demonstrations.record(actor.demonstrations, worker, still, 20)
        train(worker, actor, lag, 4)
        actor.save(tmp_path)
        train(worker, actor, lag)
        wanted = learned(actor)
    with parts(settings, shown=True) as (worker, actor):
        actor.load(tmp_path, 4)
        assert actor.buffer.total_samples == 4 * 20
        assert actor.demonstrations is not None
        assert actor.demonstrations.total_samples == 40
        assert actor.progress is not None
        again = RolloutWorker(
            worker.environments, worker.actor, chunk_steps=10, warmup=2, seed=0, progress=actor.progress
        )
        train(again, actor, lag)
        assert learned(actor) == wanted


def learned(actor: ActorWorker) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in actor.sac.actor.parameters()]


def test_updates_keep_their_ratio_to_chunk_steps() -> None:
    with parts(config()) as (worker, actor):
        done = [actor.learn(worker_rollout)["updates/done"] for worker_rollout in collected(worker, 6)]
    # 20 chunk steps a step and a quarter of an update for each, none in the warm-up of two steps
    assert done == [0, 0, 5, 5, 5, 5]


def collected(worker: RolloutWorker, count: int) -> Iterator[Rollout]:
    for number in range(count):
        yield worker.collect(number)


def test_demonstrations_are_the_share_of_each_batch_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with parts(config(), shown=True) as (worker, actor):
        assert actor.demonstrations is not None
        demonstrations.record(actor.demonstrations, worker, still, 20)
        seen, update = list[Any](), actor.sac.update

        def watch(transitions: Any, generator: torch.Generator) -> Any:
            seen.append(transitions)
            return update(transitions, generator)

        monkeypatch.setattr(actor.sac, "update", watch)
        for rollout in collected(worker, 3):
            actor.learn(rollout)
        shown = {tuple(row) for row in all_actions(actor.demonstrations)}
        assert len(seen) == 5
        for transitions in seen:
            assert sum(tuple(row) in shown for row in transitions.actions.tolist()) == 8  # half of 16


def all_actions(buffer: TrajectoryReplayBuffer) -> list[list[float]]:
    found = [buffer.trajectory(number).actions for number in range(len(buffer))]
    return [row for actions in found if actions is not None for row in actions.reshape(-1, 4).tolist()]


def test_an_expert_of_the_wrong_shape_is_named() -> None:
    with parts(config(), shown=True) as (worker, actor):
        assert actor.demonstrations is not None
        with pytest.raises(UserError, match=r"expert gave actions \[2, 3\], not \[2, 4\]"):
            demonstrations.record(actor.demonstrations, worker, lambda obs: obs, 20)


@pytest.mark.parametrize(
    ("window", "batch", "shown", "updates"), [(1, 16, False, 5), (1, 40, True, 5), (2, 40, False, 5)]
)
def test_updates_begin_as_soon_as_a_window_fills_its_part_of_a_batch(
    window: int, batch: int, shown: bool, updates: int
) -> None:
    """And not as long as it does not, however much lies behind it."""
    settings = config(warmup=0)
    settings = settings.model_copy(update={"learner": settings.learner.model_copy(update={"batch": batch})})
    with parts(settings, shown=shown, window=window) as (worker, actor):
        if actor.demonstrations is not None:
            demonstrations.record(actor.demonstrations, worker, still, 20)
        actor.check()
        done = [actor.learn(rollout)["updates/done"] for rollout in collected(worker, 3)]
        assert done == [0 if window == 2 else updates, updates, updates]
        assert actor.buffer.window_samples == window * 20
        assert actor.buffer.total_samples == 60


@pytest.mark.parametrize("newest", [0, 1])
def test_too_few_demonstrations_are_said_before_anything_is_learned(newest: int) -> None:
    settings = config()
    chosen = settings.demonstrations.model_copy(update={"newest": newest})
    learner = settings.learner.model_copy(update={"batch": 42 if newest else 82})
    settings = settings.model_copy(update={"learner": learner, "demonstrations": chosen})
    with parts(settings, shown=True, newest=newest) as (worker, actor):
        assert actor.demonstrations is not None
        demonstrations.record(actor.demonstrations, worker, still, 20)
        there, taken = (20, 21) if newest else (40, 41)
        with pytest.raises(UserError, match=f"hold {there} chunk steps, and a batch takes {taken}: show more"):
            actor.check()
