"""One reward of a sum: read from a configuration, and asked within limits of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards import forms
from gleanrl.rewards.clock import Within
from gleanrl.rewards.environment import own_score
from gleanrl.rewards.limits import Gate, this_claim
from gleanrl.rewards.named import BUILT_IN
from gleanrl.rewards.placed import OnLoop
from gleanrl.rewards.request import Request
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import NOT_DELIVERED, Fatal, cause_of
from gleanrl.utils.text import nearest


@dataclass(eq=False)
class Part:
    """One reward of a sum.

    ``weight`` may be negative (a penalty); with 0 the part is only logged, and its failure costs nothing. ``clip``
    bounds its value before it is weighted. ``free``: it may be asked as often as one likes. ``fixed``: where it runs
    was said when it was loaded.
    """

    name: str
    scorer: Any
    weight: float
    clip: tuple[float, float] | None = None
    free: bool = False
    fixed: bool = False

    def __post_init__(self) -> None:
        self._timeout_s: float | None = None
        self._gate = _gate(self.scorer.slots, RewardSettings().eval_share)
        self._answered = False
        self._away_since: float | None = None  # loop time since which nobody hears it

    @classmethod
    def of(cls, name: str, given: Any) -> Self:
        """From a configuration's table, ``{"reward", "weight", "options", "clip"}``, or from the reward alone."""
        with of_part(name):
            reward, options, weight, bounds = read(name, given)
            scorer = forms.load(reward, options=options)
        free = reward is own_score or (isinstance(reward, str) and reward in ("environment", BUILT_IN["environment"]))
        return cls(name, scorer, weight, bounds, free, fixed=isinstance(reward, OnLoop))

    def set_limits(self, settings: RewardSettings) -> None:
        """Run where the settings say, with so much time for a call."""
        if not self.fixed:
            self.scorer = forms.limited(self.scorer, settings)
        self._timeout_s = None if self.scorer.keeps_time else settings.timeout_s
        self._gate = _gate(self.scorer.slots, settings.eval_share)

    async def ask(self, request: Request) -> Score:
        """A valid score; raises what there is instead. Its clock starts once there is room for it."""
        try:
            lane = await self._gate.enter(this_claim()) if self._gate is not None else None
            try:
                async with Within(self._timeout_s):
                    score = await self.scorer(request)
            finally:
                if self._gate is not None and lane is not None:
                    self._gate.leave(lane)
        except Exception as error:
            if cause_of(error) not in NOT_DELIVERED:
                self._away_since = None
            elif self._away_since is None:
                self._away_since = asyncio.get_running_loop().time()
            raise
        self._answered, self._away_since = True, None
        if not score.valid:
            raise Fatal(score.explanation or "no reason given", cause="invalid", cost=score.parts)
        return score

    def away_s(self) -> float | None:
        """Seconds since which nobody hears it; None where somebody does or nobody ever did."""
        if not self._answered or self._away_since is None:
            return None
        return asyncio.get_running_loop().time() - self._away_since

    async def finish(self, task: Task, scores: Sequence[Score]) -> list[Score]:
        async with Within(self._timeout_s):
            return await self.scorer.finish(task, scores)

    def worth(self, value: float) -> float:
        """What the value adds to the sum."""
        return self.weight * (value if self.clip is None else min(max(value, self.clip[0]), self.clip[1]))


def _gate(slots: int | None, eval_share: float) -> Gate | None:
    """Room for as many calls as a part can take, with a share for each lane."""
    if slots is None:
        return None
    return Gate({"train": (slots, 1.0 - eval_share), "eval": (slots, eval_share)}, slots=slots)


# --- as a configuration has it ----------------------------------------------------------------------
def total_weight(parts: Mapping[str, Any], on_failure: str) -> float:
    """Sum of all absolute weights. Raises `UserError` where that is no sum, or of nothing."""
    if on_failure not in ("fail", "renormalise"):
        raise UserError(f"on_failure = {on_failure!r}: fail or renormalise")
    if not isinstance(parts, Mapping):
        raise UserError("parts: a table of rewards by name")
    total = 0.0
    for name, given in parts.items():
        if not name or "/" in name or name in ("cost", "left_out"):
            raise UserError(f"parts: {name!r} cannot be a part's name")
        with of_part(name):
            total += abs(read(name, given)[2])
    if not total:
        raise UserError("parts: at least one needs a weight other than 0")
    return total


def read(name: str, given: Any) -> tuple[Any, Mapping[str, Any], float, tuple[float, float] | None]:
    """Reward, options, weight and bounds of a part as it is given."""
    table = dict(given) if isinstance(given, Mapping) else {"reward": given}
    known = ("reward", "weight", "options", "clip")
    for key in table:
        if key not in known:
            raise UserError(f"no setting {key!r}{nearest(str(key), known)}")
    reward = table.get("reward", name if name == "environment" else None)
    weight, clip = table.get("weight", 1.0), table.get("clip")
    if reward is None:
        raise UserError("name its reward")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise UserError(f"weight = {weight!r}: give a number")
    return reward, table.get("options") or {}, float(weight), None if clip is None else _bounds(clip)


@contextmanager
def of_part(name: str) -> Iterator[None]:
    """A `UserError` inside says of which part it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"parts.{name}: {error}") from None


def _bounds(clip: Any) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in clip)
    except (TypeError, ValueError):
        raise UserError(f"clip = {clip!r}: give the lowest and the highest value, e.g. [0, 1]") from None
    if not low <= high:
        raise UserError(f"clip = {list(clip)!r}: the lowest value comes first")
    return low, high
