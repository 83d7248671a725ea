"""The log-probs that the sampler records equal those of the learner's forward pass, for every context policy.

The episodes are played on ALFWorld with a tiny model.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gleanrl.algorithms.batch import build
from gleanrl.config.settings import ContextSettings, CreditSettings, LearnerSettings, LossSettings, ModelSettings
from gleanrl.environments.alfworld import AlfworldTaskset
from gleanrl.learners.tiny import build_model, build_tokenizer
from gleanrl.learners.torch import TorchLearner
from gleanrl.rollout.player import Player
from gleanrl.rollout.renderer import Renderer
from gleanrl.samplers.transformers import TransformersSampler
from gleanrl.types import Group, GroupSpec

MAX_CONTEXT = 512


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("policy", ["linear", "strip_thinking", "window"])
def test_the_trainer_reproduces_the_samplers_log_probs(policy: str, temperature: float) -> None:
    taskset = AlfworldTaskset(object_kinds=["apple", "egg", "mug", "plate", "cup"], seed=5)
    conversations = [taskset.demonstrate(task, seed=i)[0] for i, task in enumerate(taskset.tasks("warm_start", 12))]
    tokenizer = build_tokenizer([m["content"] for c in conversations for m in c] + ["</think>"] * 20, 512)
    settings = ModelSettings(hidden_size=32, layers=2, heads=2, kv_heads=1, max_context=MAX_CONTEXT)
    model = build_model(settings, tokenizer, seed=1)
    tasks = taskset.tasks("train", 3)

    async def play() -> tuple[list[Group], list]:
        sampler = TransformersSampler(model, max_rows=4, max_context=MAX_CONTEXT)
        context = ContextSettings(policy=policy, window_turns=2, max_turns=6, max_tokens_per_turn=10)
        player = Player(taskset.environment, sampler, Renderer(tokenizer), context, temperature, MAX_CONTEXT)
        jobs = [player.play(task, trajectory_id=f"{task.id}.{i}", seed=i) for task in tasks for i in range(2)]
        played = await asyncio.gather(*jobs)
        await sampler.close()
        groups = [Group(GroupSpec(task, 2), tuple(played[2 * k : 2 * k + 2]), k) for k, task in enumerate(tasks)]
        batch = build(groups, CreditSettings(), LossSettings(), MAX_CONTEXT)
        learner = TorchLearner(
            model,
            LearnerSettings(),
            LossSettings(),
            total_steps=1,
            groups_per_step=3,
            pad_token=tokenizer.pad_token_id,
            temperature=temperature,
        )
        return groups, list(zip(batch.samples, await learner.logprobs(batch.samples), strict=True))

    groups, scored = asyncio.run(play())
    assert sum(s.mask.sum() for s, _ in scored) == sum(t.sampled_tokens for g in groups for t in g.trajectories)
    if policy == "window":
        # More samples than the six trajectories means that the window moved and started new segments.
        assert len(scored) > 6
    for sample, score in scored:
        np.testing.assert_allclose(score.logprobs, sample.behaviour, atol=1e-4)
