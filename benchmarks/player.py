"""Measures the CPU time that the player needs for a turn, with a sampler and an environment that answer at once.

    python benchmarks/player.py [--turns 5 30] [--games 24] [--repeats 5] [--against OTHER/src] [--profile]

The episodes are recorded from ALFWorld: generated households, each played by the 8 members of a group, by an expert
with 50 % random actions. Their turns are repeated until an episode has --turns of them. The tokenizer is trained on
these texts, as in the quickstart. With "as played" texts, the members of a group have the same opening and many
observations repeat ("Nothing happens."), so that caches help. With "all new" texts, each observation contains a unique
number, so that caches cannot help.

The result is microseconds of CPU time per turn, the start and end of episodes included, of the fastest of --repeats
processes. --against measures another source tree too, in alternating processes, and checks that both trees make the
same tokens of the episodes. --profile prints a profile instead, whose times include its own overhead.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import hashlib
import itertools
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.config.settings import ContextSettings
from gleanrl.learners.tiny import build_tokenizer
from gleanrl.protocols import Completion, Environment, Observation, SamplingParams
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import IntArray, Message, Score, Task, Trajectory

MEMBERS = 8
OWN = Path(__file__).resolve().parent.parent / "src"
Episode = list[str]  # observations and commands in turn, starting with an observation


@dataclass
class Instant(Environment):
    """The environment and the sampler of one episode. Both replay recorded observations and commands."""

    said: Sequence[str]
    answers: Sequence[IntArray]
    turn: int = 0
    version: int = 0
    observations: list[Observation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.observations = [Observation((Message(role="user", content=text),), score=Score(0.0)) for text in self.said]
        self.completions = [Completion(ids, np.full(ids.size, -0.5, np.float32), 0, "stop") for ids in self.answers]
        self.end = Observation((), done=True, score=Score(1.0))

    async def reset(self) -> Observation:
        return self.observations[0]

    async def step(self, message: Message) -> Observation:
        self.turn += 1
        return self.observations[self.turn] if self.turn < len(self.observations) else self.end

    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[Instant]:
        yield self

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        return self.completions[self.turn]


def households(games: int) -> list[list[Episode]]:
    """Record a group of episodes for each of ``games`` ALFWorld households."""
    from gleanrl.environments.alfworld import AlfworldTaskset

    taskset = AlfworldTaskset()
    groups = []
    for task in taskset.tasks("train", games):
        shown = [taskset.demonstrate(task, seed=member, noise=0.5)[0] for member in range(MEMBERS)]
        groups.append([[message["content"] for message in messages] for messages in shown])
    return groups


def cut(episode: Episode, turns: int, new: itertools.count[int] | None) -> tuple[list[str], list[str]]:
    """Return the observations and the commands of an episode with exactly ``turns`` turns.

    The first turn is that of ``episode``; its other turns follow and repeat. ``new``, if given, yields the numbers that
    make each observation unique.
    """
    pairs = list(zip(episode[::2], episode[1::2], strict=False))
    rest = itertools.cycle(pairs[1:] or pairs)
    chosen = [pairs[0], *itertools.islice(rest, turns - 1)]
    observed = [text if new is None else f"{text} {next(new)}" for text, _ in chosen]
    return observed, [command for _, command in chosen]


async def play(renderer: Renderer, episodes: Sequence[Instant], played: list[Trajectory]) -> None:
    """Play the episodes and append the trajectories to ``played``.

    They are not returned, because `asyncio.run` would format the returned value as text, which takes milliseconds.
    """
    task, settings = Task("benchmark"), ContextSettings(max_turns=1000, max_tokens_per_turn=64)
    for number, episode in enumerate(episodes):
        player: Any = Player(lambda task, e=episode: e, episode, renderer, settings, 1.0, 1_000_000)
        played.append(await player.play(task, trajectory_id=str(number), seed=number))


def measure(folder: Path, turns: int, new: bool, profile: bool = False) -> dict[str, Any]:
    """Play all episodes. Returns microseconds per turn, observed tokens per turn, and a digest of all tokens."""
    groups: list[list[Episode]] = json.loads((folder / "episodes.json").read_text())
    tokenizer = _tokenizer(folder)
    renderer = Renderer(tokenizer)
    said: dict[str, IntArray] = {}
    numbers = itertools.count(1) if new else None
    episodes = []
    for episode in itertools.chain.from_iterable(groups):
        observed, commands = cut(episode, turns, numbers)
        for command in commands:
            if command not in said:
                ids = tokenizer(command, add_special_tokens=False)["input_ids"]
                said[command] = np.array([*ids, renderer.end_of_turn], np.int32)
        episodes.append(Instant(observed, [said[command] for command in commands]))
    # imports modules and compiles the chat template, which shall not be measured
    asyncio.run(play(renderer, [Instant(["."], [said[commands[0]]])], []))
    gc.collect()
    profiler, played = cProfile.Profile(), list[Trajectory]()
    if profile:
        profiler.enable()
    before = time.process_time()
    asyncio.run(play(renderer, episodes, played))
    took = time.process_time() - before
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    digest, tokens = hashlib.sha256(), 0
    for trajectory in played:
        assert trajectory.info["turns"] == turns, trajectory.score
        for turn in trajectory.turns():
            digest.update(turn.tokens.tobytes() + bytes([turn.sampled]))
            tokens += 0 if turn.sampled else turn.tokens.size
    count = turns * len(episodes)
    return {"us": 1e6 * took / count, "observed": tokens / count, "digest": digest.hexdigest()}


@lru_cache
def _tokenizer(folder: Path) -> Any:
    groups: list[list[Episode]] = json.loads((folder / "episodes.json").read_text())
    return build_tokenizer([text for group in groups for episode in group for text in episode], 1024)


def in_process(tree: Path, folder: Path, turns: Sequence[int]) -> list[dict[str, Any]]:
    """Call `measure` for each number of turns and kind of texts, in a new process that imports ``tree``."""
    command = [sys.executable, __file__, "--worker", str(folder), "--turns", *map(str, turns)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[5, 30], help="of an episode")
    parser.add_argument("--games", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another source tree")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    arms = list(itertools.product(args.turns, (False, True)))
    if args.worker:
        print(json.dumps([measure(args.worker, turns, new) for turns, new in arms]))
        return
    trees = [OWN] if args.against is None else [args.against.resolve(), OWN]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "episodes.json").write_text(json.dumps(households(args.games)))
        if args.profile:
            for turns, new in arms:
                print(f"{turns} turns{', all new' * new}")
                measure(folder, turns, new, profile=True)
            return
        runs = [[in_process(tree, folder, args.turns) for tree in trees] for _ in range(args.repeats)]
    print(f"{'turns':>6} {'texts':<10}{'observed tokens per turn':>26}" + "".join(f"{_label(t):>12}" for t in trees))
    for arm, (turns, new) in enumerate(arms):
        found = [[run[tree][arm] for run in runs] for tree in range(len(trees))]
        if len({one["digest"] for side in found for one in side}) > 1:
            sys.exit("the trees made different tokens of the same episodes")
        costs = "".join(f"{min(one['us'] for one in side):>9.1f} µs" for side in found)
        kind = "all new" if new else "as played"
        print(f"{turns:>6} {kind:<10}{found[0][0]['observed']:>26.1f}{costs}")


def _label(tree: Path) -> str:
    return "this tree" if tree == OWN else "the other"


if __name__ == "__main__":
    main()
