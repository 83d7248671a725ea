"""The environment service as an ASGI application: a taskset and its live episodes, documented by OpenAPI.

`gleanrl.environments.service.server` serves it; tests and other ASGI servers use ``Service(...).app``.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gleanrl import __version__
from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.environments.service import bodies as b
from gleanrl.environments.service import calls
from gleanrl.environments.service.bodies import NotJson, encode
from gleanrl.environments.service.episodes import Answer, Episodes, Refused
from gleanrl.protocols import Taskset
from gleanrl.types import StopReason
from gleanrl.utils.fingerprint import fingerprint as hashed
from gleanrl.utils.importing import file_versions
from gleanrl.utils.serialize import DecodeError

PAGE = 4 << 20  # bytes of tasks in one answer, about
LISTS, KEPT = 4, 64 << 20  # lists of tasks, and bytes of them, that are kept for their further pages
LARGEST = 4 << 20  # bytes of a request's body
OPEN = frozenset({"/health", "/openapi.json", "/docs", "/redoc"})  # they reveal nothing and need no token
MIB = 1 << 20
_SHARE = 0.8  # of the machine's memory, where no limit is given
_MEMORY_AGE_S = 1.0  # of the last look at the memory
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
PROBLEMS: Mapping[int, dict[str, Any]] = {
    401: {"description": "No token, or another one (`unauthorized`)."},
    403: {"description": "Addressed by a name that is not the server's (`host`)."},
    404: {
        "description": "No such episode: never created, released, expired, or lost with an earlier server (`unknown`); "
        "no expert knows that task (`no_expert`)."
    },
    409: {
        "description": "Another request is under way (`busy`), the step was taken with another message or is not the "
        "next one (`conflict`), the episode is over (`over`), the server has another environment (`other_environment`)."
    },
    413: {"description": "The body is too large (`too_large`)."},
    415: {"description": "The body is not JSON (`media_type`)."},
    422: {"description": "The body is not as described (`invalid`)."},
    429: {"description": "As many episodes as may live here (`full`).", "headers": _RETRY},
    500: {
        "description": "The environment raised (`raised`), took too long (`timeout`), its worker died (`died`), or it "
        "says that something must be fixed (`mistake`). The episode is over; no other is touched."
    },
    503: {
        "description": "No memory for a further episode, or too many calls of the taskset wait (`full`); shutting down "
        "(`draining`).",
        "headers": _RETRY,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one server, in MiB and seconds; None: no limit."""

    max_instances: int = 1024
    idle_timeout_s: float = 1800.0
    max_memory: float | None = None
    taskset_timeout_s: float = 600.0


