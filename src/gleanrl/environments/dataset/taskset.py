"""Data sets of problems that are answered in one message: TRL's and verl's rows from JSONL, parquet or Hugging Face.

`DatasetTaskset` is the environment ``dataset`` of the settings; `files` reads the rows. The run's reward scores the
answers, since a data set has no score of its own.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

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
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
NO_SCORE = "a data set has no score of its own: set reward.name (math, trl:..., verl:..., or your own function)"
_questions: dict[str, frozenset[int]] = {}  # what `DatasetTaskset.questions` has read, by taskset, split and version


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
        eval_path, eval_split: place of evaluation's own rows; None = it has none.
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
        shares = (0.0 if self._own_eval else self.eval_share) + (self.warm_start_share or 0.0)
        if shares >= 1.0:
            raise ValueError(f"eval_share + warm_start_share = {shares:g}: they leave no rows to train on")
        if "{solution}" not in self.solution_format:
            raise ValueError(f"solution_format = {self.solution_format!r}: it must hold {{solution}}")
        self._source(False)  # raises now for what is missing
        _ = self._few_shot_messages

    def tasks(self, split: Split, count: int, without: Collection[int] = ()) -> Sequence[Task]:
        """``count`` tasks, without those whose question is in ``without`` (see `questions`)."""
        found = self.all_tasks(split, count + 1, without)
        own_eval = split == "eval" and self._own_eval
        if len(found) < count:
            advice = f"; lower environment.{split}_tasks"
            if not found and split == "warm_start":
                advice = (
                    ": set environment.options.warm_start_share, and solution to the column that says the answer, "
                    "or warm_start.enabled = false"
                )
            elif not found:
                advice = ": raise environment.options.eval_share" if split == "eval" and not own_eval else ""
            path = self.eval_path if own_eval and self.eval_path is not None else self.path
            raise UserError(f"data set {path} has {len(found)} rows for {split!r}, not {count}{advice}")
        if len(found) > count and split == "train":
            log.info("data set %s: its first %d rows for training; environment.train_tasks = more", self.path, count)
        return found[:count]

    def all_tasks(self, split: Split, most: int | None = None, without: Collection[int] = ()) -> Sequence[Task]:
        """The tasks of a split, or the first ``most`` of them. Reads no more of a large file than that needs.

        Raises:
            UserError: a row is malformed, or two different rows have one id. Ids are compared across all splits, so
                that an id means the same row whichever split is read.
        """
        own_eval = split == "eval" and self._own_eval
        source, positions = self._source(own_eval), array("q")
        seen: dict[int, tuple[int, int]] = {}  # hash of an id -> hash of its content, position
        for position, row, question, in_split in self._scan(source, split):
            in_split = in_split and question not in without
            if not in_split and (not self.id or row.get(self.id) is None):
                continue  # ids that are hashes cannot clash
            task_id, content = self._identify(source, position, row, own_eval)
            first = seen.setdefault(hash(task_id), (hash(content), position))
            if first[0] != hash(content):
                raise UserError(
                    f"{source.where(position)}: its id {task_id!r} is also that of {source.where(first[1])}, which is "
                    'another row; set environment.options.id to a column that tells them apart, or to "" for a hash'
                )
            if in_split and first[1] == position:
                if len(positions) == most:
                    break
                positions.append(position)
        return _Tasks(self, source, positions, own_eval)

    @property
    def shares(self) -> tuple[float, float] | None:
        """The shares of all questions for evaluation and for the warm start; None if evaluation has rows of its own."""
        first = next((row for _, row in self._source(False).scan()), None)
        return None if self._own_eval or first is None else self._shares(first)

    def questions(self, split: Split) -> frozenset[int]:
        """The questions of a split as hashes, which are valid in this process only. Reads all rows, once."""
        key = f"{split} {self} {self.version}"
        if key not in _questions:
            source = self._source(split == "eval" and self._own_eval)
            _questions[key] = frozenset(question for _, _, question, in_split in self._scan(source, split) if in_split)
        return _questions[key]

    @property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Changes with the files, so that caches of what was made of their rows are not used again."""
        version = self._source(False).version
        return f"{version} {self._source(True).version}" if self._own_eval else version

    def environment(self, task: Task) -> Environment:
        return _Answer()

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """The row's solution. A single turn has no room for a random action before it: ``noise`` is unused."""
        solution = _find_solution(task.payload, self._solutions)
        if solution is None:
            raise NoExpert(
                f"data set {self.path}: task {task.id} has no {' or '.join(map(repr, self._solutions))} to "
                "demonstrate; name its column in environment.options.solution, or set warm_start.enabled = false"
            )
        answer: Message = {"role": "assistant", "content": self.solution_format.replace("{solution}", solution)}
        return (*task.prompt, answer), Score(1.0)

    # --- rows -------------------------------------------------------------------------------------
    @property
    def _own_eval(self) -> bool:
        return self.eval_path is not None or self.eval_split is not None

    @property
    def _solutions(self) -> tuple[str, ...]:
        return (self.solution,) if self.solution is not None else ("solution", "completion")

    def _source(self, own_eval: bool) -> Source:
        path, split = self.path, self.split
        if own_eval:
            path = path if self.eval_path is None else self.eval_path
            split = split if self.eval_split is None else self.eval_split
        return open_source(path, split, self.subset, json.dumps(self.load, sort_keys=True))

    def _scan(self, source: Source, split: Split) -> Iterator[tuple[int, Row, int, bool]]:
        """Each row with its position, the hash of its question, and whether it is in the split.

        A hash of the prompt decides: evaluation takes the low end of the hashes, the warm start the high end.
        """
        own_eval = split == "eval" and self._own_eval
        taken = self.questions("eval") if self._own_eval and not own_eval else frozenset()
        shares: tuple[float, float] | None = None
        for position, row in source.scan():
            shares = shares or self._shares(row)
            row = {name: value for name, value in row.items() if name not in self.drop}
            mark = fingerprint(_CANONICAL.encode(_read_prompt(source, position, row, self.prompt)))
            question, place = hash(mark), int(mark[:8], 16) / 2**32
            if own_eval:
                yield position, row, question, True
                continue
            found = "train"
            if place < shares[0]:
                found = "eval"
            elif place >= 1.0 - shares[1]:
                found = "warm_start"
            yield position, row, question, found == split and question not in taken

    def _shares(self, first: Row) -> tuple[float, float]:
        """The shares of evaluation and of the warm start."""
        evaluation = 0.0 if self._own_eval else self.eval_share
        if self.warm_start_share is not None:
            return evaluation, self.warm_start_share
        solved = _find_solution(first, self._solutions) is not None
        return evaluation, min(0.2, (1.0 - evaluation) / 2) if solved else 0.0

    def _identify(self, source: Source, position: int, row: Row, own_eval: bool) -> tuple[str, str]:
        """The task's id, and a hash of the row except its id, independent of column order and file format.

        Ids of evaluation's own rows get a prefix, since two files may both count from 0.

        Raises:
            UserError: a column holds what a task cannot carry (bytes, images, dates).
        """
        columns = {key: value for key, value in row.items() if key != self.id}
        try:
            content = fingerprint(_CANONICAL.encode(columns))
        except TypeError:
            for name, value in columns.items():
                try:
                    _CANONICAL.encode(value)
                except TypeError:
                    raise UserError(
                        f"{source.where(position)}: {name} is {_shorten(value)}, which JSON cannot hold; leave it out "
                        f"by environment.options.drop = [{name!r}]"
                    ) from None
            raise
        own = row.get(self.id) if self.id else None
        if own is None:
            return content[:16], content
        own = str(own)
        if own_eval:
            return _EVAL + own, content
        if self._own_eval and own.startswith(_EVAL):
            raise UserError(
                f"{source.where(position)}: its id {own!r} is one of evaluation's; set environment.options.id"
            )
        return own, content

    @cached_property
    def _few_shot_messages(self) -> tuple[Message, ...]:
        examples: list[tuple[str, str]] = []
        if isinstance(self.few_shot, list):
            examples = self.few_shot
        elif not self.few_shot.endswith(FILES):
            raise UserError(f"environment.options.few_shot: {self.few_shot} is none of {', '.join(FILES)}")
        else:
            source = open_source(self.few_shot, "train", None, "{}")
            for position, row in source.scan():
                answer = _find_solution(row, self._solutions)
                if answer is None:
                    raise UserError(
                        f"{source.where(position)} has no {' or '.join(map(repr, self._solutions))} to show"
                    )
                examples.append((_read_prompt(source, position, row, self.prompt)[-1]["content"], answer))
        messages: list[Message] = []
        for question, answer in examples:
            messages.append({"role": "user", "content": question + self.instruction})
            messages.append({"role": "assistant", "content": answer})
        return tuple(messages)


