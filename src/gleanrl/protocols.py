"""The interfaces of a run.

`Environment` and `Taskset` are base classes: a user's classes derive from them, and every method that is not abstract
has a default. All other interfaces are protocols, which a class satisfies by having the methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gleanrl.types import FloatArray, Group, GroupSpec, IntArray, Message, Score, StopReason, Task, Trajectory
from gleanrl.utils.errors import NoExpert

if TYPE_CHECKING:
    from gleanrl.algorithms.batch import Batch

Split = Literal["train", "eval", "warm_start"]
Metrics = Mapping[str, float]
Tools = Sequence[Mapping[str, Any]]  # OpenAI function schemas


class EpisodeLost(Exception):
    """The process of a session or an environment has died, and another process replaces it.

    The player plays the episode again from its start.
    """


# --- environments -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment returns. ``score`` is set when ``done`` is true, unless a `Reward` computes the score."""

    messages: tuple[Message, ...]
    done: bool = False
    score: Score | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the model may call. They are set in the observation that ``reset`` returns.

    The chat template shows them to the model. Its calls are the ``tool_calls`` of the messages passed to ``step``."""


class Environment(ABC):
    """One episode of one task. An instance is made, reset once, stepped until it is done, closed, and never reused.

    Subclasses implement `reset` and `step`.
    """

    @abstractmethod
    async def reset(self) -> Observation:
        """Begin the episode and return what the model sees first."""

    @abstractmethod
    async def step(self, message: Message) -> Observation:
        """Take the model's message and return what the model sees next."""

    async def conclude(self, stop: StopReason) -> Score | None:
        """Return the score of an episode that ran out of turns or of context; None if it has no score.

        For environments that score an episode only at its end. Called at most once, before `close`, and only if no
        observation had a valid score.
        """
        return None

    async def close(self) -> None:
        """Release the resources that the episode holds."""
        return None


