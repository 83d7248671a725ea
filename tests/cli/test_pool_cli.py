"""Tests of the exact output and settings of `gleanrl pool`, called in this process and without models."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gleanrl.cli import common
from gleanrl.cli import pool as pool_cli
from gleanrl.cli.main import main
from gleanrl.config.settings import ReplaySettings
from gleanrl.experience import ExperiencePool
from gleanrl.types import Message, Score, StopReason, Trajectory, Turn
from tests.experience.pool_world import contents, episode, solved, task


class Shell:
    """Runs `gleanrl pool` in a folder with the run ``runs/a``."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def __call__(self, *argv: str) -> str:
        """Run a command that must succeed; return its output."""
        status, out, err = self.tried(*argv)
        assert (status, err) == (0, "")
        return out

    def tried(self, *argv: str) -> tuple[int, str, str]:
        status = main(["pool", *argv])
        out, err = self._capsys.readouterr()
        return status, out, err


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pool of a run ``a``: task x with 3 of 4 solved at step 1, y with 1 of 4 at step 9, and z retired."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[replay]\nenabled = true\nselect = "newest"\n')
    with ExperiencePool(folder / "experience.sqlite", tokenizer="one") as pool:
        pool.observe([solved("x", 3, 4, version=1), solved("z", 2, 4, version=1)], 1, temperature=0.5)
        pool.observe([solved("z", 4, 4, version=2)], 2)
        pool.observe([solved("z", 4, 4, version=3), solved("y", 1, 4, version=9)], 9)
        pool.used([1, 1, 6])
    return folder / "experience.sqlite"


