"""Compares the trajectory buffer with other replay buffers: speed of adding and sampling, memory and disk space.

    python benchmarks/buffer.py [--workloads images rows long] [--scale 1] [--arms ...] [--batch 256] [--repeats 1]
    python benchmarks/buffer.py flat [--trajectories 1000 10000 100000 1000000]
    python benchmarks/buffer.py small [--batch 256] [--repeats 5]

Each arm runs in a process of its own and stores the same trajectories of T steps in B environments. Workloads
(``--scale`` multiplies the number of trajectories):

* ``images``: 200 trajectories of T = 100, B = 8, with RLinf-style rows of 24.9 kB (two image observations of 12 kB).
* ``rows``: 400 trajectories of T = 250, B = 16, with rows of 100 bytes, such as the joints of a robot.
* ``long``: 8 trajectories of T = 5,000, B = 4, with rows of 24.9 kB.

Arms (those whose package is not installed are left out):

* ``ideal``: tensors in memory that contain all rows, sampled by `index_select`.
* ``gleanrl``: our buffer on disk; ``gleanrl-memory``: our buffer in memory.
* ``rlinf-in-place``: files as RLinf writes them, read by our buffer without a conversion.
* ``torchrl``: TorchRL's `LazyMemmapStorage` on disk. It is reopened in place: `loads` maps the saved files if they are
  in the new storage's folder, and copies them to that folder otherwise.
* ``cpprb``: cpprb in memory; ``cpprb-mmap``: on disk. Both store single transitions, and cannot reopen their file.

Columns:

* add MB/s: megabytes of rows added per second over all adds, both observations included. Durable if the store makes
  adds durable. cpprb writes its whole buffer once in the first add. The memory of ``ideal`` is written before.
* warm ms, of ideal: median time to sample ``--batch`` rows when all rows are in memory, and its ratio to ``ideal``.
* cold ms: time to open the store and draw the first sample in a new process, after its files were dropped from the page
  cache; median of three processes.
* own MB, files MB: memory of the process itself (anonymous and shared memory), and of pages of files that it maps.
  Files on a tmpfs count as own, because they lie in memory.
* disk MB: size on disk.

With ``--repeats``, medians over rounds are printed. In all arms the memory allocator is set to keep freed memory, as it
does anyway in a process that has freed a large block before. Otherwise each sample would also measure how long the
kernel takes to clear new pages.

`flat` measures how costs grow with the number of trajectories, which have one row of 100 bytes each. At each size it
prints microseconds to add a trajectory (in calls of 100), to sample 256 rows, to sample from successes only, and to
sample slices of episodes; milliseconds to open the buffer; and memory.

`small` compares what a call costs if rows are small. All stores are in memory and in one process, and have 200,000 rows
of 100 bytes. In rounds, which alternate between the stores, it prints medians of the process's processor time in
microseconds, which other processes affect less than the time that passes: to add one row (a trajectory of T = 1,
B = 1), and 100 such rows in one call, for each row; to sample ``--batch`` rows; and to sample them by priority and
update their priorities. Samples are also compared with `index_select` on tensors (``ideal``), which has no priorities.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARMS = ("ideal", "gleanrl", "gleanrl-memory", "rlinf-in-place", "torchrl", "cpprb", "cpprb-mmap")
NEEDS = {"torchrl": "torchrl", "cpprb": "cpprb", "cpprb-mmap": "cpprb"}
# arm that can reopen its files -> module to import before the time is measured
REOPENS = {"gleanrl": "gleanrl.buffer", "rlinf-in-place": "gleanrl.buffer", "torchrl": "torchrl.data"}
COLD_RUNS = 3
# Environment variables of glibc's allocator: keep freed memory instead of returning it to the kernel.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}


@dataclass(frozen=True)
class Workload:
    trajectories: int
    steps: int
    batch: int
    pixels: int  # bytes of an image observation; 0 = no images

    def rows(self, number: int) -> dict[str, Tensor]:
        """Make the columns of a trajectory, each of shape ``[T * B, ...]``. An episode ends after every 50th step.

        The next observation of a row is the current observation of the next step, except where an episode ends.
        """
        steps, batch = self.steps, self.batch
        generator = torch.Generator().manual_seed(number)
        state = torch.randn(steps + 1, batch, 8, generator=generator)
        ends = (torch.arange(steps) + 1) % 50 == 0
        columns = {
            "actions": torch.randn(steps, batch, 7, generator=generator),
            "rewards": torch.randn(steps, batch, 1, generator=generator),
            "dones": ends[:, None, None].expand(steps, batch, 1).contiguous(),
            "state": state[:-1],
            "next_state": state[1:],
        }
        if self.pixels:
            image = torch.randint(0, 256, (steps + 1, batch, self.pixels), dtype=torch.uint8, generator=generator)
            following = image[1:].clone()
            following[ends] = 0
            columns |= {"image": image[:-1], "next_image": following}
        return {name: column.reshape(steps * batch, -1).contiguous() for name, column in columns.items()}

    @property
    def count(self) -> int:
        return self.trajectories * self.steps * self.batch


WORKLOADS = {
    "images": Workload(200, 100, 8, 12288),
    "rows": Workload(400, 250, 16, 0),
    "long": Workload(8, 5000, 4, 12288),
}


# --- the stores -------------------------------------------------------------------------------------
class Ideal:
    def __init__(self, folder: Path, count: int) -> None:
        self._count, self._at, self._columns = count, 0, dict[str, Tensor]()

    def reserve(self, rows: dict[str, Tensor]) -> None:
        """Allocate memory for rows like these, and write to it, so that adding does not wait for pages."""
        for name, column in rows.items():
            self._columns[name] = torch.ones(self._count, *column.shape[1:], dtype=column.dtype)

    def add(self, rows: dict[str, Tensor], steps: int, batch: int) -> None:
        for name, column in rows.items():
            self._columns[name][self._at : self._at + len(column)] = column
        self._at += steps * batch

    def sample(self, count: int) -> Any:
        index = torch.randint(self._at, (count,))
        return {name: torch.index_select(column, 0, index) for name, column in self._columns.items()}

    def close(self) -> None: ...


class Ours:
    def __init__(self, folder: Path | None, count: int) -> None:
        from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer

        self._make = TensorTrajectory
        self._buffer = TrajectoryReplayBuffer(folder, seed=0)

    def add(self, rows: dict[str, Tensor], steps: int, batch: int) -> None:
        self._buffer.add_trajectories([self._make(**shaped(rows, steps, batch))])

    def sample(self, count: int) -> Any:
        return self._buffer.sample(count)

    def close(self) -> None:
        self._buffer.close()


def shaped(rows: dict[str, Tensor], steps: int, batch: int) -> dict[str, Any]:
    """Convert the columns of a trajectory to RLinf's fields of shape ``[T, B, ...]``."""
    fields: dict[str, Any] = {name: column.reshape(steps, batch, -1) for name, column in rows.items()}
    observed = {name: fields.pop(name) for name in ("state", "image") if name in fields}
    following = {name: fields.pop(f"next_{name}") for name in observed}
    return {**fields, "curr_obs": observed, "next_obs": following}


