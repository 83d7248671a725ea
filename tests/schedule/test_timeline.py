"""Tests of `gleanrl.schedule.timeline`: spans are written as JSON lines and read back, also from several threads and
after restarts and crashes, and busy time counts overlapping spans once."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.schedule.timeline import BusyClock, Timeline, covered, read_timeline
from gleanrl.utils.errors import UserError


class Clock:
    """A clock that the tests set by hand, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda s: (float(s[0]), float(s[0] + s[1]))))


@given(spans=spans, since=st.integers(0, 30), length=st.integers(0, 30))
def test_covered_counts_each_second_once(spans: list[tuple[float, float]], since: int, length: int) -> None:
    seconds = [second for second in range(since, since + length) if any(a <= second < b for a, b in spans)]
    assert covered(spans, since, since + length) == len(seconds)


def test_spans_are_read_back_relative_to_the_start_of_the_timeline(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    with Timeline(tmp_path / "run" / "timeline.jsonl", clock=clock) as timeline:
        timeline.record("decode", 1001.0, 1002.5, rows=np.int64(3), loss=np.float32(0.5), path=tmp_path)
        with timeline.span("train", step=4):
            clock.now = 1003.0
    assert list(read_timeline(tmp_path / "run" / "timeline.jsonl")) == [
        {"kind": "decode", "start": 1.0, "end": 2.5, "rows": 3, "loss": 0.5, "path": str(tmp_path)},
        {"kind": "train", "start": 0.0, "end": 3.0, "step": 4},
    ]


def test_a_span_whose_body_raises_is_marked_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with Timeline(path) as timeline, pytest.raises(KeyError), timeline.span("train"):
        raise KeyError
    assert [span["failed"] for span in read_timeline(path)] == [True]


def test_busy_counts_overlapping_spans_of_the_given_kinds_once() -> None:
    timeline = Timeline()
    timeline.record("decode", 0.0, 4.0)
    timeline.record("decode", 2.0, 5.0)
    timeline.record("train", 4.0, 8.0)
    timeline.record("environment", 0.0, 100.0)
    assert timeline.busy("decode", 1.0, 10.0) == 4.0
    assert timeline.busy({"decode", "train"}, 0.0, 10.0) == 8.0
    assert timeline.busy("nothing", 0.0, 10.0) == timeline.busy("decode", 3.0, 3.0) == 0.0


def test_an_open_span_counts_as_busy() -> None:
    clock = Clock()
    timeline = Timeline(clock=clock)
    with timeline.span("score"):
        clock.now = 3.0
        assert timeline.busy("score", 1.0, 3.0) == 2.0
        assert timeline.busy(("decode", "train"), 1.0, 3.0) == 0.0
        assert timeline.spans("score") == []
    clock.now = 9.0
    assert timeline.busy("score", 1.0, 9.0) == 2.0


def test_a_span_shorter_than_least_s_is_not_recorded() -> None:
    clock = Clock()
    timeline = Timeline(clock=clock)
    for seconds in (0.0, 0.5, 1.0):
        with timeline.span("score", least_s=0.75):
            clock.now += seconds
    assert timeline.spans("score") == [(0.5, 1.5)]
    assert timeline.busy("score", 0.0, 2.0) == 1.0


def test_spans_recorded_by_several_threads_are_all_written(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"

    def record(worker: int) -> None:
        for i in range(1000):
            timeline.record("work", i, i + 1, worker=worker, i=i)

    with Timeline(path, clock=lambda: 0.0) as timeline:
        workers = [threading.Thread(target=record, args=(worker,)) for worker in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    seen = {(span["worker"], span["i"]) for span in read_timeline(path)}
    assert seen == {(worker, i) for worker in range(4) for i in range(1000)}


def test_lines_are_flushed_while_the_timeline_is_open(tmp_path: Path) -> None:
    path, clock = tmp_path / "timeline.jsonl", Clock()
    timeline = Timeline(path, clock=clock)
    timeline.record("train", 0.0, 1.0)
    assert list(read_timeline(path)) == []
    clock.now = 6.0
    timeline.record("train", 1.0, 6.0)
    assert len(list(read_timeline(path))) == 2


def test_a_restart_continues_after_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with Timeline(path, clock=Clock(50.0)) as timeline:
        timeline.record("train", 50.0, 60.0)
        timeline.record("decode", 51.0, 52.0)
    with path.open("a") as file:
        file.write('{"kind": "train", "start": 12')  # the process was killed here
    with Timeline(path, clock=Clock(7.0)) as timeline:
        timeline.record("train", 8.0, 9.0)
    assert [(span["start"], span["end"]) for span in read_timeline(path)] == [(0.0, 10.0), (1.0, 2.0), (11.0, 12.0)]


def test_a_path_that_is_a_directory_raises_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*Is a directory"):
        Timeline(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_raises_a_user_error(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.path = Path("/dev/full")
    timeline.record("train", 0.0, 1.0)
    with pytest.raises(UserError, match="cannot write /dev/full: No space left on device"):
        timeline.close()


def test_a_span_cannot_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match=r"ends 1\.000000 s before it starts"):
        Timeline().record("train", 2.0, 1.0)


def test_a_busy_clock_counts_overlapping_work_once() -> None:
    now = 0.0
    clock = BusyClock(lambda: now)
    with clock:
        now = 1.0
        with clock:
            now = 3.0
            assert clock.seconds == 3.0  # there may never be a time without a block
        now = 4.0
    now = 10.0
    with clock:
        now = 10.5
    assert clock.seconds == 4.5
