"""Draws random households like those of ALFWorld: a room with furniture, objects and a goal, written as a PDDL problem.

`draw` makes a `Household` from a `Layout` and a seed, and `split_of` returns its split. The alfworld package's
constants define which objects fit into which furniture, which objects can be heated, cooled, cleaned or cut, and how
goals are worded and written in PDDL. The tables in `rooms` define what each room may contain and where its objects are
usually found.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gleanrl.environments.alfworld.rooms import FULL_ROOMS, RARELY, ROOMS, SCENES, USUAL
from gleanrl.protocols import Split
from gleanrl.utils.seeding import derive


@dataclass(frozen=True, slots=True)
class Goal:
    """A kind of goal, such as heating an object and putting it somewhere."""

    library: str  # this kind's name in alfworld's goal library
    rooms: tuple[str, ...]  # rooms in which the goal is possible; the first is the usual one
    tool: str = ""  # receptacle that processes the object; empty = none is needed
    needs: str = ""  # property that the object must have, as alfworld names it; empty = none
    targets: int = 1  # number of objects that the goal asks for


GOALS: dict[str, Goal] = {
    "put": Goal("pick_and_place_simple", ("kitchen", "bathroom", "bedroom", "living_room")),
    "heat": Goal("pick_heat_then_place_in_recep", ("kitchen",), "Microwave", "Heatable"),
    "cool": Goal("pick_cool_then_place_in_recep", ("kitchen",), "Fridge", "Coolable"),
    "clean": Goal("pick_clean_then_place_in_recep", ("kitchen", "bathroom"), "SinkBasin", "Cleanable"),
    "examine": Goal("look_at_obj_in_light", ("bedroom", "living_room")),
    "put_two": Goal("pick_two_obj_and_place", ("kitchen", "bathroom", "bedroom", "living_room"), targets=2),
}
LAMP = "DeskLamp"
LAMP_STANDS = ("Desk", "SideTable", "Dresser", "CoffeeTable", "Shelf")


@lru_cache(maxsize=1)
def thor() -> Any:
    """Return alfworld's module of constants, which define which objects fit where and what can be done with them."""
    from alfworld.gen import constants

    return constants


@lru_cache(maxsize=1)
def goal_library() -> dict[str, dict[str, Any]]:
    from alfworld.gen.goal_library import gdict

    return gdict


