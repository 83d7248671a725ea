"""Packs samples into micro-batches: padded rows for one forward pass, and the flat list of their trained tokens.

The learners call `micro_batches`. The samples of a group start with the same prompt, and often with the same first
words of the answer. A *plain* row of a micro-batch holds one sample. A *shared* row holds several samples of a group:
their common prefix once, and then the remainder of each. With shared rows, fewer tokens go through the model's layers,
but attention costs more, because the rows are longer. `lay_out` chooses the rows with the least estimated cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.algorithms.batch import Sample
from gleanrl.types import FloatArray, IntArray

MAX_PADDING = 0.1  # largest share of a micro-batch's tokens that may be padding
# Length of a shared row, in tokens, at which attention costs as much as the rest of the model; for a model with 4
# layers of width 128.
EVEN_LENGTH = 1024
LONGEST_SHARED_ROW = 1024  # tokens; limits the size of the attention mask, which is quadratic in the length


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B padded rows of samples for one forward pass, and the flat list of their T trained tokens.

    A plain row holds all tokens of its sample except the last one, which is only predicted. Padding is on the right,
    where no trained position of a causal model attends to it. In a shared row (see `Row`), a position of the common
    prefix may predict several trained tokens, one for each sample of the row.
    """

    tokens: Tensor  # int64 [B, L], token ids
    places: Tensor | None  # int64 [B, L], position of each token in its sample; None if every row is plain
    # int64 [B, L], in a shared row the number (from 1) of the sample that a token belongs to, 0 for a token of the
    # common prefix; 0 in plain rows. None if every row is plain.
    owners: Tensor | None
    index: Tensor  # int64 [T], for each trained token, the position in the flattened [B * L] that predicts it
    targets: Tensor  # int64 [T], ids of the trained tokens
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
    computed: int  # number of tokens in the rows, without padding; less than ``real`` if rows are shared

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
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("tokens", "places", "owners")}
        nothing = {name: value[:0] for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **nothing, samples=())

    def nothing(self) -> MicroBatch:
        """Return a micro-batch of one untrained token, for a process without data that must take part in a pass."""
        blank = self.untrained()
        return replace(blank, tokens=self.tokens[:1, :1], places=None, owners=None, real=0, computed=0)


