"""The environment service as an ASGI application, with an OpenAPI document of its routes.

`gleanrl.environments.service.server` runs the application in uvicorn. Any other ASGI server can run it too, and tests
call it without a socket.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from gleanrl import __version__
from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.environments.service import bodies as b
from gleanrl.environments.service.bodies import NotJson
from gleanrl.environments.service.calls import Calls
from gleanrl.environments.service.episodes import Answer, Episodes, Refused
from gleanrl.environments.service.openenv import OpenEnvRoutes
from gleanrl.protocols import Split, Taskset
from gleanrl.types import OpenAIMessage, StopReason
from gleanrl.utils.fingerprint import fingerprint as hashed
from gleanrl.utils.importing import file_versions
from gleanrl.utils.serialize import DecodeError, from_builtins

_log = logging.getLogger(__name__)

PAGE = 4 << 20  # size, in bytes of encoded tasks, at which a page of a list of tasks ends
# Lists of tasks are cached, so that a request for a further page does not compute the list again.
LISTS, KEPT = 4, 64 << 20  # maximum number of cached lists, and maximum sum of their sizes in bytes
LARGEST = 4 << 20  # maximum size of a request's body in bytes
# paths that can be requested without a token, because their answers contain nothing secret
OPEN = frozenset({"/health", "/openapi.json", "/docs", "/redoc"})
MIB = 1 << 20
_SHARE = 0.8  # default memory limit, as a share of the memory of the machine or container
_MEMORY_AGE_S = 1.0  # seconds after which the memory in use is measured again
_ABOUT = """Runs episodes of an environment. The bodies of requests and answers are JSON.

`/create` begins an episode under an id that the client chooses. `/step` sends one message of the agent to the
environment; the client numbers the steps 1, 2, 3 and so on. `/release` ends the episode. A client may send any request
again, for example after a lost connection. The episode's id and the number of the step identify a repeated request: it
gets the same answer as the first one, and the environment sees the request only once. An episode expires if no request
for it arrives for a while.
"""
_RETRY = {
    "Retry-After": {
        "description": "Number of seconds to wait before the request is sent again.",
        "schema": {"type": "integer"},
    }
}
PROBLEMS: Mapping[int, dict[str, Any]] = {
    401: {"description": "The request has no token or a wrong one (`unauthorized`)."},
    403: {"description": "The request's Host header names a host other than this server (`host`)."},
    404: {
        "description": "The server has no such episode: it was never created, was released, expired, or was lost when "
        "an earlier server ended (`unknown`). Or the environment has no expert for the task (`no_expert`)."
    },
    409: {
        "description": "An earlier request for the episode is still under way (`busy`); the id belongs to another "
        "episode, or the step is not the next one, or it was already taken with another message (`conflict`); the "
        "episode is over (`over`); or the server's environment is not the one that the client expects "
        "(`other_environment`)."
    },
    413: {"description": "The body is too large (`too_large`)."},
    415: {"description": "The Content-Type of the request is not application/json (`media_type`)."},
    422: {"description": "The body is not valid JSON, or it does not have the described fields (`invalid`)."},
    429: {"description": "The server already has its maximum number of live episodes (`full`).", "headers": _RETRY},
    500: {
        "description": "The environment or the taskset raised an exception (`raised`), took too long (`timeout`), lost "
        "its worker process (`died`), or reports something that a user must fix, such as a wrong option (`mistake`). "
        "The episode of the request is over; other episodes are not affected. Or the server itself failed (`internal`)."
    },
    503: {
        "description": "There is no memory for another episode, or too many calls of the taskset wait (`full`); or the "
        "server is shutting down (`draining`).",
        "headers": _RETRY,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one server."""

    max_instances: int = 1024  # maximum number of live episodes
    idle_timeout_s: float = 1800.0  # seconds without a request after which an episode expires
    max_memory: float | None = None  # MiB of server and workers above which no episode begins; None = no limit
    taskset_timeout_s: float = 600.0  # maximum duration, in seconds, of one call of a method of the taskset


