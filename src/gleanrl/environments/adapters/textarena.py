"""TextArena: a hundred games in text, for one player, against an opponent, or among many.

`TextarenaTaskset` is the environment ``textarena`` of the settings. It uses `Game` (one game) and `make_agent` (the
agents of the other seats). Experts are in `textarena_experts`.

TextArena's games draw from the global random generators of Python and NumPy. Here, each game has generators of its own,
which replace the global ones while the game computes. So many games may be under way in a process: each depends only on
its own seed, and random draws outside the games do not change.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from itertools import count as count_from
from itertools import cycle
from typing import Any, Literal

import numpy as np
import pydantic
from pydantic import Field

from gleanrl.environments.adapters.demonstrations import play_expert
from gleanrl.environments.adapters.textarena_experts import EXPERT_GAMES, best_move, legal_moves
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
"""TextArena's convention for an agent: a function, sync or async, from what a player sees to a move. It may also have
``aclose()``."""

_MAX_OPPONENT_MOVES = 1000  # most moves between two moves of the model; a game with more counts as stuck
_MAX_DEMONSTRATION = 300  # most moves of a demonstration
_RESOURCE = re.compile(r"Resource\s+(?:\x1b\[\d+m|['\"])?([\w.]+)")
_LISTED = re.compile(r"(?:available|valid|legal|possible|allowed)[ \w]*:(.*?)(?:\n\s*\n|\Z)", re.IGNORECASE | re.DOTALL)
_MOVE = re.compile(r"\[(?!GAME\]|Player\b)[^\[\]\n]{1,40}\]")
_OPPONENT = "environment.options.opponent"


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class TextarenaTaskset(Taskset):
    """Makes tasks from games of TextArena, one for each seed. Several ids take turns.

    The model has one seat, and the opponent has all others. TextArena lets a player repeat a refused move once; the
    next refusal ends the game or the player's part in it. The score is the reward at the end, mapped from TextArena's
    [-1, 1] to ``reward_range``. Its ``parts`` are the original ``reward``, ``won``, and the model's ``invalid_moves``
    and ``moves``.

    A game's seed alone decides its split. Opponent, seat, observation and rewards are part of a task's id if they
    differ from the defaults. Games that draw little from their seed (20 numbers to guess, one empty board) are alike
    in all splits; evaluation then measures how well the game is played, not generalisation.

    Args:
        env_id: one id, such as `GuessTheNumber-v0`, or several. The variants ``-train`` and ``-raw`` differ only for
            ``observation = "textarena"``.
        arguments: arguments of the game, e.g. ``{"max_number": 50}``.
        players: number of players; None = the smallest number that the game allows.
        seat: the model's seat; ``task`` = drawn for each task.
        opponent: ``random``, ``expert`` (for games that have one), ``openai``, a list of moves, or the import path of
            an agent (see `make_agent`).
        opponent_options: arguments of that agent; ``env:NAME`` takes a key from the environment.
        observation: ``news`` = what was said since the model's last move. ``textarena`` = what TextArena's wrappers of
            that id show, usually the whole game each time.
        reward_range: scores of a loss and of a win.
        unfinished: reward in [-1, 1] of a game that is ended by the run's turn limit. None = 0 in games for one player,
            else -1, so that no player gains by stalling.
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
    phrases = (  # what the game answers to an invalid move
        "You attempted an invalid move. Reason: Please resubmit a valid move and remember to follow the game rules to "
        "avoid penalties.",
        "Player 0 attempted an invalid move.",
    )

    def __post_init__(self) -> None:
        check_agent(self.opponent, self.opponent_options)
        if not self.env_id:
            raise ValueError("env_id = []: name a game")
        for env_id in self._ids:
            players = self._players(env_id)
            if isinstance(self.seat, int) and not 0 <= self.seat < players:
                raise ValueError(f"seat = {self.seat}: {env_id} has seats 0 to {players - 1}")

    @property
    def _ids(self) -> list[str]:
        return [self.env_id] if isinstance(self.env_id, str) else self.env_id

    def _players(self, env_id: str) -> int:
        return self.players or smallest_number_of_players(env_id, json.dumps(self.arguments, sort_keys=True))

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        changes: dict[str, Any] = {}
        if self.observation != "news":
            changes["observation"] = self.observation
        if self.reward_range != (-1.0, 1.0):
            changes["reward_range"] = list(self.reward_range)
        if self.unfinished is not None:
            changes["unfinished"] = self.unfinished
        opponent: dict[str, Any] = {}
        if (self.opponent, self.opponent_options) != ("random", {}):
            opponent = {"opponent": self.opponent, "opponent_options": self.opponent_options}
        tasks = []
        for mark, (env_id, seed) in select(self._candidates(), split, count, f"textarena {self.env_id!r}"):
            players = self._players(env_id)
            drawn = derive(seed, "seat") % players
            seat = drawn if self.seat == "task" else self.seat
            own = {**opponent, **changes} if players > 1 else changes
            name = named(mark, own if seat == drawn else {**own, "seat": seat})
            payload = {"env_id": env_id, "arguments": self.arguments, "players": players, "seed": seed, "seat": seat}
            kind = env_id if len(self._ids) > 1 else ""
            tasks.append(Task(f"{env_id}-{name[:16]}", payload={**payload, **own}, kind=kind))
        return tasks

    def _candidates(self) -> Iterator[tuple[str, tuple[str, int]]]:
        arguments = json.dumps([self.arguments, self.players], sort_keys=True)
        for number in count_from():
            env_id = self._ids[number % len(self._ids)]
            seed = derive(self.seed, "textarena", env_id, number) % 2**31
            yield fingerprint("textarena", env_id, arguments, str(seed)), (env_id, seed)

    def environment(self, task: Task) -> Environment:
        return _Episode(task, self)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """Let the expert play against the taskset's opponent."""
        rng = random.Random(seed)
        episode = _Episode(task, self)

        def next_move() -> str:
            game, seat = episode.game, task.payload["seat"]
            known = type(game.core).__name__ in EXPERT_GAMES
            if self.expert is None and not known:
                have = ", ".join(name.removesuffix("Env") for name in EXPERT_GAMES)
                raise NoExpert(
                    f"textarena {game.env_id!r} has no expert ({have} have one): name one in "
                    "environment.options.expert, or set warm_start.enabled = false and model.init to a model that "
                    "knows the game"
                )
            if rng.random() < noise:
                if known:
                    return rng.choice(legal_moves(game.core))
                return choose_listed_move(game.last, random.Random(rng.getrandbits(32)))
            return best_move(game.core, seat) if self.expert is None else load_object(self.expert)(game.core, seat)

        return play_expert(episode, next_move, _MAX_DEMONSTRATION)


