"""Merges, splits and exports buffers. The command ``gleanrl buffer`` calls these functions.

Each function writes its result to a new folder, either completely or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gleanrl.buffer import checkpoint, lerobot, rlinf
from gleanrl.buffer.columns import Field
from gleanrl.buffer.replay_buffer import TrajectoryReplayBuffer
from gleanrl.buffer.table import SEGMENT_NBYTES
from gleanrl.buffer.trajectory import FlatTrajectory, leaves, quoted
from gleanrl.buffer.writer import BufferWriter
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

Done = Callable[[], object]  # called after each trajectory or part, to show the progress
FORMATS = ("rlinf", "safetensors", "lerobot")
LEAST_SEGMENT = 1 << 20  # lower limit for the size in bytes of the files of a split buffer
RANK = "rank-{}"  # name of the folder with the checkpoint of a rank


def extent(sources: Iterable[checkpoint.Source]) -> tuple[int, int]:
    """Return the total number of trajectories of some sources, and the approximate size of their rows in bytes."""
    total = nbytes = 0
    for source in sources:
        if isinstance(source, lerobot.DataSetReader):
            total, nbytes = total + len(source.lengths), nbytes + sum(source.lengths) * source.row_nbytes
            continue
        now = source.snapshot
        total += now.next_id - now.first_id
        spans = zip(now.tables, now.spans, strict=True)
        nbytes += sum((end - first) * own.schema.row_nbytes for own, (first, end) in spans)
    return total, nbytes


def trajectories(
    paths: Iterable[Path], *, pickles: bool = False, left_out: list[str] | None = None, done: Done = bool
) -> Iterator[FlatTrajectory]:
    """Yield all trajectories of some folders in order, with verified checksums.

    Args:
        paths: buffers, checkpoints, directories of RLinf or LeRobot data sets.
        pickles: also read RLinf's ``.pkl`` files, which can run any code when they are read.
        left_out: list to which an error message is added for each damaged trajectory, which is skipped. None: raise
            `UserError` for the first damaged trajectory.
        done: called after each trajectory.
    """
    for path in paths:
        if lerobot.is_data_set(path):
            for found in lerobot.DataSetReader(path).trajectories():
                yield found
                done()
            continue
        with closing(checkpoint.open_reader(path, pickles=pickles)) as reader:
            try:
                for found in reader.verified_all() if left_out is None else reader.checked(salvage=True):
                    if isinstance(found, FlatTrajectory):
                        yield found
                        done()
                    elif left_out is not None:
                        left_out.append(f"{path}: {found}")
            except UserError as error:
                raise UserError(f"{path}: {error}") from None


def merge(found: Iterable[FlatTrajectory], out: Path, nbytes: int = SEGMENT_NBYTES) -> tuple[int, int]:
    """Write trajectories to a new buffer, and return the numbers of trajectories and rows.

    Args:
        found: the trajectories.
        out: folder of the new buffer.
        nbytes: approximate total size of the trajectories in bytes. A small buffer gets small files.

    Raises:
        UserError: the folder exists, or the disk is full.
    """
    check_new(out)
    with (
        atomic.directory(out) as folder,
        closing(BufferWriter(folder, segment_nbytes=min(SEGMENT_NBYTES, max(1 << 20, nbytes)))) as writer,
    ):
        writer.add_all(found)
        return writer.snapshot.next_id, writer.snapshot.count_rows()


def split(path: Path, out: Path, parts: int, *, pickles: bool = False, done: Done = bool) -> list[tuple[int, int]]:
    """Split a buffer or checkpoint into ``parts`` checkpoints of nearly equal size, one for each rank.

    Trajectories are divided in the same way as `TrajectoryReplayBuffer.load_checkpoint` divides them among ranks. What
    another process adds to the buffer or drops from it during the call has no effect.

    Args:
        path: a buffer, a checkpoint, or a folder with the checkpoints of several ranks.
        out: the new folder, which gets a subfolder for each part.
        parts: number of parts.
        pickles: also read RLinf's ``.pkl`` files, which can run any code when they are read.
        done: called after each part.

    Returns:
        For each part, the numbers of its trajectories and rows.

    Raises:
        UserError: there are fewer trajectories than parts, the folder exists, or the disk is full.
    """
    check_new(out)
    paths, written = checkpoint.shards(path), []
    # All parts are cut from the same open sources, because another process may be writing to the buffer.
    with checkpoint.opened(paths, pickles=pickles) as sources:
        there, nbytes = extent(sources)
        if not 1 <= parts <= there:
            raise UserError(f"{path}: {there} trajectories cannot be split into {parts} parts")
        segment_nbytes = min(SEGMENT_NBYTES, max(LEAST_SEGMENT, nbytes // parts))
        with atomic.directory(out) as folder:
            for rank in range(parts):
                ours: dict[str, Any] = {"rank": rank, "world_size": parts, "segment_bytes": segment_nbytes}
                with TrajectoryReplayBuffer(folder / "part", **ours) as buffer:
                    buffer._load(paths, sources, rank=rank, ranks=parts)
                    buffer.save_checkpoint(folder / RANK.format(rank))
                    written.append((len(buffer), buffer.total_samples))
                for file in (folder / "part").iterdir():
                    file.unlink()
                (folder / "part").rmdir()
                done()
    return written


def export(
    form: str,
    paths: Sequence[Path],
    out: Path,
    *,
    fps: float = 1.0,
    pickles: bool = False,
    left_out: list[str] | None = None,
    done: Done = bool,
) -> str:
    """Write all trajectories of ``paths`` in another format, and return what was written as text for the user.

    Args:
        form: one of `FORMATS`.
        paths: buffers, checkpoints or directories of RLinf.
        out: the new folder.
        fps: chunk steps per second. Only the format ``lerobot`` needs it.
        pickles, left_out, done: see `trajectories`.

    Raises:
        UserError: the folder exists, the disk is full, or pyarrow is missing.
    """
    check_new(out)

    found = trajectories(paths, pickles=pickles, left_out=left_out, done=done)
    if form == "rlinf":
        seed = checkpoint.seed_of(paths[0])
        return f"{rlinf.export(out, found, seed=1234 if seed is None else seed)} trajectories"
    if form == "safetensors":
        return f"{_export_safetensors(found, out)} trajectories"
    shared: dict[Field, None] | None = None  # fields that all trajectories have with equal dtype and shape
    for path in paths:
        with closing(checkpoint.open_reader(path, pickles=pickles)) as reader:
            now = reader.snapshot
            for table, (first, end) in zip(now.tables, now.spans, strict=True):
                if end > first:
                    here = dict.fromkeys(table.schema.fields)
                    shared = here if shared is None else {field: None for field in shared if field in here}
    return lerobot.export(found, out, list(shared or ()), fps=fps)


def check_new(out: Path) -> None:
    """Raise `UserError` if ``out`` exists."""
    if out.exists():
        raise UserError(f"{out}: there already; name a new folder")


def _export_safetensors(found: Iterable[FlatTrajectory], out: Path) -> int:
    """Write a safetensors file for each trajectory, and an ``index.json``. Returns the number of trajectories.

    Raises:
        UserError: two tensors of a trajectory would have the same name, or the name is one that safetensors uses
            itself, or safetensors lacks the dtype of a tensor, or the disk is full.
    """
    from safetensors.torch import save_file

    values = ("max_episode_length", "model_weights_id", "task_descriptions", "success")
    index: list[dict[str, Any]] = []
    with atomic.directory(out) as folder:
        for number, flat in enumerate(found):
            trajectory = flat.unflatten()
            tensors: dict[str, Tensor] = {}
            for path, tensor in leaves((), trajectory.by_name()):
                if not isinstance(tensor, Tensor):
                    continue
                dotted = ".".join(path)
                if dotted == "__metadata__":
                    raise UserError(f"{dotted}: safetensors uses this name itself; give the field another one")
                if tensor.dtype in (torch.complex32, torch.complex128):
                    name = str(tensor.dtype).removeprefix("torch.")
                    raise UserError(f"{quoted(path)}: safetensors has no {name}; store real and imaginary parts")
                if dotted in tensors:
                    raise UserError(f"{quoted(path)}: another tensor is also called {dotted}")
                tensors[dotted] = tensor.contiguous().clone()
            file = f"trajectory-{number:06d}.safetensors"
            save_file(tensors, folder / file)
            entry = {"file": file, "steps": flat.steps, "batch": flat.batch, "epochs": flat.epochs}
            index.append({**entry, **{name: getattr(trajectory, name) for name in values}})
        content = {"format": "gleanrl-trajectories", "version": 1, "trajectories": index}
        (folder / "index.json").write_text(json.dumps(content, indent=1))
    return len(index)
