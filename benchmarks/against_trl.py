"""Compares the time per training step of Glean RL and of TRL's `GRPOTrainer` on the same single-turn job, on a CPU.

    python benchmarks/against_trl.py [--runs 2] [--steps 8] [--threads 1] [--groups 16] [--group 8]

Requires `pip install 'gleanrl[benchmarks,reasoning-gym]'`. The job is GRPO on a tiny Qwen2 model that learns to spell
words backward (reasoning-gym), after a short warm start. Glean RL runs as in `gleanrl train`, with environment, run
folder, rollout files and metrics. Both libraries use the same initial weights, tokenizer, prompts in the same order
(which is checked for each step), rewards (from the environment), group size, temperature, token limit, AdamW, learning
rate, clipping and token-mean loss. There is no KL term and one update per step. Each run is a process of its own, and
runs of the two libraries alternate. The first steps of each run are not counted. The time of a step is the time from
the end of the previous step to its end.

TRL runs with the options that make it fastest here: key-value cache, fused AdamW, float32, no gradient checkpointing,
no padding to multiples, no logging, checkpoints or progress bar, no data loader processes, and no vLLM, because there
is no GPU. Several micro-batch sizes are tried for TRL (``--trl-rows``), and Glean RL is compared with the fastest one.

Wall-clock seconds depend on the other load of the machine. On a shared machine, use one thread and compare CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from gleanrl.config.settings import Config
from gleanrl.config.validate import check_sections
from gleanrl.curriculum.orders import TaskStream
from gleanrl.environments import load_taskset
from gleanrl.protocols import Metrics, Taskset
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.monitors import Console, RunInfo
from gleanrl.types import Message, Task
from gleanrl.utils.seeding import derive

START, GLEAN = "start", "gleanrl"
DEMONSTRATIONS, WARM_START_STEPS = 1000, 150  # enough for the model to solve some tasks but not all
ENVIRONMENT = {"name": "reasoning_gym", "options": {"task": "spell_backward"}}
QUIET_MACHINE = {
    "OMP_WAIT_POLICY": "PASSIVE",  # otherwise waiting threads spin and take CPU time from other processes
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Job:
    """The sizes and settings of the job. Each run reads them from a file."""

    groups: int  # groups per step
    group: int  # completions per group
    steps: int  # number of steps, warm-up included
    warm_up: int  # number of first steps that are not counted
    max_tokens: int
    lr: float
    threads: int
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.groups * self.group


@dataclass(frozen=True)
class Step:
    """Measurements of one training step."""

    ended: float  # time at the end of the step, in seconds of `perf_counter`
    cpu: float  # CPU seconds of the process from its start to the end of the step
    generating: float  # seconds of prefill and decoding
    prompt: int  # prompt tokens of all rows (a row is one completion)
    sampled: int  # sampled tokens of all rows
    trained: int  # sampled tokens that went through a backward pass
    reward: float  # mean reward of the rows
    tasks: tuple[str, ...]  # ids of the rows' tasks, sorted


# --- the job ------------------------------------------------------------------------------------
def configuration(job: Job, folder: Path) -> Config:
    """Return the configuration of Glean RL's run, which loads its model from ``folder``."""
    config = Config.model_validate(
        {
            "run": {"name": GLEAN, "folder": str(folder), "steps": job.steps, "threads": job.threads, "seed": job.seed},
            "environment": {**ENVIRONMENT, "train_tasks": job.groups * job.steps, "eval_tasks": 1},
            "model": {"init": str(folder / "model"), "device": "cpu"},
            "warm_start": {"enabled": False},
            "context": {"max_turns": 1, "max_tokens_per_turn": job.max_tokens},
            "schedule": {"preset": "sync", "batch": job.groups, "group": job.group},
            "learner": {"lr": job.lr},
            "evaluation": {"every": 0, "samples": 1, "greedy": False},
            "checkpoint": {"every": 0},
            "monitor": {"use": [f"{Path(__file__).resolve()}:StepClock"]},
        }
    )
    check_sections(config)
    return config


def prepare_start(job: Job, folder: Path) -> None:
    """Train the warm-started model, and write it and its tokenizer to ``folder``. All runs start from it."""
    import torch

    from gleanrl.learners.supervised import fine_tune
    from gleanrl.learners.tiny import build_model, build_tokenizer
    from gleanrl.runtime.prepare import Demonstration, save_model, supervised_examples

    torch.set_num_threads(job.threads)
    config = configuration(job, folder)
    taskset = load_taskset(config.environment, job.seed)
    assert taskset.has_expert
    shown = [taskset.demonstrate(task, seed=0)[0] for task in taskset.tasks("warm_start", DEMONSTRATIONS)]
    texts = [message["content"] for conversation in shown for message in conversation]
    tokenizer = build_tokenizer(texts, config.model.vocabulary)
    model = build_model(config.model, tokenizer, job.seed)
    examples = supervised_examples(config, tokenizer, [Demonstration(((messages, ()),)) for messages in shown])
    fine_tune(model, [example[:2] for example in examples], steps=WARM_START_STEPS, batch=32, lr=1e-3, seed=job.seed)
    save_model(folder / "model", model, tokenizer)