class Service:
    """A taskset behind HTTP; ``pool`` plays its environments and must be open. Close the service before the pool.

    Args:
        token: that every request must carry, except those for the paths in `OPEN`; None: no token.
        hosts: names under which the server may be addressed; None: any. With a list, a page in a browser on this
            machine cannot reach a server on loopback under its own name (DNS rebinding).
    """

    def __init__(
        self,
        taskset: Taskset,
        pool: EnvironmentPool,
        settings: EnvironmentSettings,
        limits: Limits,
        *,
        seed: int = 0,
        token: str | None = None,
        hosts: frozenset[str] | None = None,
    ) -> None:
        self.taskset, self.pool, self.settings, self.limits = taskset, pool, settings, limits
        self._calls = calls.Calls(taskset, pool, limits.taskset_timeout_s)
        self.episodes = Episodes(pool.environment, limits.max_instances, limits.idle_timeout_s, self._check_memory)
        self.fingerprint = fingerprint(settings, seed, taskset.version)
        self._began = time.monotonic()
        self._memory = (0.0, 0.0)  # MiB, and when that was measured
        self._lists: dict[tuple[str, int], Sequence[bytes]] = {}  # encoded tasks, the list asked for last at the end
        self._api = FastAPI(
            title="Glean RL environment service",
            version=__version__,
            description=_ABOUT,
            exception_handlers=dict.fromkeys(_ERRORS, answer_error),
        )
        add = self._add_route
        add("/taskset", self.describe, b.TasksetAnswer, "Describe the taskset")
        add("/tasks", self.tasks, b.TasksAnswer, "List the first tasks of a split", 500, 503)
        add("/create", self.create, b.EpisodeAnswer, "Begin an episode of a task", 404, 409, 429, 500, 503)
        add("/step", self.step, b.EpisodeAnswer, "Send a message to the environment", 404, 409, 500)
        add("/evaluate", self.evaluate, b.ScoreAnswer, "Read the score of an episode so far", 404)
        add("/conclude", self.conclude, b.ScoreAnswer, "End an episode that is out of turns or tokens", 404, 409, 500)
        add("/release", self.release, b.ReleaseAnswer, "End an episode")
        # What the taskset cannot do has no route.
        if type(taskset).tools is not Taskset.tools:
            add("/tools", self.tools, b.ToolsAnswer, "List the tools that episodes of a task have", 500, 503)
        if type(taskset).prepare is not Taskset.prepare:
            add("/prepare", self.prepare, b.PrepareAnswer, "Do slow one-time work for tasks", 500, 503)
        if taskset.has_expert:
            add("/demonstrate", self.demonstrate, b.DemonstrateAnswer, "Let the expert play", 404, 500, 503)
        add("/health", self.health, b.HealthAnswer, "Whether the server takes requests; needs no token")
        add("/profile", self.profile, b.ProfileAnswer, "Load, latency, processor time and memory")
        self.openapi = self._api.openapi()
        _complete_document(self.openapi, secured=token is not None)
        posts = frozenset(path for path, methods in self.openapi["paths"].items() if "post" in methods)
        self.app = Guard(self._api, posts=posts, token=token, hosts=hosts)

    def _add_route(
        self, path: str, endpoint: Callable[..., Awaitable[Response]], answer: Any, summary: str, *problems: int
    ) -> None:
        takes_body = "body" in endpoint.__annotations__
        self._api.add_api_route(
            path,
            endpoint,
            methods=["POST" if takes_body else "GET"],
            response_model=answer,
            summary=summary,
            operation_id=path[1:],
            responses={
                status: {"model": b.Problem, **PROBLEMS[status]}
                for status in sorted({*problems, 401, 403, *((413, 415, 422) if takes_body else ())})
            },
        )

    async def close(self, finish_s: float = 0.0) -> None:
        """End all episodes, once requests under way have had ``finish_s`` seconds."""
        await self.episodes.close(finish_s)
        await self._calls.close()

    # --- routes ---------------------------------------------------------------------------------
    async def create(self, body: b.CreateBody) -> Response:
        if body.environment not in (None, self.fingerprint):
            detail = (
                f"this server has the environment {self.settings.name!r} with other options than expected, or another"
            )
            raise Refused(409, "other_environment", detail)
        return await self.episodes.create(body.id, b.read_task(body.task))

    async def step(self, body: b.StepBody) -> Response:
        b.check_message(body.message)
        return await self.episodes.step(body.id, body.step, body.message)  # type: ignore[arg-type]

    async def evaluate(self, body: b.EpisodeBody) -> Response:
        return self.episodes.evaluate(body.id)

    async def conclude(self, body: b.ConcludeBody) -> Response:
        return await self.episodes.conclude(body.id, StopReason(body.stop))

    async def release(self, body: b.EpisodeBody) -> Response:
        return await self.episodes.release(body.id)

    async def tasks(self, body: b.TasksBody) -> Response:
        key = (body.split, body.count)
        found = self._lists.pop(key, None)
        if found is None:
            if why := self._check_memory():
                raise Refused(503, "full", why, 5)
            found = await self._call(("tasks", *key), partial(calls.list_tasks, body.split, body.count))
        self._lists.pop(key, None)
        self._lists[key] = found
        while len(self._lists) > 1:
            size = sum(len(task) for tasks in self._lists.values() for task in tasks)
            if len(self._lists) <= LISTS and size <= KEPT:
                break
            del self._lists[next(iter(self._lists))]
        page, size = [], 0
        for task in islice(found, min(body.start, len(found)), None):
            page.append(task)
            size += len(task)
            if size > PAGE:
                break
        end = body.start + len(page) >= len(found)
        content = b'{"tasks":[%b],"end":%b}' % (b",".join(page), b"true" if end else b"false")
        return Response(content, media_type="application/json")

    async def prepare(self, body: b.PrepareBody) -> Response:
        tasks = [b.read_task(task) for task in body.tasks]
        await self._call(("prepare", encode(tasks)), partial(calls.prepare, tasks, os.cpu_count() or 1))
        return Answer({"prepared": len(tasks)})

    async def demonstrate(self, body: b.DemonstrateBody) -> Response:
        task = b.read_task(body.task)
        key = ("demonstrate", encode(task), body.seed, body.noise)
        found = await self._call(key, partial(calls.demonstrate, task, body.seed, body.noise))
        if isinstance(found, str):
            raise Refused(404, "no_expert", found)
        return Response(found, media_type="application/json")

    async def tools(self, body: b.ToolsBody) -> Response:
        task = b.read_task(body.task)
        found = await self._call(("tools", encode(task)), partial(calls.list_tools, task))
        return Response(found, media_type="application/json")

    async def describe(self) -> Response:
        taskset = self.taskset
        return Answer(
            {
                "environment": self.settings.name,
                "fingerprint": self.fingerprint,
                "demonstrates": taskset.has_expert,
                "prepares": type(taskset).prepare is not Taskset.prepare,
                "phrases": list(taskset.phrases),
                "needs_reward": taskset.needs_reward,
                "weights": dict(taskset.weights) or None,
                "tools": [] if type(taskset).tools is Taskset.tools else None,
                "max_instances": self.limits.max_instances,
                "idle_timeout_s": self.limits.idle_timeout_s,
                "version": __version__,
            }
        )

    async def health(self) -> Response:
        return Answer({"status": "draining" if self.episodes.draining else "ok", "version": __version__})

    async def profile(self) -> Response:
        episodes = self.episodes
        return Answer(
            {
                "uptime_s": time.monotonic() - self._began,
                "instances": episodes.live,
                "max_instances": episodes.most,
                "running": episodes.running,
                "created": episodes.counts.created,
                "expired": episodes.counts.expired,
                "failed": episodes.counts.failed,
                "refused": episodes.counts.refused,
                "memory_mib": self.held_mib(),
                "max_memory_mib": self.limits.max_memory,
                "cpu_s": time.process_time(),
                "workers": list(self.pool.worker_pids),
                "workers_replaced": self.pool.stats.workers_replaced,
            }
        )

    # --- what they need -------------------------------------------------------------------------
    async def _call(self, key: Hashable, call: calls.Call) -> Any:
        try:
            return await self._calls.call(key, call)
        except Exception as error:
            raise Refused.of(error) from error

    def _check_memory(self) -> str:
        """Return why the memory has no room for another episode; empty if it has."""
        most = self.limits.max_memory
        if most is None or (held := self.held_mib()) <= most:
            return ""
        return f"the server and its workers hold {held:.0f} MiB of {most:.0f} (--max-memory)"

    def held_mib(self) -> float:
        """Resident memory of this process and its children, at most a second old."""
        held, measured = self._memory
        if time.monotonic() - measured > _MEMORY_AGE_S:
            process, held = psutil.Process(), 0.0
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):  # it has just ended
                    held += one.memory_info().rss / MIB
            self._memory = (held, time.monotonic())
        return held


