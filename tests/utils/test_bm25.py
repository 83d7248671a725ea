"""BM25 against the formula, to the bit, however texts and queries come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gleanrl.utils.bm25 import Bm25, words

K1, B = 1.2, 0.75


def plain(texts: Sequence[str], query: str, k: int, without: Collection[int] = ()) -> list[tuple[int, float]]:
    """The formula, text by text, in Python's floats; words rarest first, as sums are only equal in one order."""
    split = [Counter(words(text)) for text in texts]
    total = sum(sum(each.values()) for each in split)
    asked = [(word, times, sum(word in each for each in split)) for word, times in Counter(words(query)).items()]
    scores: dict[int, float] = {}
    for word, times, n in sorted((each for each in asked if each[2]), key=lambda each: each[2]):
        weight = times * float(np.log1p((len(split) - n + 0.5) / (n + 0.5))) * (K1 + 1)
        for number, each in enumerate(split):
            if word in each and number not in without:
                damping = sum(each.values()) * (K1 * B * len(split) / total) + K1 * (1 - B)
                scores[number] = scores.get(number, 0.0) + weight * (each[word] / (each[word] + damping))
    return sorted(scores.items(), key=lambda scored: (-scored[1], -scored[0]))[:k]


LETTERS = st.lists(st.sampled_from("aaaabbbccdefgh"), max_size=12).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.lists(LETTERS, max_size=15), LETTERS), min_size=1, max_size=6),
    k=st.integers(1, 6),
    out=st.sets(st.integers(0, 60)),
)
@example(rounds=[(["a b"] * 40, "a b")], k=3, out={39})
def test_the_best_are_those_of_the_formula(rounds: list[tuple[list[str], str]], k: int, out: set[int]) -> None:
    """Texts come between queries, which changes how rare a word is and the mean length."""
    index, texts = Bm25(), list[str]()
    for new, query in rounds:
        assert [index.add(text) for text in new] == list(range(len(texts), len(texts) + len(new)))
        texts += new
        without = {number for number in out if number < len(texts)}
        assert index.search(query, k, without) == plain(texts, query, k, without)


def test_among_hundreds_of_texts_too() -> None:
    """Where many scores lie close together."""
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{x}" for x in rng.zipf(1.4, rng.integers(1, 20)) % 200) for _ in range(500)]
    index = Bm25()
    for text in texts:
        index.add(text)
    for query, k in ((texts[-1], 1), (texts[-2], 4)):
        assert index.search(query, k) == plain(texts, query, k)


def test_of_equal_texts_the_later_comes_first() -> None:
    index = Bm25()
    for text in ["a b", "b a", "c", "a b"]:
        index.add(text)
    assert [number for number, _ in index.search("a b", 3)] == [3, 1, 0]
    assert [number for number, _ in index.search("a b", 2, [3])] == [1, 0]


def test_words_are_case_folded_runs_of_letters_digits_and_underscores() -> None:
    assert words("Open Fridge 1, STRASSE/straße ab_c!") == ["open", "fridge", "1", "strasse", "strasse", "ab_c"]
    assert Bm25().search("anything", 3) == []
