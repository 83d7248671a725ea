"""What the environment pool and its workers say to each other, and how it travels."""

from __future__ import annotations

import asyncio
import io
import pickle
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, cast

from gleanrl.protocols import Observation
from gleanrl.types import Score

_HEADER = struct.Struct("<IBQQ")  # length of the body in bytes, kind, request, episode


class Kind(IntEnum):
    # pool -> worker
    TASKSET = 0  # (files to import, pickled taskset): once, first
    RESET = 1  # a task: makes the episode's environment and resets it
    STEP = 2  # a message
    CLOSE = 3
    CANCEL = 4  # give up the request, if it is one that awaits
    CONCLUDE = 10  # a stop reason
    CALL = 12  # what is called with the taskset
    # worker -> pool
    READY = 5
    AWAITING = 6  # the request is not done but lets the next one start: its environment awaits something
    VALUE = 7
    RAISED = 8  # (type name, message, traceback) of what the environment raised
    MISTAKE = 9  # text of a UserError
    LOST = 11  # text of an EpisodeLost


# Every step has an observation: by their fields they take a third of the time that slotted dataclasses do.
_BY_FIELDS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Observation: lambda o: (Observation, (o.messages, o.done, o.score, o.info, o.tools)),
    Score: lambda s: (Score, (s.value, s.valid, s.parts, s.explanation, s.applicable)),
}


def encode(value: Any) -> bytes:
    body = io.BytesIO()
    pickler = pickle.Pickler(body, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _BY_FIELDS
    pickler.dump(value)
    return body.getvalue()


decode = pickle.loads


class Wire(asyncio.Protocol):
    """Frames over a stream socket: ``receive(kind, request, episode, body)`` for each, in order; ``lost()`` at its end.

    The body stays encoded, so that one which cannot be decoded costs its request and not the connection.
    """

    def __init__(self, receive: Callable[[Kind, int, int, bytes], None], lost: Callable[[], None]) -> None:
        self._receive = receive
        self._lost = lost
        self._buffer = bytearray()
        self._early: bytearray | None = bytearray()  # sent before the connection stood; None once it did
        self._closing = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by name
        self._transport.write(self._early or b"")
        self._early = None
        if self._closing:
            transport.close()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEADER.size:
            length, kind, request, episode = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            self._receive(Kind(kind), request, episode, bytes(buffer[start + _HEADER.size : end]))
            start = end
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, kind: Kind, request: int = 0, episode: int = 0, body: bytes = b"") -> None:
        """Never blocks and never fails: what is sent after the other end went is dropped."""
        frame = _HEADER.pack(len(body), kind, request, episode) + body
        if self._transport is not None:
            self._transport.write(frame)
        elif self._early is not None:
            self._early += frame

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()
