"""Tests of docs/howto/rewards.md: its code runs and prints what it should, and the metrics that it names exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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
