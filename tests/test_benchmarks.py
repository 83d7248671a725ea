"""What benchmarks import from the package exists."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

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
