"""The test prompt tells right weights from wrong ones, whichever weight is wrong, and needs no copy of them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from gleanrl.errors import UserError
from gleanrl.importing import load_object
from gleanrl.samplers import SAMPLERS
from gleanrl.samplers.canary import ANSWER, Canary
from tests.samplers.conversations import CONFIGS, CONTEXT, make_model


def answered(model: Any, canary: Canary, temperature: float = 1.0) -> tuple[list[int], list[float]]:
    """What an engine that computes ``model`` would give: greedy tokens, and the log-probs from the second token on."""
    tokens = list(canary.prompt)
    with torch.inference_mode():
        for _ in range(ANSWER):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
    return tokens[len(canary.prompt) :], logprobs.tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_right_weights_pass_and_any_stale_one_is_found(name: str) -> None:
    model = make_model(name)
    canary = Canary(model, torch.float32, "it")
    weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    tokens, logprobs = answered(model, canary)
    canary.compare(weights, tokens, logprobs, "now")
    for key, weight in weights.items():
        if key.endswith("k_proj.bias"):
            continue  # adds the same to every score of a query, so that attention does not change
        changed = {**weights, key: weight + 0.1 * torch.randn_like(weight)}
        with pytest.raises(UserError, match="it does not compute what the learner's weights compute now"):
            canary.compare(changed, tokens, logprobs, "now")


def test_its_modules_hold_no_weight() -> None:
    canary = Canary(make_model(), torch.float32, "it")
    assert all(parameter.is_meta for parameter in canary._modules.parameters())


def test_log_probs_of_an_answer_alone_and_of_another_temperature() -> None:
    model = make_model()
    canary = Canary(model, "float32", "it")
    weights = dict(model.named_parameters())
    tokens, logprobs = answered(model, canary, 0.7)
    assert canary.distance(weights, tokens, logprobs[-ANSWER:], 0.7)[1] < canary.tolerance
    assert canary.distance(weights, tokens, logprobs[-ANSWER:])[1] > canary.tolerance


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_name_is_of_a_sampler(name: str) -> None:
    assert callable(load_object(SAMPLERS[name]))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_one_line_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"^sampler.name = 'vllm' needs vLLM: pip install 'gleanrl\[vllm\]'$"):
        load_object(SAMPLERS["vllm"])(make_model(), max_context=CONTEXT)
