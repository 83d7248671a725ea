"""The environment ``mixture``: combines several tasksets, each with its share of the tasks and its own options."""

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

_PART = "mixture"  # payload key for the label of a task's part
_BEFORE: Mapping[Split, tuple[Split, ...]] = {"eval": (), "warm_start": ("eval",), "train": ("eval", "warm_start")}
"""Split -> the splits that take precedence. A question that two parts put into different splits stays in the first."""


@runtime_checkable
class Asking(Protocol):
    """A taskset that can list its questions and leave some out; see `gleanrl.environments.dataset.taskset`."""

    @property
    def shares(self) -> tuple[float, float] | None: ...
    def questions(self, split: Split) -> Collection[int]: ...
    def tasks(self, split: Split, count: int, without: Collection[int] = ()) -> Sequence[Task]: ...


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class Part:
    """One source of tasks.

    ``weight`` is its share of the tasks of a split and of the groups of training, relative to the other weights.
    ``train_tasks``, ``eval_tasks`` and ``warm_start_tasks`` limit how many tasks it contributes to a split; the other
    parts contribute the rest.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    weight: PositiveFloat = 1.0
    label: str | None = None  # the part's name in metrics; None = ``name``, or the end of an import path
    train_tasks: NonNegative | None = None
    eval_tasks: NonNegative | None = None
    warm_start_tasks: NonNegative | None = None

    def limit(self, split: Split) -> int | None:
        return getattr(self, f"{split}_tasks")


def mixture(*, parts: Sequence[Mapping[str, Any]], seed: int = 0) -> Taskset:
    """Combine several tasksets into one. Each item of ``parts`` holds the fields of a `Part`.

    A task's `Task.kind` is its part's label, followed by "/" and the kind within the part, if there is one. Ids are not
    changed. If two parts have a task with the same id, it is one problem and belongs to the first part. If two data
    sets share a question, it is in one split only, even if their shares differ: evaluation has precedence over the
    warm start, and the warm start over training.
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
    """Tasks of several tasksets, in proportion to their weights.

    The mixture has an expert if any part has one. The warm start then takes tasks only from the parts that have one.
    """

    def __init__(self, parts: Mapping[str, Part], tasksets: Mapping[str, Taskset]) -> None:
        self._parts, self._tasksets = parts, tasksets
        self.weights = {label: part.weight for label, part in parts.items()}
        self.phrases = tuple(phrase for taskset in tasksets.values() for phrase in taskset.phrases)
        self.needs_reward = any(taskset.needs_reward for taskset in tasksets.values())
        self.has_expert = any(taskset.has_expert for taskset in tasksets.values())

    @property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The versions of all parts, joined by spaces."""
        return " ".join(filter(None, (taskset.version for taskset in self._tasksets.values())))

    def tools(self, task: Task) -> Tools:
        label, bare = self._bare(task)
        return self._tasksets[label].tools(bare)

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """Return ``count`` tasks, with the parts interleaved by weight. Raises `UserError` if there are too few."""
        eligible = self._eligible(split)
        given = dict.fromkeys(eligible, 0)
        turns: list[str] = []  # part of each task: among parts below their limit, the one furthest behind its share
        while len(turns) < count:
            open_ = [n for n in eligible if (most := self._parts[n].limit(split)) is None or given[n] < most]
            if not open_:
                raise UserError(
                    f"the parts of the mixture have {len(turns)} {split} tasks, {count} were asked for; lower "
                    f"environment.{split}_tasks or raise the parts'"
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

    def prepare(
        self, tasks: Sequence[Task], *, workers: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Let each part prepare its own tasks. ``progress(done, total)`` counts the tasks of all parts."""
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
        """Return the parts that have tasks of the split."""
        eligible = [label for label, part in self._parts.items() if part.limit(split) != 0]
        if split == "warm_start" and self.has_expert:
            return [label for label in eligible if self._tasksets[label].has_expert]
        return eligible

    def _take(self, label: str, split: Split, count: int, taken: dict[str, Task]) -> list[Task]:
        """Return ``count`` tasks of a part that are not in ``taken``, and add these tasks to ``taken``."""
        taskset: Any = self._tasksets[label]
        without: set[int] = set()  # questions that other parts have in a split with precedence
        if isinstance(taskset, Asking):
            for before in _BEFORE[split]:
                for name in self._eligible(before):
                    other = self._tasksets[name]
                    if name == label or not isinstance(other, Asking):
                        continue
                    # With equal shares, both parts put a question into the same split.
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
                # If ids are hashes of the problem, the payloads of one problem may still differ, for example in the
                # seed that found it or in options of the prompt.
                hashes = all(self._tasksets[part].named_by_content for part in (label, source_label))
                if bare.prompt != task.prompt or not (hashes or bare.payload == task.payload):
                    raise UserError(
                        f"environment.options.parts: {label!r} and {source_label!r} both have a task {task.id!r}, and "
                        "not the same; one id means one problem: give the rows of each part ids of their own, or none "
                        "for a hash of their content"
                    )
            if len(new) >= count:
                break
            wanted += count - len(new)
        own = [
            replace(task, payload={**task.payload, _PART: label}, kind=f"{label}/{task.kind}" if task.kind else label)
            for task in new[:count]
        ]
        taken.update({task.id: task for task in own})
        return own

    def _bare(self, task: Task) -> tuple[str, Task]:
        """Return the part's label, and the task as the part made it."""
        label: Any = task.payload.get(_PART)
        if label not in self._tasksets:
            known = ", ".join(self._tasksets)
            raise UserError(f"task {task.id!r} is of no part of this mixture ({label!r}); its parts are {known}")
        payload = {key: value for key, value in task.payload.items() if key != _PART}
        return label, replace(task, payload=payload, kind=task.kind.removeprefix(label).removeprefix("/"))
