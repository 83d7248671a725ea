"""Tests of exporting a buffer as safetensors files and as a LeRobot data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer, lerobot, transfer
from gleanrl.utils.errors import UserError
from tests.buffer.world import trajectory

ENDS = {(2, 0): "terminations", (3, 1): "truncations"}


def made(number: int) -> TensorTrajectory:
    instructions = [["lift", "push", "lift"]] * 3 + [["lift", "push", "öffne"]] * 3
    own = trajectory(number, ends=ENDS, extra=number == 2, task_descriptions=instructions, success=number == 1)
    image = torch.arange(6 * 3 * 2 * 4 * 3).reshape(6, 3, 2, 4, 3).to(torch.uint8)
    values = {name: getattr(own, name) for name in TensorTrajectory.__dataclass_fields__}
    observed = {**own.curr_obs, "image": image + number, "brief": torch.full((6, 3), 0.5, dtype=torch.bfloat16)}
    flags = torch.cat([torch.ones(1, 3, 1, dtype=torch.bool), values["dones"]])
    return TensorTrajectory.of({**values, "curr_obs": observed, "dones": flags, "model_weights_id": "v1"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with TrajectoryReplayBuffer(tmp_path / "source", segment_bytes=1 << 18) as buffer:
        buffer.add_trajectories([made(number) for number in range(4)])
    return tmp_path / "source"


def test_safetensors_hold_every_tensor_as_it_was_added(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert transfer.export("safetensors", [source], tmp_path / "out") == "4 trajectories"
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert (index["format"], index["version"]) == ("gleanrl-trajectories", 1)
    assert len(list((tmp_path / "out").iterdir())) == 5
    for number, entry in enumerate(index["trajectories"]):
        wanted = made(number)
        assert {key: entry[key] for key in ("steps", "batch", "epochs")} == {"steps": 6, "batch": 3, "epochs": 1}
        assert entry["task_descriptions"] == wanted.task_descriptions
        assert (entry["success"], entry["model_weights_id"]) == (number == 1, "v1")
        tensors = load_file(tmp_path / "out" / entry["file"])
        assert ("forward_inputs.extra" in tensors) == (number == 2)
        for name, tensor in tensors.items():
            first, *rest = name.split(".")
            value: Any = getattr(wanted, first)
            for key in rest:
                value = value[key]
            assert tensor.dtype == value.dtype
            assert torch.equal(tensor, value), name
        assert {name.split(".")[0] for name in tensors} >= {"actions", "rewards", "dones", "curr_obs", "next_obs"}


def test_splitting_reports_its_progress_after_each_part(source: Path, tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(source) as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
    reports: list[None] = []
    written = transfer.split(tmp_path / "checkpoint", tmp_path / "split", 3, done=lambda: reports.append(None))
    assert len(reports) == len(written) == 3


def test_the_size_of_what_is_there_does_not_count_dropped_rows(source: Path) -> None:
    every, nbytes = transfer.extent([source])
    with TrajectoryReplayBuffer(source, segment_bytes=1 << 18, max_rows=2 * 18) as buffer:
        buffer.add_trajectories([made(4)])
    left, rest = transfer.extent([source])
    assert left < every == 4
    assert rest / left == pytest.approx(nbytes / every, rel=0.01)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    parquet = pytest.importorskip("pyarrow.parquet")
    files = sorted((folder / "data").rglob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


@pytest.mark.parametrize("small_files", [True, False])
def test_a_lerobot_data_set_holds_every_step_by_episode(
    source: Path, tmp_path: Path, small_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    if small_files:
        for name, value in (("FILE_NBYTES", 10_000), ("GROUP_NBYTES", 5_000), ("CHUNK", 2)):
            monkeypatch.setattr(lerobot, name, value)
    out = tmp_path / "out"
    assert transfer.export("lerobot", [source], out, fps=4.0) == "20 episodes of 72 frames"
    info = json.loads((out / "meta" / "info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"], info["fps"]) == (20, 72, 3, 4)
    rows, features = rows_of(out), info["features"]
    assert set(rows[0]) == set(features)
    assert features["observation.image"] == {"dtype": "uint8", "shape": [2, 4, 3], "names": None}
    assert features["observation.brief"] == {"dtype": "float32", "shape": [1], "names": None}
    assert not [key for key in features if key.startswith(("next_obs", "forward_inputs"))]
    episodes = [row for file in (out / "meta" / "episodes").rglob("*") if file.is_file() for row in pq(file)]
    tasks = {row["task_index"]: row["task"] for row in pq(out / "meta" / "tasks.parquet")}
    assert len(list((out / "data").rglob("*.parquet"))) == (1 if not small_files else len({place(e) for e in episodes}))
    assert not small_files or len({place(episode) for episode in episodes}) > 3
    position = 0
    for episode in episodes:
        own = rows[position : position + episode["length"]]
        assert (episode["dataset_from_index"], episode["dataset_to_index"]) == (position, position + len(own))
        file = info["data_path"].format(chunk_index=place(episode)[0], file_index=place(episode)[1])
        assert episode["episode_index"] in set(parquet.read_table(out / file)["episode_index"].to_pylist())
        assert [row["frame_index"] for row in own] == list(range(len(own)))
        assert [row["timestamp"] for row in own] == [i / 4 for i in range(len(own))]
        assert {row["episode_index"] for row in own} == {episode["episode_index"]}
        assert episode["tasks"] == list(dict.fromkeys(tasks[row["task_index"]] for row in own))
        assert not any(row["next.done"] for row in own[:-1])
        for row in own:
            number, rest = divmod(int(row["action"][0]), 1000)
            step, environment = divmod(rest, 20)
            wanted = made(number)
            assert row["observation.image"] == wanted.curr_obs["image"][step, environment].tolist()
            assert row["observation.state"] == wanted.curr_obs["state"][step, environment].tolist()
            assert row["next.reward"] == pytest.approx(row["action"][0] / 7)
            assert tasks[row["task_index"]] == wanted.task_descriptions[step][environment]  # type: ignore[index]
            assert row["next.done"] == ((step, environment) in ENDS)
        position += len(own)
    assert [row["index"] for row in rows] == list(range(72))
    stats = json.loads((out / "meta" / "stats.json").read_text())
    actions = torch.cat([made(number).actions.reshape(-1, 2) for number in range(4)]).double()  # type: ignore[union-attr]
    assert stats["action"]["mean"] == pytest.approx(actions.mean(0).tolist())
    assert stats["action"]["std"] == pytest.approx(actions.std(0, correction=0).tolist())
    assert (stats["action"]["min"], stats["action"]["count"]) == (actions.min(0).values.tolist(), [72])


def pq(path: Path) -> list[dict[str, Any]]:
    return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()


def place(episode: dict[str, Any]) -> tuple[int, int]:
    return episode["data/chunk_index"], episode["data/file_index"]


def test_a_lerobot_data_set_can_be_read_as_lerobot_reads_it(source: Path, tmp_path: Path) -> None:
    """Column types are derived from ``features`` as LeRobot does; the index of the tasks table is the task's text."""
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    transfer.export("lerobot", [source], tmp_path / "out")
    info = json.loads((tmp_path / "out" / "meta" / "info.json").read_text())
    kinds: dict[str, Any] = {}
    for key, feature in info["features"].items():
        shape, value = tuple(feature["shape"]), datasets.Value(feature["dtype"])
        if shape == (1,):
            kinds[key] = value
        elif len(shape) == 1:
            kinds[key] = datasets.Sequence(value, length=shape[0])
        else:
            kinds[key] = getattr(datasets, f"Array{len(shape)}D")(shape=shape, dtype=feature["dtype"])
    found = datasets.Dataset.from_parquet(
        str(tmp_path / "out/data/chunk-000/file-000.parquet"),
        features=datasets.Features(kinds),
        cache_dir=str(tmp_path / "cache"),
    )
    assert len(found) == 72
    assert torch.equal(torch.tensor(found[1]["observation.image"]), made(0).curr_obs["image"][1, 0])
    tasks = pandas.read_parquet(tmp_path / "out" / "meta" / "tasks.parquet")
    assert [tasks.iloc[i].name for i in range(3)] == ["lift", "push", "öffne"]


