"""Compares the learner with the machine's own matrix product, on a real language model.

    python benchmarks/real_model.py peak --model DIR [--threads 1] [--dtypes float32 bfloat16]
    python benchmarks/real_model.py learner --model DIR [--dtypes float32 bfloat16] [--batches turns households]
                                            [--lora 0 16] [--rounds 3]

``DIR`` is a Hugging Face model directory or a name on the Hub; the figures in the docs are of SmolLM2-135M-Instruct.
``learner`` needs `pip install 'gleanrl[benchmarks,lora,alfworld]'`. With bfloat16, all contestants keep float32 weights
and compute by autocast.

``peak`` measures matrix products at the shapes of the model's linear layers: the product of a forward pass and the two
of a backward pass, with as many rows as a micro-batch has tokens, and the product of a forward pass with 32 rows, as in
a decoding step of a sampler. Times are CPU seconds of the process, and each figure is a median.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gleanrl.algorithms.batch import Batch, build
from gleanrl.config.settings import CreditSettings, LearnerSettings, LossSettings
from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.learners.engine import CPU_TOKENS_PER_MICROBATCH
from gleanrl.learners.models import add_adapters
from gleanrl.learners.torch import TorchLearner
from gleanrl.rollout.renderer import Renderer
from gleanrl.types import Group, GroupSpec, IntArray, Score, Segment, StopReason, Task, Trajectory, Turn
from learner import plain_update

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DECODING_ROWS = 32
HEAD_ROWS = 512  # most rows of a product with more outputs than `WIDE`, so that its result takes 100 MB and not 400
WIDE = 16384
TURNS = 12  # most turns of a household's episode
LOSS = LossSettings(dual_clip=None)  # the plain loop and TRL clip on one side
T = TypeVar("T")
Update = Callable[[Batch], float]  # makes an update on a batch and returns the gradient norm


# --- the machine's matrix product ---------------------------------------------------------------
@dataclass(frozen=True)
class Peak:
    """FLOP per CPU second of the matrix products of a model's linear layers."""

    forward: float  # outputs = inputs @ weight.T
    input_gradient: float  # gradient of the outputs @ weight
    weight_gradient: float  # gradient of the outputs, transposed, @ inputs

    @property
    def training(self) -> float:
        """FLOP per CPU second of all three, which have the same number of FLOP each."""
        return 3 / (1 / self.forward + 1 / self.input_gradient + 1 / self.weight_gradient)

    @property
    def frozen(self) -> float:
        """FLOP per CPU second of a forward pass and of the gradient of the inputs, as in training of adapters."""
        return 2 / (1 / self.forward + 1 / self.input_gradient)


