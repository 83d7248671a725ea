"""Generated TextWorld games, played by the real engine (the package `textworld`).

`TextworldTaskset` is the environment ``textworld`` of the settings. `games` makes and compiles games, `engine` plays
them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count as count_from
from typing import Any, Literal

import pydantic
from pydantic import Field

from gleanrl.environments.splits import select
from gleanrl.environments.textworld import engine
from gleanrl.environments.textworld.games import Contents, Recipe, compiled, prepare
from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.rollout.thinking import answer_of
from gleanrl.types import Message, Score, Task
from gleanrl.utils.seeding import derive

_MAX_DEMONSTRATION = 200  # most commands of a demonstration; only a large ``noise`` makes one this long
_COMMAND_CHARACTERS = 120
# Commands of the interpreter that do not belong to the game, and TextWorld's debugging commands.
_NOT_PLAYED = re.compile(r"(tw-.*|quit|q|restart|restore|save|undo|(un)?script|transcript.*|verify|version|again|g)\Z")


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class TextworldTaskset(Taskset):
    """Makes tasks from generated TextWorld games.

    ``coin_collector``: find a coin ``quest_length`` commands away among ``rooms`` rooms.
    ``custom``: TextWorld's own generator, with ``objects`` things and ``quests`` quests of ``quest_length``
    commands each. A game that is won scores 1, any other 0. The score's part ``points`` is the share of the game's own
    points that were reached.

    A game takes about half a second to compile when it is first played, and is then kept on disk. `prepare`
    compiles many games at once.
    """

    game: Literal["coin_collector", "custom"] = "coin_collector"
    rooms: int = Field(default=6, ge=1, le=100)
    objects: int = Field(default=6, ge=1, le=200)
    quest_length: int = Field(default=4, ge=1, le=100)
    quests: int = Field(default=1, ge=1, le=10)
    goal: Literal["brief", "detailed", "none"] = "brief"  # the opening describes the goal, each step to it, or neither
    theme: Literal["house", "basic"] = "house"
    admissible_commands: bool = True  # whether an observation lists the commands that have an effect
    seed: int = 0

    has_expert = True
    named_by_content = True  # an id is a hash of the problem, whatever seed made it

    def __post_init__(self) -> None:
        if self.game == "coin_collector" and self.rooms < self.quest_length:
            raise ValueError(f"rooms = {self.rooms}: a quest_length of {self.quest_length} needs at least as many")

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        custom = self.game == "custom"  # `objects` and `quests` affect only custom games; else they get fixed values
        recipe = Recipe(
            game=self.game,
            rooms=self.rooms,
            objects=self.objects if custom else 1,
            quest_length=self.quest_length,
            quests=self.quests if custom else 1,
            goal="detailed" if self.goal == "detailed" else "brief",
            theme=self.theme,
        )
        contents = Contents(recipe)
        seeds = (derive(self.seed, "textworld", number) % 2**31 for number in count_from())
        candidates = ((contents[seed], seed) for seed in seeds)
        try:
            chosen = list(select(candidates, split, count, f"textworld {self.game!r}"))
        finally:
            contents.save()
        shown: dict[str, Any] = {}  # options of the observations that are not at their default; not part of the id
        if self.goal == "none":
            shown["goal"] = "none"
        if not self.admissible_commands:
            shown["admissible_commands"] = False
        tasks = []
        for mark, seed in chosen:
            payload = {"recipe": asdict(recipe), "seed": seed, "content": mark, **({"shown": shown} if shown else {})}
            tasks.append(Task(id=f"{self.game}-{mark[:16]}", payload=payload, kind=self.game))
        return tasks

    def prepare(
        self, tasks: Sequence[Task], *, workers: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compile the games of ``tasks`` that are not on disk, ``workers`` at once.

        Calls ``progress(done, total)`` after each game.
        """
        prepare([_game_of(task) for task in tasks], workers, progress)

    def environment(self, task: Task) -> Environment:
        return _Episode(task, self)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """Play the commands that TextWorld's logic finds to win. They are computed again after each random command."""
        rng = random.Random(derive(seed, "textworld", task.id))
        state = engine.load(compiled(*_game_of(task))).root
        conversation = [self._message(state)]
        for _ in range(_MAX_DEMONSTRATION):
            policy = state.policy()
            if state.over or not policy:
                break
            command = rng.choice(state.admissible()) if rng.random() < noise else policy[0]
            state = state.step(command)
            conversation += [{"role": "assistant", "content": command}, self._message(state)]
        return tuple(conversation[:-1]), _score(state)

    def _message(self, state: engine.State) -> Message:
        lines = [state.text]
        if state.parent is None and self.goal != "none":
            lines.insert(0, state.game.objective)
        if self.admissible_commands and not state.over:
            lines.append(f"You can: {', '.join(state.admissible())}.")
        return {"role": "user", "content": "\n".join(line for line in lines if line)}


@dataclass(eq=False)
class _Episode(Environment):
    task: Task
    taskset: TextworldTaskset
    state: engine.State | None = None

    async def reset(self) -> Observation:
        self.state = engine.load(compiled(*_game_of(self.task))).root
        state = self.state
        return Observation((self.taskset._message(state),), done=state.over, score=_score(state))

    async def step(self, message: Message) -> Observation:
        if self.state is None or self.state.over:
            raise RuntimeError(f"task {self.task.id!r}: no step before reset or after the end")
        command = command_of(message["content"])
        if not command or _NOT_PLAYED.match(command):
            text = "That's not a verb you recognise." if command else "I beg your pardon?"
            return Observation(({"role": "user", "content": text},), score=_score(self.state))
        self.state = state = self.state.step(command)
        return Observation((self.taskset._message(state),), done=state.over, score=_score(state))

    async def close(self) -> None:
        self.state = None


def command_of(text: str) -> str:
    """Return the command in a model's message: the first line after any thinking, in ASCII and of limited length."""
    text = answer_of(text).strip().partition("\n")[0]
    # Keep only the first of several commands, because the game would play all of them in one turn.
    text = re.split(r"[.;]|\bthen\b", text.encode("ascii", "ignore").decode().lower())[0]
    # Remove backslashes: the interpreter takes one as a command of its own and then asks for input forever.
    return " ".join(text.replace("\\", " ").split())[:_COMMAND_CHARACTERS].strip()


def _score(state: engine.State) -> Score:
    points = state.score / state.game.max_score if state.game.max_score else 0.0
    return Score(1.0 if state.won else 0.0, parts={"points": points})


def _game_of(task: Task) -> tuple[Recipe, int, str]:
    payload: Any = task.payload
    return Recipe(**payload["recipe"]), payload["seed"], payload["content"]
