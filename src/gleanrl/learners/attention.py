"""Which kernel computes a learner's attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_flash_attn_2_available

from gleanrl.utils.errors import UserError

AUTO, FLASH = "auto", "flash_attention_2"
HALF = (torch.bfloat16, torch.float16)
_AMPERE = (8, 0)  # the oldest GPUs that flash attention computes on


def chosen(model: Any, name: str, dtype: torch.dtype) -> str | None:
    """The kernel that ``learner.attn_implementation`` = ``name`` means where passes compute in ``dtype``.

    None: as the model has it, which is torch's own fused attention (sdpa) wherever it can be.
    Raises `UserError` where flash attention is asked for and passes compute in float32.
    """
    if name != AUTO:
        if "flash" in name and dtype not in HALF:
            raise UserError(
                f"learner.attn_implementation = {name!r} computes in bfloat16 only; set model.dtype = 'bfloat16' or "
                "learner.attn_implementation = 'sdpa'"
            )
        return name
    device = next(model.parameters()).device
    known = getattr(model, "_supports_flash_attn", False) and hasattr(model, "set_attn_implementation")
    if not known or dtype not in HALF or device.type != "cuda" or not is_flash_attn_2_available():
        return None
    return FLASH if torch.cuda.get_device_capability(device) >= _AMPERE else None


def use(model: Any, name: str | None, *, asked: bool = True) -> None:
    """Have ``model`` compute attention so, where it can; a copy of it made before does not.

    Raises:
        UserError: it cannot, or what it needs is not installed, and it was ``asked`` for.
    """
    if name is None:
        return
    try:
        with _quiet():
            model.set_attn_implementation(name)
        done, why = model.config._attn_implementation == name, f"a {type(model).__name__} computes attention itself"
    except (ValueError, ImportError, AttributeError, OSError) as error:
        done, why = False, next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
    if asked and not done:
        raise UserError(f"learner.attn_implementation = {name!r}: {why[:200]}")


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers warns that weights are float32; passes are not."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
