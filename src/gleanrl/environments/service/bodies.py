"""What requests and answers look like: pydantic models for validation and for the OpenAPI document.

Those of the house's dataclasses are made from the dataclasses, so that document and wire cannot disagree.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from gleanrl.environments.service.encoding import hints, inner, many, named, required
from gleanrl.protocols import Observation, Split
from gleanrl.types import Message, Score, Task

EpisodeId = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_-]{16,64}$",
        description="Chosen by the client, at random, anew for each episode: so a repeated request is known as such.",
    ),
]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]  # 2.0 is an integer in JSON
_STRICT = ConfigDict(strict=True)  # true is no 1: what is not as documented is told, not guessed


@cache
def model_of(kind: Any) -> Any:
    """A pydantic model with the fields of a dataclass or typed dictionary. The latter may hold more than its own."""
    if is_typeddict(kind):
        marks = {name: get_origin(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
        needed = {
            name for name, mark in marks.items() if mark is Required or (kind.__total__ and mark is not NotRequired)
        }
        own: dict[str, Any] = {  # null is what data sets make of a field that other rows have
            name: (_type(hint), ...) if name in needed else (_type(hint) | None, None)
            for name, hint in hints(kind).items()
        }
        return create_model(kind.__name__, __config__=ConfigDict(extra="allow", strict=True), **own)
    own = {
        field.name: (_type(hints(kind)[field.name]), ... if required(field) else _default(field))
        for field in fields(kind)
        if field.init
    }
    return create_model(kind.__name__, __config__=_STRICT, **own)


def _type(hint: Any) -> Any:
    hint, optional = inner(hint)
    if is_dataclass(hint) or is_typeddict(hint):
        found: Any = model_of(hint)
    elif hint is float:
        found, optional = float | Literal["Infinity", "-Infinity"], True  # null is NaN
    elif hint is int:
        found = Whole
    elif (member := many(hint)) is not None:
        found = list[_type(member)]
    elif (member := named(hint)) is not None:
        found = dict[str, Any if member is Any else _type(member)]
    else:
        found = hint
    return found | None if optional else found


def _default(field: Any) -> Any:
    """The field's default, as pydantic takes it."""
    return Field(default_factory=field.default_factory) if field.default is MISSING else field.default


if TYPE_CHECKING:
    MessageModel = TaskModel = ScoreModel = ObservationModel = Any
else:
    MessageModel, TaskModel, ScoreModel, ObservationModel = map(model_of, (Message, Task, Score, Observation))


class _Strict(BaseModel):
    model_config = _STRICT


class CreateBody(_Strict):
    id: EpisodeId
    task: TaskModel
    environment: str | None = Field(None, description="The fingerprint that the client expects the server to have.")


class StepBody(_Strict):
    id: EpisodeId
    step: Whole = Field(ge=1, description="1 for the first; each one more. The same number again is the same request.")
    message: MessageModel


class EpisodeBody(_Strict):
    id: EpisodeId


class ConcludeBody(_Strict):
    id: EpisodeId
    stop: Literal["max_turns", "context_full"] = Field(description="What it ran out of.")


class ToolsBody(_Strict):
    task: TaskModel


class TasksBody(_Strict):
    split: Split
    count: Whole = Field(ge=0, le=1_000_000, description="The first so many tasks of the split ...")
    start: Whole = Field(0, ge=0, description="... without those before this one: a long list is read page by page.")


class PrepareBody(_Strict):
    tasks: list[TaskModel] = Field(max_length=4096)


class DemonstrateBody(_Strict):
    task: TaskModel
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
    tools: list[dict[str, Any]] | None = Field(
        description="What episodes declare; null where /tools says it of a task."
    )
    max_instances: int
    idle_timeout_s: float
    version: str = Field(description="Of Glean RL.")


class TasksAnswer(BaseModel):
    tasks: list[TaskModel]
    end: bool = Field(description="No further page.")


class EpisodeAnswer(BaseModel):
    id: EpisodeId
    step: int = Field(description="0 for the first observation.")
    observation: ObservationModel


class EvaluateAnswer(BaseModel):
    id: EpisodeId
    step: int = Field(description="Steps answered so far.")
    done: bool
    score: ScoreModel | None = Field(description="What the environment gave last; null if it gave none.")


class ReleaseAnswer(BaseModel):
    released: bool = Field(description="False where there was no such episode (any more).")


class ConcludeAnswer(BaseModel):
    id: EpisodeId
    step: int
    done: bool
    score: ScoreModel | None = Field(
        description="What the environment gives for the episode as it stands, if anything."
    )


class ToolsAnswer(BaseModel):
    tools: list[dict[str, Any]]


class PrepareAnswer(BaseModel):
    prepared: int


class DemonstrateAnswer(BaseModel):
    messages: list[MessageModel]
    score: ScoreModel


class HealthAnswer(BaseModel):
    status: Literal["ok", "draining"]
    version: str


class RouteProfile(BaseModel):
    route: str
    requests: int
    statuses: dict[str, int]
    latency_p50_ms: float = Field(description="Of the last 1,024, with whatever the environment took.")
    latency_p99_ms: float
    cpu_ms: float = Field(
        description="Mean processor time in the server's own process; the environments' is the workers'."
    )


class WorkerProfile(BaseModel):
    pid: int
    memory_mib: float | None = Field(description="Resident; null where the system does not say.")
    cpu_s: float | None


class ProfileAnswer(BaseModel):
    uptime_s: float
    instances: int
    max_instances: int
    running: int = Field(description="Instances that a request is being answered for.")
    created: int
    expired: int
    failed: int
    refused: int
    memory_mib: float | None = Field(description="Of the server and its workers.")
    max_memory_mib: float | None
    cpu_s: float = Field(description="Of the server's own process.")
    workers: list[WorkerProfile]
    workers_replaced: int
    routes: list[RouteProfile]


class Problem(BaseModel):
    """The body of every answer that is no success."""

    error: str = Field(description="A word to tell them apart; in the list of /docs.")
    detail: str
    kind: str | None = Field(None, description="The exception's type, where the environment raised.")
    traceback: str | None = None