class _Episode(Environment):
    """One game, played from the model's seat."""

    game: Game  # set by `reset`

    def __init__(self, task: Task, taskset: TextarenaTaskset) -> None:
        self._task, self._taskset = task, taskset
        self._seat: int = task.payload["seat"]
        self._agents: dict[int, Agent] = {}
        self._moves = 0

    async def reset(self) -> Observation:
        facts = self._task.payload
        self.game = Game(facts["env_id"], facts["arguments"], facts["players"], facts["seed"])
        return await self._play_opponents()

    async def step(self, message: Message) -> Observation:
        if self.game.done:
            raise RuntimeError(f"task {self._task.id!r}: no step after the end")
        self._moves += 1
        self.game.move(answer_of(message["content"]).strip())
        return await self._play_opponents()

    async def close(self) -> None:
        agents, self._agents = self._agents, {}
        for agent in agents.values():
            if hasattr(agent, "aclose"):
                await agent.aclose()

    async def _play_opponents(self) -> Observation:
        """Let the other seats move until it is the model's turn or the game is over."""
        game, taskset = self.game, self._taskset
        for _ in range(_MAX_OPPONENT_MOVES):
            if game.done or game.player == self._seat:
                break
            seat = game.player
            if seat not in self._agents:
                seed = derive(self._task.payload["seed"], "opponent", seat)
                self._agents[seat] = make_agent(taskset.opponent, taskset.opponent_options, seed, game.core, seat)
            move = self._agents[seat](game.whole())
            game.move(str(await move if inspect.isawaitable(move) else move))
        else:
            raise RuntimeError(f"{game.env_id}: opponents have made {_MAX_OPPONENT_MOVES} moves in a row")
        if game.done:
            score = game.result(self._seat)
            text = score.explanation or "The game is over."
        else:
            text = (game.whole() if taskset.observation == "textarena" else game.news()) or "It is your turn."
            alone = self._task.payload["players"] == 1
            unfinished = taskset.unfinished if taskset.unfinished is not None else 0.0 if alone else -1.0
            score = Score(unfinished, parts={"won": 0.0})
        if score.valid:
            low, high = taskset.reward_range
            invalid = float(game.invalid_moves[self._seat])
            parts = {**score.parts, "reward": score.value, "moves": float(self._moves), "invalid_moves": invalid}
            score = replace(score, value=low + (score.value + 1.0) / 2.0 * (high - low), parts=parts)
        return Observation(({"role": "user", "content": text},), done=game.done, score=score)


