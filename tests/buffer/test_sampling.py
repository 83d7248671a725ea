"""Tests of the content of a sampled batch: its rows, its fields, and the following steps of slices and n-steps."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.buffer import MixedReplayBuffer, Only, TensorTrajectory, TrajectoryReplayBuffer
from gleanrl.buffer.table import Table
from gleanrl.buffer.trajectory import FlatTrajectory, TrajectoryBlock
from gleanrl.utils.errors import UserError
from tests.buffer.world import WAIT, same, trajectory


def column(*values: float) -> torch.Tensor:
    """The values as a tensor ``[T, 1, 1]``."""
    return torch.tensor(values).reshape(-1, 1, 1)


def in_epochs(first: float, epochs: int) -> TensorTrajectory:
    """Six steps in rollout epochs, without an end of an episode; each epoch's observations begin 100 higher."""
    observed = first + torch.arange(6.0) + 100 * (torch.arange(6) // (6 // epochs))
    return TensorTrajectory(
        actions=column(*observed.tolist()),
        rewards=column(*range(6)),
        dones=torch.zeros(6 + epochs, 1, 1, dtype=torch.bool),
        curr_obs={"s": column(*observed.tolist())},
        next_obs={"s": column(*(observed + 1).tolist())},
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_slices_and_n_step_returns_end_with_the_rollout_epoch(tmp_path: Path, in_place: bool) -> None:
    buffer = TrajectoryReplayBuffer(seed=0, trajectory_format="pt")
    buffer.add_trajectories([in_epochs(0, 2), in_epochs(1000, 1), in_epochs(2000, 3)])  # stored as one block
    if in_place:
        buffer.save_checkpoint(tmp_path / "rlinf")
        buffer = TrajectoryReplayBuffer(tmp_path / "rlinf", read_only=True, seed=0)
    with buffer:
        slices = buffer.sample_slices(200, 3)["curr_obs"]["s"].reshape(200, 3)
        assert (slices.diff(dim=1) == 1).all()
        assert set(slices[:, 0].tolist()) == {0, 103, 1000, 1001, 1002, 1003}
        sample = buffer.sample_n_step(300, 3, 1.0)
        first, following = sample["curr_obs"]["s"].reshape(-1), sample["next_obs"]["s"].reshape(-1)
        rewards = dict(zip(first.tolist(), sample["n_step_rewards"].tolist(), strict=True))
        assert dict(zip(first.tolist(), following.tolist(), strict=True))[1] == 3
        assert (rewards[1], rewards[2], rewards[103], rewards[1002]) == (1 + 2, 2, 3 + 4 + 5, 2 + 3 + 4)
        assert (following - first <= 3).all()


def test_cuts_mark_where_an_episode_or_a_rollout_epoch_ends() -> None:
    rows = TrajectoryBlock([FlatTrajectory.flatten(trajectory(0, 6, 2, ends={(1, 0): "terminations"}))])
    assert (rows.cuts == rows.ends).all()
    cuts = TrajectoryBlock([FlatTrajectory.flatten(in_epochs(0, 3))]).cuts
    assert cuts.reshape(-1).tolist() == [False, True, False, True, False, True]


FLAGGED = {
    "dones": ({"dones": [0, 1, 0]}, [0, 0, 0.5]),
    "dones and truncations": ({"dones": [0, 1, 1], "truncations": [0, 1, 0]}, [0.25, 0.5, 0]),
    "dones and terminations": ({"dones": [0, 1, 1], "terminations": [0, 1, 0]}, [0, 0, 0.5]),
    "truncations": ({"truncations": [0, 1, 0]}, [0.25, 0.5, 0.5]),
    "nothing": ({}, [0.25, 0.25, 0.5]),
}


@pytest.mark.parametrize("flags", FLAGGED)
def test_the_next_value_is_bootstrapped_after_a_truncation_but_after_no_other_end(flags: str) -> None:
    given, wanted = FLAGGED[flags]
    with TrajectoryReplayBuffer(seed=0) as buffer:
        made = {name: column(*values).bool() for name, values in given.items()}
        nothing = {"rewards": column(1, 1, 1), "next_obs": {"s": column(0, 0, 0)}}
        buffer.add_trajectories([{"actions": column(0, 1, 2), **nothing, **made}])
        sample = buffer.sample_n_step(60, 2, 0.5)
        found = dict(zip(sample["actions"].reshape(-1).tolist(), sample["n_step_discounts"].tolist(), strict=True))
        assert [found[i] for i in range(3)] == wanted


def test_rewards_after_the_end_of_an_episode_inside_a_chunk_do_not_count() -> None:
    ended = torch.zeros(3, 1, 3, dtype=torch.bool)
    ended[1, 0, 0] = True
    truncated = torch.zeros(3, 1, 3, dtype=torch.bool)
    truncated[2, 0, 1] = truncated[2, 0, 2] = True
    flags = {"terminations": ended | (truncated & (torch.arange(3) == 2)), "truncations": truncated}
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories(
            [{"actions": column(0, 1, 2), "rewards": torch.ones(3, 1, 3), "next_obs": {"s": column(0, 0, 0)}, **flags}]
        )
        sample = buffer.sample_n_step(60, 2, 0.5)
        rewards = dict(zip(sample["actions"].reshape(-1).tolist(), sample["n_step_rewards"].tolist(), strict=True))
        discounts = dict(zip(sample["actions"].reshape(-1).tolist(), sample["n_step_discounts"].tolist(), strict=True))
    assert rewards == {0: 1 + 0.5 + 0.25 + 0.125, 1: 1, 2: 1 + 0.5}  # each environment step is discounted
    assert discounts == {0: 0, 1: 0, 2: 0.25}  # flags behind the truncation are ignored


@pytest.fixture
def uneven() -> Any:
    """A buffer with 200 rows that have log-probs and instructions, and four rows that have neither."""
    with TrajectoryReplayBuffer(seed=0, priority_exponent=1.0) as buffer:
        many = {"rewards": torch.zeros(100, 2, 1), "next_obs": {"s": torch.zeros(100, 2, 1)}}
        few = {"rewards": torch.ones(2, 2, 1), "next_obs": {"s": torch.zeros(2, 2, 1)}}
        more = {"prev_logprobs": torch.zeros(100, 2, 1), "task_descriptions": ["lift", "push"]}
        buffer.add_trajectories([{**many, **more}, few])
        yield buffer


def test_the_fields_of_a_batch_depend_on_the_window_and_not_on_the_drawn_rows(uneven: TrajectoryReplayBuffer) -> None:
    shared = {"rewards", "next_obs", "task_descriptions"}
    for _ in range(30):
        assert uneven.sample(8).keys() == shared
        assert uneven.sample_prioritized(4).keys() == shared | {"indices", "weights"}
        assert uneven.sample_slices(4, 2).keys() == shared
        assert uneven.sample_n_step(8, 2, 0.5).keys() == shared | {"n_step_rewards", "n_step_discounts"}
        with pytest.raises(UserError, match="prev_logprobs: not every trajectory"):
            uneven.sample(2, fields=["prev_logprobs"])
    uneven.window = 1
    for _ in range(5):
        assert uneven.sample(4)["task_descriptions"] == [""] * 4
    uneven.add_trajectories([{"rewards": torch.zeros(100, 2, 2), "next_obs": {"s": torch.zeros(100, 2, 1)}}])
    uneven.window = 2
    for _ in range(30):
        with pytest.raises(UserError, match=r"rewards: \[1\] torch.float32 and \[2\] torch.float32 in one batch"):
            uneven.sample(8)
        assert uneven.sample(8, fields=["next_obs"]).keys() == {"next_obs"}


def test_instructions_can_be_chosen_as_a_field(uneven: TrajectoryReplayBuffer) -> None:
    batch = uneven.sample(50, fields=["rewards", "task_descriptions"])
    assert batch.keys() == {"rewards", "task_descriptions"}
    assert set(batch["task_descriptions"]) <= {"lift", "push", ""}
    for text, reward in zip(batch["task_descriptions"], batch["rewards"].reshape(-1).tolist(), strict=True):
        assert (text == "") == (reward == 1)
    assert uneven.sample(3, fields=["task_descriptions"]).keys() == {"task_descriptions"}
    with TrajectoryReplayBuffer() as silent:
        silent.add_trajectories([trajectory(0)])
        assert silent.sample(2, fields=["task_descriptions"]) == {"task_descriptions": ["", ""]}
        assert "task_descriptions" not in silent.sample(2)
        for online, shown in ((uneven, silent), (silent, uneven)):
            mixed = MixedReplayBuffer(online, shown, share=0.5)
            instructions = mixed.sample(36)["task_descriptions"]
            assert len(instructions) == 36
            silent_half = instructions[:18] if online is silent else instructions[18:]
            assert silent_half == [""] * 18
            assert len(mixed.sample(8, fields=["rewards", "task_descriptions"])["task_descriptions"]) == 8


def test_a_sample_is_never_larger_than_the_rows_that_meet_the_condition() -> None:
    flags = torch.zeros(400, 3, 2, dtype=torch.bool)
    flags[7, 1] = flags[100, 0] = flags[399, 2] = True
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([trajectory(0, 400, intervene_flags=flags)])
        with pytest.raises(
            UserError, match=r"8 chunk steps asked for, 3 of the window meet the conditions; allow_short"
        ):
            buffer.sample(8, only=Only(intervened=True))
        assert len(buffer.sample(8, only=Only(intervened=True), allow_short=True)["actions"]) == 3
        assert len(buffer.sample(3, only=Only(intervened=True))["actions"]) == 3
        assert len(buffer.sample(1197, only=Only(intervened=False))["actions"]) == 1197
        with pytest.raises(UserError, match="1198 chunk steps asked for, 1197 of the window meet"):
            buffer.sample(1198, only=Only(intervened=False))
        assert len(buffer.sample(1200, only=Only(intervened=False), allow_short=True)["actions"]) == 1197
        assert len(buffer.sample(1200, only=Only(versions=(0, 1)))["actions"]) == 1200


def test_a_rare_condition_is_met_without_examining_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    examined, real = [0], Table.read

    def watched(self: Table, rows: torch.Tensor, paths: Any) -> Any:
        examined[0] += len(rows)
        return real(self, rows, paths)

    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([trajectory(number, 50, 2, wide=False) for number in range(200)])
        monkeypatch.setattr(Table, "read", watched)
        found = [buffer.sample_slices(8, 50)["rewards"][:, 0] for _ in range(100)]
        assert examined[0] / 100 < 20_000 / 8  # 400 rows with an accepted one in 50, and the slices
        # each of the 400 first steps is drawn as often as any other one
        assert 300 < len(torch.cat(found).unique()) <= 400
        with pytest.raises(UserError, match="no row of the buffer meets"):
            buffer.sample_slices(8, 51)


@pytest.mark.parametrize("number", [0, -1])
def test_batch_sizes_and_step_counts_below_one_are_refused(number: int) -> None:
    with TrajectoryReplayBuffer(priority_exponent=1.0) as buffer:
        buffer.add_trajectories([trajectory(0), trajectory(1, extra=True)])
        for call in (
            lambda: buffer.sample(number),
            lambda: buffer.sample_n_step(number, 2, 0.9),
            lambda: buffer.sample_n_step(4, number, 0.9),
            lambda: buffer.sample_slices(number, 2),
            lambda: buffer.sample_slices(4, number),
            lambda: buffer.sample_prioritized(number),
        ):
            with pytest.raises(UserError, match=f"= {number}: "):
                call()


def test_a_checkpoint_continues_with_the_first_prefetched_batch_that_was_not_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer, TrajectoryReplayBuffer(seed=9) as resumed:
        buffer.add_trajectories([trajectory(number) for number in range(30)])
        ahead, real = threading.Semaphore(0), buffer.sample

        def sample(count: int) -> Any:
            found = real(count)
            ahead.release()
            return found

        monkeypatch.setattr(buffer, "sample", sample)
        stream = buffer.iterate(8, prefetch=3)
        next(stream)
        for _ in range(4):  # the batch that was returned, and three more
            assert ahead.acquire(timeout=WAIT)
        buffer.save_checkpoint(tmp_path / "checkpoint")
        wanted = next(stream), next(stream)
        resumed.load_checkpoint(tmp_path / "checkpoint")
        again = resumed.iterate(8, batches=1)
        assert same(next(again), wanted[0])
        again.close()
        assert same(resumed.sample(8), wanted[1])
        # sample() meanwhile draws after the batches drawn ahead, so a checkpoint continues after its batch
        for _ in range(2):
            assert ahead.acquire(timeout=WAIT)
        real(8)
        buffer.save_checkpoint(tmp_path / "mixed")
        stream.close()
        following = real(8)
        resumed.load_checkpoint(tmp_path / "mixed")
        assert same(resumed.sample(8), following)
        # batches drawn ahead from another state are discarded
        stream = buffer.iterate(8, prefetch=2)
        next(stream)
        for _ in range(3):
            assert ahead.acquire(timeout=WAIT)
        buffer.load_checkpoint(tmp_path / "checkpoint")
        buffer.save_checkpoint(tmp_path / "after")
        resumed.load_checkpoint(tmp_path / "after")
        assert same(resumed.sample(8), wanted[0])
        stream.close()


@pytest.mark.parametrize("rows", [40, 20_000, 300_000])
def test_rows_are_drawn_in_proportion_to_their_priorities_however_many_there_are(rows: int) -> None:
    with TrajectoryReplayBuffer(seed=0, priority_exponent=1.0) as buffer:
        buffer.add_trajectories([{"rewards": torch.arange(rows).reshape(-1, 20, 1)}])
        chosen = {0: 1.0, 19: 2.0, rows // 2: 3.0, rows - 9: 4.0, rows - 1: 5.0}
        buffer.update_priorities(torch.arange(rows), torch.full((rows,), 1e-12))
        buffer.update_priorities(torch.tensor([*chosen]), torch.tensor([*chosen.values()]))
        drawn = Counter(buffer.sample_prioritized(6000)["rewards"].reshape(-1).tolist())
        assert drawn.keys() == chosen.keys()
        for row, priority in chosen.items():
            wanted = 6000 * priority / 15
            assert abs(drawn[row] - wanted) < 5 * wanted**0.5
        buffer.update_priorities(torch.tensor([*chosen]), torch.full((5,), 1e-12))
        assert len(set(buffer.sample_prioritized(40)["indices"].tolist())) > 20


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("width", [3, 1200])
def test_a_field_of_any_dtype_can_be_sampled_from_trajectories_with_different_fields(
    dtype: torch.dtype, width: int
) -> None:
    values = torch.arange(8)[:, None].expand(8, width).to(dtype)
    parts = [{"values": part.reshape(4, 1, width), "number": torch.zeros(4, 1, 1)} for part in values.split(4)]
    for i, part in enumerate(parts):
        part["number"] += torch.arange(4 * i, 4 * i + 4)[:, None, None]
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([parts[0], {**parts[1], "rewards": torch.zeros(4, 1, 1)}])
        batch = buffer.sample(8)
    assert len(batch["number"].unique()) > 3
    wanted = values[batch["number"][:, 0].long()]
    assert torch.equal(batch["values"].view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_new_rows_get_the_highest_priority_of_any_row_whatever_their_fields() -> None:
    with TrajectoryReplayBuffer(seed=0, priority_exponent=1.0) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.update_priorities(torch.arange(18), torch.full((18,), 1000.0))
        buffer.add_trajectories([trajectory(1), trajectory(2, extra=True)])
        drawn = buffer.sample_prioritized(3000)["versions"].reshape(-1)
    counts = Counter(drawn.tolist())
    assert min(counts[number] for number in range(3)) > 900


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_versions_of_which_some_are_unknown_still_meet_a_condition(dtype: torch.dtype) -> None:
    versions = column(float("nan"), 3, 5).to(dtype), column(*[float("nan")] * 2).to(dtype)
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([{"versions": own} for own in versions])
        batch = buffer.sample(1, only=Only(versions=(2, 4)))
        assert batch["versions"].tolist() == [[3]]
        with pytest.raises(UserError, match="no row"):
            buffer.sample(1, only=Only(versions=(-1, 2)))
