"""Reads and writes the compressed rollout files of a run: the trajectories that each step learned from.

``rollouts/step-000012.jsonl.zst`` holds one `RolloutRecord` a line as JSON, zstd-compressed. Token ids and log-probs
are the little-endian bytes of their arrays in base64, so reading them restores exactly the bits that were sampled. The
loss mask is not stored, because it follows from the turns: a turn with ``logprobs`` was sampled, any other is context.
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
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A trajectory that a step learned from, and its place in that step."""

    step: int
    ticket: int  # number of the group, the same for all its members
    replayed: bool
    advantage: float | None  # mean over the trained tokens; None = not part of the update
    trajectory: Trajectory


def group_records(group: Group, step: int, advantages: Sequence[float] | None = None) -> list[RolloutRecord]:
    """Return the records of all members, fresh first.

    ``advantages`` holds one number for each member; NaN = not part of the update.
    """
    fresh = len(group.fresh)
    given = advantages if advantages is not None else [math.nan] * len(group.trajectories)
    records = []
    for index, (trajectory, advantage) in enumerate(zip(group.trajectories, given, strict=True)):
        known = None if math.isnan(advantage) else float(advantage)
        records.append(RolloutRecord(step, group.ticket, index >= fresh, known, trajectory))
    return records


def write_rollouts(path: Path, records: Iterable[RolloutRecord]) -> None:
    """Write one JSON line for each record, zstd-compressed; the file appears whole or not at all.

    Raises:
        UserError: the disk is full or the folder cannot be written.
        TypeError: the ``info`` of a trajectory holds a value that JSON cannot represent.
    """
    lines = b"".join(serialize.to_json(record) + b"\n" for record in records)
    atomic.write_bytes(path, zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(lines))


def read_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """Yield the records of a file, one at a time. The missing end of a truncated file is skipped with a warning.

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
