"""Runs a causal language model of transformers, in one process or sharded over several.

`TransformersBackend` is the default backend of `gleanrl.learners.engine.LocalEngine`. Its `Placement` determines
whether the model is in this process or sharded over several (`gleanrl.learners.distributed.fsdp`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gleanrl.algorithms.microbatch import MicroBatch
from gleanrl.config.settings import CriticSettings, LearnerSettings
from gleanrl.learners import checkpoint
from gleanrl.learners.backend import Replicas, Which
from gleanrl.learners.critic import Critic, capture
from gleanrl.learners.freed_memory import KEPT_BYTES, keep_freed_memory, return_freed_memory
from gleanrl.learners.logprobs import can_pack_rows, trained_logprobs
from gleanrl.learners.models import (
    AUTO,
    adapter_weights,
    add_adapters,
    attention_kernel,
    has_linear_adapters,
    merged_weights,
    policy_parameters,
    recompute_activations,
    use_attention_kernel,
    without_dropout,
)
from gleanrl.learners.optim import adamw, finish_gradient, zero_gradients
from gleanrl.learners.packed_attention import use_packed_attention
from gleanrl.utils.weights import Layout, layers_of

T = TypeVar("T")


class Placement:
    """Determines where the parameters of a model of transformers are stored.

    This class stands for a single process. A subclass may use several
    (`gleanrl.learners.distributed.fsdp.Fsdp`). Each process then has a `TransformersBackend` with a placement.
    """

    replicas = Replicas()
    device: torch.device | None = None
    """The device of passes, if the placement moves the model."""
    casts = False
    """Whether the placement itself casts parameters to the dtype of forward passes, so that autocast is not used."""

    def place(self, model: nn.Module) -> None:
        """Move or shard the parameters of ``model``, in place.

        After this, a backward pass computes gradients that are sums over all processes, not means.
        """

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather a parameter that may be sharded. Only the process that `leads` must get the whole tensor."""
        return tensor


HERE = Placement()


def _hashes(model: nn.Module) -> Tensor:
    """Return one hash of each parameter's bits, int64[parameters], on the CPU."""
    return torch.stack([torch.hash_tensor(p.detach()) for p in model.parameters()]).view(torch.int64).cpu()


