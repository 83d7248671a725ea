"""Tests of reading RLinf's buffer directories, in place and by ``load_checkpoint``, in every layout RLinf has had.

Samples must hold the rows that RLinf's own sampling, rewritten here in ``rlinf_draws``, draws with the same seed.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gleanrl.buffer import Only, TensorTrajectory, TrajectoryReplayBuffer
from gleanrl.utils.errors import UserError
from tests.buffer import world
from tests.buffer.world import assert_same, at, flip, same, trajectory

Fields = dict[str, Any]
FLAGS = ("dones", "terminations", "truncations")


def fields(number: int, *, steps: int = 6, epochs: int = 0, values: bool = False) -> Fields:
    """The content of a trajectory file of RLinf's. With ``epochs`` > 0 a bootstrap row precedes each rollout epoch."""
    own = trajectory(number, steps, 3, ends={(1, 0): "terminations", (4, 2): "truncations"})
    made = {name: getattr(own, name) for name in TensorTrajectory.__dataclass_fields__}
    made = {name: value for name, value in made.items() if isinstance(value, (Tensor, dict)) and name != "versions"}
    made |= made.pop("extra_fields") | {"of_a_subclass": torch.stack([own.rewards, own.rewards + 1], dim=3)}  # type: ignore[operator,list-item]
    made |= {"max_episode_length": 50, "model_weights_id": weights(number)}
    for name in FLAGS if epochs else ():
        parts = made[name].reshape(epochs, -1, 3, 1)
        first = torch.ones(epochs, 1, 3, 1, dtype=torch.bool)  # a bootstrap row, which must never be drawn
        made[name] = torch.cat([first, parts], dim=1).reshape(-1, 3, 1)
    if values:
        made["prev_values"] = torch.arange((steps + max(1, epochs)) * 3).reshape(-1, 3, 1) + number * 1000.0
    return made


def weights(number: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, str(number // 2)))


def flat(made: Fields) -> Fields:
    """Return each tensor as ``[T * B, ...]``, without bootstrap rows."""
    steps = made["rewards"].shape[0]
    found: Fields = {}
    for name, value in made.items():
        if isinstance(value, Tensor) and (extra := value.shape[0] - steps):
            kept = slice(1, None) if name in FLAGS else slice(None, -1)
            value = value.reshape(extra, -1, *value.shape[1:])[:, kept].reshape(steps, *value.shape[1:])
        if isinstance(value, Tensor) or (isinstance(value, dict) and value):
            found[name] = world.flat(value)
    return found


def rlinf_draws(every: Sequence[Fields], count: int, *, seed: int, window: int = 0, batches: int = 1) -> list[Fields]:
    """Draw batches as RLinf does: indices into all rows of the window, then each one's trajectory and row in it."""
    generator = torch.Generator().manual_seed(seed)
    shown = [flat(made) for made in (every[-window:] if window else every)]
    ends = torch.tensor([len(own["rewards"]) for own in shown]).cumsum(0)
    found = []
    for _ in range(batches):
        drawn = torch.randint(low=0, high=int(ends[-1]), size=(count,), generator=generator)
        which = torch.bucketize(drawn, ends, right=True)
        local = drawn - torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]])[which]
        rows = [at(shown[int(i)], slice(int(j), int(j) + 1)) for i, j in zip(which, local, strict=True)]
        found.append(joined(rows))
    return found


def joined(rows: Sequence[Fields]) -> Fields:
    def all_of(name: str) -> Any:
        own = [row[name] for row in rows]
        return joined(own) if isinstance(own[0], dict) else torch.cat(own)

    return {name: all_of(name) for name in rows[0]}


# --- layouts --------------------------------------------------------------------------------------
def entry(number: int, made: Fields) -> Fields:
    steps, batch = made["rewards"].shape[:2]
    shape = list(made["prev_logprobs"].shape)
    content = {"num_samples": steps * batch, "trajectory_id": number, "max_episode_length": 50, "shape": shape}
    return {**content, "model_weights_id": made["model_weights_id"]}


