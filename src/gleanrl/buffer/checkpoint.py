"""Checkpoints of a buffer: its files as links, the random state, and priorities.

The checkpoints of any number of ranks can be loaded by any number of ranks, among which the rows are divided evenly.
"""

from __future__ import annotations

import base64
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer import rlinf
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
PARTS = (Manifest.NAME, STATE, PRIORITIES)  # files of a checkpoint, besides the buffer's own
PRIORITY_KEYS = ("first", "highest", "weights")
COMMIT_NBYTES = 64 << 20  # bytes of rows added in one commit, so that syncs take a small share of the time


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a checkpoint's file ``state.json``: the random state, and counts of its trajectories."""

    seed: int
    generator: str  # state of the random stream, base64
    size: int
    total_samples: int
    trajectory_counter: int
    rank: int | None = None  # rank whose random stream this is


def save(sampler: Sampler, path: Path, *, seed: int, rank: int) -> None:
    """Write a checkpoint, either completely or not at all. Raises `UserError` if the disk is full."""
    storage = sampler.storage
    with atomic.directory(path) as folder, storage.lock:
        storage.write_checkpoint(folder)
        generator = base64.b64encode(sampler.stream.state().numpy().tobytes()).decode()
        now = storage.snapshot
        state = State(seed, generator, now.next_id - now.first_id, now.count_rows(), now.next_id, rank)
        (folder / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1))
        if sampler.priorities is not None:
            states = sampler.priorities.states(storage)
            values = {f"{i}-{key}": value for i, own in enumerate(states) for key, value in own.items()}
            np.savez(folder / PRIORITIES, **values)


def check_replaceable(path: Path, own: Path | None, *, as_rlinf: bool = False) -> None:
    """Check that a checkpoint may be written to ``path``.

    Args:
        path: folder of the checkpoint.
        own: the buffer's folder; None if it is in memory.
        as_rlinf: whether the checkpoint is a directory of RLinf.

    Raises:
        UserError: ``path`` exists and is not a checkpoint, so its content would be lost.
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
    """Return the checkpoints in a folder: the folder itself, or those of all ranks in the order of their numbers.

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
    return (path / Manifest.NAME).is_file() or rlinf.is_directory(path)


def open_reader(path: Path, *, pickles: bool = False) -> BufferReader | rlinf.RLinfReader:
    """Open a buffer, a checkpoint or a directory of RLinf for reading."""
    return rlinf.RLinfReader(path, pickles=pickles) if rlinf.is_directory(path) else BufferReader(path)


def load(
    writer: BufferWriter,
    paths: Sequence[Path],
    *,
    rank: int,
    ranks: int,
    pickles: bool = False,
    before_commit: Callable[[], object] = bool,
) -> None:
    """Replace the buffer's content by this rank's part of the checkpoints at ``paths``.

    The content is replaced completely or not at all, even in a crash. ``before_commit`` is called when all files are in
    place. If it raises an error, the buffer keeps its content.
    """
    if len(paths) == 1 and ranks == 1 and (paths[0] / Manifest.NAME).is_file():
        with closing(BufferReader(paths[0])) as source:
            writer.adopt(source, before_commit)
        return
    with writer.replacing():
        add_all(writer, trajectories_of_rank(paths, rank=rank, ranks=ranks, pickles=pickles))
        before_commit()


def add_all(writer: BufferWriter, trajectories: Iterable[FlatTrajectory]) -> None:
    """Add any number of trajectories, in commits of about `COMMIT_NBYTES`."""
    batch: list[FlatTrajectory] = []
    nbytes = 0
    for trajectory in trajectories:
        batch.append(trajectory)
        nbytes += trajectory.nbytes
        if nbytes > COMMIT_NBYTES:
            writer.add(batch)
            batch, nbytes = [], 0
    if batch:
        writer.add(batch)


def trajectories_of_rank(
    paths: Sequence[Path], *, rank: int, ranks: int, pickles: bool = False
) -> Iterator[FlatTrajectory]:
    """Yield the trajectories of a rank. All checkpoints together are cut into parts with nearly equal numbers of rows.

    Raises:
        UserError: a file is missing or damaged.
    """
    counts: list[list[int]] = []  # rows of each trajectory
    for path in paths:
        with closing(open_reader(path, pickles=pickles)) as reader:
            if isinstance(reader, BufferReader):  # a missing file of RLinf is an error only when it is read
                for why in reader.lost_files():
                    raise UserError(f"{why}; {SALVAGE}")
            records = reader.snapshot.records
            counts.append((records["steps"].astype("int64") * records["batch"]).tolist())
    total, before = sum(map(sum, counts)), 0
    for path, own in zip(paths, counts, strict=True):
        mine = []
        for position, count in enumerate(own):
            if (2 * before + count) * ranks // (2 * total) == rank:  # the trajectory's middle is in the part
                mine.append(position)
            before += count
        if mine:
            with closing(open_reader(path, pickles=pickles)) as reader:
                first = reader.snapshot.first_id
                for position in mine:
                    try:
                        yield reader.trajectory(first + position, verify=True)
                    except UserError as error:
                        raise UserError(f"{path}: {error}") from None


@dataclass(frozen=True)
class SamplerState:
    """The state, besides the trajectories, from which a rank continues."""

    seed: int
    generator: Tensor  # state of the random stream
    priorities: list[dict[str, Any]] | None


def read_sampler_state(paths: Sequence[Path], *, seed: int, stream: int, rank: int, ranks: int) -> SamplerState:
    """Return the random state and the priorities with which a rank continues.

    A rank continues its stream if as many ranks load as saved, and it loads the part that it saved. Otherwise it gets a
    new stream, derived from the saved states. Priorities are restored if a single checkpoint is loaded as a whole, and
    reset otherwise.

    Args:
        paths: the checkpoints, from `shards`.
        seed: seed to use if the checkpoints have none.
        stream: number of this rank's stream. Ranks that load the same part have different streams.
        rank, ranks: number of the part to load, and number of parts.

    Raises:
        UserError: a file is damaged.
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
    own = states[rank] if len(paths) == ranks else None
    if own is not None:
        try:
            generator = torch.tensor(list(base64.b64decode(own.generator)), dtype=torch.uint8)
            torch.Generator().set_state(generator)
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"{paths[rank] / STATE}: damaged (state of the random stream: {error})") from None
        if stream == (rank if own.rank is None else own.rank):
            return SamplerState(own.seed, generator, priorities)
    saved = seed_of(paths[0])
    seed = seed if saved is None else saved
    if ranks == 1 and not stream and not any(states):
        start = seed  # with RLinf's own files, the first rank draws the same rows as RLinf
    else:
        saved_states = ["" if state is None else state.generator for state in states]
        start = derive(seed, "buffer", "of", ranks, rank, stream, *saved_states)
    return SamplerState(seed, torch.Generator().manual_seed(start).get_state(), priorities)


def seed_of(path: Path) -> int | None:
    """Return the seed of a checkpoint, or None if it has none."""
    if rlinf.is_directory(path):
        return rlinf.seed_of(path)
    state = read_state(path)
    return None if state is None else state.seed


def read_state(path: Path) -> State | None:
    """Return the state in a checkpoint; None if ``path`` has no ``state.json``, as in a directory of RLinf.

    Raises `UserError` if the file is damaged.
    """
    try:
        return msgspec.json.decode((path / STATE).read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path / STATE}: damaged ({error})") from None
