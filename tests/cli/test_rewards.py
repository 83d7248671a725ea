"""Tests of a user's own reward function in whole runs: on every schedule, killed and resumed, and failing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Trajectory
from tests.cli.conftest import CommandLine, assert_same

JUDGE = '''
import asyncio
from zlib import crc32

async def even(request):
    """1 for a conversation whose text is of even length; who asked what is written down."""
    with open("asked.txt", "a") as file:
        file.write(request.key("") + "\\n")
    await asyncio.sleep(0.001 * (crc32(request.response.encode()) % 20))
    return float(len("".join(m["content"] for m in request.messages)) % 2 == 0)

async def breaks(request):
    kind = crc32(request.trajectory_id.encode()) % 5
    if kind == 0:
        raise ValueError("no opinion")
    if kind == 1:
        return float("nan")
    return await even(request)

def broken(request):
    raise ConnectionError("nobody is there")
'''
PRESETS = ("sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async")
JUDGED = ("--reward.name", "judge.py:even", "--evaluation.every", "0")


@pytest.fixture
def judged(make_gleanrl: Callable[[], CommandLine]) -> Callable[[], CommandLine]:
    def make() -> CommandLine:
        gleanrl = make_gleanrl()
        (gleanrl.folder / "judge.py").write_text(JUDGE)
        return gleanrl

    return make


def sampled(folder: RunFolder) -> list[Trajectory]:
    return [record.trajectory for step in folder.rollout_steps() for record in folder.read_rollouts(step)]


def even(trajectory: Trajectory) -> float:
    return float(len("".join(turn.message["content"] for turn in trajectory.turns())) % 2 == 0)


def asked(gleanrl: CommandLine) -> list[str]:
    return (gleanrl.folder / "asked.txt").read_text().split()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_trajectory_gets_its_own_score(judged: Callable[[], CommandLine], preset: str) -> None:
    gleanrl = judged()
    ended = gleanrl.train("run", *JUDGED, "--schedule.preset", preset)
    assert ended.status == 0, ended.stderr
    trajectories = sampled(gleanrl.run("run"))
    assert trajectories
    assert [t.score.value for t in trajectories] == [even(t) for t in trajectories]
    assert {t.score.value for t in trajectories} == {0.0, 1.0}
    assert len(asked(gleanrl)) == len(set(asked(gleanrl)))  # identical requests are sent once


@pytest.mark.parametrize("moment", [1, 4])
def test_a_run_killed_and_resumed_is_the_same_and_requests_no_reward_twice(
    judged: Callable[[], CommandLine], moment: int
) -> None:
    whole, killed = judged(), judged()
    # Without the evaluation at the start, which could still have requests pending when the run is killed.
    options = (*JUDGED, "--evaluation.at_start", "false")
    assert whole.train("run", *options).status == 0
    at = ("gleanrl.learners.engine:LocalEngine.step", moment, "SIGKILL")
    assert killed.train("run", *options, at=at).status == -9
    ended = killed.train("run", *options, "--resume")
    assert ended.status == 0, ended.stderr
    assert_same(whole.run("run"), killed.run("run"))
    assert sorted(asked(killed)) == sorted(set(asked(killed))) == sorted(asked(whole))


def test_trajectories_without_a_score_are_invalid_counted_and_never_zero(judged: Callable[[], CommandLine]) -> None:
    gleanrl = judged()
    settings = ("--reward.name", "judge.py:breaks", "--schedule.min_valid", "1", "--reward.max_failed_fraction", "1")
    ended = gleanrl.train("run", *settings, "--schedule.max_failed_fraction", "1", "--evaluation.every", "0")
    assert ended.status == 0, ended.stderr
    trajectories = sampled(gleanrl.run("run"))
    failed = [t for t in trajectories if not t.score.valid]
    assert failed
    assert any(re.fullmatch(r"ValueError: no opinion \(judge.py:\d+\)", t.score.explanation or "") for t in failed)
    valid = [t for t in trajectories if t.score.valid]
    assert [t.score.value for t in valid] == [even(t) for t in valid]
    rows = [row.metrics for row in gleanrl.run("run").read_metrics()]
    counted = sum(v for row in rows for name, v in row.items() if name.startswith("service/failed/"))
    assert counted >= len(failed)  # evaluation and dropped groups count too


MISTAKES = {
    "no such file": (("--reward.name", "nothing.py:score"), "nothing.py"),
    "no such function": (("--reward.name", "judge.py:evne"), "evne"),
    "a service that is down": (
        ("--reward.name", "judge.py:broken", "--reward.attempts", "1", "--schedule.batch", "8"),
        "nobody is there",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_reward_or_an_unreachable_service_is_one_line(judged: Callable[[], CommandLine], name: str) -> None:
    settings, said = MISTAKES[name]
    gleanrl = judged()
    ended = gleanrl.train("run", *settings)
    assert ended.status == 2, ended.stderr
    assert said in ended.complaint
