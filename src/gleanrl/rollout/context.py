"""The conversation of an episode: the tokens that the model sees, and the segments on which it is trained.

`Context` stores the conversation of one episode. A context policy is a *view*: a pure function that takes all turns of
the episode and returns the turns that the model sees next. As long as these turns begin with the turns of the current
segment, the segment continues. If they do not, because the view has removed old thinking or clipped the history to a
window, a new segment starts, and all turns that it shows at its start are context. Each sampled turn is therefore
trained on in exactly one segment, and the loss mask follows from the turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gleanrl.config.settings import ContextSettings
from gleanrl.protocols import Completion, Tools
from gleanrl.rollout.renderer import Renderer
from gleanrl.rollout.thinking import Thoughts, ThoughtTags, answer_of
from gleanrl.types import IntArray, Message, Segment, Turn

_TAGS = ThoughtTags()
View = Callable[[Sequence[Turn]], list[Turn]]


class Context:
    """The conversation of one episode. For each turn of the model, call `observe`, `prompt` and `act` in this order."""

    def __init__(self, renderer: Renderer, view: View, system_prompt: str | None = None) -> None:
        self._renderer = renderer
        self._view = view
        self._system = [Message(role="system", content=system_prompt)] if system_prompt else []
        self._history: list[Turn] = []
        self._closed_segments: list[Segment] = []
        self._segment: list[Turn] = []
        self._prompt = np.empty(0, np.int32)  # the tokens of the segment's first `_joined` turns
        self._joined = 0
        self._closed = True  # False if the last sampled turn does not end with an end token, because it was cut off
        self._calls = 0  # number of tool calls so far
        self._state: str | None = None  # key of the environment's state in which the next turn is sampled

    @property
    def tools(self) -> Tools:
        """The tools that were shown to the model before its first answer."""
        return self._renderer.tools

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids of the tokens that end an answer of the model. They may depend on the tools."""
        return self._renderer.stop_tokens

    def observe(self, messages: Sequence[Message], tools: Tools = (), state: str | None = None) -> None:
        """Add the messages that the environment has returned. ``state``: key of its state now, for the next turn.

        ``tools``: function schemas of the tools that the model may call. They are shown to the model if this is the
        first call of the method; in later calls they are ignored.

        Raises:
            ToolsUnknown: the chat template does not support tools.
            ValueError: ``messages`` is empty, although the model's last answer is complete.
        """
        self._state = state
        known = len(self._history)
        if not self._history:
            self._renderer = self._renderer.with_tools(tools)
            messages = [*self._system, *messages]
        # Without a message the model can only continue its last answer, which is possible if the answer was cut off.
        if not messages and self._closed:
            raise ValueError("the environment said nothing, and the episode goes on")
        if self._history:
            new = self._extend(messages)
            if not any(turn.sampled for turn in self._history):  # they answer turns of an earlier episode
                new = [replace(turn, body=None) for turn in new]
            self._history += new
        else:
            self._history += self._renderer.start(messages)
        shown = self._view(self._history)
        held = len(self._segment)
        pairs = zip(shown, self._segment, strict=False)
        if len(shown) >= held and all(a is b or np.array_equal(a.tokens, b.tokens) for a, b in pairs):
            self._segment += shown[held:]
        else:
            self._closed_segments.append(tuple(self._segment))
            heard = {id(turn) for turn in self._history[known:]}
            self._segment = [turn if id(turn) in heard else Turn(turn.message, turn.tokens) for turn in shown]
            self._prompt, self._joined = np.empty(0, np.int32), 0

    def prompt(self) -> IntArray:
        """Return all tokens that the model sees, int32[n], with the generation prompt last. The array is a copy."""
        new = [turn.tokens for turn in self._segment[self._joined :]]
        self._prompt, self._joined = np.concatenate([self._prompt, *new]), len(self._segment)
        return self._prompt.copy()

    def act(self, completion: Completion) -> Message:
        """Add the turn that the model has sampled, and return it as a message."""
        message = self._renderer.parse(completion.tokens, self._calls, self._history)
        turn = Turn(message, completion.tokens, completion.logprobs, completion.version, state=self._state)
        return self._add(turn)

    def repeat(self, tokens: IntArray) -> Message:
        """Add a turn of the model from an earlier episode, as context that is not trained, and return it as a message.

        ``tokens`` int32[n] are those that were sampled then.
        """
        return self._add(Turn(self._renderer.parse(tokens, self._calls, self._history), tokens))

    def _add(self, turn: Turn) -> Message:
        self._calls += len(turn.message.get("tool_calls", ()))
        self._closed = turn.tokens.size > 0 and int(turn.tokens[-1]) in self._renderer.ends
        self._history.append(turn)
        self._segment.append(turn)
        return turn.message

    def ending(self, messages: Sequence[Message]) -> Segment:
        """Return the turns with which ``messages`` would continue the last segment; see `Trajectory.ending`."""
        if not messages or not any(turn.sampled for turn in self._history):
            return ()
        return tuple(self._extend(messages))

    def _extend(self, messages: Sequence[Message]) -> list[Turn]:
        after = (turn.message for turn in self._history)
        return self._renderer.extend(messages, closed=self._closed, after=after)

    def earn(self, reward: float) -> None:
        """Add ``reward`` to what the turn has earned that the model sampled last. Call it before `observe`.

        Raises `ValueError` if the model has sampled nothing since the last observation.
        """
        if not self._history or not self._history[-1].sampled:
            raise ValueError(
                f"a reward of {reward:g} came before the model's first message, which cannot have earned it"
            )
        self._history[-1] = self._segment[-1] = self._history[-1].earned(reward)

    def segments(self) -> tuple[Segment, ...]:
        return (*self._closed_segments, tuple(self._segment)) if self._segment else ()