def written(folder: Path, **observations: Any) -> Path:
    with TrajectoryReplayBuffer(folder / "in") as buffer:
        buffer.add_trajectories([TensorTrajectory.of({"actions": torch.zeros(2, 1, 1), "curr_obs": observations})])
    return folder / "in"


@pytest.mark.parametrize(
    ("form", "names", "both"),
    [
        ("lerobot", ({"a/b": 1, "a_b": 2}), r"curr_obs\['a/b'\] and curr_obs\['a_b'\]: both .* observation.a_b"),
        ("lerobot", ({"a.b": 1, "a": {"b": 2}}), r"\['a'\]\['b'\] and .*\['a.b'\]: both .* observation.a.b"),
        ("safetensors", ({"a.b": 1, "a": {"b": 2}}), r"curr_obs\['a.*curr_obs.a.b"),
    ],
)
def test_two_fields_that_would_get_the_same_exported_name_are_refused(
    form: str, names: dict[str, Any], both: str, tmp_path: Path
) -> None:
    def filled(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: filled(part) for name, part in tree.items()}
        return torch.full((2, 1, 1), float(tree))

    source = written(tmp_path, **filled(names))
    with pytest.raises(UserError, match=both):
        transfer.export(form, [source], tmp_path / "out")
    assert not (tmp_path / "out").exists()


