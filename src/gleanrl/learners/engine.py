"""Where a model is trained: gradients, optimizer step and log-probs of samples, all synchronous.

`TorchLearner` decides what is trained when; an `Engine` does it. A model sharded over processes is one more
engine.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gleanrl.batch import MicroBatch, Sample, micro_batches
from gleanrl.learners.device import model_flops_utilisation, peak_memory_gib
from gleanrl.learners.export import export
from gleanrl.learners.logprobs import trained_logprobs
from gleanrl.learners.lora import add_adapters, merged_weights
from gleanrl.learners.optim import adamw, finish_gradient, set_learning_rate, zero_gradients
from gleanrl.learners.sharing import can_share_rows
from gleanrl.loss import Tokens, objective
from gleanrl.loss_statistics import Statistics
from gleanrl.settings import LearnerSettings, LossSettings
from gleanrl.types import FloatArray

CPU_TOKENS_PER_MICROBATCH = 2048  # a CPU gains nothing from larger ones, and its caches lose


class TokenScores(NamedTuple):
    """The policy's view of one sample; 0 at positions that are not trained."""

    logprobs: FloatArray  # float32[n]
    entropy: FloatArray  # float32[n]


@dataclass(frozen=True, slots=True)
class Pass:
    """What a forward and backward pass over samples saw; passes add up."""

    statistics: Statistics
    loss: float = 0.0  # weighted sum, before the normaliser
    trained: int = 0  # tokens with a loss
    real: int = 0  # tokens of the samples
    computed: int = 0  # tokens through the model: common prefixes of a group may go through once
    padded: int = 0  # the same with padding

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.statistics + other.statistics,
            self.loss + other.loss,
            self.trained + other.trained,
            self.real + other.real,
            self.computed + other.computed,
            self.padded + other.padded,
        )


class Engine(Protocol):
    """Trains one model. Gradients of `backward` add up until `step` uses them or `discard` forgets them."""

    def backward(self, samples: Sequence[Sample]) -> Pass: ...

    def step(self, normaliser: float, lr: float) -> float:
        """Divide, clip and apply the gradient; its norm. Not finite: nothing is applied. Gradients are zero after."""
        ...

    def discard(self) -> None: ...
    def score(self, samples: Sequence[Sample]) -> list[TokenScores]: ...

    def weights(self) -> Mapping[str, Tensor]:
        """Whole tensors by Hugging Face parameter name, adapters merged."""
        ...

    def trained_weights(self) -> dict[str, Tensor]: ...
    def reference_weights(self) -> dict[str, Tensor]: ...
    def optimizer_state(self) -> dict[str, Any]: ...
    def load_optimizer_state(self, state: dict[str, Any]) -> None: ...
    def export(self, folder: Path, tokenizer: Any = None) -> None: ...
    def usage(self, tokens: int, seconds: float) -> dict[str, float]:
        """Metrics of the device for work just done; empty where they mean nothing."""
        ...


class LocalEngine:
    """The whole model on one device.

    ``compute_dtype``: forward passes run under autocast to it unless it is float32 (default: bfloat16 on a GPU).
    ``reference``: a frozen model for the KL term; where it is needed and not given, the model as it is now.
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
        compute_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.settings, self.loss, self.pad_token = settings, loss, pad_token
        self.temperature = temperature or 1.0  # greedy sampling records log-probs at temperature 1
        if loss.kl_coefficient and reference is None and not settings.lora_rank:
            reference = copy.deepcopy(model)
        self.model: Any = add_adapters(model, settings, seed) if settings.lora_rank else model
        self.reference: Any = reference.requires_grad_(False).eval() if reference is not None else None
        self.device = next(model.parameters()).device
        self.compute_dtype = compute_dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        _without_dropout(self.model)
        if settings.activation_checkpointing:
            _checkpoint_activations(self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = adamw(self.model, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)
        zero_gradients(self.parameters)
        self.share_rows = self._may_share_rows()

    def backward(self, samples: Sequence[Sample]) -> Pass:
        """Add the gradient of sum(weights * values) over ``samples``, one micro-batch at a time."""
        total = Pass(Statistics.empty(self.device))
        sums: list[Tensor] = []
        for micro in self._micro_batches(samples):
            logp, entropy = self._logprobs(self.model, micro)
            behaviour = micro.behaviour if self.settings.old_logprobs == "recompute" else None
            tokens = Tokens(logp, micro.old, micro.advantages, micro.sequence, micro.replayed, behaviour)
            ref_logp = self._reference_logprobs(micro) if self.loss.kl_coefficient else None
            result = objective(tokens, self.loss, entropy=entropy, ref_logp=ref_logp)
            loss = (micro.weights * result.values).sum()
            loss.backward()
            sums.append(loss.detach())
            seen = (micro.targets.numel(), micro.real, micro.computed, micro.tokens.numel())
            total += Pass(result.statistics, 0.0, *seen)
        if not sums:
            return total
        return total + Pass(Statistics.empty(self.device), float(torch.stack(sums).double().sum()))

    def step(self, normaliser: float, lr: float) -> float:
        norm = finish_gradient(self.parameters, normaliser, self.settings.max_grad_norm)
        if math.isfinite(norm):
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
        self.discard()
        return norm

    def discard(self) -> None:
        zero_gradients(self.parameters)

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[TokenScores]:
        """Log-probs and entropies of the trained tokens, without gradient, in the order of ``samples``."""
        scores = [TokenScores(*(np.zeros(s.tokens.size, np.float32) for _ in range(2))) for s in samples]
        for micro in self._micro_batches(samples):
            results = [values.float().cpu().numpy() for values in self._logprobs(self.model, micro)]
            start = 0
            for sample in micro.samples:
                mask = samples[sample].mask
                stop = start + int(mask.sum())
                for target, values in zip(scores[sample], results, strict=True):
                    target[mask] = values[start:stop]
                start = stop
        return scores

    def weights(self) -> Mapping[str, Tensor]:
        return merged_weights(self.model)

    def trained_weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def reference_weights(self) -> dict[str, Tensor]:
        return {} if self.reference is None else {n: p.detach() for n, p in self.reference.named_parameters()}

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def export(self, folder: Path, tokenizer: Any = None) -> None:
        export(folder, self.model, self.weights(), tokenizer)

    def usage(self, tokens: int, seconds: float) -> dict[str, float]:
        parameters = sum(p.numel() for p in self.model.parameters())
        values = {
            "learner/memory_gib/max": peak_memory_gib(self.device),
            "learner/mfu": model_flops_utilisation(self.device, parameters, tokens, seconds),
        }
        return {name: value for name, value in values.items() if value is not None}

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        budget = self.settings.tokens_per_microbatch
        if self.device.type == "cpu":
            budget = min(budget, CPU_TOKENS_PER_MICROBATCH)
        micros = micro_batches(samples, budget, pad_token=self.pad_token, share=self.share_rows)
        return [micro.to(self.device) for micro in micros]

    def _may_share_rows(self) -> bool:
        """Only where it was measured to pay and is exact: on a CPU, without autocast, and if the models allow it."""
        if self.device.type != "cpu" or self.compute_dtype != torch.float32:
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
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)


def _checkpoint_activations(model: Any) -> None:
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # its name in newer releases of transformers
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.train()  # transformers checkpoints activations in training mode only


def _without_dropout(model: nn.Module) -> None:
    """Log-probs must be those that the sampler saw, so dropout is off, in training mode too."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
