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
_ALWAYS, _BODY = (401, 403), (413, 415, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one server; MiB and seconds, None = none."""

    max_instances: int = 1024
    idle_timeout_s: float = 1800.0
    max_memory: float | None = None
    taskset_timeout_s: float = 600.0


class Service:
    """A taskset behind HTTP; ``pool`` plays its environments and must be open. Close it before the pool.

    Args:
        token: that every request but those for `OPEN` must bear; None = none.
        hosts: names that a request may be addressed to; None = any. Otherwise a page in a browser on this machine could
            reach a server on loopback under a name of its own (DNS rebinding).
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
        self.episodes = Episodes(pool.environment, limits.max_instances, limits.idle_timeout_s, self._room)
        self.fingerprint = fingerprint(settings, seed, taskset.version)
        self._began = time.monotonic()
        self._memory = (0.0, 0.0)  # MiB, and when that was measured
        self._lists: dict[tuple[str, int], Sequence[bytes]] = {}  # encoded, the one asked for last at the end
        self._api = api(self)
        self.openapi = self._api.openapi()
        _link(self.openapi)
        if token is not None:
            _secure(self.openapi)
        self.app = Guard(self._api, token=token, hosts=hosts)

    async def close(self, finish_s: float = 0.0) -> None:
        """End all episodes, once requests under way have had ``finish_s`` seconds."""
        await self.episodes.close(finish_s)
        await self._calls.close()

    # --- routes ---------------------------------------------------------------------------------
    async def create(self, body: b.CreateBody) -> Answer:
        if body.environment not in (None, self.fingerprint):
            detail = (
                f"this server has the environment {self.settings.name!r} with other options than expected, or another"
            )
            raise Refused(409, "other_environment", detail)
        return await self.episodes.create(body.id, b.read_task(body.task))

    async def step(self, body: b.StepBody) -> Answer:
        return await self.episodes.step(body.id, body.step, b.read_message(body.message))

    async def evaluate(self, body: b.EpisodeBody) -> Answer:
        return self.episodes.evaluate(body.id)

    async def conclude(self, body: b.ConcludeBody) -> Answer:
        return await self.episodes.conclude(body.id, StopReason(body.stop))

    async def release(self, body: b.EpisodeBody) -> Answer:
        return await self.episodes.release(body.id)

    async def tasks(self, body: b.TasksBody) -> Answer:
        key = (body.split, body.count)
        found = self._lists.pop(key, None)
        if found is None:
            if why := self._room():
                raise Refused(503, "full", why, 5)
            found = await self._called(("tasks", *key), calls.tasks(body.split, body.count))
        self._lists.pop(key, None)
        self._lists[key] = found
        while len(self._lists) > 1 and (len(self._lists) > LISTS or sum(map(_size, self._lists.values())) > KEPT):
            del self._lists[next(iter(self._lists))]
        page, size = [], 0
        for task in islice(found, min(body.start, len(found)), None):
            page.append(task)
            size += len(task)
            if size > PAGE:
                break
        end = body.start + len(page) >= len(found)
        return Answer(200, b'{"tasks":[%b],"end":%b}' % (b",".join(page), b"true" if end else b"false"))

    async def prepare(self, body: b.PrepareBody) -> Answer:
        tasks = [b.read_task(task) for task in body.tasks]
        return Answer(200, await self._called(("prepare", encode(tasks)), calls.prepare(tasks, os.cpu_count() or 1)))

    async def demonstrate(self, body: b.DemonstrateBody) -> Answer:
        task = b.read_task(body.task)
        key = ("demonstrate", encode(task), body.seed, body.noise)
        found = await self._called(key, calls.demonstrate(task, body.seed, body.noise))
        if isinstance(found, str):
            raise Refused(404, "no_expert", found)
        return Answer(200, found)

    async def tools(self, body: b.ToolsBody) -> Answer:
        task = b.read_task(body.task)
        return Answer(200, await self._called(("tools", encode(task)), calls.tools(task)))

    def _room(self) -> str:
        """Why no further episode fits into the memory; empty if one does."""
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

    async def _called(self, key: Hashable, call: calls.Call) -> Any:
        try:
            return await self._calls.call(key, call)
        except Exception as error:
            raise Refused.of(error) from error

    async def describe(self) -> Answer:
        limits, taskset = self.limits, self.taskset
        return Answer(
            200,
            encode(
                {
                    "environment": self.settings.name,
                    "fingerprint": self.fingerprint,
                    "demonstrates": taskset.has_expert,
                    "prepares": type(taskset).prepare is not Taskset.prepare,
                    "phrases": list(taskset.phrases),
                    "needs_reward": taskset.needs_reward,
                    "weights": dict(taskset.weights) or None,
                    "tools": [] if type(taskset).tools is Taskset.tools else None,
                    "max_instances": limits.max_instances,
                    "idle_timeout_s": limits.idle_timeout_s,
                    "version": __version__,
                }
            ),
        )

    async def health(self) -> Answer:
        return Answer(200, encode({"status": "draining" if self.episodes.draining else "ok", "version": __version__}))

    async def profile(self) -> Answer:
        episodes, counts = self.episodes, self.episodes.counts
        return Answer(
            200,
            encode(
                {
                    "uptime_s": time.monotonic() - self._began,
                    "instances": episodes.live,
                    "max_instances": episodes.most,
                    "running": episodes.running,
                    "created": counts.created,
                    "expired": counts.expired,
                    "failed": counts.failed,
                    "refused": counts.refused,
                    "memory_mib": self.held_mib(),
                    "max_memory_mib": self.limits.max_memory,
                    "cpu_s": time.process_time(),
                    "workers": list(self.pool.worker_pids),
                    "workers_replaced": self.pool.stats.workers_replaced,
                }
            ),
        )


def fingerprint(settings: EnvironmentSettings, seed: int, version: str) -> str:
    """16 hex digits that change with the environment, its options, the files that they name, the seed, its own version
    and that of Glean RL."""
    parts = [__version__, settings.name, settings.options, seed, version]
    parts += file_versions([settings.name, settings.options])
    return hashed(json.dumps(parts, sort_keys=True, default=str), size=8)


def default_memory() -> float:
    """MiB that server and workers may hold where no limit is given: a share of what the machine or container has."""
    most = psutil.virtual_memory().total
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max", or there is none
            most = min(most, int(Path(limit).read_text()))
    return _SHARE * most / MIB


# --- HTTP ---------------------------------------------------------------------------------------
def api(service: Service) -> FastAPI:
    """The routes of a service; what a taskset cannot do has none."""
    made = FastAPI(
        title="Glean RL environment service", version=__version__, description=_ABOUT, exception_handlers=_HANDLERS
    )
    _add(made, "/taskset", service.describe, b.TasksetAnswer, "What is served")
    _add(made, "/tasks", service.tasks, b.TasksAnswer, "The first tasks of a split", b.TasksBody, 500, 503)
    _add(
        made,
        "/create",
        service.create,
        b.EpisodeAnswer,
        "Begin an episode of a task",
        b.CreateBody,
        404,
        409,
        429,
        500,
        503,
    )
    _add(made, "/step", service.step, b.EpisodeAnswer, "Say something to the environment", b.StepBody, 404, 409, 500)
    _add(made, "/evaluate", service.evaluate, b.ScoreAnswer, "What an episode has earned so far", b.EpisodeBody, 404)
    _add(made, "/conclude", service.conclude, b.ScoreAnswer, "End for want of room", b.ConcludeBody, 404, 409, 500)
    _add(made, "/release", service.release, b.ReleaseAnswer, "End an episode", b.EpisodeBody)
    if type(service.taskset).tools is not Taskset.tools:
        _add(made, "/tools", service.tools, b.ToolsAnswer, "What the episodes of a task declare", b.ToolsBody, 500, 503)
    if type(service.taskset).prepare is not Taskset.prepare:
        _add(
            made,
            "/prepare",
            service.prepare,
            b.PrepareAnswer,
            "Do slow one-time work for tasks",
            b.PrepareBody,
            500,
            503,
        )
    if service.taskset.has_expert:
        _add(
            made,
            "/demonstrate",
            service.demonstrate,
            b.DemonstrateAnswer,
            "Let the expert play",
            b.DemonstrateBody,
            404,
            500,
            503,
        )
    _add(made, "/health", service.health, b.HealthAnswer, "Whether the server takes requests; needs no token")
    _add(made, "/profile", service.profile, b.ProfileAnswer, "Load, latency, processor time and memory")
    return made


_ABOUT = """Episodes of an environment, as JSON.

`/create` begins one under an id that the client chooses, `/step` takes numbered steps, `/release` ends it. Any request
may be sent again after a lost connection: it is known by its id and number, gets the first one's answer, and the
environment sees it once. An episode without a request for a while expires.
"""


def _add(
    api: FastAPI,
    path: str,
    call: Callable[..., Awaitable[Answer]],
    answer: Any,
    summary: str,
    body: Any = None,
    *problems: int,
) -> None:
    async def of_nothing() -> Response:
        return _response(await call())

    async def of_body(body: Any) -> Response:
        return _response(await call(body))

    endpoint = of_nothing if body is None else of_body
    of_body.__annotations__["body"] = body
    documented = sorted({*problems, *_ALWAYS, *(_BODY if body is not None else ())})
    api.add_api_route(
        path,
        endpoint,
        methods=["GET" if body is None else "POST"],
        response_model=answer,
        summary=summary,
        operation_id=path[1:],
        responses={status: {"model": b.Problem, **PROBLEMS[status]} for status in documented},
    )


def _headers_of(answer: Answer) -> dict[str, str]:
    headers = {} if answer.after_s is None else {"retry-after": str(answer.after_s)}
    return headers | ({"www-authenticate": "Bearer"} if answer.status == 401 else {})


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, _headers_of(answer), "application/json")


