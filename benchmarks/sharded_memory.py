"""Measures the memory that each rank of a learner needs to load a model and to publish its weights.

    python benchmarks/sharded_memory.py [--model DIRECTORY] [--layouts fsdp tensor pipeline] [--bucket 256]
    python benchmarks/sharded_memory.py [--model DIRECTORY] [--layouts one fsdp tensor pipeline] --resume
    python benchmarks/sharded_memory.py [--model DIRECTORY] --adapters 8

With ``--resume`` it prints the memory that each rank needs to load the model and then a checkpoint, which has AdamW's
moments.
With ``--adapters RANK`` it prints the bytes of a publication on Ray, with merged weights and with LoRA adapters of this
rank. It then prints what a sampler in bfloat16 gets of adapters after some updates at a learning rate of 1e-4, each of
which moves every weight of the adapters by the learning rate in the same direction, which is about the most that AdamW
does: how many of the adapted weights are those of the base model, and which part of the change arrives (the projection
of the change that the sampler has on that of the learner).

DIRECTORY is a Hugging Face model whose files are in float32 or bfloat16; by default, a model that has the sizes of
SmolLM2-135M and random weights in bfloat16. Megatron-core is needed for the layouts "tensor" (three ranks, because the
model has nine heads) and "pipeline" (two ranks, as "fsdp"); without it they are left out, unless ``--layouts`` names
them.

For each rank and phase, the table has the growth of private memory at its peak: anonymous and shared pages (RssAnon +
RssShmem), without pages of mapped files, which the system drops when memory is short. They are read every millisecond.

* load, whole: rank 0 first loads the model in float32 (``mapped=False``), as for a model that does not come from files.
* load, mapped: each tensor is read from its file when it is placed.
* held: what of this stays, that is the rank's share of the weights, the buffers for gradients, and what the C library
  keeps.
* publish, at once: all weights are gathered in float32 before the sampler copies them.
* publish, buckets: they are gathered in buckets of ``--bucket`` MiB.
* resume: the model is loaded and then the checkpoint, which one process has written.

The sampler's copy exists before its weights are published and is not counted.

Every way of loading runs in processes of its own. It is checked that published weights equal the files bit for bit. The
last column is the median difference between the log-probs of 199 random tokens and those of one process. (Float32
itself can be off by a thousandth at single tokens that are so improbable.)
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from gleanrl.algorithms.batch import unscored_sample
from gleanrl.config.settings import Config, LearnerSettings, LossSettings, ModelSettings
from gleanrl.learners.distributed import sharded
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.engine import LocalEngine
from gleanrl.learners.freed_memory import return_freed_memory
from gleanrl.learners.models import load_model
from gleanrl.learners.tiny import build_tokenizer
from gleanrl.runtime.ray.weights import sent
from gleanrl.runtime.sharded import learner_ranks
from gleanrl.utils import weights
from gleanrl.utils.weights import AdaptedWeights, layout_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp": {"ranks": 2},
    "tensor": {"backend": "megatron", "ranks": 3, "tensor_parallel": 3},
    "pipeline": {"backend": "megatron", "ranks": 2, "pipeline_parallel": 2},
}


class Peak:
    """Reads this process's private memory until `stop`."""

    def __init__(self) -> None:
        gc.collect()
        return_freed_memory()
        self._first = self._peak = private()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._stopped.wait(0.001):
            self._peak = max(self._peak, private())

    def stop(self) -> tuple[float, float]:
        """Return the growth at the peak and at the end, in MB."""
        self._stopped.set()
        self._thread.join()
        gc.collect()
        return_freed_memory()
        return (max(self._peak, private()) - self._first) / 1e6, (private() - self._first) / 1e6


def private() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024


def make(ranks: Ranks, *args: Any, **options: Any) -> Any:
    """Make a rank's engine, whose memory can be measured in all ranks."""
    peak = Peak() if ranks.rank else None
    engine: Any = sharded.make_local(ranks, *args, **options)
    found = [peak.stop() if peak is not None else None]

    def begin() -> None:
        found.append(Peak())

    def end() -> list[tuple[float, float]]:
        found[-1] = found[-1].stop()
        return ranks.gather(found[-1])

    engine.begin, engine.end, engine.loaded = begin, end, lambda: ranks.gather(found[0])
    return engine


