"""The report's section on staleness: how many policy versions old the trained groups were.

The counts come from the metrics that `StalenessLog` writes. One test loads the page in a headless browser.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gleanrl.runtime.run_folder import Row, RunFolder
from gleanrl.schedule.step_metrics import GROUPS, TOKENS, StalenessLog
from gleanrl.tracking.report import build
from gleanrl.tracking.report.staleness import MAX_AGES, staleness
from tests.schedule_world import group_of
from tests.tracking.report.browser import assert_drawn, embedded, opened

CONFIG = '[run]\nsteps = 20\n[schedule]\npreset = "bounded_async"\nbatch = 8\nstaleness = 4\n'
BATCH = 8


def ages_of(step: int) -> list[int]:
    return [min(step, 1 + (step + place) % 4) for place in range(BATCH)]


def stale_run(path: Path, steps: int = 20, config: str = CONFIG) -> RunFolder:
    """Write a run whose metrics, in the format of the training loop, are of groups that are 0 to 4 steps old."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.config_path.write_text(config)
    with folder.metrics_path.open("w") as file:
        for step in range(steps):
            log = StalenessLog()
            log.add([group_of(place, step - age) for place, age in enumerate(ages_of(step))], step)
            file.write(json.dumps({"step": step + 1, "time": float(step), **log.metrics()}) + "\n")
    return folder


def test_the_section_shows_the_counts_of_the_run_in_a_browser(tmp_path: Path) -> None:
    page = build(stale_run(tmp_path / "run"))
    counts = Counter(age for step in range(20) for age in ages_of(step))
    shown = embedded(page)["staleness"]
    assert shown["bound"] == 4
    assert dict(zip(map(int, shown["labels"]), shown["groups"], strict=True)) == {**counts, 0: 8}
    # Each group has two tokens.
    assert shown["tokens"] == [2 * count for count in shown["groups"]]
    assert [sum(values) for values in zip(*shown["by_step"], strict=True)] == [BATCH] * 20
    assert shown["steps"] == list(range(1, 21))
    document = opened(page, tmp_path / "profile")
    assert_drawn(document)
    section = document[document.index("<h2>Staleness") : document.index("<h2>Metrics")]
    assert "the schedule allows 4" in section
    for age, count in counts.items():
        label = "1 step" if age == 1 else f"{age} steps"
        assert f'{label}</span><span class="track">' in section
        assert f'<span class="num">{count}</span>' in section
    assert "NaN" not in section
    assert section.count("<svg") == 2
    assert ">bound</text>" in section


def test_staleness_histograms_are_not_drawn_as_metric_curves(tmp_path: Path) -> None:
    names = {curve["name"] for curve in embedded(build(stale_run(tmp_path / "run")))["curves"]}
    assert {"schedule/staleness_mean", "schedule/staleness_max", "schedule/staleness_tokens"} <= names
    assert not [name for name in names if name.startswith((GROUPS, TOKENS))]


def row(step: int, **counts: float) -> Row:
    return Row(step, 0.0, {f"{GROUPS}{age[1:]}": count for age, count in counts.items()})


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        ([], {"schedule": {"preset": "bounded_async"}}),
        ([Row(1, 0.0, {"schedule/staleness_mean": 0.0})], {"schedule": {"preset": "bounded_async"}}),
        ([row(1, k0=8)], {"schedule": {"preset": "sync"}}),
        ([row(1, k0=8)], {"schedule": {"preset": "pipelined"}}),
        ([row(1, k0=8)], {}),
    ],
    ids=["nothing logged", "an older run", "sync", "pipelined", "no configuration"],
)
def test_a_run_without_staleness_counts_or_with_a_synchronous_schedule_has_no_section(
    rows: list[Row], config: dict[str, Any]
) -> None:
    assert staleness(rows, config) is None


def test_ages_up_to_the_bound_are_shown_even_if_their_count_is_zero() -> None:
    shown = staleness([row(1, k0=6, k1=2)], {"schedule": {"preset": "bounded_async", "staleness": 3}})
    assert shown is not None
    assert shown["labels"] == ["0", "1", "2", "3"]
    assert shown["groups"] == [6, 2, 0, 0]


@pytest.mark.parametrize("schedule", [{"preset": "unheard of"}, {"batch": 10, "preset": "pipelined", "chunks": 3}, 5])
def test_with_an_invalid_schedule_configuration_only_the_bound_is_missing(schedule: Any) -> None:
    shown = staleness([row(1, k0=1, k2=1)], {"schedule": schedule})
    assert shown is not None
    assert shown["bound"] is None
    assert shown["groups"] == [1, 0, 1]


def test_many_ages_are_merged_into_ranges_without_losing_groups() -> None:
    counts = {f"k{age}": float(age + 1) for age in range(40)}
    shown = staleness([row(1, **counts), row(2, k39=5.0)], {"schedule": {"preset": "bounded_async", "staleness": 40}})
    assert shown is not None
    assert len(shown["labels"]) <= MAX_AGES
    assert (shown["labels"][0], shown["labels"][-1]) == ("0-2", "39-41")
    assert shown["groups"][0] == 1 + 2 + 3
    assert shown["groups"][-1] == 40 + 5
    assert sum(shown["groups"]) == sum(counts.values()) + 5


def test_a_long_run_is_shown_as_means_over_several_steps(tmp_path: Path) -> None:
    shown = staleness([row(step, k1=4, k2=4) for step in range(3100)], {})
    assert shown is not None
    assert len(shown["steps"]) < 1600
    assert set(shown["by_step"][1]) == {4}
    assert shown["groups"] == [0, 4 * 3100, 4 * 3100]
    assert re.fullmatch(r"\d", shown["labels"][0])
