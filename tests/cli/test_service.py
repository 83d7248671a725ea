"""Tests of runs whose environments are served by `gleanrl serve-env`, whose server is killed, and of its errors."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine, Job, assert_same
from tests.environments.service import killing
from tests.environments.service.world import ROOT, TOKEN, served

KILLING = f"{killing.__file__}:Killing"


def train(gleanrl: CommandLine, name: str, url: str, steps: int) -> Job:
    options = f'{{url = "{url}", token = "env:SERVICE_TOKEN"}}'
    settings = ("--environment.name", "service", "--environment.options", options, "--run.steps", str(steps))
    return gleanrl.start("train", "tiny.toml", "--run.name", name, *settings)


@pytest.fixture
def with_token(gleanrl: CommandLine) -> CommandLine:
    gleanrl.extra = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "SERVICE_TOKEN": TOKEN}
    return gleanrl


def test_a_run_on_a_service_equals_a_run_with_local_environments_bit_for_bit(with_token: CommandLine) -> None:
    within = with_token.train("within", "--environment.name", KILLING, "--environment.options", "{}")
    assert within.status == 0, within.stderr
    with served(KILLING, token=True) as (_, url):
        ended = train(with_token, "served", url, 6).wait()
    assert ended.status == 0, ended.stderr
    assert_same(with_token.run("within"), with_token.run("served"))


@pytest.mark.slow
def test_a_run_survives_kills_of_its_environment_server(with_token: CommandLine, tmp_path: Path) -> None:
    """The server is killed in training and in evaluation and restarted; no trajectory is missing or invalid."""
    tasks = ("train-3", "eval-1")
    folder = ("--environment.options.folder", str(tmp_path))
    serving = (KILLING, *folder, "--environment.options.tasks_that_kill", json.dumps(list(tasks)))
    with served(*serving, token=True) as (server, url):
        run = train(with_token, "served", url, 8)
        assert server.wait(120) == -signal.SIGKILL
    port = int(url.rpartition(":")[2])
    with served(*serving, port=port, token=True) as (server, _):
        assert server.wait(120) == -signal.SIGKILL
    with served(*serving, port=port, token=True):
        ended = run.wait()
    assert ended.status == 0, ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == set(tasks)
    folder = with_token.run("served")
    steps = [row.metrics for row in folder.read_metrics() if "groups/consumed" in row.metrics]
    assert [(m["groups/consumed"], m["reward/valid"], m["stop/done"]) for m in steps] == [(2.0, 1.0, 1.0)] * 8
    for step in folder.rollout_steps():
        records = list(folder.read_rollouts(step))
        assert len(records) == 8
        assert all(record.trajectory.score.valid for record in records)


def test_an_unreachable_service_is_one_line(gleanrl: CommandLine) -> None:
    options = '{url = "http://127.0.0.1:9", patience_s = 0.2}'
    ended = gleanrl.train("none", "--environment.name", "service", "--environment.options", options)
    assert ended.status == 2
    assert ended.complaint.startswith("environment.options.url: no answer from http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("chess",), "no environment 'chess'"),
        (("textworld", "--environment.options.room", "3"), "environment.options.room: 'textworld' has no such option"),
        (("textworld", "--learner.lr", "3"), "--learner.lr: serve-env takes settings of [environment] and --run.seed"),
        (("nothing.toml",), "cannot read nothing.toml"),
        (("textworld", "--host", "0.0.0.0"), "--host 0.0.0.0: others can reach that address, so it needs --token"),
        (
            ("textworld", "--host", "nowhere.invalid", "--token", "env:SERVICE_TOKEN"),
            "cannot listen on nowhere.invalid",
        ),
        (("textworld", "--token", "abc"), "--token: write env:NAME"),
        (("textworld", "--token", "env:NOT_SET"), "--token: the environment variable NOT_SET is not set"),
    ],
)
def test_wrong_arguments_of_serve_env_are_one_line(gleanrl: CommandLine, arguments: tuple[str, ...], told: str) -> None:
    gleanrl.extra = {"SERVICE_TOKEN": TOKEN}
    ended = gleanrl.here("serve-env", *arguments)
    assert ended.status == 2
    assert told in ended.complaint


def test_a_port_in_use_is_one_line(gleanrl: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = gleanrl.here("serve-env", "textworld", "--port", str(taken.getsockname()[1]))
    assert ended.status == 2
    assert "in use" in ended.complaint
