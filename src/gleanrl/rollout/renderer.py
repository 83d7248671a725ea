"""Converts messages to token ids, and sampled token ids to a message, with the model's own chat template.

A `Renderer` is created for a tokenizer and a list of tools. `Context` calls it for each turn of an episode. Supervised
training calls `Renderer.demonstration`. Text that was sampled is never tokenised again. To get the tokens that follow
an answer, the template is rendered with a placeholder in place of the answer.

    renderer = Renderer(AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B"))
    opening = renderer.start([{"role": "user", "content": "What is 2 + 2?"}])  # context turns, generation prompt last
    message = renderer.parse(sampled_ids)
    following = renderer.extend([{"role": "user", "content": "And 3 + 3?"}], closed=True)
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise, takewhile
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import numpy as np

from gleanrl.protocols import Tools
from gleanrl.rollout.thinking import CLOSE, OPEN, Harmony, continue_thought, thoughts_of
from gleanrl.rollout.tool_calls import (
    Answer,
    AnswerReader,
    CallTemplate,
    HarmonyCalls,
    call_message,
    common_length,
    for_template,
)
from gleanrl.types import IntArray, Message, Segment, Turn
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import first_line, nearest

T = TypeVar("T")

_MARK = "gleanmark"  # placeholder for an answer's text, by which the text around the answer is found
_THOUGHT = "gleanthought"  # placeholder for its thought
_BODY = "gleanbody"  # placeholder for the text of an observation
_PROBE = "Go, 12 times:\n\n  café → <|unk|>\t{'x': [1]}  "  # text with which `Encoder` compares tokenizer and backend
# Renderings are kept in two caches: one for messages with at most this many characters in all, one for longer messages.
_SHORT = 1000
# Largest number of entries in the cache for short and for long messages. Long messages need more memory.
_SHORT_CACHED, _LONG_CACHED = 1 << 14, 1 << 8


class Tokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that a renderer uses."""

    chat_template: Any

    def __call__(self, text: str, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def decode(self, token_ids: Any, **options: Any) -> Any: ...


class Renderer:
    """Renders conversations to token ids, and parses sampled token ids into messages.

    `start` returns the turns of a new conversation. `extend` returns the turns that follow an assistant turn. The
    tokens of both end with the generation prompt, so that the model can sample its answer next.

    Args:
        tokenizer: a Hugging Face fast tokenizer with a chat template.
        tools: OpenAI function schemas of the tools that the model may call. `start` shows them to the model, and
            `parse` extracts calls from the sampled tokens.
        template_options: values of variables of the chat template, such as ``enable_thinking``, for all renderings.
        bodies: whether `extend` finds `Turn.body`, which takes as long as two renderings more.

    Raises:
        UserError: the tokenizer is slow or has no chat template, or the template does not render messages with text,
            does not end an assistant turn with a token at which sampling can stop, or uses no variable with the name of
            one of ``template_options``.
        ToolsUnknown: ``tools`` is not empty, and the template cannot render tools, calls or their results.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Tools = (),
        template_options: Mapping[str, Any] | None = None,
        *,
        bodies: bool = False,
    ) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template; set tokenizer.chat_template and save it with the model"
            )
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        self.bodies = bodies
        self._template_options = dict(template_options or {})
        if self._template_options:
            _check_template_options(self._template_options, tokenizer.chat_template)
        self._calls: CallTemplate | None = None
        self._encoder = Encoder(tokenizer)
        try:
            shown, reason = self._template([_user(_MARK), Message(role="assistant", content=_MARK)], generate=False), ""
        except UserError as error:
            shown, reason = "", f" ({error})"
        if shown.count(_MARK) < 2:
            raise UserError(
                f"the chat template does not render messages whose content is text{reason}; templates of some "
                "vision-language models take lists of parts only: take a text model or another chat template"
            )
        self.thoughts = thoughts_of(tokenizer.chat_template)
        """Format of the model's thoughts."""
        prompt = self._template([_user(".")], generate=True)
        opening = self.thoughts.opening(prompt)
        self.opened_thought = self._encoder.pieces(prompt, [len(prompt) - len(opening)])[1]
        """The tokens with which the generation prompt opens a thought, int32[n]; empty if it opens none."""
        channels = HarmonyCalls() if isinstance(self.thoughts, Harmony) else None
        self._reader = self._text_reader = AnswerReader(self.thoughts, channels)
        tag = self._encoder.ids(self.thoughts.open)
        # Number of tokens at the end of a prompt that show whether it opens a thought; 0 if no prompt ever does.
        self._opening_reach = tag.size + 4 if self.thoughts.open in str(tokenizer.chat_template) else 0
        # Whether decoding without special tokens would remove the tags of thoughts too.
        self._marks_are_special = self.thoughts.open in tokenizer.decode(tag) and (
            self.thoughts.open not in tokenizer.decode(tag, skip_special_tokens=True)
        )
        self._header, *self._around_thought = self._find_frame(prompt)
        closing = self._text_after_answer([], generate=False)
        self.end_of_turn = self.end_of_calls = self._find_end(closing, _user("."))
        # Renderings are cached because observations such as "Nothing happens." occur thousands of times, and because
        # all episodes of a group begin with the same messages.
        self._opening, self._extension = cache_rendering(self._render_opening), cache_rendering(self._render_extension)
        self._with_tools = lru_cache(maxsize=64)(
            lambda key: Renderer(self.tokenizer, json.loads(key), self._template_options, bodies=bodies)
        )
        if tools:
            own = getattr(tokenizer, "response_template", None) and getattr(tokenizer, "parse_response", None)
            self._calls = CallTemplate(self._template, closing, self.tools, self.thoughts, self._special_at_end_of, own)
            self._reader = AnswerReader(self.thoughts, self._calls.reader)
            result = Message(role="tool", content=".", tool_call_id="call00000")
            self.end_of_calls = self._find_end(self._calls.closing, result)
        # Llama 3.1 may end a call with this token, as its template writes "Environment: ipython" if it shows tools.
        other = self._encoder.ids("<|eom_id|>").tolist() if tools else []
        self.ends = (self.end_of_turn, self.end_of_calls, *(other if len(other) == 1 else ()))
        """The ids of the tokens with which a complete turn of the model ends."""
        eos = getattr(tokenizer, "eos_token_id", None)
        eos = [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [eos]
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys([*self.ends, *eos]))

    def with_tools(self, tools: Tools) -> Renderer:
        """Return a renderer for the same tokenizer and template options, and these tools. Renderers are cached.

        Raises `ToolsUnknown` if the chat template does not support tools.
        """
        return self._with_tools(json.dumps(list(tools))) if list(tools) != list(self.tools) else self

    def start(self, messages: Sequence[Message]) -> list[Turn]:
        """Return the context turns of a new conversation, one for each message.

        The last turn ends with the generation prompt.
        """
        return [Turn(message, ids) for message, ids in zip(messages, self._opening(messages), strict=True)]

    def extend(self, messages: Sequence[Message], *, closed: bool, after: Iterable[Message] = ()) -> list[Turn]:
        """Return the context turns of ``messages``, which follow an assistant turn.

        The last turn ends with the generation prompt.

        ``after``: the conversation so far. Only its system messages at the start matter: in some templates they decide
        how a turn begins, for example with a thought that has ended already.

        ``closed``: whether the assistant turn ends with one of `ends`. If it does not, because the answer was cut off,
        the first turn returned begins with such a token.

        If the renderer finds `Turn.body`, it spans the tokens of each message's content.
        """
        system = tuple(message["content"] or "" for message in takewhile(lambda each: each["role"] == "system", after))
        rendered = zip(messages, self._extension(messages, closed, system), strict=True)
        return [Turn(message, ids, body=body) for message, (ids, body) in rendered]

    def parse(self, tokens: IntArray, calls: int = 0, before: Sequence[Turn] = ()) -> Message:
        """Return the message of a turn that consists of the sampled ``tokens``.

        ``before``: the turns before it, which show whether it begins within a thought: the generation prompt may have
        opened one, or the model continues a sampled turn that was cut off. Empty stands for a message of the user.

        A thought at the beginning of the turn is the message's ``reasoning_content``, without its tags. If the thought
        was cut off, the content is empty.

        If the renderer has tools, calls of tools are extracted from the text: the message has them as ``tool_calls``,
        and its content is the rest of the text. The ids of the calls are numbered from ``calls``. If a call cannot be
        parsed, its arguments are the sampled text. Calls within a thought are ignored.
        """
        ids = tokens.tolist()
        while ids and ids[-1] in self.stop_tokens:
            ids.pop()
        # The array is decoded and not the list `ids`, because the tokenizer checks each item of a list, which is slow.
        opened = bool(self.opened_thought.size)
        first = len(before)  # the first of the sampled turns that this one continues
        while first and before[first - 1].sampled:
            first -= 1
        if first and self._opening_reach:
            # In some templates this depends on the conversation: on a switch in the system prompt, or on a result.
            prompt = before[first - 1].tokens[-self._opening_reach :]
            opened = bool(self.thoughts.opening(self.tokenizer.decode(prompt)))
        for turn in before[first:]:
            opened = self.thoughts.is_open(self.tokenizer.decode(turn.tokens), opened)
        answer = self._text_reader.read(self.tokenizer.decode(tokens, skip_special_tokens=True), opened)
        if self._calls or self._marks_are_special:
            marked = self._reader.read(self.tokenizer.decode(ids, skip_special_tokens=False), opened)
            if marked.calls or self._marks_are_special:
                answer = Answer(self._plain(marked.reasoning), self._plain(marked.content), marked.calls)
        message = Message(role="assistant", content=answer.content)
        if answer.reasoning is not None:
            message["reasoning_content"] = answer.reasoning
        if answer.calls and self._calls:
            message["content"] = answer.content.strip()
            message["tool_calls"] = [call_message(call, calls + i) for i, call in enumerate(answer.calls)]
        return message

    def spoken(self, said: str | Message) -> IntArray:
        """Return the tokens, int32[n], that a model would sample to answer with a text or with a message with calls.

        The last token is `end_of_turn`, or `end_of_calls` if the message has calls. The thought of a message comes
        first, in the form of the chat template. If the generation prompt opens a thought and the message has none, the
        tokens begin with the end of the thought.

        Raises:
            UserError: the message has both text and calls and the template renders only the calls, or the message has
                calls and the renderer has no tools.
        """
        message = Message(role="assistant", content=said) if isinstance(said, str) else said
        if message.get("tool_calls"):
            if self._calls is None:
                raise UserError("a demonstration calls tools, but its taskset declares none in `Taskset.tools`")
            text = self._calls.spoken(message)
        else:
            text = self._header + message["content"]
        if thought := message.get("reasoning_content"):
            before, after = self._around_thought
            text = before + thought.strip("\n") + after + text.lstrip("\n")
        elif self.opened_thought.size:
            # A closing tag in the arguments of a call does not end the thought.
            content = message.get("content") or ""
            thinks = OPEN in content or CLOSE in content
            text = continue_thought(text) if thinks else f"\n{CLOSE}\n\n{text}"
        ids = self._encoder.ids(text)
        return np.append(ids, np.int32(self.end_of_calls if message.get("tool_calls") else self.end_of_turn))

    def demonstration(self, messages: Sequence[Message], opening: int = 0) -> Segment:
        """Return a whole conversation as one segment for supervised training.

        Assistant turns are marked as sampled, so that they are trained on, except those among the first ``opening``
        messages, which are examples in the prompt. Their log-probs and versions are 0, because supervised training
        does not use them.

        Raises `UserError` if an assistant's message to be trained on follows another message of the assistant.
        """
        turns: list[Turn] = []
        pending: list[Message] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < opening:
                pending.append(message)
                continue
            if turns and not pending:
                raise UserError("a demonstration has two messages of the assistant in a row; make them one message")
            turns += self.extend(pending, closed=True, after=messages) if turns else self.start(pending)
            tokens = self.spoken(message)
            turns.append(Turn(message, tokens, np.zeros(tokens.size, np.float32), version=0))
            pending = []
        return tuple(turns)

    def _render_opening(self, messages: Sequence[Message]) -> list[IntArray]:
        text = self._template(messages, generate=True, tools=self.tools)
        show = partial(self._template, generate=False, tools=self.tools)
        return self._encoder.pieces(text, _ends_of_messages(text, messages, show))

    def _render_extension(
        self, messages: Sequence[Message], closed: bool, system: Sequence[str]
    ) -> list[tuple[IntArray, tuple[int, int] | None]]:
        text = self._text_after_answer(messages, generate=True, system=system)
        show = partial(self._text_after_answer, generate=False, system=system)
        tokens = self._encoder.pieces(text, _ends_of_messages(text, messages, show))[: len(messages)]
        bodies: list[tuple[int, int] | None] = [None] * len(messages)
        if self.bodies and (places := self._places_of_bodies(text, messages, system)):
            ends = np.cumsum([0, *(own.size for own in tokens)])
            cuts = np.cumsum([own.size for own in self._encoder.pieces(text, places)]).tolist()
            for number, (start, stop) in enumerate(zip(cuts[::2], cuts[1::2], strict=False)):
                begin, end = int(ends[number]), int(ends[number + 1])
                if begin <= start <= stop <= end:
                    bodies[number] = start - begin, stop - begin
        if closed:  # the assistant turn already ends with the first token here
            first = next(i for i, own in enumerate(tokens) if own.size)
            tokens[first] = tokens[first][1:]
            if (body := bodies[first]) is not None:
                bodies[first] = max(body[0] - 1, 0), max(body[1] - 1, 0)
        return list(zip(tokens, bodies, strict=True))

    def _places_of_bodies(self, text: str, messages: Sequence[Message], system: Sequence[str]) -> list[int]:
        """Return where the content of each message begins and ends in ``text``, in characters: two numbers a message.

        ``text`` is the rendering of ``messages`` after an answer. Placeholders in place of the contents show what the
        template writes between them. The list is empty if the template writes something else than this text, the
        contents, with or without the whitespace around them, and this text again.
        """
        marked = [Message({**message, "content": _BODY}) for message in messages]
        try:
            between = self._text_after_answer(marked, generate=True, system=system).split(_BODY)
        except UserError:
            return []
        places: list[int] = []
        end = len(between[0])
        if len(between) != len(messages) + 1 or not text.startswith(between[0]):
            return []
        for message, after in zip(messages, between[1:], strict=True):
            content = message["content"] or ""
            for body in (content, content.strip()):
                if text.startswith(body + after, end):
                    places += [end, end + len(body)]
                    end += len(body) + len(after)
                    break
            else:
                return []
        return places if end == len(text) else []

    def _template(self, messages: Sequence[Message], *, generate: bool, tools: Tools = ()) -> str:
        plain = [for_template(message) for message in messages]
        named: dict[str, Any] = {**self._template_options, "tools": list(tools)} if tools else self._template_options
        try:
            return self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate, **named)
        except Exception as error:  # a template may raise errors of its own, and errors of any type
            raise UserError(f"the chat template refuses the conversation: {first_line(error)}") from error

    def _text_after_answer(self, messages: Sequence[Message], *, generate: bool, system: Sequence[str] = ()) -> str:
        """Return the text that the template writes after the text of an assistant turn if ``messages`` follow it.

        ``system`` are the system messages with which the conversation begins.
        """
        begun = [Message(role="system", content=content) for content in system]
        if self._calls and self._calls.results_need_calls and messages and messages[0]["role"] == "tool":
            return self._calls.after_calls(begun, messages, generate=generate)
        before = [*begun, _user("."), Message(role="assistant", content=_MARK)]
        text = self._template([*before, *messages], generate=generate)
        return text[text.index(_MARK) + len(_MARK) :]

    def _find_frame(self, prompt: str) -> tuple[str, str, str]:
        """Return what the template writes before an answer, before a thought, and between a thought and an answer.

        ``prompt`` is the text of `_user(".")` with the generation prompt. The first two texts come after it.
        """

        def shown(**thought: str) -> str:
            answer: Any = {"role": "assistant", "content": _MARK, **thought}
            return self._template([_user("."), answer], generate=False)

        opened, header = bool(self.opened_thought.size), ""
        if isinstance(self.thoughts, Harmony):
            # gpt-oss has a header before an answer, which names its channel. In other templates such text is an empty
            # thought, which models that think do not write.
            header = shown().removeprefix(prompt).partition(_MARK)[0]
        before, _, rest = shown(reasoning_content=_THOUGHT).partition(_THOUGHT)
        after, answered, _ = rest.partition(_MARK)
        if not answered or not before.startswith(prompt):
            # The template leaves thoughts out, or its generation prompt has closed the thought already.
            before, after = self.thoughts.frame
            return header, "" if opened else before, after
        return header, before.removeprefix(prompt), after.removesuffix(header)

    def _plain(self, text: Any) -> Any:
        """Return ``text`` without special tokens."""
        for special in getattr(self.tokenizer, "all_special_tokens", ()) if text else ():
            text = text.replace(special, "")
        return text

    def _special_at_end_of(self, text: str) -> str:
        last = self._encoder.ids(text)[-1:]
        shown = self.tokenizer.decode(last)
        special = text.endswith(shown) and not self.tokenizer.decode(last, skip_special_tokens=True)
        return shown if special else ""

    def _find_end(self, closing: str, following: Message) -> int:
        """Return the token with which a model ends an answer that ``following`` follows.

        ``closing`` is the text that the template writes after an answer. Where it is empty, as in GLM's template, the
        model ends an answer with the special token that begins the next message.
        """
        ids = self._encoder.ids(closing or self._text_after_answer([following], generate=False))
        if not ids.size or (not closing and self.tokenizer.decode(ids[:1], skip_special_tokens=True)):
            raise UserError("the chat template does not end an assistant turn with a token; sampling could not stop")
        return int(ids[0])


