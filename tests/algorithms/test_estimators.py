"""Tests of the advantage estimators against naive float64 loops over their definitions, against numbers worked out
by hand, and against properties that hold for all of them."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gleanrl.algorithms.advantages import ESTIMATORS, discounted_sums, estimate
from gleanrl.utils.errors import UserError
from tests.strategies import examples

LOCAL = ("grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "remax", "gigpo", "state_gae")
WHOLE = ("gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")  # these depend on the whole batch
NAMES = (*LOCAL, *WHOLE)
OF_TURNS = ("gigpo", "state_gae")  # their advantages differ between the turns of a trajectory
OF_TOKENS = ("reinforce_plus_plus", "remax", "gae")  # their advantages differ between the tokens of a trajectory

Matrix = list[list[float]]


def naive(name: str, batch: dict[str, Any], **options: Any) -> tuple[Matrix, Matrix]:
    """Compute advantages and returns from the definitions, one trajectory and one token at a time."""
    lists = {key: value.tolist() for key, value in batch.items()}
    rewards, mask, valid, baseline = (lists[key] for key in ("rewards", "mask", "valid", "baseline"))
    rows, length = range(len(mask)), len(mask[0])
    tokens = [[t for t in range(length) if mask[i][t] and valid[i]] for i in rows]
    advantages, returns = [[0.0] * length for _ in rows], [[0.0] * length for _ in rows]
    if name in OF_TOKENS:
        for i in rows:
            earned = naive_credited(rewards[i], tokens[i]) if valid[i] else {}
            after: int | None = None
            for t in reversed(tokens[i]):
                follows = after is not None and (
                    name != "reinforce_plus_plus" or options.get("across_turns", True) or after == t + 1
                )
                gamma = options.get("gamma", 1.0) if follows else 0.0
                if name == "gae":
                    value, next_value = lists["values"][i][t], lists["values"][i][after] if after is not None else 0.0
                    next_advantage = advantages[i][after] if after is not None else 0.0
                    lam = options.get("lam", 1.0)
                    advantages[i][t] = earned[t] + gamma * next_value - value + gamma * lam * next_advantage
                    returns[i][t] = advantages[i][t] + value
                else:
                    returns[i][t] = earned[t] + gamma * (returns[i][after] if after is not None else 0.0)
                    advantages[i][t] = returns[i][t] - (lists["reward_baselines"][i] if name == "remax" else 0.0)
                after = t
    elif name in OF_TURNS:
        advantages = naive_turns(name, lists, tokens, **options)
    else:
        scores = [sum(row) for row in rewards]
        for i in rows:
            for t in tokens[i]:
                advantages[i][t] = naive_outcome(name, i, scores, lists, [len(row) for row in tokens], **options)
    if name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae") and options.get("whiten", True):
        sample = [advantages[i][t] for i in rows if baseline[i] for t in tokens[i]]
        mean = statistics.fmean(sample) if sample else 0.0
        scale = 1 / math.sqrt(statistics.variance(sample) + 1e-8) if len(set(sample)) > 1 else 1.0
        counted = [i for i in rows if valid[i] and baseline[i] and (tokens[i] or name in OF_TOKENS)]
        for i in rows:
            for t in tokens[i]:
                advantages[i][t] = naive_limited((advantages[i][t] - mean) * scale, i, counted)
    if name not in OF_TOKENS:  # members that are compared with none have no advantage
        compared = {lists["group"][i] for i in rows if valid[i] and baseline[i]}
        advantages = [row if lists["group"][i] in compared else [0.0] * length for i, row in enumerate(advantages)]
    return advantages, returns if name in OF_TOKENS else advantages


def naive_turns(
    name: str,
    lists: dict[str, Any],
    tokens: list[list[int]],
    gamma: float = 0.95,
    lam: float = 0.9,
    weight: float = 1.0,
    normalize: bool = True,
) -> Matrix:
    """Compute the advantages of turn-level credit, one turn at a time."""
    scores = [sum(row) for row in lists["rewards"]]
    found = [[0.0] * len(row) for row in lists["mask"]]
    members = []  # (trajectory, turn number, tokens, state, return), the last turn of a trajectory first
    for i, own in enumerate(tokens):
        earned = naive_credited(lists["rewards"][i], own) if own else {}
        total = 0.0
        for number in sorted({lists["turns"][i][t] for t in own}, reverse=True):
            of_turn = [t for t in own if lists["turns"][i][t] == number]
            total = sum(earned[t] for t in of_turn) + gamma * total
            members.append((i, of_turn, lists["states"][i][of_turn[0]], total))
    after: tuple[int, float, float, float] = (-1, 0.0, 0.0, 0.0)  # trajectory, return, value and advantage of the next
    for i, of_turn, state, total in members:
        peers = [
            (j, r)
            for j, _, s, r in members
            if lists["baseline"][j] and lists["group"][j] == lists["group"][i] and s == state
        ]
        returns = [r for _, r in peers]
        if name == "state_gae":
            next_return, value_after, next_advantage = after[1:] if after[0] == i else (0.0, 0.0, 0.0)
            value = statistics.fmean(returns) if len(returns) > 1 else total
            earned_here = total - gamma * next_return
            advantage = earned_here + gamma * value_after - value + gamma * lam * next_advantage
            after = (i, total, value, advantage)
        else:
            advantage = 0.0
            if len(returns) > 1:
                advantage = total - statistics.fmean(returns)
                if normalize:
                    advantage /= (statistics.stdev(returns) or 1.0) + 1e-6
                    if not lists["baseline"][i]:
                        advantage = min(max(advantage, -math.sqrt(len(returns))), math.sqrt(len(returns)))
            episode = naive_outcome("grpo" if normalize else "dr_grpo", i, scores, lists, [len(row) for row in tokens])
            advantage = episode + weight * advantage
        for t in of_turn:
            found[i][t] = advantage
    return found


def naive_outcome(
    name: str, i: int, scores: list[float], lists: dict[str, Any], lengths: list[int], f_norm: float = 1.0
) -> float:
    """The advantage of trajectory ``i``, which is the same at each of its tokens."""
    group, valid, baseline = lists["group"], lists["valid"], lists["baseline"]
    members = [j for j in range(len(scores)) if valid[j] and group[j] == group[i]]
    peers = [j for j in members if baseline[j]]
    lone = peers in ([], [i])
    mean = 0.0 if lone else sum(scores[j] for j in peers) / len(peers)
    deviation = (statistics.stdev(scores[j] for j in peers) if len(peers) > 1 else 0.0) or 1.0
    if name == "grpo":
        return naive_limited((scores[i] - mean) / (deviation + 1e-6), i, peers)
    if name == "rloo":
        others = [scores[j] for j in peers if j != i]
        return scores[i] - sum(others) / len(others) if others else scores[i]
    if name == "grpo_passk":
        rivals = [scores[j] for j in peers if j != i]
        return naive_limited(max(scores[i] - max(rivals), 0.0) / (deviation + 1e-6), i, peers) if rivals else 0.0
    if name == "opo":
        weight = sum(lengths[j] for j in peers)
        weighted = sum(lengths[j] * scores[j] for j in peers)
        return scores[i] - (0.0 if lone or not weight else weighted / weight)
    if name == "gpg":
        counted = [scores[j] for j in range(len(scores)) if valid[j] and baseline[j]]
        return len(counted) / max(1, sum(score != 0 for score in counted)) * (scores[i] - mean) / f_norm
    assert name in ("dr_grpo", "reinforce_plus_plus_baseline")
    return scores[i] - mean


def naive_limited(advantage: float, i: int, peers: list[int]) -> float:
    """Limit the advantage of a trajectory that is not one of ``peers`` to the square root of their number."""
    limit = math.inf if i in peers else math.sqrt(max(len(peers), 1))
    return min(max(advantage, -limit), limit)


def naive_credited(rewards: list[float], tokens: list[int]) -> dict[int, float]:
    """Credit each reward to the last trained token at or before it, or else to the first trained token."""
    earned = dict.fromkeys(tokens, 0.0)
    for at, reward in enumerate(rewards):
        if tokens:
            earned[max((t for t in tokens if t <= at), default=tokens[0])] += reward
    return earned


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.lists(st.integers(1, 16), min_size=1, max_size=5))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group = np.repeat(random.choice(10_000, len(sizes), replace=False) - 5000, sizes)
    count, length = group.size, int(random.integers(1, 10))
    scores = {
        "binary": random.integers(0, 2, (count, length)),
        "real": random.normal(0, 3, (count, length)),
        "equal": np.full((count, length), 0.1),
        "thirds": random.integers(0, 4, (count, length)) / 3,
        "large": random.normal(0, 1e6, (count, length)),
        "small": random.normal(0, 1e-6, (count, length)),
    }[draw(st.sampled_from(["binary", "real", "equal", "thirds", "large", "small"]))]
    mask = random.random((count, length)) < draw(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]))  # with holes
    mask[random.random(count) < draw(st.sampled_from([0.0, 0.2]))] = False
    where = draw(st.sampled_from(["dense", "anywhere", "last trained token"]))
    if where != "dense":
        at = random.integers(0, length, count)
        if where == "last trained token":
            at = length - 1 - mask[:, ::-1].argmax(-1)
        scores = scores[:, :1] * (np.arange(length) == at[:, None])
    valid = random.random(count) < draw(st.sampled_from([1.0, 0.7]))
    turns = np.cumsum(random.random(mask.shape) < 0.5, -1)  # the turns of a row, with holes in their numbers
    state_of_turn = random.integers(0, draw(st.sampled_from([1, 3])), (count, length + 1))
    order = random.permutation(count)
    batch = {
        "rewards": np.where(valid[:, None], scores, np.nan),
        "mask": mask,
        "group": group[order],
        "valid": valid,
        "turns": turns,
        "states": np.take_along_axis(state_of_turn, turns, -1),
        "baseline": random.random(count) < draw(st.sampled_from([1.0, 0.7])),
        "values": np.where(mask & valid[:, None], random.normal(0, 2, mask.shape), np.nan),
        "reward_baselines": np.where(valid, random.normal(0, 2, count), np.nan),
    }
    return {key: value.astype(np.float32) if value.dtype == np.float64 else value for key, value in batch.items()}


def paired(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch without the groups that have exactly one valid member, because grpo_passk refuses these."""
    members = {g: int(batch["valid"][batch["group"] == g].sum()) for g in batch["group"].tolist()}
    keep = np.array([members[g] != 1 for g in batch["group"].tolist()])
    return {key: value[keep] for key, value in batch.items()}


