"""Tests of the critic, of KL penalties in the reward and of the adaptive KL coefficient, against plain references."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gleanrl.algorithms.batch import Batch, Sample, SampleSet, assign_advantages, build, build_samples
from gleanrl.config.settings import CreditSettings, CriticSettings, LearnerSettings, LossSettings
from gleanrl.learners.critic import Critic
from gleanrl.learners.engine import LocalEngine
from gleanrl.learners.torch import KlCoefficient, TorchLearner
from gleanrl.utils.errors import UserError
from tests.builders import Member, checkpoint_tensors, make_group, random_groups, tiny_model
from tests.strategies import NIGHTLY

GAE = CreditSettings(estimator="gae", options={"gamma": 0.9, "lam": 0.8})
GROUPS = 4


def make_learner(critic: CriticSettings | None, loss: LossSettings | None = None, **options: Any) -> TorchLearner:
    model = options.pop("model", None)
    return TorchLearner(
        model if model is not None else tiny_model(0, torch.float64),
        LearnerSettings.model_validate(options),
        loss or LossSettings(),
        total_steps=50,
        groups_per_step=GROUPS,
        pad_token=0,
        temperature=1.0,
        critic=critic,
    )


def drafted(seed: int) -> SampleSet:
    return build_samples(random_groups(np.random.default_rng(seed), GROUPS), 128)


def with_credit(learner: TorchLearner, work: SampleSet, settings: CreditSettings = GAE) -> Batch:
    return assign_advantages(work, settings, learner.loss, 128, asyncio.run(learner.estimate(work.samples)))


def shaken(learner: TorchLearner) -> Critic:
    """Return the learner's critic after giving its head random weights, since a new one predicts 0."""
    assert isinstance(learner.engine, LocalEngine)
    critic = learner.engine.backend.critic
    assert critic is not None
    with torch.no_grad():
        torch.nn.init.normal_(critic.head.weight, std=0.5, generator=torch.Generator().manual_seed(1))
        critic.head.bias.fill_(0.3)
    return critic


def plain_values(body: Any, critic: Critic, sample: Sample) -> Tensor:
    """Return the values of one sample, computed alone: that of the state before each token, and 0 for the first."""
    ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    hidden = body(input_ids=ids).last_hidden_state[0]
    values = hidden.double() @ critic.head.weight[0] + critic.head.bias[0]
    return torch.cat([values.new_zeros(1), values[:-1]])


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("episodes", [1, 1000])
def test_a_batch_of_one_episode_and_one_of_a_thousand_are_learned_from_with_turn_rewards(
    episodes: int, estimator: str
) -> None:
    random = np.random.default_rng(episodes)
    group = make_group(0, [Member(float(n % 3), turns=(2, 3, 1)) for n in range(episodes)], random)
    trajectories = []
    for trajectory in group.trajectories:
        given = iter([0.5, None, -0.25])
        turns = [replace(t, reward=next(given)) if t.sampled else t for t in trajectory.segments[0]]
        trajectories.append(replace(trajectory, segments=(tuple(turns),)))
    groups = [replace(group, trajectories=tuple(trajectories))]
    learner = TorchLearner(
        tiny_model(),
        LearnerSettings(tokens_per_microbatch=4096),
        LossSettings(),
        total_steps=50,
        groups_per_step=1,
        pad_token=0,
        temperature=1.0,
        critic=CriticSettings() if estimator == "gae" else None,
    )
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    credit = CreditSettings(estimator=estimator)
    metrics = asyncio.run(learner.update(with_credit(learner, build_samples(groups, 128), credit)))
    assert metrics["tokens/trained"] == 6 * episodes
    assert all(np.isfinite(value) for value in metrics.values())
    assert any(not torch.equal(before[name], tensor) for name, tensor in learner.weights().items())
    if estimator == "gae":  # with gamma and lam 1, a return is what is earned from the token on
        returns = [[score] * 2 + [score - 0.5] * 4 for score in (float(n % 3) for n in range(episodes))]
        assert metrics["critic/return"] == pytest.approx(np.mean(returns), abs=1e-5)


