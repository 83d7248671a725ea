"""Compares the learner with the machine's own matrix product, on a real language model.

    python benchmarks/real_model.py peak --model DIR [--threads 1] [--dtypes float32 bfloat16]

``DIR`` is a Hugging Face model directory or a name on the Hub; the figures in the docs are of SmolLM2-135M-Instruct.

``peak`` measures matrix products at the shapes of the model's linear layers: the product of a forward pass and the two
of a backward pass, with as many rows as a micro-batch has tokens, and the product of a forward pass with 32 rows, as in
a decoding step of a sampler. Times are CPU seconds of the process, and each figure is a median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gleanrl.learners.engine import CPU_TOKENS_PER_MICROBATCH

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DECODING_ROWS = 32
HEAD_ROWS = 512  # most rows of a product with more outputs than `WIDE`, so that its result takes 100 MB and not 400
WIDE = 16384


# --- the machine's matrix product ---------------------------------------------------------------
@dataclass(frozen=True)
class Peak:
    """FLOP per CPU second of the matrix products of a model's linear layers."""

    forward: float  # outputs = inputs @ weight.T
    input_gradient: float  # gradient of the outputs @ weight
    weight_gradient: float  # gradient of the outputs, transposed, @ inputs

    @property
    def training(self) -> float:
        """FLOP per CPU second of all three, which have the same number of FLOP each."""
        return 3 / (1 / self.forward + 1 / self.input_gradient + 1 / self.weight_gradient)

    @property
    def frozen(self) -> float:
        """FLOP per CPU second of a forward pass and of the gradient of the inputs, as in training of adapters."""
        return 2 / (1 / self.forward + 1 / self.input_gradient)


def layer_shapes(config: Any) -> Counter[tuple[int, int]]:
    """Return how many linear layers of a model have each shape (outputs, inputs), its head included."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return Counter((module.out_features, module.in_features) for module in linear)


@torch.no_grad()
def peak(config: Any, rows: int, dtype: torch.dtype = torch.float32, repeats: int = 5, *, train: bool = True) -> Peak:
    """Measure the matrix products of a model's linear layers with ``rows`` rows, in CPU seconds of this process.

    The time of each shape is a median over ``repeats``, and counts as often as the model has layers of this shape.

    Args:
        config: the model's configuration (transformers).
        train: whether to measure the products of a backward pass too; without them, their rates are infinite.
    """
    work, seconds = 0.0, [0.0, 0.0, 0.0]
    for (outputs, inputs), layers in layer_shapes(config).items():
        used = min(rows, HEAD_ROWS) if outputs > WIDE else rows
        x, weight, y = (torch.randn(shape).to(dtype) for shape in ((used, inputs), (outputs, inputs), (used, outputs)))
        to_x, to_weight = torch.empty_like(x), torch.empty_like(weight)
        products = [(x, weight.t(), y), (y, weight, to_x), (y.t(), x, to_weight)]
        work += 2 * layers * outputs * inputs
        for which, (left, right, out) in enumerate(products[: 3 if train else 1]):
            seconds[which] += layers * _median_seconds(left, right, out, repeats) / used
    return Peak(*(work / taken if taken else float("inf") for taken in seconds))


def _median_seconds(left: Tensor, right: Tensor, out: Tensor, repeats: int) -> float:
    """Return the CPU seconds of a product. A short one is repeated, because the clock has a resolution."""
    times, flop = [], 2 * left.shape[0] * left.shape[1] * right.shape[1]
    count = max(1, round(2e8 / flop))
    torch.mm(left, right, out=out)
    for _ in range(repeats):
        started = time.process_time()
        for _ in range(count):
            torch.mm(left, right, out=out)
        times.append((time.process_time() - started) / count)
    return statistics.median(times)


def show_peak(config: Any, dtypes: Sequence[str], repeats: int) -> None:
    print(f"{'GFLOP per CPU second':24} {'forward':>9} {'to inputs':>10} {'to weights':>11} {'together':>9}")
    for name in dtypes:
        dtype = getattr(torch, name)
        for rows, train in ((CPU_TOKENS_PER_MICROBATCH, True), (DECODING_ROWS, False)):
            seen = peak(config, rows, dtype, repeats, train=train)
            cells = f"{seen.forward / 1e9:9.1f}"
            if train:
                cells += f" {seen.input_gradient / 1e9:10.1f} {seen.weight_gradient / 1e9:11.1f}"
                cells += f" {seen.training / 1e9:9.1f}"
            print(f"{f'{name}, {rows} rows':24} {cells}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("peak",))
    parser.add_argument("--model", default=MODEL, help=f"directory or name on the Hub (default {MODEL})")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    options = parser.parse_args(arguments)
    from transformers import AutoConfig

    torch.set_num_threads(options.threads)
    config = AutoConfig.from_pretrained(options.model)
    show_peak(config, options.dtypes, options.rounds)


if __name__ == "__main__":
    main()
