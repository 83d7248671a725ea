"""Tables of furniture and objects for `households`: small rooms for quick training, and full rooms as in the real
games.
"""

from __future__ import annotations

from dataclasses import dataclass

Likely = dict[str, float]


@dataclass(frozen=True, slots=True)
class Room:
    """The furniture and objects that may be in a small room of one kind."""

    always: tuple[str, ...]  # furniture that every room has
    maybe: dict[str, tuple[float, int]]  # further furniture -> (weight in the draw, largest number)
    objects: tuple[str, ...]  # kinds of objects that the room may contain


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

# Kind of object -> weights of the furniture in which it is usually found. Other furniture that can hold it has the
# weight `RARELY`.
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
class FullRoom:
    """The furniture and objects that rooms of one kind have in the real games.

    The number of each kind of furniture is drawn independently of the others, so far more rooms are possible than the
    real games have.
    """

    receptacles: tuple[int, int]  # least and largest number of pieces of furniture
    furniture: dict[str, tuple[int, ...]]  # kind -> its number in each room of the real games
    objects: dict[str, int]  # kind -> number of AI2-THOR scenes, out of `SCENES`, that contain it


FULL_ROOMS: dict[str, FullRoom] = {
    "kitchen": FullRoom(
        (20, 54),
        {
            "Cabinet": (2, 4, 4, 6, 9, 10, 10, 10, 11, 12, 13, 13, 13, 13, 15, 16, 18, 19, 20, 20, 26, 27),
            "CoffeeMachine": (1,),
            "CounterTop": (1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4),
            "DiningTable": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3),
            "Drawer": (1, 1, 2, 3, 3, 3, 3, 3, 4, 4, 4, 5, 5, 6, 6, 6, 7, 8, 9, 12, 12, 27),
            "Fridge": (1,),
            "GarbageCan": (1,),
            "Microwave": (1,),
            "Safe": (0,) * 21 + (1,),
            "Shelf": (0,) * 17 + (3,) * 5,
            "SideTable": (0,) * 20 + (1,) * 2,
            "SinkBasin": (1,),
            "StoveBurner": (4,),
            "Toaster": (1,),
        },
        {
            **dict.fromkeys(("Apple", "Bowl", "Bread", "Cup", "DishSponge", "Egg", "Fork", "Knife", "Lettuce"), 30),
            **dict.fromkeys(("Mug", "Pan", "PepperShaker", "Plate", "Pot", "Potato", "SaltShaker", "SoapBottle"), 30),
            **{"Spatula": 30, "Spoon": 30, "Tomato": 30, "ButterKnife": 29, "Kettle": 15, "Ladle": 10},
            **{"WineBottle": 10, "Glassbottle": 7, "CellPhone": 4, "Statue": 4, "Vase": 4, "CreditCard": 3},
            **{"Book": 2, "Pen": 2, "Pencil": 2, "SprayBottle": 2},
        },
    ),
    "bathroom": FullRoom(
        (10, 18),
        {
            "BathtubBasin": (0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
            "Cabinet": (0, 0, 0, 0, 0, 0, 3, 4, 4, 4, 4, 4, 4),
            "Cart": (0,) * 12 + (1,),
            "CounterTop": (0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2),
            "Drawer": (0, 0, 0, 0, 0, 0, 0, 1, 4, 4, 6, 8, 8),
            "Dresser": (0,) * 12 + (1,),
            "GarbageCan": (1,),
            "HandTowelHolder": (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2),
            "Shelf": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3, 4),
            "SideTable": (0,) * 12 + (1,),
            "SinkBasin": (1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2),
            "Toilet": (1,),
            "ToiletPaperHanger": (1,),
            "TowelHolder": (1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2),
        },
        {
            **dict.fromkeys(("Candle", "Cloth", "HandTowel", "SoapBar", "SoapBottle", "SprayBottle"), 30),
            **{"ToiletPaper": 30, "Towel": 30, "TissueBox": 9, "DishSponge": 6},
        },
    ),
    "bedroom": FullRoom(
        (7, 26),
        {
            "ArmChair": (0,) * 13 + (1, 1, 2, 3),
            "Bed": (1,) * 14 + (2, 2, 2),
            "Cabinet": (0,) * 13 + (1, 1, 2, 4),
            "CounterTop": (0,) * 16 + (1,),
            "Desk": (0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2),
            "DiningTable": (0,) * 15 + (1, 1),
            "Drawer": (0, 1, 2, 2, 2, 2, 2, 3, 3, 4, 5, 5, 6, 8, 10, 13, 16),
            "Dresser": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2),
            "GarbageCan": (1,),
            "LaundryHamper": (0,) * 12 + (1,) * 5,
            "Safe": (0,) * 14 + (1,) * 3,
            "Shelf": (0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 5, 5, 5, 6, 8, 9, 14),
            "SideTable": (0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2),
        },
        {
            **dict.fromkeys(("AlarmClock", "Book", "CD", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Pen"), 30),
            **{"Pencil": 30, "Pillow": 30, "Mug": 16, "BaseballBat": 13, "Bowl": 13, "Box": 12, "BasketBall": 11},
            **{"TennisRacket": 10, "Cloth": 5, "Statue": 4, "TissueBox": 4, "RemoteControl": 3, "Vase": 3, "Watch": 2},
        },
    ),
    "living_room": FullRoom(
        (6, 26),
        {
            "ArmChair": (0, 1, 1, 1, 1, 1, 1, 2, 2, 3),
            "Cabinet": (0,) * 9 + (4,),
            "CoffeeTable": (0, 1, 1, 1, 1, 1, 1, 1, 2, 2),
            "DiningTable": (0, 0, 0, 0, 0, 1, 1, 1, 2, 2),
            "Drawer": (0, 1, 2, 4, 4, 4, 6, 7, 8, 12),
            "Dresser": (0, 0, 0, 0, 0, 0, 1, 1, 1, 2),
            "GarbageCan": (1,),
            "Ottoman": (0,) * 9 + (1,),
            "Safe": (0,) * 9 + (1,),
            "Shelf": (0, 0, 0, 0, 0, 0, 1, 3, 6, 12),
            "SideTable": (0, 0, 1, 1, 1, 2, 2, 2, 3, 3),
            "Sofa": (1, 1, 1, 1, 1, 1, 1, 2, 2, 2),
            "TVStand": (0, 0, 0, 0, 0, 0, 1, 1, 1, 1),
        },
        {
            **dict.fromkeys(("Box", "CreditCard", "KeyChain", "Laptop", "Pillow", "RemoteControl"), 30),
            **{"Statue": 29, "Newspaper": 18, "Vase": 18, "Watch": 16, "WateringCan": 13, "Plate": 10, "TissueBox": 9},
            **{"Book": 7, "CellPhone": 7, "Pen": 5, "Bowl": 4, "Pencil": 4, "Candle": 3},
        },
    ),
}
SCENES = 30  # number of AI2-THOR's scenes of each kind of room
FULL_SAME_KIND = 3  # largest number of objects of one kind, as in the generation of the real games
