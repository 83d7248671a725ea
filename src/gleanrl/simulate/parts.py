"""The simulated parts of a run: sampler, reward service, learner and evaluator.

They have the interfaces of the real parts but compute nothing: their work only takes virtual time.
`gleanrl.simulate.simulation` passes them to the real training loop.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gleanrl.protocols import Metrics
from gleanrl.schedule.device_lock import DeviceLock, Work
from gleanrl.simulate.workload import OVERHEADS, Cluster, Overhead, Workload
from gleanrl.types import Group, Score, Segment, StopReason, Task, Trajectory, Turn
from gleanrl.utils.notifier import Notifier

# A request for a device is delayed by this many seconds, times the position of its work in the order of priority. So if
# several requests are made at the same virtual time, the most urgent one is the first.
_TICK = 1e-6


class Device:
    """A simulated device, which does one piece of work at a time.

    It measures how long it was busy, and how long it was idle while rewards were pending. ``order`` returns the kinds
    of work, most urgent first.
    """

    def __init__(self, order: Callable[[], Sequence[Work]], clock: Callable[[], float]) -> None:
        self._lock = DeviceLock(order=order, clock=clock)
        self._order, self._clock = order, clock
        self._working = False
        self._pending_rewards = 0
        self._since = 0.0
        self._busy_s = self._reward_wait_s = 0.0

    @asynccontextmanager
    async def held(self, kind: Work, *, again: bool = False) -> AsyncIterator[None]:
        """Acquire the device, and hold it until the block ends. Only `busy` counts as time in which it works.

        Set ``again`` if the caller has released the device at this moment to let more urgent work run. The request is
        then made without the delay of `_TICK`, because otherwise less urgent work that waits would get the device.
        """
        if not again:
            await asyncio.sleep(_TICK * (1 + self._order().index(kind)))
        async with self._lock(kind):
            yield

    async def busy(self, seconds: float) -> None:
        """Let the device work for ``seconds``. The caller must hold the device."""
        self.read_times()
        self._working = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self.read_times()
            self._working = False

    async def work(self, kind: Work, seconds: float, pieces: int = 1) -> None:
        """Work for ``seconds`` in equal pieces. The device is released after each, so that more urgent work can run."""
        for piece in range(pieces if seconds > 0 else 0):
            async with self.held(kind, again=piece > 0):
                await self.busy(seconds / pieces)

    def add_pending_rewards(self, change: int) -> None:
        self.read_times()
        self._pending_rewards += change

    def read_times(self) -> tuple[float, float]:
        """Return two totals until now: seconds busy, and seconds idle while rewards for training were pending."""
        now = self._clock()
        if self._working:
            self._busy_s += now - self._since
        elif self._pending_rewards:
            self._reward_wait_s += now - self._since
        self._since = now
        return self._busy_s, self._reward_wait_s


class Core:
    """A simulated processor core, which handles one event after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_at = 0.0

    async def work(self, seconds: float) -> None:
        """Handle an event that takes ``seconds``, after all earlier events."""
        if seconds > 0:
            self._free_at = max(self._free_at, self._clock()) + seconds
            await asyncio.sleep(self._free_at - self._clock())


