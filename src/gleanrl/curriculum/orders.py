"""Implements the orders in which training plays its tasks: shuffled, in levels, or preferring a medium solve rate.

Each order is a `Curriculum` that proposes groups without replayed members. Replay and guidance are curricula that wrap
an order. `make_curriculum` makes the order that the setting ``tasks.order`` names while a run is built.

A checkpoint contains the position of the order and its statistics about tasks, so a resumed run continues with exactly
the next task.
"""

from __future__ import annotations

import inspect
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gleanrl.config.settings import TaskSettings
from gleanrl.protocols import Curriculum, Metrics
from gleanrl.types import SUCCESS, Group, GroupSpec, Task
from gleanrl.utils.errors import UserError, raised_at
from gleanrl.utils.importing import load_object
from gleanrl.utils.seeding import derive
from gleanrl.utils.text import nearest

Weights = Mapping[str, float]
# Lower bound of the factor by which a task's solve rate scales its weight in a draw. Far from 0.5, the factor may
# underflow to 0. The task could then never be drawn, and `_without_repeats` divides by the weight.
_LEAST_CHANCE = 1e-9


def make_curriculum(
    settings: TaskSettings,
    tasks: Sequence[Task],
    weights: Weights,
    *,
    group: int,
    seed: int,
    greedy: bool,
    success_threshold: float = SUCCESS,
) -> Curriculum:
    """Make the order that ``settings.order`` names, with ``settings.options`` as further keyword arguments.

    ``weights`` maps each source of tasks to its weight, and is empty if there is only one source. ``group`` is the
    number of fresh members in a group. If ``greedy`` is true, each group includes an attempt at temperature 0. Solve
    rates count scores of at least ``success_threshold``.

    Raises:
        UserError: ``tasks`` is empty, there is no such order, or the order does not accept an option or its value.
    """
    if not tasks:
        raise UserError("there is no training task; raise environment.train_tasks")
    for name, weight in weights.items():
        if not 0 < weight < math.inf:
            raise UserError(f"the environment's weight of {name!r} is {weight}: a weight is above 0 and finite")
    made = {
        "group": group,
        "seed": seed,
        "weights": weights,
        "greedy": greedy,
        "success_threshold": success_threshold,
    }
    try:
        return find_order(settings)(tasks, **made, **settings.options)
    except (ValueError, TypeError) as error:
        why = f"{error}{raised_at(error)}"
        raise UserError(f"tasks.order = {settings.order!r} refuses its options: {why}") from error


def find_order(settings: TaskSettings) -> Callable[..., Curriculum]:
    """Return the class that ``settings.order`` names.

    Raises:
        UserError: there is no such order, or it has no option of a name in ``settings.options``.
    """
    known: Mapping[str, Any] = {"shuffled": TaskStream, "levels": Levels, "solve_rate": BySolveRate}
    order = known.get(settings.order)
    if order is None and ":" not in settings.order:
        hint = nearest(settings.order, known) or f"; there are {', '.join(known)}, or give `package.module:Class`"
        raise UserError(f"tasks.order: no order {settings.order!r}{hint}")
    order = order or load_object(settings.order, Curriculum)
    common = {option.name for option in fields(TaskOrder)}
    parameters = inspect.signature(order).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return order
    takes = [name for name in parameters if name not in common]
    for key in settings.options:
        if key not in takes:
            hint = nearest(key, takes) or f"; it takes {', '.join(takes) or 'none'}"
            raise UserError(f"tasks.options.{key}: {settings.order!r} has no such option{hint}")
    return order


def source_of(task: Task) -> str:
    """Return the source that a task comes from, such as one part of a mixture: the task's kind up to the first "/"."""
    return task.kind.partition("/")[0]


def group_by_source(tasks: Sequence[Task], weights: Weights) -> dict[str, list[Task]]:
    """Return the tasks of each source, by the source's name. Sources without tasks are left out.

    Sources are in the order of ``weights``, followed by any others in the order of their first tasks.
    """
    sources: dict[str, list[Task]] = {name: [] for name in weights}
    for task in tasks:
        sources.setdefault(source_of(task), []).append(task)
    return {name: own for name, own in sources.items() if own}


@dataclass(eq=False)
class TaskOrder:
    """Base class of the orders in this module, with the arguments that all of them take.

    A subclass declares its own options (the keys of the setting ``tasks.options``) as further fields.
    """

    name: ClassVar[str]  # value of the setting ``tasks.order`` that selects this order

    tasks: Sequence[Task]
    group: int
    seed: int
    weights: Weights = field(default_factory=dict)
    """Relative weight of each source, by which training draws from the sources; empty if there is only one source."""
    greedy: bool = False
    """Whether each group includes an attempt at temperature 0, which the estimator remax uses as the baseline."""
    success_threshold: float = SUCCESS
    """Minimum score of a solved task."""

    def solve_rate(self, group: Group) -> float | None:
        """Return the share of a group's valid fresh members that solved the task. None if no fresh member is valid."""
        solved = [t.score.reaches(self.success_threshold) for t in group.valid_fresh]
        return sum(solved) / len(solved) if solved else None


