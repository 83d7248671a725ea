"""The report's section on the experience pool, which is made from the metrics and from the pool's SQLite file.

Some tests load the page in a headless browser.
"""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.experience import ExperiencePool
from gleanrl.runtime.run_folder import Row, RunFolder
from gleanrl.tracking.report import build
from gleanrl.tracking.report.experience import MAX_RATES, MOST_USED, buckets, experience
from tests.experience.replay_world import group, retire
from tests.tracking.report.browser import assert_drawn, embedded, opened

TASKS = [f"task-{i}</script><b>" for i in range(8)]
STEPS = 12
UPDATE_METRICS = ("tokens/trained", "loss/policy", "loss/replayed/ratio/mean", "age_mean")


def run_with_replay(path: Path, steps: int = STEPS) -> RunFolder:
    """Write a run that adds one group per step to its pool. The n-th stored trajectory has been replayed n times."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.config_path.write_text("[run]\nsteps = 12\n[replay]\nenabled = true\n")
    random = np.random.default_rng(0)
    with ExperiencePool(folder.experience_path) as pool, folder.metrics_path.open("w") as file:
        for step in range(steps):
            name = TASKS[step % len(TASKS)]
            told = pool.observe([group(name, 1 + step % 3, 4, first=4 * step, version=step)], step)
            row = {"step": step + 1, "time": float(step), "replay/on": float(step > 1), **told, **_losses(random, step)}
            file.write(json.dumps(row) + "\n")
        keys = [s.key for own in pool.stored(TASKS).values() for s in own]
        for uses, key in enumerate(sorted(keys)):
            pool.used([key] * uses)
    return folder


def _losses(random: np.random.Generator, step: int) -> dict[str, float]:
    names = [f"loss{origin}/{name}" for origin in ("", "/replayed") for name in ("ess", "entropy", "policy_per_token")]
    names += [f"loss/replayed/ratio/{name}" for name in ("mean", "p99", "max")]
    if step > 1:
        names += [f"replay_update/{i}/{name}" for i in range(2) for name in UPDATE_METRICS]
        names.append("loss/replayed/token_share")
    names += ["tokens/trained", "replay/age_mean", "replay/age_max"]
    return {name: float(random.uniform(0.1, 5)) for name in names}


def test_the_section_shows_all_cards_and_the_most_used_trajectories_in_a_browser(tmp_path: Path) -> None:
    document = opened(build(run_with_replay(tmp_path / "run")), tmp_path / "profile")
    assert_drawn(document)
    page = document[: document.index('id="payload"')]
    assert "<h2>Experience pool</h2>" in page
    assert "NaN" not in page
    section = page[page.index("<h2>Experience pool") : page.index("<h2>Metrics")]
    titles = re.findall(r'class="name"><span title="(.*?)"', section)
    assert len(titles) == 14
    assert sum(title.startswith("Extra updates: ") for title in titles) == 5
    # Each card of an extra-update metric names the second update in its legend.
    assert section.count("update 2") >= len(UPDATE_METRICS)
    assert "Ratio of replayed tokens, now to recorded" in titles
    assert section.count('class="mono task"') == MOST_USED
    assert "task-1&lt;/script&gt;&lt;b&gt;" in section


def test_the_embedded_numbers_equal_those_of_the_metrics_and_the_pool(tmp_path: Path) -> None:
    folder = run_with_replay(tmp_path / "run")
    data = embedded(build(folder))["experience"]
    shown, rows = data["buckets"], folder.read_metrics()
    assert shown["labels"] == ["1 of 4", "2 of 4", "3 of 4"]
    assert shown["steps"] == list(range(1, STEPS + 1))
    for label, values in zip(shown["labels"], shown["values"], strict=True):
        name = f"pool/bucket/{label.replace(' ', '_')}"
        assert values == [row.metrics.get(name, 0) for row in rows]
    assert sum(values[-1] for values in shown["values"]) == rows[-1].metrics["pool/eligible"] == len(TASKS)
    share = [row.metrics.get("loss/replayed/token_share", 0) for row in rows]
    assert data["share"]["values"] == pytest.approx(share, rel=1e-5)
    assert share[:2] == [0, 0]
    extra = [sum(row.metrics.get(f"replay_update/{i}/tokens/trained", 0) for i in range(2)) for row in rows]
    trained = [row.metrics["tokens/trained"] for row in rows]
    expected = [more / (more + own) for more, own in zip(extra, trained, strict=True)]
    assert data["extra_share"]["values"] == pytest.approx(expected, rel=1e-5)
    assert [value > 0 for value in expected] == [False] * 2 + [True] * (STEPS - 2)
    plain = [Row(1, 0.0, {"replay/on": 1.0, "tokens/trained": 5.0})]
    told = experience(folder, plain, {})
    assert told is not None
    assert told["extra_share"] is None

    with ExperiencePool(folder.experience_path, read_only=True) as pool:
        stored = [s for own in pool.stored(TASKS).values() for s in own]
    uses = sorted((s.uses for s in stored), reverse=True)
    assert uses == list(range(23, -1, -1))
    assert data["pool"]["trajectories"] == 24
    assert data["pool"]["uses"] == [["0", 1], ["1", 1], ["2-3", 2], ["4-7", 4], ["8 or more", 16]]
    most = data["pool"]["most"]
    assert [one["uses"] for one in most] == uses[:MOST_USED]
    known = {s.key: s for s in stored}
    for one in most:
        own = known[one["key"]]
        assert (one["task"], one["uses"], one["reward"]) == (own.trajectory.task_id, own.uses, 1.0)
        assert one["age"] == STEPS - 1 - own.version
        assert one["entropy"] == pytest.approx(own.entropy)


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda path: path.unlink(), "there is no experience pool at"),
        (lambda path: path.write_bytes(b"no database" * 1000), "not an SQLite file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5000]), "damaged"),
    ],
    ids=["missing", "another file", "cut"],
)
def test_a_pool_that_cannot_be_read_is_replaced_by_a_one_line_problem(tmp_path: Path, harm: Any, expected: str) -> None:
    folder = run_with_replay(tmp_path / "run")
    harm(folder.experience_path)
    page = build(folder)
    data = embedded(page)["experience"]
    assert data["pool"] is None
    assert expected in data["problem"]
    assert "\n" not in data["problem"]
    document = opened(page, tmp_path / "profile")
    assert_drawn(document)
    assert "The pool's file cannot be shown: " in document
    # The part of the section that is made from the metrics is still shown.
    assert "Tasks that can be replayed" in document


def test_a_damaged_record_is_shown_without_its_reward(tmp_path: Path) -> None:
    folder = run_with_replay(tmp_path / "run")
    before = embedded(build(folder))["experience"]["pool"]["most"]
    with sqlite3.connect(folder.experience_path) as db:
        db.execute("UPDATE blobs SET data = x'00' WHERE id = ?", (before[0]["key"],))
    after = embedded(build(folder))["experience"]["pool"]["most"]
    assert after[0] == {**before[0], "reward": None, "damaged": True}
    assert after[1:] == before[1:]


def test_a_run_without_replay_has_no_section(tmp_path: Path) -> None:
    folder = run_with_replay(tmp_path / "run")
    plain = [Row(1, 0.0, {"reward/mean": 0.5})]
    assert experience(folder, plain, {"replay": {"enabled": False}}) is None
    assert experience(folder, plain, {}) is None


def test_a_run_without_steps_shows_that_no_step_was_trained_yet(tmp_path: Path) -> None:
    folder = run_with_replay(tmp_path / "run", steps=0)
    data = embedded(build(folder))["experience"]
    assert data["buckets"]["steps"] == data["pool"]["most"] == []
    document = opened(build(folder), tmp_path / "profile")
    assert_drawn(document)
    assert "No step has been learned from yet." in document


def test_many_solve_rates_are_merged_into_ranges_without_losing_tasks() -> None:
    sizes = {f"pool/bucket/{s}_of_{n}": float(s + 1) for n in (15, 16) for s in range(n + 1)}
    shown = buckets([Row(1, 0.0, {"pool/tasks": 9.0, "pool/bucket/0_of_0": 5.0, **sizes})])
    assert len(shown["labels"]) == MAX_RATES + 1
    assert shown["labels"][:3] == ["not tried", "0 %", "0-14 %"]
    assert shown["labels"][-2:] == ["86-100 %", "100 %"]
    values = dict(zip(shown["labels"], [value for (value,) in shown["values"]], strict=True))
    assert sum(values.values()) == 5 + sum(sizes.values())
    assert (values["0 %"], values["100 %"]) == (2, 16 + 17)
    assert values["0-14 %"] == sum(s + 1 for n in (15, 16) for s in range(1, n + 1) if s / n < 1 / 7)


def test_retired_tasks_are_marked_in_the_table(tmp_path: Path) -> None:
    folder = run_with_replay(tmp_path / "run")
    with ExperiencePool(folder.experience_path) as pool:
        retire(pool, TASKS[:1])
    most = embedded(build(folder))["experience"]["pool"]["most"]
    assert {one["task"] for one in most if one["retired"]} == {TASKS[0]}
