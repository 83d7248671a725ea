"""ALFWorld's engine on generated households, or on the real games where ALFWORLD_DATA has them.

Results on generated households are to be called "ALFWorld engine, generated households", never ALFWorld
scores.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import count as count_from
from itertools import islice
from typing import Any, Literal, cast

from gleanrl.environments.alfworld.engine import BANNER, NOTHING, Game
from gleanrl.environments.alfworld.expert import Expert
from gleanrl.environments.alfworld.games import game_of, household_task, real_tasks
from gleanrl.environments.alfworld.households import GOALS, ROOMS, Layout, draw
from gleanrl.errors import UserError
from gleanrl.protocols import Environment, Observation, Split
from gleanrl.seeding import derive
from gleanrl.types import Message, Score, Task

__all__ = ["AlfworldEnvironment", "AlfworldTaskset"]

_SHARES: dict[Split, float] = {"train": 0.6, "eval": 0.2, "warm_start": 0.2}
_OPTIONS = (
    *("goals", "receptacles", "objects", "seed", "rooms", "object_kinds", "same_kind"),
    *("source", "banner", "admissible_commands"),
)
_EXPERT_STEPS = 100
_FRUITLESS_DRAWS = 3000  # in a row without a new household: the layout has no more of them


class AlfworldTaskset:
    """Households to play, each proved solvable by an expert that plays it from text.

    A household belongs to a split by a hash of what it is (numbering and wording aside), so that no two
    seeds, options or runs ever put the same household into different splits.

    Args:
        goals: kinds of goals, of put, heat, cool, clean, examine, put_two.
        receptacles, objects: how many a household has, a number or a range.
        seed: redraws all households.
        rooms: of kitchen, bathroom, bedroom, living_room; None takes the usual room of each goal (the
            kitchen; for examine the bedroom).
        object_kinds: the only kinds of objects, as "apple"; None for all that the room usually has.
        same_kind: most objects of one kind in a household.
        source: ``generated``, or ``alfworld_data`` for the games under ALFWORLD_DATA (then only ``goals`` counts).
        banner: keep TextWorld's welcome line.
        admissible_commands: list them in every observation's ``info``.
    """

    def __init__(
        self,
        *,
        goals: Sequence[str] = ("put",),
        receptacles: int | Sequence[int] = (5, 6),
        objects: int | Sequence[int] = (4, 6),
        seed: int = 0,
        rooms: Sequence[str] | None = None,
        object_kinds: Sequence[str] | None = None,
        same_kind: int = 2,
        source: Literal["generated", "alfworld_data"] = "generated",
        banner: bool = False,
        admissible_commands: bool = False,
        **unknown: Any,
    ) -> None:
        _require_packages()
        for key in unknown:
            raise _unknown("option of environment alfworld", key, _OPTIONS)
        self._layout = _layout(goals, receptacles, objects, rooms, object_kinds, same_kind)
        if source not in ("generated", "alfworld_data"):
            raise _unknown("alfworld option source", source, ("generated", "alfworld_data"))
        self._seed = seed
        self._source = source
        self._banner = banner
        self._admissible = admissible_commands
        self._drawn: dict[Split, tuple[list[Task], Iterator[Task]]] = {}

    @property
    def phrases(self) -> tuple[str, ...]:
        """What the game says that a demonstration may never show."""
        return (NOTHING,)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_drawn": {}}

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """The first ``count`` tasks of a split; no household twice, and none in two splits."""
        if split not in _SHARES:
            raise _unknown("split", split, _SHARES)
        if split not in self._drawn:
            stream = self._households(split) if self._source == "generated" else real_tasks(split, self._layout.goals)
            self._drawn[split] = ([], stream)
        tasks, stream = self._drawn[split]
        try:
            tasks += islice(stream, max(0, count - len(tasks)))
        except UserError:
            del self._drawn[split]  # a stream that raised is spent; the next call starts over
            raise
        if len(tasks) < count:
            mend = (
                "allow more receptacles, objects or object_kinds"
                if self._source == "generated"
                else "download more games"
            )
            raise UserError(f"environment alfworld has {len(tasks)} {split} tasks, {count} were asked for; {mend}")
        return tasks[:count]

    def environment(self, task: Task) -> Environment:
        return AlfworldEnvironment(task, banner=self._banner, admissible_commands=self._admissible)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """An expert's conversation, up to the command that wins or to 100 commands.

        The expert sees only text. ``noise`` is the chance of a random admissible command (not help) before
        each of its own; it reads what that did and carries on from there.
        """
        game = game_of(task)
        expert = Expert.reading(game.intro, game.task, derive(seed, "alfworld", "expert", task.id))
        if expert is None:
            raise UserError(f"the expert cannot read the goal {game.task!r} of task {task.id}; its wording is free")
        rng = random.Random(derive(seed, "alfworld", "noise", task.id))
        answer, state, won = self._opening(game), game.start, False
        messages: list[Message] = []
        while not won and len(messages) < 2 * _EXPERT_STEPS:
            command = expert.act()
            if noise and rng.random() < noise:
                command = rng.choice([c for c in game.admissible(state) if c != "help"])
            messages.append({"role": "user", "content": answer})
            messages.append({"role": "assistant", "content": command})
            answer, state, won = game.step(state, command)
            expert.observe(command, answer)
        return tuple(messages), Score(float(won))

    def _opening(self, game: Game) -> str:
        return game.intro if self._banner else game.intro.removeprefix(BANNER)

    def _households(self, split: Split) -> Iterator[Task]:
        seen: set[str] = set()
        fruitless = 0
        for index in count_from():
            household = draw(self._layout, derive(self._seed, "alfworld", "household", index))
            fruitless += 1
            if household is not None and household.key not in seen and _split(household.key) == split:
                seen.add(household.key)
                task = household_task(household)
                if self._solvable(task):
                    fruitless = 0
                    yield task
            if fruitless > _FRUITLESS_DRAWS:
                return

    def _solvable(self, task: Task) -> bool:
        game = game_of(task)
        return not game.won(game.start) and self.demonstrate(task, seed=0)[1].value == 1.0


class AlfworldEnvironment:
    """One episode of one household: commands in, the game's answers out, 1 for reaching the goal."""

    def __init__(self, task: Task, *, banner: bool = False, admissible_commands: bool = False) -> None:
        self._task = task
        self._banner = banner
        self._list_admissible = admissible_commands
        self._game: Game | None = None
        self._state = 0

    async def reset(self) -> Observation:
        self._game = game_of(self._task)
        self._state = self._game.start
        text = self._game.intro if self._banner else self._game.intro.removeprefix(BANNER)
        return self._observe(self._game, text, won=False)

    async def step(self, message: Message) -> Observation:
        if self._game is None:
            raise RuntimeError("step before reset, or after close")
        answer, self._state, won = self._game.step(self._state, message["content"].strip().lower())
        return self._observe(self._game, answer, won=won)

    async def close(self) -> None:
        self._game = None

    def _observe(self, game: Game, text: str, *, won: bool) -> Observation:
        info: dict[str, Any] = {"won": won}
        if self._list_admissible:
            info["admissible_commands"] = game.admissible(self._state)
        return Observation(({"role": "user", "content": text},), done=won, score=Score(float(won)), info=info)


