"""Buffers into one, one into several, and into others' formats; each is written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from gleanrl.buffer import checkpoint, lerobot, rlinf, tensor_files
from gleanrl.buffer.checkpoint import TOGETHER
from gleanrl.buffer.in_place import InPlace
from gleanrl.buffer.replay_buffer import TrajectoryReplayBuffer
from gleanrl.buffer.schema import Field
from gleanrl.buffer.store import Store
from gleanrl.buffer.stored import Stored
from gleanrl.buffer.table import SEGMENT_NBYTES
from gleanrl.buffer.trajectory import Rows
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

Done = Callable[[], object]  # called for each part that is done
FORMATS = ("rlinf", "safetensors", "lerobot")
RANK = "rank-{}"  # folder of a rank's checkpoint


def opened(path: Path, *, pickles: bool = False) -> Stored | InPlace:
    """One buffer, checkpoint or RLinf directory, to read."""
    return InPlace(path, pickles=pickles) if rlinf.is_directory(path) else Stored(path)


def extent(paths: Iterable[Path], *, pickles: bool = False) -> tuple[int, int]:
    """Trajectories of all of them, and bytes of their rows."""
    total = nbytes = 0
    for path in paths:
        with closing(opened(path, pickles=pickles)) as store:
            total += store.next_id - store.first_id
            nbytes += sum(own.rows * own.schema.row_nbytes for own in store.tables)
    return total, nbytes


def trajectories(paths: Iterable[Path], *, pickles: bool = False, left_out: list[str] | None = None) -> Iterator[Rows]:
    """All of them, in order.

    Args:
        left_out: gets a line for each trajectory that is damaged; without it (None) the first one is a `UserError`.
    """
    for path in paths:
        with closing(opened(path, pickles=pickles)) as store:
            if left_out is None:
                try:
                    yield from store.whole()
                except UserError as error:
                    raise UserError(f"{path}: {error}") from None
                continue
            for found in store.salvaged():
                if isinstance(found, Rows):
                    yield found
                else:
                    left_out.append(f"{path}: {found}")


def merge(rows: Iterable[Rows], out: Path, nbytes: int = SEGMENT_NBYTES, done: Done = bool) -> tuple[int, int]:
    """Write trajectories to a new buffer; how many, and how many rows they have.

    ``nbytes``: about how much they are, so that few do not get files for many.

    Raises:
        UserError: something is there already, or the disk is full.
    """
    check_new(out)
    with atomic.directory(out) as folder, closing(Store(folder, segment_nbytes=_segment(nbytes))) as store:
        for batch in _batches(rows):
            store.add(batch)
            for _ in batch:
                done()
        return store.next_id, store.count_rows()


def split(path: Path, out: Path, parts: int, *, pickles: bool = False, done: Done = bool) -> list[tuple[int, int]]:
    """Write a checkpoint for each of ``parts`` ranks, as `load_checkpoint` would share them out; size and rows of each.

    Raises:
        UserError: there are fewer trajectories than parts, something is there already, or the disk is full.
    """
    check_new(out)
    there, nbytes = extent(checkpoint.shards(path), pickles=pickles)
    if not 1 <= parts <= there:
        raise UserError(f"{path}: {there} trajectories cannot be split into {parts} parts")
    written = []
    with atomic.directory(out) as folder:
        for rank in range(parts):
            with TrajectoryReplayBuffer(folder / "part", rank=rank, segment_bytes=_segment(nbytes // parts)) as buffer:
                buffer.load_checkpoint(path, is_distributed=True, local_rank=rank, world_size=parts, pickles=pickles)
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
    """Write all trajectories of ``paths`` in one of `FORMATS`; what was written.

    ``fps`` is of ``lerobot`` only, ``left_out`` as in `trajectories`.

    Raises:
        UserError: something is there already, the disk is full, or pyarrow is missing.
    """
    check_new(out)
    rows = _counted(trajectories(paths, pickles=pickles, left_out=left_out), done)
    if form == "rlinf":
        seed = seed_of(paths)
        return f"{rlinf.export(out, rows, seed=1234 if seed is None else seed)} trajectories"
    if form == "safetensors":
        return f"{tensor_files.export(rows, out)} trajectories"
    return lerobot.export(rows, out, shared(paths, pickles=pickles), fps=fps)


def shared(paths: Iterable[Path], *, pickles: bool = False) -> list[Field]:
    """The fields that all trajectories have, alike in type and shape."""
    found: dict[Field, None] | None = None
    for path in paths:
        with closing(opened(path, pickles=pickles)) as store:
            now = store.snapshot
            for own in now.tables:
                first, end = now.rows(own.number)
                if end > first:
                    here = dict.fromkeys(own.schema.fields)
                    found = here if found is None else {field: None for field in found if field in here}
    return list(found or ())


def seed_of(paths: Sequence[Path]) -> int | None:
    """What the first of some checkpoints draws by; None where it does not say."""
    if rlinf.is_directory(paths[0]):
        return rlinf.seed_of(paths[0])
    return (checkpoint.state_of(paths[0]) or {}).get("seed")


def check_new(out: Path) -> None:
    """Raises `UserError` where something is there already."""
    if out.exists():
        raise UserError(f"{out}: there already; name a new folder")


def _segment(nbytes: int) -> int:
    return min(SEGMENT_NBYTES, max(1 << 20, nbytes))


def _counted(rows: Iterable[Rows], done: Done) -> Iterator[Rows]:
    for own in rows:
        yield own
        done()


def _batches(rows: Iterable[Rows]) -> Iterator[list[Rows]]:
    """So many at once that each commit is worth its syncs."""
    batch: list[Rows] = []
    nbytes = 0
    for own in rows:
        batch.append(own)
        nbytes += own.nbytes
        if nbytes > TOGETHER:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
