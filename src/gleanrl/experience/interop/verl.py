"""A batch to and from the tensor dictionary that verl and AgentEvolver train on.

Their rows hold one sequence each: a left-padded prompt of width P and a right-padded response of width R. The response
starts with the first sampled token and goes on through whatever the environment said in between; masks tell the two
apart. Here the dictionary is of numpy arrays, which `torch.from_numpy` turns into tensors without a copy.

Sources: verl's agent loop and `DataProto`, AgentEvolver's environment manager and heterogeneous actor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gleanrl.experience.pool.admission import ROUNDING
from gleanrl.types import (
    BoolArray,
    FloatArray,
    Group,
    GroupSpec,
    IntArray,
    Score,
    Segment,
    StopReason,
    Task,
    Trajectory,
    Turn,
    segment_arrays,
)
from gleanrl.utils.errors import UserError

Array = npt.NDArray[Any]
PerTrajectory = Sequence["float | Array"]

DISCARDED = "discard"
"""`info["guided"]` of a trajectory whose prompt held experience that training does not show."""


_SCORES = ("scores", "token_level_scores", "rm_scores", "token_level_rewards")
_WHOLE = frozenset({"input_ids", "attention_mask", "loss_mask", "exp_mask", "turn_ids", "versions"})
_RESPONSE = frozenset(
    {"responses", "response_mask", "recorded_old_log_probs", "rollout_log_probs", "old_log_probs", *_SCORES[1:]}
)
_KNOWN = _WHOLE | _RESPONSE | {"group_ids", "trajectory_ids", "segment_ids", "scores", "valid"}


# --- from groups ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Row:
    """A segment and where it comes from."""

    trajectory: Trajectory
    replayed: bool
    group: int
    index: int  # of the trajectory, among all of the batch
    segment: int
    offset: int  # of the segment's first token in its trajectory
    tokens: IntArray
    mask: BoolArray
    behaviour: FloatArray

    @property
    def prompt(self) -> int:
        """Tokens before the first sampled one."""
        return int(self.mask.argmax()) if self.mask.any() else self.tokens.size

    @property
    def turns(self) -> Segment:
        return self.trajectory.segments[self.segment]

    @property
    def guided(self) -> bool:
        return self.trajectory.info.get("guided") == DISCARDED


def to_verl(
    groups: Sequence[Group],
    *,
    pad_token: int,
    max_prompt: int | None = None,
    max_response: int | None = None,
    old_logprobs: PerTrajectory | None = None,
    advantages: PerTrajectory | None = None,
    returns: PerTrajectory | None = None,
    keep_all: bool = False,
) -> dict[str, Array]:
    """One row for each segment: N rows, a prompt of width P, a response of width R. Nothing is ever cut off.

    int64 [N, P]: ``prompts``. int64 [N, R]: ``responses``, ``response_mask`` (1 = sampled; environment text and padding
    are 0). int64 [N, P + R]: ``input_ids``, ``attention_mask``, ``position_ids`` (0 on the left padding, the last
    position on the right), ``loss_mask`` (0, then the response mask), ``exp_mask`` (1 on the whole response of a
    replayed trajectory, on prompt and response where `info["guided"]` is "discard"), ``turn_ids`` (-1 on padding),
    ``versions`` (-1 where not sampled).
    float32 [N, R], 0 where nothing is trained: ``recorded_old_log_probs`` and ``rollout_log_probs`` (as sampled; the
    same values under both names), ``old_log_probs`` (the denominator of the ratio), ``token_level_rewards`` (the
    score, on the last trained token of every row), and ``advantages`` and ``returns`` where given.
    [N]: ``group_ids`` (position in ``groups``), ``trajectory_ids``, ``segment_ids`` int64; ``scores``
    float64, exact where float32 is not; ``valid`` int64, 0 where the score is invalid: rewards and ``scores`` hold 0
    there, and no NaN is anywhere.

    Args:
        pad_token: what fills the padding; it may be a token of the text too, since the masks decide.
        max_prompt: P; None = the longest of the batch.
        max_response: R, in the same way.
        old_logprobs: of fresh trajectories, if other than sampled, one item for each trajectory of all groups in
            order: float32 [its tokens, segment after segment], or one number for all of its trained tokens. What
            is off-policy (replayed, guided) keeps its recorded ones.
        advantages: in the same way.
        returns: in the same way.
        keep_all: keep rows that can train nothing, of invalid trajectories and segments without a sampled token; then
            `from_verl` gives back every group. A loop that makes baselines itself must not see them.

    Raises:
        UserError: a prompt or response is longer than asked for.
        ValueError: an array does not fit its trajectory, or a segment starts with a sampled token.
    """
    count = sum(len(group.trajectories) for group in groups)
    rows = [row for row in _rows(groups) if keep_all or (row.trajectory.score.valid and row.mask.any())]
    for row in rows:
        if row.mask[0]:
            raise ValueError(f"trajectory {row.trajectory.id!r}: the first token of a segment cannot be sampled")
    width = _width(rows, "prompt", [row.prompt for row in rows], max_prompt)
    longest = _width(rows, "response", [row.tokens.size - row.prompt for row in rows], max_response)
    starts = [width - row.prompt for row in rows]

    def laid(values: Sequence[Array], fill: float = 0, dtype: type[np.generic] = np.int64) -> Array:
        """[N, P + R] with each row's values in their place."""
        table = np.full((len(rows), width + longest), fill, dtype)
        for line, start, value in zip(table, starts, values, strict=True):
            line[start : start + value.size] = value
        return table

    def responses(values: Sequence[Array]) -> Array:
        """float32 [N, R]"""
        return np.ascontiguousarray(laid(values, 0, np.float32)[:, width:])

    tokens = laid([row.tokens for row in rows], pad_token)
    attention = laid([np.ones(row.tokens.size, np.int64) for row in rows])
    mask = laid([row.mask for row in rows])
    behaviour = [row.behaviour for row in rows]
    old = behaviour
    if old_logprobs is not None:
        given = _tokenwise("old_logprobs", old_logprobs, rows, count)
        old = [row.behaviour if row.replayed or row.guided else own for row, own in zip(rows, given, strict=True)]
    batch: dict[str, Array] = {
        "prompts": np.ascontiguousarray(tokens[:, :width]),
        "responses": np.ascontiguousarray(tokens[:, width:]),
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clip(0),
        "loss_mask": mask,
        "response_mask": np.ascontiguousarray(mask[:, width:]),
        "exp_mask": laid([_off_policy(row) for row in rows]),
        "turn_ids": laid([_by_turn(row, range(len(row.turns))) for row in rows], -1),
        "versions": laid([_by_turn(row, [turn.version for turn in row.turns]) for row in rows], -1),
        "recorded_old_log_probs": responses(behaviour),
        "rollout_log_probs": responses(behaviour),
        "old_log_probs": responses(old),
        "token_level_rewards": responses([_rewards(row) for row in rows]),
    }
    for name, values in (("advantages", advantages), ("returns", returns)):
        if values is not None:
            batch[name] = responses(_tokenwise(name, values, rows, count))
    return batch | _columns(rows)


