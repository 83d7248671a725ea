"""Whether what a configuration names can be had and fits (environment, reward, algorithms), before anything is made."""

from __future__ import annotations

from gleanrl import environments, samplers
from gleanrl.algorithms.credit import ESTIMATORS, check_options
from gleanrl.algorithms.estimators import INPUTS
from gleanrl.algorithms.loss import find, scope_of
from gleanrl.config.loading import Config
from gleanrl.experience.guidance import guidance
from gleanrl.experience.replay.curriculum import check as check_replay
from gleanrl.rewards import forms
from gleanrl.schedule.schedule import Schedule
from gleanrl.tracking import monitors
from gleanrl.utils.errors import UserError


def check(config: Config) -> None:
    """What `gleanrl.config.loading` cannot see without knowing the algorithms; a user's own are imported here.

    Raises:
        UserError: an unknown name or option, or the first combination that cannot work, and the mend.
    """
    _check_estimator(config)
    _check_mixed_groups(config)
    _check_loss(config)
    _check_server(config)
    if config.replay.enabled:
        check_replay(config.replay, config.schedule.group)
    forms.check(config.reward.name, options=config.reward.options)
    environments.check(config.environment)
    monitors.check(config.monitor)
    if not config.ray.enabled:  # else samplers are made elsewhere
        samplers.check(config.sampler.name)
    if config.guidance.enabled:
        guidance.check(config.guidance)


def warnings(config: Config) -> list[str]:
    """What works, but hardly as it was meant: a line each."""
    stale = Schedule.from_settings(config.schedule).staleness
    decoupled = find(config.loss).ratio and config.learner.old_logprobs != "sampler"
    if decoupled and stale and config.loss.correction == "none":
        return [
            f"learner.old_logprobs = {config.learner.old_logprobs!r} under staleness {stale}: nothing weighs by "
            "proximal / behaviour while loss.correction = 'none'; decoupled PPO has loss.correction = 'mask'"
        ]
    return []


def _in_chunks(config: Config) -> bool:
    """Whether the learner gets a batch in parts."""
    schedule = Schedule.from_settings(config.schedule)
    return schedule.chunk < schedule.batch


def _check_estimator(config: Config) -> None:
    settings, schedule = config.credit, config.schedule
    estimator = ESTIMATORS.get(settings.estimator)
    check_options(settings.estimator, settings.options)
    for option in settings.options:
        if option in estimator.needs:
            raise UserError(f"credit.options.{option}: a run makes {option} itself; leave it out")
    unknown = sorted(estimator.needs - INPUTS.keys())
    if unknown:
        raise UserError(f"credit.estimator {settings.estimator!r} needs {unknown[0]!r}, which no run can give it")
    if schedule.group == 1 and estimator.group_baseline:
        raise UserError(
            f"schedule.group = 1 gives {settings.estimator} no baseline, so every advantage would be 0 or raw; "
            "set schedule.group to 2 or more"
        )
    if schedule.min_valid > schedule.group:
        raise UserError(
            f"schedule.min_valid = {schedule.min_valid} can never be met by schedule.group = {schedule.group}; lower it"
        )
    if settings.estimator == "grpo_passk" and schedule.min_valid < 2:
        raise UserError("credit.estimator = 'grpo_passk' compares the best two; set schedule.min_valid to 2 or more")
    if _in_chunks(config) and not estimator.group_local:
        raise UserError(
            f"credit.estimator = {settings.estimator!r} normalises over the whole batch, which "
            f"schedule.preset = {schedule.preset!r} never sees at once; use sync or one_step_off, or "
            "schedule.chunks = 1"
        )


def _check_mixed_groups(config: Config) -> None:
    replay, name, size = config.replay, config.credit.estimator, config.schedule.group
    if not (replay.enabled and replay.per_group and ESTIMATORS.get(name).group_baseline):
        return
    own = replay.grouping == "own"
    if own and name == "grpo_passk":
        raise UserError(
            "credit.estimator = 'grpo_passk' compares the best two of a group, but replay.grouping = 'own' makes each "
            "stored trajectory a group of its own; use 'shared'"
        )
    fresh_only = own or replay.baseline == "fresh"
    if replay.placement == "replace" and size - replay.per_group == 1 and fresh_only:
        raise UserError(
            f"replay.per_group = {replay.per_group} with placement = 'replace' leaves one fresh member of "
            f"schedule.group = {size}, which has no baseline to be compared with; lower it, or use placement = 'add'"
        )


def _check_loss(config: Config) -> None:
    settings = config.loss
    loss = find(settings)
    if scope_of(settings) == "update" and _in_chunks(config):
        raise UserError(
            f"loss.name = {settings.name!r} looks at all tokens of an update, which "
            f"schedule.preset = {config.schedule.preset!r} never holds at once; use sync or one_step_off, or "
            "schedule.chunks = 1"
        )
    if settings.correction != "none" and loss.ratio and config.learner.old_logprobs == "sampler":
        raise UserError(
            f"loss.correction = {settings.correction!r} would do nothing: with learner.old_logprobs = 'sampler' the "
            f"ratio of {settings.name} already is current / behaviour; use 'recompute' or 'loglinear'"
        )
    if settings.kl_target is not None and not settings.kl_coefficient:
        raise UserError("loss.kl_target steers loss.kl_coefficient, which is 0; set where it starts")


def _check_server(config: Config) -> None:
    settings, other = config.sampler, config.sampler.evaluation_options
    if settings.name != "openai":
        return
    if settings.options.get("update", "none") == "none":
        raise UserError(
            "sampler.name = 'openai' can train only where the server takes new weights: set sampler.options.update = "
            "'vllm' (a vLLM server that shares a folder with this machine), or sampler.name = 'vllm'"
        )
    if other.get("base_url", settings.options.get("base_url")) == settings.options.get("base_url"):
        raise UserError(
            "training and evaluation hold different weights at a time and need a server each: set "
            "sampler.evaluation_options.base_url to the address of another one"
        )
