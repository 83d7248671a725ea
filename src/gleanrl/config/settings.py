"""Defines every setting of a run that trains a language model, with its default and its meaning.

Each section of a configuration is a class, such as `LossSettings`, and `Config` contains all sections. A section is an
immutable value whose fields have been checked. Code that needs only one section, such as a loss, takes that section
alone, so it can be used without a configuration file.

`gleanrl.config.loading` fills the sections from files and the command line. `gleanrl.config.validate` checks settings
that depend on other sections.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from gleanrl.types import SUCCESS
from gleanrl.utils.settings import (
    Changeable,
    CheckpointSettings,
    Fraction,
    JobConfig,
    MonitorSettings,
    NonNegative,
    NonNegativeFloat,
    OrNone,
    Positive,
    PositiveFloat,
    Settings,
)

_Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class EnvironmentSettings(Settings):
    name: str = "alfworld"
    """The environment: alfworld, textworld, reasoning_gym, dataset, textarena, gymnasium, verifiers, openenv, tools,
    mixture, service, agent, or the import path of a taskset, `package.module:Class` or `file.py:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's taskset class. Each taskset documents its own, and refuses unknown
    ones."""
    train_tasks: Positive = 256
    """Number of tasks in the training split. The run refuses to start if the environment has fewer."""
    eval_tasks: Positive = 64
    """Number of held-out tasks that each evaluation plays. The run refuses to start if the environment has fewer."""
    warm_start_tasks: Positive = 100
    """Number of tasks that the expert plays to record demonstrations. Used only with `warm_start.enabled` or
    `model.init = "tiny"`."""
    workers: Changeable[NonNegative] = 0
    """Number of worker processes that run the environments. 0 runs them in the process of the run; environments that
    compute without awaiting then block sampling."""
    timeout_s: Changeable[PositiveFloat] = 60.0
    """Time limit of one reset, step or conclude, in seconds. If a call exceeds it, its episode fails, and a worker
    process that is blocked by the call is killed and replaced. With `workers = 0`, a blocking call cannot be
    stopped."""


class TaskSettings(Settings):
    """The order in which training plays its tasks.

    Every order can be combined with `replay`, which takes some tasks of each batch from the pool of stored
    trajectories.
    """

    order: str = "shuffled"
    """Order of tasks. shuffled: each task once per epoch; a mixture alternates its sources by weight. levels: one
    source after the other, each until it is solved often enough. solve_rate: prefers tasks solved half the time. Or the
    import path of a `Curriculum`, called with ``(tasks, *, weights, group, seed, greedy, success_threshold,
    **options)``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the order: for levels ``advance``, ``window``, ``review`` and ``levels``, for solve_rate
    ``sigma``, ``memory`` and ``explore``. shuffled has none."""


class ModelSettings(Settings):
    init: str = "tiny"
    """The initial policy, a causal language model with a chat template: a Hugging Face directory or id; a GGUF file,
    which is dequantized once; or `package:file`, either of these in an installed package. "tiny" builds a small,
    randomly initialised Llama model, and a tokenizer from the text of the environment's demonstrations."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the one of the tokenizer, for example to show tools to a model
    whose own template cannot. Exports contain it. None = the tokenizer's own; the tiny model takes no other."""
    hidden_size: Positive = 128
    """Size of the tiny model's hidden states; an even multiple of `heads`. Like the next four settings, it is ignored
    for any other model."""
    layers: Positive = 4
    """Number of layers of the tiny model."""
    heads: Positive = 4
    """Number of attention heads of the tiny model; a multiple of `kv_heads`."""
    kv_heads: Positive = 2
    """Number of key-value heads of the tiny model. Fewer than `heads` means grouped-query attention."""
    mlp_ratio: Positive = 3
    """Width of the tiny model's MLPs, as a multiple of `hidden_size`."""
    max_context: Positive = 1024
    """Maximum number of tokens of an episode's context, prompt and answers together; an episode that fills it ends. For
    the tiny model also the number of its positions. For any other model it must not exceed the model's own limit."""
    vocabulary: Positive = 512
    """Maximum number of tokens in the tiny model's vocabulary. It must at least hold every character of the
    environment's text."""
    dtype: Changeable[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Dtype of forward passes and of the sampler's weights; the trained weights are always float32. auto: float32 on a
    CPU, bfloat16 on a GPU."""
    device: Changeable[str] = "auto"
    """Device of the model: auto (the first GPU, or the CPU if there is none), cpu, cuda, or cuda:N. With
    `learner.ranks` above 1, use auto or cuda, because each rank takes a GPU of its own."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run. Needed only for models whose code is not part of transformers."""

    @property
    def hub_id(self) -> str | None:
        """The name of `init` on the Hugging Face hub; None for the tiny model and for directories and files."""
        local = self.init == "tiny" or ":" in self.init or Path(self.init).expanduser().exists()
        return None if local else self.init


class WarmStartSettings(Settings):
    """Supervised training on an expert's demonstrations before RL starts.

    The resulting weights are cached on disk. Later runs load them if everything that the weights depend on (these
    settings, the model, the demonstrations, the seed and the versions of gleanrl and torch) is the same.
    """

    enabled: bool = True
    """Train on demonstrations before RL. Needs an environment with an expert. Turn it off if `model.init` can already
    solve some tasks."""
    demonstrations: Positive = 400
    """Maximum number of successful demonstrations to record. The expert makes at most three times as many attempts."""
    noise: Fraction = 0.0
    """Probability that a random valid action replaces the expert's next one, so that demonstrations also show how to
    recover."""
    steps: Positive = 260
    """Number of optimizer updates."""
    batch: Positive = 32
    """Number of demonstrations in each update."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate of AdamW. It rises linearly in the first 20 updates and decays by a cosine to a tenth."""
    observation_coefficient: NonNegativeFloat = 0.0
    """Factor of the observation loss (`loss.observation_coefficient`) in the warm start. 0 = train on actions only."""


class SamplerSettings(Settings):
    name: Changeable[str] = "transformers"
    """The sampler: transformers, vllm, openai (an OpenAI-compatible server), or the import path of a `Sampler`, which
    is called as ``(model, *, max_rows, max_context, deterministic, inflight, dtype, device_lock, timeline,
    **options)``."""
    options: Changeable[dict[str, Any]] = Field(default_factory=dict)
    """Further keyword arguments of the sampler; for vllm they are arguments of vLLM's engine."""
    evaluation_options: Changeable[dict[str, Any]] = Field(default_factory=dict)
    """Options that override `options` for the sampler of evaluations, such as the address of another server."""
    share_with_evaluation: Changeable[bool | Literal["auto"]] = "auto"
    """Evaluate with training's sampler instead of one with its own copy of the weights and its own cache. The next
    weights are then published only after the evaluation has ended. auto: true for vllm and openai, unless
    `evaluation_options` are given or the sampler is deterministic, because evaluation changes the composition of
    batches."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature of training and of sampled evaluation attempts, above 0. The learner computes log-probs at
    this temperature too."""
    max_rows: Changeable[Positive] = 256
    """Maximum number of episodes that a sampler plays at the same time; further ones wait. More raise throughput and
    memory use. The sampler of evaluations and, on Ray, each sampler actor have this many of their own."""
    deterministic: Changeable[bool | Literal["auto"]] = "auto"
    """Begin to sample only when every open episode waits for a completion, and then sample all these completions
    together, so that results do not depend on timing. Throughput is lower. auto: true if the schedule's staleness bound
    is 0. The openai sampler ignores it."""


class ContextSettings(Settings):
    policy: Literal["linear", "strip_thinking", "window"] = "linear"
    """What the model sees of earlier turns. linear: everything. strip_thinking: earlier answers without their
    thoughts. window: the opening and the last `window_turns` exchanges. Training uses the same contexts."""
    window_turns: Positive = 8
    """Number of exchanges (an answer and the observation that follows it) that the `window` policy shows after the
    opening."""
    max_turns: Positive = 12
    """Maximum number of sampled turns per episode. An episode that reaches it ends, and the environment scores what was
    achieved by then."""
    max_tokens_per_turn: Positive = 16
    """Maximum number of sampled tokens per turn, below `model.max_context`; a longer turn is cut off and counted in
    `episode/cut_turns`. If unset: 16 for the tiny model, otherwise 256 or half of `model.max_context`, whichever is
    less. Reasoning needs more."""
    system_prompt: str | None = None
    """System message at the start of every episode. None: no system message."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking = false` for Qwen 3, GLM 4.5 and SmolLM 3, or
    `reasoning_effort = "high"` for gpt-oss. Every prompt is rendered with them: in training, in evaluations and in the
    demonstrations of a warm start. A variable that the template does not use is refused."""


class ScheduleSettings(Settings):
    preset: Literal["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"] = "sync"
    """How sampling, rewards and updates overlap. sync: one after the other. pipelined: the learner trains on each
    chunk (part of a batch) once it is complete. one_step_off: on whole batches, each sampled a step ahead.
    pipelined_one_step_off: both. bounded_async: on chunks up to `staleness` steps old, and samplers take new weights in
    the middle of episodes."""
    batch: Positive = 16
    """Number of groups that each step trains on. It must be a multiple of `learner.updates_per_step`, and of `chunks`
    if the preset uses them."""
    group: Positive = 8
    """Number of fresh trajectories that are sampled for each task (the group of GRPO). At least 2 for estimators that
    compare the members of a group."""
    chunks: Changeable[Positive] = 4
    """Number of equal chunks in which the learner receives a batch; it must divide `batch`. Used by pipelined,
    pipelined_one_step_off and bounded_async. More chunks start training earlier, at the cost of more calls of the
    learner."""
    adaptive: Changeable[bool] = False
    """Pass all chunks that are ready to the learner in one call. This saves the overhead of calls when rewards arrive
    faster than the learner trains."""
    staleness: NonNegative = 2
    """Staleness bound of `bounded_async`: maximum age, in steps, of the weights that sampled a group, at the step that
    trains on it. The bound of the other presets is fixed: 1 for those named one_step_off, otherwise 0."""
    device_first: Changeable[Literal["due", "sample", "train"]] = "due"
    """Which work goes first on a device that sampler and learner share. sample: sampling, so that rewards are requested
    early, but groups are older. train: training, so that groups are young, but the next rewards are requested late.
    due: sampling until all groups of this step and the next are sampled, then training."""
    dynamic_sampling: bool = False
    """Drop groups whose valid members all have the same score, and sample groups of further tasks instead (DAPO). Such
    groups give no gradient with estimators that only compare the scores of a group. With gigpo and state_gae, successes
    of different length give one, which is then lost."""
    max_resample: PositiveFloat = 3.0
    """With `dynamic_sampling`, the maximum number of groups sampled per group trained on. At 3.0, a step drops at most
    2 x `batch` groups; after that, it accepts groups of equal scores. 1.0 or less drops none."""
    min_valid: Positive = 2
    """Minimum number of fresh members of a group that have a valid score; at most `group`. A group with fewer is
    dropped and another is sampled in its place."""
    max_failed_fraction: Changeable[Fraction] = 0.5
    """Stop the run with an error if more than this fraction of the last `batch` x `group` episodes (at least 32)
    failed. If for a long time no episode has a score, or every group has too few members with
    one, the run stops in any case."""


class CreditSettings(Settings):
    """The advantage estimator, which turns rewards into advantages. Implemented in `gleanrl.algorithms.advantages`."""

    estimator: str = "grpo"
    """The advantage estimator: grpo, dr_grpo, grpo_passk, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, opo,
    gpg, remax, gae, gigpo, state_gae, or the import path of a function that is decorated with
    `@gleanrl.algorithms.advantages.estimator`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword options of the estimator, such as `gamma` and `lam` of gae. Each estimator documents its own."""
    per_part: dict[str, float] = Field(default_factory=dict)
    """Weights of named parts of the score, such as `{ answer = 1.0, format = 0.2 }`. If set, the estimator compares the
    members of a group on each part for itself, and the advantage is the weighted sum (GDPO). If empty, members are
    compared on the score."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """What happens to members whose group has only equal scores or, with `per_part`, equal values of every part. keep:
    they count in the denominator of the loss. drop: they are left out of the batch. This needs an estimator that only
    compares the scores of a group (not remax, gae, reinforce_plus_plus, gigpo or state_gae), and no KL in the
    reward."""


class CriticSettings(Settings):
    """The critic (value function). A run has one only if its estimator needs values, as ``gae`` does."""

    model: Literal["own", "shared"] = "own"
    """Network of the critic. own: a copy of the initial policy's transformer with a scalar head, which needs as much
    memory again. shared: only a scalar head, on the policy's own hidden states."""
    lr: PositiveFloat = 1e-3
    """Constant learning rate of the critic's own optimizer. With `model = "shared"` it applies to the head only."""
    coefficient: NonNegativeFloat = 0.5
    """Factor of the value loss in the gradient of the policy's weights, with `model = "shared"`. The gradient of the
    head is not multiplied by it."""
    clip: OrNone[PositiveFloat] = 0.5
    """Bound on how far a value may move from its old value in one step: the loss is the larger of the errors of the
    value and of the clipped value, as in PPO. "none" turns clipping off."""
    warmup_steps: NonNegative = 0
    """Number of steps at the start of the run in which only the critic is updated; 0 = none."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm to which the gradient of the critic's own weights is clipped."""


