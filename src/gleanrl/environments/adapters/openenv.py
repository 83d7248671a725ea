"""Plays the environments of OpenEnv servers. Each episode has its own WebSocket session on the server.

`OpenEnvTaskset` is the environment ``openenv`` of the settings. It uses the same protocol as OpenEnv's own client, but
does not need that package. Actions and observations are JSON objects. `to_action` converts the model's message to an
action according to the server's JSON schema of actions, and `describe` converts an observation to text. The user can
replace either of them by a function. If the server's actions are tool calls, the model gets the server's tools.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import count as count_from
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import Field

from gleanrl.environments.splits import fingerprint, named, select, split_of
from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.rollout.thinking import answer_of
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import HttpClient, is_local
from gleanrl.utils.importing import load_object
from gleanrl.utils.retry import Fatal, Retryable
from gleanrl.utils.secrets import Secret

log = logging.getLogger(__name__)

ANSWER_S = 10.0  # seconds that a server has to accept a connection or to describe itself
CLOSE_S = 5.0  # seconds that a server has to end a session
# Seconds between two WebSocket pings. aiohttp closes the connection if the answer to a ping takes more than half of
# this, so a step must not block the server's event loop for longer.
HEARTBEAT_S = 40.0
_OWN = ("metadata", "done", "reward")  # fields of OpenEnv's base classes, which every action or observation may have
# A minus is part of the number unless it follows a number, name or bracket: the last number in "2-3" is 3, not -3.
_NUMBER = re.compile(r"(?:(?<![\w.)\]}%])[-\u2212])?\d+(?:\.\d+)?")
# If the schema of the server's actions has one of these titles, the actions are tool calls.
_TOOLS = ("Action", "CallToolAction", "ListToolsAction")

ToAction = Callable[[Message, Mapping[str, Any]], Mapping[str, Any]]
"""A function ``action(message, schema)`` that converts the model's message to an action.

