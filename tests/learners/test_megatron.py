"""Tests of the Megatron backend in real processes: what it computes equals what one process computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gleanrl.config.settings import CriticSettings, LossSettings
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.mapped import replace_parameters, stored_weights, use_stored
from gleanrl.utils.errors import UserError
from tests.builders import VOCABULARY, tiny_model
from tests.learners import test_sharing
from tests.learners.many import asked, led
from tests.learners.test_sharded import STEPS, batch_of, close, gradients_of, make, series, updates
from tests.learners.test_torch import LOSSES

pytestmark = [
    pytest.mark.xdist_group("ranks"),  # tests.learners.many.led
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="needs megatron-core: make megatron installs it"
    ),
]

Layout = tuple[int, int, int]  # numbers of tensor-parallel, pipeline-parallel and data-parallel groups
TWO: list[Layout] = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
FOUR: list[Layout] = [(2, 2, 1), (2, 1, 2), (1, 2, 2)]
LAYOUTS = [*TWO, *(pytest.param(layout, marks=pytest.mark.heavy) for layout in FOUR)]
CASES = {
    **LOSSES,
    "reference": {"kl_coefficient": 0.1},
    "entropy": {"entropy_coefficient": 0.01},
}


def processes(layout: Layout) -> int:
    tensor, pipeline, data = layout
    return tensor * pipeline * data


def spread(layout: Layout | None) -> dict[str, Any]:
    """Return the settings of a layout; None stands for transformers, in one process or sharded by FSDP2."""
    if layout is None:
        return {}
    return {"backend": "megatron", "tensor_parallel": layout[0], "pipeline_parallel": layout[1]}


def model_of(family: str, dtype: torch.dtype) -> Any:
    """Return a random model of two layers whose heads two processes can divide. Its vocabulary has an odd part."""
    if family == "qwen2":
        return tiny_model(0, dtype, hidden=32, kv_heads=2)
    if family == "apart":  # transformers does not tie what differs in the files, whatever the config says
        model = tiny_model(0, dtype, hidden=32, kv_heads=2)
        model.lm_head.weight = torch.nn.Parameter(tiny_model(1, dtype, hidden=32).lm_head.weight.detach())
        return model
    sizes = {"vocab_size": VOCABULARY + 1, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if family == "llama":
            rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope |= {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
            config = LlamaConfig(**sizes, **heads, tie_word_embeddings=False, rope_parameters=rope)
            model: Any = LlamaForCausalLM(config)
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, head_dim=12, tie_word_embeddings=True))
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)  # otherwise norms are ones and biases are zeros
    return model.to(dtype).eval()


# --- gradients ---
def gradients(ranks: Ranks | None, layout: Layout | None) -> dict[str, Any]:
    """Return, for each case, the undivided gradients and the statistics of the backward pass, in float64."""
    found: dict[str, Any] = {}
    for name, options in CASES.items():
        loss = LossSettings.model_validate(options)
        packs = name == "reference"  # with samples of a prompt, several of which fit into a packed row
        options = {"tokens_per_microbatch": 400 if packs else 60, "old_logprobs": "recompute", **spread(layout)}
        learner = make(ranks, loss, torch.float64, model=model_of("qwen2", torch.float64), **options)
        samples = (test_sharing.make_batch(0, loss) if packs else batch_of(0, loss)).samples
        seen = learner.engine.backward(samples, version=5, untouched=True)
        found[name] = asked(learner.engine, gradients_of if layout is None else summed), seen
        learner.engine.discard()
    return found


def summed(engine: Any) -> dict[str, torch.Tensor]:
    return {name: gradient.clone() for name, gradient in engine.backend.gradients().items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_of_every_loss_equal_those_of_one_process(layout: Layout) -> None:
    one, many = gradients(None, None), led(processes(layout), gradients, layout)
    for name, (expected, seen) in one.items():
        found, told = many[name]
        assert found.keys() == expected.keys()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-9, atol=1e-11, msg=f"{name} {parameter}")
        assert told.trained == seen.trained
        assert told.loss == pytest.approx(seen.loss, rel=1e-9, abs=1e-11)
        assert told.left_out_tokens == seen.left_out_tokens
        assert told.statistics.metrics() == pytest.approx(seen.statistics.metrics(), rel=1e-9)
    assert many["reference"][1].computed < many["reference"][1].real  # packed rows share prefixes


# --- whole runs ---
def train(
    ranks: Ranks | None, layout: Layout | None, steps: range, options: dict[str, Any], folder: Any = None
) -> dict[str, Any]:
    """Train, from the checkpoint in ``folder`` unless the steps begin at 0; return losses, norms and weights."""
    own = {"dtype": torch.float32, "lr": 1e-3, "tokens_per_microbatch": 60, "weight_decay": 0.1} | options
    loss = LossSettings.model_validate(own.pop("loss", {}))
    learner = make(ranks, loss, model=model_of("qwen2", own["dtype"]), **own, **spread(layout))
    if steps.start:
        learner.load(folder)
    told = updates(learner, (batch_of(step, loss) for step in steps))
    if folder is not None and not steps.start:
        learner.save(folder)
    return {**series(told), "weights": {name: tensor.clone() for name, tensor in learner.weights().items()}}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_twenty_steps_equal_those_of_one_process(layout: Layout) -> None:
    options = {"updates_per_step": 2, "distributed_optimizer": layout[2] > 1, "activation_checkpointing": layout[1] > 1}
    one = train(None, None, range(STEPS), {"updates_per_step": 2})
    close(led(processes(layout), train, layout, range(STEPS), options), one, 2e-5)


def test_a_checkpoint_continues_on_every_layout_and_backend(tmp_path: Path) -> None:
    """A run is saved by one process, by FSDP2 and by Megatron, and each of them continues from each."""
    options = {"loss": {"kl_coefficient": 0.1}}
    kinds: dict[str, Layout | None] = {"one": None, "fsdp": None, "tensor": TWO[0], "pipeline": TWO[1], "data": TWO[2]}

    def run(kind: str, steps: range, folder: Path) -> dict[str, Any]:
        own = {**options, "distributed_optimizer": kind == "data"}
        given = kinds[kind], steps, own, folder
        return train(None, *given) if kind == "one" else led(2, train, *given)

    for kind in kinds:
        run(kind, range(2), tmp_path / kind)
    expected = run("one", range(2, 4), tmp_path / "one")
    for first, then in (
        ("pipeline", "one"),
        ("one", "data"),
        ("data", "tensor"),
        ("tensor", "fsdp"),
        ("fsdp", "pipeline"),
    ):
        close(run(then, range(2, 4), tmp_path / first), expected, 2e-5)


# --- models ---
def scores(ranks: Ranks | None, layout: Layout | None, family: str) -> dict[str, Any]:
    """Return the weights of a model, and what it and its reference model compute.

    The weights are stored in bfloat16. One process holds them in float32, several convert them when they place them.
    """
    model = model_of(family, torch.float32)
    stored = {name: tensor.bfloat16() for name, tensor in stored_weights(model).items()}
    if ranks is None:
        replace_parameters(model, lambda name, _: stored[name].float())
    else:
        use_stored(model, stored, ranks.device)
    learner = make(ranks, LossSettings(kl_coefficient=0.1), torch.float32, model=model, **spread(layout))
    weights = {name: tensor.clone() for name, tensor in learner.weights().items()}
    samples = test_sharing.make_batch(0, LossSettings()).samples
    found = learner.engine.score(samples) + learner.engine.score(samples, reference=True)
    learner.engine.backward(samples)
    gradients = asked(learner.engine, gradients_of if layout is None else summed)
    return {"weights": weights, "scores": [row for score in found for row in score], "gradients": gradients}


@pytest.mark.parametrize("layout", TWO[:2], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "apart"])
def test_each_family_has_the_log_probs_weights_and_gradients_of_transformers(family: str, layout: Layout) -> None:
    one, many = scores(None, None, family), led(2, scores, layout, family)
    assert many["weights"].keys() == one["weights"].keys()
    for name, tensor in one["weights"].items():
        assert torch.equal(many["weights"][name], tensor), name
    for ours, theirs in zip(many["scores"], one["scores"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    for name, gradient in one["gradients"].items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(many["gradients"][name], gradient, rtol=0, atol=1e-4 * largest, msg=name)


# --- refusals ---
def refused(ranks: Ranks) -> list[str]:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2)).eval()
    said = []
    for options in (
        {"tensor_parallel": 3},
        {"tensor_parallel": 2, "model": tiny_model()},
        {"pipeline_parallel": 2, "tensor_parallel": 2},
        {"model": gpt2},
        {"lora_rank": 2},
        {"critic": CriticSettings()},
    ):
        model = options.pop("model", None) or model_of("qwen2", torch.float32)
        with pytest.raises(UserError) as caught:
            make(ranks, LossSettings(), torch.float32, model=model, backend="megatron", **options)
        said.append(str(caught.value))
    return said


def test_what_megatron_cannot_train_is_refused_in_one_line() -> None:
    parts = ("3 x 1", "num_key_value_heads", "2 x 2", "gpt2", "lora_rank", "critic")
    for message, part in zip(led(2, refused), parts, strict=True):
        assert part in message
        assert "\n" not in message
