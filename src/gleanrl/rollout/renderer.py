"""Turns messages into token ids, and sampled token ids back into a message, with the model's own chat template.

A `Renderer` belongs to a tokenizer and a list of tools. `Context` calls it for each turn of an episode; supervised
training calls `Renderer.demonstration`. Text that was sampled is never tokenised again: to get the tokens that follow
an answer, the template is rendered with a placeholder in place of the answer.

    renderer = Renderer(AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B"))
    opening = renderer.start([{"role": "user", "content": "What is 2 + 2?"}])  # context turns, generation prompt last
    message = renderer.parse(sampled_ids)
    following = renderer.extend([{"role": "user", "content": "And 3 + 3?"}], closed=True)
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import numpy as np

from gleanrl.protocols import Tools
from gleanrl.rollout.thinking import CLOSE, continue_thought, opening_of
from gleanrl.rollout.tool_calls import CallTemplate, call_message, common_length, for_template
from gleanrl.types import IntArray, Message, Segment, Turn
from gleanrl.utils.errors import UserError

T = TypeVar("T")

_MARK = "gleanmark"  # takes the place of an answer's text while the template around it is rendered
_PROBE = "Go, 12 times:\n\n  café → <|unk|>\t{'x': [1]}  "
_SHORT = 1000  # lists of messages up to this many characters go to the larger cache
_SHORT_CACHED, _LONG_CACHED = 1 << 14, 1 << 8  # cache entries; few for long messages, which could fill the memory


class Tokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that a renderer uses."""

    chat_template: Any

    def __call__(self, text: str, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def decode(self, token_ids: Any, **options: Any) -> Any: ...


class Renderer:
    """Renders conversations to token ids, and parses sampled token ids into messages.

    ``start`` returns the tokens of a new conversation. ``extend`` returns the tokens that messages add after an
    assistant turn. Both end with the generation prompt, so that sampling can follow at once.

    Args:
        tokenizer: a Hugging Face fast tokenizer with a chat template.
        tools: OpenAI function schemas of what the model may call. ``start`` shows them to the model, and ``parse``
            reads calls out of what was sampled.

    Raises:
        UserError: the tokenizer has no chat template, or the template does not close an assistant turn with a token at
            which sampling can stop.
        ToolsUnknown: ``tools`` is not empty, and the template has no place for tools, for a call or for a result.
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
        """int32[n]: tokens with which the generation prompt opens a thought; empty if it opens none."""
        closing = self._text_after_answer([], generate=False)
        ids = self._encoder.ids(closing)
        if not ids.size:
            raise UserError("the chat template does not end an assistant turn with a token; sampling could not stop")
        self.end_of_turn = int(ids[0])
        eos = getattr(tokenizer, "eos_token_id", None)
        eos = [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [eos]
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys([self.end_of_turn, *eos]))
        # Cached because observations ("Nothing happens.") repeat thousands of times, and openings within a group.
        self._opening, self._extension = cache_rendering(self._render_opening), cache_rendering(self._render_extension)
        self._with_tools = lru_cache(maxsize=64)(lambda key: Renderer(self.tokenizer, json.loads(key)))
        if tools:
            own = getattr(tokenizer, "response_template", None) and getattr(tokenizer, "parse_response", None)
            self._calls = CallTemplate(self._template, closing, self.tools, own, thinking=bool(self._thought))

    def with_tools(self, tools: Tools) -> Renderer:
        """Return a renderer for conversations with these tools. Renderers are cached. Raises `ToolsUnknown`."""
        return self._with_tools(json.dumps(list(tools))) if list(tools) != list(self.tools) else self

    def start(self, messages: Sequence[Message]) -> list[Turn]:
        """Return the context turns of a new conversation, one per message; the last ends with the generation prompt."""
        return [Turn(message, ids) for message, ids in zip(messages, self._opening(messages), strict=True)]

    def extend(self, messages: Sequence[Message], *, closed: bool) -> list[Turn]:
        """Return the context turns that follow an assistant turn.

        ``closed``: the assistant turn already holds the end-of-turn token. If it does not, the first turn returned
        begins with that token.
        """
        return [Turn(message, ids) for message, ids in zip(messages, self._extension(messages, closed), strict=True)]

    def parse(self, tokens: IntArray, calls: int = 0) -> Message:
        """Return the message of a sampled turn.

        If the renderer has tools, the calls in the turn are numbered from ``calls``, and the content is the text around
        them. A call that cannot be parsed keeps its text as arguments. Calls within a thought are ignored.

        If the generation prompt opened a thought and the turn was cut off within it, the content begins with
        ``<think>``.
        """
        ids = tokens.tolist()
        while ids and ids[-1] in self.stop_tokens:
            ids.pop()
        # Decoding the array is faster than decoding a list, because the tokenizer checks each item of a list.
        plain = self.tokenizer.decode(tokens, skip_special_tokens=True)
        whole = self.tokenizer.decode(ids, skip_special_tokens=False) if self._calls or self._thought else plain
        if self._thought and CLOSE not in whole:
            plain = self._thought + plain
        around, found = self._calls.reader.read(whole) if self._calls else ("", [])
        if not found:
            return Message(role="assistant", content=plain)
        for special in getattr(self.tokenizer, "all_special_tokens", ()):
            around = around.replace(special, "")
        entries = [call_message(call, calls + i) for i, call in enumerate(found)]
        return Message(role="assistant", content=around.strip(), tool_calls=entries)

    def spoken(self, said: str | Message) -> IntArray:
        """Return the tokens, int32[n], that a model would sample to say a text or a message with calls.

        The last one is the end-of-turn token. If the generation prompt opens a thought, the tokens close it first.

        Raises:
            UserError: the template shows no text next to calls, or the message has calls but the renderer no tools.
        """
        message = Message(role="assistant", content=said) if isinstance(said, str) else said
        if self._calls is None and message.get("tool_calls"):
            raise UserError("a demonstration calls tools, but its taskset declares none in `Taskset.tools`")
        text = self._calls.spoken(message) if self._calls else message["content"]
        ids = self._encoder.ids(continue_thought(text) if self._thought else text)
        return np.append(ids, np.int32(self.end_of_turn))

    def demonstration(self, messages: Sequence[Message]) -> Segment:
        """Return a whole conversation as one segment for supervised training.

        Assistant turns are marked as sampled, with log-prob 0 and version 0, because only the mask is used there.
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
        return self._encoder.pieces(text, _ends_of_messages(text, messages, show))

    def _render_extension(self, messages: Sequence[Message], closed: bool) -> list[IntArray]:
        text = self._text_after_answer(messages, generate=True)
        show = partial(self._text_after_answer, generate=False)
        tokens = self._encoder.pieces(text, _ends_of_messages(text, messages, show))[: len(messages)]
        if closed:  # the end-of-turn token was sampled
            first = next(i for i, own in enumerate(tokens) if own.size)
            tokens[first] = tokens[first][1:]
        return tokens

    def _template(self, messages: Sequence[Message], *, generate: bool, tools: Tools = ()) -> str:
        plain = [for_template(message) for message in messages]
        shown = {"tools": list(tools)} if tools else {}
        return self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate, **shown)

    def _text_after_answer(self, messages: Sequence[Message], *, generate: bool) -> str:
        """Return what the template writes after an assistant turn's text, if ``messages`` follow that turn."""
        if self._calls and self._calls.results_need_calls and messages and messages[0]["role"] == "tool":
            return self._calls.after_calls(messages, generate=generate)
        before = [Message(role="user", content="."), Message(role="assistant", content=_MARK)]
        text = self._template([*before, *messages], generate=generate)
        return text[text.rindex(_MARK) + len(_MARK) :]


