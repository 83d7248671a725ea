"""Agents that make any calls whatever, and what must hold then: for the tests of `PolicyModel` and of the endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from random import Random
from typing import Any

import numpy as np

from gleanrl.learners.tiny import build_tokenizer
from gleanrl.protocols import Completion, SamplingParams
from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused, answer_message
from gleanrl.rollout.conversations import PolicyModel
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import IntArray, Message, Turn, segment_arrays

TEXTS = [
    "say left or right",
    "left",
    "right. STOP here",
    "<think>why</think>left",
    "<think>so</think>left",
    "a summary of it",
]
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {}}}}}
    for name in ("look", "take")
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'


@lru_cache
def renderer() -> Renderer:
    return Renderer(build_tokenizer([*TEXTS, CALL] * 4, 256))


@dataclass(eq=False)
class Asked:
    """A call that reached the policy, what was sampled for it, and its answer."""

    call: ModelCall
    earlier: list[Asked]  # the calls that had been answered when this one was sampled
    prompt: IntArray | None = None  # None if it was refused
    params: SamplingParams | None = None
    completion: Completion | None = None  # None if it was refused or cancelled
    answer: ModelAnswer | None = None
    cancelled: bool = False

    @cached_property
    def said(self) -> list[Any]:
        """The conversation with its answer, as `plain` returns it."""
        assert self.answer is not None
        return plain([*self.call.messages, self.answer.message])

    @cached_property
    def tokens(self) -> IntArray:
        """The sampled tokens up to the first text of ``call.stop``, found by trying every length."""
        assert self.completion is not None
        tokens = self.completion.tokens
        for count in range(1, tokens.size):
            if any(stop in renderer().tokenizer.decode(tokens[:count]) for stop in self.call.stop):
                return tokens[:count]
        return tokens

    def prompts(self) -> list[IntArray]:
        """Return the prompts that the call may have: see `Conversations`, but without any index of what came before.

        The messages continue the longest earlier conversation that they begin with. There are several such prompts only
        if the same answer was sampled more than once and the thought does not say which one it is.
        """
        messages, own = self.call.messages, renderer().with_tools(self.call.tools)
        written = plain(messages)
        for count in range(len(messages) - 1, 0, -1):
            found = [one for one in self.earlier if one.call.tools == self.call.tools and one.said == written[:count]]
            thought = messages[count - 1].get("reasoning_content")
            named = [one for one in found if one.answer and one.answer.message.get("reasoning_content") == thought]
            if found:
                prompts = []
                for one in named or found:
                    closed = one.tokens.size > 0 and int(one.tokens[-1]) in own.ends
                    following = own.extend(messages[count:], closed=closed)
                    prompts.append(np.concatenate([one.prompt, one.tokens, *(turn.tokens for turn in following)]))
                return prompts
        return [np.concatenate([turn.tokens for turn in own.start(messages)])]


def plain(messages: Sequence[Message]) -> list[Any]:
    """Return what identifies messages, however a client writes them: no thoughts, no names, and arguments as values."""
    found = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            with suppress(ValueError):
                arguments = json.loads(arguments)
            calls.append([call["id"], call["function"]["name"], arguments])
        found.append([message["role"], message["content"], message.get("tool_call_id"), calls])
    return found


@dataclass
class Episode:
    """An episode of a policy that samples random tokens, or one of some answers with other tokens than the tokenizer
    would mostly produce for its text.

    Completions arrive in an order that does not depend on that of the calls.
    """

    random: Random
    delay: float = 0.0  # longest duration of a completion in seconds
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        context = self.random.choice([60, 400, 4000])
        self.policy = PolicyModel(renderer(), self, seed=3, temperature=1.0, max_context=context, max_tokens=40)
        self.max_context = context
        self.failures: list[Exception] = []
        self.policy.on_failure = self.failures.append
        self._now: ContextVar[Asked] = ContextVar("call")

    async def answer(self, call: ModelCall) -> ModelAnswer:
        one = Asked(call, [])
        self.asked.append(one)
        self._now.set(one)
        try:
            one.answer = await self.policy.answer(call)
        except asyncio.CancelledError:
            one.cancelled = True
            raise
        return one.answer

    def running(self) -> list[Asked]:
        """Return the calls that are being answered."""
        return [one for one in self.asked if one.prompt is not None and not one.answer and not one.cancelled]

    async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
        one = self._now.get()
        one.prompt, one.params, one.earlier = prompt, params, [other for other in self.asked if other.answer]
        own = Random(params.seed)
        end = renderer().end_of_turn
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)
        if self.delay and self.random.random() < 0.2:
            await asyncio.sleep(self.random.random() * self.delay)
        choice = own.randrange(4)
        if choice == 0:
            tokens = [own.randrange(8, 200) for _ in range(own.randrange(1, 8))]
        else:
            text = own.choice([*TEXTS, *[CALL] * 4])
            cut = own.randrange(len(text))
            halves = renderer().tokenizer([text[:cut], text[cut:]], add_special_tokens=False)["input_ids"]
            tokens = [*halves[0], *halves[1]]
        if own.random() < 0.8:
            tokens = [*tokens, end]
        tokens = tokens[: params.max_tokens]
        logprobs = np.array([-own.random() for _ in tokens], np.float32)
        version = sum(other.completion is not None for other in self.asked)
        finish = "stop" if tokens[-1] == end else "length"
        one.completion = Completion(np.array(tokens, np.int32), logprobs, version, finish)
        return one.completion

    def check(self, earned: Mapping[str, float]) -> None:
        """Assert that each sampled token is trained exactly once, after what the sampler was given, which is what the
        messages of its call say, and that answers have what they ``earned`` by their ids."""
        assert not self.failures
        sampled = {}
        for one in self.asked:
            if one.completion is None:
                assert one.answer is None
                continue
            assert one.answer is not None
            assert one.params is not None
            assert one.prompt is not None
            assert one.prompt.size + one.params.max_tokens <= self.max_context
            assert one.params.max_tokens <= min(40, one.call.max_tokens or 40)
            assert any(np.array_equal(one.prompt, expected) for expected in one.prompts())
            assert (one.answer.prompt_tokens, one.answer.completion_tokens) == (one.prompt.size, one.tokens.size)
            sampled[one.completion.version] = one
        answered = list(sampled.values())
        assert len(answered) == sum(one.completion is not None for one in self.asked)
        assert len({one.params.seed for one in answered if one.params}) == len(answered)
        for segment in self.policy.conversations.segments():
            tokens, mask, logprobs = segment_arrays(segment)
            position = 0
            for turn in segment:
                span = slice(position, position := position + turn.tokens.size)
                assert mask[span].all() == turn.sampled or not turn.tokens.size
                if turn.sampled:
                    one = sampled.pop(turn.version)  # fails if it was trained before
                    check_turn(turn, tokens[: span.start], logprobs[span], one)
                    assert turn.reward == earned.get(one.answer.id if one.answer else "")
        assert not sampled


def check_turn(turn: Turn, before: IntArray, logprobs: Any, one: Asked) -> None:
    assert one.completion is not None
    assert one.answer is not None
    np.testing.assert_array_equal(before, one.prompt)
    np.testing.assert_array_equal(turn.tokens, one.tokens)
    np.testing.assert_array_equal(logprobs, one.completion.logprobs[: turn.tokens.size])
    assert answer_message(turn.message) == one.answer.message


def user(text: str) -> Message:
    return Message(role="user", content=text)


def reply(message: Message) -> list[Message]:
    """Return what an agent sends after an answer: the results of its calls, or a message of the user."""
    results = [
        Message(role="tool", content="right", tool_call_id=call["id"]) for call in message.get("tool_calls") or ()
    ]
    return results or [user("say left or right")]


def messages_of_call(random: Random, known: list[list[Message]]) -> list[Message]:
    """Return the messages of a call that an agent makes of the conversations that it knows."""
    messages = [Message(**message) for message in random.choice(known)] if known else [user("say left or right")]
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    match random.randrange(10):
        case 0 if len(messages) > 1:  # trimmed
            del messages[random.randrange(len(messages) - 1)]
        case 1 if len(messages) > 2:  # another order
            i = random.randrange(len(messages) - 1)
            messages[i], messages[i + 1] = messages[i + 1], messages[i]
        case 2:  # compaction
            messages = [Message(role="system", content="a summary of it"), user("left")]
        case 3:  # a message that was not like this, of the model or of another
            message = random.choice([one for one in messages if one["role"] == "tool"] or messages)
            changed = "tool_call_id" if "tool_call_id" in message and random.random() < 0.5 else "content"
            message[changed] += " changed"
        case 4:  # a foreign message
            messages[random.randrange(len(messages)) : 0] = [user("right"), Message(role="assistant", content="right")]
        case 5 if said:  # a fork at an earlier answer
            messages = messages[: random.choice(said) + 1]
        case 6:  # a sub-agent
            messages = [Message(role="system", content="right"), user(random.choice(TEXTS))]
        case 7 if said:  # a client that drops the thought and writes the arguments of calls in another form
            for i in said:
                messages[i].pop("reasoning_content", None)
                calls = []
                for call in messages[i].get("tool_calls") or ():
                    arguments = call["function"]["arguments"].replace(" ", "")
                    calls.append({**call, "function": {**call["function"], "arguments": arguments}})
                if calls:
                    messages[i]["tool_calls"] = calls
        case _:
            pass
    if messages[-1]["role"] == "assistant":
        messages += reply(messages[-1])
    return messages


async def play(
    random: Random,
    rounds: int,
    ask: Callable[[ModelCall], Awaitable[ModelAnswer]],
    earn: Callable[[float, str | None], Awaitable[Any]],
) -> dict[str, float]:
    """Make calls in rounds, several of them at once, and post turn rewards. Return the sum of those of each answer.

    ``ask`` raises `Refused` if the call is refused, and `TimeoutError` if the client has given it up.
    """
    known: list[list[Message]] = []
    earned: dict[str, float] = {}
    tools = random.choice([(), TOOLS])  # those of most calls
    lost = False  # whether an answer may arrive that no one waits for
    for _ in range(rounds):
        wave = []
        for _ in range(random.choice([1, 1, 1, 2, 4])):
            call = ModelCall(
                tuple(messages_of_call(random, known)),
                tools=random.choice([tools, tools, tools, (), TOOLS, TOOLS[:1]]),
                max_tokens=random.choice([None, None, 3]),
                stop=random.choice([(), (), ("STOP", "nothing")]),
                stream=random.random() < 0.5,
            )
            wave += [call] * random.choice([1, 1, 2])  # a retry
        running = [asyncio.ensure_future(ask(call)) for call in wave]
        if random.random() < 0.1:
            await asyncio.sleep(0)
            running[0].cancel()
            lost = True
        for call, answer in zip(wave, await asyncio.gather(*running, return_exceptions=True), strict=True):
            if not isinstance(answer, ModelAnswer):
                assert isinstance(answer, Refused | asyncio.CancelledError | TimeoutError), answer
                lost |= isinstance(answer, TimeoutError)
                continue
            known.append([*call.messages, answer.message])
            if random.random() < 0.3:
                reward = random.choice([1.0, -0.5])
                await earn(reward, None if len(wave) == 1 and not lost else answer.id)
                earned[answer.id] = earned.get(answer.id, 0.0) + reward
    return earned