class RLinfFiles:
    """A store that writes files in RLinf's format and samples from them with our buffer."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._index, self._buffer = folder, dict[str, Any](), None
        if (folder / "metadata.json").exists():
            self._open()

    def add(self, rows: dict[str, Tensor], steps: int, batch: int) -> None:
        number = len(self._index)
        content = {"model_weights_id": "0", "max_episode_length": 50}
        torch.save({**shaped(rows, steps, batch), **content}, self._folder / f"trajectory_{number}_0.pt")
        entry = {"num_samples": steps * batch, "trajectory_id": number, "shape": [steps, batch, 1]}
        self._index[str(number)] = {**entry, **content}

    def sample(self, count: int) -> Any:
        if self._buffer is None:
            content = {"trajectory_index": self._index, "trajectory_id_list": list(range(len(self._index)))}
            (self._folder / "trajectory_index.json").write_text(json.dumps(content))
            (self._folder / "metadata.json").write_text(json.dumps({"trajectory_format": "pt", "seed": 0}))
            self._open()
        return self._buffer.sample(count)  # type: ignore[union-attr]

    def _open(self) -> None:
        from gleanrl.buffer import TrajectoryReplayBuffer

        self._buffer = TrajectoryReplayBuffer(self._folder, seed=0, read_only=True)

    def close(self) -> None: ...


class TorchRL:
    def __init__(self, folder: Path, count: int) -> None:
        from tensordict import TensorDict
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

        self._dict = TensorDict
        self._folder, self._reopened = folder, (folder / "saved").exists()
        # `loads` would copy the saved data to any other folder than the one in which they are
        self._scratch = folder / "saved" / "storage" if self._reopened else folder / "scratch"
        self._buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(count, scratch_dir=self._scratch))
        if self._reopened:
            self._buffer.loads(folder / "saved")

    def add(self, rows: dict[str, Tensor], steps: int, batch: int) -> None:
        self._buffer.extend(self._dict(rows, batch_size=[steps * batch]))

    def sample(self, count: int) -> Any:
        return self._buffer.sample(count)

    def close(self) -> None:
        if not self._reopened:
            self._buffer.dumps(self._folder / "saved")
            shutil.rmtree(self._scratch)


class CppRB:
    def __init__(self, folder: Path | None, count: int) -> None:
        self._prefix, self._count, self._buffer = folder, count, None

    def add(self, rows: dict[str, Tensor], steps: int, batch: int) -> None:
        from cpprb import ReplayBuffer

        columns = {name: column.numpy() for name, column in rows.items()}
        if self._buffer is None:
            fields = {name: {"shape": array.shape[1:], "dtype": array.dtype} for name, array in columns.items()}
            where = {} if self._prefix is None else {"mmap_prefix": str(self._prefix / "rows")}
            self._buffer = ReplayBuffer(self._count, fields, **where)
        self._buffer.add(**columns)

    def sample(self, count: int) -> Any:
        assert self._buffer is not None
        return self._buffer.sample(count)

    def close(self) -> None: ...


def store(arm: str, folder: Path, count: int) -> Any:
    if arm.startswith("gleanrl"):
        return Ours(None if arm.endswith("memory") else folder, count)
    if arm.startswith("cpprb"):
        return CppRB(folder if arm.endswith("mmap") else None, count)
    return {"ideal": Ideal, "torchrl": TorchRL, "rlinf-in-place": RLinfFiles}[arm](folder, count)


# --- one arm, in its own process ---------------------------------------------------------------------
def filled(arm: str, name: str, scale: float, folder: Path, batch: int) -> dict[str, float]:
    torch.set_num_threads(1)
    workload = scaled(name, scale)
    made, seconds, nbytes = store(arm, folder, workload.count), [], 0
    if isinstance(made, Ideal):
        made.reserve(workload.rows(0))
    for number in range(workload.trajectories):
        rows = workload.rows(number)
        nbytes = sum(column.nbytes for column in rows.values())
        start = time.perf_counter()
        made.add(rows, workload.steps, workload.batch)
        seconds.append(time.perf_counter() - start)
    rows = {}
    for _ in range(4 * workload.count // batch):  # read each row about four times, so that all are in memory
        made.sample(batch)
    took = [timed(lambda: made.sample(batch)) for _ in range(300)]
    own, files = resident()
    made.close()
    disk = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
    return {
        **{"add_mb_s": workload.trajectories * nbytes / 1e6 / sum(seconds), "warm_ms": statistics.median(took) * 1e3},
        **{
            "own_mb": own,
            "files_mb": files,
            "disk_mb": disk / 1e6,
            "row_bytes": nbytes / workload.steps / workload.batch,
        },
    }


def reopened(arm: str, name: str, scale: float, folder: Path, batch: int) -> dict[str, float]:
    """Measure opening a store and its first sample. Runs in a new process, with no file in the page cache."""
    torch.set_num_threads(1)
    importlib.import_module(REOPENS[arm])
    workload = scaled(name, scale)
    forget(folder)
    first = timed(lambda: store(arm, folder, workload.count).sample(batch))
    own, files = resident()
    return {"cold_ms": first * 1e3, "cold_own_mb": own, "cold_files_mb": files}


def flat(sizes: list[int], folder: Path) -> Iterator[dict[str, float]]:
    from gleanrl.buffer import Only, TensorTrajectory, TrajectoryReplayBuffer

    def median_us(call: Callable[[], Any]) -> float:
        return statistics.median(timed(call) for _ in range(300)) * 1e6

    torch.set_num_threads(1)
    with TrajectoryReplayBuffer(folder, seed=0) as buffer:
        made, added = 0, [TensorTrajectory(rewards=torch.zeros(1, 1, 25), success=True)] * 100
        for size in sizes:
            seconds = []
            while made < size:
                seconds.append(timed(lambda: buffer.add_trajectories(added)) / 100)
                made += 100
            own, files = resident()
            last = seconds[-max(10, len(seconds) // 20) :]
            start = time.perf_counter()
            with TrajectoryReplayBuffer(folder, seed=0, read_only=True):
                opened = time.perf_counter() - start
            yield {
                **{"trajectories": size, "add_us": statistics.median(last) * 1e6},
                **{"sample_us": median_us(lambda: buffer.sample(256))},
                **{"only_us": median_us(lambda: buffer.sample(256, only=Only(success=True)))},
                **{"slices_us": median_us(lambda: buffer.sample_slices(256, 1))},
                **{"open_ms": opened * 1e3, "own_mb": own, "files_mb": files},
            }


class SmallRows:
    """Our buffer in memory, with priorities."""

    def __init__(self, columns: dict[str, Tensor], batch: int) -> None:
        from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer

        self._buffer, self._batch = TrajectoryReplayBuffer(seed=0, priority_exponent=0.6), batch
        self._one = TensorTrajectory(**shaped({name: column[:1] for name, column in columns.items()}, 1, 1))
        self._buffer.add_trajectories([TensorTrajectory(**shaped(columns, len(columns["rewards"]) // 16, 16))])

    def add(self, count: int) -> None:
        self._buffer.add_trajectories([self._one] * count)

    def sample(self) -> None:
        self._buffer.sample(self._batch)

    def prioritized(self) -> None:
        batch = self._buffer.sample_prioritized(self._batch)
        self._buffer.update_priorities(batch["indices"], batch["weights"] + 0.1)


class SmallRowsIdeal:
    """Tensors in memory, without priorities."""

    def __init__(self, columns: dict[str, Tensor], batch: int) -> None:
        self._store, self._batch = Ideal(Path(), 2 * len(columns["rewards"])), batch
        self._store.reserve(columns)
        self._store.add(columns, len(columns["rewards"]), 1)
        self._one = {name: column[:1] for name, column in columns.items()}

    def add(self, count: int) -> None:
        for _ in range(count):
            self._store.add(self._one, 1, 1)

    def sample(self) -> None:
        self._store.sample(self._batch)

    def prioritized(self) -> None:
        raise NotImplementedError


class SmallRowsTorchRL:
    """torchrl's buffers in memory, one with priorities if torchrl's extension was built for the installed torch."""

    def __init__(self, columns: dict[str, Tensor], batch: int) -> None:
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

        rows, self._batch = len(columns["rewards"]), batch
        every = TensorDict({**columns, "td_error": torch.ones(rows)}, batch_size=[rows])
        self._one, self._many = every[0].clone(), every[:100].clone()
        self._buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2 * rows))
        self._buffer.extend(every)
        try:
            storage = LazyTensorStorage(2 * rows)
            self._ranked = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage)
            self._ranked.extend(every)
        except RuntimeError:
            self._ranked = None

    def add(self, count: int) -> None:
        if count == 1:
            self._buffer.add(self._one)
        else:
            self._buffer.extend(self._many)

    def sample(self) -> None:
        self._buffer.sample(self._batch)

    def prioritized(self) -> None:
        if self._ranked is None:
            raise NotImplementedError
        batch = self._ranked.sample(self._batch)
        batch["td_error"] = torch.rand(self._batch) + 0.1
        self._ranked.update_tensordict_priority(batch)


class SmallRowsCppRB:
    """cpprb's buffers in memory, one with priorities."""

    def __init__(self, columns: dict[str, Tensor], batch: int) -> None:
        from cpprb import PrioritizedReplayBuffer, ReplayBuffer

        arrays = {name: column.numpy() for name, column in columns.items()}
        fields = {name: {"shape": array.shape[1:], "dtype": array.dtype} for name, array in arrays.items()}
        rows, self._batch = len(arrays["rewards"]), batch
        self._buffer = ReplayBuffer(2 * rows, fields)
        self._ranked = PrioritizedReplayBuffer(2 * rows, fields, alpha=0.6)
        self._buffer.add(**arrays)
        self._ranked.add(**arrays)
        self._many = {count: {name: array[:count] for name, array in arrays.items()} for count in (1, 100)}

    def add(self, count: int) -> None:
        self._buffer.add(**self._many[count])

    def sample(self) -> None:
        self._buffer.sample(self._batch)

    def prioritized(self) -> None:
        batch = self._ranked.sample(self._batch, beta=0.4)
        self._ranked.update_priorities(batch["indexes"], batch["weights"] + 0.1)


