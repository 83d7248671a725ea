"""Which samples share a row of a forward pass, so that what they begin with is computed once.

Members of a group start from the same prompt, and often go on alike for a while. A row holds their common prefix
once and after it each member's remainder; a plain row is a row of one sample. Less goes through the model's layers,
but attention in a longer row costs more, so whether it pays is a sum done here, for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from gleanrl.types import IntArray

EVEN_LENGTH = 1024  # of a shared row whose attention costs as much as all else; measured on four layers of width 128
LONGEST_SHARED_ROW = 1024  # bounds the attention mask, which is quadratic


@dataclass(frozen=True, slots=True)
class Row:
    """Samples whose first ``prefix`` inputs are the same; more than one sample only where that pays."""

    samples: tuple[int, ...]  # indices into what `lay_out` was given
    prefix: int  # 0 for one sample alone
    length: int  # inputs in the row


def plain_rows(lengths: Sequence[int]) -> list[Row]:
    """Each sample alone."""
    return [Row((index,), 0, length) for index, length in enumerate(lengths)]


def lay_out(inputs: Sequence[IntArray], groups: Sequence[int], longest: int = LONGEST_SHARED_ROW) -> list[Row]:
    """Rows of least estimated cost; each sample is in exactly one, and rows hold samples of one group only.

    ``inputs`` int32[n] each, ``groups`` the group of each. No shared row is longer than ``longest``.
    """
    # Sorted like words in a dictionary, those with the longest common prefixes are neighbours.
    order = sorted(range(len(inputs)), key=lambda i: (groups[i], inputs[i].astype(">i4").tobytes(), i))
    rows: list[Row] = []
    for _, members in groupby(order, key=lambda i: groups[i]):
        rows += _cheapest(list(members), inputs, min(longest, LONGEST_SHARED_ROW))
    return rows


def _cheapest(members: Sequence[int], inputs: Sequence[IntArray], longest: int) -> list[Row]:
    """The cheapest cut of sorted ``members`` into rows of neighbours, by dynamic programming."""
    sizes = [inputs[index].size for index in members]
    common = [0, *(_common(inputs[a], inputs[b]) for a, b in pairwise(members))]
    best: list[tuple[float, tuple[Row, ...]]] = [(0.0, ())]  # cost and rows of the first so many members
    for stop in range(1, len(members) + 1):
        alone = Row((members[stop - 1],), 0, sizes[stop - 1])
        cost, rows = best[stop - 1]
        choice = (cost + _cost(alone), (*rows, alone))
        prefix, total = sizes[stop - 1], sizes[stop - 1]
        for start in range(stop - 2, -1, -1):
            prefix, total = min(prefix, common[start + 1]), total + sizes[start]
            count = stop - start
            shared = Row(tuple(members[start:stop]), prefix, total - (count - 1) * prefix)
            if not prefix or shared.length > longest:
                break  # still more members: a shorter prefix and a longer row
            cost, rows = best[start]
            if cost + _cost(shared) < choice[0]:
                choice = (cost + _cost(shared), (*rows, shared))
        best.append(choice)
    return list(best[-1][1])


def _cost(row: Row) -> float:
    """In tokens through the layers; a row that needs a mask of its own pays for both halves of attention."""
    attention = row.length**2 / EVEN_LENGTH
    return row.length + (attention if len(row.samples) > 1 else attention / 2)


def _common(a: IntArray, b: IntArray) -> int:
    """Length of the common prefix."""
    size = min(a.size, b.size)
    different = (a[:size] != b[:size]).nonzero()[0]
    return int(different[0]) if different.size else size
