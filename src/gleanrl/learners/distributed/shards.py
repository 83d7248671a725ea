"""A checkpoint whose tensors are spread over files, one a process: written by all, read by any number of processes.

The files are those of `torch.distributed.checkpoint`; here is what goes into them, and how it is taken apart again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import is_initialized
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from gleanrl.utils.errors import UserError

if TYPE_CHECKING:
    from gleanrl.learners.engine import LocalEngine

FOLDER = "shards"
METADATA = f"{FOLDER}/.metadata"
_OPTIMIZER, _RANDOM = "optimizer", "random"


def are_in(folder: Path) -> bool:
    """Whether a checkpoint is of this kind."""
    return (folder / METADATA).is_file()


def write(folder: Path, engine: LocalEngine) -> list[str]:
    """This process's part of the engine's tensors and optimizers; the names of all processes' files.

    Every process of the engine calls it, with a folder that all of them see.
    """
    state = dict(_tensors(engine))
    for part, optimizer in _optimizers(engine).items():
        for index, name in enumerate(_names(engine, part, optimizer)):
            of_parameter = optimizer.state_dict()["state"].get(index, {})
            state |= {f"{_OPTIMIZER}/{part}/{key}/{name}": torch.as_tensor(v) for key, v in of_parameter.items()}
    state[_RANDOM] = torch.get_rng_state()
    written = save(state, checkpoint_id=folder / FOLDER)
    names = {f"{FOLDER}/{info.relative_path}" for info in (written.storage_data or {}).values()}
    unseen = sorted(name for name in names if not (folder / name).is_file())
    if unseen:
        raise UserError(f"{folder / unseen[0]}: not to be seen here; a run's folder must be one that all ranks share")
    return [*sorted(names), METADATA]


def read(folder: Path, engine: LocalEngine) -> None:
    """Put what `write` wrote, by any number of processes, into the engine or this process's part of it.

    Raises `UserError` if it is of another model.
    """
    try:
        metadata = FileSystemReader(folder / FOLDER).read_metadata()
    except Exception as error:  # whatever the unpickler meets
        raise UserError(f"{folder / METADATA}: cannot be read; resume from an older checkpoint") from error
    targets = dict(_tensors(engine))
    _check(folder / METADATA, metadata, targets, "" if engine.trains else "weights/")
    found = {name: torch.empty_like(tensor) for name, tensor in targets.items()}
    optimizers = _optimizers(engine)
    states = {part: _empty_state(engine, part, optimizer, metadata) for part, optimizer in optimizers.items()}
    random = torch.empty_like(torch.get_rng_state())
    flat = {key: value for state in states.values() for values in state.values() for key, value in values.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it may be
        load({**found, **flat, _RANDOM: random}, checkpoint_id=folder / FOLDER, no_dist=not is_initialized())
    with torch.no_grad():
        for name, target in targets.items():
            local(target).copy_(local(found[name]))
    for part, optimizer in optimizers.items():
        state = {i: {key.split("/")[2]: v for key, v in values.items()} for i, values in states[part].items() if values}
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if engine.trains:
        torch.set_rng_state(random)


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is in this process, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """Of a whole ``value`` what this process holds of ``like``."""
    if not isinstance(like, DTensor):
        return value
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return value[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def spread(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state of whole tensors as that of ``optimizer``, whose parameters may be in parts."""
    parameters = _parameters(optimizer)

    def placed(value: Any, like: Tensor) -> Any:
        if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
            return value
        mine = part_of(value, like).to(like.device).contiguous()
        return DTensor.from_local(mine, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())

    states = {i: {k: placed(v, parameters[i]) for k, v in each.items()} for i, each in state["state"].items()}
    return {**state, "state": states}


# --- what there is -------------------------------------------------------------------------------
def _tensors(engine: LocalEngine) -> Iterator[tuple[str, Tensor]]:
    for part, tensors in engine.tensors().items():
        yield from ((f"{part}/{name}", tensor) for name, tensor in tensors.items())


def _optimizers(engine: LocalEngine) -> dict[str, Optimizer]:
    critic = {} if engine.critic is None else {"critic": engine.critic.optimizer}
    return {"policy": engine.optimizer, **critic} if engine.trains else {}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """In the order of the numbers by which its state knows them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(engine: LocalEngine, part: str, optimizer: Optimizer) -> list[str]:
    module: nn.Module = engine.critic.module if part == "critic" and engine.critic is not None else engine.model
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for parameter in _parameters(optimizer)]


def _empty_state(
    engine: LocalEngine, part: str, optimizer: Optimizer, metadata: Metadata
) -> dict[int, dict[str, Tensor]]:
    """For each parameter, by its number, room for what was saved of it; none where it had no update yet."""
    saved: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, found in metadata.state_dict_metadata.items():
        if key.startswith(f"{_OPTIMIZER}/{part}/") and isinstance(found, TensorStorageMetadata):
            saved.setdefault(key.split("/", 3)[3], {})[key] = found
    rooms: dict[int, dict[str, Tensor]] = {}
    pairs = zip(_parameters(optimizer), _names(engine, part, optimizer), strict=True)
    for index, (parameter, name) in enumerate(pairs):
        like = parameter.detach()
        rooms[index] = {
            key: torch.zeros_like(like)
            if found.size == like.shape
            else torch.zeros(found.size, dtype=found.properties.dtype)
            for key, found in saved.get(name, {}).items()
        }
    return rooms


def _check(path: Path, metadata: Metadata, targets: Mapping[str, Tensor], needed: str) -> None:
    """Against what is saved whose name begins with ``needed``."""
    tensors = {k: v for k, v in metadata.state_dict_metadata.items() if k != _RANDOM and not k.startswith(_OPTIMIZER)}
    saved = {k: v for k, v in tensors.items() if k.startswith(needed)}
    for name in sorted(saved.keys() ^ targets.keys()):
        where = "only in the file" if name in saved else "not in the file"
        raise UserError(f"{path}: is of another model: {name} is {where}; keep [model] and learner.lora_* as they were")
    for name, target in targets.items():
        found = saved[name]
        size = tuple(found.size) if isinstance(found, TensorStorageMetadata) else ()
        if size != tuple(target.shape):
            shapes = f"{size} in the file, {tuple(target.shape)} in the model"
            raise UserError(f"{path}: is of another model: {name} is {shapes}; keep [model] as it was")
