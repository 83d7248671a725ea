"""The staleness bound. `StalenessController` decides when a group may start, `GroupQueue` which step consumes it.

A run consumes ``total_steps * batch`` groups, ``batch`` in each step. Each group is sampled under a *ticket*; tickets
are numbered from 0. Ticket ``k`` may start once ``k // batch <= version + staleness``, where ``version`` is the version
of the weights that were published last: version ``v`` is the result of the first ``v`` steps. The ticket's group is
consumed by a step in which the group is at most ``staleness`` versions old. Synchronous, pipelined, one-step-off and
asynchronous training differ only in the five values of `Schedule`.

**Why no group becomes older than the bound.** Let ``t`` be the step that is consuming groups, ``r`` the number of
groups that it still has to consume, ``B`` the number of groups per step and ``s`` the staleness bound. A ticket that
starts under version ``v`` gets the deadline ``v + s``: the last step that may consume its group. A ticket is
*outstanding* from its start until its group is consumed. The steps from ``t`` to ``t + j`` consume ``r + j*B`` more
groups. The invariant is therefore: for every ``j >= 0``, at most ``r + j*B`` outstanding tickets have a deadline of
``t + j`` or earlier. As long as it holds, every group can be consumed by its deadline.

* Starting a ticket keeps the invariant. All tickets started so far have numbers below ``(v + s + 1) * B``, where
  ``v <= t``, and ``(t + 1) * B - r`` groups have been consumed. So at most ``r + (v + s - t) * B`` tickets are
  outstanding, and the deadline of the new ticket is ``v + s``. This also holds if the ticket of a dropped group starts
  a second time, because the argument counts ticket numbers and not starts.
* Consuming ``n`` complete groups, earliest deadline first, keeps the invariant if and only if for every ``j`` the
  tickets *in flight* (started, but their groups are not complete) with a deadline of ``t + j`` or earlier can still be
  consumed in time: ``n <= r + j*B - in_flight(t + j)``. If this does not hold, complete groups wait in the queue until
  the more urgent groups in flight are complete. They are not cancelled.
* The rule cannot block forever. When no ticket is in flight, all complete groups may be consumed. The tickets that are
  outstanding or may start then number at least ``r``, because ``s >= 0`` and ``v = t``.

In an ordered schedule, the deadline of ticket ``k`` is ``k // batch``, the step that consumes its group. The classes
must be used within one event loop and are not thread-safe.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gleanrl.schedule.schedule import Schedule
from gleanrl.schedule.step_metrics import StalenessLog
from gleanrl.schedule.timeline import Timeline
from gleanrl.types import Group
from gleanrl.utils.errors import UserError
from gleanrl.utils.notifier import Notifier

STALE = "dropped_stale"
"""Reason for dropping a group that is older than the staleness bound. The metric ``groups/dropped_stale`` counts these
groups."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to sample one group, and the last step that may consume it."""

    number: int
    """Number of the group in the run, from 0."""
    attempt: int
    """How many groups of this ticket were dropped before."""
    version: int
    """Version of the weights that were published last when the ticket was handed out."""
    deadline: int
    """Number of the last step that may consume the group."""


