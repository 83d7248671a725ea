"""Tests of tools in chat templates, some written here and some of real models: tools are shown, calls and results are
rendered and read back, and the trained tokens are exactly the sampled ones."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import ContextSettings
from gleanrl.learners.tiny import build_tokenizer, texts_of
from gleanrl.protocols import Completion
from gleanrl.rollout.context import make_context
from gleanrl.rollout.renderer import Renderer
from gleanrl.rollout.tool_calls import ToolsUnknown
from gleanrl.types import Message, segment_arrays
from gleanrl.utils.errors import UserError
from tests.strategies import examples

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
TOOLS = (ADD,)
USER = Message(role="user", content="add: 3, 4")


def asks(*calls: dict[str, Any], content: str = "", first: int = 0) -> Message:
    entries = [
        {"id": f"call{first + i:05d}", "type": "function", "function": {"name": "add", "arguments": given}}
        for i, given in enumerate(calls)
    ]
    return Message(role="assistant", content=content, tool_calls=entries)


def result(text: str, number: int = 0) -> Message:
    return Message(role="tool", content=text, tool_call_id=f"call{number:05d}", name="add")


ANSWER = Message(role="assistant", content="7")
CONVERSATION = [USER, asks({"a": 3, "b": 4}), result("7"), ANSWER]

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
STRICT = (  # raises for a result without a call before it
    "{% set ns = namespace(called=false) %}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' and not ns.called %}{{ raise_exception('no call before this result') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% if m.tool_calls %}{% set ns.called = true %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WHOLE = (  # raises for a conversation that ends with a result and has no generation prompt
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' and loop.last and not add_generation_prompt %}{{ raise_exception('and then?') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLLM3 = (  # in short: calls of messages are left out, and results are messages of the user
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% set begin = '<|im_start|>assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n') %}"
    "<|im_start|>system\n{% if tools %}<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    "tags.{% endif %}<|im_end|>\n{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ begin + m.content.lstrip('\n') + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ begin }}{% endif %}"
)
DOCUMENTS = "{% for d in documents or [] %}<|im_start|>system\n{{ d.text }}<|im_end|>\n{% endfor %}" + STRICT
OWN = {"own": None, "mistral": MISTRAL, "strict": STRICT, "whole": WHOLE}
REAL = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_nothink", "llama3_1", "llama3_2")
THINKING = ("qwen3_5_think", "qwen3_6", "qwen3_8")  # their generation prompts open a thought
GEMMA = ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma")
_MARKS = re.compile(r'<\|\w+\|>|<\|\w+>|<\w+\|>|<\|"\|>|\[/?[A-Z_]+\]|</?tool_\w+>|</?think>')


# Characters that the tokenizer has to know.
FURTHER = "True or False, I think; the quick brown fox jumps over lazy dogs; <f=x></f_y> {[2.5, 'x\"]}+"


def real_template(name: str) -> str:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl, which carries models' chat templates, is not installed")
    path = Path(found.origin).parent / "chat_templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"this trl has no template {name}")
    return path.read_text()


@lru_cache
def tokenizer(template: str) -> Any:
    texts = [*texts_of(CONVERSATION, TOOLS), "add: 3, 4", "Error: argument b is missing", FURTHER]
    made = build_tokenizer(texts * 5, 512)
    known = {**OWN, "smollm3": SMOLLM3, "documents": DOCUMENTS}
    text = known[template] if template in known else real_template(template)
    if text is not None:
        found = sorted(set(_MARKS.findall(text)))
        special = [mark for mark in found if mark.startswith(("<|", "["))]
        made.add_special_tokens({"extra_special_tokens": [*made.extra_special_tokens, *special]})
        made.add_tokens([mark for mark in found if mark not in special])
        made.chat_template = text
    return made


@lru_cache
def renderer(template: str = "own") -> Renderer:
    return Renderer(tokenizer(template), TOOLS)


def shown(
    template: str, messages: list[Message], *, tools: Any = TOOLS, generate: bool = True, **options: Any
) -> list[int]:
    return tokenizer(template).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=generate, tools=list(tools), **options
    )["input_ids"]


def completion(ids: list[int], version: int = 0) -> Completion:
    rng = np.random.default_rng(len(ids))
    return Completion(np.array(ids, np.int32), -rng.random(len(ids)).astype(np.float32), version, "stop")


JSON = '{"name": "add", "arguments": {"a": 3, "b": 4}}'
TAGS = "<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n</function>"
PAIRS = "<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n<arg_value>4</arg_value>"
HARMONY = "<|end|><|start|>assistant"
# What the models sample: the beginning and the end of a thought, a call of `add`, its last token, that of an answer.
SAMPLED = {
    "qwen3": ("<think>\n", "\n</think>\n\n", f"<tool_call>\n{JSON}\n</tool_call>", "<|im_end|>", "<|im_end|>"),
    **dict.fromkeys(THINKING, ("", "\n</think>\n\n", f"<tool_call>\n{TAGS}\n</tool_call>", "<|im_end|>", "<|im_end|>")),
    "glm4moe": ("\n<think>", "</think>\n", f"<tool_call>add\n{PAIRS}\n</tool_call>", "<|observation|>", "<|user|>"),
    "gptoss": (
        "<|channel|>analysis<|message|>",
        HARMONY,
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 3, "b": 4}',
        "<|call|>",
        "<|return|>",
    ),
    **dict.fromkeys(
        GEMMA,
        (
            "<|channel>thought\n",
            "\n<channel|>",
            "<|tool_call>call:add{a:3,b:4}<tool_call|>",
            "<|tool_response>",
            "<turn|>",
        ),
    ),
    "smollm3": ("<think>\n", "\n</think>\n", f"<tool_call>\n{JSON}\n</tool_call>", "<|im_end|>", "<|im_end|>"),
}
FINAL = {"gptoss": "<|channel|>final<|message|>"}


@pytest.mark.parametrize("template", SAMPLED)
def test_a_reasoning_model_calls_a_tool_and_answers(template: str) -> None:
    """The thought is a field of the message. The prompts equal those of transformers while the template shows the
    thought, every prompt extends the tokens sampled so far, and all stop tokens are known."""
    begin, close, call, end_of_call, end = SAMPLED[template]
    made, final = tokenizer(template), FINAL.get(template, "")
    context = make_context(Renderer(made), ContextSettings())
    context.observe((USER,), TOOLS)
    assert context.prompt().tolist() == shown(template, [USER])
    calling = {**CONVERSATION[1], "reasoning_content": "so", "thinking": "so"}
    texts = (
        (f"{begin}so{close}{call}", end_of_call, CONVERSATION[1], result("7")),
        (f"{begin}so{close}{final}7", end, ANSWER, USER),
        (f"{begin}so, {call}{close}{final}7", end, ANSWER, USER),  # a call in a thought
        (f"{begin}so, {call}", end, {**ANSWER, "content": ""}, USER),  # a call in a thought that is not closed
    )
    for number, (text, stop, message, following) in enumerate(texts):
        sampled = made(text + stop, add_special_tokens=False)["input_ids"]
        assert sampled[-1] in context.stop_tokens
        before = context.prompt().tolist()
        said = context.act(completion(sampled))
        assert said.pop("reasoning_content").strip("\n").startswith("so")
        assert {**said, "content": said["content"].strip("\n")} == message
        context.observe((following,))
        assert context.prompt().tolist()[: len(before) + len(sampled)] == before + sampled
        if not number and template != "smollm3":
            assert context.prompt().tolist() == shown(template, [USER, calling, result("7")])
    (segment,) = context.segments()
    tokens, mask, _ = segment_arrays(segment)
    assert made.decode(tokens[mask].tolist()) == "".join(text + stop for text, stop, *_ in texts)


@pytest.mark.parametrize(
    ("template", "options", "thinks"),
    [
        *((name, {"enable_thinking": False}, False) for name in ("qwen3", *THINKING, "glm4moe", "smollm3")),
        *((name, {"enable_thinking": True}, True) for name in ("qwen3_5_nothink", "gemma4_v5")),
        ("qwen3_8", {"reasoning_effort": "low"}, True),
        ("gptoss", {"reasoning_effort": "high"}, True),
        ("documents", {"documents": [{"title": "fox", "text": "the quick brown fox"}]}, False),
    ],
)
def test_every_prompt_of_an_episode_has_the_options_of_the_template(template: str, options: Any, thinks: bool) -> None:
    """The first prompt equals that of transformers, and so does what follows each sampled turn. A demonstration of the
    same turns has the same tokens."""
    family = {"qwen3_5_nothink": "qwen3_5_think", "documents": "own"}.get(template, template)
    begin, close, call, end_of_call, end = SAMPLED.get(
        family, ("", "", f"<tool_call>{JSON}</tool_call>", "<|im_end|>", "<|im_end|>")
    )
    thought = {"reasoning_content": "so", "thinking": "so"} if thinks else {}
    texts = [f"{begin}so{close}"] * 2 if thinks else ["", ""]
    made = tokenizer(template)
    plain = Renderer(made, template_options=options)
    context = make_context(plain, ContextSettings())
    context.observe((USER,), TOOLS)
    assert context.prompt().tolist() == shown(template, [USER], **options) != shown(template, [USER])
    said: list[Message] = []
    messages = [USER]
    for text, answer, following in (
        (texts[0] + call + end_of_call, CONVERSATION[1], result("7")),
        (texts[1] + FINAL.get(template, "") + "7" + end, ANSWER, USER),
    ):
        sampled = made(text, add_special_tokens=False)["input_ids"]
        before = [*context.prompt().tolist(), *sampled]
        said.append(context.act(completion(sampled)))
        assert said[-1].get("reasoning_content", "").strip("\n") == ("so" if thinks else "")
        assert said[-1].get("tool_calls") == answer.get("tool_calls")
        context.observe((following,))
        prompt = context.prompt().tolist()
        assert prompt[: len(before)] == before
        messages += [{**answer, **thought}, following]
        whole = shown(template, messages, **options)
        assert whole[len(before) - len(prompt) :] == prompt[len(before) :]
    (segment,) = context.segments()
    demonstrated = plain.with_tools(TOOLS).demonstration([USER, said[0], result("7"), said[1]])
    assert segment_arrays(demonstrated)[0].tolist() == segment_arrays(segment[:-1])[0].tolist()


@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("qwen3", {"enable_thinkin": False}),
        ("smollm3", {"reasoning_effort": "high"}),
        ("qwen2_5", {"enable_thinking": False}),  # the template has no such switch
        ("gptoss", {"thinking": True}),  # only a field of messages has this name
        ("qwen3", {"tools": [ADD]}),
        ("qwen3", {"enable_thinking": "False"}),  # a text is true
    ],
)
def test_options_without_effect_are_refused(template: str, options: Any) -> None:
    with pytest.raises(UserError, match=rf"context\.template_options\.{next(iter(options))}"):
        Renderer(tokenizer(template), template_options=options)


TYPED: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "number"}, "d": {"type": "boolean"},
                "e": {"type": "array"}, "f": {"type": "object"},
            },
            "required": [],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("template", [*SAMPLED, *REAL, "gemma4_v2"])
def test_arguments_of_calls_keep_their_types(template: str) -> None:
    r = Renderer(tokenizer(template), (TYPED,))
    given = {"a": 3, "b": "4", "c": 2.5, "d": True, "e": [1, "x: {2}, 3"], "f": {"a": [{"b": "3"}], "b": False}}
    for thought in ({}, {"reasoning_content": "so"}):
        said = r.parse(r.spoken({**asks(given), **thought}))
        assert said.pop("reasoning_content", "so").strip("\n") == "so" or not thought
        assert said == asks(given)


@pytest.mark.parametrize("template", GEMMA)
def test_arguments_may_be_null(template: str) -> None:
    r = Renderer(tokenizer(template), (TYPED,))
    call = asks({"a": None, "e": [None, {"a": None}, "None"]})
    assert r.parse(r.spoken(call)) == call


def test_calls_that_a_template_leaves_out_are_refused() -> None:
    """The template of gpt-oss renders only the first call of a turn, so a demonstration would lose the others."""
    with pytest.raises(UserError):
        renderer("gptoss").spoken(asks({"a": 3, "b": 4}, {"a": 1, "b": 2}))


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "gptoss", "gemma4_v5"])
def test_a_turn_that_continues_a_cut_off_turn_begins_where_that_one_ended(template: str) -> None:
    """In a thought or after it: a call in a thought that was cut off is ignored, and a call after it is carried out."""
    begin, close, call, end_of_call, _ = SAMPLED[template]
    made = tokenizer(template)
    for texts, has_calls in (
        ((f"{begin}so", f" maybe {call}"), False),
        ((f"{begin}so", " maybe", f"{close}{call}{end_of_call}"), True),
        ((f"{begin}so{close}", f"{call}{end_of_call}"), True),
    ):
        context = make_context(Renderer(made), ContextSettings())
        messages, tools = (USER,), TOOLS
        for text in texts:
            context.observe(messages, tools)
            context.prompt()
            said = context.act(completion(made(text, add_special_tokens=False)["input_ids"]))
            messages, tools = (), ()
        assert said.get("tool_calls") == (CONVERSATION[1]["tool_calls"] if has_calls else None)


def test_a_closing_tag_in_the_arguments_of_a_call_ends_no_thought() -> None:
    """Neither in a later prompt without thoughts, nor in a demonstration after a prompt that opens a thought."""
    call = asks({"a": "</think>", "b": 4})
    context = make_context(Renderer(tokenizer("qwen3")), ContextSettings(policy="strip_thinking"))
    context.observe((USER,), TOOLS)
    before, sampled = context.prompt().tolist(), renderer("qwen3").spoken(call).tolist()
    assert context.act(completion(sampled)) == call
    context.observe((result("7"),))
    assert context.prompt().tolist()[: len(before) + len(sampled)] == before + sampled
    thinking = Renderer(tokenizer("qwen3_5_think"), (TYPED,))
    call = asks({"b": "</think>"})
    said = thinking.parse(thinking.spoken(call))
    assert not said.pop("reasoning_content").strip()
    assert said == call


def test_gpt_oss_names_the_recipient_before_or_after_the_channel() -> None:
    """A text to the user between thoughts is content; a call that is cut off is answered like any other mistake."""
    r = renderer("gptoss")
    for header in (
        " to=functions.add<|channel|>commentary json",
        "<|channel|>commentary to=functions.add <|constrain|>json",
    ):
        for body, arguments in (('{"a": 3}', {"a": 3}), ('{"a": 3', '{"a": 3')):
            text = (
                f"<|channel|>commentary<|message|>I add.{HARMONY}<|channel|>analysis<|message|>so{HARMONY}"
                f"{header}<|message|>{body}"
            )
            ids = r.tokenizer(text, add_special_tokens=False)["input_ids"]
            right = {**asks(arguments, content="I add."), "reasoning_content": "so"}
            assert r.parse(np.array([*ids, r.end_of_calls], np.int32)) == right
    without = Renderer(tokenizer("gptoss"))
    assert without.parse(without.spoken("7")) == ANSWER
    ids = without.tokenizer("<|channel|>analysis<|message|>so", add_special_tokens=False)["input_ids"]
    assert without.parse(np.array(ids, np.int32)) == {"role": "assistant", "content": "", "reasoning_content": "so"}


def test_llama_may_end_a_call_with_a_token_that_its_template_does_not_write() -> None:
    made = copy.deepcopy(tokenizer("llama3_1"))
    made.add_special_tokens({"extra_special_tokens": [*made.extra_special_tokens, "<|eom_id|>"]})
    context = make_context(Renderer(made), ContextSettings())
    context.observe((USER,), TOOLS)
    text = '<|python_tag|>{"name": "add", "parameters": {"a": 3, "b": 4}}<|eom_id|>'
    sampled = made(text, add_special_tokens=False)["input_ids"]
    assert sampled[-1] in context.stop_tokens
    assert context.act(completion(sampled)) == CONVERSATION[1]
    context.observe((result("7"),))
    assert made.decode(context.prompt().tolist()).count("<|eot_id|>") == 3  # of the system, the user and the result


@pytest.mark.parametrize(
    ("template", "thoughts"),
    [*((name, count * ("",)) for name in ("qwen3", "gptoss", "gemma4_v5") for count in (1, 2)), ("qwen3", ("", "3"))],
)
def test_all_thoughts_of_a_turn_are_stripped_from_later_prompts(template: str, thoughts: tuple[str, ...]) -> None:
    """Each entry of ``thoughts`` is the text before a thought."""
    begin, close, _, _, end = SAMPLED[template]
    made, final = tokenizer(template), FINAL.get(template, "")
    context = make_context(Renderer(made), ContextSettings(policy="strip_thinking"))
    context.observe((USER,))
    text = "".join(f"{before}{begin}so{close}" for before in thoughts)
    context.act(completion(made(f"{text}{final}7{end}", add_special_tokens=False)["input_ids"]))
    context.observe((USER,))
    expected = made.decode(shown(template, [USER, ANSWER, USER], tools=()))
    assert made.decode(context.prompt().tolist()) == expected.replace("7<|end|>", "7<|return|>")


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think"])
def test_a_thought_of_several_turns_is_stripped_from_later_prompts(template: str) -> None:
    """The first of them is cut off, and the next one continues it."""
    begin, close, _, _, end = SAMPLED[template]
    made = tokenizer(template)
    context = make_context(Renderer(made), ContextSettings(policy="strip_thinking"))
    messages: tuple[Message, ...] = (USER,)
    for text in (f"{begin}so", " maybe", f"{close}7{end}"):
        context.observe(messages)
        context.prompt()
        context.act(completion(made(text, add_special_tokens=False)["input_ids"]))
        messages = ()
    context.observe((USER,))
    assert made.decode(context.prompt().tolist()) == made.decode(shown(template, [USER, ANSWER, USER], tools=()))


@pytest.mark.parametrize("template", [*OWN, *REAL])
def test_prompts_of_an_episode_with_tools_equal_the_rendered_conversation(template: str) -> None:
    """After an opening with tools, and after a call and its result, the prompt equals the rendering, id for id."""
    r = renderer(template)
    context = make_context(Renderer(tokenizer(template)), ContextSettings())
    context.observe((USER,), TOOLS)
    assert context.prompt().tolist() == shown(template, [USER])
    said = context.act(completion(r.spoken(CONVERSATION[1]).tolist()))
    assert said == CONVERSATION[1]
    context.observe((result("7"),))
    # the template of Mistral moves the tools to the last user message, whereas a context leaves them in their place
    if template != "mistral":
        assert context.prompt().tolist() == shown(template, CONVERSATION[:3])
    assert context.act(completion(r.spoken("7").tolist())) == ANSWER
    (segment,) = context.segments()
    assert [turn.message for turn in segment] == CONVERSATION
    assert context.tools == TOOLS


@pytest.mark.parametrize("template", ["own", "strict", "whole", "qwen2_5", "qwen3", "qwen3_5_nothink"])
def test_a_turn_may_hold_several_calls_and_gets_all_results(template: str) -> None:
    r = renderer(template)
    turns = [USER, asks({"a": 3, "b": 4}, {"a": 1, "b": 2}), result("7"), result("3", 1)]
    context = make_context(r, ContextSettings())
    context.observe((USER,), TOOLS)
    assert context.act(completion(r.spoken(turns[1]).tolist())) == turns[1]
    context.observe(turns[2:])
    assert context.prompt().tolist() == shown(template, turns)
    again = context.act(completion(r.spoken(turns[1]).tolist()))
    assert [call["id"] for call in again["tool_calls"]] == ["call00002", "call00003"]


@pytest.mark.parametrize("template", ["own", "mistral", "strict", *REAL])
def test_a_demonstration_trains_calls_and_answers_only(template: str) -> None:
    tokens, mask, _ = segment_arrays(renderer(template).demonstration(CONVERSATION))
    if template != "mistral" and "qwen3" not in template:  # Qwen 3 shows an empty thought before the last answer
        assert (
            tokens.tolist()[: mask.nonzero()[0][-1] + 1]
            == shown(template, CONVERSATION, generate=False)[: mask.nonzero()[0][-1] + 1]
        )
    trained = tokenizer(template).decode(tokens[mask].tolist())
    assert "add: 3" not in trained
    assert '"result"' not in trained
    ending = tokenizer(template).decode([renderer(template).end_of_turn])
    assert trained.count(ending) == 2
    assert "add" in trained


def with_response_template(template: str) -> Any:
    """Return a tokenizer with the ``response_template`` that trl sets for the chat template."""
    made = copy.copy(tokenizer(template))
    return pytest.importorskip("trl.chat_template_utils").add_response_schema(made)


def read(r: Renderer, text: str) -> Message:
    return r.parse(np.array([*r.tokenizer(text, add_special_tokens=False)["input_ids"], r.end_of_turn], np.int32))


@pytest.mark.parametrize("template", [*THINKING, "qwen3_5_nothink"])
@pytest.mark.parametrize("own", [False, True])
def test_a_response_template_changes_neither_thoughts_nor_types_of_arguments(template: str, own: bool) -> None:
    r = Renderer(with_response_template(template) if own else tokenizer(template), TOOLS)
    call = "<tool_call>\n<function=add>\n<parameter=a>\n9\n</parameter>\n</function>\n</tool_call>"
    for thought in ("so</think>", "<think>so</think>"):
        begins = template in THINKING or thought.startswith("<think>")
        right = {**asks({"a": 9}), "reasoning_content": "so"} if begins else asks({"a": 9}, content=thought)
        assert read(r, f"{thought}\n\n{call}") == right
    cut = f"maybe {call}" if template in THINKING else f"<think>maybe {call}"
    for thought in (f"maybe {call} no</think>7", cut):
        assert "tool_calls" not in read(r, thought)
    assert r.parse(r.spoken(CONVERSATION[1])).get("tool_calls") == CONVERSATION[1].get("tool_calls")


def test_a_response_template_reads_calls_in_a_format_that_no_reader_knows() -> None:
    with pytest.raises(ToolsUnknown, match="cannot be read back"):
        Renderer(tokenizer("lfm2_2_5"), TOOLS)
    r = Renderer(with_response_template("lfm2_2_5"), TOOLS)
    call = "<|tool_call_start|>[add(a=3, b=4)]<|tool_call_end|>"
    assert read(r, call) == CONVERSATION[1]
    assert read(r, f"<think>so</think>{call}") == {**CONVERSATION[1], "reasoning_content": "so"}
    assert read(r, "7") == ANSWER
    for thought in (f"<think>maybe {call}</think>7", f"<think>maybe {call}"):
        assert "tool_calls" not in read(r, thought)


def test_an_answer_may_end_with_the_token_that_begins_the_next_message() -> None:
    """GLM's template writes nothing after an answer. Its models end one with the role of the next message."""
    r, made = renderer("glm4moe"), tokenizer("glm4moe")
    context = make_context(Renderer(made), ContextSettings())
    context.observe((USER,), TOOLS)
    assert context.prompt().tolist() == shown("glm4moe", [USER])
    turns = [USER]
    spoken = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n<arg_value>4"
    for text, end, message, following in (
        (f"{spoken}</arg_value>\n</tool_call>", "<|observation|>", CONVERSATION[1], result("7")),
        ("7", "<|user|>", ANSWER, USER),
        ("7", "", ANSWER, USER),  # truncated
    ):
        sampled = made(f"\n<think></think>\n{text}{end}", add_special_tokens=False)["input_ids"]
        assert not end or sampled[-1] in context.stop_tokens
        said = context.act(completion(sampled))
        assert said.get("tool_calls") == message.get("tool_calls")
        context.observe((following,))
        turns += [message, following]
        assert context.prompt().tolist() == shown("glm4moe", turns)
    tokens, mask, _ = segment_arrays(r.demonstration(CONVERSATION))
    trained = made.decode(tokens[mask].tolist())
    assert [trained.count(end) for end in ("<|observation|>", "<|user|>")] == [1, 1]
    assert trained.endswith("7<|user|>")


