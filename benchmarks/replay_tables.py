"""Prints the tables and draws the curves of `replay_gain.py` from its JSON lines.

An arm is *tuned* if it was run with all seeds of the domain at its best learning rate.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

Row = Mapping[str, Any]
# number of seeds -> t quantile (95 %)
STUDENT = {
    **{2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26},
    **{11: 2.23, 12: 2.20, 13: 2.18},
}
AXES = {"rollouts": "rollouts", "tokens": "tokens", "cpu_s": "CPU s"}
WHAT = {"held-out": "held_out", "training": "train"}
CONTROLS = ("on-policy", "selection")
SAME_START = {"alfworld hard, 256 tasks": "alfworld hard"}  # domain -> the one whose warm starts it has
BASES = ("replay in groups", "replay", "replay, two pool steps of 16")  # the arms of which the others are variants
COLOURS = {"on-policy": "#777777", "selection": "#d97706", "replay in groups": "#60a5fa", "replay": "#1d4ed8"}
OTHERS = ("#059669", "#9333ea", "#dc2626", "#0891b2", "#be185d", "#65a30d", "#4338ca")


def show(rows: Sequence[Row], headline: Sequence[str]) -> None:
    """Print the tables of each domain, and then a table over all domains.

    For a domain, these are the ``headline`` arms at each learning rate, their comparison at the best rate, and all
    other arms.
    """
    domains = ordered(row["domain"] for row in rows)
    best = {domain: tuned([row for row in rows if row["domain"] == domain], headline) for domain in domains}
    for domain, arms in best.items():
        own = [row for row in rows if row["domain"] == domain]
        print(f"\n## {domain}")
        _rates(own, [arm for arm in headline if any(row["arm"] == arm for row in own)])
        if arms:
            seeds = sorted(next(iter(arms.values())))
            _budgets(arms, seeds)
            _gains(arms, seeds)
            _halves(arms, seeds)
            _between(arms, seeds)
            _late(arms)
        _others(own, [arm for arm in ordered(row["arm"] for row in own) if arm not in arms])
        _uses([row for row in own if "uses" in row])
    _together(best, headline)


def show_sizes(rows: Sequence[Row]) -> None:
    """Print success before RL and at the end and the gains of replay, with a line for each size of the model."""
    for name, what in WHAT.items():
        print(f"\nSuccess on {name} tasks before RL and at the end, and the gain of replay, paired by seed:\n")
        gains = [f"replay over {control}" for control in CONTROLS]
        table_row(["parameters", "seeds", "before", *CONTROLS, "replay", *gains, "CPU s of a run"], head=True)
        for runs in _by_size(rows):
            own = runs["replay"].values()
            cells = [f"{next(iter(own))['parameters'] / 1e6:.1f} M", str(len(own))]
            cells.append(mean_text([row["curve"][0][what] for row in own]))
            cells += [mean_text([final(row, what) for row in runs[arm].values()]) for arm in (*CONTROLS, "replay")]
            cells += [mean_text(_gain(runs, control, what), "+") for control in CONTROLS]
            table_row([*cells, f"{statistics.mean(row['curve'][-1]['cpu_s'] for row in own):.0f}"])
        for control in CONTROLS:
            slope, half = _slope(_by_size(rows), control, what)
            print(f"\nA model of ten times the size: replay over {control} {slope:+.3f} ± {half:.3f}")


def _slope(sizes: Sequence[Mapping[str, Mapping[int, Row]]], control: str, what: str) -> tuple[float, float]:
    """Return by how much the gain of replay grows for each factor of ten in size, and half its 95 % interval.

    It is the slope of a straight line through the gains of all seeds over the logarithm of the size.
    """
    x = [math.log10(row["parameters"]) for runs in sizes for row in runs["replay"].values()]
    y = [gain for runs in sizes for gain in _gain(runs, control, what)]
    slope, start = statistics.linear_regression(x, y)
    left = sum((b - start - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = (len(x) - 1) * statistics.variance(x)
    return slope, student(len(x) - 1) * math.sqrt(left / (len(x) - 2) / spread)


def _by_size(rows: Sequence[Row]) -> list[dict[str, dict[int, Row]]]:
    """Return the runs of each size of the model, smallest first, as dicts from arm and seed.

    They are those of the seeds with which all three arms were run.
    """
    found = []
    for size in sorted({row["parameters"] for row in rows}):
        own = [row for row in rows if row["parameters"] == size]
        arms = {arm: {row["seed"]: row for row in own if row["arm"] == arm} for arm in (*CONTROLS, "replay")}
        seeds = set.intersection(*(set(runs) for runs in arms.values()))
        if seeds:
            found.append({arm: {seed: runs[seed] for seed in seeds} for arm, runs in arms.items()})
    return found


def _gain(runs: Mapping[str, Mapping[int, Row]], control: str, what: str) -> list[float]:
    return [final(row, what) - final(runs[control][seed], what) for seed, row in runs["replay"].items()]


def tuned(rows: Sequence[Row], arms: Sequence[str]) -> dict[str, dict[int, Row]]:
    """Return the tuned arms, each as a dict from seed to its run at the arm's best rate."""
    found = {}
    for arm in arms:
        own = [row for row in rows if row["arm"] == arm]
        if own:
            rate = best_rate(own, arm)
            found[arm] = {row["seed"]: row for row in own if row["lr"] == rate}
    seeds = {seed for runs in found.values() for seed in runs}
    return {arm: runs for arm, runs in found.items() if runs.keys() == seeds}


