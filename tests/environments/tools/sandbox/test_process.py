"""What sessions may say, and what is believed; and a server that does not listen."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from tests.environments.tools.sandbox.worlds import World, descendants

pytestmark = pytest.mark.usefixtures("well")
HONEST = {"call": 0, "error": None, "left_out": 0, "threads": 0}


def forged(body: bytes, kind: str = "d", after: str = "while True:\n    pass") -> str:
    return f"import os, struct\nos.write(3, struct.pack('<Ic', {len(body)}, {kind.encode()!r}) + {body!r})\n{after}"


@pytest.mark.parametrize(
    "body",
    [
        b'{"failed": "the machine broke"}',
        json.dumps({**HONEST, "failed": "the machine broke", "error": 1}).encode(),
        json.dumps({**HONEST, "call": 7}).encode(),
        json.dumps({**HONEST, "left_out": "many"}).encode(),
        json.dumps({**HONEST, "left_out": -1}).encode(),
        b'{"call": 0, "error": null, "threads": 0, "left_out": ' + b"9" * 4299 + b"}",
        b'{"call": 0, "left_out": 0, "threads": 0, "error": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"\xff\xfe",
        b"[]",
    ],
)
def test_a_forged_end_raises_nothing_and_ends_the_session(world: World, body: bytes) -> None:
    ran = world.run(forged(body))
    assert ran.ended
    assert (ran.error or "").startswith("the process is gone")


@pytest.mark.parametrize(("kind", "body"), [("s", b"no session"), ("x", b"x"), ("o", b"")])
def test_frames_that_do_not_belong_there(world: World, kind: str, body: bytes) -> None:
    assert (world.run(forged(body, kind)).error or "").startswith("the process is gone")


def test_more_output_than_may_be_is_cut_whoever_sends_it(world: World) -> None:
    ran = world.run(forged(b"x" * 3000, "o", "os._exit(0)"))
    assert ran.output == "x" * 1000
    assert ran.left_out == 2000


def test_no_half_characters_reach_us(world: World) -> None:
    half = "\\ud800"
    for code in (f"raise ValueError('{half}')", f"raise SystemExit('{half}')", f"print('{half}')",
                 forged(f'{{"call": 0, "error": "{half}", "left_out": 0, "threads": 0}}'.encode())):  # fmt: skip
        assert "?" in world.run(code).text.encode().decode()


def test_a_library_that_the_code_has_broken(world: World) -> None:
    """As tests of programs do that forbid a program all sorts of functions."""
    code = (
        "import json, os, resource, signal, threading, traceback\nthreading.active_count = signal.setitimer = None\n"
        "for module in (json, os, resource):\n    for name in dir(module):\n"
        "        if not name.startswith('__'):\n            setattr(module, name, None)\n'broken'"
    )

    async def twice() -> list[Any]:
        session = world.sandbox.session()
        try:
            return [await session.run(code), await session.run("6 * 7")]
        finally:
            await session.close()

    first, second = world.runner.run(twice())
    assert (first.output, first.error, first.ended) == ("'broken'\n", None, False)
    assert (second.output, second.error) == ("42\n", None)


def test_nothing_goes_on_between_calls_even_if_it_says_that_it_has_ended(world: World) -> None:
    before = "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0)\nlast, gap = time.monotonic(), 0\n"
    goes_on = "while gap < 0.3:\n    gap, last = (now := time.monotonic()) - last, now\nprint('it stood still')"
    claim = forged(json.dumps(HONEST).encode(), after=goes_on)

    async def calls() -> Any:
        session = world.sandbox.session()
        try:
            first = await session.run(before + claim)
            assert (first.error, first.ended) == (None, False)
            await asyncio.sleep(0.6)
            return await session.run("1")
        finally:
            await session.close()

    second = world.runner.run(calls())
    assert second.output == "it stood still\n"
    assert second.ended  # what it says next is the end of the first call


def test_threads_that_threading_does_not_know_of(world: World) -> None:
    code = (
        "import _thread, time\nbegun = _thread.allocate_lock()\nbegun.acquire()\n"
        "_thread.start_new_thread(lambda: (begun.release(), time.sleep(60)), ())\nbegun.acquire()"
    )

    async def call() -> Any:
        session = world.sandbox.session()
        try:
            return await session.run(code)
        finally:
            await session.close()

    assert world.runner.run(call()).ended


def test_a_server_that_does_not_listen_is_told_later(world: World) -> None:
    starting = world.sandbox._starting
    assert starting is not None
    server = starting.result()
    process = [server._process.pid, *descendants(server._process.pid)][-1]  # with namespaces a child is the server
    os.kill(process, signal.SIGSTOP)
    try:
        while not server._unsent:
            server.tell("kill", 10**6)
        runs = [world.runner.get_loop().create_task(world.sandbox.run(f"{n}")) for n in range(3)]
        world.runner.run(asyncio.sleep(0.1))
        assert len(server._unsent) > 2
    finally:
        os.kill(process, signal.SIGCONT)

    async def results() -> list[Any]:
        return await asyncio.gather(*runs)

    assert [(ran.output, ran.error) for ran in world.runner.run(results())] == [(f"{n}\n", None) for n in range(3)]
    assert not server._unsent
