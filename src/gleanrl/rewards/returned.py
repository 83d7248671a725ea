"""Converts the return value of a reward: a finite number is a score, anything else a failure with a reason, never 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from typing import Any

from gleanrl.types import Score
from gleanrl.utils.retry import Fatal

MAX_EXPLANATION = 4000  # characters kept of a reward's explanation


def as_score(returned: Any) -> Score:
    """Convert a `Score`, a number, or a mapping with ``score`` to a `Score`.

    Other numbers of the mapping become parts, and ``explanation`` the explanation. Raises `Fatal` with cause
    ``not_a_number`` for everything else.
    """
    if isinstance(returned, Score):
        if type(returned.value) is float and not returned.parts and returned.explanation is None:
            return returned
        value = number(returned.value) if returned.valid else math.nan
        parts, explanation = _numbers(returned.parts), shorten(returned.explanation)
        return Score(value, bool(returned.valid), parts, explanation, bool(returned.applicable))
    if not isinstance(returned, Mapping):
        return Score(number(returned))
    if "score" not in returned:
        raise Fatal(f"{shown(dict(returned))} has no 'score'", cause="not_a_number")
    rest = {key: value for key, value in returned.items() if key != "score"}
    explanation = rest.pop("explanation", None)
    return Score(number(returned["score"]), parts=_numbers(rest), explanation=shorten(explanation))


def number(value: Any) -> float:
    """Convert a bool, an int, a float, or the only element of an array or tensor to a finite float."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):
            raise Fatal(f"the reward is {shown(value)}, not one number", cause="not_a_number") from None
    if (read := finite(value)) is None:
        raise Fatal(f"the reward is {shown(value)}, not a finite number", cause="not_a_number")
    return read


def finite(value: Any) -> float | None:
    """Return a number as a float, or None if it is not a finite number."""
    try:
        return float(value) if isinstance(value, Real) and math.isfinite(value) else None
    except OverflowError:  # an int may exceed a float's range
        return None


def _numbers(parts: Mapping[Any, Any]) -> dict[str, float]:
    """Return the finite numbers that a reward returns with its score."""
    read = {}
    for name, value in parts.items():
        with suppress(Fatal):
            read[str(name)] = number(value)
    return read


def merge_post_processed(scores: Sequence[Score], returned: Any) -> list[Score]:
    """Return a group's scores after post-processing. Invalid scores stay invalid, and non-numbers become invalid.

    Raises `Fatal` if the number of returned values differs from the number of scores.
    """
    if not isinstance(returned, Sequence | tuple) and not hasattr(returned, "tolist"):
        raise Fatal(f"post-processing returned {shown(returned)}, not a list", cause="finish")
    returned = list(returned)
    if len(returned) != len(scores):
        raise Fatal(f"post-processing returned {len(returned)} scores for {len(scores)}", cause="finish")
    return [_after(score, value) if score.valid else score for score, value in zip(scores, returned, strict=True)]


def _after(score: Score, value: Any) -> Score:
    try:
        return as_score(value) if isinstance(value, Score) else replace(score, value=number(value))
    except Fatal as error:
        return Score.failed(f"after post-processing, {error}")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def shorten(text: Any) -> str | None:
    if text is None:
        return None
    text = str(text)
    return text if len(text) <= MAX_EXPLANATION else f"{text[: MAX_EXPLANATION - 3]}..."
