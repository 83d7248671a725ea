"""Tests of evaluation metrics: pass@k and its confidence intervals against independent calculations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.runtime.evaluation import Evaluation, by_kind, mean_interval, pass_at_k
from gleanrl.types import Score, StopReason, Task, Trajectory


@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    outcomes = [1] * successes + [0] * (n - successes)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(n, successes, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_an_interval_contains_its_mean_and_lies_between_0_and_1(rates: list[float]) -> None:
    mean, low, high = mean_interval(rates)
    assert 0 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1


def test_the_interval_contains_the_true_rate_about_95_percent_of_the_time() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        difficulty = rng.beta(1, 2, size=64)
        rates = rng.binomial(4, difficulty) / 4
        _, low, high = mean_interval(rates.tolist())
        covered += low <= 1 / 3 <= high
    assert 0.93 < covered / 2000 < 0.975


def attempt(value: float | None) -> Trajectory:
    score = Score.failed("broken") if value is None else Score(value)
    return Trajectory("x", "t", (), score, StopReason.DONE, {"turns": 3})


def test_failed_measurements_are_left_out_not_counted_as_failures() -> None:
    rows = ((attempt(1.0), attempt(None)), (attempt(0.0), attempt(1.0)))
    metrics = Evaluation(rows).metrics("eval/sampled")
    assert metrics["eval/sampled/pass@1"] == pytest.approx(0.75)
    assert metrics["eval/sampled/pass@2"] == pytest.approx(1.0)
    assert metrics["eval/sampled/valid"] == pytest.approx(0.75)


def test_each_kind_of_task_has_its_own_metrics() -> None:
    tasks = [Task("a", kind="heat"), Task("b", kind="cool"), Task("c", kind="heat")]
    rows = ((attempt(1.0), attempt(1.0)), (attempt(0.0), attempt(None)), (attempt(0.0), attempt(1.0)))
    metrics = by_kind(tasks, Evaluation(rows), "pass@1")
    assert metrics["eval/kind/heat/pass@1"] == pytest.approx(0.75)
    assert metrics["eval/kind/cool/pass@1"] == 0.0
    assert metrics["eval/kind/cool/pass@1_low"] == 0.0 < metrics["eval/kind/cool/pass@1_high"]
    assert by_kind(tasks[::2], Evaluation(rows[::2]), "pass@1") == {}, "one kind is what the whole says already"
