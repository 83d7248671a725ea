"""A key stays in the environment, whatever a service or a user does with it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
import traceback
from typing import Any
from urllib.parse import quote

import pytest

from gleanrl.errors import UserError
from gleanrl.rewards import RewardAgent
from gleanrl.rewards.compose import Weighted
from gleanrl.rewards.errors import Fatal, Retryable
from gleanrl.rewards.http import HttpReward
from gleanrl.rewards.judge import Judge
from gleanrl.rewards.request import Request
from gleanrl.rewards.secrets import Secret, header, refuse_key_in
from gleanrl.settings import RewardSettings
from gleanrl.types import Task
from tests.rewards.service import Plan, Service

KEY = 'sk-proj-"4f8a/9Zq+Lw7'  # with what JSON and addresses write otherwise
REQUEST = Request(Task("t"), ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4, worth 5"}))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def test_the_value_is_nowhere_in_the_object() -> None:
    secret = Secret("JUDGE_KEY")
    assert secret.reveal() == KEY
    assert KEY not in f"{secret} {secret!r} {vars(type(secret))}"
    assert KEY.encode() not in pickle.dumps(secret)
    assert pickle.loads(pickle.dumps(secret)).reveal() == KEY
    with pytest.raises(TypeError):
        json.dumps(secret)


@pytest.mark.parametrize(
    "form",
    [
        KEY,
        quote(KEY, safe=""),
        json.dumps(KEY),
        repr(KEY),
        base64.b64encode(KEY.encode()).decode(),
        "sk-proj-****************9Zq+",
        "sk-proj-...",
    ],
)
def test_it_is_taken_out_of_a_text_however_it_is_written(form: str) -> None:
    redacted = Secret("JUDGE_KEY").redact(f"your key {form} is wrong")
    assert "[JUDGE_KEY]" in redacted
    for piece in (KEY, form.strip("\"'"), "sk-proj", "4f8a"):
        assert piece not in redacted
    assert redacted.startswith("your key ")
    assert redacted.endswith(" is wrong")


def test_a_text_without_it_stays() -> None:
    text = "a skill, sk, sk- and ... *** are no keys"
    assert Secret("JUDGE_KEY").redact(text) == text


@pytest.mark.parametrize("given", ["sk-abcdef", "abcdef0123", "", "A" * 65, KEY])
def test_what_may_be_the_key_itself_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(UserError, match="NAME of an environment variable") as error:
        Secret(given)
    assert not given or given not in str(error.value)


def test_an_unset_or_unusable_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="NOT_THERE is not set"):
        Secret("NOT_THERE")
    monkeypatch.setenv("JUDGE_KEY", "sk-ü-secret")
    with pytest.raises(UserError, match="no HTTP header can carry") as error:
        Secret("JUDGE_KEY")
    assert "secret" not in str(error.value)


def test_a_header_that_speaks_of_a_key_takes_it_from_the_environment() -> None:
    for name in ("api-key", "Authorization", "X-Auth-Token", "Cookie"):
        with pytest.raises(UserError, match="env:NAME") as error:
            header(name, KEY)
        assert KEY not in str(error.value)
    taken = header("api-key", "env:JUDGE_KEY")
    assert isinstance(taken, Secret)
    assert header("X-Team", "blue") == "blue"


@pytest.mark.parametrize(
    "url", ["https://me:pass1@host/v1", "https://host/v1?api_key=pass1", "https://host?a=1&token=pass1"]
)
def test_an_address_with_a_key_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UserError, match="holds a key") as error:
        refuse_key_in(url, "url")
    assert "pass1" not in str(error.value)
    refuse_key_in("https://host/v1?api-version=3", "url")


def _echoing(path: str, body: Any) -> tuple[int, Any]:
    """A service that repeats the key in everything that it says."""
    if path == "/v1/chat/completions":
        said = json.dumps({"score": 5, "reasoning": f"you sent {KEY}"})
        return 200, {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}
    if path == "/score":
        return 200, {"score": 5, "explanation": f"you sent {KEY}"}
    return 400, {"error": {"message": "x" * 290 + f" you sent {KEY}"}}  # where the message is cut


@pytest.mark.parametrize("kind", ["judge", "http"])
def test_an_explanation_does_not_hold_what_the_service_echoes(kind: str) -> None:
    async def main() -> str | None:
        async with Service(Plan(answer=_echoing)) as service:
            scorer = (
                Judge(f"{service.url}/v1", "m", api_key_env="JUDGE_KEY")
                if kind == "judge"
                else HttpReward(f"{service.url}/score", api_key_env="JUDGE_KEY")
            )
            score = await scorer(REQUEST)
            await scorer.aclose()
            assert service.headers[0]["authorization"] == f"Bearer {KEY}"
            return score.explanation

    said = asyncio.run(main())
    assert said is not None
    assert "[JUDGE_KEY]" in said
    assert KEY not in said
    assert json.dumps(KEY)[1:-1] not in said


@pytest.mark.parametrize(
    "faults", [{}, {"500": 1.0}, {"garbage": 1.0}, {"half": 1.0}, {"drop": 1.0}, {"no_score": 1.0}]
)
def test_no_error_and_no_log_line_holds_it(faults: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> str:
        # without faults the key is wrong, and the service repeats it whole and in pieces
        async with Service(Plan(key=KEY if faults else "another", faults=faults, repeats=0)) as service:
            judge = Judge(f"{service.url}/v1", "m", api_key_env="JUDGE_KEY")
            with pytest.raises((Fatal, Retryable)) as error:
                await judge(REQUEST)
            await judge.aclose()
            assert KEY in service.headers[0]["authorization"]
            return "".join(traceback.format_exception(error.value))

    told = asyncio.run(main()) + caplog.text
    for piece in (KEY, KEY[:8], json.dumps(KEY)[1:-1]):
        assert piece not in told
    if not faults:
        assert "environment variable JUDGE_KEY" in told


def test_neither_dumps_nor_pickles_nor_journals_hold_it(tmp_path: Any) -> None:
    options = {"model": "m", "api_key_env": "JUDGE_KEY", "headers": {"api-key": "env:JUDGE_KEY"}}

    async def main() -> Judge:
        async with Service(Plan(key=KEY, answer=_echoing)) as service:
            settings = RewardSettings(
                name="gleanrl.rewards.judge:Judge", options={**options, "base_url": f"{service.url}/v1"}
            )
            assert KEY not in settings.model_dump_json() + repr(settings)
            async with RewardAgent(settings=settings, journal=tmp_path / "journal.sqlite") as agent:
                async for _, scores in agent.score_groups([[(REQUEST.task, list(REQUEST.messages))]]):
                    assert scores[0].valid
                    assert KEY not in repr(scores) + repr(agent.metrics())
            return Judge(f"{service.url}/v1", **options)

    judge = asyncio.run(main())
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"JUDGE_KEY" in written  # the redacted explanation is there
    assert KEY.encode() not in written
    assert json.dumps(KEY)[1:-1].encode() not in written
    assert KEY.encode() not in pickle.dumps(judge)
    assert pickle.loads(pickle.dumps(judge)).version == judge.version
    assert KEY not in repr(vars(judge)) + Weighted({"judge": judge}).version
