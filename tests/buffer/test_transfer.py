"""Tests of exporting a buffer as safetensors files and as a LeRobot data set, and of reading LeRobot data sets."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.buffer import TensorTrajectory, TrajectoryReplayBuffer, checkpoint, lerobot, transfer
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


@pytest.mark.parametrize("max_rows", [None, 12 * 18])
def test_a_split_of_a_buffer_that_is_being_written_has_each_trajectory_once(
    tmp_path: Path, max_rows: int | None
) -> None:
    """With ``max_rows``, the writer also drops trajectories that the split has not read yet."""
    with TrajectoryReplayBuffer(tmp_path / "live", segment_bytes=1 << 12, max_rows=max_rows) as live:
        live.add_trajectories([trajectory(number, wide=False) for number in range(12)])

        def write_more() -> None:
            first = live.trajectory_counter
            live.add_trajectories([trajectory(first + number, wide=False) for number in range(12)])

        written = transfer.split(tmp_path / "live", tmp_path / "split", 3, done=write_more)
    assert [count for count, _ in written] == [4, 4, 4]
    found = []
    for part in range(3):
        with TrajectoryReplayBuffer(tmp_path / "split" / f"rank-{part}", read_only=True) as reader:
            found += [int(reader.trajectory(number).versions[0, 0, 0]) for number in range(4)]
    assert found == list(range(12))


def test_the_size_of_what_is_there_does_not_count_dropped_rows(source: Path) -> None:
    with checkpoint.opened([source]) as before:
        every, nbytes = transfer.extent(before)
    with TrajectoryReplayBuffer(source, segment_bytes=1 << 18, max_rows=2 * 18) as buffer:
        buffer.add_trajectories([made(4)])
    with checkpoint.opened([source]) as after:
        left, rest = transfer.extent(after)
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
    parquet, Image = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("PIL.Image")
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
    names = ["height", "width", "channels"]
    assert features["observation.image"] == {"dtype": "image", "shape": [2, 4, 3], "names": names}
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
            image = Image.open(io.BytesIO(row["observation.image"]["bytes"]))
            assert np.array_equal(np.asarray(image), wanted.curr_obs["image"][step, environment])
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
    pixels = torch.cat([made(number).curr_obs["image"].reshape(-1, 3) for number in range(4)]) / 255
    assert np.array(stats["observation.image"]["mean"]).shape == (3, 1, 1)  # LeRobot's shape, for values from 0 to 1
    for name, wanted in (("mean", pixels.mean(0)), ("std", pixels.std(0, correction=0)), ("max", pixels.amax(0))):
        assert np.ravel(stats["observation.image"][name]) == pytest.approx(wanted.numpy(), rel=1e-5)


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
        if feature["dtype"] == "image":
            kinds[key] = datasets.Image()
            continue
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
    assert np.array_equal(np.asarray(found[1]["observation.image"]), made(0).curr_obs["image"][1, 0])
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


@pytest.mark.parametrize(("form", "name"), [("lerobot", "timestamp"), ("safetensors", "__metadata__")])
def test_a_field_with_a_name_that_the_format_uses_is_refused(form: str, name: str, tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path / "in") as buffer:
        buffer.add_trajectories([{"actions": torch.zeros(2, 1, 1), name: torch.ones(2, 1, 1)}])
    with pytest.raises(UserError, match=name):
        transfer.export(form, [tmp_path / "in"], tmp_path / "out")
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
    with pytest.raises(UserError, match=r"pip install 'gleanrl\[lerobot\]'"):
        transfer.export("lerobot", [source], tmp_path / "out")


def test_an_exported_data_set_is_loaded_as_one_trajectory_for_each_episode(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with TrajectoryReplayBuffer() as buffer:
        states = {"states": torch.rand(4, 2, 3), "camera": torch.randint(0, 255, (4, 2, 3, 8, 6), dtype=torch.uint8)}
        ends = torch.zeros(4, 2, 2, dtype=torch.bool)
        ends[2, 0, 1] = ends[3, 1, 0] = True  # environment 0 begins another episode in step 3
        first = torch.tensor([[True], [False]])  # environment 0
        flags = {"dones": ends, "terminations": ends & ~first, "truncations": ends & first}
        given = {"actions": torch.rand(4, 2, 2), "rewards": torch.rand(4, 2, 2), "curr_obs": states, **flags}
        buffer.add_trajectories([{**given, "task_descriptions": ["lift", "push"]}])
        buffer.save_checkpoint(tmp_path / "checkpoint")
    transfer.export("lerobot", [tmp_path / "checkpoint"], tmp_path / "out")
    info = json.loads((tmp_path / "out" / "meta" / "info.json").read_text())
    assert info["features"]["observation.camera"]["names"] == ["channels", "height", "width"]
    assert info["features"]["observation.state"]["shape"] == [3]  # LeRobot's name of the states
    with TrajectoryReplayBuffer(tmp_path / "loaded") as loaded:
        loaded.load_checkpoint(tmp_path / "out")
        assert [len(loaded.trajectory(i).actions) for i in range(3)] == [3, 1, 4]  # type: ignore[arg-type]
        for number, (environment, steps) in enumerate([(0, slice(0, 3)), (0, slice(3, 4)), (1, slice(0, 4))]):
            found = loaded.trajectory(number)
            for name in ("actions", "rewards", "dones", "terminations", "truncations"):
                wanted = given[name][steps, environment : environment + 1].clone()
                if number == 1 and name in ("dones", "truncations"):
                    wanted[-1, 0, 1] = True  # the data set ends here, although the episode went on
                assert torch.equal(getattr(found, name), wanted), name
            for name, values in states.items():
                wanted = values[steps, environment : environment + 1]
                assert torch.equal(found.curr_obs[name], wanted)
                assert torch.equal(found.next_obs[name][:-1], wanted[1:])
            assert found.task_descriptions == (("lift", "push")[environment],)
    with TrajectoryReplayBuffer() as part:
        part.load_checkpoint(tmp_path / "out", is_distributed=True, local_rank=1, world_size=2)
        assert (len(part), part.total_samples) == (1, 4)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A data set as LeRobot records it: episodes of 4 and 3 frames with a video and texts, but no rewards or flags."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    av = pytest.importorskip("av")
    out, key, place = tmp_path / "recorded", "observation.images.top", "chunk-{chunk_index:03d}/file-{file_index:03d}"
    for folder in ("meta/episodes/chunk-000", "data/chunk-000", f"videos/{key}/chunk-000"):
        (out / folder).mkdir(parents=True)
    vector = {"dtype": "float32", "shape": [2], "names": ["x", "y"]}
    features: dict[str, Any] = {"action": vector, "observation.state": vector}
    features[key] = {"dtype": "video", "shape": [16, 32, 3], "names": ["height", "width", "channels"]}
    features |= {"next.success": {"dtype": "bool", "shape": [1]}, "note": {"dtype": "string", "shape": [1]}}
    paths = {"data_path": f"data/{place}.parquet", "video_path": f"videos/{{video_key}}/{place}.mp4"}
    info = {"codebase_version": "v3.0", "fps": 10, "features": features, **paths}
    (out / "meta/info.json").write_text(json.dumps(info))
    parquet.write_table(arrow.table({"task_index": [0], "task": ["stack"]}), out / "meta/tasks.parquet")
    episodes = []
    for number, (first, length) in enumerate([(0, 4), (4, 3)]):
        episode = {"episode_index": number, "length": length, f"videos/{key}/from_timestamp": first / 10}
        for stem in ("data", f"videos/{key}"):
            episode |= {f"{stem}/chunk_index": 0, f"{stem}/file_index": 0}
        episodes.append(episode)
    parquet.write_table(arrow.Table.from_pylist(episodes), out / "meta/episodes/chunk-000/file-000.parquet")
    rows = arrow.table(
        {
            **{name: [[float(i), 0.5] for i in range(7)] for name in ("action", "observation.state")},
            **{"next.success": [False] * 6 + [True], "note": ["a"] * 7},
            **{"episode_index": [0] * 4 + [1] * 3, "task_index": [0] * 7},
        }
    )
    parquet.write_table(rows, out / "data/chunk-000/file-000.parquet")
    with av.open(str(out / f"videos/{key}/chunk-000/file-000.mp4"), "w") as video:
        stream = video.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for i in range(7):
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), 30 * i, np.uint8), format="rgb24")
            video.mux(stream.encode(frame))
        video.mux(stream.encode(None))
    return out


def test_a_recorded_data_set_is_read_with_its_videos(recorded: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        with pytest.warns(UserWarning, match="note"):
            buffer.load_checkpoint(recorded)
        for number, (first, length) in enumerate([(0, 4), (4, 3)]):
            found = buffer.trajectory(number)
            assert found.actions[:, 0, 0].tolist() == list(range(first, first + length))  # type: ignore[index]
            assert torch.equal(found.curr_obs["states"], found.actions)
            grey = found.curr_obs["images.top"].float().mean(dim=(1, 2, 3, 4))
            assert grey.tolist() == pytest.approx([30 * i for i in range(first, first + length)], abs=5)
            assert found.dones[:, 0, 0].tolist() == found.terminations[:, 0, 0].tolist()  # type: ignore[index]
            assert found.dones[:, 0, 0].tolist() == [False] * (length - 1) + [True]  # type: ignore[index]
            assert (found.success, found.task_descriptions) == (bool(number), ("stack",))


HARM = {
    "older version": lambda path: edit(path / "meta/info.json", '"v3.0"', '"v2.1"'),
    "damaged description": lambda path: edit(path / "meta/info.json", '"features"', '"feature"'),
    "missing file of frames": lambda path: shutil.rmtree(path / "data"),
    "fewer frames than stated": lambda path: edit(path / "meta/info.json", '"fps": 10', '"fps": 20'),
    "frames of two episodes mixed": lambda path: mix(path / "data/chunk-000/file-000.parquet"),
    "missing column": lambda path: edit(path / "meta/info.json", '"action"', '"actuator"'),
}


def mix(path: Path) -> None:
    """Exchange the numbers of the episodes of two frames, so that each episode still has as many as before."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path)
    at = table.column_names.index("episode_index")
    parquet.write_table(table.set_column(at, "episode_index", arrow.array([0, 0, 0, 1, 0, 1, 1])), path)


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.filterwarnings("ignore:.*no place for")
def test_a_data_set_that_cannot_be_read_is_an_error_and_loads_nothing(recorded: Path, harm: str) -> None:
    HARM[harm](recorded)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([made(0)])
        with pytest.raises(UserError, match=str(recorded)):
            buffer.load_checkpoint(recorded)
        assert len(buffer) == 1