def one(model: Path, layout: str, bucket: int, *, mapped: bool) -> None:
    """Print the growth of each rank's memory, in MB."""
    import sharded_memory  # the other ranks import this file under this name

    weights.BUCKET = bucket << 20
    config = Config.model_validate({"learner": LAYOUTS[layout], "model": {"device": "cpu"}, "run": {"threads": 1}})
    with learner_ranks(config) as ranks:
        assert ranks is not None
        peak = Peak()
        given = ModelSettings(init=str(model), max_context=512, device="cpu")
        loaded, _ = load_model(given, mapped=mapped)
        own = config.learner, LossSettings()
        engine = sharded.ShardedEngine(ranks, loaded, *own, pad_token=0, temperature=1.0, make=sharded_memory.make)
        del loaded
        difference = 0.0
        rows = [[peak.stop(), *engine._everywhere("loaded")[1:]]]
        if mapped:
            expected = dict(load_model(given, mapped=True)[0].named_parameters())
            copy = {name: torch.zeros(each.shape) for name, each in engine.weights().layout.items()}
            for at_once in (True, False):
                engine._everywhere("begin")
                found = dict(engine.weights().items()) if at_once else engine.weights()
                assert layout_of(found).keys() == expected.keys()
                for name, tensor in found.items():
                    copy[name].copy_(tensor)
                del found
                rows.append(engine._everywhere("end"))
                assert all(torch.equal(copy[name], tensor) for name, tensor in expected.items())
            tokens = np.random.default_rng(0).integers(0, len(copy["model.embed_tokens.weight"]), 200).astype(np.int32)
            sample = unscored_sample(tokens, np.arange(tokens.size) > 0)
            alone = LocalEngine(load_model(given)[0], LearnerSettings(), LossSettings(), pad_token=0, temperature=1.0)
            scores = [each.score([sample])[0].logprobs for each in (engine, alone)]
            difference = float(np.median(np.abs(scores[0] - scores[1])[1:]))
        for number in range(ranks.count):
            load, *published = (row[number] for row in rows)
            figures = [f"{figure:.0f}" for figure in (load[0], load[1], *(each[0] for each in published))]
            print(*figures, f"{difference:.1e}")


def write_checkpoint(model: Path, folder: Path) -> None:
    """Write a checkpoint with AdamW's moments, from one process."""
    loaded, _ = load_model(ModelSettings(init=str(model), max_context=512, device="cpu"))
    engine = LocalEngine(loaded, LearnerSettings(), LossSettings(), pad_token=0, temperature=1.0)
    engine.step(1.0, 0.0)  # makes the moments
    engine.save(folder)


def resume(model: Path, layout: str, folder: Path) -> None:
    """Print how much each rank's memory grows while it loads model and checkpoint, at the peak and at the end."""
    import sharded_memory  # the other ranks import this file under this name

    config = Config.model_validate({"learner": LAYOUTS[layout], "model": {"device": "cpu"}, "run": {"threads": 1}})
    with learner_ranks(config) as ranks:
        given = ModelSettings(init=str(model), max_context=512, device="cpu")
        options = {"pad_token": 0, "temperature": 1.0}
        peak = Peak()
        loaded, _ = load_model(given, mapped=ranks is not None)
        if ranks is None:
            engine: Any = LocalEngine(loaded, config.learner, LossSettings(), **options)
            engine.load(folder)
            found = [peak.stop()]
        else:
            engine = sharded.ShardedEngine(
                ranks, loaded, config.learner, LossSettings(), **options, make=sharded_memory.make_and_wait
            )
            engine.load(folder)
            found = [peak.stop(), *engine._everywhere("end")[1:]]
        for most, stays in found:
            print(f"{most:.0f} {stays:.0f}")


def make_and_wait(ranks: Ranks, *args: Any, **options: Any) -> Any:
    """Make a rank's engine; its memory is measured until `end` is called in all ranks."""
    peak = Peak()
    engine: Any = sharded.make_local(ranks, *args, **options)
    engine.end = lambda: ranks.gather(peak.stop() if ranks.rank else None)
    if not ranks.rank:
        peak.stop()
    return engine