def run(name: str, batch: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
    inputs = {need: tensors[need] for need in ESTIMATORS.get(name).needs}
    return estimate(
        name,
        *(tensors[key] for key in ("rewards", "mask", "group")),
        valid=tensors["valid"],
        baseline_members=tensors["baseline"],
        **inputs,
        **options,
    )


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "gpg": [{"f_norm": 2.5}],
    "reinforce_plus_plus": [
        {"gamma": 0.9},
        {"across_turns": False},
        {"gamma": 0.0, "whiten": False},
        {"gamma": 0.7, "across_turns": False, "whiten": False},
    ],
    "gigpo": [{"normalize": False}, {"gamma": 0.5, "weight": 0.3}, {"weight": 0.0}],
    "state_gae": [{"gamma": 1.0, "lam": 1.0}, {"gamma": 0.7, "lam": 0.0}],
    "gae": [{"gamma": 0.9, "lam": 0.8}, {"gamma": 0.99, "lam": 0.95, "whiten": False}, {"lam": 0.0}, {"gamma": 0.0}],
}
CASES = [(name, options) for name in NAMES for options in [{}, *OPTIONS.get(name, [])]]


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=examples(40))
@given(batch=batches())
def test_estimators_equal_the_naive_definition(name: str, options: dict[str, Any], batch: dict[str, Any]) -> None:
    batch = paired(batch) if name == "grpo_passk" else batch
    assume(len(batch["group"]))
    advantages, returns = run(name, batch, **options)
    # Both compute in float64 and round once; where large rewards cancel, only the rounding error is left.
    size = max(1.0, float(np.nanmax(np.abs(batch["rewards"]), initial=0.0)))
    for got, wanted in zip((advantages, returns), naive(name, batch, **options), strict=True):
        np.testing.assert_allclose(got.numpy(), np.array(wanted), rtol=1e-6, atol=2e-6 if size < 100 else 1e-8 * size)
        assert got.dtype == torch.float32
        assert torch.isfinite(got).all()


