"""Advantages: for each trained token, how much better its trajectory did than those it is compared with.

`estimate` is the entry point, for a run (`gleanrl.algorithms.batch`) and for other trainers' loops:

    advantages, returns = estimate("grpo", token_rewards, mask, group)

An estimator is a function of `Rewards` decorated with `@estimator`. The ten built-in estimators agree with verl's
estimators of the same names. Statistics are float64 and computed without a loop over rows or positions. A quantity per
trajectory is a vector [N]; a quantity per token is a vector [T] over the trained tokens of valid members, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Any, Literal

import torch
from torch import Tensor

from gleanrl.utils.errors import UserError
from gleanrl.utils.registry import Registry
from gleanrl.utils.text import nearest

EPSILON = 1e-6  # added to the standard deviation that divides advantages
WHITENING_EPSILON = 1e-8  # added to the variance when advantages are whitened

INPUTS = {
    "values": "float [N, L], what a critic predicts at each token",
    "reward_baselines": "float [N], the rewards of greedy rollouts",
}


@dataclass(frozen=True)
class Rewards:
    """The input of an estimator: N trajectories of L positions in G groups.

    Means, standard deviations and whitening statistics are computed over the ``baseline`` members, all of which are
    valid. What an estimator returns for an invalid member is discarded.
    """

    given: Tensor  # [N, L], token rewards from the caller; those of invalid members may be anything
    mask: Tensor  # bool [N, L], trained tokens
    group: Tensor  # int64 [N], 0 .. G-1
    valid: Tensor  # bool [N]
    baseline: Tensor  # bool [N]
    groups: int

    @cached_property
    def token_rewards(self) -> Tensor:
        """float64 [N, L], the given token rewards; 0 for invalid members."""
        return torch.where(self.valid[:, None], self.given.double(), 0.0)

    @cached_property
    def scores(self) -> Tensor:
        """float64 [N]: the sum of a trajectory's token rewards, those at masked positions included."""
        return torch.where(self.valid, self.given.double().sum(-1), 0.0)

    @cached_property
    def counts(self) -> Tensor:
        """float64 [N]: number of baseline members in each trajectory's group."""
        return self.sum_by_group(self.baseline.double())[self.group]

    @cached_property
    def means(self) -> Tensor:
        """float64 [N]: mean score of the baseline members of each trajectory's group; 0 if there are none."""
        return self.weighted_means(self.baseline.double())

    @cached_property
    def centred(self) -> Tensor:
        """float64 [N]: score minus mean. For a lone baseline member the mean is taken as 0.

        Members that are not in the baseline are compared with the lone member's score.
        """
        return self.scores - torch.where(self.lone, 0.0, self.means)

    @cached_property
    def lone(self) -> Tensor:
        """bool [N]: members that are the only baseline member of their group."""
        return self.baseline & (self.counts <= 1)

    @cached_property
    def deviations(self) -> Tensor:
        """float64 [N]: standard deviation (n-1) of the baseline members of each trajectory's group, 1 where it is 0."""
        squares = torch.where(self.baseline, (self.scores - self.means) ** 2, 0.0)
        variance = self.sum_by_group(squares)[self.group] / (self.counts - 1).clamp(min=1)
        return torch.where(variance > 0, variance.sqrt(), 1.0)

    @cached_property
    def zero_variance(self) -> Tensor:
        """bool [N]: members of the groups that have at least two valid members, all with the same score."""
        low, high = self.lowest(self.valid), self.highest(self.valid)
        several = self.sum_by_group(self.valid.double()) >= 2
        return (several & (low == high))[self.group]

    @cached_property
    def trained(self) -> Tensor:
        """bool [N, L]: the T trained tokens of valid members."""
        return self.mask & self.valid[:, None]

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [N]: trained tokens of each trajectory, 0 for invalid members."""
        return self.trained.view(torch.uint8).sum(-1, dtype=torch.int32).long()

    @cached_property
    def joined(self) -> Tensor:
        """bool [T-1]: whether a trained token and the next one belong to one trajectory."""
        ends = self.lengths.cumsum(0)[self.lengths > 0] - 1
        joined = self.trained.new_ones(int(self.lengths.sum()))
        joined[ends] = False
        return joined[:-1]

    @cached_property
    def adjacent(self) -> Tensor:
        """bool [T-1]: ``joined``, and no masked position lies between the two tokens."""
        following = torch.zeros_like(self.trained)
        following[:, :-1] = self.trained[:, 1:]
        return following.masked_select(self.trained)[:-1]

    def rewards_at_tokens(self) -> Tensor:
        """Return float64 [T], a new tensor: the reward at each trained token plus those at masked positions after it.

        A reward before the first trained token is added to that token, so that the rewards of a trajectory's tokens
        sum to its score. verl uses the rewards at trained tokens and drops those at masked positions.
        """
        rewards = self.at_tokens(self.given)
        stray = (self.given != 0) & ~self.mask
        if bool(stray.any()):
            row, column = (stray & (self.lengths > 0)[:, None]).nonzero(as_tuple=True)
            before = self.trained.cumsum(-1)[row, column]
            token = (self.lengths.cumsum(0) - self.lengths)[row] + (before - 1).clamp(min=0)
            rewards.index_add_(0, token, self.given[row, column].double())
        return rewards

    def at_tokens(self, values: Tensor) -> Tensor:
        """Return ``values`` [N, L], of any dtype, at the trained tokens: float64 [T], a new tensor."""
        return values.masked_select(self.trained).double()

    def repeat(self, values: Tensor) -> Tensor:
        """Return [T]: each trajectory's entry of ``values`` [N] at each of its trained tokens."""
        return values.repeat_interleave(self.lengths)

    def spread(self, values: Tensor) -> Tensor:
        """Return float32 [N, L]: ``values`` [T] at the trained tokens and 0 elsewhere."""
        empty = torch.zeros(self.trained.shape, dtype=torch.float32, device=values.device)
        return empty.masked_scatter_(self.trained, values.float())

    def sum_by_group(self, values: Tensor) -> Tensor:
        """Return float64 [G]: the sum of ``values`` float64 [N] over each group."""
        return values.new_zeros(self.groups).index_add_(0, self.group, values)

    def weighted_means(self, weights: Tensor) -> Tensor:
        """float64 [N]: mean score of each trajectory's group under ``weights`` float64 [N]; 0 if all weigh 0."""
        low, high = self.lowest(weights > 0), self.highest(weights > 0)
        sums = self.sum_by_group(weights)
        mean = self.sum_by_group(weights * self.scores) / torch.where(sums > 0, sums, 1.0)
        # The mean of equal scores is exactly that score, so that rounding cannot create a tiny advantage.
        return torch.where(low == high, low, mean)[self.group]

    def lowest(self, members: Tensor) -> Tensor:
        """float64 [G]: lowest score in each group among the ``members`` (bool [N]); inf in a group that has none."""
        empty = self.scores.new_full((self.groups,), torch.inf)
        return empty.scatter_reduce(0, self.group, torch.where(members, self.scores, torch.inf), "amin")

    def highest(self, members: Tensor) -> Tensor:
        """float64 [G]: highest score in each group among the ``members`` (bool [N]); -inf in a group that has none."""
        empty = self.scores.new_full((self.groups,), -torch.inf)
        return empty.scatter_reduce(0, self.group, torch.where(members, self.scores, -torch.inf), "amax")


