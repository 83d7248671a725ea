"""Reads API keys from environment variables, and keeps them out of messages, files and configurations.

A configuration names the environment variable that holds a key, as ``api_key_env = "NAME"`` or as the text
``"env:NAME"``. `Secret` reads the variable when a request is sent. `redact` removes keys from messages. `refuse_keys`
rejects a configuration that contains a key itself, because the key would be shown wherever the configuration is shown:
in the run folder, in reports and in experiment trackers.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from gleanrl.utils.errors import UserError

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_SENSITIVE_NAME = re.compile(
    r"(?<![a-z])(?:passw(?:or)?d|passphrase|pwd|secret|credential|authorization|bearer|cookie|apikey"
    r"|(?:access|account|api|auth|client|functions|id|master|personal|private|refresh|service|session|subscription)"
    r"[_-]?(?:auth|key|token))s?(?![a-z])|^tokens?$",
    re.IGNORECASE,
)
"""Pattern of the setting names whose value is always a key, such as ``password`` and ``api_key``."""
_KEY_LIKE_NAME = re.compile(r"(?:auth|key|token)s?$", re.IGNORECASE)
"""Pattern of the setting names whose value may or may not be a key, such as ``auth`` and ``stop_token``.

A setting with such a name is refused only if its value matches `_KEY_LIKE_VALUE`.
"""
_SENSITIVE_HEADER = re.compile(r"auth|key|token|secret|password|cookie|credential", re.IGNORECASE)
_KEY_LIKE_VALUE = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w+/=.~-]{12,}")
_KNOWN_KEY = re.compile(
    r"\bsk-[\w-]{12,}|\b[sr]k_(?:live|test)_\w{8,}|\bhf_[A-Za-z0-9]{16,}|\bgh[opsu]_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{12,}"
    r"|\bAIza[\w-]{20,}|\bxox[abp]-[\w-]{10,}|\beyJ[\w-]{8,}\.[\w-]{8,}|\bBearer\s+[\w+/=.~-]{8,}"
)
"""Pattern of keys that can be recognised by the prefix that their issuer gives them, such as ``sk-`` and ``hf_``."""
_KEY_IN_URL = re.compile(r"(?=[A-Za-z]*[0-9])(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z])[A-Za-z0-9]{20,}")
"""Pattern of keys in the path or the query of a URL: digits, capital and small letters in one word. Names of models and
resources do not look like that."""
_SIGNED_QUERY = frozenset({"code", "sig", "signature"})
"""Names of query fields that hold a key in the URLs of well-known cloud services, such as Azure Functions."""
_SHORTEST = 4
"""Length of the shortest key that is redacted, in characters. A shorter key could be part of an ordinary word."""


class Secret:
    """A reference to a key: the name of the environment variable that holds the key.

    The key is read from the variable each time it is needed and is never stored in this object. So no dump, pickle, log
    line or stack trace of the object can show the key.

    Args:
        name: name of the variable: capital letters, digits and underscores.
        setting: name of the setting in which the user named the variable. Error messages begin with it.

    Raises:
        UserError: the variable is not set, its value cannot be sent in an HTTP header, or ``name`` is not a valid name
            of a variable. In the last case the message does not repeat ``name``, because a user may have written the
            key itself there.
    """

    __slots__ = ("_setting", "name")

    def __init__(self, name: str, setting: str = "api_key_env") -> None:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise UserError(
                f"{setting}: give the NAME of an environment variable (capital letters, digits, underscores), "
                "never the key itself"
            )
        self.name = name
        self._setting = setting
        self.reveal()

    def reveal(self) -> str:
        """Return the key.

        Raises `UserError` if the variable is not set or its value cannot be sent in an HTTP header.
        """
        value = os.environ.get(self.name, "").strip()
        if not value:
            raise UserError(f"{self._setting}: the environment variable {self.name} is not set; export it first")
        if not value.isascii() or not value.isprintable():
            raise UserError(f"{self._setting}: {self.name} holds characters that no HTTP header can carry")
        return value

    def redact(self, text: str) -> str:
        """Return ``text`` with ``[NAME]``, the name of the variable, in place of the key.

        Other forms of the key are replaced too: the URL-quoted, JSON-escaped and base64-encoded key, and a key that was
        shortened to its first characters followed by asterisks or dots (``sk-...abcd``). If the variable holds an
        address, its path and its query are replaced too. A key of fewer than 4 characters is not replaced.
        """
        value = os.environ.get(self.name, "").strip()
        if len(value) < _SHORTEST:
            return text
        encoded = base64.b64encode(value.encode()).decode().rstrip("=")
        forms = {value, quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1], encoded}
        head = value[:3]
        if value.startswith(("http://", "https://")):
            address = urlsplit(value)
            forms |= {part for part in (address.path.rstrip("/"), address.query) if len(part) >= _SHORTEST}
            head = f"{address.scheme}://{address.netloc}{address.path[:_SHORTEST]}"
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, f"[{self.name}]")
        shortened = rf"{re.escape(head)}\S{{0,{len(value)}}}?(?:\*{{2,}}|\.{{3}}|…)[\w+/=~-]*"
        return re.sub(shortened, f"[{self.name}]", text)

    def __repr__(self) -> str:
        return f"Secret({self.name})"


def redact(text: str, secrets: Iterable[Secret]) -> str:
    """Return ``text`` with the name of its environment variable in place of each key of ``secrets``."""
    for secret in secrets:
        text = secret.redact(text)
    return text


def parse_header(name: str, value: str, setting: str = "headers") -> str | Secret:
    """Return the value of an HTTP header from a configuration: a `Secret` for ``env:NAME``, else the text itself.

    Raises `UserError` if the header's name suggests a key (such as ``Authorization``) but ``value`` is not
    ``env:NAME``, or if the variable is not set. ``setting`` is the name of the section of headers, for messages.
    """
    if value.startswith("env:"):
        return Secret(value.removeprefix("env:"), f"{setting}.{name}")
    if _SENSITIVE_HEADER.search(name):
        raise UserError(f'{setting}.{name}: write "env:NAME"; a key belongs into the environment, not here')
    return value


def refuse_key_in_url(url: str, setting: str) -> None:
    """Raise `UserError` if ``url`` contains a user name or a password, or if its path or query seem to contain a key.

    ``setting`` is the name of the setting that holds the URL, for the message.
    """
    place, _, query = url.partition("?")
    fields = [field.partition("=")[0] for field in re.split("[&#]", query)]
    sensitive = any(_SENSITIVE_HEADER.search(field) or field.lower() in _SIGNED_QUERY for field in fields)
    host, _, path = place.partition("//")[2].partition("/")
    if sensitive or "@" in host or _KNOWN_KEY.search(url) or _KEY_IN_URL.search(f"{path}?{query}"):
        raise UserError(
            f'{setting}: the address holds a key; write "env:NAME", and put the whole address into the environment '
            "variable NAME, or name the variable of a bearer token with api_key_env"
        )


def refuse_keys(options: Mapping[str, Any], setting: str) -> None:
    """Raise `UserError` if ``options``, at any depth, contain a key or a text under a name that suggests a key.

    ``setting`` is the name of the section of options, for the message. The text ``"env:NAME"`` is allowed everywhere,
    but the variable NAME must be set. An option whose name ends in ``_env`` holds the name of a variable, so its name
    may suggest a key.
    """

    def check(name: str, value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                check(str(key), item, f"{path}.{key}")
        elif isinstance(value, list | tuple):
            for item in value:
                check(name, item, path)
        elif isinstance(value, str) and value and _environment_secret(value, path) is None:
            if value.startswith(("http://", "https://")):
                refuse_key_in_url(value, path)
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)  # "apiKey" becomes "api_Key"
            suspicious = not name.endswith("_env") and (
                _SENSITIVE_NAME.search(words) or (_KEY_LIKE_NAME.search(words) and _KEY_LIKE_VALUE.fullmatch(value))
            )
            if suspicious or _KNOWN_KEY.search(value):
                raise UserError(f'{path}: write "env:NAME"; a key belongs into the environment, not here')

    for name, value in options.items():
        check(str(name), value, f"{setting}.{name}")


def with_secrets(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Secret]]:
    """Return ``options`` with a `Secret` in place of each text ``env:NAME``, at any depth, and a list of these secrets.

    Raises `UserError` if a variable is not set.
    """
    found: list[Secret] = []

    def replaced(value: Any, path: str) -> Any:
        if isinstance(value, str):
            secret = _environment_secret(value, path)
            if secret is None:
                return value
            found.append(secret)
            return secret
        if isinstance(value, dict):
            return {key: replaced(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, path) for item in value]
        return value

    return {name: replaced(value, name) for name, value in options.items()}, found


def with_keys(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Secret]]:
    """Return ``options`` with the key in place of each text ``env:NAME``, at any depth, and a `Secret` for each key.

    Use this for options that are passed to another package, which expects the key itself and not a `Secret`.
    """

    def revealed(value: Any) -> Any:
        if isinstance(value, Secret):
            return value.reveal()
        if isinstance(value, dict):
            return {key: revealed(item) for key, item in value.items()}
        return [revealed(item) for item in value] if isinstance(value, list) else value

    hidden, secrets = with_secrets(options)
    return revealed(hidden), secrets


def _environment_secret(text: str, setting: str) -> Secret | None:
    kind, _, name = text.partition(":")
    return Secret(name, setting) if kind == "env" and _VARIABLE.fullmatch(name) else None
