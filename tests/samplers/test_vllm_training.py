"""Training runs that sample with vLLM, from the configuration to the last publication. Needs vLLM."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.cli.main import main
from gleanrl.config import loading as configuration
from gleanrl.protocols import SamplingParams
from gleanrl.runtime.local import Builder
from gleanrl.runtime.prepare import prepare
from gleanrl.runtime.run_folder import RunFolder
from gleanrl.tracking.monitors import Console, load_monitors
from gleanrl.train import train
from tests.cli.conftest import CONFIG

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed in this environment: make vllm", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STEPS = 4
OPTIONS = {
    "run.steps": str(STEPS),
    "sampler.name": "vllm",
    "sampler.options.kv_cache_memory_bytes": str(1 << 26),
    "model.hidden_size": "64",
    "model.heads": "2",
    "model.kv_heads": "1",
    "learner.lr": "1e-2",  # large enough that weights that miss an update give clearly different log-probs
}


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path


def greedy_of(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return the model's greedy completion of ``count`` tokens and their log-probs, by one full pass per token."""
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        with torch.inference_mode():
            scores = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return tokens[len(prompt) :], logprobs


@pytest.mark.parametrize("preset", ["sync", "bounded_async"])
def test_after_training_vllm_completions_equal_those_of_the_trained_hugging_face_model(
    toml: Path, tmp_path: Path, preset: str
) -> None:
    own = {**OPTIONS, "run.folder": str(tmp_path), "run.name": preset, "schedule.preset": preset}
    config = configuration.load(str(toml), list(own.items()))
    console = Console()

    async def test() -> None:
        builder = Builder(config, RunFolder(config.path), prepare(config, console), console)
        async with builder.run(partial(load_monitors, config.monitor, console=console), resume=False) as run:
            before = {name: weight.clone() for name, weight in run.learner.weights().items()}
            await train(run)
            moved = max(float((w - before[name]).abs().max()) for name, w in run.learner.weights().items())
            assert moved > 0.01
            sampler, model = run.player.sampler, builder.prepared.model
            assert sampler.version == STEPS
            random = np.random.default_rng(0)
            for _ in range(8):
                prompt = random.integers(0, model.config.vocab_size, 12).astype(np.int32)
                async with sampler.session(0) as session:
                    answer = await session.sample(prompt, SamplingParams(8, (), 0.0))
                tokens, logprobs = greedy_of(model.eval(), prompt.tolist(), 8)
                assert answer.tokens.tolist() == tokens
                np.testing.assert_allclose(answer.logprobs, logprobs, atol=1e-3)

    asyncio.run(test())
    rows = [json.loads(line) for line in (config.path / "metrics.jsonl").read_text().splitlines()]
    text = json.dumps(rows)
    assert "sampler/tokens_per_s" in text
    assert "eval/sampled" in text


def test_two_runs_with_the_same_seed_give_equal_weights(toml: Path, tmp_path: Path) -> None:
    def once(name: str) -> dict[str, torch.Tensor]:
        own = {**OPTIONS, "run.folder": str(tmp_path), "run.name": name}
        flags = [part for key, value in own.items() for part in (f"--{key}", value)]
        assert main(["train", str(toml), *flags]) == 0
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict()

    first, second = once("a"), once("b")
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
