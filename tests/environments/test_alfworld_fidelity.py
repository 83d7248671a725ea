"""Glean RL's ALFWorld engine gives the same feedback, wins and admissible commands as the original engine.

Episodes are played on the original engine (`tests.environments.alfworld_stock`) and replayed on Glean RL's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("alfworld")
pytest.importorskip("fast_downward")

from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.environments.alfworld.engine import Game, package_texts
from gleanrl.environments.alfworld.games import game_of
from tests.environments import alfworld_stock as stock
from tests.strategies import NIGHTLY

PLACES = [
    ("put", "kitchen"),
    ("heat", "kitchen"),
    ("cool", "kitchen"),
    ("clean", "bathroom"),
    ("put_two", "kitchen"),
    ("examine", "bedroom"),
    ("examine", "living_room"),
]

# A household with features that published games have and generated households lack: receptacles at the same place, an
# object inside another, an object on the floor, an open cabinet, several lamps, and a goal of several parts.
ODD = """(define (problem odd) (:domain alfred) (:objects agent1 - agent
 loc_0 loc_1 loc_2 loc_3 - location
 Drawer_bar_1 Drawer_bar_2 Cabinet_bar_1 CounterTop_bar_1 Sink_bar_1_bar_SinkBasin - receptacle
 Knife_bar_1 Apple_bar_1 Apple_bar_2 Bowl_bar_1 Egg_bar_1 DeskLamp_bar_1 DeskLamp_bar_2 - object
 DrawerType CabinetType CounterTopType SinkBasinType - rtype KnifeType AppleType BowlType EggType DeskLampType - otype)
 (:init (= (total-cost) 0) (atLocation agent1 loc_3)
 (receptacleAtLocation Drawer_bar_1 loc_0) (receptacleAtLocation Drawer_bar_2 loc_0)
 (receptacleAtLocation Cabinet_bar_1 loc_1) (receptacleAtLocation CounterTop_bar_1 loc_1)
 (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_2)
 (receptacleType Drawer_bar_1 DrawerType) (receptacleType Drawer_bar_2 DrawerType)
 (receptacleType Cabinet_bar_1 CabinetType) (receptacleType CounterTop_bar_1 CounterTopType)
 (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
 (openable Drawer_bar_1) (openable Drawer_bar_2) (openable Cabinet_bar_1) (opened Cabinet_bar_1)
 (inReceptacle Knife_bar_1 Drawer_bar_1) (objectAtLocation Knife_bar_1 loc_0)
 (inReceptacle Apple_bar_1 CounterTop_bar_1) (objectAtLocation Apple_bar_1 loc_1)
 (inReceptacle Apple_bar_2 Cabinet_bar_1) (objectAtLocation Apple_bar_2 loc_1)
 (inReceptacle Bowl_bar_1 Cabinet_bar_1) (objectAtLocation Bowl_bar_1 loc_1)
 (isReceptacleObject Bowl_bar_1) (inReceptacleObject Egg_bar_1 Bowl_bar_1) (objectAtLocation Egg_bar_1 loc_1)
 (inReceptacle DeskLamp_bar_1 CounterTop_bar_1) (objectAtLocation DeskLamp_bar_1 loc_1) (toggleable DeskLamp_bar_1)
 (inReceptacle DeskLamp_bar_2 CounterTop_bar_1) (objectAtLocation DeskLamp_bar_2 loc_1) (toggleable DeskLamp_bar_2)
 (isOn DeskLamp_bar_2)
 (objectType Knife_bar_1 KnifeType) (objectType Apple_bar_1 AppleType) (objectType Apple_bar_2 AppleType)
 (objectType Bowl_bar_1 BowlType) (objectType Egg_bar_1 EggType)
 (objectType DeskLamp_bar_1 DeskLampType) (objectType DeskLamp_bar_2 DeskLampType)
 (pickupable Knife_bar_1) (pickupable Apple_bar_1) (pickupable Apple_bar_2) (pickupable Bowl_bar_1)
 (sliceable Apple_bar_1) (sliceable Apple_bar_2) (cleanable Apple_bar_1) (cleanable Apple_bar_2) (cleanable Knife_bar_1)
 (canContain DrawerType KnifeType) (canContain CabinetType BowlType) (canContain CabinetType AppleType)
 (canContain CounterTopType AppleType) (canContain CounterTopType KnifeType) (canContain CounterTopType BowlType)
 (canContain SinkBasinType AppleType) (canContain SinkBasinType BowlType))
 (:goal (and (not (opened Cabinet_bar_1)) (or (isClean Knife_bar_1)
  (exists (?o - object) (and (objectType ?o AppleType) (isSliced ?o)))))))"""


SCRIPT = (
    *("go to drawer 1", "go to drawer 2", "look", "open drawer 2", "take knife 1 from drawer 2", "examine knife 1"),
    *("go to countertop 1", "examine bowl 1", "look", "slice apple 2 with knife 1", "use desklamp 1", "use desklamp 1"),
    *("use desklamp 2", "slice apple 1 with knife 1", "move knife 1 to countertop 1", "take apple 2 from countertop 1"),
    *("examine apple 2", "look", "move apple 2 to cabinet 1", "look", "take bowl 1 from cabinet 1", "examine bowl 1"),
    *("inventory", "close cabinet 1", "move bowl 1 to countertop 1", "look"),
)


def compare(
    game: Game, file: Path, seed: int, steps: int = 45, script: tuple[str, ...] = (), count: int = 2
) -> list[stock.Move]:
    """Play ``count`` episodes on the original engine, and check that replaying them interleaved on ours is equal."""
    env = stock.start(file)
    episodes = [stock.play(env, seed + i, steps, script).moves for i in range(count)]
    order = [i for i in range(len(episodes)) for _ in range(steps + 1)]
    random.Random(seed).shuffle(order)
    assert stock.differences(game, episodes, order) == []
    return [move for episode in episodes for move in episode]


@pytest.mark.parametrize(("goal", "room"), PLACES)
def test_episodes_on_generated_households_equal_the_original_engine(goal: str, room: str, tmp_path: Path) -> None:
    taskset = AlfworldTaskset(goals=[goal], rooms=[room], receptacles=(6, 8), objects=(6, 8), same_kind=3, seed=71)
    (task,) = taskset.tasks("train", 1)
    file = stock.game_file(task, tmp_path / "game.tw-pddl")
    compare(game_of(task), file, seed=71, count=2 if NIGHTLY else 1)


@pytest.mark.heavy
def test_episodes_on_larger_households_equal_the_original_engine(tmp_path: Path) -> None:
    goals = [goal for goal, _ in PLACES[:5]]
    taskset = AlfworldTaskset(goals=goals, receptacles=(8, 12), objects=(8, 12), same_kind=4, seed=72)
    for seed, task in enumerate(taskset.tasks("eval", 5)):
        compare(game_of(task), stock.game_file(task, tmp_path / "game.tw-pddl"), seed)


@pytest.mark.slow
def test_episodes_in_full_size_rooms_equal_the_original_engine(tmp_path: Path) -> None:
    for seed, (goal, room) in enumerate((("clean", "bathroom"), ("heat", "kitchen"))[: 2 if NIGHTLY else 1]):
        (task,) = AlfworldTaskset(goals=[goal], rooms=[room], size="full", seed=73).tasks("train", 1)
        compare(game_of(task), stock.game_file(task, tmp_path / "game.tw-pddl"), seed, steps=10)


def test_episodes_on_a_household_with_rare_features_equal_the_original_engine(tmp_path: Path) -> None:
    domain, grammar = package_texts()
    grammar = grammar.replace("UNKNOWN GOAL", "clean some apple and put it in sinkbasin")
    game = {"pddl_domain": domain, "grammar": grammar, "pddl_problem": ODD, "solvable": True}
    file = tmp_path / "game.tw-pddl"
    file.write_text(json.dumps(game))
    moves = compare(Game(ODD, domain_text=domain, grammar_text=grammar), file, seed=1, steps=45, script=SCRIPT)
    said = " ".join(move.feedback for move in moves)
    for rare in (
        "You sliced the",
        "normal bowl 1. In it, you see a egg 1",
        "sliced apple",
        "facing the cabinet 1, and countertop 1",
    ):
        assert rare in said, rare
    assert {move.won for move in moves} == {True, False}
