"""The code in docs/howto/environment_service.md works unchanged, with the environment of docs/howto/environment.md."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gleanrl.cli.main import make_parser
from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.service.app import PROBLEMS
from tests.environments.service.world import ROOT, served

PAGE = (ROOT / "docs" / "howto" / "environment_service.md").read_text()
TREASURE = (ROOT / "src" / "gleanrl" / "cli" / "new_environment" / "environment.py").read_text()
CODE = dict(re.findall(r'```python title="([^"]*)"\n(.*?)```', PAGE, re.DOTALL))
CONFIGURATION = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("served") / "environment.py"
    file.write_text(TREASURE)
    with served(f"{file}:TreasureTaskset", "--environment.options.far", "5") as (_, url):
        yield url


@pytest.mark.parametrize("name", CODE)
def test_each_program_of_the_page_plays_an_episode_with_score_one(name: str, url: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(CODE[name])
    answer = subprocess.run([sys.executable, name, url], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"^1\.0$|Score\(value=1\.0", answer.stdout, re.MULTILINE), answer.stdout


def test_the_configuration_of_the_page_loads_the_served_taskset(url: str) -> None:
    settings = EnvironmentSettings(**CONFIGURATION["environment"])
    taskset = load_taskset(settings.model_copy(update={"options": {**settings.options, "url": url}}), seed=1)
    assert taskset.has_expert
    tasks = taskset.tasks("train", settings.train_tasks)
    assert len(tasks) == settings.train_tasks
    assert taskset.demonstrate(tasks[0], seed=0)[1].value == 1.0


def test_the_page_documents_every_option_route_and_status() -> None:
    shown = next(a for a in make_parser()._actions if a.choices).choices
    assert shown is not None
    options = [option for action in shown["serve-env"]._actions for option in action.option_strings]  # type: ignore[index]
    assert len(options) > 8
    assert [o for o in options if o not in PAGE and o not in ("-h", "--help", "--port")] == []
    assert [status for status in PROBLEMS if str(status) not in PAGE and status not in (403, 408)] == []
    for route in (
        "taskset",
        "tasks",
        "create",
        "step",
        "evaluate",
        "conclude",
        "tools",
        "release",
        "prepare",
        "demonstrate",
        "health",
        "profile",
    ):
        assert f"/{route}`" in PAGE
