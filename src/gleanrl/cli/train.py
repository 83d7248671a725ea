"""`gleanrl train PRESET_OR_TOML`: trains a model, or continues an interrupted run with --resume."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import suppress
from functools import partial

from gleanrl.cli.common import INTERRUPTED, add_job_arguments, import_runtime, load_config, preset_names, quiet_pipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"a preset ({', '.join(preset_names())}) or the path of a TOML file"
    parser.add_argument("config", metavar="PRESET_OR_TOML", help=text)
    parser.add_argument("--resume", action="store_true", help="continue the run in the run folder from its checkpoint")
    text = "make a few tasks, look for the model, and print all settings and a summary of the run, without training"
    parser.add_argument("--dry-run", action="store_true", help=text)
    add_job_arguments(parser)
    parser.set_defaults(command=_train)


def _train(args: argparse.Namespace) -> int:
    config = load_config(args, args.config)
    rules = import_runtime(config, "check")
    rules.check(config)

    from gleanrl.config.loading import describe
    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking import monitors

    monitors.check(config.monitor)
    if os.environ.get("RANK", "0") == "0":
        for warning in rules.warnings(config):
            print(f"gleanrl: warning: {warning}", file=sys.stderr)
    if args.dry_run:
        import_runtime(config, "parts").check_parts(config, monitors.Silent())
        with quiet_pipe():
            print(config.to_toml())
            for name, text in config.plan().items():
                print(f"# {name:<12} {text}")
        return 0

    runtime, console = import_runtime(config, "run"), monitors.Console()
    if (about := describe(args.config)) and not args.resume and os.environ.get("RANK", "0") == "0":
        print(about, file=sys.stderr)
    load_monitors = partial(monitors.load_monitors, config.monitor, console=console)
    folder = RunFolder(config.path)
    existed = folder.config_path.exists()
    try:
        complete = runtime.run_training(config, resume=args.resume, console=console, monitors=load_monitors)
    except KeyboardInterrupt:
        complete = False
    if not complete:
        settings = [f"--{key}" if value is None else f"--{key}={value}" for key, value in args.overrides]
        command = shlex.join(["gleanrl", "train", args.config, *settings, "--resume"])
        # While the ranks of a learner start, there is no run yet, or one that this command may not continue.
        begun = folder.config_path.exists() and existed == args.resume
        print(f"gleanrl: interrupted{f'; continue with: {command}' if begun else ''}", file=sys.stderr)
        return INTERRUPTED

    from gleanrl.config.settings import Config
    from gleanrl.tracking import report
    from gleanrl.tracking.model_card import model_card, read_licence
    from gleanrl.utils import atomic

    if isinstance(config, Config):
        card = model_card(config, folder.read_metrics(), config.run.steps, adapters=False, licence=read_licence(config))
        atomic.write_text(folder.model_path / "README.md", card)
    path = report.build(folder)
    with quiet_pipe(), suppress(SystemExit):  # rich raises SystemExit if standard output is a closed pipe
        report.show(folder)
        print(f"report: {path}")
    return 0
