"""Plays an expert's episodes for the tasksets of `gymnasium_text` and `textarena`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gleanrl.protocols import Environment
from gleanrl.types import Message, Score


def play_expert(
    environment: Environment, next_message: Callable[[], str], turns: int
) -> tuple[tuple[Message, ...], Score]:
    """Play at most ``turns`` turns, and return the conversation and the score, as `Taskset.demonstrate` does.

    ``next_message`` is called once a turn for the expert's message.
    """

    async def play() -> tuple[tuple[Message, ...], Score]:
        observation = await environment.reset()
        conversation = [*observation.messages]
        try:
            for _ in range(turns):
                if observation.done:
                    break
                message: Message = {"role": "assistant", "content": next_message()}
                observation = await environment.step(message)
                conversation += [message, *observation.messages]
        finally:
            await environment.close()
        if observation.done and conversation[-1]["role"] == "user":
            conversation.pop()  # the last message has no answer
        return tuple(conversation), observation.score or Score.failed("no score")

    with ThreadPoolExecutor(1) as thread:  # the caller may run on an event loop already
        return thread.submit(asyncio.run, play()).result()
