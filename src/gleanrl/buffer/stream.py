"""A random stream from which batches are drawn ahead of when they are asked for."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Ahead:
    """A batch that is not given out yet: states of the generator before and after it; None while it is made."""

    before: Tensor
    after: Tensor | None = None


class Stream:
    """States of a generator, for checkpoints: who loads one is to get what was drawn and not given out yet."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._ahead: list[Ahead] = []
        self._lock = threading.Lock()

    def begin(self) -> Ahead:
        """A batch is about to be drawn ahead."""
        with self._lock:
            batch = Ahead(self._generator.get_state())
            self._ahead.append(batch)
            return batch

    def drawn(self, batch: Ahead) -> None:
        batch.after = self._generator.get_state()

    def end(self, batch: Ahead) -> None:
        """It was given out, or thrown away."""
        with self._lock:
            if batch in self._ahead:
                self._ahead.remove(batch)

    def state(self) -> Tensor:
        """Where the stream goes on: with the oldest batch that is not given out.

        Where somebody else has drawn since, no state gives both again, and it is the generator's.
        """
        with self._lock:
            now = self._generator.get_state()
            states = [own.before for own in self._ahead[1:]] + [now]
            alone = all(
                own.after is None or torch.equal(own.after, state)
                for own, state in zip(self._ahead, states, strict=False)
            )
            return self._ahead[0].before if self._ahead and alone else now

    def restore(self, state: Tensor) -> None:
        """Go on from a state; what was drawn ahead of another one is nobody's."""
        with self._lock:
            self._ahead.clear()
            self._generator.set_state(state)
