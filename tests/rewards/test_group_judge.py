"""Tests of `gleanrl.rewards.group_judge.GroupJudge`, through the reward agent and against a scripted judge."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.rewards import NotApplicable, Request, RewardAgent
from gleanrl.rewards.compose import Weighted
from gleanrl.rewards.group_judge import GroupJudge
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from tests.rewards.service import Plan, Service, expected
from tests.rewards.worlds import count_rows, make_trajectory

TASK = Task("t", ({"role": "user", "content": "What is 2+2?"},), {"answer": "4"})


def shown(prompt: str) -> dict[str, str]:
    """Return what a judge sees of each member, by its name, in the order in which it is shown."""
    found = re.findall(r"<attempt-(\w+)>\n(.*?)\n</attempt-\1>", prompt, re.DOTALL)
    assert len(dict(found)) == len(found)
    return dict(found)


def answered(prompt: str, order: Callable[[list[str]], Sequence[str]] = list, kind: str = "scores") -> dict[str, Any]:
    """Return the answer of a judge that goes by the number after "worth", and names the members in this order."""
    members = shown(prompt)
    names = order(list(members))
    reasoning = {name: f"it is {members[name]}" for name in names}
    if kind == "ranking":
        return {"reasoning": reasoning, "ranking": sorted(members, key=lambda name: -expected(members[name]))}
    return {"reasoning": reasoning, "scores": {name: expected(members[name]) for name in names}}


def judged(
    groups: Sequence[Sequence[str]],
    says: Callable[[Mapping[str, Any]], str] | None = None,
    *,
    plan: Mapping[str, Any] | None = None,
    journal: Path | None = None,
    **options: Any,
) -> tuple[list[list[Score]], Service, dict[str, float]]:
    """Score groups of answers with a group judge, and return the scores, the service and the agent's metrics."""
    kind = options.get("answer", "scores")

    def by_worth(body: Mapping[str, Any]) -> str:
        return json.dumps(answered(body["messages"][-1]["content"], kind=kind))

    async def main() -> tuple[list[list[Score]], Service, dict[str, float]]:
        async with Service(Plan(says=says or by_worth, **(plan or {}))) as service:
            judge = GroupJudge(f"{service.url}/v1", "judge-1", **options)
            async with RewardAgent(judge, backoff_s=0.01, journal=journal) as agent:
                scores: list[list[Score]] = [[] for _ in groups]
                async for index, found in agent.score_groups([[(TASK, text) for text in group] for group in groups]):
                    scores[index] = found
                return scores, service, dict(agent.metrics())

    return asyncio.run(main())


