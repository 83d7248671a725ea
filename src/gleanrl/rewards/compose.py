"""Combines several rewards, called the parts, into their weighted sum, and logs the value of every part by name."""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards.adapter import BUILT_IN, RewardAdapter, check_reward, load_reward, named_errors
from gleanrl.rewards.http import version_of
from gleanrl.rewards.journal import Journal
from gleanrl.rewards.limits import CURRENT_PERMIT, CallTokens, Permit, RateLimiter, TokenEstimate, time_limit
from gleanrl.rewards.request import NotApplicable, Request, Scorer, own_score
from gleanrl.rewards.statistics import OutageDetector
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import REFUSED, Fatal, Retryable, cause_of, is_retryable, wait_asked_for
from gleanrl.utils.text import nearest

FailurePolicy = Literal["fail", "renormalise"]

ATTEMPTS = 3
"""Number of attempts to score an optional part (see `Part.optional`) before it is left out of the sum, unless the
setting ``attempts`` is smaller."""
MAX_UNFINISHED = 4096
"""Largest number of requests whose finished parts are kept in memory between two attempts."""


class Weighted(Scorer):
    """The weighted sum of several rewards, which are called its parts.

    All parts are scored concurrently. `Score.parts` contains the value of each part under the part's name, and the
    values that the part itself reports under ``name/...``. Turn rewards of the parts (`Score.turns`) are weighted and
    added too; a part without them adds none. Token counts are added up over the parts. When one part fails and the
    agent retries the request, the parts that already have a score are not scored again. If there is a journal, a
    resumed run does not score them again either. The settings ``workers``, ``isolation`` and ``timeout_s`` apply to
    each part separately. ``requests_per_minute`` and ``tokens_per_minute`` limit the calls of all parts together,
    except of those that are computed in this process (`Scorer.calls_service`).

    Args:
        parts: the rewards by name. Each is either a reward that `gleanrl.rewards.adapter.load_reward` accepts, or a
            table ``{reward = "module:name", weight = 0.5, options = {...}, clip = [0, 1]}`` in which only ``reward`` is
            required. The default weight is 1, and a weight of 0 means that the part is only logged. ``clip`` is the
            range to which the part's value is clipped before it is weighted. A table named ``environment`` needs no
            ``reward``; it is the environment's own score.
        on_failure: what happens if a part fails. ``fail``: the request fails. ``renormalise``: the part is left out of
            the sum. If its error is retryable, this is after `ATTEMPTS` attempts, or after ``attempts`` of the settings
            if these are fewer. The sum of the remaining parts is then multiplied by ``a / r``, where ``a`` is the sum
            of the absolute weights of all parts and ``r`` that of the remaining parts. ``left_out`` in `Score.parts` is
            the number of missing parts. The request fails if no part with a weight other than 0 has a score. A failed
            part with weight 0 is left out whatever ``on_failure`` is.

    Raises:
        UserError: a part cannot be loaded, or a value is invalid.
    """

    own_timeout = True
    own_rates = True

    def __init__(self, parts: Mapping[str, Any], *, on_failure: FailurePolicy = "fail") -> None:
        self._parts: list[Part] = []
        for name, table in _read_parts(parts, on_failure).items():
            with named_errors(f"parts.{name}"):
                self._parts.append(Part(name, optional=on_failure == "renormalise" or not table["weight"], **table))
        self._total_weight = sum(abs(part.weight) for part in self._parts)
        self._unfinished: OrderedDict[str, _Unfinished] = OrderedDict()  # requests between two attempts, oldest first
        self._journal: Journal | None = None
        self._outage_s, self._attempts = RewardSettings().down_after_s, ATTEMPTS
        self.version = version_of([on_failure, [[p.name, p.weight, p.clip, p.scorer.version] for p in self._parts]])
        self.post_processes = any(part.scorer.post_processes for part in self._parts)

    @classmethod
    def check(cls, parts: Mapping[str, Any], *, on_failure: FailurePolicy = "fail") -> None:
        """Check the arguments of the class, without loading a model or a service."""
        for name, table in _read_parts(parts, on_failure).items():
            with named_errors(f"parts.{name}"):
                check_reward(table["reward"], options=table["options"])

    def configure(self, settings: RewardSettings) -> None:
        self._outage_s, self._attempts = settings.down_after_s, min(ATTEMPTS, settings.attempts)
        shares = {"train": 1.0 - settings.eval_share, "eval": settings.eval_share}
        for part in self._parts:
            part.scorer.configure(settings)
            part.set_limits(None if part.scorer.own_timeout else settings.timeout_s, shares)
        rates = None
        if settings.requests_per_minute is not None or settings.tokens_per_minute is not None:
            rates = RateLimiter(
                {name: (sys.maxsize, share) for name, share in shares.items()},
                requests_per_minute=settings.requests_per_minute,
                tokens_per_minute=settings.tokens_per_minute,
            )
        self._limit_rates(rates)

    def _limit_rates(self, rates: RateLimiter | None) -> None:
        """Let the calls of all parts wait for ``rates``, those of the parts of inner sums too; None = no limit."""
        for part in self._parts:
            if isinstance(part.scorer, Weighted):
                part.scorer._limit_rates(rates)
            elif part.scorer.calls_service and not part.is_environment:
                part.limit_rates(rates)

    def use_journal(self, journal: Journal | None) -> None:
        self._journal = journal
        for part in self._parts:
            part.scorer.use_journal(journal)

    async def aclose(self) -> None:
        async with AsyncExitStack() as stack:  # closes all of them, whatever one of them raises
            for part in self._parts:
                stack.push_async_callback(part.scorer.aclose)

    async def __call__(self, request: Request) -> Score:
        """Score the parts that have no score yet, concurrently, and return the sum.

        If a required part fails with an error that is not retryable, the other parts are cancelled. If parts fail with
        retryable errors, all other parts are awaited, and then the error that asks for the longest wait is raised.
        """
        try:
            key = request.key("parts")
        except TypeError:
            # The task's payload is not JSON-serialisable, so the journal cannot store the scores of the parts.
            key = None
        name = f"{request.trajectory_id} {key}"
        unfinished = self._unfinished.pop(name, None) or _Unfinished()
        # A part's scorer may divide the request, for example into votes.
        pieces = {part.name: part.scorer.split(request) or [request] for part in self._parts}
        unfinished.expected = sum(len(of_part) for of_part in pieces.values())
        try:
            try:
                async with asyncio.TaskGroup() as group:
                    for part in self._parts:
                        for piece in pieces[part.name]:
                            if (part.name, piece.part) not in unfinished.scores:
                                group.create_task(self._score_part(part, piece, key, unfinished))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            if unfinished.retryable:
                raise max(unfinished.retryable, key=wait_asked_for)
            scores = {}
            for part in self._parts:
                of_pieces = [unfinished.scores[part.name, piece.part] for piece in pieces[part.name]]
                divided = pieces[part.name][0] is not request
                score = part.scorer.combine(request, of_pieces) if divided else of_pieces[0]
                if not score.valid and not part.optional:
                    failure = Fatal if score.applicable else NotApplicable
                    raise failure(_reason(part, score.explanation), cause="parts")
                scores[part.name] = score
            return self._sum(scores, unfinished.unreported_cost)
        except BaseException as error:
            # The scores of finished parts are kept for the next attempt, also if this attempt was cancelled.
            if isinstance(error, Fatal):
                # The agent does not retry this request. If a caller makes it again, the parts that were left out get
                # all their attempts again.
                unfinished.failures.clear()
                unfinished.scores = {piece: score for piece, score in unfinished.scores.items() if score.valid}
            if isinstance(error, Retryable | Fatal):
                error.cost, unfinished.unreported_cost = unfinished.unreported_cost, {}
            unfinished.retryable.clear()
            if key is not None:
                self._unfinished[name] = unfinished
            if len(self._unfinished) > MAX_UNFINISHED:
                self._unfinished.popitem(last=False)
            raise

    async def _score_part(self, part: Part, request: Request, key: str | None, unfinished: _Unfinished) -> None:
        """Score one part, or read its score from the journal, and store the score in ``unfinished``.

        ``request`` may be one of several into which the part's scorer divides a request. If such a piece fails, its
        score becomes invalid, and the scorer decides what that means for the whole.

        A retryable error is stored in ``unfinished`` and not raised, because it would cancel the other parts. If an
        optional part fails, its score becomes invalid. If a required part fails with an error that is not retryable,
        `Fatal` or `NotApplicable` is raised.
        """
        piece = (part.name, request.part)
        optional = part.optional or bool(request.part)
        journal_key = None
        # A request with a nonce is made only once, so its score is of no use in the journal.
        if self._journal is not None and key is not None and not part.is_environment and not request.nonce:
            text = f"{key} {part.name} {request.part} {part.scorer.version}"
            journal_key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            if (found := self._journal.get(journal_key)) is not None:
                unfinished.scores[piece] = found
                return
        try:
            score = unfinished.scores[piece] = await part.score(request)
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, Retryable | Fatal):
                unfinished.add_cost(error.cost)
            retries = is_retryable(error)
            if retries and optional:
                now, since = asyncio.get_running_loop().time(), part.outage.since
                if cause_of(error) in REFUSED:
                    unfinished.refused_at.setdefault(piece, now)
                explained = part.outage.explains(error, unfinished.refused_at.get(piece))
                if wait_asked_for(error) > self._outage_s:
                    retries = False
                elif part.weight and since is not None and explained:
                    # During an outage, the agent does not count attempts but retries the request for up to
                    # `down_after_s` seconds. The part is left out after half of this time, before the agent gives up
                    # the whole request.
                    retries = not part.optional or now - since < self._outage_s / 2
                    if not retries and cause_of(error) in REFUSED:
                        part.outage.given_up()
                else:
                    unfinished.failures[piece] += 1
                    retries = unfinished.failures[piece] < self._attempts
            if retries:
                after_s = wait_asked_for(error) or None
                unfinished.retryable.append(Retryable(_reason(part, error), after_s, cause=cause_of(error)))
            elif optional:
                failed = Score.failed(str(error) or type(error).__name__)
                unfinished.scores[piece] = replace(failed, applicable=not isinstance(error, NotApplicable))
            elif isinstance(error, NotApplicable):
                raise NotApplicable(_reason(part, error)) from error
            else:
                raise Fatal(_reason(part, error), cause=cause_of(error)) from error
            return
        unfinished.add_cost(score.parts)
        # The agent stores the whole score, so the last part of it is not stored too. A vote always is, because others
        # may have failed.
        missing = request.part or len(unfinished.scores) < unfinished.expected
        if self._journal is not None and journal_key is not None and missing:
            await self._journal.put(journal_key, score)

    def _sum(self, scores: Mapping[str, Score], cost: Mapping[str, float]) -> Score:
        """Return the weighted sum of ``scores`` (by part; invalid ones are left out).

        ``cost`` are token counts to add to `Score.parts`. Raises `Fatal` if no part with a weight other than 0 has a
        valid score, if the sum is not finite, or if parts give turn rewards for different numbers of turns.
        """
        valid = [part for part in self._parts if scores[part.name].valid]
        weight = sum(abs(part.weight) for part in valid)
        if not weight:
            reasons = "; ".join(_reason(part, scores[part.name].explanation) for part in self._parts if part.weight)
            raise Fatal(f"no part could be scored: {reasons}", cause="parts")
        total, logged, lines = 0.0, dict(cost), []
        turns: list[float] | None = None
        for part in valid:
            score = scores[part.name]
            if score.turns is not None and part.weight:
                turns = turns if turns is not None else [0.0] * len(score.turns)
                if len(turns) != len(score.turns):
                    raise Fatal(f"parts give {len(turns)} and {len(score.turns)} turn rewards", cause="not_a_number")
                for index, reward in enumerate(score.turns):
                    turns[index] += part.weight * reward * self._total_weight / weight
            value = score.value if part.clip is None else min(max(score.value, part.clip[0]), part.clip[1])
            total += part.weight * value
            logged[part.name] = score.value
            for name, logged_value in score.parts.items():
                if not name.startswith("cost/"):
                    logged[f"{part.name}/{name}"] = logged_value
        total *= self._total_weight / weight
        if not math.isfinite(total):
            raise Fatal(f"the sum of the parts is {total}", cause="not_a_number")
        if len(valid) < len(self._parts):
            logged["left_out"] = float(len(self._parts) - len(valid))
        for part in self._parts:
            explanation = scores[part.name].explanation
            if explanation is not None:
                lines.append(f"{part.name}: {explanation}")
        explanation = "\n".join(lines) or None
        return Score(total, parts=logged, explanation=explanation, turns=None if turns is None else tuple(turns))

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """Post-process the scores of a group with each part that supports it, and compute the sums again.

        A score becomes invalid if the post-processing makes the score of a required part invalid.
        """
        members: list[dict[str, Score]] = []
        for score in scores:
            by_name = {}
            for part in self._parts:
                there = part.name in score.parts
                by_name[part.name] = Score(score.parts[part.name]) if there else Score.failed("left out")
            members.append(by_name)
        for part in self._parts:
            if part.scorer.post_processes:
                lane = await part.finishing.acquire(Permit("train"))
                try:
                    async with time_limit(part.timeout_s):
                        finished = await part.scorer.finish(task, [by_name[part.name] for by_name in members])
                finally:
                    part.finishing.release(lane)
                for by_name, score in zip(members, finished, strict=True):
                    by_name[part.name] = score
        sums = []
        for score, by_name in zip(scores, members, strict=True):
            if score.valid:
                failed = [p for p in self._parts if p.name in score.parts and not by_name[p.name].valid]
                required = next((part for part in failed if not part.optional), None)
                try:
                    if required is not None:
                        raise Fatal(_reason(required, by_name[required.name].explanation))
                    summed = self._sum(by_name, {})
                    # A part that was left out may have a value now.
                    before = {name: value for name, value in score.parts.items() if name != "left_out"}
                    score = replace(score, value=summed.value, parts={**before, **summed.parts})
                except Fatal as error:
                    score = Score.failed(str(error))
            sums.append(score)
        return sums


