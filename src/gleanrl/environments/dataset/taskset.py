"""Data sets of problems that are answered in one message: TRL's and verl's rows from JSONL, parquet or Hugging Face.

`DatasetTaskset` is the environment ``dataset`` of the settings; `files` reads the rows. The run's reward scores the
answers, since a data set has no score of its own.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast, overload

import pydantic
from pydantic import Field

from gleanrl.environments.dataset.files import FILES, Row, Source, open_source
from gleanrl.environments.splits import fingerprint
from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.text import nearest

log = logging.getLogger(__name__)
_EVAL = "eval/"  # prefix of the ids of evaluation's own rows
_ROLES = ("system", "user", "assistant", "tool")
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_MISSING = object()
NO_SCORE = "a data set has no score of its own: set reward.name (math, trl:..., verl:..., or your own function)"


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class DatasetTaskset(Taskset):
    """The rows of a data set as tasks: the model sees the prompt, and all other columns are the task's payload.

    A row is TRL's (``prompt``, a text or messages, and further columns) or verl's (``data_source``, ``prompt``,
    ``reward_model.ground_truth``, ``extra_info``). The run's reward scores the answers.

    The id of a row without one is a hash of its content, so that equal rows are one task. The prompt alone decides the
    split. If evaluation has rows of its own, their prompts are left out of the other splits, and their ids begin with
    ``eval/``.

    Args:
        path: files (.jsonl, .json, .parquet; several, or a pattern), a folder of `save_to_disk`, or a Hugging Face id.
        split: of a Hugging Face data set.
        subset: of a Hugging Face data set, its configuration.
        load: further arguments of `datasets.load_dataset`, e.g. ``revision``.
        eval_path, eval_split: where evaluation's own rows are; None = it has none.
        eval_share: share of the rows held out for evaluation if it has none of its own.
        warm_start_share: share of the rows that are demonstrated, never trained on; None = 0.2 with solutions, else 0.
        prompt: column of the prompt. Dots lead into tables.
        solution: column with an expert's answer, for the warm start; None = ``solution`` or ``completion``.
        solution_format: the expert's message, with ``{solution}`` in it.
        id: column of a row's id, where it has one; "" = always the hash.
        kind: column with the kind of problem; evaluation reports each kind separately.
        drop: columns that no reward needs.
        system: system message, in place of the row's own.
        instruction: appended to each question.
        few_shot: questions and answers shown before the question, or a file of rows with prompt and solution.
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

    has_expert = True
    needs_reward = True  # a run without a reward is refused at its start
    splits_apart = True  # no id is in two splits, so that no check has to read every row again

    def __post_init__(self) -> None:
        if self._held_out + (self.warm_start_share or 0.0) >= 1.0:
            raise ValueError(f"eval_share + warm_start_share = {self._held_out + (self.warm_start_share or 0.0):g}: "
                             "they leave no rows to train on")  # fmt: skip
        if "{solution}" not in self.solution_format:
            raise ValueError(f"solution_format = {self.solution_format!r}: it must hold {{solution}}")
        self._source(False)  # raises now for what is missing
        self._shots()

    def tasks(self, split: Split, count: int, without: Collection[int] = ()) -> Sequence[Task]:
        """``count`` tasks, without those whose question is in ``without`` (see `questions`)."""
        found = self.all_tasks(split, count + 1, without)
        if len(found) < count:
            fix = self._fix(split) if not found else f"; lower environment.{split}_tasks"
            own_eval = split == "eval" and self._own_eval
            raise UserError(f"data set {self._path(own_eval)} has {len(found)} rows for {split!r}, not {count}{fix}")
        if len(found) > count and split == "train":
            log.info("data set %s: its first %d rows for training; environment.train_tasks = more", self.path, count)
        return found[:count]

    def all_tasks(self, split: Split, most: int | None = None, without: Collection[int] = ()) -> Sequence[Task]:
        """The tasks of a split, or the first ``most`` of them. Reads no more of a large file than that needs."""
        own_eval = split == "eval" and self._own_eval
        source, found = self._source(own_eval), array("q")
        for position in self._distinct(source, split, without):
            if len(found) == most:
                break
            found.append(position)
        return _Tasks(self, source, found, own_eval)

    @property
    def shares(self) -> tuple[float, float] | None:
        """The shares of all questions for evaluation and for the warm start; None if evaluation has rows of its own."""
        first = next((row for _, row in self._source(False).scan()), None)
        return None if self._own_eval or first is None else self._shares(first)

    def questions(self, split: Split) -> frozenset[int]:
        """The questions of a split as hashes, which are valid in this process only. Reads all rows, once."""
        return _questions(self, split)

    @property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Changes with the files, so that caches of what was made of their rows are not used again."""
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

    def _fix(self, split: Split) -> str:
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
            place = _prompt_hash(prompt_of(row, self.prompt, _Where(source, position)))
            number = _number(place)
            yield position, row, number, own_eval or (_split(place, *shares) == split and number not in taken)

    def _distinct(self, source: Source, split: Split, without: Collection[int]) -> Iterator[int]:
        """The position of each row of the split, each task once.

        Ids are compared across all splits, so that an id means the same row whichever split is read.
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
                    f"{where}: its id {name!r} is also that of {source.where(known[1])}, which is another row; "
                    'set environment.options.id to a column that tells them apart, or to "" for a hash of the content'
                )
            if here and known[1] == position:
                yield position

    def _shares(self, first: Row) -> tuple[float, float]:
        """The shares of evaluation and of the warm start."""
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
        """The task's id and the hash of the row's content.

        Ids of evaluation's own rows get a prefix, since two files may both count from 0.
        """
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
    """Tasks whose rows are read when the task is accessed."""

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


