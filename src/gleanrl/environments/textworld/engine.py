"""Plays compiled TextWorld games, each command at most once.

A game is deterministic, so its states form a tree of commands. The tree keeps what each command answered
and a snapshot of the interpreter (some 1 kB), so that the episodes of a group share their common
part, and a few interpreters serve any number of episodes. Feedback, score and admissible commands
are those of TextWorld's own environment, which a test compares command by command.
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

_INTERPRETERS = 32  # games that can go on without loading, 1.8 MB each
_STATES = 50_000  # over all games of a process, about 4 kB each; the games not played longest go first

_EVENT = re.compile(r"\[([^]]+)\]\n?")  # what `tw-trace-actions` prints, e.g. [going north - succeeded]
_TAG = re.compile(r"<(score|moves)>\n\s*(-?\d+).*?</\1>", re.DOTALL)  # what `tw-extra-infos score` prints
_STATUS_LINE = re.compile(r"\s*\n>[^\n]*\Z")
_END = re.compile(r"\*\*\* (The End|You lost!) \*\*\*")


@dataclass(slots=True, eq=False)
class State:
    """A point in a game: what the last command answered, and whether that ended it."""

    game: Game
    parent: State | None
    events: tuple[str, ...]  # what happened in the game's logic on the way from the parent
    text: str
    score: int
    won: bool
    lost: bool
    snapshot: _Snapshot
    children: dict[str, State] = field(default_factory=dict)
    _world: _World | None = None  # computed on demand

    @property
    def over(self) -> bool:
        return self.won or self.lost

    def step(self, command: str) -> State:
        """The state after ``command``; played at most once."""
        if command not in self.children:
            self.children[command] = self.game.play(self, command)
        return self.children[command]

    def admissible(self) -> list[str]:
        """Commands that do something here, sorted."""
        return self.world().commands

    def world(self) -> _World:
        if self._world is None:
            self._world = self.game.start if self.parent is None else self.game.after(self.parent.world(), self.events)
        return self._world

    def policy(self) -> list[str]:
        """Commands that win from here; none if it cannot be won any more."""
        events: list[str] = []
        state: State | None = self
        while state is not None:
            events[:0] = state.events
            state = state.parent
        progression = self.game.progression(quests=True)  # only experts need it
        self.game.apply(progression, events)
        return self.game.words.gen_commands_from_actions(progression.winning_policy or ())


@dataclass(slots=True, eq=False)
class _World:
    """What is true in a game's logic, in however many states of the game, and what can be done then."""

    progression: Any  # textworld's GameProgression
    commands: list[str]
    next: dict[tuple[str, ...], _World] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The interpreter's memory as its difference from the game's first state, and its registers."""

    memory: bytes
    stack: bytes
    registers: tuple[Any, ...]


class Game:
    """One compiled game of this process."""

    def __init__(self, file: Path) -> None:
        from textworld.generator.game import Game as Description
        from textworld.generator.inform7 import Inform7Game

        self.file = file
        self.description: Any = Description.load(str(file.with_suffix(".json")))
        self.words: Any = Inform7Game(self.description)
        self.states = 0
        self._worlds: dict[frozenset[Any], _World] = {}
        self._origin: np.ndarray | None = None  # uint8[memory], of the first state

    @cached_property
    def root(self) -> State:
        interpreter = _interpreter(self)
        text, _ = interpreter.engine.reset()
        interpreter.engine.step("tw-trace-actions")
        interpreter.engine.step("tw-extra-infos score")
        return self._state(interpreter, None, text)

    @property
    def objective(self) -> str:
        return self.description.objective

    @property
    def max_score(self) -> int:
        return self.description.max_score

    def play(self, state: State, command: str) -> State:
        interpreter = _interpreter(self)
        if interpreter.at is not state:
            interpreter.engine.set_state(self._unpacked(state.snapshot))
        text, *_ = interpreter.engine.step(command)
        return self._state(interpreter, state, text)

    @cached_property
    def start(self) -> _World:
        return self._same(self.progression(quests=False))

    def after(self, world: _World, events: tuple[str, ...]) -> _World:
        """The world after ``events``: finding the valid actions takes as long as playing, so it is done once."""
        if not events:
            return world
        if events not in world.next:
            progression = copy.copy(world.progression)
            progression.state = progression.state.copy()
            self.apply(progression, events)
            world.next[events] = self._same(progression)
        return world.next[events]

    def progression(self, *, quests: bool) -> Any:
        from textworld.generator.game import GameProgression

        return GameProgression(self.description, track_quests=quests)

    def apply(self, progression: Any, events: Iterable[str]) -> None:
        for event in events:
            action = self.words.detect_action(event, progression.valid_actions)
            if action is not None:  # not all that happens changes the world
                progression.update(action)

    def _same(self, progression: Any) -> _World:
        """The one world of these facts."""
        facts = frozenset(progression.state.facts)
        if facts not in self._worlds:
            commands = sorted(set(self.words.gen_commands_from_actions(progression.valid_actions)))
            self._worlds[facts] = _World(progression, commands)
        return self._worlds[facts]

    def _state(self, interpreter: _Interpreter, parent: State | None, raw: str) -> State:
        score = {tag: int(value) for tag, value in _TAG.findall(raw)}.get("score")
        end = _END.search(raw)
        self.states += 1
        state = interpreter.at = State(
            game=self,
            parent=parent,
            events=_succeeded(raw),
            text=readable(raw),
            score=score if score is not None else parent.score if parent else 0,
            won=end is not None and end[1] == "The End",
            lost=end is not None and end[1] != "The End",
            snapshot=self._packed(interpreter.engine.get_state()),
        )
        return state

    def _packed(self, state: tuple[Any, ...]) -> _Snapshot:
        memory, stack, *registers = state
        if self._origin is None:
            self._origin = memory
        return _Snapshot(
            zlib.compress((memory ^ self._origin).tobytes(), 1), zlib.compress(stack.tobytes(), 1), tuple(registers)
        )

    def _unpacked(self, snapshot: _Snapshot) -> tuple[Any, ...]:
        assert self._origin is not None
        memory = np.frombuffer(zlib.decompress(snapshot.memory), np.uint8) ^ self._origin
        stack = np.frombuffer(zlib.decompress(snapshot.stack), np.uint8)
        return memory, stack.copy(), *snapshot.registers


@dataclass(slots=True)
class _Interpreter:
    engine: Any  # jericho.FrotzEnv
    at: State | None = None


_interpreters: OrderedDict[Path, _Interpreter] = OrderedDict()  # by game file, the last used last
_games: OrderedDict[Path, Game] = OrderedDict()


def load(file: Path) -> Game:
    """The game of a ``.z8`` file, with all of its states that this process still remembers."""
    game = _games.pop(file, None) or Game(file)
    _games[file] = game
    while len(_games) > 1 and sum(g.states for g in _games.values()) > _STATES:
        _games.popitem(last=False)  # its live episodes keep it alive
    return game


def _interpreter(game: Game) -> _Interpreter:
    """An interpreter that holds ``game``, wherever in it."""
    interpreter = _interpreters.pop(game.file, None)
    if interpreter is None:
        while len(_interpreters) >= _INTERPRETERS:
            _interpreters.popitem(last=False)
        interpreter = _Interpreter(_start_interpreter(game.file))
    elif interpreter.at is not None and interpreter.at.game is not game:
        interpreter.at = None  # the same file, but a forgotten and reloaded tree
    _interpreters[game.file] = interpreter
    return interpreter


def _start_interpreter(file: Path) -> Any:
    import jericho

    with warnings.catch_warnings():  # it warns of every game that is not a classic
        warnings.simplefilter("ignore", jericho.UnsupportedGameWarning)
        return jericho.FrotzEnv(str(file), seed=1)


def readable(raw: str) -> str:
    """What the game said, without banner, trace marks, status line, closing menu and empty lines."""
    text = _TAG.sub("", _EVENT.sub("", raw))
    text = text[text.index("-= ") :] if "$$$$$$$" in text else text
    end = _END.search(text)
    text = text[: end.end()] if end else _STATUS_LINE.sub("", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def _succeeded(raw: str) -> tuple[str, ...]:
    events = (event.removesuffix(" - succeeded") for event in _EVENT.findall(raw) if event.endswith(" - succeeded"))
    return tuple(event for event in events if "(" not in event and ")" not in event)  # those are parts of others
