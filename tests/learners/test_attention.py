"""Tests of learner.attn_implementation: the chosen attention kernel, and errors for unavailable kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gleanrl.config.settings import LossSettings
from gleanrl.learners import models
from gleanrl.learners.models import attention_kernel, use_attention_kernel
from gleanrl.utils.errors import UserError
from tests.learners.test_torch import make_batch, make_learner


def test_the_configured_kernel_is_used_for_policy_and_reference() -> None:
    samples, loss = make_batch(0).samples, LossSettings(kl_coefficient=0.1)
    plain, eager = make_learner(loss=loss), make_learner(loss=loss, attn_implementation="eager")
    engine: Any = eager.engine
    assert (
        engine.backend.model.config._attn_implementation
        == engine.backend.reference.config._attn_implementation
        == "eager"
    )
    assert plain.engine.backend.model.config._attn_implementation != "eager"  # type: ignore[attr-defined]
    for ours, theirs in zip(eager.engine.score(samples), plain.engine.score(samples), strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", ["no_such_kernel", "flash_attention_9"])
def test_an_unknown_kernel_is_an_error_of_one_line(name: str) -> None:
    with pytest.raises(UserError, match=f"learner.attn_implementation = '{name}'") as caught:
        make_learner(attn_implementation=name)
    assert "\n" not in str(caught.value)


def test_flash_attention_in_float32_is_refused() -> None:
    with pytest.raises(UserError, match=r"'flash_attention_2' computes in bfloat16 only; set model\.dtype"):
        make_learner(attn_implementation="flash_attention_2")


class OnGpu:
    """A fake model with the attributes that the choice of the kernel reads."""

    _supports_flash_attn = True

    def __init__(self, device: str) -> None:
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self._device = torch.device(device)

    def parameters(self) -> Any:
        return iter([SimpleNamespace(device=self._device)])

    def set_attn_implementation(self, name: str) -> None:
        raise ValueError(f"no {name} for this one")


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "capability", "expected"),
    [
        ("cuda", torch.bfloat16, True, (9, 0), "flash_attention_2"),
        ("cuda", torch.bfloat16, True, (7, 5), None),
        ("cuda", torch.bfloat16, False, (9, 0), None),
        ("cuda", torch.float32, True, (9, 0), None),
        ("cpu", torch.bfloat16, True, (9, 0), None),
    ],
)
def test_auto_chooses_flash_attention_on_a_capable_gpu_in_bfloat16_only(
    device: str, dtype: torch.dtype, installed: bool, capability: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "is_flash_attn_2_available", lambda: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert attention_kernel(OnGpu(device), "auto", dtype) == expected


def test_auto_leaves_a_model_without_the_kernel_unchanged_and_a_named_kernel_is_an_error() -> None:
    model = OnGpu("cuda")
    use_attention_kernel(model, "flash_attention_2", asked=False)
    with pytest.raises(UserError, match="no flash_attention_2 for this one"):
        use_attention_kernel(model, "flash_attention_2")
