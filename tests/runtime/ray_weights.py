"""A learner actor whose weights all have one value, and a sampler actor that samples this value as its tokens."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import numpy as np
import torch

from gleanrl.protocols import Completion, SamplingParams
from gleanrl.runtime.ray.actors import ActorServer
from gleanrl.runtime.ray.weights import WeightReceiver, Weights, WeightSource
from gleanrl.utils.errors import ADVICE, ProcessDied
from gleanrl.utils.weights import AdaptedWeights

PARAMS = SamplingParams(4, (0,))


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.full((3,), value, dtype=torch.bfloat16),
        "odd": torch.full((5,), int(value), dtype=torch.uint8),
        "plain": torch.full((4, 3), value).t(),
        "number": torch.tensor(value),
        "none": torch.empty(0, 4),
    }


KINDS = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors(0).items()}


class Teacher(WeightSource):
    """A learner whose tensors all have the same value; ``trap`` makes the next transfer fail, block or kill it."""

    def __init__(self, _driver: ActorServer) -> None:
        super().__init__()
        self._asked, self._trap = 0, ""
        self._held, self._go = threading.Event(), threading.Event()
        self._tensors = tensors(0)
        self._frozen: dict[str, torch.Tensor] | None = None

    def weights(self) -> Weights:
        trap, self._trap = self._trap, ""
        if trap == "die":
            os._exit(3)
        if trap == "fail":
            raise RuntimeError("no such network\nat all")
        if trap == "hold":
            self._held.set()
            assert self._go.wait(60)
        self._asked += 1
        return self._tensors if self._frozen is None else AdaptedWeights(self._frozen, self._tensors, 0.5)

    async def adapt(self) -> None:
        """Return the tensors as the adapters of a base model from now on."""
        self._frozen = {"base": torch.arange(5.0)}

    async def pid(self) -> int:
        return os.getpid()

    async def asked(self) -> int:
        """Return how often the weights were requested since the last call."""
        asked, self._asked = self._asked, 0
        return asked

    async def learn(self, value: float) -> int:
        """Set the tensors to ``value`` in place, as an optimizer does, and return the new number of the weights."""
        await self.changing()
        for tensor in self._tensors.values():
            tensor.fill_(value)
        return self.number

    async def trap(self, what: str) -> None:
        """Set what happens at the next request for weights: "die", "fail" or "hold"."""
        self._trap = what

    async def held(self) -> None:
        assert await asyncio.to_thread(self._held.wait, 60)

    async def go(self) -> None:
        self._go.set()


def note(file: str, text: str) -> None:
    with open(file, "a") as out:
        out.write(text)


class Numbers(WeightReceiver):
    """A sampler that appends to ``file``, for each session, the version of its weights when the session began."""

    def __init__(self, _driver: ActorServer, file: str) -> None:
        self._file = file
        self._weights: dict[str, tuple[torch.Tensor, int]] = {}  # lane -> (tokens, version)
        self._lost = False
        self._bases: list[Weights] = []  # the base weights that were received, each object once

    async def pid(self) -> int:
        return os.getpid()

    async def lose(self) -> None:
        """Make every later call of a sampler fail, as if a worker process of its engine were dead."""
        self._lost = True

    async def publish(self, lane: str, source: Any, version: int) -> float:
        weights = await self.receive(source)
        self._check()
        if isinstance(weights, AdaptedWeights):
            assert (weights.base["base"].tolist(), weights.scale) == ([0, 1, 2, 3, 4], 0.5)
            if not any(base is weights.base for base in self._bases):
                self._bases.append(weights.base)
            weights = weights.adapters
        assert {name: (t.dtype, t.shape) for name, t in weights.items()} == KINDS
        values = {float(value) for tensor in weights.values() for value in tensor.flatten()}
        assert len(values) == 1, values
        self._weights[lane] = (weights["tokens"].clone(), version)
        return 0.0

    async def bases(self) -> int:
        """Return the number of times that base weights were received."""
        return len(self._bases)

    async def held(self) -> dict[str, tuple[float, int]]:
        return {lane: (float(tokens[0]), version) for lane, (tokens, version) in self._weights.items()}

    async def open(self, lane: str, number: int, _seed: int) -> None:
        note(self._file, f"{self._weights[lane][1]}\n")

    async def sample(self, _number: int, _prompt: Any, _params: SamplingParams) -> Any:
        self._check()
        tokens, version = self._weights["train"]
        sampled = Completion(tokens.to(torch.int32).numpy(), np.zeros(tokens.numel(), np.float32), version, "stop")
        return sampled, {"sampled_tokens": 5.0}

    async def leave(self, _number: int) -> None: ...

    def _check(self) -> None:
        if self._lost:
            raise ProcessDied(f"worker 1 died with exit code -9{ADVICE}")
