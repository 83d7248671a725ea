"""The prompt formats of ALFWorld: the prompts, how commands are read from messages, and the expert's demonstrations."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

pytest.importorskip("alfworld")
pytest.importorskip("fast_downward")

from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.environments.alfworld.games import game_of
from gleanrl.environments.alfworld.households import GOALS
from gleanrl.environments.alfworld.prompts import Said, read
from gleanrl.protocols import Observation
from gleanrl.types import Task


async def play(taskset: AlfworldTaskset, task: Task, answers: list[str]) -> list[Observation]:
    environment = taskset.environment(task)
    first = await environment.reset()
    rest = [await environment.step({"role": "assistant", "content": answer}) for answer in answers]
    await environment.close()
    return [first, *rest]


def text_of(observation: Observation) -> str:
    return observation.messages[0]["content"]


@pytest.mark.parametrize("prompt", ["plain", "react", "admissible"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_replaying_a_demonstration_gives_the_same_observations_and_wins(prompt: Any, noise: float) -> None:
    taskset = AlfworldTaskset(goals=sorted(GOALS), prompt=prompt, seed=30)
    for task in taskset.tasks("warm_start", 8):
        messages, score = taskset.demonstrate(task, seed=3, noise=noise)
        assert score.value == 1.0
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        seen = asyncio.run(play(taskset, task, answers))
        assert [text_of(o) for o in seen[:-1]] == [m["content"] for m in messages if m["role"] == "user"]
        assert [o.done for o in seen] == [False] * (len(seen) - 1) + [True]
        assert noise or all(o.info["valid_action"] for o in seen)
        assert seen[-1].score is not None
        assert seen[-1].score.value == 1.0
        assert ("valid_actions" in seen[-1].score.parts) == (prompt != "plain")


def test_the_prompt_format_does_not_change_the_ids_or_problems_of_tasks() -> None:
    plain = AlfworldTaskset(goals=["heat"], seed=31).tasks("train", 3)
    for prompt in ("react", "admissible"):
        tasks = AlfworldTaskset(goals=["heat"], seed=31, prompt=prompt).tasks("train", 3)
        assert [task.id for task in tasks] == [task.id for task in plain]
        assert all(task.payload["prompt"] == prompt for task in tasks)
        assert [task.payload["problem"] for task in tasks] == [task.payload["problem"] for task in plain]


def test_a_task_has_the_same_prompt_in_a_taskset_with_other_options() -> None:
    task = AlfworldTaskset(goals=["cool"], seed=32, prompt="react").tasks("train", 1)[0]
    sent = Task(task.id, payload=json.loads(json.dumps(dict(task.payload))))
    (first,) = asyncio.run(play(AlfworldTaskset(), sent, []))
    (again,) = asyncio.run(play(AlfworldTaskset(goals=["cool"], prompt="react"), task, []))
    assert text_of(first) == text_of(again)


# --- react ------------------------------------------------------------------------------------
def test_react_answers_a_thought_with_ok_without_changing_the_game() -> None:
    taskset = AlfworldTaskset(seed=33, prompt="react", admissible_commands=True)
    task = taskset.tasks("train", 1)[0]
    answers = ["> think: where is it?", "go to fridge 1", "Think: it may be inside.", "> open fridge 1", "> dance"]
    seen = asyncio.run(play(taskset, task, answers))
    assert [text_of(o) for o in (seen[1], seen[3])] == ["OK."] * 2
    assert seen[1].info["admissible_commands"] == seen[0].info["admissible_commands"]
    assert text_of(seen[2]) == "You arrive at fridge 1. The fridge 1 is closed."
    assert text_of(seen[4]).startswith("You open the fridge 1.")
    assert text_of(seen[5]) == "Nothing happens."
    assert [o.info["valid_action"] for o in seen] == [True] * 5 + [False]
    assert seen[5].score is not None
    assert seen[5].score.parts == {"valid_actions": 0.8}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("> go to fridge 1\nYou arrive", Said("go to fridge 1")),
        ("\n  Go To Fridge 1  \n> open it", Said("go to fridge 1")),
        ("think: hm\ngo to fridge 1", Said(thought=True)),
        ("> ", Said("")),
        ("", Said("")),
    ],
)
def test_react_reads_the_command_from_the_first_line(content: str, expected: Said) -> None:
    assert read("react", content) == expected


def test_text_in_think_tags_is_not_read_as_a_command() -> None:
    for prompt in ("plain", "react"):
        assert read(prompt, "<think>open it\n?</think>\n\nGo to fridge 1") == Said("go to fridge 1")
        assert read(prompt, "<think>go to fridge 1") == Said()
    assert read("admissible", "<think>hm</think><action>look</action>") == Said("look")


@pytest.mark.parametrize("goal", sorted(GOALS))
def test_react_prompts_show_two_different_won_games_of_the_same_goal(goal: str) -> None:
    taskset = AlfworldTaskset(goals=[goal], seed=34, prompt="react")
    task = taskset.tasks("train", 1)[0]
    (first,) = asyncio.run(play(taskset, task, []))
    examples, own = text_of(first).split("Now your own task.\n\n")
    assert own == game_of(task).intro.partition("\n\n")[2]
    played = examples.split("Example ")[1:]
    assert [text[:2] for text in played] == ["1:", "2:"]
    for text in played:
        assert re.search(r"\n> think: .+\nOK\.\n> go to ", text)
        assert "Nothing happens." not in text
        assert re.findall(r"\n> (.+)\n", text)[-1].startswith("use desklamp" if goal == "examine" else "move ")
    goals_said = [text.split("Your task is to: ")[1].split(".\n")[0] for text in played]
    assert len(set(goals_said)) == 2


def test_the_react_prompt_has_as_many_examples_as_the_option_says() -> None:
    texts = {}
    for count in (0, 1, 3):
        taskset = AlfworldTaskset(seed=35, prompt="react", examples=count)
        task = taskset.tasks("train", 1)[0]
        texts[count] = text_of(asyncio.run(play(taskset, task, []))[0])
        assert texts[count].count("\nExample ") == count
    assert "Now your own task" not in texts[0]
    assert 'starts with "think:"' in texts[0]


# --- admissible -------------------------------------------------------------------------------
def test_admissible_prompts_list_the_possible_actions_and_action_tags_are_read() -> None:
    taskset = AlfworldTaskset(seed=36, prompt="admissible")
    task = taskset.tasks("train", 1)[0]
    game = game_of(task)
    answers = [
        "<think>The fridge.</think>\n<action> Go to\nfridge 1 </action>",
        "open fridge 1",
        "<think>now</think><action>open fridge 9</action>",
        "<action>open fridge 1</action><action>close fridge 1</action>",
    ]
    seen = asyncio.run(play(taskset, task, answers))
    at = game.step(game.start, "go to fridge 1").state
    assert text_of(seen[1]).startswith("You arrive at fridge 1. The fridge 1 is closed.\n\nPossible actions:\n- ")
    for observation in (seen[1], seen[2], seen[3]):
        listed = text_of(observation).split("Possible actions:\n")[1].split("\n")
        assert listed == [f"- {command}" for command in game.admissible(at) if command != "help"]
    assert [text_of(o).split("\n")[0] for o in seen[2:4]] == ["Nothing happens."] * 2
    assert text_of(seen[4]).startswith("You open the fridge 1.")
    assert [o.info["valid_action"] for o in seen[1:]] == [True, False, False, True]
    assert seen[4].score is not None
    assert seen[4].score.parts == {"valid_actions": 0.5}
    assert "<action>" in text_of(seen[0])


def test_every_turn_of_an_admissible_demonstration_has_a_thought_and_a_listed_action() -> None:
    taskset = AlfworldTaskset(goals=sorted(GOALS), seed=37, prompt="admissible")
    for task in taskset.tasks("warm_start", 6):
        messages, _ = taskset.demonstrate(task, seed=0, noise=0.2)
        for shown, answer in zip(messages[::2], messages[1::2], strict=True):
            found = re.fullmatch(r"<think>(.+)</think>\n<action>(.+)</action>", answer["content"])
            assert found is not None
            assert f"\n- {found[2]}" in shown["content"]
