"""API keys: named in the configuration, kept in the environment, shown nowhere."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from gleanrl.utils.errors import UserError

_NAME = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_TELLING = re.compile(r"auth|key|token|secret|password|cookie|credential", re.IGNORECASE)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ALWAYS = re.compile(
    r"apikey|authorization|bearer|cookies?|credentials?|passphrase|passw(?:or)?d|pwd|secrets?"
)  # words of a name under which nothing but a key stands
_OFTEN = frozenset({"auth", "key", "keys", "token", "tokens"})  # also of an answer's field or a tokenizer's token ...
_OWNED = re.compile(
    r"access|account|api|auth|client|functions|id|master|personal|private|refresh|secret|service|session|subscription"
)  # ... but not behind one of these
_LIKE_A_KEY = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w+/=.~-]{12,}")
_KNOWN = re.compile(
    r"\bsk-[\w-]{12,}|\b[sr]k_(?:live|test)_\w{8,}|\bhf_[A-Za-z0-9]{16,}|\bgh[opsu]_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{12,}"
    r"|\bAIza[\w-]{20,}|\bxox[abp]-[\w-]{10,}|\beyJ[\w-]{8,}\.[\w-]{8,}|\bBearer\s+[\w+/=.~-]{8,}"
)  # keys by what their makers let them begin with
_IN_QUERIES = frozenset({"code", "sig", "signature"})  # names of keys in addresses of well-known clouds
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
    fields = [field.partition("=")[0] for field in re.split("[&#]", query)]
    telling = any(_TELLING.search(field) or field.lower() in _IN_QUERIES for field in fields)
    if telling or "@" in place.partition("//")[2].partition("/")[0] or _KNOWN.search(url):
        raise UserError(f"{setting}: the address holds a key; name an environment variable with api_key_env instead")


# --- keys in options ------------------------------------------------------------------------------
def refuse_keys(options: Mapping[str, Any], setting: str) -> None:
    """Raises `UserError` for a key, or a text under a name that speaks of one, anywhere in a reward's options.

    They would stand in the run's configuration, its report and whatever monitors show. ``"env:NAME"`` may stand
    anywhere, if the environment has it; a name that ends in ``_env`` takes the name alone.
    """
    for name, value in options.items():
        _refuse(str(name), value, f"{setting}.{name}")


def hidden(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Secret]]:
    """The options with a `Secret` in place of each text ``env:NAME``, and all of these."""
    found: list[Secret] = []

    def within(value: Any, setting: str) -> Any:
        if isinstance(value, str) and (secret := _named(value, setting)) is not None:
            found.append(secret)
            return secret
        if isinstance(value, dict):
            return {key: within(one, f"{setting}.{key}") for key, one in value.items()}
        return [within(one, setting) for one in value] if isinstance(value, list) else value

    return {name: within(value, name) for name, value in options.items()}, found


def revealed(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Secret]]:
    """The options with what the environment holds in place of each text ``env:NAME``, and its secrets."""

    def within(value: Any) -> Any:
        if isinstance(value, Secret):
            return value.reveal()
        if isinstance(value, dict):
            return {key: within(one) for key, one in value.items()}
        return [within(one) for one in value] if isinstance(value, list) else value

    options, found = hidden(options)
    return {name: within(value) for name, value in options.items()} if found else options, found


def _named(text: str, setting: str) -> Secret | None:
    kind, _, name = text.partition(":")
    return Secret(name, setting) if kind == "env" and _NAME.fullmatch(name) else None


def _refuse(name: str, value: Any, setting: str) -> None:
    if isinstance(value, Mapping):
        for key, one in value.items():
            _refuse(str(key), one, f"{setting}.{key}")
    elif isinstance(value, list | tuple):
        for one in value:
            _refuse(name, one, setting)
    elif isinstance(value, str) and _named(value, setting) is None:
        if value.startswith(("http://", "https://")):
            refuse_key_in(value, setting)
        if _KNOWN.search(value) or (value and not name.endswith("_env") and _speaks_of_a_key(name, value)):
            raise UserError(f'{setting}: write "env:NAME"; a key belongs into the environment, not here')


def _speaks_of_a_key(name: str, value: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    if words == ["token"] or any(map(_ALWAYS.fullmatch, words)):
        return True
    if any(word in _OFTEN and _OWNED.fullmatch(before) for before, word in pairwise(words)):
        return True
    return bool(_OFTEN.intersection(words)) and _LIKE_A_KEY.fullmatch(value) is not None
