"""Rules for the source code: which subpackages may depend on which, which may import torch, and which words are banned.

A "room" is a subpackage or a top-level module of gleanrl.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

ROOMS: tuple[str, ...] = (
    "utils",
    "types buffer",
    "protocols embodied",
    "config",
    "schedule",
    "rollout",
    "algorithms",
    "samplers learners rewards experience environments curriculum",
    "train",
    "runtime",
    "tracking simulate",
    "cli",
    "__main__",
)
"""The rooms in layers, from the bottom to the top. A room may import from itself and from lower layers only."""

TORCH = (
    "algorithms",
    "buffer",
    "cli.doctor",
    "embodied",
    "learners",
    "rewards.model",
    "runtime",
    "samplers",
    "utils.products",
    "utils.weights",
)
NO_TORCH = ("samplers.openai", "samplers.scripted")
LAZY = ("environments.adapters", "environments.alfworld", "environments.textworld", "runtime.ray", "samplers.vllm")
"""Modules that import a third-party package at their top. Other modules import them only inside functions."""


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    eager: bool  # runs when the module is imported


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module of the package, by the module's dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str) -> tuple[Import, ...]:
    """Return what a module imports at run time, without imports for type checkers."""
    return tuple(_imports(ast.parse(modules()[name].read_text(encoding="utf-8")), eager=True))


def _imports(node: ast.AST, eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, eager) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute here"
            for alias in child.names:
                deeper = f"{child.module}.{alias.name}"
                yield Import(deeper if deeper in modules() else child.module or "", child.lineno, eager)
        inside_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports(child, eager and not inside_function)


def rank(module: str) -> int:
    room = module.split(".")[1]
    for index, rooms in enumerate(ROOMS):
        if room in rooms.split():
            return index
    raise AssertionError(f"{room!r} is a new room: give it its place in ROOMS")


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"gleanrl.{name}.") for name in names)


def test_rooms_import_only_from_lower_layers() -> None:
    wrong = [
        f"{name}:{i.line} imports {i.target}"
        for name in modules()
        for i in imports(name)
        if name != "gleanrl" and i.eager and i.target.startswith("gleanrl.")
        and i.target.split(".")[1] != name.split(".")[1] and rank(i.target) >= rank(name)
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_modules_have_no_circular_imports() -> None:
    """Imports inside functions count too."""
    edges = {name: {i.target for i in imports(name) if i.target in modules()} - {name} for name in modules()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_torch_is_imported_only_in_the_listed_modules() -> None:
    wrong = [
        f"{name}:{i.line} imports {i.target}"
        for name in modules()
        for i in imports(name)
        if i.target.split(".")[0] in {"torch", "transformers"} and (within(name, NO_TORCH) or not within(name, TORCH))
    ]
    assert not wrong, "\n".join(wrong)


def test_adapters_are_imported_only_inside_functions() -> None:
    wrong = [
        f"{name}:{i.line} imports {i.target}"
        for name in modules()
        for i in imports(name)
        if i.eager and not within(name, LAZY) and i.target.startswith("gleanrl.") and within(i.target, LAZY)
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_the_package_takes_under_0_3_s_and_does_not_import_torch() -> None:
    code = (
        "import sys, time; start = time.process_time(); import gleanrl; spent = time.process_time() - start;"
        "gleanrl.Trajectory; print(spent, [m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    spent, heavy = zip(*(run.stdout.split(" ", 1) for run in runs), strict=True)
    assert {text.strip() for text in heavy} == {"[]"}
    assert min(map(float, spent)) < 0.3


def test_the_package_tells_type_checkers_to_read_its_annotations() -> None:
    assert (SOURCE / "gleanrl" / "py.typed").is_file()


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    forbidden = ("/" + "work/", "/" + "root/", "localhost" + ":3128")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".cfg", ""}:
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [f for f in forbidden if f in text], f"{name} names a folder of one machine"


def test_no_committed_file_is_larger_than_a_mebibyte() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    large = [name for name in listed.stdout.split("\0") if name and (ROOT / name).stat().st_size > 2**20]
    assert not large


def test_prose_and_names_use_plain_words() -> None:
    """Words that earlier texts used with an unusual meaning occur neither as words nor as parts of identifiers."""
    banned = re.compile(r"(?<![a-z])(told|nobody|somebody|anew|whoever|mends?|mended|beside)(?![a-z])", re.IGNORECASE)
    texts = {".py", ".md", ".js", ".html", ".css", ".toml"}
    files = [ROOT / "README.md", *SOURCE.rglob("*"), *(ROOT / "docs").rglob("*")]
    found = []
    for path in files:
        if path.suffix in texts:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if word := banned.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {word[0]!r} in {line.strip()[:80]!r}")
    assert not found, "\n".join(found)
