"""Functions around the optimizer that the engine, the critic and the supervised training share.

They make AdamW, compute the learning rate of a step, set gradients to zero, and normalise and clip them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gleanrl.config.settings import LearnerSettings


def learning_rate(settings: LearnerSettings, step: int, total_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 0.

    The rate rises linearly to ``settings.lr``, which the last of ``warmup_steps`` reaches. It then stays there, or
    decays linearly or by a cosine to ``settings.lr * settings.min_lr_ratio``, which step ``total_steps - 1`` reaches.
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
    """Make an AdamW optimizer for the trainable parameters of ``model``.

    ``weight_decay`` applies to parameters with two or more dimensions only, and so not to norms and biases. The fused
    kernel is used where the parameters allow it.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay}
    vectors = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in trained)
    if len(_by_mesh(trained)) > 1:  # fused and foreach kernels accept only tensors of one device mesh
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=False, foreach=False)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)


def zero_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set the gradient of each parameter to zeros.

    Gradients are zeros and not None, because an optimizer skips parameters without a gradient. With zeros, the momentum
    still moves a parameter that got no gradient from the mini-batch.
    """
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            gradients.append(parameter.grad)
    for together in _by_mesh(gradients):
        torch._foreach_zero_(together)  # pyright: ignore[reportPrivateImportUsage]


def finish_gradient(parameters: Sequence[nn.Parameter], normaliser: float, max_norm: float) -> float:
    """Divide the gradients by ``normaliser``, then scale them down so that their norm is at most ``max_norm``.

    The norm is the 2-norm over all parameters, including the shards of other processes. Returns the norm after the
    division and before clipping. If it is NaN or infinite, the gradients are not changed.
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
    """Group tensors by the device mesh that they are sharded over, because a foreach kernel accepts only one mesh."""
    meshes: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        meshes.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(meshes.values())
