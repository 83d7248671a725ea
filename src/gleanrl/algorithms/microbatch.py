"""Micro-batches: padded rows of samples for one forward pass, and the flat list of their trained tokens.

The learners call `micro_batches`. Members of a group start with the same prompt, and often with the same first words
of the answer. A shared row holds their common prefix once and then each member's remainder. Fewer tokens go through the
model's layers, but attention in a longer row costs more. `lay_out` estimates which layout of a group costs less.
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

MAX_PADDING = 0.1  # share of a micro-batch that may be padding
EVEN_LENGTH = 1024  # tokens at which attention in a shared row costs as much as all else; 4 layers of width 128
LONGEST_SHARED_ROW = 1024  # tokens; bounds the attention mask, whose size is quadratic in them


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded rows of samples for one forward pass, and the flat list of their T trained tokens.

    A row holds all tokens of its sample but the last one. Padding is on the right, where the trained positions of a
    causal model do not attend to it. In a shared row (see `Row`) a position of the prefix may predict a token of each
    of the row's samples.
    """

    tokens: Tensor  # int64 [B, L]
    places: Tensor | None  # int64 [B, L], each token's place in its sample; None where every row is plain
    owners: Tensor | None  # int64 [B, L], number (from 1) of a token's sample in a shared row; 0 = all of its samples
    index: Tensor  # int64 [T], position in the flattened [B * L] whose output predicts a trained token
    targets: Tensor  # int64 [T], the trained tokens
    old: Tensor  # float32 [T], log-probs in the denominator of the ratio
    behaviour: Tensor  # float32 [T], log-probs as sampled
    advantages: Tensor  # float32 [T]
    weights: Tensor  # float32 [T]
    off_policy: Tensor  # bool [T]
    sequence: Tensor  # int64 [T], trajectory index
    version: Tensor  # int64 [T], oldest weights that sampled any token of its trajectory
    values: Tensor | None  # float32 [T], the critic's predictions before the update; None without a critic
    returns: Tensor | None  # float32 [T], the critic's targets
    samples: tuple[int, ...]  # indices into the samples given to `micro_batches`, in the order of their trained tokens
    real: int  # number of input tokens of the samples
    computed: int  # number of tokens in the rows without padding; less than ``real`` if rows are shared

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on another device. Copies to a GPU are asynchronous: the host does not wait for them."""
        target = torch.device(device)
        moved = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                if target.type == "cuda" and value.device.type == "cpu":
                    value = value.pin_memory()  # a copy from pageable memory would be synchronous
                moved[field.name] = value.to(target, non_blocking=target.type == "cuda")
        return replace(self, **moved)

    def untrained(self) -> MicroBatch:
        """Return a copy of the rows with none of their tokens trained."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("tokens", "places", "owners")}
        nothing = {name: value[:0] for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **nothing, samples=())

    def nothing(self) -> MicroBatch:
        """Return a single untrained token, for a process that must take part in a pass without data of its own."""
        blank = self.untrained()
        return replace(blank, tokens=self.tokens[:1, :1], places=None, owners=None, real=0, computed=0)


def row_layout(places: Tensor | None, owners: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the further inputs that a model needs for shared rows, an empty dict if every row is plain.

    They are ``position_ids`` int64 [B, L] and an additive ``attention_mask`` [B, 1, L, L] of ``dtype``. A token attends
    to itself and to those tokens before it that all samples of its row share or that belong to its own sample.
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
    """Pack samples into micro-batches of rows of similar length, longest first; each sample is in exactly one.

    A micro-batch has at most ``tokens_per_microbatch`` padded tokens (a longer sample stands alone) and at most a
    share of ``max_padding`` of padding. ``share``: compute common prefixes of a group's samples once, if cheaper.
    """
    inputs = [sample.tokens[:-1] for sample in samples]
    if share:
        rows = lay_out(inputs, [sample.group for sample in samples], tokens_per_microbatch)
    else:
        rows = [Row((index,), 0, tokens.size) for index, tokens in enumerate(inputs)]
    plans = plan([row.length for row in rows], tokens_per_microbatch, max_padding)
    return [_pad(samples, [rows[line] for line in lines], pad_token) for lines in plans]


def plan(lengths: Sequence[int], budget: int, max_padding: float = MAX_PADDING) -> list[tuple[int, ...]]:
    """Cut the indices of ``lengths`` into micro-batches of at most ``budget`` tokens, with little padding."""
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
            where = np.arange(size)  # position of each input: the prefix, then after the remainders added so far
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
    """Return the fields of a `MicroBatch` with one value for each trained token."""
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


# --- rows that samples share ---
@dataclass(frozen=True, slots=True)
class Row:
    """A single sample, or several samples whose first ``prefix`` inputs are the same and which share a row."""

    samples: tuple[int, ...]  # indices into the ``inputs`` of `lay_out`
    prefix: int  # 0 for a single sample
    length: int  # number of inputs in the row


def lay_out(inputs: Sequence[IntArray], groups: Sequence[int], longest: int = LONGEST_SHARED_ROW) -> list[Row]:
    """Return rows of least estimated cost; each sample is in exactly one, and samples of a row are of one group.

    ``inputs``: int32[n] of each sample; ``groups``: its group. No shared row is longer than ``longest``.
    """
    # In lexicographic order, samples with the longest common prefixes are neighbours.
    order = sorted(range(len(inputs)), key=lambda i: (groups[i], inputs[i].astype(">i4").tobytes(), i))
    rows: list[Row] = []
    for _, members in groupby(order, key=lambda i: groups[i]):
        rows += _cheapest(list(members), inputs, min(longest, LONGEST_SHARED_ROW))
    return rows


def _cheapest(members: Sequence[int], inputs: Sequence[IntArray], longest: int) -> list[Row]:
    """Return the cheapest cut of the sorted ``members`` into rows of neighbours, by dynamic programming."""
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
                break  # with further members the prefix is shorter still and the row longer
            cost, rows = best[start]
            if cost + _cost(shared) < choice[0]:
                choice = (cost + _cost(shared), (*rows, shared))
        best.append(choice)
    return list(best[-1][1])


def _cost(row: Row) -> float:
    """Cost of a row, in tokens through the layers.

    A shared row needs an explicit mask, so that both halves of its attention matrix are computed.
    """
    attention = row.length**2 / EVEN_LENGTH
    return row.length + (attention if len(row.samples) > 1 else attention / 2)


def _common(a: IntArray, b: IntArray) -> int:
    """Return the length of the common prefix."""
    size = min(a.size, b.size)
    different = (a[:size] != b[:size]).nonzero()[0]
    return int(different[0]) if different.size else size
