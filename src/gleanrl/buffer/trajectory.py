"""Trajectories as tensors ``[T, B, ...]``, and the same data as rows ``[T * B, ...]``.

Callers add and receive `TensorTrajectory` objects. Inside the buffer, a trajectory is a `FlatTrajectory`: one column
``[T * B, ...]`` for each field, where row ``t * B + b`` is chunk step t of environment b. `TrajectoryBlock` joins small
trajectories of the same shape, so that they are written with one call.

A trajectory may consist of E *rollout epochs*: E rollouts of T / E chunk steps each, one after the other. Some fields
then have an additional entry for each epoch, for the state before its first or after its last step. Such *bootstrap
entries* are not chunk steps, so they are stored separately from the columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.utils.errors import UserError

FieldPath = tuple[str, ...]  # keys of nested mappings from the outer to the inner one, e.g. ("curr_obs", "image")

FLAGS = ("dones", "terminations", "truncations")
# fields that may have bootstrap entries
MAY_BOOTSTRAP = (*FLAGS, "prev_values")
INSTRUCTIONS = "task_descriptions"
NOT_TENSORS = ("max_episode_length", "model_weights_id", INSTRUCTIONS, "success")
# entries that the methods of `Sampler` and `MixedReplayBuffer` add to a batch, so no field may have these names
ADDED_TO_BATCHES = ("indices", "weights", "n_step_rewards", "n_step_discounts", "demonstration")
BLOCK_NBYTES = 1 << 20  # largest size of a block of several trajectories; a larger trajectory is written alone


@dataclass(frozen=True, kw_only=True)
class TensorTrajectory:
    """T chunk steps in each of B environments. A chunk step executes C actions of A dimensions.

    The steps of an environment may belong to several episodes. The names of the fields are those of RLinf. A field that
    is None or ``{}`` is absent. A trajectory may consist of E rollout epochs, each with an entry more in some fields.
    """

    max_episode_length: int = 0
    """Limit of the environment's episodes in steps, kept for the caller; 0 = not given."""
    model_weights_id: str = ""
    """Label of the weights that acted, kept for the caller."""
    actions: Tensor | None = None
    """[T, B, C * A]: the actions of each chunk step."""
    intervene_flags: Tensor | None = None
    """bool [T, B, C * A]: whether a human chose the action."""
    rewards: Tensor | None = None
    """[T, B, C]: reward of each action."""
    terminations: Tensor | None = None
    """[T, B, C]: whether the episode ended in a terminal state. [T + E, B, C] if each rollout epoch begins with an
    entry for the state before its first step."""
    truncations: Tensor | None = None
    """Whether a time limit ended the episode; shape as ``terminations``."""
    dones: Tensor | None = None
    """Whether the episode ended, for either reason; shape as ``terminations``."""
    prev_logprobs: Tensor | None = None
    """[T, B, ...]: behaviour log-probs of the actions."""
    prev_values: Tensor | None = None
    """[T, B, ...]: values of the states before each chunk step. [T + E, B, ...] if each rollout epoch ends with the
    value of the state after its last step."""
    versions: Tensor | None = None
    """[T, B, ...]: version of the weights that acted."""
    forward_inputs: Mapping[str, Any] = field(default_factory=dict)
    """[T, B, ...], nested: the policy's inputs."""
    curr_obs: Mapping[str, Any] = field(default_factory=dict)
    """[T, B, ...], nested: observation before each chunk step."""
    next_obs: Mapping[str, Any] = field(default_factory=dict)
    """[T, B, ...], nested: observation after each chunk step."""
    task_descriptions: Sequence[str] | Sequence[Sequence[str]] | None = None
    """B texts, one for each environment, or T lists of B texts. If they are absent, the entry ``task_descriptions`` of
    ``curr_obs`` is used."""
    success: bool | None = None
    """Whether the task was solved; None = unknown."""
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """[T, B, ...], may be nested: further fields under any other names. In batches these names are next to those of the
    other fields."""

    @classmethod
    def of(cls, trajectory: Any) -> TensorTrajectory:
        """Convert a mapping, a dataclass such as RLinf's ``Trajectory``, or another object with attributes.

        Fields, keys or attributes that this class does not have become ``extra_fields``. Raises `UserError` if one of
        them is in ``extra_fields`` too.
        """
        if type(trajectory) is cls:
            return trajectory
        if isinstance(trajectory, Mapping):
            given: dict[str, Any] = dict(trajectory)
        else:
            names = [name for name in getattr(trajectory, "__dict__", ()) if not name.startswith("_")]
            if is_dataclass(trajectory):
                names = [each.name for each in fields(trajectory)]
            given = {name: getattr(trajectory, name, None) for name in (*cls.__dataclass_fields__, *names)}
        own = {name: given[name] for name in cls.__dataclass_fields__ if given.get(name) is not None}
        if extra := {name: value for name, value in given.items() if name not in cls.__dataclass_fields__}:
            for name in extra.keys() & own.get("extra_fields", {}).keys():
                raise UserError(f"{name}: given twice, as a field and in extra_fields")
            own["extra_fields"] = {**extra, **own.get("extra_fields", {})}
        return cls(**own)

    def by_name(self) -> dict[str, Any]:
        """Return all fields by name, those in ``extra_fields`` next to the others.

        Raises `UserError` if ``extra_fields`` is no mapping, or one of them has a name that is in use.
        """
        found = dict(vars(self))
        if not isinstance(extra := found.pop("extra_fields"), Mapping):
            raise UserError(f"extra_fields: {type(extra).__name__}, not a mapping of tensors by name")
        for name in extra:
            _check_name(name, "extra_fields")
            if name in found or name in ADDED_TO_BATCHES or name.startswith("#"):
                raise UserError(f"{name}: the buffer uses this name itself; give the field another one")
        return {**found, **extra}