def test_registered_estimators_declare_their_scope_and_inputs() -> None:
    assert set(NAMES) <= set(ESTIMATORS.names())
    assert [name for name in NAMES if ESTIMATORS.get(name).group_local] == list(LOCAL)
    lone = {"grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", *OF_TURNS}
    assert {name for name in NAMES if ESTIMATORS.get(name).group_baseline} == lone
    needs = {name: set(ESTIMATORS.get(name).needs) for name in NAMES if ESTIMATORS.get(name).needs}
    of_turns = {name: {"turns", "states"} for name in OF_TURNS}
    assert needs == {"remax": {"reward_baselines"}, "gae": {"values"}, **of_turns}


@pytest.mark.parametrize("name", LOCAL)
@settings(max_examples=examples(30))
@given(batch=batches())
def test_group_local_advantages_do_not_depend_on_other_groups(name: str, batch: dict[str, Any]) -> None:
    batch = paired(batch) if name == "grpo_passk" else batch
    whole, _ = run(name, batch)
    for group in np.unique(batch["group"]):
        rows = batch["group"] == group
        alone, _ = run(name, {key: value[rows] for key, value in batch.items()})
        assert torch.equal(alone, whole[torch.tensor(rows)])


@pytest.mark.parametrize("name", WHOLE)
def test_whole_batch_advantages_depend_on_other_groups(name: str) -> None:
    rewards = torch.tensor([[1.0], [0.0], [4.0], [4.0]])
    inputs = {"values": torch.zeros(4, 1)} if name == "gae" else {}
    halves = {key: value[:2] for key, value in inputs.items()}
    whole, _ = estimate(name, rewards, torch.ones(4, 1), torch.tensor([0, 0, 1, 2]), **inputs)
    alone, _ = estimate(name, rewards[:2], torch.ones(2, 1), torch.tensor([0, 0]), **halves)
    assert not torch.allclose(whole[:2], alone, atol=0.01)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(30))
