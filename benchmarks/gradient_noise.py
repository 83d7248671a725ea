"""Measures how noisy the policy gradient of an estimator is, at fixed weights.

    python benchmarks/gradient_noise.py [--steps 0 20] [--batches 40] [--seed 0] [--domain "few tasks"]

The policy is that of `atlas.py` after the warm start and some steps of GRPO. With its weights, batches of the domain's
size are sampled, and each estimator computes the gradient of the loss on the same batches. Columns:

* noise: the variance of a batch's gradient, summed over all weights, divided by the squared norm of the expected
  gradient, both without bias. So many batches have to be averaged until noise and signal are equal. With its standard
  error from leaving out one batch after the other (jackknife).
* objective: the mean cosine between a batch's gradient and that of the expected success. The latter is the mean over
  the other batches with ``dr_grpo``. Its noise makes all cosines too low, by the same factor. With the standard error
  over batches, as if they were independent.
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
from gleanrl.types import FloatArray, Group, GroupSpec
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
        for name, (noise, noise_error, cosine, cosine_error, to_grpo, idle) in rows.items():
            cells = [name, f"{noise:.1f} ± {noise_error:.1f}", f"{cosine:.3f} ± {cosine_error:.3f}"]
            print(f"| {' | '.join([*cells, f'{to_grpo:.2f}', f'{idle:.0%}'])} |", flush=True)


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
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad / normaliser for p in parameters]
        caught.append(torch.cat([gradient.flatten() for gradient in gradients]))
        for parameter in parameters:
            parameter.grad = None
        return 0.0

    engine.step = step
    await learner.update(batch)
    [made] = caught
    return made


def row(gradients: Mapping[str, Tensor], name: str) -> tuple[float, float, float, float, float]:
    own, objective = gradients[name].double(), gradients[OBJECTIVE].double()
    count, products = len(own), (own @ own.T).numpy()
    left_out = [noise_to_signal(np.delete(np.delete(products, each, 0), each, 1)) for each in range(count)]
    error = np.sqrt((count - 1) / count * np.square(np.subtract(left_out, np.mean(left_out))).sum())
    others = (objective.sum(0) - objective) / (count - 1)
    cosines = torch.nn.functional.cosine_similarity(own, others).numpy()
    to_grpo = torch.nn.functional.cosine_similarity(own.mean(0), gradients["grpo"].double().mean(0), dim=0)
    cosine_error = cosines.std(ddof=1) / np.sqrt(count)
    return noise_to_signal(products), float(error), float(cosines.mean()), float(cosine_error), float(to_grpo)


def noise_to_signal(products: FloatArray) -> float:
    """Return the summed variance of a gradient, divided by the squared norm of its expectation.

    ``products`` float64 [n, n]: the inner products of the gradients of n batches. Both parts are unbiased if the
    batches are independent and alike: the mean product of two different gradients estimates the squared norm.
    """
    count, own = len(products), products.trace()
    signal = (products.sum() - own) / (count * (count - 1))
    return float((own / count - signal) / signal)


if __name__ == "__main__":
    main()