def _rows(groups: Sequence[Group]) -> Iterator[_Row]:
    index = 0
    for number, group in enumerate(groups):
        for position, trajectory in enumerate(group.trajectories):
            offset = 0
            for part, segment in enumerate(trajectory.segments):
                if not any(turn.tokens.size for turn in segment):
                    continue
                arrays = segment_arrays(segment)
                yield _Row(trajectory, position >= len(group.fresh), number, index, part, offset, *arrays)
                offset += arrays[0].size
            index += 1


def _width(rows: Sequence[_Row], what: str, sizes: Sequence[int], limit: int | None) -> int:
    longest = max(sizes, default=0)
    if limit is not None and longest > limit:
        name = rows[int(np.argmax(sizes))].trajectory.id
        raise UserError(
            f"trajectory {name!r} has a {what} of {longest} tokens, but max_{what} is {limit}; "
            f"raise max_{what} or leave the trajectory out"
        )
    return longest if limit is None else limit


def _tokenwise(name: str, values: PerTrajectory, rows: Sequence[_Row], count: int) -> list[FloatArray]:
    """float32 [tokens] for each row, 0 where not trained."""
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} items for {count} trajectories")
    found: list[FloatArray] = []
    for row in rows:
        value = np.asarray(values[row.index], np.float32)
        if value.ndim:
            if value.shape != (row.trajectory.total_tokens,):
                raise ValueError(
                    f"{name} of trajectory {row.trajectory.id!r} has shape {value.shape}, "
                    f"but the trajectory has {row.trajectory.total_tokens} tokens"
                )
            value = value[row.offset : row.offset + row.tokens.size]
        found.append(np.where(row.mask, value, np.float32(0)))
    return found


