"""ALFWorld: household tasks in text, on generated households or on the real games under ALFWORLD_DATA.

`AlfworldTaskset` is the environment ``alfworld`` of the settings. `households` draws households, `games` finds the game
of a task, `engine` plays it (on `pddl` and `text`), `episode` and `prompts` show it to a model, `expert` solves it.

Call results on generated households "ALFWorld engine, generated households", never ALFWorld scores.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import count as count_from
from itertools import islice, zip_longest
from typing import Any, Literal, cast

from gleanrl.environments.alfworld.engine import NOTHING
from gleanrl.environments.alfworld.episode import AlfworldEnvironment, Demonstration, played_examples
from gleanrl.environments.alfworld.games import game_of, household_task, real_tasks
from gleanrl.environments.alfworld.households import GOALS, SHARES, Layout, belongs, draw
from gleanrl.environments.alfworld.prompts import PROMPTS
from gleanrl.environments.alfworld.rooms import FULL_ROOMS, FULL_SAME_KIND, ROOMS
from gleanrl.protocols import Environment, Split, Taskset
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

__all__ = ["AlfworldEnvironment", "AlfworldTaskset"]

_MAX_FRUITLESS_DRAWS = 3000  # in a row without a new household; then the layout counts as exhausted
OPTIONS = (
    *("goals", "size", "receptacles", "objects", "seed", "rooms", "object_kinds", "same_kind", "source"),
    *("eval_split", "prompt", "examples", "banner", "admissible_commands"),
)
SIZES = ("small", "full")
EVAL_SPLITS = ("households", "seen", "unseen", "both")
SMALL: dict[str, tuple[int, int]] = {"receptacles": (5, 6), "objects": (4, 6)}
_ALIASES = {goal.library: name for name, goal in GOALS.items()}
_ALIASES |= {name.removesuffix("_in_recep"): goal for name, goal in _ALIASES.items()}


class AlfworldTaskset(Taskset):
    """Households to play, each proved solvable by an expert that plays it from text.

    A hash of a household (without numbering and wording) decides its split, so that no two seeds, options or runs put
    the same household into different splits.

    Args:
        goals: kinds of goals: put, heat, cool, clean, examine, put_two, or ALFWorld's names of them.
        size: ``small`` = as ``receptacles`` and ``objects`` say; ``full`` = as large as the rooms of the real games.
        receptacles, objects: how many a small household has: a number or a range; None = (5, 6) and (4, 6).
        seed: redraws all households.
        rooms: among kitchen, bathroom, bedroom, living_room; None = for small households the usual room of each goal
            (the kitchen; for examine the bedroom), for full ones every room of each goal.
        object_kinds: the only kinds of objects, such as "apple"; None = all that the room usually has.
        same_kind: largest number of objects of one kind in a household; None = 2, or 3 in full ones.
        source: ``generated``, or ``alfworld_data`` for the games under ALFWORLD_DATA; then the options of households
            have no effect.
        eval_split: what evaluation plays; always households that training does not play. ``households`` = in any room
            (with alfworld_data: valid_unseen). ``seen`` = in rooms whose layouts training plays too (valid_seen).
            ``unseen`` = in rooms of other layouts (valid_unseen). ``both`` = seen and unseen in turn, each a kind
            of task.
        prompt: ``plain``, ``react`` or ``admissible``: how a game is shown and answered (see `prompts`).
        examples: number of games played by the expert that are shown before each game; None = 2 with react, else 0.
        banner: keep TextWorld's welcome line.
        admissible_commands: list the admissible commands in the ``info`` of every observation.
    """

    has_expert = True
    phrases = (NOTHING,)
    named_by_content = True  # two tasks of one id are one household, however it is shown

    def __init__(
        self,
        *,
        goals: Sequence[str] = ("put",),
        size: Literal["small", "full"] = "small",
        receptacles: int | Sequence[int] | None = None,
        objects: int | Sequence[int] | None = None,
        seed: int = 0,
        rooms: Sequence[str] | None = None,
        object_kinds: Sequence[str] | None = None,
        same_kind: int | None = None,
        source: Literal["generated", "alfworld_data"] = "generated",
        eval_split: Literal["households", "seen", "unseen", "both"] = "households",
        prompt: Literal["plain", "react", "admissible"] = "plain",
        examples: int | None = None,
        banner: bool = False,
        admissible_commands: bool = False,
        **strange: Any,
    ) -> None:
        _require_packages()
        for key in strange:
            raise unknown("option of environment alfworld", key, OPTIONS)
        self._layout = layout_of(
            goals=goals,
            size=size,
            receptacles=receptacles,
            objects=objects,
            rooms=rooms,
            object_kinds=object_kinds,
            same_kind=same_kind,
        )
        one_of("source", source, ("generated", "alfworld_data"))
        one_of("eval_split", eval_split, EVAL_SPLITS)
        one_of("prompt", prompt, PROMPTS)
        self._examples = examples_wanted(prompt, examples)
        self._seed = seed
        self._source = source
        self._eval_split = eval_split
        self._prompt = prompt
        self._banner = banner
        self._admissible = admissible_commands
        self._drawn: dict[Split, tuple[list[Task], Iterator[Task]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_drawn": {}}

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """The first ``count`` tasks of a split; no household twice, and none in two splits."""
        if split not in SHARES:
            raise unknown("split", split, SHARES)
        if split not in self._drawn:
            self._drawn[split] = ([], self._tasks_of(split))
        tasks, stream = self._drawn[split]
        try:
            tasks += islice(stream, max(0, count - len(tasks)))
        except UserError:
            del self._drawn[split]  # a stream that raised is spent; the next call starts over
            raise
        if len(tasks) < count:
            fix = (
                "allow more receptacles, objects or object_kinds"
                if self._source == "generated"
                else "download more games"
            )
            raise UserError(f"environment alfworld has {len(tasks)} {split} tasks, {count} were asked for; {fix}")
        return tasks[:count]

    def environment(self, task: Task) -> Environment:
        return AlfworldEnvironment(task, banner=self._banner, admissible_commands=self._admissible)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """An expert's conversation in the task's prompt format, up to the command that wins or to 100 commands.

        The expert sees only text; where there are more than 25 receptacles it gets four commands for each. ``noise``
        is the chance of a random admissible command (not help) before each of its own; it reads what that did and
        carries on from there.
        """
        shown = Demonstration(task, seed, banner=self._banner).play(noise)
        return tuple(shown.messages), Score(float(shown.won))

    def _tasks_of(self, split: Split) -> Iterator[Task]:
        real = self._source == "alfworld_data"
        parts = real_parts(split, self._eval_split) if real else generated_parts(split, self._eval_split)
        goals = self._layout.goals
        again = split == "warm_start"  # from train, but from its end: a run trains on the first games
        streams = [
            real_tasks(part, goals, last_first=again) if real else self._households(split, part) for part in parts
        ]
        for tasks in zip_longest(*streams) if real else zip(*streams, strict=False):
            for part, task in zip(parts, tasks, strict=True):
                if task is not None:
                    kind = task.kind if len(parts) == 1 else f"{task.kind}_{part.removeprefix('valid_')}"
                    yield replace(task, kind=kind, payload={**task.payload, **self._shown_as(task)})

    def _shown_as(self, task: Task) -> dict[str, Any]:
        """The prompt format as part of a task's payload, so that the task looks the same wherever it is played."""
        examples = played_examples(self._prompt, task.payload["goal"], self._examples)
        shown = {"prompt": self._prompt, "examples": examples}
        return {key: value for key, value in shown.items() if value and value != "plain"}

    def _households(self, split: Split, part: str) -> Iterator[Task]:
        seen: set[str] = set()
        fruitless = 0
        for index in count_from():
            household = draw(self._layout, derive(self._seed, "alfworld", "household", index))
            fruitless += 1
            if household is not None and household.key not in seen and belongs(household, split, part):
                seen.add(household.key)
                task = household_task(household)
                if self._solvable(task):
                    fruitless = 0
                    yield task
            if fruitless > _MAX_FRUITLESS_DRAWS:
                return

    def _solvable(self, task: Task) -> bool:
        game = game_of(task)
        return not game.won(game.start) and Demonstration(task, seed=0).play().won


