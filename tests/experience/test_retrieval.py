"""Tests of `gleanrl.experience.guidance.retrieval`: the text that is kept of a success, and `Bm25Retriever`, whose file
survives crashes and can be rewound."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.experience.guidance.retrieval import Bm25Retriever, experience_text
from gleanrl.types import Message, Score, StopReason, Task, Trajectory, Turn
from gleanrl.utils.errors import UserError
from tests.strategies import examples


# --- the text of a success --------------------------------------------------------------------------
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


def test_the_text_leaves_out_system_prompt_thoughts_and_the_rest_of_long_observations() -> None:
    found = experience_text(Task("t"), success(LINEAR))
    assert found.prompt == "find it"
    assert found.text == f"find it\n> go east\n{('an egg ' * 50)[:200]}\n> take egg\ndone"
    assert len(experience_text(Task("t"), success(LINEAR), max_chars=40).text) <= 40
    found = experience_text(Task("t"), success(LINEAR), summarise=lambda task, t: f"{task.id} went {t.stop}")
    assert found.text == "t went done"


def test_the_text_keeps_think_tags_of_the_environment_and_leaves_out_a_truncated_thought() -> None:
    asked, cut = "think between <think> and </think>, then act", "<think>go ea"
    played = (SYSTEM, turn("user", "find it"), turn("assistant", cut, sampled=True), turn("user", asked))
    assert experience_text(Task("t"), success(played)).text == f"find it\n> \n{asked}"


def test_the_text_leaves_out_experience_that_was_inserted_into_the_prompt() -> None:
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


def test_a_task_is_found_by_the_opening_of_its_newest_success(tmp_path: Path) -> None:
    retriever = Bm25Retriever(tmp_path / "texts.jsonl")
    retriever.add(*one("a", "heat an egg", "old"))
    retriever.add(*one("a", "cool a plate", "new"))
    for found in (retriever, Bm25Retriever(tmp_path / "texts.jsonl")):
        assert ask(found, "heat an egg") == []
        assert ask(found, "cool a plate") == ["cool a plate\n> new"]
        assert len(found) == 1


@settings(max_examples=examples(15))
@given(
    entries=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x y", "y z", "é\nz"])), max_size=8),
    cut=st.integers(0, 8),
    torn=st.booleans(),
)
def test_a_rewound_retriever_returns_what_it_returned_at_the_mark(
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


def test_a_foreign_or_too_short_file_raises_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(UserError, match="is no file of experiences"):
        Bm25Retriever(path)
    path.write_text("")
    with pytest.raises(UserError, match="0 bytes but the checkpoint was made at 90"):
        Bm25Retriever(path).rewind(90)
