"""`AlfworldTaskset` with game files in the folder layout of ALFWORLD_DATA.

The files are written by the tests from generated households. Some tests compare with alfworld's own loader.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("alfworld")
pytest.importorskip("fast_downward")

from alfworld.agents.environment import alfred_tw_env

from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.environments.alfworld.games import FOLDERS, data_root, game_of
from gleanrl.environments.alfworld.households import GOALS
from gleanrl.protocols import Split
from gleanrl.types import Task
from gleanrl.utils.errors import UserError
from tests.environments import alfworld_stock as stock

BY_SPLIT: dict[Split, str] = {"train": "train", "eval": "valid_unseen", "warm_start": "valid_seen"}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("ALFWORLD_DATA", str(root))
    return root


def write(root: Path, folder: str, task: Task, trial: str, room: int = 1, **trajectory: Any) -> Path:
    """Write a game file and its trajectory file at their places in the published data's layout."""
    kind, target, place = GOALS[task.payload["goal"]].library, task.payload["target"], task.payload["destination"]
    place = place or "desklamp"
    name = f"{kind}-{target.title()}-None-{place.title()}-{room}"
    file = stock.game_file(task, root / "json_2.1.1" / folder / name / trial / "game.tw-pddl")
    wanted = {"object_target": target.title(), "parent_target": task.payload["destination"], "toggle_target": place}
    file.with_name("traj_data.json").write_text(
        json.dumps({"task_type": kind, "pddl_params": wanted, "scene": {"floor_plan": f"FloorPlan{room}"}} | trajectory)
    )
    return file


def test_game_files_are_loaded_by_split_and_won_by_the_expert(data: Path) -> None:
    generated = AlfworldTaskset(goals=["put", "heat"], seed=9)
    made: dict[Split, list[Task]] = {}
    for split, folder in BY_SPLIT.items():
        made[split] = list(generated.tasks(split, 4))
        for number, task in enumerate(made[split]):
            write(data, folder, task, f"trial_{number}")
    taskset = AlfworldTaskset(goals=["put", "heat"], source="alfworld_data")
    ids: set[str] = set()
    for split in BY_SPLIT:
        tasks = taskset.tasks(split, 4)
        assert sorted(game_of(t).intro for t in tasks) == sorted(game_of(t).intro for t in made[split])
        assert not ids & {task.id for task in tasks}
        ids |= {task.id for task in tasks}
        for task in tasks:
            assert not Path(task.payload["file"]).is_absolute()
            messages, score = taskset.demonstrate(task, seed=0)
            assert score.value == 1.0
            assert messages[0]["content"].startswith("You are in the middle of a room.")


@pytest.mark.parametrize("file", ["/etc/hostname", "../secret.json", "json_2.1.1/../../secret.json"])
def test_a_task_with_a_file_outside_the_data_folder_is_rejected(data: Path, file: str) -> None:
    (data.parent / "secret.json").write_text("{}")
    with pytest.raises(UserError, match="which is not in the folder of ALFWORLD_DATA"):
        game_of(Task("alfworld-put-0", payload={"file": file}))


def test_only_playable_games_of_the_chosen_goals_are_loaded(data: Path) -> None:
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


@pytest.mark.parametrize(
    ("eval_split", "folder"),
    [("households", "valid_seen"), ("unseen", "valid_seen"), ("seen", "train"), ("both", "train")],
)
def test_warm_start_tasks_are_from_valid_seen_unless_evaluation_uses_it(
    data: Path, eval_split: Any, folder: str
) -> None:
    for number, task in enumerate(AlfworldTaskset(seed=13).tasks("train", 3)):
        write(data, FOLDERS[number], task, "trial")
    (file,) = files_of(AlfworldTaskset(source="alfworld_data", eval_split=eval_split), "warm_start")
    assert Path(file).parts[-4] == folder


def test_options_of_generated_households_do_not_restrict_goals_of_game_files() -> None:
    options: dict[str, Any] = {"goals": ["heat"], "rooms": ["bathroom"]}
    with pytest.raises(UserError, match="goal heat needs one of"):
        AlfworldTaskset(**options)
    assert AlfworldTaskset(source="alfworld_data", **options).layout.goals == ("heat",)


def test_a_game_that_is_also_in_a_validation_folder_is_not_trained_on(data: Path) -> None:
    task, other = AlfworldTaskset(seed=11).tasks("train", 2)
    write(data, "valid_unseen", task, "trial_a")
    write(data, "train", task, "trial_b")
    write(data, "train", other, "trial_c")
    write(data, "valid_seen", other, "trial_d")
    taskset = AlfworldTaskset(source="alfworld_data")
    assert len(taskset.tasks("eval", 1)) == len(taskset.tasks("warm_start", 1)) == 1
    with pytest.raises(UserError, match="has 0 train tasks"):
        taskset.tasks("train", 1)


