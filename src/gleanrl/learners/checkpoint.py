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
OPTIMIZER = "optimizer/"  # start of the names of optimizers' states
FORMAT = 4  # version of the format; other versions are not read


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


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this process's shards of ``tensors``, among them the optimizers' states, and torch's random state.

    All processes of an engine call `write` at the same time, with the same folder on a file system that they share.

    Raises:
        UserError: if this process cannot see a file that another process wrote, because the folder is not shared.
    """
    state = dict(tensors)
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        # Only rank 0 adds its random state. If all ranks did, the state of an arbitrary one would be written.
        state |= _random_state()
    with _torch_errors():
        written = dcp.save(state, checkpoint_id=folder / TENSORS)
    for info in (written.storage_data or {}).values():
        path = folder / TENSORS / info.relative_path
        if not path.is_file():
            raise UserError(f"{path}: not visible here; the run's folder must be one that all ranks share")


def read(
    folder: Path,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    weights_only: bool,
) -> dict[str, Tensor]:
    """Read a checkpoint into ``tensors``, in place, and return the states of optimizers and torch's random state.

    The number of processes may differ from the number that wrote it with `write`, and so may the sharding. Weights are
    read in place, so that they are not in memory twice. The result is for `restore_optimizer` and `restore_random`.

    Args:
        tensors: the tensors to read, which may be sharded. That under `BASE` is not read, but must be equal to the
            saved one.
        parameters: the parameters of optimizers, as ``optimizer/NAME/PARAMETER``. Their states are returned as
            ``optimizer/NAME/PARAMETER/KEY``, sharded like the parameter. An optimizer that had made no update when the
            checkpoint was written has no state.
        shapes: names and shapes of all tensors in the checkpoint, apart from states; by default, those of ``tensors``.
            Needed if this process reads only some of them.
        weights_only: read only the model's weights; ``tensors`` contains no others.

    Raises:
        UserError: if a file is missing or damaged, the checkpoint is of another model, or its adapters belong to
            another base model. ``tensors`` are unchanged then, except after damage inside a file of the right size,
            which the checksums of `gleanrl.runtime.checkpoints` find before.
    """
    path = folder / TENSORS
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except Exception as error:  # unpickling a damaged file may raise any exception
        raise _damaged(path / ".metadata") from error
    needed = ("weights/", BASE) if weights_only else ""
    saved: dict[str, tuple[int, ...]] = {}
    for name, info in metadata.state_dict_metadata.items():
        if name.startswith(needed) and not name.startswith((OPTIMIZER, "random/")):
            saved[name] = tuple(info.size) if isinstance(info, TensorStorageMetadata) else ()
    shapes = shapes or {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(saved.keys() ^ shapes.keys()):
        where = "only in the file" if name in saved else "not in the file"
        raise UserError(
            f"{path}: is of another model: {name} is {where}; keep [model], loss, critic and learner.lora_* unchanged"
        )
    for name, shape in shapes.items():
        if saved[name] != shape:
            both = f"{saved[name]} in the file, {shape} in the model"
            raise UserError(f"{path}: is of another model: {name} is {both}; keep [model] unchanged")

    for info in (metadata.storage_data or {}).values():
        file = path / info.relative_path
        if not file.is_file() or file.stat().st_size < info.offset + info.length:
            raise _damaged(path)
    if BASE in tensors:
        base = torch.empty_like(tensors[BASE])
        _load(path, {BASE: base})
        if not torch.equal(base, tensors[BASE]):
            raise UserError(
                f"{path}: its adapters were trained on another base model than the one that this run starts from now: "
                "model.init has changed, or the warm start was repeated with another version of torch or on another "
                "machine (then copy the folder warm-start of the cache from there)"
            )

    found: dict[str, Tensor] = {}
    for key, info in metadata.state_dict_metadata.items():
        name = key.rpartition("/")[0]
        if name not in parameters or not isinstance(info, TensorStorageMetadata):
            continue
        parameter, dtype = parameters[name], info.properties.dtype
        if info.size == parameter.shape:  # a moment of AdamW, which is sharded like its parameter
            found[key] = torch.empty_like(parameter, dtype=dtype)
        else:
            found[key] = torch.empty(info.size, dtype=dtype)
    if not weights_only:
        found |= {name: value for name, value in _random_state().items() if name in metadata.state_dict_metadata}
    _load(path, {**{name: tensor for name, tensor in tensors.items() if name != BASE}, **found})
    return found


def _load(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        with torch.no_grad(), _torch_errors():
            dcp.load(tensors, checkpoint_id=path)
    except Exception as error:  # reading a damaged file may raise any exception
        raise _damaged(path) from error


def optimizer_state(name: str, module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state of the optimizer of ``module`` by the names that a checkpoint gives it.

    It is empty before the first update. All processes over which the module is sharded call this function.
    """
    state: Any = get_optimizer_state_dict(module, optimizer)["state"]
    found: dict[str, Tensor] = {}
    for parameter, values in state.items():
        found |= {f"{OPTIMIZER}{name}/{parameter}/{key}": torch.as_tensor(value) for key, value in values.items()}
    return found


def restore_optimizer(name: str, module: nn.Module, optimizer: Optimizer, found: Mapping[str, Tensor]) -> None:
    """Give the optimizer of ``module`` the state that `read` found. Its settings are left unchanged."""
    states: dict[str, dict[str, Tensor]] = {}
    prefix = f"{OPTIMIZER}{name}/"
    for key, value in found.items():
        if key.startswith(prefix):
            parameter, _, kind = key.removeprefix(prefix).rpartition("/")
            states.setdefault(parameter, {})[kind] = value
    # The checkpoint has no parameter groups, so that the optimizer settings are those of this run.
    state: Any = get_optimizer_state_dict(module, optimizer)
    set_optimizer_state_dict(module, optimizer, state | {"state": states})


def restore_random(found: Mapping[str, Tensor]) -> None:
    """Give torch's random generators the states that `read` found."""
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
    first one. Torch's warnings that only one process is used, and that processes have different tensors, are hidden.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            warnings.filterwarnings("ignore", "Detected mismatched keys")  # each stage of a pipeline has its own
            yield
    except dcp.CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{type(first).__name__}: {first}") from first
