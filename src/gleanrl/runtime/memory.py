"""Estimates the memory that a run's model needs, so that a run that cannot fit ends before anything slow starts."""

from __future__ import annotations

import torch

from gleanrl.algorithms.advantages import ESTIMATORS
from gleanrl.config.settings import Config
from gleanrl.learners.critic import decoder
from gleanrl.learners.engine import microbatch_budget
from gleanrl.learners.models import compute_dtype, empty_model, resolve_device
from gleanrl.learners.supervised import TOKENS_PER_MICROBATCH
from gleanrl.samplers import shares_with_evaluation
from gleanrl.utils.errors import UserError
from gleanrl.utils.memory import available_memory
from gleanrl.utils.progress import Progress
from gleanrl.utils.text import format_bytes

FLOAT = 4  # bytes of a float32; trained weights, gradients and Adam's two moments are float32


def check_memory(config: Config, progress: Progress, *, trains: bool = True) -> None:
    """Print an estimate of the memory of a run with a given model, and check it against what is available.

    Nothing is checked for the tiny model, for a model with code of its own, whose layers are not known, and on Ray or
    with several ranks, whose parts are on other machines or devices.

    Args:
        trains: whether the run trains, rather than only evaluate.

    Raises:
        UserError: weights, gradients, optimizer and the samplers' copies alone need more than there is.
    """
    if config.model.init == "tiny" or config.ray.enabled or config.learner.ranks > 1 or config.model.trust_remote_code:
        return
    device = resolve_device(config.model.device)
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if available is None:
        return
    fixed, growing = estimate(config, device, trains=trains)
    least, most = sum(fixed.values()), sum(fixed.values()) + sum(growing.values())
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in fixed.items() if size)
    if least > available:
        raise UserError(
            f"model.init = {config.model.init!r} needs {format_bytes(least)} of memory ({parts}), but "
            f"{format_bytes(available)} are available; use a smaller model"
            + (", or learner.lora_rank" if trains and not config.learner.lora_rank else "")
        )
    more = ", ".join(f"{name} up to {format_bytes(size)}" for name, size in growing.items() if size)
    progress.print(f"memory: {parts}; {more}; {format_bytes(available)} are available")
    if most > available:
        progress.print(
            "this may not fit if episodes fill their contexts; lower model.max_context, sampler.max_rows or "
            "learner.tokens_per_microbatch, or set learner.activation_checkpointing"
        )


def estimate(config: Config, device: torch.device, *, trains: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of what a run always has in memory, and of what it needs for a time or for long episodes.

    Both are by name. The sizes of the latter are those for contexts that are full.
    """
    learner, model = config.learner, empty_model(config.model)
    width = compute_dtype(config.model, device).itemsize
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = parameters
    if learner.lora_rank:
        names = [name.strip() for name in learner.lora_targets.split(",")]
        adapted = [
            module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
            and (name.rpartition(".")[2] in names or (learner.lora_targets == "all-linear" and "lm_head" not in name))
        ]
        trained = learner.lora_rank * sum(module.in_features + module.out_features for module in adapted)
    has_critic = "values" in ESTIMATORS.get(config.credit.estimator).needs and config.critic.model == "own"
    shared = not trains or shares_with_evaluation(config)
    copies = (1 if shared else 2) if config.sampler.name == "transformers" else 0
    whole = {
        "weights": FLOAT * parameters,
        "gradients": FLOAT * trained * trains,
        "optimizer": 2 * FLOAT * trained * trains,
        "samplers": width * parameters * copies,
        "reference": FLOAT * parameters * (trains and bool(config.loss.kl_coefficient) and not learner.lora_rank),
        "critic": 4 * FLOAT * sum(p.numel() for p in decoder(model).parameters()) * (trains and has_critic),
    }
    text = model.config.get_text_config()
    layers, hidden = getattr(text, "num_hidden_layers", 0), getattr(text, "hidden_size", 0)
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    heads = getattr(text, "num_attention_heads", 1)
    keys = (getattr(text, "head_dim", None) or hidden // heads) * (getattr(text, "num_key_value_heads", None) or heads)
    # What a Llama layer keeps for the backward pass: the inputs of its norms and matrix products, queries, keys and
    # values before and after rotation, and four tensors of the MLP's width.
    per_token = layers * (hidden if learner.activation_checkpointing else 8 * hidden + 4 * inner + 4 * keys)
    # Tokens of the largest micro-batch of the learner or of the warm start; a longer sequence has one of its own.
    tokens = supervised = 0
    if trains:
        tokens = max(config.model.max_context, microbatch_budget(learner.tokens_per_microbatch, device))
    if config.warm_start.enabled:  # it trains all weights, before the samplers exist, unless it is cached
        supervised = max(0, 4 * FLOAT * parameters - sum(whole.values()))
        budget = microbatch_budget(TOKENS_PER_MICROBATCH, device)
        tokens = max(tokens, min(budget, config.warm_start.batch * config.model.max_context))
    evaluated = config.environment.eval_tasks * max(1, config.evaluation.samples)
    rows = min(config.sampler.max_rows, evaluated)
    if trains and not shared:
        rows += min(config.sampler.max_rows, config.schedule.batch * config.schedule.group)
    caches = 2 * layers * keys * width * config.model.max_context * rows * (copies > 0)
    growing = {"activations": per_token * width * tokens, "keys and values": caches, "warm start": supervised}
    return whole, growing
