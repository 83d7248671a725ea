"""Makes tasks with tools, from a user's class or from a data file."""

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

    Args:
        environment_factory: a class, or its import path (`package.module:Class` or `file.py:Class`). Each episode makes
            an instance. Its typed public methods are tools, except `reset`, `get_reward`, `close`, `rows` and `expert`
            (see `ToolEnvironment`).
        tools: further tools: "python", "search", or functions and classes or their import paths.
        data: a JSONL or parquet file with one task a row. None = use the class's ``rows(seed)``, a static method that
            yields rows without end.
        prompt: column with the text or the list of messages that opens the episode. It may be missing if ``reset``
            returns the question.
        python, search: options of `PythonTool` and of `SearchTool`.
        max_calls: most calls in one message.
        max_output: most characters of a result that are shown to the model.

    A row's ``id`` is its task's id. If it is missing or null, the id is a hash of the row's content. The id decides the
    split. Different rows with the same id are refused.
    """

    environment_factory: Any = None
    named_tools: list[Any] = Field(default_factory=list, alias="tools")  # an alias, because `tools` is a method
    data: str | None = None
    prompt: str = "prompt"
    python: dict[str, Any] = Field(default_factory=dict)
    search: dict[str, Any] = Field(default_factory=dict)
    max_calls: int = Field(default=8, ge=1)
    max_output: int = Field(default=4000, ge=1)
    seed: int = 0

    has_expert = True
    phrases = _ERRORS

    def __post_init__(self) -> None:
        """Check all options, so that a user's mistake is reported at once."""
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

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        what = f"tools, {self.data or self.environment_factory}"
        chosen = select(self._candidates(), split, count, what, endless=self.data is None)
        return [Task(name, payload={"row": row}) for _, (name, row) in chosen]

    def environment(self, task: Task) -> Environment:
        return self._environment(task, self._make_holders())

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """Play the class's own ``expert(**row)``, a generator; see `gleanrl.environments.tools.environment.Expert`.

        ``noise`` is unused, because the expert takes no random actions.
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
            return await play_expert(self._environment(task, holders), moves)

        return background_loop.run(play())

    def _environment(self, task: Task, holders: Sequence[Any]) -> ToolEnvironment:
        row = dict(task.payload["row"])
        prompt = row.pop(self.prompt, None)
        if isinstance(prompt, str):
            prompt = [Message(role="user", content=prompt)]
        elif prompt is None:
            prompt = []
        elif not isinstance(prompt, list) or not all(_is_message(message) for message in prompt):
            raise UserError(f"environment.options.prompt: a text or a list of messages is expected, not {prompt!r:.60}")
        return ToolEnvironment(holders, prompt=prompt, row=row, max_calls=self.max_calls, max_output=self.max_output)

    def _class(self) -> Any:
        factory = self.environment_factory
        return load_object(factory) if isinstance(factory, str) else factory

    def _make_holders(self) -> list[Any]:
        """Make the instances and functions for one episode, beginning with the instance of the user's class."""
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
        """Yield ``(fingerprint, (id, row))``. Raises `UserError` if rows with the same id differ."""
        rows = read_rows(self.data) if self.data is not None else self._class().rows(derive(self.seed, "tools"))
        seen: dict[str, tuple[str, int]] = {}  # id -> the row's content and its number
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
