"""From samples to padded rows for one forward pass, and the flat list of their trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.algorithms.batch import Sample
from gleanrl.algorithms.rows import Row, lay_out, plain_rows
from gleanrl.types import FloatArray

MAX_PADDING = 0.1  # share of a micro-batch that may be padding


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded rows of samples for one forward pass, and the flat list of their T trained tokens.

    Rows hold all tokens but the last, padded on the right, where a causal model's trained positions cannot see.
    Where a row is shared (see `gleanrl.algorithms.rows`) a position in the prefix may predict a token of each
    of its samples.
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
    version: Tensor  # int64 [T], oldest weights that sampled any of its trajectory
    values: Tensor | None  # float32 [T], the critic's before the update; None without one
    returns: Tensor | None  # float32 [T], what the critic is to learn
    samples: tuple[int, ...]  # in the order of their trained tokens, as indices into what `micro_batches` was given
    real: int  # tokens of the samples
    computed: int  # tokens in the rows that are not padding; less than ``real`` where rows are shared

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device; a GPU copies it beside its work, and the host does not wait."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: _sent(v, torch.device(device)) for name, v in tensors.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def untrained(self) -> MicroBatch:
        """The same rows with none of their tokens trained."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("tokens", "places", "owners")}
        nothing = {name: value[:0] for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **nothing, samples=())

    def nothing(self) -> MicroBatch:
        """A single token, not trained: takes part in a pass that others need, and adds nothing to it."""
        blank = self.untrained()
        return replace(blank, tokens=self.tokens[:1, :1], places=None, owners=None, real=0, computed=0)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # from pageable memory it would wait


def row_layout(places: Tensor | None, owners: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a model must be told of shared rows, nothing where every row is plain.

    ``position_ids`` int64 [B, L] and an additive ``attention_mask`` [B, 1, L, L] of ``dtype``: a token sees, up to
    itself, what all samples of its row share and what is its own sample's.
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


def _trained(samples: Sequence[Sample]) -> dict[str, Any]:
    """What a `MicroBatch` tells of each trained token."""
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
        "replayed": repeated([sample.replayed for sample in samples], np.bool_),
        "sequence": repeated([sample.trajectory for sample in samples], np.int64),
    }
