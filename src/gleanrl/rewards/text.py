"""Ready-made rewards on the form of the model's text: its format, its length and its repetitions.

Each is usually a part of a weighted sum with the reward for the right answer (`gleanrl.rewards.compose`). Lengths and
repetitions are counted in the tokens that were sampled, so they need a trajectory: a request that was made from a text
has no tokens and raises `UserError`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gleanrl.rewards.request import Request
from gleanrl.types import IntArray
from gleanrl.utils.errors import UserError

THINK_THEN_ANSWER = r"\s*(<think>)?((?!</?think>).)*</think>\s*<answer>((?!</?answer>).)*</answer>\s*"
"""A thought, then an answer, each in its tags. A thought that the chat template has opened begins with its tag too."""


class _Checked:
    calls_service = False

    @classmethod
    def check(cls, **options: Any) -> None:
        """Check the options of the reward."""
        cls(**options)


@dataclass(frozen=True)
class Format(_Checked):
    """1 if the model's last message as a whole matches a regular expression, else 0.

    DeepSeek-R1 (arXiv 2501.12948) was trained with such a reward for its tags, which are the default.

    Raises:
        UserError: ``pattern`` is not a regular expression.
    """

    pattern: str = THINK_THEN_ANSWER
    """Regular expression of Python's `re`. A dot matches line feeds too."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise UserError(f"pattern = {self.pattern!r} is not a regular expression: {error}") from None

    def compute_score(self, request: Request) -> float:
        """Return 1.0 or 0.0."""
        return float(re.fullmatch(self.pattern, request.response, re.DOTALL) is not None)


@dataclass(frozen=True)
class Length(_Checked):
    """Minus the number of tokens by which the model's text is longer or shorter than a target.

    LCPO-Exact (L1, arXiv 2503.04697) adds it to the reward for the right answer with a weight of 0.0003.

    Raises:
        UserError: ``target`` is not a whole number of at least 0.
    """

    target: int
    """Number of tokens, over all turns of the model. 0 = the shorter, the better."""

    def __post_init__(self) -> None:
        _require("target", self.target, 0)

    def compute_score(self, request: Request) -> float:
        """Return the score, in tokens."""
        return -float(abs(self.target - sum(turn.size for turn in _turns(request, "length"))))


@dataclass(frozen=True)
class Overlong(_Checked):
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), from -1 to 0.

    It is 0 up to ``limit - cache`` tokens, falls linearly to -1 at ``limit`` tokens, and stays there.

    Raises:
        UserError: an option is not a whole number of at least 1, or ``cache`` is above ``limit``.
    """

    limit: int
    """Length from which the punishment is complete, in tokens over all turns of the model."""
    cache: int
    """Number of tokens below ``limit`` at which the punishment begins."""

    def __post_init__(self) -> None:
        _require("limit", self.limit, 1)
        _require("cache", self.cache, 1)
        if self.cache > self.limit:
            raise UserError(f"cache = {self.cache}: at most limit = {self.limit}")

    def compute_score(self, request: Request) -> float:
        """Return the punishment."""
        length = sum(turn.size for turn in _turns(request, "overlong"))
        return max(-1.0, min(0.0, (self.limit - self.cache - length) / self.cache))


@dataclass(frozen=True)
class Repetition(_Checked):
    """Minus the share of n-grams of tokens that repeat an earlier one of the same turn, from -1 to 0.

    Appendix C.2 of "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373) describes it. N-grams are compared
    inside a turn only, so that an agent may send the same command again.

    Raises:
        UserError: ``n`` is not a whole number of at least 1.
    """

    n: int = 3
    """Number of tokens in an n-gram."""

    def __post_init__(self) -> None:
        _require("n", self.n, 1)

    def compute_score(self, request: Request) -> float:
        """Return the score; 0 if no turn has ``n`` tokens."""
        total = distinct = 0
        for turn in _turns(request, "repetition"):
            ids = turn.tolist()
            ngrams = list(zip(*(ids[start:] for start in range(self.n)), strict=False))
            total += len(ngrams)
            distinct += len(set(ngrams))
        return distinct / total - 1.0 if total else 0.0


def _require(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} = {value!r}: a whole number of at least {least}")


def _turns(request: Request, name: str) -> tuple[IntArray, ...]:
    """Return the token ids of the sampled turns. Raises `UserError`, which names the reward, if they are not known."""
    if request.sampled is None:
        raise UserError(f"reward {name} counts sampled tokens, so it scores trajectories and not texts")
    return request.sampled
