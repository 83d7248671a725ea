"""Tests of the policy losses of `gleanrl.algorithms.loss`: value and gradient of every loss equal its formula, token by
token; extreme numbers stay finite; users can register losses."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gleanrl.algorithms.loss import (
    POLICY_LOSSES,
    Objective,
    Tokens,
    find,
    objective,
    padded_policy_loss,
    policy_loss,
    precompute,
    scope_of,
)
from gleanrl.config.settings import LossSettings
from gleanrl.utils.errors import UserError
from tests.loss_world import (
    NAMES,
    World,
    covariance_in_band,
    covariances,
    highest_covariance,
    make_world,
    per_token,
    settings,
    worlds,
)
from tests.strategies import examples


def value_and_slope(world: World, config: LossSettings, **inputs: Any) -> tuple[Objective, np.ndarray]:
    """Return the objective of all tokens, and the derivative of each value with respect to its own log-prob."""
    logp = torch.tensor(world.logp, requires_grad=True)
    result = objective(world.tokens(logp), config, **inputs)
    result.values.sum().backward()
    assert logp.grad is not None
    return result, logp.grad.numpy()


def test_every_built_in_loss_is_covered_by_these_tests() -> None:
    losses = [POLICY_LOSSES.get(name) for name in POLICY_LOSSES.names()]
    assert {loss.name for loss in losses if loss.function.__module__.startswith("gleanrl.")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@hypothesis_settings(max_examples=examples(50))
@given(
    world=worlds(),
    clip=st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.1, 5.0), (1.5, 0.0)]),
    dual=st.sampled_from([None, 1.5, 3.0]),
    replay=st.fixed_dictionaries(
        {
            "replay_mode": st.sampled_from(["clip", "shape"]),
            "replay_importance": st.sampled_from(["recorded", "current"]),
            "replay_clip_high": st.sampled_from([0.3, 1.0]),
            "replay_shape": st.sampled_from([0.1, 1.0]),
            "replay_coefficient": st.sampled_from([0.0, 1.0, 12.0]),
        }
    ),
)
def test_value_and_derivative_equal_the_formula(
    name: str, world: World, clip: tuple[float, float], dual: float | None, replay: dict[str, Any]
) -> None:
    config = settings(name, clip_low=clip[0], clip_high=clip[1], dual_clip=dual, **replay)
    result, slopes = value_and_slope(world, config)
    expected_values, expected_slopes = per_token(world, config)
    np.testing.assert_allclose(result.values.detach().numpy(), expected_values, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-9, atol=1e-12)
    assert float(result.left_out_tokens) == float(result.left_out_sequences) == 0


@pytest.mark.parametrize("name", NAMES)
@hypothesis_settings(max_examples=examples(20))
@given(world=worlds())
def test_replayed_tokens_do_not_change_the_loss_of_fresh_ones(name: str, world: World) -> None:
    config = settings(name)
    if name == "kl_cov":
        highest_covariance(world, 0.2)  # rejects worlds with ties, whose choice is ambiguous
    mixed, alone = objective(world.tokens(), config), objective(world.take(~world.replayed).tokens(), config)
    np.testing.assert_allclose(mixed.values.numpy()[~world.replayed], alone.values.numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@hypothesis_settings(max_examples=examples(30))
@given(world=worlds(spreads=(0.3,)), seed=st.integers(0, 2**32 - 1))
def test_the_order_of_tokens_does_not_matter(name: str, world: World, seed: int) -> None:
    config = settings(name, options={"share": 0.2, "low": 0.0}) if name == "clip_cov" else settings(name)
    if name == "kl_cov":
        highest_covariance(world, 0.2)  # rejects worlds with ties, whose choice is ambiguous
    order = np.random.default_rng(seed).permutation(world.logp.size)
    values, slopes = value_and_slope(world, config)
    shuffled, shuffled_slopes = value_and_slope(world.take(order), config)
    np.testing.assert_allclose(shuffled.values.detach(), values.values.detach()[order], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(shuffled_slopes, slopes[order], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "replay", [{}, {"replay_mode": "shape"}, {"replay_mode": "shape", "replay_importance": "current"}]
)
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_value_with_detached_parts_held_constant(name: str, replay: dict[str, Any]) -> None:
    """`gradcheck` varies the log-probs; the parts that a loss detaches are computed from the original ones."""
    config = settings(name, **replay)
    world = make_world(np.random.default_rng(5), tokens=60, sequences=8)
    ratios = np.exp(world.logp - world.old)
    kinks = [1.0, 1 - config.clip_low, 1 + config.clip_high, 1 + config.replay_clip_high, 3.0]
    world = world.take(np.min(np.abs(ratios[:, None] - kinks), axis=1) > 1e-3)
    start = world.tokens()
    context = precompute(start, config)

    def values(logp: torch.Tensor) -> torch.Tensor:
        held = start.logp
        if name == "cispo":
            weight = start.ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            fresh = -weight * start.advantages * logp
        elif name == "gspo":
            assert context.precomputed is not None
            ratio = context.precomputed.exp() * (logp - held).exp()
            bound = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            fresh = -torch.minimum(start.advantages * ratio, start.advantages * bound)
        else:
            fresh = objective(world.tokens(logp), config, context=context).values
        ratio = (logp - (held if config.replay_importance == "current" else start.old_logp)).exp()
        if config.replay_mode == "shape":
            return torch.where(start.off_policy, -start.advantages * ratio / (ratio + config.replay_shape), fresh)
        return torch.where(start.off_policy, objective(world.tokens(logp), config, context=context).values, fresh)

    variable = torch.tensor(world.logp, requires_grad=True)
    assert torch.autograd.gradcheck(values, variable)
    (stopped,) = torch.autograd.grad(values(variable).sum(), variable)
    np.testing.assert_allclose(value_and_slope(world, config)[1], stopped.numpy(), rtol=1e-9, atol=1e-12)


OWN_REPLAY = """
from gleanrl.algorithms.loss import TokenLosses, replay_loss

