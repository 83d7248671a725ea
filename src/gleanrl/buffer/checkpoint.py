"""Checkpoints: a folder of links and the random state; any number of them loads onto any number of ranks."""

from __future__ import annotations

import base64
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer import rlinf
from gleanrl.buffer.in_place import InPlace
from gleanrl.buffer.manifest import Manifest
from gleanrl.buffer.sampling import Sampler
from gleanrl.buffer.store import OURS, Store
from gleanrl.buffer.stored import SALVAGE, Stored
from gleanrl.buffer.trajectory import Rows
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

STATE = "state.json"
PRIORITIES = "priorities.npz"
PARTS = (Manifest.NAME, STATE, PRIORITIES)  # of a checkpoint, besides the buffer's own files
STATED = ("first", "highest", "weights")
TOGETHER = 64 << 20  # bytes of rows added at once while loading


@dataclass(frozen=True)
class State:
    """What a checkpoint holds besides the trajectories."""

    seed: int
    generator: str  # state of the random stream, base64
    size: int
    total_samples: int
    trajectory_counter: int
    rank: int | None = None  # whose random stream it is; None = not told, as in earlier versions


class Source(Protocol):
    """Trajectories to load from, in order."""

    def counts(self) -> list[int]:
        """Rows of each."""
        ...

    def checked(self, index: int) -> Rows:
        """Raises `UserError` where it is not as it was written."""
        ...

    def close(self) -> None: ...


