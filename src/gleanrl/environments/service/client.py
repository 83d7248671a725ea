"""The environment ``service`` of the settings: a taskset whose environments run in a server.

The server is started with ``gleanrl serve-env``, on this machine or another. `ServiceTaskset` is the taskset.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from gleanrl.environments.pool import (
    EnvironmentDied,
    EnvironmentFailure,
    EnvironmentRaised,
    EnvironmentTimeout,
)
from gleanrl.environments.service.bodies import NotJson, encode, read_task
from gleanrl.protocols import Environment, EpisodeLost, Observation, Split, Taskset, Tools
from gleanrl.types import Message, OpenAIMessage, Score, StopReason, Task
from gleanrl.utils import background_loop
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.http import HttpClient, retry_after
from gleanrl.utils.retry import Fatal, Retries, Retryable, RetryPolicy
from gleanrl.utils.serialize import from_builtins

RELEASE_S = 2.0  # seconds for which a request to release an episode is retried; without a release, the episode expires
PREPARED = 16  # maximum number of tasks in one request to /prepare
START_S = 10.0  # seconds for which the first request to a service is retried
RETRIES = RetryPolicy(attempts=None, backoff_s=0.1, max_backoff_s=5.0)
# Statuses, of the service or of a proxy, after which a request is sent again. 500 is not one of them, because it
# reports a failure that a further request would not change.
_PASSING = frozenset({408, 425, 429, 502, 503, 504})


class Problem(Exception):
    """The service refuses a request.

    ``error`` names the reason in one word, and ``detail`` in a sentence. ``more`` is the body of the answer. If the
    answer does not come from an environment service, ``error`` is "foreign" and ``more`` is empty.
    """

    def __init__(self, status: int, error: str, detail: str, more: Mapping[str, Any]) -> None:
        super().__init__(detail)
        self.status, self.error, self.detail, self.more = status, error, detail, more


class Unanswered(Exception):
    """The service gave no answer for ``patience_s`` seconds, although the request was sent again and again."""


class ServiceClient(HttpClient):
    """Sends requests to a service, with retries. Retries are safe, because the service recognises a repeated request.

    ``patience_s``: number of seconds for which a request is retried if the service is unreachable, is full or does not
    answer.
    """

    def __init__(self, url: str, *, token_env: str | None, timeout_s: float, patience_s: float) -> None:
        super().__init__(url, api_key_env=token_env, timeout_s=timeout_s, setting="environment.options.url")
        self._patience_s = patience_s
        self._closing: asyncio.Task[None] | None = None  # task that closes the connections when the event loop ends

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, *, patience_s: float | None = None) -> Any:
        """Send ``body`` as a POST request, or a GET request if it is None, and return the decoded answer.

        Raises:
            Problem: the service refuses the request.
            Unanswered: the service did not answer for ``patience_s`` seconds (None = the client's own value).
            NotJson: ``body`` cannot be written as JSON.
        """
        method, content = ("GET", None) if body is None else ("POST", encode(body))
        patience = self._patience_s if patience_s is None else patience_s
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        retries: Retries | None = None
        loop = asyncio.get_running_loop()
        if self._closing is None or self._closing.done() or self._closing.get_loop() is not loop:
            self._closing = loop.create_task(self._close_when_cancelled())
        while True:
            error: Exception
            try:
                response = await self.send(method, path, content, headers)
            except (Retryable, Fatal) as failed:
                error = failed
            else:
                answer: Any = None
                with suppress(ValueError):
                    answer = json.loads(response.body)
                problem: dict[str, Any] = {}
                if isinstance(answer, dict) and isinstance(answer.get("error"), str):
                    problem = answer
                detail = str(problem.get("detail", "")) if problem else self.quote(response.body)
                if response.status not in _PASSING:
                    if 200 <= response.status < 300 and answer is not None:
                        return answer
                    if problem:
                        raise Problem(response.status, problem["error"], detail, problem)
                    raise Problem(response.status, "foreign", f"status {response.status}: {detail}", {})
                error = Retryable(f"status {response.status}: {self.quote(detail)}", retry_after(response.headers))
            retries = retries or Retries(replace(RETRIES, outage_s=patience))
            try:
                await asyncio.sleep(retries.next_wait(error))
            except (Retryable, Fatal):
                raise Unanswered(f"no answer from {self.url} for {patience:g} s; the last: {error}") from None

    async def _close_when_cancelled(self) -> None:
        """Wait until the running event loop ends, which cancels this task, and then close the connections."""
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await self.aclose()
            raise


@cache
def get_client(
    url: str, token_env: str | None, timeout_s: float, patience_s: float, *, background: bool = False
) -> ServiceClient:
    """Return this process's client of a service. All episodes share its connections.

    ``background``: return the client that is used on `background_loop`. It is separate, because a connection belongs to
    one event loop.
    """
    return ServiceClient(url, token_env=token_env, timeout_s=timeout_s, patience_s=patience_s)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=get_client.cache_clear)  # connections do not survive a fork


class ServiceTaskset(Taskset):
    """Uses the tasks and environments of a service that was started with ``gleanrl serve-env``.

    The taskset can be pickled. Each process that holds a copy opens its own connections.

    Args:
        url: address of the service, e.g. ``http://host:8765``.
        token: ``"env:NAME"``, where NAME is the environment variable that holds the token.
        timeout_s: limit for one request, in seconds. A request that takes longer is sent again and gets the same
            answer.
        patience_s: number of seconds for which a request is retried if the service is unreachable, is full or does not
            answer.

    Raises:
        UserError: the address does not answer or is not an environment service, or the token is wrong.
    """

    def __init__(
        self, *, url: str, token: str | None = None, timeout_s: float = 120.0, patience_s: float = 120.0
    ) -> None:
        if token is not None and not (isinstance(token, str) and token.startswith("env:")):
            raise UserError(
                'environment.options.token: write "env:NAME", where the environment variable NAME holds the token'
            )
        if not patience_s >= 0:
            raise UserError(f"environment.options.patience_s = {patience_s}: must be 0 or more")
        self._where = (url, None if token is None else token.removeprefix("env:"), float(timeout_s), float(patience_s))
        about = self._ask("/taskset", None, min(START_S, patience_s))
        try:
            self.served: str = about["environment"]
            self.version = about["fingerprint"]  # a hash of the environment, its options and its data
            self.phrases = tuple(about["phrases"])
            self.needs_reward = about["needs_reward"]
            self._prepares: bool = about["prepares"]
            self._tools: list[Mapping[str, Any]] | None = about["tools"]
            self.has_expert = about["demonstrates"]
            self.weights = about["weights"] or {}
        except (KeyError, TypeError):
            raise UserError(f"environment.options.url: {url} is no environment service (gleanrl serve-env)") from None

    @property
    def client(self) -> ServiceClient:
        """The connections of this process to the service."""
        return get_client(*self._where)

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """See `gleanrl.protocols.Taskset.tasks`. Raises `UserError` if the service cannot list the tasks."""
        found: list[Task] = []
        while True:
            page = self._ask("/tasks", {"split": split, "count": count, "start": len(found)})
            found += (read_task(task) for task in page["tasks"])
            if page["end"]:
                return found

    def prepare(
        self, tasks: Sequence[Task], *, workers: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """See `gleanrl.protocols.Taskset.prepare`. The service uses its own processes, so ``workers`` is unused."""
        for start in range(0, len(tasks), PREPARED):
            batch = list(tasks[start : start + PREPARED])
            if self._prepares:
                self._ask("/prepare", {"tasks": batch})
            for done in range(start, start + len(batch)):
                if progress is not None:
                    progress(done + 1, len(tasks))

    def tools(self, task: Task) -> Tools:
        return tuple(self._ask("/tools", {"task": task})["tools"] if self._tools is None else self._tools)

    def environment(self, task: Task) -> Environment:
        return _Episode(self, task)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """See `gleanrl.protocols.Taskset.demonstrate`."""
        if not self.has_expert:
            return super().demonstrate(task, seed=seed, noise=noise)
        answer = self._ask("/demonstrate", {"task": task, "seed": seed, "noise": noise})
        return tuple(answer["messages"]), from_builtins(answer["score"], Score)

    def _ask(self, path: str, body: dict[str, Any] | None, patience_s: float | None = None) -> Any:
        client = get_client(*self._where, background=True)
        try:
            return background_loop.run(client.ask(path, body, patience_s=patience_s))
        except Unanswered as error:
            raise UserError(f"environment.options.url: {error}") from None
        except Problem as error:
            if error.error == "no_expert":
                raise NoExpert(error.detail) from None
            where = f"{client.url}{path}"
            if error.status == 401:
                token = self._where[1]
                hint = f" (that of env:{token})" if token else '; set environment.options.token = "env:NAME"'
                raise UserError(f"environment.options.token: {where}: {error.detail}{hint}") from None
            if error.error in ("foreign", "http", "host"):
                raise UserError(f"environment.options.url: {where}: {error.detail}") from None
            kind = f"{error.more['kind']}: " if error.more.get("kind") else ""
            raise UserError(f"the environment service, {where}: {kind}{error.detail}") from None


class _Episode(Environment):
    """One episode in the service; see `gleanrl.protocols.Environment`.

    If the service was restarted or the episode expired, methods raise `EpisodeLost`, so that the episode is played
    again from its start. If the service gives no answer for ``patience_s`` seconds, they raise `EnvironmentDied`, and
    the episode fails.
    """

    def __init__(self, taskset: ServiceTaskset, task: Task) -> None:
        self._taskset, self._task = taskset, task
        self._id = uuid.uuid4().hex
        self._steps = -1  # number of steps answered; -1 = not reset yet, or closed
        self._begun = False

    async def reset(self) -> Observation:
        if self._begun:
            raise RuntimeError(f"task {self._task.id!r}: an environment is reset once; make another")
        self._begun = True
        return await self._observe("/create", {"task": self._task, "environment": self._taskset.version})

    async def step(self, message: Message) -> Observation:
        if self._steps < 0:
            raise RuntimeError(f"task {self._task.id!r}: reset before step, and no step after close")
        return await self._observe("/step", {"step": self._steps + 1, "message": message})

    async def conclude(self, stop: StopReason) -> Score | None:
        answer = await self._ask("/conclude", {"stop": stop})
        return None if answer["score"] is None else from_builtins(answer["score"], Score)

    async def close(self) -> None:
        """Release the episode. Errors are ignored, because an episode that is not released expires in the service."""
        begun, self._begun, self._steps = self._begun, False, -1
        if begun:
            with suppress(Problem, Unanswered):
                await self._taskset.client.ask("/release", {"id": self._id}, patience_s=RELEASE_S)

    async def _observe(self, path: str, body: dict[str, Any]) -> Observation:
        answer = await self._ask(path, body)
        self._steps += 1
        from_builtins(answer["observation"].get("messages", ()), list[OpenAIMessage])
        return from_builtins(answer["observation"], Observation)

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        id, where = self._task.id, self._taskset.client.url
        try:
            return await self._taskset.client.ask(path, {"id": self._id, **body})
        except NotJson as error:
            raise EnvironmentRaised(id, "NotJson", f"the request cannot be sent: {error}", "") from None
        except Unanswered as error:
            raise EnvironmentDied(id, str(error)) from None
        except Problem as problem:
            failure: Exception
            match problem.error:
                case "unknown":
                    # The service does not have this episode, so `close` has nothing to release.
                    self._begun = False
                    failure = EpisodeLost(f"{where}: {problem.detail}")
                case "timeout":
                    failure = EnvironmentTimeout(id, problem.detail)
                case "died":
                    failure = EnvironmentDied(id, problem.detail)
                case "raised":
                    kind, traceback = str(problem.more.get("kind")), str(problem.more.get("traceback") or "")
                    failure = EnvironmentRaised(id, kind, problem.detail, traceback)
                case "mistake":
                    failure = UserError(problem.detail)
                case "unauthorized" | "other_environment":
                    failure = UserError(f"{where}: {problem.detail}")
                case _:
                    failure = EnvironmentFailure(id, f"{where}: {problem.detail}")
            raise failure from None
