"""Runs the environments of `verifiers.py`, and the endpoint that their model calls go to.

`Host` runs one environment of verifiers per event loop; `resolved` validates its config.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Protocol

import pydantic

from gleanrl.types import Message
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import connection_limit
from gleanrl.utils.importing import load_file

POLICY = "policy"  # the model's name in what verifiers records
CONNECTIONS = 1 << 14  # their ends, of which a live episode has four


class Refused(Exception):
    """A model call that gets no answer; verifiers gets the reason."""


class Asked(Protocol):
    """An episode that model calls come to."""

    async def asked(self, trace: str, messages: Any, tools: Any) -> Message: ...


def v1() -> Any:
    """`verifiers.v1`. Raises `UserError` where it is not installed."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise UserError(
            "environment 'verifiers' needs verifiers 0.4 or newer, for its v1 tasksets: "
            f"pip install 'gleanrl[verifiers]' ({error})"
        ) from error


def resolved(ident: str, args: Mapping[str, Any], env: Mapping[str, Any]) -> Any:
    """An environment's config as verifiers resolves it.

    A seat without a runtime plays on this machine. A seat without a harness chats; verifiers would give the model a
    shell, which is unsafe on a machine that trains.

    Raises:
        UserError: there is no such taskset, or an option is none of it or of its environment.
    """
    vf = v1()
    ident = load_file(ident).__name__ if ident.endswith(".py") else ident
    raw: dict[str, Any] = copy.deepcopy({**env, "taskset": {**args, "id": ident}})  # verifiers resolves it in place
    try:
        kind = vf.env_config_type(ident, raw.get("id", ""))
        for name, known in kind.model_fields.items():
            if isinstance(known.default, vf.AgentConfig):
                raw[name] = _seat(raw.get(name, {}), known.default, vf.default_harness_id(ident))
        return kind.model_validate(raw)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = [str(part) for part in first["loc"]]
        path = ["args", *path[1:]] if path[:1] == ["taskset"] else ["env", *path]
        why = first["msg"].removeprefix("Value error, ")
        raise UserError(f"environment.options.{'.'.join(path)}: {why}") from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"environment.options.id = {ident!r}: {error}") from error


def _seat(given: Mapping[str, Any], default: Any, harness: str) -> dict[str, Any]:
    """A seat's config with our defaults."""
    seat = dict(given)
    if "runtime" not in default.model_fields_set:
        seat.setdefault("runtime", {"type": "subprocess"})
    if default.harness is None and harness == "bash":
        seat.setdefault("harness", {"id": "null"})
    if isinstance(client := seat.get("client"), dict):
        client.setdefault("type", "eval")
    return seat


class Host:
    """An environment of verifiers while it runs, and the endpoint for its model calls.

    There is one per config and event loop, since episodes share tool servers. It ends with the event loop.
    """

    _all: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str], Host]] = {}

    def __init__(self, config: Any) -> None:
        self.episodes: dict[str, Asked] = {}  # by the id of each trace of theirs
        self._vf = v1()
        self._env = self._vf.load_environment(config)
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._key = (loop, config.model_dump_json())
        self._life = loop.create_task(self._live())

    @classmethod
    async def of(cls, config: Any) -> Host:
        key = (asyncio.get_running_loop(), config.model_dump_json())
        host = cls._all.get(key)
        if host is None:
            host = cls._all[key] = cls(config)
        await asyncio.shield(host._ready)
        return host

    async def play(self, data: Mapping[str, Any], minted: Callable[[Any], None]) -> Any:
        """A whole episode of the task with ``data``, rebuilt as verifiers does; ``minted`` sees each trace."""
        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), self._env.config.taskset.task)
        return await self._env.run_episode(task, self._context, on_trace=minted)

    async def _live(self) -> None:
        # verifiers cannot do without it either
        from aiohttp import ClientSession, ClientTimeout, TCPConnector, web  # pyright: ignore[reportMissingImports]

        connection_limit(CONNECTIONS)
        secret = secrets.token_urlsafe(16)  # other users of this machine cannot find the endpoint
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post(f"/{secret}/v1/chat/completions", self._answer)
        try:
            async with contextlib.AsyncExitStack() as stack:
                runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                url = f"http://127.0.0.1:{runner.addresses[0][1]}/{secret}/v1"
                client = self._vf.EvalClientConfig(base_url=url, api_key_var="GLEANRL_POLICY_KEY")
                self._context = self._vf.ModelContext(model=POLICY, client=client)
                # no limit: a call that waits for another's connection could deadlock, as answers are sampled together
                unlimited = {"connector": TCPConnector(limit=0), "timeout": ClientTimeout(total=None)}
                http = await stack.enter_async_context(ClientSession(**unlimited))
                await stack.enter_async_context(self._env.serving())
                self._seat_chats(http)
                self._ready.set_result(None)
                await asyncio.Event().wait()  # until it is cancelled
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            del self._all[self._key]

    def _seat_chats(self, http: Any) -> None:
        """Run plain chat loops in this process; verifiers would start a program for every turn."""
        chats = {
            name: chat_harness()(seat.harness, http)
            for name, seat in self._env.config
            if isinstance(seat, self._vf.AgentConfig)
            and seat.runtime.type == "subprocess"
            and seat.harness is not None
            and seat.harness.id == "null"
        }
        setup = self._env.setup

        async def seated(agents: Any) -> None:
            await setup(agents)
            for name, harness in chats.items():
                getattr(agents, name).harness = harness

        self._env.setup = seated

    async def _answer(self, request: Any) -> Any:
        from aiohttp import web  # pyright: ignore[reportMissingImports]

        trace = request.headers.get("X-Session-ID", "")  # verifiers names the trace on every call
        body = await request.json()
        try:
            if trace not in self.episodes:
                raise Refused("the episode is over")
            message = await self.episodes[trace].asked(trace, body["messages"], body.get("tools") or ())
        except Refused as error:
            return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)
        if body.get("stream"):
            return web.Response(text=_streamed(message), content_type="text/event-stream")
        choice = {"index": 0, "message": message, "finish_reason": _reason(message)}
        return web.json_response({**_completion(), "object": "chat.completion", "choices": [choice]})


