"""The Parity taskset, except that some of its tasks kill the server process that plays them, once each."""

# ruff: noqa: ASYNC240

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gleanrl.protocols import Environment, Observation
from gleanrl.types import Message, Task
from tests.cli.parity import Parity


@dataclass
class Killing(Parity):
    folder: str = ""  # folder in which a task writes a file before it kills the server; "" = no task does
    tasks_that_kill: Sequence[str] = ()

    def environment(self, task: Task) -> Any:
        return _Conversation(super().environment(task), self, task.id)


@dataclass
class _Conversation(Environment):
    inner: Any
    rules: Killing
    id: str

    async def reset(self) -> Observation:
        return await self.inner.reset()

    async def step(self, message: Message) -> Observation:
        done = Path(self.rules.folder, self.id)
        if self.rules.folder and self.id in self.rules.tasks_that_kill and not done.exists():
            done.touch()
            # The parent of this worker process is the server.
            os.kill(os.getppid(), signal.SIGKILL)
        return await self.inner.step(message)
