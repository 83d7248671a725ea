"""Checks a configuration: rules that involve several sections, and whether everything that it names exists.

`check_sections` needs only the settings. `gleanrl.config.loading` calls it for the configuration of each new run.
`check` is called before the parts of a training run are built. It imports the algorithms, rewards and environments that
the configuration names, including those in a user's own files.
"""

from __future__ import annotations

import importlib.util

from gleanrl.config.settings import Config, LearnerSettings, ModelSettings, ReplaySettings
from gleanrl.utils.errors import UserError
from gleanrl.utils.settings import JobConfig
from gleanrl.utils.text import nearest

CHUNKED = ("pipelined", "pipelined_one_step_off", "bounded_async")
"""The schedule presets in which the learner receives each batch in ``schedule.chunks`` chunks."""

MEGATRON_MISSING = (
    "learner.backend = 'megatron' needs Megatron-core: pip install --no-deps megatron-core==0.16.1 einops"
)


def check_sections(config: Config) -> None:
    """Check the rules that involve several sections and do not depend on the algorithms.

    Raises:
        UserError: some settings cannot work together. The message describes the first such combination.
    """
    schedule, context, learner, model, loss = config.schedule, config.context, config.learner, config.model, config.loss
    check_mini_batches(learner, schedule.batch)
    if schedule.preset in CHUNKED and schedule.batch % schedule.chunks:
        raise UserError(f"schedule.batch = {schedule.batch} is not divisible by schedule.chunks = {schedule.chunks}")
    if learner.epochs > 1 and schedule.preset in CHUNKED:
        raise UserError(f"learner.epochs = {learner.epochs} needs whole mini-batches; use schedule.preset = 'sync'")
    if context.max_tokens_per_turn >= model.max_context:
        raise UserError(
            f"context.max_tokens_per_turn = {context.max_tokens_per_turn} leaves no room in "
            f"model.max_context = {model.max_context}"
        )
    if config.sampler.temperature == 0:
        raise UserError("sampler.temperature = 0 samples every member of a group alike; GRPO needs it above 0")
    if config.sampler.temperature < 1e-6:  # the sampler divides by it in float32
        raise UserError(f"sampler.temperature = {config.sampler.temperature} is too small; use 1e-6 or more")
    if model.init == "tiny":
        check_tiny_model(model)
        if context.template_options:
            raise UserError(
                "context.template_options: the chat template of the tiny model has no options; set model.init, or "
                "leave them out"
            )
    if loss.kl_target is not None and not loss.kl_coefficient:
        raise UserError("loss.kl_target adapts loss.kl_coefficient, which is 0; set the value that it starts from")


def check_tiny_model(model: ModelSettings) -> None:
    """Check that ``hidden_size`` is an even multiple of ``heads``, and ``heads`` a multiple of ``kv_heads``.

    Raises `UserError` if not, or if there is a ``chat_template``, because the tiny model has its own.
    """
    if model.chat_template is not None:
        raise UserError("model.chat_template: the tiny model has a chat template of its own; leave it out")
    if model.hidden_size % (2 * model.heads):
        raise UserError(
            f"model.hidden_size = {model.hidden_size} must be an even multiple of model.heads = {model.heads}"
        )
    if model.heads % model.kv_heads:
        raise UserError(f"model.heads = {model.heads} must be a multiple of model.kv_heads = {model.kv_heads}")


def check_mini_batches(learner: LearnerSettings, batch: int) -> None:
    """Check that ``batch`` groups can be divided into ``updates_per_step`` mini-batches of equal size.

    Raises `UserError` if not.
    """
    if batch % learner.updates_per_step:
        raise UserError(
            f"schedule.batch = {batch} is not divisible by learner.updates_per_step = {learner.updates_per_step}"
        )


