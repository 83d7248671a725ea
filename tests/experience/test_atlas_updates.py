"""Tests of the extra updates in `benchmarks/boundary_pairs.py` and `benchmarks/observation_updates.py`: what they train
on, and their gradients against float64 references."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.algorithms.batch import Batch, build
from gleanrl.algorithms.loss import Tokens, policy_loss
from gleanrl.config.settings import (
    Config,
    CreditSettings,
    LearnerSettings,
    LossSettings,
    ReplaySettings,
    ScheduleSettings,
)
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool.pool import Stored, StoredFailure
from gleanrl.experience.replay.curriculum import ReplayCurriculum
from gleanrl.experience.replay.recall import Recall
from gleanrl.experience.replay.updates import ReplayUpdateLearner
from gleanrl.learners.engine import TokenScores
from gleanrl.learners.torch import TorchLearner
from gleanrl.types import Group, Score, StopReason, Task, Trajectory, Turn
from tests.builders import applied_gradients, tiny_model
from tests.experience.pool_world import group, solved
from tests.experience.replay_world import Stream
from tests.experience.test_replay_updates import Recorder
from tests.learners.test_observations import make_groups, observation_loss

KEEP = ReplaySettings(enabled=True, keep_failures=4, probe_fraction=0.0)


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def pairs() -> Any:
    return import_module("boundary_pairs")


@pytest.fixture
def observations() -> Any:
    return import_module("observation_updates")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ExperiencePool]:
    with ExperiencePool(tmp_path / "pool.sqlite", KEEP) as made:
        yield made


class Scoring(Recorder):
    """A learner under whose weights each trained token has a log-prob that is 1 below the recorded one."""

    consumed = 0

    async def update(self, batch: Batch) -> dict[str, float]:
        self.consumed += batch.groups
        self.step += self.consumed % 2 == 0  # a step has two groups
        return await super().update(batch)

    async def replay_update(self, batch: Batch, step: int) -> dict[str, float]:
        return await super().replay_update(batch, step) | {"loss/observation": 0.25}

    async def logprobs(self, samples: Sequence[Any]) -> list[TokenScores]:
        return [TokenScores(s.behaviour - np.float32(s.mask), s.behaviour) for s in samples]


def updated(
    design: Any,
    pool: ExperiencePool,
    learner: Recorder,
    stored: Sequence[Group],
    *,
    begun: bool = True,
    **replay: Any,
) -> dict[str, float]:
    """Let a design observe the groups ``stored``, train a step with its extra updates, and return its metrics.

    The step has two groups, with an answered success and an answered failure each. They are learned from one after the
    other.
    """
    settings = KEEP.model_copy(update=replay)
    inner = ReplayCurriculum(Stream(["now"], 4), pool, settings, total_batches=9, group=4, seed=0)
    config = Config(replay=settings, schedule=ScheduleSettings(batch=2, group=4))
    wrapped: Any = learner
    replaying = ReplayUpdateLearner(wrapped, pool, config, seed=1, max_context=64, begun=lambda: begun)
    player = SimpleNamespace(renderer=SimpleNamespace(bodies=False))
    made = design(SimpleNamespace(plan=SimpleNamespace(curriculum=inner), learner=replaying, player=player), seed=0)
    made.observe(stored, {})
    metrics: dict[str, float] = {}
    for name in ("now", "then"):
        assert not learner.updates  # before the step is complete
        consumed = [group(name, [answered(played(name, score, [[5]])) for score in (1, 0)])]
        replaying.remember(consumed)
        metrics |= asyncio.run(replaying.update(build(consumed, CreditSettings(), LossSettings(), 64)))
    assert player.renderer.bodies == ("Observations" in design.__name__)
    return metrics | made.observe([], {})


def played(
    name: str,
    score: float,
    actions: Sequence[Sequence[int]],
    *,
    logprob: float = -0.5,
    version: int = 0,
    cut: int | None = None,
) -> Trajectory:
    """Return a trajectory with these actions, two context tokens before each; ``cut`` begins a second segment."""
    turns: list[Turn] = []
    for number, action in enumerate(actions):
        turns.append(Turn({"role": "user", "content": "?"}, np.array([1, 2 + number])))
        turns.append(
            Turn({"role": "assistant", "content": "!"}, np.array(action), np.full(len(action), logprob), version)
        )
    segments = (tuple(turns),) if cut is None else (tuple(turns[: 2 * cut]), tuple(turns[2 * cut :]))
    return Trajectory(f"{name}/{actions}", name, segments, Score(score), StopReason.DONE)


def answered(trajectory: Trajectory) -> Trajectory:
    """Return a copy that ends with an observation of two tokens, which the model did not see."""
    return replace(trajectory, ending=(Turn({"role": "user", "content": "!"}, np.array([3, 4, 5]), body=(1, 3)),))


def learner_of(loss: LossSettings, tokens: int, dtype: torch.dtype = torch.float64) -> TorchLearner:
    """Return a learner of a tiny model, with micro-batches of ``tokens``."""
    return TorchLearner(
        tiny_model(0, dtype),
        LearnerSettings(tokens_per_microbatch=tokens),
        loss,
        total_steps=3,
        groups_per_step=1,
        pad_token=0,
        temperature=1.0,
    )


# --- pairs -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ([[5, 6], [7]], [[5, 6], [8]], 1),
        ([[5, 6], [7]], [[5], [6, 7]], 0),  # the same tokens in other turns
        ([[5], [6], [7]], [[5], [6], [8], [9]], 2),
        ([[5], [6]], [[5], [6], [7]], None),  # one is the beginning of the other
        ([[5], [6]], [[5], [6]], None),
        ([[]], [[5]], 0),
    ],
)
def test_the_first_difference_is_the_first_turn_with_other_tokens(
    pairs: Any, one: list[list[int]], other: list[list[int]], shared: int | None
) -> None:
    for left, right in ((one, other), (other, one)):
        assert pairs.shared_turns(played("t", 1, left), played("t", 0, right, cut=1)) == shared


def test_only_the_turns_from_the_first_difference_on_are_trained(pairs: Any) -> None:
    trajectory = played("t", 1, [[5, 6], [7], [8]], cut=2)
    kept = pairs.after(trajectory, 2)
    assert [turn.tokens.tolist() for turn in kept.turns()] == [turn.tokens.tolist() for turn in trajectory.turns()]
    assert [turn.tokens.tolist() for turn in kept.sampled_turns()] == [[8]]
    assert pairs.after(trajectory, 0) == trajectory


def test_turns_are_compared_in_the_order_of_time(pairs: Any) -> None:
    """An agent's second conversation, the last segment, may lie between the turns of its first one."""
    order = {"turn_order": [0, 2, 1]}
    success = replace(played("t", 1, [[5], [6], [7]], cut=2), info=order)
    failure = replace(played("t", 0, [[5], [8], [7]], cut=2), info=order)
    assert pairs.shared_turns(success, failure) == 2
    assert [turn.tokens.tolist() for turn in pairs.after(success, 2).sampled_turns()] == [[6]]
    assert [turn.tokens.tolist() for turn in pairs.after(failure, 2).sampled_turns()] == [[8]]
    assert pairs.shared_turns(success, replace(failure, info={})) == 1


