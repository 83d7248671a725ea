"""Tests of the pairs of a failure and a success that extra updates train on: which are chosen, their gradient against a
float64 reference, and the counts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.config.settings import Config, LearnerSettings, LossSettings, ReplaySettings
from gleanrl.config.validate import check
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool.pool import Stored, StoredFailure
from gleanrl.experience.replay.pairs import Pair, after, build_pairs, choose_pairs, shared_turns
from gleanrl.experience.replay.recall import Recall
from gleanrl.learners.engine import TokenScores
from gleanrl.learners.torch import TorchLearner
from gleanrl.types import Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils.errors import UserError
from tests.builders import applied_gradients, tiny_model
from tests.experience.pool_world import group, task
from tests.experience.test_replay_updates import Recorder, updated

KEEP = ReplaySettings(keep_failures=4, pool_pairs=8)


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


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ExperiencePool]:
    with ExperiencePool(tmp_path / "pool.sqlite", KEEP) as made:
        yield made


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
    one: list[list[int]], other: list[list[int]], shared: int | None
) -> None:
    for left, right in ((one, other), (other, one)):
        assert shared_turns(played("t", 1, left), played("t", 0, right, cut=1)) == shared


def test_only_the_turns_from_the_first_difference_on_are_trained() -> None:
    trajectory = played("t", 1, [[5, 6], [7], [8]], cut=2)
    kept = after(trajectory, 2)
    assert [turn.tokens.tolist() for turn in kept.turns()] == [turn.tokens.tolist() for turn in trajectory.turns()]
    assert [turn.tokens.tolist() for turn in kept.sampled_turns()] == [[8]]
    assert after(trajectory, 0) == trajectory


def test_turns_are_compared_in_the_order_of_time() -> None:
    """An agent's second conversation, the last segment, may lie between the turns of its first one."""
    order = {"turn_order": [0, 2, 1]}
    success = replace(played("t", 1, [[5], [6], [7]], cut=2), info=order)
    failure = replace(played("t", 0, [[5], [8], [7]], cut=2), info=order)
    assert shared_turns(success, failure) == 2
    assert [turn.tokens.tolist() for turn in after(success, 2).sampled_turns()] == [[6]]
    assert [turn.tokens.tolist() for turn in after(failure, 2).sampled_turns()] == [[8]]
    assert shared_turns(success, replace(failure, info={})) == 1


def choose(pool: ExperiencePool, settings: ReplaySettings = KEEP, step: int = 0) -> list[Pair]:
    return choose_pairs(pool, Recall(pool, settings, group=4), settings, np.random.default_rng(0), step=step)[0]


def test_a_failure_is_paired_with_the_success_that_shares_most_turns(pool: ExperiencePool) -> None:
    near = played("t", 1, [[5], [6], [9]])
    members = [
        near,
        played("t", 1, [[5], [4]]),
        played("t", 1, [[5], [6], [7], [8], [9]]),  # begins with the failure
        played("t", 0, [[5], [6], [7]]),
    ]
    pool.observe([group("t", members)], 0)
    [pair] = choose(pool)
    assert (pair.success.trajectory.id, pair.shared, pair.rate) == (near.id, 2, 0.75)
    assert pair.failure.trajectory.score.value == 0


def test_of_equally_near_successes_the_newest_is_taken_and_limits_hold(pool: ExperiencePool) -> None:
    def members(number: int, version: int) -> list[Trajectory]:
        return [played("t", 1, [[5], [number]], version=version), played("t", 0, [[5], [8]], version=version)]

    pool.observe([group("t", members(6, 0))], 0)
    pool.observe([group("t", members(7, 3))], 3)
    [pair] = choose(pool, step=4)
    assert next(reversed(list(pair.success.trajectory.sampled_turns()))).tokens.tolist() == [7]
    young = KEEP.model_copy(update={"max_age": 1})
    assert [pair.success.version for pair in choose(pool, young, step=4)] == [3]
    assert choose(pool, young, step=5) == []
    assert choose(pool, KEEP.model_copy(update={"source_limits": {"own": 0.5}})) == []


