"""Data sets of problems that are answered in one message: TRL's and verl's rows from JSONL, parquet or Hugging Face."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, overload

import pydantic
from pydantic import Field

from gleanrl.environments.dataset.files import FILES, Row, Source, open_source, positions
from gleanrl.environments.dataset.rows import at_path, content_of, demonstration_of, marked, prompt_of
from gleanrl.protocols import Environment, Observation, Split
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert, UserError

log = logging.getLogger(__name__)
_EVAL = "eval/"  # begins the ids of evaluation's own rows
NO_SCORE = "a data set has no score of its own: set reward.name (math, trl:..., verl:..., or a function of yours)"


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class DatasetTaskset:
    """The rows of a data set as tasks: their prompt is shown, all their other columns are the task's payload.

    A row is TRL's (``prompt``, a text or messages, and further columns) or verl's (``data_source``, ``prompt``,
    ``reward_model.ground_truth``, ``extra_info``). What an answer is worth is said by the run's reward.

    A row without an id gets a hash of its content, and the same row twice is one task. Its prompt alone decides its
    split, unless evaluation has rows of its own, whose prompts are then left out of the other splits, and whose ids
    begin with ``eval/``.

    Args:
        path: files (.jsonl, .json, .parquet; several, or a pattern), a folder of `save_to_disk`, or a Hugging Face id.
        split: of a Hugging Face data set.
        subset: of a Hugging Face data set, its configuration.
        load: further arguments of `datasets.load_dataset`, e.g. ``revision``.
        eval_path, eval_split: where evaluation's rows are, if they are others.
        eval_share: of the rows, held out for evaluation where it has none of its own.
        warm_start_share: of the rows, demonstrated and never trained on; None = 0.2 where there are solutions, or 0.
        prompt: column of the prompt. Dots lead into tables.
        solution: column of what an expert answers, for the warm start; None = ``solution`` or ``completion``.
        solution_format: what the expert says, with ``{solution}`` in it.
        id: column of a row's id, where it has one; "" = the hash, always.
        kind: column that says what sort of problem a row is; evaluation counts each for itself.
        drop: columns that no reward needs.
        system: system message, in place of the row's own.
        instruction: appended to each question.
        few_shot: questions and answers shown before, or a file of rows with prompt and solution.
    """

    path: str | list[str]
    split: str = "train"
    subset: str | None = None
    load: dict[str, Any] = Field(default_factory=dict)
    eval_path: str | list[str] | None = None
    eval_split: str | None = None
    eval_share: float = Field(default=0.1, ge=0.0, lt=1.0)
    warm_start_share: float | None = Field(default=None, ge=0.0, lt=1.0)
    prompt: str = "prompt"
    solution: str | None = None
    solution_format: str = "{solution}"
    id: str = "id"
    kind: str = "data_source"
    drop: list[str] = Field(default_factory=list)
    system: str | None = None
    instruction: str = ""
    few_shot: list[tuple[str, str]] | str = Field(default_factory=list)

    needs_reward: ClassVar[bool] = True  # a run is told so before it begins
    splits_apart: ClassVar[bool] = True  # no id is in two splits, and nobody reads every row again to see it

    def __post_init__(self) -> None:
        if self._held_out + (self.warm_start_share or 0.0) >= 1.0:
            raise ValueError(f"eval_share + warm_start_share = {self._held_out + (self.warm_start_share or 0.0):g}: "
                             "they leave no rows to train on")  # fmt: skip
        if "{solution}" not in self.solution_format:
            raise ValueError(f"solution_format = {self.solution_format!r}: it must hold {{solution}}")
        self._source(False)  # tell of what is missing now
        self._shots()

    def tasks(self, split: Split, count: int, without: Collection[int] = ()) -> Sequence[Task]:
        """``count`` tasks, none of them with a question that is in ``without`` (see `questions`)."""
        found = self.all_tasks(split, count + 1, without)
        if len(found) < count:
            mend = self._mend(split) if not found else f"; lower environment.{split}_tasks"
            own_eval = split == "eval" and self._own_eval
            raise UserError(f"data set {self._path(own_eval)} has {len(found)} rows for {split!r}, not {count}{mend}")
        if len(found) > count and split == "train":
            log.info("data set %s: its first %d rows for training; environment.train_tasks = more", self.path, count)
        return found[:count]

    def all_tasks(self, split: Split, most: int | None = None, without: Collection[int] = ()) -> Sequence[Task]:
        """The tasks of a split, or the first ``most`` of them. What is read of a large file is what it takes."""
        own_eval = split == "eval" and self._own_eval
        source, found = self._source(own_eval), positions()
        for position in self._distinct(source, split, without):
            if len(found) == most:
                break
            found.append(position)
        return _Tasks(self, source, found, own_eval)

    @property
    def shares(self) -> tuple[float, float] | None:
        """Of all questions there are, for evaluation and for the warm start; None where other rows decide."""
        first = next((row for _, row in self._source(False).scan()), None)
        return None if self._own_eval or first is None else self._shares(first)

    def questions(self, split: Split) -> frozenset[int]:
        """Those of a split, as numbers that mean the same in this process only. All rows are read, once."""
        return _questions(self, split)

    @property
    def version(self) -> str:
        """Changes with the files: what was made of their rows before is of no use then."""
        return " ".join(self._source(own).version for own in (False, True)[: 1 + self._own_eval])

    def environment(self, task: Task) -> Environment:
        return _Answer()

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """The row's solution. A single turn has no room for a random action before it: ``noise`` is unused."""
        columns = self._solutions()
        found = (demonstration_of(task.payload, name, self.solution_format) for name in columns)
        answer = next(filter(None, found), None)
        if answer is None:
            raise NoExpert(
                f"data set {self.path}: task {task.id} has no {' or '.join(map(repr, columns))} to demonstrate; name "
                "its column in environment.options.solution, or set warm_start.enabled = false"
            )
        return (*task.prompt, {"role": "assistant", "content": answer}), Score(1.0)

    # --- rows -------------------------------------------------------------------------------------
    @property
    def _own_eval(self) -> bool:
        return self.eval_path is not None or self.eval_split is not None

    @property
    def _held_out(self) -> float:
        return 0.0 if self._own_eval else self.eval_share

    def _path(self, own_eval: bool) -> str | list[str]:
        return self.eval_path if own_eval and self.eval_path is not None else self.path

    def _source(self, own_eval: bool) -> Source:
        split = self.eval_split if own_eval and self.eval_split is not None else self.split
        return open_source(self._path(own_eval), split, self.subset, json.dumps(self.load, sort_keys=True))

    def _solutions(self) -> tuple[str, ...]:
        return (self.solution,) if self.solution is not None else ("solution", "completion")

    def _mend(self, split: Split) -> str:
        if split == "warm_start":
            return (
                ": set environment.options.warm_start_share, and solution to the column that says the answer, "
                "or warm_start.enabled = false"
            )
        return ": raise environment.options.eval_share" if split == "eval" and not self._own_eval else ""

    def _asked(self, source: Source, split: Split) -> Iterator[tuple[int, Row, int, bool]]:
        """Each row with its position, its question as a number, and whether the split has it."""
        own_eval = split == "eval" and self._own_eval
        taken = self.questions("eval") if self._own_eval and not own_eval else frozenset()
        shares: tuple[float, float] | None = None
        for position, row in source.scan():
            shares = shares or self._shares(row)
            row = self._kept(row)
            place = marked(prompt_of(row, self.prompt, _Where(source, position)))
            number = _number(place)
            yield position, row, number, own_eval or (_split(place, *shares) == split and number not in taken)

    def _distinct(self, source: Source, split: Split, without: Collection[int]) -> Iterator[int]:
        """The position of each row of the split, each task once.

        Two rows of one id are looked for among those of all splits: whatever is asked for, an id means its first row.
        """
        own_eval = split == "eval" and self._own_eval
        seen: dict[int, tuple[int, int]] = {}  # id -> content and position
        for position, row, question, here in self._asked(source, split):
            here = here and question not in without
            if not here and self._own_id(row) is None:
                continue
            where = _Where(source, position)
            name, content = self._identity(row, where, own_eval)
            known = seen.setdefault(_number(name), (_number(content), position))
            if known[0] != _number(content):
                raise UserError(
                    f"{where}: its id {name!r} is also that of {source.where(known[1])}, which says something else; "
                    'set environment.options.id to a column that tells them apart, or to "" for a hash of the content'
                )
            if here and known[1] == position:
                yield position

    def _shares(self, first: Row) -> tuple[float, float]:
        """Of evaluation and of the warm start."""
        if self.warm_start_share is not None:
            return self._held_out, self.warm_start_share
        solved = any(demonstration_of(first, name, "{solution}") for name in self._solutions())
        return self._held_out, min(0.2, (1.0 - self._held_out) / 2) if solved else 0.0

    def _kept(self, row: Row) -> Row:
        return {key: value for key, value in row.items() if key not in self.drop} if self.drop else row

    def _own_id(self, row: Row) -> str | None:
        own = row.get(self.id) if self.id else None
        return None if own is None else str(own)

    def _identity(self, row: Row, where: Any, own_eval: bool) -> tuple[str, str]:
        """The task's id, and the hash of the row's content. Two files both count from 0: evaluation's ids say so."""
        content, own = content_of(row, self.id, where), self._own_id(row)
        if own is None:
            return content[:16], content
        if self._own_eval and not own_eval and own.startswith(_EVAL):
            raise UserError(f"{where}: its id {own!r} is one of evaluation's; set environment.options.id")
        return (_EVAL + own if own_eval else own), content

    # --- tasks ------------------------------------------------------------------------------------
    def _task(self, row: Row, where: Any, own_eval: bool) -> Task:
        row = self._kept(row)
        prompt = prompt_of(row, self.prompt, where)
        payload = {key: value for key, value in row.items() if key != self.prompt}
        if isinstance(row.get(self.prompt), str):
            payload["prompt"] = row[self.prompt]  # a function of TRL gets texts where the data set has texts
        kind = at_path(row, self.kind)
        name = self._identity(row, where, own_eval)[0]
        return Task(name, self._shown(prompt), payload, kind if isinstance(kind, str) else "")

    def _shown(self, prompt: tuple[Message, ...]) -> tuple[Message, ...]:
        opening = [message for message in prompt if message["role"] == "system"]
        rest = [message for message in prompt if message["role"] != "system"]
        if self.system is not None:
            opening = [Message(role="system", content=self.system)]
        last: Message = {**rest[-1], "content": rest[-1]["content"] + self.instruction}
        return (*opening, *self._shots(), *rest[:-1], last)

    def _shots(self) -> tuple[Message, ...]:
        pairs = _from_file(self.few_shot, self.prompt, self._solutions()) if isinstance(self.few_shot, str) else None
        shown: list[Message] = []
        for question, answer in self.few_shot if pairs is None else pairs:
            shown.append({"role": "user", "content": question + self.instruction})
            shown.append({"role": "assistant", "content": answer})
        return tuple(shown)


