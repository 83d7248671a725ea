"""Tests of ``load_model`` and the tiny model's tokenizer: from text, from a directory, and with wrong settings."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Phi3Config,
)

from gleanrl.config.settings import ModelSettings
from gleanrl.learners.models import compute_dtype, empty_model, export, load_model, merged_weights, resolve_device
from gleanrl.learners.tiny import build_model, build_tokenizer
from gleanrl.utils.errors import UserError

TEXTS = [
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a "
    "cabinet 1, a cabinet 2, a fridge 1, and a sinkbasin 1.\n\nYour task is to: put a hot apple in fridge.",
    "go to fridge 1",
    "You arrive at fridge 1. The fridge 1 is closed.",
    "open fridge 1",
    "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1, and a mug 2.",
    "take apple 1 from fridge 1",
    "You pick up the apple 1 from the fridge 1.",
    "go to cabinet 2",
    "You arrive at cabinet 2. The cabinet 2 is closed.",
    "Nothing happens.",
]
TINY = ModelSettings(hidden_size=32, layers=2, heads=2, kv_heads=1, max_context=64, vocabulary=256)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(TEXTS * 3, 512)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = load_model(TINY, texts=TEXTS, seed=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_name_is_one_token_everywhere_in_a_text(tokenizer) -> None:
    fridge = tokenizer.convert_tokens_to_ids("fridge 1")
    assert fridge != tokenizer.unk_token_id
    for text in ("fridge 1", "go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."):
        assert tokenizer(text).input_ids.count(fridge) == text.count("fridge 1")
    assert len(tokenizer("You arrive at fridge 1. The fridge 1 is closed.").input_ids) == 5
    assert len(tokenizer("take mug 1 from cabinet 1").input_ids) == 4


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n")))
def test_ascii_text_survives_a_round_trip(text: str) -> None:
    tokenizer = _shared_tokenizer()
    if not any(special in text for special in tokenizer.all_special_tokens):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_characters_of_the_training_text_round_trip_and_others_become_unknown(tokenizer) -> None:
    arrows = build_tokenizer(["if A → B", "B ∨ A"], 256)
    assert arrows.decode(arrows("A ∨ B → A").input_ids) == "A ∨ B → A"
    assert tokenizer.unk_token_id in tokenizer("é").input_ids


def test_the_vocabulary_has_at_most_the_configured_size_and_too_small_sizes_are_refused() -> None:
    many = [f"thing{chr(97 + i % 26)}{chr(97 + i // 26)} {n} is here" for i in range(100) for n in (1, 2, 3)]
    assert len(build_tokenizer(many, 200)) == 200
    with pytest.raises(UserError, match=r"model\.vocabulary = 50"):
        build_tokenizer(TEXTS, 50)


def test_the_chat_template_adds_one_token_per_role_and_one_per_end(tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "open fridge 1"}, {"role": "assistant", "content": "go to fridge 1"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<|user|>", "open ", "fridge 1", "<|end|>"),
        *("<|assistant|>", "go to ", "fridge 1", "<|end|>", "<|assistant|>"),
    ]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == ids
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    with pytest.raises(Exception, match="no such role"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}])


def test_a_saved_tiny_model_is_loaded_with_its_own_tokenizer(tokenizer, tmp_path: Path) -> None:
    build_model(TINY, tokenizer, seed=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = load_model(ModelSettings(init=str(tmp_path), max_context=TINY.max_context, device="cpu"))[1]
    for text in TEXTS:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert again.decode(again(text)["input_ids"]) == text


def test_the_seed_alone_determines_the_tiny_weights() -> None:
    before = torch.random.get_rng_state()
    one, two, other = (load_model(TINY, texts=TEXTS, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_saved_directory_gives_the_same_model_here_and_in_transformers(saved: Path) -> None:
    model, tokenizer = load_model(TINY.model_copy(update={"init": str(saved)}))
    plain = AutoModelForCausalLM.from_pretrained(saved)
    ids = torch.tensor([tokenizer("open fridge 1").input_ids])
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert model.dtype == torch.float32
    assert not model.training


def test_a_mapped_model_equals_the_model_in_memory_and_cannot_be_changed(saved: Path, tmp_path: Path) -> None:
    settings = TINY.model_copy(update={"init": str(tmp_path)})
    for dtype in (torch.float32, torch.bfloat16):
        plain = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
        plain.save_pretrained(tmp_path, max_shard_size="20KB")
        AutoTokenizer.from_pretrained(saved).save_pretrained(tmp_path)
        (mapped, _), (whole, _) = (load_model(settings, mapped=mapped) for mapped in (True, False))
        ids = torch.arange(9)[None]
        assert torch.equal(mapped(ids).logits, whole(ids).logits)
        assert mapped.dtype == torch.float32
        copied = dict(copy.deepcopy(mapped).named_parameters())
        for name, parameter in whole.named_parameters():
            assert torch.equal(mapped.get_parameter(name).clone(), parameter)
            assert torch.equal(copied[name], parameter)
            with pytest.raises(RuntimeError), torch.no_grad():
                mapped.get_parameter(name).zero_()


def test_a_model_of_several_dtypes_keeps_their_precision_when_it_is_to_be_mapped(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    tensors = load_file(saved / "model.safetensors")
    tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items() if "proj" in name}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, _ = load_model(TINY.model_copy(update={"init": str(tmp_path)}), mapped=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name].float())


def test_an_export_of_several_files_is_loaded_by_transformers(saved: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("gleanrl.learners.models.SHARD", "20KB")
    model, _ = load_model(TINY.model_copy(update={"init": str(saved)}))
    weights = dict(model.named_parameters())
    weights["model.norm.weight"] = weights["model.norm.weight"].detach().double()
    export(tmp_path / "model", model, weights)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


def test_an_export_has_the_buffers_that_are_stored_with_a_model(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    gemma = Gemma4TextConfig(**sizes, **heads, global_head_dim=8, vocab_size_per_layer_input=64)
    glm = Glm4MoeConfig(**sizes, **heads, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    for config, buffer in ((gemma, "layers.1.layer_scalar"), (glm, "layers.1.mlp.gate.e_score_correction_bias")):
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            model.base_model.get_buffer(buffer).uniform_()
        model.register_buffer("updates", torch.tensor(3))
        folder = tmp_path / config.model_type
        export(folder, model, merged_weights(model))
        assert load_file(folder / "model.safetensors")["updates"] == 3
        loaded, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not found["missing_keys"]
        ids = torch.arange(9)[None]
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_chat_template_of_the_settings_replaces_the_tokenizers(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    settings = TINY.model_copy(update={"init": str(saved), "chat_template": str(tmp_path / "mine.jinja")})
    _, tokenizer = load_model(settings)
    tokenizer.save_pretrained(tmp_path / "exported")
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported.apply_chat_template([{"role": "user", "content": "go"}], tokenize=False) == "[go]"
    (tmp_path / "mine.jinja").unlink()
    with pytest.raises(UserError, match=r"model\.chat_template"):
        load_model(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 30, "heads": 4}, r"model\.hidden_size = 30"),
        ({"heads": 4, "kv_heads": 3, "hidden_size": 64}, r"model\.heads = 4 must be a multiple"),
        ({"chat_template": "chatml.jinja"}, r"model\.chat_template"),
        ({"device": "cuda:99"}, r"model\.device = 'cuda:99'"),
        ({"device": "abacus"}, r"model\.device = 'abacus' is no device"),
        ({"device": "mps"}, r"model\.device = 'mps': Glean RL runs on cpu and cuda"),
        ({"init": "/no/such/place"}, "no such directory"),
        ({"init": "./no-such-place"}, "no such directory"),
        ({"init": "someone/some-model-that-is-not-there"}, "HF_HUB_OFFLINE forbids"),
    ],
)
def test_a_mistake_in_the_settings_is_named(change: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        load_model(TINY.model_copy(update=change), texts=TEXTS)


def test_a_directory_without_a_suitable_model_is_named(saved: Path, tmp_path: Path, tokenizer) -> None:
    def load(folder: Path, **change: object) -> None:
        load_model(TINY.model_copy(update={"init": str(folder), **change}))

    with pytest.raises(UserError, match=r"max_context = 65 is longer than the 64"):
        load(saved, max_context=65)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    positions = {"max_position_embeddings": 64, "original_max_position_embeddings": 32}
    Phi3Config(**positions, rope_parameters=rope).save_pretrained(tmp_path / "long")
    with pytest.raises(UserError, match=r"\(longrope\) change .* exceeds 32 tokens"):
        load(tmp_path / "long", max_context=33)
    with pytest.raises(UserError, match="tokenizer"):
        load(tmp_path / "long", max_context=32)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        load(tmp_path / "empty")
    with pytest.raises(UserError, match="is a file"):
        load(saved / "config.json")
    bert = BertForMaskedLM(BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=1))
    bert.save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match="is a BertForMaskedLM, not a causal"):
        load(tmp_path / "bert")
    plain = build_tokenizer(TEXTS, 256)
    plain.chat_template = None
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(tmp_path / "mute")
    plain.save_pretrained(tmp_path / "mute")
    with pytest.raises(UserError, match="no chat template"):
        load(tmp_path / "mute")


def test_a_damaged_directory_is_an_error_of_one_line(saved: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(TINY.model_copy(update={"init": str(tmp_path)}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    for mapped in (False, True):
        with pytest.raises(UserError, match="cannot be loaded"):
            load_model(TINY.model_copy(update={"init": str(tmp_path)}), mapped=mapped)
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_model(TINY.model_copy(update={"init": str(tmp_path)}))
    assert "\n" not in str(caught.value)
    config = json.loads((saved / "config.json").read_text()) | {"hidden_act": "sillu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (load_model, empty_model):
        with pytest.raises(UserError, match="sillu"):
            load(TINY.model_copy(update={"init": str(tmp_path)}))


def test_devices_and_dtypes_resolve() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert resolve_device("cpu") == cpu
    assert compute_dtype(TINY, cpu) == torch.float32
    assert compute_dtype(TINY, cuda) == torch.bfloat16
    assert compute_dtype(TINY.model_copy(update={"dtype": "bfloat16"}), cpu) == torch.bfloat16


_cache: list = []


def _shared_tokenizer():
    if not _cache:
        _cache.append(build_tokenizer(TEXTS * 3, 512))
    return _cache[0]


def test_an_exported_tiny_model_is_the_same_under_transformers_auto_classes(tmp_path: Path) -> None:
    texts = ["You arrive at fridge 1. The fridge 1 is closed.", "go to fridge 1"] * 5
    tokenizer = build_tokenizer(texts, 256)
    model = build_model(ModelSettings(hidden_size=32, layers=1, heads=2, kv_heads=1), tokenizer, seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
    messages = [{"role": "user", "content": texts[0]}]
    same = [t.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] for t in (loaded, tokenizer)]
    assert same[0] == same[1]
    ids = torch.tensor([tokenizer(texts[0])["input_ids"]])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model.eval()(ids).logits)


def test_a_question_that_demonstrations_repeat_does_not_become_a_token() -> None:
    words = ["stone", "river", "cloud", "maple", "tiger", "lemon"]
    texts = [f"Spell this word backward (example: sun -> nus): {word}, please and thank you" for word in words] * 4
    tokenizer = build_tokenizer([*texts, *["Nothing happens."] * 4], 512)
    for text in texts[: len(words)]:
        assert len(tokenizer(text)["input_ids"]) > 3
    assert len(tokenizer("Nothing happens.")["input_ids"]) == 1
