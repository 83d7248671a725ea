"""Tests that every estimator, loss, correction and KL setting trains by the command line, and a user's own too."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gleanrl.algorithms.advantages import ESTIMATORS
from gleanrl.algorithms.loss import POLICY_LOSSES
from gleanrl.utils.registry import Registry
from tests.cli.conftest import CommandLine, assert_same

ESTIMATOR_ARMS: dict[str, dict[str, str]] = {
    "grpo": {},
    "dr_grpo": {},
    "grpo_passk": {"schedule.group": "2"},  # more members tie more often, and a tie teaches nothing
    "rloo": {},
    "opo": {},
    "gpg": {"loss.name": "gpg", "credit.options.f_norm": "2.0"},
    "reinforce_plus_plus": {"credit.options.gamma": "0.99"},
    "reinforce_plus_plus_baseline": {},
    "remax": {},
    "gae": {"credit.options.lam": "0.95"},
    "gigpo": {"credit.options.gamma": "0.9"},
    "state_gae": {},
}
LOSS_ARMS: dict[str, dict[str, str]] = {
    "ppo": {"loss.dual_clip": "2.0"},
    "gspo": {},
    "cispo": {},
    "gpg": {},
    "reinforce": {"loss.correction": "truncate"},
    "clip_cov": {"loss.options.share": "0.1", "loss.options.low": "0.0"},
    "kl_cov": {"loss.options.share": "0.1"},
}
OTHER_ARMS: dict[str, dict[str, str]] = {
    "shared critic": {"credit.estimator": "gae", "critic.model": "shared", "critic.warmup_steps": "1"},
    "remax, single attempts": {"credit.estimator": "remax", "schedule.group": "1", "schedule.min_valid": "1"},
    "decoupled": {"loss.correction": "mask", "learner.old_logprobs": "recompute"},
    "decoupled, without a forward": {
        "loss.correction": "mask",
        "loss.correction_level": "sequence",
        "learner.old_logprobs": "loglinear",
        "schedule.preset": "bounded_async",
        "schedule.chunks": "2",
    },
    "geometric band": {
        "loss.correction": "mask",
        "loss.correction_level": "geometric",
        "loss.correction_floor": "0.5",
        "learner.old_logprobs": "recompute",
        "loss.aggregation": "seq-mean-token-mean",
    },
    "kl in the loss": {"loss.kl_coefficient": "0.05", "loss.kl": "k1+"},
    "kl in the reward": {"loss.kl_coefficient": "0.05", "loss.kl_in": "reward", "loss.kl_target": "0.001"},
    "kl in the reward, recomputed": {
        "loss.kl_coefficient": "0.05",
        "loss.kl_in": "reward",
        "learner.old_logprobs": "recompute",
    },
    "dr_grpo as published": {"credit.estimator": "dr_grpo", "loss.aggregation": "seq-mean-token-sum-norm"},
}
ARMS = {
    **{f"estimator {name}": {"credit.estimator": name, **more} for name, more in ESTIMATOR_ARMS.items()},
    **{f"loss {name}": {"loss.name": name, **more} for name, more in LOSS_ARMS.items()},
    **OTHER_ARMS,
}
SHORT = ("--run.steps", "2", "--evaluation.every", "0", "--environment.eval_tasks", "1")


def options(settings: dict[str, str]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def test_every_built_in_estimator_and_loss_has_a_case() -> None:
    def built_in(registry: Registry) -> set[str]:
        return {n for n in registry.names() if registry.get(n).function.__module__.startswith("gleanrl.")}

    assert built_in(ESTIMATORS) == set(ESTIMATOR_ARMS)
    assert built_in(POLICY_LOSSES) == set(LOSS_ARMS)


@pytest.mark.parametrize("name", ARMS)
def test_every_estimator_loss_correction_and_kl_setting_trains(gleanrl: CommandLine, name: str) -> None:
    ended = gleanrl.train("arm", *SHORT, *options(ARMS[name]))
    assert ended.status == 0, ended.stderr
    run = gleanrl.run("arm")
    rows = [row.metrics for row in run.read_metrics()]
    assert all(math.isfinite(value) for metrics in rows for value in metrics.values())
    steps = [metrics for metrics in rows if "updates/done" in metrics]
    assert len(steps) == 2
    assert sum(metrics["updates/done"] for metrics in steps) > 0
    assert max(metrics["learner/grad_norm"] for metrics in steps if "learner/grad_norm" in metrics) > 0
    if ARMS[name].get("credit.estimator") == "gae":
        assert steps[-1]["critic/loss"] >= 0
    if ARMS[name].get("credit.estimator") == "remax":
        assert all("reward/greedy" in metrics for metrics in steps)
    if "loss.kl_coefficient" in ARMS[name]:
        assert steps[-1]["loss/reference_kl"] != 0
        assert (steps[-1]["loss/kl_coefficient"] != 0.05) == ("loss.kl_target" in ARMS[name])
    exported = load_file(run.path / "model" / "model.safetensors")
    assert not any("head.bias" in key or key.startswith("critic") for key in exported)


@pytest.mark.parametrize("name", ["estimator gae", "estimator remax", "kl in the reward", "shared critic"])
def test_a_run_killed_and_resumed_equals_an_undisturbed_one_bit_for_bit(
    make_gleanrl: Callable[[], CommandLine], name: str
) -> None:
    whole, killed = make_gleanrl(), make_gleanrl()
    settings = [*options(ARMS[name]), "--run.steps", "4", "--checkpoint.every", "1", "--evaluation.every", "0"]
    assert whole.train("run", *settings).status == 0
    at = ("gleanrl.learners.engine:LocalEngine.step", 3, "SIGKILL")
    assert killed.train("run", *settings, at=at).status == -9
    ended = killed.train("run", *settings, "--resume")
    assert ended.status == 0, ended.stderr
    assert_same(whole.run("run"), killed.run("run"))


PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "algorithm.md").read_text()
MINE, ALONE = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)
BY_NAME, BY_PATH = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
PLAIN = """
def plain(tokens, settings):
    return -tokens.advantages * tokens.logp

