"""Tests of train, evaluate, report, doctor and settings as a user runs them, and of the files that they write."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gleanrl import __version__
from gleanrl.config.loading import fields, presets
from gleanrl.config.settings import Config
from gleanrl.runtime.process import locked
from gleanrl.runtime.run_folder import RunFolder
from tests.builders import checkpoint_tensors
from tests.cli.conftest import CommandLine, Ended
from tests.cli.test_resume import EPISODES, PLAY
from tests.tracking.report.browser import assert_drawn, opened

Whole = tuple[CommandLine, Ended]


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    """Return the processor time of a command, which a busy machine does not change as it does the clock time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_less_than_a_second_and_names_every_command(gleanrl: CommandLine) -> None:
    command = [sys.executable, "-m", "gleanrl", "--help"]
    assert any(cpu_seconds(command, gleanrl.environment) < 1.0 for _ in range(3))
    shown = gleanrl.python("--help")
    assert all(name in shown.stdout for name in ("train", "evaluate", "report", "doctor"))
    for name in ("train", "evaluate", "report", "doctor"):
        ended = gleanrl(name, "--help")
        assert ended.status == 0
        assert ended.stdout.startswith(f"usage: gleanrl {name}")
    assert gleanrl("--version").stdout == f"gleanrl {__version__}\n"
    assert gleanrl().status == 2


def test_a_dry_run_shows_the_plan_and_does_nothing(gleanrl: CommandLine) -> None:
    ended = gleanrl.train("run", "--learner.lr", "0.002", "--dry-run")
    assert ended.status == 0
    assert "lr = 0.002" in ended.stdout
    assert ended.stderr == ""
    assert not (gleanrl.folder / "runs").exists()


def test_settings_may_come_before_the_preset(gleanrl: CommandLine) -> None:
    ended = gleanrl.here("train", "--learner.lr", "0.002", "tiny.toml", "--dry-run")
    assert ended.status == 0
    assert "lr = 0.002" in ended.stdout