@pytest.mark.parametrize("name", ["success", "next_obs", "curr_obs", "model_weights_id", "actions", "weights"])
def test_a_feature_of_a_data_set_with_a_name_of_the_buffer_is_left_out_with_a_warning(
    name: str, tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    with TrajectoryReplayBuffer(tmp_path / "source") as buffer:
        buffer.add_trajectories([{**vars(trajectory(0, batch=1)), "other": torch.full((6, 1, 1), 7.0)}])
    out = tmp_path / "out"
    transfer.export("lerobot", [tmp_path / "source"], out)
    info = json.loads((out / "meta" / "info.json").read_text())
    # the renamed feature comes first
    info["features"] = {name: info["features"].pop("other"), **info["features"]}
    (out / "meta" / "info.json").write_text(json.dumps(info))
    [file] = (out / "data").rglob("*.parquet")
    frames = parquet.read_table(file)
    parquet.write_table(frames.rename_columns([name if own == "other" else own for own in frames.column_names]), file)
    with TrajectoryReplayBuffer() as buffer:
        with pytest.warns(UserWarning, match=rf"no place for {name} \(the field {name}"):
            buffer.load_checkpoint(out)
        loaded = buffer.trajectory(0)
    assert loaded.actions is not None
    assert torch.equal(loaded.actions, trajectory(0, batch=1).actions)
    assert (loaded.success, loaded.model_weights_id, dict(loaded.extra_fields)) == (None, "", {})
    assert loaded.next_obs.keys() == loaded.curr_obs.keys() == {"states", "deep.small"}


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex128])
def test_a_dtype_that_safetensors_lacks_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(tmp_path / "source") as buffer:
        buffer.add_trajectories([{"wave": torch.zeros(2, 1, 3, dtype=dtype)}])
    with pytest.raises(UserError, match=r"wave: safetensors has no complex\d+; store real and imaginary parts"):
        transfer.export("safetensors", [tmp_path / "source"], tmp_path / "out")