class _Tasks(Sequence[Task]):
    """Tasks whose rows are read when they are asked for."""

    def __init__(self, taskset: DatasetTaskset, source: Source, found: array[int], own_eval: bool) -> None:
        self._taskset, self._source, self._positions, self._own_eval = taskset, source, found, own_eval

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> _Tasks: ...
    def __getitem__(self, index: int | slice) -> Task | _Tasks:
        if isinstance(index, slice):
            return _Tasks(self._taskset, self._source, self._positions[index], self._own_eval)
        position = self._positions[index]
        return self._taskset._task(self._source.row(position), _Where(self._source, position), self._own_eval)


class _Answer:
    """One problem: the prompt is the task's own, and the first answer ends it."""

    async def reset(self) -> Observation:
        return Observation((), score=Score.failed(NO_SCORE))

    async def step(self, message: Message) -> Observation:
        return Observation((), done=True, score=Score.failed(NO_SCORE))

    async def close(self) -> None:
        pass


class _Where:
    """The name of a row, found out when a message needs it."""

    def __init__(self, source: Source, position: int) -> None:
        self._source, self._position = source, position

    def __str__(self) -> str:
        return self._source.where(self._position)


_known: dict[str, frozenset[int]] = {}


def _questions(taskset: DatasetTaskset, split: Split) -> frozenset[int]:
    key = f"{split} {taskset} {taskset.version}"
    if key not in _known:
        source = taskset._source(split == "eval" and taskset._own_eval)
        _known[key] = frozenset(question for _, _, question, here in taskset._asked(source, split) if here)
    return _known[key]


@lru_cache(maxsize=4)
def _from_file(path: str, prompt: str, solutions: tuple[str, ...]) -> Sequence[tuple[str, str]]:
    if not path.endswith(FILES):
        raise UserError(f"environment.options.few_shot: {path} is none of {', '.join(FILES)}")
    source = open_source(path, "train", None, "{}")
    pairs = []
    for position, row in source.scan():
        answer = next(filter(None, (demonstration_of(row, name, "{solution}") for name in solutions)), None)
        if answer is None:
            raise UserError(f"{source.where(position)} has no {' or '.join(map(repr, solutions))} to show")
        pairs.append((prompt_of(row, prompt, source.where(position))[-1]["content"], answer))
    return pairs


def _number(mark: str) -> int:
    return hash(mark)


def _split(mark: str, evaluation: float, warm_start: float) -> Split:
    """Of a prompt: the shares of evaluation lie at the one end and those of the warm start at the other."""
    place = int(mark[:8], 16) / 2**32
    return "eval" if place < evaluation else "warm_start" if place >= 1.0 - warm_start else "train"
