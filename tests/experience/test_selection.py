"""Tests of `gleanrl.experience.replay.selection`: how many tasks are drawn from each bucket and how trajectories are
ranked, against naive computations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool.ranking import RANKINGS, Ranking, TaskTrajectories
from gleanrl.experience.replay import selection
from gleanrl.utils.errors import UserError

sizes = st.integers(1, 12)
pool_buckets = st.dictionaries(
    st.integers(0, 9).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.integers(0, 30), max_size=12
)
modes = st.sampled_from(["gaussian", "uniform", "uniform_buckets", "difficulty", "rescue"])


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), sizes)
def test_a_level_is_the_nearest_count_of_a_full_group_and_none_and_all_are_exact(
    successes: int, failures: int, group: int
) -> None:
    found = selection.level((successes, successes + failures), group)
    assert (found == 0) == (successes == 0)
    assert 0 <= found <= group
    if group > 1:
        assert (found == group) == (successes > 0 and failures == 0)
    if 0 < found < group:
        nearest = group * successes / (successes + failures)
        assert abs(found - nearest) <= 0.5 or found in (1, group - 1)
    if successes + failures == group:
        assert found == successes


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("gaussian", [math.exp(-((r - 0.5) ** 2) / (2 * 0.125**2)) for r in (0, 0.25, 0.5, 1)]),
        ("uniform", [5, 1, 7, 2]),
        ("uniform_buckets", [1, 1, 1, 1]),
        ("difficulty", [0, 0, 1, 0]),
        ("rescue", [5 * 1.0, 1 * 0.75**8, 7 * 0.5**8, 0]),
    ],
)
def test_weights_equal_the_formulas(mode: str, expected: list[float]) -> None:
    replay = ReplaySettings(tasks=mode, difficulty=4)
    weights = np.exp(selection.log_weights({0: 5, 2: 1, 4: 7, 8: 2}, 8, replay))
    np.testing.assert_allclose(weights, expected, rtol=1e-12)


def test_the_default_sigma_is_one_success_in_groups_of_eight() -> None:
    weights = np.exp(selection.log_weights(dict.fromkeys(range(9), 1), 8, ReplaySettings()))
    np.testing.assert_allclose(weights, [math.exp(-((k - 4) ** 2) / 2) for k in range(9)], rtol=1e-12)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-2000, 2000) | st.just(-math.inf), st.integers(0, 20)), min_size=1, max_size=8),
    st.integers(0, 60),
    st.integers(0, 2**32),
)
def test_allocation_fills_the_total_without_exceeding_any_capacity(
    classes: list[tuple[float, int]], total: int, seed: int
) -> None:
    weights = np.array([weight for weight, _ in classes])
    room = [capacity for _, capacity in classes]
    counts = selection.allocate(weights, room, total, np.random.default_rng(seed))
    possible = sum(capacity for weight, capacity in classes if weight > -math.inf)
    assert counts.sum() == min(total, possible)
    assert all(0 <= n <= c for n, c in zip(counts, room, strict=True))
    assert not counts[np.isneginf(weights)].any()


def test_allocation_follows_the_weights_and_redistributes_what_exceeds_a_capacity() -> None:
    random = np.random.default_rng(0)
    weights = np.log([0.6, 0.3, 0.1])
    free = sum(selection.allocate(weights, [10**6] * 3, 10, random) for _ in range(3000)) / 30_000
    np.testing.assert_allclose(free, [0.6, 0.3, 0.1], atol=0.01)
    full = sum(selection.allocate(weights, [0, 10**6, 10**6], 10, random) for _ in range(3000)) / 30_000
    np.testing.assert_allclose(full, [0, 0.75, 0.25], atol=0.01)


def test_a_narrow_gaussian_falls_back_on_the_nearest_bucket() -> None:
    """All weights underflow to 0 in floating point, but their ratios are known from the logarithms."""
    replay = ReplaySettings(sigma=1e-3)
    drawn = selection.tasks_by_bucket({(1, 8): 9, (3, 8): 2, (7, 8): 9}, 5, 8, replay, np.random.default_rng(0))
    assert drawn[3, 8] == 2
    assert sum(drawn.values()) == 5


@settings(deadline=None)
@given(pool_buckets, st.integers(0, 40), sizes, modes, st.integers(0, 2**32))
def test_drawn_counts_stay_within_the_buckets_and_ignore_the_order_of_buckets(
    buckets, total: int, group: int, mode: str, seed: int
) -> None:
    replay = ReplaySettings(tasks=mode, difficulty=1)
    drawn = selection.tasks_by_bucket(buckets, total, group, replay, np.random.default_rng(seed))
    assert all(0 < count <= buckets[bucket] for bucket, count in drawn.items())
    levels = {b: selection.level(b, group) for b in buckets}
    held = {b: n for b, n in buckets.items() if mode != "difficulty" or levels[b] == 1}
    if mode == "rescue":
        held = {b: n for b, n in held.items() if levels[b] < group}
    assert sum(drawn.values()) == min(total, sum(held.values()))
    again = selection.tasks_by_bucket(
        dict(reversed(buckets.items())), total, group, replay, np.random.default_rng(seed)
    )
    assert drawn == again, "the pool's order left a trace"


def test_buckets_of_one_solve_rate_share_its_weight_by_their_sizes() -> None:
    """A half-solved group of 8 and one of 6 (where two members were replayed) have the same difficulty."""
    buckets = {(4, 8): 3000, (3, 6): 1000, (2, 8): 1000}
    random, counts = np.random.default_rng(1), Counter()
    for _ in range(400):
        counts.update(selection.tasks_by_bucket(buckets, 20, 8, ReplaySettings(), random))
    weight = math.exp(-2)  # of rate 0.25, relative to rate 0.5
    share = {b: n / counts.total() for b, n in counts.items()}
    assert share[2, 8] == pytest.approx(weight / (1 + weight), abs=0.02)
    assert share[4, 8] / share[3, 6] == pytest.approx(3, rel=0.1)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), max_size=8), st.integers(0, 2**32))
def test_trajectories_are_ranked_by_entropy_and_ties_go_to_the_newer(entropies: list[float], seed: int) -> None:
    uses = np.random.default_rng(seed).integers(0, 3, len(entropies)).tolist()

    indices = range(len(entropies))
    trajectories = task_trajectories(entropy=entropies, uses=uses)

    def order(select: str) -> list[int]:
        return RANKINGS.get(select)(trajectories, np.random.default_rng(seed))

    assert order("least_used") == sorted(indices, key=lambda i: (uses[i], entropies[i], -i))
    assert order("lowest_entropy") == sorted(indices, key=lambda i: (entropies[i], -i))
    assert order("highest_entropy") == sorted(indices, key=lambda i: (-entropies[i], -i))
    assert order("newest") == sorted(indices, reverse=True)
    assert order("random") == np.random.default_rng(seed).permutation(len(entropies)).tolist()


def task_trajectories(**known: Sequence[float]) -> TaskTrajectories:
    """Return arrays for a ranking, in which all that is not given is 0."""
    size = max(map(len, known.values()))
    arrays = {name: np.asarray(known.get(name, [0] * size)) for name in ("entropy", "uses", "age", "score", "length")}
    return TaskTrajectories(**arrays)  # type: ignore[arg-type] - integers where floats are declared


def test_a_ranking_that_omits_a_trajectory_is_refused() -> None:
    trajectories = task_trajectories(entropy=[0.1, 0.2, 0.3])
    for wrong in ([0, 1], [0, 1, 1], [1, 2, 3], None, [0.0, 1.0, 2.0], "abc"):
        broken = Ranking("broken", lambda _, __, wrong=wrong: wrong, keep=lambda candidate: 0, by_entropy=False)
        with pytest.raises(UserError, match=r"replay.select 'broken' returned"):
            broken(trajectories, np.random.default_rng(0))


def test_the_places_of_a_source_have_the_limit_as_their_mean_and_draw_nothing_without_limits() -> None:
    random = np.random.default_rng(0)
    drawn = [selection.source_places({"a": 0.1, "b": 0.0, "c": 0.3, "d": 1.0}, 10, random) for _ in range(50)]
    assert all(places == {"a": 1, "b": 0, "c": 3, "d": 10} for places in drawn)
    drawn = [selection.source_places({"a": 0.1}, 4, random)["a"] for _ in range(2000)]
    assert set(drawn) == {0, 1}
    assert np.mean(drawn) == pytest.approx(0.4, abs=0.04)
    state = random.bit_generator.state
    assert selection.source_places({}, 4, random) == {}
    assert random.bit_generator.state == state


def test_whole_is_not_one_too_small_because_of_rounding_errors() -> None:
    assert int(100 * 0.29) == 28
    assert selection.whole(100 * 0.29) == 29
    assert [selection.whole(n * 0.5) for n in (1, 2, 15)] == [0, 1, 7]
