"""Tests of the parts of published designs in `benchmarks/atlas_designs.py`, which arms of the atlas name by path."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.algorithms.advantages import estimate
from gleanrl.algorithms.loss import Tokens, objective, precompute
from gleanrl.config.settings import Config, LossSettings, ReplaySettings, ScheduleSettings
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.pool.ranking import RANKINGS, TaskTrajectories
from gleanrl.experience.replay.curriculum import ReplayCurriculum
from gleanrl.experience.replay.updates import ReplayUpdateLearner
from gleanrl.types import GroupSpec
from gleanrl.utils.importing import load_object
from tests.experience.replay_world import Stream, group, retire

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DESIGNS, CURRICULA = BENCHMARKS / "atlas_designs.py", BENCHMARKS / "atlas_curricula.py"


def test_fresh_per_draws_in_proportion_to_the_decayed_age() -> None:
    ages, none = np.array([20, 10, 0, 0]), np.zeros(4)
    trajectories = TaskTrajectories(none, none.astype(np.int64), ages, none, none.astype(np.int64))
    random, ranking = np.random.default_rng(0), RANKINGS.get(f"{DESIGNS}:fresh_per")
    first = Counter(ranking(trajectories, random)[0] for _ in range(4000))
    weights = np.exp(-ages / 10)
    np.testing.assert_allclose([first[i] / 4000 for i in range(4)], weights / weights.sum(), atol=0.03)


def test_m2po_leaves_out_the_fewest_tokens_that_bring_the_second_moment_to_its_bound() -> None:
    random = np.random.default_rng(1)
    drift = torch.tensor(random.normal(0, 0.4, 50))
    off_policy = torch.arange(50) % 5 > 0
    advantages = torch.tensor(random.normal(size=50))
    tokens = Tokens(drift - 2, torch.full_like(drift, -2), advantages, torch.arange(50) // 10, off_policy)
    config = LossSettings(replay_mode=f"{DESIGNS}:m2po")
    kept = precompute(tokens, config).replay_precomputed
    assert kept is not None
    assert not kept[~off_policy].any()
    squares = np.sort(drift[off_policy].numpy() ** 2)
    count = max(n for n in range(1, 41) if squares[:n].mean() <= 0.04)
    assert 0 < count < 40
    assert int(kept.sum()) == count
    assert float(drift[kept].square().max()) == pytest.approx(squares[count - 1])
    result = objective(tokens, config)
    expected = torch.where(kept, -advantages * drift.exp(), 0.0)[off_policy]
    torch.testing.assert_close(result.values[off_policy], expected)
    metrics = result.statistics.metrics()
    clipped = metrics["loss/replayed/clip_high"] + metrics["loss/replayed/clip_low"]
    assert clipped == pytest.approx((40 - count) / 40)


def test_recalibrated_compares_replayed_members_with_the_median_of_the_groups() -> None:
    """The means of the fresh members of the three groups are 1/2, 1/4 and 3/4, so the median is 1/2."""
    scores = [1, 1, 0, 0, 1, 1, 0, 0, 0, 0.25, 1, 1, 1, 0]
    groups = torch.tensor([0] * 5 + [1] * 5 + [2] * 4)
    fresh = torch.tensor([True] * 4 + [False] + [True] * 4 + [False] + [True] * 4)
    rewards, mask = torch.tensor(scores)[:, None], torch.ones(14, 1)
    ours, _ = estimate(f"{DESIGNS}:recalibrated", rewards, mask, groups, baseline_members=fresh)
    plain, _ = estimate("grpo", rewards, mask, groups, baseline_members=fresh)
    torch.testing.assert_close(ours[fresh], plain[fresh])
    assert ours[~fresh, 0].tolist() == [0.5, 0.0]


def test_every_group_of_a_task_with_successes_gets_stored_ones(tmp_path: Path) -> None:
    replay = ReplaySettings(task_ratio=0.0, per_group=2, select="newest", probe_fraction=0.0)
    names = ["a", "b", "c", "d"]
    with ExperiencePool(tmp_path / "pool.sqlite", replay) as pool:
        inner = ReplayCurriculum(Stream(names, 4), pool, replay, total_batches=9, group=4, seed=0)
        run = SimpleNamespace(plan=SimpleNamespace(curriculum=inner))
        wrapped = load_object(f"{CURRICULA}:AttachToEveryGroup")(run, seed=0)
        wrapped.observe([group("a", 3, 4), group("b", 1, 4), group("c", 0, 4)], {})
        retire(pool, ["d"])
        specs: list[GroupSpec] = asyncio.run(wrapped.propose(3))
        attached = {spec.task.id: [t.id for t in spec.replayed] for spec in specs}
        assert attached == {"a": ["a.2", "a.1"], "b": ["b.0"], "c": []}
        assert all(spec.fresh == 4 for spec in specs)
        assert [stored.uses for stored in pool.stored(["a"])["a"]] == [0, 1, 1]


def test_the_newest_trajectories_of_a_task_join_its_groups_whatever_their_outcome(tmp_path: Path) -> None:
    replay = ReplaySettings(task_ratio=0.0, per_group=4, probe_fraction=0.0)
    with ExperiencePool(tmp_path / "pool.sqlite", replay) as pool:
        inner = ReplayCurriculum(Stream(["a", "b"], 4), pool, replay, total_batches=9, group=4, seed=0)
        run = SimpleNamespace(plan=SimpleNamespace(curriculum=inner))
        wrapped = load_object(f"{CURRICULA}:AttachNewestOutcomes")(run, seed=0)

        def attached() -> dict[str, list[str]]:
            return {spec.task.id: [t.id for t in spec.replayed] for spec in asyncio.run(wrapped.propose(2))}

        mixed, lost = group("a", 1, 3), group("b", 0, 2)
        wrapped.observe([mixed, lost], {})
        assert attached() == {"a": [t.id for t in mixed.trajectories], "b": [t.id for t in lost.trajectories]}
        solved = group("a", 2, 2, first=7, version=1)  # the pool stores nothing of a group without a failure
        wrapped.observe([solved], {})
        assert attached()["a"] == [t.id for t in (*mixed.trajectories[1:], *solved.trajectories)][-4:]


def test_compared_apart_is_grpo_of_either_part_of_a_group() -> None:
    """A group of four fresh and three stored members, one without a fresh success, and one with a stored one alone."""
    scores = [1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 1]
    groups = torch.tensor([0] * 7 + [1] * 4 + [2] * 3)
    fresh = torch.tensor([True] * 4 + [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2 + [False])
    rewards, mask = torch.tensor(scores, dtype=torch.float64)[:, None], torch.ones(14, 1)
    ours, _ = estimate(f"{DESIGNS}:compared_apart", rewards, mask, groups, baseline_members=fresh)
    for part in (fresh, ~fresh):
        alone, _ = estimate("grpo", rewards[part], mask[part], groups[part])
        expected = torch.where(groups[part][:, None] == 2, 0.0, alone) if part is not fresh else alone
        torch.testing.assert_close(ours[part], expected)


def test_topr_tapers_only_failures_and_by_the_ratio_of_the_whole_trajectory() -> None:
    drift = torch.tensor([0.2, -0.5, -0.4, 0.1, 0.3, 0.2, -0.1, -0.3], dtype=torch.float64)
    logp = (drift - 2).requires_grad_()
    sequence, old = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), torch.full_like(drift, -2)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])[:, None]
    advantages, _ = estimate(f"{DESIGNS}:signs", rewards, torch.ones(4, 1), torch.zeros(4, dtype=torch.int64))
    assert advantages[:, 0].tolist() == [1, -1, -1, 1]
    per_token = advantages[sequence, 0].double()
    tokens = Tokens(logp, old, per_token, sequence, torch.ones(8, dtype=torch.bool))
    values = objective(tokens, LossSettings(replay_mode=f"{DESIGNS}:topr")).values
    (gradient,) = torch.autograd.grad(values.sum(), logp)
    weights = [1, 1, np.exp(-0.3), np.exp(-0.3), 1, 1, 1, 1]  # the third trajectory has become more probable
    torch.testing.assert_close(gradient, -per_token * torch.tensor(weights))


def test_own_step_trains_on_as_many_tokens_of_the_step_as_replay_would_on_stored_ones(tmp_path: Path) -> None:
    replay = ReplaySettings(enabled=True, pool_batch=4, probe_fraction=0.0)
    with ExperiencePool(tmp_path / "pool.sqlite", replay) as pool:
        inner = ReplayCurriculum(Stream(["a"], 4), pool, replay, total_batches=9, group=4, seed=0)
        config = Config(replay=replay, schedule=ScheduleSettings(batch=2, group=4))
        unused: Any = None
        learner = ReplayUpdateLearner(unused, pool, config, seed=0, max_context=64, begun=lambda: True)
        stored = [group(name, 1, 4) for name in "abcd"]
        inner.observe(stored, {})
        run = SimpleNamespace(plan=SimpleNamespace(curriculum=inner), learner=learner)
        load_object(f"{CURRICULA}:OwnStep")(run, seed=0)
        assert asyncio.run(learner.choose_from_pool(np.random.default_rng(0), 1)) == []  # the step has no success
        step = [group("e", 3, 4, first=9, version=1), group("f", 4, 4, first=9, version=1)]
        learner.remember(step)
        chosen = asyncio.run(learner.choose_from_pool(np.random.default_rng(0), 1))
        assert {success.group.spec.task.id for success in chosen} == {"e"}  # all of "f" succeeded
        assert {success.weight for success in chosen} == {0.25}
        lengths = [success.group.trajectories[0].sampled_tokens for success in chosen]
        wanted = 4 * stored[0].trajectories[0].sampled_tokens
        assert sum(lengths[:-1]) < wanted <= sum(lengths)


def test_discounted_compares_successes_by_their_number_of_turns() -> None:
    """Three successes of 1, 2 and 2 turns and a failure; then a group of successes of equal length."""
    turns = torch.tensor([[1, 1, 0], [1, 1, 2], [1, 2, 2], [1, 2, 3], [1, 2, 2], [1, 1, 2]])
    mask = torch.tensor([[1, 1, 0]] + [[1, 1, 1]] * 5)
    scores, groups = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    rewards = torch.zeros(6, 3).scatter_(1, mask.sum(1, keepdim=True) - 1, scores[:, None])
    ours, _ = estimate(f"{DESIGNS}:discounted", rewards, mask, groups, turns=turns)
    shorter = torch.tensor([1.0, 0.95, 0.95, 0.0, 1.0, 1.0])  # the same in each group, up to a factor
    terms = [estimate("grpo", own[:, None], torch.ones(6, 1), groups)[0] for own in (scores, shorter)]
    torch.testing.assert_close(ours, mask * sum(terms), rtol=1e-4, atol=1e-5)
    assert ours[0, 0] > ours[1, 0] > ours[3, 0]
    assert not ours[4:].any()


def test_the_noise_of_a_gradient_is_told_from_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ratio = load_object(f"{BENCHMARKS / 'gradient_noise.py'}:noise_to_signal")
    random = np.random.default_rng(0)
    gradients = np.array([3.0, 4.0, 0.0]) + random.normal(0, 5, (4000, 3))
    assert ratio(gradients @ gradients.T) == pytest.approx(3 * 25 / 25, rel=0.1)
    small = [gradients[start : start + 40] for start in range(0, 4000, 40)]
    assert np.median([ratio(own @ own.T) for own in small]) == pytest.approx(3, rel=0.1)  # whatever their number
