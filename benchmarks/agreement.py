"""Compares estimators, losses, importance corrections and KL estimates with those of verl and TRL on the same batches.

    python benchmarks/agreement.py [--batches 40] [--seed 0]

Requires verl, TRL or both; a library that is not installed is reported and skipped. The code of the other libraries is
called directly: verl's `core_algos` and `rollout_corr_helper`, and the scoring and loss methods of TRL's `GRPOTrainer`,
in which sampling, rewards and log-probs are replaced by given values. Batches are random, in float64 and float32, with
groups of 1 to 16, masks with gaps, rewards at the last trained token, and log-ratios up to the limit of the library.

The first table shows the largest difference over all batches. Differences of gradients are relative to the largest
gradient of the other library in the batch. Differences of values are relative to its largest value if that is above 1,
else absolute. Glean RL's advantages are float32 for any input, so a difference of 1e-7 means equality. The second table
shows intentional differences, each on a minimal example. The exit status is 1 if results differ that should agree.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Sequence

import torch

from agreement_cases import Check, Peer, draw

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5}


def verl() -> Peer:
    from agreement_verl import Verl

    return Verl()


def trl() -> Peer:
    from agreement_trl import Trl

    return Trl()


def differences(check: Check, batches: int, seed: int, dtype: torch.dtype) -> dict[str, float]:
    """Return the largest difference over all batches, for "values" and, if the check has one, for "gradient"."""
    largest: dict[str, float] = {}
    for number in range(batches):
        for what, (ours, theirs) in check.compare(draw(check, number, seed, dtype)).items():
            if ours.shape != theirs.shape:
                raise ValueError(f"{check.ours}: shape {list(ours.shape)}, the peer's {list(theirs.shape)}")
            scale = float(theirs.double().abs().max())
            if what == "values" or scale == 0:
                scale = max(1.0, scale)
            apart = float((ours.double() - theirs.double()).abs().max()) / scale
            worst = apart if math.isfinite(apart) else math.inf
            largest[what] = max(largest.get(what, 0.0), worst)
    return largest


def compare(peer: Peer, batches: int, seed: int) -> int:
    """Print both tables of a library, and return the number of rows that differ although they should agree."""
    print(f"\n## {peer.name} {peer.version}\n\nLargest differences of values and of gradients:\n")
    print("| ours | theirs | values, float64 | gradient, float64 | values, float32 | gradient, float32 | |")
    print("|---|---|---|---|---|---|---|")
    disagreeing = 0
    for check in peer.checks():
        cells, agrees = "", True
        for dtype, tolerance in TOLERANCE.items():
            found = differences(check, batches, seed, dtype)
            agrees = agrees and all(value <= tolerance for value in found.values())
            cells += "".join(f" {found[what]:.0e} |" if what in found else " |" for what in ("values", "gradient"))
        disagreeing += not agrees
        print(f"| {check.ours} | {check.theirs} |{cells} {'agrees' if agrees else '**DIFFERS**'} |", flush=True)
    print(f"\n| intentional difference | ours | {peer.name} |\n|---|---|---|")
    for difference in peer.differences():
        print(f"| {difference.about} | {difference.ours} | {difference.theirs} |")
    return disagreeing


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    peers: dict[str, Callable[[], Peer]] = {"verl": verl, "TRL": trl}
    disagreeing = 0
    for name, load in peers.items():
        try:
            peer = load()
        except ImportError as error:
            print(f"{name}: not compared, it cannot be imported here ({error})")
            continue
        disagreeing += compare(peer, options.batches, options.seed)
    sys.exit(1 if disagreeing else 0)


if __name__ == "__main__":
    main()
