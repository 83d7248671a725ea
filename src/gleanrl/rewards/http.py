"""A reward behind plain HTTP: one POST for each trajectory, answered with a number.

Judges and pooling servers use the helpers of this module too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Unpack

from gleanrl.rewards.request import HEDGED, Request, Scorer, finite, shorten
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import ConnectionOptions, HttpClient, connection_limit
from gleanrl.utils.retry import Fatal

EXPLANATION = 2000
"""Maximum length, in characters, of the explanation that a service or a judge gives."""


class ServiceScorer(Scorer):
    """A scorer that sends requests with an `HttpClient`. Nothing is connected before the first request."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self.slots = connection_limit(client.connections)

    @classmethod
    def check(cls, **options: Any) -> None:
        cls(**options)

    async def aclose(self) -> None:
        await self._client.aclose()


class HttpReward(ServiceScorer):
    """A reward behind a service of your own.

    It POSTs ``{"task_id", "payload", "messages", "response", "trajectory_id", "environment_score"}`` (the last is null
    if the environment gave no score) and expects ``{"score": number}``, and optionally
    ``"explanation"`` (text), ``"parts"`` (numbers by name) and ``"usage"`` (``prompt_tokens``, ``completion_tokens``).

    Args:
        url: where to POST.
        score: where the score is in the answer, as a path: ``score``, ``result.value``, ``data.0.score``.
        version: change this text when the service scores differently, so that old scores in caches and journals are not
            used.
        fields: additional fields of each request's body; ``"env:NAME"`` reads a text from an environment variable.
        connection: ``api_key_env``, ``headers``, ``timeout_s``, ``connections`` of `gleanrl.utils.http.HttpClient`.

    Raises:
        UserError: a value above is invalid, or the environment variable is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        score: str = "score",
        version: str = "",
        fields: Mapping[str, Any] | None = None,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        if not isinstance(score, str) or not all(score.split(".")):
            raise UserError(f"score = {score!r}: give the path of the score in the answer, e.g. result.score")
        super().__init__(HttpClient(url, **connection))
        self._path, self._fields = score, self._client.hide_keys(fields or {})
        self.version = version_of([url, score, version, dict(fields or {})])

    async def __call__(self, request: Request) -> Score:
        """Score a request. Raises `Retryable` or `Fatal` if there is no score."""
        body = {
            **self._fields,
            "task_id": request.task.id,
            "payload": dict(request.task.payload),
            "messages": list(request.messages),
            "response": request.response,
            "trajectory_id": request.trajectory_id,
            "environment_score": request.own.value if request.own.valid else None,
        }
        answer = await self._client.request("POST", "", body, idempotency_key=idempotency_key(request, self.version))
        found, missing = answer, ""
        for step in self._path.split("."):
            if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            elif isinstance(found, dict) and step in found:
                found = found[step]
            else:
                missing = self._path
                break
        value = finite(found)
        if missing or value is None:
            missing = missing or f"number at {self._path}"
            quoted = self._client.quote(json.dumps(answer))
            message = f"the answer of {self._client.url} has no {missing}: {quoted}"
            raise Fatal(message, cause="answer", cost=read_cost(answer))
        parts, explanation = read_cost(answer), None
        if isinstance(answer, dict):
            given = answer.get("parts")
            for name, part in given.items() if isinstance(given, dict) else ():
                if name not in parts and (part_value := finite(part)) is not None:
                    parts[name] = part_value
            if isinstance(answer.get("explanation"), str):
                explanation = shorten(self._client.redact(answer["explanation"]), EXPLANATION)
        return Score(value, parts=parts, explanation=explanation)


def idempotency_key(request: Request, version: str) -> str | None:
    """Return a key that is the same in every attempt of a request and after every restart.

    None if the task's payload is not JSON. The second of two hedged requests has a key of its own, because the service
    is meant to work on both.
    """
    try:
        key = request.key(version)
    except TypeError:
        return None
    return f"{key}-second" if HEDGED.get() else key


def read_cost(answer: Any) -> dict[str, float]:
    """Return the token counts in a service's ``usage``, named ``cost/prompt_tokens`` and ``cost/completion_tokens``."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    cost = {}
    if isinstance(usage, dict):
        for name in ("prompt_tokens", "completion_tokens"):
            if (count := finite(usage.get(name))) is not None:
                cost[f"cost/{name}"] = count
    return cost


def version_of(settings: Any) -> str:
    """Return 16 hex digits that change with a scorer's ``settings``. Raises `UserError` if these are not JSON."""
    try:
        text = json.dumps(settings, sort_keys=True)
    except TypeError as error:
        raise UserError(f"a reward's options travel as JSON: {error}") from None
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