def layer_shapes(config: Any) -> Counter[tuple[int, int]]:
    """Return how many linear layers of a model have each shape (outputs, inputs), its head included."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return Counter((module.out_features, module.in_features) for module in linear)


@torch.no_grad()
def peak(config: Any, rows: int, dtype: torch.dtype = torch.float32, repeats: int = 5, *, train: bool = True) -> Peak:
    """Measure the matrix products of a model's linear layers with ``rows`` rows, in CPU seconds of this process.

    The time of each shape is a median over ``repeats``, and counts as often as the model has layers of this shape.

    Args:
        config: the model's configuration (transformers).
        train: whether to measure the products of a backward pass too; without them, their rates are infinite.
    """
    work, seconds = 0.0, [0.0, 0.0, 0.0]
    for (outputs, inputs), layers in layer_shapes(config).items():
        used = min(rows, HEAD_ROWS) if outputs > WIDE else rows
        x, weight, y = (torch.randn(shape).to(dtype) for shape in ((used, inputs), (outputs, inputs), (used, outputs)))
        to_x, to_weight = torch.empty_like(x), torch.empty_like(weight)
        products = [(x, weight.t(), y), (y, weight, to_x), (y.t(), x, to_weight)]
        work += 2 * layers * outputs * inputs
        for which, (left, right, out) in enumerate(products[: 3 if train else 1]):
            seconds[which] += layers * _median_seconds(left, right, out, repeats) / used
    return Peak(*(work / taken if taken else float("inf") for taken in seconds))


def _median_seconds(left: Tensor, right: Tensor, out: Tensor, repeats: int) -> float:
    """Return the CPU seconds of a product. A short one is repeated, because the clock has a resolution."""
    times, flop = [], 2 * left.shape[0] * left.shape[1] * right.shape[1]
    count = max(1, round(2e8 / flop))
    torch.mm(left, right, out=out)
    for _ in range(repeats):
        started = time.process_time()
        for _ in range(count):
            torch.mm(left, right, out=out)
        times.append((time.process_time() - started) / count)
    return statistics.median(times)


def show_peak(config: Any, dtypes: Sequence[str], repeats: int) -> None:
    print(f"{'GFLOP per CPU second':24} {'forward':>9} {'to inputs':>10} {'to weights':>11} {'together':>9}")
    for name in dtypes:
        dtype = getattr(torch, name)
        for rows, train in ((CPU_TOKENS_PER_MICROBATCH, True), (DECODING_ROWS, False)):
            seen = peak(config, rows, dtype, repeats, train=train)
            cells = f"{seen.forward / 1e9:9.1f}"
            if train:
                cells += f" {seen.input_gradient / 1e9:10.1f} {seen.weight_gradient / 1e9:11.1f}"
                cells += f" {seen.training / 1e9:9.1f}"
            print(f"{f'{name}, {rows} rows':24} {cells}")


# --- batches ------------------------------------------------------------------------------------
def turns_batch(tokenizer: Any) -> list[Group]:
    """Make two groups of four random conversations of 232 tokens, of which 64 are sampled."""
    random, size = np.random.default_rng(0), len(tokenizer)

    def turn(role: str, tokens: IntArray) -> Turn:
        logprobs = np.zeros(tokens.size, np.float32) if role == "assistant" else None
        return Turn({"role": role, "content": ""}, tokens, logprobs, -1 if logprobs is None else 0)

    groups = []
    for index in range(2):
        prompt = random.integers(0, size, 62)
        members = []
        for _ in range(4):
            segment = [turn("system", prompt)]
            for number in range(8):
                segment.append(turn("user", random.integers(0, size, 13 if number < 7 else 15)))
                segment.append(turn("assistant", random.integers(0, size, 8)))
            members.append(tuple(segment))
        groups.append(as_group(index, members))
    return groups


def households_batch(tokenizer: Any) -> list[Group]:
    """Play four episodes of at most `TURNS` turns in each of four generated households."""
    taskset, renderer = AlfworldTaskset(), Renderer(tokenizer)
    groups = []
    for index, task in enumerate(taskset.tasks("train", 4)):
        shown = [taskset.demonstrate(task, seed=member, noise=0.5)[0] for member in range(4)]
        members = []
        for messages in shown:
            answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
            members.append(renderer.demonstration(messages[: answers[:TURNS][-1] + 1]))
        groups.append(as_group(index, members))
    return groups


def as_group(index: int, segments: Sequence[Segment]) -> Group:
    """Make a group of trajectories of one segment each, of which every other one is solved."""
    task = Task(f"task-{index}")
    members = tuple(
        Trajectory(f"{task.id}/{member}", task.id, (segment,), Score(float(member % 2)), StopReason.DONE)
        for member, segment in enumerate(segments)
    )
    return Group(GroupSpec(task, len(members)), members, index)


# --- one update by each contestant ---------------------------------------------------------------
@dataclass(frozen=True)
class Job:
    """What one process measures."""

    model: str
    batch: str
    rank: int  # of LoRA adapters; 0 for all weights
    way: str  # one of `WAYS`
    rows: int = 0  # rows of a micro-batch, where the way needs it
    threads: int = 1
    dtype: str = "float32"  # of forward passes; weights are float32

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", getattr(torch, self.dtype), enabled=self.dtype != "float32")


def make_batch(job: Job) -> Batch:
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    groups = {"turns": turns_batch, "households": households_batch}[job.batch](tokenizer)
    return build(groups, CreditSettings(), LOSS, max_length=8192)


def recorded(batch: Batch, logprobs: Sequence[np.ndarray]) -> Batch:
    """Return the batch with these log-probs as those recorded at sampling."""
    known = iter(logprobs)
    return Batch(
        tuple(replace(p, samples=tuple(replace(s, behaviour=next(known)) for s in p.samples)) for p in batch.parts)
    )


def make_learner(job: Job, groups: int) -> TorchLearner:
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    settings = LearnerSettings(lr=1e-6, lora_rank=job.rank)
    sizes = {"total_steps": 100, "groups_per_step": groups}
    dtype = getattr(torch, job.dtype)
    return TorchLearner(model, settings, LOSS, **sizes, pad_token=0, temperature=1.0, compute_dtype=dtype)


def score(job: Job) -> tuple[float, list[np.ndarray]]:
    """Return the CPU seconds in which the learner computes log-probs of a batch, and the log-probs of its samples."""
    torch.set_num_threads(job.threads)
    batch = make_batch(job)
    learner = make_learner(job, batch.groups)
    started = time.process_time()
    scores = asyncio.run(learner.logprobs(batch.samples))
    return time.process_time() - started, [row.logprobs for row in scores]


def measure(job: Job, logprobs: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the CPU seconds and the gradient norm of one update. A first one, of the same batch, is not counted."""
    torch.set_num_threads(job.threads)
    batch = recorded(make_batch(job), logprobs)
    warm_up, update = WAYS[job.way](job, batch)
    warm_up(batch)
    started = time.process_time()
    norm = update(batch)
    return time.process_time() - started, norm


