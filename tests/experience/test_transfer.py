"""Tests of `gleanrl.experience.pool.transfer`: a pool is exported to parquet and imported bit for bit, faulty rows and
foreign files are refused, and the code of docs/howto/pool.md runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import ReplaySettings
from gleanrl.experience import ExperiencePool
from gleanrl.experience.pool import browse, transfer
from gleanrl.types import Score, StopReason, Trajectory, Turn
from gleanrl.utils.errors import UserError
from tests.experience.pool_world import contents, episode, solved, task
from tests.strategies import examples

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "pool.md").read_text()
ROOMY = ReplaySettings(capacity_per_task=100)

logprob = st.floats(-50, 0, width=32)
turn = st.builds(
    lambda pairs, sampled, version, text, reward: Turn(
        {"role": "assistant" if sampled else "user", "content": text},
        np.array([token for token, _ in pairs], np.int32),
        np.array([value for _, value in pairs], np.float32) if sampled else None,
        version if sampled else -1,
        reward if sampled else None,
    ),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), logprob), max_size=4),
    st.booleans(),
    st.integers(0, 2**40),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
trajectories = st.builds(
    lambda segments, value, parts, info: Trajectory(
        "x",
        "t",
        (*map(tuple, segments), tuple(episode("t").turns())),  # at least one sampled turn
        Score(value, parts=parts, explanation="why" if parts else None),
        StopReason.MAX_TURNS,
        info,
    ),
    st.lists(st.lists(turn, max_size=3), max_size=2),
    st.floats(0.5, 1e300),
    st.dictionaries(st.text("ab", max_size=2), st.floats(allow_nan=False), max_size=2),
    st.dictionaries(st.text("ab", max_size=2), st.none() | st.integers() | st.lists(st.floats(allow_nan=False))),
)


def bits(trajectory: Trajectory) -> Any:
    """Everything of a trajectory, its arrays as bytes."""
    described = [
        [
            (t.message, t.tokens.tobytes(), None if t.logprobs is None else t.logprobs.tobytes(), t.version, t.reward)
            for t in segment
        ]
        for segment in trajectory.segments
    ]
    return described, replace(trajectory, segments=())


def held(path: Path) -> list[tuple[Any, ...]]:
    with browse.reading(path) as db:
        found = [entry for entry in browse.entries(db) if isinstance(entry, browse.Entry)]
    return [(bits(e.stored.trajectory), e.task, replace(e.line, key=0, uses=0)) for e in found]


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(several=st.lists(trajectories, min_size=1, max_size=3), version=st.integers(0, 2**40))
def test_an_exported_pool_is_imported_bit_for_bit(
    several: list[Trajectory], version: int, tmp_path_factory: Any
) -> None:
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("pools")
    with ExperiencePool(folder / "a.sqlite", ROOMY, tokenizer="one") as pool:
        for each in several:
            pool.add(task("t"), each, step=3, version=version, temperature=0.7, attempts=4, successes=1)
        stored = pool.stats()["trajectories"]
    assert transfer.export_parquet(folder / "a.sqlite", folder / "a.parquet") == (stored, 0, [])
    assert transfer.parquet_tokenizer(folder / "a.parquet") == "one"
    with ExperiencePool(folder / "b.sqlite", ROOMY) as pool:
        assert transfer.import_parquet(pool, folder / "a.parquet").stored == stored
        assert transfer.import_parquet(pool, folder / "a.parquet").stored == 0  # all are duplicates
        assert pool.verify() == []
    assert held(folder / "b.sqlite") == held(folder / "a.sqlite")


def test_a_trajectory_whose_text_is_no_unicode_is_left_out_of_an_export(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with ExperiencePool(tmp_path / "a.sqlite", ROOMY) as pool:
        whole, odd = episode("t", tokens=(1,)), episode("t", tokens=(2,))
        odd = replace(odd, score=replace(odd.score, explanation="\ud83d"))
        for each in (whole, odd):
            pool.add(task("t"), each, attempts=4, successes=2)
    stored, failures, [left_out] = transfer.export_parquet(tmp_path / "a.sqlite", tmp_path / "a.parquet")
    assert (stored, failures) == (1, 0)
    assert left_out.startswith("trajectory 2: ")


@pytest.mark.parametrize("how", ["import", "seed"])
def test_a_copied_trajectory_keeps_the_name_of_its_source_unless_a_run_sampled_it(tmp_path: Path, how: str) -> None:
    pytest.importorskip("pyarrow")
    with ExperiencePool(tmp_path / "a.sqlite", ROOMY) as pool:
        pool.observe([solved("t", 2, 4)], 0)
        pool.start_run()
        pool.observe([solved("u", 1, 4)], 1)
        pool.add(task("t"), episode("t", tokens=(70, 5)), source="teacher")
        assert pool.sources() == {"earlier": 2, "own": 1, "teacher": 1}
    transfer.export_parquet(tmp_path / "a.sqlite", tmp_path / "a.parquet")
    for label, sources in ((None, {how: 3, "teacher": 1}), ("expert", {"expert": 4})):
        with ExperiencePool(tmp_path / f"{label}.sqlite", ROOMY) as pool:
            if how == "import":
                transfer.import_parquet(pool, tmp_path / "a.parquet", label=label)
            else:
                transfer.seed_from_pool(pool, tmp_path / "a.sqlite", label=label)
            assert pool.sources() == sources
            pool.start_run()
            assert pool.sources() == sources


def test_faulty_rows_are_left_out_of_an_import(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    with ExperiencePool(tmp_path / "a.sqlite", ROOMY) as pool:
        pool.observe([solved("t", 3, 4)], 0)
    transfer.export_parquet(tmp_path / "a.sqlite", tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    whole = table.column("logprobs").to_pylist()[0]
    spoilt: dict[str, Any] = {
        "logprobs": [None, None, None, None, -0.5],  # one is missing
        "logprobs above 0": [None, None, None, 5.0, -0.5],
        "logprobs that were never recorded": [None, None, None, 0.0, 0.0],
        "logprobs not finite": [None, None, None, -float("inf"), -0.5],
        "mask": [False, False, False, False, True],
        "tokens": [1, 2, 3, 0],
        "turn_tokens": [4, 2],
        "segment_turns": [1],
        "messages": "[",
        "stop": "never",
        "score": float("nan"),
        "trajectory_id": None,
        "temperature": 0.0,
        "turn_version": [-1, None],
        "turn_reward": [0.5, None],  # the first turn is context
        "successes": 5,
        "attempts": 2**62,
        "source": "two words",
    }
    for how, value in spoilt.items():
        column = how.partition(" ")[0]
        cells = [value, *table.column(column).to_pylist()[1:]]
        index = table.schema.get_field_index(column)
        other = table.set_column(index, table.schema.field(index), arrow.array(cells, table.schema.field(index).type))
        parquet.write_table(other, tmp_path / "b.parquet")
        with ExperiencePool(tmp_path / f"{how}.sqlite", ROOMY) as pool:
            moved = transfer.import_parquet(pool, tmp_path / "b.parquet")
        assert (moved.stored, dict(moved.left_out)) == (2, {"faulty": 1}), how
    assert [value is None for value in whole] == [True] * 3 + [False] * 2  # the cells changed above


@pytest.mark.parametrize(("rows", "tokens"), [(1, 10**9), (4, 10**9), (1000, 11), (1000, 10**9)])
def test_an_import_in_batches_gives_the_same_pool_as_adding_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rows: int, tokens: int
) -> None:
    """The same successes are stored and evicted, and a faulty row is left out alone and named in the log."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    with ExperiencePool(tmp_path / "a.sqlite", ROOMY) as pool:
        pool.observe([solved(name, 3, 4, first=7 * i) for i, name in enumerate("tuv")], 2)
    transfer.export_parquet(tmp_path / "a.sqlite", tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    index, stops = table.schema.get_field_index("stop"), table.column("stop").to_pylist()
    odd = table.set_column(index, table.schema.field(index), arrow.array([*stops[:4], "never", *stops[5:]]))
    twice = arrow.concat_tables([odd, odd])  # the same tokens are stored once
    parquet.write_table(twice, tmp_path / "b.parquet")
    monkeypatch.setattr(transfer, "BATCH", rows)
    monkeypatch.setattr(transfer, "BATCH_TOKENS", tokens)
    tight = ReplaySettings(capacity_per_task=2, select="newest")
    with ExperiencePool(tmp_path / "many.sqlite", tight) as pool:
        moved = transfer.import_parquet(pool, tmp_path / "b.parquet")
        assert pool.verify() == []
    with ExperiencePool(tmp_path / "one.sqlite", tight) as pool, browse.reading(tmp_path / "a.sqlite") as db:
        entries = [entry for entry in browse.entries(db) if isinstance(entry, browse.Entry)]
        stored = 0
        for e in [*entries[:4], *entries[5:]] * 2:
            known = {"attempts": e.line.attempts, "successes": e.line.successes, "step": e.line.step}
            stored += pool.add(e.task, e.stored.trajectory, version=e.line.version, **known)
    assert moved.stored == stored
    assert moved.left_out == {"faulty": 2, "there already, no room, or not fit to train on": 16 - stored}
    assert contents(tmp_path / "many.sqlite") == contents(tmp_path / "one.sqlite")
    assert "row 4 is left out: 'never' is not a valid StopReason" in caplog.text
    assert "row 13 is left out" in caplog.text


def test_rows_before_a_damaged_part_of_the_file_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    with ExperiencePool(tmp_path / "a.sqlite", ROOMY) as pool:
        pool.observe([solved("t", 7, 8)], 2)
    transfer.export_parquet(tmp_path / "a.sqlite", tmp_path / "a.parquet")
    rows = list(transfer._rows(tmp_path / "a.parquet"))

    def torn(source: Path) -> Any:
        yield from rows[:5]
        raise UserError("it is damaged; what came before it is stored")

    monkeypatch.setattr(transfer, "_rows", torn)
    with ExperiencePool(tmp_path / "b.sqlite", ROOMY) as pool:
        with pytest.raises(UserError, match="what came before it is stored"):
            transfer.import_parquet(pool, tmp_path / "a.parquet")
        assert pool.stats()["trajectories"] == 5


def test_files_that_are_no_export_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "text.parquet").write_text("no")
    parquet.write_table(arrow.table({"tokens": [1]}), tmp_path / "other.parquet")
    for name, reason in (("none", "no file"), ("text", "not a whole parquet"), ("other", "was not written by")):
        with pytest.raises(UserError, match=reason):
            transfer.parquet_tokenizer(tmp_path / f"{name}.parquet")
    ExperiencePool(tmp_path / "a.sqlite").close()
    with pytest.raises(UserError, match="is no parquet file"):
        transfer.export_parquet(tmp_path / "a.sqlite", tmp_path / "a.sqlite")


@pytest.mark.parametrize(
    ("pool", "source", "empty", "trust", "fits"),
    [
        ("a", "a", False, False, True),
        ("a", "b", True, True, False),
        ("a", None, True, False, False),
        ("a", None, True, True, True),
        (None, "a", True, False, True),
        (None, "a", False, False, False),
        (None, "a", False, True, True),
        (None, None, False, False, False),
    ],
)
def test_an_import_is_refused_unless_the_tokenizers_match_or_are_trusted(
    tmp_path: Path, pool: str | None, source: str | None, empty: bool, trust: bool, fits: bool
) -> None:
    path = tmp_path / "a.sqlite"
    with ExperiencePool(path, tokenizer=pool) as made:
        if not empty:
            made.observe([solved("t", 1, 2)], 0)
    if fits:
        assert transfer.check_tokenizers(path, source, "it", trust=trust) == pool
    else:
        with pytest.raises(UserError):
            transfer.check_tokenizers(path, source, "it", trust=trust)


def test_the_code_of_the_docs_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "pool.md", "exec"), {})
