"""Tasks, trajectories and a scripted reward service, for tests of the reward agent in virtual time."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.rewards import Request
from gleanrl.types import Message, Score, StopReason, Task, Trajectory, Turn


def make_task(name: str = "t", **payload: Any) -> Task:
    return Task(name, (Message(role="user", content=f"What is {name}?"),), payload)


def make_trajectory(task: Task, answer: str, own: Score | None = None, identity: str = "0") -> Trajectory:
    turns = [Turn(message, np.arange(3)) for message in task.prompt]
    turns.append(Turn(Message(role="assistant", content=answer), np.arange(4), np.zeros(4), version=0))
    score = own or Score.failed("none of its own")
    return Trajectory(f"{task.id}.{identity}", task.id, (tuple(turns),), score, StopReason.DONE)


def stream(*names: Any) -> random.Random:
    return random.Random("/".join(map(str, names)))


class Service:
    """An async reward whose score is the number in the response. Its latency is drawn from the range ``latency``
    (seconds) and depends only on the response and on the number of calls so far.

    ``faults`` maps a response to what happens on its first, second, ... call: an exception is raised, ``"hang"`` never
    returns, None is scored normally, and any other value is returned. Later calls are scored normally.
    """

    version = "service-1"

    def __init__(
        self, latency: tuple[float, float] = (1.0, 4.0), faults: Mapping[str, list[Any]] | None = None
    ) -> None:
        self.latency, self.faults = latency, {name: list(items) for name, items in (faults or {}).items()}
        self.calls: list[tuple[float, str]] = []  # (time, response) of each call
        self.active = self.most_active = self.cancelled = 0

    async def __call__(self, request: Request) -> Any:
        answer = request.response
        self.calls.append((asyncio.get_running_loop().time(), answer))
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            await asyncio.sleep(stream(answer, len(self.calls)).uniform(*self.latency))
            fault = self.faults[answer].pop(0) if self.faults.get(answer) else None
            if fault == "hang":
                await asyncio.Event().wait()
            if isinstance(fault, BaseException):
                raise fault
            return float(answer) if fault is None else fault
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    def asked(self, answer: str) -> int:
        return sum(name == answer for _, name in self.calls)


def count_rows(journal: Path) -> int:
    """The number of scores that are committed to a journal."""
    with closing(sqlite3.connect(journal)) as database:
        return database.execute("SELECT count(*) FROM rewards").fetchone()[0]


def busiest_window(times: list[tuple[float, float]], seconds: float = 60.0) -> float:
    """Return the largest sum of amounts in any window of ``seconds``. ``times``: sorted pairs ``(time, amount)``."""
    most, start, total = 0.0, 0, 0.0
    for now, amount in times:
        total += amount
        while times[start][0] <= now - seconds:
            total -= times[start][1]
            start += 1
        most = max(most, total)
    return most