def test_failures_outside_the_percentiles_and_tasks_without_failures_give_no_pair(pool: ExperiencePool) -> None:
    for number in range(11):
        name, logprob = f"t{number}", -0.1 * (number + 1)
        pool.observe([group(name, [played(name, 1, [[5]]), played(name, 0, [[6]], logprob=logprob)])], 0)
    assert pool.failure_entropies(0.2, 0.8) == pytest.approx((0.3, 0.9))
    pairs = choose(pool)
    assert sorted(round(10 * pair.failure.entropy) for pair in pairs) == list(range(3, 10))
    assert len({pair.task.id for pair in pairs}) == len(pairs) == 7
    pool.evict([pair.failure.key for pair in pairs], "asked")
    assert {round(10 * pair.failure.entropy) for pair in choose(pool)} == {1, 2, 10, 11}
    pool.evict([-key for key in range(1, 20)], "asked")
    assert choose(pool) == []
    assert math.isnan(pool.failure_entropies(0.2, 0.8)[0])


# --- the loss --------------------------------------------------------------------------------------
def make_pairs() -> list[Pair]:
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

    pairs = []
    for name, rate, won, lost, low in (
        ("a", 0.25, [[5, 6], [7, 9], [3]], [[5, 6], [8]], -9.0),  # recorded far below the current: w = 1, u > 2
        ("b", 0.75, [[11], [12, 13]], [[21, 22], [23], [24]], -0.3),  # recorded above the current: w < 1
    ):
        success, failure = noisy(played(name, 1, won, cut=1), low, low + 0.2), noisy(played(name, 0, lost), low, low)
        noted = (0.5, 0, 1.0, 0, 0, "own")
        shared = shared_turns(success, failure)
        assert shared is not None
        pairs.append(Pair(Task(name), Stored(1, success, *noted), StoredFailure(-1, failure, *noted), shared, rate))
    return pairs


def reference_loss(model: Any, pairs: Sequence[Pair]) -> torch.Tensor:
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


