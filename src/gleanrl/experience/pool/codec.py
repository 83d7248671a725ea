"""A trajectory, or a task, as one compact blob that comes back bit for bit; no pickle.

A blob is a header (magic, format number, flags, CRC32, unpacked size) and a body, zstd-compressed where that pays. A
trajectory's body holds JSON (messages, score, info, the shape of the turns), then all token ids as little-endian int32
and all behaviour log-probs as little-endian float32, each laid out by byte plane: the high bytes of token ids and the
exponents of log-probs are alike and compress well, the other bytes hardly.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from gleanrl.types import Score, Segment, StopReason, Task, Trajectory, Turn

FORMAT = 1
MAX_BYTES = 1 << 30  # of one blob, unpacked: a damaged size must not claim the memory

_MAGIC = b"GX"
_HEAD = struct.Struct("<2sBBII")  # magic, format, flags, CRC32 of flags + size + body, size of the unpacked body
_JSON_SIZE = struct.Struct("<I")
_COMPRESSED = 1
_LEVEL = 3


class Damaged(ValueError):
    """A blob that is not what was written; its text is the reason."""


# --- trajectories -------------------------------------------------------------------------------
def encode_trajectory(trajectory: Trajectory) -> bytes:
    """One blob; ``info`` is kept as JSON keeps it (tuples come back as lists, numpy scalars as numbers).

    Raises:
        TypeError: messages or info hold what JSON does not know.
    """
    score = trajectory.score
    described = {
        "id": trajectory.id,
        "task": trajectory.task_id,
        "stop": trajectory.stop.value,
        "score": [score.value, score.valid, dict(score.parts), score.explanation],
        "info": dict(trajectory.info),
        "segments": [
            [[dict(turn.message), turn.tokens.size, turn.sampled, turn.version] for turn in segment]
            for segment in trajectory.segments
        ],
    }
    tokens = [turn.tokens for turn in trajectory.turns()]
    logprobs = [turn.logprobs for turn in trajectory.turns() if turn.logprobs is not None]
    text = _to_json(described)
    return pack(_JSON_SIZE.pack(len(text)) + text + _planes(tokens, "<i4") + _planes(logprobs, "<f4"))


def decode_trajectory(blob: bytes) -> Trajectory:
    """The trajectory of a blob.

    Raises:
        Damaged: the checksum fails, lengths do not match, or it is of another format.
    """
    body = unpack(blob)
    try:
        (size,) = _JSON_SIZE.unpack_from(body)
        described = _from_json(body[_JSON_SIZE.size : _JSON_SIZE.size + size])
        shapes = [(int(n), bool(sampled)) for segment in described["segments"] for _, n, sampled, _ in segment]
        total, sampled = sum(n for n, _ in shapes), sum(n for n, is_sampled in shapes if is_sampled)
        arrays = body[_JSON_SIZE.size + size :]
        if min((n for n, _ in shapes), default=0) < 0 or len(arrays) != 4 * (total + sampled):
            raise Damaged("its arrays have other lengths than its turns")
        tokens = _from_planes(arrays[: 4 * total], "<i4")
        logprobs = _from_planes(arrays[4 * total :], "<f4")
        value, valid, parts, explanation = described["score"]
        trajectory = Trajectory(
            id=described["id"],
            task_id=described["task"],
            segments=_segments(described["segments"], tokens, logprobs),
            score=Score(float(value), bool(valid), dict(parts), explanation),
            stop=StopReason(described["stop"]),
            info=dict(described["info"]),
        )
    except Damaged:
        raise
    except (ValueError, TypeError, KeyError, LookupError, struct.error, RecursionError) as error:
        raise Damaged(f"its description does not read ({type(error).__name__})") from error
    for turn in trajectory.turns():
        if not isinstance(turn.version, int) or not isinstance(turn.message, dict):
            raise Damaged("a turn of it makes no sense")
    return trajectory


def token_digest(trajectory: Trajectory) -> bytes:
    """16 bytes (BLAKE2b) of all token ids, turn and segment boundaries, and which turns were sampled."""
    digest = hashlib.blake2b(digest_size=16)
    for segment in trajectory.segments:
        digest.update(struct.pack("<cQ", b"s", len(segment)))
        for turn in segment:
            digest.update(struct.pack("<?Q", turn.sampled, turn.tokens.size))
            digest.update(turn.tokens.astype("<i4", copy=False).tobytes())
    return digest.digest()


def _segments(
    described: list[list[Any]], tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]
) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    at = sampled_at = 0
    for turns in described:
        segment: list[Turn] = []
        for message, n, sampled, version in turns:
            own = logprobs[sampled_at : sampled_at + n] if sampled else None
            segment.append(Turn(message, tokens[at : at + n], own, version))
            at, sampled_at = at + n, sampled_at + n * bool(sampled)
        segments.append(tuple(segment))
    return tuple(segments)


# --- tasks --------------------------------------------------------------------------------------
def encode_task(task: Task) -> bytes:
    """One blob. Raises `TypeError` where the payload holds what JSON does not know."""
    described = {"id": task.id, "prompt": list(task.prompt), "payload": dict(task.payload)}
    return pack(_to_json(described | ({"kind": task.kind} if task.kind else {})))


def decode_task(blob: bytes) -> Task:
    """The task of a blob. Raises `Damaged` as `decode_trajectory` does."""
    try:
        described = _from_json(unpack(blob))
        return Task(described["id"], tuple(described["prompt"]), described["payload"], described.get("kind", ""))
    except Damaged:
        raise
    except (ValueError, TypeError, KeyError, LookupError, RecursionError) as error:
        raise Damaged(f"its description does not read ({type(error).__name__})") from error


def holds_task(blob: bytes, task: Task) -> bool:
    """Whether a blob of `encode_task` holds this very task, prompt and payload; not its kind. Raises `Damaged`."""
    own = encode_task(task)
    return blob == own or _canonical(blob) == _canonical(own)


def _canonical(blob: bytes) -> str:
    try:
        described = _from_json(unpack(blob))
        return json.dumps({name: value for name, value in described.items() if name != "kind"}, sort_keys=True)
    except Damaged:
        raise
    except (ValueError, AttributeError, RecursionError) as error:
        raise Damaged(f"its description does not read ({type(error).__name__})") from error


# --- the frame ----------------------------------------------------------------------------------
def pack(body: bytes) -> bytes:
    """``body`` with a header, compressed where that makes it smaller."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"{len(body)} bytes are more than one blob may hold ({MAX_BYTES})")
    squeezed = zstandard.ZstdCompressor(level=_LEVEL).compress(body)
    flags, stored = (_COMPRESSED, squeezed) if len(squeezed) < len(body) else (0, body)
    return _HEAD.pack(_MAGIC, FORMAT, flags, _checksum(flags, len(body), stored), len(body)) + stored


