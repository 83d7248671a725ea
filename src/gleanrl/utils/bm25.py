"""BM25 search over texts that are added one at a time.

Guidance uses it to search past experience, and the tool ``search`` uses it to search a corpus::

    index = Bm25()
    number = index.add("put a hot egg in the fridge")
    index.search("cool an egg", 3)  # [(number, score)]

The package bm25s ranks texts in the same way, but rebuilds its whole index whenever a text is added. With 50,000 texts
that takes 2.9 s; adding a text here takes 24 us. The order of equal scores is fixed, as a resumed run requires.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Return the runs of letters, digits and underscores, case folded: "Fridge 1, open." gives fridge, 1, open."""
    return _WORD.findall(text.casefold())


class Bm25:
    """An index for Okapi BM25 (Robertson and Zaragoza 2009), by default with k1 = 1.2 and b = 0.75.

    score(d) = sum over query words t of idf(t) tf(t, d) (k1 + 1) / (tf(t, d) + k1 (1 - b + b |d| / mean |d|)), with
    idf(t) = ln(1 + (N - n(t) + 0.5) / (n(t) + 0.5)), which is never negative. A word that occurs twice in the query
    enters the sum twice.
    """

    def __init__(self, *, k1: float = 1.2, b: float = 0.75) -> None:
        self._k1, self._b = k1, b
        # word -> the texts that contain it, ascending, and how often it occurs in each
        self._postings: dict[str, tuple[array[int], array[int]]] = {}
        self._lengths = array("q")  # number of words in each text

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, text: str) -> int:
        """Add a text and return its number, counted from 0."""
        number, found = len(self), words(text)
        for word, count in Counter(found).items():
            texts, counts = self._postings.setdefault(word, (array("q"), array("i")))
            texts.append(number)
            counts.append(count)
        self._lengths.append(len(found))
        return number

    def search(self, query: str, k: int, without: Collection[int] = ()) -> list[tuple[int, float]]:
        """Return the numbers and scores of the best ``k`` texts that share a word with ``query``, best first.

        Among texts with equal scores, the later one comes first. The texts ``without`` are left out.
        """
        counted = Counter(word for word in words(query) if word in self._postings)
        if not counted or k < 1:
            return []
        size, lengths = len(self), np.frombuffer(self._lengths, np.int64)
        # the part of the denominator that depends on a text's length only
        damping = lengths * (self._k1 * self._b * size / int(lengths.sum())) + self._k1 * (1 - self._b)
        scores = np.zeros(size)
        for word in sorted(counted, key=lambda word: len(self._postings[word][0])):  # a fixed order of summation
            texts = np.frombuffer(self._postings[word][0], np.int64)
            counts = np.frombuffer(self._postings[word][1], np.intc)
            idf = float(np.log1p((size - texts.size + 0.5) / (texts.size + 0.5)))
            scores[texts] += counted[word] * idf * (self._k1 + 1) * (counts / (counts + damping[texts]))
        scores[list(without)] = 0.0
        least = np.partition(scores, size - k)[size - k] if k < size else 0.0
        ids = np.flatnonzero((scores >= least) & (scores > 0))
        order = np.lexsort((-ids, -scores[ids]))[:k]
        return [(int(number), float(scores[number])) for number in ids[order]]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the whole index as arrays for a file: words (JSON, uint8), their postings and the texts' lengths."""
        texts = [np.frombuffer(texts, np.int64) for texts, _ in self._postings.values()]
        counts = [np.frombuffer(counts, np.intc) for _, counts in self._postings.values()]
        return {
            "words": np.frombuffer(json.dumps(list(self._postings)).encode(), np.uint8),
            "ends": np.cumsum([len(each) for each in texts], dtype=np.int64),
            "texts": np.concatenate([np.empty(0, np.int64), *texts]),
            "counts": np.concatenate([np.empty(0, np.intc), *counts]),
            "lengths": np.array(self._lengths, np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], *, k1: float = 1.2, b: float = 0.75) -> Bm25:
        """Return the index from which `arrays` made ``arrays``."""
        index = cls(k1=k1, b=b)
        index._lengths.frombytes(arrays["lengths"].astype(np.int64).tobytes())
        texts, counts, start = arrays["texts"].astype(np.int64), arrays["counts"].astype(np.intc), 0
        for word, end in zip(json.loads(arrays["words"].tobytes()), arrays["ends"].tolist(), strict=True):
            posting = array("q", texts[start:end].tobytes()), array("i", counts[start:end].tobytes())
            index._postings[word] = posting
            start = end
        return index
