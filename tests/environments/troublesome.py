"""Environments that fail on command: a message tells the environment to raise, block, wait, exit or be killed."""

# ruff: noqa: ASYNC220, ASYNC240, ASYNC251 - blocking is the trouble that they make

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class Troublesome(Taskset):
    """Tasks whose environment executes the commands in messages, and in the payload keys ``reset`` and ``close``."""

    marks: str = ""  # folder in which each closed episode writes a file; "" = no files are written

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        return [Task(f"{split}-{i}") for i in range(count)]

    def environment(self, task: Task) -> Obedient:
        return cast(Obedient, object()) if task.payload.get("duck") else Obedient(task, self.marks)


class Obedient(Environment):
    def __init__(self, task: Task, marks: str) -> None:
        self.task = task
        self.marks = marks
        self.heard: list[str] = []

    async def reset(self) -> Observation:
        await obey(str(self.task.payload.get("reset", "")))
        return self.seen()

    async def step(self, message: Message) -> Observation:
        self.heard.append(message["content"])
        await obey(message["content"])
        return self.seen()

    async def close(self) -> None:
        if self.marks:
            Path(self.marks, self.task.id).write_text("closed")
        await obey(str(self.task.payload.get("close", "")))

    def seen(self) -> Observation:
        """Return an observation with all messages so far, so that a lost, repeated or misdirected one is noticed."""
        text = f"{self.task.id}: {' '.join(self.heard)}"
        return Observation(({"role": "user", "content": text},), score=Score(0.0), info={"pid": os.getpid()})


async def obey(order: str) -> None:
    verb, _, argument = order.partition(" ")
    match verb:
        case "raise":
            raise ValueError(argument)
        case "mistake":
            raise UserError(argument)
        case "cancel":
            raise asyncio.CancelledError(argument)
        case "leave":
            sys.exit(3)
        case "exit":
            os._exit(int(argument))
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "block":
            seconds, _, begun = argument.partition(" ")
            if begun:
                Path(begun).touch()
            # Blocks the whole worker, like an environment that does not await.
            time.sleep(float(seconds))
        case "await":
            await asyncio.sleep(float(argument))
        # Starts a program that would outlive its worker, and writes its pid to a file.
        case "start":
            Path(argument).write_text(str(subprocess.Popen(["sleep", "600"]).pid))


class Unpicklable(Troublesome):
    def __reduce__(self) -> str:
        raise TypeError("cannot pickle a live connection")


class Unbuildable(Troublesome):
    def __reduce__(self) -> tuple[object, ...]:
        return _fail, ()


class Deadly(Troublesome):
    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (5,)


def _fail() -> None:
    raise LookupError("no such data here")
