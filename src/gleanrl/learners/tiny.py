"""A small model and a tokenizer made from the environment's own text: nothing to download, fast on a CPU.

The tokenizer's pieces are *chunks*, not characters. The text of agent environments is made from templates: "You arrive
at fridge 1. The fridge 1 is closed." It is cut at entities ("fridge 1" is always one token), and each frequent stretch
between them ("You arrive at ", ". The ", " is closed.") is one token too. A turn then costs few tokens, and copying a
name means copying one token. Other text is cut into words and characters, and also decodes unchanged.
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
from gleanrl.rollout.tool_calls import read_calls
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
"""Lists tools by name and parameters only, because a small model uses nothing else. Calls have the format of Hermes."""

_NUMBERED = re.compile(r"\b([a-z]+) (\d{1,3})\b")
_WORD = re.compile(r"[a-z]+")
_SENTENCE = re.compile(r"[^.!?\n]*[.!?\n]+\s*|[^.!?\n]+")
_PIECE = re.compile(r" ?[^\W\d_]+|[^\w\s]+|\s+|.", re.DOTALL)
_ASCII = [chr(code) for code in range(32, 127)] + ["\n"]
_MAX_NAMES = 400
_MAX_WORDS_OF_ONE_TEXT = 6


def build_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer of at most ``vocabulary`` entries for text like ``texts`` (message contents, commands).

    ``decode(encode(x)) == x`` for text of ASCII and of those characters of ``texts`` that have room in the vocabulary.
    Any other character becomes one unknown token. The tokenizer has a chat template, ``<|end|>`` as the end of a turn
    and one token for each role.

    Raises:
        UserError: if ``vocabulary`` has no room for the characters that the text is made of.
    """
    corpus = Counter(texts)
    seen: Counter[str] = Counter()
    words: Counter[str] = Counter()
    numbered: Counter[str] = Counter()  # words before a number
    largest: dict[str, int] = {}  # highest number that followed each word
    for text, count in corpus.items():
        for character in text:
            seen[character] += count
        for word in _WORD.findall(text):
            words[word] += count
        for word, number in _NUMBERED.findall(text):
            if str(int(number)) == number:
                numbered[word] += count
                largest[word] = max(largest.get(word, 0), int(number))
    further = sorted(set(seen) - set(_ASCII), key=lambda character: (-seen[character], character))
    characters = _ASCII + further[: vocabulary // 4]
    room = vocabulary - len(SPECIAL) - len(characters)
    if room < 0:
        raise UserError(
            f"model.vocabulary = {vocabulary} is too small for the {len(characters)} characters that text is made of; "
            f"set it to {len(SPECIAL) + len(characters)} or more (512 is the default)"
        )

    # Words that usually carry a number ("fridge" of "fridge 1") name things. Each is an entity, alone and with every
    # number up to its largest, so that no split of tasks has an unknown name.
    names = sorted(word for word, count in numbered.items() if count >= 2 and 4 * count >= words[word])
    names = sorted(names, key=lambda name: -numbered[name])[:_MAX_NAMES]
    entities = [*names]
    for name in names:
        entities += [f"{name} {number}" for number in range(1, min(largest[name], 30) + 1)]
    entities = entities[:room]
    # Names with or without a number, and single digits, are cut from the text around them.
    longest_first = "|".join(sorted(names, key=lambda name: (-len(name), name)))
    cut = rf"\b(?:{longest_first})(?: \d{{1,3}})?\b|\d" if names else r"\d"
    chunks = _frequent_chunks(corpus, re.compile(cut), taken={*entities, *characters})[: room - len(entities)]

    # With equal scores the segmentation with the fewest pieces wins; the small terms only break ties.
    entries = [(special, 0.0) for special in SPECIAL]
    entries += [(piece, -1.0 - 1e-6 * rank) for rank, piece in enumerate([*entities, *chunks])]
    entries += [(character, -1.01) for character in characters]
    tokenizer = Tokenizer(models.Unigram(entries, unk_id=SPECIAL.index(UNKNOWN), byte_fallback=False))
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


def texts_of(messages: Iterable[Message], tools: Tools = ()) -> list[str]:
    """Return the text of a conversation under the chat template, in pieces: contents, calls and the list of tools."""
    texts = []
    for message in messages:
        texts.append(message["content"])
        for call in read_calls(message):
            given = json.dumps(call.arguments, ensure_ascii=False)
            texts.append(f'<tool_call>\n{{"name": "{call.name}", "arguments": {given}}}\n</tool_call>')
    for function in (tool["function"] for tool in tools):
        names = ", ".join(function["parameters"].get("properties", ()))
        texts.append(f"<tools>\n{function['name']}({names})\n</tools>")
    return texts


def build_model(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """Build a Llama model of the sizes in ``settings``, with random float32 weights that ``seed`` determines.

    The architecture is not Qwen2's (three biases more per layer), because for a Qwen2 configuration `AutoTokenizer`
    replaces the saved tokenizer's way of splitting text by Qwen2's, so that an exported model would read other tokens.

    Raises:
        UserError: if the sizes do not divide one another.
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


def _frequent_chunks(corpus: Counter[str], cut: re.Pattern[str], taken: set[str]) -> list[str]:
    """Return the pieces of text that are worth a token of their own, those that save the most tokens first.

    The candidates are the stretches of text between matches of ``cut``, and the sentences and words in them, except for
    those in ``taken``. ``corpus`` counts how often each text occurs.
    """
    stretches: Counter[str] = Counter()
    texts_with: Counter[str] = Counter()  # number of different texts that contain a stretch or sentence
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
            # A long stretch that occurs in one text only is a part of that text, not a phrase of the environment.
            if count >= 2 and (texts_with[chunk] > 1 or words_in <= _MAX_WORDS_OF_ONE_TEXT):
                saved[chunk] = max(saved.get(chunk, 0), count * (words_in - 1))
    ranked = sorted(saved.items(), key=lambda item: (-item[1], item[0]))
    return [chunk for chunk, gain in ranked if gain > 0 and chunk not in taken]
