"""Reads and writes the rollout files of a run, which contain the trajectories that each step was trained on.

The file ``rollouts/step-000012.jsonl.zst`` contains one `RolloutRecord` per line as JSON and is compressed with zstd.
Token ids and log-probs are stored as the base64 of their arrays' little-endian bytes, so that they are read back bit
for bit. The loss mask is not stored, because it follows from the turns: the tokens of a turn with ``logprobs`` were
sampled and are trained, the tokens of all other turns are context.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

from gleanrl.types import Group, Trajectory
from gleanrl.utils import atomic, serialize
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

COMPRESSION_LEVEL = 3
_READ_BYTES = 1 << 14  # where the compression is damaged, no more than the records in one read are lost


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A trajectory of a group that a step was trained on."""

    step: int
    """Number of finished steps, this one included."""
    ticket: int
    """Number of the trajectory's group, the same for all members."""
    replayed: bool
    """Whether the trajectory came from the experience pool instead of the sampler."""
    advantage: float | None
    """Mean advantage of the trained tokens; None if the trajectory was not part of the update."""
    trajectory: Trajectory
    """The trajectory."""


def group_records(group: Group, step: int, advantages: Sequence[float] | None = None) -> list[RolloutRecord]:
    """Return a record for each member of ``group``: first the fresh members, then the replayed ones.

    ``advantages`` has one number for each member, in the order of ``group.trajectories``. NaN (and None for the whole
    argument) means that the member was not part of the update.
    """
    fresh = len(group.fresh)
    given = advantages if advantages is not None else [math.nan] * len(group.trajectories)
    records = []
    for index, (trajectory, advantage) in enumerate(zip(group.trajectories, given, strict=True)):
        known = None if math.isnan(advantage) else float(advantage)
        records.append(RolloutRecord(step, group.ticket, index >= fresh, known, trajectory))
    return records


def write_rollouts(path: Path, records: Iterable[RolloutRecord]) -> None:
    """Write the records to a new rollout file. The write is atomic: the file appears only when it is complete.

    Raises:
        UserError: the disk is full or the folder cannot be written.
        TypeError: the ``info`` of a trajectory contains a value that JSON cannot represent.
    """
    lines = b"".join(serialize.to_json(record) + b"\n" for record in records)
    atomic.write_bytes(path, zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(lines))


def read_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """Yield the records of a rollout file one at a time, so that the file need not fit into memory.

    If the file is truncated or its compression is damaged, the records before the fault are yielded and a warning is
    logged.

    Raises:
        UserError: a line is not a record.
    """
    whole, rest, count = False, b"", 0
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            try:
                *lines, rest = (rest + decompressor.decompress(chunk)).split(b"\n")
            except zstandard.ZstdError:
                break
            for line in lines:
                count += 1
                try:
                    yield serialize.from_json(line, RolloutRecord)
                except serialize.DecodeError as error:
                    raise UserError(f"{path}: line {count} is not a rollout: {error}") from error
            whole = decompressor.eof
            if whole:
                break
    if not whole or rest:
        log.warning("%s is cut off or damaged after record %d; the rest of it is skipped", path, count)