@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_the_value_of_a_token_is_that_of_the_state_before_it(kind: Any, budget: int) -> None:
    learner = make_learner(CriticSettings(model=kind), tokens_per_microbatch=budget)
    critic, work = shaken(learner), drafted(0)
    body = learner.engine.backend.model.model if critic.body is None else critic.body  # type: ignore[attr-defined]
    for sample, opinion in zip(work.samples, asyncio.run(learner.estimate(work.samples)), strict=True):
        assert opinion.values is not None
        expected = np.where(sample.mask, plain_values(body, critic, sample).detach().numpy(), 0)
        np.testing.assert_allclose(opinion.values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_new_critic_predicts_zero_and_leaves_the_policy_unchanged(kind: Any) -> None:
    model = tiny_model(0, torch.float64)
    before = {name: p.clone() for name, p in model.named_parameters()}
    learner = make_learner(CriticSettings(model=kind), model=model)
    assert not any(o.values.any() for o in asyncio.run(learner.estimate(drafted(0).samples)))  # type: ignore[union-attr]
    assert learner.weights().keys() == before.keys()  # published weights contain no critic
    assert all(torch.equal(learner.weights()[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_values_are_not_rounded_where_the_model_computes_in_bfloat16(kind: Any) -> None:
    model = tiny_model(0)
    learner = TorchLearner(
        model,
        LearnerSettings(),
        LossSettings(),
        total_steps=50,
        groups_per_step=GROUPS,
        pad_token=0,
        temperature=1.0,
        critic=CriticSettings(model=kind),
        compute_dtype=torch.bfloat16,
    )
    shaken(learner).head.bias.data.fill_(50.0)  # around 50, numbers of bfloat16 are 0.25 apart
    work = drafted(0)
    values = [o.values[s.mask] for s, o in zip(work.samples, asyncio.run(learner.estimate(work.samples)), strict=True)]  # type: ignore[index]
    steps = np.concatenate(values) / 0.25
    assert (abs(steps - steps.round()) > 0.01).mean() > 0.5


@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("correction", ["none", "mask"])
@settings(max_examples=8 if NIGHTLY else 3, phases=[Phase.reuse, Phase.generate])  # shrinking would take minutes
@given(seed=st.integers(0, 2**32 - 1), budget=st.sampled_from([1, 60, 10_000]))
def test_the_gradient_of_the_value_loss_equals_the_naive_one(
    kind: Any, clip: float | None, correction: Any, seed: int, budget: int
) -> None:
    """The reference adds up one token at a time; advantages of 0 remove the policy loss.

    Tokens that the correction leaves out have no value loss, since they are not in the denominator either.
    """
    loss = LossSettings(correction=correction, correction_cap=1.05)
    critic_settings = CriticSettings(model=kind, clip=clip, coefficient=0.7)
    learner = make_learner(critic_settings, loss, tokens_per_microbatch=budget, old_logprobs="recompute")
    critic = shaken(learner)
    batch = with_credit(learner, drafted(seed))
    if not batch.samples:
        return
    random = np.random.default_rng(seed)
    quiet = [
        replace(
            sample,
            advantages=np.zeros_like(sample.advantages),
            values=sample.values + random.normal(0, 0.1, sample.tokens.size).astype(np.float32),  # type: ignore[operator]
            proximal=sample.behaviour + random.normal(0, 0.05, sample.tokens.size).astype(np.float32),
        )
        for sample in batch.samples
    ]
    learner.engine.backward(quiet)
    ours = [p.grad.clone() for p in (*critic.parameters, *learner.engine.backend.parameters)]  # type: ignore[attr-defined, union-attr]
    learner.engine.discard()
    policy = learner.engine.backend.parameters  # type: ignore[attr-defined]
    body = learner.engine.backend.model.model if critic.body is None else critic.body  # type: ignore[attr-defined]
    total = torch.zeros((), dtype=torch.float64)
    for sample in quiet:
        values = plain_values(body, critic, sample)
        for t in sample.mask.nonzero()[0]:
            ratio = np.exp(float(sample.old[t]) - float(sample.behaviour[t]))
            if correction == "mask" and not 0.5 <= ratio <= 1.05:
                continue
            new, old, target = values[t], float(sample.values[t]), float(sample.returns[t])  # type: ignore[index]
            error = (new - target) ** 2
            if clip is not None:
                error = torch.maximum(error, (new.clamp(old - clip, old + clip) - target) ** 2)
            total = total + 0.5 * float(sample.weights[t]) * error
    total.backward()
    theirs = [p.grad for p in critic.parameters]  # the coefficient is a factor of the policy's gradient only
    theirs += [0.7 * p.grad if kind == "shared" and p.grad is not None else p.grad for p in policy]
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if wanted is None else wanted, rtol=1e-5, atol=1e-8)


def test_advantages_and_returns_run_over_a_trajectory_and_all_its_segments() -> None:
    """Two segments of a trajectory count as one sequence of time steps; GAE is computed by hand."""
    learner = make_learner(CriticSettings())
    shaken(learner)
    group = make_group(0, [Member(1.0, (2, 1), segments=2), Member(0.0, (1,))], np.random.default_rng(0))
    work = build_samples([group], 128)
    estimates = asyncio.run(learner.estimate(work.samples))
    settings_ = CreditSettings(estimator="gae", options={"gamma": 0.9, "lam": 0.8, "whiten": False})
    samples = assign_advantages(work, settings_, learner.loss, 128, estimates).samples
    values = np.concatenate([o.values[s.mask] for s, o in zip(work.samples[:2], estimates, strict=False)])  # type: ignore[index]
    rewards, advantage, following, expected = [0.0, 0.0, 1.0], 0.0, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values.tolist()), strict=True):
        advantage = reward + 0.9 * following - value + 0.9 * 0.8 * advantage
        following = value
        expected.append(advantage)
    got = np.concatenate([s.advantages[s.mask] for s in samples[:2]])
    np.testing.assert_allclose(got, expected[::-1], rtol=1e-5)
    returns = np.concatenate([s.returns[s.mask] for s in samples[:2]])  # type: ignore[index]
    np.testing.assert_allclose(returns, got + values, rtol=1e-5)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_critic_learns_the_rewards_of_trajectories(kind: Any) -> None:
    random = np.random.default_rng(3)
    groups = [make_group(i, [Member(float(i % 2)), Member(float(i % 2))], random) for i in range(GROUPS)]
    learner = make_learner(
        CriticSettings(model=kind, lr=1e-2, clip=None), lr=3e-3, model=tiny_model(0), updates_per_step=1
    )
    work = build_samples(groups, 128)
    metrics = {}
    for _ in range(40):
        metrics = asyncio.run(learner.update(with_credit(learner, work)))
    assert metrics["critic/explained_variance"] > 0.8
    assert metrics["critic/loss"] < 0.05


def test_critic_warm_up_changes_the_critic_only() -> None:
    learner = make_learner(CriticSettings(warmup_steps=2))
    critic = learner.engine.backend.critic  # type: ignore[attr-defined]
    for step in range(3):
        policy = {name: p.clone() for name, p in learner.weights().items()}
        head = critic.head.weight.clone()
        asyncio.run(learner.update(with_credit(learner, drafted(1))))
        moved = any(not torch.equal(policy[name], p) for name, p in learner.weights().items())
        assert moved == (step == 2)
        assert not torch.equal(head, critic.head.weight)


@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("lora", [0, 4])
def test_a_loaded_critic_continues_bit_for_bit(tmp_path: Path, kind: Any, lora: int) -> None:
    def learner() -> TorchLearner:
        loss = LossSettings(kl_coefficient=0.1, kl_in="reward", kl_target=0.01, kl_horizon=50)
        return make_learner(CriticSettings(model=kind), loss, model=tiny_model(0), lora_rank=lora)

    whole, first, second = learner(), learner(), learner()
    for each in (whole, first):
        asyncio.run(each.update(with_credit(each, drafted(1))))
    first.save(tmp_path / "checkpoint")
    second.load(tmp_path / "checkpoint")
    for seed in (2, 3):
        metrics = [asyncio.run(each.update(with_credit(each, drafted(seed)))) for each in (whole, second)]
        assert metrics[0]["loss/kl_coefficient"] == metrics[1]["loss/kl_coefficient"]
    for each, name in ((whole, "whole"), (second, "second")):
        each.save(tmp_path / name)
    one, other = (checkpoint_tensors(tmp_path / name) for name in ("whole", "second"))
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_checkpoint_without_the_critic_is_refused(tmp_path: Path) -> None:
    make_learner(None).save(tmp_path / "checkpoint")
    with pytest.raises(UserError, match="another model: critic/"):
        make_learner(CriticSettings()).load(tmp_path / "checkpoint")


# --- the KL in the reward ---------------------------------------------------------------------------
@pytest.mark.parametrize("old", ["sampler", "recompute"])
def test_the_kl_penalty_is_subtracted_from_the_rewards_of_fresh_tokens(old: Any) -> None:
    loss = LossSettings(kl_coefficient=0.3, kl_in="reward", kl="k3")
    learner = make_learner(None, loss, old_logprobs=old)
    asyncio.run(learner.update(build(drafted(9).groups, CreditSettings(), loss, 128)))  # leave the reference
    work = drafted(4)
    estimates = asyncio.run(learner.estimate(work.samples))
    policy, reference = learner.engine.backend.model, learner.engine.backend.reference  # type: ignore[attr-defined]
    for sample, opinion in zip(work.samples, estimates, strict=True):
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        logp, ref = (m(input_ids=ids).logits[0].log_softmax(-1).detach() for m in (policy, reference))
        assert opinion.penalty is not None
        for t in range(sample.tokens.size):
            expected = 0.0
            if sample.mask[t] and not sample.off_policy:
                old_logp = float(sample.behaviour[t]) if old == "sampler" else float(logp[t - 1, sample.tokens[t]])
                d = old_logp - float(ref[t - 1, sample.tokens[t]])
                expected = 0.3 * min(np.exp(-d) + d - 1, 10)
            assert opinion.penalty[t] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    plain = CreditSettings(estimator="dr_grpo")
    batch = assign_advantages(work, plain, loss, 128, estimates)
    lowered = {}
    for sample, opinion in zip(work.samples, estimates, strict=True):
        lowered[sample.trajectory] = lowered.get(sample.trajectory, 0.0) - float(opinion.penalty.sum())  # type: ignore[union-attr]
    for sample in batch.samples:  # reward minus the mean over fresh members, both after the penalties
        peers = [m for m in work.members if m.group == sample.group and not m.off_policy]
        scores = [p.trajectory.score.value + lowered.get(p.index, 0.0) for p in peers]
        own = work.members[sample.trajectory].trajectory.score.value + lowered.get(sample.trajectory, 0.0)
        expected = own - (sum(scores) / len(scores) if len(scores) > 1 else 0.0)
        np.testing.assert_allclose(sample.advantages[sample.mask], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_kl_coefficient_rises_above_its_target_kl_and_falls_below(where: Any) -> None:
    settings_ = LossSettings(kl_coefficient=0.1, kl_target=0.02, kl_horizon=100, kl_in=where)
    far, near = KlCoefficient(settings_), KlCoefficient(settings_)
    for coefficient, kl in ((far, 1.0), (near, 0.001)):
        if where == "reward":
            coefficient.measure(kl * 7, 7)
        metrics = coefficient.adapt(kl if where == "loss" else None, 20)
        assert metrics["loss/kl_coefficient"] == 0.1
    assert far.value == pytest.approx(0.1 * (1 + 0.2 * 20 / 100))
    assert near.value == pytest.approx(0.1 * (1 - 0.2 * 20 / 100))


def test_a_step_of_more_trajectories_than_the_horizon_changes_the_coefficient_by_a_fifth() -> None:
    coefficient = KlCoefficient(LossSettings(kl_coefficient=0.1, kl_target=0.05, kl_horizon=64))
    for step in range(1, 4):
        coefficient.adapt(0.0, 512)
        assert coefficient.value == pytest.approx(0.1 * 0.8**step)


def test_the_kl_coefficient_is_constant_without_a_target() -> None:
    fixed = KlCoefficient(LossSettings(kl_coefficient=0.1))
    fixed.adapt(5.0, 100)
    assert fixed.value == 0.1
