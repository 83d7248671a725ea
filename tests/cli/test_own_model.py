"""Tests of docs/howto/own_model.md and diagnose.md: their code runs, and the settings and metrics they name exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from gleanrl.config.loading import fields
from gleanrl.config.settings import Config
from gleanrl.runtime.run_folder import RunFolder
from tests.cli.conftest import CommandLine, Ended
from tests.gguf_files import write_gguf

DOCS = Path(__file__).parents[2] / "docs"
OWN = (DOCS / "howto" / "own_model.md").read_text()
DIAGNOSE = (DOCS / "howto" / "diagnose.md").read_text()


def blocks(page: str) -> dict[str, str]:
    return dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', page, re.DOTALL))


def test_the_page_s_configuration_trains_a_given_model(gleanrl: CommandLine, whole: tuple[CommandLine, Ended]) -> None:
    pytest.importorskip("math_verify")
    rows = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(60)]
    (gleanrl.folder / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (gleanrl.folder / "mine.toml").write_text(blocks(OWN)["mine.toml"])
    small = {
        "model.init": str(whole[0].run("whole").path / "model"), "model.max_context": "128", "run.steps": "1",
        "context.max_tokens_per_turn": "6", "environment.train_tasks": "20", "environment.eval_tasks": "2",
        "schedule.batch": "2", "schedule.group": "2", "evaluation.samples": "1",
    }  # fmt: skip
    ended = gleanrl("train", "mine.toml", *(word for key, value in small.items() for word in (f"--{key}", value)))
    assert ended.status == 0, ended.stderr
    assert (gleanrl.run("mine").path / "model" / "config.json").exists()
    assert "lr = 1e-05" in gleanrl.run("mine").config_path.read_text()


def test_a_gguf_file_is_trained_resumed_evaluated_and_exported(gleanrl: CommandLine) -> None:
    pytest.importorskip("gguf", reason="needs gguf: pip install 'gleanrl[gguf]'")
    write_gguf(gleanrl.folder / "model.gguf", quantized=True)
    settings = ("--model.init", "model.gguf", "--learner.lr", "1e-3", "--warm_start.steps", "2")
    for steps, resume in (("1", ()), ("2", ("--resume",))):
        ended = gleanrl.train("gguf", *settings, "--run.steps", steps, *resume)
        assert ended.status == 0, ended.stderr
    assert [row.step for row in gleanrl.run("gguf").read_metrics() if "loss/policy" in row.metrics] == [1, 2]
    model = gleanrl.run("gguf").path / "model"
    assert gleanrl("evaluate", str(model)).status == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.eos_token == "<|im_end|>"
    exported = AutoModelForCausalLM.from_pretrained(model).state_dict()
    original = write_gguf(gleanrl.folder / "again.gguf", quantized=True).state_dict()
    assert exported.keys() == original.keys()
    assert not any(exported[name].equal(tensor) for name, tensor in original.items())


def test_options_of_the_chat_template_reach_training_evaluation_and_the_card(
    gleanrl: CommandLine, whole: tuple[CommandLine, Ended]
) -> None:
    """They are a part of the experiment, so they cannot change on a resume, and a pool holds tokens of one choice."""
    model, run = gleanrl.folder / "given", gleanrl.run("run")
    shutil.copytree(whole[0].run("whole").model_path, model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{% if mode %}<|system|>{{ mode }}<|end|>{% endif %}" + template)

    def prompts(folder: RunFolder) -> set[str]:
        tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer_path)
        records = [record for step in folder.rollout_steps() for record in folder.read_rollouts(step)]
        texts = [tokenizer.decode(record.trajectory.segments[0][0].tokens) for record in records]
        return {text.partition("<|end|>")[0] for text in texts}

    options = ("--model.init", "given", "--run.steps", "2", "--evaluation.every", "1", "--warm_start.enabled", "false")
    replay = ("--replay.enabled", "true", "--replay.path", "pool.sqlite")
    ended = gleanrl.train("run", *options, *replay, "--context.template_options.mode", "left")
    assert ended.status == 0, ended.stderr
    assert gleanrl("pool", "pool.sqlite", "seed", "--rollouts", "run").status == 0
    other = gleanrl.train("third", *options, *replay, "--context.template_options.mode", "right")
    assert "another tokenizer" in other.complaint
    assert prompts(run) == {"<|system|>left"}
    assert "`mode`" in (run.model_path / "README.md").read_text()
    assert gleanrl("evaluate", "run", "--out", "same").status == 0
    assert gleanrl("evaluate", "run", "--out", "other", "--context.template_options.mode", "right").status == 0
    assert prompts(RunFolder(gleanrl.folder / "same")) == {"<|system|>left"}
    assert prompts(RunFolder(gleanrl.folder / "other")) == {"<|system|>right"}
    changed = gleanrl.train("run", *options, "--resume", "--context.template_options.mode", "x")
    assert "context.template_options" in changed.complaint


def test_all_settings_and_metrics_that_both_pages_name_exist() -> None:
    known = set(dict(fields(Config)))
    sections = set(Config.model_fields)
    metrics = (DOCS / "reference" / "metrics.md").read_text()
    for page in (OWN, DIAGNOSE):
        theirs = re.sub(r"(?m)^(\| [^|]+\|).*$", r"\1", page) if page is OWN else page  # its tables name others' keys
        words = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]+)?`", theirs)
        assert len(words) > 10
        assert [word for word in words if word.partition(".")[0] in sections and word not in known] == []
    named = re.findall(r"`(?!runs/)([a-z]+/[\w/@]+)`", DIAGNOSE)
    assert len(named) > 12
    assert [name for name in named if f"`{name}`" not in metrics] == []


def test_the_scripts_of_the_diagnose_page_run_on_a_run_folder(whole: tuple[CommandLine, Ended], tmp_path: Path) -> None:
    run = str(whole[0].run("whole").path)
    for name, code in blocks(DIAGNOSE).items():
        (tmp_path / name).write_text(code)

    def said(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    looked = said("look.py", run)
    assert looked.startswith("Counter({")
    assert looked.count("task train-") == 2


def test_the_trl_settings_that_the_page_names_exist() -> None:
    trl = pytest.importorskip("trl")
    column = [row.split("|")[2] for row in OWN.splitlines() if row.startswith("| `") and row.count("|") == 4]
    names = re.findall(r"`([a-z_]+)", " ".join(column)) + re.findall(r"/ ([a-z_]+)", " ".join(column))
    assert len(names) > 12
    fields = {*trl.GRPOConfig.__dataclass_fields__, "reward_funcs"}  # the last is the trainer's own
    assert [name for name in names if name not in fields] == []
