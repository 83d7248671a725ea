"""The routes: a taskset and its live episodes as an ASGI application, documented by OpenAPI."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gleanrl import __version__
from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.environments.service import bodies as b
from gleanrl.environments.service import calls
from gleanrl.environments.service.encoding import NotJson, decode, encode
from gleanrl.environments.service.episodes import Answer, Episodes, Refused
from gleanrl.environments.service.gate import OPEN, Gate, headers_of, invalid
from gleanrl.environments.service.memory import Memory
from gleanrl.environments.service.meter import MIB, process_cpu_s
from gleanrl.protocols import Demonstrator, Mixed, Preparing, Taskset
from gleanrl.types import StopReason, Task
from gleanrl.utils.importing import file_versions

PAGE = 4 << 20  # bytes of tasks in one answer, about
LISTS, KEPT = 4, 64 << 20  # of tasks, and bytes of them, that are kept for their further pages, but always the last
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
PROBLEMS: Mapping[int, dict[str, Any]] = {
    401: {"description": "No token, or another one (`unauthorized`)."},
    403: {"description": "Addressed by a name that is not the server's (`host`)."},
    404: {
        "description": "No such episode: never created, released, expired, or lost with an earlier server (`unknown`); "
        "nobody can demonstrate that task (`no_expert`)."
    },
    408: {"description": "The body did not arrive in time (`slow`)."},
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
        "says that something must be mended (`mistake`). The episode is over; no other is touched."
    },
    503: {
        "description": "No memory for a further episode, or too many calls of the taskset wait (`full`); shutting down "
        "(`draining`).",
        "headers": _RETRY,
    },
}
_ALWAYS, _BODY = (401, 403), (408, 413, 415, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one server; MiB and seconds, None = none."""

    max_instances: int = 1024
    idle_timeout_s: float = 1800.0
    max_memory: float | None = None
    max_worker_memory: float | None = None
    taskset_timeout_s: float = 600.0


