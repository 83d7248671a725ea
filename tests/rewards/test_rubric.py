"""Tests of `gleanrl.rewards.rubric.RubricJudge` and of votes, through the reward agent and against a scripted judge."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gleanrl.rewards import Request, RewardAgent
from gleanrl.rewards.compose import Weighted
from gleanrl.rewards.judge import Judge
from gleanrl.rewards.rubric import Criterion, RubricJudge
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from tests.rewards.service import Plan, Service, expected, group_scored
from tests.rewards.worlds import count_rows

TASK = Task("t", ({"role": "user", "content": "What is 2+2?"},), {"answer": "4"})
CRITERIA = [
    {"name": "correct", "text": "The answer is {payload.answer}.", "weight": 3.0},
    {"name": "clear", "text": "It is easy to read.", "choices": ["poor", "fair", "good"]},
    {"name": "polite", "text": "It is polite.", "weight": 0.0},
]
ANSWER = {"correct": "yes", "clear": "fair", "polite": "no"}
Says = Callable[[Mapping[str, Any]], str]


def verdicts(**given: str) -> str:
    return json.dumps({name: {"reasoning": f"it is {verdict}", "verdict": verdict} for name, verdict in given.items()})


def asked_for(body: Mapping[str, Any]) -> list[str]:
    """Return the criteria that a request asks for, as its schema and its text name them."""
    names = list(body["response_format"]["json_schema"]["schema"]["properties"])
    assert re.findall(r"^- (\w+): ", body["messages"][-1]["content"], re.MULTILINE) == names
    return names


def rubric_scores(
    says: Says, *answers: str, plan: Mapping[str, Any] | None = None, cache: int = 100, **options: Any
) -> tuple[list[Score], Service, dict[str, float]]:
    """Score ``answers`` with a rubric, and return the scores, the service that judged them and the agent's metrics."""

    async def main() -> tuple[list[Score], Service, dict[str, float]]:
        async with Service(Plan(says=says, **(plan or {}))) as service:
            judge = RubricJudge(f"{service.url}/v1", "judge-1", **{"criteria": CRITERIA, **options})
            async with RewardAgent(judge, backoff_s=0.01, cache=cache) as agent:
                scores = await asyncio.gather(*(agent.score(TASK, answer) for answer in answers))
                return scores, service, dict(agent.metrics())

    return asyncio.run(main())


@pytest.mark.parametrize(("per_call", "calls"), [(None, 1), (2, 2), (1, 3)])
def test_a_rubric_scores_the_weighted_mean_of_its_criteria_in_any_number_of_calls(
    per_call: int | None, calls: int
) -> None:
    def says(body: Mapping[str, Any]) -> str:
        return verdicts(**{name: ANSWER[name] for name in reversed(asked_for(body))})

    [score], service, _ = rubric_scores(says, "4", per_call=per_call)
    assert score.value == pytest.approx((3 * 1.0 + 1 * 0.5) / 4)
    parts = {name: value for name, value in score.parts.items() if not name.startswith("cost/")}
    assert parts == {"correct": 1.0, "clear": 0.5, "polite": 0.0}
    assert "it is fair" in (score.explanation or "")
    assert len(service.bodies) == calls
    assert len({headers["idempotency-key"] for headers in service.headers}) == calls
    words = sum(len(body["messages"][-1]["content"].split()) for body in service.bodies)
    assert score.parts["cost/prompt_tokens"] == words
    prompts = "\n".join(body["messages"][-1]["content"] for body in service.bodies)
    assert "The answer is 4." in prompts
    assert '"poor", "fair", "good"' in prompts
    for body in service.bodies:
        for entry in body["response_format"]["json_schema"]["schema"]["properties"].values():
            assert list(entry["properties"]) == ["reasoning", "verdict"]  # the verdict follows from the reasoning