def _check_template_options(options: Mapping[str, Any], chat_template: Any) -> None:
    """Check that ``chat_template``, or one of several in a mapping, uses a variable with the name of each option.

    Raises `UserError` if not, because a template ignores a variable that it does not use, or if the renderer itself
    gives the variable.
    """
    import jinja2
    import jinja2.meta

    known: set[str] = set()
    for source in chat_template.values() if isinstance(chat_template, Mapping) else [chat_template]:
        # jinja2 does not know these tags of transformers, which contain no variables.
        source = re.sub(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}", "", source)
        try:
            parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template is not valid: {first_line(error)}") from error
        known |= jinja2.meta.find_undeclared_variables(parsed)
    for name, value in options.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            # `{% if enable_thinking is false %}` is not met, and `{% if enable_thinking %}` is, by any text.
            raise UserError(f"context.template_options.{name} = {value!r} is a text: write {value.lower()}")
        if name in ("messages", "tools", "add_generation_prompt"):
            raise UserError(f"context.template_options.{name}: every prompt has its own {name}; leave it out")
        if name not in known:
            raise UserError(f"context.template_options.{name}: the chat template does not use it{nearest(name, known)}")


def _user(content: str) -> Message:
    return Message(role="user", content=content)


def _ends_of_messages(text: str, messages: Sequence[Message], show: Callable[[Sequence[Message]], str]) -> list[int]:
    """Return the offsets in ``text``, in characters, at which the messages except the last one end.

    ``show`` renders a list of messages. The offset of a message is 0 if the template cannot render the messages up to
    it.
    """
    lengths = []
    for count in range(1, len(messages)):
        try:
            lengths.append(common_length(text, show(messages[:count])))
        except Exception:  # a template may refuse to render a conversation that is not complete
            lengths.append(0)
    return lengths


