"""`ToolTaskset`: tasks from a class or a file of rows, demonstrations, the search tool, and a training run."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gleanrl.config.settings import EnvironmentSettings
from gleanrl.environments import load_taskset
from gleanrl.environments.pool import EnvironmentPool
from gleanrl.environments.tools import ToolTaskset, call
from gleanrl.environments.tools.executor import bubblewrap_missing
from gleanrl.environments.tools.rows import read_rows
from gleanrl.environments.tools.search import SearchTool, snippet
from gleanrl.experience import ExperiencePool
from gleanrl.protocols import Environment, Observation
from gleanrl.rollout.tool_calls import call_message
from gleanrl.types import Message, Score, Task
from gleanrl.utils.bm25 import Bm25
from gleanrl.utils.errors import UserError

ROOT = Path(__file__).parents[3]
CALCULATOR = f"{ROOT / 'examples' / 'calculator.py'}:Calculator"


def asks(name: str, **arguments: Any) -> Message:
    return Message(role="assistant", content="", tool_calls=[call_message(call(name, **arguments), 0)])


async def play(environment: Environment, *messages: Message) -> list[Observation]:
    try:
        return [await environment.reset(), *[await environment.step(said) for said in messages]]
    finally:
        await environment.close()


def taskset(**options: Any) -> Any:
    return load_taskset(EnvironmentSettings(name="tools", options=options), seed=3)


def rows_file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def needs_isolation() -> None:
    if reason := bubblewrap_missing():
        pytest.skip(reason)


class Opened:
    """An environment class that counts its objects: ``made`` in all, and ``now`` those that are not closed yet."""

    now: ClassVar[int] = 0
    made: ClassVar[int] = 0

    def __init__(self) -> None:
        Opened.now += 1
        Opened.made += 1

    def half(self, code: int) -> str:
        """Say a character.

        Args:
            code: its number.
        """
        return chr(code)

    async def close(self) -> None:
        Opened.now -= 1


def test_objects_that_are_made_to_read_the_tools_are_closed(tmp_path: Path) -> None:
    Opened.now = Opened.made = 0
    source = ToolTaskset(environment_factory=Opened, data=rows_file(tmp_path, {"prompt": "Say it."}))
    for _ in range(3):
        assert [tool["function"]["name"] for tool in source.tools(Task("t"))] == ["half"]
    with pytest.raises(UserError, match="no method `expert`"):
        source.demonstrate(source.tasks("train", 1)[0], seed=0)
    assert (Opened.now, Opened.made) == (0, 2)


def test_a_broken_line_of_a_file_is_reported_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 56 + '{"prompt": "b",}\n')
    with pytest.raises(UserError, match="line 57: not JSON"):
        list(read_rows(str(tmp_path / "rows.jsonl")))


def test_rows_without_a_prompt_are_refused_unless_a_method_reset_may_ask(tmp_path: Path) -> None:
    data = rows_file(tmp_path, *({"question": f"Say {n}."} for n in range(40)))
    with pytest.raises(UserError, match=r"without 'prompt'.*question"):
        taskset(tools=[len_of], data=data).tasks("train", 1)
    assert taskset(tools=[len_of], data=data, prompt="question").tasks("train", 1)

    class Asks:
        def reset(self, question: str) -> str:
            return question

    assert taskset(environment_factory=Asks, tools=[len_of], data=data).tasks("train", 1)


def test_reset_and_expert_get_the_prompt_like_every_column(tmp_path: Path) -> None:
    class Said:
        def reset(self, prompt: str) -> str:
            return f" I mean: {prompt}"

        def expert(self, prompt: str) -> Any:
            yield prompt

        def get_reward(self) -> float:
            return 1.0

    source = taskset(environment_factory=Said, tools=[len_of], data=rows_file(tmp_path, *[{"prompt": "Go."}] * 9))
    conversation, _ = source.demonstrate(source.tasks("train", 1)[0], seed=0)
    assert [message["content"] for message in conversation] == ["Go. I mean: Go.", "Go."]


def len_of(text: str) -> int:
    """Return the length."""
    return len(text)


def test_a_lone_surrogate_in_a_tool_result_is_replaced(tmp_path: Path) -> None:
    source = ToolTaskset(environment_factory=Opened, data=rows_file(tmp_path, {"prompt": "Say it."}))
    environment = source.environment(source.tasks("train", 1)[0])
    _, heard = asyncio.run(play(environment, asks("half", code=0xD800)))
    assert heard.messages[0]["content"] == "?"


def test_a_class_with_tasks_and_an_expert_gives_tasks_and_demonstrations() -> None:
    tasks = taskset(environment_factory=CALCULATOR)
    assert tasks.has_expert
    chosen = {split: tasks.tasks(split, 40) for split in ("train", "eval", "warm_start")}
    assert len({task.id for found in chosen.values() for task in found}) == 120
    assert [task.id for task in taskset(environment_factory=CALCULATOR).tasks("train", 40)] == [
        task.id for task in chosen["train"]
    ]
    task = chosen["train"][0]
    conversation, score = tasks.demonstrate(task, seed=0)
    assert score == Score(1.0, parts={"tool_calls": 1.0, "tool_errors": 0.0})
    assert [message["role"] for message in conversation] == ["user", "assistant", "tool", "assistant"]
    assert conversation[0]["content"] == task.payload["row"]["prompt"]

    async def again() -> None:
        """Demonstrate on a running event loop, and replay the demonstration in a worker process."""
        assert tasks.demonstrate(task, seed=0) == (conversation, score)
        async with EnvironmentPool(tasks, workers=1) as pool:
            opening, result, end = await play(pool.environment(task), conversation[1], conversation[3])
            assert opening.tools == tasks.tools(Task("t"))
            assert (*opening.messages, conversation[1], *result.messages, conversation[3]) == conversation
            assert end.done
            assert end.score == score

    asyncio.run(again())


def test_the_demonstration_of_an_expert_that_does_not_finish_scores_zero(tmp_path: Path) -> None:
    class Silent:
        def look(self) -> str:
            """Look."""
            return "nothing"

        def expert(self) -> Any:
            yield [call("look"), call("look")]

    silent = ToolTaskset(environment_factory=Silent, data=rows_file(tmp_path, {"prompt": "?"}))
    (task,) = silent.tasks(next(s for s in ("train", "eval", "warm_start") if _has(silent, s)), 1)
    conversation, score = silent.demonstrate(task, seed=0)
    assert score.value == 0.0
    assert [message["role"] for message in conversation] == ["user", "assistant", "tool", "tool"]


def _has(tasks: ToolTaskset, split: Any) -> bool:
    try:
        return bool(tasks.tasks(split, 1))
    except UserError:
        return False


def test_rows_of_a_file_are_played_with_the_python_and_search_tools(tmp_path: Path) -> None:
    needs_isolation()
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": f"d{n}", "text": f"The price of item{n} is {n * n}."}) + "\n"
                              for n in range(50)))  # fmt: skip
    data = rows_file(tmp_path, *[{"id": f"q{n}", "prompt": f"item{n}?", "answer": n * n} for n in range(50)])
    tasks = taskset(
        tools=["python", "search"], data=data, search={"corpus": str(corpus), "k": 1}, python={"persistent": True}
    )
    assert [tool["function"]["name"] for tool in tasks.tools(Task("t"))] == ["python", "search"]
    task = tasks.tasks("train", 1)[0]
    row = task.payload["row"]
    assert task.id == row["id"]

    async def episode() -> list[Observation]:
        return await play(
            pickle.loads(pickle.dumps(tasks)).environment(task),
            asks("search", query=row["prompt"]),
            asks("python", code="x = 6"),
            asks("python", code=f"x * 7\nopen({data!r})"),
            asks("python", code="print(x)"),
            Message(role="assistant", content=str(row["answer"])),
        )

    opening, found, _, refused, printed, end = asyncio.run(episode())
    assert opening.messages == ({"role": "user", "content": row["prompt"]},)
    assert f"is {row['answer']}." in found.messages[0]["content"]
    assert "FileNotFoundError" in refused.messages[0]["content"] or "PermissionError" in refused.messages[0]["content"]
    assert printed.messages[0]["content"] == "6\n"
    assert end.score is not None
    assert end.score.value == 1.0
    assert end.score.parts == {"tool_calls": 4.0, "tool_errors": 0.0}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "give `environment_factory`"),
        ({"environment_factory": CALCULATOR, "factory": 1}, "no such option"),
        ({"environment_factory": CALCULATOR, "max_calls": 0}, "environment.options.max_calls"),
        ({"tools": ["search"], "data": "x.jsonl"}, "search.corpus: the file to search is missing"),
        ({"tools": ["search"], "data": "x.jsonl", "search": {"corpus": "none.jsonl"}}, "none.jsonl: No such file"),
        ({"tools": ["search"], "data": "x.jsonl", "search": {"file": "x"}}, "search.file: no such option"),
        ({"tools": ["python"], "data": "x.jsonl", "python": {"wall": 3}}, "python.wall: no such option.*wall_s"),
        ({"tools": ["python"], "data": "x.jsonl", "python": {"wall_s": -1}}, "wall_s = -1: more than 0"),
        ({"tools": ["json:dumps"]}, "no file of tasks"),
        ({"tools": ["json:dumps"], "data": "x.jsonl"}, "has no type hint|cannot be given by name"),
    ],
)
def test_a_wrong_option_raises_a_one_line_error_when_the_taskset_is_loaded(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        taskset(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"prompt": "a"}\nnot json\n', "not JSON"),
        (f"{'[' * 10**5}{']' * 10**5}\n", "not JSON"),
        ("[1]\n", "not an object"),
        ('{"prompt": 3}\n', "found 1 different"),
    ],
)
def test_a_damaged_file_of_rows_raises(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text * 30)
    damaged = taskset(environment_factory=CALCULATOR, data=str(path))
    with pytest.raises(UserError, match=f"{why}|found 0 different"):
        damaged.tasks("train", 2)


def test_the_id_of_a_row_may_have_a_lone_surrogate(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "a", "id": "{number}\\ud800"}}\n' for number in range(30)))
    found = taskset(environment_factory=CALCULATOR, data=str(path)).tasks("train", 2)
    assert all(task.id.endswith("\ud800") for task in found)


def test_a_prompt_that_is_neither_text_nor_messages_raises() -> None:
    tasks = taskset(environment_factory=CALCULATOR, prompt="a")
    with pytest.raises(UserError, match="a text or a list of messages is expected"):
        tasks.environment(tasks.tasks("train", 1)[0])


def test_parquet_rows_may_have_a_conversation_as_their_prompt(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"prompt": turns, "answer": n} for n in range(20)]), path)
    tasks = taskset(tools=[f"{Path(__file__)}:double"], data=str(path))
    task = tasks.tasks("train", 1)[0]
    opening, doubled, end = asyncio.run(
        play(
            tasks.environment(task),
            asks("double", n=4),
            Message(role="assistant", content=str(task.payload["row"]["answer"])),
        )
    )
    assert list(opening.messages) == turns
    assert doubled.messages[0]["content"] == "8"
    assert end.score is not None
    assert end.score.value == 1.0


def double(n: int) -> int:
    """Twice a number."""
    return 2 * n


# --- search -------------------------------------------------------------------------------------------
def corpus_file(folder: Path) -> str:
    path = folder / "corpus.jsonl"
    rows = [
        {"id": 7, "title": "Foxes", "text": "The quick brown fox jumps over the lazy dog."},
        {"id": 8, "title": "Cells", "text": f"{'Other words. ' * 100}The mitochondria is the powerhouse of the cell."},
        {"id": 9, "title": "Empty", "text": ""},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_search_returns_snippets_around_the_words_of_the_query(tmp_path: Path) -> None:
    tool = SearchTool(corpus_file(tmp_path), k=2, snippet_chars=60)
    found = tool.search("powerhouse of a cell")
    assert found.startswith("[8] Cells\n...")
    assert "mitochondria" in found or "powerhouse" in found
    assert len(found.splitlines()[1]) <= 66
    assert "[7] Foxes" in tool.search("fox", 1)
    assert tool.search("xyz") == "Nothing was found."
    assert tool.search("the fox cell", 100).count("[") == 2
    assert len(snippet("word " * 100, "absent", 50)) <= 53


def test_the_search_index_is_cached_and_rebuilt_if_damaged_or_outdated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from gleanrl.environments.tools import search

    monkeypatch.setenv("GLEANRL_CACHE", str(tmp_path / "cache"))
    path = corpus_file(tmp_path)
    built: list[str] = []
    monkeypatch.setattr(search, "Bm25", lambda: built.append("built") or Bm25())
    search._load.cache_clear()
    first = SearchTool(path).search("lazy fox")
    assert built == ["built"]
    monkeypatch.setattr(search, "Bm25", Bm25)
    search._load.cache_clear()
    assert SearchTool(path).search("lazy fox") == first
    (kept,) = (tmp_path / "cache" / "search").glob("*.npz")
    stamp = kept.stat().st_mtime_ns
    search._load.cache_clear()
    SearchTool(path)
    assert kept.stat().st_mtime_ns == stamp
    kept.write_bytes(b"damaged")
    search._load.cache_clear()
    assert SearchTool(path).search("lazy fox") == first
    assert "is damaged" in caplog.text
    Path(path).write_text('{"text": "new fox"}\n')
    assert SearchTool(path).search("fox").endswith("new fox")


def test_a_bm25_index_restored_from_its_arrays_searches_equally_and_can_grow() -> None:
    index = Bm25()
    for n in range(60):
        index.add(f"word{n % 7} word{n % 5} é {'common ' * (n % 3)}")
    again = Bm25.from_arrays(index.arrays())
    for query in ("word3 common", "é", "word1 word2 word4", "none"):
        assert again.search(query, 8) == index.search(query, 8)
    for one in (index, again):
        one.add("word3 word3 common new")
    assert again.search("word3 new", 5) == index.search("word3 new", 5)
    assert Bm25.from_arrays(Bm25().arrays()).search("word", 1) == []


def test_a_corpus_without_a_text_column_raises(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"body": "x"}\n')
    with pytest.raises(UserError, match="no text in column 'text'; it has body"):
        SearchTool(str(path))


# --- training -------------------------------------------------------------------------------------------
@pytest.mark.heavy
def test_the_calculator_example_trains_and_its_pool_can_be_seeded(tmp_path: Path) -> None:
    """Runs a few steps of `examples/calculator.toml`, and then adds demonstrations to the run's experience pool."""
    small = (
        "--run.steps 3 --environment.train_tasks 16 --environment.eval_tasks 8 --environment.warm_start_tasks 100 "
        "--warm_start.demonstrations 200 --warm_start.steps 60 --schedule.batch 4 --schedule.group 4 "
        "--evaluation.every 3 --model.hidden_size 64 --model.layers 2 --replay.enabled true"
    )
    command = [sys.executable, "-m", "gleanrl", "train", "examples/calculator.toml", "--run.folder", str(tmp_path)]
    done = subprocess.run(
        [*command, *small.split()],
        cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    folder = next(path.parent for path in tmp_path.rglob("metrics.jsonl"))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in steps if "reward/tool_calls" in row]
    assert len(trained) == 3
    assert all(0 <= row["reward/tool_errors"] <= row["reward/tool_calls"] for row in trained)

    from gleanrl.runtime.run_folder import RunFolder

    played = list(RunFolder(folder).read_rollouts(1))
    calls = [turn.message.get("tool_calls") for record in played for turn in record.trajectory.turns()]
    assert any(calls)
    assert all(record.trajectory.info["tools"][0]["function"]["name"] == "calculate" for record in played)

    seed = [sys.executable, "-m", "gleanrl", "pool", str(folder), "seed", "--demonstrations", "3"]
    seeded = subprocess.run(seed, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert seeded.returncode == 0, seeded.stderr
    with ExperiencePool(folder / "experience.sqlite", read_only=True) as pool:
        seen = tomllib.loads((folder / "config.toml").read_text())["run"]["seed"]
        tasks = ToolTaskset(environment_factory=CALCULATOR, seed=seen).tasks("train", 16)
        stored = [entry.trajectory for found in pool.stored([task.id for task in tasks]).values() for entry in found]
    shown = [trajectory for trajectory in stored if trajectory.info.get("origin") == "demonstration"]
    assert len(shown) == 3
    for trajectory in shown:
        asked, answered = trajectory.sampled_turns()
        assert asked.message["tool_calls"][0]["function"]["name"] == "calculate"
        assert trajectory.info["tools"]
        assert answered.message["content"].lstrip("-").isdecimal()
