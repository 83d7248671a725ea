"""Tests of docs/howto/rewards.md and rubrics.md: their code runs and prints what it should, and the metrics that they
name exist."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards import RewardAgent
from tests.rewards.service import Plan, serving

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "rewards.md"


def test_the_code_of_the_page_prints_the_shown_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python.*?\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)  # without the __future__ import of this file
    names["scorer"].close()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:3]) == ["sum-0 [0.0, 0.0, 0.0]", "sum-1 [0.99, 0.0, 0.0]", "sum-2 [0.0, 0.97, 0.0]"]
    assert lines[3] == "[0.99, 0.97] 0.0"
    assert lines[4:6] == ["[0.0]", "True"]
    assert [line.split()[1] for line in lines[6:]] == ["0.0", "1.0"]


def test_every_metric_of_the_page_exists() -> None:
    from gleanrl.rewards.statistics import Statistics

    statistics = Statistics()
    statistics.total.add(1.0)
    statistics.answer.add(1.0)
    statistics.add_cost({"cost/prompt_tokens": 1.0, "cost/completion_tokens": 1.0})
    statistics.failed["CAUSE"] += 1
    known = statistics.metrics(0, 0)
    text = PAGE.read_text(encoding="utf-8").partition("## Metrics")[2]
    named = re.findall(r"`((?:service|time)/\w+(?:/CAUSE)?)`", text)
    assert len(named) >= 12
    assert [name for name in named if name not in known] == []


def test_the_page_on_rubrics_is_walked_literally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scripted judge gives the verdicts that a good judge would give on the answers of the page."""
    quality = {"9, so 9": (10, "yes", "every step", "yes"), "As I said": (0, "no", "no step", "no")}

    def says(body: Mapping[str, Any]) -> str:
        def verdict(text: str) -> tuple[Any, ...]:
            return next((given for part, given in quality.items() if part in text), (8, "yes", "no step", "yes"))

        prompt = body["messages"][-1]["content"]
        if members := re.findall(r"<attempt-(\w)>\n(.*?)\n</attempt", prompt, re.DOTALL):
            return json.dumps({"reasoning": {}, "scores": {name: verdict(text)[0] for name, text in members}})
        response = prompt.partition("<response>")[2].partition("</response>")[0]
        fitting = dict(zip(("score", "correct", "steps", "brief"), verdict(response), strict=True))
        names = body["response_format"]["json_schema"]["schema"]["properties"]
        return json.dumps({n: {"reasoning": "so", "verdict": fitting[n]} if n in fitting else "so" for n in names})

    page = (ROOT / "docs" / "howto" / "rubrics.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with serving(Plan(says=says)) as service:
        for name, block in re.findall(r'```toml title="(.*?)"\n(.*?)```', page, re.DOTALL):
            (tmp_path / name).write_text(block.replace("http://localhost:8000", service.url))
            RewardAgent(settings=RewardSettings(**tomllib.loads(block)["reward"]))
        for name, block, said in re.findall(r'```python title="(.*?)"\n(.*?)```.*?```text\n(.*?)```', page, re.DOTALL):
            exec(compile(block, name, "exec", dont_inherit=True), {})
            assert capsys.readouterr().out == said
    assert len(list(tmp_path.glob("*.toml"))) == 4
    assert len(service.bodies) == 3 * 2 + 1
