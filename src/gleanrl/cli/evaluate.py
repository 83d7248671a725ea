"""`gleanrl evaluate`: evaluates a run, a checkpoint, an exported model or a preset on the held-out tasks.

It prints a table and leaves a folder with the metrics, every attempt and an HTML report.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from gleanrl.cli.common import RUN_HELP, add_job_arguments, import_runtime, load_config, preset_names, quiet_pipe
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import nearest

if TYPE_CHECKING:
    from gleanrl.runtime.run_folder import Checkpoint

UNTRAINED = Path("evaluations")
"""Folder of the evaluations of presets and configuration files, which belong to no run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluated = (
        f"{RUN_HELP} (its newest checkpoint); a checkpoint (RUN/checkpoints/step-N); the exported model (RUN/model); "
        "or a preset or a TOML file (its model before training)"
    )
    parser.add_argument("source", metavar="RUN_OR_PRESET_OR_TOML", help=evaluated)
    text = "folder to write (default: a new one in RUN/evaluations, or in evaluations/ for a preset or a TOML file)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    add_job_arguments(parser)
    parser.set_defaults(command=_evaluate)


@dataclass(frozen=True)
class Source:
    """What is evaluated: a configuration (a preset or a path) and, unless it is untrained, a checkpoint or a model."""

    config: str
    folder: Path  # where the evaluation's folder is written, unless --out is given
    name: str  # name of the evaluation's folder
    evaluated: str  # what is evaluated, for people to read
    step: int = 0  # number of steps that the policy was trained for
    checkpoint: Checkpoint | None = None
    model: Path | None = None


def find_source(name: str) -> Source:
    """Return what the argument ``name`` of `gleanrl evaluate` stands for.

    Raises:
        UserError: there is no such run, preset or file, the run has no checkpoint yet, or the checkpoint is damaged.
    """
    from gleanrl.runtime.checkpoints import find_checkpoint
    from gleanrl.runtime.run_folder import MODEL_STEP, RunFolder, find_run

    path = find_run(name)
    own = RunFolder(path.parent)
    if path == own.config_path and (own.lock_path.exists() or own.evaluation_path.exists()):
        path = own.path  # the configuration that a run has written into its folder stands for the run
    elif not path.is_dir() or name in preset_names():
        if path.is_dir():
            print(f"gleanrl: warning: this evaluates the preset {name}, untrained; the run is {path}", file=sys.stderr)
        elif not name.endswith(".toml") and name not in preset_names():
            runs = path.parent if path.name != name else Path("runs")
            known = [folder.name for folder in runs.iterdir()] if runs.is_dir() else []
            hint = nearest(path.name, [*known, *preset_names()])
            raise UserError(
                f"there is no run, checkpoint, model or preset {name!r}{hint or '; `gleanrl runs` lists the runs'} "
                f"(presets: {', '.join(preset_names())}; the name of a configuration file ends in .toml)"
            )
        return Source(name, UNTRAINED, Path(name).stem, f"{name} (the model before training)")

    if RunFolder(path).evaluation_path.exists():
        raise UserError(f"{path} is an evaluation; give the run, the checkpoint or the model to evaluate")
    if (path / "config.json").exists():  # a Hugging Face model directory
        # ``model`` in a run folder, or a model that `gleanrl export` has written into its ``exports``
        runs = [RunFolder(folder) for folder in path.resolve().parents[:2]]
        run = next((each for each in runs if each.config_path.exists()), None)
        if run is None:
            raise UserError(
                f"{path} is a model outside of a run folder, which does not say which tasks it is for; use "
                f"gleanrl evaluate PRESET_OR_TOML --model.init {path} --warm_start.enabled false"
            )
        if (path / MODEL_STEP).exists():
            step = int((path / MODEL_STEP).read_text())
        else:  # the run was killed right after it had exported the model
            rows = run.read_metrics()
            step = rows[-1].step if rows else 0
        return Source(str(run.config_path), run.evaluations_path, path.name, name, step, model=path)
    run, checkpoint = find_checkpoint(path)
    folder = f"step-{checkpoint.step}"
    return Source(str(run.config_path), run.evaluations_path, folder, name, checkpoint.step, checkpoint)


def _evaluate(args: argparse.Namespace) -> int:
    if (size := os.environ.get("WORLD_SIZE", "1")) not in ("0", "1"):
        raise UserError(
            f"gleanrl evaluate is one process, but WORLD_SIZE = {size} in the environment; start it without torchrun, "
            "or unset WORLD_SIZE"
        )
    source = find_source(args.source)
    if args.out is not None and args.out.exists():
        raise UserError(f"{args.out} exists already; choose another folder")
    if source.model is not None:
        args.overrides = [("model.init", str(source.model)), ("warm_start.enabled", "false"), *args.overrides]
    config = load_config(args, source.config)

    from gleanrl.runtime.evaluation_folder import write_evaluation
    from gleanrl.tracking import report
    from gleanrl.tracking.monitors import Console

    result = import_runtime(config, "run").run_evaluation(config, source.checkpoint, Console())
    names = (source.name if number == 1 else f"{source.name}-{number}" for number in count(1))
    folder = args.out or next(path for name in names if not (path := source.folder / name).exists())
    write_evaluation(folder, config, source.evaluated, source.step, result)
    page = report.build(folder)
    with quiet_pipe(), suppress(SystemExit):  # rich raises SystemExit if standard output is a closed pipe
        report.show(folder)
        print(f"evaluation: {folder}")
        print(f"report: {page}")
    return 0
