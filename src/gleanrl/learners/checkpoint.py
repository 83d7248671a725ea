"""The learner's part of a checkpoint: weights, optimizer state, random state and counters.

`TorchLearner` calls `save` and `load`. Tensors are in the format of `torch.distributed.checkpoint`: every process of an
engine writes its part (`write`), and any number of processes reads them back (`read`), so a run of two ranks
can continue on one. Checksums are not made here but for a whole checkpoint, in `gleanrl.runtime.checkpoints`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

if TYPE_CHECKING:
    from gleanrl.learners.engine import Engine

COUNTERS = "learner.json"
TENSORS = "tensors"  # name of a folder
FORMAT = 3
Optimizers = Mapping[str, tuple[nn.Module, Optimizer]]
"""Optimizers by name, each with the module whose parameters it updates."""


def save(folder: Path, engine: Engine, counters: Mapping[str, float]) -> None:
    """Write everything needed to continue bit for bit. ``learner.json`` is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(folder)
    atomic.write_text(folder / COUNTERS, json.dumps({"format": FORMAT, "counters": dict(counters)}, indent=1))


def load(folder: Path, engine: Engine) -> dict[str, Any]:
    """Load a saved state into ``engine`` and torch's random generators, and return the counters.

    Everything is read before anything is changed. Raises `UserError` naming the file that is missing, damaged, or of
    another model.
    """
    path = folder / COUNTERS
    if not path.is_file():
        raise UserError(f"{path}: missing; {folder} is no learner checkpoint")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, counters = content["format"], dict(content["counters"])
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path) from error
    if version != FORMAT:
        raise UserError(f"{path}: written by another version (format {version!r}, this one reads {FORMAT})")
    engine.load(folder)
    return counters


def write(folder: Path, tensors: Mapping[str, Tensor], optimizers: Optimizers) -> None:
    """Write this process's part of ``tensors``, of the optimizers' states, and torch's random state.

    All processes of an engine call `write` with a shared folder. An optimizer has no state before its first update.
    """
    state = dict(tensors)
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        state |= _random_state()  # of rank 0, because an arbitrary one of several would be written
    for part, (module, optimizer) in optimizers.items():
        for name, values in get_optimizer_state_dict(module, optimizer)["state"].items():
            state |= {f"optimizer/{part}/{name}/{key}": torch.as_tensor(value) for key, value in values.items()}
    with _torch_errors():
        written = dcp.save(state, checkpoint_id=folder / TENSORS)
    for info in (written.storage_data or {}).values():
        path = folder / TENSORS / info.relative_path
        if not path.is_file():
            raise UserError(f"{path}: not visible here; the run's folder must be one that all ranks share")


def read(folder: Path, tensors: Mapping[str, Tensor], optimizers: Optimizers, *, weights_only: bool) -> None:
    """Load what any number of processes wrote with `write` into ``tensors``, the optimizers and torch's generators.

    ``weights_only``: ``tensors`` are only those of the model, and the rest of the checkpoint is not read.
    Raises `UserError`, without any change, if a file is missing or damaged or of another model.
    """
    path = folder / TENSORS
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except Exception as error:  # the unpickler may raise any exception
        raise _damaged(path / ".metadata") from error
    needed = "weights/" if weights_only else ""
    saved: dict[str, tuple[int, ...]] = {}
    for name, info in metadata.state_dict_metadata.items():
        if name.startswith(needed) and not name.startswith(("optimizer/", "random/")):
            saved[name] = tuple(info.size) if isinstance(info, TensorStorageMetadata) else ()
    for name in sorted(saved.keys() ^ tensors.keys()):
        where = "only in the file" if name in saved else "not in the file"
        raise UserError(
            f"{path}: is of another model: {name} is {where}; keep [model], loss, critic and learner.lora_* unchanged"
        )
    for name, tensor in tensors.items():
        if saved[name] != tuple(tensor.shape):
            shapes = f"{saved[name]} in the file, {tuple(tensor.shape)} in the model"
            raise UserError(f"{path}: is of another model: {name} is {shapes}; keep [model] unchanged")

    found: dict[str, Tensor] = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    states: dict[str, dict[str, dict[str, Tensor]]] = {}  # optimizer -> parameter -> key -> value
    for part, (module, _) in optimizers.items():
        parameters, prefix = dict(module.named_parameters()), f"optimizer/{part}/"
        states[part] = {}
        for key, info in metadata.state_dict_metadata.items():
            if not key.startswith(prefix) or not isinstance(info, TensorStorageMetadata):
                continue
            name, _, kind = key.removeprefix(prefix).rpartition("/")
            parameter, dtype = parameters[name].detach(), info.properties.dtype
            if info.size == parameter.shape:  # sharded like the parameter
                value = torch.empty_like(parameter, dtype=dtype)
            else:
                value = torch.empty(info.size, dtype=dtype)
            states[part].setdefault(name, {})[kind] = found[key] = value
    if not weights_only:
        found |= {name: value for name, value in _random_state().items() if name in metadata.state_dict_metadata}
    try:
        with _torch_errors():
            dcp.load(found, checkpoint_id=path)
    except Exception as error:  # the reader of a truncated file may raise any exception
        raise _damaged(path) from error

    with torch.no_grad():
        for name, target in tensors.items():
            target.copy_(found[name])
    for part, (module, optimizer) in optimizers.items():
        groups = get_optimizer_state_dict(module, optimizer)["param_groups"]  # the settings of this run
        set_optimizer_state_dict(module, optimizer, {"state": states[part], "param_groups": groups})
    if "random/cpu" in found:
        torch.set_rng_state(found["random/cpu"])
    if "random/cuda" in found:
        torch.cuda.set_rng_state(found["random/cuda"])


def _damaged(path: Path) -> UserError:
    return UserError(f"{path}: missing or damaged; resume from an older checkpoint")


def _random_state() -> dict[str, Tensor]:
    cuda = {"random/cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"random/cpu": torch.get_rng_state(), **cuda}


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Raise torch's error, which is no `Exception`, as a RuntimeError; hide its warning about a single process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{type(first).__name__}: {first}") from first
