"""Actors of a run: what runs inside an actor, how the driver calls it, and how an actor that dies is replaced.

A service (a sampler, a learner, environments, a reward agent) lives in an `ActorServer`, inside a Ray actor. The driver
holds an `ActorClient` for each, and an `ActorPool` for all of one kind:

    pool = ActorPool(cluster, "sampler", 2, SamplerService, arguments)
    await pool.start()
    client = await pool.member()
    await client.call("sample", number, prompt, params)  # batched: for thousands of small calls
    await client.ask("publish", [reference])  # a separate Ray call: for large values and references

One Ray call costs about 0.6 ms of the driver's processor time, and a step makes thousands of small ones. Therefore
`call` batches the calls of one turn of the event loop, and all answers come back over one Ray stream. The driver also
notices an actor's death by the end of that stream, within milliseconds (Ray's own restarts take about two seconds to
report a death).

The same messages carry requests for the driver's device lock. A service that shares its device takes
`ActorServer.device_lock`; the client then holds the run's `DeviceLock` until the service releases it or the actor dies.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import traceback
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

from gleanrl.protocols import EpisodeLost
from gleanrl.runtime.ray.cluster import Cluster, death_or_cause, import_ray
from gleanrl.utils.errors import UserError
from gleanrl.utils.notifier import Notifier
from gleanrl.utils.text import first_line

_CLOSE_S = 10.0  # seconds that an actor's service may take to close before the actor is killed
_AFFINITY_SLACK = 16  # the actor that a key prefers may have this many episodes more than the least busy one


class ActorDied(Exception):
    """The actor died before it answered. The message names the actor and the reason."""


class LearnerLost(ActorDied):
    """The learner's actor died, so that what it learned since the last checkpoint is lost."""


class ActorRaised(Exception):
    """Stands for an exception that cannot be pickled: its type, message and traceback as text."""


def to_pickle(what: str, value: Any) -> bytes:
    """Pickle one message. Messages are pickled separately, so that one that cannot be sent does not stop the others."""
    try:
        return import_ray().cloudpickle.dumps(value)
    except Exception as error:
        raise UserError(f"{what} cannot be sent to another process ({first_line(error)})") from None


def from_pickle(what: str, body: bytes) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:
        raise UserError(f"{what} cannot be read ({first_line(error)})") from None


def make_portable(error: Exception) -> Exception:
    """Return an exception that can be pickled, with the traceback of the other process as a note."""
    place = "".join(traceback.format_exception(error))
    try:
        error.add_note(f"in another process:\n{place}")
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # pickling runs the exception class's own code, which may raise anything
        return ActorRaised(f"{type(error).__name__}: {error}\n{place}")


# --- messages -------------------------------------------------------------------------------------
class Started(NamedTuple):
    """What an actor reports once its service has started."""

    pid: int
    node: str  # Ray's id of the actor's node
    clock: float  # value of `perf_counter` in the actor's process when it answered


class Call(NamedTuple):
    """A call of a service by the driver."""

    number: int  # 0 if no answer is expected
    method: str
    body: bytes  # the pickled arguments


class Answer(NamedTuple):
    """The answer to a call."""

    number: int
    failed: bool
    body: bytes  # the pickled result or exception


class LockRequest(NamedTuple):
    """An actor's request about the driver's device lock: ``request`` is "acquire", "give_way" or "release"."""

    hold: int
    request: str
    work: Any


class LockGranted(NamedTuple):
    """The driver's answer to "acquire" or "give_way": the actor now holds the device, unless there was an error."""

    hold: int
    error: bytes = b""  # the pickled exception


class Span(NamedTuple):
    """A span for the driver's timeline, with times of the actor's clock."""

    kind: str
    start: float
    end: float
    tags: dict[str, Any]


# --- inside the actor -----------------------------------------------------------------------------
class Service:
    """Base class of what an actor holds. The driver calls its coroutine methods.

    The actor makes its service by ``make(driver, *arguments)``. ``driver`` is the `ActorServer`, and the service may
    use its `device_lock` and `record`.
    """

    async def start(self) -> None:
        """Prepare the service. Called once, before any other method."""

    async def handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run one of the driver's calls and return its result."""
        return await getattr(self, method)(*arguments)

    async def close(self) -> None:
        """Release what the service holds. Called once, as the last method, unless the actor is killed."""


