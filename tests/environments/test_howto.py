"""The code and the configuration in docs/howto/environment.md work unchanged."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import Split
from gleanrl.runtime.run_folder import RunFolder

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "environment.md").read_text()
ENVIRONMENT, LOOP = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)
CONFIGURATION = re.findall(r"```toml[^\n]*\n(.*?)```", PAGE, re.DOTALL)[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "treasure.py").write_text(ENVIRONMENT)
    (tmp_path / "treasure.toml").write_text(CONFIGURATION)
    (tmp_path / "loop.py").write_text(LOOP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_environment_has_fewer_than_sixty_lines() -> None:
    assert len(ENVIRONMENT.splitlines()) < 60


def test_replaying_the_experts_demonstrations_wins_in_the_example_environment(folder: Path) -> None:
    settings = EnvironmentSettings(**tomllib.loads(CONFIGURATION)["environment"])
    taskset = load_taskset(settings, seed=1)
    assert taskset.has_expert
    counts: dict[Split, int] = {
        "train": settings.train_tasks,
        "eval": settings.eval_tasks,
        "warm_start": settings.warm_start_tasks,
    }
    tasks = {split: taskset.tasks(split, count) for split, count in counts.items()}
    assert {split: len(found) for split, found in tasks.items()} == counts
    assert len({task.id for found in tasks.values() for task in found}) == sum(counts.values())

    async def play() -> None:
        async with EnvironmentPool(taskset, workers=1) as pool:
            for task in tasks["train"][:5]:
                conversation, score = taskset.demonstrate(task, seed=0)
                environment = pool.environment(task)
                observation = await environment.reset()
                for message in conversation:
                    if message["role"] == "user":
                        assert message == observation.messages[0]
                    else:
                        observation = await environment.step(message)
                assert observation.done
                assert observation.score == score
                assert score.value == 1.0

    asyncio.run(play())


def test_the_example_loop_with_an_environment_pool_runs(folder: Path) -> None:
    answer = subprocess.run([sys.executable, "loop.py"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert re.match(r"The treasure is -?\d+ north and -?\d+ east of you. Score\(value=[01]", answer.stdout)


@pytest.mark.heavy
def test_training_on_the_example_environment_improves_held_out_success(folder: Path) -> None:
    command = [sys.executable, "-m", "gleanrl", "train", "treasure.toml", "--run.steps", "30", "--run.threads", "1"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    rows = [row.metrics for row in RunFolder(folder / "runs" / "treasure").read_metrics()]
    curve = [row["eval/sampled/pass@1"] for row in rows if "eval/sampled/pass@1" in row]
    assert curve[0] < 0.75
    assert sum(curve[-3:]) / 3 > 0.8
