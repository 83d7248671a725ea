"""Separates a model's thoughts from its answer.

A thought is the text between ``<think>`` and ``</think>``. Some chat templates write ``<think>`` in the generation
prompt, so that the model samples only ``</think>``. If such a thought is cut off, its text has neither of the tags and
would look like an answer. `Renderer.parse` therefore adds ``<think>`` at its beginning, so that `answer_of` can
separate thought and answer in the content of every message.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def answer_of(text: str) -> str:
    """Return the text after the last ``</think>``, or the whole text if it has none.

    The result ends before a ``<think>`` that is not closed. It may be empty.
    """
    return text.rpartition(CLOSE)[2].partition(OPEN)[0]


def split_thought(text: str, opened: bool = False) -> tuple[str, str]:
    """Split ``text`` into the thoughts at its beginning, including their tags, and the rest.

    If a thought is not closed, the rest is empty. ``opened`` is true if the generation prompt has opened the first
    thought, so that the text begins within it.
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
    """Return the text that a model would sample to answer ``text`` after a generation prompt that opens a thought.

    If ``text`` contains no thought, the result begins with ``</think>``. If it begins with ``<think>``, this tag is
    removed, because the generation prompt contains it.
    """
    stripped = text.lstrip()
    if stripped.startswith(OPEN):
        return stripped.removeprefix(OPEN).lstrip("\n")
    return text if CLOSE in text else f"\n{CLOSE}\n\n{text}"


def opening_of(prompt: str) -> str:
    """Return the end of a generation prompt that opens a thought: ``<think>`` and the whitespace after it.

    Returns an empty string if the prompt does not open a thought.
    """
    at = len(prompt.rstrip()) - len(OPEN)
    return prompt[at:] if prompt.rstrip().endswith(OPEN) else ""
