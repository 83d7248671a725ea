"""Tests of experience replay and guidance by the command line: every schedule and option trains and survives kills."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gleanrl.experience import ExperiencePool
from tests.cli.conftest import CommandLine, assert_same
from tests.strategies import NIGHTLY

REPLAY = (
    "--replay.enabled",
    "true",
    "--schedule.group",
    "4",
    "--evaluation.every",
    "0",
    "--replay.probe_fraction",
    "0",
)
STEPS = 5
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "howto" / "algorithm.md").read_text()
MINE = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)[0]


def rows(gleanrl: CommandLine, name: str) -> list[dict[str, float]]:
    return [dict(row.metrics) for row in gleanrl.run(name).read_metrics() if "updates/done" in row.metrics]


ARMS = {
    **{
        f"{preset}": ("--schedule.preset", preset, "--schedule.chunks", "2")
        for preset in ("sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async")
    },
    "replace, own groups, shape": (
        *("--replay.placement", "replace", "--replay.grouping", "own"),
        *("--loss.replay_mode", "shape", "--loss.replay_importance", "current"),
    ),
    "recorded entropy, group baseline": ("--replay.entropy_from", "recorded", "--replay.baseline", "group"),
    "selection only": ("--replay.per_group", "0", "--replay.pool_updates", "0"),
    "extra updates": ("--replay.pool_updates", "2", "--replay.pool_batch", "3"),
    "extra updates from the half on": ("--replay.start_progress", "0.5"),
    "extra updates on its own": ("--replay.pool_updates", "1", "--replay.pool_from", "batch"),
    "scored again": ("--replay.reverify", "true", "--replay.pool_updates", "1", "--replay.per_group", "2"),
    "a band of ratios": ("--replay.max_ratio", "1.5", "--replay.max_age", "2"),
    "extra updates with a critic": ("--replay.pool_updates", "1", "--credit.estimator", "gae"),
    "own loss and ranking": ("--loss.replay_mode", "mine.py:unclipped", "--replay.select", "mine.py:shortest"),
    "with a critic": ("--credit.estimator", "gae"),
    "with a greedy baseline": ("--credit.estimator", "remax"),
    "guided, discarded": ("--guidance.enabled", "true"),
    "guided, kept": ("--guidance.enabled", "true", "--guidance.mode", "keep"),
}


@pytest.mark.parametrize("name", ARMS)
def test_every_schedule_and_replay_option_trains(gleanrl: CommandLine, name: str) -> None:
    (gleanrl.folder / "mine.py").write_text(MINE)
    ended = gleanrl.train("arm", *REPLAY, "--run.steps", str(STEPS), *ARMS[name])
    assert ended.status == 0, ended.stderr
    steps = rows(gleanrl, "arm")
    assert len(steps) == STEPS
    assert all(math.isfinite(value) for metrics in steps for value in metrics.values())
    assert sum(metrics["pool/admitted"] for metrics in steps) > 0
    replayed = sum(metrics["replay/trajectories"] for metrics in steps)
    assert (replayed == 0) == (name == "selection only")
    if replayed and "guided" not in name:
        assert any("loss/replayed/ratio/mean" in metrics for metrics in steps)
    if name == "scored again":
        assert sum(metrics["replay/reverified"] for metrics in steps) == replayed  # each time, and none in vain
        assert not any(metrics.get("pool/evicted/reverify", metrics["replay/reverify_failed"]) for metrics in steps)
    if name.startswith("extra updates"):
        assert any("replay_update/0/learner/grad_norm" in metrics for metrics in steps)
        assert all("replay_update/0/trajectories" in metrics for metrics in steps if metrics["replay/on"])
        assert not any("replay_update/0/trajectories" in metrics for metrics in steps if not metrics["replay/on"])
        begun = [bool(metrics["replay/on"]) for metrics in steps]
        assert begun == ([False] * 3 + [True] * 2 if "half" in name else [True] * STEPS)
    with ExperiencePool(gleanrl.run("arm").path / "experience.sqlite") as pool:
        assert pool.verify() == []


def documented_metrics() -> re.Pattern[str]:
    """Return a pattern of the metrics in the tables of the pages on metrics and on replay."""
    patterns = []
    for page in ("reference/metrics.md", "concepts/replay.md"):
        for cell in re.findall(r"^\| (`[^|]+) \|", (DOCS / page).read_text(), re.MULTILINE):
            first, *others = re.findall("`([^`]+)`", cell)
            parts = first.split("/")
            names = [first]
            for other in others:
                # "/max" stands for the first name with another end
                stems = ["/".join(parts[:count]) for count in range(1, len(parts))] if other[0] in "./" else [""]
                names += [stem + other.removeprefix("...") for stem in stems]
            for name in names:
                placeholders = re.sub(r"\b(NAME|CAUSE|KIND|NN|S_of_N|I|K)\b", ".+", re.escape(name))
                patterns.append(placeholders.replace(re.escape("..."), ".+"))
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def test_every_metric_of_a_run_with_all_of_replay_is_documented(gleanrl: CommandLine) -> None:
    options = (
        *("--replay.keep_failures", "2", "--loss.observation_coefficient", "0.1"),
        *("--replay.restart_share", "0.5", "--schedule.group", "2", "--schedule.batch", "4"),
    )
    ended = gleanrl.train("run", *REPLAY, *options, "--run.steps", "6")
    assert ended.status == 0, ended.stderr
    names = {name for row in gleanrl.run("run").read_metrics() for name in row.metrics}
    assert {"restart/success", "replay/age_max", "replay_update/0/age_max", "pool/failures"} <= names
    documented = documented_metrics()
    assert not documented.fullmatch("replay/unknown")
    bounded = {name for name in names if documented.fullmatch(re.sub("_(low|high)$", "", name))}
    assert sorted(name for name in names - bounded if not documented.fullmatch(name)) == []


def test_max_ratio_rejects_trajectories_also_with_recorded_entropy(gleanrl: CommandLine) -> None:
    band = ("--replay.entropy_from", "recorded", "--replay.max_ratio", "1.000001")
    ended = gleanrl.train("arm", *REPLAY, "--run.steps", str(STEPS), *band)
    assert ended.status == 0, ended.stderr
    assert sum(metrics["replay/rejected"] for metrics in rows(gleanrl, "arm")) > 0


KILLED = {
    "plain": ("--replay.pool_updates", "0"),
    "all": ("--replay.pool_updates", "1", "--guidance.enabled", "true"),
    "failures": ("--replay.keep_failures", "2", "--replay.pool_updates", "2"),
    "restarts and observations": (
        *("--replay.restart_share", "0.5", "--loss.observation_coefficient", "0.1"),
        *("--schedule.preset", "pipelined", "--schedule.group", "2", "--schedule.batch", "4"),
    ),
}
# updates in which the runs are killed
FEW = {"plain": (1, 3), "all": (3,), "failures": (5,), "restarts and observations": (3,)}
MOMENTS = [(name, moment) for name in KILLED for moment in ((1, 3, 5) if NIGHTLY else FEW[name])]


@pytest.fixture(scope="module")
def undisturbed(make_gleanrl: Callable[[], CommandLine]) -> Callable[[str], tuple[tuple[str, ...], CommandLine]]:
    """A function that returns the settings of this name in `KILLED`, and a complete run with them."""

    @cache
    def run(name: str) -> tuple[tuple[str, ...], CommandLine]:
        whole, settings = make_gleanrl(), (*REPLAY, *KILLED[name], "--run.steps", "6", "--checkpoint.every", "2")
        assert whole.train("run", *settings).status == 0
        if "--replay.restart_share" in settings:
            assert sum(metrics["restart/groups"] for metrics in rows(whole, "run")) > 0
        return settings, whole

    return run


@pytest.mark.parametrize(("name", "moment"), MOMENTS)
def test_a_run_killed_and_resumed_equals_an_undisturbed_one_bit_for_bit(
    gleanrl: CommandLine,
    undisturbed: Callable[[str], tuple[tuple[str, ...], CommandLine]],
    name: str,
    moment: int,
) -> None:
    """Pool and learner agree wherever the run was killed: before the first checkpoint, and after."""
    settings, whole = undisturbed(name)
    at = ("gleanrl.learners.engine:LocalEngine.step", moment, "SIGKILL")
    assert gleanrl.train("run", *settings, at=at).status == -9
    ended = gleanrl.train("run", *settings, "--resume")
    assert ended.status == 0, ended.stderr
    assert_same(whole.run("run"), gleanrl.run("run"))
    contents = []
    for each in (whole, gleanrl):
        with ExperiencePool(each.run("run").path / "experience.sqlite", read_only=True) as pool:
            stats = pool.stats()
            contents.append({name: stats[name] for name in ("tasks", "eligible", "trajectories", "buckets")})
    assert contents[0] == contents[1]


def test_runs_that_use_a_pool_in_turn_continue_its_ages_and_find_it_from_any_directory(
    gleanrl: CommandLine, tmp_path: Path
) -> None:
    shared = (*REPLAY, "--replay.path", "shared.sqlite", "--replay.start_progress", "0.3")
    assert gleanrl.train("first", *shared, "--run.steps", str(STEPS)).status == 0
    second = ("--run.steps", "3", "--replay.start_progress", "0", "--replay.per_group", "8")
    ended = gleanrl.train("second", *shared, *second)
    assert ended.status == 0, ended.stderr
    oldest = [metrics["replay/age_max"] for metrics in rows(gleanrl, "second") if "replay/age_max" in metrics]
    assert max(oldest) >= STEPS - 1  # the first run's trajectories are older than any of the second can be

    for name in ("first", "second"):
        assert "replay begins" in gleanrl.run(name).log_path.read_text()
    assert "replay begins" in ended.stderr

    shown = replace(gleanrl, folder=tmp_path)("pool", str(gleanrl.run("second").path))
    assert shown.status == 0, shown.stderr
    assert "shared.sqlite" in shown.stdout


def test_settings_of_replay_change_nothing_while_it_is_off(gleanrl: CommandLine) -> None:
    """A resumed run may change them then. Guided members, which are trained like replayed ones, do not depend on
    them."""
    guided = (*REPLAY[2:], "--run.steps", "4", "--guidance.enabled", "true")
    others = ("--replay.success_threshold", "2", "--replay.baseline", "group", "--replay.grouping", "own")
    assert gleanrl.train("run", *guided).status == 0
    assert gleanrl.train("other", *guided, *others).status == 0
    assert sum(metrics.get("guidance/groups", 0) for metrics in rows(gleanrl, "run")) > 0
    assert_same(gleanrl.run("run"), gleanrl.run("other"))


PLAIN = (*REPLAY[2:], "--checkpoint.every", "2", "--run.steps", "8")
STEP = "gleanrl.learners.engine:LocalEngine.step"


def test_replay_is_turned_on_and_off_with_groups_that_were_planned_before(gleanrl: CommandLine) -> None:
    plain = (*PLAIN, "--schedule.preset", "one_step_off")
    assert gleanrl.train("run", *plain, at=(STEP, 3, "SIGKILL")).status == -9
    refused = gleanrl.train("run", *plain, "--resume", "--guidance.enabled", "true").complaint
    assert "guidance.enabled" in refused
    assert gleanrl.train("run", *REPLAY, *plain, "--resume", at=(STEP, 8, "SIGKILL")).status == -9
    ended = gleanrl.train("run", *plain, "--resume")
    assert ended.status == 0, ended.stderr
    steps = rows(gleanrl, "run")
    on = sum("replay/on" in metrics for metrics in steps)
    assert ["replay/on" in metrics for metrics in steps] == [False] * 2 + [True] * on + [False] * (6 - on)
    assert 0 < on < 6
    assert sum(metrics.get("replay/trajectories", 0) for metrics in steps) > 0


def test_a_run_with_replay_turned_on_again_draws_its_own_tasks_from_a_pool_that_another_run_used(
    gleanrl: CommandLine,
) -> None:
    replay = (*REPLAY, "--replay.path", "shared.sqlite")
    plain = (*PLAIN, "--replay.enabled", "false")
    assert gleanrl.train("run", *replay, *PLAIN, at=(STEP, 4, "SIGKILL")).status == -9
    assert gleanrl.train("run", *plain, "--resume", at=(STEP, 3, "SIGKILL")).status == -9
    other = ("other", *replay, "--environment.train_tasks", "2", "--run.steps", "2")
    assert gleanrl.train(*other, at=(STEP, 1, "SIGKILL")).status == -9
    assert gleanrl.train(*other, "--resume").status == 0
    assert gleanrl.run("other").log_path.read_text().count("are not training tasks of this run") == 2  # once a start
    ended = gleanrl.train("run", *replay, *PLAIN, "--resume")
    assert ended.status == 0, ended.stderr
    assert rows(gleanrl, "run")[-1]["pool/outside"] == 0


def test_a_start_with_replay_that_is_killed_before_its_first_checkpoint_leaves_no_trace(
    make_gleanrl: Callable[[], CommandLine],
) -> None:
    """The run was started without replay. Its newest checkpoint is damaged in one folder, and gone in the other."""
    whole, killed = make_gleanrl(), make_gleanrl()
    for each in (whole, killed):
        assert each.train("run", *PLAIN, at=(STEP, 5, "SIGKILL")).status == -9
    shutil.rmtree(whole.run("run").checkpoint_path(4))
    (killed.run("run").checkpoint_path(4) / "state.json").write_text("{}")
    assert killed.train("run", *REPLAY, *PLAIN, "--resume", at=(STEP, 3, "SIGKILL")).status == -9
    for each in (whole, killed):
        ended = each.train("run", *REPLAY, *PLAIN, "--resume")
        assert ended.status == 0, ended.stderr
    assert_same(whole.run("run"), killed.run("run"))
    assert ["replay/on" in metrics for metrics in rows(whole, "run")] == [False] * 2 + [True] * 6


MISTAKES = {
    "a source that is not there": (("--replay.seed_from", "nowhere"), "nowhere"),
    "a pool that is no pool": (("--replay.path", "tiny.toml"), "tiny.toml"),
    "no fresh member left": (("--replay.placement", "replace", "--replay.per_group", "4"), "replay.per_group"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_replay_settings_are_one_line(gleanrl: CommandLine, name: str) -> None:
    settings, said = MISTAKES[name]
    ended = gleanrl.train("run", *REPLAY, *settings)
    assert ended.status == 2, ended.stderr
    assert said in ended.complaint
