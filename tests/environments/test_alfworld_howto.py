"""The code and the settings in docs/howto/alfworld.md work unchanged."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("alfworld")
pytest.importorskip("fast_downward")

from gleanrl.config.loading import load
from gleanrl.config.settings import Config
from gleanrl.environments import load_taskset
from gleanrl.environments.alfworld import EVAL_SPLITS
from gleanrl.environments.alfworld.games import game_of
from gleanrl.environments.alfworld.prompts import PROMPTS

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "alfworld.md").read_text()


def test_the_python_code_of_the_page_prints_the_expected_game(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "alfworld.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Example 1:" in printed
    assert "> think: " in printed
    assert "\nOK.\n" in printed


def test_the_settings_of_the_page_make_full_size_seen_and_unseen_games() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    config = Config.model_validate(tomllib.loads(text))
    taskset = load_taskset(config.environment, seed=1)
    kinds = {task.kind.rpartition("_")[2] for task in taskset.tasks("eval", 2)}
    assert kinds == {"seen", "unseen"}
    heats = (task for task in taskset.tasks("train", 6) if task.payload["room"] == "kitchen")
    assert len(game_of(next(heats))._world.static("receptacletype")) >= 20


def test_the_page_lists_every_eval_split_and_prompt_format() -> None:
    for name in (*EVAL_SPLITS, *PROMPTS):
        assert f"`{name}`" in PAGE


def test_the_alfworld_six_preset_evaluates_all_six_kinds_on_unseen_layouts() -> None:
    config = load("alfworld_six", [])
    taskset = load_taskset(config.environment, seed=0)
    assert {task.kind for task in taskset.tasks("eval", 40)} == set(config.environment.options["goals"])
    assert config.environment.options["eval_split"] == "unseen"
