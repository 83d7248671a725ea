"""Problems made for tests: arithmetic and algebra with answers in LaTeX, in TRL's and verl's rows."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def problems(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Question, worked solution with its answer in a box, and the answer; all questions differ."""
    draw = random.Random(seed)
    found: dict[str, tuple[str, str, str]] = {}
    while len(found) < count:
        a, b, c = draw.randint(2, 40), draw.randint(2, 40), draw.randint(1, 60)
        if draw.random() < 0.5:
            question, answer, how = f"What is {a} + {b}?", str(a + b), f"{a} and {b} make {a + b}."
        else:
            value = Fraction(c - b, a)
            answer = _latex(value)
            question, how = f"Solve {a}x + {b} = {c} for x.", f"So {a}x = {c - b}."
        found[question] = (question, f"{how} The answer is $\\boxed{{{answer}}}$.", answer)
    return list(found.values())


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def trl_rows(count: int, *, messages: bool = True, seed: int = 0) -> list[Row]:
    """TRL's: a prompt and columns."""
    return [
        {"prompt": [{"role": "user", "content": q}] if messages else q, "solution": how, "answer": answer}
        for q, how, answer in problems(count, seed)
    ]


def verl_rows(count: int, seed: int = 0) -> list[Row]:
    """verl's: the truth in a table."""
    return [
        {
            "data_source": "made/up",
            "prompt": [{"role": "user", "content": q}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": index, "answer": how},
        }
        for index, (q, how, answer) in enumerate(problems(count, seed))
    ]


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a file of the kind that its name says."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=50)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
