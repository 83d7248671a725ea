"""Loading a configuration (`gleanrl.config`): presets, overrides, defaults, and the errors for wrong values.

Every error is one line that names the wrong key.
"""

from __future__ import annotations

import math
import re
import tomllib
from datetime import date
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import pytest

import gleanrl
from gleanrl.cli.main import parse_overrides
from gleanrl.config import settings, validate
from gleanrl.config.aliases import OTHER_NAMES
from gleanrl.config.loading import JOBS, fields, load, load_job, load_stored, presets
from gleanrl.config.settings import Config, Settings
from gleanrl.config.validate import check_resumed
from gleanrl.utils.errors import UserError
from gleanrl.utils.settings import JobConfig


def load_and_check(overrides: list[tuple[str, str]]) -> None:
    """Load and check a configuration in the way the command line does before it starts a run."""
    validate.check(load("quickstart", overrides))


def test_every_preset_is_valid_and_unchanged_after_writing_and_reading_toml() -> None:
    for name in presets():
        config = load_job(name)
        assert type(config).model_validate(tomllib.loads(config.to_toml())) == config
        assert str(config.path) in config.plan().values()


def test_infinite_numbers_dates_and_none_are_unchanged_after_writing_and_reading_toml() -> None:
    parts = {"environment": {"clip": [0.0, math.inf]}}
    config = Config(
        environment=settings.EnvironmentSettings(options={"since": date(2024, 1, 1), "names": {"a b": [1, 2.5]}}),
        reward=settings.RewardSettings(options={"parts": parts}),
        critic=settings.CriticSettings(clip=None),
        loss=settings.LossSettings(dual_clip=None),
    )
    assert Config.model_validate(tomllib.loads(config.to_toml())) == config
    assert load("quickstart", [("loss.dual_clip", "none")]).loss.dual_clip is None


@pytest.mark.parametrize("steps", [1, 5, 6])
@pytest.mark.parametrize("every", [0, 1, 5, 9])
@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("greedy", [True, False])
def test_the_plan_counts_the_evaluations_that_the_run_makes(
    steps: int, every: int, at_start: bool, greedy: bool
) -> None:
    sections = {
        "run": {"steps": steps},
        "environment": {"eval_tasks": 10},
        "evaluation": {"every": every, "at_start": at_start, "greedy": greedy, "samples": 3},
    }
    # This repeats the rule of `train.start_evaluation_if_due`. Without `at_start`, the evaluator skips step 0.
    due = [step for step in range(steps + 1) if step in (0, steps) or (every and step % every == 0)]
    count = len(due) - (not at_start)
    episodes = count * 10 * (3 + greedy)
    assert Config.model_validate(sections).plan()["evaluation"] == (
        f"{count} x 10 held-out tasks, 3 sampled{' and 1 greedy' if greedy else ''} each = {episodes} episodes"
    )


