"""A reward behind plain HTTP: one POST for a trajectory, a number in the answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Unpack

from gleanrl.rewards.request import HEDGED, Request, Scorer
from gleanrl.rewards.returned import finite
from gleanrl.types import Score
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import ConnectionOptions, HttpClient
from gleanrl.utils.retry import Fatal

EXPLANATION = 2000  # characters kept of what the service explains


class ServiceScorer(Scorer):
    """A scorer that sends requests with an `HttpClient`. Nothing is connected before the first request."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self.slots = client.max_connections

    @classmethod
    def check(cls, **options: Any) -> None:
        cls(**options)

    async def aclose(self) -> None:
        await self._client.aclose()


class HttpReward(ServiceScorer):
    """A reward behind a service of your own.

    It POSTs ``{"task_id", "payload", "messages", "response", "trajectory_id", "environment_score"}`` (the last is null
    where the environment gave none) and expects ``{"score": number}``, and optionally
    ``"explanation"`` (text), ``"parts"`` (numbers by name) and ``"usage"`` (``prompt_tokens``, ``completion_tokens``).

    Args:
        url: where to POST.
        score: where the score is in the answer, as a path: ``score``, ``result.value``, ``data.0.score``.
        version: say another one when the service judges otherwise, so that caches and journals are not trusted.
        fields: more fields of each request's body; ``"env:NAME"`` takes a text from the environment.
        connection: ``api_key_env``, ``headers``, ``timeout_s``, ``connections`` of `gleanrl.utils.http.HttpClient`.

    Raises:
        UserError: a value above has no meaning, or the environment variable is not set.
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
        """Raises `Retryable` or `Fatal` where there is no score."""
        body = {**self._fields, **_body_of(request)}
        answer = await self._client.request("POST", "", body, idempotency_key=idempotency_key(request, self.version))
        value = number_at(answer, self._path, self._client)
        rest = answer if isinstance(answer, dict) else {}
        parts = rest.get("parts")
        numbers = {name: finite(part) for name, part in parts.items()} if isinstance(parts, dict) else {}
        logged = {name: number for name, number in numbers.items() if number is not None}
        said = rest.get("explanation")
        explanation = self._client.redact(said)[:EXPLANATION] if isinstance(said, str) else None
        return Score(value, parts={**logged, **cost_of(answer)}, explanation=explanation)


def idempotency_key(request: Request, version: str) -> str | None:
    """The same in every attempt of a request and after every restart; None where the task's payload is not JSON.

    The second of two hedged requests has a key of its own, because the service is meant to work on both.
    """
    try:
        key = request.key(version)
    except TypeError:
        return None
    return f"{key}-second" if HEDGED.get() else key


def number_at(answer: Any, path: str, client: HttpClient) -> float:
    """The finite number at a dotted path of an answer. Raises `Fatal` where there is none."""
    found = answer
    for step in path.split("."):
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            break
    else:
        if (value := finite(found)) is not None:
            return value
        path = f"number at {path}"
    said = client.quote(json.dumps(answer))
    raise Fatal(f"the answer of {client.url} has no {path}: {said}", cause="answer", cost=cost_of(answer))


def cost_of(answer: Any) -> dict[str, float]:
    """Tokens as a service reports them in ``usage``, under the names of `Score.parts`."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return {}
    counts = {name: finite(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")}
    return {f"cost/{name}": count for name, count in counts.items() if count is not None}


def version_of(settings: Any) -> str:
    """16 hex digits that change with what a scorer was set to. Raises `UserError` where that is not JSON."""
    try:
        text = json.dumps(settings, sort_keys=True)
    except TypeError as error:
        raise UserError(f"a reward's options travel as JSON: {error}") from None
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _body_of(request: Request) -> dict[str, Any]:
    return {
        "task_id": request.task.id,
        "payload": dict(request.task.payload),
        "messages": list(request.messages),
        "response": request.response,
        "trajectory_id": request.trajectory_id,
        "environment_score": request.own.value if request.own.valid else None,
    }