def test_a_demonstrated_call_may_have_its_arguments_as_json_text() -> None:
    call = asks({"a": 3, "b": 4})
    call["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": 3, "b": 4})
    assert renderer().spoken(call).tolist() == renderer().spoken(asks({"a": 3, "b": 4})).tolist()


def test_text_next_to_a_call_is_rendered_or_refused_if_the_template_hides_it() -> None:
    call = asks({"a": 3, "b": 4}, content="I add.")
    for template in ("own", "qwen2_5"):
        tokens = renderer(template).spoken(call)
        assert (
            tokens.tolist()
            == shown(template, [USER, call], generate=False)[len(shown(template, [USER])) :][: tokens.size]
        )
        assert renderer(template).parse(tokens) == call
    with pytest.raises(UserError, match="chat template"):
        renderer("llama3_1").spoken(call)


@settings(max_examples=examples(80))
@given(
    policy=st.sampled_from(["linear", "strip_thinking", "window"]),
    template=st.sampled_from(["own", "mistral", "strict"]),
    turns=st.lists(
        st.tuples(
            st.sampled_from(
                ['<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>', "<tool_call>\n{",
                 '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3}}]', "[TOOL_CALLS] [{]",
                 "<think>hm</think><tool_call>\n{}\n</tool_call>", "7", ""]
            ),
            st.booleans(),
            st.sampled_from(["7", "Error: argument b is missing", ""]),
        ),
        max_size=5,
    ),
    window_turns=st.integers(1, 2),
)  # fmt: skip
def test_trained_tokens_are_exactly_the_sampled_ones_for_any_calls(policy, template, turns, window_turns) -> None:
    """With valid, malformed and truncated calls, each sampled turn is trained once, as sampled, after its own prompt.
    A segment only grows, every call gets its result, and the end of the turn comes exactly once before the result."""
    r = renderer(template)
    context = make_context(r, ContextSettings(policy=policy, window_turns=window_turns))
    context.observe((USER,), TOOLS)
    sampled: list[tuple[list[int], Completion]] = []
    for version, (text, closed, answer) in enumerate(turns):
        before = context.segments()[-1]
        ids = [
            *r.tokenizer(text, add_special_tokens=False)["input_ids"],
            *([r.end_of_turn] if closed or not text else []),
        ]
        drawn = completion(ids, version)
        sampled.append((context.prompt().tolist(), drawn))
        message = context.act(drawn)
        calls = message.get("tool_calls", [])
        assert context.segments()[-1][: len(before)] == before
        if policy == "linear":
            assert len(context.segments()) == 1
        context.observe([result(answer, int(c["id"][4:])) for c in calls] or [Message(role="user", content=answer)])
        if policy == "linear":
            tail = context.prompt()[len(sampled[-1][0]) + len(ids) - bool(closed or not text) :]
            assert tail[0] == r.end_of_turn
    trained = []
    for segment in context.segments():
        tokens, _, logprobs = segment_arrays(segment)
        position = 0
        for turn in segment:
            span = slice(position, position := position + turn.tokens.size)
            if turn.sampled:
                trained.append((tokens[: span.start].tolist(), turn, logprobs[span]))
    assert len(trained) == len(sampled)
    for (prompt, drawn), (before, turn, logprobs) in zip(sampled, trained, strict=True):
        assert before == prompt
        np.testing.assert_array_equal(turn.tokens, drawn.tokens)
        np.testing.assert_array_equal(logprobs, drawn.logprobs)
        assert turn.version == drawn.version