def test_missing_or_broken_data_raise_clear_errors(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_replaying_a_demonstration_on_a_game_file_wins(data: Path) -> None:
    write(data, "valid_unseen", AlfworldTaskset(goals=["examine"]).tasks("eval", 1)[0], "trial")
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


def test_each_split_has_the_same_games_as_alfworlds_own_loader(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generated = AlfworldTaskset(goals=list(GOALS), seed=12)
    for number, task in enumerate(generated.tasks("train", 21)):
        write(data, FOLDERS[number % 3], task, f"trial_T{number}", room=number)
    for number, task in enumerate(generated.tasks("eval", 12)):
        spoil(write(data, FOLDERS[number % 3], task, f"trial_T9{number}", room=100 + number), number // 3)
    nested = write(data, "train", generated.tasks("warm_start", 1)[0], "trial_T99/again")
    for ids in ([1, 2, 3, 4, 5, 6], [2, 5], [1]):
        goals = [alfred_tw_env.TASK_TYPES[number] for number in ids]
        for split, ours in STOCK_SPLITS.items():
            taskset = AlfworldTaskset(goals=goals, source="alfworld_data", eval_split=ours[1])
            found = files_of(taskset, ours[0])
            assert sorted(found) == sorted(stock_files(data, split, ids)), (split, ids)
            assert len(set(found)) == len(found)
    assert str(nested) in files_of(AlfworldTaskset(goals=list(GOALS), source="alfworld_data"), "train")
    assert "Overall we have" in capsys.readouterr().out


STOCK_SPLITS: dict[str, tuple[Split, Any]] = {
    "train": ("train", "both"),
    "eval_in_distribution": ("eval", "seen"),
    "eval_out_of_distribution": ("eval", "unseen"),
}


def spoil(file: Path, how: int) -> None:
    """Change a game in one of four ways (``how``) that make alfworld's loader skip it."""
    game = json.loads(file.read_text())
    if how == 0:
        file.write_text(json.dumps(game | {"solvable": False}))
    elif how == 1:
        file.write_text(json.dumps({key: value for key, value in game.items() if key != "solvable"}))
    elif how == 2:
        file.unlink() if file.parts[-4] == "train" else file.with_name("traj_data.json").unlink()
    else:
        word = {"train": "movable_recep", "valid_seen": "AppleSliced"}.get(file.parts[-4], "trial_movable")
        folder = file.parent if word == "trial_movable" else file.parent.parent
        folder.rename(folder.with_name(f"pick_{word}-{folder.name}"))


def stock_files(data: Path, split: str, task_types: list[int]) -> list[str]:
    """Return the files of the games that alfworld's own environment loads."""
    root = data / "json_2.1.1"
    paths = {"data_path": "train", "eval_id_data_path": "valid_seen", "eval_ood_data_path": "valid_unseen"}
    config = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": task_types},
        "dataset": {key: str(root / folder) for key, folder in paths.items()}
        | {"num_train_games": -1, "num_eval_games": -1},
    }
    return alfred_tw_env.AlfredTWEnv(config, train_eval=split).game_files


def files_of(taskset: AlfworldTaskset, split: Split) -> list[str]:
    """Return the files of all games of a split. Their number is read from the error for too many tasks."""
    with pytest.raises(UserError, match=r"has \d+ \w+ tasks") as caught:
        taskset.tasks(split, 10**6)
    count = int(re.findall(r"has (\d+) ", str(caught.value))[0])
    return [str(data_root() / task.payload["file"]) for task in taskset.tasks(split, count)]


def test_eval_split_both_has_separate_kinds_for_seen_and_unseen_games(data: Path) -> None:
    generated = AlfworldTaskset(goals=["put", "examine"], seed=13)
    for number, task in enumerate(generated.tasks("eval", 9)):
        write(data, FOLDERS[number % 3], task, f"trial_T{number}", room=number)
    taskset = AlfworldTaskset(goals=["put", "examine"], source="alfworld_data", eval_split="both")
    tasks = taskset.tasks("eval", 4)
    assert {task.payload["file"].split("/")[1] for task in tasks} == {"valid_seen", "valid_unseen"}
    for task in tasks:
        assert task.kind == f"{task.payload['goal']}_{task.payload['file'].split('/')[1].removeprefix('valid_')}"
    assert [t.id for t in taskset.tasks("warm_start", 3)] == [t.id for t in taskset.tasks("train", 3)][::-1]


def test_the_goal_of_a_game_with_free_wording_is_read_from_its_trajectory_file(data: Path) -> None:
    task = AlfworldTaskset(goals=["heat"], seed=15).tasks("eval", 1)[0]
    file = write(data, "valid_unseen", task, "trial_T1")
    game = json.loads(file.read_text())
    free = game["grammar"].replace(task.payload["task"], "warm it up for me, will you")
    assert free != game["grammar"]
    file.write_text(json.dumps(game | {"grammar": free}))
    taskset = AlfworldTaskset(goals=["heat"], source="alfworld_data")
    (played,) = taskset.tasks("eval", 1)
    messages, score = taskset.demonstrate(played, seed=0)
    assert "warm it up for me" in messages[0]["content"]
    assert score.value == 1.0
