"""The public classes of the replay buffer, which stores trajectories of tensors ``[T, B, ...]`` on disk.

```python
with TrajectoryReplayBuffer("buffer", seed=0) as buffer:
    buffer.add_trajectories([TensorTrajectory(actions=..., rewards=..., curr_obs={"image": ...})])
    batch = buffer.sample(256)  # batch["actions"] is [256, ...]
```

A *chunk step* is one decision of the policy in one environment: a chunk of C consecutive actions. The buffer stores
each chunk step as one *row*, so a trajectory of T chunk steps in B environments has T * B rows. The files are mapped
into memory, so rows that the operating system has cached are read as fast as tensors in memory.
"""

from __future__ import annotations

import base64
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, InstanceOf
from torch import Tensor

from gleanrl.buffer import checkpoint, rlinf
from gleanrl.buffer.arguments import Exponent, Flag, checked
from gleanrl.buffer.background import RandomStream, WriteQueue
from gleanrl.buffer.log import FAILURE, INTERVENED, SUCCESS
from gleanrl.buffer.reader import BufferReader
from gleanrl.buffer.sampling import Batch, Sampler, Windows
from gleanrl.buffer.table import SEGMENT_NBYTES
from gleanrl.buffer.trajectory import INSTRUCTIONS, FlatTrajectory, TensorTrajectory
from gleanrl.buffer.writer import BufferWriter, Limits
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive
from gleanrl.utils.settings import Fraction, NonNegative, Positive, PositiveFloat


def _not_a_seed(path: Any) -> Any:
    if isinstance(path, int):
        raise ValueError(
            f"it is the folder of the buffer; a seed, RLinf's first argument, is given by name: seed={path}"
        )
    return path


