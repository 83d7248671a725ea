"""Makes single-turn problems with the package reasoning-gym, which has about a hundred generators of problems.

reasoning-gym also scores the answers, without a model. A generator never runs out of problems.

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

# Number of problems that are generated from one seed. With another number, the same seed would give other problems, and
# stored tasks would no longer match them.
_CHUNK = 64


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class ReasoningGymTaskset(Taskset):
    """Makes tasks from one generator of reasoning-gym, e.g. ``task="spell_backward", config={"max_word_len": 6}``.

    The model answers in one message. Problems with the same text of the question count as the same problem.
    """

    task: str
    """Name of the generator, which reasoning-gym calls a task."""
    level: NonNegative | None = None
    """Level in reasoning-gym's curriculum for ``task``, from 0 (the easiest). It sets options of the generator, which
    ``config`` can override. None = the generator's default options."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the generator."""
    answer: Literal["tags", "whole"] = "tags"
    """The part of the message that is scored. "tags" = the text inside the last ``<answer>...</answer>``, "whole" =
    everything except thinking."""
    instruction: str | None = None
    """Text that is appended to the question. None = with ``answer="tags"``, a request to use the tags."""
    seed: int = 0
    """Seed with which problems are generated."""

    has_expert = True
    named_by_content = True  # the id of a task is a hash of its question, not of the seed that generated it

    def __post_init__(self) -> None:
        if self.level is not None:
            object.__setattr__(self, "config", {**_config_of_level(self.task, self.level), **self.config})
        # Make a dataset, so that wrong options are reported now and not when the first task is made.
        _make_dataset(self.task, json.dumps(self.config, sort_keys=True), 0)

    def tasks(self, split: Split, count: int) -> Sequence[Task]:
        instruction = self.instruction
        if instruction is None:
            tags = self.answer == "tags"
            instruction = "\nGive the final answer inside <answer></answer> tags." if tags else ""
        # Part of the payload, because the prompt may be the same for both values of `answer` although scores differ.
        scored = {"answer": self.answer} if self.answer != "tags" else {}
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
        """Return the prompt and the reference answer as a conversation, and reasoning-gym's score of this answer.

        ``noise`` is not used, because the expert's only action is the answer.
        """
        dataset, entry = _find_entry(task.payload)
        if entry["answer"] is None:
            raise NoExpert(f"reasoning_gym {self.task!r} has no reference answers: set warm_start.enabled = false")
        answer = str(entry["answer"])
        text = f"<answer>{answer}</answer>" if self.answer == "tags" else answer
        score = Score(float(dataset.score_answer(answer, entry)))
        return (*task.prompt, {"role": "assistant", "content": text}), score

    def _candidates(self) -> Iterator[tuple[str, tuple[str, int, int]]]:
        """Yield ``(fingerprint, (question, seed, index))`` of problems without end.

        ``fingerprint`` is a hash of the generator's name and the question. ``index`` is the problem's index in the
        dataset that is made from ``seed``.
        """
        config = json.dumps(self.config, sort_keys=True)
        for chunk in count_from():
            seed = derive(self.seed, "reasoning_gym", self.task, chunk) % 2**31
            dataset = _make_dataset(self.task, config, seed)
            for index in range(_CHUNK):
                question = dataset[index]["question"]
                yield fingerprint(self.task, question), (question, seed, index)


class _Question(Environment):
    """One problem. The question is in the task's prompt, and the model's first message ends the episode."""

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
    """Return the options that reasoning-gym's curriculum for ``task`` sets at ``level``.

    Raises:
        UserError: there is no such task, it has no curriculum, or its curriculum has no such level.
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
        # An attribute of a curriculum that sets one number has a `field_name`. An attribute that sets a range has a
        # `lower_field_name` and an `upper_field_name`.
        for key in ("field_name", "lower_field_name", "upper_field_name"):
            name = getattr(attribute, key, None)
            if name:
                values[name] = getattr(config, name)
    return values


@lru_cache(maxsize=64)
def _make_dataset(task: str, config: str, seed: int) -> Any:
    """Make a reasoning-gym dataset of `_CHUNK` problems. ``config`` contains the generator's options as JSON.

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
            # TOML and JSON have no tuples, so the value of an option with a tuple type arrives as a list.
            if tuple in (kind, get_origin(kind)):
                given[name] = TypeAdapter(tuple).validate_python(value)
        return reasoning_gym.create_dataset(task, seed=seed, size=_CHUNK, **given)
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"environment.options.config: {task!r} refuses {config}: {error}") from error


def _unknown_task(task: str, known: Mapping[str, Any]) -> UserError:
    return UserError(f"environment.options.task: reasoning-gym has no task {task!r}{nearest(task, known)}")


def _find_entry(payload: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the reasoning-gym dataset, and in it the entry (question and answer) of the task with this payload."""
    config = json.dumps(payload["config"], sort_keys=True)
    dataset, entry = _read_entry(payload["task"], config, payload["seed"], payload["index"])
    return dataset, dict(entry)


@lru_cache(maxsize=1024)
def _read_entry(task: str, config: str, seed: int, index: int) -> tuple[Any, Mapping[str, Any]]:
    dataset = _make_dataset(task, config, seed)
    return dataset, dataset[index]
