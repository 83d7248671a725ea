"""An HTTP client, built on aiohttp, that sends JSON to one service and receives JSON from it.

The package uses it for requests to services that compute rewards, to model servers, to environment services and to
other environment packages. The client keeps connections alive, raises `Retryable` or `Fatal` (`gleanrl.utils.retry`) if
a request fails, and shows no API key in a message::

    client = HttpClient("https://api.example.com/v1", api_key_env="EXAMPLE_KEY")
    answer = await client.request("POST", "/score", {"text": "..."})
    await client.aclose()

The client sends each request once. `gleanrl.utils.retry.RetryPolicy` decides whether the caller sends it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypedDict
from urllib.parse import urlsplit

from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import RATE_LIMIT, UNAVAILABLE, UNREACHABLE, Fatal, Retryable, Timeout
from gleanrl.utils.secrets import Secret, parse_header, redact, refuse_key_in_url, with_secrets

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which the same request may succeed later.

They report timeouts, conflicts, rate limits, overload, and errors inside the server.
"""
UNAVAILABLE_STATUSES = frozenset({502, 503, 529})
"""HTTP statuses by which a service, or the proxy before it, says that it cannot work now.

504 is not one of them, because a proxy also sends it if a single request takes too long.
"""
MAX_ANSWER_BYTES = 8 << 20
MAX_QUOTED = 300
"""Largest number of characters of a service's answer that an error message quotes."""
OTHER_FILES = 512
"""Number of files that the process can still open when all connections of a client are open."""
_UNASKED = (
    "%s sent data that no request asked for, so its connection is closed; if the service answers requests twice, "
    "earlier answers may belong to other requests, unless it repeats the header Idempotency-Key in them"
)


class ConnectionOptions(TypedDict, total=False):
    """The settings of an `HttpClient` that a user may give in addition to the address. `HttpClient` explains each."""

    api_key_env: str | None
    headers: Mapping[str, str] | None
    timeout_s: float
    connections: int


