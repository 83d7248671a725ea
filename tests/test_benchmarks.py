"""What benchmarks import from the package exists, and those that reach into it furthest still run."""

from __future__ import annotations

import ast
import importlib
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.experience.pool.pool import ExperiencePool

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_names_that_a_benchmark_imports_exist(path: Path) -> None:
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] == "gleanrl":
            try:
                module = importlib.import_module(statement.module or "")
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("gleanrl"):
                    raise
                continue  # an optional dependency is not installed
            for each in statement.names:
                if not hasattr(module, each.name):
                    importlib.import_module(f"{statement.module}.{each.name}")


def benchmark(name: str) -> dict[str, Any]:
    """Return the names that a benchmark defines."""
    return runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / f"{name}.py"))


def test_the_benchmark_of_the_driver_runs_the_training_loop_with_its_own_parts() -> None:
    driver = benchmark("driver")
    assert driver["step_s"](driver["World"](observed=4, sampled=4), (2, 2, 2), 3) > 0


def test_the_benchmark_of_the_pool_fills_it_with_rows_as_the_pool_writes_them(tmp_path: Path) -> None:
    pool_benchmark = benchmark("pool")
    episodes = pool_benchmark["Episodes"](60, np.random.default_rng(0))
    with ExperiencePool(tmp_path / "pool.sqlite", vocabulary=pool_benchmark["VOCABULARY"]) as pool:
        pool_benchmark["fill"](pool, 0, 70, episodes)
        assert not pool.verify()
        assert pool.stats()["trajectories"] == 70
        assert pool_benchmark["measure"](pool, 70, episodes, 1, time.perf_counter)["observe"] > 0
