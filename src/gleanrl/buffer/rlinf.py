"""Reads and writes the replay buffer directories of RLinf, an RL framework for embodied agents.

A directory contains ``metadata.json``, ``trajectory_index.json`` (in old versions ``trajector_index.json``) and a file
``trajectory_{id}_{model_weights_id}.pt`` for each trajectory. In old versions of RLinf a trajectory has a uuid, which
is its key in the index, and its file is called ``trajectory_{id}_{uuid}.pt``.

`RLinfReader` maps these files into memory and samples from them without conversion. One table has the rows of all
trajectories in the order of RLinf's index. With the same seed and window, the buffer therefore draws the same rows as
RLinf's own buffer. `export` writes trajectories as such a directory.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from gleanrl.buffer.columns import Field
from gleanrl.buffer.files import Files
from gleanrl.buffer.log import INTERVENED, RECORD
from gleanrl.buffer.reader import Reader, Snapshot
from gleanrl.buffer.table import INSTRUCTION, LEFT, Index, Schema
from gleanrl.buffer.trajectory import (
    INSTRUCTIONS,
    NOT_TENSORS,
    FieldPath,
    FlatTrajectory,
    TensorTrajectory,
    TrajectoryBlock,
    steps_left,
)
from gleanrl.buffer.writer import BufferWriter, block_statistics
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

METADATA = "metadata.json"
INDEXES = ("trajectory_index.json", "trajector_index.json")
# Largest number of files that are mapped at once. A mapped file occupies address space and a few kB of memory, while
# opening a file takes about a millisecond.
OPEN_FILES = 1024
FILE_NAME = re.compile(r"trajectory_(\d+)_(.+)\.(pt|pkl)")
UUID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}")


def is_directory(path: Path) -> bool:
    """Return whether the folder ``path`` is a replay buffer directory of RLinf."""
    return (path / METADATA).is_file() and _index_path(path) is not None


def is_part(name: str) -> bool:
    """Return whether a file with this name may be a part of a directory of RLinf."""
    return name in (METADATA, *INDEXES) or (name.startswith("trajectory_") and name.endswith(".pt"))


def seed_of(path: Path) -> int | None:
    seed = _read_json(path / METADATA).get("seed")
    return seed if isinstance(seed, int) else None


class Directory:
    """The index and the files of a directory of RLinf.

    Trajectories are identified by their position in the index. RLinf's checkpoints may list trajectories that they do
    not contain, so a missing file is an error only when it is read.

    Args:
        path: the directory.
        pickles: also read ``.pkl`` files. A pickle can run any code when it is read.

    Attributes:
        entries: for each trajectory, its key and its value in the index.
        counts: for each trajectory, its number of rows.
        files: for each trajectory, the name of its file; None if the file is missing (see `find`).
        sizes: size of each file in bytes, by file name.
        index: path of the index file.
        stamp: modification time, size and inode number of the index file. They show whether RLinf has rewritten it.

    Raises:
        UserError: ``path`` is not a directory of RLinf, its index is damaged, or it has pickles that are not allowed.
    """

    def __init__(self, path: Path, *, pickles: bool = False) -> None:
        self.path, self._pickles = path, pickles
        index = _index_path(path)
        if index is None:
            raise UserError(f"{path}: no RLinf buffer; there would be {METADATA} and {INDEXES[0]}")
        self.index, self.stamp = index, _stamp(index)
        _read_json(path / METADATA)
        content = _read_json(index)
        try:
            known = {str(key): dict(value) for key, value in content["trajectory_index"].items()}
            listed = [str(key) for key in content.get("trajectory_id_list", content.get("trajectory_uuid_list", known))]
            self.entries = [(key, known[key]) for key in listed if key in known]
            self.counts = [int(entry["num_samples"]) for _, entry in self.entries]
            for key, entry in self.entries:
                if "shape" in entry and not all(isinstance(length, int) for length in entry["shape"]):
                    raise ValueError(f"shape of {key}: {entry['shape']}")
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{index}: not an index of RLinf's ({error})") from None
        found = [file for file in os.scandir(path) if file.name.startswith("trajectory_")]
        self.sizes = {file.name: file.stat().st_size for file in sorted(found, key=lambda file: file.name)}
        self.files: list[str | None] = []
        for position in range(len(self.entries)):
            self.files.append(next((name for name in self._names(position) if name in self.sizes), None))
        if not any(self.files):
            # No file is called as the index says, so a file is known by its id alone, but only if that is certain:
            # files that an older run has left in the folder have the same ids and other weights.
            by_id: dict[str, list[tuple[str, str]]] = {}
            for name in self.sizes:
                if match := FILE_NAME.fullmatch(name):
                    by_id.setdefault(match[1], []).append((name, match[2]))
            for position, (key, entry) in enumerate(self.entries):
                candidates = by_id.get(str(entry.get("trajectory_id", key)), [])
                if len(candidates) == 1 and (not entry.get("model_weights_id") or UUID.fullmatch(candidates[0][1])):
                    self.files[position] = candidates[0][0]
        for name in self.files:
            self._check_allowed(name)

    def _names(self, position: int) -> list[str]:
        """Return the names that a trajectory's file may have according to the index."""
        key, entry = self.entries[position]
        uuid = entry.get("uuid", key)
        stems = (f"{key}_{entry.get('model_weights_id', '')}", f"{entry.get('trajectory_id', key)}_{uuid}", key, uuid)
        return [f"trajectory_{stem}.{suffix}" for stem in stems for suffix in ("pt", "pkl")]

    def _check_allowed(self, name: str | None) -> None:
        if name is not None and name.endswith(".pkl") and not self._pickles:
            why = "a pickle can run any code when it is read; allow it (pickles=True) for files of your own only"
            raise UserError(f"{self.path / name}: {why}")

    def find(self, position: int) -> str | None:
        """Return the name of a trajectory's file, or None if it is missing. RLinf may have written it meanwhile."""
        if self.files[position] is None:
            for name in self._names(position):
                if os.path.isfile(self.path / name):
                    self._check_allowed(name)
                    self.sizes[name] = (self.path / name).stat().st_size
                    self.files[position] = name
                    break
        return self.files[position]

    def shapes(self) -> np.ndarray[Any, Any]:
        """Return T and B of each trajectory, int64 ``[2, n]``. Files are read only where the index lacks the values."""
        found = np.zeros((2, len(self.counts)), np.int64)
        for position, ((_, entry), count) in enumerate(zip(self.entries, self.counts, strict=True)):
            steps, batch = [*entry.get("shape", ()), 0, 0][:2]
            if steps * batch != count:
                trajectory = self.trajectory(position)
                steps, batch = trajectory.steps, trajectory.batch
            found[:, position] = steps, batch
        return found

    def file(self, position: int) -> str:
        """Return the path of a trajectory's file. If the file is missing, the path is the one that RLinf would use."""
        key, entry = self.entries[position]
        return str(self.path / (self.files[position] or f"trajectory_{key}_{entry.get('model_weights_id', '')}.pt"))

    def trajectory(self, position: int) -> FlatTrajectory:
        """Load a trajectory, whose tensors are mapped from its file. Raises `UserError` if it is missing or damaged.

        Values that are not tensors of two or more dimensions are left out, as RLinf does. Task descriptions are kept.
        """
        if self.find(position) is None:
            raise UserError(f"{self.file(position)}: missing; the index lists it")
        file, entry = Path(self.file(position)), self.entries[position][1]
        try:
            if file.suffix == ".pkl":
                with file.open("rb") as stream:
                    loaded = pickle.load(stream)
            else:
                loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as error:
            raise UserError(f"{file}: cannot be read ({str(error).splitlines()[0]})") from None
        if not isinstance(loaded, Mapping):
            raise UserError(f"{file}: holds {type(loaded).__name__}, not the fields of a trajectory")
        given = {name: entry[name] for name in ("max_episode_length", "model_weights_id") if name in entry}
        given |= dict(loaded)
        values = {name: given[name] for name in NOT_TENSORS if name in given} | _only_tensors(given)
        if (prev_values := values.get("prev_values")) is not None:
            # if RLinf's buffer is in memory, its checkpoints store [T + E, B, ...] flattened to [(T + E) * B, ...]
            steps, batch = [*entry.get("shape", ()), 0, 0][:2]
            more = prev_values.shape[0] - steps * batch
            flat = batch > 1 or prev_values.dim() == 2  # with B = 1, [T + E, 1, 1] was not flattened
            if flat and batch and more > 0 and more % batch == 0 and steps % (more // batch) == 0:
                values["prev_values"] = prev_values.reshape(-1, batch, *prev_values.shape[1:])
        return FlatTrajectory.flatten(TensorTrajectory.of(values))

    def check(self, position: int) -> None:
        """Read a trajectory's whole file, and verify the checksums that `torch.save` has written.

        Raises `UserError` if they do not match. Files with pickles (``.pkl``) have no checksums and are not read.
        """
        file = Path(self.file(position))
        if file.suffix == ".pt":
            try:
                with zipfile.ZipFile(file) as archive:
                    broken = archive.testzip()
            except (OSError, zipfile.BadZipFile) as error:
                raise UserError(f"{file}: cannot be read ({error})") from None
            if broken is not None:
                raise UserError(f"{file}: what it holds is not what was written (checksum of {broken})")


@dataclass
class MappedTrajectory:
    """A trajectory whose tensors are mapped from its file, and what `MappedTable` has computed for it."""

    trajectory: FlatTrajectory
    instructions: Tensor  # int32 [T * B]: number of each row's task description; -1: none
    columns: dict[FieldPath, Tensor] = field(default_factory=dict)  # [T * B, ...]: cached columns that were read before


class MappedTable:
    """The table of all rows of a directory (a `table.RowSource`). It also numbers the task descriptions.

    Args:
        directory: the directory.
        open_files: largest number of files that are mapped at once. The least recently used file is closed first.
    """

    number = 0

    def __init__(self, directory: Directory, open_files: int) -> None:
        self.directory, self._limit = directory, open_files
        self.index = Index()
        self._ends = torch.tensor(directory.counts, dtype=torch.int64).cumsum(0)
        self.rows = int(self._ends[-1]) if len(self._ends) else 0
        self._open: OrderedDict[int, MappedTrajectory] = OrderedDict()
        self.lock = threading.Lock()
        self._schema: Schema | None = None
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}  # task description -> its number
        self.full_records: np.ndarray[Any, Any] | None = None  # cached result of `RLinfReader.full_records`

    @property
    def schema(self) -> Schema:
        """The fields that all trajectories have, with the dtypes and shapes of the first trajectory.

        Opening every file would make the first sample slow. So only one file is opened among those with the same size
        in bytes and the same shape in the index, which are assumed to have the same fields. If this is wrong, `read`
        raises an error.
        """
        if self._schema is None:
            directory = self.directory
            alike: dict[Any, int] = {}  # (shape, size) -> position of the first such trajectory
            for position, name in enumerate(directory.files):
                if name is not None:
                    shape = str(directory.entries[position][1].get("shape"))
                    alike.setdefault((shape, directory.sizes[name]), position)
            shared: dict[FieldPath, Field] | None = None
            for position in alike.values():
                try:
                    columns = self.mapped(position).trajectory.columns
                except UserError:
                    continue  # `read` raises the same error once a row of this trajectory is drawn
                own = {path: Field.of(path, column) for path, column in columns.items()}
                shared = own if shared is None else {path: shared[path] for path in shared if path in own}
            found = Schema(tuple(sorted((shared or {}).values(), key=lambda field: field.path)))
            if shared is None:
                return found  # no file can be read yet
            self._schema = found
        return self._schema

    @property
    def instructed(self) -> bool | None:
        return True if self._texts else None

    def instruction(self, number: int) -> str:
        return self._texts[number]

    def mapped(self, position: int) -> MappedTrajectory:
        """Return the trajectory at a position in the index. Raises `UserError` if its file cannot be read."""
        with self.lock:
            if position in self._open:
                self._open.move_to_end(position)
                return self._open[position]
            trajectory, count = self.directory.trajectory(position), self.directory.counts[position]
            if trajectory.count != count:
                where = self.directory.file(position)
                raise UserError(f"{where}: {trajectory.count} rows; the index says {count}")
            numbers = [-1] * count
            for row, text in enumerate(trajectory.instructions):
                if text not in self._numbers:
                    self._texts.append(text)
                    self._numbers[text] = len(self._texts) - 1
                numbers[row] = self._numbers[text]
            found = MappedTrajectory(trajectory, torch.tensor(numbers, dtype=torch.int32))
            self._open[position] = found
            while len(self._open) > self._limit:
                self._open.popitem(last=False)
            return found

    def read(self, rows: Tensor, paths: Collection[FieldPath]) -> dict[FieldPath, Tensor]:
        """Return fields of rows as `table.RowSource.read` specifies. Rows of the same file are read together."""
        fields = {field.path: field for field in self.schema.fields}
        fields |= {path: Field(path, torch.int32, ()) for path in (LEFT, INSTRUCTION)}
        positions = torch.bucketize(rows.contiguous(), self._ends, right=True)
        order = torch.argsort(positions, stable=True)
        there, counts = (column.tolist() for column in torch.unique_consecutive(positions[order], return_counts=True))
        sorted_rows = rows[order].split(counts)
        found = {path: torch.empty(len(rows), *fields[path].shape, dtype=fields[path].dtype) for path in paths}
        parts = [found[path].split(counts) for path in paths]
        for position, wanted, *into in zip(there, sorted_rows, *parts, strict=True):
            mapped = self.mapped(position)
            local = wanted - (int(self._ends[position]) - mapped.trajectory.count)
            for path, part in zip(paths, into, strict=True):
                column = mapped.columns.get(path)
                if column is None:
                    field = fields[path]
                    if path == LEFT:
                        column = torch.from_numpy(steps_left(TrajectoryBlock([mapped.trajectory]).cuts)).reshape(-1)
                    else:
                        column = mapped.instructions if path == INSTRUCTION else mapped.trajectory.columns.get(path)
                    if column is None or Field.of(path, column) != field:
                        there_is = "no such field" if column is None else str(Field.of(path, column))
                        raise UserError(f"{self.directory.file(position)}: {there_is}, where others have {field}")
                    mapped.columns[path] = column
                torch.index_select(column, 0, local, out=part)
        back = torch.argsort(order)
        return {path: torch.index_select(column, 0, back) for path, column in found.items()}

    def close(self) -> None:
        with self.lock:
            self._open.clear()