class _Answer(Environment):
    """One problem: the prompt is the task's own, and the first answer ends it."""

    async def reset(self) -> Observation:
        return Observation((), score=Score.failed(NO_SCORE))

    async def step(self, message: Message) -> Observation:
        return Observation((), done=True, score=Score.failed(NO_SCORE))


class _Where:
    """The name of a row, computed only if a message needs it."""

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
    """The split of a prompt: evaluation takes the low end of the hashes, the warm start the high end."""
    place = int(mark[:8], 16) / 2**32
    return "eval" if place < evaluation else "warm_start" if place >= 1.0 - warm_start else "train"


# --- one row: its prompt, its identity, its solution ---------------------------------------------------------
def at_path(row: Mapping[str, Any], path: str) -> Any:
    """The value under a column, or at a dotted path into tables; None if there is none."""
    value: Any = row.get(path, _MISSING)
    if value is not _MISSING:
        return value
    value = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def prompt_of(row: Mapping[str, Any], column: str, where: object) -> tuple[Message, ...]:
    """The messages of the question. ``where`` names the row in errors.

    Raises:
        UserError: the column is missing, or is neither a text nor messages that leave the answer to the model.
    """
    given = at_path(row, column)
    if given is None:
        texts = [name for name, value in row.items() if isinstance(value, str | list)]
        fix = (
            nearest(column, texts) or f"; set environment.options.prompt to one of {', '.join(texts) or 'its columns'}"
        )
        raise UserError(f"{where} has no {column!r}{fix}")
    if isinstance(given, str):
        if not given.strip():
            raise UserError(f"{where}: {column} is empty")
        return (Message(role="user", content=given),)
    if not isinstance(given, Sequence) or not given:
        raise UserError(f"{where}: {column} is {_shown(given)}, neither a text nor messages")
    messages = tuple(_message(one, where, f"{column}[{index}]") for index, one in enumerate(given))
    if messages[-1]["role"] == "assistant":
        raise UserError(f"{where}: {column} ends with the assistant's message; the question ends with the user's")
    return messages


def _message(given: Any, where: object, name: str) -> Message:
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: {name} is {_shown(given)}, not a message of role and content")
    if given.get("role") not in _ROLES:
        raise UserError(f"{where}: {name}.role = {given.get('role')!r}: none of {', '.join(_ROLES)}")
    if not isinstance(given.get("content"), str):
        raise UserError(f"{where}: {name}.content is {_shown(given.get('content'))}, not a text")
    known = ("role", "content", "name", "tool_calls", "tool_call_id")
    return cast(Message, {key: given[key] for key in known if given.get(key) is not None})


def content_of(row: Mapping[str, Any], without: str, where: object) -> str:
    """A hash of the whole row except its id, independent of column order and file format.

    Raises:
        UserError: a column holds what a task cannot carry (bytes, images, dates).
    """
    rest = {key: value for key, value in row.items() if key != without}
    try:
        return fingerprint(_CANONICAL.encode(rest))
    except TypeError:
        name = next(key for key, value in rest.items() if not _is_json(value))
        raise UserError(
            f"{where}: {name} is {_shown(rest[name])}, which JSON cannot hold; leave it out by "
            f"environment.options.drop = [{name!r}]"
        ) from None


def _prompt_hash(prompt: Sequence[Message]) -> str:
    """A hash of the question, which decides the split."""
    return fingerprint(_CANONICAL.encode(prompt))


def demonstration_of(row: Mapping[str, Any], column: str, form: str) -> str | None:
    """An expert's answer, or None if the row has none. Of a column of messages, the last one counts."""
    value = at_path(row, column)
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    if value is None or isinstance(value, Mapping | list) or not str(value).strip():
        return None
    return form.replace("{solution}", str(value))


def _is_json(value: Any) -> bool:
    try:
        _CANONICAL.encode(value)
    except TypeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
