"""Data types of a training run: tasks, turns, trajectories, scores and groups.

All of them are immutable and need no package but numpy, so that processes, files and inference engines can exchange
them unchanged. Two rules hold everywhere:

* **Token-exact.** A sampled turn keeps the token ids and log-probs that the sampler produced. The text of its message
  is only for reading; it is never tokenised again.
* **The loss mask is derived.** A token is trained on if and only if its turn has log-probs. The mask is computed from
  the turns and not stored, so mask and data cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Real
from typing import TYPE_CHECKING, Any, Required, TypedDict

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
"""An array of dtype int32, such as token ids."""
FloatArray = npt.NDArray[np.float32]
"""An array of dtype float32, such as log-probs."""
BoolArray = npt.NDArray[np.bool_]
"""An array of dtype bool, such as a loss mask."""


class OpenAIMessage(TypedDict, total=False):
    """One message of a conversation, in the format of OpenAI's chat API. Further keys are allowed."""

    role: Required[str]
    """Author of the message: "system", "user", "assistant" or "tool"."""
    content: Required[str]
    """Text of the message, without the thought of a message that the model has sampled."""
    reasoning_content: str
    """In a message of the assistant, the thought before the answer, without its tags."""
    tool_calls: list[dict[str, Any]]
    """Calls of tools in a message of the assistant: ``{"id", "type": "function", "function": {"name", "arguments"}}``,
    where ``arguments`` is JSON text."""
    tool_call_id: str
    """In a message with the role "tool", the id of the call that it answers."""
    name: str
    """In a message with the role "tool", the name of the tool."""


if TYPE_CHECKING:
    Message = OpenAIMessage
    """One message of a conversation; at run time any dict."""
else:
    # A plain dict at run time, because the serialiser reads annotations: for a TypedDict it would drop further keys.
    Message = dict[str, Any]


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    """The environment ended the episode."""
    MAX_TURNS = "max_turns"
    """The model has taken as many turns as the configuration allows."""
    CONTEXT_FULL = "context_full"
    """The next turn would not fit into the model's context."""
    ERROR = "error"
    """The environment raised, or its process died."""
    TIMEOUT = "timeout"
    """The environment did not answer in time."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem for the agent to solve."""

    id: str
    """Identifier. The same id always means the same problem, in every run and process."""
    prompt: tuple[Message, ...] = ()
    """Messages that precede the environment's first observation."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serialisable data from which an environment rebuilds the problem in another process, in a later run, or from
    a pool of past experience. Rewards read it too, for example the right answer."""
    kind: str = ""
    """Label such as "heat" or "algebra". Evaluation reports the success rate of each kind and a curriculum may choose
    tasks by kind, but the label does not define the problem."""


SUCCESS = 0.5
"""Default of the setting ``reward.success_threshold``, the score from which a trajectory counts as solved."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a trajectory. A score that could not be computed is marked as invalid, not set to 0.

    Environments and rewards also compute bools, numpy numbers and tensors, which files could not hold. So the value and
    the parts become floats, and the explanation becomes a text. Parts that are not numbers are left out. A value that
    is not a number raises `TypeError`; a valid score whose value is not finite raises `ValueError`.
    """

    value: float
    """The reward; NaN if the score is invalid."""
    valid: bool = True
    """False if the score could not be computed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components of the value, which are reported as metrics."""
    explanation: str | None = None
    """Text from the reward, such as the reason for an invalid score."""
    applicable: bool = True
    """False if the score is invalid because the reward does not apply to this trajectory."""
    turns: tuple[float, ...] | None = None
    """The turn rewards that a reward or an environment gives together with the score: one number for each turn that the
    model sampled, in the order of `Trajectory.sampled_turns`. `Trajectory.scored` moves them to `Turn.reward`, so the
    score of a trajectory itself holds None. Also None if the score is invalid."""

    def __post_init__(self) -> None:
        value, parts = as_float(self.value), {str(name): as_float(part) for name, part in self.parts.items()}
        if value is None:
            raise TypeError(f"the value of a score must be a number, not {self.value!r:.80}")
        turns = None if self.turns is None or not self.valid else tuple(finite_reward(each) for each in self.turns)
        for name, plain in (
            ("value", value),
            ("valid", bool(self.valid)),
            ("parts", {name: part for name, part in parts.items() if part is not None}),
            ("explanation", None if self.explanation is None else str(self.explanation)),
            ("applicable", bool(self.applicable)),
            ("turns", turns),
        ):
            object.__setattr__(self, name, plain)
        if self.valid and not math.isfinite(value):
            raise ValueError(f"a valid score must be finite, not {value}; use Score.failed(reason)")

    @classmethod
    def of(cls, score: Score | float) -> Score:
        """Return ``score`` as a `Score`, if it is a plain number. Environments and experts may return either."""
        return score if isinstance(score, Score) else cls(score)

    @classmethod
    def failed(cls, reason: str) -> Score:
        """Return an invalid score, whose explanation is ``reason``.

        Trajectories with an invalid score are left out of baselines, the loss and the experience pool.
        """
        return cls(value=math.nan, valid=False, explanation=reason)

    def reaches(self, threshold: float) -> bool:
        """Return whether the score is valid and at least ``threshold``."""
        return self.valid and self.value >= threshold


