"""`gleanrl.utils.serialize` restores values bit for bit from MessagePack and JSON, and rejects invalid data.

Property tests generate the values.
"""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.protocols import Observation
from gleanrl.types import Group, Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils import serialize
from tests.strategies import examples, groups, messages, same, scores, tasks, text, trajectories

observations = st.builds(
    Observation,
    messages=st.lists(messages, max_size=2).map(tuple),
    done=st.booleans(),
    score=st.none() | scores,
    info=st.dictionaries(text, text, max_size=2),
    tools=st.lists(st.dictionaries(text, text, max_size=2), max_size=2).map(tuple),
)


@given(value=tasks | scores | trajectories | groups() | observations)
@settings(max_examples=examples(300))
def test_every_type_is_restored_bit_for_bit_from_messagepack_and_json(value: Any) -> None:
    assert same(value, serialize.decode(serialize.encode(value), type(value)))
    line = serialize.to_json(value)
    assert b"\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not standard JSON"))
    assert same(value, serialize.from_json(line, type(value)))


def test_log_probs_of_any_bit_pattern_are_restored_exactly() -> None:
    bits = np.array([0x00000001, 0x80000000, 0x7FC00001, 0xFF800000, 0xBF7FFFFF, 0xB3D6BF95], np.uint32)
    turn = Turn({"role": "assistant", "content": ""}, np.array([2**31 - 1, 0, 1, 2, 3, -(2**31)]), bits.view("f4"), 1)
    for back in (
        serialize.decode(serialize.encode(turn), Turn),
        serialize.from_json(serialize.to_json(turn), Turn),
    ):
        assert same(turn, back)


def test_keys_that_are_integers_are_restored_next_to_a_text_with_a_lone_surrogate() -> None:
    value = {"\ud800": {1: 2}}
    assert serialize.decode(serialize.encode(value), dict[str, dict[int, int]]) == value


def test_a_score_that_is_not_applicable_is_restored_as_not_applicable() -> None:
    score = Score(math.nan, valid=False, explanation="not for this", applicable=False)
    assert not serialize.decode(serialize.encode(score), Score).applicable
    assert not serialize.from_json(serialize.to_json(score), Score).applicable


@pytest.mark.parametrize(
    "one", [True, 1, np.bool_(True), np.float32(1), np.array([1])], ids=lambda one: type(one).__name__
)
def test_a_score_of_bools_numpy_numbers_and_objects_is_restored_as_floats_and_text(one: Any) -> None:
    score = Score(one, one, parts={"right": one, 7: one, "text": "x"}, explanation=[3], applicable=one)  # type: ignore[dict-item, arg-type]
    assert score == Score(1.0, parts={"right": 1.0, "7": 1.0}, explanation="[3]")
    trajectory = Trajectory("a", "t", (), score, StopReason.DONE)
    for back in (
        serialize.decode(serialize.encode(trajectory), Trajectory),
        serialize.from_json(serialize.to_json(trajectory), Trajectory),
    ):
        assert back.score == score
        assert {type(back.score.value), *map(type, back.score.parts.values())} == {float}


@pytest.mark.parametrize(
    "value", ["1.0", None, 1j, [1.0], np.zeros(2), 10**400], ids=lambda value: type(value).__name__
)
def test_a_score_whose_value_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="must be a number"):
        Score(value)


def test_numpy_values_and_containers_in_info_become_plain_python_values() -> None:
    class Name(str):
        pass

    pairs: dict[str, tuple[Any, Any]] = {
        "scalar": (np.float32(0.5), 0.5),
        "flag": (np.bool_(True), True),
        "array": (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        "floats": (np.array([0.5, 1.5], np.float32), [0.5, 1.5]),
        "mapping": (MappingProxyType({"a": 1}), {"a": 1}),
        "tuple": ((1, Name("x")), [1, "x"]),
        # MessagePack has no integers this large, so that the whole value is written in another way.
        "big": (2**70, 2**70),
    }
    # Once with the large integer and once without it.
    for names in (list(pairs), list(pairs)[:-1]):
        trajectory = Trajectory("a", "t", (), Score(0.0), StopReason.DONE, {name: pairs[name][0] for name in names})
        expected = {name: pairs[name][1] for name in names}
        assert serialize.decode(serialize.encode(trajectory), Trajectory).info == expected
        assert serialize.from_json(serialize.to_json(trajectory), Trajectory).info == expected


def test_the_error_for_a_value_that_cannot_be_serialised_names_its_cause() -> None:
    circular: dict[str, Any] = {}
    circular["self"] = circular
    for payload, named in (({"handle": object()}, "object"), (circular, "itself")):
        for write in (serialize.encode, serialize.to_json, serialize.to_builtins):
            with pytest.raises(TypeError, match=named):
                write(Task("t", payload=payload))


@given(value=trajectories, cut=st.integers(0, 10**6))
@settings(max_examples=examples(100))
def test_truncated_data_raise_a_decode_error(value: Trajectory, cut: int) -> None:
    for data, read in (
        (serialize.encode(value), serialize.decode),
        (serialize.to_json(value), serialize.from_json),
    ):
        with pytest.raises(serialize.DecodeError):
            read(data[: cut % len(data)], Trajectory)


TURN = {"message": {"role": "user", "content": ""}, "tokens": [1, 2], "logprobs": [0.5, 0.5], "version": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [1, 2, 3]},
        {"tokens": [1, 2.5]},
        {"tokens": [1, 2**31]},
        {"tokens": "AAA"},
        {"tokens": "!"},
        {"tokens": {"a": 1}},
        {"logprobs": None, "tokens": None},
        {"version": "new"},
    ],
)
def test_turn_fields_of_a_wrong_type_length_or_range_are_rejected(change: dict[str, Any]) -> None:
    assert serialize.from_builtins(TURN, Turn).version == 1
    with pytest.raises(serialize.DecodeError):
        serialize.from_builtins({**TURN, **change}, Turn)
    with pytest.raises(serialize.DecodeError):
        serialize.decode(serialize.encode({**TURN, **change}), Turn)


def test_a_decode_error_names_the_wrong_field_and_unknown_fields_are_ignored() -> None:
    with pytest.raises(serialize.DecodeError, match="valid"):
        serialize.from_json(b'{"value": 1.0, "valid": "maybe"}', Score)
    with pytest.raises(serialize.DecodeError, match="finite"):
        serialize.from_json(b'{"value": "NaN"}', Score)
    with pytest.raises(serialize.DecodeError, match="stop"):
        serialize.from_json(b'{"id":"","task_id":"","segments":[],"score":{"value":1.0},"stop":"gone"}', Trajectory)
    assert serialize.from_json(b'{"value": 1, "later": 2}', Score) == Score(1.0)
    for junk in (b"", b"7", b"null", b"[]", b"\xff"):
        with pytest.raises(serialize.DecodeError):
            serialize.from_json(junk, Group)


def test_an_array_with_the_wrong_dtype_for_its_field_is_rejected() -> None:
    frozen = np.array([0.5, 1.0], np.float32)
    frozen.flags.writeable = False
    with pytest.raises(serialize.DecodeError, match="float32"):
        serialize.decode(serialize.encode({**TURN, "tokens": frozen}), Turn)


def test_a_message_keeps_keys_that_an_environment_adds() -> None:
    message: Any = {"role": "user", "content": "x", "shown": ["a", {"b": 2}]}
    turn = Turn(message, np.array([1, 2]))
    assert serialize.decode(serialize.encode(turn), Turn).message == message
    assert serialize.from_json(serialize.to_json(turn), Turn).message == message
