"""Engines compute gradients, optimizer steps and log-probs of samples for one model, synchronously.

`TorchLearner` decides which samples enter which update; an `Engine` computes the update. `LocalEngine` holds a
transformers model. Its `Placement` says whether the model is in this process, or sharded over several
(`gleanrl.learners.distributed.fsdp`). Another library's model needs its own engine (docs/howto/sharded.md).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gleanrl.algorithms.batch import Sample
from gleanrl.algorithms.loss import LossContext, Tokens, loglinear, objective, precompute, scope_of
from gleanrl.algorithms.loss_statistics import Statistics
from gleanrl.algorithms.microbatch import MicroBatch, micro_batches
from gleanrl.config.settings import CriticSettings, LearnerSettings, LossSettings
from gleanrl.learners import checkpoint
from gleanrl.learners.critic import Critic, CriticStatistics, capture
from gleanrl.learners.logprobs import can_share_rows, trained_logprobs
from gleanrl.learners.models import (
    AUTO,
    add_adapters,
    attention_kernel,
    export,
    merged_weights,
    use_attention_kernel,
    without_dropout,
)
from gleanrl.learners.optim import adamw, finish_gradient, zero_gradients
from gleanrl.types import FloatArray

CPU_TOKENS_PER_MICROBATCH = 2048  # larger micro-batches are no faster on a CPU, and exceed its caches
PEAK_BFLOAT16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}  # dense FLOP/s
T = TypeVar("T")


class TokenScores(NamedTuple):
    """A policy's estimates for one sample; 0 at positions that are not trained."""

    logprobs: FloatArray  # float32[n]
    entropy: FloatArray  # float32[n]


@dataclass(frozen=True, slots=True)
class Pass:
    """Statistics of a forward and backward pass over samples; passes can be added."""

    statistics: Statistics
    critic: CriticStatistics
    loss: float = 0.0  # weighted sum, before the normaliser
    trained: int = 0  # tokens with a loss
    left_out_tokens: float = 0.0  # trained tokens that a masking correction removes from the denominator
    left_out_sequences: float = 0.0  # sequences that it removes
    real: int = 0  # tokens of the samples
    computed: int = 0  # tokens through the model, where common prefixes of a group may be computed once
    padded: int = 0  # ``computed`` plus padding

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Pass:
        return cls(Statistics.empty(device), CriticStatistics.empty(device))

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


class Engine(Protocol):
    """Trains one model. Gradients of `backward` add up until `step` uses them or `discard` forgets them."""

    def backward(
        self,
        samples: Sequence[Sample],
        *,
        version: int = 0,
        kl_coefficient: float | None = None,
        untouched: bool = False,
    ) -> Pass:
        """Add the gradient of the loss over whole trajectories.

        ``version``: that of the weights at the start of the step. ``untouched``: whether the weights have not changed
        since then, so that current and recorded log-probs differ only as trainer and sampler do.
        """
        ...

    def step(self, normaliser: float, lr: float, *, policy: bool = True) -> float:
        """Divide, clip and apply the gradient, and return its norm. A gradient whose norm is not finite is not applied.

        Gradients are zero afterwards. With ``policy=False`` only the critic is updated.
        """
        ...

    between: Callable[[], None]
    """Called between two micro-batches, on the thread that computes them; it may lend the device to other work."""

    def discard(self) -> None: ...
    def score(self, samples: Sequence[Sample], *, reference: bool = False) -> list[TokenScores]:
        """Return log-probs and entropies of trained tokens under the policy or its reference, without gradient."""
        ...

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the critic's value of the state before each trained token, without gradient."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return whole tensors by Hugging Face parameter name, with adapters merged."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizers into the existing ``folder``."""
        ...

    def load(self, folder: Path) -> None:
        """Load what `save` wrote. Everything is read before anything is changed."""
        ...

    def export(self, folder: Path, tokenizer: Any = None) -> None: ...
    def usage(self, tokens: int, seconds: float) -> dict[str, float]:
        """Return device metrics of the last work; empty on a CPU."""
        ...