class Encoder:
    """Tokenises text with a Hugging Face fast tokenizer.

    If this gives the same tokens, the tokenizer's Rust backend is called directly, which is faster. Special tokens that
    are written in the text become their ids. No special tokens are added.

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
        # Some tokenizer classes change the text before they pass it to the backend, such as CodeLlama's for
        # fill-in-the-middle. Such a class overrides one of the two methods below, which other classes inherit from
        # transformers. The backend is called directly only for classes that override neither.
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
        # Another user of the tokenizer may have left truncation or padding switched on in the backend. A call of the
        # tokenizer itself, as in `_with_offsets`, resets both.
        backend = self._tokenizer.backend_tokenizer
        clean = (
            backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == self._tokenizer.split_special_tokens
        )
        return np.array(self._from_backend(text) if clean else self._with_offsets(text)[0], np.int32)

    def pieces(self, text: str, lengths: Sequence[int]) -> list[IntArray]:
        """Return the token ids of ``text``, divided into pieces at the character offsets ``lengths``.

        A token that spans such an offset belongs to the piece in which it starts.
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
    """Return a function that caches the results of ``render(messages, *others)``. ``others`` must be hashable.

    The function returns the same object for equal arguments, so its callers must not change the result.
    """

    def from_items(items: tuple[tuple[Any, ...], ...], *others: Hashable) -> T:
        return render([dict(own) for own in items], *others)

    short, long = lru_cache(_SHORT_CACHED)(from_items), lru_cache(_LONG_CACHED)(from_items)

    def recall(messages: Sequence[Message], *others: Hashable) -> T:
        items = tuple([tuple(message.items()) for message in messages])
        try:
            hash(items)
        except TypeError:  # a message with tool calls cannot be hashed; such a message may be an example in a prompt
            return render(messages, *others)
        size = sum([len(message["content"] or "") for message in messages])
        return (short if size <= _SHORT else long)(items, *others)

    return recall
