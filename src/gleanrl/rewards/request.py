"""Defines `Request` (a trajectory to be scored) and `Scorer` (a reward), and converts results of rewards to `Score`.

The reward agent creates a `Request` from each trajectory and calls a `Scorer` with it. If the result is a finite
number, it is the score. Any other result is a failure with a reason; it is never turned into a score of 0.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from gleanrl.rollout.conversation import conversation
from gleanrl.rollout.thinking import written
from gleanrl.types import IntArray, Message, Score, Task, Trajectory, as_float
from gleanrl.utils.http import to_jsonable
from gleanrl.utils.retry import Fatal

if TYPE_CHECKING:
    from gleanrl.config.settings import RewardSettings
    from gleanrl.rewards.journal import Journal

Answer = str | Sequence[Message] | Trajectory
"""What is scored: a response, the messages of a conversation, or a trajectory."""
Item = tuple[Task, Answer]

HEDGED: ContextVar[bool] = ContextVar("hedged", default=False)
"""True in an asyncio task that makes the second of two concurrent attempts to get the same score (hedging)."""
MAX_EXPLANATION = 4000
"""Maximum length, in characters, of the explanation that a reward returns. A longer one is cut."""

_NO_SCORE = Score.failed("the environment gave no score")
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=to_jsonable)


class NotApplicable(Fatal):
    """Raised by a reward that does not apply to a trajectory. The score is invalid but does not count as a failure."""

    def __init__(self, message: str = "the reward does not apply", *, cause: str = "not_applicable") -> None:
        super().__init__(message, cause=cause)


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to be scored.

    Attributes:
        task: the task that the trajectory tried to solve.
        messages: the conversation as it was played, including the task's prompt.
        trajectory_id: id of the trajectory; empty if a response or a list of messages is scored instead.
        own: the score that the environment gave; invalid if it gave none. Its ``turns`` are the turn rewards.
        info: the ``info`` of the trajectory. If the trajectory is scored as a member of a group, it also contains the
            group's id as ``group_uid`` and the number of its members as ``group_size``.
        sampled: token ids, int32[n], of each turn that the model sampled; None if a response or a list of messages is
            scored instead. They are not a part of the key.
        nonce: empty, or a unique text that becomes a part of the key, so that the request cannot be answered from the
            cache or the journal.
        group: empty, or the requests of all members of a group that are scored in one call (`Scorer.scores_groups`).
        part: empty, or the part of a divided request that this request stands for (`Scorer.split`).
    """

    task: Task
    messages: tuple[Message, ...]
    trajectory_id: str = ""
    own: Score = _NO_SCORE
    info: Mapping[str, Any] = field(default_factory=dict)
    sampled: tuple[IntArray, ...] | None = field(default=None, compare=False, repr=False)
    nonce: str = ""
    group: tuple[Request, ...] = ()
    part: str = ""

    @classmethod
    def of(cls, task: Task, answer: Answer) -> Request:
        """Return a request for a response (text), the messages of a conversation, or a trajectory.

        A text is appended to the task's prompt; a list of messages must contain the prompt. Of a trajectory, messages
        that are repeated in a rewritten context are included once, and experience that was inserted into the prompt is
        left out.
        """
        if isinstance(answer, Trajectory):
            turns = tuple(answer.sampled_turns())
            own, sampled = answer.score, tuple(turn.tokens for turn in turns)
            if any(turn.reward is not None for turn in turns):
                own = replace(own, turns=tuple(turn.reward or 0.0 for turn in turns))
            return cls(task, tuple(conversation(answer)), answer.id, own, answer.info, sampled)
        if isinstance(answer, str):
            return cls(task, (*task.prompt, Message(role="assistant", content=answer)))
        return cls(task, tuple(answer))

    @property
    def response(self) -> str:
        """Text of the last assistant message, with its thought in ``<think>`` tags; empty if there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return written(message)
        return ""

    def key(self, version: str) -> str:
        """Return a hash of this request and of the reward's ``version``, as 32 hex digits.

        Equal requests have the same key in every process. The hash covers the task's id and payload, the messages, the
        score that the environment gave with its turn rewards, all of these for each member of a group that is scored in
        one call, and the part of a divided request. Raises `TypeError`, `ValueError` or `RecursionError` if the payload
        is not JSON-serialisable.
        """
        own = self.own.value if self.own.valid else None
        hashed = [version, self.task.id, self.task.payload, self.messages, own]
        if self.own.turns is not None:
            hashed.append({"turns": self.own.turns})
        if self.nonce:
            hashed.append(self.nonce)
        if self.group:  # its stored score has one part for each member, unlike that of a single trajectory
            rows = []
            for row in self.group:
                value = row.own.value if row.own.valid else None
                rows.append([row.task.id, row.task.payload, row.messages, value, row.own.turns])
            hashed.append(rows)
        if self.part:
            hashed.append({"part": self.part})
        text = _CANONICAL.encode(hashed)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class DeferredScore(Score):
    """An invalid score that stands for a member of a group until `RewardAgent.finish` scores the whole group.

    Attributes:
        request: the request of the member.
        lane: the lane of the agent in which the request was made.
    """

    request: Request | None = None
    lane: Literal["train", "eval"] = "train"


class Scorer:
    """The interface of a reward to the agent. `gleanrl.rewards.adapter.load_reward` adapts ordinary rewards to it.

    Subclass it for a reward that controls its own concurrency or time limits. Only ``__call__`` must be implemented. A
    subclass may have a classmethod ``check(**options)``, which is called before a run starts and raises `UserError` if
    an option is invalid.

    Attributes:
        version: a label of the way in which the reward scores. It is a part of the keys in cache and journal, so scores
            that were stored under another version are not used.
        slots: maximum number of concurrent calls; None = no limit.
        lane_slots: maximum number of concurrent calls for training, and the same number again for evaluation; None = no
            limit.
        own_timeout: True if the scorer limits the duration of its calls itself. The agent then sets no time limit.
        own_rates: True if the scorer keeps ``requests_per_minute`` and ``tokens_per_minute`` itself. The agent then
            does not.
        calls_service: False if the reward is computed in this process, so that as a part of a weighted sum it does not
            count in these rates.
        max_tokens: the most tokens that an answer may have; None = not known. Used by ``tokens_per_minute`` until the
            first answer has reported its tokens.
        post_processes: True if `finish` may change scores. If False, the agent does not call it.
        scores_groups: True if the score of a member of a group may depend on the other members. The agent then scores
            all members in one call, with a request whose ``group`` holds their requests. `Score.parts` of the result
            holds each member's score under its index, such as ``"0"``. NaN stands for a failure, and a missing index
            for a member to which the reward does not apply. A name such as ``"0/length"`` is a part of that member's
            score, and each line ``0: text`` of the explanation belongs to that member. Requests of other trajectories
            are made one by one.
    """

    version: str = ""
    slots: int | None = None
    lane_slots: int | None = None
    own_timeout: bool = False
    own_rates: bool = False
    calls_service: bool = True
    max_tokens: int | None = None
    post_processes: bool = False
    scores_groups: bool = False

    async def __call__(self, request: Request) -> Score:
        """Return the score of a request.

        Raises:
            Retryable: the call failed, but another attempt may succeed.
            Fatal: the call failed, and another attempt cannot succeed.
            NotApplicable: the reward does not apply to the trajectory.
            UserError: the configuration is wrong. The agent stops.
        """
        raise NotImplementedError

    def split(self, request: Request) -> Sequence[Request]:
        """Divide a request into several, which differ in `Request.part`; return nothing to make it as it is.

        The agent makes each of them like any other request: with its own limits, retries, and entries in cache and
        journal. Then it calls `combine`.
        """
        return ()

    def combine(self, request: Request, scores: Sequence[Score]) -> Score:
        """Return the score of a divided request. ``scores`` are those of its parts in order; some may be invalid."""
        raise NotImplementedError

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """Return the scores of a complete group after post-processing, in the same order."""
        return scores

    def configure(self, settings: RewardSettings) -> None:
        """Apply the limits of ``settings``. Called before the first request is scored."""

    def use_journal(self, journal: Journal | None) -> None:
        """Use ``journal`` to store the scores of single parts before the whole score is complete; None = no journal.

        Only rewards with several parts need it. The agent itself stores complete scores.
        """

    async def aclose(self) -> None:
        """Release connections, threads and processes."""


class EnvironmentReward:
    """The default `gleanrl.protocols.Reward`, which needs no agent: it keeps the scores that the environment gave."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Return the score that the environment gave."""
        return trajectory.score

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """Return the scores unchanged."""
        return scores


