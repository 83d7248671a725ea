"""Compares GRPO in the quickstart with two kinds of imitation learning, for the same time and from the same warm start.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--svg curve.svg] [--section.key value ...]

The seed determines the households of all three splits, the demonstrations, the warm start and all samples. Each arm
starts from the same warm-started weights and trains for the seconds that GRPO's steps took, without evaluations:

* ``grpo``: `gleanrl train quickstart`, unchanged.
* ``continued sft``: the supervised training of the warm start continues on the same demonstrations.
* ``filtered bc``: filtered behaviour cloning. It is the same run as ``grpo``, but the advantage of a success is 1 and
  that of a failure is 0. So the policy imitates its own successes, without a baseline, and learns nothing from
  failures. Its steps may be shorter, so it makes up to 15 % more steps if they fit into the time; the learning rate
  decays over this number.

"before" and "after" are the success rates of sampled attempts on held-out households. "after" is the mean of the last
three evaluations for GRPO, and a single evaluation with the same number of attempts for the other arms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from gleanrl.algorithms.advantages import Rewards, estimator
from gleanrl.cli.main import parse_overrides
from gleanrl.config import loading as configuration
from gleanrl.config.settings import Config
from gleanrl.learners.supervised import fine_tune
from gleanrl.protocols import Metrics
from gleanrl.rewards import EnvironmentReward
from gleanrl.runtime.evaluation import evaluate
from gleanrl.runtime.local import Builder, closing
from gleanrl.runtime.prepare import Prepared, prepare, supervised_examples
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.schedule.schedule import Schedule
from gleanrl.tracking.monitors import Console, load_monitors
from gleanrl.train import train
from gleanrl.types import Group
from gleanrl.utils.seeding import derive

LATE = 3  # number of GRPO's last evaluations whose mean is "after"
METRIC = "eval/sampled/pass@1"


@estimator("filtered_bc", group_local=True)
def filtered_bc(rewards: Rewards) -> tuple[torch.Tensor, torch.Tensor]:
    """Use the score, which is 1 for a success and 0 for a failure, as the advantage of each token."""
    scores = rewards.scores[:, None]
    return scores, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--svg", type=Path, help="draw GRPO's curves there, the controls beside them")
    parser.add_argument("--save", type=Path, help="add each seed's numbers to this JSON-lines file")
    parser.add_argument("--saved", type=Path, help="show what --save wrote instead of running anything")
    args, rest = parser.parse_known_args()
    overrides = parse_overrides(rest)
    rows = [json.loads(line) for line in args.saved.read_text().splitlines()] if args.saved else []
    for seed in [] if args.saved else args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(one_seed(args.preset, seed, overrides, Path(folder), Console()))
        if args.save:
            with args.save.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        show(rows)
    if args.saved:
        show(rows)
    if args.svg:
        args.svg.write_text(draw(rows))


def one_seed(preset: str, seed: int, overrides: Sequence[tuple[str, str]], folder: Path, console: Console) -> dict:
    def load(name: str, *more: tuple[str, str]) -> Config:
        own = [("run.seed", str(seed)), ("run.folder", str(folder)), ("run.name", name), ("monitor.use", '["file"]')]
        return configuration.load(preset, [*own, *overrides, *more])

    config = load("grpo")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    seconds, evaluations = asyncio.run(grpo(config, prepare(config, console), console))
    late = [value for step, value in sorted(evaluations.items())][-LATE:]
    sft = prepare(config, console)
    examples = supervised_examples(config, sft.tokenizer, sft.demonstrations)
    settings = config.warm_start
    # The rate is half that of the warm start. A lower constant rate would waste the time, and a higher one would undo
    # the warm start.
    fine_tune(
        sft.model,
        examples,
        steps=10**6,
        batch=settings.batch,
        lr=settings.lr / 2,
        seed=derive(seed, "continued"),
        deadline_s=seconds,
    )
    after_sft = asyncio.run(measure(config, sft, console))
    steps = ("run.steps", str(math.ceil(1.15 * config.run.steps)))
    bc = load("bc", ("credit.estimator", "filtered_bc"), steps, ("evaluation.every", "0"))
    prepared = prepare(bc, console)
    asyncio.run(for_seconds(bc, prepared, seconds, console))
    after_bc = asyncio.run(measure(bc, prepared, console))
    return {
        "seed": seed,
        "seconds": seconds,
        "curve": sorted(evaluations.items()),
        "before": evaluations[0],
        "grpo": statistics.mean(late),
        "continued sft": after_sft,
        "filtered bc": after_bc,
    }


async def grpo(config: Config, prepared: Prepared, console: Console) -> tuple[float, dict[int, float]]:
    """Train with GRPO. Returns the seconds of all steps, and the success rate of each evaluation by step."""
    folder = RunFolder(config.path)
    folder.path.mkdir(parents=True)
    monitors = partial(load_monitors, config.monitor, console=console)
    async with Builder(config, folder, prepared, console).run(monitors, resume=False) as run:
        await train(run)
    rows = folder.read_metrics()
    seconds = sum(row.metrics.get("time/step_s", 0.0) for row in rows)
    return seconds, {row.step: row.metrics[METRIC] for row in rows if METRIC in row.metrics}


async def for_seconds(config: Config, prepared: Prepared, seconds: float, console: Console) -> None:
    """Train until the steps have taken ``seconds``. The weights of ``prepared.model`` are trained in place."""
    folder = RunFolder(config.path)
    folder.path.mkdir(parents=True)
    monitors = partial(load_monitors, config.monitor, console=console)
    async with Builder(config, folder, prepared, console).run(monitors, resume=False) as run:
        told, left = run.observer.on_step, seconds

        def step(number: int, groups: Sequence[Group], metrics: Metrics) -> None:
            nonlocal left
            told(number, groups, metrics)
            left -= metrics["time/step_s"]
            if left <= 0:
                run.interruption.interrupt()

        run.observer.on_step = step  # type: ignore[method-assign]
        await train(run)


async def measure(config: Config, prepared: Prepared, console: Console) -> float:
    """Return the success rate of the prepared model over as many attempts as the last `LATE` evaluations of GRPO."""
    builder = Builder(config, RunFolder(config.path), prepared, console)
    async with closing(builder.sampler(Schedule.from_settings(config.schedule), None, None)) as sampler:
        await sampler.publish(dict(prepared.model.named_parameters()), 0)
        async with builder.environment_pool() as pool:
            found = await evaluate(
                builder.player(pool, sampler),
                EnvironmentReward(),
                prepared.evaluation,
                seed=builder.seed("evaluation"),
                samples=LATE * config.evaluation.samples,
                greedy=False,
            )
    return found.metrics()[METRIC]


def show(rows: Sequence[dict]) -> None:
    names = ["before", "continued sft", "filtered bc", "grpo"]
    print("\nsuccess rate on held-out households before training, and after training each arm for the same time")
    print(f"{'seed':<6}{'seconds':>9}" + "".join(f"{name:>15}" for name in names))
    for row in rows:
        print(f"{row['seed']:<6}{row['seconds']:>9.0f}" + "".join(f"{row[name]:>15.3f}" for name in names))
    mean = {name: statistics.mean(row[name] for row in rows) for name in names}
    print(f"{'mean':<15}" + "".join(f"{mean[name]:>15.3f}" for name in names), flush=True)


def draw(rows: Sequence[dict]) -> str:
    """Draw an SVG and return its text.

    It shows GRPO's success on held-out households by step, with a line for each seed and one for their mean, and the
    mean final success of the other arms as horizontal lines.
    """
    width, height, left, bottom = 720, 360, 52, 40
    last = rows[0]["curve"][-1][0]

    def at(step: float, value: float) -> str:
        x = left + (width - left - 150) * step / last
        return f"{x:.1f},{height - bottom - (height - bottom - 16) * value:.1f}"

    def line(points: Sequence[tuple[float, float]], style: str) -> str:
        return f'<polyline fill="none" points="{" ".join(at(*point) for point in points)}" {style}/>'

    def label(step: float, value: float, text: str, style: str, dx: int = 8) -> str:
        x, y = at(step, value).split(",")
        return f'<text x="{float(x) + dx:.1f}" y="{float(y) + 4:.1f}" {style}>{text}</text>'

    curves = [row["curve"] for row in rows]
    mean = [(step, statistics.mean(curve[i][1] for curve in curves)) for i, (step, _) in enumerate(curves[0])]
    grey, blue = 'fill="#777"', 'fill="#2563eb" font-weight="bold"'
    parts = [line([(0, v), (last, v)], 'stroke="#8884" stroke-width="1"') for v in (0, 0.25, 0.5, 0.75, 1)]
    parts += [label(0, v, f"{v:.0%}", grey + ' text-anchor="end"', -8) for v in (0, 0.25, 0.5, 0.75, 1)]
    parts += [line(curve, 'stroke="#2563eb" stroke-opacity="0.35" stroke-width="1.5"') for curve in curves]
    parts += [
        line(mean, 'stroke="#2563eb" stroke-width="3"'),
        label(last, mean[-1][1] + 0.055, f"GRPO {mean[-1][1]:.0%}", blue),
    ]
    for name in ("continued sft", "filtered bc", "before"):
        level = statistics.mean(row[name] for row in rows)
        parts += [line([(0, level), (last, level)], 'stroke="#777" stroke-width="1.5" stroke-dasharray="5 5"')]
        parts += [label(last, level, f"{name} {level:.0%}", grey)]
    below = grey + ' text-anchor="middle" dy="20"'
    parts += [label(last * quarter / 4, 0, f"{last * quarter // 4}", below, 0) for quarter in range(4)]
    parts += [label(last, 0, f"{last} steps", below, 0)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
    return head + 'font-size="13">' + "".join(parts) + "</svg>\n"


if __name__ == "__main__":
    main()
