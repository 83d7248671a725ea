"""Plays TextArena's games: about a hundred text games for one player, two players or more.

`TextarenaTaskset` is the environment ``textarena`` of the settings. It plays each episode with a `Game`. A seat is the
position of one player in a game, numbered from 0 (TextArena's player id). The model has one seat, and `make_agent`
makes the agents that play the other seats. Experts are in `textarena_experts`.

TextArena's games draw from the global random generators of Python and NumPy. `Game` stores the state of both generators
for each game, sets the global generators to this state whenever it calls TextArena, and restores them afterwards. So
many games can be played at the same time in one process: each game depends only on its own seed, and the global
generators are unchanged for the rest of the program.
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
"""An agent that plays one seat (one player of a game), in TextArena's form: a callable.

It is called with the player's observation and returns a move. It may be async. If it has a method ``aclose()``, this is
called at the end of the episode."""

# If the opponents make this many moves in a row, the game is considered stuck and the episode fails.
_MAX_OPPONENT_MOVES = 1000
_MAX_DEMONSTRATION = 300  # number of the expert's moves after which a demonstration is cut off
_RESOURCE = re.compile(r"Resource\s+(?:\x1b\[\d+m|['\"])?([\w.]+)")
_LISTED = re.compile(r"(?:available|valid|legal|possible|allowed)[ \w]*:(.*?)(?:\n\s*\n|\Z)", re.IGNORECASE | re.DOTALL)
_MOVE = re.compile(r"\[(?!GAME\]|Player\b)[^\[\]\n]{1,40}\]")
_OPPONENT = "environment.options.opponent"


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class TextarenaTaskset(Taskset):
    """Makes tasks from one or several TextArena games. Each task is a game with another seed.

    The model plays one seat (one player of the game), and agents of the type ``opponent`` play all other seats. By
    default, TextArena lets a player whose move is invalid try once more. After a second invalid move in a row it ends
    the game or eliminates the player.

    The score is the model's reward at the end of the game, mapped linearly from TextArena's range [-1, 1] to
    ``reward_range``. Its ``parts`` are ``reward`` (not mapped), ``won`` (1 or 0), ``moves`` (the number of the model's
    moves) and ``invalid_moves`` (the number of those that the game refused).

    Only the game (id, arguments and number of players) and the task's seed decide the task's split. The other options
    are part of the task's id if they differ from the defaults. Some games draw little from their seed: for example, a
    number from 1 to 20, or nothing if the board is empty at the start. All splits of such a game are alike, so its
    evaluation measures how well the model plays the game and not how well it generalises.
    """

    env_id: str | list[str]
    """Id of a game, such as `GuessTheNumber-v0`, or a list of ids whose games alternate. The variants ``-train`` and
    ``-raw`` of an id have other wrappers, so they differ only if ``observation`` is "textarena"."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the game, e.g. ``{"max_number": 50}``."""
    players: int | None = Field(default=None, ge=1, le=15)
    """Number of players; None = the smallest number that the game allows."""
    seat: int | Literal["task"] = "task"
    """The model's seat, from 0; "task" = drawn at random for each task."""
    opponent: str | list[str] = "random"
    """"random" (random moves), "expert" (for games that have one), "openai" (a model behind an OpenAI-compatible
    endpoint), a list of moves, or the import path of an agent; see `make_agent`."""
    opponent_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the agent. A value ``"env:NAME"`` stands for the content of the environment variable NAME,
    so that the configuration contains no API keys."""
    observation: Literal["news", "textarena"] = "news"
    """"news" = all messages of the game since the model's last move. "textarena" = the observation that TextArena's
    wrappers of the id make, which usually shows the whole game each time."""
    reward_range: tuple[float, float] = (-1.0, 1.0)
    """The score of a loss, and the score of a win."""
    unfinished: float | None = None
    """Reward in [-1, 1] of a game that the run's limit of turns ends. None = 0 in games for one player, and -1 in other
    games, so that the model gains nothing by stalling."""
    expert: str | None = None
    """Import path of a function ``fn(game, seat) -> move`` that plays demonstrations; ``game`` is TextArena's
    environment without wrappers. None = the expert in `textarena_experts`."""
    seed: int = 0
    """Seed from which the games' seeds are drawn."""

    has_expert = True
    phrases = (  # texts that TextArena sends to the players after an invalid move
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
        """Let the expert play the model's seat against the taskset's opponent; see `Taskset.demonstrate`."""
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
    """One episode: a game in which the model has one seat and agents play the other seats."""

    game: Game  # exists only after `reset`, which makes the game

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
            if aclose := getattr(agent, "aclose", None):
                await aclose()

    async def _play_opponents(self) -> Observation:
        """Let the agents of the other seats move until it is the model's turn or the game is over.

        Returns the model's observation with its present score, which is ``unfinished`` until the game is over.
        """
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
    """One TextArena game that has been reset and can be played, with the same interface for every kind of game.

    ``player`` is the seat whose turn it is. ``core`` is TextArena's environment without wrappers. ``last`` is the text
    that `news` or `whole` returned last. ``invalid_moves`` counts the refused moves of each seat.

    Raises:
        UserError: TextArena has no such game, or the game cannot be created on this machine, for example because it
            needs data that are not installed. Nothing is downloaded.
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
        """Return the game's messages that the player whose turn it is has not seen yet, without its own moves."""
        return self._read_observation(self.core)

    def whole(self) -> str:
        """Return the observation that TextArena's wrappers make for the player whose turn it is.

        The observation usually contains everything since the beginning of the game.
        """
        return self._read_observation(self._wrapped)

    def _read_observation(self, env: Any) -> str:
        player = self.player
        with self._own_generators():
            _, seen = env.get_observation()
        if not isinstance(seen, str):  # most games return a list of messages; wrappers and a few games return a text
            roles = self.core.state.role_mapping
            lines = []
            for sender, text, kind in seen or ():
                if not isinstance(sender, int):  # some games have sender, text and kind in another order
                    sender, text = -1, next((one for one in (sender, text, kind) if isinstance(one, str)), "")
                if sender != player or getattr(kind, "name", "") != "PLAYER_ACTION":
                    lines.append(text if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}")
            seen = "\n".join(lines)
        self.last = seen.strip()
        return self.last

    def move(self, text: str) -> None:
        """Make a move of the player whose turn it is.

        If the game refuses the move, `invalid_moves` counts it, and the player's next observation contains the reason.
        """
        player, state = self.player, self.core.state
        errors = getattr(state, "error_count", 0)
        with self._own_generators():
            self.done, _ = self._wrapped.step(text)
        if getattr(state, "error_count", 0) > errors or self._info(player).get("invalid_move") is True:
            self.invalid_moves[player] = self.invalid_moves.get(player, 0) + 1

    def result(self, player: int) -> Score:
        """Return the player's reward at the end of the game as a score in TextArena's own range, [-1, 1].

        The score is invalid if TextArena gives no number as the reward.
        """
        rewards, reason = self.core.state.rewards or {}, self._info(player).get("reason")
        reward = rewards.get(player)
        if isinstance(reward, str):  # some games swap the reward and the reason when an invalid move ends the game
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
        """Set the global random generators to the game's own state within the block, and discard printed text."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            self._generators = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


def _make_env(env_id: str, arguments: Mapping[str, Any]) -> Any:
    """Make TextArena's environment, with the wrappers of the id, and return it before its reset.

    Raises:
        UserError: there is no such game, or it cannot be made.
    """
    import nltk
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if env_id not in ENV_REGISTRY:
        hint = nearest(env_id, ENV_REGISTRY) or "; textarena.envs.registration.ENV_REGISTRY lists its games"
        raise UserError(f"environment.options.env_id: TextArena has no game {env_id!r}{hint}")
    download = nltk.download
    # Some games call `nltk.download` each time they are made, which needs a network. Without it, they raise LookupError
    # if the data are not installed.
    nltk.download = lambda *_, **__: False
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
    """Return the smallest number of players with which the game starts.

    ``arguments`` are the game's arguments as JSON, because the cache needs an argument that can be hashed.

    Raises:
        UserError: the game cannot be created.
    """
    reason = ""
    for players in range(1, MAX_PLAYERS + 1):
        try:
            game = Game(env_id, json.loads(arguments), players, seed=0)
        except UserError:
            raise
        except Exception as error:  # usually an AssertionError about the number of players
            reason = reason or first_line(error)
        else:
            # Return the game's own number and not ``players``, because some games accept any number of players but then
            # play with another number.
            return game.core.state.num_players
    raise UserError(f"TextArena's {env_id} starts with no number of players from 1 to {MAX_PLAYERS}: {reason}")


# --- agents of the other seats ----------------------------------------------------------------------------------------
def make_agent(opponent: str | Sequence[str], options: Mapping[str, Any], seed: int, game: Any, seat: int) -> Agent:
    """Make the agent that plays one seat of ``game``, which is TextArena's environment without wrappers.

    ``opponent`` is "random", "expert", "openai", a list of moves that the agent repeats in order, or the import path of
    a class or function. A class is called with the options, and with ``seed`` if it has a parameter of this name. It
    must return an `Agent`. A function is called for each move, with the player's observation and the options.

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
    """Check that the opponent exists and that it takes the options, without making an agent.

    Whether a game has an expert is checked only by `make_agent`.

    Raises:
        UserError: the opponent is unknown, or an option is unknown, missing or contains an API key.
    """
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
    """Draw a random move for a game whose legal moves are not known.

    The move is drawn from the last list of moves in the observation ``seen``. If there is no such list, it is drawn
    from all texts in brackets, which are usually examples of moves. If there are none, the move is ``[pass]``.
    """
    listed = _LISTED.findall(seen)
    moves = (_MOVE.findall(listed[-1]) if listed else []) or _MOVE.findall(seen)
    return rng.choice(moves) if moves else "[pass]"


class _OpenAI:
    """An agent that requests its moves from a model behind an OpenAI-compatible endpoint.

    Each request contains the player's whole observation as one user message. A request that fails with a transient
    error is sent again up to ``retries`` times. Then the error is raised, and the episode fails.
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
