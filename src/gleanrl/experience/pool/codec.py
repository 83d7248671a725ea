"""Encodes trajectories and tasks as checksummed blobs, the format in which the pool stores them.

A blob consists of a header (magic, format number, flags, CRC32, unpacked size) and a body. The body is compressed with
zstd if that makes it smaller. It is MessagePack, written by `gleanrl.utils.serialize`, and decodes to the same bits. It
is not pickle, because loading a pickle can execute code.

In the blob of a trajectory, all token ids follow the MessagePack, and all log-probs follow the token ids. Both arrays
are stored as byte planes: the first byte of every number, then the second byte of every number, and so on. The high
bytes of token ids resemble each other, and so do the exponents of log-probs. They compress well if they are adjacent.
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
MAX_BYTES = 1 << 30  # largest unpacked body; the limit keeps a damaged size from exhausting the memory

_MAGIC = b"GX"
_HEAD = struct.Struct("<2sBBII")  # magic, format, flags, CRC32 of flags + size + body, size of the unpacked body
_SIZES = struct.Struct("<II")  # sizes in bytes of the MessagePack and of the token ids
_COMPRESSED = 1
_LEVEL = 3


class Damaged(ValueError):
    """Raised for a blob that cannot be decoded to what was stored. The message is the reason."""


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Encode a trajectory as a blob.

    Raises:
        TypeError: a message or ``info`` contains a value of a type that cannot be encoded.
        ValueError: the encoded trajectory is larger than `MAX_BYTES`.
    """
    body, arrays = serialize.encode_with_arrays(trajectory)
    tokens = _to_planes([array for array in arrays if array.dtype == np.int32])
    logprobs = _to_planes([array for array in arrays if array.dtype == np.float32])
    return pack(_SIZES.pack(len(body), len(tokens)) + body + tokens + logprobs)


def decode_trajectory(blob: bytes) -> Trajectory:
    """Decode the blob of a trajectory.

    Raises:
        Damaged: the checksum fails, the content is inconsistent, or the blob has another format number.
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
    """Encode a task as a blob. Raises `TypeError` and `ValueError` as `encode_trajectory` does."""
    return pack(serialize.encode(task))


def decode_task(blob: bytes) -> Task:
    """Decode the blob of a task. Raises `Damaged` as `decode_trajectory` does."""
    try:
        return serialize.decode(unpack(blob), Task)
    except serialize.DecodeError as error:
        raise Damaged(f"its description does not read ({error})") from error


def is_same_task(blob: bytes, task: Task) -> bool:
    """Return whether the task in a blob has the same id, prompt and payload as ``task``. The label ``kind`` is ignored.

    Raises `Damaged` if the blob cannot be decoded.
    """
    if blob == encode_task(task):
        return True
    problems = [
        json.dumps(serialize.to_builtins(replace(each, kind="")), sort_keys=True) for each in (decode_task(blob), task)
    ]
    return problems[0] == problems[1]


def token_digest(trajectory: Trajectory) -> bytes:
    """Return a 16-byte BLAKE2b hash of a trajectory's tokens, by which the pool recognises duplicates.

    The hash covers all token ids, the boundaries of turns and segments, and which turns were sampled.
    """
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


# --- header and compression ---------------------------------------------------------------------
def pack(body: bytes) -> bytes:
    """Make a blob of ``body``: compress it if that makes it smaller, and prepend the header.

    Raises `ValueError` if the body is larger than `MAX_BYTES`.
    """
    if len(body) > MAX_BYTES:
        raise ValueError(f"{len(body)} bytes are more than one blob may hold ({MAX_BYTES})")
    squeezed = zstandard.ZstdCompressor(level=_LEVEL).compress(body)
    flags, stored = (_COMPRESSED, squeezed) if len(squeezed) < len(body) else (0, body)
    return _HEAD.pack(_MAGIC, FORMAT, flags, _checksum(flags, len(body), stored), len(body)) + stored


def unpack(blob: bytes) -> bytes:
    """Return the uncompressed body of a blob. Raises `Damaged` if the header, the checksum or the size is wrong."""
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
