"""Weights of a policy that are gathered from the processes of a learner while they are read, one bucket at a time.

`Sampler.publish` gets weights as a mapping from names to tensors. Code that only needs shapes and dtypes asks
`layout_of` for them, and code that reads tensors does so in the order of the mapping. Then each bucket is gathered
once, and only one of them is in memory.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

BUCKET = 256 << 20  # bytes
_SAFETENSORS = {
    **{torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"},
}


class Layout(NamedTuple):
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class GatheredWeights(Mapping[str, Tensor]):
    """Maps names to tensors, which are gathered when they are read. Any thread may read.

    Args:
        layout: shapes and dtypes of the tensors by name, in the order in which the tensors are to be read.
        gather: returns the tensors of a bucket, that is of consecutive names.
    """

    def __init__(self, layout: Mapping[str, Layout], gather: Callable[[list[str]], Mapping[str, Tensor]]) -> None:
        self.layout, self._gather = layout, gather
        self._buckets = {name: names for names in buckets(layout) for name in names}
        self._last = [*layout][-1]
        self._held: Mapping[str, Tensor] = {}  # the bucket that was gathered last, until the last name is read
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Tensor:
        with self._lock:
            if name not in self._held:
                names = self._buckets[name]
                self._held = {}  # frees the last bucket before the next one is gathered
                self._held = self._gather(names)
            tensor = self._held[name]
            if name == self._last:
                self._held = {}
            return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.layout

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


class AdaptedWeights(GatheredWeights):
    """Weights of a model with LoRA adapters, as a learner publishes them.

    As a mapping it contains the merged tensors, which are merged when they are read. A sampler that applies adapters
    itself reads ``base`` and ``adapters``. If ``base`` is in bfloat16, so is a merged tensor. A base model of float32
    is then rounded before the adapters are added, as in the learner's own passes in bfloat16, and so is the sum.
    Without the first rounding, log-probs of the merged weights would differ more from the learner's.

    Args:
        base: tensors of the base model by Hugging Face parameter name. It is the same object in all publications of a
            learner, so that a sampler loads it once.
        adapters: the adapters A [rank, inputs] and B [outputs, rank] of linear modules, by the names that peft gives
            them in its files, such as ``base_model.model.model.layers.0.mlp.up_proj.lora_A.weight``.
        scale: factor of the adapters: the merged weight of a module is ``base + (B @ A) * scale``.
    """

    def __init__(self, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> None:
        super().__init__(layout_of(base), self._merge)
        self.base, self.adapters, self.scale = base, adapters, scale

    def _merge(self, names: list[str]) -> dict[str, Tensor]:
        merged = {}
        for name in names:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            weight, a = self.base[name], self.adapters.get(f"{module}.lora_A.weight")
            if a is not None:
                b = self.adapters[f"{module}.lora_B.weight"]
                weight = (weight.to(a.device) + (b @ a) * self.scale).to(weight.dtype)
            merged[name] = weight
        return merged


def layout_of(weights: Mapping[str, Tensor]) -> Mapping[str, Layout]:
    """Return the shapes and dtypes of ``weights`` by name, without gathering them."""
    if isinstance(weights, GatheredWeights):
        return weights.layout
    return {name: Layout(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model of transformers, which have most of its weights: the modules in its outermost
    `ModuleList`s."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers_of(child)


def buckets(layout: Mapping[str, Layout]) -> list[list[str]]:
    """Divide the names into lists of consecutive ones of one dtype, with at most `BUCKET` bytes together.

    A larger tensor is in a list of its own.
    """
    found: list[list[str]] = []
    size = 0
    for name, each in layout.items():
        if not found or size + each.size > BUCKET or each.dtype != layout[found[-1][-1]].dtype:
            found.append([])
            size = 0
        found[-1].append(name)
        size += each.size
    return found


def write_safetensors(
    path: Path,
    weights: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a safetensors file one tensor at a time, which the library's own function writes from memory only.

    Args:
        metadata: texts that the file contains in addition.
        names: the tensors to write; all by default.
        dtype: the dtype to which the tensors are converted; None keeps theirs.
    """
    layout = layout_of(weights)
    chosen = {name: Layout(layout[name].shape, dtype or layout[name].dtype) for name in names or layout}
    # Wider dtypes come first, so that each tensor begins at a multiple of its item size.
    ordered = sorted(chosen, key=lambda name: -chosen[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in ordered:
        start, end = end, end + chosen[name].size
        kind = _SAFETENSORS[chosen[name].dtype]
        header[name] = {"dtype": kind, "shape": chosen[name].shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in ordered:
            tensor = weights[name].detach().to("cpu", chosen[name].dtype).contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
