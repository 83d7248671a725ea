"""The tensor dictionary of verl and AgentEvolver as it is read: every array checked before a row is believed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gleanrl.experience.pool.admission import ROUNDING
from gleanrl.types import BoolArray, Segment, Turn
from gleanrl.utils.errors import UserError

Array = npt.NDArray[Any]

_SCORES = ("scores", "token_level_scores", "rm_scores", "token_level_rewards")
_WHOLE = frozenset({"input_ids", "attention_mask", "loss_mask", "exp_mask", "turn_ids", "versions"})
_RESPONSE = frozenset(
    {"responses", "response_mask", "recorded_old_log_probs", "rollout_log_probs", "old_log_probs", *_SCORES[1:]}
)
_KNOWN = _WHOLE | _RESPONSE | {"group_ids", "trajectory_ids", "segment_ids", "scores", "valid"}


class Head(NamedTuple):
    """What the rows of one trajectory agree on."""

    group: int
    replayed: bool
    guided: bool
    valid: bool
    score: float


class Table:
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

    def head(self, row: int) -> Head:
        off = (self.off & self.real)[row]
        guided = bool(off[: self.width].any())
        valid = "valid" not in self._given or bool(self._given["valid"][row])
        score = float(self._need(*_SCORES)[row].sum(dtype=np.float64)) if valid else 0.0
        if not np.isfinite(score):
            raise UserError(f"row {row} of the batch has a score of {score}; set its valid to 0 or leave it out")
        replayed = not guided and bool((off & self.trained[row]).any())
        return Head(int(self._given["group_ids"][row]), replayed, guided, valid, score)

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
