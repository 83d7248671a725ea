"""Mixtures of environments: shares of the parts, ids of tasks, and episodes and demonstrations of each part."""

from __future__ import annotations

import asyncio
import pickle
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gleanrl.config.settings import Config, EnvironmentSettings
from gleanrl.curriculum.orders import make_curriculum, source_of
from gleanrl.environments import load_taskset
from gleanrl.learners.tiny import build_tokenizer, texts_of
from gleanrl.protocols import Taskset
from gleanrl.runtime.prepare import demonstrate, supervised_examples
from gleanrl.tracking.monitors import Console
from gleanrl.types import Task
from gleanrl.utils.errors import NoExpert, UserError

PARITY = f"{Path(__file__).parents[1] / 'cli' / 'parity.py'}:Parity"
WORDS = {"name": "reasoning_gym", "label": "words", "options": {"task": "spell_backward", "level": 0}}
LONGER = {"name": "reasoning_gym", "label": "longer", "options": {"task": "spell_backward", "level": 1}}
SUMS = {"name": "reasoning_gym", "label": "sums", "options": {"task": "basic_arithmetic"}, "weight": 3.0}


def mixture(*parts: dict[str, Any], seed: int = 0) -> Taskset:
    return load_taskset(EnvironmentSettings(name="mixture", options={"parts": list(parts)}), seed)


def test_each_split_has_tasks_of_the_parts_by_weight_without_repeated_ids() -> None:
    made = mixture(WORDS, SUMS)
    seen: set[str] = set()
    for split, count in (("train", 40), ("eval", 12), ("warm_start", 8)):
        tasks = made.tasks(split, count)
        assert Counter(task.kind for task in tasks) == {
            "words/spell_backward": count // 4,
            "sums/basic_arithmetic": count - count // 4,
        }
        ids = {task.id for task in tasks}
        assert len(ids) == count
        assert not ids & seen
        seen |= ids
    assert made.tasks("train", 40) == mixture(WORDS, SUMS).tasks("train", 40)
    assert made.tasks("train", 10) == made.tasks("train", 40)[:10]


def test_a_problem_of_two_parts_is_given_to_the_first_and_replaced_in_the_second() -> None:
    tasks = mixture(WORDS, LONGER).tasks("train", 120)
    assert Counter(task.payload["mixture"] for task in tasks) == {"words": 60, "longer": 60}
    assert len({task.id for task in tasks}) == 120
    alone = {
        label: load_taskset(EnvironmentSettings(name="reasoning_gym", options=part["options"]), 0)
        for label, part in (("words", WORDS), ("longer", LONGER))
    }
    assert {t.id for t in alone["words"].tasks("train", 300)} & {t.id for t in alone["longer"].tasks("train", 300)}


def test_two_parts_with_different_prompts_under_one_id_are_rejected() -> None:
    other = {**WORDS, "label": "whole", "options": {**WORDS["options"], "answer": "whole"}}
    with pytest.raises(UserError, match="one id means one problem"):
        mixture(WORDS, other).tasks("train", 400)


def test_a_pickled_mixture_plays_and_demonstrates_the_tasks_of_its_parts() -> None:
    made = pickle.loads(pickle.dumps(mixture(WORDS, SUMS)))
    assert made.has_expert
    for task in made.tasks("train", 8):
        said, score = made.demonstrate(task, seed=0)
        assert score.value == 1.0

        async def play(task: Any = task, said: Any = said) -> float:
            environment = made.environment(task)
            await environment.reset()
            observation = await environment.step(said[-1])
            assert observation.score is not None
            return observation.score.value

        assert asyncio.run(play()) == 1.0


def test_a_part_has_at_most_its_task_limit_and_other_parts_supply_the_rest() -> None:
    few = {**SUMS, "train_tasks": 2, "eval_tasks": 0}
    made = mixture(WORDS, few)
    assert Counter(t.payload["mixture"] for t in made.tasks("train", 10)) == {"sums": 2, "words": 8}
    assert Counter(t.payload["mixture"] for t in made.tasks("eval", 5)) == {"words": 5}
    with pytest.raises(UserError, match=r"2 train tasks, 3 were asked for; lower environment\.train_tasks"):
        mixture(few).tasks("train", 3)


def test_only_parts_with_an_expert_supply_warm_start_tasks() -> None:
    silent = {"name": "tests.environments.test_mixture:Silent"}
    assert not mixture(silent).has_expert
    made = mixture({**silent, "label": "silent"}, WORDS)
    assert made.has_expert
    assert {t.payload["mixture"] for t in made.tasks("warm_start", 6)} == {"words"}
    task = next(t for t in made.tasks("train", 2) if t.payload["mixture"] == "silent")
    with pytest.raises(NoExpert, match="part 'silent'"):
        made.demonstrate(task, seed=0)