def small(batch: int, repeats: int) -> None:
    torch.set_num_threads(1)
    workload = WORKLOADS["rows"]
    parts = [workload.rows(number) for number in range(50)]
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    made: dict[str, Any] = {"ideal": SmallRowsIdeal(columns, batch), "gleanrl": SmallRows(columns, batch)}
    for name, own in (("torchrl", SmallRowsTorchRL), ("cpprb", SmallRowsCppRB)):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed")
        else:
            made[name] = own(columns, batch)
    calls: dict[str, Callable[[Any], Any]] = {
        "sample": lambda store: store.sample(),
        "prioritized": lambda store: store.prioritized(),
        "add 1": lambda store: store.add(1),
        "add 100": lambda store: store.add(100),
    }
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for what, call in calls.items():
            for name, store in made.items():
                with contextlib.suppress(NotImplementedError):
                    took = []
                    for _ in range(10):
                        start = time.process_time()
                        for _ in range(20):
                            call(store)
                        took.append((time.process_time() - start) / 20 * 1e6)
                    found.setdefault((name, what), []).append(statistics.median(took))
    us = {key: statistics.median(rounds) for key, rounds in found.items()}
    print(f"{'':<10}{'add 1':>8}{'add 100':>9}{'sample':>8}{'of ideal':>9}{'prioritized':>13}{'of ideal':>9}")
    for name in made:
        shown = f"{name:<10}{us[name, 'add 1']:>8.0f}{us[name, 'add 100'] / 100:>9.1f}"
        for what, width in (("sample", 8), ("prioritized", 13)):
            value = us.get((name, what))
            ratio = "" if value is None else f"{value / us['ideal', 'sample']:.2f}"
            shown += f"{'' if value is None else f'{value:.0f}':>{width}}{ratio:>9}"
        print(shown)


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident() -> tuple[float, float]:
    """Return the megabytes of this process's own (anonymous and shared) memory, and of the file pages that it maps."""
    status = Path("/proc/self/status").read_text().split("\n")
    kib = {line.split(":")[0]: float(line.split()[1]) for line in status if line.startswith("Rss")}
    # the rows of `gleanrl-memory` are in a memfd, whose pages are shared memory
    return (kib["RssAnon"] + kib["RssShmem"]) / 1024 * 1.048576, kib["RssFile"] / 1024 * 1.048576