def choose(pairs: Any, pool: ExperiencePool, names: Sequence[str]) -> list[Any]:
    bounds = pairs.entropy_bounds(pool, names)
    return pairs.choose_pairs(pool, Recall(pool, KEEP, group=4), np.random.default_rng(0), bounds)


def test_a_failure_is_paired_with_the_success_that_shares_most_turns(pairs: Any, pool: ExperiencePool) -> None:
    near = played("t", 1, [[5], [6], [9]])
    members = [
        near,
        played("t", 1, [[5], [4]]),
        played("t", 1, [[5], [6], [7], [8], [9]]),  # begins with the failure
        played("t", 0, [[5], [6], [7]]),
    ]
    pool.observe([group("t", members)], 0)
    [pair] = choose(pairs, pool, ["t"])
    assert (pair.success.trajectory.id, pair.shared, pair.rate) == (near.id, 2, 0.75)
    assert pair.failure.trajectory.score.value == 0
    pool.observe([group("t", [played("t", 1, [[5], [6], [3]], version=1), played("t", 0, [[8]])])], 1)
    assert {pair.success.version for pair in choose(pairs, pool, ["t"])} == {1}  # of equally near ones, the newest


def test_failures_outside_the_percentiles_and_tasks_without_failures_give_no_pair(
    pairs: Any, pool: ExperiencePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "PAIRS", 8)
    names = [f"t{number}" for number in range(12)]
    for number, name in enumerate(names):
        logprob = -0.1 * (number + 1)
        pool.observe([group(name, [played(name, 1, [[5]]), played(name, 0, [[6]], logprob=logprob)])], 0)
    assert pairs.entropy_bounds(pool, names) == pytest.approx((0.3, 1.0))
    found = choose(pairs, pool, names)
    assert sorted(round(10 * pair.failure.entropy) for pair in found) == list(range(3, 11))
    assert len({pair.task.id for pair in found}) == len(found) == 8
    pool.evict([-key for key in range(1, 20)], "asked")
    assert choose(pairs, pool, names) == []


