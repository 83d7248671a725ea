"""Every setting of a run that trains a language model, by section, with its default and its meaning.

Sections are plain validated values, so that a loss or an estimator can take its own section without knowing about
configuration files. `gleanrl.config.loading` reads files and the command line into them; `gleanrl.config.validate`
checks what spans sections.
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
    """Keyword arguments of the taskset; each taskset documents and checks its own."""
    train_tasks: Positive = 256
    eval_tasks: Positive = 64
    warm_start_tasks: Positive = 100
    workers: NonNegative = 0
    """Worker processes that hold the environments; 0 plays them inside this process."""
    timeout_s: PositiveFloat = 60.0
    """How long one reset or step may take before the episode is given up (its worker is replaced)."""


class TaskSettings(Settings):
    """The order of fresh tasks. Replay's choice of stored ones is a section of its own and works with each of these."""

    order: str = "shuffled"
    """shuffled: every task once an epoch; the sources of a mixture by their weights, each in epochs of its own.
    levels: one source after the other, the next once the last is learned. solve_rate: tasks that are solved half the
    time come most often. Or an import path of a `Curriculum`, made as
    ``(tasks, *, weights, group, seed, greedy, **options)``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the order: of levels ``advance``, ``window``, ``review``; of solve_rate ``sigma``,
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
    """Positions of the tiny model; of any other model, a limit that may only be lower than its own."""
    vocabulary: Positive = 512
    """Upper bound on the tiny tokenizer's entries."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, bfloat16 compute over float32 weights on a GPU."""
    device: str = "auto"
    trust_remote_code: bool = False


class WarmStartSettings(Settings):
    """Supervised training on expert demonstrations before RL; cached by everything that it depends on."""

    enabled: bool = True
    demonstrations: Positive = 400
    noise: Fraction = 0.0
    """Chance that a random valid action takes the place of the expert's next one."""
    steps: Positive = 260
    batch: Positive = 32
    lr: PositiveFloat = 1e-3


class SamplerSettings(Settings):
    name: str = "transformers"
    """transformers, vllm, openai, or an import path of a `Sampler`, made as `TransformersSampler` is: ``(model, *,
    max_rows, max_context, deterministic, inflight, dtype, device_lock, timeline, **options)``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the sampler; for vllm, of its engine."""
    evaluation_options: dict[str, Any] = Field(default_factory=dict)
    """What evaluation's own sampler has in place of these, e.g. the address of another server."""
    temperature: NonNegativeFloat = 1.0
    max_rows: Positive = 256
    """Episodes that sample at once; further ones wait for a free row."""
    deterministic: bool | Literal["auto"] = "auto"
    """Each decoding burst waits for all live episodes, so that timing decides no rounding. auto: at staleness 0."""


class ContextSettings(Settings):
    policy: Literal["linear", "strip_thinking", "window"] = "linear"
    window_turns: Positive = 8
    """Environment messages that the `window` policy keeps, beside the first."""
    max_turns: Positive = 12
    """Sampled turns an episode may take."""
    max_tokens_per_turn: Positive = 16
    """A turn that reaches it is cut off (`episode/cut_turns`). Where a configuration sets none: 16, which suits
    commands, for the tiny model; 256 for any other, or half of model.max_context. Reasoning needs more."""
    system_prompt: str | None = None


