"""What a connection may hold and how long it may stay before anybody knows who is at its other end.

uvicorn bounds neither the head of a request nor the time that it takes, and its idle clock starts after an answer only:
whoever reaches the port could fill the memory or take all connections, without a token.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from gleanrl.environments.service.gate import LET_IN

HEAD = 16 << 10  # bytes of a request's line and headers
HEAD_S = 10.0  # for them to arrive, from the first byte on or, on a new connection, from its beginning
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


_Base: Any = AutoHTTPProtocol


class _TooLarge(Exception):
    pass


@dataclass(slots=True)
class _Guard:
    """What the connections of one server have in common."""

    most: int
    strangers: dict[Any, None] = field(default_factory=dict)  # no request of theirs was let in yet; the oldest first


def guarded(most: int) -> Any:
    """uvicorn's protocol with bounds. At ``most`` connections the oldest of a stranger makes room for a new one."""
    return partial(_Guarded, guard=_Guard(most))


class _Guarded(_Base):
    """The methods named ``on_...`` are called by httptools only; h11 has a bound of its own."""

    def __init__(
        self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None, *, guard: _Guard
    ) -> None:
        state = {**app_state, LET_IN: self._let_in}
        super().__init__(config=config, server_state=server_state, app_state=state, _loop=_loop)
        self._guard = guard
        self._clock: asyncio.TimerHandle | None = None
        self._in_head = False
        self._held = 0  # bytes of the head so far, as the parser gave them ...
        self._raw = 0  # ... and as they came, without those that came with its first

    def _let_in(self) -> None:
        self._guard.strangers.pop(self, None)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        strangers = self._guard.strangers
        strangers[self] = None
        while len(self.connections) > self._guard.most and (oldest := next(iter(strangers))) is not self:
            oldest._hang_up()
            self.connections.discard(oldest)
        self._clock = self.loop.call_later(HEAD_S, self._hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._let_in()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began = self._in_head
        super().data_received(data)
        if (
            began and self._in_head and not self.transport.is_closing()
        ):  # a line that does not end is not seen otherwise
            self._raw += len(data)
            if self._raw > HEAD:
                return self._refuse()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_clock()
        elif self._clock is None:
            self._clock = self.loop.call_later(HEAD_S, self._hang_up)

    def on_message_begin(self) -> None:
        self._in_head, self._held, self._raw = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._hold(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._hold(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > HEAD:
            raise _TooLarge  # comes out of the parser as an error of its own, see below

    def send_400_response(self, msg: str) -> None:
        if self._held > HEAD:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _refuse(self) -> None:
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _hang_up(self) -> None:
        self._let_in()
        self._stop_clock()
        self.transport.abort()
