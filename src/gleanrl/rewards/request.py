"""The request that is scored (`Request`), the reward that scores it (`Scorer`), and the conversion to `Score`.

The agent makes a `Request` of each trajectory and calls a `Scorer` with it. A finite number is a score. Any other
result of a reward is a failure with a reason, never 0.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from gleanrl.rollout.conversation import conversation
from gleanrl.types import Message, Score, Task, Trajectory
from gleanrl.utils.http import to_jsonable
from gleanrl.utils.retry import Fatal

if TYPE_CHECKING:
    from gleanrl.config.settings import RewardSettings
    from gleanrl.rewards.journal import Journal

Answer = str | Sequence[Message] | Trajectory
"""What is scored: a response, the messages of a conversation, or a trajectory."""
Item = tuple[Task, Answer]

HEDGED: ContextVar[bool] = ContextVar("hedged", default=False)
"""Whether the current asyncio task makes the second of two requests for the same score."""
MAX_EXPLANATION = 4000
"""Maximum length, in characters, of a reward's explanation."""

_NO_SCORE = Score.failed("the environment gave no score")
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=to_jsonable)


class NotApplicable(Fatal):
    """The reward has nothing to say about this trajectory: its score is invalid, but nothing has failed."""

    def __init__(self, message: str = "the reward does not apply", *, cause: str = "not_applicable") -> None:
        super().__init__(message, cause=cause)


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to be scored.

    Attributes:
        task: the task that the trajectory tried to solve.
        messages: the conversation as it was played.
        trajectory_id: empty if a text is scored rather than a trajectory.
        own: the score that the environment gave; may be invalid.
        info: the trajectory's ``info``.
        nonce: if not empty, a part of the key, so that neither cache nor journal answers the request.
    """

    task: Task
    messages: tuple[Message, ...]
    trajectory_id: str = ""
    own: Score = _NO_SCORE
    info: Mapping[str, Any] = field(default_factory=dict)
    nonce: str = ""

    @classmethod
    def of(cls, task: Task, answer: Answer) -> Request:
        """Return the request that scores an answer to a task.

        A message that a rewritten context repeats is included once. Experience that was shown to the agent is left out.
        """
        if isinstance(answer, Trajectory):
            return cls(task, tuple(conversation(answer)), answer.id, answer.score, answer.info)
        if isinstance(answer, str):
            return cls(task, (*task.prompt, Message(role="assistant", content=answer)))
        return cls(task, tuple(answer))

    @property
    def response(self) -> str:
        """Content of the last assistant message; empty if there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return message["content"] or ""
        return ""

    def key(self, version: str) -> str:
        """Return a hash of this request and of the ``version`` of the reward: 32 hex digits, the same in every process.

        It covers task, conversation and the environment's own score. Raises `TypeError` if the task's payload is not
        JSON.
        """
        own = self.own.value if self.own.valid else None
        hashed = [version, self.task.id, self.task.payload, self.messages, own]
        if self.nonce:
            hashed.append(self.nonce)
        text = _CANONICAL.encode(hashed)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Scorer:
    """The form of a reward that the agent calls. `gleanrl.rewards.adapter.load_reward` makes it of a user's reward.

    Subclass it for a reward that controls its own concurrency, time or retries. All methods except ``__call__`` have
    defaults. A classmethod ``check(**options)``, if there is one, raises `UserError` for invalid options.

    Attributes:
        version: part of the key of cache and journal; scores that were stored under another version are not used.
        slots: maximum number of concurrent calls; None: no limit.
        own_timeout: whether the scorer limits the time of its calls itself, so that the agent does not.
        post_processes: whether `finish` may change scores.
    """

    version: str = ""
    slots: int | None = None
    own_timeout: bool = False
    post_processes: bool = False

    async def __call__(self, request: Request) -> Score:
        """Return the score of a request.

        Raises:
            Retryable, Fatal, NotApplicable: there is no score.
            UserError: the configuration is wrong.
        """
        raise NotImplementedError

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """Post-process a complete group."""
        return scores

    def configure(self, settings: RewardSettings) -> None:
        """Apply the limits of ``settings``. Called before the first request is scored."""

    def use_journal(self, journal: Journal | None) -> None:
        """Use ``journal`` to store the finished parts of a request whose score is not complete yet."""

    async def aclose(self) -> None:
        """Release connections, threads and processes."""


class EnvironmentReward:
    """The default reward, a `gleanrl.protocols.Reward` without an agent: keeps each trajectory's own score."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return trajectory.score

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        return scores


async def own_score(request: Request) -> Score:
    """Return the environment's score. This reward function is used in sums of rewards."""
    return request.own


# --- what a reward returns --------------------------------------------------------------------------
def as_score(returned: Any) -> Score:
    """Convert a `Score`, a number, or a mapping with ``score`` to a `Score` of plain floats.

    Other numbers of the mapping become parts, and ``explanation`` the explanation. Raises `Fatal` with cause
    ``not_a_number`` for everything else.
    """
    if isinstance(returned, Score):
        if type(returned.value) is float and not returned.parts and returned.explanation is None:
            return returned
        parts, explanation = returned.parts, returned.explanation
        value = number(returned.value) if returned.valid else math.nan
        score = Score(value, bool(returned.valid), applicable=bool(returned.applicable))
    elif isinstance(returned, Mapping):
        if "score" not in returned:
            raise Fatal(f"{shorten(repr(dict(returned)), 80)} has no 'score'", cause="not_a_number")
        score = Score(number(returned["score"]))
        parts = {name: value for name, value in returned.items() if name not in ("score", "explanation")}
        explanation = returned.get("explanation")
    else:
        return Score(number(returned))
    numbers = {}
    for name, part in parts.items():
        with suppress(Fatal):
            numbers[str(name)] = number(part)
    return replace(score, parts=numbers, explanation=None if explanation is None else shorten(str(explanation)))


def number(value: Any) -> float:
    """Convert a bool, an int, a float, or the only element of an array or tensor to a finite float.

    Raises `Fatal` with cause ``not_a_number`` for anything else.
    """
    single = value
    if hasattr(value, "item"):
        with suppress(ValueError, RuntimeError, TypeError):  # more than one element
            single = value.item()
    if (read := finite(single)) is None:
        raise Fatal(f"the reward is {shorten(repr(value), 80)}, not a finite number", cause="not_a_number")
    return read


def finite(value: Any) -> float | None:
    """Return a number as a float, or None if it is not a finite number."""
    try:
        return float(value) if isinstance(value, Real) and math.isfinite(value) else None
    except OverflowError:  # an int may exceed a float's range
        return None


def merge_post_processed(scores: Sequence[Score], returned: Any) -> list[Score]:
    """Return a group's scores after post-processing. Invalid scores stay invalid, and non-numbers become invalid.

    Raises `Fatal` if the number of returned values differs from the number of scores.
    """
    if not isinstance(returned, Sequence | tuple) and not hasattr(returned, "tolist"):
        raise Fatal(f"post-processing returned {shorten(repr(returned), 80)}, not a list", cause="finish")
    values = list(returned)
    if len(values) != len(scores):
        raise Fatal(f"post-processing returned {len(values)} scores for {len(scores)}", cause="finish")
    merged = []
    for score, value in zip(scores, values, strict=True):
        if score.valid:
            try:
                score = as_score(value) if isinstance(value, Score) else replace(score, value=number(value))
            except Fatal as error:
                score = Score.failed(f"after post-processing, {error}")
        merged.append(score)
    return merged


def shorten(text: str, limit: int = MAX_EXPLANATION) -> str:
    """Cut a text to at most ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
