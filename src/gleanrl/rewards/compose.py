"""Combines several rewards into their weighted sum, and logs the value of every part by name."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards.adapter import BUILT_IN, check_reward, load_reward, named_errors
from gleanrl.rewards.environment import own_score
from gleanrl.rewards.http import version_of
from gleanrl.rewards.journal import Journal
from gleanrl.rewards.limits import RateLimiter, current_permit, time_limit
from gleanrl.rewards.request import NotApplicable, Request, Scorer
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import NOT_DELIVERED, Fatal, Retryable, cause_of, is_retryable, wait_asked_for
from gleanrl.utils.text import nearest

FailurePolicy = Literal["fail", "renormalise"]

ATTEMPTS = 3
"""Attempts of an optional part before it is left out."""
MAX_UNFINISHED = 4096
"""Requests whose finished parts are kept in memory until the other parts finish."""


class Weighted(Scorer):
    """The weighted sum of several rewards, its parts.

    Parts are scored concurrently. `Score.parts` holds the value of each part under its name, and the part's own logged
    values under ``name/...``; token costs are summed. A part that has its score is not scored again when another part
    makes the agent retry, nor by a resumed run. The settings' workers, isolation and timeout apply to each part.

    Args:
        parts: by name. Each is a table ``{reward = "module:name", weight = 0.5, options = {...}, clip = [0, 1]}``,
            where only ``reward`` is required, or a reward as `gleanrl.rewards.adapter.load_reward` takes it. The
            part named ``environment`` is the environment's own score.
        on_failure: ``fail``: if one part fails, there is no score. ``renormalise``: a part that fails (`ATTEMPTS` times
            if the error is transient) is left out, and the sum of the rest is multiplied by the total of all absolute
            weights over the total of the remaining ones; ``left_out`` in the parts counts the missing parts. If all
            parts fail, there is no score.

    Raises:
        UserError: a part cannot be loaded, or a value is invalid.
    """

    own_timeout = True

    def __init__(self, parts: Mapping[str, Any], *, on_failure: FailurePolicy = "fail") -> None:
        tables = _read_parts(parts, on_failure)
        self._parts: list[Part] = []
        for name, table in tables.items():
            with named_errors(f"parts.{name}"):
                self._parts.append(Part(name, **table))
        self._total_weight = sum(abs(part.weight) for part in self._parts)
        self._renormalise = on_failure == "renormalise"
        self._unfinished: OrderedDict[str, _Unfinished] = OrderedDict()  # requests that wait for their next attempt
        self._journal: Journal | None = None
        self._outage_s = RewardSettings().down_after_s
        self.version = version_of([on_failure, [[p.name, p.weight, p.clip, p.scorer.version] for p in self._parts]])
        self.post_processes = any(part.scorer.post_processes for part in self._parts)

    @classmethod
    def check(cls, parts: Mapping[str, Any], *, on_failure: FailurePolicy = "fail") -> None:
        for name, table in _read_parts(parts, on_failure).items():
            with named_errors(f"parts.{name}"):
                check_reward(table["reward"], options=table["options"])

    def configure(self, settings: RewardSettings) -> None:
        self._outage_s = settings.down_after_s
        for part in self._parts:
            part.configure(settings)

    def use_journal(self, journal: Journal | None) -> None:
        self._journal = journal
        for part in self._parts:
            part.scorer.use_journal(journal)

    async def aclose(self) -> None:
        await asyncio.gather(*(part.scorer.aclose() for part in self._parts))

    async def __call__(self, request: Request) -> Score:
        try:
            key = request.key("parts")
        except TypeError:  # the payload is not JSON
            key = None
        name = f"{request.trajectory_id} {key}"
        unfinished = self._unfinished.pop(name, None) or _Unfinished()
        try:
            await self._score_missing_parts(request, key, unfinished)
            return self._sum(unfinished.scores, unfinished.unreported_cost)
        except BaseException as error:  # includes cancellation by a timeout; finished parts are kept
            if isinstance(error, Fatal):  # the request has failed; if it comes again, failures count from zero
                unfinished.failures.clear()
                unfinished.scores = {name: score for name, score in unfinished.scores.items() if score.valid}
            if isinstance(error, Retryable | Fatal):
                error.cost, unfinished.unreported_cost = unfinished.unreported_cost, {}
            if key is not None:
                self._unfinished[name] = unfinished
            if len(self._unfinished) > MAX_UNFINISHED:
                self._unfinished.popitem(last=False)
            raise

    async def _score_missing_parts(self, request: Request, key: str | None, unfinished: _Unfinished) -> None:
        """Score the parts that have no score yet, concurrently.

        The first required part that fails for good cancels the others. Retryable errors are raised once all other parts
        have ended.
        """
        retryable: list[Retryable] = []

        async def score_one(part: Part) -> None:
            try:
                await self._score_part(part, request, key, unfinished)
            except UserError:
                raise
            except Exception as error:
                if isinstance(error, Retryable | Fatal):
                    unfinished.add_cost(error.cost)
                optional = self._is_optional(part)
                if optional and not (is_retryable(error) and self._retry_optional(part, error, unfinished)):
                    unfinished.scores[part.name] = Score.failed(str(error) or type(error).__name__)
                elif is_retryable(error):
                    after_s = wait_asked_for(error) or None
                    retryable.append(Retryable(_reason(part, error), after_s, cause=cause_of(error)))
                elif isinstance(error, NotApplicable):
                    raise NotApplicable(_reason(part, error)) from error
                else:
                    raise Fatal(_reason(part, error), cause=cause_of(error)) from error

        try:
            async with asyncio.TaskGroup() as group:
                for part in self._parts:
                    if part.name not in unfinished.scores:
                        group.create_task(score_one(part))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if retryable:
            raise max(retryable, key=wait_asked_for)

    async def _score_part(self, part: Part, request: Request, key: str | None, unfinished: _Unfinished) -> None:
        journal_key = None
        if self._journal is not None and key is not None and not part.is_environment:
            journal_key = hashlib.blake2b(f"{key} {part.scorer.version}".encode(), digest_size=16).hexdigest()
            if (found := self._journal.get(journal_key)) is not None:
                unfinished.scores[part.name] = found
                return
        score = unfinished.scores[part.name] = await part.score(request)
        unfinished.add_cost(score.parts)
        if self._journal is not None and journal_key is not None and len(unfinished.scores) < len(self._parts):
            await self._journal.put(journal_key, score)

    def _is_optional(self, part: Part) -> bool:
        return self._renormalise or not part.weight

    def _retry_optional(self, part: Part, error: Exception, unfinished: _Unfinished) -> bool:
        """Return whether an optional part gets another attempt after a retryable error."""
        unreachable_s = part.unreachable_s()
        if part.weight and unreachable_s is not None:  # the agent does not count these attempts and waits for longer
            return unreachable_s < self._outage_s / 2
        if wait_asked_for(error) > self._outage_s:
            return False
        unfinished.failures[part.name] += 1
        return unfinished.failures[part.name] < ATTEMPTS

    def _sum(self, scores: Mapping[str, Score], cost: Mapping[str, float]) -> Score:
        """Return the weighted sum of the valid scores; ``cost`` holds used tokens that are not reported yet."""
        valid = [part for part in self._parts if scores[part.name].valid]
        weight = sum(abs(part.weight) for part in valid)
        if not weight:
            reasons = "; ".join(_reason(part, scores[part.name].explanation) for part in self._parts if part.weight)
            raise Fatal(f"no part could be scored: {reasons}", cause="parts")
        total = sum(part.weighted(scores[part.name].value) for part in valid) * (self._total_weight / weight)
        if not math.isfinite(total):
            raise Fatal(f"the sum of the parts is {total}", cause="not_a_number")
        logged = dict(cost)
        for part in valid:
            score = scores[part.name]
            logged[part.name] = score.value
            for name, value in score.parts.items():
                if not name.startswith("cost/"):
                    logged[f"{part.name}/{name}"] = value
        if len(valid) < len(self._parts):
            logged["left_out"] = float(len(self._parts) - len(valid))
        explained = {part.name: scores[part.name].explanation for part in self._parts}
        lines = [f"{name}: {text}" for name, text in explained.items() if text is not None]
        return Score(total, parts=logged, explanation="\n".join(lines) or None)

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """Let the parts that process whole groups post-process their scores, and sum again."""
        members: list[dict[str, Score]] = []
        for score in scores:
            by_name = {}
            for part in self._parts:
                there = part.name in score.parts
                by_name[part.name] = Score(score.parts[part.name]) if there else Score.failed("left out")
            members.append(by_name)
        for part in self._parts:
            if part.scorer.post_processes:
                finished = await part.finish(task, [by_name[part.name] for by_name in members])
                for by_name, score in zip(members, finished, strict=True):
                    by_name[part.name] = score
        return [self._sum_again(score, by_name) for score, by_name in zip(scores, members, strict=True)]

    def _sum_again(self, score: Score, by_name: Mapping[str, Score]) -> Score:
        if not score.valid:
            return score
        for part in self._parts:
            if part.name in score.parts and not by_name[part.name].valid and not self._is_optional(part):
                return Score.failed(_reason(part, by_name[part.name].explanation))
        try:
            summed = self._sum(by_name, {})
        except Fatal as error:
            return Score.failed(str(error))
        return replace(score, value=summed.value, parts={**score.parts, **summed.parts})


class Part:
    """One reward of a sum, called within limits of its own.

    ``weight`` may be negative (a penalty). With weight 0 the part is only logged, and its failure has no effect.
    ``clip`` bounds its value before it is weighted.
    """

    def __init__(
        self, name: str, reward: Any, options: Mapping[str, Any], weight: float, clip: tuple[float, float] | None
    ) -> None:
        self.name, self.weight, self.clip = name, weight, clip
        self.scorer = load_reward(reward, options=options)
        self.is_environment = reward is own_score or reward in ("environment", BUILT_IN["environment"])
        self._answered = False
        self._unreachable_since: float | None = None  # loop time
        self._set_limits(None, RewardSettings().eval_share)

    def configure(self, settings: RewardSettings) -> None:
        self.scorer.configure(settings)
        self._set_limits(None if self.scorer.own_timeout else settings.timeout_s, settings.eval_share)

    def _set_limits(self, timeout_s: float | None, eval_share: float) -> None:
        self._timeout_s, slots = timeout_s, self.scorer.slots
        self._limiter: RateLimiter | None = None
        if slots is not None:
            lanes = {"train": (slots, 1.0 - eval_share), "eval": (slots, eval_share)}
            self._limiter = RateLimiter(lanes, slots=slots)

    async def score(self, request: Request) -> Score:
        """Return a valid score. The time limit starts once the part has a slot."""
        try:
            if self._limiter is None:
                async with time_limit(self._timeout_s):
                    score = await self.scorer(request)
            else:
                lane = await self._limiter.acquire(current_permit())
                try:
                    async with time_limit(self._timeout_s):
                        score = await self.scorer(request)
                finally:
                    self._limiter.release(lane)
        except Exception as error:
            if cause_of(error) not in NOT_DELIVERED:
                self._unreachable_since = None
            elif self._unreachable_since is None:
                self._unreachable_since = asyncio.get_running_loop().time()
            raise
        self._answered, self._unreachable_since = True, None
        if not score.valid and not score.applicable:
            raise NotApplicable(score.explanation or "the reward does not apply")
        if not score.valid:
            raise Fatal(score.explanation or "no reason given", cause="invalid", cost=score.parts)
        return score

    def unreachable_s(self) -> float | None:
        """Return for how many seconds the part has been unreachable; None if it is reachable or never was."""
        if not self._answered or self._unreachable_since is None:
            return None
        return asyncio.get_running_loop().time() - self._unreachable_since

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        async with time_limit(self._timeout_s):
            return await self.scorer.finish(task, scores)

    def weighted(self, value: float) -> float:
        """Return the value's contribution to the sum."""
        return self.weight * (value if self.clip is None else min(max(value, self.clip[0]), self.clip[1]))


