"""`gleanrl simulate`: predicts the time per step of each training schedule.

The options state how long generating, training and rewards take. No GPU and no model are needed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from gleanrl.cli.common import guarded, terminal_progress
from gleanrl.simulate.workload import OVERHEADS, PRESETS, Cluster, Overhead, Preset, Workload
from gleanrl.utils.errors import UserError

if TYPE_CHECKING:
    from gleanrl.simulate.simulation import Outcome

    Simulate = Callable[..., list[Outcome]]  # `simulate` with each seed, which also reports progress

BEST: Preset = "pipelined_one_step_off"
SEEDS = 5
"""Default number of seeds if the latencies have a heavy tail. The range of 5 results contains the median in 94 % of all
cases."""
VERL: Mapping[str, Any] = {
    # In verl PR 2854, four calls of `update_actor` take 129.1 s, and a single call for the whole batch takes 117.2 s.
    # So each of the three further calls costs 4 s.
    "call": 4.0,
    "bursts": 1,
    "microbatches": 1,
    "passes": "generated",
    "service": "verl",
    "evaluate_every": 5,
    "evaluation": "inline",
    "first": "sample",
    "steps": 15,
}
"""The options that describe the experiment of verl PR 2854, which ``--published`` simulates.

In this experiment, rewards are requested batch by batch, and the time per step includes the evaluations.
"""
PUBLISHED: Mapping[Preset, float] = {"pipelined": -12.30, "one_step_off": -25.16, "pipelined_one_step_off": -30.85}
"""Change of the total training time against the schedule sync, in percent, as reported in verl PR 2854."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Unless an option states otherwise, times are seconds that the device works for a whole batch. The simulation "
        "runs the real training loop on a virtual clock, with stand-ins for sampler, learner and rewards."
    )
    add_options(parser, Workload)
    add_options(parser.add_argument_group("a cluster (docs/concepts/scale.md)"), Cluster)
    text = (
        "number of seeds, from --seed on. Results are means over them, and the lowest and the highest time of a step "
        f"are shown (default 1, and {SEEDS} if the standard deviation of --latency is above its mean: a heavy tail)"
    )
    parser.add_argument("--seeds", metavar="N", type=int, help=text)
    text = f"schedules to simulate, separated by commas (default: all): {', '.join(PRESETS)}"
    parser.add_argument("--schedules", metavar="NAMES", help=text)
    text = "simulate the setup of verl PR 2854, and print the speed-ups published there for comparison"
    parser.add_argument("--published", action="store_true", help=text)
    text = f"also simulate {BEST} with settings that make it faster"
    parser.add_argument("--improve", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(command=guarded(_simulate))


def add_options(parser: Any, model: type[Workload | Cluster]) -> None:
    """Add an option for each field of ``model``.

    The option's help is the field's description. Its placeholder (metavar) is the text in the field's annotation, or
    the values of a Literal.
    """
    for name, field in model.model_fields.items():
        default = field.default
        if isinstance(default, bool):
            metavar, shown = "YES_OR_NO", "yes" if default else "no"
        else:
            texts = [text for text in field.metadata if isinstance(text, str)]
            metavar = texts[0] if texts else "|".join(get_args(field.annotation))
            shown = f"{default:g}" if isinstance(default, float) else getattr(default, "name", default)
        meaning = f"{' '.join((field.description or '').split())} (default {shown})"
        parser.add_argument(_flag(name), dest=name, metavar=metavar, help=meaning, default=argparse.SUPPRESS)


def make_model(model: type[Any], values: Mapping[str, Any]) -> Any:
    """Construct ``model`` from option values, which are text. Raises `UserError` for the first invalid value."""
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{_flag(str(first['loc'][0]))} is {first['input']!r}: {first['msg'].lower()}") from None


def improvements(base: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield names and workloads of increasing speed. Each workload has the improvements of the previous ones too."""
    better = base.model_copy(
        update={
            "bursts": 20,
            "microbatches": 20,
            "service": "stream",
            "passes": "consumed",
            "evaluation": "background",
            "first": "due",
            "adaptive": True,
        }
    )
    yield "streaming rewards", better
    better = _add_places(better)
    yield f"and {better.concurrency} rewards at once", better
    better = _add_places(better.model_copy(update={"logprobs": 0.0}))
    yield "and the sampler's log-probs", better


def _add_places(base: Workload) -> Workload:
    """Double ``concurrency`` until the reward service is busy for at most 80 % of the device's time per step."""
    while base.service_s > 0.8 * base.device_s > 0:
        base = base.model_copy(update={"concurrency": 2 * base.concurrency})
    return base


def _simulate(args: argparse.Namespace) -> int:
    given = vars(args)
    of_workload = {name: given[name] for name in Workload.model_fields if name in given}
    of_cluster = {name: given[name] for name in Cluster.model_fields if name in given}
    base = make_model(Workload, {**(VERL if args.published else {}), **of_workload})
    cluster = make_model(Cluster, of_cluster) if of_cluster else None
    if cluster is not None and (args.improve or args.published):
        raise UserError("--improve and --published are about one device: leave out the options of a cluster")
    seeds = args.seeds
    if seeds is None:
        seeds = SEEDS if base.latency.heavy_tailed else 1
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}: give a number above 0")
    names = PRESETS if args.schedules is None else [name.strip() for name in args.schedules.split(",")]
    for name in names:
        if name not in PRESETS:
            raise UserError(f"--schedules names {name!r}: it must be of {', '.join(PRESETS)}")
    presets: list[Preset] = [preset for preset in PRESETS if preset in names]
    improve = args.improve or (args.published and args.schedules is None)

    if not args.json:
        passes = f"old log-probs {base.logprobs:g}, reference {base.reference:g}"
        print(f"device, seconds a step: generating {base.g:g}, {passes}, training {base.train:g}")
        each = f"{base.latency.name} (mean {base.latency.mean:g} s)"
        print(f"rewards: {base.samples} a step, {each}, {base.concurrency} at once")
        if base.evaluate_every:
            print(f"evaluation: every {base.evaluate_every} steps, {base.evaluation}, included in the step times")
        if seeds > 1:
            print(f"seeds: {seeds}; times are means, with the lowest and the highest of a step")

    from gleanrl.simulate.simulation import simulate

    count = len({"sync", *presets}) + (len(list(improvements(base))) if improve else 0)
    report: dict[str, Any] = {}
    with terminal_progress().stage("simulating", count * seeds) as stage:

        def simulated(workload: Workload, preset: Preset, on: Cluster | None = None) -> list[Outcome]:
            outcomes = []
            for number in range(seeds):
                seeded = workload.model_copy(update={"seed": workload.seed + number})
                outcomes.append(simulate(seeded, preset, on))
                stage.advance()
            return outcomes

        if args.json:
            report = _report(simulated, base, presets, args.published, improve, cluster)
        else:
            lines = _table(simulated, base, presets, args.published, improve, seeds)
            for line in lines if cluster is None else _cluster_table(simulated, base, presets, cluster, seeds):
                print(line, flush=True)
    if args.json:
        print(json.dumps(report, indent=1))
    return 0


def _report(
    simulate: Simulate,
    base: Workload,
    presets: Sequence[Preset],
    published: bool,
    improve: bool,
    cluster: Cluster | None,
) -> dict[str, Any]:
    sync = simulate(base, "sync", cluster)
    bound_s = cluster.bound_s(base) if cluster else base.bound_s
    report: dict[str, Any] = {"workload": base.model_dump()}
    if cluster is not None:
        report |= {"cluster": cluster.model_dump(), "paper_s": dict(cluster.demand(base))}
    report |= {"bound_s": bound_s, "device_s": base.device_s, "service_s": base.service_s}
    report["schedules"] = []
    for preset in presets:
        row = _row(sync if preset == "sync" else simulate(base, preset, cluster), sync, bound_s)
        report["schedules"].append({**row, "published": PUBLISHED.get(preset)} if published else row)
    report["improvements"] = []
    for name, better in improvements(base) if improve else ():
        row = _row(simulate(better, BEST), sync, better.bound_s)
        report["improvements"].append({"settings": name, "concurrency": better.concurrency, **row})
    return report


def _row(outcomes: Sequence[Outcome], sync: Sequence[Outcome], bound_s: float) -> dict[str, Any]:
    """Convert outcomes to JSON values, and add their difference to ``sync`` and to the lower bound in percent."""
    from gleanrl.simulate.simulation import average

    outcome = average(outcomes)
    row = asdict(outcome)
    row["step_s_of_seeds"] = [one.step_s for one in outcomes]
    of = outcome.cluster
    if of is None:
        del row["cluster"]
    elif math.isfinite(of.headroom):
        row["cluster"] |= {"first": of.first, "headroom": of.headroom}
    row["change_percent"] = 100 * (outcome.step_s / average(sync).step_s - 1)
    row["bound_s"] = bound_s
    row["above_bound_percent"] = 100 * (outcome.step_s / bound_s - 1)
    return row


def _table(
    simulate: Simulate, base: Workload, presets: Sequence[Preset], published: bool, improve: bool, seeds: int
) -> Iterator[str]:
    from gleanrl.simulate.simulation import average

    def line(name: str, outcomes: Sequence[Outcome], workload: Workload) -> str:
        outcome = average(outcomes)
        above = 100 * (outcome.step_s / workload.bound_s - 1)
        # With one seed, both schedules draw from the same stream of latencies, so the change is computed for each seed.
        changes = [100 * (one.step_s / of_sync.step_s - 1) for one, of_sync in zip(outcomes, sync, strict=True)]
        change = f"{100 * (outcome.step_s / average(sync).step_s - 1):>+8.1f}%"
        ages = f"{outcome.staleness_mean:.2f} / {outcome.staleness_max:.0f}"
        if seeds > 1:
            change = f"{_range([one.step_s for one in outcomes], '.1f')}{change}{_range(changes, '+.1f')}"
        return (
            f"{name:<32}{outcome.step_s:>8.1f}{change}{above:>+9.1f}%"
            f"{100 * outcome.idle_share:>6.1f}%{outcome.reward_wait_s:>11.1f}{ages:>12}"
        )

    yield f"bound: {base.bound_s:.1f} s a step (device {base.device_s:.1f}, rewards {base.service_s:.1f})\n"
    between = f"{'lowest, highest':>18}" if seeds > 1 else ""
    head = f"{'schedule':<32}{'step s':>8}{between}{'vs sync':>9}{between}{'vs bound':>10}"
    head += f"{'idle':>7}{'waiting s':>11}{'staleness':>12}"
    yield head + (f"{'published':>11}" if published else "")
    sync = simulate(base, "sync")
    for preset in presets:
        shown = line(preset, sync if preset == "sync" else simulate(base, preset), base)
        yield shown + (f"{PUBLISHED[preset]:>+10.1f}%" if published and preset in PUBLISHED else "")
    if improve:
        yield f"\n{BEST} with"
        for name, better in improvements(base):
            yield line(f"  {name}", simulate(better, BEST), better)


def _range(values: Sequence[float], form: str) -> str:
    return f"{f'{min(values):{form}}, {max(values):{form}}':>18}"


def _cluster_table(
    simulate: Simulate, base: Workload, presets: Sequence[Preset], cluster: Cluster, seeds: int
) -> Iterator[str]:
    from gleanrl.simulate.simulation import average

    where = "on the learners' devices" if cluster.placement == "colocated" else "on devices of their own"
    yield f"cluster: {cluster.samplers} samplers {where}, {cluster.learners} learners"
    demand = ", ".join(f"{name} {seconds:.3g}" for name, seconds in cluster.demand(base).items())
    yield f"on paper, seconds a step: {demand}"
    yield f"bound: {cluster.bound_s(base):.1f} s a step"
    parts: list[Overhead] = [name for name in OVERHEADS if name != "players" or cluster.players]
    shares = "".join(f"{name:>9}" for name in ("learner", "sampler", "rewards", "drain"))
    at_work = "".join(f"{name:>9}" for name in parts)
    groups = f"{'idle or waiting, share of the time':^36}{'at work, share of the time':^{len(at_work)}}"
    between = f"{'lowest, highest':>18}" if seeds > 1 else ""
    yield f"\n{'':<{43 + len(between)}}{groups}".rstrip()
    yield f"{'schedule':<24}{'step s':>8}{between}{'tokens/s':>11}{shares}{at_work}  saturates first"
    for preset in presets:
        outcomes = simulate(base, preset, cluster)
        outcome = average(outcomes)
        of = outcome.cluster
        assert of is not None
        rate = f"{of.tokens_per_s:,.0f}" if of.tokens_per_s else f"{of.groups_per_s:.2f} gr"
        idle = (outcome.idle_share, of.sampler_idle_share, outcome.reward_wait_s / outcome.step_s, of.drain_share)
        shares = "".join(f"{100 * share:>8.1f}%" for share in idle)
        at_work = "".join(f"{100 * of.at_work[name]:>8.2f}%" for name in parts)
        first = f"{of.first} at {of.headroom:.3g}x" if math.isfinite(of.headroom) else "-"
        lowest = _range([one.step_s for one in outcomes], ".1f") if between else ""
        yield f"{preset:<24}{outcome.step_s:>8.1f}{lowest}{rate:>11}{shares}{at_work}  {first}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
