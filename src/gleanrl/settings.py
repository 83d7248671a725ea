"""Every setting of a run, by section, with its default and its meaning.

These are plain validated values and import nothing of the house, so that pure functions (a loss, an
estimator) can take their own section without knowing of configuration files. `gleanrl.config` reads
files and the command line into them and checks what spans sections.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class EnvironmentSettings(Settings):
    name: str = "alfworld"
    """alfworld, textworld, reasoning_gym, or an import path `package.module:Class` or `file.py:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the taskset; each taskset documents and checks its own."""
    train_tasks: Positive = 256
    eval_tasks: Positive = 64
    warm_start_tasks: Positive = 100
    workers: NonNegative = 0
    """Worker processes that hold the environments; 0 plays them inside this process."""
    timeout_s: PositiveFloat = 60.0
    """How long one reset or step may take before the episode is given up (its worker is replaced)."""


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
    """transformers, or an import path of a `Sampler`, made as `TransformersSampler` is: ``(model, *, max_rows,
    max_context, deterministic, inflight, dtype, device_lease, timeline, **options)``."""
    options: dict[str, Any] = Field(default_factory=dict)
    temperature: NonNegativeFloat = 1.0
    max_rows: Positive = 256
    """Episodes that sample at once; further ones wait for a free row."""
    deterministic: bool | Literal["auto"] = "auto"
    """Wait for every live episode before each decoding burst, so that batches and so float rounding do
    not depend on timing. auto: on under staleness 0."""


class ContextSettings(Settings):
    policy: Literal["linear", "strip_thinking", "window"] = "linear"
    window_turns: Positive = 8
    """Environment messages that the `window` policy keeps, beside the first."""
    max_turns: Positive = 12
    """Sampled turns an episode may take."""
    max_tokens_per_turn: Positive = 16
    system_prompt: str | None = None


class ScheduleSettings(Settings):
    preset: Literal["sync", "pipelined", "one_step_off", "pipelined_one_step_off", "bounded_async"] = "sync"
    batch: Positive = 16
    """Groups a step."""
    group: Positive = 8
    """Fresh trajectories a group."""
    chunks: Positive = 4
    """Chunks a step that the pipelined presets cut a batch into."""
    staleness: NonNegative = 2
    """Bound of `bounded_async`; the other presets imply theirs (0 or 1)."""
    dynamic_sampling: bool = False
    """Replace groups without variance (all members equal) by further tasks."""
    max_resample: PositiveFloat = 3.0
    """With dynamic sampling, at most this many groups are started for each that is consumed."""
    min_valid: Positive = 2
    """A group with fewer valid fresh members is dropped and its ticket refunded."""
    max_failed_fraction: Fraction = 0.5
    """The run stops with a clear message when more than this share of the last episodes failed."""


class CreditSettings(Settings):
    estimator: str = "grpo"
    """grpo dr_grpo grpo_passk rloo reinforce_plus_plus reinforce_plus_plus_baseline opo gpg remax gae."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """drop: a group whose members all earned the same leaves the loss's denominator too."""


class LossSettings(Settings):
    """The policy loss; defined in `gleanrl.loss`."""

    name: str = "ppo"
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound on -A * ratio for negative advantages (dual-clip PPO); None = off."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    aggregation_scale: PositiveFloat | None = None
    """Divisor of seq-mean-token-sum-norm; None = the longest sequence possible (max_context)."""
    kl: Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"] = "k3"
    kl_coefficient: NonNegativeFloat = 0.0
    entropy_coefficient: float = 0.0


class LearnerSettings(Settings):
    lr: PositiveFloat = 5e-4
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
    lora_rank: NonNegative = 0
    """0 trains all weights."""
    lora_alpha: PositiveFloat = 32.0
    lora_targets: str = "all-linear"
    old_logprobs: Literal["sampler", "recompute"] = "sampler"
    """Denominator of the ratio: what the sampler recorded, or a forward of the learner before the step."""


class EvaluationSettings(Settings):
    every: NonNegative = 5
    """Steps between evaluations; 0 = only before and after."""
    samples: Positive = 4
    """Sampled attempts a task, for pass@1 and pass@k."""
    greedy: bool = True
    at_start: bool = True


class CheckpointSettings(Settings):
    every: NonNegative = 10
    """Steps between checkpoints; 0 = only at the end and on interruption."""
    keep: Positive = 2


class MonitorSettings(Settings):
    use: tuple[str, ...] = ("file", "console")
    """Of: file console tensorboard wandb trackio mlflow, or import paths of a `Monitor`."""
    project: str = "gleanrl"
    rollouts_per_step: int = Field(default=-1, ge=-1)
    """Trajectories a step written to rollouts/; -1 = all."""