class _Unfinished:
    """The state of a request whose parts are not all scored."""

    __slots__ = ("failures", "scores", "unreported_cost")

    def __init__(self) -> None:
        self.scores: dict[str, Score] = {}  # by part; invalid for one that is left out
        self.failures: Counter[str] = Counter()
        self.unreported_cost: dict[str, float] = {}

    def add_cost(self, parts: Mapping[str, float]) -> None:
        for name, value in parts.items():
            if name.startswith("cost/"):
                self.unreported_cost[name] = self.unreported_cost.get(name, 0.0) + value


def _reason(part: Part, error: object) -> str:
    return f"{part.name}: {str(error) or type(error).__name__}"


# --- the configuration of parts ---------------------------------------------------------------------
def _read_parts(parts: Mapping[str, Any], on_failure: str) -> dict[str, dict[str, Any]]:
    """Return ``reward``, ``options``, ``weight`` and ``clip`` of each part. Raises `UserError` if they are invalid."""
    if on_failure not in ("fail", "renormalise"):
        raise UserError(f"on_failure = {on_failure!r}: fail or renormalise")
    if not isinstance(parts, Mapping):
        raise UserError("parts: a table of rewards by name")
    tables = {}
    for name, given in parts.items():
        if not name or "/" in name or name in ("cost", "left_out"):
            raise UserError(f"parts: {name!r} cannot be a part's name")
        with named_errors(f"parts.{name}"):
            tables[name] = _read_part(name, given)
    if not any(table["weight"] for table in tables.values()):
        raise UserError("parts: at least one needs a weight other than 0")
    return tables


def _read_part(name: str, given: Any) -> dict[str, Any]:
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
    if clip is not None:
        try:
            low, high = (float(bound) for bound in clip)
        except (TypeError, ValueError):
            raise UserError(f"clip = {clip!r}: give the lowest and the highest value, e.g. [0, 1]") from None
        if not low <= high:
            raise UserError(f"clip = {list(clip)!r}: the lowest value comes first")
        clip = (low, high)
    return {"reward": reward, "options": table.get("options") or {}, "weight": float(weight), "clip": clip}
