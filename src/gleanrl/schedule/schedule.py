"""A schedule: five values that say how sampling, rewards and updates overlap. Each preset is a choice of values."""

from __future__ import annotations

from dataclasses import dataclass

from gleanrl.config.settings import ScheduleSettings
from gleanrl.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class Schedule:
    """Values that determine how sampling, rewards and updates overlap.

    ``batch``: groups per step. ``chunk``: groups that the learner takes at once. ``staleness``: how many
    versions old a group may be when it is consumed. ``ordered``: each step consumes exactly the tickets
    due in it. ``inflight``: the sampler takes new weights in the middle of an episode. Raises
    `UserError` if a number is out of range.
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

    @classmethod
    def from_settings(cls, settings: ScheduleSettings) -> Schedule:
        """Return the schedule of a preset. Raises `UserError` if ``chunks`` does not divide ``batch``."""
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
