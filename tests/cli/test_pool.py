"""Tests of `gleanrl pool`, mostly in processes of its own, on pools and runs on disk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool import transfer
from gleanrl.experience.pool.pool import Incoming, Stored
from gleanrl.rollout.renderer import Renderer
from gleanrl.runtime.records import RolloutRecord, write_rollouts
from gleanrl.types import START_TURNS, StopReason, segment_arrays
from tests.cli.conftest import CommandLine
from tests.experience.pool_world import contents, episode, solved, task


@pytest.fixture
def pool(gleanrl: CommandLine) -> Path:
    """The pool of a run ``a``: task x with 3 of 4 solved at step 1, y with 1 of 4 at step 9, and z retired."""
    folder = gleanrl.folder / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[replay]\nenabled = true\n")
    with ExperiencePool(folder / "experience.sqlite", tokenizer="one") as pool:
        pool.observe([solved("x", 3, 4, version=1), solved("z", 2, 4, version=1)], 1)
        pool.observe([solved("z", 4, 4, version=2)], 2)
        pool.observe([solved("z", 4, 4, version=3), solved("y", 1, 4, version=9)], 9)
    return folder / "experience.sqlite"


def test_a_pool_can_be_read_by_every_form_of_its_name_while_another_process_writes(
    gleanrl: CommandLine, pool: Path
) -> None:
    with ExperiencePool(pool):
        shown = [gleanrl("pool", name) for name in ("a", "runs/a", "runs/a/experience.sqlite")]
        listed = gleanrl("pool", "a", "list", "--task", "x", "--limit", "2")
        refused = gleanrl("pool", "a", "prune", "--keep", "1")
    assert {(ended.status, ended.stdout) for ended in shown} == {(0, shown[0].stdout)}, shown[0].stderr
    assert "6 successes of 3 tasks" in shown[0].stdout
    assert re.search(r"3/4 +1 +1 +0 +3\n", shown[0].stdout)
    assert re.search(r"4/4 +1 +0 +1 +2\n", shown[0].stdout)
    assert "age in versions at step 9: 0 to 8" in shown[0].stdout
    assert "sources: own 6\n" in shown[0].stdout
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["key", "3", "2"]
    assert refused.status == 2
    assert "is being written by another process" in refused.complaint


def test_an_exported_pool_can_be_imported_under_the_same_tokenizer_only(gleanrl: CommandLine, pool: Path) -> None:
    pytest.importorskip("pyarrow")
    assert gleanrl("pool", "a", "export", "a.parquet").stdout == "a.parquet: 6 successes\n"
    assert gleanrl("pool", "b.sqlite", "import", "a.parquet").stdout == "stored 6 successes\n"
    assert contents(gleanrl.folder / "b.sqlite")["blobs"] == contents(pool)["blobs"]
    assert "own and earlier" in gleanrl("pool", "d.sqlite", "import", "a.parquet", "--source", "own").stderr
    assert gleanrl("pool", "d.sqlite", "import", "a.parquet", "--source", "teacher").status == 0
    assert "teacher" in gleanrl("pool", "d.sqlite", "list", "--limit", "1").stdout.splitlines()[1].split()
    assert "(source: 6); 0 successes left" in gleanrl("pool", "d.sqlite", "prune", "--source", "teacher").stdout
    ExperiencePool(gleanrl.folder / "c.sqlite", tokenizer="two").close()
    assert "another tokenizer" in gleanrl("pool", "c.sqlite", "import", "a.parquet").complaint


def test_a_missing_pyarrow_is_an_error_that_says_how_to_install_it(gleanrl: CommandLine, pool: Path) -> None:
    blocked = gleanrl.folder / "blocked"
    blocked.mkdir()
    (blocked / "pyarrow.py").write_text("raise ImportError")
    gleanrl.extra["PYTHONPATH"] = f"{blocked}:{gleanrl.environment.get('PYTHONPATH', '')}"
    ended = gleanrl.python("pool", "a", "export", "a.parquet")
    assert (ended.status, ended.complaint) == (2, "parquet needs pyarrow: pip install 'gleanrl[parquet]'")


def test_seed_from_rollouts_takes_fresh_successes_and_rebuilds_their_tasks(
    gleanrl: CommandLine, make_gleanrl: Callable[[], CommandLine]
) -> None:
    run = gleanrl.folder / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.toml").write_text((gleanrl.folder / "tiny.toml").read_text())
    for step, scores in enumerate(((1.0, 0.0, 0.75, None), (0.0, 0.0, 1.0, 0.0))):
        members = [episode("train-3", score, (step, i), version=step) for i, score in enumerate(scores)]
        records = [RolloutRecord(step, step, False, None, t) for t in members]
        records.append(RolloutRecord(step, step, True, None, episode("train-3", 1.0, (9, 9))))
        records.append(RolloutRecord(step, -1, False, None, episode("gone", 1.0, (9, step))))
        # An episode that began with turns of another one is no whole success, and its group measures no solve rate. Nor
        # does one that was sampled with a guidance text that training removes.
        started = replace(episode("train-3", 1.0, (8, step)), info={START_TURNS: 1})
        helped = replace(episode("train-3", 1.0, (7, step)), info={"guided": "discard"})
        records += [RolloutRecord(step, 2, False, None, started), RolloutRecord(step, step, False, None, helped)]
        write_rollouts(run / "rollouts" / f"step-{step:06d}.jsonl.zst", records)
    asked = gleanrl(
        "pool", "new.sqlite", "seed", "--rollouts", "old"
    )  # an empty pool takes rollouts without a known tokenizer
    assert asked.stdout == "stored 3 successes; left out 2: its task is not one of its run's\n", asked.stderr
    with ExperiencePool(gleanrl.folder / "new.sqlite", read_only=True) as pool:
        assert pool.buckets() == {(1, 4): 1}
        [known] = pool.draw((1, 4), 1, np.random.default_rng(0))
        assert known.task.payload == {"start": 3}
        assert {stored.version for stored in pool.stored(["train-3"])["train-3"]} == {0}
    again = gleanrl("pool", "new.sqlite", "seed", "--rollouts", "old")
    assert "--trust-tokenizer" in again.complaint
    copied = gleanrl("pool", "copy.sqlite", "seed", "--pool", "new.sqlite")
    assert copied.stdout == "stored 3 successes\n", copied.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("nowhere",), "no run folder at nowhere"),
        (("none.sqlite",), "there is no experience pool at none.sqlite"),
        (("none.sqlite", "prune", "--retired"), "there is no experience pool"),
        (("tiny.toml",), "neither a run folder nor a .sqlite file"),
        (("a.sqlite", "seed", "--demonstrations", "3"), "has no tasks and no policy"),
        (("a.sqlite", "seed", "--rollouts", "b", "--replay.selct", "x"), "no run folder at b"),
        (("a.sqlite", "import", "b.parquet"), "b.parquet|pyarrow"),
    ],
)
def test_wrong_arguments_are_one_line_and_make_no_pool(gleanrl: CommandLine, argv: tuple[str, ...], said: str) -> None:
    ended = gleanrl.here("pool", *argv)
    assert ended.status == 2
    assert re.search(said, ended.complaint)
    assert not list(gleanrl.folder.glob("*.sqlite"))


def test_wrong_replay_settings_are_refused(gleanrl: CommandLine, pool: Path) -> None:
    assert "replay.selct" in gleanrl.here("pool", "a", "prune", "--keep", "1", "--replay.selct=x").complaint
    assert "replay.sigma" in gleanrl.here("pool", "a", "prune", "--keep", "1", "--replay.sigma=-1").complaint
    assert "unknown option" in gleanrl.here("pool", "a", "list", "--replay.sigma=1").complaint


@pytest.fixture(scope="module")
def demonstrated(make_gleanrl: Callable[[], CommandLine]) -> tuple[CommandLine, Path, set[int]]:
    """A run of two steps whose pool then got five demonstrations, and the keys of its earlier trajectories."""
    gleanrl = make_gleanrl()
    replay = ("--replay.enabled", "true", "--evaluation.every", "0", "--sampler.temperature", "0.8")
    assert gleanrl.train("run", *replay, "--context.system_prompt", "say it", "--run.steps", "2").status == 0
    path = gleanrl.run("run").experience_path
    own = {row[0] for row in contents(path)["trajectories"]}
    ended = gleanrl("pool", "run", "seed", "--demonstrations", "5")
    assert ended.status == 0, ended.stderr
    assert ended.stdout.startswith("stored 5 successes\n")
    assert "log-probs are unknown, so those of the policy at step 2 were stored instead" in ended.stdout
    assert gleanrl("pool", "run", "verify").status == 0
    return gleanrl, path, own


def demonstrations(path: Path, own: set[int]) -> list[Stored]:
    with ExperiencePool(path, read_only=True) as pool:
        found = pool.stored([f"train-{i}" for i in range(10)])
    return [stored for each in found.values() for stored in each if stored.key not in own]


def test_demonstrations_are_rendered_as_rollouts_with_log_probs_of_the_newest_policy(
    demonstrated: tuple[CommandLine, Path, set[int]],
) -> None:
    gleanrl, path, own = demonstrated
    run = gleanrl.run("run")
    renderer = Renderer(AutoTokenizer.from_pretrained(run.tokenizer_path))
    model = AutoModelForCausalLM.from_pretrained(run.path / "model")  # what the last checkpoint holds
    given = demonstrations(path, own)
    assert len(given) == 5
    for stored in given:
        info = stored.trajectory.info
        assert (info["origin"], info["scored_by"], stored.temperature) == ("demonstration", "run, step 2", 0.8)
        assert (stored.trajectory.score.value, stored.trajectory.stop) == (1.0, StopReason.DONE)
        (segment,) = stored.trajectory.segments
        assert [turn.message["role"] for turn in segment] == ["system", "user", "assistant", "user", "assistant"]
        assert {turn.message["content"] for turn in segment if turn.sampled} <= {"left", "go right"}
        tokens, mask, logprobs = segment_arrays(segment)
        expected = segment_arrays(renderer.demonstration([turn.message for turn in segment]))
        assert (tokens.tolist(), mask.tolist()) == (expected[0].tolist(), expected[1].tolist())
        with torch.no_grad():
            policy = (model(torch.tensor([tokens.tolist()])).logits[0, :-1].double() / 0.8).log_softmax(-1)
        of_tokens = policy.gather(-1, torch.tensor(tokens[1:].tolist())[:, None])[:, 0].numpy()
        np.testing.assert_allclose(logprobs[mask], of_tokens[mask[1:]], atol=2e-5)
        entropy = -(policy.exp() * policy).sum(-1).numpy()[mask[1:]]
        assert stored.entropy == pytest.approx(entropy.mean(), abs=1e-5)


def test_demonstrations_are_stored_once_and_a_new_run_replays_them(
    demonstrated: tuple[CommandLine, Path, set[int]],
) -> None:
    gleanrl, path, own = demonstrated
    ready = {stored.key for stored in demonstrations(path, own)}
    for name in ("experience.sqlite", "experience.sqlite-wal"):
        if (path.parent / name).exists():
            shutil.copyfile(path.parent / name, gleanrl.folder / f"copy.sqlite{name[17:]}")
    start = ("--model.init", "runs/run/model", "--warm_start.enabled", "false", "--run.steps", "3")
    replay = ("--replay.enabled", "true", "--replay.path", "copy.sqlite", "--replay.pool_updates", "0")
    ended = gleanrl.train("new", *start, *replay, "--replay.tasks", "uniform", "--evaluation.every", "0")
    assert ended.status == 0, ended.stderr
    used = {stored.key for stored in demonstrations(gleanrl.folder / "copy.sqlite", own) if stored.uses}
    assert used & ready
    rows = [row.metrics for row in gleanrl.run("new").read_metrics() if "replay/on" in row.metrics]
    assert any("loss/replayed/ratio/mean" in row for row in rows)
    again = gleanrl("pool", "run", "seed", "--demonstrations", "5")
    assert again.stdout.startswith("stored 0 successes; left out 5: there already"), again.stderr


def test_seeding_demonstrations_skips_tasks_without_an_expert(gleanrl: CommandLine) -> None:
    nobody = "--environment.options.trouble={train-0 = 'nobody', train-1 = 'nobody'}"
    short = ("--replay.enabled", "true", "--run.steps", "1", "--evaluation.every", "0", nobody)
    assert gleanrl.train("run", *short).status == 0
    ended = gleanrl("pool", "run", "seed", "--demonstrations", "3")
    assert ended.stdout.startswith("stored 3 successes"), ended.stderr


def test_impossible_demonstrations_are_one_line(gleanrl: CommandLine) -> None:
    short = ("--replay.enabled", "true", "--run.steps", "1", "--evaluation.every", "0")
    assert gleanrl.train("run", *short, "--context.max_turns", "1").status == 0
    ended = gleanrl("pool", "run", "seed", "--demonstrations", "2")
    assert (ended.status, "its episode ends before the demonstration does" in ended.complaint) == (2, True)
    shutil.rmtree(gleanrl.run("run").checkpoints_path)
    assert "has no checkpoint yet" in gleanrl("pool", "run", "seed", "--demonstrations", "2").complaint
    assert gleanrl("pool", "run", "seed", "--demonstrations", "0").status == 2


@pytest.mark.parametrize("action", ["import", "seed"])
def test_a_killed_import_or_seed_leaves_whole_batches_and_can_be_repeated(gleanrl: CommandLine, action: str) -> None:
    pytest.importorskip("pyarrow")
    rows = transfer.BATCH + 300
    with ExperiencePool(gleanrl.folder / "a.sqlite", ReplaySettings(capacity_per_task=5), tokenizer="one") as pool:
        incoming = [Incoming(task(f"t{i % 999}"), episode(f"t{i % 999}", tokens=(i, 5))) for i in range(rows)]
        assert all(pool.add_all(incoming))
    assert gleanrl("pool", "a.sqlite", "export", "a.parquet").status == 0
    given = ("import", "a.parquet") if action == "import" else ("seed", "--pool", "a.sqlite")
    at = "gleanrl.experience.pool.pool:ExperiencePool._add"
    kill = {"at": at, "call": transfer.BATCH + 100, "event": "SIGKILL"}
    assert gleanrl("pool", "b.sqlite", *given, triggers=[kill]).status == -9
    with ExperiencePool(gleanrl.folder / "b.sqlite") as pool:
        assert pool.verify() == []
        assert pool.stats()["trajectories"] == transfer.BATCH
    ended = gleanrl("pool", "b.sqlite", *given)  # a second run skips what is stored already
    assert f"stored {rows - transfer.BATCH} successes; left out {transfer.BATCH}" in ended.stdout
