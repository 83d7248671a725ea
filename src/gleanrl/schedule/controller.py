"""The staleness bound: when a group may start (`StalenessController`) and which step consumes it (`GroupQueue`).

A run consumes ``total_steps * batch`` groups. Each has a ticket. Ticket ``k`` may start once ``k // batch <= version +
staleness``, and its group is consumed by a step that is still within the bound. Synchronous, pipelined, one-step-off
and asynchronous training differ in the five values of `Schedule` and in nothing else.

**Why no group grows older than the bound.** Let ``t`` be the step, ``r`` its free slots, ``B`` the batch and ``s`` the
bound. A ticket started under version ``v`` has the deadline ``v + s``. The invariant: for every ``j >= 0``, at most
``r + j*B`` outstanding tickets have a deadline up to ``t + j``. In other words, every ticket has a slot before its
deadline.

* Starting a ticket keeps the invariant. All tickets started so far have numbers below ``(v + s + 1) * B``, where
  ``v <= t``, and ``(t + 1) * B - r`` groups have been consumed. So at most ``r + (v + s - t) * B`` tickets are
  outstanding, and the deadline of the new one is ``v + s``. A refund and a second start change nothing, because the
  bound counts ticket numbers.
* Taking ``n`` complete groups, earliest deadline first, keeps the invariant exactly if for every ``j`` the tickets *in
  flight* with a deadline up to ``t + j`` still fit: ``n <= r + j*B - in_flight(t + j)``. Otherwise complete groups are
  withheld, not cancelled, until the urgent ones arrive.
* The rule cannot block forever. Once nothing is in flight, all complete groups may be taken, and there are at least as
  many tickets that may start or are outstanding as free slots (``s >= 0``, ``v = t``).

In an ordered schedule a ticket's deadline is the step that it is due in. The classes belong to one event loop and are
not thread-safe.
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
"""The reason for dropping a group older than the staleness bound. Metrics count it as ``groups/dropped_stale``."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to sample one group, and the last step that may consume it."""

    number: int
    attempt: int  # 0 at first, plus one for each group of this ticket that was dropped
    version: int  # version of the weights that were published when the ticket was handed out
    deadline: int