@given(batch=batches(), seed=st.integers(0, 1000))
def test_the_order_of_rows_does_not_matter(name: str, batch: dict[str, Any], seed: int) -> None:
    batch = paired(batch) if name == "grpo_passk" else batch
    order = np.random.default_rng(seed).permutation(len(batch["group"]))
    straight = run(name, batch)
    shuffled = run(name, {key: value[order] for key, value in batch.items()})
    for one, other in zip(straight, shuffled, strict=True):
        torch.testing.assert_close(one[torch.from_numpy(order)], other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"remax", "gae", *OF_TURNS}))
@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e-6, 1e6, 7.7])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_give_advantages_of_exactly_zero(name: str, score: float, size: int) -> None:
    rewards = torch.full((size, 1), score, dtype=torch.float64)  # in floats, 0.1 + 0.1 + 0.1 != 0.3
    rewards = torch.nn.functional.pad(rewards, (3, 0))
    mask = torch.ones(size, 4)
    mask[0, :2] = 0  # lengths differ
    advantages, _ = estimate(name, rewards, mask, torch.zeros(size, dtype=torch.long))
    assert not advantages.any()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(30))
@given(batch=batches())
def test_invalid_members_do_not_affect_the_others(name: str, batch: dict[str, Any]) -> None:
    batch = paired(batch) if name == "grpo_passk" else batch
    with_them = run(name, batch)
    keep = batch["valid"]
    without = run(name, {key: value[keep] for key, value in batch.items()})
    for one, other in zip(with_them, without, strict=True):
        assert not one[torch.from_numpy(~keep)].any()
        torch.testing.assert_close(one[torch.from_numpy(keep)], other, rtol=1e-6, atol=1e-6)


@settings(max_examples=examples(60))
@given(batch=batches())
def test_every_reward_is_credited_to_a_trained_token(batch: dict[str, Any]) -> None:
    _, returns = run("remax", batch)
    trained = batch["mask"] & batch["valid"][:, None]
    scores = np.where(batch["valid"], batch["rewards"].astype(np.float64).sum(-1), 0.0)
    first = returns.numpy()[np.arange(len(trained)), trained.argmax(-1)]  # the return at the first trained token
    size = max(1.0, float(np.nanmax(np.abs(batch["rewards"]), initial=0.0)))
    np.testing.assert_allclose(first, np.where(trained.any(-1), scores, 0.0), rtol=1e-6, atol=1e-6 * size)


