"""Trajectories as tensors ``[T, B, ...]``, and the same data flattened to rows.

Callers add and receive `TensorTrajectory` objects. Inside the buffer a trajectory is a `FlatTrajectory`: one column
``[T * B, ...]`` for each field, where row ``t * B + b`` is chunk step t of environment b. Bootstrap entries (the state
before or after each rollout epoch) are not chunk steps, so they are stored separately from the columns.
`TrajectoryBlock` joins small trajectories of the same shape, so that they are written with one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.utils.errors import UserError

FieldPath = tuple[str, ...]  # keys from the outer to the inner mapping, such as ("curr_obs", "image")

FLAGS = ("dones", "terminations", "truncations")
TENSORS = ("actions", "intervene_flags", "rewards", *FLAGS, "prev_logprobs", "prev_values", "versions")
NESTED = ("forward_inputs", "curr_obs", "next_obs")
MAY_BOOTSTRAP = (*FLAGS, "prev_values")
INSTRUCTIONS = "task_descriptions"
BLOCK_NBYTES = 1 << 20  # largest block, in bytes; a larger trajectory is written alone, without a copy


@dataclass(frozen=True, kw_only=True)
class TensorTrajectory:
    """T chunk steps of C actions each in B environments, which may hold many episodes. The field names are RLinf's.

    ``dones``, ``terminations`` and ``truncations`` are ``[T, B, C]``, or ``[T + E, B, C]`` if each of E rollout epochs
    begins with an entry for the state before it. ``prev_values`` is ``[T, B, ...]``, or ``[T + E, B, ...]`` if each
    epoch ends with the value after its last step. All other tensors are ``[T, B, ...]``. None and ``{}`` mean that a
    field is absent. ``task_descriptions`` has one instruction for each environment, or one for each step and
    environment. If it is absent, the task descriptions in ``curr_obs`` are used.
    """

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: Tensor | None = None  # [T, B, C * A]
    intervene_flags: Tensor | None = None  # [T, B, C * A], bool: whether a human acted
    rewards: Tensor | None = None  # [T, B, C]
    terminations: Tensor | None = None
    truncations: Tensor | None = None
    dones: Tensor | None = None
    prev_logprobs: Tensor | None = None  # [T, B, ...]
    prev_values: Tensor | None = None
    versions: Tensor | None = None  # [T, B, ...]: version of the weights that acted
    forward_inputs: Mapping[str, Any] = field(default_factory=dict)  # nested, [T, B, ...]
    curr_obs: Mapping[str, Any] = field(default_factory=dict)
    next_obs: Mapping[str, Any] = field(default_factory=dict)
    task_descriptions: Sequence[str] | Sequence[Sequence[str]] | None = None  # [B] or [T][B]
    success: bool | None = None  # None: unknown

    @classmethod
    def of(cls, trajectory: Any) -> TensorTrajectory:
        """Make a trajectory from a mapping or an object with the same field names, such as RLinf's ``Trajectory``."""
        if isinstance(trajectory, cls):
            return trajectory
        get = trajectory.get if isinstance(trajectory, Mapping) else lambda name: getattr(trajectory, name, None)
        found = {name.name: get(name.name) for name in fields(cls)}
        return cls(**{name: value for name, value in found.items() if value is not None})