@replay_loss("by_mean", scope="update", precompute=lambda tokens, settings: tokens.logp.mean().expand_as(tokens.logp))
def by_mean(tokens, settings):
    return -tokens.advantages * (tokens.logp - tokens.precomputed)
"""


@pytest.mark.parametrize("settings", [BY_NAME, BY_PATH], ids=["by name", "by path"])
def test_the_algorithm_page_s_own_loss_and_estimator_train(gleanrl: CommandLine, settings: str) -> None:
    (gleanrl.folder / "mine.py").write_text(MINE)
    chosen = tomllib.loads(settings)
    given = {f"{section}.{key}": toml(value) for section, table in chosen.items() for key, value in table.items()}
    more = ("--schedule.preset", "pipelined", "--schedule.chunks", "2") if settings is BY_PATH else ()
    ended = gleanrl.train("own", *SHORT, *options(given), *more)
    assert ended.status == 0, ended.stderr
    written = tomllib.loads(gleanrl.run("own").config_path.read_text())
    assert written["credit"]["options"] == chosen["credit"]["options"]


def toml(value: object) -> str:
    """Return a TOML value as written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {item}" for key, item in value.items()) + "}"
    return str(value)


def test_the_algorithm_page_s_standalone_code_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "'loss/ratio/mean': 1.105" in done.stdout


REFUSED = {
    "no such option": ({"credit.options.gama": "0.9", "credit.estimator": "gae"}, r"did you mean 'gamma'\?"),
    "option of another": (
        {"credit.options.gamma": "0.9"},
        r"credit.options.gamma: estimator 'grpo' has no such option",
    ),
    "an input as option": ({"credit.options.values": "1", "credit.estimator": "gae"}, r"credit\.options\.values"),
    "no such loss option": ({"loss.name": "kl_cov", "loss.options.shar": "0.1"}, r"did you mean 'share'\?"),
    "not decorated": ({"loss.name": "mine.py:plain"}, r"is a plain function; put @gleanrl.algorithms.loss.policy_loss"),
    "not there": ({"loss.name": "mine.py:pulled_bak"}, r"has no 'pulled_bak'; did you mean 'pulled_back'\?"),
    "no such replay loss": ({"loss.replay_mode": "shap"}, r"loss.replay_mode: unknown value 'shap'; did you mean"),
    "no replay loss": ({"loss.replay_mode": "mine.py:pulled_back"}, r"put @gleanrl.algorithms.loss.replay_loss"),
    "no such ranking": (
        {"replay.enabled": "true", "replay.select": "newst"},
        r"replay.select: unknown value 'newst'; did you mean 'newest'",
    ),
    "not a ranking": (
        {"replay.enabled": "true", "replay.select": "mine.py:plain"},
        r"is a plain function; put @gleanrl.experience.pool.ranking.ranking",
    ),
    "a whole update of replayed tokens in chunks": (
        {"loss.replay_mode": "mine.py:by_mean", "schedule.preset": "pipelined", "schedule.chunks": "2"},
        r"loss.replay_mode = 'mine.py:by_mean' looks at all tokens of an update, .*use sync or one_step_off",
    ),
    "whitening in chunks": (
        {"credit.estimator": "gae", "schedule.preset": "pipelined", "schedule.chunks": "2"},
        r"'gae' normalises over the whole batch, .*use sync or one_step_off",
    ),
    "a whole update in chunks": (
        {"loss.name": "clip_cov", "schedule.preset": "pipelined", "schedule.chunks": "2"},
        r"'clip_cov' looks at all tokens of an update, .*use sync or one_step_off",
    ),
    "a correction of nothing": ({"loss.correction": "mask"}, r"would do nothing: .*use 'recompute' or 'loglinear'"),
    "a target without a coefficient": ({"loss.kl_target": "0.1"}, r"loss\.kl_target.*loss\.kl_coefficient"),
    "one of a pair": (
        {"credit.estimator": "grpo_passk", "schedule.min_valid": "1"},
        r"compares the best two; set schedule.min_valid to 2",
    ),
    "groups of one": (
        {"credit.estimator": "grpo_passk", "replay.enabled": "true", "replay.grouping": "own"},
        r"compares the best two of a group, but replay.grouping = 'own'",
    ),
    "one fresh member": (
        {
            **{"replay.enabled": "true", "replay.placement": "replace"},
            **{"replay.per_group": "3", "schedule.group": "4"},
        },
        r"replay.per_group = 3 with placement = 'replace' leaves one fresh member of schedule.group = 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_algorithm_settings_are_refused_in_one_line(gleanrl: CommandLine, name: str) -> None:
    (gleanrl.folder / "mine.py").write_text(MINE + PLAIN)
    settings, message = REFUSED[name]
    for more in ([], ["--dry-run"]):
        ended = gleanrl.here("train", "tiny.toml", "--run.name", "refused", *options(settings), *more)
        assert ended.status == 2
        assert re.search(message, ended.complaint)
    assert not gleanrl.run("refused").config_path.exists()
