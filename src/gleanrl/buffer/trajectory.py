"""Trajectories as tensors ``[T, B, ...]``, and the same data as rows.

Row ``t * B + b`` is chunk step t of environment b. Leading bootstrap rows (the state before each rollout epoch) are no
rows; they are kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from gleanrl.utils.errors import UserError

Path = tuple[str, ...]

FLAGS = ("dones", "terminations", "truncations")
TENSORS = ("actions", "intervene_flags", "rewards", *FLAGS, "prev_logprobs", "prev_values", "versions")
NESTED = ("forward_inputs", "curr_obs", "next_obs")
INSTRUCTIONS = "task_descriptions"


@dataclass(frozen=True, kw_only=True)
class TensorTrajectory:
    """What B environments did in T chunk steps of C actions each; it may hold many episodes. Names as in RLinf.

    ``dones``, ``terminations``, ``truncations``: ``[T, B, C]``, or ``[T + E, B, C]`` where each of E rollout epochs
    begins with a row about the state before it. ``prev_values``: ``[T, B, ...]``, or ``[T + E, B, ...]`` where each
    epoch ends with the value after its last step. Every other tensor is ``[T, B, ...]``; None and {} mean "not kept".
    ``task_descriptions``: an instruction for each environment, or for each step and environment; those in ``curr_obs``
    count where it has none.
    """

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: Tensor | None = None  # [T, B, C * A]
    intervene_flags: Tensor | None = None  # [T, B, C * A], bool: a human acted
    rewards: Tensor | None = None  # [T, B, C]
    terminations: Tensor | None = None
    truncations: Tensor | None = None
    dones: Tensor | None = None
    prev_logprobs: Tensor | None = None  # [T, B, ...]
    prev_values: Tensor | None = None
    versions: Tensor | None = None  # [T, B, ...]: weights that acted
    forward_inputs: Mapping[str, Any] = field(default_factory=dict)  # nested, [T, B, ...]
    curr_obs: Mapping[str, Any] = field(default_factory=dict)
    next_obs: Mapping[str, Any] = field(default_factory=dict)
    task_descriptions: Sequence[str] | Sequence[Sequence[str]] | None = None  # [B] or [T][B]
    success: bool | None = None  # None: not known

    @classmethod
    def of(cls, trajectory: Any) -> TensorTrajectory:
        """From anything with these attributes, RLinf's ``Trajectory`` for one, or from a mapping of them."""
        if isinstance(trajectory, cls):
            return trajectory
        get = trajectory.get if isinstance(trajectory, Mapping) else lambda name: getattr(trajectory, name, None)
        found = {name.name: get(name.name) for name in fields(cls)}
        return cls(**{name: value for name, value in found.items() if value is not None})


@dataclass(frozen=True)
class Rows:
    """A trajectory as columns of T * B rows."""

    steps: int  # T
    batch: int  # B
    epochs: int  # E of the fields with bootstrap rows, else 0
    columns: dict[Path, Tensor]  # [T * B, ...], contiguous, on the CPU
    bootstrap: dict[Path, Tensor]  # [E, B, ...]: the rows that are no chunk steps
    instructions: tuple[str, ...]  # of each row; () where there are none
    weights: str
    max_episode_length: int
    success: bool | None

    @property
    def count(self) -> int:
        return self.steps * self.batch

    @property
    def nbytes(self) -> int:
        """Of its columns."""
        return sum(column.nbytes for column in self.columns.values())

    @classmethod
    def of(cls, trajectory: TensorTrajectory, *, own: bool = False) -> Rows:
        """``own``: in memory that the caller's tensors do not share. Raises `UserError` where shapes do not fit."""
        tensors = dict(_tensors(trajectory))
        steps, batch = _size(tensors)
        columns, bootstrap, epochs = dict[Path, Tensor](), dict[Path, Tensor](), 0
        for path, tensor in tensors.items():
            extra = tensor.shape[0] - steps
            if tensor.shape[1] != batch or not (extra == 0 or (extra > 0 and path[0] in (*FLAGS, "prev_values"))):
                told = f"{list(tensor.shape)}, but the trajectory has T, B = {steps}, {batch}"
                raise UserError(f"{'.'.join(path)}: its shape is {told}")
            if extra:
                if steps % extra or epochs not in (0, extra):
                    raise UserError(f"{'.'.join(path)}: {extra} bootstrap rows do not divide {steps} steps")
                epochs = extra
                tensor, bootstrap[path] = _without_bootstrap(tensor, extra, leading=path[0] in FLAGS)
            columns[path] = tensor.detach().to("cpu").contiguous().reshape(steps * batch, *tensor.shape[2:])
        if own:
            for found in (columns, bootstrap):
                found |= {path: _unshared(tensor, tensors[path]) for path, tensor in found.items()}
        return cls(
            steps,
            batch,
            epochs,
            columns,
            bootstrap,
            _instructions(trajectory.task_descriptions or trajectory.curr_obs.get(INSTRUCTIONS), steps, batch),
            str(trajectory.model_weights_id),
            int(trajectory.max_episode_length),
            trajectory.success,
        )

    def trajectory(self) -> TensorTrajectory:
        """What it was made of, field for field."""
        found: dict[str, Any] = {}
        for path, column in self.columns.items():
            tensor = column.reshape(self.steps, self.batch, *column.shape[1:])
            if path in self.bootstrap:
                tensor = _with_bootstrap(tensor, self.bootstrap[path], leading=path[0] in FLAGS)
            put(found, path, tensor)
        by_step = [self.instructions[i : i + self.batch] for i in range(0, len(self.instructions), self.batch)]
        return TensorTrajectory(
            max_episode_length=self.max_episode_length,
            model_weights_id=self.weights,
            task_descriptions=None if not by_step else by_step[0] if len(set(by_step)) == 1 else by_step,
            success=self.success,
            **found,
        )

    def steps_left(self) -> Tensor:
        """int32 ``[T * B]``: steps up to the end of its episode or its rollout epoch, this one included."""
        return steps_left(self.cuts()).reshape(-1)

    def cuts(self) -> Tensor:
        """bool ``[T, B]``: an episode ends in this chunk step, or a rollout epoch, behind which the next one begins."""
        return self.ends() | epoch_ends(self.steps, self.epochs)

    def ends(self) -> Tensor:
        """bool ``[T, B]``: an episode ends in this chunk step."""
        return episode_ends(self.columns, (self.steps, self.batch))


