"""`gleanrl evaluate RUN_OR_PRESET_OR_TOML`: evaluates a checkpoint or a model on the held-out tasks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gleanrl.cli.common import RUN_HELP, add_job_arguments, import_runtime, load_config, preset_names, quiet_pipe
from gleanrl.utils.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluated = f"{RUN_HELP}; a checkpoint of a run (RUN/checkpoints/step-N); a preset; or a TOML file"
    parser.add_argument("config", metavar="RUN_OR_PRESET_OR_TOML", help=evaluated)
    add_job_arguments(parser)
    parser.set_defaults(command=_evaluate)


def _evaluate(args: argparse.Namespace) -> int:
    if (size := os.environ.get("WORLD_SIZE", "1")) not in ("0", "1"):
        raise UserError(
            f"gleanrl evaluate is one process, but WORLD_SIZE = {size} in the environment; start it without torchrun, "
            "or unset WORLD_SIZE"
        )
    from gleanrl.runtime.run_folder import RunFolder, find_run

    checkpoint, source = None, args.config
    run = find_run(source)
    if run.is_dir() and source not in preset_names():
        from gleanrl.runtime.checkpoints import Checkpoints, check_checkpoint

        if run.resolve().parent.name == "checkpoints":
            check_checkpoint(run)
            checkpoint, run = run, run.resolve().parent.parent
        elif latest := Checkpoints(RunFolder.existing(run).checkpoints_path, keep=1).latest():
            checkpoint = latest[0]
        else:
            raise UserError(f"{run} has no checkpoint yet; it is written every checkpoint.every steps and at the end")
        source = str(run / "config.toml")
    elif run.is_dir():
        print(f"gleanrl: warning: this evaluates the preset {source}, untrained; the run is {run}", file=sys.stderr)
    elif Path(source).name != source and not source.endswith(".toml"):
        raise UserError(
            f"no run folder at {source}; give the folder that `gleanrl train` wrote, a preset or a .toml file"
        )
    config = load_config(args, source)

    from gleanrl.tracking.monitors import Console

    metrics = import_runtime(config, "run").run_evaluation(config, checkpoint, Console())
    with quiet_pipe():
        for name, value in sorted(metrics.items()):
            print(f"{name:<36} {value:.4f}")
    return 0
