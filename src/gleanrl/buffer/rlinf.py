"""RLinf's replay buffer directories: read in place, and written.

A directory holds ``metadata.json``, ``trajectory_index.json`` (of old versions ``trajector_index.json``) and a file for
each trajectory, ``trajectory_{id}_{model_weights_id}.pt`` or, in other versions, with a uuid in its name.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gleanrl import atomic
from gleanrl.buffer.trajectory import Rows, TensorTrajectory
from gleanrl.errors import UserError

METADATA = "metadata.json"
INDEXES = ("trajectory_index.json", "trajector_index.json")


def is_directory(path: Path) -> bool:
    return (path / METADATA).is_file() and _index_path(path) is not None


def seed_of(path: Path) -> int | None:
    seed = _json(path / METADATA).get("seed")
    return seed if isinstance(seed, int) else None


class Directory:
    """Trajectories of a directory, in the order of its index. A file is mapped into memory when it is asked for.

    Args:
        path: the directory.
        pickles: read ``.pkl`` files too. A pickle can run any code when it is read: only for files of your own.
    """

    def __init__(self, path: Path, *, pickles: bool = False) -> None:
        self.path, self._pickles = path, pickles
        index = _index_path(path)
        if index is None:
            raise UserError(f"{path}: no RLinf buffer; there would be {METADATA} and {INDEXES[0]}")
        self.metadata = _json(path / METADATA)
        told = _json(index)
        try:
            known = {str(key): value for key, value in told["trajectory_index"].items()}
            listed = [str(key) for key in told.get("trajectory_id_list", told.get("trajectory_uuid_list", known))]
        except (KeyError, AttributeError) as error:
            raise UserError(f"{index}: not an index of RLinf's ({error})") from None
        self._entries = [(key, known[key]) for key in listed if key in known]
        self._files = {file.name: file for file in sorted(path.glob("trajectory_*"))}
        missing = [key for key, entry in self._entries if self._file(key, entry) is None]
        if missing:
            raise UserError(f"{path}: {len(missing)} of {len(listed)} trajectory files are missing, first {missing[0]}")

    def __len__(self) -> int:
        return len(self._entries)

    def counts(self) -> list[int]:
        """Rows of each trajectory."""
        return [int(entry["num_samples"]) for _, entry in self._entries]

    def trajectory(self, index: int) -> Rows:
        """Raises `UserError` where the file is damaged or, without opt-in, a pickle."""
        key, entry = self._entries[index]
        file = self._file(key, entry)
        assert file is not None
        fields = {**entry_fields(entry), **self._load(file)}
        return Rows.of(TensorTrajectory.of(fields))

    def close(self) -> None:
        """Nothing is kept open."""

    def _file(self, key: str, entry: Mapping[str, Any]) -> Path | None:
        weights = entry.get("model_weights_id", "")
        for stem in (f"trajectory_{key}_{weights}", f"trajectory_{key}", f"trajectory_{entry.get('uuid', key)}"):
            for suffix in (".pt", ".pkl"):
                if (file := self._files.get(stem + suffix)) is not None:
                    return file
        begins = f"trajectory_{entry.get('trajectory_id', key)}_"
        return next((file for name, file in self._files.items() if name.startswith(begins)), None)

    def _load(self, file: Path) -> dict[str, Any]:
        if file.suffix == ".pkl":
            if not self._pickles:
                why = "a pickle can run any code when it is read; allow it (pickles=True) for files of your own only"
                raise UserError(f"{file}: {why}")
            with file.open("rb") as stream:
                return _fields(file, pickle.load(stream))
        try:
            return _fields(file, torch.load(file, map_location="cpu", mmap=True, weights_only=True))
        except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as error:
            raise UserError(f"{file}: cannot be read ({str(error).splitlines()[0]})") from None


def entry_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the index knows of a trajectory."""
    return {name: entry[name] for name in ("max_episode_length", "model_weights_id") if name in entry}


def export(path: Path, trajectories: Iterable[Rows], *, seed: int, counter: int | None = None) -> int:
    """Write trajectories as RLinf would, whole or not at all; how many."""
    index: dict[str, dict[str, Any]] = {}
    rows_total = 0
    with atomic.directory(path) as folder:
        for number, rows in enumerate(trajectories):
            trajectory = rows.trajectory()
            torch.save(_saved(trajectory), folder / f"trajectory_{number}_{rows.weights}.pt")
            shape = (rows.columns.get(("prev_logprobs",)), rows.columns.get(("rewards",)))
            column = next((own for own in shape if own is not None), next(iter(rows.columns.values())))
            index[str(number)] = {
                "num_samples": rows.count,
                "trajectory_id": number,
                "max_episode_length": rows.max_episode_length,
                "shape": [rows.steps, rows.batch, *column.shape[1:]],
                "model_weights_id": rows.weights,
            }
            rows_total += rows.count
        told = {"trajectory_index": index, "trajectory_id_list": [int(key) for key in index]}
        (folder / INDEXES[0]).write_text(json.dumps(told))
        metadata = {
            **{"trajectory_format": "pt", "size": len(index), "total_samples": rows_total},
            **{"trajectory_counter": len(index) if counter is None else counter, "seed": seed},
        }
        (folder / METADATA).write_text(json.dumps(metadata))
    return len(index)


def _saved(trajectory: TensorTrajectory) -> dict[str, Any]:
    names = TensorTrajectory.__dataclass_fields__
    values = {name: getattr(trajectory, name) for name in names if name != "success"}
    values["task_descriptions"] = None if not values["task_descriptions"] else list(values["task_descriptions"])
    return {name: value for name, value in values.items() if value is not None and value != {}}


def _index_path(path: Path) -> Path | None:
    return next((path / name for name in INDEXES if (path / name).is_file()), None)


def _json(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); it may have been torn by a crash") from None
    if not isinstance(told, dict):
        raise UserError(f"{path}: not RLinf's")
    return told


def _fields(file: Path, told: Any) -> dict[str, Any]:
    if isinstance(told, Mapping):
        return dict(told)
    raise UserError(f"{file}: holds {type(told).__name__}, not the fields of a trajectory")
