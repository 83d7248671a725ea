"""Writes small GGUF files: a Llama model of two layers, with a byte-level tokenizer that is trained on some lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

LINES = ["go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed.", "is 101 odd or even?\n\n1. odd 2. even"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAYERS, WIDTH, HEADS, KV_HEADS = 2, 64, 4, 2


def tokenizer() -> Tokenizer:
    """Return the tokenizer of the files. As SmolLM's, it splits text at each digit."""
    made = Tokenizer(models.BPE())
    digits, gpt2 = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(LINES * 3, trainer)
    return made


def write_gguf(path: Path, *, quantized: bool = False, **change: Any) -> LlamaForCausalLM:
    """Write a GGUF file, and return the model that it holds.

    Args:
        quantized: whether the matrices are quantized to 8 bits (Q8_0), instead of float32. The returned model has the
            rounded weights.
        change: what is otherwise in the file: ``architecture``, ``template``, ``pre`` (how text is split), ``tokens``
            (number of tokens that the tokenizer has beyond the model's vocabulary), ``special`` (a further special
            token), ``lacks`` (a tensor), ``extra`` (a function of the writer).
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    written = json.loads(tokenizer().to_str())["model"]
    tokens = sorted(written["vocab"], key=written["vocab"].__getitem__)
    kinds = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    if special := change.get("special"):
        tokens, kinds = [*tokens, special], [*kinds, 3]
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=256, rms_norm_eps=1e-5,
        tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    tokens += [f"further{n}" for n in range(change.get("tokens", 0))]
    kinds += [1] * (len(tokens) - len(kinds))

    architecture = change.get("architecture", "llama")
    writer = GGUFWriter(path, architecture)
    for add, value in {
        writer.add_block_count: LAYERS, writer.add_context_length: 256, writer.add_embedding_length: WIDTH,
        writer.add_feed_forward_length: 96, writer.add_head_count: HEADS, writer.add_head_count_kv: KV_HEADS,
        writer.add_layer_norm_rms_eps: 1e-5, writer.add_rope_freq_base: 10_000.0,
        writer.add_vocab_size: config.vocab_size,
        writer.add_tokenizer_model: "gpt2", writer.add_tokenizer_pre: change.get("pre", "smollm"),
        writer.add_token_list: tokens, writer.add_token_types: kinds,
        writer.add_token_merges: [" ".join(pair) for pair in written["merges"]],
        writer.add_unk_token_id: 0, writer.add_bos_token_id: 1, writer.add_eos_token_id: 2, writer.add_pad_token_id: 2,
    }.items():  # fmt: skip
        add(value)
    if template := change.get("template", TEMPLATE):
        writer.add_chat_template(template)
    extra: Callable[[Any], object] = change.get("extra", lambda _: None)
    extra(writer)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if quantized and parameter.ndim == 2:
                packed = quantize(parameter.numpy(), GGMLQuantizationType.Q8_0)
                parameter.copy_(torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q8_0)))
            if (called := _gguf_name(name)) == change.get("lacks"):
                continue
            values = parameter.numpy()
            if called.endswith(("attn_q.weight", "attn_k.weight")):  # GGUF pairs neighbours in rotary positions
                heads = HEADS if "attn_q" in called else KV_HEADS
                values = values.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(values.shape)
            values = np.ascontiguousarray(values)
            if quantized and values.ndim == 2:
                kind = GGMLQuantizationType.Q8_0
                writer.add_tensor(called, quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(called, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_name(name: str) -> str:
    """Return what GGUF calls the parameter ``name`` of transformers."""
    for ours, theirs in {
        "model.layers": "blk", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
    }.items():  # fmt: skip
        name = name.replace(ours, theirs)
    return name
