"""Turns groups of trajectories into samples with advantages and loss weights, ready to train on.

There are two stages, because some advantages need numbers that a model must compute from the samples first (a critic's
values, the KL to a reference): `build_samples` cuts trajectories into samples, and `assign_advantages` adds advantages
and weights. `build` runs both stages, for settings that need no such numbers. A run calls these functions in
`gleanrl.runtime.local.Builder.make_batch`.

A member of a group is *valid* if its score could be computed. Only here does a run leave out invalid members:
`build_samples` skips them, so that they enter no sample, no group statistic and no denominator. Training loops of other
libraries, which call `advantages.estimate` themselves, pass its ``valid`` mask instead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from gleanrl.algorithms.advantages import ESTIMATORS, estimate, zero_variance_members
from gleanrl.algorithms.loss import aggregation_of, token_weights
from gleanrl.config.settings import CreditSettings, LossSettings, ReplaySettings
from gleanrl.types import (
    TURN_ORDER,
    BoolArray,
    FloatArray,
    Group,
    IntArray,
    Segment,
    Trajectory,
    segment_arrays,
)
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """One segment of a trajectory, cut after its last trained token.

    A segment is a sequence of turns that the model saw as one context. A trajectory has more than one segment only if
    its context was rewritten during the episode. Position 0 is never trained, because no earlier token predicts it.

    "Before the update" means under the weights before the first update on the batch that the learner receives.
    """

    tokens: IntArray  # int32[n], token ids
    mask: BoolArray  # bool[n], True at trained tokens
    behaviour: FloatArray  # float32[n], log-probs recorded at sampling; 0 outside the mask
    advantages: FloatArray  # float32[n], 0 outside the mask
    weights: FloatArray  # float32[n], factor of each token's loss in the sum over all tokens; 0 outside the mask
    off_policy: bool  # True if replayed, or if sampled with guidance texts in the prompt that were removed afterwards
    version: int  # version of the oldest weights that sampled a token of its trajectory
    trajectory: int  # index among the batch's valid trajectories; equal for all samples of a trajectory
    group: int  # index among the batch's groups
    proximal: FloatArray | None = None  # float32[n], log-probs under the weights before the update; None = not computed
    values: FloatArray | None = None  # float32[n], the critic's predictions before the update; None without a critic
    returns: FloatArray | None = None  # float32[n], the critic's targets; None without a critic
    observed: BoolArray | None = None  # bool[n], True at tokens of the observation loss; None = none. Outside the mask

    @property
    def old(self) -> FloatArray:
        """float32[n]: log-probs in the denominator of the probability ratio pi / pi_old.

        They are ``proximal`` if the sample has them and is not off-policy, and ``behaviour`` otherwise.
        """
        return self.behaviour if self.proximal is None or self.off_policy else self.proximal

    def start(self) -> Sample:
        """Return the first token as a sample, which has no trained token."""
        arrays = {f.name: value[:1] for f in fields(self) if isinstance(value := getattr(self, f.name), np.ndarray)}
        return replace(self, **arrays)

    def only_observed(self) -> Sample:
        """Return a copy without trained tokens, of which only the observation loss is left."""
        return replace(self, mask=np.zeros_like(self.mask))

    @property
    def zero_advantage(self) -> bool:
        """Whether all advantages are 0, so that the policy loss of the sample usually has no gradient."""
        return not self.advantages.any()


def unscored_sample(tokens: IntArray, mask: BoolArray) -> Sample:
    """Return a sample of which only ``tokens`` int32[n] and ``mask`` bool[n] are known; all other arrays are 0."""
    nothing = np.zeros(tokens.size, np.float32)
    return Sample(tokens, mask, nothing, nothing, nothing, off_policy=False, version=-1, trajectory=0, group=0)


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """The samples of one group, and the numbers that the group adds to the denominator of the loss.

    Kept members are the valid ones, without those that ``credit.zero_variance = "drop"`` leaves out.
    """

    samples: tuple[Sample, ...]  # samples of the kept members
    tokens: int  # number of trained tokens of the kept members
    sequences: int  # number of kept members that have a trained token
    invalid: int  # number of members without a score, which enter neither samples nor statistics
    zero_variance: bool  # whether some valid members were compared only with members of the same score


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of all groups of a batch, in the order in which the learner consumes the groups."""

    parts: tuple[GroupSamples, ...]
    observation_coefficient: float | None = None
    """Factor of the observation loss, for an extra update that a design of its own makes with
    `TorchLearner.replay_update`; None = ``loss.observation_coefficient``."""

    @property
    def groups(self) -> int:
        return len(self.parts)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(chain.from_iterable(part.samples for part in self.parts))

    def cut(self, start: int, stop: int) -> Batch:
        """Return a batch of the groups from index ``start`` up to, but not including, index ``stop``."""
        return replace(self, parts=self.parts[start:stop])


