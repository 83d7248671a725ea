"""What an engine asks of the library that computes a model: passes, updates, weights and checkpoints.

`gleanrl.learners.engine.LocalEngine` knows what the loss is. A `Backend` knows how the model runs: in one process or
sharded over several (`gleanrl.learners.transformers`), or by another library (`gleanrl.learners.distributed.megatron`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from gleanrl.algorithms.batch import Sample
from gleanrl.algorithms.loss import Tokens
from gleanrl.algorithms.loss_statistics import Statistics
from gleanrl.algorithms.microbatch import MicroBatch
from gleanrl.learners.critic import CriticStatistics
from gleanrl.utils.weights import Layout

T = TypeVar("T")
Which = Literal["policy", "reference", "critic"]


@dataclass(frozen=True, slots=True)
class Pass:
    """Statistics of a forward and backward pass over samples. ``a + b`` holds the statistics of both passes."""

    statistics: Statistics
    critic: CriticStatistics
    loss: float = 0.0  # weighted sum of the tokens' losses, not yet divided by the normaliser
    trained: int = 0  # number of trained tokens
    observed: int = 0  # number of tokens of the observation loss
    observed_nats: float = 0.0  # sum of -log p over them
    left_out_tokens: float = 0.0  # trained tokens that a masking correction removes from the denominator
    left_out_sequences: float = 0.0  # sequences that a masking correction removes from the denominator
    real: int = 0  # number of input tokens of the samples
    computed: int = 0  # input tokens in the rows; less than ``real`` if samples of a group share a prefix in a row
    padded: int = 0  # ``computed`` plus padding

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Pass:
        return cls(Statistics.empty(device), CriticStatistics.empty(device))

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


class Replicas:
    """Divides micro-batches among the replicas of a model, and joins the results of the replicas.

    Each replica computes other micro-batches. This class stands for a single replica in a single process. A subclass
    may have several, each of one or more processes (`gleanrl.learners.distributed.replicas.RankReplicas`). All
    processes call the same methods in the same order.
    """

    ranks = 1
    """Number of processes over which the model is distributed."""
    leads = True
    """Whether this process returns the results. Of several processes, only rank 0 does."""

    def budget(self, tokens: int, limit: int) -> int:
        """Return the largest number of tokens, including padding, that a micro-batch may have.

        It is ``limit``, or less if ``tokens`` tokens in total would not make enough micro-batches for all replicas.
        """
        del tokens
        return limit

    def deal(self, parts: Sequence[Sequence[Sample]]) -> list[Sequence[Sample]]:
        """Return the samples of each micro-batch that this process computes.

        ``parts`` are the samples of every micro-batch. Only the process that `leads` passes them. Every process gets
        the same number, because all processes take part in each pass of a sharded model. A process for which no
        micro-batch is left gets a sample of a single token (see `gleanrl.algorithms.microbatch.make_micro_batch`).
        """
        return list(parts)

    def agree(self, decide: Callable[[], T]) -> T:
        """Return, in every process, what ``decide`` returns in the process that `leads`, the only one that calls it."""
        return decide()

    def join(self, parts: Sequence[Tokens]) -> tuple[Tokens, slice]:
        """Join the tokens of all replicas, because the loss of a token may depend on tokens of other replicas.

        ``parts`` holds the tokens of each of this process's micro-batches. Returns all tokens as one `Tokens`, and the
        slice of these that are this process's. Called in the processes that get the results of passes.
        """
        return join_tokens(parts), slice(None)

    def total(self, seen: Pass) -> Pass:
        """Return the sum of the statistics of all replicas, in the process that `leads`.

        ``seen`` are the statistics of this process.
        """
        return seen

    def gather(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return the results for all micro-batches that were passed to `deal`, in the process that `leads`.

        ``results`` are those for each micro-batch of this process, on the CPU. They are missing in a process that does
        not get the results of passes. Results for padding come last.
        """
        return list(results)


def join_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Concatenate the tokens of several micro-batches."""
    columns: dict[str, Any] = {}
    for field in fields(Tokens):
        values = [getattr(part, field.name) for part in parts]
        columns[field.name] = None if values[0] is None else torch.cat(values)
    return Tokens(**columns)


class Backend(Protocol):
    """Holds a model with its optimizer state, and runs passes over micro-batches.

    A pass takes all micro-batches of this process at once, because a pipeline works on several at the same time. Of the
    processes that compute a micro-batch together, some may never get its results, such as the first stage of a
    pipeline. Their functions ``receive`` and ``loss`` are not called.
    """

    model: Any
    """The model of transformers whose config, and settings of adapters, exports contain. Its parameters may be sharded,
    or on the meta device."""
    device: torch.device
    replicas: Replicas
    packs_rows: bool
    """Whether passes can compute packed rows (`gleanrl.algorithms.microbatch.Packing`)."""

    def forward(
        self,
        which: Which,
        micros: Sequence[MicroBatch],
        receive: Callable[[int, tuple[Tensor, ...]], None],
        between: Callable[[], None],
    ) -> None:
        """Compute the policy, the reference model or the critic without gradient.

        Calls ``receive(k, results)`` for each micro-batch k, in any order. The results are [T] tensors with one value
        for each trained token: log-probs and entropies, or with ``which="critic"`` values. ``between`` is called
        wherever the pass can pause, in all processes alike: between two micro-batches, or between two groups of them.
        """
        ...

    def backward(
        self,
        micros: Sequence[MicroBatch],
        loss: Callable[[int, Tensor, Tensor, Tensor | None], Tensor],
        between: Callable[[], None],
    ) -> None:
        """Compute the policy and add the gradient of the loss, which is summed over micro-batches and replicas.

        ``loss(k, logp, entropy, values)`` returns the loss of micro-batch k as a scalar. Its arguments are [T] tensors
        with gradient: log-probs, entropies, and the critic's values if there is a critic and the micro-batch has values
        to train it. ``between`` is as in `forward`.
        """
        ...

    def step(self, normaliser: float, lr: float, *, policy: bool = True) -> float:
        """See `gleanrl.learners.engine.Engine.step`."""
        ...

    def discard(self) -> None:
        """Set the gradient to zero."""
        ...

    def layout(self, dtype: torch.dtype | None) -> Mapping[str, Layout]:
        """Return the shapes and dtypes of the policy's tensors by Hugging Face parameter name.

        ``dtype`` is that of all tensors; None means that of the model.
        """
        ...

    adapter_scale: float | None
    """`AdaptedWeights.scale` of the policy; None if it has no adapters, or others than this class can represent."""

    def gather(self, names: Sequence[str], dtype: torch.dtype | None, *, merge: bool = True) -> Mapping[str, Tensor]:
        """Return some of the policy's tensors, unsharded, with adapters merged if ``merge`` and converted to ``dtype``.

        Only the process that `leads` must get them. All processes call this method, because it is a collective.
        """
        ...

    def adapters(self) -> Mapping[str, Tensor]:
        """See `gleanrl.learners.engine.Engine.adapters`. All processes call this method, because it is a collective."""
        ...

    def save(self, folder: Path) -> None:
        """See `gleanrl.learners.engine.Engine.save`. All processes call this method, because it is a collective."""
        ...

    def load(self, folder: Path) -> None:
        """See `gleanrl.learners.engine.Engine.load`. All processes call this method, because it is a collective."""
        ...