@dataclass(frozen=True, slots=True)
class Turn:
    """One message and exactly the tokens that it added to the context.

    A chat template opens the model's message with tokens that are not sampled, such as ``<|assistant|>``. These tokens
    (the generation prompt) belong to the context turn before the sampled turn. The end-of-turn token is sampled, and
    belongs to the sampled turn.
    """

    message: Message
    """The message, for reading. Its text is never tokenised again."""
    tokens: IntArray
    """Token ids, int32[n]."""
    logprobs: FloatArray | None = None
    """Behaviour log-probs of the tokens, float32[n]; None for a context turn, which is never trained on."""
    version: int = -1
    """Version of the oldest weights that sampled any of the tokens; -1 for a context turn."""
    reward: float | None = None
    """What the message earned (`Observation.reward`, `Score.turns`); None if no one said, and for a context turn."""
    state: str | None = None
    """Key of the environment's state in which the model sampled the message (`Observation.state`); None if the
    environment gives none, and for a context turn."""
    body: tuple[int, int] | None = None
    """Span (start, stop) of the tokens of an observation's text, without those that the chat template adds. None for a
    sampled turn, before the first sampled turn, and where a later segment repeats the turn. An observation thus has a
    body at most once in a trajectory. Also None if the template changes the text, and unless
    ``observation_coefficient`` of ``loss`` or ``warm_start`` needs it."""

    def __post_init__(self) -> None:
        if self.body is not None and (self.logprobs is not None or not 0 <= self.body[0] <= self.body[1]):
            raise ValueError(f"a turn with the body {self.body} must be of the context, and the body a span")
        if self.logprobs is None and self.state is not None:
            raise ValueError("a turn that the model did not sample cannot have a state")
        if self.reward is not None:
            if self.logprobs is None:
                raise ValueError("a turn that the model did not sample cannot have a reward")
            object.__setattr__(self, "reward", finite_reward(self.reward))
        object.__setattr__(self, "tokens", _frozen(self.tokens, np.int32))
        if self.body is not None and self.body[1] > self.tokens.size:
            raise ValueError(f"the body {self.body} exceeds a turn of {self.tokens.size} tokens")
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", _frozen(self.logprobs, np.float32))
            if self.logprobs.shape != self.tokens.shape:
                raise ValueError(f"{self.tokens.size} tokens but {self.logprobs.size} log-probs in one turn")

    @property
    def sampled(self) -> bool:
        """True if the model sampled the turn."""
        return self.logprobs is not None

    def earned(self, reward: float) -> Turn:
        """Return a copy whose reward is higher by ``reward``. Raises `ValueError` for a context turn."""
        return replace(self, reward=(self.reward or 0.0) + finite_reward(reward))


ENVIRONMENT_SCORE, UNPROCESSED_SCORE = "environment_score", "unprocessed_score"
"""Keys of a trajectory's ``info`` under which the value of a replaced score is kept.

The first holds the environment's score if a reward has replaced it. The second holds the reward's score if the
post-processing of the group (`Reward.finish`) has replaced it.
"""

LAST_OBSERVATION = "last_observation"
"""Key of a trajectory's ``info`` under which the messages are kept with which the environment ended the episode.

The model did not see them. The key is missing if there were none.
"""

TURN_ORDER = "turn_order"
"""Key of a trajectory's ``info`` under which the place in time of each sampled turn is kept, as a list in the order of
`Trajectory.sampled_turns`.

The key is missing if the turns are in the order of time, as they are unless an agent goes on with a conversation after
it has begun another one.
"""

