"""Lets an expert play an episode, to record a demonstration.

The tasksets in `gymnasium_text` and `textarena` call `play_expert` in their `Taskset.demonstrate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gleanrl.protocols import Environment
from gleanrl.types import Message, Score


def play_expert(
    environment: Environment, next_message: Callable[[], str], turns: int
) -> tuple[tuple[Message, ...], Score]:
    """Play an episode of ``environment`` with the messages of an expert, and return the conversation and its score.

    ``next_message`` is called once in each turn and returns the text of the expert's message. An episode that does not
    end within ``turns`` turns is cut off there. The score is that of the last observation, or an invalid score if this
    observation has none. The environment is closed in any case.
    """

    async def play() -> tuple[tuple[Message, ...], Score]:
        try:
            observation = await environment.reset()
            conversation = [*observation.messages]
            for _ in range(turns):
                if observation.done:
                    break
                message: Message = {"role": "assistant", "content": next_message()}
                observation = await environment.step(message)
                conversation += [message, *observation.messages]
        finally:
            await environment.close()
        if observation.done and conversation[-1]["role"] == "user":
            # The expert does not answer the environment's last message, so there is nothing to learn after it.
            conversation.pop()
        return tuple(conversation), observation.score or Score.failed("no score")

    # `asyncio.run` needs a thread without a running event loop, and the caller's thread may have one.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, play()).result()