def _together(best: Mapping[str, Mapping[str, Mapping[int, Row]]], headline: Sequence[str]) -> None:
    """Print the gains over all domains, paired by domain and seed.

    Domains of `SAME_START` have the same warm start and the same held-out tasks for a seed, so their mean is one
    observation.
    """
    print("\n## All domains\n\nDifference in final success, paired by seed (number of observations in brackets):\n")
    controls = [control for control in (*CONTROLS, "replay") if control in headline]
    table_row(["arm", *(f"{what}, over {control}" for control in controls for what in WHAT)], head=True)
    for arm in headline:
        cells = [arm]
        for control in controls:
            for what in WHAT.values():
                gains: dict[tuple[str, int], list[float]] = {}
                for domain, runs in best.items():
                    if arm in runs and control in runs and arm != control:
                        for seed, row in runs[arm].items():
                            own = gains.setdefault((SAME_START.get(domain, domain), seed), [])
                            own.append(final(row, what) - final(runs[control][seed], what))
                means = [statistics.mean(own) for own in gains.values()]
                cells.append(f"{mean_text(means, '+')} ({len(means)})" if means else "")
        table_row(cells)


def _rates(rows: Sequence[Row], arms: Sequence[str]) -> None:
    rates = sorted({row["lr"] for row in rows if row["arm"] in arms})
    print("\nFinal success on held-out / training tasks by learning rate (number of seeds in brackets):\n")
    table_row(["arm", *(f"{rate:g}" for rate in rates)], head=True)
    for arm in arms:
        table_row([arm, *(_cell([r for r in rows if r["arm"] == arm and r["lr"] == rate]) for rate in rates)])


def _budgets(tuned: Mapping[str, Mapping[int, Row]], seeds: Sequence[int]) -> None:
    """Print the success of each tuned arm at equal budgets of fresh rollouts, of sampled tokens, and of CPU seconds.

    For each seed, the budget is the smallest total among the arms.
    """
    limits = {
        axis: {seed: min(runs[seed]["curve"][-1][axis] for runs in tuned.values()) for seed in seeds} for axis in AXES
    }
    print(f"\nSuccess after equal budgets of rollouts, tokens or CPU seconds, seeds {', '.join(map(str, seeds))}:\n")
    heads = [f"{what}, equal {name}" for what in WHAT for name in AXES.values()]
    table_row(["arm", "learning rate", *heads, "CPU s of the run"], head=True)
    for arm, runs in tuned.items():
        cells = [arm, f"{runs[seeds[0]]['lr']:g}"]
        for what in ("held_out", "train"):
            cells += [mean_text([at(runs[s]["curve"], axis, limits[axis][s], what) for s in seeds]) for axis in AXES]
        table_row([*cells, f"{statistics.mean(runs[s]['curve'][-1]['cpu_s'] for s in seeds):.0f}"])