def above_the_mean(tokens, settings):
    return tokens.log_ratio > tokens.log_ratio.mean()

@replay_loss("lower half", scope="update", precompute=above_the_mean)
def lower_half(tokens, settings):
    values = -tokens.advantages * tokens.ratio
    return TokenLosses(values.masked_fill(tokens.precomputed, 0.0), clipped_high=tokens.precomputed)
"""


PRECISE = """
from gleanrl.algorithms.loss import policy_loss, replay_loss

@policy_loss("precise fresh")
def fresh(tokens, settings):
    return -tokens.advantages.double() * tokens.ratio

@replay_loss("precise stored")
def stored(tokens, settings):
    return -tokens.advantages.double() * tokens.ratio
"""


@pytest.mark.parametrize("importance", ["recorded", "current"])
def test_a_users_own_loss_of_replayed_tokens_is_chosen_by_its_import_path(tmp_path: Path, importance: Any) -> None:
    """It gets the result of its precompute, also if the policy loss has a precompute of its own."""
    (tmp_path / "own.py").write_text(OWN_REPLAY)
    world, path = make_world(np.random.default_rng(2), tokens=60, sequences=8), f"{tmp_path / 'own.py'}:lower_half"
    config = settings("gspo", replay_mode=path, replay_coefficient=2.0, replay_importance=importance)
    assert scope_of(config) == "update"
    result, slopes = value_and_slope(world, config)
    plain, plain_slopes = value_and_slope(world, settings("gspo"))
    fresh, ratio = ~world.replayed, np.exp(world.logp - world.old) if importance == "recorded" else np.ones(60)
    np.testing.assert_array_equal(result.values.detach()[fresh], plain.values.detach()[fresh])
    np.testing.assert_array_equal(slopes[fresh], plain_slopes[fresh])
    kept = np.log(ratio) <= np.log(ratio)[world.replayed].mean()
    expected = np.where(kept, -2 * world.advantages * ratio, 0.0)[world.replayed]
    np.testing.assert_allclose(result.values.detach()[world.replayed], expected, rtol=1e-9)
    np.testing.assert_allclose(slopes[world.replayed], expected, rtol=1e-9)  # d ratio / d logp = ratio
    share = result.statistics.metrics()["loss/replayed/clip_high"]
    assert share == pytest.approx((~kept)[world.replayed].mean())
    zeros, ones = torch.zeros(1, 3), torch.ones(1, 3)
    padded = padded_policy_loss(zeros, zeros, zeros, ones, off_policy=torch.ones(1), config=config)
    assert float(padded.loss) == 0


def test_losses_of_fresh_and_of_replayed_tokens_may_have_other_dtypes(tmp_path: Path) -> None:
    (tmp_path / "precise.py").write_text(PRECISE)
    file = tmp_path / "precise.py"
    for config in (settings(f"{file}:fresh"), settings("reinforce", replay_mode=f"{file}:stored")):
        logp = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]], requires_grad=True)
        result = padded_policy_loss(
            logp, logp.detach(), torch.ones(2, 2), torch.ones(2, 2), torch.tensor([False, True]), config=config
        )
        result.loss.backward()
        torch.testing.assert_close(logp.grad, torch.full((2, 2), -0.25))


def test_gspo_keeps_the_precision_of_a_small_mean_log_ratio() -> None:
    """In float32, with log-probs near -15 and ratios near 1 + 1e-6."""
    old = torch.full((8,), -15.0)
    tokens = Tokens(old.clone(), old, torch.ones(8), torch.zeros(8).long(), torch.zeros(8, dtype=torch.bool))
    config, small = LossSettings(name="gspo"), 3e-7
    context = precompute(tokens, config)._replace(precomputed=torch.full((8,), small))
    assert objective(tokens, config, context=context).values.tolist() == pytest.approx([-1 - small] * 8, abs=6e-8)


# --- the tokens of high covariance --------------------------------------------------------------------
@hypothesis_settings(max_examples=examples(60))
@given(world=worlds(spreads=(0.0, 0.3)), share=st.sampled_from([2e-4, 0.1, 0.5]))
def test_clip_cov_draws_its_share_of_tokens_from_the_covariance_band(world: World, share: float) -> None:
    config = settings("clip_cov", options={"share": share, "low": 0.1, "high": 5.0})
    chosen = precompute(world.tokens(), config).precomputed
    assert chosen is not None
    picked = set(chosen.nonzero()[:, 0].tolist())
    candidates = covariance_in_band(world, config)
    assert picked <= candidates
    assert len(picked) == min(max(1, int(share * (~world.replayed).sum())), len(candidates))
    values = objective(world.tokens(), config).values
    assert not values[chosen].any()


def test_clip_cov_draws_uniformly_from_its_candidates() -> None:
    """Whether a candidate is drawn does not depend on how high its covariance is."""
    config = settings("clip_cov", options={"share": 0.05, "low": 0.1, "high": 5.0})
    drawn, possible = [], []
    for seed in range(40):
        world = make_world(np.random.default_rng(seed), tokens=200, sequences=20, replayed=0.0)
        chosen = precompute(world.tokens(), config).precomputed
        assert chosen is not None
        values, candidates = covariances(world), sorted(covariance_in_band(world, config))
        ranks = {
            token: rank / len(candidates) for rank, token in enumerate(sorted(candidates, key=lambda i: values[i]))
        }
        drawn += [ranks[token] for token in chosen.nonzero()[:, 0].tolist()]
        possible.append(len(candidates))
    assert len(drawn) == 400
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.06)  # four standard errors


def test_tied_covariances_do_not_increase_the_share_of_chosen_tokens() -> None:
    """Covariances tie if all advantages are equal, or if many tokens were sampled with probability 1."""
    count = 1000
    zero, fresh = torch.zeros(count), torch.zeros(count, dtype=torch.bool)
    for name, share in itertools.product(("clip_cov", "kl_cov"), (2e-4, 0.01)):
        advantages = torch.where(torch.arange(count) < 900, 2.0, -2.0) if name == "clip_cov" else zero
        logp = torch.where(torch.arange(count) < 900, 0.0, -9.0)
        options = {"share": share} | ({"low": 0.1} if name == "clip_cov" else {})
        tokens = Tokens(logp, logp, advantages, zero.long(), fresh)
        chosen = precompute(tokens, LossSettings(name=name, options=options)).precomputed
        assert chosen is not None
        assert int(chosen.sum()) == max(1, int(share * count))


@hypothesis_settings(max_examples=examples(40))
@given(world=worlds(spreads=(0.3,)), share=st.sampled_from([2e-4, 0.1, 0.5]))
def test_kl_cov_chooses_the_tokens_of_highest_covariance(world: World, share: float) -> None:
    chosen = precompute(world.tokens(), LossSettings(name="kl_cov", options={"share": share})).precomputed
    assert chosen is not None
    assert set(chosen.nonzero()[:, 0].tolist()) == highest_covariance(world, share)


# --- extremes -----------------------------------------------------------------------------------------
EXTREME = (-1e3, -87.5, -1e-8, 0.0)  # exp(-87.5) is the smallest normal float32
CORRECTIONS = [
    {},
    *(
        {"correction": kind, "correction_level": level}
        for kind in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_losses_gradients_and_metrics_stay_finite_for_extreme_log_probs(name: str, dtype: torch.dtype) -> None:
    rows = np.array(list(itertools.product(EXTREME, EXTREME, EXTREME, (-2.0, 0.0, 3.0))))
    logp, old, behaviour, advantages = np.concatenate([rows, rows]).T
    sequence = np.arange(logp.size) // 5
    world = World(logp, old, behaviour, advantages, sequence, np.arange(logp.size) >= 200)
    variants = itertools.product(CORRECTIONS, ({}, {"replay_mode": "shape"}, {"aggregation": "seq-mean-token-mean"}))
    for (correction, more), kl in zip(variants, itertools.cycle(["k1", "abs", "k2", "k3", "k1+", "k3+"])):
        config = settings(name, kl=kl, kl_coefficient=0.1, entropy_coefficient=0.01, **correction, **more)
        logps = torch.tensor(logp, dtype=dtype, requires_grad=True)
        ref_logp, entropy = torch.tensor(old, dtype=dtype), torch.tensor(-old, dtype=dtype)
        result = objective(world.tokens(logps, dtype), config, ref_logp=ref_logp, entropy=entropy)
        result.values.sum().backward()
        assert logps.grad is not None
        assert result.values.isfinite().all()
        assert logps.grad.isfinite().all()
        assert result.values.dtype == logps.grad.dtype == dtype
        metrics = result.statistics.metrics()
        assert {"loss/policy_per_token", "loss/replayed/policy_per_token"} < metrics.keys()
        assert all(np.isfinite(value) for value in metrics.values()), metrics


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1])
def test_losses_accept_no_token_and_a_single_token(name: str, count: int) -> None:
    world = make_world(np.random.default_rng(0), tokens=count, sequences=1, replayed=0.0)
    for correction in CORRECTIONS:
        result, slopes = value_and_slope(world, settings(name, **correction))
        assert result.values.shape == slopes.shape == (count,)
        assert np.isfinite(slopes).all()
        assert bool(result.statistics.metrics()) == bool(count)


@pytest.mark.parametrize("name", NAMES)
def test_zero_advantages_give_zero_loss_and_gradient(name: str) -> None:
    world = make_world(np.random.default_rng(1), spread=3.0)
    flat = World(world.logp, world.old, world.behaviour, 0 * world.advantages, world.sequence, world.replayed)
    config = settings(name, options={"coefficient": 0.0}) if name == "kl_cov" else settings(name)
    result, slopes = value_and_slope(flat, config)
    assert not result.values.any()
    assert not slopes.any()


# --- losses of users ----------------------------------------------------------------------------------
OWN = """
import torch
from gleanrl.algorithms.loss import TokenLosses, policy_loss

