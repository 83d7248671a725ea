"""Losses against scalar float64 references, gradients included, and sums that do not depend on the cut."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.errors import UserError
from gleanrl.loss import (
    AGGREGATIONS,
    LossConfig,
    Tokens,
    aggregate,
    kl_penalty,
    normaliser,
    objective,
    policy_loss,
    token_weights,
)

KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")


def naive_ppo(logp: float, old: float, advantage: float, config: LossConfig) -> tuple[float, float]:
    """Value of one token and its derivative by logp, by cases."""
    raw = logp - old
    inside = -20 <= raw <= 20
    ratio = math.exp(min(max(raw, -20.0), 20.0))
    slope = -advantage * ratio * inside
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    value = -advantage * ratio
    if -advantage * clipped > value:
        value, slope = -advantage * clipped, 0.0
    if advantage < 0 and config.dual_clip is not None and value > -advantage * config.dual_clip:
        value, slope = -advantage * config.dual_clip, 0.0
    return value, slope


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
    return float(sum(row.sum() for row in rows)) / (scale or values.shape[1])


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 10)))
    spread = draw(st.sampled_from([0.0, 0.3, 3.0, 60.0]))  # the last leaves the clamp
    old = -random.exponential(2.0, shape)
    return {
        "logp": old + spread * random.normal(size=shape),
        "old": old,
        "advantages": random.normal(size=shape) * random.integers(0, 2, shape),
        "mask": random.random(shape) < draw(st.sampled_from([0.0, 0.5, 1.0])),
        "replayed": random.random(shape[0]) < 0.4,
        "random": random,
    }


@settings(max_examples=100, deadline=None)
@given(
    batch=batches(),
    mode=st.sampled_from(AGGREGATIONS),
    dual=st.sampled_from([None, 1.5, 3.0]),
    scale=st.sampled_from([None, 128.0]),
)
def test_policy_loss_and_gradient_equal_the_naive_one(
    batch: dict[str, Any], mode: Any, dual: float | None, scale: float | None
) -> None:
    config = LossConfig(aggregation=mode, dual_clip=dual, aggregation_scale=scale)
    mask = batch["mask"]
    logp = np.where(mask, batch["logp"], np.nan)  # what is not trained may be anything
    variable = torch.tensor(logp, requires_grad=True)
    output = policy_loss(
        variable,
        torch.tensor(np.where(mask, batch["old"], np.inf)),
        torch.tensor(np.where(mask, batch["advantages"], np.nan)),
        torch.tensor(mask),
        torch.tensor(batch["replayed"]),
        config=config,
    )
    output.loss.backward()
    assert variable.grad is not None
    pairs = [
        [naive_ppo(*cell, config) for cell in zip(*row, strict=True)]
        for row in zip(batch["logp"], batch["old"], batch["advantages"], strict=True)
    ]
    values, slopes = (np.array([[pair[i] for pair in row] for row in pairs]) for i in range(2))
    weights = np.zeros(mask.shape)
    for index in np.argwhere(mask):
        one = np.zeros(mask.shape)
        one[tuple(index)] = 1.0
        weights[tuple(index)] = naive_aggregate(one, mask, mode, scale)
    assert output.loss.item() == pytest.approx(naive_aggregate(values, mask, mode, scale), rel=1e-6, abs=1e-9)
    np.testing.assert_allclose(variable.grad.numpy(), np.where(mask, slopes * weights, 0), rtol=1e-6, atol=1e-9)
    assert all(math.isfinite(value) for value in output.metrics.values())


@settings(max_examples=60, deadline=None)
@given(batch=batches(), mode=st.sampled_from(AGGREGATIONS), scale=st.sampled_from([None, 3.5]))
def test_aggregate(batch: dict[str, Any], mode: str, scale: float | None) -> None:
    values, mask = batch["old"], batch["mask"]
    dirty = torch.tensor(np.where(mask, values, np.nan))
    result = aggregate(dirty, torch.tensor(mask), mode, scale=scale)
    assert float(result) == pytest.approx(naive_aggregate(values, mask, mode, scale), rel=1e-6, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(batch=batches(), mode=st.sampled_from(AGGREGATIONS), cuts=st.integers(1, 5))
def test_weighted_sums_of_any_cut_add_up_to_the_whole(batch: dict[str, Any], mode: Any, cuts: int) -> None:
    """What the learner relies on: tokens dealt out at random, summed, divided once."""
    config = LossConfig(aggregation=mode)
    mask = torch.tensor(batch["mask"])
    logp, old, advantages = (torch.tensor(batch[key])[mask] for key in ("logp", "old", "advantages"))
    replayed = torch.tensor(batch["replayed"])[:, None].expand_as(mask)[mask]
    weights, sequence = token_weights(mask, mode)[mask].double(), mask.nonzero()[:, 0]
    whole = policy_loss(*(torch.tensor(batch[k]) for k in ("logp", "old", "advantages")), mask, config=config).loss
    part_of = torch.tensor(batch["random"].integers(0, cuts, logp.numel()))
    total = 0.0
    for part in range(cuts):
        keep = part_of == part
        tokens = Tokens(logp[keep], old[keep], advantages[keep], sequence[keep], replayed[keep])
        total += float((weights[keep] * objective(tokens, config).values).sum())
    share = normaliser(mode, float(mask.sum()), float(mask.any(-1).sum()))
    assert total / max(share, 1.0) == pytest.approx(float(whole), rel=1e-6, abs=1e-9)


def test_statistics_add_up_over_any_cut_and_keep_the_origins_apart() -> None:
    random = np.random.default_rng(0)
    old = torch.tensor(-random.exponential(2.0, 50))
    tokens = {
        "logp": old + torch.tensor(random.normal(0, 0.4, 50)),
        "old_logp": old,
        "advantages": torch.tensor(random.normal(size=50)),
        "sequence": torch.zeros(50, dtype=torch.long),
        "replayed": torch.tensor(random.random(50) < 0.3),
    }
    config = LossConfig()

    def statistics(keep: torch.Tensor) -> Any:
        return objective(Tokens(**{name: value[keep] for name, value in tokens.items()}), config).statistics

    everything = torch.ones(50, dtype=torch.bool)
    part = torch.tensor(random.random(50) < 0.5)
    whole, halves = statistics(everything).metrics(), (statistics(part) + statistics(~part)).metrics()
    assert whole.keys() == halves.keys()
    for name, value in whole.items():
        assert halves[name] == pytest.approx(value, rel=1e-12), name
    for prefix, chosen in (("loss/", ~tokens["replayed"]), ("loss/replayed/", tokens["replayed"])):
        ratio = (tokens["logp"] - old).exp()[chosen]
        positive = tokens["advantages"][chosen] > 0
        assert whole[f"{prefix}ratio/mean"] == pytest.approx(float(ratio.mean()))
        assert whole[f"{prefix}ratio/min"] == pytest.approx(float(ratio.min()))
        assert whole[f"{prefix}ratio/max"] == pytest.approx(float(ratio.max()))
        assert whole[f"{prefix}ess"] == pytest.approx(float(ratio.sum() ** 2 / ratio.square().sum() / ratio.numel()))
        assert whole[f"{prefix}clip_high"] == pytest.approx(float(((ratio > 1.28) & positive).double().mean()))
        assert whole[f"{prefix}clip_low"] == pytest.approx(float(((ratio < 0.8) & ~positive).double().mean()))
        assert whole[f"{prefix}approx_kl_k1"] == pytest.approx(float(-ratio.log().mean()))
        assert whole[f"{prefix}approx_kl_k3"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()))
    assert "loss/entropy" not in whole


def test_kl_and_entropy_act_on_fresh_tokens_only() -> None:
    logp = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([2.0, 2.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(2, dtype=torch.float64)
    tokens = Tokens(logp, logp.detach(), zero, zero.long(), torch.tensor([False, True]))
    config = LossConfig(kl="k1", kl_coefficient=0.5, entropy_coefficient=0.1)
    result = objective(tokens, config, entropy=entropy, ref_logp=torch.tensor([-3.0, -3.0], dtype=torch.float64))
    assert result.values.tolist() == pytest.approx([0.5 * 2.0 - 0.1 * 2.0, 0.0])
    result.values.sum().backward()
    assert logp.grad is not None
    assert entropy.grad is not None
    assert logp.grad.tolist() == [0.5, 0.0]
    assert entropy.grad.tolist() == [-0.1, 0.0]
    with pytest.raises(ValueError, match="reference"):
        objective(tokens, config, entropy=entropy)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_penalty(kind: str) -> None:
    differences = np.array([-30.0, -2.0, -0.1, 0.0, 0.1, 2.0, 30.0])
    result = kl_penalty(torch.tensor(differences), torch.zeros(7, dtype=torch.float64), kind).numpy()
    clamped = np.clip(differences, -20, 20)
    expected = {
        "k1": differences,
        "kl": differences,
        "abs": np.abs(differences),
        "k2": differences**2 / 2,
        "mse": differences**2 / 2,
    }.get(kind, np.clip(np.exp(-clamped) + clamped - 1, -10, 10))
    np.testing.assert_allclose(result, expected, rtol=1e-12)


def test_k3_estimates_the_divergence() -> None:
    """Averaged over the policy itself, every kind but abs and k2 gives KL(policy || reference)."""
    policy, reference = (torch.tensor(p, dtype=torch.float64) for p in ([0.7, 0.2, 0.1], [0.4, 0.4, 0.2]))
    exact = float((policy * (policy / reference).log()).sum())
    for kind in ("k1", "k3"):
        assert float((policy * kl_penalty(policy.log(), reference.log(), kind)).sum()) == pytest.approx(exact)


def test_unknown_names_name_the_nearest() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(UserError, match=r"loss\.aggregation: unknown value 'token_mean'; did you mean 'token-mean'"):
        aggregate(one, one, "token_mean")
    with pytest.raises(UserError, match=r"loss\.kl: unknown value 'k4'"):
        kl_penalty(one, one, "k4")
    with pytest.raises(UserError, match=r"loss\.name: unknown value 'ppoo'; did you mean 'ppo'"):
        policy_loss(one, one, one, one, config=LossConfig(name="ppoo"))


def test_behaviour_log_probs_are_measured() -> None:
    one = torch.zeros(1, 2)
    behaviour = torch.tensor([[0.5, -0.5]])
    metrics = policy_loss(one, one, one, torch.ones(1, 2), config=LossConfig(), behaviour_logp=behaviour).metrics
    assert metrics["loss/mismatch"] == pytest.approx(0.5)
    assert metrics["loss/mismatch_k3"] == pytest.approx(math.cosh(0.5) - 1)