class StalenessController:
    """Hands out tickets as early as the staleness bound allows, and tracks the state of each ticket.

    A ticket is waiting (not yet started, or to be started again because its group was dropped), in flight (its group is
    being sampled or scored), ready (its group is complete) or consumed. Request a ticket only when sampling can begin
    at once, because the deadline of its group is fixed when the ticket is handed out.

    ``first_step`` is 0 in a new run. After a restart it is the number of steps that were finished before, and the
    first ticket is ``first_step * batch``. If the schedule is not ordered, groups may have been consumed out of order
    before the restart; use `resume` in this case.
    """

    def __init__(self, schedule: Schedule, total_steps: int, first_step: int = 0) -> None:
        if not 0 <= first_step <= total_steps:
            raise ValueError(f"first_step {first_step} is not from 0 to total_steps {total_steps}")
        self.schedule = schedule
        self.total_steps = total_steps
        self.first_step = first_step
        self.version = first_step
        self.consumed = first_step * schedule.batch  # groups consumed since the run began, restarts included
        self.in_flight: Counter[int] = Counter()  # number of tickets in flight, by deadline
        self.changed = Notifier()
        self._next = first_step * schedule.batch
        self._again: list[tuple[int, int]] = []  # heap of (number, attempt) to hand out before _next
        self._refunded: list[tuple[int, int]] = []  # (number, attempt) of dropped groups, not in _again yet
        # After a restart: for tickets from number _next on, how many groups of the ticket were dropped, if any.
        self._attempts: dict[int, int] = {}
        self._ahead: set[int] = set()  # after a restart: tickets from number _next on that were already consumed
        self._outstanding: dict[int, Ticket] = {}
        self._sampling: set[int] = set()
        self._ready: set[int] = set()
        self._of_step: list[Ticket] = []  # tickets consumed since the last publication

    @classmethod
    def resume(cls, schedule: Schedule, total_steps: int, state: Mapping[str, Any]) -> StalenessController:
        """Return a controller that continues from the ``state`` that `state_dict` returned.

        It hands out exactly the tickets that had not been consumed when the state was saved.

        Raises:
            UserError: ``schedule.batch`` has changed since then, so that ticket numbers would belong to other steps.
        """
        if state["batch"] != schedule.batch:
            raise UserError(
                f"schedule.batch is {schedule.batch} but the run was saved with {state['batch']}: resume with the same"
            )
        controller = cls(schedule, total_steps, state["step"])
        controller._attempts = dict(state["attempts"])
        controller._again = [(number, controller._attempts.pop(number, 0)) for number in sorted(state["behind"])]
        controller._ahead = set(state["ahead"])
        return controller

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable record of which tickets have been consumed.

        Raises:
            ValueError: a step has consumed some of its groups but not all.
        """
        step, inside = divmod(self.consumed, self.schedule.batch)
        if inside:
            raise ValueError(f"step {step} has consumed {inside} groups; its account can be saved once it ends")
        boundary = step * self.schedule.batch
        again = dict([*self._again, *self._refunded])
        open_numbers = self._outstanding.keys() | again.keys()
        behind = {n for n in open_numbers if n < boundary} | set(range(self._next, boundary)) - self._ahead
        ahead = set(range(boundary, self._next)) - open_numbers | {n for n in self._ahead if n >= boundary}
        attempts = self._attempts | again | {n: t.attempt for n, t in self._outstanding.items()}
        return {
            "step": step,
            "batch": self.schedule.batch,
            "behind": sorted(behind),
            "ahead": sorted(ahead),
            "attempts": sorted((number, attempt) for number, attempt in attempts.items() if attempt),
        }

    async def ticket(self) -> Ticket | None:
        """Wait until the waiting ticket with the lowest number may start, and return it.

        Returns None when the run has consumed all its groups.
        """
        schedule = self.schedule
        while not self.finished:
            # Replacements could start while other groups are sampled, at times that depend on the durations of rewards.
            # Then the composition of the sampler's batches, and so the rounding, would depend on them, too. A
            # synchronous run is to be reproducible, so its replacements start only when no group is in flight.
            if self._refunded and not (schedule.in_waves and self.in_flight):
                for entry in self._refunded:
                    heapq.heappush(self._again, entry)
                self._refunded.clear()
            if self._again:
                number, attempt = heapq.heappop(self._again)
            else:
                while self._next in self._ahead:
                    self._next += 1
                number = self._next
                due = number // schedule.batch
                if due >= self.total_steps or due > self.version + schedule.staleness:
                    await self.changed.wait()
                    continue
                attempt = self._attempts.pop(number, 0)
                self._next += 1
            deadline = number // schedule.batch if schedule.ordered else self.version + schedule.staleness
            ticket = Ticket(number, attempt, self.version, deadline)
            self._outstanding[number] = ticket
            self._sampling.add(number)
            self.in_flight[deadline] += 1
            return ticket
        return None

    def published(self, version: int) -> None:
        """Record that the weights ``version`` were published to the sampler, so that further tickets may start."""
        if version < self.version:
            raise ValueError(f"version {version} published after version {self.version}")
        self.version = version
        self._of_step.clear()
        self.changed.notify()

    def undo_step(self) -> None:
        """Mark the groups that were consumed since the last publication as not consumed.

        Called before `state_dict` when an error ends the run within a step and the learner has undone the step, so that
        the resumed run samples these groups again.
        """
        self._outstanding |= {ticket.number: ticket for ticket in self._of_step}
        self.consumed -= len(self._of_step)
        self._of_step.clear()

    def refund(self, ticket: Ticket) -> None:
        """Take back the ticket of a dropped group, so that its number is handed out again before any new number.

        If the schedule is synchronous (staleness 0, and a chunk is the whole batch), it is handed out once no ticket is
        in flight.
        """
        self._land(ticket)
        del self._outstanding[ticket.number]
        self._ready.discard(ticket.number)
        self._refunded.append((ticket.number, ticket.attempt + 1))
        self.changed.notify()

    @property
    def finished(self) -> bool:
        """Whether no further ticket will be handed out."""
        return self.consumed >= self.total_steps * self.schedule.batch

    def sampled(self, ticket: Ticket) -> None:
        """Record that all episodes of the ticket's group have ended. Their rewards may still be pending."""
        self._sampling.discard(ticket.number)

    @property
    def ahead(self) -> bool:
        """Whether the groups that the unfinished step and the step after it still need have all been sampled.

        The unfinished step is the first one whose weights have not been published.
        """
        wanted = (self.version + 2) * self.schedule.batch - self.consumed
        return len(self._outstanding) - len(self._sampling) >= wanted

    def deliver(self, ticket: Ticket) -> None:
        """Record that the ticket's group is complete. Called by `GroupQueue`."""
        if ticket.number in self._ready:
            raise ValueError(f"ticket {ticket.number} was delivered twice")
        self._land(ticket)
        self._ready.add(ticket.number)

    def consume(self, ticket: Ticket) -> None:
        """Record that a step has consumed the ticket's group. Called by `GroupQueue`."""
        self._ready.remove(ticket.number)
        self._of_step.append(self._outstanding.pop(ticket.number))
        self.consumed += 1
        if self.finished:
            self.changed.notify()

    def _land(self, ticket: Ticket) -> None:
        if self._outstanding.get(ticket.number) != ticket:
            raise ValueError(f"ticket {ticket.number} (attempt {ticket.attempt}) is not outstanding")
        self._sampling.discard(ticket.number)
        if ticket.number not in self._ready:
            self.in_flight[ticket.deadline] -= 1
            if not self.in_flight[ticket.deadline]:
                del self.in_flight[ticket.deadline]


