"""`gleanrl.config.validate` rejects or warns about combinations of settings from several sections."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gleanrl import samplers
from gleanrl.config import loading as configuration
from gleanrl.config import validate
from gleanrl.utils.errors import UserError

PIPELINED = ("pipelined", "pipelined_one_step_off", "bounded_async")


def load(**settings: str) -> configuration.Config:
    return configuration.load("quickstart", [(name.replace("__", "."), value) for name, value in settings.items()])


@pytest.mark.parametrize("wants", [{"credit__estimator": "reinforce_plus_plus"}, {"loss__name": "clip_cov"}])
@pytest.mark.parametrize("preset", PIPELINED)
def test_algorithms_that_need_the_whole_batch_are_rejected_only_with_several_chunks(
    preset: str, wants: dict[str, str]
) -> None:
    validate.check(load(schedule__preset=preset, schedule__chunks="1", **wants))
    with pytest.raises(UserError, match=r"use sync or one_step_off, or schedule\.chunks = 1"):
        validate.check(load(schedule__preset=preset, schedule__chunks="2", **wants))
    for whole in ("sync", "one_step_off"):
        validate.check(load(schedule__preset=whole, schedule__chunks="2", **wants))


@pytest.mark.parametrize("old", ["recompute", "loglinear"])
def test_decoupled_ppo_without_a_correction_warns(old: str) -> None:
    stale = {"schedule__preset": "one_step_off", "learner__old_logprobs": old}
    [line] = validate.warnings(load(**stale))
    assert f"learner.old_logprobs = '{old}'" in line
    assert "loss.correction = 'mask'" in line
    assert "\n" not in line
    fine = [
        {**stale, "loss__correction": "mask"},
        {**stale, "loss__name": "reinforce"},
        {**stale, "learner__old_logprobs": "sampler"},
        {**stale, "schedule__preset": "pipelined"},
        {},
    ]
    for settings in fine:
        assert validate.warnings(load(**settings)) == []


@pytest.mark.parametrize("bound", [{"floor": "6"}, {"floor": "1.5"}, {"cap": "0.5"}])
def test_a_mask_that_leaves_out_on_policy_tokens_is_refused(bound: dict[str, str]) -> None:
    settings = {f"loss__correction_{name}": value for name, value in bound.items()}
    validate.check(load(learner__old_logprobs="recompute", loss__correction="truncate", **settings))
    with pytest.raises(UserError, match=r"loss\.correction = 'mask'.*; include 1"):
        validate.check(load(learner__old_logprobs="recompute", loss__correction="mask", **settings))


def test_a_correction_of_loglinear_log_probs_without_staleness_warns() -> None:
    settings = {"learner__old_logprobs": "loglinear", "loss__correction": "mask"}
    [line] = validate.warnings(load(schedule__preset="sync", **settings))
    assert "loss.correction = 'mask' has no effect" in line
    assert not validate.warnings(load(schedule__preset="one_step_off", **settings))


def test_an_option_without_a_default_must_be_given(tmp_path: Path) -> None:
    own = tmp_path / "needy.py"
    own.write_text(
        "from gleanrl.algorithms.advantages import estimator\n"
        "from gleanrl.algorithms.loss import policy_loss\n"
        "@policy_loss('needy')\n"
        "def loss(tokens, settings, strength): return -strength * tokens.advantages * tokens.ratio\n"
        "@estimator('needy', group_local=True, group_baseline=True)\n"
        "def credit(rewards, *, margin): return rewards.centred[:, None] - margin, rewards.centred[:, None]\n"
    )
    for section, setting, option in (("loss", "name", "strength"), ("credit", "estimator", "margin")):
        named = {f"{section}__{setting}": f"{own}:{'loss' if section == 'loss' else 'credit'}"}
        with pytest.raises(UserError, match=rf"{section}\.options\.{option}: .* has no default for it; set it"):
            validate.check(load(**named))
        validate.check(load(**named, **{f"{section}__options.{option}": "0.5"}))


def test_an_option_of_a_wrong_type_or_out_of_its_range_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "typed.py"
    own.write_text(
        "from __future__ import annotations\n"
        "from gleanrl.algorithms.advantages import estimator\n"
        "from gleanrl.algorithms.loss import policy_loss\n"
        "@policy_loss('typed')\n"
        "def loss(tokens, settings, bounds: tuple[float, float] | None = None, own=1): return -tokens.logp\n"
        "@estimator('typed', group_local=True)\n"
        "def credit(rewards, *, centre: bool = True): return rewards.centred[:, None], rewards.centred[:, None]\n"
    )
    for section, chosen, option, right, wrong in (
        ("loss", f"name={own}:loss", "bounds", ["[0, 1.5]"], ["[0, 'x']", "true"]),
        ("loss", f"name={own}:loss", "own", ["1", "'x'"], []),  # has no annotation
        ("loss", "name=kl_cov", "coefficient", ["2"], ["'x'", "true", "[1.0]"]),
        ("loss", "name=clip_cov", "low", ["0.1", "-inf"], ["'0.1'"]),
        ("loss", "name=clip_cov", "share", ["1"], ["'0.1'", "0", "1.1", "nan"]),
        ("credit", f"estimator={own}:credit", "centre", ["false"], ["'false'", "0"]),
        ("credit", "estimator=gpg", "f_norm", ["2"], ["'2'", "0", "inf"]),
        ("credit", "estimator=reinforce_plus_plus", "gamma", ["1"], ["'0.9'", "1.1", "nan"]),
        ("credit", "estimator=reinforce_plus_plus", "whiten", ["false"], ["'no'", "1"]),
    ):
        key, _, value = chosen.partition("=")
        for given in right:
            validate.check(load(**{f"{section}__{key}": value, f"{section}__options.{option}": given}))
        for given in wrong:
            with pytest.raises(UserError, match=rf"^{section}\.options\.{option}\S* = .*: input should "):
                validate.check(load(**{f"{section}__{key}": value, f"{section}__options.{option}": given}))


@pytest.mark.parametrize("betas", ["[0.9, 1.0]", "[1.2, 0.95]", "[-0.1, 0.95]", "[0.9, nan]"])
def test_decay_rates_of_the_optimizer_are_below_one(betas: str) -> None:
    with pytest.raises(UserError, match=r"learner\.betas"):
        load(learner__betas=betas)


def test_stored_trajectories_next_to_a_group_judge_warn() -> None:
    judged = {"reward__name": "group_judge"}
    [line] = validate.warnings(load(**judged, replay__enabled="true"))
    assert "reward.name = 'group_judge'" in line
    assert "\n" not in line
    assert validate.warnings(load(**judged)) == []


def test_a_group_judge_scores_no_stored_trajectory_again() -> None:
    """Alone it would get another score than in its group, and would be evicted."""
    options = {"reward__options.base_url": "http://a/v1", "reward__options.model": "m"}
    judged = {"reward__name": "group_judge", **options, "replay__reverify": "true"}
    with pytest.raises(UserError, match=r"replay\.reverify"):
        validate.check(load(**judged, replay__enabled="true"))
    validate.check(load(**judged, replay__enabled="false"))


SERVER = {"sampler__name": "openai", "sampler__options.base_url": "http://a/v1"}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "can train only where the server takes new weights"),
        ({"sampler__options.update": "none"}, "can train only where the server takes new weights"),
        (
            {"sampler__options.update": "vllm", "sampler__evaluation_options.base_url": "http://a/v1"},
            "need a server each",
        ),
    ],
)
def test_a_server_that_takes_no_weights_or_also_serves_evaluation_is_rejected(settings: dict, why: str) -> None:
    with pytest.raises(UserError, match=why):
        validate.check(load(**SERVER, **settings))


@pytest.mark.parametrize("own", [{}, {"sampler__evaluation_options.base_url": "http://b/v1"}])
def test_evaluation_uses_the_same_server_or_one_of_its_own(own: dict) -> None:
    config = load(**SERVER, **{"sampler__options.update": "vllm"}, **own)
    validate.check(config)
    assert samplers.shares_with_evaluation(config) is not bool(own)


@pytest.mark.parametrize(
    "wants",
    [{"learner__pipeline_parallel": "2"}, {"learner__distributed_optimizer": "true"}],
)
def test_settings_of_megatron_need_its_backend(wants: dict[str, str]) -> None:
    with pytest.raises(UserError, match="megatron"):
        validate.check(load(learner__ranks="2", **wants))


def test_megatron_needs_its_package_where_the_learner_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node of a Ray cluster may have it, so it is not looked for on this one."""
    settings = {"learner__ranks": "2", "learner__backend": "megatron", "learner__pipeline_parallel": "2"}
    find = importlib.util.find_spec
    for installed in (True, False):
        spec = find("gleanrl") if installed else None
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, spec=spec: spec if name == "megatron" else find(name)
        )
        validate.check(load(**settings, ray__enabled="true"))
        if installed:
            validate.check(load(**settings))
        else:
            with pytest.raises(UserError, match="pip install"):
                validate.check(load(**settings))


