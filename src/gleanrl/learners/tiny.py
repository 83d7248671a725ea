"""A small model and a tokenizer made from the environment's own text: nothing to download, fast on a CPU.

The tokenizer's pieces are *chunks*, not characters. Agent environments speak in templates, "You arrive at
fridge 1. The fridge 1 is closed.", so text is cut at entities ("fridge 1", always one token, wherever it
stands) and each frequent stretch between them ("You arrive at ", ". The ", " is closed.") is one token too.
A turn then costs few tokens and copying a name means copying one token. Words and characters are the
fallback, so that other text still goes through unchanged.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import cast

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gleanrl.config.settings import ModelSettings
from gleanrl.config.validate import check_tiny_model
from gleanrl.protocols import Tools
from gleanrl.rollout.tool_calls import called
from gleanrl.types import Message
from gleanrl.utils.errors import UserError

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unk|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL = (PAD, END, UNKNOWN, *ROLES)

CHAT_TEMPLATE = (
    "{% macro offered() %}{{ '<tools>\n' }}{% for tool in tools %}{{ tool.function.name + '(' }}"
    "{{ tool.function.parameters.properties | join(', ') }}{{ ')\n' }}{% endfor %}</tools>{% endmacro %}"
    "{% for message in messages %}"
    "{% if '<|' + message['role'] + '|>' not in ['<|system|>', '<|user|>', '<|assistant|>', '<|tool|>'] %}"
    "{{ raise_exception('no such role: ' + message['role']) }}{% endif %}"
    "{% set offers = tools and loop.first %}{% set system = message['role'] == 'system' %}"
    "{% if offers and not system %}{{ '<|system|>' + offered() + '<|end|>' }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if offers and system %}{{ '\n' + offered() }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{% set function = call['function'] or call %}"
    "{{ '\n' if message['content'] or not loop.first else '' }}"
    '{{ \'<tool_call>\n{"name": "\' + function.name + \'", "arguments": \' }}{{ function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Shows tools by name and parameters, as a small model reads nothing else of them; calls in the form of Hermes."""

_NUMBERED = re.compile(r"\b([a-z]+) (\d{1,3})\b")
_WORD = re.compile(r"[a-z]+")
_SENTENCE = re.compile(r"[^.!?\n]*[.!?\n]+\s*|[^.!?\n]+")
_PIECE = re.compile(r" ?[^\W\d_]+|[^\w\s]+|\s+|.", re.DOTALL)
_ASCII = [chr(code) for code in range(32, 127)] + ["\n"]
_MAX_STEMS = 400
_MAX_WORDS_OF_ONE_TEXT = 6


