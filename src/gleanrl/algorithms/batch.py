"""From groups of trajectories to samples with advantages and weights.

In two stages, because some credit needs a model's opinion of the tokens first (a critic's values, the distance to a
reference): `build_samples` cuts trajectories into samples, `assign_advantages` gives them advantages. `build` is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from gleanrl.algorithms import credit
from gleanrl.algorithms.loss import aggregation_of, token_weights
from gleanrl.config.settings import CreditSettings, LossSettings, ReplaySettings
from gleanrl.types import BoolArray, FloatArray, Group, IntArray, Trajectory, segment_arrays
from gleanrl.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class Sample:
    """One segment, ready to train on; it ends with its last trained token. Position 0 is never trained."""

    tokens: IntArray  # int32[n]
    mask: BoolArray  # bool[n], trained tokens
    behaviour: FloatArray  # float32[n], log-probs as sampled; 0 outside the mask
    advantages: FloatArray  # float32[n], 0 outside the mask
    weights: FloatArray  # float32[n], weight in the loss's sum; 0 outside the mask
    replayed: bool
    version: int  # oldest weights that sampled any of its trajectory
    trajectory: int  # index among the batch's valid trajectories; segments of one share it
    group: int  # index among the batch's groups
    proximal: FloatArray | None = None  # float32[n], under the policy at the start of the update, if recomputed
    values: FloatArray | None = None  # float32[n], the critic's before the update, if there is one
    returns: FloatArray | None = None  # float32[n], what the critic is to learn

    @property
    def old(self) -> FloatArray:
        """float32[n], denominator of the ratio; a replayed sample's is always what was recorded."""
        return self.behaviour if self.proximal is None or self.replayed else self.proximal

    @property
    def zero_advantage(self) -> bool:
        """No policy gradient comes from it."""
        return not self.advantages.any()


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """What one group gives to an update: its samples, and its share of the loss's denominator."""

    samples: tuple[Sample, ...]
    tokens: int  # trained tokens of valid members
    sequences: int  # valid members with a trained token
    invalid: int  # members without a score, left out of everything
    zero_variance: bool  # all valid members, two or more, earned the same


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups as the learner consumes them, in order."""

    parts: tuple[GroupSamples, ...]

    @property
    def groups(self) -> int:
        return len(self.parts)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(chain.from_iterable(part.samples for part in self.parts))

    def cut(self, start: int, stop: int) -> Batch:
        """Groups ``start`` to ``stop``, exclusive."""
        return Batch(self.parts[start:stop])


class ModelEstimates(NamedTuple):
    """What models say of a sample before credit is given; None = not asked, 0 where a token is not trained."""

    proximal: FloatArray | None = None  # float32[n], log-probs under the policy as it is
    penalty: FloatArray | None = None  # float32[n], taken off each token's reward
    values: FloatArray | None = None  # float32[n], the critic's


@dataclass(frozen=True, slots=True)
class _Member:
    """A valid trajectory of a batch and where it stands."""

    trajectory: Trajectory
    replayed: bool
    group: int
    index: int


@dataclass(frozen=True)
class SampleSet:
    """Groups cut into samples, which have no credit yet: their advantages and weights are 0.

    Rows are the N valid members, the L positions of a row those of a member's segments one after the other.
    """

    groups: tuple[Group, ...]
    members: tuple[_Member, ...]
    mask: BoolArray  # bool [N, L], trained tokens
    samples: tuple[Sample, ...]
    spans: tuple[slice, ...]  # where a sample's tokens stand in the row of its trajectory


def build(groups: Sequence[Group], credit_settings: CreditSettings, loss: LossSettings, max_length: int) -> Batch:
    """Samples of all valid members, with credit that needs no model.

    ``max_length``: the model's context in tokens; a longer segment raises `UserError`.
    """
    return assign_advantages(build_samples(groups, max_length), credit_settings, loss, max_length)


def build_samples(groups: Sequence[Group], max_length: int) -> SampleSet:
    """Samples of all valid members: one for each segment with trained tokens. Raises `UserError` as `build` does."""
    members: list[_Member] = []
    masks: list[BoolArray] = []
    samples: list[Sample] = []
    spans: list[slice] = []
    for index, group in enumerate(groups):
        fresh = len(group.fresh)
        for position, trajectory in enumerate(group.trajectories):
            if not trajectory.score.valid:
                continue
            member = _Member(trajectory, position >= fresh, index, len(members))
            members.append(member)
            start = 0
            parts = [np.zeros(0, np.bool_)]
            for segment in trajectory.segments:
                tokens, mask, behaviour = segment_arrays(segment)
                parts.append(mask)
                sample = _sample(member, tokens, mask, behaviour, max_length)
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
    member: _Member, tokens: IntArray, mask: BoolArray, behaviour: FloatArray, max_length: int
) -> Sample | None:
    """A segment, cut after its last trained token, since what follows has no effect; None without any."""
    trained = mask.nonzero()[0]
    if not trained.size:
        return None
    end = int(trained[-1]) + 1
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
        replayed=member.replayed,
        version=member.trajectory.version,
        trajectory=member.index,
        group=member.group,
    )


def assign_advantages(
    built: SampleSet,
    settings: CreditSettings,
    loss: LossSettings,
    max_length: int,
    estimates: Sequence[ModelEstimates] | None = None,
    replay: ReplaySettings = ReplaySettings(),  # noqa: B008 - frozen
) -> Batch:
    """Samples with advantages and weights. Fresh members give the baseline; replayed ones are compared with it.

    ``replay`` may let all members give the baseline, or make each replayed one a group of its own.
    ``estimates``: one for each of the samples, where an estimator or the loss needs them. A "sequence" of the
    sequence-wise aggregations is a whole trajectory, however many segments it has. Raises ValueError where an
    estimator lacks what it needs.
    """
    advantages, returns = _credit(built, settings, estimates, replay)
    flat = _zero_variance(built)
    keep = ~flat if settings.zero_variance == "drop" else np.ones_like(flat)
    return _batch(built, advantages, returns, loss, max_length, keep=keep, flat=flat, estimates=estimates)


def weighted_batch(groups: Sequence[Group], weights: Sequence[float], loss: LossSettings, max_length: int) -> Batch:
    """Samples whose every trained token has its group's entry of ``weights`` as advantage; no estimator is used."""
    built = build_samples(groups, max_length)
    advantages = np.array([weights[m.group] for m in built.members], np.float32)[:, None] * built.mask
    everyone = np.ones(len(built.members), np.bool_)
    return _batch(built, advantages, advantages, loss, max_length, keep=everyone, flat=~everyone)


