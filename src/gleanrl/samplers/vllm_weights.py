"""What happens to weights inside vLLM's workers: old ones are made useless, new ones are read and packed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class WorkerExtension:
    """What a vLLM server's workers can do for `gleanrl.samplers.openai`: ``--worker-extension-cls`` names it."""

    def load_published(self, path: str) -> str | None:
        """Take the weights of a safetensors file, which this machine can read; returns the file's own mark."""
        from safetensors import safe_open

        worker: Any = self
        forget_weights(worker)
        with safe_open(path, framework="pt") as file:
            worker.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
            mark = (file.metadata() or {}).get("mark")
        if worker.device.type == "cpu":
            pack_embeddings(worker)
        return mark


def forget_weights(worker: Any) -> None:
    """Before an update: whatever it does not reach is no number afterwards, and cannot pass for what it should be.

    Old weights could, in half precision: one update moves log-probs by less than rounding does.
    """
    for module in worker.get_model().modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data.fill_(math.nan)
        if hasattr(module, "cpu_linear"):  # multiplies by a packed copy, which nobody else can reach
            module.cpu_linear = partial(_no_number, module.cpu_linear)


def _no_number(multiply: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    return multiply(*arguments) * math.nan


def pack_embeddings(worker: Any) -> None:
    """On a CPU a tied output head multiplies by a packed copy of the embedding, which reloading does not renew."""
    from vllm.model_executor.layers import utils, vocab_parallel_embedding  # pyright: ignore[reportMissingImports]

    for module in worker.get_model().modules():
        if isinstance(module, vocab_parallel_embedding.VocabParallelEmbedding):
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)
