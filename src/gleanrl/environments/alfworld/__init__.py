"""The environment ``alfworld``: household tasks in text, in generated households or in ALFWorld's own games.

`AlfworldTaskset` is the class behind the setting ``environment.name = "alfworld"``. `households` draws random
households, and `games` returns the game of a task. `engine` runs a game, using `pddl` for its rules and `text` for its
wording. `episode` and `prompts` present a game to a model, and `expert` solves it.

Results on generated households are not comparable with published ALFWorld scores. Report them as "ALFWorld engine,
generated households".
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
_MAX_FRUITLESS_DRAWS = 3000  # a layout counts as exhausted after this many draws in a row without a new household
_ALIASES: dict[str, str] = {}  # ALFWorld's name of a goal, with and without "_in_recep" -> key in `GOALS`
for _name, _goal in GOALS.items():
    _ALIASES[_goal.library] = _ALIASES[_goal.library.removesuffix("_in_recep")] = _name


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class AlfworldTaskset(Taskset):
    """Makes tasks from generated households or from ALFWorld's own games.

    A generated household becomes a task only if an expert that sees only the game's text has won it. A hash of the
    household, which leaves out its numbering and wording, decides its split. So a household is in the same split for
    all seeds, options and runs.
    """

    goals: Sequence[str] = Field(default=("put",), min_length=1)
    """Kinds of goals: put, heat, cool, clean, examine, put_two, or ALFWorld's names of these kinds."""
    size: Literal["small", "full"] = "small"
    """``small`` = households with as many receptacles and objects as the next two options say; ``full`` = households as
    large as those of ALFWorld's own games."""
    receptacles: int | tuple[int, int] | None = None
    """Number of receptacles in a small household, a number or a range (least, most). None = 5 to 6."""
    objects: int | tuple[int, int] | None = None
    """Number of objects in a small household, a number or a range (least, most). None = 4 to 6."""
    seed: int = 0
    """Seed with which households are drawn."""
    rooms: Sequence[str] | None = Field(default=None, min_length=1)
    """Rooms to use, among kitchen, bathroom, bedroom, living_room. None = for small households the usual room of each
    goal (the kitchen; for examine the bedroom), for full households every room of each goal."""
    object_kinds: Sequence[str] | None = Field(default=None, min_length=1)
    """The only kinds of objects to use, such as "apple"; None = all kinds that the room usually has."""
    same_kind: int | None = Field(default=None, ge=1)
    """Largest number of objects of one kind in a household; None = 2, or 3 in full households."""
    source: Literal["generated", "alfworld_data"] = "generated"
    """``generated`` = random households. ``alfworld_data`` = the games in the folder that the environment variable
    ALFWORLD_DATA names; the options that describe households then have no effect, except ``goals``."""
    eval_split: EvalSplit = "households"
    """The households that evaluation plays. Training never plays them. ``households`` = in any room (with
    alfworld_data: valid_unseen). ``seen`` = in rooms with layouts (kinds and numbers of furniture) that training plays
    too (valid_seen). ``unseen`` = in rooms of other layouts (valid_unseen). ``both`` = seen and unseen in turn,
    reported as separate kinds of tasks."""
    prompt: Literal["plain", "react", "admissible"] = "plain"
    """The format in which a model sees the game and answers: ``plain``, ``react`` or ``admissible`` (see `prompts`)."""
    examples: int | None = Field(default=None, ge=0)
    """Number of games played by the expert that the first message shows before the task's own game. Only ``react``
    allows any. None = 2 with ``react``, else 0."""
    banner: bool = False
    """Whether the first message begins with TextWorld's welcome line."""
    admissible_commands: bool = False
    """Whether the ``info`` of every observation lists the admissible commands."""

    has_expert = True
    phrases = (NOTHING,)
    named_by_content = True  # a task's id is a hash of its household and the same for every prompt format

    def __post_init__(self) -> None:
        for package in ("alfworld", "textworld", "fast_downward"):
            if find_spec(package) is None:
                raise UserError(f"environment alfworld needs the package {package}: pip install 'gleanrl[alfworld]'")
        if self.examples and self.prompt != "react":
            raise UserError(f"environment.options.examples: prompt = {self.prompt!r} has no place for them; use react")
        self.layout  # noqa: B018 - computed here so that wrong options are reported now

    @cached_property
    def layout(self) -> Layout:
        """The options that describe generated households, with their defaults filled in.

        Raises:
            UserError: an option names something unknown, or two options contradict each other.
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
        kinds: dict[str, str] = {}  # lower-case name of a kind of object -> its name in alfworld
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
        if self.source == "alfworld_data":
            return layout  # not checked further, because only the goals are used with alfworld_data
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
        """For each split, the tasks made so far and the iterator that makes more.

        Copies for worker processes leave this out, because the iterators cannot be pickled.
        """
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_drawn"}

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """Return the first ``count`` tasks of a split. No household occurs twice, and none is in two splits.

        Raises:
            UserError: there are fewer tasks, or the files of ALFWorld's own games cannot be read.
        """
        if split not in self._drawn:
            self._drawn[split] = ([], self._stream(split))
        tasks, stream = self._drawn[split]
        try:
            tasks += islice(stream, max(0, count - len(tasks)))
        except UserError:
            # A generator that has raised cannot continue, so the next call makes a new one.
            del self._drawn[split]
            raise
        if len(tasks) < count:
            generated = self.source == "generated"
            advice = "allow more receptacles, objects or object_kinds" if generated else "download more games"
            raise UserError(f"environment alfworld has {len(tasks)} {split} tasks, {count} were asked for; {advice}")
        return tasks[:count]

    def environment(self, task: Task) -> Environment:
        return AlfworldEnvironment(task, banner=self.banner, admissible_commands=self.admissible_commands)

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """Let the expert play ``task``. Returns the conversation in the task's prompt format, and 1 as score if it has
        won, else 0.

        The conversation ends with the command that wins the game. If the expert does not win, it ends after 100
        commands, or four for each receptacle if that is more. The expert sees only text.

        At each turn, with probability ``noise``, a random admissible command other than "help" replaces the expert's
        command. The expert reads the game's answer to it and continues from there.

        Raises:
            NoExpert: the expert cannot read the goal of the task.
        """
        shown = Demonstration(task, seed, banner=self.banner).play(noise)
        return tuple(shown.messages), Score(float(shown.won))

    def _stream(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of a split. If it has two parts (seen and unseen households), they alternate.

        Of ALFWorld's own games, demonstrations use ``valid_seen`` if evaluation does not play that. Otherwise they use
        the training games, starting with the last ones, while training starts with the first. So training plays a
        demonstrated game only if a run asks for nearly all of these games.
        """
        evaluated = {"households": ("unseen",), "both": ("seen", "unseen")}.get(self.eval_split, (self.eval_split,))
        real = self.source == "alfworld_data"
        if real:
            parts = tuple(f"valid_{part}" for part in evaluated) if split == "eval" else ("train",)
            if split == "warm_start" and "seen" not in evaluated:
                parts = ("valid_seen",)
            # Training plays the first games, so demonstrations begin with the last ones.
            last_first = split == "warm_start"
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
                # The payload includes the prompt format, so that an environment in any process shows the task alike.
                payload = dict(task.payload)
                if self.prompt != "plain":
                    payload["prompt"] = self.prompt
                if examples:
                    payload["examples"] = play_examples(self.prompt, payload["goal"], examples)
                kind = task.kind if len(parts) == 1 else f"{task.kind}_{part.removeprefix('valid_')}"
                yield replace(task, kind=kind, payload=payload)

    def _draw_households(self, split: Split, part: str) -> Iterator[Task]:
        """Yield tasks of distinct, solvable households of ``split``, until many draws in a row give no new one.

        ``part`` selects the layouts of their rooms: ``seen`` (training may play them), ``unseen`` (training never plays
        them) or ``any``.
        """
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
