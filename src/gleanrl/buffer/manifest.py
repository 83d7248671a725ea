"""The manifest: which log is the log, and what is kept of it. Replaced as a whole: a reader never sees half of one."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import ClassVar

from gleanrl.buffer.files import Files
from gleanrl.utils.errors import UserError

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """``epoch``: number before the names of the files. ``base``: id of the log's first record. ``first``: the oldest id
    that is kept. ``rows``, ``finals``: of each schema, the first that is kept. ``known``: the log has had
    all records below this id, when a segment was begun last or the buffer was closed. ``end``: of a checkpoint, the
    id at which it ends, whatever its files hold behind that."""

    NAME: ClassVar[str] = "buffer.json"

    format: int = FORMAT
    epoch: int = 0
    log: str = "log-000000"
    texts: str = "texts-000000"
    base: int = 0
    first: int = 0
    rows: tuple[int, ...] = ()
    finals: tuple[int, ...] = ()
    known: int = 0
    end: int | None = None

    @classmethod
    def read(cls, files: Files) -> Manifest | None:
        """None where there is none yet. Raises `UserError` where it is not ours."""
        try:
            file = files.open(cls.NAME)
        except FileNotFoundError:
            return None
        try:
            return cls.parsed(file, files.where(cls.NAME))
        finally:
            os.close(file)

    @classmethod
    def parsed(cls, file: int, where: str) -> Manifest:
        """Of an open file. Raises `UserError` where it is not ours."""
        try:
            told = json.loads(os.pread(file, os.fstat(file).st_size, 0))
            made = cls(**{**told, "rows": tuple(told["rows"]), "finals": tuple(told["finals"])})
            if not made._makes_sense():
                raise ValueError("a value of another type")
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{where}: no manifest of a buffer, or a damaged one ({error})") from None
        if made.format != FORMAT:
            raise UserError(f"{where}: a buffer of format {made.format}; this version reads {FORMAT}")
        return made

    def _makes_sense(self) -> bool:
        numbers = [self.format, self.epoch, self.base, self.first, self.known, self.end or 0]
        numbers += [*self.rows, *self.finals]
        return all(type(number) is int and number >= 0 for number in numbers) and all(
            isinstance(name, str) for name in (self.log, self.texts)
        )

    def write(self, files: Files) -> None:
        files.replace(self.NAME, self.text().encode())

    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def prefix(self) -> str:
        return f"{self.epoch:03d}-"

    def kept(self, table: int) -> tuple[int, int]:
        """The first row and the first final observation that are kept."""
        if table >= len(self.rows):
            return 0, 0
        return self.rows[table], self.finals[table]


class Watched:
    """The manifest that another process replaces: read again only when it did.

    The file stays open, so that no other one can be taken for it.
    """

    def __init__(self, files: Files) -> None:
        self._files, self._file = files, -1
        self._last: Manifest | None = None

    def read(self) -> Manifest | None:
        """As `Manifest.read`."""
        if self._file < 0 or not self._files.is_still(Manifest.NAME, self._file):
            self.close()
            try:
                self._file = self._files.open(Manifest.NAME)
            except FileNotFoundError:
                return None
            try:
                self._last = Manifest.parsed(self._file, self._files.where(Manifest.NAME))
            except UserError:
                self.close()
                raise
        return self._last

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
