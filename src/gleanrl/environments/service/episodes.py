"""Holds the live episodes of a server: makes each once, takes each numbered step once, and ends idle episodes.

A client may send a request again because its answer was lost, even while the first request is still under way. The
client chooses the episode's id and numbers its steps, so that a repeated request is recognised: it gets the same answer
as the first one, and the environment sees the request only once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from gleanrl.environments.pool import EnvironmentFailure, EnvironmentRaised, EnvironmentTimeout
from gleanrl.environments.service.bodies import NotJson, encode
from gleanrl.protocols import Environment, EpisodeLost, Observation
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import NoExpert, UserError

_log = logging.getLogger(__name__)
_TRACEBACK = 4000  # maximum number of characters, from the end of a traceback, that are sent to the client
# Number of seconds that a refused client should wait before it tries again: _FULL_S if the maximum number of episodes
# is reached, _BUSY_S if memory is short or the server is shutting down.
_BUSY_S, _FULL_S = 5, 1
END_S = 8.0  # maximum number of seconds for environments to close when the server shuts down
DRAINING = (503, "draining", "the server is shutting down", _BUSY_S)  # arguments of `Refused` during a shutdown


class Answer(Response):
    """A response whose body is a value as JSON. Requests that repeat the first one are answered with the same object.

    ``after_s`` is the number of seconds after which the client may try again, sent as the header Retry-After.
    """

    media_type = "application/json"

    def __init__(self, value: Any, status: int = 200, after_s: int | None = None) -> None:
        headers = {} if after_s is None else {"retry-after": str(after_s)}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        super().__init__(encode(value), status, headers)


class Refused(Exception):
    """A request is not carried out. ``answer`` is the response that says why.

    The response has the HTTP ``status``. Its body holds the reason as a word (``error``), the reason as a sentence
    (``detail``), and the fields of ``more``. ``after_s`` is the number of seconds after which the client may try again.
    """

    def __init__(self, status: int, error: str, detail: str, after_s: int | None = None, **more: str) -> None:
        super().__init__(detail)
        self.answer = Answer({"error": error, "detail": detail, **more}, status, after_s)

    @classmethod
    def of(cls, error: BaseException) -> Refused:
        """Return the refusal that reports an error of an environment or a taskset to the client."""
        detail = str(error)
        more: dict[str, str] = {}
        match error:
            case Refused():
                return error
            case EpisodeLost():
                return cls(404, "unknown", detail)
            case NoExpert():
                return cls(404, "no_expert", detail)
            case EnvironmentRaised(kind="NotJson"):  # raised in a worker process
                return cls.of(NotJson(error.detail))
            case EnvironmentRaised():
                kind, detail = "raised", error.detail
                more = {"kind": error.kind, "traceback": error.traceback_text[-_TRACEBACK:]}
            case EnvironmentFailure():
                kind = "timeout" if isinstance(error, EnvironmentTimeout) else "died"
                detail = detail.removeprefix(f"task {error.task_id!r}: ")
            case UserError():
                kind = "mistake"
            case NotJson():
                kind, more = "raised", {"kind": "NotJson"}
                detail = f"what the environment gave cannot be sent: {detail}"
            case _:
                kind, more = "raised", {"kind": type(error).__name__}
        return cls(500, kind, detail, None, **more)


@dataclass(slots=True, eq=False)
class _Episode:
    id: str
    task: Task
    environment: Environment
    step: int = 0  # number of the last step that began; 0 = the reset
    message: Message | None = None  # the message of that step; None for the reset
    stop: StopReason | None = None  # reason given to `conclude`, after which no further step is accepted
    answer: asyncio.Task[Response] | None = None  # task that makes the answer to the last reset, step or conclude
    score: Score | None = None  # last score that the environment gave
    answered: int = 0  # number of the last step that was answered with an observation
    over: str = ""  # why no further step is accepted; empty while the episode runs
    expiry: asyncio.TimerHandle | None = None  # timer that ends an idle episode; None while a request runs
    closing: asyncio.Task[None] | None = None  # task that closes the environment


@dataclass(slots=True)
class Counts:
    created: int = 0
    expired: int = 0
    failed: int = 0
    refused: int = 0


@dataclass(slots=True)
class Episodes:
    """Holds live episodes by id.

    ``environment`` makes an environment, as `EnvironmentPool.environment` does. ``most`` is the maximum number of live
    episodes. ``room()`` returns a message that says why no further episode can be made now, or an empty string. When an
    episode is over, its environment is closed at once, but its last answer and score are kept until the episode is
    released or has had no request for ``idle_timeout_s`` seconds.
    """

    environment: Callable[[Task], Environment]
    most: int
    idle_timeout_s: float
    room: Callable[[], str] = lambda: ""
    counts: Counts = field(default_factory=Counts)
    draining: bool = False  # true once the server shuts down: no further episode is accepted
    _live: dict[str, _Episode] = field(default_factory=dict)
    _ended: OrderedDict[str, str] = field(default_factory=OrderedDict)  # id of a recent episode -> how it ended
    _closing: set[_Episode] = field(default_factory=set)  # episodes whose environments are being closed

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def running(self) -> int:
        """Number of episodes with a request under way."""
        return sum(not episode.answer.done() for episode in self._live.values() if episode.answer)

    async def create(self, id: str, task: Task) -> Response:
        """Begin an episode and answer with its first observation."""
        episode = self._live.get(id)
        if episode is not None:
            if episode.step or episode.stop or episode.task != task:
                raise self._refusal(409, "conflict", f"an episode {id!r} of another request lives here")
            return await self._answer(episode)
        if id in self._ended:
            raise self._refusal(409, "conflict", f"episode {id!r} cannot begin again: {self._ended[id]}")
        if self.draining:
            raise self._refusal(*DRAINING)
        if len(self._live) + sum(e.id not in self._live for e in self._closing) >= self.most:
            detail = f"{self.most} episodes live here already (--max-instances)"
            raise self._refusal(429, "full", detail, _FULL_S)
        if why := self.room():
            raise self._refusal(503, "full", why, _BUSY_S)
        episode = self._live[id] = _Episode(id, task, self.environment(task))
        self.counts.created += 1
        return await self._answer(episode, self._observe(episode, episode.environment.reset()))

    async def step(self, id: str, step: int, message: Message) -> Response:
        """Send ``message`` as step number ``step`` to the environment, and answer with its observation."""
        episode = self._find(id)
        if step == episode.step and message == episode.message and episode.stop is None:
            return await self._answer(episode)
        self._check_free(episode)
        if step <= episode.step:
            raise self._refusal(409, "conflict", f"step {step} of episode {id!r} was taken with another message")
        if step > episode.step + 1:
            raise self._refusal(409, "conflict", f"episode {id!r} is at step {episode.step}: no step {step} yet")
        if episode.over:
            raise self._refusal(409, "over", f"episode {id!r} is over: {episode.over}")
        episode.step, episode.message = step, message
        return await self._answer(episode, self._observe(episode, episode.environment.step(message)))

    async def conclude(self, id: str, stop: StopReason) -> Response:
        """End the episode for the reason ``stop``, and answer with the score that the environment then gives."""
        episode = self._find(id)
        if episode.stop is not None:
            if episode.stop is not stop:
                detail = f"episode {id!r} was concluded for another reason: {episode.stop}"
                raise self._refusal(409, "conflict", detail)
            return await self._answer(episode)
        self._check_free(episode)
        if episode.over:
            raise self._refusal(409, "over", f"episode {id!r} is over: {episode.over}")

        async def conclude() -> Response:
            score = await episode.environment.conclude(stop)
            answer = Answer({"id": id, "step": episode.step, "done": True, "score": score})
            episode.score, episode.over = score or episode.score, f"it was concluded ({stop})"
            return answer

        episode.stop = stop
        return await self._answer(episode, conclude())

    def evaluate(self, id: str) -> Response:
        """Answer with the last score that the environment gave, and restart the episode's idle time."""
        episode = self._find(id)
        if episode.expiry is not None:
            self._start_expiry(episode)
        body = {"id": id, "step": episode.answered, "done": bool(episode.over), "score": episode.score}
        return Answer(body)

    async def release(self, id: str) -> Response:
        """End an episode. If the request to create the episode arrives after this request, it is refused."""
        closing = self._end(id, "it was released")
        if closing is not None:
            await asyncio.shield(closing)
        return Answer({"released": closing is not None})

    async def close(self, finish_s: float = 0.0) -> None:
        """End all episodes. Requests under way get ``finish_s`` seconds to finish first.

        Returns after `END_S` seconds even if some environments are not closed yet; the pool ends those.
        """
        self.draining = True
        running = [e.answer for e in self._live.values() if e.answer is not None and not e.answer.done()]
        if running and finish_s:
            await asyncio.wait(running, timeout=finish_s)
        for id in list(self._live):
            self._end(id, DRAINING[2])
        if closing := [self._close(episode) for episode in self._closing]:
            await asyncio.wait(closing, timeout=END_S)  # limited, because a blocked worker cannot close an environment

    # --- one request ------------------------------------------------------------------------------
    def _find(self, id: str) -> _Episode:
        if (episode := self._live.get(id)) is not None:
            return episode
        why = self._ended.get(id, "it was never created, or the server was restarted since")
        raise self._refusal(404, "unknown", f"no episode {id!r}: {why}")

    def _refusal(self, status: int, error: str, detail: str, after_s: int | None = None) -> Refused:
        self.counts.refused += 1
        return Refused(status, error, detail, after_s)

    def _check_free(self, episode: _Episode) -> None:
        if episode.answer is not None and not episode.answer.done():
            raise self._refusal(409, "busy", f"step {episode.step} of episode {episode.id!r} is still under way")

    async def _answer(self, episode: _Episode, work: Coroutine[Any, Any, Response] | None = None) -> Response:
        """Return the answer to the episode's last request.

        ``work`` makes the answer. If it is None, an earlier, equal request has already started the work.
        """
        if work is not None:
            if episode.expiry is not None:
                episode.expiry.cancel()
                episode.expiry = None
            # Run the work in a separate task, which continues when a lost connection cancels the request.
            episode.answer = asyncio.get_running_loop().create_task(self._carry_out(episode, work))
        elif episode.expiry is not None:
            self._start_expiry(episode)
        answer = episode.answer
        assert answer is not None
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not answer.cancelled():
                raise
        if self.draining:
            raise self._refusal(*DRAINING)
        raise self._refusal(409, "over", f"episode {episode.id!r} was released meanwhile")

    async def _carry_out(self, episode: _Episode, work: Coroutine[Any, Any, Response]) -> Response:
        try:
            answer = await work
        except EpisodeLost as error:  # the environment runs in yet another service, which lost the episode
            answer = Refused.of(error).answer
            episode.over = str(error)
            self._end(episode.id, str(error))
        except Exception as error:
            self.counts.failed += 1
            episode.over = " ".join(str(error).split())[:300] or type(error).__name__
            answer = Refused.of(error).answer
        if episode.over:
            self._close(episode)
        if episode.id in self._live:
            self._start_expiry(episode)
        return answer

    async def _observe(self, episode: _Episode, call: Awaitable[Observation]) -> Response:
        observation = await call
        answer = Answer({"id": episode.id, "step": episode.step, "observation": observation})
        episode.score, episode.answered = observation.score or episode.score, episode.step
        episode.over = "the environment said so" if observation.done else ""
        return answer

    # --- the end of an episode --------------------------------------------------------------------
    def _start_expiry(self, episode: _Episode) -> None:
        """Start or restart the timer after which the episode expires."""

        def expire() -> None:
            self.counts.expired += 1
            self._end(episode.id, f"it expired after {self.idle_timeout_s:g} s without a request (--idle-timeout-s)")

        if episode.expiry is not None:
            episode.expiry.cancel()
        episode.expiry = asyncio.get_running_loop().call_later(self.idle_timeout_s, expire)

    def _end(self, id: str, how: str) -> asyncio.Task[None] | None:
        """Remove an episode, remember ``how`` it ended, and close its environment.

        Returns the task that closes the environment, or None if there is no live episode with this id.
        """
        self._ended.setdefault(id, how)
        if len(self._ended) > 16 * self.most + 1024:
            self._ended.popitem(last=False)
        episode = self._live.pop(id, None)
        if episode is None:
            return None
        if episode.expiry is not None:
            episode.expiry.cancel()
        return self._close(episode)

    def _close(self, episode: _Episode) -> asyncio.Task[None]:
        """Cancel the request under way and return a task that closes the environment.

        Further calls for the same episode return the same task.
        """

        async def close() -> None:
            try:
                await episode.environment.close()
            except Exception as error:
                _log.warning("closing an environment failed: %s", error)

        if episode.closing is None:
            if episode.answer is not None and episode.answer is not asyncio.current_task():
                episode.answer.cancel()
            episode.closing = asyncio.get_running_loop().create_task(close())
            self._closing.add(episode)
            episode.closing.add_done_callback(lambda _: self._closing.discard(episode))
        return episode.closing
