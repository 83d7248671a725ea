"""Where a model's thought ends and what it says begins.

A thought stands between ``<think>`` and ``</think>``. Some chat templates open it themselves, in the generation prompt:
then only its end is sampled. One that is cut off there would look like an answer, so `Renderer.parse`
puts the template's ``<think>`` before it, and whoever reads a message needs nothing but its text.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def answer_of(text: str) -> str:
    """What is said behind the last ``</think>``, up to a thought that is never closed; empty if all of it is that."""
    return text.rpartition(CLOSE)[2].partition(OPEN)[0]


def split_thought(text: str, opened: bool = False) -> tuple[str, str]:
    """The thoughts that ``text`` begins with, tags included, and the rest, empty where the last is never closed.

    ``opened``: the generation prompt has opened the first.
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


def behind_opening(text: str) -> str:
    """What is said behind a generation prompt that has opened a thought to give ``text``: one without a thought ends it
    at once, and one that begins with ``<think>`` goes on without it."""
    begun = text.lstrip()
    if begun.startswith(OPEN):
        return begun.removeprefix(OPEN).lstrip("\n")
    return text if CLOSE in text else f"\n{CLOSE}\n\n{text}"


def opening_of(prompt: str) -> str:
    """What of a generation prompt opens a thought: ``<think>`` and the space behind it, or nothing."""
    at = len(prompt.rstrip()) - len(OPEN)
    return prompt[at:] if prompt.rstrip().endswith(OPEN) else ""