def check_replay(replay: ReplaySettings, group: int) -> None:
    """Check the replay settings against the number of fresh members per group, ``group``.

    Raises:
        UserError: no fresh member would be left in a group, no task could ever be chosen for replay, or the lower
            bound of an adaptive share is above the upper one.
    """
    if replay.placement == "replace" and replay.per_group >= group:
        raise UserError(
            f"replay.per_group = {replay.per_group} with replay.placement = 'replace' leaves no fresh member of "
            f"schedule.group = {group}; lower it, or use placement = 'add'"
        )
    if replay.tasks == "difficulty" and replay.difficulty > group:
        raise UserError(
            f"replay.difficulty = {replay.difficulty}, but a group of schedule.group = {group} never has so many "
            "successes: nothing would be replayed; lower it"
        )
    if replay.min_task_ratio is not None and replay.min_task_ratio > replay.task_ratio:
        raise UserError(
            f"replay.min_task_ratio = {replay.min_task_ratio} is above replay.task_ratio = {replay.task_ratio}, the "
            "largest share; lower it"
        )
    if replay.task_ratio + replay.restart_share > 1:
        raise UserError(
            f"replay.task_ratio = {replay.task_ratio} and replay.restart_share = {replay.restart_share} are more than "
            "all groups of a batch; lower one of them"
        )


def check_agents(config: Config) -> None:
    """Check the settings of a run whose environment has agents that call the model themselves.

    Raises:
        UserError: a setting would not act on an agent's calls, because the agent makes their messages, or agents are to
            run in Ray actors.
    """
    context, name = config.context, config.environment.name
    for setting, on in (
        (f"context.policy = {context.policy!r}", context.policy != "linear"),
        ("context.system_prompt", context.system_prompt is not None),
        ("guidance.enabled = true", config.guidance.enabled),
        ("replay.reverify = true", config.replay.enabled and config.replay.reverify),
        ("replay.restart_share above 0", config.replay.enabled and config.replay.restart_share > 0),
        ("loss.observation_coefficient", config.loss.observation_coefficient > 0),
        ("warm_start.observation_coefficient", config.warm_start.observation_coefficient > 0),
    ):
        if on:
            raise UserError(f"{setting} does not act on the calls of agents (environment {name!r}); leave it out")
    if config.ray.enabled and config.ray.environments > 0:
        raise UserError(
            f"ray.environments = {config.ray.environments}: the agents of environment {name!r} run next to the run's "
            "endpoint; set it to 0"
        )


def check_resumed(before: JobConfig, now: JobConfig) -> None:
    """Check that the configuration ``now`` can resume the run that was started with the configuration ``before``.

    Settings of type `Changeable`, such as the number of steps and of worker processes, may differ. If one of them turns
    a section on or off, as ``replay.enabled`` does, the section's other settings must be equal only if it is on before
    and now. Otherwise nothing compares with them, and a value that was set while the section was off would refuse
    every later resume without it. All other settings must be equal.

    Raises:
        UserError: the two are different kinds of job, or another setting differs. The message names the first such
            setting and both values.
    """
    if type(before) is not type(now):
        raise UserError(f"{before.path} holds a run of another kind; start this one with another --run.name")
    old, new, changeable = before.model_dump(mode="json"), now.model_dump(mode="json"), set(now.changeable())
    for section in (name for name in new if name != "job"):
        values = old[section]
        if f"{section}.enabled" in changeable and not (values["enabled"] and new[section]["enabled"]):
            continue
        for name, value in new[section].items():
            if values[name] != value and f"{section}.{name}" not in changeable:
                raise UserError(
                    f"{before.path} was started with {section}.{name} = {values[name]!r}, which cannot become "
                    f"{value!r} on --resume; keep it, or start another run with --run.name"
                )