class Machines:
    """The parts of a cluster that need processor time or the network, and no device.

    These are the driver with the experience pool, the player processes, the reward agent and the transfer of weights.
    """

    def __init__(self, cluster: Cluster, workload: Workload, clock: Callable[[], float]) -> None:
        self.cluster, self.workload, self.clock = cluster, workload, clock
        self.at_work: dict[Overhead, float] = dict.fromkeys(OVERHEADS, 0.0)  # seconds that each part worked
        self.drained_s = 0.0  # seconds that publications of weights waited for sampling to end
        driver = Core(clock)  # also used by the experience pool, which works in the driver's process
        self._cores: dict[Overhead, Core] = {"driver": driver, "pool": driver, "agent": Core(clock)}
        self._players = [Core(clock) for _ in range(cluster.players)]
        self._played = 0

    async def work(self, part: Overhead, seconds: float) -> None:
        """Let ``part`` (the driver, the pool or the reward agent) handle an event that takes ``seconds``."""
        await self._cores[part].work(seconds)
        self.at_work[part] += seconds

    async def receive(self, trajectories: int) -> None:
        """Handle ``trajectories`` that have been sampled: first in the player processes, if any, then in the driver."""
        if self._players:
            await asyncio.gather(*(self._play() for _ in range(trajectories)))
        await self.work("driver", trajectories * self.cluster.trajectory_s)

    async def _play(self) -> None:
        self._played += 1
        await self._players[self._played % len(self._players)].work(self.cluster.episode_s)
        self.at_work["players"] += self.cluster.episode_s / len(self._players)

    async def transfer(self) -> None:
        """Wait while published weights are sent to the samplers."""
        if self.cluster.transfer_s:
            await asyncio.sleep(self.cluster.transfer_s)
            self.at_work["transfer"] += self.cluster.transfer_s


@dataclass(frozen=True, slots=True)
class Burst:
    """A burst: trajectories that one engine generates together and that end at the same time."""

    number: int  # counted from 1
    size: int  # number of trajectories
    turn: Turn  # the sampled message, which all trajectories of the burst share