def planned(job: Job, config: Config) -> tuple[Taskset, list[Task]]:
    """Return the taskset, and the tasks of all steps in the order in which Glean RL uses them."""
    taskset = load_taskset(config.environment, job.seed)
    stream = TaskStream(taskset.tasks("train", config.environment.train_tasks), job.group, derive(job.seed, "tasks"))
    specs = asyncio.run(stream.propose(job.groups * job.steps))
    return taskset, [spec.task for spec in specs]


# --- Glean RL -----------------------------------------------------------------------------------
class StepClock:
    """A `Monitor` that writes the metrics of each step to a file, with the time and CPU seconds at its end."""

    def __init__(self, info: RunInfo) -> None:
        self._file = (info.folder.path / "clock.jsonl").open("w", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        if "time/step_s" in metrics:  # not in the metrics of an evaluation
            mark = {"at_step": step, "ended": time.perf_counter(), "cpu": time.process_time()}
            self._file.write(json.dumps({**mark, **metrics}) + "\n")

    def close(self) -> None:
        self._file.close()


def run_glean(job: Job, folder: Path) -> list[Step]:
    from gleanrl.runtime.local import run_training
    from gleanrl.tracking.monitors import load_monitors

    config = configuration(job, folder)
    run_training(config, resume=False, console=Console(), monitors=partial(load_monitors, config.monitor))
    run = RunFolder(config.path)
    rows = [json.loads(line) for line in (run.path / "clock.jsonl").read_text().splitlines()]
    return [
        Step(
            ended=row["ended"],
            cpu=row["cpu"],
            generating=row["time/prefill_s"] + row["time/decode_s"],
            prompt=int(row["tokens/context"]),
            sampled=int(row["tokens/sampled"]),
            trained=int(row["tokens/trained"]),
            reward=row["reward/mean"],
            tasks=tuple(sorted(record.trajectory.task_id for record in run.read_rollouts(row["at_step"]))),
        )
        for row in rows
    ]


# --- TRL ----------------------------------------------------------------------------------------
def run_trl(job: Job, folder: Path, rows: int) -> list[Step]:
    """Run the job with TRL. ``rows`` is the micro-batch size; gradients are accumulated to one update per step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(job.threads)
    config = configuration(job, folder)
    taskset, tasks = planned(job, config)
    data = Dataset.from_list([{"prompt": list(task.prompt), "number": number} for number, task in enumerate(tasks)])
    trainer, record = watched_trainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
        train_dataset=data,
        args=trl_settings(job, config, folder, rows),
        tasks=tasks,
        score=lambda batch, texts: asyncio.run(scores(taskset, batch, texts)),
    )
    trainer.train()
    return record


def trl_settings(job: Job, config: Config, folder: Path, rows: int, *, bfloat16: bool = False) -> Any:
    from trl.trainer.grpo_config import GRPOConfig

    learner, loss = config.learner, config.loss
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        seed=job.seed,
        max_steps=job.steps,
        num_generations=job.group,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=job.rows // rows,
        max_completion_length=job.max_tokens,
        temperature=config.sampler.temperature,
        shuffle_dataset=False,
        learning_rate=learner.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch_fused",
        adam_beta1=learner.betas[0],
        adam_beta2=learner.betas[1],
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens, like the default of Glean RL
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        scale_rewards="group",
        use_cpu=True,
        bf16=bfloat16,
        gradient_checkpointing=False,
        pad_to_multiple_of=None,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def watched_trainer(
    *, tasks: Sequence[Task], score: Callable[[Sequence[Task], Sequence[str]], list[float]], **options: Any
) -> tuple[Any, list[Step]]:
    """Return a `GRPOTrainer`, and a list to which it appends a `Step` after each training step."""
    from transformers import TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    record: list[Step] = []
    seen: dict[str, Any] = {}

    class Watched(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            answer = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            seen["generating"] = time.perf_counter() - started
            seen["prompt"] = sum(len(ids) for ids in prompt_ids)
            return answer

    def reward(completions: Any, completion_ids: Any, number: Sequence[int], **_: Any) -> list[float | None]:
        batch = [tasks[index] for index in number]
        values = score(batch, [messages[0]["content"] for messages in completions])
        sampled = sum(len(ids) for ids in completion_ids)
        seen.update(sampled=sampled, trained=sampled, reward=sum(values) / len(values))
        seen["tasks"] = tuple(sorted(task.id for task in batch))
        return list(values)

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            record.append(Step(ended=time.perf_counter(), cpu=time.process_time(), **seen))

    return Watched(reward_funcs=[reward], callbacks=[EndOfStep()], **options), record


async def scores(taskset: Taskset, tasks: Sequence[Task], texts: Sequence[str]) -> list[float]:
    """Return the environment's score of each answer."""

    async def one(task: Task, text: str) -> float:
        environment = taskset.environment(task)
        await environment.reset()
        answer = await environment.step(Message(role="assistant", content=text))
        await environment.close()
        assert answer.score is not None
        return answer.score.value

    return [await one(task, text) for task, text in zip(tasks, texts, strict=True)]


# --- running and comparing ----------------------------------------------------------------------
def child(way: str, folder: Path) -> None:
    """The entry point of a child process: prepare the model, or run one library and write its steps to a file."""
    job = Job(**json.loads((folder / "job.json").read_text()))
    if way == START:
        return prepare_start(job, folder)
    steps = run_glean(job, folder) if way == GLEAN else run_trl(job, folder, int(way.removeprefix("trl-")))
    (folder / "steps.json").write_text(json.dumps([asdict(step) for step in steps]))


def launch(way: str, job: Job, folder: Path) -> None:
    """Run `child` in a new process and wait until it ends."""
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    command = [sys.executable, str(Path(__file__).resolve()), "--child", way, "--folder", str(folder)]
    environment = {**os.environ, **QUIET_MACHINE, "OMP_NUM_THREADS": str(job.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr[-4000:]}")


def measured(way: str, job: Job, start: Path) -> list[Step]:
    """Run the job once in a temporary folder and return its steps."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model").symlink_to(start / "model")
        launch(way, job, folder)
        rows = json.loads((folder / "steps.json").read_text())
    return [Step(**{**row, "tasks": tuple(row["tasks"])}) for row in rows]


def require_same_work(runs: Mapping[str, Sequence[Sequence[Step]]]) -> None:
    """Exit with an error unless all runs had the same tasks and numbers of prompt tokens in each step."""
    seen = {tuple((step.prompt, step.tasks) for step in run) for way in runs.values() for run in way}
    if len(seen) != 1:
        sys.exit("the runs did not do the same work: tasks or prompt tokens differ")


def counted(run: Sequence[Step], warm_up: int) -> list[dict[str, float]]:
    """Return the measurements to compare, for each step after the warm-up."""
    return [
        {
            "seconds": step.ended - before.ended,
            "cpu seconds": step.cpu - before.cpu,
            "generating": step.generating,
            "the rest": step.ended - before.ended - step.generating,
            "sampled": step.sampled,
            "sampled/s": step.sampled / (step.ended - before.ended),
            "trained/s": step.trained / (step.ended - before.ended),
        }
        for before, step in zip(run[warm_up - 1 :], run[warm_up:], strict=False)
    ]


def show(runs: Mapping[str, Sequence[Sequence[Step]]], job: Job) -> None:
    figures = {way: [row for run in all_runs for row in counted(run, job.warm_up)] for way, all_runs in runs.items()}
    medians = {way: {name: median(row[name] for row in rows) for name in rows[0]} for way, rows in figures.items()}
    names = list(medians[GLEAN])
    print(f"{'medians per step':16}" + "".join(f"{name:>13}" for name in names) + f"{'reward':>17}")
    for way, row in medians.items():
        rewards = [[median(run[at].reward for run in runs[way])] for at in (0, -1)]
        cells = "".join(f"{row[name]:13.3f}" if row[name] < 100 else f"{row[name]:13.0f}" for name in names)
        print(f"{way:16}{cells}{rewards[0][0]:9.2f} ->{rewards[1][0]:5.2f}")
    for name in ("seconds", "cpu seconds"):
        best = min((way for way in medians if way != GLEAN), key=lambda way: medians[way][name])
        each = [median(row[name] for row in counted(run, job.warm_up)) for run in runs[GLEAN]]
        other = [median(row[name] for row in counted(run, job.warm_up)) for run in runs[best]]
        print(
            f"{name}: {best} takes {medians[best][name] / medians[GLEAN][name]:.2f} times as long as {GLEAN} "
            f"({min(other) / max(each):.2f} to {max(other) / min(each):.2f} between single runs)"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of each run")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the counted ones")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, default=16, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="answers per prompt")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--trl-rows", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return child(options.child, options.folder)
    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: pip install 'gleanrl[benchmarks]'")
    o = options
    job = Job(o.groups, o.group, o.warm_up + o.steps, o.warm_up, o.max_tokens, o.lr, o.threads)
    runs: dict[str, list[list[Step]]] = {way: [] for way in (GLEAN, *(f"trl-{rows}" for rows in o.trl_rows))}
    with tempfile.TemporaryDirectory() as temporary:
        launch(START, job, Path(temporary))
        for _ in range(o.runs):
            for way, done in runs.items():
                done.append(measured(way, job, Path(temporary)))
    require_same_work(runs)
    prompt = runs[GLEAN][0][0].prompt / job.rows
    print(
        f"{job.groups} prompts of about {prompt:.0f} tokens, {job.group} answers each of at most {job.max_tokens} "
        f"tokens, {job.threads} thread(s); {o.runs} runs of {o.steps} steps after {o.warm_up}"
    )
    show(runs, job)


if __name__ == "__main__":
    main()