@pytest.mark.parametrize("command", ["train tiny.toml --dry-run", "settings", "doctor", "simulate"])
def test_a_closed_output_pipe_is_no_error(gleanrl: CommandLine, command: str) -> None:
    started = subprocess.Popen(
        [sys.executable, "-u", "-m", "gleanrl", *command.split()],
        cwd=gleanrl.folder, env=gleanrl.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert started.stdout is not None
    started.stdout.close()
    _, complaint = started.communicate(timeout=60)
    assert complaint == ""


def test_settings_are_shown_by_section_key_and_part_of_a_name(gleanrl: CommandLine) -> None:
    every = gleanrl.here("settings").stdout.splitlines()
    assert set(dict(fields(Config))) == {line.partition(" = ")[0] for line in every}
    assert 'schedule.preset = "sync"' in every
    one = gleanrl.here("settings", "learner.epochs").stdout
    assert one.startswith("learner.epochs = 1    (whole number, at least 1)\n    ")
    section = gleanrl.here("settings", "warm_start").stdout
    assert {line.partition(".")[0] for line in section.splitlines() if line[0] != " "} == {"warm_start"}
    assert "loss.clip_high = " in gleanrl.here("settings", "clip").stdout
    marked = {name: "--resume" in gleanrl.here("settings", name).stdout for name in ("run.steps", "schedule.group")}
    assert marked == {"run.steps": True, "schedule.group": False}
    assert "seq-\n" not in gleanrl.here("settings", "aggregation").stdout
    assert gleanrl.here("settings", "schedule.lag", "--job", "embodied").stdout.startswith("schedule.lag = 1")
    unknown = gleanrl.here("settings", "nothing")
    assert (unknown.status, unknown.stdout) == (2, "")
    assert unknown.complaint.startswith("no setting 'nothing'; sections: run, environment")


def test_help_names_every_preset(gleanrl: CommandLine) -> None:
    shown = gleanrl("train", "--help").stdout
    assert all(name in shown for name in presets())


def test_a_preset_says_what_it_does_and_how_long_that_takes_before_it_starts(gleanrl: CommandLine) -> None:
    ended = gleanrl.here("train", "smollm2", "--run.folder", "tiny.toml")  # ends where the run folder would be made
    description = " ".join(ended.stderr.splitlines()[:-1])
    assert "SmolLM2" in description
    assert re.search(r"minutes|hour", description, re.IGNORECASE)


def test_doubtful_settings_are_one_line_of_warning_at_the_start(gleanrl: CommandLine) -> None:
    stale = ("--schedule.preset", "one_step_off", "--learner.old_logprobs", "recompute")
    ended = gleanrl.train("run", *stale, "--dry-run")
    assert ended.status == 0
    [line] = ended.stderr.splitlines()
    assert line.startswith("gleanrl: warning: learner.old_logprobs = 'recompute' under staleness 1")


def test_settings_of_replay_without_replay_are_named_in_a_warning(gleanrl: CommandLine) -> None:
    given = ("--replay.keep_failures", "2", "--replay.task_ratio", "0.6")
    ended = gleanrl.train("run", *given, "--replay.enabled", "false", "--dry-run")
    assert ended.status == 0
    [line] = ended.stderr.splitlines()
    assert line.startswith("gleanrl: warning: ")
    assert "replay.keep_failures" in line
    assert "replay.task_ratio" in line
    assert gleanrl.train("run", *given, "--replay.enabled", "true", "--dry-run").stderr == ""


def test_doctor_ends_with_whether_training_is_possible(gleanrl: CommandLine) -> None:
    ended = gleanrl("doctor")
    assert ended.stdout.splitlines()[-1] == ("not ready" if ended.status else "ready to train")
    assert "torch" in ended.stdout
    assert "bfloat16" in ended.stdout
    assert ended.stderr == ""


def test_doctor_compares_the_versions_of_extras_with_what_the_package_requires(gleanrl: CommandLine) -> None:
    there = gleanrl.folder / "packages"
    gleanrl.extra["PYTHONPATH"] = str(there)
    for name, version in (("vllm", "0.33.0"), ("wandb", "0.17.1")):
        folder = there / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = {line.split()[1]: line for line in gleanrl("doctor").stdout.splitlines() if line.startswith("extra ")}
    assert lines["wandb"].endswith(" ready")
    assert not lines["vllm"].endswith(" ready")
    assert "0.33.0" in lines["vllm"]


def test_a_run_prints_its_own_lines_only(whole: Whole) -> None:
    _, ended = whole
    known = r"(making tasks|demonstrations|warm start|training|baselines|evaluating step \d+|step \d+): .*"
    assert [line for line in ended.stderr.splitlines() if not re.fullmatch(known, line)] == []
    assert "\r" not in ended.stderr
    assert ended.stdout.splitlines()[0] == "whole: 6 of 6 steps"
    assert ended.stdout.splitlines()[-1] == "report: runs/whole/report.html"


def test_evaluate_report_and_resume_of_a_complete_run(whole: Whole) -> None:
    gleanrl, _ = whole
    folder = gleanrl.run("whole")
    before = folder.metrics_path.read_bytes()
    last = {name: value for name, value in folder.read_metrics()[-1].metrics.items() if name.startswith("eval/")}
    assert last
    newest = evaluated(gleanrl, "whole")  # by its name under runs/
    [row] = newest.read_metrics()
    assert (row.step, row.metrics["eval/baseline/expert"]) == (6, 1.0)
    assert {name: row.metrics[name] for name in last} == last
    older = evaluated(gleanrl, "runs/whole/checkpoints/step-4")
    assert older.read_metrics()[0].metrics != row.metrics
    again, model = evaluated(gleanrl, "runs/whole/checkpoints/step-6"), evaluated(gleanrl, "runs/whole/model")
    for other in (again, model):
        assert other.read_metrics()[0].metrics == row.metrics
    own = evaluated(gleanrl, "runs/whole/config.toml")
    assert own.read_metrics()[0].metrics == row.metrics
    evaluations = (newest, older, again, model, own)
    folders = {other.path.relative_to(folder.path / "evaluations").name for other in evaluations}
    assert folders == {"step-6", "step-4", "step-6-2", "model", "step-6-3"}
    none = gleanrl("evaluate", "runs/whole/checkpoints")
    assert none.complaint.startswith("runs/whole/checkpoints is not a run folder")

    folder.report_path.unlink()
    ended = gleanrl("report", "runs/whole")
    assert (ended.status, ended.stdout) == (0, "runs/whole/report.html\n")
    assert folder.report_path.read_text().lstrip().lower().startswith("<!doctype html>")

    for missing in ("runs/whale", "whale"):
        nowhere = gleanrl("evaluate", missing)
        assert (nowhere.status, nowhere.stdout) == (2, "")
        assert f"no run, checkpoint, model or preset '{missing}'" in nowhere.complaint
        assert "'whole'" in nowhere.complaint

    again = gleanrl.train("whole", "--resume")
    assert again.status == 0, again.stderr
    assert folder.metrics_path.read_bytes() == before

    config = folder.config_path.read_bytes()
    fewer = gleanrl.train("whole", "--resume", "--run.steps", "3")
    assert (fewer.status, folder.config_path.read_bytes()) == (2, config)
    assert fewer.complaint.startswith("run.steps = 3, but runs/whole/checkpoints/step-6 has finished 6 steps")


def test_the_model_of_a_run_keeps_its_step_while_the_run_is_extended(gleanrl: CommandLine) -> None:
    assert gleanrl.train("run", "--run.steps", "2").status == 0
    assert gleanrl("export", "run").status == 0
    at = ("gleanrl.learners.engine:LocalEngine.step", 2, "SIGINT")
    assert gleanrl.train("run", "--resume", at=at).status == 130
    assert gleanrl.run("run").read_metrics()[-1].step > 2
    for model in ("runs/run/model", "runs/run/exports/step-2"):
        assert [row.step for row in evaluated(gleanrl, model).read_metrics()] == [2]


def evaluated(gleanrl: CommandLine, *argv: str) -> RunFolder:
    """Run `gleanrl evaluate` and return the folder that it wrote."""
    ended = gleanrl("evaluate", *argv)
    assert ended.status == 0, ended.stderr
    [path] = re.findall(r"^evaluation: (.*)$", ended.stdout, re.MULTILINE)
    return RunFolder(gleanrl.folder / path)


def test_an_evaluation_leaves_every_score_and_the_reasons_for_it(gleanrl: CommandLine, tmp_path: Path) -> None:
    arguments = ("tiny.toml", "--out", "first", "--reward.success_threshold", "0.9")
    folder = evaluated(gleanrl, *arguments)
    found = folder.read_evaluation()
    assert found is not None
    played = {record.trajectory.id: record.trajectory for record in folder.read_rollouts(0)}
    scores = [attempt["score"] for task in found["tasks"] for attempt in task["attempts"] if not attempt["greedy"]]
    assert [len(task["attempts"]) for task in found["tasks"]] == [3, 3, 3]  # two sampled ones and a greedy one
    for task in found["tasks"]:
        for attempt in task["attempts"]:
            assert attempt["score"] == played[attempt["id"]].score.value
            assert attempt["solved"] == (attempt["score"] >= 0.9)
    metrics = folder.read_metrics()[0].metrics
    assert metrics["eval/sampled/score"] == pytest.approx(sum(scores) / len(scores))
    assert metrics["eval/sampled/pass@1"] == pytest.approx(sum(score >= 0.9 for score in scores) / len(scores))
    text = (folder.path / "transcripts.txt").read_text()
    door = found["tasks"][0]["payload"]["start"]
    assert f"start: {door}" in text
    assert f"door {door + 2}: say left or go right" in text, "the last observation, which the model did not see"
    document = opened(folder.report_path, tmp_path / "profile")
    assert_drawn(document)
    assert re.findall(r"<h2>(.*?)</h2>", document)[:3] == ["Evaluation on held-out tasks", "Tasks", "Trajectories"]
    page = tmp_path / "clicked.html"
    click = """<script>
    document.querySelector("section a").click();
    document.documentElement.dataset.task = document.querySelector(".viewer .facts b").textContent;
    </script>"""
    page.write_text(folder.report_path.read_text().replace("</body>", click + "</body>"))
    lowest = re.search(r'<a href="#">(.*?)</a>', document)
    assert lowest is not None
    assert f'data-task="{lowest[1]}"' in opened(page, tmp_path / "profile")
    twice = gleanrl("evaluate", *arguments)
    assert (twice.status, twice.stdout) == (2, "")


def test_runs_are_listed_compared_and_deleted(whole: Whole) -> None:
    gleanrl, _ = whole
    options = ("--run.steps", "2", "--evaluation.every", "0", "--learner.lr", "1e-3")

    def state() -> list[str]:
        lines = (line.split() for line in gleanrl.here("runs").stdout.splitlines())
        return next(line[1:3] for line in lines if line[0] == "short")

    for event, status in (("SIGKILL", -9), ("SIGINT", 130)):  # in the last evaluation
        ended = gleanrl.train("short", *options, at=(PLAY, 9 + 2 * EPISODES + 4, event))
        assert ended.status == status, ended.stderr
        assert state() == ["stopped", "2/2"]
        shutil.rmtree(gleanrl.run("short").path)
    assert gleanrl.train("short", "--run.steps", "1", *options[2:]).status == 0
    assert state() == ["finished", "1/1"]
    assert gleanrl.train("short", *options, "--resume", at=(PLAY, EPISODES + 4, "SIGKILL")).status == -9
    assert state() == ["stopped", "2/2"]
    assert gleanrl.train("short", *options, "--resume").status == 0
    assert evaluated(gleanrl, "short", "--out", "runs/judged").path == gleanrl.folder / "runs" / "judged"
    assert gleanrl("evaluate", "judged").status == 2
    shutil.rmtree(gleanrl.run("short").checkpoints_path)  # to save space
    listed = gleanrl.here("runs").stdout.splitlines()
    rows = {line.split()[0]: line.split() for line in listed[1:]}
    assert rows["whole"][1:3] == ["finished", "6/6"]
    assert rows["short"][1:3] == ["finished", "2/2"]
    assert "judged" not in rows
    compared = gleanrl.here("runs", "compare", "whole", "short").stdout.splitlines()
    assert ["learner.lr", "0.0005", "0.001"] in [line.split() for line in compared]
    assert ["steps", "6", "2"] in [line.split() for line in compared]
    page = gleanrl.here("report", "whole", "short")
    assert (gleanrl.folder / page.stdout.strip()).exists()

    unconfirmed = gleanrl("runs", "delete", "short")  # its standard input is no terminal
    assert unconfirmed.status == 2
    (gleanrl.folder / "config.toml").write_text("")  # of some other program
    foreign = gleanrl("runs", "delete", ".", "--yes")
    assert foreign.status == 2
    with locked(gleanrl.run("short")):
        assert gleanrl("runs", "delete", "short", "--yes").complaint == "runs/short is in use by another process"
    assert gleanrl.run("short").report_path.exists()
    shutil.copytree(gleanrl.run("short").path, gleanrl.folder / "other" / "short")
    (gleanrl.folder / "other" / "damaged").mkdir()
    (gleanrl.folder / "other" / "damaged" / "config.toml").write_text("steps = [")
    elsewhere = gleanrl.here("runs", "--folder", "other", "list")
    assert [line.split()[0] for line in elsewhere.stdout.splitlines()[1:]] == ["short"], "a damaged run hides no other"
    assert gleanrl("runs", "--folder", "other", "delete", "whole", "--yes").status == 2, "it is in another folder"
    assert gleanrl("runs", "--folder", "other", "delete", "short", "--yes").status == 0
    assert not (gleanrl.folder / "other" / "short").exists()
    assert gleanrl.run("short").report_path.exists()
    assert gleanrl("runs", "delete", "short", "short", "--yes").status == 0
    assert not gleanrl.run("short").path.exists()
    assert gleanrl.run("whole").path.exists()


def test_training_succeeds_if_the_reader_of_its_summary_goes_away(whole: Whole) -> None:
    gleanrl, _ = whole
    command = [sys.executable, "-m", "gleanrl", "train", "tiny.toml", "--run.name", "whole", "--resume"]
    started = subprocess.Popen(
        command, cwd=gleanrl.folder, env=gleanrl.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    started.stdout.close()
    _, said = started.communicate(timeout=240)
    assert started.returncode == 0, said


@pytest.mark.parametrize("at_start", ["true", "false"])
def test_step_0_is_evaluated_if_at_start_is_true(gleanrl: CommandLine, at_start: str) -> None:
    options = ("--run.steps", "1", "--evaluation.every", "0", "--evaluation.at_start", at_start)
    assert gleanrl.train("start", *options).status == 0
    evaluated = [row.step for row in gleanrl.run("start").read_metrics() if "eval/sampled/pass@1" in row.metrics]
    assert evaluated == ([0, 1] if at_start == "true" else [1])
    assert gleanrl("report", "start").status == 0


def test_evaluate_a_configuration(gleanrl: CommandLine, whole: Whole) -> None:
    """Its model is the one before training."""
    [shown] = evaluated(gleanrl, "tiny.toml").read_metrics()
    start = whole[0].run("whole").read_metrics()[0].metrics
    assert shown.metrics["eval/sampled/pass@1"] == start["eval/sampled/pass@1"]
    assert not (gleanrl.folder / "runs").exists()


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens).logits


def test_the_exported_model_loads_in_transformers_with_the_last_checkpoint_s_weights(whole: Whole) -> None:
    folder = whole[0].run("whole")
    tokenizer = AutoTokenizer.from_pretrained(folder.path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder.path / "model")
    chat = [{"role": "user", "content": "door 3: say left or go right"}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    exported = logits(model, tokens["input_ids"])
    weights = checkpoint_tensors(folder.checkpoint_path(6), "weights/")
    model.load_state_dict(weights, strict=False)
    assert weights.keys() <= model.state_dict().keys()
    assert torch.equal(exported, logits(model, tokens["input_ids"]))
    earlier = checkpoint_tensors(folder.checkpoint_path(4), "weights/")
    model.load_state_dict(earlier, strict=False)
    assert not torch.equal(exported, logits(model, tokens["input_ids"]))


def test_lora_runs_resume_and_export_merged_weights(gleanrl: CommandLine) -> None:
    gleanrl.extra["GLEANRL_CACHE"] = str(gleanrl.folder / "cache")
    lora = ("--learner.lora_rank", "4", "--learner.lr", "1e-2")
    assert gleanrl.train("run", *lora, at=("gleanrl.learners.engine:LocalEngine.step", 4, "SIGKILL")).status == -9
    ended = gleanrl.train("run", *lora, "--resume")
    assert ended.status == 0, ended.stderr
    folder = gleanrl.run("run")
    (base,) = (gleanrl.folder / "cache" / "warm-start").glob("*/model.safetensors")
    before, after = load_file(base), load_file(folder.path / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    adapters = checkpoint_tensors(folder.checkpoint_path(6), "weights/")
    pairs = [(name, name.replace("lora_A", "lora_B")) for name in adapters if "lora_A" in name]
    assert len(pairs) == 2 * 7  # layers, linear maps
    for down, up in pairs:
        target = next(name for name in before if name.removesuffix(".weight") in down)
        scale = 32.0 / 4
        torch.testing.assert_close(after[target], before[target] + scale * adapters[up] @ adapters[down])
    untouched = [name for name in before if "embed" in name]
    assert untouched
    assert all(torch.equal(before[name], after[name]) for name in untouched)
    AutoModelForCausalLM.from_pretrained(folder.path / "model")


@pytest.mark.slow
def test_an_alfworld_run_is_interrupted_and_resumed(gleanrl: CommandLine) -> None:
    """Without test doubles: `python -m gleanrl` on ALFWorld, interrupted by a signal from outside and resumed."""
    (gleanrl.folder / "house.toml").write_text(ALFWORLD)
    command = [sys.executable, "-m", "gleanrl", "train", "house.toml"]
    log = gleanrl.folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=gleanrl.folder, env=gleanrl.environment, stdout=file, stderr=file)
        while "step 1:" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 130, log.read_text()
    assert log.read_text().endswith("gleanrl: interrupted; continue with: gleanrl train house.toml --resume\n")
    ended = gleanrl.python("train", "house.toml", "--resume")
    assert ended.status == 0, ended.stderr
    rows = gleanrl.run("house").read_metrics()
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]
    assert Path(gleanrl.folder, "runs", "house", "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["pydantic", "torch._C", "numpy.random", "transformers"])
def test_an_interrupt_while_libraries_load_is_one_line(gleanrl: CommandLine, module: str) -> None:
    hook = gleanrl.folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(INTERRUPT_ON_IMPORT)
    gleanrl.extra |= {"PYTHONPATH": str(hook), "INTERRUPT_AT": module}
    ended = gleanrl.python("train", "tiny.toml")
    assert ended.status == 130, ended.stderr
    assert ended.complaint == "interrupted"


INTERRUPT_ON_IMPORT = """
import os, signal, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
"""

ALFWORLD = """
[run]
steps = 4
threads = 1
[environment]
train_tasks = 8
eval_tasks = 4
warm_start_tasks = 8
options = { receptacles = [5, 5], objects = [4, 4], object_kinds = ["apple", "mug"] }
[model]
hidden_size = 32
layers = 2
max_context = 512
[warm_start]
demonstrations = 20
steps = 10
batch = 4
[context]
max_turns = 4
max_tokens_per_turn = 8
[schedule]
batch = 2
group = 2
[evaluation]
samples = 1
"""


def test_evaluating_a_preset_that_is_also_the_name_of_a_run_prints_a_warning(gleanrl: CommandLine) -> None:
    pytest.importorskip("gymnasium")
    (gleanrl.folder / "runs" / "pendulum").mkdir(parents=True)
    ended = gleanrl("evaluate", "pendulum")
    assert ended.status == 0, ended.stderr
    assert ended.stderr.startswith("gleanrl: warning: this evaluates the preset pendulum, untrained; the run is runs/p")
