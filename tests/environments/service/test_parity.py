"""A run sees the same tasks, tools, demonstrations and scores whether a taskset is local or behind `serve-env`.

The servers are separate processes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gleanrl.config import loading as configuration
from gleanrl.config.settings import Config, EnvironmentSettings
from gleanrl.curriculum.orders import make_curriculum, source_of
from gleanrl.environments import load_taskset
from gleanrl.environments.service.app import fingerprint
from gleanrl.environments.service.client import ServiceTaskset
from gleanrl.protocols import EpisodeLost
from gleanrl.rollout.player import conclude_score
from gleanrl.runtime import prepare
from gleanrl.tracking.monitors import Console
from gleanrl.types import Score, StopReason, Task
from gleanrl.utils.errors import NoExpert
from tests.environments.service.test_serving import TROUBLESOME
from tests.environments.service.world import ROOT, served
from tests.environments.troublesome import say

TOML = """
[run]
seed = 3
[environment]
name = "mixture"
warm_start_tasks = 8
[[environment.options.parts]]
name = "tools"
label = "sums"
weight = 3.0
options = {{ environment_factory = "{root}/examples/calculator.py:Calculator" }}
[[environment.options.parts]]
name = "dataset"
label = "rows"
warm_start_tasks = 0
options = {{ path = "{rows}" }}
[[environment.options.parts]]
name = "tests.environments.service.world:Echo"
label = "echo"
[[environment.options.parts]]
name = "tests.environments.service.hoarding:Plain"
label = "plain"
warm_start_tasks = 0
[warm_start]
demonstrations = 8
"""


def rows(path: Path, count: int) -> Path:
    made = [{"id": f"row-{i}", "prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def test_a_served_mixture_gives_the_same_tasks_demonstrations_and_scores_as_a_local_one(tmp_path: Path) -> None:
    toml = tmp_path / "mixed.toml"
    toml.write_text(TOML.format(root=ROOT, rows=rows(tmp_path / "rows.jsonl", 300)))
    config = configuration.load(str(toml), [])
    within: Any = load_taskset(config.environment, config.run.seed)
    with served(str(toml)) as (_, url):
        there: Any = ServiceTaskset(url=url)
        assert there.weights
        assert list(there.weights.items()) == list(within.weights.items())
        assert there.needs_reward is within.needs_reward is True
        tasks = within.tasks("train", 24)
        assert there.tasks("train", 24) == tasks
        kinds: Mapping[str, Task] = {source_of(task): task for task in tasks}
        assert kinds.keys() == within.weights.keys()
        for task in kinds.values():
            assert list(there.tools(task)) == list(within.tools(task))
        assert len(there.tools(kinds["sums"])) > 0
        assert [seen_by_run(config, taskset) for taskset in (there,)] == [seen_by_run(config, within)]
        with pytest.raises(NoExpert, match="has no expert"):
            there.demonstrate(kinds["plain"], seed=1)
        score = asyncio.run(ended(there.environment(kinds["echo"])))
        assert score == asyncio.run(ended(within.environment(kinds["echo"]))) == Score(1.0, explanation="max_turns")


def seen_by_run(config: Config, taskset: Any) -> tuple[Any, ...]:
    """Return what a run gets from the taskset before its first step: the order of tasks, and the demonstrations."""
    tasks = taskset.tasks("train", 24)
    order = make_curriculum(config.tasks, tasks, taskset.weights, group=2, seed=0, greedy=False)
    proposed = [spec.task.id for spec in asyncio.run(order.propose(12))]
    # Demonstrations are cached by the name of the environment, which must differ between the two tasksets.
    at = {"name": type(taskset).__name__}
    shown = prepare.demonstrate(
        config.model_copy(update={"environment": config.environment.model_copy(update=at)}), taskset, Console()
    )
    assert any(tools for demonstration in shown for _, tools in demonstration.conversations)
    return proposed, [demonstration.conversations for demonstration in shown]


async def ended(environment: Any) -> Score:
    await environment.reset()
    await environment.step(say("a"))
    score = await conclude_score(environment, StopReason.MAX_TURNS, Score.failed("nothing was scored"))
    await environment.close()
    return score


def test_the_fingerprint_changes_with_the_rows_and_with_the_seed(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", 50)

    def version(seed: int) -> str:
        options = ("--environment.options.path", str(path), "--environment.options.solution", "answer")
        with served("dataset", *options, "--run.seed", str(seed), "--workers", "0") as (_, url):
            return ServiceTaskset(url=url).version

    first = version(1)
    assert version(2) != first
    rows(path, 51)
    assert version(1) != first


def test_the_fingerprint_changes_with_the_code_of_the_taskset(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("class Mine: ...")
    settings = EnvironmentSettings(name=f"{file}:Mine")
    first = fingerprint(settings, 0, "")
    assert fingerprint(settings, 0, "") == first
    file.write_text("class Mine: x = 1")
    assert fingerprint(settings, 0, "") != first


@pytest.mark.slow
def test_an_episode_lost_by_a_service_behind_the_service_raises_episode_lost() -> None:
    with served(TROUBLESOME) as (behind, url):
        port = int(url.rpartition(":")[2])
        with served("service", "--environment.options.url", url) as (_, before):
            taskset = ServiceTaskset(url=before)

            async def play() -> None:
                environment = taskset.environment(Task("t"))
                await environment.reset()
                await environment.step(say("a"))
                behind.kill()
                behind.wait()
                step = asyncio.ensure_future(environment.step(say("b")))
                started = served(TROUBLESOME, port=port)
                await asyncio.to_thread(started.__enter__)
                try:
                    with pytest.raises(EpisodeLost, match="restarted"):
                        await step
                    # The same request again raises the same error.
                    with pytest.raises(EpisodeLost):
                        await environment.step(say("b"))
                    again = taskset.environment(Task("t"))
                    await again.reset()
                    assert (await again.step(say("b"))).messages[0]["content"] == "t: b"
                    assert (await taskset.client.ask("/profile"))["failed"] == 0
                finally:
                    started.__exit__(None, None, None)

            asyncio.run(play())
