"""Tests that a run killed or interrupted at any point and resumed gives the same result as an undisturbed one."""

from __future__ import annotations

import json

import pytest
import torch

from gleanrl.runtime.checkpoints import Checkpoints
from tests.builders import checkpoint_tensors
from tests.cli.conftest import CommandLine, Ended, assert_same, outcome

PLAY = "gleanrl.rollout.player:Player.play"
UPDATE = "gleanrl.learners.engine:LocalEngine.backward"
APPLY = "gleanrl.learners.engine:LocalEngine.step"
PUBLISH = "gleanrl.samplers.transformers:copy_weights"
SAVE_OPTIMIZER = "gleanrl.learners.checkpoint:_random_state"
SAVE_MANIFEST = "gleanrl.runtime.checkpoints:_fingerprint"
SWEEP = "gleanrl.runtime.checkpoints:Checkpoints._sweep"
RENAME = "os:replace"
ROLLOUTS = "gleanrl.runtime.observer:write_rollouts"
EVALUATED = "gleanrl.runtime.observer:RunObserver.evaluated"
EXPORT = "gleanrl.learners.torch:TorchLearner.export"
WARM_START = "gleanrl.learners.supervised:finish_gradient"
TASKS = "gleanrl.runtime.prepare:load_taskset"
BASELINE = "gleanrl.runtime.evaluation:derive"

EPISODES = 8  # episodes of a training step; the evaluation before the first step plays 3 * 3 more


@pytest.mark.parametrize(
    "moment",
    [
        (PLAY, 3, "SIGKILL"),  # before anything is saved
        (PLAY, 9 + 4 * EPISODES + 3, "SIGKILL"),
        (UPDATE, 6, "SIGKILL"),
        (APPLY, 4, "SIGKILL"),
        (SAVE_OPTIMIZER, 2, "SIGKILL"),
        (SAVE_MANIFEST, 6, "SIGKILL"),
        (SWEEP, 2, "SIGKILL"),
        (ROLLOUTS, 4, "SIGKILL"),
        (EVALUATED, 2, "SIGKILL"),
        (EXPORT, 1, "SIGKILL"),
    ],
    ids=lambda moment: f"{moment[0].rpartition(':')[2]}-{moment[1]}",
)
def test_a_run_killed_and_resumed_equals_an_undisturbed_one_bit_for_bit(
    gleanrl: CommandLine, whole: tuple[CommandLine, Ended], moment: tuple[str, int, str]
) -> None:
    assert gleanrl.train("whole", at=moment).status == -9
    ended = gleanrl.train("whole", "--resume")
    assert ended.status == 0, ended.stderr
    assert_same(gleanrl.run("whole"), whole[0].run("whole"))
    leftovers = [path.name for path in gleanrl.run("whole").path.rglob(".partial-*")]
    assert leftovers == []


def test_a_checkpoint_needs_no_warm_start(gleanrl: CommandLine, whole: tuple[CommandLine, Ended]) -> None:
    """On another machine, whose cache is empty, resuming, evaluating and exporting do not repeat the warm start."""
    killed = gleanrl.train("run", at=("gleanrl.learners.engine:LocalEngine.step", 4, "SIGKILL"))
    assert killed.status == -9
    gleanrl.extra["GLEANRL_CACHE"] = str(gleanrl.folder / "cache")
    commands = [gleanrl.train("run", "--resume"), gleanrl("evaluate", "run"), gleanrl("export", "run", "--out", "it")]
    for ended in commands:
        assert ended.status == 0, ended.stderr
        assert "warm start" not in ended.stderr
    assert not list((gleanrl.folder / "cache").glob("warm-start/*"))
    assert_same(gleanrl.run("run"), whole[0].run("whole"))


def test_a_run_killed_several_times_equals_an_undisturbed_one(
    gleanrl: CommandLine, whole: tuple[CommandLine, Ended]
) -> None:
    assert gleanrl.train("whole", at=(APPLY, 3, "SIGKILL")).status == -9
    for moment in [(PLAY, 5, "SIGKILL"), (SAVE_MANIFEST, 3, "SIGKILL"), (APPLY, 3, "SIGKILL")]:
        assert gleanrl.train("whole", "--resume", at=moment).status == -9
    assert gleanrl.train("whole", "--resume").status == 0
    assert_same(gleanrl.run("whole"), whole[0].run("whole"))


