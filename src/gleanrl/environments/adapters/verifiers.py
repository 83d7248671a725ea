"""verifiers (v1): uses that package's tasksets, tools, hooks and rewards, while Glean RL samples every answer.

`VerifiersTaskset` is the environment ``verifiers`` of the settings. A rollout of verifiers runs a harness (the program
that plays), which sends model calls to an OpenAI-compatible endpoint. Here, that endpoint is Glean RL's own, on
loopback (`verifiers_serving`). A call waits there until the episode's next message is sampled. The messages that a call
adds to the conversation are the environment's observation. So verifiers' own rollout runs unchanged, with its stops,
interceptions, tool servers, limits and scoring, and training uses exactly the tokens that were sampled.
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
from gleanrl.rollout.thinking import CLOSE, OPEN
from gleanrl.types import Message, Score, StopReason, Task
from gleanrl.utils.errors import UserError

_STOPS = {StopReason.MAX_TURNS: "max_turns", StopReason.CONTEXT_FULL: "max_total_tokens"}  # names in verifiers


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class VerifiersTaskset(Taskset):
    """Uses the tasks of a verifiers v1 taskset.

    For example, ``id="gsm8k", args={"split": "train"}, eval_args={"split": "test"}``.

    The policy plays exactly one seat of the environment. Any other seat needs its own ``model`` and ``client``.

    Args:
        id: an installed taskset, named as for verifiers' own `eval` command, or a ``file.py`` that exports one.
        args: the taskset's config, which verifiers sets by ``--env.taskset.*``.
        eval_args: the options of ``args`` that differ for evaluation. None = evaluation gets a share of the same tasks,
            chosen by content.
        env: the environment's config (``--env.*``): another ``id``, timeouts, and each seat's harness, runtime, model,
            client and limits. By default, a seat is a chat loop with the task's tools, on this machine.
    """

    id: str
    args: dict[str, Any] = Field(default_factory=dict)
    eval_args: dict[str, Any] | None = None
    env: dict[str, Any] = Field(default_factory=dict)

    named_by_content = True  # an id is a hash of the task's content, without its position in the taskset

    def __post_init__(self) -> None:
        for split in ("train", "eval"):  # resolved here so that bad options are reported now
            resolve_config(self.id, self._args(split), self.env)

    def _args(self, split: Split) -> dict[str, Any]:
        return {**self.args, **(self.eval_args or {})} if split == "eval" else self.args

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        """Return the first ``count`` different tasks in ``split``.

        A task's content decides its split: 60 % of tasks are for training, 25 % for a warm start, 15 % for evaluation.
        With ``eval_args``, evaluation has exactly the tasks that these select. The package must then keep them apart
        from the training tasks, which is not checked.
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
        """Yield every task with a fingerprint of its content. The task's position in the taskset does not matter."""
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
    """One episode of verifiers. It runs in an asyncio task of its own, in which each model call waits for a `step`."""

    def __init__(self, config: Any, data: Mapping[str, Any]) -> None:
        self._config, self._data = config, data
        self._rollout: asyncio.Task[Any] | None = None
        self._conversation: list[Message] = []
        self._reply: asyncio.Future[Message] | None = None  # the answer for which the pending model call waits
        self._events: asyncio.Queue[Observation | None] = asyncio.Queue()  # None = the rollout has ended
        self._traces: dict[str, Any] = {}  # trace id -> verifiers' trace, for all traces of this episode
        self._policy_trace: Any = None  # the trace of the seat that the policy plays
        self._refusal: str | None = None  # why the rollout cannot be trained on
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
        """Return the score that verifiers gives the episode if one of verifiers' own limits stops it now."""
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

    async def answer_call(self, trace: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> Message:
        """Wait for the policy's answer to a model call, and return it.

        Raises:
            Refused: the episode is over, or the call does not extend the episode's one conversation.
        """
        try:
            new = self._new_messages(trace, messages)
        except Refused as error:
            self._refusal = self._refusal or str(error)
            raise
        declared = tuple(tools) if self._policy_trace is None else ()
        self._policy_trace = self._traces[trace]
        self._conversation += new
        self._reply = asyncio.get_running_loop().create_future()
        self._events.put_nowait(Observation(tuple(new), tools=declared))
        reply = _to_wire(await self._reply, len(self._conversation))
        self._conversation.append(_from_wire(reply))
        return reply

    def _new_messages(self, trace: str, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the messages that a call adds to the conversation."""
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
        """Wait for the next model call and return its messages; after the last one, the score of the policy's seat.

        The score is verifiers' weighted reward. Its parts are each reward (unweighted) and each metric, by name.
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
    """Convert a message from the wire into a `Message`, in one normal form."""
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
    """Convert a sampled message into the form that a server sends.

    Thinking is separate, arguments of calls are text, and each call has an id.
    """
    content = message["content"]
    thinking, closed, answer = content.rpartition(CLOSE)
    if not closed and content.startswith(OPEN):  # the thought was cut off
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
