"""Demonstrations by agents that call the model themselves: an expert answers the calls in place of the policy.

`play_expert` needs no tokenizer, because that of a tiny model is trained on the demonstrations. `record` then gives
the answers the tokens that they have in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gleanrl.protocols import Completion, Environment, Tools
from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused, answer_message
from gleanrl.rollout.conversations import Conversations
from gleanrl.rollout.player import Endpoint, sum_of_rewards
from gleanrl.rollout.renderer import Renderer
from gleanrl.rollout.tool_calls import expert_message, next_call
from gleanrl.types import Message, Score, Task, finite_reward

Called = tuple[Sequence[Message], Tools]
"""A model call that an expert has answered: the messages with the answer as the last one, and the tools."""


def opening_of(task: Task, messages: Sequence[Message]) -> int:
    """Return how many of the first messages of a demonstration are the task's prompt, which the expert has not said."""
    size = len(task.prompt)
    return size if [*messages[:size]] == [*task.prompt] else 0


async def play_expert(
    environment: Environment, endpoint: Endpoint, expert: Callable[[Sequence[Message], Tools], Any]
) -> tuple[list[Called], Score | None]:
    """Play an episode whose model calls ``expert`` answers, and return the calls and the environment's score, if any.

    If the environment gives no score and the agent posts turn rewards, the score is their sum.

    ``expert`` is that of `Taskset.agent_expert`. Errors of the expert and of the environment are raised.
    """
    calls: list[Called] = []
    earned: list[float] = []
    errors: list[Exception] = []

    async def answer(call: ModelCall) -> ModelAnswer:
        try:
            message = expert_message(expert(call.messages, call.tools), next_call(call.messages))
        except Exception as error:
            errors.append(error)
            raise Refused(f"the expert has no answer: {error}") from error
        calls.append(((*call.messages, message), tuple(call.tools)))
        return ModelAnswer(answer_message(message), 0, 0, "tool_calls" if message.get("tool_calls") else "stop")

    def earn(reward: float, *_: Any) -> None:
        if not calls:
            raise ValueError("a reward came before the model's first message, which cannot have earned it")
        earned.append(finite_reward(reward))

    try:
        await environment.reset()
        async with endpoint(answer, earn=earn) as address:
            observation = await environment.run(address)
    except Exception as error:
        raise errors[0] if errors else error from None
    finally:
        await environment.close()
    if errors:
        raise errors[0]
    return calls, observation.score or (sum_of_rewards(earned) if earned else None)


def record(renderer: Renderer, calls: Sequence[Called]) -> Conversations:
    """Return the conversations of an episode in which the policy had given the expert's answers.

    The log-probs of the answers are 0. Raises `UserError` if the chat template cannot show a call or an answer.
    """
    conversations = Conversations(renderer)
    for (*messages, answer), tools in calls:
        exchange = conversations.begin(messages, tools)
        tokens = exchange.renderer.spoken(answer)
        conversations.end(exchange, Completion(tokens, np.zeros(tokens.size, np.float32), 0, "stop"))
    return conversations
