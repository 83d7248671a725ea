"""Households as ALFWorld has them, drawn at random: rooms, furniture, objects and a goal, as PDDL.

What fits where, what can be heated, cooled, cleaned or cut, and the wording and PDDL of the goals come from
the constants that the alfworld package carries; the tables here say only what a room usually has and where
people usually keep things.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Likely = dict[str, float]


@dataclass(frozen=True, slots=True)
class Room:
    """What a kind of room has: furniture that is always there, what it may have (weight, most), and objects."""

    always: tuple[str, ...]
    maybe: dict[str, tuple[float, int]]
    objects: tuple[str, ...]


ROOMS: dict[str, Room] = {
    "kitchen": Room(
        ("Fridge", "Microwave", "SinkBasin", "CounterTop"),
        {
            "Cabinet": (4, 8),
            "Drawer": (4, 8),
            "CounterTop": (2, 3),
            "DiningTable": (2, 1),
            "GarbageCan": (2, 1),
            "StoveBurner": (1, 4),
            "CoffeeMachine": (1, 1),
            "Shelf": (1, 3),
        },
        (
            *("Apple", "Potato", "Egg", "Bread", "Mug", "Cup", "Plate", "Knife"),
            *("Tomato", "Lettuce", "Bowl", "Pan", "Pot", "Fork", "Spoon", "ButterKnife"),
            *("Spatula", "Ladle", "DishSponge", "SaltShaker", "PepperShaker", "SoapBottle"),
        ),
    ),
    "bathroom": Room(
        ("SinkBasin", "Toilet", "CounterTop"),
        {
            "Cabinet": (4, 4),
            "Drawer": (3, 4),
            "GarbageCan": (2, 1),
            "BathtubBasin": (2, 1),
            "HandTowelHolder": (2, 2),
            "ToiletPaperHanger": (2, 1),
            "Shelf": (1, 2),
            "SideTable": (1, 1),
            "Cart": (1, 1),
        },
        ("SoapBar", "SoapBottle", "Cloth", "ToiletPaper", "HandTowel", "SprayBottle", "Candle", "DishSponge"),
    ),
    "bedroom": Room(
        ("Bed", "Desk"),
        {
            "Drawer": (4, 6),
            "SideTable": (3, 2),
            "Dresser": (2, 1),
            "Shelf": (3, 4),
            "GarbageCan": (2, 1),
            "ArmChair": (1, 1),
            "Safe": (1, 1),
            "LaundryHamper": (1, 1),
        },
        (
            *("Book", "CellPhone", "KeyChain", "CreditCard", "Pencil", "Pen", "AlarmClock", "CD"),
            *("Laptop", "Pillow", "Mug", "Bowl", "Box", "Cloth"),
        ),
    ),
    "living_room": Room(
        ("Sofa", "CoffeeTable"),
        {
            "SideTable": (3, 3),
            "ArmChair": (3, 2),
            "Drawer": (3, 5),
            "Shelf": (2, 4),
            "TVStand": (2, 1),
            "DiningTable": (1, 1),
            "Dresser": (1, 1),
            "GarbageCan": (2, 1),
            "Safe": (1, 1),
            "Ottoman": (1, 1),
        },
        (
            *("RemoteControl", "Newspaper", "KeyChain", "CreditCard", "Laptop", "Book", "Vase", "Statue"),
            *("Watch", "TissueBox", "Box", "Pillow", "Plate", "WateringCan"),
        ),
    ),
}

# Where a thing is usually found; anywhere else that can hold it is possible, and rare.
USUAL: dict[str, Likely] = {
    "Apple": {"Fridge": 4, "CounterTop": 2, "DiningTable": 2, "GarbageCan": 1},
    "Potato": {"Fridge": 3, "CounterTop": 2, "SinkBasin": 2, "Microwave": 1},
    "Egg": {"Fridge": 5, "CounterTop": 1, "SinkBasin": 1},
    "Bread": {"CounterTop": 3, "DiningTable": 3, "Fridge": 1},
    "Tomato": {"Fridge": 4, "CounterTop": 2, "DiningTable": 1},
    "Lettuce": {"Fridge": 4, "CounterTop": 2, "DiningTable": 1},
    "Mug": {"Cabinet": 4, "CounterTop": 2, "CoffeeMachine": 2, "Desk": 2, "Microwave": 1},
    "Cup": {"Cabinet": 4, "SinkBasin": 2, "Fridge": 1},
    "Plate": {"Cabinet": 4, "DiningTable": 2, "CoffeeTable": 2, "SinkBasin": 1},
    "Bowl": {"Cabinet": 3, "CounterTop": 2, "Desk": 1, "Shelf": 1},
    "Pan": {"StoveBurner": 4, "Cabinet": 2, "CounterTop": 1},
    "Pot": {"StoveBurner": 4, "Cabinet": 2, "SinkBasin": 1},
    **{kind: {"Drawer": 5, "CounterTop": 2} for kind in ("Knife", "Fork", "Spoon", "ButterKnife", "Spatula", "Ladle")},
    "DishSponge": {"SinkBasin": 3, "CounterTop": 2, "Cabinet": 1},
    **{kind: {"Cabinet": 3, "CounterTop": 2, "Drawer": 1} for kind in ("SaltShaker", "PepperShaker")},
    "SoapBottle": {"CounterTop": 3, "Cabinet": 2, "Toilet": 1},
    "SoapBar": {"SinkBasin": 3, "BathtubBasin": 2, "CounterTop": 1},
    "Cloth": {"Cabinet": 2, "Drawer": 2, "BathtubBasin": 1, "LaundryHamper": 2},
    "ToiletPaper": {"ToiletPaperHanger": 3, "Toilet": 2, "Cabinet": 2},
    "HandTowel": {"HandTowelHolder": 5},
    "SprayBottle": {"Cabinet": 3, "Toilet": 1, "CounterTop": 1},
    "Candle": {"CounterTop": 2, "Cabinet": 1, "Toilet": 1},
    "Book": {"Desk": 3, "Bed": 2, "Shelf": 2, "Drawer": 1},
    "CellPhone": {"Desk": 2, "Bed": 2, "SideTable": 2, "Drawer": 1},
    **{kind: {"Desk": 2, "Drawer": 2, "Shelf": 1} for kind in ("Pencil", "Pen", "CD")},
    **{kind: {"SideTable": 2, "Dresser": 2, "Drawer": 2, "Safe": 1} for kind in ("KeyChain", "CreditCard", "Watch")},
    "AlarmClock": {"Desk": 2, "SideTable": 3, "Shelf": 1},
    "Laptop": {"Desk": 3, "Bed": 3, "Sofa": 2, "CoffeeTable": 2},
    "Pillow": {"Bed": 4, "Sofa": 3, "ArmChair": 2},
    "RemoteControl": {"Sofa": 2, "CoffeeTable": 2, "ArmChair": 1},
    "Newspaper": {"CoffeeTable": 2, "Sofa": 2, "GarbageCan": 1},
}
RARELY = 0.05


@dataclass(frozen=True, slots=True)
class Goal:
    """A kind of goal: its name in alfworld's goal library, the tool and the property that it needs, its rooms."""

    library: str
    rooms: tuple[str, ...]
    tool: str = ""
    needs: str = ""
    targets: int = 1


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
    """alfworld's constants: what fits where, and what can be done with what."""
    from alfworld.gen import constants

    return constants


