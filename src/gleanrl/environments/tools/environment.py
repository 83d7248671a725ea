"""Plays an episode with tools: runs calls in order, answers mistakes, and ends at a message without a call."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from gleanrl.environments.tools.schema import BadArguments, Tool, tools_of
from gleanrl.protocols import Environment, Observation
from gleanrl.rollout.thinking import answer_of
from gleanrl.rollout.tool_calls import Call, called
from gleanrl.types import Message, Score
from gleanrl.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool, and the instance that it belongs to."""

    tool: Tool
    function: Any  # bound


def offered(holders: Sequence[Any]) -> dict[str, Offered]:
    """Return the tools of instances and functions, by name.

    Raises:
        UserError: two tools have the same name, or something is not a tool.
    """
    found: dict[str, Offered] = {}
    for holder in holders:
        function = inspect.isroutine(holder)
        for tool in tools_of(holder if function else type(holder)):
            if tool.name in found:
                raise UserError(f"two tools are called {tool.name!r}")
            found[tool.name] = Offered(tool, holder if function else getattr(holder, tool.name))
    return found


class ToolEnvironment(Environment):
    """One episode with tools.

    Args:
        holders: instances whose typed public methods are the tools, and functions. The first may be the environment's
            own: its ``reset(**row)`` may return a text that goes on the task's last user message, its attribute
            ``done`` ends the episode where it is true after a call, and its ``get_reward()`` or attribute ``reward``
            says what was earned so far. ``get_reward(answer)`` gets the final answer instead, without thinking, once.
            All methods may be async. Every holder may have ``close()``.
        prompt: what the episode opens with.
        row: arguments for ``reset``, as far as it takes them. If nothing else gives a reward and the row has an
            ``answer``, the final answer is compared with it.
        max_calls: in one message; those beyond it are not run.
        max_output: characters of a result.
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
        self._tools = offered(holders)
        self._holders, self._prompt, self._row = holders, list(prompt), dict(row or {})
        self._max_calls, self._max_output = max_calls, max_output
        self._calls = self._errors = 0

    async def reset(self) -> Observation:
        opening = list(self._prompt)
        for holder in self._holders:
            reset = getattr(holder, "reset", None)
            text = await _awaited(reset(**taken(reset, self._row))) if callable(reset) else None
            if text is not None:
                opening = _told(opening, str(text))
        schemas = tuple(offer.tool.schema for offer in self._tools.values())
        return Observation(tuple(opening), score=await self._score(None), tools=schemas)

    async def step(self, message: Message) -> Observation:
        entries = message.get("tool_calls") or []
        if not entries:
            answer = answer_of(message.get("content") or "").lstrip("\n")
            return Observation((), done=True, score=await self._score(answer))
        results = []
        for number, (entry, call) in enumerate(zip(entries, called(message), strict=True)):
            self._calls += 1
            if number < self._max_calls:
                text = await self._run(call)
            else:
                text = self._error(f"not run: at most {self._max_calls} calls in one message")
            results.append(_result(text, call.name, entry.get("id")))
            if self._done:
                return Observation(tuple(results), done=True, score=await self._score(""))
        return Observation(tuple(results), score=await self._score(None))

    async def close(self) -> None:
        await closed(self._holders)

    async def _run(self, call: Call) -> str:
        """Run a call and return its result as text for the model."""
        given = call.arguments
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                return self._error(f"the call is not valid JSON: {error}")
        offer = self._tools.get(call.name)
        if offer is None:
            named = f"there is no tool {call.name!r}" if call.name else "the call names no tool"
            return self._error(f"{named}; there are: {', '.join(self._tools)}")
        try:
            arguments = offer.tool.checked(given)
            return self._shortened(_text(await _awaited(offer.function(**arguments))))
        except UserError:
            raise
        except BadArguments as error:
            return self._error(str(error))
        except (Exception, SystemExit) as error:  # a tool that ends its program ends not ours
            said = str(error)
            return self._error(f"{type(error).__name__}: {said}" if said else type(error).__name__)

    def _error(self, text: str) -> str:
        self._errors += 1
        return self._shortened(f"Error: {text}")

    def _shortened(self, text: str) -> str:
        """As the model is shown it. Half characters, which JSON can hold, are in no tokenizer's reach."""
        text = text.encode("utf-8", "replace").decode()
        more = len(text) - self._max_output
        return text if more <= 0 else f"{text[: self._max_output]}\n[{more} more characters left out]"

    @property
    def _done(self) -> bool:
        return any(getattr(holder, "done", False) is True for holder in self._holders)

    async def _score(self, answer: str | None) -> Score | None:
        """Return the score so far, or at the end with ``answer``; None if only a `Reward` can score."""
        parts = {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}
        value: Any = None
        for holder in self._holders:
            get_reward = getattr(holder, "get_reward", None)
            if callable(get_reward):
                if not inspect.signature(get_reward).parameters:
                    value = await _awaited(get_reward())
                else:
                    value = 0.0 if answer is None else await _awaited(get_reward(answer))
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
            return Score(value.value, value.valid, {**parts, **value.parts}, value.explanation, value.applicable)
        return Score(float(value), parts=parts)


def same_answer(said: str, expected: Any) -> bool:
    """Compare a final answer with the expected one: as numbers if both are, else as text without case and spaces."""
    text = answer_of(said).strip()
    try:
        return math.isclose(float(text.replace(",", "")), float(str(expected).replace(",", "")), rel_tol=1e-9)
    except ValueError:
        return " ".join(text.split()).casefold() == " ".join(str(expected).split()).casefold()


async def closed(holders: Sequence[Any]) -> None:
    """Close the holders that have a ``close`` method."""
    for holder in holders:
        close = None if inspect.isroutine(holder) else getattr(holder, "close", None)
        if callable(close):
            await _awaited(close())


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def taken(reset: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the row that ``reset`` takes as arguments."""
    parameters = inspect.signature(reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


def _told(opening: Sequence[Message], text: str) -> list[Message]:
    """Append ``text`` to the opening's last message if that is the user's, else add a message."""
    if not opening or opening[-1]["role"] != "user":
        return [*opening, Message(role="user", content=text)]
    return [*opening[:-1], {**opening[-1], "content": f"{opening[-1]['content']}{text}"}]


def _result(text: str, name: str, identity: Any) -> Message:
    """Make the message with a call's result. A call without an id is answered in a message of role user."""
    if not identity:
        return Message(role="user", content=text)
    return Message(role="tool", content=text, tool_call_id=str(identity), name=name)


def _text(value: Any) -> str:
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return "" if value is None else str(value)
