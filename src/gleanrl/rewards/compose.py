"""Several rewards as one: their weighted sum, with every part logged by name."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from gleanrl.errors import UserError
from gleanrl.importing import nearest
from gleanrl.rewards import forms
from gleanrl.rewards.errors import Fatal, NotApplicable, Retryable
from gleanrl.rewards.http import version_of
from gleanrl.rewards.request import Request
from gleanrl.types import Score, Task

Policy = Literal["fail", "renormalise"]
ATTEMPTS = 3  # of a part that may be left out, before it is
REMEMBERED = 4096  # requests whose finished parts are kept until the others have come


@dataclass(frozen=True)
class Part:
    """One reward of a sum.

    ``weight`` may be negative (a penalty); with 0 the part is only logged, and its failure costs nothing. ``clip``
    bounds its value before it is weighted.
    """

    name: str
    scorer: Any
    weight: float
    clip: tuple[float, float] | None = None
    slots: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)  # calls at once, where it has a limit

    @classmethod
    def of(cls, name: str, given: Any) -> Self:
        """From a configuration's table, ``{"reward", "weight", "options", "clip"}``, or from the reward alone."""
        with _of_part(name):
            reward, options, weight, bounds = _read(name, given)
            scorer = forms.load(reward, options=options)
        slots = getattr(scorer, "slots", None)  # of threads or processes
        return cls(name, scorer, weight, bounds, asyncio.Semaphore(slots) if slots else nullcontext())

    def worth(self, value: float) -> float:
        """What the value adds to the sum."""
        return self.weight * (value if self.clip is None else min(max(value, self.clip[0]), self.clip[1]))


