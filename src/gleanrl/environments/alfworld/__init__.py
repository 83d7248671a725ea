"""ALFWorld's engine on generated households, or on the real games where ALFWORLD_DATA has them.

Results on generated households are to be called "ALFWorld engine, generated households", never ALFWorld
scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import count as count_from
from itertools import islice, zip_longest
from typing import Any, ClassVar, Literal

from gleanrl.environments.alfworld.engine import NOTHING
from gleanrl.environments.alfworld.episode import AlfworldEnvironment, Demonstration
from gleanrl.environments.alfworld.examples import played_examples
from gleanrl.environments.alfworld.games import game_of, household_task, real_tasks
from gleanrl.environments.alfworld.households import draw
from gleanrl.environments.alfworld.options import EVAL_SPLITS, OPTIONS, examples_wanted, layout_of, one_of, unknown
from gleanrl.environments.alfworld.parts import SHARES, belongs, generated_parts, real_parts
from gleanrl.environments.alfworld.prompts import PROMPTS
from gleanrl.protocols import Environment, Split
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.seeding import derive

__all__ = ["AlfworldEnvironment", "AlfworldTaskset"]

_FRUITLESS_DRAWS = 3000  # in a row without a new household: the layout has no more of them


class AlfworldTaskset:
    """Households to play, each proved solvable by an expert that plays it from text.

    A household belongs to a split by a hash of what it is (numbering and wording aside), so that no two
    seeds, options or runs ever put the same household into different splits.

    Args:
        goals: kinds of goals, of put, heat, cool, clean, examine, put_two, or by ALFWorld's names.
        size: ``small``, as ``receptacles`` and ``objects`` say, or ``full``: as large as the rooms of the real games.
        receptacles, objects: how many a small household has, a number or a range; (5, 6) and (4, 6).
        seed: redraws all households.
        rooms: of kitchen, bathroom, bedroom, living_room; None takes the usual room of each goal (the
            kitchen; for examine the bedroom) for small households, every room of each goal for full ones.
        object_kinds: the only kinds of objects, as "apple"; None for all that the room usually has.
        same_kind: most objects of one kind in a household; 2, or 3 in full ones.
        source: ``generated``, or ``alfworld_data`` for the games under ALFWORLD_DATA (then what a household is
            like does not count).
        eval_split: what evaluation plays. ``households``: ones that training does not play, in any room (with
            alfworld_data, valid_unseen). ``seen``: such ones in rooms of the layouts that training plays too
            (valid_seen). ``unseen``: in rooms of layouts that it never plays (valid_unseen). ``both``: seen and
            unseen in turn, each a kind of task.
        prompt: ``plain``, ``react`` or ``admissible``: how a game is shown and answered (see `prompts`).
        examples: games played by the expert that stand before each game; None for 2 with react, else 0.
        banner: keep TextWorld's welcome line.
        admissible_commands: list them in every observation's ``info``.
    """

    named_by_content: ClassVar[bool] = True  # two tasks of one id are one household, however it is shown

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

    @property
    def phrases(self) -> tuple[str, ...]:
        """What the game says that a demonstration may never show."""
        return (NOTHING,)

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
        again = split == "warm_start"  # games of train, but not the first ones, which a run trains on
        streams = [
            real_tasks(part, goals, last_first=again) if real else self._households(split, part) for part in parts
        ]
        for tasks in zip_longest(*streams) if real else zip(*streams, strict=False):
            for part, task in zip(parts, tasks, strict=True):
                if task is not None:
                    kind = task.kind if len(parts) == 1 else f"{task.kind}_{part.removeprefix('valid_')}"
                    yield replace(task, kind=kind, payload={**task.payload, **self._shown_as(task)})

    def _shown_as(self, task: Task) -> dict[str, Any]:
        """What of the prompt format stands in a task's payload, so that it is shown alike wherever it is played."""
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
            if fruitless > _FRUITLESS_DRAWS:
                return

    def _solvable(self, task: Task) -> bool:
        game = game_of(task)
        return not game.won(game.start) and Demonstration(task, seed=0).play().won


def _require_packages() -> None:
    for package in ("alfworld", "textworld", "fast_downward"):
        if find_spec(package) is None:
            raise UserError(f"environment alfworld needs the package {package}: pip install 'gleanrl[alfworld]'")
