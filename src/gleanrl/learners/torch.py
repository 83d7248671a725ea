"""The learner of a single process: which samples make which optimizer update, at which rate, and what it cost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from gleanrl.algorithms.batch import Batch, GroupSamples, ModelEstimates, Sample
from gleanrl.algorithms.loss import aggregation_of, kl_penalty, normaliser, scope_of
from gleanrl.config.settings import CriticSettings, LearnerSettings, LossSettings
from gleanrl.config.validate import check_mini_batches
from gleanrl.learners import checkpoint
from gleanrl.learners.engine import Engine, LocalEngine, TokenScores
from gleanrl.learners.kl import KlCoefficient
from gleanrl.learners.meter import Learned, Meter
from gleanrl.learners.optim import learning_rate
from gleanrl.learners.turn import DeviceSlice
from gleanrl.types import FloatArray
from gleanrl.utils.errors import UserError

T = TypeVar("T")
MAX_SKIPPED_IN_A_ROW = 5


class SpanRecorder(Protocol):
    """What the learner needs of a timeline."""

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None: ...


TakeDevice = Callable[[Any], AbstractAsyncContextManager[Any]]


@dataclass
class _Progress:
    """Counters of a run, saved with it, and what the update in the making has gathered."""

    groups: int = 0  # consumed since the run's start
    updates: int = 0
    skipped: int = 0  # updates with a gradient that was not finite
    skipped_in_a_row: int = 0
    last_update: int = -1  # the step of the last one
    pending_tokens: float = 0.0
    pending_sequences: float = 0.0

    def saved(self) -> dict[str, int]:
        names = ("groups", "updates", "skipped", "last_update")
        return {name: getattr(self, name) for name in names}


class _Cut(NamedTuple):
    """Groups that stand together in one optimizer update, and whether they complete it."""

    parts: tuple[GroupSamples, ...]
    step: int
    completes: bool


class TorchLearner:
    """Policy-gradient updates of a causal language model in this process; satisfies `gleanrl.protocols.Learner`.

    One optimizer update for every ``groups_per_step / updates_per_step`` groups consumed, however `update` gets them:
    gradients add up unnormalised and are divided once, by the denominator of the whole mini-batch. So an update does
    not depend on chunks, micro-batches or padding. The learning rate follows steps, not updates or chunks.

    Args:
        model: any causal language model of transformers, on its device, trained in place.
        total_steps: steps of the run, for the learning rate's decay.
        groups_per_step: groups of one global batch.
        pad_token: any token id, to fill rows with.
        temperature: that of sampling; log-probs are taken under softmax(logits / temperature).
        device_lock: held as ``device_lock("train")`` while the device is used; between two micro-batches it gives
            way, where what it yields can (`gleanrl.schedule.device_lock.DeviceHold`).
        timeline: spans "train" and "logprobs" are recorded there.
        reference: frozen model of the KL term; default, where needed: the model as given (before any `load`).
        critic: settings of a critic, for an estimator that needs values.
        tokenizer: saved beside exported models.
        compute_dtype: of forward passes; default bfloat16 on a GPU and float32 elsewhere.
        engine: makes what holds the model, called as `LocalEngine` is.
        trains: False for one that only scores, loads and gives weights; ``engine`` is told so.

    Raises:
        UserError: ``updates_per_step`` does not divide ``groups_per_step``, or adapters cannot be added.
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
        self._one = asyncio.Lock()  # whoever waits for the engine must not have the device meanwhile
        self._timeline = timeline
        self._tokenizer = tokenizer
        self._progress = _Progress()
        self._learned = Learned()  # of the step so far
        self._critic = critic
        self._kl = KlCoefficient(loss)
        self._estimating_s = 0.0  # not yet in any metrics
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
        """Consume the groups of ``batch`` in order; an optimizer update as soon as a mini-batch of them is complete.

        The metrics are of this call, but for ``loss/...`` and ``critic/...``: these come with the call that ends a step
        and are of all its tokens, however many calls it took.
        Raises `UserError` when the gradient was not finite several times in a row, and when ``learner.epochs`` is
        above 1 but the groups do not come in whole mini-batches.
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
            batch = await self._with_proximal(batch, meter)
        for _ in range(self.settings.epochs):
            for cut in self._cuts(batch):
                await self._on_device("train", partial(self._consume, cut, meter), step=cut.step)
        step = self.step
        self._progress.groups += batch.groups
        metrics = meter.metrics(batch, self.engine)
        self._learned.add(meter, batch)
        if self.step > step:
            metrics |= self._learned.metrics(self.loss)
            self._kl.observe(metrics.get("loss/reference_kl"), self._learned.trajectories)
            metrics |= self._kl.adapt()
            self._learned = Learned()
        return metrics

    @property
    def step(self) -> int:
        """Steps whose groups are consumed."""
        return self._progress.groups // self.groups_per_step

    def undo_step(self) -> bool:
        """Forget the groups of a step under way, to `save` it as it began; False if a mini-batch of it is applied."""
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
        """One optimizer update on groups that are no part of the step, between its updates and the next step's."""
        meter = Meter(1)
        cut = _Cut(batch.parts, step, completes=True)
        await self._on_device("train", partial(self._consume, cut, meter), step=step)
        learned = Learned()
        learned.add(meter, batch)
        return meter.metrics(batch, self.engine) | learned.metrics(self.loss)

    @property
    def needs_estimates(self) -> bool:
        """Whether credit must wait for `estimate`: an estimator needs a critic, or the KL is in the reward."""
        return self._critic is not None or self._penalises

    @property
    def _penalises(self) -> bool:
        return bool(self.loss.kl_coefficient) and self.loss.kl_in == "reward"

    async def estimate(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        """What the models say of ``samples`` before credit is given, in their order, under the weights as they are."""
        started = perf_counter()
        estimates = await self._on_device("logprobs", lambda _: self._estimates(samples), samples=len(samples))
        self._estimating_s += perf_counter() - started
        return estimates

    def _estimates(self, samples: Sequence[Sample]) -> list[ModelEstimates]:
        nothing: list[FloatArray | None] = [None] * len(samples)
        recompute = self.settings.old_logprobs == "recompute"
        proximal = [score.logprobs for score in self.engine.score(samples)] if recompute else nothing
        values = self.engine.values(samples) if self._critic is not None else nothing
        penalties = self._penalties(samples, proximal) if self._penalises else nothing
        return [ModelEstimates(*row) for row in zip(proximal, penalties, values, strict=True)]

    def _penalties(self, samples: Sequence[Sample], proximal: Sequence[FloatArray | None]) -> list[FloatArray | None]:
        """What each token's reward loses for its distance to the reference; nothing for replayed ones."""
        penalties: list[FloatArray | None] = []
        for sample, known, reference in zip(samples, proximal, self.engine.reference_logprobs(samples), strict=True):
            logp = torch.from_numpy(sample.behaviour if known is None else known)
            kl = kl_penalty(logp, torch.from_numpy(reference), self.loss.kl).numpy() * sample.mask
            if not sample.replayed:
                self._kl.measure(float(kl.sum()), int(sample.mask.sum()))
            penalties.append(np.float32(self._kl.value * (not sample.replayed)) * kl)
        return penalties

    async def logprobs(self, samples: Sequence[Sample]) -> list[TokenScores]:
        """Log-probs and entropies of the trained tokens of ``samples`` under the current weights, in their order."""
        return await self._on_device("logprobs", lambda _: self.engine.score(samples), samples=len(samples))

    def weights(self) -> Mapping[str, Any]:
        """Tensors by Hugging Face parameter name, adapters merged. Not copies: the next update changes them.

        Where other work may be under way, call it in a thread: it may have to wait for its end.
        """
        return self.engine.weights()

    def save(self, folder: Path) -> None:
        """Everything that continuing bit for bit needs. Only between updates: a gradient in the making is not saved.

        Raises `UserError` on a full disk, RuntimeError in the middle of a mini-batch.
        """
        if self._progress.groups % self.groups_per_update:
            raise RuntimeError("a mini-batch is half consumed; save at the end of a step")
        checkpoint.save(folder, self.engine, {**self._progress.saved(), "kl_coefficient": self._kl.value})

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote. Raises `UserError` naming a missing, damaged or unfitting file."""
        counters = checkpoint.load(folder, self.engine)
        kl_coefficient = counters.pop("kl_coefficient")
        if self.loss.kl_target is not None:
            self._kl.value = kl_coefficient
        self._progress, self._learned = _Progress(**counters), Learned()
        self.engine.discard()

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model directory, adapters merged, the tokenizer beside it."""
        self.engine.export(folder, self._tokenizer)

    def _cuts(self, batch: Batch) -> Iterator[_Cut]:
        start = 0
        while start < batch.groups:
            position = self._progress.groups + start
            stop = min(batch.groups, start + self.groups_per_update - position % self.groups_per_update)
            completes = (self._progress.groups + stop) % self.groups_per_update == 0
            yield _Cut(batch.parts[start:stop], position // self.groups_per_step, completes)
            start = stop

    def _consume(self, cut: _Cut, meter: Meter, turn: DeviceSlice) -> None:
        """Add the gradient of a cut; apply it if that completes a mini-batch."""
        started = perf_counter()
        samples = [sample for part in cut.parts for sample in part.samples]
        needed = samples if self._every_sample_matters else [sample for sample in samples if not sample.zero_advantage]
        seen = self.engine.backward(
            needed, version=cut.step, kl_coefficient=self._kl.in_loss, untouched=not self._updated_in(cut.step)
        )
        meter.passes.append(seen)
        meter.samples += len(needed)
        meter.samples_skipped += len(samples) - len(needed)
        meter.seconds["gradient"] += perf_counter() - started - turn.away_s
        self._progress.pending_tokens += sum(part.tokens for part in cut.parts) - seen.left_out_tokens
        self._progress.pending_sequences += sum(part.sequences for part in cut.parts) - seen.left_out_sequences
        if cut.completes:
            started = perf_counter()
            self._apply(cut.step, meter)
            meter.seconds["optimizer"] += perf_counter() - started

    @property
    def _every_sample_matters(self) -> bool:
        """KL, entropy, critic and precomputes reach samples without advantage too; a mask changes what they count."""
        kl_in_loss = self.loss.kl_coefficient and self.loss.kl_in == "loss"
        others = self._critic is not None or self.loss.correction == "mask" or scope_of(self.loss) == "update"
        return bool(kl_in_loss or self.loss.entropy_coefficient or others)

    def _updated_in(self, step: int) -> bool:
        """Whether the weights changed since those of ``step`` were published."""
        return self._progress.last_update == step

    def _apply(self, step: int, meter: Meter) -> None:
        progress = self._progress
        tokens, sequences = progress.pending_tokens, progress.pending_sequences
        progress.pending_tokens = progress.pending_sequences = 0.0
        lr = learning_rate(self.settings, step, self.total_steps)
        meter.rates.append(lr)
        if tokens < 0.5:
            meter.updates_empty += 1
            self.engine.discard()
            return
        policy = self._critic is None or step >= self._critic.warmup_steps
        norm = self.engine.step(normaliser(aggregation_of(self.loss), tokens, sequences), lr, policy=policy)
        if math.isfinite(norm):
            progress.updates += 1
            progress.last_update = step
            progress.skipped_in_a_row = 0
            meter.norms.append(norm)
            return
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        meter.updates_skipped += 1
        if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"step {step}: the gradient was not finite in {MAX_SKIPPED_IN_A_ROW} updates in a row (none was "
                f"applied); lower learner.lr (now {self.settings.lr:g}) and resume from the last checkpoint"
            )

    async def _with_proximal(self, batch: Batch, meter: Meter) -> Batch:
        """``batch`` with log-probs of the weights as they are now, before any update on it."""
        started = perf_counter()
        wanted = [s for s in batch.samples if self._every_sample_matters or not s.zero_advantage]
        samples = [s for s in wanted if s.proximal is None]
        scores = await self.logprobs(samples)
        known = {id(sample): score.logprobs for sample, score in zip(samples, scores, strict=True)}
        parts = tuple(
            replace(part, samples=tuple(replace(s, proximal=known.get(id(s), s.proximal)) for s in part.samples))
            for part in batch.parts
        )
        meter.seconds["logprobs"] += perf_counter() - started
        return Batch(parts)

    async def _on_device(self, kind: str, work: Callable[[DeviceSlice], T], **tags: Any) -> T:
        """Run ``work`` in a thread while the device is leased, and record its span. One at a time: what comes while
        the work gives way to others waits for its end."""
        async with self._one, self._device_lock("train") as held:
            record = partial(self._timeline.record, kind, **tags) if self._timeline is not None else None
            turn = self.engine.between = DeviceSlice(held, record)
            result = await _finished(asyncio.to_thread(work, turn))
            turn.end()
            return result


async def _finished(work: Awaitable[T]) -> T:
    """Await ``work``; a cancellation waits for its thread first, so that nobody meets a half-made update."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
