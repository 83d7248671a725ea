"""`DatasetTaskset`: tasks from data sets in TRL's and verl's format, from files of several kinds, and their rewards.

The tests write small files of generated problems.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gleanrl.cli import main as cli
from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.dataset.taskset import DatasetTaskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.protocols import Split
from gleanrl.rewards.adapter import load_reward
from gleanrl.rewards.request import NotApplicable, Request
from gleanrl.types import Score, Task
from gleanrl.utils.errors import UserError
from tests.environments.problems import problems, trl_rows, verl_rows, written
from tests.rewards import own_rewards

SPLITS: tuple[Split, ...] = ("train", "eval", "warm_start")


def loaded(path: Any, **options: Any) -> DatasetTaskset:
    taskset = load_taskset(EnvironmentSettings(name="dataset", options={"path": path, **options}), seed=1)
    assert isinstance(taskset, DatasetTaskset)
    return taskset


def everything(taskset: DatasetTaskset, splits: Sequence[Split] = SPLITS) -> dict[str, Task]:
    return {task.id: task for split in splits for task in taskset.all_tasks(split)}


def question(task: Task) -> str:
    return task.prompt[-1]["content"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("shape", ["trl", "verl"])
def test_every_row_is_one_task_in_one_split_in_every_file_format(tmp_path: Path, kind: str, shape: str) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    rows = trl_rows(300) if shape == "trl" else verl_rows(300)
    taskset = loaded(written(tmp_path / f"rows.{kind}", rows), warm_start_share=0.2)
    found = {split: taskset.all_tasks(split) for split in SPLITS}
    assert sum(map(len, found.values())) == 300
    assert 15 <= len(found["eval"]) <= 45
    assert 40 <= len(found["warm_start"]) <= 80
    tasks = everything(taskset)
    assert len(tasks) == 300
    by_question = {question(task): task for task in tasks.values()}
    for row in rows:
        task = by_question[row["prompt"][-1]["content"]]
        assert list(task.prompt) == row["prompt"]
        assert task.payload == {name: value for name, value in row.items() if name != "prompt"}
        assert task.kind == row.get("data_source", "")
        assert json.loads(json.dumps(task.payload)) == task.payload
    lines = loaded(written(tmp_path / "same.jsonl", rows), warm_start_share=0.2)
    # The tasks, including their ids, do not depend on the format of the file.
    assert everything(lines) == tasks
    assert [t.id for t in found["train"][:7]] == [t.id for t in taskset.tasks("train", 7)]


def test_tasks_can_be_read_in_any_order_and_pickled(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    files = [
        written(tmp_path / f"part-{i}.{kind}", trl_rows(120, seed=i)) for i, kind in enumerate(("jsonl", "parquet"))
    ]
    for path in (files, files[0], [files[1]]):
        tasks = loaded(path).all_tasks("train")
        first = [tasks[i] for i in range(len(tasks))]
        assert [tasks[i] for i in reversed(range(len(tasks)))] == first[::-1]
        assert list(pickle.loads(pickle.dumps(tasks))) == first
    several = loaded([str(tmp_path / "part-*.jsonl"), str(tmp_path / "part-*.parquet")])
    assert len(everything(several)) == len({**everything(loaded(files[0])), **everything(loaded(files[1]))})


def test_repeated_rows_are_one_task_whatever_the_order_of_columns(tmp_path: Path) -> None:
    rows = trl_rows(20)
    again = [dict(reversed(row.items())) for row in rows]
    taskset = loaded(written(tmp_path / "rows.jsonl", rows + again + rows))
    assert len(everything(taskset)) == 20
    counted = [len(taskset.all_tasks(split)) for split in SPLITS]
    assert sum(counted) == 20


def test_a_rows_id_is_the_tasks_id_and_two_different_rows_with_one_id_raise(tmp_path: Path) -> None:
    rows = [{"id": f"row-{i}", **row} for i, row in enumerate(trl_rows(30))]
    path = written(tmp_path / "rows.jsonl", [*rows, rows[3]])
    assert set(everything(loaded(path))) == {f"row-{i}" for i in range(30)}
    hashed = everything(loaded(path, id=""))
    assert len(hashed) == 30
    assert not set(hashed) & set(everything(loaded(path)))
    clash = written(tmp_path / "clash.jsonl", [{**row, "id": "x"} for row in rows])
    with pytest.raises(
        UserError, match=r"clash.jsonl line \d+: its id 'x' is also that of .*clash.jsonl line \d+"
    ) as named:
        loaded(clash).all_tasks("train")
    assert "environment.options.id" in str(named.value)


def test_the_same_question_is_never_in_two_splits(tmp_path: Path) -> None:
    rows = [{**row, "note": note} for row in trl_rows(60) for note in ("a", "b")]
    found = loaded(written(tmp_path / "rows.jsonl", rows), warm_start_share=0.3)
    asked = {split: {question(task) for task in found.all_tasks(split)} for split in SPLITS}
    assert len(everything(found)) == 120
    assert sum(map(len, asked.values())) == 60


def test_questions_of_a_separate_evaluation_file_are_not_trained_on(tmp_path: Path) -> None:
    train, test = trl_rows(80), trl_rows(30, seed=9)
    path, own = written(tmp_path / "a.jsonl", train + test[:10]), written(tmp_path / "b.jsonl", test)
    taskset = loaded(path, eval_path=own, warm_start_share=0.0)
    asked = {row["prompt"][0]["content"] for row in test}
    assert {question(task) for task in taskset.all_tasks("eval")} == asked
    trained = {question(task) for task in taskset.all_tasks("train")}
    assert trained == {row["prompt"][0]["content"] for row in train} - asked


def test_saved_hugging_face_data_sets_and_folders_of_files_can_be_loaded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": trl_rows(60), "test": trl_rows(20, seed=4)}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    for name, rows in parts.items():
        written(tmp_path / "folder" / f"{name}.jsonl", rows)
    options = {"eval_split": "test", "warm_start_share": 0.0}
    train, test = (str(tmp_path / "folder" / f"{name}.jsonl") for name in parts)
    lines = loaded(train, eval_path=test, warm_start_share=0.0)
    for path in ("saved", "folder"):
        taskset = loaded(str(tmp_path / path), **options)
        for split in ("train", "eval"):
            assert list(taskset.all_tasks(split)) == list(lines.all_tasks(split))
    alone = datasets.Dataset.from_list(parts["train"])
    alone.save_to_disk(tmp_path / "alone")
    assert len(everything(loaded(str(tmp_path / "alone")))) == 60
    with pytest.raises(UserError, match=r"has no split 'tests'; did you mean 'test'\?"):
        loaded(str(tmp_path / "saved"), eval_split="tests").tasks("eval", 1)


def test_a_data_set_that_cannot_be_loaded_raises_a_one_line_error() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(UserError, match="cannot load the data set nobody/nothing: ") as named:
        loaded("nobody/nothing")
    assert "\n" not in str(named.value)


def test_system_message_few_shot_examples_and_instruction_are_added_to_the_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "system", "content": "old"}, {"role": "user", "content": "2+2?"}], "answer": "4"}]
    path, shots = written(tmp_path / "rows.jsonl", rows), written(tmp_path / "shots.jsonl", trl_rows(1, messages=False))
    options = {"eval_share": 0.0, "instruction": " Box it."}
    [plain] = loaded(path, eval_share=0.0).all_tasks("train")
    [task] = loaded(path, system="new", few_shot=[["1+1?", "\\boxed{2}"]], **options).all_tasks("train")
    assert [(m["role"], m["content"]) for m in task.prompt] == [
        ("system", "new"), ("user", "1+1? Box it."), ("assistant", "\\boxed{2}"), ("user", "2+2? Box it."),
    ]  # fmt: skip
    assert (task.id, task.payload) == (plain.id, plain.payload)
    [task] = loaded(path, few_shot=shots, **options).all_tasks("train")
    first, how, _ = problems(1)[0]
    assert [m["content"] for m in task.prompt] == ["old", f"{first} Box it.", how, "2+2? Box it."]


def test_a_demonstration_is_the_rows_solution_and_rows_without_one_raise(tmp_path: Path) -> None:
    taskset = loaded(written(tmp_path / "rows.jsonl", trl_rows(50)))
    task = taskset.tasks("warm_start", 1)[0]
    assert taskset.demonstrate(task, seed=0) == (
        (*task.prompt, {"role": "assistant", "content": task.payload["solution"]}),
        Score(1.0),
    )
    verl = loaded(
        written(tmp_path / "verl.jsonl", verl_rows(50)),
        solution="reward_model.ground_truth",
        solution_format="It is \\boxed{{solution}}.",
    )
    task = verl.tasks("warm_start", 1)[0]
    said = verl.demonstrate(task, seed=0)[0][-1]["content"]
    assert said == f"It is \\boxed{{{task.payload['reward_model']['ground_truth']}}}."
    none = loaded(written(tmp_path / "none.jsonl", verl_rows(50)))
    # The rows have no solutions, so that no share of them is reserved for the warm start.
    assert sum(len(none.all_tasks(split)) for split in ("train", "eval")) == 50
    with pytest.raises(
        UserError, match=r"has 0 rows for 'warm_start', not 1: set environment\.options\.warm_start_share"
    ):
        none.tasks("warm_start", 1)
    with pytest.raises(UserError, match=r"has \d+ rows for 'train', not 60; lower environment\.train_tasks"):
        none.tasks("train", 60)
    with pytest.raises(UserError, match=r"has no 'solution' or 'completion' to demonstrate"):
        none.demonstrate(none.tasks("train", 1)[0], seed=0)


GOOD = {"prompt": "2+2?", "answer": "4"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"prompt": "2+2?"', "rows.jsonl line 3 is not JSON: "),
        ("[1, 2]", "rows.jsonl line 3 is of type list, not an object"),
        (
            '{"question": "2+2?", "answer": "4"}',
            "rows.jsonl line 3 has no 'prompt'; set environment.options.prompt to one of q",
        ),
        ('{"prompt": 4}', "rows.jsonl line 3: prompt is 4, neither a text nor messages"),
        ('{"prompt": " "}', "rows.jsonl line 3: prompt is empty"),
        ('{"prompt": []}', "rows.jsonl line 3: prompt is [], neither a text nor messages"),
        ('{"prompt": [{"role": "human", "content": "?"}]}', "line 3: prompt[0].role = 'human': none of system, user"),
        ('{"prompt": [{"role": "user", "content": null}]}', "line 3: prompt[0].content is None, not a text"),
        ('{"prompt": [{"role": "user", "content": "?"}, 7]}', "line 3: prompt[1] is 7, not a message"),
        ('{"prompt": [{"role": "assistant", "content": "!"}]}', "line 3: prompt ends with the assistant's message"),
    ],
)
def test_the_error_for_a_bad_row_names_file_line_and_key(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{text}\n")
    with pytest.raises(UserError) as caught:
        everything(loaded(str(path), eval_share=0.0, warm_start_share=0.0), ["train"])
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_that_json_cannot_represent_raises_unless_it_is_dropped(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = written(tmp_path / "rows.parquet", [{**row, "picture": b"png"} for row in trl_rows(9)])
    with pytest.raises(UserError, match=r"rows.parquet row 1: picture is b'png', which JSON cannot hold; leave it out"):
        loaded(path, eval_share=0.0).tasks("train", 1)
    assert len(everything(loaded(path, drop=["picture"], eval_share=0.0, warm_start_share=0.0), ["train"])) == 9


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"path": "nowhere.jsonl"}, "environment.options.path: no file nowhere.jsonl"),
        ({"path": "none-*.parquet"}, "no file matches none-*.parquet"),
        ({"path": "rows.csv"}, "rows.csv"),
        ({"path": "folder.jsonl"}, "environment.options.path: folder.jsonl is not a file"),
        ({"path": []}, "name a file"),
        ({"eval_share": 0.6, "warm_start_share": 0.5}, "they leave no rows to train on"),
        ({"solution_format": "{answer}"}, "it must hold {solution}"),
        ({"few_shot": "shots.txt"}, "environment.options.few_shot: shots.txt is none of"),
        ({"evalshare": 0.5}, "environment.options.evalshare: 'dataset' has no such option; did you mean 'eval_share'?"),
    ],
)
def test_bad_options_raise_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    path = options.pop("path", written(tmp_path / "rows.jsonl", trl_rows(5)))
    with pytest.raises(UserError) as caught:
        loaded(path, **options)
    options["path"] = path
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_parquet_raises_a_user_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(UserError, match=r"rows.parquet is not a parquet file"):
        loaded(str(tmp_path / "rows.parquet"))


def test_a_file_of_another_format_is_not_taken_for_the_id_of_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("prompt,answer\n1 + 1?,2\n")
    with pytest.raises(UserError, match=r"rows.csv is none of \.jsonl, \.json, \.parquet"):
        loaded("rows.csv")


def test_a_damaged_row_of_a_parquet_file_or_a_deeply_nested_one_raises_a_user_error(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"prompt": ["a", "b"], "answer": ["1", "2"]}), path)
    data = path.read_bytes()
    path.write_bytes(data[:10] + bytes(40) + data[50:])
    with pytest.raises(UserError, match=r"rows.parquet is damaged"):
        loaded(str(path), eval_share=0.0).tasks("train", 1)
    deep = f'{{"prompt": "a", "x": {"[" * 10**5}{"]" * 10**5}}}'
    for text in (deep, f"[{deep}]"):
        (tmp_path / "deep.json").write_text(text)
        with pytest.raises(UserError, match=r"deep.json.* is not JSON"):
            loaded(str(tmp_path / "deep.json"), eval_share=0.0).tasks("train", 1)


def test_a_large_file_is_read_only_as_far_as_the_requested_tasks_need(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    line = json.dumps({"prompt": "What is %d?", "answer": "%d", "solution": "%d"}) + "\n"
    with path.open("w") as file:
        file.writelines(line % (i, i, i) for i in range(40_000))
        file.write("this is no JSON\n")
    start = time.process_time()
    taskset = loaded(str(path))
    assert [len(taskset.tasks(split, 100)) for split in SPLITS] == [100, 100, 100]
    assert time.process_time() - start < 0.5
    with pytest.raises(UserError, match="line 40001 is not JSON"):
        taskset.all_tasks("train")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_ends_after_one_message_without_a_valid_score(tmp_path: Path, workers: int) -> None:
    taskset = loaded(written(tmp_path / "rows.jsonl", trl_rows(10)))
    task = taskset.tasks("train", 1)[0]

    async def main() -> tuple[Any, Any]:
        async with EnvironmentPool(taskset, workers=workers) as pool:
            environment = pool.environment(task)
            first = await environment.reset()
            return first, await environment.step({"role": "assistant", "content": "4"})

    first, last = asyncio.run(main())
    assert (first.messages, first.done, last.done) == ((), False, True)
    assert not last.score.valid
    assert "set reward.name" in last.score.explanation


# --- the rewards of others, on the same rows --------------------------------------------------------
def answers(task: Task) -> list[str]:
    right = task.payload.get("answer") or task.payload["reward_model"]["ground_truth"]
    return [f"It is \\boxed{{{right}}}.", "It is \\boxed{1}.", "", str(right)]


def scored(name: str, task: Task, said: str) -> Score | None:
    """Return the score of the message ``said`` by the reward ``name``; None if the reward does not apply."""
    request = Request(task, (*task.prompt, {"role": "assistant", "content": said}))
    try:
        return asyncio.run(_score_once(name, request))
    except NotApplicable:
        return None


async def _score_once(name: str, request: Request) -> Score:
    scorer = load_reward(name)
    try:
        return await scorer(request)
    finally:
        await scorer.aclose()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_verl_reward_function_gives_the_same_scores_as_a_direct_call(tmp_path: Path, kind: str) -> None:
    rows = verl_rows(40)
    tasks = everything(loaded(written(tmp_path / f"rows.{kind}", rows))).values()
    by_question = {row["prompt"][0]["content"]: row for row in rows}
    for task in tasks:
        row = by_question[question(task)]
        for said in answers(task):
            truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
            by_hand = own_rewards.compute_score(row["data_source"], said, truth, extra)
            score = scored(f"verl:{own_rewards.__file__}:compute_score", task, said)
            assert score is not None
            assert (score.value, score.parts) == (by_hand["score"], {"right": by_hand["right"], "known": 1.0})


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("function", "messages"), [("boxed", True), ("terse", False)])
def test_a_trl_reward_function_gives_the_same_scores_as_a_direct_call(
    tmp_path: Path, kind: str, function: str, messages: bool
) -> None:
    rows = trl_rows(40, messages=messages)
    tasks = everything(loaded(written(tmp_path / f"rows.{kind}", rows))).values()
    by_question = {row["prompt"][0]["content"] if messages else row["prompt"]: row for row in rows}
    heard = set()
    for task in tasks:
        row = by_question[question(task)]
        for said in answers(task):
            completion = [{"role": "assistant", "content": said}] if messages else said
            columns = {name: [value] for name, value in row.items() if name != "prompt"}
            [by_hand] = getattr(own_rewards, function)(prompts=[row["prompt"]], completions=[completion], **columns)
            score = scored(f"trl:tests.rewards.own_rewards:{function}", task, said)
            assert (None if score is None else score.value) == by_hand
            heard.add(by_hand)
    # `boxed` also returns None for some completions, and `terse` returns a value for each length.
    assert len(heard) > 2


def test_trls_accuracy_reward_gives_the_same_scores_as_a_direct_call(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    accuracy = pytest.importorskip("trl.rewards").accuracy_reward
    task = loaded(written(tmp_path / "rows.jsonl", trl_rows(3)), eval_share=0.0).tasks("train", 1)[0]
    values = []
    for said in answers(task):
        [by_hand] = accuracy([[{"role": "assistant", "content": said}]], [task.payload["solution"]])
        score = scored("trl:trl.rewards:accuracy_reward", task, said)
        assert score is not None
        assert score.value == by_hand
        values.append(by_hand)
    assert values[:2] == [1.0, 0.0]


def test_verls_default_compute_score_gives_the_same_scores_as_a_direct_call(tmp_path: Path) -> None:
    gsm8k = pytest.importorskip("verl.utils.reward_score.gsm8k")
    rows = [{**row, "data_source": "openai/gsm8k"} for row in verl_rows(5)]
    for task in everything(loaded(written(tmp_path / "rows.jsonl", rows))).values():
        truth = task.payload["reward_model"]["ground_truth"]
        for said in (f"#### {truth}", "#### 1", truth):
            score = scored("verl:verl.utils.reward_score:default_compute_score", task, said)
            assert score is not None
            assert score.value == gsm8k.compute_score(said, truth)


# --- a run ------------------------------------------------------------------------------------------
RUN = """
[run]
name = "sums"
steps = 2
threads = 1

