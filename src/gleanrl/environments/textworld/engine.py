"""Plays compiled TextWorld games, and plays each command in each state at most once.

A game is deterministic, so its states form a tree of commands. The tree keeps the answer to each command and a snapshot
of the interpreter (about 1 kB). So episodes that begin with the same commands share these states, and a few
interpreters serve any number of episodes. Feedback, score and admissible commands equal those of TextWorld's own
environment; a test compares them command by command.
"""

from __future__ import annotations

import copy
import re
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

_INTERPRETERS = 32  # interpreters that stay loaded, one per game, 1.8 MB each
_STATES = 50_000  # limit on states in a process, about 4 kB each; the games played least recently are dropped first

_EVENT = re.compile(r"\[([^]]+)\]\n?")  # what `tw-trace-actions` prints, e.g. [going north - succeeded]
_TAG = re.compile(r"<(score|moves)>\n\s*(-?\d+).*?</\1>", re.DOTALL)  # what `tw-extra-infos score` prints
_STATUS_LINE = re.compile(r"\s*\n>[^\n]*\Z")
_END = re.compile(r"\*\*\* (The End|You lost!) \*\*\*")


@dataclass(slots=True, eq=False)
class State:
    """A point in a game: the answer to the last command, and whether that ended the game."""

    game: Game
    parent: State | None
    events: tuple[str, ...]  # events in the game's logic that led from the parent to this state
    text: str
    score: int
    won: bool
    over: bool
    snapshot: _Snapshot
    children: dict[str, State] = field(default_factory=dict)
    world: _World | None = None  # see `Game.world_of`

    def step(self, command: str) -> State:
        """Return the state after ``command``. The game is played only for the first call with a command."""
        if command not in self.children:
            self.children[command] = self.game.play(self, command)
        return self.children[command]

    def admissible(self) -> list[str]:
        """Return the commands that have an effect in this state, sorted."""
        return self.game.world_of(self).commands

    def policy(self) -> list[str]:
        """Return commands that win the game from this state; empty if it cannot be won any more."""
        events: list[str] = []
        state: State | None = self
        while state is not None:
            events[:0] = state.events
            state = state.parent
        progression = self.game.make_progression(track_quests=True)  # made here, because only experts need it
        self.game.apply(progression, events)
        return self.game.words.gen_commands_from_actions(progression.winning_policy or ())


