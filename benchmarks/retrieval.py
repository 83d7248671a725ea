"""Measures the time of a BM25 query for similar tasks in milliseconds, by the number of indexed texts.

    python benchmarks/retrieval.py [--texts 100000] [--queries 50]

There are three kinds of texts:

* household: the first observations of household tasks, about 40 words, most of which occur in most texts;
* zipf: 37 words from a Zipf distribution over 30,000 words;
* even: 37 words from a uniform distribution over 300 words.

A query is a new text of the same kind and returns the four best matches. At each size, these CPU times are printed:

    median, slowest    of all queries
    after add          median of queries when 16 texts are added to the index before each
    add us             microseconds to add a text while the index is filled
    bm25s, rank_bm25   median of the same queries with these packages, if installed; they must rebuild their index after
                       each addition, which is not counted

It is checked that the four best scores of bm25s equal ours. (bm25s uses Lucene's variant of BM25, whose scores are ours
divided by k1 + 1.)
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gleanrl.utils.bm25 import Bm25, words

BEST, ADDED, ROUNDS = 4, 16, 10
PLACES = "cabinet drawer shelf countertop sidetable dresser desk bed sofa armchair fridge microwave sinkbasin toilet "
PLACES += "garbagecan coffeemachine stoveburner bathtubbasin towelholder safe cart ottoman diningtable"
THINGS = "mug cup plate bowl knife fork spoon spatula pan pot kettle egg apple potato tomato lettuce bread book pen "
THINGS += "pencil keychain creditcard cellphone laptop remotecontrol newspaper watch vase statue candle soapbar cloth "
THINGS += "towel spraybottle tissuebox pillow box alarmclock baseballbat basketball"


def household(rng: random.Random) -> str:
    """Make a text like the first observation of an episode of ALFWorld."""
    kinds = rng.choices(PLACES.split(), k=5)
    seen = ", ".join(f"a {kind} {number}" for kind in kinds for number in range(rng.randint(1, 3), 0, -1))
    how = rng.choice(["", "clean ", "hot ", "cool "])
    goal = f"put a {how}{rng.choice(THINGS.split())} in {rng.choice(kinds)}"
    return f"You are in the middle of a room. Looking quickly around you, you see {seen}. Your task is to: {goal}."


def zipf(rng: random.Random) -> str:
    drawn = np.random.default_rng(rng.getrandbits(32)).zipf(1.3, 37) % 30_000
    return " ".join(f"w{number}" for number in drawn.tolist())


def even(rng: random.Random) -> str:
    return " ".join(f"w{rng.randrange(300)}" for _ in range(37))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=50)
    args = parser.parse_args()
    sizes = [10**power for power in range(3, 9) if 10**power < args.texts] + [args.texts]
    others = [name for name in ("bm25s", "rank_bm25") if _installed(name)]
    print(
        f"{'CPU ms of a query':24}{'median':>9}{'slowest':>9}{'after add':>11}{'add us':>9}"
        + "".join(f"{o:>11}" for o in others)
    )
    for kind, make in (("household", household), ("zipf", zipf), ("even", even)):
        rng = random.Random(0)
        texts = [make(rng) for _ in range(args.texts)]
        queries = [make(rng) for _ in range(args.queries)]
        added = iter([make(rng) for _ in range(ADDED * ROUNDS * len(sizes))])
        for size in sizes:
            row = measure(texts[:size], queries, added)
            row += [OTHERS[name](texts[:size], queries) for name in others]
            print(f"{f'{size:,} {kind} texts':24}{row[0]:9.2f}{row[1]:9.2f}{row[2]:11.2f}{row[3]:9.1f}", end="")
            print("".join(f"{value:11.2f}" for value in row[4:]), flush=True)


def measure(texts: Sequence[str], queries: Sequence[str], added: Iterator[str]) -> list[float]:
    index = Bm25()
    start = time.process_time()
    for text in texts:
        index.add(text)
    filling = (time.process_time() - start) / len(texts)
    index.search(queries[0], BEST)
    spent = [_timed(lambda query=query: index.search(query, BEST)) for query in queries]
    after: list[float] = []
    for query in queries[:ROUNDS]:
        for _ in range(ADDED):
            index.add(next(added))
        after.append(_timed(lambda query=query: index.search(query, BEST)))
    return [statistics.median(spent), max(spent), statistics.median(after), 1e6 * filling]


def _timed(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return 1000 * (time.process_time() - start)


# --- other packages -----------------------------------------------------------------------------
def _installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def with_bm25s(texts: Sequence[str], queries: Sequence[str]) -> float:
    bm25s = importlib.import_module("bm25s")
    theirs, ours = bm25s.BM25(method="lucene", k1=1.2, b=0.75), Bm25()
    theirs.index([words(text) for text in texts], show_progress=False)
    for text in texts:
        ours.add(text)
    spent: list[float] = []
    for query in queries:
        asked = [words(query)]
        start = time.process_time()
        found = theirs.retrieve(asked, k=BEST, show_progress=False)
        spent.append(1000 * (time.process_time() - start))
        expected = [score / 2.2 for _, score in ours.search(query, BEST)]
        np.testing.assert_allclose(found.scores[0], expected, rtol=1e-4)
    return statistics.median(spent)


def with_rank_bm25(texts: Sequence[str], queries: Sequence[str]) -> float:
    """Return the median milliseconds of queries with rank_bm25.

    Its idf differs from ours, so scores are not compared. It is slow, so only a twentieth of the queries is used.
    """
    package = importlib.import_module("rank_bm25")
    theirs = package.BM25Okapi([words(text) for text in texts], k1=1.2, b=0.75)
    some = queries[: max(1, len(queries) // 20)]
    return statistics.median(_timed(lambda query=query: _four_best(theirs.get_scores(words(query)))) for query in some)


def _four_best(scores: Any) -> Any:
    return np.argpartition(scores, len(scores) - BEST)[len(scores) - BEST :]


OTHERS: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "bm25s": with_bm25s,
    "rank_bm25": with_rank_bm25,
}


if __name__ == "__main__":
    main()