@dataclass(frozen=True, eq=False)
class _Tasks(Sequence[Task]):
    """Tasks whose rows are read when the task is accessed."""

    taskset: DatasetTaskset
    source: Source
    positions: array[int]
    own_eval: bool

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: Any) -> Any:
        """A task, or for a slice the tasks of these rows."""
        if isinstance(index, slice):
            return replace(self, positions=self.positions[index])
        taskset, position = self.taskset, self.positions[index]
        row = {name: value for name, value in self.source.row(position).items() if name not in taskset.drop}
        messages = _read_prompt(self.source, position, row, taskset.prompt)
        payload = {name: value for name, value in row.items() if name != taskset.prompt}
        if isinstance(row.get(taskset.prompt), str):
            payload["prompt"] = row[taskset.prompt]  # a function of TRL gets texts where the data set has texts
        system = [message for message in messages if message["role"] == "system"]
        if taskset.system is not None:
            system = [Message(role="system", content=taskset.system)]
        *rest, last = (message for message in messages if message["role"] != "system")
        last = cast(Message, {**last, "content": last["content"] + taskset.instruction})
        kind = _at_path(row, taskset.kind)
        return Task(
            id=taskset._identify(self.source, position, row, self.own_eval)[0],
            prompt=(*system, *taskset._few_shot_messages, *rest, last),
            payload=payload,
            kind=kind if isinstance(kind, str) else "",
        )