@pytest.mark.parametrize(
    "said",
    [
        verdicts(correct="yes", clear="fair"),
        verdicts(correct="yes", clear="fair", polite="no", brief="yes"),
        verdicts(correct="yes", clear="superb", polite="no"),
        json.dumps({**{name: {"reasoning": "", "verdict": v} for name, v in ANSWER.items()}, "clear": "fair"}),
        json.dumps({**{name: {"reasoning": "", "verdict": v} for name, v in ANSWER.items()}, "clear": {"verdict": 1}}),
        verdicts(**ANSWER)[:-2] + ', "clear": {"verdict": "good"}}',
        verdicts(**ANSWER)[: len(verdicts(**ANSWER)) // 2],
        "All is well.",
        "[]",
    ],
)
def test_a_rubric_with_a_missing_or_impossible_verdict_is_asked_again_and_then_has_no_score(said: str) -> None:
    answers = iter([said, verdicts(**ANSWER)])
    [score], service, _ = rubric_scores(lambda body: next(answers), "4")
    assert score.value == pytest.approx(0.875)
    assert len({headers["idempotency-key"] for headers in service.headers}) == 2
    [score], service, metrics = rubric_scores(lambda body: said, "4")
    assert not score.valid
    assert len(service.bodies) == 2
    assert metrics["service/failed/answer"] == 1


def test_verdicts_are_read_whatever_their_case_and_after_a_thought_without_structured_output() -> None:
    said = f"<think>Is it?</think>\n```json\n{verdicts(correct='Yes', clear='GOOD', polite='no')}\n```"
    [score], service, _ = rubric_scores(lambda body: said, "4", structured=False)
    assert score.value == 1.0
    assert "response_format" not in service.bodies[0]


def test_a_judge_may_write_about_the_tags_of_a_thought() -> None:
    reasons = {"correct": "After </think> it says 4.", "clear": "A lone <think> is left.", "polite": "</think>{}"}
    said = json.dumps({name: {"reasoning": why, "verdict": ANSWER[name]} for name, why in reasons.items()})
    for text in (said, f"<think>Is </think> closed?</think>{said}", f"Is it?</think>\n```json\n{said}\n```"):
        [score], service, _ = rubric_scores(lambda body, text=text: text, "<think>2+2</think>4")
        assert score.value == pytest.approx(0.875)
        assert len(service.bodies) == 1


def test_a_criterion_that_fails_after_all_attempts_fails_the_score_and_no_other_trajectory() -> None:
    def says(body: Mapping[str, Any]) -> str:
        (name,) = asked_for(body)
        return "no idea" if name == "clear" and "worth 1" in str(body["messages"]) else verdicts(**{name: ANSWER[name]})

    scores, service, _ = rubric_scores(says, "worth 1", "worth 2", per_call=1)
    assert [score.valid for score in scores] == [False, True]
    assert "no score" in (scores[0].explanation or "")
    assert len(service.bodies) == 2 * 3 + 1


@pytest.mark.parametrize("fault", ["429", "500", "503", "half", "garbage", "drop", "no_score"])
def test_faults_of_the_judge_never_change_a_verdict(fault: str) -> None:
    def says(body: Mapping[str, Any]) -> str:
        content = body["messages"][-1]["content"].partition("<response>")[2]
        (name,) = asked_for(body)
        return verdicts(**{name: CHOICES[name][int(expected(content)) % len(CHOICES[name])]})

    answers = [f"worth {worth}" for worth in range(6)]
    scores, service, _ = rubric_scores(says, *answers, per_call=1, plan={"faults": {fault: 0.5}, "seed": 1})
    for worth, score in enumerate(scores):
        assert score.valid
        assert [score.parts[name] for name in CHOICES] == [worth % 2, worth % 3 / 2, worth % 2]
    assert service.met[fault] > 0


CHOICES = {"correct": ["no", "yes"], "clear": ["poor", "fair", "good"], "polite": ["no", "yes"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"criteria": []}, "at least one"),
        ({"criteria": [{"name": "a", "text": "b", "weight": 0}]}, "weight above 0"),
        ({"criteria": [{"name": "a", "text": "b", "wait": 1}]}, "did you mean 'weight'"),
        ({"criteria": [{"name": "a/b", "text": "b"}]}, "letters"),
        ({"criteria": [{"text": "b"}]}, "letters"),
        ({"criteria": [{"name": "a"}]}, "say what is judged"),
        ({"criteria": [{"name": "a", "text": "{answer}"}]}, "no field {answer}"),
        ({"criteria": [{"name": "a", "text": "b", "weight": -1}]}, "at least 0"),
        ({"criteria": [{"name": "a", "text": "b", "choices": ["yes"]}]}, "two different"),
        ({"criteria": [{"name": "a", "text": "b", "choices": ["no", "yes", "Yes"]}]}, "two different"),
        ({"criteria": [{"name": "a", "text": "b"}, {"name": "a", "text": "c"}]}, "number 2"),
        ({"criteria": 3}, "a list of tables"),
        ({"criteria": "form"}, "a list of tables"),
        ({"criteria": [None]}, "a list of tables"),
        ({"per_call": 0}, "per_call"),
        ({"template": 5}, "give a text"),
        ({"template": "{response}"}, "{criteria}"),
        ({"template": "{criteria} {low}"}, "no field {low}"),
        ({"votes": 0}, "votes = 0"),
        ({"votes": 3}, "temperature"),
        ({"votes": 3, "temperature": 1.0, "combine": "most"}, "combine"),
    ],
)
def test_invalid_options_raise_a_one_line_user_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        RubricJudge(**{"base_url": "http://localhost:1/v1", "model": "m", "criteria": CRITERIA, **options})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_version_of_a_rubric_covers_its_criteria_and_its_votes() -> None:
    options: dict[str, Any] = {"criteria": CRITERIA, "temperature": 1.0}
    others: list[dict[str, Any]] = [
        {},
        {"criteria": [*CRITERIA[:2], {**CRITERIA[2], "text": "It is friendly."}]},
        {"criteria": [*CRITERIA[:2], {**CRITERIA[2], "weight": 1.0}]},
        {"criteria": [*CRITERIA[:2], {**CRITERIA[2], "choices": ["rude", "polite"]}]},
        {"per_call": 1},
        {"votes": 3},
        {"votes": 3, "combine": "majority"},
    ]
    versions = [RubricJudge("http://a", "m", **{**options, **other}).version for other in others]
    assert len(set(versions)) == len(versions)
    same = [Criterion(**{**row, "choices": tuple(row.get("choices", ("no", "yes")))}) for row in CRITERIA]
    assert RubricJudge("http://b", "m", criteria=same, temperature=1.0).version == versions[0]