def check(config: Config) -> None:
    """Check the rules that depend on the algorithms, and that everything that the configuration names exists.

    `check_sections` is included.

    Raises:
        UserError: a name or an option is unknown, or some settings cannot work together. The message describes the
            first such error.
    """
    from gleanrl import environments, samplers
    from gleanrl.algorithms.loss import REPLAY_LOSSES, find, scope_of
    from gleanrl.curriculum.orders import find_order
    from gleanrl.experience.guidance import guidance
    from gleanrl.rewards.adapter import check_reward

    check_sections(config)
    _check_estimator(config)
    loss, sampler = config.loss, config.sampler
    if scope_of(loss) == "update" and _in_chunks(config):
        of_replayed = REPLAY_LOSSES.get(loss.replay_mode).scope == "update"
        setting = f"loss.replay_mode = {loss.replay_mode!r}" if of_replayed else f"loss.name = {loss.name!r}"
        raise _needs_whole_batch(f"{setting} looks at all tokens of an update", config)
    if loss.correction != "none" and find(loss).ratio and config.learner.old_logprobs == "sampler":
        raise UserError(
            f"loss.correction = {loss.correction!r} would do nothing: with learner.old_logprobs = 'sampler' the "
            f"ratio of {loss.name} already is current / behaviour; use 'recompute' or 'loglinear'"
        )
    if loss.correction == "mask" and not loss.correction_floor <= 1 <= loss.correction_cap:
        raise UserError(
            f"loss.correction = 'mask' keeps tokens whose weight is from loss.correction_floor = "
            f"{loss.correction_floor:g} to loss.correction_cap = {loss.correction_cap:g}, which leaves out the weight "
            "of on-policy tokens, 1; include 1"
        )
    if loss.observation_coefficient and loss.correction == "mask":
        raise UserError(
            "loss.observation_coefficient does not work with loss.correction = 'mask', whose denominator is known only "
            "after the gradient; use 'truncate' or 'none'"
        )
    _check_replay(config)
    _check_backend(config)
    shares = samplers.shares_with_evaluation(config)
    if sampler.name == "openai":
        if sampler.options.get("update", "none") == "none":
            raise UserError(
                "sampler.name = 'openai' can train only where the server takes new weights: set "
                "sampler.options.update = 'vllm' (a vLLM server that shares a folder with this machine), or "
                "sampler.name = 'vllm'"
            )
        address = sampler.options.get("base_url")
        if not shares and sampler.evaluation_options.get("base_url", address) == address:
            raise UserError(
                "with sampler.evaluation_options, training and evaluation need a server each, because they hold "
                "different weights: set sampler.evaluation_options.base_url to the address of another one"
            )
    check_reward(config.reward.name, options=config.reward.options)
    environments.check(config.environment)
    find_order(config.tasks)
    # On Ray, samplers run on other machines, whose installed packages cannot be checked here.
    if not config.ray.enabled:
        samplers.check(sampler)
    if config.guidance.enabled:
        guidance.check(config.guidance)


def warnings(config: Config) -> list[str]:
    """Return a one-line message for each combination of settings that works but is probably a mistake."""
    from gleanrl.algorithms.loss import find
    from gleanrl.schedule.schedule import Schedule

    found = []
    if config.reward.name == "group_judge" and config.replay.enabled:
        found.append(
            "reward.name = 'group_judge' compares the members of one group, and replay.enabled compares them with "
            "stored ones, whose scores are from other groups"
        )
    old_logprobs, stale = config.learner.old_logprobs, Schedule.from_settings(config.schedule).staleness
    if stale and old_logprobs != "sampler" and find(config.loss).ratio and config.loss.correction == "none":
        found.append(
            f"learner.old_logprobs = {old_logprobs!r} under staleness {stale}: no weight corrects for "
            "proximal / behaviour while loss.correction = 'none'; decoupled PPO uses loss.correction = 'mask'"
        )
    if not stale and old_logprobs == "loglinear" and find(config.loss).ratio and config.loss.correction != "none":
        found.append(
            f"loss.correction = {config.loss.correction!r} has no effect: without staleness learner.old_logprobs = "
            "'loglinear' is the recorded log-probs; use 'recompute'"
        )
    if config.replay.enabled:
        replay, size = config.replay, config.schedule.group
        if not any(replay.min_rate < solved / size < replay.max_rate for solved in range(size + 1)):
            found.append(
                f"replay.enabled stores successes of groups with a solve rate between replay.min_rate = "
                f"{replay.min_rate:g} and replay.max_rate = {replay.max_rate:g}, which no group of schedule.group = "
                f"{size} has"
            )
        schedule = Schedule.from_settings(config.schedule)
        if replay.max_age is not None and replay.max_age <= schedule.staleness and not schedule.ordered:
            found.append(
                f"replay.max_age = {replay.max_age} under schedule.staleness = {schedule.staleness}: what is stored "
                "may be too old when a group is trained, so nothing is replayed"
            )
        batch = config.schedule.batch
        if batch > 1 and 0 < replay.task_ratio * batch < 1 and replay.min_task_ratio is None:
            found.append(
                f"replay.task_ratio = {replay.task_ratio:g} of schedule.batch = {batch} is less than one group, so no "
                "group gets stored successes"
            )
        if replay.start_solve_rate is None and replay.start_progress >= 1:
            found.append(f"replay never begins with replay.start_progress = {replay.start_progress:g}")
    else:
        # The threshold that is not given is that of the reward (`loading.load`).
        default = type(config.replay)(success_threshold=config.reward.success_threshold)
        if unused := [f"replay.{name}" for name, value in config.replay if value != getattr(default, name)]:
            found.append(f"no effect while replay.enabled is false: {', '.join(unused)}")
    return found


