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


def record_failures(folder: RunFolder, step: int, trajectories: Iterable[Trajectory]) -> None:
    """Append the reasons of all failures among ``trajectories`` to the folder's failures.jsonl.

    Reasons that differ only in numbers and in quoted names are counted together, in a line such as
    ``{"step": 12, "count": 3, "reason": "TimeoutError: no answer within 60 s"}``.
    """
    counts, reasons = Counter[str](), dict[str, str]()
    for trajectory in filter(is_failure, trajectories):
        reason = " ".join((trajectory.score.explanation or "no reason given").split())[:LONGEST]
        reason = reason.encode("utf-8", "backslashreplace").decode()  # it may hold lone surrogates
        kind = _VARYING.sub("", reason)
        counts[kind] += 1
        reasons.setdefault(kind, reason)
    if counts:
        with folder.failures_path.open("a", encoding="utf-8") as file:
            for kind, count in counts.items():
                file.write(json.dumps({"step": step, "count": count, "reason": reasons[kind]}) + "\n")


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
    for line in read_json_lines(folder.failures_path):
        kind = _VARYING.sub("", line["reason"])
        counts[kind] += line["count"]
        reasons[kind] = line["reason"]
    text = f"{' and '.join(found)} have no score, because the reward or the environment failed"
    if counts:
        [(kind, _)] = counts.most_common(1)
        text += f"; {'the' if len(counts) == 1 else 'the commonest'} reason: {reasons[kind]}"
    return text