# --- labels and members -------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 10), min_size=1, max_size=40), st.randoms(use_true_random=False), st.integers(0, 3))
def test_every_score_goes_back_to_its_member_whatever_the_order(worths: list[int], random: Any, vote: int) -> None:
    judge = GroupJudge("http://localhost:1/v1", "m", seed=3)
    rows = tuple(Request(TASK, (*TASK.prompt, {"role": "assistant", "content": f"worth {w}"})) for w in worths)
    question = judge.question(Request(TASK, (), group=rows, part=f"0.{vote}"))
    answer = answered(question.prompt, lambda names: random.sample(names, len(names)))
    verdicts, explanation = question.read(json.dumps(answer))
    assert verdicts == {str(index): worth / 10 for index, worth in enumerate(worths)}
    for line, worth in zip(explanation.splitlines(), worths, strict=True):
        assert line.endswith(f"worth {worth}")

    names = list(answer["scores"])
    wrong: list[dict[str, float]] = [
        {name: answer["scores"][name] for name in names[1:]},
        {**answer["scores"], "Z9": 3},
        {**{name: answer["scores"][name] for name in names[1:]}, "Z9": 3},
        {**answer["scores"], names[0]: 11},
    ]
    for scores in wrong:
        with pytest.raises(ValueError):  # noqa: PT011
            question.read(json.dumps({"reasoning": {}, "scores": scores}))
    doubled = json.dumps({"scores": answer["scores"]})[:-2] + f', "{names[0]}": 4}}}}'
    with pytest.raises(ValueError, match="twice"):
        question.read(doubled)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_a_ranking_gives_evenly_spaced_scores_and_equal_members_equal_ones(worths: list[int], random: Any) -> None:
    judge = GroupJudge("http://localhost:1/v1", "m", answer="ranking")
    rows = tuple(Request(TASK, (*TASK.prompt, {"role": "assistant", "content": f"worth {w}"})) for w in worths)
    request = Request(TASK, (), group=rows)
    places = sorted(set(worths))
    if len(places) == 1:
        with pytest.raises(NotApplicable):
            judge.question(request)
        return
    question = judge.question(request)
    ranking = answered(question.prompt, kind="ranking")["ranking"]
    verdicts, _ = question.read(json.dumps({"ranking": ranking}))
    assert list(verdicts.values()) == pytest.approx([places.index(worth) / (len(places) - 1) for worth in worths])
    places_by_name = {name: place for place, name in enumerate(ranking, 1)}
    in_order_of_names = dict(sorted(places_by_name.items()))  # its order is not the ranking
    for wrong in (
        *(ranking[1:], [*ranking, ranking[0]], [*ranking[1:], ranking[1]], [*ranking[1:], "Z9"]),
        *(in_order_of_names, "".join(ranking)),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            question.read(json.dumps({"ranking": wrong}))


def test_the_order_depends_on_the_seed_and_the_vote_and_not_on_the_order_of_the_members() -> None:
    def order(seed: int, part: str, texts: Sequence[str]) -> list[str]:
        rows = tuple(Request(TASK, ({"role": "assistant", "content": text},)) for text in texts)
        judge = GroupJudge("http://localhost:1/v1", "m", seed=seed)
        return list(shown(judge.question(Request(TASK, (), group=rows, part=part)).prompt).values())

    texts = [f"worth {n}" for n in range(8)]
    assert order(0, "", texts) == order(0, "", texts[::-1])
    assert sorted(order(0, "", texts)) == sorted(order(1, "", texts))
    orders = {tuple(order(seed, part, texts)) for seed in (0, 1) for part in ("0.0", "0.1")}
    assert len(orders) == 4
    first = [order(seed, "", texts)[0] for seed in range(200)]
    assert {first.count(text) > 5 for text in set(first)} == {True}  # every member is shown first now and then
    assert len(set(first)) == 8


# --- through the agent --------------------------------------------------------------------------------
@pytest.mark.parametrize("answer", ["scores", "ranking"])
def test_a_group_is_judged_in_one_call_and_members_keep_their_reasons(answer: Any, tmp_path: Path) -> None:
    groups = [["worth 3", "worth 9", "worth 3", "worth 0"], ["worth 10", "worth 5"]]
    values = {"scores": [[0.3, 0.9, 0.3, 0.0], [1.0, 0.5]], "ranking": [[0.5, 1.0, 0.5, 0.0], [1.0, 0.0]]}[answer]
    journal = tmp_path / "rewards.sqlite"
    scores, service, metrics = judged(groups, answer=answer, journal=journal)
    assert [[score.value for score in group] for group in scores] == [pytest.approx(group) for group in values]
    for group, texts in zip(scores, groups, strict=True):
        for score, text in zip(group, texts, strict=True):
            assert (score.explanation or "").endswith(text)
    assert len(service.bodies) == 2
    assert len(service.bodies[0]["messages"][-1]["content"].split("What is 2+2?")) == 2  # the task is shown once
    assert metrics["service/scored"] == 2
    assert count_rows(journal) == 2
    again, service, _ = judged(groups, answer=answer, journal=journal)
    assert again == scores
    assert not service.bodies


def test_a_member_that_failed_is_not_shown_and_the_others_are_judged() -> None:
    async def main() -> None:
        async with (
            Service(Plan(says=says_well)) as service,
            RewardAgent(GroupJudge(f"{service.url}/v1", "m")) as agent,
        ):
            played = [make_trajectory(TASK, f"worth {worth}", identity=str(worth)) for worth in (4, 8)]
            played = [replace(trajectory, info={"group_uid": "g", "group_size": 3}) for trajectory in played]
            scores = [await agent.score(TASK, trajectory) for trajectory in played]
            assert not service.bodies  # the group is judged when it is complete
            finished = await agent.finish(TASK, [scores[0], Score.failed("the environment died"), scores[1]])
            assert [finished[0].value, finished[2].value] == pytest.approx([0.4, 0.8])
            assert finished[1].explanation == "the environment died"
            assert len(service.bodies) == 1

    asyncio.run(main())


def faulty(kind: str, prompt: str) -> str:
    """Return the text of a judge that makes a mistake about the members."""
    answer = answered(prompt)
    names = list(answer["scores"])
    if kind == "missing":
        del answer["scores"][names[0]]
    elif kind == "unknown":
        answer["scores"]["Q7"] = 5
    elif kind == "renamed":
        answer["scores"]["Q7"] = answer["scores"].pop(names[0])
    elif kind == "by place":
        answer["scores"] = list(answer["scores"].values())
    elif kind == "no number":
        answer["scores"][names[0]] = "ten"
    elif kind == "outside":
        answer["scores"][names[0]] = 10.5
    text = json.dumps(answer)
    if kind == "doubled":
        text = text[:-2] + f', "{names[0]}": 10}}}}'
    return text[: len(text) // 2] if kind == "half" else text


FAULTS = ["missing", "unknown", "renamed", "by place", "no number", "outside", "doubled", "half"]


@pytest.mark.parametrize("kind", FAULTS)
def test_an_answer_with_wrong_members_is_repeated_once_and_then_fails_its_whole_group_only(kind: str) -> None:
    groups = [["worth 3", "worth 9", "worth 1"], ["worth 10", "worth 5", "worth 7"]]

    def says(body: Mapping[str, Any]) -> str:
        prompt = body["messages"][-1]["content"]
        return faulty(kind, prompt) if "worth 9" in prompt else json.dumps(answered(prompt))

    [bad, good], service, metrics = judged(groups, says)
    assert [score.valid for score in bad] == [False] * 3
    assert [score.value for score in good] == pytest.approx([1.0, 0.5, 0.7])
    assert len(service.bodies) == 3
    assert metrics["service/failed/answer"] == 1

    first = iter([True])
    [scores], service, _ = judged(groups[:1], lambda body: says(body) if next(first, False) else says_well(body))
    assert [score.value for score in scores] == pytest.approx([0.3, 0.9, 0.1])
    assert len({headers["idempotency-key"] for headers in service.headers}) == 2


def says_well(body: Mapping[str, Any]) -> str:
    return json.dumps(answered(body["messages"][-1]["content"], lambda names: names[::-1]))


@pytest.mark.parametrize("fault", ["429", "500", "503", "half", "garbage", "drop", "no_score"])
def test_faults_of_the_service_are_retried_and_move_no_score(fault: str) -> None:
    groups = [[f"worth {n * 7 % 10}.{m}" for n in range(4)] for m in range(8)]
    scores, service, _ = judged(groups, says_well, plan={"faults": {fault: 0.5}, "seed": 2})
    assert [[score.value * 10 for score in group] for group in scores] == [
        pytest.approx([expected(text) for text in texts]) for texts in groups
    ]
    assert service.met[fault] > 0


def test_a_refusal_fails_the_group_at_once() -> None:
    refusal = {"choices": [{"message": {"content": None, "refusal": "I do not compare."}}]}
    [scores], service, metrics = judged([["worth 3", "worth 9"]], plan={"answer": lambda path, body: (200, refusal)})
    assert [score.valid for score in scores] == [False, False]
    assert len(service.bodies) == 1
    assert metrics["service/failed/judge_refused"] == 1


def test_votes_show_the_group_in_different_orders_and_disagreement_is_a_part_of_every_member() -> None:
    """This judge likes whatever it sees first."""

    def says(body: Mapping[str, Any]) -> str:
        members = list(shown(body["messages"][-1]["content"]))
        return json.dumps({"reasoning": {}, "scores": {name: 10 - 10 * (name == "A") for name in members}})

    [scores], service, _ = judged([["one", "two"]], says, votes=8, combine="mean")
    assert len(service.bodies) == 8
    first = sum(next(iter(shown(body["messages"][-1]["content"]).values())).endswith("one") for body in service.bodies)
    assert 0 < first < 8
    assert [score.value for score in scores] == pytest.approx([1 - first / 8, first / 8])
    spread = 2 * first / 8 * (1 - first / 8)
    assert [score.parts["vote/disagreement"] for score in scores] == pytest.approx([spread, spread])
    assert [score.parts["vote/failed"] for score in scores] == [0, 0]


def test_a_vote_that_failed_is_counted_in_the_parts_of_every_member() -> None:
    refusal = {"choices": [{"message": {"content": None, "refusal": "I do not compare."}}]}
    left = [(200, refusal)]

    def answer(path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        said = json.dumps(answered(body["messages"][-1]["content"]))
        return left.pop() if left else (200, {"choices": [{"message": {"content": said}}]})

    [scores], service, _ = judged([["worth 3", "worth 9", "worth 9"]], plan={"answer": answer}, votes=3)
    assert len(service.bodies) == 3
    assert [score.value for score in scores] == pytest.approx([0.3, 0.9, 0.9])
    assert [score.parts["vote/failed"] for score in scores] == [1, 1, 1]


def test_a_judge_that_quotes_the_tags_of_a_thought_in_its_reasoning_scores_the_group() -> None:
    for thought in ("", "<think>A says </think>{} and B nothing.</think>\n"):

        def says(body: Mapping[str, Any], thought: str = thought) -> str:
            return thought + json.dumps(answered(body["messages"][-1]["content"]))  # quotes each member

        [scores], service, _ = judged([["<think>so</think>worth 3", "worth 9</think>", "<think>worth 4"]], says)
        assert len(service.bodies) == 1
        assert [score.value for score in scores] == pytest.approx([0.3, 0.9, 0.4])


def test_a_trajectory_outside_of_a_group_is_judged_alone() -> None:
    async def main() -> None:
        async with Service(Plan(says=says_well)) as service:
            async with RewardAgent(GroupJudge(f"{service.url}/v1", "m")) as agent:
                score = await agent.lane("eval").score(TASK, "worth 7")
                assert score.value == pytest.approx(0.7)
                assert score.parts["judge"] == pytest.approx(0.7)
            async with RewardAgent(GroupJudge(f"{service.url}/v1", "m", answer="ranking")) as agent:
                score = await agent.score(TASK, "worth 7")
                assert (score.valid, score.applicable) == (False, False)
            assert len(service.bodies) == 1

    asyncio.run(main())


def test_a_part_of_a_weighted_sum_cannot_compare_members() -> None:
    with pytest.raises(UserError, match="compares the members"):
        Weighted({"judge": GroupJudge("http://localhost:1/v1", "m")})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"answer": "rank"}, "scores or ranking"),
        ({"template": "{task}"}, "{members}"),
        ({"template": "{members} {response}"}, "no field {response}"),
        ({"member": "{task}"}, "neither"),
        ({"member": "{members}"}, "member: no field"),
        ({"scale": [1, 0]}, "lowest"),
    ],
)
def test_invalid_options_raise_a_one_line_user_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        GroupJudge(**{"base_url": "http://localhost:1/v1", "model": "m", **options})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_the_judge_sees_of_members_and_task() -> None:
    played = (*TASK.prompt, {"role": "assistant", "content": "Hm."}, {"role": "user", "content": "So?"})
    rows = tuple(Request(TASK, (*played, {"role": "assistant", "content": text})) for text in ("4", "5"))
    judge = GroupJudge("http://localhost:1/v1", "m", member="{response} of {task} {payload.answer}")
    texts = shown(judge.question(Request(TASK, (), group=rows)).prompt).values()
    assert sorted(texts) == ["4 of What is 2+2? 4", "5 of What is 2+2? 4"]
    judge = GroupJudge("http://localhost:1/v1", "m")
    texts = shown(judge.question(Request(TASK, (), group=rows)).prompt).values()
    assert sorted(texts)[0] == "[assistant]\nHm.\n\n[user]\nSo?\n\n[assistant]\n4"
    bare = tuple(Request(Task("t"), row.messages) for row in rows)
    assert sorted(shown(judge.question(Request(Task("t"), (), group=bare)).prompt).values()) == sorted(texts)