@dataclass(frozen=True)
class FlatTrajectory:
    """A trajectory as columns of T * B rows."""

    steps: int  # T
    batch: int  # B
    epochs: int  # E if fields have bootstrap entries, else 0
    columns: dict[FieldPath, Tensor]  # [T * B, ...], contiguous, on the CPU
    bootstrap: dict[FieldPath, Tensor]  # [E, B, ...]
    instructions: tuple[str, ...]  # one for each row, or ()
    model_weights_id: str
    max_episode_length: int
    success: bool | None

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.steps * self.batch

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self.columns.values())

    @classmethod
    def flatten(cls, trajectory: TensorTrajectory, *, copy: bool = False) -> FlatTrajectory:
        """Flatten a trajectory. With ``copy`` no memory is shared with its tensors.

        Raises:
            UserError: a value is not a tensor, or its shape does not fit the shapes of the others.
        """
        values: list[tuple[FieldPath, Any]] = [((name,), getattr(trajectory, name)) for name in TENSORS]
        for name in NESTED:
            values += leaves((name,), getattr(trajectory, name))
        tensors: dict[FieldPath, Tensor] = {}
        for path, value in values:
            if value is None or path[-1] == INSTRUCTIONS:
                continue
            try:
                tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError):
                raise UserError(f"{'.'.join(path)}: {type(value).__name__}, not a tensor [T, B, ...]") from None
            if tensor.dim() < 2:
                shape = list(tensor.shape)
                raise UserError(f"{'.'.join(path)}: a trajectory's tensors are [T, B, ...], this one is {shape}")
            # called only where needed, because for a small trajectory both calls cost as much as all other work
            if tensor.requires_grad:
                tensor = tensor.detach()
            if not tensor.is_cpu:
                tensor = tensor.cpu()
            tensors[path] = tensor
        if not tensors:
            raise UserError("a trajectory without any tensor")

        # T is taken from a field that cannot have bootstrap entries, if there is one
        plain = [tensor for path, tensor in tensors.items() if path[0] not in MAY_BOOTSTRAP]
        steps, batch = (plain or list(tensors.values()))[0].shape[:2]
        if not steps * batch:
            raise UserError(f"a trajectory of {steps} steps in {batch} environments holds nothing")
        columns, bootstrap, epochs = dict[FieldPath, Tensor](), dict[FieldPath, Tensor](), 0
        for path, tensor in tensors.items():
            extra = tensor.shape[0] - steps
            if tensor.shape[1] != batch or extra < 0 or (extra and path[0] not in MAY_BOOTSTRAP):
                shape = f"its shape is {list(tensor.shape)}, but the trajectory has T, B = {steps}, {batch}"
                raise UserError(f"{'.'.join(path)}: {shape}")
            if extra:
                if steps % extra or epochs not in (0, extra):
                    raise UserError(f"{'.'.join(path)}: {extra} bootstrap rows do not divide {steps} steps")
                epochs = extra
                by_epoch = tensor.reshape(epochs, -1, *tensor.shape[1:])
                if path[0] in FLAGS:
                    entries, by_epoch = by_epoch[:, 0], by_epoch[:, 1:]
                else:
                    entries, by_epoch = by_epoch[:, -1], by_epoch[:, :-1]
                tensor = by_epoch.reshape(-1, *tensor.shape[1:])
                bootstrap[path] = entries.contiguous()
            columns[path] = tensor.contiguous().flatten(0, 1)
        if copy:
            for flat in (columns, bootstrap):
                for path, tensor in flat.items():
                    if tensor.untyped_storage().data_ptr() == tensors[path].untyped_storage().data_ptr():
                        flat[path] = tensor.clone()
        instructions: tuple[str, ...] = ()
        if given := trajectory.task_descriptions or trajectory.curr_obs.get(INSTRUCTIONS):
            by_step: list[Any] = [given] * steps if isinstance(given[0], str) else list(given)
            if len(by_step) != steps or any(len(step) != batch for step in by_step):
                each = f"give one for each of the {batch} environments, or for each of {steps} steps"
                raise UserError(f"{INSTRUCTIONS}: {each}")
            instructions = tuple(text for step in by_step for text in step)
        return cls(
            steps,
            batch,
            epochs,
            columns,
            bootstrap,
            instructions,
            str(trajectory.model_weights_id),
            int(trajectory.max_episode_length),
            trajectory.success,
        )

    def unflatten(self) -> TensorTrajectory:
        """Return the trajectory that was passed to `flatten`, with all its fields."""
        found: dict[str, Any] = {}
        for path, column in self.columns.items():
            tensor = column.reshape(self.steps, self.batch, *column.shape[1:])
            if path in self.bootstrap:
                entries = self.bootstrap[path][:, None]
                by_epoch = tensor.reshape(self.epochs, -1, *tensor.shape[1:])
                parts = (entries, by_epoch) if path[0] in FLAGS else (by_epoch, entries)
                tensor = torch.cat(parts, dim=1).reshape(-1, *tensor.shape[1:])
            put(found, path, tensor)
        by_step = [self.instructions[i : i + self.batch] for i in range(0, len(self.instructions), self.batch)]
        descriptions: Any = by_step or None
        if len(set(by_step)) == 1:
            descriptions = by_step[0]
        return TensorTrajectory(
            max_episode_length=self.max_episode_length,
            model_weights_id=self.model_weights_id,
            task_descriptions=descriptions,
            success=self.success,
            **found,
        )


