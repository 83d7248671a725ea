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
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gleanrl import __version__
from gleanrl.utils.errors import UserError
from gleanrl.utils.memory import available_memory
from gleanrl.utils.text import first_line, format_bytes

SPLIT_AT_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of ``tokenizer.ggml.pre`` for which llama.cpp splits text at each digit and then as GPT-2 does. transformers
splits as GPT-2 only."""
SPLIT_AS_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"})


def is_gguf(file: Path) -> bool:
    """Return whether ``file`` begins as a GGUF file does."""
    with file.open("rb") as opened:
        return opened.read(4) == b"GGUF"


def versions() -> str:
    """Return the versions of the packages, this one included, that determine what `load` makes of a file.

    Raises:
        UserError: the package `gguf` is not installed.
    """
    try:
        libraries = f"gguf {metadata.version('gguf')}, transformers {metadata.version('transformers')}"
    except metadata.PackageNotFoundError:
        raise UserError("a GGUF file needs the package gguf: pip install 'gleanrl[gguf]'") from None
    return f"gleanrl {__version__}, {libraries}"


def load(file: Path, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model in the GGUF file ``file``, with float32 weights on the CPU, and its tokenizer.

    Nothing in the model and its configuration refers to the file or to its quantization.

    Args:
        name: what error messages call the file.

    Raises:
        UserError: the file is damaged, lacks a chat template, holds a model or a tokenizer that cannot be read exactly,
            or needs more memory than there is.
    """
    from transformers import GgufConfig  # older versions of transformers lack it, and then the extra `gguf` is missing

    splits, sizes = _check(file, name)
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
    # transformers drops tensors for which its model has no place, such as the biases of some Llama models. Only these
    # two it may drop: a copy of tied embeddings, and the layer that predicts a second token.
    if model.config.tie_word_embeddings:
        sizes.pop("output.weight", None)
    second = f"blk.{model.config.num_hidden_layers}."
    held = sum(size for tensor, size in sizes.items() if not tensor.startswith(second))
    kept = sum({tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}.values())
    if held > kept:
        raise UserError(
            f"{name} holds {held:,} weights, of which transformers would drop {held - kept:,}; use the model's Hugging "
            "Face directory"
        )

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


def _check(file: Path, name: str) -> tuple[str, dict[str, int]]:
    """Check what can be checked without reading the weights.

    Return how the tokenizer splits text, or an empty text, and the number of elements of each tensor. Raises
    `UserError` as `load` does.
    """
    from gguf import GGUFReader, TokenType

    try:
        reader = GGUFReader(file)
        fields = {key: reader.fields[key].contents() for key in reader.fields if not key.endswith(".merges")}
        sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    except Exception as error:  # parsing a damaged file may raise any exception
        raise UserError(f"{name} is not a complete GGUF file: {first_line(error, 200)}") from error
    instead = "use the model's Hugging Face directory"
    if fields.get("split.count", 1) > 1:
        raise UserError(f"{name} is one of {fields['split.count']} parts of a model; merge them with llama-gguf-split")
    if not (template := fields.get("tokenizer.chat_template")):
        raise UserError(f"{name} has no chat template; use the GGUF file of an instruction-tuned model")
    scaled = fields.get(f"{fields.get('general.architecture')}.rope.scaling.type", "none") != "none"
    if scaled or any(tensor.startswith("rope_") for tensor in sizes):
        raise UserError(
            f"{name} scales its rotary positions, which transformers does not read from a GGUF file; {instead}"
        )
    byte_level = fields.get("tokenizer.ggml.model") == "gpt2"
    if byte_level:
        # transformers takes a special token for a mistake of llama.cpp, and cuts it into pieces, if its text has a
        # character that stands for no byte.
        bytes_as_text = set(bytes_to_unicode().values())
        tokens, kinds = (fields.get(f"tokenizer.ggml.{key}", ()) for key in ("tokens", "token_type"))
        for token, kind in zip(tokens, kinds, strict=False):
            if kind == TokenType.CONTROL and token in template and not set(token) <= bytes_as_text:
                raise UserError(f"{name} has a special token {token!r}, which transformers does not read; {instead}")
    needed, available = 4 * sum(sizes.values()), available_memory()
    if available is not None and needed > available:
        raise UserError(
            f"{name} needs {format_bytes(needed)} of memory in float32, but {format_bytes(available)} are available; "
            "use a smaller model"
        )
    return fields.get("tokenizer.ggml.pre", "default") if byte_level else "", sizes