def _require_packages() -> None:
    for package in ("alfworld", "textworld", "fast_downward"):
        if find_spec(package) is None:
            raise UserError(f"environment alfworld needs the package {package}: pip install 'gleanrl[alfworld]'")


# --- where the tasks of a split come from ------------------------------------------------------------------
def generated_parts(split: Split, eval_split: str) -> tuple[str, ...]:
    """The kinds of layouts that the tasks of a split come from, in turn: any, seen or unseen."""
    if eval_split == "households":
        return ("any",)
    if split != "eval":
        return ("seen",)
    return ("seen", "unseen") if eval_split == "both" else (eval_split,)


def real_parts(split: Split, eval_split: str) -> tuple[str, ...]:
    """The folders of real games that the tasks of a split come from, in turn.

    Demonstrations come from ``valid_seen`` if evaluation does not use it, otherwise from the last training games. Only
    a run that asks for nearly all of train then trains on games that it saw demonstrated.
    """
    if split == "train":
        return ("train",)
    if split == "warm_start":
        return ("valid_seen",) if eval_split == "households" else ("train",)
    return {"seen": ("valid_seen",), "both": ("valid_seen", "valid_unseen")}.get(eval_split, ("valid_unseen",))


# --- options: each mistake is one line that names the option ------------------------------------------------
def goals_named(names: Sequence[str]) -> tuple[str, ...]:
    """Goals by our names or by ALFWorld's (``pick_heat_then_place_in_recep``, with or without ``_in_recep``)."""
    if isinstance(names, str) or not names:
        return chosen("goals", names, GOALS)
    return chosen("goals", tuple(dict.fromkeys(_ALIASES.get(name, name) for name in names)), GOALS)


