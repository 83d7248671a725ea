"""The reference describes every name that users import, every public member of it, and every setting.

The source is parsed and not imported, as mkdocstrings does when it makes the pages. So a page has what is found here,
and no optional package has to be installed.
"""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

from gleanrl.config.loading import JOBS, fields
from gleanrl.config.settings import Config
from gleanrl.environments import BUILT_IN as ENVIRONMENTS
from gleanrl.rewards.adapter import BUILT_IN as REWARDS
from gleanrl.samplers import SAMPLERS
from gleanrl.utils.settings import JobConfig
from tests.cli.conftest import CONFIG

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tree(module: str) -> ast.Module | None:
    """Parse the file of a module; None if there is no such module."""
    path = ROOT.joinpath("src", *module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def statements(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statements of a module or class, also those under ``if``, and whether a docstring follows each."""
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.If):
            yield from statements([*statement.body, *statement.orelse])
        else:
            value = after.value if isinstance(after, ast.Expr) else None
            yield statement, isinstance(value, ast.Constant) and isinstance(value.value, str)


def defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module or a class defines."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)]


def find(path: str) -> tuple[str, ast.stmt | ast.Module, bool]:
    """Follow imports from a dotted name to its definition.

    Returns the full name and the definition, and whether it has a docstring. Raises `LookupError` if there is none.
    """
    if found := tree(path):
        return path, found, ast.get_docstring(found) is not None
    module, _, name = path.rpartition(".")
    if (inside := tree(module)) is None:
        raise LookupError(path)
    for statement, described in statements(inside.body):
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if name == (alias.asname or alias.name):
                    return find(f"{statement.module}.{alias.name}")
        elif name in defined(statement):
            if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                described = ast.get_docstring(statement) is not None
            return path, statement, described
    raise LookupError(path)


def bases(path: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class and those that it derives from, as far as they are in the package."""
    yield path, node
    for base in node.bases:
        try:
            name, found, _ = find(f"{path.rpartition('.')[0]}.{ast.unparse(base).partition('[')[0]}")
        except LookupError:
            continue
        if isinstance(found, ast.ClassDef):
            yield from bases(name, found)


def members(path: str, node: ast.ClassDef) -> dict[str, bool]:
    """Return the public members of a class, and whether a description of each is in it or in a class above it."""
    found: dict[str, bool] = {}
    for number, (_, cls) in enumerate(bases(path, node)):
        listed = re.findall(r"^ *(\w+)(?: \(.*\))?: ", ast.get_docstring(cls) or "", re.MULTILINE)  # Args, Attributes
        for statement, described in statements(cls.body):
            if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                described = ast.get_docstring(statement) is not None
            for name in defined(statement):
                if not name.startswith("_") and (number == 0 or name in found):
                    found[name] = found.get(name, False) or described or name in listed
    return found


@cache
def reference() -> dict[str, ast.stmt | ast.Module]:
    """Return all that the pages describe, by its full name. A directive of a module stands for all that is in it."""
    described = {}
    for page in PAGES:
        for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            name, node, _ = find(path)
            described[name] = node
            if isinstance(node, ast.Module):
                inside = [n for statement, _ in statements(node.body) for n in defined(statement)]
                described |= {f"{name}.{n}": find(f"{name}.{n}")[1] for n in inside if not n.startswith("_")}
    return described


def imported(code: str) -> Iterator[str]:
    """Yield the dotted names that Python code imports from the package."""
    for node in ast.walk(ast.parse(dedent(code))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gleanrl":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def exported() -> Iterator[str]:
    """Yield the names in the ``__all__`` of the package and of its subpackages."""
    for file in sorted((ROOT / "src" / "gleanrl").rglob("__init__.py")):
        package = ".".join(file.parent.relative_to(ROOT / "src").parts)
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and defined(statement) == ["__all__"]:
                yield from (f"{package}.{name}" for name in ast.literal_eval(statement.value))


def test_every_name_that_users_import_or_select_is_in_the_reference() -> None:
    names = set(exported())
    for page in PAGES:
        for code in re.findall(r"^```python.*?\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            names |= set(imported(code))
    for file in (*(ROOT / "examples").glob("*.py"), *(ROOT / "recipes").glob("*.py")):
        names |= set(imported(file.read_text(encoding="utf-8")))
    paths = [*(known.path for known in ENVIRONMENTS.values()), *REWARDS.values(), *SAMPLERS.values()]
    names |= {path.replace(":", ".") for path in paths}
    sections = {cls for job in (Config, *JOBS.values()) for cls in sections_of(job)}
    missing = sorted({find(name)[0] for name in names} - set(reference()) - sections)
    assert len(names) > 60
    assert not missing


def sections_of(job: type[JobConfig]) -> set[str]:
    """Return the full names of the classes of a configuration's sections, which the page of the settings describes."""
    found = [field.annotation for field in job.model_fields.values()]
    return {f"{cls.__module__}.{cls.__name__}" for cls in found if isinstance(cls, type)}


def test_all_that_is_in_the_reference_and_its_public_members_have_a_description() -> None:
    missing = []
    for path, node in reference().items():
        if not find(path)[2]:
            missing.append(path)
        if isinstance(node, ast.ClassDef):
            missing += [f"{path}.{name}" for name, described in members(path, node).items() if not described]
    assert len(reference()) > 100
    assert not missing


@pytest.mark.parametrize("job", [Config, *JOBS.values()])
def test_the_page_of_the_settings_has_every_key_with_its_description(job: type[JobConfig]) -> None:
    page = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8")
    fill = runpy.run_path(str(ROOT / "docs/settings_tables.py"))["on_page_markdown"]
    rows = [line for line in fill(page).splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(list(fields(each))) for each in (Config, *JOBS.values()))
    for name, field in fields(job):
        text = " ".join((field.description or "").split())
        assert text
        assert any(row.startswith(f"| `{name}`") and text.replace("|", "\\|") in row for row in rows)


def test_the_script_of_the_page_on_python_trains_and_reports(tmp_path: Path) -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    (script,) = re.findall(r'```python title="run.py"\n(.*?)```', page, re.DOTALL)
    (tmp_path / "run.py").write_text(script)
    (tmp_path / "train.toml").write_text(CONFIG)
    ended = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    curves = re.findall(r"^lr-(\S+) \[(.*)\]$", ended.stdout, re.MULTILINE)
    assert [lr for lr, _ in curves] == ["1e-4", "3e-4"]
    assert all(len(numbers.split()) == 6 for _, numbers in curves)
    assert len(list(tmp_path.glob("runs/lr-*/report.html"))) == 2


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs itself reports a broken link or entry of the navigation as an error, but not a page that it lacks."""
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} == listed
