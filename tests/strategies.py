"""Hypothesis strategies for the data of `gleanrl.types`, a bitwise comparison, and the number of examples to draw."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
"""Whether to test thoroughly, as `make test-all` does: with all examples, and with all cases of killed processes."""


def examples(count: int) -> int:
    """Return how many examples a property test draws: ``count`` if `NIGHTLY`, else fewer."""
    return count if NIGHTLY else max(count // 4, min(count, 8))


text = st.text(max_size=12)
any_text = st.text(st.characters(codec=None), max_size=12)  # includes lone surrogates
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | any_text | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
messages: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": any_text},
    optional={
        "tool_calls": st.lists(st.dictionaries(text, json_values, max_size=2), max_size=2),
        "tool_call_id": text,
        "name": text,
    },
)
any_float32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    tokens = draw(hnp.arrays(np.int32, st.integers(0, 6)))
    if not draw(st.booleans()):
        return Turn(draw(messages), tokens)
    logprobs = draw(hnp.arrays(np.float32, tokens.shape, elements=any_float32))
    reward = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False))
    return Turn(draw(messages), tokens, logprobs, draw(st.integers(0, 2**40)), reward, draw(st.none() | any_text))


scores = st.one_of(
    st.builds(
        Score,
        value=st.floats(allow_nan=False, allow_infinity=False),
        parts=st.dictionaries(text, st.floats(), max_size=3),
        explanation=st.none() | any_text,
        turns=st.none() | st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3).map(tuple),
    ),
    st.builds(Score.failed, any_text),
    st.builds(Score, value=st.just(-math.inf), valid=st.just(False), applicable=st.just(False)),
)
tasks = st.builds(
    Task,
    id=text,
    prompt=st.lists(messages, max_size=2).map(tuple),
    payload=st.dictionaries(text, json_values, max_size=3),
    kind=text,
)
trajectories = st.builds(
    Trajectory,
    id=text,
    task_id=text,
    segments=st.lists(st.lists(turns(), max_size=3).map(tuple), max_size=3).map(tuple),
    score=scores,
    stop=st.sampled_from(StopReason),
    info=st.dictionaries(text, json_values, max_size=3),
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    task = draw(tasks)
    own = trajectories.map(lambda t: Trajectory(t.id, task.id, t.segments, t.score, t.stop, t.info))
    fresh, replayed = draw(st.lists(own, min_size=1, max_size=2)), draw(st.lists(own, max_size=2))
    greedy = draw(st.none() | own)
    spec = GroupSpec(task, len(fresh), tuple(replayed), greedy is not None)
    return Group(spec, (*fresh, *replayed), draw(st.integers(0, 99)), greedy, draw(st.booleans()))


def same(a: Any, b: Any) -> bool:
    """Return whether two objects are equal, comparing arrays bit for bit and treating NaN as equal to itself."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        kinds = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        return kinds and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    # `==` would treat NaN as unequal to itself, and -0.0 as equal to 0.0.
    return repr(a) == repr(b)
