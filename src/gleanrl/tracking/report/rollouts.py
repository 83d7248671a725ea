"""Selects trajectories from all parts of a run for the report's page.

The page also shows the text of each token if the run folder contains a tokenizer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.rollout.conversation import last_observation, readable
from gleanrl.runtime.records import RolloutRecord
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.report.gantt import spread
from gleanrl.types import SUCCESS

log = logging.getLogger(__name__)

MAX_STEPS = 16
GROUPS_PER_STEP = 6
MAX_BYTES = 2_500_000
"""Maximum size of all trajectories in the page together, in bytes of JSON."""


def sample_rollouts(
    folder: RunFolder, limit: int = MAX_BYTES, *, groups_per_step: int = GROUPS_PER_STEP
) -> dict[str, Any]:
    """Return the first complete groups of evenly spaced steps, up to ``limit`` bytes of JSON.

    The result is ``{"trajectories", "tokens", "steps"}``: the trajectories as `convert_record` returns them, the text
    of each token id in them, and the number of steps that have rollout files.
    """
    every = folder.rollout_steps()
    threshold = folder.read_config().get("reward", {}).get("success_threshold", SUCCESS)
    by_step = []
    for step in spread(every, MAX_STEPS):
        # group number (ticket) -> the group's trajectories; only the first groups of the step
        groups: dict[int, list[dict[str, Any]]] = {}
        for record in folder.read_rollouts(step):
            if record.ticket in groups or len(groups) < groups_per_step:
                groups.setdefault(record.ticket, []).append(convert_record(record, threshold))
        by_step.append(groups.values())
    taken: list[dict[str, Any]] = []
    size = 0
    # Take the first group of every step, then the second of every step and so on, so that all steps are represented if
    # the limit is reached.
    for group in (group for layer in zip_longest(*by_step) for group in layer if group is not None):
        size += len(json.dumps(group))
        if size > limit:
            break
        taken += group
    taken.sort(key=lambda t: (t["step"], t["ticket"], t["id"]))
    ids = {i for t in taken for segment in t["segments"] for turn in segment for i in turn["ids"]}
    return {"trajectories": taken, "tokens": _decode_tokens(folder.tokenizer_path, ids), "steps": len(every)}


def convert_record(record: RolloutRecord, success_threshold: float = SUCCESS) -> dict[str, Any]:
    """Return a trajectory of the rollout files as JSON values for the page.

    The entry "segments" has a list of turns for each segment (see `gleanrl.types.Segment`). A turn is
    ``{"role", "text", "ids", "logprobs", "version", "reward"}``; ``logprobs`` is None if the turn was not sampled.
    """
    trajectory, score = record.trajectory, record.trajectory.score
    segments = []
    for segment in trajectory.segments:
        turns = []
        for turn in segment:
            logprobs = None
            if turn.logprobs is not None:
                logprobs = [round(float(value), 3) if np.isfinite(value) else None for value in turn.logprobs]
            turns.append(
                {
                    "role": turn.message["role"],
                    "text": readable(turn.message),
                    "ids": turn.tokens.tolist(),
                    "logprobs": logprobs,
                    "version": turn.version,
                    "reward": turn.reward,
                }
            )
        segments.append(turns)
    if not score.valid:
        outcome = "invalid"
    else:
        outcome = "solved" if score.reaches(success_threshold) else "failed"
    return {
        "step": record.step,
        "ticket": record.ticket,
        "id": trajectory.id,
        "task": trajectory.task_id,
        "outcome": outcome,
        "score": score.value if score.valid else None,
        "parts": dict(score.parts),
        "explanation": score.explanation,
        "last": last_observation(trajectory),
        "advantage": None if record.advantage is None else round(record.advantage, 4),
        "replayed": record.replayed,
        "stop": trajectory.stop.value,
        "version": trajectory.version,
        "sampled": trajectory.sampled_tokens,
        "segments": segments,
    }


def _decode_tokens(tokenizer: Path, ids: Iterable[int]) -> dict[int, str]:
    """Return the text of each token id as it appears inside a sentence, with a space before it if it has one.

    Many decoders drop the space before the first token of a text. So the token is decoded twice in a row, and the text
    of the first is removed. The result is empty if the folder has no readable ``tokenizer.json``.
    """
    path = tokenizer / "tokenizer.json"
    if not path.exists():
        return {}
    from tokenizers import Tokenizer  # only runs with a tokenizer need this package

    try:
        decoder = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises an error of the class Exception for a damaged file
        log.warning("%s cannot be read (%s); the report shows messages without their tokens", path, error)
        return {}
    texts = {}
    for index in sorted(set(ids)):
        alone = decoder.decode([index], skip_special_tokens=False)
        twice = decoder.decode([index, index], skip_special_tokens=False)
        texts[index] = twice[len(alone) :]
    return texts
