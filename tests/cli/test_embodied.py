"""Tests of `gleanrl train` and `evaluate` with an embodied job: results, kills and resumes, and error messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gleanrl.buffer import TrajectoryReplayBuffer
from gleanrl.runtime.run_folder import RunFolder
from tests.cli.conftest import CommandLine, Ended, outcome
from tests.tracking.report.browser import assert_drawn, embedded, opened

pytest.importorskip("gymnasium")
CONFIG = """
job = "embodied"

[run]
steps = 8
threads = 1

[environment]
id = "tests.embodied.world:Drift-v0"
count = 2
chunk = 2

[schedule]
chunk_steps = 10
warmup = 2

[learner]
batch = 16
hidden_size = 16
update_ratio = 0.25

[buffer]
segment_mb = 1

[demonstrations]
expert = "tests.embodied.world:still"
chunk_steps = 20

[evaluation]
every = 4
episodes = 3

[checkpoint]
every = 2
"""
LEARN = "gleanrl.embodied.actor:ActorWorker.learn"
COLLECT = "gleanrl.embodied.rollout:RolloutWorker.collect"
SHOW = "gleanrl.embodied.demonstrations:record"
SAVE = "gleanrl.embodied.actor:ActorWorker.save"
SAVE_BUFFER = "gleanrl.buffer.checkpoint:save"
SAVE_MANIFEST = "gleanrl.runtime.checkpoints:_fingerprint"


def started(make_gleanrl: Callable[[], CommandLine]) -> CommandLine:
    gleanrl = make_gleanrl()
    gleanrl.extra["PYTHONPATH"] = str(Path(__file__).parents[2])  # where its environment is
    (gleanrl.folder / "tiny.toml").write_text(CONFIG)
    return gleanrl


@pytest.fixture
def embodied(make_gleanrl: Callable[[], CommandLine]) -> CommandLine:
    return started(make_gleanrl)


@pytest.fixture(scope="module")
def ended(make_gleanrl: Callable[[], CommandLine]) -> tuple[CommandLine, Ended]:
    """A complete, undisturbed run."""
    gleanrl = started(make_gleanrl)
    found = gleanrl.train("whole")
    assert found.status == 0, found.stderr
    return gleanrl, found


def buffers(run: RunFolder) -> dict[str, tuple[int, list[bytes]]]:
    """Return the rows and observations of each buffer, after verifying it."""
    found = {}
    for name in ("online", "demonstrations"):
        with TrajectoryReplayBuffer(run.path / "buffer" / name, read_only=True) as buffer:
            assert buffer.verify() == []
            kept = [buffer.trajectory(number).curr_obs["states"].numpy().tobytes() for number in range(len(buffer))]
            found[name] = (buffer.total_samples, kept)
    return found


def test_a_run_leaves_metrics_checkpoints_a_policy_and_a_report(ended: tuple[CommandLine, Ended]) -> None:
    gleanrl, said = ended
    run = gleanrl.run("whole")
    rows = {row.step: row.metrics for row in run.read_metrics()}
    assert sorted(rows) == list(range(9))
    assert [step for step in rows if "eval/return" in rows[step]] == [0, 4, 8]
    assert rows[8]["buffer/rows"] == 8 * 20
    assert 8 * 20 < rows[8]["environment/steps"] < 8 * 40  # episodes end within chunks of two steps
    assert rows[8]["buffer/demonstration_rows"] == 40
    assert [rows[step].get("updates/done") for step in range(1, 9)] == [0, 0, 5, 5, 5, 5, 5, 5]
    assert any("reward/mean" in metrics for metrics in rows.values())
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [6, 8]
    assert (run.path / "policy.safetensors").is_file()
    facts = embedded(run.report_path)["facts"]
    assert facts["returns"]["last"]["value"] == pytest.approx(rows[8]["eval/return"])
    assert facts["environment_steps"] == rows[8]["environment/steps"]
    assert_drawn(opened(run.report_path, gleanrl.folder / "profile"))
    assert "demonstrations: 40 chunk steps" in said.stderr
    assert "training: 8/8" in said.stderr
    assert "evaluation return" in said.stdout


def test_two_runs_of_one_configuration_are_equal_bit_for_bit(
    embodied: CommandLine, ended: tuple[CommandLine, Ended]
) -> None:
    assert embodied.train("whole").status == 0
    assert outcome(embodied.run("whole")) == outcome(ended[0].run("whole"))


@pytest.mark.parametrize(
    "moments",
    [
        [(SHOW, 1, "SIGKILL"), (LEARN, 1, "SIGKILL")],  # before there is a checkpoint
        [(LEARN, 6, "SIGKILL"), (COLLECT, 3, "SIGKILL")],
        [(SAVE, 2, "SIGKILL"), (SAVE_BUFFER, 2, "SIGKILL"), (SAVE_MANIFEST, 2, "SIGKILL")],
        [(LEARN, 4, "SIGINT"), (LEARN, 2, "SIGTERM")],
    ],
    ids=["early", "between", "saving", "interrupted"],
)
def test_a_run_killed_and_resumed_equals_an_undisturbed_one_bit_for_bit(
    embodied: CommandLine, ended: tuple[CommandLine, Ended], moments: list[tuple[str, int, str]]
) -> None:
    for number, moment in enumerate(moments):
        stopped = embodied.train("whole", *(["--resume"] if number else []), at=moment)
        assert stopped.status == (-9 if moment[2] == "SIGKILL" else 130), stopped.stderr
        if moment[2] != "SIGKILL":
            assert "--resume" in stopped.stderr
    again = embodied.train("whole", "--resume")
    assert again.status == 0, again.stderr
    run, whole = embodied.run("whole"), ended[0].run("whole")
    assert outcome(run) == outcome(whole)
    assert buffers(run) == buffers(whole)
    assert [path.name for path in run.path.rglob(".partial-*")] == []


def test_an_error_of_an_environment_costs_no_finished_step(
    embodied: CommandLine, ended: tuple[CommandLine, Ended]
) -> None:
    broken = embodied.train("whole", "--checkpoint.every", "0", at=(COLLECT, 7, "full disk"))
    assert broken.complaint == "writing failed: No space left on device"
    assert [checkpoint.step for checkpoint in embodied.run("whole").checkpoints()] == [6]
    resumed = embodied.train("whole", "--resume")
    assert resumed.status == 0, resumed.stderr
    assert outcome(embodied.run("whole")) == outcome(ended[0].run("whole"))


def test_a_killed_run_with_buffers_in_memory_resumes_to_the_same_result(
    embodied: CommandLine, ended: tuple[CommandLine, Ended]
) -> None:
    memory = ("--buffer.on_disk", "false", "--schedule.lag", "1")
    assert embodied.train("whole", *memory, at=(LEARN, 6, "SIGKILL")).status == -9
    assert embodied.train("whole", *memory, "--resume").status == 0
    assert outcome(embodied.run("whole")) == outcome(ended[0].run("whole"))
    assert not (embodied.run("whole").path / "buffer").exists()


def test_resume_may_add_steps_but_not_change_the_schedule_or_the_job(embodied: CommandLine) -> None:
    assert embodied.train("run", "--run.steps", "4").status == 0
    assert embodied.train("run", "--run.steps", "6", "--resume").status == 0
    assert embodied.run("run").read_metrics()[-1].step == 6
    fewer = embodied.train("run", "--run.steps", "3", "--resume")
    assert "has finished 6 steps" in fewer.complaint
    refused = embodied.train("run", "--schedule.lag", "3", "--resume")
    assert "was started with schedule.lag = 1" in refused.complaint
    other = embodied("train", "quickstart", "--run.name", "run", "--resume")
    assert "another kind" in other.complaint


def test_the_buffer_of_an_earlier_run_can_serve_as_demonstrations(
    embodied: CommandLine, ended: tuple[CommandLine, Ended]
) -> None:
    (embodied.folder / "tiny.toml").write_text(
        CONFIG.replace("expert = ", "path = ").replace("tests.embodied.world:still", str(ended[0].run("whole").path))
    )
    found = embodied.train("run", "--run.steps", "4")
    assert found.status == 0, found.stderr
    assert "demonstrations: 160 chunk steps" in found.stderr


def test_evaluate_loads_the_newest_checkpoint(ended: tuple[CommandLine, Ended]) -> None:
    gleanrl, _ = ended
    found = gleanrl("evaluate", "runs/whole")
    assert found.status == 0, found.stderr
    [evaluated] = RunFolder(gleanrl.run("whole").evaluations_path / "step-8").read_metrics()
    assert evaluated.metrics["eval/return"] == gleanrl.run("whole").read_metrics()[-1].metrics["eval/return"]
    assert f"evaluation return {evaluated.metrics['eval/return']:.1f}" in found.stdout
    wider = gleanrl("evaluate", "runs/whole", "--learner.hidden_size", "32")
    assert wider.status == 2
    assert wider.complaint.startswith("the checkpoint is of other networks")


def test_a_dry_run_prints_the_configuration_and_the_plan(embodied: CommandLine) -> None:
    found = embodied("train", "pendulum", "--dry-run", "--schedule.lag", "0")
    assert found.status == 0, found.stderr
    assert 'job = "embodied"' in found.stdout
    assert "lag = 0" in found.stdout
    assert "environment steps" in found.stdout
    assert not (embodied.folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--learner.crtic_lr", "1"], ["'learner.crtic_lr'", "did you mean 'learner.critic_lr'"]),
        (["--lerner.batch", "1"], ["did you mean 'learner.batch'"]),
        (["--environment.id", "Nothing-v0"], ["Nothing"]),
        (["--environment.id", "CartPole-v1"], ["CartPole-v1", "bounded Box"]),
        (["--environment.options", "{wider = 1}"], ["wider"]),
        (["--demonstrations.expert", "pendulm"], ["demonstrations.expert = 'pendulm'", "did you mean 'pendulum'"]),
        (["--demonstrations.path", "nowhere"], ["path or an expert"]),
        (["--buffer.max_rows", "3", "--learner.batch", "48"], ["buffer.max_rows = 3", "takes 24", "batch = 48"]),
        (["--buffer.max_rows", "39", "--learner.batch", "48"], ["buffer.max_rows = 39", "so 20 of them", "takes 24"]),
        (["--buffer.window", "1", "--learner.batch", "44"], ["buffer.window = 1 trajectories hold 20", "takes 22"]),
        (["--demonstrations.newest", "1", "--learner.batch", "48"], ["demonstrations.newest = 1 give 20", "takes 24"]),
        (["--learner.device", "abacus"], ["learner.device = 'abacus'"]),
        (["--runtime", "local"], ["an embodied run is always in one process: leave out --runtime"]),
        (["--ray.samplers", "2"], ["'ray.samplers'", "and keys of ray"]),
    ],
    ids=lambda value: value[0] if str(value[0]).startswith("--") else None,
)
def test_wrong_settings_are_one_line_and_begin_no_run(
    embodied: CommandLine, arguments: list[str], words: list[str]
) -> None:
    found = embodied.here("train", "tiny.toml", "--run.name", "run", *arguments)
    assert found.status == 2
    for word in words:
        assert word in found.complaint
    assert not embodied.run("run").config_path.exists()  # no run was begun, so the same command can be given again


def test_an_unknown_job_is_named(embodied: CommandLine) -> None:
    (embodied.folder / "tiny.toml").write_text(CONFIG.replace('"embodied"', '"embodyed"'))
    assert "job = 'embodyed'; known: embodied" in embodied.train("run").complaint


def test_a_damaged_learner_file_falls_back_to_the_previous_checkpoint(embodied: CommandLine) -> None:
    assert embodied.train("run").status == 0
    run = embodied.run("run")
    newest = run.checkpoints()[-1].path
    assert "learner.pt" in json.loads((newest / "manifest.json").read_text())
    data = bytearray((newest / "learner.pt").read_bytes())
    data[len(data) // 2] ^= 1
    Path(newest / "learner.pt").write_bytes(data)
    found = embodied.train("run", "--resume", "--run.steps", "9")
    assert found.status == 0, found.stderr
    assert "at step 6 of 9" in found.stderr


def test_a_damaged_buffer_of_a_killed_run_does_not_prevent_its_resume(
    embodied: CommandLine, ended: tuple[CommandLine, Ended]
) -> None:
    assert embodied.train("whole", at=(LEARN, 6, "SIGKILL")).status == -9
    run = embodied.run("whole")
    for file in (run.path / "buffer").rglob("*-texts-*"):
        file.unlink()
    resumed = embodied.train("whole", "--resume")
    assert resumed.status == 0, resumed.stderr
    assert outcome(run) == outcome(ended[0].run("whole"))
