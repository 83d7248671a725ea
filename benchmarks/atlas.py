"""Compares published designs for learning from more of the experience, in one harness and with many seeds.

    python benchmarks/atlas.py run --sweep [--arms NAME ...] [--jobs N] [--save FILE]
    python benchmarks/atlas.py run [--seeds 0 1 ...] [--lrs RATE ...] [--domains NAME ...] [--arms ...] [--jobs N]
    python benchmarks/atlas.py [show] [--seeds ...] [--domains ...] [--arms ...] [--save FILE] [--svg FILE]

The arms are in `atlas_arms.py`, and docs/reference/atlas.md states their sources and the rules of the comparison. A run
is made as by `replay_gain.py`, but only its last checkpoint is evaluated. The policy after the warm start, which all
arms of a domain and seed share, is evaluated once, as the arm `warm start`.

`run --sweep` makes runs in `FIRST_DOMAIN` with `SWEEP_SEED` and each of `RATES`; the best rate of an arm is its rate
in all domains. `run` makes the runs that count, with other seeds, in three stages: `FIRST_SEEDS` in `FIRST_DOMAIN`,
the same seeds in all domains, all `SEEDS`. Arms get to the second stage by `goes_on` and to the third by
`is_promising`, with their controls.
Both append a JSON line to FILE (default: `results/atlas.jsonl`) for each run, and skip runs that it already contains.
`show` prints the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import replay_tables as tables
from atlas_arms import ARMS, CONTROLS, CURRICULA, DOMAINS, HALVED, REFERENCE
from replay_gain import Job, configured, evaluated, measured, processor, quiet_folder, read, run_all
from replay_tables import WHAT, Row

RESULTS = Path(__file__).parent / "results" / "atlas.jsonl"
FIRST_SEEDS = range(5)
SEEDS = range(14)
AIM = 0.05  # gain of held-out success over the reference that is worth a change of the default
FIRST_DOMAIN = "few tasks"
SWEEP_SEED = 100
RATES = (5e-5, 1e-4, 2e-4)
SAMPLES = (3, 2)  # attempts at each held-out and at each training task
WARM_START = "warm start"
_UNREAD = (
    *("time/", "pool/bucket/", "pool/refused/", "pool/evicted/", "pool/bytes", "pool/newly_retired", "pool/unretired"),
    *("loss/approx_kl", "loss/mismatch", "loss/ratio/", "loss/replayed/approx_kl", "loss/replayed/mismatch"),
    *("replay/on", "replay/progress", "replay/source/", "replay/retrieved", "replay/planned", "reward/valid"),
)

Runs = Mapping[str, Mapping[int, Row]]  # by arm and seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"], nargs="?", default="show")
    parser.add_argument("--save", type=Path, default=RESULTS, help="JSON lines")
    parser.add_argument("--svg", type=Path, help="show: draw the differences to the reference there")
    parser.add_argument("--domains", nargs="+", choices=list(DOMAINS), default=list(DOMAINS), metavar="DOMAIN")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--sweep", action="store_true", help="run: make the runs that choose the learning rates")
    parser.add_argument("--lrs", type=float, nargs="+", help="run: default: each arm's best one of the sweep")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: run: as above; show: all")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    args = parser.parse_args()
    rows = read(args.save)
    if args.what == "show":
        if args.seeds is not None:
            rows = [row for row in rows if row["seed"] in (*args.seeds, SWEEP_SEED)]
        show(rows, args.domains, args.arms)
        if args.svg:
            gains = pooled(rows, args.domains)
            args.svg.write_text(draw({arm: own for arm, own in gains.items() if arm in args.arms}))
        return
    if not (args.sweep or args.lrs) and (unswept := [arm for arm in args.arms if not is_swept(rows, arm)]):
        parser.error(f"`run --sweep` is not complete for {', '.join(unswept)}; complete it, or name --arms or --lrs")
    if args.sweep:
        swept = [arm for arm in args.arms if tuned_as(arm) == arm]
        run_all(wanted(rows, [SWEEP_SEED], [FIRST_DOMAIN], swept, RATES), one_run, args.save, args.jobs)
        return
    if args.seeds is not None:
        run_all(wanted(rows, args.seeds, args.domains, args.arms, args.lrs), one_run, args.save, args.jobs)
        return
    arms = [arm for arm in args.arms if tuned_as(arm) == arm]  # the controls of an arm that goes on follow
    stages = (
        ([FIRST_DOMAIN], FIRST_SEEDS, goes_on),
        (args.domains, FIRST_SEEDS, is_promising),
        (args.domains, SEEDS, None),
    )
    for domains, seeds, chosen in stages:
        print(f"{', '.join(arms)}: {', '.join(domains)}, {len(seeds)} seeds", flush=True)
        run_all(wanted(rows, seeds, domains, arms, args.lrs), one_run, args.save, args.jobs)
        rows = read(args.save)
        arms = [arm for arm in args.arms if chosen and chosen(rows, arm, domains)]


def wanted(
    rows: Sequence[Row], seeds: Sequence[int], domains: Sequence[str], arms: Sequence[str], lrs: Sequence[float] | None
) -> list[Job]:
    """Return the runs of ``arms``, seed by seed, after those of all warm starts. ``lrs``: None means each arm's own."""
    starts: list[Job] = [(domain, WARM_START, 0.0, seed) for seed in seeds for domain in domains]
    return starts + [
        (domain, arm, lr, seed)
        for seed in seeds
        for domain in domains
        for arm in arms
        for lr in lrs or [rate_of(rows, arm)]
    ]


