"""Bodies of an environment service's requests and answers.

The server validates requests with these models. The models of answers serve only as documentation, because each route
encodes its answer itself. The client uses `encode` and `read_task`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from gleanrl.protocols import Split
from gleanrl.types import OpenAIMessage, Task
from gleanrl.utils.serialize import from_builtins, to_json

Json = dict[str, Any]
_OBJECT, _TEXT = {"type": "object"}, {"type": "string"}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": _TEXT,
        "content": _TEXT,
        "tool_calls": {"type": "array", "items": _OBJECT},
        "tool_call_id": _TEXT,
        "name": _TEXT,
    },
}
_TASK = {
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": _TEXT,
        "prompt": {"type": "array", "items": _MESSAGE},
        "payload": _OBJECT,
        "kind": _TEXT,
    },
}
MessageJson = Annotated[Json, WithJsonSchema(_MESSAGE)]
"""A message as JSON; the schema only documents it."""
TaskJson = Annotated[Json, WithJsonSchema(_TASK)]
EpisodeId = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_-]{16,64}$",
        description="A random id that the client chooses for each episode, so that a repeated request is recognised.",
    ),
]


class NotJson(ValueError):
    """A value that cannot be written as JSON."""


def encode(value: Any) -> bytes:
    """Encode a value, which may hold dataclasses, with `gleanrl.utils.serialize.to_json`. Raises `NotJson`."""
    try:
        return to_json(value)
    except TypeError as error:
        raise NotJson(str(error)) from None


def read_task(data: Json) -> Task:
    """Return the task that ``data`` describes. Raises `gleanrl.utils.serialize.DecodeError`."""
    from_builtins(data.get("prompt", ()), list[OpenAIMessage])
    return from_builtins(data, Task)


Whole = Annotated[int, BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)  # so that `true` is not accepted as the number 1


class CreateBody(_Strict):
    id: EpisodeId
    task: TaskJson = Field(description="As /tasks lists it: id, and perhaps prompt, payload, kind.")
    environment: str | None = Field(None, description="The fingerprint that the client expects the server to have.")


class StepBody(_Strict):
    id: EpisodeId
    step: Whole = Field(ge=1, description="1 for the first; each one more. The same number again is the same request.")
    message: MessageJson = Field(description="The agent's: role, content, and perhaps tool_calls.")


class EpisodeBody(_Strict):
    id: EpisodeId


class ConcludeBody(_Strict):
    id: EpisodeId
    stop: Literal["max_turns", "context_full"] = Field(description="What it ran out of.")


class ToolsBody(_Strict):
    task: TaskJson


class TasksBody(_Strict):
    split: Split
    count: Whole = Field(ge=0, le=1_000_000, description="The first so many tasks of the split ...")
    start: Whole = Field(0, ge=0, description="... without those before this one: a long list is read page by page.")


class PrepareBody(_Strict):
    tasks: list[TaskJson] = Field(max_length=4096)


class DemonstrateBody(_Strict):
    task: TaskJson
    seed: Whole
    noise: float = Field(0.0, ge=0.0, le=1.0)


class TasksetAnswer(BaseModel):
    environment: str
    fingerprint: str = Field(description="Changes with the environment, its options, its data and the seed.")
    demonstrates: bool = Field(description="Whether /demonstrate is there.")
    prepares: bool = Field(description="Whether /prepare is there.")
    phrases: list[str] = Field(description="What the environment says that no demonstration shows.")
    needs_reward: bool = Field(description="It scores nothing itself.")
    weights: dict[str, float] | None = Field(description="Share of each source in training, where there are several.")
    tools: list[Json] | None = Field(description="What episodes declare; null where /tools says it of a task.")
    max_instances: int
    idle_timeout_s: float
    version: str = Field(description="Of Glean RL.")


class TasksAnswer(BaseModel):
    tasks: list[Json]
    end: bool = Field(description="No further page.")


class EpisodeAnswer(BaseModel):
    id: EpisodeId
    step: int = Field(description="0 for the first observation.")
    observation: Json = Field(description="messages, done, score, info, tools.")


class ScoreAnswer(BaseModel):
    id: EpisodeId
    step: int = Field(description="Steps answered so far.")
    done: bool
    score: Json | None = Field(description="What the environment gave last; null if it gave none.")


class ReleaseAnswer(BaseModel):
    released: bool = Field(description="False where there was no such episode (any more).")


class ToolsAnswer(BaseModel):
    tools: list[Json]


class PrepareAnswer(BaseModel):
    prepared: int


class DemonstrateAnswer(BaseModel):
    messages: list[Json]
    score: Json


class HealthAnswer(BaseModel):
    status: Literal["ok", "draining"]
    version: str


class ProfileAnswer(BaseModel):
    uptime_s: float
    instances: int
    max_instances: int
    running: int = Field(description="Instances that a request is being answered for.")
    created: int
    expired: int
    failed: int
    refused: int
    memory_mib: float = Field(description="Resident, of the server and its workers.")
    max_memory_mib: float | None
    cpu_s: float = Field(description="Processor seconds of the server's own process.")
    workers: list[int] = Field(description="Process ids.")
    workers_replaced: int


class Problem(BaseModel):
    """The body of every answer that reports a failure."""

    error: str = Field(description="A word to tell them apart; in the list of /docs.")
    detail: str
    kind: str | None = Field(None, description="The exception's type, where the environment raised.")
    traceback: str | None = None
