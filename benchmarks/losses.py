"""Measures the time of each policy loss, in milliseconds and as a share of the model's forward and backward pass.

    python benchmarks/losses.py [--rounds 20] [--threads 1] [--clock cpu]

Measured is `objective`, with its statistics, from the log-probs to the gradient of the log-probs. A third of the tokens
is replayed. The last row of the table is ppo with all corrections and penalties that can be added to it. The share
refers to a forward and backward pass of the quickstart's model over the same number of tokens, all trained, in
micro-batches of the size that the learner uses on a CPU; one micro-batch is measured and multiplied. The last line
shows the time to build a batch, as a share of the passes over it. All figures are medians, in float32.

``--clock cpu`` measures CPU time instead of wall-clock time, for a shared machine. With one thread on an idle machine,
both are equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gleanrl.algorithms.batch import build
from gleanrl.algorithms.loss import POLICY_LOSSES, Tokens, objective
from gleanrl.config.settings import CreditSettings, LossSettings
from gleanrl.learners.engine import CPU_TOKENS_PER_MICROBATCH
from learner import make_groups, make_model

TOKENS = (2_048, 16_384, 131_072)
SEQUENCE = 128  # trained tokens per sequence
ROW = 256  # tokens per row in the model's pass
EVERYTHING = LossSettings(
    correction="mask", correction_level="sequence", kl_coefficient=0.1, entropy_coefficient=0.01
)  # beside ppo


def make_tokens(count: int) -> tuple[Tokens, Tensor, Tensor]:
    """Make random inputs of a loss: the tokens, the log-probs of a reference policy, and the entropies."""
    torch.manual_seed(0)
    old = -torch.rand(count) * 3
    logp = (old + 0.1 * torch.randn(count)).requires_grad_()
    sequence = torch.arange(count) // SEQUENCE
    behaviour = old + 0.01 * torch.randn(count)
    tokens = Tokens(logp, old, torch.randn(count // SEQUENCE)[sequence], sequence, sequence % 3 == 0, behaviour)
    return tokens, old + 0.1 * torch.randn(count), torch.rand(count)


def loss_pass(settings: LossSettings, count: int) -> Callable[[], None]:
    tokens, ref_logp, entropy = make_tokens(count)
    weights = torch.full((count,), 1 / count)

    def run() -> None:
        # a new object, because `Tokens` caches intermediate results
        fresh = Tokens(**{name: getattr(tokens, name) for name in tokens.__dataclass_fields__})
        values = objective(
            fresh, settings, entropy=entropy, ref_logp=ref_logp if settings.kl_coefficient else None
        ).values
        torch.autograd.grad((weights * values).sum(), fresh.logp)

    return run


def model_pass() -> Callable[[], None]:
    """Return a function that makes a forward and backward pass over one micro-batch in which all tokens are trained."""
    model = make_model()
    tokens = torch.randint(model.config.vocab_size, (CPU_TOKENS_PER_MICROBATCH // ROW, ROW))

    def run() -> None:
        logits = model(input_ids=tokens, use_cache=False).logits
        logits.log_softmax(-1).gather(-1, tokens[..., None]).sum().backward()
        model.zero_grad()

    return run


def median(run: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    run()
    seconds = []
    for _ in range(rounds):
        started = clock()
        run()
        seconds.append(clock() - started)
    return statistics.median(seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter

    micro = median(model_pass(), max(options.rounds // 2, 3), clock)
    print(
        f"{options.threads} thread(s); a model pass takes {1e3 * micro:.0f} ms for {CPU_TOKENS_PER_MICROBATCH} tokens"
    )
    print("milliseconds of each loss, and their share of the passes over the same tokens\n")
    print(f"{'':24}" + "".join(f"{f'{count:,} tokens':>26}" for count in TOKENS))
    rows = {name: LossSettings(name=name) for name in POLICY_LOSSES.names()} | {"ppo, everything": EVERYTHING}
    for name, settings in rows.items():
        cells = []
        for count in TOKENS:
            seconds = median(loss_pass(settings, count), options.rounds, clock)
            share = seconds / (micro * count / CPU_TOKENS_PER_MICROBATCH)
            cells.append(f"{1e3 * seconds:>12.2f} ms, {share:>8.2%}")
        print(f"{name:24}" + "".join(f"{cell:>26}" for cell in cells))

    groups = make_groups(16, 0.0)
    batch = build(groups, CreditSettings(), LossSettings(), 1024)
    seconds = median(lambda: build(groups, CreditSettings(), LossSettings(), 1024), options.rounds, clock)
    tokens = sum(sample.tokens.size for sample in batch.samples)
    share = seconds / (micro * tokens / CPU_TOKENS_PER_MICROBATCH)
    print(
        f"batch.build: {1e3 * seconds:.2f} ms for {len(batch.samples)} samples of {tokens:,} tokens, "
        f"{share:.2%} of the passes over them"
    )


if __name__ == "__main__":
    main()
