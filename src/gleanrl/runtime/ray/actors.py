"""The actors of a run: the code inside an actor, the driver's calls of it, and the replacement of actors that die.

A `Service` (a sampler, a learner, environments or a reward agent) runs in an `ActorServer`, inside a Ray actor. The
driver is the process that runs the job. It has an `ActorClient` for each actor, and an `ActorPool` for all actors of
one kind:

    pool = ActorPool(cluster, "sampler", 2, SamplerService, arguments)
    await pool.start()
    client = await pool.member()
    await client.call("sample", number, prompt, params)  # batched: for thousands of small calls
    await client.ask("publish", [reference])  # a separate Ray call: for large values and references

One Ray call costs about 0.6 ms of the driver's CPU time, and a step makes thousands of small calls. Therefore `call`
sends all calls that are made in one iteration of the event loop by one Ray call, and all results return over one Ray
stream. When an actor dies, its stream ends, by which the driver notices the death within milliseconds. With Ray's own
restarts (``max_restarts``) a death is reported after about two seconds, so they are not used here.

The same messages carry requests for the driver's `DeviceLock`. A service that shares its device with other actors
acquires `ActorServer.device_lock`. The `ActorClient` then holds the `DeviceLock` on behalf of the service, until the
service releases it or the actor dies.
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
from gleanrl.utils.errors import ADVICE, ProcessDied, UserError
from gleanrl.utils.notifier import Notifier
from gleanrl.utils.text import first_line

_CLOSE_S = 10.0  # seconds that an actor's service may take to close before the actor is killed
# the actor that a key selects (see `ActorPool.member`) is used if it plays at most this many episodes more than the
# least busy actor
_AFFINITY_SLACK = 16


class ActorDied(Exception):
    """Raised by a call if the actor died before it returned a result. The message names the actor and the reason."""


class LearnerLost(Exception):
    """Raised by a call of the learner if its actor or one of its ranks died.

    All updates since the last checkpoint are lost, so the learner is not replaced on its own, as other actors are
    (`ActorDied`): `gleanrl.runtime.ray.run` starts all actors again.
    """


class ActorRaised(Exception):
    """Replaces an exception that cannot be pickled. Its message has the exception's type, message and traceback."""


def to_pickle(what: str, value: Any) -> bytes:
    """Pickle ``value`` with cloudpickle. ``what`` names it in the `UserError` that is raised if it cannot be pickled.

    Each message is pickled separately instead of with its batch, so that one message that cannot be pickled does not
    prevent the others from being sent.
    """
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
    """Return ``error``, with its traceback added as a note, or an `ActorRaised` if ``error`` cannot be pickled."""
    place = "".join(traceback.format_exception(error))
    try:
        error.add_note(f"in another process:\n{place}")
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # pickling runs code of the exception's class, which may raise any exception
        return ActorRaised(f"{type(error).__name__}: {error}\n{place}")


# --- messages -------------------------------------------------------------------------------------
class Started(NamedTuple):
    """The result of `ActorServer.start`, by which an actor reports that its service has started."""

    node: str  # Ray's id of the node on which the actor runs
    clock: float  # value of `perf_counter` in the actor's process when it returned this


class Call(NamedTuple):
    """Message from the driver to an actor: call a method of its service."""

    number: int  # identifies the call in its `Answer`; 0 if the driver expects no answer
    method: str  # name of the service's method
    body: bytes  # the pickled tuple of arguments


class Answer(NamedTuple):
    """Message from an actor to the driver: the result of a `Call`."""

    number: int  # number of the call
    failed: bool  # whether the method raised an exception
    body: bytes  # the pickled result, or the pickled exception if `failed`


class LockRequest(NamedTuple):
    """Message from an actor to the driver: a request to the driver's `DeviceLock` on behalf of the actor's service."""

    hold: int  # number that identifies one hold of the lock, from "acquire" to "release"
    request: str  # "acquire", "give_way" or "release"
    work: Any  # kind of work, such as "train"; decides the priority


