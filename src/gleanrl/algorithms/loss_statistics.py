"""Metrics of a loss, separate for fresh and replayed tokens, that add up exactly over micro-batches and chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

SUMS = (
    "count",
    "policy",
    "ratio",
    "ratio_squared",
    "ratio_above",
    "kl_k1",
    "kl_k3",
    "clip_high",
    "clip_low",
    "clip_dual",
    "entropy",
    "kl",
    "correction",
    "masked",
    "mismatch_count",
    "mismatch",
    "mismatch_k3",
    "mismatch_ratio",
    "mismatch_ratio_squared",
)
OPTIONAL = frozenset({"entropy", "kl", "correction", "masked"})  # reported only if their input was given
ORIGINS = ("fresh", "replayed")
RATIO_LARGE = 10.0  # the share of ratios above this is reported
MISMATCH_LIMIT = 20.0  # bound of |mismatch|, equal to that of log-ratios in the losses
TAIL = 99  # percent; this quantile of the ratio is reported

# Bins of the log-ratio x are of equal width in asinh(x / LINEAR): narrow around 0, where most ratios are.
BINS = 1024  # number of bins on each side of the bin around 0
LINEAR = 1e-3
FURTHEST = 20.0  # log-ratios further from 0 fall into the outermost bins
WIDTH = math.asinh(FURTHEST / LINEAR) / BINS


@dataclass(frozen=True)
class Statistics:
    """Sums and extrema over tokens, by origin. ``a + b`` covers the tokens of both. Tensors stay on their device."""

    sums: Tensor  # float64 [2, len(SUMS)]: fresh, replayed
    extrema: Tensor  # float64 [2, 2]: -min and max of the ratio, by origin
    histogram: Tensor  # int64 [2, 2 * BINS + 1]: tokens by their log-ratio
    measured: frozenset[str] = frozenset()  # which of `OPTIONAL` are in the sums

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Statistics:
        return cls(
            torch.zeros(2, len(SUMS), dtype=torch.float64, device=device),
            torch.full((2, 2), -torch.inf, dtype=torch.float64, device=device),
            torch.zeros(2, 2 * BINS + 1, dtype=torch.int64, device=device),
        )

    def __add__(self, other: Statistics) -> Statistics:
        extrema = torch.maximum(self.extrema, other.extrema)
        histogram = self.histogram + other.histogram
        return Statistics(self.sums + other.sums, extrema, histogram, self.measured | other.measured)

    def metrics(self) -> dict[str, float]:
        """Return metrics: ``loss/...`` over fresh tokens, ``loss/replayed/...`` over replayed ones, if there are any.

        ``ess`` is the effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2). ``ratio/p99`` is the
        99 % quantile. The error of its logarithm x is at most 0.0053 (|x| + 0.001), so that of the ratio is 5e-4 at a
        ratio of 1.1, 0.007 at 2 and 0.12 at 10. ``token_share`` is the share of replayed tokens.
        """
        metrics: dict[str, float] = {}
        columns = (self.sums.tolist(), self.extrema.tolist(), self.histogram.tolist())
        tokens = sum(row[0] for row in columns[0])
        for origin, row, (low, high), bins in zip(ORIGINS, *columns, strict=True):
            sums: dict[str, float] = dict(zip(SUMS, row, strict=True))
            count = sums["count"]
            if count == 0:
                continue
            prefix = "loss/" if origin == "fresh" else "loss/replayed/"
            hidden = {"count", "ratio_squared"} | (OPTIONAL - self.measured)
            means = {name: sums[name] / count for name in SUMS if not name.startswith("mismatch")}
            metrics |= {prefix + _PUBLIC.get(name, name): value for name, value in means.items() if name not in hidden}
            metrics |= {
                f"{prefix}ratio/min": -low,
                f"{prefix}ratio/max": high,
                f"{prefix}ratio/p{TAIL}": min(max(_quantile(bins, TAIL), -low), high),
                f"{prefix}ess": sums["ratio"] ** 2 / (count * sums["ratio_squared"]),
            }
            if origin == "replayed":
                metrics["loss/replayed/token_share"] = count / tokens
            if compared := sums["mismatch_count"]:  # fewer than all tokens if the weights change within a step
                metrics |= {
                    f"{prefix}mismatch": sums["mismatch"] / compared,
                    f"{prefix}mismatch_k3": sums["mismatch_k3"] / compared,
                    f"{prefix}mismatch_ess": sums["mismatch_ratio"] ** 2 / (compared * sums["mismatch_ratio_squared"]),
                }
        return metrics


_PUBLIC = {
    "policy": "policy_per_token",
    "ratio": "ratio/mean",
    "ratio_above": f"ratio/above_{RATIO_LARGE:.0f}",
    "kl_k1": "approx_kl_k1",
    "kl_k3": "approx_kl_k3",
    "kl": "reference_kl",
}


def _quantile(counts: Sequence[int], percent: int) -> float:
    """Return the smallest ratio that ``percent`` of the counted ratios do not exceed, as the middle of its bin."""
    rank = -(-percent * sum(counts) // 100)
    passed = accumulate(counts)
    index = next(index for index, reached in enumerate(passed) if reached >= rank)
    return math.exp(LINEAR * math.sinh((index - BINS) * WIDTH))


def measure(
    replayed: Tensor,
    *,
    policy: Tensor,
    log_ratio: Tensor,
    clip_high: Tensor | None,
    clip_low: Tensor | None,
    clip_dual: Tensor | None,
    entropy: Tensor | None,
    kl: Tensor | None,
    mismatch: Tensor | None,
    correction: Tensor | None,
) -> Statistics:
    """Compute the statistics of T tokens. Every argument is [T], or None to leave it out. Call under `torch.no_grad`.

    ``log_ratio`` must be finite and of moderate size. ``mismatch`` is log pi_old - log pi_behaviour, or for replayed
    tokens log pi - log pi_behaviour, and is clamped to +-20 here. ``correction`` is the importance correction's weight,
    0 where a token is left out.
    """
    if not log_ratio.numel():
        return Statistics.empty(log_ratio.device)
    bins = (log_ratio.float() / LINEAR).asinh().div_(WIDTH).round_().long().clamp_(-BINS, BINS) + BINS
    counts = bins.new_zeros(2 * (2 * BINS + 1))  # no operation in this function waits for the device
    histogram = counts.index_add_(0, bins + (2 * BINS + 1) * replayed, torch.ones_like(bins)).view(2, -1)
    log_ratio = log_ratio.double()
    excess = log_ratio.expm1()  # ratio - 1, with all its digits where the ratio is near 1
    ratio = excess + 1
    columns: dict[str, Tensor | None] = {
        "count": torch.ones_like(ratio),
        "policy": policy,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "ratio_above": ratio > RATIO_LARGE,
        "kl_k1": -log_ratio,  # estimates KL(old || new), as tokens are drawn from the old policy
        "kl_k3": excess - log_ratio,
        "clip_high": clip_high,
        "clip_low": clip_low,
        "clip_dual": clip_dual,
        "entropy": entropy,
        "kl": kl,
        "correction": correction,
        "masked": None if correction is None else correction == 0,
    }
    if mismatch is not None:
        gap = mismatch.double().clamp(-MISMATCH_LIMIT, MISMATCH_LIMIT)
        weight = gap.exp()
        columns |= {"mismatch_count": columns["count"], "mismatch": gap.abs(), "mismatch_k3": weight - 1 - gap}
        columns |= {"mismatch_ratio": weight, "mismatch_ratio_squared": weight.square()}
    given = {name: value for name, value in columns.items() if value is not None}
    table = ratio.new_empty(len(given), ratio.numel())
    for row, value in zip(table, given.values(), strict=True):
        row.copy_(value)
    totals = dict(zip(given, (table @ torch.stack([~replayed, replayed], dim=-1).double()).unbind(), strict=True))
    sums = torch.stack([totals.get(name, ratio.new_zeros(2)) for name in SUMS], dim=-1)
    signed = torch.stack([-ratio, ratio])
    extrema = torch.stack([signed.masked_fill(other, -torch.inf).amax(-1) for other in (replayed, ~replayed)])
    return Statistics(sums, extrema, histogram, OPTIONAL & given.keys())