def test_a_run_learns_and_is_determined_by_its_seed(gleanrl: CommandLine, whole: tuple[CommandLine, Ended]) -> None:
    first = whole[0].run("whole")
    rows = {row.step: row.metrics for row in first.read_metrics()}
    assert list(rows) == [0, 1, 2, 3, 4, 5, 6]
    assert sum(row.get("tokens/trained", 0) for row in rows.values()) > 100
    assert all("eval/sampled/pass@1" in rows[step] for step in (0, 3, 6))
    assert len(outcome(first)["rollouts"]) == 6 * EPISODES
    start, *_, end = (checkpoint_tensors(checkpoint.path, "weights/") for checkpoint in first.checkpoints())
    assert any(not torch.equal(tensor, end[name]) for name, tensor in start.items())

    assert gleanrl.train("again").status == 0
    assert_same(gleanrl.run("again"), first)
    assert gleanrl.train("other", "--run.seed", "1").status == 0
    theirs, ours = outcome(gleanrl.run("other")), outcome(first)
    assert theirs["weights"].keys() == ours["weights"].keys()
    assert theirs["weights"]["model/model.safetensors"] != ours["weights"]["model/model.safetensors"]
    assert theirs["rollouts"] != ours["rollouts"]


def test_environments_in_worker_processes_give_the_same_run(
    gleanrl: CommandLine, whole: tuple[CommandLine, Ended]
) -> None:
    assert gleanrl.train("whole", "--environment.workers", "2").status == 0
    assert_same(gleanrl.run("whole"), whole[0].run("whole"))


@pytest.mark.parametrize(
    "moment",
    [
        (TASKS, 1, "SIGINT"),
        (WARM_START, 5, "SIGINT"),
        (BASELINE, 2, "SIGINT"),
        (PLAY, 4, "SIGINT"),  # the evaluation before the first step
        (PLAY, 9 + 2 * EPISODES + 3, "SIGINT"),
        (UPDATE, 6, "SIGINT"),
        (SAVE_MANIFEST, 6, "SIGINT"),
        (PLAY, 9 + 6 * EPISODES + 9 + 4, "SIGINT"),  # the evaluation after the last
        (EXPORT, 1, "SIGINT"),
    ],
    ids=lambda moment: f"{moment[0].rpartition(':')[2]}-{moment[1]}",
)
def test_an_interrupt_is_one_line_and_the_run_continues(
    gleanrl: CommandLine, whole: tuple[CommandLine, Ended], moment: tuple[str, int, str]
) -> None:
    if moment[0] == WARM_START:
        gleanrl.extra["GLEANRL_CACHE"] = str(gleanrl.folder / "cache")
    ended = gleanrl.train("whole", at=moment)
    assert ended.status == 130, ended.stderr
    command = "gleanrl train tiny.toml --run.name=whole --resume"
    assert ended.complaint == f"interrupted; continue with: {command}"
    resumed = gleanrl(*command.split()[1:])
    assert resumed.status == 0, resumed.stderr
    assert "Traceback" not in resumed.stderr
    here, there = outcome(gleanrl.run("whole")), outcome(whole[0].run("whole"))
    assert here["rollouts"] == there["rollouts"]
    name = "model/model.safetensors"
    assert here["weights"][name] == there["weights"][name]


def test_an_interrupt_before_the_run_has_a_folder_names_no_command_that_continues_it(
    gleanrl: CommandLine, whole: tuple[CommandLine, Ended]
) -> None:
    moment = ("gleanrl.runtime.sharded:_start", 1, "SIGINT")
    assert gleanrl.train("run", "--learner.ranks", "2", at=moment).complaint == "interrupted"
    assert not gleanrl.run("run").path.exists()
    # Without --resume this command cannot continue the run that is there.
    assert whole[0].train("whole", "--learner.ranks", "2", at=moment).complaint == "interrupted"


@pytest.mark.parametrize("moment", [(PLAY, 11), (UPDATE, 3), (SAVE_MANIFEST, 3)], ids=lambda moment: moment[0])
def test_a_second_interrupt_stops_at_once(
    gleanrl: CommandLine, whole: tuple[CommandLine, Ended], moment: tuple[str, int]
) -> None:
    triggers = [{"at": moment[0], "call": moment[1], "event": "SIGINT"}] * 2
    ended = gleanrl("train", "tiny.toml", "--run.name", "whole", triggers=triggers)
    assert ended.status == 130, ended.stderr
    assert ended.complaint.startswith("interrupted; continue with")
    assert gleanrl.run("whole").read_metrics()[-1].step < 3  # the step under way was given up
    assert gleanrl.train("whole", "--resume").status == 0
    name = "model/model.safetensors"
    assert outcome(gleanrl.run("whole"))["weights"][name] == outcome(whole[0].run("whole"))["weights"][name]