class Placement:
    """Where a model's parameters are, and which process works on which samples. This class uses this process only.

    A subclass may use several processes (`gleanrl.learners.distributed.fsdp.Fsdp`). All of them then call the same
    methods in the same order with the same samples, and each works on its share.
    """

    ranks = 1
    """Number of processes that the model is spread over."""
    leads = True
    """Whether the results of this process are used."""
    casts = False
    """Whether parameters are cast to the dtype of a forward pass, so that it needs no autocast."""

    def place(self, model: nn.Module) -> None:
        """Put the parameters where they belong, in place; gradients are then sums over all processes."""

    def agree(self, decide: Callable[[], T]) -> T:
        """Return what ``decide`` returns in the leading process. Called before the models are placed."""
        return decide()

    def budget(self, tokens: int, limit: int) -> int:
        """Return how many padded tokens a micro-batch may have, at most ``limit``, for ``tokens`` in total."""
        del tokens
        return limit

    def deal(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return this process's share of the micro-batches, as many as others' but maybe without trained tokens."""
        return list(micros)

    def join(self, parts: Sequence[Tokens]) -> tuple[Tokens, slice]:
        """Return the tokens of all processes, and the slice of them that is this process's ``parts``."""
        return join_tokens(parts), slice(None)

    def total(self, seen: Pass) -> Pass:
        """Return the sum over all processes."""
        return seen

    def gather(self, rows: Mapping[int, T]) -> Mapping[int, T]:
        """Return the results of all processes by sample; complete only in the process that `leads`."""
        return rows

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole of a parameter that may be sharded; only the process that `leads` gets it."""
        return tensor


def join_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Join the tokens of several micro-batches."""
    columns: dict[str, Any] = {}
    for field in fields(Tokens):
        values = [getattr(part, field.name) for part in parts]
        columns[field.name] = None if values[0] is None else torch.cat(values)
    return Tokens(**columns)


HERE = Placement()


class LocalEngine:
    """A causal language model of transformers, whole on one device or spread over processes by ``placement``.

    ``compute_dtype``: dtype that forward passes are autocast to (default: bfloat16 on a GPU), float32 for no autocast.
    ``reference``: a frozen model for the KL term; if it is needed and not given, the model as it is now.
    ``critic``: settings of a critic, if the estimator needs one.
    ``trains``: False for a model that is only evaluated. It has no gradients, optimizer, reference or critic, and
    `load` does not read theirs.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: LearnerSettings,
        loss: LossSettings,
        *,
        pad_token: int,
        temperature: float,
        reference: nn.Module | None = None,
        critic: CriticSettings | None = None,
        compute_dtype: torch.dtype | None = None,
        seed: int = 0,
        placement: Placement = HERE,
        trains: bool = True,
    ) -> None:
        self.trains = trains
        critic = critic if trains else None
        self.settings, self.loss, self.pad_token = settings, loss, pad_token
        self.temperature = temperature or 1.0  # 0 is greedy sampling, which records log-probs at temperature 1
        device = next(model.parameters()).device
        self.compute_dtype = compute_dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        asked = settings.attn_implementation
        kernel = placement.agree(lambda: attention_kernel(model, asked, self.compute_dtype))
        for whole in filter(None, (model, reference)):
            use_attention_kernel(whole, kernel, asked=asked != AUTO)
        if loss.kl_coefficient and reference is None and not settings.lora_rank and trains:
            reference = copy.deepcopy(model)
        self.placement = placement
        place = placement.place
        self.critic = None if critic is None else Critic(model, critic, place)  # made before adapters are added
        self.model: Any = add_adapters(model, settings, seed) if settings.lora_rank else model
        self.reference: Any = reference.requires_grad_(False).eval() if reference is not None else None
        without_dropout(self.model)
        if self.critic is not None:
            without_dropout(self.critic.module)
        if settings.activation_checkpointing:
            given = {"use_reentrant": False}
            for body in filter(None, (self.model, self.critic and self.critic.body)):
                if hasattr(body, "activation_checkpointing_enable"):  # the method's name in newer transformers
                    body.activation_checkpointing_enable(activation_checkpointing_kwargs=given)
                else:
                    body.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given)
                body.train()  # transformers checkpoints activations in training mode only

        def may_share_rows() -> bool:
            """Return whether shared rows are exact, and faster as measured: on a CPU in float32, if models allow."""
            if device.type != "cpu" or self.compute_dtype != torch.float32:
                return False
            return all(can_share_rows(whole) for whole in (self.model, self.reference) if whole is not None)

        self.share_rows = placement.agree(may_share_rows)
        for whole in filter(None, (self.model, self.reference)):
            placement.place(whole)
        self.device = next(self.model.parameters()).device
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if trains:
            self.optimizer = adamw(self.model, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)
        self.discard()
        self.between: Callable[[], None] = lambda: None

    def backward(
        self,
        samples: Sequence[Sample],
        *,
        version: int = 0,
        kl_coefficient: float | None = None,
        untouched: bool = False,
    ) -> Pass:
        """Add the gradient of sum(weights * values) over ``samples``, one micro-batch at a time."""
        total = Pass.empty(self.device)
        sums: list[Tensor] = []
        micros = self._micro_batches(samples)
        mine = [micro.to(self.device) for micro in self.placement.deal(micros)]
        penalised = self.loss.kl_coefficient and self.loss.kl_in == "loss"

        # If the scope of the loss exceeds a micro-batch, a forward pass over all of them comes first, for `precompute`.
        contexts: Sequence[LossContext | None] = [None] * len(mine)
        scope = scope_of(self.loss)
        exceeds = scope == "update"
        if scope == "sequence":
            sequences = [set(micro.sequence.tolist()) for micro in micros]
            exceeds = sum(map(len, sequences)) > len(set().union(*sequences))
        if exceeds and len(micros) > 1:
            with torch.no_grad():
                parts = [self._tokens(micro, self._logprobs(self.model, micro)[0], version) for micro in mine]
            tokens, own = self.placement.join(parts)
            contexts = precompute(tokens, self.loss).take(own).split([part.logp.numel() for part in parts])

        for number, (micro, context) in enumerate(zip(mine, contexts, strict=True)):
            if number:
                self.between()
            with self._hidden_states() as hidden:
                logp, entropy = self._logprobs(self.model, micro)
            ref_logp = self._reference_scores(micro)[0] if penalised else None
            result = objective(
                self._tokens(micro, logp, version),
                self.loss,
                kl_coefficient=kl_coefficient,
                entropy=entropy,
                ref_logp=ref_logp,
                context=context,
                current_logp=logp if untouched else None,
            )
            loss = (micro.weights * result.values).sum()
            sums.append(torch.stack([loss.detach(), result.left_out_tokens, result.left_out_sequences]))
            value_statistics = CriticStatistics.empty(self.device)
            if self.critic is not None and micro.values is not None:
                with self._autocast():
                    values = self.critic.values(micro, hidden[0] if hidden else None)
                losses, value_statistics = self.critic.loss(micro, values)
                coefficient = self.critic.settings.coefficient if hidden else 1.0
                loss = loss + coefficient * (micro.weights * losses).sum()
            loss.backward()
            total += Pass(
                result.statistics,
                value_statistics,
                trained=micro.targets.numel(),
                real=micro.real,
                computed=micro.computed,
                padded=micro.tokens.numel(),
            )
        if not sums:
            return total
        weighted, left_out_tokens, left_out_sequences = torch.stack(sums).double().sum(0).tolist()
        seen = replace(total, loss=weighted, left_out_tokens=left_out_tokens, left_out_sequences=left_out_sequences)
        return self.placement.total(seen)

    def _tokens(self, micro: MicroBatch, logp: Tensor, version: int) -> Tokens:
        old, behaviour = micro.old, None
        if self.settings.old_logprobs != "sampler":
            behaviour = micro.behaviour
        if self.settings.old_logprobs == "loglinear":
            staleness = torch.where(micro.off_policy, 0, (version - micro.version).clamp(min=0))
            old = loglinear(micro.behaviour, logp, staleness)
        return Tokens(logp, old, micro.advantages, micro.sequence, micro.off_policy, behaviour)

    def _hidden_states(self) -> AbstractContextManager[list[Tensor]]:
        shared = self.critic is not None and self.critic.body is None
        return capture(self.model) if shared else nullcontext([])

    def step(self, normaliser: float, lr: float, *, policy: bool = True) -> float:
        norms = []
        if (critic := self.critic) is not None:
            norms.append(finish_gradient(critic.parameters, normaliser, critic.settings.max_grad_norm))
        if policy:
            norms.append(finish_gradient(self.parameters, normaliser, self.settings.max_grad_norm))
        if all(map(math.isfinite, norms)):
            if critic is not None and norms[0] > 0:  # without any value loss the critic is not updated
                critic.optimizer.step()
            if policy:
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                self.optimizer.step()
        self.discard()
        return next((norm for norm in norms if not math.isfinite(norm)), norms[-1])

    def discard(self) -> None:
        if self.trains:
            zero_gradients(self.parameters)
        if self.critic is not None:
            zero_gradients(self.critic.parameters)

    def score(self, samples: Sequence[Sample], *, reference: bool = False) -> list[TokenScores]:
        compute = self._reference_scores if reference else partial(self._logprobs, self.model)
        return [TokenScores(*row) for row in self._by_sample(samples, compute)]

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        def one(micro: MicroBatch) -> tuple[Tensor]:
            assert self.critic is not None
            with self._hidden_states() as hidden, self._autocast():
                if self.critic.body is None:
                    self._logprobs(self.model, micro.untrained())  # computes the hidden states
                return (self.critic.values(micro, hidden[0] if hidden else None),)

        return [row[0] for row in self._by_sample(samples, one)]

    @torch.no_grad()
    def _by_sample(
        self, samples: Sequence[Sample], compute: Callable[[MicroBatch], tuple[Tensor, ...]]
    ) -> list[list[FloatArray]]:
        """Return, as float32[n] for each sample, the tensors [T] that ``compute`` returns for micro-batches."""
        found: dict[int, list[FloatArray]] = {}
        for number, micro in enumerate(self.placement.deal(self._micro_batches(samples))):
            if number:
                self.between()
            results = [values.float().cpu().numpy() for values in compute(micro.to(self.device))]
            start = 0
            for sample in micro.samples:
                mask = samples[sample].mask
                stop = start + int(mask.sum())
                found[sample] = [np.zeros(mask.size, np.float32) for _ in results]
                for row, values in zip(found[sample], results, strict=True):
                    row[mask] = values[start:stop]
                start = stop
        gathered = self.placement.gather(found)
        return [gathered[sample] for sample in range(len(samples))] if self.placement.leads else []

    def weights(self) -> Mapping[str, Tensor]:
        return merged_weights(self.model, self.placement.whole)

    def save(self, folder: Path) -> None:
        checkpoint.write(folder, *self._state())

    def load(self, folder: Path) -> None:
        checkpoint.read(folder, *self._state(), weights_only=not self.trains)

    def _state(self) -> tuple[dict[str, Tensor], checkpoint.Optimizers]:
        """Return a checkpoint's tensors (trained weights, those of reference and critic) and the optimizers."""
        tensors = {f"weights/{name}": p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        optimizers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        if self.trains:
            optimizers["policy"] = self.model, self.optimizer
        if self.reference is not None:
            tensors |= {f"reference/{name}": p.detach() for name, p in self.reference.named_parameters()}
        if self.critic is not None:
            tensors |= {f"critic/{name}": p.detach() for name, p in self.critic.module.named_parameters()}
            optimizers["critic"] = self.critic.module, self.critic.optimizer
        return tensors, optimizers

    def export(self, folder: Path, tokenizer: Any = None) -> None:
        export(folder, self.model, self.weights(), tokenizer)

    def usage(self, tokens: int, seconds: float) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        metrics = {"learner/memory_gib/max": torch.cuda.max_memory_allocated(self.device) / 2**30}
        torch.cuda.reset_peak_memory_stats(self.device)
        name = torch.cuda.get_device_name(self.device)
        peak = next((flops for key, flops in PEAK_BFLOAT16.items() if key in name), None)
        if peak is not None and seconds > 0:
            parameters = sum(p.numel() for p in self.model.parameters())
            # forward and backward take 6 FLOPs per parameter and token
            metrics["learner/mfu"] = 6 * parameters * (tokens / self.placement.ranks) / seconds / peak
        return metrics

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        budget = self.settings.tokens_per_microbatch
        if self.device.type == "cpu":
            budget = min(budget, CPU_TOKENS_PER_MICROBATCH)
        budget = self.placement.budget(sum(sample.tokens.size for sample in samples), budget)
        return micro_batches(samples, budget, pad_token=self.pad_token, share=self.share_rows)

    def _logprobs(self, model: nn.Module, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            return trained_logprobs(
                model,
                micro.tokens,
                micro.index,
                micro.targets,
                self.temperature,
                places=micro.places,
                owners=micro.owners,
            )

    @torch.no_grad()
    def _reference_scores(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        if self.reference is not None:
            return self._logprobs(self.reference, micro)
        with self.model.disable_adapter():  # the base model without adapters is the initial policy
            return self._logprobs(self.model, micro)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32 or self.placement.casts:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)
