"""Where a model is trained: gradients, optimizer step and log-probs of samples, all synchronous.

`TorchLearner` decides what is trained when; an `Engine` does it. `LocalEngine` does it with a model of transformers,
whole or, given another `Placement`, with its parameters spread over processes. Another library's model is one more
engine (docs/howto/sharded.md).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gleanrl.algorithms.batch import Sample
from gleanrl.algorithms.loss import LossContext, Tokens, loglinear, objective, precompute, scope_of
from gleanrl.algorithms.loss_statistics import Statistics
from gleanrl.algorithms.microbatch import MicroBatch, micro_batches
from gleanrl.config.settings import CriticSettings, LearnerSettings, LossSettings
from gleanrl.learners import attention, checkpoint
from gleanrl.learners.critic import Critic, CriticStatistics, capture
from gleanrl.learners.device import model_flops_utilisation, peak_memory_gib
from gleanrl.learners.distributed import shards
from gleanrl.learners.distributed.placement import OneProcess, Placement
from gleanrl.learners.export import export
from gleanrl.learners.logprobs import trained_logprobs
from gleanrl.learners.lora import add_adapters, merged_weights
from gleanrl.learners.models import checkpoint_activations, without_dropout
from gleanrl.learners.optim import adamw, finish_gradient, set_learning_rate, zero_gradients
from gleanrl.learners.sharing import can_share_rows
from gleanrl.learners.turn import in_turn
from gleanrl.types import FloatArray

CPU_TOKENS_PER_MICROBATCH = 2048  # a CPU gains nothing from larger ones, and its caches lose
HERE = OneProcess()


class TokenScores(NamedTuple):
    """The policy's view of one sample; 0 at positions that are not trained."""

    logprobs: FloatArray  # float32[n]
    entropy: FloatArray  # float32[n]


