"""Measures the preset `smollm2`: success before and after training, minutes, processor time and memory.

    make smollm2 ARGS=--dry-run          # installs the model
    .venv/bin/python benchmarks/smollm2.py [--seeds 0 1] [--section.key value ...]

Each seed is one `gleanrl train smollm2` in a process of its own, from an empty cache, so that the time includes the
conversion of the model and the warm start. The seed determines the households of all splits, the demonstrations and all
samples. Success is that of sampled attempts on held-out households, with its 95 % interval over households. The first
line shows what the machine's matrix product reaches at the model's sizes, in each dtype, with all threads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gleanrl.runtime.run_folder import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args, rest = parser.parse_known_args()
    speeds = [f"{name} {product(getattr(torch, name)):.0f} GFLOP/s" for name in ("float32", "bfloat16")]
    print(f"matrix product, {torch.get_num_threads()} threads: {', '.join(speeds)}")
    print("| seed | success before | success after | minutes | of the processor | memory, GB | settings |")
    print("|---|---|---|---|---|---|---|")
    for seed in args.seeds:
        print(one_run(seed, rest), flush=True)


def product(dtype: torch.dtype) -> float:
    """Return the speed of a matrix product of 1024 rows with the model's largest weight, in GFLOP/s; the best of 20."""
    rows, weight = torch.randn(1024, 576, dtype=dtype), torch.randn(576, 1536, dtype=dtype)
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        rows @ weight
        best = min(best, time.perf_counter() - started)
    return 2 * 1024 * 576 * 1536 / best / 1e9


def one_run(seed: int, settings: Sequence[str]) -> str:
    """Train once, and return a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, "-m", "gleanrl", "train", "smollm2", "--run.folder", folder, "--run.name", "run"]
        environment = {**os.environ, "GLEANRL_CACHE": f"{folder}/cache"}
        # `wait4` gives what this child used, and `RUSAGE_CHILDREN` the sum and the maximum over all seeds so far.
        child = subprocess.Popen([*command, "--run.seed", str(seed), *settings], env=environment)
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - started
        if status:
            raise SystemExit(f"seed {seed}: `gleanrl train` ended with {os.waitstatus_to_exitcode(status)}")
        name = "eval/sampled/pass@1"
        rows = [row.metrics for row in RunFolder(Path(folder) / "run").read_metrics() if name in row.metrics]
    cells = [f"{row[name]:.0%} ({row[f'{name}_low']:.0%} to {row[f'{name}_high']:.0%})" for row in (rows[0], rows[-1])]
    minutes = [f"{wall / 60:.0f}", f"{(used.ru_utime + used.ru_stime) / 60:.0f}"]
    return f"| {' | '.join([str(seed), *cells, *minutes, f'{used.ru_maxrss / 1e6:.1f}', ' '.join(settings)])} |"


if __name__ == "__main__":
    main()