def test_overrides_are_parsed_according_to_the_type_of_their_field() -> None:
    config = load(
        "quickstart",
        [
            ("learner.lr", "1e-3"),
            ("run.name", "007"),
            ("context.system_prompt", "12"),
            ("evaluation.greedy", "false"),
            ("environment.options.goals", "['heat', 'cool']"),
            ("monitor.use", "['file']"),
        ],
    )
    assert config.learner.lr == 1e-3
    assert config.run.name == "007"
    assert config.context.system_prompt == "12"
    assert config.evaluation.greedy is False
    assert config.environment.options["goals"] == ["heat", "cool"]
    assert config.monitor.use == ("file",)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lerner.lr", "1", ["'lerner.lr'", "'learner.lr'"]),
        ("learner.rl", "1", ["'learner.rl'", "'learner.lr'"]),
        ("loss.beta", "1", ["'loss.beta'", "'loss.kl_coefficient'"]),
        ("num_generations", "8", ["--section.key", "'schedule.group'"]),
        ("steps_per_generation", "8", ["'learner.updates_per_step'"]),
        ("peft_config", "x", ["'learner.lora_rank'"]),
        ("reward_weights", "[1]", ["'reward.options'"]),
        ("actor_rollout_ref.rollout.n", "8", ["'actor_rollout_ref.rollout.n'", "'schedule.group'"]),
        ("schedule.ppo_epoch", "2", ["'schedule.ppo_epoch'", "'learner.epochs'"]),
        ("sampler.min_p", "0.9", ["'sampler.min_p'", "'sampler.temperature'"]),
        ("trainer.resume_mode", "auto", ["'--resume'"]),
        ("actor_rollout_ref.rollout.mode", "async", ["'schedule.preset'"]),
        ("trainer.balance_batch", "true", ["'trainer.balance_batch'", "; sections: run"]),
        ("learner.learning_rat", "1", ["learner.learning_rat"]),
        ("learner.lrs", "1", ["'learner.lr'"]),
        ("lr", "1", ["--section.key", "'learner.lr'"]),
        ("learner.lr", "fast", ["learner.lr = 'fast'", "number"]),
        ("learner.lr", "-1", ["learner.lr = -1", "greater than 0"]),
        ("schedule.group", "1", ["schedule.group = 1", "2 or more"]),
        ("schedule.min_valid", "9", ["schedule.min_valid = 9", "schedule.group = 8"]),
        ("learner.updates_per_step", "5", ["schedule.batch = 16", "learner.updates_per_step = 5"]),
        ("context.max_tokens_per_turn", "4096", ["context.max_tokens_per_turn", "model.max_context"]),
        ("sampler.temperature", "0", ["sampler.temperature = 0"]),
        ("sampler.temperature", "1e-39", ["sampler.temperature = 1e-39"]),
        ("model.heads", "3", ["model.hidden_size = 128", "model.heads = 3"]),
        ("schedule.preset", "synch", ["schedule.preset = 'synch'", "'sync'"]),
        ("replay.exp_ratio", "0.5", ["replay.task_ratio"]),  # names of AgentEvolver
        ("replay.off_cliprange_high", "1", ["loss.replay_clip_high"]),
        ("exp_manager.experience_replay.exp_ratio", "0.5", ["'replay.task_ratio'"]),
    ],
)
def test_the_error_for_a_wrong_key_or_value_names_it_and_suggests_a_correction(
    key: str, value: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        load_and_check([(key, value)])
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_every_name_of_another_trainer_stands_for_a_setting_and_is_none_itself() -> None:
    keys = {key for key, _ in fields(Config)}
    assert OTHER_NAMES.keys() <= keys | {"--resume"}
    assert keys.isdisjoint(name for names in OTHER_NAMES.values() for name in names)


@pytest.mark.parametrize("after", [[], ["--run.steps", "3"]])
def test_a_key_without_a_value_turns_a_boolean_on_and_is_an_error_otherwise(after: list[str]) -> None:
    config = load("quickstart", parse_overrides(["--replay.enabled", *after]))
    assert (config.replay.enabled, config.run.steps) == (True, 3 if after else load("quickstart").run.steps)
    assert load("quickstart", parse_overrides(["--loss.entropy_coefficient", "-1"])).loss.entropy_coefficient == -1
    for key in ("learner.lr", "run.name", "environment.options.goals"):
        with pytest.raises(UserError, match=f"--{key} needs a value"):
            load("quickstart", parse_overrides([f"--{key}", *after]))


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_no_setting_takes_an_infinite_number_or_nan(number: str) -> None:
    plain = [("quickstart", name) for name, field in fields(Config) if field.annotation is float]
    plain += [("pendulum", name) for name, field in fields(JOBS["embodied"]) if field.annotation is float]
    plain += [("quickstart", name) for name in ("critic.clip", "loss.dual_clip", "credit.per_part.format")]
    assert len(plain) > 40
    for preset, name in plain:
        with pytest.raises(UserError, match=rf"^{preset}: {re.escape(name)} = {number}: "):
            load_job(preset, [(name, number)])


def test_chunks_must_divide_the_batch_and_are_rejected_with_batch_statistics() -> None:
    with pytest.raises(UserError, match=r"schedule\.chunks = 5"):
        load_and_check([("schedule.preset", "pipelined"), ("schedule.chunks", "5")])
    with pytest.raises(UserError, match="whole batch"):
        load_and_check([("schedule.preset", "pipelined"), ("credit.estimator", "reinforce_plus_plus")])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run\n", ["bad.toml", "not valid TOML", "line 1"]),
        ("steps = 3\n", ["bad.toml", "'steps'", "'run.steps'"]),
        ("[run]\nsteps = 0\n", ["bad.toml", "run.steps = 0"]),
        ("[run]\nname = 'a/b'\n", ["bad.toml", "run.name"]),
        ("[run]\nname = '..'\n", ["bad.toml", "run.name"]),
        ("run = 3\n", ["bad.toml", "run = 3"]),
        ("job = ['x']\n", ["bad.toml", "job = ['x']"]),
        ("# f\xfcr\n", ["bad.toml", "not valid TOML", "utf-8"]),
        ("[trainer]\n[trainer.x]\ntest_freq = 3\n", ["bad.toml", "'trainer.x.test_freq'", "'evaluation.every'"]),
    ],
)
def test_the_error_for_an_invalid_file_names_the_file_and_the_key(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as error:
        load(str(path))
    for word in words:
        assert word in str(error.value)


def test_a_missing_file_and_a_mistyped_preset_raise_clear_errors() -> None:
    with pytest.raises(UserError, match=r"cannot read nowhere\.toml"):
        load("nowhere.toml")
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        load("quickstrt")


@pytest.mark.parametrize("job", [Config, *JOBS.values()])
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_resumed_run_may_change_exactly_the_settings_that_the_page_lists(job: type[JobConfig]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "run-folder.md").read_text()
    patterns = dict(re.findall(r'^```text title="([^"]+)"\n(.+?)```', page, re.DOTALL | re.MULTILINE))[job.kind].split()
    others = {int: 7, float: 0.375, str: "other", tuple: ("other",), dict: {"other": 1}, type(None): 7}
    before, refused = job.model_validate({"replay": {"enabled": True}} if job is Config else {}), 0
    for key in (key for key, _ in fields(job) if "." in key):
        section, _, name = key.partition(".")
        settings = getattr(before, section)
        old = getattr(settings, name)
        other = not old if isinstance(old, bool) else others[type(old)]
        now = before.model_copy(update={section: settings.model_copy(update={name: other})})
        if any(fnmatchcase(key, pattern) for pattern in patterns):
            check_resumed(before, now)
        else:
            refused += 1
            with pytest.raises(UserError, match=f"started with {re.escape(key)} = "):
                check_resumed(before, now)
    assert refused > 20
    assert [pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key, _ in fields(job))] == []


