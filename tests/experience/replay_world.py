"""Pools with known contents, and the scripted training loop of `tests.loop_world` with replay around its task
stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.config.settings import ReplaySettings, ScheduleSettings
from gleanrl.curriculum.orders import TaskStream
from gleanrl.curriculum.plan import Plan
from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.replay.curriculum import ReplayCurriculum
from gleanrl.experience.replay.recall import EstimatePolicy
from gleanrl.runtime.checkpoints import restore
from gleanrl.train import Run
from gleanrl.types import Group, GroupSpec, Score, StopReason, Task, Trajectory, Turn
from tests.loop_world import alter_answers, make_run, renderer, tasks


def trajectory(
    task: str, number: int, score: float | None = 1.0, *, logprob: float = -0.5, version: int = 0
) -> Trajectory:
    """Return a trajectory of two sampled turns, whose tokens no other ``number`` of the task has."""
    context = Turn({"role": "user", "content": "?"}, np.array([1, 2], np.int32))
    tokens = np.array([number % 50, number // 50, 3], np.int32)
    sampled = Turn({"role": "assistant", "content": "!"}, tokens, np.full(3, logprob, np.float32), version)
    given = Score.failed("no answer") if score is None else Score(score)
    return Trajectory(f"{task}.{number}", task, ((context, sampled, context, sampled),), given, StopReason.DONE)


def group(
    task: str, successes: int, attempts: int, *, first: int = 0, logprobs: Sequence[float] = (), **more: Any
) -> Group:
    """Return a fresh group whose members are numbered from ``first``, successes first."""
    logprobs = [*logprobs, *[-0.5] * attempts]
    members = tuple(
        trajectory(task, first + i, float(i < successes), logprob=logprobs[i], **more) for i in range(attempts)
    )
    return Group(GroupSpec(Task(task, payload={"word": "left"}), attempts), members, 0)


def retire(pool: ExperiencePool, names: Sequence[str], attempts: int = 4) -> None:
    for _ in range(pool.settings.retire_after):
        pool.observe([group(name, attempts, attempts) for name in names], 0)


class Stream:
    """A curriculum that proposes the tasks ``names`` in turn, for ever, and records the observed groups."""

    def __init__(self, names: Sequence[str], size: int, *, greedy: bool = False) -> None:
        self.names, self.size, self.greedy = names, size, greedy
        self.position = 0
        self.observed: list[Group] = []

    async def propose(self, count: int) -> list[GroupSpec]:
        positions = range(self.position, self.position + count)
        self.position += count
        return [GroupSpec(Task(self.names[i % len(self.names)]), self.size, greedy=self.greedy) for i in positions]

    def observe(self, groups: Sequence[Group], training: Mapping[str, float]) -> Mapping[str, float]:
        self.observed += groups
        return {"inner/seen": float(len(groups))}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def make_replay_run(
    folder: Path,
    schedule: ScheduleSettings,
    replay_settings: ReplaySettings,
    *,
    steps: int,
    problems: Sequence[Task] | None = None,
    resume: bool = False,
    estimate: EstimatePolicy | None = None,
    **options: Any,
) -> tuple[Run, ReplayCurriculum]:
    """Return a run of the scripted world with replay, and its curriculum. Half of the answers are right.

    The answers of the first turn differ in length, and the log-probs are random numbers from the session's seed, so
    that no two sampled turns are equal.
    """
    run = make_run(folder, schedule, steps=steps, problems=problems, **options)
    sampler, r = run.player.sampler, renderer()
    words = {w: r.tokenizer(w, add_special_tokens=False)["input_ids"] for w in ("left", "right")}
    opening: dict[str, int] = {}

    def script(prompt: Any, seed: int) -> list[int]:
        first = opening.setdefault("length", prompt.size)
        many = 1 + (seed >> 8) % 3 if prompt.size <= first else 1
        said = [token for turn in range(many) for token in words["left" if (seed >> turn) % 2 else "right"]]
        return [*said, r.end_of_turn]

    def draw_logprobs(completion: Any, seed: int, turn: int) -> Any:
        drawn = np.random.default_rng([seed, turn]).uniform(-2, -0.01, completion.tokens.size)
        return replace(completion, logprobs=drawn.astype(np.float32))

    sampler._script = script
    alter_answers(sampler, draw_logprobs)
    pool = ExperiencePool(folder / "experience.sqlite", replay_settings)
    inner = TaskStream(problems or tasks(12), schedule.group, seed=1)
    curriculum = ReplayCurriculum(
        inner,
        pool,
        replay_settings,
        total_batches=steps,
        group=schedule.group,
        seed=7,
        staleness=run.controller.schedule.staleness,
        ordered=run.controller.schedule.ordered,
        estimate=estimate,
    )
    run.plan = Plan(curriculum, run.controller.schedule.batch)
    if resume:
        run.controller = restore(run.checkpoints.latest(), run.learner, run.plan, run.controller.schedule, steps)
        sampler._version = run.controller.version
    return run, curriculum