class LockGranted(NamedTuple):
    """Message from the driver to an actor: answer to "acquire" or "give_way". The actor now holds the device.

    If ``error`` is not empty, the lock raised an exception and the actor does not hold the device.
    """

    hold: int
    error: bytes = b""  # the pickled exception


class Span(NamedTuple):
    """Message from an actor to the driver: a span for the run's timeline."""

    kind: str
    start: float  # seconds, as read from `perf_counter` in the actor's process
    end: float
    tags: dict[str, Any]


# --- inside the actor -----------------------------------------------------------------------------
class Service:
    """Base class of the object that runs inside an actor and whose coroutine methods the driver calls by name.

    The actor constructs its service as ``make(driver, *arguments)``. ``driver`` is the `ActorServer` in the same
    process; the service may use its `device_lock` and `record`, which reach the driver.
    """

    async def start(self) -> None:
        """Prepare the service. Called once, before any other method."""

    async def handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run a call from the driver and return its result. By default, calls the method with this name."""
        return await getattr(self, method)(*arguments)

    async def close(self) -> None:
        """Release the service's resources. Called once, after all other methods, unless the actor is killed."""


@dataclass(frozen=True)
class RemoteHold:
    """The counterpart of a `DeviceHold` inside an actor.

    `wanted` says whether more urgent work waits for the device, which only the driver knows. Here it is always True, so
    that the holder always calls `give_way`; the driver's answer comes at once if no such work waits.
    """

    server: ActorServer
    number: int
    work: Any
    wanted: bool = True

    async def give_way(self) -> None:
        await self.server.request_lock(LockRequest(self.number, "give_way", self.work))


class ActorServer:
    """The Ray actor class of all actors of a run. It contains one service and runs it on the actor's event loop.

    Args:
        make: constructs the service, as ``make(self, *arguments)``.
        folder: the driver's working directory. The actor changes to it, so that relative paths in the settings mean the
            same files as in the driver. Ignored if the actor's node has no such directory.
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
        """Construct and start the service. An exception of the service is raised in the driver."""
        self._service = self._make(self, *self._arguments)
        self._arguments = ()
        await self._service.start()
        return Started(import_ray().get_runtime_context().get_node_id(), perf_counter())

    async def receive(self, messages: list[Call | LockGranted]) -> None:
        """Start a task for each `Call`, in order, and resume the tasks for which the device was granted.

        Returns without waiting for the calls; `messages` yields their results.
        """
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
        """Yield batches of messages to the driver. The driver reads this stream as long as the actor lives.

        A span does not cause a batch. It is sent with the next answer or lock request.
        """
        while True:
            batch: list[Answer | LockRequest | Span] = [await self._outbox.get()]
            while not self._outbox.empty():
                batch.append(self._outbox.get_nowait())
            spans, self._spans = self._spans, []
            yield batch + spans

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Run one call of the service and return its result as the result of this Ray call, not over the stream."""
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
        """Hold the driver's `DeviceLock` while the block runs, as ``DeviceLock(...)(work)`` does in the driver."""
        hold = RemoteHold(self, next(self._holds), work)
        try:
            await self.request_lock(LockRequest(hold.number, "acquire", work))
            yield hold
        finally:
            self._outbox.put_nowait(LockRequest(hold.number, "release", work))

    async def request_lock(self, request: LockRequest) -> None:
        """Send an "acquire" or "give_way" request to the driver and wait until it grants the device.

        Raises the exception that the driver's lock raised.
        """
        granted = self._granted[request.hold] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(request)
        await granted

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
        """Record a span in the driver's timeline; see `Timeline.record`. May be called from any thread."""
        self._spans.append(Span(kind, start, end, tags))


