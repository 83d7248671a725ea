"""TextArena: a hundred games in text, for one player, against an opponent, or among many.

`TextarenaTaskset` is the environment ``textarena`` of the settings. Below it are the parts that it uses: one game
(`Game`), and the agents that play the other seats (`make_agent`). Experts are in `textarena_experts`.

TextArena's games draw from Python's one global generator. Here each game has its own, which is put in place while the
game computes. So many games may be under way in a process, each as its seed says, and no other draw changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from typing import Any, Literal

import numpy as np
import pydantic
from pydantic import Field

from gleanrl.environments.adapters.textarena_experts import EXPERTS
from gleanrl.environments.splits import fingerprint, named, select
from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.rollout.thinking import answer_of
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.http import HttpClient
from gleanrl.utils.importing import load_object
from gleanrl.utils.retry import Fatal, RetryPolicy
from gleanrl.utils.secrets import refuse_keys, with_keys
from gleanrl.utils.seeding import derive
from gleanrl.utils.text import first_line, nearest

MAX_PLAYERS = 15
BUILT_IN_AGENTS = ("random", "expert", "openai")

Agent = Callable[[str], Any]
"""What TextArena calls an agent: maps what a player sees to what they say; sync or async."""

_MAX_OPPONENT_MOVES = 1000  # between two moves of the model; a game that makes more is stuck
_MAX_DEMONSTRATION = 300  # moves
_RESOURCE = re.compile(r"Resource\s+(?:\x1b\[\d+m|['\"])?([\w.]+)")
_LISTED = re.compile(r"(?:available|valid|legal|possible|allowed)[ \w]*:(.*?)(?:\n\s*\n|\Z)", re.IGNORECASE | re.DOTALL)
_MOVE = re.compile(r"\[(?!GAME\]|Player\b)[^\[\]\n]{1,40}\]")
_OPPONENT = "environment.options.opponent"


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class TextarenaTaskset(Taskset):
    """Games of TextArena, each by its seed; with several ids they take turns.

    The model has one seat and the opponent all others. TextArena lets a player repeat a refused move once; the next
    refusal ends the game or the player's part in it. The score is the reward at the end, mapped from TextArena's
    [-1, 1] to ``reward_range``. ``parts`` has the original ``reward``, ``won``, ``invalid_moves`` and ``moves`` (both
    of the model).

    A game's seed alone decides its split. Opponent, seat, observation and rewards are part of a task's id where they
    differ from the defaults. Games that draw little from their seed (20 numbers to guess, one empty board) look alike
    in all splits; then evaluation measures how well the game is played, not generalisation.

    Args:
        env_id: one id, such as `GuessTheNumber-v0`, or several. The variants ``-train`` and ``-raw`` differ only for
            ``observation = "textarena"``.
        arguments: of the game, e.g. ``{"max_number": 50}``.
        players: None = the smallest number that the game takes.
        seat: of the model; ``task`` = drawn for each task.
        opponent: ``random``, ``expert`` (for games that have one), ``openai``, a list of moves, or the import path of
            an agent (see `make_agent`).
        opponent_options: arguments of that agent; ``env:NAME`` takes a key from the environment.
        observation: ``news``: what was said since the model's last move. ``textarena``: what TextArena's wrappers of
            that id show, mostly the whole game each time.
        reward_range: what a loss and a win are worth.
        unfinished: reward, before it is moved, of a game that the run's turn limit ends; None = 0 in games for one
            player, else -1, so that no player gains by stalling.
        expert: import path of ``fn(game, seat) -> move`` for demonstrations; None = Glean RL's own expert.
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

    has_expert = True
    phrases = (  # of an invalid move
        "You attempted an invalid move. Reason: Please resubmit a valid move and remember to follow the game rules to "
        "avoid penalties.",
        "Player 0 attempted an invalid move.",
    )

    def __post_init__(self) -> None:
        check_agent(self.opponent, self.opponent_options)
        if not self._ids:
            raise ValueError("env_id = []: name a game")
        for env_id in self._ids:
            players = self._players(env_id)
            if isinstance(self.seat, int) and not 0 <= self.seat < players:
                raise ValueError(f"seat = {self.seat}: {env_id} has seats 0 to {players - 1}")

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        chosen = select(self._candidates(), split, count, f"textarena {self.env_id!r}")
        return [self._task(mark, *candidate) for mark, candidate in chosen]

    def environment(self, task: Task) -> Environment:
        return _Episode(task, self)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """The expert's game against the taskset's opponent."""
        with ThreadPoolExecutor(
            1
        ) as thread:  # an opponent may be async, and the caller may run on an event loop already
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
            said.pop()  # the game's last message has no answer
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


