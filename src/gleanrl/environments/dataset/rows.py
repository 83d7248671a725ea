"""One row of a data set: its prompt as messages, its identity, what an expert would answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from gleanrl.environments.splits import fingerprint
from gleanrl.types import Message
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import nearest

_ROLES = ("system", "user", "assistant", "tool")
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_MISSING = object()


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
    """The messages that ask. ``where`` names the row in what is raised.

    Raises:
        UserError: the column is missing, or is neither a text nor messages that leave the answer to the model.
    """
    given = at_path(row, column)
    if given is None:
        texts = [name for name, value in row.items() if isinstance(value, str | list)]
        mend = (
            nearest(column, texts) or f"; set environment.options.prompt to one of {', '.join(texts) or 'its columns'}"
        )
        raise UserError(f"{where} has no {column!r}{mend}")
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
    """A hash of all that the row says but its id, whatever the order of its columns and the file's format.

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


def marked(prompt: Sequence[Message]) -> str:
    """A hash of the question, which decides the split."""
    return fingerprint(_CANONICAL.encode(prompt))


def demonstration_of(row: Mapping[str, Any], column: str, form: str) -> str | None:
    """What an expert answers, or None where the row does not say. A column of messages is what its last one says."""
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
