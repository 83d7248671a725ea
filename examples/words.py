"""The small job of the examples here: spell a word backward, with a model made on the spot. Nothing is downloaded."""

from __future__ import annotations

import random
from collections.abc import Iterable

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from gleanrl import Task
from gleanrl.context import Renderer
from gleanrl.learners.supervised import fine_tune
from gleanrl.learners.tiny import build_model, build_tokenizer
from gleanrl.settings import ModelSettings
from gleanrl.types import Message, segment_arrays

LETTERS = "abcdefghij"


def word_tasks(count: int, *, length: int, seed: int) -> list[Task]:
    """``count`` different words of ``length`` letters; a word's task has the same id in every run."""
    draw = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(draw.choices(LETTERS, k=length))] = None
    return [Task(f"backward/{word}", (Message(role="user", content=word),), {"word": word}) for word in words]


def correct(word: str, answer: str) -> float:
    """1 for the word spelt backward, or else 0."""
    return float(answer.strip() == word[::-1])


def warm_started(shown: Iterable[Task], *, steps: int, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A model of 0.2 M parameters that saw the answers of ``shown`` for a few seconds: it is right now and then."""
    tokenizer = build_tokenizer(LETTERS, vocabulary=128)
    settings = ModelSettings(hidden_size=64, layers=2, heads=4, kv_heads=4, max_context=64)
    model = build_model(settings, tokenizer, seed)
    renderer = Renderer(tokenizer)
    answers = [(*task.prompt, Message(role="assistant", content=task.payload["word"][::-1])) for task in shown]
    examples = [segment_arrays(renderer.demonstration(conversation))[:2] for conversation in answers]
    fine_tune(model, examples, steps=steps, batch=32, lr=3e-3, seed=seed)
    return model, tokenizer
