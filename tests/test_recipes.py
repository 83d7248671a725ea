"""The recipes run as programs, in the way a reader would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.mark.slow
def test_the_minimal_recipe_trains() -> None:
    options = "--steps 2 --train-tasks 4 --groups 2 --members 3 --updates 2"
    options += " --demonstrations 20 --warm-steps 5 --eval-tasks 2"
    done = subprocess.run(
        [sys.executable, str(RECIPES / "minimal.py"), *options.split()],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == ["step 1", "step 2"]
    assert any(line.startswith("held-out success after RL:") for line in lines)
