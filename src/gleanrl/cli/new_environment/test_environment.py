"""Checks of the environment that `train.toml` names: `python -m pytest` in this folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gleanrl.config.loading import load
from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.protocols import Split, Taskset
from gleanrl.types import Message, Task

SPLITS: tuple[Split, ...] = ("train", "eval", "warm_start")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> EnvironmentSettings:
    monkeypatch.chdir(Path(__file__).parent)
    return load("train.toml").environment


@pytest.fixture
def taskset(settings: EnvironmentSettings) -> Taskset:
    return load_taskset(settings, seed=0)


async def play(taskset: Taskset, task: Task, answers: list[str]) -> list[float]:
    """Send answers until the episode ends, and return its scores."""
    environment = taskset.environment(task)
    observation = await environment.reset()
    scores = []
    for answer in answers:
        if observation.done:
            break
        observation = await environment.step(Message(role="assistant", content=answer))
        if observation.score is not None:
            scores.append(observation.score.value)
    await environment.close()
    return scores


def test_there_are_enough_tasks_and_none_is_in_two_splits(settings: EnvironmentSettings, taskset: Taskset) -> None:
    tasks = {split: taskset.tasks(split, getattr(settings, f"{split}_tasks")) for split in SPLITS}
    ids = [task.id for found in tasks.values() for task in found]
    assert all(len(found) == getattr(settings, f"{split}_tasks") for split, found in tasks.items())
    assert len(set(ids)) == len(ids)


def test_the_environment_scores_what_the_expert_does_as_the_expert_says(taskset: Taskset) -> None:
    for task in taskset.tasks("warm_start", 5):
        conversation, score = taskset.demonstrate(task, seed=0)
        answers = [message["content"] for message in conversation if message["role"] == "assistant"]
        assert asyncio.run(play(taskset, task, answers))[-1] == score.value


def test_wrong_answers_end_an_episode_without_a_reward(taskset: Taskset) -> None:
    scores = asyncio.run(play(taskset, taskset.tasks("train", 1)[0], ["?"] * 100))
    assert len(scores) < 100
    assert scores[-1] == 0.0