async def _refused(request: Request, error: Any) -> Response:
    return _response(error.answer)


async def _unsendable(request: Request, error: Any) -> Response:
    return _response(Refused.of(error).answer)


async def _invalid(request: Request, error: Any) -> Response:
    errors = error.errors()
    where = ".".join(str(part) for part in errors[0]["loc"] if part != "body") or "the body"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return _response(Refused(422, "invalid", f"{where}: {errors[0]['msg']}{more}").answer)


async def _undecodable(request: Request, error: Any) -> Response:
    return _response(Refused(422, "invalid", str(error)).answer)


async def _http(request: Request, error: Any) -> Response:
    if error.status_code == 400:  # the only one: a body that cannot even be read
        return _response(Refused(422, "invalid", str(error.detail)).answer)
    answer = Refused(error.status_code, "http", str(error.detail)).answer
    return Response(answer.body, answer.status, error.headers, "application/json")


async def _internal(request: Request, error: Exception) -> Response:
    return _response(Refused(500, "internal", f"{type(error).__name__} in the server; its log says more").answer)


_HANDLERS: dict[Any, Any] = {
    Refused: _refused,
    NotJson: _unsendable,
    DecodeError: _undecodable,
    RequestValidationError: _invalid,
    HTTPException: _http,
    Exception: _internal,
}