class LossSettings(Settings):
    """The policy loss. Implemented in `gleanrl.algorithms.loss`."""

    name: str = "ppo"
    """The loss of fresh tokens: ppo, gspo, cispo, gpg, reinforce, clip_cov, kl_cov, or the import path of a function
    that is decorated with `@gleanrl.algorithms.loss.policy_loss`. Replayed tokens have their own loss, see
    `replay_mode`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword options of the loss; of the built-in losses, clip_cov and kl_cov have some. Each loss documents its
    own."""
    clip_low: NonNegativeFloat = 0.2
    """The ratio is clipped below at 1 - clip_low. Applies to ppo, gspo, cispo and clip_cov, and to replayed tokens with
    `replay_mode = "clip"`."""
    clip_high: NonNegativeFloat = 0.28
    """The ratio of fresh tokens is clipped above at 1 + clip_high (ppo, gspo, cispo and clip_cov). A value above
    `clip_low` keeps the entropy higher (DAPO)."""
    dual_clip: OrNone[Annotated[float, Field(gt=1.0)]] = 3.0
    """Bounds the loss of a token with negative advantage A by -A * dual_clip (dual-clip PPO). Applies to ppo, and to
    replayed tokens with `replay_mode = "clip"`. "none" turns it off."""
    aggregation: Literal[
        "auto", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "auto"
    """How token losses are averaged: over all tokens (token-mean), or over sequences, of which each counts with the sum
    (seq-mean-token-sum), the mean (seq-mean-token-mean) or the scaled sum (seq-mean-token-sum-norm) of its tokens.
    auto: what the loss declares, seq-mean-token-mean for gspo and token-mean for the other built-in losses."""
    aggregation_scale: PositiveFloat | None = None
    """Divisor of each sequence's sum in seq-mean-token-sum-norm. None = the length of the context in tokens,
    `model.max_context` or the model's own limit."""

    correction: Literal["none", "truncate", "mask"] = "none"
    """Importance weight w of fresh tokens. w = old / behaviour probability for losses with a ratio; this needs
    `learner.old_logprobs` other than sampler. w = current / behaviour for gpg and reinforce, where current means the
    weights being trained. none: no weight. truncate: min(w, cap). mask: w, or 0 if w is outside [floor, cap], as in
    decoupled PPO."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Over which tokens the w of `correction` is taken. token: of the token alone. sequence: the product over its
    sequence. geometric: the geometric mean over its sequence."""
    correction_cap: PositiveFloat = 5.0
    """Upper bound of w in `correction`: truncate reduces a larger w to it, mask leaves the token out. At least 1 with
    mask."""
    correction_floor: NonNegativeFloat = 0.0
    """With `correction = "mask"`, tokens whose w is below this are left out too; at most 1; 0 = no lower bound."""

    replay_mode: str = "clip"
    """Loss of replayed tokens, whose ratio is w and whose advantage is A. clip: PPO's clipped loss with the upper bound
    1 + replay_clip_high. shape: -A w / (w + replay_shape), without clipping (LUFFY). Or the import path of a function
    that is decorated with `@gleanrl.algorithms.loss.replay_loss`."""
    replay_clip_high: NonNegativeFloat = 1.0
    """With `replay_mode = "clip"`, the ratio of replayed tokens is clipped above at 1 + this. The lower bound is that
    of `clip_low`."""
    replay_shape: PositiveFloat = 0.1
    """The constant in the loss of `replay_mode = "shape"`. The gradient is largest for tokens whose ratio is equal to
    it, so a small value emphasises tokens that have become unlikely."""
    replay_coefficient: NonNegativeFloat = 1.0
    """Factor on the loss of replayed tokens. With `replay_mode = "shape"` and its default constant, their gradient at
    ratio 1 is twelve times smaller than that of an on-policy token; a factor of 12 makes up for this."""
    replay_importance: Literal["recorded", "current"] = "recorded"
    """Denominator of a replayed token's ratio. recorded: the probability at which it was sampled. current: its
    probability under the weights being trained, so that the ratio is 1 and nothing corrects for the older policy; for
    ablations."""

    kl: Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k3+", "low_var_kl+"] = "k3"
    """Estimator of the KL to the reference policy: k1 (also called kl), abs, k2 (mse) or k3 (low_var_kl). A name with +
    has the value of the name without it and the gradient of k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL to the reference enters. loss: as a term of the loss. reward: subtracted from the reward of each
    token, before advantages are computed."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Factor of the KL of fresh tokens to the reference policy, which is the policy at the start of the run. 0 = no KL,
    and no copy of the model as reference."""
    kl_target: PositiveFloat | None = None
    """Mean KL per token towards which the coefficient is adapted after each step, starting from `kl_coefficient`, which
    must be above 0. None = the coefficient is constant."""
    kl_horizon: PositiveFloat = 10_000.0
    """With `kl_target`, the number of trajectories in which the coefficient can change by at most about 20 %. Larger
    values adapt it more slowly. A step changes it by at most 20 %, however many trajectories it has."""
    entropy_coefficient: float = 0.0
    """Factor of the entropy bonus of fresh tokens, which is subtracted from the loss. 0 = no bonus."""
    observation_coefficient: NonNegativeFloat = 0.0
    """Factor of the observation loss: the mean of -log p over the tokens of the environment's answers in fresh
    trajectories, which trains the policy to predict them. 0 = no such loss. Without
    `warm_start.observation_coefficient` it can destroy a policy, because garbage actions have predictable answers."""


class ReplaySettings(Settings):
    """Experience replay, implemented in `gleanrl.experience`.

    Successful trajectories are stored in a pool, and later groups of the same task replay them. docs/concepts/replay.md
    has the formulas and their sources.
    """

    enabled: Changeable[bool] = False
    """Store successful trajectories in a pool, and replay them in later groups of the same task. When a run is resumed,
    the other settings of this section must stay the same only if replay was on before and still is."""
    path: Changeable[str | None] = None
    """File of the pool; may be that of an earlier run, which is continued. None = `experience.sqlite` in the run
    folder."""
    seed_from: str | None = None
    """A pool's file or a run's folder, whose successful trajectories are copied into the pool before the first step if
    the pool is empty. Its tokenizer must be that of this run. None = start without trajectories."""
    trust_tokenizer: Changeable[bool] = False
    """Accept a pool, or a `seed_from`, that does not name its tokenizer, as if its token ids were of this run's
    tokenizer. false refuses it."""

    start_progress: Fraction = 0.0
    """Fraction of the run's steps that must be planned before replay begins; 0 = from the start. Once begun, replay
    does not end."""
    start_solve_rate: Fraction | None = None
    """Replay begins once the running solve rate of fresh trajectories (over about ten steps) reaches this, or at
    `start_progress` if that is above 0 and comes first. None = only `start_progress` decides."""
    task_ratio: Fraction = 0.5
    """Fraction of a batch's groups whose tasks are drawn from the pool. While the pool has fewer tasks, fresh tasks
    take their place."""
    min_task_ratio: Fraction | None = None
    """Makes the fraction adaptive: it is `min_task_ratio` + ESS x (`task_ratio` - `min_task_ratio`), where ESS is the
    running effective sample size of replayed tokens (the metric `loss/replayed/ess`), from 0 to 1. None = the fraction
    is always `task_ratio`."""
    tasks: Literal["gaussian", "uniform", "uniform_buckets", "difficulty", "rescue"] = "gaussian"
    """How tasks are drawn from the pool, by the solve rate of their latest fresh group. gaussian: weight exp(-(rate -
    0.5)^2 / (2 sigma^2)) for each rate. uniform: each task alike. uniform_buckets: each rate alike. difficulty: only
    tasks with `difficulty` successes. rescue: weight (1 - rate)^group, the chance that a fresh group has no success."""
    sigma: PositiveFloat = 0.125
    """Standard deviation of `tasks = "gaussian"`, in units of solve rate. Smaller values prefer tasks that are solved
    half of the time more strongly."""
    difficulty: NonNegative = 4
    """With `tasks = "difficulty"`, the number of successes, scaled to `schedule.group` members, that a task's latest
    fresh group must have; at most `schedule.group`."""

    per_group: NonNegative = 1
    """Maximum number of stored trajectories in a group whose task comes from the pool. 0: the pool only chooses tasks,
    and no trajectory is replayed in groups."""
    placement: Literal["add", "replace"] = "add"
    """Whether stored trajectories join `schedule.group` fresh ones (add) or each take the place of a fresh one
    (replace). replace saves sampling; `per_group` must then be below `schedule.group`."""
    select: str = "lowest_entropy"
    """Which trajectories of a task are replayed, and which remain in the pool beyond `capacity_per_task`:
    lowest_entropy (the policy was sure of its tokens), highest_entropy, random, newest, least_used (then
    lowest_entropy, which also remains), or the import path of a function that is decorated with
    `@gleanrl.experience.pool.ranking.ranking`."""
    entropy_from: Literal["current", "recorded"] = "recorded"
    """Entropy by which `select` ranks trajectories for replay. recorded: minus the mean log-prob of the sampled tokens
    at sampling, which costs nothing. current: their mean entropy under the learner's weights when the batch is planned,
    which costs a forward pass."""
    baseline: Literal["fresh", "group"] = "fresh"
    """Members from which the mean and deviation of a group with replayed members are computed. fresh: the fresh members
    only. group: all members."""
    grouping: Literal["shared", "own"] = "shared"
    """With which members a replayed trajectory is compared. shared: with the other members of its task's group. own:
    with none, because it forms a group of its own; for comparisons of methods only."""

    min_rate: Fraction = 0.0
    """A fresh group stores its successes only if its solve rate is above this and below `max_rate`."""
    max_rate: Fraction = 1.0
    """A fresh group stores its successes only if its solve rate is below this and above `min_rate`. At 1.0, groups in
    which every member succeeded are not stored."""
    success_threshold: float = SUCCESS
    """Minimum score of a success, in the pool and in replay's solve rates. If it is not set, it is
    `reward.success_threshold`."""
    capacity_per_task: Positive = 8
    """Maximum number of stored trajectories per task. Beyond it, some are evicted, as the ranking `select` says."""
    keep_failures: NonNegative = 0
    """Number of failures of each task that the pool keeps as well, the newest ones with distinct tokens. Failures are
    fresh trajectories with a valid score below `success_threshold`. They are stored apart from the successes, and
    nothing in the package trains on them: they are for learners and curricula of your own. 0 = none."""
    retire_after: Positive = 2
    """Number of consecutive fresh groups without a failure after which a task is retired: it is neither played nor
    replayed, except by `probe_fraction`."""
    probe_fraction: Fraction = 0.05
    """Fraction of a batch's groups that play retired tasks. A task that then fails returns from retirement. 0 = retired
    tasks are not played while others are left."""
    max_age: Positive | None = None
    """Maximum age of a stored trajectory, in versions of the weights (steps of the run). Older ones are evicted. None =
    no limit."""
    max_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """A trajectory is not replayed in a batch, but stays in the pool, if the geometric mean of p / r over its tokens is
    outside [1 / max_ratio, max_ratio]. r is the recorded probability of a token, and p that under the learner's weights
    when the batch is planned, which costs a forward pass. None = no such check."""
    source_limits: dict[str, Fraction] = Field(default_factory=dict)
    """Maximum fraction of the replayed trajectories of a batch, or of an extra update, by source; 0 = never used.
    Sources are own (sampled by this run), earlier (sampled by earlier runs with the pool's file), seed, demonstrations,
    import, and names given with `gleanrl pool RUN import --source`. A source that is not named has no limit."""
    reverify: bool = False
    """Score a stored trajectory again each time before it is replayed, and evict it if the score differs. For rewards
    or environments that may have changed since."""

    restart_share: Fraction = 0.0
    """Fraction of a batch's groups that restart a task: their episodes begin with the first turns of a stored success,
    which are repeated and not trained. Only tasks whose latest fresh group had at most one success, or a rate nearest
    to that, are restarted. 0 = none. For environments that repeat their observations exactly if the actions are the
    same."""

    pool_updates: NonNegative = 1
    """Number of extra optimizer updates at the end of each step, after replay has begun. Each trains on `pool_batch`
    successes with the advantage 1 - solve rate of their task. 0 = none."""
    pool_batch: Positive = 8
    """Maximum number of successes in an extra update, each from another task or group."""
    pool_from: Literal["pool", "batch"] = "pool"
    """Successes that the extra updates train on. pool: drawn from the pool, as for groups. batch: from the groups of
    the step itself, as a control in experiments."""

    @field_validator("max_rate")
    @classmethod
    def _lets_something_in(cls, rate: float, info: ValidationInfo) -> float:
        # `info.data` has no min_rate if that field was itself invalid.
        low = info.data.get("min_rate")
        if low is not None and rate <= low:
            raise ValueError(f"must be above replay.min_rate = {low}, or nothing is ever stored")
        return rate


class GuidanceSettings(Settings):
    """Guidance, which puts text about experience from similar tasks into the prompts of some rollouts.

    See docs/howto/guidance.md.
    """

    enabled: bool = False
    """Insert retrieved experience into the prompts of some members of each group."""
    guided_share: Fraction = 0.5
    """Fraction of a group's fresh members that are guided, rounded down. With texts that are discarded, at least two
    members remain unguided."""
    mode: Literal["keep", "discard", "mixed"] = "discard"
    """What training sees of a guided member. keep: the prompt with the text, so the member is on-policy. discard: the
    prompt without it, so the member is off-policy and is trained on like a replayed one. mixed: keep for some tasks and
    discard for the others, by `keep_share`."""
    keep_share: Fraction = 0.5
    """With `mode = "mixed"`, the fraction of the tasks whose guided members keep the text."""
    retriever: str = "bm25"
    """Where experience comes from: bm25 (the run's own successes, searched by BM25), reme (a ReMe service), or the
    import path of a `Retriever`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the retriever. reme takes `url` and `workspace`."""
    k: Positive = 1
    """Maximum number of experiences in a prompt."""
    template: str = "Experience from similar tasks:\n{experience}\n\n{prompt}"
    """Text that replaces the last user message before the first answer. It must contain `{prompt}`, which becomes that
    message, and `{experience}`, which becomes the retrieved texts, once each."""
    prompt_share: Fraction = 0.5
    """Maximum fraction of the model's context that the messages before the first answer may take with the experiences
    inserted. Experiences are left out, last ones first, until the rest fits."""
    timeout_s: Changeable[PositiveFloat] = 10.0
    """Time limit of a retrieval in seconds. If it is exceeded, the group is played without guidance."""

    @field_validator("template")
    @classmethod
    def _has_both(cls, template: str) -> str:
        for name in ("{experience}", "{prompt}"):
            if template.count(name) != 1:
                raise ValueError(f"must hold {name} once")
        return template


class LearnerSettings(Settings):
    lr: Changeable[PositiveFloat] = 2e-4
    """Learning rate of AdamW, after the warm-up. If unset: 2e-4 for the tiny model, 1e-6 for any other model, or 1e-5
    for LoRA adapters on it. A run's config.toml contains the value in use."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay rates of AdamW's running means of the gradient and of its square."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW. It applies to matrices only, not to biases and norms."""
    warmup_steps: NonNegative = 0
    """Number of steps in which the learning rate rises linearly to `lr`; 0 = none."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from `lr`, after the warm-up, to `lr` x `min_lr_ratio` at the last step of the run.
    constant: not at all."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the last step of the run, as a fraction of `lr`. Has no effect with `decay = "constant"`."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm to which the gradient of each update is clipped."""
    updates_per_step: Positive = 1
    """Number of optimizer updates per step. A batch is divided into this many mini-batches of whole groups, so it must
    divide `schedule.batch`."""
    epochs: Positive = 1
    """Number of passes over the mini-batches of each step. More than 1 needs a schedule that trains on whole batches:
    sync or one_step_off."""
    tokens_per_microbatch: Changeable[Positive] = 16384
    """Maximum number of tokens, padding included, in one forward and backward pass; at most 2048 are used on a CPU. It
    changes speed and memory use, but not the update. A longer sequence has a pass of its own."""
    activation_checkpointing: Changeable[bool] = False
    """Compute activations again in the backward pass instead of storing them. This saves memory and costs a further
    forward pass."""
    offload_activations: Changeable[bool] = False
    """Keep what `activation_checkpointing` stores, the layers' inputs, in main memory. No effect on a CPU."""
    attn_implementation: Changeable[str] = "auto"
    """Attention implementation of transformers for the learner, such as sdpa, eager or flash_attention_2. auto: flash
    attention if it is installed, the model and GPU support it, and passes compute in bfloat16; otherwise transformers'
    default. Samplers choose their own."""
    lora_rank: NonNegative = 0
    """Rank of the LoRA adapters that are trained instead of the model's weights; 0 = train all weights, without
    adapters. Needs the extra `lora`."""
    lora_alpha: PositiveFloat = 32.0
    """Scale of the adapters: their output is multiplied by lora_alpha / lora_rank."""
    lora_targets: str = "all-linear"
    """Names of the modules that get adapters, separated by commas, such as "q_proj,v_proj". "all-linear" means all
    linear layers but the output layer."""
    old_logprobs: Literal["sampler", "recompute", "loglinear"] = "sampler"
    """Log-probs in the denominator of a fresh token's ratio. sampler: those recorded at sampling. recompute: those of
    the weights before the step's updates, by a further forward pass. loglinear: an estimate of the latter without a
    further pass, by interpolation between the recorded log-probs and those in the update, according to the token's
    staleness."""
    ranks: Changeable[Positive] = 1
    """Number of processes over which the learner's model is sharded, each with a GPU of its own or all on the CPU. They
    are started on this machine, or by Ray on any of its nodes. Under torchrun leave it at 1, because torchrun starts
    the processes."""
    backend: Changeable[Literal["fsdp", "megatron"]] = "fsdp"
    """Library that runs the model of several ranks. fsdp: transformers, sharded by FSDP2. megatron: Megatron-core, for
    Llama, Qwen2 and Qwen3, without adapters and without a critic. A checkpoint of one resumes with the other."""
    tensor_parallel: Changeable[Positive] = 1
    """Number of processes that compute each layer together on the same samples (tensor parallelism). Its product with
    `pipeline_parallel` must divide the number of ranks; the quotient is the number of data-parallel groups."""
    pipeline_parallel: Changeable[Positive] = 1
    """Number of stages into which Megatron-core divides the layers (pipeline parallelism). Each computes other
    micro-batches at the same time. It must divide the number of layers."""
    distributed_optimizer: Changeable[bool] = False
    """Divide AdamW's moments among data-parallel groups, with Megatron-core. FSDP2 always does so."""
    offload_state: Changeable[bool] = False
    """Keep the weights, gradients and AdamW's moments of several ranks in main memory, and update them on the CPU.
    FSDP2 copies a layer's weights to the GPU while the layer computes. No effect on a CPU."""


class EvaluationSettings(Settings):
    every: NonNegative = 5
    """Number of steps between evaluations; 0 = no evaluations between those at the start and at the end. The policy is
    always evaluated after the last step."""
    samples: Positive = 4
    """Number of sampled attempts at each task, from which pass@1 and pass@k are estimated. More attempts narrow the
    confidence interval and allow larger k."""
    greedy: bool = True
    """Also make one attempt at each task at temperature 0."""
    at_start: bool = True
    """Also evaluate the policy before the first step."""


class RunCheckpointSettings(CheckpointSettings):
    return_on_collapse: bool = False
    """If success falls to half of the run's best or less, restore weights and optimizer from the newest checkpoint
    after which success was still high, and halve the learning rate from then on. Steps, replay and the order of tasks
    go on. Without it, a fall is only reported. Not with `tasks.order = "levels"`, where harder tasks lower success."""


class RolloutMonitorSettings(MonitorSettings):
    """Where a run writes its metrics, and how many trajectories of each step it writes to the run folder."""

    rollouts_per_step: int = Field(default=-1, ge=-1)
    """Maximum number of trajectories of each step that are written to the folder rollouts/ of the run; 0 = none, -1 =
    all."""


class RewardSettings(Settings):
    """The reward function or service, and the limits, retries and cache of its requests. Implemented in
    `gleanrl.rewards`.
    """

    name: str = "environment"
    """The reward: environment (the environment's own score), math, format, length, overlong, repetition, judge, rubric,
    group_judge, http, model, pooling, weighted, or the import path of a function, a class or a `Scorer`,
    `package.module:name` or `file.py:name`. A function with the signature of verl or TRL has `verl:` or `trl:` before
    its path."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a class, or further keyword arguments of a function. The value `env:NAME` is read from the
    environment variable NAME; use this for keys."""
    success_threshold: float = SUCCESS
    """Minimum score of a solved task. Success rates use it: pass@k and greedy success of evaluations, `reward/success`,
    the orders of tasks that depend on success, guidance, and the report; also replay, unless
    `replay.success_threshold` is set. Mean scores do not depend on it."""
    isolation: Changeable[Literal["thread", "process"]] = "thread"
    """Where calls of a reward that is not async run. process: in worker processes; one whose call exceeds `timeout_s`
    is killed. thread: in threads of the reward agent's process; a call that hangs cannot be stopped."""
    workers: Changeable[Positive] = 16
    """Maximum number of concurrent calls of a reward that is not async, each in its own thread or process, whatever
    `max_concurrency` is. Evaluation has as many again, each part of a weighted sum has its own, and so has the
    post-processing of groups; math uses at most one per CPU core, for both together."""

    max_concurrency: Changeable[Positive] = 2048
    """Maximum number of training requests in flight at the same time; further ones wait."""
    eval_concurrency: Changeable[Positive] = 256
    """Maximum number of evaluation requests in flight at the same time, in addition to those of training."""
    eval_share: Changeable[Annotated[float, Field(gt=0.0, lt=1.0)]] = 0.25
    """Fraction of the rate limits and of a reward model's batches that evaluation gets while training needs them too.
    While only one of the two has requests, it gets everything."""
    requests_per_minute: Changeable[Positive | None] = None
    """Maximum number of requests per minute, training and evaluation together, retries included; None = no limit. For a
    weighted sum, the calls of its parts count, except those of rewards that call no service."""
    tokens_per_minute: Changeable[Positive | None] = None
    """Maximum number of tokens per minute, prompts and answers of training and evaluation together, retries included;
    None = no limit."""

    timeout_s: Changeable[PositiveFloat] = 60.0
    """Time limit of one attempt in seconds, or of one batch of a reward model in this process. It begins when the
    request is sent; the wait for a slot, a thread, a connection or other batches does not count."""
    attempts: Changeable[Positive] = 5
    """Maximum number of attempts per request, including the first. Only transient errors are retried. Attempts in an
    outage do not count; see `down_after_s`. An outage is a time in which a service that has answered before accepts no
    connections, or in which it refuses all requests (HTTP status 429, 502, 503 or 529), however few there are."""
    backoff_s: Changeable[PositiveFloat] = 0.5
    """Upper bound in seconds of the random wait before the second attempt. The bound doubles with each attempt, up to
    `max_backoff_s`. If the service requests a longer wait, the wait is that long."""
    max_backoff_s: Changeable[PositiveFloat] = 60.0
    """Upper bound in seconds of any wait between two attempts that the service has not requested."""
    max_failed_fraction: Changeable[Fraction] = 0.5
    """Stop the run with an error if more than this fraction of the last `failed_window` requests failed after all their
    attempts. 1.0 turns this check off."""
    failed_window: Changeable[Annotated[int, Field(ge=32)]] = 128
    """Number of the latest requests over which `max_failed_fraction` is measured. It is measured once 32 requests have
    ended."""
    down_after_s: Changeable[PositiveFloat] = 600.0
    """Stop the run with an error if no attempt has succeeded for this many seconds, and attempts of at least four
    requests have failed. With fewer, each request fails after this time. A request fails at once if its service demands
    a longer wait than this."""
    hedge_share: Changeable[Annotated[float, Field(ge=0.0, lt=1.0)]] = 0.0
    """Fraction of the requests, the slowest, that are sent a second time before the first answer has come; the first
    score is used. This shortens the longest waits at the cost of more requests. 0 = off."""

    cache: Changeable[NonNegative] = 100_000
    """Maximum number of scores kept in memory. A request with the same task, conversation and reward version as an
    earlier one then gets its score without being sent. 0 = none; the journal still answers repeated requests."""
    journal: Changeable[bool] = True
    """Store finished scores in the run folder (rewards.sqlite), so that a resumed run does not request, and pay for,
    them again."""


class RaySettings(Settings):
    """Settings of a run whose samplers, environments, rewards and learner are Ray actors. See docs/howto/ray.md."""

    enabled: bool = False
    """Run on Ray. The option `--runtime ray` sets it."""
    address: str | None = None
    """Address HOST:PORT of the Ray cluster to join, or "auto" for the one on this machine. The option `--ray-address`
    sets it. None: a cluster is started on this machine and ends with the run."""
    samplers: Positive = 1
    """Number of sampler actors. Each has a copy of the model for training and one for evaluation."""
    environments: NonNegative = 1
    """Number of actors that run the environments, each with `environment.workers` worker processes. 0 runs the
    environments in the driver."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """How the actors share resources. disaggregated: every actor has resources of its own, and all work at the same
    time. colocated: learner and samplers share one bundle of resources and take turns on its GPU."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy for the actors' bundles: on as few nodes as possible (PACK) or on as many as possible
    (SPREAD). STRICT_PACK requires a single node, STRICT_SPREAD a node for each bundle. Ignored if colocated."""
    sampler_cpus: NonNegativeFloat = 1.0
    """Number of CPUs that Ray reserves for each sampler."""
    sampler_gpus: NonNegativeFloat | None = None
    """Number of GPUs that Ray reserves for each sampler. None: 1 on a cluster with GPUs or, if colocated, an equal
    share of one GPU; 0 on a cluster without."""
    learner_cpus: NonNegativeFloat = 1.0
    """Number of CPUs that Ray reserves for each of `learner.ranks`."""
    learner_gpus: NonNegativeFloat | None = None
    """Number of GPUs that Ray reserves for each of `learner.ranks`; with several ranks, 0 or at least 1. None: 1
    on a cluster with GPUs or, if colocated, an equal share of one GPU; 0 on a cluster without."""
    environment_cpus: NonNegativeFloat = 1.0
    """Number of CPUs that Ray reserves for each environment actor."""
    reward_cpus: NonNegativeFloat = 0.0
    """Number of CPUs that Ray reserves for the actor of the reward agent. There is none if `reward.name =
    "environment"`."""
    transfer: Literal["auto", "memory", "broadcast"] = "auto"
    """How weights reach the samplers. memory: through Ray's object store. broadcast: over NCCL if the learner and each
    sampler have GPUs of their own, otherwise over gloo. auto: broadcast on several nodes if all have such GPUs;
    otherwise, or after a broadcast has failed, memory."""
    max_restarts: NonNegative = 3
    """Maximum number of times that each actor is started again after it died; one more death ends the run. After a
    death of the learner, the run resumes from its last checkpoint. 0 = the first death ends the run."""
    wait_s: PositiveFloat = 300.0
    """Maximum number of seconds to wait until the cluster provides the resources that the run reserves, at the start
    and for each actor after its node is gone."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on which the learner's node accepts the samplers of a broadcast; 0 = any free port. Set it if a firewall
    separates the nodes."""


class Config(JobConfig):
    """All settings of a run that trains a language model."""

    kind: ClassVar[str] = "language model"

    environment: EnvironmentSettings = EnvironmentSettings()
    tasks: TaskSettings = TaskSettings()
    model: ModelSettings = ModelSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    sampler: SamplerSettings = SamplerSettings()
    context: ContextSettings = ContextSettings()
    reward: RewardSettings = RewardSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    credit: CreditSettings = CreditSettings()
    critic: CriticSettings = CriticSettings()
    replay: ReplaySettings = ReplaySettings()
    guidance: GuidanceSettings = GuidanceSettings()
    loss: LossSettings = LossSettings()
    learner: LearnerSettings = LearnerSettings()
    evaluation: Changeable[EvaluationSettings] = EvaluationSettings()
    checkpoint: Changeable[RunCheckpointSettings] = RunCheckpointSettings()
    monitor: Changeable[RolloutMonitorSettings] = RolloutMonitorSettings()
    ray: Changeable[RaySettings] = RaySettings()

    def plan(self) -> dict[str, str]:
        schedule, evaluation, ray = self.schedule, self.evaluation, self.ray
        episodes = self.run.steps * schedule.batch * schedule.group
        between = (self.run.steps - 1) // evaluation.every if evaluation.every else 0
        # the 1 is the evaluation after the last step, which is not one of ``between``
        times = evaluation.at_start + between + 1
        attempts = f"{evaluation.samples} sampled{' and 1 greedy' if evaluation.greedy else ''}"
        evaluated = times * self.environment.eval_tasks * (evaluation.samples + evaluation.greedy)
        updates = self.run.steps * self.learner.updates_per_step * self.learner.epochs
        lines = super().plan()
        if ray.enabled:
            actors = f"samplers {ray.samplers}, environments {ray.environments}, {ray.placement}"
            lines["Ray actors"] = f"{actors}, on {ray.address or 'this machine'}"
        lines["training"] = (
            f"{self.run.steps} steps x {schedule.batch} groups x {schedule.group} = {episodes} episodes "
            f"of at most {self.context.max_turns} turns, schedule {schedule.preset}"
        )
        lines["updates"] = f"{updates} of {self.credit.estimator} / {self.loss.name}"
        lines["evaluation"] = (
            f"{times} x {self.environment.eval_tasks} held-out tasks, {attempts} each = {evaluated} episodes"
        )
        return lines