@dataclass(frozen=True)
class FlatTrajectory:
    """A trajectory as columns with T * B rows. Row ``t * B + b`` is chunk step t of environment b."""

    steps: int  # T
    batch: int  # B
    epochs: int  # E if any field has bootstrap entries, else 0
    columns: dict[FieldPath, Tensor]  # [T * B, ...], contiguous, on the CPU
    bootstrap: dict[FieldPath, Tensor]  # [E, B, ...]: the bootstrap entries of the fields that have any
    instructions: tuple[str, ...]  # task description of each row; () if there are none
    model_weights_id: str
    max_episode_length: int
    success: bool | None

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.steps * self.batch

    @property
    def nbytes(self) -> int:
        """Total bytes of all columns."""
        return sum(column.nbytes for column in self.columns.values())

    @classmethod
    def flatten(cls, trajectory: TensorTrajectory, *, copy: bool = False) -> FlatTrajectory:
        """Convert a trajectory to rows, which share memory with its tensors where possible, but never with ``copy``.

        Raises:
            UserError: a value is not a tensor, its shape does not fit the others, or the trajectory has no tensors.
        """
        values: list[tuple[FieldPath, Any]] = []
        for name, whole in trajectory.by_name().items():
            if whole is None or name in NOT_TENSORS:
                continue
            values += [((name,), whole)] if isinstance(whole, Tensor) else leaves((name,), whole)
        tensors: dict[FieldPath, Tensor] = {}
        descriptions = trajectory.task_descriptions
        for path, value in values:
            tensor = value
            try:
                if not isinstance(tensor, Tensor):
                    if path[-1] == INSTRUCTIONS:
                        if path[0] == "curr_obs" and descriptions is None:
                            descriptions = value
                        continue
                    if value is None:
                        continue
                    tensor = torch.as_tensor(value)
                # These methods are called only where needed: for a small trajectory, the calls would take as long as
                # the rest of this function.
                if tensor.requires_grad:
                    tensor = tensor.detach()
                if not tensor.is_cpu:
                    tensor = tensor.cpu()
                if tensor.is_conj() or tensor.is_neg():
                    tensor = tensor.resolve_conj().resolve_neg()
                if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
                    raise TypeError
            except (TypeError, ValueError, RuntimeError):
                raise UserError(f"{'.'.join(path)}: {type(value).__name__}, not a dense tensor [T, B, ...]") from None
            if tensor.dim() < 2:
                shape = list(tensor.shape)
                raise UserError(f"{'.'.join(path)}: a trajectory's tensors are [T, B, ...], this one is {shape}")
            tensors[path] = tensor
        if not tensors:
            raise UserError("a trajectory without any tensor")

        # T is the length of a field that cannot have bootstrap entries, if there is such a field
        plain = [tensor for path, tensor in tensors.items() if path[0] not in MAY_BOOTSTRAP]
        steps, batch = (plain or list(tensors.values()))[0].shape[:2]
        if not steps * batch:
            raise UserError(f"a trajectory of {steps} steps in {batch} environments holds nothing")
        columns, bootstrap, epochs = dict[FieldPath, Tensor](), dict[FieldPath, Tensor](), 0
        for path, tensor in tensors.items():
            shape = tensor.shape
            extra = shape[0] - steps
            if shape[1] != batch or extra < 0 or (extra and path[0] not in MAY_BOOTSTRAP):
                why = f"its shape is {list(shape)}, but the trajectory has T, B = {steps}, {batch}"
                raise UserError(f"{'.'.join(path)}: {why}")
            if extra:
                if steps % extra or epochs not in (0, extra):
                    raise UserError(f"{'.'.join(path)}: {extra} bootstrap rows do not divide {steps} steps")
                epochs = extra
                by_epoch = tensor.reshape(epochs, -1, *shape[1:])
                if path[0] in FLAGS:
                    entries, by_epoch = by_epoch[:, 0], by_epoch[:, 1:]
                else:
                    entries, by_epoch = by_epoch[:, -1], by_epoch[:, :-1]
                tensor = by_epoch.reshape(-1, *shape[1:])
                bootstrap[path] = entries.contiguous()
            columns[path] = tensor.contiguous().view(steps * batch, *shape[2:])
        if copy:
            for flat in (columns, bootstrap):
                for path, tensor in flat.items():
                    if tensor.untyped_storage().data_ptr() == tensors[path].untyped_storage().data_ptr():
                        flat[path] = tensor.clone()
        try:
            longest, weights = int(trajectory.max_episode_length), str(trajectory.model_weights_id)
            weights.encode()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"max_episode_length is an integer and model_weights_id a text ({error})") from None
        instructions = () if descriptions is None else _by_row(descriptions, steps, batch)
        return cls(
            steps, batch, epochs, columns, bootstrap, instructions, weights, longest, _outcome(trajectory.success)
        )

    def unflatten(self) -> TensorTrajectory:
        """Convert back to the trajectory that was passed to `flatten`."""
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
        return TensorTrajectory.of(
            {
                "max_episode_length": self.max_episode_length,
                "model_weights_id": self.model_weights_id,
                "task_descriptions": descriptions,
                "success": self.success,
                **found,
            }
        )


