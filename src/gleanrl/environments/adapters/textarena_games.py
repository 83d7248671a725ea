"""One game of TextArena: made without downloads, with randomness of its own, and read the same whatever its kind.

TextArena's games draw from Python's one global generator. Here each game has its own, put in place while the game
computes; so many games may go on in a process, each as its seed says, and nobody else's draws change.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any

import numpy as np

from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import nearest

MOST_PLAYERS = 15
_RESOURCE = re.compile(r"Resource\s+(?:\x1b\[\d+m|['\"])?([\w.]+)")
_VARIANT = re.compile(r"-(raw|train)$")


class Game:
    """A game under way. ``player`` is whose turn it is.

    Raises:
        UserError: TextArena has no such game, or it cannot be had here.
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
        """What the player has not seen yet, without their own words."""
        return self._seen(self.core)

    def whole(self) -> str:
        """What TextArena's own wrappers show the player: mostly all that was said since the beginning."""
        return self._seen(self._game)

    def _seen(self, shown_by: Any) -> str:
        me = self.player
        with self._apart():
            _, seen = shown_by.get_observation()
        if not isinstance(seen, str):  # a wrapper writes a text, and so do a few games
            roles = self.core.state.role_mapping
            lines = []
            for sender, text, kind in seen or ():
                if not isinstance(sender, int):  # some games give sender, text and kind in another order
                    sender, text = -1, next((one for one in (sender, text, kind) if isinstance(one, str)), "")
                if sender != me or getattr(kind, "name", "") != "PLAYER_ACTION":
                    lines.append(text if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}")
            seen = "\n".join(lines)
        self.last = seen.strip()
        return self.last

    def move(self, text: str) -> None:
        """The player's move; one that the game refuses is answered in what the player sees next."""
        player, state = self.player, self.core.state
        before = getattr(state, "error_count", 0)
        with self._apart():
            self.done, _ = self._game.step(text)
        refused = getattr(state, "error_count", 0) > before or self._told(player).get("invalid_move") is True
        self.invalid_moves[player] = self.invalid_moves.get(player, 0) + bool(refused)

    def result(self, player: int) -> Score:
        """Of a game that is over: the player's reward as TextArena gives it; invalid where that is no number."""
        rewards = self.core.state.rewards or {}
        reward = _number(rewards.get(player), str(self._told(player).get("reason", "")))
        if reward is None:
            return Score.failed(f"{self.env_id} ended without a reward for player {player}: {rewards!r}")
        others = [value for other, value in rewards.items() if other != player and isinstance(value, int | float)]
        won = reward > max(others) if others else reward >= 1.0
        return Score(reward, parts={"won": float(won)}, explanation=self._told(player).get("reason"))

    def _told(self, player: int) -> Mapping[str, Any]:
        return (getattr(self.core.state, "game_info", None) or {}).get(player, {})

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # some print what they do
                yield
        finally:
            self._generators = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


def _number(reward: Any, reason: str) -> float | None:
    """Some games mistake the order of reward and reason where they end by an invalid move."""
    if isinstance(reward, str):
        swapped = reason.removeprefix("Invalid Move: ")
        try:
            return float(swapped)
        except ValueError:
            return None
    return float(reward) if isinstance(reward, int | float) else None


def make(env_id: str, arguments: Mapping[str, Any]) -> Any:
    """TextArena's environment with its own wrappers, not begun. Raises `UserError` where it cannot be had."""
    import textarena

    known = registry()
    if env_id not in known:
        hint = nearest(env_id, known) or "; `python -m gleanrl.environments.adapters.textarena_list` lists them"
        raise UserError(f"environment.options.env_id: TextArena has no game {env_id!r}{hint}")
    try:
        with _no_downloads():
            return textarena.make(env_id, **arguments)
    except LookupError as error:
        found = _RESOURCE.search(str(error))
        if found is None:
            raise UserError(f"TextArena cannot make {env_id}: {_first_line(error)}") from error
        name = found.group(1)
        raise UserError(f"TextArena's {env_id} needs NLTK's {name!r}: python -m nltk.downloader {name}") from None
    except SyntaxError as error:
        place = f"{error.msg}, line {error.lineno}"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UserError(f"TextArena's {env_id} does not compile under Python {version} ({place})") from None
    except (ImportError, FileNotFoundError) as error:
        raise UserError(f"TextArena {_version()} lacks what {env_id} needs: {_first_line(error)}") from None
    except TypeError as error:
        raise UserError(f"environment.options.arguments: {env_id} refuses {dict(arguments)}: {error}") from None
    except Exception as error:
        raise UserError(f"TextArena cannot make {env_id}: {_first_line(error)}") from None


def players_of(env_id: str, arguments: Mapping[str, Any]) -> int:
    """The fewest players that the game takes. Raises `UserError` where it cannot be had."""
    return _players(env_id, json.dumps(arguments, sort_keys=True))


@lru_cache(maxsize=1024)
def _players(env_id: str, arguments: str) -> int:
    why = ""
    for count in range(1, MOST_PLAYERS + 1):
        try:
            game = Game(env_id, json.loads(arguments), count, seed=0)
        except UserError:
            raise
        except Exception as error:  # an assertion, mostly
            why = why or _first_line(error)
            continue
        return game.core.state.num_players  # some take any number and play with their own
    raise UserError(f"TextArena's {env_id} begins with no number of players: {why}")


def registry() -> Mapping[str, Any]:
    """What TextArena has registered, by its id."""
    import textarena.envs.registration

    return textarena.envs.registration.ENV_REGISTRY


def plain_ids() -> list[str]:
    """The games, without the variants that only differ in what they show."""
    return [env_id for env_id in registry() if not _VARIANT.search(env_id)]


@contextlib.contextmanager
def _no_downloads() -> Iterator[None]:
    """Games ask NLTK to download what they need, each time that they are made."""
    import nltk

    before = nltk.download
    nltk.download = lambda *_, **__: False
    try:
        yield
    finally:
        nltk.download = before


def _version() -> str:
    return metadata.version("textarena")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
