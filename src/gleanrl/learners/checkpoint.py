"""The learner's files: weights, optimizer, counters and random state, each checked when it is read back.

A model that is whole is written as whole tensors here, one that is spread over processes as each one's part
(`gleanrl.learners.distributed.shards`). Either is read wherever the model is now.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gleanrl.learners.distributed import shards
from gleanrl.learners.distributed.shards import local, part_of
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError

if TYPE_CHECKING:
    from gleanrl.learners.engine import Engine, LocalEngine

WEIGHTS, OPTIMIZER, MANIFEST = "weights.safetensors", "optimizer.pt", "learner.json"
FORMAT = 2


def save(folder: Path, engine: Engine, counters: Mapping[str, float]) -> None:
    """Write everything that continuing bit for bit needs; the manifest, with a checksum of each file, comes last.

    Raises `UserError` on a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checksums = {name: _checksum(folder / name) for name in engine.save(folder)}
    manifest = {"format": FORMAT, "counters": dict(counters), "checksums": checksums}
    atomic.write_text(folder / MANIFEST, json.dumps(manifest, indent=1))


def load(folder: Path, engine: Engine) -> dict[str, Any]:
    """Put a saved state into ``engine`` and torch's random generators; the counters.

    Everything is read and checked before anything is changed. Raises `UserError` naming the file that is missing,
    damaged, or of another model.
    """
    manifest = _read_manifest(folder / MANIFEST)
    for name, expected in manifest["checksums"].items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing; this checkpoint is incomplete, resume from an older one")
        if _checksum(path) != expected:
            raise _damaged(path)
    engine.load(folder)
    return manifest["counters"]


def write(folder: Path, engine: LocalEngine) -> list[str]:
    """The engine's tensors, its optimizers and torch's random state, as files of whole tensors; their names."""
    names: list[str] = []
    for part, tensors in engine.tensors().items():
        needed = sum(t.numel() * t.element_size() for t in tensors.values())
        with atomic.file(folder / _file(part), needed=needed) as partial:
            save_file({key: value.contiguous() for key, value in tensors.items()}, partial)
        names.append(_file(part))
    with atomic.file(folder / OPTIMIZER) as partial, partial.open("wb") as stream:
        # Python's stream: torch's own does not say that a disk is full
        torch.save({"optimizer": engine.optimizer_state(), "random": _random_state()}, stream)
    return [*names, OPTIMIZER]


def read(folder: Path, engine: LocalEngine) -> None:
    """Put what `write` wrote into the engine, or into this process's part of it, and torch's random generators."""
    pairs = [pair for part, tensors in engine.tensors().items() for pair in _matching(folder / _file(part), tensors)]
    try:
        state = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True) if engine.trains else None
    except Exception as error:  # whatever the unpickler meets
        raise _damaged(folder / OPTIMIZER) from error
    with torch.no_grad():
        for target, value in pairs:
            local(target).copy_(part_of(value, target))
    if state is not None:
        engine.load_optimizer_state(state["optimizer"])
        _restore_random_state(state["random"])


def _file(part: str) -> str:
    return f"{part}.safetensors"


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: missing; {path.parent} is no learner checkpoint")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT and bool(manifest["checksums"].keys() & {WEIGHTS, shards.METADATA})
        manifest["counters"].items()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path) from error
    if not known:
        raise UserError(f"{path}: written by another version (format {manifest['format']!r}, this one reads {FORMAT})")
    return manifest


def _matching(path: Path, targets: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a live tensor and its saved value."""
    if not path.is_file():
        raise UserError(f"{path}: missing; it was saved with other loss or learner settings")
    try:
        saved = load_file(path)
    except Exception as error:  # safetensors has its own exception type
        raise _damaged(path) from error
    for name in sorted(saved.keys() ^ targets.keys()):
        where = "only in the file" if name in saved else "not in the file"
        raise UserError(f"{path}: is of another model: {name} is {where}; keep [model] and learner.lora_* as they were")
    for name, target in targets.items():
        if saved[name].shape != target.shape:
            shapes = f"{tuple(saved[name].shape)} in the file, {tuple(target.shape)} in the model"
            raise UserError(f"{path}: is of another model: {name} is {shapes}; keep [model] as it was")
    return [(target, saved[name]) for name, target in targets.items()]


def _damaged(path: Path) -> UserError:
    return UserError(f"{path}: damaged (its content does not match its checksum or format); resume from an older one")


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if len(state["cuda"]) == torch.cuda.device_count() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
