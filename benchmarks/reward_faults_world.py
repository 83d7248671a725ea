"""The taskset, the random sampler and the faulty reward service of `reward_faults.py`.

The random text of a rollout depends only on the seed that the scheduler gives it, so a resumed run samples the same
text as before it was killed. The right reward of a trajectory is a function of its content (`worth`), so both processes
can tell to which trajectory a reward belongs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.types import Message, Score, Task

WORDS = ("fox", "river", "stone", "apple", "window", "garden", "tower", "letter", "copper", "silver", "morning")
SPECIAL = 7  # number of special tokens of the tiny tokenizer, which have the lowest ids
TOKENS = 8  # number of tokens in an answer
LIFE = "x-life"  # HTTP header that identifies the start ("life") of the trainer that sent a request


def worth(task_id: str, messages: Sequence[Mapping[str, Any]]) -> float:
    """Return the right reward of a conversation: a hash of its content, between 0 and 1 and never 0."""
    said = json.dumps([task_id, [[message["role"], message["content"]] for message in messages]])
    number = int.from_bytes(hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=6).digest(), "big")
    return (number + 1) / (2**48 + 2)


# --- taskset and sampler --------------------------------------------------------------------------
@dataclass
class Riddles(Taskset):
    """A taskset of one question and one answer. The environment's own score is always 0 and must not be trained on."""

    seed: int = 0

    has_expert = True

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        return [Task(f"{split}-{i}", payload={"number": i % 97}) for i in range(count)]

    def environment(self, task: Task) -> Riddle:
        return Riddle(task)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        answer = Message(role="assistant", content=" ".join(random.Random(seed).sample(WORDS, 3)))
        return (question(task), answer), Score(1.0)


@dataclass
class Riddle(Environment):
    task: Task

    async def reset(self) -> Observation:
        return Observation((question(self.task),), score=Score(0.0))

    async def step(self, message: Message) -> Observation:
        return Observation((), done=True, score=Score(0.0))


def question(task: Task) -> Message:
    return Message(role="user", content=f"Riddle {task.payload['number']}: what is it?")


def dice(model: Any, *, inflight: bool = False, **_: Any) -> ScriptedSampler:
    """Make a sampler that returns random text, in place of a model."""
    entries = range(SPECIAL, model.config.vocab_size)
    return ScriptedSampler(lambda prompt, seed: random.Random(seed).choices(entries, k=TOKENS), inflight=inflight)


