"""Tests of `gleanrl.simulate.simulation`: step times against arithmetic, lower bounds and published measurements."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gleanrl.cli.simulate import PUBLISHED, VERL, improvements
from gleanrl.schedule.device_lock import First
from gleanrl.simulate.simulation import simulate
from gleanrl.simulate.workload import PRESETS, Latency, Preset, Workload
from gleanrl.utils.errors import UserError
from tests.strategies import examples

CHUNKED: tuple[Preset, ...] = ("pipelined", "pipelined_one_step_off", "bounded_async")


def workload(latency: str = "constant:300", **options: Any) -> Workload:
    """40 trajectories in 8 groups; the reward service can score all of them at once."""
    whole = {"bursts": 1, "microbatches": 1, "passes": "generated", "concurrency": 10_000, "steps": 8}
    return Workload(samples=40, group=5, latency=Latency.parse(latency), **{**whole, **options})


def step(preset: Preset, latency: str = "constant:300", **options: Any) -> float:
    return simulate(workload(latency, **options), preset).step_s


# --- the arithmetic, where every reward takes the same time ---------------------------------------
G, P, T = 40.0, 81.0, 117.0
"""Default seconds per step of generation, of both log-prob passes, and of training."""


@pytest.mark.parametrize(("latency", "wait"), [(300.0, 300.0), (20.0, P)])
def test_sync_is_generation_then_rewards_or_log_probs_then_training(latency: float, wait: float) -> None:
    assert step("sync", f"constant:{latency}") == pytest.approx(G + wait + T, abs=1e-3)


def test_pipelining_hides_nothing_where_all_rewards_arrive_together() -> None:
    assert step("pipelined") == pytest.approx(G + 300 + T, abs=1e-3)


def test_pipelining_hides_all_training_except_the_last_chunk() -> None:
    """With one place at the service, 40 rewards of 10 s arrive one by one; only the last chunk trains after them."""
    assert step("pipelined", "constant:10", concurrency=1) == pytest.approx(G + 400 + T / 4, abs=1e-3)
    assert step("sync", "constant:10", concurrency=1) == pytest.approx(G + 400 + T, abs=1e-3)


def test_one_step_off_hides_reward_latency_behind_the_previous_step() -> None:
    """A step waits for rewards that were requested one step earlier, so two steps share one round trip."""
    for latency in (100, 500, 900):
        expected = max(G + P + T, (G + latency + T) / 2)
        assert step("one_step_off", f"constant:{latency}", first="sample", steps=20) == pytest.approx(expected, abs=0.1)


def test_a_whole_run_includes_the_steps_in_which_less_work_overlaps() -> None:
    """One step off, with a latency L: the four batches are generated until G, 2 G, 2 G + L + T and 3 G + L + 2 T.

    So the last rewards arrive at 3 G + 2 L + 2 T, and only the training of the last step follows.
    """
    options: dict[str, Any] = {"logprobs": 0.0, "reference": 0.0, "steps": 4, "whole": True}
    assert 4 * step("one_step_off", **options) == pytest.approx(3 * G + 2 * 300 + 3 * T, abs=1e-3)
    assert step("sync", **options) == pytest.approx(G + 300 + T, abs=1e-3)


FIRST: tuple[First, ...] = ("due", "sample", "train")


@pytest.mark.parametrize("latency", ["constant:10", "constant:200", "constant:500", "uniform:0:400"])
@pytest.mark.parametrize("preset", ["pipelined", "one_step_off", "pipelined_one_step_off"])
def test_training_before_generating_is_slower_where_steps_wait_for_rewards(preset: Preset, latency: str) -> None:
    """Where a step waits for rewards, it is faster to generate the next batch before training."""
    options = {"bursts": 20, "steps": 12, "passes": "consumed"}
    due, sample, train = (step(preset, latency, first=first, **options) for first in FIRST)
    assert due == pytest.approx(sample, rel=0.01)  # these presets never sample further ahead than one step
    assert sample <= 1.01 * train
    if (preset, latency) in {("one_step_off", "constant:200"), ("pipelined_one_step_off", "constant:500")}:
        assert sample < 0.9 * train


@pytest.mark.parametrize("latency", ["constant:10", "constant:200", "constant:900"])
def test_due_first_is_as_fast_as_training_first_and_no_staler_than_sampling_first(latency: str) -> None:
    options = {"bursts": 20, "steps": 30, "passes": "consumed", "staleness": 4}
    due, sample, train = (simulate(workload(latency, first=first, **options), "bounded_async") for first in FIRST)
    slowest = max(train.step_s, workload(latency, **options).bound_s)  # work done before the counted steps
    assert sample.step_s <= 1.01 * due.step_s <= 1.02 * slowest
    assert due.staleness_mean <= sample.staleness_mean
    if latency == "constant:10":  # the device is never idle
        assert due.step_s == pytest.approx(sample.step_s, rel=0.01)
        assert due.staleness_mean < 1.5 < 3.5 < sample.staleness_mean
    if latency == "constant:900":
        assert sample.step_s < 0.9 * train.step_s


@pytest.mark.parametrize("preset", ["one_step_off", "pipelined_one_step_off", "bounded_async"])
def test_a_reward_service_with_low_concurrency_limits_every_schedule(preset: Preset) -> None:
    """By Little's law, 40 rewards of 20 s with 2 at a time take 400 s."""
    outcome = simulate(workload("constant:20", concurrency=2, bursts=20, steps=12), preset)
    assert outcome.step_s == pytest.approx(400, rel=0.01)
    assert outcome.idle_share == pytest.approx(1 - (G + P + T) / 400, abs=0.01)
    assert outcome.reward_wait_s == pytest.approx(400 - (G + P + T), rel=0.03)


