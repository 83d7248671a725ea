"""Records why episodes of a run or of an evaluation have no score, and describes how many these are.

A failed reward never counts as 0, so nothing else in the results shows that scores were lost. The end of a run, the
report and the table of `gleanrl evaluate` show what `describe_failures` returns.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from gleanrl.runtime.run_folder import Row, RunFolder, read_json_lines
from gleanrl.types import Trajectory

LONGEST = 300  # maximum number of characters of a reason
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")  # parts of a message in which failures of one kind may differ
_COUNTS = {
    "training episodes": ("episode/failed", "episode/ended"),
    "evaluation attempts": ("eval/failed", "eval/attempts"),
}
"""What is counted -> the metrics with the number of failures and with the number of all."""


def is_failure(trajectory: Trajectory) -> bool:
    """Return whether the trajectory has no score although the reward applies to it."""
    return trajectory.score.applicable and not trajectory.score.valid


def record_failures(folder: RunFolder, of: str, step: int, trajectories: Iterable[Trajectory]) -> None:
    """Append the reasons of all failures among ``trajectories`` to the folder's failures.jsonl.

    ``of`` says what they are, "training" or "evaluation". Reasons that differ only in numbers and in quoted names are
    counted together, as in ``{"step": 12, "of": "training", "reasons": {"TimeoutError: no answer within 60 s": 3}}``.
    If the run is resumed and repeats a step, the later line for it takes precedence, as in metrics.jsonl.
    """
    counts, reasons = Counter[str](), dict[str, str]()
    for trajectory in filter(is_failure, trajectories):
        reason = " ".join((trajectory.score.explanation or "no reason given").split())[:LONGEST]
        reason = reason.encode("utf-8", "backslashreplace").decode()  # it may hold lone surrogates
        kind = _VARYING.sub("", reason)
        counts[kind] += 1
        reasons.setdefault(kind, reason)
    if counts or folder.failures_path.exists():
        line = {"step": step, "of": of, "reasons": {reasons[kind]: count for kind, count in counts.items()}}
        with folder.failures_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def describe_failures(folder: RunFolder, rows: Sequence[Row]) -> str | None:
    """Return a line about the episodes that have no score, with the commonest reason; None if there are none.

    ``rows`` are the metrics in ``folder``.
    """
    found = []
    for what, (failed, ended) in _COUNTS.items():
        number = sum(row.metrics.get(failed, 0.0) for row in rows)
        if number:
            found.append(f"{number:.0f} of {sum(row.metrics.get(ended, 0.0) for row in rows):.0f} {what}")
    if not found:
        return None
    counts, reasons = Counter[str](), dict[str, str]()
    latest = {(line["step"], line["of"]): line["reasons"] for line in read_json_lines(folder.failures_path)}
    for reason, count in (pair for found_in_step in latest.values() for pair in found_in_step.items()):
        kind = _VARYING.sub("", reason)
        counts[kind] += count
        reasons[kind] = reason
    text = f"{' and '.join(found)} have no score, because the reward or the environment failed"
    if counts:
        [(kind, _)] = counts.most_common(1)
        text += f"; {'the' if len(counts) == 1 else 'the commonest'} reason: {reasons[kind]}"
    return text
