"""Which tasks a batch holds: the plain stream, and the plan that survives a restart."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gleanrl.protocols import Curriculum, Metrics
from gleanrl.schedule.schedule import Ticket
from gleanrl.types import Group, GroupSpec, Task
from gleanrl.utils import serialize
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive


class Epochs:
    """A cursor over tasks: every one once an epoch, in an order that depends on the seed, its names and the epoch only.

    ``position`` counts what was taken; it is all that a checkpoint needs.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, *names: str) -> None:
        self.tasks = tasks
        self.position = 0
        self._seed, self._names = seed, names
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self) -> Task:
        epoch, index = divmod(self.position, len(self.tasks))
        if self._order[0] != epoch:
            order = list(range(len(self.tasks)))
            random.Random(derive(self._seed, "epoch", *self._names, epoch)).shuffle(order)
            self._order = (epoch, order)
        self.position += 1
        return self.tasks[self._order[1][index]]


class TaskStream:
    """Every task once an epoch, in an order that depends on the seed and the epoch only.

    ``greedy``: each group comes with an attempt at temperature 0, for estimators that compare with it.
    """

    def __init__(self, tasks: Sequence[Task], group: int, seed: int, *, greedy: bool = False) -> None:
        if not tasks:
            raise UserError("there is no training task; raise environment.train_tasks")
        self._epochs, self._group, self._greedy = Epochs(tasks, seed), group, greedy

    async def propose(self, count: int) -> list[GroupSpec]:
        return [GroupSpec(self._epochs.take(), self._group, greedy=self._greedy) for _ in range(count)]

    def observe(self, groups: Sequence[Group]) -> Metrics:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._epochs.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "position" not in state:
            raise UserError(
                "the checkpoint was saved with replay, guidance or another tasks.order; resume with them as they were"
            )
        self._epochs.position = state["position"]


class Plan:
    """Gives each ticket its group and tells the curriculum what became of it; keeps for a checkpoint what is open.

    A batch is planned whole when its first ticket starts; a refunded ticket gets one further group.
    """

    def __init__(self, curriculum: Curriculum, batch: int) -> None:
        self.curriculum = curriculum
        self._batch = batch
        self._waiting: deque[GroupSpec] = deque()
        self._resumed: dict[int, GroupSpec] = {}  # what tickets had when the run was saved
        self._started: dict[int, GroupSpec] = {}
        self._dropped: list[tuple[str, Group]] = []  # since the last step, each with the reason

    async def next(self, ticket: Ticket) -> GroupSpec:
        spec = self._resumed.pop(ticket.number, None)
        if spec is None:
            if not self._waiting:
                self._waiting.extend(await self.curriculum.propose(1 if ticket.attempt else self._batch))
            spec = self._waiting.popleft()
        self._started[ticket.number] = spec
        return spec

    def drop(self, group: Group, reason: str) -> None:
        """The group may not be learned from; the curriculum hears of it with the next step."""
        del self._started[group.ticket]
        self._dropped.append((reason, replace(group, dropped=True)))

    def dropped(self, reason: str) -> int:
        """Groups dropped for that reason since the last step."""
        return sum(why == reason for why, _ in self._dropped)

    def observe(self, consumed: Sequence[Group]) -> Metrics:
        """A step has learned from these groups: what the curriculum says of them, and how many were dropped."""
        for group in consumed:
            del self._started[group.ticket]
        dropped, self._dropped = self._dropped, []
        counts = Counter(f"groups/{reason}" for reason, _ in dropped)
        told = sorted((group for _, group in dropped), key=lambda group: group.ticket)  # by no clock
        observed = self.curriculum.observe([*consumed, *told])
        return {**{name: float(count) for name, count in counts.items()}, **observed}

    def state_dict(self) -> dict[str, Any]:
        held = sorted((self._resumed | self._started).items())
        return {
            "curriculum": self.curriculum.state_dict(),
            "tickets": [number for number, _ in held],  # of the first of those planned; the others have none yet
            "planned": serialize.to_builtins([*(spec for _, spec in held), *self._waiting]),
            "dropped": [{"reason": reason, "group": serialize.to_builtins(group)} for reason, group in self._dropped],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.curriculum.load_state_dict(state["curriculum"])
        planned = deque(serialize.from_builtins(state["planned"], list[GroupSpec]))
        self._resumed = {number: planned.popleft() for number in state["tickets"]}
        self._waiting = planned
        self._started.clear()
        self._dropped = [(one["reason"], serialize.from_builtins(one["group"], Group)) for one in state["dropped"]]