def _off_policy(row: _Row) -> IntArray:
    marks = np.full(row.tokens.size, row.replayed or row.guided, np.int32)
    if not row.guided:
        marks[: row.prompt] = 0
    return marks


def _by_turn(row: _Row, values: Sequence[int]) -> Array:
    return np.repeat(np.array(values, np.int64), [turn.tokens.size for turn in row.turns])


def _rewards(row: _Row) -> FloatArray:
    rewards = np.zeros(row.tokens.size, np.float32)
    if row.mask.any() and row.trajectory.score.valid:
        rewards[row.mask.nonzero()[0][-1]] = row.trajectory.score.value
    return rewards


def _columns(rows: Sequence[_Row]) -> dict[str, Array]:
    """What is one number a row."""
    scores = [row.trajectory.score for row in rows]
    return {
        "group_ids": np.array([row.group for row in rows], np.int64),
        "trajectory_ids": np.array([row.index for row in rows], np.int64),
        "segment_ids": np.array([row.segment for row in rows], np.int64),
        "scores": np.array([score.value if score.valid else 0.0 for score in scores], np.float64),
        "valid": np.array([score.valid for score in scores], np.int64),
    }


# --- to groups ------------------------------------------------------------------------------------
def from_verl(
    batch: Mapping[str, Any],
    tasks: Sequence[Task] | Mapping[int, Task],
    *,
    ids: Sequence[str] | None = None,
    prefix: str = "verl",
    decode: Callable[[list[int]], str] | None = None,
    version: int = 0,
) -> list[Group]:
    """Groups of a dictionary of arrays, tensors on the CPU or a TensorDict; token ids and log-probs bit for bit.

    Needed are ``responses``, ``input_ids``, ``attention_mask``, ``group_ids``, ``loss_mask`` or ``response_mask``,
    log-probs and rewards, with shapes as `to_verl` gives them; other keys are not looked at. Rows may be in any order.

    * Sampled: ``loss_mask``, and ``response_mask`` only without one, since AgentEvolver's covers environment text too.
    * Log-probs as sampled: ``recorded_old_log_probs`` of a replayed row; of others ``rollout_log_probs``, or else
      ``old_log_probs``.
    * Replayed: ``exp_mask`` is 1 on a trained token. Where it is 1 on the prompt too, the row was guided and its
      experience discarded: a fresh trajectory with `info["guided"] = "discard"`, which a pool does not admit.
    * Scores: ``scores``, else the row's sum of ``token_level_scores``, ``rm_scores`` or ``token_level_rewards``;
      invalid where ``valid`` is 0.
    * Turns: ``turn_ids``, else the runs of the mask. A turn without tokens leaves no trace and does not come back.
    * ``trajectory_ids`` and ``segment_ids`` tell which rows are one trajectory; without them each row is one.

    Args:
        tasks: by group id. A group's ticket is its id.
        ids: a name for each row's trajectory (AgentEvolver's ``rollout_ids``); else made of ``prefix``, task and
            number.
        decode: token ids of a turn to its text; without it messages are empty. Sampled turns are the assistant's,
            others the user's.
        version: of the weights that sampled, where there is no ``versions``.

    Raises:
        UserError: a key is missing, shapes or paddings are not as said, a group has no task, rows of one trajectory
            disagree or are there twice, or a trained token has no log-prob. Zeros in place of recorded ones are none:
            they would claim that the policy was certain.
    """
    table = _Table(batch)
    if ids is not None and len(ids) != table.rows:
        raise UserError(f"ids names {len(ids)} rows, but the batch has {table.rows}")
    heads = [table.head(row) for row in range(table.rows)]
    numbers, parts = table.column("trajectory_ids"), table.column("segment_ids")
    order = sorted(range(table.rows), key=lambda row: (numbers[row], parts[row], row))
    members: dict[int, list[tuple[Trajectory, bool]]] = {}
    for number, same in groupby(order, key=lambda row: int(numbers[row])):
        rows = list(same)
        head = heads[rows[0]]
        if len({int(parts[row]) for row in rows}) < len(rows):
            raise UserError(f"rows {rows} are the same segment of trajectory {number}; drop rows that are there twice")
        if any(heads[row] != head for row in rows):
            raise UserError(f"rows {rows} share trajectory_ids {number}, but not their group_ids, exp_mask or score")
        task = _task(tasks, head.group)
        trajectory = Trajectory(
            id=f"{prefix}/{task.id}/{number}" if ids is None else ids[rows[0]],
            task_id=task.id,
            segments=tuple(table.segment(row, head.replayed, decode, version) for row in rows),
            score=Score(head.score) if head.valid else Score.failed("marked invalid in the batch"),
            stop=StopReason.DONE,
            info={"guided": DISCARDED} if head.guided else {},
        )
        members.setdefault(head.group, []).append((trajectory, head.replayed))
    return [_group(_task(tasks, number), number, found) for number, found in sorted(members.items())]


