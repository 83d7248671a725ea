"""Tests of ``trained_logprobs`` and its parts: values and gradients against a plain log-softmax over all logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl.config.settings import LearnerSettings, LossSettings
from gleanrl.learners import logprobs
from gleanrl.learners.engine import LocalEngine
from gleanrl.learners.logprobs import selected_log_softmax, trained_logprobs
from gleanrl.learners.models import add_adapters
from tests.builders import VOCABULARY, tiny_model
from tests.strategies import examples

TOKENS = (torch.arange(33).reshape(3, 11) * 7) % VOCABULARY
INDEX, TARGETS = torch.tensor([0, 4, 4, 12, 13, 32]), torch.tensor([1, 2, 3, 4, 39, 5])
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 30),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    scale=st.sampled_from([0.1, 1.0, 50.0]),
    block=st.sampled_from([1, 40, 1 << 20]),
)
def test_values_and_gradients_equal_plain_log_softmax(
    seed: int, rows: int, temperature: float, scale: float, block: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(rows, 13, generator=generator, dtype=torch.float64)).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    targets = torch.randint(0, 13, (rows,), generator=generator)
    weights = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logprobs.LOGITS_AT_ONCE, "cpu", block)
        ours = selected_log_softmax(logits, targets, temperature)
        sum((w * v).sum() for w, v in zip(weights, ours, strict=True)).backward()  # type: ignore[union-attr]
    theirs = plain(twin, targets, temperature)
    sum((w * v).sum() for w, v in zip(weights, theirs, strict=True)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(logits.grad, twin.grad, rtol=1e-9, atol=1e-10)


def test_gradients_equal_finite_differences() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2, 2])
    assert torch.autograd.gradcheck(lambda x: selected_log_softmax(x, targets, 0.7), (logits,))


@pytest.mark.parametrize("excluded", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_token_that_the_model_excludes_adds_nothing(excluded: float, temperature: float) -> None:
    kept = torch.tensor([[1.0, 0.0, 0.5], [2.0, -1.0, 0.0]], requires_grad=True)
    logits = torch.cat([kept.detach(), torch.full((2, 1), excluded)], -1).requires_grad_()
    targets = torch.tensor([0, 2])
    ours, theirs = selected_log_softmax(logits, targets, temperature), plain(kept, targets, temperature)
    for values in (ours, theirs):
        (values[0].sum() + 0.1 * values[1].sum()).backward()
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[:, :3], kept.grad)
    assert not logits.grad[:, 3].any()


def test_bfloat16_logits_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits, targets = (8 * torch.randn(6, 50)).bfloat16(), torch.arange(6)
    logp, entropy = selected_log_softmax(logits, targets)
    torch.testing.assert_close((logp, entropy), plain(logits.float(), targets, 1.0), rtol=1e-5, atol=1e-5)


def test_the_head_computes_trained_positions_only_and_later_calls_are_unaffected() -> None:
    model = tiny_model(dtype=torch.float64)
    tokens = torch.randint(0, VOCABULARY, (3, 11))
    index = torch.tensor([0, 4, 12, 13, 32])
    targets = torch.tensor([1, 2, 3, 4, 5])
    seen: list[int] = []
    watch = model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape[-2] * out.shape[0]))
    logp, entropy = trained_logprobs(model, tokens, index, targets, 1.3)
    assert seen == [5]
    logits = model(input_ids=tokens).logits
    assert seen == [5, 33]
    watch.remove()
    expected = plain(logits.flatten(0, 1)[index], targets, 1.3)
    torch.testing.assert_close((logp, entropy), expected, rtol=1e-10, atol=1e-10)


# --- large vocabularies: log-probs without whole logits ---------------------------------------------
@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every batch count as large; the list gets the rows of each call of ``head_logprobs``."""
    rows: list[int] = []

    def watched(hidden: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(hidden.shape[0])
        return head_logprobs(hidden, *arguments)

    head_logprobs = logprobs.head_logprobs
    monkeypatch.setattr(logprobs, "LARGE", 0)
    monkeypatch.setattr(logprobs, "head_logprobs", watched)
    return rows


def make(name: str, **options: Any) -> Any:
    """Return a transformers model of this name with two small layers and float64 weights."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
        return getattr(transformers, f"{name}ForCausalLM")(config).double().eval()


def gradients(model: Any, values: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    sum((torch.linspace(0.3, 2, v.numel()) * v).sum() for v in values).backward()  # type: ignore[union-attr]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_against_the_plain_way(model: Any, tolerance: float = 1e-6) -> None:
    ours = trained_logprobs(model, TOKENS, INDEX, TARGETS, 1.3)
    our_gradients = gradients(model, ours)
    theirs = plain(model(input_ids=TOKENS).logits.flatten(0, 1)[INDEX], TARGETS, 1.3)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(our_gradients, gradients(model, theirs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_fused_logprobs_and_gradients_of_whole_models(name: str, tied: bool, fused: list[int]) -> None:
    model = make(name, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    check_against_the_plain_way(model)
    assert fused == [INDEX.numel()]


def test_a_head_with_a_bias_is_fused_too(fused: list[int]) -> None:
    model = make("Phi", num_key_value_heads=2)
    torch.nn.init.normal_(model.lm_head.bias)
    check_against_the_plain_way(model)
    assert fused == [INDEX.numel()]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Gemma2", {"final_logit_softcapping": 30.0}),
        ("Gemma2", {"final_logit_softcapping": 30.0, "initializer_range": 0.002}),  # the cap hardly shows
        ("Granite", {"logits_scaling": 8.0}),
        ("Cohere", {"logit_scale": 0.0625}),
    ],
)
def test_models_that_transform_their_logits_are_not_fused(name: str, options: dict[str, Any], fused: list[int]) -> None:
    check_against_the_plain_way(make(name, **options))
    assert fused == []


def test_a_model_with_softcapping_switched_off_is_fused(fused: list[int]) -> None:
    check_against_the_plain_way(make("Gemma2", final_logit_softcapping=None))
    assert fused == [INDEX.numel()]


def test_a_model_that_adds_to_its_logits_is_not_fused(fused: list[int]) -> None:
    model = make("Llama")
    forward = model.forward

    def biased(*arguments: Any, **options: Any) -> Any:
        out = forward(*arguments, **options)
        out.logits = out.logits + torch.linspace(0, 1e-4, VOCABULARY)
        return out

    model.forward = biased
    check_against_the_plain_way(model)
    assert fused == []


@pytest.mark.parametrize(("targets", "is_fused"), [("all-linear", True), ("q_proj,lm_head", False)])
def test_adapters_are_fused_unless_they_wrap_the_head(targets: str, is_fused: bool, fused: list[int]) -> None:
    pytest.importorskip("peft")
    settings = LearnerSettings(lora_rank=2, lora_targets=targets)
    model = add_adapters(make("Llama", tie_word_embeddings=False), settings, seed=0).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, and then adapters do nothing
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    assert model.get_base_model().get_output_embeddings().weight.requires_grad is False
    with model.disable_adapter():  # first, so that what is found out about the head holds with adapters too
        base, _ = trained_logprobs(model, TOKENS, INDEX, TARGETS, 1.0)
        expected, _ = plain(model(input_ids=TOKENS).logits.flatten(0, 1)[INDEX], TARGETS, 1.0)
    torch.testing.assert_close(base, expected, rtol=1e-6, atol=1e-6)
    check_against_the_plain_way(model)
    assert bool(fused) == is_fused


def test_fused_log_probs_work_with_activation_checkpointing(fused: list[int]) -> None:
    model = make("Qwen2", tie_word_embeddings=True)
    twin = copy.deepcopy(model)
    settings, loss = LearnerSettings(activation_checkpointing=True), LossSettings()
    model = LocalEngine(model, settings, loss, pad_token=0, temperature=1.0).backend.model
    fused.clear()  # of what the engine tries
    passes: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    found = [gradients(m, trained_logprobs(m, TOKENS, INDEX, TARGETS, 0.9)) for m in (model, twin)]
    assert len(passes) == 2  # the second is the recomputation
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
    assert fused == [INDEX.numel()] * 2


def test_under_autocast_fused_log_probs_round_as_the_head_does(
    fused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(dtype=torch.float32)
    values, slopes = [], []
    for large in (0, 1 << 40):
        monkeypatch.setattr(logprobs, "LARGE", large)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values.append(trained_logprobs(model, TOKENS, INDEX, TARGETS, 1.3))
        slopes.append(gradients(model, values[-1]))
    assert fused == [INDEX.numel()]
    torch.testing.assert_close(values[0], values[1], rtol=4e-3, atol=4e-3)  # one step of bfloat16
    for name, slope in slopes[0].items():
        assert float((slope - slopes[1][name]).norm() / slopes[1][name].norm().clamp_min(1e-6)) < 0.02, name


def test_small_batches_are_not_fused(fused: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(logprobs, "LARGE", INDEX.numel() * VOCABULARY + 1)
    logp, entropy = trained_logprobs(model, TOKENS, INDEX, TARGETS, 1.3)
    hidden = model.model(input_ids=TOKENS).last_hidden_state.flatten(0, 1)[INDEX][None]
    expected = selected_log_softmax(model.lm_head(hidden)[0], TARGETS, 1.3)
    assert torch.equal(logp, expected[0])
    assert torch.equal(entropy, expected[1])
    assert fused == []
    monkeypatch.setattr(logprobs, "LARGE", INDEX.numel() * VOCABULARY)
    trained_logprobs(model, TOKENS, INDEX, TARGETS, 1.3)
    assert fused == [INDEX.numel()]


def test_a_model_is_tried_once_and_its_head_then_computes_one_position(fused: list[int]) -> None:
    model, seen = tiny_model(), []
    watch = model.lm_head.register_forward_hook(lambda _, args, out: seen.append(tuple(out.shape[:2])))
    for _ in range(3):
        trained_logprobs(model, TOKENS, INDEX, TARGETS, 1.0)
    assert seen == [(1, 3), (1, 1), (1, 1)]  # the trial uses the first forward pass
    watch.remove()
    assert model(input_ids=TOKENS).logits.shape == (3, 11, VOCABULARY)


def test_a_model_found_to_change_its_logits_is_not_tried_again(fused: list[int]) -> None:
    model, calls = make("Cohere", logit_scale=0.5), []
    watch = model.lm_head.register_forward_hook(lambda _, args, out: calls.append(out.shape[1]))
    for _ in range(2):
        trained_logprobs(model, TOKENS, INDEX, TARGETS, 1.0)
    watch.remove()
    assert calls == [3, INDEX.numel(), INDEX.numel()]
    assert fused == []


def test_a_head_of_zeros_does_not_settle_whether_a_model_can_be_fused(fused: list[int]) -> None:
    model = make("Cohere", logit_scale=0.5, tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    check_against_the_plain_way(model)
    torch.nn.init.normal_(model.lm_head.weight)
    check_against_the_plain_way(model)
    assert fused == []


def test_a_large_batch_without_trained_tokens_gives_empty_values(fused: list[int]) -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    logp, entropy = trained_logprobs(tiny_model(), TOKENS, nothing, nothing, 1.0)
    assert logp.shape == entropy.shape == (0,)