# --- votes --------------------------------------------------------------------------------------------
def voted(
    given: list[Any], journal: Path | None = None, times: int = 1, weighted: bool = False, **options: Any
) -> tuple[list[Score], Service]:
    """Score one answer with a judge whose calls get the votes ``given`` in this order; return the scores of all times.

    A vote is a number, or a status of HTTP, or a text that is no score.
    """
    left = list(given)

    def answer(path: str, body: Any) -> tuple[int, Any]:
        vote = left.pop(0)
        if isinstance(vote, str):
            return (int(vote), {}) if vote.isdecimal() else (200, {"choices": [{"message": {"content": vote}}]})
        said = json.dumps({"reasoning": "so", "score": vote})
        usage = {"prompt_tokens": 10, "completion_tokens": 2}
        return 200, {"choices": [{"message": {"content": said}}], "usage": usage}

    async def main() -> tuple[list[Score], Service]:
        async with Service(Plan(answer=answer)) as service:
            scores = []
            for _ in range(times):
                judge: Any = Judge(f"{service.url}/v1", "m", temperature=1.0, **options)
                if weighted:
                    judge = Weighted({"judge": judge})
                async with RewardAgent(judge, journal=journal, attempts=3, backoff_s=0.01, max_concurrency=1) as agent:
                    scores += await group_scored(agent, [(TASK, "4")])
            return scores, service

    return asyncio.run(main())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("combine", "votes", "value", "disagreement"),
    [
        ("median", [2, 8, 9], 0.8, (0.6 + 0.0 + 0.1) / 3),
        ("mean", [2, 8, 8], 0.6, (0.4 + 0.2 + 0.2) / 3),
        ("majority", [2, 8, 8], 0.8, 1 / 3),
        ("majority", [2, 8, 9], 0.8, 2 / 3),
        ("median", [5, 5, 5], 0.5, 0.0),
    ],
)
def test_votes_are_combined_and_their_disagreement_is_a_part(
    combine: Any, votes: list[float], value: float, disagreement: float, weighted: bool
) -> None:
    [score], service = voted(votes, votes=3, combine=combine, weighted=weighted)
    name = "judge/" if weighted else ""
    assert score.value == pytest.approx(value)
    assert score.parts[f"{name}judge"] == pytest.approx(10 * value)
    assert score.parts[f"{name}vote/disagreement"] == pytest.approx(disagreement)
    assert score.parts[f"{name}vote/failed"] == 0
    assert score.parts["cost/prompt_tokens"] == 30
    assert len({headers["idempotency-key"] for headers in service.headers}) == 3