def one_group(rewards: list[list[float]], mask: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(rewards), torch.tensor(mask), torch.zeros(len(mask), dtype=torch.long)


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # rewards 3, 1, 2: mean 2, deviation 1
        ("grpo", [1 / (1 + 1e-6), -1 / (1 + 1e-6), 0.0]),
        ("dr_grpo", [1.0, -1.0, 0.0]),
        ("grpo_passk", [1 / (1 + 1e-6), 0.0, 0.0]),  # (3 - 2) / 1 for the best
        ("rloo", [1.5, -1.5, 0.0]),  # 3 - (1 + 2) / 2, 1 - (3 + 2) / 2, 2 - (3 + 1) / 2
        ("opo", [1.25, -0.75, 0.25]),  # lengths 1, 2, 1: baseline (3 + 2 * 1 + 2) / 4
        ("gpg", [1.0, -1.0, 0.0]),  # no reward is 0: alpha is 1
    ],
)
def test_advantages_of_three_members_equal_those_worked_out_by_hand(name: str, expected: list[float]) -> None:
    rewards, mask, group = one_group([[0, 3.0], [0, 1.0], [0, 2.0]], [[0, 1], [1, 1], [0, 1]])
    advantages, returns = estimate(name, rewards, mask, group)
    assert advantages[:, 1].tolist() == pytest.approx(expected, abs=1e-7)
    assert advantages[:, 0].tolist() == [0.0, advantages[1, 1].item(), 0.0]
    assert torch.equal(advantages, returns)


# Three members with two, two and one turns. Members 0 and 1 begin in state 0. Member 0 goes on in state 1, and member 1
# in state 2, in which member 2 begins. Only member 0 succeeds. With gamma 0.5 its returns are 0.5 and 1.
TURNS: dict[str, Any] = {
    "token_rewards": torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 0.0], [0, 0, 0, 0.0]]),
    "mask": torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 0, 0]]),
    "group": torch.zeros(3, dtype=torch.long),
    "turns": torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]),
    "states": torch.tensor([[0, 0, 0, 1], [0, 0, 2, 2], [2, 2, 0, 0]]),
    "gamma": 0.5,
}


def test_gigpo_of_three_members_equals_numbers_worked_out_by_hand() -> None:
    third = 1 / 3
    got, _ = estimate("gigpo", **TURNS, normalize=False)
    # episode: 2/3, -1/3, -1/3; state 0: returns 0.5 and 0 with mean 0.25; state 1: one turn only; state 2: 0 and 0
    expected = [[2 * third + 0.25] * 2 + [0, 2 * third], [-third - 0.25, 0, -third, -third], [-third, -third, 0, 0]]
    torch.testing.assert_close(got, torch.tensor(expected))
    got, _ = estimate("gigpo", **TURNS, normalize=False, weight=2.0)
    assert got[:, 0].tolist() == pytest.approx([2 * third + 0.5, -third - 0.5, -third])
    got, _ = estimate("gigpo", **TURNS)
    # deviations: of 1, 0, 0 sqrt(1/3), of 0.5 and 0 sqrt(1/8)
    first = [
        2 * third / math.sqrt(third) + 0.25 / math.sqrt(0.125),
        -third / math.sqrt(third) - 0.25 / math.sqrt(0.125),
    ]
    assert got[:, 0].tolist() == pytest.approx([*first, -third / math.sqrt(third)], rel=1e-5)


def test_state_gae_of_three_members_equals_numbers_worked_out_by_hand() -> None:
    got, _ = estimate("state_gae", **TURNS, lam=0.5)
    # member 0: V is 0.25 and, alone in its state, its own return 1: A_1 = 0, A_0 = 0 + 0.5 * 1 - 0.25 + 0.25 * 0
    # member 1: V is 0.25 and 0: A_1 = 0, A_0 = -0.25
    torch.testing.assert_close(got, torch.tensor([[0.25, 0.25, 0, 0], [-0.25, 0, 0, 0], [0.0, 0, 0, 0]]))


def test_a_state_is_compared_within_its_group_only() -> None:
    apart = {**TURNS, "group": torch.tensor([0, 0, 1]), "token_rewards": TURNS["token_rewards"].flip(0)}
    assert not estimate("state_gae", **apart)[0][2].any()


