"""Tests of the simulated cluster: step times of simple workloads equal those computed by hand.

Covered are samplers, learners, weight transfers, and processor costs of the driver, reward agent and pool.
"""

from __future__ import annotations

import asyncio
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gleanrl.cli.main import main
from gleanrl.simulate import virtual_time
from gleanrl.simulate.parts import Core
from gleanrl.simulate.simulation import ClusterOutcome, Outcome, simulate
from gleanrl.simulate.workload import OVERHEADS, PRESETS, Cluster, Latency, Preset, Workload
from gleanrl.utils.errors import UserError

G, T = 40.0, 120.0


def workload(**options: Any) -> Workload:
    """64 trajectories in 16 groups: 40 s of generation and 120 s of training per step, and rewards without latency."""
    own = {"g": G, "train": T, "logprobs": 0.0, "reference": 0.0, "samples": 64, "group": 4, "bursts": 4}
    return Workload(**{**own, "latency": Latency.parse("constant:0"), "concurrency": 1000, "steps": 8, **options})


def run(preset: Preset = "sync", given: Workload | None = None, **options: Any) -> Outcome:
    return simulate(given or workload(), preset, Cluster(**options))


def of(outcome: Outcome) -> ClusterOutcome:
    assert outcome.cluster is not None
    return outcome.cluster


# --- a cluster with default values -------------------------------------------------------------
@pytest.mark.parametrize("preset", PRESETS)
def test_a_default_cluster_gives_the_outcome_of_a_simulation_without_one(preset: Preset) -> None:
    given = workload(latency=Latency.parse("uniform:1:200"), concurrency=8, evaluate_every=2)
    alone, cluster = simulate(given, preset), simulate(given, preset, Cluster())
    assert alone.cluster is None
    assert of(cluster).at_work == dict.fromkeys(OVERHEADS, 0.0)
    assert math.isinf(of(cluster).headroom)
    for name in ("step_s", "idle_share", "reward_wait_s", "staleness_mean", "staleness_max", "calls", "reward_s"):
        assert getattr(alone, name) == getattr(cluster, name)


# --- samplers and learners ------------------------------------------------------------------------
@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
@pytest.mark.parametrize("samplers", [1, 2, 4])
def test_generation_time_is_divided_by_the_number_of_samplers(placement: Any, samplers: int) -> None:
    outcome = run(samplers=samplers, placement=placement)
    assert outcome.step_s == pytest.approx(G / samplers + T, abs=1e-2)


def test_disaggregated_samplers_generate_while_the_learner_trains() -> None:
    shared, separate = (run("one_step_off", placement=where) for where in ("colocated", "disaggregated"))
    assert shared.step_s == pytest.approx(G + T, abs=1e-2)
    assert separate.step_s == pytest.approx(T, rel=0.01)
    assert of(separate).sampler_idle_share == pytest.approx(1 - G / T, abs=0.02)
    assert separate.idle_share == pytest.approx(0, abs=0.01)


def test_few_trajectories_per_sampler_take_at_least_the_floor_s_time() -> None:
    """64 trajectories on 16 samplers of 64 slots, so 4 on each.

    A full burst takes 40 s on one sampler, and ``floor`` is the share of this time that the smallest burst takes.
    """
    options = {"samplers": 16, "placement": "disaggregated", "slots": 64}
    assert run(**options).step_s == pytest.approx(T + G / 16, abs=1e-2)
    assert run(**options, floor=0.5).step_s == pytest.approx(T + G * (0.5 + 0.5 / 16), abs=1e-2)
    assert run(**options, floor=1.0).step_s == pytest.approx(T + G, abs=1e-2)


def test_a_burst_is_at_most_as_large_as_the_slots_of_a_sampler() -> None:
    """Each of 2 samplers generates two bursts of 16 trajectories, 10 s each, whatever ``bursts`` the workload has."""
    outcome = run(samplers=2, placement="disaggregated", slots=16, floor=1.0)
    assert outcome.step_s == pytest.approx(T + 2 * 10, abs=1e-2)