@lru_cache(maxsize=1)
def goal_library() -> dict[str, dict[str, Any]]:
    from alfworld.gen.goal_library import gdict

    return gdict


@dataclass(frozen=True, slots=True)
class Household:
    """A room with furniture, each piece with the kinds of the objects in it, and a goal."""

    room: str
    goal: str
    target: str
    destination: str  # empty for examine
    furniture: tuple[tuple[str, tuple[str, ...]], ...]
    wording: int

    @property
    def key(self) -> str:
        """Equal for households that differ in nothing but numbering and wording; decides the split."""
        inside = sorted((kind, sorted(objects)) for kind, objects in self.furniture)
        text = repr((self.goal, self.target, self.destination, inside))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def task(self) -> str:
        """The goal in the words of the real games."""
        template = goal_library()[GOALS[self.goal].library]["templates"][self.wording]
        return template.format(obj=self.target.lower(), recep=self.destination.lower(), toggle=LAMP.lower())

    def pddl(self) -> str:
        """The problem, with object names as the real games have them (so that they read "cabinet 2")."""
        numbers: Counter[str] = Counter()

        def name(kind: str) -> str:
            numbers[kind] += 1
            stem = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}.get(kind)
            return f"{stem}_bar_{numbers[kind]}_bar_{kind}" if stem else f"{kind}_bar_{numbers[kind]}"

        receptacles, objects, init = [], [], []
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
                init += _properties(thing, thing_kind)
        kinds = sorted({kind for kind, _ in self.furniture})
        things = sorted({kind for _, inside in self.furniture for kind in inside})
        fits = thor().VAL_RECEPTACLE_OBJECTS
        init += [f"(canContain {r}Type {o}Type)" for r in kinds for o in things if o in fits.get(r, ())]
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
                " ".join(goal.split()),  # closes the problem too
            ]
        )


def _properties(thing: str, kind: str) -> list[str]:
    able = thor().VAL_ACTION_OBJECTS
    facts = [f"(objectType {thing} {kind}Type)"]
    facts += [f"({word.lower()} {thing})" for word in sorted(able) if kind in able[word]]
    if kind in thor().MOVABLE_RECEPTACLES_SET:
        facts.append(f"(isReceptacleObject {thing})")
    if kind != LAMP:
        facts.append(f"(pickupable {thing})")
    return facts