def test_log_prob_passes_at_consumption_cannot_overlap_with_waiting_for_rewards() -> None:
    assert step("sync", passes="consumed") == pytest.approx(G + 300 + P + T, abs=1e-3)
    assert step("sync", passes="consumed", logprobs=0.0) == pytest.approx(G + 300 + 36 + T, abs=1e-3)


def test_rewards_arrive_earlier_if_requested_as_each_trajectory_ends() -> None:
    """With one place at the service, rewards of 1 s arrive during generation, and only the last delays the step."""
    at_the_end = step("sync", "constant:1", concurrency=1, passes="consumed")
    streamed = step("sync", "constant:1", concurrency=1, passes="consumed", bursts=40)
    assert at_the_end == pytest.approx(G + 40 + P + T, abs=1e-3)
    assert streamed == pytest.approx(G + 1 + P + T, abs=1e-3)


def test_each_additional_call_of_the_learner_adds_its_cost() -> None:
    quick = {"latency": "constant:0", "call": 7.0}
    outcome = simulate(workload(**quick), "pipelined")
    assert (outcome.calls, outcome.step_s) == (4, pytest.approx(G + P + T + 3 * 7, abs=1e-3))
    adaptive = simulate(workload(**quick, adaptive=True), "pipelined")
    assert (adaptive.calls, adaptive.step_s) == (1, pytest.approx(G + P + T, abs=1e-3))


def test_inline_evaluation_adds_its_whole_time_and_background_evaluation_only_device_time() -> None:
    options = {"evaluate_every": 2, "evaluation_samples": 10, "evaluation_g": 30.0, "steps": 12}
    alone = step("sync", steps=12)
    assert step("sync", evaluation="inline", **options) == pytest.approx(alone + (30 + 300) / 2, abs=1e-3)
    assert step("sync", evaluation="background", **options) == pytest.approx(
        alone, abs=1e-3
    )  # the evaluation runs while the device waits for rewards
    busy = step("one_step_off", "constant:1", steps=12)
    assert step("one_step_off", "constant:1", **options) == pytest.approx(busy + 15, rel=0.05)