def write(
    folder: Path,
    every: Sequence[Fields],
    *,
    index_name: str = "trajectory_index.json",
    format_key: str = "trajectory_format",
    ids: Sequence[int | str] | None = None,
    list_key: str = "trajectory_id_list",
    file_name: Callable[[Any, str], str] = "trajectory_{}_{}".format,
    suffix: str = "pt",
    saved: Callable[[Fields], Fields] = dict,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    ids = ids or range(len(every))
    index = {}
    for number, (key, made) in enumerate(zip(ids, every, strict=True)):
        path = folder / f"{file_name(key, made['model_weights_id'])}.{suffix}"
        if suffix == "pt":
            torch.save(saved(made), path)
        else:
            path.write_bytes(pickle.dumps(saved(made)))
        index[key] = entry(key if isinstance(key, int) else number, made)
    (folder / index_name).write_text(json.dumps({"trajectory_index": index, list_key: list(ids)}))
    rows = sum(own["num_samples"] for own in index.values())
    sizes = {"size": len(index), "total_samples": rows, "trajectory_counter": len(index)}
    content = {format_key: suffix, **sizes, "seed": 11}
    (folder / "metadata.json").write_text(json.dumps(content))
    return folder


def from_memory(made: Fields) -> Fields:
    """The fields as a memory-only RLinf buffer saves them: flags without bootstrap rows, ``prev_values`` flat.

    RLinf flattens all rows and restores ``[T, B]``; tensors with bootstrap rows do not fit and stay flat.
    """
    shown = {key: value.reshape(-1, *value.shape[2:]) if key == "prev_values" else value for key, value in made.items()}
    for name in FLAGS:
        shown[name] = flat(made)[name].reshape(*made["rewards"].shape[:2], -1)
    return shown


def with_more(made: Fields) -> Fields:
    """The fields with additional values that RLinf ignores."""
    more = {"mode": "train", "lengths": torch.arange(3), "names": ["a", "b"]}
    return {**made, "curr_obs": {**made["curr_obs"], **more}, "versions": None, "later_field": torch.zeros(2)}


PLAIN = {"epochs": 0}
UUIDS = [uuid.uuid5(uuid.NAMESPACE_DNS, f"t{i}").hex for i in range(6)]
LAYOUTS: dict[str, tuple[Fields, Fields]] = {
    "now": (PLAIN, {}),
    "bootstrap rows": ({"epochs": 1}, {}),
    "several epochs": ({"epochs": 3, "values": True}, {}),
    "misspelt index": ({"epochs": 2}, {"index_name": "trajector_index.json", "format_key": "storage_format"}),
    "uuid keys": (
        PLAIN,
        {"ids": UUIDS, "list_key": "trajectory_uuid_list", "file_name": lambda key, _: f"trajectory_{key}"},
    ),
    "uuid keys and numbered files": (
        PLAIN,
        {
            "ids": UUIDS,
            "list_key": "trajectory_uuid_list",
            "file_name": lambda key, _: f"trajectory_{UUIDS.index(key)}_{key}",
        },
    ),
    "uuid instead of weights": (PLAIN, {"file_name": lambda key, _: f"trajectory_{key}_{uuid.uuid4()}"}),
    "ids with gaps": (PLAIN, {"ids": [3, 4, 8, 19, 20, 100]}),
    "from memory": ({"epochs": 2, "values": True}, {"saved": from_memory}),
    "more than tensors": (PLAIN, {"saved": with_more}),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[Fields]]:
    how, where = LAYOUTS[request.param]
    every = [fields(number, steps=6 if number % 2 else 12, **how) for number in range(6)]
    return write(tmp_path / "rlinf", every, **where), every


def test_a_directory_read_in_place_or_loaded_draws_the_rows_that_rlinf_draws(layout: tuple[Path, list[Fields]]) -> None:
    folder, every = layout
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()}
    for window in (0, 2, 100):
        wanted = rlinf_draws(every, 40, seed=11, window=window, batches=3)
        with TrajectoryReplayBuffer(folder, read_only=True, seed=11, sample_window_size=window) as buffer:
            assert (len(buffer), buffer.total_samples) == (6, 162)
            for batch in wanted:
                assert same(buffer.sample(40), batch)
        with TrajectoryReplayBuffer(seed=0, sample_window_size=window) as buffer:
            buffer.load_checkpoint(folder)
            assert buffer.seed == 11
            for batch in wanted:
                assert same(buffer.sample(40), batch)
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()} == before


