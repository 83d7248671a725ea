"""Records the results of a few tiny runs, and later checks whether the code still computes the same results bit by bit.

    python benchmarks/golden.py record FILE [--only sync,lora] [--source DIR]
    python benchmarks/golden.py compare FILE [--only sync,lora] [--source DIR]

Use it for refactorings, which must not change the arithmetic: record before, compare after. Each run is
`python -m gleanrl train` in a process of its own, with ``--source`` (default: ``src`` of this checkout) as PYTHONPATH.
This script does not import the package, so it can run old and new versions of it. ``record`` writes a JSON file.
``compare`` makes the runs again and prints for each run that all bits are the same, or what differs. Its exit status is
1 if anything differs. Results depend on the processor and on library versions, so record and compare on the same
machine.

Recorded for each run:

* metrics: all numbers in metrics.jsonl by step and name, except those that depend on time, on a service or on the size
  of a file (`timed`).
* exported: a digest of each tensor of the exported weights (model/ or policy.safetensors).
* checkpoint: a digest of each model tensor in the newest checkpoint, because critics and adapters are not exported.
  Tensors are matched by content, so that they may be renamed. A tensor that is found neither by content nor by name is
  listed as not compared, and does not count as a difference, because the format may have changed. Optimizer states are
  left out; a difference in them shows in the metrics of later steps. Sharded checkpoints are left out too, because
  their weights are also exported.

`Case.used` lists metrics which prove that a run has used the feature that it is named after. If one is too low,
recording and comparing fail.

All of these runs are deterministic. Each uses one thread. The order of chunks in `pipelined` is the order in which
groups complete, which is also deterministic here: with staleness 0 the sampler waits for all episodes, each episode is
a single turn that is sampled in one batch, and environments and rewards answer in the same event loop.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

LETTERS = """
[run]
steps = 5
threads = 1

[environment]
name = "reasoning_gym"
train_tasks = 64
eval_tasks = 4
warm_start_tasks = 200

[environment.options]
task = "letter_counting"
config = { min_words = 1, max_words = 2 }
answer = "whole"
instruction = ""

[model]
hidden_size = 32
layers = 2
max_context = 192
vocabulary = 103

[warm_start]
demonstrations = 200
steps = 80
batch = 32
lr = 5e-3

[context]
max_turns = 1
max_tokens_per_turn = 4

[schedule]
batch = 4
group = 6
chunks = 2

[learner]
lr = 1e-3
updates_per_step = 2

[evaluation]
every = 0
samples = 2

[checkpoint]
every = 0
"""

HOUSEHOLDS = """
[run]
steps = 5
threads = 1

[environment]
name = "alfworld"
train_tasks = 16
eval_tasks = 4
warm_start_tasks = 16

[environment.options]
goals = ["put"]
receptacles = [4, 4]
objects = [2, 2]
object_kinds = ["apple", "bread", "cup", "egg"]
same_kind = 1

[model]
hidden_size = 64
layers = 2
max_context = 320

[warm_start]
demonstrations = 64
steps = 160
batch = 16
lr = 5e-3

[context]
max_turns = 8
max_tokens_per_turn = 12

[schedule]
batch = 2
group = 6

[learner]
lr = 1e-3

[evaluation]
every = 0
samples = 1

[checkpoint]
every = 0
"""

PENDULUM = """
job = "embodied"

[run]
steps = 6
threads = 1

[environment]
id = "Pendulum-v1"
count = 2

[schedule]
chunk_steps = 10
warmup = 2

[learner]
batch = 16
hidden_size = 16
update_ratio = 0.25

[demonstrations]
expert = "pendulum"
chunk_steps = 20

[evaluation]
every = 3
episodes = 2

