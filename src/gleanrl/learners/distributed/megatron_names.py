"""Maps the parameters of Megatron-core's GPT model to those of Llama, Qwen2 and Qwen3 in transformers, and back.

Megatron-core joins the query, key and value projections to one matrix, in which the rows are grouped by key-value head,
and the gate and up projections to another. Tensor parallelism gives each process a block of rows or columns of every
matrix. Each block of a joined matrix consists of blocks of the matrices that it is made of, so a process can convert
its own part without the others.

`check_model` says whether Megatron-core can train a model. Nothing here imports Megatron-core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gleanrl.config.settings import LearnerSettings
from gleanrl.utils.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")
_QKV, _GATE_UP = "self_attention.linear_qkv", "mlp.linear_fc1"
# Names inside a layer, without ".weight" or ".bias".
_LAYER = {
    _QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    _GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "input_layernorm": ("input_layernorm",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_model(
    model: nn.Module, settings: LearnerSettings, count: int, *, has_critic: bool, half_on_cpu: bool
) -> None:
    """Raise `UserError` if Megatron-core cannot train ``model`` with these settings on ``count`` processes.

    The model's weights are not read. ``half_on_cpu``: whether passes would compute in bfloat16 on a CPU.
    """
    config: Any = model.config
    tensor, pipeline = settings.tensor_parallel, settings.pipeline_parallel

    def refuse(why: str) -> UserError:
        return UserError(f"learner.backend = 'megatron': {why}")

    if config.model_type not in FAMILIES:
        raise refuse(f"not with a {config.model_type} model, only with {', '.join(FAMILIES)}")
    if settings.lora_rank:
        raise refuse("it trains no adapters; set learner.lora_rank = 0, or learner.backend = 'fsdp'")
    if has_critic:
        raise refuse("it has no critic; choose another credit.estimator")
    if half_on_cpu:
        raise refuse("on a CPU it computes in float32; set model.dtype = 'float32'")
    if count % (tensor * pipeline):
        raise refuse(
            f"learner.tensor_parallel x pipeline_parallel = {tensor} x {pipeline} does not divide the {count} ranks"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := getattr(config, key)) % tensor:
            raise refuse(f"learner.tensor_parallel = {tensor} does not divide the model's {key} = {size}")
    if (tensor - 1) * math.ceil(config.vocab_size / tensor) >= config.vocab_size:
        raise refuse(f"learner.tensor_parallel = {tensor} leaves a rank without a token of {config.vocab_size}")
    if config.num_hidden_layers % pipeline:
        raise refuse(
            f"learner.pipeline_parallel = {pipeline} does not divide the model's {config.num_hidden_layers} layers"
        )
    rotary: Any = model.base_model.rotary_emb  # type: ignore[union-attr]
    unusual = {
        "biases in its layers": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        "sliding windows": set(getattr(config, "layer_types", None) or ()) - {"full_attention"},
        f"the activation {config.hidden_act!r}": config.hidden_act != "silu",
        f"position embeddings of the type {rotary.rope_type!r}": rotary.attention_scaling != 1
        or rotary.rope_type not in ("default", "linear", "llama3"),
    }
    for what, present in unusual.items():
        if present:
            raise refuse(f"not with {what}, which this {config.model_type} model has; use learner.backend = 'fsdp'")


def names_of(stage: Any, *, tied: bool) -> dict[str, tuple[nn.Parameter, tuple[str, ...]]]:
    """Return each parameter of a pipeline stage, and the Hugging Face names of the matrices that it is made of.

    The keys are Megatron-core's names. If embedding and head are ``tied``, both have the name of the embedding.
    """
    found: dict[str, tuple[nn.Parameter, tuple[str, ...]]] = {}
    for name, parameter in stage.named_parameters():
        if name == "embedding.word_embeddings.weight":
            theirs: tuple[str, ...] = (_EMBEDDING,)
        elif name == "output_layer.weight":
            theirs = (_EMBEDDING if tied else _HEAD,)
        elif name == "decoder.final_layernorm.weight":
            theirs = ("model.norm.weight",)
        else:
            index, inside = name.removeprefix("decoder.layers.").split(".", 1)
            module, _, kind = inside.rpartition(".")
            number = stage.decoder.layers[int(index)].layer_number - 1  # counted over all stages
            theirs = tuple(f"model.layers.{number}.{part}.{kind}" for part in _LAYER[module])
        found[name] = parameter, theirs
    return found


def split_dimension(name: str) -> int | None:
    """Return the dimension along which tensor parallelism divides the tensor of a Hugging Face name; None if it does
    not."""
    if name.endswith("norm.weight"):
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def split(tensor: Tensor, count: int, config: Any) -> list[Tensor]:
    """Divide this process's part of a parameter into its parts of the ``count`` matrices that it is made of.

    ``config`` is Megatron-core's `TransformerConfig`.
    """
    if count == 3:
        size = config.kv_channels
        queries = config.num_attention_heads // config.num_query_groups * size
        by_head = tensor.unflatten(0, (-1, queries + 2 * size))
        return [part.flatten(0, 1) for part in by_head.split([queries, size, size], 1)]
    return list(tensor.chunk(count))


def join(parts: Sequence[Tensor], config: Any) -> Tensor:
    """Join this process's parts of several matrices to its part of a parameter; the reverse of `split`."""
    if len(parts) == 3:
        heads = parts[1].shape[0] // config.kv_channels
        return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
