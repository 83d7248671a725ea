"""The environment ``mixture``: combines several tasksets, its parts, into one.

Each part contributes its share of the tasks and has its own options.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import pydantic
from pydantic import Field, TypeAdapter

from gleanrl.config.settings import EnvironmentSettings, NonNegative, PositiveFloat
from gleanrl.environments import load_taskset
from gleanrl.protocols import Environment, Split, Taskset, Tools
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.seeding import derive

_PART = "mixture"  # key of a task's payload; its value is the label of the part that the task comes from
_BEFORE: Mapping[Split, tuple[Split, ...]] = {"eval": (), "warm_start": ("eval",), "train": ("eval", "warm_start")}
"""Split -> the splits that take precedence over it.

If two parts put the same question into different splits, the question is removed from the split without precedence.
"""


@runtime_checkable
class Asking(Protocol):
    """A taskset that can list the questions of a split, and can leave given questions out of its tasks.

    `gleanrl.environments.dataset.taskset.DatasetTaskset` is such a taskset and documents these members.
    """

    @property
    def shares(self) -> tuple[float, float] | None: ...
    def questions(self, split: Split) -> Collection[int]: ...
    def tasks(self, split: Split, count: int, without: Collection[int] = ()) -> Sequence[Task]: ...


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class Part:
    """The settings of one part of a mixture: a taskset, and how many tasks it contributes.

    ``name`` and ``options`` select and configure the taskset, as in the settings of an environment. ``weight`` is the
    part's share of the tasks of each split, and of the groups in training, relative to the weights of the other parts.
    ``train_tasks``, ``eval_tasks`` and ``warm_start_tasks`` limit how many tasks the part contributes to that split.
    The other parts then contribute the remaining tasks.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    weight: PositiveFloat = 1.0
    label: str | None = None  # the part's name in metrics; None = ``name`` (of an import path, the text after ":")
    train_tasks: NonNegative | None = None
    eval_tasks: NonNegative | None = None
    warm_start_tasks: NonNegative | None = None

    def limit(self, split: Split) -> int | None:
        return getattr(self, f"{split}_tasks")


def mixture(*, parts: Sequence[Mapping[str, Any]], seed: int = 0) -> Taskset:
    """Combine several tasksets into one. Each item of ``parts`` holds the fields of a `Part`.

    A task's `Task.kind` is the label of its part. If the part gave the task a kind, "/" and that kind follow.

    Task ids are not changed. Tasks of two parts that have the same id must be the same problem, and only one of the
    parts contributes it. If two parts are data sets that share a question, the question is in only one split, even if
    the data sets divide their questions by different shares. Evaluation then has precedence over the warm start, and
    the warm start over training.

    Raises:
        UserError: there are no parts, two parts have the same label, a label contains "/", or `load_taskset` refuses a
            part.
    """
    if not parts:
        raise UserError("environment.options.parts: a mixture needs at least one part, as [{ name = 'alfworld' }]")
    known = TypeAdapter(list[Part]).validate_python(list(parts))
    labels = [part.label or part.name.rpartition(":")[2] for part in known]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(
                f"environment.options.parts: two parts are called {label!r}; give each a `label` of its own"
            )
        if "/" in label:
            raise UserError(f"environment.options.parts: a label without a slash, not {label!r}; set `label`")
    tasksets = {
        label: load_taskset(EnvironmentSettings(name=part.name, options=part.options), derive(seed, "part", label))
        for label, part in zip(labels, known, strict=True)
    }
    return Mixture(dict(zip(labels, known, strict=True)), tasksets)


