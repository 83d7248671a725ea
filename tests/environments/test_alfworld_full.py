"""`AlfworldTaskset` with full-size rooms, with ALFWorld's names of goals, and with seen and unseen room layouts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("alfworld")
pytest.importorskip("fast_downward")

from alfworld.agents.environment.alfred_tw_env import TASK_TYPES

from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.environments.alfworld.games import game_of
from gleanrl.environments.alfworld.households import (
    GOALS,
    SEEN_LAYOUTS,
    Household,
    Layout,
    draw,
    layout_seen,
    split_of,
    thor,
)
from gleanrl.environments.alfworld.rooms import FULL_ROOMS
from gleanrl.protocols import Split
from gleanrl.types import Task


def furniture(task: Task) -> Counter[str]:
    return Counter(kind for _, _, kind in game_of(task)._world.static("receptacletype"))


def layout_key(task: Task) -> str:
    """Return the layout key of a task's household, computed from the game alone: its room and kinds of furniture."""
    kinds = sorted(kind for kind, count in furniture(task).items() for _ in range(count))
    spelled = {kind.lower(): kind for kind in thor().VAL_RECEPTACLE_OBJECTS}
    pieces = tuple((spelled[kind.removesuffix("type")], ()) for kind in kinds)
    return Household(task.payload["room"], "put", "", "", pieces, 0).layout_key


# --- full size --------------------------------------------------------------------------------
@pytest.mark.parametrize("goal", sorted(GOALS))
def test_the_expert_wins_full_size_games_of_every_kind(goal: str) -> None:
    taskset = AlfworldTaskset(goals=[goal], size="full", seed=20)
    for task in taskset.tasks("eval", 3):
        messages, score = taskset.demonstrate(task, seed=1, noise=0.2)
        assert score.value == 1.0
        assert len(messages) >= 6


def test_full_size_rooms_have_as_many_receptacles_and_objects_as_the_original_games() -> None:
    for room, real in FULL_ROOMS.items():
        goal = next(name for name, goal in GOALS.items() if room in goal.rooms)
        layout = Layout(goals=(goal,), rooms=(room,), same_kind=3, full=True)
        drawn = [household for seed in range(40) if (household := draw(layout, seed)) is not None]
        assert len(drawn) > 30
        low, high = real.receptacles
        for household in drawn:
            assert low <= len(household.furniture) <= high
            objects = Counter(kind for _, inside in household.furniture for kind in inside)
            assert max(objects.values()) <= 3
            if room == "kitchen":
                assert {kind for kind, _ in household.furniture} >= {"Fridge", "Microwave", "SinkBasin", "Toaster"}
                assert 30 <= sum(objects.values()) <= 70
        assert len({household.layout_key for household in drawn}) > 30, "hardly a layout twice"


def test_full_size_rooms_use_only_kinds_that_alfworld_defines_and_can_place() -> None:
    places = thor().VAL_RECEPTACLE_OBJECTS
    for room in FULL_ROOMS.values():
        assert set(room.furniture) <= set(places)
        for kind, scenes in room.objects.items():
            assert 1 <= scenes <= 30
            assert any(kind in places[receptacle] for receptacle in room.furniture), kind


def test_full_size_tasks_use_every_room_of_a_goal_unless_rooms_is_set() -> None:
    tasks = AlfworldTaskset(goals=["put"], size="full", seed=21).tasks("train", 14)
    assert {task.payload["room"] for task in tasks} == {"kitchen", "bathroom", "bedroom", "living_room"}
    bathrooms = AlfworldTaskset(goals=["put"], size="full", rooms=["bathroom"], seed=21).tasks("train", 3)
    assert {task.payload["room"] for task in bathrooms} == {"bathroom"}


# --- names ------------------------------------------------------------------------------------
def test_goals_can_be_given_by_alfworlds_own_names() -> None:
    assert sorted(TASK_TYPES.values()) == sorted(goal.library for goal in GOALS.values())
    official = AlfworldTaskset(goals=["pick_heat_then_place", *TASK_TYPES.values()], seed=22)
    ours = AlfworldTaskset(goals=["heat", "put", "examine", "clean", "cool", "put_two"], seed=22)
    assert list(official.tasks("train", 12)) == list(ours.tasks("train", 12))
    assert {task.kind for task in ours.tasks("train", 40)} == set(GOALS)
    assert all(task.kind == task.payload["goal"] for task in ours.tasks("eval", 6))


# --- layouts ----------------------------------------------------------------------------------
def test_seen_evaluation_shares_layouts_with_training_and_unseen_evaluation_does_not() -> None:
    small: dict[str, Any] = {"receptacles": (5, 6), "objects": (3, 5)}
    sets = {part: AlfworldTaskset(eval_split=part, seed=23, **small) for part in ("seen", "unseen", "both")}
    keys = {part: [layout_key(task) for task in sets[part].tasks("eval", 12)] for part in ("seen", "unseen")}
    trained = {layout_key(task) for split in ("train", "warm_start") for task in sets["seen"].tasks(split, 60)}
    assert all(layout_seen(key) for key in trained | set(keys["seen"]))
    assert not any(layout_seen(key) for key in keys["unseen"])
    assert sum(key in trained for key in keys["seen"]) > 6
    assert {t.id for t in sets["unseen"].tasks("train", 30)} == {t.id for t in sets["seen"].tasks("train", 30)}
    both = sets["both"].tasks("eval", 12)
    assert [task.kind.rpartition("_")[2] for task in both] == ["seen", "unseen"] * 6
    assert [task.id for task in both[::2]] == [task.id for task in sets["seen"].tasks("eval", 6)]
    assert [task.id for task in both[1::2]] == [task.id for task in sets["unseen"].tasks("eval", 6)]


def test_the_split_of_a_household_does_not_depend_on_eval_split() -> None:
    """So a household that one run evaluates on is never trained on by a run with another ``eval_split``."""
    for part in ("households", "seen", "unseen", "both"):
        taskset = AlfworldTaskset(eval_split=part, receptacles=(5, 8), seed=24)
        splits: tuple[Split, ...] = ("train", "eval", "warm_start")
        for split in splits:
            for task in taskset.tasks(split, 3):
                assert household_split(task) == split


def household_split(task: Task) -> Split:
    """Return the split of a task's household, computed from the game alone."""
    world, payload = game_of(task)._world, task.payload
    spelled = {kind.lower(): kind for kind in (*thor().VAL_RECEPTACLE_OBJECTS, *thor().OBJECTS_SET, "DeskLamp")}

    def kinds(predicate: str) -> dict[str, str]:
        return {thing: spelled[kind.removesuffix("type")] for _, thing, kind in world.static(predicate)}

    objects, receptacles = kinds("objecttype"), kinds("receptacletype")
    inside: dict[str, list[str]] = {receptacle: [] for receptacle in receptacles}
    for atom, bit in world.bits.items():
        if atom[0] == "inreceptacle" and bit & world.initial:
            inside[atom[2]].append(objects[atom[1]])
    pieces = tuple((kind, tuple(inside[place])) for place, kind in receptacles.items())
    goal, target, destination = payload["goal"], payload["target"], payload["destination"]
    return split_of(Household("", goal, spelled[target], spelled.get(destination, ""), pieces, 0).key)


def test_the_share_of_seen_layouts_is_seen_layouts() -> None:
    drawn = (draw(Layout(goals=("put",), full=True), seed) for seed in range(600))
    seen = [layout_seen(household.layout_key) for household in drawn if household is not None]
    assert abs(sum(seen) / len(seen) - SEEN_LAYOUTS) < 0.06
