"""The interfaces of a run.

`Environment` and `Taskset` are base classes: a user's environment derives from them, and what it does not implement has
a default. All others are protocols, which a class satisfies by having the methods.
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
    """The process of a session or an environment is gone and another takes its place.

    The player plays the episode again from its start.
    """


# --- environments -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers. ``score`` is set where ``done``, unless a `Reward` gives it."""

    messages: tuple[Message, ...]
    done: bool = False
    score: Score | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the model may call, in the observation of ``reset``. The chat template shows them, and calls come
    as ``tool_calls`` of the messages that ``step`` gets."""


class Environment(ABC):
    """One episode of one task. It is made, reset once, stepped until it is done, and closed; it is never used again.

    Subclasses implement `reset` and `step`.
    """

    @abstractmethod
    async def reset(self) -> Observation:
        """Begin the episode and return what the model sees first."""

    @abstractmethod
    async def step(self, message: Message) -> Observation:
        """Take the model's message and return what the model sees next."""

    async def conclude(self, stop: StopReason) -> Score | None:
        """The score of an episode that ran out of turns or of context; None if it has none.

        For environments that score an episode only at its end. Called at most once, before `close`, and only if no
        observation had a valid score.
        """
        return None

    async def close(self) -> None:
        """Release what the episode holds."""
        return None


class Taskset(ABC):
    """A family of tasks and their environments.

    Subclasses implement `tasks` and `environment`. Everything else has a default; an attribute can be set on the class,
    in ``__init__``, or be a property. Instances must be picklable, because worker processes hold a copy.
    """

    phrases: Sequence[str] = ()
    """What the environment says that no demonstration shows, such as "Nothing happens.". The vocabulary of a tiny model
    is made from demonstrations and from these."""

    version: str = ""
    """Changes with the data that tasks are made of, such as a file. Caches of demonstrations depend on it."""

    needs_reward: bool = False
    """The environments give no score: a run without a reward is refused."""

    named_by_content: bool = False
    """Ids are hashes of problems. Two tasks with one id in a mixture are then one problem, even if their payloads
    differ."""

    splits_apart: bool = False
    """No id can be in two splits, so that a run need not check it."""

    has_expert: bool = False
    """`demonstrate` is implemented. Warm starts and baselines need it."""

    weights: Mapping[str, float] = MappingProxyType({})
    """Share of each source in training, in any unit, in the order in which a curriculum takes sources as levels. Empty:
    there is one source. A task's source is its `Task.kind` up to the first "/"."""

    @abstractmethod
    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """The first ``count`` tasks of a split. Deterministic, and no problem is in two splits."""

    @abstractmethod
    def environment(self, task: Task) -> Environment:
        """A new environment for one episode of ``task``."""

    def tools(self, task: Task) -> Tools:
        """The tools that the environment of ``task`` declares; demonstrations are shown with them."""
        return ()

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """An expert's whole conversation (its messages have the role ``assistant``) and its score.

        ``noise`` is the chance that a random valid action takes the place of the expert's next one; with 1 all actions
        are random. Set `has_expert` where this is implemented.

        Raises:
            NoExpert: no expert can play ``task``.
        """
        raise NoExpert(f"{type(self).__name__} has no expert to demonstrate task {task.id!r}")

    def prepare(
        self, tasks: Sequence[Task], *, workers: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Do slow one-time work for ``tasks``, such as compiling games, before the first episode.

        ``workers`` tasks are worked on at once; ``progress(done, total)`` is called after each.
        """
        return None


class Reward(Protocol):
    """Scores trajectories. ``score`` is called as soon as each one ends, ``finish`` once a group is complete."""

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
    """What a sampler answers: the sampled tokens (the stop token included) and their log-probs under
    the distribution really sampled from, temperature included."""

    tokens: IntArray  # int32[n]
    logprobs: FloatArray  # float32[n]
    version: int  # the oldest weights that sampled any of them
    finish: Literal["stop", "length"]
    altered: str | None = None
    """How tokens were drawn if not from the policy at the temperature asked for ("top_p=0.9"): such a trajectory is
    trained on while it is fresh, and never kept for replay."""


class Session(Protocol):
    """One episode's access to a sampler. Prompts of one session usually extend one another, which a
    sampler may use to keep what it has computed; a prompt that does not is still answered exactly."""

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion: ...


class Sampler(Protocol):
    @property
    def version(self) -> int:
        """The weights that it samples with now."""
        ...

    def session(self, seed: int) -> AbstractAsyncContextManager[Session]:
        """Open for an episode, close as soon as it ends: an open session holds memory, and a
        deterministic sampler waits for it. ``seed`` fixes all random draws of the session."""
        ...

    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """Take new weights (tensors by Hugging Face parameter name); copies what it needs."""
        ...

    def stats(self) -> Metrics:
        """Running totals; ``sampled_tokens``, ``prefill_s`` and ``decode_s`` where they are known."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    async def update(self, batch: Batch) -> Metrics:
        """Consume groups in order; one optimizer update for each mini-batch of groups consumed.

        A `ReplayUpdateLearner` makes further updates on stored successes once the groups of a step are consumed.
        """
        ...

    def weights(self) -> Mapping[str, Any]:
        """Tensors by Hugging Face parameter name (adapters merged), to publish. Not a copy.

        Called in a thread, as `save` is: a forward pass of the same model may be running meanwhile.
        """
        ...

    def undo_step(self) -> bool:
        """Forget the groups of the current step if they have not changed the weights yet; returns whether it could."""
        ...

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def export(self, folder: Path) -> None:
        """A Hugging Face model directory that transformers and vLLM load unchanged."""
        ...


# --- around the loop --------------------------------------------------------------------------
class Curriculum(Protocol):
    """Plans batches. ``observe`` receives the groups of each step, and those dropped since the last one."""

    async def propose(self, count: int) -> list[GroupSpec]: ...
    def observe(self, groups: Sequence[Group]) -> Metrics: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Evaluator(Protocol):
    """Evaluates concurrently with training: ``start`` takes a snapshot of the weights and returns at once."""

    async def start(self, step: int) -> None:
        """Waits for an earlier evaluation first."""
        ...

    async def finish(self) -> None: ...
    async def cancel(self) -> None: ...


class CheckpointStore(Protocol):
    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Any:
        """Keep ``state`` and the files that ``write`` puts into a folder, whole or not at all."""
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
