"""Tests of the buffer's documentation: the code and commands of the how-to run, and the format page is correct."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from gleanrl.buffer import TrajectoryReplayBuffer
from gleanrl.buffer.log import RECORD
from gleanrl.buffer.transfer import FORMATS
from gleanrl.cli.main import main
from tests.buffer.world import trajectory

DOCS = Path(__file__).parents[2] / "docs"
HOWTO = (DOCS / "howto" / "buffer.md").read_text(encoding="utf-8")
FORMAT = (DOCS / "reference" / "buffer_format.md").read_text(encoding="utf-8")


def test_the_code_and_the_commands_of_the_how_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, block in re.findall(r"```(python|bash)\n(.*?)```", HOWTO, re.DOTALL):
        if kind == "python":
            exec(block, names)
            continue
        names["buffer"].close()
        for line in block.splitlines():
            program, *argv = shlex.split(line)
            assert program == "gleanrl"
            assert main(argv) == 0, line
    assert len(names) > 10


def test_the_how_to_names_every_command_and_export_format() -> None:
    for command in ("stats", "verify", "view", "merge", "split", "export"):
        assert re.search(rf"\| `gleanrl buffer PATH \[?{command}\b", HOWTO)
    for name in FORMATS:
        assert f"- **`{name}`**" in HOWTO


def test_the_format_page_lists_the_fields_of_a_record_with_their_types() -> None:
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\| (\S+)(?: bytes)? \|", FORMAT, re.MULTILINE)
    documented = [(name, kind) for names, kind in rows for name in re.findall(r"`(\w+)`", names)]
    wanted = [(name, RECORD[name].str.lstrip("<|")) for name in RECORD.names or ()]
    assert documented == [(name, kind.replace("V4", "4")) for name, kind in wanted]
    assert f"{RECORD.itemsize} bytes" in FORMAT


def test_the_format_page_lists_every_file_of_a_buffer_and_of_a_checkpoint(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path / "a", priority_exponent=1.0) as buffer:
        buffer.add_trajectories([trajectory(0, task_descriptions=["x"] * 3)])
        buffer.save_checkpoint(tmp_path / "b")
    documented = re.findall(r"^\| `([\w.-]+)` \|", FORMAT.partition("## Rows")[0], re.MULTILINE)
    assert len(documented) == 7
    patterns = [re.sub(r"S+", r"\\d+", re.sub(r"N{2,}", r"\\d+", name)) for name in documented]
    for path in (tmp_path / "a").iterdir():
        assert [name for name in patterns if re.fullmatch(name, path.name)], path.name
    more = {path.name for path in (tmp_path / "b").iterdir()} - {path.name for path in (tmp_path / "a").iterdir()}
    assert more == {"state.json", "priorities.npz"}
    assert all(f"`{name}`" in FORMAT for name in more)
