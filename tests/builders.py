"""Builds small groups of trajectories and a small model, for tests of credit assignment, batches and learners."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from gleanrl.types import Group, GroupSpec, Score, Segment, StopReason, Task, Trajectory, Turn

VOCABULARY = 40

# The tensors of these tests are so small that more threads only cost time.
torch.set_num_threads(1)


@dataclass(frozen=True)
class Member:
    """Describes one trajectory of a group that `make_group` builds."""

    score: float | None = 0.0  # None = the score is invalid
    turns: tuple[int, ...] = (3, 2)  # number of sampled tokens of each turn
    segments: int = 1  # number of segments among which the turns are divided
    replayed: bool = False
    context: int = 4  # number of context tokens before each sampled turn
    trailing: int = 0  # number of context tokens after the last sampled turn of a segment


def make_group(index: int, members: Sequence[Member], random: np.random.Generator) -> Group:
    """Build a group with random tokens and log-probs. Replayed members are moved to the end, as `Group` requires."""
    task = Task(f"task-{index}")
    ordered = sorted(members, key=lambda member: member.replayed)
    trajectories = tuple(_trajectory(task, position, member, random) for position, member in enumerate(ordered))
    fresh = sum(not member.replayed for member in ordered)
    return Group(GroupSpec(task, fresh, trajectories[fresh:]), trajectories, index)


def _trajectory(task: Task, position: int, member: Member, random: np.random.Generator) -> Trajectory:
    score = Score.failed("no answer") if member.score is None else Score(member.score)
    cuts = np.array_split(np.array(member.turns, int), member.segments)
    segments = tuple(_segment(cut.tolist(), member, random) for cut in cuts if cut.size)
    return Trajectory(f"{task.id}/{position}", task.id, segments, score, StopReason.DONE)


def _segment(turns: Sequence[int], member: Member, random: np.random.Generator) -> Segment:
    segment: list[Turn] = []
    for sampled in turns:
        segment.append(_context(member.context, random))
        logprobs = np.log(random.uniform(0.01, 0.06, sampled))
        tokens = random.integers(1, VOCABULARY, sampled)
        segment.append(Turn({"role": "assistant", "content": ""}, tokens, logprobs, version=3))
    return (*segment, _context(member.trailing, random)) if member.trailing else tuple(segment)


def _context(size: int, random: np.random.Generator) -> Turn:
    return Turn({"role": "user", "content": ""}, random.integers(1, VOCABULARY, size))


def random_groups(random: np.random.Generator, count: int = 4, *, replayed: bool = True) -> list[Group]:
    """Build random groups of 1 to 5 members: with one or two segments, invalid scores, and groups without variance."""
    groups: list[Group] = []
    for index in range(count):
        equal = random.random() < 0.25
        members = [
            Member(
                score=None if random.random() < 0.15 else 1.0 if equal else float(random.integers(0, 2)),
                turns=tuple(random.integers(1, 5, random.integers(1, 4)).tolist()),
                segments=int(random.integers(1, 3)),
                replayed=replayed and position > 0 and random.random() < 0.25,
                context=int(random.integers(1, 6)),
                trailing=int(random.integers(0, 4)),
            )
            for position in range(random.integers(1, 6))
        ]
        groups.append(make_group(index, members, random))
    return groups


def tiny_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, *, hidden: int = 16, kv_heads: int = 1
) -> Qwen2ForCausalLM:
    """Return a random Qwen2 model of two layers with tied embeddings.

    Its weights are large enough that the predictions differ clearly from the uniform distribution, so that gradients
    are not close to zero. For float64, the norms are replaced, because those of transformers compute in float32.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=kv_heads,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.2,
            pad_token_id=0,
        )
        model = Qwen2ForCausalLM(config).to(dtype).eval()
    if dtype == torch.float64:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, Qwen2RMSNorm):
                    setattr(module, name, torch.nn.RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype))
    return model


def checkpoint_tensors(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a learner's checkpoint whose names begin with ``prefix``, by name without the prefix."""
    metadata = dcp.FileSystemReader(folder / "tensors").read_metadata().state_dict_metadata
    found = {
        name: torch.empty(info.size, dtype=info.properties.dtype)
        for name, info in metadata.items()
        if isinstance(info, TensorStorageMetadata) and name.startswith(prefix)
    }
    # torch warns that the checkpoint is loaded in a single process.
    with warnings.catch_warnings(action="ignore"):
        dcp.load(found, checkpoint_id=folder / "tensors", no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def applied_gradients(learner: Any) -> list[list[torch.Tensor]]:
    """Return a list to which each update of ``learner``, a `TorchLearner`, adds the gradient of each parameter."""
    applied: list[list[torch.Tensor]] = []
    step = learner.engine.step

    def watched(normaliser: float, lr: float, **options: Any) -> float:
        applied.append([p.grad / normaliser for p in learner.engine.backend.parameters])
        return step(normaliser, lr, **options)

    learner.engine.step = watched
    return applied