class Taskset(ABC):
    """A family of tasks and their environments.

    Subclasses implement `tasks` and `environment`. Everything else has a default; an attribute can be set on the class,
    in ``__init__``, or be a property. Instances must be picklable, because worker processes hold a copy.
    """

    phrases: Sequence[str] = ()
    """Texts that the environment may say but that no demonstration contains, such as "Nothing happens.".

    The vocabulary of a tiny model is made from demonstrations and from these texts."""

    version: str = ""
    """Changes whenever the data that tasks are made of change, such as a file. A cached demonstration is used only for
    the version that it was made with."""

    needs_reward: bool = False
    """True if the environments give no score. A run without a reward is then refused."""

    named_by_content: bool = False
    """True if ids are hashes of problems. Two tasks of a mixture with the same id are then the same problem, even if
    their payloads differ."""

    splits_apart: bool = False
    """True if no id can be in two splits, so that a run need not check this."""

    has_expert: bool = False
    """True if `demonstrate` is implemented. Warm starts and baselines need an expert."""

    weights: Mapping[str, float] = MappingProxyType({})
    """Weight of each source of tasks in training, on any scale; empty if there is only one source.

    A task's source is its `Task.kind` up to the first "/". A curriculum by levels takes the sources in this order."""

    @abstractmethod
    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """Return the first ``count`` tasks of a split. The result is deterministic, and no problem is in two splits."""

    @abstractmethod
    def environment(self, task: Task) -> Environment:
        """Return a new environment for one episode of ``task``."""

    def tools(self, task: Task) -> Tools:
        """Return the tools that the environment of ``task`` declares. They are rendered into its demonstrations too."""
        return ()

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """Return the whole conversation of an expert and its score. The expert's messages have the role ``assistant``.

        ``noise`` is the chance that a random valid action replaces the expert's next one; with 1 all actions are
        random. A taskset that implements this method sets `has_expert`.

        Raises:
            NoExpert: no expert can play ``task``.
        """
        raise NoExpert(f"{type(self).__name__} has no expert to demonstrate task {task.id!r}")

    def prepare(
        self, tasks: Sequence[Task], *, workers: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Do slow one-time work for ``tasks``, such as compiling games, before the first episode.

        ``workers`` tasks are prepared at once. ``progress(done, total)`` is called after each task.
        """
        return None


class Reward(Protocol):
    """Scores trajectories.

    ``score`` is called as soon as a trajectory ends. ``finish`` is called once its group is complete: it gets the
    scores of the group's fresh members and returns as many in the same order, for example their ranks. Invalid scores
    are among them and stay invalid. The last score is that of the greedy attempt, if the group has one.
    """

    async def score(self, task: Task, trajectory: Trajectory) -> Score: ...
    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]: ...


# --- models -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int
    stop_tokens: tuple[int, ...]
    temperature: float = 1.0  # 0 = greedy


@dataclass(frozen=True, slots=True)
class Completion:
    """What a sampler returns: the sampled tokens, including the stop token, and their log-probs.

    The log-probs are those of the distribution that the tokens were drawn from, at the sampling temperature."""

    tokens: IntArray  # int32[n]
    logprobs: FloatArray  # float32[n]
    version: int  # the oldest weights that sampled any of the tokens
    finish: Literal["stop", "length"]
    altered: str | None = None
    """Set if the tokens were not drawn from the policy at the requested temperature: says how instead ("top_p=0.9").

    A trajectory with such tokens is trained on once, in its own batch, and never stored for replay."""


class Session(Protocol):
    """One episode's access to a sampler.

    A prompt usually extends the previous one of its session, so a sampler may keep and reuse what it has computed. A
    prompt that does not extend it is still answered exactly."""

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion: ...


class Sampler(Protocol):
    @property
    def version(self) -> int:
        """Version of the weights that the sampler uses now."""
        ...

    def session(self, seed: int) -> AbstractAsyncContextManager[Session]:
        """Return a session for one episode. ``seed`` fixes all random draws of the session.

        Close the session as soon as the episode ends, because an open session holds memory and a deterministic sampler
        waits for its next prompt."""
        ...

    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """Sample with these weights (tensors by Hugging Face parameter name) from now on. Copies what it needs."""
        ...

    def stats(self) -> Metrics:
        """Return running totals, among them ``sampled_tokens``, ``prefill_s`` and ``decode_s`` where they are known."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    async def update(self, batch: Batch) -> Metrics:
        """Consume groups in order, with one optimizer update for each mini-batch of groups.

        A `ReplayUpdateLearner` makes further updates on stored successes once the groups of a step are consumed.
        """
        ...

    def weights(self) -> Mapping[str, Any]:
        """Return the tensors to publish by Hugging Face parameter name, adapters merged. They are not copies.

        Called in a thread, like `save`, so a forward pass of the same model may be running meanwhile.
        """
        ...

    def undo_step(self) -> bool:
        """Forget the groups of the current step, if they have not changed the weights yet.

        Returns whether the groups were forgotten.
        """
        ...

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def export(self, folder: Path) -> None:
        """Write a Hugging Face model directory that transformers and vLLM can load without conversion."""
        ...


# --- around the loop --------------------------------------------------------------------------
class Curriculum(Protocol):
    """Plans batches. ``observe`` receives the groups of each step, and the groups dropped since the step before."""

    async def propose(self, count: int) -> list[GroupSpec]: ...
    def observe(self, groups: Sequence[Group]) -> Metrics: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Evaluator(Protocol):
    """Evaluates concurrently with training: ``start`` takes a snapshot of the weights and returns at once."""

    async def start(self, step: int) -> None:
        """Start an evaluation, after waiting until an earlier one has finished."""
        ...

    async def finish(self) -> None: ...
    async def cancel(self) -> None: ...


class CheckpointStore(Protocol):
    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Any:
        """Store ``state`` and the files that ``write`` puts into a folder, either completely or not at all."""
        ...


class Observer(Protocol):
    """Receives what happens in a run: writes rollouts, computes rates, feeds monitors."""

    def log(self, step: int, metrics: Metrics) -> None: ...
    def on_batch(self, groups: Sequence[Group], batch: Batch) -> None:
        """Called before the learner's update on these groups."""
        ...

    def on_step(self, step: int, groups: Sequence[Group], metrics: Metrics) -> None:
        """Called once the step's weights are published."""
        ...


class Monitor(Protocol):
    """Receives the metrics of each step. Must not raise for a metric that it does not know."""

    def log(self, step: int, metrics: Metrics) -> None: ...
    def close(self) -> None: ...