def _completion() -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": POLICY}


def _reason(message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _streamed(message: Message) -> str:
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    chunk = {**_completion(), "object": "chat.completion.chunk"}
    parts = (
        {"delta": {**message, **({"tool_calls": calls} if calls else {})}, "finish_reason": None},
        {"delta": {}, "finish_reason": _reason(message)},
    )
    events = [json.dumps({**chunk, "choices": [{"index": 0, **part}]}) for part in parts]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])


@cache
def chat_harness() -> Any:
    """The class of a harness that chats and calls tools as verifiers' `null` does, in this process."""
    vf = v1()
    wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
    mcp = importlib.import_module("verifiers.v1.harnesses.utils.mcp")

    class Chat(vf.Harness):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = SUPPORTS_TOOL_INTERCEPTION = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        def __init__(self, config: Any, http: Any) -> None:
            super().__init__(config)
            self._http = http

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: Mapping[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(wire, prompt or ())
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            post = _Posts(self._http, {"Authorization": f"Bearer {secret}"})
            try:
                async with contextlib.AsyncExitStack() as stack:
                    tools, *connected = await mcp.connect_mcp({"mcpServers": servers}, stack)
                    offered = {"tools": tools} if tools else {}
                    while True:
                        body = {"model": ctx.model, "messages": messages, **offered}
                        answer = await post(f"{endpoint}/chat/completions", body)
                        messages.append(message := answer["choices"][0]["message"])
                        if not message.get("tool_calls"):
                            return vf.ProgramResult(0, "", "")
                        for call in message["tool_calls"]:
                            messages.append(await _called(call, connected, post, tool_interception_url))
            except Refused as error:  # a stop, a limit or a failure; the rollout distinguishes them
                return vf.ProgramResult(1, "", str(error))

    return Chat


class _Posts:
    def __init__(self, http: Any, headers: Mapping[str, str]) -> None:
        self._http, self._headers = http, headers

    async def __call__(self, url: str, body: Any) -> Any:
        async with self._http.post(url, json=body, headers=self._headers) as response:
            if response.status >= 400:
                raise Refused(await response.text())
            return await response.json()


async def _called(call: Any, connected: Any, post: _Posts, gate: str | None) -> Any:
    """The message that answers a tool call: the result, or why the tool was not called."""
    bound = importlib.import_module("verifiers.v1.harnesses.utils.compaction").bound_tool_message
    mcp = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
    dispatch, servers = connected
    name = call["function"]["name"]
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except json.JSONDecodeError as error:
        arguments, wrong = call["function"]["arguments"], f"error: the arguments are not valid JSON ({error})"
    else:
        wrong = None if isinstance(arguments, dict) else "error: the arguments are not a JSON object"
    if gate is not None:
        verdict = await post(gate, {"tool_call_id": call["id"], "name": name, "arguments": arguments})
        if verdict["action"] == "stop":
            raise Refused(verdict["reason"])
        if verdict["action"] == "deny":
            return bound(verdict["message"])
    if wrong is None and name not in dispatch:
        wrong = f"error: there is no tool {name!r}; there are {', '.join(dispatch) or 'none'}"
    content = wrong or await mcp.call_mcp(servers, dispatch, name, arguments)
    return bound({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
