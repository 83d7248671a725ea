"""Tests of packed rows in the engine: gradients and scores are unchanged, on models that support such rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from gleanrl.algorithms.batch import Batch, build
from gleanrl.algorithms.microbatch import micro_batches
from gleanrl.config.settings import CreditSettings, LearnerSettings, LossSettings
from gleanrl.learners.engine import LocalEngine
from gleanrl.learners.logprobs import can_pack_rows
from gleanrl.learners.packed_attention import attend
from gleanrl.types import Group
from tests.builders import VOCABULARY, Member, make_group, random_groups, tiny_model
from tests.strategies import examples

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.2}


def group_of_a_prompt(index: int, random: np.random.Generator) -> Group:
    """A group whose members have one of two prompts and different lengths; one member is replayed."""
    # Some prompts are long enough that their attention is cut into parts, and the second begins like the first.
    prompts = [random.integers(1, VOCABULARY, int(random.integers(8, 180))) for _ in range(2)]
    alike = min(prompts[0].size, prompts[1].size, 30)
    prompts[1][:alike] = prompts[0][:alike]
    members = [
        Member(float(random.integers(2)), turns=tuple(random.integers(1, 6, 2).tolist()), replayed=m == 5)
        for m in range(6)
    ]
    group = make_group(index, members, random)
    trajectories = []
    for trajectory in group.trajectories:
        ((first, *others),) = trajectory.segments
        prompt = replace(first, tokens=prompts[int(random.random() < 0.3)])
        trajectories.append(replace(trajectory, segments=((prompt, *others),)))
    fresh = len(group.fresh)
    spec = replace(group.spec, replayed=tuple(trajectories[fresh:]))
    return replace(group, spec=spec, trajectories=tuple(trajectories))


def make_batch(seed: int, loss: LossSettings) -> Batch:
    random = np.random.default_rng(seed)
    groups = [group_of_a_prompt(index, random) for index in range(3)]
    return build([*groups, *random_groups(random, 2)], CreditSettings(), loss, 256)


def make_engine(loss: LossSettings, *, share: bool, dtype: torch.dtype = torch.float64, **options: Any) -> LocalEngine:
    settings = LearnerSettings.model_validate(options)
    engine = LocalEngine(tiny_model(0, dtype), settings, loss, pad_token=0, temperature=0.8, reference=None, seed=1)
    if engine.backend.reference is not None:
        engine.backend.reference.load_state_dict(tiny_model(1, dtype).state_dict())
    assert engine.backend.packs_rows
    engine.backend.packs_rows = share
    return engine


@settings(max_examples=examples(20), phases=[Phase.reuse, Phase.generate])
@given(
    seed=st.integers(0, 2**32 - 1),
    kl=st.sampled_from([0.0, 0.3]),
    entropy=st.sampled_from([0.0, 0.2]),
    rank=st.sampled_from([0, 2]),
    budget=st.integers(1, 400),
)
def test_gradients_and_scores_equal_those_of_rows_without_sharing(
    seed: int, kl: float, entropy: float, rank: int, budget: int
) -> None:
    loss = LossSettings(kl_coefficient=kl, entropy_coefficient=entropy)
    samples = make_batch(seed, loss).samples
    needed = samples if kl or entropy else [sample for sample in samples if not sample.zero_advantage]
    engines = [make_engine(loss, share=s, lora_rank=rank, tokens_per_microbatch=budget) for s in (True, False)]
    for engine in engines:
        if rank:  # adapters start at zero, where half of their gradients are zero
            for number, parameter in enumerate(engine.backend.parameters):
                torch.manual_seed(number)
                nn.init.normal_(parameter, std=0.1)
    ours, theirs = (engine.backward(needed) for engine in engines)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-9, abs=1e-9)
    assert (ours.trained, ours.real) == (theirs.trained, theirs.real)
    assert ours.computed <= theirs.computed == theirs.real
    for shared, plain in zip(*(engine.backend.parameters for engine in engines), strict=True):
        torch.testing.assert_close(shared.grad, plain.grad, rtol=1e-8, atol=1e-10)
    for shared, plain in zip(*(engine.score(samples) for engine in engines), strict=True):
        np.testing.assert_allclose(shared.logprobs, plain.logprobs, atol=1e-6)
        np.testing.assert_allclose(shared.entropy, plain.entropy, atol=1e-6)


def test_gradients_of_attention_in_bfloat16_are_those_of_float64_but_for_rounding() -> None:
    torch.manual_seed(0)
    micros = micro_batches(make_batch(0, LossSettings()).samples, 1024, share=True)
    packings = [micro.packing for micro in micros if micro.packing is not None]
    for kinds in zip(*((packing.parts, packing.batches, packing.shared) for packing in packings), strict=True):
        assert any(kinds)  # every kind of block is tested
    for packing in packings:
        sizes = [(1, heads, packing.positions.shape[1], 16) for heads in (4, 2, 2, 4)]
        query, key, value, to_out = (2 * torch.randn(size).bfloat16() for size in sizes)
        found = []
        for dtype in (torch.bfloat16, torch.float64):
            inputs = [tensor.detach().clone().to(dtype).requires_grad_() for tensor in (query, key, value)]
            attend(*inputs, packing).backward(to_out.to(dtype))
            found.append([tensor.grad.double() for tensor in inputs])
        for rounded, exact in zip(*found, strict=True):
            assert (rounded - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharing_computes_fewer_tokens_and_is_deterministic_in_float32(checkpointing: bool) -> None:
    loss = LossSettings()
    samples = make_batch(0, loss).samples
    engines = [
        make_engine(loss, share=share, dtype=torch.float32, activation_checkpointing=checkpointing)
        for share in (True, True, False)
    ]
    passes = [engine.backward(samples) for engine in engines]
    assert passes[0].computed < 0.7 * passes[2].computed
    for first, again, plain in zip(*(engine.backend.parameters for engine in engines), strict=True):
        assert first.grad is not None
        assert again.grad is not None
        assert torch.equal(first.grad, again.grad)
        torch.testing.assert_close(first.grad, plain.grad, rtol=1e-4, atol=1e-4)


class Deaf(nn.Module):
    """A model that ignores position ids and attention masks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = tiny_model()
        self.config = self.inner.config

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    def forward(self, input_ids: Any, use_cache: bool, **_: Any) -> Any:
        return self.inner(input_ids=input_ids, use_cache=use_cache)


