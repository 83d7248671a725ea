"""Tests of the update on observations of stored trajectories: its gradient against a float64 reference, and what it is
made from."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.algorithms.loss import Tokens, policy_loss
from gleanrl.config.settings import LearnerSettings, LossSettings, ReplaySettings
from gleanrl.experience import ExperiencePool
from gleanrl.experience.replay.observations import choose_from_pool, choose_from_step, observation_batch
from gleanrl.learners.torch import TorchLearner
from gleanrl.types import Group, Trajectory, Turn
from tests.builders import applied_gradients, tiny_model
from tests.experience.pool_world import group, solved, task
from tests.experience.test_pairs import played
from tests.experience.test_replay_updates import Recorder, updated
from tests.learners.test_observations import make_groups, observation_loss

KEEP = ReplaySettings(keep_failures=4, observation_batch=3)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ExperiencePool]:
    with ExperiencePool(tmp_path / "pool.sqlite", KEEP) as made:
        yield made


def answered(trajectory: Trajectory) -> Trajectory:
    """Return a copy that ends with an observation of two tokens, which the model did not see."""
    return replace(trajectory, ending=(Turn({"role": "user", "content": "!"}, np.array([3, 4, 5]), body=(1, 3)),))


@pytest.mark.parametrize("loss", [LossSettings(), LossSettings(observation_coefficient=0.7)])
def test_the_gradient_is_that_of_the_observation_loss_alone_with_its_own_coefficient(loss: LossSettings) -> None:
    groups = [replace(g, spec=replace(g.spec, replayed=(), fresh=len(g.trajectories))) for g in make_groups(3)]
    members = [member for each in groups for member in each.valid_fresh]
    learner = TorchLearner(
        tiny_model(0, torch.float64),
        LearnerSettings(tokens_per_microbatch=60),
        loss,
        total_steps=3,
        groups_per_step=1,
        pad_token=0,
        temperature=1.0,
    )
    applied = applied_gradients(learner)
    metrics = asyncio.run(learner.replay_update(observation_batch(members, 128, 0.3), 0))
    naive = tiny_model(0, torch.float64)
    expected = observation_loss(naive, groups)
    (0.3 * expected).backward()
    assert metrics["loss/observation"] == pytest.approx(float(expected.detach()), rel=1e-9)
    assert metrics["tokens/trained"] == 0
    [gradients] = applied
    for (name, parameter), ours in zip(naive.named_parameters(), gradients, strict=True):
        theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_successes_and_failures_are_drawn_but_no_demonstrations_or_limited_sources(pool: ExperiencePool) -> None:
    for number in range(3):
        name = f"t{number}"
        members = [answered(played(name, 1, [[5]])), answered(played(name, 0, [[6]])), played(name, 0, [[7]])]
        pool.observe([group(name, members)], 0)
    for name, source in (("demo", "demonstrations"), ("other", "import")):
        pool.add(task(name), answered(played(name, 1, [[5]])), source=source)
    pool.observe([solved("known", 0, 1)], 0)
    pool.set_tasks([task(name) for name in ("t0", "t1", "demo", "other", "known")])
    random, seen = np.random.default_rng(0), Counter[tuple[str, float]]()
    for _ in range(200):
        drawn, without, excluded = choose_from_pool(
            pool, KEEP.model_copy(update={"source_limits": {"import": 0.5}}), random
        )
        assert len({trajectory.task_id for trajectory in drawn}) == len(drawn) <= 3
        assert without >= len(drawn)
        assert len(drawn) + excluded <= 3
        seen.update((trajectory.task_id, trajectory.score.value) for trajectory in drawn)
    assert set(seen) == {("t0", 1.0), ("t0", 0.0), ("t1", 1.0), ("t1", 0.0)}
    assert max(seen.values()) < 1.5 * min(seen.values())
    assert pool.draw_names(9, random)
    assert not pool.draw_names(0, random)
    assert set(pool.draw_names(9, random)) == {"t0", "t1", "demo", "other", "known"}


def test_demonstrations_are_left_out_whatever_name_their_source_was_given(pool: ExperiencePool) -> None:
    """`gleanrl pool seed --demonstrations N --source NAME` records NAME as their source."""
    shown = replace(answered(played("demo", 1, [[5]])), info={"origin": "demonstration"})
    assert pool.add(task("demo"), shown, source="expert")
    assert choose_from_pool(pool, KEEP, np.random.default_rng(0)) == ([], 0, 1)


def test_a_policy_loss_is_not_called_for_an_update_without_trained_tokens() -> None:
    """A maximum over no tokens, for example, is an error."""

    def relative(tokens: Tokens, settings: LossSettings) -> torch.Tensor:
        return tokens.advantages / tokens.advantages.abs().max()

    @policy_loss("relative, of a test", scope="update", precompute=relative)
    def scaled(tokens: Tokens, settings: LossSettings) -> torch.Tensor:
        return -relative(tokens, settings) * tokens.ratio

    members = [member for each in make_groups(3) for member in each.valid_fresh]
    learner = TorchLearner(
        tiny_model(0),
        LearnerSettings(tokens_per_microbatch=60),
        LossSettings(name="relative, of a test"),
        total_steps=3,
        groups_per_step=1,
        pad_token=0,
        temperature=1.0,
    )
    metrics = asyncio.run(learner.replay_update(observation_batch(members, 128, 0.3), 0))
    assert metrics["updates/done"] == 1


def test_the_step_reports_the_update_and_counts_no_uses(pool: ExperiencePool) -> None:
    members = [answered(played("t", 1, [[5], [6]])), played("t", 0, [[7]])]
    pool.observe([group("t", members)], 0)
    learner = Recorder()
    settings: dict[str, Any] = {"pool_updates": 0, "observation_batch": 3, "observation_coefficient": 0.25}
    metrics = updated(pool, learner, keep_failures=4, **settings)
    found = {name: metrics[f"replay_update/observation/{name}"] for name in ("trajectories", "tokens", "without_spans")}
    assert found == {"trajectories": 1, "tokens": 2, "without_spans": 1}
    [(batch, step)] = learner.updates
    [sample] = batch.samples
    assert (batch.observation_coefficient, step, sample.mask.any(), sample.tokens.size) == (0.25, 0, False, 9)
    assert sample.observed is not None
    assert sample.observed.nonzero()[0].tolist() == [7, 8]
    assert [stored.uses for stored in pool.stored(["t"])["t"]] == [0]
    fresh = [answered(played("u", 1, [[5]])), answered(played("u", 0, [[6]])), played("u", 0, [[7]])]
    step_groups: list[Group] = [group("u", fresh)]
    metrics = updated(pool, learner, step_groups, observation_from="batch", **settings)
    assert metrics["replay_update/observation/trajectories"] == 2
    assert len(choose_from_step(step_groups, 1, np.random.default_rng(0))) == 1


@pytest.mark.parametrize("source", ["pool", "batch"])
def test_an_update_without_observations_logs_its_cause(
    pool: ExperiencePool, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    pool.observe([group("t", [played("t", 1, [[5]]), played("t", 0, [[7]])])], 0)
    settings: dict[str, Any] = {"pool_updates": 0, "observation_batch": 3, "observation_from": source}
    metrics = updated(pool, Recorder(), [solved("v", 1, 2)], keep_failures=4, **settings)
    assert metrics["replay_update/observation/trajectories"] == 0
    [line] = [record.getMessage() for record in caplog.records if "observation_batch" in record.getMessage()]
    assert ("2 do not hold" in line) == (source == "pool")
