"""From groups of trajectories to samples with advantages and weights, and from those to padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from gleanrl import credit
from gleanrl.errors import UserError
from gleanrl.loss import token_weights
from gleanrl.rows import Row, lay_out, plain_rows
from gleanrl.settings import CreditSettings, LossSettings
from gleanrl.types import BoolArray, FloatArray, Group, IntArray, Trajectory, segment_arrays

MAX_PADDING = 0.1  # share of a micro-batch that may be padding


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

    @property
    def old(self) -> FloatArray:
        """float32[n], denominator of the ratio; a replayed sample's is always what was recorded."""
        return self.behaviour if self.proximal is None or self.replayed else self.proximal

    @property
    def silent(self) -> bool:
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


@dataclass(frozen=True, slots=True)
class _Member:
    """A valid trajectory of a batch, its segments' arrays and where it stands."""

    trajectory: Trajectory
    arrays: tuple[tuple[IntArray, BoolArray, FloatArray], ...]
    replayed: bool
    group: int
    index: int

    @property
    def mask(self) -> BoolArray:
        return np.concatenate([np.zeros(0, np.bool_), *(mask for _, mask, _ in self.arrays)])


def build(groups: Sequence[Group], credit_settings: CreditSettings, loss: LossSettings, max_length: int) -> Batch:
    """Samples of all valid members. Fresh members give the baseline; replayed ones are compared with it.

    ``max_length``: the model's context in tokens; a longer segment raises `UserError`. A "sequence" of the
    sequence-wise aggregations is a whole trajectory, however many segments it has.
    """
    members = _members(groups)
    mask = np.zeros((len(members), max((m.mask.size for m in members), default=0) or 1), np.bool_)
    for row, member in enumerate(members):
        mask[row, : member.mask.size] = member.mask
    advantages, flat = _credit(members, mask, credit_settings)
    weights = token_weights(torch.from_numpy(mask), loss.aggregation, scale=loss.aggregation_scale or max_length)
    keep = ~flat if credit_settings.zero_variance == "drop" else np.ones_like(flat)
    samples: list[list[Sample]] = [[] for _ in groups]
    for member in members:
        if keep[member.index]:
            row = member.index
            samples[member.group] += _samples(member, advantages[row], weights[row].numpy(), max_length)
    trained = mask.sum(-1) * keep
    of = np.array([member.group for member in members], np.int64)
    tokens = np.bincount(of, trained, len(groups)).astype(int)
    sequences = np.bincount(of, trained > 0, len(groups)).astype(int)
    flat_groups = np.bincount(of, flat, len(groups)) > 0
    return Batch(
        tuple(
            GroupSamples(
                samples=tuple(samples[index]),
                tokens=int(tokens[index]),
                sequences=int(sequences[index]),
                invalid=sum(not trajectory.score.valid for trajectory in group.trajectories),
                zero_variance=bool(flat_groups[index]),
            )
            for index, group in enumerate(groups)
        )
    )


def _members(groups: Sequence[Group]) -> list[_Member]:
    members: list[_Member] = []
    for index, group in enumerate(groups):
        fresh = len(group.fresh)
        for position, trajectory in enumerate(group.trajectories):
            arrays = tuple(segment_arrays(segment) for segment in trajectory.segments)
            if trajectory.score.valid:
                members.append(_Member(trajectory, arrays, position >= fresh, index, len(members)))
    return members


def _credit(members: Sequence[_Member], mask: BoolArray, settings: CreditSettings) -> tuple[FloatArray, BoolArray]:
    """Advantages float32 [N, L], and bool [N]: who is in a group without variance."""
    scores = torch.tensor([member.trajectory.score.value for member in members], dtype=torch.float32)
    group = torch.tensor([member.group for member in members], dtype=torch.int64)
    fresh = torch.tensor([not member.replayed for member in members], dtype=torch.bool)
    last = torch.from_numpy(mask.shape[1] - 1 - mask[:, ::-1].argmax(-1))  # a score comes with the last trained token
    rewards = torch.zeros(mask.shape).scatter_(1, last[:, None], scores[:, None])
    advantages, _ = credit.estimate(
        settings.estimator,
        rewards,
        torch.from_numpy(mask),
        group,
        baseline_members=fresh,
        zero_variance=settings.zero_variance,
    )
    return advantages.numpy(), credit.zero_variance_members(scores, group).numpy()


