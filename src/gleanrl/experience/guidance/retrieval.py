"""Retrievers for guidance: they store past successes as texts, and find texts about tasks similar to a given one.

`Retriever` is the interface, and `Bm25Retriever` the default. Tasks are compared by their *opening*: all messages of an
episode before its first sampled turn.
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gleanrl.protocols import Metrics
from gleanrl.rollout.conversation import conversation, opening_turns, readable
from gleanrl.rollout.thinking import answer_of
from gleanrl.types import Message, Task, Trajectory
from gleanrl.utils.bm25 import Bm25
from gleanrl.utils.errors import UserError

log = logging.getLogger(__name__)

OBSERVATION_CHARS = 200  # characters kept of each observation in a compact transcript


class Retriever(ABC):
    """Stores past successes, and finds texts about those whose tasks are similar to a given task.

    If `add` or `retrieve` raises, the run counts the failure and continues. If `retrieve` raises, the group is played
    without guidance.
    """

    @abstractmethod
    def add(self, task: Task, trajectory: Trajectory) -> None:
        """Store a successful trajectory. This must not block; slow work must continue in the background."""

    @abstractmethod
    async def retrieve(self, task: Task, k: int) -> list[str]:
        """Return at most ``k`` texts, the most useful first.

        ``task.prompt`` contains all messages before the episode's first sampled turn, also those of the environment.
        """

    def mark(self) -> int:
        """Return a number that identifies the present state. A checkpoint stores it, and `rewind` gets it on resume."""
        return 0

    def rewind(self, mark: int) -> None:  # noqa: B027 - a retriever may keep nothing
        """Forget the successes that were added after `mark` returned the number ``mark``."""

    def metrics(self) -> Metrics:
        """Return metrics of the step that has ended."""
        return {}

    async def close(self) -> None:  # noqa: B027 - a retriever may hold nothing open
        """Release resources. Called once, at the end of the run."""


# --- a success as text ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ExperienceText:
    """A success as text: the retriever searches by ``prompt``, and guidance inserts ``text`` into later episodes."""

    task_id: str
    prompt: str
    text: str


Summarise = Callable[[Task, Trajectory], str]


def experience_text(
    task: Task, trajectory: Trajectory, *, max_chars: int = 1500, summarise: Summarise | None = None
) -> ExperienceText:
    """Convert a successful trajectory to an `ExperienceText`.

    Its text is what ``summarise`` returns or, if that is None, the opening of the episode and a transcript (`compact`).
    A text longer than ``max_chars`` characters is cut off.
    """
    messages = conversation(trajectory)
    prompt = description(messages[: len(opening_turns(trajectory))]) or description(task.prompt)
    text = summarise(task, trajectory) if summarise else f"{prompt}\n{compact(trajectory)}"
    return ExperienceText(task.id, prompt, text if len(text) <= max_chars else text[: max_chars - 3].rstrip() + "...")


def description(messages: Sequence[Message]) -> str:
    """Return the text by which a retriever searches: the joined contents of all messages except system messages."""
    return "\n".join(message["content"].strip() for message in messages if message["role"] != "system")


def compact(trajectory: Trajectory) -> str:
    """Return a transcript of the episode after its opening, with one line for each action and each observation.

    Lines with an action begin with ``>``. The model's thinking is left out, and long observations are cut off.
    """
    lines = []
    for message in conversation(trajectory)[len(opening_turns(trajectory)) :]:
        own = message["role"] == "assistant"
        content = " ".join((answer_of(readable(message)) if own else readable(message)).split())
        lines.append(f"> {content}" if own else content[:OBSERVATION_CHARS])
    return "\n".join(lines)


# --- the default retriever ------------------------------------------------------------------------
class Bm25Retriever(Retriever):
    """Stores the newest success of each task, and ranks them by the BM25 similarity of the tasks' openings.

    Args:
        path: a JSONL file to which each success is appended. Successes that it contains already are loaded. None:
            successes are kept in memory only, and `rewind` forgets all of them.
        same_task: whether the search for a task may also find the success on this task itself.
        summarise: returns the text about a success, in place of the default of `experience_text`.
        max_chars: largest length of a text, in characters.

    Raises:
        UserError: the file contains a line that this class has not written.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        same_task: bool = False,
        summarise: Summarise | None = None,
        max_chars: int = 1500,
    ) -> None:
        self._path, self._same_task = path, same_task
        self._summarise, self._max_chars = summarise, max_chars
        if path is not None:
            path.touch()
        self._read(0 if path is None else path.stat().st_size)

    def __len__(self) -> int:
        return len(self._found)

    def metrics(self) -> Metrics:
        return {"experiences": float(len(self))}

    def add(self, task: Task, trajectory: Trajectory) -> None:
        found = experience_text(task, trajectory, max_chars=self._max_chars, summarise=self._summarise)
        if not self._store(found) or self._path is None:
            return
        with self._path.open("ab") as file:
            file.write(json.dumps([found.task_id, found.prompt, found.text]).encode() + b"\n")

    async def retrieve(self, task: Task, k: int) -> list[str]:
        own = self._numbers.get(task.id)
        without = () if self._same_task or own is None else (own,)
        return [self._found[number].text for number, _ in self._index.search(description(task.prompt), k, without)]

    def mark(self) -> int:
        """Write the file to the disk (fsync) and return its size in bytes; 0 without a file."""
        if self._path is None:
            return 0
        with self._path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def rewind(self, mark: int) -> None:
        """Truncate the file to ``mark`` bytes, and forget the successes that were added after it had that size.

        Raises `UserError` if the file is shorter than ``mark``, so that successes are missing.
        """
        size = 0 if self._path is None else self._path.stat().st_size
        if size < mark:
            raise UserError(f"{self._path} has {size} bytes but the checkpoint was made at {mark}: restore the file")
        self._read(mark)

    def _read(self, end: int) -> None:
        """Load the first ``end`` bytes of the file into a new index, and truncate the file after them.

        If a crash has left an incomplete last line, that line is removed too.
        """
        self._index = Bm25()
        self._found: list[ExperienceText] = []
        self._numbers: dict[str, int] = {}  # task id -> number of its text, in ``_found`` and in the index
        if self._path is None:
            return
        with self._path.open("r+b") as file:
            whole = 0
            while whole < end and (line := file.readline()).endswith(b"\n") and whole + len(line) <= end:
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if not isinstance(record, list) or len(record) != 3 or not all(isinstance(x, str) for x in record):
                    raise UserError(f"{self._path} is no file of experiences: a line is not [task, prompt, text]")
                self._store(ExperienceText(*record))
                whole += len(line)
            if whole < end:
                log.warning("%s: its last line is torn and left out", self._path)
            file.truncate(whole)

    def _store(self, found: ExperienceText) -> bool:
        """Add the text of a task, or replace its earlier one. Returns False if it had the same one already."""
        number = self._numbers.get(found.task_id)
        if number is None:
            self._numbers[found.task_id] = self._index.add(found.prompt)
            self._found.append(found)
            return True
        before, self._found[number] = self._found[number], found
        self._index.replace(number, before.prompt, found.prompt)
        return before != found