[checkpoint]
every = 0
"""

REPLAY = {"enabled": "true", "start_progress": "0", "probe_fraction": "0", "pool_updates": "1", "pool_batch": "4"}
RENAMED = {
    "practice/": "replay_update/",
    "replay/appraise_failed": "replay/estimate_failed",
    "replay_update/appraise_failed": "replay_update/estimate_failed",
}
"""Old beginnings of metric names and the new ones: numbers of records and trees from before are compared too."""
GONE = {"schedule/dropped_stale"}  # removed metrics; this one was equal to groups/dropped_stale
SHOWN = 4  # maximum number of differences that are printed for each run


@dataclass(frozen=True)
class Case:
    """A run: its TOML configuration, and further command-line arguments.

    ``used`` are pairs of a metric and a number. The sum of the metric over the steps must exceed the number.
    """

    config: str = LETTERS
    arguments: tuple[str, ...] = ()
    used: tuple[tuple[str, float], ...] = (("tokens/trained", 0), ("reward/std", 0))


TRAINS = Case().used
CASES: Mapping[str, Case] = {
    "sync": Case(),
    "turns": Case(HOUSEHOLDS, used=(*TRAINS, ("episode/turns", 5))),
    "replay": Case(
        arguments=tuple(word for key, value in REPLAY.items() for word in (f"--replay.{key}", value)),
        used=(*TRAINS, ("replay/tokens", 0), ("replay_update/0/tokens/trained", 0)),
    ),
    "ppo": Case(arguments=("--credit.estimator", "gae"), used=(*TRAINS, ("critic/loss", 0))),
    "lora": Case(arguments=("--learner.lora_rank", "4")),
    "pipelined": Case(arguments=("--schedule.preset", "pipelined"), used=(*TRAINS, ("schedule/chunks", 5))),
    "fsdp": Case(arguments=("--learner.ranks", "2")),
    "ray": Case(arguments=("--runtime", "ray", "--ray.samplers", "1")),
    "embodied": Case(PENDULUM, used=(("updates/done", 0), ("buffer/demonstration_rows", 0))),
}


def main() -> int:
    args = arguments()
    source = args.source.resolve()
    names = args.only.split(",") if args.only else list(CASES)
    if unknown := set(names) - CASES.keys():
        sys.exit(f"golden: unknown runs {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    before = json.loads(args.file.read_text()) if args.command == "compare" else {}
    if before and before["platform"] != (here := platform_facts()):
        print(f"golden: recorded on another platform: {before['platform']}, this is {here}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        environment = variables(Path(folder), source)
        check_source(environment, source, Path(folder))
        if args.command == "record":
            record(args.file, names, Path(folder), environment)
            return 0
        return compare(before["runs"], names, Path(folder), environment)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", metavar="NAME,...", help=", ".join(CASES))
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[1] / "src")
    return parser.parse_args()


def record(file: Path, names: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    runs = {name: observe(name, folder, environment) for name in names}
    file.write_text(json.dumps({"platform": platform_facts(), "runs": runs}, indent=1))
    print(f"{len(runs)} runs recorded in {file}")


def compare(before: Mapping[str, Any], names: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    if missing := [name for name in names if name not in before]:
        sys.exit(f"golden: not in the record: {', '.join(missing)}")
    changed = 0
    for name in names:
        after = observe(name, folder, environment)
        found, not_compared = differences(before[name], after)
        note = f"; not compared: {listed(not_compared)}" if not_compared else ""
        counts = f"{sum(map(len, after['metrics'].values()))} numbers, {len(after['exported'])} tensors"
        print(f"{name}: {f'DIFFERS: {listed(found)}' if found else f'same bits ({counts})'}{note}", flush=True)
        changed += bool(found)
    return int(changed > 0)


# --- a run --------------------------------------------------------------------------------------
def observe(name: str, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Make the run ``name`` and return its results. Exits if the run fails or a metric in `Case.used` is too low."""
    case, began = CASES[name], time.monotonic()
    print(f"{name}: running", file=sys.stderr, flush=True)
    (folder / f"{name}.toml").write_text(case.config)
    command = [sys.executable, "-m", "gleanrl", "train", f"{name}.toml", "--run.folder", str(folder / "runs")]
    ended = subprocess.run(
        [*command, "--run.name", name, *case.arguments],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        sys.exit(f"{ended.stdout}\ngolden: {name} ended with status {ended.returncode}")
    run = folder / "runs" / name
    seen = {"metrics": metrics(run / "metrics.jsonl"), "exported": exported(run), "checkpoint": checkpoint(run)}
    for metric, least in case.used:
        total = sum(numbers.get(metric, 0.0) for numbers in seen["metrics"].values())
        if total <= least:
            sys.exit(f"golden: {name} proves nothing: {metric} adds up to {total}, which must be above {least}")
    print(f"{name}: done in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return seen


def variables(folder: Path, source: Path) -> dict[str, str]:
    """Return the environment variables of the runs.

    All runs share a cache that is empty at first, so that runs with the same warm start compute it only once.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {
        **inherited,
        "PYTHONPATH": str(source),
        "GLEANRL_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def check_source(environment: Mapping[str, str], source: Path, folder: Path) -> None:
    """Exit with an error unless the runs will import the package from ``source``."""
    ask = [sys.executable, "-c", "import gleanrl; print(gleanrl.__file__)"]
    found = subprocess.run(ask, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).resolve().is_relative_to(source):
        sys.exit(f"golden: {source} holds no gleanrl; {found} would run")
    print(f"golden: runs import {found}", file=sys.stderr)


def platform_facts() -> dict[str, str]:
    return {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}


# --- what a run left ----------------------------------------------------------------------------
def metrics(path: Path) -> dict[str, dict[str, float]]:
    """Return the numbers in metrics.jsonl by step and name. Steps are text, because JSON's keys are."""
    steps: dict[str, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        step = str(row.pop("step"))
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and not timed(name)}
        steps.setdefault(step, {}).update(with_new_names(numbers))
    return steps


def with_new_names(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers under the present names of their metrics, without removed metrics."""
    found = {name: value for name, value in numbers.items() if name not in GONE}
    for old, new in RENAMED.items():
        for name in [name for name in found if name.startswith(old)]:
            found[new + name.removeprefix(old)] = found.pop(name)
    return found


def timed(name: str) -> bool:
    """Return whether a metric depends on time or on a service, so that it differs between equal runs.

    This includes the size of the pool, because stored trajectories contain durations.
    """
    clock = name == "time" or name.startswith(("time/", "device/", "service/")) or name.endswith(("_s", "_per_s"))
    return clock or name in ("pool/bytes", "pool/failure_bytes")


def exported(run: Path) -> dict[str, str]:
    """Return a digest of each tensor in the run's safetensors files outside of checkpoints."""
    files = [path for path in sorted(run.rglob("*.safetensors")) if "checkpoints" not in path.relative_to(run).parts]
    found = {name: digest(tensor) for path in files for name, tensor in load_file(path).items()}
    if not found:
        sys.exit(f"golden: {run.name} left no exported weights")
    return found


def checkpoint(run: Path) -> dict[str, str]:
    """Return a digest of each model tensor in the newest checkpoint, by file and name; empty if it is sharded."""
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    found: dict[str, str] = {}
    for path in sorted(newest.rglob("*")):
        if path.suffix == ".safetensors":
            saved: Any = load_file(path)
        elif path.suffix == ".pt":
            saved = torch.load(path, map_location="cpu", weights_only=True)
        else:
            continue
        found |= {name: digest(tensor) for name, tensor in flat(saved, path.stem) if not of_training(name)}
    return found


def flat(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the path and the tensor for each tensor in nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from flat(inner, f"{name}/{position}")


def of_training(name: str) -> bool:
    """Return whether a tensor belongs to an optimizer or a random generator instead of a model, judging by its name."""
    return any(word in name.lower() for word in ("optim", "random", "rng", "generator"))


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


# --- comparing ----------------------------------------------------------------------------------
def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the differences, ordered by step, and the tensors of the old checkpoint that could not be compared."""
    found: list[str] = []
    for step in sorted({*before["metrics"], *after["metrics"]}, key=int):
        old, new = with_new_names(before["metrics"].get(step, {})), after["metrics"].get(step, {})
        found += [f"{line} at step {step}" for line in changes(old, new)]
    found += [f"tensor {line}" for line in changes(before["exported"], after["exported"])]
    contents, not_compared = set(after["checkpoint"].values()), []
    for name, content in before["checkpoint"].items():
        if content in contents:
            continue
        if name in after["checkpoint"]:
            found.append(f"checkpoint's tensor {name}")
        else:
            not_compared.append(f"checkpoint's tensor {name}")
    return found, not_compared


def changes(old: Mapping[str, float | str], new: Mapping[str, float | str]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if name not in new:
            yield f"{name} is gone"
        elif name not in old:
            yield f"{name} is new"
        elif repr(old[name]) != repr(new[name]):  # by text, NaN equals NaN, and -0.0 differs from 0.0
            numbers = f" {old[name]!r} -> {new[name]!r}" if isinstance(new[name], float) else ""
            yield f"{name}{numbers}"


def listed(lines: Sequence[str]) -> str:
    rest = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return ", ".join(lines[:SHOWN]) + rest


if __name__ == "__main__":
    sys.exit(main())
