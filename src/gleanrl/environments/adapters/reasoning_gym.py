"""reasoning-gym: a hundred kinds of single-turn problems, generated without end and scored by the package's own rules.

`ReasoningGymTaskset` is the environment ``reasoning_gym`` of the settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import count as count_from
from typing import Any, Literal, get_origin

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

_CHUNK = 64  # problems drawn from one seeded dataset; never change it, or seeds would give other problems


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class ReasoningGymTaskset(Taskset):
    """Makes problems of one reasoning-gym task, e.g. ``task="spell_backward", config={"max_word_len": 6}``.

    The model answers in one message. A problem is identified by the text of its question.

    Args:
        task: name of the reasoning-gym task.
        level: level of reasoning-gym's own curriculum for the task; 0 is the easiest. ``config`` overrides its options.
        config: options of the task.
        answer: the part of the message that is scored: ``tags`` = the text inside the last ``<answer>...</answer>``,
            ``whole`` = everything except thinking.
        instruction: text appended to the question; None = the instruction that suits ``answer``.
    """

    task: str
    level: NonNegative | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    answer: Literal["tags", "whole"] = "tags"
    instruction: str | None = None
    seed: int = 0

    has_expert = True
    named_by_content = True  # an id is a hash of the problem, whatever seed made it

    def __post_init__(self) -> None:
        if self.level is not None:
            object.__setattr__(self, "config", {**_config_of_level(self.task, self.level), **self.config})
        _make_dataset(self.task, json.dumps(self.config, sort_keys=True), 0)  # made here to report bad options now

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        instruction = self.instruction
        if instruction is None:
            tags = self.answer == "tags"
            instruction = "\nGive the final answer inside <answer></answer> tags." if tags else ""
        scored = {"answer": self.answer} if self.answer != "tags" else {}  # kept, as the instruction may not say it
        tasks = []
        for mark, (question, seed, index) in select(self._candidates(), split, count, f"reasoning_gym {self.task!r}"):
            task = Task(
                id=f"{self.task}-{mark[:16]}",
                prompt=({"role": "user", "content": question + instruction},),
                payload={"task": self.task, "config": self.config, "seed": seed, "index": index, **scored},
                kind=self.task,
            )
            tasks.append(task)
        return tasks

    def environment(self, task: Task) -> Environment:
        return _Question(task, self.answer == "tags")

    def demonstrate(self, task: Task, *, seed: int, noise: float = 0.0) -> tuple[tuple[Message, ...], Score]:
        """Return the prompt with the reference answer. ``noise`` is unused, because there is a single turn."""
        dataset, entry = _find_entry(task.payload)
        if entry["answer"] is None:
            raise NoExpert(f"reasoning_gym {self.task!r} has no reference answers: set warm_start.enabled = false")
        answer = str(entry["answer"])
        text = f"<answer>{answer}</answer>" if self.answer == "tags" else answer
        score = Score(float(dataset.score_answer(answer, entry)))
        return (*task.prompt, {"role": "assistant", "content": text}), score

    def _candidates(self) -> Iterator[tuple[str, tuple[str, int, int]]]:
        """Yield ``(fingerprint, (question, seed, index))`` without end."""
        config = json.dumps(self.config, sort_keys=True)
        for chunk in count_from():
            seed = derive(self.seed, "reasoning_gym", self.task, chunk) % 2**31
            dataset = _make_dataset(self.task, config, seed)
            for index in range(_CHUNK):
                question = dataset[index]["question"]
                yield fingerprint(self.task, question), (question, seed, index)


class _Question(Environment):
    """One problem. The task's prompt holds the question, and the first answer ends the episode."""

    def __init__(self, task: Task, tags: bool) -> None:
        self._task, self._tags = task, tags

    async def reset(self) -> Observation:
        return Observation((), score=Score(0.0))

    async def step(self, message: Message) -> Observation:
        from reasoning_gym.utils import extract_answer

        text = answer_of(message["content"])
        answer = extract_answer(text) if self._tags else text.strip()
        dataset, entry = _find_entry(self._task.payload)
        value = 0.0 if answer is None else float(dataset.score_answer(answer, entry))
        score = Score(value, parts={"answered": float(answer is not None)})
        return Observation((), done=True, score=score, info={"answer": answer})


def _config_of_level(task: str, level: int) -> dict[str, Any]:
    """Return the options that the task's curriculum sets at a level.

    Raises:
        UserError: there is no such task, no curriculum for it, or no such level.
    """
    from reasoning_gym.factory import CURRICULA, DATASETS

    if task not in DATASETS:
        raise _unknown_task(task, DATASETS)
    if task not in CURRICULA:
        raise UserError(f"environment.options.level: reasoning-gym has no curriculum for {task!r}; use config")
    curriculum: Any = CURRICULA[task]()  # pyright: ignore[reportCallIssue] - they are classes
    attributes = curriculum.attributes.values()
    highest = max(len(attribute.levels) for attribute in attributes) - 1
    if level > highest:
        raise UserError(f"environment.options.level = {level}: {task!r} has levels 0 to {highest}")
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration()
    values: dict[str, Any] = {}
    for attribute in attributes:
        for key in ("field_name", "lower_field_name", "upper_field_name"):  # a scalar has the first, a range the others
            name = getattr(attribute, key, None)
            if name:
                values[name] = getattr(config, name)
    return values


@lru_cache(maxsize=64)
def _make_dataset(task: str, config: str, seed: int) -> Any:
    """Make a dataset of `_CHUNK` problems; ``config`` is JSON.

    Raises:
        UserError: there is no such task or option, or the task refuses a value.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise _unknown_task(task, DATASETS)
    options = {field.name: field for field in fields(DATASETS[task][1])}
    given = json.loads(config)
    for name in given:
        if name not in options or name in ("seed", "size"):
            hint = nearest(name, options) or f"; it takes {', '.join(sorted(options))}"
            raise UserError(f"environment.options.config.{name}: {task!r} has no such option{hint}")
    try:
        for name, value in given.items():
            kind: Any = options[name].type
            if tuple in (kind, get_origin(kind)):  # TOML and JSON have no tuples, only lists
                given[name] = TypeAdapter(tuple).validate_python(value)
        return reasoning_gym.create_dataset(task, seed=seed, size=_CHUNK, **given)
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"environment.options.config: {task!r} refuses {config}: {error}") from error


def _unknown_task(task: str, known: Mapping[str, Any]) -> UserError:
    return UserError(f"environment.options.task: reasoning-gym has no task {task!r}{nearest(task, known)}")


def _find_entry(payload: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the dataset and the entry of a task with this payload."""
    config = json.dumps(payload["config"], sort_keys=True)
    dataset, entry = _read_entry(payload["task"], config, payload["seed"], payload["index"])
    return dataset, dict(entry)


@lru_cache(maxsize=1024)
def _read_entry(task: str, config: str, seed: int, index: int) -> tuple[Any, Mapping[str, Any]]:
    dataset = _make_dataset(task, config, seed)
    return dataset, dataset[index]
