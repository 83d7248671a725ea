"""Advantages against a naive float64 loop over the definitions, edge cases included."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.credit import ESTIMATORS, estimate, is_group_local
from gleanrl.errors import UserError

NAMES = ("grpo", "dr_grpo", "rloo")


def naive(name: str, scores: list[float], group: list[int], valid: list[bool], baseline: list[bool]) -> list[float]:
    """One trajectory at a time, straight from the definitions."""
    advantages: list[float] = []
    for i, score in enumerate(scores):
        if not valid[i]:
            advantages.append(0.0)
            continue
        peers = [scores[j] for j in range(len(scores)) if group[j] == group[i] and valid[j] and baseline[j]]
        n = len(peers)
        mean = sum(peers) / n if n > 1 else 0.0
        if name == "grpo":
            deviation = statistics.stdev(peers) if n > 1 else 1.0
            advantages.append((score - mean) / ((deviation or 1.0) + 1e-6))
        elif name == "dr_grpo":
            advantages.append(score - mean)
        else:
            others = [
                scores[j] for j in range(len(scores)) if j != i and group[j] == group[i] and valid[j] and baseline[j]
            ]
            advantages.append(score - sum(others) / len(others) if others else score)
    return advantages


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.lists(st.integers(1, 16), min_size=1, max_size=5))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    ids = random.choice(10_000, len(sizes), replace=False) - 5000
    group = np.repeat(ids, sizes)
    count, length = group.size, int(random.integers(1, 9))
    kind = draw(st.sampled_from(["binary", "real", "equal", "thirds"]))
    scores = {
        "binary": random.integers(0, 2, count).astype(float),
        "real": random.normal(0, 3, count),
        "equal": np.full(count, 0.1),
        "thirds": random.integers(0, 4, count) / 3,
    }[kind]
    order = random.permutation(count)
    return {
        "scores": scores.astype(np.float32)[order],
        "group": group[order],
        "valid": random.random(count) < draw(st.sampled_from([1.0, 0.7])),
        "baseline": random.random(count) < draw(st.sampled_from([1.0, 0.7])),
        "mask": random.random((count, length)) < 0.6,  # with holes
        "at": random.integers(0, length, count),  # where the reward stands
    }


def run(name: str, batch: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = np.zeros(batch["mask"].shape, np.float32)
    rewards[np.arange(len(rewards)), batch["at"]] = np.where(batch["valid"], batch["scores"], np.nan)
    return estimate(
        name,
        torch.tensor(rewards),
        torch.tensor(batch["mask"]),
        torch.tensor(batch["group"]),
        valid=torch.tensor(batch["valid"]),
        baseline_members=torch.tensor(batch["baseline"]),
        **options,
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_estimators_equal_the_naive_definition(name: str, batch: dict[str, Any]) -> None:
    advantages, returns = run(name, batch)
    expected = naive(name, *(batch[key].tolist() for key in ("scores", "group", "valid", "baseline")))
    wanted = np.array(expected)[:, None] * batch["mask"]
    # Both round once in float64; a deviation is compared with what float32 scores can tell apart.
    np.testing.assert_allclose(advantages.numpy(), wanted, rtol=1e-6, atol=1e-6)
    assert advantages.dtype == returns.dtype == torch.float32
    assert torch.isfinite(advantages).all()
    torch.testing.assert_close(returns, advantages)


@settings(max_examples=40, deadline=None)
@given(batch=batches(), name=st.sampled_from(NAMES))
def test_a_group_alone_is_a_group_in_a_batch(batch: dict[str, Any], name: str) -> None:
    whole, _ = run(name, batch)
    for group in np.unique(batch["group"]):
        rows = batch["group"] == group
        alone, _ = run(name, {key: value[rows] for key, value in batch.items()})
        assert torch.equal(alone, whole[torch.tensor(rows)])
    assert is_group_local(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e-3, 7.7])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_are_exactly_no_signal(name: str, score: float, size: int) -> None:
    rewards = torch.full((size, 1), score, dtype=torch.float64)  # 0.1 + 0.1 + 0.1 is not 0.3
    advantages, _ = estimate(name, rewards, torch.ones(size, 1), torch.zeros(size, dtype=torch.long))
    assert not advantages.any()


@pytest.mark.parametrize(("name", "expected"), [("grpo", 3.0 / (1 + 1e-6)), ("dr_grpo", 3.0), ("rloo", 3.0)])
def test_a_lone_member_keeps_its_score(name: str, expected: float) -> None:
    advantages, _ = estimate(name, torch.tensor([[3.0]]), torch.ones(1, 1), torch.tensor([5]))
    assert advantages.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_replayed_members_are_compared_with_fresh_ones_and_leave_them_alone(name: str) -> None:
    fresh, group = torch.tensor([[0.0], [0.0], [1.0], [0.0]]), torch.zeros(4, dtype=torch.long)
    alone, _ = estimate(name, fresh, torch.ones(4, 1), group)
    both, _ = estimate(
        name,
        torch.cat([fresh, torch.ones(1, 1)]),
        torch.ones(5, 1),
        torch.zeros(5, dtype=torch.long),
        baseline_members=torch.tensor([True] * 4 + [False]),
    )
    torch.testing.assert_close(both[:4], alone)
    deviation = 0.5 + 1e-6 if name == "grpo" else 1.0
    assert both[4].item() == pytest.approx(0.75 / deviation, rel=1e-6)


def test_a_stored_success_among_failures_has_advantage_one() -> None:
    rewards = torch.tensor([[0.0], [0.0], [1.0]])
    members = torch.tensor([True, True, False])
    advantages, _ = estimate(
        "grpo", rewards, torch.ones(3, 1), torch.zeros(3, dtype=torch.long), baseline_members=members
    )
    assert advantages[:, 0].tolist() == pytest.approx([0.0, 0.0, 1.0], abs=2e-6)


def test_drop_zeroes_flat_groups_only() -> None:
    rewards = torch.tensor([[2.0], [1.0], [0.0], [5.0]])
    group = torch.tensor([0, 1, 1, 2])
    kept, _ = estimate("dr_grpo", rewards, torch.ones(4, 1), group, zero_variance="drop")
    assert kept[:, 0].tolist() == [2.0, 0.5, -0.5, 5.0]  # a lone member is not a flat group


def test_an_unknown_name_names_the_nearest() -> None:
    arguments = (torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    with pytest.raises(UserError, match=r"credit.estimator: unknown value 'gpro'.*did you mean 'grpo'"):
        estimate("gpro", *arguments)
    with pytest.raises(UserError, match="grpo' has no option 'gama'"):
        estimate("grpo", *arguments, gama=1.0)
    assert set(NAMES) <= set(ESTIMATORS.names())


def test_a_batch_of_nothing() -> None:
    advantages, _ = estimate("grpo", torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    assert advantages.shape == (0, 3)
    assert math.isfinite(float(advantages.sum()))
