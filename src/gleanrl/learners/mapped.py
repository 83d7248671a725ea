"""Gives a model weights that stay where they are stored, in mapped files or in Ray's object store, until they are used.

A process that only passes weights on, such as rank 0 of a sharded learner, then does not hold the model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class MappedTensor(Tensor):
    """A tensor that each operation reads, moves to ``device`` and converts to float32.

    It behaves like a float32 tensor on ``device`` that cannot be changed. ``clone`` returns an ordinary tensor.

    Args:
        stored: the tensor where it is stored, in any floating-point dtype. Its memory may be read-only.
    """

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor, device: torch.device) -> MappedTensor:
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made = make(cls, stored.shape, dtype=torch.float32, device=device)
        made.stored = stored
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return MappedTensor(args[0].stored, args[0].device)
        if func is torch.ops.aten.empty_like.default:  # needs no values
            return torch.empty(args[0].shape, **{"dtype": torch.float32, "device": args[0].device, **(kwargs or {})})
        if func._schema.is_mutable and isinstance(args[0], MappedTensor):
            raise RuntimeError(f"{func}: a mapped tensor cannot be changed")

        def read(tensor: MappedTensor) -> Tensor:
            return tensor.stored.to(tensor.device, torch.float32)

        return func(*tree_map_only(MappedTensor, read, args), **tree_map_only(MappedTensor, read, kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Tensor:
        shared = MappedTensor(self.stored, self.device)  # no copy is needed of what cannot be changed
        return nn.Parameter(shared, self.requires_grad) if isinstance(self, nn.Parameter) else shared


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of ``model`` by name, in the dtype in which they are stored. They are not copies."""
    return {n: p.stored if isinstance(p, MappedTensor) else p.detach() for n, p in model.named_parameters()}


def use_stored(model: nn.Module, stored: Mapping[str, Tensor], device: torch.device) -> None:
    """Replace the parameters of ``model`` by mapped tensors, and move its buffers to ``device``.

    ``stored`` is the result of `stored_weights` for a model of the same structure.
    """
    replace_parameters(model, lambda name, _: MappedTensor(stored[name], device))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Replace each parameter p of ``model`` by the tensor ``make(name, p)``, in place. Tied parameters stay tied."""
    made = {id(p): nn.Parameter(make(name, p), p.requires_grad) for name, p in model.named_parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, made[id(parameter)])
