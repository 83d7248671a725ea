"""API keys: named in the configuration, kept in the environment, shown nowhere."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable
from urllib.parse import quote

from gleanrl.errors import UserError

_NAME = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_TELLING = re.compile(r"auth|key|token|secret|password|cookie|credential", re.IGNORECASE)
_SHORTEST = 4  # a shorter value protects nothing, and taking it out would tear every text apart


class Secret:
    """The name of an environment variable that holds a key. The value is read where it is needed and never kept, so
    that no dump, pickle, log or stack trace of this object can hold it.

    Args:
        name: of the variable: capital letters, digits and underscores.
        setting: what the user calls it, for messages.

    Raises:
        UserError: that is no such name (it may be the key itself, so the message does not repeat it), or nothing is
            set under it.
    """

    __slots__ = ("_name", "_setting")

    def __init__(self, name: str, setting: str = "api_key_env") -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(
                f"{setting}: give the NAME of an environment variable (capital letters, digits, underscores), "
                "never the key itself"
            )
        self._name, self._setting = name, setting
        self.reveal()

    @property
    def name(self) -> str:
        return self._name

    def reveal(self) -> str:
        """The key. Raises `UserError` where the variable is unset or holds what no header can carry."""
        value = os.environ.get(self._name, "").strip()
        if not value:
            raise UserError(f"{self._setting}: the environment variable {self._name} is not set; export it first")
        if not value.isascii() or not value.isprintable():
            raise UserError(f"{self._setting}: {self._name} holds characters that no HTTP header can carry")
        return value

    def redact(self, text: str) -> str:
        """``text`` without the key, also where it is quoted, encoded or cut short by asterisks or dots."""
        value = os.environ.get(self._name, "").strip()
        if len(value) < _SHORTEST:
            return text
        encoded = base64.b64encode(value.encode()).decode().rstrip("=")
        forms = {value, quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1], encoded}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, f"[{self._name}]")
        cut = rf"{re.escape(value[:3])}[\w-]*(?:\*{{2,}}|\.{{3}}|…)[\w-]*"
        return re.sub(cut, f"[{self._name}]", text)

    def __repr__(self) -> str:
        return f"Secret({self._name})"


def redact(text: str, secrets: Iterable[Secret]) -> str:
    for secret in secrets:
        text = secret.redact(text)
    return text


def header(name: str, value: str, setting: str = "headers") -> str | Secret:
    """A header's value from a configuration: plain text, or ``env:NAME`` for what the environment holds.

    Raises `UserError` for a plain value under a name that speaks of a key: it would stand in every dump.
    """
    if value.startswith("env:"):
        return Secret(value.removeprefix("env:"), f"{setting}.{name}")
    if _TELLING.search(name):
        raise UserError(f'{setting}.{name}: write "env:NAME"; a key belongs into the environment, not here')
    return value


def refuse_key_in(url: str, setting: str) -> None:
    """Raises `UserError` where an address carries a user, a password or a key."""
    place, _, query = url.partition("?")
    fields = [field.partition("=")[0] for field in query.split("&")]
    if "@" in place.partition("//")[2].partition("/")[0] or any(_TELLING.search(field) for field in fields):
        raise UserError(f"{setting}: the address holds a key; name an environment variable with api_key_env instead")