@pytest.fixture
def say(tmp_path: Path, pool: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


def test_the_list_shows_every_column_newest_first(say: Shell) -> None:
    out = say("a", "list").splitlines()
    assert {line.index(text) for line, text in zip(out, ("solved", "1/4", "4/4"), strict=False)} == {
        out[0].index("solved")
    }
    lines = [line.split() for line in out]
    assert lines[0] == ["key", "version", "step", "uses", "entropy", "temperature", "bytes", "source", "solved", "task"]
    assert [line[:6] + line[7:] for line in lines[1:]] == [
        ["6", "9", "9", "1", "0.500", "1", "own", "1/4", "y"],
        ["5", "1", "1", "0", "0.500", "0.5", "own", "4/4", "retired", "z"],
        ["4", "1", "1", "0", "0.500", "0.5", "own", "4/4", "retired", "z"],
        ["3", "1", "1", "0", "0.500", "0.5", "own", "3/4", "x"],
        ["2", "1", "1", "0", "0.500", "0.5", "own", "3/4", "x"],
        ["1", "1", "1", "2", "0.500", "0.5", "own", "3/4", "x"],
    ]
    with ExperiencePool(say.folder / "runs/a/experience.sqlite", read_only=True) as opened:
        assert sum(int(line[6]) for line in lines[1:]) == opened.stats()["bytes"]
    assert say("a", "list", "--task", "w\x1b") == "no trajectory of task w\\x1b\n"


def test_table_aligns_numbers_right_and_texts_left(capsys: pytest.CaptureFixture[str]) -> None:
    common.table(("n", "of", "task"), [(1, 20, "ab"), (300, 4, "c")], left=1)
    assert capsys.readouterr().out == "  n  of  task\n  1  20  ab\n300   4  c\n"


def test_the_list_has_at_most_limit_lines(say: Shell) -> None:
    with ExperiencePool(say.folder / "many.sqlite") as many:
        for number in range(60):
            many.observe([solved(f"t{number}", 1, 4)], number)
    assert [len(say("many.sqlite", "list", *argv).splitlines()) - 1 for argv in ((), ("--limit", "7"))] == [50, 7]
    assert len(say("many.sqlite", "list", "--limit", "0").splitlines()) - 1 == 60
    for wrong in ("-1", "x"):
        with pytest.raises(SystemExit, match="2"):
            say.tried("many.sqlite", "list", f"--limit={wrong}")


def test_stats_prints_sizes_entropy_age_and_uses(say: Shell, pool: Path) -> None:
    with ExperiencePool(pool) as opened:
        opened.add(task("new"), episode("new", tokens=(3, 4), logprobs=(-1.0, -2.0)), version=5, step=9)
        opened.evict([3, 4, 5], "age")
    lines = say("a").splitlines()
    assert re.fullmatch(
        r"runs/a/experience.sqlite: 4 successes of 3 tasks, \d+ B of records in a file of [\d.]+ KiB", lines[0]
    )
    table = [line.split() for line in lines[1:6]]
    assert table == [
        ["solved", "tasks", "replayable", "retired", "trajectories"],
        ["not", "tried", "1", "1", "0", "1"],
        ["1/4", "1", "1", "0", "1"],
        ["3/4", "1", "1", "0", "2"],
        ["4/4", "1", "0", "1", "0"],
    ]
    assert lines[6:] == [
        "sources: import 1, own 3",
        "entropy as recorded, nats a token: 0.500 to 1.500, median 0.500",
        "age in versions at step 9: 0 to 8, median 6",
        "uses: 0 to 2, median 0; 2 never used",
        "evicted so far: age 3",
        "tokenizer: one",
    ]


def test_on_a_terminal_long_actions_show_their_progress_on_standard_error(
    say: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat any stream as a terminal
    for pool, *action, name in (
        ("a", "verify", "verifying"),
        ("a", "export", "a.parquet", "exporting"),
        ("b.sqlite", "seed", "--pool", "a", "seeding"),
    ):
        status, out, err = say.tried(pool, *action)
        assert (status, len(out.splitlines())) == (0, 1)
        assert re.search(rf"{name}: 6(/6)? in ", err), err


def test_stats_and_verify_work_on_an_empty_pool(say: Shell) -> None:
    ExperiencePool(say.folder / "empty.sqlite").close()
    lines = say("empty.sqlite").splitlines()
    assert lines[0].startswith("empty.sqlite: 0 successes of 0 tasks, 0 B of records in a file of")
    assert lines[-2:] == ["evicted so far: none", "tokenizer: not known"]
    assert len(lines) == 4
    assert say("empty.sqlite", "verify") == "empty.sqlite: sound; 0 successes of 0 tasks read\n"


def test_show_prints_every_part_of_a_trajectory(say: Shell) -> None:
    asked = Turn({"role": "user", "content": "?"}, np.arange(40, dtype=np.int32))
    call: Message = {"role": "assistant", "content": "ok", "tool_calls": [{"id": "\x1b"}]}  # type: ignore[typeddict-unknown-key]
    said = Turn(call, np.array([7, 8, 9]), np.array([-0.5, -0.25, -0.75], np.float32), 3, 0.25)
    score = Score(1.0, parts={"speed": 0.5}, explanation="all\x07 well")
    whole = Trajectory("id\n", "t", ((asked, said), (asked, said)), score, StopReason.DONE, {"note": "\x07"})
    with ExperiencePool(say.folder / "p.sqlite") as opened:
        opened.add(task("t"), whole, step=4, temperature=0.8)
        opened.used([1])
    lines = say("p.sqlite", "show", "1").splitlines()
    assert lines[:8] == [
        "trajectory 1 of task t, id\\n",
        "score 1, speed 0.5; ended by done",
        "6 of 86 tokens sampled, entropy 0.5000",
        "source import, sampled by version 3 at temperature 0.8, stored in step 4, used 1 times",
        "explanation: all\\x07 well",
        "info note: \\x07",
        "",
        "segment 1 of 2",
    ]
    assert [line for line in lines if line.startswith(("segment", "["))] == [
        "segment 1 of 2",
        "[1] user: context, 40 tokens",
        "[2] assistant: sampled by version 3, 3 tokens, mean log-prob -0.5000, reward 0.25",
        "segment 2 of 2",
        "[1] user: context, 40 tokens",
        "[2] assistant: sampled by version 3, 3 tokens, mean log-prob -0.5000, reward 0.25",
    ]
    rows = [line for line in lines if re.match(r"    \d", line)]
    assert " ".join(row.strip() for row in rows[:2]) == " ".join(map(str, range(40)))
    assert all(len(row) <= pool_cli.WIDTH for row in rows)
    assert len(rows[0]) + len(rows[1].split()[0]) >= pool_cli.WIDTH
    assert "    7:-0.5 8:-0.25 9:-0.75" in rows
    assert lines.count("    tool calls: [{'id': '\\x1b'}]") == 2


def test_show_prints_a_single_segment_and_a_single_token_in_the_singular(say: Shell) -> None:
    asked = Turn({"role": "user", "content": "?"}, np.array([4]))
    said = Turn({"role": "assistant", "content": "a\nb"}, np.array([5]), np.array([-1.0], np.float32), 0)
    with ExperiencePool(say.folder / "p.sqlite") as opened:
        opened.add(task("t"), Trajectory("id", "t", ((asked, said),), Score(1.0), StopReason.DONE, {}))
    out = say("p.sqlite", "show", "1")
    assert "segment" not in out
    assert "[2] assistant: sampled by version 0, 1 token, mean log-prob -1.0000\n    | a\n    | b\n    5:-1.0\n" in out


def test_show_escapes_control_characters_and_refuses_an_unknown_trajectory(say: Shell) -> None:
    asked = Turn({"role": "user", "content": "\x1b[2Jgo\nnow"}, np.array([5, 6]))
    said = Turn({"role": "assistant", "content": "ok"}, np.array([7, 8]), np.log(np.array([0.5, 0.25])), 3)
    odd = Trajectory("id", "t", ((asked, said),), Score(1.0), StopReason.DONE, {"note": "\x07"})
    with ExperiencePool(say.folder / "p.sqlite") as opened:
        opened.add(task("t"), odd)
    out = say("p.sqlite", "show", "1")
    assert "    | \\x1b[2Jgo\n    | now\n    5 6\n" in out
    assert "sampled by version 3, 2 tokens" in out
    assert "7:-0.6931472 8:-1.3862944\n" in out
    assert all(c.isprintable() or c == "\n" for c in out)
    assert "has no trajectory 7" in say.tried("p.sqlite", "show", "7")[2]


def test_prune_evicts_by_count_retirement_and_age(say: Shell, pool: Path) -> None:
    before = contents(pool)
    assert "say what to evict" in say.tried("a", "prune")[2]
    assert contents(pool) == before
    out = say("a", "prune", "--keep", "2", "--retired", "--replay.select", "newest")
    assert out == "evicted 3 successes (retired: 2, more than 2 a task: 1); 3 successes left\n"
    with ExperiencePool(pool, read_only=True) as opened:
        assert [stored.key for stored in opened.stored(["x"])["x"]] == [2, 3]
        assert opened.verify() == []
    assert "(age: 2); 1 success left" in say("a", "prune", "--max-age", "7")


def test_prune_uses_the_run_s_settings_unless_the_command_line_changes_them(say: Shell, pool: Path) -> None:
    def left(*argv: str) -> list[int]:
        say("a", "prune", "--keep", "2", *argv)
        with ExperiencePool(pool, read_only=True) as opened:
            return [stored.key for stored in opened.stored(["x"])["x"]]

    with ExperiencePool(pool, ReplaySettings(capacity_per_task=9)) as opened:
        opened.add(task("x"), episode("x", tokens=(90, 5), logprobs=(-9.0, -9.0)), step=9)
    assert left() == [3, 7]  # the newest, because the run's configuration has select = "newest"
    assert "unknown option --learner.sigma" in say.tried("a", "prune", "--keep", "1", "--learner.sigma", "1")[2]
    with ExperiencePool(pool, ReplaySettings(capacity_per_task=9)) as opened:
        opened.add(task("x"), episode("x", tokens=(91, 5), logprobs=(-0.1, -0.1)), step=9)
    assert left("--replay.select", "lowest_entropy") == [3, 8]
    (say.folder / "mine.py").write_text(
        "from gleanrl.experience.pool.ranking import newest, ranking\n"
        "mine = ranking('mine', keep=lambda candidate: -candidate.order)(newest.function)\n"
    )
    assert say("a", "prune", "--keep", "1", "--replay.select", "mine.py:mine").startswith("evicted ")
    with ExperiencePool(pool, read_only=True) as opened:
        assert [stored.key for stored in opened.stored(["x"])["x"]] == [3]
    complaint = say.tried("a", "prune", "--keep", "1", "--replay.select", "newst")[2]
    assert "replay.select: unknown value 'newst'; did you mean 'newest'" in complaint


def test_a_change_after_a_mark_warns_that_a_resumed_run_undoes_it(say: Shell, pool: Path) -> None:
    assert say("a", "prune", "--max-age", "8") == "evicted nothing; 6 successes left\n"
    with ExperiencePool(pool) as opened:
        opened.mark()
    lines = say("a", "prune", "--max-age", "7").splitlines()
    assert lines[0] == "evicted 5 successes (age: 5); 1 success left"
    assert lines[1].startswith("a resumed run goes back to its checkpoint, which undoes this")
    assert len(lines) == 2


def test_a_damaged_trajectory_is_named_and_neither_shown_nor_exported(say: Shell, pool: Path) -> None:
    assert "sound" in say("a", "verify")
    db = sqlite3.connect(pool)
    db.execute("UPDATE blobs SET data = zeroblob(length(data)) WHERE id = 2")
    db.commit()
    db.close()
    status, out, err = say.tried("a", "verify")
    assert (status, err) == (1, "")
    assert len(out.splitlines()) == 1
    assert out.startswith("runs/a/experience.sqlite: trajectory 2 of task 'x'")
    assert "damaged" in say.tried("a", "show", "2")[2]
    pytest.importorskip("pyarrow")
    status, out, err = say.tried("a", "export", "a.parquet")
    assert (status, out) == (1, "a.parquet: 5 successes\n")
    assert err.startswith("left out: ")
    assert "2" in err


def test_seeding_from_an_unknown_tokenizer_needs_trust_tokenizer(say: Shell) -> None:
    with ExperiencePool(say.folder / "b.sqlite") as unknown:
        unknown.observe([solved("x", 2, 4, first=50)], 0)
    argv = ("a", "seed", "--pool", "b.sqlite")
    status, out, err = say.tried(*argv)
    assert (status, out) == (2, "")
    assert "--trust-tokenizer" in err
    assert say(*argv, "--trust-tokenizer") == "stored 2 successes\n"
    again = say(*argv, "--trust-tokenizer")
    assert again == "stored 0 successes; left out 2: there already, no room, or not fit to train on\n"
    assert "tokenizer: one\n" in say("a")
    assert say("c.sqlite", "seed", "--pool", "a") == "stored 8 successes\n"
    assert "tokenizer: one\n" in say("c.sqlite")
    with ExperiencePool(say.folder / "c.sqlite", read_only=True) as made:
        assert {stored.version for stored in made.stored(["x"])["x"]} == {0}


def test_a_seeded_pool_counts_age_from_its_newest_step(say: Shell) -> None:
    with ExperiencePool(say.folder / "b.sqlite", tokenizer="one") as other:
        other.observe([solved("w", 1, 4, version=40)], 40)
    say("a", "seed", "--pool", "b.sqlite")
    assert say("a", "list", "--task", "w").splitlines()[1].split()[:3] == ["7", "9", "9"]


def test_a_name_is_tried_as_a_path_before_it_is_a_run_under_runs(say: Shell, pool: Path) -> None:
    run = say.folder / "odd.sqlite"
    run.mkdir()
    (run / "config.toml").write_text("")
    pool.rename(run / "experience.sqlite")
    assert say("odd.sqlite").startswith("odd.sqlite/experience.sqlite: 6 successes")
    status, _, err = say.tried("a", "list")
    assert status == 2
    assert err.endswith("no experience pool at runs/a/experience.sqlite\n")
    (say.folder / "runs" / "a" / "config.toml").write_text("[replay]\nenabled = false\n")
    assert "the run was made without replay.enabled = true" in say.tried("a", "list")[2]
    assert say.tried("b.sqlite", "list")[2].endswith("there is no experience pool at b.sqlite\n")
    (say.folder / "a").mkdir()
    (say.folder / "a" / "config.toml").write_text(f'[replay]\npath = "{run}/experience.sqlite"\n')
    assert say("a").startswith(f"{run}/experience.sqlite: 6 successes")
    assert say("a", "prune", "--keep", "9") == "evicted nothing; 6 successes left\n"


def test_a_closed_output_pipe_is_no_error(tmp_path: Path, pool: Path) -> None:
    with ExperiencePool(tmp_path / "many.sqlite") as many:  # more than a buffer holds
        many.observe([solved(f"{'long' * 60}{number}", 1, 4) for number in range(99)], 0)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        command = [sys.executable, "-m", "gleanrl", "pool", "many.sqlite", "list", "--limit", "0"]
        ended = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=240, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_failures_are_listed_shown_exported_and_pruned_apart_from_successes(say: Shell) -> None:
    pytest.importorskip("pyarrow")
    path = say.folder / "runs" / "b" / "experience.sqlite"
    path.parent.mkdir()
    (path.parent / "config.toml").write_text("[replay]\nenabled = true\nkeep_failures = 3\n")
    with ExperiencePool(path, ReplaySettings(keep_failures=3), tokenizer="one") as opened:
        opened.observe([solved("x", 1, 4), solved("unsolved", 0, 1), solved("y", 2, 2)], 1)
    lines = [line.split(",")[0] for line in say("b").splitlines()[:2]]
    assert lines == ["runs/b/experience.sqlite: 1 success of 1 task", "4 failures of 2 tasks"]
    assert say("b", "verify").endswith("sound; 1 success of 1 task and 4 failures of 2 tasks read\n")
    listed = say("b", "list", "--failures").splitlines()
    assert [line.split()[0] for line in listed] == ["key", "-4", "-3", "-2", "-1"]
    shown = say("b", "show", "-3")
    assert shown.startswith("failure -3 of task x")
    assert "score 0;" in shown
    assert "no failure -9; `gleanrl pool b list --failures`" in say.tried("b", "show", "-9")[2]

    assert say("b", "export", "a.parquet") == "a.parquet: 1 success\n"
    assert say("b", "export", "b.parquet", "--failures") == "b.parquet: 1 success and 4 failures\n"
    status, _, complaint = say.tried("runs/b/experience.sqlite", "import", "b.parquet", "--failures")
    assert (status, "name the run's folder" in complaint) == (2, True)
    taken = say("new.sqlite", "import", "b.parquet", "--failures", "--replay.keep_failures", "2")
    assert taken.startswith("stored 1 success and 3 failures; left out 1: ")
    before = contents(path)
    for again in (("import", "b.parquet", "--source", "again"), ("seed", "--pool", "new.sqlite")):
        assert say("b", *again, "--failures").startswith("stored 0 successes and 0 failures; left out ")
        assert contents(path) == before

    pruned = say("b", "prune", "--keep-failures", "1")
    assert pruned == "evicted 2 failures (more than 1 a task: 2); 1 success and 2 failures left\n"
    assert "failures evicted so far: newer 2\n" in say("b")