class Weighted:
    """A scorer: the sum of parts times their weights.

    Parts are asked at once. `Score.parts` holds each one's value, as it came, by its name; what a part logs itself is
    there under ``name/...``, and token costs are summed.

    A part that was scored is not asked again when another one makes the agent try again.

    Args:
        parts: by name. Each is a table ``{reward = "module:name", weight = 0.5, options = {...}, clip = [0, 1]}``,
            where only ``reward`` is needed, or a reward itself: whatever `gleanrl.rewards.forms.load` takes. A part
            named ``environment`` is the environment's own score.
        on_failure: ``fail``: without one part there is no score. ``renormalise``: a part that fails (`ATTEMPTS` times
            where the trouble may pass) is left out, and the sum of the rest is scaled by all absolute weights over
            those that are left; ``left_out`` in the parts counts what is missing. Without any part there is no score.

    Raises:
        UserError: a part cannot be had, or a value has no meaning.
    """

    def __init__(self, parts: Mapping[str, Any], *, on_failure: Policy = "fail") -> None:
        self._all = _total_weight(parts, on_failure)
        self._parts = [Part.of(name, given) for name, given in parts.items()]
        self._renormalise = on_failure == "renormalise"
        self._begun: OrderedDict[str, _Begun] = OrderedDict()  # requests that wait to be tried again
        self.version = version_of(
            [on_failure, [[p.name, p.weight, p.clip, getattr(p.scorer, "version", "")] for p in self._parts]]
        )
        if any(getattr(part.scorer, "finishes", False) for part in self._parts):
            self.finish = self._finish

    @classmethod
    def check(cls, parts: Mapping[str, Any], *, on_failure: Policy = "fail") -> None:
        """Raises `UserError` where the options make no sum, as far as it shows without making its parts."""
        _total_weight(parts, on_failure)
        for name, given in parts.items():
            with _of_part(name):
                reward, options, _, _ = _read(name, given)
                forms.check(reward, options=options)

    async def __call__(self, request: Request) -> Score:
        """Raises what the first part raises that it cannot do without."""
        name = f"{request.trajectory_id} {request.key(self.version)}"
        begun = self._begun.pop(name, None) or _Begun()
        try:
            await self._ask(request, begun)
        except Fatal:
            raise
        except BaseException:  # also where the agent ran out of patience: what is paid for is kept
            self._begun[name] = begun
            if len(self._begun) > REMEMBERED:
                self._begun.popitem(last=False)
            raise
        return self._sum(begun.scores)

    async def aclose(self) -> None:
        await asyncio.gather(*(part.scorer.aclose() for part in self._parts))

    async def _ask(self, request: Request, begun: _Begun) -> None:
        """Fill in the parts that are missing. Trouble that may pass is raised once all others have come."""
        missing = [part for part in self._parts if part.name not in begun.scores]
        passing: list[Retryable] = []

        async def one(part: Part) -> None:
            try:
                async with part.slots:
                    score = await part.scorer(request)
                if not score.valid:
                    raise Fatal(score.explanation or "no reason given", cause="invalid")
            except UserError:
                raise
            except NotApplicable as error:
                if not self._may_miss(part):
                    raise NotApplicable(_reason(part, error)) from error
                begun.scores[part.name] = Score.failed(str(error))
            except (Retryable, TimeoutError, ConnectionError) as error:
                begun.failed[part.name] = begun.failed.get(part.name, 0) + 1
                if self._may_miss(part) and begun.failed[part.name] >= ATTEMPTS:
                    begun.scores[part.name] = Score.failed(str(error) or type(error).__name__)
                    return
                after_s, cause = getattr(error, "after_s", None), getattr(error, "cause", "timeout")
                passing.append(Retryable(_reason(part, error), after_s, cause=cause))
            except Exception as error:
                if not self._may_miss(part):
                    raise Fatal(_reason(part, error), cause=getattr(error, "cause", "fatal")) from error
                begun.scores[part.name] = Score.failed(str(error) or type(error).__name__)
            else:
                begun.scores[part.name] = score

        await _all_of([one(part) for part in missing])
        if passing:
            raise max(passing, key=lambda error: error.after_s or 0.0)

    def _may_miss(self, part: Part) -> bool:
        return self._renormalise or not part.weight

    def _sum(self, scores: Mapping[str, Score]) -> Score:
        there = [part for part in self._parts if scores[part.name].valid]
        weight = sum(abs(part.weight) for part in there)
        if not weight:
            reasons = "; ".join(_reason(part, scores[part.name].explanation) for part in self._parts if part.weight)
            raise Fatal(f"no part could be scored: {reasons}", cause="parts")
        total = sum(part.worth(scores[part.name].value) for part in there) * (self._all / weight)
        if not math.isfinite(total):
            raise Fatal(f"the sum of the parts is {total}", cause="not_a_number")
        logged: dict[str, float] = {}
        for part in there:
            score = scores[part.name]
            logged[part.name] = score.value
            for name, value in score.parts.items():
                if name.startswith("cost/"):
                    logged[name] = logged.get(name, 0.0) + value
                else:
                    logged[f"{part.name}/{name}"] = value
        if len(there) < len(self._parts):
            logged["left_out"] = float(len(self._parts) - len(there))
        said = [f"{p.name}: {e}" for p in self._parts if (e := scores[p.name].explanation) is not None]
        return Score(total, parts=logged, explanation="\n".join(said) or None)

    async def _finish(self, task: Task, scores: Sequence[Score]) -> list[Score]:
        """Let the parts that see whole groups see them, and sum up again."""
        split = [
            {p.name: Score(s.parts[p.name]) if p.name in s.parts else Score.failed("left out") for p in self._parts}
            for s in scores
        ]
        for part in self._parts:
            if getattr(part.scorer, "finishes", False):
                seen = await part.scorer.finish(task, [by_name[part.name] for by_name in split])
                for by_name, score in zip(split, seen, strict=True):
                    by_name[part.name] = score
        return [self._again(score, by_name) for score, by_name in zip(scores, split, strict=True)]

    def _again(self, score: Score, by_name: Mapping[str, Score]) -> Score:
        if not score.valid:
            return score
        failed = [p for p in self._parts if p.name in score.parts and not by_name[p.name].valid]
        for part in failed:
            if not self._may_miss(part):
                return Score.failed(_reason(part, by_name[part.name].explanation))
        try:
            summed = self._sum(by_name)
        except Fatal as error:
            return Score.failed(str(error))
        return Score(summed.value, parts={**score.parts, **summed.parts}, explanation=score.explanation)


class _Begun:
    """What is known of a request that is not finished."""

    __slots__ = ("failed", "scores")

    def __init__(self) -> None:
        self.scores: dict[str, Score] = {}
        self.failed: dict[str, int] = {}


async def _all_of(work: Sequence[Awaitable[None]]) -> None:
    """All at once; the first error ends the others and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(_run(one))
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from None


async def _run(work: Awaitable[None]) -> None:
    await work


def _total_weight(parts: Mapping[str, Any], on_failure: str) -> float:
    """Sum of all absolute weights. Raises `UserError` where that is no sum, or of nothing."""
    if on_failure not in ("fail", "renormalise"):
        raise UserError(f"on_failure = {on_failure!r}: fail or renormalise")
    if not isinstance(parts, Mapping):
        raise UserError("parts: a table of rewards by name")
    total = 0.0
    for name, given in parts.items():
        if not name or "/" in name or name in ("cost", "left_out"):
            raise UserError(f"parts: {name!r} cannot be a part's name")
        with _of_part(name):
            total += abs(_read(name, given)[2])
    if not total:
        raise UserError("parts: at least one needs a weight other than 0")
    return total


def _read(name: str, given: Any) -> tuple[Any, Mapping[str, Any], float, tuple[float, float] | None]:
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
def _of_part(name: str) -> Iterator[None]:
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


def _reason(part: Part, error: object) -> str:
    said = str(error) or type(error).__name__
    return f"{part.name}: {said}"
