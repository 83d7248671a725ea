"""Exports trajectories as a LeRobot data set (format version 3.0).

The data set consists of Parquet files with one row, called a frame, for each chunk step. The frames of an episode are
consecutive. An episode is a sequence of chunk steps of one environment. It ends where ``dones``, ``terminations`` or
``truncations`` is set, and also at the end of each rollout epoch and of the trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl.buffer.columns import Field
from gleanrl.buffer.trajectory import FieldPath, FlatTrajectory, TrajectoryBlock, numpy_dtype, quoted, to_numpy
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

VERSION = "v3.0"
FILE_NBYTES = 100 << 20  # approximate size of the rows in a data file, before compression
GROUP_NBYTES = 8 << 20  # approximate size of the rows in a Parquet row group, before compression
CHUNK = 1000  # largest number of data files in a folder
# names that LeRobot gives to some fields
NAMES: dict[FieldPath, str] = {("actions",): "action", ("rewards",): "next.reward", ("dones",): "next.done"}
# columns that every LeRobot data set has
OWN_FEATURES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
# pandas metadata of tasks.parquet: LeRobot expects the task texts to be the index of the data frame
_TASK_INDEX = {
    "index_columns": ["task"],
    "column_indexes": [{"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}],
    "columns": [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"},
    ],
    "pandas_version": "2.0.0",
}
Array = np.ndarray[Any, Any]


def export(trajectories: Iterable[FlatTrajectory], out: Path, fields: Sequence[Field], *, fps: float = 1.0) -> str:
    """Write a data set, either completely or not at all, and return its numbers of episodes and frames as text.

    Args:
        trajectories: the trajectories to write.
        out: folder of the data set, which does not exist yet.
        fields: the fields to write, which every trajectory must have with this dtype and shape. ``next_obs`` is left
            out, because it is the observation of the next frame, and so are fields without elements. Floats of a dtype
            that NumPy does not have, such as bfloat16, are converted to float32.
        fps: chunk steps per second, from which the timestamps are computed.

    Raises:
        UserError: pyarrow is missing, there are no trajectories, a trajectory lacks a field, two fields would have the
            same name, the dtype of a field cannot be stored, or the disk is full.
    """
    features: dict[str, Field] = {}
    for field in fields:
        if field.path[0] == "next_obs" or not field.nbytes:
            continue
        path = ("observation", *field.path[1:]) if field.path[0] == "curr_obs" else field.path
        name = NAMES.get(path, ".".join(path)).replace("/", "_")
        other = features.setdefault(name, field)
        if other is not field:
            both = f"{quoted(other.path)} and {quoted(field.path)}"
            raise UserError(f"{both}: both would be called {name}; a data set has one of each name")
        if numpy_dtype(field.dtype).kind == "c":
            raise UserError(f"{field}: a LeRobot data set has no complex numbers; store real and imaginary parts")
    with atomic.directory(out) as folder:
        data_set = _DataSet(folder, features, fps)
        for trajectory in trajectories:
            for columns, tasks in _episodes(trajectory, features):
                data_set.add(columns, tasks)
        data_set.close()
    return f"{len(data_set.episodes)} episodes of {data_set.frames} frames"


def _episodes(trajectory: FlatTrajectory, features: dict[str, Field]) -> Iterator[tuple[dict[str, Array], list[str]]]:
    """Yield (columns, tasks) for each episode of a trajectory.

    ``columns`` has an array ``[n, ...]`` for each name in ``features``, and ``tasks`` the task description of each of
    the n chunk steps ("" if the trajectory has none). Raises `UserError` if the trajectory lacks a field.
    """
    columns: dict[str, Array] = {}
    for name, field in features.items():
        column = trajectory.columns.get(field.path)
        if column is None or Field.of(field.path, column) != field:
            raise UserError(f"{'.'.join(field.path)}: not every trajectory has it as {field}")
        columns[name] = to_numpy(column)
    ends = TrajectoryBlock([trajectory]).cuts[0]
    for b in range(trajectory.batch):
        stops = sorted({*(ends[:, b].nonzero().reshape(-1) + 1).tolist(), trajectory.steps})
        for begin, end in zip([0, *stops], stops, strict=False):
            rows = (torch.arange(begin, end) * trajectory.batch + b).numpy()
            tasks = [trajectory.instructions[i] for i in rows] if trajectory.instructions else [""] * len(rows)
            yield {name: column[rows] for name, column in columns.items()}, tasks


class _DataSet:
    """Writes the files of a data set, one episode at a time. Raises `UserError` if pyarrow is not installed."""

    def __init__(self, folder: Path, features: dict[str, Field], fps: float) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ModuleNotFoundError:
            raise UserError("this needs pyarrow: pip install 'gleanrl[parquet]'") from None
        self._arrow, self._parquet = pyarrow, parquet
        self._folder, self._features, self._fps = folder, features, fps
        self.episodes: list[dict[str, Any]] = []
        self.frames = 0
        self._tasks: dict[str, int] = {}
        # for each feature, elementwise statistics over all frames, as arrays of the feature's shape
        self._lowest: dict[str, Array] = {}
        self._highest: dict[str, Array] = {}
        self._sums: dict[str, Array] = {}
        self._squares: dict[str, Array] = {}
        self._writer: Any = None
        self._group: list[Any] = []  # tables of episodes that are not written yet
        self._file = -1  # number of the open data file; -1: none was opened yet
        self._written = 0  # bytes of rows that were written to the open data file

    def add(self, columns: dict[str, Array], tasks: list[str]) -> None:
        """Append an episode: an array ``[n, ...]`` for each feature, and the task descriptions of its n steps."""
        count, numbers = len(tasks), [self._tasks.setdefault(task, len(self._tasks)) for task in tasks]
        frame = np.arange(count, dtype=np.int64)
        own = {
            "timestamp": (frame / self._fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(count, len(self.episodes), np.int64),
            "index": self.frames + frame,
            "task_index": np.array(numbers, np.int64),
        }
        table = self._arrow.table({key: self._column(values) for key, values in {**columns, **own}.items()})
        if self._writer is None or self._written > FILE_NBYTES:
            self._close_file()
            self._file, self._written = self._file + 1, 0
            chunk = self._folder / "data" / f"chunk-{self._file // CHUNK:03d}"
            chunk.mkdir(parents=True, exist_ok=True)
            self._writer = self._parquet.ParquetWriter(chunk / f"file-{self._file % CHUNK:03d}.parquet", table.schema)
        self._group.append(table)
        if sum(waiting.nbytes for waiting in self._group) > GROUP_NBYTES:
            self._write_group()

        for key, values in columns.items():
            wide = values.reshape(count, *(values.shape[1:] or (1,))).astype(np.float64)
            lowest: np.ndarray = wide.min(axis=0)
            highest: np.ndarray = wide.max(axis=0)
            self._lowest[key] = np.minimum(self._lowest.get(key, lowest), lowest)
            self._highest[key] = np.maximum(self._highest.get(key, highest), highest)
            self._sums[key] = self._sums.get(key, 0.0) + wide.sum(axis=0)
            self._squares[key] = self._squares.get(key, 0.0) + (wide**2).sum(axis=0)
        self.episodes.append(
            {
                "episode_index": len(self.episodes),
                "tasks": list(dict.fromkeys(tasks)),
                "length": count,
                "dataset_from_index": self.frames,
                "dataset_to_index": self.frames + count,
                "data/chunk_index": self._file // CHUNK,
                "data/file_index": self._file % CHUNK,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
        )
        self.frames += count

    def close(self) -> None:
        """Write the remaining rows and the metadata. Raises `UserError` if no episode was added."""
        self._close_file()
        if not self.episodes:
            raise UserError("there are no trajectories to export")
        meta = self._folder / "meta"
        (meta / "episodes" / "chunk-000").mkdir(parents=True)
        episodes = self._arrow.Table.from_pylist(self.episodes)
        self._parquet.write_table(episodes, meta / "episodes" / "chunk-000" / "file-000.parquet")
        tasks = self._arrow.table({"task_index": list(self._tasks.values()), "task": list(self._tasks)})
        tasks = tasks.replace_schema_metadata({"pandas": json.dumps(_TASK_INDEX)})
        self._parquet.write_table(tasks, meta / "tasks.parquet")

        statistics: dict[str, dict[str, list[Any]]] = {}
        for key, total in self._sums.items():
            mean = total / self.frames
            deviation = np.sqrt(np.maximum(self._squares[key] / self.frames - mean**2, 0.0))
            found = {"min": self._lowest[key], "max": self._highest[key], "mean": mean, "std": deviation}
            statistics[key] = {name: values.tolist() for name, values in found.items()} | {"count": [self.frames]}
        (meta / "stats.json").write_text(json.dumps(statistics))

        features: dict[str, Any] = {}
        for key, field in self._features.items():
            features[key] = {"dtype": str(numpy_dtype(field.dtype)), "shape": list(field.shape) or [1], "names": None}
        for key in OWN_FEATURES:
            features[key] = {"dtype": "float32" if key == "timestamp" else "int64", "shape": [1], "names": None}
        info = {
            "codebase_version": VERSION,
            "robot_type": None,
            "fps": int(self._fps) if self._fps.is_integer() else self._fps,
            "total_episodes": len(self.episodes),
            "total_frames": self.frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK,
            "data_files_size_in_mb": FILE_NBYTES >> 20,
            "video_files_size_in_mb": 0,
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": None,
            "splits": {"train": f"0:{len(self.episodes)}"},
            "features": features,
        }
        (meta / "info.json").write_text(json.dumps(info, indent=1))

    def _column(self, values: Array) -> Any:
        """Convert an array to an Arrow column of n entries.

        The entries are numbers for the shapes ``[n]`` and ``[n, 1]``, lists of fixed length for ``[n, k]``, and nested
        lists for other shapes.
        """
        flat = self._arrow.array(values.reshape(-1))
        shape = values.shape[1:]
        if shape in ((), (1,)):
            return flat
        if len(shape) == 1:
            return self._arrow.FixedSizeListArray.from_arrays(flat, shape[0])
        for length in reversed(shape):
            offsets = np.arange(0, len(flat) + 1, length, dtype=np.int32)
            flat = self._arrow.ListArray.from_arrays(self._arrow.array(offsets), flat)
        return flat

    def _write_group(self) -> None:
        group = self._arrow.concat_tables(self._group).combine_chunks()
        self._writer.write_table(group)
        self._group, self._written = [], self._written + group.nbytes

    def _close_file(self) -> None:
        if self._group:
            self._write_group()
        if self._writer is not None:
            self._writer.close()
