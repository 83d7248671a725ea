"""Tests of mistakes and failures: bad input is one line with exit status 2, and failing environments end no run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine, Ended, assert_same, outcome

JUDGE = ("--reward.name", "judge", "--reward.options.base_url", "http://localhost:1/v1", "--reward.options.model", "m")
PART = "{base_url = 'http://localhost:1/v1', model = 'm', api_key_env = 'NO_SUCH_KEY'}"
GUIDED = ("--guidance.enabled", "true", "--guidance.retriever")
OTHER = """
from gleanrl.utils.errors import UserError

class Other: ...

class Picky:
    def __init__(self, level):
        with open("made.txt", "a") as file:
            file.write("made\\n")

    @classmethod
    def check(cls, level):
        if not 1 <= level <= 3:
            raise UserError("level is from 1 to 3")

    async def compute_score(self, request):
        return 1.0

class Unlucky(Picky):
    def __init__(self, level):
        raise UserError("the grader has no licence")
"""
MINE = """
from gleanrl.protocols import Taskset
from gleanrl.types import Task

class Half(Taskset):
    def tasks(self, split, count):
        return [Task(split)] * count

class Whole(Half):
    has_expert = True
    def __init__(self, doors="few"):
        if doors == "none":
            raise ValueError("a house has doors")
        self.doors = {"few": 3}[doors]
    def environment(self, task): ...

class Lost(Whole):
    def tasks(self, split, count):
        return self.door
