"""A reward that an HTTP service computes: `HttpReward` POSTs each trajectory and reads a number from the answer.

The other rewards that call a service, `Judge` and `PoolingServer`, use the base class and the functions of this module
too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Unpack
from urllib.parse import urlsplit

from gleanrl.rewards.request import HEDGED, Request, Scorer, finite, number, shorten
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import ConnectionOptions, HttpClient, connection_limit
from gleanrl.utils.retry import Fatal

EXPLANATION = 2000
"""Maximum length, in characters, of the explanation that a service or a judge gives."""


class ServiceScorer(Scorer):
    """Base class of scorers that call a service with an `HttpClient`. The first request opens the first connection."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self.slots = connection_limit(client.connections)

    @classmethod
    def check(cls, **options: Any) -> None:
        cls(**options)

    async def aclose(self) -> None:
        await self._client.aclose()


class HttpReward(ServiceScorer):
    """A reward that your own HTTP service computes.

    The body of each POST request is a JSON object with the keys ``task_id``, ``payload``, ``messages``, ``response``,
    ``trajectory_id`` and ``environment_score`` (null if the environment gave no score). The service answers with
    ``{"score": number}``. The answer may also contain ``"turns"`` (a list of turn rewards, see `Score.turns`),
    ``"explanation"`` (a text), ``"parts"`` (numbers by name, which are logged) and ``"usage"`` (the token counts
    ``prompt_tokens`` and ``completion_tokens``).

    Args:
        url: address of the service; ``"env:NAME"`` is read from the environment variable NAME.
        score: path of the score in the answer, such as ``score``, ``result.value`` or ``data.0.score``.
        version: a label of the way in which the service scores. Change it when the service scores differently, or if
            another one takes its place, so that old scores in caches and journals are not used. The host and the port
            of ``url`` are no part of this: a service that moves to another machine still gives the same scores.
        fields: additional fields of each request's body. A text ``"env:NAME"`` is replaced by the value of the
            environment variable NAME.
        connection: ``api_key_env``, ``headers``, ``timeout_s``, ``connections`` of `gleanrl.utils.http.HttpClient`.

    Raises:
        UserError: an argument is invalid, or an environment variable is not set.
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
        place = urlsplit(url)
        where = url if url.startswith("env:") else f"{place.path.rstrip('/')}?{place.query}"
        self.version = version_of([where, score, version, dict(fields or {})])

    async def __call__(self, request: Request) -> Score:
        """Return the score that the service gives. Raises `Retryable` or `Fatal` if it gives none."""
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
        parts, explanation, turns = read_cost(answer), None, None
        if isinstance(answer, dict):
            given = answer.get("parts")
            for name, part in given.items() if isinstance(given, dict) else ():
                if name not in parts and (part_value := finite(part)) is not None:
                    parts[self._client.redact(name)] = part_value
            if isinstance(answer.get("explanation"), str):
                explanation = shorten(self._client.redact(answer["explanation"]), EXPLANATION)
            if isinstance(answer.get("turns"), list):
                turns = tuple(number(reward) for reward in answer["turns"])
        return Score(value, parts=parts, explanation=explanation, turns=turns)


def idempotency_key(request: Request, version: str) -> str | None:
    """Return the key by which a service recognises further attempts of a request, also after the run was restarted.

    Returns None if the task's payload is not JSON-serialisable. The second of two hedged requests gets another key,
    because with the same key a service may wait for the first request instead of computing the score twice.
    """
    try:
        key = request.key(version)
    except TypeError:
        return None
    return f"{key}-second" if HEDGED.get() else key


def read_cost(answer: Any) -> dict[str, float]:
    """Return the token counts in the ``usage`` of a service's answer; empty if the answer has none.

    Their names are ``cost/prompt_tokens`` and ``cost/completion_tokens``.
    """
    usage = answer.get("usage") if isinstance(answer, dict) else None
    cost = {}
    if isinstance(usage, dict):
        for name in ("prompt_tokens", "completion_tokens"):
            if (count := finite(usage.get(name))) is not None:
                cost[f"cost/{name}"] = count
    return cost


def version_of(settings: Any) -> str:
    """Return a hash of a scorer's ``settings``, 16 hex digits, to be used as `Scorer.version`.

    Raises `UserError` if the settings are not JSON-serialisable.
    """
    try:
        text = json.dumps(settings, sort_keys=True)
    except TypeError as error:
        raise UserError(f"a reward's options travel as JSON: {error}") from None
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
