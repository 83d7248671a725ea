"""The manifest: which files of a folder make up the buffer, and what is kept of them.

It is replaced atomically, so a reader never sees half of a change.
"""

from __future__ import annotations

import os
from typing import Annotated, ClassVar

import msgspec

from gleanrl.buffer.files import Files
from gleanrl.utils.errors import UserError

FORMAT = 1
Count = Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What counts in a buffer's folder."""

    NAME: ClassVar[str] = "buffer.json"

    format: Count = FORMAT
    epoch: Count = 0  # number at the start of the files' names
    log: str = "log-000000"
    texts: str = "texts-000000"
    base: Count = 0  # id of the log's first record
    first: Count = 0  # oldest id that is kept
    rows: tuple[Count, ...]  # first row that is kept, of each schema
    finals: tuple[Count, ...]  # first final observation that is kept, of each schema
    known: Count = 0  # the log has had all records below this id
    end: Count | None = None  # of a checkpoint: the first id that no longer belongs to it, whatever its files hold

    @classmethod
    def read(cls, files: Files) -> Manifest | None:
        """Return the folder's manifest, or None. Raises `UserError` where it is damaged."""
        try:
            file = files.open(cls.NAME)
        except FileNotFoundError:
            return None
        try:
            return cls.parse(file, files.where(cls.NAME))
        finally:
            os.close(file)

    @classmethod
    def parse(cls, file: int, where: str) -> Manifest:
        """Decode an open file. Raises `UserError` where it is no manifest."""
        try:
            found = msgspec.json.decode(os.pread(file, os.fstat(file).st_size, 0), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: no manifest of a buffer, or a damaged one ({error})") from None
        if found.format != FORMAT:
            raise UserError(f"{where}: a buffer of format {found.format}; this version reads {FORMAT}")
        return found

    def write(self, files: Files) -> None:
        files.replace(self.NAME, self.to_json())

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def replace(self, **changes: object) -> Manifest:
        """Return a copy with other values."""
        return msgspec.structs.replace(self, **changes)

    @property
    def prefix(self) -> str:
        """Start of the names of the buffer's files."""
        return f"{self.epoch:03d}-"

    def kept(self, table: int) -> tuple[int, int]:
        """Return the first row and the first final observation of a table that are kept."""
        if table >= len(self.rows):
            return 0, 0
        return self.rows[table], self.finals[table]


class ManifestWatcher:
    """Reads a manifest that another process replaces, and decodes it only after it was replaced.

    The file stays open, so that the system cannot give its inode to another one.
    """

    def __init__(self, files: Files) -> None:
        self._files, self._file = files, -1
        self._last: Manifest | None = None

    def read(self) -> Manifest | None:
        """See `Manifest.read`."""
        if self._file < 0 or not self._files.still_named(Manifest.NAME, self._file):
            self.close()
            try:
                self._file = self._files.open(Manifest.NAME)
            except FileNotFoundError:
                return None
            try:
                self._last = Manifest.parse(self._file, self._files.where(Manifest.NAME))
            except UserError:
                self.close()
                raise
        return self._last

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
