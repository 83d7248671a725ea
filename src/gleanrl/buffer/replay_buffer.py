"""The trajectory replay buffer: ``[T, B, ...]`` trajectories on disk, sampled at memory speed.

```python
with TrajectoryReplayBuffer("buffer", seed=0) as buffer:
    buffer.add_trajectories([TensorTrajectory(actions=..., rewards=..., curr_obs={"image": ...})])
    batch = buffer.sample(256)  # batch["actions"] is [256, ...]
```
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gleanrl.buffer import checkpoint, rlinf
from gleanrl.buffer.background import WriteQueue
from gleanrl.buffer.log import FAILURE, INTERVENED, SUCCESS
from gleanrl.buffer.reader import BufferReader
from gleanrl.buffer.sampling import Batch, Sampler
from gleanrl.buffer.table import SEGMENT_NBYTES
from gleanrl.buffer.trajectory import INSTRUCTIONS, FlatTrajectory, TensorTrajectory
from gleanrl.buffer.writer import BufferWriter, Limits
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive


class TrajectoryReplayBuffer(Sampler):
    """A replay buffer of trajectories. One process writes a folder, and others may read it at the same time.

    The methods that draw and read batches are in `Sampler`.

    Args:
        path: the buffer's folder. Trajectories survive a crash once `add_trajectories` has returned. None: in memory.
            With ``read_only`` it may also be a checkpoint, or a directory of RLinf, which is sampled in place.
        seed: seed of the random draws. Each rank has its own random stream.
        sample_window_size: number of newest trajectories to sample from; 0: all.
        auto_save: False keeps all trajectories in memory until `save_checkpoint`.
        max_rows, max_bytes, max_age: limits on rows (T * B of each trajectory), bytes of files, and seconds. The oldest
            trajectories are dropped, in whole segments (see ``segment_bytes``). The newest trajectory is always kept.
        segment_bytes: approximate size of a file, at most a quarter of ``max_bytes`` and ``max_rows``.
        priority_exponent: None: no priorities. Otherwise each chunk step has a priority for `sample_prioritized`, which
            draws uniformly with exponent 0 and in proportion to priorities with 1.
        read_only: read a folder that another process may be writing. Each sample sees all earlier additions.
        rank: number of the random stream, by default the rank of ``torch.distributed`` or of the variable ``RANK``.
        trajectory_format: format of `save_checkpoint`: ``native``, or ``pt`` as RLinf writes it.
        auto_save_path: RLinf's name for ``path``.
        cache_size: number of files of an RLinf directory that are open at once (0: the default). Our own files have no
            such limit.
        pickles: also read ``.pkl`` files of an RLinf directory. They can run any code when they are read.
        enable_cache: accepted for callers of RLinf, without effect, because rows are read in place without a cache.

    Raises:
        UserError: another process writes to the folder, the folder is not a buffer, or an argument is invalid.
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
        self.path = Path(folder) if folder is not None else None
        if rank is None:
            rank = int(os.environ.get("RANK", "0"))
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                rank = torch.distributed.get_rank()
        self.seed, self.rank = seed, rank
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

    # --- adding ----------------------------------------------------------------------------------
    def add_trajectories(self, trajectories: Sequence[Any], *, wait: bool = True) -> list[int] | Future[list[int]]:
        """Store trajectories and return their ids once they are on disk. The next `sample` may draw them.

        Args:
            trajectories: `TensorTrajectory`, or objects with its attributes such as RLinf's ``Trajectory``.
            wait: False queues a copy and returns a future of the ids. The call waits while the queue is full. The error
                of a failed write is raised by the future and also by the next call.

        Raises:
            UserError: a field's shape does not fit, or ``max_bytes`` has no room.
            OSError: the disk is full or fails. No trajectory was added then.
        """
        flat = [FlatTrajectory.flatten(TensorTrajectory.of(own), copy=not wait) for own in trajectories]
        if not wait:
            return self.write_queue.submit(flat)
        if not flat:
            return []
        if not self.write_queue.idle:
            return self.write_queue.submit(flat).result()
        self.write_queue.raise_error()
        return self._add(flat)

    def _add(self, trajectories: Sequence[FlatTrajectory]) -> list[int]:
        return self._writer().add(trajectories)

    def _writer(self) -> BufferWriter:
        """Return the storage as a writer. Raises `UserError` if it is read-only."""
        if isinstance(self.storage, BufferWriter):
            return self.storage
        with self.storage.held():  # raises an error if the buffer is closed
            pass
        why = "the buffer was opened with read_only=True; load it into another buffer to write"
        raise UserError(f"{self.path}: {why}")

    def flush(self) -> None:
        """Wait until all queued trajectories are on disk. Raises the error of a failed write."""
        self.write_queue.flush()

    def trajectory(self, number: int) -> TensorTrajectory:
        """Return a whole trajectory as it was added. Raises `UserError` if there is no such trajectory."""
        with self._held():
            return self.storage.trajectory(number).unflatten()

    # --- checkpoints -----------------------------------------------------------------------------
    def save_checkpoint(self, save_path: str | os.PathLike[str]) -> None:
        """Write all trajectories and the random state to a folder, either completely or not at all.

        On the same disk, the files are hard links to those of the buffer. So saving takes milliseconds for any size,
        and later evictions do not change the checkpoint. With ``trajectory_format="pt"``, the checkpoint is a directory
        as RLinf writes it.

        Raises:
            UserError: the folder exists and is not a checkpoint, the disk is full, or a trajectory is damaged.
        """
        self.write_queue.flush()
        target, as_rlinf = Path(save_path), self.trajectory_format == "pt"
        checkpoint.check_replaceable(target, self.storage.folder, as_rlinf=as_rlinf)
        if as_rlinf:
            with self.storage.held():
                rlinf.export(target, self.storage.verified_all(), seed=self.seed)
        else:
            checkpoint.save(self, target, seed=self.seed, rank=self.rank)
        for left in atomic.left_behind(target):
            shutil.rmtree(left, ignore_errors=True)  # links in it would keep removed files on the disk

    def load_checkpoint(
        self,
        load_path: str | os.PathLike[str],
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        pickles: bool = False,
        before_commit: Callable[[], object] = bool,
    ) -> None:
        """Replace the content by that of a checkpoint, either completely or not at all, even in a crash.

        If as many ranks load as saved, and this ``rank`` loads the part that it saved, its random stream continues.
        Otherwise each rank gets a new stream.

        Args:
            load_path: a checkpoint, our own or RLinf's, or a folder with the checkpoints of all ranks.
            is_distributed: load only the part of this rank. All parts have about the same number of rows.
            local_rank, world_size: number of this rank, and number of ranks.
            pickles: also read RLinf's ``.pkl`` files. They can run any code when they are read.
            before_commit: called when all files are in place. If it raises an error, the buffer keeps its content.

        Raises:
            UserError: there is no checkpoint, it is damaged, or the disk is full.
        """
        self.write_queue.flush()
        writer = self._writer()
        rank, ranks = (local_rank, world_size) if is_distributed else (0, 1)
        paths = checkpoint.shards(Path(load_path))
        state = checkpoint.read_sampler_state(paths, seed=self.seed, stream=self.rank, rank=rank, ranks=ranks)
        checkpoint.load(writer, paths, rank=rank, ranks=ranks, pickles=pickles, before_commit=before_commit)
        if self.priorities is not None and state.priorities is not None:
            self.priorities.restore(writer, state.priorities)
        self.stream.restore(state.generator)
        self.seed = state.seed

    def verify(self) -> list[str]:
        """Read all data and return a line of text for each damaged trajectory or file."""
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
        """Number of trajectories added so far, including dropped ones. It is also the id of the next trajectory."""
        with self._held() as now:
            return now.next_id

    def is_ready(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return len(self) >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """Return the result of `is_ready`."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, float]:
        """Return the numbers of kept trajectories, rows, bytes, episodes, successes, failures and interventions."""
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
        """Drop all trajectories. The ids of later ones continue from the present id."""
        self.write_queue.flush()
        writer = self._writer()
        with writer.lock:  # while another thread opens new files, the snapshot is incomplete
            writer.drop(writer.snapshot.next_id)

    def clear_cache(self) -> None:
        """Do nothing, because rows are read in place without a cache. For callers of RLinf's buffer."""

    def close(self, wait: bool = True) -> None:
        """Release files and memory. With ``wait``, queued trajectories are written first, else they are cancelled."""
        try:
            self.write_queue.close(wait=wait)
        finally:
            self.storage.close()

    def __enter__(self) -> TrajectoryReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MixedReplayBuffer:
    """Draws batches of which a share comes from demonstrations. In RLPD (Ball et al. 2023) that is one half.

    Args:
        online: trajectories of the policy.
        demonstrations: trajectories of an expert.
        share: share of demonstrations in a batch, rounded to whole chunk steps.
    """

    ONLINE, DEMONSTRATIONS = "online", "demonstrations"  # folders of a checkpoint

    def __init__(
        self, online: TrajectoryReplayBuffer, demonstrations: TrajectoryReplayBuffer, share: float = 0.5
    ) -> None:
        if not 0 <= share <= 1:
            raise UserError(f"share = {share:g}: between 0 and 1")
        self.online, self.demonstrations, self.share = online, demonstrations, share

    @staticmethod
    def divide(num_chunks: int, share: float) -> tuple[int, int]:
        """Return the numbers of chunk steps in a batch that come from the policy and from demonstrations."""
        shown = round(num_chunks * share)
        return num_chunks - shown, shown

    def sample(self, num_chunks: int, **how: Any) -> Batch:
        """Draw a batch like `TrajectoryReplayBuffer.sample`, with ``demonstration`` bool ``[num_chunks]`` added."""
        counts = self.divide(num_chunks, self.share)
        batches, demonstration = [], []
        for buffer, count, shown in zip((self.online, self.demonstrations), counts, (False, True), strict=True):
            if count or not num_chunks:
                batch = buffer.sample(count, **{**how, "indices": True})
                batches.append(batch)
                demonstration.append(torch.full((len(batch["indices"]),), shown))
        batch = batches[0] if len(batches) == 1 else _joined(*batches)
        if not how.get("indices"):
            del batch["indices"]
        return {**batch, "demonstration": torch.cat(demonstration)}

    def save_checkpoint(self, save_path: str | os.PathLike[str]) -> None:
        """Save both buffers."""
        self.online.save_checkpoint(Path(save_path) / self.ONLINE)
        self.demonstrations.save_checkpoint(Path(save_path) / self.DEMONSTRATIONS)

    def load_checkpoint(self, load_path: str | os.PathLike[str], **how: Any) -> None:
        """Load both buffers, or neither. Raises `UserError` if one is missing or damaged."""
        shown = Path(load_path) / self.DEMONSTRATIONS
        load_shown = partial(self.demonstrations.load_checkpoint, shown, **how)
        self.online.load_checkpoint(Path(load_path) / self.ONLINE, **how, before_commit=load_shown)


def _joined(first: Batch, second: Batch) -> Batch:
    """Concatenate the fields that both batches have. A missing instruction becomes empty."""
    joined: Batch = {}
    if INSTRUCTIONS in first or INSTRUCTIONS in second:
        first, second = ({INSTRUCTIONS: [""] * len(own["indices"]), **own} for own in (first, second))
    for name in first.keys() & second.keys():
        ours, theirs = first[name], second[name]
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
