"""What to compare with: a random policy below, the expert above, on the tasks of the evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from gleanrl.protocols import Demonstrator, Taskset
from gleanrl.runtime.evaluation import mean_interval
from gleanrl.types import Message, Task
from gleanrl.utils.errors import NoExpert
from gleanrl.utils.progress import Progress
from gleanrl.utils.seeding import derive

NOISE = {"expert": 0.0, "random": 1.0}
"""A demonstration is the expert's without noise, and a walk through random valid actions with nothing but noise."""


def baselines(
    taskset: Taskset, tasks: Sequence[Task], *, max_turns: int, seed: int, progress: Progress
) -> dict[str, float]:
    """Success within ``max_turns`` actions as ``eval/baseline/NAME`` with its interval.

    Nothing without an expert, and no random policy where noise changes nothing (a task of a single answer).
    """
    if not isinstance(taskset, Demonstrator):
        return {}
    out: dict[str, float] = {}
    played: dict[str, list[tuple[Message, ...]]] = {}
    with progress.stage("baselines", len(NOISE) * len(tasks)) as stage:
        for name, noise in NOISE.items():
            rates = []
            for task in tasks:
                try:
                    conversation, score = taskset.demonstrate(task, seed=derive(seed, "baseline", task.id), noise=noise)
                except NoExpert:  # of some tasks only: there is no figure for the whole
                    return {}
                played.setdefault(name, []).append(conversation)
                actions = sum(message["role"] == "assistant" for message in conversation)
                rates.append(float(score.solved and actions <= max_turns))
                stage.advance()
            if name == "expert" or played[name] != played["expert"]:
                mean, low, high = mean_interval(rates)
                key = f"eval/baseline/{name}"
                out |= {key: mean, f"{key}_low": low, f"{key}_high": high}
    return out
