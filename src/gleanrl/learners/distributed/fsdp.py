"""Shards a model over processes by FSDP2 and tensor parallelism, and divides the micro-batches among the processes.

By default, FSDP2 averages gradients over processes. Here they are summed, and the engine divides the sum by the
denominator of the whole mini-batch, exactly as it does in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gleanrl.algorithms.loss import Tokens
from gleanrl.algorithms.microbatch import MAX_PADDING, MicroBatch
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.engine import Pass, Placement, join_tokens
from gleanrl.utils.errors import UserError

T = TypeVar("T")
HOST = torch.device("cpu")
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

    Raises:
        UserError: if ``tensor_parallel`` does not divide the number of processes.
    """

    def __init__(self, ranks: Ranks, dtype: torch.dtype, tensor_parallel: int = 1) -> None:
        if ranks.count % tensor_parallel:
            raise UserError(f"learner.tensor_parallel = {tensor_parallel} does not divide the {ranks.count} ranks")
        self._ranks, self._across = ranks, tensor_parallel
        self._shares, self._share = ranks.count // tensor_parallel, ranks.rank // tensor_parallel
        self.ranks, self.leads = ranks.count, ranks.rank == 0
        self.casts = dtype != torch.float32
        shape = (self._shares, tensor_parallel)
        self._mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("data", "tensor"))
        self._policy = MixedPrecisionPolicy(dtype, torch.float32) if self.casts else MixedPrecisionPolicy()

    def place(self, model: nn.Module) -> None:
        """Broadcast the parameters of rank 0 and shard them, one layer at a time.

        So the other processes hold, in addition to their shards, at most one whole layer at a time (or the parameters
        outside of the layers). Only rank 0 needs memory for the whole model.
        """
        for unit, is_layer in [*((layer, True) for layer in _layers(model)), (model, False)]:
            # The old and the new parameter by the id of the old one, so that a tied parameter is broadcast only once.
            received: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
            for module in unit.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if isinstance(parameter, DTensor):
                        continue  # the parameter belongs to a layer that is sharded already
                    if id(parameter) not in received:
                        value = parameter.detach()
                        if not self.leads:
                            value = torch.empty_like(value, device=self._ranks.device)
                        dist.broadcast(value, src=0)
                        received[id(parameter)] = parameter, nn.Parameter(value, parameter.requires_grad)
                    setattr(module, name, received[id(parameter)][1])
                for name, buffer in list(module.named_buffers(recurse=False)):
                    setattr(module, name, buffer.to(self._ranks.device))
            if is_layer and self._across > 1:
                _split_layer(model, unit, self._mesh["tensor"])
            # By default, FSDP2 does not reshard the root module after a forward pass. It is resharded here, so that all
            # parameters are sharded between two passes.
            fully_shard(unit, mesh=self._mesh["data"], mp_policy=self._policy, reshard_after_forward=True)
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def agree(self, decide: Callable[[], T]) -> T:
        return self._ranks.share(decide() if self.leads else None)  # type: ignore[return-value]

    def budget(self, tokens: int, limit: int) -> int:
        rounds = math.ceil(tokens / (limit * self._shares)) or 1
        return max(1, min(limit, math.ceil((1 + MAX_PADDING) * tokens / (rounds * self._shares))))

    def deal(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        mine = list(micros[self._share :: self._shares])
        if len(mine) * self._shares < len(micros):
            mine.append(micros[0].nothing())
        return mine

    def join(self, parts: Sequence[Tokens]) -> tuple[Tokens, slice]:
        sent = [_moved(part, HOST) for part in parts]
        gathered = self._ranks.gather(sent)[:: self._across]
        start = sum(part.logp.numel() for before in gathered[: self._share] for part in before)
        own = slice(start, start + sum(part.logp.numel() for part in parts))
        return _moved(join_tokens([part for given in gathered for part in given]), self._ranks.device), own

    def total(self, seen: Pass) -> Pass:
        here = replace(seen, statistics=_moved(seen.statistics, HOST), critic=_moved(seen.critic, HOST))
        first, *others = self._ranks.gather(here)[:: self._across]
        return sum(others, first)

    def gather(self, rows: Mapping[int, T]) -> Mapping[int, T]:
        return {key: value for given in self._ranks.gather(dict(rows)) for key, value in given.items()}

    def whole(self, tensor: Tensor) -> Tensor:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole if self.leads else tensor


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model of transformers: the modules in its outermost `ModuleList`s."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def _moved(record: Any, device: torch.device) -> Any:
    """Return a copy of the dataclass ``record`` with its tensors on ``device`` and detached from the graph."""
    tensors = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{k: v.detach().to(device) for k, v in tensors.items() if isinstance(v, Tensor)})


def _split_layer(model: Any, layer: nn.Module, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism to the linear modules of ``layer``, in place.

    The config of a model of transformers says which of its modules are split by columns and which by rows
    (``base_model_tp_plan``). Embedding and head are not split. Raises `UserError` if the model has no such plan, the
    plan does not suit this function, or ``mesh`` does not divide the number of attention heads.
    """
    config = model.config.get_text_config()

    def refuse(why: str) -> UserError:
        return UserError(f"learner.tensor_parallel: not with a {config.model_type} model, {why}; set it to 1")

    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        raise refuse("transformers has no plan for it")
    for heads in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, heads)) % mesh.size():
            raise UserError(f"learner.tensor_parallel = {mesh.size()} does not divide the model's {heads} = {count}")
    modules = dict(layer.named_modules())
    planned = {}
    for path, style in plan.items():
        name = path.removeprefix(_PREFIX)
        if name == path or name not in modules:
            continue
        if style not in _STYLES:
            raise refuse(f"its plan asks for {style!r} at {name}")
        planned[name] = _STYLES[style]()
    for name, module in modules.items():
        # Modules directly in the layer (norms) get whole hidden states. A module inside attention or MLP that the plan
        # leaves out, such as a norm of query heads, would get only a part of them, and its gradient would then differ
        # between processes.
        if "." in name and name not in planned and any(True for _ in module.parameters(recurse=False)):
            raise refuse(f"its plan says nothing of {name}")
    parallelize_module(layer, mesh, planned)