EXACT = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.float16, torch.bool)
NARROW = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*EXACT, *NARROW], ids=str)
def test_a_lerobot_data_set_stores_every_dtype_exactly_or_as_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([[3, 1], [0, 1]]).to(dtype).reshape(2, 1, 2)
    source = written(tmp_path, typed=values, none=torch.zeros(2, 1, 3, 0))
    transfer.export("lerobot", [source], tmp_path / "out")
    features = json.loads((tmp_path / "out" / "meta" / "info.json").read_text())["features"]
    expected = "float32" if dtype in NARROW else str(dtype).removeprefix("torch.")
    assert features["observation.typed"] == {"dtype": expected, "shape": [2], "names": None}
    assert "observation.none" not in features
    assert [row["observation.typed"] for row in rows_of(tmp_path / "out")] == values[:, 0].double().tolist()


def test_complex_numbers_cannot_be_exported_to_a_lerobot_data_set(tmp_path: Path) -> None:
    source = written(tmp_path, wave=torch.zeros(2, 1, 3, dtype=torch.complex64))
    with pytest.raises(UserError, match=r"curr_obs.wave complex64\[3\]: a LeRobot data set has no complex numbers"):
        transfer.export("lerobot", [source], tmp_path / "out")
    assert transfer.export("safetensors", [source], tmp_path / "out") == "1 trajectories"


def test_a_failed_export_leaves_no_files(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with TrajectoryReplayBuffer(tmp_path / "none"):
        pass
    with pytest.raises(UserError, match="there are no trajectories to export"):
        transfer.export("lerobot", [tmp_path / "none"], tmp_path / "out")
    next(source.glob("*-rows-001-*")).unlink()
    for form in transfer.FORMATS:
        with pytest.raises(UserError, match="its rows are lost"):
            transfer.export(form, [source], tmp_path / "out")
        with pytest.raises(UserError, match="there already"):
            transfer.export(form, [source], tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "none", "source"]
    left_out: list[str] = []
    assert transfer.export("safetensors", [source], tmp_path / "out", left_out=left_out) == "3 trajectories"
    assert len(left_out) == 1


def test_a_missing_pyarrow_is_an_error_that_says_how_to_install_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'gleanrl\[parquet\]'"):
        transfer.export("lerobot", [source], tmp_path / "out")
