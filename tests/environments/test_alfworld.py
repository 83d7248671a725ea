"""`AlfworldTaskset` with generated households: tasks and splits, episodes, the expert, and errors for bad options."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("alfworld")
pytest.importorskip("fast_downward")

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.environments.alfworld.engine import Game, demangle
from gleanrl.environments.alfworld.expert import Order, read_order
from gleanrl.environments.alfworld.games import GameCache, game_of
from gleanrl.environments.alfworld.households import GOALS, ROOMS, Layout, draw, goal_library, thor
from gleanrl.protocols import Observation, Split
from gleanrl.types import Task
from gleanrl.utils.errors import UserError
from tests.strategies import examples

SPLITS: tuple[Split, ...] = ("train", "eval", "warm_start")


def text_of(observation: Observation) -> str:
    (message,) = observation.messages
    assert message["role"] == "user"
    return message["content"]


async def play(taskset: AlfworldTaskset, task: Task, commands: list[str]) -> list[Observation]:
    environment = taskset.environment(task)
    seen = [await environment.reset()]
    for command in commands:
        # Lets other episodes on the event loop take a step.
        await asyncio.sleep(0)
        seen.append(await environment.step({"role": "assistant", "content": command}))
    await environment.close()
    return seen


def commands_of(taskset: AlfworldTaskset, task: Task, seed: int = 0, noise: float = 0.0) -> list[str]:
    messages, _ = taskset.demonstrate(task, seed=seed, noise=noise)
    return [message["content"] for message in messages if message["role"] == "assistant"]


# --- tasks ------------------------------------------------------------------------------------
def test_tasks_are_deterministic_and_a_longer_list_extends_a_shorter_one() -> None:
    first = AlfworldTaskset(seed=3)
    long = first.tasks("train", 12)
    assert list(first.tasks("train", 5)) == list(long[:5])
    assert list(AlfworldTaskset(seed=3).tasks("train", 12)) == list(long)
    assert {task.id for task in AlfworldTaskset(seed=4).tasks("train", 12)}.isdisjoint(task.id for task in long)
    assert all(task.prompt == () for task in long)


def test_task_ids_do_not_depend_on_the_process_or_its_hash_seed() -> None:
    code = (
        "from gleanrl.environments.alfworld import AlfworldTaskset;"
        "print(*[t.id for t in AlfworldTaskset(goals=['clean'], seed=5).tasks('eval', 3)])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}
    )
    assert printed.stdout.split() == [t.id for t in AlfworldTaskset(goals=["clean"], seed=5).tasks("eval", 3)]


def test_no_household_is_in_two_splits_whatever_the_seed() -> None:
    kept: dict[str, Split] = {}
    options: dict[str, Any] = {"receptacles": 4, "objects": (1, 2), "object_kinds": ["apple", "mug"]}
    met = 0
    for seed in range(4):
        taskset = AlfworldTaskset(seed=seed, **options)
        for split in SPLITS:
            keys = [canonical(task) for task in taskset.tasks(split, 5)]
            assert len(set(keys)) == len(keys), "a household twice in one split"
            for key in keys:
                met += key in kept
                assert kept.setdefault(key, split) == split
    assert met > 5, "the layout is small enough that seeds meet the same households"


def canonical(task: Task) -> str:
    """Return a text that equal households share, from the game alone: its goal and the objects in each receptacle."""
    world = game_of(task)._world
    inside: dict[str, list[str]] = {receptacle: [] for _, receptacle, _ in world.static("receptacletype")}
    kind = {thing: k for _, thing, k in (*world.static("objecttype"), *world.static("receptacletype"))}
    for atom, bit in world.bits.items():
        if atom[0] == "inreceptacle" and bit & world.initial:
            inside[atom[2]].append(kind[atom[1]])
    payload = task.payload
    places = sorted((kind[place], sorted(things)) for place, things in inside.items())
    return json.dumps([payload["goal"], payload["target"], payload["destination"], places])


def test_asking_for_more_tasks_than_a_layout_has_raises() -> None:
    taskset = AlfworldTaskset(receptacles=4, objects=1, object_kinds=["bread"])
    with pytest.raises(UserError, match=r"has \d+ train tasks, 500 were asked for; allow more receptacles"):
        taskset.tasks("train", 500)


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**40), goal=st.sampled_from(sorted(GOALS)), size=st.integers(5, 12))
def test_every_drawn_household_is_valid_and_its_goal_is_not_yet_reached(seed: int, goal: str, size: int) -> None:
    room = GOALS[goal].rooms[seed % len(GOALS[goal].rooms)]
    household = draw(Layout(goals=(goal,), rooms=(room,), receptacles=(size, size), objects=(3, 8)), seed)
    if household is None:
        return
    assert len(household.furniture) == size
    assert {kind for kind, _ in household.furniture} >= set(ROOMS[room].always)
    objects = Counter(thing for _, inside in household.furniture for thing in inside)
    assert objects[household.target] >= GOALS[goal].targets
    for kind, inside in household.furniture:
        assert not (kind == household.destination and household.target in inside)
        assert all(thing == "DeskLamp" or thing in thor().VAL_RECEPTACLE_OBJECTS[kind] for thing in inside)
    needs = GOALS[goal].needs
    assert not needs or household.target in thor().VAL_ACTION_OBJECTS[needs]


def test_rooms_and_goals_use_only_kinds_that_alfworld_defines() -> None:
    for room in ROOMS.values():
        for kind in (*room.always, *room.maybe):
            assert kind in thor().VAL_RECEPTACLE_OBJECTS
        assert set(room.objects) <= thor().OBJECTS_SET
    names = {"kitchen": "Kitchen", "bathroom": "Bathroom", "bedroom": "Bedroom", "living_room": "LivingRoom"}
    for goal in GOALS.values():
        assert {names[room] for room in goal.rooms} <= thor().GOALS_VALID[goal.library]


# --- episodes ---------------------------------------------------------------------------------
def test_an_episode_has_the_texts_of_the_original_game() -> None:
    taskset = AlfworldTaskset(seed=1)
    task = taskset.tasks("train", 1)[0]
    seen = asyncio.run(play(taskset, task, ["  Go To FRIDGE 1\n", "open fridge 1", "dance", "open fridge 1"]))
    assert text_of(seen[0]).startswith("You are in the middle of a room. Looking quickly around you, you see a ")
    assert text_of(seen[0]).endswith(f"\n\nYour task is to: {task.payload['task']}.")
    assert text_of(seen[1]) == "You arrive at fridge 1. The fridge 1 is closed."
    assert text_of(seen[2]).startswith("You open the fridge 1. The fridge 1 is open. In it, you see ")
    assert [text_of(observation) for observation in seen[3:]] == ["Nothing happens."] * 2
    assert not any(observation.done for observation in seen)
    assert all(observation.score is not None and observation.score.value == 0.0 for observation in seen)


def test_winning_ends_the_episode_with_score_one() -> None:
    taskset = AlfworldTaskset(goals=["heat"])
    task = taskset.tasks("train", 1)[0]
    seen = asyncio.run(play(taskset, task, commands_of(taskset, task)))
    assert [observation.done for observation in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].score is not None
    assert seen[-1].score.value == 1.0
    assert seen[-1].info["won"] is True


def test_observations_have_equal_states_exactly_where_the_same_commands_are_possible_with_the_same_results() -> None:
    taskset = AlfworldTaskset(seed=1)
    task = taskset.tasks("train", 1)[0]
    game, commands = game_of(task), commands_of(taskset, task)
    go = next(command for command in commands if command.startswith("go to"))
    seen = asyncio.run(play(taskset, task, ["look", "no such command", go, go, *commands[commands.index(go) + 1 :]]))
    states, state = [game.start], game.start
    for command in ["look", "no such command", go, go, *commands[commands.index(go) + 1 :]]:
        state = game.step(state, command).state
        states.append(state)
    keys = [observation.state for observation in seen]
    assert len(set(keys)) == len(set(states)) == len(set(zip(keys, states, strict=True))) > 3
    assert keys[0] == keys[1] == keys[2]
    assert asyncio.run(play(taskset, task, []))[0].state == keys[0]


def test_the_banner_and_admissible_commands_are_shown_if_their_options_are_set() -> None:
    taskset = AlfworldTaskset(banner=True, admissible_commands=True)
    task = taskset.tasks("eval", 1)[0]
    (first,) = asyncio.run(play(taskset, task, []))
    assert text_of(first).startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle")
    assert "go to fridge 1" in first.info["admissible_commands"]
    assert "go to fridge 2" not in first.info["admissible_commands"]


def test_interleaved_episodes_equal_the_same_episodes_played_alone() -> None:
    taskset = AlfworldTaskset(goals=["put", "clean", "examine"], seed=2)
    tasks = taskset.tasks("train", 6)
    scripts = [(task, commands_of(taskset, task, seed, 0.4)) for task in tasks for seed in range(3)]

    async def together() -> list[list[Observation]]:
        return list(await asyncio.gather(*(play(taskset, task, script) for task, script in scripts)))

    interleaved = asyncio.run(together())
    alone = [asyncio.run(play(taskset, task, script)) for task, script in scripts]
    assert interleaved == alone
    assert all(episode[-1].done for episode in alone)


def test_a_pickled_taskset_plays_a_task_from_json_in_the_same_way() -> None:
    taskset = AlfworldTaskset(goals=["cool"])
    task = taskset.tasks("train", 3)[2]
    other = pickle.loads(pickle.dumps(taskset))
    sent = json.loads(json.dumps({"id": task.id, "payload": task.payload}))
    again = Task(id=sent["id"], payload=sent["payload"])
    script = commands_of(taskset, task)
    assert asyncio.run(play(other, again, script)) == asyncio.run(play(taskset, task, script))
    assert list(other.tasks("train", 3)) == list(taskset.tasks("train", 3))


def test_the_game_cache_is_bounded_and_evicts_the_least_recently_used_game() -> None:
    made: list[str] = []
    tasks = AlfworldTaskset(seed=14).tasks("train", 4)

    def get(cache: GameCache, number: int) -> Game:
        def make() -> Game:
            made.append(tasks[number].id)
            return Game(tasks[number].payload["problem"], tasks[number].payload["task"])

        return cache.get((tasks[number].id, ""), make)

    room = sum(game_of(task).operators for task in tasks[:2])
    cache = GameCache(operators=room)
    for number in (0, 1, 0, 1, 2, 2, 0):
        get(cache, number)
    assert made == [tasks[0].id, tasks[1].id, tasks[2].id, tasks[0].id]
    assert sum(game.operators for game in cache._games.values()) <= max(room, get(cache, 0).operators)


def test_importing_the_package_does_not_import_torch_textworld_or_alfworld() -> None:
    heavy = ("torch", "textworld", "alfworld", "fast_downward")
    code = f"import sys, gleanrl.environments.alfworld; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- the expert -------------------------------------------------------------------------------
@pytest.mark.parametrize("goal", sorted(GOALS))
def test_the_expert_wins_every_game_with_and_without_noise(goal: str) -> None:
    taskset = AlfworldTaskset(goals=[goal], receptacles=(5, 9), objects=(4, 8), same_kind=3, seed=6)
    assert taskset.has_expert
    for task in taskset.tasks("train", 12):
        clean, score = taskset.demonstrate(task, seed=1)
        noisy, noisy_score = taskset.demonstrate(task, seed=1, noise=0.3)
        assert score.value == noisy_score.value == 1.0
        for messages in (clean, noisy):
            assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        seen = asyncio.run(play(taskset, task, [m["content"] for m in noisy if m["role"] == "assistant"]))
        assert [text_of(o) for o in seen[:-1]] == [m["content"] for m in noisy if m["role"] == "user"]


def test_demonstrations_depend_on_their_seed_and_noise_makes_them_longer() -> None:
    taskset = AlfworldTaskset(seed=8)
    tasks = taskset.tasks("warm_start", 20)
    assert [commands_of(taskset, t, 5, 0.3) for t in tasks] == [commands_of(taskset, t, 5, 0.3) for t in tasks]
    assert [commands_of(taskset, t, 5) for t in tasks] != [commands_of(taskset, t, 6) for t in tasks]
    clean = sum(len(commands_of(taskset, t)) for t in tasks)
    assert clean * 1.15 < sum(len(commands_of(taskset, t, noise=0.3)) for t in tasks)
    assert not any(command == "help" for t in tasks for command in commands_of(taskset, t, noise=0.9))


def test_read_order_understands_every_goal_template_of_the_original_games() -> None:
    for kind, goal in GOALS.items():
        for template in goal_library()[goal.library]["templates"]:
            text = template.format(obj="mug", recep="desk", toggle="desklamp")
            assert read_order(text) == Order(kind, "mug", "desklamp" if kind == "examine" else "desk")
    assert read_order("please tidy up") is None


def test_demangle_numbers_names_as_in_the_original_games() -> None:
    ids = ["cabinet_bar__minus_01_dot_5", "cabinet_bar__plus_00_dot_2", "sink_bar_1_bar_sinkbasin", "agent1"]
    names = demangle(dict.fromkeys(random.sample(ids, 4), "object"))
    assert [names[thing] for thing in ids] == ["cabinet 2", "cabinet 1", "sinkbasin 1", "agent1"]


# --- errors -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal": ["put"]}, r"options\.goal: 'alfworld' has no such option; did you mean 'goals'"),
        ({"goals": ["haet"]}, r"options\.goals: unknown 'haet'; did you mean 'heat'"),
        ({"goals": ["pick_heat_then_plase"]}, r"options\.goals: unknown 'pick_heat_then_plase'"),
        ({"goals": "put"}, r"options\.goals = 'put'"),
        ({"goals": []}, r"options\.goals = \[\]"),
        ({"rooms": ["kitchn"]}, "did you mean 'kitchen'"),
        ({"goals": ["heat"], "rooms": ["bedroom"]}, "goal heat needs one of kitchen"),
        ({"receptacles": 2}, "receptacles = 2, 2: a kitchen has 4 to"),
        ({"receptacles": (6, 5)}, "receptacles = .*: a number, or least and most"),
        ({"objects": "many"}, r"options\.objects.* = 'many'"),
        ({"object_kinds": ["aple"]}, "did you mean 'apple'"),
        ({"object_kinds": ["book"]}, "none of them is found in a kitchen"),
        ({"same_kind": 0}, r"options\.same_kind = 0"),
        ({"source": "real"}, r"options\.source = 'real'"),
        ({"eval_split": "unsen"}, r"options\.eval_split = 'unsen': .*'unseen'"),
        ({"prompt": "reakt"}, r"options\.prompt = 'reakt': .*'react'"),
        ({"examples": 2}, "prompt = 'plain' has no place for them"),
        ({"prompt": "react", "examples": -1}, r"options\.examples = -1"),
        ({"size": "big"}, r"options\.size = 'big'"),
        ({"size": "full", "receptacles": 9}, r"options\.receptacles: size = 'full'"),
        ({"size": "full", "objects": 9}, r"options\.objects: size = 'full'"),
        ({"size": "full", "object_kinds": ["kettel"]}, "did you mean 'kettle'"),
    ],
)
def test_a_bad_option_raises_a_one_line_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_taskset(EnvironmentSettings(name="alfworld", options=options), seed=0)
    assert "\n" not in str(caught.value)


def test_a_task_of_another_environment_is_rejected() -> None:
    with pytest.raises(UserError, match="not an alfworld task"):
        asyncio.run(play(AlfworldTaskset(), Task(id="x", payload={"question": 1}), []))
