"""Task ids: one id means one problem and belongs to one split, for data sets, tools and mixtures.

Property tests draw rows, options and task counts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.splits import fingerprint, named, select, split_of
from gleanrl.protocols import Split, Taskset
from gleanrl.types import Task
from gleanrl.utils.errors import UserError
from tests.environments.problems import written
from tests.strategies import examples

SPLITS: tuple[Split, ...] = ("train", "eval", "warm_start")
ECHO = "tests.environments.test_identity:echo"
COUNTS = st.lists(st.integers(1, 8), min_size=2, max_size=4)


def echo(text: str) -> str:
    """Give it back.

    Args:
        text: it.
    """
    return text


def loaded(name: str, seed: int = 0, **options: Any) -> Taskset:
    return load_taskset(EnvironmentSettings(name=name, options=options), seed)


def problem(task: Task) -> str:
    """Return a text of the task's prompt and payload, without the name of its part of a mixture."""
    return json.dumps([task.prompt, {k: v for k, v in task.payload.items() if k != "mixture"}], sort_keys=True)


def check_ids(
    taskset: Taskset, counts: Iterable[int], splits: Iterable[Split] = SPLITS
) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Check that every id means one problem in all lists of tasks. Counts that the taskset rejects are skipped.

    Returns the problem of each id, and the splits in which each id was found.
    """
    meant: dict[str, str] = {}
    places: dict[str, set[str]] = {}
    for split in splits:
        for count in counts:
            try:
                tasks = taskset.tasks(split, count)
            except UserError:
                continue
            assert len({task.id for task in tasks}) == count
            for task in tasks:
                assert meant.setdefault(task.id, problem(task)) == problem(task)
                places.setdefault(task.id, set()).add(split)
    return meant, places


ROW = st.fixed_dictionaries(
    {"prompt": st.integers(0, 40).map("What is {}?".format), "answer": st.sampled_from("ab")},
    optional={"id": st.one_of(st.none(), st.integers(0, 30), st.sampled_from(["eval/3", "x"]))},
)
ROWS = st.lists(ROW, min_size=8, max_size=40)
OPTIONS = st.fixed_dictionaries(
    {"eval_share": st.sampled_from([0.0, 0.1, 0.6]), "warm_start_share": st.sampled_from([None, 0.0, 0.3])},
    optional={"id": st.just(""), "instruction": st.just(" Now."), "system": st.just("Be short.")},
)


@settings(max_examples=examples(80))
@given(rows=ROWS, own=st.one_of(st.none(), ROWS), options=OPTIONS, counts=COUNTS)
def test_ids_of_data_set_rows_mean_one_problem_in_one_split_for_all_counts(
    rows: Any, own: Any, options: Any, counts: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = dict(options, path=written(Path(folder) / "rows.jsonl", rows))
        if own is not None:
            options["eval_path"] = written(Path(folder) / "eval.jsonl", own)
        _, places = check_ids(loaded("dataset", **options), counts)
    assert all(len(splits) == 1 for splits in places.values())


@settings(max_examples=examples(80))
@given(rows=ROWS, counts=COUNTS)
def test_ids_of_tool_tasks_mean_one_problem_in_one_split_for_all_counts(rows: Any, counts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = loaded("tools", tools=[ECHO], data=written(Path(folder) / "rows.jsonl", rows))
        meant, places = check_ids(made, counts)
    assert all(len(splits) == 1 for splits in places.values())
    assert "None" not in meant


@settings(max_examples=examples(80))
@given(
    rows=st.lists(ROWS, min_size=2, max_size=3),
    use=st.lists(st.tuples(st.integers(0, 2), OPTIONS, st.booleans(), st.booleans()), min_size=2, max_size=3),
    counts=COUNTS,
)
def test_no_part_of_a_mixture_trains_on_a_question_that_another_part_evaluates_on(
    rows: Any, use: Any, counts: Any
) -> None:
    """The parts read the same files, each with its own shares and its own evaluation file."""
    with tempfile.TemporaryDirectory() as folder:
        files = [written(Path(folder) / f"{i}.jsonl", own) for i, own in enumerate(rows)]
        parts = []
        for number, (file, options, own_eval, evaluated) in enumerate(use):
            given_ = dict(options, path=files[file % len(files)])
            if own_eval:
                given_["eval_path"] = files[(file + 1) % len(files)]
            limits = {} if evaluated else {"eval_tasks": 0}
            parts.append({"name": "dataset", "label": str(number), "options": given_, **limits})
        made = loaded("mixture", parts=parts)
        asked: dict[str, set[str]] = {}
        for split in SPLITS:
            found, _ = check_ids(made, counts, [split])
            asked[split] = {json.loads(told)[0][-1]["content"].removesuffix(" Now.") for told in found.values()}
    assert not asked["train"] & asked["eval"]
    assert not asked["warm_start"] & asked["eval"]
    assert not asked["train"] & asked["warm_start"]


def test_a_part_leaves_out_rows_that_another_part_on_the_same_file_evaluates_on(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"capital of {i}?", "answer": str(i)} for i in range(200)]
    path = written(tmp_path / "rows.jsonl", rows)
    one = {"name": "dataset", "label": "x", "options": {"path": path}, "eval_tasks": 0}
    other = {"name": "dataset", "label": "y", "options": {"path": path, "eval_share": 0.6}, "train_tasks": 0}
    made = loaded("mixture", parts=[one, other])
    train, held = ({task.id for task in made.tasks(split, 60)} for split in ("train", "eval"))
    assert not train & held
    alone = loaded("mixture", parts=[one])
    # Without the other part, some of its evaluation rows would be trained on.
    assert {task.id for task in alone.tasks("train", 100)} & held
    with pytest.raises(UserError, match=r"has \d+ rows for 'train', not 100; lower environment.train_tasks"):
        made.tasks("train", 100)


def test_two_parts_with_different_problems_under_one_id_are_rejected(tmp_path: Path) -> None:
    def part(label: str, question: str, **more: Any) -> dict[str, Any]:
        rows = [{"id": i, "prompt": f"{question} {i}?", "answer": str(i), **more} for i in range(200)]
        return {"name": "tools", "label": label, "options": {"data": written(tmp_path / f"{label}.jsonl", rows),
                                                             "tools": [ECHO]}}  # fmt: skip

    for split in SPLITS:
        with pytest.raises(UserError, match=r"both have a task '.*one id means one problem: give the rows"):
            loaded("mixture", parts=[part("a", "capital of"), part("b", "sum of")]).tasks(split, 20)
    # The questions are equal, but the rows of one part have a further column.
    with pytest.raises(UserError, match="one id means one problem"):
        loaded("mixture", parts=[part("a", "sum of"), part("b", "sum of", level=2)]).tasks("train", 20)
    same = loaded("mixture", parts=[part("a", "sum of"), part("b", "sum of")]).tasks("train", 40)
    assert len({task.id for task in same}) == 40


def test_rows_of_a_separate_evaluation_file_get_ids_with_the_prefix_eval(tmp_path: Path) -> None:
    paths = {}
    for name, question in (("train", "capital of"), ("test", "sum of")):
        rows = [{"id": i, "prompt": f"{question} {i}?", "answer": str(i)} for i in range(200)]
        paths[name] = written(tmp_path / f"{name}.jsonl", rows)
    made = loaded("dataset", path=paths["train"], eval_path=paths["test"])
    train, held = made.tasks("train", 100), made.tasks("eval", 100)
    assert [task.id for task in held] == [f"eval/{i}" for i in range(100)]
    assert {task.id for task in train} <= {str(i) for i in range(200)}
    clash = written(tmp_path / "clash.jsonl", [{"id": "eval/3", "prompt": "capital of 3?", "answer": "3"}])
    with pytest.raises(UserError, match=r"clash.jsonl line 1: its id 'eval/3' is one of evaluation's"):
        loaded("dataset", path=clash, eval_path=paths["test"]).tasks("train", 1)


def test_two_rows_with_one_id_raise_even_if_they_are_in_different_splits(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"question {i}?", "answer": str(i)} for i in range(60)]
    options = {"eval_share": 0.5, "warm_start_share": 0.0}
    whole = loaded("dataset", path=written(tmp_path / "rows.jsonl", rows), **options)
    trained, held = (int(whole.tasks(split, 10)[number].id) for split, number in (("train", 0), ("eval", 9)))
    assert trained < held
    rows[held]["id"] = trained
    made = loaded("dataset", path=written(tmp_path / "clash.jsonl", rows), **options)
    # The second row with this id has not been read yet, so that the id means the first row.
    assert str(trained) in {task.id for task in made.tasks("train", 3)}
    assert len(made.tasks("eval", 3)) == 3
    with pytest.raises(UserError, match=rf"line {held + 1}: its id '{trained}' is also that of .* line {trained + 1}"):
        made.tasks("eval", 10)


def test_rows_without_an_id_or_with_a_null_id_get_ids_from_their_content(tmp_path: Path) -> None:
    rows = [{"id": None, "prompt": f"q {i}?", "answer": str(i)} for i in range(200)]
    ids = {}
    for name, own in (("null", rows), ("none", [{k: v for k, v in row.items() if k != "id"} for row in rows])):
        made = loaded("tools", tools=[ECHO], data=written(tmp_path / f"{name}.jsonl", own))
        ids[name] = [task.id for split in SPLITS for task in made.tasks(split, 15)]
    assert len(set(ids["null"])) == 45
    assert ids["null"] == ids["none"]


def test_different_rows_with_one_id_are_rejected_and_equal_rows_are_one_task(tmp_path: Path) -> None:
    rows = [{"id": i % 10, "prompt": f"q {i}?", "answer": str(i)} for i in range(60)]
    made = loaded("tools", tools=[ECHO], data=written(tmp_path / "rows.jsonl", rows))
    for split in SPLITS:
        with pytest.raises(UserError, match=r"rows.jsonl: rows 1 and 11 .*'0'"):
            made.tasks(split, 10)
    twice = [*rows[:10], *rows[:10], {"id": 99, "prompt": "q?", "answer": ""}]
    again = loaded("tools", tools=[ECHO], data=written(tmp_path / "again.jsonl", twice))
    assert sum(_how_many(again, split) for split in SPLITS) == 11


def test_all_rows_of_a_file_are_found_although_it_repeats_one_row_many_times(tmp_path: Path) -> None:
    rows = [{"id": "same", "prompt": "q?"}] * 700 + [{"id": i, "prompt": f"q {i}?"} for i in range(40)]
    made = loaded("tools", tools=[ECHO], data=written(tmp_path / "rows.jsonl", rows))
    assert sum(_how_many(made, split) for split in SPLITS) == 41
    marks = [(fingerprint("a"), 0)] * 700
    place = split_of(marks[0][0])
    # The search stops in a source that repeats the same problem for ever.
    with pytest.raises(UserError, match="found 1 different problems"):
        list(select(iter(lambda: marks[0], None), place, 2, "it"))


def _how_many(taskset: Taskset, split: Split) -> int:
    for count in range(1, 1000):
        try:
            taskset.tasks(split, count)
        except UserError:
            return count - 1
    raise AssertionError("no end")


def test_a_task_name_is_the_fingerprint_extended_only_by_unusual_options() -> None:
    mark = fingerprint("game", "1")
    assert named(mark, {}) == mark
    names = {named(mark, unusual) for unusual in ({}, {"seat": 0}, {"seat": 1}, {"seat": 1, "opponent": "expert"})}
    assert len(names) == 4
    assert named(mark, {"a": 1, "b": 2}) == named(mark, {"b": 2, "a": 1})
