"""The examples run as a reader would run them, and replay."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = re.compile(r"step (\d+): success (\d\.\d\d), (\d+) stored beside (\d+) prompts, (\d+) in the pool")
PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "loop.md").read_text()
OPTIONS = "--steps 4 --prompts 4 --members 4 --words 4 --warm-steps 72"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "package"), [("trl_replay.py", "trl"), ("verl_replay.py", "verl")])
def test_an_example_trains_and_replays(script: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    pool = tmp_path / "experience.sqlite"
    for started_with_experience in (False, True):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / script), *OPTIONS.split(), "--pool", str(pool)],
            capture_output=True,
            text=True,
            timeout=280,
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        assert done.returncode == 0, done.stderr
        lines = [match.groups() for line in done.stdout.splitlines() if (match := LINE.fullmatch(line))]
        assert [int(line[0]) for line in lines] == [0, 1, 2, 3]
        assert all(int(line[3]) == 4 for line in lines)
        assert (int(lines[0][2]) > 0) == started_with_experience
        assert sum(int(line[2]) for line in lines) > 0
        assert int(lines[-1][4]) > 0


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_the_examples_as_they_are() -> None:
    sources = [(EXAMPLES / name).read_text() for name in ("trl_replay.py", "verl_replay.py")]
    *excerpts, _ = blocks("python")
    assert [sum(excerpt in source for source in sources) for excerpt in excerpts] == [1, 1, 1]
    line, _ = blocks("text")
    assert LINE.fullmatch(line.strip())


def test_the_code_for_any_other_loop_runs(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(blocks("python")[-1])
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks("text")[-1]
