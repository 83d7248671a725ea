"""Serves the environment over OpenEnv's protocol too, so that TRL and others who speak it can play the tasks.

A WebSocket connection to ``/ws`` is a session, which plays one episode after the other. An action is the model's
message: its text as ``message`` and, if it calls tools, ``tool_calls``. An observation has the ``messages`` that the
environment returns; that of a reset begins with the task's prompt, and has the ``tools``. The rewards of an episode add
up to its score. OpenEnv's Task API lists the splits and their tasks, and ``reset(split=..., index=...)`` plays a task.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import Response, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments.service.bodies import encode, read_task
from gleanrl.environments.service.episodes import Answer, Episodes, Refused
from gleanrl.protocols import Split
from gleanrl.types import OpenAIMessage, Task
from gleanrl.utils.serialize import from_builtins

_TYPES: Mapping[Split, str] = {"train": "train", "eval": "test", "warm_start": "train"}
"""The types that OpenEnv knows, by split."""
_LIST, _TEXT = {"type": "array", "items": {"type": "object"}}, {"type": "string"}
_ACTION = {
    "title": "MessageAction",
    "type": "object",
    "required": ["message"],
    "properties": {
        "message": {**_TEXT, "description": "the text of the model's message"},
        "tool_calls": {**_LIST, "description": "calls of tools, as in OpenAI's chat completions"},
        "metadata": {"type": "object"},
    },
}
_OBSERVATION = {
    "title": "MessagesObservation",
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {**_LIST, "description": "what continues the conversation, in OpenAI's form"},
        "tools": {**_LIST, "description": "the tools that the model may call, as OpenAI function schemas"},
        "metadata": {"type": "object"},
    },
}
_STATE = {
    "title": "State",
    "type": "object",
    "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}},
}


class _SplitBody(BaseModel):
    model_config = ConfigDict(strict=True)

    split: Split


class _IndexBody(_SplitBody):
    index: int


class _RangeBody(_SplitBody):
    start: int | None = None
    stop: int | None = None


class _TaskBody(_SplitBody):
    """The arguments of a reset. Clients may send more, such as an ``episode_id``."""

    split: Split = "train"
    index: int | None = Field(None, ge=0)
    seed: int | None = None


class OpenEnvRoutes:
    """The routes of OpenEnv's protocol, which `Service` adds to its own.

    ``gets`` are endpoints by path. ``posts`` are models of bodies and endpoints by path. `session` is the endpoint of
    ``/ws``.

    Args:
        version: the taskset's.
        list_tasks: returns the first tasks of a split, each encoded as JSON.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        version: str,
        episodes: Episodes,
        list_tasks: Callable[[Split, int], Awaitable[Sequence[bytes]]],
    ) -> None:
        self._shown, self._version, self._episodes, self._list_tasks = settings.name, version, episodes, list_tasks
        self._name = re.sub(r"\W+", "_", settings.name).strip("_")
        self._counts = {"train": settings.train_tasks, "eval": settings.eval_tasks}
        self._counts["warm_start"] = settings.warm_start_tasks
        self.gets = {
            "/metadata": self.metadata,
            "/schema": self.schema,
            "/list_environments": self.environments,
            f"/{self._name}/splits": self.splits,
        }
        self.posts = {
            f"/{self._name}/tasks": (_SplitBody, self.tasks),
            f"/{self._name}/num_tasks": (_SplitBody, self.num_tasks),
            f"/{self._name}/task": (_IndexBody, self.task),
            f"/{self._name}/task_range": (_RangeBody, self.task_range),
        }

    async def metadata(self) -> Response:
        about = f"The environment {self._shown} of Glean RL"
        return Answer({"name": self._name, "description": about, "version": self._version or None})

    async def schema(self) -> Response:
        return Answer({"action": _ACTION, "observation": _OBSERVATION, "state": _STATE})

    async def environments(self) -> Response:
        return Answer([self._name])

    async def splits(self) -> Response:
        return Answer([{"name": name, "type": kind} for name, kind in _TYPES.items()])

    async def tasks(self, body: _SplitBody) -> Response:
        return Answer({"tasks": self._describe(body.split, await self._list(body.split)), "env_name": self._name})

    async def num_tasks(self, body: _SplitBody) -> Response:
        return Answer({"num_tasks": len(await self._list(body.split))})

    async def task(self, body: _IndexBody) -> Response:
        found = await self._list(body.split)
        if not 0 <= body.index < len(found):
            raise Refused(422, "invalid", f"index: {body.split} has {len(found)} tasks")
        return Answer({"task": self._describe(body.split, found)[body.index]})

    async def task_range(self, body: _RangeBody) -> Response:
        described = self._describe(body.split, await self._list(body.split))
        return Answer({"tasks": described[body.start : body.stop]})

    async def session(self, socket: WebSocket) -> None:
        """Play the episodes of one connection until the client closes it."""
        episodes = self._episodes
        episode, step, earned = "", 0, 0.0
        await socket.accept()
        try:
            while True:
                try:
                    try:
                        text = await socket.receive_text()
                    except KeyError:
                        raise Refused(422, "invalid", "a message is a text, not bytes") from None
                    kind, data = _read_order(text)
                    if kind == "close":
                        break
                    if kind == "reset":
                        task = await self._find(data)
                        if episode:
                            await episodes.release(episode)
                        episode, step, earned = uuid.uuid4().hex, 0, 0.0
                        content = _content(await episodes.create(episode, task))
                        content["messages"] = [*task.prompt, *content["messages"]]
                    elif kind == "step":
                        if not episode:
                            raise Refused(409, "conflict", "reset the environment first")
                        content = _content(await episodes.step(episode, step + 1, data))
                        step += 1
                    else:
                        answer = {"type": "state", "data": {"episode_id": episode or None, "step_count": step}}
                        await socket.send_text(json.dumps(answer))
                        continue
                    # The service's score is what the episode has earned so far, OpenEnv's reward is that of one step.
                    score, reward = content["score"], content["reward"]
                    if score is not None:
                        reward = score["value"] - earned if score["valid"] else None
                    earned += reward or 0.0
                    shown = {name: content[name] for name in ("messages", "tools")} | {"metadata": content["info"]}
                    result = {"observation": shown, "reward": reward, "done": content["done"]}
                    answer = {"type": "observation", "data": result}
                except Refused as refused:
                    said = json.loads(bytes(refused.answer.body))
                    code = {422: "VALIDATION_ERROR", 429: "CAPACITY_REACHED"}.get(refused.answer.status_code)
                    wrong = [{"loc": [], "msg": said["detail"]}]
                    result = {"message": said["detail"], "code": code or "EXECUTION_ERROR", "errors": wrong}
                    answer = {"type": "error", "data": result}
                await socket.send_text(encode(answer).decode())
            await socket.close()
        except WebSocketDisconnect:
            pass
        finally:
            if episode:
                await episodes.release(episode)

    async def _list(self, split: Split) -> Sequence[bytes]:
        return await self._list_tasks(split, self._counts[split])

    async def _find(self, arguments: _TaskBody) -> Task:
        """Return the task that the arguments of a reset select: by its index, or by a seed, or the first one."""
        found = await self._list(arguments.split)
        index = arguments.index
        if index is None:
            index = (arguments.seed or 0) % max(1, len(found))
        if index >= len(found):
            raise Refused(422, "invalid", f"index: {arguments.split} has {len(found)} tasks")
        return read_task(json.loads(found[index]))

    def _describe(self, split: Split, found: Sequence[bytes]) -> list[dict[str, Any]]:
        """Return what the Task API says of tasks. Their payloads are left out, because they may hold the answers."""
        described = []
        for index, data in enumerate(found):
            task = json.loads(data)
            described.append({"id": task["id"], "index": index, "split": split, "kind": task.get("kind", "")})
        return described


def _read_order(text: str) -> tuple[str, Any]:
    """Return the kind of a client's message, and the arguments of a reset or the message of a step.

    Raises:
        Refused: the message does not have the form that OpenEnv's protocol demands.
    """
    try:
        order = json.loads(text)
        kind, data = order["type"], order.get("data")
        if kind == "reset":
            return kind, _TaskBody.model_validate(data or {})
        if kind == "step":
            message: dict[str, Any] = {"role": "assistant", "content": data["message"]}
            if data.get("tool_calls"):
                message["tool_calls"] = data["tool_calls"]
            from_builtins(message, OpenAIMessage)
            return kind, message
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        detail = " ".join(str(error).split())[:500]
        raise Refused(422, "invalid", f"{type(error).__name__}: {detail}") from None
    if kind not in ("state", "close"):
        raise Refused(422, "invalid", f"no message of type {kind!r}: reset, step, state or close")
    return kind, None


def _content(response: Response) -> dict[str, Any]:
    """Return the observation that an answer of the service has. Raises `Refused` if the episode failed."""
    body = json.loads(bytes(response.body))
    if response.status_code != 200:
        raise Refused(response.status_code, body["error"], body["detail"])
    return body["observation"]
