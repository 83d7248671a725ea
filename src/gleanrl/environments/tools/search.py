"""The tool ``search``, with which a model searches a local corpus by keywords (BM25)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from gleanrl.environments.tools.rows import read_rows
from gleanrl.utils import atomic
from gleanrl.utils.bm25 import Bm25
from gleanrl.utils.cache import cache_dir
from gleanrl.utils.errors import UserError
from gleanrl.utils.fingerprint import fingerprint

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    title: str
    text: str


class SearchTool:
    """The tool ``search(query, k)``.

    Args:
        corpus: a JSONL or parquet file with one document per row.
        text, title, id: names of the file's columns. A document without an id gets its row number, from 0, as its id.
        k: number of results if the model does not give a number.
        most: maximum number of results, even if the model requests more.
        snippet_chars: maximum length of the text of each result, in characters; see `snippet`.

    Raises:
        UserError: the file is missing or damaged, or a row has no text.
    """

    def __init__(
        self,
        corpus: str,
        *,
        text: str = "text",
        title: str = "title",
        id: str = "id",
        k: int = 3,
        most: int = 10,
        snippet_chars: int = 400,
    ) -> None:
        file = Path(corpus).expanduser().resolve()
        try:
            state = file.stat()
        except OSError as error:
            raise UserError(f"environment.options.search.corpus: {corpus}: {error.strerror}") from error
        self._documents, self._index = _load(str(file), state.st_size, state.st_mtime_ns, text, title, id)
        self._k, self._most, self._chars = k, most, snippet_chars

    def search(self, query: str, k: int | None = None) -> str:
        """Search the documents and return the best matches.

        Args:
            query: words to look for.
            k: how many results.
        """
        results = []
        for number, _ in self._index.search(query, max(1, min(self._k if k is None else k, self._most))):
            document = self._documents[number]
            text = snippet(document.text, query, self._chars)
            results.append(f"[{document.id}] {document.title}\n{text}".strip())
        return "\n\n".join(results) or "Nothing was found."


@lru_cache(maxsize=8)
def _load(path: str, size: int, modified: int, text: str, title: str, id: str) -> tuple[list[Document], Bm25]:
    """Return the documents of a corpus and their index. Both are cached in memory, and the index also on disk.

    ``size`` and ``modified`` (time in nanoseconds) describe the file ``path``, so that a changed file is read again.
    """
    documents = []
    for number, row in enumerate(read_rows(path)):
        if not isinstance(row.get(text), str):
            raise UserError(f"{path}, row {number + 1}: no text in column {text!r}; it has {', '.join(row)}")
        own_id, own_title = row.get(id), row.get(title)
        documents.append(
            Document(str(number if own_id is None else own_id), "" if own_title is None else str(own_title), row[text])
        )
    key = fingerprint("bm25 1", path, str(size), str(modified), text, title)
    kept = cache_dir("search") / f"{key}.npz"
    try:
        with np.load(kept, allow_pickle=False) as arrays:
            index = Bm25.from_arrays(arrays)
        if len(index) == len(documents):
            return documents, index
    except FileNotFoundError:
        pass
    except Exception as error:  # numpy raises errors of many types for a damaged file
        log.warning("%s is damaged (%s) and is made again", kept, error)
    index = Bm25()
    for document in documents:
        index.add(f"{document.title}\n{document.text}")
    with atomic.file(kept) as partial, partial.open("wb") as stream:
        np.savez(stream, **index.arrays())  # type: ignore[arg-type]
    return documents, index


def snippet(text: str, query: str, chars: int) -> str:
    """Return the part of the text, at most ``chars`` characters, that begins shortly before the first match.

    A match is any word of ``query``. "..." marks a side on which text was left out.
    """
    if len(text) <= chars:
        return text
    folded = text.casefold()
    places = [place for word in query.casefold().split() if (place := folded.find(word)) >= 0]
    start = max(0, min(min(places, default=0) - chars // 8, len(text) - chars))
    if start:  # at the beginning of a word, if one begins shortly before
        start = max(start - chars // 8, text.rfind(" ", max(0, start - chars // 8), start) + 1)
    before, after = "..." if start else "", "..." if start + chars < len(text) else ""
    return f"{before}{text[start : start + chars].strip()}{after}"