@policy_loss("{name}_squares", ratio=False)
def squares(tokens, settings, power=2.0):
    return -tokens.advantages * tokens.logp.abs() ** power

@policy_loss("{name}_flagged")
def flagged(tokens, settings):
    return TokenLosses(-tokens.advantages * tokens.ratio, clipped_high=tokens.ratio > 1)

def count_and_mean(tokens, settings, shift=0.0):
    assert not tokens.logp.requires_grad
    return tokens.advantages.mean().expand_as(tokens.advantages) + shift

@policy_loss("{name}_centred", scope="update", precompute=count_and_mean, aggregation="seq-mean-token-sum")
def centred(tokens, settings, **options):
    return -(tokens.advantages - tokens.precomputed) * tokens.logp

def plain(tokens, settings):
    return tokens.logp
"""


@pytest.fixture
def own(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    file = tmp_path / "my.py"
    file.write_text(OWN.format(name=request.node.name))
    return file


def test_a_users_loss_replaces_the_loss_of_fresh_tokens_only(own: Path) -> None:
    world = make_world(np.random.default_rng(2))
    fresh = world.take(~world.replayed)

    config = LossSettings(name=f"{own}:squares", options={"power": 3.0})
    values, slopes = value_and_slope(world, config)
    expected = -fresh.advantages * np.abs(fresh.logp) ** 3
    np.testing.assert_allclose(values.values.detach().numpy()[~world.replayed], expected)
    np.testing.assert_allclose(slopes[~world.replayed], -3 * fresh.advantages * fresh.logp * np.abs(fresh.logp))
    replayed = world.take(world.replayed)
    np.testing.assert_allclose(values.values.detach().numpy()[world.replayed], per_token(replayed, settings("ppo"))[0])

    config = LossSettings(name=f"{own}:flagged")
    share = float(np.mean(fresh.logp > fresh.old))
    assert objective(world.tokens(), config).statistics.metrics()["loss/clip_high"] == pytest.approx(share)


def test_a_users_loss_may_precompute_values_over_the_whole_update(own: Path) -> None:
    world = make_world(np.random.default_rng(3), replayed=0.0)
    config = LossSettings(name=f"{own}:centred", options={"shift": 0.5})
    assert scope_of(config) == "update"
    context = precompute(world.tokens(), config)
    expected = -(world.advantages - world.advantages.mean() - 0.5) * world.logp
    for part in (np.arange(11), np.arange(11, 40)):
        values = objective(world.take(part).tokens(), config, context=context.take(torch.tensor(part))).values
        np.testing.assert_allclose(values.numpy(), expected[part])
    logp, old, advantages = (world.padded(x, np.nan) for x in (world.logp, world.old, world.advantages))
    loss = padded_policy_loss(logp, old, advantages, ~logp.isnan(), config=config).loss
    assert float(loss) == pytest.approx(expected.sum() / 5)  # its own aggregation: a sum for each of 5 sequences


def test_invalid_losses_and_options_raise_errors_that_name_the_fault(own: Path) -> None:
    with pytest.raises(UserError, match="plain function"):
        find(LossSettings(name=f"{own}:plain"))
    with pytest.raises(UserError, match=r"loss\.options\.pover: .*did you mean 'power'"):
        find(LossSettings(name=f"{own}:squares", options={"pover": 1.0}))
    with pytest.raises(UserError, match=r"loss\.options\.lo: .*did you mean 'low'"):
        find(LossSettings(name="clip_cov", options={"lo": 1.0}))
    with pytest.raises(UserError, match=r"loss\.options\.share: .*known are none"):
        find(LossSettings(name="ppo", options={"share": 1.0}))
    with pytest.raises(UserError, match=r"loss\.name: unknown value 'clip-cov'; did you mean 'clip_cov'"):
        find(LossSettings(name="clip-cov"))
    with pytest.raises(ValueError, match="precompute"):
        policy_loss("lonely", scope="update")
    with pytest.raises(ValueError, match="precompute"):
        policy_loss("curious", precompute=lambda tokens, settings: tokens.logp)
    with pytest.raises(ValueError, match="unknown scope 'batch'; known are sequence, token, update"):
        policy_loss("wide", scope="batch", precompute=lambda tokens, settings: tokens.logp)  # type: ignore[arg-type]
