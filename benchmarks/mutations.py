"""Mutation testing: changes the source in one place at a time and reports which changes no test detects.

    python benchmarks/mutations.py --rooms algorithms schedule --count 8 --seed 0 --jobs 2

A room is a package of ``src/gleanrl``. Each mutation is at a random place of a room; it replaces an operator, negates a
condition, changes a constant or removes a call. The tests then run in three parts, until one fails: the room's test
files that mention the changed module, the room's other test files, and those of the loop and of other rooms that
mention the module by its full name. If all pass, the mutation has survived: no test notices what it changed. Where the
tests did not start, nothing is known about the mutation, and it is counted apart.

The tests of each room first run once without a mutation. If one fails, nothing is mutated and the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

ROOT = Path(__file__).parents[1]
NOT_STARTED = "the tests did not start"
CORE = ("schedule", "algorithms", "rollout", "samplers", "learners", "rewards", "experience", "buffer")
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    path: str  # path of the file, relative to the repository
    line: int
    start: int  # index of the first replaced character in the file
    end: int  # index after the last replaced character
    text: str  # the new text
    was: str  # the replaced text

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {' '.join(self.was.split())[:60]!r} -> {' '.join(self.text.split())[:60]!r}"


def find_mutations(path: Path) -> Iterator[Mutation]:
    source = path.read_text(encoding="utf-8")
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.AST) -> tuple[int, int]:
        begin, end = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return (
            begin + len(source[begin:].encode()[: node.col_offset].decode()),
            end + len(source[end:].encode()[: node.end_col_offset].decode()),
        )

    def mutation(start: int, end: int, text: str, line: int) -> Mutation:
        return Mutation(str(path.relative_to(ROOT)), line, start, end, text, source[start:end])

    def visit(node: ast.AST) -> Iterator[Mutation]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and "log" in child.name.split("_"):
                continue
            if child in getattr(node, "decorator_list", ()):  # frozen=True or slots=True changes no result
                continue
            yield from visit(child)
        operator = None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator, left, right = node.ops[0], node.left, node.comparators[0]
        elif isinstance(node, ast.BinOp):
            operator, left, right = node.op, node.left, node.right
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            operator, left, right = node.op, *node.values
        if operator is not None and type(operator) in SWAPS:
            start, end = place(left)[1], place(right)[0]
            between = source[start:end]
            sign = re.search(r"not in|is not|<=|>=|==|!=|//|\bin\b|\bis\b|\band\b|\bor\b|[-+*/%<>]", between)
            if sign:
                yield mutation(start + sign.start(), start + sign.end(), SWAPS[type(operator)], left.end_lineno)
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            start, end = place(node.test)
            yield mutation(start, end, f"not ({source[start:end]})", node.test.lineno)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            start, end = place(node)
            value = (not node.value) if isinstance(node.value, bool) else node.value + 1
            yield mutation(start, end, repr(value), node.lineno)
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call | ast.Await)
            and "log." not in ast.unparse(node)[:4]
        ):
            start, end = place(node)
            yield mutation(start, end, "pass", node.lineno)

    yield from visit(ast.parse(source))


def select_tests(mutation: Mutation, room: str) -> list[list[str]]:
    """Return the test files to run for a mutation, in up to three parts, most specific first.

    The parts are the room's test files that mention the name of the changed module, the room's other test files, and
    those outside the room: the tests of the loop, and test files of other rooms that mention the module's full dotted
    name.
    """
    module = mutation.path.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    stem = module.rsplit(".", 1)[-1]
    naming, rest, elsewhere = [], [], []
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        if path.is_relative_to(ROOT / "tests" / room):
            (naming if stem in path.stem or stem in text else rest).append(name)
        elif module in text or name == "tests/test_train.py":
            elsewhere.append(name)
    return [files for files in (naming, rest, elsewhere) if files]


def run_tests(tree: Path, files: list[str], marks: str, timeout: float | None) -> str:
    """Run test files in the copy of the repository at ``tree``.

    Returns the name of the failed test, or "" if all passed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--tb=no",
        "-m",
        marks,
        *files,
    ]
    try:
        result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "ran out of time"
    if result.returncode in (0, 5):
        return ""
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed[0] if failed else NOT_STARTED)[:110]


def try_mutation(tree: Path, mutation: Mutation, room: str, marks: str, timeout: float) -> tuple[str, float]:
    """Apply the mutation to the copy of the repository at ``tree``, run the tests there, and undo it.

    Returns what `run_tests` returns ("" if the mutation survived), and the seconds that it took.
    """
    path, started = tree / mutation.path, perf_counter()
    source = path.read_text(encoding="utf-8")
    path.write_text(source[: mutation.start] + mutation.text + source[mutation.end :], encoding="utf-8")
    try:
        for files in select_tests(mutation, room):
            if killer := run_tests(tree, files, marks, timeout):
                return killer, perf_counter() - started
        return "", perf_counter() - started
    finally:
        path.write_text(source, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", default=CORE)
    parser.add_argument("--count", type=int, default=8, help="mutations of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--marks", default="not heavy and not slow and not ray", help="which tests run")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a mutation's tests may take")
    options = parser.parse_args()

    chosen: list[tuple[str, Mutation]] = []
    for room in options.rooms:
        places = [m for path in sorted((ROOT / "src/gleanrl" / room).rglob("*.py")) for m in find_mutations(path)]
        chosen += [
            (room, m) for m in random.Random(f"{options.seed} {room}").sample(places, min(options.count, len(places)))
        ]

    with tempfile.TemporaryDirectory(prefix="gleanrl-mutations-") as scratch:
        trees: SimpleQueue[Path] = SimpleQueue()
        for index in range(options.jobs):
            tree = Path(scratch) / str(index)
            for name in ("src", "tests", "recipes", "examples", "benchmarks", "docs"):
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            for file in ROOT.iterdir():
                if file.is_file():
                    shutil.copy(file, tree)
            trees.put(tree)

        for room in dict.fromkeys(room for room, _ in chosen):
            parts = [select_tests(mutation, room) for own, mutation in chosen if own == room]
            files = sorted({file for groups in parts for group in groups for file in group})
            if failed := run_tests(Path(scratch) / "0", files, options.marks, None):
                raise SystemExit(f"{room}, without a mutation: {failed}")

        def run(case: tuple[str, Mutation]) -> tuple[str, float]:
            tree = trees.get()
            try:
                return try_mutation(tree, case[1], case[0], options.marks, options.timeout)
            finally:
                trees.put(tree)

        counts = Counter[str]()
        with ThreadPoolExecutor(options.jobs) as pool:
            for case, (killer, seconds) in zip(chosen, pool.map(run, chosen), strict=True):
                outcome = "SURVIVED" if not killer else "NO TESTS" if killer == NOT_STARTED else "killed"
                counts[outcome] += 1
                print(f"{outcome:<8} {seconds:6.1f} s  {case[1]}\n{'':19}{killer}", flush=True)
        print(f"{counts['killed']} of {len(chosen)} killed, {counts['SURVIVED']} survived", end="")
        print(f"; of {counts['NO TESTS']} the tests did not start" if counts["NO TESTS"] else "")


if __name__ == "__main__":
    main()
