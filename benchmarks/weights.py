"""Compares the time to publish weights from a learner to samplers on one node with that of a memory copy.

    python benchmarks/weights.py [--sizes 1e6 1e8 1e9] [--samplers 2] [--repeats 5] [--way memory broadcast]

For each number of parameters, in float32 (bfloat16 from ``--half`` parameters on), these times are printed:

* offer: with "memory", the copy to Ray's object store, which is made once for all samplers; with "broadcast", the time
  until the broadcast begins;
* take: from then until all ``--samplers`` processes have the weights in their tensors;
* publish: the sum of both, as in a run;
* memcpy: a copy of all tensors to existing ones in one thread, as a sampler makes when it loads weights.

The figures are medians of ``--repeats`` publications, after one that is not counted. The values that the samplers have
received are checked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from gleanrl.config.settings import RaySettings
from gleanrl.runtime.ray import cluster as clusters
from gleanrl.runtime.ray.actors import ActorPool, ActorServer
from gleanrl.runtime.ray.samplers import SamplerPool
from gleanrl.runtime.ray.weights import Broadcast, Stored, WeightHandle, WeightReceiver, WeightSource
from gleanrl.tracking.monitors import Console

TENSORS = 20  # number of tensors of equal size that the parameters are divided into


def tensors(parameters: int, half: bool, value: float) -> dict[str, torch.Tensor]:
    dtype = torch.bfloat16 if half else torch.float32
    return {f"layer.{n}": torch.full((parameters // TENSORS,), value, dtype=dtype) for n in range(TENSORS)}


def copy_weights(targets: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Copy ``weights`` into the tensors ``targets`` of the same names."""
    for name, target in targets.items():
        target.copy_(weights[name])


class Holder(WeightSource):
    """The service of an actor that publishes weights in place of a learner."""

    def __init__(self, _driver: ActorServer, threads: int) -> None:
        super().__init__()
        torch.set_num_threads(threads)
        self._held: dict[str, torch.Tensor] = {}

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._held

    async def hold(self, parameters: int, half: bool) -> None:
        await self.changing()
        self._held = {}
        self._held = tensors(parameters, half, 1.0)

    async def change(self) -> tuple[float, int]:
        """Change the values of all tensors in place. Returns the new value and the number of the weights."""
        await self.changing()
        for tensor in self._held.values():
            tensor.add_(1)
        return float(next(iter(self._held.values()))[0]), self.number


class Taker(WeightReceiver):
    """The service of an actor that receives weights in place of a sampler."""

    def __init__(self, _driver: ActorServer, threads: int) -> None:
        torch.set_num_threads(threads)
        self._targets: Mapping[str, torch.Tensor] = {}

    async def hold(self, parameters: int, half: bool) -> None:
        self._targets = {}
        self._targets = tensors(parameters, half, 0.0)

    async def publish(self, _lane: str, source: Stored | Broadcast, _version: int) -> float:
        weights = await self.receive(source)
        started = time.perf_counter()
        await asyncio.to_thread(copy_weights, self._targets, weights)
        return time.perf_counter() - started

    async def seen(self) -> tuple[float, float]:
        """Return the smallest and the largest value in the tensors."""
        bounds = [torch.aminmax(tensor) for tensor in self._targets.values()]
        return min(float(b.min) for b in bounds), max(float(b.max) for b in bounds)

    async def copied(self) -> float:
        """Return the seconds of a copy of the tensors within this process."""
        source = {name: tensor.clone() for name, tensor in self._targets.items()}
        started = time.perf_counter()
        copy_weights(self._targets, source)
        return time.perf_counter() - started


async def measure(cluster: Any, args: argparse.Namespace) -> None:
    holder = ActorPool(cluster, "learner", 1, Holder, (args.threads,))
    takers = ActorPool(cluster, "sampler", args.samplers, Taker, (args.threads,))
    await asyncio.gather(holder.start(), takers.start())
    (learner,), samplers = holder.members.values(), list(takers.members.values())
    columns = ("offer", "take", "publish", "memcpy")
    print(
        f"{'parameters':>12}{'type':>10}{'way':>11}"
        + "".join(f"{f'{name} ms':>12}" for name in columns)
        + "  publish / memcpy"
    )
    try:
        for parameters in map(int, args.sizes):
            half = parameters >= args.half
            for link in (learner, *samplers):
                await link.ask("hold", parameters, half)
            for way in args.way:
                row = await repeated(SamplerPool(takers, way, fall_back=False), learner, samplers, args.repeats)
                times = row["publish"] / row["memcpy"]
                told = "".join(f"{1e3 * row[name]:12.1f}" for name in columns)
                print(
                    f"{parameters:>12,}{'bfloat16' if half else 'float32':>10}{way:>11}{told}{times:19.1f}", flush=True
                )
    finally:
        await asyncio.gather(holder.close(), takers.close())


async def repeated(pool: SamplerPool, learner: Any, samplers: list[Any], repeats: int) -> dict[str, float]:
    rows: list[dict[str, float]] = []
    for repeat in range(repeats + 1):
        value, number = await learner.ask("change")
        started = time.perf_counter()
        await pool.publish("train", WeightHandle(learner, number), repeat)
        publish = time.perf_counter() - started
        seconds, pool.actors.cluster.seconds = pool.actors.cluster.seconds, {}
        for link in samplers:
            if await link.ask("seen") != (value, value):
                raise SystemExit("a sampler does not hold what was sent")
        rows.append(
            {
                "offer": seconds["publish_offer_s"],
                "take": publish - seconds["publish_offer_s"],
                "publish": publish,
                "memcpy": await samplers[0].ask("copied"),
            }
        )
    return {name: median(row[name] for row in rows[1:]) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e8, 1e9])
    parser.add_argument("--half", type=float, default=1e9, help="from so many parameters on in bfloat16")
    parser.add_argument("--samplers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--way", nargs="+", default=["memory"], choices=["memory", "broadcast"])
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    settings = RaySettings(samplers=args.samplers)
    with clusters.open_cluster(settings, Console(), {"learner": 1, "sampler": args.samplers}) as cluster:
        asyncio.run(measure(cluster, args))


if __name__ == "__main__":
    main()
