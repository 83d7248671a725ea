"""Compares published designs for learning from more of the experience, in one harness and with many seeds.

    python benchmarks/atlas.py run --sweep [--arms NAME ...] [--jobs N] [--save FILE]
    python benchmarks/atlas.py run [--seeds 0 1 ...] [--lrs RATE ...] [--domains NAME ...] [--arms ...] [--jobs N]
    python benchmarks/atlas.py [show] [--domains ...] [--arms ...] [--save FILE] [--svg FILE]

The arms are in `atlas_arms.py`, and docs/reference/atlas.md states their sources and the rules of the comparison. A run
is made as by `replay_gain.py`, but only its last checkpoint is evaluated. The policy after the warm start, which all
arms of a domain and seed share, is evaluated once, as the arm `warm start`.

`run --sweep` makes runs in `SWEEP_DOMAIN` with each of `RATES` and the first of `SWEEP_SEEDS`, then with the second
seed and each arm's best two rates. The better one of these is the arm's rate in all domains. `run` makes the runs that
count, with other seeds and the chosen rates: `FIRST_SEEDS` of all arms, then `SEEDS` of those that `goes_on` names.
Both append a JSON line to FILE (default: `results/atlas.jsonl`) for each run, and skip runs that it already contains.
`show` prints the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import replay_tables as tables
from atlas_arms import ARMS, CONTROLS, CURRICULA, DOMAINS, REFERENCE
from replay_gain import Job, configured, evaluated, measured, quiet_folder, read, run_all
from replay_tables import WHAT, Row

RESULTS = Path(__file__).parent / "results" / "atlas.jsonl"
FIRST_SEEDS = range(5)
SEEDS = range(13)
AIM = 0.05  # gain of held-out success over the reference that is worth a change of the default
SWEEP_SEEDS = (100, 101)
SWEEP_DOMAIN = "few tasks"
RATES = (5e-5, 1e-4, 2e-4, 4e-4)
SAMPLES = (3, 2)  # attempts at each held-out and at each training task
WARM_START = "warm start"

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
    parser.add_argument("--seeds", type=int, nargs="+", help="run: default: as above")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    args = parser.parse_args()
    rows = [row for row in read(args.save) if row["arm"] in (*args.arms, WARM_START)]
    if args.what == "show":
        show(rows, args.domains)
        if args.svg:
            args.svg.write_text(draw(pooled(rows, args.domains)))
        return
    if not (args.sweep or args.lrs) and (unswept := [arm for arm in args.arms if not is_swept(rows, arm)]):
        parser.error(f"`run --sweep` is not complete for {', '.join(unswept)}; complete it, or name --arms or --lrs")
    if args.sweep:
        first, second = SWEEP_SEEDS
        run_all(wanted(rows, [first], [SWEEP_DOMAIN], args.arms, RATES), one_run, args.save, args.jobs)
        rows = read(args.save)
        jobs = [
            each for arm in args.arms for each in wanted(rows, [second], [SWEEP_DOMAIN], [arm], best_two(rows, arm))
        ]
        run_all(list(dict.fromkeys(jobs)), one_run, args.save, args.jobs)
        return
    run_all(wanted(rows, args.seeds or FIRST_SEEDS, args.domains, args.arms, args.lrs), one_run, args.save, args.jobs)
    if args.seeds is None:
        rows = read(args.save)
        arms = [arm for arm in args.arms if goes_on(rows, arm)]
        print(f"more seeds: {', '.join(arms)}", flush=True)
        run_all(wanted(rows, SEEDS, args.domains, arms, args.lrs), one_run, args.save, args.jobs)


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


def goes_on(rows: Sequence[Row], arm: str) -> bool:
    """Return whether an arm gets all `SEEDS`: whether a gain of `AIM` is within its interval after the first ones.

    The interval is that of the held-out difference to the reference over all domains. A control goes on with the arm
    that it belongs to, and the reference and its controls always do.
    """
    arm = CONTROLS.get(arm, arm)
    if arm == REFERENCE:
        return True
    first = [row for row in rows if row["seed"] in FIRST_SEEDS or row["seed"] in SWEEP_SEEDS]
    gains = pooled(first, list(DOMAINS)).get(arm, {}).get("held-out", [])
    return len(gains) == len(FIRST_SEEDS) and statistics.mean(gains) + tables.interval(gains) >= AIM


def one_run(job: Job) -> dict[str, Any]:
    domain, arm, _, seed = job
    with quiet_folder() as folder:
        if arm == WARM_START:
            return asyncio.run(evaluate_start(job, configured((domain, arm, 1e-4, seed), folder, DOMAINS[domain])))
        from gleanrl.utils.importing import load_object

        wrap = None if arm not in CURRICULA else partial(load_object(CURRICULA[arm]), seed=seed)
        config = configured(job, folder, {**DOMAINS[domain], **ARMS[arm]})
        return asyncio.run(measured(job, config, at_start=False, samples=SAMPLES, curriculum=wrap))


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
def sweep_of(rows: Sequence[Row], arm: str) -> list[Row]:
    own = [row for row in rows if (row["domain"], row["arm"]) == (SWEEP_DOMAIN, arm)]
    return [row for row in own if row["seed"] in SWEEP_SEEDS and row["lr"] in RATES]


def best_two(rows: Sequence[Row], arm: str) -> list[float]:
    """Return the rates of an arm with the highest sums of held-out and training success with the first sweep seed."""
    first = [row for row in sweep_of(rows, arm) if row["seed"] == SWEEP_SEEDS[0]]
    success = {row["lr"]: tables.final(row, "held_out") + tables.final(row, "train") for row in first}
    return sorted(success, key=lambda lr: -success[lr])[:2]


def is_swept(rows: Sequence[Row], arm: str) -> bool:
    """Return whether all runs that choose the learning rate of an arm were made."""
    found = {(row["lr"], row["seed"]) for row in sweep_of(rows, arm)}
    first, second = SWEEP_SEEDS
    return all((lr, first) in found for lr in RATES) and all((lr, second) in found for lr in best_two(rows, arm))


def rate_of(rows: Sequence[Row], arm: str) -> float:
    """Return the learning rate of an arm: the best one of the sweep, or 1e-4 if it is not complete."""
    return tables.best_rate(sweep_of(rows, arm), arm) if is_swept(rows, arm) else RATES[1]


def counted(rows: Sequence[Row], domain: str) -> dict[str, dict[int, Row]]:
    """Return the runs of a domain that count: those of each arm at its rate, without the seeds of the sweep."""
    own = [row for row in rows if row["domain"] == domain]
    runs: dict[str, dict[int, Row]] = {}
    for arm in tables.ordered(row["arm"] for row in own):
        rate = 0.0 if arm == WARM_START else rate_of(rows, arm)
        chosen = {row["seed"]: row for row in own if row["arm"] == arm and row["lr"] == rate}
        runs[arm] = {seed: row for seed, row in chosen.items() if seed not in SWEEP_SEEDS}
    return {arm: found for arm, found in runs.items() if found}


def differences(runs: Runs, arm: str, what: str, *, equal_cpu: bool = False) -> dict[int, float]:
    """Return the difference of final success between ``arm`` and the reference, for each seed that both have.

    With ``equal_cpu``, the one that took more CPU seconds gets those of the other. Its success there lies on the line
    from the warm start to its end.
    """
    found = {}
    for seed in runs.get(arm, {}).keys() & runs.get(REFERENCE, {}).keys():
        curves = [runs[name][seed]["curve"] for name in (arm, REFERENCE)]
        limit = min(curve[-1]["cpu_s"] for curve in curves)
        if not equal_cpu:
            found[seed] = curves[0][-1][what] - curves[1][-1][what]
        elif seed in runs.get(WARM_START, {}):
            start = runs[WARM_START][seed]["curve"]
            ours, theirs = (tables.at([*start, *curve], "cpu_s", limit, what) for curve in curves)
            found[seed] = ours - theirs
    return found


def pooled(rows: Sequence[Row], among: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Return the differences to the reference over the domains ``among`` that have runs, best held-out mean first.

    They are by arm and by ``WHAT``. Each is a list with one number for each seed that the arm has in all domains: the
    mean over the domains.
    """
    domains = [runs for domain in among if (runs := counted(rows, domain))]
    found: dict[str, dict[str, list[float]]] = {}
    for arm in ARMS:
        for name, what in WHAT.items():
            by_domain = [differences(runs, arm, what) for runs in domains]
            seeds = set.intersection(*(set(own) for own in by_domain)) if by_domain else set()
            if seeds and arm != REFERENCE:
                means = [statistics.mean(own[seed] for own in by_domain) for seed in sorted(seeds)]
                found.setdefault(arm, {})[name] = means
    return dict(sorted(found.items(), key=lambda each: -statistics.mean(each[1]["held-out"])))


