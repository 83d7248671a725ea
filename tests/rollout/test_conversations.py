"""Tests of `gleanrl.rollout.conversations`: whatever an agent sends, each sampled token is trained exactly once, after
exactly the tokens that the sampler was given."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.protocols import Completion, SamplingParams
from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused
from gleanrl.rollout.conversations import PolicyModel
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.types import IntArray, Message, Segment, StopReason
from tests.rollout.hostile import CALL, TEXTS, TOOLS, Episode, play, renderer, reply, user
from tests.strategies import NIGHTLY


def model(session: Any, **options: Any) -> PolicyModel:
    limits: dict[str, Any] = {"seed": 3, "temperature": 1.0, "max_context": 4000, "max_tokens": 40}
    return PolicyModel(renderer(), session, **{**limits, **options})


@pytest.mark.timeout(3600)  # for 10,000 sequences on a busy machine
@settings(max_examples=10_000 if NIGHTLY else 75, deadline=None)
@given(seed=st.integers(0, 2**40), rounds=st.integers(1, 8))
def test_each_sampled_token_is_trained_exactly_once_whatever_an_agent_sends(seed: int, rounds: int) -> None:
    """Forks, trimming, re-ordering, compaction, calls at once, retries, foreign messages, tools, stops, cut answers."""

    async def run() -> None:
        random = Random(seed)
        episode = Episode(random)

        async def earn(reward: float, answer_id: str | None) -> None:
            episode.policy.conversations.earn(reward, answer_id)

        episode.check(await play(random, rounds, episode.answer, earn))

    asyncio.run(run())


def texts(segments: tuple[Segment, ...]) -> list[list[tuple[str, bool]]]:
    return [[(turn.message["content"], turn.sampled) for turn in segment] for segment in segments]


def scripted(*answers: str, **options: Any) -> PolicyModel:
    """Return a model that gives these answers in turn."""
    left = iter(answers)

    class Answers:
        async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
            tokens = np.array(renderer().spoken(next(left)), np.int32)[: params.max_tokens]
            finish = "stop" if tokens[-1] == renderer().end_of_turn else "length"
            return Completion(tokens, np.full(tokens.size, -0.5, np.float32), 0, finish)

    return model(Answers(), **options)


def talk(policy: PolicyModel, *calls: ModelCall) -> list[ModelAnswer]:
    async def answers() -> list[ModelAnswer]:
        return [await policy.answer(call) for call in calls]

    return asyncio.run(answers())


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def test_a_conversation_that_only_grows_is_one_segment_and_a_fork_begins_another() -> None:
    policy = scripted("left", "right", "left")
    first = (user("say left or right"),)
    second = (*first, said("left"), user("right"))
    talk(policy, ModelCall(first), ModelCall(second))
    opening, begun = ("say left or right", False), [("right", False), ("right", True)]
    assert texts(policy.conversations.segments()) == [[opening, ("left", True), *begun]]
    talk(policy, ModelCall((*first, said("left"), user("a summary of it"))))
    fork = [("a summary of it", False), ("left", True)]
    found = texts(policy.conversations.segments())
    assert {tuple(segment[2:]) for segment in found} == {tuple(begun), tuple(fork)}
    assert sorted(segment[:2] for segment in found) == [[opening, ("left", False)], [opening, ("left", True)]]


def test_sampled_tokens_are_continued_even_if_the_tokenizer_would_write_them_differently() -> None:
    odd = np.array([*renderer().tokenizer("l", add_special_tokens=False)["input_ids"]] * 3, np.int32)
    session = ScriptedSampler(lambda *_: [*odd.tolist(), renderer().end_of_turn])

    async def two() -> list[IntArray]:
        async with session.session(0) as opened:
            policy = model(opened)
            answer = await policy.answer(ModelCall((user("say left or right"),)))
            await policy.answer(ModelCall((user("say left or right"), answer.message, user("left"))))
        return [prompt for prompt, _, _ in session.calls]

    first, second = asyncio.run(two())
    held = [*first.tolist(), *odd.tolist(), renderer().end_of_turn]
    assert second[: len(held)].tolist() == held


def test_a_call_has_an_id_that_the_conversation_does_not_have_even_if_it_was_shortened() -> None:
    tokens = [*renderer()._encoder.ids(CALL), renderer().end_of_turn]

    async def run() -> None:
        async with ScriptedSampler(lambda *_: tokens).session(0) as session:
            policy, messages = model(session), [user("say left or right")]
            for _ in range(4):
                ids = {call["id"] for message in messages for call in message.get("tool_calls", ())}
                answer = await policy.answer(ModelCall(tuple(messages), TOOLS))
                (call,) = answer.message["tool_calls"]
                assert call["id"] not in ids
                messages = [messages[0], *messages[1:][-2:], answer.message, *reply(answer.message)]

    asyncio.run(run())


def test_an_episode_of_many_calls_does_not_keep_the_prompt_of_each() -> None:
    policy = scripted(*["left"] * 3)
    talk(policy, *[ModelCall((user("say left or right"),))] * 3)
    assert [exchange.prompt.size for exchange in policy.conversations._ended] == [0] * 3


def test_calls_at_once_have_results_that_do_not_depend_on_which_arrives_first() -> None:
    async def run(order: list[int]) -> Any:
        episode = Episode(Random(1))
        calls = [ModelCall((user(text),)) for text in TEXTS]
        answers = await asyncio.gather(*(episode.answer(calls[i]) for i in order))
        opening = (*calls[0].messages, answers[order.index(0)].message)
        forks = [ModelCall((*opening, user(text))) for text in TEXTS]
        await asyncio.gather(*(episode.answer(forks[i]) for i in order))
        segments = episode.policy.conversations.segments()
        assert len(segments) == 2 * len(TEXTS) - 1
        return sorted([(turn.tokens.tolist(), turn.sampled) for turn in segment] for segment in segments)

    assert asyncio.run(run([0, 1, 2, 3, 4, 5])) == asyncio.run(run([3, 1, 5, 4, 0, 2]))


def test_an_answer_ends_at_a_stop_text_and_the_conversation_goes_on_after_it() -> None:
    policy = scripted("left right. STOP here left left", "left")
    (answer,) = talk(policy, ModelCall((user("left"),), stop=("nothing", "STOP")))
    assert (answer.message["content"], answer.finish) == ("left right. ", "stop")
    talk(policy, ModelCall((user("left"), answer.message, user("right"))))
    (segment,) = policy.conversations.segments()
    shown = renderer().tokenizer.decode(segment[1].tokens)
    assert "STOP" in shown
    assert not shown.endswith("left")
    assert segment[2].tokens[0] == renderer().end_of_turn


def test_calls_beyond_a_limit_are_refused_and_a_shorter_prompt_is_answered_again() -> None:
    policy = scripted(*["left"] * 3, max_context=40, max_turns=2)
    short = ModelCall((user("left"),))
    long = replace(short, messages=(user("say left or right " * 40),))
    huge = replace(short, messages=(user("left" * 10_000),))
    talk(policy, short)
    for call in (long, huge):
        with pytest.raises(Refused) as refused:
            talk(policy, call)
        assert (refused.value.kind, policy.limit) == ("context_length", StopReason.CONTEXT_FULL)
    talk(policy, short)
    assert policy.limit is None
    with pytest.raises(Refused) as refused:
        talk(policy, short)
    assert (refused.value.kind, policy.limit, policy.turns) == ("episode_over", StopReason.MAX_TURNS, 2)


def test_what_cannot_fit_is_refused_before_it_is_rendered() -> None:
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "look", "arguments": json.dumps({"x": "left " * 400_000})},
    }
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    thought = {"role": "assistant", "content": "", "reasoning_content": "left " * 400_000}
    for messages in (
        (user("left"), answer, user("left")),
        (user("left"), thought, user("left")),
        (user(""),) * 60_000,
    ):
        policy = scripted("left", max_context=400)
        started = time.process_time()
        with pytest.raises(Refused) as refused:
            talk(policy, ModelCall(messages))
        assert refused.value.kind == "context_length"
        assert time.process_time() - started < 2  # to render it takes ten seconds and more


def test_another_temperature_marks_the_trajectory_and_a_greedy_episode_stays_greedy() -> None:
    seen: list[float] = []

    class Recording:
        async def sample(self, prompt: IntArray, params: SamplingParams) -> Completion:
            seen.append(params.temperature)
            return Completion(renderer().spoken("left"), np.zeros(2, np.float32), 0, "stop")

    call = ModelCall((user("left"),))
    for own, asked, altered in ((1.0, None, None), (1.0, 1.0, None), (1.0, 0.5, "temperature=0.5"), (0.0, 0.7, None)):
        policy = model(Recording(), temperature=own)
        talk(policy, replace(call, temperature=asked))
        assert policy.altered == altered
    assert seen == [1.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    "messages", [(), (said("left"),), (user("\ud800"),), (Message(role="mother", content="left"),)]
)
def test_messages_that_cannot_be_rendered_are_refused(messages: Any) -> None:
    with pytest.raises(Refused) as refused:
        talk(scripted("left"), ModelCall(messages))
    assert refused.value.kind == "invalid_request"


def test_arguments_in_another_form_and_a_dropped_thought_continue_the_conversation() -> None:
    call = '<think>why</think><tool_call>\n{"name": "look", "arguments": {"x": 1, "y": 2.0}}\n</tool_call>'
    policy = scripted(call, "left")
    (answer,) = talk(policy, ModelCall((user("left"),), TOOLS))
    assert answer.finish == "tool_calls"
    (sent,) = answer.message["tool_calls"]
    assert json.loads(sent["function"]["arguments"]) == {"x": 1, "y": 2.0}
    changed = {**sent, "function": {"name": "look", "arguments": '{"y":2,"x":1}'}}
    back = Message(role="assistant", content="", tool_calls=[changed])
    talk(policy, ModelCall((user("left"), back, *reply(back)), TOOLS))
    (segment,) = policy.conversations.segments()
    assert [turn.sampled for turn in segment] == [False, True, False, True]
