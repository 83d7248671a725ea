"""Lets Megatron-core compute on a CPU, where it asks for CUDA devices by name. Used only where CUDA is missing."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CpuAsCuda(TorchFunctionMode):
    """Inside the ``with`` block, and on its thread, the CPU stands for the CUDA device that Megatron-core names.

    Megatron-core creates tensors with ``device="cuda"``, moves them by ``.cuda()`` and compares names of types such as
    ``torch.cuda.FloatTensor``. `torch.cuda.current_device` and `torch.cuda.synchronize` are replaced for all threads,
    because both raise without CUDA.
    """

    def __enter__(self) -> CpuAsCuda:
        self._functions = torch.cuda.current_device, torch.cuda.synchronize
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda *_: None
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        torch.cuda.current_device, torch.cuda.synchronize = self._functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if isinstance(device := kwargs.get("device"), str) and device.startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str) and "cuda" not in result:
            return result.replace("torch.", "torch.cuda.")
        return result