class TrajectoryBlock:
    """n trajectories with the same T, B and fields, as one block of rows. A single trajectory is not copied.

    Attributes:
        columns: ``[n * T * B, ...]``, one trajectory after the other.
        shape: n, T, B.
        rows_each: number of rows of each member, T * B.
        count: number of rows of all members.
        ends: bool ``[n, T, B]``: whether an episode ends in this chunk step.
        cuts: bool ``[n, T, B]``: whether an episode or a rollout epoch ends in this chunk step. After a rollout epoch,
            environments may have been reset.
    """

    def __init__(self, members: Sequence[FlatTrajectory]) -> None:
        self.members, self.columns = members, members[0].columns
        if len(members) > 1:
            self.columns = {path: torch.cat([member.columns[path] for member in members]) for path in self.columns}
        self.steps, self.batch = members[0].steps, members[0].batch
        self.shape = (len(members), self.steps, self.batch)
        self.rows_each = self.steps * self.batch
        self.count = len(members) * self.rows_each
        ended = torch.zeros(self.count, dtype=torch.bool)
        for name in FLAGS:
            if (flags := self.columns.get((name,))) is not None:
                ended |= flags.reshape(self.count, -1).ne(0).any(dim=1)
        self.ends = self.cuts = ended.reshape(self.shape)
        if any(member.epochs > 1 for member in members):
            self.cuts = self.ends.clone()
            for i, member in enumerate(members):
                if member.epochs > 1:
                    length = self.steps // member.epochs
                    self.cuts[i, length - 1 :: length] = True


def join_blocks(trajectories: Sequence[FlatTrajectory]) -> Iterator[TrajectoryBlock]:
    """Yield all trajectories in order, in blocks. Small successive ones of the same shape and fields share a block."""
    members: list[FlatTrajectory] = []
    nbytes, layout = 0, None
    for trajectory in trajectories:
        fields = {path: (column.dtype, column.shape) for path, column in trajectory.columns.items()}
        own, own_nbytes = (trajectory.steps, trajectory.batch, fields), trajectory.nbytes
        if members and (nbytes + own_nbytes > BLOCK_NBYTES or own != layout):
            yield TrajectoryBlock(members)
            members, nbytes = [], 0
        members.append(trajectory)
        nbytes, layout = nbytes + own_nbytes, own
    if members:
        yield TrajectoryBlock(members)


def steps_left(ends: Tensor) -> Tensor:
    """Return int32 ``[..., T, B]``: number of steps from each step to the next True of ``ends`` or to the last step.

    The first and the last of these steps are both counted.
    """
    steps = ends.shape[-2]
    at = torch.arange(steps, dtype=torch.int32)[:, None]
    stops = torch.where(ends, at, at[-1])
    return stops.flip(-2).cummin(-2).values.flip(-2) - at + 1


def leaves(path: FieldPath, value: Any) -> Iterator[tuple[FieldPath, Any]]:
    """Yield the values of a nested mapping with their paths."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves((*path, key), part)
    else:
        yield path, value


def put(tree: dict[str, Any], path: FieldPath, value: Any) -> None:
    """Set a value in a nested dict."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def quoted(path: FieldPath) -> str:
    """Return a field's name for a message, such that the key ``a.b`` differs from the key ``b`` inside ``a``."""
    return path[0] + "".join(f"[{name!r}]" for name in path[1:])


_WIDER = {  # tensor types that NumPy does not have -> the types to which they are converted
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    **{own: torch.float32 for name, own in vars(torch).items() if name.startswith("float8_")},
}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the type to which `to_numpy` converts. Raises `UserError` if there is none, as for quantised numbers."""
    try:
        return torch.empty(0, dtype=_WIDER.get(dtype, dtype)).numpy().dtype
    except (TypeError, NotImplementedError, RuntimeError):
        raise UserError(f"{str(dtype).removeprefix('torch.')} has no values that NumPy can hold") from None


def to_numpy(column: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array. Floats of a type that NumPy lacks become float32, complex32 becomes complex64."""
    numpy_dtype(column.dtype)
    return column.to(_WIDER.get(column.dtype, column.dtype)).numpy()
