"""Engines, which compute gradients, optimizer steps and log-probs for one model. Their methods are synchronous.

`TorchLearner` decides which samples enter which update, and an `Engine` computes the update. `LocalEngine` is the
engine for a model of transformers. Its `Placement` determines whether the model is in this process or sharded over
several (`gleanrl.learners.distributed.fsdp`). A model of another library, such as Megatron-core, needs another engine
(docs/howto/sharded.md).
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
from gleanrl.learners.freed_memory import KEPT_BYTES, keep_freed_memory, return_freed_memory
from gleanrl.learners.logprobs import can_pack_rows, trained_logprobs
from gleanrl.learners.models import (
    AUTO,
    adapter_weights,
    add_adapters,
    attention_kernel,
    export,
    export_adapters,
    merged_weights,
    use_attention_kernel,
    without_dropout,
)
from gleanrl.learners.optim import adamw, finish_gradient, zero_gradients
from gleanrl.learners.packed_attention import use_packed_attention
from gleanrl.types import FloatArray

CPU_TOKENS_PER_MICROBATCH = 2048  # larger micro-batches are no faster on a CPU, because they exceed its caches
# Peak dense bfloat16 FLOP/s by a part of the GPU's name, to compute the model FLOPs utilisation (MFU).
PEAK_BFLOAT16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
T = TypeVar("T")


class TokenScores(NamedTuple):
    """A policy's log-probs and entropies for one sample of n tokens. They are 0 at tokens that are not trained."""

    logprobs: FloatArray  # float32[n], log-prob of each trained token
    entropy: FloatArray  # float32[n], entropy in nats of the distribution of each trained token


@dataclass(frozen=True, slots=True)
class Pass:
    """Statistics of a forward and backward pass over samples. ``a + b`` holds the statistics of both passes."""

    statistics: Statistics
    critic: CriticStatistics
    loss: float = 0.0  # weighted sum of the tokens' losses, not yet divided by the normaliser
    trained: int = 0  # number of trained tokens
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


class Engine(Protocol):
    """Trains one model.

    Calls of `backward` add to the gradients until `step` applies them, or `discard` sets them to zero.
    """

    def backward(
        self,
        samples: Sequence[Sample],
        *,
        version: int = 0,
        kl_coefficient: float | None = None,
        untouched: bool = False,
    ) -> Pass:
        """Add the gradient of the loss over ``samples``, and return statistics of the pass.

        Args:
            samples: all samples of each of their trajectories, because some losses depend on whole sequences.
            version: version of the weights at the start of the step.
            kl_coefficient: factor of the KL term in the loss; None means ``loss.kl_coefficient``.
            untouched: whether the weights have not changed since the start of the step. If so, log-probs recorded under
                these weights differ from the current ones only by the numerical difference between sampler and trainer,
                which the metrics then report.
        """
        ...

    def step(self, normaliser: float, lr: float, *, policy: bool = True) -> float:
        """Divide the gradient by ``normaliser``, clip it, update the weights, and return the norm before clipping.

        If the norm is not finite, the weights are not changed. In any case the gradient is zero afterwards. ``lr`` is
        the policy's learning rate. With ``policy=False`` only the critic is updated.
        """
        ...

    between: Callable[[], None]
    """A function that is called between two micro-batches, on the thread that computes them. It may release the device
    to more urgent work and return when the device is acquired again."""

    def discard(self) -> None: ...
    def score(self, samples: Sequence[Sample], *, reference: bool = False) -> list[TokenScores]:
        """Compute log-probs and entropies of the trained tokens of each sample, without gradient.

        They are those of the policy, or with ``reference=True`` those of the reference model.
        """
        ...

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Compute the critic's value before each trained token, float32[n] for each sample, without gradient."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the policy's tensors by Hugging Face parameter name, unsharded and with adapters merged."""
        ...

    def adapters(self) -> Mapping[str, Tensor]:
        """Return the LoRA adapters by peft's names, unsharded; see `gleanrl.learners.models.adapter_weights`."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer states and random state into ``folder``, which exists."""
        ...

    def load(self, folder: Path) -> None:
        """Load what `save` wrote. An error leaves the engine unchanged, because all files are read first."""
        ...

    def export(self, folder: Path, tokenizer: Any = None) -> None: ...
    def export_adapters(self, folder: Path, base: str) -> None: ...
    def usage(self, tokens: int, seconds: float) -> dict[str, float]:
        """Return metrics of the device since the last call, such as the peak memory; an empty dict on a CPU.

        ``tokens`` is the number of tokens that went through the model in ``seconds``.
        """
        ...