class NativeSource:
    """A buffer's folder, or a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._store = Stored(folder)
        for why in self._store.lost():
            self._store.close()
            raise UserError(f"{why}; {SALVAGE}")

    def counts(self) -> list[int]:
        kept = self._store.records()
        return (kept["steps"].astype("int64") * kept["batch"]).tolist()

    def checked(self, index: int) -> Rows:
        try:
            return self._store.checked(self._store.first_id + index)
        except UserError as error:
            raise UserError(f"{self._store.folder}: {error}") from None

    def close(self) -> None:
        self._store.close()


def save(store: Store | InPlace, path: Path, *, seed: int, rank: int, sampler: Sampler) -> None:
    """Write a checkpoint, whole or not at all. Raises `UserError` where the disk is full."""
    with atomic.directory(path) as folder, store.still():
        store.share(folder)
        state = base64.b64encode(sampler.stream.state().numpy().tobytes()).decode()
        told = State(seed, state, store.next_id - store.first_id, store.count_rows(), store.next_id, rank)
        (folder / STATE).write_text(json.dumps(asdict(told), indent=1))
        if sampler.ranking is not None:
            kept = {f"{i}-{k}": v for i, own in enumerate(sampler.ranking.states(store)) for k, v in own.items()}
            np.savez(folder / PRIORITIES, **kept)


def check_replaceable(path: Path, own: Path | None, *, as_rlinf: bool = False) -> None:
    """A checkpoint may be written there. ``own``: the buffer's folder; ``as_rlinf``: it is to be one of RLinf's.

    Raises:
        UserError: something is there that is no checkpoint, so it would be lost.
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
    """The checkpoints in a folder: itself, or those of all ranks, in the order of their numbers.

    Raises:
        UserError: there is none.
    """
    if is_checkpoint(path):
        return [path]
    within = [entry for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []
    found = [own for own in within if is_checkpoint(own) and not own.name.startswith(atomic.TEMPORARY_PREFIX)]
    if not found:
        aside = [own for own in atomic.left_behind(path) if is_checkpoint(own)]
        hint = f"; {aside[0]} may be what was there before a crash" if aside else ""
        raise UserError(f"{path}: no checkpoint of a buffer; there would be {Manifest.NAME} or {rlinf.METADATA}{hint}")
    return sorted(found, key=lambda entry: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", entry.name)])


def is_checkpoint(path: Path) -> bool:
    return (path / Manifest.NAME).is_file() or rlinf.is_directory(path)


def opened(path: Path, *, pickles: bool = False) -> Source:
    """A checkpoint, a buffer's folder or RLinf's, to read."""
    return rlinf.Directory(path, pickles=pickles) if rlinf.is_directory(path) else NativeSource(path)


def load(
    store: Store | InPlace,
    paths: Sequence[Path],
    *,
    rank: int,
    ranks: int,
    pickles: bool = False,
    also: Callable[[], object] = bool,
) -> None:
    """Replace what the store holds by this rank's share. All or nothing, also in a crash.

    ``also`` is done before it counts; where it raises, nothing has changed.
    """
    if len(paths) == 1 and ranks == 1 and (paths[0] / Manifest.NAME).is_file():
        store.adopt(paths[0], also)
        return
    with store.afresh():
        batch: list[Rows] = []
        for rows in share(paths, rank=rank, ranks=ranks, pickles=pickles):
            batch.append(rows)
            if sum(column.nbytes for own in batch for column in own.columns.values()) > TOGETHER:
                store.add(batch)
                batch = []
        if batch:
            store.add(batch)
        also()


def share(paths: Sequence[Path], *, rank: int, ranks: int, pickles: bool = False) -> Iterator[Rows]:
    """A rank's trajectories: the sources one behind the other, cut into parts with nearly the same number of rows."""
    _check(rank, ranks)
    counts = []
    for path in paths:
        with closing(opened(path, pickles=pickles)) as source:
            counts.append(source.counts())
    total, before = sum(map(sum, counts)), 0
    for path, own in zip(paths, counts, strict=True):
        mine = []
        for index, count in enumerate(own):
            if (2 * before + count) * ranks // (2 * total) == rank:  # where its middle lies
                mine.append(index)
            before += count
        if mine:
            with closing(opened(path, pickles=pickles)) as source:
                for index in mine:
                    yield source.checked(index)


@dataclass(frozen=True)
class Remembered:
    """What a rank goes on with besides the trajectories."""

    seed: int
    generator: Tensor  # state of the random stream
    priorities: list[dict[str, Any]] | None


def remembered(paths: Sequence[Path], *, seed: int, stream: int, rank: int, ranks: int) -> Remembered:
    """The random stream and the priorities of a rank.

    Where as many ranks saved as load, each goes on as it was. Otherwise, and where another one saved what it loads, it
    gets a stream of its own, which depends on how far the saved ones had come. Priorities stay where one checkpoint is
    loaded as a whole, and begin anew elsewhere.

    Args:
        seed: where the checkpoint says none.
        stream: who this is among all who draw, those that load the same part included.
        rank, ranks: which part it loads, of how many.

    Raises:
        UserError: a file is damaged.
    """
    _check(rank, ranks)
    priorities = None
    if len(paths) == ranks == 1 and (paths[0] / PRIORITIES).is_file():
        priorities = _priorities(paths[0] / PRIORITIES)
    told = [state_of(path) for path in paths]
    own = told[rank] if len(paths) == ranks else None
    if own is not None:
        state = _generator(paths[rank], own["generator"])
        whose = own["rank"] if own["rank"] is not None else rank
        if whose == stream:
            return Remembered(own["seed"], state, priorities)
    saved = rlinf.seed_of(paths[0]) if rlinf.is_directory(paths[0]) else (told[0] or {}).get("seed")
    seed = seed if saved is None else saved
    if ranks == 1 and not stream and not any(told):
        start = seed  # the first rank, or the only one, on RLinf's own files draws what RLinf would
    else:
        reached = [state["generator"] if state is not None else "" for state in told]
        start = derive(seed, "buffer", "of", ranks, rank, stream, *reached)
    return Remembered(seed, torch.Generator().manual_seed(start).get_state(), priorities)


def _generator(path: Path, text: str) -> Tensor:
    """The state of a random stream. Raises `UserError` where it is none."""
    try:
        state = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (ValueError, RuntimeError, TypeError) as error:
        raise UserError(f"{path / STATE}: damaged (state of the random stream: {error})") from None
    return state


def restore(sampler: Sampler, known: Remembered) -> None:
    """Go on with it."""
    if sampler.ranking is not None and known.priorities is not None:
        sampler.ranking.restore(sampler.store, known.priorities)
    sampler.stream.restore(known.generator)


def _check(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise UserError(f"rank {rank} of {ranks}: ranks count from 0 to {ranks - 1}")


def _priorities(path: Path) -> list[dict[str, Any]]:
    try:
        with np.load(path, allow_pickle=False) as kept:
            return [{k: kept[f"{i}-{k}"] for k in STATED} for i in range(len(kept.files) // len(STATED))]
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: damaged ({error})") from None


def state_of(path: Path) -> dict[str, Any] | None:
    """None where the folder is no checkpoint of ours. Raises `UserError` where it is damaged."""
    try:
        told = json.loads((path / STATE).read_text())
        state = State(**told)
        whole = type(state.seed) is int and (state.rank is None or type(state.rank) is int)
        if not whole or not isinstance(state.generator, str):
            raise ValueError("a value of another type")
        return asdict(state)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path / STATE}: damaged ({error})") from None