def _task(tasks: Sequence[Task] | Mapping[int, Task], group: int) -> Task:
    try:
        if group < 0:
            raise IndexError
        return tasks[group]
    except LookupError:
        raise UserError(f"group_ids holds {group}, but tasks has no such item; give a task for each group id") from None


def _group(task: Task, number: int, members: Sequence[tuple[Trajectory, bool]]) -> Group:
    fresh = tuple(trajectory for trajectory, replayed in members if not replayed)
    stored = tuple(trajectory for trajectory, replayed in members if replayed)
    return Group(GroupSpec(task, len(fresh), stored), (*fresh, *stored), number)


# --- the dictionary, checked ----------------------------------------------------------------------
class _Head(NamedTuple):
    """What the rows of one trajectory agree on."""

    group: int
    replayed: bool
    guided: bool
    valid: bool
    score: float


class _Table:
    """The arrays of a batch, checked, and what each row says."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        keys = set(batch.keys())  # a TensorDict knows no `in`
        self._given = {key: np.asarray(batch[key]) for key in _KNOWN if key in keys}
        for key in ("responses", "input_ids", "attention_mask", "group_ids"):
            self._need(key)
        responses, self.tokens = self._given["responses"], self._given["input_ids"]
        if responses.ndim != 2 or self.tokens.ndim != 2 or responses.shape[1] > self.tokens.shape[1]:
            raise UserError(f"responses {responses.shape} are no part of input_ids {self.tokens.shape}")
        self.rows, total = self.tokens.shape
        self.width = total - responses.shape[1]
        for key, value in self._given.items():
            self._check_shape(key, value.shape)
        if not np.array_equal(self.tokens[:, self.width :], responses):
            raise UserError("input_ids do not end with the responses")
        self.real = self._given["attention_mask"].astype(bool)
        self.trained = self._trained()
        self.off = self._given.get("exp_mask", np.zeros_like(self.tokens)).astype(bool)
        self._check_rows()

    def _need(self, *names: str) -> Array:
        """The first of these keys that is there."""
        for name in names:
            if name in self._given:
                return self._given[name]
        raise UserError(f"the batch has no {' or '.join(names)}; it is needed to rebuild trajectories")

    def _check_shape(self, key: str, shape: tuple[int, ...]) -> None:
        total = self.tokens.shape[1]
        want = (self.rows,)
        if key in _WHOLE:
            want = (self.rows, total)
        elif key in _RESPONSE:
            want = (self.rows, total - self.width)
        if shape != want:
            raise UserError(f"{key} has shape {shape}, but with these input_ids and responses it must be {want}")

    def _trained(self) -> BoolArray:
        """bool [N, P + R]"""
        if "loss_mask" in self._given:
            return self._given["loss_mask"].astype(bool)
        trained = np.zeros(self.tokens.shape, np.bool_)
        trained[:, self.width :] = self._need("response_mask").astype(bool)
        return trained

    def _check_rows(self) -> None:
        limit = np.iinfo(np.int32).max
        prompt, response = self.real[:, : self.width], self.real[:, self.width :]
        lone = self.trained.any(-1) & ~prompt.any(-1) & self.trained[:, self.width : self.width + 1].any(-1)
        problems = {
            "has no tokens": ~self.real.any(-1),
            "is trained outside its response": self.trained[:, : self.width].any(-1),
            "is trained on padding": (self.trained & ~self.real).any(-1),
            "is not padded on the left of its prompt": (prompt[:, :-1] & ~prompt[:, 1:]).any(-1)
            | (prompt.any(-1) & ~prompt[:, -1:].any(-1)),
            "is not padded on the right of its response": (~response[:, :-1] & response[:, 1:]).any(-1),
            "has no token before its first trained one": lone,
            "has a token id below 0 or above int32": (self.real & ((self.tokens < 0) | (self.tokens > limit))).any(-1),
        }
        for what, where in problems.items():
            if where.any():
                raise UserError(f"row {int(where.argmax())} of the batch {what}")

    def column(self, name: str) -> Array:
        """[N], the row's own number where nothing is said."""
        return self._given[name] if name in self._given else np.arange(self.rows)

    def head(self, row: int) -> _Head:
        off = (self.off & self.real)[row]
        guided = bool(off[: self.width].any())
        valid = "valid" not in self._given or bool(self._given["valid"][row])
        score = float(self._need(*_SCORES)[row].sum(dtype=np.float64)) if valid else 0.0
        if not np.isfinite(score):
            raise UserError(f"row {row} of the batch has a score of {score}; set its valid to 0 or leave it out")
        replayed = not guided and bool((off & self.trained[row]).any())
        return _Head(int(self._given["group_ids"][row]), replayed, guided, valid, score)

    def segment(self, row: int, replayed: bool, decode: Callable[[list[int]], str] | None, version: int) -> Segment:
        """The turns of a row; turns begin where the mask or the number of the turn changes."""
        real = self.real[row]
        tokens, mask, logprobs = self.tokens[row][real], self.trained[row][real], self._logprobs(row, replayed)[real]
        named = self._given.get("turn_ids")
        turn_ids = mask if named is None else named[row][real]
        edges = 1 + ((mask[1:] != mask[:-1]) | (turn_ids[1:] != turn_ids[:-1])).nonzero()[0]
        versions = self._given["versions"][row][real] if "versions" in self._given else np.full(tokens.size, version)
        turns: list[Turn] = []
        for start, stop in zip([0, *edges], [*edges, tokens.size], strict=True):
            sampled = bool(mask[start])
            text = "" if decode is None else decode(tokens[start:stop].tolist())
            turns.append(
                Turn(
                    {"role": "assistant" if sampled else "user", "content": text},
                    tokens[start:stop],
                    logprobs[start:stop] if sampled else None,
                    int(versions[start]) if sampled else -1,
                )
            )
        return tuple(turns)

    def _logprobs(self, row: int, replayed: bool) -> Array:
        """[P + R], as sampled."""
        names = ("recorded_old_log_probs",) if replayed else ("rollout_log_probs", "old_log_probs")
        trained = self.trained[row]
        logprobs = np.zeros(trained.size, np.float32)
        if trained.any():
            logprobs[self.width :] = self._need(*names)[row]
            found = logprobs[trained]
            if not (np.isfinite(found) & (found <= ROUNDING)).all():
                raise UserError(f"row {row} of the batch: {' or '.join(names)} is no log-prob on a trained token")
            if replayed and not found.any():
                raise UserError(f"row {row} of the batch is replayed, but its recorded_old_log_probs are zeros")
        return logprobs
