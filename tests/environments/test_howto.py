"""The code of docs/howto/environment.md runs as it stands there."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gleanrl.environments import load_taskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import Demonstrator, Split
from gleanrl.settings import EnvironmentSettings

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "environment.md").read_text()
ENVIRONMENT, LOOP = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)
CONFIGURATION = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "guess.py").write_text(ENVIRONMENT)
    (tmp_path / "loop.py").write_text(LOOP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_environment_takes_under_sixty_lines() -> None:
    assert len(ENVIRONMENT.splitlines()) < 60


def test_the_environment_plays_as_its_expert_says(folder: Path) -> None:
    settings = EnvironmentSettings(**CONFIGURATION["environment"])
    taskset = load_taskset(settings, seed=1)
    assert isinstance(taskset, Demonstrator)
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


def test_the_pool_works_in_a_loop_of_ones_own(folder: Path) -> None:
    answer = subprocess.run([sys.executable, "loop.py"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert re.match(r"(right|lower|higher) Score\(value=", answer.stdout)
