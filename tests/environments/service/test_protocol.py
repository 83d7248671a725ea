"""Who has no token holds neither memory nor connections, of the server as a user starts it."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from gleanrl.environments.service.meter import process_memory
from gleanrl.environments.service.protocol import HEAD
from tests.environments.service.world import TOKEN, served

HASTY = "tests.environments.service.hasty:Hasty"
START = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
ASKS = START.replace(b"health", b"taskset") + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()


@contextmanager
def hasty(monkeypatch: pytest.MonkeyPatch, seconds: float, connections: int) -> Iterator[tuple[int, int]]:
    """Process id and port of a server that waits for so long and lets so many in."""
    monkeypatch.setenv("HASTY", f"{seconds} {connections}")
    with served(HASTY, token=True) as (process, url):
        yield process.pid, int(url.rpartition(":")[2])
        assert process.poll() is None


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def status(line: socket.socket) -> bytes:
    """Of the next answer, which is read whole; nothing where the connection ended instead."""
    found, length = b"", 0
    with line.makefile("rb") as reader:
        for text in reader:
            found = found or text.split()[1]
            if text.lower().startswith(b"content-length:"):
                length = int(text.split(b":")[1])
            if text == b"\r\n":
                reader.read(length)
                break
    return found


def test_the_head_of_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = {
        "lines": b"X-A: " + b"a" * 1000 + b"\r\n",
        "one line": b"a" * 1000,
        "the address": b"a" * 1000,
    }
    with hasty(monkeypatch, 30.0, 100) as (pid, port):
        before = process_memory(pid) or 0
        for name, piece in endless.items():
            with connected(port) as line:
                line.sendall(b"GET /" if name == "the address" else START + b"X-A: " if name == "one line" else START)
                sent = 0
                with suppress(OSError):
                    while sent < 64 << 20:
                        line.sendall(piece)
                        sent += len(piece)
                assert sent < 16 << 20, name  # what the system's own buffers take
        assert (process_memory(pid) or 0) - before < 8 << 20
        for size, told in ((HEAD - 2000, b"200"), (HEAD + 2000, b"431")):
            with connected(port) as line:
                line.sendall(START + b"X-A: " + b"a" * size + b"\r\n\r\n")
                assert status(line) == told
            with connected(port) as line:  # as it may come: in pieces
                for part in (START + b"X-A: ", *[b"a" * (size // 8)] * 8, b"\r\n\r\n"):
                    line.sendall(part)
                    time.sleep(0.01)
                assert status(line) == told


def test_what_comes_behind_the_head_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with hasty(monkeypatch, 30.0, 100) as (_, port), connected(port) as line:
        body = b'{"id":"unknown-0123456789","step":1,"message":{"role":"user","content":"' + b"a" * 2 * HEAD + b'"}}'
        asks = ASKS.replace(b"GET /taskset", b"POST /step")[:-2]
        line.sendall(asks)
        time.sleep(0.2)  # a network cuts where it likes
        line.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert status(line) == b"404"


def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = b"POST /step HTTP/1.1\r\nHost: localhost\r\n"
    with hasty(monkeypatch, 1.0, 100) as (_, port):
        slow = {connected(port): said for said in (b"", b"G", begun, b"\r\n")}
        again = connected(port)
        again.sendall(START + b"\r\n")
        assert status(again) == b"200"
        slow[again] = b"G"
        began = time.monotonic()
        for line, said in slow.items():
            line.sendall(said)
        kept = connected(port)  # answered, and silent since: it may ask again
        kept.sendall(ASKS)
        assert status(kept) == b"200"
        while slow:
            for line in select.select(list(slow), [], [], 10.0)[0]:
                with line, suppress(ConnectionResetError):
                    assert line.recv(1) == b"", slow[line]
                del slow[line]
            assert time.monotonic() - began < 20.0
            for line, said in slow.items():  # a byte now and then does not help
                if said == b"\r\n":
                    with suppress(OSError):
                        line.sendall(said)
        assert time.monotonic() - began > 0.5
        kept.sendall(ASKS)
        assert status(kept) == b"200"
        kept.close()


def test_a_body_that_does_not_begin_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with hasty(monkeypatch, 0.5, 100) as (_, port), connected(port) as line:
        asks = ASKS.replace(b"GET /taskset", b"POST /step")[:-2]
        line.sendall(asks + b"Content-Type: application/json\r\nContent-Length: 5\r\n\r\n")
        assert status(line) == b"408"


def test_strangers_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 20
    with hasty(monkeypatch, 60.0, most) as (_, port):
        known = connected(port)
        known.sendall(ASKS)
        assert status(known) == b"200"
        strangers = [connected(port) for _ in range(3 * most)]  # of which most are hung up on
        for line in strangers[::3]:
            with suppress(OSError):
                line.sendall(START + b"\r\n")  # to ask for what needs no token makes nobody known
        for line in (known, connected(port), connected(port)):
            line.sendall(ASKS)
            assert status(line) == b"200"
        held = [line for line in strangers if not select.select([line], [], [], 0.0)[0]]
        assert len(held) < most
        for line in strangers:
            line.close()
        known.close()
