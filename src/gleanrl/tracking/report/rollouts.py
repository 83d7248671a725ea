"""Selects trajectories for the page, spread over the run, with the text of every token if there is a tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.rollout.conversation import readable
from gleanrl.runtime.records import RolloutRecord
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.report.gantt import spread
from gleanrl.types import Trajectory, Turn

log = logging.getLogger(__name__)

MAX_STEPS = 16
GROUPS_PER_STEP = 6
MAX_BYTES = 2_500_000
"""Size limit of all trajectories in the page, as JSON."""


def sample_rollouts(folder: RunFolder, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return whole groups of evenly spaced steps, up to ``limit`` bytes.

    The result is ``{"trajectories": [...], "tokens": {id: text}, "steps": with rollouts, "total": records seen}``.
    A turn is ``{"role", "text", "ids", "logprobs" or None, "version"}``.
    """
    every = folder.rollout_steps()
    by_step = [_groups(folder.read_rollouts(step)) for step in spread(every, MAX_STEPS)]
    taken: list[dict[str, Any]] = []
    size = 0
    for group in _interleaved(by_step):
        cost = len(json.dumps(group))
        if size + cost > limit:
            break
        taken += group
        size += cost
    taken.sort(key=lambda t: (t["step"], t["ticket"], t["id"]))
    ids = {i for t in taken for segment in t["segments"] for turn in segment for i in turn["ids"]}
    return {"trajectories": taken, "tokens": token_texts(folder.tokenizer_path, ids), "steps": len(every)}


def _groups(records: Iterable[RolloutRecord]) -> list[list[dict[str, Any]]]:
    """Return the first groups of a step, by ticket."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        if record.ticket in groups or len(groups) < GROUPS_PER_STEP:
            groups.setdefault(record.ticket, []).append(_shown(record))
    return list(groups.values())


def _interleaved(by_step: list[list[Any]]) -> Iterator[Any]:
    """Yield the first group of every step, then the second of every step, ..."""
    for layer in zip_longest(*by_step):
        yield from (group for group in layer if group is not None)


def _shown(record: RolloutRecord) -> dict[str, Any]:
    trajectory = record.trajectory
    return {
        "step": record.step,
        "ticket": record.ticket,
        "id": trajectory.id,
        "task": trajectory.task_id,
        "outcome": _outcome(trajectory),
        "score": trajectory.score.value if trajectory.score.valid else None,
        "explanation": trajectory.score.explanation,
        "advantage": None if record.advantage is None else round(record.advantage, 4),
        "replayed": record.replayed,
        "stop": trajectory.stop.value,
        "version": trajectory.version,
        "sampled": trajectory.sampled_tokens,
        "segments": [[_turn(turn) for turn in segment] for segment in trajectory.segments],
    }


def _outcome(trajectory: Trajectory) -> str:
    if not trajectory.score.valid:
        return "invalid"
    return "solved" if trajectory.score.solved else "failed"


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "role": turn.message["role"],
        "text": readable(turn.message),
        "ids": turn.tokens.tolist(),
        "logprobs": None if turn.logprobs is None else [_rounded(value) for value in turn.logprobs],
        "version": turn.version,
    }


def _rounded(value: np.float32) -> float | None:
    return round(float(value), 3) if np.isfinite(value) else None


def token_texts(tokenizer: Path, ids: Iterable[int]) -> dict[int, str]:
    """Return the text of each token id inside a sentence; empty without a readable ``tokenizer.json``.

    The token is decoded twice in a row and the first text removed, because many decoders drop the space
    before the first token of a text.
    """
    path = tokenizer / "tokenizer.json"
    if not path.exists():
        return {}
    from tokenizers import Tokenizer  # here, because a run without one does not need it

    try:
        decoder = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a damaged file
        log.warning("%s cannot be read (%s); the report shows messages without their tokens", path, error)
        return {}
    texts = {}
    for index in sorted(set(ids)):
        alone = decoder.decode([index], skip_special_tokens=False)
        twice = decoder.decode([index, index], skip_special_tokens=False)
        texts[index] = twice[len(alone) :]
    return texts