@dataclass(frozen=True, slots=True)
class Response:
    """A service's answer to one request, with any status. Names in ``headers`` are case-insensitive."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """Sends JSON to one service and receives JSON from it.

    Connections belong to one event loop; a client that is used on another loop opens new connections there. The proxies
    that environment variables such as ``HTTPS_PROXY`` name are used, except for a service on this machine. Redirects
    are not followed. A client can be pickled; its connections are not pickled with it.

    A service that answers one request twice shifts all later answers of the connection by one. So a connection on which
    data arrived while no request used it is closed. Data that arrives later, during the next request, is taken for its
    answer, unless the service repeats the header ``Idempotency-Key`` in its answers: an answer with the key of another
    request raises `Retryable`, and its connection is closed.

    Args:
        url: address of the service, including the part of the path that is the same for all requests. ``"env:NAME"``
            stands for the value of the environment variable NAME, for an address that contains a key.
        api_key_env: name of the environment variable that holds the API key. The key is sent as a bearer token.
        headers: headers that are sent with every request. The value ``"env:NAME"`` stands for the value of the
            environment variable NAME.
        timeout_s: seconds that one request may take, from when it is sent until the whole answer has arrived. Time in
            which the request waits for a free connection does not count.
        connections: largest number of connections that are open at once. The number is reduced if the process may not
            open as many files.
        setting: name of the user's setting that holds the address, for error messages.

    Raises:
        UserError: ``url`` is not an HTTP address, the configuration contains a key, or aiohttp is not installed.
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
        self._secret_url: Secret | None = None
        if isinstance(url, str) and url.startswith("env:"):
            self._secret_url = Secret(url.removeprefix("env:"), setting)
        address = url if self._secret_url is None else self._secret_url.reveal()
        try:
            parts = urlsplit(address)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except (ValueError, AttributeError):  # urlsplit refuses invalid ports and hosts
            valid = False
        if not valid:
            raise UserError(f"{setting}: give an address, e.g. http://localhost:8000, with a port of at most 65535")
        if self._secret_url is None:
            refuse_key_in_url(url, setting)
        if not timeout_s > 0 or connections < 1:
            raise UserError("timeout_s and connections must be positive")
        if importlib.util.find_spec("aiohttp") is None:
            raise UserError(f"{setting}: requests over HTTP need aiohttp: pip install 'gleanrl[rewards]'")
        self.url = url.rstrip("/")
        """The address as messages show it: an address from an environment variable stays ``env:NAME``."""
        self.timeout_s = timeout_s
        self.connections = connections
        self._headers = {name: parse_header(name, value) for name, value in (headers or {}).items()}
        self._bearer = Secret(api_key_env) if api_key_env is not None else None
        self.secrets = [value for value in self._headers.values() if isinstance(value, Secret)]
        self.secrets += [secret for secret in (self._bearer, self._secret_url) if secret is not None]
        self._session: aiohttp.ClientSession | None = None
        self._session_loop: asyncio.AbstractEventLoop | None = None
        self._free_connections = asyncio.Semaphore()
        self._warned = False  # whether data that no request asked for was logged

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_session_loop": None, "_free_connections": asyncio.Semaphore()}

    def hide_keys(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``fields`` of a request's body with a `Secret` in place of each text ``env:NAME``.

        The client puts the key in place of the `Secret` when it sends the body. It also redacts the key from the
        service's answers that error messages quote.
        """
        fields, secrets = with_secrets(fields)
        self.secrets += secrets
        return fields

    def redact(self, text: str) -> str:
        """Return ``text`` with the name of its environment variable in place of each key of this client."""
        return redact(text, self.secrets)

    def quote(self, text: str | bytes) -> str:
        """Return a service's answer as an error message quotes it.

        Keys are redacted, line breaks become spaces, and the text is cut to `MAX_QUOTED` characters.
        """
        said = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        said = " ".join(self.redact(said).split())
        return said if len(said) <= MAX_QUOTED else f"{said[:MAX_QUOTED]} ..."

    def address(self, path: str = "", *, shown: bool = False) -> str:
        """Return the full address of ``path``, or if ``shown``, the address as messages show it, without keys.

        If the client's ``url`` has a query, such as Azure's ``?api-version=...``, the query is moved behind ``path``.
        """
        url = self.url if shown or self._secret_url is None else self._secret_url.reveal()
        base, mark, query = url.partition("?")
        return f"{base.rstrip('/')}{path}{mark}{query}"

    async def request(
        self, method: str, path: str = "", body: Any = None, *, idempotency_key: str | None = None
    ) -> Any:
        """Send ``body`` as JSON, or no body if it is None, and return the decoded JSON of the answer.

        ``idempotency_key`` is sent as the header ``Idempotency-Key``, by which the service recognises a request that is
        sent a second time.

        Raises:
            Retryable: the service is busy, broken, unreachable or too slow, or its answer is not JSON or belongs to
                another request.
            Fatal: the service refuses the request, for example because the key is wrong; ``body`` cannot be written as
                JSON; or `send` raises the error.
        """
        content = None if body is None else encode_json(body)
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key is not None else {}
        response = await self.send(method, path, content, headers)
        if not 200 <= response.status < 300:
            raise self.error_of(path, response)
        try:
            return decode_json(response.body)
        except ValueError as error:
            why, said = self.quote(str(error)), self.quote(response.body)
            where = self.address(path, shown=True)
            raise Retryable(f"{where} answered with no JSON ({why}): {said}", cause="answer") from None

    async def send(
        self, method: str, path: str = "", content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Send ``content`` (encoded JSON, or None for no body) and return the answer, also if its status is an error.

        ``headers`` are sent in addition to those of the client.

        Raises:
            Retryable: the service is unreachable, closed the connection, did not answer in time, or sent the answer to
                a request with another ``Idempotency-Key``.
            Fatal: the address is invalid, the answer is larger than `MAX_ANSWER_BYTES`, or the service's TLS
                certificate cannot be verified.
        """
        import aiohttp

        address, shown = self.address(path), self.address(path, shown=True)
        all_headers = self.headers(headers)
        key = all_headers.get("Idempotency-Key")
        if content is not None:
            all_headers["Content-Type"] = "application/json"
        session = self.session()
        try:
            async with (
                self._free_connections,
                Timeout(self.timeout_s),
                session.request(method, address, data=content, headers=all_headers, allow_redirects=False) as response,
            ):
                if key is not None and response.headers.get("Idempotency-Key", key) != key:
                    response.close_connection()  # pyright: ignore[reportAttributeAccessIssue] (see `session`)
                    raise Retryable(f"{shown} sent the answer to another request", cause="answer")
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise Fatal(f"{shown} answered with more than {MAX_ANSWER_BYTES} bytes", cause="answer")
                return Response(response.status, response.headers, bytes(body))
        except TimeoutError:
            raise Retryable(f"{shown} did not answer within {self.timeout_s:g} s", cause="timeout") from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise Fatal(f"{shown}: {self.quote(str(error))}", cause="request") from None
        except aiohttp.ClientConnectorError as error:
            raise Retryable(f"{shown}: {self.quote(str(error))}", cause=UNREACHABLE) from None
        except (aiohttp.InvalidURL, ValueError) as error:
            raise Fatal(f"{shown}: {self.quote(str(error))}", cause="request") from None
        except (aiohttp.ClientError, OSError) as error:
            why = self.quote(str(error) or type(error).__name__)
            raise Retryable(f"{shown}: {why}", cause="connection") from None

    def headers(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the client's headers, updated with ``more``.

        They contain keys in plain text. Send them, but do not show them.
        """
        headers = {
            name: value.reveal() if isinstance(value, Secret) else value for name, value in self._headers.items()
        }
        if self._bearer is not None:
            headers["Authorization"] = f"Bearer {self._bearer.reveal()}"
        headers.update(more or {})
        return headers

    def session(self) -> aiohttp.ClientSession:
        """Return the aiohttp session of the running event loop, for requests that `send` cannot make (WebSockets).

        The session is opened by the first call on an event loop. A session of another loop is closed.
        """
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._session_loop is not loop:
            self._abandon_session()
            client = self

            class Connector(aiohttp.TCPConnector):
                async def connect(self, *args: Any, **kwargs: Any) -> Any:
                    # aiohttp checks a connection for data that no request reads when the connection becomes idle, but
                    # not when the next request takes it.
                    take: Any = super().connect
                    while (connection := await take(*args, **kwargs)).protocol.should_close:
                        connection.close()
                        if not client._warned:
                            client._warned = True
                            log.warning(_UNASKED, client.url)
                    return connection

            class Answer(aiohttp.ClientResponse):
                async def start(self, connection: Any) -> Any:
                    # The response gives up its connection with the last byte, which may be before the caller sees it.
                    self.close_connection = connection.protocol.close
                    return await super().start(connection)

            self._session = aiohttp.ClientSession(
                connector=Connector(limit=0, keepalive_timeout=60.0),
                response_class=Answer,
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=not is_local(self.address()),
            )
            self._session_loop = loop
            self._free_connections = asyncio.Semaphore(connection_limit(self.connections))
        return self._session

    async def aclose(self) -> None:
        """Close the connections. If the client is used again, it opens new ones."""
        if self._session is not None and self._session_loop is asyncio.get_running_loop():
            session, self._session = self._session, None
            await session.close()
        else:
            self._abandon_session()

    def _abandon_session(self) -> None:
        """Close the connections that belong to another event loop, even if that loop no longer runs."""
        session, loop = self._session, self._session_loop
        self._session = None
        if session is None or loop is None:
            return
        closing = session.close()
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(closing, loop)
            return
        # No loop can run the coroutine. Its first step, up to its first await, closes the connections.
        with contextlib.suppress(StopIteration, RuntimeError):
            closing.send(None)
        closing.close()

    def error_of(self, path: str, response: Response) -> Retryable | Fatal:
        """Return the exception for a response with an error status. The exception's message quotes the response."""
        said, code, status = response.body.decode("utf-8", "replace"), None, response.status
        try:  # quote only the message of an answer in OpenAI's error format or a variant of it, else the whole answer
            answer = json.loads(said)
            error = answer.get("error", answer) if isinstance(answer, dict) else answer
            if isinstance(error, dict):
                code = error.get("code")
                text = error.get("message", error.get("detail"))
                said = said if text is None else str(text)
            else:
                said = str(error)
        except ValueError:
            pass
        message = f"{self.address(path, shown=True)} answered with status {status}: {self.quote(said)}"
        if 300 <= status < 400:
            target = self.quote(response.headers.get("Location", "another address"))
            message += f"; it redirects to {target}, and redirects are not followed: give that address"
        if code == "insufficient_quota":
            return Fatal(message, cause="quota")
        if status in RETRYABLE_STATUSES:
            cause = RATE_LIMIT if status == 429 else UNAVAILABLE if status in UNAVAILABLE_STATUSES else "server"
            return Retryable(message, retry_after(response.headers), cause=cause)
        if status in (401, 403) and self.secrets:
            names = " or ".join(secret.name for secret in self.secrets)
            message += f"; the key comes from the environment variable {names}"
        elif status in (401, 403):
            message += "; no key was sent: set api_key_env to the NAME of the environment variable that holds it"
        return Fatal(message, cause="refused")


def encode_json(body: Any) -> bytes:
    """Encode the body of a request as JSON, with the key in place of each `Secret`.

    Raises:
        Fatal: the body has a value that JSON cannot represent.
    """

    def default(value: Any) -> Any:
        return value.reveal() if isinstance(value, Secret) else to_jsonable(value)

    try:
        return json.dumps(body, default=default, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise Fatal(f"cannot be sent as JSON: {error}", cause="request") from None


def decode_json(text: str | bytes) -> Any:
    """Decode JSON.

    Raises:
        ValueError: ``text`` is not JSON, is nested too deeply, or an object in it has the same key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"it has the key {max(names, key=names.count)!r} twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def to_jsonable(value: Any) -> Any:
    """Convert an array to a list, a numpy scalar to a number or a mapping to a dict, for the encoder of `json`.

    Raises:
        TypeError: ``value`` has another type.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON-serialisable")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the headers ``retry-after-ms`` or ``Retry-After`` ask the client to wait, or None.

    ``Retry-After`` is a number of seconds or an HTTP date. A date is compared with the ``Date`` header of the same
    answer, because the clocks of the service and of this machine may differ. ``headers`` must be a case-insensitive
    mapping, or its names must be in lower case.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    try:
        until = parsedate_to_datetime(headers.get("retry-after", "")).timestamp()
    except ValueError:
        return None
    try:
        now = parsedate_to_datetime(headers.get("date", "")).timestamp()
    except ValueError:
        now = time.time()
    return max(until - now, 0.0)


def connection_limit(wanted: int) -> int:
    """Raise the process's limit of open files if ``wanted`` connections need it, and return how many can be opened.

    The limit is raised as far as the system allows. Without this, at the usual limit of 1,024 files, about the
    thousandth concurrent request would fail with an error that looks as if the service were down.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = wanted + OTHER_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - OTHER_FILES))


def is_local(url: str) -> bool:
    """Return whether ``url`` is an address of this machine (localhost)."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