# --- the reward service ---------------------------------------------------------------------------
class Service:
    """An HTTP reward service that fails on purpose and records all requests and computed answers.

    Of every hundred requests, in order of arrival, exactly the numbers in ``args`` fail; the seed decides which. The
    answers to the others take their latency to compute, and are computed even if the trainer has died or given up
    meanwhile. With ``args.idempotent`` the service stores answers by ``Idempotency-Key`` and computes none twice.

    ``args.moments`` is a list of ``[life, keys, under way, what]``. When ``keys`` different keys have been received in
    all and ``under way`` requests of this life are being processed, the service prints the line ``{"what": ...}`` to
    standard output. If ``what`` is "down", it also drops all requests and refuses connections for ``args.down``
    seconds.

    Attributes:
        account: ``[life, key, outcome]`` of each request.
        paid: ``[life, key]`` of each computed answer.
        worths: right reward of the content that was first received with each key.
        conflicts: number of requests whose content differed from the first one with the same key.
        spared: right rewards, by key, of requests for evaluations, which are answered at once and not recorded.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.account: list[list[str]] = []
        self.paid: list[list[str]] = []
        self.worths: dict[str, float] = {}
        self.spared: dict[str, float] = {}
        self.conflicts = 0
        self.under_way: Counter[str] = Counter()
        self.moments = [tuple(moment) for moment in json.loads(args.moments)]
        self._fates = fates(args)
        self._latency = random.Random(args.seed)
        self._works: dict[str, asyncio.Task[float]] = {}
        self._handlers: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=8192)
        self.port = self._server.sockets[0].getsockname()[1]

    async def go_away(self) -> None:
        assert self._server is not None
        self._server.close()
        stopped = list(self._handlers)
        for task in [*stopped, *(work for work in self._works.values() if not work.done())]:
            task.cancel()
        await asyncio.gather(*stopped, return_exceptions=True)
        await asyncio.sleep(self.args.down)
        await self.listen()
        tell("up")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the trainer has closed the connection or died, or the service is going down
        finally:
            self._handlers.discard(task)
            writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        life, key, value = headers[LIFE], headers["idempotency-key"], worth(body["task_id"], body["messages"])
        if not body["task_id"].startswith("train"):
            self.spared[key] = value
            return await send(writer, 200, {"score": value})
        self.conflicts += self.worths.setdefault(key, value) != value
        entry = [life, key, "lost"]
        self.account.append(entry)
        self.under_way[life] += 1
        self._look(life)
        try:
            return await self._answer(entry, next(self._fates), value, reader, writer)
        finally:
            self.under_way[life] -= 1

    async def _answer(
        self, entry: list[str], fate: str, value: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer or ignore a request as ``fate`` demands, and set ``entry[2]`` to the outcome.

        Returns False if the connection cannot be used for further requests.
        """
        life, key, _ = entry
        if fate == "hang":
            entry[2] = fate
            await reader.read(1)  # wait until the trainer gives up and closes the connection
            return False
        if fate == "error":
            await asyncio.sleep(self._seconds())
            entry[2] = fate
            return await send(writer, 500, {"error": "no luck"})
        work = self._works.get(key) if self.args.idempotent else None
        known = work is not None
        if work is None:
            work = asyncio.create_task(self._work(life, key, float("nan") if fate == "nan" else value))
            if self.args.idempotent:
                self._works[key] = work
                work.add_done_callback(lambda work: self._works.pop(key) if work.cancelled() else None)
        score = await (asyncio.shield(work) if self.args.idempotent else work)
        what = "number" if score == score else "nan"
        entry[2] = "unheard" if reader.at_eof() else f"{what} again" if known else what
        return await send(writer, 200, {"score": score})

    async def _work(self, life: str, key: str, score: float) -> float:
        await asyncio.sleep(self._seconds())
        self.paid.append([life, key])
        return score

    def _seconds(self) -> float:
        return self._latency.uniform(*self.args.latency)

    def _look(self, life: str) -> None:
        """Print the message of the next moment, and go down if it says so, if its conditions are fulfilled."""
        if not self.moments:
            return
        when, keys, under_way, what = self.moments[0]
        if life != when or len(self.worths) < keys or self.under_way[life] < under_way:
            return
        del self.moments[0]
        tell(what, under_way=self.under_way[life])
        if what == "down":
            task = asyncio.create_task(self.go_away())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def fates(args: argparse.Namespace) -> Iterator[str]:
    """Yield the fate of each request: of every hundred, exactly the numbers in ``args`` fail, in random order."""
    draws = random.Random(args.seed)
    hundred = ["error"] * args.errors + ["hang"] * args.hangs + ["nan"] * args.nans
    hundred += ["well"] * (100 - len(hundred))
    while True:
        draws.shuffle(hundred)
        yield from hundred


async def send(writer: asyncio.StreamWriter, status: int, answer: Any) -> bool:
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return True


def tell(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


async def serve(args: argparse.Namespace) -> None:
    """Run the service until standard input is closed, then write its records to the file ``args.account``."""
    service = Service(args)
    await service.listen()
    tell("listening", port=service.port)
    await asyncio.to_thread(sys.stdin.read)
    names = ("account", "paid", "worths", "spared", "conflicts", "moments")
    await asyncio.to_thread(Path(args.account).write_text, json.dumps({n: getattr(service, n) for n in names}))
