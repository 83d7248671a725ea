"""RLinf's replay buffer directories: sampled in place, and written.

A directory holds ``metadata.json``, ``trajectory_index.json`` (``trajector_index.json`` in old versions) and a file for
each trajectory, ``trajectory_{id}_{model_weights_id}.pt`` or, in other versions, with a uuid in its name. Rows are
gathered from the memory-mapped files; nothing is converted. One table holds the rows of all trajectories in the order
of RLinf's index, so the same seed and window draw the same rows as in RLinf.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.columns import Field
from gleanrl.buffer.log import INTERVENED, RECORD
from gleanrl.buffer.manifest import Manifest
from gleanrl.buffer.schema import INSTRUCTION, LEFT, Schema
from gleanrl.buffer.snapshot import Index, Reader, Snapshot
from gleanrl.buffer.trajectory import (
    INSTRUCTIONS,
    NESTED,
    TENSORS,
    FieldPath,
    FlatTrajectory,
    TensorTrajectory,
    TrajectoryBlock,
)
from gleanrl.buffer.writer import BufferWriter, block_statistics
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

METADATA = "metadata.json"
INDEXES = ("trajectory_index.json", "trajector_index.json")
OPEN_FILES = 1024  # mapped at once: a mapping costs address space and a few kB, opening a file a millisecond


def is_directory(path: Path) -> bool:
    """Return whether a folder is a buffer of RLinf."""
    return (path / METADATA).is_file() and _index_path(path) is not None


def is_part(name: str) -> bool:
    """Return whether such a folder may contain a file of this name."""
    return name in (METADATA, *INDEXES) or (name.startswith("trajectory_") and name.endswith(".pt"))


def seed_of(path: Path) -> int | None:
    seed = _read_json(path / METADATA).get("seed")
    return seed if isinstance(seed, int) else None


class Directory:
    """The trajectories of a directory in the order of its index.

    RLinf's checkpoints list trajectories that they do not contain, so a missing file is an error only when it is read.

    Args:
        path: the directory.
        pickles: also read ``.pkl`` files. A pickle can run any code when it is read.

    Raises:
        UserError: it is no directory of RLinf, its index is damaged, or it has pickles that are not allowed.
    """

    def __init__(self, path: Path, *, pickles: bool = False) -> None:
        self.path = path
        index = _index_path(path)
        if index is None:
            raise UserError(f"{path}: no RLinf buffer; there would be {METADATA} and {INDEXES[0]}")
        self._index, self._stamp = index, _stamp(index)
        self.metadata, content = _read_json(path / METADATA), _read_json(index)
        try:
            known = {str(key): dict(value) for key, value in content["trajectory_index"].items()}
            listed = [str(key) for key in content.get("trajectory_id_list", content.get("trajectory_uuid_list", known))]
            self._entries = [(key, known[key]) for key in listed if key in known]
            self._counts = [int(entry["num_samples"]) for _, entry in self._entries]
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{index}: not an index of RLinf's ({error})") from None
        found = [file for file in os.scandir(path) if file.name.startswith("trajectory_")]
        self._sizes = {file.name: file.stat().st_size for file in sorted(found, key=lambda file: file.name)}
        self._files = [self._find_file(key, entry) for key, entry in self._entries]
        pickled = next((name for name in self._files if name is not None and name.endswith(".pkl")), None)
        if pickled is not None and not pickles:
            why = "a pickle can run any code when it is read; allow it (pickles=True) for files of your own only"
            raise UserError(f"{path / pickled}: {why}")

    def _find_file(self, key: str, entry: Mapping[str, Any]) -> str | None:
        weights = entry.get("model_weights_id", "")
        for stem in (f"trajectory_{key}_{weights}", f"trajectory_{key}", f"trajectory_{entry.get('uuid', key)}"):
            for suffix in (".pt", ".pkl"):
                if stem + suffix in self._sizes:
                    return stem + suffix
        begins = f"trajectory_{entry.get('trajectory_id', key)}_"
        return next((name for name in self._sizes if name.startswith(begins)), None)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def counts(self) -> list[int]:
        """Rows of each trajectory."""
        return self._counts

    def shapes(self) -> np.ndarray[Any, Any]:
        """Return int64 ``[2, n]``: T and B of each trajectory, from the index or else from its file."""
        found = np.zeros((2, len(self)), np.int64)
        for position, ((_, entry), count) in enumerate(zip(self._entries, self._counts, strict=True)):
            steps, batch = [*entry.get("shape", ()), 0, 0][:2]
            if steps * batch != count:
                trajectory = self.trajectory(position)
                steps, batch = trajectory.steps, trajectory.batch
            found[:, position] = steps, batch
        return found

    def representatives(self) -> list[int]:
        """Return one trajectory of each shape and file size: files that agree in both hold the same fields."""
        known: dict[Any, int] = {}
        for position, (_, entry) in enumerate(self._entries):
            if (name := self._files[position]) is not None:
                known.setdefault((str(entry.get("shape")), self._sizes[name]), position)
        return list(known.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the trajectories' files."""
        return sum(self._sizes[name] for name in self._files if name is not None)

    def changed(self) -> bool:
        """Return whether the index was written since."""
        try:
            return _stamp(self._index) != self._stamp
        except FileNotFoundError:
            return False

    def continues(self, other: Directory) -> bool:
        """Return whether it begins with all trajectories of another one."""
        return self._entries[: len(other)] == other._entries

    def missing(self) -> list[int]:
        """Return the trajectories that have no file."""
        return [position for position, name in enumerate(self._files) if name is None]

    def file(self, position: int) -> str:
        """Return the path of a trajectory's file, for messages also where it is missing."""
        key, entry = self._entries[position]
        return str(self.path / (self._files[position] or f"trajectory_{key}_{entry.get('model_weights_id', '')}.pt"))

    def trajectory(self, position: int) -> FlatTrajectory:
        """Map a trajectory's file. Raises `UserError` where it is missing or damaged."""
        if self._files[position] is None:
            raise UserError(f"{self.file(position)}: missing; the index lists it")
        entry = self._entries[position][1]
        values = {name: entry[name] for name in ("max_episode_length", "model_weights_id") if name in entry}
        values |= _load(Path(self.file(position)))
        return FlatTrajectory.flatten(TensorTrajectory.of(_without_unread(values, entry)))

    def verified(self, position: int) -> FlatTrajectory:
        """Return a trajectory whose file is intact. Raises `UserError` otherwise."""
        trajectory = self.trajectory(position)
        self.check(position)
        return trajectory

    def check(self, position: int) -> None:
        """Read a whole file. Raises `UserError` where the checksums that torch writes do not match."""
        file = Path(self.file(position))
        if file.suffix == ".pt":
            try:
                with zipfile.ZipFile(file) as archive:
                    broken = archive.testzip()
            except (OSError, zipfile.BadZipFile) as error:
                raise UserError(f"{file}: cannot be read ({error})") from None
            if broken is not None:
                raise UserError(f"{file}: what it holds is not what was written (checksum of {broken})")