class Part:
    """One reward of a weighted sum, with its own slots (maximum number of concurrent calls) and its own time limit.

    Attributes:
        weight: factor of the part's value, negative for a penalty. A part with weight 0 is only logged.
        clip: lowest and highest value, to which the part's value is clipped before it is weighted; None = not clipped.
        optional: whether the part is left out of the sum if it fails. If False, the whole request fails.
        timeout_s: time limit of one call in seconds; None = the part sets no limit, because its reward does.
        finishing: slots for post-processing, which uses as many threads as the calls of a lane do.
        outage: detects that the part's service answers no request.
    """

    def __init__(
        self,
        name: str,
        reward: Any,
        options: Mapping[str, Any],
        weight: float,
        clip: tuple[float, float] | None,
        optional: bool,
    ) -> None:
        self.name, self.weight, self.clip, self.optional = name, weight, clip, optional
        self.scorer = load_reward(reward, options=options)
        if self.scorer.scores_groups and not isinstance(self.scorer, RewardAdapter):
            raise UserError("it compares the members of a group, but a weighted sum scores them one by one")
        self.is_environment = reward is own_score or reward in ("environment", BUILT_IN["environment"])
        self.outage = OutageDetector()
        self._rates: RateLimiter | None = None
        self.set_limits(None, {"train": 1.0, "eval": 1.0})

    def set_limits(self, timeout_s: float | None, shares: Mapping[str, float]) -> None:
        """Set the time limit and the slots. ``shares`` are those of the lanes, by name."""
        self.timeout_s, slots = timeout_s, self.scorer.slots
        of_lane = self.scorer.lane_slots or slots
        self._limiter: RateLimiter | None = None
        if of_lane is not None:
            self._limiter = RateLimiter({name: (of_lane, share) for name, share in shares.items()}, slots=slots)
        self.finishing = RateLimiter({"train": (self.scorer.lane_slots or sys.maxsize, 1.0)})

    def limit_rates(self, rates: RateLimiter | None) -> None:
        """Let every call wait for ``rates``, which all parts share; None = no limit."""
        self._rates = rates
        if rates is not None:
            self._tokens = TokenEstimate(rates, self.scorer.max_tokens)

    async def score(self, request: Request) -> Score:
        """Wait for a slot and for the rates, then score the request within the time limit.

        The returned score is always valid. Raises `NotApplicable` or `Fatal` if the reward returns an invalid score.
        """
        lane, permit = None, CURRENT_PERMIT.get() or Permit("train")
        tokens: CallTokens | None = None  # None = none were taken from the rates
        cost: Mapping[str, float] = {}
        scored = False
        try:
            if self._limiter is not None:
                lane = await self._limiter.acquire(permit)
            if self._rates is not None:
                estimate = self._tokens.of_call(request.messages)
                self._rates.release(await self._rates.acquire(permit, estimate))
                tokens = estimate
            began = asyncio.get_running_loop().time()
            async with time_limit(self.timeout_s):
                score = await self.scorer(request)
            cost, scored = score.parts, True
        except Exception as error:
            if isinstance(error, Retryable | Fatal):
                cost = error.cost
            if not isinstance(error, NotApplicable):
                self.outage.failed(id(request), asyncio.get_running_loop().time())
            raise
        finally:
            if tokens is not None:
                tokens.correct(cost, scored=scored)
            if self._limiter is not None and lane is not None:
                self._limiter.release(lane)
        self.outage.succeeded(began)
        if not score.valid and not score.applicable:
            raise NotApplicable(score.explanation or "the reward does not apply")
        if not score.valid:
            raise Fatal(score.explanation or "no reason given", cause="invalid", cost=score.parts)
        return score


