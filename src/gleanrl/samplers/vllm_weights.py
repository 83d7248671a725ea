"""Updates weights inside vLLM's workers: invalidates old ones, and loads and packs new ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class WorkerExtension:
    """Methods of a vLLM server's workers for `gleanrl.samplers.openai`; use it with ``--worker-extension-cls``."""

    def load_published(self, path: str) -> str | None:
        """Load the weights of a safetensors file that this machine can read; return the mark stored in the file."""
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
    """Set all weights to NaN before an update, so that weights which the update misses are noticed.

    Old weights would not be noticed in half precision: one update moves log-probs by less than rounding does.
    """
    for module in worker.get_model().modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data.fill_(math.nan)
        if hasattr(module, "cpu_linear"):  # multiplies by a packed copy, which only this attribute refers to
            module.cpu_linear = partial(_no_number, module.cpu_linear)


def _no_number(multiply: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    return multiply(*arguments) * math.nan


def pack_embeddings(worker: Any) -> None:
    """Pack the embedding again. On a CPU a tied output head uses a packed copy, which reloading does not update."""
    from vllm.model_executor.layers import utils, vocab_parallel_embedding  # pyright: ignore[reportMissingImports]

    for module in worker.get_model().modules():
        if isinstance(module, vocab_parallel_embedding.VocabParallelEmbedding):
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)