START_TURNS = "start_turns"
"""Key of a trajectory's ``info`` under which the number of turns is kept that were repeated from `GroupSpec.start`.

It is 0 if the environment did not repeat its observations, so that the episode was played from the beginning. The key
is missing if the group has no start.
"""

GROUP_UID, GROUP_SIZE = "group_uid", "group_size"
"""Keys of a trajectory's ``info``, as a reward sees it, that hold the id of its group and the number of its fresh
members."""

Segment = tuple[Turn, ...]
"""Consecutive turns of one context of the model. The concatenation of their tokens is exactly what the model was
given."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode of an agent on a task.

    Usually there is one segment. If the context was rewritten during the episode (old thinking removed, or the history
    clipped to a window), each rewritten context is a further segment. A turn that the model sampled has its log-probs
    in exactly one segment; a segment that repeats it later holds it as context.
    """

    id: str
    """Identifier of the episode."""
    task_id: str
    """`Task.id` of the task that was played."""
    segments: tuple[Segment, ...]
    """The contexts of the model, in order."""
    score: Score
    """The reward of the episode. What it exceeds the sum of the turn rewards (`Turn.reward`) by is earned at the last
    sampled token."""
    stop: StopReason
    """Why the episode ended."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Further data of the episode, such as the tools that the model could call."""
    ending: Segment = ()
    """Turns of the observation that ended the episode, as they would continue the last segment. The model did not see
    them, so they are in no segment. Empty unless ``loss.observation_coefficient`` needs them."""

    def turns(self) -> Iterator[Turn]:
        """Yield the turns of all segments, in order."""
        for segment in self.segments:
            yield from segment

    def sampled_turns(self) -> Iterator[Turn]:
        """Yield the turns that the model sampled, in order."""
        return (turn for turn in self.turns() if turn.sampled)

    @property
    def version(self) -> int:
        """Version of the oldest weights that sampled any turn; -1 if no turn was sampled."""
        return min((turn.version for segment in self.segments for turn in segment if turn.sampled), default=-1)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(turn.tokens.size for turn in self.sampled_turns())

    @property
    def total_tokens(self) -> int:
        """Number of tokens of all segments, those of the context included."""
        return sum(turn.tokens.size for turn in self.turns())

    def scored(self, score: Score) -> Trajectory:
        """Return a copy with ``score``. If the score has turn rewards, they replace those of the sampled turns.

        If there is also one for each turn of the start (`GroupSpec.start`), which rewards see as messages of the
        assistant too, these are dropped. The copy's score is invalid if the number of turn rewards is any other.
        """
        if score.turns is None:
            return replace(self, score=score)
        sampled, repeated = sum(1 for _ in self.sampled_turns()), self.info.get(START_TURNS, 0)
        if len(score.turns) not in (sampled, repeated + sampled):
            reason = f"the score has {len(score.turns)} turn rewards, and the model sampled {sampled} turns"
            return replace(self, score=Score.failed(reason))
        rewards = iter(score.turns[len(score.turns) - sampled :])
        segments = tuple(
            tuple(replace(turn, reward=next(rewards)) if turn.sampled else turn for turn in segment)
            for segment in self.segments
        )
        return replace(self, segments=segments, score=replace(score, turns=None))

    def rescored(self, score: Score, before: str) -> Trajectory:
        """Return a copy with ``score``. If a valid score is replaced, ``info[before]`` keeps the old value."""
        scored = self.scored(score)
        if score is self.score or not self.score.valid:
            return scored
        return replace(scored, info={**self.info, before: self.score.value})


