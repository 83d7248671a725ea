"""Reads GGUF files, the model format of llama.cpp, as models that can be trained.

A GGUF file holds the weights of a model, usually quantized, its sizes, its tokenizer and its chat template.
transformers reads these by means of the package `gguf`. This module dequantizes the weights to float32, and refuses a
file of which transformers would drop or guess a part without saying so.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gleanrl.utils.errors import UserError
from gleanrl.utils.text import first_line

SPLIT_AT_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of ``tokenizer.ggml.pre`` for which llama.cpp splits text at each digit and then as GPT-2 does. transformers
splits as GPT-2 only."""
SPLIT_AS_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"})


def is_gguf(file: Path) -> bool:
    """Return whether ``file`` begins as a GGUF file does."""
    with file.open("rb") as opened:
        return opened.read(4) == b"GGUF"


def versions() -> str:
    """Return the versions of the packages that determine what `load` makes of a file.

    Raises:
        UserError: the package `gguf` is not installed.
    """
    try:
        return f"gguf {metadata.version('gguf')}, transformers {metadata.version('transformers')}"
    except metadata.PackageNotFoundError:
        raise UserError("a GGUF file needs the package gguf: pip install 'gleanrl[gguf]'") from None


def load(file: Path, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model in the GGUF file ``file``, with float32 weights on the CPU, and its tokenizer.

    Nothing in the model and its configuration refers to the file or to its quantization.

    Args:
        name: what error messages call the file.

    Raises:
        UserError: the file is damaged, lacks a chat template, or holds a model or a tokenizer that cannot be read
            exactly.
    """
    from transformers import GgufConfig  # older versions of transformers lack it, and then the extra `gguf` is missing

    splits = _check(file, name)
    try:
        # Of a folder, `from_pretrained` also reads other files that lie next to the model, such as the tokenizer of
        # another one. So the file gets a folder of its own.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "model.gguf").symlink_to(file.resolve())
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                gguf_file="model.gguf",
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
    except Exception as error:  # parsing a file may raise any exception
        raise UserError(f"{name} cannot be read: {first_line(error, 200)}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise UserError(f"{name} lacks weights: {missing[0]!r} ({len(missing)} missing)")

    backend = tokenizer.backend_tokenizer
    if splits in SPLIT_AT_DIGITS:
        digits, gpt2 = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    elif splits and splits not in SPLIT_AS_GPT2 and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        # For a name that transformers does not know, it splits text as GPT-2 does.
        raise UserError(
            f"{name} splits text as {splits!r}, which transformers does not know, so its tokens would be others than "
            "those that the model was trained on; use the model's Hugging Face directory"
        )

    # transformers refuses to save a model that was quantized, although all of its weights are float32 now. So they
    # become the weights of a new model, which takes no memory of its own.
    config = model.config
    for trace in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, trace):
            delattr(config, trace)
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain.eval(), tokenizer


def _check(file: Path, name: str) -> str:
    """Check what can be checked without reading the weights. Return how the tokenizer splits text, or an empty text.

    Raises `UserError` as `load` does.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        fields = {
            key: reader.fields[key].contents() for key in reader.fields if not key.endswith((".tokens", ".merges"))
        }
    except Exception as error:  # parsing a damaged file may raise any exception
        raise UserError(f"{name} is not a complete GGUF file: {first_line(error, 200)}") from error
    if fields.get("split.count", 1) > 1:
        raise UserError(f"{name} is one of {fields['split.count']} parts of a model; merge them with llama-gguf-split")
    if not fields.get("tokenizer.chat_template"):
        raise UserError(f"{name} has no chat template; use the GGUF file of an instruction-tuned model")
    architecture = fields.get("general.architecture")
    scaled = fields.get(f"{architecture}.rope.scaling.type", "none") != "none"
    if architecture != "gpt-oss" and (scaled or any(tensor.name.startswith("rope_") for tensor in reader.tensors)):
        raise UserError(
            f"{name} scales its rotary positions, which transformers does not read from a GGUF file; use the model's "
            "Hugging Face directory"
        )
    byte_level = fields.get("tokenizer.ggml.model") == "gpt2"
    return fields.get("tokenizer.ggml.pre", "default") if byte_level else ""
