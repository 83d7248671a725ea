"""What is known of a trajectory besides its rows: the fields of its record, and its text."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.checksums import crc32
from gleanrl.buffer.log import FAILURE, INTERVENED, SUCCESS
from gleanrl.buffer.stack import Stack
from gleanrl.buffer.trajectory import Path, Rows


def noted(stack: Stack) -> dict[str, Any]:
    """Fields of `log.RECORD` of each trajectory: flags, versions, sum of rewards, episodes that ended."""
    n, steps, batch = stack.shape
    low, high = _versions(stack)
    return {
        **{"flags": _flags(stack), "version_low": low, "version_high": high, "reward": _totals(stack)},
        **{"steps": steps, "batch": batch, "epochs": [rows.epochs for rows in stack.members]},
        "episodes": stack.ends.reshape(n, -1).sum(dim=1).numpy(),
    }


def text_of(rows: Rows) -> str:
    """What has no place in a record of fixed length."""
    bootstrap = tuple((path, _packed(tensor)) for path, tensor in rows.bootstrap.items())
    return _text(rows.weights, rows.max_episode_length, bootstrap)


@lru_cache(maxsize=16)
def _text(weights: str, max_episode_length: int, bootstrap: tuple[tuple[Path, str], ...]) -> str:
    return json.dumps({"weights": weights, "max_episode_length": max_episode_length, "bootstrap": bootstrap})


def text_checksum(text: str, instructions: Sequence[str]) -> int:
    """Of a trajectory's text and the instructions of its rows."""
    return crc32("\0".join([text, *dict.fromkeys(instructions)]).encode())


def restored(record: np.void, columns: dict[Path, Tensor], text: str, instructions: Sequence[str]) -> Rows:
    """A trajectory of its record, its columns and its text. Raises `ValueError` or `KeyError` where that is damaged."""
    told = json.loads(text)
    return Rows(
        int(record["steps"]),
        int(record["batch"]),
        int(record["epochs"]),
        columns,
        {tuple(path): _unpacked(columns[tuple(path)], record, packed) for path, packed in told["bootstrap"]},
        tuple(instructions),
        told["weights"],
        told["max_episode_length"],
        {SUCCESS: True, FAILURE: False}.get(int(record["flags"]) & (SUCCESS | FAILURE)),
    )


def _packed(tensor: Tensor) -> str:
    return base64.b64encode(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()


def _unpacked(column: Tensor, record: np.void, text: str) -> Tensor:
    """A field's bootstrap rows, which are shaped as its others."""
    values = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return values.view(column.dtype).reshape(int(record["epochs"]), int(record["batch"]), *column.shape[1:])


def _flags(stack: Stack) -> np.ndarray[Any, Any]:
    found = np.array([{None: 0, True: SUCCESS, False: FAILURE}[rows.success] for rows in stack.members])
    intervened = stack.columns.get(("intervene_flags",))
    if intervened is not None:
        found |= np.where(intervened.reshape(len(found), -1).any(dim=1).numpy(), INTERVENED, 0)
    return found


def _versions(stack: Stack) -> tuple[Any, Any]:
    versions = stack.columns.get(("versions",))
    if versions is None or not versions.numel():
        return -1.0, -1.0
    each = versions.reshape(len(stack.members), -1).double()
    return each.amin(dim=1).numpy(), each.amax(dim=1).numpy()


def _totals(stack: Stack) -> Any:
    rewards = stack.columns.get(("rewards",))
    return 0.0 if rewards is None else rewards.reshape(len(stack.members), -1).double().sum(dim=1).numpy()