@dataclass(frozen=True)
class Estimator:
    """A function of `Rewards` with a name, and the properties that a run checks before it starts."""

    name: str
    function: Callable[..., tuple[Tensor, Tensor]]
    """``function(rewards, **options)`` computes advantages and returns, each float [N, L] or [N, 1]."""
    group_local: bool
    """Whether a group's advantages do not depend on the rest of the batch, so that chunks of it can be consumed."""
    group_baseline: bool
    """Whether members of a group are compared; a lone member then learns nothing, or learns from its raw reward."""
    needs: frozenset[str]
    """Tensors that it needs besides the rewards: "values" (a critic), "reward_baselines" (greedy rollouts)."""

    @cached_property
    def options(self) -> frozenset[str]:
        """Names of the parameters of ``function`` after the rewards."""
        _, *rest = signature(self.function).parameters.values()
        return frozenset(p.name for p in rest if p.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD))

    def __call__(self, rewards: Rewards, **options: Any) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns. Raises `ValueError` if an input in ``needs`` is missing or None."""
        for name in sorted(self.needs):
            if options.get(name) is None:
                raise ValueError(f"estimator {self.name!r} needs {name}: {INPUTS.get(name, 'a tensor')}")
        return self.function(rewards, **options)


ESTIMATORS: Registry[Estimator] = Registry(
    "credit.estimator", Estimator, "@gleanrl.algorithms.advantages.estimator(...)"
)


def estimator(
    name: str, *, group_local: bool, group_baseline: bool = False, needs: Iterable[str] = ()
) -> Callable[[Callable[..., tuple[Tensor, Tensor]]], Estimator]:
    """Decorator: make a function an `Estimator` with these properties and register it under ``name``."""

    def register(function: Callable[..., tuple[Tensor, Tensor]]) -> Estimator:
        return ESTIMATORS.add(Estimator(name, function, group_local, group_baseline, frozenset(needs)))

    return register


def check_options(name: str, options: Iterable[str]) -> None:
    """Raise `UserError` if the name is unknown, or if the estimator does not take one of ``options``."""
    known = ESTIMATORS.get(name).options
    for option in options:
        if option not in known:
            raise UserError(
                f"credit.options.{option}: estimator {name!r} has no such option{nearest(option, known, list_all=True)}"
            )


@torch.no_grad()
def estimate(
    name: str,
    token_rewards: Tensor,
    mask: Tensor,
    group: Tensor,
    *,
    baseline_members: Tensor | None = None,
    valid: Tensor | None = None,
    zero_variance: Literal["keep", "drop"] = "keep",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns: float32 [N, L] each, 0 outside ``mask`` and for invalid members.

    ``token_rewards`` [N, L] of any dtype; ``mask`` bool or 0/1 [N, L], the trained tokens; ``group`` int [N], any ids.
    ``baseline_members`` bool [N]: the members whose mean, deviation and whitening statistics are used (default: all).
    ``valid`` bool [N]: members whose score could be computed (default: all); the others enter no statistic and may hold
    anything. In a run, `gleanrl.algorithms.batch.build_samples` has already left them out. ``zero_variance="drop"``
    gives 0 to all members of a group whose valid members have the same score (`zero_variance_members`). ``options`` are
    passed to the estimator. If it gives one advantage per trajectory, both results are the same tensor.

    Raises:
        UserError: for an unknown name or option, or an invalid value of an option.
        ValueError: for shapes that do not fit, missing ``values`` or ``reward_baselines``, a valid member whose reward
            is not finite, or an estimator that returns values that are not finite.
    """
    check_options(name, options)
    if zero_variance not in ("keep", "drop"):
        raise UserError(f"credit.zero_variance = {zero_variance!r}: must be keep or drop")
    rewards = _rewards(token_rewards, mask, group, baseline_members, valid)
    kept = rewards.valid & ~rewards.zero_variance if zero_variance == "drop" else rewards.valid
    advantages, returns = ESTIMATORS.get(name)(rewards, **options)
    dense = _dense(name, advantages, rewards.mask, kept)
    return dense, dense if returns is advantages else _dense(name, returns, rewards.mask, kept)


