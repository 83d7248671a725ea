"""`gleanrl report RUN`: writes an HTML report on a running, finished or crashed run and prints its path."""

from __future__ import annotations

import argparse

from gleanrl.cli.common import RUN_HELP, guarded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.set_defaults(command=guarded(_report))


def _report(args: argparse.Namespace) -> int:
    from gleanrl.runtime.run_folder import RunFolder, find_run
    from gleanrl.tracking import report

    print(report.build(RunFolder.existing(find_run(args.run))))
    return 0
