"""The files that `gleanrl env init` writes work, and docs/howto/environment.md shows them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gleanrl.cli.main import main
from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import Split
from gleanrl.runtime.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "environment.md").read_text()
ENVIRONMENT, LOOP = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)
CONFIGURATION = re.findall(r"```toml[^\n]*\n(.*?)```", PAGE, re.DOTALL)[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that `gleanrl env init` has written, which is the current one, with the page's loop in it."""
    assert main(["env", "init", str(tmp_path / "treasure")]) == 0
    (tmp_path / "treasure" / "loop.py").write_text(LOOP)
    monkeypatch.chdir(tmp_path / "treasure")
    return tmp_path / "treasure"


def test_the_page_shows_the_files_that_are_written(folder: Path) -> None:
    assert (folder / "environment.py").read_text() == ENVIRONMENT
    assert (folder / "train.toml").read_text() == CONFIGURATION


def test_a_new_environment_passes_its_own_tests_and_trains_for_two_steps(folder: Path) -> None:
    less = {
        "run.steps": 2,
        "run.threads": 1,
        "warm_start.demonstrations": 60,
        "warm_start.batch": 12,
        "model.layers": 2,
    }
    less |= {"schedule.batch": 4, "environment.eval_tasks": 2, "evaluation.at_start": "false"}
    train = ["gleanrl", "train", "train.toml", *(f"--{key}={value}" for key, value in less.items())]
    for command in (["pytest", "-q", "-p", "no:cacheprovider"], train):
        run = [sys.executable, "-m", *command]
        ended = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=250)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = RunFolder(folder / "runs" / "treasure").read_metrics()
    assert [row.step for row in rows] == [0, 1, 2]
    assert rows[2].metrics["tokens/trained"] > 0


def test_a_folder_that_has_such_a_file_is_left_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "environment.py").write_text("mine")
    (folder / "train.toml").unlink()
    assert main(["env", "init", str(folder)]) == 2
    assert "environment.py" in capsys.readouterr().err
    assert (folder / "environment.py").read_text() == "mine"
    assert not (folder / "train.toml").exists()


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
    command = [sys.executable, "-m", "gleanrl", "train", "train.toml", "--run.threads", "1"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    rows = [row.metrics for row in RunFolder(folder / "runs" / "treasure").read_metrics()]
    curve = [row["eval/sampled/pass@1"] for row in rows if "eval/sampled/pass@1" in row]
    assert curve[0] < 0.75
    assert sum(curve[-3:]) / 3 > 0.8
