"""Computes the figures of `docs/concepts/schedules.md`: simulations of verl's measurement (PR 2854) and of variants.

python benchmarks/simulation.py        # a few minutes; no GPU, no torch
"""

from __future__ import annotations

import shlex
import sys

from gleanrl.cli.main import main

COMMANDS = (
    "--published",
    "--published --call 0 --schedules pipelined",
    "--published --evaluate-every 0 --call 0 --schedules sync,pipelined,one_step_off,pipelined_one_step_off",
    "--latency constant:200 --concurrency 10000 --samples 400 --schedules one_step_off --steps 20",
    "--latency constant:200 --concurrency 10000 --samples 400 --schedules one_step_off --steps 20 --first train",
)

if __name__ == "__main__":
    for command in COMMANDS:
        print(f"$ gleanrl simulate {command}", flush=True)
        if status := main(["simulate", *shlex.split(command)]):
            sys.exit(status)
        print()
