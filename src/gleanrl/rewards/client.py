"""The client of environment services, until they use `gleanrl.utils.http`; nothing else may import it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypedDict
from urllib.parse import urlsplit

from gleanrl.rewards.clock import Clock
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import to_jsonable as plain
from gleanrl.utils.retry import UNREACHABLE, Fatal, Retryable
from gleanrl.utils.secrets import Secret, parse_header, redact, refuse_key_in_url, with_secrets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx2

POOL = 16  # connections of one pool: the library probes the idle ones whenever a request comes or goes
OTHER_FILES = 512  # that a run may hold open beside its connections
LARGEST = 8 << 20  # bytes of an answer
SHOWN = 300  # characters of a service's own words in a message
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses of trouble that may pass: timeouts, conflicts, rate limits, overload, a server's own errors."""


class Connection(TypedDict, total=False):
    """How a service is reached, as a user says it beside the address; `JsonClient` explains each."""

    api_key_env: str | None
    headers: Mapping[str, str] | None
    timeout_s: float
    connections: int


class JsonClient:
    """POSTs JSON to one service and takes JSON from it. Connections are kept alive and made where the loop runs.

    Args:
        url: of the service, with the path that all requests share.
        api_key_env: NAME of the environment variable whose key is sent as bearer token.
        headers: sent with every request; ``"env:NAME"`` takes a value from the environment.
        timeout_s: for one request, from its start to the end of its answer.
        connections: at once, no more than the process may open files; further requests wait for one of them.
        setting: what the user calls the address, for messages.

    Proxies of the environment are used, except for a service on this machine.

    Raises:
        UserError: no address, a key in the configuration instead of the environment, or httpx2 is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key_env: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        connections: int = 4096,
        setting: str = "url",
    ) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")) or not urlsplit(url).hostname:
            raise UserError(f"{setting}: give an address, e.g. http://localhost:8000")
        refuse_key_in_url(url, setting)
        if not timeout_s > 0 or connections < 1:
            raise UserError("timeout_s and connections must be positive")
        _httpx()
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.connections = connections
        self.api_key_env = api_key_env
        self._headers = {name: parse_header(name, value) for name, value in (headers or {}).items()}
        if api_key_env is not None:
            self._headers["Authorization"] = Secret(api_key_env)
        self.secrets = [value for value in self._headers.values() if isinstance(value, Secret)]
        self._pools: _Pools | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pools": None}  # connections do not travel

    @property
    def slots(self) -> int:
        """Requests that it can send at once."""
        return allowed_connections(self.connections)

    def with_secrets(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a body with a `Secret` for each text ``env:NAME``; it is sent as the environment has it."""
        fields, secrets = with_secrets(fields)
        self.secrets += secrets
        return fields

    def redact(self, text: str) -> str:
        """``text`` without any key of this client."""
        return redact(text, self.secrets)

    def quoted(self, text: str | bytes) -> str:
        """A service's words for a message: without keys, on one line, bounded (in this order)."""
        said = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        said = " ".join(self.redact(said).split())
        return said if len(said) <= SHOWN else f"{said[:SHOWN]} ..."

    async def post(self, body: Mapping[str, Any], path: str = "", *, key: str | None = None) -> Any:
        """The service's answer, decoded. ``key`` says which requests are one, as the header ``Idempotency-Key``.

        Raises:
            Retryable: the service is busy, broken, unreachable, too slow, or answered with no JSON.
            Fatal: it refuses this request, or will refuse all of them.
        """
        address = self._address(path)
        try:
            content = json.dumps(body, default=_sent, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise Fatal(f"cannot be sent as JSON: {error}", cause="request") from None
        named = {"Idempotency-Key": key} if key is not None else {}
        status, fields, text = await self._exchange(address, content, named)
        if not 200 <= status < 300:
            raise self._refusal(address, status, fields, text)
        try:
            return json.loads(text)
        except ValueError:
            raise Retryable(f"{address} answered with no JSON: {self.quoted(text)}", cause="answer") from None

    async def aclose(self) -> None:
        if self._pools is not None and self._pools.loop is asyncio.get_running_loop():
            await self._pools.aclose()
        self._pools = None

    def _address(self, path: str) -> str:
        base, mark, query = self.url.partition("?")  # Azure's addresses end in ?api-version=...
        return f"{base.rstrip('/')}{path}{mark}{query}"

    async def _exchange(
        self, address: str, content: bytes, named: Mapping[str, str], method: str = "POST"
    ) -> tuple[int, Mapping[str, str], bytes]:
        httpx = _httpx()
        headers = {name: self._value(name, value) for name, value in self._headers.items()}
        headers |= {"Content-Type": "application/json", **named}
        pools = self._pools
        if pools is None or pools.loop is not asyncio.get_running_loop():
            pools = self._pools = _Pools(self.connections, proxies=not is_local(self.url))
        try:
            async with (
                pools.client() as client,
                Clock(self.timeout_s),
                client.stream(method, address, content=content, headers=headers) as response,
            ):
                received = bytearray()
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > LARGEST:
                        raise Fatal(f"{address} answered with more than {LARGEST} bytes", cause="answer")
                return response.status_code, response.headers, bytes(received)
        except TimeoutError:
            raise Retryable(f"{address} did not answer within {self.timeout_s:g} s", cause="timeout") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise Fatal(f"{address}: {self.quoted(str(error))}", cause="request") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            why = self.quoted(str(error) or type(error).__name__)
            nobody = isinstance(error, httpx.ConnectError)
            raise Retryable(f"{address}: {why}", cause=UNREACHABLE if nobody else "connection") from None

    def _value(self, name: str, value: str | Secret) -> str:
        if not isinstance(value, Secret):
            return value
        return f"Bearer {value.reveal()}" if name == "Authorization" and self.api_key_env else value.reveal()

    def _refusal(self, address: str, status: int, fields: Mapping[str, str], text: bytes) -> Retryable | Fatal:
        said, code = _error_of(text)
        message = f"{address} answered with status {status}: {self.quoted(said)}"
        if code == "insufficient_quota":
            return Fatal(message, cause="quota")
        if status in PASSING:
            return Retryable(message, retry_after(fields), cause="rate_limit" if status == 429 else "server")
        if status in (401, 403):
            return Fatal(f"{message}{self._who()}", cause="refused")
        return Fatal(message, cause="refused")

    def _who(self) -> str:
        if not self.secrets:
            return "; no key was sent: set api_key_env to the NAME of the environment variable that holds it"
        return f"; the key comes from the environment variable {' or '.join(s.name for s in self.secrets)}"


def retry_after(fields: Mapping[str, str]) -> float | None:
    """Seconds to wait for, by ``retry-after-ms`` or ``Retry-After`` (seconds or an HTTP date); None if not said.

    A date is compared with the answer's own ``Date``, so that a wrong clock on either side does no harm.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(fields.get(name, "")) / unit
        except ValueError:
            continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    try:
        until = parsedate_to_datetime(fields.get("retry-after", "")).timestamp()
    except ValueError:
        return None
    try:
        now = parsedate_to_datetime(fields.get("date", "")).timestamp()
    except ValueError:
        now = time.time()
    return max(until - now, 0.0)


def allowed_connections(wanted: int) -> int:
    """How many of the connections this process may open; its limit of open files is raised as far as that is its own.

    Without this a thousandth request would fail for want of a file, and the service would seem to be down.
    """
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows, which has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = wanted + OTHER_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - OTHER_FILES))


class _Pools:
    """Connections in small pools: the first one with room takes the next request, so that few stay warm."""

    def __init__(self, connections: int, *, proxies: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self._free = asyncio.Semaphore(allowed_connections(connections))
        self._settings = {
            "timeout": None,
            "trust_env": proxies,
            "follow_redirects": False,
            "limits": _httpx().Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0),
            "verify": _httpx().create_ssl_context(trust_env=proxies),  # once: it reads all certificates
        }
        self._clients: list[httpx2.AsyncClient] = []
        self._busy: list[int] = []

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx2.AsyncClient]:
        async with self._free:
            pool = next((i for i, busy in enumerate(self._busy) if busy < POOL), len(self._busy))
            if pool == len(self._busy):
                self._busy.append(0)
                self._clients.append(_httpx().AsyncClient(**self._settings))
            self._busy[pool] += 1
            try:
                yield self._clients[pool]
            finally:
                self._busy[pool] -= 1

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()


def _sent(value: Any) -> Any:
    return value.reveal() if isinstance(value, Secret) else plain(value)


def _error_of(text: bytes) -> tuple[str, str | None]:
    """A service's error message and its code, in OpenAI's shape or its variants; else the text itself."""
    said = text.decode("utf-8", "replace")
    try:
        answer = json.loads(said)
    except ValueError:
        return said, None
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        message, code = error.get("message", error.get("detail")), error.get("code")
        return str(message if message is not None else said), code if isinstance(code, str) else None
    return str(error), None


def is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _httpx() -> Any:
    try:
        import httpx2
    except ModuleNotFoundError:
        raise UserError("rewards over HTTP need httpx2: pip install 'gleanrl[rewards]'") from None
    return httpx2
