"""Assigns a planned group to each ticket of a run, and saves the planned groups that are unfinished in checkpoints.

A run consumes a fixed number of groups. Each of these has a number, its *ticket* (see `gleanrl.schedule.controller`).
"""

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
    """Assigns planned groups to tickets, and reports to the curriculum which groups were trained on and which were
    dropped.

    The curriculum plans a whole batch when the first ticket of the batch starts. If the group of a ticket was dropped,
    the ticket starts again with another group: one that was planned and has no ticket yet or, if there is none, one
    that the curriculum plans now.

    The state contains the planned groups that are not finished, so a resumed run samples the same groups again.
    """

    def __init__(self, curriculum: Curriculum, batch: int) -> None:
        self.curriculum = curriculum
        self._batch = batch
        self._waiting: deque[GroupSpec] = deque()  # planned groups that have no ticket yet
        self._resumed: dict[int, GroupSpec] = {}  # the groups of the loaded checkpoint, by ticket number
        self._started: dict[int, GroupSpec] = {}  # the groups of tickets that have started, by ticket number
        self._dropped: list[tuple[str, Group]] = []  # (reason, group) of the groups dropped since the last step
        self.refused: Sequence[Group] = ()
        """The dropped groups that the latest call of `observe` reported to the curriculum."""

    async def next(self, ticket: Ticket) -> GroupSpec:
        spec = self._resumed.pop(ticket.number, None)
        if spec is None:
            if not self._waiting:
                self._waiting.extend(await self.curriculum.propose(1 if ticket.attempt else self._batch))
            spec = self._waiting.popleft()
        self._started[ticket.number] = spec
        return spec

    def drop(self, group: Group, reason: str) -> None:
        """Record that ``group`` was dropped for ``reason`` and will not be trained on.

        The next call of `observe` reports it to the curriculum.
        """
        del self._started[group.ticket]
        self._dropped.append((reason, replace(group, dropped=True)))

    def dropped(self, reason: str) -> int:
        """Return the number of groups dropped for ``reason`` since the last call of `observe`."""
        return sum(why == reason for why, _ in self._dropped)

    def observe(self, consumed: Sequence[Group], training: Metrics) -> Metrics:
        """Report to the curriculum the groups that a step consumed, and the groups dropped since the step before.

        ``training`` holds the metrics of the step, which a curriculum may use.

        Returns the curriculum's metrics, for each reason the number of groups dropped for it, as ``groups/<reason>``,
        and the number of fresh episodes in all these groups, with the number of those whose score failed.
        """
        for group in consumed:
            del self._started[group.ticket]
        dropped, self._dropped = self._dropped, []
        counts = Counter(f"groups/{reason}" for reason, _ in dropped)
        # The order in which groups are dropped depends on timing. Sorting by ticket keeps the curriculum's state
        # reproducible.
        self.refused = sorted((group for _, group in dropped), key=lambda group: group.ticket)
        fresh = [trajectory for group in (*consumed, *self.refused) for trajectory in group.fresh]
        counts["episode/ended"] = len(fresh)
        counts["episode/failed"] = sum(t.score.applicable and not t.score.valid for t in fresh)
        metrics = self.curriculum.observe([*consumed, *self.refused], training)
        return {**{name: float(count) for name, count in counts.items()}, **metrics}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the plan and of its curriculum as JSON-serialisable values."""
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