def show(rows: Sequence[Row], domains: Sequence[str]) -> None:
    """Print a table for each domain, and the ranking over all of them."""
    for domain in domains:
        if not (runs := counted(rows, domain)):
            continue
        print(f"\n## {domain}\n\nFinal success, and its difference to {REFERENCE!r}, paired by seed:\n")
        over = [f"{name}, over {REFERENCE}{at}" for at in ("", " at equal CPU") for name in WHAT]
        tables.table_row(["arm", "rate", "seeds", *WHAT, *over, "CPU"], head=True)
        for arm, own in runs.items():
            cells = [arm, f"{rate_of(rows, arm):g}" if arm != WARM_START else "", str(len(own))]
            cells += [tables.mean_text([tables.final(row, what) for row in own.values()]) for what in WHAT.values()]
            for equal_cpu in (False, True):
                for what in WHAT.values():
                    gains = [] if arm == WARM_START else differences(runs, arm, what, equal_cpu=equal_cpu).values()
                    cells.append(tables.mean_text(list(gains), "+") if gains and arm != REFERENCE else "")
            seeds = [] if arm == WARM_START else sorted(own.keys() & runs.get(REFERENCE, {}).keys())
            spent = [sum(runs[name][seed]["curve"][-1]["cpu_s"] for seed in seeds) for name in (arm, REFERENCE)]
            tables.table_row([*cells, f"{spent[0] / spent[1]:.2f}" if seeds else ""])
    print(f"\n## All domains\n\nDifference to {REFERENCE!r}, mean over domains, paired by seed:\n")
    tables.table_row(["", "arm", "seeds", *WHAT], head=True)
    for rank, (arm, gains) in enumerate(pooled(rows, domains).items(), 1):
        cells = [tables.mean_text(values, "+") for values in gains.values()]
        tables.table_row([str(rank), arm, str(len(gains["held-out"])), *cells])


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
