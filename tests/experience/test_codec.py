"""Tests of `gleanrl.experience.pool.codec`: blobs are decoded bit for bit to the task or trajectory that they hold,
and a damaged or foreign blob raises `Damaged`."""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.experience.pool import codec
from gleanrl.types import Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils import serialize
from tests.experience.pool_world import episode
from tests.strategies import examples, same, tasks, trajectories


@given(trajectory=trajectories, task=tasks)
@settings(max_examples=examples(150))
def test_trajectories_and_tasks_are_decoded_bit_for_bit(trajectory: Trajectory, task: Task) -> None:
    assert same(trajectory, codec.decode_trajectory(codec.encode_trajectory(trajectory)))
    assert same(task, codec.decode_task(codec.encode_task(task)))


def test_compression_is_used_only_if_it_saves_space() -> None:
    repetitive = episode("t", tokens=[5] * 1000)
    assert len(codec.encode_trajectory(repetitive)) < 400
    random = np.random.default_rng(0)
    body = random.bytes(1000)
    assert len(codec.pack(body)) == 1000 + 12
    assert codec.unpack(codec.pack(body)) == body


@given(at=st.integers(0, 10**6), flip=st.integers(1, 255))
@settings(max_examples=examples(200))
def test_any_changed_byte_is_detected(at: int, flip: int) -> None:
    blob = bytearray(codec.encode_trajectory(episode("t", tokens=range(50))))
    blob[at % len(blob)] ^= flip
    with pytest.raises(codec.Damaged):
        codec.decode_trajectory(bytes(blob))


@pytest.mark.parametrize("keep", [0, 3, 11, 12, 13, 60])
def test_a_truncated_blob_is_detected(keep: int) -> None:
    with pytest.raises(codec.Damaged):
        codec.decode_trajectory(codec.encode_trajectory(episode("t", tokens=range(50)))[:keep])


@pytest.mark.parametrize(
    "change",
    [
        {"segments": 7},
        {"stop": "gone"},
        {"info": 7},
        {"id": None},
        {"score": {"value": math.nan}},
        {"segments": [[{"message": {"role": "user", "content": ""}, "tokens": [1], "logprobs": [0.5, 0.5]}]]},
    ],
)
def test_an_invalid_record_with_a_valid_checksum_is_detected(change: dict[str, Any]) -> None:
    good = serialize.to_builtins(episode("t"))

    def blob(value: dict[str, Any], more: bytes = b"") -> bytes:
        body = serialize.encode(value)
        return codec.pack(struct.pack("<II", len(body), 0) + body + more)

    assert same(codec.decode_trajectory(blob(good)), episode("t"))
    with pytest.raises(codec.Damaged):
        codec.decode_trajectory(blob({**good, **change}))
    for more in (bytes(4), bytes(3)):
        with pytest.raises(codec.Damaged):
            codec.decode_trajectory(blob(good, more))


@pytest.mark.parametrize("cut", [1, 4, 8, 60])
def test_missing_tokens_or_log_probs_are_detected(cut: int) -> None:
    body = codec.unpack(codec.encode_trajectory(episode("t", tokens=range(50))))
    with pytest.raises(codec.Damaged):
        codec.decode_trajectory(codec.pack(body[:-cut]))


def framed(flags: int, size: int, body: bytes) -> bytes:
    checksum = zlib.crc32(body, zlib.crc32(struct.pack("<BI", flags, size)))
    return struct.pack("<2sBBII", b"GX", codec.FORMAT, flags, checksum, size) + body


def test_a_frame_with_a_wrong_size_or_format_is_detected() -> None:
    squeezed = codec.zstandard.ZstdCompressor().compress(b"a" * 1000)
    assert codec.unpack(framed(1, 1000, squeezed)) == b"a" * 1000
    for flags, size, body in (
        (1, 10, squeezed),
        (1, 1 << 31, squeezed),
        (0, 5, b"abcd"),
        (7, 4, b"abcd"),
        (1, 4, b"a"),
    ):
        with pytest.raises(codec.Damaged):
            codec.unpack(framed(flags, size, body))
    other = bytearray(codec.pack(b"abcd"))
    other[2] = 9
    with pytest.raises(codec.Damaged, match="format 9"):
        codec.unpack(bytes(other))


def test_a_token_digest_depends_only_on_tokens_and_turn_boundaries() -> None:
    one, two = np.array([1, 2]), np.array([3])
    both = np.array([1, 2, 3])

    def digest(*segments: tuple[Turn, ...], score: float = 1.0) -> bytes:
        return codec.token_digest(Trajectory("x", "t", segments, Score(score), StopReason.DONE))

    def sampled(tokens: np.ndarray, content: str = "", logprob: float = -1.0) -> Turn:
        return Turn({"role": "assistant", "content": content}, tokens, np.full(tokens.size, logprob), 0)

    def context(tokens: np.ndarray) -> Turn:
        return Turn({"role": "user", "content": ""}, tokens)

    assert digest((sampled(one), sampled(two))) == digest((sampled(one, "b", -2.0), sampled(two)), score=0.0)
    different = [
        digest((sampled(one), sampled(two))),
        digest((sampled(both),)),
        digest((sampled(one),), (sampled(two),)),
        digest((context(one), sampled(two))),
        digest((sampled(one), sampled(two), sampled(np.array([], int)))),
        digest((sampled(one), sampled(one))),
    ]
    assert len(set(different)) == len(different)
    assert all(len(each) == 16 for each in different)


def test_a_decoded_task_keeps_its_kind_and_is_same_task_ignores_it() -> None:
    named = Task("a", (), {"n": 1}, kind="heat")
    assert codec.decode_task(codec.encode_task(named)).kind == "heat"
    assert codec.is_same_task(codec.encode_task(Task("a", (), {"n": 1})), named)
    assert codec.is_same_task(
        codec.encode_task(Task("a", (), {"x": [1], "n": math.nan})), Task("a", (), {"n": math.nan, "x": (1,)})
    )
    assert not codec.is_same_task(codec.encode_task(Task("a", (), {"n": 2}, kind="heat")), named)
