"""Measures how noisy the policy gradient of an estimator is, at fixed weights.

    python benchmarks/gradient_noise.py [--steps 0 20] [--batches 40] [--seed 0] [--domain "few tasks"]

The policy is that of `atlas.py` after the warm start and some steps of GRPO. With its weights, batches of the domain's
size are sampled, and each estimator computes the gradient of the loss on the same batches. Columns:

* noise: the variance of a batch's gradient, summed over all weights, divided by the squared norm of the mean gradient.
  So many batches have to be averaged until noise and signal are equal.
* objective: the mean cosine between a batch's gradient and that of the expected success. The latter is the mean over
  the other batches with ``dr_grpo``, whose expectation it is. Its noise makes all cosines too low, by the same factor.
* to ``grpo``: the cosine between the mean gradients of the estimator and of ``grpo``.
* without: the share of groups whose members all have the advantage 0.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_arms import DOMAINS
from gleanrl.algorithms.batch import build
from gleanrl.config.settings import CreditSettings
from gleanrl.learners.torch import TorchLearner
from gleanrl.rewards import EnvironmentReward
from gleanrl.runtime.evaluation import evaluate
from gleanrl.runtime.local import Builder, closing
from gleanrl.runtime.prepare import prepare
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.schedule import Schedule
from gleanrl.tracking.monitors import Console, load_monitors
from gleanrl.train import train
from gleanrl.types import Group, GroupSpec
from replay_gain import configured, quiet_folder

OBJECTIVE = "dr_grpo"
ESTIMATORS: dict[str, CreditSettings] = {
    OBJECTIVE: CreditSettings(estimator="dr_grpo"),
    "grpo": CreditSettings(estimator="grpo"),
    "gigpo": CreditSettings(estimator="gigpo"),
    "gigpo, gamma 1": CreditSettings(estimator="gigpo", options={"gamma": 1.0}),
    "gigpo, weight 4": CreditSettings(estimator="gigpo", options={"weight": 4.0}),
    "state_gae": CreditSettings(estimator="state_gae"),
    "discounted": CreditSettings(estimator=f"{__file__.replace('gradient_noise', 'atlas_designs')}:discounted"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 20], help="steps of GRPO before the batches")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--domain", choices=list(DOMAINS), default="few tasks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for steps in args.steps:
        with quiet_folder() as folder:
            settings = {**DOMAINS[args.domain], "run.steps": max(steps, 1), "learner.updates_per_step": 1}
            config = configured((args.domain, "grpo", 1e-4, args.seed), folder, settings)
            success, rows = asyncio.run(measured(config, steps, args.batches))
        print(f"\n{args.domain}, after {steps} steps: success {success:.2f}, {args.batches} batches\n")
        print("| estimator | noise | objective | to grpo | without |\n|---|---|---|---|---|")
        for name, cells in rows.items():
            print(f"| {name} | {cells[0]:.1f} | {cells[1]:.3f} | {cells[2]:.2f} | {cells[3]:.0%} |", flush=True)


async def measured(config: Any, steps: int, batches: int) -> tuple[float, dict[str, tuple[float, ...]]]:
    """Train for ``steps``, and return the success of the policy then, and the row of each estimator."""
    folder, console = RunFolder(config.path), Console()
    prepared = prepare(config, console)
    builder = Builder(config, folder, replace(prepared, evaluation=prepared.evaluation[:1]), console)
    if steps:
        async with builder.run(partial(load_monitors, config.monitor, console=console), resume=False) as run:
            await train(run)
    learner = builder.learner(None, None)
    if steps:
        learner.load(folder.checkpoints_path / f"step-{steps}")
    groups = await sampled(builder, learner, batches)
    scores = [member.score.value for batch in groups for group in batch for member in group.trajectories]
    gradients = {name: [] for name in ESTIMATORS}
    idle = dict.fromkeys(ESTIMATORS, 0)
    for own in groups:
        for name, credit in ESTIMATORS.items():
            batch = build(own, credit, config.loss, builder.max_context)
            idle[name] += sum(all(sample.zero_advantage for sample in part.samples) for part in batch.parts)
            gradients[name].append(await gradient(learner, batch))
    found = {name: torch.stack(own) for name, own in gradients.items()}
    total = batches * config.schedule.batch
    return float(np.mean(scores)), {name: (*row(found, name), idle[name] / total) for name in ESTIMATORS}


async def sampled(builder: Builder, learner: TorchLearner, batches: int) -> list[list[Group]]:
    """Return ``batches`` lists of groups of training tasks, which are taken in turn, with the learner's weights."""
    size, members = builder.config.schedule.batch, builder.config.schedule.group
    tasks, found = builder.prepared.train, []
    schedule = Schedule.from_settings(builder.config.schedule)
    async with closing(builder.sampler(schedule, None, None)) as sampler, builder.environment_pool() as pool:
        await sampler.publish(learner.weights(), 0)
        player = builder.player(pool, sampler)
        for number in range(batches):
            own = [tasks[(number * size + place) % len(tasks)] for place in range(size)]
            played = await evaluate(player, EnvironmentReward(), own, seed=number, samples=members, greedy=False)
            pairs = zip(own, played.sampled, strict=True)
            found.append(
                [Group(GroupSpec(task, members), tuple(row), place) for place, (task, row) in enumerate(pairs)]
            )
    return found


async def gradient(learner: TorchLearner, batch: Any) -> Tensor:
    """Return the gradient of the loss on ``batch``, float32 [weights]. The weights stay as they are."""
    engine: Any = learner.engine
    caught: list[Tensor] = []

    def step(normaliser: float, lr: float, **options: Any) -> float:
        parameters = engine.backend.parameters
        caught.append(torch.cat([(p.grad / normaliser).flatten() for p in parameters if p.grad is not None]))
        for parameter in parameters:
            parameter.grad = None
        return 0.0

    engine.step = step
    await learner.update(batch)
    [made] = caught
    return made


def row(gradients: Mapping[str, Tensor], name: str) -> tuple[float, float, float]:
    own = gradients[name].double()
    signal, noise = signal_and_noise(own)
    objective = gradients[OBJECTIVE].double()
    others = (objective.sum(0) - objective) / (len(objective) - 1)
    cosines = torch.nn.functional.cosine_similarity(own, others)
    to_grpo = torch.nn.functional.cosine_similarity(own.mean(0), gradients["grpo"].double().mean(0), dim=0)
    return noise / signal, float(cosines.mean()), float(to_grpo)


def signal_and_noise(gradients: Tensor) -> tuple[float, float]:
    """Return the squared norm of the expected gradient, and the summed variance of one, both without bias.

    ``gradients``: float64 [n, weights], of independent batches.
    """
    count = len(gradients)
    squares = float(gradients.square().sum() / count)
    signal = (float(gradients.sum(0).square().sum()) - count * squares) / (count * (count - 1))
    return signal, squares - signal


if __name__ == "__main__":
    main()
