"""Writes the folder of an evaluation, which `gleanrl evaluate` leaves.

It has the files of a run folder: config.toml, metrics.jsonl with one step, the attempts as the rollout file of that
step, and the tokenizer. So whatever reads runs reads evaluations too. Two files are added: evaluation.json holds the
metrics and every score, and transcripts.txt the attempts as text.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import gleanrl
from gleanrl.rollout.conversation import transcript
from gleanrl.runtime.evaluation import Evaluation, EvaluationResult
from gleanrl.runtime.failures import record_failures
from gleanrl.runtime.records import RolloutRecord, write_rollouts
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.types import Trajectory
from gleanrl.utils import atomic
from gleanrl.utils.settings import JobConfig


def write_evaluation(path: Path, config: JobConfig, evaluated: str, step: int, result: EvaluationResult) -> None:
    """Write the folder ``path``, which is complete or absent.

    Args:
        evaluated: what was evaluated, for people to read, such as the path of a checkpoint.
        step: number of steps that the evaluated policy was trained for.

    Raises:
        UserError: the disk is full.
    """
    metrics = {name: value if math.isfinite(value) else None for name, value in result.metrics.items()}
    attempts = result.attempts
    summary: dict[str, Any] = {
        "evaluated": evaluated,
        "step": step,
        "gleanrl": gleanrl.__version__,
        "metrics": metrics,
        "tasks": [],
    }
    with atomic.directory(path) as partial:
        folder = RunFolder(partial)
        folder.config_path.write_text(config.to_toml(), encoding="utf-8")
        line = {"step": step, "time": round(time.time(), 3), **metrics}
        folder.metrics_path.write_text(json.dumps(line) + "\n", encoding="utf-8")
        if attempts is not None:
            summary |= {"success_threshold": attempts.success_threshold, "tasks": _describe_tasks(attempts)}
            records, texts = [], []
            for number, task in enumerate(attempts.tasks):
                for trajectory in _attempts_at(attempts, number):
                    records.append(RolloutRecord(step, number, False, None, trajectory))
                    texts.append(f"{trajectory.id}\n{transcript(trajectory, task)}")
            write_rollouts(folder.rollout_path(step), records)
            record_failures(folder, "evaluation", step, attempts.attempts())
            # Texts of environments may hold lone surrogates, which UTF-8 cannot encode. They are written as ``\udcff``.
            data = f"\n{'=' * 80}\n".join(texts).encode("utf-8", "backslashreplace")
            (partial / "transcripts.txt").write_bytes(data)
        if result.tokenizer is not None:
            result.tokenizer.save_pretrained(folder.tokenizer_path)
        folder.evaluation_path.write_text(json.dumps(summary, indent=1, default=str), encoding="utf-8")


def _attempts_at(attempts: Evaluation, number: int) -> list[Trajectory]:
    """Return the sampled attempts at a task, followed by the greedy one if there is one."""
    return [*attempts.sampled[number], *attempts.greedy[number : number + 1]]


def _describe_tasks(attempts: Evaluation) -> list[dict[str, Any]]:
    """Return every task with its payload and the results of its attempts, as JSON values."""
    tasks = []
    for number, task in enumerate(attempts.tasks):
        results = []
        for place, trajectory in enumerate(_attempts_at(attempts, number)):
            score = trajectory.score
            results.append(
                {
                    "id": trajectory.id,
                    "greedy": place == len(attempts.sampled[number]),
                    "score": score.value if score.valid else None,
                    "solved": score.reaches(attempts.success_threshold),
                    "parts": {name: part if math.isfinite(part) else None for name, part in score.parts.items()},
                    "explanation": score.explanation,
                    "stop": trajectory.stop.value,
                    "turns": trajectory.info.get("turns"),
                    "sampled_tokens": trajectory.sampled_tokens,
                }
            )
        tasks.append({"id": task.id, "kind": task.kind, "payload": dict(task.payload), "attempts": results})
    return tasks
