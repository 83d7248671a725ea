"""Tests of a sharded learner's checkpoints, exports, memory and precision, and of how it ends when a rank fails."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from gleanrl.config.settings import CriticSettings, LossSettings, ModelSettings
from gleanrl.learners.distributed.ranks import Ranks
from gleanrl.learners.distributed.sharded import ShardedEngine
from gleanrl.learners.models import load_model
from gleanrl.learners.torch import TorchLearner
from gleanrl.utils import weights
from gleanrl.utils.errors import UserError
from tests.builders import tiny_model
from tests.learners.many import asked, ended, led
from tests.learners.test_sharded import batch_of, close, make, series, train, updates

pytestmark = pytest.mark.xdist_group("ranks")  # tests.learners.many.led

LOSS = LossSettings(kl_coefficient=0.05)
OPTIONS: dict[str, Any] = {"lr": 1e-3, "dtype": torch.float64, "critic": CriticSettings(model="own")}


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_checkpoint_continues_on_any_number_of_processes(tmp_path: Path) -> None:
    """A checkpoint of two processes continues on one, two and four, and one of one process on two."""
    whole = train(None, LOSS, range(8), OPTIONS)
    led(2, train, LOSS, range(4), OPTIONS, None, tmp_path / "two")
    train(None, LOSS, range(4), OPTIONS, None, tmp_path / "one")
    files = {str(path.relative_to(tmp_path / "two")) for path in (tmp_path / "two").rglob("*") if path.is_file()}
    assert files == {"learner.json", "tensors/.metadata", "tensors/__0_0.distcp", "tensors/__1_0.distcp"}
    continued = {
        "2 to 1": train(None, LOSS, range(4, 8), OPTIONS, tmp_path / "two"),
        "2 to 2": led(2, train, LOSS, range(4, 8), OPTIONS, tmp_path / "two"),
        "2 to 4": led(4, train, LOSS, range(4, 8), OPTIONS, tmp_path / "two"),
        "1 to 2": led(2, train, LOSS, range(4, 8), OPTIONS, tmp_path / "one"),
    }
    for how, run in continued.items():
        expected = {**whole, "losses": whole["losses"][4:], "norms": whole["norms"][4:]}
        assert run["losses"] == pytest.approx(expected["losses"], rel=1e-8), how
        close(run, expected, 1e-8)


def train_adapters(ranks: Ranks | None, steps: range, folder: Any = None, then: Any = None) -> dict[str, Any]:
    """As `train`, but with LoRA adapters, and the returned weights are the adapters."""
    learner = make(ranks, LOSS, torch.float64, lr=1e-2, lora_rank=2)
    if folder is not None:
        learner.load(folder)
    told = updates(learner, (batch_of(step, LOSS) for step in steps))
    if then is not None:
        learner.save(then)
    return {**series(told), "weights": {name: tensor.clone() for name, tensor in asked(learner.engine, adapters_of)}}


def adapters_of(engine: Any) -> list[tuple[str, torch.Tensor]]:
    parameters = [
        (name, parameter.detach()) for name, parameter in engine.backend.model.named_parameters() if "lora_" in name
    ]
    return [(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor) for name, tensor in parameters]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_continue_on_one_two_and_one_process(tmp_path: Path) -> None:
    whole = train_adapters(None, range(6))
    train_adapters(None, range(2), None, tmp_path / "one")
    led(2, train_adapters, range(2, 4), tmp_path / "one", tmp_path / "two")
    last = train_adapters(None, range(4, 6), tmp_path / "two")
    assert any("lora_B" in name and tensor.count_nonzero() for name, tensor in last["weights"].items())
    close(last, {**whole, "losses": whole["losses"][4:], "norms": whole["norms"][4:]}, 1e-8)


def save_and_spoil(ranks: Ranks, folder: Path) -> list[str]:
    """Return the errors of loading bad checkpoints; the learner must be unchanged after each of them."""
    learner = make(ranks, LossSettings(), torch.float32)
    learner.save(folder / "fresh")  # before any update the optimizer has no state
    learner.load(folder / "fresh")
    asyncio.run(learner.update(batch_of(0, LossSettings())))
    learner.save(folder / "good")
    said: list[str] = []

    def refused(path: Path, other: TorchLearner = learner) -> None:
        before = {name: tensor.clone() for name, tensor in other.weights().items()}
        with pytest.raises(UserError) as caught:
            other.load(path)
        said.append(str(caught.value))
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.weights().items())

    refused(folder / "nothing")
    refused(folder / "good", make(ranks, LossSettings(), torch.float32, model=tiny_model(0, hidden=8)))
    refused(folder / "good", make(ranks, LossSettings(kl_coefficient=0.1), torch.float32))
    learner = make(ranks, LossSettings(), torch.float32)
    refused(folder / "one", learner)
    shard = folder / "good" / "tensors" / "__1_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    refused(folder / "good", learner)
    shard.unlink()
    refused(folder / "good", learner)
    shard.write_bytes(data)
    learner.load(folder / "good")
    asyncio.run(learner.update(batch_of(1, LossSettings())))
    return said


def test_a_checkpoint_that_does_not_fit_or_is_damaged_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    make(None, LossSettings(), torch.float32, model=tiny_model(0, hidden=8)).save(tmp_path / "one")
    said = led(2, save_and_spoil, tmp_path)
    for line, sign in zip(
        said,
        (
            "learner.json: missing",
            "weights/model.embed_tokens.weight is (40, 16) in the file, (40, 8) in the model",
            "is of another model: reference/model.embed_tokens.weight is not in the file",
            "(40, 8) in the file, (40, 16) in the model",
            "missing or damaged",
            "missing or damaged",
        ),
        strict=True,
    ):
        assert sign in line


def export(ranks: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    learner = make(ranks, LossSettings(), torch.float32, lr=0.01, lora_rank=2)
    asyncio.run(learner.update(batch_of(0, LossSettings())))
    learner.export(folder)
    learner.export_adapters(folder.with_name("adapters"), "the base")
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def test_an_export_contains_the_whole_model_or_the_whole_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    weights = led(2, export, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded = dict(model.named_parameters())
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor), name
    assert weights["model.norm.weight"].any()
    assert any(not torch.equal(t, tiny_model().get_parameter(n)) for n, t in weights.items())
    adapted = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "adapters")
    tokens = torch.arange(1, 12)[None]
    torch.testing.assert_close(adapted(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


# --- publication --------------------------------------------------------------------------------
def publish(ranks: Ranks) -> dict[str, Any]:
    """Return the weights gathered in several buckets and in one, and after a reader that stopped in the middle."""
    learner = make(ranks, LossSettings(), torch.float32, lr=0.01, published_dtype=torch.bfloat16)
    whole = {name: tensor.clone() for name, tensor in learner.engine.weights().items()}
    size, weights.BUCKET = weights.BUCKET, 2000
    try:
        stopped, parts = learner.weights(), dict(learner.weights())
        layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in parts.items()}
        assert layout == stopped.layout
        next(iter(stopped.values()))
        asyncio.run(learner.update(batch_of(0, LossSettings())))
        with pytest.raises(RuntimeError):
            dict(stopped)
        return {"whole": whole, "parts": parts, "later": dict(learner.weights())}
    finally:
        weights.BUCKET = size


def test_weights_are_gathered_in_buckets_and_cannot_be_read_after_an_update() -> None:
    found = led(2, publish)
    for name, tensor in found["whole"].items():
        assert torch.equal(found["parts"][name], tensor.bfloat16())
    assert any(not torch.equal(found["later"][name], tensor) for name, tensor in found["parts"].items())


def publish_and_die(ranks: Ranks) -> str:
    learner = make(ranks, LossSettings(), torch.float32)
    weights.BUCKET = 2000
    values = iter(learner.weights().values())
    next(values)
    asked(learner.engine, _die_gathering)
    with pytest.raises(UserError) as caught:
        list(values)
    return str(caught.value)


def _die_gathering(engine: Any) -> None:
    if not engine.backend.replicas.leads:
        engine.backend.gather = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_while_weights_are_gathered_ends_all() -> None:
    statuses, said = ended(2, publish_and_die)
    assert "--resume" in said
    assert statuses == [0, -signal.SIGKILL]


# --- a model in files ---------------------------------------------------------------------------
def from_files(ranks: Ranks | None, folder: Path, options: dict[str, Any], then: Any = None) -> dict[str, Any]:
    """Train a model of files, which several processes map; return losses, norms and weights, and save in ``then``."""
    settings = ModelSettings(init=str(folder), max_context=64, device="cpu")
    model, _ = load_model(settings, mapped=ranks is not None)
    learner = make(ranks, LOSS, torch.float32, model=model, lr=1e-3, **options)
    if then is not None:
        learner.save(then)
    first = {f"first {name}": tensor.clone() for name, tensor in learner.weights().items()}
    told = updates(learner, (batch_of(step, LOSS) for step in range(2)))
    return {**series(told), "weights": first | {name: tensor.clone() for name, tensor in learner.weights().items()}}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_files_is_trained_as_in_one_process(tmp_path: Path) -> None:
    """Its reference model, its critic and its adapters are made from the files too."""
    save_half(tmp_path / "model")
    for name, options in {"critic": {"critic": CriticSettings(model="own")}, "adapters": {"lora_rank": 2}}.items():
        one = from_files(None, tmp_path / "model", options)
        many = led(2, from_files, tmp_path / "model", options, tmp_path / name)
        for tensor in [key for key in one["weights"] if key.startswith("first")]:
            assert torch.equal(many["weights"][tensor], one["weights"][tensor])
        close(many, one, 1e-5)
    model, _ = load_model(ModelSettings(init=str(tmp_path / "model"), max_context=64, device="cpu"))
    make(None, LOSS, torch.float32, model=model, lora_rank=2).load(tmp_path / "adapters")  # the same base model


def save_half(folder: Path) -> None:
    """Write a model in bfloat16 and a tokenizer."""
    settings = ModelSettings(hidden_size=32, layers=2, heads=2, kv_heads=2, max_context=64, vocabulary=128)
    model, tokenizer = load_model(settings, texts=["a text"])
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- memory and precision -----------------------------------------------------------------------
def parts(ranks: Ranks) -> dict[str, Any]:
    learner = make(ranks, LossSettings(), torch.float32, lr=0.01)
    asyncio.run(learner.update(batch_of(0, LossSettings())))
    state = asked(learner.engine, _numbers)
    return {"numbers": state, "whole": sum(t.numel() for t in learner.weights().values())}


def _numbers(engine: Any) -> list[int]:
    """Return the numbers of elements of parameters, gradients and first moments in this process."""
    own = [p.to_local() for p in engine.backend.parameters]
    moments = [engine.backend.optimizer.state[p]["exp_avg"].to_local() for p in engine.backend.parameters]
    return [sum(t.numel() for t in ts) for ts in (own, [p.grad.to_local() for p in engine.backend.parameters], moments)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_process_has_its_share_of_parameters_gradients_and_moments() -> None:
    found = led(2, parts)
    for number in found["numbers"]:
        assert found["whole"] / 2 <= number < 1.2 * found["whole"] / 2


def bfloat16(ranks: Ranks | None, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    learner = make(ranks, LossSettings(), torch.float32, lr=1e-3, compute_dtype=dtype)
    scores = [score.logprobs for score in learner.engine.score(batch_of(5, LossSettings()).samples)]
    told = [asyncio.run(learner.update(batch_of(step, LossSettings())))["learner/grad_norm"] for step in range(3)]
    dtypes = {str(tensor.dtype) for tensor in learner.weights().values()}
    return {"scores": scores, "norms": told, "dtypes": dtypes}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mixed_precision_keeps_float32_weights() -> None:
    one, many = bfloat16(None), led(2, bfloat16)
    assert many["dtypes"] == {"torch.float32"}
    exact = bfloat16(None, torch.float32)
    for ours, theirs, exactly in zip(many["scores"], one["scores"], exact["scores"], strict=True):
        assert ours == pytest.approx(theirs, abs=0.1)
        assert ours != pytest.approx(exactly, abs=1e-4)
    assert many["norms"] == pytest.approx(one["norms"], rel=0.05)


# --- how it ends --------------------------------------------------------------------------------
def struck(ranks: Ranks, how: str) -> tuple[str, str, float]:
    """Let rank 1 fail in an update; return the errors of this update and of the next, and the seconds they took."""
    learner = make(ranks, LossSettings(), torch.float32)
    assert isinstance(learner.engine, ShardedEngine)
    asyncio.run(learner.update(batch_of(0, LossSettings())))
    asked(learner.engine, {"error": _fail, "death": _die}[how])
    said: list[str] = []
    started = time.perf_counter()
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            asyncio.run(learner.update(batch_of(1, LossSettings())))
        said.append(str(caught.value))
    return said[0], said[1], time.perf_counter() - started


def _fail(engine: Any) -> None:
    """Make rank 1 raise in the middle of a forward pass, while the others wait for it in a collective."""
    if not engine.backend.replicas.leads:
        engine.backend.model.model.layers[1].register_forward_pre_hook(_raise)


def _raise(*_: Any) -> None:
    raise MemoryError("no memory is left")


def _die(engine: Any) -> None:
    if not engine.backend.replicas.leads:
        engine.backend.model.model.layers[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def test_an_error_in_one_rank_ends_all_and_is_reported_by_rank_0() -> None:
    statuses, (first, second, seconds) = ended(2, struck, "error")
    assert first == second == "rank 1 of 2: MemoryError: no memory is left"
    assert statuses == [0, 1]
    assert seconds < 30


def test_a_killed_rank_ends_all() -> None:
    statuses, (first, second, seconds) = ended(2, struck, "death")
    assert "a process of the learner is gone" in first
    assert "--resume" in first
    assert first == second
    assert statuses == [0, -signal.SIGKILL]
    assert seconds < 30


def test_the_other_ranks_end_when_rank_0_is_killed() -> None:
    statuses, result = ended(2, leave)
    assert result is None
    assert statuses == [-signal.SIGKILL, 1]


def leave(ranks: Ranks) -> None:
    make(ranks, LossSettings(), torch.float32)
    os.kill(os.getpid(), signal.SIGKILL)
