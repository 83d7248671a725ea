"""Makes the tasks of the environment ``tools`` from a user's class or from a data file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pydantic
from pydantic import Field

from gleanrl.environments.splits import fingerprint, select
from gleanrl.environments.tools.environment import (
    ToolEnvironment,
    bind_tools,
    close_all,
    play_expert,
    select_arguments,
)
from gleanrl.environments.tools.python import PythonTool, check_python
from gleanrl.environments.tools.rows import read_rows
from gleanrl.environments.tools.search import SearchTool
from gleanrl.protocols import Environment, Split, Taskset, Tools
from gleanrl.types import Message, Score, Task
from gleanrl.utils import background_loop
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.seeding import derive
from gleanrl.utils.text import nearest

_ERRORS = ("Error: ", "the call is not valid JSON", "there is no tool", "argument", "is missing", "there are: ")


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class ToolTaskset(Taskset):
    """Makes tasks in whose episodes the model calls tools.

    Each row of the data is a task. The row's ``id`` is the id of the task; if it is missing or null, the id is a hash
    of the row's content. The id decides the task's split. Different rows must not have the same id.
    """

    environment_factory: Any = None
    """A class, or its import path (`package.module:Class` or `file.py:Class`), which is called without arguments for
    each episode. The typed public methods of the instance are tools, except `reset`, `get_reward`, `close`, `rows` and
    `expert` (see `ToolEnvironment`)."""
    named_tools: list[Any] = Field(default_factory=list, alias="tools")
    """The option ``tools``: further tools, "python", "search", or functions and classes or their import paths. The
    field has another name, because `tools` is a method of a taskset."""
    data: str | None = None
    """A JSONL, JSON or parquet file with one task per row. None = use the static method ``rows(seed)`` of the class,
    which yields rows without end."""
    prompt: str = "prompt"
    """Name of the column with the text or the list of messages with which the episode begins. A row may lack it if
    ``reset`` returns the question."""
    python: dict[str, Any] = Field(default_factory=dict)
    """Options of the tool "python"; see `PythonTool`."""
    search: dict[str, Any] = Field(default_factory=dict)
    """Options of the tool "search"; see `SearchTool`."""
    max_calls: int = Field(default=8, ge=1)
    """Maximum number of calls in one message."""
    max_output: int = Field(default=4000, ge=1)
    """Maximum length of a result, in characters."""
    seed: int = 0
    """Seed that the class's ``rows`` gets."""

    has_expert = True
    phrases = _ERRORS

    def __post_init__(self) -> None:
        """Check all options, so that wrong options are reported now and not in the first episode."""
        if self.environment_factory is None and not self.named_tools:
            raise UserError("environment.options: give `environment_factory`, a class with tools, or `tools`, or both")
        if self.data is None and not hasattr(self._class(), "rows"):
            raise UserError("environment.options.data: no file of tasks is given, and no class with a method `rows`")
        if "python" in self.named_tools:
            background_loop.run(check_python(self.python))
        _ = self._schemas

    def tools(self, task: Task) -> Tools:
        """Return the tools, which are the same for every task."""
        return self._schemas

    @cached_property
    def _schemas(self) -> Tools:
        async def read() -> Tools:
            holders = self._make_holders()
            try:
                return tuple(tool.schema for tool, _ in bind_tools(holders).values())
            finally:
                await close_all(holders)

        return background_loop.run(read())

    @property
    def _resets(self) -> bool:
        """Whether an episode has a method ``reset``, which may return the question."""
        given = [self.environment_factory, *self.named_tools]
        paths = [each for each in given if isinstance(each, str) and each not in ("python", "search")]
        return any(hasattr(each, "reset") for each in [*given, *map(load_object, paths)])

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        what = f"tools, {self.data or self.environment_factory}"
        chosen = [*select(self._candidates(), split, count, what, endless=self.data is None)]
        for _, (_, row) in chosen if not self._resets else ():
            if row.get(self.prompt) is None:
                raise UserError(
                    f"{self.data or self.environment_factory} has a row without {self.prompt!r}; set "
                    f"environment.options.prompt to one of its columns: {', '.join(row)}"
                )
        tasks = []
        for _, (name, row) in chosen:
            opening = self._opening(row)
            # Examples are in the prompt of the task, which no demonstration trains as what the expert says.
            answers = [number for number, message in enumerate(opening, 1) if message["role"] == "assistant"]
            tasks.append(Task(name, tuple(opening[: max(answers, default=0)]), {"row": row}))
        return tasks

    def environment(self, task: Task) -> Environment:
        return self._environment(task, self._make_holders())

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """Let the method ``expert(**row)`` of the user's class play; see `Taskset.demonstrate`.

        The method is a generator of the type `gleanrl.environments.tools.environment.Expert`. ``noise`` is not used,
        because there is no list of valid calls from which a random one could be drawn.
        """

        async def play() -> tuple[tuple[Message, ...], Score]:
            holders = self._make_holders()
            expert = getattr(holders[0], "expert", None)
            if not callable(expert):
                await close_all(holders)
                raise NoExpert(
                    f"environment.options.environment_factory: {type(holders[0]).__name__} has no method `expert` to "
                    "demonstrate; set warm_start.enabled = false and model.init to a model that can call tools"
                )
            moves: Any = expert(**select_arguments(expert, task.payload["row"]))
            conversation, score = await play_expert(self._environment(task, holders), moves)
            return (*task.prompt, *conversation), score

        return background_loop.run(play())

    def _environment(self, task: Task, holders: Sequence[Any]) -> ToolEnvironment:
        row = task.payload["row"]
        prompt = self._opening(row)[len(task.prompt) :]
        return ToolEnvironment(holders, prompt=prompt, row=row, max_calls=self.max_calls, max_output=self.max_output)

    def _opening(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the messages with which the episode of a row begins, before a method ``reset`` adds its text."""
        prompt = row.get(self.prompt)
        if isinstance(prompt, str):
            return [Message(role="user", content=prompt)]
        if prompt is None:
            return []
        if not isinstance(prompt, list) or not all(_is_message(message) for message in prompt):
            raise UserError(f"environment.options.prompt: a text or a list of messages is expected, not {prompt!r:.60}")
        return prompt

    def _class(self) -> Any:
        factory = self.environment_factory
        return load_object(factory) if isinstance(factory, str) else factory

    def _make_holders(self) -> list[Any]:
        """Return the instances and functions whose tools an episode offers. The user's class comes first."""
        holders = [] if self.environment_factory is None else [self._class()()]
        for tool in self.named_tools:
            if tool == "python":
                holders.append(PythonTool(**self.python))
            elif tool == "search":
                holders.append(_make_search(self.search))
            else:
                found = load_object(tool) if isinstance(tool, str) else tool
                holders.append(found() if inspect.isclass(found) else found)
        return holders

    def _candidates(self) -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
        """Yield ``(fingerprint, (id, row))`` of each row. Raises `UserError` if two different rows have the same id."""
        rows = read_rows(self.data) if self.data is not None else self._class().rows(derive(self.seed, "tools"))
        seen: dict[str, tuple[str, int]] = {}  # id -> hash of the row's content, and the row's number
        for number, row in enumerate(rows, 1):
            kept = json.loads(json.dumps(row, default=str))
            own = kept.get("id")
            without_null = {key: value for key, value in kept.items() if key != "id" or value is not None}
            content = fingerprint(json.dumps(without_null, sort_keys=True))
            name = content if own is None else str(own)
            before, first = seen.setdefault(name, (content, number))
            if before != content:
                raise UserError(
                    f"{self.data or self.environment_factory}: rows {first} and {number} have the same id, {name!r}, "
                    "and differ; give each an id of its own, or none for a hash of its content"
                )
            yield (content if own is None else fingerprint(name)), (name, kept)


def _make_search(options: Mapping[str, Any]) -> SearchTool:
    named = list(inspect.signature(SearchTool).parameters)
    for key in options:
        if key not in named:
            hint = nearest(key, named) or f"; it takes {', '.join(named)}"
            raise UserError(f"environment.options.search.{key}: no such option{hint}")
    if "corpus" not in options:
        raise UserError("environment.options.search.corpus: the file to search is missing")
    return SearchTool(**options)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and "content" in value