class Service:
    """Serves a taskset over HTTP, as an ASGI application.

    FastAPI serves the GET routes and documents all routes. Requests with a body bypass FastAPI: `__call__` passes them
    to their endpoint itself, because FastAPI's routing and argument injection would take half of the server's time for
    a step.

    Close the service before its pool.

    Args:
        pool: runs the taskset's environments; must be open.
        settings: the settings that ``taskset`` was made from. With ``seed``, they enter the server's `fingerprint`.
        seed: the seed that ``taskset`` was made with.
        token: the token that every request must carry, except requests for the paths in `OPEN`; None = no token.
        hosts: host names under which the server may be addressed; None = any. This prevents DNS rebinding, in which a
            web page in a browser on this machine reaches a server on loopback under the page's own host name.
        openenv: whether to serve OpenEnv's protocol too (`gleanrl.environments.service.openenv`).
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
        openenv: bool = False,
    ) -> None:
        self.taskset, self.pool, self.settings, self.limits = taskset, pool, settings, limits
        self._token, self._hosts = None if token is None else f"Bearer {token}".encode(), hosts
        self._calls = Calls(taskset, pool, limits.taskset_timeout_s)
        self.episodes = Episodes(pool.environment, limits.max_instances, limits.idle_timeout_s, self._check_memory)
        self.fingerprint = fingerprint(settings, seed, taskset.version)
        self._began = time.monotonic()
        self._memory = (0.0, 0.0)  # MiB in use, and `time.monotonic()` of the measurement
        # (split, count) -> the encoded tasks; the list requested most recently is the last one
        self._lists: dict[tuple[str, int], Sequence[bytes]] = {}
        self._endpoints: dict[str, tuple[type[BaseModel], Callable[[Any], Awaitable[Response]]]] = {}
        self._api = FastAPI(
            title="Glean RL environment service",
            version=__version__,
            description=_ABOUT,
            exception_handlers={HTTPException: answer_error, Exception: answer_error},
        )
        add = self._add_route
        add("/taskset", self.describe, None, b.TasksetAnswer, "Describe the taskset")
        add("/tasks", self.tasks, b.TasksBody, b.TasksAnswer, "List the first tasks of a split", 500, 503)
        add("/create", self.create, b.CreateBody, b.EpisodeAnswer, "Begin an episode", 404, 409, 429, 500, 503)
        add("/step", self.step, b.StepBody, b.EpisodeAnswer, "Send a message to the environment", 404, 409, 500)
        add("/evaluate", self.evaluate, b.EpisodeBody, b.ScoreAnswer, "Read the score of an episode so far", 404)
        about = "End an episode that is out of turns or tokens"
        add("/conclude", self.conclude, b.ConcludeBody, b.ScoreAnswer, about, 404, 409, 500)
        add("/release", self.release, b.EpisodeBody, b.ReleaseAnswer, "End an episode")
        # Optional methods that the taskset does not implement get no route.
        if type(taskset).tools is not Taskset.tools:
            about = "List the tools that episodes of a task have"
            add("/tools", self.tools, b.ToolsBody, b.ToolsAnswer, about, 500, 503)
        if type(taskset).prepare is not Taskset.prepare:
            add("/prepare", self.prepare, b.PrepareBody, b.PrepareAnswer, "Do slow one-time work for tasks", 500, 503)
        if taskset.has_expert:
            about = "Let the expert play"
            add("/demonstrate", self.demonstrate, b.DemonstrateBody, b.DemonstrateAnswer, about, 404, 500, 503)
        add("/health", self.health, None, b.HealthAnswer, "Whether the server takes requests; needs no token")
        add("/profile", self.profile, None, b.ProfileAnswer, "Load, latency, processor time and memory")
        self.openenv = openenv
        if openenv:
            routes = OpenEnvRoutes(settings, taskset.version, self.episodes, self.list_tasks)
            for path, endpoint in routes.gets.items():
                add(path, endpoint, None, None, "OpenEnv's protocol")
            for path, (body, endpoint) in routes.posts.items():
                add(path, endpoint, body, None, "OpenEnv's Task API", 500, 503)
            self._api.add_api_websocket_route("/ws", routes.session)
        document = self._api.openapi()
        # OpenAPI links document which further requests take the episode id that an answer contains.
        id = {"id": "$response.body#/id"}
        further = {path: {"operationId": path, "requestBody": id} for path in ("evaluate", "conclude", "release")}
        first = {"operationId": "step", "requestBody": {**id, "step": 1}}
        for path, links in (("/create", {"step": first, **further}), ("/step", further), ("/evaluate", further)):
            document["paths"][path]["post"]["responses"]["200"]["links"] = links
        if token is not None:
            document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for path in document["paths"].keys() - OPEN:
                for operation in document["paths"][path].values():
                    operation["security"] = [{"token": []}]

    def _add_route(
        self, path: str, endpoint: Any, body: type[BaseModel] | None, answer: Any, summary: str, *problems: int
    ) -> None:
        """Add a route and its documentation.

        ``body`` is the model of the request's body; None makes a GET route. ``problems`` are the HTTP statuses with
        which this route can fail, in addition to those that every route has.
        """
        if body is not None:
            self._endpoints[path] = (body, endpoint)
            problems = (*problems, 413, 415, 422)
        self._api.add_api_route(
            path,
            endpoint,
            methods=["GET" if body is None else "POST"],
            response_model=answer,
            summary=summary,
            operation_id=path[1:],
            responses={status: {"model": b.Problem, **PROBLEMS[status]} for status in sorted({*problems, 401, 403})},
        )

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request. Host, token, and the type and size of the body are checked before the body is parsed."""
        response: Any
        headers: dict[bytes, bytes] = {}
        try:
            takes_body, path = False, scope.get("path", "")
            if scope["type"] in ("http", "websocket"):
                headers = dict(scope["headers"])
                addressed = [headers.get(b"host", b"").decode("latin-1")]
                if scope["type"] == "websocket" and b"origin" in headers:
                    # A browser lets any web page open a WebSocket to this server, and names the page's own host.
                    addressed.append(headers[b"origin"].decode("latin-1").rpartition("//")[2])
                for host in addressed:
                    if self._hosts is not None and re.sub(r":\d*\Z", "", host).strip("[]").lower() not in self._hosts:
                        raise Refused(403, "host", f"this server is not addressed as {host[:100]!r}")
                given = headers.get(b"authorization", b"")
                token = None if scope["path"] in OPEN else self._token
                if token is not None and not hmac.compare_digest(given, token):
                    detail = "the token is another one" if given else "a token is needed: Authorization: Bearer TOKEN"
                    raise Refused(401, "unauthorized", detail)
                # If another ASGI application mounts this one under a path, ``root_path`` is that path.
                path = path.removeprefix(scope.get("root_path", ""))
                takes_body = scope.get("method") == "POST" and path in self._endpoints
            if takes_body:
                model, endpoint = self._endpoints[path]
                response = await endpoint(model.model_validate(await _read_body(headers, receive)))
            else:
                response = self._api
        except Exception as error:
            response = await answer_error(None, error)
            if scope["type"] == "websocket":  # refused before the connection is accepted, so the client gets a 403
                await send({"type": "websocket.close", "code": 1008})
                return
        key = headers.get(b"idempotency-key")

        async def send_with_key(message: MutableMapping[str, Any]) -> None:
            # The client compares the key with that of its request, so that it never takes another episode's answer.
            if key is not None and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"idempotency-key", key)]
            await send(message)

        await response(scope, receive, send_with_key)

    async def close(self, finish_s: float = 0.0) -> None:
        """End all episodes. Requests under way get ``finish_s`` seconds to finish first."""
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
        from_builtins({key: value for key, value in body.message.items() if value is not None}, OpenAIMessage)
        return await self.episodes.step(body.id, body.step, body.message)  # type: ignore[arg-type]

    async def evaluate(self, body: b.EpisodeBody) -> Response:
        return self.episodes.evaluate(body.id)

    async def conclude(self, body: b.ConcludeBody) -> Response:
        return await self.episodes.conclude(body.id, StopReason(body.stop))

    async def release(self, body: b.EpisodeBody) -> Response:
        return await self.episodes.release(body.id)

    async def tasks(self, body: b.TasksBody) -> Response:
        found = await self.list_tasks(body.split, body.count)
        page, size = [], 0
        for task in islice(found, min(body.start, len(found)), None):
            page.append(task)
            size += len(task)
            if size > PAGE:
                break
        end = body.start + len(page) >= len(found)
        content = b'{"tasks":[%b],"end":%b}' % (b",".join(page), b"true" if end else b"false")
        return Response(content, media_type="application/json")

    async def list_tasks(self, split: Split, count: int) -> Sequence[bytes]:
        """Return the first ``count`` tasks of a split, each encoded as JSON."""
        key = (split, count)
        found = self._lists.pop(key, None)
        if found is None:
            if why := self._check_memory():
                raise Refused(503, "full", why, 5)
            found = await self._calls.call("tasks", split, count)
        self._lists.pop(key, None)
        self._lists[key] = found
        while len(self._lists) > 1:
            size = sum(len(task) for tasks in self._lists.values() for task in tasks)
            if len(self._lists) <= LISTS and size <= KEPT:
                break
            del self._lists[next(iter(self._lists))]
        return found

    async def prepare(self, body: b.PrepareBody) -> Response:
        tasks = [b.read_task(task) for task in body.tasks]
        return Response(await self._calls.call("prepare", tasks), media_type="application/json")

    async def demonstrate(self, body: b.DemonstrateBody) -> Response:
        content = await self._calls.call("demonstrate", b.read_task(body.task), body.seed, body.noise)
        return Response(content, media_type="application/json")

    async def tools(self, body: b.ToolsBody) -> Response:
        content = await self._calls.call("tools", b.read_task(body.task))
        return Response(content, media_type="application/json")

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

    def _check_memory(self) -> str:
        """Return a message that says why there is no memory for another episode; empty if there is enough."""
        most = self.limits.max_memory
        if most is None or (held := self.held_mib()) <= most:
            return ""
        return f"the server and its workers hold {held:.0f} MiB of {most:.0f} (--max-memory)"

    def held_mib(self) -> float:
        """Return the resident memory of this process and its children in MiB, measured at most a second ago."""
        held, measured = self._memory
        if time.monotonic() - measured > _MEMORY_AGE_S:
            process, held = psutil.Process(), 0.0
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):  # the process has just ended
                    held += one.memory_info().rss / MIB
            self._memory = (held, time.monotonic())
        return held


