"""What a buffer may keep, and which trajectories go where that is exceeded: always the oldest."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gleanrl.buffer.log import RECORD
from gleanrl.buffer.notes import text_of
from gleanrl.buffer.schema import Schema, following
from gleanrl.buffer.trajectory import Rows
from gleanrl.utils.errors import UserError

if TYPE_CHECKING:
    from gleanrl.buffer.store import Store

PARTS = 4  # segments that a limit is divided into, at least where rows are small


@dataclass(frozen=True, slots=True)
class Limits:
    """What a buffer may keep: rows, bytes on the disk, seconds."""

    rows: int | None = None
    nbytes: int | None = None
    age_s: float | None = None

    def segment(self, nbytes: int, schema: Schema) -> int:
        """Bytes of a segment, so that what one holds is only a part of what may be kept."""
        if self.rows is not None:
            nbytes = min(nbytes, self.rows // PARTS * schema.row_nbytes)
        return nbytes if self.nbytes is None else min(nbytes, self.nbytes // PARTS)


def make_room(store: Store, trajectories: Sequence[Rows]) -> None:
    """Evict until these are allowed. Raises `UserError` where even all would not do; then nothing is evicted."""
    if (quota := store.limits.nbytes) is None:
        return
    counts, notes = dict[Schema, tuple[int, int]](), 0
    for rows in trajectories:
        schema = Schema.of(rows)
        before = counts.get(schema, (0, 0))
        counts[schema] = before[0] + rows.count, before[1] + _finals(rows, schema)
        notes += RECORD.itemsize + len(text_of(rows).encode())
        notes += sum(len(json.dumps(text)) + 1 for text in set(rows.instructions))

    def needed(*, alone: bool) -> int:
        found = (store.table_for(schema).needs(*count, alone=alone) for schema, count in counts.items())
        return notes + sum(found)

    least = store.instructions_nbytes + needed(alone=True)
    if least > quota:
        raise UserError(f"max_bytes = {quota}: what is added at once needs {least}")
    while store.nbytes + needed(alone=False) > quota:
        empty = store.first_id >= store.next_id
        if store.shorten(always=empty):
            continue
        if empty:  # while everything is replaced the log only grows
            raise UserError(f"max_bytes = {quota}: there is no room for {least} more")
        store.drop(store.first_id + _in_segment(store, 0))


def _finals(rows: Rows, schema: Schema) -> int:
    """Next observations that are nobody's current one."""
    once = schema.stored_once
    return int((~following(rows.columns, (1, rows.steps, rows.batch), once)).sum()) if once else 0


def evict(store: Store) -> None:
    """Keep to the limits of rows and age. The newest trajectory stays, however long it is."""
    if (limit := store.limits.rows) is not None and (rows := store.count_rows()) > limit:
        kept = store.records()
        left = rows - np.cumsum(kept["steps"].astype(np.int64) * kept["batch"])
        few = min(int(np.argmax(left <= limit)) + 1, len(kept) - 1)
        if few:
            whole = few - 1 + _in_segment(store, few - 1)  # up to a segment's end, so that it is rare
            store.drop(store.first_id + (whole if left[whole - 1] >= limit * 3 / 4 else few))
    if store.limits.age_s is not None:
        old = int(np.searchsorted(store.records()["time"], time.time() - store.limits.age_s))
        store.drop(store.first_id + old)


def _in_segment(store: Store, place: int) -> int:
    """How many of the trajectories that are kept, from this place on, begin in the segment that the first does."""
    kept = store.records()[place:]
    boundary = store.tables[int(kept["schema"][0])].boundary(int(kept["row"][0]))
    later = (kept["schema"] != kept["schema"][0]) | (kept["row"] >= boundary)
    return int(np.argmax(later)) if later.any() else len(kept)
