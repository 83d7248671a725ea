"""Defines every setting of a run that trains a language model, with its default and its meaning.

Each section of a configuration is a class, such as `LossSettings`, and `Config` contains all sections. A section is an
immutable value whose fields have been checked. Code that needs only one section, such as a loss, takes that section
alone, so it can be used without a configuration file.

`gleanrl.config.loading` fills the sections from files and the command line. `gleanrl.config.validate` checks settings
that depend on other sections.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from gleanrl.utils.settings import (
    CheckpointSettings,
    Fraction,
    JobConfig,
    MonitorSettings,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Settings,
)


class EnvironmentSettings(Settings):
    name: str = "alfworld"
    """alfworld, textworld, reasoning_gym, dataset, textarena, gymnasium, verifiers, openenv, tools, mixture, service,
    or an import path, `package.module:Class` or `file.py:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the taskset, which documents and checks them."""
    train_tasks: Positive = 256
    eval_tasks: Positive = 64
    warm_start_tasks: Positive = 100
    workers: NonNegative = 0
    """Worker processes that hold the environments; 0 plays them inside this process."""
    timeout_s: PositiveFloat = 60.0
    """Time limit of one reset or step. If it is exceeded, the episode fails and its worker is replaced."""


class TaskSettings(Settings):
    """The order in which training plays its tasks.

    Every order can be combined with `replay`, which takes some tasks of each batch from the pool of stored
    trajectories.
    """

    order: str = "shuffled"
    """shuffled: every task once per epoch; a mixture draws its sources by weight, each with epochs of its own.
    levels: one source after the other; the next starts once the previous is learned. solve_rate: tasks that are solved
    half of the time come most often. Or an import path of a `Curriculum`, called as
    ``(tasks, *, weights, group, seed, greedy, **options)``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the order. levels takes ``advance``, ``window``, ``review``; solve_rate takes ``sigma``,
    ``memory``, ``explore``."""


class ModelSettings(Settings):
    init: str = "tiny"
    """"tiny" builds a small Llama model and a tokenizer from the environment's own text; anything else is
    a Hugging Face model directory or id."""
    hidden_size: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 2
    mlp_ratio: Positive = 3
    max_context: Positive = 1024
    """Context length of the tiny model in tokens. For any other model, an upper limit on its own context length."""
    vocabulary: Positive = 512
    """Upper bound on the vocabulary size of the tiny tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, bfloat16 compute over float32 weights on a GPU."""
    device: str = "auto"
    trust_remote_code: bool = False


class WarmStartSettings(Settings):
    """Supervised training on an expert's demonstrations before RL starts.

    The resulting weights are cached on disk. Later runs load them if everything that the weights depend on (these
    settings, the model, the demonstrations, the seed and the versions of gleanrl and torch) is the same.
    """

    enabled: bool = True
    demonstrations: Positive = 400
    noise: Fraction = 0.0
    """Probability that a random valid action replaces the expert's next one."""
    steps: Positive = 260
    batch: Positive = 32
    lr: PositiveFloat = 1e-3


class SamplerSettings(Settings):
    name: str = "transformers"
    """transformers, vllm, openai, or an import path of a `Sampler`, called like `TransformersSampler` as ``(model, *,
    max_rows, max_context, deterministic, inflight, dtype, device_lock, timeline, **options)``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the sampler, or for vllm those of its engine."""
    evaluation_options: dict[str, Any] = Field(default_factory=dict)
    """Options that override `options` for the evaluation's own sampler, e.g. the address of another server."""
    temperature: NonNegativeFloat = 1.0
    max_rows: Positive = 256
    """Episodes that sample at the same time; further ones wait for a free row."""
    deterministic: bool | Literal["auto"] = "auto"
    """Make results independent of timing: each decoding burst waits for all live episodes. auto: only if the schedule
    has staleness 0."""


class ContextSettings(Settings):
    policy: Literal["linear", "strip_thinking", "window"] = "linear"
    window_turns: Positive = 8
    """Environment messages that the `window` policy keeps in addition to the first."""
    max_turns: Positive = 12
    """Maximum number of sampled turns per episode."""
    max_tokens_per_turn: Positive = 16
    """A turn that reaches this length is cut off (counted in `episode/cut_turns`). If unset: 16 for the tiny model,
    which suits commands; 256 for any other, or half of model.max_context. Reasoning needs more."""
    system_prompt: str | None = None


class ScheduleSettings(Settings):
    preset: Literal["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"] = "sync"
    batch: Positive = 16
    """Groups per step."""
    group: Positive = 8
    """Fresh trajectories per group."""
    chunks: Positive = 4
    """Chunks per step into which the pipelined presets divide a batch."""
    adaptive: bool = False
    """Train on all ready chunks in one call of the learner: fewer and larger calls if rewards arrive faster."""
    staleness: NonNegative = 2
    """Staleness bound of `bounded_async`; the other presets imply theirs (0 or 1)."""
    device_first: Literal["due", "sample", "train"] = "due"
    """Priority on a device that sampler and learner share. due: sampling until all groups that this step and the next
    consume have been sampled, then training. sample: sampling first, so that rewards are requested as early as
    possible; `bounded_async` then learns from groups as old as its bound. train: training first, so that groups are
    young and the next rewards come later."""
    dynamic_sampling: bool = False
    """Replace groups without variance (all members have equal rewards) by groups of further tasks."""
    max_resample: PositiveFloat = 3.0
    """With dynamic sampling, the maximum number of groups started per group consumed."""
    min_valid: Positive = 2
    """Drop a group with fewer valid fresh members than this, and start another in its place."""
    max_failed_fraction: Fraction = 0.5
    """Stop the run with a clear message if more than this share of the last episodes failed."""


class CreditSettings(Settings):
    """The advantage estimator, which turns rewards into advantages. Implemented in `gleanrl.algorithms.advantages`."""

    estimator: str = "grpo"
    """grpo dr_grpo grpo_passk rloo reinforce_plus_plus reinforce_plus_plus_baseline opo gpg remax gae, or an
    import path of a function under `@gleanrl.algorithms.advantages.estimator`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword options of the estimator, e.g. `gamma` and `lam` of gae; each estimator documents its own."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """drop: a group whose members all have the same reward does not count in the loss's denominator either."""


class CriticSettings(Settings):
    """The critic (value function). A run has one only if its estimator needs values, as ``gae`` does."""

    model: Literal["own", "shared"] = "own"
    """own: a copy of the initial policy with a scalar head. shared: a scalar head on the policy's hidden states."""
    lr: PositiveFloat = 1e-3
    """Constant learning rate of the critic's own optimizer (of the head only if the model is shared)."""
    coefficient: NonNegativeFloat = 0.5
    """Weight of the value loss in the gradient of a shared model's body."""
    clip: PositiveFloat | None = 0.5
    """A new value that is farther than this from the old one gets no gradient; None = off."""
    warmup_steps: NonNegative = 0
    """Number of first steps in which only the critic learns."""
    max_grad_norm: PositiveFloat = 1.0


class LossSettings(Settings):
    """The policy loss. Implemented in `gleanrl.algorithms.loss`."""

    name: str = "ppo"
    """ppo gspo cispo gpg reinforce clip_cov kl_cov, or an import
    path of a function under `@gleanrl.algorithms.loss.policy_loss`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword options of the loss (clip_cov and kl_cov have some); each loss documents its own."""
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound on -A * ratio for negative advantages (dual-clip PPO); None = off."""
    aggregation: Literal[
        "auto", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "auto"
    """How the loss is averaged. auto: seq-mean-token-mean for gspo, token-mean for the others."""
    aggregation_scale: PositiveFloat | None = None
    """Divisor of seq-mean-token-sum-norm; None = the longest possible sequence (max_context)."""

    correction: Literal["none", "truncate", "mask"] = "none"
    """Weight of a fresh token by the ratio of proximal to behaviour probability. truncate: the ratio is capped. mask: a
    token above the cap is left out, as in decoupled PPO. With `learner.old_logprobs = "sampler"` the two probabilities
    are equal, and this has no effect."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """What the ratio of `correction` is: that of one token, or the product or the geometric mean over its sequence."""
    correction_cap: PositiveFloat = 5.0
    correction_floor: NonNegativeFloat = 0.0
    """mask: a token whose ratio is below this is left out too."""

    replay_mode: Literal["clip", "shape"] = "clip"
    """Loss of replayed tokens. clip: PPO with an upper clip of its own. shape: -A w / (w + replay_shape), unclipped."""
    replay_clip_high: NonNegativeFloat = 1.0
    replay_shape: PositiveFloat = 0.1
    replay_coefficient: NonNegativeFloat = 1.0
    """Factor on the loss of replayed tokens. Shaping alone makes their gradient about twelve times smaller."""
    replay_importance: Literal["recorded", "current"] = "recorded"
    """Denominator of a replayed token's ratio: its recorded log-prob, or the current one (ratio 1, for ablations)."""

    kl: Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k3+", "low_var_kl+"] = "k3"
    """Estimator of the KL to the reference. A name with + has the value of the name without it and the gradient of
    k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL enters: as a term of the loss, or subtracted from each token's reward."""
    kl_coefficient: NonNegativeFloat = 0.0
    kl_target: PositiveFloat | None = None
    """Mean KL towards which the coefficient is adapted; None = fixed coefficient."""
    kl_horizon: PositiveFloat = 10_000.0
    """Number of trajectories over which an adaptive coefficient reacts."""
    entropy_coefficient: float = 0.0


class ReplaySettings(Settings):
    """Experience replay, implemented in `gleanrl.experience`.

    Successful trajectories are stored in a pool, and later groups of the same task replay them. docs/concepts/replay.md
    has the formulas and their sources.
    """

    enabled: bool = False
    path: str | None = None
    """The pool's file; None = `experience.sqlite` in the run folder."""
    seed_from: str | None = None
    """A pool or run whose successes fill a new pool before the first step."""
    trust_tokenizer: bool = False
    """Assume that a pool that does not name its tokenizer holds token ids of this run's tokenizer."""

    start_progress: Fraction = 0.0
    """Share of the run's steps that must be planned before replay begins. Once begun, replay never ends."""
    start_solve_rate: Fraction | None = None
    """If set, replay begins once the running mean success of fresh groups reaches this, or at `start_progress` if that
    is above 0 and comes first."""
    task_ratio: Fraction = 0.5
    """Share of a batch's groups whose tasks come from the pool, if the pool has that many."""
    tasks: Literal["gaussian", "uniform", "uniform_buckets", "difficulty", "rescue"] = "gaussian"
    """How tasks are drawn. gaussian: by exp(-(rate - 0.5)^2 / (2 sigma^2)). uniform: each task equally often.
    uniform_buckets: each solve rate equally often. difficulty: only tasks with `difficulty` successes. rescue: by
    (1 - rate)^n, the chance that a fresh group has no success."""
    sigma: PositiveFloat = 0.125
    """Standard deviation of `gaussian`, in solve rate."""
    difficulty: NonNegative = 4
    """Successes in a task's latest fresh group, for `tasks = "difficulty"`."""

    per_group: NonNegative = 1
    """Stored trajectories added to each group; 0 replays none and only chooses tasks."""
    placement: Literal["add", "replace"] = "add"
    """add: stored trajectories join a full group of fresh ones. replace: each takes the place of a fresh one."""
    select: Literal["lowest_entropy", "highest_entropy", "random", "newest"] = "lowest_entropy"
    entropy_from: Literal["current", "recorded"] = "recorded"
    """recorded: minus the mean recorded log-prob of the sampled tokens, which estimates their entropy under the policy
    that sampled them and costs nothing. current: their mean entropy under the current policy (one forward pass)."""
    baseline: Literal["fresh", "group"] = "fresh"
    """Members that determine a mixed group's mean and deviation: the fresh ones, or the whole group."""
    grouping: Literal["shared", "own"] = "shared"
    """shared: a replayed trajectory joins its task's group. own: it forms a group of its own, for comparison only."""

    min_rate: Fraction = 0.0
    max_rate: Fraction = 1.0
    """A fresh group stores its successes if its solve rate is strictly between min_rate and max_rate."""
    success_threshold: float = 0.5
    capacity_per_task: Positive = 8
    retire_after: Positive = 2
    """Number of consecutive perfect fresh groups after which a task is retired: neither played fresh nor replayed."""
    probe_fraction: Fraction = 0.05
    """Share of a batch that plays retired tasks again."""
    max_age: Positive | None = None
    """Evict trajectories sampled more than this many versions ago; None = never."""
    max_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """Skip a trajectory in a batch if its geometric-mean ratio is outside [1 / max_ratio, max_ratio]; None = off."""
    reverify: bool = False
    """Score a stored trajectory again before it is replayed, and evict it if the scores disagree."""

    pool_updates: NonNegative = 1
    """Extra optimizer updates per step on `pool_batch` stored successes, each weighted by 1 - its task's solve rate."""
    pool_batch: Positive = 8
    pool_from: Literal["pool", "batch"] = "pool"
    """Successes that the extra updates imitate. pool: drawn from the pool as replay draws them. batch: those of the
    step itself, as a control for comparisons."""

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
    guided_share: Fraction = 0.5
    """Share of each group's fresh members whose prompt shows experience, rounded down."""
    mode: Literal["keep", "discard", "mixed"] = "discard"
    """keep: train with the text in the prompt, on-policy. discard: train without it, off-policy (at least two members
    of a group stay unguided, for its baseline). mixed: one or the other, by task."""
    keep_share: Fraction = 0.5
    """Share of the tasks that train with the text, for `mode = "mixed"`."""
    retriever: str = "bm25"
    """bm25, reme, or an import path of a `Retriever`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the retriever; reme takes `url` and `workspace`."""
    k: Positive = 1
    """Number of experiences shown."""
    template: str = "Experience from similar tasks:\n{experience}\n\n{prompt}"
    """Replaces the last user message of the opening; `{prompt}` is that message."""
    prompt_share: Fraction = 0.5
    """Share of the model's context that a guided opening may use; experiences that do not fit are left out."""
    timeout_s: PositiveFloat = 10.0
    """Time limit of a retrieval; if it is exceeded, the group is played without experience."""

    @field_validator("template")
    @classmethod
    def _has_both(cls, template: str) -> str:
        for name in ("{experience}", "{prompt}"):
            if template.count(name) != 1:
                raise ValueError(f"must hold {name} once")
        return template


class LearnerSettings(Settings):
    lr: PositiveFloat = 2e-4
    """Learning rate. If unset: 2e-4 for the tiny model, 1e-6 for any other, 1e-5 for its adapters. A run's config.toml
    holds the number used."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegative = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Fraction = 0.0
    max_grad_norm: PositiveFloat = 1.0
    updates_per_step: Positive = 1
    """Optimizer updates per step: a batch is divided into this many mini-batches of whole groups."""
    epochs: Positive = 1
    """Passes over each step's mini-batches; more than 1 needs the sync schedule."""
    tokens_per_microbatch: Positive = 16384
    """Padded tokens per forward and backward pass."""
    activation_checkpointing: bool = False
    attn_implementation: str = "auto"
    """Attention implementation of transformers, e.g. sdpa, eager, flash_attention_2. auto: flash attention if its
    package is installed and passes compute in bfloat16 on a GPU, else transformers' default. Samplers choose their
    own."""
    lora_rank: NonNegative = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: PositiveFloat = 32.0
    lora_targets: str = "all-linear"
    old_logprobs: Literal["sampler", "recompute", "loglinear"] = "sampler"
    """Denominator of the ratio. sampler: the log-probs as sampled. recompute: a forward pass before the step.
    loglinear: an interpolation between the sampled and the current log-probs by staleness."""
    ranks: Positive = 1
    """Number of processes that the model is spread over. They are started on this machine; under torchrun, leave this
    unset: torchrun starts the processes."""
    tensor_parallel: Positive = 1
    """Processes that compute each layer together, on the same samples; a divisor of `ranks`."""


class EvaluationSettings(Settings):
    every: NonNegative = 5
    """Number of steps between evaluations; 0 = only at the start and at the end."""
    samples: Positive = 4
    """Sampled attempts per task, for pass@1 and pass@k."""
    greedy: bool = True
    at_start: bool = True
    """Also evaluate the policy that training starts from."""


class RolloutMonitorSettings(MonitorSettings):
    """Where a run writes its metrics, and how many trajectories of each step it writes to the run folder."""

    rollouts_per_step: int = Field(default=-1, ge=-1)
    """Trajectories per step written to rollouts/; -1 = all."""


class RewardSettings(Settings):
    """The reward function or service, and the limits, retries and cache of its requests. Implemented in
    `gleanrl.rewards`.
    """

    name: str = "environment"
    """environment (the environment's own score), math, judge, http, model, pooling, weighted, or an import path
    `package.module:name` or `file.py:name` of a function, a class or a `Scorer`. A function with the signature of verl
    or TRL has `verl:` or `trl:` before its path."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a class, or further ones of a function. `env:NAME` reads a text from an environment
    variable, which is the place for keys."""
    isolation: Literal["thread", "process"] = "thread"
    """Where a reward that is not async runs. process: a call that exceeds its time limit is killed."""
    workers: Positive = 16
    """Threads or processes of a reward that is not async; each part of a weighted sum has this many."""

    max_concurrency: Positive = 2048
    """Maximum number of training requests in flight at the same time."""
    eval_concurrency: Positive = 256
    """Maximum number of evaluation requests in flight at the same time, in addition to training's."""
    eval_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.25
    """Share of the rate limits, of `workers` and of a reward model that evaluation gets if training uses them too."""
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    """Token limit over training and evaluation, retries included; None = no limit."""

    timeout_s: PositiveFloat = 60.0
    """Time limit of one try from when it is sent; waiting for a slot, a thread or a connection does not count."""
    attempts: Positive = 5
    """Maximum number of tries per request. Only transient errors are retried. If a service that has answered before
    accepts no connections, the request waits for the service, and these tries do not count."""
    backoff_s: PositiveFloat = 0.5
    """Maximum of the random wait before the first retry; it doubles with each further one. A wait is at least as long
    as the service requests."""
    max_backoff_s: PositiveFloat = 60.0
    max_failed_fraction: Fraction = 0.5
    """Stop the run with a clear message if more than this share of the last `failed_window` requests failed."""
    failed_window: Annotated[int, Field(ge=32)] = 128
    """Number of last requests for `max_failed_fraction`; at least 32 must have ended."""
    down_after_s: PositiveFloat = 600.0
    """Stop the run if every request has failed for this long. A request whose service demands a longer wait fails."""
    hedge_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the requests, namely the slowest, that are sent a second time; the first answer is used. 0 = off."""

    cache: NonNegative = 100_000
    """Scores kept in memory. Identical requests (task, conversation, reward version) are sent once. 0 = off."""
    journal: bool = True
    """Keep finished rewards in the run folder, so that a resumed run does not request (and pay for) them again."""


class RaySettings(Settings):
    """Settings of a run whose samplers, environments, rewards and learner are Ray actors. See docs/howto/ray.md."""

    enabled: bool = False
    """Run on Ray; `--runtime ray` sets this."""
    address: str | None = None
    """Address of the cluster to join, also set by `--ray-address` ("auto": the cluster of this machine). None starts a
    cluster on this machine for the run."""
    samplers: Positive = 1
    environments: NonNegative = 1
    """Actors that play the environments, each with `environment.workers` worker processes; 0 plays them in the
    driver."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """colocated: sampler and learner actors share one bundle of resources and take turns on its device, at most one
    GPU. disaggregated: each has resources of its own, and all work at the same time."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How Ray distributes disaggregated actors over the nodes."""
    sampler_cpus: NonNegativeFloat = 1.0
    sampler_gpus: NonNegativeFloat | None = None
    """GPUs of each sampler. None: 1 on a cluster with GPUs, or an equal share of one GPU if colocated."""
    learner_cpus: NonNegativeFloat | None = None
    """CPUs of the learner. None: 1 for each of `learner.ranks`."""
    learner_gpus: NonNegativeFloat | None = None
    """GPUs of the learner. None: as many as a sampler has, for each of `learner.ranks`."""
    environment_cpus: NonNegativeFloat = 1.0
    """CPUs of each environment actor."""
    reward_cpus: NonNegativeFloat = 0.0
    transfer: Literal["auto", "memory", "broadcast"] = "auto"
    """How weights reach the samplers. memory: Ray's object store. broadcast: NCCL if the learner and each sampler
    have a GPU of their own, else gloo. auto: broadcast between several nodes with such GPUs, memory otherwise or if a
    broadcast fails."""
    max_restarts: NonNegative = 3
    """How often one actor is started again after it died; its next death ends the run."""
    wait_s: PositiveFloat = 300.0
    """How long to wait for the resources of the cluster."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on which the learner waits for the samplers of a broadcast; 0 takes a free one."""


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
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    monitor: RolloutMonitorSettings = RolloutMonitorSettings()
    ray: RaySettings = RaySettings()

    identity: ClassVar[tuple[str, ...]] = (
        "run.seed",
        *(f"environment.{name}" for name in ("name", "options", "train_tasks", "warm_start_tasks")),
        *(f"model.{name}" for name in ModelSettings.model_fields if name not in ("device", "dtype")),
        *(f"warm_start.{name}" for name in WarmStartSettings.model_fields),
        "tasks.order",
        "schedule.batch",
        "learner.lora_rank",
    )

    def plan(self) -> dict[str, str]:
        schedule, evaluation, ray = self.schedule, self.evaluation, self.ray
        episodes = self.run.steps * schedule.batch * schedule.group
        attempts = self.environment.eval_tasks * (evaluation.samples + evaluation.greedy)
        times = 2 + (self.run.steps - 1) // evaluation.every if evaluation.every else 2
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
        lines["evaluation"] = f"{times} times {attempts} episodes on {self.environment.eval_tasks} held-out tasks"
        return lines
