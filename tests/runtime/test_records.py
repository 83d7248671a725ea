"""Records bring back bit for bit what was sampled, and a damaged file costs only what it lost."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gleanrl.runtime.records import (
    group_from_record,
    group_to_record,
    group_to_records,
    read_rollouts,
    trajectory_from_record,
    trajectory_to_record,
    write_rollouts,
)
from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn

text = st.text(max_size=12)
messages: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": text}
)
any_float32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    tokens = draw(hnp.arrays(np.int32, st.integers(0, 6)))
    if not draw(st.booleans()):
        return Turn(draw(messages), tokens)
    logprobs = draw(hnp.arrays(np.float32, tokens.shape, elements=any_float32))
    return Turn(draw(messages), tokens, logprobs, version=draw(st.integers(0, 2**40)))


scores = st.one_of(
    st.builds(
        Score,
        value=st.floats(allow_nan=False, allow_infinity=False),
        parts=st.dictionaries(text, st.floats(allow_nan=False), max_size=3),
        explanation=st.none() | text,
    ),
    st.builds(Score.failed, text),
    st.builds(Score, value=st.just(-math.inf), valid=st.just(False)),
)
trajectories = st.builds(
    Trajectory,
    id=text,
    task_id=text,
    segments=st.lists(st.lists(turns(), max_size=3).map(tuple), max_size=3).map(tuple),
    score=scores,
    stop=st.sampled_from(StopReason),
    info=st.dictionaries(text, st.none() | st.booleans() | st.integers() | text, max_size=3),
)


def same_array(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same(a: Trajectory, b: Trajectory) -> None:
    assert (a.id, a.task_id, a.stop, a.info, a.version) == (b.id, b.task_id, b.stop, b.info, b.version)
    assert repr(a.score) == repr(b.score)  # repr, because NaN is not equal to itself
    assert [len(segment) for segment in a.segments] == [len(segment) for segment in b.segments]
    for one, two in zip(a.turns(), b.turns(), strict=True):
        assert (one.message, one.version, one.sampled) == (two.message, two.version, two.sampled)
        assert same_array(one.tokens, two.tokens)
        assert same_array(one.logprobs, two.logprobs)


@given(trajectory=trajectories)
@settings(max_examples=150, deadline=None)
def test_a_trajectory_comes_back_bit_for_bit_through_json(trajectory: Trajectory) -> None:
    line = json.dumps(trajectory_to_record(trajectory, step=3), allow_nan=False)
    assert_same(trajectory, trajectory_from_record(json.loads(line)))


def test_an_extra_key_may_not_hide_one_of_the_record() -> None:
    trajectory = example("a", 1.0)
    assert trajectory_to_record(trajectory, replayed=True)["replayed"] is True
    with pytest.raises(ValueError, match="'score'"):
        trajectory_to_record(trajectory, score=2.0)


def example(name: str, value: float, version: int = 4) -> Trajectory:
    segment = (
        Turn({"role": "user", "content": "You are in a room. ☕"}, np.array([1, 2, 3], np.int32)),
        Turn(
            {"role": "assistant", "content": "go to fridge 1"},
            np.array([4, 5], np.int32),
            np.array([-0.25, -1e-8], np.float32),
            version,
        ),
    )
    return Trajectory(name, "task-1", (segment,), Score(value), StopReason.DONE, {"won": np.bool_(True)})


def test_a_group_records_who_was_replayed_and_each_advantage(tmp_path: Path) -> None:
    stored = example("old", 1.0, version=1)
    spec = GroupSpec(Task("task-1"), fresh=2, replayed=(stored,))
    group = Group(spec, (example("a", 0.0), example("b", 1.0), stored), ticket=17)
    path = tmp_path / "step-000002.jsonl.zst"
    write_rollouts(path, group_to_records(group, 2, [-0.5, 0.5, math.nan]))

    records = list(read_rollouts(path))
    assert [r["replayed"] for r in records] == [False, False, True]
    assert [r["advantage"] for r in records] == [-0.5, 0.5, None]
    assert all(r["step"] == 2 and r["ticket"] == 17 for r in records)
    assert records[0]["info"] == {"won": True}
    assert trajectory_from_record(records[2]).version == 1


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_file_gives_the_records_it_still_holds_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: float
) -> None:
    path = tmp_path / "step-000001.jsonl.zst"
    noise = np.random.default_rng(0)
    written = []
    for index in range(400):
        tokens, logprobs = noise.integers(0, 9, 300, np.int32), noise.normal(size=300).astype(np.float32)
        turn = Turn({"role": "assistant", "content": "x"}, tokens, logprobs, 1)
        written.append(trajectory_to_record(Trajectory(str(index), "t", ((turn,),), Score(1.0), StopReason.DONE)))
    write_rollouts(path, written)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])

    with caplog.at_level(logging.WARNING):
        found = list(read_rollouts(path))
    assert found == written[: len(found)]
    assert len(found) < len(written)
    assert "step-000001.jsonl.zst is cut off" in caplog.text
    if keep == 0.9:
        assert len(found) > 200  # most of what is there is still readable


def test_a_whole_file_reads_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "step-000001.jsonl.zst"
    write_rollouts(path, [])
    assert list(read_rollouts(path)) == []
    write_rollouts(path, [trajectory_to_record(example("a", 1.0))])
    assert len(list(read_rollouts(path))) == 1
    assert not caplog.records


def test_an_info_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    trajectory = Trajectory("a", "t", (), Score(0.0), StopReason.DONE, {"handle": object()})
    with pytest.raises(TypeError, match="object is not"):
        write_rollouts(tmp_path / "x.jsonl.zst", [trajectory_to_record(trajectory)])
    assert not list(tmp_path.iterdir())


def test_a_group_comes_back_with_all_that_it_had() -> None:
    def member(name: str, **info: Any) -> Trajectory:
        turn = Turn({"role": "assistant", "content": "a"}, np.arange(2), np.array([-0.1, -0.2]), 3)
        return Trajectory(name, "t", ((turn,),), Score(0.1, parts={"x": math.inf}), StopReason.DONE, info)

    spec = GroupSpec(Task("t", payload={"a": 1}, kind="heat"), 2, (member("old"),), greedy=True)
    fresh = (member("a", turns=np.int64(3)), member("b"))
    group = Group(spec, (*fresh, *spec.replayed), 7, member("greedy"), dropped=True)
    again = group_from_record(json.loads(json.dumps(group_to_record(group))))
    assert (again.ticket, again.dropped) == (7, True)
    assert again.greedy is not None
    assert again.fresh[0].info == {"turns": 3}
    kept = [trajectory_to_record(t) for t in (*again.trajectories, again.greedy)]
    assert kept[1:] == [trajectory_to_record(t) for t in (*group.trajectories[1:], member("greedy"))]
    assert (again.spec.task, again.spec.fresh, again.spec.greedy) == (spec.task, 2, True)
    alone = Group(GroupSpec(Task("t"), 1), (member("a"),), 0)
    assert group_from_record(group_to_record(alone)).greedy is None