class _Answer(Environment):
    """One problem: the prompt is the task's own, and the first answer ends it."""

    async def reset(self) -> Observation:
        return Observation((), score=Score.failed(NO_SCORE))

    async def step(self, message: Message) -> Observation:
        return Observation((), done=True, score=Score.failed(NO_SCORE))


def _at_path(row: Mapping[str, Any], path: str) -> Any:
    """The value under a column, or at a dotted path into tables; None if there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _read_prompt(source: Source, position: int, row: Mapping[str, Any], column: str) -> tuple[Message, ...]:
    """The messages of a row's question.

    Raises:
        UserError: the column is missing, or is neither a text nor messages that leave the answer to the model.
    """
    prompt = _at_path(row, column)
    if prompt is None:
        texts = [name for name, value in row.items() if isinstance(value, str | list)]
        hint = nearest(column, texts)
        hint = hint or f"; set environment.options.prompt to one of {', '.join(texts) or 'its columns'}"
        raise UserError(f"{source.where(position)} has no {column!r}{hint}")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError(f"{source.where(position)}: {column} is empty")
        return (Message(role="user", content=prompt),)
    messages: list[Message] = []
    problem = None
    if not isinstance(prompt, Sequence) or not prompt:
        prompt, problem = (), f" is {_shorten(prompt)}, neither a text nor messages"
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            problem = f"[{index}] is {_shorten(message)}, not a message of role and content"
        elif message.get("role") not in _ROLES:
            problem = f"[{index}].role = {message.get('role')!r}: none of {', '.join(_ROLES)}"
        elif not isinstance(message.get("content"), str):
            problem = f"[{index}].content is {_shorten(message.get('content'))}, not a text"
        if problem:
            break
        messages.append(cast(Message, {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}))
    if messages and not problem and messages[-1]["role"] == "assistant":
        problem = " ends with the assistant's message; the question ends with the user's"
    if problem:
        raise UserError(f"{source.where(position)}: {column}{problem}")
    return tuple(messages)


def _find_solution(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """The first expert's answer among ``columns``, or None. Of a column of messages, the last one counts."""
    for column in columns:
        value = _at_path(row, column)
        if isinstance(value, list) and value and isinstance(value[-1], Mapping):
            value = value[-1].get("content")
        if value is not None and not isinstance(value, Mapping | list) and str(value).strip():
            return str(value)
    return None


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
