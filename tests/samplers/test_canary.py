"""The test prompt tells right weights from wrong ones, whichever weight is wrong, and needs no copy of them."""

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
from tests.builders import tiny_model
from tests.samplers.conversations import CONFIGS, CONTEXT, make_model


def answered(model: Any, canary: Canary, temperature: float = 1.0) -> tuple[list[int], list[float]]:
    """What an engine that computes ``model`` would give: greedy tokens, and the log-probs from the second token on."""
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
def test_right_weights_pass_and_any_stale_one_is_found(name: str) -> None:
    model = make_model(name)
    canary = Canary(model, torch.float32, "it")
    weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    answer = answered(model, canary)
    compare(canary, weights, answer)
    for key, weight in weights.items():
        if key.endswith("k_proj.bias"):
            continue  # adds the same to every score of a query, so that attention does not change
        changed = {**weights, key: weight + 0.1 * torch.randn_like(weight)}
        with pytest.raises(UserError, match="it does not compute what the learner's weights compute now"):
            compare(canary, changed, answer)


def test_its_modules_hold_no_weight() -> None:
    canary = Canary(make_model(), torch.float32, "it")
    assert all(parameter.is_meta for parameter in canary._modules.parameters())


def test_log_probs_of_an_answer_alone_and_of_another_temperature() -> None:
    model = make_model()
    canary = Canary(model, "float32", "it")
    weights = dict(model.named_parameters())
    tokens, logprobs = answered(model, canary, 0.7)
    reference = canary.reference(weights, tokens)
    assert reference.distance(logprobs[-ANSWER:], 0.7)[1] < canary.tolerance
    assert reference.distance(logprobs[-ANSWER:])[1] > canary.tolerance


@dataclass
class Training:
    """A model that takes small steps, as a learner's does, and a bfloat16 engine that may or may not get them."""

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
def test_a_bfloat16_engine_that_takes_no_update_is_found_once_that_shows(lr: float, within: int) -> None:
    """The answer alone stays within what rounding may do, 0.2 nats, for much longer."""
    training = Training(lr)
    canary = Canary(training.model, torch.bfloat16, "it")
    stale = answered(training.engine, canary)
    compare(canary, training.weights, stale)

    def go_on() -> None:
        for _ in range(within):
            training.step()
            compare(canary, training.weights, stale)

    with pytest.raises(UserError, match=r"but what older ones do: .* it learns from wrong samples$") as found:
        go_on()
    assert "\n" not in str(found.value)
    off, _ = canary.reference(training.weights, stale[0]).distance(stale[1])
    assert off < 0.1


@pytest.mark.parametrize("lr", [1e-2, 1e-5, 1e-6])
def test_a_bfloat16_engine_that_takes_every_update_never_stops_a_run(lr: float) -> None:
    training = Training(lr)
    canary = Canary(training.model, torch.bfloat16, "it")
    seen = 0
    for _ in range(60):
        training.load()
        before = canary._held
        compare(canary, training.weights, answered(training.engine, canary))
        seen += canary._held is not before
        training.step()
    assert seen > (30 if lr == 1e-2 else 0)


class Layered(torch.nn.Module):
    """A model that sees where its weights are. Those of transformers look at values, and the meta device has none."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=11))
        self.embedding, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.seen: list[list[bool]] = []

    def forward(self, tokens: torch.Tensor, use_cache: bool) -> Any:
        hidden = self.embedding(tokens) * self.scale
        for layer in self.layers:
            handle = layer.register_forward_pre_hook(
                lambda *_: self.seen.append([p.is_meta for p in self.parameters()])
            )
            hidden = layer(hidden)
            handle.remove()
        return SimpleNamespace(logits=self.head(hidden))


def test_weights_from_elsewhere_come_to_the_models_buffers_layer_by_layer() -> None:
    """On Ray they lie in the store, in the machine's memory, and the modules' buffers on the GPU."""
    model = Layered()
    canary = Canary(model, "float32", "it")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        expected = model(torch.tensor(canary.prompt)[None], use_cache=False).logits[0]
    assert torch.equal(canary.reference(weights, [1]).logits, expected)  # where nothing has to be moved
    modules = canary._modules
    modules.seen.clear()
    modules.scale = modules.scale.to("meta")  # any other device
    with pytest.raises(NotImplementedError, match="meta"):  # logits that cannot be copied to the CPU
        canary.reference(weights)
    embedding, head, *layers = ([place[i] for place in modules.seen] for i in range(8))
    assert embedding == head == [True, True, True]
    assert layers == [[True, False, False]] * 2 + [[False, True, False]] * 2 + [[False, False, True]] * 2
    assert all(parameter.is_meta for parameter in modules.parameters())
    assert not any(weight.is_meta for weight in weights.values())


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_name_is_of_a_sampler(name: str) -> None:
    assert callable(load_object(SAMPLERS[name]))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_one_line_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"^sampler.name = 'vllm' needs vLLM: pip install 'gleanrl\[vllm\]'$"):
        load_object(SAMPLERS["vllm"])(make_model(), max_context=CONTEXT)