async def own_score(request: Request) -> Score:
    """Return the score that the environment gave, for use as a part of a weighted sum of rewards."""
    return request.own


# --- what a reward returns --------------------------------------------------------------------------
def as_score(returned: Any) -> Score:
    """Convert the result of a reward to a `Score` whose numbers are plain floats.

    The result is a `Score`, a number, or a mapping with the key ``score``. Of a mapping, the entries ``turns`` and
    ``explanation`` become `Score.turns` and `Score.explanation`, and all other numbers become `Score.parts`. Raises
    `Fatal` with the cause ``not_a_number`` for any other result.
    """
    if isinstance(returned, Score):
        score, parts, explanation = returned, returned.parts, returned.explanation
    elif isinstance(returned, Mapping):
        if "score" not in returned:
            raise Fatal(f"{shorten(repr(dict(returned)), 80)} has no 'score'", cause="not_a_number")
        turns = returned.get("turns")
        score = Score(number(returned["score"]), turns=None if turns is None else tuple(map(number, turns)))
        parts = {name: value for name, value in returned.items() if name not in ("score", "turns", "explanation")}
        explanation = returned.get("explanation")
    else:
        return Score(number(returned))
    numbers = {}
    for name, part in parts.items():
        with suppress(Fatal):
            numbers[str(name)] = number(part)
    return replace(score, parts=numbers, explanation=None if explanation is None else shorten(str(explanation)))


