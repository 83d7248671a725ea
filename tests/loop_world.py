"""A training run with a scripted sampler, a tiny environment and a recording learner, for exact tests of the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gleanrl.algorithms.batch import Batch, build
from gleanrl.config.settings import ContextSettings, CreditSettings, LossSettings, ScheduleSettings
from gleanrl.curriculum.orders import TaskStream
from gleanrl.curriculum.plan import Plan
from gleanrl.learners.tiny import build_tokenizer
from gleanrl.protocols import Completion, Environment, Observation
from gleanrl.rewards import EnvironmentReward
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.runtime.checkpoints import Checkpoints, restore
from gleanrl.samplers.scripted import ScriptedSampler
from gleanrl.schedule.controller import StalenessController
from gleanrl.schedule.schedule import Schedule
from gleanrl.schedule.timeline import Timeline
from gleanrl.train import Run
from gleanrl.types import Group, Message, Score, Task

TURNS = 2


@lru_cache
def renderer() -> Renderer:
    return Renderer(build_tokenizer(["say left or right", "left", "right"] * 4, 256), bodies=True)


@dataclass
class GuessEnvironment(Environment):
    """An episode of two turns, whose score is 1 if the last message is the task's word.

    The payload key ``broken`` makes "reset" or "step" raise, and ``delay`` is a delay of each step in seconds.
    """

    task: Task
    turns: int = 0

    async def reset(self) -> Observation:
        if self.task.payload.get("broken") == "reset":
            raise RuntimeError("this task is broken")
        return Observation((Message(role="user", content="say left or right"),), score=Score(0.0))

    async def step(self, message: Message) -> Observation:
        self.turns += 1
        if self.task.payload.get("broken") == "step":
            raise RuntimeError("this task is broken")
        if delay := self.task.payload.get("delay"):
            await asyncio.sleep(delay)
        won = message["content"] == self.task.payload["word"]
        return Observation((Message(role="user", content="right"),), done=self.turns == TURNS, score=Score(float(won)))


@dataclass
class RecordingLearner:
    """A learner that records the batches that it is updated with. Its only "weight" is their number."""

    consumed: list[tuple[int, ...]] = field(default_factory=list)  # for each update, the trained tokens of each part
    delay: float = 0.0
    returned: list[str] = field(default_factory=list)  # names of the folders of `return_to`

    async def update(self, batch: Batch) -> dict[str, float]:
        await asyncio.sleep(self.delay)
        self.consumed.append(tuple(part.tokens for part in batch.parts))
        return {"tokens/trained": float(sum(part.tokens for part in batch.parts)), "loss/policy": 1.0}

    def weights(self) -> dict[str, Any]:
        return {"chunks": len(self.consumed)}

    def undo_step(self) -> bool:
        return False

    def save(self, folder: Path) -> None:
        (folder / "learner.json").write_text(json.dumps(self.consumed))

    def load(self, folder: Path) -> None:
        self.consumed = [tuple(chunk) for chunk in json.loads((folder / "learner.json").read_text())]

    def return_to(self, folder: Path) -> None:
        self.returned.append(folder.name)

    def export(self, folder: Path) -> None:
        pass


@dataclass
class RecordingObserver:
    steps: list[tuple[int, tuple[Group, ...], dict[str, float]]] = field(default_factory=list)

    def log(self, step: int, metrics: Any) -> None:
        pass

    def on_batch(self, groups: Sequence[Group], batch: Batch) -> None:
        assert batch.groups == len(groups)

    def on_step(self, step: int, groups: Sequence[Group], metrics: Any, dropped: Sequence[Group] = ()) -> None:
        self.steps.append((step, tuple(groups), dict(metrics)))


@dataclass
class RecordingEvaluator:
    started: list[int] = field(default_factory=list)
    cancelled: bool = False
    shares_sampler: bool = False

    async def start(self, step: int, on_error: Callable[[BaseException], None]) -> None:
        self.started.append(step)

    async def finish(self) -> None:
        pass

    async def cancel(self) -> None:
        self.cancelled = True


async def make_batch(groups: Sequence[Group]) -> Batch:
    return build(groups, CreditSettings(), LossSettings(), 128)


def tasks(count: int, **payload: Any) -> list[Task]:
    return [Task(f"task-{i}", payload={"word": "left", **payload}) for i in range(count)]


def make_run(
    folder: Path,
    settings: ScheduleSettings,
    *,
    steps: int,
    problems: Sequence[Task] | None = None,
    resume: bool = False,
    checkpoint_every: int = 0,
    learner_delay: float = 0.0,
    sample_delay: Any = 0.0,
) -> Run:
    """Make a complete run. The sampler answers "left" for odd seeds and "right" for even ones."""
    r = renderer()
    words = {w: r.tokenizer(w, add_special_tokens=False)["input_ids"] for w in ("left", "right")}
    schedule = Schedule.from_settings(settings)
    sampler = ScriptedSampler(
        lambda prompt, seed: [*words["left" if seed % 2 else "right"], r.end_of_turn],
        inflight=schedule.inflight,
        delay=sample_delay,
    )
    learner = RecordingLearner(delay=learner_delay)
    plan = Plan(TaskStream(problems or tasks(12), settings.group, seed=1), schedule.batch)
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    controller = (
        restore(checkpoints.latest(), learner, plan, schedule, steps)
        if resume
        else StalenessController(schedule, steps)
    )
    sampler._version = controller.version
    return Run(
        seed=7,
        total_steps=steps,
        settings=settings,
        player=Player(
            GuessEnvironment, sampler, r, ContextSettings(max_turns=4, max_tokens_per_turn=4), 1.0, max_context=128
        ),
        rewards=EnvironmentReward(),
        learner=learner,
        plan=plan,
        make_batch=make_batch,
        evaluator=RecordingEvaluator(),
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        evaluate_every=2,
        observer=RecordingObserver(),
        timeline=Timeline(),
        controller=controller,
    )


def alter_answers(sampler: Any, change: Callable[[Completion, int, int], Completion]) -> None:
    """Replace every completion of a sampler by the result of ``change(completion, seed of the session, turn)``."""
    plain = sampler.session

    @asynccontextmanager
    async def session(seed: int) -> AsyncIterator[Any]:
        turns = count()

        async def sample(prompt: Any, params: Any) -> Completion:
            turn = next(turns)
            return change(await inner.sample(prompt, params), seed, turn)

        async with plain(seed) as inner:
            yield SimpleNamespace(sample=sample)

    sampler.session = session