class RLinfReader(Reader):
    """Reads a directory of RLinf. The ids of trajectories are their positions in RLinf's index.

    Args:
        folder: the directory.
        open_files: largest number of files that are mapped at once.
        pickles: see `Directory`.
    """

    def __init__(self, folder: Path, *, open_files: int = OPEN_FILES, pickles: bool = False) -> None:
        if open_files < 1:
            raise UserError(f"cache_size = {open_files}: at least one file is open at a time")
        self.folder = self._path = folder
        self.pickles, self.open_files = pickles, open_files
        self._closed, self.lock = False, threading.RLock()
        self._load(Directory(folder, pickles=pickles), epoch=0)

    def _load(self, directory: Directory, epoch: Hashable) -> None:
        table, counts = MappedTable(directory, self.open_files), np.array(directory.counts, np.int64)
        records = np.zeros(len(counts), RECORD)
        records["id"], records["row"] = np.arange(len(counts)), np.cumsum(counts) - counts
        records["steps"], records["batch"] = directory.shapes()
        # The index lacks these values. They are set such that conditions on interventions and versions exclude no
        # trajectory as a whole, and are checked for each row instead. Whether a trajectory succeeded stays unknown.
        records["flags"] = INTERVENED
        records["version_low"], records["version_high"] = -np.inf, np.inf
        table.index.append(records, np.arange(len(counts)))
        # threads that are sampling at this moment continue with the old table and snapshot
        self._table = table
        self.snapshot = Snapshot(epoch, 0, len(counts), (table,), ((0, table.rows),), records, table)

    @property
    def nbytes(self) -> int:
        directory = self._table.directory
        return sum(directory.sizes[name] for name in directory.files if name is not None)

    def refresh(self) -> bool:
        """Update ``snapshot`` if RLinf has rewritten its index. If the new index is incomplete, nothing changes."""
        if not self.lock.acquire(blocking=False):
            return False  # another thread is refreshing
        try:
            before = self._table.directory
            if _stamp(before.index) == before.stamp:
                return False
            directory = Directory(self._path, pickles=self.pickles)
            continues = directory.entries[: len(before.entries)] == before.entries
            self._load(directory, self.snapshot.epoch if continues else directory.stamp)
            return True
        except (UserError, FileNotFoundError):
            return False
        finally:
            self.lock.release()

    @contextmanager
    def held(self) -> Iterator[Snapshot]:
        if self._closed:
            raise RuntimeError("the buffer is closed")
        yield self.snapshot

    def full_records(self) -> np.ndarray[Any, Any]:
        """Return all records with values that are computed from the files.

        For a file that cannot be read, ``flags`` is 0 and the versions are -1.
        """
        table = self._table
        if table.full_records is None:
            records = self.snapshot.records.copy()
            records["flags"], records["version_low"], records["version_high"] = 0, -1, -1
            for position in range(len(records)):
                with suppress(UserError):
                    trajectory = table.mapped(position).trajectory
                    for name, value in block_statistics(TrajectoryBlock([trajectory])).items():
                        records[name][position : position + 1] = value
            table.full_records = records
        return table.full_records

    def trajectory(self, number: int, *, verify: bool = False) -> FlatTrajectory:
        position, table = self.snapshot.position(number), self._table
        trajectory = table.mapped(position).trajectory
        if verify:
            table.directory.check(position)
        return trajectory

    def checked(self, *, salvage: bool = False) -> Iterator[FlatTrajectory | UserError]:
        table = self._table
        for position in range(len(table.directory.files)):
            try:
                trajectory = table.mapped(position).trajectory
                table.directory.check(position)
                yield trajectory
            except UserError as error:
                yield UserError(f"trajectory {position}: {error}")

    def lost_files(self) -> list[str]:
        directory = self._table.directory
        missing = [position for position in range(len(directory.files)) if directory.find(position) is None]
        return [f"{directory.file(position)}: missing" for position in missing]

    def write_checkpoint(self, folder: Path) -> bool:
        """Copy all trajectories to an empty folder, as a checkpoint in the native format."""
        table = self._table
        with self.held(), closing(BufferWriter(folder)) as writer:
            writer.add_all(table.mapped(position).trajectory for position in range(len(table.directory.files)))
            manifest, tables = replace(writer.manifest, end=writer.snapshot.next_id), writer.snapshot.tables
        (folder / "lock").unlink()  # only a buffer has one
        manifest.write(Files(folder, writable=True))
        return len(tables) <= 1

    def after_fork(self) -> None:
        super().after_fork()
        self._table.lock = threading.Lock()

    def close(self) -> None:
        self._closed = True
        self._table.close()


