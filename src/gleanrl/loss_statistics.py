"""Metrics of a loss, fresh and replayed tokens apart, that add up exactly over micro-batches and chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SUMS = (
    "count",
    "policy",
    "ratio",
    "ratio_squared",
    "kl_k1",
    "kl_k3",
    "clip_high",
    "clip_low",
    "clip_dual",
    "entropy",
    "kl",
    "mismatch",
    "mismatch_k3",
)
OPTIONAL = frozenset({"entropy", "kl", "mismatch", "mismatch_k3"})  # shown where their input was given
ORIGINS = ("fresh", "replayed")


@dataclass(frozen=True)
class Statistics:
    """Sums and extrema over tokens, by origin; ``a + b`` is that of both together. Stays on its device."""

    sums: Tensor  # float64 [2, len(SUMS)]: fresh, replayed
    extrema: Tensor  # float64 [2, 2]: -min and max of the ratio, by origin
    measured: frozenset[str] = frozenset()  # which of `OPTIONAL` are in the sums

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Statistics:
        return cls(
            torch.zeros(2, len(SUMS), dtype=torch.float64, device=device),
            torch.full((2, 2), -torch.inf, dtype=torch.float64, device=device),
        )

    def __add__(self, other: Statistics) -> Statistics:
        extrema = torch.maximum(self.extrema, other.extrema)
        return Statistics(self.sums + other.sums, extrema, self.measured | other.measured)

    def metrics(self) -> dict[str, float]:
        """Plain numbers: ``loss/...`` over fresh tokens, ``loss/replayed/...`` over replayed ones, where there are any.

        ``ess`` is the effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2).
        """
        metrics: dict[str, float] = {}
        for origin, row, (low, high) in zip(ORIGINS, self.sums.tolist(), self.extrema.tolist(), strict=True):
            sums: dict[str, float] = dict(zip(SUMS, row, strict=True))
            count = sums["count"]
            if count == 0:
                continue
            prefix = "loss/" if origin == "fresh" else "loss/replayed/"
            hidden = {"count", "ratio_squared"} | (OPTIONAL - self.measured)
            metrics |= {prefix + _PUBLIC.get(name, name): sums[name] / count for name in SUMS if name not in hidden}
            metrics |= {
                f"{prefix}ratio/min": -low,
                f"{prefix}ratio/max": high,
                f"{prefix}ess": sums["ratio"] ** 2 / (count * sums["ratio_squared"]),
            }
        return metrics


_PUBLIC = {
    "policy": "policy_per_token",
    "ratio": "ratio/mean",
    "kl_k1": "approx_kl_k1",
    "kl_k3": "approx_kl_k3",
    "kl": "reference_kl",
}


def measure(
    replayed: Tensor,
    *,
    policy: Tensor,
    log_ratio: Tensor,
    clip_high: Tensor,
    clip_low: Tensor,
    clip_dual: Tensor,
    entropy: Tensor | None,
    kl: Tensor | None,
    mismatch: Tensor | None,
) -> Statistics:
    """The statistics of T tokens: every argument is [T]; None is left out. Call under `torch.no_grad`."""
    optional = {"entropy": entropy, "kl": kl, "mismatch": mismatch, "mismatch_k3": mismatch}
    measured = frozenset(name for name, value in optional.items() if value is not None)
    log_ratio = log_ratio.double()
    ratio = log_ratio.exp()
    zero = torch.zeros_like(ratio)
    gap = zero if mismatch is None else mismatch.double().clamp(-20, 20)
    columns = {
        "count": torch.ones_like(ratio),
        "policy": policy,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "kl_k1": -log_ratio,  # tokens are drawn from the old policy: KL(old || new)
        "kl_k3": ratio - 1 - log_ratio,
        "clip_high": clip_high,
        "clip_low": clip_low,
        "clip_dual": clip_dual,
        "entropy": zero if entropy is None else entropy,
        "kl": zero if kl is None else kl,
        "mismatch": gap.abs(),
        "mismatch_k3": gap.exp() - 1 - gap,
    }
    table = torch.stack([columns[name].double() for name in SUMS], dim=-1)
    origin = torch.stack([~replayed, replayed]).double()
    low = torch.where(origin.bool(), -ratio, -torch.inf)
    high = torch.where(origin.bool(), ratio, -torch.inf)
    if ratio.numel() == 0:
        return Statistics.empty(ratio.device)
    return Statistics(origin @ table, torch.stack([low.amax(-1), high.amax(-1)], dim=-1), measured)