@dataclass
class Epochs:
    """An endless iterator over ``tasks`` that returns each task once per epoch and shuffles them for every epoch.

    The order within an epoch depends only on ``seed``, ``names`` (which identify the source) and the number of the
    epoch. So ``position``, the number of tasks returned so far, is all that a checkpoint needs to store.
    """

    tasks: Sequence[Task]
    seed: int
    names: tuple[str, ...]
    position: int = 0
    _order: tuple[int, list[int]] = (-1, [])  # number of the present epoch, shuffled indices

    def take(self) -> Task:
        epoch, index = divmod(self.position, len(self.tasks))
        if self._order[0] != epoch:
            order = list(range(len(self.tasks)))
            random.Random(derive(self.seed, "epoch", *self.names, epoch)).shuffle(order)
            self._order = (epoch, order)
        self.position += 1
        return self.tasks[self._order[1][index]]


@dataclass(eq=False)
class TaskStream(TaskOrder):
    """The order ``shuffled``: plays each task once per epoch, in an order that depends only on the seed and the epoch.

    With ``weights``, tasks alternate between sources in proportion to the weights, and each source has its own epochs.
    So the share of a source does not depend on its number of tasks: a small source goes through more epochs.
    """

    name = "shuffled"

    def __post_init__(self) -> None:
        if self.weights:
            sources = group_by_source(self.tasks, self.weights)
            self._sources = {name: Epochs(own, self.seed, (name,)) for name, own in sources.items()}
        else:
            self._sources = {"": Epochs(self.tasks, self.seed, ())}

    async def propose(self, count: int) -> list[GroupSpec]:
        specs: list[GroupSpec] = []
        for _ in range(count):
            task = self._sources[self._next_source()].take()
            specs.append(GroupSpec(task, self.group, greedy=self.greedy))
        return specs

    def _next_source(self) -> str:
        """Return the source that has given the fewest tasks so far in proportion to its weight."""
        behind = {n: (epochs.position + 0.5) / self.weights.get(n, 1.0) for n, epochs in self._sources.items()}
        return min(behind, key=behind.__getitem__)

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        metrics = {}
        for name, epochs in self._sources.items():
            if name:
                metrics[f"tasks/epochs/{name}"] = epochs.position / len(epochs.tasks)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.name, "positions": {name: epochs.position for name, epochs in self._sources.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("order") != self.name or state["positions"].keys() != self._sources.keys():
            raise UserError("the checkpoint was saved with another tasks.order or other sources; use those again")
        for name, position in state["positions"].items():
            self._sources[name].position = position


@dataclass(eq=False)
class Levels(TaskStream):
    """The order ``levels``: plays the sources of a mixture one after the other, as levels.

    Training moves to the next level once the present one is solved often enough.

    Args:
        advance: the mean solve rate that starts the next level. It is the mean of the latest rates of those ``window``
            tasks of the present level that were played last.
        window: the number of tasks in that mean, or all tasks of the level if it has fewer. A level lasts until so many
            different tasks were played. A mean over groups would ignore tasks that replay has retired.
        review: the share of all groups that come from earlier levels, in equal parts, so that these are not forgotten.
        levels: the names of the sources in the order in which they are played. None = the order of the mixture's parts.
    """

    name = "levels"

    advance: float = 0.7
    window: int = 64
    review: float = 0.1
    levels: Sequence[str] | None = None

    def __post_init__(self) -> None:
        sources = group_by_source(self.tasks, self.weights)
        self._sources = {name: Epochs(own, self.seed, (name,)) for name, own in sources.items()}
        if not (0 < self.advance <= 1 and self.window >= 1 and 0 <= self.review < 1):
            raise ValueError("advance is in (0, 1], window at least 1, review in [0, 1)")
        if len(self._sources) < 2:
            raise ValueError(f"levels need tasks of several sources, and there is only {next(iter(self._sources))!r}")
        self._order = list(self._sources if self.levels is None else self.levels)
        if sorted(self._order) != sorted(self._sources):
            raise ValueError(f"levels must name each source once: {', '.join(self._sources)}")
        self._level = 0
        self._recent: dict[str, float] = {}  # latest rates by task id, the task that was played last at the end

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        for group in groups:
            rate, level = self.solve_rate(group), self._order[self._level]
            if source_of(group.spec.task) != level or rate is None:
                continue
            self._recent.pop(group.spec.task.id, None)
            self._recent[group.spec.task.id] = rate
            window = min(self.window, len(self._sources[level].tasks))
            if len(self._recent) > window:
                del self._recent[next(iter(self._recent))]
            learned = len(self._recent) == window and math.fsum(self._recent.values()) >= self.advance * window
            if learned and self._level < len(self._order) - 1:
                self._level += 1
                self._recent.clear()
        success = math.fsum(self._recent.values()) / len(self._recent) if self._recent else 0.0
        return {**super().observe(groups, training), "tasks/level": float(self._level), "tasks/level_success": success}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "level": self._level, "recent": dict(self._recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._level = state["level"]
        self._recent = dict(state["recent"])

    def _next_source(self) -> str:
        """Return the source of the next task: an earlier level if a review is due, otherwise the present level.

        The choice depends only on counts that checkpoints contain, so a resumed run makes the same choices.
        """
        reviewed = self._order[: self._level]
        total = sum(epochs.position for epochs in self._sources.values())
        # Among the first n groups, floor(n * review) are reviews. So one is due if the next group raises that number.
        number = math.floor(total * self.review)
        due = reviewed and math.floor((total + 1) * self.review) > number
        return reviewed[number % len(reviewed)] if due else self._order[self._level]


@dataclass(eq=False)
class BySolveRate(TaskOrder):
    """The order ``solve_rate``: prefers tasks that are solved about half of the time.

    The model learns most from the groups of such tasks, because their members differ in reward. A task is drawn with a
    probability proportional to exp(-(rate - 0.5)^2 / (2 sigma^2)), where ``rate`` is its running solve rate, or 0.5 if
    it has not been played. With several sources, the probability is also proportional to the source's weight.

    Some groups of a batch ignore the solve rate, so that tasks that were too hard or too easy are tried again. A
    proposal contains a task twice only if there are fewer tasks than groups. Groups that replace dropped ones are a
    proposal of their own, and may repeat tasks of the batch.

    Args:
        sigma: standard deviation of the preference around a solve rate of 0.5, in units of solve rate.
        memory: weight, in [0, 1), of the previous running solve rate when a new group of the task updates it.
        explore: probability that a group's task is drawn regardless of its solve rate.
    """

    name = "solve_rate"

    sigma: float = 0.2
    memory: float = 0.5
    explore: float = 0.1

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and 0 <= self.memory < 1 and 0 <= self.explore <= 1):
            raise ValueError("sigma is above 0, memory in [0, 1), explore in [0, 1]")
        # All tasks are read here once, because a task of a data set is read from its file at each access.
        self._index: dict[str, int] = {}
        sources: list[str] = []
        for task in self.tasks:
            self._index[task.id] = len(sources)
            sources.append(source_of(task))
        counts = Counter(sources)
        # The weight of a source is divided among its tasks. A source with more tasks would otherwise be drawn
        # more often at the same weight.
        self._base = np.array([self.weights.get(source, 1.0) / counts[source] for source in sources])
        self._distance = np.zeros(len(sources))  # of each task's running solve rate to 0.5
        self._rates: dict[str, float] = {}
        self._batches = 0

    async def propose(self, count: int) -> list[GroupSpec]:
        draw = np.random.default_rng(derive(self.seed, "solve_rate", self._batches))
        self._batches += 1
        chances = self._base * np.maximum(np.exp(-(self._distance**2) / (2 * self.sigma**2)), _LEAST_CHANCE)
        chosen = _without_repeats(self._base, int(draw.binomial(count, self.explore)), draw, [])
        chosen += _without_repeats(chances, count - len(chosen), draw, chosen)
        # If there are fewer tasks than groups, the batch repeats tasks.
        while len(chosen) < count:
            chosen += _without_repeats(chances, count - len(chosen), draw, [])
        draw.shuffle(chosen)
        return [GroupSpec(self.tasks[index], self.group, greedy=self.greedy) for index in chosen]

    def observe(self, groups: Sequence[Group], training: Metrics) -> Metrics:
        for group in groups:
            rate = self.solve_rate(group)
            if rate is not None:
                before = self._rates.get(group.spec.task.id, rate)
                self._set_rate(group.spec.task.id, self.memory * before + (1 - self.memory) * rate)
        rates = self._rates.values()
        if not rates:
            return {}
        return {
            "tasks/seen": float(len(rates)),
            "tasks/never_solved": sum(rate == 0 for rate in rates) / len(rates),
            "tasks/always_solved": sum(rate == 1 for rate in rates) / len(rates),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.name, "batches": self._batches, "rates": dict(self._rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("order") != self.name:
            raise UserError("the checkpoint was saved with another tasks.order; resume with that")
        self._batches, self._rates = state["batches"], {}
        self._distance[:] = 0
        for name, rate in state["rates"].items():
            self._set_rate(name, rate)

    def _set_rate(self, name: str, rate: float) -> None:
        self._rates[name] = rate
        if name in self._index:  # a checkpoint may have rates of tasks that are no longer there
            self._distance[self._index[name]] = rate - 0.5


def _without_repeats(
    chances: npt.NDArray[np.float64], count: int, draw: np.random.Generator, taken: Sequence[int]
) -> list[int]:
    """Draw ``count`` distinct indices of ``chances`` that are not in ``taken``, or all such indices if there are fewer.

    The draws are successive, without replacement, each with probabilities proportional to ``chances``, which must be
    positive (Efraimidis and Spirakis, 2006).
    """
    keys = np.log1p(-draw.random(len(chances))) / chances
    keys[list(taken)] = -np.inf
    order: list[int] = np.argsort(-keys)[: min(count, len(keys) - len(taken))].tolist()
    return order