def by_gleanrl(job: Job, batch: Batch) -> tuple[Update, Update]:
    learner = make_learner(job, batch.groups)

    def warm_up(batch: Batch) -> float:  # by the engine, because the learner counts groups
        seen = learner.engine.backward(batch.samples)
        return learner.engine.step(seen.trained, 1e-6)

    return warm_up, lambda batch: asyncio.run(learner.update(batch))["learner/grad_norm"]


def by_loop(job: Job, batch: Batch) -> tuple[Update, Update]:
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    if job.rank:
        model = add_adapters(model, LearnerSettings(lora_rank=job.rank), seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def update(batch: Batch) -> float:
        with job.autocast():
            return plain_update(model, optimizer, batch, job.rows, True, LOSS)

    return update, update


def by_trl(job: Job, batch: Batch) -> tuple[Update, Update]:
    from datasets import Dataset
    from trl.trainer.grpo_trainer import GRPOTrainer

    from against_trl import Job as TrlJob
    from against_trl import configuration, trl_settings

    count = len(batch.samples)
    sizes = TrlJob(count // 4, 4, steps=1, warm_up=0, max_tokens=512, lr=1e-6, threads=job.threads)
    folder = Path(tempfile.mkdtemp())
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    if job.rank:
        model = add_adapters(model, LearnerSettings(lora_rank=job.rank), seed=0)
    trainer: Any = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(job.model),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=Dataset.from_list([{"prompt": "a"}] * count),
        args=trl_settings(sizes, configuration(sizes, folder), folder, job.rows, bfloat16=job.dtype == "bfloat16"),
    )
    trainer.create_optimizer()
    model = trainer.accelerator.prepare(trainer.model).train()

    def update(batch: Batch) -> float:
        inputs = trl_inputs(batch)
        count = len(batch.samples)
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = -(-count // job.rows)
        for start in range(0, count, job.rows):
            part = {name: x[start : start + job.rows] if x.ndim else x for name, x in inputs.items()}
            trainer.accelerator.backward(trainer._compute_loss(model, part))
        norm = trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return float(norm)

    return update, update


def trl_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors that TRL's trainer makes of a batch: prompts padded on the left, completions on the right."""
    starts = [int(sample.mask.argmax()) for sample in batch.samples]
    before = max(starts)
    after = max(sample.tokens.size - start for sample, start in zip(batch.samples, starts, strict=True))
    columns: dict[str, list[np.ndarray]] = {}
    for sample, start in zip(batch.samples, starts, strict=True):
        left, right = (before - start, 0), (0, after - (sample.tokens.size - start))
        row = {
            "prompt_ids": np.pad(sample.tokens[:start].astype(np.int64), left),
            "prompt_mask": np.pad(np.ones(start, np.int64), left),
            "completion_ids": np.pad(sample.tokens[start:].astype(np.int64), right),
            "completion_mask": np.pad(np.ones(sample.tokens.size - start, np.int64), right),
            "tool_mask": np.pad(sample.mask[start:].astype(np.int64), right),
            "old_per_token_logps": np.pad(sample.behaviour[start:], right),
            "advantages": sample.advantages[sample.mask][0],
        }
        for name, values in row.items():
            columns.setdefault(name, []).append(values)
    inputs = {name: torch.from_numpy(np.stack(rows)) for name, rows in columns.items()}
    return inputs | {"num_items_in_batch": inputs["tool_mask"].sum()}


WAYS: dict[str, Callable[[Job, Batch], tuple[Update, Update]]] = {
    "gleanrl": by_gleanrl,
    "plain loop": by_loop,
    "TRL": by_trl,
}


def useful_flop(config: Any, batch: Batch, rank: int) -> float:
    """Return the FLOP of the linear layers in an update, without sharing and without padding."""
    shapes = layer_shapes(config)
    head = max(outputs for outputs, _ in shapes)
    body = sum(count * outputs * inputs for (outputs, inputs), count in shapes.items() if outputs != head)
    adapters = sum(count * rank * (outputs + inputs) for (outputs, inputs), count in shapes.items() if outputs != head)
    tokens = sum(sample.tokens.size - 1 for sample in batch.samples)
    trained = sum(int(sample.mask.sum()) for sample in batch.samples)
    # An update computes the outputs, the gradient of the inputs and, of trained weights, the gradient of the weights.
    products = 2 if rank else 3
    return 2.0 * (products * (body * tokens + head * config.hidden_size * trained) + 3 * adapters * tokens)


def show_learner(options: argparse.Namespace, config: Any) -> None:
    for name in options.batches:
        job = Job(options.model, name, 0, "gleanrl", threads=options.threads)
        batch = make_batch(job)
        sizes = [sample.tokens.size for sample in batch.samples]
        trained = sum(int(sample.mask.sum()) for sample in batch.samples)
        print(
            f"{name}: {len(sizes)} samples of {min(sizes)} to {max(sizes)} tokens, {sum(sizes)} in all, "
            f"{trained} trained"
        )
        for dtype, rank in itertools.product(options.dtypes, options.lora):
            job = replace(job, dtype=dtype, rank=rank)
            seconds, logprobs = apart(score, job)
            others = [(way, rows) for way in options.against for rows in options.rows]
            jobs = [job, *(replace(job, way=way, rows=rows) for way, rows in others)]
            runs: dict[Job, list[tuple[float, float]]] = {job: [] for job in jobs}
            rates = []
            for _ in range(options.rounds):
                products = peak(config, CPU_TOKENS_PER_MICROBATCH, getattr(torch, dtype), repeats=2)
                rates.append(products.frozen if rank else products.training)
                for each, seen in runs.items():
                    seen.append(apart(measure, each, logprobs))
            rate = statistics.median(rates)
            ours = statistics.median(seconds for seconds, _ in runs[job])
            weights = f"LoRA {rank}" if rank else "all weights"
            print(
                f"  {dtype}, {weights}; product {rate / 1e9:.1f} GFLOP per CPU second; "
                f"log-probs of the batch {seconds:.1f} CPU s"
            )
            for each, seen in runs.items():
                median = statistics.median(seconds for seconds, _ in seen)
                way = each.way + (f", {each.rows} rows" if each.rows else "")
                share = useful_flop(config, batch, rank) / median / rate
                print(
                    f"    {way:22} {median:7.1f} CPU s {share:6.0%} of the product {median / ours:6.2f} x gleanrl"
                    f"   norm {seen[0][1]:.5f}   {[round(seconds, 1) for seconds, _ in seen]}",
                    flush=True,
                )


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new process, so that no contestant finds memory that another has left."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("peak", "learner"))
    parser.add_argument("--model", default=MODEL, help=f"directory or name on the Hub (default {MODEL})")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", nargs="+", choices=("turns", "households"), default=["turns", "households"])
    parser.add_argument("--lora", type=int, nargs="+", default=[0, 16], help="ranks of adapters; 0 for all weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8], help="of micro-batches of the others")
    parser.add_argument("--against", nargs="*", choices=list(WAYS)[1:], default=list(WAYS)[1:])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    config = AutoConfig.from_pretrained(options.model)
    if options.part == "peak":
        show_peak(config, options.dtypes, options.rounds)
    else:
        show_learner(options, config)


if __name__ == "__main__":
    main()
