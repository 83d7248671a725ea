"""Tensors as NumPy arrays, also those of types that NumPy has not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.utils.errors import UserError

_WIDER = {
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    **{own: torch.float32 for name, own in vars(torch).items() if name.startswith("float8_")},
}


def arrayed(dtype: torch.dtype) -> np.dtype[Any]:
    """The type of `array` of a tensor. Raises `UserError` where there is none, as of quantised and packed numbers."""
    try:
        return torch.empty(0, dtype=_WIDER.get(dtype, dtype)).numpy().dtype
    except (TypeError, NotImplementedError, RuntimeError):
        raise UserError(f"{str(dtype).removeprefix('torch.')} has no values that NumPy can hold") from None


def array(column: Tensor) -> np.ndarray[Any, Any]:
    """The same values; floats that NumPy lacks are float32, complex32 is complex64. Raises as `arrayed`."""
    arrayed(column.dtype)
    return column.to(_WIDER.get(column.dtype, column.dtype)).numpy()