class Placement:
    """Determines where a model's parameters are stored, and which process computes which micro-batches.

    This class stands for a single process. A subclass may use several
    (`gleanrl.learners.distributed.fsdp.Fsdp`). Each process then has a `LocalEngine` with a placement. All processes
    call the same methods in the same order with the same samples, and each computes its share of the micro-batches.
    """

    ranks = 1
    """Number of processes over which the model is distributed."""
    leads = True
    """Whether this process returns the results. Of several processes, only rank 0 does."""
    casts = False
    """Whether the placement itself casts parameters to the dtype of forward passes, so that the engine does not use
    autocast."""

    def place(self, model: nn.Module) -> None:
        """Move or shard the parameters of ``model``, in place.

        After this, a backward pass computes gradients that are sums over all processes, not means.
        """

    def agree(self, decide: Callable[[], T]) -> T:
        """Return, in every process, what ``decide`` returns in the leading process.

        It is called before the models are placed, because a sharded model could not compute in one process alone.
        """
        return decide()

    def budget(self, tokens: int, limit: int) -> int:
        """Return the largest number of tokens, including padding, that a micro-batch may have.

        It is at most ``limit``. A subclass may return less, so that ``tokens`` tokens in total make enough
        micro-batches for all processes.
        """
        del tokens
        return limit

    def deal(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches that this process computes.

        Every process gets the same number, because all processes take part in each pass of a sharded model. A process
        for which no micro-batch is left gets one without trained tokens.
        """
        return list(micros)

    def join(self, parts: Sequence[Tokens]) -> tuple[Tokens, slice]:
        """Join the tokens of all processes, because the loss of a token may depend on tokens of other processes.

        ``parts`` holds the tokens of each of this process's micro-batches. Returns all tokens as one `Tokens`, and the
        slice of these that are this process's.
        """
        return join_tokens(parts), slice(None)

    def total(self, seen: Pass) -> Pass:
        """Return the sum of the statistics of all processes. ``seen`` are the statistics of this process."""
        return seen

    def gather(self, rows: Mapping[int, T]) -> Mapping[int, T]:
        """Return the results for all samples, by index of the sample. ``rows`` holds those that this process computed.

        Only the process that `leads` must get the results of the other processes.
        """
        return rows

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather a parameter that may be sharded. Only the process that `leads` must get the whole tensor."""
        return tensor


def join_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Concatenate the tokens of several micro-batches."""
    columns: dict[str, Any] = {}
    for field in fields(Tokens):
        values = [getattr(part, field.name) for part in parts]
        columns[field.name] = None if values[0] is None else torch.cat(values)
    return Tokens(**columns)


HERE = Placement()


def _hashes(model: nn.Module) -> Tensor:
    """Return one hash of each parameter's bits, int64[parameters], on the CPU."""
    return torch.stack([torch.hash_tensor(p.detach()) for p in model.parameters()]).view(torch.int64).cpu()


def microbatch_budget(tokens: int, device: torch.device) -> int:
    """Return the largest number of tokens of a micro-batch on ``device``: ``tokens``, or less on a CPU."""
    return min(tokens, CPU_TOKENS_PER_MICROBATCH) if device.type == "cpu" else tokens


class LocalEngine:
    """The engine for a causal language model of transformers, on one device or sharded over processes.

    Args:
        model: the policy. It is trained in place.
        pad_token: token id at padded positions. Any valid id will do.
        temperature: the sampling temperature, at which log-probs are computed.
        reference: frozen model for the KL term. If None and the loss has a KL term, the reference is a copy of
            ``model`` as it is now, or with adapters the base model.
        critic: settings of the critic; None if the advantage estimator needs no values.
        compute_dtype: dtype of forward passes, by autocast. None means bfloat16 on a GPU and float32 on a CPU.
        seed: determines the initial values of adapters.
        placement: where the parameters are stored; by default, in this process.
        trains: False for a model that only computes log-probs. The engine then has no optimizer and no critic, makes no
            copy of the model as a reference, and `load` reads the model's weights only.

    Raises:
        UserError: if adapters cannot be added, or the requested attention implementation is not available.
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
        # Temperature 0 means greedy sampling, for which samplers record log-probs at temperature 1.
        self.temperature = temperature or 1.0
        device = next(model.parameters()).device
        if device.type == "cpu":
            keep_freed_memory()
        self.compute_dtype = compute_dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        asked = settings.attn_implementation
        kernel = placement.agree(lambda: attention_kernel(model, asked, self.compute_dtype))
        for whole in filter(None, (model, reference)):
            use_attention_kernel(whole, kernel, asked=asked != AUTO)
        # Packed rows need no padding, and compute common prefixes once. Copies of the model, such as the critic's, get
        # their attention from the model, so it is selected before they are made.
        wholes = [whole for whole in (model, reference) if whole is not None]
        for whole in wholes:
            without_dropout(whole)
        self.share_rows = placement.agree(lambda: all(map(can_pack_rows, wholes)))
        if self.share_rows:
            for whole in wholes:
                use_packed_attention(whole)
        if loss.kl_coefficient and reference is None and not settings.lora_rank and trains:
            reference = copy.deepcopy(model)
        self.placement = placement
        place = placement.place
        # The critic is made before adapters are added, because its copy of the model must not contain them.
        self.critic = None if critic is None else Critic(model, critic, place)
        # A checkpoint of adapters does not contain the model that they are added to, only one hash of each parameter.
        self.base: Tensor | None = None
        if settings.lora_rank:
            self.base = placement.agree(lambda: _hashes(model))
        self.model: Any = add_adapters(model, settings, seed) if settings.lora_rank else model
        self.reference: Any = reference.requires_grad_(False).eval() if reference is not None else None
        without_dropout(self.model)
        if settings.activation_checkpointing:
            given = {"use_reentrant": False}
            for body in filter(None, (self.model, self.critic and self.critic.body)):
                if hasattr(body, "activation_checkpointing_enable"):  # the name of the method in newer transformers
                    body.activation_checkpointing_enable(activation_checkpointing_kwargs=given)
                else:
                    body.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given)
                body.train()  # transformers uses activation checkpointing in training mode only

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
        """See `Engine.backward`. Samples are computed one micro-batch at a time."""
        total = Pass.empty(self.device)
        sums: list[Tensor] = []
        micros = self._micro_batches(samples)
        mine = [micro.to(self.device) for micro in self.placement.deal(micros)]
        penalised = self.loss.kl_coefficient and self.loss.kl_in == "loss"

        # If the loss of a token depends on tokens of other micro-batches, `precompute` needs the log-probs of all of
        # them. A forward pass without gradient over all micro-batches computes these first.
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
            # Without any value loss the gradient is zero. An update would then only apply the momentum.
            if critic is not None and norms[0] > 0:
                critic.optimizer.step()
            if policy:
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                self.optimizer.step()
        self.discard()
        if self.device.type == "cpu":
            return_freed_memory(KEPT_BYTES)
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
                    # Run the model for its hidden states only. Without trained tokens it computes no logits.
                    self._logprobs(self.model, micro.untrained())
                return (self.critic.values(micro, hidden[0] if hidden else None),)

        return [row[0] for row in self._by_sample(samples, one)]

    @torch.no_grad()
    def _by_sample(
        self, samples: Sequence[Sample], compute: Callable[[MicroBatch], tuple[Tensor, ...]]
    ) -> list[list[FloatArray]]:
        """Apply ``compute`` to the micro-batches of ``samples``, and return its results for each sample.

        ``compute`` returns tensors [T] with one value for each trained token of a micro-batch. For each sample of n
        tokens, the result holds as many arrays float32[n], which are 0 at tokens that are not trained. It is empty in a
        process that does not lead.
        """
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

    def adapters(self) -> Mapping[str, Tensor]:
        return adapter_weights(self.model, self.placement.whole)

    def save(self, folder: Path) -> None:
        checkpoint.write(folder, *self._state())

    def load(self, folder: Path) -> None:
        checkpoint.read(folder, *self._state(), weights_only=not self.trains)

    def _state(self) -> tuple[dict[str, Tensor], checkpoint.Optimizers]:
        """Return what a checkpoint contains: named tensors, and the optimizers.

        The tensors are the trained weights, the hashes of the base model if these are adapters, and, if the engine
        trains and has a reference or a critic, the weights of these.
        """
        tensors = {f"weights/{name}": p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        if self.base is not None:
            tensors[checkpoint.BASE] = self.base
        optimizers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        if self.trains:
            optimizers["policy"] = self.model, self.optimizer
        if self.reference is not None and self.trains:
            tensors |= {f"reference/{name}": p.detach() for name, p in self.reference.named_parameters()}
        if self.critic is not None:
            tensors |= {f"critic/{name}": p.detach() for name, p in self.critic.module.named_parameters()}
            optimizers["critic"] = self.critic.module, self.critic.optimizer
        return tensors, optimizers

    def export(self, folder: Path, tokenizer: Any = None) -> None:
        export(folder, self.model, self.weights(), tokenizer)

    def export_adapters(self, folder: Path, base: str) -> None:
        export_adapters(folder, self.model, self.adapters(), base)

    def usage(self, tokens: int, seconds: float) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        metrics = {"learner/memory_gib/max": torch.cuda.max_memory_allocated(self.device) / 2**30}
        torch.cuda.reset_peak_memory_stats(self.device)
        name = torch.cuda.get_device_name(self.device)
        peak = next((flops for key, flops in PEAK_BFLOAT16.items() if key in name), None)
        if peak is not None and seconds > 0:
            parameters = sum(p.numel() for p in self.model.parameters())
            # A forward and a backward pass take about 6 FLOPs per parameter and token.
            metrics["learner/mfu"] = 6 * parameters * (tokens / self.placement.ranks) / seconds / peak
        return metrics

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        budget = microbatch_budget(self.settings.tokens_per_microbatch, self.device)
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
                packing=micro.packing,
            )

    @torch.no_grad()
    def _reference_scores(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        if self.reference is not None:
            return self._logprobs(self.reference, micro)
        with self.model.disable_adapter():  # the reference is the base model, because it equals the initial policy
            return self._logprobs(self.model, micro)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32 or self.placement.casts:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)