class ScheduleSettings(Settings):
    preset: Literal["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"] = "sync"
    batch: Positive = 16
    """Groups a step."""
    group: Positive = 8
    """Fresh trajectories a group."""
    chunks: Positive = 4
    """Chunks a step that the pipelined presets cut a batch into."""
    adaptive: bool = False
    """Train on all chunks that are ready at once: fewer, larger calls of the learner where rewards outpace it."""
    staleness: NonNegative = 2
    """Bound of `bounded_async`; the other presets imply theirs (0 or 1)."""
    device_first: Literal["due", "sample", "train"] = "due"
    """Who gets a device that sampler and learner share, where both could go on. due: sampling until all groups that
    this step and the next will consume have been sampled, then training. sample: sampling, so that rewards are asked
    for as early as can be; `bounded_async` then learns from groups as old as its bound. train: training, so that
    groups are young and the next rewards come later."""
    dynamic_sampling: bool = False
    """Replace groups without variance (all members equal) by further tasks."""
    max_resample: PositiveFloat = 3.0
    """With dynamic sampling, at most this many groups are started for each that is consumed."""
    min_valid: Positive = 2
    """A group with fewer valid fresh members is dropped and its ticket refunded."""
    max_failed_fraction: Fraction = 0.5
    """The run stops with a clear message when more than this share of the last episodes failed."""


class CreditSettings(Settings):
    """How a trajectory's reward becomes advantages; defined in `gleanrl.algorithms.advantages`."""

    estimator: str = "grpo"
    """grpo dr_grpo grpo_passk rloo reinforce_plus_plus reinforce_plus_plus_baseline opo gpg remax gae, or an
    import path of a function under `@gleanrl.algorithms.advantages.estimator`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword options of the estimator, e.g. `gamma` and `lam` of gae; each documents its own."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """drop: a group whose members all earned the same leaves the loss's denominator too."""


class CriticSettings(Settings):
    """The value function that `gae` needs; unused by every other estimator."""

    model: Literal["own", "shared"] = "own"
    """own: a copy of the initial policy with a scalar head. shared: a scalar head on the policy's hidden states."""
    lr: PositiveFloat = 1e-3
    """Constant rate of the critic's own optimizer (of the head only, where the model is shared)."""
    coefficient: NonNegativeFloat = 0.5
    """Weight of the value loss in the gradient of a shared model's body."""
    clip: PositiveFloat | None = 0.5
    """How far a new value may leave the old one before it gets no gradient; None = off."""
    warmup_steps: NonNegative = 0
    """First steps of a run in which only the critic learns."""
    max_grad_norm: PositiveFloat = 1.0


class LossSettings(Settings):
    """The policy loss; defined in `gleanrl.algorithms.loss`."""

    name: str = "ppo"
    """ppo gspo cispo gpg reinforce clip_cov kl_cov, or an import
    path of a function under `@gleanrl.algorithms.loss.surrogate`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword options of the loss (clip_cov and kl_cov have some); each documents its own."""
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound on -A * ratio for negative advantages (dual-clip PPO); None = off."""
    aggregation: Literal[
        "auto", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "auto"
    """auto: what the loss is defined with, seq-mean-token-mean for gspo and token-mean for the others."""
    aggregation_scale: PositiveFloat | None = None
    """Divisor of seq-mean-token-sum-norm; None = the longest sequence possible (max_context)."""

    correction: Literal["none", "truncate", "mask"] = "none"
    """Weight of a fresh token by proximal / behaviour probability: capped, or the token left out above the cap.
    Decoupled PPO masks; with `learner.old_logprobs = "sampler"` the two are the same and there is nothing to weigh."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Over what that ratio is taken: a token, the product over its sequence, or the geometric mean of it."""
    correction_cap: PositiveFloat = 5.0
    correction_floor: NonNegativeFloat = 0.0
    """mask: the token is left out below this too."""

    replay_mode: Literal["clip", "shape"] = "clip"
    """Replayed tokens: PPO with its own upper clip, or -A w / (w + replay_shape) without clip."""
    replay_clip_high: NonNegativeFloat = 1.0
    replay_shape: PositiveFloat = 0.1
    replay_coefficient: NonNegativeFloat = 1.0
    """Scales the loss of replayed tokens; shaping alone weakens them about twelve-fold."""
    replay_importance: Literal["recorded", "current"] = "recorded"
    """Denominator of a replayed token's ratio: its recorded log-prob, or the current one (ratio 1; for ablation)."""

    kl: Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k3+", "low_var_kl+"] = "k3"
    """Estimator of the KL to the reference; with + it has the value of its kind and the gradient of k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL enters: as a term of the loss, or taken off each token's reward."""
    kl_coefficient: NonNegativeFloat = 0.0
    kl_target: PositiveFloat | None = None
    """Adapt the coefficient so that the mean KL comes here; None = fixed."""
    kl_horizon: PositiveFloat = 10_000.0
    """Trajectories over which an adaptive coefficient reacts."""
    entropy_coefficient: float = 0.0


