"""`gleanrl serve-env NAME_OR_TOML`: serves an environment over HTTP, for trainers that run elsewhere."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from gleanrl.cli.common import natural, port, positive, positive_float
from gleanrl.utils.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve an environment over HTTP until Ctrl-C; docs/howto/environment_service.md"
    parser.epilog = (
        "Settings are given as --environment.key VALUE, for example --environment.options.rooms 8, or --run.seed 3."
    )
    parser.add_argument(
        "environment",
        metavar="NAME_OR_TOML",
        help="name of an environment, import path of one (package.module:Class), or a TOML configuration",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default %(default)s: this machine only)"
    )
    parser.add_argument("--port", type=port, default=8765, help="port to listen on (default %(default)s; 0 = any free)")
    parser.add_argument(
        "--workers",
        type=natural,
        metavar="N",
        help="number of worker processes that run the episodes (default: one for each core)",
    )
    parser.add_argument(
        "--max-instances",
        type=positive,
        default=1024,
        metavar="N",
        help="maximum number of open episodes (default 1024)",
    )
    text = "close an episode after S seconds without a request (default 1800)"
    parser.add_argument("--idle-timeout-s", type=positive_float, default=1800.0, metavar="S", help=text)
    text = "limit in seconds for listing or preparing tasks and for a demonstration (default 600)"
    parser.add_argument("--taskset-timeout-s", type=positive_float, default=600.0, metavar="S", help=text)
    text = "refuse new episodes while server and workers together use more memory (default: 80%% of the machine's)"
    parser.add_argument("--max-memory", type=positive_float, metavar="MIB", help=text)
    text = "require the token in the environment variable NAME; needed if other machines can reach the address"
    parser.add_argument("--token", metavar="env:NAME", help=text)
    text = "serve OpenEnv's protocol too, at the same address, so that TRL and others can play the tasks"
    parser.add_argument("--openenv", action="store_true", help=text)
    parser.set_defaults(command=_serve, takes_settings=True)


def _serve(args: argparse.Namespace) -> int:
    from gleanrl.config.loading import load, load_defaults
    from gleanrl.environments import load_taskset
    from gleanrl.utils.secrets import Secret

    for package in ("fastapi", "uvicorn", *(["websockets"] if args.openenv else [])):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"gleanrl serve-env needs {package}: pip install 'gleanrl[serve]'")
    from gleanrl.environments.service.app import Limits, default_memory
    from gleanrl.environments.service.server import serve
    from gleanrl.utils.place import Place

    if args.token is not None and not args.token.startswith("env:"):
        raise UserError("--token: write env:NAME, the environment variable that holds it; never the token itself")
    token = None if args.token is None else Secret(args.token.removeprefix("env:"), "--token")
    place = Place(host=args.host, port=args.port, token=token)
    place.check("--token env:NAME")
    for key, _ in args.overrides:
        if key.split(".")[0] not in ("environment", "run"):
            raise UserError(f"--{key}: serve-env takes settings of [environment] and --run.seed")
    if args.environment.endswith(".toml"):
        config = load(args.environment, args.overrides)
    else:
        config = load_defaults([("environment.name", args.environment), *args.overrides])
    workers = args.workers if args.workers is not None else config.environment.workers or os.cpu_count() or 1
    settings = config.environment.model_copy(update={"workers": workers})
    limits = Limits(
        max_instances=args.max_instances,
        idle_timeout_s=args.idle_timeout_s,
        max_memory=args.max_memory or default_memory(),
        taskset_timeout_s=args.taskset_timeout_s,
    )

    def ready(address: str) -> None:
        print(f"serving {settings.name} at {address} ({workers} workers; {address}/docs lists the routes)", flush=True)

    taskset = load_taskset(settings, config.run.seed)
    if taskset.agents:
        raise UserError(
            f"environment {settings.name!r} cannot be served: its agents call the model themselves, at an address of "
            "the run; make it the environment of the run"
        )
    serve(taskset, settings, config.run.seed, limits, place, ready, openenv=args.openenv)
    print("gleanrl: the server has ended", file=sys.stderr)
    return 0
