"""`gleanrl.utils.bm25` returns the same scores, bit for bit, as a direct implementation of the BM25 formula.

A property test compares both on random texts and queries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gleanrl.utils.bm25 import Bm25, words

K1, B = 1.2, 0.75


def reference_search(
    texts: Sequence[str], query: str, k: int, without: Collection[int] = ()
) -> list[tuple[int, float]]:
    """Return the ``k`` best texts and their scores, by the BM25 formula in Python floats.

    The terms of a sum are added from the rarest word to the most frequent one, as in `Bm25`, because floating-point
    sums in another order differ in their last bits.
    """
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
def test_search_results_equal_the_formula_while_texts_are_added_between_queries(
    rounds: list[tuple[list[str], str]], k: int, out: set[int]
) -> None:
    """Each round adds texts and then searches: new texts change the document frequencies and the mean length."""
    index, texts = Bm25(), list[str]()
    for new, query in rounds:
        assert [index.add(text) for text in new] == list(range(len(texts), len(texts) + len(new)))
        texts += new
        without = {number for number in out if number < len(texts)}
        assert index.search(query, k, without) == reference_search(texts, query, k, without)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(LETTERS, min_size=1, max_size=15),
    replaced=st.dictionaries(st.integers(0, 14), LETTERS),
    query=LETTERS,
)
def test_an_index_with_replaced_texts_equals_one_of_the_new_texts(
    texts: list[str], replaced: dict[int, str], query: str
) -> None:
    index = Bm25()
    for text in texts:
        index.add(text)
    for number, text in replaced.items():
        if number < len(texts):
            index.replace(number, texts[number], text)
            texts[number] = text
    assert index.search(query, 6) == reference_search(texts, query, 6)


def test_search_results_equal_the_formula_among_500_texts() -> None:
    """With this many texts, many scores are nearly equal, so that a rounding error would change the order."""
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{x}" for x in rng.zipf(1.4, rng.integers(1, 20)) % 200) for _ in range(500)]
    index = Bm25()
    for text in texts:
        index.add(text)
    for query, k in ((texts[-1], 1), (texts[-2], 4)):
        assert index.search(query, k) == reference_search(texts, query, k)


def test_of_texts_with_equal_scores_the_last_added_comes_first() -> None:
    index = Bm25()
    for text in ["a b", "b a", "c", "a b"]:
        index.add(text)
    assert [number for number, _ in index.search("a b", 3)] == [3, 1, 0]
    assert [number for number, _ in index.search("a b", 2, [3])] == [1, 0]


def test_words_are_case_folded_runs_of_letters_digits_and_underscores() -> None:
    assert words("Open Fridge 1, STRASSE/straße ab_c!") == ["open", "fridge", "1", "strasse", "strasse", "ab_c"]
    assert Bm25().search("anything", 3) == []
