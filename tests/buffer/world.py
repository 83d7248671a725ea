"""Trajectories for the buffer's tests, in which each value tells its trajectory, step and environment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gleanrl.buffer import TensorTrajectory

WAIT = 60.0  # seconds until an operation counts as hung
WIDE = 520  # float32 values of an observation, too many to be packed with other fields: it gets a column of its own


def trajectory(
    number: int,
    steps: int = 6,
    batch: int = 3,
    *,
    ends: Mapping[tuple[int, int], str] | None = None,
    wide: bool = True,
    extra: bool = False,
    broken: tuple[tuple[int, int], ...] = (),
    **more: Any,
) -> TensorTrajectory:
    """A trajectory whose values are computed from (number, t, b), so that no row equals one of another trajectory.

    ``ends`` maps (t, b) to "terminations" or "truncations". ``broken`` lists (t, b) at which the next observation
    differs from the following step's observation although no episode ends. ``extra`` adds a field, and ``wide``
    makes observations large.
    """
    t, b = torch.meshgrid(torch.arange(steps + 1), torch.arange(batch), indexing="ij")
    mark = (number * 1000 + t * 20 + b).float()[..., None]
    flags = {name: torch.zeros(steps, batch, 1, dtype=torch.bool) for name in ("terminations", "truncations")}
    observed = mark.expand(-1, -1, WIDE if wide else 3).contiguous()
    following = observed[1:].clone()
    for (step, row), kind in (ends or {}).items():
        flags[kind][step, row] = True
        following[step, row] += 0.25  # the observation before the environment was reset
    for step, row in broken:
        following[step, row] += 0.5
    return TensorTrajectory(
        actions=torch.cat([mark[:-1], -mark[:-1]], dim=2),
        rewards=mark[:-1] / 7,
        **flags,
        dones=flags["terminations"] | flags["truncations"],
        prev_logprobs=mark[:-1].double(),
        versions=torch.full((steps, batch, 1), number),
        curr_obs={"state": observed[:-1], "deep": {"small": mark[:-1].half()}},
        next_obs={"state": following, "deep": {"small": mark[1:].half()}},
        forward_inputs={"extra": mark[:-1].int()} if extra else {},
        **more,
    )


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two nested values are equal in keys, types, shapes and bits."""
    if isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in theirs)
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)
    return ours == theirs


def assert_same(ours: TensorTrajectory, theirs: TensorTrajectory) -> None:
    for name in TensorTrajectory.__dataclass_fields__:
        mine, yours = getattr(ours, name), getattr(theirs, name)
        if name == "task_descriptions" and yours is not None:
            mine, yours = tuple(map(tuple, mine)), tuple(map(tuple, yours))
        assert same(mine, yours), name


def rows(trajectory: TensorTrajectory) -> dict[str, Any]:
    """Return the chunk steps of a trajectory as one batch ``[T * B, ...]``, nested as a sample is."""
    names = [name for name in TensorTrajectory.__dataclass_fields__ if name not in NOT_SAMPLED]
    found = {name: getattr(trajectory, name) for name in names}
    return {name: flat(value) for name, value in found.items() if value is not None and value != {}}


def flat(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: flat(part) for name, part in value.items()}
    return value.reshape(-1, *value.shape[2:])


def at(batch: Any, index: Any) -> Any:
    """Return the rows of a nested batch at ``index``."""
    return {name: at(part, index) for name, part in batch.items()} if isinstance(batch, Mapping) else batch[index]


NOT_SAMPLED = ("max_episode_length", "model_weights_id", "task_descriptions", "success")


def numbers(batch: Mapping[str, Any]) -> set[int]:
    """Return the numbers of the trajectories that a batch has rows of."""
    return set(batch["versions"].reshape(-1).tolist())


def flip(path: Path, place: int) -> None:
    """Change one bit of the byte at ``place`` of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def disk_usage(folder: Path) -> int:
    """Return the bytes of disk space that the files of a folder take."""
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


def in_a_thread(call: Callable[[], Any], most: float = WAIT) -> list[Any]:
    """Run a call in a thread; return [its result or exception], or [] if it takes longer than ``most`` seconds."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(most)
    return outcome
