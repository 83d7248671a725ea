"""Where a model's thought ends and its answer begins.

A thought stands between ``<think>`` and ``</think>``. Some chat templates open it in the generation prompt; then only
its end is sampled. If such a thought is cut off, its text alone would look like an answer, so `Renderer.parse` puts
``<think>`` before it. So these functions need nothing but a message's text.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def answer_of(text: str) -> str:
    """Return the text after the last ``</think>``, up to a thought that is never closed; may be empty."""
    return text.rpartition(CLOSE)[2].partition(OPEN)[0]


def split_thought(text: str, opened: bool = False) -> tuple[str, str]:
    """Split ``text`` into the thoughts at its beginning, tags included, and the rest, empty if a thought never closes.

    ``opened``: the generation prompt opened the first thought.
    """
    begin = 0 if opened else len(text) - len(text.lstrip()) + len(OPEN)
    if not opened and not text[:begin].endswith(OPEN):
        return "", text
    end = text.find(CLOSE, begin)
    if end < 0:
        return text, ""
    end += len(CLOSE)
    further, rest = split_thought(text[end:])
    return text[:end] + further, rest


def continue_thought(text: str) -> str:
    """Return what a model says to give ``text`` after a generation prompt that opened a thought.

    A text without a thought closes it at once; a text that begins with ``<think>`` continues without it.
    """
    stripped = text.lstrip()
    if stripped.startswith(OPEN):
        return stripped.removeprefix(OPEN).lstrip("\n")
    return text if CLOSE in text else f"\n{CLOSE}\n\n{text}"


def opening_of(prompt: str) -> str:
    """Return the end of a generation prompt that opens a thought: ``<think>`` and the space after it, or nothing."""
    at = len(prompt.rstrip()) - len(OPEN)
    return prompt[at:] if prompt.rstrip().endswith(OPEN) else ""