def zero_variance_members(scores: Tensor, group: Tensor) -> Tensor:
    """Return bool [N]: True in groups of two or more with equal ``scores`` (float [N]); ``group`` int [N]."""
    column = scores[:, None]
    return _rewards(column, torch.ones_like(column), group, None, None).zero_variance


def _rewards(
    token_rewards: Tensor, mask: Tensor, group: Tensor, baseline_members: Tensor | None, valid: Tensor | None
) -> Rewards:
    valid = torch.ones_like(group, dtype=torch.bool) if valid is None else valid.bool()
    baseline = valid if baseline_members is None else valid & baseline_members.bool()
    members = token_rewards.shape[:1]
    if token_rewards.ndim != 2 or mask.shape != token_rewards.shape:
        raise ValueError(f"token_rewards {list(token_rewards.shape)} and mask {list(mask.shape)} must both be [N, L]")
    if not group.shape == valid.shape == baseline.shape == members:
        raise ValueError(f"group, valid and baseline_members must be [N], here N = {members[0]}")
    ids, dense = torch.unique(group, return_inverse=True)
    rewards = Rewards(token_rewards, mask.bool(), dense, valid, baseline, ids.numel())
    finite = rewards.scores.isfinite()
    if not bool(finite.all()):
        raise ValueError(f"the reward of valid member {int((~finite).nonzero()[0])} is not finite")
    return rewards


