"""Compares the greedy answers of an exported model in plain transformers with those in vLLM.

    gleanrl export RUN --out DIR
    .venv-vllm/bin/python benchmarks/exported_model.py DIR [--prompts 50] [--tokens 32]

`make .venv-vllm/.installed` makes the environment with both libraries. Each gets the directory and conversations, and
nothing else: the template, the stop token and the context's length are those of the directory. transformers answers
with ``generate(do_sample=False)``, one conversation at a time; vLLM with ``LLM.chat(temperature=0)``, all of them
together. Both compute in float32.

The conversations are of held-out households of the preset smollm2. A noisy expert plays, and its game is cut in front
of one of its commands: at the first observation, or after 1 to 5 commands. An answer has at least ``--least`` tokens,
because commands are short, and then ends where the model ends it, or after ``--tokens`` tokens.

A greedy token has the largest of the logits, so rounding may change it where the two largest are nearly equal. Where
two answers differ, the gap between these two logits at the first differing token is therefore printed. The last lines
say how close to such a tie the answers of transformers come at any token, and by how much the log-prob of a token
differs that both have chosen after the same tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from gleanrl.config import loading
from gleanrl.environments.alfworld import AlfworldTaskset

COMMANDS, NOISE = 6, 0.3  # the longest game that is cut has one command less

Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """A greedy answer: token ids, the log-prob of each token, and the gap between the two largest logits at each.

    vLLM returns no logits, so that the gaps of its answers are empty.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="DIR", help="directory that `gleanrl export` has written")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--least", type=int, default=16, help="fewest tokens of an answer")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    asked = conversations(arguments.prompts)
    ours = by_transformers(arguments.model, asked, arguments.least, arguments.tokens)
    theirs = by_vllm(arguments.model, asked, arguments.least, arguments.tokens)

    equal, differences = 0, [0.0]
    for number, (plain, served) in enumerate(zip(ours, theirs, strict=True)):
        equal += plain.tokens == served.tokens
        for place, (token, other) in enumerate(zip(plain.tokens, served.tokens, strict=False)):
            if token != other:
                gap, where = plain.gaps[place], f"token {place} is {token} in transformers and {other} in vLLM"
                print(f"prompt {number}: {where}; the two largest logits differ by {gap:.2g}")
                break
            differences.append(abs(plain.logprobs[place] - served.logprobs[place]))
    lengths = [len(answer.prompt) for answer in ours]
    gaps = sorted(gap for answer in ours for gap in answer.gaps)
    prompts = sum(plain.prompt == served.prompt for plain, served in zip(ours, theirs, strict=True))
    print("\n| | |\n|---|---|")
    print(f"| prompts, of {min(lengths)} to {max(lengths)} tokens | {len(asked)} |")
    print(f"| with equal tokens | {prompts} |")
    print(f"| with equal answers | {equal} |")
    print(f"| tokens of the answers | {len(gaps)} |")
    print(f"| smallest gaps between the two largest logits | {', '.join(f'{gap:.2g}' for gap in gaps[:3])} |")
    print(f"| largest difference of a log-prob | {max(differences):.1g} |")


def conversations(count: int) -> list[Conversation]:
    """Return ``count`` conversations of held-out households, each of which ends with an observation."""
    taskset = AlfworldTaskset(**loading.load("smollm2").environment.options)
    cut: list[Conversation] = []
    for number, task in enumerate(taskset.tasks("eval", count)):
        messages, _ = taskset.demonstrate(task, seed=number, noise=NOISE)
        commands = min(number % COMMANDS, sum(message["role"] == "assistant" for message in messages) - 1)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        cut.append([dict(message) for message in messages[: answers[commands]]])
    return cut


@torch.inference_mode()
def by_transformers(folder: Path, asked: Sequence[Conversation], least: int, most: int) -> list[Answer]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"min_new_tokens": least, "max_new_tokens": most, "return_dict_in_generate": True, "output_scores": True}
    found = []
    for messages in asked:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        result = model.generate(**prompt, do_sample=False, **options)
        scores = torch.cat(result.scores)
        best = scores.topk(2).values
        read = prompt["input_ids"][0].tolist()
        answer = result.sequences[0, len(read) :]
        logprobs = scores.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        columns = (answer.tolist(), logprobs.tolist(), (best[:, 0] - best[:, 1]).tolist())
        found.append(Answer(tuple(read), *map(tuple, columns)))
    return found


def by_vllm(folder: Path, asked: Sequence[Conversation], least: int, most: int) -> list[Answer]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    # "processed" log-probs are of logits without the stop token where it is not allowed, as transformers' scores are
    options = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30, "logprobs_mode": "processed_logprobs"}
    engine = LLM(str(folder), dtype="float32", **options)
    params = SamplingParams(temperature=0.0, min_tokens=least, max_tokens=most, logprobs=0)
    found = []
    for output in engine.chat(list(asked), params, use_tqdm=False):
        answer = output.outputs[0]
        logprobs = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        found.append(Answer(tuple(output.prompt_token_ids), tuple(answer.token_ids), tuple(logprobs)))
    return found


if __name__ == "__main__":
    main()
