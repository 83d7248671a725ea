"""RLinf's replay buffer directories: read in place, and written.

A directory holds ``metadata.json``, ``trajectory_index.json`` (of old versions ``trajector_index.json``) and a file for
each trajectory, ``trajectory_{id}_{model_weights_id}.pt`` or, in other versions, with a uuid in its name.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.trajectory import INSTRUCTIONS, NESTED, TENSORS, Rows, TensorTrajectory
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

METADATA = "metadata.json"
INDEXES = ("trajectory_index.json", "trajector_index.json")


def is_directory(path: Path) -> bool:
    return (path / METADATA).is_file() and _index_path(path) is not None


def is_part(name: str) -> bool:
    """Whether a file of that name may be one of such a directory."""
    return name in (METADATA, *INDEXES) or (name.startswith("trajectory_") and name.endswith(".pt"))


def seed_of(path: Path) -> int | None:
    seed = _json(path / METADATA).get("seed")
    return seed if isinstance(seed, int) else None


class Directory:
    """Trajectories of a directory, in the order of its index. A file is mapped into memory when it is asked for.

    A file that is missing is an error when it is asked for: RLinf's checkpoints list trajectories that it did not copy.

    Args:
        path: the directory.
        pickles: read ``.pkl`` files too. A pickle can run any code when it is read: only for files of your own.

    Raises:
        UserError: it is none of RLinf's, its index is damaged, or it has pickles and they are not allowed.
    """

    def __init__(self, path: Path, *, pickles: bool = False) -> None:
        self.path = path
        index = _index_path(path)
        if index is None:
            raise UserError(f"{path}: no RLinf buffer; there would be {METADATA} and {INDEXES[0]}")
        self._index, self._stamp = index, _stamp(index)
        self.metadata, told = _json(path / METADATA), _json(index)
        try:
            known = {str(key): dict(value) for key, value in told["trajectory_index"].items()}
            listed = [str(key) for key in told.get("trajectory_id_list", told.get("trajectory_uuid_list", known))]
            self._entries = [(key, known[key]) for key in listed if key in known]
            self._counts = [int(entry["num_samples"]) for _, entry in self._entries]
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{index}: not an index of RLinf's ({error})") from None
        found = [file for file in os.scandir(path) if file.name.startswith("trajectory_")]
        self._sizes = {file.name: file.stat().st_size for file in sorted(found, key=lambda file: file.name)}
        self._files = [self._file(key, entry) for key, entry in self._entries]
        pickled = next((name for name in self._files if name is not None and name.endswith(".pkl")), None)
        if pickled is not None and not pickles:
            why = "a pickle can run any code when it is read; allow it (pickles=True) for files of your own only"
            raise UserError(f"{path / pickled}: {why}")

    def __len__(self) -> int:
        return len(self._entries)

    def counts(self) -> list[int]:
        """Rows of each trajectory."""
        return self._counts

    def shapes(self) -> np.ndarray[Any, Any]:
        """int64 ``[2, n]``: T and B of each trajectory, by the index, or by its file where the index says nothing."""
        found = np.zeros((2, len(self)), np.int64)
        for index, ((_, entry), count) in enumerate(zip(self._entries, self._counts, strict=True)):
            steps, batch = [*entry.get("shape", ()), 0, 0][:2]
            if steps * batch != count:
                rows = self.trajectory(index)
                steps, batch = rows.steps, rows.batch
            found[:, index] = steps, batch
        return found

    def representatives(self) -> list[int]:
        """One trajectory of each shape and length of file: files that are alike in both hold the same fields."""
        known: dict[Any, int] = {}
        for index, (_, entry) in enumerate(self._entries):
            if (name := self._files[index]) is not None:
                known.setdefault((str(entry.get("shape")), self._sizes[name]), index)
        return list(known.values())

    @property
    def nbytes(self) -> int:
        """Of the trajectories' files."""
        return sum(self._sizes[name] for name in self._files if name is not None)

    def changed(self) -> bool:
        """Whether somebody has written the index since."""
        try:
            return _stamp(self._index) != self._stamp
        except FileNotFoundError:
            return False

    def continues(self, other: Directory) -> bool:
        """Whether its first trajectories are all those of another."""
        return self._entries[: len(other)] == other._entries

    def missing(self) -> list[int]:
        """Trajectories that have no file."""
        return [index for index, name in enumerate(self._files) if name is None]

    def name(self, index: int) -> str:
        """The path of a trajectory's file, for a message."""
        key, entry = self._entries[index]
        return str(self.path / (self._files[index] or f"trajectory_{key}_{entry.get('model_weights_id', '')}.pt"))

    def trajectory(self, index: int) -> Rows:
        """Raises `UserError` where the file is missing or damaged."""
        if self._files[index] is None:
            raise UserError(f"{self.name(index)}: missing; the index lists it")
        entry = self._entries[index][1]
        told = {name: entry[name] for name in ("max_episode_length", "model_weights_id") if name in entry}
        fields = _load(Path(self.name(index)))
        return Rows.of(TensorTrajectory.of(_as_rlinf_reads({**told, **fields}, entry)))

    def checked(self, index: int) -> Rows:
        """`trajectory`, if its file is as it was written; else raises `UserError`."""
        rows = self.trajectory(index)
        self.check(index)
        return rows

    def check(self, index: int) -> None:
        """Read a whole file. Raises `UserError` where its checksums, which torch writes, do not match."""
        file = Path(self.name(index))
        if file.suffix == ".pt":
            try:
                with zipfile.ZipFile(file) as archive:
                    broken = archive.testzip()
            except (OSError, zipfile.BadZipFile) as error:
                raise UserError(f"{file}: cannot be read ({error})") from None
            if broken is not None:
                raise UserError(f"{file}: what it holds is not what was written (checksum of {broken})")

    def close(self) -> None:
        """Nothing is kept open."""

    def _file(self, key: str, entry: Mapping[str, Any]) -> str | None:
        weights = entry.get("model_weights_id", "")
        for stem in (f"trajectory_{key}_{weights}", f"trajectory_{key}", f"trajectory_{entry.get('uuid', key)}"):
            for suffix in (".pt", ".pkl"):
                if stem + suffix in self._sizes:
                    return stem + suffix
        begins = f"trajectory_{entry.get('trajectory_id', key)}_"
        return next((name for name in self._sizes if name.startswith(begins)), None)