class TrajectoryBlock:
    """The rows of n trajectories (*members*) with the same T, B and fields. A single member is not copied.

    Attributes:
        columns: the columns ``[n * T * B, ...]``, one member after the other.
        shape: n, T, B.
        rows_each: number of rows of each member, T * B.
        count: number of rows of all members, n * T * B.
        ends: bool array ``[n, T, B]``: whether an episode ends in this chunk step.
        cuts: bool array ``[n, T, B]``: whether an episode or a rollout epoch ends in this chunk step. The environments
            may be reset between two rollout epochs, so the next step may not continue the episode.
    """

    def __init__(self, members: Sequence[FlatTrajectory]) -> None:
        self.members, self.columns = members, members[0].columns
        if len(members) > 1:
            self.columns = {path: torch.cat([member.columns[path] for member in members]) for path in self.columns}
        self.steps, self.batch = members[0].steps, members[0].batch
        self.shape = (len(members), self.steps, self.batch)
        self.rows_each = self.steps * self.batch
        self.count = len(members) * self.rows_each
        ended = np.zeros(self.count, bool)
        for name in FLAGS:
            if (flags := self.columns.get((name,))) is not None:
                ended |= flags.view(self.count, -1).any(dim=1).bool().numpy()
        self.ends = self.cuts = ended.reshape(self.shape)
        if any(member.epochs > 1 for member in members):
            self.cuts = self.ends.copy()
            for i, member in enumerate(members):
                if member.epochs > 1:
                    length = self.steps // member.epochs
                    self.cuts[i, length - 1 :: length] = True


def join_blocks(trajectories: Sequence[FlatTrajectory]) -> Iterator[TrajectoryBlock]:
    """Yield blocks with all trajectories in order. Consecutive small ones of equal shape and fields share a block."""
    members: list[FlatTrajectory] = []
    nbytes, layout = 0, None
    for trajectory in trajectories:
        fields = [(path, column.dtype, column.shape) for path, column in sorted(trajectory.columns.items())]
        own, own_nbytes = (trajectory.steps, trajectory.batch, fields), trajectory.nbytes
        if members and (nbytes + own_nbytes > BLOCK_NBYTES or own != layout):
            yield TrajectoryBlock(members)
            members, nbytes = [], 0
        members.append(trajectory)
        nbytes, layout = nbytes + own_nbytes, own
    if members:
        yield TrajectoryBlock(members)


