"""The command line: `gleanrl train | evaluate | report | pool | buffer | settings | simulate | serve-env | doctor`.

Each verb has a module of the same name, whose `add_arguments` also sets the function that runs the verb. Arguments that
match no option are settings (``--section.key value``), if the verb takes settings.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module

from gleanrl import __version__
from gleanrl.cli.common import INTERRUPTED
from gleanrl.utils.errors import UserError

VERBS: Mapping[str, str] = {
    "train": "train a preset or a TOML configuration",
    "evaluate": "evaluate a run's newest checkpoint or any model",
    "report": "make the HTML report of a run",
    "pool": "look into, check, trim, export or seed an experience pool",
    "buffer": "look into, check, merge, split or export a trajectory buffer",
    "settings": "show what can be set, with defaults and meanings",
    "simulate": "show what each schedule would cost, before renting a GPU",
    "serve-env": "serve an environment over HTTP",
    "doctor": "check this machine and the extras",
}
_USER_CAN_FIX = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. A user's mistake prints one line on standard error; the status is 2."""
    # Make idle threads of the tensor library sleep: spinning costs a factor of ten if another process needs the core.
    # This must be set before the library is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get("WORLD_SIZE", "1") != "1":  # report a lost connection in one line, not in a C++ stack
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.showwarning = _show_warning
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(next((word for word in words if not word.startswith("-")), ""))
    args, rest = parser.parse_known_args(words)
    try:
        args.overrides = parse_overrides(rest)
        if args.overrides and not args.takes_settings:
            raise UserError(f"unknown option --{args.overrides[0][0]}")
        return args.command(args)
    except UserError as error:
        print(f"gleanrl: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _USER_CAN_FIX:
            raise
        print(f"gleanrl: {error.filename or 'writing failed'}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gleanrl: interrupted", file=sys.stderr)
        return INTERRUPTED


def make_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """Make the command line's parser. With ``verb``, only that verb has options, which saves the others' imports."""
    parser = argparse.ArgumentParser(prog="gleanrl", description="RL post-training for LLM agents.")
    parser.add_argument("--version", action="version", version=f"gleanrl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in VERBS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(takes_settings=False)
        if verb in (None, name):
            import_module(f"gleanrl.cli.{name.replace('-', '_')}").add_arguments(command)
    return parser


def parse_overrides(rest: Sequence[str]) -> list[tuple[str, str]]:
    """Parse ``--section.key value`` and ``--section.key=value`` into pairs."""
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


def _show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    """Print a warning in one line without its place in the code, because it is for the user."""
    print(f"gleanrl: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
