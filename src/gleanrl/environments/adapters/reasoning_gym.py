"""reasoning-gym: single-turn problems of a hundred kinds, generated without end and scored by their own rules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, Literal

import pydantic
from pydantic import Field, TypeAdapter

from gleanrl.config.settings import NonNegative
from gleanrl.environments.splits import fingerprint, select
from gleanrl.protocols import Environment, Observation, Split, Taskset
from gleanrl.rollout.thinking import answer_of
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import NoExpert, UserError
from gleanrl.utils.seeding import derive
from gleanrl.utils.text import nearest

_CHUNK = 64  # problems drawn from one seeded dataset; part of what a seed means, so never change it


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class ReasoningGymTaskset(Taskset):
    """Problems of one reasoning-gym task, e.g. ``task="spell_backward", config={"max_word_len": 6}``.

    The model answers in one message. With ``answer="tags"`` only what stands inside the last
    ``<answer>...</answer>`` counts, and ``instruction`` says so; with ``"whole"`` all of it but thinking does.
    The text of its question identifies a problem. ``level`` is a level of reasoning-gym's own curriculum
    for the task, 0 the easiest; ``config`` overrides it.
    """

    task: str
    level: NonNegative | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    answer: Literal["tags", "whole"] = "tags"
    instruction: str | None = None  # appended to the question; None = what fits `answer`
    seed: int = 0

    has_expert = True
    named_by_content = True  # two tasks of one id are one problem, however it was found

    def __post_init__(self) -> None:
        if self.level is not None:
            object.__setattr__(self, "config", {**_at_level(self.task, self.level), **self.config})
        _dataset(self.task, json.dumps(self.config, sort_keys=True), 0)  # raises now for bad options

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        config = json.dumps(self.config, sort_keys=True)
        scored = {"answer": self.answer} if self.answer != "tags" else {}  # an `instruction` may not show it
        chosen = select(self._candidates(config), split, count, f"reasoning_gym {self.task!r}")
        return [
            Task(
                id=f"{self.task}-{mark[:16]}",
                prompt=({"role": "user", "content": question + self._instruction()},),
                payload={"task": self.task, "config": self.config, "seed": seed, "index": index, **scored},
                kind=self.task,
            )
            for mark, (question, seed, index) in chosen
        ]

    def environment(self, task: Task) -> Environment:
        return _Question(task, self.answer == "tags")

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """The entry's own answer. A single turn has no room for a random action before it: ``noise`` is unused."""
        dataset, entry = _entry(task.payload)
        if entry["answer"] is None:
            raise NoExpert(f"reasoning_gym {self.task!r} has no reference answers: set warm_start.enabled = false")
        oracle = str(entry["answer"])
        text = f"<answer>{oracle}</answer>" if self.answer == "tags" else oracle
        score = Score(float(dataset.score_answer(oracle, entry)))
        return (*task.prompt, {"role": "assistant", "content": text}), score

    def _instruction(self) -> str:
        if self.instruction is not None:
            return self.instruction
        return "\nGive the final answer inside <answer></answer> tags." if self.answer == "tags" else ""

    def _candidates(self, config: str) -> Iterator[tuple[str, tuple[str, int, int]]]:
        """``(fingerprint, (question, seed, index))``, without end."""
        chunk = 0
        while True:
            seed = derive(self.seed, "reasoning_gym", self.task, chunk) % 2**31
            dataset = _dataset(self.task, config, seed)
            for index in range(_CHUNK):
                question = dataset[index]["question"]
                yield fingerprint(self.task, question), (question, seed, index)
            chunk += 1


class _Question(Environment):
    """One problem: the question is the task's prompt, the first answer is the last."""

    def __init__(self, task: Task, tags: bool) -> None:
        self._task = task
        self._tags = tags

    async def reset(self) -> Observation:
        return Observation((), score=Score(0.0))

    async def step(self, message: Message) -> Observation:
        from reasoning_gym.utils import extract_answer

        said = answer_of(message["content"])
        answer = extract_answer(said) if self._tags else said.strip()
        dataset, entry = _entry(self._task.payload)
        score = 0.0 if answer is None else float(dataset.score_answer(answer, entry))
        parts = {"answered": float(answer is not None)}
        return Observation((), done=True, score=Score(score, parts=parts), info={"answer": answer})

    async def close(self) -> None:
        pass


def _at_level(task: str, level: int) -> dict[str, Any]:
    """What the task's curriculum sets at a level.

    Raises:
        UserError: no such task, no curriculum, or not so many levels.
    """
    from reasoning_gym.factory import CURRICULA, DATASETS

    if task not in DATASETS:
        raise UserError(f"environment.options.task: reasoning-gym has no task {task!r}{nearest(task, DATASETS)}")
    if task not in CURRICULA:
        raise UserError(f"environment.options.level: reasoning-gym has no curriculum for {task!r}; use config")
    curriculum: Any = CURRICULA[task]()  # pyright: ignore[reportCallIssue] - they are classes
    attributes = curriculum.attributes.values()
    highest = max(len(attribute.levels) for attribute in attributes) - 1
    if level > highest:
        raise UserError(f"environment.options.level = {level}: {task!r} has levels 0 to {highest}")
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration()
    names = ("field_name", "lower_field_name", "upper_field_name")  # of a scalar, of a range
    own = [found for attribute in attributes for name in names if (found := getattr(attribute, name, None))]
    return {name: getattr(config, name) for name in own}


@lru_cache(maxsize=64)
def _dataset(task: str, config: str, seed: int) -> Any:
    """A dataset of `_CHUNK` problems; ``config`` is JSON.

    Raises:
        UserError: no such task, no such option, or a value that the task refuses.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise UserError(f"environment.options.task: reasoning-gym has no task {task!r}{nearest(task, DATASETS)}")
    options = {field.name: field for field in fields(DATASETS[task][1])}
    given = json.loads(config)
    for name in given:
        if name not in options or name in ("seed", "size"):
            where = f"environment.options.config.{name}: {task!r} has no such option"
            raise UserError(where + (nearest(name, options) or f"; it takes {', '.join(sorted(options))}"))
    try:
        # TOML and JSON have lists where some of these options want tuples.
        given = {name: TypeAdapter(_plain(options[name].type)).validate_python(value) for name, value in given.items()}
        return reasoning_gym.create_dataset(task, seed=seed, size=_CHUNK, **given)
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"environment.options.config: {task!r} refuses {config}: {error}") from error


def _plain(annotation: Any) -> Any:
    """Only tuples need converting; anything else is the task's own to check."""
    origin = getattr(annotation, "__origin__", None)
    return tuple if annotation is tuple or origin is tuple else Any


@lru_cache(maxsize=1024)
def _problem(task: str, config: str, seed: int, index: int) -> tuple[Any, Mapping[str, Any]]:
    dataset = _dataset(task, config, seed)
    return dataset, dataset[index]


def _entry(payload: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset and the entry that a task stands for."""
    config = json.dumps(payload["config"], sort_keys=True)
    dataset, entry = _problem(payload["task"], config, payload["seed"], payload["index"])
    return dataset, dict(entry)
