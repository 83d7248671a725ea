"""HTTP/1.1 straight over asyncio: a step through httpx takes ten times the processor time of everything else in it.

Only what an environment service needs: one request at a time on a connection that is kept, an answer of any framing,
TLS. The parser is httptools', that of uvicorn and Node.js.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from gleanrl.rewards.client import LARGEST

Response = tuple[int, Mapping[str, str], bytes]


class Connections:
    """To one server, as many as there are requests at once but ``most``; the one used last goes first."""

    def __init__(self, url: str, most: int, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self.loop = asyncio.get_running_loop()
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls
        self._free: dict[_Connection, None] = {}
        self._slots = asyncio.Semaphore(most)

    async def exchange(self, head: bytes, content: bytes) -> Response:
        """Send a request and wait for its answer. A connection whose exchange was broken off is closed.

        Raises:
            OSError: the server cannot be reached, or hung up.
            ValueError: the answer is no HTTP, or too large.
        """
        async with self._slots:
            connection = self._free.popitem()[0] if self._free else await self._connected()
            try:
                response = await connection.request(head, content)
            except BaseException:
                connection.close()
                raise
            if connection.kept:
                self._free[connection] = None
            return response

    async def _connected(self) -> _Connection:
        name = self._host if self._tls is not None else None
        _, connection = await self.loop.create_connection(
            lambda: _Connection(self._free), self._host, self._port, ssl=self._tls, server_hostname=name
        )
        return connection

    def close(self) -> None:
        for connection in list(self._free):
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection; the methods named ``on_...`` are the parser's."""

    def __init__(self, free: dict[_Connection, None]) -> None:
        import httptools

        self._parsers = httptools.HttpResponseParser
        self._free = free
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Response] | None = None
        self.kept = True

    def request(self, head: bytes, content: bytes) -> asyncio.Future[Response]:
        self._answer = self._loop.create_future()
        self._parser: Any = self._parsers(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._size = 0
        if self.kept:
            self._transport.write(head + content)
        else:
            self._answer.set_exception(ConnectionResetError("the server closed the connection"))
        return self._answer

    def close(self) -> None:
        self.kept = False
        self._transport.abort()

    # --- the transport ----------------------------------------------------------------------------
    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except Exception as error:
            self._settle(error=ValueError(str(error) or type(error).__name__))
            self.close()

    def eof_received(self) -> None:
        self.kept = False
        self._free.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.kept = False
        self._free.pop(self, None)
        self._settle(error=exc if isinstance(exc, OSError) else ConnectionResetError("the server hung up"))

    # --- the parser -------------------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._size += len(body)
        if self._size > LARGEST:
            raise ValueError(f"an answer of more than {LARGEST} bytes")

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # more follows
            return
        self.kept = self.kept and self._parser.should_keep_alive()
        self._settle((status, self._headers, b"".join(self._body)))
        if not self.kept:
            self._transport.close()

    def _settle(self, response: Response | None = None, error: Exception | None = None) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if response is not None:
            answer.set_result(response)
        else:
            answer.set_exception(error or ConnectionResetError())