def test_training_time_is_divided_by_the_learners_plus_the_time_of_all_reduces() -> None:
    """4 learners at 90 % efficiency; a ring all-reduce of 2 * 3 / 4 * 10 GB at 5 GB/s takes 3 s per update."""
    outcome = run(learners=4, efficiency=0.9, gradients=10.0, network=5.0, updates=2)
    assert outcome.step_s == pytest.approx(G + T / 3.6 + 2 * 3, abs=1e-2)


# --- weight transfers -------------------------------------------------------------------------
@pytest.mark.parametrize(("broadcast", "rounds"), [("tree", 3), ("star", 7), ("chain", 1)])
def test_a_step_takes_the_time_of_a_publication_in_addition(broadcast: Any, rounds: int) -> None:
    """One copy takes 2 s. A tree doubles the copies in each round, so 7 receivers and the learner need 3 rounds."""
    outcome = run(samplers=7, placement="disaggregated", weights=20.0, bandwidth=10.0, broadcast=broadcast)
    assert outcome.step_s == pytest.approx(run(samplers=7, placement="disaggregated").step_s + 2 * rounds, abs=1e-2)
    assert of(outcome).at_work["transfer"] == pytest.approx(2 * rounds / outcome.step_s, rel=1e-3)
    assert of(outcome).first == "transfer"
    assert of(outcome).headroom == pytest.approx(outcome.step_s / (2 * rounds), rel=1e-3)


def test_colocated_samplers_copy_weights_in_the_time_of_one_transfer() -> None:
    assert Cluster(samplers=64, weights=20.0, bandwidth=10.0, broadcast="star").transfer_s == 2


def test_overlapped_weight_transfers_do_not_delay_samplers() -> None:
    """Sampling is the bottleneck: 160 s per step, against 20 s of training on other devices."""
    given = workload(g=160.0, train=20.0)
    options = {"placement": "disaggregated", "weights": 100.0, "bandwidth": 10.0}
    still, overlapping = (run("one_step_off", given, **options, overlap=how) for how in (False, True))
    assert still.step_s == pytest.approx(170, rel=0.01)
    assert overlapping.step_s == pytest.approx(160, rel=0.01)


def test_bounded_async_samplers_wait_for_weight_transfers_unless_these_overlap() -> None:
    given = workload(g=160.0, train=20.0)
    options = {"placement": "disaggregated", "weights": 100.0, "bandwidth": 10.0}
    still, overlapping = (run("bounded_async", given, **options, overlap=how) for how in (False, True))
    assert still.step_s == pytest.approx(170, rel=0.02)
    assert overlapping.step_s == pytest.approx(160, rel=0.02)


# --- processor costs of events -----------------------------------------------------------------------------
def test_the_driver_limits_the_step_time_once_its_events_fill_a_core() -> None:
    """64 trajectories of 10 turns cost 64 * (1 + 10 * 0.5) s, and 16 groups 2 s each: 416 s per step on one core."""
    costs = {"driver_trajectory": 1e6, "driver_turn": 5e5, "turns": 10, "driver_group": 2e6}
    outcome = run("bounded_async", **costs)
    assert outcome.step_s == pytest.approx(416, rel=0.02)
    assert of(outcome).first == "driver"
    assert of(outcome).headroom == pytest.approx(1, abs=0.02)
    light = run("one_step_off", **{name: cost / 1e3 for name, cost in costs.items() if name != "turns"}, turns=10)
    assert light.step_s == pytest.approx(G + T, rel=0.01)
    assert of(light).at_work["driver"] == pytest.approx(0.416 / (G + T), rel=0.02)


def test_players_take_the_costs_of_turns_from_the_driver() -> None:
    """64 trajectories cost 4 s of turns and 1 s more each: 320 s on the driver alone.

    With 4 players the driver keeps 64 s, and each player has 64 s of turns.
    """
    costs = {"driver_trajectory": 1e6, "driver_turn": 1e6, "turns": 4}
    given = workload(g=1.0, train=1.0)
    alone, played = run("bounded_async", given, **costs), run("bounded_async", given, **costs, players=4)
    assert alone.step_s == pytest.approx(320, rel=0.03)
    assert played.step_s == pytest.approx(64, rel=0.1)
    assert of(played).at_work["players"] == pytest.approx(1, abs=0.1)
    assert of(run(driver_turn=1e5, turns=4, players=2)).first == "players"


