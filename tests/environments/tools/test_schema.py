"""`tools_of` makes tools with JSON schemas from functions and methods, and raises for those that cannot be tools."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from gleanrl.environments.tools.schema import BadArguments, tools_of
from gleanrl.utils.errors import UserError


class Point(BaseModel):
    x: int
    y: int = 0


def test_a_cached_method_is_a_tool() -> None:
    class Wiki:
        @lru_cache  # noqa: B019
        def look(self, title: str) -> str:
            """Look it up."""
            return title

    (tool,) = tools_of(Wiki)
    assert (tool.name, list(tool.schema["function"]["parameters"]["properties"])) == ("look", ["title"])


class Box:
    """Not a tool."""

    state = 3

    def reset(self) -> None: ...
    def get_reward(self) -> float:
        return 0.0

    def _own(self) -> None: ...

    def move(self, to: Point, how: Literal["slow", "fast"] = "slow", by: Annotated[int, Field(ge=0, le=9)] = 1) -> str:
        """Move the box
        somewhere else.

        Args:
            to: where
                it goes.
            how (str): in which way.

        Returns:
            nothing that matters.
        """
        return f"{to.x} {how} {by}"

    async def look(self, names: list[str], note: str | None = None) -> dict[str, Any]:
        """Look."""
        return {"names": names, "note": note}

    @staticmethod
    def twice(n: int) -> int:
        """Twice."""
        return 2 * n


def only(source: Any, name: str) -> Any:
    return next(tool for tool in tools_of(source) if tool.name == name)


def test_public_methods_become_tools_in_the_order_of_their_definition() -> None:
    assert [tool.name for tool in tools_of(Box)] == ["move", "look", "twice"]

    class Larger(Box):
        def more(self) -> None:
            """More."""

        def look(self) -> None:  # type: ignore[override]
            """Look otherwise."""

    assert [tool.name for tool in tools_of(Larger)] == ["move", "look", "twice", "more"]
    assert only(Larger, "look").schema["function"]["description"] == "Look otherwise."


def test_tool_schemas_have_openais_format() -> None:
    function = only(Box, "move").schema["function"]
    assert only(Box, "move").schema["type"] == "function"
    assert function["description"] == "Move the box somewhere else."
    parameters = function["parameters"]
    assert parameters["type"] == "object"
    assert parameters["required"] == ["to"]
    assert parameters["properties"]["to"]["description"] == "where it goes."
    assert parameters["properties"]["how"] == {
        "type": "string", "enum": ["slow", "fast"], "default": "slow", "description": "in which way."
    }  # fmt: skip
    assert parameters["properties"]["by"]["maximum"] == 9
    assert parameters["$defs"]["Point"]["required"] == ["x"]
    assert "title" not in str(function)
    assert only(Box, "twice").schema["function"]["parameters"]["properties"] == {"n": {"type": "integer"}}


def test_a_parameter_named_title_is_kept_in_the_schema() -> None:
    def find(title: str) -> str:
        """Find."""
        return title

    assert tools_of(find)[0].schema["function"]["parameters"]["properties"] == {"title": {"type": "string"}}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"to": {"x": 1}}, {"to": Point(x=1)}),
        ({"to": {"x": "1"}, "by": 2}, {"to": Point(x=1), "by": 2}),
    ],
)
def test_arguments_are_converted_to_the_types_of_the_hints(given: Any, taken: Any) -> None:
    assert only(Box, "move").check_arguments(given) == taken


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "argument to is missing"),
        ({"to": {"x": 1}, "where": 2}, "there is no argument where"),
        ({"to": {"x": "one"}}, "argument to.x: input should be a valid integer"),
        ({"to": {"x": 1}, "how": "never"}, "argument how: input should be 'slow' or 'fast'"),
        ({"to": {"x": 1}, "by": 10}, "less than or equal to 9"),
        ([1], "an object of arguments"),
        ("text", "an object of arguments"),
    ],
)
def test_the_error_for_wrong_arguments_names_the_argument(given: Any, why: str) -> None:
    with pytest.raises(BadArguments, match=why):
        only(Box, "move").check_arguments(given)


def no_docstring(a: int) -> None: ...


def no_hint(a) -> None:
    """A."""


def variable(*parts: int) -> None:
    """A."""


def anything(**parts: int) -> None:
    """A."""


def no_json(a: object, b: type(no_hint)) -> None:  # type: ignore[valid-type]
    """A."""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (no_docstring, "no docstring"),
        (no_hint, "'a' has no type hint"),
        (variable, "cannot be given by name"),
        (anything, "cannot be given by name"),
        (no_json, "JSON has no such type"),
    ],
)
def test_a_function_that_cannot_be_a_tool_raises_with_the_reason(function: Any, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        tools_of(function)
    assert "\n" not in str(caught.value)
