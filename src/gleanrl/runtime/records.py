"""Trajectories as JSON records, and the compressed rollout files of a run.

A record is exact: token ids and log-probs are the little-endian bytes of their arrays in base64, so
what is read is bit for bit what was sampled. The loss mask is not stored, because it is derived:
a turn with ``logprobs`` was sampled, any other is context.

``rollouts/step-000012.jsonl.zst`` holds one record a line, of one step, zstd-compressed.
"""

from __future__ import annotations

import base64
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils import atomic

log = logging.getLogger(__name__)

COMPRESSION_LEVEL = 3
_READ_BYTES = 1 << 20
_OWN_KEYS = frozenset({"id", "task_id", "stop", "score", "segments", "info"})


# --- one trajectory -----------------------------------------------------------------------------
def trajectory_to_record(trajectory: Trajectory, **extra: Any) -> dict[str, Any]:
    """A JSON-serialisable record; ``extra`` (step, ticket, advantage, ...) lies beside the trajectory's own keys.

    ``info`` is kept as JSON keeps it: tuples come back as lists, numpy scalars as Python numbers.

    Raises:
        ValueError: an extra key is one of the record's own.
    """
    if taken := sorted(_OWN_KEYS & extra.keys()):
        raise ValueError(f"{taken[0]!r} is a key of the record itself")
    return {
        **extra,
        "id": trajectory.id,
        "task_id": trajectory.task_id,
        "stop": trajectory.stop.value,
        "score": _score_to_record(trajectory.score),
        "segments": [[_turn_to_record(turn) for turn in segment] for segment in trajectory.segments],
        "info": dict(trajectory.info),
    }


def trajectory_from_record(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a record, bit for bit; extra keys are ignored."""
    return Trajectory(
        id=record["id"],
        task_id=record["task_id"],
        segments=tuple(tuple(_turn_from_record(turn) for turn in segment) for segment in record["segments"]),
        score=_score_from_record(record["score"]),
        stop=StopReason(record["stop"]),
        info=record["info"],
    )


def group_to_records(group: Group, step: int, advantages: Sequence[float] | None = None) -> list[dict[str, Any]]:
    """Records of all members, fresh first; ``advantages`` holds one number a member, NaN = took no part."""
    fresh = len(group.fresh)
    shared = {"step": step, "ticket": group.ticket}
    given = advantages if advantages is not None else [math.nan] * len(group.trajectories)
    return [
        trajectory_to_record(t, **shared, replayed=index >= fresh, advantage=_number_to_json(float(advantage)))
        for index, (t, advantage) in enumerate(zip(group.trajectories, given, strict=True))
    ]


def spec_to_record(spec: GroupSpec) -> dict[str, Any]:
    """A plan of a group, JSON-ready and exact."""
    task = spec.task
    return {
        "task": {"id": task.id, "prompt": list(task.prompt), "payload": dict(task.payload), "kind": task.kind},
        "fresh": spec.fresh,
        "replayed": [trajectory_to_record(trajectory) for trajectory in spec.replayed],
        "greedy": spec.greedy,
    }


def spec_from_record(record: Mapping[str, Any]) -> GroupSpec:
    """The plan of a record, bit for bit."""
    task = record["task"]
    return GroupSpec(
        Task(task["id"], tuple(task["prompt"]), task["payload"], task.get("kind", "")),
        record["fresh"],
        tuple(trajectory_from_record(replayed) for replayed in record["replayed"]),
        record.get("greedy", False),
    )


def group_to_record(group: Group) -> dict[str, Any]:
    """A group, JSON-ready; exact but for ``info``, as of `trajectory_to_record`."""
    record = {
        "spec": spec_to_record(group.spec),
        "fresh": [trajectory_to_record(trajectory) for trajectory in group.fresh],
        "ticket": group.ticket,
        "greedy": None if group.greedy is None else trajectory_to_record(group.greedy),
        "dropped": group.dropped,
    }
    return json.loads(json.dumps(record, default=_plain))


def group_from_record(record: Mapping[str, Any]) -> Group:
    """The group of a record."""
    spec, greedy = spec_from_record(record["spec"]), record["greedy"]
    return Group(
        spec,
        (*map(trajectory_from_record, record["fresh"]), *spec.replayed),
        record["ticket"],
        None if greedy is None else trajectory_from_record(greedy),
        record["dropped"],
    )


def _turn_to_record(turn: Turn) -> dict[str, Any]:
    record: dict[str, Any] = {"message": dict(turn.message), "tokens": _encode(turn.tokens, "<i4")}
    if turn.logprobs is not None:
        record["logprobs"] = _encode(turn.logprobs, "<f4")
    if turn.version != -1:
        record["version"] = turn.version
    return record


def _turn_from_record(record: Mapping[str, Any]) -> Turn:
    logprobs = record.get("logprobs")
    return Turn(
        message=record["message"],
        tokens=_decode(record["tokens"], "<i4"),
        logprobs=None if logprobs is None else _decode(logprobs, "<f4"),
        version=record.get("version", -1),
    )


def _score_to_record(score: Score) -> dict[str, Any]:
    return {
        "value": _number_to_json(score.value),
        "valid": score.valid,
        "parts": {name: _number_to_json(value) for name, value in score.parts.items()},
        "explanation": score.explanation,
    }


def _score_from_record(record: Mapping[str, Any]) -> Score:
    return Score(
        value=_number_from_json(record["value"]),
        valid=record["valid"],
        parts={name: _number_from_json(value) for name, value in record["parts"].items()},
        explanation=record["explanation"],
    )


def _number_to_json(value: float) -> float | str | None:
    """JSON has no NaN and no infinity: null and strings stand for them."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def _number_from_json(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _encode(array: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(array.astype(dtype, copy=False).tobytes()).decode("ascii")


def _decode(text: str, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


# --- the rollouts of one step -------------------------------------------------------------------
def write_rollouts(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON line a record, zstd-compressed; the file appears whole or not at all.

    Raises:
        UserError: the disk is full or the folder cannot be written.
    """
    lines = "".join(json.dumps(record, ensure_ascii=False, default=_plain) + "\n" for record in records)
    data = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(lines.encode("utf-8", "surrogatepass"))
    atomic.write_bytes(path, data)


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, one at a time. What is missing at the end of a cut file is skipped with a warning."""
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
                yield json.loads(line.decode("utf-8", "surrogatepass"))
            whole = decompressor.eof
            if whole:
                break
    if not whole or rest:
        log.warning("%s is cut off or damaged after record %d; the rest of it is skipped", path, count)


def _plain(value: Any) -> Any:
    """What an environment may put into ``info`` although JSON does not know it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"trajectory info must be JSON-serialisable, and {type(value).__name__} is not")