class ModelEstimates(NamedTuple):
    """What the learner's models compute for one sample before its advantages are known.

    A field is None if the settings do not need it. Its entries are 0 where a token is not trained.
    """

    proximal: FloatArray | None = None  # float32[n], log-probs under the policy before the update (see `Sample`)
    penalty: FloatArray | None = None  # float32[n], KL to the reference times its coefficient, to subtract from rewards
    values: FloatArray | None = None  # float32[n], the critic's predictions before the update


@dataclass(frozen=True, slots=True)
class _Member:
    """A valid trajectory of a batch."""

    trajectory: Trajectory
    off_policy: bool
    group: int  # index among the batch's groups
    index: int  # index among the batch's valid trajectories


@dataclass(frozen=True)
class SampleSet:
    """Groups whose trajectories are cut into samples. The samples' advantages and weights are still 0.

    Each row of ``mask`` belongs to one of the N valid members. Its positions are the tokens of all segments of the
    member, one segment after another, padded with False to the length L of the longest row.
    """

    groups: tuple[Group, ...]
    members: tuple[_Member, ...]
    mask: BoolArray  # bool [N, L], True at trained tokens
    samples: tuple[Sample, ...]
    spans: tuple[slice, ...]  # for each sample, the positions of its tokens in its trajectory's row of ``mask``


def build(groups: Sequence[Group], credit: CreditSettings, loss: LossSettings, max_length: int) -> Batch:
    """Build a batch from the valid members of ``groups``, if neither estimator nor loss needs `ModelEstimates`.

    ``max_length`` is the model's context in tokens. Raises `UserError` if a sample is longer.
    """
    return assign_advantages(build_samples(groups, max_length), credit, loss, max_length)


def build_samples(groups: Sequence[Group], max_length: int, *, observations: bool = False) -> SampleSet:
    """Cut each valid member into samples, one for each segment that has trained tokens.

    With ``observations``, the samples of fresh members mark the tokens of the observation loss, `Trajectory.ending`
    included. Tokens beyond ``max_length`` are left out of it.

    Raises `UserError` if a sample is longer than ``max_length`` tokens.
    """
    members: list[_Member] = []
    masks: list[BoolArray] = []
    samples: list[Sample] = []
    spans: list[slice] = []
    for index, group in enumerate(groups):
        fresh = len(group.fresh)
        for position, trajectory in enumerate(group.trajectories):
            if not trajectory.score.valid:
                continue
            # The members of a group after its fresh ones are off-policy (`gleanrl.types.Group`).
            member = _Member(trajectory, position >= fresh, index, len(members))
            members.append(member)
            start = 0
            parts = [np.zeros(0, np.bool_)]
            for number, segment in enumerate(trajectory.segments):
                observed = None
                if observations and position < fresh:
                    if number == len(trajectory.segments) - 1:
                        segment += trajectory.ending
                    observed = observed_mask(segment)
                tokens, mask, behaviour = segment_arrays(segment)
                parts.append(mask)
                sample = _sample(member, tokens, mask, behaviour, max_length, observed)
                if sample is not None:
                    samples.append(sample)
                    spans.append(slice(start, start + sample.tokens.size))
                start += tokens.size
            masks.append(np.concatenate(parts))
    table = np.zeros((len(members), max((mask.size for mask in masks), default=0) or 1), np.bool_)
    for row, mask in enumerate(masks):
        table[row, : mask.size] = mask
    return SampleSet(tuple(groups), tuple(members), table, tuple(samples), tuple(spans))