class ReplaySettings(Settings):
    """Experience replay; defined in `gleanrl.experience`. Formulas and sources: docs/concepts/replay.md."""

    enabled: bool = False
    path: str | None = None
    """The pool's file; None = `experience.sqlite` in the run folder."""
    seed_from: str | None = None
    """A pool or run whose successes are put into a new pool before the first step."""
    trust_tokenizer: bool = False
    """Where a pool does not say which tokenizer its token ids are of, it is this run's."""

    start_progress: Fraction = 0.0
    """Replay begins once this share of the run's steps is planned ..."""
    start_solve_rate: Fraction | None = None
    """... or, where set, once the running mean success of fresh groups reaches this. It never ends again."""
    task_ratio: Fraction = 0.5
    """Share of a batch's groups that are tasks from the pool, as far as it has them."""
    tasks: Literal["gaussian", "uniform", "uniform_buckets", "difficulty", "rescue"] = "gaussian"
    """Which tasks: by exp(-(rate - 0.5)^2 / (2 sigma^2)), all alike, each solve rate alike, only those with
    `difficulty` successes, or by (1 - rate)^n, the chance that a fresh group holds no success."""
    sigma: PositiveFloat = 0.125
    """Of `gaussian`, in solve rate."""
    difficulty: NonNegative = 4
    """Successes of the latest fresh group, for `tasks = "difficulty"`."""

    per_group: NonNegative = 1
    """Stored trajectories put beside the fresh ones; 0 replays nothing and only chooses tasks."""
    placement: Literal["add", "replace"] = "add"
    """add: a full group of fresh ones beside the stored. replace: so many fewer fresh ones."""
    select: Literal["lowest_entropy", "highest_entropy", "random", "newest"] = "lowest_entropy"
    entropy_from: Literal["current", "recorded"] = "recorded"
    """Minus the mean recorded log-prob of the sampled tokens, which estimates their entropy under the policy that
    sampled them and costs nothing, or their mean entropy under the current policy (one forward pass)."""
    baseline: Literal["fresh", "group"] = "fresh"
    """Who gives a mixed group's mean and deviation."""
    grouping: Literal["shared", "own"] = "shared"
    """own: each replayed trajectory is a group of its own; for comparison only."""

    min_rate: Fraction = 0.0
    max_rate: Fraction = 1.0
    """A fresh group whose solve rate is strictly between stores its successes; max_rate is above min_rate."""
    success_threshold: float = 0.5
    capacity_per_task: Positive = 8
    retire_after: Positive = 2
    """Perfect fresh groups in a row after which a task leaves the fresh stream and replay."""
    probe_fraction: Fraction = 0.05
    """Share of a batch that tries retired tasks again."""
    max_age: Positive | None = None
    """Trajectories sampled more than so many versions ago are evicted."""
    max_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """A trajectory whose geometric-mean ratio left [1 / max_ratio, max_ratio] is not replayed in that batch."""
    reverify: bool = False
    """Score a stored trajectory again before it is replayed, and evict it where the scores disagree."""

    pool_updates: NonNegative = 1
    """Extra optimizer updates a step on `pool_batch` stored successes, each weighted by 1 - its task's rate."""
    pool_batch: Positive = 8
    pool_from: Literal["pool", "batch"] = "pool"
    """batch: the extra updates imitate the step's own successes instead; the control of the comparison."""

    @field_validator("max_rate")
    @classmethod
    def _lets_something_in(cls, rate: float, info: ValidationInfo) -> float:
        low = info.data.get("min_rate")  # missing where it is wrong itself
        if low is not None and rate <= low:
            raise ValueError(f"must be above replay.min_rate = {low}, or nothing is ever stored")
        return rate


