"""Tests of TrajectoryReplayBuffer: trajectories and rows are returned as added, by every way of sampling.

Most tests run with a buffer on disk and with one in memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.buffer import MixedReplayBuffer, Only, TensorTrajectory, TrajectoryReplayBuffer
from gleanrl.utils.errors import UserError
from tests.buffer.world import assert_same, numbers, rows, same, trajectory

ENDS = {(2, 0): "terminations", (3, 1): "truncations"}


@pytest.fixture(params=["disk", "memory"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path):
    with TrajectoryReplayBuffer(tmp_path / "buffer" if request.param == "disk" else None, seed=3) as made:
        yield made


def test_trajectories_are_returned_as_they_were_added(buffer: TrajectoryReplayBuffer) -> None:
    epochs = {name: torch.rand(6 + 2, 3, 2) > 0.5 for name in ("dones", "terminations", "truncations")}
    given = [
        trajectory(1, ends=ENDS, broken=((1, 2),), task_descriptions=["lift", "push", "lift"], success=True),
        trajectory(2, 1, 1, extra=True, wide=False, max_episode_length=9, model_weights_id="v2", success=False),
        TensorTrajectory(rewards=torch.rand(6, 3, 2), prev_values=torch.rand(6 + 2, 3, 1), **epochs),
        trajectory(4, task_descriptions=[["a", "b", "c"]] * 5 + [["a", "b", "d"]]),
    ]
    assert buffer.add_trajectories(given) == [0, 1, 2, 3]
    for number, wanted in enumerate(given):
        assert_same(buffer.trajectory(number), wanted)


@dataclass(frozen=True, kw_only=True)
class WithImages(TensorTrajectory):
    image: torch.Tensor


def test_fields_of_the_user_s_own_are_stored_and_sampled(buffer: TrajectoryReplayBuffer, tmp_path: Path) -> None:
    image = torch.arange(18.0).reshape(6, 3, 1) + torch.arange(600)
    force = torch.rand(6, 3, 2, dtype=torch.float64)
    given = vars(trajectory(0))
    sensors = {"force": force, "task_descriptions": force + 1}
    buffer.add_trajectories([{**given, "image": image, "sensors": sensors}])
    buffer.add_trajectories([WithImages(**given, image=image), SimpleNamespace(**given, image=image)])
    for number, wanted in enumerate([{"image": image, "sensors": sensors}, {"image": image}, {"image": image}]):
        assert same(buffer.trajectory(number).extra_fields, wanted)
    sample = buffer.sample(54)
    step, environment = sample["actions"][:, 0].int() % 1000 // 20, sample["actions"][:, 0].int() % 20
    assert torch.equal(sample["image"], image[step, environment])
    for form in ("native", "pt"):
        buffer.trajectory_format = form
        buffer.save_checkpoint(tmp_path / form)
        with TrajectoryReplayBuffer(tmp_path / form, read_only=True) as saved:
            assert_same(saved.trajectory(0), buffer.trajectory(0))


def test_a_field_that_is_given_twice_is_refused(buffer: TrajectoryReplayBuffer) -> None:
    twice = {**vars(trajectory(0)), "extra_fields": {"image": torch.zeros(6, 3)}, "image": torch.ones(6, 3)}
    with pytest.raises(UserError, match="image"):
        buffer.add_trajectories([twice])
    assert len(buffer) == 0


def test_a_first_argument_that_is_a_seed_is_refused() -> None:
    with pytest.raises(UserError, match="seed=1234"):
        TrajectoryReplayBuffer(1234)  # type: ignore[arg-type]


@pytest.mark.parametrize("exponent", [-0.5, float("nan"), float("inf")])
def test_an_exponent_that_makes_no_priorities_is_refused(exponent: float) -> None:
    with pytest.raises(UserError, match="priority_exponent"):
        TrajectoryReplayBuffer(priority_exponent=exponent)


ROWS = torch.arange(2)
WRONG_ARGUMENTS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("made", (), {"seed": 1.5}, "seed"),
    ("made", (), {"seed": 2**70}, "seed"),
    ("made", (), {"sample_window_size": 1.5}, "sample_window_size"),
    ("made", (), {"max_bytes": "1GB"}, "max_bytes"),
    ("made", (), {"segment_bytes": 0}, "segment_bytes"),
    ("made", (["folder"],), {}, "path"),
    ("add_trajectories", (trajectory(0),), {}, "trajectories"),
    ("add_trajectories", (vars(trajectory(0)),), {}, "trajectories"),
    ("add_trajectories", ([TensorTrajectory(rewards=torch.ones(2, 2, 1), extra_fields=5)],), {}, "extra_fields"),  # type: ignore[arg-type]
    ("trajectory", (0.5,), {}, "number"),
    ("is_ready", ("all",), {}, "min_size"),
    ("save_checkpoint", (5,), {}, "save_path"),
    ("load_checkpoint", (None,), {}, "load_path"),
    ("load_checkpoint", ("folder",), {"before_commit": 5}, "before_commit"),
    ("sample", (2.5,), {}, "num_chunks"),
    ("sample", (0,), {}, "num_chunks"),
    ("sample", (2,), {"only": {}}, "only"),
    ("sample", (2,), {"fields": "actions"}, "fields"),
    ("sample", (2,), {"fields": [["actions"]]}, "fields"),
    ("sample_chunks", (None,), {}, "num_chunks"),
    ("sample_slices", (2, "x"), {}, "length"),
    ("sample_n_step", (2, 1.5, 0.9), {}, "n"),
    ("sample_n_step", (2, 1, None), {}, "gamma"),
    ("sample_prioritized", (2, "x"), {}, "beta"),
    ("update_priorities", (ROWS.float(), torch.ones(2)), {}, "indices"),
    ("update_priorities", (ROWS, [1.0, 2.0]), {}, "priorities"),
    ("read", ([0, 1],), {}, "indices"),
    ("read", (ROWS[:, None],), {}, "indices"),
    ("iterate", (2,), {"batches": 1.5}, "batches"),
]


@pytest.mark.parametrize(("method", "arguments", "named", "wrong"), WRONG_ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_refused_by_its_name(
    method: str, arguments: tuple[Any, ...], named: dict[str, Any], wrong: str
) -> None:
    with TrajectoryReplayBuffer(seed=0, priority_exponent=0.6) as buffer:
        buffer.add_trajectories([trajectory(0)])
        call = TrajectoryReplayBuffer if method == "made" else getattr(buffer, method)
        with pytest.raises(UserError, match=f"^{wrong}\\b") as error:
            call(*arguments, **named)
        assert "\n" not in str(error.value)
        assert len(buffer) == 1


def test_the_conditions_and_the_mixture_refuse_wrong_types_and_numbers_of_other_libraries_are_accepted() -> None:
    with TrajectoryReplayBuffer(seed=np.int64(3), sample_window_size=np.int32(1)) as buffer:  # type: ignore[arg-type]
        buffer.add_trajectories([trajectory(0)])
        assert len(buffer.sample(torch.tensor(2), allow_short=np.True_)["rewards"]) == 2  # type: ignore[arg-type]
        for make in (
            lambda: Only(versions=5),  # type: ignore[arg-type]
            lambda: Only(versions=(1,)),  # type: ignore[arg-type]
            lambda: Only(success="perhaps"),  # type: ignore[arg-type]
            lambda: MixedReplayBuffer(buffer, 5),  # type: ignore[arg-type]
            lambda: MixedReplayBuffer(buffer, buffer, 2),
            lambda: MixedReplayBuffer(buffer, buffer).sample("x"),  # type: ignore[arg-type]
        ):
            with pytest.raises(UserError):
                make()


def test_views_that_conjugate_or_negate_and_numbers_as_outcomes_are_stored(buffer: TrajectoryReplayBuffer) -> None:
    conjugate = torch.randn(4, 2, 3, dtype=torch.complex64).conj()
    given = TensorTrajectory(rewards=conjugate.imag, curr_obs={"wave": conjugate}, success=torch.tensor(True))  # type: ignore[arg-type]
    buffer.add_trajectories([given])
    assert_same(buffer.trajectory(0), replace(given, success=True))


def test_a_sample_contains_the_rows_that_rlinf_draws_with_the_same_seed(buffer: TrajectoryReplayBuffer) -> None:
    given = [trajectory(i, 4 + i, ends={(1, 0): "terminations"}, broken=((2, 2),)) for i in range(5)]
    buffer.add_trajectories(given)
    every = [rows(own) for own in given]
    joined = {name: torch.cat([own[name] for own in every]) for name in ("actions", "versions", "dones")}
    drawn = torch.randint(0, 90, (64,), generator=torch.Generator().manual_seed(3))
    sample = buffer.sample(64)
    for name, column in joined.items():
        assert torch.equal(sample[name], column[drawn])
    for key in ("curr_obs", "next_obs"):
        assert torch.equal(sample[key]["state"], torch.cat([own[key]["state"] for own in every])[drawn])
        assert torch.equal(sample[key]["deep"]["small"], torch.cat([own[key]["deep"]["small"] for own in every])[drawn])


def test_the_sample_window_covers_the_newest_trajectories(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path, seed=0, sample_window_size=2) as buffer:
        buffer.add_trajectories([trajectory(i, 2, 2) for i in range(5)])
        assert numbers(buffer.sample(8)) == {3, 4}
        with pytest.raises(UserError, match="9 chunk steps asked for, the window has 8"):
            buffer.sample(9)
        assert len(buffer.sample(9, allow_short=True)["versions"]) == 8


def test_every_row_is_sampled_with_equal_probability(buffer: TrajectoryReplayBuffer) -> None:
    buffer.add_trajectories([trajectory(i, 1 + i, 2) for i in range(3)])  # 2, 4 and 6 rows
    counts = Counter(index for _ in range(1000) for index in buffer.sample(12, indices=True)["indices"].tolist())
    assert len(counts) == 12
    assert max(abs(count - 1000) for count in counts.values()) < 160  # five standard deviations


def test_read_returns_the_sampled_rows_for_their_indices(buffer: TrajectoryReplayBuffer) -> None:
    buffer.add_trajectories([trajectory(0), trajectory(1, extra=True), trajectory(2)])
    sample = buffer.sample(40, indices=True)
    again = buffer.read(sample.pop("indices"))
    assert same(again, sample)
    nothing = buffer.read(torch.empty(0, dtype=torch.int64))
    assert nothing["actions"].shape == (0, *sample["actions"].shape[1:])
    with pytest.raises(UserError, match="evicted or never was"):
        buffer.read(torch.tensor([10**6]))


def test_trajectories_with_different_fields_are_sampled_together(buffer: TrajectoryReplayBuffer) -> None:
    given = [trajectory(0, wide=False), trajectory(1, extra=True, wide=False), trajectory(2, wide=False)]
    for own in given:  # separate calls: the second begins new segments, the third continues the first's
        buffer.add_trajectories([own])
    sample = buffer.sample(50, indices=True)
    assert "forward_inputs" not in sample
    assert numbers(sample) == {0, 1, 2}
    for version, action, reward in zip(
        sample["versions"].reshape(-1), sample["actions"], sample["rewards"], strict=True
    ):
        assert action[0] // 1000 == version
        assert reward == action[0] / 7
    with pytest.raises(UserError, match=r"forward_inputs.extra: not every trajectory"):
        buffer.sample(50, fields=["actions", "forward_inputs.extra"])


def test_a_sample_contains_only_the_chosen_fields(buffer: TrajectoryReplayBuffer) -> None:
    buffer.add_trajectories([trajectory(0, task_descriptions=["a", "b", "c"])])
    assert buffer.sample(4, fields=["actions", "curr_obs"]).keys() == {"actions", "curr_obs"}
    assert buffer.sample(4, fields=["next_obs.state"])["next_obs"].keys() == {"state"}


def test_sampled_instructions_belong_to_their_rows(buffer: TrajectoryReplayBuffer) -> None:
    buffer.add_trajectories([trajectory(0, task_descriptions=["a", "b", "c"]), trajectory(1)])
    sample = buffer.sample(36)
    instructions = ["abc"[int(action[0]) % 20] if action[0] < 1000 else "" for action in sample["actions"]]
    assert sample["task_descriptions"] == instructions


def test_slices_stay_inside_an_episode(buffer: TrajectoryReplayBuffer) -> None:
    buffer.add_trajectories([trajectory(0, 8, 2, ends={(3, 0): "terminations"}), trajectory(1, 5, 3)])
    starts = Counter()
    for _ in range(60):
        sample = buffer.sample_slices(30, 4)
        first = sample["actions"][..., 0]
        assert (first.diff(dim=1) == 20).all()  # consecutive steps of one environment
        assert not sample["dones"][:, :-1].any()
        starts.update(int(value) for value in first[:, 0])
    # Slices of 4 steps begin in environment 0 at steps 0 and 4, in environment 1 at steps 0 to 4, and in each of
    # the three environments of the second trajectory at steps 0 and 1.
    assert set(starts) == {0, 80, 1, 21, 41, 61, 81, *(1000 + 20 * t + b for t in range(2) for b in range(3))}
    assert max(abs(count - 1800 / 13) for count in starts.values()) < 5 * (1800 / 13) ** 0.5
    with pytest.raises(UserError, match="no row of the buffer"):
        buffer.sample_slices(1, 9)


def test_n_step_returns_end_with_the_episode(buffer: TrajectoryReplayBuffer) -> None:
    given = trajectory(0, 6, 2, ends={(2, 0): "terminations", (4, 1): "truncations"})
    buffer.add_trajectories([given])
    sample = buffer.sample_n_step(12, 3, 0.5)
    for i, mark in enumerate(sample["actions"][:, 0].int().tolist()):
        t, b = divmod(mark, 20)
        end = {0: 2, 1: 4}[b] if t <= {0: 2, 1: 4}[b] else 5
        last = min(t + 2, end)
        wanted = sum(0.5**k * given.rewards[t + k, b, 0] for k in range(last - t + 1))
        assert sample["n_step_rewards"][i] == pytest.approx(float(wanted), rel=1e-6)
        assert torch.equal(sample["next_obs"]["state"][i], given.next_obs["state"][last, b])
        alive = not (b == 0 and last == 2)  # the value behind a truncation counts
        assert sample["n_step_discounts"][i] == (0.5 ** (last - t + 1) if alive else 0)


def test_only_rows_that_meet_the_condition_are_sampled(buffer: TrajectoryReplayBuffer) -> None:
    flags = torch.zeros(6, 3, 2, dtype=torch.bool)
    flags[4, 1] = True
    buffer.add_trajectories(
        [trajectory(0, success=True), trajectory(1, success=False), trajectory(2), trajectory(3, intervene_flags=flags)]
    )
    assert numbers(buffer.sample(18, only=Only(success=True))) == {0}
    assert numbers(buffer.sample(18, only=Only(success=False))) == {1}
    assert numbers(buffer.sample(36, only=Only(versions=(1, 2)))) == {1, 2}
    assert set(buffer.sample(18, only=Only(intervened=True), allow_short=True)["actions"][:, 0].tolist()) == {3081.0}
    assert 3081.0 not in buffer.sample(71, only=Only(intervened=False))["actions"][:, 0].tolist()
    with pytest.raises(UserError, match="no row of the buffer meets"):
        buffer.sample(4, only=Only(intervened=True, success=True, versions=(0, 0)), allow_short=True)


def test_priorities_determine_what_is_sampled_and_are_restored_from_a_checkpoint(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path / "a", seed=0, priority_exponent=0.5) as buffer:
        buffer.add_trajectories([trajectory(0), trajectory(1, extra=True)])
        everything = torch.cat([torch.arange(18), torch.arange(18) + (1 << 48)])
        buffer.update_priorities(everything, torch.full((36,), 1e-12))
        buffer.update_priorities(everything[[3, 20]], torch.tensor([9.0, 1.0]))
        sample = buffer.sample_prioritized(4000, beta=1.0)
        often = (sample["indices"] == 3).float().mean()
        assert often == pytest.approx(0.75, abs=0.04)
        assert sample["weights"][sample["indices"] == 3].unique().item() == pytest.approx(1 / 3, abs=1e-3)
        buffer.add_trajectories([trajectory(2)])  # new rows get the greatest priority so far
        fresh = buffer.sample_prioritized(4000)["indices"]
        assert ((fresh >= 18) & (fresh < 36)).float().mean() == pytest.approx(18 * 3 / (18 * 3 + 4), abs=0.03)
        buffer.save_checkpoint(tmp_path / "checkpoint")
        wanted = buffer.sample_prioritized(50)
    with TrajectoryReplayBuffer(tmp_path / "b", seed=5, priority_exponent=0.5) as other:
        other.load_checkpoint(tmp_path / "checkpoint")
        assert same(other.sample_prioritized(50), wanted)


def test_an_extreme_priority_is_refused_or_forgotten_with_its_row() -> None:
    with TrajectoryReplayBuffer(seed=0, priority_exponent=2.0) as buffer:
        buffer.add_trajectories([trajectory(0)])
        rows = torch.arange(18)
        for priority in (1e200, 1e-200, 0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(UserError, match="priority"):
                buffer.update_priorities(rows[:2], torch.tensor([0.5, priority], dtype=torch.float64))
        with pytest.raises(UserError, match="3 priorities for 2 indices"):
            buffer.update_priorities(rows[:2], torch.ones(3))
        assert set(buffer.sample_prioritized(500)["indices"].tolist()) == set(range(18))
        buffer.update_priorities(rows[:1], torch.tensor([1e40], dtype=torch.float64))
        assert set(buffer.sample_prioritized(500)["indices"].tolist()) == {0}
        buffer.update_priorities(rows[:1], torch.ones(1))
        buffer.add_trajectories([trajectory(1)])
        assert set(buffer.sample_prioritized(1000)["indices"].tolist()) == set(range(36))


def test_a_queued_trajectory_is_stored_once_its_future_is_done(buffer: TrajectoryReplayBuffer) -> None:
    futures = [buffer.add_trajectories([trajectory(i)], wait=False) for i in range(20)]
    assert [future.result() for future in futures] == [[i] for i in range(20)]
    assert buffer.add_trajectories([trajectory(20)]) == [20]
    for i in range(21):
        assert_same(buffer.trajectory(i), trajectory(i))


def test_prefetched_batches_equal_those_that_sample_returns(buffer: TrajectoryReplayBuffer) -> None:
    buffer.add_trajectories([trajectory(0)])
    ahead = list(buffer.iterate(5, batches=3))
    with TrajectoryReplayBuffer(seed=3) as other:
        other.add_trajectories([trajectory(0)])
        assert all(same(batch, other.sample(5)) for batch in ahead)
    endless = buffer.iterate(5)
    next(endless)
    endless.close()


def test_a_reader_sees_what_the_writer_acknowledged(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path, seed=0) as writer:
        writer.add_trajectories([trajectory(0)])
        with TrajectoryReplayBuffer(tmp_path, seed=0, read_only=True) as reader:
            for i in range(1, 5):
                writer.add_trajectories([trajectory(i, extra=i == 3)])
                assert len(reader) == i + 1
                assert_same(reader.trajectory(i), trajectory(i, extra=i == 3))
            writer.clear()
            assert len(reader) == 0
            writer.add_trajectories([trajectory(9)])
            assert numbers(reader.sample(18)) == {9}
        with pytest.raises(UserError, match="another process writes"):
            TrajectoryReplayBuffer(tmp_path)


def test_is_ready_and_get_stats_count_trajectories_rows_and_outcomes(buffer: TrajectoryReplayBuffer) -> None:
    assert not buffer.is_ready(1)
    buffer.add_trajectories([trajectory(0, ends=ENDS, success=True), trajectory(1, success=False)])
    assert buffer.is_ready(2)
    assert asyncio.run(buffer.is_ready_async(2))
    stats = buffer.get_stats()
    assert (stats["num_trajectories"], stats["total_samples"], stats["episodes"]) == (2, 36, 2)
    assert (stats["successes"], stats["failures"]) == (1, 1)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"rewards": torch.zeros(4)}, r"rewards: a trajectory's tensors are \[T, B, ...\]"),
        ({"rewards": torch.zeros(4, 2), "actions": torch.zeros(4, 3)}, r"its shape is \[4, [23]\]"),
        ({"rewards": torch.zeros(4, 2), "dones": torch.zeros(7, 2)}, "3 bootstrap rows do not divide 4 steps"),
        ({"rewards": torch.zeros(0, 2)}, "holds nothing"),
        ({}, "without any tensor"),
        ({"rewards": torch.zeros(4, 2), "task_descriptions": ["a"]}, "give one for each of the 2 environments"),
        ({"rewards": torch.zeros(4, 2), "task_descriptions": "ab"}, "task_descriptions"),
        ({"rewards": torch.zeros(4, 2), "task_descriptions": ["a", 3]}, "task_descriptions"),
        ({"rewards": torch.zeros(4, 2), "task_descriptions": ["a", "\ud800"]}, "task_descriptions"),
        ({"rewards": torch.zeros(2, 2), "task_descriptions": [["a", "b"], "cd"]}, "task_descriptions"),
        ({"rewards": torch.zeros(4, 2).to_sparse()}, "rewards"),
        ({"rewards": torch.zeros(4, 2), "success": "no"}, "success"),
        ({"rewards": torch.zeros(4, 2), "success": torch.ones(4)}, "success"),
        ({"rewards": torch.zeros(4, 2), "max_episode_length": "long"}, "max_episode_length"),
        ({"rewards": torch.zeros(4, 2), "model_weights_id": "\ud800"}, "model_weights_id"),
        ({"curr_obs": {"a": torch.zeros(4, 2), 1: torch.zeros(4, 2)}}, "curr_obs"),
        ({"rewards": torch.zeros(4, 2), "extra_fields": {"robot": "arm"}}, "robot"),
        ({"rewards": torch.zeros(4, 2), "extra_fields": {1: torch.zeros(4, 2)}}, "extra_fields"),
        ({"rewards": torch.zeros(4, 2), "extra_fields": {"actions": torch.zeros(4, 2)}}, "actions"),
        ({"rewards": torch.zeros(4, 2), "extra_fields": {"indices": torch.zeros(4, 2)}}, "indices"),
    ],
)
def test_a_call_with_a_malformed_trajectory_is_refused_and_adds_nothing(
    buffer: TrajectoryReplayBuffer, made: dict, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        buffer.add_trajectories([trajectory(0), TensorTrajectory(**made)])
    assert len(buffer) == 0  # the good trajectory of the same call is not added either


@pytest.mark.parametrize("where", [None, "buffer"])
def test_closing_twice_closes_no_other_files(tmp_path: Path, where: str | None) -> None:
    buffer = TrajectoryReplayBuffer(where and tmp_path / where)
    buffer.add_trajectories([trajectory(0)])
    buffer.close()
    others = [(tmp_path / str(i)).open("wb") for i in range(32)]  # they get the file descriptors that close() freed
    buffer.close()
    for other in others:
        other.close()


def test_a_folder_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with TrajectoryReplayBuffer() as buffer:
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(UserError, match="a file is there"):
                TrajectoryReplayBuffer(path)
        with pytest.raises(UserError, match="a file is there"):
            buffer.save_checkpoint(tmp_path / "file" / "below")


@pytest.mark.parametrize("value", ["", "abc", "-1", "1.5"])
def test_an_environment_variable_that_is_no_rank_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", value)
    with pytest.raises(UserError, match="RANK is"):
        TrajectoryReplayBuffer()
    with TrajectoryReplayBuffer(rank=2) as buffer:
        assert buffer.rank == 2


def test_n_step_returns_are_of_float8_rewards_too_and_not_of_several(buffer: TrajectoryReplayBuffer) -> None:
    rewards, observed = torch.ones(4, 1, 1), {"x": torch.zeros(4, 1, 1)}
    common = {"curr_obs": observed, "next_obs": observed}
    with TrajectoryReplayBuffer(seed=0) as other:
        other.add_trajectories([{**common, "rewards": rewards.to(torch.float8_e5m2)}])
        assert set(other.sample_n_step(64, 2, 0.5)["n_step_rewards"].tolist()) == {1.0, 1.5}
    buffer.add_trajectories([{**common, "rewards": {"a": rewards}}])
    with pytest.raises(UserError, match="rewards: several fields"):
        buffer.sample_n_step(4, 2, 0.5)
