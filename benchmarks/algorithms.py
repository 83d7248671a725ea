"""Compares advantage estimators and losses by their learning curves on the quickstart, with equal steps and settings.

    python benchmarks/algorithms.py [--seeds 0 1 2] [--arms grpo remax ...] [--svg FILE] [--section.key value ...]

Each arm is `gleanrl train quickstart` with the settings in `ARMS`. All other settings are equal, so the learning rate
is not tuned for any arm. The seed determines the households, the demonstrations, the warm start and all samples, so the
arms of a seed start equal. "before" and "after" are the success rates of sampled attempts on held-out households;
"after" is the mean of the last two evaluations. The 95 % confidence interval is over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gleanrl.cli.main import parse_overrides
from gleanrl.runtime.run_folder import RunFolder
from replay_tables import interval

LATE = 2  # number of last evaluations whose mean is "after"
METRIC = "eval/sampled/pass@1"

ARMS: dict[str, dict[str, str]] = {
    "grpo": {},
    "dr_grpo": {"credit.estimator": "dr_grpo"},
    "grpo_passk": {"credit.estimator": "grpo_passk"},
    "rloo": {"credit.estimator": "rloo"},
    "opo": {"credit.estimator": "opo"},
    "gpg": {"credit.estimator": "gpg", "loss.name": "gpg"},
    "reinforce++": {"credit.estimator": "reinforce_plus_plus"},
    "reinforce++, last turn": {"credit.estimator": "reinforce_plus_plus", "credit.options.across_turns": "false"},
    "reinforce++ baseline": {"credit.estimator": "reinforce_plus_plus_baseline"},
    "remax": {"credit.estimator": "remax"},
    "gigpo": {"credit.estimator": "gigpo"},
    "gigpo, not normalized": {"credit.estimator": "gigpo", "credit.options.normalize": "false"},
    "state_gae": {"credit.estimator": "state_gae"},
    "ppo, critic of its own": {"credit.estimator": "gae"},
    "ppo, shared critic": {"credit.estimator": "gae", "critic.model": "shared"},
    "grpo + gspo": {"loss.name": "gspo"},
    "grpo + cispo": {"loss.name": "cispo"},
    "grpo + cispo, a third of the rate": {"loss.name": "cispo", "learner.lr": "1e-4"},
    "grpo + gspo, clip 0.03": {"loss.name": "gspo", "loss.clip_low": "0.03", "loss.clip_high": "0.04"},
    "grpo + reinforce": {"loss.name": "reinforce"},
    "grpo + clip_cov": {"loss.name": "clip_cov"},
    "grpo + kl_cov": {"loss.name": "kl_cov"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument(
        "--save", type=Path, help="add each run's numbers to this JSON-lines file, and skip those there"
    )
    parser.add_argument("--svg", type=Path, help="draw the curves there")
    args, rest = parser.parse_known_args()
    overrides = parse_overrides(rest)
    rows = [json.loads(line) for line in args.save.read_text().splitlines()] if args.save and args.save.exists() else []
    done = {(row["arm"], row["seed"]) for row in rows}
    wanted = [(arm, seed) for arm in args.arms for seed in args.seeds if (arm, seed) not in done]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda pair: one_run(*pair, overrides, Path(folder)), wanted):
            rows.append(row)
            print(f"{row['arm']}, seed {row['seed']}: {row['before']:.3f} -> {row['after']:.3f}", flush=True)
            if args.save:
                with args.save.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    rows = [row for row in rows if row["arm"] in args.arms and row["seed"] in args.seeds]
    show(rows, args.arms)
    if args.svg:
        args.svg.write_text(draw(rows, args.arms))


def one_run(arm: str, seed: int, overrides: Sequence[tuple[str, str]], folder: Path) -> dict:
    name = f"{list(ARMS).index(arm)}-{seed}"
    settings = {"run.seed": str(seed), "run.threads": "1", "monitor.rollouts_per_step": "0", **ARMS[arm]}
    settings |= {**dict(overrides), "run.folder": str(folder), "run.name": name}
    command = [sys.executable, "-m", "gleanrl", "train", "quickstart"]
    command += [f"--{key}={value}" for key, value in settings.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode:
        raise SystemExit(f"{arm}, seed {seed}: {ended.stderr.strip().splitlines()[-1]}")
    rows = RunFolder(folder / name).read_metrics()
    curve = sorted((row.step, row.metrics[METRIC]) for row in rows if METRIC in row.metrics)
    steps = [row.metrics for row in rows if "time/step_s" in row.metrics]
    return {
        "arm": arm,
        "seed": seed,
        "curve": curve,
        "before": curve[0][1],
        "after": statistics.mean(value for _, value in curve[-LATE:]),
        "step_s": statistics.median(metrics["time/step_s"] for metrics in steps),
        "train_s": statistics.median(metrics["time/train_s"] for metrics in steps),
    }


def show(rows: Sequence[Mapping], arms: Sequence[str]) -> None:
    seeds = sorted({row["seed"] for row in rows})
    columns = "".join(f"{f'seed {seed}':>9}" for seed in seeds)
    print(f"\n{'arm':<34}{'before':>8}{columns}{'mean':>8}{'±':>7}{'step s':>8}{'learner s':>11}")
    for arm in arms:
        own = {row["seed"]: row for row in rows if row["arm"] == arm}
        if not own:
            continue
        after = [own[seed]["after"] for seed in seeds if seed in own]
        cells = "".join(f"{own[seed]['after']:>9.3f}" if seed in own else f"{'':>9}" for seed in seeds)
        before, step, train = (
            statistics.mean(row[key] for row in own.values()) for key in ("before", "step_s", "train_s")
        )
        print(
            f"{arm:<34}{before:>8.3f}{cells}{statistics.mean(after):>8.3f}{interval(after):>7.3f}"
            f"{step:>8.2f}{train:>11.2f}",
            flush=True,
        )


def draw(rows: Sequence[Mapping], arms: Sequence[str]) -> str:
    """Draw the learning curves as an SVG and return its text.

    There is a panel for each arm, with thin lines for its seeds, a thick line for their mean, and a dashed grey line
    for the mean of GRPO.
    """
    arms = [arm for arm in arms if any(row["arm"] == arm for row in rows)]
    panel_width, panel_height, across = 230, 150, 4
    means = {arm: mean_curve([row["curve"] for row in rows if row["arm"] == arm]) for arm in arms}
    last = max(step for curve in means.values() for step, _ in curve)

    def line(points: Sequence[tuple[float, float]], style: str) -> str:
        at = (f"{30 + (panel_width - 75) * x / last:.1f},{panel_height - 22 - 108 * y:.1f}" for x, y in points)
        return f'<polyline fill="none" points="{" ".join(at)}" {style}/>'

    panels = []
    for index, arm in enumerate(arms):
        x, y = panel_width * (index % across), panel_height * (index // across)
        parts = [f'<text x="30" y="14" fill="#777" font-weight="bold">{arm}</text>']
        parts += [line([(0, v), (last, v)], 'stroke="#8884"') for v in (0.0, 0.5, 1.0)]
        parts += [
            f'<text x="26" y="{panel_height - 18 - 108 * v:.0f}" text-anchor="end" fill="#777">{v:.0%}</text>'
            for v in (0.0, 0.5, 1.0)
        ]
        if "grpo" in means and arm != "grpo":
            parts.append(line(means["grpo"], 'stroke="#999" stroke-width="2" stroke-dasharray="4 3"'))
        own = [row["curve"] for row in rows if row["arm"] == arm]
        parts += [line(curve, 'stroke="#2563eb" stroke-opacity="0.35"') for curve in own]
        parts.append(line(means[arm], 'stroke="#2563eb" stroke-width="2.5"'))
        end = means[arm][-1][1]
        height = panel_height - 18 - 108 * end
        parts.append(f'<text x="{panel_width - 42}" y="{height:.0f}" fill="#2563eb">{end:.0%}</text>')
        panels.append(f'<g transform="translate({x},{y})">{"".join(parts)}</g>')
    width, height = panel_width * min(across, len(arms)), panel_height * math.ceil(len(arms) / across)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
    return head + 'font-size="11">' + "".join(panels) + "</svg>\n"


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    return [(curves[0][i][0], statistics.mean(curve[i][1] for curve in curves)) for i in range(len(curves[0]))]


if __name__ == "__main__":
    main()
