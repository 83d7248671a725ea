"""What a user implements. Each protocol is small; a class satisfies it by having the methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from gleanrl.types import FloatArray, Group, GroupSpec, IntArray, Message, Score, StopReason, Task, Trajectory

if TYPE_CHECKING:
    from gleanrl.algorithms.batch import Batch

Split = Literal["train", "eval", "warm_start"]
Metrics = Mapping[str, float]


class EpisodeLost(Exception):
    """Raised by a session or an environment whose process is gone while another takes its place: the episode is played
    again from its start."""


# --- environments -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says next. ``score`` is set where ``done``, unless a `Reward` gives it."""

    messages: tuple[Message, ...]
    done: bool = False
    score: Score | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    """What the model may call, as OpenAI function schemas, in what ``reset`` answers. The chat template shows them, and
    calls come as ``tool_calls`` of the messages that ``step`` gets."""


class Environment(Protocol):
    """One episode of one task: made, reset once, stepped until done, closed. Never reused."""

    async def reset(self) -> Observation: ...
    async def step(self, message: Message) -> Observation: ...
    async def close(self) -> None: ...


@runtime_checkable
class Concluding(Protocol):
    """An environment that scores an episode only at its end, and is told where that comes from outside."""

    async def conclude(self, stop: StopReason) -> Score | None:
        """What the episode is worth as it stands: it ran out of turns or of context. Called at most once, last."""
        ...


class Taskset(Protocol):
    """A family of tasks and how to play them. Must be picklable, so that worker processes can hold it.

    It may have these attributes:

    - ``phrases``: what the environment says that no demonstration shows ("Nothing happens."); a tokenizer made from
      the environment's text then knows it too.
    - ``tool_schemas``: the tools that its environments declare; as a method it says so of a task.
    - ``version``: a text that changes with what its tasks are made of, such as a file; part of what caches depend on.
    - ``needs_reward``: True where its environments score nothing, so that a run without a reward is refused.
    - ``named_by_content``: True where ids are hashes of problems: two tasks of one id in a mixture are then one,
      whatever else their payloads say.
    - ``splits_apart``: True where no id can be in two splits, which then nobody checks.
    """

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """The first ``count`` tasks of a split: deterministic, and no problem is in two splits."""
        ...

    def environment(self, task: Task) -> Environment: ...


@runtime_checkable
class Demonstrator(Protocol):
    """A taskset whose tasks an expert can play, for warm starts and as an upper bound."""

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """A whole conversation (assistant messages are the expert's) and what it earned.

        ``noise`` is the chance that a random valid action takes the place of the expert's next one; with
        1 all actions are random.
        """
        ...


@runtime_checkable
class Preparing(Protocol):
    """A taskset with slow one-time work (compiling games), better done before the first episode than in it."""

    def prepare(
        self, tasks: Sequence[Task], *, workers: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Do it for ``tasks``, ``workers`` at once; ``progress(done, total)`` after each."""
        ...


@runtime_checkable
class Mixed(Protocol):
    """A taskset whose tasks come from several sources. A task's source is its `Task.kind` up to the first "/"."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Share of each source in training, in any unit, in the order in which a curriculum takes them as levels."""
        ...


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
