"""Tests of the reward `math` in real worker processes: equivalent forms of an answer, where the answer stands in a
response, time limits, and errors."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards import RewardAgent
from gleanrl.rewards.adapter import check_reward, load_reward
from gleanrl.rewards.math import KILL_S, Grader, MathReward, extract_answer, find_boxed
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError

pytest.importorskip("math_verify")


def scores(pairs: Sequence[tuple[Any, str]], **options: Any) -> list[Score]:
    """Score pairs of a right answer (or a whole payload) and a response."""
    payloads = [gold if isinstance(gold, dict) else {"answer": gold} for gold, _ in pairs]
    tasks = [
        (Task(str(i), (), payload), said) for i, (payload, (_, said)) in enumerate(zip(payloads, pairs, strict=True))
    ]

    async def main() -> list[Score]:
        async with RewardAgent("math", workers=1, options=options) as agent:
            return list(await asyncio.gather(*(agent.score(task, said) for task, said in tasks)))

    return asyncio.run(main())


@pytest.fixture(scope="module")
def grader() -> Any:
    """A factory of graders that run in this process, without the memory limit of worker processes."""
    made = {}

    def grade(extract: Any, compare: Any = "math") -> Grader:
        if (extract, compare) not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("gleanrl.rewards.math.resource.setrlimit", lambda *_: None)
                made[extract, compare] = Grader(extract, compare, 5.0)
        return made[extract, compare]

    return grade


@pytest.mark.parametrize(
    ("gold", "said", "right"),
    [
        ("4", r"so $2+2=\boxed{4}$", True),
        ("1/2", r"\boxed{\frac{2}{4}}", True),
        (r"\frac{1}{2}", "The answer is 0.5.", True),
        (r"\frac12", r"\boxed{0.5}", True),
        ("x+1", r"\boxed{1+x}", True),
        ("x+1", r"\boxed{x-1}", False),
        ("1,000", r"\boxed{1000}", True),
        ("(1, 2)", r"\boxed{(1,2)}", True),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", True),
        ("Add them. #### 72", "Thus 72 apples.", True),
        (r"We get $\boxed{\sqrt{8}}$.", r"\boxed{2\sqrt{2}}", True),
        ("4", r"\boxed{5} and not 4", False),
        ("4", "It is 5.", False),
        ("4", "", False),
        ("-3", r"\boxed{3}", False),
    ],
)
def test_equivalent_forms_of_an_answer_are_equal(grader: Any, gold: str, said: str, right: bool) -> None:
    assert grader("auto").grade(said, [gold]).correct is right


@pytest.mark.parametrize(
    ("extract", "said", "read", "formatted"),
    [
        ("boxed", r"\boxed{3} then \boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        ("boxed", "It is 4.", None, False),
        ("boxed", r"\boxed{3} then \boxed{4", "3", True),
        ("auto", "It is 4.", None, False),
        ("tags", "<answer> 4 </answer>", "4", True),
        ("tags", r"<answer>1</answer> <answer>\boxed{4}</answer>", "4", True),
        ("tags", "4", None, False),
        ("last_number", "3 of 1,234.5 apples", "1234.5", True),
        ("last_number", "3 and 4 #### 7 (not 8)", "7", True),
        ("last_number", "none", None, False),
        ("last_number", "It is 10-3", "3", True),
        ("last_number", "the years 2010-2015", "2015", True),
        ("last_number", "f(2)-5", "5", True),
        ("last_number", "10% -3", "-3", True),
        ("last_number", "x = -3, or so", "-3", True),
        ("last_number", "x=\u2212.5", "-.5", True),
        ("last_number", "(-1,234)", "-1234", True),
        ("last_number", "3 #### -7/2", "-7/2", True),
        ("last_number", "so H2", "2", True),
    ],
)
def test_extract_answer_finds_the_answer_in_each_format(
    extract: Any, said: str, read: str | None, formatted: bool
) -> None:
    assert extract_answer(said, extract) == (read, formatted)


def test_find_boxed_returns_the_content_of_a_box_with_nested_braces() -> None:
    assert find_boxed(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}"
    assert find_boxed("no box") is None
    assert find_boxed(r"\boxed{a \boxed{b} c} } \fbox {d} \boxed{{e") == "d"
    assert find_boxed(r"\boxed{a \boxed{b") is None


def test_boxes_that_are_not_closed_cost_little_time() -> None:
    start = time.process_time()
    assert find_boxed(r"\boxed{4}" + r"\boxed{" * 20_000) == "4"
    assert time.process_time() - start < 2.0


def test_finding_the_answer_is_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(text: str) -> None:
        while True:
            pass

    monkeypatch.setattr("gleanrl.rewards.math.resource.setrlimit", lambda *_: None)
    grader = Grader("boxed", "text", 0.1)
    monkeypatch.setattr("gleanrl.rewards.math.find_boxed", endless)
    assert grader.grade(r"\boxed{4}", ["4"]).timed_out


def test_only_an_answer_in_the_configured_place_counts(grader: Any) -> None:
    assert not grader("boxed").grade("It is 4.", ["4"]).correct
    assert not grader("tags").grade(r"\boxed{4}", ["4"]).correct
    assert grader("tags").grade("<answer>4.0</answer>", ["4"]).correct
    assert grader("last_number").grade("so 72 apples", ["72"]).correct
    assert not grader("last_number").grade(r"\boxed{72}, as 1 does", ["72"]).correct


def test_compare_text_compares_choices_as_normalised_text(grader: Any) -> None:
    choice = grader("boxed", "text")
    assert choice.grade(r"It is \boxed{\text{ b }}.", ["B"]).correct
    assert choice.grade(r"\boxed{(B)}", ["B"]).correct
    assert not choice.grade(r"\boxed{C}", ["B"]).correct
    assert choice.grade(r"\boxed{New  York}", ["Paris", "new york"]).correct
    for same in ("(B).", "B)", "$B$.", "$(B)$", " b "):
        assert choice.grade(rf"\boxed{{{same}}}", ["B"]).correct, same
    for one, other in ((".5", "5"), ("f(x)", "f(x"), ("(a)(b)", "a)(b"), ("f(x)", "f(x)."), ("(1)", "(1")):
        assert choice.grade(rf"\boxed{{{one}}}", [other]).correct is (other == "f(x)."), (one, other)


def test_the_reward_finds_the_answer_in_the_payload_and_reports_its_parts() -> None:
    verl = {"data_source": "x", "reward_model": {"ground_truth": "4", "style": "rule"}, "extra_info": {"answer": "5"}}
    both = {"answer": ["4", "5"]}
    trl = {"solution": r"It is \boxed{4}"}
    pairs = [(verl, r"\boxed{4}"), (both, r"\boxed{5}"), (trl, "4"), ("4", "<think>4</think> 5"), (4, "so 4")]
    cut = scores([("5", r"<think> \boxed{5} maybe"), ("5", r"no</think> \boxed{5}")], extract="auto")
    assert [score.value for score in cut] == [0.0, 1.0]
    assert cut[0].parts["extracted"] == 0.0
    found = scores([*pairs, (0.5, r"\boxed{\frac12}")])
    assert [score.value for score in found] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert found[0].parts == {"correct": 1.0, "extracted": 1.0, "formatted": 1.0, "timed_out": 0.0}
    assert found[3].parts == {"correct": 0.0, "extracted": 1.0, "formatted": 0.0, "timed_out": 0.0}
    assert found[3].explanation == "5, for 4"


def test_format_weight_scores_the_format_and_answer_names_the_column() -> None:
    payload = {"answer": "1", "extra_info": {"truth": "4"}}
    found = scores(
        [(payload, said) for said in (r"\boxed{4}", r"\boxed{1}", "4", "one")],
        answer="extra_info.truth",
        format_weight=0.1,
    )
    assert [score.value for score in found] == pytest.approx([1.0, 0.1, 0.9, 0.0])


def test_an_answer_that_takes_too_long_scores_zero_without_affecting_others() -> None:
    start = time.monotonic()
    said = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{10000000000!}", r"\boxed{4}"]
    found = scores([("3", said[0]), ("3", said[1]), ("4.0", said[2])], timeout_s=0.5)
    assert [(score.valid, score.value) for score in found] == [(True, 0.0), (True, 0.0), (True, 1.0)]
    assert [score.parts["timed_out"] for score in found] == [1.0, 1.0, 0.0]
    assert time.monotonic() - start < KILL_S  # no process had to be killed


def test_a_worker_process_that_ignores_the_time_limit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[Score]:
        reward = MathReward(timeout_s=0.1)
        reward._make = Deaf
        monkeypatch.setattr("gleanrl.rewards.math.KILL_S", 0.5)
        async with RewardAgent(reward, workers=1) as agent:
            task = Task("t", (), {"answer": "4"})
            return [await agent.score(task, said) for said in ("hang", r"\boxed{4}")]

    hung, well = asyncio.run(main())
    assert (hung.valid, hung.value, hung.parts["timed_out"]) == (True, 0.0, 1.0)
    assert well.value == 1.0


class Deaf:
    """A grader that blocks the signals of its time limit when the response is "hang", as a C library may do."""

    def grade(self, response: str, gold: list[str]) -> Any:
        import signal

        if response == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF, signal.SIGALRM})
            signal.pause()
        return Grader("auto", "math", 5.0).grade(response, gold)


def test_a_task_whose_right_answer_cannot_be_parsed_has_no_score() -> None:
    [score] = scores([(r"\boxed{}", "4")])
    assert not score.valid
    assert "the right answer of task '0' is none" in str(score.explanation)


def test_a_task_without_an_answer_column_raises_a_user_error() -> None:
    with pytest.raises(UserError, match=r"task '0' has no .*answer.* but question; set reward.options.answer"):
        scores([({"question": "2+2?"}, "4")])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"extract": "box"}, "extract = 'box': one of auto, boxed, tags, last_number"),
        ({"compare": "maths"}, "compare = 'maths': one of math, text"),
        ({"format_weight": 2}, "format_weight = 2: a share from 0 to 1"),
        ({"timeout_s": 0}, "timeout_s = 0: seconds, above 0"),
        ({"answer": 4}, "answer = 4: name a column"),
        ({"anser": "x"}, "reward math has no option 'anser'; did you mean 'answer'?"),
    ],
)
def test_invalid_options_raise_a_one_line_user_error(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        check_reward("math", options=options)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_package_raises_a_user_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(UserError, match=r"needs the extra: pip install 'gleanrl\[math\]'"):
        check_reward("math")
    check_reward("math", options={"compare": "text", "extract": "tags"})


def test_the_workers_setting_is_the_number_of_processes() -> None:
    scorer = load_reward("math", settings=RewardSettings(name="math", workers=1))
    assert scorer.slots == 1
