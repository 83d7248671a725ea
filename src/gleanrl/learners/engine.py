"""Engines, which compute gradients, optimizer steps and log-probs for one model. Their methods are synchronous.

`TorchLearner` decides which samples enter which update, and an `Engine` computes the update. `LocalEngine` deals out
micro-batches, computes the loss from the log-probs of a model, and sums up statistics. Its `Backend` runs the model:
with transformers in one process or sharded over several, or with another library. In a learner of several processes,
each has a `LocalEngine`, and `gleanrl.learners.distributed.sharded.ShardedEngine` calls all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gleanrl.algorithms.batch import Sample
from gleanrl.algorithms.loss import LossContext, Tokens, loglinear, objective, precompute, scope_of
from gleanrl.algorithms.microbatch import MicroBatch, make_micro_batch, plan_rows
from gleanrl.config.settings import CriticSettings, LearnerSettings, LossSettings
from gleanrl.learners.backend import Backend, Pass, Which
from gleanrl.learners.critic import CriticStatistics, critic_loss
from gleanrl.learners.transformers import TransformersBackend
from gleanrl.types import FloatArray
from gleanrl.utils.weights import AdaptedWeights, GatheredWeights

CPU_TOKENS_PER_MICROBATCH = 2048  # larger micro-batches are no faster on a CPU, because they exceed its caches
# Peak dense bfloat16 FLOP/s by a part of the GPU's name, to compute the model FLOPs utilisation (MFU).
PEAK_BFLOAT16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}


class TokenScores(NamedTuple):
    """A policy's log-probs and entropies for one sample of n tokens. They are 0 at tokens that are not trained."""

    logprobs: FloatArray  # float32[n], log-prob of each trained token
    entropy: FloatArray  # float32[n], entropy in nats of the distribution of each trained token


def go_on() -> None:
    """Do nothing between two micro-batches, and so never release the device."""


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
        observation_factor: float = 0.0,
    ) -> Pass:
        """Add the gradient of the loss over ``samples``, and return statistics of the pass.

        Args:
            samples: all samples of each of their trajectories, because some losses depend on whole sequences.
            version: version of the weights at the start of the step.
            kl_coefficient: factor of the KL term in the loss; None means ``loss.kl_coefficient``.
            untouched: whether the weights have not changed since the start of the step. If so, log-probs recorded under
                these weights differ from the current ones only by the numerical difference between sampler and trainer,
                which the metrics then report.
            observation_factor: factor of -log p of each observation token (`Sample.observed`) in the loss.
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
    to more urgent work and return when the device is acquired again. By default it is `go_on`."""
    model: Any
    """See `Backend.model`."""

    def discard(self) -> None: ...
    def score(self, samples: Sequence[Sample], *, reference: bool = False) -> list[TokenScores]:
        """Compute log-probs and entropies of the trained tokens of each sample, without gradient.

        They are those of the policy, or with ``reference=True`` those of the reference model.
        """
        ...

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Compute the critic's value before each trained token, float32[n] for each sample, without gradient."""
        ...

    def weights(self, dtype: torch.dtype | None = None) -> GatheredWeights:
        """Return the policy's tensors by Hugging Face parameter name, unsharded and with adapters merged.

        They are gathered, and converted to ``dtype``, when they are read. To read them after the weights have changed
        raises RuntimeError. With adapters of linear modules they are `AdaptedWeights`, which contain a copy of the
        adapters and can be read at any time.
        """
        ...

    def adapters(self) -> Mapping[str, Tensor]:
        """Return the LoRA adapters by peft's names, unsharded; see `gleanrl.learners.models.adapter_weights`."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer states and random state into ``folder``, which exists."""
        ...

    def load(self, folder: Path) -> None:
        """Load what `save` wrote.

        Weights are read in place. If a file is missing, truncated or of another model, the engine is unchanged; after
        other errors it cannot be used.
        """
        ...

    def usage(self, tokens: int, seconds: float) -> dict[str, float]:
        """Return metrics of the device since the last call, such as the peak memory; an empty dict on a CPU.

        ``tokens`` is the number of tokens that went through the model in ``seconds``.
        """
        ...


def microbatch_budget(tokens: int, device: torch.device) -> int:
    """Return the largest number of tokens of a micro-batch on ``device``: ``tokens``, or less on a CPU."""
    return min(tokens, CPU_TOKENS_PER_MICROBATCH) if device.type == "cpu" else tokens