def fingerprint(settings: EnvironmentSettings, seed: int, version: str) -> str:
    """Return a hash of everything that determines the tasks, as 16 hexadecimal digits.

    The hash depends on the environment's name and options, the files that they name, ``seed``, ``version`` (that of the
    taskset) and the version of Glean RL.
    """
    parts = [__version__, settings.name, settings.options, seed, version]
    parts += file_versions([settings.name, settings.options])
    return hashed(json.dumps(parts, sort_keys=True, default=str), size=8)


def default_memory() -> float:
    """Return the default memory limit of server and workers in MiB: a share of the machine's or container's memory."""
    most = psutil.virtual_memory().total
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        # The container has no limit if its cgroup file does not exist or contains the word "max".
        with suppress(OSError, ValueError):
            most = min(most, int(Path(limit).read_text()))
    return _SHARE * most / MIB


async def _read_body(headers: Mapping[bytes, bytes], receive: Any) -> Any:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    # A browser lets any web page send a body of some other types, such as text/plain, to this server without first
    # asking the server for permission (a CORS preflight request).
    if kind != b"application/json":
        raise Refused(415, "media_type", "send a body of Content-Type: application/json")
    length = headers.get(b"content-length", b"0")
    too_large = length.isdigit() and int(length) > LARGEST
    content, more = bytearray(), True
    while more and not too_large:
        message = await receive()
        content += message.get("body", b"")
        more = message.get("more_body", False)
        too_large = len(content) > LARGEST
    if too_large:
        raise Refused(413, "too_large", f"a body has at most {LARGEST} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused(422, "invalid", f"the body: {error}") from None


async def answer_error(_request: Request | None, error: Exception) -> Response:
    """Return the answer to a request that raised ``error``."""
    match error:
        case Refused() | NotJson():
            refusal = Refused.of(error)
        case DecodeError():
            refusal = Refused(422, "invalid", str(error))
        case ValidationError():
            errors = error.errors(include_url=False)
            where = ".".join(map(str, errors[0]["loc"])) or "the body"
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            refusal = Refused(422, "invalid", f"{where}: {errors[0]['msg']}{more}")
        case HTTPException():  # no such path or method
            refusal = Refused(error.status_code, "http", str(error.detail))
            refusal.answer.headers.update(error.headers or {})
        case _:
            _log.error("a request failed in the server", exc_info=error)
            refusal = Refused(500, "internal", f"{type(error).__name__} in the server; its log says more")
    return refusal.answer
