"""Interfaces between the parts of a training run: environments, rewards, samplers, learners, curricula and monitors.

`Environment` and `Taskset` are base classes: a user's classes derive from them, and every method that is not abstract
has a default. The other interfaces are protocols: a class implements one by having its methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from gleanrl.types import (
    FloatArray,
    Group,
    GroupSpec,
    IntArray,
    Message,
    Score,
    StopReason,
    Task,
    Trajectory,
    check_messages,
    finite_reward,
)
from gleanrl.utils.errors import NoExpert

if TYPE_CHECKING:
    from gleanrl.algorithms.batch import Batch

Split = Literal["train", "eval", "warm_start"]
"""Name of a set of tasks. An expert gives demonstrations of the tasks in "warm_start"."""
Metrics = Mapping[str, float]
"""Values by name, such as ``{"reward/mean": 0.5}``."""
Tools = Sequence[Mapping[str, Any]]
"""Tools that a model may call, as OpenAI function schemas."""


class EpisodeLost(Exception):
    """Raised if the process that holds an episode's session or environment has died and another can replace it.

    `gleanrl.rollout.player.Player` then plays the episode again from its start.
    """


# --- environments -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment returns when it is reset and after each step.

    Raises:
        TypeError: a field has a value of another type, such as a content that is not a text.
        ValueError: the content of a message has a lone surrogate, which tokenizers cannot encode, or a number is not
            finite.
    """

    messages: tuple[Message, ...]
    """Messages that continue the conversation with the model."""
    done: bool = False
    """True once the episode has ended."""
    score: Score | None = None
    """What the episode has earned so far; a plain number becomes a `Score`. The last score that is set counts. None if
    the environment does not score. If no observation of an episode has a score, the score is the sum of ``reward``."""
    reward: float | None = None
    """What the model's last message has earned, which led to this observation; None if the environment does not say.
    The trajectory keeps it as `Turn.reward`. The first observation, which no message led to, has none."""
    state: str | None = None
    """A text that is the same for two observations of a task if and only if the environment is in the same state. The
    trajectory keeps it as `Turn.state` of the message that follows. Estimators with turn-level credit (``gigpo`` and
    ``state_gae``) compare messages that were sampled in the same state. If it is None, they compare messages that
    followed the same ``messages``."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Further data for callers that step the environment themselves. Training does not read them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the model may call, as OpenAI function schemas. Set them in the observation that `reset` returns;
    those of later observations are ignored.

    The chat template shows them to the model. The model's calls are in the ``tool_calls`` of the message that is passed
    to `step`.
    """
    agent: bool = False
    """Set in the observation that `reset` returns if the environment is an agent that calls the model itself. The
    episode then continues with one call of `Environment.run` instead of `step`."""

    def __post_init__(self) -> None:
        if self.score is not None and not isinstance(self.score, Score):
            object.__setattr__(self, "score", Score(self.score))
        if self.reward is not None:
            object.__setattr__(self, "reward", finite_reward(self.reward))
        if not isinstance(self.state, str | None):
            raise TypeError(f"state of an observation is a text or None, not {self.state!r:.80}")
        check_messages(self.messages)
        for name in ("done", "agent"):
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise TypeError(f"{name} of an observation is True or False, not {value!r:.80}")
            object.__setattr__(self, name, bool(value))
        if not isinstance(self.info, Mapping):
            raise TypeError(f"info of an observation is a mapping, not {self.info!r:.80}")
        if not isinstance(self.tools, tuple | list) or not all(isinstance(tool, Mapping) for tool in self.tools):
            raise TypeError(f"tools of an observation are OpenAI function schemas in a tuple, not {self.tools!r:.80}")


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """Where an agent reaches the model over HTTP during one episode."""

    url: str
    """Address of the endpoint, such as ``http://127.0.0.1:4711``. Clients of OpenAI's API take it with ``/v1`` at its
    end, those of Anthropic's as it is."""
    key: str
    """The API key, which identifies the episode. It is valid until the episode ends."""
    name: str
    """The name of the model. The endpoint accepts any other name too."""


