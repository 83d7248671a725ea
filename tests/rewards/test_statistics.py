"""Tests of `gleanrl.rewards.statistics`: percentiles of bounded samples, the quantile of recent values, and the
error budget, which stops a run after too many failed rewards."""

from __future__ import annotations

import random

import pytest

from gleanrl.rewards.statistics import ErrorBudget, RecentQuantile, Reservoir
from gleanrl.utils.errors import UserError


def test_a_reservoir_keeps_a_bounded_and_unbiased_sample() -> None:
    reservoir = Reservoir(1000)
    for value in range(100_000):
        reservoir.add(value / 100_000)
    assert len(reservoir.values) == 1000
    got = reservoir.percentiles("x")
    assert got["x_p50_s"] == pytest.approx(0.5, abs=0.06)
    assert got["x_p99_s"] == pytest.approx(0.99, abs=0.02)
    assert Reservoir().percentiles("x") == {}


def test_the_quantile_of_recent_values_follows_a_change() -> None:
    recent = RecentQuantile(0.9, least=10, size=100)
    for _ in range(9):
        recent.add(1.0)
    assert recent.value is None
    draws = random.Random(0)
    for shift in (0.0, 5.0):
        for _ in range(200):
            recent.add(shift + draws.random())
        assert recent.value == pytest.approx(shift + 0.9, abs=0.08)


def test_the_error_budget_is_checked_over_its_window_from_32_results_on() -> None:
    budget = ErrorBudget(0.5, window=40, down_after_s=1e9)
    for _ in range(31):
        budget.ended(True, "x")
    with pytest.raises(UserError, match="100% of the last 32"):
        budget.ended(True, "the reason")

    budget = ErrorBudget(0.5, window=40, down_after_s=1e9)
    for _ in range(1000):
        budget.ended(False)
    for _ in range(20):
        budget.ended(True)
    with pytest.raises(UserError, match=r"52% of the last 40 .*the reason"):
        budget.ended(True, "the reason")


def test_an_outage_needs_failures_of_several_requests_for_down_after_s() -> None:
    budget = ErrorBudget(1.0, window=32, down_after_s=60.0)
    for now in range(100):
        budget.attempt_failed(now % 3, ValueError("x"), float(now))  # three requests are too few for an outage
    for request in range(9):
        budget.succeeded(1000.0 + request)
        budget.attempt_failed(request, ValueError("x"), 1000.0 + request)
    budget.succeeded(1900.0)
    for request in range(9):
        budget.attempt_failed(request, ValueError("x"), 2000.0)
    with pytest.raises(UserError, match="only failed for 60 s"):
        budget.attempt_failed(1, ValueError("x"), 2060.0)