def test_the_reward_agent_has_a_core_of_its_own() -> None:
    """64 requests of 2 s run in parallel with 64 trajectories of 2 s on the driver."""
    outcome = run("one_step_off", workload(g=1.0, train=1.0), driver_trajectory=2e6, agent_request=2e6)
    assert outcome.step_s == pytest.approx(128, rel=0.05)
    assert of(outcome).at_work["agent"] == pytest.approx(1, abs=0.05)


def test_the_pool_s_costs_delay_every_step() -> None:
    outcome = run(pool_add=1e5, pool_sample=2e5, replayed=50)
    assert outcome.step_s == pytest.approx(G + T + 6.4 + 10, abs=1e-2)
    assert of(outcome).first == "pool"


@pytest.mark.parametrize(
    ("costs", "first"),
    [
        ({"driver_turn": 900.0, "turns": 10, "agent_request": 100.0, "pool_add": 50.0, "weights": 1.0}, "driver"),
        ({"driver_turn": 10.0, "agent_request": 9000.0, "pool_add": 50.0, "weights": 1.0}, "agent"),
        ({"driver_turn": 10.0, "agent_request": 100.0, "pool_add": 9000.0, "weights": 1.0}, "pool"),
        ({"driver_turn": 10.0, "agent_request": 100.0, "pool_add": 50.0, "weights": 90.0}, "transfer"),
    ],
)
def test_the_part_that_saturates_first_is_named(costs: dict[str, Any], first: str) -> None:
    assert of(run(**costs)).first == first


def test_a_core_runs_its_work_one_after_another() -> None:
    async def three() -> float:
        core = Core(asyncio.get_running_loop().time)
        await asyncio.gather(*(core.work(2) for _ in range(3)))
        await asyncio.sleep(10)
        await core.work(1)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(three()) == pytest.approx(17)


# --- bounds and invalid values -------------------------------------------------------------------------------------
@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_is_faster_than_the_computed_bound(preset: Preset, placement: Any) -> None:
    cluster = Cluster(
        samplers=3, learners=2, placement=placement, gradients=4.0, weights=15.0,
        driver_turn=2e4, turns=4, agent_request=1e5, pool_add=1e4, efficiency=0.8,
    )  # fmt: skip
    given = workload(latency=Latency.parse("uniform:1:20"), concurrency=16, steps=10)
    slack = (1 + given.staleness) * cluster.bound_s(given) / given.counted  # work done before the first counted step
    assert simulate(given, preset, cluster).step_s >= cluster.bound_s(given) - slack
    assert simulate(given, preset, cluster) == simulate(given, preset, cluster)


@pytest.mark.parametrize(
    ("name", "value"), [("samplers", 0), ("weights", math.nan), ("bandwidth", 0.0), ("efficiency", 1.5)]
)
def test_invalid_cluster_values_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        Cluster(**{name: value})


def test_a_floor_needs_slots() -> None:
    with pytest.raises(UserError, match="--slots"):
        Cluster(floor=0.5)


# --- docs/concepts/scale.md ----------------------------------------------------------------------
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "scale.md"


def test_the_first_command_of_the_scale_page_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    command = re.search(r"```bash\n(gleanrl simulate .*?)\n```", page, re.DOTALL)
    assert command is not None
    assert main(shlex.split(command[1].replace("\\\n", " "))[1:]) == 0
    shown = page.split("```text\n")[1].split("```")[0].split("\n")
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown if line] == [line for line in printed[2:] if line]


def test_the_commands_of_the_scale_page_use_its_measured_costs() -> None:
    page = PAGE.read_text(encoding="utf-8")
    options = {
        name: float(cost.replace(",", "")) for cost, name in re.findall(r"\| ([\d,]+) µs \| `--([a-z-]+)` \|", page)
    }
    assert len(options) == 6
    for name, cost in options.items():
        assert f"--{name} {cost:g} " in page
