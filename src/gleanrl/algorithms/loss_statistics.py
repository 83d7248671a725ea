"""Metrics of a loss, separate for fresh and replayed tokens.

`measure` computes the `Statistics` of one micro-batch. Statistics of several micro-batches and chunks are added, and
the sum has the same metrics as if all tokens had been measured at once.
"""

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
    "seen",
    "correction",
    "masked",
    "mismatch_count",
    "mismatch",
    "mismatch_k3",
    "mismatch_ratio",
    "mismatch_ratio_squared",
)
OPTIONAL = frozenset({"entropy", "kl", "correction", "masked"})  # sums that are reported only if their input was given
OF_ALL = SUMS[SUMS.index("seen") :]  # sums that include the tokens that a correction leaves out
ORIGINS = ("fresh", "replayed")
RATIO_LARGE = 10.0  # the share of tokens whose ratio is above this value is reported
MISMATCH_LIMIT = 20.0  # bound of |mismatch|, equal to the bound of log-ratios in the losses
TAIL = 99  # percent; this quantile of the ratio is reported

# The histogram of the log-ratio x has bins of equal width in asinh(x / LINEAR). They are narrow around x = 0, where
# most ratios are.
BINS = 1024  # number of bins on each side of the bin around 0
LINEAR = 1e-3  # log-ratio up to which the bins are about equally wide
FURTHEST = 20.0  # log-ratios further from 0 are counted in the outermost bins
WIDTH = math.asinh(FURTHEST / LINEAR) / BINS