def _sample(
    member: _Member,
    tokens: IntArray,
    mask: BoolArray,
    behaviour: FloatArray,
    max_length: int,
    observed: BoolArray | None = None,
) -> Sample | None:
    """Return a sample of a segment, cut after the last trained token because later tokens do not affect the loss.

    Tokens of ``mask`` are trained, and those of ``observed`` before ``max_length`` enter the observation loss. Returns
    None if the segment has neither. Raises `UserError` if the sample is longer than ``max_length``.
    """
    trained = mask.nonzero()[0]
    seen = np.zeros(0, np.int64) if observed is None else observed[:max_length].nonzero()[0]
    if not trained.size and not seen.size:
        return None
    end = max(int(places[-1]) + 1 for places in (trained, seen) if places.size)
    if end > max_length:
        raise UserError(
            f"trajectory {member.trajectory.id!r} has {end} tokens, but model.max_context is {max_length}; "
            "raise model.max_context or lower context.max_turns"
        )
    if mask[0]:
        raise ValueError(f"trajectory {member.trajectory.id!r}: the first token of a segment cannot be sampled")
    nothing = np.zeros(end, np.float32)
    return Sample(
        tokens=tokens[:end],
        mask=mask[:end],
        behaviour=behaviour[:end],
        advantages=nothing,
        weights=nothing,
        off_policy=member.off_policy,
        version=member.trajectory.version,
        trajectory=member.index,
        group=member.group,
        observed=observed[:end] if observed is not None and seen.size else None,
    )


def observed_mask(segment: Segment) -> BoolArray:
    """Return the mask of a segment's observation tokens, bool[n]: those of `Turn.body`."""
    mask = np.zeros(sum(turn.tokens.size for turn in segment), np.bool_)
    begin = 0
    for turn in segment:
        if turn.body is not None:
            mask[begin + turn.body[0] : begin + turn.body[1]] = True
        begin += turn.tokens.size
    mask[:1] = False  # no earlier token predicts the first one
    return mask


