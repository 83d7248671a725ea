"""Writes the policy of a checkpoint as a directory that transformers, peft and vLLM load, for `gleanrl export`."""

from __future__ import annotations

from pathlib import Path

from gleanrl.config.settings import Config
from gleanrl.learners.engine import LocalEngine
from gleanrl.learners.models import AUTO, export, export_adapters
from gleanrl.runtime.local import set_up_libraries
from gleanrl.runtime.prepare import check_tokenizer, needs_expert, prepare_model, save_model
from gleanrl.runtime.run_folder import MODEL_STEP, Checkpoint
from gleanrl.utils import atomic
from gleanrl.utils.errors import UserError
from gleanrl.utils.progress import Progress


def adapter_base(config: Config) -> str | None:
    """Return the name under which PEFT loads the base model of a run's adapters: its directory, or its id on the hub.

    Returns None if this model exists nowhere else, because it is the tiny model, a GGUF file, or has had a warm start.
    """
    local = Path(config.model.init).expanduser()
    if needs_expert(config):
        return None
    return str(local.absolute()) if local.is_dir() else config.model.hub_id


def run_export(
    config: Config, checkpoint: Checkpoint, folder: Path, card: str, console: Progress, *, adapters: bool
) -> None:
    """Write the policy of ``checkpoint`` and its model card to ``folder``, which appears only once it is complete.

    This process reads the checkpoint of any number of ranks, and holds the base model whole on ``model.device``.

    Args:
        card: content of README.md.
        adapters: write the LoRA adapters and their config without merging them. Otherwise the whole model is written,
            with adapters merged. If the base model of the adapters exists nowhere else, see `adapter_base`, it is
            written too, to the subfolder ``base``.

    Raises:
        UserError: the run has no adapters to write, the model cannot be loaded, or the disk is full.
    """
    if adapters and not config.learner.lora_rank:
        raise UserError(
            "--adapters: the run trained all weights (learner.lora_rank = 0) and has no adapters; leave out --adapters"
        )
    set_up_libraries(config)
    prepared = prepare_model(config, console, restored=True)
    model, tokenizer = prepared.model, prepared.tokenizer
    check_tokenizer(checkpoint.run, config, tokenizer)
    # The model computes nothing here, so an attention implementation that needs a GPU must not be an error.
    settings = config.learner.model_copy(update={"attn_implementation": AUTO})
    engine = LocalEngine(model, settings, config.loss, pad_token=0, temperature=1.0, trains=False)
    engine.load(checkpoint.path)
    with atomic.directory(folder) as partial:
        if not adapters:
            export(partial, engine.model, engine.weights(), tokenizer)
        else:
            base = adapter_base(config)
            export_adapters(partial, engine.model, engine.adapters(), base or str(folder.absolute() / "base"))
            if base is None:
                save_model(partial / "base", engine.model.unload(), tokenizer)
        (partial / "README.md").write_text(card, encoding="utf-8")
        (partial / MODEL_STEP).write_text(f"{checkpoint.step}\n")
