"""One actor as the driver sees it, and the host of a service inside it.

What the driver asks of an actor in one turn of its event loop travels as one call, and answers come back over one
stream, as many at once as there are: a call costs a millisecond, and a step has thousands. The end of the stream is how
the driver hears of a death.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

from gleanrl.runtime.ray.cluster import cause, library
from gleanrl.utils.errors import UserError

_CLOSE_S = 10.0  # for an actor to close what it holds, before it is ended
_TOLD = 300  # characters of an error that nobody has made for people


class ActorDied(Exception):
    """The actor is gone before it answered. The message names it and says why."""


class ActorRaised(Exception):
    """What an actor's code raised and could not be sent as it is: type, message and place, as text."""


class Request(NamedTuple):
    number: int  # 0 where nobody waits for an answer
    method: str
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    number: int
    value: Any
    failed: bool = False


class Begun(NamedTuple):
    """What an actor says of itself."""

    pid: int
    node: str  # Ray's id of it
    clock: float  # `perf_counter` there, at the moment of the answer


# --- inside the actor -----------------------------------------------------------------------------
class Host:
    """Holds one service; its coroutine methods are what a `Link` calls. It runs on the actor's event loop.

    Args:
        make: makes the service, ``make(host, *arguments)``. Its methods ``start``, ``close`` and ``news`` are optional;
            what ``news()`` returns goes to the driver with the next answers.
        folder: where the driver runs, for relative paths; kept only where there is such a folder here.
    """

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...], folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._make, self._arguments = make, arguments
        self._service: Any = None
        self._out: list[Request | Reply] = []
        self._changed = asyncio.Event()
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> Begun:
        """Make the service. What it raises is the caller's."""
        self._service = self._make(self, *self._arguments)
        self._arguments = ()
        if hasattr(self._service, "start"):
            await self._service.start()
        node = library().get_runtime_context().get_node_id()
        return Begun(os.getpid(), node, perf_counter())

    async def take(self, messages: list[Request | Reply]) -> None:
        """Begin what is asked, in its order, and hand out answers to what the service asked."""
        for message in messages:
            if isinstance(message, Request):
                task = asyncio.ensure_future(self._serve(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                continue
            _answered(self._asked.pop(message.number, None), message)

    async def messages(self) -> Any:
        """The stream of answers, questions and news."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            out, self._out = self._out, []
            if news := self._service.news() if hasattr(self._service, "news") else None:
                out.append(Request(0, "news", (news,)))
            yield out

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Ask the driver, from within the service."""
        number = next(self._numbers)
        waiting = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(Request(number, method, arguments))
        return await waiting

    def tell(self, method: str, *arguments: Any) -> None:
        self._send(Request(0, method, arguments))

    async def call(self, method: str, *arguments: Any) -> Any:
        """One call outside the stream, for who cannot wait on an event loop."""
        return await getattr(self._service, method)(*arguments)

    async def end(self) -> None:
        if hasattr(self._service, "close"):
            await self._service.close()

    async def _serve(self, request: Request) -> None:
        try:
            reply = Reply(request.number, await getattr(self._service, request.method)(*request.arguments))
        except Exception as error:
            reply = Reply(request.number, portable(error), failed=True)
        if request.number:
            self._send(reply)

    def _send(self, message: Request | Reply) -> None:
        self._out.append(message)
        self._changed.set()


class SamplerActor(Host):
    """A `Host` under a name of its own, for `ps` and `ray list actors`."""


class LearnerActor(Host):
    """Likewise."""


class EnvironmentActor(Host):
    """Likewise."""


class RewardAgentActor(Host):
    """Likewise."""


_HOSTS: Mapping[str, type[Host]] = {
    "sampler": SamplerActor, "learner": LearnerActor, "environment": EnvironmentActor, "reward": RewardAgentActor
}  # fmt: skip


def portable(error: Exception) -> Exception:
    """An error that can be pickled, with the place where it was raised as a note."""
    place = "".join(traceback.format_exception(error))
    try:
        error.add_note(f"in another process:\n{place}")
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # whatever a class of somebody else's makes of it
        return ActorRaised(f"{type(error).__name__}: {error}\n{place}")


# --- in the driver ----------------------------------------------------------------------------------
class Link:
    """One actor: calls to it, what it asks back, and its death.

    Args:
        name: kind and number, "sampler 1".
        options: Ray's own of the actor.
        answers: coroutine functions ``(link, *arguments)`` for what the service asks or tells.
        died: called once, with the link, when the actor is gone before it was closed.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        options: Mapping[str, Any],
        answers: Mapping[str, Callable[..., Awaitable[Any]]],
        died: Callable[[Link], None],
    ) -> None:
        self.name, self.load = name, 0
        self.death: str | None = None
        self.begun: Begun | None = None
        self.clock_offset = 0.0  # this process's `perf_counter` minus the actor's
        self._answers, self._died = answers, died
        self._actor = (
            library().remote(_HOSTS.get(name.split()[0], Host)).options(**options).remote(make, arguments, os.getcwd())
        )
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._out: list[Request | Reply] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._closed = False

    async def begin(self) -> None:
        """Wait until the service is made.

        Raises:
            UserError: the service says so.
            ActorDied: the actor did not get so far.
        """
        try:
            begun = self.begun = await self._actor.begin.remote()
        except library().exceptions.RayError as error:
            raised = cause(error)
            if isinstance(raised, str):
                self.death = raised
                raise ActorDied(f"{self.name} {raised}") from None
            raise raised from None
        if begun.node != library().get_runtime_context().get_node_id():  # on one node the clock is the same
            self.clock_offset = perf_counter() - begun.clock
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the service's method returns or raises.

        Raises:
            ActorDied: it is gone.
        """
        if self.death is not None:
            raise ActorDied(f"{self.name} {self.death}")
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(Request(number, method, arguments))
        try:
            return await waiting
        finally:
            self._waiting.pop(number, None)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call without waiting; nothing happens if the actor is gone."""
        if self.death is None:
            self._send(Request(0, method, arguments))

    def call_blocking(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """As `call`, for who is on the event loop and must not return before; blocks it.

        Raises:
            ActorDied: it is gone, or did not answer within ``timeout_s``.
        """
        errors = library().exceptions
        try:
            return library().get(self._actor.call.remote(method, *arguments), timeout=timeout_s)
        except errors.GetTimeoutError:
            raise ActorDied(f"{self.name} did not answer within {timeout_s:g} s") from None
        except errors.RayError as error:
            raised = cause(error)
            raise (ActorDied(f"{self.name} {raised}") if isinstance(raised, str) else raised) from None

    async def close(self) -> None:
        """Let the service close, then end the actor."""
        self._closed = True
        await asyncio.gather(*(stop(task) for task in (self._reader, *self._tasks) if task is not None))
        self._fail("was closed")
        errors = library().exceptions
        try:
            await asyncio.wait_for(self._actor.end.remote(), _CLOSE_S)
        except (errors.RayError, TimeoutError):
            pass
        finally:
            library().kill(self._actor)

    def _send(self, message: Request | Reply) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(message)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self.death is None:
            self._deliver(out)

    def _deliver(self, out: list[Request | Reply]) -> None:
        try:
            taken = self._actor.take.remote(out)
        except Exception as error:  # one of them cannot be pickled
            why = error.__cause__ if isinstance(error.__cause__, Exception) else error  # Ray prints all of them
            self._undelivered(out, why)
        else:
            self._keep(self._taken(taken, out))

    async def _taken(self, taken: Any, out: list[Request | Reply]) -> None:
        errors = library().exceptions
        try:
            await taken
        except errors.RayTaskError as error:  # one of them cannot be read there, so none was
            self._undelivered(out, error.cause if isinstance(error.cause, Exception) else error)
        except errors.RayError:  # the actor is gone: `_read` hears of it
            pass

    def _undelivered(self, out: list[Request | Reply], error: Exception) -> None:
        """Deliver each of several for itself; who waits for the answer to a single one is told why there is none."""
        if len(out) > 1:
            for message in out:
                self._deliver([message])
            return
        (message,) = out
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = f"{type(error).__name__}: {lines[0] if lines else ''}"[:_TOLD]
        if isinstance(message, Request):
            lost = UserError(f"{self.name} cannot be asked to {message.method}: its arguments cannot be sent ({why})")
            _answered(self._waiting.pop(message.number, None), Reply(message.number, lost, failed=True))
        else:
            lost = UserError(f"an answer cannot be sent to {self.name} ({why})")
            self._send(Reply(message.number, lost, failed=True))

    async def _read(self) -> None:
        try:
            async for reference in self._actor.messages.options(num_returns="streaming").remote():
                for message in await reference:
                    self._received(message)
            why = "ended"
        except library().exceptions.RayError as error:
            why = str(cause(error))
        self._fail(why)
        library().kill(self._actor)  # one that could not send an answer lives on, and holds the next one's resources
        self._died(self)

    def _received(self, message: Request | Reply) -> None:
        if isinstance(message, Request):
            self._keep(self._answer(message))
            return
        _answered(self._waiting.pop(message.number, None), message)

    async def _answer(self, request: Request) -> None:
        value = await self._answers[request.method](self, *request.arguments)
        if request.number and self.death is None:
            self._send(Reply(request.number, value))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fail(self, why: str) -> None:
        self.death = why
        for task in self._tasks:
            task.cancel()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ActorDied(f"{self.name} {why}"))


def _answered(waiting: asyncio.Future[Any] | None, reply: Reply) -> None:
    if waiting is None or waiting.done():
        return
    if reply.failed:
        waiting.set_exception(reply.value)
    else:
        waiting.set_result(reply.value)


async def stop(task: asyncio.Task[Any]) -> None:
    """Cancel a task and see it ended."""
    task.cancel()
    await asyncio.wait([task])
