"""Several rewards as one: their weighted sum, with every part logged by name."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards import forms
from gleanrl.rewards.errors import NotApplicable
from gleanrl.rewards.http import version_of
from gleanrl.rewards.parts import Part, of_part, read, total_weight
from gleanrl.rewards.request import Request
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import Fatal, Retryable, cause_of, is_retryable

if TYPE_CHECKING:
    from gleanrl.rewards.journal import Journal

Policy = Literal["fail", "renormalise"]
ATTEMPTS = 3  # of a part that may be left out, before it is
REMEMBERED = 4096  # requests whose finished parts are kept until the others have come


class Weighted:
    """A scorer: the sum of parts times their weights.

    Parts are asked at once. `Score.parts` holds each one's value, as it came, by its name; what a part logs itself is
    there under ``name/...``, and token costs are summed.

    A part that was scored is not asked again when another one makes the agent try again, nor by a resumed run. The
    settings' workers, isolation and time for a call are each part's own.

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

    keeps_time = reads_env = True

    def __init__(self, parts: Mapping[str, Any], *, on_failure: Policy = "fail") -> None:
        self._all = total_weight(parts, on_failure)
        self._parts = [Part.of(name, given) for name, given in parts.items()]
        self._renormalise = on_failure == "renormalise"
        self._begun: OrderedDict[str, _Begun] = OrderedDict()  # requests that wait to be tried again
        self._journal: Journal | None = None
        self._down_after_s = RewardSettings().down_after_s
        self.version = version_of(
            [on_failure, [[p.name, p.weight, p.clip, getattr(p.scorer, "version", "")] for p in self._parts]]
        )
        if any(getattr(part.scorer, "finishes", False) for part in self._parts):
            self.finish = self._finish

    @classmethod
    def check(cls, parts: Mapping[str, Any], *, on_failure: Policy = "fail") -> None:
        """Raises `UserError` where the options make no sum, as far as it shows without making its parts."""
        total_weight(parts, on_failure)
        for name, given in parts.items():
            with of_part(name):
                reward, options, _, _ = read(name, given)
                forms.check(reward, options=options)

    def set_limits(self, settings: RewardSettings) -> None:
        """Each part gets these limits for itself."""
        self._down_after_s = settings.down_after_s
        for part in self._parts:
            part.set_limits(settings)

    def use_journal(self, journal: Journal | None) -> None:
        """Keep finished parts there until the others have come, also over a crash."""
        self._journal = journal
        for part in self._parts:
            part.scorer.use_journal(journal)

    async def __call__(self, request: Request) -> Score:
        """Raises what the first part raises that it cannot do without."""
        key = _key(request)
        name = f"{request.trajectory_id} {key}"
        begun = self._begun.pop(name, None) or _Begun(key)
        try:
            await self._ask(request, begun)
            return self._sum(begun.scores, begun.owed)
        except BaseException as error:  # also where the agent ran out of patience: what is paid for is kept
            if isinstance(error, Fatal):
                begun.start_over()
            if isinstance(error, Retryable | Fatal):
                error.cost, begun.owed = begun.owed, {}
            if key is not None:
                self._begun[name] = begun
            if len(self._begun) > REMEMBERED:
                self._begun.popitem(last=False)
            raise

    async def aclose(self) -> None:
        await asyncio.gather(*(part.scorer.aclose() for part in self._parts))

    async def _ask(self, request: Request, begun: _Begun) -> None:
        """Fill in the parts that are missing. Trouble that may pass is raised once all others have come."""
        passing: list[Retryable] = []

        async def one(part: Part) -> None:
            try:
                await self._score(part, request, begun)
            except UserError:
                raise
            except Exception as error:
                begun.owe(getattr(error, "cost", {}))
                if self._may_miss(part) and not (is_retryable(error) and self._may_yet_come(part, error, begun)):
                    begun.scores[part.name] = Score.failed(str(error) or type(error).__name__)
                elif is_retryable(error):
                    after_s = getattr(error, "after_s", None)
                    passing.append(Retryable(_reason(part, error), after_s, cause=cause_of(error)))
                elif isinstance(error, NotApplicable):
                    raise NotApplicable(_reason(part, error)) from error
                else:
                    raise Fatal(_reason(part, error), cause=cause_of(error)) from error

        await _all_of([one(part) for part in self._parts if part.name not in begun.scores])
        if passing:
            raise max(passing, key=lambda error: error.after_s or 0.0)

    async def _score(self, part: Part, request: Request, begun: _Begun) -> None:
        """Note the part's score, from the journal where that has it."""
        key = None
        if self._journal is not None and begun.key is not None and not part.free:
            key = hashlib.blake2b(f"{begun.key} {part.scorer.version}".encode(), digest_size=16).hexdigest()
            if (found := self._journal.get(key)) is not None:
                begun.scores[part.name] = found
                return
        score = begun.scores[part.name] = await part.ask(request)
        begun.owe(score.parts)
        if self._journal is not None and key is not None and len(begun.scores) < len(self._parts):
            await self._journal.put(key, score)

    def _may_yet_come(self, part: Part, error: Exception, begun: _Begun) -> bool:
        """Whether a part that failed is tried again before it is left out."""
        away_s = part.away_s()
        if part.weight and away_s is not None:  # such tries do not count, and the agent's own patience ends later
            return away_s < self._down_after_s / 2
        if (getattr(error, "after_s", None) or 0.0) > self._down_after_s:
            return False
        begun.failed[part.name] += 1
        return begun.failed[part.name] < ATTEMPTS

    def _may_miss(self, part: Part) -> bool:
        return self._renormalise or not part.weight

    def _sum(self, scores: Mapping[str, Score], cost: Mapping[str, float]) -> Score:
        """``cost``: what was used and not yet told of."""
        there = [part for part in self._parts if scores[part.name].valid]
        weight = sum(abs(part.weight) for part in there)
        if not weight:
            reasons = "; ".join(_reason(part, scores[part.name].explanation) for part in self._parts if part.weight)
            raise Fatal(f"no part could be scored: {reasons}", cause="parts")
        total = sum(part.worth(scores[part.name].value) for part in there) * (self._all / weight)
        if not math.isfinite(total):
            raise Fatal(f"the sum of the parts is {total}", cause="not_a_number")
        logged = dict(cost)
        for part in there:
            score = scores[part.name]
            logged[part.name] = score.value
            logged |= {f"{part.name}/{name}": value for name, value in score.parts.items() if not _is_cost(name)}
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
                seen = await part.finish(task, [by_name[part.name] for by_name in split])
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
            summed = self._sum(by_name, {})
        except Fatal as error:
            return Score.failed(str(error))
        return Score(summed.value, parts={**score.parts, **summed.parts}, explanation=score.explanation)


class _Begun:
    """What is known of a request that is not finished."""

    __slots__ = ("failed", "key", "owed", "scores")

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.scores: dict[str, Score] = {}  # of parts; invalid where one is left out
        self.failed: Counter[str] = Counter()
        self.owed: dict[str, float] = {}  # cost that nobody was told of yet

    def owe(self, parts: Mapping[str, float]) -> None:
        for name, value in parts.items():
            if _is_cost(name):
                self.owed[name] = self.owed.get(name, 0.0) + value

    def start_over(self) -> None:
        """The request is given up; should it come again, only what was paid for counts."""
        self.failed.clear()
        self.scores = {name: score for name, score in self.scores.items() if score.valid}


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


def _reason(part: Part, error: object) -> str:
    said = str(error) or type(error).__name__
    return f"{part.name}: {said}"


def _is_cost(name: str) -> bool:
    return name.startswith("cost/")


def _key(request: Request) -> str | None:
    """Of the request whatever is asked of it; None where its payload is not JSON."""
    try:
        return request.key("parts")
    except TypeError:
        return None
