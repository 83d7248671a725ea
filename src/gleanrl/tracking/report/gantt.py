"""Reduces a run's timeline to a few steps that fit on a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gleanrl.schedule.timeline import DEVICE_WORK, covered

MAX_WINDOWS = 10
MAX_ROWS = 6
"""Rows per kind for overlapping spans; further spans join the last row."""
RESOLUTION = 1500
"""Two spans are drawn as one if the gap between them is shorter than a window's length divided by this."""

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

    A step ends with the last of its ``train`` spans, which carry the step's number. A run without such spans is divided
    into equal parts.
    A window is ``{"label", "start", "seconds", "idle", "reward_wait", "lanes"}``, a lane is
    ``{"kind", "rows", "busy", "spans": [[row, start, end, label]]}``,
    with times in seconds from the window's start. ``idle`` is the time without work on the device, in seconds;
    ``reward_wait`` is the part of it in which training rewards were pending.
    """
    work = sorted(spans, key=lambda span: span["start"])
    if not work:
        return []
    ends: dict[int, float] = {}
    for span in work:
        if span["kind"] == "train" and isinstance(span.get("step"), int):
            ends[span["step"]] = max(span["end"], ends.get(span["step"], 0.0))
    first, last = work[0]["start"], max(span["end"] for span in work)
    cuts: list[tuple[str, float, float]] = []
    for step, end in ends.items():
        # spans count steps from 0, labels from 1
        cuts.append((f"step {step + 1}", cuts[-1][2] if cuts else first, end))
    if not ends and last > first:
        length = (last - first) / MAX_WINDOWS
        for start in (first + index * length for index in range(MAX_WINDOWS)):
            cuts.append((f"{start:.1f}-{start + length:.1f} s", start, start + length))
    return [_make_window(label, start, end, work) for label, start, end in spread(cuts, MAX_WINDOWS)]


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return ``count`` of the items, evenly spaced, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _make_window(label: str, start: float, end: float, work: Sequence[dict[str, Any]]) -> dict[str, Any]:
    length = end - start
    lanes: defaultdict[str, list[Span]] = defaultdict(list)
    for span in work:
        if span["end"] > start and span["start"] < end:
            # kinds of waiting are distinguished by what waits
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
    """Return a sort key: work in the order of a step, then unknown kinds, then waiting."""
    waiting = kind == "wait" or kind.endswith(" waits")
    return waiting, ORDER.index(kind) if kind in ORDER else len(ORDER), kind


def _make_lane(kind: str, spans: list[Span], length: float) -> dict[str, Any]:
    """Arrange spans in rows, so that overlapping ones are visible. Neighbours without a visible gap are merged."""
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
