"""Encodes trajectories and tasks as checksummed blobs, the form in which the pool stores them.

A blob is a header (magic, format number, flags, CRC32, unpacked size) and a body, zstd-compressed if that makes it
smaller. The body is MessagePack made by `gleanrl.utils.serialize`, not pickle, and is decoded bit for bit. The token
ids and log-probs of a trajectory follow the MessagePack by byte plane, because the high bytes of token ids and the
exponents of log-probs are similar to each other and compress well, while the other bytes hardly compress.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from gleanrl.types import Task, Trajectory
from gleanrl.utils import serialize

FORMAT = 2
MAX_BYTES = 1 << 30  # largest unpacked blob, so that a damaged size cannot use up the memory

_MAGIC = b"GX"
_HEAD = struct.Struct("<2sBBII")  # magic, format, flags, CRC32 of flags + size + body, size of the unpacked body
_SIZES = struct.Struct("<II")  # bytes of the MessagePack and of the token ids
_COMPRESSED = 1
_LEVEL = 3


class Damaged(ValueError):
    """Raised for a blob that is not what was written. The message is the reason."""


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Return the blob of a trajectory. Raises `TypeError` if messages or ``info`` hold a value of an unknown type."""
    body, arrays = serialize.encode_with_arrays(trajectory)
    tokens = _to_planes([array for array in arrays if array.dtype == np.int32])
    logprobs = _to_planes([array for array in arrays if array.dtype == np.float32])
    return pack(_SIZES.pack(len(body), len(tokens)) + body + tokens + logprobs)


def decode_trajectory(blob: bytes) -> Trajectory:
    """Return the trajectory of a blob.

    Raises:
        Damaged: the checksum fails, the record is inconsistent, or it is of another format.
    """
    packed = unpack(blob)
    try:
        size, token_bytes = _SIZES.unpack_from(packed)
        body, arrays = packed[_SIZES.size : _SIZES.size + size], packed[_SIZES.size + size :]
        tokens, logprobs = _from_planes(arrays[:token_bytes], "<i4"), _from_planes(arrays[token_bytes:], "<f4")
        return serialize.decode_with_arrays(body, Trajectory, tokens, logprobs)
    except (struct.error, ValueError) as error:
        raise Damaged(f"its description does not read ({error})") from error


def encode_task(task: Task) -> bytes:
    """Return the blob of a task. Raises `TypeError` if the payload holds a value of an unknown type."""
    return pack(serialize.encode(task))


def decode_task(blob: bytes) -> Task:
    """Return the task of a blob. Raises `Damaged` as `decode_trajectory` does."""
    try:
        return serialize.decode(unpack(blob), Task)
    except serialize.DecodeError as error:
        raise Damaged(f"its description does not read ({error})") from error


def is_same_task(blob: bytes, task: Task) -> bool:
    """Return whether a blob holds a task with the same id, prompt and payload, of any kind. Raises `Damaged`."""
    if blob == encode_task(task):
        return True
    problems = [
        json.dumps(serialize.to_builtins(replace(each, kind="")), sort_keys=True) for each in (decode_task(blob), task)
    ]
    return problems[0] == problems[1]


def token_digest(trajectory: Trajectory) -> bytes:
    """Hash all token ids, the turn and segment boundaries, and which turns were sampled. Returns 16 bytes (BLAKE2b)."""
    digest = hashlib.blake2b(digest_size=16)
    for segment in trajectory.segments:
        digest.update(struct.pack("<cQ", b"s", len(segment)))
        for turn in segment:
            digest.update(struct.pack("<?Q", turn.sampled, turn.tokens.size))
            digest.update(turn.tokens.astype("<i4", copy=False).tobytes())
    return digest.digest()


def _to_planes(arrays: list[npt.NDArray[Any]]) -> bytes:
    whole = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
    return whole.view(np.uint8).reshape(-1, 4).T.tobytes()


def _from_planes(data: bytes, dtype: str) -> npt.NDArray[Any]:
    planes = np.frombuffer(data, np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


# --- the frame ----------------------------------------------------------------------------------
def pack(body: bytes) -> bytes:
    """Return ``body`` with a header, compressed if that makes it smaller."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"{len(body)} bytes are more than one blob may hold ({MAX_BYTES})")
    squeezed = zstandard.ZstdCompressor(level=_LEVEL).compress(body)
    flags, stored = (_COMPRESSED, squeezed) if len(squeezed) < len(body) else (0, body)
    return _HEAD.pack(_MAGIC, FORMAT, flags, _checksum(flags, len(body), stored), len(body)) + stored


def unpack(blob: bytes) -> bytes:
    """Return the body of a blob. Raises `Damaged`."""
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