def test_a_stored_member_is_compared_with_the_fresh_ones_in_the_same_state() -> None:
    fresh = torch.tensor([False, True, True])
    got, _ = estimate("gigpo", **TURNS, normalize=False, baseline_members=fresh)
    # state 0 has one fresh turn only; members 1 and 2 share state 2 with equal returns
    assert got[:, 0].tolist() == [1.0, 0.0, 0.0]
    both = {**TURNS, "states": torch.zeros(3, 4, dtype=torch.long)}
    got, _ = estimate("gigpo", **both, baseline_members=fresh)
    # the deviation of three zeros counts as 1, and no limit of sqrt(3) is reached
    assert got[0].tolist() == pytest.approx([1 + 0.5, 1 + 0.5, 0, 2], abs=1e-5)


def test_gpg_scales_advantages_up_for_members_without_reward() -> None:
    rewards, mask, _ = one_group([[2.0], [0.0], [1.0]], [[1], [1], [1]])
    group = torch.tensor([7, 7, 3])  # means 1 and, for one member, 0; two of three rewards are not 0: alpha 3 / 2
    assert estimate("gpg", rewards, mask, group)[0][:, 0].tolist() == [1.5, -1.5, 1.5]
    assert estimate("gpg", rewards, mask, group, f_norm=3.0)[0][:, 0].tolist() == [0.5, -0.5, 0.5]
    assert not estimate("gpg", torch.zeros(3, 1), mask, group)[0].any()


def test_pass_at_k_rewards_a_single_best_member_and_nothing_for_a_tie() -> None:
    rewards, mask, group = one_group([[1.0], [1.0], [0.0]], [[1], [1], [1]])
    assert not estimate("grpo_passk", rewards, mask, group)[0].any()
    invalid = torch.tensor([True, False, True])  # 1 against 0: deviation sqrt(1/2)
    got, _ = estimate("grpo_passk", rewards, mask, group, valid=invalid)
    assert got[:, 0].tolist() == pytest.approx([math.sqrt(2), 0.0, 0.0], abs=1e-5)
    # the deviation of the failures is 0 and counts as 1, so the stored success has advantage 1
    fresh = torch.tensor([False, True, True])
    rewards = torch.tensor([[1.0], [0.0], [0.0]])
    got, _ = estimate("grpo_passk", rewards, mask, group, baseline_members=fresh)
    assert got[:, 0].tolist() == pytest.approx([1.0, 0.0, 0.0], abs=2e-6)


def test_stored_successes_do_not_reduce_the_advantage_of_a_fresh_one() -> None:
    rewards, mask, group = one_group([[1.0], [0.0], [0.0], [1.0], [2.0]], [[1]] * 5)
    fresh = torch.tensor([True, True, True, False, False])
    alone, _ = estimate("grpo_passk", rewards[:3], mask[:3], group[:3])
    both, _ = estimate("grpo_passk", rewards, mask, group, baseline_members=fresh)
    assert torch.equal(both[:3], alone)
    # a lead of 1, divided by the deviation sqrt(1/3)
    assert both[:, 0].tolist() == pytest.approx([3**0.5, 0, 0, 0, 3**0.5], abs=1e-5)
    lone, _ = estimate("grpo_passk", rewards, mask, group, baseline_members=torch.tensor([True] + [False] * 4))
    assert lone[:, 0].tolist() == pytest.approx([0, 0, 0, 0, 1], abs=2e-6)
    none, _ = estimate("grpo_passk", rewards, mask, group, baseline_members=torch.zeros(5, dtype=torch.bool))
    assert not none.any()


def test_pass_at_k_refuses_groups_with_one_valid_member_but_not_with_none() -> None:
    rewards, mask, group = torch.ones(3, 1), torch.ones(3, 1), torch.tensor([0, 1, 1])
    with pytest.raises(UserError, match=r"1 of the groups have only one valid member; set schedule\.min_valid"):
        estimate("grpo_passk", rewards, mask, group)
    estimate("grpo_passk", rewards, mask, group, valid=torch.tensor([False, True, True]))


