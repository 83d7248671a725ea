"""Tests of the embodied training loop, in which sampling and learning overlap.

The policy versions must not depend on which side is slower, and no error, interrupt or cancellation may hang.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
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
WAIT = 20.0  # seconds until an operation counts as hung


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
    settings: EmbodiedConfig, *, shown: int | None = None, window: int = 0, newest: int = 0
) -> Iterator[tuple[RolloutWorker, ActorWorker]]:
    """A rollout worker and an actor worker with ``shown`` demonstrated chunk steps in each environment.

    With ``shown=None`` there is no demonstration buffer. ``window`` and ``newest`` are the sample windows of the
    policy's buffer and of the demonstration buffer.
    """
    environments = Environments(ID, {}, count=2, chunk=2, seed=0)
    sizes = (environments.obs_size, environments.action_size)
    own = TrajectoryReplayBuffer(seed=1, sample_window_size=window)
    other = TrajectoryReplayBuffer(seed=2, sample_window_size=newest)
    actor = ActorWorker(SAC(*sizes, settings.learner, 0), own, other if shown is not None else None, settings)
    network = Actor(*sizes, 16, 2, torch.Generator().manual_seed(0))
    schedule = settings.schedule
    worker = RolloutWorker(environments, network, chunk_steps=schedule.chunk_steps, warmup=schedule.warmup, seed=0)
    try:
        if shown:
            demonstrations.record(other, worker, still, shown)
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


def slow_down(slow: str, lag: int, worker: RolloutWorker, actor: ActorWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each call of the ``slow`` side wait until the other side is as far ahead as the bound on the lag allows."""
    collect, learn = worker.collect, actor.learn
    done, changed = {"sampling": 0, "learning": 0}, threading.Condition()

    def call(side: str, other: str, least: int, work: Callable[[Any], Any], item: Any) -> Any:
        with changed:
            assert side != slow or changed.wait_for(lambda: done[other] >= least, WAIT)
        found = work(item)
        with changed:
            done[side] += 1
            changed.notify_all()
        return found

    def collecting(number: int) -> Rollout:
        return call("sampling", "learning", number, collect, number)

    def learning(rollout: Rollout) -> dict[str, float]:
        return call("learning", "sampling", min(rollout.number + lag + 1, STEPS), learn, rollout)

    monkeypatch.setattr(worker, "collect", collecting)
    monkeypatch.setattr(actor, "learn", learning)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_weights_and_versions_do_not_depend_on_which_side_is_slower(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for slow in ("neither", "sampling", "learning"):
        with parts(config(lag=lag)) as (worker, actor):
            slow_down(slow, lag, worker, actor, monkeypatch)
            rollouts = train(worker, actor, lag)
            weights.append(learned(actor))
            assert [rollout.number for rollout in rollouts] == list(range(STEPS))
            assert [rollout.version for rollout in rollouts] == [max(0, number - lag) for number in range(STEPS)]
            assert actor.buffer.total_samples == STEPS * 20
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.parametrize("side", ["sampling", "learning"])
def test_an_error_in_sampling_or_learning_ends_the_run(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_interrupted_run_stops_at_a_step_boundary() -> None:
    with parts(config(lag=1)) as (worker, actor):
        training: list[Training] = []

        def boundary(step: int) -> None:
            if step == 3:
                training[0].interrupt()

        training.append(Training(worker, actor, STEPS, 1, lambda _: None, lambda *_: None, boundary))
        asyncio.run(asyncio.wait_for(training[0].run(), 60))
        assert actor.step == 3


def test_a_cancelled_run_ends_only_after_its_running_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller closes what the worker threads use once the run has ended, so the run must wait for them."""
    with parts(config(lag=1)) as (worker, actor):
        learn, ended, go_on = actor.learn, list[int](), threading.Event()

        async def test() -> None:
            began, loop = asyncio.Event(), asyncio.get_running_loop()

            def slow(rollout: Rollout) -> dict[str, float]:
                loop.call_soon_threadsafe(began.set)
                assert go_on.wait(WAIT)
                ended.append(rollout.number)
                return learn(rollout)

            monkeypatch.setattr(actor, "learn", slow)
            training = Training(worker, actor, STEPS, 1, lambda _: None, lambda *_: None, lambda step: None)
            running = asyncio.create_task(training.run())
            await began.wait()
            running.cancel()
            for _ in range(5):  # let the cancellation reach the run
                await asyncio.sleep(0)
            assert not running.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert ended == [0]

        asyncio.run(asyncio.wait_for(test(), 60))


def test_demonstrations_can_be_loaded_from_a_native_or_rlinf_checkpoint(tmp_path: Path) -> None:
    for layout in ("native", "pt"):
        with parts(config()) as (worker, _), TrajectoryReplayBuffer(seed=0, trajectory_format=layout) as earlier:
            demonstrations.record(earlier, worker, still, 20)
            earlier.save_checkpoint(tmp_path / layout)
        with parts(config(), shown=0) as (worker, actor):
            assert actor.demonstrations is not None
            demonstrations.load(actor.demonstrations, tmp_path / layout)
            assert actor.demonstrations.total_samples == 40
            assert [actor.learn(rollout)["updates/done"] for rollout in collected(worker, 3)] == [0, 0, 5]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_run_resumed_from_a_checkpoint_gives_the_same_weights_bit_for_bit(lag: int, tmp_path: Path) -> None:
    settings = config(lag=lag)
    with parts(settings, shown=20) as (worker, actor):
        begun = worker.environments.progress()  # the demonstrations leave episodes that are not over
        rollouts = train(worker, actor, lag, 4)
        actor.save(tmp_path)
        rollouts += train(worker, actor, lag)
        wanted = learned(actor)
        # those of the episodes that ended, and two for each chunk of the others
        open_chunks = [sum(len(own.actions) for own in progress) for progress in (begun, rollouts[-1].progress)]
        environment_steps = sum(sum(rollout.lengths) for rollout in rollouts) + 2 * (open_chunks[1] - open_chunks[0])
        assert actor.environment_steps == environment_steps
    with parts(settings, shown=0) as (worker, actor):
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
        assert actor.environment_steps == environment_steps


def learned(actor: ActorWorker) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in actor.sac.actor.parameters()]


def collected(worker: RolloutWorker, count: int) -> Iterator[Rollout]:
    for number in range(count):
        yield worker.collect(number)


def test_demonstrations_fill_the_configured_share_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with parts(config(), shown=20) as (worker, actor):
        seen, update = list[Any](), actor.sac.update

        def watch(transitions: Any, generator: torch.Generator) -> Any:
            seen.append(transitions)
            return update(transitions, generator)

        monkeypatch.setattr(actor.sac, "update", watch)
        for rollout in collected(worker, 3):
            actor.learn(rollout)
        assert actor.demonstrations is not None
        shown = set()
        for number in range(len(actor.demonstrations)):
            actions = actor.demonstrations.trajectory(number).actions
            assert actions is not None
            shown |= {tuple(row) for row in actions.reshape(-1, 4).tolist()}
        assert len(seen) == 5
        for transitions in seen:
            assert sum(tuple(row) in shown for row in transitions.actions.tolist()) == 8  # half of 16


def test_an_expert_of_the_wrong_shape_is_named() -> None:
    with parts(config(), shown=0) as (worker, actor):
        assert actor.demonstrations is not None
        with pytest.raises(UserError, match=r"expert gave actions \[2, 3\], not \[2, 4\]"):
            demonstrations.record(actor.demonstrations, worker, lambda obs: obs, 20)


@pytest.mark.parametrize(("window", "batch", "shown", "updates"), [(1, 16, None, 5), (1, 40, 20, 5), (2, 40, None, 5)])
def test_updates_begin_once_the_sample_window_fills_its_part_of_a_batch(
    window: int, batch: int, shown: int | None, updates: int
) -> None:
    """Rows outside the window do not count, however many the buffer has."""
    settings = config(warmup=0)
    settings = settings.model_copy(update={"learner": settings.learner.model_copy(update={"batch": batch})})
    with parts(settings, shown=shown, window=window) as (worker, actor):
        actor.check()
        done = [actor.learn(rollout)["updates/done"] for rollout in collected(worker, 3)]
        assert done == [0 if window == 2 else updates, updates, updates]
        assert actor.buffer.window_samples == window * 20
        assert actor.buffer.total_samples == 60


@pytest.mark.parametrize("newest", [0, 1])
def test_too_few_demonstrations_for_a_batch_are_an_error_before_learning_begins(newest: int) -> None:
    settings = config()
    chosen = settings.demonstrations.model_copy(update={"newest": newest})
    learner = settings.learner.model_copy(update={"batch": 42 if newest else 82})
    settings = settings.model_copy(update={"learner": learner, "demonstrations": chosen})
    with parts(settings, shown=20, newest=newest) as (_, actor):
        there, taken = (20, 21) if newest else (40, 41)
        with pytest.raises(UserError, match=f"hold {there} chunk steps, and a batch takes {taken}: show more"):
            actor.check()


def test_demonstrations_of_other_dtypes_are_converted() -> None:
    with parts(config(warmup=0), shown=20) as (worker, actor):
        assert actor.demonstrations is not None
        given = [vars(actor.demonstrations.trajectory(number)) for number in range(len(actor.demonstrations))]
        actor.demonstrations.clear()
        for own in given:
            observed = {name: {"states": own[name]["states"].double()} for name in ("curr_obs", "next_obs")}
            flags = {name: own[name].to(torch.uint8) for name in ("dones", "terminations", "truncations")}
            actor.demonstrations.add_trajectories([{**own, **observed, **flags, "actions": own["actions"].double()}])
        actor.check()
        assert [actor.learn(rollout)["updates/done"] for rollout in collected(worker, 2)] == [5, 5]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rewards": None}, "cannot be used: rewards: not every trajectory"),
        ({"actions": torch.zeros(20, 1, 3)}, r"actions have the shape \[3\] in each chunk step, not \[4\]"),
        ({"rewards": torch.zeros(20, 1, 1)}, r"rewards have the shape \[1\] in each chunk step, not \[2\]"),
        ({"curr_obs": {"states": torch.zeros(20, 1, 9)}}, r"curr_obs.states have the shape \[9\]"),
    ],
)
def test_demonstrations_that_do_not_fit_are_an_error_before_learning_begins(change: dict[str, Any], said: str) -> None:
    flags = {name: torch.zeros(20, 1, 2, dtype=torch.bool) for name in ("terminations", "truncations")}
    observed = {name: {"states": torch.zeros(20, 1, 3)} for name in ("curr_obs", "next_obs")}
    right = {"actions": torch.zeros(20, 1, 4), "rewards": torch.zeros(20, 1, 2), **flags, **observed}
    with parts(config(), shown=0) as (_, actor):
        assert actor.demonstrations is not None
        actor.demonstrations.add_trajectories([right])
        state = actor.demonstrations.generator.get_state()
        actor.check()
        assert actor.demonstrations.generator.get_state().equal(state)
        actor.demonstrations.add_trajectories([{**right, **change}])
        actor.demonstrations.window = 1
        with pytest.raises(UserError, match=said):
            actor.check()
