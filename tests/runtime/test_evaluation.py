"""Tests of evaluation metrics: pass@k and its confidence intervals against independent calculations."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.config import loading as configuration
from gleanrl.config import validate
from gleanrl.runtime.evaluation import Evaluation, mean_interval, pass_at_k
from gleanrl.runtime.local import Builder
from gleanrl.runtime.prepare import prepare
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.monitors import Console, load_monitors
from gleanrl.train import train
from gleanrl.types import Score, StopReason, Task, Trajectory
from gleanrl.utils.errors import UserError
from tests.cli.conftest import CONFIG


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


def attempts(*values: float | None) -> list[Trajectory]:
    return [attempt(value) for value in values]


TASKS = [Task("a", kind="heat"), Task("b", kind="cool"), Task("c", kind="heat")]


def test_failed_measurements_are_left_out_not_counted_as_failures() -> None:
    metrics = Evaluation(TASKS[:2], [attempts(1.0, None), attempts(0.0, 1.0)]).metrics()
    assert metrics["eval/sampled/pass@1"] == pytest.approx(0.75)
    assert metrics["eval/sampled/pass@2"] == pytest.approx(1.0)
    assert metrics["eval/sampled/valid"] == pytest.approx(0.75)
    assert metrics["eval/sampled/score"] == pytest.approx(0.75)
    assert not any("score" in name for name in Evaluation(TASKS[:1], [attempts(None, None)]).metrics())


def test_each_kind_of_task_has_its_own_metrics() -> None:
    rows = [attempts(1.0, 1.0), attempts(0.0, None), attempts(0.0, 1.0)]
    metrics = Evaluation(TASKS, rows, attempts(1.0, 0.0, 1.0)).metrics()
    assert metrics["eval/kind/heat/pass@1"] == pytest.approx(0.75)
    assert metrics["eval/kind/cool/pass@1"] == 0.0
    assert metrics["eval/kind/cool/pass@1_low"] == 0.0 < metrics["eval/kind/cool/pass@1_high"]
    assert (metrics["eval/kind/heat/success"], metrics["eval/kind/cool/success"]) == (1.0, 0.0)
    one_kind = Evaluation(TASKS[::2], rows[::2]).metrics()
    assert not any("kind" in name for name in one_kind), "one kind is what the whole says already"


@given(st.lists(st.lists(st.floats(-3, 0.45), min_size=2, max_size=2), min_size=2, max_size=20), st.floats(-3, 0.45))
def test_a_graded_reward_has_a_mean_score_and_success_rates_for_any_threshold(
    scores: list[list[float]], threshold: float
) -> None:
    tasks = [Task(str(i)) for i in range(len(scores))]
    metrics = Evaluation(tasks, [attempts(*row) for row in scores], success_threshold=threshold).metrics()
    means = np.mean(scores, axis=1)
    assert metrics["eval/sampled/score"] == pytest.approx(means.mean())
    if np.ptp(means) > 0:
        half = 1.96 * means.std(ddof=1) / np.sqrt(means.size)
        assert metrics["eval/sampled/score_high"] == pytest.approx(means.mean() + half)
    else:
        assert "eval/sampled/score_high" not in metrics
    assert metrics["eval/sampled/pass@1"] == pytest.approx(np.mean(np.array(scores) >= threshold))


# --- one sampler for training and evaluation ------------------------------------------------------------
SHARED = {
    "sampler.share_with_evaluation": "true",
    "sampler.deterministic": "false",
    "sampler.max_rows": "8",
    "evaluation.every": "1",
    "evaluation.samples": "16",  # enough that an evaluation takes longer than a step
}


@pytest.mark.parametrize("preset", ["sync", "pipelined_one_step_off", "bounded_async"])
def test_an_evaluation_with_training_s_sampler_uses_the_weights_of_its_step_only(tmp_path: Path, preset: str) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    own = {**SHARED, "run.folder": str(tmp_path), "run.name": "a", "run.steps": "3", "schedule.preset": preset}
    config = configuration.load(str(tmp_path / "tiny.toml"), list(own.items()))
    console = Console()
    versions: dict[int, set[int]] = {}

    async def test() -> None:
        builder = Builder(config, RunFolder(config.path), prepare(config, console), console)
        async with builder.run(partial(load_monitors, config.monitor, console=console), resume=False) as run:
            evaluator = run.evaluator
            assert evaluator.sampler is run.player.sampler  # type: ignore[attr-defined]

            def report(step: int, evaluation: Evaluation) -> None:
                attempts = evaluation.attempts()
                turns = [turn for t in attempts for segment in t.segments for turn in segment if turn.sampled]
                versions[step] = {turn.version for turn in turns}

            evaluator.report = report  # type: ignore[attr-defined]
            await train(run)

    asyncio.run(test())
    assert versions == {0: {0}, 1: {1}, 2: {2}, 3: {3}}


@pytest.mark.parametrize(
    "contradiction",
    [{"sampler.deterministic": "true"}, {"sampler.evaluation_options.dtype": "float16"}, {"schedule.preset": "sync"}],
)
def test_sharing_is_refused_where_other_settings_contradict_it(tmp_path: Path, contradiction: dict[str, str]) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    shared = {"sampler.share_with_evaluation": "true", "schedule.preset": "bounded_async"}
    config = configuration.load(str(tmp_path / "tiny.toml"), list({**shared, **contradiction}.items()))
    with pytest.raises(UserError, match="share_with_evaluation"):
        validate.check(config)
