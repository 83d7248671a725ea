"""The rules of the house, read from the imports: what may depend on what, who may hold torch, how big a part may be."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(floor.split())
    for floor in (
        "errors guidance_settings job ray_settings seeding settings task_settings thinking types",
        "atomic bell cache cluster importing latency printing registry sandbox virtual_time workload",
        "encoding protocols",
        "context conversation credit estimators lease loss loss_statistics policy_losses records rollout rows schedule "
        "staleness timeline tool_calls tool_templates",
        "batch buffer embodied environments evaluation experience learners microbatch monitors rewards runfolder "
        "samplers",
        "checkpoints curriculum metrics report simulated simulated_cluster simulation task_order train",
        "config",
        "buffer_cli cluster_cli doctor pool_cli runtime serve_cli settings_cli simulate_cli simulate_options",
        "__main__ cli",
    )
)
"""A part imports from its own floor and those below. What is new gets its place here, on purpose."""

MAY_HOLD_TORCH = frozenset(
    {
        *("batch", "buffer", "credit", "doctor", "embodied", "estimators", "learners", "loss", "loss_statistics"),
        *("microbatch", "policy_losses", "rewards.model", "runtime", "samplers"),
    }
)  # of samplers only some, below
TORCH_FREE = ("samplers.scripted", "samplers.openai", "samplers")
ADAPTERS = frozenset(
    {
        *(f"gleanrl.environments.{name}" for name in ("alfworld", "textworld", "reasoning_gym", "service")),
        *(f"gleanrl.environments.{name}" for name in ("textarena", "gymnasium_text", "dataset")),
        *(f"gleanrl.environments.{name}" for name in ("verifiers", "openenv")),
        *(f"gleanrl.monitors.{name}" for name in ("tensorboard", "wandb", "trackio", "mlflow")),
        "gleanrl.embodied.environments",
        "gleanrl.samplers.vllm",
        "gleanrl.runtime.ray",
        "gleanrl.runtime.ray_channel",
    }
)
"""Modules that stand for a third party: found by name, imported when used."""

HELP = "import sys; sys.argv = ['gleanrl', '--help']; from gleanrl.cli import main; sys.exit(main())"
MAX_LINES = 400
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    eager: bool  # runs when the module is imported


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str) -> tuple[Import, ...]:
    """What a module imports at run time; imports for type checkers do not count."""
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    return tuple(_imports(tree, eager=True))


def _imports(node: ast.AST, eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, eager) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute here"
            base = child.module or ""
            for alias in child.names:
                deeper = f"{base}.{alias.name}"
                yield Import(deeper if deeper in modules() else base, child.lineno, eager)
        inside_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports(child, eager and not inside_function)


def part(name: str) -> str:
    """`gleanrl.samplers.scripted` -> `samplers`."""
    return name.split(".")[1] if "." in name else ""


def floor(name: str) -> int:
    for index, parts in enumerate(FLOORS):
        if part(name) in parts:
            return index
    raise AssertionError(f"{name} has no floor yet: give {part(name)!r} its place in FLOORS of {Path(__file__).name}")


inner = [name for name in modules() if part(name)]


@pytest.mark.parametrize("name", inner)
def test_dependencies_point_one_way(name: str) -> None:
    upwards = [
        f"line {i.line} imports {i.target}"
        for i in imports(name)
        if i.eager and i.target.startswith("gleanrl.") and floor(i.target) > floor(name)
    ]
    assert not upwards, f"{name}: " + "; ".join(upwards)


@pytest.mark.parametrize("name", inner)
def test_only_those_who_compute_hold_torch(name: str) -> None:
    short = name.removeprefix("gleanrl.")
    if {part(name), short} & MAY_HOLD_TORCH and short not in TORCH_FREE:
        return
    heavy = [f"line {i.line}: {i.target}" for i in imports(name) if i.target.split(".")[0] in {"torch", "transformers"}]
    assert not heavy, f"{name} imports {heavy}"


@pytest.mark.parametrize("name", inner)
def test_nothing_imports_an_adapter_before_it_is_used(name: str) -> None:
    def adapter(module: str) -> str | None:
        return next((a for a in ADAPTERS if module == a or module.startswith(f"{a}.")), None)

    eager = [
        f"line {i.line}: {i.target}"
        for i in imports(name)
        if i.eager and adapter(i.target) and adapter(i.target) != adapter(name)
    ]
    # An adapter may be spread over files beside it (`textworld_engine`), which carry its name.
    own = [a.rpartition(".")[2] for a in ADAPTERS]
    if not any(name.rpartition(".")[2].startswith(own_name) for own_name in own):
        assert not eager, f"{name} imports {eager}"


@pytest.mark.parametrize("name", list(modules()))
def test_a_file_holds_one_idea(name: str) -> None:
    lines = modules()[name].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES, f"{name} has {len(lines)} lines: split it along its ideas"


@pytest.mark.parametrize("name", list(modules()))
def test_a_function_holds_one_idea(name: str) -> None:
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    long = {f.name: _lines_of_code(f) for f in functions if _lines_of_code(f) > MAX_FUNCTION_LINES}
    assert not long, f"{name}: {long}"


def _lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From its name to its end; the docstring explains and does not count."""
    body = function.body
    explained = body[0] if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else None
    docstring = (explained.end_lineno or 0) - explained.lineno + 1 if explained else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_importing_the_package_is_instant_and_leaves_torch_alone() -> None:
    code = (
        "import sys, time; start = time.process_time(); import gleanrl; spent = time.process_time() - start;"
        "gleanrl.Trajectory; print(spent, [m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])"
    )
    best = 1e9
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(
            " ", 1
        )
        assert out[1].strip() == "[]"
        best = min(best, float(out[0]))
    assert best < 0.3


def test_help_comes_within_a_second() -> None:
    if "gleanrl.cli" not in modules():
        pytest.skip("there is no command line yet")
    spent = []
    for _ in range(3):
        start = time.perf_counter()
        out = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
        spent.append(time.perf_counter() - start)
        assert out.returncode == 0, out.stderr
        assert "train" in out.stdout
    assert min(spent) < 1.0 or min(spent) < 3.0 * _bare_start()


def _bare_start() -> float:
    """What starting Python costs on this machine now: a busy one is forgiven."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy, argparse"], check=True)
    return time.perf_counter() - start


def test_no_file_names_the_machine_it_was_written_on() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    forbidden = ("/" + "work/", "/" + "root/", "localhost" + ":3128")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".cfg", ""}:
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [f for f in forbidden if f in text], f"{name} names a folder of one machine"
