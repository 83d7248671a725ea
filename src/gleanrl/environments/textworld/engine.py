"""Runs compiled TextWorld games, and runs each command at most once in each state of a game.

A game is deterministic, so its states form a tree whose edges are commands. A `State` is a node of this tree. It keeps
the game's answer and a snapshot of the interpreter (about 1 kB), from which any command can be played. So episodes that
begin with the same commands share states, and a few interpreters serve any number of episodes.

Feedback, score and admissible commands equal those of TextWorld's own environment. A test compares them after every
command.
"""

from __future__ import annotations

import copy
import hashlib
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

_INTERPRETERS = 32  # largest number of loaded interpreters, one per game, 1.8 MB each
# Largest number of states in a process, of about 4 kB each. Beyond it, `load` drops the games used least recently.
_STATES = 50_000

_EVENT = re.compile(r"\[([^]]+)\]\n?")  # what `tw-trace-actions` prints, e.g. [going north - succeeded]
_TAG = re.compile(r"<(score|moves)>\n\s*(-?\d+).*?</\1>", re.DOTALL)  # what `tw-extra-infos score` prints
_STATUS_LINE = re.compile(r"\s*\n>[^\n]*\Z")
_END = re.compile(r"\*\*\* (The End|You lost!) \*\*\*")


@dataclass(slots=True, eq=False)
class State:
    """A state of a game after a sequence of commands, with the game's answer to the last of them."""

    game: Game
    parent: State | None
    events: tuple[str, ...]  # events of the game's logic between the parent and this state
    text: str
    score: int
    won: bool
    over: bool
    snapshot: _Snapshot
    children: dict[str, State] = field(default_factory=dict)
    world: _World | None = None  # cached by `Game.world_of`
    quests: frozenset[int] | None = None  # the finished ones, cached by `Game.finished_quests`

    def step(self, command: str) -> State:
        """Return the state after ``command``. The interpreter runs only the first time, and later calls share the
        result.
        """
        if command not in self.children:
            self.children[command] = self.game.play(self, command)
        return self.children[command]

    def admissible(self) -> list[str]:
        """Return TextWorld's admissible commands in this state, sorted."""
        return self.game.world_of(self).commands

    def key(self) -> str:
        """Return a text that two states share if and only if the same facts hold and the same quests are done."""
        return " ".join([self.game.world_of(self).facts, *map(str, sorted(self.game.finished_quests(self)))])

    def policy(self) -> list[str]:
        """Return commands that win the game from this state. Empty if the game can no longer be won."""
        events: list[str] = []
        state: State | None = self
        while state is not None:
            events[:0] = state.events
            state = state.parent
        # Only experts call this, so the progress of the quests is computed here and not for every state.
        progression = self.game.make_progression(track_quests=True)
        self.game.apply(progression, events)
        return self.game.words.gen_commands_from_actions(progression.winning_policy or ())


