"""What is scored, and what scores it: `Request` and `Scorer`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
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
"""Whether this task makes the second of two requests for the same score."""

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
        task: the task that it tried to solve.
        messages: the conversation as it was played.
        trajectory_id: empty where there is no trajectory, only text.
        own: what the environment gave for it; may be invalid.
        info: the trajectory's own.
        nonce: part of the key if it is not empty, so that neither cache nor journal answers.
    """

    task: Task
    messages: tuple[Message, ...]
    trajectory_id: str = ""
    own: Score = _NO_SCORE
    info: Mapping[str, Any] = field(default_factory=dict)
    nonce: str = ""

    @classmethod
    def of(cls, task: Task, answer: Answer) -> Request:
        """The request for an answer to a task.

        A message that a rewritten context repeats is in it once; experience that was shown to the agent is left out.
        """
        if isinstance(answer, Trajectory):
            return cls(task, tuple(conversation(answer)), answer.id, answer.score, answer.info)
        if isinstance(answer, str):
            return cls(task, (*task.prompt, Message(role="assistant", content=answer)))
        return cls(task, tuple(answer))

    @property
    def response(self) -> str:
        """Content of the last assistant message; empty if there is none."""
        return next((m["content"] or "" for m in reversed(self.messages) if m["role"] == "assistant"), "")

    def key(self, version: str) -> str:
        """32 hex digits, the same in every process: a hash of what is scored (task, conversation, the environment's own
        score) and of the ``version`` of the reward. Raises `TypeError` if the task's payload is not JSON."""
        own = self.own.value if self.own.valid else None
        hashed = [version, self.task.id, self.task.payload, self.messages, own]
        if self.nonce:
            hashed.append(self.nonce)
        text = _CANONICAL.encode(hashed)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Scorer:
    """A reward as the agent calls it. `gleanrl.rewards.adapter.load_reward` makes one of what a user writes.

    Subclass it for a reward that controls its own concurrency, time or retries; all methods but ``__call__`` have
    defaults. A classmethod ``check(**options)``, if there is one, raises `UserError` for options that make no scorer.

    Attributes:
        version: part of the key of cache and journal; another one, and nothing that was kept is used.
        slots: calls at once, at most; None: no limit.
        own_timeout: it bounds the time of its calls itself, so the agent does not.
        post_processes: `finish` does something.
    """

    version: str = ""
    slots: int | None = None
    own_timeout: bool = False
    post_processes: bool = False

    async def __call__(self, request: Request) -> Score:
        """The score. Raises `Retryable`, `Fatal` or `NotApplicable` where there is none, `UserError` for a mistake in
        the configuration."""
        raise NotImplementedError

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """Post-process a complete group."""
        return scores

    def configure(self, settings: RewardSettings) -> None:
        """Take over the limits of the settings; comes before the first call."""

    def use_journal(self, journal: Journal | None) -> None:
        """Keep there what is finished of requests that are not."""

    async def aclose(self) -> None:
        """Let go of connections, threads and processes."""