``schema`` is the server's JSON schema of actions. If the function raises a ValueError, nothing is sent to the server,
and the model gets the error's text as the answer."""
Describe = Callable[[Mapping[str, Any], bool], "str | Sequence[Message]"]
"""A function ``observe(observation, opening)`` that converts an observation to what is shown to the model.

It returns the text of one user message, or several messages. ``opening`` is True for the observation of the reset."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class OpenEnvTaskset(Taskset):
    """Makes tasks from the environment that an OpenEnv server at ``url`` runs, e.g. ``http://127.0.0.1:8000``.

    A task consists of the arguments with which the server resets its environment. These are ``reset``, updated with one
    item of ``resets``. Without ``resets``, they are updated with the split and the index of a task that the server
    lists (OpenEnv's Task API) or, if it lists none, with the next seed.

    The server's splits become those of this taskset by their names or their types: "test", or else "validation", is
    "eval". Splits of this taskset that the server lacks share the tasks of its split "train".
    """

    url: str
    """Address of the server; its scheme is http, https, ws or wss."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reset of every task."""
    resets: list[dict[str, Any]] | None = None
    """Additional arguments, one item for each task. None = the tasks that the server lists, ``{"split": "train",
    "index": 0}`` and so on; or ``{"seed": 0}``, ``{"seed": 1}`` and so on if it lists none."""
    action: str | None = None
    """Import path of a `ToAction`, which converts the model's message to an action. None = `to_action`."""
    observe: str | None = None
    """Import path of a `Describe`, which converts an observation to text. None = `describe`."""
    reward: Literal["sum", "last"] = "sum"
    """Whether the score of an episode is the "sum" of its rewards or only the "last" reward."""
    name: str | None = None
    """Name of the environment in task ids. None = the name that the server reports. If it reports none, the ids depend
    on the url, so the same tasks have other ids at another address."""
    token_env: str | None = None
    """Name of the environment variable that holds a token for the server, which for example a private Hugging Face
    Space needs. None = no token."""

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https", "ws", "wss"):
            raise ValueError(f"url: http://... or ws://..., not {self.url!r}")
        if self.resets == []:
            raise ValueError("resets: at least one, or leave it out for one task per seed")
        for path in (self.action, self.observe):
            if path is not None and not callable(load_object(path)):
                raise ValueError(f"{path!r} is not a function")

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        _warn_of_plain_text(self.url, self.token_env)
        name = self.name or str(fetch_description(self.url, self.token_env, "/metadata").get("name") or "")
        changes: dict[str, Any] = {"reward": self.reward} if self.reward != "sum" else {}
        for option in ("action", "observe"):
            if getattr(self, option) is not None:
                changes[option] = getattr(self, option)
        if not name:
            name, changes["url"] = "openenv", self.url
        resets, of = self.resets, split_of
        if resets is None and not {"split", "index", "seed"} & set(self.reset):
            resets, of = self._listed(split)
        candidates = self._candidates(name, resets)
        tasks = []
        what = f"OpenEnv server {self.url}"
        for mark, arguments in select(candidates, split, count, what, of, endless=resets is None):
            tasks.append(Task(id=f"{name}-{named(mark, changes)[:16]}", payload={"reset": arguments, **changes}))
        return tasks

    def _listed(self, split: Split) -> tuple[list[dict[str, Any]] | None, Callable[[str], Split]]:
        """Return the resets of the server's tasks from which ``split`` is taken, and the split of each fingerprint.

        The first is None if the server does not implement the Task API.
        """
        environments = fetch_description(self.url, self.token_env, "/list_environments") or ("",)
        listed = fetch_description(self.url, self.token_env, f"/{environments[0]}/splits") or ()
        own: dict[Split, str] = {}
        kinds: dict[Split, tuple[str, ...]] = {"train": ("train",), "eval": ("test", "validation"), "warm_start": ()}
        for mine in kinds:
            fitting = [found["name"] for found in listed if found["name"] == mine]
            for kind in kinds[mine]:
                fitting += [found["name"] for found in listed if found.get("type") == kind]
            if left := [theirs for theirs in fitting if theirs not in own.values()]:
                own[mine] = left[0]
        if "train" not in own:
            return None, split_of
        theirs = own.get(split, own["train"])
        shared: list[Split] = [mine for mine in kinds if own.get(mine, own["train"]) == theirs]
        body = json.dumps({"split": theirs})
        answer = fetch_description(self.url, self.token_env, f"/{environments[0]}/num_tasks", body)
        resets = [{"split": theirs, "index": index} for index in range(int(answer["num_tasks"]) if answer else 0)]

        def of(mark: str) -> Split:
            found = split_of(mark)
            return found if found in shared else shared[0]

        return resets, of

    def _candidates(self, name: str, resets: list[dict[str, Any]] | None) -> Iterator[tuple[str, dict[str, Any]]]:
        for own in ({"seed": seed} for seed in count_from()) if resets is None else resets:
            arguments = {**self.reset, **own}
            yield fingerprint(name, json.dumps(arguments, sort_keys=True)), arguments

    def environment(self, task: Task) -> Environment:
        return _Episode(self, task.payload["reset"])


class _Episode(Environment):
    def __init__(self, settings: OpenEnvTaskset, arguments: Mapping[str, Any]) -> None:
        self._settings, self._arguments = settings, dict(arguments)
        self._act: ToAction = load_object(settings.action) if settings.action else to_action
        self._describe: Describe = load_object(settings.observe) if settings.observe else describe
        self._schema: Mapping[str, Any] = {}  # the server's JSON schema of actions
        self._tools: list[dict[str, Any]] = []
        self._session: _Session | None = None
        self._score: Score | None = None

    async def reset(self) -> Observation:
        url, token_env = self._settings.url, self._settings.token_env
        described = await asyncio.to_thread(fetch_description, url, token_env, "/schema")
        self._schema = described.get("action") or {}
        self._session, result = await _Session.open(url, token_env, self._arguments)
        if self._settings.action is None and self._schema.get("title") in _TOOLS:
            listed = await self._session.ask("step", {"type": "list_tools"})
            for tool in listed["observation"].get("tools", ()):
                schema = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
                about = {"name": tool["name"], "description": tool.get("description", ""), "parameters": schema}
                self._tools.append({"type": "function", "function": about})
        observation = await self._observe(result, self._describe(result["observation"], True))
        return replace(observation, tools=tuple(self._tools), reward=None)  # no message of the model has earned it

    async def step(self, message: Message) -> Observation:
        assert self._session is not None  # `reset`, which is called before `step`, has opened the session
        if self._tools:
            return await self._call_tools(self._session, message)
        try:
            action = self._act(message, self._schema)
            result = await self._session.ask("step", dict(action))
        except (ValueError, RecursionError) as error:
            return Observation((Message(role="user", content=f"error: {error}"),), score=self._score)
        return await self._observe(result, self._describe(result["observation"], False))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call_tools(self, session: _Session, message: Message) -> Observation:
        """Send the message's tool calls to the server one after the other, and return the results as an observation.

        An invalid call gets the error as its result. A message without a call is the model's final answer and ends the
        episode.
        """
        answers: list[Message] = []
        rewards: list[float] = []  # of the steps, one for each call
        result: Mapping[str, Any] = {"done": True}
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            try:
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                if not isinstance(arguments, dict):
                    raise ValueError("the arguments of a tool are a JSON object")
                result = await session.ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
                content = _tool_result(result["observation"])
                if result.get("reward") is not None:
                    rewards.append(float(result["reward"]))
            except (ValueError, RecursionError) as error:
                result, content = {"done": False}, f"error: {error}"
            answers.append(Message(role="tool", tool_call_id=call.get("id", ""), name=name, content=content))
            if result.get("done"):
                break
        earned = None
        if rewards:
            earned = math.fsum(rewards) if self._settings.reward == "sum" else rewards[-1]
        return await self._observe({**result, "reward": earned}, answers)

    async def _observe(self, result: Mapping[str, Any], shown: str | Sequence[Message]) -> Observation:
        """Return an observation with the messages ``shown``, the reward in ``result``, and the score that includes it.

        If the score is the last reward and not their sum, the observation has no reward.

        If the server's ``result`` ends the episode, the session is closed.
        """
        reward, done, summed = result.get("reward"), bool(result.get("done")), self._settings.reward == "sum"
        if reward is not None:
            self._score = Score((self._score.value if self._score is not None and summed else 0.0) + float(reward))
        messages = (Message(role="user", content=shown),) if isinstance(shown, str) else tuple(shown)
        if done:
            # The caller closes the environment too, but later, and another episode may be waiting for a free session.
            await self.close()
        return Observation(messages, done=done, score=self._score, reward=reward if summed else None)


# --- text and actions -----------------------------------------------------------------------------------
def to_action(message: Message, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the model's message to an action, according to ``schema``, the JSON schema of actions.

    If the message is a JSON object with all required fields, possibly in a Markdown code block, the action is this
    object. Otherwise the action must have a single required field (or a single field, if none is required). This field
    becomes the last number in the message if its type is a number, and the whole message if it has another type.
    Thinking is not part of the message.

    Raises:
        ValueError: the message cannot be converted. The error's message is shown to the model.
    """
    text = answer_of(message["content"]).strip()
    fields = {name: about for name, about in schema.get("properties", {}).items() if name not in _OWN}
    required = [name for name in schema.get("required", ()) if name in fields] or list(fields)
    block = "\n".join(text.splitlines()[1:-1]) if text.startswith("```") and text.endswith("```") else text
    with suppress(ValueError, RecursionError):
        written = json.loads(block)
        if isinstance(written, dict) and set(required) <= set(written):
            return written
    if len(required) != 1:
        raise ValueError(f"an action is a JSON object with {', '.join(required) or 'nothing in it'}")
    (name,) = required
    kind = fields[name].get("type")
    if kind not in ("integer", "number"):
        return {name: text}
    numbers = _NUMBER.findall(text)
    if not numbers or not math.isfinite(number := float(numbers[-1].replace("\u2212", "-"))):
        raise ValueError(f"{name} is a number")
    return {name: int(number) if kind == "integer" else number}


def describe(observation: Mapping[str, Any], opening: bool) -> str:
    """Convert an observation to the text that the model gets.

    If the observation has a list ``messages``, the text is their contents, one per line, and in the first observation
    (``opening``) the field ``prompt`` before them. Otherwise it is the value of the only field that is a text, or, if
    there are several such fields or none, all fields as JSON. The fields ``done``, ``reward`` and ``metadata`` are not
    shown. But if the observation has no other fields, the entries of ``metadata`` are treated as its fields.
    """
    fields = {name: value for name, value in observation.items() if name not in _OWN}
    fields = fields or observation.get("metadata") or {}
    messages = fields.get("messages")
    if isinstance(messages, list) and all(isinstance(m, Mapping) and "content" in m for m in messages):
        contents = [str(m["content"]) for m in messages]
        prompt = str(fields.get("prompt") or "") if opening else ""
        if prompt and prompt not in contents:
            contents.insert(0, prompt)
        return "\n".join(contents)
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else json.dumps(fields, ensure_ascii=False)


def _tool_result(observation: Mapping[str, Any]) -> str:
    """Return the result of a tool call, which may be MCP content, a plain value or an error, as text."""
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
    """Raised if the server cannot be reached, refuses a session, or fails during a session."""


class _Full(Exception):
    """Raised if the server refuses a session because its maximum number of sessions are open."""


class _Session:
    """One WebSocket connection to a server, which runs one episode in it."""

    _closing: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str], set[asyncio.Event]]] = {}

    def __init__(self, url: str, client: HttpClient, socket: Any) -> None:
        self._url, self._client, self._socket = url, client, socket

    @classmethod
    async def open(cls, url: str, token_env: str | None, arguments: Mapping[str, Any]) -> tuple[_Session, Any]:
        """Open a session and reset its environment. Returns the session and the server's result of the reset.

        If the server has no free session, this method waits until a session that this process is already closing is
        closed, and then tries again. It does not wait for sessions that are in use, because that could deadlock: a
        sampler that batches the messages of all open episodes would wait for this episode.

        Raises:
            UserError: the server has no free session, and this process is closing none.
            Lost: the server cannot be reached, or fails.
        """
        while True:
            closing = tuple(cls._closing.get((asyncio.get_running_loop(), url), ()))
            session = await cls._connect(url, token_env)
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

    @classmethod
    async def _connect(cls, url: str, token_env: str | None) -> _Session:
        import aiohttp

        client = _make_client(url, token_env)
        try:
            async with asyncio.timeout(ANSWER_S):
                # The token cannot leak: aiohttp removes it from the headers if a redirect leads to another server.
                socket = await client.session().ws_connect(
                    client.address("/ws"),
                    headers=client.headers(),
                    max_msg_size=1 << 27,
                    heartbeat=HEARTBEAT_S,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),  # pyright: ignore[reportCallIssue] (an attrs class)
                )
            return cls(url, client, socket)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            await client.aclose()
            fetch_description.cache_clear()
            raise Lost(f"no OpenEnv server at {url}: {client.quote(str(error)) or type(error).__name__}") from error
        except BaseException:
            await client.aclose()
            raise

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request to the server and return the data of its response. ``kind`` is "reset" or "step".

        Raises:
            ValueError: the server rejects the action as invalid, or ``data`` cannot be encoded.
            Lost: the connection is closed, or the server reports another error.
        """
        import aiohttp

        order = json.dumps({"type": kind, "data": data}, ensure_ascii=False, allow_nan=False)
        # A lone surrogate cannot be encoded. It raises a ValueError here, before anything is sent to the server.
        order.encode()
        # If the server has closed the connection, sending fails. This error is ignored, because the server's last
        # message, which is received below, may contain the reason.
        with suppress(ConnectionError):
            await self._socket.send_str(order)
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            # The cached schemas may become wrong, because another server may be started at this address.
            fetch_description.cache_clear()
            why = message.extra or message.data or self._socket.exception() or "no reason given"
            raise Lost(f"the OpenEnv server ended the session: {why} (code {self._socket.close_code})")
        answer = json.loads(message.data)
        content = answer["data"]
        if answer["type"] != "error":
            return content
        if content.get("code") == "VALIDATION_ERROR":
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in content.get("errors", ()))
            raise ValueError(wrong or content.get("message"))
        if content.get("code") == "CAPACITY_REACHED":
            raise _Full(content.get("message"))
        raise Lost(f"the OpenEnv server: {content.get('message')} ({content.get('code')})")

    async def close(self) -> None:
        """End the session. Waits until the server has closed the connection, but at most `CLOSE_S` seconds."""
        key, gone = (asyncio.get_running_loop(), self._url), asyncio.Event()
        self._closing.setdefault(key, set()).add(gone)
        try:
            try:
                with suppress(Exception):  # closing must succeed even if the server is gone or does not answer
                    async with asyncio.timeout(CLOSE_S):
                        await self._socket.send_str(json.dumps({"type": "close"}))
                        while not self._socket.closed:
                            await self._socket.receive()
            finally:  # also if the caller is cancelled while the server does not answer
                await self._client.aclose()
        finally:
            self._closing[key].discard(gone)
            if not self._closing[key]:
                del self._closing[key]
            gone.set()


def _make_client(url: str, token_env: str | None) -> HttpClient:
    if token_env is not None:
        # Check the variable's name here. `HttpClient` checks it too, but its error would not name this setting.
        Secret(token_env, "environment.options.token_env")
    address = re.sub(r"^ws", "http", url)
    return HttpClient(address, api_key_env=token_env, timeout_s=ANSWER_S, setting="environment.options.url")


@lru_cache(maxsize=64)
def fetch_description(url: str, token_env: str | None, path: str, body: str | None = None) -> Any:
    """Fetch what the server at ``url`` reports about itself at ``path``, such as "/metadata" or "/schema". Cached.

    ``body`` is the JSON of a POST request; None = a GET request. Returns None if the server does not have a route of
    the Task API, which is optional.

    Raises:
        UserError: no OpenEnv server answers at ``url``.
    """

    async def get() -> Any:
        client = _make_client(url, token_env)
        try:
            content = None if body is None else body.encode()
            response = await client.send("GET" if content is None else "POST", path, content)
            if response.status in (404, 405, 501) and path not in ("/metadata", "/schema"):
                return None
            if response.status != 200:
                raise client.error_of(path, response)
            return json.loads(response.body)
        except (Retryable, Fatal, ValueError) as error:
            where = f"environment.options.url = {url!r}"
            raise UserError(f"{where}: no OpenEnv server answers {path} there ({error})") from error
        finally:
            await client.aclose()

    # `asyncio.run` needs a thread without a running event loop, and the caller's thread may have one.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, get()).result()


@lru_cache(maxsize=64)
def _warn_of_plain_text(url: str, token_env: str | None) -> None:
    """Log a warning, once per server, if the messages to it travel unencrypted over a network."""
    if urlsplit(url).scheme in ("http", "ws") and not is_local(url):
        token = f", and so does the token in {token_env}" if token_env is not None else ""
        log.warning("environment.options.url = %r: messages go over the network unencrypted%s", url, token)