def fingerprint(settings: EnvironmentSettings, seed: int, version: str) -> str:
    """Return 16 hex digits that change with the environment, its options, the files that they name, the seed, and the
    versions of the environment and of Glean RL."""
    parts = [__version__, settings.name, settings.options, seed, version]
    parts += file_versions([settings.name, settings.options])
    return hashed(json.dumps(parts, sort_keys=True, default=str), size=8)


def default_memory() -> float:
    """Return the MiB that server and workers may hold by default: a share of what the machine or container has."""
    most = psutil.virtual_memory().total
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max", or there is none
            most = min(most, int(Path(limit).read_text()))
    return _SHARE * most / MIB


# --- HTTP ---------------------------------------------------------------------------------------
_ABOUT = """Episodes of an environment, as JSON.

`/create` begins one under an id that the client chooses, `/step` takes numbered steps, `/release` ends it. Any request
may be sent again after a lost connection: its id and number identify it, it gets the first one's answer, and the
environment sees it once. An episode without a request for a while expires.
"""
_ERRORS = (Refused, NotJson, DecodeError, RequestValidationError, HTTPException, Exception)


async def answer_error(request: Request, error: Exception) -> Response:
    """The answer to a request that raised."""
    match error:
        case Refused() | NotJson():
            return Refused.of(error).answer
        case DecodeError():
            refusal = Refused(422, "invalid", str(error))
        case RequestValidationError():
            errors = error.errors()
            where = ".".join(str(part) for part in errors[0]["loc"] if part != "body") or "the body"
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            refusal = Refused(422, "invalid", f"{where}: {errors[0]['msg']}{more}")
        case HTTPException(status_code=400):  # raised only for a body that cannot be read
            refusal = Refused(422, "invalid", str(error.detail))
        case HTTPException():
            refusal = Refused(error.status_code, "http", str(error.detail))
            refusal.answer.headers.update(error.headers or {})
        case _:
            refusal = Refused(500, "internal", f"{type(error).__name__} in the server; its log says more")
    return refusal.answer


