"""`PythonTool`: sessions of calls and episodes, the limit on concurrent calls, and its options."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from gleanrl.environments.tools.environment import ToolEnvironment
from gleanrl.environments.tools.executor import Session
from gleanrl.environments.tools.python import PythonTool, check_python
from gleanrl.rollout.tool_calls import Call, call_message
from gleanrl.types import Message
from gleanrl.utils.errors import UserError


def test_variables_are_kept_within_an_episode_only_if_persistent() -> None:
    async def episodes() -> None:
        single, lasting = PythonTool(wall_s=5.0), PythonTool(wall_s=5.0, persistent=True)
        for tool in (single, lasting):
            assert await tool.python("x = 3\nx + 4") == "7\n"
        assert "NameError" in await single.python("x")
        assert await lasting.python("x") == "3\n"
        ended = await lasting.python("import os\nos._exit(1)")
        assert "variables are gone" in ended
        assert "NameError" in await lasting.python("x")
        await single.close()
        await lasting.close()

    # Each round runs on a new event loop.
    for _ in range(2):
        asyncio.run(episodes())


def test_all_tools_on_an_event_loop_share_the_limit_on_concurrent_calls() -> None:
    async def episodes() -> None:
        code = "import time\nbegan = time.time()\ntime.sleep(0.1)\n(began, time.time())"
        spans = await asyncio.gather(*(PythonTool(concurrency=1).python(code) for _ in range(3)))
        ordered = sorted(eval(span) for span in spans)
        assert all(before[1] <= after[0] for before, after in pairwise(ordered))

    asyncio.run(episodes())


@pytest.mark.parametrize("persistent", [False, True])
def test_a_sandbox_that_cannot_start_fails_the_episode_and_is_not_the_model_s_error(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(self: Session) -> None:
        raise OSError("no process is left")

    monkeypatch.setattr(Session, "start", start)
    environment = ToolEnvironment([PythonTool(isolation="none", persistent=persistent)])
    called = Message(role="assistant", content="", tool_calls=[call_message(Call("python", {"code": "1"}), 0)])
    with pytest.raises(UserError, match="no process is left"):
        asyncio.run(environment.step(called))


@pytest.mark.parametrize("options", [{"wall": 1}, {"wall_s": -1}, {"isolation": "strong"}])
def test_wrong_options_raise_with_the_name_of_the_option(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        asyncio.run(check_python(options))


def test_a_program_that_makes_a_taskset_with_the_python_tool_ends_without_errors(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "6 * 7?", "answer": "42"}')
    made = f"ToolTaskset(tools=['python'], data={str(tmp_path / 'rows.jsonl')!r}).tools(None)"
    program = f"from gleanrl.environments.tools import ToolTaskset; print(len({made}))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("1\n", 0)
    assert all("WITHOUT isolation" in line for line in ended.stderr.splitlines())