@dataclass(slots=True, eq=False)
class _World:
    """A state of the game's logic and the commands that are valid in it. Game states with the same facts share it."""

    progression: Any  # textworld's GameProgression
    commands: list[str]
    next: dict[tuple[str, ...], _World] = field(default_factory=dict)  # events -> the world after them


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The interpreter's memory, as the difference from the game's first state, with its stack and registers."""

    memory: bytes
    stack: bytes
    registers: tuple[Any, ...]


@dataclass(slots=True)
class _Interpreter:
    engine: Any  # jericho.FrotzEnv
    at: State | None = None


class Game:
    """One compiled game, with the tree of its states that this process has played."""

    def __init__(self, file: Path) -> None:
        from textworld.generator.game import Game as Description
        from textworld.generator.inform7 import Inform7Game

        self.file = file
        self._description: Any = Description.load(str(file.with_suffix(".json")))
        self.objective: str = self._description.objective
        self.max_score: int = self._description.max_score
        self.words: Any = Inform7Game(self._description)
        self.states = 0
        self._worlds: dict[frozenset[Any], _World] = {}
        self._origin: np.ndarray | None = None  # uint8[memory]: the interpreter's memory in the first state

    @cached_property
    def root(self) -> State:
        interpreter = _get_interpreter(self)
        text, _ = interpreter.engine.reset()
        interpreter.engine.step("tw-trace-actions")
        interpreter.engine.step("tw-extra-infos score")
        return self._record(interpreter, None, text)

    def play(self, state: State, command: str) -> State:
        """Play ``command`` in ``state`` with an interpreter and return the state after it."""
        interpreter = _get_interpreter(self)
        if interpreter.at is not state:
            snapshot = state.snapshot
            memory = np.frombuffer(zlib.decompress(snapshot.memory), np.uint8) ^ self._origin
            stack = np.frombuffer(zlib.decompress(snapshot.stack), np.uint8).copy()
            interpreter.engine.set_state((memory, stack, *snapshot.registers))
        text, *_ = interpreter.engine.step(command)
        return self._record(interpreter, state, text)

    def _record(self, interpreter: _Interpreter, parent: State | None, raw: str) -> State:
        """Return the interpreter's present state as a `State`; ``raw`` is the text that it has printed last."""
        memory, stack, *registers = interpreter.engine.get_state()
        if self._origin is None:
            self._origin = memory
        difference = zlib.compress((memory ^ self._origin).tobytes(), 1)
        events = []
        for event in _EVENT.findall(raw):
            name = event.removesuffix(" - succeeded")
            if name != event and "(" not in name and ")" not in name:  # an event in brackets is part of another one
                events.append(name)
        score = {tag: int(value) for tag, value in _TAG.findall(raw)}.get("score")
        if score is None:
            score = parent.score if parent else 0
        end = _END.search(raw)
        self.states += 1
        interpreter.at = State(
            game=self,
            parent=parent,
            events=tuple(events),
            text=readable(raw),
            score=score,
            won=end is not None and end[1] == "The End",
            over=end is not None,
            snapshot=_Snapshot(difference, zlib.compress(stack.tobytes(), 1), tuple(registers)),
        )
        return interpreter.at

    def world_of(self, state: State) -> _World:
        """Return the world of ``state``, computed once, because finding the valid actions takes as long as playing."""
        if state.world is not None:
            return state.world
        if state.parent is None:
            state.world = self._share(self.make_progression(track_quests=False))
            return state.world
        world = self.world_of(state.parent)
        if state.events and state.events not in world.next:
            progression = copy.copy(world.progression)
            progression.state = progression.state.copy()
            self.apply(progression, state.events)
            world.next[state.events] = self._share(progression)
        state.world = world.next[state.events] if state.events else world
        return state.world

    def make_progression(self, *, track_quests: bool) -> Any:
        from textworld.generator.game import GameProgression

        return GameProgression(self._description, track_quests=track_quests)

    def apply(self, progression: Any, events: Iterable[str]) -> None:
        for event in events:
            action = self.words.detect_action(event, progression.valid_actions)
            if action is not None:  # an event that does not change the world has no action
                progression.update(action)

    def _share(self, progression: Any) -> _World:
        """Return the one world that has the facts of ``progression``."""
        facts = frozenset(progression.state.facts)
        if facts not in self._worlds:
            commands = sorted(set(self.words.gen_commands_from_actions(progression.valid_actions)))
            self._worlds[facts] = _World(progression, commands)
        return self._worlds[facts]


_interpreters: OrderedDict[Path, _Interpreter] = OrderedDict()  # by game file, the most recently used last
_games: OrderedDict[Path, Game] = OrderedDict()


def load(file: Path) -> Game:
    """Return the game of a ``.z8`` file, with all of its states that this process still holds."""
    game = _games.pop(file, None) or Game(file)
    _games[file] = game
    while len(_games) > 1 and sum(g.states for g in _games.values()) > _STATES:
        _games.popitem(last=False)  # live episodes hold a reference, so that their game stays usable
    return game


def _get_interpreter(game: Game) -> _Interpreter:
    """Return an interpreter that has loaded ``game``. It may be in any of the game's states."""
    interpreter = _interpreters.pop(game.file, None)
    if interpreter is None:
        import jericho

        while len(_interpreters) >= _INTERPRETERS:
            _interpreters.popitem(last=False)
        with warnings.catch_warnings():  # jericho warns about every game that is not on its list of classic games
            warnings.simplefilter("ignore", jericho.UnsupportedGameWarning)
            interpreter = _Interpreter(jericho.FrotzEnv(str(game.file), seed=1))
    elif interpreter.at is not None and interpreter.at.game is not game:
        interpreter.at = None  # the game was dropped and loaded again, so the old state is not in its tree
    _interpreters[game.file] = interpreter
    return interpreter


def readable(raw: str) -> str:
    """Return the game's answer without banner, trace marks, status line, closing menu and empty lines."""
    text = _TAG.sub("", _EVENT.sub("", raw))
    text = text[text.index("-= ") :] if "$$$$$$$" in text else text
    end = _END.search(text)
    text = text[: end.end()] if end else _STATUS_LINE.sub("", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
