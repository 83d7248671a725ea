"""gymnasium's own small games in words: what their actions are called, what is seen, what an expert does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_DISCOUNT = 0.99  # of the expert's values: a shorter way is a better one


@dataclass(frozen=True, slots=True)
class Toy:
    """An environment in words. ``expert`` is for those without a table of what may happen."""

    actions: Sequence[str]
    introduction: str
    describe: Callable[[Any, Any], str]
    expert: Callable[[Any], int] | None = None


def _frozen_lake(observation: Any, env: Any) -> str:
    rows = [[cell.decode() for cell in row] for row in env.unwrapped.desc]
    row, column = divmod(int(observation), len(rows[0]))
    rows[row][column] = "*"
    return "\n".join(" ".join(line) for line in rows)


def _cliff_walking(observation: Any, env: Any) -> str:
    row, column = divmod(int(observation), env.unwrapped.shape[1])
    return f"You are at row {row}, column {column}."


_STANDS = ("R", "G", "Y", "B")
_STANDS_AT = ((0, 0), (0, 4), (4, 0), (4, 3))


def _taxi(observation: Any, env: Any) -> str:
    row, column, passenger, goal = env.unwrapped.decode(int(observation))
    waits = "is in the taxi" if passenger == len(_STANDS) else f"waits at {_stand(passenger)}"
    walls = "\n".join("".join(char.decode() for char in line) for line in env.unwrapped.desc)
    place = f"The taxi is at row {row}, column {column}. The passenger {waits} and wants to go to {_stand(goal)}."
    return f"{walls}\n{place}"


def _stand(index: int) -> str:
    row, column = _STANDS_AT[index]
    return f"{_STANDS[index]} (row {row}, column {column})"


def _blackjack(observation: Any, env: Any) -> str:
    own, dealer, ace = observation
    return f"Your cards are worth {own}, {'with' if ace else 'without'} a usable ace. The dealer shows {dealer}."


def _stick_or_hit(observation: Any) -> int:
    own, dealer, ace = (int(value) for value in observation)
    if ace:
        return int(own < (18 if dealer <= 8 else 19))
    return int(own < (12 if 4 <= dealer <= 6 else 13 if dealer in (2, 3) else 17))


TOYS: Mapping[str, Toy] = {
    "FrozenLakeEnv": Toy(
        ("left", "down", "right", "up"),
        "Cross the frozen lake from S to the goal G without falling into a hole H. F is ice, * is you.",
        _frozen_lake,
    ),
    "CliffWalkingEnv": Toy(
        ("up", "right", "down", "left"),
        "Walk from row 3, column 0 to row 3, column 11 of a field with rows 0 to 3 and columns 0 to 11. Columns 1 to "
        "10 of row 3 are a cliff: who steps there is back at the start.",
        _cliff_walking,
    ),
    "TaxiEnv": Toy(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "Drive the taxi to the passenger, pick them up and drop them off where they want to go. Row 0 is in the north, "
        "column 0 in the west; | is a wall.",
        _taxi,
    ),
    "BlackjackEnv": Toy(
        ("stick", "hit"),
        "Come closer to 21 than the dealer without going over it.",
        _blackjack,
        _stick_or_hit,
    ),
}
"""By the class of gymnasium's environment."""


def best_actions(table: Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]) -> np.ndarray:
    """int[states]: the best action in each, by value iteration over the environment's table ``P``, where
    ``P[state][action]`` lists (probability, next state, reward, terminated)."""
    states, actions = len(table), len(table[0])
    most = max(len(table[s][a]) for s in range(states) for a in range(actions))
    chance, following, reward = (np.zeros((states, actions, most)) for _ in range(3))
    goes_on = np.zeros((states, actions, most))
    for s in range(states):
        for a in range(actions):
            for k, (p, to, r, over) in enumerate(table[s][a]):
                chance[s, a, k], following[s, a, k], reward[s, a, k], goes_on[s, a, k] = p, to, r, not over
    follow = following.astype(int)
    values, worth = np.zeros(states), np.zeros((states, actions))
    for _ in range(5000):
        worth = (chance * (reward + _DISCOUNT * goes_on * values[follow])).sum(-1)
        if np.abs(worth.max(-1) - values).max() < 1e-10:
            break
        values = worth.max(-1)
    return worth.argmax(-1)
