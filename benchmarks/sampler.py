"""Compares the tokens per second of the samplers and of `model.generate` on the same multi-turn conversations.

    python benchmarks/sampler.py [--episodes 128] [--turns 12] [--runs 5] [--threads 1] [--only WAY ...]

All ways of sampling play the same episodes. A group of eight shares a first observation of 30 to 40 tokens; after each
answer the environment adds 4 to 20 tokens. The model has the size of the quickstart's and random weights. A quarter of
the vocabulary ends a turn, so that answers have about 4 and at most 16 tokens, like commands. The ways:

* ``generate``            `model.generate` on left-padded rows; the whole conversation is prefilled again in each turn,
                          as in most training loops;
* ``generate + cache``    the same with a left-padded `DynamicCache` that is kept across turns, in which each row is
                          padded to the longest answer and the longest observation of each turn;
* ``sampler``             `TransformersSampler`, deterministic, with the fused engine, and also with the model's own
                          modules;
* ``vllm``                `VllmSampler` in this process, deterministic, if vLLM is installed. All runs use one engine.
                          Before each run the weights are published, as part of the measured time; this also empties
                          the prefix cache.

Runs of the ways alternate, and the table shows medians. CPU seconds are those of the whole process; on a shared machine
they are a better measure than wall-clock seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from gleanrl.protocols import Sampler, SamplingParams
from gleanrl.samplers.engines import Engine, ModuleEngine
from gleanrl.samplers.transformers import TransformersSampler
from gleanrl.types import IntArray

VOCABULARY, CONTEXT, LONGEST, GROUP = 320, 1024, 16, 8
STOPS = tuple(range(1, VOCABULARY, 4))
PAD = 0


@dataclass(frozen=True)
class Work:
    """What the environment says: an opening and an observation after each turn for each episode, and the stop tokens.

    Each completion has at most `LONGEST` tokens.
    """

    openings: list[IntArray]
    observations: list[list[IntArray]]
    stops: tuple[int, ...] = STOPS

    @property
    def episodes(self) -> int:
        return len(self.openings)

    @property
    def turns(self) -> int:
        return len(self.observations[0])


def random_work(episodes: int, turns: int, seed: int = 0) -> Work:
    """Draw random tokens: an opening for each group, and an observation for each turn."""
    random = np.random.default_rng(seed)

    def text(low: int, high: int) -> IntArray:
        return random.integers(2, VOCABULARY, int(random.integers(low, high))).astype(np.int32)

    openings = [text(30, 41) for _ in range(-(-episodes // GROUP))]
    observations = [[text(4, 21) for _ in range(turns)] for _ in range(episodes)]
    return Work([openings[i // GROUP] for i in range(episodes)], observations)


def make_model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=True, pad_token_id=PAD,
        eos_token_id=list(STOPS),
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def by_sampler(model: Any, work: Work, engine: Callable[..., Engine] | None = None) -> int:
    sampler = TransformersSampler(model, max_rows=work.episodes, max_context=CONTEXT)
    if engine is not None:
        sampler.decoder.engine = engine(model, CONTEXT, torch.float32)

    async def run() -> int:
        sampled = await played(sampler, work)
        await sampler.close()
        return sampled

    return asyncio.run(run())


def by_vllm(sampler: Sampler, model: Any, work: Work) -> int:
    async def run() -> int:
        await sampler.publish(dict(model.named_parameters()), sampler.version + 1)
        return await played(sampler, work)

    return asyncio.run(run())


async def played(sampler: Sampler, work: Work) -> int:
    """Play all episodes concurrently and return the number of sampled tokens."""
    params = SamplingParams(LONGEST, work.stops)

    async def episode(i: int) -> int:
        prompt, sampled = work.openings[i], 0
        async with sampler.session(i) as session:
            for observation in work.observations[i]:
                completion = await session.sample(prompt, params)
                sampled += completion.tokens.size
                prompt = np.concatenate([prompt, completion.tokens, observation])
        return sampled

    return sum(await asyncio.gather(*map(episode, range(work.episodes))))


@torch.inference_mode()
def by_generate(model: Any, work: Work) -> int:
    prompts, sampled = list(work.openings), 0
    for turn in range(work.turns):
        longest = max(p.size for p in prompts)
        ids = torch.tensor(np.stack([np.pad(p, (longest - p.size, 0)) for p in prompts])).long()
        mask = torch.tensor(np.stack([np.arange(longest) >= longest - p.size for p in prompts])).long()
        answers = model.generate(ids, attention_mask=mask, max_new_tokens=LONGEST, do_sample=True, top_k=0)
        for i, answer in enumerate(answers[:, longest:].numpy().astype(np.int32)):
            answer = answer[: _length(answer, work.stops)]
            sampled += answer.size
            prompts[i] = np.concatenate([prompts[i], answer, work.observations[i][turn]])
    return sampled


@torch.inference_mode()
def by_generate_with_cache(model: Any, work: Work) -> int:
    longest = max(p.size for p in work.openings)
    ids = torch.tensor(np.stack([np.pad(p, (longest - p.size, 0)) for p in work.openings])).long()
    mask = torch.tensor(np.stack([np.arange(longest) >= longest - p.size for p in work.openings])).long()
    cache, sampled = DynamicCache(config=model.config), 0
    for turn in range(work.turns):
        answers = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=LONGEST, do_sample=True, top_k=0
        )
        new = answers[:, ids.shape[1] :].numpy()
        lengths = np.array([_length(answer, work.stops) for answer in new])
        sampled += int(lengths.sum())
        said = [observations[turn] for observations in work.observations]
        longest = max(s.size for s in said)
        more = torch.tensor(np.stack([np.pad(s, (longest - s.size, 0)) for s in said])).long()
        real = torch.tensor(np.stack([np.arange(longest) >= longest - s.size for s in said])).long()
        answered = torch.tensor(np.arange(new.shape[1]) < lengths[:, None]).long()
        ids, mask = torch.cat([answers, more], 1), torch.cat([mask, answered, real], 1)
    return sampled


def _length(answer: np.ndarray, stops: tuple[int, ...]) -> int:
    ends = np.flatnonzero(np.isin(answer, stops))
    return int(ends[0]) + 1 if ends.size else answer.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("episodes", 128), ("turns", 12), ("runs", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", metavar="WAY", help="of those above; else all that can run here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    model, work = make_model(), random_work(arguments.episodes, arguments.turns)
    ways: dict[str, Callable[[], int]] = {
        "generate": lambda: by_generate(model, work),
        "generate + cache": lambda: by_generate_with_cache(model, work),
        "sampler, modules": lambda: by_sampler(model, work, ModuleEngine),
        "sampler": lambda: by_sampler(model, work),
    }
    if find_spec("vllm") is not None:
        from gleanrl.samplers.vllm import VllmSampler

        engine = VllmSampler(model, max_rows=arguments.episodes, max_context=CONTEXT)
        ways["vllm"] = lambda: by_vllm(engine, model, work)
    ways = {way: play for way, play in ways.items() if way in (arguments.only or ways)}
    measured: dict[str, list[tuple[float, float, int]]] = {way: [] for way in ways}
    warm_up = random_work(8, 2)
    by_generate(model, warm_up), by_generate_with_cache(model, warm_up), by_sampler(model, warm_up)
    for run in range(arguments.runs):
        for way, play in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            sampled = play()
            measured[way].append((time.perf_counter() - wall, time.process_time() - cpu, sampled))
        print(f"run {run + 1} of {arguments.runs} done", flush=True)
    print(f"\n{arguments.episodes} episodes of {arguments.turns} turns, {arguments.threads} thread(s), medians:")
    print(f"{'way':18} {'wall s':>8} {'CPU s':>8} {'sampled':>8} {'tokens / wall s':>16} {'tokens / CPU s':>15}")
    for way, rows in measured.items():
        wall, cpu, sampled = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{way:18} {wall:8.2f} {cpu:8.2f} {sampled:8.0f} {sampled / wall:16.0f} {sampled / cpu:15.0f}")


if __name__ == "__main__":
    main()
