"""docs/howto/agents.md: its files and its command train an agent."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gleanrl.runtime.run_folder import RunFolder
from tests.environments.problems import trl_rows, written

for package in ("aiohttp", "openai", "math_verify"):
    pytest.importorskip(package)

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "agents.md").read_text()
LESS = {
    "run.steps": 1, "run.threads": 1, "warm_start.demonstrations": 8, "warm_start.steps": 2, "warm_start.batch": 4,
    "schedule.batch": 2, "schedule.group": 2, "evaluation.at_start": "false", "context.max_tokens_per_turn": 8,
}  # fmt: skip


def test_the_files_and_the_command_of_the_page_train_the_agent(tmp_path: Path) -> None:
    for kind in ("python", "toml"):
        name, text = re.findall(rf'```{kind} title="(.*?)"\n(.*?)```', PAGE, re.DOTALL)[0]
        (tmp_path / name).write_text(text)
    [row] = re.findall(r"```json[^\n]*\n(.*?)```", PAGE, re.DOTALL)
    rows = trl_rows(149, messages=False)
    assert json.loads(row).keys() == rows[0].keys()
    written(tmp_path / "tasks.jsonl", [json.loads(row), *rows])
    program, *command = shlex.split(re.findall(r"^gleanrl train .*", PAGE, re.MULTILINE)[0])
    arguments = [sys.executable, "-m", program, *command, *(f"--{key}={value}" for key, value in LESS.items())]
    ended = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [folder] = [path.parent for path in tmp_path.rglob("metrics.jsonl")]
    assert RunFolder(folder).read_metrics()[-1].step == 1
    played = [record.trajectory for record in RunFolder(folder).read_rollouts(1)]
    assert len(played) == 4
    assert all(trajectory.score.valid and trajectory.info["turns"] == 1 for trajectory in played)
