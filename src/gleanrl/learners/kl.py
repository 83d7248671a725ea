"""The coefficient of the KL to the reference: fixed, or steered towards a target."""

from __future__ import annotations

from gleanrl.config.settings import LossSettings

LARGEST_ERROR = 0.2  # of the measured KL to the target, as a share; bounds how fast the coefficient moves


class KlCoefficient:
    """``value`` is the coefficient now. With ``loss.kl_target`` it grows while the KL is above the target.

    After each step: value *= 1 + clip(KL / target - 1, +-0.2) * trajectories / horizon (Ziegler et al.,
    arXiv 1909.08593, section 2.2).
    """

    def __init__(self, settings: LossSettings) -> None:
        self.settings = settings
        self.value = settings.kl_coefficient
        self._sum = self._tokens = 0.0
        self._trajectories = 0

    @property
    def in_loss(self) -> float:
        """What the KL term of the loss is multiplied by: 0 where the KL is in the reward."""
        return self.value if self.settings.kl_in == "loss" else 0.0

    def measure(self, total: float, tokens: float) -> None:
        """Count the KL of so many tokens."""
        self._sum, self._tokens = self._sum + total, self._tokens + tokens

    def observe(self, mean: float | None, trajectories: int) -> None:
        """A part of a step was learned from; ``mean`` KL a token, where the loss measured it."""
        self._trajectories += trajectories
        if mean is not None and self.settings.kl_in == "loss":
            self.measure(mean * trajectories, trajectories)

    def adapt(self) -> dict[str, float]:
        """The step is over: move the coefficient; what it was and the KL of the step, as metrics."""
        if not self.settings.kl_coefficient:
            return {}
        metrics = {"loss/kl_coefficient": self.value}
        if self._tokens:
            mean = self._sum / self._tokens
            if self.settings.kl_in == "reward":
                metrics["loss/reference_kl"] = mean
            if self.settings.kl_target is not None:
                error = min(max(mean / self.settings.kl_target - 1, -LARGEST_ERROR), LARGEST_ERROR)
                self.value *= 1 + error * self._trajectories / self.settings.kl_horizon
        self._sum = self._tokens = 0.0
        self._trajectories = 0
        return metrics