class Environment(ABC):
    """One episode of one task.

    An instance is reset once, stepped until the episode ends, and closed. The next episode gets a new instance.
    Subclasses implement `reset` and `step`.
    """

    @abstractmethod
    async def reset(self) -> Observation:
        """Begin the episode and return the first observation."""

    @abstractmethod
    async def step(self, message: Message) -> Observation:
        """Apply the model's message to the environment and return the next observation."""

    async def run(self, model: ModelAddress) -> Observation:
        """Play the episode to its end, with an agent that calls the model over HTTP; return the last observation.

        Called once, instead of `step`, if the observation of `reset` has ``agent`` set. The environment stops the agent
        if this method is cancelled.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `run`")

    async def conclude(self, stop: StopReason) -> Score | None:
        """Return the score of an episode that reached its limit of turns or of context; None if it has no score.

        Override this in environments that score an episode only at its end. It is called at most once, before `close`,
        and only if the last score of an observation is missing or invalid.
        """
        return None

    async def close(self) -> None:
        """Release the resources that the episode holds."""
        return None


class Taskset(ABC):
    """A family of tasks and their environments.

    Subclasses implement `tasks` and `environment`; everything else has a default. They can override an attribute on the
    class, in ``__init__`` or by a property. Instances must be picklable, because worker processes hold copies of them.
    """

    phrases: Sequence[str] = ()
    """Texts that the environment may return but that no demonstration contains, such as "Nothing happens.".

    Only ``model.init = "tiny"`` needs them: the tokenizer of the tiny model is trained on the texts of the
    demonstrations and on these texts.
    """

    version: str = ""
    """A label that changes whenever the data behind the tasks, such as a file, change. It is part of the key under
    which demonstrations are cached, so that demonstrations of older data are not used."""

    needs_reward: bool = False
    """True if the environments return no scores. A run is then refused if ``reward.name`` is "environment", the
    default."""

    agents: bool = False
    """True if environments run agents that call the model themselves (`Observation.agent`). A run then refuses settings
    that would not act on an agent's calls, such as ``context.system_prompt``."""

    named_by_content: bool = False
    """True if the id of each task is a hash of the problem, so that equal ids mean equal problems.

    A mixture refuses parts with different tasks under the same id. Two tasks of tasksets with this attribute count as
    equal if their ids and prompts are equal. All other tasks must also have equal payloads.
    """

    splits_apart: bool = False
    """True if the taskset itself guarantees that no id is in two splits. A run then skips this check."""

    has_expert: bool = False
    """True if `demonstrate` is implemented.

    The expert is needed for the warm start (supervised training on demonstrations before RL), for the tokenizer of the
    tiny model, and for the baselines of an evaluation.
    """

    weights: Mapping[str, float] = MappingProxyType({})
    """Relative weight with which training draws from each source: name of the source -> weight. Empty if there is only
    one.

    The source of a task is its `Task.kind` up to the first "/". The curriculum ``levels`` plays the sources in this
    order.
    """

    @abstractmethod
    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """Return the first ``count`` tasks of a split, or all of them if the split has fewer.

        The result must be deterministic, and no problem may be in two splits.
        """

    @abstractmethod
    def environment(self, task: Task) -> Environment:
        """Return a new environment for one episode of ``task``."""

    def tools(self, task: Task) -> Tools:
        """Return the tools that the environment of ``task`` declares. They are also part of its demonstrations."""
        return ()

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """Let an expert play ``task``; return the whole conversation and its score.

        The expert's messages have the role ``assistant``. ``noise`` is the probability that a random valid action
        replaces the expert's next action; with 1 all actions are random. A taskset that implements this method sets
        `has_expert`.

        Raises:
            NoExpert: no expert can play ``task``.
        """
        raise NoExpert(f"{type(self).__name__} has no expert to demonstrate task {task.id!r}")

    def agent_expert(
        self, task: Task, *, seed: int, noise: float = 0.0
    ) -> Callable[[Sequence[Message], Tools], Any] | None:
        """Return an expert that answers the model calls of the task's agent; None if the environment has no agent.

        The agent of `Environment.run` then plays the demonstrations of a warm start, and not `demonstrate`. The expert
        is called with the messages and the tools of a call. It returns a text, a call that
        `gleanrl.environments.tools.call` has made, a list of such calls, or an assistant message. The other arguments
        are those of `demonstrate`.

        Raises:
            NoExpert: no expert can play ``task``.
        """
        return None

    def prepare(
        self, tasks: Sequence[Task], *, workers: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Do slow one-time work for ``tasks``, such as compiling games, before the first episode.

        Up to ``workers`` tasks are prepared at the same time. Call ``progress(done, total)`` after each task.
        """
        return None


class Reward(Protocol):
    """Scores trajectories."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Return the score of a trajectory. Called as soon as the trajectory ends."""
        ...

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        """Post-process the scores of a complete group, for example replace them by the members' ranks.

        ``scores`` are those of all fresh members, followed by that of the greedy attempt if the group has one. Returns
        as many scores in the same order. A valid score in place of an invalid one is used, unless the episode failed.
        """
        ...


# --- models -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a completion is sampled."""

    max_tokens: int
    """Maximum number of sampled tokens, including the stop token."""
    stop_tokens: tuple[int, ...]
    """Ids of the tokens that end the completion."""
    temperature: float = 1.0
    """Sampling temperature; 0 = greedy decoding."""
    seed: int | None = None
    """Fixes the random draws of this completion, so that they do not depend on earlier calls of the session; None = the
    next draws of the session."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a sampler returns: the sampled tokens and their log-probs."""

    tokens: IntArray
    """Sampled token ids, including the stop token, int32[n]."""
    logprobs: FloatArray
    """Log-probs of the tokens, float32[n]. They belong to the distribution from which the tokens were drawn, so they
    include the sampling temperature."""
    version: int
    """Version of the oldest weights that sampled any of the tokens."""
    finish: Literal["stop", "length"]
    """What ended the completion: a stop token, or the limit of tokens ("length")."""
    altered: str | None = None
    """How the distribution differed from the policy at the requested temperature, as a text such as "top_p=0.9"; None
    if it did not differ.

    A trajectory with altered tokens is trained on in the batch for which it was sampled, but it is not stored for
    replay.
    """


class Session(Protocol):
    """One episode's access to a sampler.

    `sample` may be called again before it has returned. Each prompt of a session usually begins with the previous
    prompt and its completion, so a sampler may keep the key-value cache between calls. Any other prompt is allowed too
    and must be answered just as exactly."""

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        """Sample a completion of ``prompt``, which holds the token ids of the whole context, int32[n]."""
        ...


class Sampler(Protocol):
    """Generates the model's tokens."""

    @property
    def version(self) -> int:
        """Version of the weights that the sampler uses now."""
        ...

    def session(self, seed: int) -> AbstractAsyncContextManager[Session]:
        """Return a session for one episode. ``seed`` fixes all random draws of the session.

        Close the session as soon as the episode ends: an open session holds memory, and a deterministic sampler runs
        the next batch only when every open session has sent its next prompt."""
        ...

    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """Sample with these weights (tensors by Hugging Face parameter name) from now on.

        The sampler copies the tensors that it needs, because the learner changes them in its next update. It reads them
        in the order of the mapping and in a worker thread, because they may be gathered only then.
        """
        ...

    async def rest(self) -> None:
        """Free device memory until the next publication, if the sampler can. No session opens in between."""
        ...

    def stats(self) -> Metrics:
        """Return totals since the sampler was made.

        Among them are ``sampled_tokens`` and the seconds ``prefill_s`` and ``decode_s``, if the sampler knows them.
        """
        ...

    async def close(self) -> None:
        """Release the model and all resources. No session is open any more."""
        ...


class Learner(Protocol):
    """Trains the policy."""

    async def update(self, batch: Batch) -> Metrics:
        """Learn from a batch of groups, in order; make one optimizer update for each complete mini-batch of groups.

        The batches of a step may be smaller than a mini-batch, which then spans several calls. After the last batch of
        a step, a `ReplayUpdateLearner` makes further optimizer updates on successful trajectories.
        """
        ...

    def weights(self) -> Mapping[str, Any]:
        """Return the tensors to publish, by Hugging Face parameter name. They are not copies of the learner's tensors.

        LoRA adapters are merged into them, or can be if the mapping has them (`gleanrl.utils.weights.AdaptedWeights`).
        Like `save`, this method is called in a worker thread, so a forward pass of
        the same model may be running at the same time. A mapping may gather its tensors when they are read
        (`gleanrl.utils.weights.GatheredWeights`).
        """
        ...

    def undo_step(self) -> bool:
        """Discard the gradients of the current step's groups, if these groups have not changed the weights yet.

        Returns True if the step was undone, False if the weights have already changed.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the state of the learner (weights and optimizers) into ``folder``, for a checkpoint."""
        ...

    def load(self, folder: Path) -> None:
        """Restore the state that `save` has written into ``folder``."""
        ...

    def return_to(self, folder: Path) -> None:
        """Restore weights and optimizers as `save` has written them into ``folder``, and halve the learning rate.

        All counters continue. Called after the last batch of a step.
        """
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model directory that transformers and vLLM can load without conversion."""
        ...


# --- around the loop --------------------------------------------------------------------------
class Curriculum(Protocol):
    """Chooses the tasks of the groups to sample."""

    async def propose(self, count: int) -> list[GroupSpec]:
        """Plan the next ``count`` groups."""
        ...

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        """Note the groups and the metrics of a finished step, and return further metrics.

        Called once per step. ``groups`` are those that the step learned from and those that were dropped since the step
        before. ``training`` holds the metrics of the step so far, such as ``loss/...`` and ``reward/...``.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serialisable state for a checkpoint.

        It must not have the keys ``replay`` and ``guidance``, which the curricula of these two add.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` has returned.

        The key ``replay`` must be ignored, because replay can be turned off when a run is resumed.
        """
        ...


class Evaluator(Protocol):
    """Evaluates the policy while training continues."""

    @property
    def shares_sampler(self) -> bool:
        """Whether evaluations use training's sampler, which must keep its weights then until they have finished."""
        ...

    async def start(self, step: int, on_error: Callable[[BaseException], None]) -> None:
        """Wait until the previous evaluation has finished, take a snapshot of the weights, and start to evaluate it.

        Returns without waiting for the result. If the evaluation fails, ``on_error`` is called with the error at once;
        `finish` and `cancel` do not raise it.
        """
        ...

    async def finish(self) -> None:
        """Wait until the running evaluation, if there is one, has ended."""
        ...

    async def cancel(self) -> None:
        """End the running evaluation, if there is one, without a result."""
        ...


class CheckpointStore(Protocol):
    """Stores checkpoints."""

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None], kept: Collection[int] = ()) -> Any:
        """Store a checkpoint: ``state``, and the files that ``write(folder)`` puts into the given folder.

        The checkpoints of the steps in ``kept`` stay, however old they are. If the process is killed meanwhile, no
        incomplete checkpoint is left.
        """
        ...

    def find(self, step: int) -> Path | None:
        """Return the folder of the checkpoint of ``step``; None if there is no undamaged one."""
        ...


class Observer(Protocol):
    """Records the progress of a run, for example as rollout files and as metrics that it passes to a `Monitor`."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record metrics that belong to a step but do not come from it, such as those of an evaluation."""
        ...

    def on_batch(self, groups: Sequence[Group], batch: Batch) -> None:
        """Note a batch that the learner is about to learn from, and the groups from which it was made."""
        ...

    def on_step(self, step: int, groups: Sequence[Group], metrics: Metrics, dropped: Sequence[Group] = ()) -> None:
        """Record a finished step. Called once the step's weights are published.

        ``groups`` are those that the step learned from, ``dropped`` those that were dropped since the step before.
        """
        ...


class Monitor(Protocol):
    """Receives the metrics of each step, for example to write them to a file. Must accept metrics of any name."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Write metrics of a step. May be called several times for one step, with different metrics."""
        ...

    def close(self) -> None:
        """Write what is buffered and release all resources."""
        ...


@runtime_checkable
class TextMonitor(Monitor, Protocol):
    """A monitor that also receives texts."""

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write the attempts that an evaluation at ``step`` shows: id of the task -> conversation as text."""
        ...