def _dense(name: str, values: Tensor, mask: Tensor, kept: Tensor) -> Tensor:
    """Return ``values`` as float32 [N, L], 0 outside ``mask`` and for members that are not ``kept``."""
    if values.shape not in (mask.shape, (mask.shape[0], 1)):
        wanted = f"{[mask.shape[0], 1]} or {list(mask.shape)}"
        raise ValueError(f"estimator {name!r} gave shape {list(values.shape)}, not {wanted}")
    if values.shape != mask.shape:  # one value per member: rounded and zeroed before it is repeated
        dense = torch.where(mask, torch.where(kept[:, None], values, 0.0).float(), 0.0)
    elif bool(kept.all()):
        dense = torch.where(mask, values.float(), 0.0)
    else:
        dense = torch.where(mask & kept[:, None], values.float(), 0.0)
    # Checking the sum is cheap. If it is not finite, each value is checked, because only the sum may have overflowed.
    if not bool(dense.sum().isfinite()) and not bool(dense.isfinite().all()):
        row = int((~dense.isfinite()).any(-1).nonzero()[0])
        raise ValueError(f"estimator {name!r} gave member {row} an advantage or return that is not finite")
    return dense


# --- the built-in estimators ----
@estimator("grpo", group_local=True, group_baseline=True)
def grpo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """(r - mean) / (std + 1e-6), std with n-1; a lone baseline member has mean 0 and std 1 (arXiv 2402.03300)."""
    return _outcome(rewards.centred / (rewards.deviations + EPSILON))


@estimator("dr_grpo", group_local=True, group_baseline=True)
def dr_grpo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """r - mean, without the division that favours easy and hard tasks (arXiv 2503.20783)."""
    return _outcome(rewards.centred)