def _gains(tuned: Mapping[str, Mapping[int, Row]], seeds: Sequence[int]) -> None:
    """Print the final gains of each arm over the controls, paired by seed.

    Also print the share of the fresh rollouts after which an arm reaches the final success of "on-policy".
    """
    controls = [control for control in ("on-policy", "selection") if control in tuned]
    heads = [f"{what}, over {control}" for control in controls for what in WHAT]
    print(
        "\nDifference in final success, paired by seed, and the share of the rollouts after which the final success of"
        "\non-policy is reached:\n"
    )
    table_row(["arm", *heads, *(f"{what}, reached after" for what in WHAT)], head=True)
    for arm, runs in tuned.items():
        cells = [arm]
        for control in controls:
            for what in ("held_out", "train"):
                gains = [final(runs[s], what) - final(tuned[control][s], what) for s in seeds]
                cells.append("" if arm == control else mean_text(gains, "+"))
        if "on-policy" in tuned:
            cells += [_reached(tuned, arm, seeds, what) for what in ("held_out", "train")]
        table_row(cells)


def _halves(tuned: Mapping[str, Mapping[int, Row]], seeds: Sequence[int]) -> None:
    """Print the success of each arm after half of the fresh rollouts, less the final success of "on-policy"."""
    if "on-policy" not in tuned:
        return
    print(
        "\nSuccess after half of the rollouts, and its difference to the final success of on-policy, paired by seed:\n"
    )
    table_row(["arm", *WHAT, *(f"{what}, over on-policy at the end" for what in WHAT)], head=True)
    for arm, runs in tuned.items():
        halves: list[str] = []
        gains: list[str] = []
        for what in WHAT.values():
            curves = {seed: runs[seed]["curve"] for seed in seeds}
            half = {seed: at(curve, "rollouts", curve[-1]["rollouts"] / 2, what) for seed, curve in curves.items()}
            halves.append(f"{statistics.mean(half.values()):.3f}")
            gains.append(mean_text([half[seed] - final(tuned["on-policy"][seed], what) for seed in seeds], "+"))
        table_row([arm, *halves, *gains])


def _between(tuned: Mapping[str, Mapping[int, Row]], seeds: Sequence[int]) -> None:
    """Print the differences between the arms with replay, paired by seed."""
    bases = [base for base in BASES if base in tuned]
    if not bases or len(seeds) < 2:
        return
    print("\nDifference in final success to the arms with replay, paired by seed:\n")
    table_row(["arm", *(f"{what}, over {base}" for base in bases for what in WHAT)], head=True)
    for arm, runs in tuned.items():
        cells = [arm]
        for base in bases:
            gains = {w: [final(runs[s], w) - final(tuned[base][s], w) for s in seeds] for w in WHAT.values()}
            cells += ["" if arm == base else mean_text(values, "+") for values in gains.values()]
        table_row(cells)


def _late(tuned: Mapping[str, Mapping[int, Row]]) -> None:
    """Print metrics of the policy and the pool in the last quarter of the runs, as means over steps and seeds."""
    print("\nMeans over the last quarter of the steps. Trained tokens: sampled tokens per step that have a gradient.\n")
    table_row(["arm", "groups without a success", "policy entropy", "retired tasks", "trained tokens"], head=True)
    for arm, runs in tuned.items():
        late = [row["late"] for row in runs.values()]
        cells = [arm, f"{statistics.mean(own['groups/none_solved'] / own['groups/consumed'] for own in late):.0%}"]
        cells.append(f"{statistics.mean(own['loss/entropy'] for own in late):.2f}")
        retired = [own["pool/retired"] for own in late if "pool/retired" in own]
        cells.append(f"{statistics.mean(retired):.0f}" if retired else "")
        table_row([*cells, f"{statistics.mean(sum(map(own.get, filter(_trained, own))) for own in late):.0f}"])


