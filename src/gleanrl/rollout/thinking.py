"""Separates a model's thoughts from its answer.

A chat template decides how a model marks its thoughts: with ``<think>`` and ``</think>`` (most models), with a channel
between two tokens (Gemma 4), or as messages of the channel ``analysis`` (gpt-oss). `thoughts_of` finds the format of a
template. `Renderer.parse` uses it to put the thought of a sampled turn into the message's field ``reasoning_content``,
so that ``content`` is the answer. Some generation prompts open a thought themselves; then the sampled text begins
within it.

`answer_of` is for text of any origin, such as a demonstration that has its thought in its content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gleanrl.types import Message

OPEN, CLOSE = "<think>", "</think>"


def answer_of(text: str) -> str:
    """Return the text after the last ``</think>``, or the whole text if it has none.

    The result ends before a ``<think>`` that is not closed. It may be empty.
    """
    return text.rpartition(CLOSE)[2].partition(OPEN)[0]


def written(message: Message) -> str:
    """Return the content of a message, with its thought in ``<think>`` and ``</think>`` before it if it has one.

    The text is the sampled one for models with these tags. If the thought is all there is, because the turn was cut
    off, ``</think>`` is missing.
    """
    content = message.get("content") or ""
    if "reasoning_content" not in message:
        return content
    closed = CLOSE if content or message.get("tool_calls") else ""
    return f"{OPEN}{message['reasoning_content']}{closed}{content}"


@dataclass(frozen=True, slots=True)
class ThoughtTags:
    """Thoughts at the beginning of a turn, each of them between two tags."""

    open: str = OPEN
    close: str = CLOSE
    gap: str = "\n\n"  # text between a thought and an answer

    @property
    def frame(self) -> tuple[str, str]:
        """What a model writes before and after a thought; for demonstrations where the chat template writes none."""
        return f"{self.open}\n", f"\n{self.close}{self.gap}"

    def opening(self, prompt: str) -> str:
        """Return the end of a generation prompt that opens a thought: the tag and the whitespace after it.

        Returns an empty string if the prompt does not open a thought.
        """
        at = len(prompt.rstrip()) - len(self.open)
        return prompt[at:] if prompt.rstrip().endswith(self.open) else ""

    def split(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        """Return the thought without its tags, and the rest of ``text``.

        The thought is None if ``text`` begins with none. Several thoughts in a row count as one. If the last one is not
        closed, the rest is empty. ``opened``: whether ``text`` begins within a thought that the prompt has opened;
        models repeat the tag at times.
        """
        start = begin = 0
        if text.lstrip().startswith(self.open):
            start = begin = len(text) - len(text.lstrip()) + len(self.open)
        elif not opened:
            return None, text
        while (end := text.find(self.close, begin)) >= 0:
            rest = text[end + len(self.close) :]
            if not rest.lstrip().startswith(self.open):
                return text[start:end], rest
            begin = len(text) - len(rest.lstrip()) + len(self.open)
        return text[start:], ""

    def is_open(self, text: str, opened: bool = False) -> bool:
        """Return whether ``text``, the beginning of a turn, ends within a thought. ``opened`` is that of `split`."""
        thought, rest = self.split(text, opened)
        return thought is not None and not rest and not text.endswith(self.close)

    def count_ends(self, text: str) -> int:
        """Return how many thoughts end in ``text``."""
        return text.count(self.close)


@dataclass(frozen=True, slots=True)
class Harmony:
    """Thoughts of gpt-oss: messages of the channel ``analysis``, next to those that are answers or calls."""

    open: str = "<|channel|>analysis<|message|>"
    close: str = ""  # a tag that ends a thought wherever it stands; here there is none
    frame: tuple[str, str] = (open, "<|end|><|start|>assistant")
    """As `ThoughtTags.frame`."""

    def opening(self, prompt: str) -> str:
        """As `ThoughtTags.opening`."""
        return self.open if prompt.endswith(self.open) else ""

    def split(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        """As `ThoughtTags.split`, but the thoughts may stand between other messages."""
        parts = (self.open * opened + text).split("<|start|>assistant")
        thoughts = [part.removeprefix(self.open) for part in parts if part.startswith(self.open)]
        rest = "<|start|>assistant".join([part for part in parts if not part.startswith(self.open)])
        return ("\n".join(part.removesuffix("<|end|>") for part in thoughts), rest) if thoughts else (None, rest)

    def is_open(self, text: str, opened: bool = False) -> bool:
        """As `ThoughtTags.is_open`."""
        last = (self.open * opened + text).rpartition("<|start|>assistant")[2]
        return last.startswith(self.open) and not last.endswith("<|end|>")

    def count_ends(self, text: str) -> int:
        """As `ThoughtTags.count_ends`, but only thoughts with which ``text`` begins."""
        count = 0
        for part in text.split("<|start|>assistant")[:-1]:
            if not part.startswith(self.open):
                break
            count += part.endswith("<|end|>")
        return count


Thoughts = ThoughtTags | Harmony


def thoughts_of(chat_template: Any) -> Thoughts:
    """Return the format of thoughts that the models of a chat template use. ``<think>`` is the default."""
    source = str(chat_template)
    if re.search(r"<\|channel\|>\s*analysis", source):
        return Harmony()
    return ThoughtTags("<|channel>thought", "<channel|>", "") if "<|channel>" in source else ThoughtTags()


def continue_thought(text: str) -> str:
    """Return the text that a model would sample to answer ``text`` after a generation prompt that opens a thought.

    If ``text`` contains no thought, the result begins with ``</think>``. If it begins with ``<think>``, this tag is
    removed, because the generation prompt contains it.
    """
    stripped = text.lstrip()
    if stripped.startswith(OPEN):
        return stripped.removeprefix(OPEN).lstrip("\n")
    return text if CLOSE in text else f"\n{CLOSE}\n\n{text}"