def test_the_gradient_of_a_batch_of_pairs_equals_a_float64_reference() -> None:
    loss, pairs = LossSettings(aggregation="token-mean"), make_pairs()
    learner = TorchLearner(
        tiny_model(0, torch.float64),
        LearnerSettings(tokens_per_microbatch=16),
        loss,
        total_steps=3,
        groups_per_step=1,
        pad_token=0,
        temperature=1.0,
    )
    applied = applied_gradients(learner)
    built = asyncio.run(build_pairs(learner.logprobs, pairs, loss, 64))
    asyncio.run(learner.replay_update(built.batch, 0))
    naive = tiny_model(0, torch.float64)
    reference_loss(naive, pairs).backward()
    assert built.weights[0] == 1.0
    assert 0 < built.weights[1] < 0.5
    [gradients] = applied
    for (name, parameter), ours in zip(naive.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def test_max_ratio_leaves_out_pairs_whose_success_has_left_the_band() -> None:
    async def score(samples: Sequence[Any]) -> list[TokenScores]:
        return [TokenScores(s.behaviour + np.float32(s.group), s.behaviour) for s in samples]

    pairs, loss = make_pairs(), LossSettings()
    built = asyncio.run(build_pairs(score, pairs, loss, 64, max_ratio=2.0))
    assert ([pair.task.id for pair in built.pairs], built.rejected) == (["a"], 1)
    assert built.batch.groups == 2
    empty = asyncio.run(build_pairs(score, [], loss, 64))
    assert (empty.batch.groups, empty.pairs) == (0, [])


# --- extra updates ---------------------------------------------------------------------------------
class Scoring(Recorder):
    async def logprobs(self, samples: Sequence[Any]) -> list[TokenScores]:
        return [TokenScores(s.behaviour - np.float32(s.mask), s.behaviour) for s in samples]


def test_extra_updates_train_on_pairs_and_count_their_uses(pool: ExperiencePool) -> None:
    for name in ("a", "b"):
        pool.observe([group(name, [played(name, 1, [[5], [6]]), played(name, 0, [[5], [7]])])], 0)
    learner = Scoring(step=4)
    metrics = updated(pool, learner, pool_pairs=8, keep_failures=4, pool_updates=2)
    assert [metrics[f"replay_update/{number}/pairs"] for number in (0, 1)] == [2, 2]
    assert metrics["replay_update/0/trajectories"] == 4
    assert metrics["replay_update/0/shared_turns"] == 1
    assert metrics["replay_update/0/failure_weight"] == pytest.approx(math.exp(-1))
    assert metrics["replay_update/0/age_max"] == 3
    for found in (pool.stored(["a", "b"]), pool.failures(["a", "b"])):
        assert [stored.uses for own in found.values() for stored in own] == [2, 2]
    for batch, _ in learner.updates:
        for part, weight in zip(batch.parts, [0.5, -0.5 * math.exp(-1)] * 2, strict=True):
            [sample] = part.samples
            assert sample.mask.tolist() == [False] * 5 + [True]
            assert sample.advantages[sample.mask] == pytest.approx(weight)
    assert updated(pool, Scoring(), pool_pairs=1, keep_failures=4)["replay_update/0/pairs"] == 1


def test_without_any_pair_no_update_is_made(pool: ExperiencePool) -> None:
    pool.add(task("a"), played("a", 1, [[5]]))
    learner = Scoring()
    metrics = updated(pool, learner, pool_pairs=2, keep_failures=4)
    assert (metrics["replay_update/0/pairs"], metrics["replay_update/0/trajectories"], learner.updates) == (0, 0, [])


@pytest.mark.parametrize(
    ("won", "lost", "settings", "cause"),
    [
        ([[5]], [[6]], {"source_limits": {"own": 0.5}}, "replay.source_limits"),
        ([[5]], None, {}, "no stored failure"),
        ([[5], [6]], [[5]], {}, "depart"),
        ([[5]], [[6]], {"max_ratio": 1.5}, "replay.max_ratio"),  # `Scoring` gives a ratio of 1 / e
    ],
)
def test_updates_without_a_pair_log_their_cause_once(
    pool: ExperiencePool, caplog: pytest.LogCaptureFixture, won: Any, lost: Any, settings: dict[str, Any], cause: str
) -> None:
    updated(pool, Scoring(), pool_pairs=2, keep_failures=4, **settings)
    assert "pool_pairs" not in caplog.text  # the pool is empty, which is reported elsewhere
    pool.observe([group("t", [played("t", 1, won), *([] if lost is None else [played("t", 0, lost)])])], 0)
    if lost is None:
        pool.add(task("t"), played("t", 1, won))
    metrics = updated(pool, Scoring(), pool_pairs=2, keep_failures=4, pool_updates=2, **settings)
    assert [metrics[f"replay_update/{number}/pairs"] for number in (0, 1)] == [0, 0]
    [line] = [record.getMessage() for record in caplog.records if "replay.pool_pairs" in record.getMessage()]
    assert cause in line


@pytest.mark.parametrize(
    "wrong",
    [
        {"replay": {"keep_failures": 0}},
        {"replay": {"pool_updates": 0}},
        {"replay": {"pool_from": "batch"}},
        {"replay": {"reverify": True}},
        {"loss": {"replay_mode": "shape"}},
    ],
)
def test_settings_that_pairs_cannot_work_with_are_refused_in_one_line(wrong: dict[str, Any]) -> None:
    replay = {"enabled": True, "keep_failures": 2, "pool_pairs": 4, **wrong.get("replay", {})}
    config = Config.model_validate({"replay": replay, "loss": wrong.get("loss", {})})
    with pytest.raises(UserError, match="pool_pairs = 4 needs") as refused:
        check(config)
    assert "\n" not in str(refused.value)
