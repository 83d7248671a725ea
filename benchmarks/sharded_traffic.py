"""Prints what the ranks of a sharded learner send each other for each token, and the CPU time of an update.

    unshare -rn sh -c 'ip link set lo up; python benchmarks/sharded_traffic.py [--ranks 2] [--repeats 9]'

A mini-batch is computed with samples of 256 and of 512 tokens, in the same number of micro-batches. FSDP2 sends the
same bytes for both, so the difference of the bytes on the loopback interface, divided by that of the tokens, is what
the samples and results cost for each token. It is printed for a backward pass and for the computation of log-probs.
`unshare` gives the command a loopback interface of its own. The CPU times are medians over ``--repeats`` updates, of
rank 0 and of the other ranks, on one thread each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gleanrl.algorithms.batch import Sample
from gleanrl.config.settings import Config, LearnerSettings, LossSettings
from gleanrl.learners.distributed.sharded import ShardedEngine
from gleanrl.runtime.sharded import learner_ranks

SAMPLES = 64
CASES = {"every token by itself (ppo)": "ppo", "tokens of a whole update (kl_cov)": "kl_cov"}


def samples_of(length: int) -> list[Sample]:
    """Return random samples of ``length`` + 1 tokens, half of which are trained."""
    random = np.random.default_rng(0)
    found = []
    for number in range(SAMPLES):
        mask = np.arange(length + 1) > length // 2
        values = random.normal(-1, 0.1, (3, length + 1)).astype(np.float32) * mask
        tokens = random.integers(0, 64, length + 1).astype(np.int32)
        found.append(Sample(tokens, mask, values[0], values[1], abs(values[2]), False, 0, number, number // 8))
    return found


def new_model() -> Qwen2ForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=1, pad_token_id=0, **sizes))


def sent(work: Callable[..., object], samples: list[Sample]) -> int:
    """Return the number of bytes that ``work(samples)`` sends over the loopback interface."""
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    work(samples)
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = Config.model_validate(
        {"learner": {"ranks": args.ranks}, "model": {"device": "cpu"}, "run": {"threads": 1}}
    )
    with learner_ranks(config) as ranks:
        assert ranks is not None
        for name, loss in CASES.items():
            found: dict[str, list[int]] = {"backward": [], "score": []}
            for length in (256, 512):
                settings = LearnerSettings(tokens_per_microbatch=2 * length)
                engine = ShardedEngine(
                    ranks, new_model(), settings, LossSettings(name=loss), pad_token=0, temperature=1.0
                )
                samples = samples_of(length)
                engine.backward(samples)
                found["backward"].append(sent(engine.backward, samples))
                found["score"].append(sent(engine.score, samples))
            for call, (short, long) in found.items():
                print(f"{name}: {call} sends {(long - short) / (SAMPLES * 256):.1f} B for each token")
            others = psutil.Process().children()
            seconds: list[tuple[float, float, float]] = []
            for _ in range(args.repeats):
                began, own, their = time.perf_counter(), time.process_time(), sum(map(cpu, others))
                engine.backward(samples)
                engine.step(1.0, 1e-3)
                times = time.perf_counter() - began, time.process_time() - own, sum(map(cpu, others)) - their
                seconds.append(times)
            wall, own, their = (median(column) * 1e3 for column in zip(*seconds, strict=True))
            print(f"{name}: an update takes {wall:.0f} ms; CPU time {own:.0f} ms in rank 0, {their:.0f} ms in others")


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
