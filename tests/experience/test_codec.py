"""A blob brings back bit for bit what was put in, and nothing else passes for one."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.experience.pool import codec
from gleanrl.types import Score, StopReason, Task, Trajectory, Turn
from tests.experience.pool_world import episode
from tests.runtime.test_records import assert_same, trajectories


@given(trajectory=trajectories)
@settings(max_examples=150, deadline=None)
def test_a_trajectory_comes_back_bit_for_bit(trajectory: Trajectory) -> None:
    assert_same(trajectory, codec.decode_trajectory(codec.encode_trajectory(trajectory)))


def test_every_bit_of_a_log_prob_survives() -> None:
    bits = np.array([0x00000001, 0x80000000, 0x7FC00001, 0xFF800000, 0xBF7FFFFF, 0xB3D6BF95], np.uint32)
    turn = Turn({"role": "assistant", "content": "\ud83d\ude00 \ud800"}, np.array([2**31 - 1, 0, 1, 2, 3, 4]), None)
    sampled = Turn(turn.message, turn.tokens, bits.view(np.float32), 2**40)
    trajectory = Trajectory("a", "t", ((turn, sampled), (), (sampled,)), Score(0.1 + 0.2), StopReason.TIMEOUT)
    back = codec.decode_trajectory(codec.encode_trajectory(trajectory))
    assert_same(trajectory, back)
    assert next(back.sampled_turns()).logprobs.view(np.uint32).tolist() == bits.tolist()  # type: ignore[union-attr]


def test_a_task_comes_back() -> None:
    task = Task("täsk \u2028", ({"role": "user", "content": "x" * 500},), {"n": 2**70, "f": 0.1, "none": None})
    assert codec.decode_task(codec.encode_task(task)) == task


def test_what_json_does_not_know_is_named() -> None:
    with pytest.raises(TypeError, match="object is not"):
        codec.encode_trajectory(episode("t", info={"handle": object()}))
    kept = codec.decode_trajectory(
        codec.encode_trajectory(episode("t", info={"a": np.float32(0.1), "b": np.arange(2)}))
    )
    assert kept.info == {"a": float(np.float32(0.1)), "b": [0, 1]}


def test_compression_is_used_where_it_pays_only() -> None:
    repetitive = episode("t", tokens=[5] * 1000)
    assert len(codec.encode_trajectory(repetitive)) < 400
    random = np.random.default_rng(0)
    body = random.bytes(1000)
    assert len(codec.pack(body)) == 1000 + 12
    assert codec.unpack(codec.pack(body)) == body


@given(at=st.integers(0, 10**6), flip=st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_no_changed_byte_passes(at: int, flip: int) -> None:
    blob = bytearray(codec.encode_trajectory(episode("t", tokens=range(50))))
    blob[at % len(blob)] ^= flip
    with pytest.raises(codec.Damaged):
        codec.decode_trajectory(bytes(blob))


@pytest.mark.parametrize("keep", [0, 3, 11, 12, 13, 60])
def test_no_cut_blob_passes(keep: int) -> None:
    with pytest.raises(codec.Damaged):
        codec.decode_trajectory(codec.encode_trajectory(episode("t", tokens=range(50)))[:keep])


def reframed(trajectory: Trajectory, change: tuple[bytes, bytes]) -> bytes:
    """A blob with a good checksum whose description says something else."""
    body = codec.unpack(codec.encode_trajectory(trajectory))
    (size,) = struct.unpack_from("<I", body)
    text = body[4 : 4 + size].replace(*change)
    return codec.pack(struct.pack("<I", len(text)) + text + body[4 + size :])


@pytest.mark.parametrize(
    "change",
    [
        (b'"!"},2,true', b'"!"},3,true'),  # more tokens than there are
        (b'"!"},2,true', b'"!"},2,false'),  # log-probs that belong to nothing
        (b'"?"},3,false', b'"?"},3,true'),  # log-probs that are not there
        (b'"?"},3,false', b'"?"},-3,false'),
        (b'"stop":"done"', b'"stop":"gone"'),
        (b'"segments"', b'"sections"'),
        (b'"info":{}', b'"info":7'),
        (b"true,0]", b'true,"0"]'),
        (b'{"id"', b'["id"'),
        (b'"score":[1.0,true', b'"score":[NaN,true'),
    ],
)
def test_lengths_and_fields_that_do_not_match_are_damage(change: tuple[bytes, bytes]) -> None:
    good = episode("t")
    assert_same(good, codec.decode_trajectory(reframed(good, (b"", b""))))
    assert change[0] in codec.unpack(codec.encode_trajectory(good))
    with pytest.raises(codec.Damaged):
        codec.decode_trajectory(reframed(good, change))


def framed(flags: int, size: int, body: bytes) -> bytes:
    checksum = zlib.crc32(body, zlib.crc32(struct.pack("<BI", flags, size)))
    return struct.pack("<2sBBII", b"GX", codec.FORMAT, flags, checksum, size) + body


def test_a_frame_may_not_claim_another_size_or_format() -> None:
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


def test_a_digest_tells_tokens_and_boundaries_and_nothing_else() -> None:
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


def test_a_task_keeps_its_kind_which_is_no_part_of_what_the_problem_is() -> None:
    named = Task("a", (), {"n": 1}, kind="heat")
    assert codec.decode_task(codec.encode_task(named)).kind == "heat"
    assert codec.holds_task(codec.encode_task(Task("a", (), {"n": 1})), named), (
        "a pool of before kinds holds the same task"
    )
    assert not codec.holds_task(codec.encode_task(Task("a", (), {"n": 2}, kind="heat")), named)
