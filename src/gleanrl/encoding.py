"""Text to token ids, at the least cost: every turn of every episode passes through here."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from gleanrl.types import IntArray, Message

T = TypeVar("T")

_PROBE = "Go, 12 times:\n\n  café → <|unk|>\t{'x': [1]}  "
_LONG = 1000  # characters: longer observations hardly repeat, but for openings, which all members of a group share


class Encoder:
    """A Hugging Face tokenizer without what it does around each call, where both give the same.

    Special tokens are read where the text writes them, and none are added.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if not (hasattr(self._backend, "encode_batch_fast") and self._plain(_PROBE) == self._careful(_PROBE)[0]):
            self._backend = None

    def ids(self, text: str) -> IntArray:
        """int32[n]."""
        return np.array(self._plain(text) if self._direct() else self._careful(text)[0], np.int32)

    def pieces(self, text: str, lengths: Sequence[int]) -> list[IntArray]:
        """The ids cut where the text is so many characters long; a token belongs where it starts."""
        if not lengths:
            return [self.ids(text)]
        ids, offsets = self._careful(text)
        cuts = [0]
        for length in lengths:
            cuts.append(max(cuts[-1], bisect_left(offsets, length, key=itemgetter(0))))
        cuts.append(len(ids))
        return [np.array(ids[a:b], np.int32) for a, b in zip(cuts, cuts[1:], strict=False)]

    def _direct(self) -> bool:
        """Not after others asked the same tokenizer to cut or fill up, which stays until they ask for something else."""
        backend = self._backend
        return (
            backend is not None
            and backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == self._tokenizer.split_special_tokens
        )

    def _plain(self, text: str) -> list[int]:
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _careful(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]


def remembered(make: Callable[..., T]) -> Callable[..., T]:
    """``make(messages, *others)`` for messages and hashable values, called once for those that are equal."""

    def unpacked(key: Hashable, *others: Hashable) -> T:
        if isinstance(key, str):
            return make(json.loads(key), *others)
        assert isinstance(key, tuple)
        return make([Message(role=role, content=content) for role, content in key], *others)

    short, long = lru_cache(1 << 14)(unpacked), lru_cache(1 << 8)(unpacked)

    def recall(messages: Sequence[Message], *others: Hashable) -> T:
        if all(len(message) == 2 and type(message.get("content")) is str for message in messages):
            key: Hashable = tuple((message["role"], message["content"]) for message in messages)
            size = sum(len(message["content"]) for message in messages)
        else:
            key = json.dumps(list(messages))
            size = len(key)
        return (short if size <= _LONG else long)(key, *others)

    return recall
