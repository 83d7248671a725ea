"""Who plays against the model in TextArena: random moves, a script, an agent of yours, a model behind an endpoint."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gleanrl.environments.adapters.textarena_experts import EXPERTS
from gleanrl.rollout.thinking import answer_of
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import HttpClient
from gleanrl.utils.importing import load_object
from gleanrl.utils.retry import Fatal, RetryPolicy
from gleanrl.utils.secrets import refuse_keys, with_keys
from gleanrl.utils.text import nearest

Opponent = str | Sequence[str]
Agent = Callable[[str], Any]
"""What TextArena calls an agent: from what a player sees to what they say; sync or async."""

BUILT_IN = ("random", "expert", "openai")
_LISTED = re.compile(r"(?:available|valid|legal|possible|allowed)[ \w]*:(.*?)(?:\n\s*\n|\Z)", re.IGNORECASE | re.DOTALL)
_MOVE = re.compile(r"\[(?!GAME\]|Player\b)[^\[\]\n]{1,40}\]")
_SETTING = "environment.options.opponent"


def make_agent(opponent: Opponent, options: Mapping[str, Any], seed: int, game: Any, seat: int) -> Agent:
    """An agent for one seat of one game (TextArena's own object); ``aclose()`` ends it, if it has that.

    ``opponent``: ``random``, ``expert``, ``openai``, a list of texts that are said in turn and then again, or an
    import path of a class (made with the options, and with ``seed`` if it takes that) or of a function (given them).

    Raises:
        UserError: there is no such agent, or it does not take the options.
    """
    if not isinstance(opponent, str):
        return _Scripted(list(opponent))
    known = EXPERTS.get(type(game).__name__)
    if opponent == "expert":
        if known is None:
            raise UserError(f"{_SETTING}: there is no expert of {type(game).__name__.removesuffix('Env')}")
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


def check_agent(opponent: Opponent, options: Mapping[str, Any]) -> None:
    """Raises `UserError` for what `make_agent` would not take."""
    refuse_keys(options, f"{_SETTING}_options")
    if not isinstance(opponent, str):
        if not opponent:
            raise UserError(f"{_SETTING} = []: give the moves that it makes")
        takes: list[str] = []
    elif opponent in BUILT_IN:
        takes = list(inspect.signature(_OpenAI).parameters) if opponent == "openai" else []
    elif ":" not in opponent:
        hint = nearest(opponent, BUILT_IN) or "; there are random, expert and openai, or give `package.module:name`"
        raise UserError(f"{_SETTING}: no opponent {opponent!r}{hint}")
    else:
        found = load_object(opponent)
        if not callable(found):
            raise UserError(f"{_SETTING} = {opponent!r}: a {type(found).__name__}, which nobody can ask for a move")
        parameters = inspect.signature(found).parameters
        takes = list(parameters)[0 if isinstance(found, type) else 1 :]
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            takes = [*takes, *options]
    for name in options:
        if name not in takes:
            raise UserError(f"{_SETTING}_options.{name}: {opponent!r} has no such option{nearest(name, takes)}")
    if opponent == "openai" and (missing := {"base_url", "model"} - set(options)):
        raise UserError(f"{_SETTING}_options.{min(missing)}: the opponent 'openai' needs it")


class RandomAgent:
    """Draws from the moves that the game lists, or else from the examples that it has shown in brackets."""

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
        setting = f"{_SETTING}_options.base_url"
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