def row_layout(places: Tensor | None, owners: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the keyword arguments that a model needs for shared rows; an empty dict if every row is plain.

    They are ``position_ids`` int64 [B, L] and ``attention_mask`` [B, 1, L, L] of ``dtype``, which is added to attention
    scores. A token attends to itself, to earlier tokens of its sample, and to the common prefix of its row.
    ``places`` and ``owners`` are those of a `MicroBatch`.
    """
    if places is None or owners is None:
        return {}
    theirs = owners[:, None, :]
    visible = ((theirs == 0) | (theirs == owners[:, :, None])).tril()
    mask = torch.zeros(visible.shape, dtype=dtype, device=owners.device).masked_fill_(~visible, -torch.inf)
    return {"position_ids": places, "attention_mask": mask[:, None]}


def micro_batches(
    samples: Sequence[Sample],
    tokens_per_microbatch: int,
    *,
    pad_token: int = 0,
    max_padding: float = MAX_PADDING,
    share: bool = False,
) -> list[MicroBatch]:
    """Pack samples into micro-batches whose rows have similar lengths, longest rows first.

    Each sample is in exactly one micro-batch.

    Args:
        tokens_per_microbatch: largest number of tokens in a micro-batch, including padding. A sample that is longer
            gets its own micro-batch.
        pad_token: token id at padded positions.
        max_padding: largest share of a micro-batch's tokens that may be padding.
        share: use shared rows, which hold the common prefix of a group's samples once, where the estimated cost is
            lower.
    """
    inputs = [sample.tokens[:-1] for sample in samples]
    if share:
        rows = lay_out(inputs, [sample.group for sample in samples], tokens_per_microbatch)
    else:
        rows = [Row((index,), 0, tokens.size) for index, tokens in enumerate(inputs)]
    plans = plan([row.length for row in rows], tokens_per_microbatch, max_padding)
    return [_pad(samples, [rows[line] for line in lines], pad_token) for lines in plans]


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


def _pad(samples: Sequence[Sample], rows: Sequence[Row], pad_token: int) -> MicroBatch:
    shape = (len(rows), max(row.length for row in rows))
    tokens, places, owners = np.full(shape, pad_token, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    index: list[np.ndarray] = []
    for line, row in enumerate(rows):
        prefix = end = row.prefix
        for owner, sample in enumerate((samples[i] for i in row.samples), start=1):
            size = sample.tokens.size - 1
            # Position of each input in the row: the prefix stays in front, and the remainder of the sample follows
            # the remainders of the samples before it.
            where = np.arange(size)
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

    return {
        "targets": trained([sample.tokens for sample in samples]).long(),
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


# --- shared rows ---
@dataclass(frozen=True, slots=True)
class Row:
    """The layout of one row: a single sample, or several samples whose first ``prefix`` input tokens are the same."""

    samples: tuple[int, ...]  # indices into the ``inputs`` of `lay_out`
    prefix: int  # number of input tokens that the samples share; 0 for a single sample
    length: int  # number of input tokens in the row


def lay_out(inputs: Sequence[IntArray], groups: Sequence[int], longest: int = LONGEST_SHARED_ROW) -> list[Row]:
    """Lay out samples in rows, so that the estimated cost is least.

    Each sample is in exactly one row, and all samples of a row belong to the same group.

    Args:
        inputs: the input tokens int32[n] of each sample.
        groups: the index of each sample's group.
        longest: largest length of a shared row, in tokens; `LONGEST_SHARED_ROW` applies in addition.
    """
    # In lexicographic order, samples with the longest common prefixes are neighbours.
    order = sorted(range(len(inputs)), key=lambda i: (groups[i], inputs[i].astype(">i4").tobytes(), i))
    rows: list[Row] = []
    for _, members in groupby(order, key=lambda i: groups[i]):
        rows += _cheapest(list(members), inputs, min(longest, LONGEST_SHARED_ROW))
    return rows


def _cheapest(members: Sequence[int], inputs: Sequence[IntArray], longest: int) -> list[Row]:
    """Return the rows of least cost for the samples of one group, found by dynamic programming.

    ``members`` are the samples' indices in lexicographic order of their tokens. A row holds consecutive members.
    """
    sizes = [inputs[index].size for index in members]
    common = [0, *(_common(inputs[a], inputs[b]) for a, b in pairwise(members))]
    best: list[tuple[float, tuple[Row, ...]]] = [(0.0, ())]  # best[n]: cost and rows of the first n members
    for stop in range(1, len(members) + 1):
        alone = Row((members[stop - 1],), 0, sizes[stop - 1])
        cost, rows = best[stop - 1]
        choice = (cost + _cost(alone), (*rows, alone))
        prefix, total = sizes[stop - 1], sizes[stop - 1]
        for start in range(stop - 2, -1, -1):
            prefix, total = min(prefix, common[start + 1]), total + sizes[start]
            count = stop - start
            shared = Row(tuple(members[start:stop]), prefix, total - (count - 1) * prefix)
            if not prefix or shared.length > longest:
                break  # a row with more members would have a shorter prefix and be even longer
            cost, rows = best[start]
            if cost + _cost(shared) < choice[0]:
                choice = (cost + _cost(shared), (*rows, shared))
        best.append(choice)
    return list(best[-1][1])


def _cost(row: Row) -> float:
    """Return the estimated cost of a row, in units of the cost of one token without attention.

    Attention in a plain row costs half as much as in a shared row of the same length: a shared row needs an explicit
    mask, with which the half of the attention matrix above the diagonal is computed too.
    """
    attention = row.length**2 / EVEN_LENGTH
    return row.length + (attention if len(row.samples) > 1 else attention / 2)


def _common(a: IntArray, b: IntArray) -> int:
    """Return the number of tokens at the start that ``a`` and ``b`` have in common."""
    size = min(a.size, b.size)
    different = (a[:size] != b[:size]).nonzero()[0]
    return int(different[0]) if different.size else size
