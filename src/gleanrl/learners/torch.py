"""The learner of a run, which trains the policy on batches of samples and reports metrics.

`TorchLearner` implements `gleanrl.protocols.Learner`. It decides which samples enter which optimizer update, and at
which learning rate. An `Engine` (`gleanrl.learners.engine`) computes gradients and updates, in one process or several.
With replay updates, a run wraps the learner in `gleanrl.experience.replay.updates.ReplayUpdateLearner`, which calls
`TorchLearner.replay_update` for further updates.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from gleanrl.algorithms.batch import Batch, GroupSamples, ModelEstimates, Sample
from gleanrl.algorithms.loss import REPLAY_LOSSES, aggregation_of, find, kl_penalty, normaliser, scope_of
from gleanrl.config.settings import CriticSettings, LearnerSettings, LossSettings
from gleanrl.config.validate import check_mini_batches
from gleanrl.learners import checkpoint
from gleanrl.learners.backend import Pass
from gleanrl.learners.engine import Engine, LocalEngine, TokenScores, go_on
from gleanrl.learners.models import export, export_adapters
from gleanrl.learners.optim import learning_rate
from gleanrl.schedule.device_lock import DeviceHold, TakeDevice
from gleanrl.schedule.timeline import SpanRecorder
from gleanrl.types import FloatArray
from gleanrl.utils.errors import UserError
from gleanrl.utils.weights import GatheredWeights

T = TypeVar("T")
MAX_SKIPPED_IN_A_ROW = 5
LARGEST_KL_ERROR = 0.2  # bound of |KL / target - 1|, which limits how fast the KL coefficient changes


@dataclass
class _Progress:
    """Counters of a run, and the denominators of the loss for the part of the current mini-batch consumed so far."""

    groups: int = 0  # number of groups consumed since the start of the run
    updates: int = 0  # number of optimizer updates that were applied
    skipped: int = 0  # number of updates skipped because the gradient was not finite
    skipped_in_a_row: int = 0
    last_update: int = -1  # step of the last applied update
    returns: int = 0  # number of calls of `return_to`, each of which halves the learning rate
    pending_tokens: float = 0.0  # trained tokens in the current mini-batch
    pending_sequences: float = 0.0  # sequences with a trained token in the current mini-batch
    # Samples with observation tokens in the current mini-batch. Their gradient is added when it is complete, because
    # only then the two denominators are known.
    pending_observed: list[Sample] = field(default_factory=list)


class TorchLearner:
    """Trains a causal language model by policy gradients; implements `gleanrl.protocols.Learner`.

    The optimizer makes one update per mini-batch of ``groups_per_step / updates_per_step`` groups, regardless of how
    many groups each call of `update` receives. Gradients are summed, and the sum is divided once by the denominator of
    the whole mini-batch. An update therefore does not depend on how its groups are cut into calls and micro-batches,
    or on padding. All updates of a step use the same learning rate.

    Args:
        model: any causal language model of transformers. It is trained in place, on the device where it is.
        total_steps: number of steps of the run, which determines the decay of the learning rate.
        groups_per_step: number of groups that the learner consumes in each step.
        pad_token: token id at padded positions. Any valid id will do, because no result depends on it.
        temperature: the sampling temperature. Log-probs are computed under softmax(logits / temperature).
        device_lock: the learner computes inside ``async with device_lock("train")``; None = it never waits for the
            device. If the context manager returns a `gleanrl.schedule.device_lock.DeviceHold`, the learner lets more
            urgent work use the device between two micro-batches.
        timeline: records the spans "train" and "logprobs"; None = no spans are recorded.
        reference: frozen model for the KL term. If None and the loss has a KL term, the reference is a copy of
            ``model``, made before any `load`, or with adapters the base model.
        critic: settings of the critic; None if the advantage estimator needs no values.
        tokenizer: written next to exported models; None to export models without a tokenizer.
        compute_dtype: dtype of forward passes. None means bfloat16 on a GPU and float32 on a CPU.
        published_dtype: dtype of the weights that `weights` returns; None means that of the model.
        engine: called with the arguments of `LocalEngine` to make the engine.
        trains: False for a learner that makes no updates and only loads checkpoints, computes log-probs and returns
            weights.

    Raises:
        UserError: if ``updates_per_step`` does not divide ``groups_per_step``, or adapters cannot be added.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: LearnerSettings,
        loss: LossSettings,
        *,
        total_steps: int,
        groups_per_step: int,
        pad_token: int,
        temperature: float,
        device_lock: TakeDevice | None = None,
        timeline: SpanRecorder | None = None,
        reference: nn.Module | None = None,
        critic: CriticSettings | None = None,
        tokenizer: Any = None,
        compute_dtype: torch.dtype | None = None,
        published_dtype: torch.dtype | None = None,
        seed: int = 0,
        engine: Callable[..., Engine] = LocalEngine,
        trains: bool = True,
    ) -> None:
        check_mini_batches(settings, groups_per_step)
        self.settings, self.loss = settings, loss
        self.total_steps, self.groups_per_step = total_steps, groups_per_step
        self.groups_per_update = groups_per_step // settings.updates_per_step
        self._device_lock = device_lock or (lambda _: nullcontext())
        # Serialises calls of the engine. It is acquired before the device lock, so that a call that waits for another
        # call of the engine does not hold the device meanwhile.
        self._one = asyncio.Lock()
        self._computing = threading.Lock()  # held while a thread works, because `return_to` is no coroutine
        self._timeline = timeline
        self._tokenizer, self._published_dtype = tokenizer, published_dtype
        self._progress = _Progress()
        self._learned = Learned()  # statistics of the current step so far
        self._critic = critic
        self._kl = KlCoefficient(loss)
        penalised = bool(loss.kl_coefficient)
        self._penalises = penalised and loss.kl_in == "reward"
        # A sample with zero advantage usually has no policy gradient and is skipped. It is needed if the loss has
        # another term (KL, entropy bonus, value loss), if a token's loss depends on all tokens of the update, or if a
        # correction may leave out its tokens, because these must then be subtracted from the denominator. The rest
        # depends on the sample; see `_needed`.
        self._every_sample_matters = (
            (penalised and loss.kl_in == "loss")
            or bool(loss.entropy_coefficient)
            or critic is not None
            or loss.correction == "mask"
            or scope_of(loss) == "update"
        )
        self._losses = find(loss), REPLAY_LOSSES.get(loss.replay_mode)  # of fresh and of off-policy samples
        self._estimating_s = 0.0  # seconds spent in `estimate` that the next `update` reports
        self.engine = engine(
            model,
            settings,
            loss,
            pad_token=pad_token,
            temperature=temperature,
            reference=reference,
            critic=critic,
            compute_dtype=compute_dtype,
            seed=seed,
            **({} if trains else {"trains": False}),
        )

    async def update(self, batch: Batch) -> dict[str, float]:
        """Consume the groups of ``batch`` in order; make an optimizer update whenever a mini-batch is complete.

        Returns the metrics of this call. Only the call that completes a step also returns ``loss/...`` and
        ``critic/...``, which are computed from all tokens of the step, over all of its calls.

        Raises:
            UserError: if the gradient was not finite in `MAX_SKIPPED_IN_A_ROW` updates in a row, or if
                ``learner.epochs`` is above 1 and ``batch`` does not consist of whole mini-batches.
        """
        ragged = self._progress.groups % self.groups_per_update or batch.groups % self.groups_per_update
        if self.settings.epochs > 1 and ragged:
            raise UserError(
                f"learner.epochs = {self.settings.epochs} needs whole mini-batches of {self.groups_per_update} groups, "
                f"but {batch.groups} came at once; use schedule.preset = 'sync' or learner.epochs = 1"
            )
        meter = Meter(self.settings.epochs)
        meter.seconds["logprobs"], self._estimating_s = self._estimating_s, 0.0
        if self.settings.old_logprobs == "recompute":
            # Compute the log-probs in the denominator of the probability ratio once, under the weights before any
            # update on the batch. Samples for which `estimate` has computed them have them already, as ``proximal``.
            started = perf_counter()
            samples = [
                sample
                for sample in self._needed(batch.samples)
                if sample.proximal is None and not sample.off_policy  # whose ratio has the recorded log-probs
            ]
            scores = await self.logprobs(samples)
            known = {id(sample): score.logprobs for sample, score in zip(samples, scores, strict=True)}
            parts = []
            for part in batch.parts:
                scored = [replace(sample, proximal=known.get(id(sample), sample.proximal)) for sample in part.samples]
                parts.append(replace(part, samples=tuple(scored)))
            batch = Batch(tuple(parts))
            meter.seconds["logprobs"] += perf_counter() - started
        for _ in range(self.settings.epochs):
            start = 0
            while start < batch.groups:
                position = self._progress.groups + start
                stop = min(batch.groups, start + self.groups_per_update - position % self.groups_per_update)
                completes = (self._progress.groups + stop) % self.groups_per_update == 0
                now = position // self.groups_per_step
                work = partial(self._consume, batch.parts[start:stop], now, completes, meter)
                await self._on_device("train", work, step=now)
                start = stop
        step = self.step
        self._progress.groups += batch.groups
        metrics = meter.metrics(batch, self.engine)
        flat = [all(sample.zero_advantage for sample in part.samples) for part in batch.parts]
        metrics["groups/without_advantage"] = float(sum(flat))
        self._learned.add(meter, batch)
        if self.step > step:
            metrics |= self._learned.metrics(self.loss)
            metrics |= self._kl.adapt(metrics.get("loss/reference_kl"), self._learned.trajectories)
            self._learned = Learned()
        return metrics

    @property
    def step(self) -> int:
        """Number of steps of which all groups have been consumed."""
        return self._progress.groups // self.groups_per_step

    def undo_step(self) -> bool:
        """Return to the start of an unfinished step: discard the gradient of its groups and count none as consumed.

        `save` can then write a checkpoint from which the whole step is repeated. Returns False, and changes nothing, if
        the step has already made an optimizer update.
        """
        progress = self._progress
        inside = progress.groups % self.groups_per_step
        if inside >= self.groups_per_update:
            return False
        progress.groups -= inside
        progress.pending_tokens = progress.pending_sequences = 0.0
        progress.pending_observed = []
        self._learned = Learned()
        self.engine.discard()
        return True

    async def replay_update(self, batch: Batch, step: int) -> dict[str, float]:
        """Make one more optimizer update after those of ``step``, and return its metrics.

        The groups of ``batch`` form a whole mini-batch and are not counted as consumed by the step.
        """
        meter = Meter(1)
        given = {"observation_coefficient": batch.observation_coefficient}
        await self._on_device("train", partial(self._consume, batch.parts, step, True, meter, **given), step=step)
        learned = Learned()
        learned.add(meter, batch)
        return meter.metrics(batch, self.engine) | learned.metrics(self.loss)

    @property
    def needs_estimates(self) -> bool:
        """Whether `estimate` must be called before advantages can be computed.

        This is so with a critic, or if the KL to the reference is subtracted from the rewards.
        """
        return self._critic is not None or self._penalises

    async def estimate(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        """Compute, for each of ``samples``, the quantities of a model that its advantages need (see `ModelEstimates`).

        They are computed under the weights at the time of the call. A run calls this method before any update on these
        samples.
        """
        started = perf_counter()
        estimates = await self._on_device("logprobs", lambda _: self._estimates(samples), samples=len(samples))
        self._estimating_s += perf_counter() - started
        return estimates

    def _estimates(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        """Compute the result of `estimate`. Called on the thread that computes.

        The ``penalty`` of a sample is the KL of each token to the reference, times the current coefficient. It is 0 for
        off-policy samples, which do not enter the measured KL either. Their ratio needs no ``proximal``.
        """
        nothing: list[FloatArray | None] = [None] * len(samples)
        on_policy = [sample for sample in samples if not sample.off_policy]
        own, reference = [], []  # log-probs of the on-policy samples under the policy and under the reference model
        if self.settings.old_logprobs == "recompute":
            own = [score.logprobs for score in self.engine.score(on_policy)]
        if self._penalises:
            reference = [score.logprobs for score in self.engine.score(on_policy, reference=True)]
        values = self.engine.values(samples) if self._critic is not None else nothing
        estimates, number = [], 0
        for sample, value in zip(samples, values, strict=True):
            proximal = None
            penalty = np.zeros(sample.tokens.size, np.float32) if self._penalises else None
            if not sample.off_policy:
                proximal = own[number] if own else None
                if self._penalises:
                    logp = torch.from_numpy(sample.behaviour if proximal is None else proximal)
                    kl = kl_penalty(logp, torch.from_numpy(reference[number]), self.loss.kl).numpy() * sample.mask
                    self._kl.measure(float(kl.sum()), int(sample.mask.sum()))
                    penalty = np.float32(self._kl.value) * kl
                number += 1
            estimates.append(ModelEstimates(proximal, penalty, value))
        return estimates

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        """Compute log-probs and entropies of the trained tokens of each of ``samples`` under the current weights."""
        return await self._on_device("logprobs", lambda _: self.engine.score(samples), samples=len(samples))

    def weights(self) -> GatheredWeights:
        """Return the policy's tensors by Hugging Face parameter name, with adapters merged into them.

        They are gathered when they are read, and must be read before the next update. A sharded engine blocks the
        reader while another call of the engine runs, so read them in a worker thread and not on the event loop.
        """
        return self.engine.weights(self._published_dtype)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer states, random state and counters, from which `load` continues bit for bit.

        Raises RuntimeError if a mini-batch is only partly consumed, because its gradient is not saved.
        """
        if self._progress.groups % self.groups_per_update:
            raise RuntimeError("a mini-batch is half consumed; save at the end of a step")
        progress = self._progress
        counters = {
            name: getattr(progress, name) for name in ("groups", "updates", "skipped", "last_update", "returns")
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.save(folder)
        checkpoint.write_counters(folder, {**counters, "kl_coefficient": self._kl.value})

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote.

        Raises `UserError` if a file is missing, truncated or of another model; the message names the file. Nothing is
        changed then. Other damage is found by the checksums of a run (`gleanrl.runtime.checkpoints`), or raises while
        weights are read in place, after which the learner cannot be used.
        """
        counters = checkpoint.read_counters(folder)
        self.engine.load(folder)
        kl_coefficient = counters.pop("kl_coefficient")
        if self.loss.kl_target is not None:
            self._kl.value = kl_coefficient
        self._progress, self._learned = _Progress(**counters), Learned()
        self.engine.discard()

    def return_to(self, folder: Path) -> None:
        """Restore weights, optimizers and random state from ``folder``, and halve the learning rate; counters continue.

        Raises the errors of `load`.
        """
        progress = self._progress
        with self._computing:
            self.load(folder)
        self._progress = replace(progress, returns=progress.returns + 1)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model directory: the weights with adapters merged, the config and the tokenizer."""
        export(folder, self.engine.model, self.engine.weights(), self._tokenizer)

    def export_adapters(self, folder: Path, base: str) -> None:
        """Write the LoRA adapters, not merged, as a directory that peft and vLLM load on top of the base model.

        ``base`` is the directory or the name on the Hugging Face hub from which they load the base model. Raises
        `UserError` if the learner trains all weights.
        """
        export_adapters(folder, self.engine.model, self.engine.adapters(), base)

    def _needed(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return those of ``samples`` that the loss needs; the policy gradient of the others is 0.

        If the loss of a token depends on its whole trajectory, either all samples of a trajectory are needed or none.
        """
        if self._every_sample_matters:
            return list(samples)
        needed = [
            sample
            for sample in samples
            if not (sample.zero_advantage and self._losses[sample.off_policy].zero_without_advantage)
        ]
        if scope_of(self.loss) == "token":
            return needed
        trajectories = {sample.trajectory for sample in needed}
        return [sample for sample in samples if sample.trajectory in trajectories]

    def _consume(
        self,
        parts: Sequence[GroupSamples],
        step: int,
        completes: bool,
        meter: Meter,
        device: DeviceSlice,
        observation_coefficient: float | None = None,
    ) -> None:
        """Add the gradient of some groups of a mini-batch to the gradient so far.

        If these groups complete the mini-batch (``completes``), update the weights. ``observation_coefficient`` is that
        of `Batch`. Called on the thread that computes.
        """
        if observation_coefficient is None:
            observation_coefficient = self.loss.observation_coefficient
        started, progress = perf_counter(), self._progress
        samples = [sample for part in parts for sample in part.samples]
        needed = self._needed(samples)
        meter.samples += len(needed)
        meter.samples_skipped += len(samples) - len(needed)
        tokens = progress.pending_tokens + sum(part.tokens for part in parts)
        sequences = progress.pending_sequences + sum(part.sequences for part in parts)
        factor = 0.0
        if observation_coefficient:
            earlier, matter = progress.pending_observed, {id(sample) for sample in needed}
            own = [sample for sample in samples if sample.observed is not None]
            if completes:
                # The gradient is divided by the denominator of the policy loss later, and the observation loss has its
                # own. Each sample is computed once, except those of earlier chunks.
                needed = needed + [s.only_observed() for s in own if id(s) not in matter]
                needed += [sample.only_observed() for sample in earlier]
                observed = sum(int(s.observed.sum()) for s in (*earlier, *own) if s.observed is not None)
                denominator = normaliser(aggregation_of(self.loss), tokens, sequences) if tokens >= 0.5 else 1.0
                factor = observation_coefficient * denominator / max(observed, 1)
            else:
                needed = [replace(sample, observed=None) for sample in needed]
            progress.pending_observed = [] if completes else [*earlier, *own]
        seen = self.engine.backward(
            needed,
            version=step,
            kl_coefficient=self._kl.value if self.loss.kl_in == "loss" else 0.0,
            untouched=progress.last_update != step,
            **({"observation_factor": factor} if factor else {}),
        )
        meter.seen = seen if meter.seen is None else meter.seen + seen
        meter.seconds["gradient"] += perf_counter() - started - device.away_s
        progress.pending_tokens = tokens - seen.left_out_tokens
        progress.pending_sequences = sequences - seen.left_out_sequences
        if not completes:
            return

        # The weights are left unchanged if the mini-batch has no trained token (there is nothing to divide by), or if
        # the gradient is not finite.
        started = perf_counter()
        tokens, sequences = progress.pending_tokens, progress.pending_sequences
        progress.pending_tokens = progress.pending_sequences = 0.0
        lr = learning_rate(self.settings, step, self.total_steps) * 0.5**progress.returns
        meter.rates.append(lr)
        if tokens < 0.5 and not factor:
            meter.updates_empty += 1
            self.engine.discard()
        else:
            policy = self._critic is None or step >= self._critic.warmup_steps
            denominator = normaliser(aggregation_of(self.loss), tokens, sequences) if tokens >= 0.5 else 1.0
            norm = self.engine.step(denominator, lr, policy=policy)
            if math.isfinite(norm):
                progress.updates += 1
                progress.last_update = step
                progress.skipped_in_a_row = 0
                meter.norms.append(norm)
            else:
                progress.skipped += 1
                progress.skipped_in_a_row += 1
                meter.updates_skipped += 1
        if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"step {step}: the gradient was not finite in {MAX_SKIPPED_IN_A_ROW} updates in a row (none was "
                f"applied); lower learner.lr (now {self.settings.lr:g}) and resume from the last checkpoint"
            )
        meter.seconds["optimizer"] += perf_counter() - started

    async def _on_device(self, kind: str, work: Callable[[DeviceSlice], T], **tags: Any) -> T:
        """Run ``work`` in a worker thread while holding the device lock, and record its spans in the timeline.

        Only one call runs at a time. A new call waits until the running ``work`` has ended, even while that work has
        released the device to others. If the caller is cancelled, it still waits until the thread has finished, so that
        no other call sees a half-applied update.
        """
        async with self._one, self._device_lock("train") as held:
            record = partial(self._timeline.record, kind, **tags) if self._timeline is not None else None
            device = DeviceSlice(held, record)
            self.engine.between = go_on if held is None else device
            running = asyncio.ensure_future(asyncio.to_thread(self._alone, work, device))
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise
            device.end()
            return result

    def _alone(self, work: Callable[[DeviceSlice], T], device: DeviceSlice) -> T:
        with self._computing:
            return work(device)


# --- what an update needs and reports ---
class DeviceSlice:
    """The time that one piece of work on a worker thread spends on the device.

    The work calls the object between two micro-batches. The call releases the device if more urgent work waits for it,
    and blocks until the device is acquired again.

    Make the object on the event loop that ``held`` belongs to. If ``held`` is None, the device is never released.
    ``record(start, end)``, in seconds of `perf_counter`, is called for each period of work without an interruption.
    """

    def __init__(self, held: DeviceHold | None, record: Callable[[float, float], None] | None) -> None:
        self._held, self._record = held, record
        self._loop = asyncio.get_running_loop() if held is not None else None
        self._started = perf_counter()
        self.away_s = 0.0
        """Seconds in which other work had the device, because this work had released it."""

    def __call__(self) -> None:
        if self._held is None or self._loop is None or not self._held.wanted:
            return
        left = self.end()
        asyncio.run_coroutine_threadsafe(self._held.give_way(), self._loop).result()
        self._started = perf_counter()
        self.away_s += self._started - left

    def end(self) -> float:
        """Record the period of work that ends now, and return the current time in seconds."""
        now = perf_counter()
        if self._record is not None:
            self._record(self._started, now)
        return now


class KlCoefficient:
    """The coefficient of the KL to the reference. It is adapted to keep the KL near ``loss.kl_target`` if that is set.

    The controller is that of Ziegler et al. (arXiv 1909.08593, section 2.2). After each step,

        value *= 1 + clip(KL / target - 1, -0.2, 0.2) * min(trajectories / horizon, 1)

    where KL is the mean per token, and trajectories the number of trajectories in the step.
    """

    def __init__(self, settings: LossSettings) -> None:
        self.settings = settings
        self.value = settings.kl_coefficient
        self._sum = self._tokens = 0.0

    def measure(self, total: float, tokens: float) -> None:
        """Include ``total``, the sum of the KL over a number of ``tokens``, in the mean KL of the current step."""
        self._sum, self._tokens = self._sum + total, self._tokens + tokens

    def adapt(self, mean: float | None, trajectories: int) -> dict[str, float]:
        """Adapt the coefficient at the end of a step.

        Returns as metrics the coefficient that the step used and, if the KL is part of the reward, the mean KL.

        Args:
            mean: mean KL per token that the loss measured; None if it measured none. It is used only if the KL is a
                term of the loss; otherwise `measure` has received the KL.
            trajectories: number of trajectories that the step learned from.
        """
        if mean is not None and self.settings.kl_in == "loss":
            self.measure(mean * trajectories, trajectories)
        if not self.settings.kl_coefficient:
            return {}
        metrics = {"loss/kl_coefficient": self.value}
        if self._tokens:
            mean = self._sum / self._tokens
            if self.settings.kl_in == "reward":
                metrics["loss/reference_kl"] = mean
            if self.settings.kl_target is not None:
                error = min(max(mean / self.settings.kl_target - 1, -LARGEST_KL_ERROR), LARGEST_KL_ERROR)
                self.value *= 1 + error * min(trajectories / self.settings.kl_horizon, 1.0)
        self._sum = self._tokens = 0.0
        return metrics


class Meter:
    """Collects the counts and times of one call of `TorchLearner.update` or `TorchLearner.replay_update`."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.seen: Pass | None = None
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.samples = self.samples_skipped = 0
        self.updates_skipped = self.updates_empty = 0
        self.seconds = {"gradient": 0.0, "optimizer": 0.0, "logprobs": 0.0}

    def metrics(self, batch: Batch, engine: Engine) -> dict[str, float]:
        """Return the call's metrics. Those under tokens/, time/, samples/ and updates/ are sums, not means."""
        total = self.seen or Pass.empty()
        seconds = sum(self.seconds.values())
        metrics = {
            "tokens/trained": float(total.trained),
            "tokens/learned_from": float(total.real),
            "samples/trained": float(self.samples),
            "samples/skipped": float(self.samples_skipped),
            "samples/invalid": float(sum(part.invalid for part in batch.parts)),
            "updates/done": float(len(self.norms)),
            "updates/skipped": float(self.updates_skipped),
            "updates/empty": float(self.updates_empty),
            "time/train_s": seconds,
            **{f"time/learner_{name}_s": value for name, value in self.seconds.items()},
            **engine.usage(total.computed, seconds),
        }
        if total.padded:
            metrics["learner/padding"] = 1 - total.computed / total.padded
            metrics["learner/shared"] = 1 - total.computed / total.real
            metrics["learner/tokens_per_s"] = total.real / seconds
        if self.norms:
            metrics["learner/grad_norm"] = sum(self.norms) / len(self.norms)
        if self.rates:
            metrics["learner/lr"] = self.rates[-1]
        return metrics


class Learned:
    """Accumulates loss statistics over several calls of `TorchLearner.update`.

    The statistics stay on their device, and only `metrics` waits for the device to read them.
    """

    def __init__(self) -> None:
        self._seen: Pass | None = None
        self._tokens = self._sequences = 0
        self.trajectories = 0  # number of trajectories that have a sample

    def add(self, meter: Meter, batch: Batch) -> None:
        if meter.seen is not None:
            self._seen = meter.seen if self._seen is None else self._seen + meter.seen
        self._tokens += meter.epochs * sum(part.tokens for part in batch.parts)
        self._sequences += meter.epochs * sum(part.sequences for part in batch.parts)
        self.trajectories += len({(sample.group, sample.trajectory) for sample in batch.samples})

    def metrics(self, loss: LossSettings) -> dict[str, float]:
        """Return the metrics ``loss/...`` and ``critic/...``, computed from all calls together."""
        seen = self._seen or Pass.empty()
        tokens, sequences = self._tokens - seen.left_out_tokens, self._sequences - seen.left_out_sequences
        return {
            "loss/policy": seen.loss / max(1.0, normaliser(aggregation_of(loss), tokens, sequences)),
            **({"loss/observation": seen.observed_nats / seen.observed} if seen.observed else {}),
            **seen.statistics.metrics(),
            **seen.critic.metrics(),
        }
