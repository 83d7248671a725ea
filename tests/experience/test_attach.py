"""Tests of `gleanrl.experience.attach_replayed`, which adds stored successes to groups that another training loop has
sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience import ExperiencePool, attach_replayed
from gleanrl.experience.pool.ranking import TaskTrajectories, ranking
from gleanrl.types import Group, GroupSpec, Task
from gleanrl.utils.errors import UserError
from tests.experience.pool_world import episode, group, solved, task


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ExperiencePool]:
    with ExperiencePool(tmp_path / "pool.sqlite") as opened:
        yield opened


def tokens(groups: list[Group]) -> list[list[list[int]]]:
    """For each group, the sampled tokens of each replayed member."""
    return [[[*map(int, turn.tokens)] for t in g.spec.replayed for turn in t.sampled_turns()] for g in groups]


def test_a_stored_success_is_added_to_a_later_group_of_its_task(pool: ExperiencePool) -> None:
    pool.observe([solved("a", 1, 2)], step=0)
    fresh = [solved("a", 0, 3, first=50), solved("b", 1, 3)]
    a, b = attach_replayed(fresh, pool)
    assert a.trajectories[:3] == fresh[0].trajectories == a.fresh
    assert tokens([a]) == [[[0, 5]]]
    assert a.trajectories[3:] == a.spec.replayed
    assert a.spec.fresh == 3
    assert b == fresh[1]
    assert pool.stored(["a"])["a"][0].uses == 1


def test_a_group_is_not_given_its_own_successes(pool: ExperiencePool) -> None:
    fresh = [solved("a", 1, 2)]
    assert tokens(attach_replayed(fresh, pool)) == [[]]
    pool.observe(fresh, step=0)
    assert tokens(attach_replayed([solved("a", 1, 2, first=50)], pool)) == [[[0, 5]]]


def test_the_pool_stores_only_fresh_members_of_mixed_groups(pool: ExperiencePool) -> None:
    pool.observe([solved("a", 1, 2)], step=0)
    pool.observe(attach_replayed([solved("a", 0, 4, first=50)], pool), step=1)
    assert pool.buckets() == {(0, 4): 1}
    assert len(pool.stored(["a"])["a"]) == 1


@pytest.mark.parametrize(
    ("select", "expected"),
    [("lowest_entropy", [[3], [2]]), ("highest_entropy", [[1], [2]]), ("newest", [[2], [3]])],
)
def test_the_pool_settings_choose_the_replayed_members(tmp_path: Path, select: str, expected: list[list[int]]) -> None:
    chosen = ReplaySettings.model_validate({"per_group": 2, "select": select})
    with ExperiencePool(tmp_path / "pool.sqlite", chosen) as pool:
        for token, logprob in ((1, -3.0), (3, -1.0), (2, -2.0)):
            pool.add(task("a"), episode("a", tokens=(token,), logprobs=(logprob,)), attempts=4, successes=2)
        assert tokens(attach_replayed([solved("a", 0, 2)], pool)) == [expected]
        assert [stored.uses for stored in pool.stored(["a"])["a"]] == [int([t] in expected) for t in (1, 3, 2)]


def test_a_ranking_of_ages_counts_them_from_the_given_step(tmp_path: Path) -> None:
    ages: list[list[int]] = []

    @ranking("by age, for a test")
    def by_age(trajectories: TaskTrajectories, random: np.random.Generator) -> np.ndarray:
        ages.append(trajectories.age.tolist())
        return np.argsort(trajectories.age)

    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings(select=by_age.name)) as pool:
        for token, version in ((1, 2), (2, 5), (3, 4)):
            pool.add(task("a"), episode("a", tokens=(token,), version=version), attempts=4, successes=2)
        assert tokens(attach_replayed([solved("a", 0, 2)], pool, step=6)) == [[[2]]]
        attach_replayed([solved("a", 0, 2)], pool, seed=4)
    assert ages == [[4, 1, 2], [2, 0, 0]]


def test_successes_that_are_too_old_are_not_added(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings(max_age=3)) as pool:
        for token, version in ((1, 1), (2, 4)):
            pool.add(task("a"), episode("a", tokens=(token,), version=version), attempts=4, successes=2)
        assert tokens(attach_replayed([solved("a", 0, 2)], pool, step=5)) == [[[2]]]
        assert tokens(attach_replayed([solved("a", 0, 2)], pool, step=8)) == [[]]


def test_a_ranking_is_not_called_for_a_task_without_stored_successes(tmp_path: Path) -> None:
    @ranking("relative length, of a test", by_entropy=False)
    def relative_length(trajectories: TaskTrajectories, random: np.random.Generator) -> np.ndarray:
        return np.argsort(trajectories.length / trajectories.length.max())

    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings(select="relative length, of a test")) as pool:
        pool.observe([solved("a", 1, 2)], 0)
        mixed = attach_replayed([solved("a", 1, 2, first=50), solved("b", 1, 2)], pool)
    assert [len(each.spec.replayed) for each in mixed] == [1, 0]


def test_random_choice_follows_the_seed(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings(select="random")) as pool:
        for token in range(8):
            pool.add(task("a"), episode("a", tokens=(token,)), attempts=4, successes=2)
        fresh = [solved("a", 0, 2)]
        assert tokens(attach_replayed(fresh, pool, seed=3)) == tokens(attach_replayed(fresh, pool, seed=3))
        assert len({str(tokens(attach_replayed(fresh, pool, seed=seed))) for seed in range(20)}) > 3


def test_a_group_of_a_retired_task_is_unchanged(pool: ExperiencePool) -> None:
    pool.observe([solved("a", 1, 2)], step=0)
    for step in (1, 2):
        pool.observe([solved("a", 2, 2)], step=step)
    assert pool.retired(["a"])
    fresh = [solved("a", 2, 2)]
    assert attach_replayed(fresh, pool) == fresh


def test_a_group_without_a_valid_score_is_unchanged(pool: ExperiencePool) -> None:
    pool.observe([solved("a", 1, 2)], step=0)
    fresh = [group("a", [episode("a", None, (8,)), episode("a", None, (9,))])]
    assert attach_replayed(fresh, pool) == fresh
    assert pool.stored(["a"])["a"][0].uses == 0


def test_per_group_zero_adds_no_member(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings(per_group=0)) as pool:
        pool.observe([solved("a", 1, 2)], step=0)
        assert tokens(attach_replayed([solved("a", 0, 2)], pool)) == [[]]
        assert pool.stored(["a"])["a"][0].uses == 0


def test_two_groups_of_a_task_get_the_same_success(pool: ExperiencePool) -> None:
    pool.observe([solved("a", 1, 2)], step=0)
    assert tokens(attach_replayed([solved("a", 0, 2), solved("a", 0, 2, first=9)], pool)) == [[[0, 5]], [[0, 5]]]


@pytest.mark.parametrize("setting", [{"entropy_from": "current"}, {"max_ratio": 2.0}, {"reverify": True}])
def test_settings_that_need_the_policy_or_the_reward_are_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    [name] = setting
    with ExperiencePool(tmp_path / "pool.sqlite", ReplaySettings.model_validate(setting)) as pool:
        pool.observe([solved("a", 1, 2)], step=0)
        with pytest.raises(UserError, match=rf"replay\.{name}"):
            attach_replayed([solved("a", 0, 2)], pool)


def test_a_group_that_already_has_replayed_members_is_refused(pool: ExperiencePool) -> None:
    mixed = group("a", [episode("a", 0.0)], [episode("a", tokens=(9,))])
    with pytest.raises(ValueError, match="task 'a' already holds replayed"):
        attach_replayed([mixed], pool)


def test_what_a_ranking_keeps_must_be_a_function() -> None:
    with pytest.raises(UserError, match="keep"):
        ranking("wrong keep, of a test", keep="shortest")  # type: ignore[arg-type]


def test_a_task_of_the_same_id_with_another_prompt_gets_nothing(tmp_path: Path) -> None:
    with ExperiencePool(tmp_path / "pool.sqlite") as pool:
        pool.observe([solved("t", 1, 4)], 0)
        other = Task("t", ({"role": "user", "content": "another problem"},), {"answer": 99})
        for spec_task, expected in ((other, 0), (solved("t", 1, 4).spec.task, 1)):
            fresh = Group(GroupSpec(spec_task, 4), solved("t", 0, 4).trajectories, 0)
            assert [len(mixed.spec.replayed) for mixed in attach_replayed([fresh], pool)] == [expected]
