"""Tests of MixedReplayBuffer: the mask that marks demonstrations in a batch, and checkpoints of both buffers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.buffer import MixedReplayBuffer, TrajectoryReplayBuffer
from gleanrl.buffer.log import Manifest
from gleanrl.utils.errors import UserError
from tests.buffer.world import assert_same, trajectory


@contextmanager
def mixed(path: Path | None = None, share: float = 0.5) -> Iterator[MixedReplayBuffer]:
    with TrajectoryReplayBuffer(path, seed=1) as online, TrajectoryReplayBuffer(seed=2) as demonstrations:
        yield MixedReplayBuffer(online, demonstrations, share)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("asked", [4, 8, 40, 100])
@pytest.mark.parametrize("indices", [False, True])
def test_the_demonstration_mask_is_right_even_where_a_buffer_has_too_few_chunk_steps(
    share: float, asked: int, indices: bool
) -> None:
    """The online buffer has 6 chunk steps, the demonstration buffer 18; larger batches fall short."""
    with mixed(share=share) as both:
        both.online.add_trajectories([trajectory(0, steps=2)])
        both.demonstrations.add_trajectories([trajectory(1)])
        batch = both.sample(asked, allow_short=True, indices=indices)
    shown = round(asked * share)
    assert batch["demonstration"].tolist() == [False] * min(6, asked - shown) + [True] * min(18, shown)
    assert batch["versions"].reshape(-1).tolist() == batch["demonstration"].int().tolist()
    assert ("indices" in batch) == indices
    assert not indices or len(batch["indices"]) == len(batch["versions"])


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("damage", ["missing", Manifest.NAME, "state.json", "a segment"])
def test_a_damaged_demonstration_checkpoint_leaves_both_buffers_unchanged(
    damage: str, ranks: int, on_disk: bool, tmp_path: Path
) -> None:
    with mixed() as saved:
        saved.online.add_trajectories([trajectory(8), trajectory(9)])
        saved.demonstrations.add_trajectories([trajectory(7), trajectory(6)])
        saved.save_checkpoint(tmp_path / "checkpoint")
    shown = tmp_path / "checkpoint" / "demonstrations"
    if damage == "missing":
        shutil.rmtree(shown)
    elif damage == "a segment":
        next(shown.glob("*-rows-*")).unlink()
    else:
        (shown / damage).write_text("{}")
    how: dict[str, Any] = {"is_distributed": True, "local_rank": 0, "world_size": ranks} if ranks > 1 else {}
    with mixed(tmp_path / "online" if on_disk else None) as both:
        both.online.add_trajectories([trajectory(0)])
        both.demonstrations.add_trajectories([trajectory(1)])
        both.online.seed = 5
        before = both.online.generator.get_state()
        for _ in range(2):  # the first failure must leave nothing that changes the second try
            with pytest.raises(UserError):
                both.load_checkpoint(tmp_path / "checkpoint", **how)
        assert (len(both.online), len(both.demonstrations)) == (1, 1)
        assert_same(both.online.trajectory(0), trajectory(0))
        assert_same(both.demonstrations.trajectory(0), trajectory(1))
        assert both.online.seed == 5
        assert both.online.generator.get_state().equal(before)
        both.online.add_trajectories([trajectory(2)])
        assert both.online.verify() == []
    with TrajectoryReplayBuffer(seed=0) as intact:  # the undamaged half of the checkpoint can still be loaded
        intact.load_checkpoint(tmp_path / "checkpoint" / "online")
        assert_same(intact.trajectory(1), trajectory(9))
        assert intact.verify() == []


def test_observations_may_have_tensors_called_task_descriptions() -> None:
    tokens = {"curr_obs": {"task_descriptions": torch.arange(12).reshape(4, 1, 3)}}
    with mixed() as both:
        both.online.add_trajectories([{**tokens, "task_descriptions": ["lift"]}])
        both.demonstrations.add_trajectories([tokens])
        batch = both.sample(8)
    assert batch["curr_obs"]["task_descriptions"].shape == (8, 3)
    assert batch["task_descriptions"] == ["lift"] * 4 + [""] * 4


def test_fields_have_the_order_of_the_online_buffer() -> None:
    fields = {
        "curr_obs": {name: torch.zeros(4, 1, 2) for name in "abcdefgh"},
        **{name: torch.zeros(4, 1) for name in "pqrstuvw"},
    }
    with mixed() as both:
        both.online.add_trajectories([fields])
        both.demonstrations.add_trajectories([fields])
        batch, online = both.sample(8), both.online.sample(4)
    assert list(batch) == [*online, "demonstration"]
    assert list(batch["curr_obs"]) == list(online["curr_obs"])


@pytest.mark.parametrize("swapped", [False, True])
def test_a_field_that_is_a_tensor_in_only_one_buffer_is_named(swapped: bool) -> None:
    kinds: list[dict[str, Any]] = [{"curr_obs": torch.zeros(4, 1, 2)}, {"curr_obs": {"x": torch.zeros(4, 1, 2)}}]
    with mixed() as both:
        both.online.add_trajectories([kinds[swapped]])
        both.demonstrations.add_trajectories([kinds[not swapped]])
        with pytest.raises(UserError, match="curr_obs: a tensor in one"):
            both.sample(4)
