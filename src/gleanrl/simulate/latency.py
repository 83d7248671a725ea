"""How long one reward takes: a distribution given by name, or what was measured."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gleanrl.utils.errors import UserError

FORMS = "constant:SECONDS, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEDIAN:SIGMA, or a file of seconds, one a line"


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of seconds."""

    name: str
    mean: float  # seconds
    draw: Callable[[random.Random], float]

    @classmethod
    def parse(cls, text: str) -> Latency:
        """One of `FORMS`. Raises `UserError` for anything else."""
        kind, *words = text.split(":")
        if kind not in _FORMS:
            return _measured(text)
        count, make = _FORMS[kind]
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            numbers = []
        if len(numbers) != count or not all(math.isfinite(n) and n >= 0 for n in numbers):
            raise UserError(f"--latency is {text!r}: it must be {FORMS}")
        if kind == "uniform" and numbers[0] > numbers[1]:
            raise UserError(f"--latency is {text!r}: {words[0]} s is more than {words[1]} s")
        return cls(text, *make(*numbers))


def _measured(text: str) -> Latency:
    path = Path(text)
    if not path.is_file():
        raise UserError(f"--latency is {text!r}: it must be {FORMS}")
    seconds: list[float] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = float(line)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{text}, line {number}: {line.strip()[:40]!r} is not a number of seconds")
        seconds.append(value)
    if not seconds:
        raise UserError(f"{text} holds no latency: it must hold seconds, one a line")
    return Latency(text, sum(seconds) / len(seconds), lambda r: r.choice(seconds))


_Made = tuple[float, Callable[[random.Random], float]]


def _constant(seconds: float) -> _Made:
    return seconds, lambda r: seconds


def _uniform(low: float, high: float) -> _Made:
    return (low + high) / 2, lambda r: r.uniform(low, high)


def _exponential(mean: float) -> _Made:
    return mean, lambda r: r.expovariate(1 / mean) if mean else 0.0


def _lognormal(median: float, sigma: float) -> _Made:
    return median * math.exp(sigma**2 / 2), lambda r: median * math.exp(sigma * r.gauss(0.0, 1.0))


_FORMS: dict[str, tuple[int, Callable[..., _Made]]] = {
    "constant": (1, _constant),
    "uniform": (2, _uniform),
    "exponential": (1, _exponential),
    "lognormal": (2, _lognormal),
}