def _require_packages() -> None:
    for package in ("alfworld", "textworld", "fast_downward"):
        if find_spec(package) is None:
            raise UserError(f"environment alfworld needs the package {package}: pip install 'gleanrl[alfworld]'")


def _split(key: str) -> Split:
    """Where a household of this content belongs: by hash, so in the same place for every seed."""
    point, reached = derive(0, "alfworld", "split", key) / 2**63, 0.0
    for split, share in _SHARES.items():
        reached += share
        if point < reached:
            return split
    return "train"


def _layout(
    goals: Sequence[str],
    receptacles: int | Sequence[int],
    objects: int | Sequence[int],
    rooms: Sequence[str] | None,
    object_kinds: Sequence[str] | None,
    same_kind: int,
) -> Layout:
    everything = {kind.lower(): kind for room in ROOMS.values() for kind in room.objects}
    kinds = None if object_kinds is None else _chosen("object_kinds", [k.lower() for k in object_kinds], everything)
    layout = Layout(
        goals=_chosen("goals", goals, GOALS),
        rooms=None if rooms is None else _chosen("rooms", rooms, ROOMS),
        receptacles=_range("receptacles", receptacles),
        objects=_range("objects", objects),
        object_kinds=None if kinds is None else tuple(everything[kind] for kind in kinds),
        same_kind=same_kind,
    )
    if same_kind < 1:
        raise UserError(f"alfworld option same_kind = {same_kind} must be 1 or more")
    for goal in layout.goals:
        if not layout.rooms_of(goal):
            raise UserError(f"alfworld option rooms: goal {goal} needs one of {', '.join(GOALS[goal].rooms)}")
        for room in layout.rooms_of(goal):
            _check_room(layout, room)
    return layout


def _check_room(layout: Layout, room: str) -> None:
    least = len(ROOMS[room].always)
    most = least + sum(most for _, most in ROOMS[room].maybe.values())
    low, high = layout.receptacles
    if not least <= low <= high <= most:
        raise UserError(f"alfworld option receptacles = {low}, {high}: a {room} has {least} to {most}")
    if not layout.kinds_of(room):
        raise UserError(f"alfworld option object_kinds: none of them is found in a {room}")


def _chosen(key: str, values: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not values:
        raise UserError(f"alfworld option {key} must be a non-empty list, as [{next(iter(known))!r}], not {values!r}")
    for value in values:
        if value not in known:
            raise _unknown(f"alfworld option {key}", value, known)
    return tuple(values)


def _range(key: str, value: int | Sequence[int]) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(n, int) for n in pair) or not 1 <= pair[0] <= pair[1]:
        raise UserError(f"alfworld option {key} = {value!r} must be a number, or the least and the most, as [4, 6]")
    return cast(tuple[int, int], pair)


def _unknown(what: str, value: object, known: Iterable[str]) -> UserError:
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.0)
    return UserError(f"{what}: {value!r} is not known; did you mean {near[0]!r}? (one of {', '.join(names)})")