class Service:
    """A taskset behind HTTP; ``pool`` plays its environments and must be open. Close it before the pool.

    ``app`` is the ASGI application. Token and hosts are as `gleanrl.environments.service.gate.Gate` has them.
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
        pids = lambda: (*pool.worker_pids, *self._calls.pids)  # noqa: E731
        self.memory = Memory(pids, limits.max_memory, limits.max_worker_memory)
        self.episodes = Episodes(pool.environment, limits.max_instances, limits.idle_timeout_s, self.memory.room)
        self.fingerprint = fingerprint(settings, seed, getattr(taskset, "version", ""))
        self._began = time.monotonic()
        self._lists: dict[tuple[str, int], Sequence[bytes]] = {}  # encoded, the one asked for last at the end
        self._api = api(self)
        self.openapi = self._api.openapi()
        posts = frozenset(path for path, methods in self.openapi["paths"].items() if "post" in methods)
        self.app = Gate(
            self._api,
            token=token,
            hosts=hosts,
            direct={"/step": (b.StepBody, self.step)},
            posts=posts,
            names=frozenset(self.openapi["paths"]),
        )
        _link(self.openapi)
        if token is not None:
            _secure(self.openapi)

    async def close(self, finish_s: float = 0.0) -> None:
        """End all episodes, once requests under way have had ``finish_s`` seconds."""
        self.memory.close()
        await self.episodes.close(finish_s)
        await self._calls.close()

    # --- routes ---------------------------------------------------------------------------------
    async def create(self, body: b.CreateBody) -> Answer:
        if body.environment not in (None, self.fingerprint):
            detail = (
                f"this server has the environment {self.settings.name!r} with other options than expected, or another"
            )
            raise Refused(409, "other_environment", detail)
        self.memory.watch(self._runs)
        return await self.episodes.create(body.id, _task(body.task))

    async def step(self, body: b.StepBody) -> Answer:
        return await self.episodes.step(body.id, body.step, body.message.model_dump(exclude_unset=True))

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
            if why := self.memory.room():
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
        tasks = [_task(task) for task in body.tasks]
        return Answer(200, await self._called(("prepare", encode(tasks)), calls.prepare(tasks, os.cpu_count() or 1)))

    async def demonstrate(self, body: b.DemonstrateBody) -> Answer:
        task = _task(body.task)
        key = ("demonstrate", encode(task), body.seed, body.noise)
        found = await self._called(key, calls.demonstrate(task, body.seed, body.noise))
        if isinstance(found, str):
            raise Refused(404, "no_expert", found)
        return Answer(200, found)

    async def tools(self, body: b.ToolsBody) -> Answer:
        task = _task(body.task)
        return Answer(200, await self._called(("tools", encode(task)), calls.tools(task)))

    def _runs(self) -> bool:
        return bool(self.episodes.live or self._calls.pending)

    async def _called(self, key: Hashable, call: calls.Call) -> Any:
        self.memory.watch(self._runs)
        try:
            return await self._calls.call(key, call)
        except Exception as error:
            raise Refused.of(error) from error

    async def describe(self) -> Answer:
        limits, taskset = self.limits, self.taskset
        declared = getattr(taskset, "tool_schemas", ())
        return Answer(
            200,
            encode(
                {
                    "environment": self.settings.name,
                    "fingerprint": self.fingerprint,
                    "demonstrates": isinstance(taskset, Demonstrator),
                    "prepares": isinstance(taskset, Preparing),
                    "phrases": list(getattr(taskset, "phrases", ())),
                    "needs_reward": bool(getattr(taskset, "needs_reward", False)),
                    "weights": dict(taskset.weights) if isinstance(taskset, Mixed) else None,
                    "tools": None if callable(declared) else list(declared),
                    "max_instances": limits.max_instances,
                    "idle_timeout_s": limits.idle_timeout_s,
                    "version": __version__,
                }
            ),
        )

    async def health(self) -> Answer:
        return Answer(200, encode({"status": "draining" if self.episodes.draining else "ok", "version": __version__}))

    async def profile(self) -> Answer:
        episodes, counts, held = self.episodes, self.episodes.counts, self.memory.held()
        workers = [
            {"pid": pid, "memory_mib": _mib(held.workers.get(pid)), "cpu_s": process_cpu_s(pid)}
            for pid in self.pool.worker_pids
        ]
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
                    "memory_mib": _mib(held.total),
                    "max_memory_mib": self.limits.max_memory,
                    "cpu_s": time.process_time(),
                    "workers": workers,
                    "workers_replaced": self.pool.stats.workers_replaced,
                    "routes": [route.profile(name) for name, route in sorted(self.app.routes.items())],
                }
            ),
        )


def fingerprint(settings: EnvironmentSettings, seed: int, version: str) -> str:
    """16 hex digits that change with the environment, its options, the files that they name, the seed, its own version
    and that of Glean RL."""
    told = [__version__, settings.name, settings.options, seed, version]
    told += file_versions([settings.name, settings.options])
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# --- HTTP ---------------------------------------------------------------------------------------
def api(service: Service) -> FastAPI:
    """The routes of a service; what a taskset cannot do has none."""
    made = FastAPI(
        title="Glean RL environment service", version=__version__, description=_ABOUT, exception_handlers=_HANDLERS
    )
    add = partial(_add, made)
    add("/taskset", service.describe, b.TasksetAnswer, "What is served")
    add("/tasks", service.tasks, b.TasksAnswer, "The first tasks of a split", b.TasksBody, 500, 503)
    add("/create", service.create, b.EpisodeAnswer, "Begin an episode of a task", b.CreateBody, 404, 409, 429, 500, 503)
    add("/step", service.step, b.EpisodeAnswer, "Say something to the environment", b.StepBody, 404, 409, 500)
    add("/evaluate", service.evaluate, b.EvaluateAnswer, "What an episode has earned so far", b.EpisodeBody, 404)
    add("/conclude", service.conclude, b.ConcludeAnswer, "End for want of room", b.ConcludeBody, 404, 409, 500)
    add("/release", service.release, b.ReleaseAnswer, "End an episode", b.EpisodeBody)
    if callable(getattr(service.taskset, "tool_schemas", ())):
        add("/tools", service.tools, b.ToolsAnswer, "What the episodes of a task declare", b.ToolsBody, 500, 503)
    if isinstance(service.taskset, Preparing):
        add("/prepare", service.prepare, b.PrepareAnswer, "Do slow one-time work for tasks", b.PrepareBody, 500, 503)
    if isinstance(service.taskset, Demonstrator):
        add(
            "/demonstrate",
            service.demonstrate,
            b.DemonstrateAnswer,
            "Let the expert play",
            b.DemonstrateBody,
            404,
            500,
            503,
        )
    add("/health", service.health, b.HealthAnswer, "Whether the server takes requests; needs no token")
    add("/profile", service.profile, b.ProfileAnswer, "Load, latency, processor time and memory")
    return made


_ABOUT = """Episodes of an environment, as JSON.

`/create` begins one under an id that the client chooses, `/step` takes numbered steps, `/release` ends it. Any request
may be sent again after a lost connection: it is known by its id and number, gets the first one's answer, and the
environment hears of it once. An episode without a request for a while expires.
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


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, headers_of(answer), "application/json")


async def _refused(request: Request, error: Any) -> Response:
    return _response(error.answer)


async def _unsendable(request: Request, error: Any) -> Response:
    return _response(Refused.of(error).answer)


async def _invalid(request: Request, error: Any) -> Response:
    return _response(invalid(error.errors()).answer)


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


def _task(task: Any) -> Task:
    return decode(Task, task.model_dump(exclude_unset=True))


def _size(found: Sequence[bytes]) -> int:
    return sum(map(len, found))


def _mib(count: int | None) -> float | None:
    return None if count is None else count / MIB
