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

from gleanrl.errors import UserError
from gleanrl.protocols import Completion
from gleanrl.settings import ContextSettings
from gleanrl.types import IntArray, Message, Segment, Turn

_MARK = "gleanmark"  # stands for an assistant's text while the template around it is read


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

    Raises:
        UserError: the tokenizer has no chat template, or the template does not close an assistant
            turn with a token at which sampling can stop.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template; set tokenizer.chat_template and save it with the model"
            )
        self.tokenizer = tokenizer
        closing = self._text_after_mark([], generate=False)
        ids, _ = self._encode(closing)
        if not ids:
            raise UserError("the chat template does not end an assistant turn with a token; sampling could not stop")
        self.end_of_turn: int = ids[0]
        further = _as_ids(getattr(tokenizer, "eos_token_id", None))
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys([self.end_of_turn, *further]))
        # observations repeat by the thousand ("Nothing happens."), templates cost 0.1 ms each
        self._extension = lru_cache(maxsize=1 << 14)(self._render_extension)

    def start(self, messages: Sequence[Message]) -> list[Turn]:
        """Context turns of a new conversation, one a message; int32 tokens, generation prompt last."""
        text = self._template(messages, generate=True)
        ends = [self._template(messages[: i + 1], generate=False) for i in range(len(messages) - 1)]
        lengths = [len(end) if text.startswith(end) else 0 for end in ends]
        return self._turns(messages, text, lengths)

    def extend(self, messages: Sequence[Message], *, closed: bool) -> list[Turn]:
        """Context turns that follow an assistant turn. ``closed``: it already holds the end-of-turn token."""
        key = json.dumps(list(messages))
        tokens = self._extension(key, closed)
        return [Turn(message, ids) for message, ids in zip(messages, tokens, strict=True)]

    def parse(self, tokens: IntArray) -> Message:
        """The message of a sampled turn."""
        return Message(role="assistant", content=self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def spoken(self, text: str) -> IntArray:
        """int32[n]: what a model would sample to say ``text``, the end-of-turn token included."""
        ids, _ = self._encode(text)
        return np.array([*ids, self.end_of_turn], np.int32)

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
            tokens = self.spoken(message["content"])
            turns.append(Turn(message, tokens, np.zeros(tokens.size, np.float32), version=0))
            pending = []
        return tuple(turns)

    def _render_extension(self, key: str, closed: bool) -> list[IntArray]:
        messages: list[Message] = json.loads(key)
        text = self._text_after_mark(messages, generate=True)
        ends = [self._text_after_mark(messages[: i + 1], generate=False) for i in range(len(messages) - 1)]
        turns = self._turns(messages, text, [len(end) if text.startswith(end) else 0 for end in ends])
        tokens = [turn.tokens for turn in turns]
        if closed:
            tokens[0] = tokens[0][1:]  # the end-of-turn token was sampled
        return tokens

    def _template(self, messages: Sequence[Message], *, generate: bool) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generate)

    def _text_after_mark(self, messages: Sequence[Message], *, generate: bool) -> str:
        before = [Message(role="user", content="."), Message(role="assistant", content=_MARK)]
        text = self._template([*before, *messages], generate=generate)
        return text[text.rindex(_MARK) + len(_MARK) :]

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _turns(self, messages: Sequence[Message], text: str, lengths: Sequence[int]) -> list[Turn]:
        """Cut the tokens of ``text`` where each message's text ends; a token belongs where it starts."""
        ids, offsets = self._encode(text)
        starts = [start for start, _ in offsets]
        cuts = [0]
        for length in lengths:
            cuts.append(max(cuts[-1], int(np.searchsorted(starts, length))))
        cuts.append(len(ids))
        return [
            Turn(message, np.array(ids[a:b], np.int32)) for message, a, b in zip(messages, cuts, cuts[1:], strict=False)
        ]


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
        self._closed = True  # the last sampled turn ended with its end-of-turn token

    def observe(self, messages: Sequence[Message]) -> None:
        """Add what the environment said."""
        if self._history:
            new = self._renderer.extend(messages, closed=self._closed)
        else:
            new = self._renderer.start([*self._system, *messages])
        self._history += new
        shown = self._view(self._history)
        held = len(self._segment)
        if _same(shown[:held], self._segment):
            self._segment += shown[held:]
        else:
            self._closed_segments.append(tuple(self._segment))
            self._segment = [_as_context(turn) for turn in shown]

    def prompt(self) -> IntArray:
        """int32[n]: everything that the model sees, ending with the generation prompt."""
        return np.concatenate([turn.tokens for turn in self._segment])

    def act(self, completion: Completion) -> Message:
        """Add what was sampled; returns its message."""
        message = self._renderer.parse(completion.tokens)
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
        "strip_thinking": partial(strip_thinking, decode=renderer.tokenizer.decode),
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


def strip_thinking(history: Sequence[Turn], decode: Callable[..., str]) -> list[Turn]:
    """Answers without their ``<think>...</think>``, as reasoning models expect earlier answers."""
    return [_without_thinking(turn, decode) if turn.sampled else turn for turn in history]


def _without_thinking(turn: Turn, decode: Callable[..., str]) -> Turn:
    if "</think>" not in decode(turn.tokens.tolist()):
        return turn
    ids = turn.tokens.tolist()
    # the shortest prefix that holds the whole closing tag; by ids, so that the rest stays as sampled
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if "</think>" in decode(ids[:middle]) else (middle + 1, high)
    rest = turn.tokens[low:]
    text = decode(rest.tolist(), skip_special_tokens=True).lstrip("\n")
    return Turn(Message(role="assistant", content=text), rest)


def _as_context(turn: Turn) -> Turn:
    return Turn(turn.message, turn.tokens) if turn.sampled else turn


def _same(shown: Sequence[Turn], held: Sequence[Turn]) -> bool:
    return len(shown) == len(held) and all(
        a is b or np.array_equal(a.tokens, b.tokens) for a, b in zip(shown, held, strict=True)
    )


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