def test_a_streaming_reward_service_is_faster_than_one_that_scores_batch_after_batch() -> None:
    options = {"concurrency": 20, "steps": 16}
    stream, batch = (step("one_step_off", "uniform:1:400", service=how, **options) for how in ("stream", "batch"))
    assert stream < 0.95 * batch


# --- properties of any workload ------------------------------------------------------------------
@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    seconds = st.floats(0, 200)
    chunks = draw(st.integers(1, 4))
    group = draw(st.integers(1, 4))
    return Workload(
        g=draw(seconds),
        logprobs=draw(seconds),
        reference=draw(seconds),
        train=draw(seconds),
        call=draw(st.sampled_from([0.0, 3.0])),
        samples=chunks * draw(st.integers(1, 3)) * group,
        group=group,
        latency=Latency.parse(f"constant:{draw(st.floats(1, 300))}"),
        concurrency=draw(st.integers(1, 12)),
        minibatches=chunks,
        adaptive=draw(st.booleans()),
        staleness=draw(st.integers(0, 3)),
        bursts=draw(st.integers(1, 5)),
        passes=draw(st.sampled_from(["consumed", "generated"])),
        service=draw(st.sampled_from(["stream", "batch", "verl"])),
        evaluate_every=draw(st.sampled_from([0, 2])),
        evaluation_g=draw(seconds),
        evaluation_samples=draw(st.integers(1, 9)),
        evaluation=draw(st.sampled_from(["background", "inline"])),
        microbatches=draw(st.sampled_from([1, 6])),
        first=draw(st.sampled_from(FIRST)),
        steps=12,
    )


@settings(max_examples=examples(25))
@given(workload=workloads(), preset=st.sampled_from(PRESETS))
def test_every_schedule_respects_the_time_bound_and_its_staleness_and_is_deterministic(
    workload: Workload, preset: Preset
) -> None:
    outcome = simulate(workload, preset)
    slack = (1 + workload.staleness) * workload.bound_s / workload.counted  # work done before the first counted step
    assert outcome.step_s >= workload.bound_s - slack - 1e-3
    assert outcome.staleness_mean <= outcome.staleness_max <= bound_of(workload, preset)
    assert -1e-9 <= outcome.idle_share <= 1
    assert outcome.reward_wait_s <= outcome.idle_share * outcome.step_s + 1e-3
    assert 1 <= outcome.calls <= (workload.minibatches if preset in CHUNKED else 1)
    assert simulate(workload, preset) == outcome


def bound_of(workload: Workload, preset: Preset) -> int:
    bounds = {"one_step_off": 1, "pipelined_one_step_off": 1, "bounded_async": workload.staleness}
    return bounds.get(preset, 0)


def test_idle_and_waiting_time_are_the_step_time_minus_the_work() -> None:
    outcome = simulate(workload(), "sync")
    assert outcome.idle_share * outcome.step_s == pytest.approx(outcome.step_s - (G + P + T), abs=1e-3)
    assert outcome.reward_wait_s == pytest.approx(300 - P, abs=1e-3)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("steps", [4, 8])
def test_rewards_that_were_requested_together_take_their_latency(preset: Preset, steps: int) -> None:
    assert simulate(workload(steps=steps), preset).reward_s == pytest.approx(300, abs=1e-3)


@pytest.mark.parametrize("evaluation", ["inline", "background"])
def test_a_whole_run_counts_the_evaluation_after_its_last_step(evaluation: Any) -> None:
    changes = {"evaluate_every": 4, "evaluation_g": 40, "evaluation_samples": 4, "evaluation": evaluation, "steps": 4}
    with_one = workload(**changes, whole=True)
    without = simulate(workload(whole=True, steps=4), "sync")
    outcome = simulate(with_one, "sync")
    assert 4 * outcome.step_s == pytest.approx(4 * without.step_s + 40 + 300, abs=1e-2)