def test_packed_rows_in_bfloat16_have_the_gradients_of_padded_rows_but_for_rounding() -> None:
    loss = LossSettings()
    samples = make_batch(0, loss).samples
    grads = []
    for share in (True, False):
        engine = LocalEngine(
            tiny_model(0), LearnerSettings(), loss, pad_token=0, temperature=0.8, compute_dtype=torch.bfloat16
        )
        assert engine.backend.packs_rows
        engine.backend.packs_rows = share
        engine.backward(samples)
        grads.append(torch.cat([parameter.grad.flatten() for parameter in engine.backend.parameters]))
    assert (grads[0] - grads[1]).norm() < 0.05 * grads[1].norm()


def mistral(**changes: Any) -> MistralForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, **SIZES, **changes)).eval()


def test_only_models_that_pass_position_ids_and_the_packing_on_to_their_attention_pack_rows() -> None:
    assert can_pack_rows(tiny_model())
    eager = tiny_model()
    eager.set_attn_implementation("eager")
    assert not can_pack_rows(eager)
    assert eager.config._attn_implementation == "eager"
    assert can_pack_rows(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, **SIZES)).eval())
    assert not can_pack_rows(Deaf())
    assert not can_pack_rows(mistral(sliding_window=64))


@pytest.mark.parametrize("rope", ["linear", "dynamic", "longrope"])
def test_models_whose_positions_depend_on_the_longest_sample_of_a_row_do_not_pack_rows(rope: str) -> None:
    own = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 4096}
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, **(own if rope == "longrope" else {})}
    model = mistral(sliding_window=None, rope_parameters=parameters)
    assert can_pack_rows(model) == (rope == "linear")