def segment_arrays(segment: Segment) -> tuple[IntArray, BoolArray, FloatArray]:
    """Return a segment's token ids int32[n], loss mask bool[n] and behaviour log-probs float32[n].

    The mask is true for sampled tokens. The log-probs of all other tokens are 0.
    """
    tokens = np.concatenate([turn.tokens for turn in segment])
    mask = np.concatenate([np.full(turn.tokens.size, turn.sampled) for turn in segment])
    logprobs = np.concatenate(
        [turn.logprobs if turn.logprobs is not None else np.zeros(turn.tokens.size, np.float32) for turn in segment]
    )
    return tokens, mask, logprobs


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A plan for one group: sample ``fresh`` trajectories of ``task`` and add the ``replayed`` ones."""

    task: Task
    """The task that is played."""
    fresh: int
    """Number of trajectories to sample."""
    replayed: tuple[Trajectory, ...] = ()
    """Off-policy members of the batch. Most come from the pool. Members that were sampled with guidance (a text about
    similar tasks in the prompt) also become replayed ones when that text is removed from them before training
    (`gleanrl.experience.guidance`)."""
    greedy: bool = False
    """Play the task once more at temperature 0. The score of that attempt is the baseline of the ReMax estimator; the
    attempt itself is never trained on."""
    start: Segment = ()
    """Turns of an earlier episode of the task, up to one that the model sampled. All episodes of the group begin with
    them: the environment gets the same actions, and the model continues from there. They are context and not trained.
    Empty: episodes begin at the beginning."""

    def __post_init__(self) -> None:
        if self.start and (self.replayed or not self.start[-1].sampled):
            raise ValueError(f"a start ends with a sampled turn, and nothing is replayed (task {self.task.id!r})")
        if self.fresh < 0 or self.fresh + len(self.replayed) < 1:
            raise ValueError(f"a group needs at least one member (task {self.task.id!r}, fresh={self.fresh})")
        for trajectory in self.replayed:
            if trajectory.task_id != self.task.id:
                raise ValueError(f"trajectory of task {trajectory.task_id!r} in a group of {self.task.id!r}")


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one task in one batch: first the fresh ones, then the replayed ones.

    Advantages compare the members of a group with one another.
    """

    spec: GroupSpec
    """The plan that the group was sampled by."""
    trajectories: tuple[Trajectory, ...]
    """The members: the fresh ones, then the replayed ones."""
    ticket: int
    """Number of the group in the run (`gleanrl.schedule.controller.Ticket`). If the group is dropped, the group that
    replaces it has the same number."""
    greedy: Trajectory | None = None
    """The attempt at temperature 0, if ``spec.greedy``; not one of ``trajectories``."""
    dropped: bool = False
    """True if another group replaces this one: the curriculum observes it, the learner does not."""

    @property
    def fresh(self) -> tuple[Trajectory, ...]:
        """The members that were sampled for this group."""
        return self.trajectories[: len(self.trajectories) - len(self.spec.replayed)]

    @property
    def valid_fresh(self) -> tuple[Trajectory, ...]:
        """The fresh members with a valid score."""
        return tuple(t for t in self.fresh if t.score.valid)

    @property
    def version(self) -> int:
        """Version of the oldest weights that sampled a valid fresh member; -1 if no such member was sampled."""
        return min((version for t in self.valid_fresh if (version := t.version) >= 0), default=-1)


def check_messages(messages: Any) -> None:
    """Check that ``messages`` is a list or a tuple of messages whose contents are texts.

    Raises:
        TypeError: it is not. The content of the assistant's messages may also be None.
        ValueError: a content has a lone surrogate, which tokenizers cannot encode.
    """
    valid = isinstance(messages, tuple | list)
    for message in messages if valid else ():
        valid = valid and isinstance(message, Mapping) and "content" in message and isinstance(message.get("role"), str)
        if not valid or isinstance(message["content"], str):
            continue
        valid = message["content"] is None and message["role"] == "assistant"  # such a message only calls tools
    if not valid:
        raise TypeError(f"messages are written ({{'role': 'user', 'content': 'text'}}, ...), not {messages!r:.80}")
    for message in messages:
        try:
            (message["content"] or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the content of a message has a lone surrogate ({error.object[error.start]!a} at character "
                f"{error.start}), which tokenizers cannot encode; decode bytes with errors='replace'"
            ) from None


def as_float(value: Any) -> float | None:
    """Return a bool, an int, a float, or an array or tensor with one element as a float, and None for anything else."""
    if hasattr(value, "item"):
        with suppress(ValueError, RuntimeError, TypeError):  # the array or tensor does not have exactly one element
            value = value.item()
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:  # an int may exceed a float's range
        return None


def finite_reward(value: Any) -> float:
    """Return a turn reward as a float. Raises `TypeError` if it is no number, `ValueError` if it is not finite."""
    reward = as_float(value)
    if reward is None:
        raise TypeError(f"the reward of a turn must be a number, not {value!r:.80}")
    if not math.isfinite(reward):
        raise ValueError(f"the reward of a turn must be finite, not {reward}")
    return reward


def _frozen(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    array = np.array(array, dtype=dtype, ndmin=1)  # a copy, because the caller may still change the original
    array.flags.writeable = False
    return array
