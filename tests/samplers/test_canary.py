"""`gleanrl.samplers.canary.Canary` detects an engine that samples with other weights than the published ones.

The engines are simulated by Hugging Face models whose weights are, or are not, updated.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gleanrl.samplers import SAMPLERS
from gleanrl.samplers.canary import ANSWER, Canary
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.weights import GatheredWeights, layout_of
from tests.builders import tiny_model
from tests.samplers.conversations import CONFIGS, CONTEXT, make_model


def engine_answer(model: Any, canary: Canary, temperature: float = 1.0) -> tuple[list[int], list[float]]:
    """Return what an engine that serves ``model`` returns for the test prompt.

    These are the tokens of the greedy completion, and the log-probs of all tokens but the first of prompt and
    completion.
    """
    tokens = list(canary.prompt)
    with torch.inference_mode():
        for _ in range(ANSWER):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float() / temperature
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
    return tokens[len(canary.prompt) :], logprobs.tolist()


def compare(canary: Canary, weights: Mapping[str, Any], answer: tuple[list[int], list[float]]) -> None:
    tokens, logprobs = answer
    canary.compare(canary.reference(weights, tokens), logprobs, "now")


@pytest.mark.parametrize("name", CONFIGS)
def test_current_weights_pass_and_a_single_stale_weight_raises(name: str) -> None:
    model = make_model(name)
    canary = Canary(model, torch.float32, "it")
    weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    answer = engine_answer(model, canary)
    compare(canary, weights, answer)
    for key, weight in weights.items():
        if key.endswith("k_proj.bias"):
            # This bias adds the same number to all attention scores of a query, so that it has no effect.
            continue
        changed = {**weights, key: weight + 0.1 * torch.randn_like(weight)}
        with pytest.raises(UserError, match="it does not compute what the learner's weights compute now"):
            compare(canary, changed, answer)


def test_the_canary_keeps_no_copy_of_the_weights() -> None:
    canary = Canary(make_model(), torch.float32, "it")
    assert all(parameter.is_meta for parameter in canary._modules.parameters())


def test_log_probs_of_only_the_completion_are_compared_at_their_temperature() -> None:
    model = make_model()
    canary = Canary(model, "float32", "it")
    weights = dict(model.named_parameters())
    tokens, logprobs = engine_answer(model, canary, 0.7)
    reference = canary.reference(weights, tokens)
    assert reference.distance(logprobs[-ANSWER:], 0.7)[1] < canary.tolerance
    assert reference.distance(logprobs[-ANSWER:])[1] > canary.tolerance


@dataclass
class Training:
    """A float32 model that is trained in small steps, and a bfloat16 copy as engine, which `load` updates."""

    lr: float

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = tiny_model(0, torch.float32)
        self.engine = copy.deepcopy(self.model).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def step(self) -> None:
        batch = torch.randint(0, self.model.config.vocab_size, (4, 32))
        loss = self.model(input_ids=batch, labels=batch).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def load(self) -> None:
        self.engine.load_state_dict(self.model.state_dict())


@pytest.mark.parametrize(("lr", "within"), [(1e-5, 20), (1e-6, 200)])
def test_a_bfloat16_engine_that_is_never_updated_raises_within_few_steps(lr: float, within: int) -> None:
    """The canary finds it by comparing with the log-probs of older weights.

    The distance to the current weights alone is still below 0.1 nats then, less than the tolerance for bfloat16.
    """
    training = Training(lr)
    canary = Canary(training.model, torch.bfloat16, "it")
    stale = engine_answer(training.engine, canary)
    compare(canary, training.weights, stale)

    def train_with_stale_engine() -> None:
        for _ in range(within):
            training.step()
            compare(canary, training.weights, stale)

    with pytest.raises(UserError, match=r"but what older ones do: .* it learns from wrong samples$") as found:
        train_with_stale_engine()
    assert "\n" not in str(found.value)
    off, _ = canary.reference(training.weights, stale[0]).distance(stale[1])
    assert off < 0.1


@pytest.mark.parametrize("lr", [1e-2, 1e-5, 1e-6])
def test_a_bfloat16_engine_that_gets_every_update_never_raises(lr: float) -> None:
    training = Training(lr)
    canary = Canary(training.model, torch.bfloat16, "it")
    seen = 0
    for _ in range(60):
        training.load()
        before = canary._held
        compare(canary, training.weights, engine_answer(training.engine, canary))
        seen += canary._held is not before
        training.step()
    assert seen > (30 if lr == 1e-2 else 0)


class Layered(torch.nn.Module):
    """A model that records when each of its layers runs.

    The test uses the meta device as a second device. Models of transformers cannot run there, because their code
    reads values of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=11))
        self.embedding, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.seen: list[str] = []

    def forward(self, tokens: torch.Tensor, use_cache: bool) -> Any:
        hidden = self.embedding(tokens) * self.scale
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            self.seen.append(f"layer {number}")
        return SimpleNamespace(logits=self.head(hidden))


def test_weights_are_gathered_and_moved_to_the_device_of_the_buffers_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Ray, the published weights are in the object store, in host memory, and the modules' buffers on the GPU."""
    model = Layered()
    canary = Canary(model, "float32", "it")
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        expected = model(torch.tensor(canary.prompt)[None], use_cache=False).logits[0]
    modules = canary._modules
    modules.seen.clear()

    def gather(names: list[str]) -> dict[str, torch.Tensor]:
        modules.seen.extend(names)
        return {name: held[name] for name in names}

    monkeypatch.setattr("gleanrl.utils.weights.BUCKET", 1)
    weights = GatheredWeights(layout_of(held), gather)
    assert torch.equal(canary.reference(weights, [1]).logits, expected)
    layers = [[f"layers.{n}.weight", f"layers.{n}.bias", f"layer {n}"] for n in range(3)]
    assert modules.seen == ["embedding.weight", "head.weight", *layers[0], *layers[1], *layers[2]]
    # The meta device stands for any other device. The forward pass runs on it, but its logits have no values that could
    # be copied to the CPU, so that `reference` raises at its end.
    modules.scale = modules.scale.to("meta")
    with pytest.raises(NotImplementedError, match="meta"):
        canary.reference(weights)
    assert all(parameter.is_meta for parameter in modules.parameters())


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_name_can_be_imported(name: str) -> None:
    assert callable(load_object(SAMPLERS[name]))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"^sampler.name = 'vllm' needs vLLM: pip install 'gleanrl\[vllm\]'$"):
        load_object(SAMPLERS["vllm"])(make_model(), max_context=CONTEXT)
