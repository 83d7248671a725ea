"""The device lease: one holder at a time, priorities, no idle device while anybody waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl import virtual_time
from gleanrl.lease import PRIORITIES, SEPARATE, SHARED, DeviceLease, Work
from gleanrl.timeline import Timeline, covered


@dataclass(frozen=True)
class Job:
    work: Work
    asked: float
    takes: float
    patience: float | None = None  # cancelled after this many seconds
    start: float | None = None
    end: float = 0.0


jobs = st.lists(
    st.builds(
        Job,
        work=st.sampled_from(list(PRIORITIES)),
        asked=st.integers(0, 20).map(float),
        takes=st.integers(0, 5).map(float),
        patience=st.none() | st.integers(0, 6).map(float),
    ),
    max_size=25,
)


async def play(lease: DeviceLease, plan: list[Job]) -> list[Job]:
    loop = asyncio.get_running_loop()

    async def one(job: Job) -> Job:
        started: list[float] = []

        async def hold() -> None:
            async with lease(job.work):
                started.append(loop.time())
                await asyncio.sleep(job.takes)

        await asyncio.sleep(job.asked)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hold(), job.patience) if job.patience is not None else await hold()
        return replace(job, start=started[0] if started else None, end=loop.time())

    return list(await asyncio.gather(*map(one, plan)))


def held(done: list[Job]) -> list[tuple[float, float]]:
    return [(job.start, job.end) for job in done if job.start is not None]


@settings(max_examples=200, deadline=None)
@given(plan=jobs)
def test_one_at_a_time_and_never_idle_while_anybody_waits(plan: list[Job]) -> None:
    async def main() -> tuple[list[Job], dict[str, float]]:
        lease = DeviceLease(clock=asyncio.get_running_loop().time)
        done = await play(lease, plan)
        return done, lease.stats()

    done, stats = virtual_time.run(main())
    spans = sorted(held(done))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for job in done:
        assert job.start is not None or job.patience is not None  # everybody else is served
        begin = job.start if job.start is not None else job.end
        assert covered(spans, job.asked, begin) == pytest.approx(begin - job.asked)  # waited for work, not for nothing
    busy = sum(end - start for start, end in spans)
    assert sum(stats[f"busy_s/{work}"] for work in PRIORITIES) == pytest.approx(busy)
    finished = max((job.end for job in done), default=0.0)
    assert stats["idle_s/device"] == pytest.approx(finished - busy)


@settings(max_examples=100, deadline=None)
@given(plan=jobs)
def test_priorities_then_first_come_first_served(plan: list[Job]) -> None:
    plan = [replace(job, patience=None) for job in plan]
    done = virtual_time.run(play(DeviceLease(), plan))
    for job in done:
        for other in done:
            assert job.start is not None
            assert other.start is not None
            rank, other_rank = PRIORITIES[job.work], PRIORITIES[other.work]
            if other.asked < job.asked and other_rank <= rank:
                assert other.start <= job.start
            if rank < other_rank and job.asked < other.start:
                assert job.start <= other.start


def test_training_goes_before_sampling_before_evaluation() -> None:
    plan = [Job("sample", 0, 5), Job("evaluate", 1, 1), Job("sample", 2, 1), Job("train", 3, 1), Job("train", 3, 1)]
    done = virtual_time.run(play(DeviceLease(), plan))
    assert [job.start for job in done] == [0, 8, 7, 5, 6]


def test_priorities_can_be_chosen() -> None:
    plan = [Job("sample", 0, 5), Job("train", 1, 1), Job("evaluate", 2, 1)]
    priorities: dict[Work, int] = {"evaluate": 0, "train": 1, "sample": 2}
    done = virtual_time.run(play(DeviceLease(SHARED, priorities=priorities), plan))
    assert [job.start for job in done] == [0, 6, 5]


def test_separate_devices_do_not_wait_for_each_other() -> None:
    plan = [Job("sample", 0, 5), Job("train", 0, 5), Job("evaluate", 0, 1)]

    async def main() -> tuple[list[Job], dict[str, float]]:
        lease = DeviceLease(SEPARATE, clock=asyncio.get_running_loop().time)
        return await play(lease, plan), lease.stats()

    done, stats = virtual_time.run(main())
    assert [job.start for job in done] == [0, 0, 5]  # evaluation shares the sampler's device
    assert stats["idle_s/learner"] == 1
    assert stats["idle_s/sampler"] == 0
    assert stats["wait_s/evaluate"] == 5
    assert stats["wait_s/train"] == 0


def test_a_lease_handed_to_someone_just_cancelled_is_handed_on() -> None:
    async def main() -> float:
        lease = DeviceLease()

        async def hold(seconds: float) -> None:
            async with lease("train"):
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


def test_work_that_raises_gives_the_device_back() -> None:
    async def main() -> None:
        lease = DeviceLease()
        with pytest.raises(KeyError):
            async with lease("train"):
                raise KeyError
        async with lease("sample"):
            pass

    virtual_time.run(main())


def test_waits_are_on_the_timeline() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        timeline = Timeline(clock=clock)
        await play(DeviceLease(timeline=timeline, clock=clock), [Job("sample", 0, 5), Job("train", 2, 1)])
        assert timeline.busy("wait", 0.0, 10.0) == 3

    virtual_time.run(main())