def test_demonstrations_have_tools_only_if_their_part_has_tools(tmp_path: Path) -> None:
    factory = Path(__file__).parents[2] / "examples" / "calculator.py"
    tools = {"name": "tools", "label": "sums", "options": {"environment_factory": f"{factory}:Calculator"}}
    config = Config.model_validate(
        {
            "environment": {"name": "mixture", "options": {"parts": [WORDS, tools]}, "warm_start_tasks": 8},
            "warm_start": {"demonstrations": 8},
        }
    )
    made = load_taskset(config.environment, 0)
    demonstrations = demonstrate(config, made, Console())
    conversations = [conversation for shown in demonstrations for conversation in shown.conversations]
    for messages, tools in conversations:
        assert any(message.get("tool_calls") for message in messages) == bool(tools)
    tokenizer = build_tokenizer([text for messages, tools in conversations for text in texts_of(messages, tools)], 512)
    assert len(supervised_examples(config, tokenizer, demonstrations)) == 8


def test_each_part_prepares_its_own_tasks_and_progress_counts_all_tasks() -> None:
    made = mixture({"name": "tests.environments.test_mixture:Prepared", "label": "slow"}, WORDS)
    told: list[tuple[int, int]] = []
    made.prepare(made.tasks("train", 6), progress=lambda done, total: told.append((done, total)))
    assert told == [(n, 6) for n in range(1, 7)]
    assert Prepared.seen == ["p-0", "p-1", "p-2"]


class Silent(Taskset):
    """A taskset without an expert."""

    def tasks(self, split: str, count: int) -> list[Any]:
        return [Task(f"{split}-{index}") for index in range(count)]

    def environment(self, task: Any) -> Any:
        raise NotImplementedError


class Prepared(Silent):
    """A taskset that records the tasks that it prepares."""

    # An attribute of the class, because the mixture makes the object.
    seen: list[str] = []  # noqa: RUF012

    def tasks(self, split: str, count: int) -> list[Any]:
        return [Task(f"p-{index}") for index in range(count)]

    def prepare(self, tasks: Any, *, workers: int = 1, progress: Any = None) -> None:
        for done, task in enumerate(tasks, 1):
            Prepared.seen.append(task.id)
            progress(done, len(tasks))


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ([], "at least one part"),
        ([WORDS, {**WORDS}], "two parts are called 'words'"),
        ([{**WORDS, "label": "a/b"}], "without a slash"),
        ([{**WORDS, "weigth": 2}], r"parts|0\.weigth"),
        ([{**WORDS, "weight": 0}], "greater than 0"),
        ([{"name": "reasoning_gim"}], "did you mean 'reasoning_gym'"),
        ([{**WORDS, "options": {"task": "spell_backward", "level": 9}}], "has levels 0 to 4"),
        ([{**WORDS, "options": {"task": "spell_backwards", "level": 0}}], "did you mean 'spell_backward'"),
    ],
)
def test_a_bad_part_raises_a_user_error(parts: list[dict[str, Any]], line: str) -> None:
    with pytest.raises(UserError, match=line):
        mixture(*parts)


def test_a_mixture_can_be_a_part() -> None:
    inner = {"name": "mixture", "label": "inner", "options": {"parts": [WORDS, SUMS]}}
    made = mixture({**LONGER, "label": "outer"}, inner)
    tasks = made.tasks("train", 12)
    assert {task.kind.partition("/")[0] for task in tasks} == {"outer", "inner"}
    assert {task.kind.split("/")[1] for task in tasks if task.kind.startswith("inner")} == {"words", "sums"}
    for task in tasks:
        opening = asyncio.run(made.environment(task).reset())
        assert not opening.done


class Few(Silent):
    """Has five tasks of each split, however many are asked for."""

    def tasks(self, split: str, count: int) -> list[Task]:
        return [Task(f"{split}-{n}") for n in range(min(count, 5))]


def test_a_part_with_fewer_tasks_than_its_share_is_named() -> None:
    few = {"name": f"{__name__}:Few", "label": "few"}
    with pytest.raises(UserError, match=r"'few' has 5 train tasks .* 10 are its share; lower environment\.train_tasks"):
        mixture(WORDS, few).tasks("train", 20)


def test_a_task_of_another_mixture_is_rejected() -> None:
    made, other = mixture(WORDS), mixture(SUMS)
    with pytest.raises(UserError, match="of no part of this mixture"):
        other.environment(made.tasks("train", 1)[0])


def test_the_configurations_of_the_mixtures_page_make_tasks_and_curricula() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "mixtures.md").read_text()
    for text in re.findall(r"```toml[^\n]*\n(.*?)```", page, re.DOTALL):
        config = Config.model_validate(tomllib.loads(text))
        made = load_taskset(config.environment, 0)
        assert made.weights
        tasks = made.tasks("train", 30)
        order = make_curriculum(config.tasks, tasks, made.weights, group=2, seed=0, greedy=False)
        proposed = asyncio.run(order.propose(6))
        kinds = Counter(source_of(spec.task) for spec in proposed)
        assert kinds == ({"short": 6} if "levels" in text else {"words": 4, "sums": 2})