def _check_estimator(config: Config) -> None:
    from gleanrl.algorithms.advantages import ESTIMATORS, INPUTS, check_options

    credit, schedule = config.credit, config.schedule
    estimator = ESTIMATORS.get(credit.estimator)
    check_options(credit.estimator, credit.options)
    for option in credit.options:
        if option in estimator.needs:
            raise UserError(f"credit.options.{option}: a run computes {option} itself; leave it out")
    unknown = sorted(estimator.needs - INPUTS.keys())
    if unknown:
        raise UserError(f"credit.estimator {credit.estimator!r} needs {unknown[0]!r}, which no run provides")
    if schedule.group == 1 and estimator.group_baseline:
        raise UserError(
            f"schedule.group = 1 gives {credit.estimator} no baseline, so every advantage would be 0 or raw; "
            "set schedule.group to 2 or more"
        )
    if schedule.min_valid > schedule.group:
        raise UserError(
            f"schedule.min_valid = {schedule.min_valid} can never be met by schedule.group = {schedule.group}; lower it"
        )
    if credit.estimator == "grpo_passk" and schedule.min_valid < 2:
        raise UserError("credit.estimator = 'grpo_passk' compares the best two; set schedule.min_valid to 2 or more")
    if config.checkpoint.return_on_collapse and not config.checkpoint.every:
        raise UserError("checkpoint.return_on_collapse needs checkpoints to return to; set checkpoint.every above 0")
    if config.checkpoint.return_on_collapse and config.tasks.order == "levels":
        raise UserError("checkpoint.return_on_collapse does not work with tasks.order = 'levels', which lowers success")
    compares_groups = estimator.group_baseline and not estimator.turn_rewards
    if credit.per_part:
        _check_per_part(config, compares_groups=compares_groups)
    penalised = config.loss.kl_in == "reward" and config.loss.kl_coefficient > 0
    if credit.zero_variance == "drop" and (penalised or not compares_groups):
        learns = "loss.kl_in = 'reward'" if penalised else f"credit.estimator = {credit.estimator!r}"
        raise UserError(
            f"credit.zero_variance = 'drop' leaves out groups of equal scores, which have an advantage with {learns}; "
            "use 'keep'"
        )
    if not estimator.group_local and _in_chunks(config):
        raise _needs_whole_batch(f"credit.estimator = {credit.estimator!r} normalises over the whole batch", config)


def _check_per_part(config: Config, *, compares_groups: bool) -> None:
    credit, loss = config.credit, config.loss
    if not compares_groups:
        raise UserError(
            f"credit.per_part compares the members of a group on each part of the score, which credit.estimator = "
            f"{credit.estimator!r} cannot do; use grpo or another estimator that only compares the scores of a group"
        )
    for part in credit.per_part:
        known: list[str] | None = None  # which parts other rewards give is not known before they give some
        if config.reward.name == "weighted":
            known = list(config.reward.options.get("parts", {}))
        elif config.reward.name == "rubric":
            criteria = config.reward.options.get("criteria", [])
            known = [str(given.get("name")) for given in criteria if isinstance(given, dict)] + ["vote", "cost"]
        if known is not None and part.split("/")[0] not in known:
            raise UserError(f"credit.per_part: the reward has no part {part!r}{nearest(part, known, list_all=True)}")
    for setting, clashes in (
        ("loss.kl_in = 'reward'", loss.kl_in == "reward" and loss.kl_coefficient > 0),  # the penalty is in no part
        ("schedule.dynamic_sampling", config.schedule.dynamic_sampling),  # drops groups of equal scores
        ("replay.grouping = 'own'", config.replay.enabled and config.replay.grouping == "own"),  # compares nothing
    ):
        if clashes:
            raise UserError(f"credit.per_part compares parts of the score, with which {setting} does not work")


