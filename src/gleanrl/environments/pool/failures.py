"""How an episode can fail for its environment's sake. Each costs one trajectory (or a worker's), never the run."""

from __future__ import annotations

import traceback


class EnvironmentFailure(Exception):
    """An episode that its environment could not go on with. ``task_id`` names its task."""

    def __init__(self, task_id: str, message: str) -> None:
        super().__init__(f"task {task_id!r}: {message}")
        self.task_id = task_id


class EnvironmentTimeout(EnvironmentFailure, TimeoutError):
    """A reset, step or close took longer than the pool's ``timeout_s``."""


class EnvironmentDied(EnvironmentFailure):
    """The worker process that held the episode is gone: it crashed, was killed, or hung on another episode."""


class EnvironmentRaised(EnvironmentFailure):
    """The environment's own code raised.

    ``kind`` is the exception's type name, ``detail`` its message, ``traceback_text`` where it was raised: all
    text, because the exception itself may live in another process and need not be picklable.
    """

    def __init__(self, task_id: str, kind: str, detail: str, traceback_text: str) -> None:
        super().__init__(task_id, f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail
        self.traceback_text = traceback_text


def described(error: BaseException) -> tuple[str, str, str]:
    """``kind, detail, traceback_text`` of an exception."""
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))
