"""Exports trajectories as a LeRobot data set (format version 3.0), and reads such data sets as trajectories.

The data set consists of Parquet files with one row, called a frame, for each chunk step. The frames of an episode are
consecutive. An episode is a sequence of chunk steps of one environment. It ends where ``dones``, ``terminations`` or
``truncations`` is set, and also at the end of each rollout epoch and of the trajectory.
"""

from __future__ import annotations

import io
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from gleanrl.buffer.columns import Field
from gleanrl.buffer.trajectory import (
    ADDED_TO_BATCHES,
    FLAGS,
    NOT_TENSORS,
    FieldPath,
    FlatTrajectory,
    TensorTrajectory,
    TrajectoryBlock,
    numpy_dtype,
    put,
    quoted,
    to_numpy,
)
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

VERSION = "v3.0"
FILE_NBYTES = 100 << 20  # approximate size of the rows in a data file, before compression
GROUP_NBYTES = 8 << 20  # approximate size of the rows in a Parquet row group, before compression
CHUNK = 1000  # largest number of data files in a folder
# names that LeRobot gives to some fields; ``states`` is RLinf's name of an observation that is one vector
NAMES: dict[FieldPath, str] = {
    ("actions",): "action",
    ("rewards",): "next.reward",
    ("dones",): "next.done",
    ("truncations",): "next.truncated",
    ("curr_obs", "states"): "observation.state",
}
SUCCESS = "next.success"  # LeRobot's feature that says whether the episode has succeeded
CAMERAS = ("image", "video")  # what `dtype` says for pixels
# columns that every LeRobot data set has
OWN_FEATURES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
# names that mean something else in a trajectory or in a batch, so no feature can become a field of this name
NOT_FEATURES = (*NOT_TENSORS, *ADDED_TO_BATCHES, "curr_obs", "next_obs", "forward_inputs", "extra_fields")
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
            Observations that are RGB images, uint8 ``[H, W, 3]`` or ``[3, H, W]``, are stored as PNG files inside the
            Parquet files, which makes them cameras of LeRobot.
        fps: chunk steps per second, from which the timestamps are computed.

    Raises:
        UserError: pyarrow or Pillow is missing, there are no trajectories, a trajectory lacks a field, two fields would
            have the same name or one of `OWN_FEATURES`, the dtype of a field cannot be stored, or the disk is full.
    """
    features: dict[str, Field] = {}
    for field in fields:
        if field.path[0] == "next_obs" or not field.nbytes:
            continue
        path = ("observation", *field.path[1:]) if field.path[0] == "curr_obs" else field.path
        name = NAMES.get(field.path, ".".join(path)).replace("/", "_")
        if name in OWN_FEATURES:
            raise UserError(
                f"{quoted(field.path)}: a data set has a column {name} of its own; give the field another name"
            )
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
        stops = sorted({*(np.flatnonzero(ends[:, b]) + 1).tolist(), trajectory.steps})
        for begin, end in zip([0, *stops], stops, strict=False):
            rows = (torch.arange(begin, end) * trajectory.batch + b).numpy()
            tasks = [trajectory.instructions[i] for i in rows] if trajectory.instructions else [""] * len(rows)
            yield {name: column[rows] for name, column in columns.items()}, tasks


class _DataSet:
    """Writes the files of a data set, one episode at a time. Raises `UserError` if a package is not installed."""

    def __init__(self, folder: Path, features: dict[str, Field], fps: float) -> None:
        self._arrow, self._parquet, self._image = _packages()
        self._folder, self._features, self._fps = folder, features, float(fps)
        # for each camera, the names of the dimensions of its images
        self._cameras: dict[str, list[str]] = {}
        for key, field in features.items():
            if field.path[0] == "curr_obs" and field.dtype == torch.uint8 and len(field.shape) == 3:
                if field.shape[2] == 3:
                    self._cameras[key] = ["height", "width", "channels"]
                elif field.shape[0] == 3:
                    self._cameras[key] = ["channels", "height", "width"]
        self.episodes: list[dict[str, Any]] = []
        self.frames = 0
        self._tasks: dict[str, int] = {}
        # For each feature, statistics over all frames of each element. A camera's statistics are over all pixels of
        # each channel, with values from 0 to 1.
        self._lowest: dict[str, Array] = {}
        self._highest: dict[str, Array] = {}
        self._sums: dict[str, Array] = {}
        self._squares: dict[str, Array] = {}
        self._writer: Any = None
        self._group: list[Any] = []  # tables of episodes that are not written yet
        self._group_nbytes = 0
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
        table = self._arrow.table({key: self._column(key, values) for key, values in (columns | own).items()})
        if self._writer is None or self._written > FILE_NBYTES:
            self._close_file()
            self._file, self._written = self._file + 1, 0
            chunk = self._folder / "data" / f"chunk-{self._file // CHUNK:03d}"
            chunk.mkdir(parents=True, exist_ok=True)
            self._writer = self._parquet.ParquetWriter(chunk / f"file-{self._file % CHUNK:03d}.parquet", table.schema)
        self._group.append(table)
        self._group_nbytes += table.nbytes
        if self._group_nbytes > GROUP_NBYTES:
            self._write_group()

        for key, values in columns.items():
            for part in np.array_split(values, min(count, values.nbytes // GROUP_NBYTES + 1)):
                # [frames, elements, values of the element]
                wide = part.reshape(len(part), -1, 1).astype(np.float64)
                if key in self._cameras:
                    channels = np.moveaxis(part, 1 + self._cameras[key].index("channels"), 1)
                    wide = channels.reshape(len(part), 3, -1) / 255.0
                lowest: np.ndarray = wide.min(axis=(0, 2))
                highest: np.ndarray = wide.max(axis=(0, 2))
                self._lowest[key] = np.minimum(self._lowest.get(key, lowest), lowest)
                self._highest[key] = np.maximum(self._highest.get(key, highest), highest)
                self._sums[key] = self._sums.get(key, 0.0) + wide.mean(axis=2).sum(axis=0)
                self._squares[key] = self._squares.get(key, 0.0) + (wide**2).mean(axis=2).sum(axis=0)
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
            shape = (3, 1, 1) if key in self._cameras else self._features[key].shape or (1,)
            statistics[key] = {name: values.reshape(shape).tolist() for name, values in found.items()}
            statistics[key]["count"] = [self.frames]
        (meta / "stats.json").write_text(json.dumps(statistics))

        features: dict[str, Any] = {}
        for key, field in self._features.items():
            dtype = "image" if key in self._cameras else str(numpy_dtype(field.dtype))
            features[key] = {"dtype": dtype, "shape": list(field.shape) or [1], "names": self._cameras.get(key)}
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

    def _column(self, key: str, values: Array) -> Any:
        """Convert an array to an Arrow column of n entries.

        The entries are PNG files for a camera. For other features they are numbers for the shapes ``[n]`` and
        ``[n, 1]``, lists of fixed length for ``[n, k]``, and nested lists for other shapes.
        """
        if key in self._cameras:
            files = []
            for image in np.moveaxis(values, 1 + self._cameras[key].index("channels"), 3):
                stream = io.BytesIO()
                self._image.fromarray(np.ascontiguousarray(image)).save(stream, "PNG", compress_level=1)
                files.append(stream.getvalue())
            paths = self._arrow.nulls(len(files), self._arrow.string())
            return self._arrow.StructArray.from_arrays([self._arrow.array(files), paths], ["bytes", "path"])
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
        self._group, self._group_nbytes, self._written = [], 0, self._written + group.nbytes

    def _close_file(self) -> None:
        if self._group:
            self._write_group()
        if self._writer is not None:
            self._writer.close()


# --- reading --------------------------------------------------------------------------------------
class Feature(msgspec.Struct):
    """What ``meta/info.json`` states about one feature."""

    dtype: str
    shape: tuple[int, ...]
    info: dict[str, Any] | None = None


class Info(msgspec.Struct):
    """The part of ``meta/info.json`` that is needed to read a data set."""

    codebase_version: str
    fps: float
    features: dict[str, Feature]
    data_path: str
    video_path: str | None = None


def is_data_set(path: Path) -> bool:
    """Return whether the folder ``path`` is a LeRobot data set."""
    return (path / "meta" / "info.json").is_file()


class DataSetReader:
    """Reads a LeRobot data set, each episode as a trajectory with B = 1.

    A feature becomes the field from which `export` would make it. Features of texts, and features whose names mean
    something else in the buffer, are left out with a warning. The next observation of a frame is the observation of the
    next frame. An episode's last frame has none, so it gets its own observation instead.

    Every episode ends with its last frame. Without ``next.done`` the frame counts as done. Without ``terminations`` a
    frame that is done and not truncated terminates. If no flag of the data set ends the last frame, it is truncated.

    Args:
        path: folder of the data set.

    Attributes:
        lengths: number of frames of each episode.
        row_nbytes: bytes of all features of a frame.

    Raises:
        UserError: the data set has another version, is damaged, or a package is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrow, self._parquet, self._image = _packages()
        file = path / "meta" / "info.json"
        try:
            self._info = msgspec.json.decode(file.read_bytes(), type=Info)
        except (OSError, msgspec.DecodeError) as error:
            raise UserError(f"{file}: cannot be read ({error})") from None
        if not self._info.codebase_version.startswith("v3."):
            why = "LeRobot's script convert_dataset_v21_to_v30 converts older data sets"
            raise UserError(f"{file}: version {self._info.codebase_version}, not {VERSION}; {why}")
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._paths: dict[str, FieldPath] = {}  # feature -> path of the field that it becomes
        taken: set[FieldPath] = {(name,) for name in NOT_FEATURES}
        left_out = []
        # LeRobot's own names come first, so that they keep their fields if another feature would become the same field
        for key in sorted(self._info.features, key=lambda key: key not in NAMES.values()):
            feature = self._info.features[key]
            if key in OWN_FEATURES:
                continue
            field_path = next((own for own, name in NAMES.items() if name == key), None)
            if field_path is None:
                first, _, rest = key.partition(".")
                first = "curr_obs" if first == "observation" else first
                field_path = (first, rest) if rest and first in ("curr_obs", "forward_inputs") else (key,)
            if field_path in taken:
                left_out.append(f"{key} (the field {quoted(field_path)} has another meaning or is given twice)")
                continue
            taken.add(field_path)
            self._paths[key] = field_path
            if feature.dtype in CAMERAS:
                self._dtypes[key] = np.dtype(np.uint8)
            elif re.fullmatch(r"bool|u?int\d+|float\d+", feature.dtype):
                self._dtypes[key] = np.dtype(feature.dtype)
            else:
                left_out.append(f"{key} ({feature.dtype})")
        if left_out:
            warnings.warn(f"{path}: the buffer has no place for {', '.join(left_out)}", stacklevel=2)
        self.row_nbytes = 0
        for key, dtype in self._dtypes.items():
            self.row_nbytes += dtype.itemsize * math.prod(self._info.features[key].shape)
        file = path / "meta" / "tasks.parquet"
        try:
            tasks = self._parquet.read_table(file).to_pydict()
            texts = tasks["task"] if "task" in tasks else tasks["__index_level_0__"]
            self._tasks: dict[int, str] = dict(zip(tasks["task_index"], texts, strict=True))
            self._episodes: list[dict[str, Any]] = []
            for file in sorted((path / "meta" / "episodes").rglob("*.parquet")):
                names = [name for name in self._parquet.read_schema(file).names if not name.startswith("stats/")]
                self._episodes += self._parquet.read_table(file, columns=names).to_pylist()
            self.lengths = [int(episode["length"]) for episode in self._episodes]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{file}: cannot be read ({error})") from None

    def trajectories(self, wanted: Iterable[int] | None = None) -> Iterator[FlatTrajectory]:
        """Yield the episodes at the positions ``wanted``, which ascend (None: all), as trajectories.

        Raises `UserError` if a file is missing or damaged.
        """
        file, table, numbers = Path(), None, np.empty(0)
        places: dict[int, tuple[int, int]] = {}  # episode -> its first frame in the file, and its number of frames
        videos: dict[str, tuple[Path, int, Iterator[Array]]] = {}
        for position in range(len(self.lengths)) if wanted is None else wanted:
            episode, length = self._episodes[position], self.lengths[position]
            try:
                of_episode = self.path / self._info.data_path.format(
                    chunk_index=episode["data/chunk_index"], file_index=episode["data/file_index"]
                )
                if table is None or of_episode != file:
                    file, table = of_episode, self._parquet.read_table(of_episode)
                    numbers = table["episode_index"].to_numpy()
                    found, firsts, counts = np.unique(numbers, return_index=True, return_counts=True)
                    places = dict(zip(found.tolist(), zip(firsts.tolist(), counts.tolist(), strict=True), strict=True))
                first, count = places.get(episode["episode_index"], (0, 0))
                if count != length or (numbers[first : first + length] != episode["episode_index"]).any():
                    raise ValueError(f"{file} has {count} of its {length} frames, or others between them")
                trajectory = self._trajectory(episode, table.slice(first, length), videos)
            except (OSError, ValueError, KeyError, IndexError) as error:
                raise UserError(f"{self.path}: episode {position} cannot be read ({error})") from None
            yield trajectory

    def _trajectory(
        self, episode: dict[str, Any], rows: Any, videos: dict[str, tuple[Path, int, Iterator[Array]]]
    ) -> FlatTrajectory:
        count, fields, success = len(rows), dict[str, Any](), None
        for key, dtype in self._dtypes.items():
            feature = self._info.features[key]
            if feature.dtype == "video":
                values = self._video(key, episode, count, videos)
            elif feature.dtype == "image":
                images = []
                for stored in rows[key].to_pylist():
                    source = self.path / stored["path"] if stored["bytes"] is None else io.BytesIO(stored["bytes"])
                    with self._image.open(source) as image:
                        images.append(np.asarray(image.convert("RGB") if 3 in feature.shape else image))
                values = np.stack(images)
            else:
                column = rows[key].combine_chunks()
                if column.null_count:
                    raise ValueError(f"{key} lacks values")
                while not self._arrow.types.is_primitive(column.type):
                    is_extension = isinstance(column, self._arrow.ExtensionArray)
                    column = column.storage if is_extension else column.flatten()
                values = column.to_numpy(zero_copy_only=False).astype(dtype)
            if values.ndim == 4 and values.shape[1:] != feature.shape:
                values = np.moveaxis(values, 3, 1)  # the feature has the channels first
            values = values.reshape(count, 1, *feature.shape)
            if key == SUCCESS:
                success = bool(values.any())
                continue
            put(fields, self._paths[key], torch.from_numpy(values))

        flags = {name: fields[name].bool() for name in FLAGS if name in fields}
        last = torch.zeros_like(next(iter(flags.values()), torch.zeros(count, 1, 1, dtype=torch.bool)))
        last[-1, ..., -1] = True
        dones = flags.get("dones", last)
        truncations = flags.get("truncations", torch.zeros_like(last))
        terminations = flags.get("terminations", dones & ~truncations)
        if not (dones | truncations | terminations)[-1].any():
            truncations = truncations | last
        dones = dones | truncations | terminations
        fields |= {"dones": dones, "terminations": terminations, "truncations": truncations}
        following = {name: torch.cat([value[1:], value[-1:]]) for name, value in fields.get("curr_obs", {}).items()}
        texts = [[self._tasks[number]] for number in rows["task_index"].to_pylist()]
        fields |= {"next_obs": following, "success": success}
        if any(text != [""] for text in texts):
            fields["task_descriptions"] = texts
        return FlatTrajectory.flatten(TensorTrajectory.of(fields))

    def _video(
        self, key: str, episode: dict[str, Any], count: int, videos: dict[str, tuple[Path, int, Iterator[Array]]]
    ) -> Array:
        """Return ``count`` frames uint8 ``[count, H, W, 3]`` of a camera, from the first frame of an episode on.

        ``videos`` has for each camera the video that was read last, the number of its next frame, and its frames from
        there on. Episodes follow one another in a video, so that each frame is decoded once.
        """
        if (self._info.features[key].info or {}).get("is_depth_map"):
            raise ValueError(f"{key} is a video of depths, which is not read")
        file = self.path / str(self._info.video_path).format(
            video_key=key,
            chunk_index=episode[f"videos/{key}/chunk_index"],
            file_index=episode[f"videos/{key}/file_index"],
        )
        first = round(episode[f"videos/{key}/from_timestamp"] * self._info.fps)
        known, at, frames = videos.get(key, (Path(), 0, iter(())))
        if known != file or at > first:
            at, frames = 0, _decoded(file)
        found = list(islice(frames, first - at, first - at + count))
        if len(found) < count:
            raise ValueError(f"{file} has no {count} frames from frame {first} on")
        videos[key] = file, first + count, frames
        return np.stack(found)


def _decoded(file: Path) -> Iterator[Array]:
    """Yield the frames of a video, uint8 ``[H, W, 3]``. Raises `UserError` if PyAV is not installed."""
    try:
        import av
    except ModuleNotFoundError:
        raise UserError("videos of a LeRobot data set need PyAV: pip install 'gleanrl[lerobot]'") from None
    with av.open(str(file)) as video:
        for frame in video.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


def _packages() -> tuple[Any, Any, Any]:
    """Return the modules `pyarrow`, `pyarrow.parquet` and `PIL.Image`. Raises `UserError` if one is not installed."""
    try:
        import pyarrow
        from PIL import Image
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise UserError(f"a LeRobot data set needs {error.name}: pip install 'gleanrl[lerobot]'") from None
    return pyarrow, parquet, Image
