"""One trajectory to be scored, and what can score it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from gleanrl.rollout.conversation import conversation
from gleanrl.types import Message, Score, Task, Trajectory

SECOND: ContextVar[bool] = ContextVar("second", default=False)
"""Whether a slow request is being asked a second time, beside the first."""

_NO_SCORE = Score.failed("the environment gave no score")


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to be scored.

    ``messages`` is the conversation as it was played; ``own`` is what the environment gave for it and
    may be invalid. ``anew``, if not empty, is part of the key, so that nothing that was kept answers.
    """

    task: Task
    messages: tuple[Message, ...]
    trajectory_id: str = ""
    own: Score = _NO_SCORE
    info: Mapping[str, Any] = field(default_factory=dict)
    anew: str = ""

    @classmethod
    def of(cls, task: Task, trajectory: Trajectory) -> Request:
        """The request for a trajectory: a message that rewritten contexts show again is in it once, and experience that
        was shown to the agent is left out."""
        return cls(task, tuple(conversation(trajectory)), trajectory.id, trajectory.score, trajectory.info)

    @property
    def response(self) -> str:
        """Content of the last assistant message; empty if there is none."""
        return next((m["content"] or "" for m in reversed(self.messages) if m["role"] == "assistant"), "")

    def key(self, version: str) -> str:
        """32 hex digits, the same in every process: what is scored (task, conversation, the environment's own
        score) and by which ``version`` of a reward. Raises `TypeError` if the task's payload is not JSON."""
        own = self.own.value if self.own.valid else None
        what = [version, self.task.id, self.task.payload, self.messages, own, *([self.anew] if self.anew else ())]
        text = _CANONICAL.encode(what)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


Scorer = Callable[[Request], Awaitable[Score]]
"""Scores one request. A scorer may also have ``version: str`` (part of the key of cache and journal),
``async aclose()``, and ``finish(task, scores) -> scores``, sync or async, called once per complete group.

An async one may bound how many it is asked at once by ``slots: int``. One that makes requests wait itself starts their
clocks itself and says so by ``keeps_time = True``; ``set_limits(settings)`` gives it the `RewardSettings` before its
first call, `gleanrl.rewards.limits.this_claim` the lanes of a call. ``use_journal(journal)`` lends it the agent's
journal, or None, for what it wants to keep of requests that are not finished."""


def _plain(value: Any) -> Any:
    """Arrays and numpy scalars as JSON has them, any mapping as an object."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON-serialisable")


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_plain)
