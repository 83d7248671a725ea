"""Sandboxes to try things in, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gleanrl.environments.tools.sandbox import Limits, PythonSandbox, Ran
from gleanrl.utils.errors import UserError


@dataclass
class World:
    """A sandbox that lasts for several tests."""

    runner: asyncio.Runner
    sandbox: PythonSandbox

    def run(self, code: str) -> Ran:
        return self.runner.run(self.sandbox.run(code))


def skip_where_the_kernel_refuses(error: UserError) -> NoReturn:
    """Only then: a wall that does not stand, or a server that breaks, is a failure."""
    reasons = str(error).partition("(")[2].partition("). Allow")[0].split("; ")
    refusals = ("not permitted", "No space left", "not implemented", "no Landlock", "Landlock: version", "no filter")
    if not all(any(refusal in reason for refusal in refusals) for reason in reasons):
        raise error
    pytest.skip(str(error))


def opened(runner: asyncio.Runner, isolation: Any, limits: Limits) -> PythonSandbox:
    async def start() -> PythonSandbox:
        sandbox = PythonSandbox(limits, isolation=isolation)
        await sandbox.start()
        return sandbox

    try:
        return runner.run(start())
    except UserError as error:
        skip_where_the_kernel_refuses(error)


def descendants(pid: int) -> list[int]:
    try:
        children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(deeper for child in children for deeper in descendants(child))]


def is_session(pid: int, control: int) -> bool:
    """Not the server itself, which with namespaces is the only child of the process that was started."""
    return not (descendants(control) and pid == descendants(control)[0] and len(descendants(control)) == 1) and alive(
        pid
    )


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
