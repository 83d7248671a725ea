"""Shards a model of transformers over processes by FSDP2 and tensor parallelism.

By default, FSDP2 averages gradients over processes. Here they are summed, and the engine divides the sum by the
denominator of the whole mini-batch, exactly as it does in one process.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from gleanrl.config.settings import LearnerSettings
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.distributed.replicas import RankReplicas
from gleanrl.learners.transformers import Placement
from gleanrl.utils.errors import UserError
from gleanrl.utils.weights import layers_of

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_PREFIX = "layers.*."  # prefix of the names of a layer's modules in a tensor-parallel plan of transformers


class Fsdp(Placement):
    """A `Placement` that shards each parameter over all processes.

    A layer's parameters are gathered for the time in which the layer computes. With ``tensor_parallel`` above 1, that
    number of processes computes each layer together on the same samples, and the device mesh has the two dimensions
    data and tensor.

    Args:
        ranks: the processes.
        dtype: dtype to which parameters are cast in forward and backward passes; float32 means no cast. Stored
            parameters and sums of gradients keep the dtype of the model, usually float32.
        tensor_parallel: number of processes that compute each layer together.
        offload: keep shards, their gradients and so the optimizer's state in main memory.

    `check_model` says beforehand whether a model can be placed.
    """

    def __init__(self, ranks: Ranks, dtype: torch.dtype, tensor_parallel: int = 1, *, offload: bool = False) -> None:
        self._ranks, self._across = ranks, tensor_parallel
        # torch advises, in every process, to flatten the mesh of two dimensions, which users cannot do.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        shares = [rank // tensor_parallel for rank in range(ranks.count)]
        self.casts = dtype != torch.float32
        self._mesh = ranks.mesh(data=ranks.count // tensor_parallel, tensor=tensor_parallel)
        peers = self._mesh["data"].get_group()
        self.replicas = RankReplicas(ranks, shares, range(0, ranks.count, tensor_parallel), peers)
        self.device = ranks.device
        self._policies: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(dtype, torch.float32) if self.casts else MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy(self.device.type == "cuda") if offload else OffloadPolicy(),
        }

    def place(self, model: nn.Module) -> None:
        """Broadcast the parameters of rank 0 and shard them, one layer at a time.

        So the processes hold, in addition to their shards, at most one whole layer at a time (or the parameters outside
        of the layers). Rank 0 holds the whole model only if its parameters are not mapped (`gleanrl.learners.mapped`).
        """
        for unit, is_layer in [*((layer, True) for layer in layers_of(model)), (model, False)]:
            # The old and the new parameter by the id of the old one, so that a tied parameter is broadcast only once.
            received: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
            for module in unit.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if isinstance(parameter, DTensor):
                        continue  # the parameter belongs to a layer that is sharded already
                    if id(parameter) not in received:
                        if self.replicas.leads:
                            value = parameter.detach().clone()
                        else:
                            value = torch.empty_like(parameter, device=self._ranks.device, requires_grad=False)
                        dist.broadcast(value, src=0)
                        received[id(parameter)] = parameter, nn.Parameter(value, parameter.requires_grad)
                    setattr(module, name, received[id(parameter)][1])
                for name, buffer in list(module.named_buffers(recurse=False)):
                    setattr(module, name, buffer.to(self._ranks.device))
            if is_layer and self._across > 1:
                parallelize_module(unit, self._mesh["tensor"], _plan(model, unit, self._across))
            # By default, FSDP2 does not reshard the root module after a forward pass. It is resharded here, so that all
            # parameters are sharded between two passes.
            fully_shard(unit, mesh=self._mesh["data"], reshard_after_forward=True, **self._policies)
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def whole(self, tensor: Tensor) -> Tensor:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole if self.replicas.leads else tensor


def check_model(model: nn.Module, settings: LearnerSettings, count: int) -> None:
    """Raise `UserError` if FSDP2 cannot train ``model`` with these settings on ``count`` processes.

    The model's weights are not read.
    """
    if (size := settings.tensor_parallel) == 1:
        return
    if count % size:
        raise UserError(f"learner.tensor_parallel = {size} does not divide the {count} ranks")
    if settings.lora_rank:
        raise UserError("learner.tensor_parallel splits no adapters; leave out learner.lora_rank, or set it to 1")
    for layer in layers_of(model):
        _plan(model, layer, size)


def _plan(model: Any, layer: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Return how ``size`` processes split the linear modules of ``layer``, by name.

    The config of a model of transformers says which of its modules are split by columns and which by rows
    (``base_model_tp_plan``). Embedding and head are not split. Raises `UserError` if the model has no such plan, the
    plan does not suit this function, or ``size`` does not divide the number of attention heads or of a module's
    features.
    """
    config = model.config.get_text_config()

    def refuse(why: str) -> UserError:
        return UserError(f"learner.tensor_parallel: not with a {config.model_type} model, {why}; set it to 1")

    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        raise refuse("transformers has no plan for it")
    for heads in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, heads, None)) is None:
            raise refuse(f"its config has no {heads}")
        if count % size:
            raise UserError(f"learner.tensor_parallel = {size} does not divide the model's {heads} = {count}")
    modules: dict[str, Any] = dict(layer.named_modules())
    planned: dict[str, ParallelStyle] = {}
    for path, style in plan.items():
        name = path.removeprefix(_PREFIX)
        if name == path or name not in modules:
            continue
        if style not in _STYLES:
            raise refuse(f"its plan asks for {style!r} at {name}")
        features = modules[name].out_features if style == "colwise" else modules[name].in_features
        if features % size:
            raise UserError(f"learner.tensor_parallel = {size} does not divide the {features} features of {name}")
        planned[name] = _STYLES[style]()
    for name, module in modules.items():
        # Modules directly in the layer (norms) get whole hidden states. A module inside attention or MLP that the plan
        # leaves out, such as a norm of query heads, would get only a part of them, and its gradient would then differ
        # between processes.
        if "." in name and name not in planned and any(True for _ in module.parameters(recurse=False)):
            raise refuse(f"its plan says nothing of {name}")
    return planned
