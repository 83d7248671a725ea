"""Converts groups to and from the dictionary of tensors on which verl and AgentEvolver train.

With `from_verl`, their rollouts can enter an `ExperiencePool`. With `to_verl`, groups with replayed members can be
trained on in their loops. docs/howto/verl.md shows both.

Each row of a batch holds one sequence: a left-padded prompt of width P and a right-padded response of width R. The
response starts with the first sampled token. It includes the tokens of the environment's texts between sampled ones,
and masks distinguish the two. In this module the values are numpy arrays; `torch.from_numpy` converts them to tensors
without a copy.

Sources of the format: verl's agent loop and `DataProto`, AgentEvolver's environment manager and heterogeneous actor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
"""An array of any dtype."""
PerTrajectory = Sequence["float | Array"]
"""One value, or an array of one value for each trained token, for each trajectory."""

DISCARDED = "discard"
"""Value of ``info["guided"]`` for a trajectory whose prompt contained a guidance text that training leaves out."""

_SCORES = ("scores", "token_level_scores", "rm_scores", "token_level_rewards")
_WHOLE = frozenset({"input_ids", "attention_mask", "loss_mask", "exp_mask", "turn_ids", "versions"})
_RESPONSE = frozenset(
    {"responses", "response_mask", "recorded_old_log_probs", "rollout_log_probs", "old_log_probs", *_SCORES[1:]}
)
_KNOWN = _WHOLE | _RESPONSE | {"group_ids", "trajectory_ids", "segment_ids", "scores", "valid"}


# --- groups to a batch ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Row:
    """A segment of a trajectory (see `Trajectory`), which becomes one row of the batch."""

    trajectory: Trajectory
    replayed: bool
    guided: bool  # whether it was sampled with a text in its prompt that training discards (`DISCARDED`)
    group: int  # index of its group
    index: int  # index of its trajectory among the trajectories of all groups
    part: int  # index of the segment in its trajectory
    offset: int  # index of the segment's first token among the tokens of its trajectory
    tokens: IntArray
    mask: BoolArray
    behaviour: FloatArray
    prompt: int  # number of tokens before the first sampled one


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
    """Convert groups to a batch of N rows, one for each segment of each trajectory. No token is cut off.

    A trajectory has several segments if its context was rewritten during the episode (see `Trajectory`).

    The batch has the following arrays, where P is the width of a prompt and R that of a response. No array contains
    NaN.

    int64 [N, P]:

    * ``prompts``: token ids.

    int64 [N, R]:

    * ``responses``: token ids.
    * ``response_mask``: 1 on sampled tokens, 0 on the environment's texts and on padding.
    * ``step_ids``: index of the agent's turn in its segment, also on the environment's answer to it; -1 on padding.

    int64 [N, P + R]:

    * ``input_ids``: prompts and responses together.
    * ``attention_mask``: 0 on padding.
    * ``position_ids``: 0 on the left padding; the last position is repeated on the right padding.
    * ``loss_mask``: 0 on the prompt, and ``response_mask`` on the response.
    * ``exp_mask``: 1 on the off-policy tokens, which are the sampled tokens of a replayed trajectory, and the sampled
      tokens and the prompt of a guided trajectory whose text training discards (``info["guided"]`` is "discard"). 0
      elsewhere.
    * ``turn_ids``: index of the turn in its segment; -1 on padding.
    * ``versions``: version of the weights that sampled the token; -1 on tokens that were not sampled.

    float32 [N, R], 0 on tokens that are not sampled:

    * ``recorded_old_log_probs`` and ``rollout_log_probs``: both contain the log-probs as sampled.
    * ``old_log_probs``: the denominator of the ratio, see the argument ``old_logprobs``.
    * ``token_level_rewards``: the score on the last sampled token of the row, 0 on all others. Each row of a trajectory
      has the whole score.
    * ``advantages`` and ``returns``, if they are given.

    [N]:

    * ``group_ids`` (index in ``groups``), ``trajectory_ids`` and ``segment_ids``: int64.
    * ``valid``: int64, 0 if the score of the trajectory is invalid. Its rewards and ``scores`` are then 0.
    * ``scores``: the score as float64, because float32 could not represent it exactly.
    * ``uid`` (``group_ids`` as text), ``task_ids`` and ``rollout_ids`` (ids of trajectories): strings in an array of
      objects, for ``DataProto.non_tensor_batch``. verl compares rows that have the same ``uid``.

    Args:
        groups: the groups to convert.
        pad_token: token id of the padding. It may also occur in texts, because ``attention_mask`` marks the padding.
        max_prompt: P; None = the length of the longest prompt in the batch.
        max_response: R; None = the length of the longest response in the batch.
        old_logprobs: replaces the sampled log-probs of fresh trajectories in ``old_log_probs``. It has one item for
            each trajectory of all groups, in order: a float32 array over all tokens of the trajectory, segment after
            segment, or one number for all of its sampled tokens. Off-policy trajectories (replayed, or guided with a
            discarded text) keep the recorded log-probs.
        advantages: one item for each trajectory, in the format of ``old_logprobs``.
        returns: one item for each trajectory, in the format of ``old_logprobs``.
        keep_all: also keep rows that contain nothing to train on, which are those of trajectories with an invalid score
            and of segments without a sampled token. `from_verl` can then restore every group. Leave this off if the
            other loop computes baselines, because the rows of invalid trajectories have the score 0 there.

    Raises:
        UserError: a prompt is longer than ``max_prompt``, or a response is longer than ``max_response``.
        ValueError: an argument has the wrong length, an array does not fit its trajectory, or a segment starts with a
            sampled token.
    """
    rows: list[_Row] = []
    count = 0  # number of trajectories
    for number, group in enumerate(groups):
        for position, trajectory in enumerate(group.trajectories):
            replayed, guided = position >= len(group.fresh), trajectory.info.get("guided") == DISCARDED
            offset = 0
            for part, segment in enumerate(trajectory.segments):
                if not any(turn.tokens.size for turn in segment):
                    continue
                tokens, mask, behaviour = segment_arrays(segment)
                prompt = int(mask.argmax()) if mask.any() else tokens.size
                if keep_all or (trajectory.score.valid and mask.any()):
                    if mask[0]:
                        name = trajectory.id
                        raise ValueError(f"trajectory {name!r}: the first token of a segment cannot be sampled")
                    where = (number, count, part, offset)
                    rows.append(_Row(trajectory, replayed, guided, *where, tokens, mask, behaviour, prompt))
                offset += tokens.size
            count += 1
    given = {"old_log_probs": old_logprobs, "advantages": advantages, "returns": returns}
    for name, values in given.items():
        if values is not None and len(values) != count:
            raise ValueError(f"{name} has {len(values)} items for {count} trajectories")
    width = _width(rows, "prompt", [row.prompt for row in rows], max_prompt)
    longest = _width(rows, "response", [row.tokens.size - row.prompt for row in rows], max_response)

    shape = (len(rows), width + longest)
    whole = {name: np.zeros(shape, np.int64) for name in ("attention_mask", "loss_mask", "exp_mask")}
    whole["input_ids"] = np.full(shape, pad_token, np.int64)
    whole["turn_ids"], whole["versions"] = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    reals = {name: np.zeros(shape, np.float32) for name in ("recorded_old_log_probs", "token_level_rewards")}
    reals |= {name: np.zeros(shape, np.float32) for name, values in given.items() if values is not None}
    columns: dict[str, list[Any]] = {
        name: [] for name in ("group_ids", "trajectory_ids", "segment_ids", "scores", "valid")
    }
    names: dict[str, list[str]] = {name: [] for name in ("uid", "task_ids", "rollout_ids")}
    for line, row in enumerate(rows):
        score, turns = row.trajectory.score, row.trajectory.segments[row.part]
        start = width - row.prompt
        place = slice(start, start + row.tokens.size)
        sizes = [turn.tokens.size for turn in turns]
        whole["input_ids"][line, place] = row.tokens
        whole["attention_mask"][line, place] = 1
        whole["loss_mask"][line, place] = row.mask
        whole["exp_mask"][line, place] = row.mask & (row.replayed or row.guided)
        if row.guided:
            whole["exp_mask"][line, start:width] = 1
        whole["turn_ids"][line, place] = np.repeat(np.arange(len(turns)), sizes)
        whole["versions"][line, place] = np.repeat(np.array([turn.version for turn in turns], np.int64), sizes)
        reals["recorded_old_log_probs"][line, place] = row.behaviour
        if row.mask.any() and score.valid:
            reals["token_level_rewards"][line, start + row.mask.nonzero()[0][-1]] = score.value
        for name, values in given.items():
            if values is None:
                continue
            own = _select_tokens(name, values[row.index], row)
            keeps_recorded = name == "old_log_probs" and (row.replayed or row.guided)
            reals[name][line, place] = row.behaviour if keeps_recorded else own
        columns["group_ids"].append(row.group)
        columns["trajectory_ids"].append(row.index)
        columns["segment_ids"].append(row.part)
        columns["scores"].append(score.value if score.valid else 0.0)
        columns["valid"].append(score.valid)
        names["uid"].append(str(row.group))
        names["task_ids"].append(row.trajectory.task_id)
        names["rollout_ids"].append(row.trajectory.id)

    batch: dict[str, Array] = {
        **whole,
        "prompts": np.ascontiguousarray(whole["input_ids"][:, :width]),
        "responses": np.ascontiguousarray(whole["input_ids"][:, width:]),
        "position_ids": (whole["attention_mask"].cumsum(-1) - 1).clip(0),
        "response_mask": np.ascontiguousarray(whole["loss_mask"][:, width:]),
    }
    for name, table in reals.items():
        batch[name] = np.ascontiguousarray(table[:, width:])
    batch["rollout_log_probs"] = batch["recorded_old_log_probs"].copy()
    batch.setdefault("old_log_probs", batch["recorded_old_log_probs"].copy())
    for name, values in columns.items():
        batch[name] = np.array(values, np.float64 if name == "scores" else np.int64)
    for name, values in names.items():
        batch[name] = np.array(values, object)

    # A turn of the agent starts where a sampled token follows another turn. The response starts with the first one.
    turns, sampled = whole["turn_ids"][:, width:], batch["response_mask"] == 1
    follows = np.ones_like(sampled)
    follows[:, 1:] = turns[:, 1:] != turns[:, :-1]
    steps = (sampled & follows).cumsum(-1) - 1
    batch["step_ids"] = np.where(whole["attention_mask"][:, width:] == 1, steps, -1)
    return batch


def _width(rows: Sequence[_Row], what: str, sizes: Sequence[int], limit: int | None) -> int:
    longest = max(sizes, default=0)
    if limit is not None and longest > limit:
        name = rows[int(np.argmax(sizes))].trajectory.id
        raise UserError(
            f"trajectory {name!r} has a {what} of {longest} tokens, but max_{what} is {limit}; "
            f"raise max_{what} or leave the trajectory out"
        )
    return longest if limit is None else limit


def _select_tokens(name: str, value: float | Array, row: _Row) -> FloatArray:
    """Return the part of ``value`` for the tokens of ``row``: float32 [tokens of the row], 0 on tokens not sampled.

    ``value`` is one number for all tokens, or an array with one number for each token of the trajectory. ``name`` is
    the name of the argument for the error message.
    """
    values = np.asarray(value, np.float32)
    if values.ndim:
        total = row.trajectory.total_tokens
        if values.shape != (total,):
            raise ValueError(
                f"{name} of trajectory {row.trajectory.id!r} has shape {values.shape}, "
                f"but the trajectory has {total} tokens"
            )
        values = values[row.offset : row.offset + row.tokens.size]
    return np.where(row.mask, values, np.float32(0))


# --- a batch to groups ----------------------------------------------------------------------------
def from_verl(
    batch: Mapping[str, Any],
    tasks: Sequence[Task] | Mapping[int, Task],
    *,
    ids: Sequence[str] | None = None,
    prefix: str = "verl",
    decode: Callable[[list[int]], str] | None = None,
    version: int = 0,
) -> list[Group]:
    """Convert a batch of verl or AgentEvolver to groups. Token ids and log-probs are kept bit for bit.

    ``batch`` is a dictionary of numpy arrays or CPU tensors, or a TensorDict. Its rows may be in any order. It must
    have the keys ``responses``, ``input_ids``, ``attention_mask`` and ``group_ids``, one of the masks ``loss_mask`` and
    ``response_mask``, log-probs, and scores, with the shapes that `to_verl` describes. Unknown keys are ignored. The
    groups are read as follows:

    * A token was sampled if ``loss_mask`` is 1. ``response_mask`` is used only if there is no ``loss_mask``, because
      AgentEvolver's ``response_mask`` includes the environment's texts.
    * A row is replayed if ``exp_mask`` is 1 on a sampled token and 0 on the whole prompt. If it is 1 on the prompt too,
      the row was guided, and its text was discarded. Such a row becomes a fresh trajectory whose ``info["guided"]`` is
      "discard", which a pool does not admit.
    * The log-probs as sampled are ``recorded_old_log_probs`` for a replayed row. For other rows they are
      ``rollout_log_probs``, or ``old_log_probs`` if that key is missing.
    * The score of a row is ``scores``. Without this key, it is the row's sum of the first of ``token_level_scores``,
      ``rm_scores`` and ``token_level_rewards`` that the batch has. The score is invalid if ``valid`` is 0.
    * A new turn begins where ``turn_ids`` or the mask changes. Turns without tokens cannot be restored.
    * Rows with equal ``trajectory_ids`` are the segments of one trajectory, in the order of ``segment_ids``. Without
      these keys, each row is a trajectory.

    Args:
        batch: the batch to convert.
        tasks: the task of each group id. The group id also becomes `Group.ticket`, the number of the group.
        ids: for each row, the id of its trajectory (AgentEvolver's ``rollout_ids``). None: an id consists of
            ``prefix``, the id of the task and the number of the trajectory.
        prefix: beginning of the ids of trajectories if ``ids`` is None.
        decode: converts the token ids of a turn to its text. None: messages are empty. A sampled turn gets the role
            "assistant", and any other the role "user".
        version: version of the weights that sampled the batch; used if there is no key ``versions``.

    Raises:
        UserError: a key is missing, a shape or the padding is wrong, a group has no task, rows of one trajectory
            disagree or occur twice, or a sampled token has no log-prob. If all recorded log-probs of a replayed row are
            0, they count as missing.
    """
    table = _Table(batch)
    if ids is not None and len(ids) != table.rows:
        raise UserError(f"ids names {len(ids)} rows, but the batch has {table.rows}")
    heads = [table.read_head(row) for row in range(table.rows)]
    numbers = table.given.get("trajectory_ids", np.arange(table.rows))
    parts = table.given.get("segment_ids", np.arange(table.rows))
    order = sorted(range(table.rows), key=lambda row: (numbers[row], parts[row], row))
    fresh: dict[int, list[Trajectory]] = {}
    replayed: dict[int, list[Trajectory]] = {}
    for number, same in groupby(order, key=lambda row: int(numbers[row])):
        rows = list(same)
        # A row without a sampled token has no token on which exp_mask could say that it is replayed.
        sampled = [row for row in rows if table.has_sampled(row)] or rows
        head = heads[sampled[0]]
        expected = [head if row in sampled else head._replace(replayed=False) for row in rows]
        if len({int(parts[row]) for row in rows}) < len(rows):
            raise UserError(f"rows {rows} are the same segment of trajectory {number}; drop rows that are there twice")
        if [heads[row] for row in rows] != expected:
            raise UserError(f"rows {rows} share trajectory_ids {number}, but not their group_ids, exp_mask or score")
        known = head.group in tasks if isinstance(tasks, Mapping) else head.group < len(tasks)
        if head.group < 0 or not known:
            raise UserError(f"group_ids holds {head.group}, but tasks has no such item; give a task for each group id")
        task = tasks[head.group]
        trajectory = Trajectory(
            id=f"{prefix}/{task.id}/{number}" if ids is None else ids[rows[0]],
            task_id=task.id,
            segments=tuple(table.read_segment(row, head.replayed, decode, version) for row in rows),
            score=Score(head.score) if head.valid else Score.failed("marked invalid in the batch"),
            stop=StopReason.DONE,
            info={"guided": DISCARDED} if head.guided else {},
        )
        members = replayed if head.replayed else fresh
        members.setdefault(head.group, []).append(trajectory)
    groups: list[Group] = []
    for number in sorted({*fresh, *replayed}):
        own, stored = tuple(fresh.get(number, ())), tuple(replayed.get(number, ()))
        groups.append(Group(GroupSpec(tasks[number], len(own), stored), (*own, *stored), number))
    return groups


class _Head(NamedTuple):
    """The values that must be equal in all rows of one trajectory."""

    group: int
    replayed: bool
    guided: bool
    valid: bool
    score: float


class _Table:
    """The arrays of a batch. The constructor checks keys, shapes and padding, and the methods read single rows."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        keys = set(batch.keys())  # a TensorDict does not support `in`
        self.given: dict[str, Any] = {key: np.asarray(batch[key]) for key in _KNOWN if key in keys}
        for key in ("responses", "input_ids", "attention_mask", "group_ids"):
            self._need(key)
        responses, tokens = self.given["responses"], self.given["input_ids"]
        if responses.ndim != 2 or tokens.ndim != 2 or responses.shape[1] > tokens.shape[1]:
            raise UserError(f"responses {responses.shape} are no part of input_ids {tokens.shape}")
        self.rows, total = tokens.shape
        self._width = width = total - responses.shape[1]
        for key, value in self.given.items():
            want: tuple[int, ...] = (self.rows,)
            if key in _WHOLE:
                want = tokens.shape
            elif key in _RESPONSE:
                want = responses.shape
            if value.shape != want:
                raise UserError(
                    f"{key} has shape {value.shape}, but with these input_ids and responses it must be {want}"
                )
        if not np.array_equal(tokens[:, width:], responses):
            raise UserError("input_ids do not end with the responses")
        self._tokens, self._real = tokens, self.given["attention_mask"].astype(bool)  # both [N, P + R]
        if "loss_mask" in self.given:
            self._trained = self.given["loss_mask"].astype(bool)
        else:
            self._trained = np.zeros(tokens.shape, np.bool_)
            self._trained[:, width:] = self._need("response_mask").astype(bool)
        self._off_policy = self.given.get("exp_mask", np.zeros_like(tokens)).astype(bool)

        prompt, response = self._real[:, :width], self._real[:, width:]
        first_trained = self._trained.any(-1) & ~prompt.any(-1) & self._trained[:, width : width + 1].any(-1)
        unlike_prompt = (prompt[:, :-1] & ~prompt[:, 1:]).any(-1) | (prompt.any(-1) & ~prompt[:, -1:].any(-1))
        odd_token = (tokens < 0) | (tokens > np.iinfo(np.int32).max)
        problems = {
            "has no tokens": ~self._real.any(-1),
            "is trained outside its response": self._trained[:, :width].any(-1),
            "is trained on padding": (self._trained & ~self._real).any(-1),
            "is not padded on the left of its prompt": unlike_prompt,
            "is not padded on the right of its response": (~response[:, :-1] & response[:, 1:]).any(-1),
            "has no token before its first trained one": first_trained,
            "has a token id below 0 or above int32": (self._real & odd_token).any(-1),
        }
        for what, where in problems.items():
            if where.any():
                raise UserError(f"row {int(where.argmax())} of the batch {what}")

    def _need(self, *names: str) -> Array:
        """Return the array of the first key in ``names`` that the batch has. Raises `UserError` if it has none."""
        for name in names:
            if name in self.given:
                return self.given[name]
        raise UserError(f"the batch has no {' or '.join(names)}; it is needed to rebuild trajectories")

    def has_sampled(self, row: int) -> bool:
        return bool(self._trained[row].any())

    def read_head(self, row: int) -> _Head:
        off_policy = self._off_policy[row] & self._real[row]
        guided = bool(off_policy[: self._width].any())
        replayed = not guided and bool((off_policy & self._trained[row]).any())
        valid = "valid" not in self.given or bool(self.given["valid"][row])
        score = float(self._need(*_SCORES)[row].sum(dtype=np.float64)) if valid else 0.0
        if not np.isfinite(score):
            raise UserError(f"row {row} of the batch has a score of {score}; set its valid to 0 or leave it out")
        return _Head(int(self.given["group_ids"][row]), replayed, guided, valid, score)

    def read_segment(
        self, row: int, replayed: bool, decode: Callable[[list[int]], str] | None, version: int
    ) -> Segment:
        """Return the turns of a row, without its padding. A turn begins where the mask or ``turn_ids`` changes."""
        real, trained = self._real[row], self._trained[row]
        logprobs = np.zeros(trained.size, np.float32)
        if trained.any():
            names = ("recorded_old_log_probs",) if replayed else ("rollout_log_probs", "old_log_probs")
            logprobs[self._width :] = self._need(*names)[row]
            found = logprobs[trained]
            if not (np.isfinite(found) & (found <= ROUNDING)).all():
                raise UserError(f"row {row} of the batch: {' or '.join(names)} is no log-prob on a trained token")
            if replayed and not found.any():
                raise UserError(f"row {row} of the batch is replayed, but its recorded_old_log_probs are zeros")

        tokens, mask, logprobs = self._tokens[row][real], trained[real], logprobs[real]
        turn_ids = self.given["turn_ids"][row][real] if "turn_ids" in self.given else mask
        versions = self.given["versions"][row][real] if "versions" in self.given else np.full(tokens.size, version)
        edges = 1 + ((mask[1:] != mask[:-1]) | (turn_ids[1:] != turn_ids[:-1])).nonzero()[0]
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
