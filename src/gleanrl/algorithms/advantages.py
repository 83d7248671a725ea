"""Advantage estimators: they turn the rewards of a batch of trajectories into one advantage for each trained token.

An advantage states how much better a trajectory did than the trajectories that it is compared with. `estimate` is the
entry point, both for a run (`gleanrl.algorithms.batch`) and for the training loops of other libraries:

    advantages, returns = estimate("grpo", token_rewards, mask, group)

To add an estimator, decorate a function that takes a `Rewards` with `@estimator`. Those of the built-in
estimators that verl has too agree with verl's, except where a docstring states a difference.

A trajectory is a *member* of its group. A member is *valid* if its score could be computed. A token is *trained* if the
mask is True at its position; all other positions (context, padding) are untrained. A quantity per trajectory is a
vector [N]. A quantity per token is a vector [T] over the trained tokens of the valid members, one trajectory after
another. Statistics are float64 and computed without a loop over trajectories or positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from gleanrl.utils.errors import UserError
from gleanrl.utils.registry import Registry, check_values
from gleanrl.utils.settings import Fraction
from gleanrl.utils.text import nearest

EPSILON = 1e-6  # added to the standard deviation that divides advantages
WHITENING_EPSILON = 1e-8  # added to the variance when advantages are whitened

INPUTS = {
    "values": "float [N, L], a critic's prediction at each token",
    "reward_baselines": "float [N], the reward of a greedy rollout of each trajectory's task",
    "turns": "int64 [N, L], the number of each trained token's turn within its trajectory, in ascending order",
    "states": "int64 [N, L], the state in which each trained token's turn was sampled, equal numbers for equal states",
}


@dataclass(frozen=True)
class Rewards:
    """The input of an estimator: the rewards of N trajectories with L positions each, which belong to G groups.

    Means, standard deviations and whitening statistics are computed over the ``baseline`` members, all of which are
    valid. `estimate` discards the values that an estimator returns for invalid members.
    """

    given: Tensor
    """[N, L]: the token rewards as the caller passed them; rows of invalid members may hold any value."""
    mask: Tensor
    """bool [N, L]: True at trained tokens."""
    group: Tensor
    """int64 [N]: index of each trajectory's group, 0 .. G-1."""
    valid: Tensor
    """bool [N]: whether the trajectory's score could be computed."""
    baseline: Tensor
    """bool [N]: whether the trajectory enters means and standard deviations."""
    groups: int
    """Number of groups, G."""

    @cached_property
    def token_rewards(self) -> Tensor:
        """float64 [N, L]: the token rewards; 0 in the rows of invalid members."""
        return torch.where(self.valid[:, None], self.given.double(), 0.0)

    @cached_property
    def scores(self) -> Tensor:
        """float64 [N]: the sum of each trajectory's token rewards, at trained and untrained positions; 0 if invalid."""
        return torch.where(self.valid, self.given.double().sum(-1), 0.0)

    @cached_property
    def counts(self) -> Tensor:
        """float64 [N]: number of baseline members in each trajectory's group."""
        return self.sum_by_group(self.baseline.double())[self.group]

    @cached_property
    def means(self) -> Tensor:
        """float64 [N]: mean score of the baseline members of each trajectory's group; 0 if the group has none."""
        return self.weighted_means(self.baseline.double())

    @cached_property
    def centred(self) -> Tensor:
        """float64 [N]: each trajectory's score minus the mean of its group.

        If a group has a single baseline member, that member keeps its raw score (its mean is taken as 0), and the mean
        for the group's other members is the score of the single one.
        """
        return self.scores - torch.where(self.lone, 0.0, self.means)

    @cached_property
    def lone(self) -> Tensor:
        """bool [N]: whether a trajectory is the only baseline member of its group."""
        return self.baseline & (self.counts <= 1)

    @cached_property
    def deviations(self) -> Tensor:
        """float64 [N]: standard deviation of the baseline members' scores in each trajectory's group.

        The divisor of the variance is n-1. Where the deviation is 0 (also for a single baseline member), the result
        is 1.
        """
        squares = torch.where(self.baseline, (self.scores - self.means) ** 2, 0.0)
        return _deviations(self.sum_by_group(squares)[self.group], self.counts, self.means)

    @cached_property
    def zero_variance(self) -> Tensor:
        """bool [N]: whether a trajectory's group has at least two valid members and these all have the same score."""
        low, high = self.lowest(self.valid), self.highest(self.valid)
        several = self.sum_by_group(self.valid.double()) >= 2
        return (several & (low == high))[self.group]

    @cached_property
    def trained(self) -> Tensor:
        """bool [N, L]: True at the T trained tokens of valid members."""
        return self.mask & self.valid[:, None]

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [N]: number of trained tokens of each trajectory; 0 for invalid members."""
        return self.trained.view(torch.uint8).sum(-1, dtype=torch.int32).long()

    @cached_property
    def joined(self) -> Tensor:
        """bool [T-1]: whether a trained token and the next trained token belong to the same trajectory."""
        ends = self.lengths.cumsum(0)[self.lengths > 0] - 1
        joined = self.trained.new_ones(int(self.lengths.sum()))
        joined[ends] = False
        return joined[:-1]

    @cached_property
    def adjacent(self) -> Tensor:
        """bool [T-1]: as `joined`, but True only if no untrained position lies between the two tokens."""
        following = torch.zeros_like(self.trained)
        following[:, :-1] = self.trained[:, 1:]
        return following.masked_select(self.trained)[:-1]

    def rewards_at_tokens(self) -> Tensor:
        """Return the reward of each trained token as float64 [T], a new tensor.

        A reward at an untrained position is added to the trained token before it, or to the trajectory's first trained
        token if there is none before it. The rewards of a trajectory's trained tokens therefore sum to its score. verl
        instead drops the rewards at untrained positions.
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
        """Return the entries of ``values`` [N, L], of any dtype, at the trained tokens: float64 [T], a new tensor."""
        return values.masked_select(self.trained).double()

    def repeat(self, values: Tensor) -> Tensor:
        """Return [T]: for each trained token, its trajectory's entry of ``values`` [N]."""
        return values.repeat_interleave(self.lengths)

    def spread(self, values: Tensor) -> Tensor:
        """Return float32 [N, L] with ``values`` [T] at the trained tokens and 0 elsewhere."""
        empty = torch.zeros(self.trained.shape, dtype=torch.float32, device=values.device)
        return empty.masked_scatter_(self.trained, values.float())

    def sum_by_group(self, values: Tensor) -> Tensor:
        """Return float64 [G]: the sum of ``values`` float64 [N] over each group."""
        return values.new_zeros(self.groups).index_add_(0, self.group, values)

    def weighted_means(self, weights: Tensor) -> Tensor:
        """Return float64 [N]: the mean score of each trajectory's group, weighted by ``weights`` float64 [N].

        The mean is 0 where all weights of a group are 0.
        """
        return means_by_class(self.scores, weights, self.group, self.groups)[self.group]

    def lowest(self, members: Tensor) -> Tensor:
        """Return float64 [G]: each group's lowest score among those in ``members`` bool [N]; inf if there is none."""
        return extremes_by_class(self.scores, members, self.group, self.groups)[0]

    def highest(self, members: Tensor) -> Tensor:
        """Return float64 [G]: each group's highest score among those in ``members`` bool [N]; -inf if there is none."""
        return extremes_by_class(self.scores, members, self.group, self.groups)[1]


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: its name, its function, and its properties, which a run checks before it starts."""

    name: str
    function: Callable[..., tuple[Tensor, Tensor]]
    """Returns the pair (advantages, returns), float [N, L] or [N, 1] each. It is called as ``function(rewards,
    **options)``."""
    group_local: bool
    """True if the advantages of a group depend on the members of this group only. The learner can then train on a batch
    in chunks of groups, before the other groups are complete."""
    group_baseline: bool
    """True if the advantage of a member depends on the other members of its group. A run then refuses groups of one
    member, whose advantage would be 0 or the raw score."""
    needs: frozenset[str]
    """Names of the tensors that the function needs in addition to the rewards, of `INPUTS`: "values" (predictions of a
    critic), "reward_baselines" (rewards of greedy rollouts), "turns" and "states" (of turn-level credit)."""
    turn_rewards: bool = False
    """True if an advantage depends on where in the trajectory a reward is earned. A run then places each turn reward
    at the last token of its turn. For other estimators it places the whole score at the last trained token. Such an
    estimator cannot compare parts of a score (``credit.per_part``), which have no place."""

    @cached_property
    def options(self) -> frozenset[str]:
        """Names of the options of ``function``, that is of its parameters after the rewards."""
        _, *rest = signature(self.function).parameters.values()
        return frozenset(p.name for p in rest if p.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD))

    @cached_property
    def required(self) -> list[str]:
        """Names of the options that must be given, because ``function`` has no default for them."""
        parameters = signature(self.function).parameters
        return sorted(o for o in self.options - self.needs if parameters[o].default is Parameter.empty)

    def __call__(self, rewards: Rewards, **options: Any) -> tuple[Tensor, Tensor]:
        """Compute (advantages, returns). Raises `ValueError` if a tensor named in ``needs`` is missing or None."""
        for name in sorted(self.needs):
            if options.get(name) is None:
                raise ValueError(f"estimator {self.name!r} needs {name}: {INPUTS.get(name, 'a tensor')}")
        return self.function(rewards, **options)


ESTIMATORS: Registry[Estimator] = Registry(
    "credit.estimator", Estimator, "@gleanrl.algorithms.advantages.estimator(...)"
)


def estimator(
    name: str,
    *,
    group_local: bool,
    group_baseline: bool = False,
    needs: Iterable[str] = (),
    turn_rewards: bool = False,
) -> Callable[[Callable[..., tuple[Tensor, Tensor]]], Estimator]:
    """Return a decorator that makes a function an `Estimator` with these properties and registers it under ``name``."""

    def register(function: Callable[..., tuple[Tensor, Tensor]]) -> Estimator:
        return ESTIMATORS.add(Estimator(name, function, group_local, group_baseline, frozenset(needs), turn_rewards))

    return register


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check the options that an estimator gets.

    Raises `UserError` if no estimator has this name, if it does not take one of ``options`` or the value of one, or if
    one that it needs is missing.
    """
    estimator = ESTIMATORS.get(name)
    known = estimator.options
    for option in estimator.required:
        if option not in options:
            raise UserError(f"credit.options.{option}: estimator {name!r} has no default for it; set it")
    for option in options:
        if option not in known:
            raise UserError(
                f"credit.options.{option}: estimator {name!r} has no such option{nearest(option, known, list_all=True)}"
            )
    check_values("credit.options", estimator.function, options)


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
    """Compute advantages and returns, float32 [N, L] each; 0 outside ``mask`` and for invalid members.

    They are also 0 for the members of a group that has no baseline member, if the estimator compares the members of a
    group (`Estimator.group_baseline`).

    Both results are the same tensor if the estimator returns one tensor for both, as estimators with one advantage per
    trajectory do.

    Args:
        name: the estimator's name.
        token_rewards: [N, L] of any dtype.
        mask: bool or 0/1 [N, L], True at trained tokens.
        group: int [N], any number that is the same for all members of a group.
        baseline_members: bool [N], the members over which means, standard deviations and whitening statistics are
            computed; by default all valid members.
        valid: bool [N], the members whose score could be computed; by default all. Other members enter no statistic,
            and their rewards may hold any value. In a run, `gleanrl.algorithms.batch.build_samples` has already left
            them out.
        zero_variance: "drop" sets the advantages and returns of a group to 0 if it has at least two valid members and
            these all have the same score.
        options: passed on to the estimator.

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
    estimator = ESTIMATORS.get(name)
    if estimator.group_baseline:
        kept = kept & (rewards.counts > 0)
    advantages, returns = estimator(rewards, **options)
    dense = _dense(name, advantages, rewards.mask, kept)
    return dense, dense if returns is advantages else _dense(name, returns, rewards.mask, kept)


def zero_variance_members(scores: Tensor, group: Tensor) -> Tensor:
    """Return bool [N]: True for the members of groups of two or more in which all ``scores`` are equal.

    ``scores`` float [N]; ``group`` int [N], any number that is the same for all members of a group.
    """
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
    """Return an estimator's ``values`` [N, 1] or [N, L] as float32 [N, L].

    The result is 0 outside ``mask`` and for members whose entry of ``kept`` bool [N] is False. ``name`` is the
    estimator's, for error messages. Raises ValueError for any other shape and for values that are not finite.
    """
    if values.shape not in (mask.shape, (mask.shape[0], 1)):
        wanted = f"{[mask.shape[0], 1]} or {list(mask.shape)}"
        raise ValueError(f"estimator {name!r} gave shape {list(values.shape)}, not {wanted}")
    if values.shape != mask.shape:  # one value per member: converted and zeroed before it is expanded to all tokens
        dense = torch.where(mask, torch.where(kept[:, None], values, 0.0).float(), 0.0)
    elif bool(kept.all()):
        dense = torch.where(mask, values.float(), 0.0)
    else:
        dense = torch.where(mask & kept[:, None], values.float(), 0.0)
    # The sum is checked first because that is cheap. If it is not finite, every value is checked, because the sum can
    # overflow although all values are finite.
    if not bool(dense.sum().isfinite()) and not bool(dense.isfinite().all()):
        row = int((~dense.isfinite()).any(-1).nonzero()[0])
        raise ValueError(f"estimator {name!r} gave member {row} an advantage or return that is not finite")
    return dense


# --- the built-in estimators; r is the score of a trajectory ----
@estimator("grpo", group_local=True, group_baseline=True)
def grpo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Compute (r - mean) / (std + 1e-6), the advantage of GRPO (arXiv 2402.03300).

    Mean and standard deviation (divisor n-1) are those of the group's n baseline members. A single baseline member has
    mean 0 and deviation 1. The advantage of a member outside the baseline is limited to [-sqrt(n), sqrt(n)].
    """
    return _outcome(limited(rewards.centred / (rewards.deviations + EPSILON), rewards.baseline, rewards.counts))


