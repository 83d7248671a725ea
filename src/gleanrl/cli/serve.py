"""`gleanrl serve`: serves a trained model for clients of OpenAI's and Anthropic's APIs, and as a chat page."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from gleanrl.cli.common import RUN_HELP, interrupts_end_the_process, port
from gleanrl.utils.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a model until Ctrl-C, for clients of OpenAI's chat completions and responses and of Anthropic's "
        "messages, and as a chat page for a browser; docs/howto/export.md"
    )
    served = (
        f"{RUN_HELP} (its newest checkpoint); a checkpoint (RUN/checkpoints/step-N); an exported model (RUN/model); "
        "or any other model that model.init takes"
    )
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT_OR_MODEL", help=served)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default %(default)s: this machine only)"
    )
    parser.add_argument("--port", type=port, default=8000, help="port to listen on (default %(default)s; 0 = any free)")
    text = "require the API key in the environment variable NAME; needed if other machines can reach the address"
    parser.add_argument("--key", metavar="env:NAME", help=text)
    parser.epilog = (
        "Settings can be given as --section.key VALUE, for example --model.device cpu, --sampler.temperature 0.7 or "
        "--context.max_tokens_per_turn 512."
    )
    parser.set_defaults(command=_serve, takes_settings=True)


def _serve(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("aiohttp") is None:
        raise UserError("gleanrl serve needs aiohttp: pip install 'gleanrl[serve]'")
    with interrupts_end_the_process():
        from gleanrl.config.loading import load_defaults, load_job
        from gleanrl.config.settings import Config
        from gleanrl.runtime.checkpoints import find_checkpoint
        from gleanrl.runtime.run_folder import find_run
        from gleanrl.runtime.serving import run_serving
        from gleanrl.tracking.monitors import Console
        from gleanrl.utils.place import Place
        from gleanrl.utils.secrets import Secret

    if args.key is not None and not args.key.startswith("env:"):
        raise UserError("--key: write env:NAME, the environment variable that holds it; never the key itself")
    token = None if args.key is None else Secret(args.key.removeprefix("env:"), "--key")
    place = Place(host=args.host, port=args.port, token=token)
    place.check("--key env:NAME")

    path, checkpoint, settings = find_run(args.source), None, None  # settings: the configuration of the model's run
    overrides = [("sampler.deterministic", "false"), *args.overrides]
    if path.is_dir() and not (path / "config.json").exists():
        run, checkpoint = find_checkpoint(path)
        settings = run.config_path
    else:
        if not path.exists() and ":" not in args.source and path.parent.is_dir():  # no model of the hub
            raise UserError(f"there is no run, checkpoint or model at {path}; `gleanrl runs` lists the runs")
        overrides = [("model.init", str(path) if path.exists() else args.source), *overrides]
        overrides = [("warm_start.enabled", "false"), *overrides]
        # A run exports models to RUN/model and RUN/exports/NAME.
        own = [folder / "config.toml" for folder in path.resolve().parents[:2]] if path.is_dir() else []
        settings = next(filter(Path.exists, own), None)
    config = load_defaults(overrides) if settings is None else load_job(str(settings), overrides)
    if not isinstance(config, Config):
        raise UserError(f"{args.source} is an embodied run, whose policy has no messages to answer")

    def ready(url: str) -> None:
        name = args.source if checkpoint is None else f"{args.source} (step {checkpoint.step})"
        print(f"serving {name} at {url} (a chat page; {url}/v1 is the base URL of clients)", flush=True)

    run_serving(config, checkpoint, place, Console(), ready)
    print("gleanrl: the server has ended", file=sys.stderr)
    return 0
