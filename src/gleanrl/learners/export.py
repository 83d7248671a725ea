"""What leaves a learner: merged weights to publish, and Hugging Face model directories that transformers and vLLM load.

Low-rank adapters (peft) are added before training and merged in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from gleanrl.config.settings import LearnerSettings
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

_ADAPTER = "default"


def add_adapters(model: nn.Module, settings: LearnerSettings, seed: int) -> Any:
    """A peft model around ``model`` whose only trained weights are adapters; ``seed`` fixes their start.

    Raises `UserError` without peft, or if ``learner.lora_targets`` names no module of the model.
    """
    try:
        import peft
    except ImportError:
        raise UserError("learner.lora_rank needs peft: pip install 'gleanrl[lora]'") from None
    targets = settings.lora_targets
    config = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        target_modules=targets if targets == "all-linear" else [name.strip() for name in targets.split(",")],
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, config)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"learner.lora_targets = {targets!r}: {str(error).splitlines()[0][:200]}") from error


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


@torch.no_grad()
def merged_weights(model: Any, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Tensor]:
    """Tensors by Hugging Face parameter name, adapters merged; tied ones once. Only merged ones are copies.

    ``whole`` gathers a tensor that is sharded over processes; all call it for the same tensors in the same order.

    Merging into new tensors leaves the base weights exactly as they were, which merging in place does not.
    """
    if not is_adapted(model):
        return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    base = model.get_base_model()
    weights = {
        name.replace(".base_layer.", "."): whole(parameter.detach())
        for name, parameter in base.named_parameters()
        if ".lora_" not in name
    }
    for name, module in base.named_modules():
        if hasattr(module, "get_delta_weight"):
            weights[f"{name}.weight"] = whole(module.get_base_layer().weight + module.get_delta_weight(_ADAPTER))
    return weights


def export(folder: Path, model: Any, weights: Mapping[str, Tensor], tokenizer: Any = None) -> None:
    """Write ``weights`` under the config of ``model``, and the tokenizer, whole or not at all.

    Raises `UserError` on a full disk.
    """
    base = model.get_base_model() if is_adapted(model) else model
    needed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    with atomic.directory(folder, needed=needed) as partial:
        with _without_progress_bar():
            base.save_pretrained(partial, state_dict=dict(weights))
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Without the progress bar of transformers, which would cut into the run's own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
