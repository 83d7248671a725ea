"""The data of reinforcement learning on agents: what is sampled, scored, grouped and trained on.

Everything here is immutable and needs only numpy, so that it travels unchanged between processes,
files and engines. Two rules hold everywhere:

* **Token-exact.** A sampled turn keeps the token ids and log-probs that the sampler produced. Text
  is for reading; it is never tokenised again.
* **The loss mask is derived.** A token is trained if and only if its turn has log-probs, so mask and
  data cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Required, TypedDict

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class OpenAIMessage(TypedDict, total=False):
    """One message of a conversation, in the OpenAI shape. It may have further keys."""

    role: Required[str]  # system | user | assistant | tool
    content: Required[str]
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str


if TYPE_CHECKING:
    Message = OpenAIMessage
else:
    Message = dict[str, Any]  # the serialiser reads annotations, and must keep keys that an environment adds


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment ended the episode
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"  # the next turn would not fit into the model's context
    ERROR = "error"  # the environment raised or its process died
    TIMEOUT = "timeout"  # the environment did not answer in time


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. The same id always means the same problem, in every run and process.

    ``payload`` is JSON-serialisable and holds what an environment needs to rebuild the problem anywhere: in another
    process, in a later run, in a pool of past experience. ``kind`` is a label such as "heat" or "algebra". Evaluation
    reports success by kind and a curriculum may choose tasks by kind, but the label does not define the problem.
    """

    id: str
    prompt: tuple[Message, ...] = ()
    payload: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""


SUCCESS = 0.5
"""A trajectory whose score is at least this value counts as solved."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a trajectory earned. A score that could not be computed is invalid, never zero."""

    value: float
    valid: bool = True
    parts: Mapping[str, float] = field(default_factory=dict)
    explanation: str | None = None
    applicable: bool = True  # False: invalid because the reward does not apply to this trajectory, not by a failure

    def __post_init__(self) -> None:
        if self.valid and not math.isfinite(self.value):
            raise ValueError(f"a valid score must be finite, not {self.value}; use Score.failed(reason)")

    @classmethod
    def failed(cls, reason: str) -> Score:
        """Return an invalid score, for one that could not be computed. It enters no baseline, no loss and no pool."""
        return cls(value=math.nan, valid=False, explanation=reason)

    @property
    def solved(self) -> bool:
        return self.valid and self.value >= SUCCESS


@dataclass(frozen=True, slots=True)
class Turn:
    """One message and exactly the tokens that it added to the context.

    The generation prompt (``<|assistant|>``) belongs to the context turn before a sampled turn; the
    sampled end-of-turn token belongs to the sampled turn.
    """

    message: Message
    tokens: IntArray  # int32[n]
    logprobs: FloatArray | None = None  # float32[n] behaviour log-probs; None = context, never trained
    version: int = -1  # weights that sampled the turn, the oldest if they changed meanwhile; -1 = context

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _frozen(self.tokens, np.int32))
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", _frozen(self.logprobs, np.float32))
            if self.logprobs.shape != self.tokens.shape:
                raise ValueError(f"{self.tokens.size} tokens but {self.logprobs.size} log-probs in one turn")

    @property
    def sampled(self) -> bool:
        return self.logprobs is not None


ENVIRONMENT_SCORE, UNPROCESSED_SCORE = "environment_score", "unprocessed_score"
"""Keys of a trajectory's ``info`` that keep a replaced score.

The first holds the environment's score if a reward has replaced it. The second holds the reward's score if the
post-processing of the group has replaced it.
"""

Segment = tuple[Turn, ...]
"""Turns that extend one another: the tokens of a segment, concatenated, are what the model saw."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode of an agent on a task.

    ``segments`` holds more than one segment only where the context was rewritten during the episode (old thinking
    removed, a window clipped). Each sampled turn is a sampled turn in exactly one of the segments.
    """

    id: str
    task_id: str
    segments: tuple[Segment, ...]
    score: Score
    stop: StopReason
    info: Mapping[str, Any] = field(default_factory=dict)

    def turns(self) -> Iterator[Turn]:
        for segment in self.segments:
            yield from segment

    def sampled_turns(self) -> Iterator[Turn]:
        return (turn for turn in self.turns() if turn.sampled)

    @property
    def version(self) -> int:
        """Version of the oldest weights that sampled any turn; -1 if no turn was sampled."""
        return min((turn.version for turn in self.sampled_turns()), default=-1)

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.tokens.size for turn in self.sampled_turns())

    @property
    def total_tokens(self) -> int:
        return sum(turn.tokens.size for turn in self.turns())

    def scored(self, score: Score) -> Trajectory:
        return replace(self, score=score)

    def rescored(self, score: Score, before: str) -> Trajectory:
        """Return a copy with ``score``. If the present score is valid and not the same, ``info[before]`` keeps it."""
        if score is self.score or not self.score.valid:
            return self.scored(score)
        return replace(self, score=score, info={**self.info, before: self.score.value})


def segment_arrays(segment: Segment) -> tuple[IntArray, BoolArray, FloatArray]:
    """Return tokens int32[n], loss mask bool[n] and behaviour log-probs float32[n] (0 where not sampled)."""
    tokens = np.concatenate([turn.tokens for turn in segment])
    mask = np.concatenate([np.full(turn.tokens.size, turn.sampled) for turn in segment])
    logprobs = np.concatenate(
        [turn.logprobs if turn.logprobs is not None else np.zeros(turn.tokens.size, np.float32) for turn in segment]
    )
    return tokens, mask, logprobs


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A plan for one group: sample ``fresh`` trajectories of ``task`` and add the ``replayed`` ones.

    ``replayed`` members are off-policy in the batch. They come from the pool. Members that were sampled with guidance
    are also ``replayed`` once the guidance is removed from them (`gleanrl.experience.guidance`).

    ``greedy``: play the task once more at temperature 0, as a baseline (ReMax). That attempt is never trained on.
    """

    task: Task
    fresh: int
    replayed: tuple[Trajectory, ...] = ()
    greedy: bool = False

    def __post_init__(self) -> None:
        if self.fresh < 0 or self.fresh + len(self.replayed) < 1:
            raise ValueError(f"a group needs at least one member (task {self.task.id!r}, fresh={self.fresh})")
        for trajectory in self.replayed:
            if trajectory.task_id != self.task.id:
                raise ValueError(f"trajectory of task {trajectory.task_id!r} in a group of {self.task.id!r}")


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one task in one batch, the unit of advantage: fresh first, then replayed."""

    spec: GroupSpec
    trajectories: tuple[Trajectory, ...]
    ticket: int
    greedy: Trajectory | None = None  # the attempt at temperature 0, if the spec asks for one; not a member
    dropped: bool = False  # replaced by another group: the curriculum observes it, the learner does not see it

    @property
    def fresh(self) -> tuple[Trajectory, ...]:
        return self.trajectories[: len(self.trajectories) - len(self.spec.replayed)]

    @property
    def valid_fresh(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.fresh if t.score.valid)

    @property
    def version(self) -> int:
        """Version of the oldest weights that sampled a valid fresh member; -1 if no such member was sampled."""
        return min((t.version for t in self.valid_fresh if t.version >= 0), default=-1)


def _frozen(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    array = np.array(array, dtype=dtype, ndmin=1)  # a copy, so that no other reference can change it
    array.flags.writeable = False
    return array
