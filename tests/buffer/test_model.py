"""Property test: after any sequence of operations and crashes, the buffer agrees with a dictionary in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer
from tests.buffer.world import assert_same, at, rows, same, trajectory
from tests.strategies import examples

KINDS = (
    {"wide": True},
    {"wide": False},
    {"wide": True, "extra": True},
    {"wide": False, "task_descriptions": ["x"] * 3},
)


class Buffer(RuleBasedStateMachine):
    """State machine. ``kept`` maps the ids that the buffer must hold to their trajectories; ``next`` is the next id."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.kept: dict[int, TensorTrajectory] = {}
        self.next = 0
        self.saved: dict[str, tuple[dict[int, TensorTrajectory], int]] = {}
        self.limit: int | None = None
        self.buffer = self.opened()

    def opened(self) -> TrajectoryReplayBuffer:
        return TrajectoryReplayBuffer(
            self.root / "buffer", seed=0, max_rows=self.limit, segment_bytes=1 << 18, sample_window_size=3
        )

    def teardown(self) -> None:
        self.buffer.close()
        shutil.rmtree(self.root)

    @rule(count=st.integers(1, 3), steps=st.integers(1, 40), kind=st.sampled_from(KINDS), data=st.data())
    def add(self, count: int, steps: int, kind: dict, data: st.DataObject) -> None:
        spots = st.dictionaries(
            st.tuples(st.integers(0, steps - 1), st.integers(0, 2)), st.sampled_from(["terminations", "truncations"])
        )
        fresh = [trajectory(self.next + i, steps, 3, ends=data.draw(spots), **kind) for i in range(count)]
        assert self.buffer.add_trajectories(fresh) == list(range(self.next, self.next + count))
        self.kept |= {self.next + i: own for i, own in enumerate(fresh)}
        self.next += count
        self.forget_evicted()

    def forget_evicted(self) -> None:
        """Remove evicted trajectories from ``kept``; check that they were the oldest and that the limit required it."""
        if self.limit is None:
            return
        first = self.next - len(self.buffer)
        assert (
            len(self.buffer) == 1 or self.buffer.total_samples <= self.limit
        )  # the newest trajectory is kept even if it alone exceeds the limit
        assert all(number >= first for number in self.kept) or sum(map(size, self.kept.values())) > self.limit
        self.kept = {number: own for number, own in self.kept.items() if number >= first}

    @rule(limit=st.one_of(st.none(), st.integers(300, 2000)))
    def reopen(self, limit: int | None) -> None:
        self.buffer.close()
        self.limit = limit
        self.buffer = self.opened()

    @rule(torn=st.binary(max_size=300))
    def crash(self, torn: bytes) -> None:
        """Reopen after a simulated kill: unused rows hold random bytes, and the log ends with part of a record."""
        self.buffer.close()
        [log] = (self.root / "buffer").glob("*-log-*")
        with log.open("ab") as file:
            file.write(torn)
        for segment in (self.root / "buffer").glob("*-rows-*"):
            with segment.open("r+b") as file:
                file.seek(-64, os.SEEK_END)
                file.write(os.urandom(64) if self.free_tail(segment) else b"")
        self.buffer = self.opened()

    def free_tail(self, segment: Path) -> bool:
        """Return whether the last rows of a segment are unused."""
        number, index = (int(part) for part in segment.name.split("-")[2:])
        with TrajectoryReplayBuffer(self.root / "buffer", read_only=True) as reader:
            table = reader.storage.snapshot.tables[number]
            return table.columns.rows <= (index + 1) * table.capacity[0] - 8

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.kept = {}

    @rule(name=st.sampled_from("ab"))
    def save(self, name: str) -> None:
        self.buffer.save_checkpoint(self.root / name)
        self.saved[name] = (dict(self.kept), self.next)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved)))
        self.buffer.load_checkpoint(self.root / name)
        self.kept, self.next = dict(self.saved[name][0]), self.saved[name][1]

    @rule()
    def sample(self) -> None:
        window = dict(list(self.kept.items())[-3:])
        total = sum(map(size, window.values()))
        if not total:
            return
        numbers = {int(v) for v in self.buffer.sample(total, fields=["versions"])["versions"].reshape(-1)}
        assert numbers <= set(window)
        shapes = {own.curr_obs["state"].shape[2] for own in window.values()}
        if len(shapes) > 1:
            return
        batch = self.buffer.sample(total)
        batch.pop("task_descriptions", None)
        for i in range(total):
            mark = int(batch["actions"][i, 0])
            own = rows(window[mark // 1000])
            t, b = divmod(mark % 1000, 20)
            wanted = {name: value for name, value in at(own, t * 3 + b).items() if name in batch}
            assert same(at({name: batch[name] for name in wanted}, i), wanted)

    @invariant()
    def agrees(self) -> None:
        assert len(self.buffer) == len(self.kept)
        assert self.buffer.total_samples == sum(map(size, self.kept.values()))
        assert self.buffer.trajectory_counter == self.next
        for number in list(self.kept)[-2:] + list(self.kept)[:1]:
            assert_same(self.buffer.trajectory(number), self.kept[number])

    @rule()
    def verify(self) -> None:
        assert self.buffer.verify() == []
        for name, (kept, _) in self.saved.items():
            with TrajectoryReplayBuffer(self.root / name, read_only=True) as checkpoint:
                assert checkpoint.verify() == []
                for number, own in kept.items():
                    assert_same(checkpoint.trajectory(number), own)


def size(trajectory: TensorTrajectory) -> int:
    assert trajectory.rewards is not None
    return trajectory.rewards.shape[0] * trajectory.rewards.shape[1]


TestBuffer = Buffer.TestCase
TestBuffer.settings = settings(max_examples=examples(25), stateful_step_count=25)
