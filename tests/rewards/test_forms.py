"""Tests of `gleanrl.rewards.adapter.load_reward`: functions, classes, objects, import paths and the reward functions
of verl and TRL all become scorers, and a return value that is no finite number is a failure, never a score of 0."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gleanrl.rewards import Fatal, NotApplicable, Request, RewardAgent
from gleanrl.rewards.adapter import load_reward, trl, verl
from gleanrl.rewards.compose import Weighted
from gleanrl.simulate import virtual_time
from gleanrl.train import score_trajectory
from gleanrl.types import Message, Score, Task, Trajectory
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from tests.rewards import graders
from tests.rewards.worlds import make_task, make_trajectory

HERE = "tests.rewards.graders"


def request(answer: str = "four", /, **payload: Any) -> Request:
    task = make_task(**payload)
    return Request.of(task, make_trajectory(task, answer, own=Score(0.25)))


def score(reward: Any, asked: Request | None = None, **options: Any) -> Score:
    async def main() -> Score:
        scorer = load_reward(reward, **options)
        try:
            return await scorer(asked or request())
        finally:
            await scorer.aclose()  # type: ignore[attr-defined]

    return virtual_time.run(main())


# --- rewards in the form of gleanrl -------------------------------------------------------------------
@pytest.mark.parametrize(
    "reward",
    [
        f"{HERE}:length",
        f"{HERE}:length_async",
        f"{HERE}:Scaled",
        str(Path(graders.__file__)) + ":length",
        graders.length,
        graders.length_async,
        graders.Scaled,
        graders.Scaled(),
        lambda request: Score(4.0),
        lambda request: graders.length_async(request),
    ],
    # default ids would contain object addresses, which differ between parallel test workers
    ids=["path", "async path", "class path", "file", "function", "async", "class", "object", "lambda", "awaitable"],
)
def test_functions_classes_objects_and_import_paths_are_accepted_as_rewards(reward: Any) -> None:
    assert score(reward).value == 4


def test_options_are_passed_to_the_class_or_bound_to_the_function() -> None:
    assert score(f"{HERE}:Scaled", options={"scale": 2.5}).value == 10
    assert score(lambda request, bonus: bonus, options={"bonus": 3}).value == 3
    with pytest.raises(UserError, match=r"Scaled.*no_such"):
        score(f"{HERE}:Scaled", options={"no_such": 1})


def test_the_environment_reward_returns_the_score_of_the_environment() -> None:
    assert score("environment") == Score(0.25)


def test_a_returned_mapping_becomes_score_parts_and_explanation() -> None:
    got = score(lambda request: {"score": np.float32(0.5), "style": 1, "note": "x", "explanation": "well"})
    assert got == Score(0.5, parts={"style": 1.0}, explanation="well")


def test_a_reward_may_give_each_turn_of_a_trajectory_a_reward() -> None:
    task, once = make_task(), make_trajectory(make_task(), "one", own=Score(0.25))
    twice = replace(once, segments=(*once.segments, *once.segments))
    earned = twice.scored(Score(0.25, turns=(0.5, -1.0)))
    assert ([turn.reward for turn in earned.sampled_turns()], earned.score) == ([0.5, -1.0], Score(0.25))

    def rewards_of(reward: Any, trajectory: Trajectory) -> tuple[Score, list[float | None]]:
        async def main() -> Trajectory:
            async with RewardAgent(reward, cache=16) as agent:
                await score_trajectory(agent, task, twice)  # without turn rewards, which is another request
                return await score_trajectory(agent, task, trajectory)

        found = virtual_time.run(main())
        return found.score, [turn.reward for turn in found.sampled_turns()]

    # A number replaces the score alone. The user's function sees the environment's turn rewards.
    assert rewards_of(lambda request: 2.0, earned) == (Score(2.0), [0.5, -1.0])
    assert rewards_of(lambda request: sum(request.own.turns or ()), earned) == (Score(-0.5), [0.5, -1.0])
    for returned in (Score(2.0, turns=(0.0, 2.0)), {"score": 2, "turns": np.array([0, 2])}):
        assert rewards_of(lambda request, returned=returned: returned, earned) == (Score(2.0), [0.0, 2.0])
        score, turns = rewards_of(lambda request, returned=returned: returned, once)
        assert (score.valid, turns) == (False, [None])  # two rewards for one turn
    assert not rewards_of(lambda request: {"score": 2, "turns": [0, float("nan")]}, earned)[0].valid

    # A weighted sum weights the turn rewards of its parts like their values.
    parts: dict[str, Any] = {
        "environment": {"weight": 2},
        "judge": {"reward": lambda request: Score(1.0, turns=(1.0, 0.0)), "weight": 0.5},
        "whole": {"reward": lambda request: 1.0},
        "logged": {"reward": lambda request: Score(9.0, turns=(9.0, 9.0)), "weight": 0},
    }
    found, turns = rewards_of(Weighted(parts), earned)
    assert (found.value, turns) == (2 * 0.25 + 0.5 + 1, [2 * 0.5 + 0.5, -2.0])
    parts["judge"] = lambda request: Score(1.0, turns=(1.0,))
    assert not rewards_of(Weighted(parts), earned)[0].valid


def test_an_object_is_closed_with_its_scorer_and_gives_the_version() -> None:
    scaled = graders.Scaled()
    assert score(scaled).value == 4
    assert scaled.closed
    scaled.version = "v7"  # type: ignore[attr-defined]
    assert load_reward(scaled).version == "v7"  # type: ignore[attr-defined]


def test_the_version_changes_with_the_options_and_with_the_source_file(tmp_path: Path) -> None:
    def version(reward: Any, **options: Any) -> str:
        return load_reward(reward, options=options).version  # type: ignore[attr-defined]

    assert version(f"{HERE}:Scaled") == version(f"{HERE}:Scaled") != version(f"{HERE}:Scaled", scale=2.0)
    versions = set()
    for number in (1, 2):
        file = tmp_path / str(number) / "mine.py"
        file.parent.mkdir()
        file.write_text(f"def fn(request):\n    return {number}\n")
        versions.add(load_reward(load_object(f"{file}:fn")).version)
    assert len(versions) == 2


def version(reward: Any) -> str:
    return load_reward(reward).version


def test_the_version_of_a_decorated_function_changes_with_the_function_and_with_the_decorator(tmp_path: Path) -> None:
    decorator = "def twice(function):\n    @functools.wraps(function)\n    def wrapper(request):\n        "
    versions = set()
    for number, (factor, value) in enumerate([(2, 1), (2, 3), (4, 1)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "how.py").write_text(
            f"import functools\n{decorator}return {factor} * function(request)\n    return wrapper"
        )
        text = f"from {{}} import twice\n@twice\ndef fn(request):\n    return {value}\n"
        how = load_object(f"{folder / 'how.py'}:twice")
        names: dict[str, Any] = {"twice": how}
        (folder / "mine.py").write_text(text)
        exec(compile(text.partition("\n")[2], str(folder / "mine.py"), "exec"), names)
        versions.add(version(names["fn"]))
    assert len(versions) == 3


def test_the_version_changes_with_the_arguments_of_a_partial_and_with_the_attributes_of_an_object() -> None:
    def scaled(request: Request, scale: float) -> float:
        return scale

    @dataclass(slots=True)
    class Slotted:
        scale: Any

        def compute_score(self, request: Request) -> float:
            return self.scale

    for make in (lambda scale: partial(scaled, scale=scale), graders.Scaled, Slotted):
        assert version(make(1.0)) == version(make(1.0)) != version(make(2.0))

    def capturing(scale: float) -> Any:
        def inner(request: Request) -> float:
            return scale

        return lambda request: inner(request)

    assert version(capturing(1.0)) == version(capturing(1.0)) != version(capturing(2.0))
    methods = [graders.Scaled(scale).compute_score for scale in (1.0, 2.0)]
    assert version(methods[0]) != version(methods[1])
    assert version(Slotted(np.zeros(2))) != version(Slotted(np.ones(2)))


def test_attributes_that_the_version_cannot_cover_are_reported_once_if_there_is_a_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Client:
        version: str

        def __init__(self) -> None:
            self.connection = object()

        def compute_score(self, request: Request) -> float:
            return 1.0

    async def main(reward: Any, journal: Path | None) -> int:
        caplog.clear()
        async with RewardAgent(reward, journal=journal) as agent:
            await agent.score(make_task(), "x")
        return sum("give it an attribute `version`" in message for message in caplog.messages)

    journal = tmp_path / "rewards.sqlite"
    assert asyncio.run(main(Client(), journal)) == 1
    assert asyncio.run(main(Client(), None)) == 0
    assert asyncio.run(main(Client, journal)) == 0  # the agent makes it, so its options say what it is
    Client.version = "1"
    assert asyncio.run(main(Client(), journal)) == 0


@pytest.mark.parametrize("reward", [f"{HERE}:no_such", "nowhere:fn", 3, f"{HERE}:HERE", "length"])
def test_an_object_or_path_that_is_no_reward_raises_a_user_error(reward: Any) -> None:
    with pytest.raises(UserError):
        load_reward(reward)


@pytest.mark.parametrize("slots", [0, -1])
def test_slots_below_one_are_refused(slots: int) -> None:
    class Reward:
        async def compute_score(self, request: Request) -> float:
            return 1.0

    Reward.slots = slots  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=rf"slots is {slots}, but must be at least 1"):
        RewardAgent(Reward)


# --- return values --------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array([[1.0]])])
def test_every_numeric_type_is_accepted_as_a_score(value: Any) -> None:
    got = score(lambda request: value)
    assert got == Score(1.0)
    assert type(got.value) is float


NO_NUMBERS = [math.nan, math.inf, -math.inf, None, "1.0", b"1", [1.0], {}, {"value": 1}, {"score": None}, 1j,
              np.array([1.0, 2.0]), np.float64("nan"), Decimal("NaN"), object()]  # fmt: skip


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
def test_a_return_value_that_is_no_finite_number_fails_and_never_scores_zero(value: Any) -> None:
    with pytest.raises(Fatal) as caught:
        score(lambda request: value)
    assert caught.value.cause == "not_a_number"

    async def main() -> Score:
        async with RewardAgent(lambda request: value) as agent:
            task = make_task()
            got = await agent.score(task, make_trajectory(task, "x"))
            assert agent.metrics()["service/failed/not_a_number"] == 1
            return got

    got = virtual_time.run(main())
    assert not got.valid
    assert math.isnan(got.value)
    assert got.explanation


# --- reward functions of verl and TRL -----------------------------------------------------------------
VERL = {"data_source": "float", "reward_model": {"ground_truth": "four"}, "extra_info": {"index": 3}}


@pytest.mark.parametrize("source", ["float", "dict"])
def test_a_verl_reward_function_gives_its_score_and_parts(source: str) -> None:
    asked = request(**{**VERL, "data_source": source})
    for reward in (f"verl:{HERE}:compute_score", verl(graders.compute_score)):
        got = score(reward, asked)
        assert got.value == 1.0
        assert got.parts == ({"acc": 1.0} if source == "dict" else {})


def test_a_verl_reward_class_may_replace_a_failed_score_by_the_mean_of_the_group() -> None:
    asked = request("five", **VERL)
    said = score(f"verl:{HERE}:RewardAgent", asked).explanation or ""
    assert said.startswith("float, 3")
    assert said.endswith("Is it five?")

    async def finish() -> list[Score]:
        async with RewardAgent(f"verl:{HERE}:RewardAgent") as agent:
            return await agent.finish(asked.task, [Score(0.0), Score.failed("no"), Score(1.0)])

    assert [(s.value, s.valid, s.explanation) for s in asyncio.run(finish())] == [
        (10.0, True, None),
        (10.5, True, "no"),
        (11.0, True, None),
    ]


def test_a_number_for_a_failed_score_is_ignored_unless_the_reward_returns_a_score() -> None:
    class Reward:
        async def compute_score(self, request: Request) -> float:
            return 1.0

        def post_process_scores(self, scores: list[Score]) -> list[Any]:
            return [0.0, 0.0, Score(0.5)]

    async def finish() -> list[Score]:
        async with RewardAgent(Reward()) as agent:
            return await agent.finish(Task("t"), [Score(1.0), Score.failed("no"), Score.failed("no")])

    first, failed, replaced = asyncio.run(finish())
    assert (first, replaced) == (Score(0.0), Score(0.5))
    assert (failed.valid, failed.explanation) == (False, "no")


def test_a_verl_reward_gets_the_id_and_the_size_of_the_group() -> None:
    seen: list[dict[str, Any]] = []

    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        seen.append(extra_info)
        return 1.0

    async def main() -> None:
        task = Task("t", payload=VERL)
        async with RewardAgent(verl(reward), cache=0) as agent:
            async for _ in agent.score_groups([[(task, "a"), (task, "b"), (task, "c")], [(task, "a"), (task, "b")]]):
                pass

    asyncio.run(main())
    assert all(info["index"] == 3 for info in seen)
    groups = Counter((info["group_uid"], info["group_size"]) for info in seen)
    assert sorted((size, count) for (_, size), count in groups.items()) == [(2, 2), (3, 3)]


def test_the_solution_str_of_verl_holds_all_messages_after_the_prompt() -> None:
    messages = (*make_task().prompt, *(Message(role=r, content=c) for r, c in
                [("assistant", "a"), ("tool", "b"), ("assistant", "c")]))  # fmt: skip
    payload = {**VERL, "reward_model": {"ground_truth": "a\nb\nc"}}
    assert score(f"verl:{HERE}:compute_score", Request(Task("t", payload=payload), messages)).value == 1.0


def test_an_example_in_a_task_s_prompt_is_no_answer_for_verl_and_trl() -> None:
    shown = ("user", "1 + 1"), ("assistant", "2"), ("user", "2 + 2")
    prompt = tuple(Message(role=role, content=text) for role, text in shown)
    task = Task("t", prompt, {**VERL, "data_source": "float", "reward_model": {"ground_truth": "4"}})
    asked = Request(task, (Message(role="system", content="Be brief."), *prompt, {"role": "assistant", "content": "4"}))
    assert score(f"verl:{HERE}:compute_score", asked).value == 1.0
    assert score(f"trl:{HERE}:exact_match_async", asked).value == 1.0  # the number of messages in the completion
    unseen = Request(task, (prompt[-1], {"role": "assistant", "content": "4"}))  # an agent has left the example out
    assert score(f"verl:{HERE}:compute_score", unseen).value == 1.0


def test_a_verl_reward_without_ground_truth_in_the_payload_raises_a_user_error() -> None:
    with pytest.raises(UserError, match=r"reward_model.ground_truth.*'t'.*answer"):
        score(f"verl:{HERE}:compute_score", request(answer="x"))


def test_sync_and_async_trl_reward_functions_give_their_score() -> None:
    for reward in (f"trl:{HERE}:exact_match", trl(graders.exact_match)):
        assert score(reward, request("four", answer="four", completion="left out")).value == 1.0
        assert score(reward, request("four", answer="five")).value == 0.0
    assert score(f"trl:{HERE}:exact_match_async").value == 1.0


def test_none_from_a_trl_reward_is_not_applicable_and_spends_no_error_budget() -> None:
    with pytest.raises(NotApplicable):
        score(f"trl:{HERE}:exact_match", request(answer=None))

    async def main() -> None:
        async with RewardAgent(f"trl:{HERE}:exact_match") as agent:
            for n in range(64):  # so many failures would exceed the error budget
                task = make_task(str(n), answer=None)
                assert not (await agent.score(task, make_trajectory(task, "x"))).valid
            assert agent.metrics()["service/failed/not_applicable"] == 64

    virtual_time.run(main())


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_trl_reward_scores_the_members_of_a_group_in_one_call(tmp_path: Path, isolation: Any) -> None:
    async def main() -> dict[str, float]:
        task = make_task(word="four")
        journal, path = tmp_path / "rewards.sqlite", f"trl:{HERE}:longest"
        async with RewardAgent(path, journal=journal, isolation=isolation, workers=1) as agent:
            group = [(task, answer) for answer in ("ab", "abc", "")]
            async for _, scores in agent.score_groups([group]):
                assert [score.value for score in scores[:2]] == [0.0, 1.0]
                assert (scores[2].valid, scores[2].applicable) == (False, False)
            # in a run, the members are scored one by one, and then the group is finished
            played = [make_trajectory(task, answer, identity=str(n)) for n, (_, answer) in enumerate(group)]
            members = [replace(one, info={"group_uid": "7", "group_size": 3}) for one in played]
            scores = [await agent.lane("train").score(task, one) for one in members]
            assert not any(score.valid for score in scores)
            assert [s.value for s in await agent.finish(task, scores)][:2] == [0.0, 1.0]
            # a trajectory without a group, such as one of an evaluation, is scored alone
            assert (await agent.lane("eval").score(task, played[0])).value == 1.0
            return dict(agent.metrics())

    metrics = asyncio.run(main())
    assert metrics["service/scored"] == 2
    assert metrics["service/cache_hits"] == 1  # the second group has the same members


def test_the_members_of_a_trl_group_may_have_different_tasks() -> None:
    async def main() -> list[Score]:
        async with RewardAgent(f"trl:{HERE}:exact_match") as agent:
            group = [(make_task(name, answer=name), name) for name in ("a", "b", "c")]
            return [
                score async for _, scores in agent.score_groups([[*group, (make_task("d"), "d")]]) for score in scores
            ]

    scores = asyncio.run(main())
    assert [score.value for score in scores[:3]] == [1.0, 1.0, 1.0]
    assert not scores[3].applicable  # its payload has no answer


@pytest.mark.parametrize("group_first", [True, False])
def test_a_trl_group_of_one_and_the_same_answer_alone_have_the_same_score(group_first: bool) -> None:
    async def main() -> None:
        async with RewardAgent(f"trl:{HERE}:exact_match") as agent:
            for in_group in (group_first, not group_first):
                member = (make_task(answer="four"), "four")
                if in_group:
                    assert [scores[0].value async for _, scores in agent.score_groups([[member]])] == [1.0]
                else:
                    assert (await agent.score(*member)).value == 1.0

    asyncio.run(main())


def test_a_trl_group_with_a_bad_number_is_counted_and_asked_again(tmp_path: Path) -> None:
    values = [math.nan, 0.5]

    def reward(completions: Any, **columns: Any) -> list[float]:
        return list(values)

    async def main() -> tuple[list[Any], dict[str, float]]:
        async with RewardAgent(trl(reward), journal=tmp_path / "rewards.sqlite") as agent:
            groups = [[(make_task(), "a"), (make_task(), "b")]]
            found = []
            for _ in range(2):
                found += [
                    [s.value if s.valid else None for s in scores] async for _, scores in agent.score_groups(groups)
                ]
                values[0] = 1.0
            return found, dict(agent.metrics())

    found, metrics = asyncio.run(main())
    assert found == [[None, 0.5], [1.0, 0.5]]
    assert metrics["service/failed/not_a_number"] == 1


def test_a_failed_call_of_a_trl_reward_fails_its_group_and_one_bad_number_its_member() -> None:
    def reward(completions: Any, **columns: Any) -> list[float]:
        if len(completions) == 2:
            raise ValueError("two are too few")
        return [math.nan, 0.5, 1.0]

    async def main() -> dict[int, list[Score]]:
        task = make_task()
        async with RewardAgent(trl(reward)) as agent:
            groups = [[(task, str(n)) for n in range(size)] for size in (2, 3)]
            return {index: scores async for index, scores in agent.score_groups(groups)}

    scores = asyncio.run(main())
    assert all("two are too few" in (score.explanation or "") for score in scores[0])
    assert [score.valid for score in scores[1]] == [False, True, True]
    assert [score.value for score in scores[1][1:]] == [0.5, 1.0]


@pytest.mark.parametrize("value", [1.0, [], [1.0, 2.0], None])
def test_a_trl_reward_that_returns_no_list_of_length_one_fails(value: Any) -> None:
    with pytest.raises(Fatal) as caught:
        score(trl(lambda **columns: value))
    assert caught.value.cause == "not_a_number"


def test_a_file_path_with_a_colon_is_not_read_as_a_framework_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def fn(request):\n    return 7\ndef columns(**columns):\n    return 7\n")
    monkeypatch.chdir(tmp_path)
    assert score("mine.py:fn").value == 7
    with pytest.raises(Fatal, match="is not a list"):
        score("trl:mine.py:columns")


def test_scores_of_a_sync_class_are_post_processed_by_group() -> None:
    async def main() -> None:
        async with RewardAgent(f"{HERE}:Scaled") as agent:
            groups = [[(make_task(), "x" * n) for n in (1, 5, 3)]]
            async for index, scores in agent.score_groups(groups):
                assert index == 0
                assert [s.value for s in scores] == [-4, 0, -2]

    asyncio.run(main())


def test_post_process_scores_set_to_none_means_no_post_processing() -> None:
    class Plain:
        post_process_scores = None

        def compute_score(self, request: Request) -> float:
            return 1.0

    assert not load_reward(Plain()).post_processes
