"""Tests of `ExperiencePool`: its rules against a naive model, its marks, readers in other processes, and what it does
with damaged and foreign files."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience.pool import codec
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.pool.ranking import ranking
from gleanrl.types import Group, GroupSpec, Trajectory, Turn
from gleanrl.utils.errors import UserError
from tests.experience.pool_world import contents, episode, group, solved, task
from tests.strategies import examples, same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "experience.sqlite"


@pytest.fixture
def pool(path: Path) -> Iterator[ExperiencePool]:
    with ExperiencePool(path) as made:
        yield made
        assert made.verify() == []


def tokens(pool: ExperiencePool, name: str = "t") -> list[list[int]]:
    return [next(s.trajectory.sampled_turns()).tokens.tolist() for s in pool.stored([name])[name]]


# --- admission ----------------------------------------------------------------------------------
def test_a_stored_trajectory_is_read_back_bit_for_bit_after_reopening(path: Path) -> None:
    random = np.random.default_rng(0)

    def turns(count: int) -> tuple[Turn, ...]:
        made: list[Turn] = []
        for version in range(count):
            made.append(Turn({"role": "user", "content": "You see ☕"}, random.integers(0, 50_000, 40)))
            logprobs = np.log(random.random(7)).astype(np.float32)
            made.append(Turn({"role": "assistant", "content": "go"}, random.integers(0, 50_000, 7), logprobs, version))
        return tuple(made)

    base = episode("t")
    won = Trajectory("w", "t", (turns(3), turns(1), turns(2)), base.score, base.stop, {"turns": 6})
    with ExperiencePool(path) as pool:
        pool.observe([group("t", [won, episode("t", 0.0)])], 4, temperature=0.7)
    with ExperiencePool(path) as pool:
        (stored,) = pool.stored(["t"])["t"]
        (drawn,) = pool.draw((1, 2), 5, random)
    assert same(stored.trajectory, won)
    sampled = np.concatenate([turn.logprobs for turn in won.sampled_turns() if turn.logprobs is not None])
    assert stored.entropy == pytest.approx(-sampled.astype(np.float64).mean())
    assert (stored.version, stored.temperature, stored.step, stored.uses) == (0, 0.7, 4, 0)
    assert (drawn.task, drawn.rate) == (task("t"), 0.5)


@pytest.mark.parametrize(
    ("successes", "bounds", "admitted"),
    [
        *((n, (0.0, 1.0), 0 < n < 4) for n in range(5)),
        *((n, (0.25, 0.75), n == 2) for n in range(5)),
    ],
)
def test_min_rate_and_max_rate_are_exclusive_bounds(
    path: Path, successes: int, bounds: tuple[float, float], admitted: bool
) -> None:
    with ExperiencePool(path, ReplaySettings(min_rate=bounds[0], max_rate=bounds[1])) as pool:
        metrics = pool.observe([solved("t", successes, 4)], 0)
        assert len(pool.stored(["t"])["t"]) == (successes if admitted else 0) == metrics["pool/admitted"]
        assert pool.rates(["t", "other"]) == {"t": successes / 4}


def test_only_valid_fresh_members_count(pool: ExperiencePool) -> None:
    old = episode("t", 1.0, (90,))
    members = [episode("t", 1.0, (1,)), episode("t", 0.0, (2,)), episode("t", None, (3,))]
    pool.observe([group("t", members, [old, old])], 0)
    assert pool.rates(["t"]) == {"t": 0.5}  # not 3/5, not 1/3
    assert tokens(pool) == [[1]]  # what was replayed is not stored again
    before = contents(pool.path)
    pool.observe(
        [group("t", [], [old]), group("t", [episode("t", None)], [old]), group("new", [episode("new", None)])], 1
    )
    assert contents(pool.path) == before
    assert pool.buckets() == {(1, 2): 1}


def test_success_threshold_decides_which_scores_are_successes(path: Path) -> None:
    members = [episode("t", score, (int(10 * score),)) for score in (0.2, 0.69, 0.7, 1.0)]
    with ExperiencePool(path, ReplaySettings(success_threshold=0.7)) as pool:
        pool.observe([group("t", members)], 0)
        assert tokens(pool) == [[7], [10]]
        assert pool.buckets() == {(2, 4): 1}


def test_identical_tokens_are_stored_once_per_task(pool: ExperiencePool) -> None:
    def members(name: str) -> list[Trajectory]:
        twins = [episode(name, 1.0, (1, 2), [-1.0, -2.0]), episode(name, 1.0, (1, 2), [-3.0, -3.0])]
        return [*twins, episode(name, 0.0, (3,))]

    metrics = pool.observe([group("t", members("t"))], 0)
    assert (metrics["pool/admitted"], metrics["pool/refused/duplicate"]) == (1, 1)
    pool.observe([group("t", members("t")), group("u", members("u"))], 1)
    stored = pool.stored(["t", "u"])
    assert [s.entropy for s in stored["t"]] == [1.5]  # the first one is kept
    assert len(stored["u"]) == 1


@pytest.mark.parametrize(
    "info", [{"guided": True}, {"guided": "discard"}, {"guided": "stripped"}, {"altered_sampling": "top_p=0.9"}]
)
def test_trajectories_not_sampled_from_the_policy_itself_are_not_admitted(
    pool: ExperiencePool, info: dict[str, Any]
) -> None:
    fine = [episode("t", 1.0, (2,), info={"guided": False}), episode("t", 1.0, (3,), info={"guided": "keep"})]
    members = [episode("t", 1.0, (1,), info=info), *fine, episode("t", 0.0)]
    assert pool.observe([group("t", members)], 0)["pool/refused/altered"] == 1
    assert tokens(pool) == [[2], [3]]  # kept guidance is part of the trained prompt
    assert not pool.add(task("t"), members[0])
    assert pool.observe([solved("greedy", 1, 2)], 0, temperature=0.0)["pool/admitted"] == 0


def test_trajectories_that_cannot_be_trained_on_are_not_admitted(path: Path) -> None:
    odd = [
        episode("t", 1.0, (1, 100)),
        episode("t", 1.0, (-1, 2)),
        episode("t", 1.0, (1, 2), [-1.0, float("nan")]),
        episode("t", 1.0, (1, 2), [-1.0, -float("inf")]),
        episode("t", 1.0, ()),
        episode("t", 1.0, (1, 2), [-1.0, 5.0]),
        episode("t", 1.0, (3, 4), [0.0, 0.0]),
        Trajectory("none", "t", (), episode("t").score, episode("t").stop),
        starting_sampled("t", 2),
    ]
    fine = [episode("t", 1.0, (99,)), episode("t", 1.0, (5, 6), [0.0, -1e-6]), episode("t", 1.0, (7,), [1e-4])]
    with ExperiencePool(path, vocabulary=100) as pool:
        metrics = pool.observe([group("t", [*odd, *fine, episode("t", 0.0)])], 0)
        assert metrics["pool/refused/unfit"] == len(odd)
        assert tokens(pool) == [[99], [5, 6], [7]]
        assert not any(pool.add(task("t"), each) for each in odd)


def starting_sampled(name: str, token: int) -> Trajectory:
    """Return a trajectory whose second segment has no token before its sampled turn; the first one is regular."""
    whole = episode(name, 1.0, (token,))
    nothing = Turn({"role": "user", "content": ""}, np.empty(0, np.int32))
    return Trajectory("odd", name, (*whole.segments, (nothing, whole.segments[0][1])), whole.score, whole.stop)


def test_trajectories_over_max_context_are_neither_admitted_nor_returned(path: Path) -> None:
    def long(name: str) -> Trajectory:  # 3 context tokens, 2 sampled, 40 context tokens after the last trained one
        (asked, said), tail = episode(name).segments[0], Turn({"role": "user", "content": ""}, np.full(40, 3))
        short = (asked, Turn(said.message, np.array([4]), np.array([-0.5])))
        return Trajectory("long", name, (short, (asked, said, tail)), episode(name).score, episode(name).stop)

    with ExperiencePool(path) as pool:
        pool.observe([group("t", [long("t"), episode("t", 0.0)]), solved("u", 1, 2)], 0)
    with ExperiencePool(path, max_context=5) as pool:
        assert len(pool.stored(["t"])["t"]) == 1
        pool.observe([group("v", [long("v"), episode("v", 0.0)])], 1)
        assert len(pool.stored(["v"])["v"]) == 1
    with ExperiencePool(path, max_context=4) as pool:
        assert pool.stored(["t"])["t"] == []
        metrics = pool.observe([group("w", [long("w"), episode("w", 0.0)])], 1)
        assert (metrics["pool/refused/unfit"], metrics["pool/evicted/too_long"]) == (1, 1)
        assert pool.verify() == []


# --- tasks --------------------------------------------------------------------------------------
def test_a_task_is_in_the_bucket_of_its_latest_fresh_group_only(pool: ExperiencePool) -> None:
    for successes, attempts in ((1, 4), (3, 4), (2, 5), (0, 4)):
        pool.observe([solved("t", successes, attempts)], 0)
        assert pool.buckets() == {(successes, attempts): 1}  # a task of rate 0 keeps its trajectories and can be drawn
    assert len(tokens(pool)) == 3
    (drawn,) = pool.draw((0, 4), 3, np.random.default_rng(0))
    assert drawn.rate == 0.0


def test_a_task_without_trajectories_is_known_but_never_drawn(pool: ExperiencePool) -> None:
    pool.observe([solved("t", 0, 4)], 0)
    assert (pool.buckets(), pool.rates(["t"]), pool.stored(["t"])) == ({}, {"t": 0.0}, {"t": []})


def test_two_perfect_groups_in_a_row_retire_a_task_and_an_imperfect_one_reactivates_it(pool: ExperiencePool) -> None:
    random = np.random.default_rng(0)
    pool.observe([solved("t", 2, 4)], 0)
    pool.observe([solved("t", 4, 4)], 1)
    pool.observe([solved("t", 3, 4)], 2)
    pool.observe([solved("t", 4, 4)], 3)
    assert pool.retired(["t"]) == set()
    assert pool.buckets() == {(4, 4): 1}
    assert pool.observe([solved("t", 4, 4)], 4)["pool/newly_retired"] == 1
    assert (pool.retired(["t", "u"]), pool.buckets()) == ({"t"}, {})
    assert [drawn.task.id for drawn in pool.draw(None, 3, random)] == ["t"]
    assert pool.draw(None, 3, random, {"t"}) == []
    assert pool.observe([group("t", [episode("t", None)])], 5)["pool/unretired"] == 0  # no valid member
    assert pool.observe([solved("t", 3, 4)], 6)["pool/unretired"] == 1
    assert (pool.retired(["t"]), pool.buckets(), pool.draw(None, 3, random)) == (set(), {(3, 4): 1}, [])


# --- capacity, age, uses ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("select", "kept"),
    [
        ("least_used", [1, 3, 5]),
        ("lowest_entropy", [1, 3, 5]),
        ("highest_entropy", [2, 4, 5]),
        ("newest", [3, 4, 5]),
    ],
)
def test_a_full_task_evicts_the_trajectory_that_would_be_selected_last(
    path: Path, select: Any, kept: list[int]
) -> None:
    entropies = [2.0, 1.0, 3.0, 2.0, 3.0, 2.0]  # of equal ones, the older is evicted
    with ExperiencePool(path, ReplaySettings(select=select, capacity_per_task=3)) as pool:
        for index, entropy in enumerate(entropies):
            won = episode("t", 1.0, (index,), [-entropy])
            pool.observe([group("t", [won, episode("t", 0.0)])], index)
        assert [each[0] for each in tokens(pool)] == kept
    with ExperiencePool(path.with_name("at-once"), ReplaySettings(select=select, capacity_per_task=3)) as pool:
        members = [episode("t", 1.0, (i,), [-e]) for i, e in enumerate(entropies)]
        metrics = pool.observe([group("t", [*members, episode("t", 0.0)])], 0)
        assert [each[0] for each in tokens(pool)] == kept
        assert (metrics["pool/admitted"], metrics["pool/refused/full"]) == (3, 3)


def test_a_full_task_keeps_what_the_users_own_ranking_keeps(path: Path) -> None:
    by_default = ranking("own, for a test")(lambda trajectories, random: range(trajectories.age.size))
    oldest = ranking("oldest kept, for a test", keep=lambda candidate: -candidate.order)(by_default.function)
    best = ranking("best kept, for a test", keep=lambda candidate: (candidate.score, -candidate.length))
    episodes = [(0.75, (0,)), (1.0, (1, 1, 1)), (1.0, (2,)), (0.5, (3,))]  # score, sampled tokens
    for chosen, kept in ((by_default, [2, 3]), (oldest, [0, 1]), (best(by_default.function), [1, 2])):
        settings = ReplaySettings(select=chosen.name, capacity_per_task=2, success_threshold=0.5)
        with ExperiencePool(path.with_name(chosen.name), settings) as pool:
            for index, (score, sampled) in enumerate(episodes):
                pool.observe([group("t", [episode("t", score, sampled), episode("t", 0.0)])], index)
            assert [each[0] for each in tokens(pool)] == kept
            assert pool.verify() == []
    with pytest.raises(UserError, match=r"replay.select: unknown value 'newst'; did you mean 'newest'"):
        ExperiencePool(path, ReplaySettings(select="newst"))


def test_with_random_selection_a_full_task_keeps_a_uniform_sample_of_all_successes(path: Path) -> None:
    with ExperiencePool(path, ReplaySettings(select="random", capacity_per_task=4)) as pool:
        starts = {str(n): 1000 * n for n in range(150)}
        pool.observe([solved(name, 8, 9, first=own) for name, own in starts.items()], 0)
        pool.observe([solved(name, 8, 9, first=own + 8) for name, own in starts.items()], 1)
        kept = Counter(each[0] - own for name, own in starts.items() for each in tokens(pool, name))
    assert kept.total() == 600
    early = sum(kept[i] for i in range(8))
    assert 250 < early < 350  # half, +- 4 deviations
    assert set(kept) == set(range(16))


def test_max_age_counts_versions(path: Path) -> None:
    with ExperiencePool(path, ReplaySettings(max_age=3)) as pool:
        pool.observe([solved("old", 1, 2, version=0), solved("young", 1, 2, version=2)], 2)
        assert pool.observe([], 2)["pool/evicted/age"] == 0
        metrics = pool.observe([], 3)  # the next step that could replay it is 4
        assert (metrics["pool/evicted/age"], metrics["pool/trajectories"]) == (1, 1)
        assert (tokens(pool, "old"), tokens(pool, "young")) == ([], [[0, 5]])
        assert pool.buckets() == {(1, 2): 1}
        # after its eviction, the same tokens of a later version are admitted
        pool.observe([solved("young", 1, 2, version=5)], 5)
        assert [s.version for s in pool.stored(["young"])["young"]] == [5]
        assert pool.stats()["evicted"] == {"age": 2}


def reworded(name: str, fresh: Sequence[Trajectory]) -> Group:
    """Return a group of a task with the same id and another prompt."""
    other = replace(task(name), prompt=({"role": "user", "content": "say it in French"},))
    return Group(GroupSpec(other, len(fresh)), tuple(fresh), 0)


def test_ages_go_on_when_another_run_starts_from_step_0(path: Path) -> None:
    with ExperiencePool(path) as pool:
        pool.observe([solved("old", 1, 2, version=3)], 3)
        pool.observe([solved("new", 1, 2, first=9, version=10)], 10)
    with ExperiencePool(path, ReplaySettings(max_age=8)) as pool:
        before = pool.mark()
        pool.start_run()
        versions = {name: stored[0].version for name, stored in pool.stored(["old", "new"]).items()}
        assert versions == {"old": -7, "new": 0}
        pool.start_run()  # a run that ended before its first step
        assert {name: stored[0].version for name, stored in pool.stored(["old", "new"]).items()} == versions
        assert pool.verify() == []
        assert pool.observe([], 0)["pool/evicted/age"] == 0
        assert pool.observe([], 1)["pool/evicted/age"] == 1
        assert list(pool.stored(["new"])) == ["new"]
        pool.rewind(before)
        assert pool.stored(["old"])["old"][0].version == 3


def test_a_task_whose_prompt_changed_loses_its_trajectories(
    pool: ExperiencePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.observe([solved("t", 3, 4), solved("u", 2, 4)], 0)
    pool.observe([solved("t", 4, 4)], 1)
    new = reworded("t", [episode("t", 1.0, (70,)), *(episode("t", 1.0, (71 + i,)) for i in range(3))])
    assert pool.observe([new], 2)["pool/newly_retired"] == 0  # the first perfect group of the changed task
    assert tokens(pool) == []
    pool.observe([reworded("t", [episode("t", 1.0, (70,)), episode("t", 0.0)])], 3)
    assert tokens(pool) == [[70]]
    [drawn] = pool.draw((1, 2), 1, np.random.default_rng(0))
    assert drawn.task.prompt[0]["content"] == "say it in French"
    assert pool.stats()["evicted"] == {"other_task": 3}
    assert [line for line in caplog.messages if "1 tasks (t is the first) differ" in line and "the 3 tr" in line]
    assert len(tokens(pool, "u")) == 2
    twin = replace(task("u"), payload={"of": ("a", 1.5), "seed": 1})  # the same as JSON
    pool.observe([Group(GroupSpec(twin, 2), (episode("u", 1.0, (9,)), episode("u", 0.0)), 0)], 4)
    assert len(tokens(pool, "u")) == 3


def test_add_refuses_a_different_task_with_a_known_id(pool: ExperiencePool) -> None:
    pool.observe([solved("t", 2, 4), solved("u", 0, 4)], 0)
    other = replace(task("t"), payload={"seed": 7})
    assert not pool.add(other, episode("t", 1.0, (70,)))
    assert not pool.add(replace(task("u"), payload={}), episode("u", 1.0, (70,)))
    assert tokens(pool) == [[0, 5], [1, 5]]
    assert pool.rates(["t", "u"]) == {"t": 0.5, "u": 0.0}
    assert pool.add(task("t"), episode("t", 1.0, (70,)))


def test_set_tasks_evicts_the_trajectories_of_changed_tasks(
    pool: ExperiencePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.observe([solved("t", 2, 4), solved("u", 2, 4), solved("gone", 4, 4)], 0)
    pool.observe([solved("gone", 4, 4)], 0)
    before = contents(pool.path)
    pool.set_tasks([task("t"), task("u"), task("gone"), task("never seen")])
    assert contents(pool.path) == before
    assert caplog.messages == []
    pool.set_tasks([task("u"), *(replace(task(name), payload={}) for name in ("t", "gone", "never seen"))])
    assert (tokens(pool), len(tokens(pool, "u"))) == ([], 2)
    assert (pool.rates(["t", "gone"]), pool.retired(["gone"])) == ({}, set())
    assert pool.stats()["tasks"] == 3
    assert len(caplog.messages) == 1


def test_tasks_outside_the_training_set_are_kept_but_not_drawn(
    pool: ExperiencePool, caplog: pytest.LogCaptureFixture
) -> None:
    def drawn(bucket: tuple[int, int] | None) -> list[str]:
        return sorted(found.task.id for found in pool.draw(bucket, 9, np.random.default_rng(0)))

    names = ["own", "held out", "of another environment", "solved"]
    pool.observe([solved(name, 2, 4) for name in names], 0)
    for _ in range(2):
        pool.observe([solved("solved", 4, 4)], 1)
    pool.set_tasks([task("own"), task("new")])
    assert [line for line in caplog.messages if "3 of 4 tasks" in line and "6 trajectories" in line]
    assert (pool.buckets(), drawn((2, 4)), drawn(None)) == ({(2, 4): 1}, ["own"], [])
    metrics = pool.observe([solved("new", 1, 4)], 2)
    assert (metrics["pool/outside"], metrics["pool/eligible"], metrics["pool/retired"]) == (3, 2, 0)
    assert (metrics["pool/trajectories"], pool.stats()["outside"]) == (9, 3)
    assert pool.verify() == []
    # the run plays one of them after all, and the next run has other tasks
    assert pool.observe([solved("held out", 2, 4, first=50)], 3)["pool/outside"] == 2
    assert drawn((2, 4)) == ["held out", "own"]
    pool.set_tasks([task(name) for name in ("solved", "of another environment")])
    assert (drawn((2, 4)), drawn(None), pool.stats()["outside"]) == (["of another environment"], ["solved"], 3)
    assert len(pool.stored(["own"])["own"]) == 2
    assert pool.verify() == []


def test_uses_and_evictions_are_counted(pool: ExperiencePool) -> None:
    pool.observe([solved("t", 3, 4)], 0)
    first, second, third = (s.key for s in pool.stored(["t"])["t"])
    pool.used([first, third, third, 999])
    assert [s.uses for s in pool.stored(["t"])["t"]] == [1, 0, 2]
    pool.evict([second, 999, second], "ratio")
    assert pool.observe([], 1)["pool/evicted/ratio"] == 1
    pool.evict([first, third], "disagreed")
    assert (pool.stored(["t"]), pool.buckets()) == ({"t": []}, {})
    assert pool.stats()["evicted"] == {"disagreed": 2, "ratio": 1}
    pool.observe([solved("t", 1, 4)], 2)
    assert pool.stored(["t"])["t"][0].key not in {first, second, third}


def test_add_seeds_the_pool_with_trajectories_of_other_sources(pool: ExperiencePool) -> None:
    assert pool.add(task("demo"), episode("demo", version=400), version=0)
    assert not pool.add(task("demo"), episode("demo"))
    assert not pool.add(task("lost"), episode("lost", 0.0))
    assert pool.add(task("known"), episode("known"), attempts=8, successes=2)
    assert pool.buckets() == {(0, 0): 1, (2, 8): 1}
    assert pool.rates(["demo", "known", "lost"]) == {"known": 0.25}
    (drawn,) = pool.draw((0, 0), 1, np.random.default_rng(0))
    assert (drawn.task.id, drawn.rate) == ("demo", 0.0)
    assert pool.stored(["demo"])["demo"][0].version == 0
    with pytest.raises(ValueError, match="'u'"):
        pool.add(task("t"), episode("u"))


# --- draws --------------------------------------------------------------------------------------
def test_draws_are_uniform_distinct_and_leave_out_excluded_tasks(pool: ExperiencePool) -> None:
    names = [f"task {i}" for i in range(12)]
    pool.observe([solved(name, 1, 2) for name in names], 0)
    pool.observe([solved("elsewhere", 1, 3)], 0)
    random, drawn = np.random.default_rng(0), Counter[str]()
    excluded = {names[0], names[5], names[11], "elsewhere", "unknown"}
    for _ in range(900):
        ids = [each.task.id for each in pool.draw((1, 2), 3, random, excluded)]
        assert len(set(ids)) == 3
        drawn.update(ids)
    assert set(drawn) == set(names) - excluded
    assert all(240 < count < 360 for count in drawn.values())  # 300 expected, +- 4 deviations
    everyone = pool.draw((1, 2), 99, random, excluded)
    assert sorted(each.task.id for each in everyone) == sorted(set(names) - excluded)
    assert pool.draw((1, 2), 5, random, names) == pool.draw((7, 8), 5, random) == pool.draw((1, 2), 0, random) == []
    same = [[each.task.id for each in pool.draw((1, 2), 4, np.random.default_rng(3))] for _ in range(2)]
    assert same[0] == same[1]


@pytest.mark.parametrize("leaving", [0, 1, 3])
def test_a_task_that_leaves_a_bucket_leaves_no_gap_in_its_positions(pool: ExperiencePool, leaving: int) -> None:
    names, random = ["a", "b", "c", "d"], np.random.default_rng(0)
    pool.observe([solved(name, 1, 2) for name in names], 0)
    gone = names.pop(leaving)
    pool.observe([solved(gone, 1, 3)], 1)
    assert pool.verify() == []
    for _ in range(2):
        assert sorted(each.task.id for each in pool.draw((1, 2), 9, random)) == sorted(names)
        names.append("e")
        pool.observe([solved("e", 1, 2)], 2)


# --- against a naive model ----------------------------------------------------------------------
@dataclass
class Known:
    attempts: int = 0
    successes: int = 0
    step: int = 0
    streak: int = 0
    retired: bool = False
    live: list[dict[str, Any]] = field(default_factory=list)  # oldest first


@dataclass
class Model:
    """The documented rules of the pool, implemented on dictionaries."""

    settings: ReplaySettings
    tasks: dict[str, Known] = field(default_factory=dict)
    evicted: Counter[str] = field(default_factory=Counter)

    def observe(self, groups: Sequence[Group], step: int) -> None:
        for known in self.tasks.values():
            if self.settings.max_age is not None:
                self._drop(known, [t for t in known.live if step + 1 - t["version"] > self.settings.max_age], "age")
        for each in groups:
            valid = [t for t in each.fresh if t.score.valid]
            if valid:
                self._group(self.tasks.setdefault(each.spec.task.id, Known()), valid, step)

    def _group(self, known: Known, valid: Sequence[Trajectory], step: int) -> None:
        successes = [t for t in valid if t.score.value >= self.settings.success_threshold]
        known.attempts, known.successes, known.step = len(valid), len(successes), step
        known.streak = known.streak + 1 if len(successes) == len(valid) else 0
        known.retired = known.streak >= self.settings.retire_after
        if not self.settings.min_rate < len(successes) / len(valid) < self.settings.max_rate:
            return
        new = []
        for trajectory in successes:
            turn = next(trajectory.sampled_turns())
            entry = {"tokens": turn.tokens.tolist(), "version": turn.version, "step": step, "uses": 0}
            entry["entropy"] = -float(np.mean(turn.logprobs, dtype=np.float64))  # type: ignore[arg-type]
            if entry["tokens"] not in [t["tokens"] for t in known.live + new]:
                new.append(entry)
        sign = {"lowest_entropy": -1, "highest_entropy": 1, "newest": 0}[self.settings.select]
        everyone = list(enumerate(known.live + new))
        worst_first = sorted(everyone, key=lambda each: (sign * each[1]["entropy"], each[0]))
        lost = [entry for _, entry in worst_first[: max(0, len(everyone) - self.settings.capacity_per_task)]]
        self._drop(known, [t for t in known.live if any(t is other for other in lost)], "capacity")
        known.live += [t for t in new if not any(t is other for other in lost)]

    def evict(self, name: str, index: int) -> None:
        known = self.tasks[name]
        self._drop(known, known.live[index : index + 1], "asked")

    def _drop(self, known: Known, entries: list[dict[str, Any]], cause: str) -> None:
        known.live = [t for t in known.live if not any(t is other for other in entries)]
        if entries:
            self.evicted[cause] += len(entries)

    def buckets(self) -> dict[tuple[int, int], set[str]]:
        found: dict[tuple[int, int], set[str]] = {}
        for name, known in self.tasks.items():
            if known.live and not known.retired:
                found.setdefault((known.successes, known.attempts), set()).add(name)
        return found


NAMES = ["a", "b", "c", "d"]


def assert_agree(pool: ExperiencePool, model: Model) -> None:
    buckets, random = model.buckets(), np.random.default_rng(0)
    assert pool.buckets() == {bucket: len(names) for bucket, names in buckets.items()}
    for bucket, names in buckets.items():
        assert {drawn.task.id for drawn in pool.draw(bucket, 99, random)} == names
    retired = {name for name, known in model.tasks.items() if known.retired}
    assert pool.retired(NAMES) == retired == {drawn.task.id for drawn in pool.draw(None, 99, random)}
    assert pool.rates(NAMES) == {n: known.successes / known.attempts for n, known in model.tasks.items()}
    for name, stored in pool.stored(NAMES).items():
        live = model.tasks[name].live if name in model.tasks else []
        assert [
            (next(s.trajectory.sampled_turns()).tokens.tolist(), s.entropy, s.version, s.step, s.uses) for s in stored
        ] == [(t["tokens"], t["entropy"], t["version"], t["step"], t["uses"]) for t in live]
    assert pool.stats()["evicted"] == dict(model.evicted)


@st.composite
def groups(draw: st.DrawFn, version: int) -> Group:
    name = draw(st.sampled_from(NAMES))
    solved_by = draw(st.sampled_from([None, 1.0]))  # perfect groups come often enough to retire
    members = [
        episode(
            name,
            solved_by or draw(st.sampled_from([0.0, 1.0, 1.0, None])),
            (draw(st.integers(0, 4)),),
            [-draw(st.sampled_from([0.5, 1.0, 2.0]))],
            max(0, version - draw(st.integers(0, 2))),
        )
        for _ in range(draw(st.integers(0, 4)))
    ]
    return group(name, members, [episode(name, 1.0, (99,))])


chosen = st.builds(
    ReplaySettings,
    select=st.sampled_from(["lowest_entropy", "highest_entropy", "newest"]),
    capacity_per_task=st.integers(1, 3),
    retire_after=st.integers(1, 2),
    max_age=st.none() | st.integers(1, 3),
    min_rate=st.sampled_from([0.0, 0.3]),
    max_rate=st.sampled_from([0.7, 1.0]),
)


@given(chosen=chosen, data=st.data())
@settings(max_examples=examples(30))
def test_any_history_agrees_with_the_naive_model_and_any_mark_restores_every_table(
    chosen: ReplaySettings, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.sqlite"
        with ExperiencePool(path, chosen) as pool:
            model = Model(chosen)
            marks: dict[int, tuple[Model, Any]] = {}
            for step in range(data.draw(st.integers(3, 12))):
                what = data.draw(st.sampled_from(["observe", "observe", "mark", "rewind", "forget", "used", "evict"]))
                if what == "observe":
                    batch = data.draw(st.lists(groups(step), max_size=3))
                    pool.observe(batch, step)
                    model.observe(batch, step)
                elif what == "mark":
                    marks[pool.mark()] = (copy.deepcopy(model), contents(path))
                elif what in ("rewind", "forget") and marks:
                    number = data.draw(st.sampled_from(sorted(marks)))
                    if what == "rewind":
                        pool.rewind(number)
                        model = copy.deepcopy(marks[number][0])
                        assert contents(path) == marks[number][1]
                        marks = {n: kept for n, kept in marks.items() if n <= number}
                    else:
                        pool.forget(number)
                        marks = {n: kept for n, kept in marks.items() if n >= number}
                elif what in ("used", "evict") and (held := [n for n, known in model.tasks.items() if known.live]):
                    name = data.draw(st.sampled_from(held))
                    index = data.draw(st.integers(0, len(model.tasks[name].live) - 1))
                    key = pool.stored([name])[name][index].key
                    if what == "used":
                        pool.used([key])
                        model.tasks[name].live[index]["uses"] += 1
                    else:
                        pool.evict([key], "asked")
                        model.evict(name, index)
            assert_agree(pool, model)
            assert pool.verify() == []
            assert pool.stats()["marks"] == sorted(marks)


@pytest.mark.parametrize("back", [0, 1, 2, 3])
def test_a_mark_restores_every_table_although_later_marks_changed_the_same_rows(path: Path, back: int) -> None:
    with ExperiencePool(path, ReplaySettings(capacity_per_task=1, select="newest")) as pool:
        marks = []
        for step in range(4):
            pool.observe([solved("t", 1, 2 + step, first=10 * step), solved(f"new {step}", 1, 2)], step)
            marks.append((pool.mark(), contents(path)))
        pool.observe([solved("t", 1, 9, first=90)], 9)
        pool.evict([stored.key for stored in pool.stored(["new 0"])["new 0"]], "asked")
        number, then = marks[back]
        pool.rewind(number)
        assert contents(path) == then
        pool.observe([solved("t", 1, 9, first=90)], 9)
        pool.rewind(marks[0][0])
        assert contents(path) == marks[0][1]
        assert pool.verify() == []


# --- marks --------------------------------------------------------------------------------------
def test_rewinding_to_a_removed_mark_is_refused_and_changes_nothing(pool: ExperiencePool) -> None:
    first = pool.mark()
    pool.observe([solved("t", 1, 2)], 0)
    second = pool.mark()
    pool.rewind(first)
    third = pool.mark()
    assert third not in (first, second)  # numbers are not reused, so a mark that was undone is recognised
    before = contents(pool.path, marks=True)
    for gone in (second, 77):
        with pytest.raises(UserError, match=f"no mark {gone}"):
            pool.rewind(gone)
    assert contents(pool.path, marks=True) == before


def test_a_run_cannot_rewind_past_changes_of_another_run(path: Path) -> None:
    def opened(run: str | None) -> ExperiencePool:
        return ExperiencePool(path, run=run)

    with opened("a") as pool:
        first = pool.mark()
        pool.observe([solved("t", 1, 2)], 0)
        later = pool.mark()
        pool.rewind(first)  # its own later marks do not prevent it
        second = pool.mark()
    with opened("b") as pool:
        pool.observe([solved("u", 1, 2)], 0)
        theirs = pool.mark()
        pool.observe([solved("u", 2, 4, first=7)], 1)
    before = contents(path, marks=True)
    with opened("a") as pool:
        for mark in (first, second):
            with pytest.raises(UserError, match=r"another run \(b\) has used"):
                pool.rewind(mark)
    assert contents(path, marks=True) == before
    with opened("b") as pool:
        pool.rewind(theirs)
        assert pool.rates(["u"]) == {"u": 0.5}
        pool.forget(theirs)
    db = sqlite3.connect(path)
    assert db.execute("SELECT key FROM meta WHERE key LIKE 'mark/%'").fetchall() == [(f"mark/{theirs}",)]
    db.close()
    with opened(None) as pool:  # without a run, any mark may be rewound to
        pool.rewind(theirs)
    assert later not in (first, second, theirs)


def test_the_undo_log_holds_only_what_a_mark_may_still_undo(pool: ExperiencePool) -> None:
    def entries() -> int:
        found = contents(pool.path, marks=True)
        return sum(len(rows) for table, rows in found.items() if table.startswith("undo_"))

    pool.observe([solved("t", 1, 2)], 0)
    assert entries() == 0  # there is no mark to go back to
    pool.mark()
    pool.observe([solved("t", 1, 2)], 1)
    once = entries()
    for step in range(2, 20):
        pool.observe([solved("t", 1, 2)], step)
    assert 0 < once == entries()  # a row that changes often is logged once
    pool.forget(pool.mark())
    assert entries() == 0


# --- readers and damage -------------------------------------------------------------------------
def _read(path: Path, stop: Any, answer: Any) -> None:
    faults, looks = [], 0
    with ExperiencePool(path, read_only=True) as pool:
        while not stop.is_set() or not looks:
            faults += pool.verify()
            for bucket, size in pool.buckets().items():
                for drawn in pool.draw(bucket, size, np.random.default_rng(looks)):
                    pool.stored([drawn.task.id])
            looks += 1
    answer.put((looks, faults))


def test_readers_in_other_processes_always_see_a_consistent_pool(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    stop, answer = context.Event(), context.Queue()
    ExperiencePool(path).close()
    readers = [context.Process(target=_read, args=(path, stop, answer)) for _ in range(2)]
    for reader in readers:
        reader.start()
    random = np.random.default_rng(0)
    with ExperiencePool(path, ReplaySettings(capacity_per_task=2)) as pool:
        for step in range(60):
            names = random.choice(20, 4, replace=False)
            pool.observe([solved(str(n), int(random.integers(0, 5)), 4, first=4 * step) for n in names], step)
            if step % 20 == 10:
                pool.mark()
            if step % 20 == 19:
                pool.rewind(pool.stats()["marks"][-1])
        stop.set()
        found = [answer.get(timeout=60) for _ in readers]
        for reader in readers:
            reader.join(30)
    assert all(looks > 1 and faults == [] for looks, faults in found), found


def test_a_read_only_pool_refuses_changes_and_a_missing_file_raises_a_user_error(path: Path) -> None:
    with pytest.raises(UserError, match="no experience pool at"):
        ExperiencePool(path, read_only=True)
    assert not list(path.parent.iterdir())
    with ExperiencePool(path) as pool:
        pool.observe([solved("t", 1, 2)], 0)
        with ExperiencePool(path, read_only=True) as reader:
            assert reader.buckets() == {(1, 2): 1}
            for change in (reader.mark, lambda: reader.observe([], 1), lambda: reader.evict([1], "x")):
                with pytest.raises(UserError, match="read-only"):
                    change()


def test_a_second_writer_raises_a_one_line_user_error(path: Path) -> None:
    with ExperiencePool(path), pytest.raises(UserError, match="being written by another process") as refused:
        ExperiencePool(path)
    assert "\n" not in str(refused.value)
    ExperiencePool(path).close()


def _rewrite(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("statements", "line"),
    [
        (["PRAGMA user_version = 99"], "schema 99"),
        (["PRAGMA application_id = 5"], "is not an experience pool, although"),
        (["CREATE TRIGGER mine AFTER INSERT ON tasks BEGIN DELETE FROM tasks; END"], "other tables or triggers"),
        (["DROP TABLE buckets"], "other tables or triggers"),
    ],
)
def test_a_file_with_another_schema_is_refused_and_unchanged(
    path: Path, statements: list[str], line: str, read_only: bool
) -> None:
    ExperiencePool(path).close()
    _rewrite(path, *statements)
    before = path.read_bytes()
    with pytest.raises(UserError, match=line) as refused:
        ExperiencePool(path, read_only=read_only)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


def test_a_symbolic_link_to_a_pool_has_the_same_writer_lock(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere" / "link.sqlite"
    link.parent.mkdir()
    with ExperiencePool(path):
        link.symlink_to(path)
        with pytest.raises(UserError, match="written by another process"):
            ExperiencePool(link)
    with ExperiencePool(link), pytest.raises(UserError, match="written by another process"):
        ExperiencePool(path)


def test_a_file_that_is_no_pool_is_refused_and_unchanged(path: Path) -> None:
    path.write_bytes(b"not a pool at all, " * 900)
    with pytest.raises(UserError, match="not an SQLite file"):
        ExperiencePool(path)
    assert path.read_bytes() == b"not a pool at all, " * 900
    other = path.with_name("other.sqlite")
    _rewrite(other, "CREATE TABLE mine (x)")
    with pytest.raises(UserError, match="is not an experience pool, although"):
        ExperiencePool(other)
    with pytest.raises(UserError, match="cannot be opened"):
        ExperiencePool(path.parent)


@pytest.mark.parametrize("keep", [50, 3000, 0.3, 0.6, 0.99])
def test_a_truncated_file_raises_a_one_line_user_error(path: Path, keep: float) -> None:
    with ExperiencePool(path) as pool:
        pool.observe([solved(str(n), 3, 4) for n in range(300)], 0)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    with pytest.raises(UserError) as refused, ExperiencePool(path) as pool:
        pool.verify()
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_different_tokenizer_is_refused(path: Path) -> None:
    ExperiencePool(path).close()
    ExperiencePool(path, tokenizer="abc").close()  # the first tokenizer given is recorded
    with pytest.raises(UserError, match=r"another tokenizer \(abc, not xyz\)"):
        ExperiencePool(path, tokenizer="xyz")
    with pytest.raises(UserError, match="another tokenizer"):
        ExperiencePool(path, tokenizer="xyz", read_only=True)
    ExperiencePool(path, tokenizer="abc").close()
    ExperiencePool(path).close()


def test_a_pool_with_unknown_tokenizer_is_opened_only_with_trust_tokenizer(path: Path) -> None:
    with ExperiencePool(path) as pool:
        pool.observe([solved("t", 1, 2)], 0)
    for read_only in (False, True):
        with pytest.raises(UserError, match=r"does not say which tokenizer .* set replay.trust_tokenizer = true"):
            ExperiencePool(path, tokenizer="abc", read_only=read_only)
    ExperiencePool(path, ReplaySettings(trust_tokenizer=True), tokenizer="abc").close()
    ExperiencePool(path, tokenizer="abc").close()  # now the tokenizer is recorded
    with pytest.raises(UserError, match="another tokenizer"):
        ExperiencePool(path, ReplaySettings(trust_tokenizer=True), tokenizer="xyz")


def test_trajectories_with_token_ids_outside_the_vocabulary_are_evicted(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ExperiencePool(path) as pool:
        pool.observe([group("t", [episode("t", 1.0, (50,)), episode("t", 1.0, (99,)), episode("t", 0.0)])], 0)
    with ExperiencePool(path, vocabulary=60, read_only=True) as pool:
        assert tokens(pool) == [[50]]
    with ExperiencePool(path, vocabulary=60) as pool:
        assert tokens(pool) == [[50]]
        assert pool.observe([], 1)["pool/evicted/vocabulary"] == 1
        assert pool.stats()["evicted"] == {"vocabulary": 1}
        assert "left out (it holds token ids outside the vocabulary)" in caplog.text
        assert pool.verify() == []


def _blob_of(name: str, logprob: float = -0.5) -> bytes:
    return codec.encode_trajectory(episode(name, 1.0, (0, 5), [logprob] * 2))


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE blobs SET data = substr(data, 1, 40) WHERE id = 1",
        "UPDATE blobs SET data = zeroblob(90) WHERE id = 1",
        "UPDATE blobs SET data = 'text' WHERE id = 1",
        "UPDATE blobs SET data = x'00' || substr(data, 2) WHERE id = 1",
        "UPDATE blobs SET data = (SELECT data FROM blobs WHERE id = 2) WHERE id = 1",  # the record of another one
        f"UPDATE blobs SET data = x'{_blob_of('other').hex()}' WHERE id = 1",
        "DELETE FROM blobs WHERE id = 1",
        "UPDATE trajectories SET entropy = 'high' WHERE id = 1",
        "UPDATE trajectories SET temperature = -1 WHERE id = 1",
        "UPDATE trajectories SET temperature = 'warm' WHERE id = 1",
        "UPDATE trajectories SET temperature = 9e999 WHERE id = 1",
        "UPDATE trajectories SET uses = 0.5 WHERE id = 1",
    ],
)
def test_a_damaged_record_is_evicted_and_never_returned(
    path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ExperiencePool(path) as pool:
        pool.observe([solved("t", 2, 3), solved("u", 1, 2)], 0)
    _rewrite(path, change)
    with ExperiencePool(path) as pool:
        assert pool.verify() != []
        with caplog.at_level(logging.WARNING):
            assert tokens(pool) == [[1, 5]]
        assert "trajectory 1 of task 't' is left out" in caplog.text
        assert pool.stats()["evicted"] == {"damaged": 1}
        assert tokens(pool, "u") == [[0, 5]]
        assert pool.verify() == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("UPDATE blobs SET data = 'text' WHERE id = 1", "trajectory 1 of task 't': it is cut off"),
        ("UPDATE blobs SET data = 'text' WHERE id = 1", "trajectories without a record of their length: 1"),
        (f"UPDATE blobs SET data = x'{_blob_of('other').hex()}' WHERE id = 1", "not the one that was stored here"),
        ("UPDATE bodies SET data = x'00' WHERE id = 0", "task 't': it is cut off"),
        (
            "UPDATE trajectories SET temperature = 'warm'",
            "trajectory 1 of task 't': its entropy, version, temperature, step, uses or source is no valid value",
        ),
        (f"UPDATE blobs SET data = x'{_blob_of('t', 5.0).hex()}' WHERE id = 1", "a log-prob of it is above 0"),
        ("UPDATE trajectories SET length = 9 WHERE id = 1", "trajectory 1 of task 't': the score or the length"),
        ("UPDATE tasks SET live = 7 WHERE name = 't'", "counts 7 trajectories"),
        ("UPDATE tasks SET successes = 1 WHERE name = 't'", "another bucket than its own"),
        ("UPDATE tasks SET position = 9 WHERE name = 't'", "the positions of bucket 2/3 have gaps"),
        ("UPDATE buckets SET size = 3", "has not 3 tasks"),
        ("DELETE FROM buckets", "bucket 2/3 is not counted"),
        ("DELETE FROM trajectories WHERE id = 1", "records of no trajectory: 1"),
        ("DELETE FROM tasks WHERE name = 't'", "trajectories without a task: 2"),
        ("UPDATE counters SET value = 5 WHERE name = 'bytes'", "bytes: 5 counted"),
    ],
)
def test_verify_describes_each_inconsistency(path: Path, change: str, line: str) -> None:
    with ExperiencePool(path) as pool:
        pool.observe([solved("t", 2, 3), solved("u", 1, 2)], 0)
        assert pool.verify() == []
    _rewrite(path, change)
    with ExperiencePool(path) as pool:
        assert line in "\n".join(pool.verify())


def test_a_task_that_cannot_be_decoded_is_not_drawn_until_it_is_observed_again(path: Path) -> None:
    with ExperiencePool(path) as pool:
        pool.observe([solved("t", 1, 2), solved("u", 1, 2)], 0)
        pool.observe([solved("gone", 2, 2)], 0)
        pool.observe([solved("gone", 2, 2)], 0)
    _rewrite(path, "UPDATE bodies SET data = x'00' WHERE id IN (SELECT id FROM tasks WHERE name != 'u')")
    random = np.random.default_rng(0)
    with ExperiencePool(path) as pool:
        assert [drawn.task.id for drawn in pool.draw((1, 2), 9, random)] == ["u"]
        assert pool.draw(None, 9, random) == []
        assert (pool.buckets(), pool.retired(["gone"])) == ({(1, 2): 1}, set())
        pool.observe([solved("t", 1, 2)], 1)
        assert sorted(drawn.task.id for drawn in pool.draw((1, 2), 9, random)) == ["t", "u"]
        assert pool.verify() == []


def test_a_damaged_task_loses_its_trajectories_when_a_task_with_its_id_is_observed(path: Path) -> None:
    with ExperiencePool(path) as pool:
        pool.observe([solved("t", 1, 2)], 0)
    _rewrite(path, "UPDATE bodies SET data = x'00'")
    with ExperiencePool(path) as pool:
        pool.observe([reworded("t", [episode("t", 1.0, (70,)), episode("t", 0.0)])], 1)
        assert tokens(pool) == [[70]]
        [drawn] = pool.draw((1, 2), 1, np.random.default_rng(0))
        assert drawn.task.prompt[0]["content"] == "say it in French"
        assert pool.verify() == []


def test_a_full_disk_raises_a_user_error_and_undoes_the_whole_call(path: Path) -> None:
    with ExperiencePool(path) as pool:
        pool.observe([solved("t", 1, 2)], 0)
        before = contents(path)
        pages = pool._db.execute("PRAGMA page_count").fetchone()[0]
        pool._db.execute(f"PRAGMA max_page_count = {pages + 3}")
        with pytest.raises(UserError, match="the disk is full"):
            pool.observe([solved(str(n), 3, 4) for n in range(400)], 1)
        assert contents(path) == before
        pool._db.execute("PRAGMA max_page_count = 100000")
        pool.observe([solved("u", 1, 2)], 1)
        assert pool.buckets() == {(1, 2): 2}


def test_an_error_in_the_middle_of_a_call_undoes_the_whole_call(pool: ExperiencePool) -> None:
    pool.observe([solved("t", 1, 2)], 0)
    before = contents(pool.path)
    with pytest.raises(TypeError, match="object"):
        pool.observe(
            [solved("u", 1, 2), group("t", [episode("t", 1.0, (9,), info={"x": object()}), episode("t", 0.0)])], 1
        )
    assert contents(pool.path) == before


def test_what_is_no_success_by_a_higher_threshold_is_no_longer_replayed(path: Path) -> None:
    partly = [episode("t", 0.6, (4, 5)), episode("t", 0.0, (6, 5))]
    with ExperiencePool(path, ReplaySettings(success_threshold=0.5)) as pool:
        pool.observe([group("t", partly)], 0)
        assert len(pool.stored(["t"])["t"]) == 1
    with ExperiencePool(path, ReplaySettings(success_threshold=0.9)) as pool:
        assert pool.stored(["t"])["t"] == []
        assert pool.buckets() == {}
