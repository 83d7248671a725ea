"""The environment in which a model calls tools.

`ToolEnvironment` runs the calls of each message in order. An invalid call gets an error text as its result. A message
without a call is the final answer and ends the episode. `ToolTaskset` makes a `ToolEnvironment` for each episode, and
uses `play_expert` for demonstrations by the expert of a user's class.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel

from gleanrl.environments.tools.schema import BadArguments, Tool, tools_of
from gleanrl.protocols import Environment, Observation
from gleanrl.rollout.thinking import answer_of
from gleanrl.rollout.tool_calls import Call, expert_message, read_calls
from gleanrl.types import Message, Score, StopReason
from gleanrl.utils.errors import UserError


def bind_tools(holders: Sequence[Any]) -> dict[str, tuple[Tool, Any]]:
    """Return the tools of ``holders``, by name, each with the function that runs it.

    A holder is a function, which is one tool, or an instance, whose typed public methods are tools.

    Raises:
        UserError: two tools have the same name, or a function or method cannot be a tool (see `tools_of`).
    """
    found: dict[str, tuple[Tool, Any]] = {}
    for holder in holders:
        function = inspect.isroutine(holder)
        tools = tools_of(holder if function else type(holder))
        if callable(holder) and not tools:  # such as functools.partial
            raise UserError(f"{holder!r:.80} cannot be a tool: write a function with a docstring that calls it")
        for tool in tools:
            if tool.name in found:
                raise UserError(f"two tools are called {tool.name!r}")
            found[tool.name] = (tool, holder if function else getattr(holder, tool.name))
    return found


class ToolEnvironment(Environment):
    """One episode in which the model calls tools.

    Besides its tools, an instance among ``holders`` may have these members. All methods may be async.

    - ``reset(**row)`` is called when the episode begins. If it returns a text, the text is appended to the last user
      message of the prompt, or becomes a user message.
    - ``done``: if this attribute is True after a call, the episode ends.
    - ``get_reward()`` returns the reward of the episode so far, as a number or a `Score`. A ``get_reward(answer)`` is
      instead called once, at the end of the episode, with the model's final answer without thinking. The answer is
      empty if a tool or a limit has ended the episode. None means that the reward does not apply to this episode.
    - ``reward``: the reward of the episode so far, for an instance without ``get_reward``.
    - ``close()`` releases the resources of the instance.

    Args:
        holders: instances whose typed public methods are the tools, and functions, each of which is a tool. The first
            instance with a reward decides the score.
        prompt: messages with which the episode begins.
        row: the task's data. ``reset`` gets the entries that it has parameters for. If no holder has a reward and there
            is an entry ``answer``, the score is 1 if the final answer equals it (`same_answer`), else 0.
        max_calls: maximum number of calls in one message; the calls after it get an error as their result.
        max_output: maximum length of a result, in characters; the rest is cut off.
    """

    def __init__(
        self,
        holders: Sequence[Any],
        *,
        prompt: Sequence[Message] = (),
        row: Mapping[str, Any] | None = None,
        max_calls: int = 8,
        max_output: int = 4000,
    ) -> None:
        self._tools = bind_tools(holders)
        self._holders, self._prompt, self._row = holders, list(prompt), dict(row or {})
        self._max_calls, self._max_output = max_calls, max_output
        self._calls = self._errors = 0

    async def reset(self) -> Observation:
        opening = list(self._prompt)
        for holder in self._holders:
            reset = getattr(holder, "reset", None)
            text = await _resolve(reset(**select_arguments(reset, self._row))) if callable(reset) else None
            if text is None:
                continue
            if opening and opening[-1]["role"] == "user":
                opening[-1] = {**opening[-1], "content": f"{opening[-1]['content']}{text}"}
            else:
                opening.append(Message(role="user", content=str(text)))
        schemas = tuple(tool.schema for tool, _ in self._tools.values())
        return Observation(tuple(opening), score=await self._score(None), tools=schemas)

    async def step(self, message: Message) -> Observation:
        entries = message.get("tool_calls") or []
        if not entries:
            answer = answer_of(message.get("content") or "").lstrip("\n")
            return Observation((), done=True, score=await self._score(answer))
        results = []
        for number, (entry, call) in enumerate(zip(entries, read_calls(message), strict=True)):
            self._calls += 1
            if number < self._max_calls:
                text = await self._run(call)
            else:
                text = self._error(f"not run: at most {self._max_calls} calls in one message")
            if entry.get("id"):
                results.append(Message(role="tool", content=text, tool_call_id=str(entry["id"]), name=call.name))
            # A message with the role "tool" needs the call's id. So a call without an id gets its result as "user".
            else:
                results.append(Message(role="user", content=text))
            # A method `done` is a tool. NumPy's comparisons give a bool of NumPy's own.
            if any(
                isinstance(done := getattr(holder, "done", 0), bool | np.bool_) and done for holder in self._holders
            ):
                return Observation(tuple(results), done=True, score=await self._score(""))
        return Observation(tuple(results), score=await self._score(None))

    async def conclude(self, stop: StopReason) -> Score | None:
        return await self._score("")

    async def close(self) -> None:
        await close_all(self._holders)

    async def _run(self, call: Call) -> str:
        """Run a call and return its result, or the error if it fails, as text for the model."""
        given = call.arguments
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                return self._error(f"the call is not valid JSON: {error}")
        if call.name not in self._tools:
            named = f"there is no tool {call.name!r}" if call.name else "the call names no tool"
            return self._error(f"{named}; there are: {', '.join(self._tools)}")
        tool, function = self._tools[call.name]
        try:
            value = await _resolve(function(**tool.check_arguments(given)))
            if isinstance(value, BaseModel):
                return self._shorten(value.model_dump_json())
            if isinstance(value, dict | list | tuple):
                return self._shorten(json.dumps(value, ensure_ascii=False, default=str))
            return self._shorten("" if value is None else str(value))
        except UserError:
            raise
        except BadArguments as error:
            return self._error(str(error))
        except (Exception, SystemExit) as error:  # SystemExit too: a tool that calls sys.exit must not end the run
            return self._error(f"{type(error).__name__}: {error}".removesuffix(": "))

    def _error(self, text: str) -> str:
        self._errors += 1
        return self._shorten(f"Error: {text}")

    def _shorten(self, text: str) -> str:
        """Cut the text to ``max_output`` characters, and replace lone surrogates, which tokenizers cannot encode."""
        text = text.encode("utf-8", "replace").decode()
        more = len(text) - self._max_output
        return text if more <= 0 else f"{text[: self._max_output]}\n[{more} more characters left out]"

    async def _score(self, answer: str | None) -> Score | None:
        """Return the episode's present score; None if it has none yet, or a `Reward` must score it.

        ``answer`` is the model's final answer. It is None while the episode continues, and empty if a tool or a limit
        has ended it.
        """
        parts = {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}
        value: Any = None
        for holder in self._holders:
            get_reward = getattr(holder, "get_reward", None)
            if callable(get_reward):
                if not inspect.signature(get_reward).parameters:
                    value = await _resolve(get_reward())
                elif answer is None:
                    return None
                else:
                    value = await _resolve(get_reward(answer))
                if value is None:
                    return Score(math.nan, valid=False, parts=parts, explanation="not applicable", applicable=False)
                break
            if hasattr(holder, "reward"):
                value = holder.reward
                break
        else:
            if "answer" not in self._row:
                return None
            value = float(answer is not None and same_answer(answer, self._row["answer"]))
        if isinstance(value, Score):
            return replace(value, parts={**parts, **value.parts})
        return Score(float(value), parts=parts)


def same_answer(said: str, expected: Any) -> bool:
    """Return whether the model's answer ``said`` equals ``expected``. Thinking in ``said`` is ignored.

    If both are numbers, their values are compared, else their texts, in which case and the amount of white space do not
    matter.
    """
    text, wanted = (" ".join(each.split()).casefold() for each in (answer_of(said), str(expected)))
    if text == wanted:
        return True
    # Commas are left out where they separate thousands. Python would read an underscore as such a separator too.
    numbers = [re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", each).replace("_", "?") for each in (text, wanted)]
    try:
        return math.isclose(float(numbers[0]), float(numbers[1]), rel_tol=1e-9)
    except ValueError:
        return False


async def close_all(holders: Sequence[Any]) -> None:
    """Close the holders that have a ``close`` method. An error of one is raised once all are closed."""

    async def closed(close: Any) -> None:
        await _resolve(close())

    async with AsyncExitStack() as stack:
        for holder in reversed(holders):
            close = None if inspect.isroutine(holder) else getattr(holder, "close", None)
            if callable(close):
                stack.push_async_callback(closed, close)


async def _resolve(value: Any) -> Any:
    """Return the value, or its result if it is awaitable, because a user's method may be async or not."""
    return await value if inspect.isawaitable(value) else value


