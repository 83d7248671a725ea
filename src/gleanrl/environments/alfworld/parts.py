"""Which household or game may be played when: splits by what a household is, and rooms that training never sees."""

from __future__ import annotations

from gleanrl.environments.alfworld.households import Household
from gleanrl.protocols import Split
from gleanrl.utils.seeding import derive

SHARES: dict[Split, float] = {"train": 0.6, "eval": 0.2, "warm_start": 0.2}
SEEN_LAYOUTS = 0.8  # share


def generated_parts(split: Split, eval_split: str) -> tuple[str, ...]:
    """Layouts that the tasks of a split come from, in turn: any, seen or unseen."""
    if eval_split == "households":
        return ("any",)
    if split != "eval":
        return ("seen",)
    return ("seen", "unseen") if eval_split == "both" else (eval_split,)


def real_parts(split: Split, eval_split: str) -> tuple[str, ...]:
    """Folders of the real games that the tasks of a split come from, in turn.

    Demonstrations are of ``valid_seen`` where evaluation leaves that alone, otherwise of the last training games:
    the loader's own train folder is to be trained on as a whole, so only a run that asks for nearly all of it trains on
    games that it saw demonstrated.
    """
    if split == "train":
        return ("train",)
    if split == "warm_start":
        return ("valid_seen",) if eval_split == "households" else ("train",)
    return {"seen": ("valid_seen",), "both": ("valid_seen", "valid_unseen")}.get(eval_split, ("valid_unseen",))


def belongs(household: Household, split: Split, part: str) -> bool:
    """Whether a household is of a split and, where ``part`` is seen or unseen, its room of such a layout."""
    if split_of(household.key) != split:
        return False
    return part == "any" or part == ("seen" if layout_seen(household.layout_key) else "unseen")


def layout_seen(key: str) -> bool:
    """Whether training may play rooms with this `Household.layout_key`: by hash, so the same for every seed."""
    return derive(0, "alfworld", "layout", key) / 2**63 < SEEN_LAYOUTS


def split_of(key: str) -> Split:
    """Where a household with this `Household.key` belongs: by hash, so in the same place for every seed."""
    point, reached = derive(0, "alfworld", "split", key) / 2**63, 0.0
    for split, share in SHARES.items():
        reached += share
        if point < reached:
            return split
    return "train"
