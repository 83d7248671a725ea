"""Example of a tool environment: a class whose public typed methods are the tools that the model can call.

The task is to calculate with two numbers. Run it with `gleanrl train examples/calculator.toml`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from gleanrl.environments.tools import call

OPERATIONS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b}


class Calculator:
    """A calculator. An instance is made for each episode, so its attributes are the state of the episode."""

    @staticmethod
    def rows(seed: int) -> Iterator[dict[str, Any]]:
        """Yield an endless sequence of tasks. The keys of a row are available to `reset` and `expert` as arguments.

        A task's id is derived from the content of its row.
        """
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
        """Return 1 if the final answer is the right number, else 0."""
        return float(answer.strip() == str(self.expected))

    def expert(self, a: int, b: int, word: str) -> Any:
        """Demonstrate a task: call the tool, then give its result as the final answer."""
        result = yield call("calculate", a=a, b=b, operation=word)
        yield result
