"""The configurations in docs/howto/adapters.md (TextArena, gymnasium) and docs/howto/datasets.md work as described."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gleanrl.cli import main as cli
from gleanrl.config import loading as config
from gleanrl.environments import load_taskset
from gleanrl.rewards.adapter import check_reward
from tests.environments.problems import trl_rows, verl_rows, written

DOCS = Path(__file__).parents[2] / "docs" / "howto"


def blocks(page: str, kind: str, section: str | None = None) -> list[str]:
    text = (DOCS / page).read_text()
    if section is not None:
        text = next(part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith(section))
    return re.findall(rf"```{kind}[^\n]*\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(("section", "package"), [("TextArena", "textarena"), ("gymnasium", "gymnasium")])
def test_experts_win_the_games_configured_on_the_adapters_page(tmp_path: Path, section: str, package: str) -> None:
    pytest.importorskip(package)
    [text] = blocks("adapters.md", "toml", section)
    (tmp_path / "page.toml").write_text(text)
    settings = config.load(str(tmp_path / "page.toml")).environment
    taskset = load_taskset(settings, seed=1)
    assert taskset.has_expert
    for task in taskset.tasks("train", settings.train_tasks)[:5]:
        assert taskset.demonstrate(task, seed=0)[1].value == 1.0


def test_the_options_in_comments_of_the_adapters_page_are_accepted() -> None:
    pytest.importorskip("textarena")
    [text] = blocks("adapters.md", "toml", "TextArena")
    options = tomllib.loads(re.sub(r"^# (?=arguments|seat|reward_range)", "", text, flags=re.MULTILINE))["environment"]
    taskset: Any = load_taskset(config.Config.model_validate({"environment": options}).environment, seed=1)
    assert (taskset.arguments, taskset.reward_range) == ({"max_number": 50}, (0.0, 1.0))


def test_the_configurations_and_rows_of_the_datasets_page_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("math_verify")
    monkeypatch.chdir(tmp_path)
    first, verl, trl = blocks("datasets.md", "toml")
    Path("math.toml").write_text(first)
    written(Path("problems.parquet"), trl_rows(150))
    assert cli.main(["train", "math.toml", "--dry-run"]) == 0
    loaded = config.load("math.toml")
    taskset = load_taskset(loaded.environment, seed=1)
    assert taskset.tasks("train", 50)[0].prompt[-1]["content"].endswith("Put the answer into \\boxed{}.")
    [rows] = blocks("datasets.md", "json")
    Path("rows.jsonl").write_text(rows)
    graders = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    Path("graders.py").write_text(graders)
    options = {"path": "rows.jsonl", "eval_share": 0.0, "warm_start_share": 0.0}
    both = load_taskset(loaded.environment.model_copy(update={"options": options}), seed=1).tasks("train", 2)
    assert [task.payload.get("answer") or task.payload["reward_model"]["ground_truth"] for task in both] == ["3", "3"]
    for text in (verl, trl):
        check_reward(tomllib.loads(text)["reward"]["name"])
    assert json.loads(rows.splitlines()[1]).keys() <= verl_rows(1)[0].keys()
