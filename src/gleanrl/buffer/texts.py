"""Texts of trajectories, by where they begin, and task descriptions, each kept once, by number."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence

from gleanrl.buffer.files import Files, write_all
from gleanrl.utils.errors import UserError


class Texts:
    """Two append-only files. What is written counts once a log record points to it.

    Args:
        files: where they are.
        name: of the texts; the task descriptions are in ``instructions``, a JSON string a line.
        writable: append; made if missing.
    """

    INSTRUCTIONS = "instructions.jsonl"

    def __init__(self, files: Files, name: str, *, writable: bool) -> None:
        self._files, self.names = files, (name, self.INSTRUCTIONS)
        there = files.names() if writable else ()
        opened = [files.create(n) if writable and n not in there else files.open(n) for n in self.names]
        self._texts, self._lines = opened
        self._end = os.fstat(self._texts).st_size
        self._known: list[str | None] = []  # None: the line is damaged
        self._read_to = 0
        self._lock = threading.Lock()  # of these two, which say together what the next line's number is
        self._more()
        if writable:
            os.ftruncate(self._lines, self._read_to)  # half a line of a crash
        self._number = {text: number for number, text in enumerate(self._known) if text is not None}
        self._pending, self._fresh = bytearray(), list[str]()
        self._last = ("", (0, 0))

    @property
    def nbytes(self) -> int:
        return self._end + self._read_to

    @property
    def instructed(self) -> bool:
        """Whether there is any task description."""
        return bool(self._known) or os.fstat(self._lines).st_size > 0

    def note(self, text: str) -> tuple[int, int]:
        """Where the text will begin, and its bytes. The same text as the last one is kept once."""
        if text != self._last[0]:
            data = text.encode()
            self._last = (text, (self._end + len(self._pending), len(data)))
            self._pending += data
        return self._last[1]

    def numbers(self, instructions: Sequence[str]) -> list[int]:
        for text in dict.fromkeys(instructions):
            if text not in self._number:
                self._number[text] = len(self._known) + len(self._fresh)
                self._fresh.append(text)
        return [self._number[text] for text in instructions]

    def commit(self) -> None:
        """Make what was noted durable. Raises `OSError`."""
        lines = "".join(json.dumps(text) + "\n" for text in self._fresh).encode()
        touched = set()
        for file, data, at in ((self._texts, bytes(self._pending), self._end), (self._lines, lines, self._read_to)):
            if data:
                write_all(file, memoryview(data), at)
                touched.add(file)
        self._files.sync(touched)
        self._end += len(self._pending)
        with self._lock:
            self._read_to += len(lines)
            self._known += self._fresh
        self._pending, self._fresh = bytearray(), []

    def forget(self) -> None:
        """Nothing was noted since the last commit."""
        for text in self._fresh:
            del self._number[text]
        self._pending, self._fresh, self._last = bytearray(), [], ("", (0, 0))

    def read(self, at: int, nbytes: int) -> str:
        return os.pread(self._texts, nbytes, at).decode(errors="replace")

    def instruction(self, number: int) -> str:
        """Raises `UserError` where its line is lost."""
        if number >= len(self._known):
            with self._lock:
                if number >= len(self._known):  # another thread may have read them meanwhile
                    self._more()
        text = self._known[number] if number < len(self._known) else None
        if text is None:
            raise UserError(f"{self._files.where(self.INSTRUCTIONS)}: line {number + 1} is damaged or missing")
        return text

    @property
    def end(self) -> int:
        """Bytes of the texts."""
        return self._end

    def copy(self, name: str, begin: int) -> None:
        """The texts from a place on, in a new file. Durable."""
        file = self._files.create(name)
        try:
            for at in range(begin, self._end, 1 << 22):
                data = os.pread(self._texts, min(1 << 22, self._end - at), at)
                write_all(file, memoryview(data), at - begin)
            self._files.sync([file])
        finally:
            os.close(file)

    def close(self) -> None:
        os.close(self._texts)
        os.close(self._lines)

    def _more(self) -> None:
        """Lines that another process appended."""
        data = os.pread(self._lines, os.fstat(self._lines).st_size - self._read_to, self._read_to)
        whole = data[: data.rfind(b"\n") + 1]
        self._known += [_parsed(line) for line in whole.split(b"\n")[:-1]]
        self._read_to += len(whole)


def _parsed(line: bytes) -> str | None:
    try:
        text = json.loads(line)
    except ValueError:
        return None
    return text if isinstance(text, str) else None