def make_pairs(module: Any) -> list[Any]:
    random = np.random.default_rng(3)

    def noisy(trajectory: Trajectory, low: float, high: float) -> Trajectory:
        segments = tuple(
            tuple(
                replace(turn, logprobs=random.uniform(low, high, turn.tokens.size)) if turn.sampled else turn
                for turn in segment
            )
            for segment in trajectory.segments
        )
        return replace(trajectory, segments=segments)

    made = []
    for name, rate, won, lost, low in (
        ("a", 0.25, [[5, 6], [7, 9], [3]], [[5, 6], [8]], -9.0),  # recorded far below the current: w = 1, u > 2
        ("b", 0.75, [[11], [12, 13]], [[21, 22], [23], [24]], -0.3),  # recorded above the current: w < 1
    ):
        success, failure = noisy(played(name, 1, won, cut=1), low, low + 0.2), noisy(played(name, 0, lost), low, low)
        noted = (0.5, 0, 1.0, 0, 0, "own")
        shared = module.shared_turns(success, failure)
        assert shared is not None
        made.append(
            module.Pair(Task(name), Stored(1, success, *noted), StoredFailure(-1, failure, *noted), shared, rate)
        )
    return made


def reference_loss(model: Any, pairs: Sequence[Any]) -> torch.Tensor:
    """Compute the loss of pairs from its definition, a segment at a time; the mean is over all trained tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for pair in pairs:
        for stored in (pair.success, pair.failure):
            now, recorded, number = [], [], 0
            for segment in stored.trajectory.segments:
                ids = [token for turn in segment for token in turn.tokens.tolist()]
                logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
                place = 0
                for turn in segment:
                    if turn.logprobs is not None:
                        if number >= pair.shared:
                            now += [logits[place + i - 1, ids[place + i]] for i in range(turn.tokens.size)]
                            recorded += turn.logprobs.tolist()
                        number += 1
                    place += turn.tokens.size
            log_ratio = torch.stack(now) - torch.tensor(recorded, dtype=torch.float64)
            if isinstance(stored, Stored):
                total = total - (1 - pair.rate) * log_ratio.exp().clamp(max=2.0).sum()
            else:
                weight = log_ratio.mean().exp().clamp(max=1.0).detach()
                total = total + pair.rate * weight * torch.stack(now).sum()
            count += len(now)
    return total / count


def test_the_gradient_of_a_batch_of_pairs_equals_a_float64_reference(pairs: Any) -> None:
    loss, made = LossSettings(aggregation="token-mean"), make_pairs(pairs)
    learner = learner_of(loss, 16)
    applied = applied_gradients(learner)
    built = asyncio.run(pairs.build_pairs(learner.logprobs, made, loss, 64))
    asyncio.run(learner.replay_update(built.batch, 0))
    naive = tiny_model(0, torch.float64)
    reference_loss(naive, made).backward()
    assert built.weights[0] == 1.0
    assert 0 < built.weights[1] < 0.5
    [gradients] = applied
    for (name, parameter), ours in zip(naive.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def test_extra_updates_train_on_pairs_and_count_their_uses(pairs: Any, pool: ExperiencePool) -> None:
    stored = [group(name, [played(name, 1, [[5], [6]]), played(name, 0, [[5], [7]])]) for name in ("a", "b")]
    learner = Scoring(step=4)
    metrics = updated(pairs.BoundaryPairs, pool, learner, stored, pool_updates=2)
    assert (metrics["replay_update/pairs"], metrics["replay_update/pairs/shared_turns"]) == (2, 1)
    assert metrics["replay_update/pairs/failure_weight"] == pytest.approx(np.exp(-1))
    assert [metrics[f"replay_update/{number}/trajectories"] for number in (0, 1)] == [4, 4]
    assert metrics["replay_update/0/age_mean"] == 4
    for found in (pool.stored(["a", "b"]), pool.failures(["a", "b"])):
        assert [stored.uses for own in found.values() for stored in own] == [2, 2]
    for batch, _ in learner.updates:
        for part, weight in zip(batch.parts, [0.5, -0.5 * np.exp(-1)] * 2, strict=True):
            [sample] = part.samples
            assert sample.mask.tolist() == [False] * 5 + [True]
            assert sample.advantages[sample.mask] == pytest.approx(weight)


def test_without_any_pair_no_update_is_made(pairs: Any, pool: ExperiencePool) -> None:
    learner = Scoring()
    metrics = updated(pairs.BoundaryPairs, pool, learner, [solved("a", 2, 2)])
    assert (metrics["replay_update/pairs"], metrics["replay_update/0/trajectories"], learner.updates) == (0, 0, [])


# --- observations ----------------------------------------------------------------------------------
@pytest.mark.parametrize("loss", [LossSettings(), LossSettings(observation_coefficient=0.7)])
def test_the_gradient_is_that_of_the_observation_loss_alone_with_its_own_coefficient(
    observations: Any, loss: LossSettings
) -> None:
    groups = [replace(g, spec=replace(g.spec, replayed=(), fresh=len(g.trajectories))) for g in make_groups(3)]
    members = [member for each in groups for member in each.valid_fresh]
    learner = learner_of(loss, 60)
    applied = applied_gradients(learner)
    metrics = asyncio.run(learner.replay_update(observations.observation_batch(members, 128, 0.3), 0))
    naive = tiny_model(0, torch.float64)
    expected = observation_loss(naive, groups)
    (0.3 * expected).backward()
    assert metrics["loss/observation"] == pytest.approx(float(expected.detach()), rel=1e-9)
    assert metrics["tokens/trained"] == 0
    [gradients] = applied
    for (name, parameter), ours in zip(naive.named_parameters(), gradients, strict=True):
        theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_successes_and_failures_with_observations_are_drawn_alike(observations: Any, pool: ExperiencePool) -> None:
    names = [f"t{number}" for number in range(3)]
    for name in names:
        members = [answered(played(name, 1, [[5]])), answered(played(name, 0, [[6]])), played(name, 0, [[7]])]
        pool.observe([group(name, members)], 0)
    random, seen = np.random.default_rng(0), Counter[tuple[str, float]]()
    for _ in range(200):
        drawn = observations.choose_from_pool(pool, [*names, "unknown"], random)
        assert sorted(trajectory.task_id for trajectory in drawn) == names
        seen.update((trajectory.task_id, trajectory.score.value) for trajectory in drawn)
    assert len(seen) == 6
    assert max(seen.values()) < 1.5 * min(seen.values())


def test_a_policy_loss_is_not_called_for_an_update_without_trained_tokens(observations: Any) -> None:
    """A maximum over no tokens, for example, is an error."""

    def relative(tokens: Tokens, settings: LossSettings) -> torch.Tensor:
        return tokens.advantages / tokens.advantages.abs().max()

    @policy_loss("relative, of a test", scope="update", precompute=relative)
    def scaled(tokens: Tokens, settings: LossSettings) -> torch.Tensor:
        return -relative(tokens, settings) * tokens.ratio

    members = [member for each in make_groups(3) for member in each.valid_fresh]
    learner = learner_of(LossSettings(name="relative, of a test"), 60, torch.float32)
    metrics = asyncio.run(learner.replay_update(observations.observation_batch(members, 128, 0.3), 0))
    assert metrics["updates/done"] == 1


@pytest.mark.parametrize(("design", "count"), [("ObservationsFromMemory", 1), ("ObservationsOfStep", 4)])
def test_one_more_update_trains_on_observations_alone(
    observations: Any, pool: ExperiencePool, design: str, count: int
) -> None:
    stored = [group("t", [answered(played("t", 1, [[5], [6]])), played("t", 0, [[7]])])]
    learner = Scoring(step=3)
    metrics = updated(getattr(observations, design), pool, learner, stored, pool_updates=0)
    assert (metrics["replay_update/observations/trajectories"], metrics["replay_update/observations/loss"]) == (
        count,
        0.25,
    )
    [(batch, step)] = learner.updates
    assert (batch.groups, batch.observation_coefficient, step) == (count, 0.1, 3)
    for sample in batch.samples:
        assert not sample.mask.any()
        assert sample.observed is not None
        assert sample.observed.nonzero()[0].tolist() == [sample.tokens.size - 2, sample.tokens.size - 1]
    assert [stored.uses for stored in pool.stored(["t"])["t"]] == [0]
    idle = Scoring(step=3)
    updated(getattr(observations, design), pool, idle, stored, begun=False)
    assert not idle.updates


def test_replay_still_trains_on_the_steps_own_successes(observations: Any, pool: ExperiencePool) -> None:
    learner = Scoring(step=3)
    metrics = updated(observations.ObservationsOfStep, pool, learner, [], pool_from="batch")
    assert (metrics["replay_update/0/trajectories"], metrics["replay_update/observations/trajectories"]) == (2, 4)