class _Episode(Environment):
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
            if hasattr(agent, "aclose"):
                await agent.aclose()

    async def _until_it_is_our_turn(self) -> Observation:
        game = self.game
        for _ in range(_MAX_OPPONENT_MOVES):
            if game.done:
                score = self._scored(game.result(self._seat))
                return Observation(_user(score.explanation or "The game is over."), done=True, score=score)
            if game.player == self._seat:
                seen = game.whole() if self._taskset.observation == "textarena" else game.news()
                return Observation(_user(seen or "It is your turn."), score=self._scored(Score(self._unfinished())))
            agent = self._agent(game.player)
            said = agent(game.whole())
            game.move(str(await said if inspect.isawaitable(said) else said))
        raise RuntimeError(f"{game.env_id}: opponents have made {_MAX_OPPONENT_MOVES} moves in a row")

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


# --- one game ---------------------------------------------------------------------------------------------------------
class Game:
    """One game, created without downloads; reads the same for every kind of game. ``player`` is whose turn it is.

    Raises:
        UserError: TextArena has no such game, or it cannot be created here.
    """

    def __init__(self, env_id: str, arguments: Mapping[str, Any], players: int, seed: int) -> None:
        self._generators: Any = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
        with self._apart():
            self._game = make(env_id, arguments)
            self._game.reset(num_players=players, seed=seed)
        self.core = self._game
        while hasattr(self.core, "env"):
            self.core = self.core.env
        self.env_id, self.done, self.last = env_id, False, ""
        self.invalid_moves = dict.fromkeys(range(players), 0)

    @property
    def player(self) -> int:
        return self.core.state.current_player_id

    def news(self) -> str:
        """What the player has not seen yet, except their own messages."""
        return self._seen(self.core)

    def whole(self) -> str:
        """What TextArena's own wrappers show the player: usually everything since the beginning."""
        return self._seen(self._game)

    def _seen(self, shown_by: Any) -> str:
        me = self.player
        with self._apart():
            _, seen = shown_by.get_observation()
        if not isinstance(seen, str):  # wrappers and a few games return text
            roles = self.core.state.role_mapping
            lines = []
            for sender, text, kind in seen or ():
                if not isinstance(sender, int):  # some games use another order of the three
                    sender, text = -1, next((one for one in (sender, text, kind) if isinstance(one, str)), "")
                if sender != me or getattr(kind, "name", "") != "PLAYER_ACTION":
                    lines.append(text if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}")
            seen = "\n".join(lines)
        self.last = seen.strip()
        return self.last

    def move(self, text: str) -> None:
        """Make the player's move. If the game refuses it, the player's next observation says so."""
        player, state = self.player, self.core.state
        before = getattr(state, "error_count", 0)
        with self._apart():
            self.done, _ = self._game.step(text)
        refused = getattr(state, "error_count", 0) > before or self._info(player).get("invalid_move") is True
        self.invalid_moves[player] = self.invalid_moves.get(player, 0) + bool(refused)

    def result(self, player: int) -> Score:
        """The player's reward after the end, in TextArena's own range; invalid if it is not a number."""
        rewards = self.core.state.rewards or {}
        reward = _number(rewards.get(player), str(self._info(player).get("reason", "")))
        if reward is None:
            return Score.failed(f"{self.env_id} ended without a reward for player {player}: {rewards!r}")
        others = [value for other, value in rewards.items() if other != player and isinstance(value, int | float)]
        won = reward > max(others) if others else reward >= 1.0
        return Score(reward, parts={"won": float(won)}, explanation=self._info(player).get("reason"))

    def _info(self, player: int) -> Mapping[str, Any]:
        return (getattr(self.core.state, "game_info", None) or {}).get(player, {})

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # some games print
                yield
        finally:
            self._generators = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


