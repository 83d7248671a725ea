"""The trajectory replay buffer: ``[T, B, ...]`` trajectories on disk, sampled at memory speed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from gleanrl.buffer import checkpoint, rlinf
from gleanrl.buffer.in_place import OPEN, InPlace
from gleanrl.buffer.log import FAILURE, INTERVENED, SUCCESS
from gleanrl.buffer.prefetch import prefetched
from gleanrl.buffer.readable import Snapshot
from gleanrl.buffer.sampling import Batch, Sampler
from gleanrl.buffer.store import Limits, Store
from gleanrl.buffer.table import SEGMENT_NBYTES
from gleanrl.buffer.trajectory import Rows, TensorTrajectory
from gleanrl.buffer.windows import Only
from gleanrl.buffer.writer import Writer
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive


class TrajectoryReplayBuffer:
    """Trajectories of tensors ``[T, B, ...]``; one process writes, others may read the same folder.

    Args:
        path: the buffer's folder; what `add_trajectories` returned from is there after a crash. None: memory only.
            With ``read_only`` also a checkpoint, or RLinf's directory, which is sampled in place.
        seed: of the random choice. Each rank has a stream of its own.
        sample_window_size: sample from so many of the newest trajectories; 0 = from all.
        auto_save: False keeps everything in memory until `save_checkpoint`.
        max_rows, max_bytes, max_age: keep at most so many rows (T * B of each trajectory), bytes of files, seconds; the
            oldest trajectories go, by whole segments (see ``segment_bytes``); the newest stays.
        segment_bytes: about the size of a file; at most a quarter of what may be kept.
        priority_exponent: keep a priority for each chunk step, for `sample_prioritized`; 0 = uniform, 1 = as it is.
        read_only: read what another process writes; `refresh` is called by every sample.
        rank: which stream of random numbers; by default that of ``torch.distributed`` or of the variable ``RANK``.
        trajectory_format: what `save_checkpoint` writes: ``native``, or ``pt`` as RLinf does.
        auto_save_path: another name of ``path``, as RLinf calls it.
        cache_size: files of an RLinf directory that are open at once (0: as many as are good); our own need no limit.
        pickles: read ``.pkl`` files of an RLinf directory; they can run any code, so only files of your own.
        enable_cache: accepted for RLinf's callers; rows are read in place, so there is nothing to cache.

    Raises:
        UserError: another process writes there, the folder is no buffer, or an argument makes no sense.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        seed: int = 1234,
        sample_window_size: int = 0,
        auto_save: bool = True,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        max_age: float | None = None,
        segment_bytes: int = SEGMENT_NBYTES,
        priority_exponent: float | None = None,
        read_only: bool = False,
        rank: int | None = None,
        trajectory_format: str = "native",
        auto_save_path: str = "",
        enable_cache: bool = True,
        cache_size: int = 0,
        pickles: bool = False,
    ) -> None:
        if trajectory_format not in ("native", "pt"):
            why = "pickles can run anything when they are read" if trajectory_format == "pkl" else "unknown"
            raise UserError(f"trajectory_format = {trajectory_format!r}: {why}; use native or pt")
        if sample_window_size < 0:
            raise UserError(f"sample_window_size = {sample_window_size}: a number of trajectories, or 0 for all")
        folder = path or auto_save_path or None
        self.path = FilePath(folder) if folder is not None else None
        self.seed, self.rank = seed, _rank() if rank is None else rank
        self.trajectory_format = trajectory_format
        limits = Limits(max_rows, max_bytes, max_age)
        self._store: Store | InPlace
        if self.path is not None and rlinf.is_directory(self.path):
            if not read_only:
                raise UserError(
                    f"{self.path}: RLinf's directory; read it in place (read_only=True) or load_checkpoint it"
                )
            self._store = InPlace(self.path, open_files=cache_size or OPEN, pickles=pickles)
        else:
            self._store = Store(
                self.path if auto_save else None, writable=not read_only, limits=limits, segment_nbytes=segment_bytes
            )
        self._writer = Writer(self._store)
        generator = torch.Generator().manual_seed(seed if not self.rank else derive(seed, "buffer", self.rank))
        self._sampler = Sampler(self._store, sample_window_size, generator, priority_exponent)

    # --- adding ------------------------------------------------------------------------------------
    def add_trajectories(self, trajectories: Sequence[Any], *, wait: bool = True) -> list[int] | Future[list[int]]:
        """Store trajectories, and return their ids: they are on disk then, and the next `sample` may draw them.

        Args:
            trajectories: `TensorTrajectory`, or anything with its attributes (RLinf's ``Trajectory``).
            wait: False queues a copy of them and gives a future of the ids. The queue is bounded; a write that failed
                is raised by the future and by the next call.

        Raises:
            UserError: a field's shape does not fit, or ``max_bytes`` has no room.
            OSError: the disk is full or fails; none of them was added.
        """
        rows = [Rows.of(TensorTrajectory.of(trajectory), own=not wait) for trajectory in trajectories]
        if not wait:
            return self._writer.submit(rows)
        if not rows:
            return []
        if not self._writer.idle:
            return self._writer.submit(rows).result()
        self._writer.check()
        return self._store.add(rows)

    def flush(self) -> None:
        """Return when everything queued is on disk. Raises what a write failed with."""
        self._writer.flush()

    # --- sampling ----------------------------------------------------------------------------------
    def sample(
        self,
        num_chunks: int,
        *,
        only: Only | None = None,
        fields: Collection[str] | None = None,
        allow_short: bool = False,
        indices: bool = False,
    ) -> Batch:
        """Chunk steps, uniform with replacement over the window: `Sampler.sample`."""
        return self._sampler.sample(num_chunks, only=only, fields=fields, allow_short=allow_short, indices=indices)

    def sample_slices(
        self, num_slices: int, length: int, *, only: Only | None = None, fields: Collection[str] | None = None
    ) -> Batch:
        """Runs of ``length`` chunk steps inside one episode: `Sampler.sample_slices`."""
        return self._sampler.sample_slices(num_slices, length, only=only, fields=fields)

    def sample_n_step(self, num_chunks: int, n: int, gamma: float, *, only: Only | None = None) -> Batch:
        """Chunk steps and what follows in up to ``n`` of them: `Sampler.sample_n_step`."""
        return self._sampler.sample_n_step(num_chunks, n, gamma, only=only)

    def sample_prioritized(self, num_chunks: int, beta: float = 0.4, *, fields: Collection[str] | None = None) -> Batch:
        """Chunk steps by priority, with importance weights: `Sampler.sample_prioritized`."""
        return self._sampler.sample_prioritized(num_chunks, beta, fields=fields)

    def update_priorities(self, indices: Tensor, priorities: Tensor) -> None:
        """`Sampler.update_priorities`."""
        self._sampler.update_priorities(indices, priorities)

    def iterate(
        self,
        num_chunks: int,
        *,
        batches: int | None = None,
        prefetch: int = 2,
        pin_memory: bool | None = None,
        device: torch.device | str | None = None,
        **how: Any,
    ) -> Iterator[Batch]:
        """Samples without end, or ``batches`` of them, made ahead in a thread.

        A checkpoint's random state is that before the first one that was not given out, so a resumed run gets it; but
        not where something else was sampled meanwhile.

        Args:
            num_chunks, how: of `sample`.
            prefetch: how many are ready before they are asked for.
            pin_memory: in memory that a GPU reads by itself; by default where there is one.
            device: where the tensors go.
        """
        pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        return prefetched(lambda: self.sample(num_chunks, **how), self._sampler.stream, batches, prefetch, pin, device)

    def read(self, indices: Tensor, fields: Collection[str] | None = None) -> Batch:
        """The chunk steps with these indices: `Sampler.read`."""
        return self._sampler.read(indices, fields)

    def trajectory(self, number: int) -> TensorTrajectory:
        """A whole trajectory, as it was added. Raises `UserError` where it is not there."""
        with self._settled():
            return self._store.trajectory(number).trajectory()

    # --- checkpoints -------------------------------------------------------------------------------
    def save_checkpoint(self, save_path: str | os.PathLike[str]) -> None:
        """Write all trajectories and the random state to a folder, whole or not at all.

        On the same disk these are links to the buffer's files, so it takes milliseconds whatever the size, and later
        evictions do not touch it. With ``trajectory_format="pt"`` it is a directory as RLinf writes it.

        Raises:
            UserError: something that is no checkpoint is there, the disk is full, or a trajectory is damaged.
        """
        self._writer.flush()
        target, as_rlinf = FilePath(save_path), self.trajectory_format == "pt"
        checkpoint.check_replaceable(target, self._store.folder, as_rlinf=as_rlinf)
        if as_rlinf:
            with self._store.held():
                rlinf.export(target, self._store.whole(), seed=self.seed)
        else:
            checkpoint.save(self._store, target, seed=self.seed, rank=self.rank, sampler=self._sampler)
        for left in atomic.left_behind(target):
            shutil.rmtree(left, ignore_errors=True)  # each would keep all files on the disk

    def load_checkpoint(
        self,
        load_path: str | os.PathLike[str],
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        pickles: bool = False,
        also: Callable[[], object] = bool,
    ) -> None:
        """Become what a checkpoint holds; what was in this buffer is forgotten. All or nothing, also in a crash.

        Args:
            load_path: a checkpoint, ours or RLinf's, or a folder with those of all ranks.
            is_distributed: take this rank's share only: about the same number of rows for each.
            local_rank, world_size: this rank, of how many.
            pickles: read RLinf's ``.pkl`` files; they can run any code, so only files of your own.
            also: done when all is in place and before it counts; where it raises, nothing has changed.

        The random stream goes on where it was if as many ranks saved as load and this ``rank`` saved its part; else
        each rank gets one of its own.

        Raises:
            UserError: there is no checkpoint, it is damaged, or the disk is full.
        """
        self._writer.flush()
        rank, ranks = (local_rank, world_size) if is_distributed else (0, 1)
        paths = checkpoint.shards(FilePath(load_path))
        known = checkpoint.remembered(paths, seed=self.seed, stream=self.rank, rank=rank, ranks=ranks)
        checkpoint.load(self._store, paths, rank=rank, ranks=ranks, pickles=pickles, also=also)
        checkpoint.restore(self._sampler, known)
        self.seed = known.seed

    def verify(self) -> list[str]:
        """What is not as it was written, a line each; all data are read."""
        with self._settled():
            return list(self._store.damage())

    @contextmanager
    def _settled(self) -> Iterator[Snapshot]:
        """What is there now, and not while it is replaced by another thread."""
        self._store.refresh()
        with self._store.held() as now:
            yield now

    # --- state -------------------------------------------------------------------------------------
    def __len__(self) -> int:
        """Trajectories that are kept."""
        with self._settled() as now:
            return now.next_id - now.first_id

    @property
    def size(self) -> int:
        return len(self)

    @property
    def total_samples(self) -> int:
        """Chunk steps (rows) that are kept."""
        with self._settled() as now:
            return now.count_rows()

    @property
    def window_samples(self) -> int:
        """Chunk steps (rows) that `sample` draws from: those of the newest ``sample_window_size`` trajectories."""
        return self._sampler.count_rows()

    @property
    def trajectory_counter(self) -> int:
        """Trajectories that were ever added; the next one's id."""
        with self._settled() as now:
            return now.next_id

    def is_ready(self, min_size: int) -> bool:
        """Whether there are ``min_size`` trajectories."""
        return len(self) >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """`is_ready`, to be awaited."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, float]:
        with self._settled() as now:
            kept = now.survey()
            episodes, flags = int(kept["episodes"].sum()), kept["flags"].copy()
        return {
            "num_trajectories": len(kept),
            "total_samples": now.count_rows(),
            "bytes": self._store.nbytes,
            "episodes": episodes,
            "successes": int(((flags & SUCCESS) > 0).sum()),
            "failures": int(((flags & FAILURE) > 0).sum()),
            "intervened": int(((flags & INTERVENED) > 0).sum()),
        }

    def clear(self) -> None:
        """Forget every trajectory. Ids go on."""
        self._writer.flush()
        self._store.drop(self._store.next_id)

    def clear_cache(self) -> None:
        """Nothing to do: rows are read where they lie."""

    def close(self, wait: bool = True) -> None:
        """Give files and memory back, after what is queued is on disk (``wait``), or without it."""
        try:
            self._writer.close(wait=wait)
        finally:
            self._store.close()

    def __enter__(self) -> TrajectoryReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rank() -> int:
    """This process's number among those that train together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
