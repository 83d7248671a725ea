"""Tests of `gleanrl.rollout.context`: under every context policy, the trained tokens are exactly the sampled ones, and
prompts are what the chat template renders."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import ContextSettings
from gleanrl.learners.tiny import build_tokenizer
from gleanrl.protocols import Completion
from gleanrl.rollout.context import make_context, strip_thinking
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import Message, segment_arrays
from gleanrl.utils.errors import UserError
from tests.strategies import examples

TEXTS = ["You arrive at fridge 1. The fridge 1 is closed.", "go to fridge 1", "Nothing happens.", "<think>why</think>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@lru_cache
def renderer(template: str = "own") -> Renderer:
    tokenizer = build_tokenizer(TEXTS * 5, 512)
    if template == "chatml":
        tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
    return Renderer(tokenizer, bodies=True)


def answer(r: Renderer, text: str, *, closed: bool, version: int = 0) -> Completion:
    ids = [*r.tokenizer(text, add_special_tokens=False)["input_ids"], *([r.end_of_turn] if closed else [])]
    rng = np.random.default_rng(len(ids))
    return Completion(np.array(ids, np.int32), -rng.random(len(ids)).astype(np.float32), version, "stop")


def user(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


@pytest.mark.parametrize("template", ["own", "chatml"])
def test_prompts_of_a_linear_context_equal_the_rendered_conversation(template: str) -> None:
    r = renderer(template)
    context = make_context(r, ContextSettings(system_prompt="Nothing happens."))
    messages = [Message(role="system", content="Nothing happens."), *user(TEXTS[0])]
    context.observe(user(TEXTS[0]))
    for text in ["go to fridge 1", "go to fridge 1"]:
        whole = r.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
        assert context.prompt().tolist() == whole["input_ids"]
        message = context.act(answer(r, text, closed=True))
        assert message == {"role": "assistant", "content": text}
        context.observe(user("Nothing happens."))
        messages += [message, *user("Nothing happens.")]
    (segment,) = context.segments()
    assert [turn.sampled for turn in segment] == [False, False, True, False, True, False]
    assert [turn.message["role"] for turn in segment] == [m["role"] for m in messages]


@pytest.mark.parametrize("template", ["own", "chatml"])
def test_the_context_adds_the_end_of_turn_to_a_truncated_answer(template: str) -> None:
    r = renderer(template)
    context = make_context(r, ContextSettings())
    context.observe(user("Nothing happens."))
    context.act(answer(r, "go to", closed=False))
    context.observe(user("Nothing happens."))
    (segment,) = context.segments()
    assert segment[-1].tokens[0] == r.end_of_turn
    whole = [*user("Nothing happens."), Message(role="assistant", content="go to"), *user("Nothing happens.")]
    expected = r.tokenizer.apply_chat_template(whole, tokenize=True, add_generation_prompt=True)
    assert context.prompt().tolist() == expected["input_ids"]


def test_a_demonstration_trains_only_the_answer_and_its_end_of_turn() -> None:
    r = renderer()
    conversation = [*user(TEXTS[0]), Message(role="assistant", content="go to fridge 1")]
    tokens, mask, _ = segment_arrays(r.demonstration(conversation))
    assert r.tokenizer.decode(tokens[mask].tolist()) == "go to fridge 1<|end|>"
    assert tokens.tolist() == r.tokenizer.apply_chat_template(conversation, tokenize=True)["input_ids"]


def test_a_window_context_keeps_the_opening_and_the_last_exchanges() -> None:
    r = renderer()
    context = make_context(r, ContextSettings(policy="window", window_turns=1))
    context.observe(user(TEXTS[0]))
    for text in ["Nothing happens.", "You arrive at fridge 1.", "Nothing happens."]:
        context.act(answer(r, "go to fridge 1", closed=True))
        context.observe(user(text))
    shown = r.tokenizer.decode(context.prompt().tolist())
    assert shown.count("go to fridge 1") == 1
    assert TEXTS[0] in shown
    assert shown.endswith("<|user|>Nothing happens.<|end|><|assistant|>")
    assert len(context.segments()) == 3


def test_a_thought_opened_by_the_generation_prompt_is_stripped_completely() -> None:
    own = renderer("chatml").tokenizer
    tokenizer = build_tokenizer(TEXTS * 5, 512)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]})
    tokenizer.chat_template = own.chat_template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    r = Renderer(tokenizer)
    context = make_context(r, ContextSettings(policy="strip_thinking"))
    context.observe(user("Nothing happens."))
    for said in ("why</think>go to fridge 1", "why", "why</think>go to fridge 1"):  # the second is truncated
        assert r.tokenizer.decode(context.prompt().tolist()).endswith("<|im_start|>assistant\n<think>\n")
        context.act(answer(r, said, closed=True))
        context.observe(user("Nothing happens."))
    heard = "<|im_end|>\n<|im_start|>user\nNothing happens.<|im_end|>\n<|im_start|>assistant\n"
    shown = r.tokenizer.decode(context.prompt().tolist())
    assert shown.partition("assistant\n")[2] == (
        f"go to fridge 1{heard}<think>\nwhy{heard}go to fridge 1{heard}<think>\n"
    )
    assert [sum(turn.sampled for turn in segment) for segment in context.segments()] == [1, 2, 0]


def test_thoughts_are_stripped_from_later_prompts_and_stay_in_the_sampled_turn() -> None:
    r = renderer()
    context = make_context(r, ContextSettings(policy="strip_thinking"))
    context.observe(user("Nothing happens."))
    context.act(answer(r, "<think>why</think>go to fridge 1", closed=True))
    context.observe(user("Nothing happens."))
    shown = r.tokenizer.decode(context.prompt().tolist())
    assert "think" not in shown
    assert "<|assistant|>go to fridge 1<|end|><|user|>" in shown
    first, second = context.segments()
    assert "<think>why</think>" in r.tokenizer.decode(first[-1].tokens.tolist())
    assert not any(turn.sampled for turn in second)


@settings(max_examples=examples(60))
@given(
    policy=st.sampled_from(["linear", "strip_thinking", "window"]),
    template=st.sampled_from(["own", "chatml"]),
    turns=st.lists(
        st.tuples(
            st.sampled_from(["go to fridge 1", "<think>why</think>go to fridge 1", "<think>why", "x</think>", ""]),
            st.booleans(),
            st.sampled_from(TEXTS),
        ),
        max_size=6,
    ),
    window_turns=st.integers(1, 3),
)
def test_trained_tokens_are_exactly_the_sampled_ones(policy, template, turns, window_turns) -> None:
    """Each sampled turn is trained once, after the prompt that it was sampled from, with equal ids and log-probs."""
    r = renderer(template)
    context = make_context(r, ContextSettings(policy=policy, window_turns=window_turns))
    context.observe(user(TEXTS[0]))
    expected = []
    for version, (text, closed, observation) in enumerate(turns):
        prompt = context.prompt()
        completion = answer(r, text, closed=closed or not text, version=version)
        expected.append((prompt.tolist(), completion))
        context.act(completion)
        context.observe(user(observation))
    trained = []
    for segment in context.segments():
        tokens, mask, logprobs = segment_arrays(segment)
        position = 0
        for turn in segment:
            span = slice(position, position := position + turn.tokens.size)
            assert mask[span].all() == turn.sampled or turn.tokens.size == 0
            if turn.sampled:
                trained.append((tokens[: span.start].tolist(), turn, logprobs[span]))
    assert len(trained) == len(expected)
    for (prompt, completion), (before, turn, logprobs) in zip(expected, trained, strict=True):
        assert before == prompt
        np.testing.assert_array_equal(turn.tokens, completion.tokens)
        np.testing.assert_array_equal(logprobs, completion.logprobs)
        assert turn.version == completion.version


@settings(max_examples=examples(40))
@given(
    policy=st.sampled_from(["linear", "strip_thinking", "window"]),
    template=st.sampled_from(["own", "chatml"]),
    turns=st.lists(
        st.tuples(
            st.sampled_from(["go to fridge 1", "<think>why</think>go to fridge 1"]),
            st.booleans(),
            st.lists(st.sampled_from(TEXTS[:3]), min_size=1, max_size=3),
        ),
        max_size=6,
    ),
    window_turns=st.integers(1, 3),
)
def test_the_text_of_each_observation_is_the_body_of_exactly_one_turn(policy, template, turns, window_turns) -> None:
    r = renderer(template)
    context = make_context(r, ContextSettings(policy=policy, window_turns=window_turns, system_prompt="Nothing."))
    context.observe(user(TEXTS[0]))
    for text, closed, observations in turns:
        context.act(answer(r, text, closed=closed))
        context.observe([message for observation in observations for message in user(observation)])
    last = user(TEXTS[1])
    bodies = []
    for turn in (*(turn for segment in context.segments() for turn in segment), *context.ending(last)):
        if turn.body is not None:
            start, stop = turn.body
            bodies.append(turn.message["content"])
            ids = r.tokenizer(turn.message["content"], add_special_tokens=False)["input_ids"]
            assert turn.tokens[start:stop].tolist() == ids
    assert bodies == [text for _, _, observations in turns for text in observations] + [TEXTS[1]] * bool(turns)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = build_tokenizer(TEXTS, 512)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="chat template"):
        Renderer(tokenizer)


@pytest.mark.parametrize("template", ["{{ m['content'] }}", "{{ m['role'] }}: {{ m['content'] }}"])
def test_a_template_that_never_ends_a_turn_is_refused(template: str) -> None:
    tokenizer = build_tokenizer(TEXTS, 512)
    tokenizer.chat_template = f"{{% for m in messages %}}{template}{{% endfor %}}"
    with pytest.raises(UserError, match="end an assistant turn"):
        Renderer(tokenizer)


PARTS = (  # as in the templates of Idefics 3 and SmolVLM, and of LLaVA-NeXT
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}<|end|>{% endfor %}",
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'][0]['text'] + '<|end|>' }}{% endfor %}",
)


@pytest.mark.parametrize("template", PARTS)
def test_a_template_that_takes_lists_of_parts_only_is_refused_in_one_line(template: str) -> None:
    tokenizer = build_tokenizer(TEXTS, 512)
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="text model") as caught:
        Renderer(tokenizer)
    assert "\n" not in str(caught.value)


def test_a_conversation_that_the_template_refuses_is_an_error_with_the_reason_of_the_template() -> None:
    tokenizer = build_tokenizer(TEXTS, 512)
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    with pytest.raises(UserError, match="no system prompts"):
        Renderer(tokenizer).start([Message(role="system", content="You play."), *user("Nothing happens.")])


GOLDEN = {"own": "372216482f348fa9", "chatml": "66112caed074ee38"}


@pytest.mark.parametrize("template", ["own", "chatml"])
def test_rendered_tokens_equal_those_of_earlier_releases(template: str) -> None:
    """Pools and checkpoints of earlier releases hold these tokens (digests: ``GOLDEN``), so they must not change."""
    r = renderer(template)
    digest = hashlib.sha256()
    said = [("<think>why</think>go to fridge 1", True), ("go to", False), ("", True), ("go to fridge 1", True)]
    for policy in ("linear", "strip_thinking", "window"):
        context = make_context(
            r, ContextSettings(policy=policy, window_turns=1, system_prompt="Nothing <|end|> happens.")
        )
        context.observe((*user(TEXTS[0]), *user(" naïve → {}\n\n")))
        digest.update(context.prompt().tobytes())
        for number, (text, closed) in enumerate(said):
            context.act(answer(r, text, closed=closed))
            context.observe((*user(TEXTS[number]), *user(f" {number}  ") * (number % 2)))
            digest.update(context.prompt().tobytes())
        for segment in context.segments():
            digest.update(b"".join(turn.tokens.tobytes() + bytes([turn.sampled]) for turn in segment))
    conversation = [*user(TEXTS[0]), Message(role="assistant", content="go <|im_end|> x"), *user("."), *user(" a ")]
    shown = r.demonstration([*conversation, Message(role="assistant", content=" done")])
    digest.update(b"".join(turn.tokens.tobytes() + bytes([turn.sampled]) for turn in shown))
    assert digest.hexdigest()[:16] == GOLDEN[template]


def test_a_switch_in_the_system_prompt_holds_for_every_turn() -> None:
    tokenizer = build_tokenizer([*TEXTS, "quiet", "<think>\n</think>"] * 5, 512)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    switch = "{% if messages[0]['content'] == 'quiet' %}<think>\n</think>{% endif %}{% endif %}"
    tokenizer.chat_template = CHATML.removesuffix("{% endif %}") + switch
    r = Renderer(tokenizer)
    for system in ("quiet", "Nothing happens."):
        context = make_context(r, ContextSettings(system_prompt=system))
        messages = [Message(role="system", content=system), *user(TEXTS[0])]
        for _ in range(3):
            context.observe(user(TEXTS[0]))
            assert r.tokenizer.decode(context.prompt()).endswith("</think>") == (system == "quiet")
            context.act(answer(r, "go to fridge 1", closed=True))
            messages += [Message(role="assistant", content="go to fridge 1"), *user(TEXTS[0])]
        ends = [r.tokenizer.decode(turn.tokens).endswith("</think>") for turn in r.demonstration(messages)[1::2]]
        assert ends == [system == "quiet"] * 3


def test_text_that_looks_like_a_placeholder_is_rendered_like_any_other() -> None:
    r = renderer("chatml")
    (turn,) = r.extend(user("a gleanmark b"), closed=True)
    assert r.tokenizer.decode(turn.tokens) == "\n<|im_start|>user\na gleanmark b<|im_end|>\n<|im_start|>assistant\n"


def test_two_messages_of_the_assistant_in_a_row_are_no_demonstration() -> None:
    said = Message(role="assistant", content="go to fridge 1")
    with pytest.raises(UserError, match="in a row"):
        renderer().demonstration([*user(TEXTS[0]), said, said])


def test_overwriting_a_returned_prompt_does_not_change_the_context() -> None:
    r = renderer()
    context = make_context(r, ContextSettings())
    context.observe(user(TEXTS[0]))
    first = context.prompt()
    kept = first.tolist()
    first[:] = 0  # a sampler may overwrite the array
    assert context.prompt().tolist() == kept
    context.act(answer(r, "go to fridge 1", closed=True))
    context.observe(user("Nothing happens."))
    assert context.prompt().tolist()[: len(kept)] == kept


def test_an_opening_is_rendered_once_for_all_members_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer(TEXTS * 5, 512)
    r, rendered, template = Renderer(tokenizer), list[Any](), tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *given, **named: rendered.append(given) or template(*given, **named)
    )
    for _ in range(8):
        r.start(user(TEXTS[0]))
    assert len(rendered) == 1


def test_each_answer_is_searched_for_thoughts_only_once() -> None:
    r = renderer()
    context = make_context(r, ContextSettings())
    read: list[Any] = []
    known: dict[Any, Any] = {}

    def decode(ids: Any, **named: Any) -> str:
        read.append(ids)
        return r.tokenizer.decode(ids, **named)

    context.observe(user("Nothing happens."))
    counts = []
    for _ in range(6):
        context.act(answer(r, "<think>hm</think>go to fridge 1", closed=True))
        context.observe(user("Nothing happens."))
        history = list(context.segments()[-1])
        assert strip_thinking(history, decode, known)[1].message["content"] == "go to fridge 1"
        counts.append(len(read))
    assert counts[0] > 0
    assert counts == [counts[0] * turns for turns in range(1, 7)]


def test_an_empty_observation_continues_a_truncated_answer_and_is_refused_otherwise() -> None:
    r = renderer()
    context = make_context(r, ContextSettings())
    with pytest.raises(ValueError, match="said nothing"):
        context.observe(())
    context.observe(user(TEXTS[0]))
    opening = context.prompt().tolist()
    cut = answer(r, "go to", closed=False)
    context.act(cut)
    context.observe(())
    assert context.prompt().tolist() == [*opening, *cut.tokens.tolist()]
    context.act(answer(r, " fridge 1", closed=True))
    with pytest.raises(ValueError, match="said nothing"):
        context.observe(())