def forget(folder: Path) -> None:
    """Drop the files in ``folder`` from the kernel's page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def scaled(name: str, scale: float) -> Workload:
    own = WORKLOADS[name]
    return Workload(max(2, round(own.trajectories * scale)), own.steps, own.batch, own.pixels)


# --- all of them -----------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="peers", choices=["peers", "flat", "small", "one"])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary folder by default")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "one":
        part, arm, name = args.one.split(",")
        call = filled if part == "filled" else reopened
        print(json.dumps(call(arm, name, args.scale, args.folder, args.batch)))
        return
    if args.what == "small":
        small(args.batch, args.repeats)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.what == "flat":
            show_flat(flat(args.trajectories, Path(folder) / "flat"))
        else:
            for name in args.workloads:
                peers(args, name, Path(folder))


def peers(args: argparse.Namespace, name: str, root: Path) -> None:
    workload = scaled(name, args.scale)
    print(f"\n{name}: {workload.trajectories} trajectories of T = {workload.steps}, B = {workload.batch}; samples of "
          f"{args.batch} rows", flush=True)  # fmt: skip
    missing = {arm for arm in args.arms if arm in NEEDS and importlib.util.find_spec(NEEDS[arm]) is None}
    arms = [arm for arm in args.arms if arm not in missing]
    rounds = [{arm: run(arm, name, args, root / arm) for arm in arms} for _ in range(args.repeats)]
    found = {
        arm: {column: statistics.median(own[arm][column] for own in rounds) for column in rounds[0][arm]}
        for arm in arms
    }
    print(
        f"{'':<16}{'add MB/s':>9}{'warm ms':>9}{'of ideal':>9}{'cold ms':>9}{'own MB':>8}{'files MB':>9}{'disk MB':>9}"
    )
    for arm, own in found.items():
        # For rlinf-in-place, adding is just torch.save, so its speed says nothing about a store.
        added = "" if arm == "rlinf-in-place" else f"{own['add_mb_s']:.0f}"
        against = f"{own['warm_ms'] / found['ideal']['warm_ms']:.2f}" if "ideal" in found else ""
        cold = f"{own['cold_ms']:.0f}" if "cold_ms" in own else ""
        print(f"{arm:<16}{added:>9}{own['warm_ms']:>9.3f}{against:>9}{cold:>9}{own['own_mb']:>9.0f}"
              f"{own['files_mb']:>9.0f}{own['disk_mb']:>9.0f}", flush=True)  # fmt: skip
    for arm in missing:
        print(f"{arm:<16}is not installed")


def run(arm: str, name: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    folder.mkdir()
    found = apart("filled", arm, name, args, folder)
    if arm in REOPENS:
        cold = [apart("reopened", arm, name, args, folder) for _ in range(COLD_RUNS)]
        found |= {column: statistics.median(own[column] for own in cold) for column in cold[0]}
    shutil.rmtree(folder)
    return found


def apart(part: str, arm: str, name: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "one", "--one", f"{part},{arm},{name}", "--folder", str(folder)]
    command += ["--scale", str(args.scale), "--batch", str(args.batch)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **KEPT, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{arm}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def show_flat(rows: Iterator[dict[str, float]]) -> None:
    print(f"{'trajectories':>13}{'add us':>9}{'sample us':>11}{'only us':>9}{'slices us':>11}{'open ms':>9}"
          f"{'own MB':>8}{'files MB':>9}")  # fmt: skip
    for row in rows:
        print(f"{row['trajectories']:>13,.0f}{row['add_us']:>9.1f}{row['sample_us']:>11.0f}{row['only_us']:>9.0f}"
              f"{row['slices_us']:>11.0f}{row['open_ms']:>9.0f}{row['own_mb']:>8.0f}{row['files_mb']:>9.0f}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
