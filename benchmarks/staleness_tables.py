"""Prints the tables and draws the curves of `staleness.py` from its JSON lines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from replay_arms import DOMAINS
from replay_tables import WHAT, interval, panel

Row = Mapping[str, Any]
MODES = ("plain", "decoupled")
COLOURS = ("#777777", "#059669", "#1d4ed8", "#d97706", "#dc2626", "#9333ea", "#0891b2")
TOLD = {
    "loss/ratio/p99": "ratio p99",
    "loss/clip_high": "clipped above",
    "loss/clip_low": "clipped below",
    "loss/ess": "ESS",
    "loss/mismatch_ess": "ESS of proximal / behaviour",
    "loss/masked": "masked",
    "loss/entropy": "entropy",
    "learner/grad_norm": "gradient norm",
}


def show(rows: Sequence[Row]) -> None:
    _histograms([row for row in rows if row["job"]["part"] == "histogram"])
    curves = [row for row in rows if row["job"]["part"] == "curves"]
    for domain, steps in _ordered((row["job"]["domain"], row["job"]["steps"]) for row in curves):
        own = [row for row in curves if (row["job"]["domain"], row["job"]["steps"]) == (domain, steps)]
        for lr in _ordered(row["job"]["lr"] for row in own):
            print(f"\n## {domain}, {steps} steps, learning rate {lr:g}")
            _success([row for row in own if row["job"]["lr"] == lr])
            _losses([row for row in own if row["job"]["lr"] == lr])


def _histograms(rows: Sequence[Row]) -> None:
    if not rows:
        return
    oldest = max(int(age) for row in rows for age in row["groups"])
    ages = [str(age) for age in range(oldest + 1)]
    print(
        "\nShare of the groups by their staleness when they were consumed, over all steps. Dropped: number of groups"
        "\nthat were discarded because they were staler than the bound. Mean of tokens: mean staleness of sampled"
        "\ntokens.\n"
    )
    _line(["schedule", "bound", "latency of rewards", *ages, "mean", "mean of tokens", "dropped"], head=True)
    kinds = _ordered((row["job"]["schedule"], row["job"]["bound"], str(row["job"]["latency"])) for row in rows)
    for kind in kinds:
        own = [r for r in rows if (r["job"]["schedule"], r["job"]["bound"], str(r["job"]["latency"])) == kind]
        groups, tokens = _total(own, "groups"), _total(own, "tokens")
        latency = own[0]["job"]["latency"]
        shares = [f"{groups[age] / sum(groups.values()):.1%}" if age in groups else "" for age in ages]
        bound = {"sync": 0, "pipelined": 0}.get(kind[0], 1) if kind[1] is None else kind[1]
        reward = f"{latency[0]:g}-{latency[1]:g} s" if latency else "none"
        dropped = sum(row["dropped"] for row in own)
        _line([kind[0], str(bound), reward, *shares, f"{_age(groups):.2f}", f"{_age(tokens):.2f}", f"{dropped:.0f}"])


def _success(rows: Sequence[Row]) -> None:
    """Print the final success, at equal fresh rollouts, for each bound and loss, with differences paired by seed."""
    print(
        "\nFinal success rate by staleness bound, after equal numbers of fresh rollouts. ± is half the 95 % confidence"
        "\ninterval over seeds; differences are paired by seed.\n"
    )
    heads = [f"{name}, {end}" for name in WHAT for end in (*MODES, "decoupled minus plain")]
    _line(["bound", "mean staleness", "maximum", "number of seeds", *heads], head=True)
    for bound in sorted({row["job"]["bound"] for row in rows}):
        arms = {mode: _by_seed(rows, bound, mode) for mode in MODES}
        everyone = [row for arm in arms.values() for row in arm.values()]
        groups = _total(everyone, "groups")
        seeds = "/".join(dict.fromkeys(str(len(arm)) for arm in arms.values() if arm))
        cells = [str(bound), f"{_age(groups):.2f}", str(max(map(int, groups))), seeds]
        for what in WHAT.values():
            ends = {mode: {seed: row["curve"][-1][what] for seed, row in arm.items()} for mode, arm in arms.items()}
            cells += [_mean(list(ends[mode].values())) for mode in MODES]
            both = sorted(ends["plain"].keys() & ends["decoupled"].keys())
            cells.append(_mean([ends["decoupled"][seed] - ends["plain"][seed] for seed in both], "+"))
        _line(cells)


def _losses(rows: Sequence[Row]) -> None:
    print(
        "\nMetrics of the learner, means over the last quarter of the steps and over seeds. Clipped and masked are"
        "\nshares of tokens, ESS is the effective sample size as a share of the tokens, and ratio p99 the 99 % quantile"
        "\nof the probability ratio.\n"
    )
    _line(["bound", "loss", *TOLD.values()], head=True)
    for bound in sorted({row["job"]["bound"] for row in rows}):
        for mode in MODES:
            own = [row["late"] for row in _by_seed(rows, bound, mode).values()]
            told = [[late[name] for late in own if name in late] for name in TOLD]
            if own:
                _line([str(bound), mode, *(f"{statistics.mean(values):.3f}" if values else "" for values in told)])


def draw(rows: Sequence[Row]) -> str:
    """Draw an SVG and return its text.

    It shows success on held-out and on training tasks over fresh rollouts, in a row of panels for each loss, with a
    curve for each bound and learning rate and 95 % confidence bands.
    """
    width, height, panels = 330, 210, []
    names = _ordered(_name(row) for row in sorted(rows, key=lambda row: (-row["job"]["lr"], row["job"]["bound"])))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    for line, mode in enumerate(MODES):
        for column, (label, what) in enumerate(WHAT.items()):
            own = [_with_rollouts(row) for row in rows if row["job"]["mode"] == mode]
            arms = {name: [row for row in own if _name(row) == name] for name in names}
            drawn = panel({name: arm for name, arm in arms.items() if arm}, what, f"{mode}: {label}", colours)
            panels.append(f'<g transform="translate({column * width},{line * height})">{drawn}</g>')
    legend = "".join(
        f'<text x="{36 + 220 * (i % 3)}" y="{height * len(MODES) + 18 + 18 * (i // 3)}" fill="{colour}" '
        f'font-weight="bold">{name}</text>'
        for i, (name, colour) in enumerate(colours.items())
    )
    size = f"{2 * width} {height * len(MODES) + 12 + 18 * -(-len(names) // 3)}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="11">'
    return head + "".join(panels) + legend + "</svg>\n"


def _name(row: Row) -> str:
    return f"bound {row['job']['bound']}, rate {row['job']['lr']:g}"


def _with_rollouts(row: Row) -> dict[str, Any]:
    settings: Any = DOMAINS[row["job"]["domain"]]
    each = settings["schedule.batch"] * settings["schedule.group"]  # rollouts per step
    return {**row, "curve": [{**point, "rollouts": point["step"] * each} for point in row["curve"]]}


def line(row: Row) -> str:
    """Format a run as one line of text."""
    job = ", ".join(f"{name} {value}" for name, value in row["job"].items() if value is not None)
    ages = " ".join(f"{age}:{count}" for age, count in row["groups"].items())
    points = " ".join(f"{point['held_out']:.3f}" for point in row["curve"])
    return f"{job}: groups by staleness {ages}; held-out {points or 'not measured'}; {row['cpu_s']:.0f} CPU s"


def _by_seed(rows: Sequence[Row], bound: int, mode: str) -> dict[int, Row]:
    return {row["job"]["seed"]: row for row in rows if (row["job"]["bound"], row["job"]["mode"]) == (bound, mode)}


def _total(rows: Sequence[Row], what: str) -> dict[str, int]:
    ages = sorted({age for row in rows for age in row[what]}, key=int)
    return {age: sum(row[what].get(age, 0) for row in rows) for age in ages}


def _age(counts: Mapping[str, int]) -> float:
    return sum(int(age) * count for age, count in counts.items()) / sum(counts.values())


def _mean(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return ""
    half = f" ± {interval(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.3f}{half}"


def _line(cells: Sequence[str], *, head: bool = False) -> None:
    print("| " + " | ".join(cells) + " |")
    if head:
        print("|---" * len(cells) + "|")


def _ordered(names: Any) -> list[Any]:
    return list(dict.fromkeys(names))
