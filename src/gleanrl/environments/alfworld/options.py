"""The options of the ALFWorld taskset, checked: each mistake is one line that names the option and the mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import cast

from gleanrl.environments.alfworld.households import GOALS, Layout
from gleanrl.environments.alfworld.rooms import FULL_ROOMS, FULL_SAME_KIND, ROOMS
from gleanrl.utils.errors import UserError

OPTIONS = (
    *("goals", "size", "receptacles", "objects", "seed", "rooms", "object_kinds", "same_kind", "source"),
    *("eval_split", "prompt", "examples", "banner", "admissible_commands"),
)
SIZES = ("small", "full")
EVAL_SPLITS = ("households", "seen", "unseen", "both")
SMALL: dict[str, tuple[int, int]] = {"receptacles": (5, 6), "objects": (4, 6)}
_ALIASES = {goal.library: name for name, goal in GOALS.items()}
_ALIASES |= {name.removesuffix("_in_recep"): goal for name, goal in _ALIASES.items()}


def goals_named(names: Sequence[str]) -> tuple[str, ...]:
    """Goals by our names or by ALFWorld's (``pick_heat_then_place_in_recep``, with or without ``_in_recep``)."""
    if isinstance(names, str) or not names:
        return chosen("goals", names, GOALS)
    return chosen("goals", tuple(dict.fromkeys(_ALIASES.get(name, name) for name in names)), GOALS)


def layout_of(
    *,
    goals: Sequence[str],
    size: str,
    receptacles: int | Sequence[int] | None,
    objects: int | Sequence[int] | None,
    rooms: Sequence[str] | None,
    object_kinds: Sequence[str] | None,
    same_kind: int | None,
) -> Layout:
    one_of("size", size, SIZES)
    full = size == "full"
    if full and (receptacles is not None or objects is not None):
        given = "receptacles" if receptacles is not None else "objects"
        raise UserError(f"alfworld option {given}: size = 'full' has as many as real rooms have; leave it out")
    everything = {kind.lower(): kind for room in ROOMS.values() for kind in room.objects}
    everything |= {kind.lower(): kind for room in FULL_ROOMS.values() for kind in room.objects} if full else {}
    kinds = None if object_kinds is None else chosen("object_kinds", [k.lower() for k in object_kinds], everything)
    layout = Layout(
        goals=goals_named(goals),
        rooms=None if rooms is None else chosen("rooms", rooms, ROOMS),
        receptacles=_range("receptacles", SMALL["receptacles"] if receptacles is None else receptacles),
        objects=_range("objects", SMALL["objects"] if objects is None else objects),
        object_kinds=None if kinds is None else tuple(everything[kind] for kind in kinds),
        same_kind=(FULL_SAME_KIND if full else 2) if same_kind is None else same_kind,
        full=full,
    )
    if layout.same_kind < 1:
        raise UserError(f"alfworld option same_kind = {same_kind} must be 1 or more")
    for goal in layout.goals:
        if not layout.rooms_of(goal):
            raise UserError(f"alfworld option rooms: goal {goal} needs one of {', '.join(GOALS[goal].rooms)}")
        for room in layout.rooms_of(goal):
            _check_room(layout, room)
    return layout


def _check_room(layout: Layout, room: str) -> None:
    least = len(ROOMS[room].always)
    most = least + sum(most for _, most in ROOMS[room].maybe.values())
    low, high = layout.receptacles
    if not layout.full and not least <= low <= high <= most:
        raise UserError(f"alfworld option receptacles = {low}, {high}: a {room} has {least} to {most}")
    if not layout.kinds_of(room):
        raise UserError(f"alfworld option object_kinds: none of them is found in a {room}")


def examples_wanted(prompt: str, examples: int | None) -> int:
    if examples is None:
        return 2 if prompt == "react" else 0
    if not isinstance(examples, int) or examples < 0:
        raise UserError(f"alfworld option examples = {examples!r} must be a number, 0 or more")
    if examples and prompt != "react":
        raise UserError(f"alfworld option examples: prompt = {prompt!r} has no place for them; use react")
    return examples


def one_of(key: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise unknown(f"alfworld option {key}", value, known)


def chosen(key: str, values: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not values:
        raise UserError(f"alfworld option {key} must be a non-empty list, as [{next(iter(known))!r}], not {values!r}")
    for value in values:
        if value not in known:
            raise unknown(f"alfworld option {key}", value, known)
    return tuple(values)


def _range(key: str, value: int | Sequence[int]) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(n, int) for n in pair) or not 1 <= pair[0] <= pair[1]:
        raise UserError(f"alfworld option {key} = {value!r} must be a number, or the least and the most, as [4, 6]")
    return cast(tuple[int, int], pair)


def unknown(what: str, value: object, known: Iterable[str]) -> UserError:
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.0)
    return UserError(f"{what}: {value!r} is not known; did you mean {near[0]!r}? (one of {', '.join(names)})")
