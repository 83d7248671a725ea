"""Which tasks a batch holds: the plain stream, and the plan that survives a restart."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from gleanrl.errors import UserError
from gleanrl.protocols import Curriculum, Metrics
from gleanrl.records import spec_from_record, spec_to_record
from gleanrl.schedule import Ticket
from gleanrl.seeding import derive
from gleanrl.types import Group, GroupSpec, Task


class TaskStream:
    """Every task once an epoch, in an order that depends on the seed and the epoch only.

    ``greedy``: each group comes with an attempt at temperature 0, for estimators that compare with it.
    """

    def __init__(self, tasks: Sequence[Task], group: int, seed: int, *, greedy: bool = False) -> None:
        if not tasks:
            raise UserError("there is no training task; raise environment.train_tasks")
        self._tasks, self._group, self._seed, self._greedy = tasks, group, seed, greedy
        self._position = 0
        self._order: tuple[int, list[int]] = (-1, [])

    async def propose(self, count: int) -> list[GroupSpec]:
        return [GroupSpec(self._next(), self._group, greedy=self._greedy) for _ in range(count)]

    def observe(self, groups: Sequence[Group]) -> Metrics:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "position" not in state:
            raise UserError("the checkpoint was saved with replay or guidance; resume with replay.enabled as it was")
        self._position = state["position"]

    def _next(self) -> Task:
        epoch, index = divmod(self._position, len(self._tasks))
        if self._order[0] != epoch:
            order = list(range(len(self._tasks)))
            random.Random(derive(self._seed, "epoch", epoch)).shuffle(order)
            self._order = (epoch, order)
        self._position += 1
        return self._tasks[self._order[1][index]]


class Plan:
    """Gives each ticket its group, and keeps what was planned but not yet consumed for a checkpoint.

    A batch is planned whole when its first ticket starts; a refunded ticket gets one further group.
    """

    def __init__(self, curriculum: Curriculum, batch: int) -> None:
        self.curriculum = curriculum
        self._batch = batch
        self._waiting: deque[GroupSpec] = deque()
        self._started: dict[int, GroupSpec] = {}

    async def next(self, ticket: Ticket) -> GroupSpec:
        if not self._waiting:
            self._waiting.extend(await self.curriculum.propose(1 if ticket.attempt else self._batch))
        spec = self._waiting.popleft()
        self._started[ticket.number] = spec
        return spec

    def ended(self, ticket: int) -> None:
        """The ticket's group was consumed, or dropped for good."""
        del self._started[ticket]

    def state_dict(self) -> dict[str, Any]:
        open_specs = [*(spec for _, spec in sorted(self._started.items())), *self._waiting]
        return {"curriculum": self.curriculum.state_dict(), "planned": [spec_to_record(spec) for spec in open_specs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.curriculum.load_state_dict(state["curriculum"])
        self._started.clear()
        self._waiting = deque(spec_from_record(record) for record in state["planned"])