class Sampler:
    """The simulated sampler. It generates the requested trajectories in order of arrival.

    Trajectories are generated in bursts: those of a burst are generated together and end at the same time.
    It consists of engines with one device each, which generate bursts independently. A single engine takes
    ``Workload.g`` seconds for a batch. If ``inflight`` is True, weights may change while trajectories are sampled.
    """

    version = 0

    def __init__(self, devices: Sequence[Device], learner: Learner, machines: Machines, *, inflight: bool) -> None:
        self._devices, self._learner, self._machines, self._inflight = devices, learner, machines, inflight
        self._workload, self._cluster = machines.workload, machines.cluster
        self._queue: deque[tuple[int, asyncio.Future[Burst]]] = deque()  # waiting requests: (group number, result)
        self._idle = list(range(len(devices)))  # engines without a task in `_workers`
        self._workers: dict[int, asyncio.Task[None]] = {}  # engine -> task that generates its bursts
        self._generating = 0  # number of engines that are generating a burst
        self._sampling = 0  # number of trajectories that were requested and have not ended
        self._bursts = 0
        self._draining = False  # True while a publication waits for sampling to end; new requests then wait
        self._paused = False  # True while the engines pause because weights are sent to them
        self._paused_s = 0.0  # total seconds of these pauses
        self._changed = Notifier()

    async def sample(self, ticket: int) -> Burst:
        """Sample one trajectory of the group with this ticket number. Returns the burst in which it was generated."""
        while self._draining:
            await self._changed.wait()
        self._sampling += 1
        try:
            ended: asyncio.Future[Burst] = asyncio.get_running_loop().create_future()
            self._queue.append((ticket, ended))
            if self._idle:
                engine = self._idle.pop(0)
                self._workers[engine] = asyncio.create_task(self._work(engine))
            return await ended
        finally:
            self._sampling -= 1
            if self._draining and not self._sampling:
                self._changed.notify()

    async def rest(self) -> None:
        pass  # the simulated samplers have memory of their own

    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace the weights, and return when the sampler uses the new ones.

        Unless weights may change in flight, this first waits until all requested trajectories have ended, and new
        requests wait meanwhile. Unless `Cluster.overlap` is set, the engines pause while the weights are sent.
        """
        clock, machines = self._machines.clock, self._machines
        await machines.work("pool", self._cluster.pool_s(self._workload))
        if self._cluster.overlap:
            await machines.transfer()
        self._draining = not self._inflight
        asked = clock()
        while self._draining and self._sampling:
            await self._changed.wait()
        machines.drained_s += clock() - asked
        if not self._cluster.overlap:
            self._paused, asked = True, clock()
            await machines.transfer()
            self._paused_s += clock() - asked
        self.version = version
        self._draining = self._paused = False
        self._changed.notify()

    async def _work(self, engine: int) -> None:
        again = False
        while self._queue:
            while self._paused:
                await self._changed.wait()
            async with self._devices[engine].held("sample", again=again):
                if self._queue:
                    await self._run_burst(engine)
            again = True
        self._idle.append(engine)

    async def _run_burst(self, engine: int) -> None:
        """Generate a burst for waiting requests.

        The requests are divided equally among the engines that are not generating. A burst has at most the size
        `Cluster.burst`.
        """
        version, paused_s = self.version, self._paused_s
        free = len(self._devices) - self._generating
        size = min(self._cluster.burst(self._workload), -(-len(self._queue) // free))
        requests = [self._queue.popleft() for _ in range(size)]
        self._generating += 1
        try:
            await self._devices[engine].busy(self._cluster.burst_s(self._workload, size))
            while self._paused_s > paused_s or self._paused:  # pauses during the burst make it longer
                owed, paused_s = self._paused_s - paused_s, self._paused_s
                await (asyncio.sleep(owed) if owed else self._changed.wait())
        finally:
            self._generating -= 1
        self._bursts += 1
        if self._workload.passes == "generated":
            self._learner.start_passes({ticket for ticket, _ in requests}, size / self._workload.samples)
        turn = Turn({"role": "assistant", "content": ""}, np.zeros(1, np.int32), np.zeros(1, np.float32), version)
        burst = Burst(self._bursts, size, turn)
        for _, ended in requests:
            if not ended.done():
                ended.set_result(burst)


@dataclass(frozen=True, slots=True)
class Player:
    """The simulated player. An episode is one request to the sampler.

    The entry "burst" of a trajectory's ``info`` is the burst in which it was generated.
    """

    sampler: Sampler
    machines: Machines

    async def play(
        self,
        task: Task,
        *,
        trajectory_id: str,
        seed: int,
        temperature: float | None = None,
        start: Segment = (),
    ) -> Trajectory:
        burst = await self.sampler.sample(int(trajectory_id.partition(".")[0]))
        await self.machines.receive(1)
        return Trajectory(trajectory_id, task.id, ((burst.turn,),), Score(0.0), StopReason.DONE, {"burst": burst})


class Service:
    """The simulated reward service, a `Reward`.

    It computes up to ``Workload.concurrency`` rewards at the same time, and each takes a random latency. ``whole`` is
    True if the learner trains on a whole batch at once, and False if it trains on parts of the batch (chunks) as soon
    as their rewards are known. If ``whole`` is True and ``Workload.service`` is "verl", an evaluation waits in the same
    queue as the training rewards.
    """

    def __init__(self, device: Device, machines: Machines, *, whole: bool) -> None:
        self._device, self._machines, self._workload = device, machines, machines.workload
        self._evaluation_in_line = self._workload.service == "verl" and whole
        self._random = random.Random(f"latency/{self._workload.seed}")
        self._places = {lane: asyncio.Semaphore(self._workload.concurrency) for lane in ("train", "evaluate")}
        # Calls in order of arrival, each with the number of its requests that have no answer yet.
        self._line: dict[Any, int] = {}
        self._next = Notifier()
        self.times: dict[int, tuple[float, float]] = {}
        """Version of the weights -> times of the first request and of the last answer, in seconds.

        Only the requests for training are counted, by the version that sampled the trajectory."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        asked = self._machines.clock()
        burst: Burst = trajectory.info["burst"]
        self._device.add_pending_rewards(+1)
        try:
            await self._answer("train", None if self._workload.service == "stream" else burst.number, burst.size)
        finally:
            self._device.add_pending_rewards(-1)
            first, _ = self.times.get(trajectory.version, (asked, 0.0))
            self.times[trajectory.version] = min(first, asked), self._machines.clock()
        return Score(1.0)

    async def finish(self, task: Task, scores: Sequence[Score]) -> Sequence[Score]:
        await self._machines.work("driver", 1e-6 * self._machines.cluster.driver_group)
        return scores

    async def evaluate(self, step: int) -> None:
        """Request the rewards of the evaluation after ``step``, and wait for all of them."""
        count = self._workload.evaluation_samples
        call = ("evaluation", step) if self._evaluation_in_line else None
        await asyncio.gather(*(self._answer("evaluate", call, count) for _ in range(count)))

    async def _answer(self, lane: str, call: Any, size: int) -> None:
        """Wait until one reward has been computed.

        ``lane`` is "train" or "evaluate". The service computes up to ``Workload.concurrency`` rewards at the same time
        for each of the two. ``call`` identifies the burst or evaluation to which this request belongs, and ``size`` is
        its number of requests. The request then waits until all requests of earlier calls are answered. None = the
        request does not wait for other requests.
        """
        if call is not None:
            self._line.setdefault(call, size)
            while next(iter(self._line)) != call:
                await self._next.wait()
        await self._machines.work("agent", 1e-6 * self._machines.cluster.agent_request)
        async with self._places[lane]:
            await asyncio.sleep(self._workload.latency.draw(self._random))
        if call is not None:
            self._line[call] -= 1
            if not self._line[call]:
                del self._line[call]
                self._next.notify()


