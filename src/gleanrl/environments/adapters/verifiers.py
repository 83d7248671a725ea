"""Plays environments of the package verifiers (v1) with verifiers' own tasksets, tools, hooks and rewards.

`VerifiersTaskset` is the environment ``verifiers`` of the settings. A rollout of verifiers runs a harness, which is the
program that calls the model, for example in a chat loop with tools. verifiers passes the harness's model calls on to
the endpoint that answers the calls of all agents (`gleanrl.environments.agent.endpoint`), with the key of the episode.
So verifiers' own rollout code runs unchanged, with its stop conditions, interceptions, tool servers, limits and
scoring, and Glean RL trains on exactly the tokens that it has sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, ClassVar

import pydantic
from pydantic import Field

from gleanrl.environments.agent.endpoint import CONNECTIONS
from gleanrl.environments.splits import fingerprint, select, split_of
from gleanrl.protocols import Environment, ModelAddress, Observation, Split, Taskset
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.http import connection_limit
from gleanrl.utils.importing import load_file


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class VerifiersTaskset(Taskset):
    """Uses the tasks of a verifiers v1 taskset.

    For example, ``id="gsm8k", args={"split": "train"}, eval_args={"split": "test"}``.

    A seat is an agent of verifiers' environment. The policy plays all seats that have no ``client`` in ``env``.
    """

    id: str
    """Name of an installed taskset, as for verifiers' own `eval` command, or path of a ``file.py`` that exports one."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The taskset's config. verifiers' command line sets the same options by ``--env.taskset.*``."""
    eval_args: dict[str, Any] | None = None
    """Options that replace those of ``args`` for the evaluation tasks. None = the evaluation tasks are a share of the
    tasks that ``args`` selects."""
    env: dict[str, Any] = Field(default_factory=dict)
    """The environment's config (``--env.*`` on verifiers' command line): the ``id`` of another environment, timeouts,
    and each seat's harness, runtime, model, client and limits. By default, a seat is a chat loop with the task's tools,
    which runs on this machine."""

    agents = True
    named_by_content = True  # the id of a task is a hash of its content, not of its index in the taskset

    def __post_init__(self) -> None:
        # Resolve the configs, so that wrong options are reported now and not when the first task is made.
        for split in ("train", "eval"):
            resolve_config(self.id, self._args(split), self.env)

    def _args(self, split: Split) -> dict[str, Any]:
        return {**self.args, **(self.eval_args or {})} if split == "eval" else self.args

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """Return the first ``count`` different tasks in ``split``.

        A hash of a task's content decides its split: 60 % of the tasks are in "train", 25 % in "warm_start" and 15 % in
        "eval". With ``eval_args``, "eval" consists of all tasks that these options select, and the tasks that ``args``
        selects are in "train" (75 %) and "warm_start" (25 %). In this case nothing checks that the tasks of "eval" are
        not also among the others, so choose options for which verifiers returns different tasks.
        """
        args, what = self._args(split), f"verifiers taskset {self.id!r}"

        def place(mark: str) -> Split:
            if self.eval_args is None:
                return split_of(mark)
            if split == "eval":
                return "eval"
            return "warm_start" if split_of(mark) == "warm_start" else "train"

        name = "verifiers" if self.id.endswith(".py") else self.id.rsplit("/", 1)[-1].split("@", 1)[0]
        tasks = []
        try:
            taskset = import_v1().load_taskset(resolve_config(self.id, args, self.env).taskset)
            candidates = self._candidates(taskset, args)
            for mark, data in select(candidates, split, count, what, place, endless=taskset.INFINITE):
                tasks.append(Task(id=f"{name}-{mark[:16]}", payload={"args": args, "data": data}))
        except UserError:
            raise
        except Exception as error:
            reason = next((line for line in str(error).splitlines() if line.strip(" *")), "").strip()
            raise UserError(f"{what} cannot be loaded: {type(error).__name__}: {reason}") from error
        return tasks

    def _candidates(self, taskset: Any, args: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield ``(fingerprint, data)`` of every task of the taskset, where ``data`` is the task as JSON values.

        The fingerprint does not depend on the task's index in the taskset.
        """
        scoring = json.dumps(args.get("task", {}), sort_keys=True)
        for task in taskset:
            data = task.data.model_dump(mode="json", exclude_none=True)
            content = {key: value for key, value in data.items() if key != "idx"}
            yield fingerprint(self.id, scoring, json.dumps(content, sort_keys=True)), data

    def environment(self, task: Task) -> Environment:
        return _Episode(resolve_config(self.id, task.payload["args"], self.env), task.payload["data"])


class _Episode(Environment):
    """One episode, which is an episode of verifiers whose model calls the policy answers."""

    def __init__(self, config: Any, data: Mapping[str, Any]) -> None:
        self._config, self._data = config, data

    async def reset(self) -> Observation:
        return Observation((), agent=True)

    async def step(self, message: Message) -> Observation:
        raise RuntimeError("verifiers makes its model calls itself; its environments have no steps")

    async def run(self, model: ModelAddress) -> Observation:
        """Run the episode, and return an observation with its score.

        The score is the sum of the weighted rewards of all traces of the policy's seats. Its parts are all rewards (not
        weighted) and all metrics of these traces, by name; those with the same name are added.

        Raises:
            RuntimeError: verifiers reports an error, or the rollout made no model call.
        """
        host = await _Host.get(self._config)
        episode = await host.play(self._data, model)
        traces = [trace for trace in episode.traces if trace.agent.name in host.seats]
        if not episode.ok or not any(trace.num_turns for trace in traces):
            errors = [error for trace in episode.traces for error in trace.errors] + list(episode.errors)
            # A call that was refused is the reason why its harness has failed.
            errors += [call.error for trace in traces for call in trace.calls[-1:] if call.error is not None]
            reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "the policy was never asked"
            raise RuntimeError(f"verifiers: {reason}")
        parts: Counter[str] = Counter()
        for trace in traces:
            for name, value in trace.metrics.items():
                parts[name] += value or 0
            for name, reward in trace.rewards.items():
                parts[name] += 0 if reward is None else reward.score
        stops = [trace.stop_condition for trace in traces]
        score = Score(math.fsum(trace.reward for trace in traces), parts=parts)
        return Observation((), done=True, score=score, info={"stop_conditions": stops})


class _Host:
    """A running environment of verifiers.

    All episodes with the same config on the same event loop use one host, so that they share the environment's tool
    servers. The host runs in an asyncio task, which ends when the event loop is shut down.
    """

    _all: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str], _Host]] = {}

    def __init__(self, config: Any) -> None:
        self._vf = import_v1()
        self._env = self._vf.load_environment(config)
        agents = {name: seat for name, seat in config if isinstance(seat, self._vf.AgentConfig)}
        self.seats = [name for name, seat in agents.items() if seat.client is None]
        """Names of the seats that the policy plays."""
        # Seats that are plain chat loops. verifiers' own harness would start a program for every turn.
        self._chats = [
            name
            for name, seat in agents.items()
            if seat.harness is not None and seat.harness.id == "null" and seat.runtime.type == "subprocess"
        ]
        self._address: ContextVar[ModelAddress] = ContextVar("address")  # of the episode that the present task plays
        self._setup, self._env.setup = self._env.setup, self._prepare
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._key = (loop, config.model_dump_json())
        self._life = loop.create_task(self._serve())

    @classmethod
    async def get(cls, config: Any) -> _Host:
        """Return the host for ``config`` on this event loop, which the first call starts. Waits until it is ready."""
        key = (asyncio.get_running_loop(), config.model_dump_json())
        if key not in cls._all:
            cls._all[key] = cls(config)
        host = cls._all[key]
        await asyncio.shield(host._ready)
        return host

    async def play(self, data: Mapping[str, Any], model: ModelAddress) -> Any:
        """Run a whole episode of a task, and return verifiers' record of it. ``data`` is the task as JSON values."""
        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), self._env.config.taskset.task)
        # verifiers keeps a client for every config that it has seen, so the config is the same for all episodes.
        client = self._vf.EvalClientConfig(base_url=f"{model.url}/v1", api_key_var="GLEANRL_POLICY_KEY")
        self._address.set(model)
        return await self._env.run_episode(task, self._vf.ModelContext(model=model.name, client=client))

    async def _serve(self) -> None:
        # aiohttp is always installed here, because verifiers depends on it.
        from aiohttp import ClientSession, ClientTimeout, TCPConnector  # pyright: ignore[reportMissingImports]

        connection_limit(CONNECTIONS)
        try:
            # The number of connections is not limited. Otherwise a model call could wait for a connection while the
            # sampler, which batches the messages of all open episodes, waits for this call: a deadlock.
            http = ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None))
            async with http as self._http, self._env.serving():
                self._ready.set_result(None)
                await asyncio.Event().wait()  # wait until this task is cancelled
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            del self._all[self._key]

    async def _prepare(self, agents: Any) -> None:
        """Prepare the agents of an episode: the hook `setup` of verifiers' environment."""
        await self._setup(agents)
        for name in self._chats:
            agent = getattr(agents, name)
            agent.harness = chat_harness_class()(agent.harness.config, self._http)
        for name in self.seats:
            agent = getattr(agents, name)
            agent.interception = policy_interception_class()(agent.interception, self._address.get().key)
            agent.harness = copy.copy(agent.harness)
            agent.harness.launch = _stopped_by_limits(agent.harness.launch)