def _trained(name: str) -> bool:
    return name == "tokens/trained" or (name.startswith("replay_update/") and name.endswith("/tokens/trained"))


def _others(rows: Sequence[Row], arms: Sequence[str]) -> None:
    """Print all other arms at each rate, with their differences to `BASES` at the same rate, paired by seed."""
    if not arms:
        return
    print("\nFinal success of all other arms, and the difference at the same learning rate, paired by seed:\n")
    table_row(
        ["arm", "learning rate", "seeds", *WHAT, *(f"{what}, over {base}" for base in BASES for what in WHAT)],
        head=True,
    )
    for arm in arms:
        for rate in sorted({row["lr"] for row in rows if row["arm"] == arm}):
            own = {row["seed"]: row for row in rows if row["arm"] == arm and row["lr"] == rate}
            cells = [arm, f"{rate:g}", str(len(own))]
            cells += [f"{statistics.mean(final(row, what) for row in own.values()):.3f}" for what in WHAT.values()]
            for base in BASES:
                runs = {row["seed"]: row for row in rows if row["arm"] == base and row["lr"] == rate}
                both = sorted(own.keys() & runs.keys())
                for what in WHAT.values():
                    gains = [final(own[seed], what) - final(runs[seed], what) for seed in both]
                    cells.append(mean_text(gains, "+") if gains else "")
            table_row(cells)


def _uses(rows: Sequence[Row]) -> None:
    """Print how evenly each run has used the trajectories that its pool holds at the end."""
    if not rows:
        return
    print("\nStored trajectories at the end of the run, and how often they were replayed:\n")
    table_row(["arm", "seed", "stored", "never used", "uses of the most used one of each task"], head=True)
    for row in rows:
        uses = row["uses"]
        table_row([row["arm"], str(row["seed"]), f"{uses['stored']}", f"{uses['never']}", f"{uses['most']:.0%}"])


def best_rate(rows: Sequence[Row], arm: str) -> float:
    """Return the learning rate with the highest sum of held-out and training success, averaged over seeds.

    Only the rates that were measured with the most seeds are compared. Rates are first swept with few seeds, and only
    promising ones are run with more; a rate with few seeds could otherwise win by chance.
    """
    by_rate: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        if row["arm"] == arm:
            by_rate[row["lr"]].append(final(row, "held_out") + final(row, "train"))
    most = max(len(values) for values in by_rate.values())
    return max((r for r in by_rate if len(by_rate[r]) == most), key=lambda rate: statistics.mean(by_rate[rate]))


def _reached(tuned: Mapping[str, Mapping[int, Row]], arm: str, seeds: Sequence[int], what: str) -> str:
    """Return the share of the fresh rollouts after which the arm's mean curve reaches the final mean of "on-policy"."""
    goal = statistics.mean(final(tuned["on-policy"][seed], what) for seed in seeds)
    whole = statistics.mean(tuned["on-policy"][seed]["curve"][-1]["rollouts"] for seed in seeds)
    points = mean_curve([tuned[arm][seed] for seed in seeds], "rollouts", what)
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 < goal <= y1:
            return f"{(x0 + (x1 - x0) * (goal - y0) / (y1 - y0)) / whole:.0%}"
    return "never"


def at(curve: Sequence[Mapping[str, float]], axis: str, limit: float, what: str) -> float:
    """Return the success ``what`` of a curve at the budget ``limit`` on ``axis``, interpolated between evaluations."""
    before = curve[0]
    for point in curve:
        if point[axis] >= limit:
            span = point[axis] - before[axis]
            share = (limit - before[axis]) / span if span else 1.0
            return before[what] + share * (point[what] - before[what])
        before = point
    return before[what]