def test_groups_of_equal_scores_are_dropped_only_where_they_have_no_advantage() -> None:
    drop = {"credit__zero_variance": "drop"}
    for name in ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"):
        validate.check(load(credit__estimator=name, **drop))
    in_reward = {"loss__kl_in": "reward", "loss__kl_coefficient": "0.1"}
    names = ("remax", "gae", "reinforce_plus_plus", "gigpo", "state_gae")
    for settings in (in_reward, *({"credit__estimator": name} for name in names)):
        validate.check(load(**settings))
        with pytest.raises(UserError, match=r"credit\.zero_variance = 'drop'.*; use 'keep'"):
            validate.check(load(**settings, **drop))


def test_advantages_of_parts_need_an_estimator_that_compares_a_group_and_parts_that_exist() -> None:
    weighted = {"reward__name": "weighted", "reward__options.parts.format.reward": "format"}
    weighted["reward__options.parts.format.options.pattern"] = "<answer>"
    part = {"credit__per_part.format": "0.5"}
    for estimator in ("grpo", "dr_grpo", "rloo", "opo"):
        validate.check(load(credit__estimator=estimator, **weighted, **part))
    validate.check(load(**part))  # which parts an environment gives is only known later
    criteria = '[{name = "form", text = "It has the right form."}]'
    rubric_reward = {"reward__name": "rubric", "reward__options.criteria": criteria}
    rubric_reward |= {"reward__options.base_url": "http://localhost:1/v1", "reward__options.model": "judge"}
    validate.check(load(**rubric_reward, **{"credit__per_part.form": "0.5", "credit__per_part.vote/failed": "0.1"}))
    with pytest.raises(UserError, match="did you mean 'form'"):
        validate.check(load(**rubric_reward, **part))
    refused: list[tuple[dict[str, str], str]] = [
        ({"credit__estimator": "gae"}, "compares the members of a group"),
        ({"credit__estimator": "remax"}, "compares the members of a group"),
        ({"credit__per_part.fromat": "1.0"}, "did you mean 'format'"),
        ({"credit__per_part.format": "nan"}, "finite"),
        ({"loss__kl_in": "reward", "loss__kl_coefficient": "0.1"}, "loss.kl_in"),
        ({"schedule__dynamic_sampling": "true"}, "schedule.dynamic_sampling"),
        ({"replay__enabled": "true", "replay__grouping": "own"}, "replay.grouping"),
    ]
    for settings, why in refused:
        with pytest.raises(UserError, match=why):
            validate.check(load(**{**weighted, **part, **settings}))


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule__group": "1"},
        {"schedule__group": "4", "replay__min_rate": "0.3", "replay__max_rate": "0.45"},
        {"replay__start_progress": "1.0"},
        {"replay__task_ratio": "0.1", "schedule__batch": "8"},
        {"schedule__preset": "bounded_async", "schedule__staleness": "3", "replay__max_age": "3"},
    ],
)
def test_settings_under_which_nothing_is_ever_replayed_are_named(settings: dict[str, str]) -> None:
    [line] = validate.warnings(load(**settings, replay__enabled="true"))
    assert "replay" in line