# --- the measurements of verl's pull request 2854 --------------------------------------------------------
def verl(part: int) -> Workload:
    """The published setup, with 1 / ``part`` of its samples and of its reward service's concurrency."""
    return Workload(**VERL, samples=5120 // part, concurrency=256 // part, evaluation_samples=round(1319 / part))


@pytest.mark.parametrize("part", [16, pytest.param(1, marks=pytest.mark.heavy)])
def test_published_speedups_are_reproduced_within_one_and_a_half_points(part: int) -> None:
    sync = simulate(verl(part), "sync")
    assert sync.reward_s == pytest.approx(427, rel=0.02)  # the published measurement
    for preset, published in PUBLISHED.items():
        change = 100 * (simulate(verl(part), preset).step_s / sync.step_s - 1)
        assert change == pytest.approx(published, abs=1.5), preset


def test_improved_settings_of_the_published_setup_approach_the_device_bound() -> None:
    before = simulate(verl(32), "pipelined_one_step_off").step_s
    better = [workload for _, workload in improvements(verl(32))]
    steps = [simulate(workload, "pipelined_one_step_off").step_s for workload in better]
    assert [before, *steps] == sorted([before, *steps], reverse=True)
    assert steps[1] < 0.65 * steps[0]
    assert steps[-1] < 1.06 * better[-1].bound_s
    assert better[-1].bound_s == better[-1].device_s


# --- latencies, and bad values ----------------------------------------------------------------------
@pytest.mark.parametrize("text", ["constant:3", "uniform:1:40", "exponential:5", "lognormal:4:0.5"])
def test_the_mean_of_a_latency_is_the_mean_of_its_samples(text: str) -> None:
    latency, rng = Latency.parse(text), random.Random(1)
    drawn = [latency.draw(rng) for _ in range(40_000)]
    assert min(drawn) >= 0
    assert sum(drawn) / len(drawn) == pytest.approx(latency.mean, rel=0.02)


def test_half_of_a_lognormal_is_below_its_median() -> None:
    latency, rng = Latency.parse("lognormal:4:1"), random.Random(1)
    assert sum(latency.draw(rng) < 4 for _ in range(10_000)) == pytest.approx(5000, abs=200)


def test_latencies_from_a_file_are_sampled_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "latencies"
    path.write_text("1.5\n\n2.5\n8\n")
    latency, rng = Latency.parse(str(path)), random.Random(1)
    assert latency.mean == 4
    assert {latency.draw(rng) for _ in range(100)} == {1.5, 2.5, 8.0}


@pytest.mark.parametrize(
    "text", ["", "uniform", "uniform:1", "uniform:a:b", "uniform:-1:3", "uniform:40:1", "constant:nan", "normal:1:2"]
)
def test_a_malformed_latency_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--latency"):
        Latency.parse(text)


@pytest.mark.parametrize("sigma", ["40", "1e200"])
def test_a_sigma_in_seconds_is_refused(sigma: str) -> None:
    with pytest.raises(UserError, match="logarithm"):
        Latency.parse(f"lognormal:12:{sigma}")


@pytest.mark.parametrize(("text", "named"), [("1.5\nsoon\n", "line 2"), ("\n", "no latency")])
def test_a_latency_file_without_valid_seconds_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "latencies"
    path.write_text(text)
    with pytest.raises(UserError, match=named):
        Latency.parse(str(path))


@pytest.mark.parametrize(
    ("name", "value"), [("g", -1.0), ("train", math.nan), ("evaluation_g", math.inf), ("samples", 0), ("steps", 3)]
)
def test_a_workload_value_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        Workload(**{name: value})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"steps": 8, "evaluate_every": 5}, "--steps"),
        ({"samples": 41}, "--group"),
        ({"samples": 35}, "--minibatches"),
        ({"latency": "constant:0", "g": 0, "logprobs": 0, "reference": 0, "train": 0}, "--latency"),
    ],
)
def test_incompatible_workload_values_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Workload(**options)
