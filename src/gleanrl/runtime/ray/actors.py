"""Actors of a run: what runs inside one, how the driver calls it, and how one that dies is replaced.

A service (a sampler, a learner, environments, a reward agent) lives in an `ActorServer`, inside a Ray actor. The driver
holds an `ActorClient` for each, and an `ActorPool` for all of one kind:

    pool = ActorPool(cluster, "sampler", 2, SamplerService, arguments)
    await pool.start()
    client = await pool.member()
    await client.call("sample", number, prompt, params)  # batched: for thousands of small calls
    await client.ask("publish", [reference])  # a Ray call of its own: for large values and references

One Ray call costs about 0.6 ms of the driver's processor time, and a step makes thousands of small ones. Therefore
`call` batches the calls of one turn of the event loop, and all answers come back over one Ray stream. The driver also
notices an actor's death by the end of that stream, within milliseconds (Ray's own restarts take about two seconds to
report a death).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import traceback
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

from gleanrl.runtime.ray.cluster import Cluster, death_or_cause, import_ray
from gleanrl.utils.errors import UserError
from gleanrl.utils.notifier import Notifier
from gleanrl.utils.text import first_line

_CLOSE_S = 10.0  # how long an actor may take to close what it holds before it is killed
_AFFINITY_SLACK = 16  # the actor that a key prefers may have this many episodes more than the least busy one


class ActorDied(Exception):
    """The actor died before it answered. The message names it and says why."""


class ActorRaised(Exception):
    """Stands for an exception that cannot be pickled: its type, message and traceback as text."""


class Message(NamedTuple):
    """A call (with a method) or the answer to one. Number 0: no answer is expected."""

    number: int
    method: str | None
    body: bytes  # the pickled arguments, result or exception
    failed: bool = False


class Endpoint:
    """One end of a connection: sends calls to the other end and runs the calls that come from there.

    Each message is pickled on its own, so one that cannot be sent or read fails alone.

    Args:
        handle: coroutine function ``(method, arguments)`` that runs a call from the other end.
        wake: called when there is something to send; `drain` then returns it.
    """

    def __init__(self, handle: Callable[[str, tuple[Any, ...]], Awaitable[Any]], wake: Callable[[], None]) -> None:
        self._handle, self._wake = handle, wake
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._out: list[Message] = []

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return what the method at the other end returns, or raise what it raises."""
        number = next(self._numbers)
        body = _pickled(f"the arguments of {method}", arguments)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(Message(number, method, body))
        try:
            return await waiting
        finally:
            self._waiting.pop(number, None)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call without waiting for an answer."""
        self._send(Message(0, method, _pickled(f"the arguments of {method}", arguments)))

    def drain(self) -> list[Message]:
        out, self._out = self._out, []
        return out

    def receive(self, messages: Iterable[Message]) -> None:
        """Start calls in their order, and hand out answers."""
        for message in messages:
            if message.method is not None:
                task = asyncio.ensure_future(self._serve(message, message.method))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                continue
            waiting = self._waiting.pop(message.number, None)
            if waiting is None or waiting.done():
                continue
            try:
                value = pickle.loads(message.body)
            except Exception as error:
                waiting.set_exception(UserError(f"an answer cannot be read ({first_line(error)})"))
                continue
            if message.failed:
                waiting.set_exception(value)
            else:
                waiting.set_result(value)

    async def fail(self, error: Callable[[], Exception]) -> None:
        """The connection is gone: calls that wait raise, those under way are cancelled."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error())
        for task in list(self._tasks):
            await cancel(task)

    async def _serve(self, message: Message, method: str) -> None:
        try:
            arguments = pickle.loads(message.body)
        except Exception as error:
            answer: Any = UserError(f"the arguments of {method} cannot be read ({first_line(error)})")
            failed = True
        else:
            try:
                answer, failed = await self._handle(method, arguments), False
            except Exception as error:
                answer, failed = portable(error), True
        if not message.number:
            return
        try:
            body = _pickled(f"the answer of {method}", answer)
        except UserError as error:
            body, failed = pickle.dumps(error), True
        self._send(Message(message.number, None, body, failed))

    def _send(self, message: Message) -> None:
        self._out.append(message)
        self._wake()


def _pickled(what: str, value: Any) -> bytes:
    try:
        return import_ray().cloudpickle.dumps(value)
    except Exception as error:
        raise UserError(f"{what} cannot be sent to another process ({first_line(error)})") from None


def portable(error: Exception) -> Exception:
    """An exception that can be pickled, with the traceback of the other process as a note."""
    place = "".join(traceback.format_exception(error))
    try:
        error.add_note(f"in another process:\n{place}")
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # pickling runs the exception class's own code, which may raise anything
        return ActorRaised(f"{type(error).__name__}: {error}\n{place}")


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.wait([task])


