"""Records when sampling, scoring, training and waiting happened, as spans that metrics and the report evaluate."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gleanrl.utils.errors import UserError

_FLUSH_LINES = 512
_FLUSH_SECONDS = 5.0
_SPANS_KEPT = 50_000  # number of newest spans of each kind that are kept in memory
_TAIL_BYTES = 65_536  # length of the end of an existing file that is searched for the time of the last span

DEVICE_WORK = ("prefill", "decode", "logprobs", "train", "evaluate")
"""Kinds of span in which the device works. At all other times the device counts as idle."""


class SpanRecorder(Protocol):
    """The part of `Timeline` that samplers and learners call."""

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None: ...


class Timeline:
    """Records spans of time, and writes them to a file as JSON lines ``{"kind", "start", "end", ...tags}``.

    In the file, times are seconds since the start of the run. If the file exists already, new spans are appended, and
    their times continue from the end of the last span. All methods take and return readings of ``clock`` in seconds.
    With ``path=None`` spans are kept in memory only.

    Lines are written in blocks, so a crash loses the spans of the last few seconds. Close the timeline or use it as a
    context manager, so that the last block is written. The class is thread-safe.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._spans: defaultdict[str, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_SPANS_KEPT))
        self._open: dict[object, tuple[str, float]] = {}  # kind and start of the work that is still running, by its key
        self._flushed = self._origin = clock()
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                tail = file.read(_TAIL_BYTES)
                if tail and not tail.endswith(b"\n"):  # a crash cut the last line short
                    file.write(b"\n")
        except OSError as error:
            raise _cannot_write(path, error) from error
        lines = tail.decode("utf-8", errors="replace").splitlines()
        self._origin -= max((float(span["end"]) for span in _parse(lines)), default=0.0)

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
        """Add a span of ``kind`` from ``start`` to ``end``. ``tags`` are further entries of its line in the file.

        Raises:
            ValueError: ``end`` is before ``start``.
            UserError: the file cannot be written.
        """
        if end < start:
            raise ValueError(f"a span of {kind!r} ends {start - end:.6f} s before it starts")
        with self._lock:
            self._spans[kind].append((start, end))
            if self.path is None:
                return
            times = {"start": round(start - self._origin, 6), "end": round(end - self._origin, 6)}
            self._lines.append(json.dumps({"kind": kind, **times, **tags}, default=_to_plain))
            if len(self._lines) >= _FLUSH_LINES or self._clock() - self._flushed >= _FLUSH_SECONDS:
                self._flush(self.path)

    def begin(self, key: object, kind: str) -> None:
        """Count the time from now on as work of ``kind`` in `busy`, until `end` is called with the same key.

        Nothing is recorded. This is for work whose spans are recorded only when they end.
        """
        self._open[key] = (kind, self._clock())

    def end(self, key: object) -> None:
        """End the work that `begin` has begun. Does nothing if there is none with this key."""
        self._open.pop(key, None)

    @contextmanager
    def span(self, kind: str, *, least_s: float = 0.0, **tags: Any) -> Iterator[None]:
        """Record the time in which the ``with`` body runs as a span, if it takes at least ``least_s`` seconds.

        If the body raises an error, the span gets the tag ``failed: true``.
        """
        start, key = self._clock(), object()
        self._open[key] = (kind, start)
        try:
            yield
        except BaseException:
            tags["failed"] = True
            raise
        finally:
            end = self._clock()
            del self._open[key]
            if end - start >= least_s:
                self.record(kind, start, end, **tags)

    def spans(self, kind: str) -> list[tuple[float, float]]:
        """Return the start and end of the spans of a kind that this process has recorded, at most the newest 50,000."""
        with self._lock:
            return list(self._spans.get(kind, ()))

    def busy(self, kinds: str | Collection[str], since: float, until: float) -> float:
        """Return for how many seconds between ``since`` and ``until`` at least one span of ``kinds`` was running.

        A `span` whose body is still running, and work that has begun (`begin`) and not ended, count until ``until``.
        """
        names = {kinds} if isinstance(kinds, str) else kinds
        found = [span for kind in names for span in self.spans(kind) if span[1] > since]
        found += [(start, until) for kind, start in list(self._open.values()) if kind in names]
        return covered(found, since, until)

    def close(self) -> None:
        """Write the remaining spans to the file."""
        with self._lock:
            if self.path is not None and self._lines:
                self._flush(self.path)

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self, path: Path) -> None:
        self._flushed = self._clock()
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("\n".join(self._lines) + "\n")
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._lines.clear()


class BusyClock:
    """Measures for how many seconds at least one of several overlapping ``with clock:`` blocks was running."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ended = 0.0  # seconds until a time at which no block was running
        self._open = 0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """Seconds until now, those of blocks that are running included."""
        return self._ended + (self._clock() - self._since if self._open else 0.0)

    def __enter__(self) -> None:
        if self._open == 0:
            self._since = self._clock()
        self._open += 1

    def __exit__(self, *_: object) -> None:
        self._open -= 1
        if self._open == 0:
            self._ended += self._clock() - self._since


def covered(spans: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """Return the length of the union of ``spans`` inside ``[since, until]``."""
    total, reached = 0.0, since
    for start, end in sorted(spans):
        start, end = max(start, reached), min(end, until)
        if end > start:
            total += end - start
            reached = end
    return total


def read_timeline(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the spans of a timeline's file in the order in which they were written.

    Lines that are not a complete span are skipped, because a crash may have cut a line short.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from _parse(file)


def _parse(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            span = json.loads(line)
        except ValueError:
            continue
        if isinstance(span, dict) and {"kind", "start", "end"} <= span.keys():
            yield span


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write {path}: {error.strerror or error}; free some space or choose another run folder")


def _to_plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # NumPy's arrays and scalars have tolist
