"""Measures what the endpoint of agents costs, next to the player in process, and how many episodes it answers at once.

    python benchmarks/agent_endpoint.py [--calls 5 30] [--prompt 10 1000] [--repeats 7] [--episodes 1000]

It needs `pip install 'gleanrl[agent]'`. The sampler answers at once with one text. An episode makes --calls calls; its
first prompt has --prompt words. In process, the environment gives the same messages, and the tokens are checked to be
the same. The table shows the tokens of an episode, and microseconds of wall time for each call and each of these
tokens: medians of --repeats runs of 20 episodes, one at a time, the client included. The last line plays --episodes
episodes of 5 calls at once, with the client in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np

from gleanrl.config.settings import ContextSettings
from gleanrl.environments.agent.endpoint import Endpoint
from gleanrl.learners.tiny import build_tokenizer
from gleanrl.protocols import Completion, Environment, ModelAddress, Observation, SamplingParams
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import IntArray, Message, Score, Task, Trajectory, segment_arrays

RENDERER = Renderer(build_tokenizer(["say left or right now please"] * 4, 256))
ANSWER = np.array(RENDERER.spoken("left"), np.int32)
NEXT = Message(role="user", content="right now please")


class Sampler:
    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[Sampler]:
        yield self

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        return Completion(ANSWER, np.full(ANSWER.size, -0.5, np.float32), 0, "stop")


class InProcess(Environment):
    def __init__(self, words: int, calls: int) -> None:
        self.first, self.left = Message(role="user", content="left " * words), calls

    async def reset(self) -> Observation:
        return Observation((self.first,))

    async def step(self, message: Message) -> Observation:
        self.left -= 1
        return Observation((NEXT,)) if self.left else Observation((), done=True, score=Score(1.0))


class Client(InProcess):
    """An agent in this process, which calls the endpoint over HTTP."""

    def __init__(self, words: int, calls: int, http: aiohttp.ClientSession, seconds: list[float]) -> None:
        super().__init__(words, calls)
        self.http, self.seconds = http, seconds

    async def reset(self) -> Observation:
        return Observation((), agent=True)

    async def run(self, model: ModelAddress) -> Observation:
        messages: list[Any] = [self.first]
        headers = {"Authorization": f"Bearer {model.key}"}
        for _ in range(self.left):
            started = time.perf_counter()
            body = {"messages": messages}
            async with self.http.post(f"{model.url}/v1/chat/completions", json=body, headers=headers) as response:
                messages += [(await response.json())["choices"][0]["message"], NEXT]
            self.seconds.append(time.perf_counter() - started)
        return Observation((), done=True, score=Score(1.0))


def tokens(trajectory: Trajectory) -> list[list[int]]:
    assert trajectory.score.value == 1.0, trajectory.score
    return [part.tolist() for segment in trajectory.segments for part in segment_arrays(segment)]


async def main(args: argparse.Namespace) -> None:
    endpoint, seconds = Endpoint(), []
    context = ContextSettings(max_turns=64)
    connector = aiohttp.TCPConnector(limit=0)

    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as http:

        async def play(words: int, calls: int, over_http: bool) -> Trajectory:
            made = Client(words, calls, http, seconds) if over_http else InProcess(words, calls)
            player = Player(lambda _: made, Sampler(), RENDERER, context, 1.0, 100_000, endpoint=endpoint.open)
            return await player.play(Task("0"), trajectory_id="0", seed=1)

        heads = ["prompt words", "calls", "tokens"]
        heads += [f"{way}, us a {unit}" for unit in ("call", "token") for way in ("in process", "endpoint")]
        print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
        for words in args.prompt:
            for calls in args.calls:
                played = tokens(await play(words, calls, True))
                assert played == tokens(await play(words, calls, False))
                size, shown = len(played[0]), []
                for over_http in (False, True):
                    runs = []
                    for _ in range(args.repeats):
                        started = time.perf_counter()
                        for _ in range(20):
                            await play(words, calls, over_http)
                        runs.append((time.perf_counter() - started) / 20 * 1e6)
                    shown.append(statistics.median(runs))
                cells = [f"{us / calls:.0f}" for us in shown] + [f"{us / size:.2f}" for us in shown]
                print(f"| {words} | {calls} | {size} | {' | '.join(cells)} |", flush=True)
        seconds.clear()
        started = time.perf_counter()
        await asyncio.gather(*(play(10, 5, True) for _ in range(args.episodes)))
        wall = time.perf_counter() - started
        p50, p99 = np.percentile(seconds, [50, 99])
        print(f"{args.episodes} episodes at once: {len(seconds) / wall:.0f} calls/s, p50 {p50:.2f} s, p99 {p99:.2f} s")
    await endpoint.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="+", default=[5, 30])
    parser.add_argument("--prompt", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--episodes", type=int, default=1000)
    asyncio.run(main(parser.parse_args()))
