"""Tests of TorchLearner: updates equal a naive float64 loop, and checkpoints continue bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gleanrl.algorithms.batch import Batch, GroupSamples, Sample, build
from gleanrl.algorithms.loss import (
    AGGREGATIONS,
    Tokens,
    aggregation_of,
    normaliser,
    policy_loss,
    replay_loss,
    scope_of,
)
from gleanrl.config.settings import CreditSettings, LearnerSettings, LossSettings
from gleanrl.learners.models import adapter_weights, add_adapters
from gleanrl.learners.torch import MAX_SKIPPED_IN_A_ROW, TorchLearner
from gleanrl.schedule.step_metrics import group_metrics
from gleanrl.tracking.hints import equal_scores
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from tests.builders import Member, applied_gradients, make_group, random_groups, tiny_model
from tests.strategies import NIGHTLY, examples

GROUPS, STEPS = 4, 6


def make_learner(loss: LossSettings | None = None, *, model: Any = None, **options: Any) -> TorchLearner:
    own = ("device_lock", "timeline", "tokenizer", "temperature", "groups_per_step", "critic", "trains", "reference")
    keywords = {k: options.pop(k) for k in own if k in options}
    return TorchLearner(
        model if model is not None else tiny_model(),
        LearnerSettings.model_validate(options),
        loss or LossSettings(),
        total_steps=STEPS,
        pad_token=0,
        **{"temperature": 1.0, "groups_per_step": GROUPS, **keywords},
    )


def make_batch(seed: int, loss: LossSettings | None = None, count: int = GROUPS) -> Batch:
    return build(random_groups(np.random.default_rng(seed), count), CreditSettings(), loss or LossSettings(), 128)


def update(learner: TorchLearner, *batches: Batch) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for batch in batches:
        metrics = asyncio.run(learner.update(batch))
    return metrics


def values(learner: TorchLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def recomputed(sample: Sample) -> Sample:
    """Return ``sample`` with proximal log-probs that differ a little from its behaviour log-probs."""
    random = np.random.default_rng(sample.tokens.sum())
    drift = random.normal(0, 0.1, sample.tokens.size).astype(np.float32)
    return replace(sample, proximal=(sample.behaviour + drift) * sample.mask)


# --- one step against the naive loop ------------------------------------------------------------
def naive_loss(model: Any, reference: Any, samples: Sequence[Sample], batch: Batch, loss: LossSettings) -> Tensor:
    """Return the loss computed one sample and one token at a time, from the definitions."""
    lengths: dict[int, int] = {}
    for sample in samples:
        lengths[sample.trajectory] = lengths.get(sample.trajectory, 0) + int(sample.mask.sum())
    tokens, sequences = (sum(getattr(part, key) for part in batch.parts) for key in ("tokens", "sequences"))
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        distribution = model(input_ids=ids).logits[0].log_softmax(-1)
        frozen = reference(input_ids=ids).logits[0].log_softmax(-1).detach()
        for t in sample.mask.nonzero()[0]:
            row, target, advantage = distribution[t - 1], int(sample.tokens[t]), float(sample.advantages[t])
            ratio = (row[target] - float(sample.behaviour[t])).exp()
            high = loss.replay_clip_high if sample.off_policy else loss.clip_high
            value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - loss.clip_low, 1 + high))
            if advantage < 0 and loss.dual_clip is not None:
                value = torch.minimum(value, torch.tensor(-advantage * loss.dual_clip, dtype=torch.float64))
            if not sample.off_policy:
                d = row[target] - frozen[t - 1, target]
                value = value + loss.kl_coefficient * ((-d).exp() + d - 1).clamp(max=10)
                value = value + loss.entropy_coefficient * (row.exp() * row).sum()
            weight = {
                "token-mean": 1 / tokens,
                "seq-mean-token-sum": 1 / sequences,
                "seq-mean-token-mean": float(np.float32(1 / lengths[sample.trajectory])) / sequences,  # stored so
                "seq-mean-token-sum-norm": 1 / 128 / sequences,
            }[loss.aggregation]
            total = total + weight * value
    return total


@settings(max_examples=examples(20), phases=[Phase.reuse, Phase.generate])  # shrinking would take minutes
@given(
    seed=st.integers(0, 2**32 - 1),
    aggregation=st.sampled_from(AGGREGATIONS),
    kl=st.sampled_from([0.0, 0.3]),
    entropy=st.sampled_from([0.0, 0.2]),
    data=st.data(),
)
def test_a_step_equals_the_naive_one_for_any_chunks_and_micro_batches(
    seed: int, aggregation: Any, kl: float, entropy: float, data: st.DataObject
) -> None:
    loss = LossSettings(aggregation=aggregation, kl_coefficient=kl, entropy_coefficient=entropy)
    batch = make_batch(seed, loss)
    reference, naive = tiny_model(1, torch.float64), tiny_model(0, torch.float64)
    learner = TorchLearner(
        tiny_model(0, torch.float64),
        LearnerSettings(tokens_per_microbatch=data.draw(st.integers(1, 120))),
        loss,
        total_steps=STEPS,
        groups_per_step=GROUPS,
        pad_token=0,
        temperature=1.0,
        reference=reference,
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, GROUPS - 1))))
    bounds = [0, *cuts, GROUPS]
    pieces = [batch.cut(start, stop) for start, stop in itertools.pairwise(bounds)]
    applied = applied_gradients(learner)
    metrics = update(learner, *pieces)
    if not batch.samples:
        assert metrics["updates/empty"] == 1
        close(values(learner), values(make_learner(model=naive)), 0)
        return
    naive_loss(naive, reference, batch.samples, batch, loss).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in naive.parameters() if p.grad is not None])
    assert metrics["learner/grad_norm"] == pytest.approx(float(norm), rel=1e-6, abs=1e-12)
    (gradients,) = applied
    for (name, parameter), ours in zip(naive.named_parameters(), gradients, strict=True):
        theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def mean_replayed_log_ratio(tokens: Tokens, settings: LossSettings) -> Tensor:
    return tokens.log_ratio.mean().expand_as(tokens.logp)


@replay_loss("over the update, for a test", scope="update", precompute=mean_replayed_log_ratio)
def OVER_THE_UPDATE(tokens: Tokens, settings: LossSettings) -> Tensor:
    assert tokens.precomputed is not None
    return -tokens.advantages * (tokens.log_ratio - tokens.precomputed).exp()


LOSSES: dict[str, dict[str, Any]] = {
    **{mode: {"aggregation": mode} for mode in AGGREGATIONS},
    **{name: {"name": name} for name in ("gspo", "cispo", "gpg", "reinforce", "clip_cov", "kl_cov")},
    "shape": {"replay_mode": "shape"},
    "replayed, over the update": {"replay_mode": OVER_THE_UPDATE.name},
    "replayed, over the update, corrected": {"replay_mode": OVER_THE_UPDATE.name, "correction": "mask"},
    **{
        f"{correction} {level}": {"correction": correction, "correction_level": level, "correction_cap": 1.05}
        for correction in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    },
    "mask, mean of means": {"correction": "mask", "correction_cap": 1.02, "aggregation": "seq-mean-token-mean"},
    "reinforce, corrected": {"name": "reinforce", "correction": "truncate", "correction_level": "sequence"},
    "gspo, corrected": {"name": "gspo", "correction": "mask", "correction_level": "geometric"},
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6 if NIGHTLY else 2)
@given(seed=st.integers(0, 2**32 - 1), old=st.sampled_from(["recompute", "loglinear"]), data=st.data())
def test_gradients_do_not_depend_on_micro_batches_or_chunks(
    name: str, seed: int, old: str, data: st.DataObject
) -> None:
    loss = LossSettings.model_validate(LOSSES[name])
    batch = make_batch(seed, loss)
    batch = Batch(tuple(replace(part, samples=tuple(map(recomputed, part.samples))) for part in batch.parts))

    def gradients(budget: int, bounds: list[int]) -> list[Tensor]:
        options = {"tokens_per_microbatch": budget, "old_logprobs": old}
        learner = make_learner(loss, model=tiny_model(0, torch.float64), **options)
        for start, stop in itertools.pairwise(bounds):
            learner.engine.backward(batch.cut(start, stop).samples, version=5)
        return [p.grad.clone() for p in learner.engine.backend.parameters]  # type: ignore[attr-defined]

    whole = gradients(10_000, [0, GROUPS])
    # A loss over a whole update never gets chunks.
    cuts = [] if scope_of(loss) == "update" else sorted(data.draw(st.sets(st.integers(1, GROUPS - 1))))
    for ours, theirs in zip(gradients(data.draw(st.integers(1, 120)), [0, *cuts, GROUPS]), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "name", [name for name in LOSSES if scope_of(LossSettings.model_validate(LOSSES[name])) != "update"]
)
@settings(max_examples=4 if NIGHTLY else 2)
@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(2, 3))
def test_gradients_and_denominators_of_ranks_add_up_to_the_whole(name: str, seed: int, ranks: int) -> None:
    """Each rank has the whole model and some of the groups; gradients and denominators are summed over ranks."""
    loss = LossSettings.model_validate(LOSSES[name])
    batch = make_batch(seed, loss)
    batch = Batch(tuple(replace(part, samples=tuple(map(recomputed, part.samples))) for part in batch.parts))

    def one_rank(parts: Sequence[GroupSamples]) -> tuple[list[Tensor], float]:
        learner = make_learner(loss, model=tiny_model(0, torch.float64), old_logprobs="recompute")
        seen = learner.engine.backward([sample for part in parts for sample in part.samples], version=5)
        tokens = sum(part.tokens for part in parts) - seen.left_out_tokens
        sequences = sum(part.sequences for part in parts) - seen.left_out_sequences
        gradients = [p.grad.clone() for p in learner.engine.backend.parameters]  # type: ignore[attr-defined]
        return gradients, normaliser(aggregation_of(loss), tokens, sequences)

    whole, denominator = one_rank(batch.parts)
    shares = [one_rank(batch.parts[rank::ranks]) for rank in range(ranks)]
    for index, gradient in enumerate(whole):
        total = sum(gradients[index] for gradients, _ in shares)
        torch.testing.assert_close(total, gradient, rtol=1e-9, atol=1e-11)
    assert sum(share for _, share in shares) == pytest.approx(denominator, abs=1e-4)


def test_samples_without_advantage_are_skipped_and_still_counted() -> None:
    random = np.random.default_rng(0)
    flat, mixed = make_group(0, [Member(1.0)] * 3, random), make_group(1, [Member(1.0), Member(0.0)], random)
    groups = [flat, mixed, flat, mixed]
    batch = build(groups, CreditSettings(), LossSettings(), 128)
    learner = make_learner()
    metrics = update(learner, batch)
    assert (metrics["samples/skipped"], metrics["samples/trained"]) == (6, 4)
    forced = make_learner(LossSettings(entropy_coefficient=1e-30))  # reaches every sample, changes nothing
    assert update(forced, batch)["samples/skipped"] == 0
    assert metrics["learner/grad_norm"] == pytest.approx(update(make_learner(), batch)["learner/grad_norm"])
    close(values(learner), values(forced), 1e-5)


@pytest.mark.parametrize("kind", ["policy", "replay"])
def test_an_own_loss_gets_samples_without_advantage_unless_it_is_zero_there(kind: str) -> None:
    random, register = np.random.default_rng(0), policy_loss if kind == "policy" else replay_loss
    flat = make_group(0, [Member(1.0), Member(1.0), Member(1.0, replayed=True)], random)
    found = {}
    for zero in (False, True):
        name = f"imitates, zero {zero}, of a test of {kind}"
        register(name, zero_without_advantage=zero)(lambda tokens, settings: -tokens.logp)
        loss = LossSettings.model_validate({"name" if kind == "policy" else "replay_mode": name})
        metrics = update(make_learner(loss), build([flat] * GROUPS, CreditSettings(), loss, 128))
        found[zero] = metrics["samples/trained"], metrics["learner/grad_norm"] > 0
    assert found == {False: (8 if kind == "policy" else 4, True), True: (0, False)}


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "gspo"},
        {"correction": "truncate", "correction_level": "sequence", "correction_cap": 1e6},
        {"correction": "truncate", "correction_level": "geometric", "correction_cap": 1e6},
    ],
)
def test_a_loss_of_whole_trajectories_gets_all_segments_of_those_with_an_advantage(loss: dict[str, Any]) -> None:
    credit = CreditSettings(estimator="reinforce_plus_plus", options={"across_turns": False, "whiten": False})
    members = [Member(1.0, (6, 6), segments=2), Member(0.0, (5, 3), segments=2)]
    groups = [make_group(i, members, np.random.default_rng(i)) for i in range(GROUPS)]
    gradients = []
    for entropy in (0.0, 1e-30):  # the entropy bonus reaches every sample, and changes nothing
        settings_ = LossSettings(entropy_coefficient=entropy, clip_low=50, clip_high=50, **loss)
        learner = make_learner(settings_, old_logprobs="recompute")
        applied = applied_gradients(learner)
        metrics = update(learner, build(groups, credit, settings_, 128))
        gradients.append(applied[0])
        assert metrics["samples/skipped"] == (0 if entropy else 2 * GROUPS)  # those of the member without a reward
    for skipped, every in zip(*gradients, strict=True):
        torch.testing.assert_close(skipped, every, rtol=1e-5, atol=1e-8)


def test_groups_of_equal_scores_are_no_cause_for_advice_where_their_parts_have_an_advantage() -> None:
    groups = []
    for i in range(8):
        group = make_group(i, [Member(1.0), Member(1.0)], np.random.default_rng(i))
        parts = ({"answer": 1.0, "form": 0.0}, {"answer": 0.0, "form": 1.0})
        given = zip(group.trajectories, parts, strict=True)
        members = tuple(replace(t, score=Score(1.0, parts=own)) for t, own in given)
        groups.append(replace(group, trajectories=members))
    for per_part, flat in (({}, 8), ({"answer": 1.0, "form": 0.2}, 0)):
        batch = build(groups, CreditSettings(per_part=per_part), LossSettings(), 128)
        metrics = group_metrics(groups) | update(make_learner(groups_per_step=8), batch)
        assert (metrics["groups/zero_variance"], metrics["groups/without_advantage"]) == (8, flat)
        assert (equal_scores(metrics) is None) == (not flat)


def test_a_step_with_zero_gradient_still_updates_the_weights_by_momentum() -> None:
    """The optimizer steps as with a gradient of zeros, so its momentum still moves the weights."""
    flat = make_group(0, [Member(1.0)] * 2, np.random.default_rng(0))
    learner = make_learner(lr=0.01)
    update(learner, make_batch(1))
    before = values(learner)
    metrics = update(learner, build([flat] * GROUPS, CreditSettings(), LossSettings(), 128))
    assert metrics["learner/grad_norm"] == 0
    assert metrics["updates/done"] == 1
    assert any(not torch.equal(before[name], tensor) for name, tensor in values(learner).items())


# --- what makes an update ------------------------------------------------------------------------
def test_updates_are_made_as_soon_as_their_groups_have_arrived_in_chunks() -> None:
    batch = make_batch(0, count=8)
    whole, chunked = (make_learner(updates_per_step=2, lr=0.01) for _ in range(2))
    assert update(whole, batch)["updates/done"] == 4
    done = [update(chunked, batch.cut(start, stop))["updates/done"] for start, stop in ((0, 1), (1, 5), (5, 6), (6, 8))]
    assert done == [0, 2, 1, 1]
    close(values(whole), values(chunked), 1e-5)
    with pytest.raises(UserError, match=r"learner\.updates_per_step = 3"):
        make_learner(updates_per_step=3)


def test_every_update_has_its_own_denominator() -> None:
    learner, batch = make_learner(lr=1e-30), make_batch(0)
    norms = [update(learner, batch)["learner/grad_norm"] for _ in range(3)]
    assert norms[0] > 0.01
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)


def test_the_learning_rate_follows_steps_not_chunks() -> None:
    learner = make_learner(
        lr=1.0, warmup_steps=2, decay="linear", min_lr_ratio=0.1, updates_per_step=2, max_grad_norm=1e-9
    )
    batch = make_batch(0)
    rates = [[update(learner, batch.cut(i, i + 2))["learner/lr"] for i in (0, 2)] for _ in range(STEPS)]
    expected = [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]
    np.testing.assert_allclose(rates, np.repeat(np.array(expected)[:, None], 2, axis=1), rtol=1e-6)


def test_epochs_repeat_over_whole_mini_batches() -> None:
    batch = make_batch(0)
    learner = make_learner(epochs=3, updates_per_step=2, lr=0.01)
    assert update(learner, batch)["updates/done"] == 6
    by_hand = make_learner(updates_per_step=2, lr=0.01)
    update(by_hand, batch, batch, batch)
    close(values(learner), values(by_hand), 1e-6)
    with pytest.raises(UserError, match=r"learner\.epochs = 3 needs whole mini-batches of 2 groups, but 1 came"):
        update(learner, batch.cut(0, 1))


def test_recomputed_log_probs_make_the_first_ratio_one_except_for_replayed_members() -> None:
    random = np.random.default_rng(0)
    groups = [make_group(i, [Member(1.0), Member(0.0), Member(1.0, replayed=True)], random) for i in range(GROUPS)]
    batch = build(groups, CreditSettings(), LossSettings(), 128)
    metrics = update(make_learner(old_logprobs="recompute"), batch)
    assert metrics["loss/ratio/min"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["loss/ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["loss/replayed/ratio/max"] > 1.01
    assert metrics["loss/mismatch"] > 0.1


def test_the_mismatch_of_replayed_tokens_does_not_depend_on_old_logprobs() -> None:
    random = np.random.default_rng(0)
    groups = [make_group(i, [Member(1.0), Member(0.0), Member(1.0, replayed=True)], random) for i in range(GROUPS)]
    batch = build(groups, CreditSettings(), LossSettings(), 128)
    learners = [make_learner(old_logprobs=mode) for mode in ("sampler", "recompute", "loglinear")]
    gaps = [update(learner, batch)["loss/replayed/mismatch"] for learner in learners]
    assert gaps[0] > 0.1
    assert gaps[1:] == pytest.approx([gaps[0]] * 2, rel=1e-6)


def test_the_sampler_mismatch_is_measured_before_the_first_update_of_a_step() -> None:
    random = np.random.default_rng(0)
    groups = [make_group(i, [Member(1.0), Member(0.0)], random) for i in range(GROUPS)]
    batch = build(groups, CreditSettings(), LossSettings(), 128)
    recomputed_ = update(make_learner(old_logprobs="recompute"), batch)["loss/mismatch"]
    assert update(make_learner(), batch)["loss/mismatch"] == pytest.approx(recomputed_, rel=1e-5)
    half = batch.cut(0, GROUPS // 2)
    first = update(make_learner(groups_per_step=GROUPS // 2), half)["loss/mismatch"]
    whole = make_learner(updates_per_step=2, lr=0.1)
    assert update(whole, batch)["loss/mismatch"] == first  # the drift of the first update does not count
    assert "loss/mismatch" in update(whole, batch)  # the next step


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 2**32 - 1), budget=st.integers(1, 120), data=st.data())
def test_loss_metrics_of_a_step_do_not_depend_on_chunks_or_micro_batches(
    seed: int, budget: int, data: st.DataObject
) -> None:
    batch = make_batch(seed)
    cuts = sorted(data.draw(st.sets(st.integers(1, GROUPS - 1), min_size=1)))
    pieces = [batch.cut(start, stop) for start, stop in itertools.pairwise([0, *cuts, GROUPS])]

    def described(learner: TorchLearner, *pieces: Batch) -> dict[str, float]:
        *before, last = [update(learner, piece) for piece in pieces]
        assert not [name for metrics in before for name in metrics if name.startswith("loss/")]
        return {name: value for name, value in last.items() if name.startswith("loss/")}

    whole, chunked = (
        make_learner(model=tiny_model(0, torch.float64), tokens_per_microbatch=tokens) for tokens in (10_000, budget)
    )
    for _ in range(2):
        assert described(chunked, *pieces) == pytest.approx(described(whole, batch), rel=1e-5)
    assert whole.step == chunked.step == 2


def test_loss_metrics_of_a_step_do_not_include_the_previous_step() -> None:
    learner, other = (make_learner(lr=1e-30) for _ in range(2))
    first, second = (update(learner, make_batch(seed)) for seed in (1, 2))
    expected = {name: value for name, value in update(other, make_batch(2)).items() if name.startswith("loss/")}
    assert {name: second[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert first["loss/policy"] != pytest.approx(second["loss/policy"], rel=1e-3)


def test_log_probs_equal_those_of_the_model_at_the_temperature() -> None:
    learner = make_learner(temperature=0.7)
    samples = make_batch(3).samples
    model: Any = tiny_model()
    for sample, score in zip(samples, asyncio.run(learner.logprobs(samples)), strict=True):
        logits = model(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0] / 0.7
        distribution = torch.distributions.Categorical(logits=logits[:-1])
        expected = distribution.log_prob(torch.from_numpy(sample.tokens[1:].copy())).detach().numpy()
        np.testing.assert_allclose(score.logprobs[1:], np.where(sample.mask[1:], expected, 0), atol=1e-5)
        entropy = distribution.entropy().detach().numpy()
        np.testing.assert_allclose(score.entropy[1:], np.where(sample.mask[1:], entropy, 0), atol=1e-5)


def test_training_raises_the_probability_of_rewarded_tokens() -> None:
    learner = make_learner(lr=3e-3)
    batch = make_batch(5)

    def gain() -> float:
        scores = asyncio.run(learner.logprobs(batch.samples))
        return sum(float((s.advantages * score.logprobs).sum()) for s, score in zip(batch.samples, scores, strict=True))

    before = gain()
    update(learner, *[batch] * STEPS)
    assert gain() > before + 0.5


# --- what can go wrong -----------------------------------------------------------------------------
def test_a_gradient_that_is_not_finite_is_skipped_and_several_stop_the_run() -> None:
    batch = make_batch(0)
    poisoned = [
        replace(s, advantages=np.where(s.mask, np.float32("nan"), 0).astype(np.float32)) for s in batch.samples[:1]
    ]
    bad = Batch((replace(batch.parts[0], samples=tuple(poisoned)), *batch.parts[1:]))
    learner = make_learner(lr=0.01)
    before = values(learner)
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        metrics = update(learner, bad)
        assert (metrics["updates/skipped"], metrics["updates/done"]) == (1, 0)
        close(values(learner), before, 0)
    assert update(learner, batch)["updates/done"] == 1  # resets the count
    with pytest.raises(
        UserError, match=r"gradient was not finite in 5 updates in a row .* lower learner\.lr \(now 0\.01\)"
    ):
        update(learner, *[bad] * MAX_SKIPPED_IN_A_ROW)
    assert all(tensor.isfinite().all() for tensor in values(learner).values())


def test_a_cancelled_update_waits_for_its_thread() -> None:
    learner = make_learner()
    finish, finished = threading.Event(), threading.Event()

    def slow(samples: Sequence[Sample]) -> list[Any]:
        finish.wait(5)
        finished.set()
        return []

    learner.engine.score = slow  # type: ignore[method-assign]

    async def main() -> None:
        task = asyncio.create_task(learner.logprobs([]))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        finish.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert finished.is_set()

    asyncio.run(main())


def test_an_update_takes_the_device_lock_and_records_its_span() -> None:
    log: list[Any] = []

    class Recorder:
        def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
            assert end >= start
            log.append((kind, tags))

    @contextlib.asynccontextmanager
    async def device_lock(kind: str) -> AsyncIterator[None]:
        log.append(f"+{kind}")
        yield
        log.append(f"-{kind}")

    update(make_learner(device_lock=device_lock, timeline=Recorder()), make_batch(0))
    assert log == ["+train", ("train", {"step": 0}), "-train"]


# --- variants of the engine ------------------------------------------------------------------------
def test_activation_checkpointing_changes_no_gradient() -> None:
    batch = make_batch(0)
    plain, checkpointed = (make_learner(lr=0.01, activation_checkpointing=on) for on in (False, True))
    passes: list[list[int]] = [[], []]
    for learner, counted in zip((plain, checkpointed), passes, strict=True):
        layer = learner.engine.model.model.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
    norms = [update(learner, batch)["learner/grad_norm"] for learner in (plain, checkpointed)]
    assert len(passes[1]) == 2 * len(passes[0]) > 0
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    close(values(plain), values(checkpointed), 1e-5)


def test_bfloat16_compute_is_close_and_keeps_float32_weights() -> None:
    batch = make_batch(0)
    exact = make_learner()
    rough = TorchLearner(
        tiny_model(),
        LearnerSettings(),
        LossSettings(),
        total_steps=STEPS,
        groups_per_step=GROUPS,
        pad_token=0,
        temperature=1.0,
        compute_dtype=torch.bfloat16,
    )
    norms = [update(learner, batch)["learner/grad_norm"] for learner in (exact, rough)]
    assert norms[0] != norms[1]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)
    assert {tensor.dtype for tensor in rough.weights().values()} == {torch.float32}


def test_only_adapters_are_trained_and_published_weights_are_merged() -> None:
    pytest.importorskip("peft")
    loss = LossSettings(kl_coefficient=0.1)
    learner = make_learner(loss, lora_rank=4, lr=0.05)
    batch = make_batch(0, loss)
    first, second = update(learner, batch), update(learner, batch)
    assert first["loss/reference_kl"] == 0
    assert second["loss/reference_kl"] > 1e-4  # against the base, adapters off
    start, merged = dict(tiny_model().named_parameters()), values(learner)
    assert merged.keys() == start.keys()
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, start[name])}
    assert moved
    assert all("proj" in name for name in moved)
    peft_model: Any = learner.engine.backend.model  # type: ignore[attr-defined]
    tokens = torch.arange(1, 12)[None]
    published = tiny_model(9)
    published.load_state_dict(merged, strict=False)
    torch.testing.assert_close(published(tokens).logits, peft_model(tokens).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="no adapters"):
        make_learner().export_adapters(Path("adapters"), "base")
    # The embedding and the head of this model are one tensor. Adapters of one module cannot be merged into it.
    for targets in ("nonsense", "q_proj,nonsense", "embed_tokens", "q_proj,lm_head"):
        with pytest.raises(UserError, match=rf"learner\.lora_targets = '{targets}'"):
            make_learner(lora_rank=4, lora_targets=targets)


def test_adapters_of_experts_are_refused_and_those_of_attention_are_not() -> None:
    pytest.importorskip("peft")
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8}
    mixture = Qwen3MoeConfig(**sizes)
    for targets in ("all-linear", "q_proj,gate_proj,up_proj"):
        with pytest.raises(UserError, match=rf"learner\.lora_targets = '{targets}': .*mlp\.experts joins"):
            add_adapters(Qwen3MoeForCausalLM(mixture), LearnerSettings(lora_rank=2, lora_targets=targets), 0)
    adapted = add_adapters(Qwen3MoeForCausalLM(mixture), LearnerSettings(lora_rank=2, lora_targets="q_proj"), 0)
    assert len(adapter_weights(adapted)) == 2


# --- checkpoints and exports -----------------------------------------------------------------------
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "reference": ({"kl_coefficient": 0.1}, {}),
    "lora": ({"kl_coefficient": 0.1}, {"lora_rank": 2}),
    "schedule": ({}, {"warmup_steps": 3, "decay": "cosine", "updates_per_step": 2, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loaded_learner_continues_bit_for_bit(tmp_path: Path, variant: str) -> None:
    loss, options = LossSettings.model_validate(VARIANTS[variant][0]), VARIANTS[variant][1]
    batches = [make_batch(seed, loss) for seed in range(4)]
    straight = make_learner(loss, lr=0.01, **options)
    last = update(straight, *batches)
    first = make_learner(loss, lr=0.01, **options)
    update(first, *batches[:2])
    first.save(tmp_path / "checkpoint")
    base = tiny_model(0 if variant == "lora" else 7)  # adapters are saved without their base
    second = make_learner(loss, model=base, lr=0.01, **options)
    second.load(tmp_path / "checkpoint")
    assert all(torch.equal(first.weights()[name], tensor) for name, tensor in second.weights().items())
    assert update(second, *batches[2:])["learner/lr"] == last["learner/lr"]
    for name, tensor in straight.weights().items():
        assert torch.equal(second.weights()[name], tensor), name


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that torch makes on the CPU and that still exist."""

    now = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, out = tree_leaves((args, kwargs)), func(*args, **(kwargs or {}))
        known = {id(tensor.untyped_storage()) for tensor in given if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in known:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return out

    def free(self, size: int) -> None:
        self.now -= size


def test_loading_holds_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    loss = LossSettings(kl_coefficient=0.1)  # with a reference model
    learner = make_learner(loss, model=tiny_model(hidden=64))
    update(learner, make_batch(0, loss))
    learner.save(tmp_path)
    other = make_learner(loss, model=tiny_model(3, hidden=64))
    sizes = [p.numel() for p in other.engine.model.parameters()]
    with Allocations() as allocated:
        other.load(tmp_path)
    close(values(other), values(learner), 0)
    moments = 2 * 4 * sum(sizes)
    assert allocated.now < moments + 1000
    assert allocated.peak < moments + 3 * 4 * max(sizes)  # a tensor is read before it is copied to its place


def test_returning_restores_weights_and_optimizer_and_halves_the_learning_rate(tmp_path: Path) -> None:
    batches = [make_batch(seed) for seed in range(4)]
    learner, straight = make_learner(lr=0.01), make_learner(lr=0.005)
    rate = update(learner, batches[0])["learner/lr"]
    learner.save(tmp_path / "good")
    saved = {name: tensor.clone() for name, tensor in learner.weights().items()}
    update(learner, *batches[1:3])
    learner.return_to(tmp_path / "good")
    assert all(torch.equal(learner.weights()[name], tensor) for name, tensor in saved.items())
    assert learner.step == 3
    learner.save(tmp_path / "later")
    straight.load(tmp_path / "good")
    update(straight, batches[3])
    for one in (learner, make_learner(lr=0.01)):
        if one is not learner:
            one.load(tmp_path / "later")
        assert update(one, batches[3])["learner/lr"] == rate / 2
        # The optimizer is that of the checkpoint too: a learner with half the rate makes the same update from there.
        for name, tensor in straight.weights().items():
            torch.testing.assert_close(one.weights()[name], tensor, rtol=0, atol=1e-7)


def test_loading_restores_the_random_state(tmp_path: Path) -> None:
    learner = make_learner()
    learner.save(tmp_path)
    drawn = torch.rand(4)
    torch.rand(10)
    learner.load(tmp_path)
    assert torch.equal(torch.rand(4), drawn)


def test_a_half_consumed_mini_batch_cannot_be_saved(tmp_path: Path) -> None:
    learner = make_learner()
    update(learner, make_batch(0).cut(0, 1))
    with pytest.raises(RuntimeError, match="half consumed"):
        learner.save(tmp_path)


@pytest.mark.parametrize("name", ["tensors/__0_0.distcp", "tensors/.metadata", "learner.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path, name: str, damage: str) -> None:
    loss = LossSettings(kl_coefficient=0.1)
    learner = make_learner(loss)
    update(learner, make_batch(0, loss))
    learner.save(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    if damage == "remove":
        (tmp_path / name).unlink()
    other = make_learner(loss, model=tiny_model(5))
    before = values(other)
    with pytest.raises(UserError, match=name.partition("/")[0]) as caught:
        other.load(tmp_path)
    assert "\n" not in str(caught.value)
    close(values(other), before, 0)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    make_learner().save(tmp_path)
    with pytest.raises(UserError, match=r"another model: .* \(40, 16\) in the file, \(40, 32\)"):
        make_learner(model=tiny_model(hidden=32)).load(tmp_path)
    with pytest.raises(UserError, match=r"another model: .*learner\.lora_"):
        make_learner(lora_rank=2).load(tmp_path)
    with pytest.raises(UserError, match="another model: reference/"):
        make_learner(LossSettings(kl_coefficient=0.1)).load(tmp_path)
    with pytest.raises(UserError, match=r"learner\.json: missing"):
        make_learner().load(tmp_path / "nowhere")


@pytest.mark.parametrize("trains", [True, False])
def test_adapters_of_another_base_model_are_refused_and_nothing_is_loaded(tmp_path: Path, trains: bool) -> None:
    learner = make_learner(lora_rank=2, lr=0.01)
    update(learner, make_batch(0))
    learner.save(tmp_path)
    base = tiny_model(0)
    with torch.no_grad():
        next(base.parameters())[3, 3] += 1e-4
    other = make_learner(model=base, lora_rank=2, trains=trains)
    before = values(other)
    with pytest.raises(UserError, match="another base model"):
        other.load(tmp_path)
    close(values(other), before, 0)


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}], ids=["full", "lora"])
def test_an_export_loads_in_transformers_unchanged(tmp_path: Path, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gleanrl.learners.tiny import build_tokenizer

    tokenizer = build_tokenizer(["go to fridge 1"], 200)
    learner = make_learner(lr=0.01, tokenizer=tokenizer, **options)
    update(learner, make_batch(0), make_batch(1))
    for _ in range(2):  # the second replaces the first
        learner.export(tmp_path / "model")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, learner.weights()[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == tokenizer.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
