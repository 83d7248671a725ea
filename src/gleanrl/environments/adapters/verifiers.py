"""Plays environments of the package verifiers (v1) with verifiers' own tasksets, tools, hooks and rewards.

`VerifiersTaskset` is the environment ``verifiers`` of the settings. A rollout of verifiers runs a harness, which is the
program that calls the model, for example in a chat loop with tools. The harness sends its model calls to an
OpenAI-compatible endpoint, which Glean RL serves on the loopback interface (`verifiers_serving`).

Each model call becomes one turn. The messages that the call adds to the conversation are the observation that the
environment returns. The call then waits until Glean RL has sampled the next message and has passed it to `step`, and
this message is the response to the call. So verifiers' own rollout code runs unchanged, with its stop conditions,
interceptions, tool servers, limits and scoring, and Glean RL trains on exactly the tokens that it has sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pydantic
from pydantic import Field

from gleanrl.environments.adapters.verifiers_serving import Host, Refused, import_v1, resolve_config
from gleanrl.environments.splits import fingerprint, select, split_of
from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.rollout.thinking import CLOSE, OPEN, written
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import UserError

# reason for which Glean RL ends an episode -> verifiers' name of this reason
_STOPS = {StopReason.MAX_TURNS: "max_turns", StopReason.CONTEXT_FULL: "max_total_tokens"}

# Parameters of a model call that change what an answer is, with the values that ask for nothing special. Parameters of
# the distribution, such as the temperature, are not among them: the run sets these, for training and for evaluation.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "stop": ([], ""),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
}


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class VerifiersTaskset(Taskset):
    """Uses the tasks of a verifiers v1 taskset.

    For example, ``id="gsm8k", args={"split": "train"}, eval_args={"split": "test"}``.

    A seat is an agent of verifiers' environment. The policy plays exactly one seat. If the environment has other seats,
    each of them needs a ``model`` and a ``client`` in ``env``.
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
        for mark, data in select(self._candidates(args, what), split, count, what, place):
            tasks.append(Task(id=f"{name}-{mark[:16]}", payload={"args": args, "data": data}))
        return tasks

    def _candidates(self, args: Mapping[str, Any], what: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield ``(fingerprint, data)`` of every task of the taskset, where ``data`` is the task as JSON values.

        The fingerprint does not depend on the task's index in the taskset.
        """
        scoring = json.dumps(args.get("task", {}), sort_keys=True)
        try:
            for task in import_v1().load_taskset(resolve_config(self.id, args, self.env).taskset):
                data = task.data.model_dump(mode="json", exclude_none=True)
                content = {key: value for key, value in data.items() if key != "idx"}
                yield fingerprint(self.id, scoring, json.dumps(content, sort_keys=True)), data
        except Exception as error:
            reason = next((line for line in str(error).splitlines() if line.strip(" *")), "").strip()
            raise UserError(f"{what} cannot be loaded: {type(error).__name__}: {reason}") from error

    def environment(self, task: Task) -> Environment:
        return _Episode(resolve_config(self.id, task.payload["args"], self.env), task.payload["data"])


class _Episode(Environment):
    """One episode, which is a rollout of verifiers in its own asyncio task.

    A model call of the rollout waits in `answer_call` until `step` passes the sampled message to it.
    """

    def __init__(self, config: Any, data: Mapping[str, Any]) -> None:
        self._config, self._data = config, data
        self._rollout: asyncio.Task[Any] | None = None
        self._conversation: list[Message] = []
        self._reply: asyncio.Future[Message] | None = None  # response to the model call that waits
        # For each model call, the observation that `reset` or `step` returns; None when the rollout has ended.
        self._events: asyncio.Queue[Observation | None] = asyncio.Queue()
        # Trace id -> trace. verifiers makes a trace for each seat; it records the seat's messages and rewards.
        self._traces: dict[str, Any] = {}
        self._policy_trace: Any = None  # the trace of the policy's seat; None until its first model call
        self._refusal: str | None = None  # why the first refused model call was refused; None if none was
        self._host: Host | None = None

    async def reset(self) -> Observation:
        self._host = host = await Host.get(self._config)

        def register(trace: Any) -> None:
            self._traces[trace.id] = trace
            host.episodes[trace.id] = self

        self._rollout = asyncio.create_task(host.play(self._data, register))
        self._rollout.add_done_callback(lambda _: self._events.put_nowait(None))
        return await self._next_observation()

    async def step(self, message: Message) -> Observation:
        if self._reply is None or self._reply.done():
            raise RuntimeError("verifiers gave up the model call that this answers")
        self._reply.set_result(message)
        return await self._next_observation()

    async def conclude(self, stop: StopReason) -> Score | None:
        """Stop the rollout as if it had reached verifiers' own limit, and return the score that verifiers gives it.

        The limit is that of turns or of tokens, according to ``stop``. The rollout is stopped by refusing the model
        call that waits for an answer. Returns None if no call is waiting.
        """
        if self._reply is None or self._reply.done():
            return None
        self._policy_trace.stop(_STOPS[stop])
        self._reply.set_exception(Refused(_STOPS[stop]))
        return (await self._next_observation()).score

    async def close(self) -> None:
        if self._host is not None:
            for trace in self._traces:
                self._host.episodes.pop(trace, None)
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(Refused("the episode is over"))
        if self._rollout is not None:
            self._rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._rollout

    async def answer_call(self, trace: str, request: Mapping[str, Any]) -> tuple[Message, Mapping[str, Any]]:
        """Wait until the policy has answered a model call.

        Args:
            trace: id of the trace to which the call belongs.
            request: body of the request for a chat completion. Its ``messages`` are the whole conversation so far.

        Returns:
            The policy's message in the form that a server sends, and its token counts (see `Observation.count_tokens`),
            which are empty if the caller of `step` does not count tokens.

        Raises:
            Refused: the episode is over, the call does not continue the policy's conversation, or it asks for something
                that changes what an answer is and that the policy cannot do.
        """
        try:
            for name, plain in _PLAIN.items():
                if (value := request.get(name)) is not None and value not in plain:
                    raise Refused(f"a model call with {name} = {json.dumps(value):.80}, which the policy cannot do")
            limit = request.get("max_completion_tokens") or request.get("max_tokens")
            if limit is not None and (not isinstance(limit, int) or limit < 1):
                raise Refused(f"a model call with max_tokens = {json.dumps(limit):.80}, which is no positive number")
            new = self._new_messages(trace, request["messages"])
        except Refused as error:
            self._refusal = self._refusal or str(error)
            raise
        declared = tuple(request.get("tools") or ()) if self._policy_trace is None else ()
        self._policy_trace = self._traces[trace]
        self._conversation += new
        self._reply = asyncio.get_running_loop().create_future()
        self._events.put_nowait(Observation(tuple(new), tools=declared, max_tokens=limit, count_tokens=True))
        message = await self._reply
        reply = _to_wire(message, len(self._conversation))
        self._conversation.append(_from_wire(reply))
        return reply, message.get("completion", {})

    def _new_messages(self, trace: str, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the messages that a model call adds to the policy's conversation.

        Raises:
            Refused: the call does not continue this conversation, or an earlier call is still waiting.
        """
        if self._policy_trace is not None and trace != self._policy_trace.id:
            seat = self._traces[trace].agent.name
            raise Refused(
                f"the policy plays one conversation an episode, and verifiers starts another one"
                f"{f' (seat {seat!r})' if seat else ''}; give that seat a client and a model of its own, "
                f"environment.options.env.{seat or 'SEAT'}.client and .model"
            )
        if self._reply is not None and not self._reply.done():
            raise Refused("two model calls of one conversation at once")
        received, known = [_from_wire(message) for message in messages], len(self._conversation)
        new = received[known:]
        if not new or (known and any(message["role"] == "assistant" for message in new)):
            raise Refused("a model call that adds nothing to the conversation, or an answer that was not sampled")
        if received[:known] != self._conversation:
            raise Refused(
                "earlier messages are rewritten (by a harness that compacts them, or an @intercept of answers), so "
                "sampled tokens no longer stand where they stood"
            )
        return new

    async def _next_observation(self) -> Observation:
        """Return the observation of the next model call or, if the rollout ends, the last observation.

        The last observation has the score of the policy's seat, which is verifiers' weighted reward. The parts of the
        score are all rewards (not weighted) and all metrics, by name.

        Raises:
            RuntimeError: verifiers reports an error, the rollout made no model call, or a model call was refused.
        """
        observation = await self._events.get()
        if observation is not None:
            return observation
        assert self._rollout is not None
        episode, trace = await self._rollout, self._policy_trace
        if self._refusal is not None:
            raise RuntimeError(f"verifiers: {self._refusal}")
        if not episode.ok or trace is None:
            errors = [error for trace in episode.traces for error in trace.errors] + list(episode.errors)
            reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "the policy was never asked"
            raise RuntimeError(f"verifiers: {reason}")
        parts = {name: value for name, value in trace.metrics.items() if value is not None}
        parts |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        score = Score(float(trace.reward), parts=parts)
        return Observation((), done=True, score=score, info={"stop_condition": trace.stop_condition})


def _from_wire(message: Mapping[str, Any]) -> Message:
    """Convert a message in the format of the OpenAI API to a `Message`.

    Messages with the same meaning become equal, so that they can be compared. For example, ``content`` is always a
    text. Raises `Refused` if the message contains anything but text, such as an image.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        if kinds := {str(part.get("type")) for part in content} - {"text"}:
            raise Refused(f"a message with {', '.join(sorted(kinds))}: only text can be shown to the policy")
        content = "".join(part["text"] for part in content)
    plain = Message(role=message["role"], content=content)
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = []
        for call in calls:
            function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            plain["tool_calls"].append({"id": call["id"], "type": "function", "function": function})
    if message["role"] == "tool":
        plain["tool_call_id"] = message["tool_call_id"]
        if message.get("name"):
            plain["name"] = message["name"]
    return plain


def _to_wire(message: Message, position: int) -> Message:
    """Convert a sampled message to the form in which an OpenAI-compatible server sends it.

    The thinking is in the field ``reasoning_content``, the arguments of tool calls are JSON text, and each tool call
    has an id. ``position`` is the message's index in the conversation, which makes the ids unique.
    """
    content = written(message)
    thinking, closed, answer = content.rpartition(CLOSE)
    if not closed and content.startswith(OPEN):  # the message was cut off in its thought
        thinking, closed, answer = content, CLOSE, ""
    wire: dict[str, Any] = {"role": "assistant", "content": answer.lstrip("\n") if closed else content}
    if closed:
        wire["reasoning_content"] = thinking.removeprefix(OPEN).strip("\n")
    if calls := message.get("tool_calls"):
        wire["tool_calls"] = []
        for number, call in enumerate(calls):
            arguments = call["function"]["arguments"]
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
            call_id = call.get("id") or f"call_{position}_{number}"
            function = {"name": call["function"]["name"], "arguments": arguments}
            wire["tool_calls"].append({"id": call_id, "type": "function", "function": function})
    return Message(**wire)