class GuidanceSettings(Settings):
    """Experience shown to part of the rollouts; docs/howto/guidance.md."""

    enabled: bool = False
    guided_share: Fraction = 0.5
    """Share of each group's fresh members that are shown experience, rounded down."""
    mode: Literal["keep", "discard", "mixed"] = "discard"
    """keep: trained with the text in the prompt, on-policy. discard: trained without it, off-policy (at least two
    members of a group stay unguided, for its baseline). mixed: by task."""
    keep_share: Fraction = 0.5
    """Share of the tasks that keep it, for `mode = "mixed"`."""
    retriever: str = "bm25"
    """bm25, reme, or an import path of a `Retriever`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the retriever; `url` and `workspace` of reme."""
    k: Positive = 1
    """Experiences shown."""
    template: str = "Experience from similar tasks:\n{experience}\n\n{prompt}"
    """What the last user message of the opening becomes."""
    prompt_share: Fraction = 0.5
    """Share of the model's context that a guided opening may fill; experiences that do not fit are left out."""
    timeout_s: PositiveFloat = 10.0
    """How long a retrieval may take before the group is played without."""

    @field_validator("template")
    @classmethod
    def _has_both(cls, template: str) -> str:
        for name in ("{experience}", "{prompt}"):
            if template.count(name) != 1:
                raise ValueError(f"must hold {name} once")
        return template


class LearnerSettings(Settings):
    lr: PositiveFloat = 2e-4
    """Where a configuration sets none: 2e-4 for the tiny model, 1e-6 for any other, 1e-5 for its adapters. A run's
    config.toml has the number."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegative = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Fraction = 0.0
    max_grad_norm: PositiveFloat = 1.0
    updates_per_step: Positive = 1
    """Optimizer updates a step: a batch is cut into this many mini-batches of whole groups."""
    epochs: Positive = 1
    """Passes over each mini-batch group set (sync schedule only when above 1)."""
    tokens_per_microbatch: Positive = 16384
    """Padded tokens of one forward and backward pass."""
    activation_checkpointing: bool = False
    attn_implementation: str = "auto"
    """Any name that transformers knows, e.g. sdpa, eager, flash_attention_2. auto: flash attention where its package is
    installed and passes compute in bfloat16 on a GPU, else what transformers chooses. Samplers have their own."""
    lora_rank: NonNegative = 0
    """0 trains all weights."""
    lora_alpha: PositiveFloat = 32.0
    lora_targets: str = "all-linear"
    old_logprobs: Literal["sampler", "recompute", "loglinear"] = "sampler"
    """Denominator of the ratio: as sampled, a forward pass before the step, or between it and now by staleness."""
    ranks: Positive = 1
    """Processes that the model is spread over, started on this machine; under torchrun, its own count."""
    tensor_parallel: Positive = 1
    """Of them so many compute each layer together, on the same samples; a divisor of `ranks`."""


class EvaluationSettings(Settings):
    every: NonNegative = 5
    """Steps between evaluations; 0 = only at the start and at the end."""
    samples: Positive = 4
    """Sampled attempts a task, for pass@1 and pass@k."""
    greedy: bool = True
    at_start: bool = True
    """Evaluate the policy that training starts from, too."""


class RolloutMonitorSettings(MonitorSettings):
    """The monitors of a run, and what it keeps of its trajectories."""

    rollouts_per_step: int = Field(default=-1, ge=-1)
    """Trajectories a step written to rollouts/; -1 = all."""


class RewardSettings(Settings):
    """What a trajectory is worth and how that is asked for; defined in `gleanrl.rewards`."""

    name: str = "environment"
    """environment (what it gave itself), math, judge, http, model, pooling, weighted, or an import path
    `package.module:name` or `file.py:name` of a function, a class or a `Scorer`; `verl:` or `trl:` before it where it
    has the signature of those."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a class, further ones of a function. `env:NAME` takes a text from the environment, where
    keys belong."""
    isolation: Literal["thread", "process"] = "thread"
    """Where a reward that is not async runs. process: one that does not answer in time is killed."""
    workers: Positive = 16
    """Threads or processes of a reward that is not async; each part of a sum has as many."""

    max_concurrency: Positive = 2048
    """Requests in flight at once, of training."""
    eval_concurrency: Positive = 256
    """Requests in flight at once, of evaluation: slots of its own."""
    eval_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.25
    """Evaluation's share of the rates, of `workers` and of a reward model while training wants them too."""
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    """Over training and evaluation, every further try included; None = no limit."""

    timeout_s: PositiveFloat = 60.0
    """How long one try may take, from when it is sent: waiting for a slot, a thread or a connection does not count."""
    attempts: Positive = 5
    """Tries of a request; only errors that may pass are tried again. Where a service that has answered before accepts
    no connections, tries do not count: it is waited for."""
    backoff_s: PositiveFloat = 0.5
    """The first wait is random up to this, each further one up to twice as much, and at least what the service asks."""
    max_backoff_s: PositiveFloat = 60.0
    max_failed_fraction: Fraction = 0.5
    """The run stops with a clear message when more than this share of the last requests failed ..."""
    failed_window: Annotated[int, Field(ge=32)] = 128
    """... of so many (32 at least must have ended) ..."""
    down_after_s: PositiveFloat = 600.0
    """... or when nothing but failures came for so long. A service that asks to be left alone for longer gives no
    score."""
    hedge_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """This share of the requests, the slowest, is asked a second time; the first answer wins. 0 = off."""

    cache: NonNegative = 100_000
    """Scores kept in memory: what is identical (task, conversation, reward version) is asked for once. 0 = off."""
    journal: bool = True
    """Keep finished rewards in the run folder, so that a resumed run does not ask (and pay) for them again."""