def test_returns_stop_at_masked_positions_only_without_across_turns() -> None:
    rewards, mask, group = one_group([[0, 0, 0, 1.0]], [[1, 1, 0, 1]])

    def returns(given: torch.Tensor = rewards, **options: Any) -> list[float]:
        return estimate("reinforce_plus_plus", given, mask, group, gamma=0.5, whiten=False, **options)[1][0].tolist()

    assert returns() == [0.25, 0.5, 0.0, 1.0]
    assert returns(across_turns=False) == [0.0, 0.0, 0.0, 1.0]
    in_hole = torch.tensor([[0, 0, 4.0, 1.0]])  # the 4 is credited to the trained token before
    assert returns(in_hole, across_turns=False) == [2.0, 4.0, 0.0, 1.0]
    # values 0, 0, 1: mean 1/3, variance 1/3
    whitened, raw = estimate("reinforce_plus_plus", rewards, mask, group, across_turns=False)
    third = 1 / 3 / math.sqrt(1 / 3 + 1e-8)
    assert whitened[0].tolist() == pytest.approx([-third, -third, 0.0, 2 * third])
    assert raw[0].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_whitening_takes_the_mean_over_tokens_and_not_over_trajectories() -> None:
    rewards, mask, _ = one_group([[3.0, 0], [1.0, 0], [2.0, 0]], [[1, 0], [1, 1], [1, 0]])
    # r - mean is 1, -1 and, in a group of one, 2; over the tokens 1, -1, -1, 2 the mean is 1/4, the variance 6.75 / 3
    got, _ = estimate("reinforce_plus_plus_baseline", rewards, mask, torch.tensor([0, 0, 1]))
    assert got[:, 0].tolist() == pytest.approx([0.75 / 1.5, -1.25 / 1.5, 1.75 / 1.5])


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"])
def test_whitening_a_single_token_stays_bounded(name: str) -> None:
    inputs = {"values": torch.tensor([[0.5], [0.5]])} if name == "gae" else {}
    rewards, mask, group = torch.tensor([[3.0], [5.0]]), torch.ones(2, 1), torch.tensor([0, 1])
    for chosen in (torch.tensor([True, False]), torch.tensor([False, False])):
        got, _ = estimate(name, rewards, mask, group, baseline_members=chosen, **inputs)
        assert got.abs().max() <= 5.0
    got, _ = estimate(name, rewards, mask, group, valid=torch.tensor([True, False]), **inputs)
    assert not got.any()


def test_a_trajectory_without_trained_tokens_does_not_affect_the_whitening() -> None:
    rewards, mask, group = one_group([[3.0], [5.0]], [[1], [0]])
    got, _ = estimate("reinforce_plus_plus_baseline", rewards, mask, group)
    assert not got.any()  # the only trained token has r - mean = -1, which is also the mean over the tokens


def test_remax_subtracts_the_reward_of_the_greedy_rollout() -> None:
    rewards, mask, group = one_group([[1.0, 0, 2.0]], [[1, 0, 1]])
    advantages, returns = estimate("remax", rewards, mask, group, reward_baselines=torch.tensor([0.5]))
    assert advantages[0].tolist() == [2.5, 0.0, 1.5]
    assert returns[0].tolist() == [3.0, 0.0, 2.0]


def test_gae_equals_numbers_worked_out_by_hand() -> None:
    rewards, mask, group = one_group([[1.0, 0, 2.0]], [[1, 0, 1]])
    options = {"values": torch.tensor([[0.5, torch.nan, 1.0]]), "gamma": 0.5, "lam": 0.5}
    # 2 - 1 = 1; (1 + 0.5 * 1 - 0.5) + 0.25 * 1 = 1.25, the masked position skipped
    raw, returns = estimate("gae", rewards, mask, group, whiten=False, **options)
    assert raw[0].tolist() == [1.25, 0.0, 1.0]
    assert returns[0].tolist() == [1.75, 0.0, 2.0]
    whitened, returns = estimate("gae", rewards, mask, group, **options)  # two values lie 1 / sqrt 2 from their mean
    assert whitened[0].tolist() == pytest.approx([math.sqrt(0.5), 0.0, -math.sqrt(0.5)], rel=1e-5)
    assert returns[0].tolist() == [1.75, 0.0, 2.0]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.3), (1.0, 0.0)])
def test_gae_equals_the_textbook_double_sum(gamma: float, lam: float) -> None:
    random = np.random.default_rng(1)
    rewards, values = random.normal(size=(3, 37)), random.normal(size=(3, 37))
    wanted = np.zeros_like(rewards)
    for i in range(3):
        for t in range(37):
            for k in range(t, 37):
                following = values[i, k + 1] if k < 36 else 0.0
                wanted[i, t] += (gamma * lam) ** (k - t) * (rewards[i, k] + gamma * following - values[i, k])
    options = {"values": torch.from_numpy(values), "gamma": gamma, "lam": lam, "whiten": False}
    got, _ = estimate("gae", torch.from_numpy(rewards), torch.ones(3, 37), torch.arange(3), **options)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-6)


