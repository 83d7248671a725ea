"""API keys, which are kept in environment variables and shown nowhere.

A configuration names the environment variable that holds a key, as ``api_key_env = "NAME"`` or as the text
``"env:NAME"``. `Secret` reads the variable when a request is sent. `redact` removes keys from messages. `refuse_keys`
rejects a configuration that contains a key itself, because the key would appear in every dump, report and monitor.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from gleanrl.utils.errors import UserError

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_SENSITIVE_NAME = re.compile(
    r"(?<![a-z])(?:passw(?:or)?d|passphrase|pwd|secret|credential|authorization|bearer|cookie|apikey"
    r"|(?:access|account|api|auth|client|functions|id|master|personal|private|refresh|service|session|subscription)"
    r"[_-]?(?:auth|key|token))s?(?![a-z])|^tokens?$",
    re.IGNORECASE,
)
"""Names of settings whose value is always a key."""
_KEY_LIKE_NAME = re.compile(r"(?:auth|key|token)s?$", re.IGNORECASE)
"""Names of settings whose value is often a key. Such a setting is refused only if its value looks like a key."""
_SENSITIVE_HEADER = re.compile(r"auth|key|token|secret|password|cookie|credential", re.IGNORECASE)
_KEY_LIKE_VALUE = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w+/=.~-]{12,}")
_KNOWN_KEY = re.compile(
    r"\bsk-[\w-]{12,}|\b[sr]k_(?:live|test)_\w{8,}|\bhf_[A-Za-z0-9]{16,}|\bgh[opsu]_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{12,}"
    r"|\bAIza[\w-]{20,}|\bxox[abp]-[\w-]{10,}|\beyJ[\w-]{8,}\.[\w-]{8,}|\bBearer\s+[\w+/=.~-]{8,}"
)
"""Keys that can be recognised by the prefix that their issuer gives them."""
_SIGNED_QUERY = frozenset({"code", "sig", "signature"})
"""Query fields that hold a key in the addresses of well-known clouds."""
_SHORTEST = 4
"""Number of characters. A shorter key is not redacted, because it may be part of any word."""


class Secret:
    """The name of an environment variable that holds a key.

    The value is read when it is needed and never kept, so no dump, pickle, log line or stack trace can show it.

    Args:
        name: name of the variable: capital letters, digits and underscores.
        setting: name of the setting, for error messages.

    Raises:
        UserError: the variable is not set, or ``name`` is not a valid name. The message does not repeat ``name``, which
            may be the key itself.
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
        """Return the key. Raises `UserError` if the variable is not set or its value cannot be an HTTP header."""
        value = os.environ.get(self.name, "").strip()
        if not value:
            raise UserError(f"{self._setting}: the environment variable {self.name} is not set; export it first")
        if not value.isascii() or not value.isprintable():
            raise UserError(f"{self._setting}: {self.name} holds characters that no HTTP header can carry")
        return value

    def redact(self, text: str) -> str:
        """Return ``text`` without the key, also if the key is quoted, encoded, or shortened with asterisks or dots."""
        value = os.environ.get(self.name, "").strip()
        if len(value) < _SHORTEST:
            return text
        encoded = base64.b64encode(value.encode()).decode().rstrip("=")
        forms = {value, quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1], encoded}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, f"[{self.name}]")
        shortened = rf"{re.escape(value[:3])}[\w-]*(?:\*{{2,}}|\.{{3}}|…)[\w-]*"
        return re.sub(shortened, f"[{self.name}]", text)

    def __repr__(self) -> str:
        return f"Secret({self.name})"


def redact(text: str, secrets: Iterable[Secret]) -> str:
    """Return ``text`` without the keys of ``secrets``."""
    for secret in secrets:
        text = secret.redact(text)
    return text


def parse_header(name: str, value: str, setting: str = "headers") -> str | Secret:
    """Return a header's value from a configuration: plain text, or a `Secret` for ``env:NAME``.

    Raises `UserError` for plain text under a name that suggests a key.
    """
    if value.startswith("env:"):
        return Secret(value.removeprefix("env:"), f"{setting}.{name}")
    if _SENSITIVE_HEADER.search(name):
        raise UserError(f'{setting}.{name}: write "env:NAME"; a key belongs into the environment, not here')
    return value


def refuse_key_in_url(url: str, setting: str) -> None:
    """Raise `UserError` if an address contains a user name, a password or a key."""
    place, _, query = url.partition("?")
    fields = [field.partition("=")[0] for field in re.split("[&#]", query)]
    sensitive = any(_SENSITIVE_HEADER.search(field) or field.lower() in _SIGNED_QUERY for field in fields)
    if sensitive or "@" in place.partition("//")[2].partition("/")[0] or _KNOWN_KEY.search(url):
        raise UserError(f"{setting}: the address holds a key; name an environment variable with api_key_env instead")


def refuse_keys(options: Mapping[str, Any], setting: str) -> None:
    """Raise `UserError` if options (at any depth) contain a key, or a text under a name that suggests a key.

    ``"env:NAME"`` is always allowed. An option whose name ends in ``_env`` holds the name of a variable and is allowed.
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
    """Return the options with a `Secret` in place of each text ``env:NAME``, at any depth, and list the secrets."""
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
    """Return the options with the key in place of each text ``env:NAME``, at any depth, and a list of the secrets.

    For code of other packages, which expects the key itself.
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
