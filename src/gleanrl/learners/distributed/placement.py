"""Where a model's parameters are and who works on which samples: in this process, or spread over several.

`LocalEngine` holds a model and says what is computed; a `Placement` says where. `fsdp.py` has the one
that spreads a model over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gleanrl.algorithms.microbatch import MicroBatch
from gleanrl.algorithms.policy_losses import Tokens

if TYPE_CHECKING:
    from gleanrl.learners.engine import Pass

T = TypeVar("T")


class Placement(Protocol):
    """All processes call the same methods in the same order; each sees the same samples and takes its share of them."""

    ranks: int
    """Processes that the model is spread over."""
    leads: bool
    """Whether this process is the one whose results are used."""
    casts: bool
    """Whether parameters come in the dtype of a forward pass, so that it needs no autocast."""

    def place(self, model: nn.Module) -> None:
        """Put the parameters where they belong, in place; gradients are then sums over all processes."""
        ...

    def agree(self, decide: Callable[[], T]) -> T:
        """What the leading process decides, before its models are placed."""
        ...

    def budget(self, tokens: int, limit: int) -> int:
        """Padded tokens of a micro-batch, where ``tokens`` are to be learned from and ``limit`` fit at most."""
        ...

    def deal(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This process's share of all micro-batches; as many for each, the last of some without a trained token."""
        ...

    def join(self, parts: Sequence[Tokens]) -> tuple[Tokens, slice]:
        """The tokens of all processes, this one's in ``parts``, and where its own are among them."""
        ...

    def total(self, seen: Pass) -> Pass:
        """What all processes saw."""
        ...

    def gather(self, rows: Mapping[int, T]) -> Mapping[int, T]:
        """What all processes found, by sample; of use where it `leads`."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a parameter, where it `leads`; elsewhere nothing of use."""
        ...


class OneProcess:
    """Everything is here."""

    ranks, leads, casts = 1, True, False

    def place(self, model: nn.Module) -> None:
        del model

    def agree(self, decide: Callable[[], T]) -> T:
        return decide()

    def budget(self, tokens: int, limit: int) -> int:
        del tokens
        return limit

    def deal(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        return list(micros)

    def join(self, parts: Sequence[Tokens]) -> tuple[Tokens, slice]:
        return joined(parts), slice(None)

    def total(self, seen: Pass) -> Pass:
        return seen

    def gather(self, rows: Mapping[int, T]) -> Mapping[int, T]:
        return rows

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor


def joined(parts: Sequence[Tokens]) -> Tokens:
    """The tokens of several micro-batches in one list."""
    columns: dict[str, Any] = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Tokens)}
    whole: dict[str, Any] = {name: None if c[0] is None else torch.cat(c) for name, c in columns.items()}
    return Tokens(**whole)
