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


def test_sampled_log_probs_of_adapters_are_those_of_the_learner_as_with_merged_weights(
    toml: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    mismatch = {}
    for separate in ("true", "false"):
        own = {**OPTIONS, "run.folder": str(tmp_path), "run.name": separate, "learner.lora_rank": "4"}
        own |= {"sampler.options.enable_lora": separate}
        assert main(["train", str(toml), *(part for key, value in own.items() for part in (f"--{key}", value))]) == 0
        rows = [json.loads(line) for line in (tmp_path / separate / "metrics.jsonl").read_text().splitlines()]
        mismatch[separate] = [row["loss/mismatch"] for row in rows if "loss/mismatch" in row]
    assert len(mismatch["true"]) == len(mismatch["false"]) == STEPS
    assert max(mismatch["false"]) < 1e-5
    assert max(mismatch["true"]) < 1e-5


def test_two_runs_with_the_same_seed_give_equal_weights(toml: Path, tmp_path: Path) -> None:
    def once(name: str) -> dict[str, torch.Tensor]:
        own = {**OPTIONS, "run.folder": str(tmp_path), "run.name": name}
        flags = [part for key, value in own.items() for part in (f"--{key}", value)]
        assert main(["train", str(toml), *flags]) == 0
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict()

    first, second = once("a"), once("b")
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_plain_vllm_loads_a_run_s_model_and_answers_as_plain_transformers_does(toml: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM
    from vllm import SamplingParams as Params

    own = {**OPTIONS, "run.folder": str(tmp_path), "run.name": "a", "run.steps": "2"}
    assert main(["train", str(toml), *(part for key, value in own.items() for part in (f"--{key}", value))]) == 0
    folder = tmp_path / "a" / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = [[{"role": "user", "content": f"Is {number} odd or even?"}] for number in range(8)]
    limits = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
    answers = LLM(str(folder), dtype="float32", **limits).chat(asked, Params(temperature=0.0, max_tokens=8))
    for messages, answer in zip(asked, answers, strict=True):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert answer.prompt_token_ids == prompt
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)[0, len(prompt) :]
        assert list(answer.outputs[0].token_ids) == expected.tolist()