def mean_curve(rows: Sequence[Row], axis: str, what: str) -> list[tuple[float, float]]:
    """Return the mean curve of several runs.

    Runs may have been evaluated at different points, so the points are those of the run with the fewest evaluations.
    """
    grid = [point[axis] for point in min((row["curve"] for row in rows), key=len)]
    return [(x, statistics.mean(at(row["curve"], axis, x, what) for row in rows)) for x in grid]


def interval(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return student(len(values)) * statistics.stdev(values) / math.sqrt(len(values))


def student(count: int) -> float:
    """Return the 97.5 % quantile of Student's t with ``count - 1`` degrees of freedom."""
    # The formula for more values than the table has is accurate to 0.3 %.
    return STUDENT.get(count, 1.96 + 2.5 / (count - 1))


def draw(rows: Sequence[Row]) -> str:
    """Draw an SVG and return its text.

    It shows success on held-out and on training tasks over fresh rollouts, in a row of panels for each domain, with
    95 % confidence bands.
    """
    domains = ordered(row["domain"] for row in rows)
    panels, width, height = [], 330, 210
    shown: dict[str, str] = {}
    for line, domain in enumerate(domains):
        own = [row for row in rows if row["domain"] == domain]
        arms = {arm: list(runs.values()) for arm, runs in tuned(own, ordered(row["arm"] for row in own)).items()}
        for column, what in enumerate(("held_out", "train")):
            for arm in arms:
                shown.setdefault(arm, COLOURS.get(arm) or OTHERS[sum(a not in COLOURS for a in shown) % len(OTHERS)])
            title = f"{domain}: {'held-out' if what == 'held_out' else 'training tasks'}"
            panels.append(
                f'<g transform="translate({column * width},{line * height})">{panel(arms, what, title, shown)}</g>'
            )
    legend = "".join(
        f'<text x="{36 + 150 * i}" y="{height * len(domains) + 18}" fill="{colour}" font-weight="bold">{arm}</text>'
        for i, (arm, colour) in enumerate(shown.items())
    )
    size = f"{max(2 * width, 150 * len(shown) + 60)} {height * len(domains) + 30}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="11">'
    return head + "".join(panels) + legend + "</svg>\n"


def draw_sizes(rows: Sequence[Row]) -> str:
    """Draw an SVG and return its text.

    It shows the gain of replay over each control by the number of the model's parameters, on held-out and on training
    tasks, with 95 % intervals over seeds. Sizes with fewer than three seeds have no interval and
    are left out.
    """
    sizes = [runs for runs in _by_size(rows) if len(_gain(runs, CONTROLS[0], next(iter(WHAT.values())))) > 2]
    gains = [_gain(runs, control, what) for runs in sizes for control in CONTROLS for what in WHAT.values()]
    top = math.ceil(10 * max(statistics.mean(own) + interval(own) for own in gains)) / 10
    low = math.floor(10 * min(0.0, *(statistics.mean(own) - interval(own) for own in gains))) / 10
    y: Callable[[float], float] = lambda value: 26 + 154 * (top - value) / (top - low)  # noqa: E731
    parts = []
    for column, (title, what) in enumerate(WHAT.items()):
        left = 330 * column + 40
        parts.append(f'<text x="{left}" y="16" fill="#777" font-weight="bold">gain on {title} tasks</text>')
        for value in (low, 0.0, top):
            parts.append(f'<path d="M{left} {y(value):.1f}h260" stroke="#8884"/>')
            parts.append(
                f'<text x="{left - 4}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#777">{value:+.1f}</text>'
            )
        for control, shift in zip(CONTROLS, (-4, 4), strict=True):
            points = []
            for runs in sizes:
                own, count = _gain(runs, control, what), next(iter(runs["replay"].values()))["parameters"]
                x, mean, half = left + 20 + shift + 75 * math.log10(count / 2e5), statistics.mean(own), interval(own)
                points.append(f"{x:.1f},{y(mean):.1f}")
                parts.append(
                    f'<path d="M{x:.1f} {y(mean - half):.1f}V{y(mean + half):.1f}" stroke="{COLOURS[control]}"/>'
                )
                parts.append(f'<circle cx="{x:.1f}" cy="{y(mean):.1f}" r="3.5" fill="{COLOURS[control]}"/>')
                if shift < 0:
                    label = f"{count / 1e6:.{0 if count > 1e6 else 1}f} M"
                    parts.append(f'<text x="{x + 4:.1f}" y="196" text-anchor="middle" fill="#777">{label}</text>')
            parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{COLOURS[control]}"/>')
    for i, control in enumerate(CONTROLS):
        at = f'x="{40 + 200 * i}" y="218"'
        parts.append(f'<text {at} fill="{COLOURS[control]}" font-weight="bold">replay over {control}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 230" font-family="sans-serif" font-size="11">'
    return head + "".join(parts) + "</svg>\n"


def panel(curves: Mapping[str, Sequence[Row]], what: str, title: str, colours: Mapping[str, str]) -> str:
    right = max(point["rollouts"] for runs in curves.values() for row in runs for point in row["curve"])
    top = max(point[what] for runs in curves.values() for row in runs for point in row["curve"])
    top = math.ceil(top * 10) / 10
    x: Callable[[float], float] = lambda value: 36 + 250 * value / right  # noqa: E731
    y: Callable[[float], float] = lambda value: 180 - 150 * value / top  # noqa: E731
    parts = [f'<text x="36" y="16" fill="#777" font-weight="bold">{title}</text>']
    for value in (0.0, top / 2, top):
        parts.append(f'<path d="M36 {y(value):.1f}H286" stroke="#8884"/>')
        parts.append(f'<text x="32" y="{y(value) + 4:.1f}" text-anchor="end" fill="#777">{value:.0%}</text>')
    parts.append(f'<text x="286" y="196" text-anchor="end" fill="#777">{right:,.0f} fresh rollouts</text>')
    for arm, runs in curves.items():
        points = mean_curve(runs, "rollouts", what)
        values = [[at(row["curve"], "rollouts", x, what) for row in runs] for x, _ in points]
        half = [interval(own) if len(own) > 1 else 0.0 for own in values]
        upper = [f"{x(a):.1f},{y(min(b + h, top)):.1f}" for (a, b), h in zip(points, half, strict=True)]
        lower = [f"{x(a):.1f},{y(max(b - h, 0)):.1f}" for (a, b), h in zip(points, half, strict=True)]
        parts.append(f'<polygon points="{" ".join([*upper, *reversed(lower)])}" fill="{colours[arm]}" opacity="0.10"/>')
        line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[arm]}" stroke-width="2.2"/>')
    return "".join(parts)


def final(row: Row, what: str) -> float:
    return row["curve"][-1][what]


def line(row: Row) -> str:
    """Format a run as one line of text."""
    points = " ".join(f"{point['held_out']:.3f}" for point in row["curve"])
    first, last = row["curve"][0], row["curve"][-1]
    return (
        f"{row['domain']}, {row['arm']}, {row['lr']:g}, seed {row['seed']}: held-out {points}, training "
        f"{first['train']:.3f} -> {last['train']:.3f}, {last['rollouts']:.0f} rollouts, {last['cpu_s']:.0f} CPU s"
    )


def table_row(cells: Sequence[str], *, head: bool = False) -> None:
    print("| " + " | ".join(cells) + " |")
    if head:
        print("|---" * len(cells) + "|")


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    held, train = (statistics.mean(final(row, what) for row in rows) for what in ("held_out", "train"))
    return f"{held:.3f} / {train:.3f} ({len(rows)})"


def mean_text(values: Sequence[float], sign: str = "") -> str:
    """Format the mean and, for more than two values, half the width of its 95 % confidence interval."""
    mean = f"{statistics.mean(values):{sign}.3f}"
    return f"{mean} ± {interval(values):.3f}" if len(values) > 2 else mean


def ordered(names: Any) -> list[str]:
    return list(dict.fromkeys(names))