# --- inside the actor -----------------------------------------------------------------------------
class Service:
    """Base of what an actor holds: ``make(driver, *arguments)`` returns one. The driver calls its coroutine methods.

    ``driver.call(method, ...)`` and ``driver.tell(method, ...)`` reach the ``answers`` of the actor's pool.
    """

    async def start(self) -> None:
        """Called once, before any other method."""

    async def handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run one call of the driver."""
        return await getattr(self, method)(*arguments)

    def news(self) -> Any:
        """Return what ``answers["news"]`` of the driver receives with the next answers; None = nothing."""
        return None

    async def close(self) -> None:
        """Called once, after the last method, unless the actor is killed."""


class ActorServer:
    """The class of every actor of a run; runs on the actor's event loop and holds one service.

    Args:
        folder: working directory of the driver, for relative paths; ignored where it does not exist.
    """

    def __init__(self, make: Callable[..., Service], arguments: tuple[Any, ...], folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._make, self._arguments = make, arguments
        self._changed = asyncio.Event()
        self._driver = Endpoint(lambda method, arguments: self._service.handle(method, arguments), self._changed.set)
        self._service: Service = Service()

    async def start(self) -> Started:
        """Make the service. What it raises reaches the driver."""
        self._service = self._make(self._driver, *self._arguments)
        self._arguments = ()
        await self._service.start()
        return Started(os.getpid(), import_ray().get_runtime_context().get_node_id(), perf_counter())

    async def receive(self, messages: list[Message]) -> None:
        self._driver.receive(messages)

    async def messages(self) -> Any:
        """The stream of answers, calls and news to the driver."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if (news := self._service.news()) is not None:
                self._driver.tell("news", news)
                self._changed.clear()
            yield self._driver.drain()

    async def ask(self, method: str, *arguments: Any) -> Any:
        """One call outside the stream."""
        try:
            return await self._service.handle(method, arguments)
        except Exception as error:
            raise portable(error) from None

    async def close(self) -> None:
        await self._service.close()


class Started(NamedTuple):
    """What an actor reports once its service is made."""

    pid: int
    node: str  # Ray's id of the node
    clock: float  # `perf_counter` of the actor's process, when it answered