class StalenessController:
    """Hands out tickets as early as the staleness bound allows, and tracks the state of each.

    A ticket is waiting (to start, or to start again), in flight, ready or consumed. Request a ticket only when sampling
    can begin, because the age of its group counts from then. A new run starts at step 0. After a restart ``first_step``
    is the number of steps consumed, and tickets begin at ``first_step * batch``. Use `resume` if groups may have been
    consumed out of order.
    """

    def __init__(self, schedule: Schedule, total_steps: int, first_step: int = 0) -> None:
        if not 0 <= first_step <= total_steps:
            raise ValueError(f"first_step {first_step} is not from 0 to total_steps {total_steps}")
        self.schedule = schedule
        self.total_steps = total_steps
        self.first_step = first_step
        self.version = first_step
        self.consumed = first_step * schedule.batch  # groups consumed since the run began, restarts included
        self.started = 0  # tickets handed out by this process, repeated attempts included
        self.in_flight: Counter[int] = Counter()  # number of tickets in flight, by deadline
        self.changed = Notifier()
        self._next = first_step * schedule.batch
        self._again: list[tuple[int, int]] = []  # heap of (number, attempt) below _next
        self._attempts: dict[int, int] = {}  # after a restart: attempts of tickets from number _next on
        self._ahead: set[int] = set()  # numbers of tickets consumed out of order before a restart
        self._outstanding: dict[int, Ticket] = {}
        self._sampling: set[int] = set()
        self._ready: set[int] = set()
        self._of_step: list[Ticket] = []  # tickets consumed since the last publication
        self._stopped = False

    @classmethod
    def resume(cls, schedule: Schedule, total_steps: int, state: Mapping[str, Any]) -> StalenessController:
        """Return a controller that continues from a `state_dict`.

        It hands out exactly the tickets that had not been consumed when the state was saved.

        Raises:
            UserError: ``schedule.batch`` has changed, so that ticket numbers would belong to other steps.
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
        """Return a JSON-serialisable record of the consumed tickets.

        Raises:
            ValueError: called in the middle of a step.
        """
        step, inside = divmod(self.consumed, self.schedule.batch)
        if inside:
            raise ValueError(f"step {step} has consumed {inside} groups; its account can be saved once it ends")
        boundary = step * self.schedule.batch
        open_numbers = self._outstanding.keys() | {number for number, _ in self._again}
        behind = {n for n in open_numbers if n < boundary} | set(range(self._next, boundary)) - self._ahead
        ahead = set(range(boundary, self._next)) - open_numbers | {n for n in self._ahead if n >= boundary}
        attempts = self._attempts | dict(self._again) | {n: t.attempt for n, t in self._outstanding.items()}
        return {
            "step": step,
            "batch": self.schedule.batch,
            "behind": sorted(behind),
            "ahead": sorted(ahead),
            "attempts": sorted((number, attempt) for number, attempt in attempts.items() if attempt),
        }

    async def ticket(self) -> Ticket | None:
        """Wait until the lowest waiting number may start, and return its ticket. None if no further ticket follows."""
        schedule = self.schedule
        while not self.finished:
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
            self.started += 1
            return ticket
        return None

    def published(self, version: int) -> None:
        """Record that the sampler has received the weights ``version``."""
        if version < self.version:
            raise ValueError(f"version {version} published after version {self.version}")
        self.version = version
        self._of_step.clear()
        self.changed.notify()

    def undo_step(self) -> None:
        """Count groups consumed since the last publication as not consumed, for the `state_dict` of a run that ends."""
        self._outstanding |= {ticket.number: ticket for ticket in self._of_step}
        self.consumed -= len(self._of_step)
        self._of_step.clear()

    def refund(self, ticket: Ticket) -> None:
        """Take back the ticket of a dropped group, so that its number is handed out again before all later ones."""
        self._land(ticket)
        del self._outstanding[ticket.number]
        self._ready.discard(ticket.number)
        heapq.heappush(self._again, (ticket.number, ticket.attempt + 1))
        self.changed.notify()

    def stop(self) -> None:
        """Hand out no further ticket: `ticket` returns None."""
        self._stopped = True
        self.changed.notify()

    @property
    def finished(self) -> bool:
        return self._stopped or self.consumed >= self.total_steps * self.schedule.batch

    def sampled(self, ticket: Ticket) -> None:
        """Record that the ticket's episodes have ended. Their rewards may still be pending."""
        self._sampling.discard(ticket.number)

    @property
    def ahead(self) -> bool:
        """Whether all groups that this step and the next will consume have been sampled."""
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
    """Holds complete groups until the learner takes them.

    A group is dropped if the versions that really sampled it are older than the staleness bound: `on_drop` is called
    with the group, and its ticket is refunded. This happens only if a sampler missed a publication.
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
        self._groups: defaultdict[int, deque[tuple[Ticket, Group]]] = defaultdict(deque)  # complete groups by deadline
        self._failure: BaseException | None = None
        self._changed = controller.changed
        self._step = controller.first_step
        self._left = controller.schedule.batch
        self._log = StalenessLog()

    def put(self, ticket: Ticket, group: Group) -> None:
        """Deliver a complete group. Raises `ValueError` if the ticket is another group's, or is not in flight."""
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
        """Make the consumer raise ``error`` instead of waiting for a failed producer. The first error is kept."""
        self._failure = self._failure or error
        self._changed.notify()

    async def chunks(self, step: int, *, adaptive: bool = False) -> AsyncIterator[list[Group]]:
        """Yield the ``batch`` groups of a step in lists of ``chunk`` groups, each list as soon as it is complete.

        Only the last list of a step may be shorter, if ``chunk`` does not divide ``batch``. Groups come earliest
        deadline first, then in completion order. Inside a list they are sorted by ticket, so that with ``chunk ==
        batch`` the result does not depend on timing. ``adaptive`` puts all whole chunks that are ready into one list,
        which saves the learner's cost per call if the learner is the slower side.

        Steps must be taken in order. If the caller stops in the middle of a step, its next call for that step yields
        the remaining groups. Raises the error given to `fail`.
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
        """Return the step's metrics: staleness (in steps, by group and by sampled token) and seconds waited."""
        return self._log.metrics()

    def _take(self, adaptive: bool) -> list[Group]:
        """Consume and return a chunk. Empty if too few groups are complete or more urgent ones must come first."""
        if self._failure is not None:
            raise self._failure
        schedule = self.controller.schedule
        ready = 0
        for deadline, entries in self._groups.items():
            if not schedule.ordered or deadline <= self._step:
                ready += len(entries)
        available, in_flight = min(ready, self._left), 0
        for deadline, count in sorted(self.controller.in_flight.items()):  # see the proof in the module's docstring
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
