"""Freeze what a few tiny runs compute, and later say whether the code still computes the same to the bit.

    python benchmarks/golden.py record FILE [--only sync,lora] [--source DIR]
    python benchmarks/golden.py compare FILE [--only sync,lora] [--source DIR]

For refactorings, which must not change arithmetic. Every run is `python -m gleanrl train some.toml` in a process of
its own, with ``--source`` (default: this checkout's src) as PYTHONPATH. Nothing of the package is imported here, so the
same script works on an old tree and on a new one. ``record`` writes JSON; ``compare`` runs again and prints a line for
each run: the same bits, or what differs. It exits with status 1 if anything does. Digests depend on processor and
libraries, so record and compare on one machine.

Kept of each run:

* metrics: every number of metrics.jsonl by step and name, but those that a clock, a service or the size of a file has a
  say in (`timed`).
* exported: a digest of every tensor of the weights that the run leaves for others (model/, or policy.safetensors).
* checkpoint: the same of the models in the newest checkpoint, as critics and adapters are not exported. Here a tensor
  is found by its content, so names may change. One that is found neither by content nor by name is listed as not
  compared and is no difference: the format may have changed. Optimizer states are left out, since the metrics of later
  steps depend on them, and checkpoints in shards, whose weights are exported too.

Each run must also have used what it is named after (`Case.used`), or recording and comparing fail.

All of these runs repeat to the bit. Each computes with one thread. `pipelined` takes chunks in the order in which
groups are complete. That order is decided here: under staleness 0 the sampler waits for all episodes, an episode is one
turn that is sampled in one burst, and environments and rewards answer inside the same event loop.
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
GONE = {"schedule/dropped_stale"}  # it counted what groups/dropped_stale counts
SHOWN = 4  # differences of a run that are printed


@dataclass(frozen=True)
class Case:
    """A run: its configuration, further arguments, and metrics whose sum over the steps must be above a number."""

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
    """Make the run and read what it left; ends the program where the run fails or did not use what it should."""
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
    """The environment of all runs; they share a cache, which begins empty, so one makes the warm start of most."""
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
    """End the program unless the runs will import the package from ``source``."""
    ask = [sys.executable, "-c", "import gleanrl; print(gleanrl.__file__)"]
    found = subprocess.run(ask, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).resolve().is_relative_to(source):
        sys.exit(f"golden: {source} holds no gleanrl; {found} would run")
    print(f"golden: runs import {found}", file=sys.stderr)


def platform_facts() -> dict[str, str]:
    return {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}


# --- what a run left ----------------------------------------------------------------------------
def metrics(path: Path) -> dict[str, dict[str, float]]:
    """Numbers by step (as text, as JSON has it) and name; a step's lines are merged."""
    steps: dict[str, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        step = str(row.pop("step"))
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and not timed(name)}
        steps.setdefault(step, {}).update(with_new_names(numbers))
    return steps


def with_new_names(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers under the names that their metrics have today."""
    found = {name: value for name, value in numbers.items() if name not in GONE}
    for old, new in RENAMED.items():
        for name in [name for name in found if name.startswith(old)]:
            found[new + name.removeprefix(old)] = found.pop(name)
    return found


def timed(name: str) -> bool:
    """What a clock or a service has a say in; the pool's bytes, since a stored trajectory says how long it took."""
    clock = name == "time" or name.startswith(("time/", "device/", "service/")) or name.endswith(("_s", "_per_s"))
    return clock or name == "pool/bytes"


def exported(run: Path) -> dict[str, str]:
    """Digests of the weights outside the checkpoints."""
    files = [path for path in sorted(run.rglob("*.safetensors")) if "checkpoints" not in path.relative_to(run).parts]
    found = {name: digest(tensor) for path in files for name, tensor in load_file(path).items()}
    if not found:
        sys.exit(f"golden: {run.name} left no exported weights")
    return found


def checkpoint(run: Path) -> dict[str, str]:
    """Digests of the models in the newest checkpoint, by file and name; empty where it is in shards."""
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
    """The tensors at any depth of dictionaries and lists, by their path."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from flat(inner, f"{name}/{position}")


def of_training(name: str) -> bool:
    """Whether a tensor belongs to an optimizer or a random generator, not to a model."""
    return any(word in name.lower() for word in ("optim", "random", "rng", "generator"))


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


# --- comparing ----------------------------------------------------------------------------------
def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What differs, the earliest step first; and tensors of the checkpoint that were not found again."""
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
        elif repr(old[name]) != repr(new[name]):  # NaN is itself here, and -0.0 is not 0.0
            numbers = f" {old[name]!r} -> {new[name]!r}" if isinstance(new[name], float) else ""
            yield f"{name}{numbers}"


def listed(lines: Sequence[str]) -> str:
    rest = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return ", ".join(lines[:SHOWN]) + rest


if __name__ == "__main__":
    sys.exit(main())