@dataclass(slots=True, eq=False)
class _World:
    """A state of TextWorld's logical model of a game, and the commands that are valid in it.

    All `State` objects with the same logical facts share one world.
    """

    progression: Any  # textworld's GameProgression
    facts: str  # hash of the logical facts, the same in all processes
    commands: list[str]
    next: dict[tuple[str, ...], _World] = field(default_factory=dict)  # events -> the world after them


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A saved state of the interpreter.

    ``memory`` is the bitwise difference from the memory in the game's first state. ``memory`` and ``stack`` are
    compressed.
    """

    memory: bytes
    stack: bytes
    registers: tuple[Any, ...]


@dataclass(slots=True)
class _Interpreter:
    engine: Any  # jericho.FrotzEnv
    at: State | None = None


class Game:
    """A compiled game, with the tree of the states that this process has reached in it."""

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
        self._origin: np.ndarray | None = None  # uint8[memory]: the interpreter's memory in the first recorded state

    @cached_property
    def root(self) -> State:
        interpreter = _get_interpreter(self)
        text, _ = interpreter.engine.reset()
        interpreter.engine.step("tw-trace-actions")
        interpreter.engine.step("tw-extra-infos score")
        return self._record(interpreter, None, text)

    def play(self, state: State, command: str) -> State:
        """Run ``command`` in ``state`` on an interpreter, and return the new state."""
        interpreter = _get_interpreter(self)
        if interpreter.at is not state:
            snapshot = state.snapshot
            assert self._origin is not None  # `_record` has set it with the first state
            memory = np.frombuffer(zlib.decompress(snapshot.memory), np.uint8) ^ self._origin
            stack = np.frombuffer(zlib.decompress(snapshot.stack), np.uint8).copy()
            interpreter.engine.set_state((memory, stack, *snapshot.registers))
        text, *_ = interpreter.engine.step(command)
        return self._record(interpreter, state, text)

    def _record(self, interpreter: _Interpreter, parent: State | None, raw: str) -> State:
        """Return a new `State` for the present state of ``interpreter``. ``raw`` is the text that it printed last."""
        memory, stack, *registers = interpreter.engine.get_state()
        if self._origin is None:
            self._origin = memory
        difference = zlib.compress((memory ^ self._origin).tobytes(), 1)
        events = []
        for event in _EVENT.findall(raw):
            name = event.removesuffix(" - succeeded")
            # An event with parentheses in its name is a part of another event and is skipped.
            if name != event and "(" not in name and ")" not in name:
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
        """Return the world of ``state``.

        The result is cached, because finding the valid commands takes as long as running a command.
        """
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

    def finished_quests(self, state: State) -> frozenset[int]:
        """Return the indices of the quests that were done in ``state`` or before. What they asked for may be undone."""
        if state.quests is None:
            before = frozenset() if state.parent is None else self.finished_quests(state.parent)
            facts = self.world_of(state).progression.state
            quests = enumerate(self._description.quests)
            state.quests = before | {i for i, quest in quests if i not in before and quest.is_winning(facts)}
        return state.quests

    def make_progression(self, *, track_quests: bool) -> Any:
        from textworld.generator.game import GameProgression

        return GameProgression(self._description, track_quests=track_quests)

    def apply(self, progression: Any, events: Iterable[str]) -> None:
        for event in events:
            action = self.words.detect_action(event, progression.valid_actions)
            if action is not None:  # an event that does not change the world has no action
                progression.update(action)

    def _share(self, progression: Any) -> _World:
        """Return the world with the facts of ``progression``. It is made the first time that these facts occur."""
        facts = frozenset(progression.state.facts)
        if facts not in self._worlds:
            commands = sorted(set(self.words.gen_commands_from_actions(progression.valid_actions)))
            texts = "\n".join(sorted(map(str, facts)))
            self._worlds[facts] = _World(
                progression, hashlib.blake2b(texts.encode(), digest_size=12).hexdigest(), commands
            )
        return self._worlds[facts]


_interpreters: OrderedDict[Path, _Interpreter] = OrderedDict()  # by game file, the most recently used one last
_games: OrderedDict[Path, Game] = OrderedDict()


def load(file: Path) -> Game:
    """Return the game of a ``.z8`` file, with the states that this process has reached in it so far.

    Games are cached. If all games together have too many states, the least recently used games are dropped.
    """
    game = _games.pop(file, None) or Game(file)
    _games[file] = game
    while len(_games) > 1 and sum(g.states for g in _games.values()) > _STATES:
        # Running episodes of the dropped game keep their own reference to it and can continue.
        _games.popitem(last=False)
    return game


def _get_interpreter(game: Game) -> _Interpreter:
    """Return an interpreter that has loaded ``game``, in any of the game's states."""
    interpreter = _interpreters.pop(game.file, None)
    if interpreter is None:
        import jericho

        while len(_interpreters) >= _INTERPRETERS:
            _interpreters.popitem(last=False)
        with warnings.catch_warnings():  # because jericho warns about every game that is not on its own list of games
            warnings.simplefilter("ignore", jericho.UnsupportedGameWarning)
            interpreter = _Interpreter(jericho.FrotzEnv(str(game.file), seed=1))
    elif interpreter.at is not None and interpreter.at.game is not game:
        # The game was dropped and loaded again since, so the interpreter's state is not in the tree of ``game``.
        interpreter.at = None
    _interpreters[game.file] = interpreter
    return interpreter


def readable(raw: str) -> str:
    """Return the text that the player reads: ``raw`` without banner, trace marks, status line, menu and empty lines."""
    text = _TAG.sub("", _EVENT.sub("", raw))
    text = text[text.index("-= ") :] if "$$$$$$$" in text else text
    end = _END.search(text)
    text = text[: end.end()] if end else _STATUS_LINE.sub("", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
