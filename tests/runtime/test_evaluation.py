"""Tests of evaluation metrics: pass@k and its confidence intervals against independent calculations."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.config import loading as configuration
from gleanrl.config import validate
from gleanrl.config.settings import EvaluationSettings, ScheduleSettings
from gleanrl.runtime.evaluation import BackgroundEvaluator, Evaluation, evaluate, mean_interval, pass_at_k
from gleanrl.runtime.local import Builder
from gleanrl.runtime.prepare import prepare
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.simulate import virtual_time
from gleanrl.tracking.monitors import Console, load_monitors
from gleanrl.train import Run, train
from gleanrl.types import Score, StopReason, Task, Trajectory
from gleanrl.utils.errors import UserError
from gleanrl.utils.progress import Silent
from tests.cli.conftest import CONFIG
from tests.loop_world import make_run, renderer, tasks


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


def test_tasks_without_a_kind_and_those_of_the_kind_other_are_one_kind() -> None:
    tasks = [Task("a"), Task("b", kind="other"), Task("c", kind="heat")]
    metrics = Evaluation(tasks, [attempts(1.0), attempts(0.0), attempts(1.0)]).metrics()
    assert metrics["eval/kind/other/pass@1"] == pytest.approx(0.5)


def test_no_attempt_plays_on_after_an_evaluation_has_failed(tmp_path: Path) -> None:
    asked: list[int] = []

    def answer(prompt: Any, seed: int) -> Any:
        asked.append(seed)
        if len(asked) == 1:
            raise UserError("the first attempt fails")
        return renderer().spoken("left").tolist()

    async def main() -> int:
        run = make_run(tmp_path, ScheduleSettings(), steps=1)
        run.player = replace(run.player, sampler=ScriptedSampler(answer, delay=1.0))
        with pytest.raises(UserError, match="the first attempt fails"):
            await evaluate(run.player, run.rewards, tasks(8), seed=0, samples=2, greedy=False)
        return len(asyncio.all_tasks()) - 1

    assert virtual_time.run(main()) == 0


# --- evaluations in the background ----------------------------------------------------------------------
def with_evaluator(run: Run, sampler: Any, **payload: Any) -> list[tuple[int, set[int]]]:
    """Give the run a `BackgroundEvaluator`. Returns a list of its results: step, and versions of the weights."""
    results: list[tuple[int, set[int]]] = []

    def report(step: int, evaluation: Evaluation) -> None:
        turns = [turn for t in evaluation.attempts() for segment in t.segments for turn in segment if turn.sampled]
        results.append((step, {turn.version for turn in turns}))

    own = tasks(3, **payload)
    run.evaluator = BackgroundEvaluator(
        run.player, sampler, run.rewards, own, EvaluationSettings(samples=1), 0.5, 0, run.learner.weights, report,
        Silent(),
    )  # fmt: skip
    return results


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("preset", ["sync", "pipelined", "one_step_off", "bounded_async"])
@pytest.mark.parametrize("fails_at", [50, 55, 60, 65, 70])
def test_a_failed_evaluation_ends_the_run_after_the_step_and_saves_it(
    tmp_path: Path, preset: Any, fails_at: float, cancels: bool
) -> None:
    def fail(prompt: Any, seed: int) -> Any:
        raise asyncio.CancelledError if cancels else RuntimeError("the engine died")

    async def main() -> None:
        settings = ScheduleSettings(preset=preset, batch=2, group=2, chunks=2)
        slow, fast = tasks(4, delay=8), [replace(task, id=f"fast-{task.id}") for task in tasks(4)]
        run = make_run(tmp_path, settings, steps=30, learner_delay=2, sample_delay=1, problems=[*slow, *fast])
        run.evaluate_every = 0
        with_evaluator(run, ScriptedSampler(fail, delay=fails_at))
        with pytest.raises(RuntimeError, match="evaluation of step 0 was cancelled" if cancels else "engine died"):
            await train(run)
        assert fails_at <= asyncio.get_running_loop().time() < fails_at + 25  # the longest step takes less than 25 s
        saved = run.checkpoints.latest()
        assert saved is not None
        assert 0 < saved[1]["controller"]["step"] == run.step == len(run.observer.steps) < 30

    virtual_time.run(main())


def test_a_failed_evaluation_ends_the_wait_for_the_groups_of_a_step(tmp_path: Path) -> None:
    async def main() -> float:
        run = make_run(tmp_path, ScheduleSettings(preset="sync", batch=2, group=2), steps=30, sample_delay=50)
        run.evaluate_every = 0
        with_evaluator(run, ScriptedSampler(lambda prompt, seed: [], delay=123))
        with pytest.raises(ValueError, match="the script answered nothing"):
            await train(run)
        assert run.step == 1
        assert run.checkpoints.latest() is not None
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(123, abs=0.1)


def test_after_a_failed_evaluation_no_other_is_started(tmp_path: Path) -> None:
    async def main() -> float:
        run = make_run(tmp_path, ScheduleSettings(preset="sync", batch=2, group=2), steps=30, learner_delay=50)
        run.evaluate_every = run.checkpoint_every = 1
        with_evaluator(run, ScriptedSampler(lambda prompt, seed: [], delay=30))
        with pytest.raises(ValueError, match="the script answered nothing"):
            await train(run)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(50, abs=0.1)


@pytest.mark.parametrize("preset", ["one_step_off", "bounded_async"])
def test_ctrl_c_during_an_update_cancels_an_evaluation_that_uses_training_s_sampler(
    tmp_path: Path, preset: Any
) -> None:
    """The evaluation of step 2 would go on with the weights of step 3 otherwise, while the run is saved."""

    async def main() -> None:
        settings = ScheduleSettings(preset=preset, batch=2, group=2, chunks=2, staleness=1)
        run = make_run(tmp_path, settings, steps=6, learner_delay=10, sample_delay=1)
        results = with_evaluator(run, run.player.sampler, delay=22)
        update, save = run.learner.update, run.save

        async def interrupted_update(batch: Any) -> Any:
            if run.step == 2:
                asyncio.get_running_loop().call_later(5, run.interruption.interrupt)
            return await update(batch)

        async def slow_save() -> None:
            await asyncio.sleep(60)
            await save()

        run.learner.update, run.save = interrupted_update, slow_save
        await train(run)
        assert run.step == 3
        assert results == [(0, {0})]

    virtual_time.run(main())


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