# --- one game ---------------------------------------------------------------------------------------------------------
class Game:
    """One game, created without downloads. The interface is the same for every kind of game.

    ``player`` is the seat whose turn it is. ``core`` is TextArena's environment without wrappers.

    Raises:
        UserError: TextArena has no such game, or the game cannot be created on this machine.
    """

    def __init__(self, env_id: str, arguments: Mapping[str, Any], players: int, seed: int) -> None:
        self._generators: Any = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
        with self._own_generators():
            self._wrapped = _make_env(env_id, arguments)
            self._wrapped.reset(num_players=players, seed=seed)
        self.core = self._wrapped
        while hasattr(self.core, "env"):
            self.core = self.core.env
        self.env_id, self.done, self.last = env_id, False, ""
        self.invalid_moves = dict.fromkeys(range(players), 0)

    @property
    def player(self) -> int:
        return self.core.state.current_player_id

    def news(self) -> str:
        """Return what the player has not seen yet, without the player's own messages."""
        return self._read_observation(self.core)

    def whole(self) -> str:
        """Return what TextArena's own wrappers show the player, usually everything since the beginning."""
        return self._read_observation(self._wrapped)

    def _read_observation(self, env: Any) -> str:
        player = self.player
        with self._own_generators():
            _, seen = env.get_observation()
        if not isinstance(seen, str):  # wrappers and a few games return text
            roles = self.core.state.role_mapping
            lines = []
            for sender, text, kind in seen or ():
                if not isinstance(sender, int):  # some games put the three values in another order
                    sender, text = -1, next((one for one in (sender, text, kind) if isinstance(one, str)), "")
                if sender != player or getattr(kind, "name", "") != "PLAYER_ACTION":
                    lines.append(text if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}")
            seen = "\n".join(lines)
        self.last = seen.strip()
        return self.last

    def move(self, text: str) -> None:
        """Make the player's move. If the game refuses it, the player's next observation says so."""
        player, state = self.player, self.core.state
        errors = getattr(state, "error_count", 0)
        with self._own_generators():
            self.done, _ = self._wrapped.step(text)
        if getattr(state, "error_count", 0) > errors or self._info(player).get("invalid_move") is True:
            self.invalid_moves[player] = self.invalid_moves.get(player, 0) + 1

    def result(self, player: int) -> Score:
        """Return the player's reward after the end, in TextArena's own range; invalid if it is not a number."""
        rewards, reason = self.core.state.rewards or {}, self._info(player).get("reason")
        reward = rewards.get(player)
        if isinstance(reward, str):  # some games swap reward and reason when an invalid move ends them
            with contextlib.suppress(ValueError):
                reward = float(str(reason or "").removeprefix("Invalid Move: "))
        if not isinstance(reward, int | float):
            return Score.failed(f"{self.env_id} ended without a reward for player {player}: {rewards!r}")
        others = [value for other, value in rewards.items() if other != player and isinstance(value, int | float)]
        won = reward > max(others) if others else reward >= 1.0
        return Score(float(reward), parts={"won": float(won)}, explanation=reason)

    def _info(self, player: int) -> Mapping[str, Any]:
        return (getattr(self.core.state, "game_info", None) or {}).get(player, {})

    @contextlib.contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Put the game's generators in place of the global ones."""
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


def _make_env(env_id: str, arguments: Mapping[str, Any]) -> Any:
    """Make TextArena's environment with its own wrappers, before reset. Raises `UserError` if that fails."""
    import nltk
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if env_id not in ENV_REGISTRY:
        hint = nearest(env_id, ENV_REGISTRY) or "; textarena.envs.registration.ENV_REGISTRY lists its games"
        raise UserError(f"environment.options.env_id: TextArena has no game {env_id!r}{hint}")
    download = nltk.download
    nltk.download = lambda *_, **__: False  # games would download data each time they are created
    try:
        return textarena.make(env_id, **arguments)
    except LookupError as error:
        found = _RESOURCE.search(str(error))
        if found is None:
            raise UserError(f"TextArena cannot make {env_id}: {first_line(error)}") from error
        name = found.group(1)
        raise UserError(f"TextArena's {env_id} needs NLTK's {name!r}: python -m nltk.downloader {name}") from None
    except SyntaxError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        place = f"{error.msg}, line {error.lineno}"
        raise UserError(f"TextArena's {env_id} does not compile under Python {version} ({place})") from None
    except (ImportError, FileNotFoundError) as error:
        installed = f"TextArena {metadata.version('textarena')}"
        raise UserError(f"{installed} lacks what {env_id} needs: {first_line(error)}") from None
    except TypeError as error:
        raise UserError(f"environment.options.arguments: {env_id} refuses {dict(arguments)}: {error}") from None
    except Exception as error:
        raise UserError(f"TextArena cannot make {env_id}: {first_line(error)}") from None
    finally:
        nltk.download = download


