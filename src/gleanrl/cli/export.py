"""`gleanrl export`: writes the model of a run for other software, and uploads it to the Hugging Face hub."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from gleanrl import __version__
from gleanrl.cli.common import RUN_HELP, interrupts_end_the_process, quiet_pipe
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import first_line

if TYPE_CHECKING:
    from gleanrl.config.settings import Config

TIMEOUT = 100.0  # seconds in which the hub must answer; it ends its own commits after a minute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"{RUN_HELP} (its newest checkpoint); or a checkpoint (RUN/checkpoints/step-N)"
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help=text)
    text = "write the LoRA adapters only, as peft and vLLM load them, instead of the model with adapters merged"
    parser.add_argument("--adapters", action="store_true", help=text)
    text = "folder to write (default: RUN/exports/step-N, or RUN/exports/step-N-adapters, which is replaced)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    text = "also upload the folder to this repository of the Hugging Face hub, which is made if it does not exist"
    parser.add_argument("--push-to-hub", metavar="NAME", help=text)
    parser.add_argument("--private", action="store_true", help="make the new repository private")
    parser.epilog = "Settings can be given as --section.key VALUE, for example --model.device cpu."
    parser.set_defaults(command=_export, takes_settings=True)


def _export(args: argparse.Namespace) -> int:
    with interrupts_end_the_process():
        from gleanrl.config.loading import load_job, load_stored
        from gleanrl.config.settings import Config
        from gleanrl.runtime.checkpoints import find_checkpoint
        from gleanrl.runtime.export import run_export
        from gleanrl.runtime.run_folder import find_run
        from gleanrl.tracking.model_card import model_card, read_licence
        from gleanrl.tracking.monitors import Console

    path, name = find_run(args.source), args.push_to_hub
    if (path / "config.json").exists():
        raise UserError(f"{path} is an exported model already; give its run or a checkpoint")
    if args.out is not None and args.out.exists():
        raise UserError(f"{args.out} exists already; choose another folder")
    if args.private and name is None:
        raise UserError("--private describes a new repository of the hub; it needs --push-to-hub NAME")
    run, checkpoint = find_checkpoint(path)
    config, trained = load_job(str(run.config_path), args.overrides), load_stored(run.config_path)
    if not isinstance(config, Config) or not isinstance(trained, Config):
        raise UserError(f"{run.path} is an embodied run, whose policy is {run.path / 'policy.safetensors'}")
    if name is not None:
        _check_upload(config, name, adapters=args.adapters)

    default = f"step-{checkpoint.step}-adapters" if args.adapters else f"step-{checkpoint.step}"
    folder: Path = args.out or run.exports_path / default
    licence = read_licence(config, ask_hub=name is not None)
    # The card describes the run. Of the settings of this command only the place of the base model matters to it.
    described = trained.model_copy(update={"model": trained.model.model_copy(update={"init": config.model.init})})
    card = model_card(described, run.read_metrics(), checkpoint.step, adapters=args.adapters, licence=licence)
    run_export(config, checkpoint, folder, card, Console(), adapters=args.adapters)
    with quiet_pipe():
        print(f"{'adapters' if args.adapters else 'model'}: {folder}")
    if name is not None:
        url = _upload(folder, name, f"Step {checkpoint.step} of {config.run.name}", private=args.private)
        with quiet_pipe():
            print(f"uploaded: {url}")
    return 0


def _check_upload(config: Config, name: str, *, adapters: bool) -> None:
    """Raise `UserError` if an upload to ``name`` cannot succeed, before the export, which may take long."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from gleanrl.runtime.export import adapter_base

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push-to-hub {name}: {first_line(error)}") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push-to-hub: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
    if get_token() is None:
        raise UserError("--push-to-hub: there is no access token; run `hf auth login`, or set HF_TOKEN")
    if adapters and (config.model.hub_id is None or adapter_base(config) is None):
        raise UserError(
            "--push-to-hub: the base model of these adapters is on this machine only, so that others could not load "
            "them; leave out --adapters to upload the merged model"
        )


def _upload(folder: Path, name: str, message: str, *, private: bool) -> str:
    """Upload ``folder`` to the repository ``name`` of the hub, and return the URL of the repository.

    Raises `UserError` if the hub refuses the upload, or does not answer.
    """
    from huggingface_hub import HfApi, get_session
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(library_name="gleanrl", library_version=__version__)
    try:
        # By default, the hub's client waits for an answer without an end.
        get_session().timeout = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or TIMEOUT)
        repository = api.create_repo(name, private=private or None, exist_ok=True)
        # Of an earlier upload, only files of weights are deleted. transformers and vLLM would load adapters or shards
        # that are left from it instead of the new model.
        weights = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message=message, delete_patterns=weights
        )
    except Exception as error:  # the hub's client raises errors of several HTTP libraries
        reason = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, LookupError | ValueError):
            reason = f"the hub's answer is not understood ({reason})"
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            no_right = "the access token is not accepted or has no right to write there"
            meaning = {
                401: no_right,
                403: no_right,
                404: "there is no such repository, or the access token has no right to see it",
                409: "the repository is being changed by another upload; try again",
            }.get(status, "the hub has an error; try again later" if status >= 500 else "the hub refuses the upload")
            said = first_line(error.server_message or "")
            reason = f"{meaning} (HTTP {status}{f', {said}' if said else ''})"
        raise UserError(f"uploading {folder} to {name} failed: {reason}") from error
    return str(repository)
