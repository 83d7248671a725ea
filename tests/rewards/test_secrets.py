"""Tests that an API key appears in no error, log line, score, pickle, journal or settings file, even if the service
echoes it, and that keys written into options are refused (`gleanrl.utils.secrets`)."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
import re
import traceback
from typing import Any
from urllib.parse import quote

import pytest

from gleanrl.config.settings import RewardSettings
from gleanrl.rewards import Request, RewardAgent
from gleanrl.rewards.adapter import check_reward
from gleanrl.rewards.compose import Weighted
from gleanrl.rewards.http import HttpReward
from gleanrl.rewards.judge import Judge
from gleanrl.rewards.model import PoolingServer
from gleanrl.types import Task
from gleanrl.utils.errors import UserError
from gleanrl.utils.retry import Fatal, Retryable
from gleanrl.utils.secrets import Secret, parse_header, refuse_key_in_url, refuse_keys
from tests.rewards.service import Plan, Service

KEY = 'sk-proj-"4f8a/9Zq+Lw7'  # with characters that JSON and URLs escape
REQUEST = Request(Task("t"), ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4, worth 5"}))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def test_a_secret_does_not_hold_its_value() -> None:
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
        f"{KEY[:15]}...",
    ],
)
def test_redact_removes_the_key_in_every_encoding(form: str) -> None:
    redacted = Secret("JUDGE_KEY").redact(f"your key {form} is wrong")
    assert "[JUDGE_KEY]" in redacted
    for piece in (KEY, form.strip("\"'"), "sk-proj", "4f8a"):
        assert piece not in redacted
    assert redacted.startswith("your key ")
    assert redacted.endswith(" is wrong")


def test_redact_does_not_change_other_text() -> None:
    text = "a skill, sk, sk- and ... *** are no keys"
    assert Secret("JUDGE_KEY").redact(text) == text


@pytest.mark.parametrize("given", ["sk-abcdef", "abcdef0123", "", "A" * 65, KEY])
def test_a_key_in_place_of_a_variable_name_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(UserError, match="NAME of an environment variable") as error:
        Secret(given)
    assert not given or given not in str(error.value)


def test_an_unset_variable_or_unusable_value_raises_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="NOT_THERE is not set"):
        Secret("NOT_THERE")
    monkeypatch.setenv("JUDGE_KEY", "sk-ü-secret")
    with pytest.raises(UserError, match="no HTTP header can carry") as error:
        Secret("JUDGE_KEY")
    assert "secret" not in str(error.value)


def test_headers_that_carry_keys_must_name_an_environment_variable() -> None:
    for name in ("api-key", "Authorization", "X-Auth-Token", "Cookie"):
        with pytest.raises(UserError, match="env:NAME") as error:
            parse_header(name, KEY)
        assert KEY not in str(error.value)
    taken = parse_header("api-key", "env:JUDGE_KEY")
    assert isinstance(taken, Secret)
    assert parse_header("X-Team", "blue") == "blue"


@pytest.mark.parametrize(
    "url",
    [
        "https://me:pass1@host/v1",
        "https://host/v1?api_key=pass1",
        "https://host?a=1&token=pass1",
        "https://host/hooks/T0/pass1AbCdEfGhIjKlMnOpQr",
        "https://host/v1?k=pass1AbCdEfGhIjKlMnOpQr",
    ],
)
def test_a_url_that_contains_a_key_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UserError, match="holds a key") as error:
        refuse_key_in_url(url, "url")
    assert "pass1" not in str(error.value)
    for url in (
        "https://host/v1?api-version=2024-10-21-preview",
        "https://host/models/Qwen2.5-72B-Instruct-GPTQ-Int4/v1",
        "https://host/client/v4/accounts/0123456789abcdef0123456789abcdef/ai/v1",
    ):
        refuse_key_in_url(url, "url")


def test_an_address_from_the_environment_is_used_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service repeats the path with the key, as the error page of a web framework does."""

    def answer(path: str, body: Any) -> tuple[int, Any]:
        return (200, {"score": 5}) if body["task_id"] == "t" else (404, {"detail": f"nothing at {path}"})

    async def main() -> list[str]:
        async with Service(Plan(answer=answer)) as service:
            monkeypatch.setenv("GRADER_URL", f"{service.url}/hooks/pass1AbCdEfGhIjKlMnOpQr?code=pass1")
            check_reward("http", options={"url": "env:GRADER_URL"})
            reward = HttpReward("env:GRADER_URL")
            assert (await reward(REQUEST)).value == 5
            with pytest.raises(Fatal) as refused:
                await reward(Request(Task("other"), ()))
        with pytest.raises(Retryable) as gone:
            await reward(REQUEST)
        await reward.aclose()
        return [str(refused.value), str(gone.value), reward.version, repr(vars(reward))]

    said = asyncio.run(main())
    assert all("GRADER_URL" in text for text in said[:2])
    assert "pass1" not in "".join(said)


def _echoing(path: str, body: Any) -> tuple[int, Any]:
    """Return the answer of a service that repeats the key in everything it sends."""
    if path == "/v1/chat/completions":
        said = json.dumps({"score": 5, "reasoning": f"you sent {KEY}"})
        return 200, {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}
    if path == "/classify":
        return 200, {"data": [{"probs": f"{'x' * 290} you sent {KEY}"}]}
    if path == "/score":
        return 200, {"score": 5, "explanation": f"you sent {KEY}", "parts": {f"of {KEY}": 1.0}}
    return 400, {"error": {"message": "x" * 290 + f" you sent {KEY}"}}  # at the place where errors are truncated


