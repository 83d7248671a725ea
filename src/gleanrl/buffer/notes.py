"""What a record says of a trajectory, so that nobody has to read its rows for it."""

from __future__ import annotations

from typing import Any

from gleanrl.buffer.log import FAILURE, INTERVENED, SUCCESS
from gleanrl.buffer.trajectory import Rows


def noted(rows: Rows) -> dict[str, Any]:
    """Fields of `log.RECORD`: flags, versions, sum of rewards, episodes that ended."""
    low, high = _versions(rows)
    return {
        **{"flags": _flags(rows), "version_low": low, "version_high": high, "reward": _total(rows)},
        **{"steps": rows.steps, "batch": rows.batch, "epochs": rows.epochs, "episodes": int(rows.ends().sum())},
    }


def _flags(rows: Rows) -> int:
    intervened = rows.columns.get(("intervene_flags",))
    known = {None: 0, True: SUCCESS, False: FAILURE}[rows.success]
    return known | (INTERVENED if intervened is not None and bool(intervened.any()) else 0)


def _versions(rows: Rows) -> tuple[float, float]:
    versions = rows.columns.get(("versions",))
    return (float(versions.min()), float(versions.max())) if versions is not None else (-1.0, -1.0)


def _total(rows: Rows) -> float:
    rewards = rows.columns.get(("rewards",))
    return float(rewards.double().sum()) if rewards is not None else 0.0