@estimator("dr_grpo", group_local=True, group_baseline=True)
def dr_grpo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Compute r - mean, the advantage of Dr. GRPO (arXiv 2503.20783).

    It is not divided by the group's standard deviation, because the division gives tasks with a small deviation (very
    easy and very hard ones) a larger weight.
    """
    return _outcome(rewards.centred)


@estimator("grpo_passk", group_local=True, group_baseline=True)
def grpo_passk(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Reward only the best member of each group, to optimise the best of k attempts, not the mean (arXiv 2503.19595).

    The best member gets (r1 - r2) / (std + 1e-6), where r1 is its score and r2 the runner-up's. All others get 0, and
    so do members that tie for the best score. r1, r2 and std are those of the baseline members. A member outside the
    baseline gets the lead of its score over the best baseline member, divided in the same way but at most sqrt(n) with
    n baseline members, or 0 without a lead. If there is no runner-up, the lead is 0. Raises `UserError` if a group has
    only one valid member.
    """
    alone = int((rewards.sum_by_group(rewards.valid.double()) == 1).sum())
    if alone:
        raise UserError(
            f"credit.estimator 'grpo_passk' compares the best of a group with the runner-up, but {alone} of the groups "
            f"have only one valid member; set schedule.min_valid to 2 or more"
        )
    highest = rewards.highest(rewards.baseline)[rewards.group]
    best = rewards.baseline & (rewards.scores == highest)
    winner = best & (rewards.sum_by_group(best.double()) == 1)[rewards.group]
    second = rewards.highest(rewards.baseline & ~best)[rewards.group]
    rival = torch.where(winner, second, highest)
    lead = torch.where((rewards.scores > rival) & rival.isfinite(), rewards.scores - rival, 0.0)
    return _outcome(limited(lead / (rewards.deviations + EPSILON), rewards.baseline, rewards.counts))


