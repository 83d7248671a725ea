"""The README's Python code runs, its picture equals the output of the script that draws it, and its links exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_python_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    exec(compile(code.group(1), "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() == "0 [0.99, -0.08]"


def test_the_picture_of_the_system_equals_the_output_of_its_script() -> None:
    draw = runpy.run_path(str(ROOT / "docs/assets/system.py"))["draw"]
    assert (ROOT / "docs/assets/system.svg").read_text(encoding="utf-8") == draw()


def test_every_relative_link_of_the_readme_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
    assert links
    assert not missing
