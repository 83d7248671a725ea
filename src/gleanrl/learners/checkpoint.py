"""Reads and writes the learner's part of a checkpoint: weights, optimizer states, random state and counters.

An engine calls `write` and `read` for its tensors, `TorchLearner` calls `write_counters` and `read_counters`. Tensors
are stored in the format of `torch.distributed.checkpoint`: every process of an engine writes its shards, and any number
of processes can read them, so a run on two ranks can continue on one. The checksums of a checkpoint are computed in
`gleanrl.runtime.checkpoints`, over all of its files.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

COUNTERS = "learner.json"
TENSORS = "tensors"  # name of the folder of tensors inside the learner's folder
BASE = "base"  # name of the hashes of the model that adapters were added to
FORMAT = 4  # version of the format; other versions are not read
Optimizers = Mapping[str, tuple[nn.Module, Optimizer]]
"""Name of an optimizer -> the module whose parameters it updates, and the optimizer."""


def write_counters(folder: Path, counters: Mapping[str, float]) -> None:
    """Write the counters to ``learner.json``, after the tensors. A folder without this file is incomplete."""
    atomic.write_text(folder / COUNTERS, json.dumps({"format": FORMAT, "counters": dict(counters)}, indent=1))


def read_counters(folder: Path) -> dict[str, Any]:
    """Return the counters that `write_counters` wrote.

    Raises `UserError`, which names the file, if it is missing, damaged or of another version.
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
    return counters


def write(folder: Path, tensors: Mapping[str, Tensor], optimizers: Optimizers) -> None:
    """Write this process's shards of ``tensors`` and of the optimizers' states, and torch's random state.

    All processes of an engine call `write` at the same time, with the same folder on a file system that they share. An
    optimizer that has made no update yet has no state, and nothing is written for it.

    Raises:
        UserError: if this process cannot see a file that another process wrote, because the folder is not shared.
    """
    state = dict(tensors)
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        # Only rank 0 adds its random state. If all ranks did, the state of an arbitrary one would be written.
        state |= _random_state()
    for part, (module, optimizer) in optimizers.items():
        optimizer_state: Any = get_optimizer_state_dict(module, optimizer)["state"]
        for name, values in optimizer_state.items():
            state |= {f"optimizer/{part}/{name}/{key}": torch.as_tensor(value) for key, value in values.items()}
    with _torch_errors():
        written = dcp.save(state, checkpoint_id=folder / TENSORS)
    for info in (written.storage_data or {}).values():
        path = folder / TENSORS / info.relative_path
        if not path.is_file():
            raise UserError(f"{path}: not visible here; the run's folder must be one that all ranks share")


def read(folder: Path, tensors: Mapping[str, Tensor], optimizers: Optimizers, *, weights_only: bool) -> None:
    """Load a checkpoint into ``tensors``, the optimizers and torch's random generators.

    The number of processes may differ from the number that wrote it with `write`. With ``weights_only`` only the
    model's weights are read, and ``tensors`` contains no others. The hashes under `BASE` must be equal to those saved.

    Raises:
        UserError: if a file is missing or damaged, the checkpoint is of another model, or its adapters belong to
            another base model. Nothing is changed then.
    """
    path = folder / TENSORS
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except Exception as error:  # unpickling a damaged file may raise any exception
        raise _damaged(path / ".metadata") from error
    needed = ("weights/", BASE) if weights_only else ""
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
            if info.size == parameter.shape:  # a moment of AdamW, which is sharded like its parameter
                value = torch.empty_like(parameter, dtype=dtype)
            else:
                value = torch.empty(info.size, dtype=dtype)
            states[part].setdefault(name, {})[kind] = found[key] = value
    if not weights_only:
        found |= {name: value for name, value in _random_state().items() if name in metadata.state_dict_metadata}
    try:
        with _torch_errors():
            dcp.load(found, checkpoint_id=path)
    except Exception as error:  # reading a truncated file may raise any exception
        raise _damaged(path) from error

    if BASE in tensors and not torch.equal(found[BASE], tensors[BASE]):
        raise UserError(
            f"{path}: its adapters were trained on another base model than the one that this run starts from now: "
            "model.init has changed, or the warm start was repeated with another version of torch or on another "
            "machine (then copy the folder warm-start of the cache from there)"
        )
    with torch.no_grad():
        for name, target in tensors.items():
            target.copy_(found[name])
    for part, (module, optimizer) in optimizers.items():
        # The checkpoint has no parameter groups, so that the optimizer settings are those of this run.
        optimizer_state: Any = get_optimizer_state_dict(module, optimizer)
        set_optimizer_state_dict(module, optimizer, optimizer_state | {"state": states[part]})
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
    """Raise a `CheckpointException` of torch, which does not derive from `Exception`, as a RuntimeError.

    A `CheckpointException` collects the errors of all processes. The RuntimeError has the class and the message of the
    first one. Torch's warning that only one process is used is hidden.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{type(first).__name__}: {first}") from first
