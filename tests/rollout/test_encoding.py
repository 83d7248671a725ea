"""Tests of `Encoder` and `cache_rendering` of `gleanrl.rollout.renderer`: for every kind of tokenizer, the ids equal
those of calling the tokenizer, and equal messages are rendered once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from gleanrl.learners.tiny import build_tokenizer
from gleanrl.rollout.renderer import Encoder, Renderer, cache_rendering
from gleanrl.types import Message
from gleanrl.utils.errors import UserError
from tests.rollout.test_context import CHATML
from tests.strategies import examples

CORPUS = [
    "You arrive at fridge 1. The fridge 1 is closed.",
    "Nothing happens.",
    "naïve café 東京 → {'x': [1, 2]}\n\n",
] * 5
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
KINDS = ["tiny", "bytes", "pieces", "words", "stripping"]


def trained(model: Any, trainer: Any, prepare: Callable[[Tokenizer], None]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    prepare(backend)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(name, backend.token_to_id(name)) for name in ("<s>", "</s>")],
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    made.add_special_tokens({"extra_special_tokens": SPECIAL[3:]})
    made.chat_template = CHATML
    return made


@lru_cache
def tokenizer(kind: str) -> Any:
    """Return a trained tokenizer: ``tiny`` of `build_tokenizer`; ``bytes``, byte-level BPE as in GPT-2, Llama 3 and
    Qwen; ``pieces``, a unigram model as in SentencePiece; ``words``, WordPiece as in BERT; ``stripping``, as ``pieces``
    with added tokens that absorb the spaces around them, as in T5."""
    if kind == "tiny":
        return build_tokenizer(CORPUS, 256)
    if kind == "bytes":

        def prepare(backend: Tokenizer) -> None:
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()

        start = pre_tokenizers.ByteLevel.alphabet()
        return trained(
            models.BPE(), trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=start), prepare
        )
    if kind == "words":

        def prepare(backend: Tokenizer) -> None:
            backend.normalizer = normalizers.BertNormalizer(lowercase=True)
            backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL)
        return trained(models.WordPiece(unk_token="<unk>"), trainer, prepare)

    def prepare(backend: Tokenizer) -> None:
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")

    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>")
    made = trained(models.Unigram(), trainer, prepare)
    if kind == "stripping":
        made.add_tokens(
            [
                AddedToken("<sep>", lstrip=True, rstrip=True, special=True),
                AddedToken("ＦＲＩＤＧＥ", normalized=True),
                AddedToken("ing", single_word=True),
            ]
        )
    return made


def called(made: Any, text: str) -> list[int]:
    return made(text, add_special_tokens=False)["input_ids"]


HOSTILE = [
    *(
        *SPECIAL,
        "<sep>",
        "ＦＲＩＤＧＥ",
        "ing",
        "<|end|>",
        "<|user|>",
        "<|unk|>",
        "<|im_",
        "|>",
        "</s",
        "fridge 1",
        "Nothing happens.",
    ),
    *(
        "",
        " ",
        "   ",
        "\n",
        "\t",
        "\r\n",
        "\0",
        "▁",
        "é",
        "é",
        "東",
        "🧊",
        "👩‍👩‍👧",
        "‏",
        "﷽",
        "{'x': [1]}",
        "<FILL_ME>",
    ),
]
TEXT = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=12), max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(150))
@given(text=TEXT)
def test_ids_equal_those_of_calling_the_tokenizer(kind: str, text: str) -> None:
    made = tokenizer(kind)
    encoder = Encoder(made)
    found = encoder.ids(text)
    assert found.dtype == np.int32
    assert found.tolist() == called(made, text)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(parts=st.lists(TEXT, min_size=1, max_size=4))
def test_pieces_are_cut_at_the_first_token_that_starts_at_or_after_a_boundary(kind: str, parts: list[str]) -> None:
    made, text = tokenizer(kind), "".join(parts)
    lengths = np.cumsum([len(part) for part in parts])[:-1].tolist()
    pieces = Encoder(made).pieces(text, lengths)
    encoded = made(text, add_special_tokens=False, return_offsets_mapping=True)
    assert np.concatenate(pieces).tolist() == encoded["input_ids"]
    starts = [start for start, _ in encoded["offset_mapping"]]
    cuts = np.maximum.accumulate([np.searchsorted(starts, length) for length in lengths]) if lengths else []
    assert np.cumsum([piece.size for piece in pieces])[:-1].tolist() == list(cuts)


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_other_calls_of_the_tokenizer_do_not_change_the_ids(kind: str) -> None:
    made = tokenizer(kind)
    encoder, text = Encoder(made), "<s>Nothing happens.</s> fridge 1 <|im_end|><|end|>"
    whole = called(made, text)
    made(text, truncation=True, max_length=2)
    assert encoder.ids(text).tolist() == whole
    made(text, padding="max_length", max_length=100)
    assert encoder.ids(text).tolist() == whole
    made(text, split_special_tokens=True)  # the backend keeps this option until the next call
    assert encoder.ids(text).tolist() == whole
    made.split_special_tokens = True
    try:
        apart = encoder.ids(text).tolist()
        assert apart == called(made, text)
        assert apart != whole or kind == "tiny"  # the tiny one gives the same ids both ways
        assert encoder.ids(text).tolist() == apart
    finally:
        made.split_special_tokens = False
    assert encoder.ids(text).tolist() == whole


def test_tokens_that_are_added_to_the_tokenizer_later_are_used() -> None:
    made = build_tokenizer(CORPUS, 256)
    encoder = Encoder(made)
    before = encoder.ids("a <late> word").size
    made.add_special_tokens({"extra_special_tokens": ["<late>"]})
    assert encoder.ids("a <late> word").tolist() == called(made, "a <late> word")
    assert encoder.ids("a <late> word").size < before


class Filling(PreTrainedTokenizerFast):
    """A tokenizer that replaces some text before it encodes, as that of CodeLlama does."""

    def _encode_plus(self, text: Any, *args: Any, **options: Any) -> Any:
        return super()._encode_plus(text.replace("<FILL_ME>", "1"), *args, **options)


def test_a_tokenizer_that_overrides_its_encoding_is_called_itself() -> None:
    made = Filling(tokenizer_object=tokenizer("bytes").backend_tokenizer)
    for encoder in (Encoder(made), Encoder(_patched())):
        assert encoder.ids("fridge <FILL_ME>").tolist() == called(made, "fridge 1")


def _patched() -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer("bytes").backend_tokenizer)
    own = made._encode_plus
    made._encode_plus = lambda text, **options: own(text=text.replace("<FILL_ME>", "1"), **options)
    return made


def test_a_tokenizer_implemented_in_python_is_refused(tmp_path: Any) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    slow = BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    slow.chat_template = CHATML
    with pytest.raises(UserError, match="BertTokenizerLegacy is a tokenizer in Python"):
        Renderer(slow)


def test_a_lone_surrogate_raises_the_same_error_as_in_the_tokenizer() -> None:
    made = tokenizer("bytes")
    for way in (lambda: called(made, "\ud800"), lambda: Encoder(made).ids("\ud800")):
        with pytest.raises(TypeError):
            way()


def test_several_threads_can_share_a_renderer() -> None:
    made = build_tokenizer(CORPUS, 256)
    shared, alone = Renderer(made), Renderer(made)
    texts = [f"{text} {number}" for number in range(40) for text in CORPUS[:3]]
    right = {text: alone.extend([_user(text)], closed=True)[0].tokens.tolist() for text in texts}
    wrong: list[str] = []
    together = threading.Barrier(4)

    def extend() -> None:
        together.wait()
        for _ in range(3):
            wrong.extend(t for t in texts if shared.extend([_user(t)], closed=True)[0].tokens.tolist() != right[t])

    threads = [threading.Thread(target=extend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def test_equal_messages_are_rendered_once_even_long_ones() -> None:
    made: list[Any] = []

    def make(messages: list[Message], closed: bool) -> str:
        made.append(messages)
        return json.dumps([messages, closed])

    recall = cache_rendering(make)
    for text in ("short", "long" * 1000):
        made.clear()
        for _ in range(2):
            assert recall([_user(text)], True) == json.dumps([[_user(text)], True])
        assert recall((_user(text),), True) == json.dumps([[_user(text)], True])
        assert made == [[_user(text)]]
        recall([_user(text)], False)
        recall([{**_user(text), "name": "x"}], True)
        recall([_user(text), _user(text)], True)
        assert len(made) == 4


def test_messages_with_lists_are_rendered_each_time() -> None:
    message = Message(role="assistant", content="", tool_calls=[{"function": {"name": "go"}}])
    made = []
    recall = cache_rendering(lambda messages: made.append(messages) or messages)
    assert recall([message]) == [message]
    assert recall([message]) == [message]
    assert len(made) == 2
