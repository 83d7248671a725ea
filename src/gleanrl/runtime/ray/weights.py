"""Tensors on their way between processes: as plain bytes, which Ray's store gives to all readers of a node uncopied."""

from __future__ import annotations

import asyncio
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl.runtime.ray.cluster import library
from gleanrl.runtime.ray.link import ActorDied, Link


class Stored(NamedTuple):
    """A tensor as bytes: Ray's store maps numpy arrays, whatever the tensor's own type (bfloat16, float8)."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8, flat

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        """A view of a tensor that lies whole in memory, else a copy."""
        plain = tensor.detach().cpu().contiguous()
        dtype = str(plain.dtype).removeprefix("torch.")
        return cls(dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy())

    def tensor(self) -> torch.Tensor:
        """A view, not to be written to."""
        dtype = getattr(torch, self.dtype)
        if not self.data.size:
            return torch.empty(self.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is not writable
            return torch.from_numpy(self.data).view(dtype).reshape(self.shape)


def stored(weights: Mapping[str, Any]) -> dict[str, Stored]:
    return {name: Stored.of(tensor) for name, tensor in weights.items()}


def opened(weights: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    return {name: tensor.tensor() for name, tensor in weights.items()}


def put(weights: Mapping[str, Any]) -> Any:
    """Copy weights into Ray's store, once; the reference."""
    return library().put(stored(weights))


class LearnerLost(Exception):
    """The learner's actor is gone, and with it what it learned since the last checkpoint."""


class RemoteWeights(Mapping[str, Any]):
    """The weights that a remote learner has at one moment. `Transfer` sends them on, and the bytes never pass through
    the driver; to anybody else this is a mapping of tensors. It equals only itself: to compare would fetch two models.

    Attributes:
        learner: the actor that holds them, whose service is a `Source`.
        number: theirs, as `Source` counts. There is one object for each, since what it has taken is let go with it.

    What is asked of the learner raises `LearnerLost` where it is gone.
    """

    def __init__(self, learner: Link, number: int) -> None:
        self.learner, self.number = learner, number
        self._put: asyncio.Future[list[Any]] | None = None
        self._written: asyncio.Future[Path] | None = None
        self._tensors: dict[str, torch.Tensor] | None = None

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Of the learner."""
        try:
            return await self.learner.call(method, *arguments)
        except ActorDied as error:
            raise LearnerLost(str(error)) from None

    async def reference(self) -> Any:
        """To the weights in Ray's store, where they are put once, however many take them."""
        if self._put is None:
            self._put = asyncio.ensure_future(self.ask("put", self.number))
        return (await asyncio.shield(self._put))[0]

    @property
    def in_file(self) -> bool:
        """Whether they are written, or are being written, to a file."""
        return self._written is not None

    async def file(self, path: Path) -> Path:
        """Where they are written to, once; ``path``, unless it was another one before."""

        async def write() -> Path:
            await self.ask("write", self.number, path)
            return path

        if self._written is None:
            self._written = asyncio.ensure_future(write())
        return await asyncio.shield(self._written)

    def release(self) -> None:
        """Nobody will take them any more."""
        self.learner.tell("release", self.number)
        written = self._written
        if written is not None and written.done() and not written.cancelled() and not written.exception():
            written.result().unlink(missing_ok=True)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._fetched()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetched())

    def __len__(self) -> int:
        return len(self._fetched())

    def _fetched(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            try:
                (reference,) = self.learner.call_blocking("put", self.number)
            except ActorDied as error:
                raise LearnerLost(str(error)) from None
            self._tensors = opened(library().get(reference))
        return self._tensors


# --- whole models -----------------------------------------------------------------------------------
class Parcel(NamedTuple):
    """A model, pickled, its tensors beside it."""

    body: bytes
    tensors: list[np.ndarray]


def packed(model: Any) -> Parcel:
    """A model on a CPU, so that Ray's store keeps its tensors once for all who read it."""
    buffers: list[pickle.PickleBuffer] = []
    body = io.BytesIO()
    _packer(body, buffers.append).dump(model)
    return Parcel(body.getvalue(), [np.asarray(memoryview(buffer)) for buffer in buffers])


def unpacked(parcel: Parcel) -> Any:
    """The model, with tensors of its own."""
    return pickle.loads(parcel.body, buffers=parcel.tensors)


def _packer(body: io.BytesIO, keep: Callable[[pickle.PickleBuffer], Any]) -> Any:
    from ray import cloudpickle  # pyright: ignore[reportMissingImports]

    class Packer(cloudpickle.CloudPickler):  # pyright: ignore[reportPrivateImportUsage]
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) in (torch.Tensor, torch.nn.Parameter):
                kept = Stored.of(obj)
                parameter = isinstance(obj, torch.nn.Parameter)
                data = pickle.PickleBuffer(memoryview(kept.data))  # pyright: ignore[reportArgumentType]
                return _rebuilt, (kept.dtype, kept.shape, data, parameter, obj.requires_grad)
            return super().reducer_override(obj)

    return Packer(body, protocol=5, buffer_callback=keep)


def _rebuilt(dtype: str, shape: tuple[int, ...], data: Any, parameter: bool, requires_grad: bool) -> torch.Tensor:
    tensor = Stored(dtype, shape, np.asarray(memoryview(data))).tensor().clone()
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)