@lru_cache(maxsize=1024)
def smallest_number_of_players(env_id: str, arguments: str) -> int:
    """Return the smallest number of players that the game allows; ``arguments`` is JSON.

    Raises:
        UserError: the game cannot be created.
    """
    reason = ""
    for players in range(1, MAX_PLAYERS + 1):
        try:
            game = Game(env_id, json.loads(arguments), players, seed=0)
        except UserError:
            raise
        except Exception as error:  # usually an assertion
            reason = reason or first_line(error)
        else:
            return game.core.state.num_players  # some games accept any number, but play with another one
    raise UserError(f"TextArena's {env_id} starts with no number of players from 1 to {MAX_PLAYERS}: {reason}")


# --- agents of the other seats ----------------------------------------------------------------------------------------
def make_agent(opponent: str | Sequence[str], options: Mapping[str, Any], seed: int, game: Any, seat: int) -> Agent:
    """Make an agent for one seat of ``game``, which is TextArena's own object.

    ``opponent``: ``random``, ``expert``, ``openai``, a list of messages that the agent repeats in order, or the import
    path of a class (called with the options, and with ``seed`` if it takes one) or of a function (called with what the
    player sees and the options).

    Raises:
        UserError: there is no such agent, or the game has no expert.
    """
    expert_game = type(game).__name__ in EXPERT_GAMES
    if opponent == "expert" and not expert_game:
        raise UserError(f"{_OPPONENT}: there is no expert of {type(game).__name__.removesuffix('Env')}")
    if not isinstance(opponent, str) or opponent in ("expert", "random"):
        rng = random.Random(seed)
        script = cycle(opponent)

        def play(seen: str) -> str:
            if not isinstance(opponent, str):
                return next(script)
            if opponent == "expert":
                return best_move(game, seat)
            return rng.choice(legal_moves(game)) if expert_game else choose_listed_move(seen, rng)

        return play
    given, _ = with_keys(options)
    if opponent == "openai":
        return _OpenAI(**given)
    found = load_object(opponent)
    if not isinstance(found, type):
        return lambda seen: found(seen, **given)
    if "seed" in inspect.signature(found).parameters:
        given = {"seed": seed, **given}
    return found(**given)


def check_agent(opponent: str | Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise `UserError` unless `make_agent` accepts the opponent and its options."""
    refuse_keys(options, f"{_OPPONENT}_options")
    takes: list[str] = []
    if not opponent:
        raise UserError(f"{_OPPONENT} = {opponent!r}: give the moves that it makes")
    if opponent == "openai":
        takes = list(inspect.signature(_OpenAI).parameters)
    elif isinstance(opponent, str) and opponent not in BUILT_IN_AGENTS:
        if ":" not in opponent:
            hint = nearest(opponent, BUILT_IN_AGENTS)
            hint = hint or "; there are random, expert and openai, or give `package.module:name`"
            raise UserError(f"{_OPPONENT}: no opponent {opponent!r}{hint}")
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


def choose_listed_move(seen: str, rng: random.Random) -> str:
    """Draw from the moves that the game lists, or else from the examples in brackets that it has shown."""
    listed = _LISTED.findall(seen)
    moves = (_MOVE.findall(listed[-1]) if listed else []) or _MOVE.findall(seen)
    return rng.choice(moves) if moves else "[pass]"


class _OpenAI:
    """An agent that asks a model behind an OpenAI-compatible endpoint. The model sees all that its player has seen.

    Transient errors are retried. If an error persists, the episode fails.
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
        if temperature is not None:
            self._body["temperature"] = temperature
        if max_tokens is not None:
            self._body["max_tokens"] = max_tokens

    async def __call__(self, seen: str) -> str:
        messages = [*self._opening, {"role": "user", "content": seen}]
        body = {**self._body, "messages": messages}
        answer = await self._retries.run(lambda: self._client.request("POST", "/chat/completions", body))
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise Fatal(f"{self._client.url}: no chat completion", cause="answer") from None
        return answer_of(text).strip()

    async def aclose(self) -> None:
        await self._client.aclose()
