"""`GatheredWeights` gathers tensors bucket by bucket, and keeps none of them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from gleanrl.utils import weights
from gleanrl.utils.weights import GatheredWeights, layout_of


def test_each_bucket_is_gathered_once_and_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BUCKET", 32)  # two tensors
    stored = {f"w{number}": torch.full((4,), float(number)) for number in range(5)}
    asked: list[list[str]] = []
    alive: Any = weakref.WeakSet()

    def gather(names: list[str]) -> dict[str, torch.Tensor]:
        asked.append(names)
        found = {name: stored[name].clone() for name in names}
        alive.update(found.values())
        return found

    mapping = GatheredWeights(layout_of(stored), gather)
    for _ in range(2):
        for name, tensor in mapping.items():
            assert torch.equal(tensor, stored[name])
            assert len(alive) <= 3  # a bucket, and the tensor of the one before that this loop holds
        del tensor
        assert not alive
        assert asked == [["w0", "w1"], ["w2", "w3"], ["w4"]]
        asked.clear()
