"""The learner: decides which samples enter which optimizer update, at which learning rate, and reports metrics.

`TorchLearner` is the `gleanrl.protocols.Learner` of a run. It computes through an `Engine`
(`gleanrl.learners.engine`), in one process or several. With replay, a run wraps it in
`gleanrl.experience.replay.updates.ReplayUpdateLearner`, which makes further updates through `replay_update`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from gleanrl.algorithms.batch import Batch, GroupSamples, ModelEstimates, Sample
from gleanrl.algorithms.loss import aggregation_of, kl_penalty, normaliser, scope_of
from gleanrl.config.settings import CriticSettings, LearnerSettings, LossSettings
from gleanrl.config.validate import check_mini_batches
from gleanrl.learners import checkpoint
from gleanrl.learners.engine import Engine, LocalEngine, Pass, TokenScores
from gleanrl.learners.optim import learning_rate
from gleanrl.schedule.device_lock import DeviceHold, TakeDevice
from gleanrl.schedule.timeline import SpanRecorder
from gleanrl.types import FloatArray
from gleanrl.utils.errors import UserError

T = TypeVar("T")
MAX_SKIPPED_IN_A_ROW = 5
LARGEST_KL_ERROR = 0.2  # bound of |KL / target - 1|, which limits how fast the coefficient changes


@dataclass
class _Progress:
    """Counters of a run, and the denominators of the current mini-batch so far."""

    groups: int = 0  # number of groups consumed since the start of the run
    updates: int = 0
    skipped: int = 0  # number of updates skipped because the gradient was not finite
    skipped_in_a_row: int = 0
    last_update: int = -1  # step of the last update
    pending_tokens: float = 0.0
    pending_sequences: float = 0.0


class TorchLearner:
    """Policy-gradient updates of a causal language model in this process; satisfies `gleanrl.protocols.Learner`.

    The optimizer makes one update per mini-batch of ``groups_per_step / updates_per_step`` groups, regardless of how
    many groups each call of `update` gets. Gradients are summed and then divided once, by the denominator of the whole
    mini-batch, so that an update does not depend on chunks, micro-batches or padding. The learning rate depends on the
    step, not on updates or chunks.

    Args:
        model: any causal language model of transformers, on its device, trained in place.
        total_steps: steps of the run, for the learning rate's decay.
        groups_per_step: number of groups in one global batch.
        pad_token: any token id, to fill rows with.
        temperature: temperature of sampling; log-probs are taken under softmax(logits / temperature).
        device_lock: held as ``device_lock("train")`` while the device is used. If it yields a
            `gleanrl.schedule.device_lock.DeviceHold`, the device is lent to other work between two micro-batches.
        timeline: records the spans "train" and "logprobs".
        reference: frozen model of the KL term; by default, if one is needed, ``model`` as given (before any `load`).
        critic: settings of a critic, for an estimator that needs values.
        tokenizer: saved with exported models.
        compute_dtype: dtype of forward passes; default bfloat16 on a GPU and float32 elsewhere.
        engine: makes the engine; called with the arguments of `LocalEngine`.
        trains: False for a learner that only scores, loads and returns weights; passed on to ``engine``.

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
        seed: int = 0,
        engine: Callable[..., Engine] = LocalEngine,
        trains: bool = True,
    ) -> None:
        check_mini_batches(settings, groups_per_step)
        self.settings, self.loss = settings, loss
        self.total_steps, self.groups_per_step = total_steps, groups_per_step
        self.groups_per_update = groups_per_step // settings.updates_per_step
        self._device_lock = device_lock or (lambda _: nullcontext())
        self._one = asyncio.Lock()  # taken before the device: a call that waits for the engine must not hold the device
        self._timeline = timeline
        self._tokenizer = tokenizer
        self._progress = _Progress()
        self._learned = Learned()  # statistics of the current step so far
        self._critic = critic
        self._kl = KlCoefficient(loss)
        penalised = bool(loss.kl_coefficient)
        self._penalises = penalised and loss.kl_in == "reward"
        # Samples with zero advantage are needed too for a KL, an entropy bonus, a critic or a loss whose scope is the
        # whole update, and for a masking correction, which changes the denominator.
        self._every_sample_matters = (
            (penalised and loss.kl_in == "loss")
            or bool(loss.entropy_coefficient)
            or critic is not None
            or loss.correction == "mask"
            or scope_of(loss) == "update"
        )
        self._estimating_s = 0.0  # seconds of `estimate` that are not in any metrics yet
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
        """Consume the groups of ``batch`` in order, with an optimizer update whenever a mini-batch is complete.

        The metrics are those of this call, except ``loss/...`` and ``critic/...``: the call that ends a step returns
        them for all tokens of the step, however many calls it took.
        Raises `UserError` if the gradient was not finite several times in a row, or if ``learner.epochs`` is above 1
        but the groups do not come in whole mini-batches.
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
            # Log-probs under the current weights, before any update on the batch.
            started = perf_counter()
            samples = [
                sample
                for sample in batch.samples
                if sample.proximal is None and (self._every_sample_matters or not sample.zero_advantage)
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
        self._learned.add(meter, batch)
        if self.step > step:
            metrics |= self._learned.metrics(self.loss)
            metrics |= self._kl.adapt(metrics.get("loss/reference_kl"), self._learned.trajectories)
            self._learned = Learned()
        return metrics

    @property
    def step(self) -> int:
        """Number of steps whose groups are all consumed."""
        return self._progress.groups // self.groups_per_step

    def undo_step(self) -> bool:
        """Forget the groups of an unfinished step, so that `save` writes the state at its start.

        Returns False, and forgets nothing, if the step has already changed the weights.
        """
        progress = self._progress
        inside = progress.groups % self.groups_per_step
        if inside >= self.groups_per_update:
            return False
        progress.groups -= inside
        progress.pending_tokens = progress.pending_sequences = 0.0
        self._learned = Learned()
        self.engine.discard()
        return True

    async def replay_update(self, batch: Batch, step: int) -> dict[str, float]:
        """Make a further optimizer update after those of ``step``, on groups that are not counted as consumed."""
        meter = Meter(1)
        await self._on_device("train", partial(self._consume, batch.parts, step, True, meter), step=step)
        learned = Learned()
        learned.add(meter, batch)
        return meter.metrics(batch, self.engine) | learned.metrics(self.loss)

    @property
    def needs_estimates(self) -> bool:
        """Whether advantages need `estimate` first, because of a critic or because the KL is in the reward."""
        return self._critic is not None or self._penalises

    async def estimate(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        """Return estimates for each of ``samples`` under the current weights; advantages are computed from them."""
        started = perf_counter()
        estimates = await self._on_device("logprobs", lambda _: self._estimates(samples), samples=len(samples))
        self._estimating_s += perf_counter() - started
        return estimates

    def _estimates(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        """Return the estimates. Their ``penalty`` is the KL of each token times the coefficient; 0 if replayed."""
        nothing: list[FloatArray | None] = [None] * len(samples)
        recompute = self.settings.old_logprobs == "recompute"
        proximal = [score.logprobs for score in self.engine.score(samples)] if recompute else nothing
        values = self.engine.values(samples) if self._critic is not None else nothing
        penalties = nothing
        if self._penalises:
            penalties = []
            reference = self.engine.score(samples, reference=True)
            for sample, known, scores in zip(samples, proximal, reference, strict=True):
                logp = torch.from_numpy(sample.behaviour if known is None else known)
                kl = kl_penalty(logp, torch.from_numpy(scores.logprobs), self.loss.kl).numpy() * sample.mask
                if not sample.off_policy:
                    self._kl.measure(float(kl.sum()), int(sample.mask.sum()))
                penalties.append(np.float32(self._kl.value * (not sample.off_policy)) * kl)
        return [ModelEstimates(*row) for row in zip(proximal, penalties, values, strict=True)]

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        """Return log-probs and entropies of the trained tokens of each of ``samples`` under the current weights."""
        return await self._on_device("logprobs", lambda _: self.engine.score(samples), samples=len(samples))

    def weights(self) -> Mapping[str, Any]:
        """Return tensors by Hugging Face parameter name, with adapters merged. The next update may change them.

        The call may have to wait for other work of the engine, so make it in a thread.
        """
        return self.engine.weights()

    def save(self, folder: Path) -> None:
        """Write everything needed to continue bit for bit, except a gradient that is not applied yet.

        Raises RuntimeError in the middle of a mini-batch.
        """
        if self._progress.groups % self.groups_per_update:
            raise RuntimeError("a mini-batch is half consumed; save at the end of a step")
        progress = self._progress
        counters = {name: getattr(progress, name) for name in ("groups", "updates", "skipped", "last_update")}
        checkpoint.save(folder, self.engine, {**counters, "kl_coefficient": self._kl.value})

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote. Raises `UserError` naming a missing, damaged or mismatched file."""
        counters = checkpoint.load(folder, self.engine)
        kl_coefficient = counters.pop("kl_coefficient")
        if self.loss.kl_target is not None:
            self._kl.value = kl_coefficient
        self._progress, self._learned = _Progress(**counters), Learned()
        self.engine.discard()

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model directory with adapters merged, and the tokenizer."""
        self.engine.export(folder, self._tokenizer)

    def _consume(
        self, parts: Sequence[GroupSamples], step: int, completes: bool, meter: Meter, device: DeviceSlice
    ) -> None:
        """Add the gradient of groups of one mini-batch; apply it if they complete the mini-batch."""
        started, progress = perf_counter(), self._progress
        samples = [sample for part in parts for sample in part.samples]
        needed = samples if self._every_sample_matters else [sample for sample in samples if not sample.zero_advantage]
        seen = self.engine.backward(
            needed,
            version=step,
            kl_coefficient=self._kl.value if self.loss.kl_in == "loss" else 0.0,
            untouched=progress.last_update != step,
        )
        meter.seen = seen if meter.seen is None else meter.seen + seen
        meter.samples += len(needed)
        meter.samples_skipped += len(samples) - len(needed)
        meter.seconds["gradient"] += perf_counter() - started - device.away_s
        progress.pending_tokens += sum(part.tokens for part in parts) - seen.left_out_tokens
        progress.pending_sequences += sum(part.sequences for part in parts) - seen.left_out_sequences
        if not completes:
            return

        # An empty gradient, or one that is not finite, does not change the weights.
        started = perf_counter()
        tokens, sequences = progress.pending_tokens, progress.pending_sequences
        progress.pending_tokens = progress.pending_sequences = 0.0
        lr = learning_rate(self.settings, step, self.total_steps)
        meter.rates.append(lr)
        if tokens < 0.5:
            meter.updates_empty += 1
            self.engine.discard()
        else:
            policy = self._critic is None or step >= self._critic.warmup_steps
            norm = self.engine.step(normaliser(aggregation_of(self.loss), tokens, sequences), lr, policy=policy)
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
        """Run ``work`` in a thread while holding the device, and record its span.

        Calls run one at a time: while ``work`` has lent the device to others, a new call still waits until ``work`` has
        ended. A cancelled call first waits for its thread, so that an update is never seen half done.
        """
        async with self._one, self._device_lock("train") as held:
            record = partial(self._timeline.record, kind, **tags) if self._timeline is not None else None
            device = self.engine.between = DeviceSlice(held, record)
            running = asyncio.ensure_future(asyncio.to_thread(work, device))
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise
            device.end()
            return result


# --- what an update needs and reports ---
class DeviceSlice:
    """The device time of work on a thread. Calling it between two micro-batches lends the device to more urgent work.

    It must be made on the event loop that ``held`` belongs to. ``record(start, end)`` is called after each
    stretch of work, with seconds of `perf_counter`.
    """

    def __init__(self, held: DeviceHold | None, record: Callable[[float, float], None] | None) -> None:
        self._held, self._record = held, record
        self._loop = asyncio.get_running_loop() if held is not None else None
        self._started = perf_counter()
        self.away_s = 0.0
        """Seconds for which the device was lent."""

    def __call__(self) -> None:
        if self._held is None or self._loop is None or not self._held.wanted:
            return
        left = self.end()
        asyncio.run_coroutine_threadsafe(self._held.give_way(), self._loop).result()
        self._started = perf_counter()
        self.away_s += self._started - left

    def end(self) -> float:
        """Record the stretch of work that ends now, and return the current time."""
        now = perf_counter()
        if self._record is not None:
            self._record(self._started, now)
        return now


class KlCoefficient:
    """The coefficient of the KL to the reference: fixed, or adapted to hold the KL at ``loss.kl_target``.

    After each step: value *= 1 + clip(KL / target - 1, +-0.2) * trajectories / horizon (Ziegler et al.,
    arXiv 1909.08593, section 2.2).
    """

    def __init__(self, settings: LossSettings) -> None:
        self.settings = settings
        self.value = settings.kl_coefficient
        self._sum = self._tokens = 0.0

    def measure(self, total: float, tokens: float) -> None:
        """Add ``total``, the sum of the KL over ``tokens`` tokens."""
        self._sum, self._tokens = self._sum + total, self._tokens + tokens

    def adapt(self, mean: float | None, trajectories: int) -> dict[str, float]:
        """Update the coefficient at the end of a step that learned from a number of ``trajectories``.

        ``mean``: their mean KL per token, if the loss measured it. Returns the old coefficient and the KL of the step
        as metrics.
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
                self.value *= 1 + error * trajectories / self.settings.kl_horizon
        self._sum = self._tokens = 0.0
        return metrics


