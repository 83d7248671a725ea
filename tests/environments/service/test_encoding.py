"""The house's dataclasses through JSON: what comes back is what went in, and what cannot go is said to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gleanrl.environments.service.bodies import ObservationModel, TaskModel, model_of
from gleanrl.environments.service.encoding import NotJson, decode, encode
from gleanrl.protocols import Observation
from gleanrl.types import Message, Score, Task

text = st.text(st.characters(exclude_categories=["Cs"]))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
of_messages = Message.__annotations__.keys()
more = st.dictionaries(text.filter(lambda name: name not in of_messages), plain)
more |= st.just({"tool_calls": None, "tool_call_id": None, "name": None}) | st.just({"name": "n", "tool_calls": [{}]})
messages = st.lists(
    st.builds(lambda content, more: {"role": "user", "content": content, **more}, text, more),
    max_size=3,
).map(tuple)
parts = st.dictionaries(text, st.floats(), max_size=3)
scores = st.builds(Score, st.floats(allow_nan=False, allow_infinity=False), parts=parts, explanation=st.none() | text)
scores |= st.builds(Score, st.floats(), valid=st.just(False), parts=parts) | st.builds(Score.failed, text)


def same(one: Any, other: Any) -> bool:
    """Equal, where NaN equals itself."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, Score) and isinstance(other, Score):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(Score))
    return one == other and type(one) is type(other)


@given(messages, st.booleans(), st.none() | scores, st.dictionaries(text, plain, max_size=3))
def test_an_observation_comes_back_as_it_was(
    said: tuple[Message, ...], done: bool, score: Score | None, info: dict[str, Any]
) -> None:
    sent = encode(Observation(said, done, score, info))
    json.loads(sent, parse_constant=pytest.fail)  # JSON to the letter: no NaN in it
    back = decode(Observation, json.loads(sent))
    assert (back.messages, back.done, back.info) == (said, done, info)
    assert isinstance(back.messages, tuple)
    assert same(back.score, score)
    ObservationModel.model_validate_json(sent)  # as the OpenAPI document has it


@given(text, messages, st.dictionaries(text, plain, max_size=3))
def test_a_task_comes_back_as_it_was(id: str, prompt: tuple[Message, ...], payload: dict[str, Any]) -> None:
    task = Task(id, prompt, payload)
    assert decode(Task, json.loads(encode(task))) == task
    model = TaskModel.model_validate_json(encode(task))
    assert decode(Task, model.model_dump(exclude_unset=True)) == task


def test_a_failed_score_stays_failed() -> None:
    failed = decode(Score, json.loads(encode(Score.failed("no judge"))))
    assert math.isnan(failed.value)
    assert (failed.valid, failed.explanation) == (False, "no judge")
    assert decode(Score, json.loads(encode(Score(-math.inf, valid=False)))).value == -math.inf


@dataclass(frozen=True, slots=True)
class Later:
    """A dataclass with fields of every kind that a later one may have."""

    id: str
    seen: Observation
    scores: tuple[Score, ...] = ()
    by_name: Mapping[str, Score] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    kind: str = ""
    limit: float | None = None
    count: int = 3


def test_new_fields_go_through_by_themselves() -> None:
    score = Score(1.0, parts={"points": 0.5})
    seen = Observation((Message(role="user", content="hi"),), score=score)
    later = Later("a", seen, (score,), {"judge": score}, ({"type": "function"},), "math", 2.5, 4)
    sent = encode(later)
    assert decode(Later, json.loads(sent)) == later
    model = model_of(Later).model_validate_json(sent)
    assert model.kind == "math"
    assert model_of(Later).model_json_schema()["required"] == ["id", "seen"]
    # from one who does not know them yet, and from one who knows more
    assert decode(Later, {"id": "a", "seen": json.loads(encode(seen)), "newer": 1}) == Later("a", seen)


def test_a_message_needs_its_role_and_content_and_may_hold_more() -> None:
    schema = model_of(Message).model_json_schema()
    assert schema["required"] == ["role", "content"]
    assert schema["additionalProperties"]
    with pytest.raises(ValidationError):
        model_of(Message).model_validate({"role": "user", "content": 1})


def test_arrays_go_as_lists_and_mappings_as_objects() -> None:
    class Frozen(Mapping[str, int]):
        def __getitem__(self, key: str) -> int:
            return 1

        def __iter__(self) -> Any:
            return iter(["one"])

        def __len__(self) -> int:
            return 1

    info = {"array": np.arange(3), "number": np.float32(0.5), "mapping": Frozen(), "tuple": (1, 2)}
    assert json.loads(encode(Observation((), info=info)))["info"] == {
        "array": [0, 1, 2], "number": 0.5, "mapping": {"one": 1}, "tuple": [1, 2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"door": {"handle": object()}}, r"info\.door\.handle is a object, which JSON does not have"),
        ({"share": [1.0, math.nan]}, r"info\.share\.1 is nan, which JSON does not have"),
        ({"seen": {1, 2}}, r"info\.seen is a set"),
        ({"at": {(1, 2): 3}}, r"info\.at has a key \(1, 2\)"),
    ],
)
def test_what_is_not_json_is_named(value: dict[str, Any], told: str) -> None:
    with pytest.raises(NotJson, match=told):
        encode(Observation((), info=value))


def test_what_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(NotJson, match="it holds itself"):
        encode(Observation((), info=loop))