def steps_left(ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return int32 ``[..., T, B]``: for each step the number of steps up to the next one where ``ends`` is True.

    The step itself and the step where ``ends`` is True are both counted. If ``ends`` is False for all remaining steps,
    the steps up to T - 1 are counted.

    Args:
        ends: bool ``[..., T, B]``.
    """
    at = np.arange(ends.shape[-2], dtype=np.int32)[:, None]
    stops = np.where(ends, at, at[-1])
    return np.ascontiguousarray(np.minimum.accumulate(stops[..., ::-1, :], axis=-2)[..., ::-1, :] - at + 1)


def _by_row(descriptions: Any, steps: int, batch: int) -> tuple[str, ...]:
    """Return the task description of each row; () if there are none.

    Args:
        descriptions: a text for each environment, or for each step and environment; empty: there are none.
        steps, batch: T and B.

    Raises:
        UserError: ``descriptions`` is something else, or UTF-8 cannot encode a text.
    """
    try:
        given = list(descriptions)
        if not given and not isinstance(descriptions, str):
            return ()
        of_environments = all(isinstance(own, str) for own in given)
        by_step = [given] if of_environments else [list(own) for own in given if not isinstance(own, str)]
        texts = [text for step in by_step for text in step]
        "".join(texts).encode()
        right = not isinstance(descriptions, (str, Mapping)) and all(len(step) == batch for step in by_step)
    except (TypeError, UnicodeEncodeError) as error:
        raise UserError(f"{INSTRUCTIONS}: not texts that UTF-8 can encode ({error})") from None
    if not right or len(by_step) != (1 if of_environments else steps):
        each = f"give one for each of the {batch} environments, or for each of {steps} steps"
        raise UserError(f"{INSTRUCTIONS}: {each}")
    return tuple(texts * steps if of_environments else texts)


def _outcome(success: Any) -> bool | None:
    """Convert ``success`` to a bool. Raises `UserError` if it is neither None nor a bool, 0 or 1, also as a tensor."""
    if success is None:
        return None
    try:
        value = success.item() if hasattr(success, "item") else success
    except (ValueError, RuntimeError):
        value = None
    if value not in (0, 1):
        raise UserError(f"success = {success!r:.60}: it is True, False or None, one value for a whole trajectory")
    return bool(value)


def _check_name(name: Any, where: str) -> None:
    """Raise `UserError` if ``name``, a key in ``where``, cannot name a field in a schema file."""
    if not isinstance(name, str) or not name.isprintable():
        raise UserError(f"{where}: the key {name!r} is not a printable text, so it cannot name a field")


def leaves(path: FieldPath, value: Any) -> Iterator[tuple[FieldPath, Any]]:
    """Yield (path, value) for each value in a nested mapping. All paths in the result begin with ``path``.

    Raises `UserError` if a key cannot name a field.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            _check_name(key, ".".join(path))
            yield from leaves((*path, key), part)
    else:
        yield path, value


def put(tree: dict[str, Any], path: FieldPath, value: Any) -> None:
    """Set the value at ``path`` in a nested dict. Missing inner dicts are created."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def quoted(path: FieldPath) -> str:
    """Return a field's name for an error message. It differs between the key ``a.b`` and the key ``b`` in ``a``."""
    return path[0] + "".join(f"[{name!r}]" for name in path[1:])


# tensor dtypes that NumPy does not have -> the dtypes to which `to_numpy` converts them
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    **{own: torch.float32 for name, own in vars(torch).items() if name.startswith("float8_")},
}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the dtype to which `to_numpy` converts. Raises `UserError` if there is none, as for quantised tensors."""
    try:
        return torch.empty(0, dtype=_WIDER.get(dtype, dtype)).numpy().dtype
    except (TypeError, NotImplementedError, RuntimeError):
        raise UserError(f"{str(dtype).removeprefix('torch.')} has no values that NumPy can hold") from None


def to_numpy(column: Tensor) -> np.ndarray[Any, Any]:
    """Convert a CPU tensor to an array. Floats that NumPy lacks become float32, and complex32 becomes complex64."""
    numpy_dtype(column.dtype)
    return column.to(_WIDER.get(column.dtype, column.dtype)).numpy()
