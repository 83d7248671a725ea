"""A simulated training loop for tests of the schedule, in virtual time.

Producers take time, drop groups and may fail; the learner only waits.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gleanrl import Group, GroupSpec, Schedule, Score, StopReason, Task, Trajectory, Turn
from gleanrl.schedule.controller import GroupQueue, StalenessController, Ticket

TASK = Task("t")


def group_of(number: int, version: int) -> Group:
    """Return a group of one trajectory, sampled by the policy ``version``; -1 = a group with a replayed member only."""
    logprobs = np.zeros(2, np.float32)
    turn = Turn({"role": "assistant", "content": ""}, np.zeros(2, np.int32), logprobs, version)
    trajectory = Trajectory(f"{number}", TASK.id, ((turn,),), Score(1.0), StopReason.DONE)
    if version < 0:
        return Group(GroupSpec(TASK, 0, (trajectory,)), (trajectory,), number)
    return Group(GroupSpec(TASK, 1), (trajectory,), number)


@dataclass
class World:
    """How long each action takes and how often it fails. All random choices depend on ``seed`` only."""

    seed: int = 0
    drop_chance: float = 0.0
    concurrency: int | None = None  # number of groups sampled at the same time; None = no limit
    train_s: float = 1.0  # seconds of training per chunk
    publish_s: float = 0.0
    lag_chance: float = 0.0  # probability that a group was sampled with a version that is too old
    fail_at: float | None = None  # time in seconds at which sampling fails; None = never

    def duration(self, ticket: Ticket) -> float:
        return random.Random(f"{self.seed}/{ticket}").choice([0.0, 0.1, 1.0, 1.0, 3.0, 30.0])

    def drops(self, ticket: Ticket) -> bool:
        return random.Random(f"{self.seed}/drop/{ticket}").random() < self.drop_chance

    def version(self, ticket: Ticket, staleness: int) -> int:
        lags = random.Random(f"{self.seed}/lag/{ticket}").random() < self.lag_chance
        return max(0, ticket.version - staleness - 1) if lags else ticket.version


@dataclass
class Trace:
    steps: dict[int, list[list[Group]]] = field(default_factory=dict)
    refunds: int = 0
    stale: list[Group] = field(default_factory=list)  # groups that the queue dropped because they were too old
    seconds: float = 0.0
    state: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def numbers(self) -> list[int]:
        return [group.ticket for chunks in self.steps.values() for chunk in chunks for group in chunk]


async def produce(controller: StalenessController, ready: GroupQueue, world: World, trace: Trace) -> None:
    rows = asyncio.Semaphore(world.concurrency or 10**9)

    async def one(ticket: Ticket) -> None:
        try:
            await asyncio.sleep(world.duration(ticket))
            if world.drops(ticket):
                trace.refunds += 1
                controller.refund(ticket)
            else:
                version = world.version(ticket, controller.schedule.staleness)
                ready.put(ticket, group_of(ticket.number, version))
        finally:
            rows.release()

    async with asyncio.TaskGroup() as tasks:
        while True:
            await rows.acquire()
            ticket = await controller.ticket()
            if ticket is None:
                return
            tasks.create_task(one(ticket))


async def learn(
    schedule: Schedule, steps: int, world: World, *, state: Any = None, until: int | None = None, adaptive: bool = False
) -> Trace:
    """Run the training loop to its end, or cancel it before step ``until``. ``state`` resumes from a state dict."""
    loop = asyncio.get_running_loop()
    controller = StalenessController.resume(schedule, steps, state) if state else StalenessController(schedule, steps)
    trace = Trace()
    ready = GroupQueue(controller, clock=loop.time, on_drop=trace.stale.append)
    producer = asyncio.create_task(produce(controller, ready, world, trace))
    if world.fail_at is not None:
        loop.call_later(world.fail_at, ready.fail, RuntimeError("the household burnt down"))
    last = steps if until is None else until
    for step in range(controller.first_step, last):
        trace.steps[step] = []
        async for groups in ready.chunks(step, adaptive=adaptive):
            trace.steps[step].append(groups)
            await asyncio.sleep(world.train_s)
        await asyncio.sleep(world.publish_s)
        controller.published(step + 1)
        trace.metrics.append(ready.metrics())
    trace.state = json.loads(json.dumps(controller.state_dict()))
    if last < steps:
        producer.cancel()
        await asyncio.wait([producer])
    else:
        await producer
    trace.seconds = loop.time()
    return trace
