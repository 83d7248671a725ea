"""Tests of `Schedule`, `StalenessController` and `GroupQueue`: under any timing, the staleness bound and the counts
hold, nothing deadlocks, and a resumed run consumes every ticket once."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl import Group, Schedule
from gleanrl.config.settings import ScheduleSettings
from gleanrl.schedule.controller import GroupQueue, StalenessController, Ticket
from gleanrl.schedule.timeline import Timeline
from gleanrl.simulate import virtual_time
from gleanrl.utils.errors import UserError
from tests.schedule_world import Trace, World, group_of, learn
from tests.strategies import examples

PRESETS = get_args(ScheduleSettings.model_fields["preset"].annotation)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    batch = draw(st.integers(1, 8))
    return Schedule(
        batch=batch,
        chunk=draw(st.integers(1, batch)),
        staleness=draw(st.integers(0, 4)),
        ordered=draw(st.booleans()),
    )


worlds = st.builds(
    World,
    seed=st.integers(0, 10**6),
    drop_chance=st.sampled_from([0.0, 0.1, 0.5]),
    concurrency=st.sampled_from([None, 1, 3, 10]),
    train_s=st.sampled_from([0.0, 0.3, 5.0]),
    publish_s=st.sampled_from([0.0, 2.0]),
)


def check(schedule: Schedule, steps: int, trace: Trace, *, adaptive: bool = False) -> None:
    """Check the staleness bound, the sizes of batches and chunks, and that every ticket was consumed once."""
    for step, chunks in trace.steps.items():
        groups = [group for chunk in chunks for group in chunk]
        assert len(groups) == schedule.batch
        assert all(step - group.version <= schedule.staleness for group in groups)
        for chunk in chunks[:-1]:
            assert len(chunk) % schedule.chunk == 0 if adaptive else len(chunk) == schedule.chunk
        assert adaptive or len(chunks[-1]) <= schedule.chunk
        if schedule.ordered:
            assert {group.ticket // schedule.batch for group in groups} == {step}
        for chunk in chunks:
            assert [group.ticket for group in chunk] == sorted(group.ticket for group in chunk)
    assert sorted(trace.numbers()) == list(range(steps * schedule.batch))


@settings(max_examples=examples(300))
@given(schedule=schedules(), steps=st.integers(1, 6), world=worlds, adaptive=st.booleans())
def test_every_schedule_keeps_the_staleness_bound_and_the_counts(
    schedule: Schedule, steps: int, world: World, adaptive: bool
) -> None:
    trace = virtual_time.run(learn(schedule, steps, world, adaptive=adaptive))  # raises Deadlock instead of hanging
    check(schedule, steps, trace, adaptive=adaptive)
    assert not trace.stale  # a ticket is withheld until its group can be consumed in time


@settings(max_examples=examples(150))
@given(schedule=schedules(), world=worlds, data=st.data())
def test_resume_at_any_step_consumes_every_ticket_once(schedule: Schedule, world: World, data: st.DataObject) -> None:
    steps = 5
    kills = sorted(data.draw(st.sets(st.integers(0, steps - 1), max_size=3)))
    state, numbers, ages = None, [], []
    for until in [*kills, steps]:
        trace = virtual_time.run(learn(schedule, steps, world, state=state, until=until))
        numbers += trace.numbers()
        ages += [step - g.version for step, chunks in trace.steps.items() for chunk in chunks for g in chunk]
        state = trace.state
        assert state["step"] == until
    assert sorted(numbers) == list(range(steps * schedule.batch))
    assert max(ages, default=0) <= schedule.staleness


@settings(max_examples=examples(100))
@given(schedule=schedules(), world=worlds)
def test_with_a_lagging_sampler_every_ticket_is_still_consumed_within_the_bound(
    schedule: Schedule, world: World
) -> None:
    world.lag_chance = 0.3
    trace = virtual_time.run(learn(schedule, 5, world))
    check(schedule, 5, trace)


def test_groups_of_a_lagging_sampler_are_dropped_and_their_tickets_issued_again() -> None:
    trace = virtual_time.run(learn(Schedule(4, 2, 0), 4, World(lag_chance=0.3)))
    check(Schedule(4, 2, 0), 4, trace)
    assert trace.stale


@settings(max_examples=examples(60))
@given(schedule=schedules(), world=worlds, when=st.sampled_from([0.0, 0.05, 1.0, 7.0]))
def test_a_dead_producer_ends_the_run_with_its_error(schedule: Schedule, world: World, when: float) -> None:
    world.fail_at = when
    with pytest.raises(RuntimeError, match="burnt down"):
        virtual_time.run(learn(schedule, 1000, world))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_keeps_the_bound_and_the_counts(preset: Any) -> None:
    schedule = Schedule.from_settings(ScheduleSettings(preset=preset, batch=8, chunks=4))
    check(schedule, 6, virtual_time.run(learn(schedule, 6, World(seed=3, drop_chance=0.2))))


def test_presets_have_the_documented_parameters() -> None:
    made = {p: Schedule.from_settings(ScheduleSettings(preset=p, batch=12, chunks=3, staleness=5)) for p in PRESETS}
    assert made == {
        "sync": Schedule(12, 12, 0, ordered=True),
        "pipelined": Schedule(12, 4, 0),
        "one_step_off": Schedule(12, 12, 1, ordered=True),
        "pipelined_one_step_off": Schedule(12, 4, 1),
        "bounded_async": Schedule(12, 4, 5, inflight=True),
    }


def test_more_overlap_is_never_slower() -> None:
    """Training takes the same time per group in every schedule of this test, so only the waiting differs."""
    seconds = {}
    for preset in PRESETS:
        schedule = Schedule.from_settings(ScheduleSettings(preset=preset, batch=8, chunks=4))
        world = World(seed=1, train_s=schedule.chunk * 1.0)
        seconds[preset] = virtual_time.run(learn(schedule, 10, world)).seconds
    assert seconds["sync"] > seconds["pipelined"] > seconds["pipelined_one_step_off"]
    assert seconds["sync"] > seconds["one_step_off"] > seconds["pipelined_one_step_off"]
    assert seconds["pipelined_one_step_off"] >= seconds["bounded_async"]


@pytest.mark.parametrize("preset", ["sync", "one_step_off"])
def test_timing_does_not_change_the_order_of_groups_if_a_chunk_is_a_batch(
    preset: Literal["sync", "one_step_off"],
) -> None:
    schedule = Schedule.from_settings(ScheduleSettings(preset=preset, batch=6))
    runs = [virtual_time.run(learn(schedule, 4, World(seed=seed))).numbers() for seed in range(5)]
    assert runs == [list(range(24))] * 5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Schedule(0, 1), "schedule.batch is 0"),
        (lambda: Schedule(4, 5), "chunk is 5"),
        (lambda: Schedule(4, 0), "chunk is 0"),
        (lambda: Schedule(4, 4, -1), "schedule.staleness is -1"),
        (
            lambda: Schedule.from_settings(ScheduleSettings(preset="pipelined", batch=12, chunks=5)),
            "schedule.chunks = 5 does not divide schedule.batch = 12; use one of 1, 2, 3, 4, 6, 12",
        ),
        (
            lambda: StalenessController.resume(Schedule(4, 4), 9, {"step": 1, "batch": 8, "behind": [], "ahead": []}),
            "resume with the same",
        ),
    ],
)
def test_impossible_settings_raise_a_user_error_that_names_them(wrong: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        wrong()


# --- controller and queue, step by step -------------------------------------------------------------
async def tickets(controller: StalenessController, count: int) -> list[Ticket]:
    taken = [await controller.ticket() for _ in range(count)]
    return [ticket for ticket in taken if ticket is not None]


async def next_chunk(ready: GroupQueue, step: int) -> list[Group]:
    async for groups in ready.chunks(step):
        return groups
    raise AssertionError("the step is over")


def numbers(groups: list[Group]) -> list[int]:
    return [group.ticket for group in groups]


def test_tickets_are_issued_as_early_as_the_bound_allows() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(2, 2, 1), total_steps=4)
        assert [t.number for t in await tickets(controller, 4)] == [0, 1, 2, 3]
        waiting = asyncio.create_task(controller.ticket())
        await asyncio.sleep(1)
        assert not waiting.done()
        controller.published(1)
        assert await waiting == Ticket(4, 0, 1, 2)

    virtual_time.run(main())


def test_refunded_tickets_are_issued_again_lowest_first_with_a_later_version() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(4, 4, 2), total_steps=4)
        issued = await tickets(controller, 6)
        controller.published(1)
        controller.refund(issued[5])
        controller.refund(issued[2])
        assert await tickets(controller, 3) == [Ticket(2, 1, 1, 3), Ticket(5, 1, 1, 3), Ticket(6, 0, 1, 3)]
        with pytest.raises(ValueError, match="ticket 2 \\(attempt 0\\) is not outstanding"):
            controller.refund(issued[2])

    virtual_time.run(main())


def test_in_a_synchronous_run_replacements_start_together_when_no_group_is_in_flight() -> None:
    """Otherwise the durations of rewards would decide which episodes are sampled together, and so the rounding."""

    async def test() -> None:
        controller = StalenessController(Schedule(batch=3, chunk=3, staleness=0), 1)
        first, second, third = await tickets(controller, 3)
        replacement = asyncio.create_task(controller.ticket())
        controller.refund(third)
        controller.refund(first)
        await asyncio.sleep(0)
        assert not replacement.done()
        controller.deliver(second)
        controller.changed.notify()
        again = [await replacement, *await tickets(controller, 1)]
        assert [(ticket.number, ticket.attempt) for ticket in again if ticket] == [(0, 1), (2, 1)]

    virtual_time.run(test())


def test_a_resumed_controller_continues_the_attempts_of_every_ticket() -> None:
    """The attempts of tickets of later steps, and of refunded tickets that wait to be issued again, are kept, too."""

    async def main() -> None:
        schedule = Schedule(2, 2, 2)
        controller = StalenessController(schedule, total_steps=4)
        issued = await tickets(controller, 6)
        for ticket in (issued[1], issued[4], issued[5]):
            controller.refund(ticket)
        again = await tickets(controller, 2)
        assert again == [Ticket(1, 1, 0, 2), Ticket(4, 1, 0, 2)]
        # then ticket 4 waits for its third attempt and ticket 5 for its second; ticket 1 has its second under way
        controller.refund(again[1])
        state = json.loads(json.dumps(controller.state_dict()))
        assert state["attempts"] == [[1, 1], [4, 2], [5, 1]]
        resumed = StalenessController.resume(schedule, 4, state)
        assert json.loads(json.dumps(resumed.state_dict())) == state
        assert [(t.number, t.attempt) for t in await tickets(resumed, 6)] == [
            (0, 0), (1, 1), (2, 0), (3, 0), (4, 2), (5, 1)
        ]  # fmt: skip

    virtual_time.run(main())


def test_sampling_is_ahead_once_this_step_and_the_next_have_their_groups() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(2, 1, 3), total_steps=6)
        ready = GroupQueue(controller)
        issued = await tickets(controller, 8)
        for ticket in issued[:3]:
            controller.sampled(ticket)
        assert not controller.ahead
        ready.put(issued[3], group_of(3, 0))  # a group that is delivered has been sampled
        assert controller.ahead
        assert numbers(await next_chunk(ready, 0)) == [3]
        assert controller.ahead  # one group less is needed
        controller.refund(issued[0])
        assert not controller.ahead
        controller.sampled(issued[4])
        assert controller.ahead
        (again,) = await tickets(controller, 1)
        controller.sampled(again)
        ready.put(again, group_of(0, 0))
        assert numbers(await next_chunk(ready, 0)) == [0]
        controller.published(1)
        assert not controller.ahead  # the step after the next is the next one now
        for ticket in issued[5:7]:
            controller.sampled(ticket)
        assert controller.ahead

    virtual_time.run(main())


@pytest.mark.parametrize("staleness", [0, 1])
def test_with_staleness_up_to_one_sampling_is_not_ahead_while_a_ticket_is_unsampled(staleness: int) -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(3, 3, staleness), total_steps=6)
        issued = await tickets(controller, 3 * (1 + staleness))
        for ticket in issued[:-1]:
            controller.sampled(ticket)
            assert not controller.ahead

    virtual_time.run(main())


def test_slots_of_a_step_are_reserved_for_tickets_that_are_due() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(2, 1, 1), total_steps=3)
        ready = GroupQueue(controller)
        first = await tickets(controller, 4)  # sampled by version 0, so due by step 1
        ready.put(first[2], group_of(2, 0))
        ready.put(first[3], group_of(3, 0))
        assert numbers(await next_chunk(ready, 0)) == [2]
        assert numbers(await next_chunk(ready, 0)) == [3]
        controller.published(1)
        fresh = await tickets(controller, 2)
        ready.put(fresh[0], group_of(4, 1))
        withheld = asyncio.create_task(next_chunk(ready, 1))
        await asyncio.sleep(1)
        assert not withheld.done()  # both slots of step 1 belong to tickets 0 and 1
        # ticket 0 will be sampled by version 1 and is then due by step 2, so ticket 4 may take its slot
        controller.refund(first[0])
        assert numbers(await withheld) == [4]
        ready.put(first[1], group_of(1, 0))
        assert numbers(await next_chunk(ready, 1)) == [1]

    virtual_time.run(main())


def test_an_adaptive_chunk_takes_the_ready_groups_in_multiples_of_the_chunk_size() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(8, 2), total_steps=1)
        ready = GroupQueue(controller)
        issued = await tickets(controller, 8)
        for ticket in issued[:5]:
            ready.put(ticket, group_of(ticket.number, 0))
        chunks = ready.chunks(0, adaptive=True)
        assert numbers(await anext(chunks)) == [0, 1, 2, 3]
        for ticket in issued[5:]:
            ready.put(ticket, group_of(ticket.number, 0))
        assert numbers(await anext(chunks)) == [4, 5, 6, 7]
        assert [chunk async for chunk in chunks] == []
        assert await controller.ticket() is None

    virtual_time.run(main())


def test_a_cancelled_consumer_loses_no_group() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(3, 2), total_steps=1)
        ready = GroupQueue(controller)
        issued = await tickets(controller, 3)
        ready.put(issued[0], group_of(0, 0))
        consumer = asyncio.create_task(next_chunk(ready, 0))
        await asyncio.sleep(1)
        consumer.cancel()
        await asyncio.wait([consumer])
        ready.put(issued[1], group_of(1, 0))
        ready.put(issued[2], group_of(2, 0))
        assert [numbers(chunk) async for chunk in ready.chunks(0)] == [[0, 1], [2]]

    virtual_time.run(main())


def test_a_group_sampled_by_older_weights_is_consumed_first() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(2, 1, 1), total_steps=3)
        ready = GroupQueue(controller)
        first = await tickets(controller, 4)
        for ticket in first[:2]:
            ready.put(ticket, group_of(ticket.number, 0))
            await next_chunk(ready, 0)
        controller.published(1)
        ready.put(first[2], group_of(2, 1))  # its sampling started only after version 1 was published
        ready.put(first[3], group_of(3, 0))
        assert numbers(await next_chunk(ready, 1)) == [3]

    virtual_time.run(main())


def test_waiting_for_a_ticket_ends_when_the_last_group_is_consumed() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(1, 1), total_steps=1)
        ready = GroupQueue(controller)
        (ticket,) = await tickets(controller, 1)
        waiting = asyncio.create_task(controller.ticket())  # a refund might still come
        ready.put(ticket, group_of(0, 0))
        await asyncio.sleep(1)
        assert not waiting.done()
        await next_chunk(ready, 0)
        assert await waiting is None

    virtual_time.run(main())


def test_replayed_groups_do_not_count_towards_staleness() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(1, 1, 1), total_steps=2)
        ready = GroupQueue(controller)
        for step in range(2):
            (ticket,) = await tickets(controller, 1)
            ready.put(ticket, group_of(step, -1))
            assert numbers(await next_chunk(ready, step)) == [step]
            controller.published(step + 1)
        assert ready.metrics()["schedule/staleness_max"] == 0

    virtual_time.run(main())


def test_metrics_report_staleness_by_group_and_by_token() -> None:
    trace = virtual_time.run(learn(Schedule(4, 4, 1, ordered=True), 4, World(train_s=10.0)))
    assert [m["schedule/staleness_mean"] for m in trace.metrics] == [0, 1, 1, 1]
    assert [m["schedule/staleness_tokens"] for m in trace.metrics] == [0, 1, 1, 1]
    assert trace.metrics[0]["schedule/wait_s"] > 0


def test_a_wait_is_one_span_although_groups_arrive_singly() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        timeline = Timeline(clock=clock)
        controller = StalenessController(Schedule(3, 3), total_steps=1)
        ready = GroupQueue(controller, timeline=timeline, clock=clock)
        for delay, ticket in enumerate(await tickets(controller, 3)):
            asyncio.get_running_loop().call_later(delay, ready.put, ticket, group_of(ticket.number, 0))
        await asyncio.sleep(0.5)
        await next_chunk(ready, 0)
        assert timeline.spans("wait") == [(0.5, 2.0)]
        assert ready.metrics()["schedule/wait_s"] == 1.5

    virtual_time.run(main())


def test_invalid_calls_raise_value_errors() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(2, 2), total_steps=2)
        ready = GroupQueue(controller)
        issued = await tickets(controller, 2)
        with pytest.raises(ValueError, match="delivered for ticket 0"):
            ready.put(issued[0], group_of(1, 0))
        ready.put(issued[0], group_of(0, 0))
        with pytest.raises(ValueError, match="delivered twice"):
            ready.put(issued[0], group_of(0, 0))
        with pytest.raises(ValueError, match="step 1 cannot follow step 0 with 2 groups to come"):
            await next_chunk(ready, 1)
        controller.published(1)
        with pytest.raises(ValueError, match="version 0 published after version 1"):
            controller.published(0)

    virtual_time.run(main())


def test_state_dict_raises_in_the_middle_of_a_step() -> None:
    async def main() -> None:
        controller = StalenessController(Schedule(2, 1), total_steps=2)
        ready = GroupQueue(controller)
        for ticket in await tickets(controller, 2):
            ready.put(ticket, group_of(ticket.number, 0))
        await next_chunk(ready, 0)
        with pytest.raises(ValueError, match="consumed 1 groups"):
            controller.state_dict()

    virtual_time.run(main())


def test_the_code_of_the_docs_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "concepts" / "schedules.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    seconds = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(seconds) == len(PRESETS)
    assert seconds[0] == max(seconds)
    assert seconds[-1] == min(seconds)