class GroupQueue:
    """Stores complete groups until the learner consumes them.

    If a sampler misses a publication, the version that sampled a group is older than the version in the group's ticket.
    A group that therefore exceeds the staleness bound is dropped: ``on_drop`` is called with the group, and its ticket
    is refunded.
    """

    def __init__(
        self,
        controller: StalenessController,
        *,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_drop: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self.controller = controller
        self._timeline, self._clock = timeline, clock
        self._on_drop = on_drop
        # Complete groups by deadline. Unless the schedule is ordered, a complete group's deadline follows from the
        # version of the oldest weights that sampled it, and not from the ticket.
        self._groups: defaultdict[int, deque[tuple[Ticket, Group]]] = defaultdict(deque)
        self._failure: BaseException | None = None
        self._changed = controller.changed
        self._step = controller.first_step
        self._left = controller.schedule.batch
        self._log = StalenessLog()

    def put(self, ticket: Ticket, group: Group) -> None:
        """Add a complete group, which was sampled under ``ticket``.

        Raises `ValueError` if the ticket belongs to another group or is not in flight.
        """
        if group.ticket != ticket.number:
            raise ValueError(f"group of ticket {group.ticket} delivered for ticket {ticket.number}")
        self.controller.deliver(ticket)
        if self._drop_if_too_old(ticket, group):
            return
        measured = group.version >= 0 and not self.controller.schedule.ordered
        deadline = group.version + self.controller.schedule.staleness if measured else ticket.deadline
        self._groups[deadline].append((ticket, group))
        self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Make `chunks` raise ``error`` instead of waiting for groups, because the task that produces them has failed.

        Only the first error is kept.
        """
        self._failure = self._failure or error
        self._changed.notify()

    async def chunks(self, step: int, *, adaptive: bool = False) -> AsyncIterator[list[Group]]:
        """Yield the ``batch`` groups of a step in chunks: lists of ``schedule.chunk`` groups.

        A chunk is yielded as soon as enough groups are complete. Only the last chunk of a step may be shorter, if
        ``chunk`` does not divide ``batch``. Groups with an earlier deadline are taken first, and groups with the same
        deadline in the order of their completion. Within a chunk, groups are sorted by ticket number, so that the order
        does not depend on timing if a chunk is the whole batch.

        If ``adaptive`` is true, all whole chunks that can be taken are yielded as one list. If the learner is slower
        than the sampler, this saves the fixed cost of several calls of the learner.

        Steps must be consumed in order. If the caller stops iterating within a step, the next call for this step yields
        the remaining groups.

        Raises:
            ValueError: ``step`` is neither the step of the previous call, nor, if all groups of that step have been
                yielded, the step after it.
            Exception: the error that was passed to `fail`.
        """
        if step != self._step:
            if step != self._step + 1 or self._left or step >= self.controller.total_steps:
                raise ValueError(f"step {step} cannot follow step {self._step} with {self._left} groups to come")
            self._step, self._left = step, self.controller.schedule.batch
            self._log = StalenessLog()
            for deadline, entries in self._groups.items():
                self._groups[deadline] = deque(entry for entry in entries if not self._drop_if_too_old(*entry))
        waiting_since: float | None = None
        while self._left:
            groups = self._take(adaptive)
            if not groups:
                waiting_since = self._clock() if waiting_since is None else waiting_since
                await self._changed.wait()
                continue
            if waiting_since is not None:
                end = self._clock()
                self._log.wait_s += end - waiting_since
                if self._timeline is not None and end > waiting_since:
                    self._timeline.record("wait", waiting_since, end, who="train", what="groups", step=step)
                waiting_since = None
            yield groups

    def metrics(self) -> dict[str, float]:
        """Return the ages of the groups and tokens of the step last passed to `chunks`, and how long it has waited.

        See `StalenessLog.metrics`.
        """
        return self._log.metrics()

    def _take(self, adaptive: bool) -> list[Group]:
        """Consume and return one chunk, or all whole chunks if ``adaptive``.

        Returns an empty list if too few groups are complete, or if complete groups must wait for more urgent groups in
        flight. Raises the error that was passed to `fail`.
        """
        if self._failure is not None:
            raise self._failure
        schedule = self.controller.schedule
        ready = 0
        for deadline, entries in self._groups.items():
            if not schedule.ordered or deadline <= self._step:
                ready += len(entries)
        available, in_flight = min(ready, self._left), 0
        # This is the condition of the proof in the module's docstring: n <= r + j*B - in_flight(t + j).
        for deadline, count in sorted(self.controller.in_flight.items()):
            in_flight += count
            available = min(available, self._left + (deadline - self._step) * schedule.batch - in_flight)

        count = min(schedule.chunk, self._left)
        if available < count:
            return []
        if adaptive:
            count = available if available == self._left else available - available % schedule.chunk
        taken: list[tuple[Ticket, Group]] = []
        for deadline in sorted(self._groups):
            entries = self._groups[deadline]
            while entries and len(taken) < count:
                taken.append(entries.popleft())
            if not entries:
                del self._groups[deadline]
        taken.sort(key=lambda entry: entry[0].number)
        groups = [group for _, group in taken]
        for ticket, _ in taken:
            self.controller.consume(ticket)
        self._left -= count
        self._log.add(groups, self._step)
        return groups

    def _drop_if_too_old(self, ticket: Ticket, group: Group) -> bool:
        if not 0 <= group.version < self._step - self.controller.schedule.staleness:
            return False
        self._on_drop(group)
        self.controller.refund(ticket)
        return True
