"""Tests of `gleanrl buffer` on buffers, checkpoints of several ranks and RLinf's directories."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer
from gleanrl.cli.main import main
from tests.buffer.world import assert_same, trajectory

ENDS = {(1, 0): "terminations", (3, 0): "truncations", (5, 1): "terminations"}


class Shell:
    """Runs commands in a folder with a buffer ``a`` and a folder ``ranks`` with the checkpoints of two ranks."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def __call__(self, *argv: object) -> list[str]:
        """Run a command that must succeed; return its output lines."""
        status, out, err = self.tried(*argv)
        assert status == 0, err
        return out.splitlines()

    def tried(self, *argv: object) -> tuple[int, str, str]:
        status = main(["buffer", *map(str, argv)])
        out, err = self._capsys.readouterr()
        return status, out, err

    def refused(self, *argv: object) -> str:
        """Run a command that must fail; return its one line of error."""
        status, out, err = self.tried(*argv)
        assert (status, out) == (2, "")
        [line] = [line for line in err.splitlines() if line.startswith("gleanrl: ")]
        assert "Traceback" not in err
        return line


def made(number: int) -> TensorTrajectory:
    said = {"success": [None, True, False][number % 3], "model_weights_id": f"v{number}", "max_episode_length": 9}
    return trajectory(
        number, wide=False, extra=number == 4, ends=ENDS, task_descriptions=["lift", "push\x1b[31m", "lift"], **said
    )


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    with TrajectoryReplayBuffer("a", seed=5, segment_bytes=1 << 16) as buffer:
        buffer.add_trajectories([made(number) for number in range(5)])
        buffer.save_checkpoint("ranks/rank-0")
        buffer.clear()
        buffer.add_trajectories([made(number) for number in range(5, 8)])
        buffer.save_checkpoint("ranks/rank-1")
    return Shell(tmp_path, capsys)


def test_stats_prints_sizes_outcomes_and_fields(say: Shell) -> None:
    lines = say("ranks")
    assert re.fullmatch(r"ranks: 8 trajectories, 144 rows \(T \* B\), [\d.]+ KiB", lines[0])
    assert lines[1].split() == ["trajectories", "rows", "episodes", "size", "part"]
    assert [line.split()[:3] + line.split()[5:] for line in lines[2:4]] == [
        ["5", "90", "15", "ranks/rank-0"],
        ["3", "54", "9", "ranks/rank-1"],
    ]
    assert "episodes that ended: 24" in lines
    assert "of trajectories: 6 steps; 3 environments" in lines
    assert "weights: versions 0 to 7" in lines
    assert "outcomes: 3 successes, 2 failures, 3 unknown; a human acted in 0" in lines
    assert "fields 1 of 2: 7 trajectories" in lines
    assert "fields 2 of 2: 1 trajectories" in lines
    assert [line.split() for line in lines if "forward_inputs" in line] == [
        ["[1]", "4", "B", "int32", "forward_inputs.extra"]
    ]
    assert say("ranks", "stats") == lines
    with TrajectoryReplayBuffer("empty"):
        pass
    assert len(say("empty")) == 1


def test_a_trajectory_is_shown_with_its_episodes_and_values(say: Shell) -> None:
    lines = say("ranks/rank-0", "view", 1)
    assert lines[:2] == [
        "trajectory 1: 6 steps of 3 environments, 18 rows",
        "a success; weights v1; at most 9 steps an episode",
    ]
    [rewards] = [line.split() for line in lines if " rewards " in line]
    assert rewards[:5] == ["[6,", "3,", "1]", "142.9", "157.4"]
    assert rewards[-4:] == ["142.9", "143", "143.1", "145.7"]
    table = [re.split(r" {2,}", line.strip()) for line in lines[-3:]]
    total = sum((1000 + t * 20) / 7 for t in range(6))
    assert table[0] == ["0", f"{total:.6g}", "2", "2, 2, 2 unfinished", "lift"]
    assert table[1] == ["1", f"{total + 6 / 7:.6g}", "1", "6", "push\\x1b[31m"]
    assert table[2][2:] == ["0", "6 unfinished", "lift"]
    assert "2 checkpoints, each with its own ids; view one: ranks/rank-0, ranks/rank-1" in say.refused(
        "ranks", "view", 1
    )
    assert say.refused("ranks/rank-0", "view", 9) == "gleanrl: no trajectory 9: the buffer has 0 to 4"


def test_merge_joins_buffers_and_split_divides_them(say: Shell) -> None:
    assert say("ranks", "merge", "all", "a")[-1] == "all: 11 trajectories with 198 rows"
    with TrajectoryReplayBuffer("all", read_only=True) as buffer:
        for place, number in enumerate([0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7]):
            assert_same(buffer.trajectory(place), made(number))
    with TrajectoryReplayBuffer("all") as buffer:  # the merged buffer is writable
        assert buffer.add_trajectories([made(0)]) == [11]
    lines = say("ranks", "split", "parts", 3)
    assert [line.split() for line in lines] == [
        ["trajectories", "rows", "part"],
        ["3", "54", "parts/rank-0"],
        ["2", "36", "parts/rank-1"],
        ["3", "54", "parts/rank-2"],
    ]
    for rank in range(3):  # loading a split part equals loading this rank's share of the whole
        with TrajectoryReplayBuffer(rank=rank) as ours, TrajectoryReplayBuffer(rank=rank) as theirs:
            ours.load_checkpoint("parts", is_distributed=True, local_rank=rank, world_size=3)
            theirs.load_checkpoint("ranks", is_distributed=True, local_rank=rank, world_size=3)
            assert torch.equal(ours.sample(30)["actions"], theirs.sample(30)["actions"])
    assert say("parts", "verify") == ["parts: sound; 8 trajectories with 144 rows read"]