def _stopped_by_limits(launch: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a harness's method ``launch`` with which a limit of the run counts as a limit of verifiers' own.

    If the harness fails because its model call was refused, the conversation is scored as far as it came.
    """

    async def launched(ctx: Any, trace: Any, *args: Any, **kwargs: Any) -> Any:
        failed = True
        try:
            result = await launch(ctx, trace, *args, **kwargs)
            failed = result.exit_code != 0
            return result
        finally:
            refused = ["" if call.error is None else call.error.message for call in trace.calls]
            if failed and any('"code": "episode_over"' in reason for reason in refused):
                trace.stop("max_turns")
            elif failed and refused and '"code": "context_length' in refused[-1]:
                trace.stop("max_total_tokens")

    return launched


@cache
def policy_interception_class() -> Any:
    """Return a class for verifiers' server of model calls that sends the calls on with the key of one episode."""
    interception = importlib.import_module("verifiers.v1.interception")

    class PolicyInterception(interception.Interception):
        def __init__(self, shared: Any, key: str) -> None:
            super().__init__()
            self._shared, self._api_key = shared, key

        async def start(self) -> None:
            raise RuntimeError("verifiers' environment has started the server that all episodes share")

        @contextlib.asynccontextmanager
        async def acquire(self, session: Any) -> AsyncIterator[Any]:
            async with self._shared.acquire(session) as slot:
                session.client = copy.copy(session.client)  # the copy has the same connections
                session.client.api_key = self._api_key
                yield slot

    return PolicyInterception


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


class _Refused(Exception):
    """Raised if the harness that chats in this process is to end."""


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
                        raise _Refused(await response.text())
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
                        raise _Refused(verdict["reason"])
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
            except _Refused as error:
                return vf.ProgramResult(1, "", str(error))

    return Chat