def episode_ends(columns: Mapping[Path, Tensor], shape: tuple[int, ...]) -> Tensor:
    """bool of ``shape``: an episode ends in the row that is there."""
    flags = [columns[name,] for name in FLAGS if (name,) in columns]
    ended = [column.reshape(column.shape[0], -1).ne(0).any(dim=1) for column in flags]
    return torch.stack(ended).any(dim=0).reshape(shape) if ended else torch.zeros(shape, dtype=torch.bool)


def epoch_ends(steps: int, epochs: int) -> Tensor:
    """bool ``[T, 1]``: the last steps of rollout epochs. Whether environments were reset behind them is not known."""
    found = torch.zeros(steps, 1, dtype=torch.bool)
    if epochs > 1:
        length = steps // epochs
        found[length - 1 :: length] = True
    return found


def steps_left(ends: Tensor) -> Tensor:
    """int32 ``[..., T, B]`` of the ends of episodes there: steps up to the next one or the last, this one included."""
    steps = ends.shape[-2]
    at = torch.arange(steps, dtype=torch.int32)[:, None]
    stops = torch.where(ends, at, at[-1])
    return stops.flip(-2).cummin(-2).values.flip(-2) - at + 1


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value in a nested dict."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def written(path: Path) -> str:
    """A field as one writes it, so that `a.b` and `b` in `a` are told apart."""
    return path[0] + "".join(f"[{name!r}]" for name in path[1:])


def _tensors(trajectory: TensorTrajectory) -> Iterator[tuple[Path, Tensor]]:
    for name in TENSORS:
        value = getattr(trajectory, name)
        if value is not None:
            yield (name,), _checked((name,), value)
    for name in NESTED:
        yield from _nested((name,), getattr(trajectory, name))


def _nested(path: Path, tree: Mapping[str, Any]) -> Iterator[tuple[Path, Tensor]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _nested((*path, name), value)
        elif value is not None and name != INSTRUCTIONS:
            yield (*path, name), _checked((*path, name), value)


def _checked(path: Path, value: Any) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{'.'.join(path)}: {type(value).__name__}, not a tensor [T, B, ...]") from None
    if tensor.dim() < 2:
        raise UserError(f"{'.'.join(path)}: a trajectory's tensors are [T, B, ...], this one is {list(tensor.shape)}")
    return tensor


def _unshared(tensor: Tensor, given: Tensor) -> Tensor:
    """With memory of its own."""
    shares = tensor.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return tensor.clone() if shares else tensor


def _size(tensors: Mapping[Path, Tensor]) -> tuple[int, int]:
    """T and B; of a field that has no bootstrap rows, if there is one."""
    if not tensors:
        raise UserError("a trajectory without any tensor")
    plain = [tensor for path, tensor in tensors.items() if path[0] not in (*FLAGS, "prev_values")]
    shape = (plain or list(tensors.values()))[0].shape
    if not shape[0] * shape[1]:
        raise UserError(f"a trajectory of {shape[0]} steps in {shape[1]} environments holds nothing")
    return shape[0], shape[1]


def _without_bootstrap(tensor: Tensor, epochs: int, *, leading: bool) -> tuple[Tensor, Tensor]:
    by_epoch = tensor.reshape(epochs, -1, *tensor.shape[1:])
    kept = by_epoch[:, 1:] if leading else by_epoch[:, :-1]
    extra = by_epoch[:, 0] if leading else by_epoch[:, -1]
    return kept.reshape(-1, *tensor.shape[1:]), extra.detach().to("cpu").contiguous()


def _with_bootstrap(tensor: Tensor, extra: Tensor, *, leading: bool) -> Tensor:
    by_epoch = tensor.reshape(len(extra), -1, *tensor.shape[1:])
    parts = (extra[:, None], by_epoch) if leading else (by_epoch, extra[:, None])
    return torch.cat(parts, dim=1).reshape(-1, *tensor.shape[1:])


def _instructions(told: Sequence[Any] | None, steps: int, batch: int) -> tuple[str, ...]:
    if not told:
        return ()
    by_step = [told] * steps if isinstance(told[0], str) else list(told)
    if len(by_step) != steps or any(len(step) != batch for step in by_step):
        raise UserError(f"{INSTRUCTIONS}: give one for each of the {batch} environments, or for each of {steps} steps")
    return tuple(text for step in by_step for text in step)