def goes_on(rows: Sequence[Row], arm: str, domains: Sequence[str]) -> bool:
    """Return whether a gain of `AIM` is within an arm's interval of `gain`.

    A control goes on with the arm that it belongs to, and the reference and its controls always do.
    """
    arm = CONTROLS.get(arm, arm)
    mean, half = gain(rows, arm, domains)
    return arm == REFERENCE or mean + half >= AIM


def is_promising(rows: Sequence[Row], arm: str, domains: Sequence[str]) -> bool:
    """Return whether an arm's interval of `gain` is above 0.

    A control goes on with the arm that it belongs to, and the reference always does, without its controls.
    """
    own = CONTROLS.get(arm, arm)
    mean, half = gain(rows, own, domains)
    return arm == REFERENCE or mean > half


def gain(rows: Sequence[Row], arm: str, domains: Sequence[str]) -> tuple[float, float]:
    """Return an arm's difference of held-out success to the reference over all ``domains``, and half its interval.

    Only `FIRST_SEEDS` count. The interval has the deviation of all arms together. Both are NaN for the reference, and
    for an arm that has not run in all domains.
    """
    rows = [row for row in rows if row["seed"] in (*FIRST_SEEDS, SWEEP_SEED)]
    if arm == REFERENCE or not all(arm in counted(rows, domain) for domain in domains):
        return math.nan, math.nan
    gains = pooled(rows, domains)[arm]["held-out"]
    deviation, freedom = residual(successes(rows, domains, "held_out"))
    return statistics.mean(gains), tables.student(freedom + 1) * deviation * math.sqrt(2 / len(gains))


def successes(rows: Sequence[Row], among: Sequence[str], what: str) -> dict[str, dict[int, float]]:
    """Return the final success by arm and seed: the mean over the domains ``among``, for seeds in all."""
    by_domain = [counted(rows, domain) for domain in among]
    found: dict[str, dict[int, float]] = {}
    for arm in ARMS:
        for seed in set.intersection(*(set(runs.get(arm, {})) for runs in by_domain)):
            values = [tables.final(runs[arm][seed], what) for runs in by_domain]
            found.setdefault(arm, {})[seed] = statistics.mean(values)
    return found


def residual(success: Mapping[str, Mapping[int, float]]) -> tuple[float, int]:
    """Return the deviation that the best sum of an effect of the arm and one of the seed leaves, and its freedom.

    Its square times two is the variance of the difference between two arms with one seed, if it is equal for all arms.
    One arm's own few differences tell much less about it. With no degree of freedom, the deviation is infinite.
    """
    arms, seeds = list(success), sorted({seed for own in success.values() for seed in own})
    cells = [(arm, seed) for arm in arms for seed in success[arm]]
    freedom = len(cells) - len(arms) - len(seeds) + 1
    if freedom < 1:
        return math.inf, 1
    design = np.array([[a == arm for a in arms] + [s == seed for s in seeds] for arm, seed in cells], float)
    values = np.array([success[arm][seed] for arm, seed in cells])
    left = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
    return float(np.sqrt(left @ left / freedom)), freedom


def one_run(job: Job) -> dict[str, Any]:
    domain, arm, _, seed = job
    with quiet_folder() as folder:
        if arm == WARM_START:
            return asyncio.run(evaluate_start(job, configured((domain, arm, 1e-4, seed), folder, DOMAINS[domain])))
        from gleanrl.utils.importing import load_object

        wrap = None if arm not in CURRICULA else partial(load_object(CURRICULA[arm]), seed=seed)
        settings = {**DOMAINS[domain], **ARMS[arm]}
        if arm in HALVED:
            settings["run.steps"] //= 2
        config = configured(job, folder, settings)
        row = asyncio.run(measured(job, config, at_start=False, samples=SAMPLES, curriculum=wrap))
        # hundreds of rows in one file of the repository: without metrics that are 0 or that nothing reads
        late = {name: value for name, value in row["late"].items() if value and not name.startswith(_UNREAD)}
        row["late"] = {name: float(f"{value:.4g}") for name, value in late.items()}
        return row | {"processor": processor()}


