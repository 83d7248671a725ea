"""How a conversation becomes tokens.

A `Renderer` turns messages into token ids with the model's own chat template. A `Context` holds one
episode. Every context policy is the same mechanism with another *view*: a pure function from the
turns as they happened to the turns that the model should see next. While the view extends the tokens
already held, the segment goes on; when it does not (old thinking removed, a window clipped), a new
segment starts in which everything shown is context. So each sampled turn stands in exactly one
segment as sampled, and masks follow from the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from gleanrl.config.settings import ContextSettings
from gleanrl.protocols import Completion
from gleanrl.rollout.encoding import Encoder, remembered
from gleanrl.rollout.thinking import CLOSE, answer_of, behind_opening, opening_of
from gleanrl.rollout.tool_calls import Tools, call_message, for_template
from gleanrl.rollout.tool_templates import MARK, CallTemplate, ToolsUnknown, common_length
from gleanrl.types import IntArray, Message, Segment, Turn
from gleanrl.utils.errors import UserError

__all__ = ["Context", "Renderer", "Tokenizer", "ToolsUnknown", "make_context", "strip_thinking", "window"]


class Tokenizer(Protocol):
    """What is used of a Hugging Face fast tokenizer."""

    chat_template: Any

    def __call__(self, text: str, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def decode(self, token_ids: Any, **options: Any) -> Any: ...


class Renderer:
    """Messages to token ids and back, by the tokenizer's chat template.

    ``start`` gives the tokens of a new conversation, ``extend`` those that messages add after an
    assistant turn; both end with the generation prompt, so that sampling can follow at once. The
    text of a sampled turn is never tokenised again: ``extend`` renders around a placeholder.

    ``tools`` are what the model may call, as OpenAI function schemas: the template shows them in the
    opening, and ``parse`` reads calls out of what was sampled.

    Raises:
        UserError: the tokenizer has no chat template, or the template does not close an assistant
            turn with a token at which sampling can stop.
        ToolsUnknown: there are tools, and the template has no place for them, for a call or for a result.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Tools = ()) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template; set tokenizer.chat_template and save it with the model"
            )
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        self._calls: CallTemplate | None = None
        self._encoder = Encoder(tokenizer)
        prompt = self._template([Message(role="user", content=".")], generate=True)
        self._thought = opening_of(prompt)
        self.opened_thought = self._encoder.pieces(prompt, [len(prompt) - len(self._thought)])[1]
        """int32[n]: what opens a thought at the end of the generation prompt; nothing where the model opens it."""
        closing = self._text_after_mark([], generate=False)
        ids = self._encoder.ids(closing)
        if not ids.size:
            raise UserError("the chat template does not end an assistant turn with a token; sampling could not stop")
        self.end_of_turn = int(ids[0])
        further = _as_ids(getattr(tokenizer, "eos_token_id", None))
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys([self.end_of_turn, *further]))
        # observations repeat by the thousand ("Nothing happens."), and so do openings within a group
        self._opening, self._extension = remembered(self._render_opening), remembered(self._render_extension)
        self._others = lru_cache(maxsize=64)(self._with_tools)
        if tools:
            own = getattr(tokenizer, "response_template", None) and getattr(tokenizer, "parse_response", None)
            self._calls = CallTemplate(self._template, closing, self.tools, own, thinking=bool(self._thought))

    def with_tools(self, tools: Tools) -> Renderer:
        """The renderer of conversations with these tools; the same one each time. Raises `ToolsUnknown`."""
        return self._others(json.dumps(list(tools))) if list(tools) != list(self.tools) else self

    def start(self, messages: Sequence[Message]) -> list[Turn]:
        """Context turns of a new conversation, one a message; int32 tokens, generation prompt last."""
        return _turns(messages, self._opening(messages))

    def extend(self, messages: Sequence[Message], *, closed: bool) -> list[Turn]:
        """Context turns that follow an assistant turn. ``closed``: it already holds the end-of-turn token."""
        return _turns(messages, self._extension(messages, closed))

    def parse(self, tokens: IntArray, calls: int = 0) -> Message:
        """The message of a sampled turn. With tools, its calls are numbered from ``calls``, and its content is the
        text around them; a call that cannot be read has its text for arguments. A call in a thought is none.

        A thought that the generation prompt opened and that was cut off begins with its ``<think>`` in the content."""
        ids = tokens.tolist()
        while ids and ids[-1] in self.stop_tokens:
            ids.pop()
        plain = self.tokenizer.decode(tokens, skip_special_tokens=True)  # of a list, every item would be looked at
        whole = self.tokenizer.decode(ids, skip_special_tokens=False) if self._calls or self._thought else plain
        if self._thought and CLOSE not in whole:
            plain = self._thought + plain
        around, found = self._calls.reading.read(whole) if self._calls else ("", [])
        if not found:
            return Message(role="assistant", content=plain)
        for special in getattr(self.tokenizer, "all_special_tokens", ()):
            around = around.replace(special, "")
        entries = [call_message(call, calls + i) for i, call in enumerate(found)]
        return Message(role="assistant", content=around.strip(), tool_calls=entries)

    def spoken(self, said: str | Message) -> IntArray:
        """int32[n]: what a model would sample to say a text, or a message with its calls; with the end-of-turn token.
        Where the template opens a thought, it is ended first.

        Raises:
            UserError: the template shows no text beside calls, or there are calls and no tools.
        """
        message = Message(role="assistant", content=said) if isinstance(said, str) else said
        if self._calls is None and message.get("tool_calls"):
            raise UserError("a demonstration calls tools, and its taskset tells of none in `tool_schemas`")
        text = self._calls.spoken(message) if self._calls else message["content"]
        ids = self._encoder.ids(behind_opening(text) if self._thought else text)
        return np.append(ids, np.int32(self.end_of_turn))

    def demonstration(self, messages: Sequence[Message]) -> Segment:
        """A whole conversation as one segment whose assistant turns count as sampled (log-prob 0, version 0).

        For supervised training, where only the mask matters.
        """
        turns: list[Turn] = []
        pending: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                pending.append(message)
                continue
            turns += self.extend(pending, closed=True) if turns else self.start(pending)
            tokens = self.spoken(message)
            turns.append(Turn(message, tokens, np.zeros(tokens.size, np.float32), version=0))
            pending = []
        return tuple(turns)

    def _render_opening(self, messages: Sequence[Message]) -> list[IntArray]:
        text = self._template(messages, generate=True, tools=self.tools)
        show = partial(self._template, generate=False, tools=self.tools)
        return self._encoder.pieces(text, _shared(text, messages, show))

    def _render_extension(self, messages: Sequence[Message], closed: bool) -> list[IntArray]:
        text = self._text_after_mark(messages, generate=True)
        show = partial(self._text_after_mark, generate=False)
        tokens = self._encoder.pieces(text, _shared(text, messages, show))[: len(messages)]
        if closed:  # the end-of-turn token was sampled
            first = next(i for i, own in enumerate(tokens) if own.size)
            tokens[first] = tokens[first][1:]
        return tokens

    def _template(self, messages: Sequence[Message], *, generate: bool, tools: Tools = ()) -> str:
        plain = [for_template(message) for message in messages]
        shown = {"tools": list(tools)} if tools else {}
        return self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate, **shown)

    def _text_after_mark(self, messages: Sequence[Message], *, generate: bool) -> str:
        if self._calls and self._calls.results_need_calls and messages and messages[0]["role"] == "tool":
            return self._calls.after_calls(messages, generate=generate)
        before = [Message(role="user", content="."), Message(role="assistant", content=MARK)]
        text = self._template([*before, *messages], generate=generate)
        return text[text.rindex(MARK) + len(MARK) :]

    def _with_tools(self, key: str) -> Renderer:
        return Renderer(self.tokenizer, json.loads(key))


