"""Tests of `benchmarks/hindsight.py`, which makes successes of other goals from failures of ALFWorld."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.environments.alfworld.games import game_of, household_task
from gleanrl.environments.alfworld.households import Household
from gleanrl.types import Task
from gleanrl.utils.importing import load_object

pytest.importorskip("alfworld")
HINDSIGHT = Path(__file__).parents[2] / "benchmarks" / "hindsight.py"
ROOM = (("CounterTop", ("Apple", "Mug")), ("Fridge", ()), ("Microwave", ()), ("SinkBasin", ("Plate",)))


@pytest.fixture
def achieved(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HINDSIGHT.parent))
    return load_object(f"{HINDSIGHT}:achieved")


def task() -> Task:
    return household_task(Household("kitchen", "heat", "Plate", "Fridge", ROOM, 0))


def goals(found: list[tuple[int, Task]]) -> set[tuple[int, str]]:
    return {(turns, other.payload["task"]) for turns, other in found}


def test_a_failure_has_achieved_what_became_true_and_nothing_else(achieved: Any) -> None:
    commands = [
        *("go to countertop 1", "take apple 1 from countertop 1", "dance", "go to microwave 1"),
        *("heat apple 1 with microwave 1", "go to fridge 1", "open fridge 1", "move apple 1 to fridge 1", "look"),
    ]
    found = achieved(task(), commands)
    assert goals(found) == {(8, "put a apple in fridge"), (8, "put a hot apple in fridge")}
    for turns, other in found:
        game = game_of(other)
        state = game.start
        won = []
        for command in commands:
            state = game.step(state, command).state
            won.append(game.won(state))
        assert won.index(True) == turns - 1


@pytest.mark.parametrize(
    "commands",
    [
        ["go to countertop 1", "move mug 1 to countertop 1"],  # it was not held
        # the mug was on the countertop from the beginning
        ["go to countertop 1", "take mug 1 from countertop 1", "move mug 1 to countertop 1"],
        ["go to sinkbasin 1", "take plate 1 from sinkbasin 1", "move plate 1 to nowhere 1"],
        [],
    ],
)
def test_what_was_true_before_or_never_became_true_is_not_achieved(achieved: Any, commands: list[str]) -> None:
    assert achieved(task(), commands) == []


def test_the_tasks_own_goal_is_left_out(achieved: Any) -> None:
    commands = [
        *("go to sinkbasin 1", "take plate 1 from sinkbasin 1", "go to microwave 1", "heat plate 1 with microwave 1"),
        *("go to fridge 1", "open fridge 1", "move plate 1 to fridge 1"),
    ]
    assert goals(achieved(task(), commands)) == {(7, "put a plate in fridge")}


def test_wrong_goals_are_of_the_same_kinds_and_never_reached(monkeypatch: pytest.MonkeyPatch, achieved: Any) -> None:
    module = import_module("hindsight")
    control = object.__new__(module.WrongGoals)
    control._random = np.random.default_rng(0)
    commands = [
        *("go to countertop 1", "take apple 1 from countertop 1", "go to microwave 1", "heat apple 1 with microwave 1"),
        *("go to fridge 1", "open fridge 1", "move apple 1 to fridge 1"),
    ]
    right, wrong = achieved(task(), commands), control.goals(task(), commands)
    expected = [(other.id, turns, other.kind) for turns, other in right]
    assert [(name, turns, other.kind) for name, turns, other in wrong] == expected
    for _, _, other in wrong:
        game = game_of(other)
        state = game.start
        assert not game.won(state)
        for command in commands:
            state = game.step(state, command).state
            assert not game.won(state)