def _link(openapi: dict[str, Any]) -> None:
    """Say in the document which requests an episode's id is for."""
    id = {"id": "$response.body#/id"}
    further = {path: {"operationId": path, "requestBody": id} for path in ("evaluate", "conclude", "release")}
    first = {"operationId": "step", "requestBody": {**id, "step": 1}}
    for path, links in (("/create", {"step": first, **further}), ("/step", further), ("/evaluate", further)):
        openapi["paths"][path]["post"]["responses"]["200"]["links"] = links


def _secure(openapi: dict[str, Any]) -> None:
    """Say in the document that a token is needed."""
    openapi.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, methods in openapi["paths"].items():
        for operation in methods.values() if path not in OPEN else ():
            operation["security"] = [{"token": []}]


def _size(found: Sequence[bytes]) -> int:
    return sum(map(len, found))


READ_ONLY = frozenset({"/taskset", "/health", "/profile"})  # another method than GET is refused by the routes


# --- in front of the routes -------------------------------------------------------------------------
class Guard:
    """ASGI middleware: checks host, token, and the kind and size of a body before anything reads it."""

    def __init__(self, app: Any, *, token: str | None = None, hosts: frozenset[str] | None = None) -> None:
        self._app, self._hosts = app, hosts
        self._token = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            headers = dict(scope["headers"])
            self._check_sender(scope["path"], headers)
            takes_body = scope["method"] == "POST" and scope["path"] not in READ_ONLY
            body = await self._body(headers, receive) if takes_body else b""
        except Refused as refusal:
            return await _response(refusal.answer)(scope, receive, send)
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Any:
            return unread.pop() if unread else await receive()

        await self._app(scope, receive_again, send)

    def _check_sender(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and re.sub(r":\d*\Z", "", host).strip("[]").lower() not in self._hosts:
            raise Refused(403, "host", f"this server is not addressed as {host[:100]!r}")
        given = headers.get(b"authorization", b"")
        if self._token is not None and path not in OPEN and not hmac.compare_digest(given, self._token):
            detail = "the token is another one" if given else "a token is needed: Authorization: Bearer TOKEN"
            raise Refused(401, "unauthorized", detail)

    async def _body(self, headers: Mapping[bytes, bytes], receive: Any) -> bytes:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # a foreign page can send other types without asking
            raise Refused(415, "media_type", "send a body of Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        found, more = bytearray(), not (length.isdigit() and int(length) > LARGEST)
        if not more:
            found.extend(bytes(LARGEST + 1))
        while more and len(found) <= LARGEST:
            message = await receive()
            found += message.get("body", b"")
            more = message.get("more_body", False)
        if len(found) > LARGEST:
            raise Refused(413, "too_large", f"a body has at most {LARGEST} bytes")
        return bytes(found)
