"""Builds a small model and its tokenizer from the text of an environment, for ``model.init = "tiny"``.

Nothing is downloaded, and the model is fast on a CPU. The tokenizer makes use of the fact that the text of agent
environments comes from templates, as in "You arrive at fridge 1. The fridge 1 is closed." Text is cut at *entities*
("fridge 1"), each of which is one token. Frequent text between entities ("You arrive at ", ". The ", " is closed.") is
one token too, called a *chunk*. A turn then takes few tokens, and the model copies a name by copying one token. All
other text is cut into words and characters. Decoding returns the original text, except for characters that are not in
the vocabulary.
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
"""The chat template of tiny models.

It lists tools by name and parameters only, because such a model is too small to use descriptions. Tool calls have the
format of Hermes.
"""

_NUMBERED = re.compile(r"\b([a-z]+) (\d{1,3})\b")
_WORD = re.compile(r"[a-z]+")
_SENTENCE = re.compile(r"[^.!?\n]*[.!?\n]+\s*|[^.!?\n]+")
_PIECE = re.compile(r" ?[^\W\d_]+|[^\w\s]+|\s+|.", re.DOTALL)
_ASCII = [chr(code) for code in range(32, 127)] + ["\n"]
_MAX_NAMES = 400
_MAX_WORDS_OF_ONE_TEXT = 6


def build_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer with at most ``vocabulary`` tokens for text like ``texts``, such as messages and commands.

    The vocabulary contains printable ASCII, the newline, and the most frequent other characters of ``texts``, at most a
    quarter of the vocabulary. Text of these characters is decoded unchanged; any other character becomes the token for
    unknown text. The tokenizer has a chat template, with ``<|end|>`` at the end of each message and a special token for
    each role.

    Raises:
        UserError: if ``vocabulary`` is smaller than the number of these characters and the special tokens.
    """
    corpus = Counter(texts)
    seen: Counter[str] = Counter()
    words: Counter[str] = Counter()
    numbered: Counter[str] = Counter()  # how often each word is followed by a number
    largest: dict[str, int] = {}  # largest number that follows each word
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

    # A word that is often followed by a number ("fridge" in "fridge 1") is taken to be a name. The name alone, and the
    # name with each number up to its largest (at most 30), are entities. So a number that ``texts`` skip but that other
    # tasks use is in the vocabulary too.
    names = sorted(word for word, count in numbered.items() if count >= 2 and 4 * count >= words[word])
    names = sorted(names, key=lambda name: -numbered[name])[:_MAX_NAMES]
    entities = [*names]
    for name in names:
        entities += [f"{name} {number}" for number in range(1, min(largest[name], 30) + 1)]
    entities = entities[:room]
    # Text is split around names, with or without a number, and around single digits.
    longest_first = "|".join(sorted(names, key=lambda name: (-len(name), name)))
    cut = rf"\b(?:{longest_first})(?: \d{{1,3}})?\b|\d" if names else r"\d"
    chunks = _frequent_chunks(corpus, re.compile(cut), taken={*entities, *characters})[: room - len(entities)]

    # Almost equal scores make the tokenizer choose the segmentation with the fewest tokens. The small differences only
    # decide between segmentations with the same number of tokens.
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
    """Return the pieces of text that `CHAT_TEMPLATE` makes of a conversation, as input of `build_tokenizer`.

    They are the contents of the messages, the tool calls, and one text for each declared tool.
    """
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

    Qwen2's architecture is not used, because for a Qwen2 model `AutoTokenizer` replaces the saved tokenizer's way of
    splitting text by Qwen2's. Text would then be tokenised differently once the model is exported and loaded again.

    Raises:
        UserError: if ``hidden_size`` is no even multiple of ``heads``, or ``heads`` no multiple of ``kv_heads``.
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
    """Return the chunks of text that save tokens if each of them is one token, those that save the most first.

    Candidates are the parts of each text between matches of ``cut``, and the sentences and words of these parts.
    Candidates in ``taken`` are left out.

    Args:
        corpus: how often each text occurs.
        cut: matches entities, around which text is split before it is tokenised.
        taken: texts that are tokens already.
    """
    stretches: Counter[str] = Counter()  # how often each part between two matches occurs
    texts_with: Counter[str] = Counter()  # number of different texts that contain each part or sentence
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
            # A long chunk that only one text contains is specific to that text and not a template of the environment.
            if count >= 2 and (texts_with[chunk] > 1 or words_in <= _MAX_WORDS_OF_ONE_TEXT):
                saved[chunk] = max(saved.get(chunk, 0), count * (words_in - 1))
    ranked = sorted(saved.items(), key=lambda item: (-item[1], item[0]))
    return [chunk for chunk, gain in ranked if gain > 0 and chunk not in taken]
