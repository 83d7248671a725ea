"""OpenEnv: environments that somebody's server plays, one WebSocket session an episode.

Spoken as OpenEnv's own client speaks it, but without that package: actions and observations are JSON, described by the
schemas that the server gives. Text becomes an action, and an observation text, by what the schemas say; a function of
the user's own takes the place of either. A server whose actions are tool calls has its tools declared to the model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count as counting
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import Field

from gleanrl.environments.splits import fingerprint, named, select
from gleanrl.protocols import Environment, Observation, Split
from gleanrl.rollout.thinking import answer_of
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object

log = logging.getLogger(__name__)

ANSWER_S = 10.0  # for a server to describe itself
CLOSE_S = 5.0  # for it to end a session
_OWN = ("metadata", "done", "reward")  # fields that every action or observation has
_NUMBER = re.compile(r"(?:(?<![\w.)\]}%])[-\u2212])?\d+(?:\.\d+)?")  # in "2-3" the minus is no sign
_TOOLS = ("Action", "CallToolAction", "ListToolsAction")  # schemas of servers whose actions are tool calls

ToAction = Callable[[Message, Mapping[str, Any]], Mapping[str, Any]]
"""``action(message, schema)``: the action that a sampled message is, by the JSON schema of actions. A ValueError is
told to the model as an error, and nothing is done."""
Describe = Callable[[Mapping[str, Any], bool], "str | Sequence[Message]"]
"""``observe(observation, opening)``: what the model is told of an observation, one user message or several messages."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class OpenEnvTaskset:
    """Episodes of the OpenEnv server at ``url``, e.g. ``http://127.0.0.1:8000``.

    A task is what its reset gets: one of ``resets``, or the next seed, and ``reset`` with it.

    Args:
        url: of the server, ``http`` or ``ws``.
        reset: arguments of every reset.
        resets: those of each task, where tasks are more than seeds.
        action: import path of a `ToAction`; None goes by the schema: an object if the model writes one, else the text
            (or the last number in it) as the action's only field.
        observe: import path of a `Describe`; None takes its messages or its only text, else all of it as JSON.
        reward: an episode earns the sum of its steps' rewards, or the last one.
        name: what the environment is called in task ids; None is what the server says, and where it says nothing, its
            url is part of the ids.
        token_env: environment variable with a token for the server, such as a private Space wants.
    """

    url: str
    reset: dict[str, Any] = Field(default_factory=dict)
    resets: list[dict[str, Any]] | None = None
    action: str | None = None
    observe: str | None = None
    reward: Literal["sum", "last"] = "sum"
    name: str | None = None
    token_env: str | None = None

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https", "ws", "wss"):
            raise ValueError(f"url: http://... or ws://..., not {self.url!r}")
        if self.resets == []:
            raise ValueError("resets: at least one, or leave it out for a task a seed")
        for path in (self.action, self.observe):
            if path is not None and not callable(load_object(path)):
                raise ValueError(f"{path!r} is no function")

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        _warn_of_plain_text(self.url, self.token_env)
        name = self.name or str(_described(self.url, self.token_env, "/metadata").get("name") or "")
        unusual = {"reward": self.reward} if self.reward != "sum" else {}
        unusual |= {key: path for key in ("action", "observe") if (path := getattr(self, key)) is not None}
        unusual |= {} if name else {"url": self.url}
        name = name or "openenv"
        resets = ({"seed": seed} for seed in counting()) if self.resets is None else self.resets
        candidates = (
            (fingerprint(name, json.dumps(arguments, sort_keys=True)), arguments)
            for arguments in ({**self.reset, **own} for own in resets)
        )
        chosen = select(candidates, split, count, f"OpenEnv server {self.url}", endless=self.resets is None)
        return [
            Task(id=f"{name}-{named(mark, unusual)[:16]}", payload={"reset": arguments, **unusual})
            for mark, arguments in chosen
        ]

    def environment(self, task: Task) -> Environment:
        return _Episode(self, task.payload["reset"])


