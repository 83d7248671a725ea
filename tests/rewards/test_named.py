"""Tests of `load_reward` and `check_reward`: rewards given by name, and one-line errors for unknown names and for
options that do not fit the reward."""

from __future__ import annotations

from typing import Any

import pytest

from gleanrl.rewards.adapter import BUILT_IN, check_reward, load_reward
from gleanrl.rewards.judge import Judge
from gleanrl.utils.errors import UserError
from tests.rewards import graders

HERE = "tests.rewards.graders"
JUDGE = {"base_url": "http://localhost:1/v1", "model": "m"}


def test_a_short_name_and_the_import_path_make_the_same_scorer() -> None:
    short, long = (load_reward(name, options=JUDGE) for name in ("judge", BUILT_IN["judge"]))
    assert short.version == long.version  # type: ignore[attr-defined]
    assert type(short) is type(long)


@pytest.mark.parametrize(
    ("reward", "options", "said"),
    [
        ("jugde", {}, "no reward 'jugde'; did you mean 'judge'?"),
        ("judge", {"base_url": "x"}, "reward judge needs the option 'model'"),
        ("judge", {**JUDGE, "temprature": 1}, "reward judge has no option 'temprature'; did you mean 'temperature'?"),
        ("judge", {**JUDGE, "api_key": "k"}, "reward judge has no option 'api_key'; did you mean 'api_key_env'?"),
        ("judge", {**JUDGE, "setting": "k"}, "reward judge has no option 'setting'"),
        ("judge", {**JUDGE, "scale": [3, 1]}, "reward judge: scale = [3, 1]: the lowest score comes first"),
        ("pooling", {**JUDGE, "endpoint": "x"}, "reward pooling: endpoint = 'x': classify or pooling"),
        ("model", {"model": "m", "too_long": "x"}, "reward model: activation is none or sigmoid, too_long"),
        ("weighted", {"parts": {"a": "jugde"}}, "reward weighted: parts.a: no reward 'jugde'; did you mean 'judge'?"),
        ("weighted", {"parts": {"a": {"reward": "judge", "options": {"x": 1}}}}, "parts.a: reward judge has no option"),
        ("environment", {"x": 1}, "reward environment has no option 'x'; it takes none"),
        (f"{HERE}:length", {"x": 1}, f"reward {HERE}:length has no option 'x'; it takes none"),
        (lambda request, bonus: bonus, {}, "needs the option 'bonus'"),
        (graders.Scaled(), {"scale": 2}, "is made already and takes no options; name its class instead"),
        (Judge(**JUDGE), {"votes": 2}, "reward Judge is made already and takes no options; name its class instead"),
        (f"{HERE}:JUDGE", {"votes": 2}, f"reward {HERE}:JUDGE is made already and takes no options"),
        (f"{HERE}:Scaled", {"scalee": 2}, "has no option 'scalee'; did you mean 'scale'?"),
        (f"verl:{HERE}:compute_score", {"x": 1}, "has no option 'x'"),
        (f"trl:{HERE}:nowhere", {}, "has no 'nowhere'"),
        (f"{HERE}:exact_match", {}, f"trl:{HERE}:exact_match"),
        (graders.compute_score, {}, "verl(compute_score)"),
    ],
)
@pytest.mark.parametrize("how", [check_reward, load_reward])
def test_unknown_names_and_unfitting_options_raise_a_one_line_user_error(
    how: Any, reward: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as error:
        how(reward, options=options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("reward", "options"),
    [
        ("environment", {}),
        ("judge", {**JUDGE, "timeout_s": 3, "connections": 9, "headers": {"X-Team": "blue"}}),
        ("model", {"model": "/no/such/model"}),  # the check does not load the model
        (
            "weighted",
            {"parts": {"environment": {}, "len": f"{HERE}:length", "m": {"reward": "judge", "options": JUDGE}}},
        ),
        (f"{HERE}:Scaled", {"scale": 2}),
        (lambda request, bonus: bonus, {"bonus": 1}),
        (lambda request, **anything: 0, {"bonus": 1}),
        (f"verl:{HERE}:compute_score", {}),
        (f"trl:{HERE}:exact_match", {}),
        (graders.Scaled(), {}),
    ],
)
def test_valid_names_and_options_are_accepted(reward: Any, options: dict[str, Any]) -> None:
    check_reward(reward, options=options)


@pytest.mark.parametrize(
    ("reward", "options", "said"),
    [
        ("judge", {**JUDGE, "max_tokens": 0}, "reward judge: max_tokens = 0: give a whole number of at least 1"),
        ("judge", {**JUDGE, "max_tokens": "8"}, "reward judge: max_tokens = '8'"),
        ("judge", {**JUDGE, "temperature": "hot"}, "reward judge: temperature = 'hot': give a number"),
        ("model", {"model": "m", "max_length": 0}, "reward model: max_length = 0"),
        ("model", {"model": "m", "dtype": "float8"}, "reward model: dtype = 'float8': auto, float32, bfloat16 or"),
        ("model", {"model": "m", "device": "gpu"}, "reward model: device = 'gpu': "),
        (
            "model",
            {"model": "m", "tokens_per_batch": "x"},
            "reward model: a value of reward.options has a wrong type: ",
        ),
        ("judge", {**JUDGE, "extra": 3}, "reward judge: a value of reward.options has a wrong type: 'int' object"),
        ("math", {"format_weight": "x"}, "reward math: a value of reward.options has a wrong type: "),
        (
            "weighted",
            {"parts": {"a": {"reward": "format", "options": 3}}},
            "a value of reward.options has a wrong type",
        ),
    ],
)
def test_values_of_a_wrong_type_raise_a_one_line_user_error(reward: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        check_reward(reward, options=options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_scorer_that_an_import_path_names_is_used_as_it_is() -> None:
    assert load_reward(f"{HERE}:JUDGE") is graders.JUDGE


def test_load_reward_returns_a_loaded_scorer_unchanged() -> None:
    scorer = load_reward("judge", options=JUDGE)
    assert load_reward(scorer) is scorer