View = Callable[[Sequence[Turn]], list[Turn]]


class Context:
    """One episode's conversation: what was said, and what the model sees next."""

    def __init__(self, renderer: Renderer, view: View, system_prompt: str | None = None) -> None:
        self._renderer = renderer
        self._view = view
        self._system = [Message(role="system", content=system_prompt)] if system_prompt else []
        self._history: list[Turn] = []
        self._closed_segments: list[Segment] = []
        self._segment: list[Turn] = []
        self._prompt = np.empty(0, np.int32)  # the tokens of the segment's first turns,
        self._joined = 0  # of so many
        self._closed = True  # the last sampled turn ended with its end-of-turn token
        self._calls = 0

    @property
    def tools(self) -> Tools:
        """What the opening showed."""
        return self._renderer.tools

    def observe(self, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Add what the environment said. ``tools``: what the model may call, which the opening shows; later ignored.

        Raises `ToolsUnknown` where the chat template has no place for them.
        """
        if not self._history:
            self._renderer = self._renderer.with_tools(tools)
            messages = [*self._system, *messages]
        if not messages and self._closed:  # else the answer that was cut off goes on
            raise ValueError("the environment said nothing, and the episode goes on")
        if self._history:
            self._history += self._renderer.extend(messages, closed=self._closed)
        else:
            self._history += self._renderer.start(messages)
        shown = self._view(self._history)
        held = len(self._segment)
        if _same(shown[:held], self._segment):
            self._segment += shown[held:]
        else:
            self._closed_segments.append(tuple(self._segment))
            self._segment = [_as_context(turn) for turn in shown]
            self._prompt, self._joined = np.empty(0, np.int32), 0

    def prompt(self) -> IntArray:
        """int32[n]: everything that the model sees, ending with the generation prompt."""
        new = [turn.tokens for turn in self._segment[self._joined :]]
        self._prompt, self._joined = np.concatenate([self._prompt, *new]), len(self._segment)
        return self._prompt.copy()  # samplers may do with theirs as they like

    def act(self, completion: Completion) -> Message:
        """Add what was sampled; returns its message."""
        message = self._renderer.parse(completion.tokens, self._calls)
        self._calls += len(message.get("tool_calls", ()))
        turn = Turn(message, completion.tokens, completion.logprobs, completion.version)
        self._closed = completion.tokens.size > 0 and int(completion.tokens[-1]) == self._renderer.end_of_turn
        self._history.append(turn)
        self._segment.append(turn)
        return message

    def segments(self) -> tuple[Segment, ...]:
        return (*self._closed_segments, tuple(self._segment)) if self._segment else ()


def make_context(renderer: Renderer, settings: ContextSettings) -> Context:
    views: dict[str, View] = {
        "linear": list,
        "strip_thinking": partial(
            strip_thinking, decode=renderer.tokenizer.decode, known={}, opened=renderer.opened_thought
        ),
        "window": partial(window, keep=settings.window_turns),
    }
    return Context(renderer, views[settings.policy], settings.system_prompt)


# --- views: pure functions from what happened to what is shown -------------------------------------
def window(history: Sequence[Turn], keep: int) -> list[Turn]:
    """The opening, then the last ``keep`` exchanges (an answer and the observation after it)."""
    first = next((i for i, turn in enumerate(history) if turn.sampled), len(history))
    exchanges = [i for i, turn in enumerate(history) if turn.sampled]
    if len(exchanges) <= keep:
        return list(history)
    return [*history[:first], *history[exchanges[-keep] :]]


def strip_thinking(
    history: Sequence[Turn],
    decode: Callable[..., str],
    known: dict[int, tuple[Turn, Turn]] | None = None,
    opened: IntArray | Sequence[int] = (),
) -> list[Turn]:
    """Answers without their ``<think>...</think>``, as reasoning models expect earlier answers.

    ``known`` remembers, by identity, what became of a turn: each is read once in an episode. ``opened``: the tokens
    with which the generation prompt opens a thought, which then goes too.
    """
    known = {} if known is None else known
    for turn in history:
        if turn.sampled and id(turn) not in known:
            known[id(turn)] = (turn, _without_thinking(turn, decode))  # held too: a turn that is gone leaves its id
    shown = [known[id(turn)][1] if turn.sampled else turn for turn in history]
    for at, turn in enumerate(history):
        if at and len(opened) and shown[at] is not turn and not (before := history[at - 1]).sampled:
            rest, end = np.split(before.tokens, [-len(opened)])
            shown[at - 1] = Turn(before.message, rest) if np.array_equal(end, opened) else before
    return shown


def _without_thinking(turn: Turn, decode: Callable[..., str]) -> Turn:
    if CLOSE not in decode(turn.tokens.tolist()):
        return turn
    ids = turn.tokens.tolist()
    # the shortest prefix that holds the whole closing tag; by ids, so that the rest stays as sampled
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if CLOSE in decode(ids[:middle]) else (middle + 1, high)
    rest = turn.tokens[low:]
    text = decode(rest.tolist(), skip_special_tokens=True).lstrip("\n")
    if "tool_calls" in turn.message:  # they are no part of the content
        text = answer_of(turn.message["content"]).lstrip("\n")
    return Turn({**turn.message, "content": text}, rest)


def _as_context(turn: Turn) -> Turn:
    return Turn(turn.message, turn.tokens) if turn.sampled else turn


def _same(shown: Sequence[Turn], held: Sequence[Turn]) -> bool:
    return len(shown) == len(held) and all(
        a is b or np.array_equal(a.tokens, b.tokens) for a, b in zip(shown, held, strict=True)
    )


def _turns(messages: Sequence[Message], tokens: Sequence[IntArray]) -> list[Turn]:
    return [Turn(message, ids) for message, ids in zip(messages, tokens, strict=True)]


def _shared(text: str, messages: Sequence[Message], show: Callable[[Sequence[Message]], str]) -> list[int]:
    """How much of ``text`` each message but the last ends at, as far as the template says."""
    lengths = []
    for count in range(1, len(messages)):
        try:
            lengths.append(common_length(text, show(messages[:count])))
        except Exception:  # a template may not take the beginning of an opening alone
            lengths.append(0)
    return lengths


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
