"""The Python tool: what its episodes share, and that it ends with their event loop."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from gleanrl.environments.tools.python import PythonTool
from gleanrl.environments.tools.sandbox import PythonSandbox
from gleanrl.utils.errors import UserError


@pytest.fixture(autouse=True)
def _isolated() -> None:
    async def start() -> None:
        sandbox = PythonSandbox()
        await sandbox.start()
        await sandbox.close()

    try:
        asyncio.run(start())
    except UserError as error:
        pytest.skip(str(error))


def servers() -> set[int]:
    """Of sandboxes that this process has started."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and b"gleanrl.environments.tools.sandbox.server" in command.read_bytes():
                found.add(int(child))
    return found


async def seven(**options: bool) -> set[int]:
    """Computes it in an episode; the servers that there are then."""
    tool = PythonTool(wall_s=5.0, **options)
    assert await tool.python("3 + 4") == "7\n"
    await tool.close()
    return servers()


def test_episodes_share_a_server_and_it_ends_with_their_loop() -> None:
    before = servers()

    async def episodes() -> set[int]:
        await asyncio.gather(seven(), seven(), seven(persistent=True))
        return servers() - before

    for _ in range(2):
        assert len(asyncio.run(episodes())) == 1
        assert servers() == before


def test_a_loop_that_was_closed_and_never_shut_down() -> None:
    before = servers()
    loop = asyncio.new_event_loop()
    (left,) = loop.run_until_complete(seven()) - before
    loop.close()
    ended = os.pidfd_open(left)
    try:
        asyncio.run(seven())
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        assert poll.poll(10_000), "its server goes on"
    finally:
        os.close(ended)


def test_a_program_that_made_a_taskset_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "6 * 7?", "answer": "42"}')
    made = f"ToolTaskset(tools=['python'], data={str(tmp_path / 'rows.jsonl')!r}).tool_schemas"
    program = f"from gleanrl.environments.tools import ToolTaskset; print(len({made}))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("1\n", "", 0)


def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    before = servers()

    async def started() -> None:
        await asyncio.wait([asyncio.ensure_future(seven())], timeout=0.02)

    asyncio.run(started())
    for left in servers() - before:
        ended = os.pidfd_open(left)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        assert poll.poll(10_000), "a server goes on"
        os.close(ended)