def publication(model: Path, rank: int) -> None:
    """Print the bytes that each publication sends to the samplers in float32, and what a sampler in bfloat16 gets."""
    loaded, _ = load_model(ModelSettings(init=str(model), max_context=512, device="cpu"))
    engine = LocalEngine(loaded, LearnerSettings(lora_rank=rank), LossSettings(), pad_token=0, temperature=1.0)
    published = engine.weights()
    for name, each in {"merged": published.layout, f"adapters of rank {rank}": layout_of(sent(published))}.items():
        print(f"{name}: {sum(tensor.size for tensor in each.values()) / 1e6:.1f} MB")
    torch.manual_seed(0)
    directions = [torch.randn_like(parameter) for parameter in engine.backend.parameters]
    half = torch.bfloat16
    base = {name: tensor.float() for name, tensor in engine.weights().base.items()}
    print("| updates | merged weights that stay | of the change arrives, merged | with adapters |")
    print("|---|---|---|---|")
    for update in range(1, 101):
        for parameter, direction in zip(engine.backend.parameters, directions, strict=True):
            parameter.grad = direction.clone()
        engine.step(1.0, 1e-4)
        if update not in (1, 3, 10, 30, 100):
            continue
        wanted, merged = engine.weights(), engine.weights(half)
        rounded = {name: tensor.to(half).float() for name, tensor in wanted.adapters.items()}
        applied = AdaptedWeights(wanted.base, rounded, wanted.scale)
        count = stay = square = from_merged = from_adapters = 0.0
        for name, tensor in wanted.items():
            change = tensor - base[name]
            if not change.any():
                continue
            count += change.numel()
            stay += int((merged[name] == base[name].to(half)).sum())
            square += float(change.pow(2).sum())
            from_merged += float((change * (merged[name].float() - base[name].to(half).float())).sum())
            from_adapters += float((change * (applied[name] - base[name])).sum())
        shares = stay / count, from_merged / square, from_adapters / square
        print(f"| {update} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |", flush=True)


def random_model(folder: Path) -> Path:
    """Write a model with the sizes of SmolLM2-135M in bfloat16."""
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).bfloat16().save_pretrained(folder)
    build_tokenizer(["a text"], 512).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS)
    parser.add_argument("--bucket", type=int, default=256)
    parser.add_argument("--adapters", type=int, metavar="RANK")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "one" in (args.layouts or ()) and not args.resume:
        parser.error("the layout 'one' is measured with --resume only")
    if args.one is not None and args.resume:
        resume(args.model, args.layouts[0], Path(args.one))
        return
    if args.one is not None:
        one(args.model, args.layouts[0], args.bucket, mapped=args.one == "mapped")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(Path(folder))
        if args.adapters:
            publication(model, args.adapters)
            return
        layouts = args.layouts or installed(list(LAYOUTS) if args.resume else list(LAYOUTS)[1:])
        dtype = AutoConfig.from_pretrained(model).dtype
        if args.resume:
            write_checkpoint(model, Path(folder) / "checkpoint")
            print(f"{model}, {dtype}; growth of private memory in MB")
            print("| layout | rank | resume | of which stay |")
            print("|---|---|---|---|")
            for layout in layouts:
                rows = run(model, layout, args.bucket, str(Path(folder) / "checkpoint"), "--resume")
                for rank, row in enumerate(rows):
                    print(f"| {layout} | {rank} | {' | '.join(row)} |", flush=True)
            return
        print(f"{model}, {dtype}, buckets of {args.bucket} MiB; growth of private memory in MB")
        print("| layout | rank | load, whole | load, mapped | held | publish, at once | publish, buckets | log-probs |")
        print("|---|---|---|---|---|---|---|---|")
        for layout in layouts:
            whole, mapped = (run(model, layout, args.bucket, way) for way in ("whole", "mapped"))
            for rank, (before, now) in enumerate(zip(whole, mapped, strict=True)):
                print(f"| {layout} | {rank} | {before[0]} | {' | '.join(now)} |", flush=True)


def installed(layouts: list[str]) -> list[str]:
    """Leave out the layouts that need Megatron-core if it is not installed, and say so."""
    if importlib.util.find_spec("megatron") is not None:
        return layouts
    left_out = [layout for layout in layouts if LAYOUTS[layout].get("backend") == "megatron"]
    print(f"without Megatron-core, which is not installed: {', '.join(left_out)} left out (see: make megatron)")
    return [layout for layout in layouts if layout not in left_out]


def run(model: Path, layout: str, bucket: int, way: str, *more: str) -> list[list[str]]:
    options = ["--model", str(model), "--layouts", layout, "--bucket", str(bucket), "--one", way, *more]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, *options]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=True
    )
    return [line.split() for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main()
