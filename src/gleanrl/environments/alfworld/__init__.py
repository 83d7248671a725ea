"""ALFWorld: household tasks in text, on generated households or on the real games under ALFWORLD_DATA.

`AlfworldTaskset` is the environment ``alfworld`` of the settings. `households` draws households, and `games` finds the
game of a task. `engine` plays the game, on top of `pddl` and `text`. `episode` and `prompts` show it to a model, and
`expert` solves it.

Call results on generated households "ALFWorld engine, generated households", never ALFWorld scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from itertools import count as count_from
from itertools import islice, zip_longest
from typing import Any, Literal, get_args

import pydantic
from pydantic import Field

from gleanrl.environments.alfworld.engine import NOTHING
from gleanrl.environments.alfworld.episode import AlfworldEnvironment, Demonstration, play_examples
from gleanrl.environments.alfworld.games import game_of, household_task, real_tasks
from gleanrl.environments.alfworld.households import GOALS, Layout, draw, layout_seen, split_of
from gleanrl.environments.alfworld.rooms import FULL_ROOMS, FULL_SAME_KIND, ROOMS
from gleanrl.protocols import Environment, Split, Taskset
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive
from gleanrl.utils.text import nearest

__all__ = ["AlfworldEnvironment", "AlfworldTaskset"]

EvalSplit = Literal["households", "seen", "unseen", "both"]
EVAL_SPLITS: tuple[str, ...] = get_args(EvalSplit)
_MAX_FRUITLESS_DRAWS = 3000  # after this many draws in a row without a new household, a layout counts as exhausted
_ALIASES: dict[str, str] = {}  # ALFWorld's name of a goal, with and without "_in_recep" -> our name
for _name, _goal in GOALS.items():
    _ALIASES[_goal.library] = _ALIASES[_goal.library.removesuffix("_in_recep")] = _name


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class AlfworldTaskset(Taskset):
    """Makes tasks from households. An expert that sees only text has solved each of them.

    A hash of a household (without numbering and wording) decides its split, so a household is in the same split for all
    seeds, options and runs.

    Args:
        goals: kinds of goals: put, heat, cool, clean, examine, put_two, or ALFWorld's names of them.
        size: ``small`` = as large as ``receptacles`` and ``objects`` say; ``full`` = as large as in the real games.
        receptacles, objects: numbers in a small household, each a number or a range; None = (5, 6) and (4, 6).
        seed: another seed draws other households.
        rooms: rooms to use, among kitchen, bathroom, bedroom, living_room. None = for small households the usual room
            of each goal (the kitchen; for examine the bedroom), for full households every room of each goal.
        object_kinds: the only kinds of objects, such as "apple"; None = all kinds that the room usually has.
        same_kind: largest number of objects of one kind in a household; None = 2, or 3 in full households.
        source: ``generated``, or ``alfworld_data`` for the games under ALFWORLD_DATA, for which the options of
            households have no effect.
        eval_split: the households that evaluation plays. Training never plays them. ``households`` = in any room
            (with alfworld_data: valid_unseen). ``seen`` = in rooms whose layouts training plays too (valid_seen).
            ``unseen`` = in rooms of other layouts (valid_unseen). ``both`` = seen and unseen in turn, reported as
            separate kinds of tasks.
        prompt: how a game is shown and answered: ``plain``, ``react`` or ``admissible`` (see `prompts`).
        examples: number of games played by the expert that are shown before each game; None = 2 with react, else 0.
        banner: whether to keep TextWorld's welcome line.
        admissible_commands: whether to list the admissible commands in the ``info`` of every observation.
    """

    goals: Sequence[str] = Field(default=("put",), min_length=1)
    size: Literal["small", "full"] = "small"
    receptacles: int | tuple[int, int] | None = None
    objects: int | tuple[int, int] | None = None
    seed: int = 0
    rooms: Sequence[str] | None = Field(default=None, min_length=1)
    object_kinds: Sequence[str] | None = Field(default=None, min_length=1)
    same_kind: int | None = Field(default=None, ge=1)
    source: Literal["generated", "alfworld_data"] = "generated"
    eval_split: EvalSplit = "households"
    prompt: Literal["plain", "react", "admissible"] = "plain"
    examples: int | None = Field(default=None, ge=0)
    banner: bool = False
    admissible_commands: bool = False

    has_expert = True
    phrases = (NOTHING,)
    named_by_content = True  # an id is a hash of the household, whatever the prompt format

    def __post_init__(self) -> None:
        for package in ("alfworld", "textworld", "fast_downward"):
            if find_spec(package) is None:
                raise UserError(f"environment alfworld needs the package {package}: pip install 'gleanrl[alfworld]'")
        if self.examples and self.prompt != "react":
            raise UserError(f"environment.options.examples: prompt = {self.prompt!r} has no place for them; use react")
        self.layout  # noqa: B018 - computed here so that wrong options are reported now

    @cached_property
    def layout(self) -> Layout:
        """The layout from which households are drawn.

        Raises:
            UserError: an option names something unknown, or the options exclude each other.
        """
        full = self.size == "full"
        ranges: dict[str, tuple[int, int]] = {}
        for name, default in {"receptacles": (5, 6), "objects": (4, 6)}.items():
            value = getattr(self, name)
            if full and value is not None:
                raise UserError(f"environment.options.{name}: size = 'full' has as many as real rooms; leave it out")
            value = default if value is None else value
            low, high = ranges[name] = (value, value) if isinstance(value, int) else value
            if not 1 <= low <= high:
                raise UserError(f"environment.options.{name} = {value!r}: a number, or least and most, as [4, 6]")
        kinds: dict[str, str] = {}  # lower-case name -> name
        for room in (*ROOMS.values(), *(FULL_ROOMS.values() if full else ())):
            kinds.update((kind.lower(), kind) for kind in room.objects)
        goals = tuple(dict.fromkeys(_ALIASES.get(name, name) for name in self.goals))
        wanted = None if self.object_kinds is None else [kind.lower() for kind in self.object_kinds]
        _check_known("goals", goals, GOALS)
        _check_known("rooms", self.rooms or (), ROOMS)
        _check_known("object_kinds", wanted or (), kinds)
        layout = Layout(
            goals=goals,
            rooms=None if self.rooms is None else tuple(self.rooms),
            receptacles=ranges["receptacles"],
            objects=ranges["objects"],
            object_kinds=None if wanted is None else tuple(kinds[kind] for kind in wanted),
            same_kind=self.same_kind or (FULL_SAME_KIND if full else 2),
            full=full,
        )
        low, high = layout.receptacles
        for goal in goals:
            if not layout.rooms_of(goal):
                raise UserError(f"environment.options.rooms: goal {goal} needs one of {', '.join(GOALS[goal].rooms)}")
            for name in layout.rooms_of(goal):
                least = len(ROOMS[name].always)
                most = least + sum(most for _, most in ROOMS[name].maybe.values())
                if not full and not least <= low <= high <= most:
                    raise UserError(f"environment.options.receptacles = {low}, {high}: a {name} has {least} to {most}")
                if not layout.kinds_of(name):
                    raise UserError(f"environment.options.object_kinds: none of them is found in a {name}")
        return layout

    @cached_property
    def _drawn(self) -> dict[Split, tuple[list[Task], Iterator[Task]]]:
        """Split -> its tasks made so far, and the iterator that makes more."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_drawn"}

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """Return the first ``count`` tasks of a split. No household occurs twice, and none is in two splits."""
        if split not in self._drawn:
            self._drawn[split] = ([], self._stream(split))
        tasks, stream = self._drawn[split]
        try:
            tasks += islice(stream, max(0, count - len(tasks)))
        except UserError:
            del self._drawn[split]  # an iterator that raised cannot continue, so the next call starts over
            raise
        if len(tasks) < count:
            generated = self.source == "generated"
            advice = "allow more receptacles, objects or object_kinds" if generated else "download more games"
            raise UserError(f"environment alfworld has {len(tasks)} {split} tasks, {count} were asked for; {advice}")
        return tasks[:count]

    def environment(self, task: Task) -> Environment:
        return AlfworldEnvironment(task, banner=self.banner, admissible_commands=self.admissible_commands)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """Return an expert's conversation in the task's prompt format, up to the command that wins the game.

        It has at most 100 commands, or four for each receptacle if that is more. The expert sees only text. ``noise``
        is the chance that a random admissible command (not "help") takes the place of the expert's next one. The expert
        reads the answer and continues from there.
        """
        shown = Demonstration(task, seed, banner=self.banner).play(noise)
        return tuple(shown.messages), Score(float(shown.won))

    def _stream(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of a split, from each of its parts in turn. Generated households never end.

        Demonstrations of real games come from ``valid_seen`` if evaluation does not use it, otherwise from the last
        training games. So a run trains on demonstrated games only if it asks for nearly all training games.
        """
        evaluated = {"households": ("unseen",), "both": ("seen", "unseen")}.get(self.eval_split, (self.eval_split,))
        real = self.source == "alfworld_data"
        if real:
            parts = tuple(f"valid_{part}" for part in evaluated) if split == "eval" else ("train",)
            if split == "warm_start" and self.eval_split == "households":
                parts = ("valid_seen",)
            last_first = split == "warm_start"  # a run trains on the first games
            streams = [real_tasks(part, self.layout.goals, last_first=last_first) for part in parts]
        else:
            parts = evaluated if split == "eval" else ("seen",)
            if self.eval_split == "households":
                parts = ("any",)
            streams = [self._draw_households(split, part) for part in parts]
        examples = self.examples
        if examples is None:
            examples = 2 if self.prompt == "react" else 0
        for tasks in zip_longest(*streams) if real else zip(*streams, strict=False):
            for part, task in zip(parts, tasks, strict=True):
                if task is None:
                    continue
                payload = dict(task.payload)  # holds the prompt format, so that a task looks the same in every process
                if self.prompt != "plain":
                    payload["prompt"] = self.prompt
                if examples:
                    payload["examples"] = play_examples(self.prompt, payload["goal"], examples)
                kind = task.kind if len(parts) == 1 else f"{task.kind}_{part.removeprefix('valid_')}"
                yield replace(task, kind=kind, payload=payload)

    def _draw_households(self, split: Split, part: str) -> Iterator[Task]:
        """Yield different solvable households of a split, in layouts of ``part``: seen, unseen or any."""
        keys: set[str] = set()
        fruitless = 0
        for index in count_from():
            if fruitless > _MAX_FRUITLESS_DRAWS:
                return
            fruitless += 1
            household = draw(self.layout, derive(self.seed, "alfworld", "household", index))
            if household is None or household.key in keys or split_of(household.key) != split:
                continue
            if part != "any" and part != ("seen" if layout_seen(household.layout_key) else "unseen"):
                continue
            keys.add(household.key)
            task = household_task(household)
            game = game_of(task)
            if not game.won(game.start) and Demonstration(task, seed=0).play().won:
                fruitless = 0
                yield task


def _check_known(option: str, values: Iterable[str], known: Iterable[str]) -> None:
    for value in values:
        if value not in known:
            raise UserError(f"environment.options.{option}: unknown {value!r}{nearest(value, known, list_all=True)}")