def _in_chunks(config: Config) -> bool:
    return config.schedule.preset in CHUNKED and config.schedule.chunks > 1


def _needs_whole_batch(what: str, config: Config) -> UserError:
    return UserError(
        f"{what}, which schedule.preset = {config.schedule.preset!r} never holds at once; use sync or one_step_off, "
        "or schedule.chunks = 1"
    )


def _check_replay(config: Config) -> None:
    from gleanrl.algorithms.advantages import ESTIMATORS
    from gleanrl.experience.pool.ranking import RANKINGS

    replay, name, size = config.replay, config.credit.estimator, config.schedule.group
    if not replay.enabled:
        return
    check_replay(replay, size)
    RANKINGS.get(replay.select)  # raises for an unknown one
    if replay.reverify and config.reward.name == "group_judge":
        raise UserError(
            "replay.reverify scores a stored trajectory alone, and reward.name = 'group_judge' has compared it with "
            "others, so that the scores would differ and the pool would be emptied; leave it out"
        )
    for setting, on in (
        (f"context.policy = {config.context.policy!r}", config.context.policy != "linear"),
        ("guidance.enabled = true", config.guidance.enabled),
    ):
        if replay.restart_share and on:
            raise UserError(f"replay.restart_share repeats what the model saw, which {setting} changes; leave one out")
    if not replay.per_group or not ESTIMATORS.get(name).group_baseline:
        return
    own = replay.grouping == "own"
    if own and name == "grpo_passk":
        raise UserError(
            "credit.estimator = 'grpo_passk' compares the best two of a group, but replay.grouping = 'own' makes each "
            "stored trajectory a group of its own; use 'shared'"
        )
    fresh_baseline = own or replay.baseline == "fresh"
    if replay.placement == "replace" and size - replay.per_group == 1 and fresh_baseline:
        raise UserError(
            f"replay.per_group = {replay.per_group} with placement = 'replace' leaves one fresh member of "
            f"schedule.group = {size}, which has no baseline to be compared with; lower it, or use placement = 'add'"
        )


def _check_backend(config: Config) -> None:
    learner = config.learner
    if learner.offload_activations and not learner.activation_checkpointing:
        raise UserError("learner.offload_activations = true needs learner.activation_checkpointing = true")
    if learner.offload_state and learner.backend != "fsdp":
        raise UserError("learner.offload_state = true needs learner.backend = 'fsdp'")
    if learner.backend == "fsdp":
        if (stages := learner.pipeline_parallel) > 1:
            raise UserError(f"learner.pipeline_parallel = {stages} needs learner.backend = 'megatron'")
        if learner.distributed_optimizer:
            raise UserError("learner.distributed_optimizer = true needs learner.backend = 'megatron'")
    elif not config.ray.enabled and importlib.util.find_spec("megatron") is None:
        raise UserError(MEGATRON_MISSING)
    if learner.backend == "megatron" and learner.attn_implementation not in ("auto", "sdpa"):
        raise UserError(
            f"learner.attn_implementation = {learner.attn_implementation!r} needs learner.backend = 'fsdp'; with "
            "'megatron', attention is torch's own (sdpa)"
        )
    if config.ray.enabled and learner.ranks == 1:
        check_one_process(learner)


def check_one_process(learner: LearnerSettings) -> None:
    """Raise `UserError` if the learner needs several processes. A run with one process calls this function."""
    if learner.tensor_parallel > 1:
        raise UserError(f"learner.tensor_parallel = {learner.tensor_parallel} does not divide the 1 ranks")
    if learner.offload_state:
        raise UserError("learner.offload_state = true needs several processes: set learner.ranks, or use torchrun")
    if learner.backend == "megatron":
        raise UserError("learner.backend = 'megatron' needs several processes: set learner.ranks, or use torchrun")