def test_conditions_slices_n_steps_priorities_and_checkpoints_work_in_place(tmp_path: Path) -> None:
    every = [fields(number, epochs=2) for number in range(5)]
    flags = torch.zeros(6, 3, 2, dtype=torch.bool)
    flags[4, 1] = True
    every[3] |= {"intervene_flags": flags}
    for number, made in enumerate(every):
        made.setdefault("intervene_flags", torch.zeros(6, 3, 2, dtype=torch.bool))
        made["versions"] = torch.full((6, 3, 1), number)
        made["curr_obs"] = {**made["curr_obs"], "task_descriptions": ["lift", "push", "lift"]}
    folder = write(tmp_path / "rlinf", every)
    with TrajectoryReplayBuffer(folder, read_only=True, priority_exponent=1.0) as buffer:
        assert set(buffer.sample(18, only=Only(intervened=True), allow_short=True)["actions"][:, 0].tolist()) == {
            3081.0
        }
        assert set(buffer.sample(18, only=Only(versions=(1, 2)))["versions"].reshape(-1).tolist()) == {1, 2}
        with pytest.raises(UserError, match="no row of the buffer meets"):
            buffer.sample(18, only=Only(success=True))
        slices = buffer.sample_slices(40, 3)
        steps = slices["actions"][:, :, 0]
        assert (steps[:, 1:] - steps[:, :-1] == 20).all()
        assert not slices["dones"][:, :-1].any()
        assert set(slices["task_descriptions"][0]) <= {"lift", "push"}
        found = buffer.sample_n_step(40, 2, 0.5)
        assert len(found["n_step_rewards"]) == 40
        sample = buffer.sample_prioritized(30)
        buffer.update_priorities(sample["indices"], torch.ones(30))
        assert same(buffer.read(sample["indices"])["actions"], sample["actions"])
        stats = buffer.get_stats()
        assert (stats["num_trajectories"], stats["episodes"], stats["intervened"]) == (5, 10, 1)
        assert buffer.trajectory(2).task_descriptions == ("lift", "push", "lift")
        assert torch.equal(buffer.trajectory(2).dones, every[2]["dones"])  # type: ignore[arg-type]
        buffer.save_checkpoint(tmp_path / "ours")
        wanted = buffer.sample(30)
        for write_ in (lambda: buffer.add_trajectories([trajectory(0)]), buffer.clear):
            with pytest.raises(UserError, match="read_only"):
                write_()
    with TrajectoryReplayBuffer() as buffer:
        buffer.load_checkpoint(tmp_path / "ours")
        assert same(buffer.sample(30), wanted)
    with pytest.raises(UserError, match=r"read it in place \(read_only=True\) or load_checkpoint it"):
        TrajectoryReplayBuffer(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_at_most_cache_size_files_are_mapped(tmp_path: Path) -> None:
    every = [fields(number) for number in range(20)]
    folder = write(tmp_path / "rlinf", every)

    def mapped() -> int:
        return len({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "rlinf" in line})

    wanted = rlinf_draws(every, 100, seed=11)[0]
    with TrajectoryReplayBuffer(folder, read_only=True, seed=11, cache_size=3) as buffer:
        assert mapped() == 0
        assert torch.equal(buffer.sample(100)["actions"], wanted["actions"])
        assert 1 <= mapped() <= 3
    with TrajectoryReplayBuffer(folder, read_only=True, seed=11) as buffer:
        assert torch.equal(buffer.sample(100)["actions"], wanted["actions"])
        assert 10 < mapped() <= 20
        files = len(os.listdir("/proc/self/fd"))
        buffer.sample(100)
        assert len(os.listdir("/proc/self/fd")) == files
    assert mapped() == 0
    with pytest.raises(UserError, match="cache_size = -1"):
        TrajectoryReplayBuffer(folder, read_only=True, cache_size=-1)


def test_trajectories_that_rlinf_adds_later_are_seen(tmp_path: Path) -> None:
    every = [fields(number) for number in range(4)]
    folder = write(tmp_path / "rlinf", every[:2])
    with TrajectoryReplayBuffer(folder, read_only=True, seed=11) as buffer:
        assert len(buffer) == 2
        buffer.sample(5)
        write(folder, every)
        assert len(buffer) == 4
        assert set((buffer.sample(72)["actions"][:, 0] // 1000).tolist()) == {0, 1, 2, 3}
        whole = (folder / "trajectory_index.json").read_text()
        (folder / "trajectory_index.json").write_text(whole[: len(whole) // 2])  # as while RLinf writes it
        assert len(buffer) == 4
        (folder / "trajectory_index.json").write_text(whole)
        assert len(buffer) == 4


def test_files_of_an_older_run_are_not_read_and_a_file_that_arrives_late_is(tmp_path: Path) -> None:
    old = [{**fields(number), "model_weights_id": "old"} for number in range(7, 10)]
    new = [{**fields(number), "model_weights_id": "new"} for number in range(2)]
    folder = write(tmp_path / "rlinf", old)
    late = [write(folder, new[: number + 1]) / f"trajectory_{number}_new.pt" for number in range(2)]
    content = [file.read_bytes() for file in late]
    for there in (1, 0):  # number of files of the new run that are there when the folder is opened
        for file in late[there:]:
            file.unlink()
        with TrajectoryReplayBuffer(folder, read_only=True) as buffer:
            for file, data in zip(late[there:], content[there:], strict=True):
                with pytest.raises(UserError, match=f"{file}: missing; the index lists it"):
                    buffer.sample(36)
                file.write_bytes(data)
            assert set((buffer.sample(36)["actions"][:, 0] // 1000).tolist()) == {0, 1}
            assert buffer.verify() == []


@pytest.mark.parametrize("alike", [True, False])
def test_a_directory_is_saved_again_with_priorities_if_its_trajectories_are_alike(tmp_path: Path, alike: bool) -> None:
    every = [fields(number, values=number == 0 and not alike) for number in range(3)]
    folder = write(tmp_path / "rlinf", every)
    with TrajectoryReplayBuffer(folder, read_only=True, priority_exponent=1.0) as buffer:
        batch = buffer.sample_prioritized(400)
        of_last = batch["actions"][:, 0] >= 2000
        buffer.update_priorities(batch["indices"], torch.where(of_last, 1e9, 1e-9))
        for _ in range(2):  # the second save replaces the first
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                buffer.save_checkpoint(tmp_path / "ours")
            assert ["has no priorities" in str(warning.message) for warning in said] == [True] * (not alike)
    with TrajectoryReplayBuffer(priority_exponent=1.0) as buffer:
        buffer.load_checkpoint(tmp_path / "ours")
        assert len(buffer) == 3
        found = set((buffer.sample_prioritized(100)["actions"][:, 0] // 1000).tolist())
        assert found == ({2} if alike else {0, 1, 2})


class Trap:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize("suffix", ["pt", "pkl"])
def test_a_file_runs_no_code_unless_pickles_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    every = [fields(number) for number in range(3)]
    folder = write(tmp_path / "rlinf", every, suffix=suffix)
    [wanted] = rlinf_draws(every, 20, seed=11)
    with TrajectoryReplayBuffer(seed=11) as loaded:
        if suffix == "pkl":
            with pytest.raises(UserError, match=r"\.pkl: a pickle can run any code"):
                loaded.load_checkpoint(folder)
        loaded.load_checkpoint(folder, pickles=True)
        assert torch.equal(loaded.sample(20)["actions"], wanted["actions"])
    with TrajectoryReplayBuffer(folder, read_only=True, seed=11, pickles=True) as buffer:
        assert torch.equal(buffer.sample(20)["actions"], wanted["actions"])
    file = folder / f"trajectory_1_{weights(1)}.{suffix}"
    trapped = {**every[1], "curr_obs": Trap()}
    if suffix == "pt":
        torch.save(trapped, file)
        with TrajectoryReplayBuffer(folder, read_only=True) as buffer:
            with pytest.raises(UserError, match=f"{file}: cannot be read"):
                buffer.trajectory(1)
            assert torch.equal(buffer.trajectory(0).rewards, every[0]["rewards"])  # type: ignore[arg-type]
    else:
        file.write_bytes(pickle.dumps(trapped))
        with pytest.raises(UserError, match="can run any code"):
            TrajectoryReplayBuffer(folder, read_only=True)
        with pytest.raises(UserError, match="trajectory_format"):
            TrajectoryReplayBuffer(trajectory_format="pkl")
    assert not (tmp_path / "trapped").exists()


def damage_file(folder: Path, harm: str) -> str:
    """Damage the file of trajectory 2 of 4 in the named way; return the expected error as a pattern."""
    path = folder / f"trajectory_2_{weights(2)}.pt"
    if harm == "missing":
        path.unlink()
        return f"{path}: missing; the index lists it"
    if harm == "a flipped bit":
        flip(path, path.stat().st_size // 2)
        return f"{path}: what it holds is not what was written"
    if harm == "torn":
        os.truncate(path, path.stat().st_size // 2)
    elif harm == "no tensors":
        torch.save([1, 2], path)
        return f"{path}: holds list"
    elif harm == "other rows":
        torch.save(fields(2, steps=12), path)
        return f"{path}: 36 rows; the index says 18"
    elif harm == "other field":
        torch.save({**torch.load(path), "rewards": torch.zeros(6, 3, 2)}, path)
        return rf"{path}: rewards float32\[2\], where others have rewards float32\[1\]"
    return f"{path}: cannot be read"


@pytest.mark.parametrize("harm", ["missing", "torn", "a flipped bit", "no tensors", "other rows", "other field"])
def test_a_damaged_file_is_named_and_the_other_trajectories_are_readable(tmp_path: Path, harm: str) -> None:
    every = [fields(number) for number in range(4)]
    folder = write(tmp_path / "rlinf", every)
    said = damage_file(folder, harm)
    with TrajectoryReplayBuffer(folder, read_only=True, seed=11) as buffer:
        for number in (0, 1, 3):
            assert torch.equal(buffer.trajectory(number).rewards, every[number]["rewards"])  # type: ignore[arg-type]
        if harm != "a flipped bit":  # only verify() and copying compare checksums, sampling does not
            with pytest.raises(UserError, match=said):
                buffer.sample(72)
        if harm != "other field":
            [line] = buffer.verify()
            assert re.match(f"trajectory 2: {said}", line)
    with TrajectoryReplayBuffer(folder, read_only=True, seed=11, sample_window_size=1) as buffer:
        assert torch.equal(buffer.sample(18)["actions"], rlinf_draws(every, 18, seed=11, window=1)[0]["actions"])
    if harm in ("missing", "torn", "a flipped bit", "no tensors"):
        with TrajectoryReplayBuffer() as buffer:
            buffer.add_trajectories([trajectory(7)])
            with pytest.raises(UserError, match=said):
                buffer.load_checkpoint(folder)
            assert_same(buffer.trajectory(0), trajectory(7))


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(("saved", "loading"), [(1, 3), (2, 2), (3, 2), (4, 1), (2, 5)])
def test_a_checkpoint_of_any_number_of_ranks_loads_onto_any_other_number(
    tmp_path: Path, ours: bool, saved: int, loading: int
) -> None:
    every = [fields(number, steps=6 * (1 + number % 3)) for number in range(11)]
    parts = [every[rank::saved] for rank in range(saved)]
    for rank, own in enumerate(parts):
        folder = tmp_path / "ranks" / f"rank_{rank}"
        if ours:
            with TrajectoryReplayBuffer(seed=11, rank=rank) as buffer:
                buffer.add_trajectories(own)
                buffer.save_checkpoint(folder)
        else:
            write(folder, own)
    rows = sum(18 * (1 + number % 3) for number in range(11))
    found, draws = [], []
    for rank in range(loading):
        for again in range(2):  # loading twice draws the same rows
            with TrajectoryReplayBuffer(seed=rank, rank=rank) as buffer:
                buffer.load_checkpoint(
                    tmp_path / "ranks", is_distributed=loading > 1, local_rank=rank, world_size=loading
                )
                numbers = [int(buffer.trajectory(i).actions[0, 0, 0]) // 1000 for i in range(len(buffer))]  # type: ignore[index]
                assert buffer.trajectory_counter == buffer.size == len(numbers)
                assert buffer.total_samples == sum(18 * (1 + number % 3) for number in numbers)
                assert abs(buffer.total_samples - rows / loading) <= 54  # one trajectory more or less
                drawn = buffer.sample(buffer.total_samples, indices=True)["indices"]
            if again:
                assert torch.equal(drawn, draws[-1])
            else:
                draws.append(drawn)
                found += numbers
    assert found == [number for own in parts for number in (int(made["actions"][0, 0, 0]) // 1000 for made in own)]
    shortest = min(map(len, draws))
    assert loading == 1 or len({tuple(drawn[:shortest].tolist()) for drawn in draws}) == loading


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_an_impossible_rank_is_refused(tmp_path: Path, rank: int, ranks: int) -> None:
    for number in range(2):
        write(tmp_path / f"rank_{number}", [fields(0)])
    with TrajectoryReplayBuffer() as buffer, pytest.raises(UserError, match=f"rank {rank} of {ranks}: ranks count"):
        buffer.load_checkpoint(tmp_path, is_distributed=True, local_rank=rank, world_size=ranks)


def test_an_rlinf_checkpoint_equals_the_files_that_rlinf_writes(tmp_path: Path) -> None:
    every = [fields(number, epochs=2, values=True) for number in range(3)]
    with TrajectoryReplayBuffer(seed=11, trajectory_format="pt") as buffer:
        buffer.add_trajectories(every)
        buffer.save_checkpoint(tmp_path / "ours")
    theirs = write(tmp_path / "theirs", every)
    names = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names
    for name in names:
        if name.endswith(".json"):
            assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads((theirs / name).read_text())
        else:
            assert same(torch.load(tmp_path / "ours" / name), torch.load(theirs / name))


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\0b", "x" * 300, "é" * 200])
def test_any_name_of_weights_can_be_exported(tmp_path: Path, name: str) -> None:
    with TrajectoryReplayBuffer(seed=11, trajectory_format="pt") as buffer:
        buffer.add_trajectories([{**fields(0), "model_weights_id": name}])
        buffer.save_checkpoint(tmp_path / "ours")
    with TrajectoryReplayBuffer(tmp_path / "ours", read_only=True) as buffer:
        assert name.startswith(buffer.trajectory(0).model_weights_id[:1])
        assert same(buffer.trajectory(0).actions, fields(0)["actions"])


METHODS = {
    "__init__": "seed enable_cache cache_size sample_window_size auto_save auto_save_path trajectory_format",
    "add_trajectories": "trajectories",
    "sample": "num_chunks",
    "sample_chunks": "num_chunks",
    "is_ready": "min_size",
    "is_ready_async": "min_size",
    "save_checkpoint": "save_path",
    "load_checkpoint": "load_path is_distributed local_rank world_size",
}


def test_arguments_have_rlinf_s_names(tmp_path: Path) -> None:
    for method, names in METHODS.items():
        taken = inspect.signature(getattr(TrajectoryReplayBuffer, method)).parameters
        assert set(names.split()) <= set(taken), method
    with TrajectoryReplayBuffer(seed=0, auto_save=False, auto_save_path="") as buffer:
        buffer.add_trajectories(trajectories=[trajectory(0), trajectory(1)])
        buffer.save_checkpoint(save_path=str(tmp_path / "checkpoint"))
        buffer.load_checkpoint(load_path=str(tmp_path / "checkpoint"), is_distributed=True, local_rank=1, world_size=2)
        # ids count from 0 in each part
        assert (buffer.size, buffer.trajectory_counter, buffer.total_samples) == (1, 1, 18)
        assert len(buffer.sample_chunks(num_chunks=4)["actions"]) == 4


@pytest.mark.parametrize("shape", [None, ["a", "b"], 5])
def test_an_index_with_a_malformed_shape_is_refused_by_its_name(shape: Any, tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(trajectory_format="pt") as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.save_checkpoint(tmp_path / "rlinf")
        index = json.loads((tmp_path / "rlinf" / "trajectory_index.json").read_text())
        index["trajectory_index"]["0"]["shape"] = shape
        (tmp_path / "rlinf" / "trajectory_index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="not an index of RLinf's"):
            TrajectoryReplayBuffer(tmp_path / "rlinf", read_only=True)
        with pytest.raises(UserError, match="not an index of RLinf's"):
            buffer.load_checkpoint(tmp_path / "rlinf")
