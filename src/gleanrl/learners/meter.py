"""What a learner did: the work of one call, and what the tokens of a whole step were like."""

from __future__ import annotations

from gleanrl.algorithms.batch import Batch
from gleanrl.algorithms.loss import aggregation_of, normaliser
from gleanrl.config.settings import LossSettings
from gleanrl.learners.engine import Engine, Pass


class Meter:
    """The work of one call of `TorchLearner.update`."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.passes: list[Pass] = []
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.samples = self.samples_skipped = 0
        self.updates_skipped = self.updates_empty = 0
        self.seconds = {"gradient": 0.0, "optimizer": 0.0, "logprobs": 0.0}

    @property
    def seen(self) -> Pass:
        return sum(self.passes[1:], self.passes[0]) if self.passes else Pass.empty()

    def metrics(self, batch: Batch, engine: Engine) -> dict[str, float]:
        """Sums under ``tokens/ time/ samples/ updates/``; ``learner/...`` are of the call."""
        total = self.seen
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
    """What was learned from since it was made, over any number of calls; stays on its device until it is asked."""

    def __init__(self) -> None:
        self._seen: Pass | None = None
        self._tokens = self._sequences = 0
        self.trajectories = 0  # with a sample

    def add(self, meter: Meter, batch: Batch) -> None:
        self._seen = meter.seen if self._seen is None else self._seen + meter.seen
        self._tokens += meter.epochs * sum(part.tokens for part in batch.parts)
        self._sequences += meter.epochs * sum(part.sequences for part in batch.parts)
        self.trajectories += len({(sample.group, sample.trajectory) for sample in batch.samples})

    def metrics(self, loss: LossSettings) -> dict[str, float]:
        """``loss/...`` and ``critic/...``, as if all of it had been learned from in one call."""
        seen = Pass.empty() if self._seen is None else self._seen
        tokens, sequences = self._tokens - seen.left_out_tokens, self._sequences - seen.left_out_sequences
        return {
            "loss/policy": seen.loss / max(1.0, normaliser(aggregation_of(loss), tokens, sequences)),
            **seen.statistics.metrics(),
            **seen.critic.metrics(),
        }