async def evaluate_start(job: Job, config: Any) -> dict[str, Any]:
    """Return a row for the policy after the warm start, before any training."""
    import torch

    from gleanrl.runtime.local import Builder
    from gleanrl.runtime.prepare import prepare
    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking.monitors import Console

    torch.set_num_threads(1)
    console = Console()
    prepared = prepare(config, console)
    builder = Builder(config, RunFolder(config.path), prepared, console)
    success = await evaluated(builder, None, prepared.evaluation, samples=SAMPLES)
    point = {"step": 0, "rollouts": 0, "tokens": 0, "cpu_s": 0.0, **success}
    return {"domain": job[0], "arm": job[1], "lr": job[2], "seed": job[3], "curve": [point]}


# --- tables -----------------------------------------------------------------------------------------
def tuned_as(arm: str) -> str:
    """Return the arm whose learning rate an arm has: that of its arm for a control, and else its own."""
    return arm if CONTROLS.get(arm, REFERENCE) == REFERENCE else CONTROLS[arm]


def sweep_of(rows: Sequence[Row], arm: str) -> dict[float, float]:
    """Return the sum of held-out and training success of the sweep's runs of an arm, by rate."""
    own = [row for row in rows if (row["domain"], row["arm"], row["seed"]) == (FIRST_DOMAIN, tuned_as(arm), SWEEP_SEED)]
    return {row["lr"]: tables.final(row, "held_out") + tables.final(row, "train") for row in own if row["lr"] in RATES}


def is_swept(rows: Sequence[Row], arm: str) -> bool:
    """Return whether all runs that choose the learning rate of an arm were made."""
    return len(sweep_of(rows, arm)) == len(RATES)


def rate_of(rows: Sequence[Row], arm: str) -> float:
    """Return the learning rate of an arm: the best one of the sweep, or 1e-4 if it is not complete."""
    success = sweep_of(rows, arm)
    return max(sorted(success), key=lambda rate: success[rate]) if is_swept(rows, arm) else RATES[1]


def counted(rows: Sequence[Row], domain: str) -> dict[str, dict[int, Row]]:
    """Return the runs of a domain that count: those of each arm at its rate, without the seeds of the sweep."""
    own = [row for row in rows if row["domain"] == domain]
    runs: dict[str, dict[int, Row]] = {}
    for arm in tables.ordered(row["arm"] for row in own):
        rate = 0.0 if arm == WARM_START else rate_of(rows, arm)
        chosen = {row["seed"]: row for row in own if row["arm"] == arm and row["lr"] == rate}
        runs[arm] = {seed: row for seed, row in chosen.items() if seed in SEEDS}
    return {arm: found for arm, found in runs.items() if found}


def differences(runs: Runs, arm: str, what: str, *, equal_cpu: bool = False) -> dict[int, float]:
    """Return the difference of final success between ``arm`` and the reference, for each seed that both have.

    With ``equal_cpu``, the one that took more CPU seconds gets those of the other. Its success there lies on the line
    from the warm start to its end. Pairs that were not run on the same kind of processor are left out then.
    """
    found = {}
    for seed in runs.get(arm, {}).keys() & runs.get(REFERENCE, {}).keys():
        curves = [runs[name][seed]["curve"] for name in (arm, REFERENCE)]
        limit = min(curve[-1]["cpu_s"] for curve in curves)
        if not equal_cpu:
            found[seed] = curves[0][-1][what] - curves[1][-1][what]
        elif seed in runs.get(WARM_START, {}) and same_processor(runs, arm, seed):
            start = runs[WARM_START][seed]["curve"]
            ours, theirs = (tables.at([*start, *curve], "cpu_s", limit, what) for curve in curves)
            found[seed] = ours - theirs
    return found


def same_processor(runs: Runs, arm: str, seed: int) -> bool:
    return runs[arm][seed].get("processor") == runs[REFERENCE][seed].get("processor")