[environment]
name = "dataset"
train_tasks = 60
eval_tasks = 6
warm_start_tasks = 60
options = {{ path = "{path}", warm_start_share = 0.4 }}

[reward]
name = "math"
workers = 1

[model]
hidden_size = 32
layers = 2
max_context = 96
vocabulary = 200

[warm_start]
demonstrations = 60
steps = 120
batch = 16
lr = 3e-3

[context]
max_turns = 1
max_tokens_per_turn = 40

[schedule]
batch = 4
group = 4

[evaluation]
every = 0
samples = 1
"""


@pytest.mark.slow
def test_a_model_can_be_trained_on_a_parquet_file_with_the_math_reward(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("math_verify")
    rows = [
        {"prompt": f"What is {a} + {b}?", "solution": f"It is $\\boxed{{{a + b}}}$.", "answer": str(a + b)}
        for a in range(12)
        for b in range(12)
    ]
    path = written(tmp_path / "sums.parquet", rows)
    (tmp_path / "sums.toml").write_text(RUN.format(path=path))
    assert cli.main(["train", str(tmp_path / "sums.toml"), "--run.folder", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "sums" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == 2
    # A gradient that is not zero means that the rewards within some group differ.
    assert any(step.get("learner/grad_norm", 0.0) > 0 for step in steps)
    assert all(0.0 < step["reward/formatted"] <= 1.0 for step in steps), sorted(steps[0])
    assert {line["eval/sampled/valid"] for line in lines if "eval/sampled/valid" in line} == {1.0}


def test_a_rewritten_file_changes_the_version_and_tasks_of_the_taskset(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", trl_rows(30))
    taskset = loaded(path)
    before, version = everything(taskset), taskset.version
    assert loaded(path).version == version
    written(tmp_path / "rows.jsonl", trl_rows(40, seed=3))
    # Cached demonstrations are keyed by the version, so that it must change with the file.
    assert taskset.version != version
    assert len(everything(taskset)) == 40
    assert not set(everything(loaded(path))) & set(before)


def test_training_on_a_data_set_without_a_reward_stops_with_an_error_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sums.toml").write_text(RUN.format(path=written(tmp_path / "rows.jsonl", trl_rows(50))))
    status = cli.main(
        ["train", str(tmp_path / "sums.toml"), "--run.folder", str(tmp_path), "--reward.name", "environment"]
    )
    assert status == 2
    assert "environment 'dataset' scores nothing itself: set reward.name (e.g. math)" in capsys.readouterr().err
