"""TextArena: a hundred games in text, for one player, against an opponent, or among many."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import pydantic
from pydantic import Field

from gleanrl.environments.adapters.textarena_agents import Agent, RandomAgent, check_agent, make_agent
from gleanrl.environments.adapters.textarena_experts import EXPERTS
from gleanrl.environments.adapters.textarena_games import Game, players_of
from gleanrl.environments.splits import fingerprint, named, select
from gleanrl.protocols import Environment, Observation, Split
from gleanrl.rollout.thinking import answer_of
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert
from gleanrl.utils.importing import load_object
from gleanrl.utils.seeding import derive

_OTHERS_IN_A_ROW = 1000  # moves of opponents between two of the model's; a game that is stuck makes more
_MAX_DEMONSTRATION = 300  # moves


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class TextarenaTaskset:
    """Games of TextArena, each by its seed; with several ids they take turns.

    The model has one seat and the opponent all others. A move that the game refuses is answered as TextArena does: it
    may be made again once, and the next refusal ends the game or the player's part in it. The score is the reward at
    the end, moved from TextArena's [-1, 1] to ``reward_range``; ``parts`` has the reward as it was, ``won``,
    ``invalid_moves`` and the model's ``moves``.

    A game's seed decides the split that it is in, whatever the options are; opponent, seat, observation and rewards are
    part of a task's id where they are not the usual ones. Games that draw little from their seed (20 numbers to guess,
    one empty board) look alike in all splits; then evaluation measures how well the game is played, not what is new.

    Args:
        env_id: `GuessTheNumber-v0`, or several. ``-train`` and ``-raw`` matter for ``observation = "textarena"`` only.
        arguments: of the game, e.g. ``{"max_number": 50}``.
        players: None = the fewest that the game takes.
        seat: of the model; ``task``: drawn for each task.
        opponent: ``random``, ``expert`` (of the games that have one), a list of moves, ``openai``, or an import path of
            an agent (`Agent`).
        opponent_options: of that agent; ``env:NAME`` takes a key from the environment.
        observation: ``news``: what was said since the model's last move. ``textarena``: what TextArena's wrappers of
            that id show, mostly the whole game each time.
        reward_range: what a loss and a win are worth.
        unfinished: reward, before it is moved, of a game that the run's turn limit ends; None = 0 in games for one
            player, else -1, so that nobody gains by stalling.
        expert: import path of ``fn(game, seat) -> move`` for demonstrations; None = the one that comes with Glean RL.
    """

    env_id: str | list[str]
    arguments: dict[str, Any] = Field(default_factory=dict)
    players: int | None = Field(default=None, ge=1, le=15)
    seat: int | Literal["task"] = "task"
    opponent: str | list[str] = "random"
    opponent_options: dict[str, Any] = Field(default_factory=dict)
    observation: Literal["news", "textarena"] = "news"
    reward_range: tuple[float, float] = (-1.0, 1.0)
    unfinished: float | None = None
    expert: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_agent(self.opponent, self.opponent_options)
        if not self._ids:
            raise ValueError("env_id = []: name a game")
        for env_id in self._ids:
            players = self._players(env_id)
            if isinstance(self.seat, int) and not 0 <= self.seat < players:
                raise ValueError(f"seat = {self.seat}: {env_id} has seats 0 to {players - 1}")

    @property
    def phrases(self) -> tuple[str, ...]:
        """What games say of a wrong move, which no demonstration shows."""
        rest = "Please resubmit a valid move and remember to follow the game rules to avoid penalties."
        return (f"You attempted an invalid move. Reason: {rest}", "Player 0 attempted an invalid move.")

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        chosen = select(self._candidates(), split, count, f"textarena {self.env_id!r}")
        return [self._task(mark, *candidate) for mark, candidate in chosen]

    def environment(self, task: Task) -> Environment:
        return _Episode(task, self)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """The expert's game against the taskset's opponent."""
        with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop, and an opponent may need one
            return thread.submit(asyncio.run, self._demonstrated(task, seed, noise)).result()

    @property
    def _ids(self) -> list[str]:
        return [self.env_id] if isinstance(self.env_id, str) else self.env_id

    def _players(self, env_id: str) -> int:
        return players_of(env_id, self.arguments) if self.players is None else self.players

    def _candidates(self) -> Iterator[tuple[str, tuple[str, int]]]:
        arguments = json.dumps([self.arguments, self.players], sort_keys=True)
        number = 0
        while True:
            env_id = self._ids[number % len(self._ids)]
            seed = derive(self.seed, "textarena", env_id, number) % 2**31
            yield fingerprint("textarena", env_id, arguments, str(seed)), (env_id, seed)
            number += 1

    def _task(self, mark: str, env_id: str, seed: int) -> Task:
        players = self._players(env_id)
        drawn = derive(seed, "seat") % players
        seat = drawn if self.seat == "task" else self.seat
        payload = {"env_id": env_id, "arguments": self.arguments, "players": players, "seed": seed, "seat": seat}
        unusual: dict[str, Any] = {}
        if players > 1 and (self.opponent, self.opponent_options) != ("random", {}):
            unusual |= {"opponent": self.opponent, "opponent_options": self.opponent_options}
        if self.observation != "news":
            unusual["observation"] = self.observation
        if self.reward_range != (-1.0, 1.0):
            unusual["reward_range"] = list(self.reward_range)
        if self.unfinished is not None:
            unusual["unfinished"] = self.unfinished
        kind = env_id if len(self._ids) > 1 else ""
        name = named(mark, unusual if seat == drawn else {**unusual, "seat": seat})
        return Task(f"{env_id}-{name[:16]}", payload=payload | unusual, kind=kind)

    async def _demonstrated(self, task: Task, seed: int, noise: float) -> tuple[tuple[Message, ...], Score]:
        draw = random.Random(seed)
        episode = _Episode(task, self)
        observation = await episode.reset()
        said = [*observation.messages]
        while not observation.done and len(said) < 2 * _MAX_DEMONSTRATION:
            move = self._expert_move(episode.game, task.payload["seat"], draw, noise)
            observation = await episode.step({"role": "assistant", "content": move})
            said += [{"role": "assistant", "content": move}, *observation.messages]
        await episode.close()
        if said and said[-1]["role"] == "user" and observation.done:
            said.pop()  # nobody answers the game's last word
        return tuple(said), observation.score or Score.failed("no score")

    def _expert_move(self, game: Game, seat: int, draw: random.Random, noise: float) -> str:
        known = EXPERTS.get(type(game.core).__name__)
        if self.expert is None and known is None:
            have = ", ".join(name.removesuffix("Env") for name in EXPERTS)
            raise NoExpert(
                f"textarena {game.env_id!r} has no expert ({have} have one): name one in environment.options.expert, "
                "or set warm_start.enabled = false and model.init to a model that knows the game"
            )
        if draw.random() < noise:
            return draw.choice(known.moves(game.core, seat)) if known else RandomAgent(draw.getrandbits(32))(game.last)
        return load_object(self.expert)(game.core, seat) if self.expert else known.best(game.core, seat)  # type: ignore


class _Episode:
    """One game from the model's seat."""

    def __init__(self, task: Task, taskset: TextarenaTaskset) -> None:
        self._task, self._taskset = task, taskset
        self._seat: int = task.payload["seat"]
        self._agents: dict[int, Agent] = {}
        self._moves = 0
        self._game: Game | None = None

    @property
    def game(self) -> Game:
        if self._game is None:
            raise RuntimeError(f"task {self._task.id!r}: no step before reset or after the end")
        return self._game

    async def reset(self) -> Observation:
        facts = self._task.payload
        self._game = Game(facts["env_id"], facts["arguments"], facts["players"], facts["seed"])
        return await self._until_it_is_our_turn()

    async def step(self, message: Message) -> Observation:
        if self.game.done:
            raise RuntimeError(f"task {self._task.id!r}: no step after the end")
        self._moves += 1
        self.game.move(answer_of(message["content"]).strip())
        return await self._until_it_is_our_turn()

    async def close(self) -> None:
        self._game = None
        agents, self._agents = self._agents, {}
        for agent in agents.values():
            if (close := getattr(agent, "aclose", None)) is not None:
                await close()

    async def _until_it_is_our_turn(self) -> Observation:
        game = self.game
        for _ in range(_OTHERS_IN_A_ROW):
            if game.done:
                score = self._scored(game.result(self._seat))
                return Observation(_user(score.explanation or "The game is over."), done=True, score=score)
            if game.player == self._seat:
                seen = game.whole() if self._taskset.observation == "textarena" else game.news()
                return Observation(_user(seen or "It is your turn."), score=self._scored(Score(self._unfinished())))
            agent = self._agent(game.player)
            said = agent(game.whole())
            game.move(str(await said if inspect.isawaitable(said) else said))
        raise RuntimeError(f"{game.env_id}: opponents have made {_OTHERS_IN_A_ROW} moves in a row")

    def _agent(self, seat: int) -> Agent:
        if seat not in self._agents:
            seed = derive(self._task.payload["seed"], "opponent", seat)
            opponent, options = self._taskset.opponent, self._taskset.opponent_options
            self._agents[seat] = make_agent(opponent, options, seed, self.game.core, seat)
        return self._agents[seat]

    def _unfinished(self) -> float:
        if self._taskset.unfinished is not None:
            return self._taskset.unfinished
        return 0.0 if self._task.payload["players"] == 1 else -1.0

    def _scored(self, score: Score) -> Score:
        if not score.valid:
            return score
        low, high = self._taskset.reward_range
        counts = {"reward": score.value, "moves": self._moves, "invalid_moves": self.game.invalid_moves[self._seat]}
        parts = {"won": 0.0, **score.parts, **{name: float(value) for name, value in counts.items()}}
        return replace(score, value=low + (score.value + 1.0) / 2.0 * (high - low), parts=parts)


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)
