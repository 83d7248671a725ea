"""Tests of `gleanrl.schedule.device_lock.DeviceLock`: one job holds the device at a time, jobs are served by priority,
and the device is never idle while a job waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.schedule.device_lock import (
    SAMPLE_FIRST,
    TRAIN_FIRST,
    DeviceHold,
    DeviceLock,
    First,
    Work,
    make_order,
)
from gleanrl.schedule.timeline import Timeline, covered
from gleanrl.simulate import virtual_time
from gleanrl.utils.errors import UserError
from tests.strategies import examples


@dataclass(frozen=True)
class Job:
    work: Work
    asked: float
    takes: float
    patience: float | None = None  # cancelled after this many seconds
    pieces: int = 1  # between two pieces the job gives way if another job wants the device
    start: float | None = None
    end: float = 0.0


jobs = st.lists(
    st.builds(
        Job,
        work=st.sampled_from(SAMPLE_FIRST),
        asked=st.integers(0, 20).map(float),
        takes=st.integers(0, 5).map(float),
        patience=st.none() | st.integers(0, 6).map(float),
        pieces=st.sampled_from([1, 1, 3]),
    ),
    max_size=25,
)


async def play(
    device_lock: DeviceLock, plan: list[Job], stretches: list[tuple[float, float]] | None = None
) -> list[Job]:
    """Run the jobs and return them with their start and end. ``stretches`` collects when the device worked."""
    loop = asyncio.get_running_loop()
    stretches = [] if stretches is None else stretches

    async def one(job: Job) -> Job:
        started: list[float] = []

        async def hold() -> None:
            async with device_lock(job.work) as held:
                for piece in range(job.pieces):
                    if piece and held.wanted:
                        await held.give_way()
                    started.append(loop.time())
                    try:
                        await asyncio.sleep(job.takes / job.pieces)
                    finally:
                        stretches.append((started[-1], loop.time()))

        await asyncio.sleep(job.asked)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hold(), job.patience) if job.patience is not None else await hold()
        return replace(job, start=started[0] if started else None, end=loop.time())

    return list(await asyncio.gather(*map(one, plan)))


@settings(max_examples=examples(200))
@given(plan=jobs, orders=st.lists(st.sampled_from([SAMPLE_FIRST, TRAIN_FIRST]), min_size=1))
def test_one_job_holds_the_device_at_a_time_and_it_is_never_idle_while_a_job_waits(
    plan: list[Job], orders: list[Sequence[Work]]
) -> None:
    """This holds for every order of priority, even for one that changes at each request."""
    changing = itertools.cycle(orders)

    stretches: list[tuple[float, float]] = []
    done = virtual_time.run(play(DeviceLock(order=lambda: next(changing)), plan, stretches))
    stretches.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(stretches))
    for job in done:
        assert job.start is not None or job.patience is not None  # only an impatient job may end unserved
        # the device worked during all of the job's wait
        assert covered(stretches, job.asked, job.end) == pytest.approx(job.end - job.asked)


@settings(max_examples=examples(100))
@given(plan=jobs, order=st.sampled_from([SAMPLE_FIRST, TRAIN_FIRST]))
def test_jobs_are_served_by_priority_and_then_in_order_of_arrival(plan: list[Job], order: Sequence[Work]) -> None:
    plan = [replace(job, patience=None, pieces=1) for job in plan]
    done = virtual_time.run(play(DeviceLock(order=lambda: order), plan))
    for job in done:
        for other in done:
            assert job.start is not None
            assert other.start is not None
            rank, other_rank = order.index(job.work), order.index(other.work)
            if other.asked < job.asked and other_rank <= rank:
                assert other.start <= job.start
            if rank < other_rank and job.asked < other.start:
                assert job.start <= other.start


CROWD = [Job("sample", 0, 5), Job("evaluate", 1, 1), Job("train", 2, 1), Job("sample", 3, 1), Job("train", 3, 1)]


@pytest.mark.parametrize(
    ("first", "ahead", "starts"),
    [
        ("sample", False, [0, 8, 6, 5, 7]),
        ("sample", True, [0, 8, 6, 5, 7]),
        ("train", False, [0, 8, 5, 7, 6]),
        ("train", True, [0, 8, 5, 7, 6]),
        ("due", False, [0, 8, 6, 5, 7]),
        ("due", True, [0, 8, 5, 7, 6]),
    ],
)
def test_the_first_setting_chooses_which_work_is_served_first(first: First, ahead: bool, starts: list[float]) -> None:
    done = virtual_time.run(play(DeviceLock(order=make_order(first, lambda: ahead)), CROWD))
    assert [job.start for job in done] == starts


def test_the_order_of_priority_is_read_at_each_hand_over() -> None:
    plan = [Job("sample", 0, 5), Job("train", 1, 1), Job("sample", 1, 1), Job("evaluate", 2, 1)]

    async def main() -> list[Job]:
        device_lock = DeviceLock()
        asyncio.get_running_loop().call_later(4, setattr, device_lock, "order", lambda: ("evaluate", "train", "sample"))
        return await play(device_lock, plan)

    assert [job.start for job in virtual_time.run(main())] == [0, 6, 7, 5]


def test_a_task_that_requests_the_device_again_competes_with_waiting_ones() -> None:
    """Successive bursts of sampling keep waiting training from the device only if sampling goes first."""

    async def main(order: Sequence[Work]) -> list[str]:
        device_lock, log = DeviceLock(order=lambda: order), []

        async def bursts() -> None:
            for _ in range(3):
                async with device_lock("sample"):
                    log.append("sample")
                    await asyncio.sleep(1)

        async def chunk() -> None:
            await asyncio.sleep(0.5)
            async with device_lock("train"):
                log.append("train")
                await asyncio.sleep(1)

        await asyncio.gather(bursts(), chunk())
        return log

    assert virtual_time.run(main(SAMPLE_FIRST)) == ["sample", "sample", "sample", "train"]
    assert virtual_time.run(main(TRAIN_FIRST)) == ["sample", "train", "sample", "sample"]


def test_give_way_lets_work_of_higher_priority_run_first() -> None:
    plan = [Job("train", 0, 6, pieces=3), Job("sample", 1, 1), Job("evaluate", 1, 1)]
    assert [(job.start, job.end) for job in virtual_time.run(play(DeviceLock(), plan))] == [(0, 7), (2, 3), (7, 8)]


def test_a_holder_cancelled_while_giving_way_does_not_take_the_device_back() -> None:
    async def main() -> list[float]:
        loop, times = asyncio.get_running_loop(), []
        device_lock = DeviceLock(clock=loop.time)

        async def train() -> None:
            async with device_lock("train") as held:
                await asyncio.sleep(1)
                assert held.wanted
                await held.give_way()

        async def sample(asked: float) -> None:
            await asyncio.sleep(asked)
            async with device_lock("sample") as held:
                times.append(loop.time())
                assert isinstance(held, DeviceHold)
                await asyncio.sleep(3)

        training = asyncio.create_task(train())
        sampling = [asyncio.create_task(sample(asked)) for asked in (0.5, 2.0)]
        await asyncio.sleep(3)
        training.cancel()
        await asyncio.gather(*sampling)
        assert training.cancelled()
        return times

    assert virtual_time.run(main()) == [1, 4]


def test_a_device_granted_to_a_task_just_cancelled_is_passed_on() -> None:
    async def main() -> float:
        device_lock = DeviceLock()

        async def hold(seconds: float) -> None:
            async with device_lock("train"):
                await asyncio.sleep(seconds)

        first = asyncio.create_task(hold(1))
        second = asyncio.create_task(hold(1))
        third = asyncio.create_task(hold(1))
        first.add_done_callback(lambda _: second.cancel())  # runs after the hand-over, before second wakes
        await asyncio.wait([first, second, third])
        assert second.cancelled()
        assert not third.cancelled()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 2


def test_work_that_raises_releases_the_device() -> None:
    async def main() -> None:
        device_lock = DeviceLock()
        with pytest.raises(KeyError):
            async with device_lock("train"):
                raise KeyError
        async with device_lock("sample"):
            pass

    virtual_time.run(main())


def test_waits_are_recorded_on_the_timeline() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        timeline = Timeline(clock=clock)
        await play(DeviceLock(timeline=timeline, clock=clock), [Job("sample", 0, 5), Job("train", 2, 1)])
        assert timeline.busy("wait", 0.0, 10.0) == 3

    virtual_time.run(main())


def test_an_error_while_recording_a_wait_releases_the_device() -> None:
    class FullDisk(Timeline):
        def record(self, kind: str, start: float, end: float, **tags: object) -> None:
            if tags["who"] == "train":
                raise UserError("no space left")

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        device_lock = DeviceLock(timeline=FullDisk(clock=clock), clock=clock)
        gives_way, asks = (
            [Job("train", 0, 2, pieces=2), Job("sample", 0.5, 1)],
            [Job("sample", 0, 1), Job("train", 0.5, 1)],
        )
        for plan in (gives_way, asks):
            with pytest.raises(UserError, match="no space left"):
                await play(device_lock, plan)
            async with asyncio.timeout(10), device_lock("evaluate"):
                pass

    virtual_time.run(main())
