"""Reduces a run's timeline to a few steps that fit on a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gleanrl.schedule.timeline import DEVICE_WORK, covered

MAX_WINDOWS = 10
MAX_ROWS = 6
"""Rows per kind for overlapping spans; further spans join the last row."""
RESOLUTION = 1500
"""Spans closer than this fraction of a window are drawn as one."""

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

    A step ends with the last of its ``train`` spans, which hold its number. A run without such spans is divided into
    equal parts.
    A window is ``{"label", "start", "seconds", "idle", "reward_wait", "lanes"}``, a lane is
    ``{"kind", "rows", "busy", "spans": [[row, start, end, label]]}``,
    with times in seconds from its start. ``idle``: seconds without work on the device; ``reward_wait``: those of them
    in which training rewards were pending.
    """
    work = sorted(spans, key=lambda span: span["start"])
    if not work:
        return []
    cuts = spread(_steps(work) or _equal_parts(work), MAX_WINDOWS)
    return [_window(label, start, end, work) for label, start, end in cuts]


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return ``count`` of the items, evenly spaced, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _steps(work: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    ends: dict[int, float] = {}
    for span in work:
        if span["kind"] == "train" and isinstance(span.get("step"), int):
            ends[span["step"]] = max(span["end"], ends.get(span["step"], 0.0))
    edges = [work[0]["start"], *ends.values()]
    # a span's number counts the steps before it, a label includes its own step
    return [(f"step {step + 1}", start, end) for step, start, end in zip(ends, edges, edges[1:], strict=False)]


def _equal_parts(work: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    first, last = work[0]["start"], max(span["end"] for span in work)
    length = (last - first) / MAX_WINDOWS
    starts = [first + index * length for index in range(MAX_WINDOWS)]
    return [(f"{start:.1f}-{start + length:.1f} s", start, start + length) for start in starts] if length else []


def _window(label: str, start: float, end: float, work: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_kind: defaultdict[str, list[Span]] = defaultdict(list)
    for span in work:
        if span["end"] > start and span["start"] < end:
            inside = max(span["start"], start) - start, min(span["end"], end) - start
            by_kind[_lane_name(span)].append((*inside, _tags(span)))
    kinds = sorted(by_kind, key=_place)
    lanes = [_lane(kind, by_kind[kind], end - start) for kind in kinds]
    window = {"label": label, "start": round(start, 3), "seconds": round(end - start, 4)}
    return window | _idle(by_kind, end - start) | {"lanes": lanes}


def _idle(by_kind: Mapping[str, list[Span]], length: float) -> dict[str, float]:
    working = [span[:2] for kind in DEVICE_WORK for span in by_kind.get(kind, ())]
    busy = covered(working, 0.0, length)
    waited = covered([*working, *(span[:2] for span in by_kind.get("score", ()))], 0.0, length) - busy
    return {"idle": round(length - busy, 4), "reward_wait": round(waited, 4)}


def _lane(kind: str, spans: list[Span], length: float) -> dict[str, Any]:
    """Arrange spans in rows, so that overlapping ones are visible. Neighbours without a visible gap are merged."""
    rows: list[list[Span]] = []
    gap = length / RESOLUTION
    for span in spans:
        place = next((row for row in rows if row[-1][1] <= span[0]), None)
        if place is None and len(rows) < MAX_ROWS:
            rows.append([span])
        else:
            _join(place if place is not None else rows[-1], span, gap)
    flat = [[i, round(s, 4), round(e, 4), label] for i, row in enumerate(rows) for s, e, label in row]
    return {
        "kind": kind,
        "rows": len(rows),
        "busy": round(covered([span[:2] for span in spans], 0.0, length), 4),
        "spans": flat,
    }


def _join(row: list[Span], span: Span, gap: float) -> None:
    start, end, label = row[-1]
    if span[0] - end < gap:
        row[-1] = (start, max(end, span[1]), label if label == span[2] else "")
    else:
        row.append(span)


def _lane_name(span: dict[str, Any]) -> str:
    """Return the span's kind; kinds of waiting are distinguished by what waits."""
    return f"{span['who']} waits" if span["kind"] == "wait" and "who" in span else span["kind"]


def _place(kind: str) -> tuple[bool, int, str]:
    """Return a sort key: work in the order of a step, then unknown kinds, then waiting."""
    waiting = kind == "wait" or kind.endswith(" waits")
    return waiting, ORDER.index(kind) if kind in ORDER else len(ORDER), kind


def _tags(span: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in span.items() if key not in {"kind", "start", "end", "step"})
