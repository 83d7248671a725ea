"""`gleanrl simulate`: what each schedule would cost on given step times and a given reward service."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gleanrl.cli import cluster as cluster_cli
from gleanrl.simulate.cluster import Cluster
from gleanrl.simulate.latency import FORMS, Latency
from gleanrl.simulate.options import offer, typed
from gleanrl.simulate.workload import PRESETS, Preset, Workload
from gleanrl.utils.errors import UserError

if TYPE_CHECKING:
    from gleanrl.simulate.simulation import Outcome

BEST: Preset = "pipelined_one_step_off"
VERL: Mapping[str, Any] = {
    "call": 4.0,  # four calls of update_actor took 129.1 s, one took 117.2 s
    "bursts": 1,
    "microbatches": 1,
    "passes": "generated",
    "service": "verl",
    "evaluate_every": 5,
    "evaluation": "inline",
    "first": "sample",
    "steps": 15,
}
"""How verl PR 2854 measured: rewards asked for batch by batch, evaluation between steps and part of the time."""
PUBLISHED: Mapping[Preset, float] = {"pipelined": -12.30, "one_step_off": -25.16, "pipelined_one_step_off": -30.85}
"""Change of the total training time against sync, in percent."""

_OPTIONS: Mapping[str, tuple[str, str]] = {
    "g": ("SECONDS", "generating a batch"),
    "logprobs": ("SECONDS", "the pass for old log-probs; 0 where the sampler's are used"),
    "reference": ("SECONDS", "the pass for the reference policy's log-probs"),
    "train": ("SECONDS", "training on a batch in one call of the learner"),
    "call": ("SECONDS", "what each further call adds, for loading and offloading"),
    "samples": ("N", "trajectories a step"),
    "group": ("N", "trajectories a group"),
    "latency": ("FORM", f"of one reward: {FORMS}"),
    "concurrency": ("N", "rewards that the service works on at once"),
    "minibatches": ("N", "chunks a step of the pipelined schedules and bounded_async"),
    "adaptive": ("YES_OR_NO", "train on all chunks that are ready at once"),
    "staleness": ("N", "bound of bounded_async, in steps"),
    "bursts": ("N", "a batch is generated in so many bursts, after each of which a share is sent to be scored"),
    "microbatches": ("N", "training on a batch takes the device so many times, between which generating may go on"),
    "passes": ("WHEN", "log-probs are computed when a chunk is 'consumed' or when a batch is 'generated'"),
    "service": (
        "HOW",
        "'stream': any reward at any time; 'batch': one burst after the other; 'verl': as its actor does",
    ),
    "evaluate_every": ("N", "steps between evaluations; 0 = none"),
    "evaluation_g": ("SECONDS", "generating for an evaluation"),
    "evaluation_samples": ("N", "rewards of an evaluation"),
    "evaluation": ("HOW", "'beside' training or 'inline', while everything else waits"),
    "first": (
        "WORK",
        "who gets the device where both could: 'sample', 'train', or 'due': sampling for this step and the next one, "
        "then training (schedule.device_first)",
    ),
    "steps": ("N", "steps simulated; the first quarter or more warms up and does not count"),
    "seed": ("N", "of the latencies"),
}
_EPILOG = (
    "Times are seconds of the device for a whole batch. The real loop runs on a virtual clock; nothing is computed."
)


def add_parser(commands: Any) -> None:
    """The sub-command ``simulate``."""
    text = "what each schedule would cost, before renting a GPU"
    parser: argparse.ArgumentParser = commands.add_parser("simulate", help=text, description=text, epilog=_EPILOG)
    offer(parser, _OPTIONS, Workload())
    cluster_cli.add_options(parser)
    parser.add_argument("--schedules", metavar="NAMES", help=f"of {', '.join(PRESETS)}; comma between (default all)")
    parser.add_argument("--published", action="store_true", help="verl PR 2854's way, beside what it measured")
    parser.add_argument("--improve", action="store_true", help=f"what better settings reach, of {BEST}")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(command=_simulate)


def workload(given: Mapping[str, str | None], *, published: bool = False) -> Workload:
    """Options as they are typed. Raises `UserError` for values that make no workload."""
    return Workload(**{**(VERL if published else {}), **typed(Workload, given)})


def improvements(base: Workload) -> Iterator[tuple[str, Workload]]:
    """Settings that make a workload faster, each beside those before it."""
    better = replace(
        base,
        bursts=20,
        microbatches=20,
        service="stream",
        passes="consumed",
        evaluation="beside",
        first="due",
        adaptive=True,
    )
    yield "streaming rewards", better
    better = _served(better)
    yield f"and {better.concurrency} rewards at once", better
    better = _served(replace(better, logprobs=0.0))
    yield "and the sampler's log-probs", better


def _served(base: Workload) -> Workload:
    """With places enough that the device is the bottleneck."""
    while base.service_s > 0.8 * base.device_s > 0:
        base = replace(base, concurrency=2 * base.concurrency)
    return base


def _simulate(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    if overrides:
        raise UserError(f"unknown option --{overrides[0][0]}")
    base = workload(vars(args), published=args.published)
    presets = _presets(args.schedules)
    cluster = cluster_cli.cluster(vars(args))
    if cluster is not None and (args.improve or args.published):
        raise UserError("--improve and --published are about one device: leave out the options of a cluster")
    improve = args.improve or (args.published and args.schedules is None)
    if args.json:
        print(json.dumps(_report(base, presets, args.published, improve, cluster), indent=1))
    elif cluster is not None:
        _print_workload(base)
        for line in cluster_cli.table(base, presets, cluster):
            print(line, flush=True)
    else:
        _print(base, presets, args.published, improve)
    return 0


def _report(
    base: Workload, presets: Sequence[Preset], published: bool, improve: bool, cluster: Cluster | None
) -> dict[str, Any]:
    from gleanrl.simulate.simulation import simulate

    sync = simulate(base, "sync", cluster)
    outcomes = [sync if preset == "sync" else simulate(base, preset, cluster) for preset in presets]
    rows = [
        {**_row(outcome, sync, base, cluster), "published": PUBLISHED.get(outcome.schedule)} for outcome in outcomes
    ]
    return {
        "workload": {**asdict(replace(base, latency=_NAMELESS)), "latency": base.latency.name},
        **({"cluster": asdict(cluster), "paper_s": dict(cluster.demand(base))} if cluster else {}),
        "bound_s": cluster.bound_s(base) if cluster else base.bound_s,
        "device_s": base.device_s,
        "service_s": base.service_s,
        "schedules": rows if published else [{k: v for k, v in row.items() if k != "published"} for row in rows],
        "improvements": [
            {"settings": name, "concurrency": better.concurrency, **_row(simulate(better, BEST), sync, better)}
            for name, better in (improvements(base) if improve else ())
        ],
    }


def _row(outcome: Outcome, sync: Outcome, base: Workload, cluster: Cluster | None = None) -> dict[str, Any]:
    bound_s = cluster.bound_s(base) if cluster else base.bound_s
    changes = {"change_percent": _change(outcome, sync), "bound_s": bound_s}
    told = {name: value for name, value in asdict(outcome).items() if name != "cluster"}
    if outcome.cluster is not None:
        told["cluster"] = cluster_cli.report(outcome)
    return {**told, **changes, "above_bound_percent": 100 * (outcome.step_s / bound_s - 1)}


def _print(base: Workload, presets: Sequence[Preset], published: bool, improve: bool) -> None:
    """Line by line, as each schedule is done."""
    from gleanrl.simulate.simulation import simulate

    _print_workload(base)
    print(f"bound: {base.bound_s:.1f} s a step (device {base.device_s:.1f}, rewards {base.service_s:.1f})\n")
    head = f"{'schedule':<32}{'step s':>8}{'vs sync':>9}{'vs bound':>10}{'idle':>7}{'waiting s':>11}{'staleness':>12}"
    print(head + (f"{'published':>11}" if published else ""), flush=True)
    sync = simulate(base, "sync")
    for preset in presets:
        outcome = sync if preset == "sync" else simulate(base, preset)
        told = PUBLISHED.get(preset) if published else None
        print(_line(preset, outcome, sync, base) + (f"{told:>+10.1f}%" if told else ""), flush=True)
    if improve:
        print(f"\n{BEST} with")
        for name, better in improvements(base):
            print(_line(f"  {name}", simulate(better, BEST), sync, better), flush=True)


def _print_workload(base: Workload) -> None:
    passes = f"old log-probs {base.logprobs:g}, reference {base.reference:g}"
    print(f"device, seconds a step: generating {base.g:g}, {passes}, training {base.train:g}")
    each = f"{base.latency.name} (mean {base.latency.mean:g} s)"
    print(f"rewards: {base.samples} a step, {each}, {base.concurrency} at once")
    if base.evaluate_every:
        print(f"evaluation: every {base.evaluate_every} steps, {base.evaluation}, included in the step times")


def _line(name: str, outcome: Outcome, sync: Outcome, base: Workload) -> str:
    ages = f"{outcome.staleness_mean:.2f} / {outcome.staleness_max:.0f}"
    above = 100 * (outcome.step_s / base.bound_s - 1)
    return (
        f"{name:<32}{outcome.step_s:>8.1f}{_change(outcome, sync):>+8.1f}%{above:>+9.1f}%"
        f"{100 * outcome.idle_share:>6.1f}%{outcome.reward_wait_s:>11.1f}{ages:>12}"
    )


def _change(outcome: Outcome, sync: Outcome) -> float:
    return 100 * (outcome.step_s / sync.step_s - 1)


def _presets(text: str | None) -> tuple[Preset, ...]:
    if text is None:
        return PRESETS
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PRESETS:
            raise UserError(f"--schedules names {name!r}: it must be of {', '.join(PRESETS)}")
    return tuple(preset for preset in PRESETS if preset in names)


_NAMELESS = Latency.parse("constant:0")