class _Episode:
    def __init__(self, settings: OpenEnvTaskset, arguments: Mapping[str, Any]) -> None:
        self._settings, self._arguments = settings, dict(arguments)
        self._act: ToAction = load_object(settings.action) if settings.action else to_action
        self._describe: Describe = load_object(settings.observe) if settings.observe else describe
        self._schema: Mapping[str, Any] = {}
        self._tools: tuple[dict[str, Any], ...] = ()
        self._session: _Session | None = None
        self._earned: float | None = None

    async def reset(self) -> Observation:
        settings = self._settings
        described = await asyncio.to_thread(_described, settings.url, settings.token_env, "/schema")
        self._schema = described.get("action") or {}
        self._session, result = await _Session.open(settings.url, settings.token_env, self._arguments)
        if self._settings.action is None and self._schema.get("title") in _TOOLS:
            listed = await self._session.ask("step", {"type": "list_tools"})
            self._tools = tuple(_declared(tool) for tool in listed["observation"].get("tools", ()))
        return await self._ended(self._heard(result, self._told(result, opening=True), self._tools))

    async def step(self, message: Message) -> Observation:
        assert self._session is not None  # reset came first
        if self._tools:
            return await self._called(self._session, message)
        try:
            action = self._act(message, self._schema)
            result = await self._session.ask("step", dict(action))
        except (ValueError, RecursionError) as error:
            return self._complaint(error)
        return await self._ended(self._heard(result, self._told(result, opening=False)))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _called(self, session: _Session, message: Message) -> Observation:
        """Each call of the message, one after the other; an answer without one is the last."""
        results: list[Message] = []
        result: Mapping[str, Any] = {"done": True}
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            try:
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                if not isinstance(arguments, dict):
                    raise ValueError("the arguments of a tool are a JSON object")
                result = await session.ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
                content = _result(result["observation"])
            except (ValueError, RecursionError) as error:
                result, content = {"done": False}, f"error: {error}"
            results.append(Message(role="tool", tool_call_id=call.get("id", ""), name=name, content=content))
            if result.get("done"):
                break
        return await self._ended(self._heard(result, tuple(results)))

    async def _ended(self, observation: Observation) -> Observation:
        if observation.done:
            await self.close()  # now: the next episode may be waiting for its place
        return observation

    def _told(self, result: Mapping[str, Any], *, opening: bool) -> tuple[Message, ...]:
        said = self._describe(result["observation"], opening)
        return (Message(role="user", content=said),) if isinstance(said, str) else tuple(said)

    def _heard(
        self, result: Mapping[str, Any], messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> Observation:
        reward = result.get("reward")
        if reward is not None:
            before = self._earned if self._settings.reward == "sum" and self._earned is not None else 0.0
            self._earned = before + float(reward)
        return Observation(messages, done=bool(result.get("done")), score=self._score(), tools=tools)

    def _complaint(self, error: Exception) -> Observation:
        return Observation((Message(role="user", content=f"error: {error}"),), score=self._score())

    def _score(self) -> Score | None:
        return None if self._earned is None else Score(self._earned)


# --- text and actions -----------------------------------------------------------------------------------
def to_action(message: Message, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The action that a message is by the schema alone. Raises ValueError, for the model to read."""
    text = answer_of(message["content"]).strip()
    fields = {name: about for name, about in schema.get("properties", {}).items() if name not in _OWN}
    required = [name for name in schema.get("required", ()) if name in fields] or list(fields)
    written = _object(text)
    if written is not None and set(required) <= set(written):
        return written
    if len(required) != 1:
        raise ValueError(f"an action is a JSON object with {', '.join(required) or 'nothing in it'}")
    (name,) = required
    kind = fields[name].get("type")
    if kind in ("integer", "number"):
        numbers = _NUMBER.findall(text)
        if not numbers or not math.isfinite(number := float(numbers[-1].replace("\u2212", "-"))):
            raise ValueError(f"{name} is a number")
        return {name: int(number) if kind == "integer" else number}
    return {name: text}


def describe(observation: Mapping[str, Any], opening: bool) -> str:
    """What a model reads of an observation: the contents of its messages (after its prompt, once), or its only text, or
    all of it as JSON. One without fields of its own says what its metadata says."""
    said = {name: value for name, value in observation.items() if name not in _OWN} or observation.get("metadata") or {}
    messages = said.get("messages")
    if isinstance(messages, list) and all(isinstance(m, Mapping) and "content" in m for m in messages):
        prompt = str(said.get("prompt") or "") if opening else ""
        told = [str(m["content"]) for m in messages]
        return "\n".join([*([prompt] if prompt and prompt not in told else []), *told])
    texts = [value for value in said.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else json.dumps(said, ensure_ascii=False)


def _object(text: str) -> dict[str, Any] | None:
    if text.startswith("```") and text.endswith("```"):
        text = "\n".join(text.splitlines()[1:-1])
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    return None


def _declared(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    about = {"name": tool["name"], "description": tool.get("description", ""), "parameters": schema}
    return {"type": "function", "function": about}


def _result(observation: Mapping[str, Any]) -> str:
    """What a tool gave, as text: MCP's content, its plain value, or its error."""
    if error := observation.get("error"):
        return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation.get("result")
    if isinstance(result, Mapping):
        if "data" in result:
            result = result["data"]
        elif isinstance(result.get("content"), list):
            result = "\n".join(str(part.get("text", part)) for part in result["content"])
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


# --- the server -----------------------------------------------------------------------------------------
class Lost(Exception):
    """The server cannot be reached, refused a session, or failed in one."""


class _Full(Exception):
    """The server has all the sessions that it takes."""


class _Session:
    """One connection, which is one episode on the server."""

    _closing: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str], set[asyncio.Event]]] = {}

    def __init__(self, url: str, socket: Any) -> None:
        self._url, self._socket = url, socket

    @classmethod
    async def open(cls, url: str, token_env: str | None, arguments: Mapping[str, Any]) -> tuple[_Session, Any]:
        """A session, and what its reset gave.

        A server that takes no more is tried again only once a session of ours that is being closed is gone. Waiting for
        one under way could be for ever: it may wait for an answer that is sampled together with this episode's.
        """
        while True:
            closing = tuple(cls._closing.get((asyncio.get_running_loop(), url), ()))
            session = cls(url, await _connected(url, token_env))
            try:
                return session, await session.ask("reset", arguments)
            except _Full as error:
                await session.close()
                if not closing:
                    raise UserError(
                        f"environment.options.url = {url!r}: {error}; start the server with a max_concurrent_envs of "
                        "all episodes at once, or set sampler.max_rows to what it takes"
                    ) from error
                await closing[0].wait()
            except BaseException:
                await session.close()
                raise

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the server answers to ``reset`` or ``step``. Raises ValueError where it takes the action for none."""
        from websockets.exceptions import ConnectionClosed

        order = json.dumps({"type": kind, "data": data}, ensure_ascii=False, allow_nan=False)
        order.encode()  # half a character is no text: a ValueError
        with suppress(ConnectionClosed):  # why it closed stands in what it said last
            await self._socket.send(order)
        try:
            answer = json.loads(await self._socket.recv())
        except ConnectionClosed as error:
            _described.cache_clear()  # another server may take its place
            raise Lost(f"the OpenEnv server ended the session: {error}") from error
        told = answer["data"]
        if answer["type"] != "error":
            return told
        if told.get("code") == "VALIDATION_ERROR":
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in told.get("errors", ()))
            raise ValueError(wrong or told.get("message"))
        if told.get("code") == "CAPACITY_REACHED":
            raise _Full(told.get("message"))
        raise Lost(f"the OpenEnv server: {told.get('message')} ({told.get('code')})")

    async def close(self) -> None:
        """Ends it, and returns once the server has given its place free."""
        key, gone = (asyncio.get_running_loop(), self._url), asyncio.Event()
        self._closing.setdefault(key, set()).add(gone)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._socket.send(json.dumps({"type": "close"}))
                await self._socket.wait_closed()
        except Exception:  # it is gone, or does not answer
            await self._socket.close()
        finally:
            self._closing[key].discard(gone)
            if not self._closing[key]:
                del self._closing[key]
            gone.set()


async def _connected(url: str, token_env: str | None) -> Any:
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake

    address = re.sub(r"^http", "ws", url.rstrip("/")) + "/ws"
    options: dict[str, Any] = {"max_size": 1 << 27, "open_timeout": ANSWER_S, "close_timeout": CLOSE_S}

    class Straight(connect):
        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc if token_env is not None else super().process_redirect(exc)

    try:
        return await Straight(
            address, additional_headers=_headers(token_env), proxy=None if _here(url) else True, **options
        )
    except (OSError, TimeoutError, InvalidHandshake) as error:
        _described.cache_clear()
        raise Lost(f"no OpenEnv server at {url}: {error or type(error).__name__}") from error


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Takes a token to no other server than the one that it is for."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.has_header("Authorization") and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            raise urllib.error.HTTPError(newurl, code, f"it redirects to {newurl}: give that url", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@lru_cache(maxsize=64)
def _described(url: str, token_env: str | None, path: str) -> Mapping[str, Any]:
    """What the server says of itself. Raises `UserError` where there is none."""
    address = re.sub(r"^ws", "http", url.rstrip("/")) + path
    proxies = urllib.request.ProxyHandler({}) if _here(url) else urllib.request.ProxyHandler()
    request = urllib.request.Request(address, headers=_headers(token_env))
    try:
        with urllib.request.build_opener(proxies, _SameServer).open(request, timeout=ANSWER_S) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        where = f"environment.options.url = {url!r}"
        raise UserError(f"{where}: no OpenEnv server answers {path} there ({error})") from error


@lru_cache(maxsize=64)
def _warn_of_plain_text(url: str, token_env: str | None) -> None:
    """Once."""
    if urlsplit(url).scheme in ("http", "ws") and not _here(url):
        token = f", and so does the token in {token_env}" if token_env is not None else ""
        log.warning("environment.options.url = %r: what is said goes over the network unencrypted%s", url, token)


def _headers(token_env: str | None) -> dict[str, str]:
    if token_env is None:
        return {}
    if token_env not in os.environ:
        raise UserError(f"environment.options.token_env: there is no environment variable {token_env!r}")
    return {"Authorization": f"Bearer {os.environ[token_env]}"}


def _here(url: str) -> bool:
    """Whether the server is on this machine, where no proxy leads."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