class LocalEngine:
    """The engine of one process, which computes the loss and lets a `Backend` run the model.

    Args:
        pad_token: token id at padded positions. Any valid id will do.
        temperature: the sampling temperature. For 0 (greedy), log-probs are computed at 1, as samplers do.
        backend: makes the backend, from the arguments of `TransformersBackend`, where the others are described.

    Raises:
        UserError: if the backend cannot compute this model with these settings.
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
        trains: bool = True,
        backend: Callable[..., Backend] = TransformersBackend,
    ) -> None:
        self.settings, self.loss, self.pad_token, self.critic = settings, loss, pad_token, critic
        self.backend = backend(
            model,
            settings,
            temperature=temperature or 1.0,
            reference=reference,
            has_reference=bool(loss.kl_coefficient),
            critic=critic,
            compute_dtype=compute_dtype,
            seed=seed,
            trains=trains,
        )
        self.between, self.model = go_on, self.backend.model
        self.changes = 0  # how often the weights have changed
        self._bases: dict[torch.dtype | None, GatheredWeights] = {}  # the weights without adapters, by dtype

    def backward(
        self,
        samples: Sequence[Sample],
        *,
        version: int = 0,
        kl_coefficient: float | None = None,
        untouched: bool = False,
        observation_factor: float = 0.0,
    ) -> Pass:
        """See `Engine.backward`."""
        replicas, device = self.backend.replicas, self.backend.device
        plans, mine = self._micro_batches(samples)
        if not mine:
            return replicas.total(Pass.empty(device))

        # If the loss of a token depends on tokens of other micro-batches, `precompute` needs the log-probs of all of
        # them. A forward pass without gradient over all micro-batches computes these first.
        contexts: Sequence[LossContext | None] = [None] * len(mine)
        scope = scope_of(self.loss)

        def exceeds() -> bool:
            """Whether the tokens that a loss depends on are in more than one micro-batch."""
            trained = [{samples[row].trajectory for row in rows if samples[row].mask.any()} for rows in plans]
            cut = sum(map(len, trained)) > len(set().union(*trained))
            return len(plans) > 1 and (cut or (scope == "update" and any(trained)))

        if scope != "token" and replicas.agree(exceeds):
            logprobs = self._forward("policy", mine)
            if logprobs:
                given = [(mine[k], logp[: mine[k].old.numel()]) for k, (logp, _) in logprobs.items()]
                tokens, own = replicas.join([self._tokens(micro, logp, version) for micro, logp in given])
                sizes = [micro.old.numel() for micro in mine]
                contexts = precompute(tokens, self.loss).take(own).split(sizes)

        penalised = self.loss.kl_coefficient and self.loss.kl_in == "loss"
        reference = self._forward("reference", mine) if penalised else {}
        total = Pass.empty(device)
        sums: list[Tensor] = []

        def loss_of(number: int, logp: Tensor, entropy: Tensor, values: Tensor | None) -> Tensor:
            nonlocal total
            micro = mine[number]
            count = micro.old.numel()  # the observation tokens come after the trained ones
            logp, observed, entropy = logp[:count], logp[count:], entropy[:count]
            values = None if values is None else values[:count]
            result = objective(
                self._tokens(micro, logp, version),
                self.loss,
                kl_coefficient=kl_coefficient,
                entropy=entropy,
                ref_logp=reference[number][0][:count] if penalised else None,
                context=contexts[number],
                current_logp=logp if untouched else None,
            )
            loss = (micro.weights * result.values).sum()
            nats = -observed.sum()
            sums.append(torch.stack([loss.detach(), result.left_out_tokens, result.left_out_sequences, nats.detach()]))
            if observed.numel():
                loss = loss + observation_factor * nats
            value_statistics = CriticStatistics.empty(device)
            if self.critic is not None and values is not None:
                losses, value_statistics = critic_loss(micro, values, self.critic.clip)
                if result.factor is not None:
                    losses = result.factor * losses
                loss = loss + (micro.weights * losses).sum()
            total += Pass(
                result.statistics,
                value_statistics,
                trained=count,
                observed=observed.numel(),
                real=micro.real,
                computed=micro.computed,
                padded=micro.tokens.numel(),
            )
            return loss

        self.backend.backward(mine, loss_of, self.between)
        if sums:
            weighted, left_out_tokens, left_out_sequences, nats = torch.stack(sums).double().sum(0).tolist()
            total = replace(
                total,
                loss=weighted,
                left_out_tokens=left_out_tokens,
                left_out_sequences=left_out_sequences,
                observed_nats=nats,
            )
        return replicas.total(total)

    def _tokens(self, micro: MicroBatch, logp: Tensor, version: int) -> Tokens:
        old, behaviour = micro.old, None
        if self.settings.old_logprobs != "sampler":
            behaviour = micro.behaviour
        if self.settings.old_logprobs == "loglinear":
            staleness = torch.where(micro.off_policy, 0, (version - micro.version).clamp(min=0))
            old = loglinear(micro.behaviour, logp, staleness)
        return Tokens(logp, old, micro.advantages, micro.sequence, micro.off_policy, behaviour)

    def step(self, normaliser: float, lr: float, *, policy: bool = True) -> float:
        self.changes += 1
        return self.backend.step(normaliser, lr, policy=policy)

    def discard(self) -> None:
        self.backend.discard()

    def score(self, samples: Sequence[Sample], *, reference: bool = False) -> list[TokenScores]:
        return [TokenScores(*row) for row in self._by_sample("reference" if reference else "policy", samples)]

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        return [row[0] for row in self._by_sample("critic", samples)]

    def _by_sample(self, which: Which, samples: Sequence[Sample]) -> list[list[FloatArray]]:
        """Compute results of the model ``which`` for each sample: float32[n], 0 at tokens that are not trained.

        The list is empty in a process that does not lead.
        """
        plans, mine = self._micro_batches([replace(sample, observed=None) for sample in samples])
        results = [torch.stack([row.float() for row in rows]).cpu() for rows in self._forward(which, mine).values()]
        kinds = 1 if which == "critic" else 2
        found = [[np.zeros(sample.mask.size, np.float32) for _ in range(kinds)] for sample in samples]
        for rows, values in zip(plans, self.backend.replicas.gather(results), strict=False):  # without padding
            start = 0
            for row in rows:
                mask = samples[row].mask
                stop = start + int(mask.sum())
                for array, known in zip(found[row], values.numpy(), strict=True):
                    array[mask] = known[start:stop]
                start = stop
        return found

    def _forward(self, which: Which, micros: Sequence[MicroBatch]) -> dict[int, tuple[Tensor, ...]]:
        """Return the results of `Backend.forward` by number of the micro-batch, in ascending order.

        They are empty in a process that does not get the results.
        """
        found: dict[int, tuple[Tensor, ...]] = {}
        self.backend.forward(which, micros, found.__setitem__, self.between)
        return dict(sorted(found.items()))

    def _micro_batches(self, samples: Sequence[Sample]) -> tuple[list[tuple[int, ...]], list[MicroBatch]]:
        """Return the indices of the samples of every micro-batch, and the micro-batches that this process computes.

        Only the process that leads has the samples and divides them; the indices are empty in the others.
        """
        backend, plans = self.backend, list[tuple[int, ...]]()
        if backend.replicas.leads:
            budget = microbatch_budget(self.settings.tokens_per_microbatch, backend.device)
            budget = backend.replicas.budget(sum(sample.tokens.size for sample in samples), budget)
            plans = plan_rows(samples, budget, share=backend.packs_rows)
        mine = []
        for part in backend.replicas.deal([[samples[row] for row in rows] for rows in plans]):
            micro = make_micro_batch(part, range(len(part)), pad_token=self.pad_token, share=backend.packs_rows)
            mine.append(micro.to(backend.device))
        return plans, mine

    def weights(self, dtype: torch.dtype | None = None) -> GatheredWeights:
        return self.published(dtype, self.gather, self.adapters)

    def published(
        self,
        dtype: torch.dtype | None,
        gather: Callable[..., Mapping[str, Tensor]],
        adapters: Callable[[], Mapping[str, Tensor]],
    ) -> GatheredWeights:
        """Return `weights`. ``gather`` and ``adapters`` call the methods of these names in all processes."""
        layout, scale = self.backend.layout(dtype), self.backend.adapter_scale
        if scale is None:
            return GatheredWeights(layout, partial(gather, self.changes, dtype))
        base = self._bases.setdefault(dtype, GatheredWeights(layout, partial(gather, None, dtype)))
        return AdaptedWeights(base, {name: tensor.clone() for name, tensor in adapters().items()}, scale)

    def gather(self, changes: int | None, dtype: torch.dtype | None, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return some tensors of `weights`, which was called when the weights had changed ``changes`` times.

        None means weights without adapters, which do not change.
        """
        if changes is None:
            return self.backend.gather(names, dtype, merge=False)
        if changes != self.changes:
            raise RuntimeError("the policy's weights were read after they had changed")
        return self.backend.gather(names, dtype)

    def adapters(self) -> Mapping[str, Tensor]:
        return self.backend.adapters()

    def save(self, folder: Path) -> None:
        self.backend.save(folder)

    def load(self, folder: Path) -> None:
        self.backend.load(folder)
        self.changes += 1

    def usage(self, tokens: int, seconds: float) -> dict[str, float]:
        device = self.backend.device
        if device.type != "cuda":
            return {}
        metrics = {"learner/memory_gib/max": torch.cuda.max_memory_allocated(device) / 2**30}
        torch.cuda.reset_peak_memory_stats(device)
        name = torch.cuda.get_device_name(device)
        peak = next((flops for key, flops in PEAK_BFLOAT16.items() if key in name), None)
        if peak is not None and seconds > 0:
            parameters = sum(p.numel() for p in self.backend.model.parameters())
            # A forward and a backward pass take about 6 FLOPs per parameter and token.
            metrics["learner/mfu"] = 6 * parameters * (tokens / self.backend.replicas.ranks) / seconds / peak
        return metrics
