"""Makes a run folder with synthetic metrics, timeline and trajectories, for tests of the report.

The files are written by the same classes as in a real run, so that they have the same format.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from unittest.mock import patch

import numpy as np

from gleanrl.runtime.records import group_records, write_rollouts
from gleanrl.runtime.run_folder import RunFolder, RunInfo
from gleanrl.schedule.timeline import Timeline
from gleanrl.tracking.monitors.file import FileMonitor
from gleanrl.types import Group, GroupSpec, Message, Score, StopReason, Task, Trajectory, Turn

CONFIG = """\
[run]
name = "quickstart"
seed = 7
steps = 60

[environment]
name = "alfworld"
train_tasks = 256
[environment.options]
goals = ["put"]
receptacles = [5, 6]

[model]
init = "tiny"
hidden_size = 128

[schedule]
preset = "pipelined"
batch = 16
group = 8

[loss]
name = "ppo"
clip_low = 0.2
clip_high = 0.28
"""
PLACES = ["fridge 1", "cabinet 1", "cabinet 2", "countertop 1", "drawer 1", "sinkbasin 1"]
THINGS = ["mug 1", "apple 1", "knife 2", "soapbottle 1"]
PIECES = re.compile(r"<\|\w+\|>|[a-z]+ \d+|\w+|[^\w<]|<")


class Words:
    """A word-level tokenizer that gives each new word the next id. It can be saved as ``tokenizer.json``."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<|unk|>": 0}

    def __call__(self, text: str) -> np.ndarray:
        return np.array([self.ids.setdefault(piece, len(self.ids)) for piece in PIECES.findall(text)], np.int32)

    def save(self, folder: Path) -> None:
        from tokenizers import Tokenizer, decoders, models

        tokenizer = Tokenizer(models.WordLevel(self.ids, unk_token="<|unk|>"))
        tokenizer.decoder = decoders.Fuse()
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))


