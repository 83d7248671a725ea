"""Example rewards in all supported forms, which tests name by import path."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gleanrl.rewards import Request
from gleanrl.rewards.judge import Judge

JUDGE = Judge("http://localhost:1/v1", "m", votes=3, temperature=1.0)


def length(request: Request) -> int:
    return len(request.response)


async def length_async(request: Request) -> dict[str, float]:
    return {"score": len(request.response), "half": len(request.response) / 2}


class Scaled:
    """A reward class with state, and with post-processing that subtracts the best score of the group."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.calls, self.closed = scale, 0, False

    def compute_score(self, request: Request) -> float:
        self.calls += 1
        return self.scale * len(request.response)

    def post_process_scores(self, scores: list[Any]) -> list[float]:
        best = max((score.value for score in scores if score.valid), default=0.0)
        return [score.value - best for score in scores]

    def close(self) -> None:
        self.closed = True


class RewardAgent:
    """A reward class in the form of verl, which replaces a missing score by the mean of the group."""

    def compute_score(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> tuple[float, str, str]:
        return float(solution_str == ground_truth), f"Is it {solution_str}?", f"{data_source}, {extra_info['index']}"

    def post_process_scores(self, scores: list[float | None]) -> list[float]:
        known = [score for score in scores if score is not None]
        return [10 + (sum(known) / len(known) if score is None else score) for score in scores]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    """A reward function in the form of verl. ``data_source`` selects the type of the return value."""
    right = solution_str == ground_truth
    return {"float": float(right), "dict": {"score": right, "acc": right, "pred": solution_str}}.get(data_source)


def exact_match(prompts: Any, completions: Any, answer: list[str], **columns: Any) -> list[float | None]:
    """A reward function in the form of TRL, for conversations. None where the task has no answer."""
    assert prompts[0][-1]["role"] == "user"
    texts = [completion[-1]["content"] for completion in completions]
    return [None if a is None else float(t == a) for t, a in zip(texts, answer, strict=True)]


def longest(prompts: Any, completions: Any, word: list[str], **columns: Any) -> list[float | None]:
    """A reward function in the form of TRL that compares the completions. None for one that is empty."""
    sizes = [len(completion[-1]["content"]) for completion in completions]
    assert len(prompts) == len(word) == len(sizes)
    return [float(size == max(sizes)) if size else None for size in sizes]


async def exact_match_async(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [float(len(completions[0]))]


def troublesome(request: Request) -> Any:
    """Hangs, dies, raises or returns its process id if the response says so; otherwise scores the response's length."""
    match request.response:
        case "hang":
            time.sleep(600)
        case "spawn and hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(request.task.payload["pids"]).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "timeout":
            raise TimeoutError("too slow")
        case "refused":
            raise ConnectionRefusedError("nobody is there")
        case "reset":
            raise ConnectionResetError("it went away")
        case "raise":
            raise KeyError("missing")
        case "pid":
            return os.getpid()
    return len(request.response)
