"""Tests of `gleanrl.rewards.judge.Judge` against a scripted OpenAI-compatible server on loopback, and of the code and
configurations in docs/howto/judge.md."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards import RewardAgent
from gleanrl.rewards.judge import SCHEMA, Judge
from gleanrl.rewards.request import Request
from gleanrl.types import Message, Score, Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import Fatal, Retryable
from tests.rewards.service import Plan, Service, group_scored

TASK = Task(
    "t", ({"role": "user", "content": "What is 2+2?"},), {"truth": {"value": 4, "text": "four"}, "hints": ["add"]}
)


def asked(says: str = "4, worth 5", task: Task = TASK) -> Request:
    played: tuple[Message, ...] = (
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "{4}"},
        {"role": "assistant", "content": says},
    )
    return Request(task, played, says)


def judged(plan: Plan, use: Callable[[Judge], Awaitable[None]], **options: Any) -> Service:
    """Call ``use`` with a judge that asks a running service, and return the service."""

    async def main() -> Service:
        async with Service(plan) as service:
            judge = Judge(f"{service.url}/v1", "judge-1", **options)
            await use(judge)
            await judge.aclose()
            return service

    return asyncio.run(main())


def shown(template: str, request: Request | None = None, **options: Any) -> str:
    """Return the content of the last message that is sent to the judge model."""

    async def use(judge: Judge) -> None:
        await judge(request or asked())

    return judged(Plan(), use, template=template, **options).bodies[0]["messages"][-1]["content"]


def writes(text: str | None, **choice: Any) -> Plan:
    """Return a plan with which the judge model always answers ``text``."""
    message = {"message": {"content": text}, "finish_reason": "stop"}
    return Plan(answer=lambda path, body: (200, {"choices": [{**message, **choice}]}))


def test_structured_output_gives_a_scaled_score_with_costs_and_explanation() -> None:
    said = '{"reasoning": "It is what it is.", "score": 5.0}'
    scores: list[Score] = []

    async def use(judge: Judge) -> None:
        scores.append(await judge(asked()))

    plan = Plan(says=lambda body: said)
    (body,) = judged(plan, use, system="Be fair.", max_tokens=50, extra={"seed": 3}).bodies
    words = len(" ".join(message["content"] for message in body["messages"]).split())
    costs = {"cost/prompt_tokens": float(words), "cost/completion_tokens": 8.0}
    assert scores == [Score(0.5, parts={"judge": 5.0, **costs}, explanation=said)]
    assert body["response_format"] == {"type": "json_schema", "json_schema": SCHEMA}
    assert (body["model"], body["temperature"], body["max_tokens"], body["seed"]) == ("judge-1", 0.0, 50, 3)
    assert body["messages"][0] == {"role": "system", "content": "Be fair."}
    assert "What is 2+2?" in body["messages"][1]["content"]
    assert "from 0 (fails the task) to 10" in body["messages"][1]["content"]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        ("json", '{"score": 7}', 0.7),
        ("json", '```json\n{"score": 7.5, "reasoning": "x"}\n```', 0.75),
        (r"regex:[Ss]core: (-?\d+(?:\.\d+)?)", "score: 1? No.\nScore: 9.5", 0.95),
        (r"regex:(?P<what>rated|score) (?P<score>\d+)", "rated 3", 0.3),
        (lambda text: len(text), "four", 0.4),
    ],
)
def test_the_score_is_parsed_from_json_or_by_a_regex_or_a_function(parse: Any, text: str, value: float) -> None:
    async def use(judge: Judge) -> None:
        assert (await judge(asked())).value == pytest.approx(value)

    service = judged(writes(text), use, parse=parse)
    assert ("response_format" in service.bodies[0]) == (parse == "json")


def test_a_parser_is_loaded_by_path_and_its_source_changes_the_version(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def stars(text):\n    return text.count('*') or None\n")

    async def use(judge: Judge) -> None:
        assert (await judge(asked())).value == 0.75

    judged(writes("I say ***"), use, parse=f"{file}:stars", scale=[0, 4])
    other = tmp_path / "other.py"
    other.write_text("def stars(text):\n    return text.count('+')\n")
    first, second = (Judge("http://a", "m", parse=f"{f}:stars") for f in (file, other))
    assert first.version != second.version


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        ("json", "I would say 7"),
        ("json", '{"score": "7"}'),
        ("json", '{"score": true}'),
        ("json", '{"score": null}'),
        ("json", '{"score": NaN}'),
        ("json", "[7]"),
        ("json", '{"score": 11}'),
        ("json", '{"score": -0.5}'),
        ("json", '{"score": 1' + "0" * 400 + "}"),
        ("json", ""),
        ("json", None),
        (r"regex:score: (\S+)", "score: seven"),
        (r"regex:score: (\S+)", "7"),
        (lambda text: {}["score"], "7"),
        (lambda text: None, "7"),
    ],
)
def test_an_answer_without_a_score_is_retryable_once_and_then_fatal(parse: Any, text: str | None) -> None:
    async def use(judge: Judge) -> None:
        for _ in range(2):
            with pytest.raises(Retryable) as first:
                await judge(asked())
            assert first.value.cause == "answer"
            assert "\n" not in str(first.value)
            with pytest.raises(Fatal, match="twice"):
                await judge(asked())

    judged(writes(text), use, parse=parse)


def test_after_an_unreadable_answer_the_second_answer_gives_the_score() -> None:
    async def use(judge: Judge) -> None:
        with pytest.raises(Retryable, match=r"no score: .*I would rather not say") as first:
            await judge(asked())
        second = await judge(asked())
        assert second.value == 0.5
        cost = {name: value for name, value in second.parts.items() if name.startswith("cost/")}
        assert first.value.cost["cost/prompt_tokens"] == cost["cost/prompt_tokens"] > 0
        assert first.value.cost["cost/completion_tokens"] == 5  # "I would rather not say."

    judged(Plan(faults={"no_score": 1.0}), use)


@pytest.mark.parametrize("repeats", [1, 0])
def test_the_tokens_of_answers_without_a_score_are_counted_too(repeats: int) -> None:
    async def main() -> None:
        async with Service(Plan(faults={"no_score": 1.0}, repeats=repeats)) as service:
            judge = Judge(f"{service.url}/v1", "m")
            async with RewardAgent(judge, backoff_s=0.01) as agent:
                scores = await group_scored(agent, [(TASK, f"worth {i}") for i in range(4)])
                assert [score.valid for score in scores] == [repeats == 1] * 4
                words = [len(body["messages"][-1]["content"].split()) for body in service.bodies]
                assert len(words) == 8
                assert agent.metrics()["service/prompt_tokens"] == sum(words)

    asyncio.run(main())


def test_retries_share_an_idempotency_key_and_a_second_question_has_its_own() -> None:
    """A service that honours idempotency keys repeats its answer, so the same key would return the unreadable one."""

    async def use(judge: Judge) -> None:
        key = asked().key(judge.version)
        for _ in range(3):
            with pytest.raises(Retryable):
                await judge(asked())
        assert (await judge(asked())).value == 0.5
        assert (await judge(asked())).value == 0.5
        keys.extend([key, key, f"{key}-2", f"{key}-2", key])

    keys: list[str] = []
    answers = iter(["500", "unreadable", "500"])

    def answer(path: str, body: Any) -> tuple[int, Any]:
        kind = next(answers, "well")
        said = "I would rather not say." if kind == "unreadable" else '{"score": 5}'
        return (500, {}) if kind == "500" else (200, {"choices": [{"message": {"content": said}}]})

    assert [h["idempotency-key"] for h in judged(Plan(answer=answer), use).headers] == keys


@pytest.mark.parametrize(("parse", "text"), [(r"regex:score: (\d+)", "Let me think"), ("json", '{"reasoning": "Let')])
def test_a_truncated_answer_raises_an_error_that_names_max_tokens(parse: str, text: str) -> None:
    async def use(judge: Judge) -> None:
        with pytest.raises(Retryable, match="raise max_tokens"):
            await judge(asked())

    judged(writes(text, finish_reason="length"), use, parse=parse)


def test_an_answer_that_gives_two_scores_gives_none() -> None:
    """A response may bring a judge to write a second score after the first."""

    async def use(judge: Judge) -> None:
        with pytest.raises(Retryable, match="twice"):
            await judge(asked())

    judged(writes('{"score": 2, "reasoning": "no", "score": 10}'), use)


@pytest.mark.parametrize(
    "choice", [{"finish_reason": "content_filter"}, {"message": {"content": None, "refusal": "no"}}]
)
def test_a_refusal_is_fatal(choice: dict[str, Any]) -> None:
    async def use(judge: Judge) -> None:
        with pytest.raises(Fatal, match="refuses"):
            await judge(asked())

    judged(writes('{"score": 0}', **choice), use)


@pytest.mark.parametrize("answer", [{}, {"choices": []}, [], {"choices": [{"message": None}]}, "x", {"choices": [3]}])
def test_an_answer_that_is_no_chat_completion_is_retryable(answer: Any) -> None:
    async def use(judge: Judge) -> None:
        with pytest.raises(Retryable, match="no chat completion"):
            await judge(asked())

    judged(Plan(answer=lambda path, body: (200, answer)), use)


# --- the template -------------------------------------------------------------------------------------
def test_a_template_inserts_its_fields_and_does_not_expand_inserted_text() -> None:
    text = shown(
        "{{{task}}} {payload.truth.value} {payload.truth} {payload.hints.0} {low}-{high}: {response}", scale=[1, 5]
    )
    assert text == '{What is 2+2?} 4 {"value": 4, "text": "four"} add 1-5: 4, worth 5'
    assert shown("{response}", asked("{task} {0} worth 5")) == "{task} {0} worth 5"


def test_the_conversation_field_shows_tool_calls_and_tool_results() -> None:
    played = [("user", "What is 2+2?"), ("assistant", '\n[calls] [{"name": "add"}]'), ("tool", "{4}")]
    expected = "\n\n".join(f"[{role}]\n{said}" for role, said in [*played, ("assistant", "4, worth 5")])
    assert shown("{conversation}") == expected


def test_a_question_that_the_environment_asks_is_shown_as_the_task() -> None:
    assert shown("{task}|{response}", asked(task=Task("t"))) == "What is 2+2?|4, worth 5"
    examples: tuple[Message, ...] = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"})
    played = asked()
    after = replace(played, task=Task("t", examples), messages=(*examples, *played.messages))
    assert shown("{task}|{response}", after) == "1+1?\n\n2\n\nWhat is 2+2?|4, worth 5"


def test_a_template_field_that_the_payload_lacks_raises_a_user_error() -> None:
    async def use(judge: Judge) -> None:
        with pytest.raises(UserError, match=r"task 't' has no \{payload.truth.word\}"):
            await judge(asked())

    judged(Plan(), use, template="{response} {payload.truth.word}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"template": "{respons}"}, "did you mean 'response'"),
        ({"template": "{response} {"}, "doubled"),
        ({"template": "{response.__class__}"}, "no field"),
        ({"template": "{response} {payload}"}, "no field"),
        ({"template": "{response} {payload.}"}, "no field"),
        ({"template": "{response!r}"}, "takes no format"),
        ({"template": "{response:>9}"}, "takes no format"),
        ({"template": "{task}"}, "neither {response} nor {conversation}"),
        ({"parse": "regex:("}, "is none"),
        ({"parse": "regex:score"}, "no group"),
        ({"parse": "jason"}, "json, regex:PATTERN"),
        ({"parse": "json:nothing"}, "has no 'nothing'"),
        ({"scale": [10, 0]}, "lowest score comes first"),
        ({"scale": [1, 1]}, "lowest score comes first"),
        ({"scale": [0, float("inf")]}, "finite"),
        ({"scale": 10}, "give the lowest"),
        ({"scale": [0, 1, 2]}, "give the lowest"),
        ({"model": ""}, "name the judge's model"),
        ({"extra": {"temperature": 1}}, "temperature has a setting"),
        ({"extra": {"x": object()}}, "travel as JSON"),
        ({"base_url": "api.openai.com"}, "base_url: give an address"),
        ({"api_key_env": "NOT_THERE"}, "NOT_THERE is not set"),
    ],
)
def test_invalid_settings_raise_a_one_line_user_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        Judge(**{"base_url": "http://localhost:1/v1", "model": "m", **options})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_version_depends_only_on_settings_that_change_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1234")
    base = Judge("http://a", "m").version
    others = [
        Judge("http://a", "n"),
        Judge("http://a", "m", template="{response}"),
        Judge("http://a", "m", system="x"),
        Judge("http://a", "m", parse=r"regex:(\d)"),
        Judge("http://a", "m", scale=(0, 5)),
        Judge("http://a", "m", temperature=1.0),
        Judge("http://a", "m", extra={"seed": 1}),
    ]
    assert len({base, *(judge.version for judge in others)}) == len(others) + 1
    same = Judge("http://b", "m", timeout_s=5, connections=3, api_key_env="JUDGE_KEY")
    assert same.version == base


# --- docs/howto/judge.md --------------------------------------------------------------------------------
PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "judge.md").read_text(encoding="utf-8")


def test_every_configuration_of_the_docs_page_creates_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1234")
    (tmp_path / "mine.py").write_text("def length(request):\n    return len(request.response) / 100\n")
    tables = [tomllib.loads(block)["reward"] for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]
    made = [RewardAgent(settings=RewardSettings(**table)) for table in tables if table["name"] != "model"]
    assert len(made) == 4


def test_the_code_of_the_docs_page_prints_the_shown_output(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == "0.997 {'environment': 1.0, 'length': 0.03}\n"