def _samples(member: _Member, advantages: FloatArray, weights: FloatArray, max_length: int) -> list[Sample]:
    """One sample a segment with trained tokens, cut after the last of them: what follows has no effect."""
    samples: list[Sample] = []
    start = 0
    for tokens, mask, behaviour in member.arrays:
        trained = mask.nonzero()[0]
        offset, start = start, start + tokens.size
        if not trained.size:
            continue
        end = int(trained[-1]) + 1
        if end > max_length:
            raise UserError(
                f"trajectory {member.trajectory.id!r} has {end} tokens, but model.max_context is {max_length}; "
                "raise model.max_context or lower context.max_turns"
            )
        if mask[0]:
            raise ValueError(f"trajectory {member.trajectory.id!r}: the first token of a segment cannot be sampled")
        span = slice(offset, offset + end)
        samples.append(
            Sample(
                tokens=tokens[:end],
                mask=mask[:end],
                behaviour=behaviour[:end],
                advantages=advantages[span],
                weights=weights[span],
                replayed=member.replayed,
                version=member.trajectory.version,
                trajectory=member.index,
                group=member.group,
            )
        )
    return samples


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded rows of samples for one forward pass, and the flat list of their T trained tokens.

    Rows hold all tokens but the last, padded on the right, where a causal model's trained positions cannot see.
    Where a row is shared (see `gleanrl.rows`) a position in the prefix may predict a token of each of its samples.
    """

    tokens: Tensor  # int64 [B, L]
    places: Tensor | None  # int64 [B, L], each token's place in its sample; None where every row is plain
    owners: (
        Tensor | None
    )  # int64 [B, L], whose a token is in a shared row: 0 all samples', or the only one's; from 1 on
    index: Tensor  # int64 [T], position in the flattened [B * L] whose output predicts a trained token
    targets: Tensor  # int64 [T], the trained tokens
    old: Tensor  # float32 [T]
    behaviour: Tensor  # float32 [T]
    advantages: Tensor  # float32 [T]
    weights: Tensor  # float32 [T]
    replayed: Tensor  # bool [T]
    sequence: Tensor  # int64 [T], trajectory index
    samples: tuple[int, ...]  # in the order of their trained tokens, as indices into what `micro_batches` was given
    real: int  # tokens of the samples
    computed: int  # tokens in the rows that are not padding; less than ``real`` where rows are shared

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device, copied without waiting where the memory allows it."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: v.to(device, non_blocking=True) for k, v in tensors.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def micro_batches(
    samples: Sequence[Sample],
    tokens_per_microbatch: int,
    *,
    pad_token: int = 0,
    max_padding: float = MAX_PADDING,
    share: bool = False,
) -> list[MicroBatch]:
    """Micro-batches of rows of similar length, longest first; each sample is in exactly one.

    A micro-batch has at most ``tokens_per_microbatch`` padded tokens (a longer sample stands alone) and at most a
    share of ``max_padding`` of padding. ``share``: compute common prefixes of a group's samples once, where it pays.
    """
    inputs = [sample.tokens[:-1] for sample in samples]
    if share:
        rows = lay_out(inputs, [sample.group for sample in samples], tokens_per_microbatch)
    else:
        rows = plain_rows([tokens.size for tokens in inputs])
    plans = plan([row.length for row in rows], tokens_per_microbatch, max_padding)
    return [_pad(samples, [rows[line] for line in lines], pad_token) for lines in plans]


def plan(lengths: Sequence[int], budget: int, max_padding: float = MAX_PADDING) -> list[tuple[int, ...]]:
    """Indices of ``lengths``, cut into micro-batches under ``budget`` padded tokens and a share of padding."""
    plans: list[tuple[int, ...]] = []
    rows: list[int] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padded = (len(rows) + 1) * (lengths[rows[0]] if rows else lengths[index])
        if rows and (padded > budget or padded - real - lengths[index] > max_padding * padded):
            plans.append(tuple(rows))
            rows, real = [], 0
        rows.append(index)
        real += lengths[index]
    return [*plans, tuple(rows)] if rows else plans


def _pad(samples: Sequence[Sample], rows: Sequence[Row], pad_token: int) -> MicroBatch:
    shape = (len(rows), max(row.length for row in rows))
    tokens, places, owners = np.full(shape, pad_token, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    index: list[np.ndarray] = []
    for line, row in enumerate(rows):
        prefix = end = row.prefix
        for owner, sample in enumerate((samples[i] for i in row.samples), start=1):
            size = sample.tokens.size - 1
            where = np.arange(size)  # of each input in the row: the prefix, then behind the remainders so far
            where[prefix:] += end - prefix
            tokens[line, where] = sample.tokens[:-1]
            places[line, where] = np.arange(size)
            if len(row.samples) > 1:
                owners[line, where[prefix:]] = owner
            index.append(line * shape[1] + where[sample.mask.nonzero()[0] - 1])
            end += size - prefix
    order = tuple(chain.from_iterable(row.samples for row in rows))
    shared = any(len(row.samples) > 1 for row in rows)
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        places=torch.from_numpy(places) if shared else None,
        owners=torch.from_numpy(owners) if shared else None,
        index=torch.from_numpy(np.concatenate(index)),
        samples=order,
        real=sum(samples[i].tokens.size - 1 for i in order),
        computed=sum(row.length for row in rows),
        **_trained([samples[i] for i in order]),
    )


def _trained(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """What a `MicroBatch` tells of each trained token."""
    masks = [sample.mask for sample in samples]
    counts = [int(mask.sum()) for mask in masks]

    def trained(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([array[mask] for array, mask in zip(arrays, masks, strict=True)]))

    def repeated(values: Sequence[int], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype), counts))

    return {
        "targets": trained([sample.tokens for sample in samples]).long(),
        "old": trained([sample.old for sample in samples]),
        "behaviour": trained([sample.behaviour for sample in samples]),
        "advantages": trained([sample.advantages for sample in samples]),
        "weights": trained([sample.weights for sample in samples]),
        "replayed": repeated([sample.replayed for sample in samples], np.bool_),
        "sequence": repeated([sample.trajectory for sample in samples], np.int64),
    }
