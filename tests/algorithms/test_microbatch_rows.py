"""Tests of `gleanrl.algorithms.microbatch.lay_out`, which puts samples with a common prefix into one row: rows hold
every sample once, a prefix is common to its samples, and a row is shared only where that saves computation."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gleanrl.algorithms.microbatch import LONGEST_SHARED_ROW, Row, lay_out

SEQUENCES = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=12)), max_size=12)


def arrays(lists: list[list[int]]) -> list[np.ndarray]:
    return [np.array(tokens, np.int32) for tokens in lists]


@hypothesis_settings(deadline=None)
@given(samples=SEQUENCES, longest=st.integers(1, 60))
def test_rows_hold_every_sample_once_and_their_prefix_is_common_to_their_samples(
    samples: list[tuple[int, list[int]]], longest: int
) -> None:
    inputs, groups = arrays([tokens for _, tokens in samples]), [group for group, _ in samples]
    rows = lay_out(inputs, groups, longest)
    assert sorted(i for row in rows for i in row.samples) == list(range(len(samples)))
    assert sum(row.length for row in rows) <= sum(tokens.size for tokens in inputs)
    for row in rows:
        assert row.length == row.prefix + sum(inputs[i].size - row.prefix for i in row.samples)
        assert len({groups[i] for i in row.samples}) == 1
        assert len({inputs[i][: row.prefix].tobytes() for i in row.samples}) == 1
        assert all(inputs[i].size >= row.prefix for i in row.samples)
        assert len(row.samples) == 1 or row.length <= longest


def test_a_long_common_prompt_is_shared_and_a_short_one_before_long_remainders_is_not() -> None:
    random = np.random.default_rng(0)

    def members(prompt: int, rest: int) -> list[np.ndarray]:
        start = random.integers(1, 500, prompt)
        return [np.concatenate([start, [500 + m], random.integers(1, 500, rest)]).astype(np.int32) for m in range(8)]

    assert lay_out(members(30, 9), [0] * 8) == [Row(tuple(range(8)), 30, 30 + 8 * 10)]
    inputs = members(20, 400)
    assert sorted(lay_out(inputs, [0] * 8), key=lambda row: row.samples) == [Row((i,), 0, 421) for i in range(8)]
    # samples of different groups share no row
    assert all(len(row.samples) == 1 for row in lay_out(members(30, 9), list(range(8))))
    assert max(row.length for row in lay_out(members(400, 300), [0] * 8)) <= LONGEST_SHARED_ROW


def test_members_with_the_same_prompt_share_a_row() -> None:
    """The group has two prompts, whose members alternate; each prompt gets a row."""
    inputs = arrays([[1] * 20 + [5], [2] * 20 + [5], [1] * 20 + [6], [2] * 20 + [6]])
    rows = lay_out(inputs, [0] * 4)
    assert {row.samples for row in rows} == {(0, 2), (1, 3)}
    assert [row.prefix for row in rows] == [20, 20]
