"""Tests of `gleanrl simulate`: its table, its JSON, and one-line errors for invalid workloads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from gleanrl.simulate.workload import PRESETS
from tests.cli.conftest import CommandLine

SMALL = ("--samples", "40", "--concurrency", "8", "--latency", "constant:60", "--bursts", "4", "--steps", "8")


def simulated(gleanrl: CommandLine, *argv: str) -> Any:
    ended = gleanrl.here("simulate", *SMALL, *argv, "--json")
    assert ended.status == 0, ended.stderr
    assert ended.stderr == ""
    return json.loads(ended.stdout)


def test_the_table_has_a_line_for_each_schedule(gleanrl: CommandLine) -> None:
    ended = gleanrl.here("simulate", *SMALL)
    assert (ended.status, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[0] == "device, seconds a step: generating 40, old log-probs 45, reference 36, training 117"
    assert lines[1] == "rewards: 40 a step, constant:60 (mean 60 s), 8 at once"
    assert lines[2] == "bound: 300.0 s a step (device 238.0, rewards 300.0)"
    rows = [line.split() for line in lines[5:]]
    assert [row[0] for row in rows] == list(PRESETS)
    assert rows[0][2] == "+0.0%"
    shown = {row[0]: float(row[1]) for row in rows}
    told = {row["schedule"]: row for row in simulated(gleanrl)["schedules"]}
    assert shown == {name: pytest.approx(row["step_s"], abs=0.051) for name, row in told.items()}


def test_on_a_terminal_the_progress_is_on_standard_error_and_the_table_is_not(gleanrl: CommandLine) -> None:
    plain = gleanrl.here("simulate", *SMALL)
    gleanrl.extra["FORCE_COLOR"] = "1"  # makes rich treat any stream as a terminal
    shown = gleanrl.here("simulate", *SMALL)
    assert shown.stdout == plain.stdout
    assert f"simulating: {len(PRESETS)}/{len(PRESETS)} in " in shown.stderr


def test_json_contains_the_workload_its_bounds_and_the_results(gleanrl: CommandLine) -> None:
    report = simulated(gleanrl, "--schedules", "one_step_off, sync")
    assert report["workload"]["latency"] == "constant:60"
    assert (report["bound_s"], report["device_s"], report["service_s"]) == (300, 238, 300)
    sync, off = report["schedules"]
    assert (sync["schedule"], off["schedule"]) == ("sync", "one_step_off")
    assert (sync["staleness_max"], off["staleness_max"]) == (0, 1)
    assert off["change_percent"] == pytest.approx(100 * (off["step_s"] / sync["step_s"] - 1))
    assert off["above_bound_percent"] == pytest.approx(100 * (off["step_s"] / 300 - 1))
    assert report["improvements"] == []
    assert "published" not in sync


def test_random_latencies_are_simulated_with_several_seeds_and_the_range_is_shown(gleanrl: CommandLine) -> None:
    argv = ("--latency", "lognormal:5:1.46", "--schedules", "sync,one_step_off")
    seeds = [simulated(gleanrl, *argv, "--seeds", "1", "--seed", str(3 + n))["schedules"] for n in range(5)]
    rows = simulated(gleanrl, *argv, "--seed", "3")["schedules"]
    for row, alone in zip(rows, zip(*seeds, strict=True), strict=True):
        assert row["step_s_of_seeds"] == [one["step_s"] for one in alone]
        assert row["step_s"] == pytest.approx(sum(row["step_s_of_seeds"]) / 5)
        assert len(set(row["step_s_of_seeds"])) == 5
    for more in ((), CLUSTER):
        shown = gleanrl.here("simulate", *SMALL, *argv, *more, "--seed", "3").stdout
        lowest, highest = re.findall(r"[\d.]+", re.search(r"^sync +[\d.]+ +([\d.]+, [\d.]+) ", shown, re.M)[1])
        if not more:
            found = rows[0]["step_s_of_seeds"]
            assert (float(lowest), float(highest)) == pytest.approx((min(found), max(found)), abs=0.051)
    assert gleanrl.here("simulate", *SMALL, "--seeds", "0").status == 2


def test_one_schedule_is_still_compared_with_sync(gleanrl: CommandLine) -> None:
    (alone,) = simulated(gleanrl, "--schedules", "pipelined")["schedules"]
    among = {row["schedule"]: row for row in simulated(gleanrl)["schedules"]}
    assert alone == among["pipelined"]
    assert alone["change_percent"] < 0


def test_improve_lists_settings_that_each_shorten_the_step(gleanrl: CommandLine) -> None:
    report = simulated(gleanrl, "--improve", "--schedules", "sync")
    names = [row["settings"] for row in report["improvements"]]
    assert names == ["streaming rewards", "and 16 rewards at once", "and the sampler's log-probs"]
    steps = [row["step_s"] for row in report["improvements"]]
    assert steps == sorted(steps, reverse=True)
    assert report["improvements"][-1]["bound_s"] == 193


def test_published_simulates_verl_s_setup_and_shows_its_measurements(gleanrl: CommandLine) -> None:
    report = simulated(gleanrl, "--published", "--schedules", "sync,one_step_off", "--steps", "15")
    assert report["workload"]["service"] == "verl"
    assert report["workload"]["evaluate_every"] == 5
    assert [row["published"] for row in report["schedules"]] == [None, -25.16]
    shown = gleanrl.here("simulate", *SMALL, "--published", "--schedules", "one_step_off", "--steps", "15").stdout
    assert re.search(r"^one_step_off .* -25\.2%$", shown, re.MULTILINE)
    changed = simulated(gleanrl, "--published", "--schedules", "sync", "--evaluate-every", "0")
    assert changed["workload"]["evaluate_every"] == 0


def test_measured_latencies_come_from_a_file(gleanrl: CommandLine) -> None:
    (gleanrl.folder / "latencies").write_text("60\n" * 5)
    report = simulated(gleanrl, "--schedules", "sync", "--latency", "latencies")
    assert report["workload"]["latency"] == "latencies"
    assert report["schedules"] == simulated(gleanrl, "--schedules", "sync")["schedules"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--g", "fast"],
        ["--train", "-3"],
        ["--samples", "1.5"],
        ["--samples", "41"],
        ["--latency", "often"],
        ["--schedules", "fast"],
        ["--service", "slow"],
        ["--adaptive", "maybe"],
        ["--speed", "9"],
        ["--placement", "far"],
        ["--bandwidth", "0"],
        ["--improve", "--samplers", "2"],
    ],
)
def test_bad_values_are_one_line_that_names_the_option(gleanrl: CommandLine, argv: list[str]) -> None:
    ended = gleanrl.here("simulate", *argv)
    assert (ended.status, ended.stdout) == (2, "")
    assert argv[0] in ended.complaint


CLUSTER = (
    "--samplers",
    "4",
    "--learners",
    "2",
    "--placement",
    "disaggregated",
    "--weights",
    "30",
    "--driver-turn",
    "500",
)


def test_the_table_of_a_cluster_shows_each_part_and_what_saturates_first(gleanrl: CommandLine) -> None:
    ended = gleanrl.here("simulate", *SMALL, *CLUSTER, "--tokens", "100")
    assert (ended.status, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[2] == "cluster: 4 samplers on devices of their own, 2 learners"
    assert lines[3].startswith("on paper, seconds a step: samplers 10, learners 99, rewards 300, driver 0.02, ")
    assert lines[4] == "bound: 300.0 s a step"
    rows = {line.split()[0]: line.split() for line in lines[8:]}
    assert list(rows) == list(PRESETS)
    report = simulated(gleanrl, *CLUSTER, "--tokens", "100")
    assert (report["cluster"]["samplers"], report["paper_s"]["transfer"]) == (4, pytest.approx(3.6))
    for row in report["schedules"]:
        told = rows[row["schedule"]]
        assert float(told[1]) == pytest.approx(row["step_s"], abs=0.051)
        assert float(told[2]) == pytest.approx(40 * 100 / row["step_s"], abs=0.51)
        assert told[-3:-1] == ["transfer", "at"]
        assert row["cluster"]["first"] == "transfer"
        assert row["cluster"]["headroom"] == pytest.approx(1 / row["cluster"]["at_work"]["transfer"])


def test_json_without_a_cluster_has_no_cluster_fields(gleanrl: CommandLine) -> None:
    report = simulated(gleanrl, "--schedules", "sync")
    assert not {"cluster", "paper_s"} & report.keys()
    assert "cluster" not in report["schedules"][0]


def test_help_names_every_option_with_its_default(gleanrl: CommandLine) -> None:
    shown = " ".join(gleanrl.here("simulate", "--help").stdout.split())
    assert shown.startswith("usage: gleanrl simulate")
    for words in ("--g SECONDS", "--latency FORM", "(default uniform:1:40)", "--evaluate-every N", "--published"):
        assert words in shown


def test_simulate_does_not_import_torch(gleanrl: CommandLine) -> None:
    code = "import sys; from gleanrl.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "simulate", *SMALL, "--schedules", "pipelined"]
    subprocess.run(command, check=True, capture_output=True, env=gleanrl.environment)
