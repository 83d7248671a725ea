"""Tests of what surrounds the policy losses in `gleanrl.algorithms.loss`: aggregation, KL, the critic's loss and the
statistics, each against numpy in float64."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.algorithms.loss import (
    AGGREGATIONS,
    LossConfig,
    Tokens,
    aggregate,
    kl_penalty,
    normaliser,
    objective,
    padded_policy_loss,
    token_weights,
    value_loss,
)
from gleanrl.algorithms.loss_statistics import Statistics
from gleanrl.utils.errors import UserError
from tests.loss_world import make_world
from tests.strategies import examples

KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
DIFFERENCES = (-1e3, -30.0, -2.0, -0.1, -1e-4, 0.0, 1e-4, 0.1, 2.0, 30.0, 1e3)


# --- aggregation ----------------------------------------------------------------------------------
def naive_aggregate(values: np.ndarray, mask: np.ndarray, mode: str, scale: float | None = None) -> float:
    rows = [row[m] for row, m in zip(values, mask, strict=True) if m.any()]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return float(np.concatenate(rows).mean())
    if mode == "seq-mean-token-sum":
        return float(np.mean([row.sum() for row in rows]))
    if mode == "seq-mean-token-mean":
        return float(np.mean([row.mean() for row in rows]))
    return float(np.mean([row.sum() for row in rows])) / (scale or values.shape[1])


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Draw values [N, L], a mask of the same shape, and a random generator."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 10)))
    return random.normal(size=shape), random.random(shape) < draw(st.sampled_from([0.0, 0.5, 1.0])), random


@settings(max_examples=examples(60))
@given(table=tables(), mode=st.sampled_from(AGGREGATIONS), scale=st.sampled_from([None, 3.5]))
def test_aggregate_equals_the_naive_mean_and_ignores_masked_values(table: Any, mode: str, scale: float | None) -> None:
    values, mask, _ = table
    dirty = torch.tensor(np.where(mask, values, np.nan))
    result = aggregate(dirty, torch.tensor(mask), mode, scale=scale)
    assert float(result) == pytest.approx(naive_aggregate(values, mask, mode, scale), rel=1e-6, abs=1e-6)


@settings(max_examples=examples(60))
@given(table=tables(), mode=st.sampled_from(AGGREGATIONS), scale=st.sampled_from([None, 3.5]), cuts=st.integers(1, 5))
def test_weights_and_normaliser_aggregate_any_division_of_the_tokens(
    table: Any, mode: str, scale: float | None, cuts: int
) -> None:
    values, mask, random = table
    weights = token_weights(torch.tensor(mask), mode, scale=scale)
    assert not weights[~torch.tensor(mask)].any()
    part_of = random.integers(0, cuts, mask.shape)
    sums = [(weights.numpy() * values)[mask & (part_of == part)].sum() for part in range(cuts)]
    total = normaliser(mode, float(mask.sum()), float(mask.any(-1).sum()))
    assert sum(sums) / max(total, 1.0) == pytest.approx(naive_aggregate(values, mask, mode, scale), rel=1e-6, abs=1e-6)


# --- KL -------------------------------------------------------------------------------------------
def naive_kl(d: float, kind: str) -> tuple[float, float]:
    """The value and its derivative with respect to ``d``."""
    if kind in ("k1", "kl"):
        return d, 1.0
    if kind == "abs":
        return abs(d), float(np.sign(d))
    if kind in ("k2", "mse"):
        return d * d / 2, d
    inside, d = -20 <= d <= 20, min(max(d, -20.0), 20.0)
    value = math.expm1(-d) + d
    return (value, -math.expm1(-d) * inside) if value <= 10 else (10.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [*KINDS, *(f"{kind}+" for kind in KINDS)])
def test_kl_penalty_has_the_value_and_gradient_of_its_kind(kind: str, dtype: torch.dtype) -> None:
    """A kind with + has the value of the same kind without it, and the gradient of k2."""
    logp = torch.tensor(DIFFERENCES, dtype=dtype, requires_grad=True)
    result = kl_penalty(logp, torch.zeros_like(logp), kind)
    result.sum().backward()
    assert logp.grad is not None
    differences = logp.detach().double().tolist()
    values, slopes = zip(*(naive_kl(d, kind.rstrip("+")) for d in differences), strict=True)
    exact = dtype == torch.float64
    np.testing.assert_allclose(
        result.detach().numpy(), values, rtol=1e-12 if exact else 1e-6, atol=1e-15 if exact else 1e-11
    )
    expected = differences if kind.endswith("+") else slopes
    np.testing.assert_allclose(
        logp.grad.numpy(), expected, rtol=1e-12 if exact else 1e-6, atol=1e-15 if exact else 1e-7
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_kl_penalty_is_that_of_its_value(kind: str) -> None:
    logp = torch.tensor([-2.0, -0.7, 0.3, 2.0, 9.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, torch.zeros_like(x), kind), logp)


def test_expected_kl_penalties_equal_the_exact_kl_and_its_gradient() -> None:
    """In expectation over the policy, the values of k1 and k3 equal KL(policy || reference), and the gradients of k2
    and of every kind with + equal its gradient."""
    logits = torch.tensor([0.7, -0.4, 0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    logp = logits.log_softmax(-1)
    exact = (logp.exp() * (logp - reference)).sum()
    (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for kind in ("k1", "k3", "k1+", "k3+"):
        torch.testing.assert_close((logp.exp() * kl_penalty(logp, reference, kind)).sum(), exact)
    for kind in ("k2", "k1+", "abs+", "k3+", "low_var_kl+"):
        estimate = (logp.exp().detach() * kl_penalty(logp, reference, kind)).sum()
        (mine,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        torch.testing.assert_close(mine, slope)


def test_every_kl_of_the_settings_exists() -> None:
    for kind in get_args(LossConfig.model_fields["kl"].annotation):
        assert kl_penalty(torch.ones(1), torch.zeros(1), kind).shape == (1,)


def test_kl_and_entropy_terms_apply_to_fresh_tokens_only() -> None:
    logp = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([2.0, 2.0], dtype=torch.float64, requires_grad=True)
    ref_logp = torch.tensor([-3.0, -3.0], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    tokens = Tokens(logp, logp.detach(), zero, zero.long(), torch.tensor([False, True]))
    config = LossConfig(kl="k1", kl_coefficient=0.5, entropy_coefficient=0.1)
    result = objective(tokens, config, entropy=entropy, ref_logp=ref_logp)
    assert result.values.tolist() == pytest.approx([0.5 * 2.0 - 0.1 * 2.0, 0.0])
    result.values.sum().backward()
    assert logp.grad is not None
    assert entropy.grad is not None
    assert logp.grad.tolist() == [0.5, 0.0]
    assert entropy.grad.tolist() == [-0.1, 0.0]
    metrics = result.statistics.metrics()
    assert metrics["loss/reference_kl"] == metrics["loss/entropy"] == 2.0
    with pytest.raises(ValueError, match="reference"):
        objective(tokens, config, entropy=entropy)
    with pytest.raises(ValueError, match="entropy"):
        objective(tokens, config, ref_logp=ref_logp)


def test_the_kl_coefficient_can_be_overridden_and_is_unused_with_kl_in_reward() -> None:
    logp, zero = torch.full((2,), -1.0), torch.zeros(2)
    tokens = Tokens(logp, logp, zero, zero.long(), zero.bool())

    def values(coefficient: float | None, **changes: Any) -> list[float]:
        config = LossConfig(kl="k1", kl_coefficient=0.5, **changes)
        return objective(tokens, config, kl_coefficient=coefficient, ref_logp=logp - 2).values.tolist()

    assert values(None) == [1.0, 1.0]
    assert values(2.0) == [4.0, 4.0]
    assert values(None, kl_in="reward") == [0.0, 0.0]


# --- the critic -----------------------------------------------------------------------------------
@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32 - 1), clip=st.sampled_from([None, 0.2, 0.5, 10.0]))
def test_the_clipped_value_loss_and_its_gradient_equal_the_formula(seed: int, clip: float | None) -> None:
    random = np.random.default_rng(seed)
    new, old, returns = random.normal(size=(3, 20))
    variable = torch.tensor(new, requires_grad=True)
    losses = value_loss(variable, torch.tensor(old), torch.tensor(returns), clip)
    losses.sum().backward()
    assert variable.grad is not None
    for i in range(20):
        value, slope = (new[i] - returns[i]) ** 2 / 2, new[i] - returns[i]
        if clip is not None and abs(new[i] - old[i]) > clip:
            bound = old[i] + math.copysign(clip, new[i] - old[i])
            if (bound - returns[i]) ** 2 / 2 > value:
                value, slope = (bound - returns[i]) ** 2 / 2, 0.0
        assert losses[i].item() == pytest.approx(value, rel=1e-12)
        assert float(variable.grad[i]) == pytest.approx(slope, rel=1e-12)


# --- statistics -----------------------------------------------------------------------------------
def test_statistics_add_up_over_parts_and_separate_fresh_from_replayed_tokens() -> None:
    random = np.random.default_rng(0)
    world = make_world(random, tokens=500, sequences=20, spread=0.9)
    config, entropy = LossConfig(dual_clip=1.5), random.exponential(size=500)

    def statistics(part: np.ndarray) -> Statistics:
        return objective(world.take(part).tokens(), config, entropy=torch.tensor(entropy[part])).statistics

    part = random.random(500) < 0.5
    whole = statistics(np.arange(500)).metrics()
    halves = (statistics(np.flatnonzero(part)) + statistics(np.flatnonzero(~part)) + Statistics.empty()).metrics()
    assert halves == pytest.approx(whole, rel=1e-12)
    for prefix, chosen in (("loss/", ~world.replayed), ("loss/replayed/", world.replayed)):
        high = 1.28 if prefix == "loss/" else 2.0
        ratio, advantages = np.exp(world.logp - world.old)[chosen], world.advantages[chosen]
        values = objective(world.tokens(), config).values.numpy()[chosen]
        expected = {
            "policy_per_token": values.mean(),
            "ratio/mean": ratio.mean(),
            "ratio/min": ratio.min(),
            "ratio/max": ratio.max(),
            "ratio/above_10": (ratio > 10).mean(),
            "ess": ratio.sum() ** 2 / (ratio**2).sum() / ratio.size,
            "clip_high": ((ratio > high) & (advantages > 0)).mean(),
            "clip_low": ((ratio < 0.8) & (advantages < 0)).mean(),
            "clip_dual": ((ratio > 1.5) & (advantages < 0)).mean(),
            "approx_kl_k1": -np.log(ratio).mean(),
            "approx_kl_k3": (ratio - 1 - np.log(ratio)).mean(),
            "entropy": entropy[chosen].mean(),
        }
        if prefix == "loss/replayed/":
            expected["token_share"] = chosen.mean()
        assert {name: whole[prefix + name] for name in expected} == pytest.approx(expected, rel=1e-9)
        assert min(expected.values()) != 0 or expected["ratio/above_10"] == 0
    plain = objective(world.take(~world.replayed).tokens(), config).statistics.metrics()
    assert "loss/entropy" not in plain
    assert not [name for name in plain if "replayed" in name]


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 1e-6, 1e-3, 0.02, 0.3, 3.0, 30.0]),
    tokens=st.integers(1, 3000),
    parts=st.integers(1, 4),
)
def test_the_p99_of_the_ratio_equals_the_numpy_quantile_within_its_resolution(
    seed: int, spread: float, tokens: int, parts: int
) -> None:
    """This holds for any distribution of ratios and any division of the tokens into micro-batches."""
    random = np.random.default_rng(seed)
    log_ratio = spread * random.standard_t(3, tokens)
    replayed, part = random.random(tokens) < 0.3, random.integers(0, parts, tokens)

    def statistics(chosen: np.ndarray) -> Statistics:
        values = torch.tensor(log_ratio[chosen])
        count, zeros = values.numel(), torch.zeros_like(values)
        flags = torch.tensor(replayed[chosen])
        return objective(Tokens(values, zeros, zeros, torch.arange(count), flags), LossConfig()).statistics

    metrics = sum((statistics(part == i) for i in range(parts)), Statistics.empty()).metrics()
    for prefix, chosen in (("loss/", ~replayed), ("loss/replayed/", replayed)):
        assert (f"{prefix}ratio/p99" in metrics) == chosen.any()
        if chosen.any():
            exact = np.log(np.quantile(np.exp(log_ratio[chosen].clip(-20, 20)), 0.99, method="inverted_cdf"))
            found = metrics[f"{prefix}ratio/p99"]
            assert abs(np.log(found) - exact) <= 0.0053 * (abs(exact) + 0.001)
            assert metrics[f"{prefix}ratio/min"] <= found <= metrics[f"{prefix}ratio/max"]


def test_the_mismatch_to_behaviour_log_probs_is_measured() -> None:
    one = torch.zeros(1, 2)
    behaviour = torch.tensor([[0.5, -0.5]])
    metrics = padded_policy_loss(one, one, one, torch.ones(1, 2), config=LossConfig(), behaviour_logp=behaviour).metrics
    assert metrics["loss/mismatch"] == pytest.approx(0.5)
    assert metrics["loss/mismatch_k3"] == pytest.approx(math.cosh(0.5) - 1)


def test_replayed_may_be_given_per_sequence_or_per_token() -> None:
    random = np.random.default_rng(0)
    logp, old, advantages = (torch.tensor(x) for x in random.normal(size=(3, 3, 4)))
    rows = torch.tensor([True, False, True])
    losses = [
        float(padded_policy_loss(logp, old, advantages, torch.ones(3, 4), replayed, config=LossConfig()).loss)
        for replayed in (rows, rows[:, None], rows[:, None].expand(3, 4), rows.long())
    ]
    assert losses == [losses[0]] * 4
    assert losses[0] != float(padded_policy_loss(logp, old, advantages, torch.ones(3, 4), config=LossConfig()).loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "loss",
    [
        {"name": "gspo", "clip_high": 9.0},
        {"correction": "truncate", "correction_level": "geometric"},
        {"correction": "mask", "aggregation": "seq-mean-token-mean"},
    ],
)
def test_log_probs_of_low_precision_are_summed_in_float32(dtype: torch.dtype, loss: dict[str, Any]) -> None:
    """Sequences of 1000 tokens, more than bfloat16 can count to; half of the log-probs differ by 0.5."""
    old, behaviour = torch.full((2, 1000), -1.0), torch.full((2, 1000), -1.5)
    logp, behaviour[0, :301] = old.clone(), -4.0
    logp[:, 500:] += 0.5
    found = []
    for kind in (dtype, torch.float64):
        own = logp.to(kind).requires_grad_()
        rest = old.to(kind), torch.ones(2, 1000, dtype=kind), torch.ones(2, 1000)
        output = padded_policy_loss(own, *rest, config=LossConfig(**loss), behaviour_logp=behaviour.to(kind))
        output.loss.backward()
        assert own.grad is not None
        assert own.grad.dtype == kind
        found.append((output.loss.item(), own.grad.double().sum().item()))
    assert found[0] == pytest.approx(found[1], rel=5e-3)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)


def test_unknown_names_raise_a_user_error_that_suggests_the_nearest() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(UserError, match=r"loss\.aggregation: unknown value 'token_mean'; did you mean 'token-mean'"):
        aggregate(one, one, "token_mean")
    with pytest.raises(UserError, match=r"loss\.kl: unknown value 'k4'"):
        kl_penalty(one, one, "k4")
    with pytest.raises(UserError, match=r"loss\.kl: unknown value 'k4\+'"):
        kl_penalty(one, one, "k4+")
    with pytest.raises(UserError, match=r"loss\.name: unknown value 'ppoo'; did you mean 'ppo'"):
        padded_policy_loss(one, one, one, one, config=LossConfig(name="ppoo"))