@pytest.mark.parametrize("weighted", [False, True])
def test_a_failed_vote_is_tolerated_while_a_majority_remains(weighted: bool) -> None:
    """A vote fails for good on a second answer that cannot be read, or on a refusal."""
    [score], _ = voted([4, "what?", "500", 6, "what?"], votes=3, weighted=weighted)
    assert score.value == pytest.approx(0.5)
    assert score.parts["judge/vote/failed" if weighted else "vote/failed"] == 1
    [score], _ = voted(["400", "400", 6], votes=3, weighted=weighted)
    assert not score.valid
    [score], _ = voted([4, "400"], votes=2, weighted=weighted)
    assert not score.valid  # one of two is no majority


@pytest.mark.parametrize("weighted", [False, True])
def test_every_vote_has_its_own_row_in_the_journal_so_that_only_failed_ones_are_repeated(
    tmp_path: Path, weighted: bool
) -> None:
    journal = tmp_path / "rewards.sqlite"
    [first, second], service = voted(["400", "400", 6, 7, 8], journal, 2, votes=3, weighted=weighted)
    assert not first.valid
    assert second.value == pytest.approx(0.7)
    assert len(service.bodies) == 5
    assert count_rows(journal) == 3 + weighted  # the sum has a row too
    [again], service = voted([], journal, votes=3, weighted=weighted)
    assert again.value == second.value
    assert not service.bodies


def test_votes_on_a_rubric_are_combined_for_each_criterion() -> None:
    answers = {
        "correct": iter(["yes", "no", "yes"]),
        "clear": iter(["poor", "good", "fair"]),
        "polite": iter(["no", "no", "no"]),
    }

    def says(body: Mapping[str, Any]) -> str:
        return verdicts(**{name: next(answers[name]) for name in asked_for(body)})

    [score], service, _ = rubric_scores(says, "4", per_call=2, votes=3, temperature=1.0)
    assert len(service.bodies) == 6
    assert [score.parts[name] for name in ("correct", "clear", "polite")] == [1.0, 0.5, 0.0]
    assert score.value == pytest.approx(0.875)
    assert score.parts["vote/disagreement"] == pytest.approx((1 / 3 + 1 / 3 + 0) / 3)


def test_an_undivided_call_of_a_judge_asks_once() -> None:
    """A judge that is called without an agent makes the whole request as one vote."""

    async def main() -> None:
        async with Service(Plan(says=lambda body: verdicts(**ANSWER))) as service:
            judge = RubricJudge(f"{service.url}/v1", "m", criteria=CRITERIA, per_call=1, votes=3, temperature=1.0)
            score = await judge(Request(TASK, ({"role": "assistant", "content": "4"},)))
            assert score.value == pytest.approx(0.875)
            assert len(service.bodies) == 1
            await judge.aclose()

    asyncio.run(main())