class Meter:
    """Counts and times of one call of `TorchLearner.update`."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.seen: Pass | None = None
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.samples = self.samples_skipped = 0
        self.updates_skipped = self.updates_empty = 0
        self.seconds = {"gradient": 0.0, "optimizer": 0.0, "logprobs": 0.0}

    def metrics(self, batch: Batch, engine: Engine) -> dict[str, float]:
        """Return metrics: ``learner/...``, and sums in ``tokens/``, ``time/``, ``samples/``, ``updates/``."""
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
    """Loss statistics over any number of calls; tensors stay on their device until `metrics`."""

    def __init__(self) -> None:
        self._seen: Pass | None = None
        self._tokens = self._sequences = 0
        self.trajectories = 0  # number of trajectories with a sample

    def add(self, meter: Meter, batch: Batch) -> None:
        if meter.seen is not None:
            self._seen = meter.seen if self._seen is None else self._seen + meter.seen
        self._tokens += meter.epochs * sum(part.tokens for part in batch.parts)
        self._sequences += meter.epochs * sum(part.sequences for part in batch.parts)
        self.trajectories += len({(sample.group, sample.trajectory) for sample in batch.samples})

    def metrics(self, loss: LossSettings) -> dict[str, float]:
        """Return ``loss/...`` and ``critic/...`` of all calls together."""
        seen = self._seen or Pass.empty()
        tokens, sequences = self._tokens - seen.left_out_tokens, self._sequences - seen.left_out_sequences
        return {
            "loss/policy": seen.loss / max(1.0, normaliser(aggregation_of(loss), tokens, sequences)),
            **seen.statistics.metrics(),
            **seen.critic.metrics(),
        }
