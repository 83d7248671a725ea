"""Optimizers: parameter groups, the learning rate of a step, and normalising and clipping of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gleanrl.config.settings import LearnerSettings


def learning_rate(settings: LearnerSettings, step: int, total_steps: int) -> float:
    """Return the rate of ``step`` (from 0): linear warm-up, then constant, linear or cosine to ``min_lr_ratio``.

    The warm-up's last step has the full rate, the run's last step the lowest.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.decay == "constant":
        return settings.lr
    span = max(1, total_steps - settings.warmup_steps - 1)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    shape = 1 - progress if settings.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * shape)


def adamw(model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW for the trainable parameters, fused where possible. Vectors (norms, biases) are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay}
    vectors = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in trained)
    if len(_by_mesh(trained)) > 1:  # no kernel accepts tensors of two meshes
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=False, foreach=False)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)


def zero_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set gradients to zero instead of None, so that an update without signal still applies the momentum."""
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            gradients.append(parameter.grad)
    for together in _by_mesh(gradients):
        torch._foreach_zero_(together)  # pyright: ignore[reportPrivateImportUsage]


def finish_gradient(parameters: Sequence[nn.Parameter], normaliser: float, max_norm: float) -> float:
    """Divide the gradient by ``normaliser`` and clip it to ``max_norm``, the 2-norm over all parameters and processes.

    Returns the norm before clipping. If it is NaN or inf, the gradient is not changed.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.nn.utils.get_total_norm(together) for together in _by_mesh(gradients)]
    whole = [float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms]
    norm = (whole[0] if len(whole) == 1 else math.hypot(*whole)) / normaliser
    if math.isfinite(norm):
        scale = min(1.0, max_norm / (norm + 1e-6)) / normaliser
        for together in _by_mesh(gradients):
            torch._foreach_mul_(together, scale)  # pyright: ignore[reportPrivateImportUsage]
    return norm


def _by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the mesh of processes that they are sharded over, as a kernel accepts only one mesh."""
    meshes: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        meshes.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(meshes.values())