def _number(reward: Any, reason: str) -> float | None:
    """The reward as a number. Some games swap reward and reason when an invalid move ends them."""
    if isinstance(reward, str):
        swapped = reason.removeprefix("Invalid Move: ")
        try:
            return float(swapped)
        except ValueError:
            return None
    return float(reward) if isinstance(reward, int | float) else None


def make(env_id: str, arguments: Mapping[str, Any]) -> Any:
    """TextArena's environment with its own wrappers, before reset. Raises `UserError` if it cannot be created."""
    import textarena

    known = registry()
    if env_id not in known:
        hint = nearest(env_id, known) or "; textarena.envs.registration.ENV_REGISTRY lists its games"
        raise UserError(f"environment.options.env_id: TextArena has no game {env_id!r}{hint}")
    try:
        with _no_downloads():
            return textarena.make(env_id, **arguments)
    except LookupError as error:
        found = _RESOURCE.search(str(error))
        if found is None:
            raise UserError(f"TextArena cannot make {env_id}: {first_line(error)}") from error
        name = found.group(1)
        raise UserError(f"TextArena's {env_id} needs NLTK's {name!r}: python -m nltk.downloader {name}") from None
    except SyntaxError as error:
        place = f"{error.msg}, line {error.lineno}"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UserError(f"TextArena's {env_id} does not compile under Python {version} ({place})") from None
    except (ImportError, FileNotFoundError) as error:
        raise UserError(
            f"TextArena {metadata.version('textarena')} lacks what {env_id} needs: {first_line(error)}"
        ) from None
    except TypeError as error:
        raise UserError(f"environment.options.arguments: {env_id} refuses {dict(arguments)}: {error}") from None
    except Exception as error:
        raise UserError(f"TextArena cannot make {env_id}: {first_line(error)}") from None


def players_of(env_id: str, arguments: Mapping[str, Any]) -> int:
    """The smallest number of players that the game takes. Raises `UserError` if it cannot be created."""
    return _players(env_id, json.dumps(arguments, sort_keys=True))


@lru_cache(maxsize=1024)
def _players(env_id: str, arguments: str) -> int:
    why = ""
    for count in range(1, MAX_PLAYERS + 1):
        try:
            game = Game(env_id, json.loads(arguments), count, seed=0)
        except UserError:
            raise
        except Exception as error:  # usually an assertion
            why = why or first_line(error)
            continue
        return game.core.state.num_players  # some games accept any number and play with another
    raise UserError(f"TextArena's {env_id} starts with no number of players from 1 to {MAX_PLAYERS}: {why}")


def registry() -> Mapping[str, Any]:
    """TextArena's games by id."""
    import textarena.envs.registration

    return textarena.envs.registration.ENV_REGISTRY


@contextlib.contextmanager
def _no_downloads() -> Iterator[None]:
    """Disable NLTK's downloader, which games call each time they are created."""
    import nltk

    before = nltk.download
    nltk.download = lambda *_, **__: False
    try:
        yield
    finally:
        nltk.download = before


