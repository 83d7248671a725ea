"""Packs samples into micro-batches: padded rows for one forward pass, and the flat list of their trained tokens.

The learners call `micro_batches`. A micro-batch consists of padded rows of one sample each, or of a single *packed*
row. A packed row holds several samples without padding, and what they have in common at their start only once: the
samples of a group start with the same prompt, and often with the same first words. `gleanrl.learners.packed_attention`
computes attention for such a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.algorithms.batch import Sample
from gleanrl.types import FloatArray, IntArray

MAX_PADDING = 0.1  # largest share of a micro-batch's tokens that may be padding
# Tokens of the shortest prefix that is computed once. Each prefix costs attention a further step.
MIN_SHARED = 16
# Tokens of a part of a packed row. Longer parts are cut, because causal attention computes the whole square of a part.
LONGEST_PART = 128
SHORT_PART = 64  # tokens; attention of shorter parts is computed in padded batches, because one part is too little work
MAX_PART_PADDING = 0.25  # largest share of such a batch that may be padding


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B rows of samples for one forward pass, and the flat list of their T trained and O observation tokens.

    A row holds all tokens of its sample except the last one, which is only predicted. Padding is on the right, where
    no trained position of a causal model attends to it. Instead, there may be one packed row of all samples (B = 1),
    in which a position of a common prefix may predict several trained tokens, one for each sample that has it.
    """

    tokens: Tensor  # int64 [B, L], token ids
    packing: Packing | None  # describes the packed row; None if the rows are padded
    index: Tensor  # int64 [T + O], for each such token, the position in the flattened [B * L] that predicts it
    targets: Tensor  # int64 [T + O], ids of the trained tokens, then those of the observation loss
    old: Tensor  # float32 [T], log-probs in the denominator of the probability ratio
    behaviour: Tensor  # float32 [T], log-probs recorded at sampling
    advantages: Tensor  # float32 [T]
    weights: Tensor  # float32 [T], factor of each token's loss in the sum over all tokens
    off_policy: Tensor  # bool [T], whether the token's sample is off-policy
    sequence: Tensor  # int64 [T], index of the token's trajectory in the batch
    version: Tensor  # int64 [T], version of the oldest weights that sampled a token of the trajectory
    values: Tensor | None  # float32 [T], the critic's predictions before the update; None without a critic
    returns: Tensor | None  # float32 [T], the critic's targets; None without a critic
    samples: tuple[int, ...]  # indices into the samples given to `micro_batches`, in the order of their trained tokens
    real: int  # number of input tokens of the samples
    computed: int  # number of tokens in the rows, without padding; less than ``real`` if samples share a prefix

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on another device. A copy to a GPU is asynchronous: the host does not wait for it."""
        target = torch.device(device)
        moved = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                if target.type == "cuda" and value.device.type == "cpu":
                    value = value.pin_memory()  # because a copy from pageable memory would be synchronous
                moved[field.name] = value.to(target, non_blocking=target.type == "cuda")
        return replace(self, **moved)

    def untrained(self) -> MicroBatch:
        """Return a copy with the same rows and no trained tokens, for a forward pass that computes no logits."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tokens"}
        nothing = {name: value[:0] for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **nothing, samples=())


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of a packed row of L tokens, which is a tree of parts.

    A part is a sequence of tokens that some samples have in common, or the remainder of one sample. A sample is the
    path from the start to one of the parts. The tokens of the parts that follow a part stand directly behind it, so
    what follows a part is a slice of the row.
    """

    positions: Tensor  # int64 [1, L], position of each token in its sample
    parts: tuple[slice, ...]  # parts, in which a token attends to itself and to the earlier ones
    batches: tuple[PaddedParts, ...]  # further parts, which are short
    shared: tuple[tuple[slice, slice], ...]  # (tokens, part): the tokens attend to the whole part, which precedes them

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for a model with `gleanrl.learners.packed_attention`.

        The mask is not used. It has four dimensions, for which transformers makes no mask of its own.
        """
        unused = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        return {"position_ids": self.positions, "attention_mask": unused, "packing": self}


@dataclass(frozen=True, slots=True)
class PaddedParts:
    """Short parts of a packed row whose attention is computed as one batch of n rows, padded on the right."""

    index: Tensor  # int64 [n, m], positions in the packed row; any position where a row is padded
    real: Tensor  # bool [n, m], False where a row is padded