def pooled(rows: Sequence[Row], among: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Return the differences to the reference over those of the domains ``among`` that an arm ran in.

    They are by arm, best held-out mean first, and by ``WHAT``. Each is a list with one number for each seed that the
    arm has in all its domains: the mean over them.
    """
    domains = [counted(rows, domain) for domain in among]
    found: dict[str, dict[str, list[float]]] = {}
    for arm in ARMS:
        for name, what in WHAT.items():
            by_domain = [differences(runs, arm, what) for runs in domains if arm in runs]
            seeds = set.intersection(*(set(own) for own in by_domain)) if by_domain else set()
            if seeds and arm != REFERENCE:
                means = [statistics.mean(own[seed] for own in by_domain) for seed in sorted(seeds)]
                found.setdefault(arm, {})[name] = means
    return dict(sorted(found.items(), key=lambda each: -statistics.mean(each[1]["held-out"])))


def show(rows: Sequence[Row], domains: Sequence[str], arms: Sequence[str]) -> None:
    """Print a table of the ``arms`` for each domain, and the ranking over all of them."""
    for domain in domains:
        if not (runs := counted(rows, domain)):
            continue
        print(f"\n## {domain}\n\nFinal success, and its difference to {REFERENCE!r}, paired by seed:\n")
        over = [f"{name}, over {REFERENCE}{at}" for at in ("", " at equal CPU") for name in WHAT]
        tables.table_row(["arm", "rate", "seeds", *WHAT, *over, "CPU"], head=True)
        for arm, own in runs.items():
            if arm not in (*arms, WARM_START):
                continue
            cells = [arm, f"{rate_of(rows, arm):g}" if arm != WARM_START else "", str(len(own))]
            cells += [tables.mean_text([tables.final(row, what) for row in own.values()]) for what in WHAT.values()]
            for equal_cpu in (False, True):
                for what in WHAT.values():
                    gains = [] if arm == WARM_START else differences(runs, arm, what, equal_cpu=equal_cpu).values()
                    cells.append(tables.mean_text(list(gains), "+") if gains and arm != REFERENCE else "")
            pairs = [] if arm == WARM_START else own.keys() & runs.get(REFERENCE, {}).keys()
            seeds = [seed for seed in sorted(pairs) if same_processor(runs, arm, seed)]
            spent = [sum(runs[name][seed]["curve"][-1]["cpu_s"] for seed in seeds) for name in (arm, REFERENCE)]
            tables.table_row([*cells, f"{spent[0] / spent[1]:.2f}" if seeds else ""])
        for name, what in WHAT.items():
            deviation, freedom = residual(successes(rows, [domain], what))
            half = tables.student(freedom + 1) * deviation * math.sqrt(2 / len(FIRST_SEEDS))
            print(f"\n{name}: the deviation of a run, of all arms together, is {deviation:.3f} ({freedom} degrees of")
            print(f"freedom). With it, a difference over {len(FIRST_SEEDS)} seeds is known to ± {half:.3f}.")
    print(
        f"\n## All domains\n\nDifference to {REFERENCE!r}, mean over the domains that an arm ran in, paired by seed:\n"
    )
    tables.table_row(["arm", "domains", "seeds", *WHAT], head=True)
    for arm, gains in pooled(rows, domains).items():
        if arm in arms:
            cells = [tables.mean_text(values, "+") for values in gains.values()]
            ran_in = sum(arm in counted(rows, domain) for domain in domains)
            tables.table_row([arm, str(ran_in), str(len(gains["held-out"])), *cells])


def draw(gains: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Draw the differences of `pooled` with their 95 % intervals, and return the text of an SVG."""
    ends = [
        abs(statistics.mean(values)) + tables.interval(values)
        for own in gains.values()
        for values in own.values()
        if len(values) > 1
    ]
    half, middle, scale = max(ends, default=0.1), 330, 180
    parts = [f'<path d="M{middle} 24V{30 + 26 * len(gains)}" stroke="#8888"/>']
    for edge in (-half, 0.0, half):
        x = middle + scale * edge / half
        parts.append(f'<text x="{x:.1f}" y="18" text-anchor="middle" fill="#777">{edge:+.2f}</text>')
    for row, (arm, own) in enumerate(gains.items()):
        y = 42 + 26 * row
        parts.append(f'<text x="8" y="{y + 4}" fill="#777">{arm}</text>')
        for (name, values), shift in zip(own.items(), (-4, 4), strict=True):
            x = middle + scale * statistics.mean(values) / half
            colour = "#1d4ed8" if name == "held-out" else "#d97706"
            if len(values) > 1:
                width = scale * tables.interval(values) / half
                parts.append(f'<path d="M{x - width:.1f} {y + shift}h{2 * width:.1f}" stroke="{colour}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y + shift}" r="3.5" fill="{colour}"/>')
    bottom = 48 + 26 * len(gains)
    for at, (name, colour) in zip((8, 120), (("held-out", "#1d4ed8"), ("training", "#d97706")), strict=True):
        parts.append(f'<text x="{at}" y="{bottom}" fill="{colour}" font-weight="bold">{name}, over replay</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 540 {bottom + 12}" font-family="sans-serif"'
    return head + ' font-size="11">' + "".join(parts) + "</svg>\n"


if __name__ == "__main__":
    main()
