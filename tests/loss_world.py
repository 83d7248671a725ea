"""A second implementation of the losses, in plain Python and one token at a time, to compare the real ones with.

For each token it computes the value of the loss and its derivative by the token's log-prob.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from hypothesis import assume, currently_in_test_context
from hypothesis import strategies as st

from gleanrl.algorithms.loss import LossConfig, Tokens

RATIO_FREE = ("reinforce", "gpg")
NAMES = ("ppo", "gspo", "cispo", "gpg", "reinforce", "clip_cov", "kl_cov")


@dataclass(frozen=True)
class World:
    """The inputs of a loss: T trained tokens of N sequences. A sequence is either fresh or replayed."""

    logp: np.ndarray  # float64 [T], log-probs of the current policy
    old: np.ndarray  # float64 [T], old log-probs
    behaviour: np.ndarray  # float64 [T], behaviour log-probs
    advantages: np.ndarray  # float64 [T]
    sequence: np.ndarray  # int64 [T], index of each token's sequence
    replayed: np.ndarray  # bool [T], whether the token is of a replayed sequence

    def take(self, index: np.ndarray) -> World:
        return World(*(getattr(self, field.name)[index] for field in fields(self)))

    def tokens(self, logp: torch.Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tokens:
        return Tokens(
            logp=torch.tensor(self.logp, dtype=dtype) if logp is None else logp,
            old_logp=torch.tensor(self.old, dtype=dtype),
            advantages=torch.tensor(self.advantages, dtype=dtype),
            sequence=torch.tensor(self.sequence),
            off_policy=torch.tensor(self.replayed),
            behaviour_logp=torch.tensor(self.behaviour, dtype=dtype),
        )

    def padded(self, values: np.ndarray, filler: float) -> torch.Tensor:
        """Return a tensor [N, L] with a row per sequence: its values from position 1 on, and ``filler`` elsewhere."""
        counts = Counter(self.sequence.tolist())
        result = torch.full((max(counts, default=0) + 1, max(counts.values(), default=0) + 2), filler).double()
        place: Counter[int] = Counter()
        for row, value in zip(self.sequence.tolist(), values.tolist(), strict=True):
            place[row] += 1
            result[row, place[row]] = value
        return result


def make_world(
    random: np.random.Generator, tokens: int = 40, sequences: int = 5, spread: float = 0.4, replayed: float = 0.4
) -> World:
    """Return random tokens in random order.

    ``spread`` scales the differences between current, old and behaviour log-probs. ``replayed`` is the probability that
    a sequence is replayed.
    """
    sequence = random.integers(0, sequences, tokens)
    of_pool = random.random(sequences) < replayed
    old = -random.exponential(2.0, tokens)
    drift = 0.5 * spread * random.normal(size=tokens)
    return World(
        logp=old + spread * random.normal(size=tokens),
        old=old,
        behaviour=np.where(of_pool[sequence], old, old - drift),
        advantages=random.normal(size=tokens) * (random.random(tokens) < 0.9),
        sequence=sequence,
        replayed=of_pool[sequence],
    )


@st.composite
def worlds(draw: st.DrawFn, spreads: tuple[float, ...] = (0.0, 0.3, 3.0, 60.0)) -> World:
    return make_world(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        tokens=draw(st.integers(0, 40)),
        sequences=draw(st.integers(1, 6)),
        spread=draw(st.sampled_from(spreads)),  # the largest gives log-ratios beyond the clamp at +-20
        replayed=draw(st.sampled_from([0.0, 0.4, 1.0])),
    )


def ratio_of(log_ratio: float) -> tuple[float, float]:
    """Return the ratio with its log clamped to +-20, and its derivative, which is 0 beyond the clamp."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    return ratio, ratio if -20 <= log_ratio <= 20 else 0.0


def clipped(
    ratio: float, slope: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, float]:
    if advantage > 0:
        return (-advantage * ratio, -advantage * slope) if ratio <= 1 + high else (-advantage * (1 + high), 0.0)
    if ratio < 1 - low:
        return -advantage * (1 - low), 0.0
    if dual is not None and ratio > dual:
        return -advantage * dual, 0.0
    return -advantage * ratio, -advantage * slope


def replayed_token(logp: float, old: float, advantage: float, config: LossConfig) -> tuple[float, float]:
    ratio, slope = (1.0, 1.0) if config.replay_importance == "current" else ratio_of(logp - old)
    beta, scale = config.replay_shape, config.replay_coefficient
    if config.replay_mode == "shape":
        return -scale * advantage * ratio / (ratio + beta), -scale * advantage * beta * slope / (ratio + beta) ** 2
    pair = clipped(ratio, slope, advantage, config.clip_low, config.replay_clip_high, config.dual_clip)
    return scale * pair[0], scale * pair[1]


def covariances(world: World) -> np.ndarray:
    """Return float64 [T], each fresh token's covariance of advantage and log-prob; -inf for replayed tokens."""
    fresh = ~world.replayed
    if not fresh.any():
        return np.full(fresh.shape, -np.inf)
    product = (world.advantages - world.advantages[fresh].mean()) * (world.logp - world.logp[fresh].mean())
    return np.where(fresh, product, -np.inf)