def layout_of(
    *,
    goals: Sequence[str],
    size: str,
    receptacles: int | Sequence[int] | None,
    objects: int | Sequence[int] | None,
    rooms: Sequence[str] | None,
    object_kinds: Sequence[str] | None,
    same_kind: int | None,
) -> Layout:
    one_of("size", size, SIZES)
    full = size == "full"
    if full and (receptacles is not None or objects is not None):
        given = "receptacles" if receptacles is not None else "objects"
        raise UserError(f"alfworld option {given}: size = 'full' has as many as real rooms have; leave it out")
    everything = {kind.lower(): kind for room in ROOMS.values() for kind in room.objects}
    everything |= {kind.lower(): kind for room in FULL_ROOMS.values() for kind in room.objects} if full else {}
    kinds = None if object_kinds is None else chosen("object_kinds", [k.lower() for k in object_kinds], everything)
    layout = Layout(
        goals=goals_named(goals),
        rooms=None if rooms is None else chosen("rooms", rooms, ROOMS),
        receptacles=_range("receptacles", SMALL["receptacles"] if receptacles is None else receptacles),
        objects=_range("objects", SMALL["objects"] if objects is None else objects),
        object_kinds=None if kinds is None else tuple(everything[kind] for kind in kinds),
        same_kind=(FULL_SAME_KIND if full else 2) if same_kind is None else same_kind,
        full=full,
    )
    if layout.same_kind < 1:
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
    if not layout.full and not least <= low <= high <= most:
        raise UserError(f"alfworld option receptacles = {low}, {high}: a {room} has {least} to {most}")
    if not layout.kinds_of(room):
        raise UserError(f"alfworld option object_kinds: none of them is found in a {room}")


def examples_wanted(prompt: str, examples: int | None) -> int:
    if examples is None:
        return 2 if prompt == "react" else 0
    if not isinstance(examples, int) or examples < 0:
        raise UserError(f"alfworld option examples = {examples!r} must be a number, 0 or more")
    if examples and prompt != "react":
        raise UserError(f"alfworld option examples: prompt = {prompt!r} has no place for them; use react")
    return examples


def one_of(key: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise unknown(f"alfworld option {key}", value, known)


def chosen(key: str, values: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not values:
        raise UserError(f"alfworld option {key} must be a non-empty list, as [{next(iter(known))!r}], not {values!r}")
    for value in values:
        if value not in known:
            raise unknown(f"alfworld option {key}", value, known)
    return tuple(values)


def _range(key: str, value: int | Sequence[int]) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(n, int) for n in pair) or not 1 <= pair[0] <= pair[1]:
        raise UserError(f"alfworld option {key} = {value!r} must be a number, or the least and the most, as [4, 6]")
    return cast(tuple[int, int], pair)


def unknown(what: str, value: object, known: Iterable[str]) -> UserError:
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.0)
    return UserError(f"{what}: {value!r} is not known; did you mean {near[0]!r}? (one of {', '.join(names)})")