# --- agents of the other seats ----------------------------------------------------------------------------------------
def make_agent(opponent: str | Sequence[str], options: Mapping[str, Any], seed: int, game: Any, seat: int) -> Agent:
    """An agent for one seat of one game (TextArena's own object). An agent may have ``aclose()``.

    ``opponent``: ``random``, ``expert``, ``openai``, a list of messages that are repeated in turn, or the
    import path of a class (called with the options, and with ``seed`` if it takes one) or of a function (called with
    what the player sees and the options).

    Raises:
        UserError: there is no such agent, or the game has no expert.
    """
    if not isinstance(opponent, str):
        return _Scripted(list(opponent))
    known = EXPERTS.get(type(game).__name__)
    if opponent == "expert":
        if known is None:
            raise UserError(f"{_OPPONENT}: there is no expert of {type(game).__name__.removesuffix('Env')}")
        return lambda seen: known.best(game, seat)
    if opponent == "random":
        draw = random.Random(seed)
        return RandomAgent(seed) if known is None else lambda seen: draw.choice(known.moves(game, seat))
    given, _ = with_keys(options)
    if opponent == "openai":
        return _OpenAI(**given)
    found = load_object(opponent)
    if not isinstance(found, type):
        return lambda seen: found(seen, **given)
    takes = inspect.signature(found).parameters
    return found(**{**({"seed": seed} if "seed" in takes else {}), **given})


def check_agent(opponent: str | Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise `UserError` unless `make_agent` accepts the opponent and its options."""
    refuse_keys(options, f"{_OPPONENT}_options")
    if not isinstance(opponent, str):
        if not opponent:
            raise UserError(f"{_OPPONENT} = []: give the moves that it makes")
        takes: list[str] = []
    elif opponent in BUILT_IN_AGENTS:
        takes = list(inspect.signature(_OpenAI).parameters) if opponent == "openai" else []
    elif ":" not in opponent:
        hint = (
            nearest(opponent, BUILT_IN_AGENTS) or "; there are random, expert and openai, or give `package.module:name`"
        )
        raise UserError(f"{_OPPONENT}: no opponent {opponent!r}{hint}")
    else:
        found = load_object(opponent)
        if not callable(found):
            raise UserError(f"{_OPPONENT} = {opponent!r}: a {type(found).__name__}, which cannot be called for a move")
        parameters = inspect.signature(found).parameters
        takes = list(parameters)[0 if isinstance(found, type) else 1 :]
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            takes = [*takes, *options]
    for name in options:
        if name not in takes:
            raise UserError(f"{_OPPONENT}_options.{name}: {opponent!r} has no such option{nearest(name, takes)}")
    if opponent == "openai" and (missing := {"base_url", "model"} - set(options)):
        raise UserError(f"{_OPPONENT}_options.{min(missing)}: the opponent 'openai' needs it")


class RandomAgent:
    """Draws from the moves that the game lists, or else from the examples in brackets that it has shown."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, seen: str) -> str:
        listed = _LISTED.findall(seen)
        moves = _MOVE.findall(listed[-1]) if listed else []
        moves = moves or _MOVE.findall(seen)
        return self._random.choice(moves) if moves else "[pass]"


class _Scripted:
    def __init__(self, lines: Sequence[str]) -> None:
        self._lines, self._said = lines, 0

    def __call__(self, seen: str) -> str:
        line = self._lines[self._said % len(self._lines)]
        self._said += 1
        return line


class _OpenAI:
    """A model behind an OpenAI-compatible endpoint; it is shown all that its player has seen.

    Errors that may pass are retried; one that stays costs the episode.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        timeout_s: float = 60.0,
        retries: int = 4,
    ) -> None:
        setting = f"{_OPPONENT}_options.base_url"
        self._client = HttpClient(base_url, api_key_env=api_key_env, timeout_s=timeout_s, setting=setting)
        self._retries = RetryPolicy(attempts=retries + 1)
        self._opening = [{"role": "system", "content": system}] if system else []
        self._body: dict[str, Any] = {"model": model}
        self._body |= {} if temperature is None else {"temperature": temperature}
        self._body |= {} if max_tokens is None else {"max_tokens": max_tokens}

    async def __call__(self, seen: str) -> str:
        messages = [*self._opening, {"role": "user", "content": seen}]
        body = {**self._body, "messages": messages}
        answer = await self._retries.run(lambda: self._client.request("POST", "/chat/completions", body))
        try:
            said = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise Fatal(f"{self._client.url}: no chat completion", cause="answer") from None
        return answer_of(said).strip()

    async def aclose(self) -> None:
        await self._client.aclose()
