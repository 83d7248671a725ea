"""Losses once more, one token at a time and by cases, in plain Python: the value and its derivative by the log-prob."""

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
    """T trained tokens of N sequences, in numpy; a sequence is fresh or replayed as a whole."""

    logp: np.ndarray  # float64 [T]
    old: np.ndarray  # float64 [T]
    behaviour: np.ndarray  # float64 [T]
    advantages: np.ndarray  # float64 [T]
    sequence: np.ndarray  # int64 [T]
    replayed: np.ndarray  # bool [T]

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
        """[N, L] with ``values`` of each sequence from its second position on, and ``filler`` elsewhere."""
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
    """Random tokens in random order; ``spread`` scales the log-ratios, of the policy and of its behaviour alike."""
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
        spread=draw(st.sampled_from(spreads)),  # the last leaves the clamp
        replayed=draw(st.sampled_from([0.0, 0.4, 1.0])),
    )


def ratio_of(log_ratio: float) -> tuple[float, float]:
    """exp of a log-ratio within +-20, and its derivative: nothing beyond."""
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
    """float64 [T], -inf for replayed tokens."""
    fresh = ~world.replayed
    if not fresh.any():
        return np.full(fresh.shape, -np.inf)
    product = (world.advantages - world.advantages[fresh].mean()) * (world.logp - world.logp[fresh].mean())
    return np.where(fresh, product, -np.inf)


def highest_covariance(world: World, share: float) -> set[int]:
    """Fresh tokens; a world in which rounding would decide (two tokens always tie) is no example."""
    fresh = np.flatnonzero(~world.replayed)
    values = covariances(world)
    if currently_in_test_context():
        assume((np.diff(np.sort(values[fresh])) > 1e-9).all())
    count = max(1, int(share * fresh.size))
    return set(sorted(fresh.tolist(), key=lambda i: -values[i])[:count])


def covariance_in_band(world: World, config: LossConfig) -> set[int]:
    """Fresh tokens that clip_cov draws from: PPO does not clip them."""
    low, high = config.options["low"], config.options["high"]
    ratios = np.exp(np.clip(world.logp - world.old, -20, 20))
    above = (world.advantages > 0) & (ratios > 1 + config.clip_high)
    below = (world.advantages < 0) & (ratios < 1 - config.clip_low)
    values = covariances(world)
    return set(np.flatnonzero((values > low) & (values < high) & ~above & ~below).tolist())


def per_token(world: World, config: LossConfig) -> tuple[np.ndarray, np.ndarray]:
    """Value and slope of every token, before the correction. clip_cov draws all that it may, as in `settings`."""
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
    """float64 [T]: the weight of each token; 0 = left out."""
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
    """float64 [T]: what one token counts in the aggregate of all of them."""
    counts = Counter(sequence.tolist())
    if mode == "token-mean":
        return np.full(sequence.size, 1 / max(sequence.size, 1))
    if mode == "seq-mean-token-sum":
        return np.full(sequence.size, 1 / max(len(counts), 1))
    if mode == "seq-mean-token-mean":
        return np.array([1 / counts[s] / len(counts) for s in sequence.tolist()])
    return np.full(sequence.size, 1 / scale / max(len(counts), 1))


def aggregated(world: World, config: LossConfig, mode: str, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Each token's part of the loss and of its gradient, [T]: as if what is left out had never been trained."""
    weights = corrections(world, config)
    kept = np.flatnonzero(weights > 0)
    rest = world.take(kept)
    values, slopes = per_token(rest, config)
    factors = shares(rest.sequence, mode, scale) * weights[kept]
    parts, gradient = np.zeros(world.logp.size), np.zeros(world.logp.size)
    parts[kept], gradient[kept] = factors * values, factors * slopes
    return parts, gradient


def settings(name: str, **changes: Any) -> LossConfig:
    """A configuration in which a few tokens are enough for every loss to do what it is for."""
    options = {"clip_cov": {"share": 1.0, "low": 0.1, "high": 5.0}, "kl_cov": {"share": 0.2, "coefficient": 0.7}}
    return LossConfig(**{"name": name, "options": options.get(name, {})} | changes)