"""
BAD_SETTINGS = {
    "missing model": (["--model.init", "./nowhere"], r"model.init = './nowhere': no such directory"),
    "no model": (["--model.init", "empty"], r"model.init = 'empty' has no config.json"),
    "damaged model": (["--model.init", "damaged"], r"model.init = 'damaged' cannot be loaded"),
    "long context": (
        ["--model.init", "model", "--model.max_context", "4096"],
        r"4096 is longer than the 128 positions",
    ),
    "too little memory": (["--model.init", "huge"], r"'huge' needs .* TiB of memory .* are available"),
    "no module for adapters": (
        ["--learner.lora_rank", "2", "--learner.lora_targets", "q_proj,vproj"],
        r"learner.lora_targets = 'q_proj,vproj': the model has no module 'vproj'$",
    ),
    "unknown key": (["--learner.lrr", "1"], r"'learner.lrr'.*'learner.lr'"),
    "unknown section": (["--lerner.lr", "1"], r"'lerner.lr'.*'learner.lr'"),
    "no section": (["--seed", "1"], r"--seed.*'run.seed'"),
    "no value": (["--learner.lr"], r"--learner.lr needs a value"),
    "wrong kind": (["--run.steps", "many"], r"run.steps = 'many'"),
    "out of range": (["--run.steps", "0"], r"run.steps = 0"),
    "rates that admit nothing": (
        ["--replay.min_rate", "0.5", "--replay.max_rate", "0.5"],
        r"replay.max_rate = '?0.5'?.*replay.min_rate = 0.5",
    ),
    "difficulty of no group": (
        ["--replay.enabled", "true", "--replay.tasks", "difficulty", "--replay.difficulty", "5"],
        r"replay.difficulty = 5.*schedule.group = 4",
    ),
    "group of one": (["--schedule.group", "1"], r"schedule.group = 1.*grpo"),
    "indivisible batch": (["--learner.updates_per_step", "3"], r"schedule.batch = 2.*learner.updates_per_step = 3"),
    "indivisible chunks": (
        ["--schedule.preset", "pipelined", "--schedule.chunks", "3"],
        r"schedule.batch = 2.*schedule.chunks = 3",
    ),
    "no such file": (["--environment.name", "nowhere.py:Parity"], r"no file .*nowhere.py"),
    "no such class": (["--environment.name", "other.py:Othr"], r"other.py has no 'Othr'; did you mean 'Other'\?"),
    "no such environment": (["--environment.name", "alfwold"], r"no environment 'alfwold'; did you mean 'alfworld'\?"),
    "no such option": (["--environment.options.sed", "1"], r"no such option; did you mean 'seed'\?"),
    "no such estimator": (["--credit.estimator", "grop"], r"'grop'; did you mean 'grpo'\?"),
    "no such loss": (["--loss.name", "poo"], r"'poo'.*'?ppo'?"),
    "no such monitor": (["--monitor.use", "['fiel']"], r"'fiel'.*'file'"),
    "no such sampler": (["--sampler.name", "transformer"], r"no sampler 'transformer'; did you mean 'transformers'\?"),
    "an option of another sampler": (
        ["--sampler.options.gpu_memory_utilization", "0.4"],
        r"sampler.options: transformers has no 'gpu_memory_utilization', only prefill_tokens",
    ),
    "an option that a run sets": (
        ["--sampler.evaluation_options.dtype", "float32"],
        r"sampler.evaluation_options: dtype follows from the run's other settings",
    ),
    "no tokens in a pass": (["--sampler.options.prefill_tokens", "0"], r"sampler.options.prefill_tokens = 0"),
    "no such retriever": ([*GUIDED, "bm26"], r"guidance.retriever = 'bm26'"),
    "a retriever without what it needs": ([*GUIDED, "reme"], r"guidance.options: reme.*'url'"),
    "no such reward": (["--reward.name", "juge"], r"no reward 'juge'; did you mean 'judge'\?"),
    "no such reward at all": (
        ["--reward.name", "x"],
        r"no reward 'x'; there are environment, .*judge, .*or give",
    ),
    "no such option of a reward": (
        ["--reward.name", "http", "--reward.options.url", "http://localhost:1", "--reward.options.time_out_s", "3"],
        r"reward http has no option 'time_out_s'; did you mean 'timeout_s'\?",
    ),
    "an option of no reward": (["--reward.options.url", "x"], r"reward environment has no option 'url'; it takes none"),
    "a reward without what it needs": (["--reward.name", "model"], r"reward model needs the option 'model'"),
    "a template that shows nothing": (
        [*JUDGE, "--reward.options.template", "Good?"],
        r"reward judge: template: it shows the judge neither \{response\} nor",
    ),
    "no key": (
        [*JUDGE, "--reward.options.api_key_env", "NO_SUCH_KEY"],
        r"reward judge: api_key_env: the environment variable NO_SUCH_KEY is not set; export it first",
    ),
    "no key of a part": (
        ["--reward.name", "weighted", f"--reward.options.parts={{a = {{reward = 'judge', options = {PART}}}}}"],
        r"reward weighted: parts.a: reward judge: api_key_env: the environment variable NO_SUCH_KEY is not set",
    ),
    "a key in a reward's options": (
        [
            "--reward.name",
            "http",
            "--reward.options.url",
            "http://localhost:1",
            "--reward.options.fields.token",
            "pass1",
        ],
        r'reward.options.fields.token: write "env:NAME"; a key belongs into the environment, not here',
    ),
    "a reward that sees for itself": (
        ["--reward.name", "other.py:Picky", "--reward.options.level", "9"],
        r"reward other.py:Picky: level is from 1 to 3",
    ),
    "a taskset that lacks a method": (["--environment.name", "mine.py:Half"], r"Half does not implement environment$"),
    "a taskset that refuses an option": (
        ["--environment.name", "mine.py:Whole", "--environment.options.doors", "none"],
        r"\{'doors': 'none'\}: a house has doors \(mine.py:13\)$",
    ),
    "a taskset whose constructor fails": (
        ["--environment.name", "mine.py:Whole", "--environment.options.doors", "many"],
        r"^KeyError: 'many' \(mine.py:14\)$",
    ),
    "a taskset whose tasks fail": (
        ["--environment.name", "mine.py:Lost"],
        r"^AttributeError: 'Lost' object has no attribute 'door'.* \(mine.py:19\)$",
    ),
    "a monitor that lacks methods": (["--monitor.use", "['other.py:Other']"], r"Other does not implement close, log$"),
    "an order that lacks methods": (["--tasks.order", "other.py:Other"], r"Other does not implement .*propose"),
    "a sampler that lacks methods": (["--sampler.name", "other.py:Other"], r"Other does not implement .*session"),
    "a retriever that lacks methods": ([*GUIDED, "other.py:Other"], r"Other does not implement add, retrieve$"),
    "a reward that lacks its method": (["--reward.name", "other.py:Other"], r"other.py:Other .*compute_score"),
    "tasks with one id": (["--environment.name", "mine.py:Whole"], r"'train' to several tasks.* \(mine.py:6\)$"),
    "a missing data file": (
        ["--environment.name", "dataset", "--environment.options.path", "rows.jsonl", "--reward.name", "math"],
        r"environment.options.path: no file rows.jsonl",
    ),
    "rows without demonstrations": (
        ["--environment.name", "dataset", "--environment.options.path", "questions.jsonl", "--reward.name", "math"],
        r"questions.jsonl has 0 rows for 'warm_start'.* environment.options.warm_start_share",
    ),
    "no such order of tasks": (["--tasks.order", "level"], r"no order 'level'; did you mean 'levels'\?"),
    "no such device": (["--model.device", "gpu"], r"model.device = 'gpu' is no device"),
    "a folder that is a file": (["--run.folder", "tiny.toml"], r"cannot make the run folder tiny.toml/run"),
}


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_a_bad_setting_is_one_line_and_leaves_no_run_and_a_dry_run_refuses_it_too(
    gleanrl: CommandLine, whole: tuple[CommandLine, Ended], name: str, dry: bool
) -> None:
    if dry and name in ("damaged model", "a folder that is a file"):
        pytest.skip("a dry run reads no weights and makes no folder")
    settings, expected = BAD_SETTINGS[name]
    model = whole[0].run("whole").path / "model"
    (gleanrl.folder / "empty").mkdir()
    (gleanrl.folder / "other.py").write_text(OTHER)
    (gleanrl.folder / "mine.py").write_text(MINE)
    questions = "".join(f'{{"prompt": "{i} + 1?", "answer": "{i + 1}"}}\n' for i in range(100))
    (gleanrl.folder / "questions.jsonl").write_text(questions)
    shutil.copytree(model, gleanrl.folder / "model")
    shutil.copytree(model, gleanrl.folder / "damaged")
    os.truncate(gleanrl.folder / "damaged" / "model.safetensors", 1000)
    shutil.copytree(model, gleanrl.folder / "huge", ignore=shutil.ignore_patterns("model.safetensors"))
    sizes = {"hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 100, "num_attention_heads": 128}
    huge = {**json.loads((model / "config.json").read_text()), **sizes, "num_key_value_heads": 128}
    (gleanrl.folder / "huge" / "config.json").write_text(json.dumps(huge))
    ended = gleanrl.here("train", "tiny.toml", "--run.name", "run", *settings, *["--dry-run"][: int(dry)])
    assert (ended.status, ended.stdout) == (2, ""), ended.stderr
    assert re.search(expected, ended.complaint)
    assert not re.search("^warm start", ended.stderr, re.MULTILINE)  # which would take long
    assert not gleanrl.run("run").config_path.exists()


def test_a_reward_is_constructed_once_and_before_tasks_are_made(gleanrl: CommandLine) -> None:
    (gleanrl.folder / "other.py").write_text(OTHER)
    picky = ("--reward.name", "other.py:Picky", "--reward.options.level", "2")
    assert gleanrl.train("run", *picky, "--dry-run").status == 0
    assert not (gleanrl.folder / "made.txt").exists()
    ended = gleanrl.train("run", *picky)
    assert ended.status == 0, ended.stderr
    assert (gleanrl.folder / "made.txt").read_text() == "made\n"
    for command in (("train", "tiny.toml"), ("evaluate", "tiny.toml")):
        unlucky = gleanrl(*command, "--run.name", "other", "--reward.name", "other.py:Unlucky", *picky[2:])
        assert (unlucky.status, unlucky.complaint) == (2, "reward other.py:Unlucky: the grader has no licence")
        assert "making tasks" not in unlucky.stderr
    assert "making tasks" in ended.stderr
    assert not gleanrl.run("other").config_path.exists()


def test_bad_configuration_files_and_arguments_are_one_line(gleanrl: CommandLine) -> None:
    (gleanrl.folder / "broken.toml").write_text("[run\nsteps = 3")
    (gleanrl.folder / "typo.toml").write_text("[learner]\nlearning_rte = 1\n")
    (gleanrl.folder / "model").mkdir()
    (gleanrl.folder / "model" / "config.json").write_text("{}")
    for argv, expected in {
        ("train", "broken.toml"): r"broken.toml is not valid TOML: .*line 1",
        ("train", "typo.toml"): r"typo.toml: unknown key 'learner.learning_rte'",
        ("train", "nowhere.toml"): r"cannot read nowhere.toml: No such file",
        ("train", "quickstrt"): r"no preset 'quickstrt'; did you mean 'quickstart'\?",
        ("train", "tiny.toml", "--resume"): r"runs/tiny holds no run to resume; leave --resume out",
        ("train", "tiny.toml", "extra"): r"unexpected argument 'extra'",
        ("evaluate", "nowhere.toml"): r"cannot read nowhere.toml",
        ("evaluate", str(gleanrl.folder)): r"is not a run folder",
        ("evaluate", "model"): r"gleanrl evaluate PRESET_OR_TOML --model.init model",
        ("report", "nowhere"): r"no run folder at nowhere",
        ("report", "n" * 300): r"n{300}: File name too long",
        ("doctor", "--what", "3"): r"unknown option --what",
    }.items():
        ended = gleanrl.here(*argv)
        assert ended.status == 2, (argv, ended.stderr)
        assert re.search(expected, ended.complaint), ended.complaint
    assert not (gleanrl.folder / "runs").exists()


def test_a_run_folder_is_refused_to_a_second_process_and_to_another_run(gleanrl: CommandLine) -> None:
    hanging = "--environment.options.trouble={'*' = 'hang'}"
    first = gleanrl.start("train", "tiny.toml", "--run.name", "run", "--environment.workers=1", hanging)
    first.until("training:")
    for resume in ([], ["--resume"]):
        assert gleanrl.train("run", *resume).complaint == "runs/run is in use by another process"
    first.kill(signal.SIGKILL)
    assert first.wait().status == -9
    used = gleanrl.train("run")
    assert used.status == 2
    assert used.complaint == "runs/run already holds a run; continue it with --resume or choose another --run.name"
    other = gleanrl.train("run", "--resume")
    assert other.status == 2
    assert other.complaint.startswith("runs/run was started with environment.options = {'trouble': {'*': 'hang'}}")
    config = gleanrl.folder / "runs" / "run" / "config.toml"
    config.write_text(config.read_text().replace('[environment.options.trouble]\n"*" = "hang"\n', ""))
    assert gleanrl.train("run", "--resume").status == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_folder_is_one_line(gleanrl: CommandLine) -> None:
    (gleanrl.folder / "runs").mkdir(mode=0o500)
    ended = gleanrl.train("run")
    assert ended.status == 2
    assert ended.complaint == "cannot make the run folder runs/run: Permission denied"


@pytest.fixture
def small_disk(gleanrl: CommandLine) -> Iterator[Path]:
    disk = gleanrl.folder / "runs"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("no right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="no right to mount")
def test_a_run_stopped_by_a_full_disk_can_be_resumed(
    gleanrl: CommandLine, small_disk: Path, whole: tuple[CommandLine, Ended]
) -> None:
    ended = gleanrl.train("whole")
    assert ended.status == 2, ended.stderr
    assert re.search(r"runs/whole/.*the disk is full: .* free", ended.complaint)
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    resumed = gleanrl.train("whole", "--resume")
    assert resumed.status == 0, resumed.stderr
    assert_same(gleanrl.run("whole"), whole[0].run("whole"))


@pytest.mark.parametrize("trouble", ["raise", "hang", "exit", "kill"])
def test_a_failing_environment_loses_only_its_episodes(gleanrl: CommandLine, trouble: str) -> None:
    apart = [] if trouble == "raise" else ["--environment.workers", "1", "--environment.timeout_s", "1"]
    options = [f"--environment.options.trouble={{train-3 = '{trouble}'}}", "--schedule.max_failed_fraction", "0.9"]
    ended = gleanrl.train("run", *options, *apart)
    assert ended.status == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    rows = gleanrl.run("run").read_metrics()
    assert [row.step for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert sum(row.metrics.get("groups/dropped_invalid", 0) for row in rows) >= 1
    failed, episodes = (sum(row.metrics.get(f"episode/{name}", 0) for row in rows) for name in ("failed", "ended"))
    assert 0 < failed < episodes
    reason = r"\(.*/parity.py:\d+\)" if trouble == "raise" else ""
    line = rf"{failed:.0f} of {episodes:.0f} training episodes .* reason: .*{reason}"
    for shown in (ended.stdout, gleanrl.run("run").log_path.read_text(), gleanrl.run("run").report_path.read_text()):
        assert re.search(line, shown.replace("\n", " "))
    played = {record["trajectory"]["task_id"] for record in outcome(gleanrl.run("run"))["rollouts"]}
    assert len(played) > 5
    assert "train-3" not in played


def test_a_run_in_which_everything_fails_stops_with_the_reason(gleanrl: CommandLine) -> None:
    ended = gleanrl.train("run", "--environment.options.trouble={'*' = 'raise'}")
    assert ended.status == 2
    assert re.match(
        r"100% of the last \d+ episodes failed.*RuntimeError: the door is stuck \(.*/parity.py:\d+\)", ended.complaint
    )


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("--environment.options.trouble={'*' = 'hang'}", r"parity.py:\d+\).*environment.workers"),
        ("--reward.name=sleepy.py:sleepy", r"sleepy.py:3\).*async def"),
    ],
)
def test_a_signal_ends_a_run_whose_environment_or_reward_blocks_its_process(
    gleanrl: CommandLine, setting: str, named: str
) -> None:
    (gleanrl.folder / "sleepy.py").write_text("import time\nasync def sleepy(request):\n    time.sleep(600)\n")
    job = gleanrl.start("train", "tiny.toml", "--run.name", "run", setting)
    job.until("training:")
    time.sleep(1)
    began = time.monotonic()
    job.kill(signal.SIGTERM)
    ended = job.wait()
    assert time.monotonic() - began < 30
    assert ended.status == 130
    assert re.search(named, ended.stderr)
