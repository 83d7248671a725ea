"""Bodies of an environment service's requests and answers.

The server validates requests with these models. The models of answers serve only as documentation, because each route
encodes its answer itself. The client does not use the models, only the functions `encode` and `read_task`.
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
"""A message as a JSON object. The schema is only shown in the documentation of the service; messages are not checked by
it."""
TaskJson = Annotated[Json, WithJsonSchema(_TASK)]
EpisodeId = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_-]{16,64}$",
        description="A random id that the client chooses for each episode, so that a repeated request is recognised.",
    ),
]


class NotJson(ValueError):
    """Raised for a value that cannot be written as JSON."""


def encode(value: Any) -> bytes:
    """Encode a value, which may contain dataclasses, as JSON (see `gleanrl.utils.serialize.to_json`).

    Raises `NotJson` if the value contains something that cannot be written as JSON.
    """
    try:
        return to_json(value)
    except TypeError as error:
        raise NotJson(str(error)) from None


def read_task(data: Json) -> Task:
    """Return the task that ``data`` describes.

    Raises `gleanrl.utils.serialize.DecodeError` if ``data`` is not a valid task.
    """
    from_builtins(data.get("prompt", ()), list[OpenAIMessage])
    return from_builtins(data, Task)


Whole = Annotated[int, BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)  # so that `true` is not accepted as the number 1


class CreateBody(_Strict):
    id: EpisodeId
    task: TaskJson = Field(description="A task as /tasks lists it: its id and, where set, prompt, payload and kind.")
    environment: str | None = Field(
        None, description="The fingerprint that the server must have, else it refuses the request; null = any."
    )


class StepBody(_Strict):
    id: EpisodeId
    step: Whole = Field(
        ge=1,
        description="Number of the step: 1 for the first step of an episode, and one more for each further step. The "
        "last number with the same message again is a repeated request, which gets the same answer.",
    )
    message: MessageJson = Field(description="The agent's message: role, content and, if it calls tools, tool_calls.")


class EpisodeBody(_Strict):
    id: EpisodeId


class ConcludeBody(_Strict):
    id: EpisodeId
    stop: Literal["max_turns", "context_full"] = Field(
        description="Why the client ends the episode: it is out of turns (max_turns) or of context (context_full)."
    )


class ToolsBody(_Strict):
    task: TaskJson


class TasksBody(_Strict):
    split: Split
    count: Whole = Field(ge=0, le=1_000_000, description="Number of tasks in the list: the first ones of the split.")
    start: Whole = Field(
        0, ge=0, description="Index in the list of the first task of this page; a long list has several pages."
    )


class PrepareBody(_Strict):
    tasks: list[TaskJson] = Field(max_length=4096)


class DemonstrateBody(_Strict):
    task: TaskJson
    seed: Whole
    noise: float = Field(0.0, ge=0.0, le=1.0)


class TasksetAnswer(BaseModel):
    environment: str
    fingerprint: str = Field(
        description="A hash of the environment, its options, its data, the seed and the version of Glean RL."
    )
    demonstrates: bool = Field(description="Whether the server has the route /demonstrate.")
    prepares: bool = Field(description="Whether the server has the route /prepare.")
    phrases: list[str] = Field(description="Texts that the environment may say but that no demonstration contains.")
    needs_reward: bool = Field(description="True if the environment gives no scores, so that a run needs a reward.")
    weights: dict[str, float] | None = Field(
        description="Weight of each source of tasks in training, on any scale; null if there is only one source."
    )
    tools: list[Json] | None = Field(
        description="The tools of every episode; null if tools depend on the task, and /tools lists them."
    )
    max_instances: int
    idle_timeout_s: float
    version: str = Field(description="Version of Glean RL.")


class TasksAnswer(BaseModel):
    tasks: list[Json]
    end: bool = Field(description="Whether this is the last page of the list.")


class EpisodeAnswer(BaseModel):
    id: EpisodeId
    step: int = Field(description="Number of the step that led to this observation; 0 for the first one.")
    observation: Json = Field(
        description="An observation, with the fields messages, done, score, reward, state, info and tools."
    )


class ScoreAnswer(BaseModel):
    id: EpisodeId
    step: int = Field(description="Number of steps that the environment has answered.")
    done: bool
    score: Json | None = Field(
        description="/evaluate: the last score that the environment gave. /conclude: the score that it gives for this "
        "end. null if there is none."
    )


class ReleaseAnswer(BaseModel):
    released: bool = Field(description="False if the server had no live episode with this id.")


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
    running: int = Field(description="Number of episodes with a request under way.")
    created: int
    expired: int
    failed: int
    refused: int
    memory_mib: float = Field(description="Resident memory of the server and its workers, in MiB.")
    max_memory_mib: float | None
    cpu_s: float = Field(description="Processor time of the server's own process, in seconds.")
    workers: list[int] = Field(description="Process ids of the workers.")
    workers_replaced: int


class Problem(BaseModel):
    """The body of every answer that reports a failure."""

    error: str = Field(description="A word for the kind of failure; /docs lists the words of each status.")
    detail: str
    kind: str | None = Field(None, description="Type of the exception, if the environment raised one.")
    traceback: str | None = None