# --- in the driver ----------------------------------------------------------------------------------
class ActorClient:
    """The driver's interface to one actor. The constructor starts the actor.

    It calls the actor's service, executes the service's requests to the device lock, records its spans in the timeline,
    and detects the actor's death. After the death, every call raises `ActorDied`, or `LearnerLost` if the actor is the
    learner or one of its ranks. A service that raises `ProcessDied` cannot be used any more, so its actor is killed.

    Args:
        name: kind and index, such as "sampler 1". The kind also names the actor's process ("ray::SamplerActor").
        make, arguments: see `ActorServer`.
        options: Ray's options for the actor, such as ``num_cpus``.

    Attributes:
        load: number of episodes that the actor currently plays. The callers increase and decrease it.
        death: the actor's name and why it died or was closed; None while the actor can be called.
        node: Ray's id of the actor's node, once it has started.
        ended: set when the actor has died (not when it was closed).
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
        self.node = ""
        self._cluster = cluster
        self._error = LearnerLost if name.split()[0] in ("learner", "rank") else ActorDied
        self._clock_offset = 0.0  # seconds to add to the actor's times to get times of this process's `perf_counter`
        kind = type(f"{name.split()[0].title()}Actor", (ActorServer,), {})
        self._cause: str | None = None  # why this client has killed the actor
        self._actor = import_ray().remote(kind).options(**options).remote(make, arguments, os.getcwd())
        self._outbox: asyncio.Queue[Call | LockGranted] = asyncio.Queue()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._holds: dict[int, tuple[asyncio.Queue[str], asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until the service has started.

        Raises an exception of the service, or `ActorDied`, also if the actor's node is gone and the cluster provides no
        other within ``ray.wait_s`` seconds.
        """
        ray, wait_s = import_ray(), self._cluster.settings.wait_s
        starting = asyncio.ensure_future(self._actor.start.remote())
        try:
            while not (await asyncio.wait([starting], timeout=wait_s))[0]:
                if ray.util.placement_group_table(self._cluster.group)["state"] != "CREATED":
                    raise self._error(
                        f"{self.name} did not get its resources within ray.wait_s = {wait_s:g} s (a node is gone)"
                    )
            started: Started = starting.result()
        except ray.exceptions.RayError as error:
            raise self._explain(error) from None
        finally:
            starting.cancel()
        self.node = started.node
        if started.node != import_ray().get_runtime_context().get_node_id():  # on one node, all processes share a clock
            self._clock_offset = perf_counter() - started.clock
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the service by a message in a batch, and return its result.

        This is much cheaper than `ask`. Use it for small arguments that contain no Ray object references.
        """
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
        """Like `call`, for a call that belongs to an episode: raises `EpisodeLost` instead of `ActorDied`."""
        try:
            return await self.call(method, *arguments)
        except ActorDied as error:
            self._cluster.counts["episodes_lost"] += 1
            raise EpisodeLost(str(error)) from None

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the service without waiting for it; its result is discarded. No error if the actor died."""
        self._outbox.put_nowait(Call(0, method, to_pickle(f"the arguments of {method}", arguments)))

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the service by a Ray call of its own, and return its result.

        Use it for large arguments or results, and for arguments that contain Ray object references.
        """
        try:
            return await self._actor.ask.remote(method, *arguments)
        except import_ray().exceptions.RayError as error:
            raise self._explain(error) from None

    def ask_blocking(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Like `ask`, but blocks the calling thread. Raises `ActorDied` also if there is no answer in ``timeout_s``."""
        ray = import_ray()
        try:
            return ray.get(self._actor.ask.remote(method, *arguments), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise self._error(f"{self.name} did not answer within {timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            raise self._explain(error) from None

    async def close(self) -> None:
        """Close the service, waiting for at most `_CLOSE_S`, and kill the actor. Waiting calls raise `ActorDied`."""
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
        """Convert an error of Ray to the exception that the service raised, or to an `ActorDied` with the reason."""
        reason = death_or_cause(error)
        return self._error(f"{self.name} {reason}") if isinstance(reason, str) else self._after(reason)

    def _after(self, raised: Exception) -> Exception:
        """Return what a call raises after its service has ``raised``. If that is `ProcessDied`, the actor is killed."""
        if not isinstance(raised, ProcessDied):
            return raised
        self._cause = self._cause or f"died: {raised}".removesuffix(ADVICE)
        import_ray().kill(self._actor)
        return self._error(f"{self.name} {self._cause}")

    async def _write(self) -> None:
        """Send the messages in the outbox. Those of one iteration of the event loop are sent by one Ray call."""
        while True:
            batch = [await self._outbox.get()]
            while not self._outbox.empty():
                batch.append(self._outbox.get_nowait())
            if self.death is None:
                self._actor.receive.remote(batch)

    async def _read(self) -> None:
        """Handle the messages of the actor until it dies, then end its waiting calls and set `ended`."""
        ray = import_ray()
        death = "ended"
        try:
            async for reference in self._actor.messages.options(num_returns="streaming").remote():
                for message in await reference:
                    if isinstance(message, Span):
                        if (timeline := self._cluster.timeline) is not None:
                            kind, start, end, tags = message
                            # A full disk raises `UserError` here. It is not handled, because the spans that the driver
                            # records itself raise the same error, which ends the run.
                            with suppress(UserError):
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
                            waiting.set_exception(self._after(value))
                        else:
                            waiting.set_result(value)
        except ray.exceptions.RayError as error:
            death = self._cause or str(death_or_cause(error))
        await self._end(f"{self.name} {death}")
        # If only the stream failed, the actor still lives and occupies the resources that its replacement needs.
        ray.kill(self._actor)
        self.ended.set()

    async def _hold_device(self, acquire: LockRequest, requests: asyncio.Queue[str]) -> None:
        """Acquire the run's `DeviceLock` for the actor and hold it until the actor sends "release".

        Runs as a task for each hold, which `_end` cancels if the actor dies. ``requests`` receives the actor's later
        requests ("give_way" and "release") for this hold.
        """
        try:
            async with self._cluster.device_lock(acquire.work) as held:
                self._outbox.put_nowait(LockGranted(acquire.hold))
                while await requests.get() == "give_way":
                    if held.wanted:
                        await held.give_way()
                    self._outbox.put_nowait(LockGranted(acquire.hold))
        except Exception as error:
            # The lock writes to the timeline, which fails if the disk is full. The actor waits for an answer, so it
            # must receive the error.
            self._outbox.put_nowait(LockGranted(acquire.hold, pickle.dumps(make_portable(error))))
            await requests.get()  # the actor's "release"
        del self._holds[acquire.hold]

    async def _end(self, death: str) -> None:
        """Make all waiting calls raise an error with the message ``death``, and release the actor's device holds."""
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
    """``size`` actors of one kind. An actor that dies is replaced, at most ``ray.max_restarts`` times per index.

    Args:
        kind: "sampler", "environment" or "reward".
        make, arguments: construct the `Service` of each actor.

    Attributes:
        members: the actors that can be called, by index (0 to ``size`` - 1).
        ready: coroutine function that is called with each actor after its start and before it becomes a member. If it
            raises `ActorDied`, the actor counts as dead.
        changed: notified when an actor becomes a member, and when the pool has failed.
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
        """Start all actors and wait until all are members. Calls ``started`` once for each actor.

        Raises the exception of a service that cannot start. Also after an error, the caller must call `close`.
        """
        self._keepers = [asyncio.create_task(self._keep_at_work(index)) for index in range(self.size)]
        for ready in range(self.size):
            while len(self.members) <= ready:
                if self._failure is not None:
                    raise self._failure
                await self.changed.wait()
            started()

    async def member(self, key: str | None = None) -> ActorClient:
        """Return the actor that plays the fewest episodes.

        With ``key``, such as a task's id, return the actor that the hash of ``key`` selects, unless it plays over
        `_AFFINITY_SLACK` episodes more than the least busy actor. Waits while all actors are being replaced. Raises
        `UserError` if an actor has died more than ``ray.max_restarts`` times.
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
        """Call the least busy actor by `ActorClient.call`. If it dies, repeat the call on another actor."""
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
        """Start the actor ``index``, and start it again each time it dies. Runs as a task until the pool is closed.

        Stores an exception in `_failure` if the service cannot start or the actor dies more often than is allowed.
        """
        name = self.kind if self.size == 1 else f"{self.kind} {index}"
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
                    death = str(client.death)
                except ActorDied as error:
                    death = str(error)
                finally:
                    self.members.pop(index, None)
                    await client.close()
                deaths += 1
                self.cluster.restart(death, deaths, "starting another")
        except Exception as error:
            self._failure = error
            self.changed.notify()
