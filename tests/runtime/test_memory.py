"""Tests of the estimate of a run's memory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gleanrl.config.loading import load
from gleanrl.runtime.memory import estimate


def test_a_critic_of_its_own_and_a_second_sampler_are_counted(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, tie_word_embeddings=True, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(tmp_path)
    held = 4 * sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())

    def whole(*settings: tuple[str, str], trains: bool = True) -> dict[str, int]:
        given = load("smollm2", [("model.init", str(tmp_path)), *settings])
        return estimate(given, torch.device("cpu"), trains=trains)[0]

    values = ("credit.estimator", "gae")
    alone = whole()
    assert {name: size / held for name, size in alone.items() if size} == {
        "weights": 1, "gradients": 1, "optimizer": 2, "samplers": 2,
    }  # fmt: skip
    assert whole(values) == {**alone, "critic": 4 * held}
    assert whole(values, ("critic.model", "shared")) == alone
    shared = ("sampler.share_with_evaluation", "true"), ("sampler.deterministic", "false")
    assert whole(*shared) == {**alone, "samplers": held}
    assert whole(values, trains=False) == {**dict.fromkeys(alone, 0), "weights": held, "samplers": held}
