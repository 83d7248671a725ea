"""The task and the model of the examples: spell a word backward, with a tiny model that is trained in seconds.

Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from gleanrl import Task
from gleanrl.config.settings import ModelSettings
from gleanrl.learners.supervised import fine_tune
from gleanrl.learners.tiny import build_model, build_tokenizer
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import Message, segment_arrays

LETTERS = "abcdefghij"


def word_tasks(count: int, *, length: int, seed: int) -> list[Task]:
    """Return tasks to spell ``count`` different random words of ``length`` letters backward.

    The id of a task depends only on its word, so it is the same in every run.
    """
    draw = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(draw.choices(LETTERS, k=length))] = None
    return [Task(f"backward/{word}", (Message(role="user", content=word),), {"word": word}) for word in words]


def correct(word: str, answer: str) -> float:
    """Return 1 if ``answer`` is ``word`` spelt backward, else 0."""
    return float(answer.strip() == word[::-1])


def warm_started(shown: Iterable[Task], *, steps: int, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make a tokenizer and a model of 0.2 M parameters, and fine-tune the model on the answers to the tasks ``shown``.

    With few ``steps`` the model solves some tasks only, so that RL can improve it.
    """
    tokenizer = build_tokenizer(LETTERS, vocabulary=128)
    settings = ModelSettings(hidden_size=64, layers=2, heads=4, kv_heads=4, max_context=64)
    model = build_model(settings, tokenizer, seed)
    renderer = Renderer(tokenizer)
    answers = [(*task.prompt, Message(role="assistant", content=task.payload["word"][::-1])) for task in shown]
    examples = [segment_arrays(renderer.demonstration(conversation))[:2] for conversation in answers]
    fine_tune(model, examples, steps=steps, batch=32, lr=3e-3, seed=seed)
    return model, tokenizer


def arguments(description: str) -> argparse.Namespace:
    """Parse the command line of an example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--members", type=int, default=4, help="answers sampled for each prompt")
    parser.add_argument("--words", type=int, default=32, help="number of words to train on")
    parser.add_argument("--warm-steps", type=int, default=72)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--pool", type=Path, help="file of the experience pool (default: a temporary file)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()