def select_arguments(function: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``row`` that ``function`` has parameters for; all entries if it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


# --- demonstrations ---------------------------------------------------------------------------------
Expert = Generator[Any, Any, None]
"""A generator that plays an episode. It yields the messages of the model.

A yielded value is a call that `call` has made, a list of such calls, a text (the final answer) or a whole assistant
message. The ``yield`` expression returns the result of a single call as a text; otherwise it returns a list with the
results of all calls."""


def call(name: str, **arguments: Any) -> Call:
    """Make a call of the tool ``name``, which an `Expert` yields."""
    return Call(name, arguments)


async def play_expert(environment: ToolEnvironment, expert: Expert) -> tuple[tuple[Message, ...], Score]:
    """Play an episode with the messages of ``expert``, and return the conversation and its score.

    The score is 0 if the expert stops before the episode ends. The environment is closed in any case.
    """
    answer: Any = None
    conversation: list[Message] = []
    try:
        observation = await environment.reset()
        conversation, number = list(observation.messages), 0
        while not observation.done:
            said = expert.send(answer)
            message = expert_message(said, number)
            number += len(message.get("tool_calls", ()))
            observation = await environment.step(message)
            conversation += [message, *observation.messages]
            results = [result["content"] for result in observation.messages]
            answer = results[0] if isinstance(said, Call) else results
    except StopIteration:  # the expert stopped before the episode ended, so the conversation shows no solution
        return tuple(conversation), Score(0.0)
    finally:
        await environment.close()
    return tuple(conversation), observation.score or Score.failed("the environment gave no score")