@dataclass(frozen=True)
class RemoteHold:
    """A `DeviceHold` inside an actor.

    Only the driver knows which work waits for the device. Therefore `wanted` is always true, and `give_way` returns at
    once if no work waits.
    """

    server: ActorServer
    number: int
    work: Any
    wanted: bool = True

    async def give_way(self) -> None:
        await self.server.request_lock(LockRequest(self.number, "give_way", self.work))


class ActorServer:
    """The class of every actor of a run. It runs on the actor's event loop and holds one service.

    Args:
        folder: the driver's working directory, to which relative paths refer; ignored if the node does not have it.
    """

    def __init__(self, make: Callable[..., Service], arguments: tuple[Any, ...], folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._make, self._arguments = make, arguments
        self._service = Service()
        self._outbox: asyncio.Queue[Answer | LockRequest] = asyncio.Queue()
        self._spans: list[Span] = []
        self._holds = count(1)
        self._granted: dict[int, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- called by the driver
    async def start(self) -> Started:
        """Make and start the service. Its exceptions reach the driver."""
        self._service = self._make(self, *self._arguments)
        self._arguments = ()
        await self._service.start()
        return Started(os.getpid(), import_ray().get_runtime_context().get_node_id(), perf_counter())

    async def receive(self, messages: list[Call | LockGranted]) -> None:
        """Start the calls in their order, and resume the tasks that have been granted the device."""
        for message in messages:
            if isinstance(message, LockGranted):
                granted = self._granted.pop(message.hold)
                if not granted.done() and message.error:
                    granted.set_exception(from_pickle("an error of the device lock", message.error))
                elif not granted.done():
                    granted.set_result(None)
            else:
                task = asyncio.create_task(self._serve(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def messages(self) -> AsyncIterator[list[Answer | LockRequest | Span]]:
        """Yield batches of messages to the driver. Spans are sent with the next answer or lock request."""
        while True:
            batch: list[Answer | LockRequest | Span] = [await self._outbox.get()]
            while not self._outbox.empty():
                batch.append(self._outbox.get_nowait())
            spans, self._spans = self._spans, []
            yield batch + spans

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Run one call, and return its result directly instead of over the stream."""
        try:
            return await self._service.handle(method, arguments)
        except Exception as error:
            raise make_portable(error) from None

    async def close(self) -> None:
        await self._service.close()

    async def _serve(self, call: Call) -> None:
        method, failed = call.method, False
        try:
            arguments = from_pickle(f"the arguments of {method}", call.body)
            body = to_pickle(f"the answer of {method}", await self._service.handle(method, arguments))
        except Exception as error:
            body, failed = pickle.dumps(make_portable(error)), True
        if call.number:
            self._outbox.put_nowait(Answer(call.number, failed, body))

    # --- called by the service
    @asynccontextmanager
    async def device_lock(self, work: Any) -> AsyncIterator[RemoteHold]:
        """Hold the driver's `DeviceLock` for ``work``."""
        hold = RemoteHold(self, next(self._holds), work)
        try:
            await self.request_lock(LockRequest(hold.number, "acquire", work))
            yield hold
        finally:
            self._outbox.put_nowait(LockRequest(hold.number, "release", work))

    async def request_lock(self, request: LockRequest) -> None:
        """Send a request to the driver, and wait until the device is granted."""
        granted = self._granted[request.hold] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(request)
        await granted

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
        """Record a span, as `Timeline.record` does. May be called from any thread."""
        self._spans.append(Span(kind, start, end, tags))


# --- in the driver ----------------------------------------------------------------------------------
class ActorClient:
    """The driver's end of one actor: calls it, serves its lock requests, records its spans, and notices its death.

    Once the actor is gone, every call raises `ActorDied`, or `LearnerLost` if the actor is the learner.

    Args:
        name: kind and index, such as "sampler 1"; the kind also names the actor's process ("ray::SamplerActor").
        options: Ray's options of the actor.

    Attributes:
        load: number of episodes that the actor plays now; the code that uses the actor counts them.
        death: the actor's name and the reason for its end; None while the actor is at work.
        ended: set when the actor has died before it was closed.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        make: Callable[..., Service],
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        self.name, self.load = name, 0
        self.death: str | None = None
        self.ended = asyncio.Event()
        self.started: Started | None = None
        self._cluster = cluster
        self._error = LearnerLost if name == "learner" else ActorDied
        self._clock_offset = 0.0  # this process's `perf_counter` minus the actor's
        kind = type(f"{name.split()[0].title()}Actor", (ActorServer,), {})
        self._actor = import_ray().remote(kind).options(**options).remote(make, arguments, os.getcwd())
        self._outbox: asyncio.Queue[Call | LockGranted] = asyncio.Queue()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._holds: dict[int, tuple[asyncio.Queue[str], asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until the service has started. Raises the service's own exceptions."""
        try:
            started = self.started = await self._actor.start.remote()
        except import_ray().exceptions.RayError as error:
            raise self._explain(error) from None
        if started.node != import_ray().get_runtime_context().get_node_id():  # processes of one node share a clock
            self._clock_offset = perf_counter() - started.clock
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the service by a message, which is cheap. Meant for small arguments without object references."""
        if self.death is not None:
            raise self._error(self.death)
        number = next(self._numbers)
        body = to_pickle(f"the arguments of {method}", arguments)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(Call(number, method, body))
        try:
            return await waiting
        finally:
            self._waiting.pop(number, None)

    async def play(self, method: str, *arguments: Any) -> Any:
        """Call the service for an episode. Like `call`, but raises `EpisodeLost` if the actor dies."""
        try:
            return await self.call(method, *arguments)
        except ActorDied as error:
            self._cluster.counts["episodes_lost"] += 1
            raise EpisodeLost(str(error)) from None

    def tell(self, method: str, *arguments: Any) -> None:
        """Call the service without waiting for an answer. Does nothing if the actor is dead."""
        self._outbox.put_nowait(Call(0, method, to_pickle(f"the arguments of {method}", arguments)))

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call the service by a separate Ray call, which can carry large values and object references."""
        try:
            return await self._actor.ask.remote(method, *arguments)
        except import_ray().exceptions.RayError as error:
            raise self._explain(error) from None

    def ask_blocking(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call as `ask` does, from synchronous code. Also raises `ActorDied` if ``timeout_s`` passes."""
        ray = import_ray()
        try:
            return ray.get(self._actor.ask.remote(method, *arguments), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise self._error(f"{self.name} did not answer within {timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            raise self._explain(error) from None

    async def close(self) -> None:
        """Let the service close, then end the actor."""
        ray, alive = import_ray(), self.death is None
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._end(self.death or f"{self.name} was closed")
        try:
            if alive:
                await asyncio.wait_for(self._actor.close.remote(), _CLOSE_S)
        except (ray.exceptions.RayError, TimeoutError):
            pass
        finally:
            ray.kill(self._actor)

    def _explain(self, error: Exception) -> Exception:
        """Return the exception that the actor's own code raised, or one that says why the actor is gone."""
        reason = death_or_cause(error)
        return self._error(f"{self.name} {reason}") if isinstance(reason, str) else reason

    async def _write(self) -> None:
        """Send all messages that were put into the outbox in one turn of the event loop by one Ray call."""
        while True:
            batch = [await self._outbox.get()]
            while not self._outbox.empty():
                batch.append(self._outbox.get_nowait())
            if self.death is None:
                self._actor.receive.remote(batch)

    async def _read(self) -> None:
        """Handle the actor's answers, spans and lock requests until the actor is gone."""
        ray = import_ray()
        death = "ended"
        try:
            async for reference in self._actor.messages.options(num_returns="streaming").remote():
                for message in await reference:
                    if isinstance(message, Span):
                        if (timeline := self._cluster.timeline) is not None:
                            kind, start, end, tags = message
                            with suppress(UserError):  # the disk is full: the run's own spans raise this as well
                                timeline.record(kind, start + self._clock_offset, end + self._clock_offset, **tags)
                    elif isinstance(message, LockRequest):
                        if message.request == "acquire":
                            requests: asyncio.Queue[str] = asyncio.Queue()
                            holding = asyncio.create_task(self._hold_device(message, requests))
                            self._holds[message.hold] = (requests, holding)
                        else:
                            self._holds[message.hold][0].put_nowait(message.request)
                    elif (waiting := self._waiting.pop(message.number, None)) is not None and not waiting.done():
                        failed = message.failed
                        try:
                            value = from_pickle("an answer", message.body)
                        except UserError as error:
                            failed, value = True, error
                        if failed:
                            waiting.set_exception(value)
                        else:
                            waiting.set_result(value)
        except ray.exceptions.RayError as error:
            death = str(death_or_cause(error))
        await self._end(f"{self.name} {death}")
        ray.kill(self._actor)  # if only the stream failed, the actor still lives and holds its successor's resources
        self.ended.set()

    async def _hold_device(self, acquire: LockRequest, requests: asyncio.Queue[str]) -> None:
        """Hold the device for the actor until the actor releases it. The actor's death cancels this task."""
        try:
            async with self._cluster.device_lock(acquire.work) as held:
                self._outbox.put_nowait(LockGranted(acquire.hold))
                while await requests.get() == "give_way":
                    if held.wanted:
                        await held.give_way()
                    self._outbox.put_nowait(LockGranted(acquire.hold))
        except Exception as error:  # e.g. the disk is full; the actor waits for an answer
            self._outbox.put_nowait(LockGranted(acquire.hold, pickle.dumps(make_portable(error))))
            await requests.get()  # the actor's "release"
        del self._holds[acquire.hold]

    async def _end(self, death: str) -> None:
        """Make the waiting calls raise an error, and release the device if the actor holds it."""
        self.death = death
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(self._error(death))
        holding = [task for _, task in self._holds.values()]
        for task in holding:
            task.cancel()
        if holding:
            await asyncio.wait(holding)


class ActorPool:
    """Actors of one kind, started together. Each actor that dies is replaced, at most `ray.max_restarts` times.

    A learner is not replaced: the whole run goes back to its last checkpoint instead.

    Args:
        kind: "sampler", "environment", "reward" or "learner".
        make, arguments: used to make each actor's `Service`.

    Attributes:
        members: the actors at work, by index.
        ready: called with each started actor before it gets work. Raises `ActorDied` if the actor died meanwhile.
        changed: notified when an actor joins, or when the pool has failed.
    """

    def __init__(
        self, cluster: Cluster, kind: str, size: int, make: Callable[..., Service], arguments: tuple[Any, ...]
    ) -> None:
        self.cluster, self.kind, self.size = cluster, kind, size
        self.ready: Callable[[ActorClient], Awaitable[None]] | None = None
        self.members: dict[int, ActorClient] = {}
        self.changed = Notifier()
        self._make, self._arguments = make, arguments
        self._keepers: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None

    async def start(self, started: Callable[[], None] = lambda: None) -> None:
        """Start all actors and wait until each is ready. Calls ``started`` once for each.

        Raises the exceptions of their services. After an error, `close` ends the actors that were started.
        """
        self._keepers = [asyncio.create_task(self._keep_at_work(index)) for index in range(self.size)]
        for ready in range(self.size):
            while len(self.members) <= ready:
                if self._failure is not None:
                    raise self._failure
                await self.changed.wait()
            started()

    async def member(self, key: str | None = None) -> ActorClient:
        """Return the least busy actor, or the one that ``key`` prefers if that one is not much busier.

        Waits while all actors are being replaced. Raises `UserError` if an actor has died too often.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            alive = {index: member for index, member in self.members.items() if member.death is None}
            if alive:
                index = min(alive, key=lambda index: (alive[index].load, index))
                if key is not None:
                    preferred = zlib.crc32(key.encode()) % self.size
                    if preferred in alive and alive[preferred].load <= alive[index].load + _AFFINITY_SLACK:
                        index = preferred
                return alive[index]
            await self.changed.wait()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call any actor. If the actor dies, the call is made again on another one."""
        while True:
            try:
                return await (await self.member()).call(method, *arguments)
            except ActorDied:
                continue

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)

    async def _keep_at_work(self, index: int) -> None:
        """Start an actor, and a new one each time it dies, until the pool is closed or actors died too often."""
        name = self.kind if self.size == 1 else f"{self.kind} {index}"
        restarts = 0 if self.kind == "learner" else self.cluster.settings.max_restarts
        deaths = 0
        try:
            while True:
                options = self.cluster.options(self.kind, index)
                client = ActorClient(self.cluster, name, self._make, self._arguments, options)
                try:
                    await client.start()
                    if self.ready is not None:
                        await self.ready(client)
                    self.members[index] = client
                    self.changed.notify()
                    await client.ended.wait()
                    death = client.death
                except LearnerLost as error:
                    if self.kind != "learner":  # the actor is a sampler that waited for the learner's weights
                        raise
                    death = str(error)
                except ActorDied as error:
                    death = str(error)
                finally:
                    self.members.pop(index, None)
                    await client.close()
                deaths += 1
                if deaths > restarts:
                    before = f"it was started again {restarts} times before" if restarts else "it is not replaced"
                    raise UserError(f"{death}; {before} (ray.max_restarts)")
                self.cluster.counts["actors_restarted"] += 1
                self.cluster.console.print(f"{death}; starting another ({deaths} of {restarts})")
        except Exception as error:
            self._failure = error
            self.changed.notify()
