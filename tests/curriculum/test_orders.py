"""Tests of `gleanrl.curriculum.orders`: shares of sources, epochs and levels are exact, and a resumed curriculum
continues with the next task."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import TaskSettings
from gleanrl.curriculum.orders import BySolveRate, Levels, TaskStream, make_curriculum, source_of
from gleanrl.protocols import Curriculum
from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory
from gleanrl.utils.errors import UserError
from tests.strategies import examples

COUNTS = {"words": 7, "sums": 3, "games": 12}
WEIGHTS = {"words": 2.0, "sums": 1.0, "games": 0.5}


def tasks(counts: dict[str, int] = COUNTS) -> list[Task]:
    return [Task(f"{name}-{index}", kind=f"{name}/easy") for name, count in counts.items() for index in range(count)]


def order(name: str, seed: int = 3, **options: Any) -> Curriculum:
    given = TaskSettings(order=name, options=options)
    return make_curriculum(given, tasks(), WEIGHTS, group=4, seed=seed, greedy=False)


def proposed(curriculum: Curriculum, count: int) -> list[Task]:
    return [spec.task for spec in asyncio.run(curriculum.propose(count))]


def group(task: Task, *values: float | None) -> Group:
    scores = [Score.failed("broken") if value is None else Score(value) for value in values]
    members = [Trajectory(f"{i}", task.id, (), score, StopReason.DONE) for i, score in enumerate(scores)]
    return Group(GroupSpec(task, len(values)), tuple(members), 0)


@given(
    counts=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 9), min_size=1),
    data=st.data(),
    total=st.integers(1, 120),
)
def test_at_any_point_each_source_has_given_its_share_of_the_tasks(
    counts: dict[str, int], data: st.DataObject, total: int
) -> None:
    weights = {name: data.draw(st.floats(0.1, 10)) for name in counts}
    stream = TaskStream(tasks(counts), weights=weights, group=4, seed=data.draw(st.integers(0, 5)))
    taken: list[Task] = []
    while len(taken) < total:
        taken += proposed(stream, data.draw(st.integers(1, 9)))
    own = Counter(map(source_of, taken))
    for name, weight in weights.items():
        share = len(taken) * weight / sum(weights.values())
        assert abs(own[name] - share) < len(counts), (own, weights)


@given(seed=st.integers(0, 50))
def test_each_source_gives_all_its_tasks_once_before_it_repeats_one(seed: int) -> None:
    taken = proposed(order("shuffled", seed), 70)
    for name, count in COUNTS.items():
        own = [task.id for task in taken if source_of(task) == name]
        for epoch in range(len(own) // count):
            assert len(set(own[epoch * count : (epoch + 1) * count])) == count


ORDERS: dict[str, Callable[[], Curriculum]] = {
    "shuffled": lambda: order("shuffled"),
    "levels": lambda: order("levels", advance=0.5, window=5, review=0.3),
    "solve_rate": lambda: order("solve_rate", sigma=0.1, explore=0.2),
}


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=examples(25))
@given(batches=st.lists(st.integers(1, 6), min_size=2, max_size=12), data=st.data())
def test_a_resumed_curriculum_continues_with_the_next_task(
    name: str, batches: Sequence[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(batches) - 1))
    outcomes = data.draw(st.lists(st.integers(0, 4), min_size=40, max_size=40))

    def run(curriculum: Curriculum, sizes: Sequence[int], seen: int) -> tuple[list[str], int]:
        ids = []
        for size in sizes:
            own = proposed(curriculum, size)
            curriculum.observe(
                [group(t, *([1.0] * (k := outcomes[(seen + i) % 40]) + [0.0] * (4 - k))) for i, t in enumerate(own)], {}
            )
            ids += [task.id for task in own]
            seen += size
        return ids, seen

    whole, _ = run(ORDERS[name](), batches, 0)
    first = ORDERS[name]()
    begun, seen = run(first, batches[:cut], 0)
    resumed = ORDERS[name]()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + run(resumed, batches[cut:], seen)[0] == whole


def test_a_graded_reward_starts_the_next_level_at_the_success_threshold() -> None:
    given = TaskSettings(order="levels", options={"advance": 1.0, "window": 2})
    for threshold, level in ((0.3, 1), (0.5, 0)):
        levels = make_curriculum(given, tasks(), WEIGHTS, group=2, seed=0, greedy=False, success_threshold=threshold)
        metrics = levels.observe([group(task, 0.3, 0.4) for task in proposed(levels, 2)], {})
        assert metrics["tasks/level"] == level


def test_a_level_starts_when_the_previous_one_is_learned_and_is_reviewed_later() -> None:
    levels = order("levels", advance=0.75, window=4, review=0.25)
    assert isinstance(levels, Levels)
    first = proposed(levels, 4)
    for task in first[:3]:
        assert source_of(task) == "words"
        levels.observe([group(task, 1, 1, 1, 1)] * 3, {})
    assert levels.observe([], {})["tasks/level"] == 0, "three of four tasks prove nothing yet"
    metrics = levels.observe([group(first[3], 0, 0, None, None)], {})
    assert (metrics["tasks/level"], metrics["tasks/level_success"]) == (1, 0.0), "3 of 4 solved is 0.75"
    own = Counter(map(source_of, proposed(levels, 40)))
    assert own == {"sums": 30, "words": 10}
    levels.observe([group(first[0], 1, 1, 1, 1)] * 9, {})
    assert levels.observe([], {})["tasks/level"] == 1, "a reviewed group says nothing of the level"
    sums = [Task(f"sums-{index}", kind="sums") for index in range(3)]
    levels.observe([group(sums[0], 0, 0)] * 9 + [group(sums[1], None, None)] * 9, {})
    assert levels.observe([], {})["tasks/level"] == 1
    levels.observe([group(task, 1, 1) for task in sums[1:]] * 4, {})
    metrics = levels.observe([], {})
    assert metrics["tasks/level"] == 1, "each task counts once, with its latest rate"
    assert metrics["tasks/level_success"] == pytest.approx(2 / 3)
    levels.observe([group(sums[0], 1, 1)], {})
    assert levels.observe([], {})["tasks/level"] == 2, "the level has three tasks, fewer than the window"
    reviews = Counter(source for task in proposed(levels, 80) if (source := source_of(task)) != "games")
    assert reviews == {"words": 10, "sums": 10}, "earlier levels are reviewed in equal parts"
    levels.observe([group(Task(f"games-{index}", kind="games"), 1, 1) for index in range(9)], {})
    assert levels.observe([], {})["tasks/level"] == 2, "there is no further one"


def test_half_solved_tasks_come_most_often_and_none_twice_in_a_batch() -> None:
    easy, half, hard = (Task(name, kind="x") for name in ("easy", "half", "hard"))
    rest = [Task(f"rest-{index}", kind="x") for index in range(9)]
    stream = BySolveRate([easy, half, hard, *rest], group=2, seed=0, sigma=0.2, explore=0.0)
    stream.observe([group(easy, 1, 1), group(half, 1, 0), group(hard, 0, 0), *(group(t, 1, 1) for t in rest)], {})
    counts: Counter[str] = Counter()
    for _ in range(200):
        batch = [task.id for task in proposed(stream, 3)]
        assert len(set(batch)) == 3
        counts.update(batch)
    assert counts["half"] > 180
    chance = math.exp(-(0.5**2) / (2 * 0.2**2))  # the weight of each other task against 1
    assert chance < 0.05
    assert 0 < counts["easy"] < 100
    assert 0 < counts["hard"] < 100


def test_exploration_ignores_the_solve_rate() -> None:
    pool = [Task(f"t{index}", kind="x") for index in range(10)]
    stream = BySolveRate(pool, group=2, seed=0, sigma=0.01, explore=1.0)
    stream.observe([group(task, 1, 1) for task in pool[1:]], {})
    counts = Counter(task.id for _ in range(500) for task in proposed(stream, 1))
    assert max(counts.values()) < 2.5 * min(counts.values())


def test_a_batch_larger_than_the_number_of_tasks_repeats_all_tasks() -> None:
    pool = [Task(f"t{index}") for index in range(3)]
    taken = Counter(task.id for task in proposed(BySolveRate(pool, group=2, seed=0), 7))
    assert sorted(taken.values()) == [2, 2, 3]


class Later(TaskStream):
    """An order of a user: it leaves out the first tasks."""

    def __init__(self, tasks: Sequence[Task], *, group: int, seed: int, **options: Any) -> None:
        super().__init__(tasks[options["first"] :], group, seed)


def test_an_order_of_the_user_takes_any_option_that_its_constructor_takes() -> None:
    given = TaskSettings(order=f"{__name__}:Later", options={"first": 3})
    later = make_curriculum(given, tasks(), {}, group=4, seed=0, greedy=False)
    assert {task.id for task in proposed(later, 19)} == {task.id for task in tasks()[3:]}


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("level", {}, "did you mean 'levels'"),
        ("own", {}, "package.module:Class"),
        ("levels", {"windw": 3}, "tasks.options.windw.*did you mean 'window'"),
        ("levels", {"review": 1.0}, "review in"),
        ("levels", {"levels": ["words", "sums"]}, "name each source once: words, sums, games"),
        ("solve_rate", {"sigma": 0}, "sigma is above 0"),
        ("shuffled", {"window": 3}, "it takes none"),
    ],
)
def test_invalid_options_raise_a_user_error(name: str, options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        order(name, **options)


def test_levels_need_several_sources_and_checkpoints_fit_only_their_own_order() -> None:
    alone = TaskSettings(order="levels")
    with pytest.raises(UserError, match="only 'x'"):
        make_curriculum(alone, [Task("a", kind="x")], {}, group=2, seed=0, greedy=False)
    with pytest.raises(UserError, match=r"tasks\.order"):
        order("solve_rate").load_state_dict(order("levels").state_dict())
    with pytest.raises(UserError, match=r"tasks\.order"):
        TaskStream(tasks(), 2, 0).load_state_dict(order("levels").state_dict())