@dataclass(frozen=True)
class Statistics:
    """Sums and extrema over tokens. ``a + b`` are the statistics of the tokens of both. Tensors stay on their device.

    Tokens that a correction leaves out enter the sums in `OF_ALL` only.

    In each tensor, row 0 is for fresh tokens and row 1 for replayed tokens.
    """

    sums: Tensor  # float64 [2, len(SUMS)], sum of each quantity in `SUMS`
    extrema: Tensor  # float64 [2, 2], the negated minimum and the maximum of the ratio
    histogram: Tensor  # int64 [2, 2 * BINS + 1], number of tokens in each bin of the log-ratio
    measured: frozenset[str] = frozenset()  # names in `OPTIONAL` whose input was given

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
        """Return the metrics ``loss/...`` over fresh tokens and ``loss/replayed/...`` over replayed tokens.

        If there are no tokens of one kind, its metrics are missing. If a correction leaves all of them out, only those
        of the correction and the mismatch are there. ``ess`` is the effective sample size of the ratios
        w of n tokens, as a share of the tokens: (sum w)^2 / (n sum w^2). ``ratio/p99`` is the 99 % quantile of the
        ratio. It is read from the histogram: the error of its logarithm x is at most 0.0053 (|x| + 0.001), so the error
        of the ratio is 5e-4 at a ratio of 1.1, 0.007 at 2 and 0.12 at 10. ``token_share`` is the share of replayed
        tokens in all tokens.
        """
        metrics: dict[str, float] = {}
        columns = (self.sums.tolist(), self.extrema.tolist(), self.histogram.tolist())
        tokens = sum(row[0] for row in columns[0])
        for origin, row, (low, high), bins in zip(ORIGINS, *columns, strict=True):
            sums: dict[str, float] = dict(zip(SUMS, row, strict=True))
            count = sums["count"]
            prefix = "loss/" if origin == "fresh" else "loss/replayed/"
            if count:
                hidden = {"count", "ratio_squared", *OF_ALL} | (OPTIONAL - self.measured)
                metrics |= {prefix + _PUBLIC.get(name, name): sums[name] / count for name in SUMS if name not in hidden}
                metrics |= {
                    f"{prefix}ratio/min": -low,
                    f"{prefix}ratio/max": high,
                    f"{prefix}ratio/p{TAIL}": min(max(_quantile(bins, TAIL), -low), high),
                    f"{prefix}ess": sums["ratio"] ** 2 / (count * sums["ratio_squared"]),
                }
                if origin == "replayed":
                    metrics["loss/replayed/token_share"] = count / tokens
            if seen := sums["seen"]:
                of_all = [name for name in ("correction", "masked") if name in self.measured]
                metrics |= {prefix + name: sums[name] / seen for name in of_all}
            # Tokens after the first update of a step may have no mismatch, so fewer tokens than ``count`` may have one.
            if compared := sums["mismatch_count"]:
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
    """Return the quantile at ``percent`` of the ratios in a histogram with ``counts`` by bin, as the middle of a bin.

    It is the first bin up to which at least ``percent`` of all ratios are counted.
    """
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
    """Compute the statistics of T tokens. To be called under `torch.no_grad`.

    Every argument is a tensor [T]. If an argument is None, its metrics are missing or 0.

    Args:
        replayed: bool, True for replayed tokens.
        policy: policy loss of each token.
        log_ratio: log(pi / pi_old), finite and with an absolute value small enough for exp.
        clip_high, clip_low, clip_dual: bool, whether the token is clipped in this way.
        entropy: entropy of the policy.
        kl: estimate of the KL to the reference.
        mismatch: log(pi_old / pi_behaviour), or log(pi / pi_behaviour) for replayed tokens; clamped to [-20, 20] here.
        correction: factor of the importance correction, 0 where a token is left out.
    """
    if not log_ratio.numel():
        return Statistics.empty(log_ratio.device)
    kept = torch.ones_like(replayed) if correction is None else correction != 0
    bins = (log_ratio.float() / LINEAR).asinh().div_(WIDTH).round_().long().clamp_(-BINS, BINS) + BINS
    # Counting with index_add_ does not make the host wait for the device; nor does any other operation here.
    counts = bins.new_zeros(2 * (2 * BINS + 1))
    histogram = counts.index_add_(0, bins + (2 * BINS + 1) * replayed, kept.long()).view(2, -1)
    log_ratio = log_ratio.double()
    excess = log_ratio.expm1()  # ratio - 1, without loss of digits if the ratio is near 1
    ratio = excess + 1
    columns: dict[str, Tensor | None] = {
        "count": torch.ones_like(ratio),
        "policy": policy,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "ratio_above": ratio > RATIO_LARGE,
        "kl_k1": -log_ratio,  # estimates KL(old || new), because the old policy sampled the tokens
        "kl_k3": excess - log_ratio,
        "clip_high": clip_high,
        "clip_low": clip_low,
        "clip_dual": clip_dual,
        "entropy": entropy,
        "kl": kl,
        "seen": torch.ones_like(ratio),
        "correction": correction,
        "masked": None if correction is None else ~kept,
    }
    if mismatch is not None:
        gap = mismatch.double().clamp(-MISMATCH_LIMIT, MISMATCH_LIMIT)
        weight = gap.exp()
        columns |= {"mismatch_count": columns["seen"], "mismatch": gap.abs(), "mismatch_k3": weight - 1 - gap}
        columns |= {"mismatch_ratio": weight, "mismatch_ratio_squared": weight.square()}
    given = {name: value for name, value in columns.items() if value is not None}
    table = ratio.new_empty(len(given), ratio.numel())
    for row, value in zip(table, given.values(), strict=True):
        row.copy_(value)
    if correction is not None:
        table[: sum(name not in OF_ALL for name in given)].masked_fill_(~kept, 0.0)  # those in OF_ALL come last
    totals = dict(zip(given, (table @ torch.stack([~replayed, replayed], dim=-1).double()).unbind(), strict=True))
    sums = torch.stack([totals.get(name, ratio.new_zeros(2)) for name in SUMS], dim=-1)
    signed = torch.stack([-ratio, ratio])
    extrema = torch.stack([signed.masked_fill(other | ~kept, -torch.inf).amax(-1) for other in (replayed, ~replayed)])
    return Statistics(sums, extrema, histogram, OPTIONAL & given.keys())
