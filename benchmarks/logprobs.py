"""Measures memory and time of log-probs and entropies with a large vocabulary, forward and backward.

    python benchmarks/logprobs.py [--tokens 8192] [--vocabulary 151936] [--hidden 896] [--runs 3] [--threads 1]
        [--frozen] [--no-entropy] [--clock cpu]

Three implementations compute log-probs and entropies of T tokens from hidden states [T, H] and the weights of the
language-model head [V, H], and the gradients of both:

- naive: logits, log_softmax, gather, entropy from the softmax, and autograd;
- rows: `selected_log_softmax` on all logits, which the learner uses for small vocabularies;
- fused: `head_logprobs`, which the learner uses for large vocabularies.

Each run is a process of its own; runs of the implementations alternate, and medians are printed. The peak memory is the
largest resident memory minus that of the inputs and of their existing gradients. It includes the new gradient of the
head, which all implementations make. An implementation that would need more than ``--most`` GiB runs on fewer tokens,
and the table shows on how many.

The lower bound ("bound") is the time of four products [T, H] x [H, V], the minimum for the fused implementation. Each
product is computed for as many tokens at a time as fit into 1 GiB.

``--clock cpu`` measures CPU time instead of wall-clock time, for a shared machine. With ``--frozen`` the head has no
gradient, as when adapters are trained, and the bound is three products. With ``--no-entropy`` the loss does not contain
the entropy.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gleanrl.learners.fused_head import head_logprobs
from gleanrl.learners.logprobs import selected_log_softmax

GIB = 2**30
Values = tuple[Tensor, Tensor]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Values:
    log_p = (hidden @ weight.T).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def rows(hidden: Tensor, weight: Tensor, targets: Tensor) -> Values:
    return selected_log_softmax(hidden @ weight.T, targets)


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Values:
    return head_logprobs(hidden, weight, None, targets)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Values]] = {"naive": naive, "rows": rows, "fused": fused}
LOGITS_SIZED = {"naive": 6, "rows": 2.1, "fused": 0}  # number of tensors [T, V] at the peak of memory, rounded up


def fitting(way: str, options: argparse.Namespace) -> int:
    """Return the number of tokens, at most ``--tokens``, with which ``way`` needs at most ``--most`` GiB."""
    room = options.most * GIB - 3 * 4 * options.vocabulary * options.hidden
    needed = LOGITS_SIZED[way] * 4 * options.vocabulary
    return min(options.tokens, int(room / needed)) if needed else options.tokens


def resident() -> float:
    """Return the largest resident memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / GIB


def inputs(tokens: int, options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, options.hidden, requires_grad=True)
    weight = torch.randn(options.vocabulary, options.hidden).mul_(0.05).requires_grad_(not options.frozen)
    for leaf in (hidden, weight):
        leaf.grad = torch.empty_like(leaf).fill_(0.0) if leaf.requires_grad else None
    return hidden, weight, torch.randint(options.vocabulary, (tokens,))


def work(way: str, tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """Make one forward and backward pass, or only the products of the bound, and return the time and peak memory."""
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    hidden, weight, targets = inputs(tokens, options)
    before, started = resident(), clock()
    if way == "bound":
        products(hidden.detach(), weight.detach(), options)
        return {"seconds": clock() - started, "gib": 0.0}
    logp, entropy = WAYS[way](hidden, weight, targets)
    forward = clock() - started
    (logp.mean() if options.no_entropy else logp.mean() + 0.01 * entropy.mean()).backward()
    return {"seconds": clock() - started, "forward": forward, "gib": resident() - before}


def products(hidden: Tensor, weight: Tensor, options: argparse.Namespace) -> None:
    step = max(1, min(hidden.shape[0], GIB // (4 * weight.shape[0])))
    logits, back, gradient = torch.empty(step, weight.shape[0]), torch.empty_like(hidden), torch.zeros_like(weight)
    for start in range(0, hidden.shape[0], step):
        part = hidden[start : start + step]
        block = logits[: part.shape[0]]
        for _ in range(2):
            torch.mm(part, weight.t(), out=block)
        torch.mm(block, weight, out=back[start : start + step])
        if not options.frozen:
            gradient.addmm_(block.t(), part)


def in_a_process(way: str, tokens: int, arguments: Sequence[str]) -> dict[str, float]:
    command = [sys.executable, __file__, *arguments, "--way", way, "--tokens", str(tokens)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936, help="Qwen's by default")
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--most", type=float, default=12.0, help="GiB that an implementation may need")
    parser.add_argument("--frozen", action="store_true", help="no gradient of the head")
    parser.add_argument("--no-entropy", action="store_true", help="no gradient of the entropy")
    parser.add_argument("--way", choices=(*WAYS, "bound"), help="run only this way, here, and print JSON")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    torch.set_num_threads(options.threads)
    if options.way:
        print(json.dumps(work(options.way, options.tokens, options)))
        return
    tokens = {way: fitting(way, options) for way in WAYS} | {"bound": options.tokens}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in tokens}
    for _ in range(options.runs):
        for way, runs in found.items():
            if tokens[way] > 0:
                runs.append(in_a_process(way, tokens[way], given))
    print(
        f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden}, float32, "
        f"{options.threads} thread(s), {options.clock} clock, medians of {options.runs} run(s); all logits: "
        f"{4 * options.tokens * options.vocabulary / GIB:.2f} GiB"
    )
    print(f"{'':8} {'tokens':>7} {'peak GiB':>9} {'forward s':>10} {'total s':>8} {'us/token':>9} {'of bound':>9}")
    bound = statistics.median(run["seconds"] for run in found["bound"]) / options.tokens
    for way, runs in found.items():
        if not runs:
            print(f"{way:8} skipped: one token needs more than {options.most} GiB")
            continue
        seconds, forward, gib = (statistics.median(r.get(k, 0.0) for r in runs) for k in ("seconds", "forward", "gib"))
        each = seconds / tokens[way]
        fewer = "" if tokens[way] == options.tokens else f"  {options.tokens} tokens need over {options.most:g} GiB"
        print(
            f"{way:8} {tokens[way]:7} {gib:9.2f} {forward:10.2f} {seconds:8.2f} {each * 1e6:9.0f} "
            f"{each / bound:9.2f}{fewer}"
        )


if __name__ == "__main__":
    main()