@dataclass(frozen=True, slots=True)
class Household:
    """A room with its furniture and objects, and a goal.

    ``furniture`` has, for each piece, its kind and the kinds of the objects in it. ``target`` is the kind of object
    that the goal asks for, ``destination`` the kind of furniture to bring it to, and ``wording`` the index of the
    goal's template.
    """

    room: str
    goal: str
    target: str
    destination: str  # empty for examine
    furniture: tuple[tuple[str, tuple[str, ...]], ...]
    wording: int

    @property
    def key(self) -> str:
        """Hash of the goal and of the furniture with its objects, regardless of numbering and wording. It decides the
        split.
        """
        inside = sorted((kind, sorted(objects)) for kind, objects in self.furniture)
        text = repr((self.goal, self.target, self.destination, inside))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    @property
    def layout_key(self) -> str:
        """Hash of the kind of room and of the kinds and numbers of its furniture. Objects and goal do not affect it."""
        text = repr((self.room, sorted(kind for kind, _ in self.furniture)))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def task(self) -> str:
        """Return the goal in words, in one of the wordings of the real games."""
        template = goal_library()[GOALS[self.goal].library]["templates"][self.wording]
        return template.format(obj=self.target.lower(), recep=self.destination.lower(), toggle=LAMP.lower())

    def pddl(self) -> str:
        """Return the household and its goal as a PDDL problem.

        Objects are named as in the real games, so that the engine can show names such as "cabinet 2" to the player.
        """
        numbers: Counter[str] = Counter()

        def name(kind: str) -> str:
            numbers[kind] += 1
            stem = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}.get(kind)
            return f"{stem}_bar_{numbers[kind]}_bar_{kind}" if stem else f"{kind}_bar_{numbers[kind]}"

        receptacles, objects, init = [], [], []
        able = thor().VAL_ACTION_OBJECTS
        for place, (kind, things) in enumerate(self.furniture, start=1):
            receptacle = name(kind)
            receptacles.append(receptacle)
            init += [f"(receptacleType {receptacle} {kind}Type)", f"(receptacleAtLocation {receptacle} loc_{place})"]
            if kind in thor().OPENABLE_CLASS_SET:
                init.append(f"(openable {receptacle})")
            for thing_kind in things:
                thing = name(thing_kind)
                objects.append(thing)
                init += [f"(inReceptacle {thing} {receptacle})", f"(objectAtLocation {thing} loc_{place})"]
                init.append(f"(objectType {thing} {thing_kind}Type)")
                init += [f"({word.lower()} {thing})" for word in sorted(able) if thing_kind in able[word]]
                if thing_kind in thor().MOVABLE_RECEPTACLES_SET:
                    init.append(f"(isReceptacleObject {thing})")
                if thing_kind != LAMP:
                    init.append(f"(pickupable {thing})")
        kinds = sorted({kind for kind, _ in self.furniture})
        things = sorted({kind for _, inside in self.furniture for kind in inside})
        fits = thor().VAL_RECEPTACLE_OBJECTS
        for receptacle in kinds:
            init += [f"(canContain {receptacle}Type {o}Type)" for o in things if o in fits.get(receptacle, ())]
        locations = [f"loc_{i}" for i in range(len(receptacles) + 1)]
        goal = goal_library()[GOALS[self.goal].library]["pddl"].replace("#", "-")
        goal = goal.format(obj=self.target, recep=self.destination, toggle=LAMP)
        return "\n".join(
            [
                "(define (problem household) (:domain alfred)",
                "(:objects agent1 - agent",
                f"{' '.join(locations)} - location",
                f"{' '.join(receptacles)} - receptacle",
                f"{' '.join(objects)} - object",
                f"{' '.join(f'{kind}Type' for kind in kinds)} - rtype",
                f"{' '.join(f'{kind}Type' for kind in things)} - otype)",
                "(:init (= (total-cost) 0) (atLocation agent1 loc_0)",
                *init,
                ")",
                " ".join(goal.split()),  # ends with the closing parenthesis of the problem
            ]
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The choices and ranges from which `draw` draws a household.

    ``goals`` are the kinds of goals, and ``rooms`` the rooms (None = the usual room of the goal). ``receptacles`` and
    ``objects`` are the least and the largest number of each, ``object_kinds`` the allowed kinds (None = all), and
    ``same_kind`` is the largest number of objects of one kind.

    With ``full``, the numbers of receptacles and objects are drawn as in the real games, regardless of these two
    ranges, and ``rooms=None`` means every room in which the goal is possible.
    """

    goals: tuple[str, ...] = ("put",)
    rooms: tuple[str, ...] | None = None
    receptacles: tuple[int, int] = (5, 6)
    objects: tuple[int, int] = (4, 6)
    object_kinds: tuple[str, ...] | None = None
    same_kind: int = 2
    full: bool = False

    def rooms_of(self, goal: str) -> tuple[str, ...]:
        usual = GOALS[goal].rooms
        if self.rooms is None:
            return usual if self.full else usual[:1]
        return tuple(room for room in usual if room in self.rooms)

    def kinds_of(self, room: str) -> tuple[str, ...]:
        kinds = tuple(FULL_ROOMS[room].objects) if self.full else ROOMS[room].objects
        return kinds if self.object_kinds is None else tuple(kind for kind in kinds if kind in self.object_kinds)


class _Room:
    """A room that is being filled: its furniture, and for each piece the kinds of the objects put into it so far."""

    def __init__(self, rng: random.Random, furniture: Sequence[str]) -> None:
        self._rng = rng
        self.furniture = furniture
        self.inside: list[list[str]] = [[] for _ in self.furniture]

    def holders(self, kind: str) -> list[str]:
        """Return the kinds of furniture in this room into which an object of this kind can be put."""
        fits = thor().VAL_RECEPTACLE_OBJECTS
        return [r for r in sorted(set(self.furniture)) if kind in fits.get(r, ())]

    def place(self, kind: str, forbidden: str = "") -> None:
        """Put an object of ``kind`` into a random piece of furniture that it fits into, usually one of its usual places
        (`USUAL`).

        Furniture of the kind ``forbidden`` is never chosen.
        """
        count, usual, holders = Counter(self.furniture), USUAL.get(kind, {}), self.holders(kind)
        weights = []
        for furniture in self.furniture:
            possible = furniture in holders and furniture != forbidden
            weights.append(usual.get(furniture, 0.0) / count[furniture] + RARELY if possible else 0.0)
        self.inside[self._rng.choices(range(len(self.furniture)), weights)[0]].append(kind)


def draw(layout: Layout, seed: int) -> Household | None:
    """Draw a household. The result depends only on the arguments.

    Returns None if the draw fails, for example because the goal's object fits into no furniture that was drawn. The
    caller then tries another seed.
    """
    rng = random.Random(seed)
    goal = rng.choice(layout.goals)
    wanted = GOALS[goal]
    name = rng.choice(layout.rooms_of(goal))
    kinds = layout.kinds_of(name)
    room = _Room(rng, _draw_furniture(rng, layout, name))
    if layout.full:
        kinds = tuple(kind for kind in kinds if rng.random() * SCENES < FULL_ROOMS[name].objects[kind])

    choices: dict[str, list[str]] = {}  # each kind of object that suits the goal -> its possible destinations
    for kind in kinds:
        holders = room.holders(kind)
        if wanted.needs and kind not in thor().VAL_ACTION_OBJECTS[wanted.needs]:
            continue
        if goal == "examine":
            destinations = [""] if holders else []
        else:
            destinations = [r for r in holders if r != wanted.tool] if len(holders) > 1 else []
        if destinations:
            choices[kind] = destinations
    if not choices:
        return None
    target = rng.choice(sorted(choices))
    destination = rng.choice(choices[target])

    if goal == "examine":
        stands = [index for index, furniture in enumerate(room.furniture) if furniture in LAMP_STANDS]
        if not stands:
            return None
        room.inside[rng.choice(stands)].append(LAMP)
    for _ in range(wanted.targets):
        room.place(target, forbidden=destination)
    count = Counter({target: wanted.targets})
    if layout.full:  # as in the real games, there is at least one object of every kind that fits into some furniture
        for kind in kinds:
            if room.holders(kind):
                for _ in range(rng.randint(1, layout.same_kind) - count[kind]):
                    room.place(kind, destination if kind == target else "")
    else:
        total = rng.randint(*layout.objects)
        while sum(count.values()) < total:
            free = [kind for kind in kinds if count[kind] < layout.same_kind and room.holders(kind)]
            if not free:
                return None
            kind = rng.choice(free)
            count[kind] += 1
            room.place(kind, destination if kind == target else "")
    wording = rng.randrange(len(goal_library()[wanted.library]["templates"]))
    for things in room.inside:
        rng.shuffle(things)
    furniture = tuple((kind, tuple(things)) for kind, things in zip(room.furniture, room.inside, strict=True))
    return Household(name, goal, target, destination, furniture, wording)


def _draw_furniture(rng: random.Random, layout: Layout, room: str) -> list[str]:
    if layout.full:
        low, high = FULL_ROOMS[room].receptacles
        while True:
            count = Counter({kind: rng.choice(counts) for kind, counts in FULL_ROOMS[room].furniture.items()})
            if low <= sum(count.values()) <= high:
                return sorted(count.elements())
    total = rng.randint(*layout.receptacles)
    count = Counter(ROOMS[room].always)
    while sum(count.values()) < total:
        free = {kind: weight for kind, (weight, most) in ROOMS[room].maybe.items() if count[kind] < most}
        count[rng.choices(list(free), list(free.values()))[0]] += 1
    return sorted(count.elements())


# --- splits ----------------------------------------------------------------------------------------------
SHARES: dict[Split, float] = {"train": 0.6, "eval": 0.2, "warm_start": 0.2}
SEEN_LAYOUTS = 0.8  # share of layouts that training may play if evaluation separates seen from unseen layouts


def layout_seen(key: str) -> bool:
    """Return whether training may play rooms with this `Household.layout_key`.

    Only the key decides, so the answer is the same in every run.
    """
    return derive(0, "alfworld", "layout", key) / 2**63 < SEEN_LAYOUTS


def split_of(key: str) -> Split:
    """Return the split of households with this `Household.key`. Only the key decides, so runs do not differ."""
    point, reached = derive(0, "alfworld", "split", key) / 2**63, 0.0
    for split, share in SHARES.items():
        reached += share
        if point < reached:
            return split
    return "train"
