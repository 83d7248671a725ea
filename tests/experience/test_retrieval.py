"""BM25 against the formula, what is kept of a success, and a file that survives crashes and rewinds."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.errors import UserError
from gleanrl.experience import retrieval
from gleanrl.experience.retrieval import Bm25, Bm25Retriever, conversation, experience_text, words
from gleanrl.types import Message, Score, StopReason, Task, Trajectory, Turn


def naive(texts: list[str], query: str) -> dict[int, float]:
    """Scores of all texts that share a word, from the formula."""
    split = [words(text) for text in texts]
    mean = sum(map(len, split)) / len(split)
    scores: dict[int, float] = {}
    for number, text in enumerate(split):
        for word in words(query):
            n, tf = sum(word in other for other in split), text.count(word)
            if tf:
                idf = math.log(1 + (len(split) - n + 0.5) / (n + 0.5))
                part = idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * len(text) / mean))
                scores[number] = scores.get(number, 0.0) + part
    return scores


LETTERS = st.lists(st.sampled_from("aaaabbbccdefgh"), max_size=12).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(LETTERS, min_size=1, max_size=40),
    query=LETTERS,
    k=st.integers(1, 5),
    out=st.sets(st.integers(0, 39)),
    probe=st.sampled_from([0, 5, 10**6]),
)
def test_the_best_are_those_of_the_formula(texts: list[str], query: str, k: int, out: set[int], probe: int) -> None:
    """Whether texts are sorted out on the way or not."""
    index = Bm25()
    assert [index.add(text) for text in texts] == list(range(len(texts)))
    out = {number for number in out if number < len(texts)}
    with patch.object(retrieval, "PROBE", probe):
        found = index.search(query, k, out)
    scores = {number: score for number, score in naive(texts, query).items() if number not in out}
    assert [score for _, score in found] == pytest.approx(sorted(scores.values(), reverse=True)[:k])
    for number, score in found:
        assert score == pytest.approx(scores[number])


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(LETTERS, min_size=1, max_size=12), probe=st.sampled_from([0, 10**6]))
def test_of_equal_texts_the_later_comes_first(texts: list[str], probe: int) -> None:
    index = Bm25()
    for text in [*texts, *texts, *texts]:
        index.add(text)
    with patch.object(retrieval, "PROBE", probe):
        found = [number for number, _ in index.search("a b c d", 3 * len(texts))]
    position = {number: place for place, number in enumerate(found)}
    n = len(texts)
    for number in found:
        if number < 2 * n:
            assert position[number + n] < position[number]


def test_sorting_out_happens_and_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{int(x)}" for x in rng.zipf(1.5, 20)) for _ in range(2000)]
    index = Bm25()
    for text in texts:
        index.add(text)
    for query in texts[:20]:
        with patch.object(retrieval, "PROBE", 10**9):
            plain = index.search(query, 4)
        with (
            patch.object(retrieval, "PROBE", 500),
            patch.object(retrieval._Term, "parts", autospec=True, side_effect=retrieval._Term.parts) as dense,
        ):
            assert index.search(query, 4) == plain
        assert dense.call_count < len(Counter(words(query)))


def test_words_are_case_folded_runs_of_letters_digits_and_underscores() -> None:
    assert words("Open Fridge 1, STRASSE/straße ab_c!") == ["open", "fridge", "1", "strasse", "strasse", "ab_c"]
    assert Bm25().search("anything", 3) == []


# --- what is kept of a success ----------------------------------------------------------------------
def turn(role: Any, content: str, *, sampled: bool = False) -> Turn:
    tokens = np.arange(3, dtype=np.int32)
    return Turn(Message(role=role, content=content), tokens, np.zeros(3, np.float32) if sampled else None)


SYSTEM, ASK, GO = turn("system", "be good"), turn("user", "find it"), turn("assistant", "<think>x</think>go\neast")
SEEN, TAKE, END = turn("user", "an egg " * 50), turn("assistant", "take egg"), turn("user", "done")


def as_sampled(t: Turn) -> Turn:
    return turn("assistant", t.message["content"], sampled=True)


def success(*segments: tuple[Turn, ...], task: str = "t", **info: Any) -> Trajectory:
    return Trajectory(f"{task}/0", task, segments, Score(1.0), StopReason.DONE, info)


LINEAR = (SYSTEM, ASK, as_sampled(GO), SEEN, as_sampled(TAKE), END)
REWRITTEN = ((SYSTEM, ASK, as_sampled(GO)), (SYSTEM, ASK, GO, SEEN, as_sampled(TAKE)), (SYSTEM, ASK, TAKE, END))


@pytest.mark.parametrize("segments", [(LINEAR,), REWRITTEN])
def test_a_conversation_holds_every_message_once(segments: tuple[Any, ...]) -> None:
    assert conversation(success(*segments)) == [t.message for t in LINEAR]


def test_a_success_is_kept_without_system_prompt_thinking_or_long_observations() -> None:
    found = experience_text(Task("t"), success(LINEAR))
    assert found.prompt == "find it"
    assert found.text == f"find it\n> go east\n{('an egg ' * 50)[:200]}\n> take egg\ndone"
    assert len(experience_text(Task("t"), success(LINEAR), max_chars=40).text) <= 40
    told = experience_text(Task("t"), success(LINEAR), summarise=lambda task, t: f"{task.id} went {t.stop}")
    assert told.text == "t went done"


def test_experience_that_was_shown_is_not_passed_on() -> None:
    guided = (SYSTEM, turn("user", "SECRET find it"), *LINEAR[2:])
    found = experience_text(Task("t"), success(guided, guided="keep", unguided="find it"))
    assert found == experience_text(Task("t"), success(LINEAR))


# --- the retriever and its file ---------------------------------------------------------------------
def one(task: str, ask: str, do: str) -> tuple[Task, Trajectory]:
    segment = (turn("user", ask), turn("assistant", do, sampled=True))
    return Task(task), success(segment, task=task)


def ask(retriever: Bm25Retriever, text: str, k: int = 5, task: str = "new") -> list[str]:
    return asyncio.run(retriever.retrieve(Task(task, (Message(role="user", content=text),)), k))


def test_the_newest_success_of_the_most_similar_task_comes_first(tmp_path: Path) -> None:
    retriever = Bm25Retriever(tmp_path / "texts.jsonl")
    for entry in [("a", "heat an egg", "old"), ("b", "cool a plate", "plate"), ("a", "heat an egg", "new")]:
        retriever.add(*one(*entry))
    assert len(retriever) == 2
    assert ask(retriever, "heat some egg") == ["heat an egg\n> new"]
    assert ask(retriever, "heat an egg, cool a plate", 1) in (["heat an egg\n> new"], ["cool a plate\n> plate"])
    assert ask(retriever, "heat an egg", task="a") == []
    assert ask(retriever, "nothing alike") == []
    own = Bm25Retriever(tmp_path / "texts.jsonl", same_task=True)
    assert ask(own, "heat an egg", task="a") == ["heat an egg\n> new"]


@settings(max_examples=15, deadline=None)
@given(
    entries=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x y", "y z", "é\nz"])), max_size=8),
    cut=st.integers(0, 8),
    torn=st.booleans(),
)
def test_a_rewound_retriever_is_what_it_was(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, str]], cut: int, torn: bool
) -> None:
    path = tmp_path_factory.mktemp("rewind") / "texts.jsonl"
    cut = min(cut, len(entries))
    retriever, before = Bm25Retriever(path), Bm25Retriever()
    mark = retriever.mark()
    for index, (task, do) in enumerate(entries):
        retriever.add(*one(task, "find x", do))
        if index < cut:
            before.add(*one(task, "find x", do))
            mark = retriever.mark()
    if torn:
        with path.open("ab") as file:
            file.write(b'["a", "find')
    again = Bm25Retriever(path)
    assert ask(again, "find") == ask(retriever, "find")
    again.rewind(mark)
    assert ask(again, "find") == ask(before, "find")
    assert path.stat().st_size == mark
    again.add(*one("d", "find d", "d"))
    assert ask(Bm25Retriever(path), "find") == ask(again, "find")


def test_another_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(UserError, match="is no file of experiences"):
        Bm25Retriever(path)
    path.write_text("")
    with pytest.raises(UserError, match="0 bytes but the checkpoint was made at 90"):
        Bm25Retriever(path).rewind(90)
