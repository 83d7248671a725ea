"""The command line: `gleanrl train | evaluate | report | pool | buffer | settings | simulate | serve-env | doctor`."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gleanrl import __version__
from gleanrl.cli import buffer as buffer_cli
from gleanrl.cli import pool as pool_cli
from gleanrl.cli import serve_env as serve_cli
from gleanrl.cli import settings as settings_cli
from gleanrl.cli import simulate as simulate_cli
from gleanrl.cli.printing import guarded, quiet_pipe
from gleanrl.utils.errors import UserError

if TYPE_CHECKING:
    from gleanrl.utils.settings import JobConfig

INTERRUPTED = 130  # exit status, as shells have it for SIGINT
_USER_CAN_MEND = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status. A user's mistake is one line on standard error and status 2."""
    # Idle threads of the tensor library sleep instead of spinning: where anything else wants a core, spinning
    # costs a factor of ten. Must be set before the library is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get("WORLD_SIZE", "1") != "1":  # a connection that ends is told in one line, not in a C++ stack
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.showwarning = _show_warning
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    try:
        overrides = parse_overrides(rest)
        return args.command(args, overrides)
    except UserError as error:
        print(f"gleanrl: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _USER_CAN_MEND:
            raise
        print(f"gleanrl: {error.filename or 'writing failed'}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gleanrl: interrupted", file=sys.stderr)
        return INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gleanrl", description="RL post-training for LLM agents.")
    parser.add_argument("--version", action="version", version=f"gleanrl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a preset or a TOML configuration", epilog=_CONFIG_HELP)
    train.add_argument("config", metavar="PRESET_OR_TOML", help=f"{_presets()}, or a file.toml")
    train.add_argument("--resume", action="store_true", help="continue the run in the run folder")
    train.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the plan only")
    _add_runtime(train)
    train.set_defaults(command=_train)

    evaluate = commands.add_parser(
        "evaluate", help="evaluate a run's newest checkpoint or any model", epilog=_CONFIG_HELP
    )
    evaluate.add_argument("config", metavar="RUN_OR_PRESET_OR_TOML", help=_EVALUATED)
    _add_runtime(evaluate)
    evaluate.set_defaults(command=_evaluate)

    report = commands.add_parser("report", help="make the HTML report of a run")
    report.add_argument("run", metavar="RUN", help=_RUN_HELP)
    report.set_defaults(command=guarded(_report))

    pool_cli.add_parser(commands)
    buffer_cli.add_parser(commands)
    settings_cli.add_parser(commands)
    simulate_cli.add_parser(commands)
    serve_cli.add_parser(commands)

    doctor = commands.add_parser("doctor", help="check this machine and the extras")
    doctor.set_defaults(command=guarded(_doctor))
    return parser


_CONFIG_HELP = (
    "Any setting can be given as --section.key VALUE, for example --learner.lr 1e-4; `gleanrl settings` lists them."
)
_RUN_HELP = "a run's folder, or its name under runs/"
_EVALUATED = f"{_RUN_HELP}; one of its checkpoints (RUN/checkpoints/step-N); or what `train` takes"


def _presets() -> str:
    folder = Path(__file__).parents[1] / "config" / "presets"
    return ", ".join(sorted(path.stem for path in folder.glob("*.toml")))


def _add_runtime(command: argparse.ArgumentParser) -> None:
    command.add_argument("--runtime", choices=("local", "ray"), help="where the parts of the run live (--ray.enabled)")
    command.add_argument("--ray-address", metavar="ADDRESS", help="join this Ray cluster (--ray.address)")


def _runtime_settings(args: argparse.Namespace) -> list[tuple[str, str]]:
    """What `--runtime` and `--ray-address` stand for."""
    pairs: list[tuple[str, str]] = []
    if args.runtime is not None or args.ray_address is not None:
        pairs.append(("ray.enabled", "false" if args.runtime == "local" else "true"))
    if args.ray_address is not None:
        pairs.append(("ray.address", args.ray_address))
    return pairs


def parse_overrides(rest: Sequence[str]) -> list[tuple[str, str]]:
    """``--section.key value`` and ``--section.key=value`` pairs."""
    pairs: list[tuple[str, str]] = []
    words = list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UserError(f"unexpected argument {word!r}; settings are written --section.key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not words:
                raise UserError(f"--{key} needs a value")
            value = words.pop(0)
        pairs.append((key, value))
    return pairs


def _train(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    with _interrupts_end_the_process():
        from gleanrl.config import loading as configuration
        from gleanrl.tracking import monitors

    overrides = [*overrides, *_runtime_settings(args)]
    config: Any = configuration.load_job(args.config, overrides)  # of either kind of job
    rules = _runtime(config, "check")
    rules.check(config)
    monitors.check(config.monitor)
    for warning in rules.warnings(config) if os.environ.get("RANK", "0") == "0" else ():
        print(f"gleanrl: warning: {warning}", file=sys.stderr)
    if args.dry_run:
        with quiet_pipe():
            print(config.to_toml())
            for name, text in config.plan().items():
                print(f"# {name:<12} {text}")
        return 0
    runtime, console = _runtime(config, "run"), monitors.Console()
    try:
        complete = runtime.run_training(
            config,
            resume=args.resume,
            console=console,
            monitors=partial(monitors.load_monitors, config.monitor, console=console),
        )
    except KeyboardInterrupt:
        complete = False
    if not complete:
        settings = [f"--{key}={value}" for key, value in overrides]
        again = shlex.join(["gleanrl", "train", args.config, *settings, "--resume"])
        print(f"gleanrl: interrupted; continue with: {again}", file=sys.stderr)
        return INTERRUPTED
    return _finish(config.path)


def _finish(run: Path) -> int:
    from gleanrl.runtime.run_folder import RunFolder
    from gleanrl.tracking import report
    from gleanrl.tracking.report import summary

    folder = RunFolder(run)
    path = report.build(folder)
    summary.show(folder)
    print(f"report: {path}")
    return 0


def _report(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    _none(overrides)
    from gleanrl.runtime.run_folder import RunFolder, find_run
    from gleanrl.tracking import report

    print(report.build(RunFolder.existing(find_run(args.run))))
    return 0


def _evaluate(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    if (size := os.environ.get("WORLD_SIZE", "1")) not in ("0", "1"):
        raise UserError(
            f"gleanrl evaluate is one process, but WORLD_SIZE = {size} in the environment; start it without torchrun, "
            "or unset WORLD_SIZE"
        )
    with _interrupts_end_the_process():
        from gleanrl.config import loading as configuration
        from gleanrl.runtime.run_folder import find_run
        from gleanrl.tracking.monitors import Console

    checkpoint, source = None, args.config
    run = find_run(source)
    if run.is_dir() and source not in configuration.presets():
        checkpoint, run = _checkpoint(run)
        source = str(run / "config.toml")
    elif run.is_dir():
        print(f"gleanrl: warning: this evaluates the preset {source}, untrained; the run is {run}", file=sys.stderr)
    elif Path(source).name != source and not source.endswith(".toml"):
        raise UserError(
            f"no run folder at {source}; give the folder that `gleanrl train` wrote, a preset or a .toml file"
        )
    config = configuration.load_job(source, [*overrides, *_runtime_settings(args)])
    metrics = _runtime(config, "run").run_evaluation(config, checkpoint, Console())
    with quiet_pipe():
        for name, value in sorted(metrics.items()):
            print(f"{name:<36} {value:.4f}")
    return 0


_RUNTIMES = {
    "language model": {"check": "config.validate", "run": "runtime.local"},
    "embodied": {"check": "runtime.embodied", "run": "runtime.embodied"},
}
"""Modules that check and run a job."""


def _runtime(config: JobConfig, what: Literal["check", "run"]) -> Any:
    module = _RUNTIMES[config.kind][what]
    if module == "runtime.local" and getattr(config, "ray").enabled:  # noqa: B009 - a language model's, which this cannot see
        module = "runtime.ray.run"
    with _interrupts_end_the_process():
        return import_module(f"gleanrl.{module}")


def _checkpoint(run: Path) -> tuple[Path, Path]:
    """The checkpoint that ``run`` is, or the newest one of the run that it is; and the run's folder."""
    from gleanrl.runtime.checkpoints import Checkpoints, sound
    from gleanrl.runtime.run_folder import RunFolder

    if run.resolve().parent.name == "checkpoints":
        return sound(run), run.resolve().parent.parent
    found = Checkpoints(RunFolder.existing(run).checkpoints_path, keep=1).latest()
    if found is None:
        raise UserError(f"{run} has no checkpoint yet; it is written every checkpoint.every steps and at the end")
    return found[0], run


def _doctor(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    _none(overrides)
    from gleanrl.cli.doctor import diagnose

    return diagnose()


@contextmanager
def _interrupts_end_the_process() -> Iterator[None]:
    """While libraries are imported: their C code turns a KeyboardInterrupt into errors of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        os.write(2, b"gleanrl: interrupted\n")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    """One line, without the place in the code: it is for the user."""
    print(f"gleanrl: warning: {message}", file=sys.stderr)


def _none(overrides: list[tuple[str, str]]) -> None:
    if overrides:
        raise UserError(f"unknown option --{overrides[0][0]}")


if __name__ == "__main__":
    sys.exit(main())