@pytest.mark.parametrize("kind", ["judge", "http"])
def test_a_key_that_the_service_echoes_is_redacted_in_the_explanation(kind: str) -> None:
    async def main() -> str:
        async with Service(Plan(answer=_echoing)) as service:
            scorer = (
                Judge(f"{service.url}/v1", "m", api_key_env="JUDGE_KEY")
                if kind == "judge"
                else HttpReward(f"{service.url}/score", api_key_env="JUDGE_KEY")
            )
            score = await scorer(REQUEST)
            await scorer.aclose()
            assert service.headers[0]["authorization"] == f"Bearer {KEY}"
            assert score.explanation is not None
            return score.explanation + repr(score.parts)

    said = asyncio.run(main())
    assert "[JUDGE_KEY]" in said
    assert KEY not in said
    assert json.dumps(KEY)[1:-1] not in said


@pytest.mark.parametrize(
    "faults", [{}, {"500": 1.0}, {"garbage": 1.0}, {"half": 1.0}, {"drop": 1.0}, {"no_score": 1.0}]
)
def test_no_error_and_no_log_line_holds_the_key(faults: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> str:
        # without faults the service expects another key, and its error repeats the sent one whole and in parts
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


def test_settings_dumps_pickles_and_journals_do_not_hold_the_key(tmp_path: Any) -> None:
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


def test_the_error_of_an_echoing_pooling_server_is_redacted_and_truncated() -> None:
    async def main() -> str:
        async with Service(Plan(answer=_echoing)) as service:
            server = PoolingServer(service.url, "m", api_key_env="JUDGE_KEY")
            with pytest.raises(Fatal) as error:
                await server(REQUEST)
            await server.aclose()
            return str(error.value)

    said = asyncio.run(main())
    assert KEY[:6] not in said
    assert len(said) < 450


# --- keys in options --------------------------------------------------------------------------------
PLAIN = "4f8a9ZqLw7"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("tests.rewards.test_secrets:Client", {"api_key": PLAIN}),
    ("tests.rewards.test_secrets:Client", {"api_key": "env:not a name"}),
    ("tests.rewards.test_secrets:Client", {"api_key": ["env:JUDGE_KEY", PLAIN]}),
    ("tests.rewards.test_secrets:Client", {"apiKey": PLAIN}),
    ("tests.rewards.test_secrets:Client", {"service": {"Authorization": PLAIN}}),
    ("tests.rewards.test_secrets:Client", {"clients": [{"password": PLAIN}]}),
    ("tests.rewards.test_secrets:Client", {"grader_key": f"{PLAIN}-and-more"}),
    ("tests.rewards.test_secrets:Client", {"anything": f"sk-proj-{PLAIN}"}),
    ("tests.rewards.test_secrets:Client", {"url": f"https://host/score?code={PLAIN}"}),
    ("tests.rewards.test_secrets:Client", {"api_key_env": f"sk-proj-{PLAIN}"}),
    ("judge", {"base_url": "http://localhost:1/v1", "model": "m", "extra": {"api_key": PLAIN}}),
    ("http", {"url": "http://localhost:1", "fields": {"token": PLAIN}}),
    ("http", {"url": f"http://localhost:1?code={PLAIN}"}),
    (
        "weighted",
        {"parts": {"j": {"reward": "http", "options": {"url": "http://localhost:1", "fields": {"token": PLAIN}}}}},
    ),
]


class Client:
    """A user's reward that needs a key."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    async def compute_score(self, request: Request) -> dict[str, Any]:
        assert self.options == {"api_key": KEY, "deep": {"keys": [KEY]}}
        if request.response == "raise":
            raise ValueError(f"who is {self.options['api_key']}?")
        key = self.options["api_key"]
        return {"score": 1.0, f"of {key}": 1.0, "explanation": f"by {key}"}


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_key_in_options_is_refused_and_not_repeated(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r'write "env:NAME"|holds a key|NAME of an environment') as error:
        check_reward(name, options=options)
    assert PLAIN not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 8, "tokenizer": "Qwen/Qwen2.5-7B", "pad_token": "<|endoftext|>", "stop_tokens": ["</s>", "\n"]},
        {"key": "score", "answer_key": "ground_truth", "keywords": ["cat"], "author": "me", "api_key": ""},
        {"api_key_env": "JUDGE_KEY", "api_key": "env:JUDGE_KEY", "secret": None, "use_auth_token": True},
        {"url": "https://host/v1?api-version=2024-10-21", "template": "Is the task risk-free? sk-ip it"},
    ],
)
def test_options_that_only_resemble_keys_are_accepted(options: dict[str, Any]) -> None:
    refuse_keys(options, "reward.options")
    check_reward("tests.rewards.test_secrets:Client", options=options)


def test_an_unset_variable_in_options_raises_a_user_error_that_names_it() -> None:
    with pytest.raises(UserError, match=r"reward.options.api_key: the environment variable NOT_THERE is not set"):
        check_reward("tests.rewards.test_secrets:Client", options={"api_key": "env:NOT_THERE"})


def test_a_users_reward_receives_the_key_which_is_redacted_in_its_results(tmp_path: Any) -> None:
    options = {"api_key": "env:JUDGE_KEY", "deep": {"keys": ["env:JUDGE_KEY"]}}

    async def main() -> list[Any]:
        settings = RewardSettings(name="tests.rewards.test_secrets:Client", options=options)
        async with RewardAgent(settings=settings, journal=tmp_path / "journal.sqlite") as agent:
            scores = [await agent.score(REQUEST.task, says) for says in ("4", "raise")]
            return [*(score.explanation for score in scores), settings.model_dump_json(), scores[0].parts]

    said = asyncio.run(main())
    assert said[0] == "by [JUDGE_KEY]"
    assert re.fullmatch(r"ValueError: who is \[JUDGE_KEY\]\? \(.*test_secrets.py:\d+\)", said[1])
    assert KEY not in repr(said)
    assert KEY.encode() not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
