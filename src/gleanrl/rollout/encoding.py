"""Text to token ids, at the least cost: every turn of every episode passes through here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from gleanrl.types import IntArray, Message
from gleanrl.utils.errors import UserError

T = TypeVar("T")

_PROBE = "Go, 12 times:\n\n  café → <|unk|>\t{'x': [1]}  "
_SHORT = 1000  # characters
_MANY, _FEW = 1 << 14, 1 << 8  # results kept, of short messages and of long ones, which could fill the memory


class Encoder:
    """A Hugging Face fast tokenizer, asked in the cheapest way that gives the ids which calling it gives.

    Special tokens are read where the text writes them, and none are added.

    Raises:
        UserError: it is a tokenizer in Python, which cannot say where in the text a token stands.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", True):
            raise UserError(
                f"{type(tokenizer).__name__} is a tokenizer in Python, which cannot say where a token stands in the "
                "text; give the model a fast one (tokenizer.json)"
            )
        self._tokenizer = tokenizer
        self._only_backend = _only_backend(tokenizer) and self._quick(_PROBE) == self._careful(_PROBE)[0]

    def ids(self, text: str) -> IntArray:
        """int32[n]."""
        return np.array(self._quick(text) if self._may_be_quick() else self._careful(text)[0], np.int32)

    def pieces(self, text: str, lengths: Sequence[int]) -> list[IntArray]:
        """The ids, cut where the text is so many characters long; a token belongs where it starts."""
        if not lengths:
            return [self.ids(text)]
        ids, offsets = self._careful(text)
        cuts = [0]
        for length in lengths:
            cuts.append(max(cuts[-1], bisect_left(offsets, length, key=itemgetter(0))))
        cuts.append(len(ids))
        return [np.array(ids[a:b], np.int32) for a, b in pairwise(cuts)]

    def _may_be_quick(self) -> bool:
        """Not while the backend cuts or fills up, as others may have asked for; a call would undo that first."""
        if not self._only_backend:
            return False
        backend = self._tokenizer.backend_tokenizer
        return (
            backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == self._tokenizer.split_special_tokens
        )

    def _quick(self, text: str) -> list[int]:
        return self._tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _careful(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]


def _only_backend(tokenizer: Any) -> bool:
    """Whether a call does nothing to the text before the backend gets it. Some classes do (CodeLlama's, where the text
    has a place to fill), and override what is transformers' own in all others."""
    methods = (getattr(tokenizer, name, None) for name in ("__call__", "_encode_plus"))
    return hasattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch_fast") and all(
        getattr(method, "__module__", "").startswith("transformers.tokenization_utils") for method in methods
    )


def remembered(make: Callable[..., T]) -> Callable[..., T]:
    """``make(messages, *others)`` for messages and hashable values, called once for those that are equal. What it
    returns is shared."""

    def from_items(items: tuple[tuple[Any, ...], ...], *others: Hashable) -> T:
        return make([dict(own) for own in items], *others)

    short, long = lru_cache(_MANY)(from_items), lru_cache(_FEW)(from_items)

    def recall(messages: Sequence[Message], *others: Hashable) -> T:
        items = tuple([tuple(message.items()) for message in messages])
        try:
            hash(items)
        except TypeError:  # lists of calls, in examples that an opening shows
            return make(messages, *others)
        size = sum([len(message["content"] or "") for message in messages])
        return (short if size <= _SHORT else long)(items, *others)

    return recall
