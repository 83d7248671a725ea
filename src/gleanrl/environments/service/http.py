"""Requests to an environment service: sent again until they are answered, or for as long as patience lasts."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from gleanrl.environments.service.direct import Connections
from gleanrl.environments.service.encoding import encode
from gleanrl.rewards.client import JsonClient, is_local, retry_after
from gleanrl.rewards.clock import Clock
from gleanrl.utils.retry import UNREACHABLE, Fatal, Retryable

T = TypeVar("T")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
_PASSING = frozenset({408, 425, 429, 502, 503, 504})  # what a proxy says too; 500 is an environment's failure


class Problem(Exception):
    """The service carries a request out in no way; ``error`` is its word for why."""

    def __init__(self, status: int, error: str, detail: str, more: Mapping[str, Any]) -> None:
        super().__init__(detail)
        self.status, self.error, self.detail, self.more = status, error, detail, more


class Unanswered(Exception):
    """No answer for as long as patience lasted."""


class ServiceClient(JsonClient):
    """The service at ``url``. Every request may be sent more than once: the service knows it again.

    Args: as of `JsonClient`; ``patience_s``: for how long a request is sent again while the service cannot be
        reached, is full or does not answer.
    """

    def __init__(self, url: str, *, token_env: str | None, timeout_s: float, patience_s: float) -> None:
        super().__init__(url, api_key_env=token_env, timeout_s=timeout_s, setting="environment.options.url")
        self._patience_s = patience_s
        self._straight = _is_direct(url)
        self._connections: Connections | None = None
        self._tls = ssl.create_default_context() if url.startswith("https:") and self._straight else None
        parts = urlsplit(self.url)
        self._origin, self._authority = f"{parts.scheme}://{parts.netloc}", parts.netloc

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, *, patience_s: float | None = None) -> Any:
        """What the service answers to a POST of ``body``, or to a GET where there is none.

        Raises:
            Problem: it refuses.
            Unanswered: it did not answer for ``patience_s`` (None: as was set) seconds.
            NotJson: ``body`` cannot be sent.
        """
        method, content = ("GET", b"") if body is None else ("POST", encode(body))
        loop, tries = asyncio.get_running_loop(), 0
        patience = self._patience_s if patience_s is None else patience_s
        failing_since: float | None = None
        while True:
            try:
                status, fields, text = await self._exchange(self._address(path), content, {}, method)
                if status not in _PASSING:
                    return _read(status, text, self.quoted)
                error: Exception = Retryable(f"status {status}: {self.quoted(_detail(text))}", retry_after(fields))
            except Retryable as failed:
                error = failed
            except Fatal as fatal:
                raise Unanswered(str(fatal)) from None
            now = loop.time()
            failing_since = now if failing_since is None else failing_since
            wait = random.uniform(0.5, 1.0) * min(FIRST_WAIT_S * 2**tries, LONGEST_WAIT_S)
            wait = max(wait, error.after_s or 0.0)
            if now + wait > failing_since + patience:
                raise Unanswered(f"no answer from {self.url} for {patience:g} s; the last: {error}") from None
            tries += 1
            await asyncio.sleep(wait)

    async def _exchange(
        self, address: str, content: bytes, named: Mapping[str, str], method: str = "POST"
    ) -> tuple[int, Mapping[str, str], bytes]:
        if not self._straight:
            return await super()._exchange(address, content, named, method)
        connections = self._connections
        if connections is None or connections.loop is not asyncio.get_running_loop():
            connections = self._connections = Connections(self.url, self.slots, self._tls)
        try:
            async with Clock(self.timeout_s):
                return await connections.exchange(self._head(address, method, len(content)), content)
        except TimeoutError as error:
            if error.errno is not None:  # the system's, of a connection
                raise Retryable(f"{address}: {error.strerror}", cause="connection") from None
            raise Retryable(f"{address} did not answer within {self.timeout_s:g} s", cause="timeout") from None
        except ssl.SSLCertVerificationError as error:
            raise Fatal(f"{address}: {error.verify_message}", cause="request") from None
        except OSError as error:
            nobody = isinstance(error, ConnectionRefusedError)
            said = error.strerror or str(error) or type(error).__name__
            raise Retryable(f"{address}: {said}", cause=UNREACHABLE if nobody else "connection") from None
        except ValueError as error:
            raise Fatal(f"{address} does not answer in HTTP: {self.quoted(str(error))}", cause="answer") from None

    def _head(self, address: str, method: str, length: int) -> bytes:
        target = address[len(self._origin) :] or "/"
        head = f"{method} {target} HTTP/1.1\r\nHost: {self._authority}\r\n"
        for name, value in self._headers.items():
            head += f"{name}: {self._value(name, value)}\r\n"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
        return (head + "\r\n").encode("latin-1")

    async def aclose(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None and connections.loop is asyncio.get_running_loop():
            connections.close()
        await super().aclose()


def _is_direct(url: str) -> bool:
    """Whether no proxy of the environment is between, and the parser is there."""
    parts = urlsplit(url)
    proxied = parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "") and not is_local(url)
    return not proxied and importlib.util.find_spec("httptools") is not None


def _read(status: int, text: bytes, quoted: Callable[[bytes], str]) -> Any:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if 200 <= status < 300 and answer is not None:
        return answer
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise Problem(status, answer["error"], str(answer.get("detail", "")), answer)
    raise Problem(status, "foreign", f"status {status}: {quoted(text)}", {})


def _detail(text: bytes) -> bytes:
    try:
        return str(json.loads(text)["detail"]).encode()
    except (ValueError, KeyError, TypeError):
        return text


@cache
def shared(
    url: str, token_env: str | None, timeout_s: float, patience_s: float, *, waiting: bool = False
) -> ServiceClient:
    """The process's client of a service: all episodes share its connections. ``waiting``: the one for `blocking`."""
    return ServiceClient(url, token_env=token_env, timeout_s=timeout_s, patience_s=patience_s)


def blocking(call: Coroutine[Any, Any, T]) -> T:
    """The result of ``call``, which runs on a loop of its own beside whatever loop runs here."""
    return asyncio.run_coroutine_threadsafe(call, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environment service", daemon=True).start()
    return loop


def _forked() -> None:
    """Neither threads nor connections are a child's."""
    shared.cache_clear()
    _loop.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
