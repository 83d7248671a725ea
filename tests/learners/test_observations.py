"""Tests of the observation loss: its gradient equals a float64 reference that is computed from the trajectories."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gleanrl.algorithms.batch import Batch, assign_advantages, build_samples
from gleanrl.algorithms.loss import AGGREGATIONS
from gleanrl.config.settings import CreditSettings, LearnerSettings, LossSettings
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.supervised import fine_tune
from gleanrl.learners.torch import TorchLearner
from gleanrl.types import Group, Trajectory, Turn
from tests.builders import VOCABULARY, Member, applied_gradients, make_group, random_groups, tiny_model
from tests.learners.many import asked, led
from tests.learners.test_sharded import gradients_of, make
from tests.learners.test_torch import naive_loss, update
from tests.strategies import examples

GROUPS, CONTEXT = 4, 128


def with_bodies(group: Group, random: np.random.Generator) -> Group:
    """Give the context turns of each member after its first sampled one a body, and some members an ending."""

    def body(turn: Turn) -> Turn:
        start, stop = sorted(random.integers(0, turn.tokens.size + 1, 2).tolist())
        return replace(turn, body=(start, stop))

    def member(trajectory: Trajectory) -> Trajectory:
        segments = []
        begun = False
        for segment in trajectory.segments:
            turns = []
            for turn in segment:
                turns.append(body(turn) if begun and not turn.sampled else turn)
                begun = begun or turn.sampled
            segments.append(tuple(turns))
        last = Turn({"role": "user", "content": ""}, random.integers(1, VOCABULARY, 5, np.int32))
        return replace(trajectory, segments=tuple(segments), ending=(body(last),) if random.random() < 0.5 else ())

    members = tuple(map(member, group.trajectories))
    fresh = len(group.fresh)
    return replace(group, spec=replace(group.spec, replayed=members[fresh:]), trajectories=members)


def make_groups(seed: int) -> list[Group]:
    random = np.random.default_rng(seed)
    return [with_bodies(group, random) for group in random_groups(random, GROUPS)]


def make_batch(groups: Sequence[Group], loss: LossSettings, zero_variance: Any = "keep") -> Batch:
    built = build_samples(groups, CONTEXT, observations=True)
    return assign_advantages(built, CreditSettings(zero_variance=zero_variance), loss, CONTEXT)


def observations(groups: Sequence[Group]) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each segment of a valid fresh member, and the positions of its observation tokens."""
    found = []
    for trajectory in (t for group in groups for t in group.valid_fresh):
        for number, segment in enumerate(trajectory.segments):
            ids: list[int] = []
            places: list[int] = []
            for turn in (*segment, *(trajectory.ending if number == len(trajectory.segments) - 1 else ())):
                if turn.body is not None:
                    places += range(len(ids) + turn.body[0], len(ids) + turn.body[1])
                ids += turn.tokens.tolist()
            found.append((ids, [place for place in places if place]))  # nothing predicts the first token
    return found