class TrajectoryReplayBuffer(Sampler):
    """A replay buffer of trajectories. One process writes a folder, and others may read it at the same time.

    The methods that draw and read batches are inherited from `Sampler`. In a process that is forked while the buffer is
    open, or to which the buffer is pickled, it is read-only and draws from a random stream of its own.

    Args:
        path: folder of the buffer, which is created if it is missing. A trajectory survives a crash once
            `add_trajectories` has returned its id. None: the buffer is in memory. With ``read_only``, the folder may
            also be a checkpoint, or a directory of RLinf, which is sampled without conversion.
        seed: seed of the random draws. Each rank derives its own random stream from it.
        sample_window_size: number of the newest trajectories from which `sample` draws; 0: all.
        auto_save: False keeps all trajectories in memory even if ``path`` is given. `save_checkpoint` writes them.
        max_rows: largest number of rows. Limits are applied when trajectories are added: the oldest trajectories are
            dropped then, where possible all trajectories of a file together, but never the newest one by this limit.
        max_bytes: largest total size of the files, in bytes.
        max_age: largest age of a trajectory, in seconds.
        segment_bytes: approximate size in bytes of a file with rows. A smaller size is used if a file would take more
            than a quarter of ``max_bytes`` or ``max_rows``. A file has at least the rows with which each large field
            fills whole pages: up to 4,096 rows, or 256 if the bytes of each large field are a multiple of 16.
        priority_exponent: enables `sample_prioritized`, which draws each chunk step in proportion to
            priority ** ``priority_exponent``. None: the buffer keeps no priorities.
        read_only: open the buffer only for reading. Another process may be writing it. Each sample includes all
            trajectories that were added before.
        rank: number of this process's random stream. By default it is the rank in ``torch.distributed``, or if that is
            not initialised the environment variable ``RANK``, or 0.
        world_size: number of processes that save checkpoints into a common folder together. A later load refuses a
            folder with checkpoints of different numbers, because some of them are of an earlier save. By default it is
            the size of ``torch.distributed``, or the environment variable ``WORLD_SIZE``; if neither is there, no
            folder is refused.
        trajectory_format: format of `save_checkpoint`: ``native``, or ``pt`` for a directory that RLinf can read.
        auto_save_path: RLinf's name for ``path``. It is used if ``path`` is not given.
        cache_size: largest number of files of an RLinf directory that are mapped at once; 0: a default. It has no
            effect on buffers in the native format, whose files are always mapped.
        pickles: also read ``.pkl`` files of an RLinf directory. They can run any code when they are read.
        enable_cache: has no effect, because rows are read from mapped files without a cache. RLinf's callers pass it.

    Raises:
        UserError: another process writes to the folder, the folder is not a buffer, or an argument is invalid.
    """

    @checked
    def __init__(
        self,
        path: Annotated[str | os.PathLike[str] | None, BeforeValidator(_not_a_seed)] = None,
        *,
        seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] = 1234,
        sample_window_size: NonNegative = 0,
        auto_save: Flag = True,
        max_rows: Positive | None = None,
        max_bytes: Positive | None = None,
        max_age: PositiveFloat | None = None,
        segment_bytes: Positive = SEGMENT_NBYTES,
        priority_exponent: Exponent | None = None,
        read_only: Flag = False,
        rank: NonNegative | None = None,
        world_size: Positive | None = None,
        trajectory_format: Literal["native", "pt"] = "native",
        auto_save_path: str | os.PathLike[str] = "",
        enable_cache: Flag = True,
        cache_size: NonNegative = 0,
        pickles: Flag = False,
    ) -> None:
        folder = path or auto_save_path or None
        self.path = Path(folder) if folder is not None else None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if rank is None:
            if distributed:
                rank = torch.distributed.get_rank()
            elif (given := os.environ.get("RANK", "0")).isdecimal():
                rank = int(given)
            else:
                raise UserError(f"the environment variable RANK is {given!r}, not a number; unset it, or give rank=...")
        if world_size is None:
            if distributed:
                world_size = torch.distributed.get_world_size()
            elif (given := os.environ.get("WORLD_SIZE", "")).isdecimal():
                world_size = int(given) or None
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.trajectory_format = trajectory_format
        storage: BufferReader | rlinf.RLinfReader
        if self.path is not None and rlinf.is_directory(self.path):
            if not read_only:
                raise UserError(
                    f"{self.path}: RLinf's directory; read it in place (read_only=True) or load_checkpoint it"
                )
            storage = rlinf.RLinfReader(self.path, open_files=cache_size or rlinf.OPEN_FILES, pickles=pickles)
        elif read_only:
            storage = BufferReader(self.path if auto_save else None)
        else:
            limits = Limits(max_rows, max_bytes, max_age)
            storage = BufferWriter(self.path if auto_save else None, limits=limits, segment_nbytes=segment_bytes)
        self.write_queue = WriteQueue(self._add)
        generator = torch.Generator().manual_seed(seed if not self.rank else derive(seed, "buffer", self.rank))
        super().__init__(storage, sample_window_size, generator, priority_exponent)
        self._forks = 0  # number of processes that were forked since this object was made
        _buffers.add(self)

    # --- adding ----------------------------------------------------------------------------------
    @checked
    def add_trajectories(
        self, trajectories: InstanceOf[Sequence[Any]], *, wait: Flag = True
    ) -> list[int] | Future[list[int]]:
        """Store trajectories, and return their ids once they are on disk. The next `sample` may draw from them.

        Args:
            trajectories: instances of `TensorTrajectory`, or mappings or objects with the same names, such as RLinf's
                ``Trajectory``. Tensors under other names are stored too (see `TensorTrajectory.extra_fields`).
            wait: False copies the trajectories, queues them for a background thread, and returns a future of the ids.
                The call blocks while the queue is full. If writing fails, the future raises the error. The next call of
                `add_trajectories`, `flush` or `close` raises it too.

        Raises:
            UserError: a field is not a tensor or its shape does not fit the others, ``max_bytes`` is too small for the
                trajectories, or this process must not write to the folder.
            OSError: the disk is full or fails. None of the trajectories is added then.
        """
        flat = [FlatTrajectory.flatten(TensorTrajectory.of(own), copy=not wait) for own in trajectories]
        if not wait:
            return self.write_queue.submit(flat)
        if not flat:
            return []
        if not self.write_queue.idle:
            return self.write_queue.submit(flat, awaited=True).result()
        self.write_queue.raise_error()
        return self._add(flat)

    def _add(self, trajectories: Sequence[FlatTrajectory]) -> list[int]:
        return self._writer().add(trajectories)

    def _writer(self) -> BufferWriter:
        """Return the storage as a writer. Raises `UserError` if it is read-only."""
        if isinstance(self.storage, BufferWriter):
            return self.storage
        with self.storage.held():  # raises `RuntimeError` if the buffer is closed
            pass
        why = "the buffer was opened with read_only=True; load it into another buffer to write"
        raise UserError(f"{self.path}: {why}")

    def flush(self) -> None:
        """Block until all queued trajectories are on disk. Raises the error of a failed write."""
        self.write_queue.flush()

    @checked
    def trajectory(self, number: int, *, verify: Flag = False) -> TensorTrajectory:
        """Return the trajectory with id ``number`` as it was added.

        With ``verify``, the checksum of its rows is verified, for which all of them are read twice. Task descriptions
        are always verified, here and when they are sampled.

        Raises:
            UserError: there is no such trajectory, it cannot be read, or it is damaged.
        """
        with self._held():
            return self.storage.trajectory(number, verify=verify).unflatten()

    sample_chunks = Sampler.sample
    """RLinf's name of `sample`."""

    # --- checkpoints -----------------------------------------------------------------------------
    @checked
    def save_checkpoint(self, save_path: str | os.PathLike[str]) -> None:
        """Write all trajectories, the random state and the priorities to a folder, either completely or not at all.

        On the same disk, the files are hard links to those of the buffer. Saving therefore takes milliseconds for any
        size, and trajectories that the buffer drops later stay in the checkpoint. With ``trajectory_format="pt"``, the
        checkpoint is a directory of RLinf, which has the trajectories and the seed, but no random state or priorities.

        Raises:
            UserError: the folder exists and is not a checkpoint, the disk is full, or a trajectory is damaged.
        """
        self.write_queue.flush()
        target, as_rlinf = Path(save_path), self.trajectory_format == "pt"
        checkpoint.check_replaceable(target, self.storage.folder, as_rlinf=as_rlinf)
        if as_rlinf:
            with self._held():
                rlinf.export(target, self.storage.verified_all(), seed=self.seed)
        else:
            checkpoint.save(self, target, seed=self.seed, rank=self.rank, ranks=self.world_size)
        for left in atomic.left_behind(target):
            # hard links in the folder of an interrupted save would keep files on disk that the buffer has removed
            shutil.rmtree(left, ignore_errors=True)

    @checked
    def load_checkpoint(
        self,
        load_path: str | os.PathLike[str],
        is_distributed: Flag = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        pickles: Flag = False,
        before_commit: Callable[[], object] = bool,
    ) -> None:
        """Replace the content of the buffer by a checkpoint, completely or not at all, even if the process crashes.

        The random stream of this rank continues if the checkpoint was saved by the same number of ranks and this rank
        loads the part that it saved. Otherwise the rank gets a new stream.

        If the checkpoint exceeds ``max_bytes``, or has larger files than this buffer would write, its newest
        trajectories are copied. They get new ids, and their priorities are reset.

        Args:
            load_path: a checkpoint in the native format, a directory of RLinf, a LeRobot data set, or a folder with one
                of these for each rank.
            is_distributed: load only this rank's part of the trajectories. All parts have nearly the same size.
            local_rank: index of the part to load. Used if ``is_distributed`` is True.
            world_size: number of parts. Used if ``is_distributed`` is True.
            pickles: also read RLinf's ``.pkl`` files. They can run any code when they are read.
            before_commit: called after all new files are written and before they replace the old content. If it raises
                an error, the buffer keeps its old content.

        Raises:
            UserError: there is no checkpoint, it is damaged, the checkpoints of ranks are of several saves (see
                ``world_size``), or the disk is full.
        """
        self.write_queue.flush()
        self._writer()
        rank, ranks = (local_rank, world_size) if is_distributed else (0, 1)
        paths = checkpoint.shards(Path(load_path))
        with checkpoint.opened(paths, pickles=pickles) as sources:
            self._load(paths, sources, rank=rank, ranks=ranks, before_commit=before_commit)

    def _load(
        self,
        paths: Sequence[Path],
        sources: Sequence[checkpoint.Source],
        *,
        rank: int,
        ranks: int,
        before_commit: Callable[[], object] = bool,
    ) -> None:
        """Do what `load_checkpoint` does, with the checkpoints at ``paths`` opened as ``sources``."""
        writer = self._writer()
        state = checkpoint.read_sampler_state(paths, seed=self.seed, stream=self.rank, rank=rank, ranks=ranks)
        same = checkpoint.load(writer, sources, rank=rank, ranks=ranks, before_commit=before_commit)
        if same and self.priorities is not None and state.priorities is not None:
            self.priorities.restore(writer, state.priorities)
        self.stream.restore(state.generator)
        self.seed = state.seed

    def verify(self) -> list[str]:
        """Read all data, and return an error message for each damaged trajectory or file."""
        with self._held():
            return list(self.storage.damage())

    # --- state -----------------------------------------------------------------------------------
    def __len__(self) -> int:
        """Return the number of trajectories."""
        with self._held() as now:
            return now.next_id - now.first_id

    @property
    def size(self) -> int:
        """Number of trajectories."""
        return len(self)

    @property
    def total_samples(self) -> int:
        """Number of chunk steps (rows)."""
        with self._held() as now:
            return now.count_rows()

    @property
    def trajectory_counter(self) -> int:
        """Number of all trajectories added so far, including dropped ones. It is also the id of the next trajectory."""
        with self._held() as now:
            return now.next_id

    @checked
    def is_ready(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return len(self) >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """Return the same as `is_ready`. RLinf's buffer has this method."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, float]:
        """Return the numbers of kept trajectories, rows, bytes and ends of episodes.

        ``successes`` and ``failures`` are the numbers of trajectories that were added with ``success`` True and False,
        and ``intervened`` is the number of trajectories in which a human acted.
        """
        with self._held() as now:
            records = self.storage.full_records()
            flags, episodes = records["flags"].copy(), int(records["episodes"].sum())
        return {
            "num_trajectories": len(records),
            "total_samples": now.count_rows(),
            "bytes": self.storage.nbytes,
            "episodes": episodes,
            "successes": int(((flags & SUCCESS) > 0).sum()),
            "failures": int(((flags & FAILURE) > 0).sum()),
            "intervened": int(((flags & INTERVENED) > 0).sum()),
        }

    def clear(self) -> None:
        """Drop all trajectories. Their ids are not used again: trajectories that are added later get higher ids."""
        self.write_queue.flush()
        writer = self._writer()
        # Without the lock, ``snapshot`` could be read while another thread is opening new files, when the snapshot does
        # not yet contain all trajectories.
        with writer.lock:
            writer.drop(writer.snapshot.next_id)

    def _after_fork(self) -> None:
        """Make the buffer read-only, with a random stream of its own. Called in a forked process."""
        self.storage.after_fork()
        # Other threads, which do not exist in this process, may have held the locks of these objects.
        self.write_queue, self.windows = WriteQueue(self._add), Windows()
        if self.priorities is not None:
            self.priorities.lock = threading.Lock()
        self.generator.manual_seed(self._copy_seed())
        self.stream = RandomStream(self.generator)

    def _copy_seed(self) -> int:
        """Return the seed of the random stream of the copy in the newest other process."""
        state = base64.b64encode(self.generator.get_state().numpy().tobytes()).decode()
        return derive(self.seed, "buffer", "fork", self._forks, state)

    def __reduce__(self) -> tuple[Callable[..., TrajectoryReplayBuffer], tuple[Any, ...]]:
        """Pickle the buffer for another process, in which it is read-only and has a random stream of its own.

        Raises `UserError` if the buffer is in memory.
        """
        if (folder := self.storage.folder) is None:
            raise UserError("a buffer in memory belongs to one process; give it a path to read it in another one")
        self._forks += 1
        how: dict[str, Any] = {"seed": self.seed, "rank": self.rank, "world_size": self.world_size}
        how["sample_window_size"] = self.window
        if self.priorities is not None:
            how["priority_exponent"] = self.priorities.exponent
        if isinstance(self.storage, rlinf.RLinfReader):
            how |= {"cache_size": self.storage.open_files, "pickles": self.storage.pickles}
        return _opened_copy, (folder, how, self._copy_seed())

    def clear_cache(self) -> None:
        """Do nothing, because rows are read from mapped files without a cache. RLinf's buffer has this method."""

    @checked
    def close(self, wait: Flag = True) -> None:
        """Close all files. Raises the error of a failed write.

        With ``wait``, queued trajectories are written first. Otherwise their futures are cancelled.
        """
        try:
            self.write_queue.close(wait=wait)
        finally:
            self.storage.close()

    def __enter__(self) -> TrajectoryReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened_copy(folder: Path, how: dict[str, Any], seed: int) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(folder, read_only=True, **how)
    buffer.generator.manual_seed(seed)
    return buffer


_buffers: weakref.WeakSet[TrajectoryReplayBuffer] = weakref.WeakSet()


def _before_fork() -> None:
    for buffer in list(_buffers):
        buffer._forks += 1


def _after_fork() -> None:
    for buffer in list(_buffers):
        buffer._after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


class MixedReplayBuffer:
    """Draws batches in which a fixed share of the chunk steps comes from demonstrations.

    RLPD (Ball et al. 2023) trains on such batches with a share of one half.

    Args:
        online: buffer with trajectories of the policy.
        demonstrations: buffer with trajectories of an expert.
        share: share of demonstrations in each batch, from 0 to 1. It is rounded to a whole number of chunk steps.
    """

    ONLINE, DEMONSTRATIONS = "online", "demonstrations"
    """Names of the two folders of a checkpoint."""

    @checked
    def __init__(
        self, online: TrajectoryReplayBuffer, demonstrations: TrajectoryReplayBuffer, share: Fraction = 0.5
    ) -> None:
        self.online, self.demonstrations, self.share = online, demonstrations, share

    @staticmethod
    @checked
    def divide(num_chunks: Positive, share: Fraction) -> tuple[int, int]:
        """Return how many of ``num_chunks`` chunk steps come from ``online`` and how many from ``demonstrations``."""
        shown = round(num_chunks * share)
        return num_chunks - shown, shown

    @checked
    def sample(self, num_chunks: Positive, **how: Any) -> Batch:
        """Draw a batch from both buffers with `TrajectoryReplayBuffer.sample`; ``how`` holds further arguments for it.

        ``demonstration``, bool ``[num_chunks]``, is added to the batch. It is True for chunk steps of demonstrations.
        """
        counts = self.divide(num_chunks, self.share)
        batches, demonstration = [], []
        for buffer, count, shown in zip((self.online, self.demonstrations), counts, (False, True), strict=True):
            if count:
                batch = buffer.sample(count, **{**how, "indices": True})
                batches.append(batch)
                demonstration.append(torch.full((len(batch["indices"]),), shown))
        if any(INSTRUCTIONS in batch for batch in batches):  # rows of a buffer without task descriptions get empty ones
            batches = [{INSTRUCTIONS: [""] * len(batch["indices"]), **batch} for batch in batches]
        batch = batches[0] if len(batches) == 1 else _joined(*batches)
        if not how.get("indices"):
            del batch["indices"]
        return {**batch, "demonstration": torch.cat(demonstration)}

    @checked
    def save_checkpoint(self, save_path: str | os.PathLike[str]) -> None:
        """Save a checkpoint of both buffers, in two subfolders of ``save_path``."""
        self.online.save_checkpoint(Path(save_path) / self.ONLINE)
        self.demonstrations.save_checkpoint(Path(save_path) / self.DEMONSTRATIONS)

    @checked
    def load_checkpoint(self, load_path: str | os.PathLike[str], **how: Any) -> None:
        """Load both buffers. If one cannot be loaded, both keep their content.

        There is one exception: if the disk becomes full, or the process is killed, after the demonstrations are loaded
        and before the last small file of the online buffer is written, only the demonstrations are loaded.

        Raises:
            UserError: the checkpoint of one is missing or damaged, or the disk is full.
        """
        shown = Path(load_path) / self.DEMONSTRATIONS
        load_shown = partial(self.demonstrations.load_checkpoint, shown, **how)
        self.online.load_checkpoint(Path(load_path) / self.ONLINE, **how, before_commit=load_shown)


def _joined(first: Batch, second: Batch) -> Batch:
    """Concatenate the fields that both batches have. Raises `UserError` if a field differs in more than its length."""
    joined: Batch = {}
    for name in first:
        if name not in second:
            continue
        ours, theirs = first[name], second[name]
        if type(ours) is not type(theirs):
            raise UserError(f"{name}: a tensor in one of online and demonstrations, and several fields in the other")
        if isinstance(ours, dict):
            joined[name] = _joined(ours, theirs)
        elif isinstance(ours, Tensor):
            if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
                both = f"{list(ours.shape[1:])} {ours.dtype} and {list(theirs.shape[1:])} {theirs.dtype}"
                raise UserError(f"{name}: online and demonstrations differ: {both}")
            joined[name] = torch.cat([ours, theirs])
        else:
            joined[name] = [*ours, *theirs]
    return joined
