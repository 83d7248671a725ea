"""The code and the settings in docs/howto/tools.md work unchanged."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.tools import tools_of
from gleanrl.environments.tools.executor import Limits, PythonSandbox, bubblewrap_missing
from gleanrl.utils.importing import load_object

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "tools.md").read_text()
COUNTER, SANDBOX, GRADED, UNITS = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)
OPTIONS = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]


def test_the_counter_of_the_page_loads_and_its_expert_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counter.py").write_text(COUNTER)
    monkeypatch.chdir(tmp_path)
    settings = EnvironmentSettings(**OPTIONS[0]["environment"])
    taskset = load_taskset(settings, seed=1)
    task = taskset.tasks("train", 5)[-1]
    conversation, score = taskset.demonstrate(task, seed=0)  # type: ignore[attr-defined]
    assert score.value == 1.0
    assert conversation[-1]["content"] == f"The counter is at {task.payload['row']['goal']}."
    opening = asyncio.run(taskset.environment(task).reset())
    assert opening.messages[0]["content"] == task.payload["row"]["prompt"]


def test_the_sandbox_program_of_the_page_prints_the_documented_output(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(SANDBOX)
    done = subprocess.run(
        [sys.executable, "alone.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    if bubblewrap_missing():
        pytest.skip("no isolation on this machine")
    (expected,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert done.stdout == expected


def test_the_grading_function_of_the_page_returns_the_share_of_passed_cases(tmp_path: Path) -> None:
    (tmp_path / "graded.py").write_text(GRADED)
    passed = load_object(f"{tmp_path / 'graded.py'}:passed")
    doubles = "import sys\nsys.stdout.write(str(2 * int(input())))"
    programs = [doubles, "print(4)", "raise SystemExit", "import os\nos._exit(0)"]

    async def shares() -> list[float]:
        sandbox = PythonSandbox(Limits(wall_s=2.0))
        return [await passed(sandbox, program, [("2", "4\n"), ("3\n", "6")]) for program in programs]

    assert asyncio.run(shares()) == [1.0, 0.5, 0.0, 0.0]


def test_the_function_of_the_page_is_a_valid_tool(tmp_path: Path) -> None:
    (tmp_path / "units.py").write_text(UNITS)
    convert = load_object(f"{tmp_path / 'units.py'}:convert")
    (tool,) = tools_of(convert)
    assert tool.schema["function"]["parameters"]["required"] == ["value", "unit"]
    assert convert(**tool.check_arguments({"value": 2, "unit": "pounds"})) == 0.90718474


def test_the_table_of_limits_equals_the_defaults_of_limits() -> None:
    documented = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", PAGE, re.MULTILINE))
    limits = Limits()
    assert {name: float(value.replace(",", "")) for name, value in documented.items()} == {
        name: float(getattr(limits, name)) for name in Limits.__slots__
    }
    _, python, search = OPTIONS
    Limits(**{k: v for k, v in python["environment"]["options"]["python"].items() if k != "persistent"})
    from inspect import signature

    from gleanrl.environments.tools.search import SearchTool

    assert set(search["environment"]["options"]["search"]) <= set(signature(SearchTool).parameters)
