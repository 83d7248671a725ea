"""The part of `gleanrl simulate` that is about a cluster: its options, and the tables of what its parts do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gleanrl.simulate.cluster import OVERHEADS, Cluster, Overhead
from gleanrl.simulate.options import offer, typed
from gleanrl.simulate.workload import Preset, Workload

if TYPE_CHECKING:
    from gleanrl.simulate.simulation import Outcome

_OPTIONS: Mapping[str, tuple[str, str]] = {
    "samplers": ("N", "engines that generate; --g is the time that one alone takes for a batch"),
    "sampler_speeds": (
        "NUMBERS",
        "of the samplers, commas between, again from the first after the last; 1 = as --g says",
    ),
    "placement": ("WHERE", "samplers lie on the learners' devices ('colocated') or have their own ('disaggregated')"),
    "slots": ("N", "trajectories that a sampler decodes at once, the largest burst; 0 = its share of a batch / bursts"),
    "floor": ("SHARE", "of a full burst's time that a burst takes however few are in it"),
    "learners": ("N", "data-parallel ranks; --train, --logprobs and --reference are the times of one alone"),
    "efficiency": ("SHARE", "of their ideal speed-up that learners reach, without the all-reduce"),
    "gradients": ("GB", "that an optimizer update reduces over the learners"),
    "network": ("GB/S", "between two learners"),
    "updates": ("N", "optimizer updates a step"),
    "weights": ("GB", "of a publication"),
    "bandwidth": ("GB/S", "into a sampler and out of whoever sends to it"),
    "broadcast": ("HOW", "weights reach the samplers: 'tree', 'star' (one after the other) or 'chain'"),
    "overlap": ("YES_OR_NO", "samplers generate on while weights travel; the loop waits either way"),
    "driver_trajectory": ("US", "the driver's processor time for a trajectory (benchmarks/driver.py)"),
    "driver_group": ("US", "the same for a group"),
    "driver_turn": ("US", "the same for a turn"),
    "turns": ("N", "turns a trajectory"),
    "players": ("N", "processes that play the episodes and do the turns' work; 0 = the driver does it"),
    "agent_request": ("US", "the reward agent's processor time for a request (benchmarks/reward_agent.py)"),
    "agent": ("PROCESS", "of the reward agent: its 'own' or the 'driver' one"),
    "pool_add": ("US", "the experience pool's time for a fresh trajectory (benchmarks/pool.py)"),
    "pool_sample": ("US", "the same for a replayed one"),
    "replayed": ("N", "replayed trajectories a step"),
    "sampler_mtbf": ("HOURS", "between two failures of one sampler, whose burst is generated again; 0 = never"),
    "environment_mtbf": ("HOURS", "of episodes between two failures of an environment; 0 = never"),
    "agent_mtbf": ("HOURS", "between two failures of the reward agent, whose requests are asked again; 0 = never"),
    "learner_mtbf": ("HOURS", "between two failures of one learner, back to the last checkpoint; 0 = never"),
    "restart": ("SECONDS", "until a sampler, the reward agent or the learners are back"),
    "environment_restart": ("SECONDS", "until an environment is back"),
    "checkpoint_every": ("N", "steps between checkpoints"),
    "checkpoint": ("SECONDS", "that the loop waits for a checkpoint"),
    "tokens": ("N", "sampled tokens a trajectory, for the tokens a second"),
}


def add_options(parser: Any) -> None:
    """Those of a cluster, in a group of their own."""
    offer(parser.add_argument_group("a cluster (docs/concepts/scale.md)"), _OPTIONS, Cluster())


def cluster(given: Mapping[str, str | None]) -> Cluster | None:
    """As the options say; None where none of them was given. Raises `UserError` for values that make no cluster."""
    values = typed(Cluster, given)
    return Cluster(**values) if values else None


def described(cluster: Cluster, workload: Workload) -> Iterator[str]:
    """What is simulated, and what each part does on paper."""
    where = "on the learners' devices" if cluster.placement == "colocated" else "on devices of their own"
    yield f"cluster: {cluster.samplers} samplers {where}, {cluster.learners} learners"
    demand = cluster.demand(workload)
    yield "on paper, seconds a step: " + ", ".join(f"{name} {seconds:.3g}" for name, seconds in demand.items())
    yield f"bound: {cluster.bound_s(workload):.1f} s a step"


def table(base: Workload, presets: Sequence[Preset], cluster: Cluster) -> Iterator[str]:
    """Line by line, as each schedule is done."""
    from gleanrl.simulate.simulation import simulate

    yield from described(cluster, base)
    shares = "".join(f"{name:>9}" for name in ("learner", "sampler", "rewards", "drain", "lost"))
    at_work = "".join(f"{name:>9}" for name in _shown(cluster))
    head = f"{'':<43}{'idle or waiting, share of the time':^45}{'at work, share of the time':^{len(at_work)}}"
    yield f"\n{head.rstrip()}"
    yield f"{'schedule':<24}{'step s':>8}{'tokens/s':>11}{shares}{at_work}  saturates first"
    for preset in presets:
        yield _line(simulate(base, preset, cluster), _shown(cluster))


def _shown(cluster: Cluster) -> tuple[Overhead, ...]:
    return tuple(name for name in OVERHEADS if name != "players" or cluster.players)


def report(outcome: Outcome) -> dict[str, Any]:
    """JSON-ready, of an outcome on a cluster."""
    assert outcome.cluster is not None
    room = outcome.cluster.headroom
    ends = {"first": outcome.cluster.first, "headroom": room} if math.isfinite(room) else {}
    return {**asdict(outcome.cluster), **ends}


def _line(outcome: Outcome, shown: Sequence[Overhead]) -> str:
    of = outcome.cluster
    assert of is not None
    idle = (outcome.idle_share, of.sampler_idle_share, _waiting(outcome), of.drain_share, of.loss_share)
    shares = "".join(f"{100 * share:>8.1f}%" for share in idle)
    at_work = "".join(f"{100 * of.at_work[name]:>8.2f}%" for name in shown)
    rate = f"{of.tokens_per_s:,.0f}" if of.tokens_per_s else f"{of.groups_per_s:.2f} gr"
    first = f"{of.first} at {of.headroom:.3g}x" if math.isfinite(of.headroom) else "-"
    return f"{outcome.schedule:<24}{outcome.step_s:>8.1f}{rate:>11}{shares}{at_work}  {first}"


def _waiting(outcome: Outcome) -> float:
    """Share of the time in which the learner had nothing to do while rewards were pending."""
    assert outcome.cluster is not None
    return outcome.reward_wait_s / (outcome.step_s * (1 - outcome.cluster.loss_share))