class Learner:
    """The simulated learner, which computes log-prob passes and optimizer updates on a device."""

    def __init__(self, workload: Workload, device: Device) -> None:
        self._workload, self._device = workload, device
        self._pass_s = workload.logprobs + workload.reference
        # Group number (ticket) -> passes over the group; there are several if several bursts generated the group.
        self._passes: defaultdict[int, list[asyncio.Task[None]]] = defaultdict(list)
        self._calls_of_step = 0
        self.calls = 0

    def start_passes(self, tickets: set[int], share: float) -> None:
        """Start the log-prob passes over newly generated trajectories, which are the fraction ``share`` of a batch.

        ``tickets`` are the ticket numbers of their groups. Returns without waiting.
        """
        started = asyncio.create_task(self._work(self._pass_s * share, share))
        for ticket in tickets:
            self._passes[ticket].append(started)

    async def prepare(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Wait for the log-prob passes over ``groups``, and return the groups. Called as `Run.make_batch`."""
        if self._workload.passes == "generated":
            await asyncio.gather(*{one for group in groups for one in self._passes.pop(group.ticket)})
        else:
            share = len(groups) / self._workload.batch
            await self._work(self._pass_s * share, share)
        return groups

    async def update(self, batch: Sequence[Group]) -> Metrics:
        share = len(batch) / self._workload.batch
        further = self._workload.call if self._calls_of_step else 0.0
        self._calls_of_step += 1
        self.calls += 1
        await self._work(self._workload.train * share + further, share)
        return {}

    def weights(self) -> Mapping[str, Any]:
        self._calls_of_step = 0
        return {}

    def save(self, folder: Any) -> None:
        pass

    async def _work(self, seconds: float, share: float) -> None:
        await self._device.work("train", seconds, max(1, round(self._workload.microbatches * share)))


class Evaluator:
    """The simulated evaluator. It generates trajectories on all samplers, and then waits for their rewards."""

    shares_sampler = False  # each simulated sampler has room for a second copy of the weights

    def __init__(self, devices: Sequence[Device], service: Service, machines: Machines) -> None:
        self._devices, self._service, self._machines = devices, service, machines
        self._workload = machines.workload
        self._running: asyncio.Task[None] | None = None

    async def start(self, step: int, on_error: Callable[[BaseException], None]) -> None:
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
        seconds = self._workload.evaluation_g / self._machines.cluster.samplers
        async with AsyncExitStack() as held:
            if self._workload.evaluation == "background":
                pieces = self._workload.bursts
                await asyncio.gather(*(device.work("evaluate", seconds, pieces) for device in self._devices))
            else:  # hold the devices until the rewards arrive, because an inline evaluation pauses all other work
                for device in self._devices:
                    await held.enter_async_context(device.held("evaluate"))
                await asyncio.gather(*(device.busy(seconds) for device in self._devices))
            await self._machines.receive(self._workload.evaluation_samples)
            await self._service.evaluate(step)