def _batch(
    built: SampleSet,
    advantages: FloatArray,
    returns: FloatArray,
    loss: LossSettings,
    max_length: int,
    *,
    keep: BoolArray,
    flat: BoolArray,
    estimates: Sequence[ModelEstimates] | None = None,
) -> Batch:
    """The samples of the members [N] to ``keep``; ``flat`` are those of groups without variance."""
    members, mask = built.members, built.mask
    mode = aggregation_of(loss)
    weights = token_weights(torch.from_numpy(mask), mode, scale=loss.aggregation_scale or max_length).numpy()
    samples: list[list[Sample]] = [[] for _ in built.groups]
    for index, (sample, span) in enumerate(zip(built.samples, built.spans, strict=True)):
        row = sample.trajectory
        if not keep[row]:
            continue
        opinion = estimates[index] if estimates else ModelEstimates()
        samples[sample.group].append(
            replace(
                sample,
                advantages=advantages[row, span],
                weights=weights[row, span],
                proximal=opinion.proximal,
                values=opinion.values,
                returns=None if opinion.values is None else returns[row, span],
            )
        )
    trained = mask.sum(-1) * keep
    of = np.array([member.group for member in members], np.int64)
    tokens, sequences, flat_members = (
        np.bincount(of, values, len(built.groups)) for values in (trained, trained > 0, flat)
    )
    return Batch(
        tuple(
            GroupSamples(
                samples=tuple(samples[index]),
                tokens=int(tokens[index]),
                sequences=int(sequences[index]),
                invalid=sum(not trajectory.score.valid for trajectory in group.trajectories),
                zero_variance=bool(flat_members[index] > 0),
            )
            for index, group in enumerate(built.groups)
        )
    )


def _credit(
    built: SampleSet, settings: CreditSettings, estimates: Sequence[ModelEstimates] | None, replay: ReplaySettings
) -> tuple[FloatArray, FloatArray]:
    """Advantages and returns, float32 [N, L] each."""
    members, mask = built.members, built.mask
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(-1)  # a score comes with the last trained token
    rewards = np.zeros(mask.shape, np.float32)
    rewards[np.arange(len(members)), last] = [member.trajectory.score.value for member in members]
    values = np.zeros(mask.shape, np.float32)
    for sample, span, opinion in zip(built.samples, built.spans, estimates or (), strict=bool(estimates)):
        if opinion.penalty is not None:
            rewards[sample.trajectory, span] -= opinion.penalty
        if opinion.values is not None:
            values[sample.trajectory, span] = opinion.values
    needs = credit.ESTIMATORS.get(settings.estimator).needs
    given: dict[str, torch.Tensor] = {}
    if "values" in needs and estimates:
        given["values"] = torch.from_numpy(values)
    if "reward_baselines" in needs:
        given["reward_baselines"] = torch.tensor([_greedy_score(built.groups[m.group]) for m in members])
    advantages, returns = credit.estimate(
        settings.estimator,
        torch.from_numpy(rewards),
        torch.from_numpy(mask),
        torch.tensor([_group(member, built, replay) for member in members], dtype=torch.int64),
        baseline_members=torch.tensor([_gives_baseline(member, replay) for member in members], dtype=torch.bool),
        **given,
        **settings.options,
    )
    return advantages.numpy(), returns.numpy()


def _group(member: _Member, built: SampleSet, replay: ReplaySettings) -> int:
    """Which members are compared with one another."""
    alone = member.replayed and replay.grouping == "own"
    return len(built.groups) + member.index if alone else member.group


def _gives_baseline(member: _Member, replay: ReplaySettings) -> bool:
    return not member.replayed or replay.baseline == "group" or replay.grouping == "own"


def _greedy_score(group: Group) -> float:
    if group.greedy is None or not group.greedy.score.valid:
        raise ValueError(f"task {group.spec.task.id!r} was not played greedily, which its estimator compares with")
    return group.greedy.score.value


def _zero_variance(built: SampleSet) -> BoolArray:
    """bool [N]: who is in a group without variance."""
    scores = torch.tensor([member.trajectory.score.value for member in built.members], dtype=torch.float32)
    group = torch.tensor([member.group for member in built.members], dtype=torch.int64)
    return credit.zero_variance_members(scores, group).numpy()
