"""The plan of a run: which group each ticket gets, in a form that survives a restart."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gleanrl.protocols import Curriculum, Metrics
from gleanrl.schedule.controller import Ticket
from gleanrl.types import Group, GroupSpec
from gleanrl.utils import serialize


class Plan:
    """Gives each ticket its group, reports to the curriculum what became of the group, and saves unfinished groups.

    The curriculum plans a whole batch when the first ticket of the batch starts. For a refunded ticket, which replaces
    a group that was dropped, it plans one more group.
    """

    def __init__(self, curriculum: Curriculum, batch: int) -> None:
        self.curriculum = curriculum
        self._batch = batch
        self._waiting: deque[GroupSpec] = deque()  # planned groups that have no ticket yet
        self._resumed: dict[int, GroupSpec] = {}  # ticket number -> its group when the run was saved
        self._started: dict[int, GroupSpec] = {}
        self._dropped: list[tuple[str, Group]] = []  # reason and group, for groups dropped since the last step

    async def next(self, ticket: Ticket) -> GroupSpec:
        spec = self._resumed.pop(ticket.number, None)
        if spec is None:
            if not self._waiting:
                self._waiting.extend(await self.curriculum.propose(1 if ticket.attempt else self._batch))
            spec = self._waiting.popleft()
        self._started[ticket.number] = spec
        return spec

    def drop(self, group: Group, reason: str) -> None:
        """Record that ``group`` is not trained on. The curriculum observes it with the groups of the next step."""
        del self._started[group.ticket]
        self._dropped.append((reason, replace(group, dropped=True)))

    def dropped(self, reason: str) -> int:
        """Return the number of groups dropped for ``reason`` since the last step."""
        return sum(why == reason for why, _ in self._dropped)

    def observe(self, consumed: Sequence[Group]) -> Metrics:
        """Pass the groups of a step and the dropped groups to the curriculum.

        Returns the curriculum's metrics and the number of groups dropped for each reason.
        """
        for group in consumed:
            del self._started[group.ticket]
        dropped, self._dropped = self._dropped, []
        counts = Counter(f"groups/{reason}" for reason, _ in dropped)
        # sorted by ticket, because the order in which groups were dropped depends on timing
        refused = sorted((group for _, group in dropped), key=lambda group: group.ticket)
        metrics = self.curriculum.observe([*consumed, *refused])
        return {**{name: float(count) for name, count in counts.items()}, **metrics}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the plan and its curriculum, JSON-serialisable."""
        started = sorted((self._resumed | self._started).items())
        return {
            "curriculum": self.curriculum.state_dict(),
            "started": serialize.to_builtins(started),
            "waiting": serialize.to_builtins(list(self._waiting)),
            "dropped": serialize.to_builtins(self._dropped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.curriculum.load_state_dict(state["curriculum"])
        self._resumed = dict(serialize.from_builtins(state["started"], list[tuple[int, GroupSpec]]))
        self._waiting = deque(serialize.from_builtins(state["waiting"], list[GroupSpec]))
        self._started.clear()
        self._dropped = serialize.from_builtins(state["dropped"], list[tuple[str, Group]])
