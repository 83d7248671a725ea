"""Writes, verifies and loads the checkpoints of a run, and deletes all but the newest ones.

A checkpoint is written to a temporary folder, which is renamed when it is complete. A crash therefore never leaves an
incomplete checkpoint under a checkpoint's name.
"""

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
from gleanrl.runtime.run_folder import Checkpoint, RunFolder
from gleanrl.schedule.controller import StalenessController
from gleanrl.schedule.schedule import Schedule
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

_MANIFEST = "manifest.json"


class Checkpoints:
    """The folder that contains the checkpoints of a run as subfolders ``step-N``.

    Each checkpoint contains a manifest with the size and CRC32 of its files, by which damage is detected.

    Args:
        keep: number of checkpoints to keep; `save` deletes older ones.
        unchecked: names of subfolders of a checkpoint whose files are not listed in the manifest. The files of a
            trajectory buffer are hard links to files that still grow, so a checksum would not stay valid; the buffer
            verifies them itself.
    """

    def __init__(self, folder: Path, keep: int, *, unchecked: Collection[str] = ()) -> None:
        self.folder, self.keep, self.unchecked = folder, keep, frozenset(unchecked)

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None], kept: Collection[int] = ()) -> Path:
        """Save a checkpoint of ``step``, delete all but the newest ``keep`` checkpoints, and return its path.

        The checkpoints of the steps in ``kept`` are not deleted either.

        ``state`` must be representable in JSON. ``write`` is called with the checkpoint's folder and writes further
        files into it. If an undamaged checkpoint of ``step`` exists, it is not written again. Checkpoints of later
        steps are deleted.

        Raises:
            UserError: the disk is full or the folder cannot be written. Existing checkpoints are kept in this case.
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
            if int(old.name[5:]) not in kept:
                shutil.rmtree(old, ignore_errors=True)
        return target

    def exist(self) -> bool:
        """Return whether there are checkpoints, so that `latest` finds one or raises."""
        return bool(self._find_all())

    def find(self, step: int) -> Path | None:
        """Return the folder of the checkpoint of ``step``; None if there is no undamaged one."""
        folder = self.folder / f"step-{step}"
        return folder if folder.is_dir() and _find_fault(folder) is None else None

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the folder and the state of the newest undamaged checkpoint, or None if there are no checkpoints.

        Damaged checkpoints that are newer are skipped with a warning.

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
        """Delete temporary folders that a killed process left, and the checkpoints of steps after ``step``."""
        # A checkpoint of a later step must be damaged: otherwise the run would have resumed from it.
        later = [folder for folder in self._find_all() if int(folder.name[5:]) > step]
        for folder in [*self.folder.glob(f"{atomic.TEMPORARY_PREFIX}*"), *later]:
            shutil.rmtree(folder, ignore_errors=True)

    def _find_all(self) -> list[Path]:
        """Return the folders of all checkpoints, damaged ones included, ordered by step."""
        found = [path for path in self.folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[5:]))


def restore(
    found: tuple[Path, dict[str, Any]] | None, learner: Learner, plan: Plan, schedule: Schedule, total_steps: int
) -> StalenessController:
    """Load a checkpoint into ``learner`` and ``plan``, and return its staleness controller.

    ``found`` is what `Checkpoints.latest` returned. If it is None, ``learner`` and ``plan`` stay unchanged and the
    returned controller starts at step 0.
    """
    if found is None:
        return StalenessController(schedule, total_steps)
    folder, state = found
    learner.load(folder)
    plan.load_state_dict(state["plan"])
    return StalenessController.resume(schedule, total_steps, state["controller"])


def find_checkpoint(path: Path) -> tuple[RunFolder, Checkpoint]:
    """Return the checkpoint at ``path``, or the newest undamaged one if ``path`` is a run folder, and its run.

    Raises:
        UserError: there is no run at ``path``, it has no checkpoint yet, or the checkpoint is damaged.
    """
    if path.resolve().parent.name == "checkpoints" and not RunFolder(path).config_path.exists():
        if not path.is_dir():
            raise UserError(f"no checkpoint at {path}")
        fault = _find_fault(path)
        if fault is not None:
            raise UserError(f"checkpoint {path} is damaged ({fault})")
        step = json.loads((path / "state.json").read_text())["step"]
        return RunFolder(path.resolve().parent.parent), Checkpoint(step, path)
    run = RunFolder.existing(path)
    found = Checkpoints(run.checkpoints_path, keep=1).latest()
    if found is None:
        raise UserError(f"{path} has no checkpoint yet; it is written every checkpoint.every steps and at the end")
    return run, Checkpoint(found[1]["step"], found[0])


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
