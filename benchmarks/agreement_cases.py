"""Random batches and table rows for `agreement.py`, and wrappers of our functions with the other libraries' arguments.

A *peer* is one of the libraries that are compared with Glean RL: verl or TRL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gleanrl.algorithms.advantages import estimate
from gleanrl.algorithms.loss import LossConfig, padded_policy_loss

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
LOW, HIGH, DUAL = 0.2, 0.28, 3.0
Pair = tuple[Tensor, Tensor]  # ours, theirs


@dataclass(frozen=True)
class Case:
    """A random batch of N trajectories with L positions each. All floating-point tensors have the same dtype."""

    number: int
    rewards: Tensor  # [N, L], not 0 only at the last trained token of a trajectory
    mask: Tensor  # bool [N, L], True at trained tokens
    group: Tensor  # int64 [N], index of each trajectory's group
    logp: Tensor  # [N, L], log-probs of the policy; so are the next three, of other policies
    old: Tensor
    behaviour: Tensor
    ref: Tensor
    values: Tensor  # [N, L], predictions of a critic
    advantages: Tensor  # [N, L], arbitrary; not computed from `rewards`
    greedy: Tensor  # [N], reward of a greedy rollout of each trajectory's task

    @property
    def weights(self) -> Tensor:
        return self.mask.to(self.logp.dtype)

    @property
    def mode(self) -> str:
        return MODES[self.number % len(MODES)]


@dataclass(frozen=True)
class Check:
    """A row of the first table: a pair of functions to compare, and the kind of batches to compare them on."""

    ours: str  # name of our function and its options
    theirs: str  # name of the peer's function
    compare: Callable[[Case], dict[str, Pair]]  # returns "values" and, if the result has one, "gradient"
    drift: float = 25.0  # largest |log-ratio| in a batch; peers clamp larger ones
    group: tuple[int, int] = (1, 16)  # smallest and largest group size
    equal: bool = False  # all groups of a batch have the same size, and all trajectories have a trained token


@dataclass(frozen=True)
class Difference:
    """A row of the second table: an intentional difference, with the results of both libraries on a minimal example."""

    about: str
    ours: str
    theirs: str


class Peer(Protocol):
    name: str
    version: str

    def checks(self) -> list[Check]: ...

    def differences(self) -> list[Difference]: ...


def draw(check: Check, number: int, seed: int, dtype: torch.dtype) -> Case:
    random = torch.Generator().manual_seed(1000 * seed + number)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)  # drawn as float32, so equal in both dtypes

    sizes = [integer(*check.group) for _ in range(integer(2, 5))]
    if check.equal:
        sizes = [sizes[0]] * len(sizes)
    n, length = sum(sizes), integer(2, 40)
    mask = torch.zeros(n, length, dtype=torch.bool)
    for row in mask:
        start = integer(0, length - 1)
        row[start : integer(start, length - 1) + 1] = True
        row &= torch.rand(length, generator=random) < 0.8
        if check.equal and not row.any():
            row[-1] = True
    mask[0, :2] = True  # whitening divides by the standard deviation, which needs at least two trained tokens
    last = length - 1 - mask.flip(-1).byte().argmax(-1)
    scores = [
        lambda: (normal(n) > 0).to(dtype),
        lambda: (4 * normal(n)).round() / 4,
        lambda: normal(n),
        lambda: 100 * normal(n),
    ][number % 4]()
    rewards = torch.zeros(n, length, dtype=dtype)
    rewards[torch.arange(n), last] = torch.where(mask.any(-1), scores, 0.0)
    drift = (0.02, 0.3, 3.0)[number % 3] * normal(n, length)
    wild = torch.rand(n, length, generator=random) < 0.02
    drift = torch.where(wild, 30 * normal(n, length), drift).clamp(-check.drift, check.drift)
    old = -normal(n, length).abs() * 2
    mismatch = (0.3 * normal(n, length)).clamp(-check.drift, check.drift)
    return Case(
        number=number,
        rewards=rewards,
        mask=mask,
        group=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        logp=old + drift,
        old=old,
        behaviour=(old - mismatch).float().to(dtype),
        ref=old + drift - normal(n, length).clamp(-2, 2),
        values=normal(n, length),
        advantages=normal(n, length) if number % 2 else normal(n, 1).expand(n, length).contiguous(),
        greedy=normal(n),
    )


def on_mask(case: Case, ours: Tensor, theirs: Tensor) -> Pair:
    return ours[case.mask], theirs[case.mask]


def differentiated(case: Case, ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> dict[str, Pair]:
    """Evaluate two functions of the log-probs, and return pairs of their values and of their gradients.

    Both are taken at trained tokens only, unless a value is a scalar.
    """

    def both(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = case.logp.clone().requires_grad_()
        result = function(leaf)
        (gradient,) = torch.autograd.grad(result.sum(), leaf)
        return result.detach(), gradient[case.mask]

    (a, da), (b, db) = both(ours), both(theirs)
    return {"values": (a, b) if a.ndim == 0 else on_mask(case, a, b), "gradient": (da, db)}


def our_loss(case: Case, logp: Tensor, **settings: Any) -> Tensor:
    settings = {"clip_low": LOW, "clip_high": HIGH, "dual_clip": DUAL, "aggregation": case.mode, **settings}
    config = LossConfig(**settings)
    return padded_policy_loss(
        logp, case.old, case.advantages, case.mask, config=config, behaviour_logp=case.behaviour
    ).loss


def credits(case: Case, name: str, **options: Any) -> Tensor:
    """Return advantages and returns of the estimator ``name``, as [2, N, L]."""
    return torch.stack(estimate(name, case.rewards, case.mask, case.group, **options)).to(case.rewards.dtype)


def shown(value: Tensor | float) -> str:
    numbers = torch.as_tensor(value, dtype=torch.float64).flatten().tolist()
    return ", ".join(f"{number:.7g}" for number in numbers)


def single(drift: float, advantage: float) -> Case:
    """Make a batch of one trajectory with two trained tokens, which have the given log-ratio and advantage."""
    old = torch.full((1, 2), -1.0)
    return Case(
        number=0,
        rewards=torch.zeros(1, 2),
        mask=torch.ones(1, 2, dtype=torch.bool),
        group=torch.zeros(1, dtype=torch.int64),
        logp=old + drift,
        old=old,
        behaviour=old,
        ref=old,
        values=old,
        advantages=torch.full((1, 2), advantage),
        greedy=torch.zeros(1),
    )