@pytest.mark.parametrize("preset", ["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"])
def test_every_schedule_is_killed_resumed_and_completed(gleanrl: CommandLine, preset: str) -> None:
    chosen = ("--schedule.preset", preset)
    assert gleanrl.train("run", *chosen, at=(APPLY, 4, "SIGKILL")).status == -9
    ended = gleanrl.train("run", *chosen, "--resume")
    assert ended.status == 0, ended.stderr
    assert "resuming runs/run at step 2 of 6" in ended.stderr
    folder = gleanrl.run("run")
    assert [row.step for row in folder.read_metrics()] == [0, 1, 2, 3, 4, 5, 6]
    tickets = [record["ticket"] for record in outcome(folder)["rollouts"]]
    assert sorted(tickets) == sorted([*range(12)] * 4)
    assert (folder.path / "model" / "config.json").exists()


def test_a_damaged_checkpoint_is_skipped_with_one_warning(
    gleanrl: CommandLine, whole: tuple[CommandLine, Ended]
) -> None:
    assert gleanrl.train("whole", at=(PLAY, 9 + 5 * EPISODES + 9 + 3, "SIGKILL")).status == -9
    newest = gleanrl.run("whole").checkpoint_path(4)
    damage(newest / "tensors" / "__0_0.distcp")
    ended = gleanrl.train("whole", "--resume")
    assert ended.status == 0, ended.stderr
    warnings = [line for line in ended.stderr.splitlines() if "warning" in line.lower()]
    assert len(warnings) == 1
    assert warnings[0].startswith("gleanrl: warning: checkpoint runs/whole/checkpoints/step-4 is damaged")
    assert warnings[0].endswith("continuing from step-2")
    assert_same(gleanrl.run("whole"), whole[0].run("whole"))


def test_a_run_with_only_damaged_checkpoints_cannot_be_resumed(gleanrl: CommandLine) -> None:
    assert gleanrl.train("run", at=(PLAY, 9 + 5 * EPISODES + 9 + 3, "SIGKILL")).status == -9
    for checkpoint in gleanrl.run("run").checkpoints():
        damage(checkpoint.path / "tensors" / "__0_0.distcp")
    ended = gleanrl.train("run", "--resume")
    assert ended.status == 2
    assert "step-4 is damaged" in ended.complaint
    assert "no good one is left" in ended.complaint


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_full_disk_is_one_line_and_the_run_can_be_resumed(
    gleanrl: CommandLine, whole: tuple[CommandLine, Ended]
) -> None:
    ended = gleanrl.train("whole", at=(SAVE_OPTIMIZER, 2, "full disk"))
    assert ended.status == 2
    assert "runs/whole/checkpoints/step-4" in ended.complaint
    assert "the disk is full" in ended.complaint
    assert [checkpoint.step for checkpoint in gleanrl.run("whole").checkpoints()] == [2]
    assert gleanrl.train("whole", "--resume").status == 0
    assert_same(gleanrl.run("whole"), whole[0].run("whole"))


def test_the_newest_good_checkpoint_is_kept_despite_a_damaged_later_one_and_keep_1(gleanrl: CommandLine) -> None:
    """With checkpoint.keep = 1 too, the newest good checkpoint counts, although a damaged one has a higher step."""
    keep = ("--checkpoint.keep", "1", "--checkpoint.every", "1")
    assert gleanrl.train("run", *keep, at=(APPLY, 5, "SIGKILL")).status == -9
    folder = gleanrl.run("run")
    later = folder.checkpoint_path(9)
    later.mkdir()
    (later / "manifest.json").write_text("[]")
    assert gleanrl.train("run", *keep, "--resume", at=(APPLY, 2, "SIGKILL")).status == -9
    found = Checkpoints(folder.checkpoints_path, keep=1).latest()
    assert found is not None
    assert json.loads((found[0] / "state.json").read_text())["step"] == 5