def _ends_of_messages(text: str, messages: Sequence[Message], show: Callable[[Sequence[Message]], str]) -> list[int]:
    """Return the offset in ``text`` at which each message ends, except the last; 0 if the template does not show it."""
    lengths = []
    for count in range(1, len(messages)):
        try:
            lengths.append(common_length(text, show(messages[:count])))
        except Exception:  # a template may refuse to render only the first messages of a conversation
            lengths.append(0)
    return lengths


class Encoder:
    """Calls a Hugging Face fast tokenizer in the cheapest way that returns the same ids as calling it directly.

    Special tokens written in the text become their ids. No special tokens are added.

    Raises:
        UserError: the tokenizer is a slow one, written in Python, which does not report the text offsets of tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", True):
            raise UserError(
                f"{type(tokenizer).__name__} is a tokenizer in Python, which does not report where in the text a token "
                "stands; give the model a fast one (tokenizer.json)"
            )
        self._tokenizer = tokenizer
        # Some tokenizer classes change the text before it reaches the backend (CodeLlama's fill-in-the-middle). Such a
        # class overrides one of these methods, which other classes inherit from transformers.
        methods = [getattr(tokenizer, name, None) for name in ("__call__", "_encode_plus")]
        self._only_backend = (
            hasattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch_fast")
            and all(getattr(m, "__module__", "").startswith("transformers.tokenization_utils") for m in methods)
            and self._from_backend(_PROBE) == self._with_offsets(_PROBE)[0]
        )

    def ids(self, text: str) -> IntArray:
        """Return the token ids of ``text``, int32[n]."""
        if not self._only_backend:
            return np.array(self._with_offsets(text)[0], np.int32)
        # Other users of the tokenizer may have left truncation or padding set in the backend. Calling the tokenizer
        # itself, as `_with_offsets` does, resets them.
        backend = self._tokenizer.backend_tokenizer
        clean = (
            backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == self._tokenizer.split_special_tokens
        )
        return np.array(self._from_backend(text) if clean else self._with_offsets(text)[0], np.int32)

    def pieces(self, text: str, lengths: Sequence[int]) -> list[IntArray]:
        """Return the token ids of ``text`` in pieces, cut at the character offsets ``lengths``.

        A token that spans a cut belongs to the piece in which it starts.
        """
        if not lengths:
            return [self.ids(text)]
        ids, offsets = self._with_offsets(text)
        cuts = [0]
        for length in lengths:
            cuts.append(max(cuts[-1], bisect_left(offsets, length, key=itemgetter(0))))
        cuts.append(len(ids))
        return [np.array(ids[a:b], np.int32) for a, b in pairwise(cuts)]

    def _from_backend(self, text: str) -> list[int]:
        return self._tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]


def cache_rendering(render: Callable[..., T]) -> Callable[..., T]:
    """Cache ``render(messages, *others)`` by messages and hashable ``others``.

    Callers share the results and must not change them.
    """

    def from_items(items: tuple[tuple[Any, ...], ...], *others: Hashable) -> T:
        return render([dict(own) for own in items], *others)

    short, long = lru_cache(_SHORT_CACHED)(from_items), lru_cache(_LONG_CACHED)(from_items)

    def recall(messages: Sequence[Message], *others: Hashable) -> T:
        items = tuple([tuple(message.items()) for message in messages])
        try:
            hash(items)
        except TypeError:  # a message with a list of calls, in the examples of a prompt, cannot be hashed
            return render(messages, *others)
        size = sum([len(message["content"] or "") for message in messages])
        return (short if size <= _SHORT else long)(items, *others)

    return recall