def make_run(path: Path, steps: int = 60, seed: int = 0) -> RunFolder:
    """Write a finished run of ``steps`` steps in which the success rate rises. Equal seeds give equal runs."""
    folder, random, words = RunFolder(path), np.random.default_rng(seed), Words()
    path.mkdir(parents=True, exist_ok=True)
    folder.config_path.write_text(CONFIG)
    clock = 0.0
    with Timeline(folder.timeline_path, clock=lambda: 0.0) as timeline, patch("time.time", lambda: 1.7e9 + clock):
        monitor = FileMonitor(RunInfo(folder))
        monitor.log(0, _evaluation(0.24, random) | {"eval/baseline/random": 0.06, "eval/baseline/expert": 0.98})
        for step in range(1, steps + 1):
            skill = 0.25 + 0.55 / (1 + math.exp(-(step - 0.4 * steps) / (0.13 * steps)))
            seconds = _step_times(random)
            _spans(timeline, clock, seconds, step, random)
            clock += sum(seconds.values())
            monitor.log(step, _metrics(skill, seconds, random))
            if step % max(1, steps // 12) == 0:
                monitor.log(step, _evaluation(skill - 0.03, random))
            groups = [_group(words, step, ticket, skill, random) for ticket in range(3)]
            records = [record for group in groups for record in group_records(group, step, _advantages(group))]
            write_rollouts(folder.rollout_path(step), records)
        monitor.close()
    words.save(folder.tokenizer_path)
    return folder


def _evaluation(skill: float, random: np.random.Generator) -> dict[str, float]:
    out = {}
    for name, lift in [
        ("sampled/pass@1", 0.0),
        ("sampled/pass@2", 0.1),
        ("sampled/pass@4", 0.16),
        ("greedy/success", 0.02),
    ]:
        mean = min(1.0, max(0.0, skill + lift + 0.02 * random.normal()))
        half = 1.96 * math.sqrt(mean * (1 - mean) / 110)
        out |= {
            f"eval/{name}": mean,
            f"eval/{name}_low": max(0.0, mean - half),
            f"eval/{name}_high": min(1.0, mean + half),
        }
    return out


def _step_times(random: np.random.Generator) -> dict[str, float]:
    typical = {"environment": 0.16, "prefill": 0.31, "decode": 0.62, "train": 0.71, "idle": 0.09}
    return {name: seconds * float(random.uniform(0.8, 1.25)) for name, seconds in typical.items()}


def _metrics(skill: float, seconds: dict[str, float], random: np.random.Generator) -> dict[str, float]:
    noise = random.normal(size=12)
    success = float(np.clip(skill + 0.04 * noise[0], 0, 1))
    return {
        "reward/mean": success,
        "reward/success": success,
        "reward/std": math.sqrt(success * (1 - success)),
        "reward/valid": 1.0,
        "groups/zero_variance": float(random.integers(0, 6)),
        "groups/consumed": 16.0,
        "loss/policy": -0.01 + 0.004 * noise[1],
        "loss/entropy": 0.9 - 0.6 * skill + 0.02 * noise[2],
        "loss/approx_kl_k3": abs(0.002 + 0.0006 * noise[3]),
        "loss/ratio/mean": 1 + 0.001 * noise[4],
        "loss/ratio/max": 1.6 + 0.2 * abs(noise[5]),
        "learner/grad_norm": 0.6 + 0.12 * noise[6],
        "learner/lr": 5e-4,
        "learner/tokens_per_s": 21000 + 900 * noise[7],
        "sampler/tokens_per_s": 5200 + 260 * noise[8],
        "schedule/staleness_mean": float(random.choice([0.0, 0.25, 0.5])),
        "tokens/sampled": 6100 + 300 * noise[9],
        "tokens/trained": 6100 + 300 * noise[9],
        "device/idle_share": seconds["idle"] / sum(seconds.values()),
        "stop/done": success,
        "stop/max_turns": 1 - success,
        "stop/timeout": 0.0,
        "episode/turns": 10.5 - 4 * skill + 0.2 * noise[10],
        **{f"time/{name}_s": value for name, value in seconds.items()},
        "time/step_s": sum(seconds.values()) + 0.03,
    }


def _spans(timeline: Timeline, start: float, seconds: dict[str, float], step: int, random: np.random.Generator) -> None:
    now, turns = start, 12
    for turn in range(turns):
        for kind in ("prefill", "decode", "environment"):
            length = seconds[kind] / turns * float(random.uniform(0.7, 1.3))
            timeline.record(kind, now, now + length, rows=128 - 8 * turn)
            now += length
    end = start + sum(seconds.values())
    timeline.record("wait", now, end - seconds["train"], who="train", what="groups")
    timeline.record("train", end - seconds["train"], end - 0.02, step=step - 1)
    timeline.record("publish", end - 0.02, end)


def _advantages(group: Group) -> list[float]:
    values = np.array([t.score.value if t.score.valid else math.nan for t in group.trajectories])
    spread = np.nanstd(values)
    return list((values - np.nanmean(values)) / (spread if spread > 0 else 1.0))


def _group(words: Words, step: int, ticket: int, skill: float, random: np.random.Generator) -> Group:
    task = Task(f"alfworld:{random.integers(16**8):08x}")
    thing, place = random.choice(THINGS), random.choice(PLACES)
    members = [_play(words, task, str(thing), str(place), step, f"{ticket}.{i}", skill, random) for i in range(6)]
    stored = (_play(words, task, str(thing), str(place), max(1, step - 5), f"{ticket}.old", 1.0, random),)
    replayed = stored if ticket == 2 else ()
    return Group(GroupSpec(task, len(members), replayed), (*members, *replayed), step * 16 + ticket)


def _play(
    words: Words, task: Task, thing: str, place: str, step: int, name: str, skill: float, random: np.random.Generator
) -> Trajectory:
    said = random.random()
    solved, invalid = said < skill, said > 0.97
    start = str(random.choice([p for p in PLACES if p != place]))
    commands = [f"go to {start}", f"take {thing} from {start}", f"go to {place}", f"put {thing} in/on {place}"]
    wandering = [f"go to {p}" for p in random.permutation(PLACES)[: int(random.integers(0, 4))]]
    spoken = wandering + (commands if solved else commands[:2])
    goal = f"put a {thing.split()[0]} in {place.split()[0]}"
    seen = ", a ".join(PLACES)
    opening = (
        f"You are in the middle of a room. Looking quickly around you, you see a {seen}.\n\nYour task is to: {goal}."
    )
    turns = [_context(words, opening)]
    for command in spoken:
        text = f"{command}<|end|>"
        tokens = words(text)
        logprobs = -random.exponential(0.35 * (1.2 - skill), tokens.size).astype(np.float32)
        turns.append(Turn(Message(role="assistant", content=command), tokens, logprobs, step - 1))
        turns.append(_context(words, _feedback(command)))
    score = Score.failed("TimeoutError: the worker did not answer in 60 s") if invalid else Score(float(solved))
    stop = StopReason.TIMEOUT if invalid else StopReason.DONE if solved else StopReason.MAX_TURNS
    return Trajectory(f"{step}.{name}", task.id, (tuple(turns),), score, stop, {"turns": len(spoken)})


def _context(words: Words, text: str) -> Turn:
    return Turn(Message(role="user", content=text), words(f"<|user|>{text}<|end|><|assistant|>"))


def _feedback(command: str) -> str:
    if command.startswith("go to"):
        return f"You arrive at {command[6:]}. On the {command[6:]}, you see a mug 1, and a saltshaker 2."
    return f"You {command}."