def micro_batches(
    samples: Sequence[Sample],
    tokens_per_microbatch: int,
    *,
    pad_token: int = 0,
    share: bool = False,
) -> list[MicroBatch]:
    """Pack samples into micro-batches.

    Each sample is in exactly one micro-batch. Padded rows of a micro-batch have similar lengths, longest rows first.
    Samples of a packed row are in lexicographic order of their tokens, which brings common prefixes together.

    Args:
        tokens_per_microbatch: largest number of tokens in a micro-batch, including padding. A sample that is longer
            gets its own micro-batch.
        pad_token: token id at padded positions.
        share: make packed rows, which need `gleanrl.learners.packed_attention`.
    """
    plans = plan_rows(samples, tokens_per_microbatch, share=share)
    return [make_micro_batch(samples, rows, pad_token=pad_token, share=share) for rows in plans]


def plan_rows(samples: Sequence[Sample], tokens_per_microbatch: int, *, share: bool = False) -> list[tuple[int, ...]]:
    """Return the indices of the samples of each micro-batch that `micro_batches` makes of the same arguments."""
    if share:
        return plan_packed([sample.tokens[:-1] for sample in samples], tokens_per_microbatch)
    return plan([sample.tokens.size - 1 for sample in samples], tokens_per_microbatch)


def make_micro_batch(
    samples: Sequence[Sample], rows: Sequence[int], *, pad_token: int = 0, share: bool = False
) -> MicroBatch:
    """Make a micro-batch of the samples with the indices ``rows``, which are in the order of `plan_rows`.

    A sample of a single token has no input token. Its row is one token of padding, so that a process without data can
    take part in a pass.
    """
    if share and samples[rows[0]].tokens.size > 1:
        return pack(samples, rows)
    return _pad(samples, rows, pad_token)


def plan(lengths: Sequence[int], budget: int, max_padding: float = MAX_PADDING) -> list[tuple[int, ...]]:
    """Group rows of these ``lengths`` into micro-batches, and return the indices of the rows of each.

    A micro-batch has at most ``budget`` tokens, including padding (except for a single longer row), and at most a share
    of ``max_padding`` is padding.
    """
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


def _pad(samples: Sequence[Sample], rows: Sequence[int], pad_token: int) -> MicroBatch:
    """Make a micro-batch of padded rows, one for each of ``rows``, which are indices into ``samples``."""
    shape = (len(rows), max(1, *(samples[row].tokens.size - 1 for row in rows)))
    tokens = np.full(shape, pad_token, np.int64)
    index: list[np.ndarray] = []
    observed: list[np.ndarray] = []
    for line, sample in enumerate(samples[row] for row in rows):
        tokens[line, : sample.tokens.size - 1] = sample.tokens[:-1]
        index.append(line * shape[1] + sample.mask.nonzero()[0] - 1)
        if sample.observed is not None:
            observed.append(line * shape[1] + sample.observed.nonzero()[0] - 1)
    real = sum(samples[row].tokens.size - 1 for row in rows)
    return _micro_batch(samples, rows, tokens, index + observed, None, real)


def _micro_batch(
    samples: Sequence[Sample],
    rows: Sequence[int],
    tokens: np.ndarray,
    index: Sequence[np.ndarray],
    packing: Packing | None,
    computed: int,
) -> MicroBatch:
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        packing=packing,
        index=torch.from_numpy(np.concatenate(index)),
        samples=tuple(rows),
        real=sum(samples[row].tokens.size - 1 for row in rows),
        computed=computed,
        **_trained([samples[row] for row in rows]),
    )