def assign_advantages(
    built: SampleSet,
    credit: CreditSettings,
    loss: LossSettings,
    max_length: int,
    estimates: Sequence[ModelEstimates] | None = None,
    replay: ReplaySettings = ReplaySettings(),  # noqa: B008 - frozen
) -> Batch:
    """Return a batch of the samples of ``built``, with advantages and loss weights.

    If the estimator uses turn rewards, each is placed at the last token of its turn, and what the score exceeds their
    sum by at the last trained token. For other estimators, the score is placed there.

    By default, the mean and deviation of a group are computed from its fresh members, and replayed members are compared
    with them too. With ``replay.baseline = "group"`` they are computed from all members. With
    ``replay.grouping = "own"`` each replayed member forms a separate group. With ``credit.zero_variance = "drop"``,
    members that are compared only with members of the same score are left out. With ``credit.per_part`` members are
    compared on each named part of their scores instead, and the advantages are added with the weights of the parts. A
    part adds nothing for a member whose score does not have it, or whose group has fewer than two members in the
    baseline that have it. In aggregation modes that count sequences, a sequence is a whole trajectory with all of its
    segments.

    Args:
        max_length: the model's context in tokens, the default divisor of the aggregation seq-mean-token-sum-norm.
        estimates: one entry for each sample of ``built``; None if neither the estimator nor the loss needs any.

    Raises:
        ValueError: if an input of the estimator is missing.
    """
    members, mask = built.members, built.mask
    own_group, baseline = [], []
    for member in members:
        alone = member.off_policy and replay.grouping == "own"
        own_group.append(len(built.groups) + member.index if alone else member.group)
        baseline.append(alone or not member.off_policy or replay.baseline == "group")
    group = torch.tensor(own_group, dtype=torch.int64)
    scores = np.array([member.trajectory.score.value for member in members], np.float64)

    # The token rewards of a member sum to its score: what its turn rewards leave is earned at the last trained token.
    estimator = ESTIMATORS.get(credit.estimator)
    # In float64, so that members with equal scores have equal sums.
    rewards, rest = np.zeros(mask.shape), scores.copy()
    for row, member in enumerate(members if estimator.turn_rewards else ()):
        end = 0
        for turn in member.trajectory.turns():
            end += turn.tokens.size
            if turn.reward is not None:
                rewards[row, end - 1] += turn.reward
                rest[row] -= turn.reward
    # Estimators that use the place of a reward see the tokens of a member in the order of time.
    order = _order_of_time(built) if estimator.turn_rewards else None
    rows, in_time = np.arange(len(members)), mask if order is None else np.take_along_axis(mask, order, 1)
    last_trained = mask.shape[1] - 1 - in_time[:, ::-1].argmax(-1)
    rewards[rows, last_trained if order is None else order[rows, last_trained]] += rest
    values = np.zeros(mask.shape, np.float32)
    for sample, span, estimated in zip(built.samples, built.spans, estimates or (), strict=bool(estimates)):
        if estimated.penalty is not None:
            rewards[sample.trajectory, span] -= estimated.penalty
        if estimated.values is not None:
            values[sample.trajectory, span] = estimated.values
    if order is not None:
        rewards, values = np.take_along_axis(rewards, order, 1), np.take_along_axis(values, order, 1)
    needs = estimator.needs
    inputs: dict[str, torch.Tensor] = {}
    if "values" in needs and estimates is not None:  # an empty list if no member has a sample
        inputs["values"] = torch.from_numpy(values)
    if "reward_baselines" in needs:
        greedy_scores = []
        for member in members:
            owner = built.groups[member.group]
            if owner.greedy is None or not owner.greedy.score.valid:
                raise ValueError(
                    f"task {owner.spec.task.id!r} has no greedy rollout with a score, "
                    f"which credit.estimator = {credit.estimator!r} needs as its baseline"
                )
            greedy_scores.append(owner.greedy.score.value)
        inputs["reward_baselines"] = torch.tensor(greedy_scores, dtype=torch.float64)
    if needs & {"turns", "states"}:
        numbers, states = np.zeros(mask.shape, np.int64), np.zeros(mask.shape, np.int64)
        known: dict[Hashable, int] = {}
        # A stored member may be older than the states of its environment. Compared by text it meets the fresh ones.
        by_text = {m.group for m in members if all(turn.state is None for turn in m.trajectory.sampled_turns())}
        for row, member in enumerate(members):
            keys, end, number = iter(turn_states(member.trajectory, by_text=member.group in by_text)), 0, 0
            for turn in member.trajectory.turns():
                begin, end = end, end + turn.tokens.size
                if turn.sampled:
                    numbers[row, begin:end] = number = number + 1
                    states[row, begin:end] = known.setdefault(next(keys), len(known))
        if order is not None:
            numbers, states = np.take_along_axis(numbers, order, 1), np.take_along_axis(states, order, 1)
        both = {"turns": torch.from_numpy(numbers), "states": torch.from_numpy(states)}
        inputs |= {name: found for name, found in both.items() if name in needs}
    trained, compared = torch.from_numpy(in_time), torch.tensor(baseline, dtype=torch.bool)
    if not credit.per_part:
        found = estimate(
            credit.estimator,
            torch.from_numpy(rewards),
            trained,
            group,
            baseline_members=compared,
            **inputs,
            **credit.options,
        )
        advantages, returns = (values.numpy() for values in found)
        if order is not None:
            back = order.argsort(1)
            advantages, returns = np.take_along_axis(advantages, back, 1), np.take_along_axis(returns, back, 1)
        zero_variance = zero_variance_members(torch.from_numpy(scores), group).numpy()
    else:
        advantages, zero_variance = np.zeros(mask.shape, np.float32), np.ones(len(members), np.bool_)
        for part, weight in credit.per_part.items():
            own = [member.trajectory.score.parts.get(part, np.nan) for member in members]
            rewards = torch.zeros(mask.shape, dtype=torch.float64)
            rewards[:, 0] = torch.tensor(own, dtype=torch.float64)
            has = rewards[:, 0].isfinite()
            if members and not bool(has.any()):
                _warn_of_missing_part(part)
            # One member alone is compared with nothing, and some estimators would give it its raw value.
            counts = torch.bincount(group[has & compared], minlength=len(built.groups))
            has &= counts[group] >= 2
            of_part, _ = estimate(
                credit.estimator, rewards, trained, group, baseline_members=compared, valid=has, **credit.options
            )
            advantages += weight * of_part.numpy()
            zero_variance[has] &= zero_variance_members(rewards[has, 0], group[has]).numpy()
        returns = advantages
    keep = ~zero_variance if credit.zero_variance == "drop" else np.ones_like(zero_variance)
    return _batch(built, advantages, returns, loss, max_length, keep, zero_variance, estimates=estimates)


@lru_cache
def _warn_of_missing_part(part: str) -> None:
    """Log a warning, once per part, that no score of a batch has it, because its name may be wrong."""
    log.warning("credit.per_part: no score of a batch has the part %r, so its advantages are 0", part)