@estimator("rloo", group_local=True, group_baseline=True)
def rloo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Compute r minus the mean score of the *other* baseline members of the group (RLOO, arXiv 2402.14740).

    This is computed as n / (n - 1) * (r - mean), where n is the number of baseline members. From the score of a member
    outside the baseline, the mean of all baseline members is subtracted. A single baseline member keeps its raw score.
    """
    others = rewards.counts - 1
    leave_one_out = (rewards.scores - rewards.means) * rewards.counts / others.clamp(min=1)
    advantages = torch.where(rewards.baseline, leave_one_out, rewards.scores - rewards.means)
    return _outcome(torch.where(rewards.lone, rewards.scores, advantages))


@estimator("opo", group_local=True, group_baseline=True)
def opo(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Compute r minus the group's mean score weighted by length, the baseline of least variance (arXiv 2505.23585).

    The mean is sum(length * r) / sum(length) over the baseline members; lengths are numbers of trained tokens. It is
    taken as 0 for a single baseline member, and in a group whose baseline members have no trained token.
    """
    means = rewards.weighted_means(rewards.lengths * rewards.baseline.double())
    return _outcome(rewards.scores - torch.where(rewards.lone, 0.0, means))


@estimator("gpg", group_local=False, group_baseline=True)
def gpg(rewards: Rewards, *, f_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0) -> tuple[Tensor, Tensor]:
    """Compute alpha * (r - mean) / f_norm, the advantage of GPG (arXiv 2504.02546).

    alpha is the number of baseline members in the whole batch, divided by the number of those whose score is not 0. It
    compensates for members without a reward. ``f_norm`` is a constant divisor.
    """
    rewarded = (rewards.baseline & (rewards.scores != 0)).sum()
    alpha = rewards.baseline.sum().double() / rewarded.clamp(min=1)
    return _outcome(alpha * rewards.centred / f_norm)