# --- in the driver ----------------------------------------------------------------------------------
class ActorClient:
    """One actor: calls to it, its calls to the driver, and its death.

    Args:
        name: kind and index, such as "sampler 1"; the kind names the process as well ("ray::SamplerActor").
        options: Ray's options of the actor.
        answers: coroutine functions ``(client, *arguments)`` for what the service calls here.
        died: called once, with this client, when the actor dies before it was closed.

    Attributes:
        load: episodes that the actor plays now; its users count them.
        death: why it is gone, or None.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Service],
        arguments: tuple[Any, ...],
        *,
        options: Mapping[str, Any],
        answers: Mapping[str, Callable[..., Awaitable[Any]]],
        died: Callable[[ActorClient], None],
    ) -> None:
        self.name, self.load = name, 0
        self.death: str | None = None
        self.started: Started | None = None
        self.clock_offset = 0.0  # this process's `perf_counter` minus the actor's
        self._answers, self._died = answers, died
        kind = type(f"{name.split()[0].title()}Actor", (ActorServer,), {})
        self._actor = import_ray().remote(kind).options(**options).remote(make, arguments, os.getcwd())
        self._connection = Endpoint(self._handle, self._flush_soon)
        self._reader: asyncio.Task[None] | None = None
        self._flush_due = False

    async def start(self) -> None:
        """Wait until the service is made.

        Raises:
            UserError: the service raised it.
            ActorDied: the actor died before.
        """
        try:
            started = self.started = await self._actor.start.remote()
        except import_ray().exceptions.RayError as error:
            raised = death_or_cause(error)
            if isinstance(raised, str):
                self.death = raised
                raise self._gone() from None
            raise raised from None
        if started.node != import_ray().get_runtime_context().get_node_id():  # processes of one node share a clock
            self.clock_offset = perf_counter() - started.clock
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the service; cheap, for small arguments without object references. Raises `ActorDied`."""
        if self.death is not None:
            raise self._gone()
        return await self._connection.call(method, *arguments)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call without waiting; does nothing if the actor is dead."""
        if self.death is None:
            self._connection.tell(method, *arguments)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call the service by a Ray call of its own, which carries large values and references. Raises `ActorDied`."""
        try:
            return await self._actor.ask.remote(method, *arguments)
        except import_ray().exceptions.RayError as error:
            raise self._raised(error) from None

    def ask_blocking(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """As `ask`, for synchronous code. Raises `ActorDied` after ``timeout_s`` too."""
        ray = import_ray()
        try:
            return ray.get(self._actor.ask.remote(method, *arguments), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise ActorDied(f"{self.name} did not answer within {timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            raise self._raised(error) from None

    async def close(self) -> None:
        """Let the service close, then end the actor."""
        if self._reader is not None:
            await cancel(self._reader)
        self.death = self.death or "was closed"
        await self._connection.fail(self._gone)
        ray = import_ray()
        try:
            await asyncio.wait_for(self._actor.close.remote(), _CLOSE_S)
        except (ray.exceptions.RayError, TimeoutError):
            pass
        finally:
            ray.kill(self._actor)

    def _gone(self) -> ActorDied:
        return ActorDied(f"{self.name} {self.death}")

    def _raised(self, error: Exception) -> Exception:
        raised = death_or_cause(error)
        return ActorDied(f"{self.name} {raised}") if isinstance(raised, str) else raised

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self.death is None:
            self._actor.receive.remote(self._connection.drain())

    async def _read(self) -> None:
        ray = import_ray()
        try:
            async for reference in self._actor.messages.options(num_returns="streaming").remote():
                self._connection.receive(await reference)
            self.death = "ended"
        except ray.exceptions.RayError as error:
            self.death = str(death_or_cause(error))
        await self._connection.fail(self._gone)
        ray.kill(self._actor)  # if only its stream failed, it would live on and hold the next one's resources
        self._died(self)

    async def _handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return await self._answers[method](self, *arguments)


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first error cancels the others and is raised itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


class ActorPool:
    """Actors of one kind, started together. One that dies is replaced, `ray.max_restarts` times at most.

    Args:
        kind: "sampler", "environment", "reward" or "learner".
        make, arguments: of each actor's `Service`.
        answers: see `ActorClient`.
        restarts: replaces `ray.max_restarts`.

    Attributes:
        members: the actors at work, by index.
        ready: called with an actor that was started, before it gets work. Raises `ActorDied` if it died meanwhile.
        left: each is called with an actor that died, before another is started.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        size: int,
        make: Callable[..., Service],
        arguments: tuple[Any, ...],
        *,
        answers: Mapping[str, Callable[..., Awaitable[Any]]] | None = None,
        restarts: int | None = None,
    ) -> None:
        self.cluster, self.kind, self.size = cluster, kind, size
        self.ready: Callable[[ActorClient], Awaitable[None]] | None = None
        self.left: list[Callable[[ActorClient], Awaitable[None]]] = []
        self.members: dict[int, ActorClient] = {}
        self._answers = dict(answers or {})
        self._make, self._arguments = make, arguments
        self._restarts = cluster.settings.max_restarts if restarts is None else restarts
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self._deaths: Counter[int] = Counter()
        self._failure: Exception | None = None
        self.changed = Notifier()
        """Rings when an actor joins, or when none can."""
        self._closed = False

    async def start(self, started: Callable[[], None] = lambda: None) -> None:
        """Start all and wait until each is ready; ``started`` is called for each. Raises what their services raise."""

        async def one(index: int) -> None:
            await self._start(index)
            started()

        await together(one(index) for index in range(self.size))

    async def member(self, key: str | None = None) -> ActorClient:
        """The least busy actor, or the one that ``key`` prefers if it is not much busier.

        Waits while all are being replaced. Raises `UserError` once one died too often.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self.members:
                index = min(self.members, key=lambda index: (self.members[index].load, index))
                if key is not None:
                    preferred = zlib.crc32(key.encode()) % self.size
                    limit = self.members[index].load + _AFFINITY_SLACK
                    if preferred in self.members and self.members[preferred].load <= limit:
                        index = preferred
                return self.members[index]
            await self.changed.wait()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call any actor; if it dies, the call is made again on another."""
        while True:
            try:
                return await (await self.member()).call(method, *arguments)
            except ActorDied:
                continue

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(cancel(task) for task in self._replacing.values()))
        members, self.members = self.members, {}
        await asyncio.gather(*(member.close() for member in members.values()))
        self.changed.notify()

    async def _start(self, index: int) -> None:
        """Start one; start it again if it dies before it is ready."""
        name = self.kind if self.size == 1 else f"{self.kind} {index}"
        options = self.cluster.options(self.kind, index)
        while True:
            client = ActorClient(
                *(name, self._make, self._arguments),
                options=options,
                answers=self._answers,
                died=lambda client: self._died(index, client),
            )
            try:
                await client.start()
                if self.ready is not None:
                    await self.ready(client)
                break
            except ActorDied as error:
                if client.death is None:  # it waited for another actor that died
                    await client.close()
                    raise
                self._count_death(index, error)
            except BaseException:
                await client.close()
                raise
        self.members[index] = client
        self.changed.notify()

    def _died(self, index: int, client: ActorClient) -> None:
        if self.members.get(index) is not client or self._closed:  # it was not ready yet: `_start` handles that
            return
        del self.members[index]
        task = self._replacing[index] = asyncio.create_task(self._replace(index, client))
        task.add_done_callback(lambda _: self._replacing.pop(index, None))

    async def _replace(self, index: int, dead: ActorClient) -> None:
        try:
            for left in self.left:
                await left(dead)
            self._count_death(index, ActorDied(f"{dead.name} {dead.death}"))
            await self._start(index)
        except Exception as error:
            self._failure = error
            self.changed.notify()

    def _count_death(self, index: int, death: ActorDied) -> None:
        """Raises `UserError` if the actor died too often."""
        self._deaths[index] += 1
        deaths = self._deaths[index]
        if deaths > self._restarts:
            before = f"it was started again {self._restarts} times before" if self._restarts else "it is not replaced"
            raise UserError(f"{death}; {before} (ray.max_restarts)")
        self.cluster.counts["actors_restarted"] += 1
        self.cluster.console.print(f"{death}; starting another ({deaths} of {self._restarts})")
