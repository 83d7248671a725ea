"""The work of a simulated run: what a sampler, a learner and a reward service do, as time that passes."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gleanrl.protocols import Metrics
from gleanrl.schedule.device_lock import DeviceLock, Work
from gleanrl.simulate.simulated_cluster import Machines
from gleanrl.simulate.workload import Workload
from gleanrl.types import Group, Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils.errors import UserError
from gleanrl.utils.notifier import Notifier

_TICK = 1e-6  # seconds; who asks in the same instant asks in order of priority


class Device:
    """One device that everything takes turns on, and how long it waited for rewards."""

    def __init__(self, order: Callable[[], Sequence[Work]], clock: Callable[[], float]) -> None:
        self._device_lock = DeviceLock(order=order, clock=clock)
        self._order = order
        self._clock = clock
        self._working = False
        self._pending = 0  # training rewards
        self._since = 0.0
        self.busy_s = 0.0
        self.reward_wait_s = 0.0

    @asynccontextmanager
    async def held(self, kind: Work, *, again: bool = False) -> AsyncIterator[None]:
        """Nobody else gets the device meanwhile, whether it works or not. ``again``: it was held until just now."""
        if not again:
            await asyncio.sleep(_TICK * (1 + self._order().index(kind)))
        async with self._device_lock(kind):
            yield

    async def busy(self, seconds: float) -> None:
        """Work of whoever holds the device."""
        self._note(working=True)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._note(working=False)

    async def work(self, kind: Work, seconds: float, pieces: int = 1) -> None:
        """So long, in equal pieces, between which whoever goes first may come."""
        for piece in range(pieces if seconds > 0 else 0):
            async with self.held(kind, again=piece > 0):
                await self.busy(seconds / pieces)

    def rewards(self, change: int) -> None:
        """So many more training rewards are pending."""
        self._note(pending=change)

    def reading(self) -> tuple[float, float]:
        """Seconds busy, and seconds idle while rewards were pending, until now."""
        self._note()
        return self.busy_s, self.reward_wait_s

    def _note(self, *, working: bool | None = None, pending: int = 0) -> None:
        now = self._clock()
        if self._working:
            self.busy_s += now - self._since
        elif self._pending:
            self.reward_wait_s += now - self._since
        self._since = now
        self._working = self._working if working is None else working
        self._pending += pending


class Sampler:
    """Generates what is asked for, first come first served, on one or more engines with a device each.

    On one alone a batch takes ``g`` seconds of the device.
    """

    version = 0

    def __init__(self, devices: Sequence[Device], learner: Learner, machines: Machines, *, inflight: bool) -> None:
        self._devices, self._learner, self._machines, self._inflight = devices, learner, machines, inflight
        self._workload, self._cluster = machines.workload, machines.cluster
        self._queue: deque[_Asked] = deque()
        self._workers: dict[int, asyncio.Task[None]] = {}
        self._idle = list(range(len(devices)))  # engines that nothing is asked of
        self._free = len(devices)  # engines that are neither generating nor down
        self._sampling = 0
        self._draining = self._standing = False
        self._stood_s = 0.0  # still, while weights came in
        self._changed = Notifier()
        self._burst = 0

    async def sample(self, ticket: int) -> tuple[int, int, int]:
        """One trajectory: the version that sampled it, the number of the burst that it ended with, and how many did."""
        while self._draining:
            await self._changed.wait()
        self._sampling += 1
        try:
            ended: asyncio.Future[tuple[int, int, int]] = asyncio.get_running_loop().create_future()
            self._ask([_Asked(ticket, ended)])
            return await ended
        finally:
            self._sampling -= 1
            if self._draining and not self._sampling:
                self._changed.notify()

    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """Where weights do not change in flight, what is being generated ends with the old ones first."""
        clock, machines = self._machines.clock, self._machines
        await machines.pool()
        if self._cluster.overlap:
            await machines.transfer()
        self._draining = not self._inflight
        asked = clock()
        while self._draining and self._sampling:
            await self._changed.wait()
        machines.drained_s += clock() - asked
        if not self._cluster.overlap:
            self._standing, asked = True, clock()
            await machines.transfer()
            self._stood_s += clock() - asked
        self.version = version
        self._draining = self._standing = False
        self._changed.notify()

    def _ask(self, asked: Sequence[_Asked]) -> None:
        self._queue.extend(asked)
        for _ in range(min(len(asked), len(self._idle))):
            engine = self._idle.pop(0)
            self._workers[engine] = asyncio.create_task(self._work(engine))

    async def _work(self, engine: int) -> None:
        again = False
        while self._queue:
            up_at = self._machines.samplers[engine].up_at(self._machines.clock())
            if up_at > self._machines.clock():
                self._free -= 1
                await asyncio.sleep(up_at - self._machines.clock())
                self._free += 1
                again = False
            while self._standing:
                await self._changed.wait()
            async with self._devices[engine].held("sample", again=again):
                if self._queue:
                    await self._one_burst(engine)
            again = True
        self._idle.append(engine)

    async def _one_burst(self, engine: int) -> None:
        cluster, machines, version = self._cluster, self._machines, self.version
        size = min(cluster.burst(self._workload), -(-len(self._queue) // self._free))
        taken = [self._queue.popleft() for _ in range(size)]
        now, stood = machines.clock(), self._stood_s
        seconds = cluster.burst_s(self._workload, size, cluster.engines[engine])
        failure = machines.samplers[engine].first(now, now + seconds)
        self._free -= 1
        try:
            await self._devices[engine].busy(seconds if failure is None else failure - now)
            while self._stood_s > stood or self._standing:  # in flight: it stood still meanwhile
                owed, stood = self._stood_s - stood, self._stood_s
                await (asyncio.sleep(owed) if owed else self._changed.wait())
        finally:
            self._free += 1
        if failure is not None:
            machines.lost += size
            self._ask(taken)
            return
        self._end([asked for asked in taken if not self._lost(asked, seconds)], version)

    def _lost(self, asked: _Asked, seconds: float) -> bool:
        """Whether its environment failed; it is asked for again once that is back."""
        try:
            if not self._machines.environment_fails(seconds):
                return False
        except UserError as error:  # that of who waits for the episode
            if not asked.ended.done():
                asked.ended.set_exception(error)
            return True
        asyncio.get_running_loop().call_later(self._cluster.environment_restart, self._ask, [asked])
        return True

    def _end(self, ended: Sequence[_Asked], version: int) -> None:
        self._burst += 1
        if ended and self._workload.passes == "generated":
            self._learner.look_at({asked.ticket for asked in ended}, len(ended) / self._workload.samples)
        for asked in ended:
            if not asked.ended.done():
                asked.ended.set_result((version, self._burst, len(ended)))


@dataclass(frozen=True, slots=True)
class _Asked:
    ticket: int
    ended: asyncio.Future[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Player:
    """An episode is one answer, which says in its ``info`` with which burst it ended."""

    sampler: Sampler
    machines: Machines

    async def play(self, task: Task, *, trajectory_id: str, seed: int, temperature: float | None = None) -> Trajectory:
        version, burst, size = await self.sampler.sample(int(trajectory_id.partition(".")[0]))
        await self.machines.driver(trajectories=1)
        info = {"burst": burst, "size": size}
        return Trajectory(trajectory_id, task.id, ((_turn(version),),), Score(0.0), StopReason.DONE, info)


@lru_cache(maxsize=64)
def _turn(version: int) -> Turn:
    return Turn({"role": "assistant", "content": ""}, np.zeros(1, np.int32), np.zeros(1, np.float32), version)


class Service:
    """The `Reward` of a simulation: every one takes its latency, so many at once as the service has places."""

    def __init__(self, device: Device, machines: Machines, *, whole: bool) -> None:
        self._device, self._machines = device, machines
        workload = self._workload = machines.workload
        self._clock = machines.clock
        self._evaluation_in_line = workload.service == "verl" and whole
        self._random = random.Random(f"latency/{workload.seed}")
        self._places = {lane: asyncio.Semaphore(workload.concurrency) for lane in ("train", "evaluate")}
        self._line: dict[Any, int] = {}  # what is to be scored one after the other: how many of it are left
        self._next = Notifier()
        self._asked: dict[int, list[float]] = {}  # by version: when its first reward was asked for, when its last came

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        asked = self._asked.setdefault(trajectory.version, [self._clock(), 0.0])
        self._device.rewards(+1)
        try:
            burst = trajectory.info["burst"]
            if self._workload.service == "stream":
                await self._one("train")
            else:
                await self._in_line("train", burst, trajectory.info["size"])
        finally:
            self._device.rewards(-1)
            asked[1] = self._clock()
        return Score(1.0)

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        await self._machines.driver(groups=1)
        return scores

    async def evaluation(self, step: int) -> None:
        count = self._workload.evaluation_samples
        if self._evaluation_in_line:
            await asyncio.gather(*(self._in_line("evaluate", ("evaluation", step), count) for _ in range(count)))
        else:
            await asyncio.gather(*(self._one("evaluate") for _ in range(count)))

    def batch_s(self, version: int) -> float:
        """How long the rewards of what a version sampled took, from the first question to the last answer."""
        first, last = self._asked.get(version, (0.0, 0.0))  # in flight, weights may come and go between two groups
        return last - first

    async def _one(self, lane: str) -> None:
        await self._machines.request()
        async with self._places[lane]:
            await asyncio.sleep(self._machines.answered_s(lambda: self._workload.latency.draw(self._random)))

    async def _in_line(self, lane: str, call: Any, size: int) -> None:
        self._line.setdefault(call, size)
        while next(iter(self._line)) != call:
            await self._next.wait()
        await self._one(lane)
        self._line[call] -= 1
        if not self._line[call]:
            del self._line[call]
            self._next.notify()


class Learner:
    """Takes time; says what its batches need first."""

    def __init__(self, workload: Workload, device: Device) -> None:
        self._workload, self._device = workload, device
        self._passes: dict[int, asyncio.Task[None]] = {}  # by ticket
        self._calls = 0  # in this step
        self.calls = 0  # in all

    def look_at(self, tickets: set[int], share: float) -> None:
        """Compute the log-probs of what has just been generated."""
        started = asyncio.create_task(self._pass(share))
        self._passes |= dict.fromkeys(tickets, started)

    async def prepare(self, groups: Sequence[Group]) -> Sequence[Group]:
        if self._workload.passes == "generated":
            await asyncio.gather(*{self._passes.pop(group.ticket) for group in groups})
        else:
            await self._pass(len(groups) / self._workload.batch)
        return groups

    async def update(self, batch: Sequence[Group]) -> Metrics:
        share = len(batch) / self._workload.batch
        further = self._workload.call if self._calls else 0.0
        self._calls += 1
        self.calls += 1
        await self._train(self._workload.train * share + further, share)
        return {}

    def weights(self) -> Mapping[str, Any]:
        self._calls = 0
        return {}

    def save(self, folder: Any) -> None:
        pass

    async def _pass(self, share: float) -> None:
        await self._train((self._workload.logprobs + self._workload.reference) * share, share)

    async def _train(self, seconds: float, share: float) -> None:
        await self._device.work("train", seconds, max(1, round(self._workload.microbatches * share)))


class Evaluator:
    """Generates on all samplers, then waits for its rewards."""

    def __init__(self, devices: Sequence[Device], service: Service, machines: Machines) -> None:
        self._devices, self._service, self._machines = devices, service, machines
        self._workload = machines.workload
        self._running: asyncio.Task[None] | None = None

    async def start(self, step: int) -> None:
        if step == 0 or not self._workload.evaluate_every:
            return
        await self.finish()
        self._running = asyncio.create_task(self._evaluate(step))
        if self._workload.evaluation == "inline":
            await self.finish()

    async def finish(self) -> None:
        if self._running is not None:
            await self._running

    async def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _evaluate(self, step: int) -> None:
        seconds = self._workload.evaluation_g / sum(self._machines.cluster.engines)
        if self._workload.evaluation == "beside":
            await asyncio.gather(*(device.work("evaluate", seconds, self._workload.bursts) for device in self._devices))
            await self._scored(step)
            return
        async with AsyncExitStack() as held:
            for device in self._devices:
                await held.enter_async_context(device.held("evaluate"))
            await asyncio.gather(*(device.busy(seconds) for device in self._devices))
            await self._scored(step)

    async def _scored(self, step: int) -> None:
        await self._machines.driver(trajectories=self._workload.evaluation_samples)
        await self._service.evaluation(step)


class NoCheckpoints:
    """A run without a folder."""

    def save(self, *_: Any) -> None:
        pass
