"""`python -m gleanrl.environments.adapters.textarena_list`: which of TextArena's games can be played here, and why not.

Each game is played once by players who move at random, in a process that is given up where a game hangs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gleanrl.environments.adapters.textarena_agents import RandomAgent
from gleanrl.environments.adapters.textarena_games import plain_ids, players_of, registry
from gleanrl.environments.pool import EnvironmentFailure, EnvironmentPool, EnvironmentTimeout
from gleanrl.protocols import Environment, Observation, Split
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

MOVES = 40  # of the model's seat; a game that goes on for longer counts as played
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Played:
    """What became of a game."""

    env_id: str
    players: int  # the fewest; 0 where it cannot be had
    ended: bool
    why_not: str | None  # it cannot be played

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"{self.env_id:<32} no: {self.why_not}"
        return f"{self.env_id:<32} {self.players} player{'s' if self.players > 1 else ''}"


class Games:
    """A taskset of every game there is, each begun when it is played, so that one that cannot be had stops no other."""

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        return [Task(env_id) for env_id in plain_ids()[:count]]

    def environment(self, task: Task) -> Environment:
        return _Once(task.id)


class _Once:
    """A whole game in one reset."""

    def __init__(self, env_id: str) -> None:
        self._env_id = env_id

    async def reset(self) -> Observation:
        from gleanrl.environments.adapters.textarena import TextarenaTaskset

        taskset = TextarenaTaskset(env_id=self._env_id)
        task = taskset.tasks("train", 1)[0]
        agent = RandomAgent(derive(0, self._env_id))
        episode = taskset.environment(task)
        observation = await episode.reset()
        for _ in range(MOVES):
            if observation.done:
                break
            said = agent(observation.messages[-1]["content"])
            observation = await episode.step({"role": "assistant", "content": said})
        if observation.score is not None and not observation.score.valid:
            raise ValueError(observation.score.explanation)
        info = {"players": players_of(self._env_id, {}), "ended": observation.done}
        return Observation((), score=Score(0.0), info=info)

    async def step(self, message: Message) -> Observation:
        raise NotImplementedError

    async def close(self) -> None:
        pass


async def play(env_ids: Sequence[str], timeout_s: float = TIMEOUT_S) -> list[Played]:
    """Play each once."""
    found = []
    async with EnvironmentPool(Games(), workers=1, timeout_s=timeout_s) as pool:
        for env_id in env_ids:
            try:
                facts = (await pool.environment(Task(env_id)).reset()).info
                found.append(Played(env_id, facts["players"], facts["ended"], None))
            except EnvironmentTimeout:
                found.append(Played(env_id, 0, False, f"it hangs in a move (given up after {timeout_s:g} s)"))
            except (EnvironmentFailure, UserError) as error:
                found.append(Played(env_id, 0, False, str(error).partition("\n")[0]))
    return found


def one_of_each() -> list[str]:
    """An id of each game, of those that differ in size or difficulty only the first."""
    first: dict[str, str] = {}
    for env_id in plain_ids():
        first.setdefault(str(registry()[env_id].entry_point), env_id)
    return list(first.values())


if __name__ == "__main__":
    chosen = sys.argv[1:] or one_of_each()
    for played in asyncio.run(play(chosen)):
        print(played)
