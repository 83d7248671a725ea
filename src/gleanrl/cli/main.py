"""The command line `gleanrl COMMAND`; `VERBS` lists the commands.

Each command has a module of the same name in this package. The module's ``add_arguments`` adds the options of the
command to a parser and sets the function that executes it. If the command accepts settings, arguments that match none
of its options are parsed as settings (``--section.key value``).
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
from gleanrl.utils.errors import UserError, describe, raised_at

VERBS: Mapping[str, str] = {
    "train": "train a preset or a TOML configuration",
    "evaluate": "evaluate a run, a checkpoint, an exported model or a preset",
    "export": "write the model of a run or a checkpoint for other software, or upload it to the Hugging Face hub",
    "serve": "serve a trained model for clients of OpenAI's and Anthropic's APIs, with a chat page",
    "report": "make the HTML report of a run, or of several side by side",
    "runs": "list, compare or delete runs",
    "env": "begin an environment of your own: an example, its test and a configuration",
    "pool": "inspect, verify, prune, export or fill an experience pool",
    "buffer": "inspect, verify, merge, split or export a trajectory buffer",
    "settings": "list all settings with their defaults and meanings",
    "simulate": "predict the time per step of each training schedule",
    "serve-env": "serve an environment over HTTP",
    "doctor": "check whether this machine can train, and which extras are installed",
}
_USER_CAN_FIX = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    An error that the user can fix (a wrong setting, a full disk, an exception in the user's own code) is reported in
    one line on standard error, with exit status 2. Any other exception is a bug and is raised. In Python's development
    mode (``python -X dev``), exceptions in the user's code are raised too, because their stack trace may help.
    """
    # By default, idle OpenMP threads of torch spin. If another process needs the core, this makes training about ten
    # times slower. The variable must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # On a lost connection between ranks, torch would print a C++ stack trace. We report the error in one line.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.showwarning = _show_warning
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(next((word for word in words if not word.startswith("-")), ""))
    args, rest = parser.parse_known_args(_joined(words))
    try:
        args.overrides = parse_overrides(rest)
        if args.overrides and not args.takes_settings:
            raise UserError(f"unknown option --{args.overrides[0][0]}")
        return args.command(args)
    except UserError as error:
        print(f"gleanrl: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _USER_CAN_FIX:
            line = f"{error.filename or 'writing failed'}: {error.strerror}"
        elif raised_at(error) and not sys.flags.dev_mode:
            line = describe(error)
        else:
            raise
        print(f"gleanrl: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gleanrl: interrupted", file=sys.stderr)
        return INTERRUPTED


def make_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of the command line.

    With ``verb``, the name of a command, only this command gets its options. The modules of the other commands are then
    not imported, which makes the start faster.
    """
    parser = argparse.ArgumentParser(prog="gleanrl", description="RL post-training for LLM agents.")
    parser.add_argument("--version", action="version", version=f"gleanrl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in VERBS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(takes_settings=False)
        if verb in (None, name):
            import_module(f"gleanrl.cli.{name.replace('-', '_')}").add_arguments(command)
    return parser


def parse_overrides(rest: Sequence[str]) -> list[tuple[str, str | None]]:
    """Parse arguments ``--section.key value`` or ``--section.key=value`` into pairs (key, value).

    The value is None if the next argument begins with ``--`` or there is none. Raises `UserError` for any other
    argument.
    """
    pairs: list[tuple[str, str | None]] = []
    words = list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UserError(f"unexpected argument {word!r}; settings are written --section.key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else None
        pairs.append((key, value))
    return pairs


def _joined(words: Sequence[str]) -> list[str]:
    """Write each ``--section.key value`` as one word, so that argparse takes no value for a positional argument."""
    joined: list[str] = []
    for word in words:
        last = joined[-1] if joined else ""
        if last.startswith("--") and "." in last and "=" not in last and not word.startswith("--"):
            joined[-1] = f"{last}={word}"
        else:
            joined.append(word)
    return joined


def _show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    """Print a warning in one line on standard error. Replaces `warnings.showwarning`.

    The file and line of the warning are left out, because they do not help a user of the command line.
    """
    print(f"gleanrl: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
