"""Makes tasks from a data set of problems that are answered in one message. Rows have TRL's or verl's format.

`DatasetTaskset` is the environment ``dataset`` of the settings; `files` reads the rows from JSONL, JSON, parquet or
Hugging Face. The run's reward scores the answers, because a data set does not contain scores.
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
_EVAL = "eval/"  # prefix of task ids that come from the id column of a separate evaluation set
_ROLES = ("system", "user", "assistant", "tool")
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
NO_SCORE = "a data set has no score of its own: set reward.name (math, trl:..., verl:..., or your own function)"
# Cache of `DatasetTaskset.questions`. A key contains the split, the taskset's options and the version of its files.
_questions: dict[str, frozenset[int]] = {}


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class DatasetTaskset(Taskset):
    """Turns the rows of a data set into tasks: the model sees the prompt, and all other columns are the task's payload.

    A row has TRL's format (``prompt``, a text or messages, and further columns) or verl's (``data_source``, ``prompt``,
    ``reward_model.ground_truth``, ``extra_info``). The run's reward scores the answers.

    A row without an id gets a hash of its content as id, so that equal rows are one task. Only the prompt decides the
    split of a row. If there is a separate evaluation set, rows with its prompts are left out of the other splits, and
    the ids in its id column get the prefix ``eval/``.
    """

    path: str | list[str]
    """One or several files (.jsonl, .json, .parquet), a pattern of files, a folder written by Hugging Face's
    `save_to_disk`, or the id of a Hugging Face data set."""
    split: str = "train"
    """Split of the Hugging Face data set."""
    subset: str | None = None
    """Subset (configuration) of the Hugging Face data set."""
    load: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `datasets.load_dataset`, e.g. ``revision``."""
    eval_path: str | list[str] | None = None
    """Path of a separate evaluation set; None = ``path`` if ``eval_split`` is set. If both are None, there is no
    separate evaluation set."""
    eval_split: str | None = None
    """Hugging Face split of a separate evaluation set; None = ``split`` if ``eval_path`` is set."""
    eval_share: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the rows that are held out for evaluation if there is no separate evaluation set."""
    warm_start_share: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the rows that are used for demonstrations and never for reinforcement learning; None = 0.2 if the first
    row has a solution (at most half of what evaluation leaves), else 0."""
    prompt: str = "prompt"
    """Column of the prompt. A dotted path names a value inside a nested column."""
    solution: str | None = None
    """Column with an expert's answer, for the warm start; None = the first of ``solution`` and ``completion`` in which
    a row has one."""
    solution_format: str = "{solution}"
    """Text of the expert's message; ``{solution}`` in it is replaced by the row's solution."""
    id: str = "id"
    """Column of a row's id. A row without a value in this column gets a hash of its content as id; "" = every row gets
    the hash."""
    kind: str = "data_source"
    """Column with the kind of problem; evaluation reports each kind separately."""
    drop: list[str] = Field(default_factory=list)
    """Columns to ignore, for example because they hold values that are not JSON."""
    system: str | None = None
    """System message that replaces those of the row; None = keep the row's own."""
    instruction: str = ""
    """Text that is appended to each question."""
    few_shot: list[tuple[str, str]] | str = Field(default_factory=list)
    """Pairs of question and answer that the model sees before the question, or a file whose rows hold a prompt and a
    solution each."""

    has_expert = True
    needs_reward = True  # a run without a reward is refused at its start
    splits_apart = True  # no id is in two splits, so a run need not read every row to check this

    def __post_init__(self) -> None:
        shares = (0.0 if self._own_eval else self.eval_share) + (self.warm_start_share or 0.0)
        if shares >= 1.0:
            raise ValueError(f"eval_share + warm_start_share = {shares:g}: they leave no rows to train on")
        if "{solution}" not in self.solution_format:
            raise ValueError(f"solution_format = {self.solution_format!r}: it must hold {{solution}}")
        self._source(False)  # opened now, so that a missing file is reported at once
        _ = self._few_shot_messages

    def tasks(self, split: Split, count: int, without: Collection[int] = ()) -> Sequence[Task]:
        """Return the first ``count`` tasks of a split, except tasks whose question is in ``without``.

        ``without`` holds hashes of questions, as `questions` returns them.

        Raises:
            UserError: the split has fewer than ``count`` such tasks.
        """
        found = self.all_tasks(split, count + 1, without)
        own_eval = split == "eval" and self._own_eval
        if len(found) < count:
            advice = f"; lower environment.{split}_tasks"
            if not found and split == "warm_start":
                advice = (
                    ": set environment.options.warm_start_share, and set environment.options.solution to the column "
                    "that holds the answer; or set warm_start.enabled = false and model.init to a model of yours"
                )
            elif not found:
                advice = ": raise environment.options.eval_share" if split == "eval" and not own_eval else ""
            path = self.eval_path if own_eval and self.eval_path is not None else self.path
            raise UserError(f"data set {path} has {len(found)} rows for {split!r}, not {count}{advice}")
        if len(found) > count and split == "train":
            log.info("data set %s: training uses %d rows; environment.train_tasks can be higher", self.path, count)
        return found[:count]

    def all_tasks(self, split: Split, most: int | None = None, without: Collection[int] = ()) -> Sequence[Task]:
        """Return the tasks of a split, or only the first ``most`` of them. A file is read only as far as needed.

        Tasks whose question's hash is in ``without`` are left out, as in `tasks`.

        Raises:
            UserError: a row is malformed, or two different rows have the same id. Ids are compared across all splits,
                so that an id means the same row in every split.
        """
        own_eval = split == "eval" and self._own_eval
        source, positions = self._source(own_eval), array("q")
        seen: dict[int, tuple[int, int]] = {}  # hash of an id -> hash of the content and position of its first row
        for position, row, question, in_split in self._scan(source, split):
            in_split = in_split and question not in without
            if not in_split and (not self.id or row.get(self.id) is None):
                continue  # an id that is a hash of the content cannot belong to two different rows
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
        """The shares of questions for evaluation and for the warm start.

        None if there is a separate evaluation set, or if the data set is empty.
        """
        first = next((row for _, row in self._source(False).scan()), None)
        return None if self._own_eval or first is None else self._shares(self._kept(first))

    def questions(self, split: Split) -> frozenset[int]:
        """Return the hashes of all questions of a split. The first call reads all rows.

        The hashes are only valid in this process, because Python's hash of a text differs between processes.
        """
        key = f"{split} {self} {self.version}"
        if key not in _questions:
            source = self._source(split == "eval" and self._own_eval)
            _questions[key] = frozenset(question for _, _, question, in_split in self._scan(source, split) if in_split)
        return _questions[key]

    @property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A text that changes when the files change, so that demonstrations cached for the old rows are not used."""
        version = self._source(False).version
        return f"{version} {self._source(True).version}" if self._own_eval else version

    def environment(self, task: Task) -> Environment:
        return _Answer()

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """Return the prompt followed by the row's solution as the answer, and the score 1.

        ``noise`` is ignored, because there are no other valid answers to choose from.

        Raises:
            NoExpert: the row has no solution.
        """
        solution = _find_solution(task.payload, self._solutions)
        if solution is None:
            raise NoExpert(
                f"data set {self.path}: task {task.id} has no {' or '.join(map(repr, self._solutions))} to "
                "demonstrate; name its column in environment.options.solution, or set warm_start.enabled = false "
                "and model.init to a model of yours"
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
        """Yield for each row its position, its content, the hash of its question, and whether it is in the split.

        A hash of the prompt decides the split: the lowest hashes go to evaluation, the highest to the warm start, and
        the others to training. All rows of a separate evaluation set go to evaluation.
        """
        own_eval = split == "eval" and self._own_eval
        taken = self.questions("eval") if self._own_eval and not own_eval else frozenset()
        shares: tuple[float, float] | None = None
        for position, row in source.scan():
            row = self._kept(row)
            shares = shares or self._shares(row)
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

    def _kept(self, row: Row) -> Row:
        return {name: value for name, value in row.items() if name not in self.drop}

    def _shares(self, first: Row) -> tuple[float, float]:
        """Return the shares of questions for evaluation and for the warm start.

        ``first`` is the first row of the data set. The default share of the warm start depends on whether it has a
        solution.
        """
        evaluation = 0.0 if self._own_eval else self.eval_share
        if self.warm_start_share is not None:
            return evaluation, self.warm_start_share
        solved = _find_solution(first, self._solutions) is not None
        return evaluation, min(0.2, (1.0 - evaluation) / 2) if solved else 0.0

    def _identify(self, source: Source, position: int, row: Row, own_eval: bool) -> tuple[str, str]:
        """Return the task's id, and a hash of the row's columns except its id.

        The hash does not depend on the order of the columns or on the file format. Ids from the id column of a separate
        evaluation set get a prefix, because both sets may number their rows from 0.

        Raises:
            UserError: a column holds a value that JSON cannot hold (bytes, images, dates), or an id outside the
                evaluation set has the prefix of the evaluation set.
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
                f"{source.where(position)}: its id {own!r} is one of evaluation's, which begin with {_EVAL!r}; set "
                "environment.options.id to another column"
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
    """A sequence of tasks. The row of a task is read only when the task is accessed."""

    taskset: DatasetTaskset
    source: Source
    positions: array[int]
    own_eval: bool

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: Any) -> Any:
        """Return a task, or for a slice a sequence of tasks."""
        if isinstance(index, slice):
            return replace(self, positions=self.positions[index])
        taskset, position = self.taskset, self.positions[index]
        row = taskset._kept(self.source.row(position))
        messages = _read_prompt(self.source, position, row, taskset.prompt)
        payload = {name: value for name, value in row.items() if name != taskset.prompt}
        if isinstance(row.get(taskset.prompt), str):
            # TRL passes the prompt to reward functions in the form that it has in the data set, so keep the text.
            payload["prompt"] = row[taskset.prompt]
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
    """The episode of one problem. The task holds the whole prompt, and the first answer ends the episode."""

    async def reset(self) -> Observation:
        return Observation((), score=Score.failed(NO_SCORE))

    async def step(self, message: Message) -> Observation:
        return Observation((), done=True, score=Score.failed(NO_SCORE))


def _at_path(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of the column ``path``; None if there is none. A dotted path leads into nested columns."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _read_prompt(source: Source, position: int, row: Mapping[str, Any], column: str) -> tuple[Message, ...]:
    """Return the messages of a row's question.

    Raises:
        UserError: the column is missing or empty, holds neither a text nor messages, or ends with a message of the
            assistant.
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
    asked = [message for message in messages if message["role"] != "system"]
    if messages and not problem and not asked:
        problem = " has a system message only; the question is the user's"
    if asked and not problem and asked[-1]["role"] == "assistant":
        problem = " ends with the assistant's message; the question ends with the user's"
    if problem:
        raise UserError(f"{source.where(position)}: {column}{problem}")
    return tuple(messages)


def _find_solution(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """Return the expert's answer from the first of ``columns`` that holds one; None if none does.

    If the column holds a list of messages, the answer is the content of the last message.
    """
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
