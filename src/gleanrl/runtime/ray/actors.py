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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
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


def to_pickle(what: str, value: Any) -> bytes:
    """Pickle one message on its own, so that one that cannot be sent fails alone."""
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


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.wait([task])


async def run_together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
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


# --- inside the actor -----------------------------------------------------------------------------
class Service:
    """Base of what an actor holds: ``make(driver, *arguments)`` returns one. The driver calls its coroutine methods.

    ``driver`` is the `ActorServer`; its `call` and `tell` reach the ``answers`` of the actor's pool.
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


class Started(NamedTuple):
    """What an actor reports once its service is made."""

    pid: int
    node: str  # Ray's id of the node
    clock: float  # `perf_counter` of the actor's process, when it answered


class Call(NamedTuple):
    """A call of a service by the driver, or (with a negative number) the driver's answer to a call of the service."""

    number: int  # 0: no answer is expected
    method: str
    body: bytes  # the pickled arguments or answer


class Answer(NamedTuple):
    """The answer to a call of the driver, or (with a number up to 0) a call of the driver by the service."""

    number: int
    failed: bool
    body: bytes  # the pickled result or exception; of a call: method and arguments


class ActorServer:
    """The class of every actor of a run; runs on the actor's event loop and holds one service.

    Args:
        folder: working directory of the driver, for relative paths; ignored where it does not exist.
    """

    def __init__(self, make: Callable[..., Service], arguments: tuple[Any, ...], folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._make, self._arguments = make, arguments
        self._service = Service()
        self._changed = asyncio.Event()
        self._outbox: list[Answer] = []
        self._numbers = count(-1, -1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- called by the driver
    async def start(self) -> Started:
        """Make the service. What it raises reaches the driver."""
        self._service = self._make(self, *self._arguments)
        self._arguments = ()
        await self._service.start()
        return Started(os.getpid(), import_ray().get_runtime_context().get_node_id(), perf_counter())

    async def receive(self, calls: list[Call]) -> None:
        """Start calls in their order, and hand out answers."""
        for call in calls:
            if call.number < 0:
                self._waiting.pop(call.number).set_result(pickle.loads(call.body))
            else:
                task = asyncio.create_task(self._serve(call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def messages(self) -> AsyncIterator[list[Answer]]:
        """The stream of answers, calls and news to the driver."""
        while True:
            await self._changed.wait()
            if (news := self._service.news()) is not None:
                self.tell("news", news)
            self._changed.clear()
            outbox, self._outbox = self._outbox, []
            yield outbox

    async def ask(self, method: str, *arguments: Any) -> Any:
        """One call outside the stream."""
        try:
            return await self._service.handle(method, arguments)
        except Exception as error:
            raise make_portable(error) from None

    async def close(self) -> None:
        await self._service.close()

    # --- called by the service
    async def call(self, method: str, *arguments: Any) -> Any:
        """Return what ``answers[method]`` in the driver returns."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(Answer(number, False, to_pickle(f"a call of {method}", (method, arguments))))
        return await waiting

    def tell(self, method: str, *arguments: Any) -> None:
        """Call without waiting for an answer."""
        self._send(Answer(0, False, to_pickle(f"a call of {method}", (method, arguments))))

    async def _serve(self, call: Call) -> None:
        method = call.method
        try:
            arguments = from_pickle(f"the arguments of {method}", call.body)
            body = to_pickle(f"the answer of {method}", await self._service.handle(method, arguments))
            failed = False
        except Exception as error:
            body, failed = pickle.dumps(make_portable(error)), True
        if call.number:
            self._send(Answer(call.number, failed, body))

    def _send(self, answer: Answer) -> None:
        self._outbox.append(answer)
        self._changed.set()


# --- in the driver ----------------------------------------------------------------------------------
class ActorClient:
    """One actor: calls to it, its calls to the driver, and its death. Every call raises `ActorDied` once it is gone.

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
        self._outbox: list[Call] = []
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait until the service is made. Raises what the service raises."""
        try:
            started = self.started = await self._actor.start.remote()
        except import_ray().exceptions.RayError as error:
            raised = death_or_cause(error)
            if isinstance(raised, str):
                self.death = raised
                raise ActorDied(f"{self.name} {raised}") from None
            raise raised from None
        if started.node != import_ray().get_runtime_context().get_node_id():  # processes of one node share a clock
            self.clock_offset = perf_counter() - started.clock
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the service; cheap, for small arguments without object references."""
        if self.death is not None:
            raise ActorDied(f"{self.name} {self.death}")
        number = next(self._numbers)
        body = to_pickle(f"the arguments of {method}", arguments)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(Call(number, method, body))
        try:
            return await waiting
        finally:
            self._waiting.pop(number, None)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call without waiting; does nothing if the actor is dead."""
        self._send(Call(0, method, to_pickle(f"the arguments of {method}", arguments)))

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call the service by a Ray call of its own, which carries large values and references."""
        try:
            return await self._actor.ask.remote(method, *arguments)
        except import_ray().exceptions.RayError as error:
            raised = death_or_cause(error)
            raise (ActorDied(f"{self.name} {raised}") if isinstance(raised, str) else raised) from None

    def ask_blocking(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """As `ask`, for synchronous code. Raises `ActorDied` after ``timeout_s`` too."""
        ray = import_ray()
        try:
            return ray.get(self._actor.ask.remote(method, *arguments), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise ActorDied(f"{self.name} did not answer within {timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            raised = death_or_cause(error)
            raise (ActorDied(f"{self.name} {raised}") if isinstance(raised, str) else raised) from None

    async def close(self) -> None:
        """Let the service close, then end the actor."""
        if self._reader is not None:
            await cancel(self._reader)
        await self._end(self.death or "was closed")
        ray = import_ray()
        try:
            await asyncio.wait_for(self._actor.close.remote(), _CLOSE_S)
        except (ray.exceptions.RayError, TimeoutError):
            pass
        finally:
            ray.kill(self._actor)

    def _send(self, call: Call) -> None:
        def flush() -> None:
            calls, self._outbox = self._outbox, []
            if self.death is None:
                self._actor.receive.remote(calls)

        if not self._outbox:
            asyncio.get_running_loop().call_soon(flush)
        self._outbox.append(call)

    async def _read(self) -> None:
        """Hand out the actor's answers and run its calls until it is gone."""
        ray = import_ray()
        try:
            async for reference in self._actor.messages.options(num_returns="streaming").remote():
                for number, failed, body in await reference:
                    if number <= 0:
                        task = asyncio.create_task(self._answer(number, body))
                        self._answering.add(task)
                        task.add_done_callback(self._answering.discard)
                        continue
                    waiting = self._waiting.pop(number, None)
                    if waiting is None or waiting.done():
                        continue
                    try:
                        value = from_pickle("an answer", body)
                    except UserError as error:
                        failed, value = True, error
                    if failed:
                        waiting.set_exception(value)
                    else:
                        waiting.set_result(value)
            death = "ended"
        except ray.exceptions.RayError as error:
            death = str(death_or_cause(error))
        await self._end(death)
        ray.kill(self._actor)  # if only its stream failed, it would live on and hold the next one's resources
        self._died(self)

    async def _answer(self, number: int, body: bytes) -> None:
        method, arguments = pickle.loads(body)
        answer = await self._answers[method](self, *arguments)
        if number:
            self._send(Call(number, method, to_pickle(f"the answer of {method}", answer)))

    async def _end(self, death: str) -> None:
        """Calls that wait raise, answers under way are cancelled."""
        self.death = death
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ActorDied(f"{self.name} {death}"))
        for task in list(self._answering):
            await cancel(task)


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
        changed: notified when an actor joins, or when none can.
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
        self.changed = Notifier()
        self._answers = dict(answers or {})
        self._make, self._arguments = make, arguments
        self._restarts = cluster.settings.max_restarts if restarts is None else restarts
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self._deaths: Counter[int] = Counter()
        self._failure: Exception | None = None
        self._closed = False

    async def start(self, started: Callable[[], None] = lambda: None) -> None:
        """Start all and wait until each is ready; ``started`` is called for each. Raises what their services raise."""

        async def start_one(index: int) -> None:
            await self._start(index)
            started()

        await run_together(start_one(index) for index in range(self.size))

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
        while True:
            client = ActorClient(
                *(self.kind if self.size == 1 else f"{self.kind} {index}", self._make, self._arguments),
                options=self.cluster.options(self.kind, index),
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

    def _died(self, index: int, dead: ActorClient) -> None:
        if self.members.get(index) is not dead or self._closed:  # it was not ready yet: `_start` handles that
            return
        del self.members[index]

        async def replace() -> None:
            try:
                for left in self.left:
                    await left(dead)
                self._count_death(index, ActorDied(f"{dead.name} {dead.death}"))
                await self._start(index)
            except Exception as error:
                self._failure = error
                self.changed.notify()

        task = self._replacing[index] = asyncio.create_task(replace())
        task.add_done_callback(lambda _: self._replacing.pop(index, None))

    def _count_death(self, index: int, death: ActorDied) -> None:
        """Raises `UserError` if the actor died too often."""
        self._deaths[index] += 1
        deaths = self._deaths[index]
        if deaths > self._restarts:
            before = f"it was started again {self._restarts} times before" if self._restarts else "it is not replaced"
            raise UserError(f"{death}; {before} (ray.max_restarts)")
        self.cluster.counts["actors_restarted"] += 1
        self.cluster.console.print(f"{death}; starting another ({deaths} of {self._restarts})")