def _complete_document(openapi: dict[str, Any], *, secured: bool) -> None:
    """Add to the OpenAPI document which requests an episode's id is for, and whether a token is needed."""
    id = {"id": "$response.body#/id"}
    further = {path: {"operationId": path, "requestBody": id} for path in ("evaluate", "conclude", "release")}
    first = {"operationId": "step", "requestBody": {**id, "step": 1}}
    for path, links in (("/create", {"step": first, **further}), ("/step", further), ("/evaluate", further)):
        openapi["paths"][path]["post"]["responses"]["200"]["links"] = links
    if secured:
        openapi.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, methods in openapi["paths"].items():
            for operation in methods.values() if path not in OPEN else ():
                operation["security"] = [{"token": []}]


class Guard:
    """ASGI middleware: checks host, token, and the kind and size of a body before the application reads it.

    Args:
        posts: paths that take a body. The application itself refuses other methods and paths.
    """

    def __init__(
        self,
        app: Any,
        *,
        posts: frozenset[str] = frozenset(),
        token: str | None = None,
        hosts: frozenset[str] | None = None,
    ) -> None:
        self._app, self._posts, self._hosts = app, posts, hosts
        self._token = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        try:
            host = headers.get(b"host", b"").decode("latin-1")
            if self._hosts is not None and re.sub(r":\d*\Z", "", host).strip("[]").lower() not in self._hosts:
                raise Refused(403, "host", f"this server is not addressed as {host[:100]!r}")
            given = headers.get(b"authorization", b"")
            if self._token is not None and scope["path"] not in OPEN and not hmac.compare_digest(given, self._token):
                detail = "the token is another one" if given else "a token is needed: Authorization: Bearer TOKEN"
                raise Refused(401, "unauthorized", detail)
            if scope["method"] != "POST" or scope["path"] not in self._posts:
                return await self._app(scope, receive, send)
            body = await self._read_body(headers, receive)
        except Refused as refusal:
            return await refusal.answer(scope, receive, send)
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Any:
            return unread.pop() if unread else await receive()

        await self._app(scope, receive_again, send)

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Any) -> bytes:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # a browser sends other types to any server without asking it first
            raise Refused(415, "media_type", "send a body of Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        too_large = length.isdigit() and int(length) > LARGEST
        found, more = bytearray(), True
        while more and not too_large:
            message = await receive()
            found += message.get("body", b"")
            more = message.get("more_body", False)
            too_large = len(found) > LARGEST
        if too_large:
            raise Refused(413, "too_large", f"a body has at most {LARGEST} bytes")
        return bytes(found)