class TransformersBackend:
    """The `Backend` for a causal language model of transformers, on one device or sharded over processes.

    Args:
        model: the policy. It is trained in place.
        temperature: the sampling temperature, at which log-probs are computed; above 0.
        reference: frozen reference model. If None and ``has_reference``, the reference is a copy of ``model`` as it is
            now, or with adapters the base model.
        has_reference: whether log-probs of a reference model are needed.
        critic: settings of the critic; None if there is none.
        compute_dtype: dtype of forward passes, by autocast. None means bfloat16 on a GPU and float32 on a CPU.
        seed: determines the initial values of adapters.
        trains: False for a model that only computes log-probs. The backend then has no optimizer and no critic, makes
            no copy of the model as a reference, and `load` reads the model's weights only.
        placement: where the parameters are stored; by default, in this process.

    Raises:
        UserError: if adapters cannot be added, or the requested attention implementation is not available.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: LearnerSettings,
        *,
        temperature: float,
        reference: nn.Module | None = None,
        has_reference: bool = False,
        critic: CriticSettings | None = None,
        compute_dtype: torch.dtype | None = None,
        seed: int = 0,
        trains: bool = True,
        placement: Placement = HERE,
    ) -> None:
        self.trains = trains
        critic = critic if trains else None
        self.settings, self.temperature = settings, temperature
        device = next(model.parameters()).device
        if device.type == "cpu":
            keep_freed_memory()
        self.compute_dtype = compute_dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        asked = settings.attn_implementation
        kernel = placement.replicas.agree(lambda: attention_kernel(model, asked, self.compute_dtype))
        for whole in filter(None, (model, reference)):
            use_attention_kernel(whole, kernel, asked=asked != AUTO)
        # Packed rows need no padding, and compute common prefixes once. Copies of the model, such as the critic's, get
        # their attention from the model, so it is selected before they are made.
        wholes = [whole for whole in (model, reference) if whole is not None]
        for whole in wholes:
            without_dropout(whole)
        self.packs_rows = placement.replicas.agree(lambda: all(map(can_pack_rows, wholes)))
        if self.packs_rows:
            for whole in wholes:
                use_packed_attention(whole)
        if has_reference and reference is None and not settings.lora_rank and trains:
            reference = copy.deepcopy(model)
        self.placement, self.replicas = placement, placement.replicas
        place = placement.place
        # The critic is made before adapters are added, because its copy of the model must not contain them.
        self.critic = None if critic is None else Critic(model, critic, place)
        # A checkpoint of adapters does not contain the model that they are added to, only one hash of each parameter.
        self.base: Tensor | None = None
        if settings.lora_rank:
            self.base = placement.replicas.agree(lambda: _hashes(model))
        self.model: Any = add_adapters(model, settings, seed) if settings.lora_rank else model
        self.adapter_scale: float | None = None
        if settings.lora_rank and has_linear_adapters(self.model):
            self.adapter_scale = settings.lora_alpha / settings.lora_rank
        self.reference: Any = reference.requires_grad_(False).eval() if reference is not None else None
        without_dropout(self.model)
        if settings.activation_checkpointing:
            for body in filter(None, (self.model, self.critic and self.critic.body)):
                recompute_activations(layers_of(body), offload=settings.offload_activations)
        for whole in filter(None, (self.model, self.reference)):
            placement.place(whole)
        self.device = placement.device or device
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if trains:
            self.optimizer = adamw(self.model, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)
        self.discard()

    @torch.no_grad()
    def forward(
        self,
        which: Which,
        micros: Sequence[MicroBatch],
        receive: Callable[[int, tuple[Tensor, ...]], None],
        between: Callable[[], None],
    ) -> None:
        """See `Backend.forward`. The micro-batches are computed one at a time."""
        for number, micro in enumerate(micros):
            if number:
                between()
            if which == "critic":
                receive(number, (self._values(micro),))
            elif which == "policy":
                receive(number, self._logprobs(self.model, micro))
            elif self.reference is not None:
                receive(number, self._logprobs(self.reference, micro))
            else:  # the reference is the base model of the adapters, because it equals the initial policy
                with self.model.disable_adapter():
                    receive(number, self._logprobs(self.model, micro))

    def backward(
        self,
        micros: Sequence[MicroBatch],
        loss: Callable[[int, Tensor, Tensor, Tensor | None], Tensor],
        between: Callable[[], None],
    ) -> None:
        """See `Backend.backward`. The micro-batches are computed one at a time."""
        for number, micro in enumerate(micros):
            if number:
                between()
            with self._hidden_states() as hidden:
                logp, entropy = self._logprobs(self.model, micro)
            values = None
            if self.critic is not None and micro.values is not None:
                with self._autocast():
                    values = self.critic.values(micro, hidden[0] if hidden else None)
            loss(number, logp, entropy, values).backward()

    def _values(self, micro: MicroBatch) -> Tensor:
        assert self.critic is not None
        with self._hidden_states() as hidden, self._autocast():
            if self.critic.body is None:
                # Run the model for its hidden states only. Without trained tokens it computes no logits.
                self._logprobs(self.model, micro.untrained())
            return self.critic.values(micro, hidden[0] if hidden else None)

    def _hidden_states(self) -> AbstractContextManager[list[Tensor]]:
        shared = self.critic is not None and self.critic.body is None
        return capture(self.model) if shared else nullcontext([])

    def _logprobs(self, model: nn.Module, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            return trained_logprobs(
                model,
                micro.tokens,
                micro.index,
                micro.targets,
                self.temperature,
                packing=micro.packing,
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32 or self.placement.casts:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def step(self, normaliser: float, lr: float, *, policy: bool = True) -> float:
        norms = []
        if (critic := self.critic) is not None:
            norms.append(finish_gradient(critic.parameters, normaliser, critic.settings.max_grad_norm))
        if policy:
            norms.append(finish_gradient(self.parameters, normaliser, self.settings.max_grad_norm))
        if all(map(math.isfinite, norms)):
            # Without any value loss the gradient is zero. An update would then only apply the momentum.
            if critic is not None and norms[0] > 0:
                critic.optimizer.step()
            if policy:
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                self.optimizer.step()
        self.discard()
        if self.device.type == "cpu":
            return_freed_memory(KEPT_BYTES)
        return next((norm for norm in norms if not math.isfinite(norm)), norms[-1])

    def discard(self) -> None:
        if self.trains:
            zero_gradients(self.parameters)
        if self.critic is not None:
            zero_gradients(self.critic.parameters)

    def layout(self, dtype: torch.dtype | None) -> Mapping[str, Layout]:
        parameters = policy_parameters(self.model)
        return {name: Layout(tuple(p.shape), dtype or p.dtype) for name, (p, _) in parameters.items()}

    def gather(self, names: Sequence[str], dtype: torch.dtype | None, *, merge: bool = True) -> Mapping[str, Tensor]:
        return merged_weights(self.model, self.placement.whole, names, dtype, merge=merge)

    def adapters(self) -> Mapping[str, Tensor]:
        return adapter_weights(self.model, self.placement.whole)

    def save(self, folder: Path) -> None:
        tensors, optimizers = self._state()
        for name, (module, optimizer) in optimizers.items():
            tensors |= checkpoint.optimizer_state(name, module, optimizer)
        checkpoint.write(folder, tensors)

    def load(self, folder: Path) -> None:
        tensors, optimizers = self._state()
        parameters = {
            f"{checkpoint.OPTIMIZER}{name}/{parameter}": value.detach()
            for name, (module, _) in optimizers.items()
            for parameter, value in module.named_parameters()
        }
        found = checkpoint.read(folder, tensors, parameters, weights_only=not self.trains)
        for name, (module, optimizer) in optimizers.items():
            checkpoint.restore_optimizer(name, module, optimizer, found)
        checkpoint.restore_random(found)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, tuple[nn.Module, torch.optim.Optimizer]]]:
        """Return what a checkpoint contains: named tensors, and the optimizers with the modules that they train.

        The tensors are the trained weights, the hashes of the base model if these are adapters, and, if the engine
        trains and has a reference or a critic, the weights of these.
        """
        tensors = {f"weights/{name}": p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        if self.base is not None:
            tensors[checkpoint.BASE] = self.base
        optimizers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        if self.trains:
            optimizers["policy"] = self.model, self.optimizer
        if self.reference is not None and self.trains:
            tensors |= {f"reference/{name}": p.detach() for name, p in self.reference.named_parameters()}
        if self.critic is not None:
            tensors |= {f"critic/{name}": p.detach() for name, p in self.critic.module.named_parameters()}
            optimizers["critic"] = self.critic.module, self.critic.optimizer
        return tensors, optimizers
