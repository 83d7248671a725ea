"""Arithmetic with a calculator: a class whose typed methods are the tools. `gleanrl train examples/calculator.toml`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from gleanrl.environments.tools import call

OPERATIONS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b}


class Calculator:
    """Made anew for each episode, so its attributes are the episode's state."""

    @staticmethod
    def rows(seed: int) -> Iterator[dict[str, Any]]:
        """Tasks without end; each row's content is its id."""
        draw = random.Random(seed)
        while True:
            a, b, word = draw.randint(2, 99), draw.randint(2, 99), draw.choice(list(OPERATIONS))
            yield {"prompt": f"{word}: {a}, {b}", "a": a, "b": b, "word": word, "answer": OPERATIONS[word](a, b)}

    def reset(self, answer: int) -> None:
        self.expected = answer

    def calculate(self, a: int, b: int, operation: str) -> int:
        """Calculate with two whole numbers.

        Args:
            a: the first number.
            b: the second number.
            operation: plus, minus or times.
        """
        if operation not in OPERATIONS:
            raise ValueError(f"operation is {', '.join(OPERATIONS)}")
        return OPERATIONS[operation](a, b)

    def get_reward(self, answer: str) -> float:
        """1 for the right number as the final answer."""
        return float(answer.strip() == str(self.expected))

    def expert(self, a: int, b: int, word: str) -> Any:
        """What a demonstration says: a call, then what came back."""
        result = yield call("calculate", a=a, b=b, operation=word)
        yield result
