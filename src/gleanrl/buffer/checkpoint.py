"""Saves and loads checkpoints of a buffer.

A checkpoint is a folder with hard links to the buffer's files, the state of the random generator, and the priorities.
The number of ranks that load may differ from the number of ranks that saved. The rows of all checkpoints are then
divided evenly among the ranks that load.
"""

from __future__ import annotations

import base64
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer import lerobot, rlinf
from gleanrl.buffer.files import CheckedJson
from gleanrl.buffer.log import SALVAGE, Manifest
from gleanrl.buffer.reader import BufferReader
from gleanrl.buffer.sampling import Sampler
from gleanrl.buffer.trajectory import FlatTrajectory
from gleanrl.buffer.writer import OURS, BufferWriter
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

STATE = "state.json"
PRIORITIES = "priorities.npz"
PARTS = (Manifest.NAME, STATE, PRIORITIES)  # files that are not links to files of the buffer
PRIORITY_KEYS = ("first", "weights")

Source = BufferReader | rlinf.RLinfReader | lerobot.DataSetReader


class State(CheckedJson, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of a checkpoint's file ``state.json``: the state of the random generator."""

    seed: int
    generator: str  # state of the `torch.Generator`, in base64
    rank: int  # rank that saved the checkpoint
    ranks: int | None  # number of ranks that saved a checkpoint at that time; None: unknown


def save(sampler: Sampler, path: Path, *, seed: int, rank: int, ranks: int | None) -> None:
    """Write a checkpoint of ``sampler`` to the folder ``path``, either completely or not at all.

    ``seed``, ``rank`` and ``ranks`` are stored for `read_sampler_state`. Raises `UserError` if the disk is full.
    """
    storage = sampler.storage
    with atomic.directory(path) as folder, storage.lock:
        storage.refresh()
        same_rows = storage.write_checkpoint(folder)
        generator = base64.b64encode(sampler.stream.state().numpy().tobytes()).decode()
        (folder / STATE).write_bytes(State(seed=seed, generator=generator, rank=rank, ranks=ranks).encode())
        if sampler.priorities is not None and not same_rows:
            why = "its trajectories have different fields, so their rows have other numbers in the checkpoint"
            warnings.warn(f"{path}: has no priorities: {why}", stacklevel=2)
        elif sampler.priorities is not None:
            states = sampler.priorities.states(storage)
            values = {f"{i}-{key}": value for i, own in enumerate(states) for key, value in own.items()}
            np.savez(folder / PRIORITIES, **values)


def check_replaceable(path: Path, own: Path | None, *, as_rlinf: bool = False) -> None:
    """Check that ``path`` is either missing, empty or an old checkpoint, so that a new checkpoint may replace it.

    Args:
        path: folder of the new checkpoint.
        own: folder of the buffer that is saved; None if the buffer is in memory.
        as_rlinf: whether the checkpoint is written in RLinf's format. An old directory of RLinf may then be replaced.

    Raises:
        UserError: ``path`` is something else, whose content would be lost.
    """
    if own is not None and path.resolve() == own.resolve():
        raise UserError(f"{path}: the buffer itself is in there; name another folder for its checkpoint")
    if not os.path.lexists(path):
        return
    if not path.is_dir() or path.is_symlink():
        raise UserError(f"{path}: there already, and no folder; name a new one for the checkpoint")
    for name in sorted(os.listdir(path)):
        if name == "lock":
            raise UserError(f"{path}: a buffer is in there; name another folder for the checkpoint")
        if not (name in PARTS or OURS.fullmatch(name) or (as_rlinf and rlinf.is_part(name))):
            raise UserError(f"{path}: holds {name}, which is no part of a checkpoint; name another folder")


def shards(path: Path) -> list[Path]:
    """Return the folders of all checkpoints at ``path``.

    If ``path`` is itself a checkpoint, it is the only one. Otherwise the checkpoints are the subfolders that the ranks
    have saved, sorted by the number in their names.

    Raises:
        UserError: there is no checkpoint.
    """
    if _is_checkpoint(path):
        return [path]
    within = [entry for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []
    found = [own for own in within if _is_checkpoint(own) and not own.name.startswith(atomic.TEMPORARY_PREFIX)]
    if not found:
        aside = [own for own in atomic.left_behind(path) if _is_checkpoint(own)]
        hint = f"; {aside[0]} may be what was there before a crash" if aside else ""
        raise UserError(f"{path}: no checkpoint of a buffer; there would be {Manifest.NAME} or {rlinf.METADATA}{hint}")
    return sorted(found, key=lambda entry: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", entry.name)])


def _is_checkpoint(path: Path) -> bool:
    return (path / Manifest.NAME).is_file() or rlinf.is_directory(path) or lerobot.is_data_set(path)


def open_reader(path: Path, *, pickles: bool = False) -> BufferReader | rlinf.RLinfReader:
    """Open a buffer, a checkpoint or a directory of RLinf for reading. ``pickles``: see `rlinf.Directory`."""
    if lerobot.is_data_set(path):
        raise UserError(f"{path}: a LeRobot data set; write it to a buffer first: gleanrl buffer {path} merge OUT")
    return rlinf.RLinfReader(path, pickles=pickles) if rlinf.is_directory(path) else BufferReader(path)


@contextmanager
def opened(paths: Iterable[Path], *, pickles: bool = False) -> Iterator[list[Source]]:
    """Open buffers, checkpoints, directories of RLinf and LeRobot data sets, and close them when the block ends.

    A source keeps the trajectories that it had when it was opened, even if another process writes to its folder
    meanwhile. ``pickles``: see `rlinf.Directory`.
    """
    with ExitStack() as stack:
        sources = list[Source]()
        for path in paths:
            if lerobot.is_data_set(path):
                sources.append(lerobot.DataSetReader(path))
            elif rlinf.is_directory(path):
                # each file is read once, so none of them stays mapped
                reader = rlinf.RLinfReader(path, open_files=1, pickles=pickles)
                sources.append(stack.enter_context(closing(reader)))
            else:
                sources.append(stack.enter_context(closing(BufferReader(path))))
        yield sources


def load(
    writer: BufferWriter,
    sources: Sequence[Source],
    *,
    rank: int,
    ranks: int,
    before_commit: Callable[[], object] = bool,
) -> bool:
    """Replace the content of a buffer by the trajectories that rank ``rank`` of ``ranks`` loads from checkpoints.

    The content is replaced completely or not at all, even if the process crashes. A single native checkpoint that fits
    into the buffer's limit of bytes is loaded by its files. Otherwise its trajectories are added one after the other,
    and get new ids and row numbers. Returns whether ids and row numbers are those of the checkpoint.

    Args:
        writer: the buffer.
        sources: the checkpoints, as yielded by `opened`.
        rank, ranks: see `trajectories_of_rank`.
        before_commit: called after all new files are written and before they replace the old content. If it raises an
            error, the buffer keeps its old content.
    """
    if len(sources) == ranks == 1 and isinstance(source := sources[0], BufferReader):
        while writer.can_adopt(source):
            try:
                writer.adopt(source, before_commit)
                return True
            except FileNotFoundError:
                # the process that writes the source may have removed files, and it has then written what it keeps
                if not source.refresh():
                    raise
    with writer.replacing():
        writer.add_all(trajectories_of_rank(sources, rank=rank, ranks=ranks))
        before_commit()
    return False


def trajectories_of_rank(sources: Sequence[Source], *, rank: int, ranks: int) -> Iterator[FlatTrajectory]:
    """Yield the trajectories that rank ``rank`` of ``ranks`` loads.

    The trajectories of all ``sources`` (see `opened`), one source after the other, are cut into ``ranks`` consecutive
    parts with nearly equal numbers of rows. A trajectory is never cut. If several ranks read the same open sources,
    their parts fit together even if another process writes to the folders meanwhile.

    Raises:
        UserError: a file is missing or damaged.
    """
    counts: list[list[int]] = []  # for each source, the number of rows of each trajectory
    for source in sources:
        if isinstance(source, lerobot.DataSetReader):
            counts.append(source.lengths)
            continue
        # Missing files are an error here only in the native format. RLinf's index may list files that are missing; an
        # error is raised when the trajectory of such a file is read.
        if isinstance(source, BufferReader):
            for why in source.lost_files():
                raise UserError(f"{why}; {SALVAGE}")
        records = source.snapshot.records
        counts.append((records["steps"].astype("int64") * records["batch"]).tolist())
    total, before = sum(map(sum, counts)), 0
    for source, own in zip(sources, counts, strict=True):
        mine = []
        for position, count in enumerate(own):
            # a trajectory belongs to the part that contains its middle row
            if (2 * before + count) * ranks // (2 * total) == rank:
                mine.append(position)
            before += count
        if isinstance(source, lerobot.DataSetReader):
            yield from source.trajectories(mine)
            continue
        for position in mine:
            try:
                yield source.trajectory(source.snapshot.first_id + position, verify=True)
            except UserError as error:
                raise UserError(f"{source.folder}: {error}") from None


@dataclass(frozen=True)
class SamplerState:
    """The state of a rank's sampler after a checkpoint is loaded."""

    seed: int
    generator: Tensor  # uint8, a state for `torch.Generator.set_state`
    priorities: list[dict[str, Any]] | None  # for `Priorities.restore`; None: the priorities are reset


def read_sampler_state(paths: Sequence[Path], *, seed: int, stream: int, rank: int, ranks: int) -> SamplerState:
    """Return the random state and the priorities with which a rank continues after it has loaded checkpoints.

    The random stream of the rank continues if the number of ranks is the same as when the checkpoints were saved, and
    the rank loads the checkpoint that it saved. Otherwise the rank gets a new stream, whose seed is derived from the
    saved states. Priorities are restored if there is a single checkpoint that is not divided, and reset otherwise.

    Args:
        paths: the checkpoints, as returned by `shards`.
        seed: seed to use if the checkpoints store none.
        stream: number of this rank's random stream. Several ranks may load the same part, but their streams differ.
        rank, ranks: index of the part that is loaded, and number of parts.

    Raises:
        UserError: a file is damaged, the checkpoints were saved by different numbers of ranks, or ``rank`` is not
            between 0 and ``ranks`` - 1.
    """
    if not 0 <= rank < ranks:
        raise UserError(f"rank {rank} of {ranks}: ranks count from 0 to {ranks - 1}")
    priorities = None
    if len(paths) == ranks == 1 and (file := paths[0] / PRIORITIES).is_file():
        try:
            with np.load(file, allow_pickle=False) as kept:
                tables = range(len(kept.files) // len(PRIORITY_KEYS))
                priorities = [{key: kept[f"{i}-{key}"] for key in PRIORITY_KEYS} for i in tables]
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(f"{file}: damaged ({error})") from None
    states = [read_state(path) for path in paths]
    saved_by = {state.ranks: path for state, path in zip(states, paths, strict=True) if state and state.ranks}
    if len(saved_by) > 1:  # fewer ranks have saved into a folder where more ranks had saved before
        found = ", ".join(f"{path.name} is one of {count}" for count, path in sorted(saved_by.items()))
        raise UserError(
            f"{paths[0].parent}: checkpoints of different numbers of ranks ({found}), so of more than one save; remove "
            f"the old ones, or write all to one buffer: gleanrl buffer {paths[0].parent} merge OUT"
        )
    own = states[rank] if len(paths) == ranks else None
    if own is not None:
        try:
            generator = torch.tensor(list(base64.b64decode(own.generator)), dtype=torch.uint8)
            torch.Generator().set_state(generator)
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"{paths[rank] / STATE}: damaged (state of the random stream: {error})") from None
        if stream == own.rank:
            return SamplerState(own.seed, generator, priorities)
    saved = seed_of(paths[0])
    seed = seed if saved is None else saved
    if ranks == 1 and not stream and not any(states):
        # RLinf's directories store no random state; with the plain seed, rank 0 draws the same rows as RLinf
        start = seed
    else:
        saved_states = ["" if state is None else state.generator for state in states]
        start = derive(seed, "buffer", "of", ranks, rank, stream, *saved_states)
    return SamplerState(seed, torch.Generator().manual_seed(start).get_state(), priorities)


def seed_of(path: Path) -> int | None:
    """Return the seed that is stored in a checkpoint; None if it stores none."""
    if rlinf.is_directory(path):
        return rlinf.seed_of(path)
    state = read_state(path)
    return None if state is None else state.seed


def read_state(path: Path) -> State | None:
    """Return the content of a checkpoint's ``state.json``; None if the file is missing, as in a directory of RLinf.

    Raises `UserError` if the file is damaged.
    """
    try:
        return State.decode((path / STATE).read_bytes())
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path / STATE}: damaged ({error})") from None
