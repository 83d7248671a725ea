"""A fast environment for whole runs: an episode has two answers, each good if its number of characters is even.

Every model varies in this, so every step has something to learn. A task named in ``trouble`` fails in its first
step in the given way ("raise", "hang", "exit", "kill"); with "nobody" the task has no expert.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert

TURNS = 2


@dataclass
class Parity(Taskset):
    has_expert = True

    seed: int = 0
    trouble: Mapping[str, str] = field(default_factory=dict)  # task id or "*" -> kind of failure

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        return [Task(f"{split}-{i}", payload={"start": (self.seed + i) % 7}) for i in range(count)]

    def environment(self, task: Task) -> Conversation:
        named = self.trouble.get(task.id, "" if task.id.startswith("eval") else self.trouble.get("*", ""))
        return Conversation(task, named)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        if self.trouble.get(task.id) == "nobody":
            raise NoExpert(f"nobody shows {task.id}")
        said: list[Message] = []
        for turn in range(TURNS):
            said.append(Message(role="user", content=asked(task, turn)))
            said.append(Message(role="assistant", content="left" if seed % 2 else "go right"))
        return tuple(said), Score(1.0)


def asked(task: Task, turn: int) -> str:
    return f"door {task.payload['start'] + turn}: say left or go right"


@dataclass
class Conversation(Environment):
    task: Task
    trouble: str
    good: list[bool] = field(default_factory=list)

    async def reset(self) -> Observation:
        return Observation((Message(role="user", content=asked(self.task, 0)),), score=Score(0.0))

    async def step(self, message: Message) -> Observation:
        match self.trouble:
            case "raise":
                raise RuntimeError("the door is stuck")
            case "hang":
                time.sleep(600)  # noqa: ASYNC251 - blocks, as an engine without asyncio does
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        self.good.append(len(message["content"]) % 2 == 0)
        score = Score(sum(self.good) / TURNS)
        heard = (Message(role="user", content=asked(self.task, len(self.good))),)
        return Observation(heard, done=len(self.good) == TURNS, score=score)
