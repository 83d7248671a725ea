"""`gleanrl buffer PATH ...`: inspects, checks, merges, splits and exports a trajectory buffer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gleanrl.cli.common import Command, guarded, natural, positive_float, safe, spread, table, terminal_progress
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from gleanrl.buffer.reader import Reader

FORMATS = ("rlinf", "safetensors", "lerobot")
VALUES = 4  # number of values that `view` prints of each field
_PICKLES = "also read RLinf's .pkl files; a pickle can run any code when it is read, so use it only for trusted files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = "folder of a buffer, of a checkpoint, of the checkpoints of all ranks, or of an RLinf buffer"
    parser.add_argument("path", metavar="PATH", type=Path, help=where)
    parser.add_argument("--pickles", action="store_true", help=_PICKLES)
    parser.set_defaults(command=guarded(_stats))
    actions = parser.add_subparsers(metavar="ACTION", description="what to do with the buffer (default: stats)")

    def action(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=text)
        made.set_defaults(command=guarded(command))
        return made

    action("stats", _stats, "print the numbers of trajectories, rows and episodes, the size, and the fields")
    action("verify", _verify, "read all data; print a line for each fault, and exit with status 1 if there is one")
    viewed = action("view", _view, "print one trajectory: fields, some values, episodes, returns and instructions")
    viewed.add_argument("number", type=natural, metavar="N", help="id of the trajectory")
    merged = action("merge", _merge, "write the trajectories of several buffers to a new buffer, in order")
    merged.add_argument("out", type=Path, metavar="OUT", help="folder of the new buffer")
    merged.add_argument("more", type=Path, nargs="*", metavar="PATH", help="further buffers to append")
    cut = action("split", _split, "write N checkpoints with about the same number of rows each, one for each rank")
    cut.add_argument("out", type=Path, metavar="OUT", help="new folder for the checkpoints")
    cut.add_argument("parts", type=natural, metavar="N", help="number of checkpoints")
    exported = action("export", _export, "write all trajectories in another file format")
    exported.add_argument("format", choices=FORMATS, metavar="FORMAT", help=f"one of {', '.join(FORMATS)}")
    exported.add_argument("out", type=Path, metavar="OUT", help="new folder for the files")
    exported.add_argument("--fps", type=positive_float, default=1.0, help="lerobot: chunk steps per second (default 1)")
    for writing in (merged, exported):
        writing.add_argument(
            "--skip-damaged", action="store_true", help="leave out damaged trajectories and name them on standard error"
        )


# --- inspecting ---------------------------------------------------------------------------------
def _stats(args: argparse.Namespace) -> int:
    import numpy as np

    from gleanrl.buffer.log import FAILURE, INTERVENED, SUCCESS
    from gleanrl.buffer.table import Schema

    with _opened(args) as stores:
        known = [store.full_records() for store in stores]
        every = np.concatenate(known)
        rows = sum(store.snapshot.count_rows() for store in stores)
        size = format_bytes(sum(store.nbytes for store in stores))
        print(f"{args.path}: {len(every)} trajectories, {rows} rows (T * B), {size}")
        if len(stores) > 1:
            parts = []
            for store, own in zip(stores, known, strict=True):
                episodes = int(own["episodes"].sum())
                parts.append(
                    (len(own), store.snapshot.count_rows(), episodes, format_bytes(store.nbytes), str(store.folder))
                )
            table(("trajectories", "rows", "episodes", "size", "part"), parts, left=1)
        if not len(every):
            return 0
        print(f"episodes that ended: {int(every['episodes'].sum())}")
        print(f"of trajectories: {spread(every['steps'])} steps; {spread(every['batch'])} environments")
        print(f"rewards of a trajectory, summed: {spread(every['reward'])}")
        if (every["version_high"] >= 0).any():
            print(f"weights: versions {every['version_low'].min():g} to {every['version_high'].max():g}")
        successes, failures, acted = (int((every["flags"] & f > 0).sum()) for f in (SUCCESS, FAILURE, INTERVENED))
        unknown = len(every) - successes - failures
        print(f"outcomes: {successes} successes, {failures} failures, {unknown} unknown; a human acted in {acted}")
        for store in stores:
            for line in store.lost_files():
                print(f"damaged: {safe(line)}")

        counts: dict[Schema, int] = {}  # number of trajectories that have these fields
        for store in stores:
            now = store.snapshot
            for own in now.tables:
                if kept := int((now.records["schema"] == own.number).sum()):
                    counts[own.schema] = counts.get(own.schema, 0) + kept
        for number, (schema, kept) in enumerate(counts.items(), 1):
            if len(counts) > 1:
                print(f"\nfields {number} of {len(counts)}: {kept} trajectories")
            fields = []
            for field in schema.fields:
                dtype, name = str(field.dtype).removeprefix("torch."), safe(".".join(field.path))
                fields.append((str(list(field.shape)), format_bytes(field.nbytes), dtype, name))
            table(("shape of a row", "size", "type", "field"), fields, left=2)
    return 0


def _verify(args: argparse.Namespace) -> int:
    faults = trajectories = rows = 0
    with _opened(args) as stores:
        for store in stores:
            now = store.snapshot
            trajectories, rows = trajectories + now.next_id - now.first_id, rows + now.count_rows()
        with terminal_progress().stage("verifying", trajectories) as stage:
            for store in stores:
                for line in store.damage(stage.advance):
                    print(f"{store.folder}: {safe(line)}")
                    faults += 1
    if not faults:
        print(f"{args.path}: sound; {trajectories} trajectories with {rows} rows read")
    return 1 if faults else 0


def _view(args: argparse.Namespace) -> int:
    from gleanrl.buffer.trajectory import TrajectoryBlock

    with _opened(args) as stores:
        if len(stores) > 1:
            parts = ", ".join(str(store.folder) for store in stores[:3])
            raise UserError(f"{args.path} holds {len(stores)} checkpoints, each with its own ids; view one: {parts}")
        rows = stores[0].trajectory(args.number)
        outcome = {True: "a success", False: "a failure", None: "outcome unknown"}[rows.success]
        print(f"trajectory {args.number}: {rows.steps} steps of {rows.batch} environments, {rows.count} rows")
        weights = f"weights {safe(rows.model_weights_id)}" if rows.model_weights_id else "weights unknown"
        longest = f"; at most {rows.max_episode_length} steps an episode" if rows.max_episode_length else ""
        epochs = f"; {rows.epochs} rollout epochs with bootstrap rows" if rows.epochs else ""
        print(f"{outcome}; {weights}{longest}{epochs}")
        columns = []
        for path, column in sorted(rows.columns.items()):
            shape = str([rows.steps, rows.batch, *column.shape[1:]])
            dtype, name = str(column.dtype).removeprefix("torch."), safe(".".join(path))
            low, high, begins = _describe_values(column)
            columns.append((shape, low, high, dtype, name, begins))
        table(("shape", "lowest", "highest", "type", "field", "begins"), columns, left=3)

        rewards, ends = rows.columns.get(("rewards",)), TrajectoryBlock([rows]).ends[0]
        environments = []
        for b in range(rows.batch):
            total = ""
            if rewards is not None:
                total = f"{float(rewards.reshape(rows.steps, rows.batch, -1)[:, b].double().sum()):.6g}"
            stops = [-1, *ends[:, b].nonzero()[0].tolist()]
            lengths = [str(end - begin) for begin, end in pairwise(stops)]
            if stops[-1] < rows.steps - 1:
                lengths.append(f"{rows.steps - 1 - stops[-1]} unfinished")
            instructions = " / ".join(dict.fromkeys(rows.instructions[b :: rows.batch]))
            environments.append((b, total, len(stops) - 1, ", ".join(lengths), safe(instructions)))
        print()
        table(("environment", "return", "episodes ended", "lengths", "instruction"), environments, left=2)
    return 0


def _describe_values(column: Tensor) -> tuple[str, str, str]:
    """Return the lowest value, the highest value and the first `VALUES` values of a column as text.

    A text is empty if the column is empty or its dtype has no such value (complex numbers have no lowest one).
    """
    from gleanrl.buffer.trajectory import to_numpy

    try:
        values = to_numpy(column).reshape(-1)
    except UserError:
        return "", "", ""
    begins = " ".join(f"{value:.4g}" for value in values[:VALUES].tolist())
    if not values.size or values.dtype.kind == "c":
        return "", "", begins
    return f"{float(values.min()):.4g}", f"{float(values.max()):.4g}", begins


# --- writing ------------------------------------------------------------------------------------
def _merge(args: argparse.Namespace) -> int:
    from gleanrl.buffer import checkpoint, transfer
    from gleanrl.tracking.monitors import Console

    paths = [part for path in (args.path, *args.more) for part in _parts(path)]
    left_out: list[str] | None = [] if args.skip_damaged else None
    with checkpoint.opened(paths, pickles=args.pickles) as sources:
        total, nbytes = transfer.extent(sources)
    transfer.check_new(args.out)
    with Console().stage("merging", total) as stage:
        found = transfer.trajectories(paths, pickles=args.pickles, left_out=left_out, done=stage.advance)
        written, rows = transfer.merge(found, args.out, nbytes)
    print(f"{args.out}: {written} trajectories with {rows} rows")
    return _report(left_out)


def _export(args: argparse.Namespace) -> int:
    from gleanrl.buffer import checkpoint, transfer
    from gleanrl.tracking.monitors import Console

    paths = _parts(args.path)
    left_out: list[str] | None = [] if args.skip_damaged else None
    with checkpoint.opened(paths, pickles=args.pickles) as sources:
        total, _ = transfer.extent(sources)
    transfer.check_new(args.out)
    with Console().stage("exporting", total) as stage:
        how: Any = {"pickles": args.pickles, "left_out": left_out, "done": stage.advance}
        written = transfer.export(args.format, paths, args.out, fps=args.fps, **how)
    print(f"{args.out}: {written}")
    return _report(left_out)


def _report(left_out: list[str] | None) -> int:
    for line in left_out or ():
        print(f"left out: {safe(line)}", file=sys.stderr)
    return 1 if left_out else 0


def _split(args: argparse.Namespace) -> int:
    from gleanrl.buffer import transfer
    from gleanrl.tracking.monitors import Console

    transfer.check_new(args.out)
    with Console().stage("splitting", args.parts) as stage:
        written = transfer.split(args.path, args.out, args.parts, pickles=args.pickles, done=stage.advance)
    table(("trajectories", "rows", "part"), [(*own, args.out / f"rank-{i}") for i, own in enumerate(written)], left=1)
    return 0


# --- opening ------------------------------------------------------------------------------------
@contextmanager
def _opened(args: argparse.Namespace) -> Iterator[list[Reader]]:
    """Open all buffers and checkpoints at ``args.path`` for reading, and close them when the block ends."""
    from gleanrl.buffer import checkpoint

    with ExitStack() as stack:
        stores = []
        for path in _parts(args.path):
            stores.append(checkpoint.open_reader(path, pickles=args.pickles))
            stack.callback(stores[-1].close)
        yield stores


def _parts(path: Path) -> list[Path]:
    from gleanrl.buffer import checkpoint

    if not path.exists():
        raise UserError(f"{path}: there is no such folder")
    return checkpoint.shards(path)