def make_context(renderer: Renderer, settings: ContextSettings) -> Context:
    views: dict[str, View] = {
        "linear": list,
        "strip_thinking": partial(
            strip_thinking,
            decode=renderer.tokenizer.decode,
            known={},
            opened=renderer.opened_thought,
            thoughts=renderer.thoughts,
        ),
        "window": partial(window, keep=settings.window_turns),
    }
    return Context(renderer, views[settings.policy], settings.system_prompt)


def window(history: Sequence[Turn], keep: int) -> list[Turn]:
    """Return the turns before the first answer, and the last ``keep`` exchanges.

    An exchange is an answer of the model and the observation after it.
    """
    exchanges = [i for i, turn in enumerate(history) if turn.sampled]
    if len(exchanges) <= keep:
        return list(history)
    return [*history[: exchanges[0]], *history[exchanges[-keep] :]]


def strip_thinking(
    history: Sequence[Turn],
    decode: Callable[..., str],
    known: dict[int, tuple[Turn, Turn]] | None = None,
    opened: IntArray | Sequence[int] = (),
    thoughts: Thoughts = _TAGS,
) -> list[Turn]:
    """Return the turns without their thoughts, because reasoning models expect earlier answers without them.

    Args:
        history: all turns of the episode.
        decode: the tokenizer's ``decode``.
        known: a cache, ``id(turn)`` -> (turn, the turn without its thought). If the caller keeps it during an episode,
            each turn is decoded only once.
        opened: the tokens with which the generation prompt opens a thought. They are removed too.
        thoughts: the format of the thoughts.
    """
    known = {} if known is None else known
    for turn in history:
        if not turn.sampled or id(turn) in known:
            continue
        stripped, ids = turn, turn.tokens.tolist()
        thinks, content, ends = "reasoning_content" in turn.message, turn.message["content"] or "", 0
        if thinks or thoughts.close in content:
            # The thoughts at the beginning of the turn, and those in its content. A closing tag that is only in the
            # arguments of a call ends no thought.
            text = decode(ids)
            answer = thoughts.split(text, thinks)[1]
            ends = thoughts.count_ends(text[: len(text) - len(answer)]) + thoughts.count_ends(content)
        if ends:
            # Binary search for the shortest prefix that contains the last closing tag. Token ids are cut and not text,
            # so that the remaining tokens stay exactly as they were sampled.
            low, high = 1, len(ids)
            while low < high:
                middle = (low + high) // 2
                enough = thoughts.count_ends(decode(ids[:middle])) >= ends
                low, high = (low, middle) if enough else (middle + 1, high)
            while low < len(ids) and decode(ids[low : low + 1]).strip("\n") == "":  # newlines before the answer
                low += 1
            message: Any = {**turn.message, "content": answer_of(content).lstrip("\n")}
            message.pop("reasoning_content", None)
            stripped = Turn(message, turn.tokens[low:])
        # Keep a reference to the turn: if it were garbage-collected, another object could get its id.
        known[id(turn)] = (turn, stripped)
    shown = [known[id(turn)][1] if turn.sampled else turn for turn in history]
    for at, turn in enumerate(history):
        if shown[at] is turn:
            continue
        first = at
        while first and (before := history[first - 1]).sampled and _only_thinks(before.message):
            # The thought began in this turn, which was cut off.
            first -= 1
            shown[first] = Turn(Message(role="assistant", content=""), before.tokens[:0])
        if first and len(opened) and not (before := history[first - 1]).sampled:
            rest, end = np.split(before.tokens, [-len(opened)])
            shown[first - 1] = Turn(before.message, rest) if np.array_equal(end, opened) else before
    return shown


def _only_thinks(message: Message) -> bool:
    return "reasoning_content" in message and not message["content"] and not message.get("tool_calls")
