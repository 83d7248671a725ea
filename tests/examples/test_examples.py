"""Tests of the replay examples as subprocesses, and of the excerpts of them in docs/howto/loop.md."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = re.compile(r"step (\d+): success (\d\.\d\d), (\d+) stored next to (\d+) prompts, (\d+) in the pool")
PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "loop.md").read_text()


def run(script: str, options: str, folder: Path) -> list[tuple[int, ...]]:
    """Run an example; return (step, stored rollouts, prompts, size of the pool) for each step that it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--prompts", "4", "--words", "4", *options.split()],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    found = [match.groups() for line in done.stdout.splitlines() if (match := LINE.fullmatch(line))]
    return [(int(step), int(stored), int(prompts), int(size)) for step, _, stored, prompts, size in found]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("script", "package"), [("trl_replay.py", "trl"), ("verl_replay.py", "verl")])
def test_an_example_trains_and_replays_stored_successes(script: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    steps = run(script, "--steps 4 --pool kept.sqlite", tmp_path)
    assert [(step, prompts) for step, _, prompts, _ in steps] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert steps[0][1] == 0
    assert sum(stored for _, stored, _, _ in steps) > 0
    assert steps[-1][3] > 0
    [(_, stored, _, _)] = run(script, "--steps 1 --warm-steps 1 --pool kept.sqlite", tmp_path)
    # One warm-start step leaves a model that solves nothing, so these rollouts come from the first run's pool.
    assert stored > 0


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_excerpts_of_the_page_occur_in_the_examples() -> None:
    sources = [(EXAMPLES / name).read_text() for name in ("trl_replay.py", "verl_replay.py")]
    *excerpts, _ = blocks("python")
    assert [sum(excerpt in source for source in sources) for excerpt in excerpts] == [1, 1, 1]
    line, _ = blocks("text")
    assert LINE.fullmatch(line.strip())


def test_the_page_s_code_for_other_training_loops_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(blocks("python")[-1])
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks("text")[-1]