def highest_covariance(world: World, share: float) -> set[int]:
    """Return the indices of the share of fresh tokens with the highest covariance.

    Hypothesis rejects worlds in which two covariances are so close that rounding would decide which token is chosen.
    That includes all worlds with exactly two fresh tokens, whose covariances are equal.
    """
    fresh = np.flatnonzero(~world.replayed)
    values = covariances(world)
    if currently_in_test_context():
        assume((np.diff(np.sort(values[fresh])) > 1e-9).all())
    count = max(1, int(share * fresh.size))
    return set(sorted(fresh.tolist(), key=lambda i: -values[i])[:count])


def covariance_in_band(world: World, config: LossConfig) -> set[int]:
    """Return the indices of the tokens that clip_cov draws from: covariance in its band, and not clipped by PPO."""
    low, high = config.options["low"], config.options["high"]
    ratios = np.exp(np.clip(world.logp - world.old, -20, 20))
    above = (world.advantages > 0) & (ratios > 1 + config.clip_high)
    below = (world.advantages < 0) & (ratios < 1 - config.clip_low)
    values = covariances(world)
    return set(np.flatnonzero((values > low) & (values < high) & ~above & ~below).tolist())


def per_token(world: World, config: LossConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss value and derivative of every token, without the importance correction.

    clip_cov must be configured to choose all its candidates (share 1, as in `settings`), so that nothing is random.
    """
    values, slopes = np.zeros(world.logp.size), np.zeros(world.logp.size)
    chosen: set[int] = set()
    if config.name == "kl_cov":
        chosen = highest_covariance(world, config.options["share"])
    elif config.name == "clip_cov":
        assert config.options["share"] == 1
        chosen = covariance_in_band(world, config)
    for i in range(world.logp.size):
        logp, old, advantage = (float(x[i]) for x in (world.logp, world.old, world.advantages))
        low, high = config.clip_low, config.clip_high
        ratio, slope = ratio_of(logp - old)
        if world.replayed[i]:
            pair = replayed_token(logp, old, advantage, config)
        elif config.name == "ppo":
            pair = clipped(ratio, slope, advantage, low, high, config.dual_clip)
        elif config.name == "gspo":
            own = world.sequence == world.sequence[i]
            pair = clipped(*ratio_of(float((world.logp - world.old)[own].mean())), advantage, low, high, None)
        elif config.name == "cispo":
            weight = min(max(ratio, 1 - low), 1 + high)
            pair = -weight * advantage * logp, -weight * advantage
        elif config.name in RATIO_FREE:
            pair = -advantage * logp, -advantage
        elif config.name == "clip_cov":
            pair = (0.0, 0.0) if i in chosen else clipped(ratio, slope, advantage, low, high, None)
        else:
            pair = -advantage * ratio, -advantage * slope
            if i in chosen:
                push = config.options["coefficient"]
                pair = pair[0] + push * abs(math.log(ratio)), pair[1] + push * np.sign(logp - old) * (slope > 0)
        values[i], slopes[i] = pair
    return values, slopes


def corrections(world: World, config: LossConfig) -> np.ndarray:
    """Return float64 [T], the importance-correction weight of each token; 0 means that the token is masked."""
    upper = world.logp if config.name in RATIO_FREE else world.old
    weights = np.ones(world.logp.size)
    for i in np.flatnonzero(~world.replayed) if config.correction != "none" else []:
        own = world.sequence == world.sequence[i]
        gaps = (upper - world.behaviour)[own]
        gap = {"token": upper[i] - world.behaviour[i], "sequence": gaps.sum(), "geometric": gaps.mean()}
        weight = ratio_of(float(gap[config.correction_level]))[0]
        if config.correction == "truncate":
            weights[i] = min(weight, config.correction_cap)
        else:
            weights[i] = weight if config.correction_floor <= weight <= config.correction_cap else 0.0
    return weights


def shares(sequence: np.ndarray, mode: str, scale: float = 1.0) -> np.ndarray:
    """Return float64 [T], the factor of each token's loss in the aggregation ``mode``."""
    counts = Counter(sequence.tolist())
    if mode == "token-mean":
        return np.full(sequence.size, 1 / max(sequence.size, 1))
    if mode == "seq-mean-token-sum":
        return np.full(sequence.size, 1 / max(len(counts), 1))
    if mode == "seq-mean-token-mean":
        return np.array([1 / counts[s] / len(counts) for s in sequence.tolist()])
    return np.full(sequence.size, 1 / scale / max(len(counts), 1))


def aggregated(world: World, config: LossConfig, mode: str, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's part of the loss and of its gradient, both [T].

    Masked tokens are left out of the aggregation, as if they were not in the batch.
    """
    weights = corrections(world, config)
    kept = np.flatnonzero(weights > 0)
    rest = world.take(kept)
    values, slopes = per_token(rest, config)
    factors = shares(rest.sequence, mode, scale) * weights[kept]
    parts, gradient = np.zeros(world.logp.size), np.zeros(world.logp.size)
    parts[kept], gradient[kept] = factors * values, factors * slopes
    return parts, gradient


def settings(name: str, **changes: Any) -> LossConfig:
    """Return a configuration of the loss ``name`` in which its special cases occur with only a few tokens."""
    options = {"clip_cov": {"share": 1.0, "low": 0.1, "high": 5.0}, "kl_cov": {"share": 0.2, "coefficient": 0.7}}
    return LossConfig(**{"name": name, "options": options.get(name, {})} | changes)
