"""`ReasoningGymTaskset` with problems of the package reasoning-gym: splits, ids, answers and scores."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.environments import splits
from gleanrl.environments.adapters.reasoning_gym import ReasoningGymTaskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import Split, Taskset
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from tests.strategies import examples

pytest.importorskip("reasoning_gym")

SPLITS: tuple[Split, ...] = ("train", "eval", "warm_start")


def spelling(**options: Any) -> ReasoningGymTaskset:
    return ReasoningGymTaskset(task="spell_backward", config={"max_word_len": 7}, **options)


def scores_of_answers(taskset: Taskset, task: Task, *texts: str, workers: int = 0) -> list[Score]:
    """Play one episode per text, with the text as the only message, and return the scores."""

    async def run() -> list[Score]:
        scores = []
        async with EnvironmentPool(taskset, workers=workers) as pool:
            for text in texts:
                environment = pool.environment(task)
                first = await environment.reset()
                # The first observation has no message, because the question is the prompt of the task.
                assert (first.messages, first.done) == ((), False)
                assert first.score is not None
                assert first.score.value == 0.0
                last = await environment.step({"role": "assistant", "content": text})
                assert last.done
                assert last.score is not None
                scores.append(last.score)
        return scores

    return asyncio.run(run())


def question(task: Task) -> str:
    return task.prompt[0]["content"]


@settings(max_examples=examples(10))
@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_splits_share_no_problem_under_any_two_seeds(one: int, two: int) -> None:
    questions = {split: {question(t) for t in spelling(seed=one).tasks(split, 40)} for split in SPLITS}
    others = {split: {question(t) for t in spelling(seed=two).tasks(split, 40)} for split in SPLITS}
    for split in SPLITS:
        assert len(questions[split]) == 40
        for other in SPLITS:
            if other != split:
                assert not questions[split] & questions[other]
                assert not questions[split] & others[other]


def test_tasks_are_deterministic_and_a_longer_list_extends_a_shorter_one() -> None:
    tasks = spelling(seed=3).tasks("train", 20)
    assert list(spelling(seed=3).tasks("train", 50)[:20]) == list(tasks)
    assert spelling(seed=4).tasks("train", 20)[0].id != tasks[0].id
    by_id = {t.id: question(t) for t in [*tasks, *spelling(seed=4).tasks("train", 300)]}
    # One id means one problem, also in a taskset with another seed.
    assert all(by_id[t.id] == question(t) for t in tasks)
    assert Task(**json.loads(json.dumps({"id": tasks[0].id, "payload": tasks[0].payload}))).payload == tasks[0].payload


def test_the_payload_has_the_answer_option_only_if_it_is_not_the_default() -> None:
    usual, whole = (spelling(answer=answer, instruction="").tasks("train", 1)[0] for answer in ("tags", "whole"))
    assert (usual.id, usual.prompt) == (whole.id, whole.prompt)
    assert usual.payload.keys() == {"task", "config", "seed", "index"}
    assert whole.payload == {**usual.payload, "answer": "whole"}


@pytest.mark.parametrize("workers", [0, 1])
def test_answers_are_scored_by_reasoning_gym(workers: int) -> None:
    taskset = spelling()
    task = taskset.tasks("train", 1)[0]
    conversation, score = taskset.demonstrate(task, seed=0)
    oracle = conversation[-1]["content"]
    assert taskset.has_expert
    assert (conversation[0], score.value) == (task.prompt[0], 1.0)
    word = oracle.removeprefix("<answer>").removesuffix("</answer>")
    right, bare = scores_of_answers(taskset, task, f"Let me think. {oracle} is it.", word, workers=workers)
    assert (right.value, right.parts) == (1.0, {"answered": 1.0})
    assert (bare.value, bare.parts) == (0.0, {"answered": 0.0})
    whole = ReasoningGymTaskset(task="spell_backward", config={"max_word_len": 7}, answer="whole")
    right, wrong = scores_of_answers(whole, task, f" {word}\n", "x" + word)
    assert right.value == 1.0
    assert wrong.value < 1.0


@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "countdown", "maze", "basic_arithmetic"])
def test_the_reference_answer_of_every_kind_of_task_scores_one(name: str) -> None:
    taskset = ReasoningGymTaskset(task=name)
    for split in SPLITS:
        for task in taskset.tasks(split, 3):
            conversation, score = taskset.demonstrate(task, seed=0)
            assert score.value == 1.0
            assert scores_of_answers(taskset, task, conversation[-1]["content"])[0].value == 1.0


@pytest.mark.parametrize("answer", ["tags", "whole"])
def test_text_in_think_tags_is_not_scored_as_the_answer(answer: Any) -> None:
    taskset = ReasoningGymTaskset(task="basic_arithmetic", answer=answer)
    (task,) = taskset.tasks("train", 1)
    (*_, message), _ = taskset.demonstrate(task, seed=0)
    right = message["content"]

    async def worth(content: str) -> float | None:
        environment = taskset.environment(task)
        await environment.reset()
        score = (await environment.step({"role": "assistant", "content": content})).score
        return score and score.value

    for content, value in ((right, 1.0), (f"<think>or 7</think>\n{right}", 1.0), (f"<think>or {right}", 0.0)):
        assert asyncio.run(worth(content)) == value, content


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"task": "spel_backward"}, "no task 'spel_backward'; did you mean 'spell_backward'?"),
        ({"task": "spell_backward", "config": {"max_word_length": 3}}, "no such option; did you mean 'max_word_len'?"),
        ({"task": "spell_backward", "config": {"seed": 3}}, "config.seed: 'spell_backward' has no such option"),
        ({"task": "spell_backward", "config": {"min_word_len": -3}}, "min_word_len must be positive"),
        ({"task": "spell_backward", "config": {"min_word_len": "six"}}, "'spell_backward' refuses"),
    ],
)
def test_bad_options_raise_a_one_line_error(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        ReasoningGymTaskset(**options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_asking_for_more_problems_than_exist_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "_PATIENCE", 60)
    few = ReasoningGymTaskset(task="spell_backward", config={"min_word_len": 3, "max_word_len": 3})
    with pytest.raises(UserError, match=r"different problems for 'eval', of 100000 asked for; lower environment.eval"):
        few.tasks("eval", 100_000)


def test_demonstrating_a_task_without_a_reference_answer_raises() -> None:
    taskset = ReasoningGymTaskset(task="propositional_logic")
    with pytest.raises(UserError, match=r"no reference answers: set warm_start\.enabled = false"):
        taskset.demonstrate(taskset.tasks("train", 1)[0], seed=0)
