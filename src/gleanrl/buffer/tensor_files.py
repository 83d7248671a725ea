"""Trajectories as safetensors: a file for each, and an index that says what else is known of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gleanrl.buffer.trajectory import Path as FieldPath
from gleanrl.buffer.trajectory import Rows, TensorTrajectory, written
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

INDEX = "index.json"
FORMAT = "gleanrl-trajectories"
TOLD = ("max_episode_length", "model_weights_id", "task_descriptions", "success")


def export(rows: Iterable[Rows], out: Path) -> int:
    """Write them, whole or not at all; how many.

    Raises:
        UserError: two tensors of a trajectory would have one name, or the disk is full.
    """
    from safetensors.torch import save_file

    index: list[dict[str, Any]] = []
    with atomic.directory(out) as folder:
        for number, own in enumerate(rows):
            trajectory = own.trajectory()
            tensors = _named(trajectory)
            file = f"trajectory-{number:06d}.safetensors"
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
            told = {name: getattr(trajectory, name) for name in TOLD}
            index.append({"file": file, "steps": own.steps, "batch": own.batch, "epochs": own.epochs, **told})
        (folder / INDEX).write_text(json.dumps({"format": FORMAT, "version": 1, "trajectories": index}, indent=1))
    return len(index)


def _named(trajectory: TensorTrajectory) -> dict[str, Tensor]:
    """The tensors as they were added, by names like ``curr_obs.image``."""
    found: dict[str, Tensor] = {}
    for name in TensorTrajectory.__dataclass_fields__:
        for path, tensor in _tensors((name,), getattr(trajectory, name)):
            if ".".join(path) in found:
                raise UserError(
                    f"{written(path)}: another tensor is called {'.'.join(path)} too; a file has one of each"
                )
            found[".".join(path)] = tensor.contiguous()
    return found


def _tensors(path: FieldPath, value: Any) -> Iterator[tuple[FieldPath, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors((*path, key), part)