def export(path: Path, trajectories: Iterable[FlatTrajectory], *, seed: int) -> int:
    """Write trajectories as a directory that RLinf can read, completely or not at all, and return their number."""
    index: dict[str, dict[str, Any]] = {}
    rows_total = 0
    with atomic.directory(path) as folder:
        for number, flat in enumerate(trajectories):
            # A file name must not contain a slash or a NUL, or be longer than 255 bytes.
            weights = re.sub(r"[/\0]", "_", flat.model_weights_id).encode()[:200].decode(errors="ignore")
            torch.save(_saved(flat.unflatten(), weights), folder / f"trajectory_{number}_{weights}.pt")
            shape_of = (flat.columns.get(("prev_logprobs",)), flat.columns.get(("rewards",)))
            column = next((own for own in shape_of if own is not None), next(iter(flat.columns.values())))
            index[str(number)] = {
                "num_samples": flat.count,
                "trajectory_id": number,
                "max_episode_length": flat.max_episode_length,
                "shape": [flat.steps, flat.batch, *column.shape[1:]],
                "model_weights_id": weights,
            }
            rows_total += flat.count
        content = {"trajectory_index": index, "trajectory_id_list": [int(key) for key in index]}
        (folder / INDEXES[0]).write_text(json.dumps(content))
        metadata = {
            "trajectory_format": "pt",
            "size": len(index),
            "total_samples": rows_total,
            "trajectory_counter": len(index),
            "seed": seed,
        }
        (folder / METADATA).write_text(json.dumps(metadata))
    return len(index)


def _saved(trajectory: TensorTrajectory, weights: str) -> dict[str, Any]:
    values = {**trajectory.by_name(), "success": None, "model_weights_id": weights}
    values[INSTRUCTIONS] = None if not trajectory.task_descriptions else list(trajectory.task_descriptions)
    return {name: value for name, value in values.items() if value is not None}


def _only_tensors(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found[name] = _only_tensors(value)
        elif name == INSTRUCTIONS or (isinstance(value, Tensor) and value.dim() >= 2):
            found[name] = value
    return found


def _index_path(path: Path) -> Path | None:
    return next((path / name for name in INDEXES if (path / name).is_file()), None)


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); it may have been torn by a crash") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: not RLinf's")
    return found
