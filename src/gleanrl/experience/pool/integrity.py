"""Whether what lies in a pool's file is what was stored, and may be trained on here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gleanrl.experience.pool import admission, codec
from gleanrl.experience.pool.admission import Limits
from gleanrl.types import Trajectory


class Unfit(Exception):
    """A stored trajectory that must not be trained on; ``cause`` is what its eviction is counted under."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


class Noted(NamedTuple):
    """The columns of a stored trajectory."""

    entropy: float
    version: int
    temperature: float
    step: int
    uses: int


def noted(columns: Sequence[Any]) -> Noted:
    """Columns that make sense; SQLite would hold anything in them. Raises `Unfit`."""
    found = Noted(*columns)
    sensible = [type(value) for value in found] == [float, int, float, int, int]
    if not (sensible and math.isfinite(found.entropy) and 0 < found.temperature < math.inf):
        raise Unfit("damaged", "what is noted of it makes no sense")
    return found


def decoded(name: str, digest: bytes, data: bytes | None, limits: Limits = Limits()) -> Trajectory:  # noqa: B008 - frozen
    """The trajectory of a record of task ``name``. Raises `Unfit`."""
    try:
        trajectory = codec.decode_trajectory(data or b"")
    except codec.Damaged as error:
        raise Unfit("damaged", str(error)) from error
    if trajectory.task_id != name or codec.token_digest(trajectory) != digest or not trajectory.score.valid:
        raise Unfit("damaged", "it is not the one that was stored here")
    if cause := admission.unfit(trajectory, limits):
        raise Unfit(cause, admission.UNFIT[cause])
    return trajectory
