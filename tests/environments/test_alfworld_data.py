"""Real game files: the folder layout of ALFWORLD_DATA, written here from generated households."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

pytest.importorskip("alfworld")
pytest.importorskip("fast_downward")

from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.environments.alfworld.games import FOLDERS, game_of
from gleanrl.environments.alfworld.households import GOALS
from gleanrl.errors import UserError
from gleanrl.protocols import Split
from gleanrl.types import Task
from tests.environments import alfworld_stock as stock


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("ALFWORLD_DATA", str(root))
    return root


def write(root: Path, split: Split, task: Task, trial: str) -> Path:
    kind = GOALS[task.payload["goal"]].library
    name = f"{kind}-{task.payload['target'].title()}-None-{task.payload['destination'].title()}-1"
    return stock.game_file(task, root / "json_2.1.1" / FOLDERS[split] / name / trial / "game.tw-pddl")


def test_games_of_the_real_layout_are_played(data: Path) -> None:
    generated = AlfworldTaskset(goals=["put", "heat"], seed=9)
    made: dict[Split, list[Task]] = {}
    for split in FOLDERS:
        made[split] = list(generated.tasks(split, 4))
        for number, task in enumerate(made[split]):
            write(data, split, task, f"trial_{number}")
    taskset = AlfworldTaskset(goals=["put", "heat"], source="alfworld_data")
    ids: set[str] = set()
    for split in FOLDERS:
        tasks = taskset.tasks(split, 4)
        assert sorted(game_of(t).intro for t in tasks) == sorted(game_of(t).intro for t in made[split])
        assert not ids & {task.id for task in tasks}
        ids |= {task.id for task in tasks}
        for task in tasks:
            assert not Path(task.payload["file"]).is_absolute()
            messages, score = taskset.demonstrate(task, seed=0)
            assert score.value == 1.0
            assert messages[0]["content"].startswith("You are in the middle of a room.")


def test_goals_choose_games_and_unplayable_ones_are_left_out(data: Path) -> None:
    generated = AlfworldTaskset(goals=["put", "cool"], seed=10)
    tasks = generated.tasks("train", 8)
    files = [write(data, "train", task, f"trial_{i}") for i, task in enumerate(tasks)]
    coolers = [f for task, f in zip(tasks, files, strict=True) if task.payload["goal"] == "cool"]
    unsolvable = json.loads(coolers[0].read_text()) | {"solvable": False}
    coolers[0].write_text(json.dumps(unsolvable))
    sliced = coolers[1].parent.parent.with_name("pick_cool_then_place_in_recep-AppleSliced-None-Fridge-2")
    coolers[1].parent.parent.rename(sliced)
    taskset = AlfworldTaskset(goals=["cool"], source="alfworld_data")
    rest = len(coolers) - 2
    assert rest > 0
    assert {task.payload["goal"] for task in taskset.tasks("train", rest)} == {"cool"}
    with pytest.raises(UserError, match=f"has {rest} train tasks"):
        taskset.tasks("train", rest + 1)


def test_a_game_in_two_folders_is_held_out_only(data: Path) -> None:
    task, other = AlfworldTaskset(seed=11).tasks("train", 2)
    write(data, "eval", task, "trial_a")
    write(data, "train", task, "trial_b")
    write(data, "train", other, "trial_c")
    write(data, "warm_start", other, "trial_d")
    taskset = AlfworldTaskset(source="alfworld_data")
    assert len(taskset.tasks("eval", 1)) == len(taskset.tasks("warm_start", 1)) == 1
    with pytest.raises(UserError, match="has 0 train tasks"):
        taskset.tasks("train", 1)


def test_missing_and_broken_data_are_one_clear_line(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taskset = AlfworldTaskset(source="alfworld_data")
    with pytest.raises(UserError, match="has no folder train"):
        taskset.tasks("train", 1)
    file = write(data, "train", AlfworldTaskset().tasks("train", 1)[0], "trial")
    file.write_text('{"grammar": ""}')
    with pytest.raises(UserError, match=r"it has no pddl_domain, pddl_problem"):
        taskset.tasks("train", 1)
    file.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        AlfworldTaskset(source="alfworld_data").tasks("train", 1)
    monkeypatch.setenv("ALFWORLD_DATA", "")
    with pytest.raises(UserError, match="it is not set"):
        AlfworldTaskset(source="alfworld_data").tasks("train", 1)


def test_an_episode_on_a_real_file(data: Path) -> None:
    write(data, "eval", AlfworldTaskset(goals=["examine"]).tasks("eval", 1)[0], "trial")
    taskset = AlfworldTaskset(goals=["examine"], source="alfworld_data")
    (task,) = taskset.tasks("eval", 1)

    async def episode() -> float:
        environment = taskset.environment(task)
        observation = await environment.reset()
        for message in taskset.demonstrate(task, seed=0)[0]:
            if message["role"] == "assistant":
                observation = await environment.step(message)
        await environment.close()
        assert observation.done
        assert observation.score is not None
        return observation.score.value

    assert asyncio.run(episode()) == 1.0
