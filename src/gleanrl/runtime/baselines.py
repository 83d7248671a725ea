"""Baselines on the evaluation tasks: a random policy as the lower one, the expert as the upper one."""

from __future__ import annotations

from collections.abc import Sequence

from gleanrl.protocols import Taskset
from gleanrl.runtime.evaluation import mean_interval
from gleanrl.types import Message, Task
from gleanrl.utils.errors import NoExpert
from gleanrl.utils.progress import Progress
from gleanrl.utils.seeding import derive

NOISE = {"expert": 0.0, "random": 1.0}
"""Share of random valid actions in a demonstration: none for the expert, all for the random policy."""


def baselines(
    taskset: Taskset, tasks: Sequence[Task], *, max_turns: int, seed: int, progress: Progress
) -> dict[str, float]:
    """Return each baseline's success rate within ``max_turns`` actions as ``eval/baseline/NAME``, with its interval.

    The result is empty if the environment has no expert. The random policy is left out where noise changes nothing
    (tasks with a single answer).
    """
    if not taskset.has_expert:
        return {}
    out: dict[str, float] = {}
    played: dict[str, list[tuple[Message, ...]]] = {}
    with progress.stage("baselines", len(NOISE) * len(tasks)) as stage:
        for name, noise in NOISE.items():
            rates = []
            for task in tasks:
                try:
                    conversation, score = taskset.demonstrate(task, seed=derive(seed, "baseline", task.id), noise=noise)
                except NoExpert:  # some tasks have no expert, so there is no figure for the whole
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