class NumberedTexts:
    """Task descriptions by number, for any number of threads."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def instructed(self) -> bool | None:
        return True if self._texts else None

    def instruction(self, number: int) -> str:
        return self._texts[number]

    def add(self, texts: Sequence[str]) -> list[int]:
        """Return the number of each text."""
        with self._lock:
            for text in texts:
                if text not in self._numbers:
                    self._numbers[text] = len(self._texts)
                    self._texts.append(text)
            return [self._numbers[text] for text in texts]


class MappedTrajectory:
    """A trajectory whose tensors are mapped from its file."""

    def __init__(self, trajectory: FlatTrajectory, name: str, texts: NumberedTexts) -> None:
        self.trajectory, self.name = trajectory, name
        numbers = texts.add(trajectory.instructions)
        self._instructions = torch.tensor(numbers or [-1] * trajectory.count, dtype=torch.int32)
        self._columns: dict[Field, Tensor] = {}

    def column(self, field: Field) -> Tensor:
        """Return ``[T * B, ...]``. Raises `UserError` where the file has another type or shape than ``field``."""
        if field in self._columns:
            return self._columns[field]
        column: Tensor | None
        if field.path == INSTRUCTION:
            column = self._instructions
        elif field.path == LEFT:
            column = self.trajectory.steps_left()
        else:
            column = self.trajectory.columns.get(field.path)
        if column is None or Field.of(field.path, column) != field:
            there_is = "no such field" if column is None else str(Field.of(field.path, column))
            raise UserError(f"{self.name}: {there_is}, where others have {field}")
        self._columns[field] = column
        return column


class MappedTable:
    """The rows of a directory's trajectories, one after the other, as a table.

    Args:
        directory: where the files are.
        open_files: how many are mapped at once; the least recently used one is closed first.
    """

    number = 0

    def __init__(self, directory: Directory, open_files: int) -> None:
        self.directory, self._limit = directory, open_files
        self._ends = torch.tensor(directory.counts, dtype=torch.int64).cumsum(0)
        self.rows = int(self._ends[-1]) if len(self._ends) else 0
        self._open: OrderedDict[int, MappedTrajectory] = OrderedDict()
        self._lock = threading.Lock()
        self._schema: Schema | None = None
        self.texts = NumberedTexts()
        self.full_records: np.ndarray[Any, Any] | None = None  # see `RLinfReader.full_records`

    @property
    def schema(self) -> Schema:
        """The fields that all trajectories share, as the first one has them.

        Files of the same size and shape are assumed to have the same fields, so that the first sample does not open
        every file. `read` raises an error where that is wrong.
        """
        if self._schema is None:
            shared: dict[FieldPath, Field] | None = None
            for position in self.directory.representatives():
                try:
                    columns = self.mapped(position).trajectory.columns
                except UserError:
                    continue  # raised again when its rows are read
                own = {path: Field.of(path, column) for path, column in columns.items()}
                shared = own if shared is None else {path: shared[path] for path in shared if path in own}
            self._schema = Schema(tuple(sorted((shared or {}).values(), key=lambda field: field.path)))
        return self._schema

    def mapped(self, position: int) -> MappedTrajectory:
        """Return a trajectory by its position in the index. Raises `UserError` where its file cannot be read."""
        with self._lock:
            if position in self._open:
                self._open.move_to_end(position)
                return self._open[position]
            trajectory, name = self.directory.trajectory(position), self.directory.file(position)
            if trajectory.count != self.directory.counts[position]:
                raise UserError(f"{name}: {trajectory.count} rows; the index says {self.directory.counts[position]}")
            self._open[position] = MappedTrajectory(trajectory, name, self.texts)
            while len(self._open) > self._limit:
                self._open.popitem(last=False)
            return self._open[position]

    def read(self, rows: Tensor, paths: Collection[FieldPath]) -> dict[FieldPath, Tensor]:
        """See `snapshot.RowSource`. The rows are sorted by file, gathered, and put back in order."""
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
                torch.index_select(mapped.column(fields[path]), 0, local, out=part)
        back = torch.argsort(order)
        return {path: torch.index_select(column, 0, back) for path, column in found.items()}

    def close(self) -> None:
        with self._lock:
            self._open.clear()


class RLinfReader(Reader):
    """A directory of RLinf, to read. Trajectories are numbered from 0 in the order of its index.

    Args:
        folder: the directory.
        open_files: how many of its files are mapped at once.
        pickles: see `Directory`.
    """

    folder: Path

    def __init__(self, folder: Path, *, open_files: int = OPEN_FILES, pickles: bool = False) -> None:
        if open_files < 1:
            raise UserError(f"cache_size = {open_files}: at least one file is open at a time")
        self.folder, self._pickles, self._open_files = folder, pickles, open_files
        self._closed, self._loading, self._unchanged = False, threading.Lock(), 0
        self._load(Directory(folder, pickles=pickles), epoch=0)

    def _load(self, directory: Directory, epoch: int) -> None:
        table = MappedTable(directory, self._open_files)
        counts = np.array(directory.counts, np.int64)
        records = np.zeros(len(counts), RECORD)
        records["id"], records["row"] = np.arange(len(counts)), np.cumsum(counts) - counts
        records["steps"], records["batch"] = directory.shapes()
        # only the files know these, so every trajectory may match a condition
        records["flags"] = INTERVENED
        records["version_low"], records["version_high"] = -np.inf, np.inf
        index = Index()
        index.append(records, np.arange(len(counts)))
        spans = ((0, table.rows),)
        # a sample under way keeps the snapshot that it began with
        self._snapshot = Snapshot(epoch, 0, len(counts), (table,), spans, (index,), records, table.texts)

    @property
    def _table(self) -> MappedTable:
        [table] = self._snapshot.tables
        assert isinstance(table, MappedTable)
        return table

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    @property
    def nbytes(self) -> int:
        return self._table.directory.nbytes

    def refresh(self) -> bool:
        """See `Reader.refresh`. While RLinf writes its index, the old one counts."""
        with self._loading:
            if self._unchanged or not self._table.directory.changed():
                return False
            try:
                directory = Directory(self.folder, pickles=self._pickles)
                grown = directory.continues(self._table.directory)
                self._load(directory, self._snapshot.epoch + (not grown))
            except UserError:
                return False
            return True

    @contextmanager
    def held(self) -> Iterator[Snapshot]:
        if self._closed:
            raise RuntimeError("the buffer is closed")
        yield self._snapshot

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        with self._loading:
            self._unchanged += 1
        try:
            yield
        finally:
            with self._loading:
                self._unchanged -= 1

    def full_records(self) -> np.ndarray[Any, Any]:
        """See `Reader.full_records`. A file that cannot be read leaves its values unknown."""
        table = self._table
        if table.full_records is None:
            records = self._snapshot.records.copy()
            records["flags"], records["version_low"], records["version_high"] = 0, -1, -1
            for position in range(len(table.directory)):
                with suppress(UserError):
                    trajectory = table.mapped(position).trajectory
                    for name, value in block_statistics(TrajectoryBlock.join([trajectory])).items():
                        records[name][position : position + 1] = value
            table.full_records = records
        return table.full_records

    def trajectory(self, number: int) -> FlatTrajectory:
        self._check_number(number)
        return self._table.mapped(number).trajectory

    def checked(self) -> Iterator[FlatTrajectory | UserError]:
        table = self._table
        for position in range(len(table.directory)):
            try:
                trajectory = table.mapped(position).trajectory
                table.directory.check(position)
                yield trajectory
            except UserError as error:
                yield UserError(f"trajectory {position}: {error}")

    def salvage(self) -> Iterator[FlatTrajectory | UserError]:
        return self.checked()

    def lost_files(self) -> list[str]:
        directory = self._table.directory
        return [f"{directory.file(position)}: missing" for position in directory.missing()]

    def write_checkpoint(self, folder: Path) -> None:
        """See `Reader.write_checkpoint`. Every row is copied."""
        table = self._table
        with closing(BufferWriter(folder)) as writer:
            for position in range(len(table.directory)):
                writer.add([table.mapped(position).trajectory])
            manifest = writer.manifest.replace(end=writer.next_id)
        (folder / Manifest.NAME).write_bytes(manifest.to_json())

    def close(self) -> None:
        self._closed = True
        self._table.close()


def export(path: Path, trajectories: Iterable[FlatTrajectory], *, seed: int) -> int:
    """Write trajectories as RLinf does, all or nothing, and return how many."""
    index: dict[str, dict[str, Any]] = {}
    rows_total = 0
    with atomic.directory(path) as folder:
        for number, flat in enumerate(trajectories):
            weights = flat.model_weights_id.replace("/", "_")  # it is part of a file's name
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
    names = TensorTrajectory.__dataclass_fields__
    values = {name: getattr(trajectory, name) for name in names if name != "success"}
    values["task_descriptions"] = None if not values["task_descriptions"] else list(values["task_descriptions"])
    return {**{name: value for name, value in values.items() if value is not None}, "model_weights_id": weights}


def _load(file: Path) -> dict[str, Any]:
    try:
        if file.suffix == ".pkl":
            with file.open("rb") as stream:
                found = pickle.load(stream)
        else:
            found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(found, Mapping):
        raise UserError(f"{file}: holds {type(found).__name__}, not the fields of a trajectory")
    return dict(found)


def _without_unread(values: dict[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Remove what RLinf ignores, values that are no tensors ``[T, B, ...]``. Instructions stay."""
    found = {name: value for name, value in values.items() if name not in (*TENSORS, *NESTED)}
    for name in TENSORS:
        if isinstance(value := values.get(name), Tensor) and value.dim() >= 2:
            found[name] = value
    for name in NESTED:
        if isinstance(value := values.get(name), Mapping):
            found[name] = _only_tensors(value)
    if (prev_values := found.get("prev_values")) is not None:
        found["prev_values"] = _unflattened(prev_values, entry)
    return found


def _only_tensors(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found[name] = _only_tensors(value)
        elif name == INSTRUCTIONS or (isinstance(value, Tensor) and value.dim() >= 2):
            found[name] = value
    return found


def _unflattened(values: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """Return ``[T + E, B, ...]``. RLinf's checkpoints from memory keep values as ``[(T + E) * B, ...]``."""
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); it may have been torn by a crash") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: not RLinf's")
    return found
