"""What stands before every route: the token, the size and the kind of a body, the meter.

A step is answered here, without the frameworks behind: it is by far the most frequent request, and they would double
what it takes.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gleanrl.environments.service.episodes import Answer, Refused
from gleanrl.environments.service.meter import MEASURED, Metered, Route

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Direct = Callable[[Any], Awaitable[Answer]]

OPEN = frozenset({"/health", "/openapi.json", "/docs", "/redoc"})  # what tells nothing, and needs no token
LET_IN = "gleanrl.let_in"  # in a scope's state: to be called once its sender may be here
LARGEST = 4 << 20  # bytes of a request's body
READ_S = 30.0  # for a body to arrive
_PORT = re.compile(r":\d*\Z")


class Gate:
    """An ASGI application before ``app``.

    Args:
        token: that every request but those for `OPEN` must bear; None = none.
        hosts: that a request may be addressed to, None = any. A page in a browser on this machine could else reach a
            server that only listens to the machine itself, by a name of its own (DNS rebinding).
        direct: routes that are answered here: the model of their bodies, and what answers.
        posts: routes that take a body.
        names: of the routes that are told apart in the profile.
    """

    def __init__(
        self,
        app: App,
        *,
        token: str | None = None,
        hosts: frozenset[str] | None = None,
        direct: Mapping[str, tuple[Any, Direct]] | None = None,
        posts: frozenset[str] = frozenset(),
        names: frozenset[str] = frozenset(),
        largest: int = LARGEST,
    ) -> None:
        self.routes: defaultdict[str, Route] = defaultdict(Route)
        self._app, self._hosts, self._largest = app, hosts, largest
        self._token = None if token is None else f"Bearer {token}".encode()
        self._direct = {path: (TypeAdapter(model), call) for path, (model, call) in (direct or {}).items()}
        self._posts, self._names = posts, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"]
        route = self.routes[path if path in self._names else "other"]
        began, status = time.perf_counter(), 500

        async def sent(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        call = self._pass(scope, path, receive, sent)
        measured = route.requests % MEASURED == 0
        route.requests += 1
        try:
            await (Metered(call, route) if measured else call)
        finally:
            route.measured += measured
            route.statuses[status] += 1
            route.latency_s.append(time.perf_counter() - began)

    async def _pass(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        try:
            headers = dict(scope["headers"])
            self._check(path, headers)
            if self._token is None or path not in OPEN:
                scope.get("state", {}).get(LET_IN, _nobody)()
            body = b""
            if scope["method"] == "POST" and path in self._posts:
                body = await self._body(headers, receive)
                if path in self._direct:
                    return await _reply(send, await self._answer(path, body))
        except Refused as refusal:
            return await _reply(send, refusal.answer)
        replayed = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Any:
            return next(replayed, None) or await receive()

        await self._app(scope, again, send)

    def _check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and _PORT.sub("", host).strip("[]").lower() not in self._hosts:
            raise Refused(403, "host", f"this server is not addressed as {host[:100]!r}")
        if self._token is None or path in OPEN:
            return
        given = headers.get(b"authorization", b"")
        if not hmac.compare_digest(given, self._token):
            said = "the token is another one" if given else "a token is needed: Authorization: Bearer TOKEN"
            raise Refused(401, "unauthorized", said)

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # what a foreign page may send without asking has other types
            raise Refused(415, "media_type", "send a body of Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._largest:
            raise self._too_large()
        try:
            async with asyncio.timeout(READ_S):
                message = await receive()
                if not message.get("more_body"):
                    return message.get("body", b"")
                found = bytearray(message["body"])
                while message.get("more_body") and len(found) <= self._largest:
                    message = await receive()
                    found += message.get("body", b"")
        except TimeoutError:
            raise Refused(408, "slow", f"the body did not arrive within {READ_S:g} s") from None
        if len(found) > self._largest:
            raise self._too_large()
        return bytes(found)

    def _too_large(self) -> Refused:
        return Refused(413, "too_large", f"a body has at most {self._largest} bytes")

    async def _answer(self, path: str, body: bytes) -> Answer:
        adapter, call = self._direct[path]
        try:
            asked = adapter.validate_json(body)
        except ValidationError as error:
            raise invalid(error.errors(include_url=False, include_context=False)) from None
        return await call(asked)


def _nobody() -> None: ...


def invalid(errors: Any) -> Refused:
    """What pydantic found, in one line."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return Refused(422, "invalid", f"{where}: {first['msg']}{more}")


def headers_of(answer: Answer) -> dict[str, str]:
    """Headers beside those that a body has anyway."""
    headers = {} if answer.after_s is None else {"retry-after": str(answer.after_s)}
    return headers | ({"www-authenticate": "Bearer"} if answer.status == 401 else {})


async def _reply(send: Send, answer: Answer) -> None:
    headers = {"content-type": "application/json", "content-length": str(len(answer.body)), **headers_of(answer)}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    await send({"type": "http.response.body", "body": answer.body})
