"""What is known of a trajectory besides its rows: the fields of its record, and its text."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.buffer.checksums import crc32
from gleanrl.buffer.log import FAILURE, INTERVENED, SUCCESS
from gleanrl.buffer.trajectory import Path, Rows


def noted(rows: Rows) -> dict[str, Any]:
    """Fields of `log.RECORD`: flags, versions, sum of rewards, episodes that ended."""
    low, high = _versions(rows)
    return {
        **{"flags": _flags(rows), "version_low": low, "version_high": high, "reward": _total(rows)},
        **{"steps": rows.steps, "batch": rows.batch, "epochs": rows.epochs, "episodes": int(rows.ends().sum())},
    }


def text_of(rows: Rows) -> str:
    """What has no place in a record of fixed length."""
    bootstrap = [[list(path), _packed(tensor)] for path, tensor in rows.bootstrap.items()]
    return json.dumps({"weights": rows.weights, "max_episode_length": rows.max_episode_length, "bootstrap": bootstrap})


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


def _flags(rows: Rows) -> int:
    intervened = rows.columns.get(("intervene_flags",))
    known = {None: 0, True: SUCCESS, False: FAILURE}[rows.success]
    return known | (INTERVENED if intervened is not None and bool(intervened.any()) else 0)


def _versions(rows: Rows) -> tuple[float, float]:
    versions = rows.columns.get(("versions",))
    return (float(versions.min()), float(versions.max())) if versions is not None else (-1.0, -1.0)


def _total(rows: Rows) -> float:
    rewards = rows.columns.get(("rewards",))
    return float(rewards.double().sum()) if rewards is not None else 0.0
