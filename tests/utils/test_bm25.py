"""BM25 against the formula, to the bit, however texts and queries come and however rough the first pass is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gleanrl.utils import bm25
from gleanrl.utils.bm25 import Bm25, words
from tests.strategies import examples

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
ROUGHNESS = st.sampled_from([(0.0, 10**9), (1e-3, 16), (0.3, 1)])  # anew each time, as it is, hardly ever


@settings(max_examples=examples(60))
@given(
    rounds=st.lists(st.tuples(st.lists(LETTERS, max_size=15), LETTERS), min_size=1, max_size=6),
    k=st.integers(1, 6),
    out=st.sets(st.integers(0, 60)),
    rough=ROUGHNESS,
    dense=st.sampled_from([0, 4, 10**9]),
)
@example(rounds=[(["a b"] * 40, "a b")], k=3, out={39}, rough=(1e-3, 16), dense=4)
def test_the_best_are_those_of_the_formula(
    rounds: list[tuple[list[str], str]], k: int, out: set[int], rough: tuple[float, int], dense: int
) -> None:
    """Texts come between queries, so that what a word adds was worked out for some of them, at another mean."""
    index, texts = Bm25(), list[str]()
    with patch.multiple(bm25, DRIFT=rough[0], GROWTH=rough[1], DENSE=dense):
        for new, query in rounds:
            assert [index.add(text) for text in new] == list(range(len(texts), len(texts) + len(new)))
            texts += new
            barred = {number for number in out if number < len(texts)}
            assert index.search(query, k, barred) == plain(texts, query, k, barred)


@pytest.mark.parametrize("dense", [0, 4, 10**9])
@pytest.mark.parametrize("growth", [1, 10**9])
def test_among_thousands_of_texts_too(dense: int, growth: int) -> None:
    """Where the best are found in parts, few texts are scored exactly, and scores lie close together."""
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{x}" for x in rng.zipf(1.4, rng.integers(1, 20)) % 200) for _ in range(1501)]
    index = Bm25()
    leading, scored = bm25._leading, list[int]()

    def counted(rough: Any, k: int, error: float) -> Any:
        ids = leading(rough, k, error)
        scored.append(ids.size)
        return ids

    with patch.multiple(bm25, DRIFT=0.3, GROWTH=growth, DENSE=dense, _leading=counted):
        for number, text in enumerate(texts):
            index.add(text)
            if number % 500 == 499:
                for query, k in ((texts[number - 1], 1), (texts[number - 2], 4)):
                    assert index.search(query, k) == plain(texts[: number + 1], query, k)
    assert len(scored) == 6
    assert max(scored[4:]) < 400


def test_what_a_word_adds_is_not_worked_out_for_every_query() -> None:
    index, saturation, starts = Bm25(), bm25._Term._saturation, list[int]()

    def noted(term: Any, start: int) -> Any:
        starts.append(start)
        return saturation(term, start)

    def asked() -> list[int]:
        starts.clear()
        assert len(index.search("all w3", 2)) == 2
        return list(starts)

    for number in range(400):
        index.add(f"all of w{number % 7}")
    with patch.object(bm25._Term, "_saturation", noted):
        assert asked() == [0, 0]
        assert asked() == []
        index.add("all of w4")
        assert asked() == [400]  # of the word that the new text holds, and of that text only
        for _ in range(400):
            index.add("all of w4")
        assert asked() == [0, 0]


def test_of_equal_texts_the_later_comes_first() -> None:
    index = Bm25()
    for text in ["a b", "b a", "c", "a b"]:
        index.add(text)
    assert [number for number, _ in index.search("a b", 3)] == [3, 1, 0]
    assert [number for number, _ in index.search("a b", 2, [3])] == [1, 0]


def test_words_are_case_folded_runs_of_letters_digits_and_underscores() -> None:
    assert words("Open Fridge 1, STRASSE/straße ab_c!") == ["open", "fridge", "1", "strasse", "strasse", "ab_c"]
    assert Bm25().search("anything", 3) == []
