"""Runs a model by Megatron-core: tensor, pipeline and data parallel, for Llama, Qwen2 and Qwen3.

`MegatronBackend` takes the weights of a model of transformers and gives them back by Hugging Face name. Its checkpoints
have these names too, so that FSDP2, a single process and every other layout can continue from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
from megatron.core.distributed import (  # pyright: ignore[reportMissingImports]
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # pyright: ignore[reportMissingImports]
from megatron.core.models.gpt.gpt_layer_specs import (  # pyright: ignore[reportMissingImports]
    get_gpt_layer_local_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # pyright: ignore[reportMissingImports]
from megatron.core.pipeline_parallel import get_forward_backward_func  # pyright: ignore[reportMissingImports]
from megatron.core.tensor_parallel import (  # pyright: ignore[reportMissingImports]
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import (  # pyright: ignore[reportMissingImports]
    initialize_rng_tracker,
)
from megatron.core.transformer import TransformerConfig  # pyright: ignore[reportMissingImports]
from megatron.core.transformer.transformer_block import (  # pyright: ignore[reportMissingImports]
    TransformerBlockSubmodules,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from gleanrl.algorithms.microbatch import MicroBatch, Packing
from gleanrl.config.settings import LearnerSettings
from gleanrl.learners import checkpoint
from gleanrl.learners.backend import Replicas, Which
from gleanrl.learners.distributed.megatron_cpu import CpuAsCuda
from gleanrl.learners.distributed.megatron_names import join, names_of, split, split_dimension
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.distributed.replicas import RankReplicas
from gleanrl.learners.freed_memory import KEPT_BYTES, keep_freed_memory, return_freed_memory
from gleanrl.learners.logprobs import selected_log_softmax
from gleanrl.learners.mapped import replace_parameters
from gleanrl.learners.models import recompute_activations
from gleanrl.learners.packed_attention import attend
from gleanrl.utils.errors import UserError
from gleanrl.utils.weights import Layout

# Micro-batches that a pipeline works on without a pause, for each stage. More make it idle for a smaller share of the
# time at the start and the end, and other work waits longer for the device.
WINDOW = 8
_NO_TOKENS = torch.zeros((), dtype=torch.int)
_POLICY = f"{checkpoint.OPTIMIZER}policy/"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronBackend:
    """The `Backend` that runs a model by Megatron-core.

    The ranks are numbered as Megatron-core does by default: neighbours divide the matrices of a layer, groups of these
    are the replicas of a pipeline stage, and groups of replicas are the stages. Parameters, gradients and AdamW's
    moments keep the dtype of ``model``; on a GPU, ``compute_dtype`` is applied by autocast.

    Args:
        ranks: the processes. All make the backend at the same time.
        model: the policy. Only rank 0 passes a model with weights; the others pass its `skeleton`. Afterwards its
            parameters are on the meta device.
        reference: frozen reference model, passed like ``model``.
        critic: must be None.

    The other arguments are those of `TransformersBackend`. ``seed`` is not used, because nothing is initialised at
    random. `check_model` says beforehand whether Megatron-core can train the model with these settings.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        settings: LearnerSettings,
        *,
        temperature: float,
        reference: nn.Module | None = None,
        has_reference: bool = False,
        critic: Any = None,
        compute_dtype: torch.dtype | None = None,
        seed: int = 0,
        trains: bool = True,
    ) -> None:
        del seed, critic
        self.device, self.settings, self.temperature, self.trains = ranks.device, settings, temperature, trains
        on_gpu = ranks.device.type == "cuda"
        dtype = next(model.parameters()).dtype
        if not on_gpu and compute_dtype != torch.bfloat16:
            compute_dtype = dtype
        compute_dtype = compute_dtype or torch.bfloat16
        if not on_gpu:
            keep_freed_memory()
        tensor, pipeline = settings.tensor_parallel, settings.pipeline_parallel
        data = ranks.count // (tensor * pipeline)
        _set_layout(tensor, pipeline)
        mesh = ranks.mesh(pipeline=pipeline, data=data, tensor=tensor)
        self._stage_mesh, self._tensor, self._pipeline = mesh["data", "tensor"], tensor, pipeline
        self._tensor_rank, self._tensor_group = mesh["tensor"].get_local_rank(), mesh["tensor"].get_group()
        # The last stage computes the loss. Of each replica, the first process of this stage reports the results.
        last = (pipeline - 1) * data * tensor
        shares = [rank // tensor % data for rank in range(ranks.count)]
        self.replicas: Replicas = RankReplicas(
            ranks, shares, range(last, ranks.count, tensor), mesh["data"].get_group()
        )
        # Attention of packed rows is made for the CPU.
        self.packs_rows = not on_gpu
        config = _transformer_config(model.config, settings, dtype, compute_dtype)
        with self._cuda():
            self._stage = Stage(config, model).to(ranks.device)
        self._load(self._stage, model, ranks)
        if settings.activation_checkpointing:
            recompute_activations(self._stage.decoder.layers, offload=settings.offload_activations)
        self._reference: Stage | None = None
        if reference is not None or (has_reference and trains):
            with self._cuda():
                self._reference = Stage(config, model).to(ranks.device).requires_grad_(False)
            self._load(self._reference, reference or model, ranks)
        replace_parameters(model, lambda _, parameter: torch.empty_like(parameter, device="meta"))
        self.model: Any = model
        if trains:
            with self._cuda():
                spread = settings.distributed_optimizer
                grouped = DistributedDataParallelConfig(use_distributed_optimizer=spread)
                self._trained = DistributedDataParallel(config, grouped, self._stage)
                self._optimizer: Any = get_megatron_optimizer(
                    OptimizerConfig(
                        optimizer="adam",
                        lr=settings.lr,
                        weight_decay=settings.weight_decay,
                        adam_beta1=settings.betas[0],
                        adam_beta2=settings.betas[1],
                        params_dtype=dtype,
                        use_distributed_optimizer=spread,
                    ),
                    [self._trained],
                )
        self._updates = 0  # number of AdamW's steps
        self.discard()

    # --- passes ---
    @torch.no_grad()
    def forward(
        self,
        which: Which,
        micros: Sequence[MicroBatch],
        receive: Callable[[int, tuple[Tensor, ...]], None],
        between: Callable[[], None],
    ) -> None:
        """See `Backend.forward`. The pass can pause between two windows of micro-batches."""
        stage = self._reference if which == "reference" else self._stage
        assert stage is not None

        def loss(number: int, logp: Tensor, entropy: Tensor, values: None) -> Tensor:
            receive(number, (logp, entropy))
            return logp.new_zeros(())

        self._run(stage, micros, loss, between, train=False)

    def backward(
        self,
        micros: Sequence[MicroBatch],
        loss: Callable[[int, Tensor, Tensor, Tensor | None], Tensor],
        between: Callable[[], None],
    ) -> None:
        """See `Backend.backward`. The pass can pause between two windows of micro-batches."""
        self._run(self._trained, micros, loss, between, train=True)

    def _run(
        self,
        module: nn.Module,
        micros: Sequence[MicroBatch],
        loss: Callable[..., Tensor],
        between: Callable[[], None],
        *,
        train: bool,
    ) -> None:
        stage = self._stage
        first = self._tensor_rank * stage.vocabulary_part  # this process's first token of the vocabulary

        def step(given: Iterator[tuple[int, MicroBatch]], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            number, micro = next(given)

            def losses(logits: Tensor) -> tuple[Tensor, Tensor, None]:
                targets = micro.targets - first
                logp, entropy = selected_log_softmax(logits, targets, self.temperature, self._tensor_group)
                return loss(number, logp, entropy, None), _NO_TOKENS, None

            return model(micro), losses

        window = WINDOW * self._pipeline if self._pipeline > 1 else 1
        numbered = list(enumerate(micros))
        for start in range(0, len(micros), window):
            if start:
                between()
            part = numbered[start : start + window]
            with self._cuda():
                get_forward_backward_func()(
                    forward_step_func=step,
                    data_iterator=iter(part),
                    model=[module],
                    num_microbatches=len(part),
                    seq_length=0,  # not used, because the stages send each other the shapes
                    micro_batch_size=0,
                    forward_only=not train,
                )

    def step(self, normaliser: float, lr: float, *, policy: bool = True) -> float:
        """See `Engine.step`."""
        del policy  # there is no critic
        with self._cuda():
            finalize_model_grads([self._trained])
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.get_grad_norm()) / normaliser
            if math.isfinite(norm):
                self._trained.scale_gradients(min(1.0, self.settings.max_grad_norm / (norm + 1e-6)) / normaliser)
                for group in self._optimizer.param_groups:
                    # Megatron-core's scheduler would apply the multiplier, which is 0 for vectors.
                    group["lr"], group["weight_decay"] = lr, self.settings.weight_decay * group["wd_mult"]
                self._optimizer.step_with_ready_grads()
                self._updates += 1
        self.discard()
        if self.device.type == "cpu":
            return_freed_memory(KEPT_BYTES)
        return norm

    def discard(self) -> None:
        if self.trains:
            self._trained.zero_grad_buffer()
            # Otherwise the next backward pass would add what is left in ``grad`` to the buffer.
            self._optimizer.zero_grad()

    def _cuda(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.device.type == "cuda" else CpuAsCuda()

    # --- weights ---
    @torch.no_grad()
    def _load(self, stage: Stage, model: nn.Module, ranks: Ranks) -> None:
        """Broadcast the parameters of rank 0, one at a time, and give ``stage`` its parts of them."""
        own = {name: each for each in names_of(stage, tied=stage.tied).values() for name in each[1]}
        parts: dict[str, Tensor] = {}  # parts of joined matrices that are not complete yet
        for name, theirs in model.named_parameters():
            value = torch.empty_like(theirs, device=ranks.device) if ranks.rank else theirs.clone()
            dist.broadcast(value, src=0)
            if name in own:
                parameter, names = own[name]
                parts[name] = self._part(name, value).clone()
                if parts.keys() >= set(names):
                    parameter.copy_(self._joined(parameter, names, [parts.pop(each) for each in names]))

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """Return this process's part of a whole tensor, without padding."""
        if (dimension := split_dimension(name)) is None:
            return whole
        size = whole.shape[dimension]
        length = math.ceil(size / self._tensor)
        start = self._tensor_rank * length
        return whole.narrow(dimension, start, min(length, size - start))

    def _joined(self, parameter: nn.Parameter, names: Sequence[str], parts: Sequence[Tensor]) -> Tensor:
        """Join this process's parts of the tensors ``names`` to its part of ``parameter``."""
        joined = join(parts, self._stage.config)
        # Embedding and head have further rows, so that all processes have the same number.
        return F.pad(joined, (0, 0, 0, parameter.shape[0] - joined.shape[0])) if joined.ndim == 2 else joined

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradient so far by Hugging Face name, on rank 0. It must be discarded afterwards."""
        with self._cuda():
            finalize_model_grads([self._trained])
        parts = self.by_name(self._stage, lambda parameter: parameter.main_grad)
        return self.whole(parts, self.layout(None))

    def by_name(
        self, stage: Stage, of: Callable[[Any], Tensor], chosen: Collection[str] | None = None
    ) -> dict[str, DTensor]:
        """Return a tensor of each of this stage's parameters by Hugging Face name, with the shape of the whole tensor.

        ``of`` returns the tensor of a parameter, such as the parameter or its gradient. Joined matrices are divided.
        Only the ``chosen`` names are returned; None means all.
        """
        found: dict[str, DTensor] = {}
        for parameter, names in names_of(stage, tied=stage.tied).values():
            if chosen is not None and not set(names) & set(chosen):
                continue
            for name, part in zip(names, split(of(parameter), len(names), stage.config), strict=True):
                if chosen is not None and name not in chosen:
                    continue
                shape = self.model.get_parameter(name).shape
                dimension = split_dimension(name)
                if dimension == 0:  # without the padding of the vocabulary
                    part = part[: max(0, shape[0] - self._tensor_rank * math.ceil(shape[0] / self._tensor))]
                placement = Replicate() if dimension is None else Shard(dimension)
                found[name] = DTensor.from_local(
                    part.detach().contiguous(),
                    self._stage_mesh,
                    [Replicate(), placement],
                    run_check=False,
                    shape=shape,
                    stride=torch.empty(shape, device="meta").stride(),
                )
        return found

    def whole(self, parts: Mapping[str, DTensor], layout: Mapping[str, Layout]) -> dict[str, Tensor]:
        """Gather the tensors of ``layout`` from all stages, one at a time.

        ``parts`` are those of this stage. The result is empty in processes other than rank 0.
        """
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in layout.items():
            value = parts[name].full_tensor() if name in parts else None
            owner = self._owner(name)
            if owner and dist.get_rank() == owner:
                assert value is not None
                dist.send(value, 0)
            elif dist.get_rank() == 0:
                if value is None:
                    value = torch.empty(shape, dtype=dtype, device=self.device)
                    dist.recv(value, owner)
                found[name] = value
        return found

    def _owner(self, name: str) -> int:
        """Return the first rank of the stage that has the tensor of a Hugging Face name."""
        config = self.model.config
        if name.startswith("model.layers."):
            stage = int(name.split(".")[2]) // (config.num_hidden_layers // self._pipeline)
        else:
            stage = 0 if name.startswith("model.embed_tokens.") else self._pipeline - 1
        return stage * self._stage_mesh.size()

    adapter_scale: float | None = None

    def layout(self, dtype: torch.dtype | None) -> Mapping[str, Layout]:
        return {name: Layout(tuple(p.shape), dtype or p.dtype) for name, p in self.model.named_parameters()}

    def gather(self, names: Sequence[str], dtype: torch.dtype | None, *, merge: bool = True) -> Mapping[str, Tensor]:
        parts = self.by_name(self._stage, lambda parameter: parameter.to(dtype or parameter.dtype), names)
        layout = self.layout(dtype)
        return self.whole(parts, {name: layout[name] for name in names})

    def adapters(self) -> Mapping[str, Tensor]:
        raise UserError("there are no adapters: learner.lora_rank = 0 trains all weights; export the model instead")

    # --- checkpoints ---
    def save(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for kind, stage in self._stages.items():
            tensors |= {f"{kind}/{name}": part for name, part in self.by_name(stage, lambda p: p).items()}
        if self._updates:
            for key in _MOMENTS:
                for name, part in self.by_name(self._stage, partial(self._moment, key)).items():
                    tensors[f"{_POLICY}{name}/{key}"] = part
                    tensors[f"{_POLICY}{name}/step"] = torch.tensor(float(self._updates))
        checkpoint.write(folder, tensors)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for kind, stage in self._stages.items():
            tensors |= {f"{kind}/{name}": part for name, part in self.by_name(stage, lambda p: p).items()}
            shapes |= {f"{kind}/{name}": tuple(p.shape) for name, p in self.model.named_parameters()}
        policy = {
            name.replace("weights/", _POLICY, 1): part
            for name, part in tensors.items()
            if self.trains and name.startswith("weights/")
        }
        found = checkpoint.read(folder, tensors, policy, shapes=shapes, weights_only=not self.trains)
        del policy

        def part(parameter: nn.Parameter, names: Sequence[str], read: dict[str, Tensor], key: str) -> Tensor:
            # What is copied leaves the memory at once.
            parts = [read.pop(key.format(name)).to_local() for name in names]  # type: ignore[attr-defined]
            return self._joined(parameter, names, parts)

        # Most parts share the memory of their parameter and have been read in place, but not those of a joined matrix.
        for kind, stage in self._stages.items():
            for parameter, names in names_of(stage, tied=stage.tied).values():
                parameter.copy_(part(parameter, names, tensors, f"{kind}/{{}}"))
        if self.trains:
            steps = [value for key, value in found.items() if key.startswith(_POLICY) and key.endswith("/step")]
            self._updates = int(steps[0]) if steps else 0
            self._adamw.state.clear()
            for parameter, names in names_of(self._stage, tied=self._stage.tied).values():
                if not self._updates or (share := self._share(parameter)) is None:
                    continue
                updated, own = share
                state: dict[str, Tensor] = {"step": torch.tensor(float(self._updates))}
                for key in _MOMENTS:
                    moment = part(parameter, names, found, f"{_POLICY}{{}}/{key}")
                    state[key] = moment.flatten()[own].view_as(updated).clone()
                self._adamw.state[updated] = state
        checkpoint.restore_random(found)

    @property
    def _stages(self) -> dict[str, Stage]:
        """The models in a checkpoint, by the start of their tensors' names."""
        reference = {"reference": self._reference} if self._reference is not None and self.trains else {}
        return {"weights": self._stage, **reference}

    @property
    def _adamw(self) -> torch.optim.Optimizer:
        return self._optimizer.chained_optimizers[0].optimizer

    def _share(self, parameter: nn.Parameter) -> tuple[Tensor, slice] | None:
        """Return the tensor that AdamW updates in this process for ``parameter``, and which of its elements it has.

        The distributed optimizer divides elements among the replicas; the result is None if this one has none.
        """
        if not self.settings.distributed_optimizer:
            return parameter, slice(0, parameter.numel())
        spread = self._optimizer.chained_optimizers[0]
        if parameter not in spread.model_param_group_index_map:
            return None
        group, number = spread.model_param_group_index_map[parameter]
        own = spread._get_model_param_range_map(parameter)["param"]
        return self._adamw.param_groups[group]["params"][number], slice(own.start, own.end)

    def _moment(self, key: str, parameter: nn.Parameter) -> Tensor:
        """Return a moment of AdamW with the shape of ``parameter``."""
        share = self._share(parameter)
        if not self.settings.distributed_optimizer:
            return self._adamw.state[parameter][key]
        moment = torch.zeros_like(parameter).detach().flatten()
        if share is not None:
            updated, own = share
            moment[own] = self._adamw.state[updated][key].flatten()
        dist.all_reduce(moment, group=self._stage_mesh.get_group("data"))
        return moment.view_as(parameter)


def _set_layout(tensor: int, pipeline: int) -> None:
    """Make Megatron-core's process groups, unless those of this layout exist."""
    if parallel_state.model_parallel_is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if sizes == (tensor, pipeline):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline)
    # With sequence parallelism, Megatron-core asks for random states of its own, which it keeps on a GPU. Nothing in a
    # pass is random, so it gets the kind that does nothing.
    initialize_rng_tracker(inference_rng_tracker=True)


def _transformer_config(
    config: Any, settings: LearnerSettings, dtype: torch.dtype, compute_dtype: torch.dtype
) -> TransformerConfig:
    """Return Megatron-core's settings for a model of transformers with the ``config``."""
    heads = config.num_attention_heads
    cast = compute_dtype != dtype
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=settings.tensor_parallel,
        pipeline_model_parallel_size=settings.pipeline_parallel,
        sequence_parallel=settings.tensor_parallel > 1,
        params_dtype=dtype,
        pipeline_dtype=compute_dtype,
        enable_autocast=cast,
        autocast_dtype=compute_dtype if cast else None,
        use_cpu_initialization=True,
        perform_initialization=True,  # otherwise parameters are not marked as divided among processes
        variable_seq_lengths=True,  # micro-batches differ in shape
        moe_token_dispatcher_type="alltoall",  # required by variable lengths, although there are no experts
        calculate_per_token_loss=True,  # gradients are sums over micro-batches and replicas
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


class Stage(GPTModel):
    """The layers of a pipeline stage, with the embedding on the first stage and the head on the last one."""

    frequencies: Tensor

    def __init__(self, config: TransformerConfig, model: Any) -> None:
        theirs = model.config
        spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = Attention
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
        layers = [spec] * (config.num_layers // config.pipeline_model_parallel_size)
        self.vocabulary = theirs.vocab_size
        # Not by the config: transformers does not tie embedding and head where they differ in the model's files.
        self.tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        self.vocabulary_part = math.ceil(theirs.vocab_size / config.tensor_model_parallel_size)
        super().__init__(
            config,
            TransformerBlockSubmodules(layers, Norm),
            vocab_size=self.vocabulary_part * config.tensor_model_parallel_size,
            max_sequence_length=theirs.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type="none",
        )
        for parameter in self.parameters():
            parameter.data = parameter.data.to(config.params_dtype)  # norms are made in float32
        if self.post_process:
            # The head gets the states of trained tokens, which `forward` has gathered.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1
        # The frequencies of transformers, because these depend on the config's scaling. Angles are always float32.
        self.register_buffer("frequencies", model.base_model.rotary_emb.inv_freq.detach().float(), persistent=False)

    def forward(self, micro: MicroBatch) -> Tensor:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return hidden states [L, B, H], or on the last stage logits [T, V / n] of the trained tokens.

        The logits are those of this process's part of the vocabulary. With tensor parallelism, the positions of hidden
        states are divided among the processes of the layer, so rows are padded to a multiple of their number.
        """
        length = micro.tokens.shape[1]
        padding = 0, -length % self.config.tensor_model_parallel_size
        positions = micro.packing.positions if micro.packing is not None else torch.arange(length)[None]
        positions = F.pad(positions, padding)
        angles = positions.to(self.frequencies.device).T[:, :, None, None] * self.frequencies  # [L, B or 1, 1, D / 2]
        hidden = self.decoder(
            hidden_states=self.embedding(F.pad(micro.tokens, padding), None) if self.pre_process else None,
            attention_mask=micro.packing,  # passed on to `Attention`
            rotary_pos_emb=torch.cat([angles, angles], -1),
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        states = hidden[:length].transpose(0, 1).flatten(0, 1).index_select(0, micro.index)
        head = self.shared_embedding_or_output_weight() if self.tied else None
        logits, _ = self.output_layer(states[:, None], weight=head)
        start = parallel_state.get_tensor_model_parallel_rank() * self.vocabulary_part
        return logits[:, 0, : self.vocabulary - start]  # without padding


class Norm(nn.RMSNorm):
    """The norm of a part of the positions. Megatron-core's own by torch refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        # Megatron-core adds up the gradients that the processes of a layer have for their positions.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(nn.Module):
    """Attention by torch, and for packed rows on a CPU by `gleanrl.learners.packed_attention`."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing | None, **_: Any) -> Tensor:
        """Return the output [L, B, heads * D].

        ``query`` is [L, B, heads, D], ``key`` and ``value`` are [L, B, KV heads, D].
        """
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        if packing is None:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            length = packing.positions.shape[1]
            out = attend(query[:, :, :length], key[:, :, :length], value[:, :, :length], packing)
            out = F.pad(out, (0, 0, 0, query.shape[2] - length))
        return out.permute(2, 0, 1, 3).flatten(2)