class RaySettings(Settings):
    """A run whose samplers, environments, reward agent and learner are Ray actors; docs/howto/ray.md."""

    enabled: bool = False
    """`--runtime ray` sets it."""
    address: str | None = None
    """Of the cluster to join, which `--ray-address` sets ("auto": the one that this machine is part of). None starts
    one on this machine for the run."""
    samplers: Positive = 1
    environments: NonNegative = 1
    """Actors that play the environments, each with `environment.workers` worker processes; 0 plays them in the
    driver."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """colocated: sampler and learner actors share one bundle of resources and take turns on its device, one GPU at
    most. disaggregated: each has its own and all work at once."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How Ray lays disaggregated actors over the nodes."""
    sampler_cpus: NonNegativeFloat = 1.0
    sampler_gpus: NonNegativeFloat | None = None
    """Of each sampler. None: 1 on a cluster with GPUs, or, colocated, an equal share of one GPU."""
    learner_cpus: NonNegativeFloat | None = None
    """None: 1 for each of `learner.ranks`."""
    learner_gpus: NonNegativeFloat | None = None
    """None: as of a sampler, for each of `learner.ranks`."""
    environment_cpus: NonNegativeFloat = 1.0
    """Of each environment actor."""
    reward_cpus: NonNegativeFloat = 0.0
    transfer: Literal["auto", "memory", "broadcast"] = "auto"
    """How weights reach the samplers. memory: Ray's object store. broadcast: NCCL where the learner and each
    sampler have a GPU of their own, else gloo. auto: broadcast between several nodes with such GPUs, and memory
    otherwise or where a broadcast fails."""
    max_restarts: NonNegative = 3
    """How often one actor may die and be started again; one that dies once more ends the run."""
    wait_s: PositiveFloat = 300.0
    """How long to wait for the resources of the cluster."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Where the learner waits for the samplers of a broadcast; 0 takes a free one."""


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
