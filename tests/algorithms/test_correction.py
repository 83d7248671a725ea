"""Tests of the importance correction of `gleanrl.algorithms.loss`: its weights, which tokens it leaves out and of which
denominators, and that dividing an update into parts does not change it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gleanrl.algorithms.loss import (
    AGGREGATIONS,
    LossContext,
    Objective,
    Tokens,
    aggregation_of,
    loglinear,
    normaliser,
    objective,
    padded_policy_loss,
    precompute,
    scope_of,
)
from gleanrl.config.settings import LossSettings
from tests.loss_world import NAMES, World, aggregated, corrections, make_world, settings, shares, worlds
from tests.strategies import examples

LEVELS = ("token", "sequence", "geometric")
SCALE = 12.5
CORRECTED = st.fixed_dictionaries(
    {
        "correction": st.sampled_from(["truncate", "mask"]),
        "correction_level": st.sampled_from(LEVELS),
        "correction_cap": st.sampled_from([0.5, 1.1, 5.0]),
        "correction_floor": st.sampled_from([0.0, 0.9]),
    }
)


def loss_of(world: World, config: LossSettings) -> tuple[float, np.ndarray, dict[str, float]]:
    """Return `padded_policy_loss` of rows padded with NaN, its gradient at the tokens in order, and its metrics."""
    filled = [world.padded(x, np.nan) for x in (world.logp, world.old, world.advantages, world.behaviour)]
    mask = ~filled[0].isnan()
    rows = torch.zeros(len(mask), dtype=torch.bool)
    rows[world.sequence] = torch.tensor(world.replayed)
    logp = filled[0].requires_grad_()
    output = padded_policy_loss(logp, filled[1], filled[2], mask, rows, config=config, behaviour_logp=filled[3])
    output.loss.backward()
    assert logp.grad is not None
    assert not logp.grad[~mask].any()
    gradient = np.zeros(world.logp.size)
    gradient[np.argsort(world.sequence, kind="stable")] = logp.grad[mask].numpy()
    return float(output.loss.detach()), gradient, output.metrics


@pytest.mark.parametrize("name", NAMES)
@hypothesis_settings(max_examples=examples(60))
@given(world=worlds(), mode=st.sampled_from(AGGREGATIONS), corrected=CORRECTED | st.just({}))
def test_masked_tokens_count_as_never_trained(name: str, world: World, mode: Any, corrected: dict[str, Any]) -> None:
    """The reference removes the masked tokens first, holds the weights constant, and aggregates the rest."""
    config = settings(name, aggregation=mode, aggregation_scale=SCALE, **corrected)
    value, gradient, metrics = loss_of(world, config)
    parts, slopes = aggregated(world, config, mode, SCALE)
    rounding = 1e-6 * float(np.abs(parts).sum())  # the weights of an aggregation are float32
    assert value == pytest.approx(parts.sum(), rel=0, abs=rounding)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-9)
    assert all(np.isfinite(number) for number in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_auto_aggregation_is_the_default_of_the_loss(name: str) -> None:
    world = make_world(np.random.default_rng(0))
    mode = "seq-mean-token-mean" if name == "gspo" else "token-mean"
    assert aggregation_of(settings(name)) == mode
    value, gradient, _ = loss_of(world, settings(name))
    parts, slopes = aggregated(world, settings(name), mode)
    assert value == pytest.approx(parts.sum(), rel=1e-6)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NAMES)
def test_masking_all_tokens_gives_zero_loss_and_gradient(name: str, level: Any, mode: Any) -> None:
    world = make_world(np.random.default_rng(1), replayed=0.0)
    config = settings(
        name, aggregation=mode, correction="mask", correction_level=level, correction_cap=1e9, correction_floor=1e8
    )
    value, gradient, metrics = loss_of(world, config)
    assert value == 0
    assert not gradient.any()
    assert metrics["loss/masked"] == 1
    assert metrics["loss/correction"] == 0


# --- the weights ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["ppo", "reinforce"])
@hypothesis_settings(max_examples=examples(60))
@given(world=worlds(), corrected=CORRECTED)
def test_correction_weights_equal_the_formula(name: str, world: World, corrected: dict[str, Any]) -> None:
    config = settings(name, **corrected)
    weight = precompute(world.tokens(torch.tensor(world.logp, requires_grad=True)), config).weight
    assert weight is not None
    assert not weight.requires_grad
    np.testing.assert_allclose(weight.numpy(), corrections(world, config), rtol=1e-9)
    assert (weight[torch.tensor(world.replayed)] == 1).all()


def test_decoupled_ppo_has_the_gradient_of_its_paper() -> None:
    """Inside clip and cap, w u = pi / pi_behaviour, so the proximal policy cancels (arXiv 2110.00641, 2505.24298)."""
    world = make_world(np.random.default_rng(2), spread=0.02, replayed=0.0)
    for correction in ("truncate", "mask"):
        logp = torch.tensor(world.logp, requires_grad=True)
        objective(world.tokens(logp), LossSettings(correction=correction)).values.sum().backward()
        assert logp.grad is not None
        expected = -world.advantages * np.exp(world.logp - world.behaviour)
        np.testing.assert_allclose(logp.grad.numpy(), expected, rtol=1e-9)


def test_with_recorded_old_log_probs_only_losses_without_ratio_are_corrected() -> None:
    """Old log-probs that are those of the behaviour policy leave nothing to correct in a loss with a ratio."""
    world = make_world(np.random.default_rng(3), replayed=0.0)
    recorded = World(world.logp, world.old, world.old, world.advantages, world.sequence, world.replayed)
    for name in NAMES:
        config = settings(name, correction="truncate", correction_cap=1e9)
        weight = precompute(recorded.tokens(), config).weight
        assert weight is not None
        ratio_free = name in ("reinforce", "gpg")
        np.testing.assert_allclose(weight.numpy(), np.exp(world.logp - world.old) if ratio_free else 1.0)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_kl_and_entropy_terms_of_masked_tokens_are_left_out(kind: Any, mode: Any) -> None:
    """The KL and entropy terms of other tokens are not weighted, and replayed tokens have none."""
    random = np.random.default_rng(4)
    world = make_world(random, tokens=60, sequences=6)
    config = settings(
        "ppo",
        aggregation=mode,
        correction=kind,
        correction_cap=1.1,
        kl="k2",
        kl_coefficient=0.3,
        entropy_coefficient=0.2,
    )
    reference, entropy = world.logp + random.normal(size=60), random.exponential(size=60)
    inputs: dict[str, Any] = {"ref_logp": torch.tensor(reference), "entropy": torch.tensor(entropy)}
    result = objective(world.tokens(), config, **inputs)
    plain = objective(world.tokens(), config.model_copy(update={"kl_coefficient": 0.0, "entropy_coefficient": 0.0}))
    weights = corrections(world, config)
    terms = np.where(world.replayed, 0.0, 0.15 * (world.logp - reference) ** 2 - 0.2 * entropy)
    kept = weights > 0
    scale = np.ones(60)
    if mode == "seq-mean-token-mean":
        own = world.sequence[:, None] == world.sequence
        scale = own.sum(1) / np.maximum((own & kept).sum(1), 1)
    expected = np.where(kept, scale * terms, 0.0)
    np.testing.assert_allclose((result.values - plain.values).numpy(), expected, rtol=1e-9, atol=1e-12)


# --- division into parts --------------------------------------------------------------------------
def parts_of(
    world: World, config: LossSettings, random: np.random.Generator, cuts: int
) -> list[tuple[Any, LossContext]]:
    """Divide the tokens at random into ``cuts`` parts; return each part with its context."""
    context, part_of = precompute(world.tokens(), config), random.integers(0, cuts, world.logp.size)
    parts = [np.flatnonzero(part_of == part) for part in range(cuts)]
    return [(part, context.take(torch.tensor(part))) for part in parts]


@pytest.mark.parametrize("name", NAMES)
@hypothesis_settings(max_examples=examples(40))
@given(
    world=worlds(spreads=(0.3,)),
    mode=st.sampled_from(AGGREGATIONS),
    corrected=CORRECTED | st.just({}),
    cuts=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_dividing_an_update_into_parts_does_not_change_it(
    name: str, world: World, mode: Any, corrected: dict[str, Any], cuts: int, seed: int
) -> None:
    config = settings(name, aggregation=mode, aggregation_scale=SCALE, kl_coefficient=0.1, **corrected)
    weights = shares(world.sequence, mode, SCALE) * (
        world.logp.size if mode == "token-mean" else len(set(world.sequence.tolist()))
    )

    def add_up(parts: list[tuple[Any, LossContext | None]]) -> tuple[float, np.ndarray, float, list[Objective]]:
        gradient, total, results = np.zeros(world.logp.size), 0.0, []
        for part, context in parts:
            piece = world.take(part)
            logp = torch.tensor(piece.logp, requires_grad=True)
            ref_logp = torch.tensor(piece.old)
            results.append(objective(piece.tokens(logp), config, ref_logp=ref_logp, context=context))
            loss = (torch.tensor(weights[part]) * results[-1].values).sum()
            loss.backward()
            assert logp.grad is not None
            gradient[part], total = logp.grad.numpy(), total + float(loss.detach())
        out = [sum(float(getattr(r, f"left_out_{what}")) for r in results) for what in ("tokens", "sequences")]
        divisor = normaliser(mode, world.logp.size - out[0], len(set(world.sequence.tolist())) - out[1])
        return total, gradient, divisor, results

    everything = np.arange(world.logp.size)
    whole = add_up([(everything, None)])
    cut = add_up([*parts_of(world, config, np.random.default_rng(seed), cuts)])
    np.testing.assert_allclose(cut[0], whole[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(cut[1], whole[1], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(cut[2], whole[2], rtol=1e-9, atol=1e-9)
    statistics = [sum((r.statistics for r in results[1:]), results[0].statistics) for results in (cut[3], whole[3])]
    assert statistics[0].metrics() == pytest.approx(statistics[1].metrics(), rel=1e-9, abs=1e-12)


@hypothesis_settings(max_examples=examples(150))
@given(
    world=worlds(spreads=(0.3,)),
    name=st.sampled_from(NAMES),
    mode=st.sampled_from(AGGREGATIONS),
    corrected=CORRECTED | st.just({}),
    seed=st.integers(0, 2**32 - 1),
)
def test_precompute_of_a_part_that_covers_the_scope_equals_that_of_the_whole(
    name: str, world: World, mode: Any, corrected: dict[str, Any], seed: int
) -> None:
    """With scope "token" this holds for any part, with scope "sequence" for a part that holds whole sequences."""
    config = settings(name, aggregation=mode, aggregation_scale=SCALE, **corrected)
    scope, random = scope_of(config), np.random.default_rng(seed)
    if scope == "update":
        assert name in ("clip_cov", "kl_cov")
        return
    chosen = random.random(world.logp.size if scope == "token" else 10) < 0.5
    part = np.flatnonzero(chosen if scope == "token" else chosen[world.sequence])
    alone, whole = (
        precompute(world.take(part).tokens(), config),
        precompute(world.tokens(), config).take(torch.tensor(part)),
    )
    for mine, theirs in zip(alone, whole, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-9, atol=1e-12)
    results = [objective(world.take(part).tokens(), config, context=context) for context in (None, alone, whole)]
    for result in results[1:]:
        np.testing.assert_allclose(result.values.numpy(), results[0].values.numpy(), rtol=1e-9, atol=1e-12)
        assert float(result.left_out_sequences) == pytest.approx(float(results[0].left_out_sequences))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_scope_of_a_loss_follows_from_its_correction_and_aggregation(mode: Any) -> None:
    """A mask changes the denominator of a mean, so it needs to know all tokens of this mean."""
    over_sequences = mode != "token-mean"
    for kind, level in itertools.product(("truncate", "mask"), LEVELS):
        corrected = {"aggregation": mode, "correction": kind, "correction_level": level}
        wide = level != "token" or (kind == "mask" and over_sequences)
        assert scope_of(settings("ppo", **corrected)) == ("sequence" if wide else "token")
        assert scope_of(settings("gspo", **corrected)) == "sequence"
        assert scope_of(settings("clip_cov", **corrected)) == "update"
    assert scope_of(settings("ppo", aggregation=mode)) == "token"


# --- metrics --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["none", "truncate", "mask"])
def test_mismatch_and_correction_are_measured(kind: Any) -> None:
    world = make_world(np.random.default_rng(6), tokens=300, sequences=12, spread=0.8)
    config = settings("ppo", correction=kind, correction_cap=1.5)
    metrics = objective(world.tokens(), config).statistics.metrics()
    weights = corrections(world, config)
    for prefix, chosen in (("loss/", ~world.replayed), ("loss/replayed/", world.replayed)):
        gap = (np.where(world.replayed, world.logp - world.old, world.old - world.behaviour))[chosen]
        expected = {
            "mismatch": np.abs(gap).mean(),
            "mismatch_k3": (np.exp(gap) - 1 - gap).mean(),
            "mismatch_ess": np.exp(gap).sum() ** 2 / np.exp(2 * gap).sum() / gap.size,
        }
        if kind != "none":
            expected |= {"correction": weights[chosen].mean(), "masked": (weights[chosen] == 0).mean()}
        assert {name: metrics[prefix + name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert ("loss/correction" in metrics) == ("loss/masked" in metrics) == (kind != "none")


def test_tokens_that_a_mask_leaves_out_are_in_no_mean_of_the_loss() -> None:
    old, behaviour = torch.full((4,), -1.0), torch.tensor([-1.0, -1.0, -1.0, -9.0])
    logp = torch.tensor([-1.0, -1.0, -1.0, -0.1]).requires_grad_()
    tokens = Tokens(
        logp, old, torch.tensor([1.0, 1.0, 1.0, -1.0]), torch.zeros(4, dtype=torch.long), old > 0, behaviour
    )
    entropy = torch.tensor([1.0, 1.0, 1.0, 9.0])
    metrics = objective(tokens, settings("ppo", correction="mask"), entropy=entropy).statistics.metrics()
    expected = {"policy_per_token": -1, "ratio/mean": 1, "ratio/max": 1, "ratio/p99": 1, "ess": 1, "entropy": 1}
    expected |= {"masked": 0.25, "correction": 0.75, "mismatch": 2, "clip_dual": 0, "approx_kl_k3": 0}
    assert {name: metrics[f"loss/{name}"] for name in expected} == pytest.approx(expected)
    none = objective(tokens, settings("ppo", correction="mask", correction_floor=0.5, correction_cap=0.9))
    names = {"masked", "correction", "mismatch", "mismatch_k3", "mismatch_ess"}
    assert none.statistics.metrics().keys() == {f"loss/{name}" for name in names}


# --- loglinear ------------------------------------------------------------------------------------
def test_loglinear_interpolates_between_behaviour_and_current_log_probs() -> None:
    behaviour, logp = (torch.tensor(x, dtype=torch.float64) for x in ([-1.0, -2.0, -3.0], [-1.5, -1.0, -7.0]))
    logp.requires_grad_()
    for dtype in (torch.int64, torch.float32):
        for staleness, share in ((0, 0.0), (1, 1 / 2), (2, 2 / 3), (6, 6 / 7)):
            proximal = loglinear(behaviour, logp, torch.full((3,), staleness, dtype=dtype))
            assert not proximal.requires_grad
            expected = (1 - share) * behaviour.numpy() + share * logp.detach().numpy()
            np.testing.assert_allclose(proximal.numpy(), expected, rtol=1e-12)
    torch.testing.assert_close(loglinear(behaviour, logp, torch.full((3,), 10**12)), logp.detach())


def test_the_ratio_to_loglinear_log_probs_has_the_documented_value_and_gradient() -> None:
    """With staleness d, log u = (logp - behaviour) / (d + 1), and the derivative of u by logp is u."""
    behaviour = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    logp = torch.tensor([-0.9, -2.1, -3.0], dtype=torch.float64, requires_grad=True)
    staleness = torch.tensor([0, 1, 4])
    proximal, fresh = loglinear(behaviour, logp, staleness), torch.zeros(3, dtype=torch.bool)
    tokens = Tokens(logp, proximal, torch.ones(3), torch.arange(3), fresh)
    tokens.ratio.sum().backward()
    expected = ((logp.detach() - behaviour) / (staleness + 1)).exp()
    torch.testing.assert_close(tokens.ratio.detach(), expected)
    torch.testing.assert_close(logp.grad, expected)