def unpack(blob: bytes) -> bytes:
    """What `pack` was given. Raises `Damaged`."""
    if len(blob) < _HEAD.size:
        raise Damaged("it is cut off")
    magic, number, flags, checksum, size = _HEAD.unpack_from(blob)
    if magic != _MAGIC:
        raise Damaged("it does not begin as a stored record does")
    if number != FORMAT:
        raise Damaged(f"it is of format {number}, and this version reads {FORMAT}")
    stored = blob[_HEAD.size :]
    if checksum != _checksum(flags, size, stored):
        raise Damaged("its checksum fails")
    if flags == 0:
        body = stored
    elif flags == _COMPRESSED and size <= MAX_BYTES:
        try:
            if zstandard.frame_content_size(stored) != size:
                raise Damaged("it has another length than its header says")
            body = zstandard.ZstdDecompressor().decompress(stored)
        except zstandard.ZstdError as error:
            raise Damaged(f"it does not decompress ({error})") from error
    else:
        raise Damaged("its header makes no sense")
    if len(body) != size:
        raise Damaged("it has another length than its header says")
    return body


def _checksum(flags: int, size: int, stored: bytes) -> int:
    return zlib.crc32(stored, zlib.crc32(struct.pack("<BI", flags, size)))


def _planes(arrays: list[npt.NDArray[Any]], dtype: str) -> bytes:
    whole = np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)
    return whole.view(np.uint8).reshape(-1, 4).T.tobytes()


def _from_planes(data: bytes, dtype: str) -> npt.NDArray[Any]:
    planes = np.frombuffer(data, np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def _to_json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return text.encode("utf-8", "surrogatepass")


def _from_json(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"tasks and trajectories in a pool must be JSON-serialisable, and {type(value).__name__} is not")