def export(path: Path, trajectories: Iterable[Rows], *, seed: int, counter: int | None = None) -> int:
    """Write trajectories as RLinf would, whole or not at all; how many."""
    index: dict[str, dict[str, Any]] = {}
    rows_total = 0
    with atomic.directory(path) as folder:
        for number, rows in enumerate(trajectories):
            trajectory = rows.trajectory()
            weights = rows.weights.replace("/", "_")  # it is part of a file's name
            torch.save(
                {**_saved(trajectory), "model_weights_id": weights}, folder / f"trajectory_{number}_{weights}.pt"
            )
            shape = (rows.columns.get(("prev_logprobs",)), rows.columns.get(("rewards",)))
            column = next((own for own in shape if own is not None), next(iter(rows.columns.values())))
            index[str(number)] = {
                "num_samples": rows.count,
                "trajectory_id": number,
                "max_episode_length": rows.max_episode_length,
                "shape": [rows.steps, rows.batch, *column.shape[1:]],
                "model_weights_id": weights,
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
    return {name: value for name, value in values.items() if value is not None}


def _load(file: Path) -> dict[str, Any]:
    try:
        if file.suffix != ".pkl":
            return _fields(file, torch.load(file, map_location="cpu", mmap=True, weights_only=True))
        with file.open("rb") as stream:
            return _fields(file, pickle.load(stream))
    except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: cannot be read ({str(error).splitlines()[0]})") from None


def _as_rlinf_reads(fields: dict[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Without what RLinf passes over: values that are no tensors ``[T, B, ...]``. Instructions are kept."""
    found = {name: value for name, value in fields.items() if name not in (*TENSORS, *NESTED)}
    for name in TENSORS:
        if isinstance(value := fields.get(name), Tensor) and value.dim() >= 2:
            found[name] = value
    for name in NESTED:
        if isinstance(value := fields.get(name), Mapping):
            found[name] = _tensors_of(value)
    if (values := found.get("prev_values")) is not None:
        found["prev_values"] = _by_step(values, entry)
    return found


def _tensors_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found[name] = _tensors_of(value)
        elif name == INSTRUCTIONS or (isinstance(value, Tensor) and value.dim() >= 2):
            found[name] = value
    return found


def _by_step(values: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """``[T + E, B, ...]`` of values that RLinf left as ``[(T + E) * B, ...]``, as its checkpoints from memory do."""
    steps, batch = [*entry.get("shape", ()), 0, 0][:2]
    more = values.shape[0] - steps * batch
    flat = batch > 1 or values.dim() == 2  # of one environment, [T + E, 1, 1] is not flat
    if flat and batch and more > 0 and more % batch == 0 and steps % (more // batch) == 0:
        return values.reshape(-1, batch, *values.shape[1:])
    return values


def _index_path(path: Path) -> Path | None:
    return next((path / name for name in INDEXES if (path / name).is_file()), None)


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


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