def test_settings_of_replay_are_compared_on_a_resume_only_if_it_is_on_before_and_now() -> None:
    before, on, changed = load("quickstart"), ("replay.enabled", "true"), ("replay.per_group", "2")
    states = [load("quickstart", given) for given in ([], [changed], [on], [on, changed])]
    for old, new in product(states, states):
        if old.replay.enabled and new.replay.enabled and old != new:
            with pytest.raises(UserError, match=r"replay\.per_group"):
                check_resumed(old, new)
        else:
            check_resumed(old, new)
    for section in ("guidance", "warm_start"):
        with pytest.raises(UserError, match=f"{section}.enabled"):
            check_resumed(before, load("quickstart", [(f"{section}.enabled", str(section == "guidance").lower())]))


def test_a_stored_configuration_is_equal_to_the_one_that_resumes_it(tmp_path: Path) -> None:
    for name in presets():
        config = load_job(name)
        (tmp_path / "config.toml").write_text(config.to_toml())
        check_resumed(load_stored(tmp_path / "config.toml"), config)


def test_replay_takes_the_success_threshold_of_the_reward_unless_it_has_its_own() -> None:
    graded = ("reward.success_threshold", "0.8")
    assert load("quickstart", [graded]).replay.success_threshold == 0.8
    assert load("quickstart", [graded, ("replay.success_threshold", "0.6")]).replay.success_threshold == 0.6


@pytest.mark.parametrize("job", [Config, *JOBS.values()])
def test_every_setting_has_a_help_text_of_at_most_360_characters(job: type[JobConfig]) -> None:
    texts = {name: " ".join((field.description or "").split()) for name, field in fields(job)}
    assert [name for name, text in texts.items() if not text.endswith(".")] == []
    assert [name for name, text in texts.items() if len(text) > 360] == []


def test_every_setting_is_read_by_some_module_of_the_package() -> None:
    """A setting that no module reads would be accepted without any effect.

    The test searches the source for the name of each setting.
    """
    package = Path(gleanrl.__file__).parent
    files = set(package.rglob("*.py")) - {package / "config" / "settings.py"}
    source = "\n".join(path.read_text() for path in files)
    sections = [value for value in vars(settings).values() if isinstance(value, type) and issubclass(value, Settings)]
    # The settings of Ray are read by names that are computed from the kind of the actor.
    sections.remove(settings.RaySettings)
    assert len(sections) > 10
    unread = [
        f"{section.__name__}.{name}"
        for section in sections
        for name in section.model_fields
        if not re.search(rf"\b{name}\b", source)
    ]
    assert not unread


@pytest.mark.parametrize(
    ("given", "lr", "tokens"),
    [
        ([], 2e-4, 16),
        ([("model.init", "a/model")], 1e-6, 256),
        ([("model.init", "a/model"), ("model.max_context", "200")], 1e-6, 100),
        ([("model.init", "a/model"), ("learner.lora_rank", "8")], 1e-5, 256),
        ([("model.init", "a/model"), ("learner.lr", "2e-4")], 2e-4, 256),
        ([("model.init", "a/model"), ("context.max_tokens_per_turn", "16")], 1e-6, 16),
    ],
)
def test_defaults_of_lr_and_max_tokens_per_turn_depend_on_the_model(
    tmp_path: Path, given: list[tuple[str, str]], lr: float, tokens: int
) -> None:
    (tmp_path / "own.toml").write_text("[run]\nsteps = 3\n")
    config = load(str(tmp_path / "own.toml"), given)
    (tmp_path / "resolved.toml").write_text(config.to_toml())
    for found in (config, load(str(tmp_path / "resolved.toml"))):
        assert found.learner.lr == lr
        assert found.context.max_tokens_per_turn == tokens
