"""Makes tools from typed Python functions: their schemas for the model, and the validation of a call's arguments."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema

from gleanrl.utils.errors import UserError

RESERVED = frozenset({"reset", "get_reward", "close", "rows", "expert"})
"""Names of a class's public methods that are no tools, because `ToolEnvironment` or `ToolTaskset` calls them."""

_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_PARAMETER = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class BadArguments(ValueError):
    """Raised if a call's arguments do not fit the tool. The message is shown to the model."""


@dataclass(frozen=True)
class Tool:
    """One function that a model may call."""

    name: str
    schema: Mapping[str, Any]  # OpenAI's function schema
    arguments: type[BaseModel]

    def check_arguments(self, given: Any) -> dict[str, Any]:
        """Validate the arguments that the model sent, and return them converted to the types of the hints.

        Arguments that the model left out are not in the result, so that the function's defaults apply.

        Raises:
            BadArguments: an argument is missing, unknown or of a wrong type.
        """
        if not isinstance(given, dict):
            raise BadArguments(f"{self.name} takes an object of arguments, not {json.dumps(given, default=str)[:80]}")
        try:
            taken = self.arguments.model_validate(given)
        except ValidationError as error:
            reasons = []
            for entry in error.errors(include_url=False):
                where = ".".join(map(str, entry["loc"]))
                if entry["type"] == "missing":
                    reasons.append(f"argument {where} is missing")
                elif entry["type"] == "extra_forbidden":
                    reasons.append(f"there is no argument {where}")
                else:
                    reasons.append(f"argument {where}: {entry['msg'][:1].lower()}{entry['msg'][1:]}")
            raise BadArguments(f"{self.name}: {'; '.join(reasons)}") from None
        return {name: getattr(taken, name) for name in taken.model_fields_set}


@lru_cache(maxsize=256)
def tools_of(source: Any) -> tuple[Tool, ...]:
    """Return the tools of ``source``, which is a class or a function.

    The tools of a class are its public methods, except those in `RESERVED`. A function is a single tool. A tool's
    description is the docstring, without its sections except Args, which describes the parameters.

    Raises:
        UserError: a method or function lacks a docstring or a type hint, has a parameter that cannot be given by name
            (such as ``*args``), or has a type that JSON does not have.
    """
    if not inspect.isclass(source):
        return (tool_of(source),)
    found = []
    for name in dict.fromkeys(name for base in reversed(source.__mro__) for name in vars(base)):
        method = inspect.getattr_static(source, name)
        static = isinstance(method, staticmethod | classmethod)
        function = method.__func__ if static else method
        if not name.startswith("_") and name not in RESERVED and inspect.isfunction(inspect.unwrap(function)):
            found.append(tool_of(getattr(source, name), method=not static))
    return tuple(found)


def tool_of(function: Callable[..., Any], *, method: bool = False) -> Tool:
    """Make a tool from one function; see `tools_of`. If ``method`` is True, its first parameter is the instance."""
    where = f"tool {function.__qualname__}"
    summary, described = _docstring(inspect.getdoc(function) or "")
    if not summary:
        raise UserError(f"{where}: it has no docstring, which is the only description that the model sees")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(f"{where}: a type hint cannot be resolved: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1 if method else 0 :]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"{where}: parameter {parameter} cannot be given by name; a tool takes named parameters")
        if parameter.name not in hints:
            raise UserError(f"{where}: parameter {parameter.name!r} has no type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    try:
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        parameters = _plain(model.model_json_schema())
    except (PydanticUserError, PydanticInvalidForJsonSchema, NameError, TypeError) as error:
        raise UserError(f"{where}: JSON has no such type: {str(error).splitlines()[0]}") from error
    parameters.pop("additionalProperties", None)
    for name, text in described.items():
        if name in parameters.get("properties", {}):
            parameters["properties"][name].setdefault("description", text)
    parameters.setdefault("properties", {})
    schema = {"name": function.__name__, "description": summary, "parameters": parameters}
    return Tool(function.__name__, {"type": "function", "function": schema}, model)


def _plain(schema: Any) -> Any:
    """Return a JSON schema without the titles that pydantic adds, which would only cost tokens of the prompt."""
    if isinstance(schema, list):
        return [_plain(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _plain(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text of a Google-style docstring before its sections, and the descriptions in Args by parameter."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, last, indent = "", "", None
    for line in text.splitlines():
        if match := _SECTION.match(line):
            section, last, indent = match[1], "", None
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            if depth <= indent and (match := _PARAMETER.match(line)):
                last, described[match[1]] = match[1], match[2].strip()
            elif last:
                described[last] = f"{described[last]} {line.strip()}".strip()
    return " ".join(" ".join(summary).split()), described