def _trained(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return those fields of a `MicroBatch` that hold one value for each trained token of ``samples``."""
    masks = [sample.mask for sample in samples]
    counts = [int(mask.sum()) for mask in masks]

    def trained(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([array[mask] for array, mask in zip(arrays, masks, strict=True)]))

    def where_known(arrays: Sequence[FloatArray | None]) -> Tensor | None:
        known = [array for array in arrays if array is not None]
        return trained(known) if len(known) == len(arrays) else None

    def repeated(values: Sequence[int], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype), counts))

    targets = [sample.tokens[sample.mask] for sample in samples]
    targets += [sample.tokens[sample.observed] for sample in samples if sample.observed is not None]
    return {
        "targets": torch.from_numpy(np.concatenate(targets)).long(),
        "values": where_known([sample.values for sample in samples]),
        "returns": where_known([sample.returns for sample in samples]),
        "version": repeated([sample.version for sample in samples], np.int64),
        "old": trained([sample.old for sample in samples]),
        "behaviour": trained([sample.behaviour for sample in samples]),
        "advantages": trained([sample.advantages for sample in samples]),
        "weights": trained([sample.weights for sample in samples]),
        "off_policy": repeated([sample.off_policy for sample in samples], np.bool_),
        "sequence": repeated([sample.trajectory for sample in samples], np.int64),
    }


# --- packed rows ---
def plan_packed(inputs: Sequence[IntArray], budget: int) -> list[tuple[int, ...]]:
    """Divide samples into packed rows of at most ``budget`` tokens, except for a single longer sample.

    ``inputs`` are the input tokens int32[n] of each sample. Returns the indices of the samples of each row, in
    lexicographic order of their tokens.
    """
    plans: list[tuple[int, ...]] = []
    rows: list[int] = []
    length = 0
    for index in sorted(range(len(inputs)), key=lambda i: (inputs[i].astype(">i4").tobytes(), i)):
        size = inputs[index].size
        # Of the common prefix, up to this many tokens are not shared, because a part has at least `MIN_SHARED`.
        saved = max(0, _common(inputs[rows[-1]], inputs[index]) - MIN_SHARED + 1) if rows else 0
        if rows and length + size - saved > budget:
            plans.append(tuple(rows))
            rows, length, saved = [], 0, 0
        rows.append(index)
        length += size - saved
    return [*plans, tuple(rows)] if rows else plans


def pack(samples: Sequence[Sample], rows: Sequence[int]) -> MicroBatch:
    """Make a micro-batch of one packed row.

    ``rows`` are indices into ``samples``, in lexicographic order of the samples' tokens.
    """
    inputs = [samples[row].tokens[:-1] for row in rows]
    common = [_common(a, b) for a, b in pairwise(inputs)]
    where = [np.zeros(tokens.size, np.int64) for tokens in inputs]  # place of each token of a sample in the row
    tokens: list[IntArray] = []
    positions: list[np.ndarray] = []
    parts: list[slice] = []
    shared: list[tuple[slice, slice]] = []
    length = 0

    def place(first: int, last: int, start: int) -> None:
        """Place the samples ``first`` to ``last``, whose first ``start`` tokens are the same and already placed."""
        nonlocal length
        stop = min([inputs[first].size, *common[first:last]])
        own = []
        count = -(-(stop - start) // LONGEST_PART)
        for number in range(count):
            begin, end = (start + (stop - start) * n // count for n in (number, number + 1))
            part = slice(length, length + end - begin)
            for member in range(first, last + 1):
                where[member][begin:end] = np.arange(part.start, part.stop)
            tokens.append(inputs[first][begin:end])
            positions.append(np.arange(begin, end))
            own.append(part)
            length = part.stop
        begin = first
        for member in range(first, last + 1):
            if member == last or common[member] < stop + MIN_SHARED:
                if member > begin or inputs[member].size > stop:
                    place(begin, member, stop)
                begin = member + 1
        parts.extend(own)
        shared.extend((slice(part.stop, length), part) for part in own if part.stop < length)

    begin = 0
    for member in range(len(rows)):
        if member == len(rows) - 1 or common[member] < MIN_SHARED:
            place(begin, member, 0)
            begin = member + 1
    index = [places[samples[row].mask.nonzero()[0] - 1] for row, places in zip(rows, where, strict=True)]
    for row, places in zip(rows, where, strict=True):
        if (observed := samples[row].observed) is not None:
            index.append(places[observed.nonzero()[0] - 1])
    long = tuple(part for part in parts if part.stop - part.start >= SHORT_PART)
    packing = Packing(torch.from_numpy(np.concatenate(positions)[None]), long, _batches(parts), tuple(shared))
    return _micro_batch(samples, rows, np.concatenate(tokens)[None].astype(np.int64), index, packing, length)


def _batches(parts: Sequence[slice]) -> tuple[PaddedParts, ...]:
    """Return the short ones of ``parts`` as padded batches."""
    short = [part for part in parts if part.stop - part.start < SHORT_PART]
    batches = []
    sizes = [part.stop - part.start for part in short]
    for lines in plan(sizes, SHORT_PART * len(short), MAX_PART_PADDING):
        starts = torch.tensor([short[line].start for line in lines])[:, None]
        sizes_here = torch.tensor([sizes[line] for line in lines])[:, None]
        offsets = torch.arange(int(sizes_here.max()))
        real = offsets < sizes_here
        batches.append(PaddedParts(starts + torch.where(real, offsets, 0), real))
    return tuple(batches)


def _common(a: IntArray, b: IntArray) -> int:
    """Return the number of tokens at the start that ``a`` and ``b`` have in common."""
    size = min(a.size, b.size)
    different = (a[:size] != b[:size]).nonzero()[0]
    return int(different[0]) if different.size else size
