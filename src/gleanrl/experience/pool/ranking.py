"""Rankings of a task's stored trajectories (``replay.select``).

A ranking decides which trajectories of a task are replayed, and which remain in the pool if the task has more than
``replay.capacity_per_task``. To add one, decorate a function with `@ranking`, and set
``replay.select = "file.py:function"``:

    @ranking("shortest", keep=lambda candidate: (-candidate.length, candidate.order))
    def shortest(trajectories: TaskTrajectories, random: np.random.Generator) -> np.ndarray:
        return np.lexsort((trajectories.age, trajectories.length))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gleanrl.utils.errors import UserError
from gleanrl.utils.registry import Registry

Order = npt.NDArray[np.intp]


@dataclass(frozen=True)
class TaskTrajectories:
    """The n stored trajectories of one task, oldest first, as a ranking sees them."""

    entropy: npt.NDArray[np.float64]
    """float64 [n]: mean entropy of the policy at the sampled tokens, in nats: recorded, or under the current policy
    with ``replay.entropy_from = "current"``."""
    uses: npt.NDArray[np.int64]
    """int64 [n]: how often each was replayed."""
    age: npt.NDArray[np.int64]
    """int64 [n]: steps between the weights that sampled it and the step that will learn from it; at least 0."""
    score: npt.NDArray[np.float64]
    """float64 [n]: score of each trajectory."""
    length: npt.NDArray[np.int64]
    """int64 [n]: number of sampled tokens."""

    @property
    def newest_first(self) -> Order:
        """intp [n]: 0 for the newest trajectory, n - 1 for the oldest. As a last sort key it breaks ties."""
        return np.arange(self.entropy.size)[::-1]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored or new trajectory of a task, with the properties by which the pool chooses which ones to evict."""

    order: int  # larger for newer trajectories; for a stored trajectory its key (`pool.Stored.key`)
    entropy: float
    score: float
    length: int  # number of sampled tokens
    digest: bytes  # `codec.token_digest`


def _newest(candidate: Candidate) -> Any:
    return candidate.order


@dataclass(frozen=True)
class Ranking:
    """A ranking: its name, its function and its properties, which `ranking` describes."""

    name: str
    function: Callable[[TaskTrajectories, np.random.Generator], npt.ArrayLike]
    keep: Callable[[Candidate], Any]
    by_entropy: bool

    def __call__(self, trajectories: TaskTrajectories, random: np.random.Generator) -> list[int]:
        """Return the indices of the trajectories, best first. Raises `UserError` if the function returns others.

        The function is not called if there are none, so it need not handle empty arrays.
        """
        if not trajectories.entropy.size:
            return []
        count = trajectories.entropy.size
        found = self.function(trajectories, random)
        order = np.asarray(found)
        if order.shape != (count,) or order.dtype.kind not in "iu" or sorted(order.tolist()) != list(range(count)):
            raise UserError(f"replay.select {self.name!r} returned {found}, not each index from 0 to {count - 1} once")
        return order.tolist()


RANKINGS: Registry[Ranking] = Registry("replay.select", Ranking, "@gleanrl.experience.pool.ranking.ranking(...)")


def ranking(
    name: str, *, keep: Callable[[Candidate], Any] = _newest, by_entropy: bool = True
) -> Callable[[Callable[[TaskTrajectories, np.random.Generator], npt.ArrayLike]], Ranking]:
    """Return a decorator that registers ``function(trajectories, random)`` as a ranking under ``name``.

    The function returns the indices of all trajectories, int [n], best first. ``random`` depends on the seed of the run
    and the number of the batch.

    Args:
        keep: the sort key by which the pool chooses what remains of a task that has too many trajectories. It takes a
            `Candidate`; those with the smallest keys are evicted. It must depend on nothing else, because a resumed run
            must keep the same trajectories. By default the newest remain.
        by_entropy: whether the function looks at ``entropy``. If not, ``replay.entropy_from = "current"`` costs no
            forward pass.
    """
    if not callable(keep):
        raise UserError(f"replay.select {name!r}: keep must be a function of a Candidate, not {keep!r}")
    return lambda function: RANKINGS.add(Ranking(name, function, keep, by_entropy))


@ranking("lowest_entropy", keep=lambda candidate: (-candidate.entropy, candidate.order))
def lowest_entropy(trajectories: TaskTrajectories, random: np.random.Generator) -> Order:
    """Rank the trajectories of which the policy was surest first, and the newer one of two that are equal."""
    return np.lexsort((trajectories.newest_first, trajectories.entropy))


@ranking("least_used", keep=lambda candidate: (-candidate.entropy, candidate.order))
def least_used(trajectories: TaskTrajectories, random: np.random.Generator) -> Order:
    """Rank those replayed least often first, and of these the lowest entropies. The lowest entropies remain."""
    return np.lexsort((trajectories.newest_first, trajectories.entropy, trajectories.uses))


@ranking("highest_entropy", keep=lambda candidate: (candidate.entropy, candidate.order))
def highest_entropy(trajectories: TaskTrajectories, random: np.random.Generator) -> Order:
    """Rank the trajectories of which the policy was least sure first."""
    return np.lexsort((trajectories.newest_first, -trajectories.entropy))


@ranking("newest", by_entropy=False)
def newest(trajectories: TaskTrajectories, random: np.random.Generator) -> Order:
    """Rank the trajectories that were stored last first."""
    return np.argsort(trajectories.newest_first)


# Digests are uniformly distributed hashes, so those with the smallest ones are a uniform sample of all distinct
# trajectories that the task ever had (bottom-k sampling). No state of a random generator has to be saved for this.
@ranking(
    "random",
    keep=lambda candidate: (bytes(255 - byte for byte in candidate.digest), candidate.order),
    by_entropy=False,
)
def shuffled(trajectories: TaskTrajectories, random: np.random.Generator) -> Order:
    """Rank the trajectories in a random order. A uniform sample of all that the task ever had remains."""
    return random.permutation(trajectories.entropy.size)
