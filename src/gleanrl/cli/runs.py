"""`gleanrl runs`: lists the runs in a folder, compares the settings and results of some, and deletes some."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gleanrl.cli.common import RUN_HELP, guarded, table
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import format_bytes

if TYPE_CHECKING:
    from gleanrl.runtime.run_folder import RunFolder

FOLDER = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"folder that contains the runs (default {FOLDER})")
    parser.set_defaults(command=guarded(_list))
    actions = parser.add_subparsers(metavar="ACTION", description="what to do (default: list the runs)")
    text = "print a table of the runs"
    actions.add_parser("list", help=text, description=text)
    text = "print the settings and the results in which runs differ; `gleanrl report RUN RUN` draws their curves"
    compared = actions.add_parser("compare", help=text, description=text)
    compared.add_argument("runs", metavar="RUN", nargs="+", help=RUN_HELP)
    compared.set_defaults(command=guarded(_compare))
    text = "delete the folders of runs, with their checkpoints, rollouts and evaluations"
    deleted = actions.add_parser("delete", help=text, description=text)
    deleted.add_argument("runs", metavar="RUN", nargs="+", help=RUN_HELP)
    deleted.add_argument("--yes", action="store_true", help="do not ask")
    deleted.set_defaults(command=guarded(_delete))


def _list(args: argparse.Namespace) -> int:
    from gleanrl.runtime.process import in_use
    from gleanrl.runtime.run_folder import POLICY, RunFolder
    from gleanrl.tracking.report.facts import facts

    if not args.folder.is_dir():
        raise UserError(f"there is no folder {args.folder}; --folder names the one that contains the runs")
    rows = []
    for path in sorted(args.folder.iterdir()):
        folder = RunFolder(path)
        if folder.evaluation_path.exists() or not (folder.config_path.exists() or folder.metrics_path.exists()):
            continue
        try:
            found = facts(folder.read_metrics(), folder.read_config())
        except UserError as error:  # a damaged run does not hide the others
            print(f"gleanrl: warning: {error}", file=sys.stderr)
            continue
        planned = found["planned_steps"]
        ended = folder.exported_step == planned or (folder.path / POLICY).exists()  # an embodied run's policy
        finished = ended and found["steps"] == planned
        state = "running" if in_use(folder) else "finished" if finished else "stopped"
        changed = folder.metrics_path if folder.metrics_path.exists() else folder.config_path
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(changed.stat().st_mtime))
        reward = "" if found["reward"] is None else f"{found['reward'][1]:.3g}"
        steps = f"{found['steps']}/{planned}" if planned else str(found["steps"])
        rows.append((folder.name, state, steps, _last(found["headline"] or found["returns"]), reward, when))
    if not rows:
        print(f"no runs in {args.folder}")
        return 0
    table(("run", "state", "steps", "held-out", "reward", "last change"), rows, first="left")
    return 0


def _last(line: dict[str, Any] | None) -> str:
    """Format the value of the last evaluation in a line of `facts`."""
    if line is None:
        return ""
    value = (line["last"] or line["first"])["value"]
    return f"{100 * value:.1f} %" if line["unit"] == "rate" else f"{value:.3g}"


def _compare(args: argparse.Namespace) -> int:
    from gleanrl.tracking.monitors.console import duration
    from gleanrl.tracking.report.comparison import differing_settings, run_names
    from gleanrl.tracking.report.facts import facts

    runs = _find(args)
    if len(runs) < 2:
        raise UserError("give at least two runs to compare")
    names = run_names(runs)
    settings = differing_settings(runs)
    if settings:
        shown = [(key, *("none" if value is None else value for value in values)) for key, values in settings]
        table(("setting", *names), shown, first="left")
    else:
        print("no setting differs")

    found = [facts(run.read_metrics(), run.read_config()) for run in runs]
    measured: dict[str, list[str]] = {}  # label of a measure -> its last value in each run
    for index, figures in enumerate(found):
        for line in [*figures["evaluation"], *([figures["returns"]] if figures["returns"] else [])]:
            measured.setdefault(line["label"], [""] * len(runs))[index] = _last(line)
    measured["training reward, last step"] = ["" if f["reward"] is None else f"{f['reward'][1]:.3g}" for f in found]
    measured["steps"] = [str(f["steps"]) for f in found]
    measured["time in steps"] = ["" if f["seconds"] is None else duration(f["seconds"]) for f in found]
    print()
    table(("last evaluation", *names), [(label, *values) for label, values in measured.items()], first="left")
    return 0


def _delete(args: argparse.Namespace) -> int:
    from gleanrl.runtime.process import locked

    runs = _find(args)
    for run in runs:
        if run.path.is_symlink() or not run.lock_path.exists():
            raise UserError(f"{run.path} is not a folder that `gleanrl train` made; delete it yourself")
        size = sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
        rows = run.read_metrics()
        print(f"{run.path}: {rows[-1].step if rows else 0} steps, {format_bytes(size)}")
    if not args.yes:
        if not sys.stdin.isatty():
            raise UserError("nothing was deleted, because there is no terminal to ask on; confirm with --yes")
        if input("delete? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 1
    for run in runs:
        with locked(run):  # raises if the run is in progress
            shutil.rmtree(run.path)
        print(f"deleted {run.path}")
    return 0


def _find(args: argparse.Namespace) -> list[RunFolder]:
    """Return the runs that the arguments name, each once. With another --folder than the default, all lie in it."""
    from gleanrl.runtime.run_folder import RunFolder, find_run

    paths = [find_run(name) if args.folder == FOLDER else args.folder / name for name in args.runs]
    return [RunFolder.existing(path) for path in {path.resolve(): path for path in paths}.values()]
