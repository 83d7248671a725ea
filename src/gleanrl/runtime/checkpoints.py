"""Writes, checks and loads the checkpoints of a run. Only complete checkpoints appear, and the last few are kept."""

from __future__ import annotations

import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from gleanrl.curriculum.plan import Plan
from gleanrl.protocols import Learner
from gleanrl.schedule.controller import StalenessController
from gleanrl.schedule.schedule import Schedule
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

_MANIFEST = "manifest.json"


class Checkpoints:
    """The folder ``checkpoints/``. Each ``step-N`` in it is complete, because it gets its name only once it is written.

    A manifest with the size and CRC32 of every file shows whether a checkpoint is damaged. ``unchecked`` names folders
    in a checkpoint that the manifest leaves out because they check themselves: the files of a trajectory buffer are
    links to files that still grow.
    """

    def __init__(self, folder: Path, keep: int, *, unchecked: Collection[str] = ()) -> None:
        self.folder, self.keep, self.unchecked = folder, keep, frozenset(unchecked)

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Write ``state`` (JSON) and the files that ``write`` puts into the folder, then delete the oldest checkpoints.

        An undamaged checkpoint of the same step is left as it is.

        Raises:
            UserError: the disk is full or the folder cannot be written. Earlier checkpoints are kept.
        """
        target = self.folder / f"step-{step}"
        self._sweep(step)
        if target.exists() and _find_fault(target) is None:
            return target
        with atomic.directory(target) as folder:
            write(folder)
            (folder / "state.json").write_text(json.dumps({"step": step, **state}))
            files = {
                str(path.relative_to(folder)): _fingerprint(path)
                for path in sorted(folder.rglob("*"))
                if path.is_file() and path.relative_to(folder).parts[0] not in self.unchecked
            }
            (folder / _MANIFEST).write_text(json.dumps(files, indent=1))
        for old in self._find_all()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest undamaged checkpoint and its state; None if there are no checkpoints.

        Raises:
            UserError: there are checkpoints, but every one of them is damaged.
        """
        damaged: list[str] = []
        for folder in reversed(self._find_all()):
            fault = _find_fault(folder)
            if fault is None:
                for line in damaged:
                    warnings.warn(f"{line}; continuing from {folder.name}", stacklevel=2)
                return folder, json.loads((folder / "state.json").read_text())
            damaged.append(f"checkpoint {folder} is damaged ({fault})")
        if damaged:
            raise UserError(f"{damaged[0]}, and no good one is left; start again without --resume")
        return None

    def _sweep(self, step: int) -> None:
        """Remove what no run will use: half-written folders of a killed process, and damaged later steps."""
        # later checkpoints are damaged, because the run would have resumed from an undamaged one
        later = [folder for folder in self._find_all() if int(folder.name[5:]) > step]
        for folder in [*self.folder.glob(f"{atomic.TEMPORARY_PREFIX}*"), *later]:
            shutil.rmtree(folder, ignore_errors=True)

    def _find_all(self) -> list[Path]:
        """Return the checkpoints, oldest first."""
        found = [path for path in self.folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[5:]))


def restore(
    checkpoints: Checkpoints, learner: Learner, plan: Plan, schedule: Schedule, total_steps: int
) -> StalenessController:
    """Load the newest undamaged checkpoint into ``learner`` and ``plan``; return the controller that continues from it.

    Without a checkpoint nothing changes and the controller starts at step 0.

    Raises:
        UserError: every checkpoint is damaged.
    """
    found = checkpoints.latest()
    if found is None:
        return StalenessController(schedule, total_steps)
    folder, state = found
    learner.load(folder)
    plan.load_state_dict(state["plan"])
    return StalenessController.resume(schedule, total_steps, state["controller"])


def check_checkpoint(folder: Path) -> None:
    """Raise `UserError` if ``folder`` is not a checkpoint or is damaged."""
    fault = _find_fault(folder)
    if fault is not None:
        raise UserError(f"checkpoint {folder} is damaged ({fault})")


def _find_fault(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        for name, expected in manifest.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if _fingerprint(path) != expected:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"{_MANIFEST}: {error}"
    return None


def _fingerprint(path: Path) -> dict[str, int]:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return {"bytes": path.stat().st_size, "crc32": crc}
