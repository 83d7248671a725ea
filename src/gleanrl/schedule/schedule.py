"""Defines `Schedule`: five values that determine how sampling, rewards and updates overlap.

Each preset of `ScheduleSettings` is a choice of these values.
"""

from __future__ import annotations

from dataclasses import dataclass

from gleanrl.config.settings import ScheduleSettings
from gleanrl.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class Schedule:
    """Values that determine how sampling, rewards and updates overlap.

    Attributes:
        batch: number of groups that a step consumes.
        chunk: number of groups that the learner receives in one call, or with ``adaptive = true`` a multiple of it.
        staleness: how many versions old a group may be when it is consumed.
        ordered: True if groups are consumed in the order in which they were started: step ``t`` consumes those with the
            numbers (tickets) ``t * batch`` to ``(t + 1) * batch - 1``. If False, a step consumes any complete groups.
        inflight: True if the sampler uses new weights at once, also in the middle of an episode.

    Raises:
        UserError: a number is out of range.
    """

    batch: int
    chunk: int
    staleness: int = 0
    ordered: bool = False
    inflight: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UserError(f"schedule.batch is {self.batch}: a step needs at least 1 group")
        if not 1 <= self.chunk <= self.batch:
            raise UserError(f"a schedule's chunk is {self.chunk}: it must be from 1 to the batch ({self.batch} groups)")
        if self.staleness < 0:
            raise UserError(f"schedule.staleness is {self.staleness}: it must be 0 or more steps")

    @property
    def in_waves(self) -> bool:
        """Whether no group is sampled from the time at which the learner gets a batch until the next publication."""
        return self.staleness == 0 and self.chunk == self.batch

    @classmethod
    def from_settings(cls, settings: ScheduleSettings) -> Schedule:
        """Return the schedule of the preset in ``settings``.

        Raises `UserError` if the preset divides batches into chunks and ``chunks`` does not divide ``batch``.
        """
        batch, chunks, preset = settings.batch, settings.chunks, settings.preset
        if preset == "sync":
            return cls(batch, batch, 0, ordered=True)
        if preset == "one_step_off":
            return cls(batch, batch, 1, ordered=True)
        if batch % chunks:
            divisors = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
            raise UserError(
                f"schedule.chunks = {chunks} does not divide schedule.batch = {batch}; use one of {divisors}"
            )
        if preset == "pipelined":
            return cls(batch, batch // chunks, 0)
        if preset == "pipelined_one_step_off":
            return cls(batch, batch // chunks, 1)
        return cls(batch, batch // chunks, settings.staleness, inflight=True)  # bounded_async