def number(value: Any) -> float:
    """Convert a bool, an int, a float, or an array or tensor with one element to a finite float.

    Raises `Fatal` with the cause ``not_a_number`` for anything else.
    """
    if (read := finite(value)) is None:
        raise Fatal(f"the reward is {shorten(repr(value), 80)}, not a finite number", cause="not_a_number")
    return read


def finite(value: Any) -> float | None:
    """Return a number as a float, or None if it is not a finite number."""
    read = as_float(value)
    return read if read is not None and math.isfinite(read) else None


def merge_post_processed(scores: Sequence[Score], returned: Any, *, replaces_failures: bool = False) -> list[Score]:
    """Return the group's ``scores`` with the values that its post-processing ``returned``.

    A valid score becomes invalid if the returned value is not a finite number. An invalid score becomes valid only if a
    valid `Score` or, with ``replaces_failures``, a finite number was returned for it; its explanation remains. Raises
    `Fatal` if ``returned`` is not a list or has another length than ``scores``.
    """
    if not isinstance(returned, Sequence | tuple) and not hasattr(returned, "tolist"):
        raise Fatal(f"post-processing returned {shorten(repr(returned), 80)}, not a list", cause="finish")
    values = list(returned)
    if len(values) != len(scores):
        raise Fatal(f"post-processing returned {len(values)} scores for {len(scores)}", cause="finish")
    merged = []
    for score, value in zip(scores, values, strict=True):
        if isinstance(value, Score):
            score = as_score(value) if score.valid or value.valid else score
        elif score.valid or (replaces_failures and finite(value) is not None):
            try:
                score = replace(score, value=number(value), valid=True, applicable=True)
            except Fatal as error:
                score = Score.failed(f"after post-processing, {error}")
        merged.append(score)
    return merged


def shorten(text: str, limit: int = MAX_EXPLANATION) -> str:
    """Cut a text to at most ``limit`` characters. The text then ends with three dots."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
