"""A trajectory as plain text, to read in a terminal or a log."""

from __future__ import annotations

import numpy as np

from gleanrl.rollout.conversation import readable
from gleanrl.types import Trajectory, Turn


def transcript(trajectory: Trajectory) -> str:
    """Return the conversation as text. Sampled text is marked by ``>`` and followed by the model's confidence."""
    score = f"{trajectory.score.value:g}" if trajectory.score.valid else "invalid"
    head = f"task {trajectory.task_id}: score {score}, ended {trajectory.stop}, sampled by version {trajectory.version}"
    lines = [head]
    if trajectory.score.explanation:
        lines.append(f"({trajectory.score.explanation})")
    for index, segment in enumerate(trajectory.segments):
        if index:
            lines.append("--- the context was rewritten here ---")
        lines += [_turn(turn) for turn in segment]
    return "\n".join(lines) + "\n"


def _turn(turn: Turn) -> str:
    text = readable(turn.message).strip()
    if turn.logprobs is None:
        return f"\n[{turn.message['role']}]\n{text}"
    sure = f", mean log-prob {float(np.mean(turn.logprobs)):.2f}" if turn.logprobs.size else ""
    return f"\n> {text}\n  ({turn.tokens.size} tokens{sure})"
