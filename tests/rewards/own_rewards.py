"""Reward functions as users of TRL and verl write them, for data sets of texts and of conversations."""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """In the form of verl: 1 for the right boxed answer, plus a thousandth of the row's index."""
    right = float(f"{{{ground_truth}}}" in solution_str)
    return {"score": right + extra_info["index"] / 1000, "right": right, "known": data_source == "made/up"}


def boxed(completions: list[Any], answer: list[str], **columns: Any) -> list[float | None]:
    """In the form of TRL, for conversations: 1 for the right boxed answer, None where the right answer is negative."""
    found = [re.findall(r"\\boxed\{(.*)\}", messages[-1]["content"]) for messages in completions]
    return [
        None if right.startswith("-") else float(bool(box) and box[-1] == right)
        for box, right in zip(found, answer, strict=True)
    ]


def terse(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """In the form of TRL, for a data set of texts: a number from the lengths of prompt and completion."""
    return [len(c) + 100 * len(p) + float(a in c) for p, c, a in zip(prompts, completions, answer, strict=True)]
