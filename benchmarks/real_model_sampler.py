"""Compares the sampler with `generate` and with the machine's own matrix product, on a real language model.

    python benchmarks/real_model_sampler.py --model DIR [--episodes 32] [--turns 6] [--runs 3] [--only WAY ...]
                                            [--profile]

``DIR`` is a Hugging Face model directory or a name on the Hub; the figures in the docs are of SmolLM2-135M-Instruct.

Episodes are of ALFWorld's generated households, in the model's chat template. A group of eight shares a first
observation of about 95 tokens; each later one has 16 to 54 tokens, 30 on average. The model samples 16 tokens a turn at
temperature 1, whatever they are, so that all ways compute the same number of tokens. The ways:

* ``generate + cache``  `model.generate` with a left-padded `DynamicCache` that is kept across turns (see `sampler.py`);
* ``sampler``           `TransformersSampler`, deterministic;
* ``vllm``              `VllmSampler` in this process, where vLLM is installed (docs/howto/vllm.md says how).

Runs of the ways alternate, and the table shows medians of CPU seconds of the whole process. A run of a sampler begins
with a publication of the weights, as each step of training does; it counts as prefill.

The second table compares the sampler with matrix products alone. Products at the shapes of the model's linear layers
are measured between the runs, with as many rows as a pass of prefill has tokens, and with as many as there are
episodes. The share of the product is the time that the products of all tokens would take at this speed, divided by the
time that the sampler took. Attention, which these products leave out, therefore lowers it. Each of these products is
repeated with one weight, which stays in the processor's cache. A decoding step reads the weights of all layers from
memory; the column "from memory" shows the speed of the products where each has a weight of its own.

``--profile`` runs the sampler once more, and shows for each phase in which operators of torch its time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.rollout.renderer import Renderer
from gleanrl.samplers.transformers import TransformersSampler
from real_model import MODEL, layer_shapes, peak
from sampler import GROUP, Work, by_generate_with_cache, by_vllm, played

CONTEXT, NOISE, PREFILL_ROWS = 1024, 0.5, 512


def household_work(tokenizer: Any, episodes: int, turns: int) -> Work:
    """Return the observations of household episodes that a noisy expert plays, as tokens with the chat template's."""
    renderer, taskset = Renderer(tokenizer), AlfworldTaskset()
    tasks = taskset.tasks("train", -(-episodes // GROUP))

    def tokens(turns: Any) -> np.ndarray:
        return np.concatenate([turn.tokens for turn in turns])

    openings, observations = [], []
    for index in range(episodes):
        shown: list[np.ndarray] = []
        seed = index * 100
        while len(shown) < turns:  # a short game is followed by another one in the same household
            messages, _ = taskset.demonstrate(tasks[index // GROUP], seed=seed, noise=NOISE)
            shown += [tokens(renderer.extend([message], closed=True)) for message in messages[2::2]]
            seed += 1
        openings.append(tokens(renderer.start(messages[:1])))
        observations.append(shown[:turns])
    return Work(openings, observations, stops=())


@torch.no_grad()
def from_memory(config: Any, rows: int, dtype: torch.dtype, repeats: int = 5) -> float:
    """Return FLOP per CPU second of the products of a forward pass with ``rows`` rows, by different weights each."""
    products, work = [], 0.0
    for (outputs, inputs), layers in layer_shapes(config).items():
        x, y = torch.randn(rows, inputs).to(dtype), torch.empty(rows, outputs, dtype=dtype)
        products += [(x, torch.ones(outputs, inputs, dtype=dtype).t(), y) for _ in range(layers)]
        work += 2 * rows * layers * outputs * inputs
    times = []
    for _ in range(repeats):
        started = time.process_time()
        for x, weight, y in products:
            torch.mm(x, weight, out=y)
        times.append(time.process_time() - started)
    return work / statistics.median(times)


class PhaseClock:
    """A timeline of a sampler that adds up the CPU seconds of this process, and the rows and tokens, of each phase.

    While ``profiling``, it also adds up the microseconds of each operator of torch on the sampler's thread, by phase.
    """

    def __init__(self) -> None:
        self.profiling = False
        self.operators = {"prefill": Counter[str](), "decode": Counter[str]()}
        self._profiler: torch.profiler.profile | None = None
        self.reset()

    def reset(self) -> None:
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.prefilled = self.answered = 0  # tokens of prefill, and requests whose first token it sampled
        self._last = time.process_time()

    def record(self, kind: str, start: float, end: float, **tags: Any) -> None:
        now = time.process_time()
        self.seconds[kind] += now - self._last
        self._last = now
        self.prefilled += tags.get("tokens", 0)
        self.answered += tags.get("rows", 0)
        if self._profiler is not None:
            self._profiler.stop()
            for operator in self._profiler.key_averages():
                self.operators[kind][operator.key] += operator.self_cpu_time_total
            self._profiler = None
        # A phase begins where the previous one ends. The first prefill, with which the profile begins, is left out.
        if self.profiling:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profiler.start()

    def show_operators(self, most: int = 12) -> None:
        for kind, operators in self.operators.items():
            total = sum(operators.values())
            print(f"\nOperators of {kind}, shares of their time:")
            for operator, microseconds in operators.most_common(most):
                print(f"  {operator:50} {microseconds / total:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help=f"directory or name on the Hub (default {MODEL})")
    for name, default in (("episodes", 32), ("turns", 6), ("runs", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--profile", action="store_true", help="also show where the sampler's time goes")
    parser.add_argument("--only", nargs="+", metavar="WAY", help="of those above; else all that can run here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = getattr(torch, arguments.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    work = household_work(AutoTokenizer.from_pretrained(arguments.model), arguments.episodes, arguments.turns)
    clock = PhaseClock()
    sampler = TransformersSampler(model, max_rows=work.episodes, max_context=CONTEXT, dtype=dtype, timeline=clock)

    async def by_sampler() -> int:
        await sampler.publish(dict(model.named_parameters()), sampler.version + 1)
        return await played(sampler, work)

    ways: dict[str, Callable[[], int]] = {
        "generate + cache": lambda: by_generate_with_cache(model, work),
        "sampler": lambda: asyncio.run(by_sampler()),
    }
    if find_spec("vllm") is not None:
        from gleanrl.samplers.vllm import VllmSampler

        engine = VllmSampler(model, max_rows=work.episodes, max_context=CONTEXT, dtype=dtype)
        ways["vllm"] = lambda: by_vllm(engine, model, work)
    ways = {way: play for way, play in ways.items() if way in (arguments.only or ways)}
    measured: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    products: list[tuple[float, float]] = []
    streamed: list[tuple[float, float]] = []
    phases: list[tuple[float, float]] = []  # CPU seconds of prefill, with the publication, and of decoding
    prefilled = answered = 0  # of a run of the sampler, see `PhaseClock`
    for _ in range(arguments.runs):
        rates = [peak(model.config, rows, dtype, train=False).forward for rows in (PREFILL_ROWS, work.episodes)]
        products.append((rates[0], rates[1]))
        rates = [from_memory(model.config, rows, dtype) for rows in (PREFILL_ROWS, work.episodes)]
        streamed.append((rates[0], rates[1]))
        for way, play in ways.items():
            clock.reset()
            started = time.process_time()
            sampled = play()
            measured[way].append((time.process_time() - started, sampled))
            print(f"{way}: {sampled} tokens in {measured[way][-1][0]:.1f} CPU s", flush=True)
            if way == "sampler":
                phases.append((clock.seconds["prefill"], clock.seconds["decode"]))
                prefilled, answered = clock.prefilled, clock.answered
    print(f"\n{work.episodes} episodes of {work.turns} turns, {arguments.threads} thread(s), medians:")
    print(f"{'way':18} {'CPU s':>8} {'sampled':>8} {'tokens / CPU s':>15}")
    for way, rows in measured.items():
        cpu, sampled = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{way:18} {cpu:8.2f} {sampled:8.0f} {sampled / cpu:15.1f}")
    if not phases:
        return
    weights = sum(layers * outputs * inputs for (outputs, inputs), layers in layer_shapes(model.config).items())
    head = model.config.vocab_size * model.config.hidden_size
    body = weights - head
    sampled = measured["sampler"][0][1]
    decoded = sampled - answered
    flops = (2 * body * prefilled + 2 * head * answered, 2 * (body + head) * decoded)
    columns = f"{'GFLOP / CPU s':>14} {'product alone':>14} {'share':>7} {'from memory':>12}"
    print(f"\n{'phase':10} {'tokens':>8} {'CPU s':>8} {columns}")
    ideal = total = 0.0
    for which, (name, tokens) in enumerate((("prefill", prefilled), ("decoding", decoded))):
        seconds = statistics.median(phase[which] for phase in phases)
        rate = statistics.median(product[which] for product in products)
        least = flops[which] / rate
        ideal, total = ideal + least, total + seconds
        read = statistics.median(rates[which] for rates in streamed)
        cells = f"{flops[which] / seconds / 1e9:14.1f} {rate / 1e9:14.1f} {least / seconds:7.0%} {read / 1e9:12.1f}"
        print(f"{name:10} {tokens:8} {seconds:8.2f} {cells}")
    cells = f"{sum(flops) / total / 1e9:14.1f} {'':14} {ideal / total:7.0%}"
    print(f"{'both':10} {prefilled + decoded:8} {total:8.2f} {cells}")
    if arguments.profile:
        clock.profiling = True
        asyncio.run(by_sampler())
        clock.show_operators()


if __name__ == "__main__":
    main()
