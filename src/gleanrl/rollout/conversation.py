"""Converts a trajectory to messages or to readable text, for rewards, reports and stored experience."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from gleanrl.rollout.thinking import written
from gleanrl.rollout.tool_calls import read_calls
from gleanrl.types import LAST_OBSERVATION, TURN_ORDER, Message, Segment, Task, Trajectory


def conversation(trajectory: Trajectory) -> list[Message]:
    """Return the messages of a trajectory in order, each of them once, even if the context was rewritten.

    A segment that begins with another message than all before it is a conversation of its own, of which all messages
    are included. The last message is the text that an agent returned, or else the model's last answer. This answer is
    repeated if it is not in the last segment. If experience was inserted into the prompt (``info["unguided"]``), the
    prompt without it is returned.
    """
    messages = [turn.message for segment in trajectory.segments[:1] for turn in segment]
    for number, segment in enumerate(trajectory.segments[1:], 1):
        # A later segment begins with context that repeats earlier turns. Its new messages begin after the last answer
        # in this context.
        first = _first_sampled(segment)
        answers = [i for i in range(first) if segment[i].message["role"] == "assistant"]
        repeated = answers[-1] + 1 if answers else first
        if segment and not any(
            other and other[0].message == segment[0].message for other in trajectory.segments[:number]
        ):
            repeated = 0
        elif not answers:  # the question is new if no other segment begins with it
            repeated = max(_common(segment[:first], other) for other in trajectory.segments[:number])
        messages += [turn.message for turn in segment[repeated:]]
    plain = trajectory.info.get("unguided")
    if plain is not None:
        opening = len(opening_turns(trajectory))
        messages[:opening] = with_prompt(messages[:opening], plain)
    returned = [message for message in trajectory.info.get(LAST_OBSERVATION, ()) if message["role"] == "assistant"]
    order = trajectory.info.get(TURN_ORDER, ())
    if not returned and order and order[-1] != max(order):
        returned = [list(trajectory.sampled_turns())[order.index(max(order))].message]
    return messages + returned


def readable(message: Message) -> str:
    """Return a message as plain text: its thought in tags, its content, and a line as ``name({"a": 1})`` per call."""
    lines = [text] if (text := written(message)) else []
    for call in read_calls(message):
        given = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
        lines.append(f"{call.name or '?'}({given})")
    return "\n".join(lines)


PAYLOAD_CHARACTERS = 500
"""Maximum number of characters of each value of a task's payload in a transcript."""


def transcript(trajectory: Trajectory, task: Task | None = None) -> str:
    """Return the conversation as text for people to read, with the score and what it consists of.

    A sampled turn is marked by ``>`` and followed by its number of tokens and their mean log-prob. The messages with
    which the environment ended the episode come last. With ``task``, its payload is included, which contains the
    reference answer if the task has one.
    """
    score = f"{trajectory.score.value:g}" if trajectory.score.valid else "invalid"
    head = f"task {trajectory.task_id}: score {score}, ended {trajectory.stop}, sampled by version {trajectory.version}"
    lines = [head]
    if trajectory.score.parts:
        lines.append(f"score parts: {', '.join(f'{name} {part:g}' for name, part in trajectory.score.parts.items())}")
    if trajectory.score.explanation:
        lines.append(f"({trajectory.score.explanation})")
    if task is not None:
        lines += [f"{name}: {text}" for name, text in readable_payload(task).items()]
    for index, segment in enumerate(trajectory.segments):
        if index:
            lines.append("--- the context was rewritten here ---")
        for turn in segment:
            text = readable(turn.message).strip()
            if turn.logprobs is None:
                lines.append(f"\n[{turn.message['role']}]\n{text}")
                continue
            sure = f", mean log-prob {float(np.mean(turn.logprobs)):.2f}" if turn.logprobs.size else ""
            earned = "" if turn.reward is None else f", reward {turn.reward:g}"
            lines.append(f"\n> {text}\n  ({turn.tokens.size} tokens{sure}{earned})")
    if last := last_observation(trajectory):
        lines.append(f"\n[last observation, which the model did not see]\n{last}")
    return "\n".join(lines) + "\n"


def readable_payload(task: Task) -> dict[str, str]:
    """Return the payload of a task as texts, each of at most `PAYLOAD_CHARACTERS`."""
    texts = {}
    for name, value in task.payload.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        texts[name] = text if len(text) <= PAYLOAD_CHARACTERS else f"{text[:PAYLOAD_CHARACTERS]} ..."
    return texts


def last_observation(trajectory: Trajectory) -> str:
    """Return the messages with which the environment ended the episode, as text; empty if there were none."""
    return "\n".join(readable(message) for message in trajectory.info.get(LAST_OBSERVATION, ())).strip()


def opening_turns(trajectory: Trajectory) -> Segment:
    """Return the context turns before the first sampled one: system prompt, task prompt and first observation."""
    first = trajectory.segments[0] if trajectory.segments else ()
    return first[: _first_sampled(first)]


def with_prompt(messages: Sequence[Message], content: str) -> list[Message]:
    """Return a copy of ``messages`` in which the last user message has the text ``content``.

    Raises `ValueError` if there is no user message.
    """
    index = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    if index < 0:
        raise ValueError("there is no user message")
    changed: Message = {**messages[index], "content": content}
    return [*messages[:index], changed, *messages[index + 1 :]]


def _common(segment: Segment, other: Segment) -> int:
    """Return the number of messages with which both segments begin."""
    pairs = enumerate(zip(segment, other, strict=False))
    return next((i for i, (a, b) in pairs if a.message != b.message), min(len(segment), len(other)))


def _first_sampled(segment: Segment) -> int:
    return next((i for i, turn in enumerate(segment) if turn.sampled), len(segment))
