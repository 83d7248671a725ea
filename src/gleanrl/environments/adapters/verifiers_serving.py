"""Runs verifiers' environments for `verifiers.py`, and serves the endpoint to which they send their model calls.

`resolve_config` validates the config of an environment. `Host` runs the environment and its endpoint on an event loop.
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

POLICY = "policy"  # name under which verifiers requests the model and records it in traces
# Number of sockets for which the process's limit of open files is raised. Each episode in progress needs four of them.
CONNECTIONS = 1 << 14


class Refused(Exception):
    """Raised if a model call gets no answer. verifiers gets the text as the error message of the response."""


class AnswersCalls(Protocol):
    """The part of an episode (of `verifiers.py`) that `Host` needs: it answers the episode's model calls."""

    async def answer_call(self, trace: str, request: Mapping[str, Any]) -> tuple[Message, Mapping[str, Any]]: ...


def import_v1() -> Any:
    """Import and return the module `verifiers.v1`. Raises `UserError` if it is not installed."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise UserError(
            "environment 'verifiers' needs verifiers 0.4 or newer, for its v1 tasksets: "
            f"pip install 'gleanrl[verifiers]' ({error})"
        ) from error


def resolve_config(taskset: str, args: Mapping[str, Any], env: Mapping[str, Any]) -> Any:
    """Make and validate the config of an environment as verifiers does, but with other defaults for its seats.

    A seat whose runtime is not set runs in a subprocess on this machine. A seat whose harness is not set gets a chat
    loop. verifiers' default harness ("bash") would give the model a shell, which is unsafe on the training machine.

    Raises:
        UserError: there is no such taskset, or the taskset or its environment has no such option.
    """
    vf = import_v1()
    taskset = load_file(taskset).__name__ if taskset.endswith(".py") else taskset
    # A deep copy, because verifiers changes the mapping that it gets.
    raw: dict[str, Any] = copy.deepcopy({**env, "taskset": {**args, "id": taskset}})
    try:
        kind = vf.env_config_type(taskset, raw.get("id", ""))
        for name, field in kind.model_fields.items():
            default = field.default
            if not isinstance(default, vf.AgentConfig):
                continue
            seat = raw[name] = dict(raw.get(name, {}))
            if "runtime" not in default.model_fields_set:
                seat.setdefault("runtime", {"type": "subprocess"})
            if default.harness is None and vf.default_harness_id(taskset) == "bash":
                seat.setdefault("harness", {"id": "null"})
            if isinstance(client := seat.get("client"), dict):
                client.setdefault("type", "eval")
        return kind.model_validate(raw)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = [str(part) for part in first["loc"]]
        path = ["args", *path[1:]] if path[:1] == ["taskset"] else ["env", *path]
        reason = first["msg"].removeprefix("Value error, ")
        raise UserError(f"environment.options.{'.'.join(path)}: {reason}") from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"environment.options.id = {taskset!r}: {error}") from error


class Host:
    """A running environment of verifiers, with the endpoint for its model calls.

    All episodes with the same config on the same event loop use one host, so that they share the environment's tool
    servers. The host runs in an asyncio task, which ends when the event loop is shut down.
    """

    _all: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str], Host]] = {}

    def __init__(self, config: Any) -> None:
        self.episodes: dict[
            str, AnswersCalls
        ] = {}  # id of a verifiers trace -> episode that samples the model's answers for it
        self._vf = import_v1()
        self._env = self._vf.load_environment(config)
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._key = (loop, config.model_dump_json())
        self._life = loop.create_task(self._serve())

    @classmethod
    async def get(cls, config: Any) -> Host:
        """Return the host for ``config`` on this event loop, which the first call starts.

        Waits until the host's endpoint accepts requests.
        """
        key = (asyncio.get_running_loop(), config.model_dump_json())
        if key not in cls._all:
            cls._all[key] = cls(config)
        host = cls._all[key]
        await asyncio.shield(host._ready)
        return host

    async def play(self, data: Mapping[str, Any], on_trace: Callable[[Any], None]) -> Any:
        """Run a whole episode of a task, and return verifiers' record of it.

        ``data`` is the task as JSON values. ``on_trace`` is called with each trace as soon as verifiers makes it.
        """
        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), self._env.config.taskset.task)
        return await self._env.run_episode(task, self._context, on_trace=on_trace)

    async def _serve(self) -> None:
        # aiohttp is always installed here, because verifiers depends on it.
        from aiohttp import ClientSession, ClientTimeout, TCPConnector, web  # pyright: ignore[reportMissingImports]

        connection_limit(CONNECTIONS)
        # The path contains a random text, so that other users of this machine cannot find the endpoint.
        secret = secrets.token_urlsafe(16)
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
                # The number of connections is not limited. Otherwise a model call could wait for a connection while the
                # sampler, which batches the messages of all open episodes, waits for this call: a deadlock.
                unlimited = {"connector": TCPConnector(limit=0), "timeout": ClientTimeout(total=None)}
                http = await stack.enter_async_context(ClientSession(**unlimited))
                await stack.enter_async_context(self._env.serving())
                self._chat_in_process(http)
                self._ready.set_result(None)
                await asyncio.Event().wait()  # wait until this task is cancelled
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            del self._all[self._key]

    def _chat_in_process(self, http: Any) -> None:
        """Replace the harness of seats that are plain chat loops by one that runs in this process.

        verifiers' own harness would start a program for every turn.
        """
        chats: dict[str, Any] = {}
        for name, seat in self._env.config:
            if not isinstance(seat, self._vf.AgentConfig) or seat.harness is None:
                continue
            if seat.harness.id == "null" and seat.runtime.type == "subprocess":
                chats[name] = chat_harness_class()(seat.harness, http)
        setup = self._env.setup

        async def setup_with_chats(agents: Any) -> None:
            await setup(agents)
            for name, harness in chats.items():
                getattr(agents, name).harness = harness

        self._env.setup = setup_with_chats

    async def _answer(self, request: Any) -> Any:
        """Handle a request for a chat completion. If a stream is requested, the response is sent as two chunks."""
        from aiohttp import web  # pyright: ignore[reportMissingImports]

        trace = request.headers.get("X-Session-ID", "")  # verifiers sends the trace's id with every call
        body = await request.json()
        try:
            if trace not in self.episodes:
                raise Refused("the episode is over")
            message, counts = await self.episodes[trace].answer_call(trace, body)
        except Refused as error:
            return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)
        calls, usage = message.get("tool_calls", ()), None
        finish = "tool_calls" if calls else "stop"
        if counts:
            prompt, sampled = counts["prompt_tokens"], counts["completion_tokens"]
            usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
            finish = "length" if counts["finish_reason"] == "length" else finish
        completion = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": POLICY}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            answer = {**completion, "object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(answer)
        delta: dict[str, Any] = {**message}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        lines = []
        first, last = {"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": finish}
        for part, used in ((first, None), (last, usage)):
            choice = {"index": 0, **part}
            chunk = {**completion, "object": "chat.completion.chunk", "choices": [choice], "usage": used}
            lines.append(f"data: {json.dumps(chunk)}\n\n")
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]), content_type="text/event-stream")


@cache
def chat_harness_class() -> Any:
    """Return a harness class that chats and calls tools like verifiers' `null` harness, but in this process."""
    vf = import_v1()
    message_to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
    mcp = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
    bound_tool_message = importlib.import_module("verifiers.v1.harnesses.utils.compaction").bound_tool_message

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
            async def post(url: str, body: Any) -> Any:
                headers = {"Authorization": f"Bearer {secret}"}
                async with self._http.post(url, json=body, headers=headers) as response:
                    if response.status >= 400:
                        raise Refused(await response.text())
                    return await response.json()

            async def call_tool(call: Any) -> Any:
                """Run a tool call, and return the message with its result or with the reason why it was not run."""
                name, arguments, wrong = call["function"]["name"], call["function"]["arguments"], None
                try:
                    arguments = json.loads(arguments or "{}")
                    if not isinstance(arguments, dict):
                        wrong = "error: the arguments are not a JSON object"
                except json.JSONDecodeError as error:
                    wrong = f"error: the arguments are not valid JSON ({error})"
                if tool_interception_url is not None:
                    request = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
                    verdict = await post(tool_interception_url, request)
                    if verdict["action"] == "stop":
                        raise Refused(verdict["reason"])
                    if verdict["action"] == "deny":
                        return bound_tool_message(verdict["message"])
                if wrong is None and name not in dispatch:
                    wrong = f"error: there is no tool {name!r}; there are {', '.join(dispatch) or 'none'}"
                content = wrong or await mcp.call_mcp(connected, dispatch, name, arguments)
                message = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
                return bound_tool_message(message)

            system, prompt = self.resolve_prompt(data)
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += map(message_to_wire, prompt or ())
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            try:
                async with contextlib.AsyncExitStack() as stack:
                    tools, dispatch, connected = await mcp.connect_mcp({"mcpServers": servers}, stack)
                    while True:
                        body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                        answer = await post(f"{endpoint}/chat/completions", body)
                        messages.append(message := answer["choices"][0]["message"])
                        if not message.get("tool_calls"):
                            return vf.ProgramResult(0, "", "")
                        for call in message["tool_calls"]:
                            messages.append(await call_tool(call))
            # A model call is refused after a stop condition, a limit or a failure. The rollout records which one it
            # was, so the harness only has to end.
            except Refused as error:
                return vf.ProgramResult(1, "", str(error))

    return Chat