@dataclass(frozen=True, slots=True)
class Pass:
    """What a forward and backward pass over samples saw; passes add up."""

    statistics: Statistics
    critic: CriticStatistics
    loss: float = 0.0  # weighted sum, before the normaliser
    trained: int = 0  # tokens with a loss
    left_out_tokens: float = 0.0  # of them, taken out of the denominator by a masking correction
    left_out_sequences: float = 0.0
    real: int = 0  # tokens of the samples
    computed: int = 0  # tokens through the model: common prefixes of a group may go through once
    padded: int = 0  # the same with padding

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
        """Gradient of the loss over whole trajectories.

        ``version``: of the weights at the start of the step; ``untouched``: they are still those, so that what lies
        between them and the recorded log-probs is the sampler's difference.
        """
        ...

    def step(self, normaliser: float, lr: float, *, policy: bool = True) -> float:
        """Divide, clip and apply the gradient; its norm. Not finite: nothing is applied. Gradients are zero after.

        ``policy=False``: only the critic is moved.
        """
        ...

    between: Callable[[], None]
    """Called between two micro-batches, on the thread that computes them: others may have the device meanwhile."""

    def discard(self) -> None: ...
    def score(self, samples: Sequence[Sample]) -> list[TokenScores]: ...
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]: ...
    def values(self, samples: Sequence[Sample]) -> list[FloatArray]: ...

    def weights(self) -> Mapping[str, Tensor]:
        """Whole tensors by Hugging Face parameter name, adapters merged."""
        ...

    def save(self, folder: Path) -> Sequence[str]:
        """Write weights and optimizers into ``folder``, which is there; the names of the files."""
        ...

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote; read and check everything before anything is changed."""
        ...

    def export(self, folder: Path, tokenizer: Any = None) -> None: ...
    def usage(self, tokens: int, seconds: float) -> dict[str, float]:
        """Metrics of the device for work just done; empty where they mean nothing."""
        ...


class LocalEngine:
    """A causal language model of transformers, whole on one device or spread over processes by ``placement``.

    ``compute_dtype``: forward passes run under autocast to it unless it is float32 (default: bfloat16 on a GPU).
    ``reference``: a frozen model for the KL term; where it is needed and not given, the model as it is now.
    ``critic``: settings of a critic, where the estimator needs one.
    ``trains``: False for a model that is only looked at: no gradients, optimizer, reference or critic, which are not
    loaded either.
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
        self.temperature = temperature or 1.0  # greedy sampling records log-probs at temperature 1
        device = next(model.parameters()).device
        self.compute_dtype = compute_dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        asked = settings.attn_implementation
        kernel = placement.agree(lambda: attention.chosen(model, asked, self.compute_dtype))
        for whole in filter(None, (model, reference)):
            attention.use(whole, kernel, asked=asked != attention.AUTO)
        if loss.kl_coefficient and reference is None and not settings.lora_rank and trains:
            reference = copy.deepcopy(model)
        self.placement = placement
        place = placement.place
        self.critic = None if critic is None else Critic(model, critic, place)  # of the model without adapters
        self.model: Any = add_adapters(model, settings, seed) if settings.lora_rank else model
        self.reference: Any = reference.requires_grad_(False).eval() if reference is not None else None
        without_dropout(self.model)
        if self.critic is not None:
            without_dropout(self.critic.module)
        if settings.activation_checkpointing:
            for body in filter(None, (self.model, self.critic and self.critic.body)):
                checkpoint_activations(body)
        self.share_rows = placement.agree(self._may_share_rows)
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
        mine = self._mine(micros)
        for micro, context in in_turn(zip(mine, self._contexts(micros, mine, version), strict=True), self.between):
            with self._hidden_states() as hidden:
                logp, entropy = self._logprobs(self.model, micro)
            penalised = self.loss.kl_coefficient and self.loss.kl_in == "loss"
            ref_logp = self._reference_logprobs(micro) if penalised else None
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
            value_loss, critic = self._value_loss(micro, hidden)
            (loss if value_loss is None else loss + value_loss).backward()
            total += Pass(
                result.statistics,
                critic,
                trained=micro.targets.numel(),
                real=micro.real,
                computed=micro.computed,
                padded=micro.tokens.numel(),
            )
        if not sums:
            return total
        loss, tokens, sequences = torch.stack(sums).double().sum(0).tolist()
        seen = replace(total, loss=loss, left_out_tokens=tokens, left_out_sequences=sequences)
        return self.placement.total(seen)

    def _tokens(self, micro: MicroBatch, logp: Tensor, version: int) -> Tokens:
        old, behaviour = micro.old, None
        if self.settings.old_logprobs != "sampler":
            behaviour = micro.behaviour
        if self.settings.old_logprobs == "loglinear":
            staleness = torch.where(micro.replayed, 0, (version - micro.version).clamp(min=0))
            old = loglinear(micro.behaviour, logp, staleness)
        return Tokens(logp, old, micro.advantages, micro.sequence, micro.replayed, behaviour)

    def _contexts(
        self, micros: Sequence[MicroBatch], mine: Sequence[MicroBatch], version: int
    ) -> Sequence[LossContext | None]:
        """For each of ``mine`` what its tokens must know of others elsewhere; None where all they need is in it.

        Costs one more forward pass where a loss looks further than a micro-batch reaches.
        """
        scope = scope_of(self.loss)
        sequences = [set(micro.sequence.tolist()) for micro in micros] if scope == "sequence" else []
        apart = scope == "update" or sum(map(len, sequences)) > len(set().union(*sequences))
        if scope == "token" or len(micros) < 2 or not apart:
            return [None] * len(mine)
        with torch.no_grad():
            parts = [self._tokens(micro, self._logprobs(self.model, micro)[0], version) for micro in mine]
        tokens, own = self.placement.join(parts)
        return precompute(tokens, self.loss).take(own).split([part.logp.numel() for part in parts])

    def _hidden_states(self) -> AbstractContextManager[list[Tensor]]:
        shared = self.critic is not None and self.critic.body is None
        return capture(self.model) if shared else nullcontext([])

    def _value_loss(self, micro: MicroBatch, hidden: Sequence[Tensor]) -> tuple[Tensor | None, CriticStatistics]:
        """What the critic adds to the loss of a micro-batch, aggregated as the policy's is; nothing to an imitation."""
        if self.critic is None or micro.values is None:
            return None, CriticStatistics.empty(self.device)
        with self._autocast():
            values = self.critic.values(micro, hidden[0] if hidden else None)
        losses, statistics = self.critic.loss(micro, values)
        coefficient = self.critic.settings.coefficient if hidden else 1.0
        return coefficient * (micro.weights * losses).sum(), statistics

    def step(self, normaliser: float, lr: float, *, policy: bool = True) -> float:
        norms = [] if self.critic is None else [self.critic.finish(normaliser)]
        if policy:
            norms.append(finish_gradient(self.parameters, normaliser, self.settings.max_grad_norm))
        if all(map(math.isfinite, norms)):
            if self.critic is not None and norms[0] > 0:  # an update that no value loss was in leaves it alone
                self.critic.optimizer.step()
            if policy:
                set_learning_rate(self.optimizer, lr)
                self.optimizer.step()
        self.discard()
        return next((norm for norm in norms if not math.isfinite(norm)), norms[-1])

    def discard(self) -> None:
        if self.trains:
            zero_gradients(self.parameters)
        if self.critic is not None:
            zero_gradients(self.critic.parameters)

    def score(self, samples: Sequence[Sample]) -> list[TokenScores]:
        """Log-probs and entropies of the trained tokens, without gradient, in the order of ``samples``."""
        return [TokenScores(*row) for row in self._by_sample(samples, lambda m: self._logprobs(self.model, m))]

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Log-probs of the trained tokens under the reference, in the order of ``samples``."""
        return [row[0] for row in self._by_sample(samples, lambda m: (self._reference_logprobs(m),))]

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """The critic's value of the state before each trained token, in the order of ``samples``."""

        def one(micro: MicroBatch) -> tuple[Tensor]:
            assert self.critic is not None
            with self._hidden_states() as hidden, self._autocast():
                if self.critic.body is None:
                    self._logprobs(self.model, micro.untrained())  # for its hidden states
                return (self.critic.values(micro, hidden[0] if hidden else None),)

        return [row[0] for row in self._by_sample(samples, one)]

    @torch.no_grad()
    def _by_sample(
        self, samples: Sequence[Sample], look: Callable[[MicroBatch], tuple[Tensor, ...]]
    ) -> list[list[FloatArray]]:
        """What ``look`` tells of the trained tokens of each micro-batch, float32[n] for each sample."""
        found: dict[int, list[FloatArray]] = {}
        for micro in in_turn(self._mine(self._micro_batches(samples)), self.between):
            results = [values.float().cpu().numpy() for values in look(micro)]
            start = 0
            for sample in micro.samples:
                mask = samples[sample].mask
                stop = start + int(mask.sum())
                found[sample] = [np.zeros(mask.size, np.float32) for _ in results]
                for row, values in zip(found[sample], results, strict=True):
                    row[mask] = values[start:stop]
                start = stop
        everyone = self.placement.gather(found)
        return [everyone[sample] for sample in range(len(samples))] if self.placement.leads else []

    def weights(self) -> Mapping[str, Tensor]:
        return merged_weights(self.model, self.placement.whole)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        parts = {"weights": {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}}
        if self.reference is not None:
            parts["reference"] = {name: p.detach() for name, p in self.reference.named_parameters()}
        if self.critic is not None:
            parts["critic"] = self.critic.weights()
        return parts

    def optimizer_state(self) -> dict[str, Any]:
        critic = {} if self.critic is None else {"critic": self.critic.optimizer.state_dict()}
        return {"policy": self.optimizer.state_dict(), **critic}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(shards.spread(state["policy"], self.optimizer))
        if self.critic is not None:
            self.critic.optimizer.load_state_dict(shards.spread(state["critic"], self.critic.optimizer))

    def save(self, folder: Path) -> Sequence[str]:
        return (checkpoint.write if self.placement.ranks == 1 else shards.write)(folder, self)

    def load(self, folder: Path) -> None:
        (shards.read if shards.are_in(folder) else checkpoint.read)(folder, self)

    def export(self, folder: Path, tokenizer: Any = None) -> None:
        export(folder, self.model, self.weights(), tokenizer)

    def usage(self, tokens: int, seconds: float) -> dict[str, float]:
        parameters = sum(p.numel() for p in self.model.parameters())
        values = {
            "learner/memory_gib/max": peak_memory_gib(self.device),
            "learner/mfu": model_flops_utilisation(self.device, parameters, tokens / self.placement.ranks, seconds),
        }
        return {name: value for name, value in values.items() if value is not None}

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        budget = self.settings.tokens_per_microbatch
        if self.device.type == "cpu":
            budget = min(budget, CPU_TOKENS_PER_MICROBATCH)
        budget = self.placement.budget(sum(sample.tokens.size for sample in samples), budget)
        return micro_batches(samples, budget, pad_token=self.pad_token, share=self.share_rows)

    def _mine(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        return [micro.to(self.device) for micro in self.placement.deal(micros)]

    def _may_share_rows(self) -> bool:
        """Only where it was measured to pay and is exact: on a CPU, without autocast, and if the models allow it."""
        if next(self.model.parameters()).device.type != "cpu" or self.compute_dtype != torch.float32:
            return False
        return all(can_share_rows(model) for model in (self.model, self.reference) if model is not None)

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
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor:
        if self.reference is not None:
            return self._logprobs(self.reference, micro)[0]
        with self.model.disable_adapter():  # the base under the adapters is the initial policy
            return self._logprobs(self.model, micro)[0]

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32 or self.placement.casts:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)
