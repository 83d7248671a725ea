"""BM25 keyword search over texts that are added one at a time.

Guidance uses it to search past experience, and the tool ``search`` uses it to search a corpus::

    index = Bm25()
    number = index.add("put a hot egg in the fridge")
    index.search("cool an egg", 3)  # [(number, score)]

The package bm25s ranks texts in the same way, but rebuilds its whole index whenever a text is added. With 50,000 texts
that takes 2.9 s; adding a text here takes 24 us. Texts with equal scores are returned in a fixed order, so that a
resumed run finds the same texts.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_WORD = re.compile(r"\w+")
# the usual values: how soon further occurrences of a word count less, and how much long texts count less
_K1, _B = 1.2, 0.75


def words(text: str) -> list[str]:
    """Split a text into its runs of letters, digits and underscores, and fold their case.

    "Fridge 1, open." gives ``["fridge", "1", "open"]``.
    """
    return _WORD.findall(text.casefold())


class Bm25:
    """A search index that ranks texts by Okapi BM25 (Robertson and Zaragoza 2009).

    The score of a text d is the sum, over the words t of the query, of

        idf(t) tf(t, d) (k1 + 1) / (tf(t, d) + k1 (1 - b + b |d| / mean |d|))
        idf(t) = ln(1 + (N - n(t) + 0.5) / (n(t) + 0.5))

    where tf(t, d) is the number of times that t occurs in d, |d| the number of words in d, N the number of texts and
    n(t) the number of texts that contain t. A score is never negative. A word that occurs twice in the query enters the
    sum twice. k1 is 1.2, and b is 0.75.
    """

    def __init__(self) -> None:
        # for each word: the numbers of the texts that contain it, ascending, and how often it occurs in each of them
        self._postings: dict[str, tuple[array[int], array[int]]] = {}
        self._lengths = array("q")  # number of words in each text

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, text: str) -> int:
        """Add a text and return its number, counted from 0."""
        number = len(self)
        self._lengths.append(0)
        self.replace(number, "", text)
        return number

    def replace(self, number: int, old: str, new: str) -> None:
        """Replace the text ``old``, which `add` gave this number, by ``new``."""
        for word in set(words(old)):
            texts, counts = self._postings[word]
            at = bisect_left(texts, number)
            del texts[at], counts[at]
            if not texts:
                del self._postings[word]
        found = words(new)
        for word, count in Counter(found).items():
            texts, counts = self._postings.setdefault(word, (array("q"), array("i")))
            at = bisect_left(texts, number)
            texts.insert(at, number)
            counts.insert(at, count)
        self._lengths[number] = len(found)

    def search(self, query: str, k: int, without: Collection[int] = ()) -> list[tuple[int, float]]:
        """Return the numbers and scores of the best ``k`` texts that share a word with ``query``, best first.

        Among texts with equal scores, the one that was added later comes first. ``without`` holds the numbers of texts
        that are left out.
        """
        counted = Counter(word for word in words(query) if word in self._postings)
        if not counted or k < 1:
            return []
        size, lengths = len(self), np.frombuffer(self._lengths, np.int64)
        # the part of the denominator that depends on a text's length only
        damping = lengths * (_K1 * _B * size / int(lengths.sum())) + _K1 * (1 - _B)
        scores = np.zeros(size)
        # The rarest word first. The order is fixed, because the sum of floats depends on it.
        for word in sorted(counted, key=lambda word: len(self._postings[word][0])):
            texts = np.frombuffer(self._postings[word][0], np.int64)
            counts = np.frombuffer(self._postings[word][1], np.intc)
            idf = float(np.log1p((size - texts.size + 0.5) / (texts.size + 0.5)))
            scores[texts] += counted[word] * idf * (_K1 + 1) * (counts / (counts + damping[texts]))
        scores[list(without)] = 0.0
        least = np.partition(scores, size - k)[size - k] if k < size else 0.0
        ids = np.flatnonzero((scores >= least) & (scores > 0))
        order = np.lexsort((-ids, -scores[ids]))[:k]
        return [(int(number), float(scores[number])) for number in ids[order]]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the whole index as named arrays, to be written to a file.

        ``words`` holds the list of words as JSON in UTF-8 (uint8). ``texts`` and ``counts`` hold, one word after the
        other, the numbers of the texts that contain the word and how often it occurs in each. ``ends`` holds the
        position in these two arrays at which each word's part ends. ``lengths`` holds the number of words in each text.
        """
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
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Bm25:
        """Rebuild an index from the arrays that `Bm25.arrays` returned."""
        index = cls()
        index._lengths.frombytes(arrays["lengths"].astype(np.int64).tobytes())
        texts, counts, start = arrays["texts"].astype(np.int64), arrays["counts"].astype(np.intc), 0
        for word, end in zip(json.loads(arrays["words"].tobytes()), arrays["ends"].tolist(), strict=True):
            posting = array("q", texts[start:end].tobytes()), array("i", counts[start:end].tobytes())
            index._postings[word] = posting
            start = end
        return index