def _order_of_time(built: SampleSet) -> IntArray | None:
    """Return the positions of each row of ``built.mask`` in the order of time, int64[N, L].

    Returns None if they are all in this order already. A turn of the context belongs to the sampled turn after it.
    """
    order: IntArray | None = None
    for row, member in enumerate(built.members):
        places = member.trajectory.info.get(TURN_ORDER)
        if places is None:
            continue
        turns = list(member.trajectory.turns())
        left, times = list(places), []
        for turn in turns[::-1]:
            if turn.sampled:
                times.append(left.pop())
            else:
                times.append(times[-1] if times else math.inf)
        of_tokens = np.repeat(times[::-1], [turn.tokens.size for turn in turns])
        if order is None:
            order = np.tile(np.arange(built.mask.shape[1]), (len(built.members), 1))
        order[row, : of_tokens.size] = of_tokens.argsort(kind="stable")
    return order


def turn_states(trajectory: Trajectory, *, by_text: bool = False) -> list[Hashable]:
    """Return a key of the state in which each turn was sampled, in the order of `Trajectory.sampled_turns`.

    Equal keys of trajectories of the same task mean the same state. The key is `Turn.state` if the environment gives
    it. Otherwise, and with ``by_text``, it is the roles and texts of the messages since the model's last one, which are
    the same in many different states where a message does not tell the whole state. A turn that follows no message,
    because it continues an answer that was cut off, has a key of its own.
    """
    keys: list[Hashable] = []
    for segment in trajectory.segments:
        observed: list[tuple[str, str]] = []
        for turn in segment:
            if turn.sampled:
                last = tuple(observed) or (trajectory.id, len(keys))
                keys.append(last if turn.state is None or by_text else turn.state)
            if turn.message["role"] == "assistant":
                observed = []
            else:
                observed.append((turn.message["role"], turn.message["content"]))
    return keys


def weighted_batch(groups: Sequence[Group], weights: Sequence[float], loss: LossSettings, max_length: int) -> Batch:
    """Return a batch whose advantages come from ``weights`` and not from an estimator.

    The advantage of every trained token is its group's entry of ``weights``. The settings ``loss``, with which the
    learner must train on the batch, determine how the losses of tokens are aggregated. The loss of a replayed token is
    that of ``loss.replay_mode`` (`gleanrl.algorithms.loss.replayed_loss`), by default minus its advantage times a
    clipped probability ratio, and not a cross-entropy.
    """
    built = build_samples(groups, max_length)
    advantages = np.array([weights[m.group] for m in built.members], np.float32)[:, None] * built.mask
    all_members = np.ones(len(built.members), np.bool_)
    return _batch(built, advantages, advantages, loss, max_length, all_members, ~all_members)


def _batch(
    built: SampleSet,
    advantages: FloatArray,
    returns: FloatArray,
    loss: LossSettings,
    max_length: int,
    keep: BoolArray,
    zero_variance: BoolArray,
    *,
    estimates: Sequence[ModelEstimates] | None = None,
) -> Batch:
    """Return a batch of those samples of ``built`` whose members are kept.

    ``advantages`` and ``returns`` float32 [N, L]. ``keep`` bool [N]: whether a member's samples are kept.
    ``zero_variance`` bool [N]: whether a member was compared only with members of the same score.
    """
    mask = built.mask
    scale = loss.aggregation_scale or max_length
    weights = token_weights(torch.from_numpy(mask), aggregation_of(loss), scale=scale).numpy()
    samples: list[list[Sample]] = [[] for _ in built.groups]
    for index, (sample, span) in enumerate(zip(built.samples, built.spans, strict=True)):
        row = sample.trajectory
        if not keep[row] and sample.observed is None:
            continue
        estimated = estimates[index] if estimates else ModelEstimates()
        complete = replace(
            sample,
            advantages=advantages[row, span],
            weights=weights[row, span],
            proximal=estimated.proximal,
            values=estimated.values,
            returns=None if estimated.values is None else returns[row, span],
        )
        samples[sample.group].append(complete if keep[row] else complete.only_observed())
    rows_of: list[list[int]] = [[] for _ in built.groups]
    for member in built.members:
        rows_of[member.group].append(member.index)
    parts = []
    for index, group in enumerate(built.groups):
        rows = rows_of[index]
        trained = mask[rows].sum(-1) * keep[rows]
        parts.append(
            GroupSamples(
                samples=tuple(samples[index]),
                tokens=int(trained.sum()),
                sequences=int((trained > 0).sum()),
                invalid=sum(not trajectory.score.valid for trajectory in group.trajectories),
                zero_variance=bool(zero_variance[rows].any()),
            )
        )
    return Batch(tuple(parts))