@dataclass(slots=True)
class _Unfinished:
    """The state of a request that is kept between two attempts, until all its parts have a score."""

    expected: int = 0  # number of entries in ``scores`` when all are finished
    # All three by the part's name and the piece of the request (`Request.part`).
    scores: dict[tuple[str, str], Score] = field(default_factory=dict)  # invalid if the piece is left out
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # number of failed attempts of optional pieces
    refused_at: dict[tuple[str, str], float] = field(default_factory=dict)  # event loop time of the first refusal
    retryable: list[Retryable] = field(default_factory=list)  # retryable errors of the current attempt
    unreported_cost: dict[str, float] = field(default_factory=dict)  # token counts that the agent has not received yet

    def add_cost(self, parts: Mapping[str, float]) -> None:
        for name, value in parts.items():
            if name.startswith("cost/"):
                self.unreported_cost[name] = self.unreported_cost.get(name, 0.0) + value


def _reason(part: Part, error: object) -> str:
    return f"{part.name}: {str(error) or type(error).__name__}"


def _read_parts(parts: Mapping[str, Any], on_failure: str) -> dict[str, dict[str, Any]]:
    """Return a table with ``reward``, ``options``, ``weight`` and ``clip`` for each part, by the part's name.

    Defaults are filled in. Raises `UserError` if a name or a value is invalid.
    """
    if on_failure not in ("fail", "renormalise"):
        raise UserError(f"on_failure = {on_failure!r}: fail or renormalise")
    if not isinstance(parts, Mapping):
        raise UserError("parts: a table of rewards by name")
    known = ("reward", "weight", "options", "clip")
    tables = {}
    for name, given in parts.items():
        if not name or "/" in name or name in ("cost", "left_out"):
            raise UserError(f"parts: {name!r} cannot be a part's name")
        table = dict(given) if isinstance(given, Mapping) else {"reward": given}
        reward = table.get("reward", name if name == "environment" else None)
        weight, clip = table.get("weight", 1.0), table.get("clip")
        with named_errors(f"parts.{name}"):
            for key in table:
                if key not in known:
                    raise UserError(f"no setting {key!r}{nearest(str(key), known)}")
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
        options = table.get("options") or {}
        tables[name] = {"reward": reward, "options": options, "weight": float(weight), "clip": clip}
    if not any(table["weight"] for table in tables.values()):
        raise UserError("parts: at least one needs a weight other than 0")
    return tables
