"""`gleanrl train PRESET_OR_TOML`: trains, or continues a run with --resume."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from gleanrl.cli.common import (
    INTERRUPTED,
    add_job_arguments,
    import_runtime,
    interrupts_end_the_process,
    job_overrides,
    quiet_pipe,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    folder = Path(__file__).parents[1] / "config" / "presets"
    presets = ", ".join(sorted(path.stem for path in folder.glob("*.toml")))
    parser.add_argument("config", metavar="PRESET_OR_TOML", help=f"{presets}, or a file.toml")
    parser.add_argument("--resume", action="store_true", help="continue the run in the run folder")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the plan only")
    add_job_arguments(parser)
    parser.set_defaults(command=_train)


def _train(args: argparse.Namespace) -> int:
    with interrupts_end_the_process():
        from gleanrl.config.loading import load_job
        from gleanrl.tracking import monitors

    overrides = job_overrides(args)
    config: Any = load_job(args.config, overrides)
    rules = import_runtime(config, "check")
    rules.check(config)
    monitors.check(config.monitor)
    if os.environ.get("RANK", "0") == "0":
        for warning in rules.warnings(config):
            print(f"gleanrl: warning: {warning}", file=sys.stderr)
    if args.dry_run:
        with quiet_pipe():
            print(config.to_toml())
            for name, text in config.plan().items():
                print(f"# {name:<12} {text}")
        return 0
    runtime, console = import_runtime(config, "run"), monitors.Console()
    started = partial(monitors.load_monitors, config.monitor, console=console)
    try:
        complete = runtime.run_training(config, resume=args.resume, console=console, monitors=started)
    except KeyboardInterrupt:
        complete = False
    if not complete:
        settings = [f"--{key}={value}" for key, value in overrides]
        again = shlex.join(["gleanrl", "train", args.config, *settings, "--resume"])
        print(f"gleanrl: interrupted; continue with: {again}", file=sys.stderr)
        return INTERRUPTED

    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking import report

    folder = RunFolder(config.path)
    path = report.build(folder)
    report.show(folder)
    print(f"report: {path}")
    return 0
