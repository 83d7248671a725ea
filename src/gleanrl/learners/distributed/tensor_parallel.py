"""A layer's matrices split over processes that compute it together, by the plan that transformers has for its model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gleanrl.utils.errors import UserError

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_PREFIX = "layers.*."


def split_layer(model: nn.Module, layer: nn.Module, mesh: DeviceMesh) -> None:
    """Split the linear maps of a layer in place. Embedding and head stay as they are.

    Raises `UserError` where the model's plan, or the number of its heads, does not allow it.
    """
    config = _config(model)
    plan = {name.removeprefix(_PREFIX): style for name, style in _plan(config).items() if name.startswith(_PREFIX)}
    for heads in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, heads)) % mesh.size():
            raise UserError(f"learner.tensor_parallel = {mesh.size()} does not divide the model's {heads} = {count}")
    planned = {name: style for name, style in plan.items() if _has(layer, name)}
    for name, style in planned.items():
        if style not in _STYLES:
            raise _refused(config, f"its plan asks for {style!r} at {name}")
    for name, module in layer.named_modules():
        # what is not split must see whole hidden states: then its gradient is the same in every process
        if "." in name and name not in planned and any(True for _ in module.parameters(recurse=False)):
            raise _refused(config, f"its plan says nothing of {name}")
    parallelize_module(layer, mesh, {name: _STYLES[style]() for name, style in planned.items()})


def _config(model: Any) -> Any:
    return model.config.get_text_config()


def _plan(config: Any) -> dict[str, str]:
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise _refused(config, "transformers has no plan for it")
    return plan


def _has(layer: nn.Module, name: str) -> bool:
    return any(name == found for found, _ in layer.named_modules())


def _refused(config: Any, why: str) -> UserError:
    return UserError(f"learner.tensor_parallel: not with a {config.model_type} model, {why}; set it to 1")