def test_an_export_for_rlinf_can_be_merged_back(say: Shell) -> None:
    assert say("ranks", "export", "rlinf", "theirs")[-1] == "theirs: 8 trajectories"
    assert say("theirs", "verify") == ["theirs: sound; 8 trajectories with 144 rows read"]
    assert say("theirs")[1] == "episodes that ended: 24"
    assert say("theirs", "view", 5)[0] == "trajectory 5: 6 steps of 3 environments, 18 rows"
    say("theirs", "merge", "ours")
    with TrajectoryReplayBuffer("ours", read_only=True) as buffer:
        for number in range(8):
            theirs = buffer.trajectory(number)
            assert torch.equal(theirs.rewards, made(number).rewards)  # type: ignore[arg-type]
            assert theirs.task_descriptions == ("lift", "push\x1b[31m", "lift")


def test_damage_is_named_and_merge_skip_damaged_saves_the_other_trajectories(say: Shell) -> None:
    [segment] = (say.folder / "a").glob("*-rows-000-*")
    data = bytearray(segment.read_bytes())
    with TrajectoryReplayBuffer("a", read_only=True) as buffer:
        table = buffer.storage.snapshot.tables[0]
        place = int(buffer.storage.record(6)["row"]) % table.capacity[0] * table.schema.row_nbytes
    data[place + 3] ^= 4
    segment.write_bytes(data)
    status, out, _ = say.tried("a", "verify")
    assert (status, out) == (1, "a: trajectory 6: its rows are not what was written (checksum)\n")
    status, out, err = say.tried("a", "merge", "saved", "--skip-damaged")
    assert (status, out) == (1, "saved: 2 trajectories with 36 rows\n")
    assert "left out: a: trajectory 6: its rows are not what was written (checksum)" in err
    with TrajectoryReplayBuffer("saved", read_only=True) as buffer:
        assert_same(buffer.trajectory(1), made(7))


def test_wrong_arguments_are_one_line_and_write_nothing(say: Shell) -> None:
    (say.folder / "other").mkdir()
    (say.folder / "other" / "thing.txt").write_text("x")
    assert say.refused("nowhere") == "gleanrl: nowhere: there is no such folder"
    assert "other: no checkpoint of a buffer" in say.refused("other")
    assert "ranks: there already; name a new folder" in say.refused("a", "merge", "ranks")
    assert "ranks: there already" in say.refused("a", "split", "ranks", 2)
    assert "ranks: there already" in say.refused("a", "export", "rlinf", "ranks")
    assert "3 trajectories cannot be split into 4 parts" in say.refused("a", "split", "b", 4)
    assert "cannot be split into 0 parts" in say.refused("a", "split", "b", 0)
    assert "unknown option --rows" in say.refused("a", "stats", "--rows", "3")
    for wrong in (["a", "view", "-1"], ["a", "export", "zip", "b"], ["a", "polish"]):
        with pytest.raises(SystemExit, match="2"):
            say.tried(*wrong)
    assert sorted(path.name for path in say.folder.iterdir()) == ["a", "other", "ranks"]


TYPES = {  # the numbers that `view` shows for the values 3 and 0: lowest, highest, then each value
    **dict.fromkeys((torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8), "0 3 3 0"),
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2), "0 3 3 0"),
    torch.bool: "0 1 1 0",
    **dict.fromkeys((torch.complex64, torch.complex128), "3+0j 0+0j"),  # complex numbers have no order
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_view_shows_numbers_of_every_dtype(say: Shell, dtype: torch.dtype) -> None:
    with TrajectoryReplayBuffer("typed") as buffer:
        values = torch.tensor([3, 0]).to(dtype).reshape(2, 1, 1)
        given = {"rewards": torch.ones(2, 1, 1), "versions": torch.zeros(2, 1, 0), "curr_obs": {"typed": values}}
        buffer.add_trajectories([TensorTrajectory.of(given)])
    lines = say("typed", "view", 0)
    name = str(dtype).removeprefix("torch.")
    [shown] = [line.split() for line in lines if "curr_obs.typed" in line]
    assert [word for word in shown[3:] if word not in (name, "curr_obs.typed")] == TYPES[dtype].split()
    assert name in shown
    [nothing] = [line.split() for line in lines if "versions" in line]
    assert nothing == ["[2,", "1,", "0]", "float32", "versions"]
    assert say("typed", "verify") == ["typed: sound; 1 trajectories with 2 rows read"]
    assert say("typed", "stats")[0].startswith("typed: 1 trajectories, 2 rows")


def test_verify_shows_its_progress_on_a_terminal(say: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat any stream as a terminal
    _, _, err = say.tried("ranks", "verify")
    assert "verifying: 8/8 in " in err
