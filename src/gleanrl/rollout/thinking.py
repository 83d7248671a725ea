"""Finds where a model's thought ends and its answer begins.

A thought stands between ``<think>`` and ``</think>``. Some chat templates write ``<think>`` in the generation prompt,
so that the model samples only ``</think>``. If such a thought is cut off, its text alone would look like an answer.
`Renderer.parse` therefore puts ``<think>`` before it, and the functions here need only a message's text.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def answer_of(text: str) -> str:
    """Return the text after the last ``</think>``, up to an unclosed ``<think>`` if there is one. May be empty."""
    return text.rpartition(CLOSE)[2].partition(OPEN)[0]


def split_thought(text: str, opened: bool = False) -> tuple[str, str]:
    """Split ``text`` into the thoughts at its beginning, tags included, and the rest.

    The rest is empty if a thought is not closed.

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
    """Return what a model would sample to say ``text`` after a generation prompt that opened a thought.

    If ``text`` has no thought, the result closes the thought at once. A leading ``<think>`` is removed, because the
    prompt already holds it.
    """
    stripped = text.lstrip()
    if stripped.startswith(OPEN):
        return stripped.removeprefix(OPEN).lstrip("\n")
    return text if CLOSE in text else f"\n{CLOSE}\n\n{text}"


def opening_of(prompt: str) -> str:
    """Return ``<think>`` and the whitespace after it if a generation prompt ends with them, else an empty string."""
    at = len(prompt.rstrip()) - len(OPEN)
    return prompt[at:] if prompt.rstrip().endswith(OPEN) else ""
