"""`gleanrl report RUN [RUN ...]`: writes an HTML report on a run, or one that compares several, and prints its path."""

from __future__ import annotations

import argparse
from pathlib import Path

from gleanrl.cli.common import RUN_HELP, guarded
from gleanrl.utils.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"{RUN_HELP}, or the folder of an evaluation; several are compared in one report"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=text)
    text = "file of the comparison (default: a file next to the first run, with the names of the runs)"
    parser.add_argument("--out", type=Path, metavar="FILE.html", help=text)
    parser.set_defaults(command=guarded(_report))


def _report(args: argparse.Namespace) -> int:
    from gleanrl.runtime.run_folder import RunFolder, find_run
    from gleanrl.tracking import report

    runs = [RunFolder.existing(find_run(name)) for name in args.runs]
    if len(runs) == 1:
        if args.out is not None:
            raise UserError("--out is for a comparison of several runs; the report of one run is in its folder")
        print(report.build(runs[0]))
        return 0
    out = args.out
    if out is None:
        out = runs[0].path.parent / f"{'-vs-'.join(run.name for run in runs)[:120]}.html"
    print(report.build_comparison(runs, out))
    return 0