@estimator("reinforce_plus_plus", group_local=False, turn_rewards=True)
def reinforce_plus_plus(
    rewards: Rewards, *, gamma: Fraction = 1.0, across_turns: bool = True, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute discounted sums of rewards, whitened over the batch's trained tokens (REINFORCE++, arXiv 2501.03262).

    The sum at token t is G_t = r_t + gamma * G_t+1, where t+1 is the next trained token of the trajectory. Untrained
    positions are skipped, as in verl since 0.9. With ``across_turns=False`` the sum ends at a token that an
    untrained position follows, as in verl before 0.9, so that a reward at the end of a conversation only reaches its
    last turn. A reward at an untrained position is added to the trained token before it, or to the first trained token
    if there is none before it; verl drops such a reward. The returns are the sums before whitening. ``whiten=False``
    turns whitening off.
    """
    returns = discounted_sums(rewards.rewards_at_tokens(), rewards.joined if across_turns else rewards.adjacent, gamma)
    return _per_token(rewards, returns, returns, whiten)


@estimator("reinforce_plus_plus_baseline", group_local=False, group_baseline=True)
def reinforce_plus_plus_baseline(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Compute r - mean, then whiten it over the batch's trained tokens (arXiv 2501.03262).

    In the whitening statistics, a trajectory counts once for each of its trained tokens.
    """
    trained = rewards.baseline & (rewards.lengths > 0)
    advantages = whitened(rewards.centred, trained, rewards.lengths.double())
    return _outcome(limited(advantages, trained, trained.sum()))


@estimator("remax", group_local=True, needs=["reward_baselines"], turn_rewards=True)
def remax(rewards: Rewards, *, reward_baselines: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the sum of rewards from each token on, minus the reward of a greedy rollout (ReMax, arXiv 2310.10505).

    ``reward_baselines`` float [N]: the reward of a greedy rollout of each trajectory's task. The returns are the sums
    of rewards. A reward at an untrained position is added to the trained token before it, or to the first trained token
    if there is none before it; verl drops such a reward.
    """
    baselines = _input("reward_baselines", reward_baselines, rewards.valid.shape).double()
    returns = discounted_sums(rewards.rewards_at_tokens(), rewards.joined, 1.0)
    return rewards.spread(returns - rewards.repeat(baselines)), rewards.spread(returns)


@estimator("gae", group_local=False, needs=["values"], turn_rewards=True)
def gae(
    rewards: Rewards, *, values: Tensor, gamma: Fraction = 1.0, lam: Fraction = 1.0, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates, whitened over the batch's trained tokens (GAE, arXiv 1506.02438).

    The advantage at token t is A_t = r_t + gamma * V_t+1 - V_t + gamma * lam * A_t+1, where t+1 is the next trained
    token of the trajectory; untrained positions are skipped. ``values`` float [N, L] holds the critic's predictions V,
    which are read at trained tokens only. The returns are A + V with A before whitening. ``whiten=False`` turns
    whitening off. A reward at an untrained position is added to the trained token before it, or to the first trained
    token if there is none before it; verl drops such a reward.
    """
    predicted = rewards.at_tokens(_input("values", values, rewards.trained.shape))
    differences = rewards.rewards_at_tokens().sub_(predicted)
    differences[:-1].add_(torch.where(rewards.joined, predicted[1:], 0.0), alpha=gamma)
    advantages = discounted_sums(differences, rewards.joined, gamma * lam)
    return _per_token(rewards, advantages, predicted.add_(advantages), whiten)


@estimator("gigpo", group_local=True, group_baseline=True, needs=["turns", "states"], turn_rewards=True)
def gigpo(
    rewards: Rewards,
    *,
    turns: Tensor,
    states: Tensor,
    gamma: Fraction = 0.95,
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute A_episode + weight * A_turn, the advantage of GiGPO (arXiv 2505.10978).

    A_episode is that of ``grpo``, or that of ``dr_grpo`` with ``normalize=False``. A_turn compares turns of a group
    that were sampled in the same state: it is (R - mean) / (std + 1e-6), or R - mean with ``normalize=False``, where
    R = sum over turns j >= k of gamma^(j - k) r_j is the return of turn k, r_j what turn j earned, and mean and std
    (divisor n-1; 1 where it is 0) are those of the n turns of baseline members in the state. Where n is below 2,
    A_turn is 0.

    All tokens of a turn have the same advantage. That of a turn outside the baseline is limited to [-sqrt(n), sqrt(n)]
    with ``normalize``, as ``grpo`` limits that of a trajectory.
    """
    found = _TurnReturns.of(rewards, turns, states, gamma)
    turn_advantages = torch.where(found.counts >= 2, found.returns - found.means, 0.0)
    episode = (grpo if normalize else dr_grpo).function(rewards)[0][:, 0]
    if normalize:
        squares = torch.where(found.baseline, turn_advantages**2, 0.0)
        squares = squares.new_zeros(found.classes).index_add_(0, found.state, squares)[found.state]
        deviations = _deviations(squares, found.counts, found.means)
        turn_advantages = limited(turn_advantages / (deviations + EPSILON), found.baseline, found.counts)
    advantages = rewards.spread((episode[found.member] + weight * turn_advantages)[found.turn])
    return advantages, advantages


@estimator("state_gae", group_local=True, group_baseline=True, needs=["turns", "states"], turn_rewards=True)
def state_gae(
    rewards: Rewards, *, turns: Tensor, states: Tensor, gamma: Fraction = 0.95, lam: Fraction = 0.9
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates over turns, with means of the group as the values of states.

    The advantage of turn k is A_k = r_k + gamma * V_k+1 - V_k + gamma * lam * A_k+1, where r_k is what the turn earned
    and V_k the mean return (as in ``gigpo``) of the turns of baseline members that were sampled in the same state.
    Where there are fewer than two such turns, V_k is the turn's own return. After the last turn V and A are 0. All
    tokens of a turn have the same advantage. There is no critic and no whitening (GAGPO, arXiv 2605.13217).
    """
    found = _TurnReturns.of(rewards, turns, states, gamma)
    values = torch.where(found.counts >= 2, found.means, found.returns)
    # r_k = R_k - gamma R_k+1
    differences = found.returns - values
    differences[:-1] += gamma * torch.where(found.joined, (values - found.returns)[1:], 0.0)
    advantages = rewards.spread(discounted_sums(differences, found.joined, gamma * lam)[found.turn])
    return advantages, advantages


def _deviations(squares: Tensor, counts: Tensor, means: Tensor) -> Tensor:
    """Return the standard deviations of ``counts`` values each, from the sums of their squared distances to ``means``.

    The divisor of the variance is n-1. The result is 1 where the values are equal up to the rounding of sums, such as
    those of the rewards of turns. A deviation of 1e-17 would give a replayed member an advantage of sqrt(n).
    """
    deviations = (squares / (counts - 1).clamp(min=1)).sqrt()
    return torch.where(deviations > 1e-9 * (1 + means.abs()), deviations, 1.0)


@dataclass(frozen=True)
class _TurnReturns:
    """The K turns of the valid members, one member after another, and the mean returns of the states they were in.

    A state is that of a group: turns of different groups are never compared.
    """

    turn: Tensor  # int64 [T], the turn 0 .. K-1 of each trained token
    member: Tensor  # int64 [K], the trajectory of each turn
    joined: Tensor  # bool [K-1], whether a turn and the next one belong to the same trajectory
    baseline: Tensor  # bool [K], whether the turn's trajectory enters means and deviations
    state: Tensor  # int64 [K], the turn's state in its group, 0 .. classes-1
    classes: int
    returns: Tensor  # float64 [K], discounted sum of what the turn and those after it have earned
    counts: Tensor  # float64 [K], number of baseline turns in the turn's state
    means: Tensor  # float64 [K], mean return of the baseline turns in the turn's state; 0 if there is none

    @classmethod
    def of(cls, rewards: Rewards, turns: Tensor, states: Tensor, gamma: float) -> _TurnReturns:
        numbers = _input("turns", turns, rewards.trained.shape).masked_select(rewards.trained)
        row = torch.arange(rewards.lengths.numel(), device=numbers.device).repeat_interleave(rewards.lengths)
        begins = numbers.new_ones(numbers.shape, dtype=torch.bool)
        begins[1:] = (numbers[1:] != numbers[:-1]) | (row[1:] != row[:-1])
        turn, member = begins.cumsum(0) - 1, row[begins]
        key = _input("states", states, rewards.trained.shape).masked_select(rewards.trained)[begins]
        given, key = torch.unique(key, return_inverse=True)
        found, state = torch.unique(rewards.group[member] * given.numel() + key, return_inverse=True)
        classes, baseline, joined = found.numel(), rewards.baseline[member], member[1:] == member[:-1]
        earned = torch.zeros(member.shape, dtype=torch.float64, device=member.device)
        returns = discounted_sums(earned.index_add_(0, turn, rewards.rewards_at_tokens()), joined, gamma)
        counts = returns.new_zeros(classes).index_add_(0, state, baseline.double())[state]
        means = means_by_class(returns, baseline.double(), state, classes)[state]
        return cls(turn, member, joined, baseline, state, classes, returns, counts, means)


def extremes_by_class(values: Tensor, members: Tensor, index: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest of ``values`` float64 [K] in each class, float64 [classes] each.

    ``index`` int64 [K] is the class of each value; only values where ``members`` bool [K] is True count. The lowest of
    none is inf, and the highest -inf.
    """
    empty = values.new_full((classes,), torch.inf)
    low = empty.scatter_reduce(0, index, torch.where(members, values, torch.inf), "amin")
    return low, (-empty).scatter_reduce(0, index, torch.where(members, values, -torch.inf), "amax")


def means_by_class(values: Tensor, weights: Tensor, index: Tensor, classes: int) -> Tensor:
    """Return float64 [classes]: the mean of ``values`` float64 [K] in each class, weighted by ``weights`` float64 [K].

    ``index`` int64 [K] is the class of each value. The mean is 0 where all weights of a class are 0.
    """
    low, high = extremes_by_class(values, weights > 0, index, classes)
    sums = values.new_zeros(classes).index_add_(0, index, weights)
    mean = values.new_zeros(classes).index_add_(0, index, weights * values) / torch.where(sums > 0, sums, 1.0)
    # If all values of a class are equal, the mean is set to exactly that value, because a rounding error of the
    # division would become a tiny advantage.
    return torch.where(low == high, low, mean)


def discounted_sums(values: Tensor, joined: Tensor, factor: float) -> Tensor:
    """Return float64 [T]: for each token, the discounted sum of its own value and the values after it in its run.

    A run is a sequence of tokens that ``joined`` bool [T-1] connects: where it is True, token t+1 belongs to the run of
    token t, and S_t = v_t + factor * S_t+1; where it is False, the run ends and S_t = v_t. ``values`` float64 [T] hold
    v and are overwritten with the result. ``factor`` is in [0, 1].

    Each pass doubles the number of tokens that a sum covers (1, 2, 4, ...), so the number of passes grows with the
    logarithm of the longest run's length.
    """
    span, zero = 1, values.new_zeros(())
    # Allocated once, because allocating this tensor in each pass would take longer than the pass.
    carried = torch.empty_like(values)
    while factor > 0 and bool(joined.any()):
        values[:-span].add_(torch.where(joined, values[span:], zero, out=carried[span:]), alpha=factor)
        joined = joined[:-span] & joined[span:]
        span, factor = 2 * span, factor * factor
    return values


def whitened(values: Tensor, members: Tensor | None, times: Tensor | None = None) -> Tensor:
    """Whiten ``values`` float64 [K]: return (value - mean) / sqrt(variance + 1e-8).

    Mean and variance (divisor n-1) are computed over the values selected by ``members`` bool [K], or over all values if
    it is None. ``times`` float64 [K] states how often each value counts in them; by default once. If all selected
    values are equal, only the mean is subtracted, so that they become exactly 0. If no value is selected, ``values``
    are returned unchanged.
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


def limited(values: Tensor, members: Tensor, count: Tensor) -> Tensor:
    """Limit ``values`` float64 [K], which a standard deviation has divided, to [-sqrt(count), sqrt(count)].

    Only values where ``members`` bool [K] is False are limited. ``count`` (one number, or [K]) is the number of scores
    from which the mean and the deviation were computed. None of n scores lies sqrt(n) deviations away from their mean,
    but another score may lie any number of deviations away. Where the scores of tokens are whitened, ``count`` is the
    number of trajectories, because the limit that the number of tokens gives would hardly ever apply.
    """
    limit = count.double().clamp(min=1).sqrt()
    return torch.where(members, values, values.clamp(-limit, limit))


def _outcome(advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) for an estimator with one advantage per trajectory.

    Both are ``advantages`` float64 [N] as a column [N, 1], which holds for all tokens of a trajectory.
    """
    column = advantages[:, None]
    return column, column


def _per_token(rewards: Rewards, advantages: Tensor, returns: Tensor, whiten: bool) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) as float32 [N, L] for float64 [T] each; ``whiten``: whiten the advantages first."""
    spread_returns = rewards.spread(returns)
    if whiten:
        if torch.equal(rewards.baseline, rewards.valid):
            advantages = whitened(advantages, None)
        else:
            members = rewards.repeat(rewards.baseline)
            advantages = limited(whitened(advantages, members), members, rewards.baseline.sum())
    elif advantages is returns:
        return spread_returns, spread_returns
    return rewards.spread(advantages), spread_returns


def _input(name: str, given: Tensor, shape: torch.Size) -> Tensor:
    if given.shape != shape:
        raise ValueError(f"{name} has shape {list(given.shape)}, the rewards ask for {list(shape)}")
    return given
