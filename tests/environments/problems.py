"""Generates arithmetic and algebra problems with answers in LaTeX, as data set rows in TRL's and in verl's format."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def problems(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Return ``count`` triples of question, worked solution with a boxed answer, and answer. All questions differ."""
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
    """Return rows in TRL's format: a prompt (messages or a string), and the columns ``solution`` and ``answer``."""
    return [
        {"prompt": [{"role": "user", "content": q}] if messages else q, "solution": how, "answer": answer}
        for q, how, answer in problems(count, seed)
    ]


def verl_rows(count: int, seed: int = 0) -> list[Row]:
    """Return rows in verl's format, whose answer is ``reward_model.ground_truth``."""
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
    """Write the rows to a Parquet, JSON or JSON Lines file, according to the suffix of ``path``. Returns the path."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=50)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