def build_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most ``vocabulary`` entries for text like ``texts`` (message contents, commands).

    Lossless on ASCII and on every character of ``texts`` that fits: ``decode(encode(x)) == x``; a character
    that it never saw becomes one unknown token. Has a chat template, ``<|end|>`` as the end of a turn and one
    token for each role.

    Raises:
        UserError: ``vocabulary`` has no room for the characters that the text is made of.
    """
    corpus = Counter(texts)
    characters = _characters(corpus, vocabulary // 4)
    room = vocabulary - len(SPECIAL) - len(characters)
    if room < 0:
        raise UserError(
            f"model.vocabulary = {vocabulary} is too small for the {len(characters)} characters that text is made of; "
            f"set it to {len(SPECIAL) + len(characters)} or more (512 is the default)"
        )
    counts = _numbered_names(corpus)
    stems = _stems(corpus, counts)
    cut = _cut_pattern(stems)
    entities = _entities(counts, stems)[:room]
    chunks = _frequent_chunks(corpus, re.compile(cut), taken={*entities, *characters})[: room - len(entities)]
    return _assemble(characters, [*entities, *chunks], cut)


def texts_of(messages: Iterable[Message], tools: Tools = ()) -> list[str]:
    """What the template above writes of a conversation, in pieces: contents, calls and the list of tools."""
    texts = []
    for message in messages:
        texts.append(message["content"])
        for call in called(message):
            given = json.dumps(call.arguments, ensure_ascii=False)
            texts.append(f'<tool_call>\n{{"name": "{call.name}", "arguments": {given}}}\n</tool_call>')
    for function in (tool["function"] for tool in tools):
        names = ", ".join(function["parameters"].get("properties", ()))
        texts.append(f"<tools>\n{function['name']}({names})\n</tools>")
    return texts


def build_model(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """A Llama-architecture model with random float32 weights that ``seed`` fixes, sized by ``settings``.

    Not Qwen2's, which differs in three biases a layer: for a Qwen2 configuration `AutoTokenizer` replaces the saved
    tokenizer's way of splitting text by Qwen2's, so an exported model would read other tokens.

    Raises:
        UserError: the sizes do not divide one another.
    """
    check_tiny_model(settings)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.hidden_size * settings.mlp_ratio,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.max_context,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=cast(int, tokenizer.pad_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
        bos_token_id=cast(int, tokenizer.bos_token_id),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _characters(corpus: Counter[str], others: int) -> list[str]:
    """ASCII, and the ``others`` most frequent further characters."""
    seen: Counter[str] = Counter()
    for text, count in corpus.items():
        for character in text:
            seen[character] += count
    further = sorted(set(seen) - set(_ASCII), key=lambda character: (-seen[character], character))
    return _ASCII + further[:others]


def _numbered_names(corpus: Counter[str]) -> Counter[tuple[str, int]]:
    """How often each "name number" occurs."""
    counts: Counter[tuple[str, int]] = Counter()
    for text, count in corpus.items():
        for stem, number in _NUMBERED.findall(text):
            if str(int(number)) == number:
                counts[stem, int(number)] += count
    return counts


def _stems(corpus: Counter[str], counts: Counter[tuple[str, int]]) -> list[str]:
    """Words that usually carry a number ("fridge" of "fridge 1"), and so are names of things."""
    words: Counter[str] = Counter()
    for text, count in corpus.items():
        for word in _WORD.findall(text):
            words[word] += count
    numbered: Counter[str] = Counter()
    for (stem, _), count in counts.items():
        numbered[stem] += count
    names = [stem for stem, count in numbered.items() if count >= 2 and 4 * count >= words[stem]]
    return sorted(sorted(names), key=lambda stem: -numbered[stem])[:_MAX_STEMS]


def _entities(counts: Counter[tuple[str, int]], stems: list[str]) -> list[str]:
    """Every stem alone and with each number up to its largest, so that no split of tasks meets a new name."""
    largest = {stem: max(number for (name, number) in counts if name == stem) for stem in stems}
    gaps_filled = [f"{stem} {n}" for stem in stems for n in range(1, min(largest[stem], 30) + 1)]
    return [*stems, *gaps_filled]


def _cut_pattern(stems: list[str]) -> str:
    """What stands alone in the text: names with or without a number, and single digits."""
    names = "|".join(sorted(stems, key=lambda stem: (-len(stem), stem)))
    return rf"\b(?:{names})(?: \d{{1,3}})?\b|\d" if stems else r"\d"


def _frequent_chunks(corpus: Counter[str], cut: re.Pattern[str], taken: set[str]) -> list[str]:
    """Stretches between cuts, sentences and words in them, by how many tokens each saves."""
    stretches: Counter[str] = Counter()
    texts_with: Counter[str] = Counter()  # how many different texts hold a stretch or sentence
    for text, count in corpus.items():
        parts = cut.split(text)
        texts_with.update({*parts, *(sentence for part in parts for sentence in _SENTENCE.findall(part))})
        for stretch in parts:
            stretches[stretch] += count
    sentences: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for stretch, count in stretches.items():
        for sentence in _SENTENCE.findall(stretch):
            sentences[sentence] += count
        for word in _PIECE.findall(stretch):
            words[word] += count
    saved: dict[str, int] = {word: count * (len(word) - 1) for word, count in words.items()}
    for longer in (sentences, stretches):
        for chunk, count in longer.items():
            words_in = len(_PIECE.findall(chunk))
            # a long stretch of a single text, repeated with it, is that text and no phrase of the environment
            if count >= 2 and (texts_with[chunk] > 1 or words_in <= _MAX_WORDS_OF_ONE_TEXT):
                saved[chunk] = max(saved.get(chunk, 0), count * (words_in - 1))
    ranked = sorted(saved.items(), key=lambda item: (-item[1], item[0]))
    return [chunk for chunk, gain in ranked if gain > 0 and chunk not in taken]


def _assemble(characters: list[str], pieces: list[str], cut: str) -> PreTrainedTokenizerFast:
    # Equal scores make the segmentation with the fewest pieces win; the small terms only settle ties.
    vocabulary = [(special, 0.0) for special in SPECIAL]
    vocabulary += [(piece, -1.0 - 1e-6 * rank) for rank, piece in enumerate(pieces)]
    vocabulary += [(character, -1.01) for character in characters]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=SPECIAL.index(UNKNOWN), byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(cut), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        bos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 30,
        padding_side="left",
    )