def observation_loss(model: Any, groups: Sequence[Group]) -> Tensor:
    """Return the mean of -log p over the observation tokens, computed one segment at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, places in observations(groups):
        if places:
            logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            total = total - sum(logits[place - 1, ids[place]] for place in places)
            count += len(places)
    return total / max(count, 1)


@settings(max_examples=examples(30), phases=[Phase.reuse, Phase.generate])
@given(
    seed=st.integers(0, 2**32 - 1),
    aggregation=st.sampled_from(AGGREGATIONS),
    zero_variance=st.sampled_from(["keep", "drop"]),
    packed=st.booleans(),
    data=st.data(),
)
def test_a_step_equals_the_reference_for_any_chunks_micro_batches_and_rows(
    seed: int, aggregation: Any, zero_variance: str, packed: bool, data: st.DataObject
) -> None:
    loss = LossSettings(aggregation=aggregation, observation_coefficient=0.3)
    groups = make_groups(seed)
    batch = make_batch(groups, loss, zero_variance)
    learner = TorchLearner(
        tiny_model(0, torch.float64),
        LearnerSettings(tokens_per_microbatch=data.draw(st.integers(1, 150))),
        loss,
        total_steps=6,
        groups_per_step=GROUPS,
        pad_token=0,
        temperature=1.0,
    )
    backend: Any = learner.engine.backend  # type: ignore[attr-defined]
    assert backend.packs_rows
    backend.packs_rows = packed
    applied = applied_gradients(learner)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, GROUPS - 1)))), GROUPS]
    metrics = update(learner, *(batch.cut(start, stop) for start, stop in itertools.pairwise(cuts)))

    naive = tiny_model(0, torch.float64)
    of_observations = observation_loss(naive, groups)
    count = sum(len(places) for _, places in observations(groups))
    assert sum(int(s.observed.sum()) for s in batch.samples if s.observed is not None) == count
    if count:
        assert metrics["loss/observation"] == pytest.approx(float(of_observations.detach()), rel=1e-9)
    if not applied:
        assert metrics["updates/empty"] == 1
        assert not count
        assert not any(part.tokens for part in batch.parts)
        return
    (naive_loss(naive, tiny_model(1, torch.float64), batch.samples, batch, loss) + 0.3 * of_observations).backward()
    (gradients,) = applied
    for (name, parameter), ours in zip(naive.named_parameters(), gradients, strict=True):
        theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_groups_without_variance_train_on_observations() -> None:
    random = np.random.default_rng(0)
    groups = [with_bodies(make_group(0, [Member(1.0, turns=(2, 2, 2)), Member(1.0)], random), random)] * GROUPS
    for coefficient, updates in ((0.0, 1), (0.5, 1)):
        loss = LossSettings(observation_coefficient=coefficient)
        for zero_variance in ("keep", "drop"):
            learner = make(None, loss, torch.float32)
            before = {name: tensor.clone() for name, tensor in learner.weights().items()}
            metrics = update(learner, make_batch(groups, loss, zero_variance))
            moved = any(not torch.equal(before[name], tensor) for name, tensor in learner.weights().items())
            assert moved == bool(coefficient)
            assert metrics["updates/done"] + metrics["updates/empty"] == updates


def test_tokens_beyond_the_context_are_left_out_of_the_observation_loss() -> None:
    random = np.random.default_rng(1)
    (trajectory,) = make_group(0, [Member(1.0, turns=(4, 4), context=4)], random).trajectories
    last = Turn({"role": "user", "content": ""}, random.integers(1, VOCABULARY, 9, np.int32), body=(0, 9))
    group = make_group(0, [Member(1.0)], random)
    group = replace(group, trajectories=(replace(trajectory, ending=(last,)),))
    built = build_samples([group], 20, observations=True)
    (sample,) = built.samples
    assert sample.observed is not None
    assert sample.observed.nonzero()[0].tolist() == [16, 17, 18, 19]
    assert sample.tokens.size == 20


def observed_updates(ranks: Ranks | None) -> list[Any]:
    loss = LossSettings(observation_coefficient=0.2)
    learner = make(ranks, loss, torch.float64, tokens_per_microbatch=60)
    samples = make_batch(make_groups(5), loss).samples
    seen = learner.engine.backward(samples, observation_factor=0.7)
    gradients = asked(learner.engine, gradients_of)
    learner.engine.discard()
    return [gradients, seen.observed, seen.observed_nats, seen.trained]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("ranks")
def test_gradients_of_two_processes_equal_those_of_one() -> None:
    (ours, *counts), (theirs, *others) = led(2, observed_updates), observed_updates(None)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-11)
    assert counts == pytest.approx(others, rel=1e-12)


def test_a_warm_start_learns_to_predict_observations() -> None:
    """One update equals a reference; the two terms have a mean each."""
    random = np.random.default_rng(2)
    shown = []
    for size in (9, 14, 11):
        mask, observed = np.zeros(size, bool), np.zeros(size, bool)
        mask[3:5] = True
        observed[6 : 6 + int(random.integers(1, 4))] = True
        shown.append((random.integers(1, VOCABULARY, size).astype(np.int32), mask, observed))
    model, naive = tiny_model(0, torch.float64), tiny_model(0, torch.float64)
    means = fine_tune(
        model,
        [(tokens, mask) for tokens, mask, _ in shown],
        observed=[observed for _, _, observed in shown],
        observation_coefficient=0.3,
        steps=1,
        batch=3,
        lr=1e-3,
        seed=0,
        compute_dtype=torch.float32,
    )
    assert means["loss/first"] > 0
    terms = []
    for which in (1, 2):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for example in shown:
            ids, places = torch.from_numpy(example[0].astype(np.int64)), example[which].nonzero()[0]
            logits = naive(input_ids=ids[None]).logits[0].log_softmax(-1)
            total, count = total - sum(logits[p - 1, ids[p]] for p in places), count + len(places)
        terms.append(total / count)
    (terms[0] + 0.3 * terms[1]).backward()
    parameters = [p for p in naive.parameters() if p.grad is not None]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.optim.AdamW(parameters, lr=1e-3 / 20, betas=(0.9, 0.95), weight_decay=0.0).step()
    for ours, theirs in zip(model.parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
