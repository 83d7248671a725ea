"""Hooks that make schemathesis's requests valid where its generated data cannot be.

The id of an episode must not have been used before. The field ``environment`` must be the server's fingerprint, so that
every other value is replaced by None, which is not checked.
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any

import schemathesis

_numbers = count()


@schemathesis.hook("map_body").apply_to(path="/create")
def a_new_episode(context: Any, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("environment"), str):
        body = {**body, "environment": None}
    if isinstance(body.get("id"), str) and re.fullmatch("[A-Za-z0-9_-]{16,64}", body["id"]):
        body = {**body, "id": f"schemathesis-{next(_numbers):08}"}
    return body
