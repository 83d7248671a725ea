"""Selects a few steps from a run's timeline, which the report's page draws as Gantt charts.

A span is an interval in which one piece of work was done. A chart has one lane for each kind of work. If spans of a
lane overlap, the lane has several rows, so that each span can be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gleanrl.schedule.timeline import DEVICE_WORK, covered

MAX_WINDOWS = 10
MAX_ROWS = 6
"""Maximum number of rows of a lane. Overlapping spans are drawn in separate rows, but further ones in the last row."""
RESOLUTION = 1500
"""Two spans of a row are drawn as one if the gap between them is shorter than the chart's duration divided by this."""

ORDER = (
    "environment",
    "sample",
    "prefill",
    "decode",
    "score",
    "logprobs",
    "train",
    "publish",
    "evaluate",
    "checkpoint",
)

Span = tuple[float, float, str]


def windows(spans: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most `MAX_WINDOWS` sections of the timeline, each with a lane for every kind of work.

    A window is one step. It ends with the step's last span of the kind "train". Of a step that was made again after a
    resume, it is the last time. If no span of this kind has a step
    number, the timeline is divided into windows of equal length.

    A window is ``{"label", "start", "seconds", "idle", "reward_wait", "lanes"}``. ``start`` is a time of the
    timeline, in seconds. ``idle`` is the number of seconds in which the device does no work, and ``reward_wait`` is the
    part of them in which rewards are being computed. A lane is ``{"kind", "rows", "busy", "spans"}``, where ``busy`` is
    the number of seconds that its spans cover. A span is ``[row, start, end, label]``, in seconds from the window's
    start.
    """
    work = sorted(spans, key=lambda span: span["start"])
    if not work:
        return []
    first, last = work[0]["start"], max(span["end"] for span in work)
    made: list[tuple[int, float, float]] = []  # step, start and end; a resumed run makes some steps again
    for span in work:
        if span["kind"] == "train" and isinstance(step := span.get("step"), int):
            if made and made[-1][0] == step:
                made[-1] = (step, made[-1][1], max(made[-1][2], span["end"]))
            else:
                made.append((step, made[-1][2] if made else first, span["end"]))
    newest = {step: (start, end) for step, start, end in made}
    # Spans count the steps from 0, and labels count them from 1.
    cuts = [(f"step {step + 1}", start, end) for step, (start, end) in newest.items()]
    if not cuts and last > first:
        length = (last - first) / MAX_WINDOWS
        for start in (first + index * length for index in range(MAX_WINDOWS)):
            cuts.append((f"{start:.1f}-{start + length:.1f} s", start, start + length))
    return [_make_window(label, start, end, work) for label, start, end in spread(cuts, MAX_WINDOWS)]


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return ``count`` evenly spaced items, among them the first and the last; all items if there are fewer."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _make_window(label: str, start: float, end: float, work: Sequence[dict[str, Any]]) -> dict[str, Any]:
    length = end - start
    lanes: defaultdict[str, list[Span]] = defaultdict(list)
    for span in work:
        if span["end"] > start and span["start"] < end:
            # Each part that waits, such as training, has a separate lane for its waiting.
            kind = f"{span['who']} waits" if span["kind"] == "wait" and "who" in span else span["kind"]
            tags = [f"{key} {value}" for key, value in span.items() if key not in {"kind", "start", "end", "step"}]
            lanes[kind].append((max(span["start"], start) - start, min(span["end"], end) - start, ", ".join(tags)))
    working = [span[:2] for kind in DEVICE_WORK for span in lanes.get(kind, ())]
    scoring = [span[:2] for span in lanes.get("score", ())]
    busy = covered(working, 0.0, length)
    return {
        "label": label,
        "start": round(start, 3),
        "seconds": round(length, 4),
        "idle": round(length - busy, 4),
        "reward_wait": round(covered([*working, *scoring], 0.0, length) - busy, 4),
        "lanes": [_make_lane(kind, lanes[kind], length) for kind in sorted(lanes, key=_rank)],
    }


def _rank(kind: str) -> tuple[bool, int, str]:
    """Return a sort key of a lane: kinds of work in the order `ORDER`, then other kinds by name, then waiting."""
    waiting = kind == "wait" or kind.endswith(" waits")
    return waiting, ORDER.index(kind) if kind in ORDER else len(ORDER), kind


def _make_lane(kind: str, spans: list[Span], length: float) -> dict[str, Any]:
    """Make a lane whose rows show overlapping spans one below the other.

    Each span gets the first row that is free at its start, or the last row if `MAX_ROWS` rows are occupied. Spans of a
    row are merged if the gap between them would be too small to be seen.
    """
    rows: list[list[Span]] = []
    for span in spans:
        row = next((row for row in rows if row[-1][1] <= span[0]), None)
        if row is None and len(rows) < MAX_ROWS:
            rows.append([span])
            continue
        row = row or rows[-1]
        start, end, label = row[-1]
        if span[0] - end < length / RESOLUTION:
            row[-1] = (start, max(end, span[1]), label if label == span[2] else "")
        else:
            row.append(span)
    flat = [[i, round(start, 4), round(end, 4), label] for i, row in enumerate(rows) for start, end, label in row]
    busy = covered([span[:2] for span in spans], 0.0, length)
    return {"kind": kind, "rows": len(rows), "busy": round(busy, 4), "spans": flat}