class Mixture(Taskset):
    """The tasks of several parts, in proportion to the weights of the parts.

    The mixture has an expert if any part has one. Tasks for the warm start then come only from the parts with an
    expert.
    """

    def __init__(self, parts: Mapping[str, Part], tasksets: Mapping[str, Taskset]) -> None:
        self._parts, self._tasksets = parts, tasksets
        self.weights = {label: part.weight for label, part in parts.items()}
        self.phrases = tuple(phrase for taskset in tasksets.values() for phrase in taskset.phrases)
        self.needs_reward = any(taskset.needs_reward for taskset in tasksets.values())
        self.agents = any(taskset.agents for taskset in tasksets.values())
        self.has_expert = any(taskset.has_expert for taskset in tasksets.values())

    @property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The versions of all parts, joined by spaces."""
        return " ".join(filter(None, (taskset.version for taskset in self._tasksets.values())))

    def tools(self, task: Task) -> Tools:
        label, bare = self._bare(task)
        return self._tasksets[label].tools(bare)

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """Return ``count`` tasks. The parts take turns in proportion to their weights.

        Raises:
            UserError: the parts cannot contribute that many tasks, or two of them have different tasks with the same
                id.
        """
        eligible = self._eligible(split)
        given = dict.fromkeys(eligible, 0)
        # For each task, the label of the part that contributes it. This is the part that is furthest behind its share,
        # among the parts that have not reached their limit.
        turns: list[str] = []
        while len(turns) < count:
            open_ = [n for n in eligible if (most := self._parts[n].limit(split)) is None or given[n] < most]
            if not open_:
                raise UserError(
                    f"the parts of the mixture have {len(turns)} {split} tasks, {count} were asked for; lower "
                    f"environment.{split}_tasks or raise the {split}_tasks of the parts"
                )
            label = min(open_, key=lambda n: (given[n] + 0.5) / self._parts[n].weight)
            given[label] += 1
            turns.append(label)
        taken: dict[str, Task] = {}
        own = {label: iter(self._take(label, split, given[label], taken)) for label in dict.fromkeys(turns)}
        return [next(own[label]) for label in turns]

    def environment(self, task: Task) -> Environment:
        label, bare = self._bare(task)
        return self._tasksets[label].environment(bare)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        label, bare = self._bare(task)
        if not self._tasksets[label].has_expert:
            raise NoExpert(f"part {label!r} of the mixture has no expert to demonstrate task {task.id!r}")
        return self._tasksets[label].demonstrate(bare, seed=seed, noise=noise)

    def agent_expert(
        self, task: Task, *, seed: int, noise: float = 0.0
    ) -> Callable[[Sequence[Message], Tools], Any] | None:
        label, bare = self._bare(task)
        return self._tasksets[label].agent_expert(bare, seed=seed, noise=noise)

    def prepare(
        self, tasks: Sequence[Task], *, workers: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Let each part prepare its own tasks. ``progress(done, total)`` counts the tasks of all parts together."""
        own: dict[str, list[Task]] = {label: [] for label in self._parts}
        for task in tasks:
            label, bare = self._bare(task)
            own[label].append(bare)
        before = 0
        for label, taskset in self._tasksets.items():
            if type(taskset).prepare is not Taskset.prepare:
                report = (
                    None if progress is None else lambda done, _, before=before: progress(before + done, len(tasks))
                )
                taskset.prepare(own[label], workers=workers, progress=report)
            elif progress is not None:
                for done in range(len(own[label])):
                    progress(before + done + 1, len(tasks))
            before += len(own[label])

    def _eligible(self, split: Split) -> list[str]:
        """Return the labels of the parts that contribute tasks to the split."""
        eligible = [label for label, part in self._parts.items() if part.limit(split) != 0]
        if split == "warm_start" and self.has_expert:
            return [label for label in eligible if self._tasksets[label].has_expert]
        return eligible

    def _take(self, label: str, split: Split, count: int, taken: dict[str, Task]) -> list[Task]:
        """Return ``count`` tasks of a part whose ids are not in ``taken``, and add these tasks to ``taken``.

        ``taken`` holds the tasks that other parts contribute to the same split, by id.
        """
        taskset: Any = self._tasksets[label]
        without: set[int] = set()  # hashes of the questions that other parts have in a split with precedence
        if isinstance(taskset, Asking):
            for before in _BEFORE[split]:
                for name in self._eligible(before):
                    other = self._tasksets[name]
                    if name == label or not isinstance(other, Asking):
                        continue
                    # Two parts with equal shares put a question into the same split, so none is left out.
                    if taskset.shares is None or taskset.shares != other.shares:
                        without.update(other.questions(before))
        wanted = count
        while True:
            found = taskset.tasks(split, wanted, without) if without else taskset.tasks(split, wanted)
            new = [task for task in found if task.id not in taken]
            for task in found:
                if task.id not in taken:
                    continue
                source_label, bare = self._bare(taken[task.id])
                # If the ids of both parts are hashes of the problem, equal ids mean the same problem. The payloads may
                # still differ, for example in the seed from which the problem was generated.
                hashes = all(self._tasksets[part].named_by_content for part in (label, source_label))
                if bare.prompt != task.prompt or not (hashes or bare.payload == task.payload):
                    raise UserError(
                        f"environment.options.parts: {label!r} and {source_label!r} both have a task {task.id!r}, and "
                        "the two differ, but one id means one problem: give the rows of each part ids that no other "
                        "part has, or no ids, so that each row gets a hash of its content"
                    )
            if len(new) >= count:
                break
            if len(found) < wanted:
                raise UserError(
                    f"environment.options.parts: {label!r} has {len(new)} {split} tasks that no other part has, and "
                    f"{count} are its share; lower environment.{split}_tasks, or the part's {split}_tasks"
                )
            wanted += count - len(new)
        own = []
        for task in new[:count]:
            inner = task.payload.get(_PART)  # the part of a mixture that is a part
            payload = {**task.payload, _PART: f"{label}/{inner}" if isinstance(inner, str) else label}
            own.append(replace(task, payload=payload, kind=f"{label}/{task.kind}" if task.kind else label))
        taken.update({task.id: task for task in own})
        return own

    def _bare(self, task: Task) -> tuple[str, Task]:
        """Return the label of the task's part, and the task as that part made it.

        Raises:
            UserError: the task does not come from a part of this mixture.
        """
        label, _, inner = str(task.payload.get(_PART)).partition("/")
        if label not in self._tasksets:
            known = ", ".join(self._tasksets)
            raise UserError(
                f"task {task.id!r} is of no part of this mixture: its part is {label!r}, not one of {known}"
            )
        payload = {key: value for key, value in task.payload.items() if key != _PART}
        if inner:
            payload[_PART] = inner
        return label, replace(task, payload=payload, kind=task.kind.removeprefix(label).removeprefix("/"))