@dataclass(frozen=True, slots=True)
class Layout:
    """What is drawn: kinds of goals, rooms (None: a goal's usual one), and how much furniture and how many objects."""

    goals: tuple[str, ...] = ("put",)
    rooms: tuple[str, ...] | None = None
    receptacles: tuple[int, int] = (5, 6)
    objects: tuple[int, int] = (4, 6)
    object_kinds: tuple[str, ...] | None = None
    same_kind: int = 2

    def rooms_of(self, goal: str) -> tuple[str, ...]:
        usual = GOALS[goal].rooms
        return usual[:1] if self.rooms is None else tuple(room for room in usual if room in self.rooms)

    def kinds_of(self, room: str) -> tuple[str, ...]:
        kinds = ROOMS[room].objects
        return kinds if self.object_kinds is None else tuple(kind for kind in kinds if kind in self.object_kinds)


class _Room:
    """A household in the making: furniture, and the kinds of the objects put into each piece."""

    def __init__(self, rng: random.Random, room: str, total: int) -> None:
        self._rng = rng
        count = Counter(ROOMS[room].always)
        while sum(count.values()) < total:
            free = {kind: weight for kind, (weight, most) in ROOMS[room].maybe.items() if count[kind] < most}
            count[rng.choices(list(free), list(free.values()))[0]] += 1
        self.furniture = sorted(count.elements())
        self.inside: list[list[str]] = [[] for _ in self.furniture]

    def holders(self, kind: str) -> list[str]:
        """Kinds of furniture here that can hold it."""
        fits = thor().VAL_RECEPTACLE_OBJECTS
        return [r for r in sorted(set(self.furniture)) if kind in fits.get(r, ())]

    def place(self, kind: str, forbidden: str = "") -> None:
        """Put one where it is usually found, or rarely elsewhere, but never into ``forbidden``."""
        count, usual, holders = Counter(self.furniture), USUAL.get(kind, {}), self.holders(kind)
        weights = [
            usual.get(r, 0.0) / count[r] + RARELY if r in holders and r != forbidden else 0.0 for r in self.furniture
        ]
        self.inside[self._rng.choices(range(len(self.furniture)), weights)[0]].append(kind)

    def stand(self, kind: str, where: Sequence[str]) -> bool:
        """Put one on any of some kinds of furniture, if there is any."""
        stands = [i for i, furniture in enumerate(self.furniture) if furniture in where]
        if stands:
            self.inside[self._rng.choice(stands)].append(kind)
        return bool(stands)

    def filled(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        for things in self.inside:
            self._rng.shuffle(things)
        return tuple((kind, tuple(things)) for kind, things in zip(self.furniture, self.inside, strict=True))


def draw(layout: Layout, seed: int) -> Household | None:
    """A household, or None where this seed's draw does not make one (its target has nowhere to go, say)."""
    rng = random.Random(seed)
    goal = rng.choice(layout.goals)
    wanted = GOALS[goal]
    name = rng.choice(layout.rooms_of(goal))
    room = _Room(rng, name, rng.randint(*layout.receptacles))
    kinds = layout.kinds_of(name)
    choice = _target(rng, wanted, kinds, room)
    if choice is None or (goal == "examine" and not room.stand(LAMP, LAMP_STANDS)):
        return None
    target, destination = choice
    for _ in range(wanted.targets):
        room.place(target, forbidden=destination)
    count = Counter({target: wanted.targets})
    total = rng.randint(*layout.objects)
    while sum(count.values()) < total:
        free = [kind for kind in kinds if count[kind] < layout.same_kind and room.holders(kind)]
        if not free:
            return None
        kind = rng.choice(free)
        count[kind] += 1
        room.place(kind, forbidden=destination if kind == target else "")
    wording = rng.randrange(len(goal_library()[wanted.library]["templates"]))
    return Household(name, goal, target, destination, room.filled(), wording)


def _target(rng: random.Random, wanted: Goal, kinds: Sequence[str], room: _Room) -> tuple[str, str] | None:
    """A kind of object that suits the goal, and a kind of furniture that can hold it beside where it starts."""
    able = thor().VAL_ACTION_OBJECTS
    choices: dict[str, list[str]] = {}
    for kind in kinds:
        holders = room.holders(kind)
        if wanted.needs and kind not in able[wanted.needs]:
            continue
        if wanted.library == GOALS["examine"].library:
            destinations = [""] if holders else []
        else:
            destinations = [r for r in holders if r != wanted.tool] if len(holders) > 1 else []
        if destinations:
            choices[kind] = destinations
    if not choices:
        return None
    target = rng.choice(sorted(choices))
    return target, rng.choice(choices[target])
