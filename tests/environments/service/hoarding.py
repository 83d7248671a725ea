"""A taskset for tests whose lists of tasks take time, and whose environments allocate memory on command."""

# ruff: noqa: ASYNC220 - environments of users also start processes in this way

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gleanrl.protocols import Observation, Split
from gleanrl.types import Message, Task
from tests.environments.service.world import Echo, EchoEpisode
from tests.environments.troublesome import Troublesome

CHILD = "import sys; held = b'x' * (int(sys.argv[1]) << 20); print(flush=True); sys.stdin.read()"


@dataclass(frozen=True)
class Hoarding(Echo):
    """For each list of tasks that is made, appends the id of the process to a file in ``folder``, one per split."""

    folder: str = ""

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        if self.folder:
            with (Path(self.folder) / split).open("a") as made:
                made.write(f"{os.getpid()}\n")
        time.sleep(600 if split == "warm_start" else 0.3)
        return super().tasks(split, count)

    def environment(self, task: Task) -> EchoEpisode:
        return HoardingEpisode(self.turns)


class HoardingEpisode(EchoEpisode):
    async def step(self, message: Message) -> Observation:
        """Allocate memory if the message says so, and then wait.

        "hold 100" allocates 100 MiB in this process, "start 100" starts a process in a new session that does.
        """
        order, _, mib = str(message["content"]).partition(" ")
        if order == "hold":
            self.held = b"x" * (int(mib) << 20)
            await asyncio.sleep(600)
        elif order == "start":
            pipe = subprocess.PIPE
            command = [sys.executable, "-c", CHILD, mib]
            subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
            await asyncio.sleep(600)
        return await super().step(message)


class Plain(Troublesome):
    """A taskset without an expert, whose ids differ from those of all other test environments."""

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        return [Task(f"plain-{split}-{i}") for i in range(count)]