@settings(max_examples=examples(80))
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 300), factor=st.sampled_from([0.0, 0.5, 0.999, 1.0]))
def test_discounted_sums_equal_a_backward_loop(seed: int, size: int, factor: float) -> None:
    random = np.random.default_rng(seed)
    values, joined = random.normal(size=size), random.random(max(0, size - 1)) < random.random() ** 0.1
    wanted = values.copy()
    for t in reversed(range(size - 1)):
        wanted[t] += factor * wanted[t + 1] if joined[t] else 0.0
    got = discounted_sums(torch.from_numpy(values.copy()), torch.from_numpy(joined), factor)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-12)


def test_a_small_reward_is_not_lost_next_to_a_large_one() -> None:
    rewards, mask = torch.zeros(2, 4096, dtype=torch.float64), torch.ones(2, 4096)
    rewards[0, -1], rewards[1, -1] = 1e-9, 1e12  # one cumulative sum over the batch would lose the 1e-9
    _, returns = estimate("remax", rewards, mask, torch.tensor([0, 1]), reward_baselines=torch.zeros(2))
    assert returns[0, 0].item() == pytest.approx(1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewards", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool])
@pytest.mark.parametrize("mask", [torch.int32, torch.bool, torch.float16])
def test_rewards_and_masks_of_any_dtype_give_the_same_result(
    name: str, rewards: torch.dtype, mask: torch.dtype
) -> None:
    given = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 0], [0, 0, 0]])
    trained = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 0], [1, 1, 0]])
    inputs = {"values": torch.full((4, 3), 0.5), "reward_baselines": torch.full((4,), 0.5)}
    inputs["turns"] = inputs["states"] = torch.tensor([[0, 0, 1]] * 4)
    inputs = {need: inputs[need] for need in ESTIMATORS.get(name).needs}
    group = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    got = estimate(name, given.to(rewards), trained.to(mask), group, **inputs)
    wanted = estimate(name, given.float(), trained.bool(), group.long(), **inputs)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "missing"), [("gae", "values"), ("remax", "reward_baselines")])
def test_a_missing_input_raises_a_value_error_that_names_it(name: str, missing: str) -> None:
    arguments = (torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, dtype=torch.long))
    for options in ({}, {missing: None}):
        with pytest.raises(ValueError, match=f"'{name}' needs {missing}: float"):
            estimate(name, *arguments, **options)
    with pytest.raises(ValueError, match=rf"{missing} has shape \[3\], the rewards ask for \[2"):
        estimate(name, *arguments, **{missing: torch.zeros(3)})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("gpg", "f_norm", 0.0),
        ("gpg", "f_norm", math.nan),
        ("reinforce_plus_plus", "gamma", 1.01),
        ("reinforce_plus_plus", "gamma", "0.9"),
        ("reinforce_plus_plus", "whiten", "no"),
        ("reinforce_plus_plus", "across_turns", "no"),
        ("gae", "gamma", -0.1),
        ("gae", "lam", math.nan),
    ],
)
def test_an_invalid_option_value_raises_a_user_error_that_names_it(name: str, option: str, value: Any) -> None:
    inputs = {"values": torch.zeros(2, 3)} if name == "gae" else {}
    with pytest.raises(UserError, match=rf"credit.options.{option} = .*: input should be "):
        estimate(
            name,
            torch.ones(2, 3),
            torch.ones(2, 3),
            torch.zeros(2, dtype=torch.long),
            **inputs,
            **{option: value},
        )


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_gives_empty_advantages(name: str) -> None:
    inputs = {"values": torch.zeros(0, 3), "reward_baselines": torch.zeros(0)}
    inputs["turns"] = inputs["states"] = torch.zeros(0, 3, dtype=torch.long)
    inputs = {need: inputs[need] for need in ESTIMATORS.get(name).needs}
    advantages, returns = estimate(
        name, torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), **inputs
    )
    assert advantages.shape == returns.shape == (0, 3)