def test_without_tools_the_text_of_a_call_stays_content() -> None:
    r = Renderer(tokenizer("own"))
    text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    ids = [*r.tokenizer(text, add_special_tokens=False)["input_ids"], r.end_of_turn]
    assert r.parse(np.array(ids, np.int32)) == {"role": "assistant", "content": text}
    with pytest.raises(UserError, match=r"Taskset\.tools"):
        r.demonstration(CONVERSATION)
    assert r.with_tools(()) is r
    assert r.with_tools(TOOLS) is r.with_tools(list(TOOLS))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}", "shows no tools"),
        (
            "{{ tools | tojson if tools }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}",
            "cannot be read back",
        ),
        (
            "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role != 'tool' %}<|user|>{{ m.content }}"
            "{{ m.tool_calls[0].function | tojson if m.tool_calls }}<|end|>{% endif %}{% endfor %}",
            "shows no results",
        ),
        (
            "{{ tools | tojson if tools }}{% for m in messages %}<|user|>{{ m.content }}"
            "{{ m.tool_calls[0].function | tojson + '!' if m.tool_calls else '<|end|>' }}{% endfor %}",
            "ends a turn with a call otherwise",
        ),
        (
            "{{ tools | tojson if tools }}{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no') }}"
            "{% endif %}<|user|>{{ m.content }}<|end|>{% endfor %}",
            "refuses tool calls",
        ),
    ],
)
def test_a_template_that_cannot_handle_tools_raises_a_one_line_error(template: str, why: str) -> None:
    made = build_tokenizer(["add"] * 3, 256)
    made.chat_template = template
    with pytest.raises(ToolsUnknown, match=why) as caught:
        Renderer(made, TOOLS)
    assert "\n" not in str(caught.value)
    assert "chat template" in str(caught.value)


def test_thinking_is_stripped_from_a_message_with_calls() -> None:
    context = make_context(renderer(), ContextSettings(policy="strip_thinking"))
    context.observe((USER,), TOOLS)
    text = '<think>why</think>\n<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    ids = [*renderer().tokenizer(text, add_special_tokens=False)["input_ids"], renderer().end_of_turn]
    said = context.act(completion(ids))
    assert said == {**asks({"a": 3, "b": 4}), "reasoning_content": "why"}
    context.observe((result("7"),))
    kept = context.segments()[-1][1 + (context.segments()[-1][0].message["role"] == "system")].message
    assert kept == asks({"a": 3, "b": 4})