@estimator("grpo_passk", group_local=True, group_baseline=True)
def grpo_passk(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """The best member of a group gets (r1 - r2) / (std + 1e-6), where r2 is the runner-up's score; others get 0.

    Optimises the best of k instead of the mean (arXiv 2503.19595). Members that tie for the best score get 0 too. r1,
    r2 and std are those of the baseline members; a member outside the baseline gets its own lead over the best of the
    baseline. If there is no runner-up, the lead is 0. Raises `UserError` for a group with one valid member.
    """
    alone = int((rewards.sum_by_group(rewards.valid.double()) == 1).sum())
    if alone:
        raise UserError(
            f"credit.estimator 'grpo_passk' compares the best of a group with the runner-up, but groups with one valid "
            f"member: {alone}; set schedule.min_valid to 2 or more"
        )
    highest = rewards.highest(rewards.baseline)[rewards.group]
    best = rewards.baseline & (rewards.scores == highest)
    winner = best & (rewards.sum_by_group(best.double()) == 1)[rewards.group]
    second = rewards.highest(rewards.baseline & ~best)[rewards.group]
    rival = torch.where(winner, second, highest)
    lead = torch.where((rewards.scores > rival) & rival.isfinite(), rewards.scores - rival, 0.0)
    return _outcome(lead / (rewards.deviations + EPSILON))


@estimator("rloo", group_local=True, group_baseline=True)
def rloo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """r minus the mean score of the *other* baseline members, which is n/(n-1) (r - mean) (arXiv 2402.14740).

    A member outside the baseline is compared with all baseline members. A lone baseline member keeps its raw score.
    """
    others = rewards.counts - 1
    leave_one_out = (rewards.scores - rewards.means) * rewards.counts / others.clamp(min=1)
    advantages = torch.where(rewards.baseline, leave_one_out, rewards.scores - rewards.means)
    return _outcome(torch.where(rewards.lone, rewards.scores, advantages))


@estimator("opo", group_local=True, group_baseline=True)
def opo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """r - sum(length r) / sum(length), lengths in trained tokens: the baseline of least variance (arXiv 2505.23585).

    The baseline is 0 for a lone baseline member, and in a group whose baseline members have no trained token.
    """
    means = rewards.weighted_means(rewards.lengths * rewards.baseline.double())
    return _outcome(rewards.scores - torch.where(rewards.lone, 0.0, means))


@estimator("gpg", group_local=False, group_baseline=True)
def gpg(rewards: Rewards, *, f_norm: float = 1.0) -> tuple[Tensor, Tensor]:
    """alpha (r - mean) / f_norm, alpha = members / members with r != 0 (arXiv 2504.02546).

    alpha compensates for members without reward. Both counts in it are of baseline members in the whole batch.
    """
    _check("f_norm", f_norm, "a number above 0", lambda x: 0 < x < float("inf"))
    rewarded = (rewards.baseline & (rewards.scores != 0)).sum()
    alpha = rewards.baseline.sum().double() / rewarded.clamp(min=1)
    return _outcome(alpha * rewards.centred / f_norm)


@estimator("reinforce_plus_plus", group_local=False)
def reinforce_plus_plus(
    rewards: Rewards, *, gamma: float = 1.0, across_turns: bool = True, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """G_t = r_t + gamma G_t+1, whitened over the trained tokens of the batch; returns are not (arXiv 2501.03262).

    t+1 is the next trained token: masked positions are skipped, as in verl since 0.9. With ``across_turns=False`` the
    sum ends where a masked position follows, as in verl before 0.9, so that a reward at the end of a conversation only
    reaches its last turn. A reward at a masked position is added to the trained token before it, or else to the first
    one; verl drops such a reward.
    """
    _check("gamma", gamma, "a number in [0, 1]", lambda x: 0 <= x <= 1)
    _check("across_turns", across_turns, "true or false", lambda x: x in (True, False))
    returns = discounted_sums(rewards.rewards_at_tokens(), rewards.joined if across_turns else rewards.adjacent, gamma)
    return _per_token(rewards, returns, returns, whiten)


@estimator("reinforce_plus_plus_baseline", group_local=False, group_baseline=True)
def reinforce_plus_plus_baseline(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """r - mean of the group, then whitened over the trained tokens of the batch (arXiv 2501.03262)."""
    trained = rewards.baseline & (rewards.lengths > 0)
    return _outcome(whitened(rewards.centred, trained, rewards.lengths.double()))


@estimator("remax", group_local=True, needs=["reward_baselines"])
def remax(rewards: Rewards, *, reward_baselines: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the rewards from a token on, minus the reward of a greedy rollout of the task (arXiv 2310.10505).

    ``reward_baselines`` float [N]. Returns are the sums of rewards. A reward at a masked position is added to the
    trained token before it, or else to the first one; verl drops such a reward.
    """
    baselines = _input("reward_baselines", reward_baselines, rewards.valid.shape).double()
    returns = discounted_sums(rewards.rewards_at_tokens(), rewards.joined, 1.0)
    return rewards.spread(returns - rewards.repeat(baselines)), rewards.spread(returns)


@estimator("gae", group_local=False, needs=["values"])
def gae(
    rewards: Rewards, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """Generalised advantages of a critic, whitened over the trained tokens of the batch (arXiv 1506.02438).

    A_t = r_t + gamma V_next - V_t + gamma lam A_next, where next is the next trained token of the trajectory:
    masked positions are skipped. ``values`` float [N, L] is V, read at trained tokens only. Returns are A + V before
    whitening. A reward at a masked position is added to the trained token before it, or else to the first one; verl
    drops such a reward.
    """
    _check("gamma", gamma, "a number in [0, 1]", lambda x: 0 <= x <= 1)
    _check("lam", lam, "a number in [0, 1]", lambda x: 0 <= x <= 1)
    predicted = rewards.at_tokens(_input("values", values, rewards.trained.shape))
    differences = rewards.rewards_at_tokens().sub_(predicted)
    differences[:-1].add_(torch.where(rewards.joined, predicted[1:], 0.0), alpha=gamma)
    advantages = discounted_sums(differences, rewards.joined, gamma * lam)
    return _per_token(rewards, advantages, predicted.add_(advantages), whiten)


def discounted_sums(values: Tensor, joined: Tensor, factor: float) -> Tensor:
    """Return float64 [T]: S_t = v_t + factor S_t+1 where ``joined`` bool [T-1] is True (t+1 continues t), else v_t.

    Each pass doubles the number of tokens in a sum (1, 2, 4, ...), so the longest run of joined tokens determines the
    number of passes. No sum includes a token of another run. ``factor`` in [0, 1]; ``values`` float64 [T] are
    overwritten.
    """
    span, zero = 1, values.new_zeros(())
    carried = torch.empty_like(values)  # allocated once: allocating it in each pass would cost more than the pass
    while factor > 0 and bool(joined.any()):
        values[:-span].add_(torch.where(joined, values[span:], zero, out=carried[span:]), alpha=factor)
        joined = joined[:-span] & joined[span:]
        span, factor = 2 * span, factor * factor
    return values


def whitened(values: Tensor, members: Tensor | None, times: Tensor | None = None) -> Tensor:
    """Return (value - mean) / sqrt(var + 1e-8) for ``values`` float64 [K].

    Mean and variance (n-1) are those of the ``members`` bool [K], None for all. ``times`` float64 [K] is how often each
    value counts in them (default: once). If all members are equal, the variance is taken as 1, so that members become
    exactly 0. If there are no members, ``values`` are returned unchanged.
    """
    sample = values if members is None else values[members]
    if not sample.numel():
        return values
    low, high = sample.aminmax()
    if bool(low == high):
        return values - low
    if times is None:
        mean, variance = sample.mean(), sample.var()
    else:
        times = times if members is None else times[members]
        mean = (times * sample).sum() / times.sum()
        variance = (times * (sample - mean) ** 2).sum() / (times.sum() - 1)
    return (values - mean).mul_((variance + WHITENING_EPSILON).rsqrt())


def _outcome(advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [N, 1]: ``advantages`` float64 [N], one for all tokens of a trajectory."""
    column = advantages[:, None]
    return column, column


def _per_token(rewards: Rewards, advantages: Tensor, returns: Tensor, whiten: bool) -> tuple[Tensor, Tensor]:
    """Return advantages and returns as float32 [N, L], given float64 [T]. ``whiten``: whiten the advantages first."""
    _check("whiten", whiten, "true or false", lambda x: x in (True, False))
    spread_returns = rewards.spread(returns)
    if whiten:
        all_members = torch.equal(rewards.baseline, rewards.valid)
        advantages = whitened(advantages, None if all_members else rewards.repeat(rewards.baseline))
    elif advantages is returns:
        return spread_returns, spread_returns
    return rewards.spread(advantages), spread_returns


def _input(name: str, given: Tensor, shape: torch.Size) -> Tensor:
    if given.shape != shape:
        raise ValueError(f"{name} has shape {list(given.shape)}, the rewards ask for {list(shape)}")
    return given


def _check(option: str, value: Any, wanted: str, fits: Callable[[Any], bool]) -> None:
    try:
        good = fits(value)
    except TypeError:
        good = False
    if not good:
        raise UserError(f"credit.options.{option} = {value!r}: must be {wanted}")
