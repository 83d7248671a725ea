"""`gleanrl env init DIR`: writes the files of a new environment, which can be trained on at once."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from gleanrl.cli.common import guarded
from gleanrl.utils.errors import UserError

TEMPLATE = resources.files("gleanrl.cli") / "new_environment"
FILES = ("environment.py", "test_environment.py", "train.toml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    text = "write an example environment, its test and the configuration of a run into a folder"
    init = actions.add_parser("init", help=text, description=f"{text[0].upper()}{text[1:]}.")
    init.add_argument("folder", type=Path, metavar="DIR", help="the folder, which is made if it does not exist")
    init.set_defaults(command=guarded(_init))


def _init(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{folder} is a file; name a folder") from None
    if present := [name for name in FILES if (folder / name).exists()]:
        raise UserError(f"{folder / present[0]} exists already; name another folder, so that nothing is overwritten")
    for name in FILES:
        (folder / name).write_text((TEMPLATE / name).read_text(encoding="utf-8"), encoding="utf-8")
        print(f"wrote {folder / name}")
    print(f"\ncd {folder}")
    print("python -m pytest            # checks the environment; needs pytest")
    print("gleanrl train train.toml    # takes about a minute on two cores")
    return 0
